// SPDX-License-Identifier: Apache-2.0
// The disk tier beyond what every slow tier does (tests/sim/slow_tier_test.cc): its directories,
// its limits, damage, and pages that move.
#include "tiers/disk/disk_tier.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/common/forwarded_disk.h"
#include "tests/common/slow_page.h"
#include "tests/common/temporary_directory.h"
#include "tests/sim/simulated_clock.h"
#include "tiers/disk/simulated_disk.h"

namespace kvm::testing {
namespace {

using tiers::DiskFault;
using tiers::DiskTier;
using tiers::DiskTierOptions;
using tiers::PlaceId;
using tiers::record_bytes;
using tiers::SimulatedDisk;
using tiers::SimulatedDiskOptions;
using tiers::Transfer;

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kSegment = DiskTier::kMinSegmentBytes;
constexpr uint64_t kSecondNs = 1'000'000'000;
constexpr uint64_t kDayNs = uint64_t{24} * 3600 * 1'000'000'000;

// --- Over a simulated disk, by hand --------------------------------------------------------------

class DiskTierByHand : public ::testing::Test {
 protected:
  void make(uint64_t n_segments) {
    options_.directories = {"one", "two"};
    options_.capacity_bytes = n_segments * kSegment;
    options_.segment_bytes = kSegment;
    options_.transfer_bytes = 64 * kKiB;
    options_.clock = &clock_;
    options_.is_manual = true;
    disk_options_.io = DiskTier::io_options(options_).value();
    disk_options_.io.rewrite = rewrite_;
    auto made = std::make_unique<SimulatedDisk>(disk_options_);
    disk_ = made.get();
    tier_ = DiskTier::over(std::move(made), options_).value();
  }
  void run() {
    for (int n = 0; tier_->turn(); ++n) {
      ASSERT_LT(n, 10'000);
    }
  }
  void submit(std::deque<SlowPage>& pages) {
    std::vector<Transfer*> transfers;
    for (SlowPage& page : pages) {
      transfers.push_back(&page);
    }
    tier_->submit(transfers);
  }
  // With marks from `mark` on; those that were written.
  std::vector<PlaceId> write(uint32_t mark, uint32_t n, uint32_t size) {
    std::deque<SlowPage> pages;
    for (uint32_t i = 0; i < n; ++i) {
      pages.emplace_back(mark + i, size);
    }
    submit(pages);
    run();
    std::vector<PlaceId> places;
    for (const SlowPage& page : pages) {
      EXPECT_TRUE(page.is_done);
      last_ = page.status;
      if (page.status.is_ok()) {
        places.push_back(page.place);
      }
    }
    return places;
  }
  Status read(PlaceId place, uint32_t mark, uint32_t size) {
    std::deque<SlowPage> pages;
    pages.emplace_back(place, size);
    submit(pages);
    run();
    EXPECT_TRUE(pages[0].is_done);
    EXPECT_TRUE(!pages[0].status.is_ok() || pages[0].holds(mark));
    return pages[0].status;
  }
  void release(const std::vector<PlaceId>& places) {
    for (const PlaceId place : places) {
      tier_->release(place);
    }
  }

  SimulatedClock clock_;
  DiskTierOptions options_;
  SimulatedDiskOptions disk_options_;
  std::function<int64_t(const tiers::DiskOp&, int64_t)> rewrite_;
  SimulatedDisk* disk_ = nullptr;
  std::unique_ptr<DiskTier> tier_;
  Status last_;  // of the last write
};

TEST_F(DiskTierByHand, PagesAreGatheredAndSoAreReads) {
  make(8);
  const std::vector<PlaceId> places = write(0, 64, 4 * kKiB);
  ASSERT_EQ(places.size(), 64u);
  const uint64_t n_bytes = 64 * record_bytes(4 * kKiB);
  EXPECT_LE(tier_->stats().n_disk_writes, n_bytes / (60 * kKiB) + 2);
  std::deque<SlowPage> reads;
  for (const PlaceId place : places) {
    reads.emplace_back(place, 4 * kKiB);
  }
  submit(reads);
  run();
  for (uint32_t i = 0; i < 64; ++i) {
    EXPECT_TRUE(reads[i].status.is_ok() && reads[i].holds(i));
  }
  const tiers::DiskTierStats stats = tier_->stats();
  EXPECT_LE(stats.n_disk_reads, n_bytes / (60 * kKiB) + 2);
  EXPECT_EQ(stats.n_reads, 64u);
  EXPECT_EQ(stats.read_bytes, 64 * 4 * kKiB);
  EXPECT_EQ(stats.n_writes, 64u);
  EXPECT_EQ(stats.written_bytes, 64 * 4 * kKiB);
  EXPECT_GE(stats.disk_written_bytes, n_bytes);
  EXPECT_STREQ(stats.backend, "simulated");
  EXPECT_TRUE(stats.is_direct);
  release(places);
}

TEST_F(DiskTierByHand, AsManyPagesGoTogetherAsTheirBytesFitATransfer) {
  make(4);
  std::deque<SlowPage> pages;
  for (uint32_t i = 0; i < 4; ++i) {
    pages.emplace_back(i, 16 * kKiB);
  }
  submit(pages);
  run();
  EXPECT_EQ(tier_->stats().n_disk_writes, 1u) << "headers and all";
  std::deque<SlowPage> reads;
  for (const SlowPage& page : pages) {
    ASSERT_TRUE(page.status.is_ok());
    reads.emplace_back(page.place, 16 * kKiB);
  }
  submit(reads);
  run();
  EXPECT_EQ(tier_->stats().n_disk_reads, 1u);
  for (uint32_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(reads[i].status.is_ok() && reads[i].holds(i));
    tier_->release(pages[i].place);
  }
}

TEST_F(DiskTierByHand, EachFlippedByteOfARecordIsFound) {
  make(4);
  constexpr uint32_t kSize = 5000;
  const std::vector<PlaceId> places = write(1, 3, kSize);
  const size_t at = 4096 + record_bytes(kSize);  // of the second
  std::vector<size_t> bytes;
  for (size_t i = 0; i < 64; ++i) {
    bytes.push_back(i);
  }
  for (size_t i = 64; i < 64 + kSize; i += 37) {
    bytes.push_back(i);
  }
  bytes.push_back(64 + kSize - 1);
  for (const size_t i : bytes) {
    for (const std::byte mask : {std::byte{1}, std::byte{0x80}, std::byte{0xff}}) {
      disk_->bytes(0)[at + i] ^= mask;
      const Status status = read(places[1], 2, kSize);
      EXPECT_EQ(status.code(), KVM_ERR_CORRUPT) << i;
      EXPECT_NE(status.message().find("one/kvm-00000.segment, offset " + std::to_string(at) + ": "),
                std::string::npos)
          << status.message();
      disk_->bytes(0)[at + i] ^= mask;
    }
  }
  EXPECT_EQ(tier_->stats().n_corrupt, 3 * bytes.size());
  EXPECT_TRUE(read(places[0], 1, kSize).is_ok());
  EXPECT_TRUE(read(places[1], 2, kSize).is_ok());
  EXPECT_TRUE(read(places[2], 3, kSize).is_ok());
  release(places);
}

TEST_F(DiskTierByHand, AnOlderRecordAtTheSameOffsetIsNotTaken) {
  make(2);
  // The same place at the same offset, before and after.
  std::vector<PlaceId> places = write(1, 1, 1000);
  release(places);
  const std::vector<std::byte> before(disk_->bytes(0).begin(), disk_->bytes(0).end());
  const std::vector<PlaceId> again = write(2, 1, 1000);
  ASSERT_EQ(again, places);
  ASSERT_TRUE(read(again[0], 2, 1000).is_ok());
  std::copy(before.begin(), before.end(), disk_->bytes(0).begin());
  const Status status = read(again[0], 2, 1000);
  EXPECT_EQ(status.code(), KVM_ERR_CORRUPT);
  EXPECT_NE(status.message().find("lay there before"), std::string::npos) << status.message();
  release(again);
}

TEST_F(DiskTierByHand, ATransferThatFailsIsReadPageByPage) {
  disk_options_.seed = 2;
  disk_options_.of(DiskFault::kReadError) = 400'000;
  make(4);
  const std::vector<PlaceId> places = write(0, 16, 2 * kKiB);
  uint64_t n_ok = 0;
  uint64_t n_failed = 0;
  for (int round = 0; round < 20; ++round) {
    std::deque<SlowPage> reads;
    for (const PlaceId place : places) {
      reads.emplace_back(place, 2 * kKiB);
    }
    submit(reads);
    run();
    const uint64_t n = static_cast<uint64_t>(std::count_if(
        reads.begin(), reads.end(), [](const SlowPage& p) { return p.status.is_ok(); }));
    n_ok += n != 16 ? n : 0;
    n_failed += 16 - n;
    for (uint32_t i = 0; i < 16; ++i) {
      EXPECT_TRUE(!reads[i].status.is_ok() || reads[i].holds(i));
    }
  }
  EXPECT_GT(n_failed, 10u);
  EXPECT_GT(n_ok, n_failed) << "of transfers that failed, most pages could be read";
  EXPECT_GT(tier_->stats().n_io_errors, n_failed);
  release(places);
}

TEST_F(DiskTierByHand, WhereSegmentsRunOutLivePagesMoveAndKeepTheirPlaces) {
  make(4);
  constexpr uint32_t kSize = 8 * kKiB;
  std::vector<PlaceId> places = write(0, 1000, kSize);
  const size_t n = places.size();
  EXPECT_GE(n, 3 * (kSegment - 8 * kKiB) / record_bytes(kSize) - 9);
  EXPECT_EQ(last_.code(), KVM_ERR_NO_SPACE);
  // Every second one goes, so that no segment is empty.
  std::vector<std::pair<PlaceId, uint32_t>> kept;
  for (uint32_t i = 0; i < n; ++i) {
    if (i % 2 == 0) {
      kept.emplace_back(places[i], i);
    } else {
      tier_->release(places[i]);
    }
  }
  const std::vector<PlaceId> more = write(5000, static_cast<uint32_t>(n / 4), kSize);
  EXPECT_EQ(more.size(), n / 4) << last_.message();
  const tiers::DiskTierStats stats = tier_->stats();
  EXPECT_GT(stats.n_moved, 0u);
  EXPECT_EQ(stats.moved_bytes, stats.n_moved * record_bytes(kSize));
  EXPECT_LE(stats.physical_bytes, 4 * kSegment);
  for (const auto& [place, mark] : kept) {
    EXPECT_TRUE(read(place, mark, kSize).is_ok());
    tier_->release(place);
  }
  for (uint32_t i = 0; i < more.size(); ++i) {
    EXPECT_TRUE(read(more[i], 5000 + i, kSize).is_ok());
  }
  release(more);
  EXPECT_EQ(tier_->used_bytes(), 0u);
}

TEST_F(DiskTierByHand, MovesKeepToTheirBandwidth) {
  options_.move_bytes_per_s = 64 * kKiB;
  make(3);
  constexpr uint32_t kSize = 8 * kKiB;
  const std::vector<PlaceId> places = write(0, 1000, kSize);
  std::vector<PlaceId> kept;
  for (size_t i = 0; i < places.size(); ++i) {
    if (i % 4 == 0) {
      kept.push_back(places[i]);
    } else {
      tier_->release(places[i]);
    }
  }
  for (int i = 0; i < 100; ++i) {
    tier_->turn();
  }
  const uint64_t first = tier_->stats().moved_bytes;
  EXPECT_GT(first, 0u);
  for (int i = 0; i < 100; ++i) {
    tier_->turn();
  }
  EXPECT_EQ(tier_->stats().moved_bytes, first) << "time stands still";
  clock_.advance(uint64_t{10} * 1'000'000'000);
  for (int i = 0; i < 100; ++i) {
    tier_->turn();
  }
  EXPECT_GT(tier_->stats().moved_bytes, first);
  release(kept);
  clock_.advance(uint64_t{1000} * 1'000'000'000);
  run();
}

TEST_F(DiskTierByHand, ADamagedPageIsNotMovedAndStaysDamaged) {
  make(3);
  constexpr uint32_t kSize = 8 * kKiB;
  const std::vector<PlaceId> places = write(0, 1000, kSize);
  const size_t at = 4096 + 64 + 100;  // in the page of the first
  disk_->bytes(0)[at] ^= std::byte{1};
  std::vector<PlaceId> kept = {places[0], places[1]};
  release({places.begin() + 2, places.end()});
  const std::vector<PlaceId> more =
      write(5000, static_cast<uint32_t>(places.size() / 2 - 2), kSize);
  EXPECT_GT(more.size(), 0u);
  EXPECT_EQ(read(kept[0], 0, kSize).code(), KVM_ERR_CORRUPT);
  EXPECT_TRUE(read(kept[1], 1, kSize).is_ok());
  release(kept);
  release(more);
  EXPECT_EQ(tier_->used_bytes(), 0u);
}

TEST_F(DiskTierByHand, WhatIsReadIsNotOverwritten) {
  disk_options_.max_latency = 40;
  disk_options_.seed = 8;
  make(2);
  constexpr uint32_t kSize = 60 * kKiB;
  for (uint32_t round = 0; round < 40; ++round) {
    // Four fill a segment. Reads of the first go on while the others come and go.
    const std::vector<PlaceId> places = write(round, 1, kSize);
    ASSERT_EQ(places.size(), 1u) << last_.message();
    std::deque<SlowPage> reads;
    for (int i = 0; i < 3; ++i) {
      reads.emplace_back(places[0], kSize);
    }
    submit(reads);
    std::deque<SlowPage> writes;
    for (uint32_t i = 0; i < 4; ++i) {
      writes.emplace_back(1000 + i, kSize);
    }
    submit(writes);
    run();
    for (const SlowPage& page : reads) {
      EXPECT_TRUE(page.status.is_ok() && page.holds(round));
    }
    for (const SlowPage& page : writes) {
      if (page.status.is_ok()) {
        tier_->release(page.place);
      }
    }
    release(places);
  }
}

TEST_F(DiskTierByHand, LargePagesGoInTransfersOfTheirOwn) {
  make(4);
  constexpr uint32_t kSize = 200 * kKiB + 17;
  std::deque<SlowPage> writes;
  for (uint32_t i = 0; i < 3; ++i) {
    writes.emplace_back(i, kSize);
  }
  submit(writes);
  run();
  for (uint32_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(writes[i].status.is_ok()) << writes[i].status.message();
    EXPECT_TRUE(read(writes[i].place, i, kSize).is_ok());
    tier_->release(writes[i].place);
  }
  EXPECT_TRUE(write(9, 1, kSegment - 8192).empty());
  EXPECT_EQ(last_.code(), KVM_ERR_NO_SPACE);
  EXPECT_EQ(last_.message(), "disk: a page of 253952 bytes; a segment holds one of 253888 bytes");
  const std::vector<PlaceId> largest = write(9, 1, kSegment - 8192 - 64);
  ASSERT_EQ(largest.size(), 1u);
  EXPECT_TRUE(read(largest[0], 9, kSegment - 8192 - 64).is_ok());
  release(largest);
}

TEST_F(DiskTierByHand, AFullFileSystemIsNoSpaceAndComesBack) {
  disk_options_.max_files = 2;
  make(6);
  constexpr uint32_t kSize = 8 * kKiB;
  const std::vector<PlaceId> places = write(0, 200, kSize);
  EXPECT_GT(places.size(), 20u);
  EXPECT_LT(places.size(), 66u);
  EXPECT_EQ(last_.code(), KVM_ERR_NO_SPACE);
  EXPECT_EQ(tier_->used_bytes(), places.size() * record_bytes(kSize)) << "nothing of the others";
  release(places);
  const std::vector<PlaceId> again = write(0, 20, kSize);
  EXPECT_EQ(again.size(), 20u);
  release(again);
}

TEST_F(DiskTierByHand, AWriteThatFailsLeavesNothing) {
  disk_options_.of(DiskFault::kNoSpace) = 1'000'000;
  make(3);
  EXPECT_TRUE(write(0, 4, 1000).empty());
  EXPECT_EQ(last_.code(), KVM_ERR_NO_SPACE);
  EXPECT_NE(last_.message().find("one/kvm-00000.segment: "), std::string::npos) << last_.message();
  EXPECT_EQ(tier_->used_bytes(), 0u);
  disk_->heal();
  release(write(0, 4, 1000));
}

// --- Drives that are full or broken --------------------------------------------------------------

// The fixture has two directories, of which the even segments are in the first.
TEST_F(DiskTierByHand, AFullDriveDoesNotKeepOthersFromGrowing) {
  bool is_full = true;
  disk_options_.refuse = [&](const std::string& path) {
    return is_full && path.starts_with("one/") ? Status(KVM_ERR_NO_SPACE, path + ": it is full")
                                               : Status();
  };
  make(8);
  constexpr uint32_t kSize = 8 * kKiB;
  const uint64_t n_in_segment = (kSegment - 12 * kKiB) / record_bytes(kSize) - 2;
  const std::vector<PlaceId> first = write(0, 150, kSize);
  EXPECT_GE(first.size(), 3 * n_in_segment);
  EXPECT_EQ(tier_->stats().n_segments, 3u) << "of four, one is left for moves";
  EXPECT_EQ(tier_->stats().n_directories, 2u);
  EXPECT_EQ(tier_->stats().n_passed_over, 1u);
  EXPECT_EQ(last_.code(), KVM_ERR_NO_SPACE);
  EXPECT_NE(last_.message().find("one/kvm-00000.segment: it is full"), std::string::npos)
      << last_.message();
  is_full = false;
  EXPECT_TRUE(write(5000, 1, kSize).empty()) << "it is not asked each time";
  clock_.advance(5 * kSecondNs);
  const std::vector<PlaceId> second = write(5000, 400, kSize);
  EXPECT_GE(second.size(), 4 * n_in_segment - 1);
  EXPECT_EQ(tier_->stats().n_segments, 7u);
  EXPECT_EQ(tier_->stats().n_passed_over, 0u);
  for (uint32_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(read(first[i], i, kSize).is_ok());
  }
  for (uint32_t i = 0; i < second.size(); ++i) {
    EXPECT_TRUE(read(second[i], 5000 + i, kSize).is_ok());
  }
  release(first);
  release(second);
}

TEST_F(DiskTierByHand, ADriveThatFailsWritesIsPassedOver) {
  bool is_broken = false;
  rewrite_ = [&](const tiers::DiskOp& op, int64_t result) {
    return is_broken && op.kind == tiers::DiskOp::Kind::kWrite && op.file % 2 == 0 ? -EIO : result;
  };
  make(8);
  constexpr uint32_t kSize = 8 * kKiB;
  std::vector<std::pair<PlaceId, uint32_t>> kept;
  uint32_t mark = 0;
  // Returns how many of so many pages failed.
  const auto write_some = [&](uint32_t n) {
    uint32_t n_failed = 0;
    for (uint32_t i = 0; i < n; ++i, ++mark) {
      const std::vector<PlaceId> places = write(mark, 1, kSize);
      if (places.empty()) {
        ++n_failed;
      } else {
        kept.emplace_back(places[0], mark);
      }
    }
    return n_failed;
  };
  EXPECT_EQ(write_some(4), 0u);
  is_broken = true;
  EXPECT_EQ(write_some(50), 1u) << "the next go to the other drive";
  EXPECT_EQ(tier_->stats().n_passed_over, 1u);
  clock_.advance(5 * kSecondNs);
  EXPECT_EQ(tier_->stats().n_passed_over, 0u);
  EXPECT_LE(write_some(20), 1u) << "it is tried again, once";
  is_broken = false;
  clock_.advance(5 * kSecondNs);
  // Nothing is lost of the drive's room, though its segments were left half written.
  const uint64_t n_in_segment = (kSegment - 12 * kKiB) / record_bytes(kSize) - 2;
  write_some(400);
  EXPECT_GE(kept.size(), 7 * n_in_segment - 8);
  for (const auto& [place, of] : kept) {
    EXPECT_TRUE(read(place, of, kSize).is_ok());
    tier_->release(place);
  }
  EXPECT_EQ(tier_->used_bytes(), 0u);
}

TEST_F(DiskTierByHand, WhereAllDrivesFailWritesOneIsTriedEachTime) {
  bool is_broken = true;
  rewrite_ = [&](const tiers::DiskOp& op, int64_t result) {
    return is_broken && op.kind == tiers::DiskOp::Kind::kWrite ? -EIO : result;
  };
  make(4);
  for (uint32_t i = 0; i < 20; ++i) {
    EXPECT_TRUE(write(i, 1, 1000).empty());
    EXPECT_EQ(last_.code(), KVM_ERR_IO);
  }
  EXPECT_EQ(tier_->stats().n_passed_over, 2u);
  is_broken = false;
  const std::vector<PlaceId> places = write(0, 3, 1000);
  EXPECT_EQ(places.size(), 3u) << "nobody else can take them";
  release(places);
}

// --- Moves that fail -----------------------------------------------------------------------------

TEST_F(DiskTierByHand, ASegmentThatCouldNotBeMovedIsTriedAgainLater) {
  bool is_broken = false;
  rewrite_ = [&](const tiers::DiskOp& op, int64_t result) {
    return is_broken && op.kind == tiers::DiskOp::Kind::kRead ? -EIO : result;
  };
  make(3);
  constexpr uint32_t kSize = 8 * kKiB;
  const std::vector<PlaceId> places = write(0, 1000, kSize);
  is_broken = true;
  std::vector<std::pair<PlaceId, uint32_t>> kept;
  for (uint32_t i = 0; i < places.size(); ++i) {
    if (i % 4 == 0) {
      kept.emplace_back(places[i], i);
    } else {
      tier_->release(places[i]);
    }
  }
  const auto n_half = static_cast<uint32_t>(places.size() / 2);
  EXPECT_TRUE(write(5000, n_half, kSize).size() < n_half);
  EXPECT_EQ(last_.code(), KVM_ERR_NO_SPACE);
  const uint64_t n_reads = tier_->stats().n_disk_reads;
  for (uint32_t i = 0; i < 100; ++i) {
    write(7000 + i, 1, kSize);
  }
  EXPECT_EQ(tier_->stats().n_disk_reads, n_reads) << "time stands still";
  // Each time it waits for longer.
  uint64_t last = n_reads;
  uint32_t n_tried = 0;
  for (uint32_t i = 0; i < 100; ++i) {
    clock_.advance(kSecondNs);
    write(7000 + i, 1, kSize);
    n_tried += tier_->stats().n_disk_reads != last ? 1 : 0;
    last = tier_->stats().n_disk_reads;
  }
  EXPECT_GE(n_tried, 3u);
  EXPECT_LE(n_tried, 20u);
  is_broken = false;
  clock_.advance(3600 * kSecondNs);
  const std::vector<PlaceId> more = write(9000, n_half, kSize);
  EXPECT_GE(more.size(), n_half / 2) << last_.message();
  for (const auto& [place, mark] : kept) {
    EXPECT_TRUE(read(place, mark, kSize).is_ok());
  }
  EXPECT_GT(tier_->stats().n_moved, 0u);
}

TEST_F(DiskTierByHand, AMoveThatCannotBeWrittenLeavesThePageWhereItIs) {
  bool is_broken = false;
  rewrite_ = [&](const tiers::DiskOp& op, int64_t result) {
    return is_broken && op.kind == tiers::DiskOp::Kind::kWrite ? -EIO : result;
  };
  make(3);
  constexpr uint32_t kSize = 8 * kKiB;
  const std::vector<PlaceId> places = write(0, 60, kSize);
  ASSERT_GE(places.size(), 50u);
  is_broken = true;
  // The last one keeps the second segment from being free, so that the first is to be emptied.
  release({places.begin() + 4, places.end() - 1});
  run();
  EXPECT_GT(tier_->stats().n_io_errors, 0u);
  EXPECT_EQ(tier_->stats().n_moved, 0u);
  is_broken = false;
  for (uint32_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(read(places[i], i, kSize).is_ok());
    tier_->release(places[i]);
  }
  release({places.back()});
  EXPECT_EQ(tier_->used_bytes(), 0u);
}

// A page is released while a copy of it is written, and its place and its offset are another page's
// by the time the copy is done.
TEST_F(DiskTierByHand, ACopyThatComesTooLateIsNotTakenForAnotherPage) {
  constexpr uint32_t kSize = 60 * kKiB;  // three to a segment, each in a transfer of its own
  constexpr uint64_t kSecondOffset = 68 * kKiB;
  bool is_held = false;
  bool was_held = false;
  rewrite_ = [&](const tiers::DiskOp& op, int64_t result) {
    const bool is_copy = op.kind == tiers::DiskOp::Kind::kWrite && op.file == 2 &&
                         op.offset == kSecondOffset && is_held;
    was_held = was_held || is_copy;
    return is_copy ? -EAGAIN : result;
  };
  make(4);
  const auto turn_some = [&] {
    for (int i = 0; i < 30; ++i) {
      tier_->turn();
    }
  };
  const std::vector<PlaceId> first = write(1, 3, kSize);
  const std::vector<PlaceId> second = write(4, 3, kSize);
  const std::vector<PlaceId> third = write(7, 1, kSize);
  ASSERT_EQ(first.size() + second.size() + third.size(), 7u);
  is_held = true;
  release({first[1], first[2]});
  turn_some();
  ASSERT_TRUE(was_held) << "what is left of the first segment is on its way to the third";
  std::deque<SlowPage> filling;
  filling.emplace_back(8, kSize);
  submit(filling);
  turn_some();
  ASSERT_TRUE(filling[0].is_done && filling[0].status.is_ok());
  release(second);
  release({first[0]});
  std::deque<SlowPage> next;
  next.emplace_back(9, kSize);
  submit(next);
  turn_some();
  ASSERT_TRUE(next[0].is_done && next[0].status.is_ok());
  ASSERT_EQ(next[0].place, first[0]);
  is_held = false;
  run();
  EXPECT_TRUE(read(next[0].place, 9, kSize).is_ok());
  release({third[0], filling[0].place, next[0].place});
  EXPECT_EQ(tier_->used_bytes(), 0u);
}

TEST_F(DiskTierByHand, TheSegmentWithLeastInItIsMovedAndCountsAsWritten) {
  make(4);
  constexpr uint32_t kSize = 8 * kKiB;
  const uint32_t n = 30;  // of two segments and a part of a third
  const std::vector<PlaceId> places = write(0, 2 * n + 8, kSize);
  ASSERT_EQ(places.size(), 2 * n + 8);
  ASSERT_EQ(tier_->stats().n_segments, 3u);
  const uint64_t before = tier_->stats().written_today_bytes;
  std::vector<PlaceId> kept(places.begin() + 2 * n, places.end());
  for (uint32_t i = 0; i < 2 * n; ++i) {
    if (i % (i < n ? 2 : 4) == 0) {
      kept.push_back(places[i]);
    } else {
      tier_->release(places[i]);
    }
  }
  run();
  const tiers::DiskTierStats stats = tier_->stats();
  EXPECT_GE(stats.n_moved, n / 4 - 1);
  EXPECT_LE(stats.n_moved, n / 4 + 1) << "the first has twice as many";
  EXPECT_GE(stats.written_today_bytes, before + stats.moved_bytes);
  release(kept);
}

TEST_F(DiskTierByHand, NothingMovesOnceADaysWritesAreUsedUp) {
  constexpr uint32_t kSize = 8 * kKiB;
  options_.write_bytes_per_day = kSegment + 100 * kKiB;
  make(3);
  const std::vector<PlaceId> places = write(0, 100, kSize);
  EXPECT_GT(places.size(), 35u) << "the second segment is begun";
  while (tier_->stats().written_today_bytes < options_.write_bytes_per_day) {
    const uint64_t before = tier_->stats().written_today_bytes;
    release(write(1000, 1, 64));
    ASSERT_GT(tier_->stats().written_today_bytes, before) << "the padding counts, too";
  }
  release({places.begin() + 2, places.end() - 1});
  run();
  EXPECT_EQ(tier_->stats().n_moved, 0u);
  clock_.advance(kDayNs);
  release(write(1000, 1, 64));
  EXPECT_EQ(tier_->stats().n_moved, 2u) << "a new day";
  release({places[0], places[1], places.back()});
}

// A disk that counts how often it is asked in vain.
class AskedDisk final : public ForwardedDisk {
 public:
  explicit AskedDisk(SimulatedDisk* disk) : ForwardedDisk(disk) {}
  size_t reap(std::span<tiers::DiskOp*> ended, uint64_t timeout_ns) noexcept override {
    const size_t n = ForwardedDisk::reap(ended, timeout_ns);
    n_in_vain_ += n == 0 ? 1 : 0;
    return n;
  }
  uint64_t n_in_vain() const { return n_in_vain_; }

 private:
  std::atomic<uint64_t> n_in_vain_ = 0;
};

TEST(DiskTierThread, SleepsWhileTheLastMovesOfASegmentAreInFlight) {
  const DiskTierOptions options{.directories = {"one"},
                                .capacity_bytes = 4 * kSegment,
                                .segment_bytes = kSegment,
                                .transfer_bytes = 64 * kKiB};
  // An op that is asked for takes up to so many looks.
  SimulatedDisk simulated(
      SimulatedDiskOptions{.io = DiskTier::io_options(options).value(), .max_latency = 5000});
  auto made = std::make_unique<AskedDisk>(&simulated);
  AskedDisk* const disk = made.get();
  const std::unique_ptr<DiskTier> tier = DiskTier::over(std::move(made), options).value();
  constexpr uint32_t kSize = 8 * kKiB;
  std::deque<SlowPage> pages;
  uint64_t n_calls = 0;
  const auto write = [&](uint32_t n) {
    std::vector<Transfer*> transfers;
    for (uint32_t i = 0; i < n; ++i) {
      transfers.push_back(&pages.emplace_back(i, kSize));
    }
    ++n_calls;
    tier->submit(transfers);
    for (const SlowPage& page : pages) {
      while (!page.is_done) {
        std::this_thread::yield();
      }
    }
  };
  write(200);
  for (size_t i = 0; i < pages.size(); ++i) {
    if (pages[i].status.is_ok() && i % 4 != 0) {
      ++n_calls;
      tier->release(pages[i].place);
    }
  }
  write(60);
  const tiers::DiskTierStats stats = tier->stats();
  EXPECT_GT(stats.n_moved, 10u);
  EXPECT_LE(disk->n_in_vain(), 2 * (n_calls + stats.n_disk_reads + stats.n_disk_writes));
}

TEST_F(DiskTierByHand, ADaysWritesHaveALimit) {
  options_.write_bytes_per_day = 100 * kKiB;
  make(4);
  std::vector<PlaceId> places = write(0, 40, 8 * kKiB);
  EXPECT_LE(places.size(), 12u);
  EXPECT_GE(places.size(), 10u);
  EXPECT_EQ(last_.code(), KVM_ERR_NO_SPACE);
  EXPECT_NE(last_.message().find("the writes of this day are used up"), std::string::npos);
  EXPECT_TRUE(read(places[0], 0, 8 * kKiB).is_ok());
  clock_.advance(kDayNs);
  const std::vector<PlaceId> next = write(0, 1, 8 * kKiB);
  EXPECT_EQ(next.size(), 1u);
  release(places);
  places = write(0, 40, 8 * kKiB);
  EXPECT_LE(places.size(), 11u) << "the next day has one, too";
  release(places);
  release(next);
}

// --- Options -------------------------------------------------------------------------------------

TEST(DiskTierOptions, ThatContradictAreRefusedWithASentence) {
  const TemporaryDirectory directory;
  const DiskTierOptions good{.directories = {directory.path()}, .capacity_bytes = 64 << 20};
  const auto refusal = [&](auto change) {
    DiskTierOptions options = good;
    change(options);
    const Result<std::unique_ptr<DiskTier>> tier = DiskTier::open(options);
    EXPECT_EQ(tier.status().code(), KVM_ERR_INVALID);
    return std::string(tier.status().message());
  };
  EXPECT_EQ(refusal([](DiskTierOptions& o) { o.directories.clear(); }),
            "disk: no directory is named");
  EXPECT_EQ(refusal([](DiskTierOptions& o) { o.capacity_bytes = 1 << 18; }),
            "disk: a capacity of 262144 bytes is too small: it takes two segments, of 262144 "
            "bytes each");
  EXPECT_EQ(refusal([](DiskTierOptions& o) { o.segment_bytes = 1000; }),
            "disk: segments of 1000 bytes; they have a multiple of 4096, from 262144 to "
            "68719476736");
  EXPECT_NE(refusal([](DiskTierOptions& o) {
              o.capacity_bytes = 1 << 30;
              o.segment_bytes = 1 << 18;
            }).find("make them larger"),
            std::string::npos);
  EXPECT_NE(refusal([](DiskTierOptions& o) { o.transfer_bytes = 4096; }).find("64 KiB"),
            std::string::npos);
  EXPECT_NE(refusal([](DiskTierOptions& o) { o.queue_depth = 1; }).find("2 to 1024"),
            std::string::npos);
  EXPECT_TRUE(DiskTier::open(good).is_ok());
}

TEST(DiskTierOptions, SegmentsFitTheCapacity) {
  for (const uint64_t capacity : {uint64_t{1} << 20, uint64_t{100} << 20, uint64_t{10} << 30,
                                  uint64_t{100} << 40, (uint64_t{1} << 40) + 12345}) {
    const Result<tiers::DiskIoOptions> io =
        DiskTier::io_options({.directories = {"d"}, .capacity_bytes = capacity});
    ASSERT_TRUE(io.is_ok()) << io.status().message();
    EXPECT_GE(io.value().n_files, 2u);
    EXPECT_TRUE(capacity < uint64_t{64} << 40 || io.value().n_files == DiskTier::kMaxSegments + 4)
        << "1024 segments of 64 GiB at most";
    EXPECT_LE(io.value().n_files, DiskTier::kMaxSegments + 4) << "and manifests";
  }
}

// --- Directories ---------------------------------------------------------------------------------

DiskTierOptions small_in(std::vector<std::string> directories) {
  return {.directories = std::move(directories),
          .capacity_bytes = 8 * kSegment,
          .segment_bytes = kSegment,
          .queue_depth = 4};
}

TEST(DiskTierDirectories, ThatCannotBeUsedAreRefused) {
  const TemporaryDirectory directory;
  const auto status = [](const std::string& path) {
    return DiskTier::open(small_in({path})).status();
  };
  const Status missing = status(directory / "none");
  EXPECT_EQ(missing.code(), KVM_ERR_NOT_FOUND);
  EXPECT_NE(missing.message().find(directory / "none"), std::string::npos);
  std::ofstream(directory / "file") << "text";
  const Status file = status(directory / "file");
  EXPECT_EQ(file.code(), KVM_ERR_INVALID);
  EXPECT_EQ(file.message(), directory / "file" + " is not a directory");
  if (::geteuid() != 0) {
    std::filesystem::create_directory(directory / "closed");
    ::chmod((directory / "closed").c_str(), 0500);
    EXPECT_EQ(status(directory / "closed").code(), KVM_ERR_PERMISSION);
  }
}

TEST(DiskTierDirectories, HaveOneOwner) {
  const TemporaryDirectory directory;
  {
    const Result<std::unique_ptr<DiskTier>> first = DiskTier::open(small_in({directory.path()}));
    ASSERT_TRUE(first.is_ok()) << first.status().message();
    const Status second = DiskTier::open(small_in({directory.path()})).status();
    EXPECT_EQ(second.code(), KVM_ERR_BUSY);
    EXPECT_EQ(second.message(), "directory " + directory.path() + " is in use by the process " +
                                    std::to_string(::getpid()) +
                                    ": each kvmd needs directories of its own");
  }
  EXPECT_TRUE(DiskTier::open(small_in({directory.path()})).is_ok()) << "it is free again";
  EXPECT_EQ(DiskTier::open(small_in({directory.path(), directory.path()})).status().code(),
            KVM_ERR_BUSY)
      << "named twice";
}

TEST(DiskTierDirectories, LeftoverSegmentsGoAndOtherFilesStay) {
  const TemporaryDirectory directory;
  const char* const others[] = {"kvm-1.segment.bak", "kvm-x.segment", "notes", "kvm-.segment"};
  for (const char* name : others) {
    std::ofstream(directory / name) << "text";
  }
  std::ofstream(directory / "kvm-00000.segment") << "of one that was killed";
  std::ofstream(directory / "kvm-00007.segment");
  const Result<std::unique_ptr<DiskTier>> tier = DiskTier::open(small_in({directory.path()}));
  ASSERT_TRUE(tier.is_ok()) << tier.status().message();
  EXPECT_EQ(tier.value()->stats().n_leftover_files, 2u);
  EXPECT_FALSE(std::filesystem::exists(directory / "kvm-00007.segment"));
  for (const char* name : others) {
    EXPECT_TRUE(std::filesystem::exists(directory / name)) << name;
  }
}

TEST(DiskTierDirectories, ASegmentOfALaterVersionIsNotTouched) {
  const TemporaryDirectory directory;
  std::vector<std::byte> header(tiers::kSegmentHeaderBytes);
  tiers::write_segment_header({.version = 3}, header.data());
  std::ofstream(directory / "kvm-00000.segment") << "old";
  std::ofstream(directory / "kvm-00001.segment", std::ios::binary)
      .write(reinterpret_cast<const char*>(header.data()),
             static_cast<std::streamsize>(header.size()));
  const Status status = DiskTier::open(small_in({directory.path()})).status();
  EXPECT_EQ(status.code(), KVM_ERR_VERSION);
  EXPECT_EQ(status.message(), directory / "kvm-00001.segment" +
                                  " has version 3 of the format, this program knows version 2: "
                                  "remove the file if nothing needs it");
  EXPECT_TRUE(std::filesystem::exists(directory / "kvm-00000.segment"));
  EXPECT_TRUE(std::filesystem::exists(directory / "kvm-00001.segment"));
}

// Of version 1 nothing outlived the process.
TEST(DiskTierDirectories, ASegmentOfTheVersionBeforeGoes) {
  const char* const source = std::getenv("KVM_SOURCE_DIR");
  ASSERT_NE(source, nullptr);
  const TemporaryDirectory directory;
  std::filesystem::copy_file(std::string(source) + "/tests/golden/disk_segment_v1.bin",
                             directory / "kvm-00000.segment");
  const Result<std::unique_ptr<DiskTier>> tier = DiskTier::open(small_in({directory.path()}));
  ASSERT_TRUE(tier.is_ok()) << tier.status().message();
  EXPECT_EQ(tier.value()->stats().n_leftover_files, 1u);
}

TEST(DiskTierDirectories, SegmentsGoRoundAndAreGoneInTheEnd) {
  const TemporaryDirectory one;
  const TemporaryDirectory two;
  {
    const std::unique_ptr<DiskTier> tier =
        DiskTier::open(small_in({one.path(), two.path()})).value();
    std::deque<SlowPage> pages;
    std::vector<Transfer*> transfers;
    for (uint32_t i = 0; i < 20; ++i) {
      transfers.push_back(&pages.emplace_back(i, 40 * kKiB));
    }
    tier->submit(transfers);
    for (const SlowPage& page : pages) {
      while (!page.is_done) {
        std::this_thread::yield();
      }
      EXPECT_TRUE(page.status.is_ok()) << page.status.message();
    }
    EXPECT_TRUE(std::filesystem::exists(one / "kvm-00000.segment"));
    EXPECT_TRUE(std::filesystem::exists(two / "kvm-00001.segment"));
    struct stat about {};
    ASSERT_EQ(::stat((one / "kvm-00000.segment").c_str(), &about), 0);
    EXPECT_EQ(about.st_mode & 0777, 0600u);
    EXPECT_EQ(static_cast<uint64_t>(about.st_size), kSegment);
    const tiers::DiskTierStats stats = tier->stats();
    EXPECT_EQ(stats.physical_bytes, stats.n_segments * kSegment);
  }
  EXPECT_FALSE(std::filesystem::exists(one / "kvm-00000.segment"));
  EXPECT_FALSE(std::filesystem::exists(two / "kvm-00001.segment"));
}

}  // namespace
}  // namespace kvm::testing
