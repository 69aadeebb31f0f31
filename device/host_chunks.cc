// SPDX-License-Identifier: Apache-2.0
#include "device/host_chunks.h"

#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/assert.h"
#include "base/round.h"

namespace kvm::device {
namespace {

// The driver is busy for as long as one call takes, so no call registers everything.
constexpr uint64_t kRegisteredAtOnce = uint64_t{1} << 30;
static_assert(kRegisteredAtOnce % kChunkBytes == 0);

}  // namespace

Result<std::unique_ptr<HostChunks>> HostChunks::create(MemoryDriver* driver, uint64_t size_bytes) {
  std::unique_ptr<HostChunks> chunks(new HostChunks(driver, round_up(size_bytes, kChunkBytes)));
  const uint64_t all = chunks->size_bytes_;
  if (all == 0) {
    return chunks;
  }
  void* memory = ::mmap(nullptr, all, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    return Status(KVM_ERR_NO_MEMORY,
                  std::to_string(all) + " bytes for spilled sequences cannot be mapped");
  }
  chunks->memory_ = static_cast<uint8_t*>(memory);
  // A fork would copy locked pages there and then, and its child cannot use the device anyway.
  (void)::madvise(memory, all, MADV_DONTFORK);
  // Fewer, larger pages are locked faster; without them it works as well.
  (void)::madvise(memory, all, MADV_HUGEPAGE);
  while (chunks->registered_bytes_ < all) {
    const uint64_t size = std::min(all - chunks->registered_bytes_, kRegisteredAtOnce);
    KVM_TRY(driver->register_host(chunks->memory_ + chunks->registered_bytes_, size));
    chunks->registered_bytes_ += size;
  }
  chunks->refs_.resize(chunks->n_chunks());
  for (auto chunk = static_cast<uint32_t>(chunks->n_chunks()); chunk > 0; --chunk) {
    chunks->free_.push_back(chunk - 1);
  }
  return chunks;
}

HostChunks::~HostChunks() {
  for (uint64_t at = 0; at < registered_bytes_; at += kRegisteredAtOnce) {
    driver_->unregister_host(memory_ + at);
  }
  if (memory_ != nullptr) {
    ::munmap(memory_, size_bytes_);
  }
}

uint32_t HostChunks::take() {
  const uint32_t chunk = free_.back();
  free_.pop_back();
  refs_[chunk] = 1;
  return chunk;
}

void HostChunks::release(uint32_t chunk) {
  KVM_ASSERT(refs_[chunk] > 0);
  if (--refs_[chunk] == 0) {
    free_.push_back(chunk);
  }
}

}  // namespace kvm::device
