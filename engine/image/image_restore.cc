// SPDX-License-Identifier: Apache-2.0
#include "engine/image/image_restore.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/assert.h"
#include "engine/image/image_pages.h"

namespace kvm::engine {
namespace {

// Puts what an image has of it where the sequence has it. slots: of all lists, or none yet.
template <typename T>
Status restore_one(StoreMemory* memory, const Sequence* seq, std::optional<T>* from,
                   std::vector<std::shared_ptr<T>>* slots, uint32_t list) {
  if (from->has_value()) {
    slots->resize(seq->lists.size());
    KVM_TRY_ASSIGN((*slots)[list], memory->make_charged(seq->account, std::move(**from)));
    from->reset();
  }
  return Status::ok();
}

}  // namespace

ImageRestore::ImageRestore(std::vector<tiers::ObjectRequest::Page>&& places)
    : places_(std::move(places)) {}

KvBytes ImageRestore::page_bytes(const Space& space) const {
  KvBytes size;
  for (uint32_t list = 0; list < image_.lists.size(); ++list) {
    const HeadClass& head_class = class_of_list(space, list);
    for (const ImagePage& page : image_.lists[list].pages) {
      const tiers::SlabClass& slab_class = page.slab_class(head_class);
      size += KvBytes::of(slab_class.page_bytes(), slab_class.stays());
    }
  }
  return size;
}

Result<bool> ImageRestore::go_on(Store* store, Aside* aside, uint64_t max_pages) {
  Sequence* seq = aside->seq.get();
  KVM_ASSERT(image_.lists.size() == seq->lists.size());
  for (uint64_t n = 0; list_ < image_.lists.size(); ++list_, page_ = 0) {
    ListImage& list = image_.lists[list_];
    const HeadClass& head_class = class_of_list(seq->space(), list_);
    for (; page_ < list.pages.size(); ++page_, ++n) {
      if (n >= max_pages) {
        return false;
      }
      const ImagePage& page = list.pages[page_];
      KVM_ASSERT(page.page == next_place_);
      KVM_TRY(store->restore_page(aside, list_, page.slab_class(head_class),
                                  places_[next_place_].place,
                                  {.block = page.block, .first = page.first, .count = page.count}));
      ++next_place_;
    }
    if (n >= max_pages) {
      return false;
    }
    ++n;
    seq->lists[list_].end_restore(list.length, list.dropped_end);
    KVM_TRY(restore_beside(&store->memory(), seq, list_));
  }
  KVM_TRY(restore_whole(&store->memory(), seq));
  return true;
}

Status ImageRestore::restore_beside(StoreMemory* memory, Sequence* seq, uint32_t list) {
  ListImage& from = image_.lists[list];
  if (!seq->settled_ends.empty()) {
    seq->settled_ends[list] = from.settled_end;
  }
  KVM_TRY(restore_one(memory, seq, &from.mean, &seq->mean_entries, list));
  KVM_TRY(restore_one(memory, seq, &from.kept, &seq->kept, list));
  if (from.masses) {
    seq->masses.resize(seq->lists.size());
    KVM_TRY_ASSIGN(seq->masses[list].data,
                   memory->make_charged(seq->account, std::move(*from.masses)));
  }
  return Status::ok();
}

Status ImageRestore::restore_whole(StoreMemory* memory, Sequence* seq) {
  for (uint32_t layer = 0; layer < image_.observed.size(); ++layer) {
    seq->observed.resize(image_.observed.size());
    if (image_.observed[layer]) {
      KVM_TRY_ASSIGN(seq->observed[layer].data,
                     memory->make_charged(seq->account, std::move(*image_.observed[layer])));
    }
  }
  if (image_.has_budgets) {
    for (const ListImage& list : image_.lists) {
      seq->budgets.push_back(list.budget);
    }
  }
  seq->flags = image_.flags;
  seq->n_committed = image_.n_committed;
  seq->prompt_end = image_.prompt_end;
  seq->due_events = image_.due_events;
  seq->next_commits = std::move(image_.next_commits);
  return Status::ok();
}

bool ImageRestore::release_some(tiers::SlowTier* tier, uint64_t n_max) {
  for (uint64_t n = 0; n < n_max && next_place_ < places_.size(); ++n, ++next_place_) {
    tier->release(places_[next_place_].place);
  }
  return next_place_ == places_.size();
}

}  // namespace kvm::engine
