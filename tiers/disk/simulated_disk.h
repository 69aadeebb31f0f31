// SPDX-License-Identifier: Apache-2.0
// SimulatedDisk: a DiskIo made of memory, as faulty as it is told to be. All that happens follows
// from the seed and from the calls, so that a run can be had again.
//
// Time passes with reap(): an op of latency n ends at the n-th call from now. Those that are due
// end in an order from the seed.
//
// Threads: as DiskIo.
#ifndef KVM_TIERS_DISK_SIMULATED_DISK_H_
#define KVM_TIERS_DISK_SIMULATED_DISK_H_

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "tiers/disk/disk_io.h"
#include "tiers/disk/disk_memory.h"

namespace kvm::tiers {

enum class DiskFault : uint8_t {
  kReadError,
  kWriteError,
  kNoSpace,      // a write says ENOSPC
  kAgain,        // EAGAIN: nothing is done yet
  kShort,        // fewer bytes than asked for, in blocks
  kTear512,      // a write is done in part of its stretches of 512 bytes, and says it is done
  kTear4096,     // likewise of 4 KiB
  kLostWrite,    // a write does nothing, and says it is done
  kMisdirected,  // a write goes to another offset of the file, and says it is done
  kBitRot,       // a bit of what is read has changed, for ever
  kLostSync,     // a sync does nothing, and says it is done
};
inline constexpr size_t kDiskFaults = 11;

struct SimulatedDiskOptions {
  DiskIoOptions io;  // without n_threads
  uint64_t seed = 0;
  // How many of a million ops that can have the fault do.
  std::array<uint32_t, kDiskFaults> per_million = {};
  uint32_t max_latency = 0;  // each op has one of 0 to this, from the seed
  // Files that fit; create() says NO_SPACE of the others.
  uint32_t max_files = UINT32_MAX;
  // What create() fails with; OK: it does not. None: nothing fails.
  std::function<Status(const std::string& path)> refuse;
  // Keeps what crash() needs.
  bool can_crash = false;

  uint32_t& of(DiskFault fault) { return per_million[static_cast<size_t>(fault)]; }
};

class SimulatedDisk final : public DiskIo {
 public:
  // Throws std::bad_alloc.
  explicit SimulatedDisk(const SimulatedDiskOptions& options);
  ~SimulatedDisk() override;
  SimulatedDisk(const SimulatedDisk&) = delete;
  SimulatedDisk& operator=(const SimulatedDisk&) = delete;

  const char* name() const override { return "simulated"; }
  bool is_direct() const override { return true; }
  uint32_t block_bytes() const override { return 512; }
  std::span<std::byte> buffers() override { return memory_.bytes(); }
  Status create(uint32_t file, const std::string& path, uint64_t size_bytes) override;
  Result<uint64_t> attach(uint32_t file, const std::string& path) override;
  Status sync_entry(uint32_t file) override;
  void remove(uint32_t file) noexcept override;
  void submit(std::span<DiskOp* const> ops) noexcept override;
  size_t reap(std::span<DiskOp*> ended, uint64_t timeout_ns) noexcept override;
  void wake() noexcept override;

  // --- For tests --------------------------------------------------------------------------------

  // How often it came about.
  uint64_t n_faults(DiskFault fault) const { return n_faults_[static_cast<size_t>(fault)]; }
  // Nothing fails from now on.
  void heal() { options_.per_million = {}; }
  // What the file holds, to be looked at and spoilt. REQUIRES: no op of it is in flight.
  std::span<std::byte> bytes(uint32_t file) { return files_[file].bytes; }
  // The process ends: of what is in flight any part may be done yet, and nobody hears of it.
  void forget_in_flight();
  // The power fails: of what was written since the last sync of its file, each stretch of 512 bytes
  // or of 4 KiB, as the seed says, is there or is not. REQUIRES: can_crash; no op is in flight.
  void crash();

 private:
  struct File {
    std::vector<std::byte> bytes;  // none: there is no such file
  };
  struct Pending {
    DiskOp* op = nullptr;
    uint64_t due = 0;
  };
  // What a write has replaced, since the last sync.
  struct Replaced {
    uint32_t file;
    uint64_t offset;
    std::vector<std::byte> bytes;
  };

  uint64_t random();
  bool happens(DiskFault fault);
  // What a system call would return.
  int64_t perform(const DiskOp& op);
  int64_t read(const DiskOp& op, std::span<std::byte> at);
  int64_t write(const DiskOp& op, std::span<std::byte> at);
  void put(const DiskOp& op, uint64_t offset, std::span<const std::byte> from);
  void sync(uint32_t file);

  SimulatedDiskOptions options_;
  const DiskMemory memory_;
  uint64_t random_;
  std::vector<File> files_;
  uint32_t n_files_ = 0;
  std::vector<Pending> pending_;  // has room for queue_depth
  uint64_t n_reaps_ = 0;
  std::array<uint64_t, kDiskFaults> n_faults_ = {};
  std::vector<Replaced> replaced_;
  std::mutex mutex_;  // of what wake() changes
  std::condition_variable woken_;
  bool is_woken_ = false;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_SIMULATED_DISK_H_
