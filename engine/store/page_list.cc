// SPDX-License-Identifier: Apache-2.0
#include "engine/store/page_list.h"

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "base/assert.h"
#include "base/reserve.h"
#include "base/round.h"
#include "base/undo.h"
#include "codecs/convert.h"

namespace kvm::engine {

using tiers::kNoPage;
using tiers::PageRef;
using tiers::PageTable;
using tiers::SlabClass;

PageList::~PageList() {
  KVM_ASSERT(root_ == nullptr && tail_.page == kNoPage && pending_tail_ == kNoPage &&
             pending_.empty() && restored_.empty());
}

void PageList::swap(PageList& other) noexcept {
  std::swap(root_, other.root_);
  std::swap(tail_, other.tail_);
  std::swap(length_, other.length_);
  std::swap(n_dropped_, other.n_dropped_);
  std::swap(dropped_end_, other.dropped_end_);
  std::swap(n_reserved_, other.n_reserved_);
  std::swap(pending_tail_, other.pending_tail_);
  std::swap(pending_, other.pending_);
  std::swap(spare_, other.spare_);
  std::swap(restored_, other.restored_);
  std::swap(restored_root_, other.restored_root_);
}

void PageList::release_segment(Segment* segment, const PageBank& bank) {
  if (--segment->n_refs > 0) {
    return;
  }
  for (const PageEntry& entry : segment->entries) {
    bank.release(entry.page);
  }
  delete segment;
}

void PageList::release_root(Root* root, const PageBank& bank) {
  if (root == nullptr || --root->n_refs > 0) {
    return;
  }
  for (Segment* segment : root->segments) {
    release_segment(segment, bank);
  }
  delete root;
}

Root* PageList::own_root() {
  if (root_ == nullptr) {
    root_ = new Root;
  } else if (root_->n_refs > 1) {
    auto copy = std::make_unique<Root>();
    copy->segments = root_->segments;
    for (Segment* segment : copy->segments) {
      ++segment->n_refs;
    }
    --root_->n_refs;
    root_ = copy.release();
  }
  return root_;
}

void PageList::expect(uint64_t n_tokens) {
  constexpr uint64_t kSegmentTokens = kSegmentEntries * kPageTokens;
  if (n_tokens != 0) {
    own_root()->segments.reserve(div_up(std::min(n_tokens, kMaxExpectedTokens), kSegmentTokens));
  }
}

Segment* PageList::own_segment(size_t index, const PageBank& bank) {
  Segment*& place = own_root()->segments[index];
  if (place->n_refs > 1) {
    auto copy = std::make_unique<Segment>();
    copy->entries = place->entries;
    for (const PageEntry& entry : copy->entries) {
      bank.add_ref(entry.page);
    }
    --place->n_refs;
    place = copy.release();
  }
  return place;
}

namespace {

// At least twice what there was, up to a whole segment.
void reserve_in(Segment* segment, uint64_t n_entries) {
  if (n_entries > segment->entries.capacity()) {
    segment->entries.reserve(
        std::min(kSegmentEntries, std::max(n_entries, 2 * segment->entries.capacity())));
  }
}

}  // namespace

void PageList::reserve_entries(uint64_t n, const PageBank& bank) {
  if (n == 0) {
    return;
  }
  std::vector<Segment*>& segments = own_root()->segments;
  if (!segments.empty() && segments.back()->entries.size() < kSegmentEntries) {
    Segment* last = own_segment(segments.size() - 1, bank);
    const uint64_t n_here = std::min<uint64_t>(n, kSegmentEntries - last->entries.size());
    reserve_in(last, last->entries.size() + n_here);
    n -= n_here;
  }
  // The last spare one is used first: the one that will not be full comes before the others.
  while (n != 0) {
    const uint64_t n_part = n % kSegmentEntries == 0 ? kSegmentEntries : n % kSegmentEntries;
    spare_.push_back(std::make_unique<Segment>());
    reserve_in(spare_.back().get(), n_part);
    n -= n_part;
  }
  reserve_growing(segments, segments.size() + spare_.size());
}

void PageList::push_entry(const PageEntry& entry, const PageBank& bank) {
  Root* root = own_root();
  if (root->segments.empty() || root->segments.back()->entries.size() == kSegmentEntries) {
    if (spare_.empty()) {
      // Only where a policy has dropped the segment that had room for what was reserved.
      spare_.push_back(std::make_unique<Segment>());
    }
    root->segments.push_back(spare_.back().release());
    spare_.pop_back();
  }
  own_segment(root->segments.size() - 1, bank)->entries.push_back(entry);
}

size_t PageList::find_segment(uint32_t block) const {
  if (root_ == nullptr) {
    return 0;
  }
  const auto it = std::partition_point(
      root_->segments.begin(), root_->segments.end(),
      [block](const Segment* segment) { return segment->entries.back().block < block; });
  return static_cast<size_t>(it - root_->segments.begin());
}

namespace {

// First entry with a block at or beyond `block`.
template <typename Entries>
auto find_in(Entries& entries, uint32_t block) {
  return std::partition_point(entries.begin(), entries.end(),
                              [block](const PageEntry& entry) { return entry.block < block; });
}

}  // namespace

PageEntry PageList::find_entry(uint32_t block) const {
  if (tail_.page != kNoPage && tail_.block == block) {
    return tail_;
  }
  const size_t index = find_segment(block);
  if (root_ == nullptr || index == root_->segments.size()) {
    return {};
  }
  const auto it = find_in(root_->segments[index]->entries, block);
  return it->block == block ? *it : PageEntry{};
}

void PageList::prepare_truncate(uint64_t n_tokens, const PageBank& bank) {
  if (n_tokens == length_) {
    return;
  }
  const uint32_t block = static_cast<uint32_t>(n_tokens / kPageTokens);
  const size_t index = find_segment(block);
  if (root_ != nullptr && index < root_->segments.size()) {
    own_root();
    if (root_->segments[index]->entries.front().block < block) {
      own_segment(index, bank);
    }
  }
}

void PageList::cut_root(uint32_t block, const PageBank& bank) {
  const size_t index = find_segment(block);
  if (root_ == nullptr || index == root_->segments.size()) {
    return;
  }
  Root* root = own_root();
  size_t keep = index;
  if (root->segments[index]->entries.front().block < block) {
    Segment* segment = own_segment(index, bank);
    const auto cut = find_in(segment->entries, block);
    for (auto it = cut; it != segment->entries.end(); ++it) {
      bank.release(it->page);
    }
    segment->entries.erase(cut, segment->entries.end());
    ++keep;
  }
  for (size_t i = keep; i < root->segments.size(); ++i) {
    release_segment(root->segments[i], bank);
  }
  root->segments.resize(keep);
}

uint64_t PageList::count_stored() const {
  uint64_t n_stored = tail_.count;
  if (root_ != nullptr) {
    for (const Segment* segment : root_->segments) {
      for (const PageEntry& entry : segment->entries) {
        n_stored += entry.count;
      }
    }
  }
  return n_stored;
}

void PageList::share(const PageList& parent, uint64_t n_tokens, const PageBank& bank) {
  KVM_ASSERT(root_ == nullptr && length_ == 0 && n_tokens <= parent.length_);
  KVM_ASSERT(parent.n_reserved_ == 0);
  if (parent.root_ != nullptr) {
    root_ = parent.root_;
    ++root_->n_refs;
  }
  tail_ = parent.tail_;
  if (tail_.page != kNoPage) {
    bank.add_ref(tail_.page);
  }
  length_ = parent.length_;
  n_dropped_ = parent.n_dropped_;
  dropped_end_ = parent.dropped_end_;
  Undo clearing([&] { clear(bank); });
  truncate(n_tokens, bank);
  clearing.dismiss();
  KVM_CHECK_INVARIANT(is_end_valid());
}

void PageList::truncate(uint64_t n_tokens, const PageBank& bank) {
  KVM_ASSERT(n_reserved_ == 0 && n_tokens <= length_);
  if (n_tokens == length_) {
    return;
  }
  const uint32_t block = static_cast<uint32_t>(n_tokens / kPageTokens);
  const uint32_t fill = static_cast<uint32_t>(n_tokens % kPageTokens);
  prepare_truncate(n_tokens, bank);
  PageEntry tail = fill > 0 ? find_entry(block) : PageEntry{};
  if (tail.page != kNoPage && tail.first < fill) {
    tail.count = static_cast<uint16_t>(fill - tail.first);
    bank.add_ref(tail.page);
  } else {
    tail = {};
  }
  if (tail_.page != kNoPage) {
    bank.release(tail_.page);
  }
  tail_ = tail;
  cut_root(block, bank);
  length_ = n_tokens;
  dropped_end_ = std::min(dropped_end_, n_tokens);
  n_dropped_ = n_dropped_ == 0 ? 0 : length_ - count_stored();
  KVM_CHECK_INVARIANT(is_valid());
}

void PageList::clear(const PageBank& bank) {
  rollback(bank);
  release_root(std::exchange(root_, nullptr), bank);
  if (tail_.page != kNoPage) {
    bank.release(tail_.page);
  }
  tail_ = {};
  length_ = 0;
  n_dropped_ = 0;
  dropped_end_ = 0;
}

uint64_t PageList::give_up(uint64_t n_pages, const PageBank& bank) {
  rollback(bank);
  if (root_ == nullptr || root_->n_refs > 1) {
    clear(bank);
    return 1;
  }
  const uint64_t n_given = pop_segments(0, n_pages, bank);
  if (root_->segments.empty()) {
    clear(bank);
  }
  return n_given;
}

uint64_t PageList::shorten(uint64_t n_tokens, uint64_t n_pages, const PageBank& bank) {
  KVM_ASSERT(n_reserved_ == 0);
  if (root_ == nullptr || n_tokens >= length_) {
    return 0;
  }
  const size_t n_keep = find_segment(static_cast<uint32_t>(n_tokens / kPageTokens)) + 1;
  if (n_keep >= root_->segments.size()) {
    return 0;
  }
  KVM_ASSERT(root_->n_refs == 1);
  return pop_segments(n_keep, n_pages, bank);
}

uint64_t PageList::pop_segments(size_t n_keep, uint64_t n_pages, const PageBank& bank) {
  uint64_t n_given = 0;
  uint64_t n_stored = length_ - n_dropped_;
  if (tail_.page != kNoPage) {
    n_stored -= tail_.count;
    bank.release(tail_.page);
    tail_ = {};
    ++n_given;
  }
  std::vector<Segment*>& segments = root_->segments;
  for (; segments.size() > n_keep && n_given < n_pages; segments.pop_back()) {
    Segment* segment = segments.back();
    for (const PageEntry& entry : segment->entries) {
      n_stored -= entry.count;
    }
    n_given += segment->n_refs > 1 ? 1 : segment->entries.size();
    release_segment(segment, bank);
  }
  length_ = segments.empty() ? 0 : segments.back()->entries.back().end();
  n_dropped_ = length_ - n_stored;
  dropped_end_ = std::min(dropped_end_, length_);
  KVM_CHECK_INVARIANT(is_valid());
  return n_given;
}

bool PageList::tail_needs_page(const SlabClass& slab_class, const PageTable& pages) const {
  if (tail_fill() == 0) {
    return false;
  }
  return tail_.page == kNoPage || pages.n_refs(tail_.page) > 1 ||
         pages.slab_class(tail_.page) != slab_class;
}

uint64_t PageList::pages_to_reserve(uint64_t n_tokens, const SlabClass& slab_class,
                                    const PageTable& pages) const {
  const uint64_t room = tail_fill() == 0 ? 0 : kPageTokens - tail_fill();
  const uint64_t n_beyond = n_tokens > room ? n_tokens - room : 0;
  return (n_beyond + kPageTokens - 1) / kPageTokens + (tail_needs_page(slab_class, pages) ? 1 : 0);
}

Status PageList::reserve(uint64_t n_tokens, const SlabClass& slab_class, const PageBank& bank) {
  KVM_ASSERT(n_reserved_ == 0 && n_tokens > 0 && n_tokens <= kMaxTokens - length_);
  const bool needs_page = tail_needs_page(slab_class, bank.pages());
  const bool moves = !needs_page && tail_fill() != 0 && bank.pages().is_moving(tail_.page);
  const bool replace_tail = needs_page || moves;
  const uint64_t n_pages = pages_to_reserve(n_tokens, slab_class, bank.pages()) + (moves ? 1 : 0);
  try {
    pending_.reserve(n_pages);
    reserve_entries((length_ + n_tokens) / kPageTokens - length_ / kPageTokens, bank);
    for (uint64_t i = 0; i < n_pages; ++i) {
      Result<PageRef> page = bank.allocate(slab_class);
      if (!page.is_ok()) {
        rollback(bank);
        return page.status();
      }
      if (i == 0 && replace_tail) {
        pending_tail_ = page.value();
      } else {
        pending_.push_back(page.value());
      }
    }
  } catch (const std::bad_alloc&) {
    rollback(bank);
    return Status::fixed(KVM_ERR_NO_MEMORY, "the machine refused memory for a list of pages");
  }
  if (tail_fill() != 0 && !replace_tail) {
    KVM_ASSERT(bank.unseal(tail_.page));
  }
  n_reserved_ = n_tokens;
  KVM_CHECK_INVARIANT(is_end_valid());
  return Status::ok();
}

bool PageList::copy_tail(const PageTable& pages, codecs::PairSide side) const {
  if (pending_tail_ == kNoPage || tail_.page == kNoPage) {
    return false;
  }
  copy_page_rows(pages, tail_.page, pending_tail_, side, tail_.first, tail_.count);
  return true;
}

uint64_t PageList::reserved_in_tail() const {
  return tail_fill() == 0 ? 0 : std::min<uint64_t>(n_reserved_, kPageTokens - tail_fill());
}

PageEntry PageList::extended_tail() const {
  PageEntry tail = tail_;
  if (pending_tail_ != kNoPage) {
    tail.page = pending_tail_;
    if (tail_.page == kNoPage) {
      tail.block = static_cast<uint32_t>(length_ / kPageTokens);
      tail.first = static_cast<uint16_t>(tail_fill());
    }
  }
  tail.count = static_cast<uint16_t>(tail.count + reserved_in_tail());
  return tail;
}

PageEntry PageList::pending_entry(size_t index) const {
  const uint64_t first_block = (length_ + kPageTokens - 1) / kPageTokens;
  const uint64_t n_before = reserved_in_tail() + index * kPageTokens;
  PageEntry entry;
  entry.page = pending_[index];
  entry.block = static_cast<uint32_t>(first_block + index);
  entry.count = static_cast<uint16_t>(std::min<uint64_t>(kPageTokens, n_reserved_ - n_before));
  return entry;
}

PageEntry PageList::reserved_piece(uint64_t position) const {
  KVM_ASSERT(position >= length_ && position < reserved_length());
  const uint64_t first_block = (length_ + kPageTokens - 1) / kPageTokens;
  const uint64_t block = position / kPageTokens;
  PageEntry entry = block < first_block ? extended_tail()
                                        : pending_entry(static_cast<size_t>(block - first_block));
  const uint16_t slot = static_cast<uint16_t>(position % kPageTokens);
  entry.count = static_cast<uint16_t>(entry.first + entry.count - slot);
  entry.first = slot;
  return entry;
}

void PageList::publish(const PageBank& bank) {
  if (!restored_.empty()) {
    publish_restored(bank);
    return;
  }
  const PageEntry tail = extended_tail();
  if (pending_tail_ != kNoPage && tail_.page != kNoPage) {
    bank.release(tail_.page);
  }
  tail_ = {};
  // At most one page is not full, and it is the last.
  const auto place = [&](const PageEntry& entry) {
    if (entry.first + entry.count == static_cast<int>(kPageTokens)) {
      push_entry(entry, bank);
    } else {
      tail_ = entry;
    }
  };
  if (tail.page != kNoPage) {
    if (n_reserved_ != 0) {
      bank.seal(tail.page);
    }
    place(tail);
  }
  for (size_t i = 0; i < pending_.size(); ++i) {
    bank.seal(pending_[i]);
    place(pending_entry(i));
  }
  length_ += n_reserved_;
  n_reserved_ = 0;
  pending_tail_ = kNoPage;
  pending_.clear();
  spare_.clear();
  KVM_CHECK_INVARIANT(is_end_valid());
}

void PageList::rollback(const PageBank& bank) {
  if (restored_root_ != nullptr) {
    release_root(std::exchange(restored_root_, nullptr), bank);
  } else {
    for (const PageEntry& entry : restored_) {
      if (entry.page != kNoPage) {
        bank.release(entry.page);
      }
    }
  }
  restored_.clear();
  if (reserved_in_tail() != 0 && pending_tail_ == kNoPage) {
    bank.seal(tail_.page);
  }
  if (pending_tail_ != kNoPage) {
    bank.release(pending_tail_);
    pending_tail_ = kNoPage;
  }
  for (const PageRef page : pending_) {
    bank.release(page);
  }
  pending_.clear();
  spare_.clear();
  n_reserved_ = 0;
  KVM_CHECK_INVARIANT(is_end_valid());
}

template <typename Visitor>
void PageList::for_each_missing(uint32_t block_begin, uint32_t block_end, Visitor visit) const {
  uint32_t next = block_begin;
  const auto pass = [&](uint32_t block) {
    for (; next < block; ++next) {
      visit(next);
    }
    next = std::max(next, block + 1);
  };
  for_each_between(block_begin, block_end, [&](const PageEntry& entry) { pass(entry.block); });
  pass(block_end);
}

uint64_t PageList::pages_to_restore(uint32_t block_begin, uint32_t block_end) const {
  KVM_ASSERT(uint64_t{block_end} * kPageTokens <= length_);
  uint64_t n_pages = 0;
  if (n_dropped_ != 0) {
    for_each_missing(block_begin, block_end, [&](uint32_t) { ++n_pages; });
  }
  return n_pages;
}

Status PageList::reserve_dropped(uint32_t block_begin, uint32_t block_end,
                                 const SlabClass& slab_class, const PageBank& bank) {
  KVM_ASSERT(n_reserved_ == 0 && restored_.empty());
  const uint64_t n_pages = pages_to_restore(block_begin, block_end);
  if (n_pages == 0) {
    return Status::ok();
  }
  try {
    restored_.reserve(n_pages);
    for_each_missing(block_begin, block_end, [&](uint32_t block) {
      restored_.push_back({.block = block, .count = static_cast<uint16_t>(kPageTokens)});
    });
    for (PageEntry& entry : restored_) {
      Result<PageRef> page = bank.allocate(slab_class);
      if (!page.is_ok()) {
        rollback(bank);
        return page.status();
      }
      entry.page = page.value();
    }
    restored_root_ = make_restored_root(bank);
  } catch (const std::bad_alloc&) {
    rollback(bank);
    return Status::fixed(KVM_ERR_NO_MEMORY, "the machine refused memory for a list of pages");
  }
  return Status::ok();
}

Root* PageList::make_restored_root(const PageBank& bank) const {
  static const std::vector<Segment*> none;
  const std::vector<Segment*>& old = root_ == nullptr ? none : root_->segments;
  const auto has_room = [&](size_t i) { return old[i]->entries.size() < kSegmentEntries; };
  // Made anew are the segments that the pages come between, and a neighbour with room on each side:
  // so they do not become many that hold little.
  size_t first = find_segment(restored_.front().block);
  first -= first > 0 && has_room(first - 1) ? 1 : 0;
  size_t last = find_segment(restored_.back().block);
  last += last < old.size() &&
                  (old[last]->entries.front().block < restored_.back().block || has_room(last))
              ? 1
              : 0;
  std::vector<PageEntry> entries;
  for (size_t i = first; i < last; ++i) {
    entries.insert(entries.end(), old[i]->entries.begin(), old[i]->entries.end());
  }
  const std::vector<PageEntry> stored = entries;
  entries.insert(entries.end(), restored_.begin(), restored_.end());
  std::ranges::inplace_merge(entries, entries.begin() + static_cast<ptrdiff_t>(stored.size()), {},
                             &PageEntry::block);
  const size_t n_made = div_up(entries.size(), kSegmentEntries);
  std::vector<std::unique_ptr<Segment>> made;
  for (size_t i = 0; i < n_made; ++i) {
    const auto begin = entries.begin() + static_cast<ptrdiff_t>(entries.size() * i / n_made);
    const auto end = entries.begin() + static_cast<ptrdiff_t>(entries.size() * (i + 1) / n_made);
    made.push_back(std::make_unique<Segment>());
    made.back()->entries.assign(begin, end);
  }
  auto root = std::make_unique<Root>();
  root->segments.reserve(std::max(old.capacity(), old.size() - (last - first) + n_made));
  // Nothing throws from here on.
  for (const PageEntry& entry : stored) {
    bank.add_ref(entry.page);
  }
  for (size_t i = 0; i < old.size() || i == first; ++i) {
    if (i == first) {
      for (std::unique_ptr<Segment>& segment : made) {
        root->segments.push_back(segment.release());
      }
    }
    if (i < old.size() && (i < first || i >= last)) {
      root->segments.push_back(old[i]);
      ++old[i]->n_refs;
    }
  }
  return root.release();
}

void PageList::publish_restored(const PageBank& bank) {
  for (const PageEntry& entry : restored_) {
    bank.seal(entry.page);
  }
  n_dropped_ -= restored_.size() * kPageTokens;
  dropped_end_ = n_dropped_ == 0 ? 0 : dropped_end_;
  restored_.clear();
  release_root(std::exchange(root_, std::exchange(restored_root_, nullptr)), bank);
  KVM_CHECK_INVARIANT(is_valid());
}

void PageList::prepare_drop(uint32_t block_begin, uint32_t block_end, const PageBank& bank) {
  for (size_t index = find_segment(block_begin);
       root_ != nullptr && index < root_->segments.size() &&
       root_->segments[index]->entries.front().block < block_end;
       ++index) {
    const std::vector<PageEntry>& entries = root_->segments[index]->entries;
    const auto n_dropped = find_in(entries, block_end) - find_in(entries, block_begin);
    if (n_dropped == static_cast<ptrdiff_t>(entries.size())) {
      own_root();
    } else if (n_dropped != 0) {
      own_segment(index, bank);
    }
  }
}

uint64_t PageList::drop(uint32_t block_begin, uint32_t block_end, const PageBank& bank) {
  prepare_drop(block_begin, block_end, bank);
  uint64_t n_pages = 0;
  size_t index = find_segment(block_begin);
  while (root_ != nullptr && index < root_->segments.size() &&
         root_->segments[index]->entries.front().block < block_end) {
    const std::vector<PageEntry>& entries = root_->segments[index]->entries;
    const size_t begin = static_cast<size_t>(find_in(entries, block_begin) - entries.begin());
    const size_t end = static_cast<size_t>(find_in(entries, block_end) - entries.begin());
    if (begin == end) {
      ++index;
      continue;
    }
    const bool is_whole = end - begin == entries.size();
    Segment* segment = is_whole ? own_root()->segments[index] : own_segment(index, bank);
    const auto first = segment->entries.begin() + static_cast<ptrdiff_t>(begin);
    const auto last = segment->entries.begin() + static_cast<ptrdiff_t>(end);
    for (auto it = first; it != last; ++it) {
      n_dropped_ += it->count;
      dropped_end_ = std::max(dropped_end_, it->end());
    }
    n_pages += end - begin;
    if (is_whole) {
      release_segment(segment, bank);
      root_->segments.erase(root_->segments.begin() + static_cast<ptrdiff_t>(index));
      continue;
    }
    for (auto it = first; it != last; ++it) {
      bank.release(it->page);
    }
    segment->entries.erase(first, last);
    ++index;
  }
  KVM_CHECK_INVARIANT(is_valid());
  return n_pages;
}

void PageList::prepare_replace(uint32_t block_begin, uint32_t block_end, const PageBank& bank) {
  for (size_t index = find_segment(block_begin);
       root_ != nullptr && index < root_->segments.size() &&
       root_->segments[index]->entries.front().block < block_end;
       ++index) {
    own_segment(index, bank);
  }
}

void PageList::replace(uint32_t block, PageRef page, const PageBank& bank) {
  Segment* segment = own_segment(find_segment(block), bank);
  const auto it = find_in(segment->entries, block);
  KVM_ASSERT(it != segment->entries.end() && it->block == block);
  bank.release(it->page);
  it->page = page;
}

void PageList::restore(const PageEntry& entry, const PageBank& bank) {
  KVM_ASSERT(tail_.page == kNoPage && n_reserved_ == 0 && entry.position() >= length_);
  if (entry.first + entry.count == static_cast<int>(kPageTokens)) {
    push_entry(entry, bank);
  } else {
    tail_ = entry;
  }
  if (entry.position() > length_) {
    n_dropped_ += entry.position() - length_;
    dropped_end_ = entry.position();
  }
  length_ = entry.end();
  KVM_CHECK_INVARIANT(is_end_valid());
}

void PageList::end_restore(uint64_t length, uint64_t dropped_end) {
  KVM_ASSERT(length >= length_ && (tail_.page == kNoPage || length == length_));
  n_dropped_ += length - length_;
  length_ = length;
  spare_.clear();
  KVM_ASSERT(dropped_end >= dropped_end_ && dropped_end <= length);
  dropped_end_ = dropped_end;
  KVM_CHECK_INVARIANT(is_valid());
}

bool PageList::covers(uint64_t begin, uint64_t end) const {
  KVM_ASSERT(end <= length_);
  if (begin >= end || n_dropped_ == 0 || begin >= dropped_end_) {
    return true;
  }
  uint64_t next = begin;
  const auto advance = [&](const PageEntry& entry) {
    if (entry.position() <= next && next < entry.end()) {
      next = entry.end();
    }
  };
  for (size_t i = find_segment(static_cast<uint32_t>(begin / kPageTokens));
       root_ != nullptr && i < root_->segments.size() && next < end; ++i) {
    const std::vector<PageEntry>& entries = root_->segments[i]->entries;
    for (auto it = find_in(entries, static_cast<uint32_t>(next / kPageTokens));
         it != entries.end() && next < end && it->position() <= next; ++it) {
      advance(*it);
    }
  }
  advance(tail_);
  return next >= end;
}

bool PageList::is_end_valid() const {
  if (n_dropped_ > dropped_end_ || dropped_end_ > length_ || n_reserved_ > kMaxTokens - length_) {
    return false;
  }
  const bool has_tail = tail_.page != kNoPage;
  if (has_tail ? tail_.count == 0 || tail_.end() != length_ || tail_fill() == 0 ||
                     tail_.block != length_ / kPageTokens
               : tail_.count != 0) {
    return false;
  }
  if (root_ != nullptr && !root_->segments.empty()) {
    const PageEntry& last = root_->segments.back()->entries.back();
    if (last.end() > length_ || (has_tail && last.block >= tail_.block)) {
      return false;
    }
  }
  // Reserved tokens fill the tail's page first, then whole pages.
  return pending_.size() == div_up(n_reserved_ - reserved_in_tail(), kPageTokens) &&
         (pending_tail_ == kNoPage || reserved_in_tail() != 0);
}

bool PageList::is_valid() const {
  if (!is_end_valid()) {
    return false;
  }
  uint64_t block = 0;  // the least that may come next
  for (size_t i = 0; root_ != nullptr && i < root_->segments.size(); ++i) {
    const std::vector<PageEntry>& entries = root_->segments[i]->entries;
    if (root_->segments[i]->n_refs == 0 || entries.empty() || entries.size() > kSegmentEntries) {
      return false;
    }
    for (const PageEntry& entry : entries) {
      // All pages but the tail are filled to their end.
      if (entry.page == kNoPage || entry.count == 0 || entry.block < block ||
          entry.first + entry.count != static_cast<int>(kPageTokens)) {
        return false;
      }
      block = uint64_t{entry.block} + 1;
    }
  }
  return count_stored() + n_dropped_ == length_;
}

namespace {

// Says whether pages of both hold the same, whatever their codecs.
bool hold_alike(const SlabClass& a, const SlabClass& b) {
  return a.dim_k == b.dim_k && a.dim_v == b.dim_v && a.n_heads == b.n_heads && a.v_in_k == b.v_in_k;
}

}  // namespace

void copy_page_rows(const PageTable& pages, PageRef from, PageRef to, codecs::PairSide side,
                    uint32_t first, uint32_t count) {
  const SlabClass a = side == codecs::PairSide::kNone ? pages.slab_class(from)
                                                      : pages.slab_class(from).seen_from(side);
  const SlabClass& b = pages.slab_class(to);
  KVM_ASSERT(hold_alike(a, b));
  const std::byte* source = pages.data(from);
  std::byte* target = pages.data(to);
  codecs::convert_rows(codecs::rows_of(a.k_plane(source), a.dim_k, first),
                       codecs::writable_rows(b.k_plane(target), b.dim_k, first), count, a.n_heads,
                       a.dim_k);
  if (!a.v_in_k) {
    codecs::convert_rows(codecs::rows_of(a.v_plane(source), a.dim_v, first),
                         codecs::writable_rows(b.v_plane(target), b.dim_v, first), count, a.n_heads,
                         a.dim_v);
  }
}

}  // namespace kvm::engine
