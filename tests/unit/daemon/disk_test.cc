// SPDX-License-Identifier: Apache-2.0
#include "daemon/disk.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/common/small_file_system.h"
#include "tests/common/temporary_directory.h"

namespace kvm::daemon {
namespace {

using testing::SmallFileSystem;
using testing::TemporaryDirectory;

using Paths = std::vector<std::string>;

constexpr uint64_t kMiB = uint64_t{1} << 20;

TEST(Disk, DirectoriesAreAListOfPathsFromTheRoot) {
  EXPECT_EQ(directory_list("none"), Paths());
  EXPECT_EQ(directory_list("/a"), Paths({"/a"}));
  EXPECT_EQ(directory_list("/a, /b b ,/c"), Paths({"/a", "/b b", "/c"}));
  for (const char* good : {"none", "/", "/a,/b", " /a , /b "}) {
    EXPECT_TRUE(is_directory_list(good)) << good;
  }
  for (const char* bad : {"", " ", "a", "/a,", ",/a", "/a,,/b", "/a,none", "./a", "None"}) {
    EXPECT_FALSE(is_directory_list(bad)) << bad;
  }
}

Options marks(const char* high, const char* low) {
  Options options;
  options.disk_high = *parse_size(high);
  options.disk_low = *parse_size(low);
  return options;
}

TEST(Disk, MarksAreInOrderAndWithinMemory) {
  const auto resolved = movement_options(marks("90%", "512MiB"), 1024 * kMiB);
  ASSERT_TRUE(resolved.is_ok()) << resolved.status().message();
  EXPECT_NEAR(resolved.value().high, 0.9, 1e-8) << "a byte less, perhaps";
  EXPECT_DOUBLE_EQ(resolved.value().low, 0.5);
  EXPECT_TRUE(movement_options(marks("100%", "1"), 1024 * kMiB).is_ok());
  struct Bad {
    const char* high;
    const char* low;
  };
  for (const Bad& bad :
       {Bad{"80%", "80%"}, Bad{"80%", "90%"}, Bad{"2GiB", "80%"}, Bad{"50%", "0%"}}) {
    const Status status = movement_options(marks(bad.high, bad.low), 1024 * kMiB).status();
    EXPECT_EQ(status.code(), KVM_ERR_INVALID) << bad.high << " " << bad.low;
    EXPECT_NE(std::string(status.message()).find("disk.low is"), std::string::npos);
  }
}

Options disk_in(const std::string& directories, const char* capacity) {
  Options options;
  options.disk_directories = directories;
  options.disk_capacity = *parse_size(capacity);
  options.disk_backend = "threads";
  return options;
}

TEST(Disk, OpensWhatIsNamedAndOnlyThat) {
  const auto none = open_disk(disk_in("none", "50%"));
  ASSERT_TRUE(none.is_ok());
  EXPECT_EQ(none.value(), nullptr);
  const TemporaryDirectory folder;
  const auto opened = open_disk(disk_in(folder.path(), "64MiB"));
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  EXPECT_EQ(opened.value()->stats().capacity_bytes, 64 * kMiB);
  EXPECT_STREQ(opened.value()->stats().backend, "threads");
  const Status second = open_disk(disk_in(folder.path(), "64MiB")).status();
  EXPECT_EQ(second.code(), KVM_ERR_BUSY);
  EXPECT_NE(std::string(second.message()).find(folder.path()), std::string::npos);
  const Status missing = open_disk(disk_in(folder.path() + "/nobody", "64MiB")).status();
  EXPECT_EQ(missing.code(), KVM_ERR_NOT_FOUND);
  EXPECT_NE(std::string(missing.message()).find("/nobody"), std::string::npos);
}

// Two directories of one file system have its space once.
TEST(Disk, SharesAreOfFreeSpaceCountedOnce) {
  const TemporaryDirectory a, b;
  const uint64_t free = std::filesystem::space(a.path()).available;
  const auto opened = open_disk(disk_in(a.path() + "," + b.path(), "10%"));
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  const auto capacity = static_cast<double>(opened.value()->stats().capacity_bytes);
  EXPECT_NEAR(capacity, static_cast<double>(free) * 0.1, static_cast<double>(free) * 0.02);
}

TEST(SmallFileSystem, WhatAKilledKvmdHasLeftIsCountedAsFree) {
  const SmallFileSystem disk("tmpfs", "size=64m");
  if (!disk.refusal().empty()) {
    GTEST_SKIP() << disk.refusal();
  }
  const Options options = disk_in(disk.path(), "50%");
  const auto capacity = [&] {
    const auto opened = open_disk(options);
    EXPECT_TRUE(opened.is_ok()) << opened.status().message();
    return opened.is_ok() ? opened.value()->stats().capacity_bytes : 0;
  };
  const uint64_t before = capacity();
  EXPECT_GT(before, 24 * kMiB);
  ASSERT_TRUE(testing::put_aside(disk / "kvm-00000.segment", 16 * kMiB));
  ASSERT_TRUE(testing::put_aside(disk / "kvm-00003.segment", 16 * kMiB));
  EXPECT_EQ(capacity(), before) << "they are gone by now";
  ASSERT_TRUE(testing::put_aside(disk / "somebody-elses", 32 * kMiB));
  EXPECT_LT(capacity(), before) << "of others' files nothing is";
}

TEST(Disk, AnOwnersFilesAreHisAndNotCounted) {
  const TemporaryDirectory folder;
  const auto opened = open_disk(disk_in(folder.path(), "64MiB"));
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  ASSERT_TRUE(testing::put_aside(folder / "kvm-00000.segment", kMiB));
  const Status second = open_disk(disk_in(folder.path(), "50%")).status();
  EXPECT_EQ(second.code(), KVM_ERR_BUSY);
  EXPECT_NE(std::string(second.message()).find("is in use by the process"), std::string::npos);
  EXPECT_TRUE(std::filesystem::exists(folder / "kvm-00000.segment"));
}

}  // namespace
}  // namespace kvm::daemon
