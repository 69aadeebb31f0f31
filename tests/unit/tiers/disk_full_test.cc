// SPDX-License-Identifier: Apache-2.0
// The disk tier on file systems that really are full, or that know no direct I/O.
#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/common/slow_page.h"
#include "tests/common/small_file_system.h"
#include "tests/sim/simulated_clock.h"
#include "tiers/disk/disk_tier.h"

namespace kvm::testing {
namespace {

using tiers::DiskBackend;
using tiers::DiskTier;
using tiers::DiskTierOptions;
using tiers::PlaceId;
using tiers::Transfer;

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kSegment = DiskTier::kMinSegmentBytes;
constexpr uint32_t kSize = 20'000;
constexpr uint64_t kLaterNs = uint64_t{5} * 1'000'000'000;

// A tier on a file system, and what was written to it.
class Tenant {
 public:
  Tenant(const std::string& directory, DiskBackend backend, uint64_t capacity_bytes)
      : tier_(DiskTier::open({.directories = {directory},
                              .capacity_bytes = capacity_bytes,
                              .segment_bytes = kSegment,
                              .backend = backend,
                              .clock = &clock_})
                  .value()) {}

  // Returns how many of so many pages had room.
  uint32_t write(uint32_t n) {
    std::deque<SlowPage> pages;
    for (uint32_t i = 0; i < n; ++i) {
      pages.emplace_back(mark_ + i, kSize);
    }
    run(pages);
    uint32_t n_written = 0;
    for (const SlowPage& page : pages) {
      if (page.status.is_ok()) {
        held_.emplace_back(page.place, mark_);
        ++n_written;
      } else {
        EXPECT_EQ(page.status.code(), KVM_ERR_NO_SPACE) << page.status.message();
        refusal_ = page.status.message();
      }
      ++mark_;
    }
    return n_written;
  }
  void expect_all() {
    std::deque<SlowPage> pages;
    for (const auto& [place, mark] : held_) {
      pages.emplace_back(place, kSize);
    }
    run(pages);
    for (size_t i = 0; i < pages.size(); ++i) {
      EXPECT_TRUE(pages[i].status.is_ok()) << pages[i].status.message();
      EXPECT_TRUE(pages[i].holds(held_[i].second)) << i;
    }
  }
  void release_all() {
    for (const auto& [place, mark] : std::exchange(held_, {})) {
      tier_->release(place);
    }
    EXPECT_EQ(tier_->used_bytes(), 0u);
  }
  void pass_time() { clock_.advance(kLaterNs); }
  tiers::DiskTierStats stats() const { return tier_->stats(); }
  const std::string& refusal() const { return refusal_; }

 private:
  void run(std::deque<SlowPage>& pages) {
    std::vector<Transfer*> transfers;
    for (SlowPage& page : pages) {
      transfers.push_back(&page);
    }
    tier_->submit(transfers);
    for (const SlowPage& page : pages) {
      while (!page.is_done) {
        std::this_thread::yield();
      }
    }
  }

  SimulatedClock clock_;
  std::unique_ptr<DiskTier> tier_;
  std::vector<std::pair<PlaceId, uint32_t>> held_;
  uint32_t mark_ = 1;
  std::string refusal_;
};

constexpr DiskBackend kBackends[] = {DiskBackend::kAny, DiskBackend::kThreads};

// Files are set aside whole there: it is full where one more does not fit.
TEST(SmallFileSystem, FullEndsWritesAndRoomLetsTheTierGrow) {
  for (const DiskBackend backend : kBackends) {
    const SmallFileSystem disk("tmpfs", "size=6m");
    if (!disk.refusal().empty()) {
      GTEST_SKIP() << disk.refusal();
    }
    ASSERT_TRUE(put_aside(disk / "of-others", 3 * kMiB));
    Tenant tenant(disk.path(), backend, 32 * kMiB);
    EXPECT_GT(tenant.write(300), 2 * kMiB / kSize);
    EXPECT_NE(tenant.refusal().find("No space left on device"), std::string::npos)
        << tenant.refusal();
    EXPECT_LE(tenant.stats().physical_bytes, 3 * kMiB);
    EXPECT_EQ(tenant.stats().n_passed_over, 1u);
    tenant.expect_all();
    std::filesystem::remove(disk / "of-others");
    tenant.pass_time();
    EXPECT_EQ(tenant.stats().n_passed_over, 0u);
    EXPECT_GT(tenant.write(150), 2 * kMiB / kSize) << tenant.refusal();
    tenant.expect_all();
    tenant.release_all();
    EXPECT_GT(tenant.write(150), 2 * kMiB / kSize);
    tenant.expect_all();
    tenant.release_all();
  }
}

// ext2 sets nothing aside: files are as long as they are to be, and a write finds the disk full.
TEST(SmallFileSystem, FullIsFoundByAWriteWhereNothingCanBeSetAside) {
  for (const DiskBackend backend : kBackends) {
    const SmallFileSystem disk("mkfs.ext2", 8 * kMiB);
    if (!disk.refusal().empty()) {
      GTEST_SKIP() << disk.refusal();
    }
    const uint64_t free = std::filesystem::space(disk.path()).free;
    Tenant tenant(disk.path(), backend, 16 * kMiB);
    const uint32_t n = tenant.write(600);
    EXPECT_GT(n, free / 2 / kSize);
    EXPECT_LT(n, free / kSize);
    EXPECT_GT(tenant.stats().physical_bytes, free) << "more than there is";
    EXPECT_NE(tenant.refusal().find(disk.path()), std::string::npos) << tenant.refusal();
    EXPECT_NE(tenant.refusal().find("No space left on device"), std::string::npos)
        << tenant.refusal();
    tenant.expect_all();
    tenant.release_all();
    EXPECT_GT(tenant.write(n / 2), n / 3) << tenant.refusal();
    tenant.expect_all();
    tenant.release_all();
  }
}

// ramfs knows neither direct I/O nor how to set room aside.
TEST(SmallFileSystem, WithoutDirectIoFilesGoThroughThePageCache) {
  for (const DiskBackend backend : kBackends) {
    const SmallFileSystem disk("ramfs", "");
    if (!disk.refusal().empty()) {
      GTEST_SKIP() << disk.refusal();
    }
    Tenant tenant(disk.path(), backend, 4 * kMiB);
    EXPECT_GT(tenant.write(250), 3 * kMiB / kSize);
    EXPECT_FALSE(tenant.stats().is_direct);
    tenant.expect_all();
    // Moves read and write likewise.
    tenant.release_all();
    EXPECT_GT(tenant.write(250), 3 * kMiB / kSize);
    tenant.expect_all();
    tenant.release_all();
    EXPECT_EQ(tenant.stats().n_io_errors, 0u);
    EXPECT_EQ(tenant.stats().n_corrupt, 0u);
  }
}

}  // namespace
}  // namespace kvm::testing
