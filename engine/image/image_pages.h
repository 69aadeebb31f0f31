// SPDX-License-Identifier: Apache-2.0
// ImagePages numbers the pages of a sequence, list by list and by position, a part at a time. The
// sequence must not change meanwhile.
//
// Threads: the driver.  Memory: 20 bytes a page.
#ifndef KVM_ENGINE_IMAGE_IMAGE_PAGES_H_
#define KVM_ENGINE_IMAGE_IMAGE_PAGES_H_

#include <cstdint>
#include <vector>

#include "engine/image/sequence_image.h"
#include "engine/store/sequence.h"
#include "tiers/page_table.h"

namespace kvm::engine {

class ImagePages {
 public:
  // Goes on by about max_pages, and is done: true. Throws std::bad_alloc: it may go on.
  bool go_on(const tiers::PageTable& pages, const Sequence& seq, uint64_t max_pages);
  uint64_t page_bytes() const { return page_bytes_; }  // of those so far
  // By their numbers.
  const std::vector<tiers::PageRef>& pages() const { return pages_; }
  // Of each list: what encode_image takes.
  const std::vector<std::vector<ImagePage>>& lists() const { return lists_; }

 private:
  void add(const tiers::PageTable& pages, const HeadClass& head_class, const PageEntry& entry,
           std::vector<ImagePage>* list);

  std::vector<std::vector<ImagePage>> lists_;
  std::vector<tiers::PageRef> pages_;
  uint64_t page_bytes_ = 0;
  uint32_t list_ = 0;  // where it goes on
  uint64_t block_ = 0;
};

// The class of a list, by its number.
const HeadClass& class_of_list(const Space& space, uint32_t list);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_IMAGE_IMAGE_PAGES_H_
