// SPDX-License-Identifier: Apache-2.0
// A DiskIo that hands everything on to another one, which outlives it: to change one thing of it,
// or to keep a disk beyond the tier that owns its DiskIo.
#ifndef KVM_TESTS_COMMON_FORWARDED_DISK_H_
#define KVM_TESTS_COMMON_FORWARDED_DISK_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "tiers/disk/disk_io.h"

namespace kvm::testing {

class ForwardedDisk : public tiers::DiskIo {
 public:
  explicit ForwardedDisk(tiers::DiskIo* disk) : disk_(*disk) {}
  const char* name() const override { return disk_.name(); }
  bool is_direct() const override { return disk_.is_direct(); }
  uint32_t block_bytes() const override { return disk_.block_bytes(); }
  std::span<std::byte> buffers() override { return disk_.buffers(); }
  Status create(uint32_t file, const std::string& path, uint64_t size_bytes) override {
    return disk_.create(file, path, size_bytes);
  }
  Result<uint64_t> attach(uint32_t file, const std::string& path) override {
    return disk_.attach(file, path);
  }
  Status sync_entry(uint32_t file) override { return disk_.sync_entry(file); }
  void remove(uint32_t file) noexcept override { disk_.remove(file); }
  void submit(std::span<tiers::DiskOp* const> ops) noexcept override { disk_.submit(ops); }
  size_t reap(std::span<tiers::DiskOp*> ended, uint64_t timeout_ns) noexcept override {
    return disk_.reap(ended, timeout_ns);
  }
  void wake() noexcept override { disk_.wake(); }

 private:
  tiers::DiskIo& disk_;
};

}  // namespace kvm::testing

#endif  // KVM_TESTS_COMMON_FORWARDED_DISK_H_
