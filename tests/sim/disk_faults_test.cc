// SPDX-License-Identifier: Apache-2.0
// The disk tier over a disk that fails as its seed says. Whatever happens, a read gives the bytes
// that were written or an error, never others; used_bytes() is what a recount says; everything that
// was begun ends.
//
// KVM_DISK_SEED=n runs seed n, KVM_DISK_SEEDS=n so many from there on, or from 0.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/common/environment.h"
#include "tests/common/slow_page.h"
#include "tests/sim/simulated_clock.h"
#include "tiers/disk/disk_tier.h"
#include "tiers/disk/simulated_disk.h"

namespace kvm::testing {
namespace {

using tiers::DiskFault;
using tiers::DiskTier;
using tiers::DiskTierOptions;
using tiers::kNoPlace;
using tiers::PlaceId;
using tiers::SimulatedDisk;
using tiers::SimulatedDiskOptions;
using tiers::Transfer;

constexpr uint32_t kSteps = 50;
constexpr uint32_t kMaxTurns = 20'000;  // far more than anything takes

// What became of the transfers of all seeds.
struct Tally {
  uint64_t n_ok = 0;
  uint64_t n_io = 0;
  uint64_t n_corrupt = 0;
  uint64_t n_no_space = 0;
  uint64_t n_moved = 0;
  std::array<uint64_t, tiers::kDiskFaults> n_faults = {};
};

class Life {
 public:
  explicit Life(uint64_t seed) : generator_(seed) {
    DiskTierOptions options{.directories = {"one", "two"},
                            .capacity_bytes = (2 + below(5)) * DiskTier::kMinSegmentBytes,
                            .segment_bytes = DiskTier::kMinSegmentBytes,
                            .transfer_bytes = 64 << 10,
                            .queue_depth = 2 + below(7),
                            .clock = &clock_,
                            .is_manual = true};
    SimulatedDiskOptions disk{
        .io = DiskTier::io_options(options).value(), .seed = seed, .max_latency = below(6)};
    if (seed % 8 != 0) {  // of eight disks one is sound
      for (uint32_t& rate : disk.per_million) {
        rate = below(2) * below(60'000);
      }
      disk.max_files = below(4) == 0 ? 1 + below(4) : UINT32_MAX;
    } else {
      is_sound_ = true;
    }
    auto made = std::make_unique<SimulatedDisk>(disk);
    disk_ = made.get();
    tier_ = DiskTier::over(std::move(made), options).value();
  }

  void live(Tally* tally) {
    for (uint32_t step = 0; step < kSteps && !::testing::Test::HasFailure(); ++step) {
      begin_some();
      for (uint32_t n = below(12); n != 0; --n) {
        tier_->turn();
      }
      take_ended(tally);
      release_some();
      // Drives and segments that have failed are tried again, most of them.
      clock_.advance(below(3) * 1'000'000'000);
      check_used();
    }
    drain(tally);
    disk_->heal();
    read_all(tally);
    for (const Held& held : held_) {
      tier_->release(held.place);
    }
    EXPECT_EQ(tier_->used_bytes(), 0u);
    const tiers::DiskTierStats stats = tier_->stats();
    EXPECT_LE(stats.physical_bytes, stats.capacity_bytes);
    tally->n_moved += stats.n_moved;
    for (size_t i = 0; i < tiers::kDiskFaults; ++i) {
      tally->n_faults[i] += disk_->n_faults(static_cast<DiskFault>(i));
    }
  }

 private:
  struct Held {
    PlaceId place;
    uint32_t mark;
    uint32_t size;
    uint32_t n_reads;
  };
  struct Under {
    std::unique_ptr<SlowPage> page;
    uint32_t mark;
  };

  uint32_t below(uint32_t n) { return static_cast<uint32_t>(generator_() % n); }

  uint32_t some_size() {
    switch (below(8)) {
      case 0:
        return 1 + below(64 << 10);
      case 1:
        return 100'000;  // more than a transfer
      default:
        return 64 * (1 + below(256));
    }
  }

  void begin_some() {
    std::vector<Transfer*> transfers;
    const uint32_t share = below(3);
    for (uint32_t n = below(10); n != 0; --n) {
      if (held_.empty() || below(3) >= share) {
        const uint32_t mark = next_mark_++;
        under_.push_back({std::make_unique<SlowPage>(mark, some_size()), mark});
      } else {
        Held& held = held_[below(static_cast<uint32_t>(held_.size()))];
        ++held.n_reads;
        under_.push_back({std::make_unique<SlowPage>(held.place, held.size), held.mark});
      }
      transfers.push_back(under_.back().page.get());
    }
    tier_->submit(transfers);
  }

  void take_ended(Tally* tally) {
    for (auto it = under_.begin(); it != under_.end();) {
      if (!it->page->is_done) {
        ++it;
        continue;
      }
      judge(*it, tally);
      it = under_.erase(it);
    }
  }

  void judge(const Under& ended, Tally* tally) {
    const SlowPage& page = *ended.page;
    const kvm_status code = page.status.code();
    const std::string what(page.status.message());
    tally->n_ok += code == KVM_OK ? 1 : 0;
    tally->n_io += code == KVM_ERR_IO ? 1 : 0;
    tally->n_corrupt += code == KVM_ERR_CORRUPT ? 1 : 0;
    tally->n_no_space += code == KVM_ERR_NO_SPACE ? 1 : 0;
    EXPECT_EQ(code == KVM_OK, what.empty());
    if (page.kind == Transfer::Kind::kWrite) {
      EXPECT_TRUE(code == KVM_OK || code == KVM_ERR_NO_SPACE || (code == KVM_ERR_IO && !is_sound_))
          << what;
      EXPECT_EQ(page.place == kNoPlace, code != KVM_OK);
      EXPECT_TRUE(page.holds(ended.mark)) << "a page is written, not changed";
      if (code == KVM_OK) {
        held_.push_back({page.place, ended.mark, page.size_bytes, 0});
      }
      return;
    }
    const auto held = std::find_if(held_.begin(), held_.end(),
                                   [&](const Held& h) { return h.place == page.place; });
    ASSERT_NE(held, held_.end());
    --held->n_reads;
    if (code == KVM_OK) {
      EXPECT_TRUE(page.holds(ended.mark)) << "other bytes than were written";
    } else {
      EXPECT_TRUE(!is_sound_ && (code == KVM_ERR_IO || code == KVM_ERR_CORRUPT)) << what;
      EXPECT_NE(what.find("/kvm-"), std::string::npos) << what;
    }
  }

  void release_some() {
    for (uint32_t n = below(6); n != 0 && !held_.empty(); --n) {
      const uint32_t index = below(static_cast<uint32_t>(held_.size()));
      if (held_[index].n_reads == 0) {
        tier_->release(held_[index].place);
        held_[index] = held_.back();
        held_.pop_back();
      }
    }
  }

  void check_used() {
    uint64_t used = 0;
    for (const Held& held : held_) {
      used += tiers::record_bytes(held.size);
    }
    for (const Under& under : under_) {
      used += under.page->kind == Transfer::Kind::kWrite
                  ? tiers::record_bytes(under.page->size_bytes)
                  : 0;
    }
    ASSERT_EQ(tier_->used_bytes(), used);
  }

  void drain(Tally* tally) {
    uint32_t n_turns = 0;
    while (tier_->turn() && n_turns < kMaxTurns) {
      ++n_turns;
    }
    ASSERT_LT(n_turns, kMaxTurns) << "something hangs";
    take_ended(tally);
    ASSERT_TRUE(under_.empty());
    check_used();
  }

  // On a disk that fails no more, so that only what it holds counts.
  void read_all(Tally* tally) {
    std::vector<Transfer*> transfers;
    for (Held& held : held_) {
      ++held.n_reads;
      under_.push_back({std::make_unique<SlowPage>(held.place, held.size), held.mark});
      transfers.push_back(under_.back().page.get());
    }
    tier_->submit(transfers);
    drain(tally);
  }

  std::mt19937_64 generator_;
  bool is_sound_ = false;
  SimulatedClock clock_;
  SimulatedDisk* disk_ = nullptr;
  std::unique_ptr<DiskTier> tier_;
  std::vector<Held> held_;
  std::list<Under> under_;
  uint32_t next_mark_ = 1;
};

TEST(DiskFaults, AReadGivesWhatWasWrittenOrAnError) {
  const bool is_one = std::getenv("KVM_DISK_SEED") != nullptr;
  const uint64_t first = number_from_environment("KVM_DISK_SEED", 0);
  const uint64_t n = number_from_environment("KVM_DISK_SEEDS", is_one ? 1 : by_day(400, 1000));
  Tally tally;
  for (uint64_t seed = first; seed < first + n; ++seed) {
    SCOPED_TRACE("KVM_DISK_SEED=" + std::to_string(seed));
    Life(seed).live(&tally);
    if (HasFailure()) {
      return;
    }
  }
  std::printf(
      "%llu seeds: %llu transfers without fault, %llu IO, %llu CORRUPT, %llu NO_SPACE, "
      "%llu pages moved\n",
      static_cast<unsigned long long>(n), static_cast<unsigned long long>(tally.n_ok),
      static_cast<unsigned long long>(tally.n_io), static_cast<unsigned long long>(tally.n_corrupt),
      static_cast<unsigned long long>(tally.n_no_space),
      static_cast<unsigned long long>(tally.n_moved));
  if (n >= 1000) {
    EXPECT_GT(tally.n_ok, 100 * n);
    EXPECT_GT(tally.n_io, n);
    EXPECT_GT(tally.n_corrupt, n);
    EXPECT_GT(tally.n_no_space, n);
    EXPECT_GT(tally.n_moved, n);
    for (size_t i = 0; i < tiers::kDiskFaults; ++i) {
      // The tier syncs nothing.
      EXPECT_EQ(tally.n_faults[i] >= 100, i != static_cast<size_t>(DiskFault::kLostSync)) << i;
    }
  }
}

}  // namespace
}  // namespace kvm::testing
