// SPDX-License-Identifier: Apache-2.0
// What every DiskIo must hold to, over io_uring, the pool of threads and the simulated disk; what
// the simulated one promises besides; and which one is taken where the kernel refuses io_uring.
#include "tiers/disk/disk_io.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/common/temporary_directory.h"
#include "tiers/disk/disk_memory.h"
#include "tiers/disk/pool_disk.h"
#include "tiers/disk/simulated_disk.h"
#include "tiers/disk/uring_disk.h"

namespace kvm::testing {
namespace {

using tiers::DiskBackend;
using tiers::DiskFault;
using tiers::DiskIo;
using tiers::DiskIoOptions;
using tiers::DiskMemory;
using tiers::DiskOp;
using tiers::SimulatedDisk;
using tiers::SimulatedDiskOptions;
using Kind = DiskOp::Kind;

constexpr uint32_t kKiB = 1024;
constexpr uint32_t kFileBytes = 1024 * kKiB;
constexpr uint32_t kDepth = 8;

DiskIoOptions io_options() {
  return {.n_files = 4, .queue_depth = kDepth, .buffer_bytes = 1024 * kKiB, .n_threads = 4};
}

void fill(std::byte* data, size_t size, uint32_t mark) {
  uint32_t word = mark * 0x9e3779b9u;
  for (size_t i = 0; i < size; ++i) {
    word = word * 0x915f77f5u + 1;
    data[i] = static_cast<std::byte>(word >> 24);
  }
}

bool is_filled(const std::byte* data, size_t size, uint32_t mark) {
  std::vector<std::byte> expected(size);
  fill(expected.data(), size, mark);
  return std::memcmp(data, expected.data(), size) == 0;
}

// --- What every one must hold to -----------------------------------------------------------------

// What a system call comes to in a rig, beside what it did.
enum class Calls { kPlain, kShortAndAgain, kReadError, kWriteError, kNoSpace, kAlwaysAgain };

int64_t rewritten(Calls calls, const DiskOp& op, int64_t result, uint64_t n_call) {
  switch (calls) {
    case Calls::kPlain:
      return result;
    case Calls::kShortAndAgain:
      if (n_call % 4 == 0) {
        return n_call % 8 == 0 ? -EINTR : -EAGAIN;
      }
      return n_call % 2 == 0 && result > 512 ? result / 3 : result;
    case Calls::kReadError:
      return op.kind == Kind::kRead ? -EIO : result;
    case Calls::kWriteError:
      return op.kind == Kind::kWrite ? -EIO : result;
    case Calls::kNoSpace:
      return op.kind == Kind::kWrite ? -ENOSPC : result;
    case Calls::kAlwaysAgain:
      return -EAGAIN;
  }
  return result;
}

class RealRig {
 public:
  using Open = Result<std::unique_ptr<DiskIo>> (*)(const DiskIoOptions&);
  RealRig(Calls calls, Open open) {
    DiskIoOptions options = io_options();
    if (calls != Calls::kPlain) {
      options.rewrite = [this, calls](const DiskOp& op, int64_t result) {
        return rewritten(calls, op, result, n_calls_++);
      };
    }
    Result<std::unique_ptr<DiskIo>> opened = open(options);
    if (opened.is_ok()) {
      io = std::move(opened).value();
    } else {
      why_not = opened.status().message();
    }
  }
  std::string path(const std::string& name) { return directory_ / name; }

  std::unique_ptr<DiskIo> io;  // null where the system has none
  std::string why_not;

 private:
  TemporaryDirectory directory_;
  std::atomic<uint64_t> n_calls_ = 0;
};
struct UringRig : RealRig {
  explicit UringRig(Calls calls) : RealRig(calls, tiers::open_uring_disk) {}
};
struct PoolRig : RealRig {
  explicit PoolRig(Calls calls) : RealRig(calls, tiers::open_pool_disk) {}
};
struct SimulatedRig {
  explicit SimulatedRig(Calls calls) {
    SimulatedDiskOptions options{.io = io_options(), .seed = 3, .max_latency = 4};
    switch (calls) {
      case Calls::kPlain:
        break;
      case Calls::kShortAndAgain:
        options.of(DiskFault::kShort) = 500'000;
        options.of(DiskFault::kAgain) = 300'000;
        break;
      case Calls::kReadError:
        options.of(DiskFault::kReadError) = 1'000'000;
        break;
      case Calls::kWriteError:
        options.of(DiskFault::kWriteError) = 1'000'000;
        break;
      case Calls::kNoSpace:
        options.of(DiskFault::kNoSpace) = 1'000'000;
        break;
      case Calls::kAlwaysAgain:
        options.of(DiskFault::kAgain) = 1'000'000;
        break;
    }
    io = std::make_unique<SimulatedDisk>(options);
  }
  std::string path(const std::string& name) { return name; }

