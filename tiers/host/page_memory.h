// SPDX-License-Identifier: Apache-2.0
// PageMemory: where slabs have their memory from. The real one asks the operating system; tests put
// one in its place that counts, checks and refuses (tests/sim/simulated_page_memory.h).
//
//   reserve --> no access --> open --> zeros, read and written --> discard --> zeros again
//
// A call or two an extent (2 MiB), so being virtual costs nothing. Sizes are multiples of
// kExtentBytes.
//
// Threads: as HostPool, but for touch().
#ifndef KVM_TIERS_HOST_PAGE_MEMORY_H_
#define KVM_TIERS_HOST_PAGE_MEMORY_H_

#include <cstddef>
#include <cstdint>

namespace kvm::tiers {

class PageMemory {
 public:
  virtual ~PageMemory() = default;
  // Addresses without memory, aligned to an OS page. Null: refused, and errno says why.
  virtual std::byte* reserve(uint64_t size_bytes) = 0;
  // Makes a part of a reservation accessible, for as long as that lasts. False: refused, and errno
  // says why; nothing has changed.
  virtual bool open(std::byte* data, uint64_t size_bytes) = 0;
  // Gives the memory of an open part back; it stays accessible. Never refused.
  virtual void discard(std::byte* data, uint64_t size_bytes) = 0;
  // Somebody will soon write to an open part of one extent: its memory may be made until then.
  virtual void expect(std::byte* /*extent*/) {}
  // Makes the memory of an open part now, which its first use costs otherwise; what is written
  // there stays. A refusal costs time only. Threads: any, beside those that use the part; not
  // beside discard() of it.
  virtual void touch(std::byte* data, uint64_t size_bytes) = 0;
  // Ends a reservation, all of it.
  virtual void release(std::byte* data, uint64_t size_bytes) = 0;
};

// Private anonymous memory, in huge OS pages where the system has them. Lives for ever.
PageMemory* system_page_memory();

}  // namespace kvm::tiers

#endif  // KVM_TIERS_HOST_PAGE_MEMORY_H_
