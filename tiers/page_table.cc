// SPDX-License-Identifier: Apache-2.0
#include "tiers/page_table.h"

#include <algorithm>
#include <string>
#include <unordered_set>

#include "base/assert.h"
#include "base/reserve.h"
#include "base/undo.h"

namespace kvm::tiers {

PageTable::PageTable(HostPool* pool, SlowTier* slow) : pool_(pool), slow_(slow) {}

PageTable::~PageTable() = default;

Result<PageRef> PageTable::allocate(const SlabClass& slab_class, PayerId payer) {
  KVM_TRY_ASSIGN(const uint32_t index, directory_with_room(slab_class));
  Directory& directory = *directories_[index];
  const uint32_t slot = take_slot(directory);
  Undo freeing([&] { free_slot(directory, slot); });
  const PageRef page = make_page_ref(index, slot);
  KVM_TRY_ASSIGN(const FrameRef frame, pool_->allocate(slab_class, page));
  freeing.dismiss();
  directory.at(slot) = {.n_refs = 1, .frame = frame, .payer = payer, .state = State::kWritten};
  ++directory.n_names;
  ++n_pages_;
  page_bytes_ += directory.page_bytes;
  return page;
}

Result<PageRef> PageTable::adopt(const SlabClass& slab_class, PayerId payer, PlaceId place) {
  KVM_ASSERT(slow_ != nullptr && place != kNoPlace);
  KVM_TRY_ASSIGN(const uint32_t index, directory_with_room(slab_class));
  Directory& directory = *directories_[index];
  const uint32_t slot = take_slot(directory);
  directory.at(slot) = {
      .n_refs = 1, .frame = kNoFrame, .payer = payer, .place = place, .state = State::kSealed};
  ++directory.n_names;
  ++n_pages_;
  ++n_pages_away_;
  away_bytes_ += directory.page_bytes;
  return make_page_ref(index, slot);
}

bool PageTable::release(PageRef page) {
  Record& of = record(page);
  KVM_ASSERT(of.n_refs > 0);
  if (--of.n_refs > 0) {
    return false;
  }
  --n_pages_;
  n_pages_away_ -= of.frame == kNoFrame ? 1 : 0;
  away_bytes_ -= of.frame == kNoFrame ? page_bytes(page) : 0;
  page_bytes_ -= of.frame == kNoFrame ? 0 : page_bytes(page);
  if (of.state != State::kMoving) {
    forget(page);
  }
  return true;
}

void PageTable::forget(PageRef page) {
  Record& of = record(page);
  if (of.frame != kNoFrame) {
    pool_->free(of.frame);
  }
  release_place(&of);
  Directory& names = directory(page);
  free_slot(names, page_slot(page));
  --names.n_names;
}

void PageTable::release_place(Record* record) {
  if (record->place != kNoPlace) {
    slow_->release(record->place);
    record->place = kNoPlace;
  }
}

void PageTable::seal(PageRef page) {
  Record& of = record(page);
  KVM_ASSERT(of.state == State::kWritten);
  of.state = State::kSealed;
}

bool PageTable::unseal(PageRef page) {
  Record& of = record(page);
  if (of.state == State::kMoving) {
    return false;
  }
  KVM_ASSERT(of.frame != kNoFrame && (of.place == kNoPlace || of.n_refs == 1));
  release_place(&of);
  of.state = State::kWritten;
  return true;
}

void PageTable::reserve_move(PageRef page) {
  KVM_ASSERT(record(page).state == State::kSealed && record(page).n_refs > 0);
  // Room for the frames that all moves leave, so that their ends need no memory.
  reserve_growing(left_, left_.size() + n_moving_ + 1);
}

Result<PageTable::Move> PageTable::begin_to_frame(PageRef page) {
  reserve_move(page);
  Record& of = record(page);
  KVM_TRY_ASSIGN(const FrameRef frame, pool_->allocate(slab_class(page), page));
  of.state = State::kMoving;
  ++n_moving_;
  ++n_targets_;
  const std::byte* source = of.frame == kNoFrame ? nullptr : pool_->data(of.frame);
  return Move{page, frame, source, pool_->data(frame), page_bytes(page)};
}

Result<PageTable::Move> PageTable::begin_move(PageRef page) {
  KVM_ASSERT(is_in_memory(page));
  return begin_to_frame(page);
}

void PageTable::end_move(const Move& move) {
  Record& of = record(move.page);
  KVM_ASSERT(of.state == State::kMoving && n_moving_ > 0 && n_targets_ > 0);
  --n_moving_;
  --n_targets_;
  if (of.n_refs == 0) {
    pool_->free(move.frame);
    forget(move.page);
    return;
  }
  leave_frame(move.page);
  of.frame = move.frame;
  of.state = State::kSealed;
}

void PageTable::leave_frame(PageRef page) {
  const FrameRef frame = record(page).frame;
  pool_->set_owner(frame, kNoPage);  // whose name may soon be another's
  left_.push_back({frame, epochs_.now()});
  left_bytes_ += page_bytes(page);
}

PageTable::Move PageTable::begin_leave(PageRef page) {
  KVM_ASSERT(is_in_memory(page));
  reserve_move(page);
  Record& of = record(page);
  of.state = State::kMoving;
  ++n_moving_;
  return Move{page, kNoFrame, pool_->data(of.frame), nullptr, page_bytes(page)};
}

void PageTable::end_leave(const Move& move, PlaceId place) {
  Record& of = record(move.page);
  KVM_ASSERT(of.state == State::kMoving && n_moving_ > 0);
  KVM_ASSERT(of.place == kNoPlace || of.place == place);
  --n_moving_;
  of.place = place;
  of.state = State::kSealed;
  if (of.n_refs == 0) {
    forget(move.page);
  } else if (place != kNoPlace) {
    leave_frame(move.page);
    of.frame = kNoFrame;
    ++n_pages_away_;
    away_bytes_ += move.size_bytes;
    page_bytes_ -= move.size_bytes;
  }
}

void PageTable::end_copy(const Move& move, PlaceId place) {
  Record& of = record(move.page);
  KVM_ASSERT(of.state == State::kMoving && n_moving_ > 0);
  KVM_ASSERT(of.frame != kNoFrame && of.place == kNoPlace);
  --n_moving_;
  of.place = place;
  of.state = State::kSealed;
  if (of.n_refs == 0) {
    forget(move.page);
  }
}

Result<PageTable::Move> PageTable::begin_fetch(PageRef page) {
  KVM_ASSERT(!is_in_memory(page));
  return begin_to_frame(page);
}

void PageTable::end_fetch(const Move& move, bool is_there) {
  Record& of = record(move.page);
  KVM_ASSERT(of.state == State::kMoving && n_moving_ > 0 && n_targets_ > 0);
  --n_moving_;
  --n_targets_;
  of.state = State::kSealed;
  if (of.n_refs == 0 || !is_there) {
    pool_->free(move.frame);
  }
  if (of.n_refs == 0) {
    forget(move.page);
  } else if (is_there) {
    of.frame = move.frame;
    --n_pages_away_;
    away_bytes_ -= move.size_bytes;
    page_bytes_ += move.size_bytes;
  }
}

bool PageTable::collect_movable(HostPool::ExtentRef extent, std::vector<PageRef>* pages) const {
  bool are_all = true;
  pool_->for_each_used(extent, [&](FrameRef frame) {
    const PageRef page = pool_->owner(frame);
    if (page == kNoPage) {
      return;
    }
    if (const Record& of = record(page); of.frame == frame && of.state == State::kSealed) {
      pages->push_back(page);
    } else {
      are_all = false;
    }
  });
  return are_all;
}

bool PageTable::has_pages(HostPool::ExtentRef extent) const {
  return pool_->any_used(extent, [&](FrameRef frame) { return pool_->owner(frame) != kNoPage; });
}

bool PageTable::free_left_frames() {
  if (first_left_ < left_.size() && left_.back().epoch == epochs_.now()) {
    epochs_.advance();
  }
  const size_t first = first_left_;
  for (; first_left_ < left_.size() && first_left_ - first < kMostFreed &&
         epochs_.has_ended(left_[first_left_].epoch);
       ++first_left_) {
    left_bytes_ -= pool_->slab_class(left_[first_left_].frame).page_bytes();
    pool_->free(left_[first_left_].frame);
  }
  const bool has_any = first_left_ != first;
  if (2 * first_left_ > left_.size()) {
    left_.erase(left_.begin(), left_.begin() + static_cast<ptrdiff_t>(first_left_));
    first_left_ = 0;
  }
  return has_any;
}

Result<uint32_t> PageTable::directory_with_room(const SlabClass& slab_class) {
  for (uint32_t i = 0; i < n_directories_; ++i) {
    if (directories_[i]->slab_class == slab_class && directories_[i]->has_free_slot()) {
      return i;
    }
  }
  uint32_t index = n_directories_;
  if (index == kMaxSlabs) {
    // Numbers have run out: take that of a directory without pages.
    const auto empty = std::ranges::find_if(
        directories_, [](const auto& directory) { return directory->n_names == 0; });
    if (empty == directories_.end()) {
      return Status(KVM_ERR_NO_SPACE, "pages of " + std::to_string(kMaxSlabs) +
                                          " other kinds are in use, and there are no more names");
    }
    index = static_cast<uint32_t>(empty - directories_.begin());
  }
  auto directory = std::make_unique<Directory>();
  directory->slab_class = slab_class;
  directory->page_bytes = slab_class.page_bytes();
  directories_[index] = std::move(directory);
  n_directories_ = std::max(n_directories_, index + 1);
  return index;
}

uint32_t PageTable::take_slot(Directory& directory) {
  const uint32_t slot = directory.first_free;
  if (slot != kNoSlot) {
    directory.first_free = directory.at(slot).frame.number;
    return slot;
  }
  std::unique_ptr<Chunk>& chunk = directory.chunks[directory.n_slots >> kChunkBits];
  if (chunk == nullptr) {
    chunk = std::make_unique<Chunk>();
  }
  return directory.n_slots++;
}

void PageTable::free_slot(Directory& directory, uint32_t slot) {
  directory.at(slot) = {.frame = {directory.first_free}};
  directory.first_free = slot;
}

void PageTable::check_accounts() const {
  pool_->check_accounts();
  uint64_t n_pages = 0;
  uint64_t n_pages_away = 0;
  uint64_t away_bytes = 0;
  uint64_t page_bytes = 0;
  uint64_t n_moving = 0;
  std::unordered_set<uint32_t> frames;
  const auto add_frame = [&](FrameRef frame) {
    KVM_ASSERT(pool_->is_used(frame));
    KVM_ASSERT(frames.insert(frame.number).second);
  };
  for (uint32_t i = 0; i < n_directories_; ++i) {
    const Directory& directory = *directories_[i];
    uint32_t n_names = 0;
    for (uint32_t slot = 0; slot < directory.n_slots; ++slot) {
      const Record& record = directory.at(slot);
      if (record.state == State::kFree) {
        continue;
      }
      ++n_names;
      const bool is_in_memory = record.frame != kNoFrame;
      n_pages += record.n_refs > 0 ? 1 : 0;
      n_pages_away += record.n_refs > 0 && !is_in_memory ? 1 : 0;
      away_bytes += record.n_refs > 0 && !is_in_memory ? directory.page_bytes : 0;
      page_bytes += record.n_refs > 0 && is_in_memory ? directory.page_bytes : 0;
      n_moving += record.state == State::kMoving ? 1 : 0;
      KVM_ASSERT(record.n_refs > 0 || record.state == State::kMoving);
      KVM_ASSERT(record.place == kNoPlace || record.state != State::kWritten);
      if (!is_in_memory) {
        KVM_ASSERT(record.place != kNoPlace && record.state != State::kWritten);
        continue;
      }
      add_frame(record.frame);
      KVM_ASSERT(pool_->slab_class(record.frame) == directory.slab_class);
      KVM_ASSERT(pool_->owner(record.frame) == make_page_ref(i, slot));
    }
    KVM_ASSERT(n_names == directory.n_names);
    uint32_t n_free = 0;
    for (uint32_t slot = directory.first_free; slot != kNoSlot;
         slot = directory.at(slot).frame.number) {
      KVM_ASSERT(slot < directory.n_slots && directory.at(slot).state == State::kFree);
      ++n_free;
    }
    KVM_ASSERT(n_names + n_free == directory.n_slots);
  }
  for (size_t i = first_left_; i < left_.size(); ++i) {
    add_frame(left_[i].frame);
    KVM_ASSERT(pool_->owner(left_[i].frame) == kNoPage);
  }
  KVM_ASSERT(n_pages == n_pages_ && page_bytes == page_bytes_ && n_moving == n_moving_);
  KVM_ASSERT(n_pages_away == n_pages_away_ && away_bytes == away_bytes_ && n_targets_ <= n_moving_);
  KVM_ASSERT(frames.size() + n_targets_ == pool_->n_frames());
}

}  // namespace kvm::tiers
