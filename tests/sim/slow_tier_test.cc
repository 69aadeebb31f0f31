// SPDX-License-Identifier: Apache-2.0
// What every SlowTier must hold to, over the simulated one in each way in which its transfers end,
// and over the disk tier on each of its disks; and what the simulated one promises besides.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "tests/common/temporary_directory.h"
#include "tiers/disk/disk_tier.h"
#include "tiers/disk/simulated_disk.h"
#include "tiers/simulated/simulated_tier.h"
#include "tiers/slow_tier.h"

namespace {

// Which allocation of this thread from now on fails; 0: none.
thread_local uint64_t t_fail_new = 0;

void* allocate(size_t size) {
  if (t_fail_new != 0 && --t_fail_new == 0) {
    throw std::bad_alloc();
  }
  if (void* const memory = std::malloc(size); memory != nullptr) {
    return memory;
  }
  throw std::bad_alloc();
}

}  // namespace

void* operator new(size_t size) { return allocate(size); }
void* operator new[](size_t size) { return allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace kvm::testing {
namespace {

using tiers::DiskBackend;
using tiers::DiskTier;
using tiers::DiskTierOptions;
using tiers::kNoPlace;
using tiers::PlaceId;
using tiers::SimulatedDisk;
using tiers::SimulatedTier;
using tiers::SimulatedTierOptions;
using tiers::SlowTier;
using tiers::Transfer;
using Kind = Transfer::Kind;

constexpr uint64_t kMsNs = 1'000'000;
constexpr uint32_t kKiB = 1024;

// Counts transfers that have ended.
class Ends {
 public:
  void arrive() {
    const std::lock_guard lock(mutex_);
    ++n_;
    // Under the lock: who waits may destroy this as soon as that is free.
    arrived_.notify_all();
  }
  // Whether so many have, after a short wait if need be.
  bool have(uint64_t n) {
    std::unique_lock lock(mutex_);
    return arrived_.wait_for(lock, std::chrono::milliseconds(1), [&] { return n_ >= n; });
  }
  void wait(uint64_t n) {
    while (!have(n)) {
    }
  }
  uint64_t n() {
    const std::lock_guard lock(mutex_);
    return n_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  uint64_t n_ = 0;
};

std::vector<std::byte> bytes_of(uint32_t mark, uint32_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  uint32_t word = mark * 0x9e3779b9u;
  for (std::byte& byte : bytes) {
    word = word * 0x915f77f5u + 1;
    byte = static_cast<std::byte>(word >> 24);
  }
  return bytes;
}

// A transfer with memory of its own: of a write it is filled, by its mark.
class Page final : public Transfer {
 public:
  Page(uint32_t mark, uint32_t size, Ends* ends) : bytes(bytes_of(mark, size)), ends_(ends) {
    kind = Kind::kWrite;
    data = bytes.data();
    size_bytes = size;
  }
  Page(PlaceId from, uint32_t size, Ends* ends) : bytes(size), ends_(ends) {
    kind = Kind::kRead;
    place = from;
    data = bytes.data();
    size_bytes = size;
  }
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;

  void on_done() noexcept override {
    ended_ns = now_ns();
    ended_as = ends_->n();
    ends_->arrive();
  }

  std::vector<std::byte> bytes;
  uint64_t ended_ns = 0;
  uint64_t ended_as = 0;  // how many ended before it: where none ends beside it

 private:
  Ends* const ends_;
};

void submit(SlowTier& tier, Transfer& transfer) {
  Transfer* const one = &transfer;
  tier.submit({&one, 1});
}

// Pages to be written, with marks from 0 on.
std::deque<Page> marked_pages(uint32_t n, uint32_t size_bytes, Ends* ends) {
  std::deque<Page> pages;
  for (uint32_t i = 0; i < n; ++i) {
    pages.emplace_back(i, size_bytes, ends);
  }
  return pages;
}

// All at once.
void submit(SlowTier& tier, std::deque<Page>& pages) {
  std::vector<Transfer*> transfers;
  for (Page& page : pages) {
    transfers.push_back(&page);
  }
  tier.submit(transfers);
}

// --- What every slow tier must hold to -----------------------------------------------------------

// Each has a tier, and drive() with which it may have to be brought to end transfers: one thread
// calls that until what it waits for is there.
struct TimedRig {
  explicit TimedRig(uint64_t capacity_bytes) : tier({.capacity_bytes = capacity_bytes}) {}
  void drive() {}
  SimulatedTier tier;
};
struct SlowRig {
  explicit SlowRig(uint64_t capacity_bytes)
      : tier({.capacity_bytes = capacity_bytes,
              .bytes_per_s = 4'000'000'000,
              .latency_ns = kMsNs / 10}) {}
  void drive() {}
  SimulatedTier tier;
};
struct ShuffledRig {
  explicit ShuffledRig(uint64_t capacity_bytes)
      : tier({.capacity_bytes = capacity_bytes,
              .latency_ns = kMsNs / 10,
              .reorder = 16,
              .seed = 5}) {}
  void drive() {}
  SimulatedTier tier;
};
struct ManualRig {
  explicit ManualRig(uint64_t capacity_bytes)
      : tier({.capacity_bytes = capacity_bytes, .is_manual = true}) {}
  void drive() {
    for (size_t n = tier.n_waiting(); n != 0; n = tier.n_waiting()) {
      tier.finish(generator() % n);
    }
  }
  SimulatedTier tier;
  std::mt19937 generator{6};
};

DiskTierOptions disk_options(uint64_t capacity_bytes) {
  return {.capacity_bytes = capacity_bytes,
          .segment_bytes = 640 * kKiB,
          .transfer_bytes = 64 * kKiB,
          .queue_depth = 8};
}

struct FileRig {
  FileRig(uint64_t capacity_bytes, DiskBackend backend) : owned(open(capacity_bytes, backend)) {}
  std::unique_ptr<DiskTier> open(uint64_t capacity_bytes, DiskBackend backend) {
    DiskTierOptions options = disk_options(capacity_bytes);
    options.directories = {directory.path()};
    options.backend = backend;
    return DiskTier::open(options).value();
  }
  void drive() {}
  TemporaryDirectory directory;
  std::unique_ptr<DiskTier> owned;
  SlowTier& tier = *owned;
};
// io_uring where the system has it.
struct UringDiskRig : FileRig {
  explicit UringDiskRig(uint64_t capacity_bytes) : FileRig(capacity_bytes, DiskBackend::kAny) {}
};
struct ThreadsDiskRig : FileRig {
  explicit ThreadsDiskRig(uint64_t capacity_bytes)
      : FileRig(capacity_bytes, DiskBackend::kThreads) {}
};
struct SimulatedDiskRig {
  explicit SimulatedDiskRig(uint64_t capacity_bytes) : owned(open(capacity_bytes)) {}
  static std::unique_ptr<DiskTier> open(uint64_t capacity_bytes) {
    DiskTierOptions options = disk_options(capacity_bytes);
    options.directories = {"a", "b"};
    auto disk = std::make_unique<SimulatedDisk>(tiers::SimulatedDiskOptions{
        .io = DiskTier::io_options(options).value(), .seed = 4, .max_latency = 5});
    return DiskTier::over(std::move(disk), options).value();
  }
  void drive() {}
  std::unique_ptr<DiskTier> owned;
  SlowTier& tier = *owned;
};

template <typename Rig>
class SlowTierConformance : public ::testing::Test {
 protected:
  static constexpr uint64_t kCapacity = 2048 * kKiB;

  void wait(Ends& ends, uint64_t n) {
    do {
      rig_.drive();
    } while (!ends.have(n));
  }
  // Submits them and waits until they have ended.
  void run(std::deque<Page>& pages, Ends& ends) {
    const uint64_t n = ends.n() + pages.size();
    submit(tier_, pages);
    wait(ends, n);
  }
  PlaceId write(uint32_t mark, uint32_t size) {
    Ends ends;
    std::deque<Page> pages;
    pages.emplace_back(mark, size, &ends);
    run(pages, ends);
    EXPECT_TRUE(pages[0].status.is_ok()) << pages[0].status.message();
    return pages[0].place;
  }
  void expect_page(PlaceId place, uint32_t mark, uint32_t size) {
    Ends ends;
    std::deque<Page> pages;
    pages.emplace_back(place, size, &ends);
    run(pages, ends);
    EXPECT_TRUE(pages[0].status.is_ok()) << pages[0].status.message();
    EXPECT_EQ(pages[0].place, place);
    EXPECT_TRUE(pages[0].bytes == bytes_of(mark, size)) << "mark " << mark << ", size " << size;
  }

  Rig rig_{kCapacity};
  SlowTier& tier_ = rig_.tier;
};
using Rigs = ::testing::Types<TimedRig, SlowRig, ShuffledRig, ManualRig, UringDiskRig,
                              ThreadsDiskRig, SimulatedDiskRig>;
TYPED_TEST_SUITE(SlowTierConformance, Rigs);

TYPED_TEST(SlowTierConformance, ReadsGiveWhatWasWritten) {
  const uint32_t sizes[] = {64, 128, 4096, 4160, 64 * kKiB, 200 * kKiB + 64, 512 * kKiB};
  Ends ends;
  std::deque<Page> writes;
  for (const uint32_t size : sizes) {
    writes.emplace_back(size, size, &ends);
  }
  this->run(writes, ends);
  std::set<PlaceId> places;
  for (const Page& page : writes) {
    ASSERT_TRUE(page.status.is_ok()) << page.status.message();
    EXPECT_NE(page.place, kNoPlace);
    EXPECT_TRUE(places.insert(page.place).second) << "each has its own";
    EXPECT_TRUE(page.bytes == bytes_of(page.size_bytes, page.size_bytes));
  }
  std::deque<Page> reads;
  for (int i = 0; i < 2; ++i) {
    for (const Page& page : writes) {
      reads.emplace_back(page.place, page.size_bytes, &ends);
    }
  }
  this->run(reads, ends);
  for (const Page& page : reads) {
    ASSERT_TRUE(page.status.is_ok()) << page.status.message();
    EXPECT_TRUE(page.bytes == bytes_of(page.size_bytes, page.size_bytes));
  }
  for (const PlaceId place : places) {
    this->tier_.release(place);
  }
  EXPECT_EQ(this->tier_.used_bytes(), 0u);
}

TYPED_TEST(SlowTierConformance, APlaceStaysUntilItsLastReferenceGoes) {
  const PlaceId place = this->write(7, 4096);
  const uint64_t used = this->tier_.used_bytes();
  this->tier_.add_ref(place);
  this->tier_.add_ref(place);
  this->tier_.release(place);
  this->tier_.release(place);
  EXPECT_EQ(this->tier_.used_bytes(), used);
  this->expect_page(place, 7, 4096);
  this->tier_.release(place);
  EXPECT_EQ(this->tier_.used_bytes(), 0u);
  // The next that has the place begins with one again.
  const PlaceId next = this->write(8, 4096);
  this->tier_.release(next);
  EXPECT_EQ(this->tier_.used_bytes(), 0u);
}

TYPED_TEST(SlowTierConformance, NoTransfersAreNothing) {
  this->tier_.submit({});
  EXPECT_EQ(this->tier_.used_bytes(), 0u);
}

// Writes, reads and releases, of which many are under way at once.
TYPED_TEST(SlowTierConformance, PagesComeAndGo) {
  struct Held {
    uint32_t mark = 0;
    uint32_t size = 0;
  };
  std::mt19937 generator(17);
  std::vector<std::pair<PlaceId, Held>> held;
  uint32_t next_mark = 1;
  for (int round = 0; round < 40; ++round) {
    Ends ends;
    std::deque<Page> pages;
    std::deque<Held> expected;
    for (int i = 0; i < 24; ++i) {
      if (held.empty() || generator() % 3 == 0) {
        const Held page{next_mark++, 64 * (1 + static_cast<uint32_t>(generator() % 64))};
        pages.emplace_back(page.mark, page.size, &ends);
        expected.push_back(page);
      } else {
        const auto& [place, page] = held[generator() % held.size()];
        pages.emplace_back(place, page.size, &ends);
        expected.push_back(page);
      }
    }
    this->run(pages, ends);
    for (size_t i = 0; i < pages.size(); ++i) {
      ASSERT_TRUE(pages[i].status.is_ok()) << pages[i].status.message();
      ASSERT_TRUE(pages[i].bytes == bytes_of(expected[i].mark, expected[i].size)) << round;
      if (pages[i].kind == Kind::kWrite) {
        held.emplace_back(pages[i].place, expected[i]);
      }
    }
    std::shuffle(held.begin(), held.end(), generator);
    while (held.size() > 20) {
      this->tier_.release(held.back().first);
      held.pop_back();
    }
  }
  for (const auto& [place, page] : held) {
    this->expect_page(place, page.mark, page.size);
    this->tier_.release(place);
  }
  EXPECT_EQ(this->tier_.used_bytes(), 0u);
}

TYPED_TEST(SlowTierConformance, ManyThreadsSubmit) {
  constexpr uint32_t kThreads = 4;
  constexpr uint32_t kPages = 25;
  SlowTier& tier = this->tier_;
  Ends threads;
  std::vector<std::thread> workers;
  for (uint32_t t = 0; t < kThreads; ++t) {
    workers.emplace_back([t, &tier, &threads] {
      for (uint32_t round = 0; round < 4; ++round) {
        const auto mark_of = [&](size_t i) {
          return 1000 * t + 100 * round + static_cast<uint32_t>(i);
        };
        Ends ends;
        std::deque<Page> writes;
        for (size_t i = 0; i < kPages; ++i) {
          writes.emplace_back(mark_of(i), 256 + 64 * t, &ends);
          submit(tier, writes.back());
        }
        ends.wait(kPages);
        std::deque<Page> reads;
        for (const Page& page : writes) {
          EXPECT_TRUE(page.status.is_ok()) << page.status.message();
          reads.emplace_back(page.place, page.size_bytes, &ends);
        }
        submit(tier, reads);
        ends.wait(2 * kPages);
        for (size_t i = 0; i < kPages; ++i) {
          EXPECT_TRUE(reads[i].status.is_ok()) << reads[i].status.message();
          EXPECT_TRUE(reads[i].bytes == bytes_of(mark_of(i), 256 + 64 * t));
          tier.release(reads[i].place);
        }
      }
      threads.arrive();
    });
  }
  this->wait(threads, kThreads);
  for (std::thread& worker : workers) {
    worker.join();
  }
  EXPECT_EQ(tier.used_bytes(), 0u);
}

// Is written, read and released, again and again, and goes on by itself.
class Wanderer final : public Transfer {
 public:
  Wanderer(SlowTier* tier, Ends* ends) : tier_(tier), ends_(ends) { begin_write(); }

  void on_done() noexcept override {
    EXPECT_TRUE(status.is_ok()) << status.message();
    if (kind == Kind::kWrite) {
      kind = Kind::kRead;
      std::fill(bytes_.begin(), bytes_.end(), std::byte{0});
    } else {
      EXPECT_TRUE(bytes_ == bytes_of(mark_, kSize));
      tier_->release(place);
      if (++mark_ == 20) {
        ends_->arrive();
        return;
      }
      begin_write();
    }
    submit(*tier_, *this);
  }

 private:
  static constexpr uint32_t kSize = 1024;

  void begin_write() {
    kind = Kind::kWrite;
    place = kNoPlace;
    bytes_ = bytes_of(mark_, kSize);
    data = bytes_.data();
    size_bytes = kSize;
  }

  SlowTier* const tier_;
  Ends* const ends_;
  uint32_t mark_ = 0;
  std::vector<std::byte> bytes_;
};

TYPED_TEST(SlowTierConformance, OnDoneMaySubmitAndRelease) {
  Ends ends;
  std::deque<Wanderer> wanderers;
  for (int i = 0; i < 3; ++i) {
    submit(this->tier_, wanderers.emplace_back(&this->tier_, &ends));
  }
  this->wait(ends, wanderers.size());
  EXPECT_EQ(this->tier_.used_bytes(), 0u);
}

// Is gone when its on_done returns.
class Fleeting final : public Transfer {
 public:
  Fleeting(SlowTier* tier, Ends* ends) : tier_(tier), ends_(ends), bytes_(bytes_of(1, 512)) {
    kind = Kind::kWrite;
    data = bytes_.data();
    size_bytes = 512;
  }
  void on_done() noexcept override {
    EXPECT_TRUE(status.is_ok()) << status.message();
    tier_->release(place);
    Ends* const ends = ends_;
    delete this;
    ends->arrive();
  }

 private:
  ~Fleeting() = default;

  SlowTier* const tier_;
  Ends* const ends_;
  std::vector<std::byte> bytes_;
};

TYPED_TEST(SlowTierConformance, OnDoneMayDestroyTheTransfer) {
  Ends ends;
  std::vector<Transfer*> transfers;
  for (int i = 0; i < 20; ++i) {
    transfers.push_back(new Fleeting(&this->tier_, &ends));
  }
  this->tier_.submit(transfers);
  this->wait(ends, transfers.size());
  EXPECT_EQ(this->tier_.used_bytes(), 0u);
}

TYPED_TEST(SlowTierConformance, UsedBytesAreThoseOfPagesAndOfWritesInFlight) {
  constexpr uint32_t kSize = 16 * kKiB;
  SlowTier& tier = this->tier_;
  EXPECT_EQ(tier.used_bytes(), 0u);
  const PlaceId first = this->write(1, kSize);
  const uint64_t one = tier.used_bytes();
  EXPECT_GE(one, kSize);
  Ends ends;
  std::deque<Page> writes;
  writes.emplace_back(2, kSize, &ends);
  submit(tier, writes);
  EXPECT_EQ(tier.used_bytes(), 2 * one) << "in flight, or done already";
  this->wait(ends, 1);
  EXPECT_EQ(tier.used_bytes(), 2 * one);
  this->expect_page(first, 1, kSize);
  EXPECT_EQ(tier.used_bytes(), 2 * one) << "reading takes none";
  tier.release(first);
  EXPECT_EQ(tier.used_bytes(), one);
  tier.release(writes[0].place);
  EXPECT_EQ(tier.used_bytes(), 0u);
}

TYPED_TEST(SlowTierConformance, WritesWithoutRoomAreRefusedAndRoomIsUsedAgain) {
  constexpr uint32_t kSize = 256 * kKiB;
  SlowTier& tier = this->tier_;
  size_t n_fitted = 0;
  for (int round = 0; round < 2; ++round) {
    Ends ends;
    std::deque<Page> writes;
    for (uint32_t i = 0; i <= this->kCapacity / kSize; ++i) {
      writes.emplace_back(i, kSize, &ends);
    }
    this->run(writes, ends);
    std::vector<std::pair<PlaceId, uint32_t>> held;
    uint64_t n_refused = 0;
    for (uint32_t i = 0; i < writes.size(); ++i) {
      if (writes[i].status.is_ok()) {
        held.emplace_back(writes[i].place, i);
        continue;
      }
      ++n_refused;
      EXPECT_EQ(writes[i].status.code(), KVM_ERR_NO_SPACE);
      EXPECT_FALSE(writes[i].status.message().empty());
    }
    EXPECT_GE(n_refused, 1u);
    ASSERT_GE(held.size(), 2u);
    if (round == 0) {
      n_fitted = held.size();
    }
    EXPECT_EQ(held.size(), n_fitted) << "all room has come back";
    const uint64_t used = tier.used_bytes();
    EXPECT_LE(used, this->kCapacity);
    tier.release(held.back().first);
    held.back() = {this->write(77, kSize), 77};
    EXPECT_EQ(tier.used_bytes(), used);
    for (const auto& [place, mark] : held) {
      this->expect_page(place, mark, kSize);
      tier.release(place);
    }
    EXPECT_EQ(tier.used_bytes(), 0u);
  }
}

// --- The simulated one: time ---------------------------------------------------------------------

TEST(SimulatedTierTime, BytesPassOneAfterTheOtherAndLatencyComesOnTop) {
  constexpr uint64_t kBytesPerS = 200'000'000;
  constexpr uint64_t kLatencyNs = 2 * kMsNs;
  constexpr uint32_t kSize = 50'000;  // 250 us
  SimulatedTier tier({.bytes_per_s = kBytesPerS, .latency_ns = kLatencyNs});
  Ends ends;
  std::deque<Page> writes = marked_pages(8, kSize, &ends);
  const auto expect_ends = [&](const std::deque<Page>& pages, uint64_t begin_ns) {
    for (size_t i = 0; i < pages.size(); ++i) {
      EXPECT_GE(pages[i].ended_ns,
                begin_ns + (i + 1) * kSize * 1'000'000'000 / kBytesPerS + kLatencyNs)
          << i;
    }
  };
  uint64_t begin_ns = now_ns();
  submit(tier, writes);
  ends.wait(8);
  expect_ends(writes, begin_ns);

  // A pipe that was idle has saved nothing up, and reads and writes share it.
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  std::deque<Page> mixed;
  for (uint32_t i = 0; i < 4; ++i) {
    mixed.emplace_back(i, kSize, &ends);
    mixed.emplace_back(writes[i].place, kSize, &ends);
  }
  begin_ns = now_ns();
  submit(tier, mixed);
  ends.wait(16);
  expect_ends(mixed, begin_ns);
}

// In which order transfers of one batch end.
std::vector<uint64_t> order_of_ends(uint32_t reorder, uint64_t seed) {
  SimulatedTier tier({.latency_ns = kMsNs, .reorder = reorder, .seed = seed});
  Ends ends;
  std::deque<Page> writes = marked_pages(64, 64, &ends);
  submit(tier, writes);
  ends.wait(64);
  std::vector<uint64_t> order;
  for (const Page& page : writes) {
    order.push_back(page.ended_as);
  }
  return order;
}

TEST(SimulatedTierTime, WhatIsDueIsShuffledBySeed) {
  std::vector<uint64_t> sorted(64);
  std::iota(sorted.begin(), sorted.end(), 0);
  EXPECT_EQ(order_of_ends(1, 9), sorted);
  const std::vector<uint64_t> order = order_of_ends(8, 9);
  EXPECT_NE(order, sorted);
  for (size_t i = 0; i < order.size(); ++i) {
    EXPECT_EQ(order[i] / 8, i / 8) << "eight are shuffled at a time";
  }
  EXPECT_EQ(order_of_ends(8, 9), order);
  EXPECT_NE(order_of_ends(8, 10), order);
  EXPECT_NE(order_of_ends(64, 9), order);
}

// --- The simulated one: by hand ------------------------------------------------------------------

TEST(SimulatedTierByHand, AnyOrderCanBeHad) {
  std::vector<size_t> order = {0, 1, 2, 3};
  do {
    SimulatedTier tier({.is_manual = true});
    Ends ends;
    std::deque<Page> writes = marked_pages(4, 64, &ends);
    std::deque<Page> reads;
    for (std::deque<Page>* pages : {&writes, &reads}) {
      submit(tier, *pages);
      const uint64_t n_before = ends.n();
      std::vector<size_t> waiting = {0, 1, 2, 3};
      for (size_t i = 0; i < order.size(); ++i) {
        EXPECT_EQ(tier.n_waiting(), 4 - i);
        EXPECT_EQ(tier.n_in_flight(), 4 - i);
        EXPECT_EQ(ends.n(), n_before + i) << "none ends by itself";
        const auto found = std::find(waiting.begin(), waiting.end(), order[i]);
        tier.finish(static_cast<size_t>(found - waiting.begin()));
        waiting.erase(found);
        EXPECT_EQ((*pages)[order[i]].ended_as, n_before + i);
      }
      for (size_t i = 0; i < 4; ++i) {
        EXPECT_TRUE((*pages)[i].bytes == bytes_of(static_cast<uint32_t>(i), 64));
        if (pages == &writes) {
          reads.emplace_back(writes[i].place, 64, &ends);
        }
      }
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(SimulatedTierByHand, FinishAllEndsWhatIsSubmittedMeanwhile) {
  SimulatedTier tier({.is_manual = true});
  Ends ends;
  Wanderer wanderer(&tier, &ends);
  submit(tier, wanderer);
  tier.finish(0);
  EXPECT_EQ(tier.n_waiting(), 1u) << "the read that follows";
  tier.finish_all();
  EXPECT_EQ(ends.n(), 1u);
  EXPECT_EQ(tier.n_waiting(), 0u);
}

TEST(SimulatedTierByHand, ThePlaceReleasedLastIsUsedFirst) {
  SimulatedTier tier({.is_manual = true});
  Ends ends;
  std::deque<Page> writes = marked_pages(3, 64, &ends);
  submit(tier, writes);
  tier.finish_all();
  tier.release(writes[0].place);
  tier.release(writes[2].place);
  std::deque<Page> again = marked_pages(2, 64, &ends);
  submit(tier, again);
  tier.finish_all();
  EXPECT_EQ(again[0].place, writes[2].place);
  EXPECT_EQ(again[1].place, writes[0].place);
}

TEST(SimulatedTierByHand, RefusalsNameWhatWasAskedAndWhatIsFree) {
  SimulatedTier tier({.capacity_bytes = 1000, .is_manual = true});
  Ends ends;
  std::deque<Page> writes;
  for (const uint32_t size : {320u, 704u, 680u}) {
    writes.emplace_back(size, size, &ends);
  }
  submit(tier, writes);
  EXPECT_EQ(tier.used_bytes(), 1000u);
  tier.finish_all();
  EXPECT_TRUE(writes[0].status.is_ok());
  EXPECT_EQ(writes[1].status.code(), KVM_ERR_NO_SPACE);
  EXPECT_EQ(writes[1].status.message(),
            "simulated tier: a page of 704 bytes, 680 of 1000 bytes are free");
  EXPECT_TRUE(writes[2].status.is_ok());
  EXPECT_EQ(tier.n_writes(), 2u);
  EXPECT_EQ(tier.written_bytes(), 1000u);
}

TEST(SimulatedTierByHand, WithoutMemoryATransferEndsAtOnceAndNothingHasChanged) {
  SimulatedTier tier({.is_manual = true});
  Ends ends;
  std::vector<PlaceId> places;
  uint64_t n_refused = 0;
  // Often enough that each container has to grow.
  for (uint32_t mark = 0; mark < 70; ++mark) {
    for (uint64_t n = 1;; ++n) {
      Page write(mark, 64, &ends);
      const uint64_t used = tier.used_bytes();
      t_fail_new = n;
      submit(tier, write);
      t_fail_new = 0;
      if (write.status.is_ok()) {
        EXPECT_EQ(tier.n_in_flight(), 1u);
        tier.finish_all();
        places.push_back(write.place);
        break;
      }
      ++n_refused;
      EXPECT_EQ(write.status.code(), KVM_ERR_NO_MEMORY);
      EXPECT_EQ(write.ended_as, ends.n() - 1);
      EXPECT_EQ(tier.used_bytes(), used);
      EXPECT_EQ(tier.n_in_flight(), 0u);
    }
  }
  EXPECT_GT(n_refused, 70u) << "a block of each page, and more";
  for (uint32_t mark = 0; mark < 70; ++mark) {
    Page read(places[mark], 64, &ends);
    submit(tier, read);
    tier.finish_all();
    EXPECT_TRUE(read.bytes == bytes_of(mark, 64));
  }
}

// --- The simulated one: faults and counts --------------------------------------------------------

class SimulatedTierFaults : public ::testing::TestWithParam<bool> {
 protected:
  // One after the other; returns the code with which each ended.
  std::vector<kvm_status> run(std::deque<Page>& pages) {
    std::vector<kvm_status> codes;
    for (Page& page : pages) {
      const uint64_t n = ends_.n() + 1;
      submit(tier_, page);
      if (GetParam()) {
        tier_.finish_all();
      }
      ends_.wait(n);
      codes.push_back(page.status.code());
    }
    return codes;
  }
  std::deque<Page> writes(uint32_t n) { return marked_pages(n, kSize, &ends_); }
  std::deque<Page> reads(PlaceId place, uint32_t n) {
    std::deque<Page> pages;
    for (uint32_t i = 0; i < n; ++i) {
      pages.emplace_back(place, kSize, &ends_);
    }
    return pages;
  }

  static constexpr uint32_t kSize = 128;
  Ends ends_;
  SimulatedTier tier_{{.is_manual = GetParam()}};
};
INSTANTIATE_TEST_SUITE_P(Timed, SimulatedTierFaults, ::testing::Values(false));
INSTANTIATE_TEST_SUITE_P(Manual, SimulatedTierFaults, ::testing::Values(true));

using Codes = std::vector<kvm_status>;

TEST_P(SimulatedTierFaults, TheNthWriteFailsAndLeavesNothing) {
  tier_.fail_next(Kind::kWrite, 2, Status(KVM_ERR_IO, "a fault"));
  tier_.fail_next(Kind::kRead, 1, Status(KVM_ERR_CORRUPT, "of others"));
  std::deque<Page> pages = writes(4);
  EXPECT_EQ(run(pages), (Codes{KVM_OK, KVM_ERR_IO, KVM_OK, KVM_OK}));
  EXPECT_EQ(pages[1].status.message(), "a fault");
  EXPECT_EQ(pages[1].place, kNoPlace);
  EXPECT_EQ(tier_.used_bytes(), 3 * kSize);
  EXPECT_EQ(tier_.n_writes(), 3u);
  EXPECT_EQ(tier_.written_bytes(), 3 * kSize);
}

TEST_P(SimulatedTierFaults, ReadsThatFailLeaveNoBytesToBeUsed) {
  std::deque<Page> pages = writes(1);
  run(pages);
  const PlaceId place = pages[0].place;
  tier_.fail_every(Kind::kRead, 3, Status(KVM_ERR_CORRUPT, "every third"));
  tier_.fail_next(Kind::kRead, 4, Status(KVM_ERR_IO, "and the fourth"));
  std::deque<Page> seven = reads(place, 7);
  EXPECT_EQ(run(seven),
            (Codes{KVM_OK, KVM_OK, KVM_ERR_CORRUPT, KVM_ERR_IO, KVM_OK, KVM_ERR_CORRUPT, KVM_OK}));
  for (const Page& page : seven) {
    EXPECT_TRUE(page.bytes == (page.status.is_ok()
                                   ? bytes_of(0, kSize)
                                   : std::vector<std::byte>(kSize, std::byte{0xdb})));
  }
  EXPECT_EQ(tier_.n_reads(), 4u);
  EXPECT_EQ(tier_.read_bytes(), 4 * kSize);
  EXPECT_EQ(tier_.reads_of(place), 4u);
  tier_.clear_faults();
  std::deque<Page> six = reads(place, 6);
  EXPECT_EQ(run(six), Codes(6, KVM_OK));
  EXPECT_EQ(tier_.reads_of(place), 10u);
  tier_.release(place);
  std::deque<Page> next = writes(1);
  run(next);
  ASSERT_EQ(next[0].place, place);
  EXPECT_EQ(tier_.reads_of(place), 0u) << "of another page";
}

// --- The simulated one: wrong use ----------------------------------------------------------------

TEST(SimulatedTierMisuse, IsAnAssertion) {
  SimulatedTier tier({.is_manual = true});
  Ends ends;
  std::deque<Page> writes = marked_pages(2, 64, &ends);
  submit(tier, writes);
  tier.finish(0);
  const PlaceId place = writes[0].place;
  const auto read = [&](PlaceId from, uint32_t size) {
    Page page(from, size, &ends);
    submit(tier, page);
  };
  EXPECT_DEATH(tier.release(static_cast<PlaceId>(static_cast<uint32_t>(place) + 1)), "is_written")
      << "it is being written";
  tier.finish(0);
  EXPECT_DEATH(read(kNoPlace, 64), "is_written");
  EXPECT_DEATH(read(place, 128), "size_bytes") << "it is as large as it was written";
  {
    Page page(place, 64, &ends);
    submit(tier, page);
    EXPECT_DEATH(tier.release(place), "n_readers") << "it is read";
    tier.finish(0);
  }
  tier.release(place);
  EXPECT_DEATH(tier.release(place), "is_written") << "twice";
  EXPECT_DEATH(read(place, 64), "is_written");
  EXPECT_DEATH(tier.finish(0), "was_waiting");
  EXPECT_DEATH(
      {
        SimulatedTier other({.is_manual = true});
        Page page(1, 64, &ends);
        submit(other, page);
      },
      "n_in_flight_");
}

}  // namespace
}  // namespace kvm::testing
