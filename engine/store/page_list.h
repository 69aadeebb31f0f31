// SPDX-License-Identifier: Apache-2.0
// PageList: the pages of one (sequence, layer, head class), shared copy-on-write with forks.
//
//   PageList --> Root (refcounted) --> Segment (refcounted, up to 128 entries) --> pages
//       \--> tail: the last page while it is not full, referred to by the list itself
//       \--> pending: pages reserved for tokens that are not published yet
//
// A fork of the whole length copies the list: one reference more on the root, one more on the tail
// page. Whoever then changes a shared root, segment or page copies that one first. A segment owns
// one reference on each of its pages, a list one on its tail page and on each pending page.
//
// Pages are written while tokens are reserved, and sealed else.
//
// The token at position p lies in slot p % kPageTokens of its page. Positions without a page have
// been dropped.
//
// Threads: the driver thread.  Memory: 12 bytes a page on the heap; pages belong to the bank.
#ifndef KVM_ENGINE_STORE_PAGE_LIST_H_
#define KVM_ENGINE_STORE_PAGE_LIST_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/kv_view.h"
#include "base/limits.h"
#include "base/status.h"
#include "engine/store/account.h"
#include "tiers/page_table.h"
#include "tiers/slab_class.h"

namespace kvm::engine {

// A PageRelief has memory that can be done without.
class PageRelief {
 public:
  // Gives some back; false: there is none.
  virtual bool relieve() = 0;

 protected:
  ~PageRelief() = default;
};

// Returns what attempt() does, again and again where there was no room, as long as relief (may be
// null) gives some back.
template <typename Attempt>
auto with_relief(PageRelief* relief, Attempt attempt) {
  auto result = attempt();
  while (!result.is_ok() && result.status().code() == KVM_ERR_NO_SPACE && relief != nullptr &&
         relief->relieve()) {
    result = attempt();
  }
  return result;
}

// A PageBank is where pages of one client come from, and where pages of any go back to. relief (may
// be null) is asked before NO_SPACE is the answer.
class PageBank {
 public:
  PageBank(tiers::PageTable* pages, const Payers* payers, Account* account,
           PageRelief* relief = nullptr)
      : pages_(pages), payers_(payers), account_(account), relief_(relief) {}

  // The account pays for the page.
  Result<tiers::PageRef> allocate(const tiers::SlabClass& slab_class) const {
    Result<tiers::PageRef> page =
        with_relief(relief_, [&] { return pages_->allocate(slab_class, account_->payer); });
    account_->quota->charge(
        KvBytes::of(page.is_ok() ? slab_class.page_bytes() : 0, slab_class.stays()));
    return page;
  }
  void add_ref(tiers::PageRef page) const { pages_->add_ref(page); }
  void seal(tiers::PageRef page) const { pages_->seal(page); }
  [[nodiscard]] bool unseal(tiers::PageRef page) const { return pages_->unseal(page); }
  void release(tiers::PageRef page) const { release_page(pages_, *payers_, page); }
  const tiers::PageTable& pages() const { return *pages_; }

  // Takes a reference off, and with the last the page's bytes off the account that pays for it.
  static void release_page(tiers::PageTable* pages, const Payers& payers, tiers::PageRef page) {
    const KvBytes page_bytes = bytes_of(*pages, page);
    const Account& payer = payers.at(pages->payer(page));
    payer.quota->give_back(pages->release(page) ? page_bytes : KvBytes{});
  }
  // Returns what a page counts for.
  static KvBytes bytes_of(const tiers::PageTable& pages, tiers::PageRef page) {
    return KvBytes::of(pages.page_bytes(page), pages.slab_class(page).stays());
  }

 private:
  tiers::PageTable* pages_;
  const Payers* payers_;
  Account* account_;
  PageRelief* relief_;
};

// A PageEntry is one page of a list: 12 bytes.
struct PageEntry {
  tiers::PageRef page = tiers::kNoPage;
  uint32_t block = 0;  // slot s holds the token at position block * kPageTokens + s
  uint16_t first = 0;  // first slot that holds a token
  uint16_t count = 0;  // slots that do; 0 with kNoPage only

