// SPDX-License-Identifier: Apache-2.0
// PageMemory made of plain memory: checks that it is used as it says, counts what is out, refuses
// when told to, and forgets what is discarded at once.
//
// Threads: one.
#ifndef KVM_TESTS_SIM_SIMULATED_PAGE_MEMORY_H_
#define KVM_TESTS_SIM_SIMULATED_PAGE_MEMORY_H_

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <set>

#include "base/assert.h"
#include "tiers/host/page_memory.h"
#include "tiers/slab_class.h"

namespace kvm::testing {

class SimulatedPageMemory final : public tiers::PageMemory {
 public:
  ~SimulatedPageMemory() override { KVM_ASSERT(reservations_.empty()); }

  // The n-th call from now on that may be refused is: 1 is the next one, 0 none.
  void refuse(uint64_t n) { left_ = n; }
  // No more than this is opened from now on.
  void allow_open(uint64_t size_bytes) { left_to_open_ = size_bytes; }
  uint64_t reserved_bytes() const {
    uint64_t sum = 0;
    for (const auto& [data, reservation] : reservations_) {
      sum += reservation.size_bytes;
    }
    return sum;
  }
  std::byte* reserve(uint64_t size_bytes) override {
    KVM_ASSERT(size_bytes != 0 && size_bytes % tiers::kExtentBytes == 0);
    if (is_refused()) {
      return nullptr;
    }
    // Addresses come first; a few extents of a reservation of gigabytes are ever touched.
    auto* data = static_cast<std::byte*>(std::aligned_alloc(4096, size_bytes));
    if (data == nullptr) {
      errno = ENOMEM;
      return nullptr;
    }
    reservations_[data] = {size_bytes, {}};
    return data;
  }

  bool open(std::byte* data, uint64_t size_bytes) override {
    Reservation& reservation = reservation_of(data, size_bytes);
    KVM_ASSERT(!is_open(reservation, data, size_bytes));
    if (is_refused()) {
      return false;
    }
    if (size_bytes > left_to_open_) {
      errno = ENOMEM;
      return false;
    }
    left_to_open_ -= size_bytes;
    for (uint64_t at = 0; at < size_bytes; at += tiers::kExtentBytes) {
      KVM_ASSERT(reservation.open.insert(data + at).second);
    }
    clear(data, size_bytes);
    return true;
  }

  void discard(std::byte* data, uint64_t size_bytes) override {
    KVM_ASSERT(is_open(reservation_of(data, size_bytes), data, size_bytes));
    clear(data, size_bytes);
  }

  void touch(std::byte* data, uint64_t size_bytes) override {
    KVM_ASSERT(is_open(reservation_of(data, size_bytes), data, size_bytes));
  }

  void release(std::byte* data, uint64_t size_bytes) override {
    const auto found = reservations_.find(data);
    KVM_ASSERT(found != reservations_.end() && found->second.size_bytes == size_bytes);
    reservations_.erase(found);
    std::free(data);
  }

 private:
  struct Reservation {
    uint64_t size_bytes = 0;
    std::set<std::byte*> open;  // extents
  };

  // Whether all of a part is.
  static bool is_open(const Reservation& reservation, std::byte* data, uint64_t size_bytes) {
    uint64_t n = 0;
    for (uint64_t at = 0; at < size_bytes; at += tiers::kExtentBytes) {
      n += reservation.open.count(data + at);
    }
    KVM_ASSERT(n == 0 || n * tiers::kExtentBytes == size_bytes);
    return n != 0;
  }

  // As the system does it, which pays no heed to what AddressSanitizer was told of free pages.
  __attribute__((no_sanitize("address"))) static void clear(std::byte* data, uint64_t size_bytes) {
    auto* words = reinterpret_cast<volatile uint64_t*>(data);
    for (uint64_t i = 0; i < size_bytes / sizeof(uint64_t); ++i) {
      words[i] = 0;
    }
  }

  bool is_refused() {
    if (left_ == 0 || --left_ != 0) {
      return false;
    }
    errno = ENOMEM;
    return true;
  }

  Reservation& reservation_of(std::byte* data, uint64_t size_bytes) {
    auto found = reservations_.upper_bound(data);
    KVM_ASSERT(found != reservations_.begin());
    --found;
    KVM_ASSERT(data + size_bytes <= found->first + found->second.size_bytes);
    return found->second;
  }

  uint64_t left_ = 0;
  uint64_t left_to_open_ = UINT64_MAX;
  std::map<std::byte*, Reservation> reservations_;
};

}  // namespace kvm::testing

#endif  // KVM_TESTS_SIM_SIMULATED_PAGE_MEMORY_H_