  std::unique_ptr<DiskIo> io;
  std::string why_not;
};

template <typename Rig>
class DiskIoConformance : public ::testing::Test {
 protected:
  // A disk on which calls come out like that, with file 0. False: there is none.
  bool open(Calls calls) {
    rig_ = std::make_unique<Rig>(calls);
    if (rig_->io == nullptr) {
      std::printf("not run here: %s\n", rig_->why_not.c_str());
      return false;
    }
    io_ = rig_->io.get();
    const Status status = io_->create(0, rig_->path("zero"), kFileBytes);
    EXPECT_TRUE(status.is_ok()) << status.message();
    return status.is_ok();
  }

  std::byte* buffer(uint64_t offset) { return io_->buffers().data() + offset; }
  DiskOp& add(Kind kind, uint32_t file, uint64_t offset, std::byte* data, uint32_t size) {
    DiskOp& op = ops_.emplace_back();
    op.kind = kind;
    op.file = file;
    op.offset = offset;
    op.data = data;
    op.size_bytes = size;
    return op;
  }
  // All that was added, to their ends, with as many in flight as may be.
  void run() {
    size_t n_begun = 0;
    size_t n_ended = 0;
    while (n_ended < ops_.size()) {
      std::vector<DiskOp*> begin;
      while (n_begun < ops_.size() && n_begun - n_ended < kDepth) {
        begin.push_back(&ops_[n_begun++]);
      }
      io_->submit(begin);
      std::array<DiskOp*, 3> ended;
      n_ended += io_->reap(ended, UINT64_MAX);
    }
  }
  Status run(Kind kind, uint32_t file, uint64_t offset, std::byte* data, uint32_t size) {
    ops_.clear();
    add(kind, file, offset, data, size);
    run();
    return ops_[0].status;
  }

  void expect_round_trip() {
    const uint32_t sizes[] = {4 * kKiB, 64 * kKiB, 512, 256 * kKiB, 12 * kKiB};
    uint64_t offset = 0;
    for (const uint32_t size : sizes) {
      const uint32_t rounded = std::max(size, io_->block_bytes());
      fill(buffer(offset), rounded, rounded + 1);
      add(Kind::kWrite, 0, offset, buffer(offset), rounded);
      offset += (rounded + 4 * kKiB - 1) / (4 * kKiB) * (4 * kKiB);
    }
    run();
    const std::deque<DiskOp> writes = std::exchange(ops_, {});
    add(Kind::kSync, 0, 0, nullptr, 0);
    run();
    EXPECT_TRUE(ops_[0].status.is_ok()) << ops_[0].status.message();
    ops_.clear();
    std::memset(buffer(0), 0, offset);
    for (const DiskOp& write : writes) {
      EXPECT_TRUE(write.status.is_ok()) << write.status.message();
      add(Kind::kRead, 0, write.offset, write.data, write.size_bytes);
    }
    run();
    for (const DiskOp& op : ops_) {
      EXPECT_TRUE(op.status.is_ok()) << op.status.message();
      EXPECT_TRUE(is_filled(op.data, op.size_bytes, op.size_bytes + 1)) << op.size_bytes;
    }
  }