  uint64_t position() const { return uint64_t{block} * kPageTokens + first; }
  uint64_t end() const { return position() + count; }
};
static_assert(sizeof(PageEntry) == 12);

inline constexpr size_t kSegmentEntries = 128;
// LIMIT: tokens that tables are made for before they are appended: 1 KiB, which nobody pays for.
inline constexpr uint64_t kMaxExpectedTokens = 1 << 20;
// LIMIT: the same over all lists of a sequence: 64 KiB.
inline constexpr uint64_t kMaxExpectedOfLists = 64 * kMaxExpectedTokens;

// A Segment is a stretch of a list's pages that lists may share.
struct Segment {
  uint32_t n_refs = 1;
  std::vector<PageEntry> entries;  // 1 to kSegmentEntries, blocks strictly increasing
};

// A Root is the segments of a list, which lists may share as a whole.
struct Root {
  uint32_t n_refs = 1;
  std::vector<Segment*> segments;  // in position order; one reference on each
};

class PageList {
 public:
  PageList() = default;
  PageList(PageList&& other) noexcept { swap(other); }
  PageList& operator=(PageList&& other) noexcept {
    swap(other);
    return *this;
  }
  PageList(const PageList&) = delete;
  PageList& operator=(const PageList&) = delete;
  // REQUIRES: cleared.
  ~PageList();

  uint64_t length() const { return length_; }  // published tokens, dropped ones included
  uint64_t reserved_length() const { return length_ + n_reserved_; }
  uint64_t n_dropped() const { return n_dropped_; }
  uint64_t dropped_end() const { return dropped_end_; }  // every position from here on is stored

  // --- Sharing. REQUIRES here and below: nothing reserved, unless said otherwise. ---------------

  // Makes this empty list the first n_tokens <= parent.length() of `parent`. O(1) for all of it,
  // else O(segments + kSegmentEntries). This and truncate throw
  // std::bad_alloc: nothing has changed.
  void share(const PageList& parent, uint64_t n_tokens, const PageBank& bank);
  // Takes what memory truncate(n_tokens) needs, which then throws nothing.
  void prepare_truncate(uint64_t n_tokens, const PageBank& bank);
  // Keeps the first n_tokens <= length().
  void truncate(uint64_t n_tokens, const PageBank& bank);
  // Gives up whole segments of tokens beyond n_tokens from the end on, until n_pages or somewhat
  // more went, and is then the list of the tokens before; a segment's worth of them at least stays
  // for truncate(n_tokens). REQUIRES: prepare_truncate(n_tokens). Returns how many went, where a
  // segment that forks share counts as one: 0 when truncate is next.
  uint64_t shorten(uint64_t n_tokens, uint64_t n_pages, const PageBank& bank);
  // Gives everything up, reservations too.
  void clear(const PageBank& bank);
  // Likewise, but stops after n_pages or somewhat more and is then the list of the tokens before.
  // Returns how many went, where a segment or a root that forks share counts as one.
  uint64_t give_up(uint64_t n_pages, const PageBank& bank);

  // --- Restoring a list that was saved. REQUIRES: nothing else but to give it up was done. -------

  // Appends a page, whose reference is taken over, behind those that are there: tokens between have
  // been dropped. At any time it is a list. REQUIRES: the entry has tokens beyond length(), up to
  // the end of its page, or it is the last; expect_entry() was called, which throws std::bad_alloc.
  void restore(const PageEntry& entry, const PageBank& bank);
  void expect_entry(const PageBank& bank) { reserve_entries(1, bank); }
  // That was the last page. REQUIRES: length >= length(), dropped_end <= length, and that is no
  // less than where the last dropped token was.
  void end_restore(uint64_t length, uint64_t dropped_end);

  // --- Appending --------------------------------------------------------------------------------

  // Makes room in the list's own tables for so many tokens, or kMaxExpectedTokens. Throws
  // std::bad_alloc: nothing has changed.
  void expect(uint64_t n_tokens);
  // Tokens that the tables have room for.
  uint64_t room() const {
    return root_ == nullptr ? 0 : root_->segments.capacity() * kSegmentEntries * kPageTokens;
  }
  // Pages that reserve(n_tokens) would allocate, but for one in the place of a tail that moves,
  // which is soon given back.
  uint64_t pages_to_reserve(uint64_t n_tokens, const tiers::SlabClass& slab_class,
                            const tiers::PageTable& pages) const;
  // Takes pages for n_tokens >= 1 more. A tail page that is shared, that moves, or that is of
  // another slab class, will be replaced by a copy: copy_tail fills it. Fails: NO_SPACE, NO_MEMORY;
  // nothing has changed.
  // ENSURES: publishing it needs no memory.
  Status reserve(uint64_t n_tokens, const tiers::SlabClass& slab_class, const PageBank& bank);
  // Copies the tail's tokens into the reserved copy of the tail page, if there is one. Returns
  // whether there was. side: of a pair's layer, which rows of a pair's page are the list's.
  bool copy_tail(const tiers::PageTable& pages,
                 codecs::PairSide side = codecs::PairSide::kNone) const;
  // The page that the reserved token at `position` goes to, and the reserved tokens that go there
  // from it on. REQUIRES: length() <= position < reserved_length().
  PageEntry reserved_piece(uint64_t position) const;
  void publish(const PageBank& bank);
  // Books that were copied for publishing, because forks share them, stay copies.
  void rollback(const PageBank& bank);

