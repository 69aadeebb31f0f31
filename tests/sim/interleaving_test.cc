// SPDX-License-Identifier: Apache-2.0
// The checker itself: what two sides may see on x86 is found, and nothing that they may not see.
#include "tests/sim/interleaving.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <vector>

namespace kvm::sim {
namespace {

struct Words {
  uint32_t x = 0;
  uint32_t y = 0;
  uint32_t z = 0;
  std::vector<uint32_t> seen = std::vector<uint32_t>(3);
};

using Part = std::function<void(Words&)>;
using Seen = std::set<std::vector<uint32_t>>;

class Litmus : public Program {
 public:
  Litmus(std::vector<Part> parts, Seen* all) : parts_(std::move(parts)), all_(all) {}
  void run(uint32_t side) override { parts_[side](words_); }
  std::string judge() override {
    all_->insert(words_.seen);
    return "";
  }

 private:
  std::vector<Part> parts_;
  Words words_;
  Seen* all_;
};

// Whatever both sides together see in some schedule.
Seen all_seen(const Part& first, const Part& second, uint32_t n_preemptions) {
  Seen all;
  const Outcome outcome = explore(
      [&] {
        return std::make_unique<Litmus>(std::vector<Part>{first, second}, &all);
      },
      {.n_preemptions = n_preemptions});
  EXPECT_EQ(outcome.failure, "");
  EXPECT_TRUE(outcome.is_complete);
  return all;
}

void set(uint32_t* word, Order order) {
  const uint32_t one = 1;
  store(word, &one, sizeof(one), order);
}

Seen store_buffering(Order order) {
  const auto side = [order](uint32_t Words::*own, uint32_t Words::*others, size_t at) {
    return [=](Words& w) {
      set(&(w.*own), order);
      w.seen[at] = load(&(w.*others));
    };
  };
  return all_seen(side(&Words::x, &Words::y, 0), side(&Words::y, &Words::x, 1), 3);
}

TEST(Interleaving, ALoadOvertakesAStoreUnlessItIsInFullOrder) {
  EXPECT_EQ(store_buffering(Order::kRelease), (Seen{{0, 0, 0}, {0, 1, 0}, {1, 0, 0}, {1, 1, 0}}));
  EXPECT_EQ(store_buffering(Order::kSeqCst), (Seen{{0, 1, 0}, {1, 0, 0}, {1, 1, 0}}));
}

TEST(Interleaving, StoresLandInTheirOrder) {
  const auto writes = [](Words& w) {
    set(&w.x, Order::kRelease);
    set(&w.y, Order::kRelease);
  };
  const auto reads = [](Words& w) {
    w.seen[0] = load(&w.y);
    w.seen[1] = load(&w.x);
  };
  EXPECT_EQ(all_seen(writes, reads, 3), (Seen{{0, 0, 0}, {0, 1, 0}, {1, 1, 0}}));
}

// Both stores of the first side wait beyond its load, and land between two loads of the second.
TEST(Interleaving, SeveralStoresLandBetweenTwoLoads) {
  const auto writes = [](Words& w) {
    set(&w.x, Order::kRelease);
    set(&w.y, Order::kRelease);
    w.seen[0] = load(&w.z);
  };
  const auto reads = [](Words& w) {
    set(&w.z, Order::kSeqCst);
    w.seen[1] = load(&w.x);
    w.seen[2] = load(&w.y);
  };
  EXPECT_TRUE(all_seen(writes, reads, 3).contains({0, 0, 1}));
}

// The second side spins already when the first looks, and has answered before that goes on.
TEST(Interleaving, WhoSpinsSeesAStoreWhileTheOtherSideGoesOn) {
  const auto asks = [](Words& w) {
    w.seen[0] = load(&w.y);
    set(&w.x, Order::kRelease);
    w.seen[1] = load(&w.z);
  };
  const auto answers = [](Words& w) {
    set(&w.y, Order::kSeqCst);
    while (load(&w.x) == 0) {
      relax();
    }
    set(&w.z, Order::kSeqCst);
  };
  EXPECT_TRUE(all_seen(asks, answers, 2).contains({1, 1, 0}));
}

}  // namespace
}  // namespace kvm::sim