  std::unique_ptr<Rig> rig_;
  DiskIo* io_ = nullptr;
  std::deque<DiskOp> ops_;
};
using Rigs = ::testing::Types<UringRig, PoolRig, SimulatedRig>;
TYPED_TEST_SUITE(DiskIoConformance, Rigs);

TYPED_TEST(DiskIoConformance, ReadsGiveWhatWasWritten) {
  if (!this->open(Calls::kPlain)) {
    GTEST_SKIP();
  }
  EXPECT_EQ(this->io_->buffers().size(), 1024 * kKiB);
  this->expect_round_trip();
}

TYPED_TEST(DiskIoConformance, ShortAndInterruptedCallsGoOn) {
  if (!this->open(Calls::kShortAndAgain)) {
    GTEST_SKIP();
  }
  this->expect_round_trip();
}

TYPED_TEST(DiskIoConformance, OtherMemoryDoes) {
  if (!this->open(Calls::kPlain)) {
    GTEST_SKIP();
  }
  const DiskMemory memory(64 * kKiB);
  std::byte* const data = memory.bytes().data();
  fill(data, 64 * kKiB, 7);
  EXPECT_TRUE(this->run(Kind::kWrite, 0, 8 * kKiB, data, 64 * kKiB).is_ok());
  std::memset(data, 0, 64 * kKiB);
  EXPECT_TRUE(this->run(Kind::kRead, 0, 8 * kKiB, data, 64 * kKiB).is_ok());
  EXPECT_TRUE(is_filled(data, 64 * kKiB, 7));
}

TYPED_TEST(DiskIoConformance, FilesAreApartAndNumbersAreUsedAgain) {
  if (!this->open(Calls::kPlain)) {
    GTEST_SKIP();
  }
  ASSERT_TRUE(this->io_->create(3, this->rig_->path("three"), kFileBytes).is_ok());
  for (const uint32_t file : {0u, 3u}) {
    fill(this->buffer(0), 4 * kKiB, file);
    ASSERT_TRUE(this->run(Kind::kWrite, file, 0, this->buffer(0), 4 * kKiB).is_ok());
  }
  const auto reads = [&](uint32_t file) {
    EXPECT_TRUE(this->run(Kind::kRead, file, 0, this->buffer(0), 4 * kKiB).is_ok());
    return this->buffer(0);
  };
  EXPECT_TRUE(is_filled(reads(0), 4 * kKiB, 0));
  EXPECT_TRUE(is_filled(reads(3), 4 * kKiB, 3));
  this->io_->remove(3);
  ASSERT_TRUE(this->io_->create(3, this->rig_->path("three"), kFileBytes).is_ok())
      << "its name is free again";
  const std::byte* data = reads(3);
  EXPECT_TRUE(std::all_of(data, data + 4 * kKiB, [](std::byte b) { return b == std::byte{0}; }));
  EXPECT_TRUE(is_filled(reads(0), 4 * kKiB, 0));
  this->io_->remove(3);
  this->io_->remove(0);
}

TYPED_TEST(DiskIoConformance, ErrorsAreReportedAndEndTheOpAlone) {
  const std::pair<Calls, kvm_status> cases[] = {{Calls::kReadError, KVM_ERR_IO},
                                                {Calls::kWriteError, KVM_ERR_IO},
                                                {Calls::kNoSpace, KVM_ERR_NO_SPACE},
                                                {Calls::kAlwaysAgain, KVM_ERR_IO}};
  for (const auto& [calls, code] : cases) {
    if (!this->open(calls)) {
      GTEST_SKIP();
    }
    const Kind failing = calls == Calls::kReadError ? Kind::kRead : Kind::kWrite;
    const Kind other = failing == Kind::kRead ? Kind::kWrite : Kind::kRead;
    const Status status = this->run(failing, 0, 4 * kKiB, this->buffer(0), 4 * kKiB);
    EXPECT_EQ(status.code(), code);
    EXPECT_NE(status.message().find("4096 bytes at 4096"), std::string::npos) << status.message();
    if (calls != Calls::kAlwaysAgain) {
      EXPECT_TRUE(this->run(other, 0, 4 * kKiB, this->buffer(0), 4 * kKiB).is_ok());
    }
  }
}

TYPED_TEST(DiskIoConformance, AWaitEndsWhenItIsWoken) {
  if (!this->open(Calls::kPlain)) {
    GTEST_SKIP();
  }
  std::array<DiskOp*, 2> ended;
  EXPECT_EQ(this->io_->reap(ended, 0), 0u);
  EXPECT_EQ(this->io_->reap(ended, 1'000'000), 0u) << "time has passed";
  this->io_->wake();
  EXPECT_EQ(this->io_->reap(ended, UINT64_MAX), 0u) << "it was woken before";
  std::thread waker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    this->io_->wake();
  });
  EXPECT_EQ(this->io_->reap(ended, UINT64_MAX), 0u);
  waker.join();
}