  // --- Storing again what was dropped. REQUIRES: nothing reserved. -------------------------------

  // Pages that reserve_dropped would allocate: one for each block of [begin, end) without any.
  // REQUIRES here and below: end * kPageTokens <= length().
  uint64_t pages_to_restore(uint32_t block_begin, uint32_t block_end) const;
  // Takes them, all for full pages; the caller fills them. publish() or rollback() ends it, and
  // until then nothing else is done. Fails: NO_SPACE, NO_MEMORY; nothing has changed.
  // ENSURES: publishing them needs no memory.
  Status reserve_dropped(uint32_t block_begin, uint32_t block_end,
                         const tiers::SlabClass& slab_class, const PageBank& bank);
  std::span<const PageEntry> restored() const { return restored_; }

  // --- What policies do. Tokens may be reserved: publishing one layer of a sequence moves the
  // commit point while others are still to be published. ------------------------------------------

  // Takes what memory drop needs, which then throws nothing.
  void prepare_drop(uint32_t block_begin, uint32_t block_end, const PageBank& bank);
  // Drops the tokens of the full pages with blocks in [begin, end). Returns the number of pages.
  // Throws std::bad_alloc: nothing has changed.
  uint64_t drop(uint32_t block_begin, uint32_t block_end, const PageBank& bank);
  // Takes what memory replace needs of these blocks, which then throws nothing.
  void prepare_replace(uint32_t block_begin, uint32_t block_end, const PageBank& bank);
  // Puts `page` (a reference is taken over, the caller seals it) in the place of the full page of
  // `block`, whose reference is released. REQUIRES: the block is stored, in a segment. Throws
  // std::bad_alloc: nothing has changed, and `page` is still the caller's.
  void replace(uint32_t block, tiers::PageRef page, const PageBank& bank);

  // --- Reading (also while tokens are reserved) -------------------------------------------------

  // Whether every token of [begin, end) is stored. REQUIRES: end <= length().
  bool covers(uint64_t begin, uint64_t end) const;
  // Calls visit(entry, shared) for every page in position order, the reserved ones last, where
  // shared says that another list refers to the page through a shared root or segment (the page's
  // own count tells the rest).
  template <typename Visitor>
  void for_each(Visitor visit) const {
    if (root_ != nullptr) {
      for (const Segment* segment : root_->segments) {
        const bool shared = root_->n_refs > 1 || segment->n_refs > 1;
        for (const PageEntry& entry : segment->entries) {
          visit(entry, shared);
        }
      }
    }
    const PageEntry tail = extended_tail();
    if (tail.page != tiers::kNoPage) {
      visit(tail, false);
    }
    for (size_t i = 0; i < pending_.size(); ++i) {
      visit(pending_entry(i), false);
    }
  }

  // The same for pages with blocks in [begin, end). O(segments before + pages in between).
  template <typename Visitor>
  void for_each_between(uint64_t begin, uint64_t end, Visitor visit) const {
    const auto visit_one = [&](const PageEntry& entry, bool shared = false) {
      if (entry.page != tiers::kNoPage && entry.block >= begin && entry.block < end) {
        if constexpr (std::is_invocable_v<Visitor, const PageEntry&, bool>) {
          visit(entry, shared);
        } else {
          visit(entry);
        }
      }
    };
    const size_t n_segments = root_ == nullptr ? 0 : root_->segments.size();
    for (size_t i = find_segment(static_cast<uint32_t>(begin)); i < n_segments; ++i) {
      const std::vector<PageEntry>& entries = root_->segments[i]->entries;
      if (entries.front().block >= end) {
        break;
      }
      const bool shared = root_->n_refs > 1 || root_->segments[i]->n_refs > 1;
      std::for_each(entries.begin(), entries.end(),
                    [&](const PageEntry& entry) { visit_one(entry, shared); });
    }
    visit_one(extended_tail());
    for (size_t i = 0; i < pending_.size(); ++i) {
      visit_one(pending_entry(i));
    }
  }

