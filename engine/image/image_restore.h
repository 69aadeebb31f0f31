// SPDX-License-Identifier: Apache-2.0
// An ImageRestore makes a sequence of an image and of the places of its pages, a part at a time:
// the pages are away, and what it has besides is in memory.
//
// Threads: the driver.  Memory: the image, until what it says is the sequence's.
#ifndef KVM_ENGINE_IMAGE_IMAGE_RESTORE_H_
#define KVM_ENGINE_IMAGE_IMAGE_RESTORE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/image/sequence_image.h"
#include "engine/store/store.h"
#include "tiers/object_store.h"
#include "tiers/slow_tier.h"

namespace kvm::engine {

class ImageRestore {
 public:
  // places: of the image's pages, with a reference on each that is this one's until the sequence
  // has it.
  explicit ImageRestore(std::vector<tiers::ObjectRequest::Page>&& places);

  const std::vector<tiers::ObjectRequest::Page>& places() const { return places_; }
  // What is to be restored. REQUIRES: it was decoded for these places.
  void take(SequenceImage&& image) { image_ = std::move(image); }
  // Of its pages, in a space that it fits.
  KvBytes page_bytes(const Space& space) const;
  // Goes on by about max_pages pages, and is done: true. Fails: QUOTA, NO_SPACE. Throws
  // std::bad_alloc. The sequence is then good for nothing but to be freed.
  // REQUIRES: take(); the sequence was begun for the space of the image, and for the bytes of all
  // pages.
  Result<bool> go_on(Store* store, Aside* aside, uint64_t max_pages);
  // Releases references that are still this one's, about n_max: true when there are none.
  bool release_some(tiers::SlowTier* tier, uint64_t n_max);

 private:
  Status restore_beside(StoreMemory* memory, Sequence* seq, uint32_t list);
  Status restore_whole(StoreMemory* memory, Sequence* seq);

  SequenceImage image_;
  std::vector<tiers::ObjectRequest::Page> places_;
  uint64_t next_place_ = 0;  // the first that is this one's
  uint32_t list_ = 0;        // where it goes on
  uint64_t page_ = 0;        // of that list
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_IMAGE_IMAGE_RESTORE_H_
