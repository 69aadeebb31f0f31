// SPDX-License-Identifier: Apache-2.0
#include "engine/run/full_pages.h"

#include <algorithm>

namespace kvm::engine {

namespace {

// To come to a stretch costs as much as so many pages of it.
constexpr uint64_t kStretchVisits = 32;

}  // namespace

void FullPages::rewind() {
  list_ = 0;
  block_ = 0;
  has_skipped_ = false;
}

bool FullPages::find(const tiers::PageTable& pages, const Sequence& seq, bool in_memory,
                     const Worth& worth, uint64_t max_bytes, std::vector<FullPage>* found) {
  const Space& space = seq.space();
  const Priorities& priorities = seq.residence.priorities();
  found->clear();
  uint64_t n_visited = 0;
  uint64_t found_bytes = 0;
  for (uint32_t layer = 0; layer < space.n_layers; ++layer) {
    const Layer& own = space.layers[layer];
    const size_t n_classes = own.kind == KVM_LAYER_OWN ? own.classes.size() : 0;
    for (uint32_t c = 0; c < n_classes; ++c) {
      const uint32_t list = own.first_list + c;
      if (list < list_ || own.classes[c].slab_class.stays()) {
        continue;
      }
      block_ = list == list_ ? block_ : 0;
      list_ = list;
      const PageList& from = seq.layer_lists(layer)[c];
      // What is to be encoded anew stays until it has been.
      const uint64_t end =
          (own.classes[c].settles() ? seq.settled_ends[list] : from.length()) / kPageTokens;
      has_skipped_ |= end < from.length() / kPageTokens;
      const uint64_t largest = own.classes[c].slab_class.tail().page_bytes();
      while (block_ < end) {
        if (found->size() == kMaxPages || n_visited >= kMaxVisits || found_bytes >= max_bytes) {
          return false;
        }
        const Priorities::Stretch stretch = priorities.at(block_, worth.now_ns);
        if (stretch.priority > worth.max_priority) {
          has_skipped_ = true;
          block_ = std::min(end, stretch.end);
          n_visited += kStretchVisits;
          continue;
        }
        const uint64_t n_left = std::min(
            kMaxPages - found->size(), std::max<uint64_t>(1, (max_bytes - found_bytes) / largest));
        const uint64_t block_end = std::min({end, stretch.end, block_ + n_left});
        n_visited += kStretchVisits + block_end - block_;
        from.for_each_between(block_, block_end, [&](const PageEntry& entry, bool is_shared) {
          if (entry.count != kPageTokens || pages.is_in_memory(entry.page) != in_memory) {
            return;
          }
          if (!pages.is_sealed(entry.page)) {
            has_skipped_ = true;
          } else {
            found->push_back({entry.page, is_shared || pages.n_refs(entry.page) > 1});
            found_bytes += pages.page_bytes(entry.page);
          }
        });
        block_ = block_end;
      }
    }
  }
  return true;
}

}  // namespace kvm::engine