  // Calls visit(begin, end) for every stretch of dropped tokens, in position order. O(pages).
  template <typename Visitor>
  void for_each_gap(Visitor visit) const {
    uint64_t position = 0;
    const auto pass = [&](uint64_t begin, uint64_t end) {
      if (begin > position) {
        visit(position, begin);
      }
      position = end;
    };
    if (n_dropped_ != 0) {
      for_each([&](const PageEntry& entry, bool) { pass(entry.position(), entry.end()); });
      pass(length_, length_);
    }
  }

  // Says whether entries, counts and lengths fit each other. O(pages).
  bool is_valid() const;

  // For accounts in tests: the parts, as they are.
  const Root* root() const { return root_; }
  const PageEntry& tail() const { return tail_; }
  tiers::PageRef pending_tail() const { return pending_tail_; }
  const std::vector<tiers::PageRef>& pending() const { return pending_; }

 private:
  void swap(PageList& other) noexcept;
  uint32_t tail_fill() const { return static_cast<uint32_t>(length_ % kPageTokens); }
  // Reserved tokens that go into the page that length_ lies in (0 where it begins a new page).
  uint64_t reserved_in_tail() const;
  // The tail as it is once the reservation is published: with the copy's page and its tokens.
  PageEntry extended_tail() const;
  PageEntry pending_entry(size_t index) const;
  bool tail_needs_page(const tiers::SlabClass& slab_class, const tiers::PageTable& pages) const;
  // The root, or the segment at `index` of it, for changing: unshared first.
  Root* own_root();
  Segment* own_segment(size_t index, const PageBank& bank);
  // Makes room for n more entries of push_entry, which then throws nothing.
  void reserve_entries(uint64_t n, const PageBank& bank);
  void push_entry(const PageEntry& entry, const PageBank& bank);
  // Removes everything from `block` on from the root.
  void cut_root(uint32_t block, const PageBank& bank);
  // Index of the first segment that ends at or beyond `block`; the number of segments if none does.
  size_t find_segment(uint32_t block) const;
  // The stored entry of a block, from the segments or the tail; page == kNoPage: dropped.
  PageEntry find_entry(uint32_t block) const;
  uint64_t count_stored() const;
  // The blocks of [begin, end) that have no page, as entries without one.
  template <typename Visitor>
  void for_each_missing(uint32_t block_begin, uint32_t block_end, Visitor visit) const;
  // A root of this list's pages and of restored_, sorted in; few segments are not full. Throws
  // std::bad_alloc: nothing has changed.
  Root* make_restored_root(const PageBank& bank) const;
  void publish_restored(const PageBank& bank);
  // The part of is_valid() that does not grow with the list: tail, reservation and lengths.
  bool is_end_valid() const;
  // Releases segments from the end on until n_keep are left or n_pages went, the tail before them.
  // REQUIRES: the root is this list's own. The length is that of what is left.
  uint64_t pop_segments(size_t n_keep, uint64_t n_pages, const PageBank& bank);
  static void release_segment(Segment* segment, const PageBank& bank);
  static void release_root(Root* root, const PageBank& bank);  // null: nothing

  Root* root_ = nullptr;
  PageEntry tail_;
  uint64_t length_ = 0;
  uint64_t n_dropped_ = 0;
  uint64_t dropped_end_ = 0;  // every position from here on is stored
  uint64_t n_reserved_ = 0;
  tiers::PageRef pending_tail_ = tiers::kNoPage;  // replaces the tail's page at publish
  std::vector<tiers::PageRef> pending_;
  std::vector<std::unique_ptr<Segment>> spare_;  // for what is reserved
  // Pages of dropped blocks that are reserved, and the root that has them: it replaces root_.
  std::vector<PageEntry> restored_;
  Root* restored_root_ = nullptr;
};

// Copies rows [first, first + count) of every head from one page to another, converting where the
// slab classes differ. side: as copy_tail has it. REQUIRES: both have the same heads and dims.
void copy_page_rows(const tiers::PageTable& pages, tiers::PageRef from, tiers::PageRef to,
                    codecs::PairSide side, uint32_t first, uint32_t count);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_PAGE_LIST_H_