// --- The real ones -------------------------------------------------------------------------------

TEST(RealDisk, AFileThatIsThereIsLeftAlone) {
  const TemporaryDirectory directory;
  for (const auto open : {tiers::open_uring_disk, tiers::open_pool_disk}) {
    Result<std::unique_ptr<DiskIo>> io = open(io_options());
    if (!io.is_ok()) {
      continue;
    }
    ASSERT_TRUE(io.value()->create(0, directory / "file", kFileBytes).is_ok());
    const Status status = io.value()->create(1, directory / "file", kFileBytes);
    EXPECT_EQ(status.code(), KVM_ERR_EXISTS);
    EXPECT_NE(status.message().find(directory / "file"), std::string::npos);
    EXPECT_EQ(io.value()->create(1, directory / "none/file", kFileBytes).code(), KVM_ERR_IO);
    io.value()->remove(0);
    EXPECT_NE(::access((directory / "file").c_str(), F_OK), 0);
  }
}

TEST(RealDisk, AFileThatDoesNotFitIsNoSpaceAndIsGone) {
  const TemporaryDirectory directory;
  Result<std::unique_ptr<DiskIo>> io = tiers::open_pool_disk(io_options());
  ASSERT_TRUE(io.is_ok());
  const Status status = io.value()->create(0, directory / "file", uint64_t{8} << 40);
  // A file system may call a file too large before it looks for room.
  EXPECT_TRUE(status.code() == KVM_ERR_NO_SPACE || status.code() == KVM_ERR_IO);
  EXPECT_NE(::access((directory / "file").c_str(), F_OK), 0);
}

