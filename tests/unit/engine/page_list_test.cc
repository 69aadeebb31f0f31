// SPDX-License-Identifier: Apache-2.0
#include "engine/store/page_list.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace kvm::engine {
namespace {

using tiers::kNoPage;
using tiers::PageRef;

constexpr tiers::SlabClass kSmall = {.dim_k = 8, .dim_v = 8, .n_heads = 1};

class PageListTest : public testing::Test {
 protected:
  PageListTest() { payers_.add(&account_); }

  PageBank bank() { return PageBank(&pages_, &payers_, &account_); }

  void append(PageList* list, uint64_t n_tokens) {
    ASSERT_TRUE(list->reserve(n_tokens, kSmall, bank()).is_ok());
    list->copy_tail(pages_);
    list->publish(bank());
  }

  static std::vector<PageRef> pages(const PageList& list) {
    std::vector<PageRef> all;
    list.for_each([&](const PageEntry& entry, bool) { all.push_back(entry.page); });
    return all;
  }

  static std::vector<PageEntry> entries(const PageList& list) {
    std::vector<PageEntry> all;
    list.for_each([&](const PageEntry& entry, bool) { all.push_back(entry); });
    return all;
  }

  tiers::MemoryBudget budget_{uint64_t{64} << 20};
  tiers::HostPool pool_{&budget_, 0};
  tiers::PageTable pages_{&pool_};
  uint64_t bytes() const { return quota_.used(Resource::kBytes); }

