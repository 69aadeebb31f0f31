// SPDX-License-Identifier: Apache-2.0
// The emulator finds what it says it finds: small kernels, right ones and each with one mistake.
#include "attention/cuda/emulator.h"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "attention/cuda/primitives.h"

namespace kvm::attention::gpu {
namespace {

emulator::Report run(uint32_t threads, uint32_t shared_bytes, const std::function<void()>& kernel,
                     std::vector<emulator::Range> memory = {}) {
  return emulator::run({2, threads, shared_bytes, memory}, kernel);
}

void expect_fault(const emulator::Report& report, const std::string& part) {
  EXPECT_GT(report.n_faults, 0u);
  EXPECT_NE(report.first_fault.find(part), std::string::npos) << report.first_fault;
}

TEST(Emulator, ShufflesAndVotes) {
  std::array<uint32_t, 64> got{}, any{};
  const auto report = run(64, 0, [&] {
    got[thread_id()] = shuffle(thread_id() * 10, (lane_id() + 1) % 32);
    any[thread_id()] = any_lane(thread_id() == 40);
  });
  EXPECT_EQ(report.n_faults, 0u) << report.first_fault;
  EXPECT_EQ(got[0], 10u);
  EXPECT_EQ(got[31], 0u);
  EXPECT_EQ(got[63], 320u);
  EXPECT_EQ(any[0], 0u);
  EXPECT_EQ(any[63], 1u);
}

TEST(Emulator, MatrixProductLaysElementsOutAsThePtxManualSays) {
  // A[i][k] = 1 where i == k, B[k][n] = 8 k + n: the product is B.
  std::array<float, 16 * 8> product{};
  const auto report = run(32, 0, [&] {
    const auto one = [](uint32_t row, uint32_t k) {
      return pack<Element::kBf16>(row == k ? 1.0f : 0.0f, row == k + 1 ? 1.0f : 0.0f);
    };
    const auto b = [](uint32_t k, uint32_t n) {
      return pack<Element::kBf16>(static_cast<float>(8 * k + n),
                                  static_cast<float>(8 * (k + 1) + n));
    };
    const uint32_t row = lane_id() / 4, k = lane_id() % 4 * 2;
    const uint32_t a[4] = {one(row, k), one(row + 8, k), one(row, k + 8), one(row + 8, k + 8)};
    float d[4] = {};
    mma_16x8x16<Element::kBf16>(d, a, b(k, row), b(k + 8, row));
    for (uint32_t i = 0; i < 4; ++i) {
      product[(row + i / 2 * 8) * 8 + k + i % 2] = d[i];
    }
  });
  EXPECT_EQ(report.n_faults, 0u) << report.first_fault;
  for (uint32_t i = 0; i < product.size(); ++i) {
    EXPECT_EQ(product[i], static_cast<float>(i));
  }
}

// One thread writes, another reads.
void hand_over(const std::function<void()>& barrier) {
  if (thread_id() == 3) {
    store_shared(0, 1.0f);
  }
  barrier();
  if (thread_id() == 5) {
    (void)load_shared<float>(0);
  }
}

TEST(Emulator, BarriersOrderSharedMemory) {
  EXPECT_EQ(run(32, 64, [] { hand_over([] { sync_warp(); }); }).n_faults, 0u);
  EXPECT_EQ(run(32, 64, [] { hand_over([] { sync_block(); }); }).n_faults, 0u);
}

TEST(Emulator, AShuffleOrdersNothing) {
  expect_fault(run(32, 64, [] { hand_over([] { (void)any_lane(true); }); }),
               "read without a barrier");
}

TEST(Emulator, AWarpBarrierOrdersNoOtherWarp) {
  const auto report = run(64, 64, [] {
    if (thread_id() == 3) {
      store_shared(0, 1.0f);
    }
    sync_warp();
    if (thread_id() == 40) {
      (void)load_shared<float>(0);
    }
  });
  expect_fault(report, "shared memory");
}

TEST(Emulator, AWriteAfterARead) {
  const auto kernel = [](bool barrier) {
    store_shared(thread_id() * 4, 1.0f);
    sync_block();
    (void)load_shared<float>((thread_id() + 1) % 32 * 4);
    if (barrier) {
      sync_warp();
    }
    store_shared(thread_id() * 4, 2.0f);
  };
  EXPECT_EQ(run(32, 256, [&] { kernel(true); }).n_faults, 0u);
  expect_fault(run(32, 256, [&] { kernel(false); }), "written without a barrier");
}

TEST(Emulator, SharedMemoryStartsWithoutContents) {
  expect_fault(run(32, 64, [] { (void)load_shared<float>(0); }), "before anything was written");
}

TEST(Emulator, CopiesLandWhenTheyAreWaitedFor) {
  alignas(16) const std::array<float, 4> source = {1, 2, 3, 4};
  const std::vector<emulator::Range> memory = {{source.data(), 16}};
  std::array<float, 2> got{};
  const auto kernel = [&](bool wait) {
    if (thread_id() == 0) {
      copy_async_16(0, source.data(), true);
      copy_async_16(16, source.data(), false);
      copy_async_commit();
      if (wait) {
        copy_async_wait<0>();
      }
      got = {load_shared<float>(4), load_shared<float>(20)};
    }
  };
  EXPECT_EQ(run(
                32, 64, [&] { kernel(true); }, memory)
                .n_faults,
            0u);
  EXPECT_EQ(got[0], 2.0f);
  EXPECT_EQ(got[1], 0.0f);
  expect_fault(run(
                   32, 64, [&] { kernel(false); }, memory),
               "waited for");
}

TEST(Emulator, GlobalMemoryOutsideTheRanges) {
  alignas(16) std::array<float, 8> memory{};
  const std::vector<emulator::Range> ranges = {{memory.data(), 16}};
  expect_fault(run(
                   32, 0, [&] { (void)load_global<float>(&memory[4]); }, ranges),
               "outside");
  expect_fault(run(
                   32, 0, [&] { store_global(&memory[1], Float2{}); }, ranges),
               "misaligned");
}

TEST(Emulator, AKernelThatBeginsEarlyWaitsForTheOneBefore) {
  uint32_t word = 7;
  const emulator::Range memory[] = {{&word, sizeof word}};
  emulator::Launch launch{2, 32, 0, memory};
  const auto reads = [&] { load_global<uint32_t>(&word); };
  const auto waits = [&] {
    wait_for_kernel_before();
    load_global<uint32_t>(&word);
  };
  EXPECT_EQ(emulator::run(launch, reads).n_faults, 0u);
  launch.begins_early = true;
  EXPECT_EQ(emulator::run(launch, waits).n_faults, 0u);
  expect_fault(emulator::run(launch, reads), "the kernel before may not have ended");
}

TEST(Emulator, TheNextKernelBeginsWhenAllBlocksLetIt) {
  const emulator::Launch launch{3, 32, 0, {}};
  EXPECT_TRUE(emulator::run(launch, [] { let_next_kernel_begin(); }).lets_next_begin);
  EXPECT_FALSE(emulator::run(launch, [] {}).lets_next_begin);
  const auto most = [] {
    if (block_id() != 1) {
      let_next_kernel_begin();
    }
  };
  EXPECT_FALSE(emulator::run(launch, most).lets_next_begin);
}

TEST(Emulator, ThreadsThatDoNotMeet) {
  expect_fault(run(32, 0,
                   [] {
                     if (thread_id() != 7) {
                       sync_warp();
                     }
                   }),
               "not all threads come to");
  expect_fault(run(32, 0,
                   [] {
                     if (thread_id() < 16) {
                       sync_warp();
                     } else {
                       (void)any_lane(true);
                     }
                   }),
               "different operations");
}

TEST(Emulator, BankConflicts) {
  const auto kernel = [](uint32_t stride) {
    for (uint32_t i = 0; i < 64; ++i) {
      store_shared((thread_id() * 64 + i) * 4, 0.0f);
    }
    sync_warp();
    uint32_t matrix[4];
    load_matrix_x4(matrix, lane_id() * stride);
  };
  EXPECT_EQ(run(32, 8192, [&] { kernel(16); }).n_bank_conflicts, 0u);
  EXPECT_GT(run(32, 8192, [&] { kernel(128); }).n_bank_conflicts, 0u);
}

// Three blocks count until each has been told that six are gone.
std::vector<uint32_t> takers(emulator::Order order, uint64_t seed, uint32_t* word) {
  std::vector<uint32_t> taker;
  const emulator::Range memory[] = {{word, sizeof *word}};
  const emulator::Report report = emulator::run({3, 64, 0, memory, false, order, seed}, [&] {
    while (thread_id() == 40) {
      const uint32_t count = count_up_to(word, 6 + 3 - 1);
      if (count >= 6) {
        break;
      }
      EXPECT_EQ(count, taker.size());
      taker.push_back(block_id());
    }
    sync_block();
  });
  EXPECT_EQ(report.n_faults, 0u) << report.first_fault;
  EXPECT_EQ(taker.size(), 6u);
  EXPECT_EQ(*word, 0u);
  return taker;
}

TEST(Emulator, BlocksTakeTurnsWhereTheyCount) {
  using emulator::Order;
  uint32_t word = 0;
  EXPECT_EQ(takers(Order::kForward, 1, &word), std::vector<uint32_t>(6, 0));
  EXPECT_EQ(takers(Order::kBackward, 1, &word), std::vector<uint32_t>(6, 2));
  EXPECT_EQ(takers(Order::kTurns, 1, &word), (std::vector<uint32_t>{0, 1, 2, 0, 1, 2}));
  EXPECT_NE(takers(Order::kAny, 1, &word), takers(Order::kAny, 2, &word));
}

TEST(Emulator, PlacesAreStoredToOnce) {
  std::array<uint32_t, 2> words{};
  const std::vector<emulator::Range> ranges = {{words.data(), sizeof words}};
  const auto store = [&words](uint32_t at) {
    if (thread_id() == 0) {
      store_global(&words[at], block_id());
    }
  };
  EXPECT_EQ(run(
                32, 0, [&] { store(block_id()); }, ranges)
                .n_faults,
            0u);
  expect_fault(run(
                   32, 0, [&] { store(0); }, ranges),
               "stored to twice");
}

}  // namespace
}  // namespace kvm::attention::gpu