// As containers do it.
bool refuse_uring() {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),  // the number of the call
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{static_cast<unsigned short>(std::size(code)), code};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(RealDisk, WhereIoUringIsRefusedThreadsAreTaken) {
  EXPECT_EXIT(
      {
        if (!refuse_uring()) {
          ::_exit(77);
        }
        const Result<std::unique_ptr<DiskIo>> wanted =
            tiers::open_disk_io(DiskBackend::kUring, io_options());
        const Result<std::unique_ptr<DiskIo>> any =
            tiers::open_disk_io(DiskBackend::kAny, io_options());
        const bool is_right = wanted.status().code() == KVM_ERR_UNSUPPORTED && any.is_ok() &&
                              std::string(any.value()->name()) == "threads";
        ::_exit(is_right ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST(RealDisk, ThreadsAreTakenWhereTheyAreWanted) {
  const Result<std::unique_ptr<DiskIo>> io =
      tiers::open_disk_io(DiskBackend::kThreads, io_options());
  ASSERT_TRUE(io.is_ok());
  EXPECT_STREQ(io.value()->name(), "threads");
}

// --- The simulated one ---------------------------------------------------------------------------

struct Trace {
  std::vector<uint64_t> order;
  std::vector<kvm_status> codes;
  std::vector<std::byte> bytes;
  bool operator==(const Trace&) const = default;
};

// 64 writes of 8 KiB, each of its mark; then what the file holds.
Trace run_of(SimulatedDisk& disk) {
  Trace run;
  EXPECT_TRUE(disk.create(0, "file", kFileBytes).is_ok());
  std::deque<DiskOp> ops(64);
  for (size_t i = 0; i < ops.size(); i += kDepth) {
    for (size_t k = i; k < i + kDepth; ++k) {
      DiskOp& op = ops[k];
      op.kind = Kind::kWrite;
      op.offset = 8 * kKiB * k;
      op.data = disk.buffers().data() + 8 * kKiB * (k % kDepth);
      op.size_bytes = 8 * kKiB;
      fill(op.data, op.size_bytes, static_cast<uint32_t>(k));
      DiskOp* const one = &op;
      disk.submit({&one, 1});
    }
    for (size_t n = 0; n < kDepth;) {
      std::array<DiskOp*, 2> ended;
      const size_t n_now = disk.reap(ended, UINT64_MAX);
      for (size_t k = 0; k < n_now; ++k) {
        run.order.push_back(ended[k]->offset);
        run.codes.push_back(ended[k]->status.code());
      }
      n += n_now;
    }
  }
  const std::span<std::byte> bytes = disk.bytes(0);
  run.bytes.assign(bytes.begin(), bytes.end());
  return run;
}

TEST(SimulatedDisk, TheSameSeedGivesTheSameRun) {
  SimulatedDiskOptions options{.io = io_options(), .seed = 11, .max_latency = 3};
  options.per_million.fill(100'000);
  const auto run = [&] {
    SimulatedDisk disk(options);
    return run_of(disk);
  };
  const Trace first = run();
  EXPECT_TRUE(run() == first);
  EXPECT_FALSE(std::is_sorted(first.order.begin(), first.order.end()));
  options.seed = 12;
  EXPECT_FALSE(run() == first);
}

TEST(SimulatedDisk, EachFaultLeavesItsTrace) {
  const auto changed = [](DiskFault fault) {
    SimulatedDiskOptions options{.io = io_options(), .seed = 5};
    options.of(fault) = 1'000'000;
    SimulatedDisk disk(options);
    const Trace run = run_of(disk);
    EXPECT_EQ(disk.n_faults(fault), 64u);
    EXPECT_EQ(run.codes, std::vector<kvm_status>(64, KVM_OK));
    uint64_t n = 0;
    for (uint32_t i = 0; i < 64; ++i) {
      n += is_filled(run.bytes.data() + 8 * kKiB * i, 8 * kKiB, i) ? 0 : 1;
    }
    return n;
  };
  EXPECT_GT(changed(DiskFault::kTear512), 60u);
  EXPECT_GT(changed(DiskFault::kTear4096), 40u);
  EXPECT_EQ(changed(DiskFault::kLostWrite), 64u);
  EXPECT_GT(changed(DiskFault::kMisdirected), 40u);

  SimulatedDiskOptions options{.io = io_options(), .max_files = 1};
  options.of(DiskFault::kBitRot) = 1'000'000;
  SimulatedDisk disk(options);
  run_of(disk);
  EXPECT_EQ(disk.create(1, "another", kFileBytes).code(), KVM_ERR_NO_SPACE);
  DiskOp op;
  op.data = disk.buffers().data();
  op.size_bytes = 8 * kKiB;
  DiskOp* ended = &op;
  disk.submit({&ended, 1});
  ASSERT_EQ(disk.reap({&ended, 1}, UINT64_MAX), 1u);
  EXPECT_FALSE(is_filled(op.data, 8 * kKiB, 0));
  EXPECT_EQ(disk.n_faults(DiskFault::kBitRot), 1u);
  disk.heal();
  disk.submit({&ended, 1});
  ASSERT_EQ(disk.reap({&ended, 1}, UINT64_MAX), 1u);
  EXPECT_FALSE(is_filled(op.data, 8 * kKiB, 0)) << "what has rotted stays so";
  EXPECT_EQ(disk.n_faults(DiskFault::kBitRot), 1u);
}

TEST(SimulatedDisk, ACrashTakesOnlyWhatWasNotSynced) {
  for (const bool is_lost : {false, true}) {
    SimulatedDiskOptions options{.io = io_options(), .seed = 9, .can_crash = true};
    options.of(DiskFault::kLostSync) = is_lost ? 1'000'000 : 0;
    SimulatedDisk disk(options);
    const Trace before = run_of(disk);
    DiskOp op;
    op.kind = Kind::kSync;
    DiskOp* ended = &op;
    disk.submit({&ended, 1});
    ASSERT_EQ(disk.reap({&ended, 1}, UINT64_MAX), 1u);
    ASSERT_TRUE(op.status.is_ok());
    disk.crash();
    const std::span<std::byte> bytes = disk.bytes(0);
    EXPECT_EQ(std::equal(bytes.begin(), bytes.end(), before.bytes.begin()), !is_lost);
    EXPECT_EQ(disk.n_faults(DiskFault::kLostSync), is_lost ? 1u : 0u);
  }
}

}  // namespace
}  // namespace kvm::testing
