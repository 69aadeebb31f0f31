// SPDX-License-Identifier: Apache-2.0
#include "bench/null_driver.h"

#include <sys/mman.h>

#include <memory>

namespace kvm::bench {

NullDriver::NullDriver(uint64_t memory_bytes, uint32_t blocks, NullCounts* counts)
    : blocks_(blocks), counts_(counts) {
  facts_.name = "nothing";
  facts_.free_bytes = memory_bytes;
  facts_.granularity_bytes = uint64_t{2} << 20;
  facts_.n_sms = blocks;
}

Result<uint8_t*> NullDriver::reserve(uint64_t size_bytes) {
  // Addresses that nobody reads.
  void* const range =
      ::mmap(nullptr, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    return Status(KVM_ERR_NO_SPACE, "no addresses");
  }
  return static_cast<uint8_t*>(range);
}

void NullDriver::release(uint8_t* range, uint64_t size_bytes) { ::munmap(range, size_bytes); }

// Until the process ends: a bench opens few devices.
Result<uint8_t*> NullDriver::allocate(uint64_t size_bytes) { return reserve(size_bytes); }

Status NullDriver::copy(void*, const void*, uint64_t size_bytes, device::Stream) {
  ++counts_->n_copies;
  counts_->copied_bytes += size_bytes;
  return Status::ok();
}

void* NullDriver::handle() { return reinterpret_cast<void*>(++last_); }

Status NullDriver::event() {
  ++counts_->n_events;
  return Status::ok();
}

Status NullDriver::launch() {
  ++counts_->n_launches;
  return Status::ok();
}

}  // namespace kvm::bench

namespace kvm::device {

Result<std::unique_ptr<Driver>> open_driver(uint32_t) {
  return Status(KVM_ERR_UNSUPPORTED, "a bench has no device");
}

}  // namespace kvm::device