  std::vector<PageList> others_;
  QuotaAccount quota_{"this client", no_limits(), nullptr};
  Account account_{.quota = &quota_};
  Payers payers_;
};

// Every count that a fork could have touched, by object.
std::map<const void*, uint32_t> counts_of(const PageList& list, const tiers::PageTable& table) {
  std::map<const void*, uint32_t> counts;
  counts[list.root()] = list.root()->n_refs;
  for (const Segment* segment : list.root()->segments) {
    counts[segment] = segment->n_refs;
  }
  list.for_each([&](const PageEntry& entry, bool) {
    counts[table.data(entry.page)] = table.n_refs(entry.page);
  });
  return counts;
}

TEST_F(PageListTest, ForkOfTheWholeTouchesTwoCounts) {
  for (const uint64_t n_pages : {1u, 128u, 1536u}) {
    PageList list;
    append(&list, n_pages * kPageTokens + 5);
    const uint64_t n_segments = list.root()->segments.size();
    EXPECT_EQ(n_segments, (n_pages + kSegmentEntries - 1) / kSegmentEntries);
    const auto before = counts_of(list, pages_);
    const uint64_t bytes_before = bytes();
    PageList child;
    child.share(list, list.length(), bank());
    auto after = counts_of(list, pages_);
    EXPECT_EQ(after[list.root()], before.at(list.root()) + 1);
    EXPECT_EQ(after[pages_.data(list.tail().page)], before.at(pages_.data(list.tail().page)) + 1);
    after[list.root()] -= 1;
    after[pages_.data(list.tail().page)] -= 1;
    EXPECT_EQ(after, before) << "a fork of " << n_pages << " pages touched more";
    EXPECT_EQ(child.root(), list.root());
    EXPECT_EQ(bytes(), bytes_before);
    child.clear(bank());
    EXPECT_EQ(counts_of(list, pages_), before);
    list.clear(bank());
    EXPECT_EQ(bytes(), 0u);
  }
}

TEST_F(PageListTest, ForkOfAPartCopiesOneSegment) {
  PageList list;
  append(&list, 300 * kPageTokens);
  ASSERT_EQ(list.root()->segments.size(), 3u);
  PageList child;
  child.share(list, 200 * kPageTokens + 7, bank());
  ASSERT_EQ(child.root()->segments.size(), 2u);
  EXPECT_EQ(child.root()->segments[0], list.root()->segments[0]);
  EXPECT_NE(child.root()->segments[1], list.root()->segments[1]);
  EXPECT_EQ(child.root()->segments[1]->entries.size(), 200u - 128);
  EXPECT_EQ(child.tail().block, 200u);
  EXPECT_EQ(child.tail().count, 7u);
  EXPECT_EQ(child.tail().page, entries(list)[200].page);
  EXPECT_EQ(bytes(), 300 * kSmall.page_bytes());
  list.clear(bank());
  EXPECT_EQ(pages_.n_pages(), 201u);
  child.clear(bank());
  EXPECT_EQ(pages_.n_pages(), 0u);
}

TEST_F(PageListTest, SharedTailIsReplacedAndOwnTailIsNot) {
  PageList list;
  append(&list, 10);
  const PageRef first = list.tail().page;
  append(&list, 3);
  EXPECT_EQ(list.tail().page, first);
  PageList child;
  child.share(list, 13, bank());
  EXPECT_EQ(child.pages_to_reserve(1, kSmall, pages_), 1u);
  append(&child, 1);
  EXPECT_NE(child.tail().page, first);
  EXPECT_EQ(child.tail().count, 14u);
  // The parent is alone again.
  EXPECT_EQ(list.pages_to_reserve(1, kSmall, pages_), 0u);
  append(&list, 1);
  EXPECT_EQ(list.tail().page, first);
  list.clear(bank());
  child.clear(bank());
}

TEST_F(PageListTest, RollbackLeavesTheListAsItWas) {
  PageList list;
  append(&list, 100);
  const auto before = counts_of(list, pages_);
  PageList child;
  child.share(list, 100, bank());
  const std::vector<PageRef> held = pages(child);
  const uint64_t bytes_before = bytes();
  ASSERT_TRUE(child.reserve(500, kSmall, bank()).is_ok());
  EXPECT_EQ(child.reserved_length(), 600u);
  child.rollback(bank());
  EXPECT_EQ(child.reserved_length(), 100u);
  EXPECT_EQ(pages(child), held);
  EXPECT_EQ(bytes(), bytes_before);
  // What reserving copied of the books goes with the fork.
  child.clear(bank());
  EXPECT_EQ(counts_of(list, pages_), before);
  list.clear(bank());
  EXPECT_EQ(pages_.n_pages(), 0u);
}

TEST_F(PageListTest, DropTakesWholeSegmentsAndParts) {
  PageList list;
  append(&list, 400 * kPageTokens);
  PageList child;
  child.share(list, list.length(), bank());
  EXPECT_EQ(list.drop(2, 390, bank()), 388u);
  EXPECT_EQ(list.n_dropped(), 388 * kPageTokens);
  EXPECT_EQ(entries(list).size(), 12u);
  EXPECT_EQ(pages_.n_pages(), 400u);  // the child has them
  EXPECT_TRUE(list.covers(0, 2 * kPageTokens));
  EXPECT_TRUE(list.covers(390 * kPageTokens, 400 * kPageTokens));
  EXPECT_FALSE(list.covers(2 * kPageTokens - 1, 2 * kPageTokens + 1));
  EXPECT_FALSE(list.covers(390 * kPageTokens - 1, 400 * kPageTokens));
  EXPECT_TRUE(child.covers(0, child.length()));
  child.clear(bank());
  EXPECT_EQ(pages_.n_pages(), 12u);
  // Cut in the middle of a dropped page: the next tokens begin a page in its middle.
  list.truncate(200 * kPageTokens + 9, bank());
  EXPECT_EQ(list.n_dropped(), 198 * kPageTokens + 9);
  EXPECT_EQ(list.tail().page, kNoPage);
  append(&list, 60);
  const std::vector<PageEntry> all = entries(list);
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[2].first, 9u);
  EXPECT_EQ(all[2].count, kPageTokens - 9);
  EXPECT_EQ(all[3].count, 60 - (kPageTokens - 9));
  EXPECT_TRUE(list.covers(200 * kPageTokens + 9, list.length()));
  EXPECT_FALSE(list.covers(200 * kPageTokens + 8, list.length()));
  // Cut where that page begins: nothing of it is left.
  list.truncate(200 * kPageTokens + 9, bank());
  EXPECT_EQ(list.tail().page, kNoPage);
  EXPECT_EQ(pages_.n_pages(), 2u);
  list.clear(bank());
  EXPECT_EQ(bytes(), 0u);
}

