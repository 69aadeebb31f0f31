// SPDX-License-Identifier: Apache-2.0
// PageTable: what the names of pages stand for.
//
//   entry of a list, page of an index --> PageRef --> record --> frame of the host pool
//                                                        \--> place in the slow tier
//                                                        \--> who pays
//
// Whoever uses a page holds its name. Where its bytes lie is written in one place, its record,
// however many lists, forks and indexes refer to it. So a page can move, to another frame, to the
// slow tier, and back:
//
//   begin_move --> any thread copies the bytes --> end_move: the record has the new frame; the one
//   of before waits until nobody reads it any more (ReadEpochs)
//   begin_leave --> the tier writes the bytes --> end_leave: the record has the place and no frame
//   begin_fetch --> the tier reads the bytes --> end_fetch: the record has a frame, and the place
//   begin_leave --> the tier writes the bytes --> end_copy: the record has the place and its frame
//
// Pages of several names may have one place: each has a reference on it of its own.
//
// A page that is being written does not move, and one that is moving is not written: pages are born
// for writing, and are sealed when what they are to hold is there.
//
// A name says what kind of page it is: 10 bits for a directory of pages of one slab class, 22 bits
// for the slot in it. A slab class has one directory, or more where slots run out. Names are used
// again once their last reference is gone.
//
// Threads: one, the driver's; the bytes of pages may be used by any.
// Memory: 20 bytes of heap per page, as many as there ever were at once.
#ifndef KVM_TIERS_PAGE_TABLE_H_
#define KVM_TIERS_PAGE_TABLE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/assert.h"
#include "base/status.h"
#include "tiers/host/host_pool.h"
#include "tiers/read_epochs.h"
#include "tiers/slab_class.h"
#include "tiers/slow_tier.h"

namespace kvm::tiers {

// Names an account that pays for pages. The table keeps it; what it means is its owner's affair.
enum class PayerId : uint32_t {};

class PageTable {
 public:
  // `pool` must outlive the table, and nobody else takes frames of it; so must `slow`, null where
  // there is none.
  explicit PageTable(HostPool* pool, SlowTier* slow = nullptr);
  // Pages still referenced are gone with the table; their frames and places stay in use.
  ~PageTable();
  PageTable(const PageTable&) = delete;
  PageTable& operator=(const PageTable&) = delete;

  // A page with one reference, for writing. What it holds is undefined.
  // Fails: as HostPool::allocate; NO_SPACE, where names have run out. Throws std::bad_alloc.
  // Nothing has changed then.
  Result<PageRef> allocate(const SlabClass& slab_class, PayerId payer);
  // A sealed page with one reference that is not in memory, and holds what lies at `place`, of
  // which it takes over a reference. REQUIRES: the table has a slow tier. Fails: NO_SPACE, where
  // names have run out. Throws std::bad_alloc. Nothing has changed then.
  Result<PageRef> adopt(const SlabClass& slab_class, PayerId payer, PlaceId place);
  // REQUIRES here and below: `page` is allocated.
  void add_ref(PageRef page) { ++record(page).n_refs; }
  // Returns whether that was the last reference; the page is free then.
  bool release(PageRef page);

  uint32_t n_refs(PageRef page) const { return record(page).n_refs; }
  PayerId payer(PageRef page) const { return record(page).payer; }
  void set_payer(PageRef page, PayerId payer) { record(page).payer = payer; }
  // Whether the page has a frame.
  bool is_in_memory(PageRef page) const { return record(page).frame != kNoFrame; }
  // The address holds as long as the page is referenced, and then as long as a reader that began
  // before it moved (epochs()). REQUIRES: is_in_memory(page).
  std::byte* data(PageRef page) const {
    const FrameRef frame = record(page).frame;
    KVM_ASSERT(frame != kNoFrame);
    return pool_->data(frame);
  }
  // Where the slow tier has it; kNoPlace: nowhere. It holds as long as the page is referenced and
  // nobody writes it.
  PlaceId place(PageRef page) const { return record(page).place; }
  const SlabClass& slab_class(PageRef page) const { return directory(page).slab_class; }
  uint64_t page_bytes(PageRef page) const { return directory(page).page_bytes; }

  uint64_t n_pages() const { return n_pages_; }               // wherever they lie
  uint64_t page_bytes_in_use() const { return page_bytes_; }  // of those in memory
  uint64_t n_pages_away() const { return n_pages_away_; }     // of those that are not
  uint64_t away_bytes() const { return away_bytes_; }         // theirs
  SlowTier* slow_tier() const { return slow_; }

  // --- Writing and moving -----------------------------------------------------------------------

  // Nobody writes the page any more.
  void seal(PageRef page);
  // The page may be written from now on, and has no place any more. False: not now, for it moves.
  // REQUIRES: it is in memory, and if it has a place, nobody else refers to it.
  [[nodiscard]] bool unseal(PageRef page);
  bool is_moving(PageRef page) const { return record(page).state == State::kMoving; }
  bool is_sealed(PageRef page) const { return record(page).state == State::kSealed; }

