// SPDX-License-Identifier: Apache-2.0
#include "policies/sinks_recent.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <set>
#include <vector>

namespace kvm::policies {
namespace {

// A list that applies drops to a set of pages, as the store would.
class FakeList {
 public:
  FakeList(uint64_t n_sinks, uint64_t n_recent, uint64_t slack) {
    view_.n_sinks = n_sinks;
    view_.n_recent = n_recent;
    view_.slack = slack;
  }

  void grow(uint64_t length) {
    for (uint64_t page = (view_.length + kPageTokens - 1) / kPageTokens;
         page * kPageTokens < length; ++page) {
      pages_.insert(page);
    }
    view_.length = length;
  }

  ListView view() {
    ranges_.clear();
    for (const uint64_t page : pages_) {
      const PositionRange range = {page * kPageTokens,
                                   std::min((page + 1) * kPageTokens, view_.length)};
      if (!ranges_.empty() && ranges_.back().positions.end == range.begin) {
        ranges_.back().positions.end = range.end;
      } else {
        ranges_.push_back({.positions = range});
      }
    }
    view_.stored = ranges_;
    return view_;
  }

  void drop(PositionRange range) {
    ASSERT_EQ(range.begin % kPageTokens, 0u);
    ASSERT_EQ(range.end % kPageTokens, 0u);
    for (uint64_t page = range.begin / kPageTokens; page < range.end / kPageTokens; ++page) {
      ASSERT_EQ(pages_.erase(page), 1u) << "dropped twice";
    }
  }

  const std::set<uint64_t>& pages() const { return pages_; }

 private:
  ListView view_;
  std::set<uint64_t> pages_;
  std::vector<StoredRange> ranges_;
};

TEST(Full, DecidesNothing) {
  ListView list;
  list.length = 1000;
  ActionList actions;
  full().decide({.n_committed = 1000, .lists = {&list, 1}}, &actions);
  EXPECT_EQ(actions.n_actions, 0u);
  EXPECT_EQ(full().events(), 0u);
}

// At every commit point: exactly the pages that no later query sees are gone, and asking again
// before next_commit would change nothing.
TEST(SinksRecent, DropsExactlyWhatNobodyWillSee) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 60; ++trial) {
    const uint64_t n_sinks = random() % 3 * (random() % 150);
    const uint64_t n_recent = 1 + random() % 300;
    const uint64_t slack = random() % 2 * (random() % 100);
    FakeList list(n_sinks, n_recent, slack);
    uint64_t n_committed = 0;
    uint64_t next_commit = 0;
    for (int step = 0; step < 40; ++step) {
      n_committed += random() % (step % 7 == 0 ? 900 : 40);
      list.grow(n_committed + random() % 5);
      if (n_committed >= next_commit) {
        ActionList actions;
        const ListView view = list.view();
        sinks_recent().decide({.n_committed = n_committed, .lists = {&view, 1}}, &actions);
        for (uint32_t i = 0; i < actions.n_actions; ++i) {
          ASSERT_EQ(actions.actions[i].kind, ActionKind::kDrop);
          list.drop(actions.actions[i].range);
        }
        ASSERT_GT(actions.next_commit, n_committed);
        next_commit = actions.next_commit;
      }
      for (uint64_t page = 0; page * kPageTokens < n_committed; ++page) {
        bool needed = false;
        for (uint64_t x = page * kPageTokens; x < (page + 1) * kPageTokens; ++x) {
          needed = needed || x < n_sinks || x + n_recent + slack >= n_committed;
        }
        ASSERT_EQ(list.pages().count(page) == 1, needed)
            << "page " << page << " of " << n_committed << " sinks " << n_sinks << " recent "
            << n_recent << " slack " << slack;
      }
    }
  }
}

TEST(SinksRecent, PagesThatBeginInTheirMiddleGoWhole) {
  ListView list;
  list.length = 1000;
  list.n_recent = 10;
  const StoredRange stored = {.positions = {150, 1000}};
  list.stored = {&stored, 1};
  ActionList actions;
  sinks_recent().decide({.n_committed = 400, .lists = {&list, 1}}, &actions);
  ASSERT_EQ(actions.n_actions, 1u);
  EXPECT_EQ(actions.actions[0].range.begin, 128u);
  EXPECT_EQ(actions.actions[0].range.end, 384u);
}

TEST(SinksRecent, MoreListsThanActionsAreAskedForAgain) {
  std::vector<FakeList> lists(3 * kMaxActions, FakeList(4, 64, 0));
  for (FakeList& list : lists) {
    list.grow(1000);
  }
  int n_rounds = 0;
  ActionList actions;
  do {
    std::vector<ListView> views;
    for (size_t i = 0; i < lists.size(); ++i) {
      views.push_back(lists[i].view());
      views.back().layer = static_cast<uint32_t>(i);
    }
    actions = {};
    sinks_recent().decide({.n_committed = 1000, .lists = views}, &actions);
    for (uint32_t i = 0; i < actions.n_actions; ++i) {
      lists[actions.actions[i].layer].drop(actions.actions[i].range);
    }
  } while (actions.more && ++n_rounds < 10);
  for (const FakeList& list : lists) {
    EXPECT_EQ(list.pages().count(0), 1u);
    EXPECT_EQ(list.pages().count(1), 0u);
    EXPECT_EQ(list.pages().count(13), 0u);
    EXPECT_EQ(list.pages().count(14), 1u);  // 959 + 64 >= 1000
  }
}

}  // namespace
}  // namespace kvm::policies
