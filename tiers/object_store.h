// SPDX-License-Identifier: Apache-2.0
// ObjectStore: what a slow tier keeps when the process ends, however it ends. An object has a key,
// a label, a body of bytes, and the pages that the body speaks of.
//
//   SlowTier: pages are written, and have places
//   put(key, label, body, places) --> on_done: from now on a crash takes nothing of it
//   ... the process ends; the tier is opened again ...
//   list(): keys and labels --> get(key): body and places, as they were --> SlowTier: reads
//
// An object is there whole or not at all. put() of a key that is there replaces its object in one
// step: after a crash it is the one before or the new one. What a request has said is done stays
// done; what was under way may have happened or not.
//
// Pages are shared, not copied: an object has a reference on each of its places
// (SlowTier::add_ref), and so a page that several objects or a sequence name is written once.
//
// Threads: submit() and list() on any. on_done as that of a Transfer.
#ifndef KVM_TIERS_OBJECT_STORE_H_
#define KVM_TIERS_OBJECT_STORE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "tiers/slow_tier.h"

namespace kvm::tiers {

// LIMIT: what of an object stays in memory while nobody uses it, beside 4 bytes a page.
inline constexpr size_t kMaxObjectKeyBytes = 256;
inline constexpr size_t kMaxObjectLabelBytes = 1024;

struct ObjectInfo {
  std::string key;
  std::string label;
  uint64_t n_pages = 0;
  uint64_t page_bytes = 0;  // of these, each whole, whoever else has it
  uint64_t body_bytes = 0;
  bool is_lost = false;  // get() fails: not all of it is there
};

// An ObjectRequest belongs to the submitter and stays as it is from submit() until on_done.
class ObjectRequest {
 public:
  enum class Kind : uint8_t { kPut, kGet, kRemove };
  struct Page {
    PlaceId place = kNoPlace;
    uint32_t size_bytes = 0;  // of what is written there
  };

  Kind kind = Kind::kGet;
  std::string key;              // 1 to kMaxObjectKeyBytes
  std::string label;            // of a put: at most kMaxObjectLabelBytes
  std::vector<std::byte> body;  // of a put: given; of a get: found
  // Of a put: given, the places that the object is to keep; the submitter has a reference on each
  // until on_done. Of a get: found, with a reference on each that is the submitter's.
  std::vector<Page> pages;
  // By the time of on_done: OK; IO; NO_MEMORY; of a put NO_SPACE, LIMIT (objects, or the sizes
  // above); of the others NOT_FOUND; of a get LOST (not all of it was found) and
  // CORRUPT. After a failed put or remove the object
  // there was before is there still.
  Status status;

  // The last that the store does with it: it may be gone when this returns.
  virtual void on_done() noexcept = 0;

 protected:
  ~ObjectRequest() = default;
};

// What opening a store has found.
struct RecoveryReport {
  uint64_t n_objects = 0;
  uint64_t n_pages = 0;  // of these
  uint64_t page_bytes = 0;
  uint64_t n_lost_objects = 0;  // that were put, and whose pages or bodies are not there any more
  // Parts of the list of objects that cannot be read: what was put or removed last may not have
  // been.
  uint64_t n_damaged_blocks = 0;
  uint64_t n_torn_blocks = 0;    // likewise, that were being written when the process ended
  uint64_t n_open_segments = 0;  // that were being written when the process ended
  uint64_t duration_ns = 0;
};

class ObjectStore {
 public:
  // Begins it. Requests of the same key take effect in the order of submission.
  virtual void submit(ObjectRequest* request) noexcept = 0;
  // Objects whose keys follow `after`, by key, at most n_max. Throws std::bad_alloc.
  virtual std::vector<ObjectInfo> list(std::string_view after, size_t n_max) const = 0;
  virtual RecoveryReport recovery() const { return {}; }

 protected:
  ~ObjectStore() = default;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_OBJECT_STORE_H_
