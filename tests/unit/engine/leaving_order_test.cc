// SPDX-License-Identifier: Apache-2.0
// Which sequences leave first: what was used stays, and what was not does not push it out.
#include "engine/store/leaving_order.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
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

// Sequences go whenever they like, and an order before those that are in it.
TEST(LeavingOrder, SequencesGoFromAnyQueue) {
  std::vector<std::unique_ptr<Residence>> left;
  {
    Order order(LeavingRule::kS3Fifo);
    for (size_t i = 0; i < 12; ++i) {
      order.enter(i, 100);
      order.use(i, static_cast<int>(i % 3));
      order.order.pin(order.of[i].get());
      order.order.unpin(order.of[i].get());
    }
    order.order.pin(order.of[5].get());
    EXPECT_EQ(order.order.n_pinned(), 1u);
    order.leave_next();
    order.order.set_aside(order.of[order.next()].get());
    EXPECT_EQ(order.order.size(), 11u);
    for (size_t i = 0; i < 12; i += 2) {
      order.of[i].reset();
    }
    order.of[5].reset();
    EXPECT_EQ(order.order.n_pinned(), 0u);
    left = std::move(order.of);
  }
  left.clear();
}

}  // namespace
}  // namespace kvm::engine