  // A move that has begun. size_bytes are to be copied from `source` to `target`; of those from and
  // to the slow tier one is null.
  struct Move {
    PageRef page = kNoPage;
    FrameRef frame = kNoFrame;  // the new one
    const std::byte* source = nullptr;
    std::byte* target = nullptr;
    uint64_t size_bytes = 0;
  };
  // Begins to move a page, which is sealed and in memory, to another frame of its class. It may be
  // read, shared and released meanwhile. Fails: as HostPool::allocate; throws std::bad_alloc.
  Result<Move> begin_move(PageRef page);
  // Ends it, when the bytes are there: the page is now where they are, if there is one still.
  // Throws nothing.
  void end_move(const Move& move);
  // The same to the slow tier. A page that has a place need not be written: end_leave may follow at
  // once. Throws std::bad_alloc.
  Move begin_leave(PageRef page);
  // place: where the bytes are, or kNoPlace: nowhere, and the page stays in memory.
  void end_leave(const Move& move, PlaceId place);
  // Ends it otherwise: the page has the place, and stays in memory. kNoPlace: as end_leave.
  // REQUIRES: it had no place.
  void end_copy(const Move& move, PlaceId place);
  // The same of a page that is not in memory to a frame. Readers that began before it ends may go
  // on to read its place. Fails: as begin_move.
  Result<Move> begin_fetch(PageRef page);
  // is_there: whether the bytes are; else the page stays where it is.
  void end_fetch(const Move& move, bool is_there);
  // Appends the pages of an extent that can move now. Returns whether these are all that it has.
  bool collect_movable(HostPool::ExtentRef extent, std::vector<PageRef>* pages) const;
  // Whether a page lies in the extent, or is about to, rather than has left it.
  bool has_pages(HostPool::ExtentRef extent) const;
  // Readers of addresses. Whoever keeps one beyond the next call that may end a move is one.
  ReadEpochs& epochs() { return epochs_; }
  // Frees frames that pages have left and that nobody reads any more, at most kMostFreed: returns
  // whether any. So it is called until it does not.
  static constexpr size_t kMostFreed = 1024;
  bool free_left_frames();
  uint64_t left_bytes() const { return left_bytes_; }

  // Recounts pages and frames, and aborts where they disagree with the pool.
  void check_accounts() const;

 private:
  enum class State : uint8_t {
    kFree,     // the name is free
    kWritten,  // may be written
    kSealed,
    kMoving,  // without references: the page is gone, and its move has to end
  };
  struct Record {
    uint32_t n_refs = 0;
    FrameRef frame = kNoFrame;  // of a free name: the number of the next free one, or kNoSlot
    PayerId payer{};
    PlaceId place = kNoPlace;
    State state = State::kFree;
  };
  static_assert(sizeof(Record) == 20);
  struct LeftFrame {
    FrameRef frame;
    uint64_t epoch = 0;  // when it was left
  };
  static constexpr uint32_t kNoSlot = 0xffffffffu;
  // Records come in chunks, so that a table never moves while it grows.
  static constexpr uint32_t kChunkBits = 12;
  static constexpr uint32_t kChunkRecords = 1u << kChunkBits;
  static constexpr uint32_t kMaxChunks = 1u << (kSlotBits - kChunkBits);
  using Chunk = std::array<Record, kChunkRecords>;

  struct Directory {
    SlabClass slab_class;
    uint64_t page_bytes = 0;
    uint32_t n_slots = 0;  // ever used
    uint32_t n_names = 0;  // in use
    uint32_t first_free = kNoSlot;
    std::array<std::unique_ptr<Chunk>, kMaxChunks> chunks;

    Record& at(uint32_t slot) const {
      return (*chunks[slot >> kChunkBits])[slot & (kChunkRecords - 1)];
    }
    bool has_free_slot() const { return first_free != kNoSlot || n_slots >> kSlotBits == 0; }
  };

  Directory& directory(PageRef page) const { return *directories_[page_slab(page)]; }
  Record& record(PageRef page) const { return directory(page).at(page_slot(page)); }
  // A directory of the class with a free name.
  Result<uint32_t> directory_with_room(const SlabClass& slab_class);
  // Takes a free name, whose record is then in memory. Throws std::bad_alloc: nothing has changed.
  static uint32_t take_slot(Directory& directory);
  static void free_slot(Directory& directory, uint32_t slot);
  // Gives the frame, the place and the name of a page without references back.
  void forget(PageRef page);
  // What all moves begin with, and those to a frame.
  void reserve_move(PageRef page);
  Result<Move> begin_to_frame(PageRef page);
  void release_place(Record* record);
  void leave_frame(PageRef page);

  HostPool* const pool_;
  SlowTier* const slow_;
  std::array<std::unique_ptr<Directory>, kMaxSlabs> directories_;
  uint32_t n_directories_ = 0;  // those ever made are below
  uint64_t n_pages_ = 0;
  uint64_t n_pages_away_ = 0;
  uint64_t away_bytes_ = 0;
  uint64_t page_bytes_ = 0;
  uint64_t n_moving_ = 0;        // moves that have begun
  uint64_t n_targets_ = 0;       // those of them that go to a frame
  std::vector<LeftFrame> left_;  // those from first_left_ on, the earliest first
  size_t first_left_ = 0;
  uint64_t left_bytes_ = 0;
  ReadEpochs epochs_;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_PAGE_TABLE_H_
