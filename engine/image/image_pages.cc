// SPDX-License-Identifier: Apache-2.0
#include "engine/image/image_pages.h"

#include <algorithm>

#include "base/assert.h"
#include "base/reserve.h"
#include "base/round.h"

namespace kvm::engine {

const HeadClass& class_of_list(const Space& space, uint32_t list) {
  const auto layer = std::find_if(space.layers.begin(), space.layers.end(), [&](const Layer& own) {
    return own.kind == KVM_LAYER_OWN && list >= own.first_list &&
           list - own.first_list < own.classes.size();
  });
  KVM_ASSERT(layer != space.layers.end());
  return layer->classes[list - layer->first_list];
}

void ImagePages::add(const tiers::PageTable& pages, const HeadClass& head_class,
                     const PageEntry& entry, std::vector<ImagePage>* list) {
  const tiers::SlabClass& slab_class = pages.slab_class(entry.page);
  const PageKind kind = slab_class == head_class.slab_class          ? PageKind::kSettled
                        : slab_class == head_class.slab_class.tail() ? PageKind::kTail
                                                                     : PageKind::kDemoted;
  list->push_back({.block = entry.block,
                   .page = static_cast<uint32_t>(pages_.size()),
                   .first = entry.first,
                   .count = entry.count,
                   .kind = kind});
  KVM_ASSERT(list->back().slab_class(head_class) == slab_class);
  pages_.push_back(entry.page);
  page_bytes_ += slab_class.page_bytes();
}

bool ImagePages::go_on(const tiers::PageTable& pages, const Sequence& seq, uint64_t max_pages) {
  lists_.resize(seq.lists.size());
  for (uint64_t n = 0; list_ < seq.lists.size(); ++list_, block_ = 0) {
    const HeadClass& head_class = class_of_list(seq.space(), list_);
    const PageList& list = seq.lists[list_];
    const uint64_t end = div_up(list.length(), kPageTokens);
    for (++n; block_ < end;) {
      if (n >= max_pages) {
        return false;
      }
      const uint64_t block_end = std::min(end, block_ + (max_pages - n));
      // What may throw comes first, so that no page is numbered twice.
      reserve_growing(lists_[list_], lists_[list_].size() + (block_end - block_));
      reserve_growing(pages_, pages_.size() + (block_end - block_));
      list.for_each_between(block_, block_end, [&](const PageEntry& entry) {
        add(pages, head_class, entry, &lists_[list_]);
      });
      n += block_end - block_;
      block_ = block_end;
    }
  }
  return true;
}

}  // namespace kvm::engine
