// SPDX-License-Identifier: Apache-2.0
// Which sequences leave first: what was used stays, and what was not does not push it out.
#include "engine/store/leaving_order.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace kvm::engine {
namespace {

constexpr uint64_t kCapacity = 1000;

class Order {
 public:
  explicit Order(LeavingRule rule) : order(rule, kCapacity) {}

  // Sequence `i`, of so many bytes.
  void enter(size_t i, uint64_t size_bytes = 10) {
    if (of.size() <= i) {
      of.resize(i + 1);
    }
    if (of[i] == nullptr) {
      of[i] = std::make_unique<Residence>();
    }
    order.enter(of[i].get(), i);
    order.grow(of[i].get(), size_bytes);
  }
  void use(size_t i, int n = 1) {
    for (; n > 0; --n) {
      order.use(of[i].get());
    }
  }
  // The next to leave in this pass; SIZE_MAX: nobody is left.
  size_t next() {
    while (!order.is_exhausted()) {
      if (const Residence* residence = order.next(); residence != nullptr) {
        return residence->seq();
      }
    }
    return SIZE_MAX;
  }
  size_t leave_next() {
    const size_t i = next();
    order.leave(of[i].get());
    return i;
  }

  LeavingOrder order;
  std::vector<std::unique_ptr<Residence>> of;
};

TEST(LeavingOrder, WhatIsUsedOnceLeavesBeforeWhatIsUsedAgain) {
  Order order(LeavingRule::kS3Fifo);
  order.enter(0, 60);
  order.enter(1, 60);
  order.enter(2, 60);
  order.use(0, 2);
  order.use(1, 1);
  EXPECT_EQ(order.leave_next(), 1u);
  order.enter(3, 500);  // a scan, which is the last that entered
  order.enter(2, 60);
  EXPECT_EQ(order.leave_next(), 2u);
  EXPECT_EQ(order.leave_next(), 3u);
  EXPECT_EQ(order.leave_next(), 0u);
  EXPECT_EQ(order.next(), SIZE_MAX);
}

TEST(LeavingOrder, WhoLeftTheSmallQueueEntersTheMainOne) {
  Order order(LeavingRule::kS3Fifo);
  order.enter(0, 200);
  EXPECT_EQ(order.leave_next(), 0u);
  order.enter(0, 200);
  order.enter(1, 200);
  EXPECT_EQ(order.leave_next(), 1u) << "0 is known, and 1 is not";
}

TEST(LeavingOrder, GhostsAreFew) {
  Order order(LeavingRule::kS3Fifo);
  const size_t n = LeavingOrder::kLeastGhosts + 1;
  for (size_t i = 0; i < n; ++i) {
    order.enter(i, 200);
    EXPECT_EQ(order.leave_next(), i);
  }
  order.enter(n - 1, 200);  // still known
  order.enter(0, 200);      // forgotten
  EXPECT_EQ(order.leave_next(), 0u);
}

TEST(LeavingOrder, AMainOneHasATurnForEachUse) {
  Order order(LeavingRule::kS3Fifo);
  for (size_t i = 0; i < 3; ++i) {
    order.enter(i, 200);
    order.use(i, 2);
  }
  EXPECT_EQ(order.next(), 0u) << "all have passed to the main queue, without uses there";
  order.use(0, 9);
  order.use(1, 1);
  EXPECT_EQ(order.leave_next(), 2u);
  EXPECT_EQ(order.leave_next(), 1u);
  EXPECT_EQ(order.leave_next(), 0u);
}

TEST(LeavingOrder, LruGoesByTheLastUse) {
  Order order(LeavingRule::kLru);
  for (size_t i = 0; i < 4; ++i) {
    order.enter(i, 400);
  }
  order.use(0);
  order.use(2);
  for (const size_t i : {1u, 3u, 0u, 2u}) {
    EXPECT_EQ(order.leave_next(), i);
  }
}

TEST(LeavingOrder, WhoIsSetAsideHasItsPlaceInTheNextPass) {
  for (const LeavingRule rule : {LeavingRule::kS3Fifo, LeavingRule::kLru}) {
    Order order(rule);
    for (size_t i = 0; i < 4; ++i) {
      order.enter(i, 200);
    }
    for (const size_t i : {0u, 1u}) {
      EXPECT_EQ(order.next(), i);
      order.order.set_aside(order.of[i].get());
    }
    EXPECT_EQ(order.leave_next(), 2u);
    EXPECT_EQ(order.leave_next(), 3u);
    EXPECT_EQ(order.next(), SIZE_MAX);
    order.order.begin_pass();
    EXPECT_EQ(order.leave_next(), 0u);
    EXPECT_EQ(order.leave_next(), 1u);
  }
}

Priorities of_priority(uint32_t priority) {
  Priorities priorities;
  EXPECT_TRUE(priorities.set({.priority = priority, .end = 64}, 0).is_ok());
  return priorities;
}

// Those of sequences that are in it, and the default.
TEST(LeavingOrder, PrioritiesThatThereAre) {
  Order order(LeavingRule::kS3Fifo);
  const auto all = [&] {
    std::vector<uint32_t> found = {order.order.lowest_priority()};
    while (const std::optional<uint32_t> next = order.order.next_priority(found.back())) {
      found.push_back(*next);
    }
    return found;
  };
  EXPECT_EQ(all(), std::vector<uint32_t>{50});
  for (size_t i = 0; i < 4; ++i) {
    order.enter(i, 100);
  }
  for (const auto& [at, priority] : {std::pair{0u, 100u}, {1u, 0u}, {2u, 0u}, {3u, 70u}}) {
    order.order.set_priorities(order.of[at].get(), of_priority(priority));
  }
  EXPECT_EQ(all(), (std::vector<uint32_t>{0, 50, 70, 100}));
  order.of[1].reset();
  EXPECT_EQ(all(), (std::vector<uint32_t>{0, 50, 70, 100}));
  order.order.set_priorities(order.of[2].get(), {});
  EXPECT_EQ(all(), (std::vector<uint32_t>{50, 70, 100}));
  // Who has left is remembered, and has its priority when it is back.
  EXPECT_EQ(order.leave_next(), 0u);
  EXPECT_EQ(all(), (std::vector<uint32_t>{50, 70}));
  order.order.set_priorities(order.of[0].get(), of_priority(20));
  EXPECT_EQ(all(), (std::vector<uint32_t>{50, 70}));
  order.enter(0, 100);
  EXPECT_EQ(all(), (std::vector<uint32_t>{20, 50, 70}));
}

// A pass of another priority goes through those that have it, the one that was used last comes
// last, and nobody's turns are counted.
TEST(LeavingOrder, PassesOfOtherPrioritiesAreNoTurns) {
  Order order(LeavingRule::kS3Fifo);
  for (size_t i = 0; i < 6; ++i) {
    order.enter(i, 100);
  }
  for (const size_t i : {1u, 3u, 4u}) {
    order.order.set_priorities(order.of[i].get(), of_priority(i == 4 ? 80 : 10));
  }
  order.use(1);
  for (int pass = 0; pass < 5; ++pass) {
    order.order.begin_pass(10);
    std::vector<size_t> met;
    while (!order.order.is_exhausted()) {
      const size_t next = order.next();
      if (next != SIZE_MAX) {
        met.push_back(next);
        order.order.set_aside(order.of[next].get());
      }
    }
    EXPECT_EQ(met, (std::vector<size_t>{3, 1}));
  }
  order.order.expire_priorities(order.of[3].get(), UINT64_MAX);
  EXPECT_EQ(order.order.lowest_priority(), 10u);
  order.order.begin_pass();
  for (const size_t i : {0u, 1u, 2u, 3u, 4u, 5u}) {
    EXPECT_EQ(order.leave_next(), i);
  }
  EXPECT_EQ(order.order.lowest_priority(), 50u);
}

// Sequences go whenever they like, and an order before those that are in it.
TEST(LeavingOrder, SequencesGoFromAnyQueue) {
  std::vector<std::unique_ptr<Residence>> left;
  {
    Order order(LeavingRule::kS3Fifo);
    for (size_t i = 0; i < 12; ++i) {
      order.enter(i, 100);
      order.use(i, static_cast<int>(i % 3));
    }
    order.leave_next();
    order.order.set_aside(order.of[order.next()].get());
    EXPECT_EQ(order.order.size(), 11u);
    for (size_t i = 0; i < 12; i += 2) {
      order.of[i].reset();
    }
    order.of[5].reset();
    left = std::move(order.of);
  }
  left.clear();
}

}  // namespace
}  // namespace kvm::engine
