// SPDX-License-Identifier: Apache-2.0
// IdTable: owns objects and names them by 64-bit ids that are never reused.
//
//   63       44   43   42        22   21           0
//   epoch tag     kind  index          generation
//
// The epoch tag is a random non-zero number of this start of the service, so that ids of an earlier
// start are recognised; kind tells spaces from sequences. Freeing an object advances the generation
// of its place; a place whose generations are used up is not used again. 0 is no id.
//
// Threads: one.
#ifndef KVM_ENGINE_STORE_ID_TABLE_H_
#define KVM_ENGINE_STORE_ID_TABLE_H_

#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "base/status.h"
#include "base/undo.h"

namespace kvm::engine {

inline constexpr uint32_t kIdGenerationBits = 22;
inline constexpr uint32_t kIdIndexBits = 21;
inline constexpr uint32_t kIdEpochShift = kIdGenerationBits + kIdIndexBits + 1;
inline constexpr uint64_t kIdMaxGeneration = (uint64_t{1} << kIdGenerationBits) - 1;
inline constexpr uint64_t kIdMaxIndex = (uint64_t{1} << kIdIndexBits) - 1;

template <typename T>
class IdTable {
 public:
  // noun: for sentences. REQUIRES: 0 < epoch_tag < 2^20, kind is 0 or 1.
  IdTable(const char* noun, uint32_t epoch_tag, uint32_t kind)
      : noun_(noun), prefix_(uint64_t{epoch_tag} << 1 | kind) {}

  bool full() const { return free_.empty() && places_.size() > kIdMaxIndex; }
  uint64_t size() const { return n_objects_; }

  // REQUIRES: !full(). Throws std::bad_alloc: nothing has changed, and `object` is the caller's.
  uint64_t insert(std::unique_ptr<T>&& object) {
    KVM_ASSERT(!full());
    if (free_.empty()) {
      places_.emplace_back();
      Undo dropping([this] { places_.pop_back(); });
      // For all places: erasing needs no memory.
      free_.reserve(places_.capacity());
      dropping.dismiss();
      free_.push_back(static_cast<uint32_t>(places_.size() - 1));
    }
    const uint32_t index = free_.back();
    free_.pop_back();
    Place& place = places_[index];
    place.object = std::move(object);
    ++n_objects_;
    return make_id(index, place.generation);
  }

  // Fails: NOT_FOUND, STALE, LOST.
  Result<T*> find(uint64_t id) const {
    const uint64_t tag = id >> kIdEpochShift;
    const uint64_t own_tag = prefix_ >> 1;
    if (tag == 0 || (tag == own_tag && id >> (kIdEpochShift - 1) != prefix_)) {
      return Status(KVM_ERR_NOT_FOUND, describe(id) + " does not exist");
    }
    if (tag != own_tag) {
      return Status(KVM_ERR_LOST, describe(id) + " belongs to another start of the service");
    }
    const uint64_t index = id >> kIdGenerationBits & kIdMaxIndex;
    const uint64_t generation = id & kIdMaxGeneration;
    if (generation == 0 || index >= places_.size() || generation > places_[index].generation) {
      return Status(KVM_ERR_NOT_FOUND, describe(id) + " does not exist");
    }
    if (generation < places_[index].generation) {
      return Status(KVM_ERR_STALE, describe(id) + " is gone");
    }
    if (places_[index].object == nullptr) {
      return Status(KVM_ERR_NOT_FOUND, describe(id) + " does not exist");
    }
    return places_[index].object.get();
  }

  // REQUIRES: find(id) is OK.
  void erase(uint64_t id) {
    const uint32_t index = static_cast<uint32_t>(id >> kIdGenerationBits & kIdMaxIndex);
    Place& place = places_[index];
    place.object.reset();
    --n_objects_;
    if (++place.generation <= kIdMaxGeneration) {
      free_.push_back(index);
    }
  }

  // In the order of ids, those that are at least `begin` (any number). visit(id, object) returns
  // whether to go on.
  template <typename Visitor>
  void walk_from(uint64_t begin, Visitor visit) const {
    uint64_t index = 0;
    if (begin > make_id(0, 0)) {
      if (begin >> (kIdEpochShift - 1) != prefix_) {
        return;  // beyond the last possible id
      }
      index = begin >> kIdGenerationBits & kIdMaxIndex;
    }
    for (; index < places_.size(); ++index) {
      const uint64_t id = make_id(index, places_[index].generation);
      if (places_[index].object != nullptr && id >= begin && !visit(id, *places_[index].object)) {
        return;
      }
    }
  }

  // In the order of ids.
  template <typename Visitor>
  void for_each(Visitor visit) const {
    for (uint32_t index = 0; index < places_.size(); ++index) {
      if (places_[index].object != nullptr) {
        visit(make_id(index, places_[index].generation), *places_[index].object);
      }
    }
  }

 private:
  struct Place {
    uint64_t generation = 1;  // of the object here, or of the next one
    std::unique_ptr<T> object;
  };

  uint64_t make_id(uint64_t index, uint64_t generation) const {
    return prefix_ << (kIdEpochShift - 1) | index << kIdGenerationBits | generation;
  }
  // As kvmctl prints ids.
  std::string describe(uint64_t id) const { return fmt::format("{} {:#x}", noun_, id); }

  const char* noun_;
  uint64_t prefix_;
  std::vector<Place> places_;
  std::vector<uint32_t> free_;
  uint64_t n_objects_ = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_ID_TABLE_H_