// In parts, from the end: what remains after each is a list like another, and a fork keeps its own.
TEST_F(PageListTest, DroppedBlocksComeBackBetweenTheOthers) {
  PageList list;
  append(&list, 600 * kPageTokens + 9);
  const std::vector<PageRef> whole = pages(list);
  PageList fork;
  fork.share(list, list.length(), bank());
  // Parts of two segments, a whole one, and a page alone.
  list.drop(100, 300, bank());
  list.drop(400, 401, bank());
  EXPECT_EQ(list.n_dropped(), 201 * kPageTokens);
  EXPECT_EQ(list.pages_to_restore(0, 600), 201u);
  EXPECT_EQ(list.pages_to_restore(90, 110), 10u);
  EXPECT_EQ(list.pages_to_restore(0, 100), 0u);
  std::vector<std::pair<uint64_t, uint64_t>> gaps;
  list.for_each_gap([&](uint64_t begin, uint64_t end) { gaps.push_back({begin, end}); });
  EXPECT_EQ(gaps,
            (std::vector<std::pair<uint64_t, uint64_t>>{{100 * kPageTokens, 300 * kPageTokens},
                                                        {400 * kPageTokens, 401 * kPageTokens}}));
  const std::vector<PageEntry> before = entries(list);
  const uint64_t bytes_before = bytes();

  // Given up again, nothing has changed.
  ASSERT_TRUE(list.reserve_dropped(50, 350, kSmall, bank()).is_ok());
  EXPECT_EQ(list.restored().size(), 200u);
  EXPECT_EQ(bytes(), bytes_before + 200 * kSmall.page_bytes());
  EXPECT_EQ(pages(list).size(), before.size());
  list.rollback(bank());
  EXPECT_EQ(bytes(), bytes_before);
  EXPECT_EQ(pages(list).size(), before.size());

  ASSERT_TRUE(list.reserve_dropped(150, 250, kSmall, bank()).is_ok());
  list.publish(bank());
  ASSERT_TRUE(list.reserve_dropped(0, 600, kSmall, bank()).is_ok());
  EXPECT_EQ(list.restored().size(), 101u);
  list.publish(bank());
  EXPECT_TRUE(list.is_valid());
  EXPECT_EQ(list.n_dropped(), 0u);
  EXPECT_EQ(list.dropped_end(), 0u);
  EXPECT_TRUE(list.covers(0, list.length()));
  const std::vector<PageEntry> after = entries(list);
  ASSERT_EQ(after.size(), whole.size());
  for (size_t i = 0; i < after.size(); ++i) {
    EXPECT_EQ(after[i].block, i);
    const bool is_new = (i >= 100 && i < 300) || i == 400;
    EXPECT_EQ(after[i].page != whole[i], is_new) << i;
  }
  EXPECT_EQ(pages(fork), whole);
  EXPECT_EQ(bytes(), (601 + 201) * kSmall.page_bytes());

  // One by one they do not leave segments of one page each.
  list.drop(0, 512, bank());
  for (uint32_t block = 0; block < 512; ++block) {
    ASSERT_TRUE(list.reserve_dropped(block, block + 1, kSmall, bank()).is_ok());
    list.publish(bank());
  }
  EXPECT_EQ(list.n_dropped(), 0u);
  EXPECT_LE(list.root()->segments.size(), 10u);

  // Where memory ends, nothing has changed.
  list.drop(10, 20, bank());
  ASSERT_TRUE(budget_.charge(budget_.free_bytes()));
  const std::vector<PageRef> some = pages(list);
  Status full;
  for (uint32_t n = 0; n < 10'000 && full.is_ok(); ++n) {
    full = list.reserve_dropped(10, 20, kSmall, bank());
    list.rollback(bank());
    PageList other;
    full = full.is_ok() ? other.reserve(kPageTokens, kSmall, bank()) : full;
    other.publish(bank());
    others_.push_back(std::move(other));
  }
  EXPECT_EQ(full.code(), KVM_ERR_NO_SPACE);
  EXPECT_EQ(pages(list), some);
  for (PageList& other : others_) {
    other.clear(bank());
  }
  fork.clear(bank());
  list.clear(bank());
  EXPECT_EQ(pages_.n_pages(), 0u);
}

