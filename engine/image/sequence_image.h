// SPDX-License-Identifier: Apache-2.0
// SequenceImage: a sequence without the ids of one run, and its form as bytes
// (docs/image_format.md). Its pages are numbers from 0 on, in the order of the places of the object
// that keeps them (tiers/object_store.h).
//
//   fork, numbers of its pages --(encode_image)--> bytes --(decode_image)--> SequenceImage -->
//   ImageRestore (engine/image/image_restore.h)
//
// Bytes from a disk are hostile: whatever they are, decode_image ends, with an image that a
// sequence may have been or with an error. What it gives breaks no assertion of the engine.
//
// Threads: any; nothing else may change what the arguments refer to.
#ifndef KVM_ENGINE_IMAGE_SEQUENCE_IMAGE_H_
#define KVM_ENGINE_IMAGE_SEQUENCE_IMAGE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/space/space.h"
#include "engine/store/kept_tokens.h"
#include "engine/store/mean_entry.h"
#include "engine/store/observed.h"
#include "engine/store/sequence.h"
#include "policies/policy.h"

namespace kvm::engine {

// Which class of its head class a page is of. DISK: frozen.
enum class PageKind : uint8_t {
  kSettled = 0,  // HeadClass::slab_class
  kTail = 1,     // its tail()
  kDemoted = 2,  // HeadClass::demoted
};

// An ImagePage is an entry of a list.
struct ImagePage {
  uint32_t block = 0;
  uint32_t page = 0;  // its number
  uint16_t first = 0;
  uint16_t count = 0;
  PageKind kind = PageKind::kSettled;

  // The class of its page.
  tiers::SlabClass slab_class(const HeadClass& of) const {
    return kind == PageKind::kTail      ? of.slab_class.tail()
           : kind == PageKind::kDemoted ? of.demoted
                                        : of.slab_class;
  }
};

struct ListImage {
  uint64_t length = 0;
  uint64_t dropped_end = 0;  // as PageList has it
  std::vector<ImagePage> pages;
  uint64_t settled_end = 0;
  policies::Budget budget;
  std::optional<MeanEntry> mean;
  std::optional<KeptTokens> kept;
  std::optional<Masses> masses;
};

// What a prefix is found by, in any space of its layout, policies and fingerprint.
struct PrefixImage {
  std::vector<kvm_prefix_hash> hashes;  // none: it is no prefix
  uint64_t keep_ns = 0;
};

struct SequenceImage {
  uint32_t flags = 0;
  uint64_t n_committed = 0;
  uint64_t prompt_end = UINT64_MAX;
  bool has_budgets = false;
  policies::EventSet due_events = 0;
  std::vector<uint64_t> next_commits;
  std::vector<ListImage> lists;                   // [Space::n_lists]
  std::vector<std::optional<Observed>> observed;  // [n_layers], or empty
  PrefixImage prefix;
};

// LIMIT: so that no offset of a FlatBuffer runs over.
inline constexpr uint64_t kMaxImageBytes = uint64_t{1} << 30;

// The bytes of a sequence. pages: of each list, [Space::n_lists]; their numbers count up from 0
// through all lists. Fails: LIMIT (kMaxImageBytes). Throws std::bad_alloc.
Result<std::vector<std::byte>> encode_image(const Sequence& seq,
                                            std::span<const std::vector<ImagePage>> pages,
                                            const PrefixImage& prefix = {});

// page_bytes: of the pages of the object. Fails: CORRUPT; UNSUPPORTED (another version of this
// format); INVALID, naming it, where the layout, the policies or the fingerprint that were saved
// are not the space's. Throws std::bad_alloc.
// REQUIRES: body.data() is aligned as memory of the heap is.
Result<SequenceImage> decode_image(std::span<const std::byte> body, const Space& space,
                                   std::span<const uint32_t> page_bytes);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_IMAGE_SEQUENCE_IMAGE_H_
