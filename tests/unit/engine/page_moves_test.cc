// SPDX-License-Identifier: Apache-2.0
#include "engine/run/page_moves.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/unit/engine/store_testbed.h"

namespace kvm::engine {
namespace {

using tiers::PageRef;

constexpr tiers::SlabClass kPage = {.dim_k = 64, .dim_v = 64, .n_heads = 16};  // 256 KiB
constexpr size_t kInExtent = 8;

class PageMovesTest : public testing::Test {
 protected:
  PageMovesTest() : store_(open_store(64 * kMiB)) {
    account_ = store_->memory().find(store_->add_client(limited(0)));
  }
  ~PageMovesTest() override {
    for (const PageRef page : pages_) {
      release(page);
    }
    memory().pages().check_accounts();
  }

  StoreMemory& memory() { return store_->memory(); }

  // Pages that fill extents one after the other, each with its own number in it.
  void fill(size_t n) {
    for (size_t i = 0; i < n; ++i) {
      pages_.push_back(memory().bank(account_).allocate(kPage).value());
      std::memset(memory().pages().data(pages_.back()), static_cast<int>(i), kPage.page_bytes());
      memory().pages().seal(pages_.back());
    }
  }
  void release(PageRef page) { memory().bank(account_).release(page); }
  // Leaves the first page of each extent alone.
  void thin() {
    std::vector<PageRef> left;
    for (size_t i = 0; i < pages_.size(); ++i) {
      if (i % kInExtent == 0) {
        left.push_back(pages_[i]);
      } else {
        release(pages_[i]);
      }
    }
    pages_ = left;
  }
  void run_all(PageMoves* moves, const JobPlan& plan) {
    for (uint32_t task = 0; task < plan.n_tasks; ++task) {
      moves->run(task, 0);
    }
    moves->end(&memory());
  }
  void expect_content() {
    for (size_t i = 0; i < pages_.size(); ++i) {
      const auto* data = reinterpret_cast<const uint8_t*>(memory().pages().data(pages_[i]));
      EXPECT_EQ(data[0], i * kInExtent) << i;
      EXPECT_EQ(data[kPage.page_bytes() - 1], i * kInExtent) << i;
    }
  }

  std::unique_ptr<Store> store_;
  Account* account_ = nullptr;
  std::vector<PageRef> pages_;
};

TEST_F(PageMovesTest, EmptiesThinExtents) {
  fill(16 * kInExtent);
  thin();
  PageMoves moves;
  JobPlan plan;
  uint64_t n_batches = 0;
  for (; moves.begin(&memory(), &plan); ++n_batches) {
    EXPECT_TRUE(moves.has_begun());
    EXPECT_LE(moves.size_bytes(), 6 * kMiB);
    run_all(&moves, plan);
    expect_content();
    memory().pages().check_accounts();
  }
  EXPECT_GT(n_batches, 0u);
  while (memory().housekeep()) {
  }
  EXPECT_LE(memory().extent_bytes(), (4 + 8) * tiers::kExtentBytes);  // an eighth may be cached
  EXPECT_EQ(memory().pages().n_pages(), 16u);
}

// An extent all of whose pages are being written stays as it is, and in nobody's way; while a batch
// is in flight it is emptied, and filled by others.
TEST_F(PageMovesTest, ExtentsWithoutMovesGoTheirOwnWay) {
  fill(8 * kInExtent);
  thin();
  for (size_t i = 0; i < 4; ++i) {
    ASSERT_TRUE(memory().pages().unseal(pages_[i]));
  }
  PageMoves moves;
  JobPlan plan;
  ASSERT_TRUE(moves.begin(&memory(), &plan)) << "what is written stops nothing else";
  for (size_t i = 0; i < 4; ++i) {
    release(pages_[i]);
  }
  std::vector<PageRef> others;
  for (size_t i = 0; i < 12 * kInExtent; ++i) {
    others.push_back(memory().bank(account_).allocate(kPage).value());
  }
  pages_.erase(pages_.begin(), pages_.begin() + 4);
  run_all(&moves, plan);
  memory().pages().check_accounts();
  for (size_t i = 0; i < pages_.size(); ++i) {
    EXPECT_EQ(*reinterpret_cast<const uint8_t*>(memory().pages().data(pages_[i])),
              (i + 4) * kInExtent);
  }
  for (const PageRef page : others) {
    release(page);
  }
}

// Where room runs out, frames of closed extents are given out again before anything is refused.
TEST_F(PageMovesTest, ReadersCostNoRoomForLong) {
  fill(32 * kInExtent);
  thin();
  const uint64_t reader = memory().pages().epochs().begin();
  PageMoves moves;
  JobPlan plan;
  while (moves.begin(&memory(), &plan)) {
    run_all(&moves, plan);
  }
  // The budget is 32 extents; frames that were left are read, all others are free.
  const uint64_t n_left = memory().pages().left_bytes() / kPage.page_bytes();
  EXPECT_GT(n_left, 0u);
  std::vector<PageRef> others;
  for (size_t i = 0; i < 32 * kInExtent - pages_.size() - n_left; ++i) {
    Result<PageRef> page = memory().bank(account_).allocate(kPage);
    ASSERT_TRUE(page.is_ok()) << i << ": " << page.status().message();
    others.push_back(page.value());
  }
  EXPECT_EQ(memory().bank(account_).allocate(kPage).status().code(), KVM_ERR_NO_SPACE);
  memory().pages().epochs().end(reader);
  for (uint64_t i = 0; i < n_left; ++i) {
    Result<PageRef> page = memory().bank(account_).allocate(kPage);
    ASSERT_TRUE(page.is_ok()) << page.status().message();
    others.push_back(page.value());
  }
  expect_content();
  for (const PageRef page : others) {
    release(page);
  }
}

}  // namespace
}  // namespace kvm::engine