TEST_F(PageListTest, GivesItselfUpInParts) {
  PageList list;
  append(&list, 500 * kPageTokens);
  PageList child;
  child.share(list, 200 * kPageTokens, bank());
  append(&list, 100 * kPageTokens + 7);
  list.drop(300, 450, bank());
  const std::vector<PageEntry> kept = entries(child);
  uint64_t n_given = 0;
  uint32_t n_parts = 0;
  for (; list.length() != 0; ++n_parts) {
    const std::vector<PageEntry> before = entries(list);
    const uint64_t n = list.give_up(50, bank());
    n_given += n;
    const std::vector<PageEntry> after = entries(list);
    EXPECT_LT(n, 50 + kSegmentEntries);
    ASSERT_LE(after.size() + n, before.size());
    uint64_t n_stored = 0;
    for (size_t i = 0; i < after.size(); ++i) {
      EXPECT_EQ(after[i].page, before[i].page);
      n_stored += after[i].count;
    }
    EXPECT_EQ(list.length() - list.n_dropped(), n_stored);
    EXPECT_EQ(list.length(), after.empty() ? 0 : after.back().end());
  }
  EXPECT_EQ(n_given, 600u + 1 - 150 - (kSegmentEntries - 1)) << "the first segment is shared";
  EXPECT_GE(n_parts, 3u);
  EXPECT_EQ(pages_.n_pages(), 200u);
  EXPECT_EQ(entries(child).size(), kept.size());
  // One that others share goes at once.
  PageList other;
  other.share(child, child.length(), bank());
  ASSERT_TRUE(other.reserve(9, kSmall, bank()).is_ok());
  EXPECT_EQ(other.give_up(50, bank()), 1u);
  EXPECT_EQ(other.length(), 0u);
  EXPECT_EQ(pages_.n_pages(), 200u);
  child.clear(bank());
  EXPECT_EQ(bytes(), 0u);
}

// Cut in parts, a list ends as one that is cut at once, and what is left in between is a list too.
TEST_F(PageListTest, IsCutInParts) {
  constexpr uint64_t kPage = kPageTokens;
  for (const uint64_t n :
       {uint64_t{0}, 10 * kPage + 9, 250 * kPage, 700 * kPage, 800 * kPage + 7, 800 * kPage + 8}) {
    PageList list;
    append(&list, 500 * kPageTokens);
    PageList parent;
    parent.share(list, list.length(), bank());
    append(&list, 300 * kPageTokens + 8);
    list.drop(300, 450, bank());
    PageList expected;
    expected.share(list, n, bank());
    const uint64_t n_parent = entries(parent).size();
    list.prepare_truncate(n, bank());
    uint32_t n_parts = 0;
    while (list.shorten(n, 50, bank()) != 0) {
      ++n_parts;
      const std::vector<PageEntry> left = entries(list);
      ASSERT_EQ(list.length(), left.back().end());
      ASSERT_GT(list.length(), n);
      uint64_t n_stored = 0;
      for (const PageEntry& entry : left) {
        n_stored += entry.count;
      }
      ASSERT_EQ(list.length() - list.n_dropped(), n_stored);
    }
    list.truncate(n, bank());
    EXPECT_EQ(list.length(), n);
    EXPECT_EQ(list.n_dropped(), expected.n_dropped()) << n;
    const std::vector<PageEntry> left = entries(list);
    const std::vector<PageEntry> wanted = entries(expected);
    ASSERT_EQ(left.size(), wanted.size()) << n;
    for (size_t i = 0; i < left.size(); ++i) {
      EXPECT_EQ(left[i].page, wanted[i].page);
      EXPECT_EQ(left[i].count, wanted[i].count);
    }
    EXPECT_EQ(entries(parent).size(), n_parent);
    EXPECT_EQ(n_parts > 2, n < 300 * kPageTokens) << n << ": " << n_parts;
    for (PageList* one : {&list, &parent, &expected}) {
      one->clear(bank());
    }
    EXPECT_EQ(bytes(), 0u);
  }
}

}  // namespace
}  // namespace kvm::engine
