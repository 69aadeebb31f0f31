// SPDX-License-Identifier: Apache-2.0
// What the machine has, read from files that stand below a folder.
#include "base/machine.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/prctl.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace kvm {
namespace {

constexpr uint64_t kGiB = 1u << 30;

class MachineTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "machine-test-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    root_ = std::filesystem::absolute(name);
    write("/proc/meminfo", "MemTotal:  67108864 kB\nMemFree: 1 kB\nMemAvailable:  33554432 kB\n");
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path whole = root_ + path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text;
  }
  void write(const std::string& path, uint64_t number) {
    write(path, std::to_string(number) + "\n");
  }
  void expect(uint64_t total_bytes, uint64_t free_bytes) {
    const MachineMemory memory = machine_memory(root_);
    EXPECT_EQ(memory.total_bytes, total_bytes);
    EXPECT_EQ(memory.free_bytes, free_bytes);
  }

  std::string root_;
};

TEST_F(MachineTest, WithoutGroups) { expect(64 * kGiB, 32 * kGiB); }

TEST_F(MachineTest, ThisMachineHasMemory) {
  const MachineMemory memory = machine_memory();
  EXPECT_GT(memory.total_bytes, 0u);
  EXPECT_GT(memory.free_bytes, 0u);
  EXPECT_LE(memory.free_bytes, memory.total_bytes);
}

TEST_F(MachineTest, LimitAtTheRootOfAContainer) {
  write("/proc/self/cgroup", "0::/\n");
  write("/sys/fs/cgroup/memory.max", 8 * kGiB);
  write("/sys/fs/cgroup/memory.current", 3 * kGiB);
  expect(8 * kGiB, 5 * kGiB);
}

// A container whose own path is of the machine, and is not there in what it sees.
TEST_F(MachineTest, LimitAtTheRootAndAPathThatIsNotThere) {
  write("/proc/self/cgroup", "0::/system.slice/docker-1234.scope\n");
  write("/sys/fs/cgroup/memory.max", 8 * kGiB);
  write("/sys/fs/cgroup/memory.current", 3 * kGiB);
  expect(8 * kGiB, 5 * kGiB);
}

TEST_F(MachineTest, LimitOfAUnit) {
  write("/proc/self/cgroup", "0::/system.slice/kvmd.service\n");
  write("/sys/fs/cgroup/system.slice/memory.max", "max\n");
  write("/sys/fs/cgroup/system.slice/memory.current", 20 * kGiB);
  write("/sys/fs/cgroup/system.slice/kvmd.service/memory.max", 16 * kGiB);
  write("/sys/fs/cgroup/system.slice/kvmd.service/memory.high", "max\n");
  write("/sys/fs/cgroup/system.slice/kvmd.service/memory.current", 1 * kGiB);
  expect(16 * kGiB, 15 * kGiB);
}

TEST_F(MachineTest, LowestLimitOfAllGroupsAbove) {
  write("/proc/self/cgroup", "0::/a/b\n");
  write("/sys/fs/cgroup/a/memory.max", 12 * kGiB);
  write("/sys/fs/cgroup/a/memory.current", 10 * kGiB);  // others in it
  write("/sys/fs/cgroup/a/b/memory.max", 8 * kGiB);
  write("/sys/fs/cgroup/a/b/memory.current", 1 * kGiB);
  expect(8 * kGiB, 2 * kGiB);
  write("/sys/fs/cgroup/a/b/memory.high", 2 * kGiB);
  expect(2 * kGiB, 1 * kGiB);
}

TEST_F(MachineTest, PageCacheIsFree) {
  write("/proc/self/cgroup", "0::/\n");
  write("/sys/fs/cgroup/memory.max", 8 * kGiB);
  write("/sys/fs/cgroup/memory.current", 7 * kGiB);
  write("/sys/fs/cgroup/memory.stat",
        "anon 5\ninactive_file " + std::to_string(6 * kGiB) + "\nactive_file 7\n");
  expect(8 * kGiB, 7 * kGiB);
}

TEST_F(MachineTest, VersionOne) {
  write("/proc/self/cgroup", "5:devices:/x\n4:memory:/a/b\n0::/\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("/sys/fs/cgroup/memory/memory.usage_in_bytes", 40 * kGiB);
  write("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", 4 * kGiB);
  write("/sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", 1 * kGiB);
  expect(4 * kGiB, 3 * kGiB);
}

TEST_F(MachineTest, OddLinesOfGroups) {
  write("/proc/self/cgroup", "\n:\n0:\n0::\n0::x\n0::/../..\n4:memory\n0::/a\n");
  write("/sys/fs/cgroup/memory.max", 8 * kGiB);
  expect(8 * kGiB, 8 * kGiB);
}

TEST_F(MachineTest, HugePagesAsTheSystemIsSet) {
  const std::string file = "/sys/kernel/mm/transparent_hugepage/enabled";
  EXPECT_EQ(huge_page_setting(root_), "absent");
  write(file, "always [madvise] never\n");
  EXPECT_EQ(huge_page_setting(root_), "madvise");
  write(file, "always madvise [never]\n");
  EXPECT_EQ(huge_page_setting(root_), "never");
}

TEST_F(MachineTest, HugePagesOfThisProcessMayBeDisabled) {
  write("/sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n");
  ASSERT_EQ(::prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), 0);
  EXPECT_EQ(huge_page_setting(root_), "disabled");
  ASSERT_EQ(::prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0), 0);
  EXPECT_EQ(huge_page_setting(root_), "always");
}

}  // namespace
}  // namespace kvm
