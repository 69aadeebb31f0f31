// SPDX-License-Identifier: Apache-2.0
#include "tiers/page_table.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "tiers/simulated/simulated_tier.h"

namespace kvm::tiers {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

SlabClass slab_class_of(uint16_t n_heads, uint16_t dim = 64) {
  return {.dim_k = dim, .dim_v = dim, .n_heads = n_heads};
}

PayerId payer_of(uint32_t number) { return static_cast<PayerId>(number); }

// Random allocation, sharing and release against a map; every page holds a number of its own.
TEST(PageTable, NamesStandForPagesUntilTheirLastReferenceGoes) {
  MemoryBudget budget(64 * kMiB);
  HostPool pool(&budget, 4 * kMiB);
  PageTable table(&pool);
  std::mt19937 generator(12);
  const std::vector<SlabClass> classes = {
      slab_class_of(8), slab_class_of(1), slab_class_of(5, 128), {.index_bytes = 64 * 33}};
  struct Held {
    uint32_t n_refs = 1;
    uint8_t mark = 0;
    PayerId payer{};
    SlabClass slab_class;
  };
  std::map<PageRef, Held> held;
  uint64_t bytes = 0;
  for (int step = 0; step < 8000; ++step) {
    const auto dice = static_cast<uint32_t>(generator() % 100);
    // Grows for a while, then shrinks, so that names are used again.
    const bool grow = step / 2000 % 2 == 0;
    if (dice < (grow ? 60u : 20u) || held.empty()) {
      const SlabClass& slab_class = classes[generator() % classes.size()];
      const PayerId payer = payer_of(static_cast<uint32_t>(generator() % 5));
      const Result<PageRef> page = table.allocate(slab_class, payer);
      if (!page.is_ok()) {
        EXPECT_EQ(page.status().code(), KVM_ERR_NO_SPACE);
        EXPECT_LT(budget.free_bytes(), kExtentBytes);
        continue;
      }
      ASSERT_NE(page.value(), kNoPage);
      const auto mark = static_cast<uint8_t>(generator());
      ASSERT_TRUE(held.emplace(page.value(), Held{1, mark, payer, slab_class}).second);
      std::memset(table.data(page.value()), mark, slab_class.page_bytes());
      bytes += slab_class.page_bytes();
    } else {
      auto it = held.begin();
      std::advance(it, generator() % held.size());
      const auto& [page, record] = *it;
      ASSERT_EQ(table.n_refs(page), record.n_refs);
      ASSERT_EQ(table.payer(page), record.payer);
      ASSERT_EQ(table.slab_class(page), record.slab_class);
      ASSERT_EQ(table.page_bytes(page), record.slab_class.page_bytes());
      const auto* data = reinterpret_cast<const uint8_t*>(table.data(page));
      ASSERT_EQ(data[0], record.mark);
      ASSERT_EQ(data[record.slab_class.page_bytes() - 1], record.mark);
      if (dice % 3 == 0) {
        table.add_ref(page);
        ++it->second.n_refs;
      } else if (--it->second.n_refs == 0) {
        bytes -= record.slab_class.page_bytes();
        EXPECT_TRUE(table.release(page));
        held.erase(it);
      } else {
        EXPECT_FALSE(table.release(page));
      }
    }
    ASSERT_EQ(table.n_pages(), held.size());
    ASSERT_EQ(table.page_bytes_in_use(), bytes);
    if (step % 16 == 0) {
      table.check_accounts();
    }
  }
  for (const auto& [page, record] : held) {
    for (uint32_t i = 0; i < record.n_refs; ++i) {
      EXPECT_EQ(table.release(page), i + 1 == record.n_refs);
    }
  }
  table.check_accounts();
  EXPECT_EQ(table.n_pages(), 0u);
  EXPECT_EQ(pool.extent_bytes(), pool.cached_bytes());
}

// A refusal of the pool leaves no name behind.
TEST(PageTable, ARefusalChangesNothing) {
  MemoryBudget budget(kExtentBytes);
  HostPool pool(&budget, 0);
  PageTable table(&pool);
  const SlabClass half = slab_class_of(64, 64);  // 1 MiB
  ASSERT_EQ(half.page_bytes(), kMiB);
  const PageRef first = table.allocate(half, payer_of(1)).value();
  const PageRef second = table.allocate(half, payer_of(2)).value();
  for (int i = 0; i < 3; ++i) {
    const Result<PageRef> more = table.allocate(half, payer_of(1));
    ASSERT_FALSE(more.is_ok());
    EXPECT_EQ(more.status().code(), KVM_ERR_NO_SPACE);
    table.check_accounts();
  }
  EXPECT_TRUE(table.release(first));
  EXPECT_EQ(table.allocate(half, payer_of(3)).value(), first);
  EXPECT_EQ(table.payer(first), payer_of(3));
  EXPECT_EQ(table.payer(second), payer_of(2));
  table.check_accounts();
}

// There are more slab classes in the life of a service than directories.
TEST(PageTable, DirectoriesWithoutPagesMakeWay) {
  MemoryBudget budget(8 * kExtentBytes);
  HostPool pool(&budget, 2 * kExtentBytes);
  PageTable table(&pool);
  const PageRef kept = table.allocate(slab_class_of(128, 8), payer_of(7)).value();
  uint32_t n_classes = 0;
  for (uint32_t index_bytes = 64; n_classes < kMaxSlabs + 50; index_bytes += 64, ++n_classes) {
    const SlabClass slab_class = {.index_bytes = index_bytes};
    const Result<PageRef> page = table.allocate(slab_class, payer_of(0));
    ASSERT_TRUE(page.is_ok()) << page.status().message();
    ASSERT_EQ(table.slab_class(page.value()), slab_class);
    ASSERT_TRUE(table.release(page.value()));
  }
  EXPECT_EQ(table.slab_class(kept), slab_class_of(128, 8));
  EXPECT_EQ(table.payer(kept), payer_of(7));
  table.check_accounts();
}

// Pages move while they are shared, released and read. A reader holds addresses, and finds under
// them what it found at first for as long as the page is referenced, wherever that is now.
TEST(PageTable, PagesMoveWhileTheyAreReadSharedAndReleased) {
  MemoryBudget budget(64 * kMiB);
  HostPool pool(&budget, 0);
  PageTable table(&pool);
  std::mt19937 generator(13);
  const SlabClass slab_class = slab_class_of(8);
  const uint64_t size = slab_class.page_bytes();
  struct Held {
    uint32_t n_refs = 1;
    uint8_t mark = 0;
    bool is_moving = false;
  };
  struct Reader {
    uint64_t epoch;
    std::map<PageRef, const std::byte*> found;
  };
  std::map<PageRef, Held> held;
  std::map<PageRef, uint32_t> n_readers;  // keep a page in `held`
  std::vector<PageTable::Move> moves;
  std::vector<Reader> readers;
  uint64_t n_moved = 0;
  uint64_t n_gone = 0;
  const auto pick = [&] {
    auto it = held.begin();
    std::advance(it, generator() % held.size());
    return it;
  };
  for (int step = 0; step < 20000; ++step) {
    const auto dice = static_cast<uint32_t>(generator() % 100);
    if (dice < 25 || held.empty()) {
      if (const Result<PageRef> page = table.allocate(slab_class, payer_of(0)); page.is_ok()) {
        const auto mark = static_cast<uint8_t>(generator());
        std::memset(table.data(page.value()), mark, size);
        table.seal(page.value());
        ASSERT_TRUE(held.emplace(page.value(), Held{1, mark, false}).second);
      }
    } else if (dice < 40) {
      const auto it = pick();
      if (!it->second.is_moving) {
        const Result<PageTable::Move> move = table.begin_move(it->first);
        if (move.is_ok()) {
          ASSERT_FALSE(table.unseal(it->first)) << "a page that moves is not written";
          it->second.is_moving = true;
          moves.push_back(move.value());
        }
      }
    } else if (dice < 55 && !moves.empty()) {
      const PageTable::Move move = moves[generator() % moves.size()];
      std::erase_if(moves, [&](const auto& one) { return one.page == move.page; });
      std::memcpy(move.target, move.source, move.size_bytes);
      table.end_move(move);
      if (const auto it = held.find(move.page); it != held.end()) {
        it->second.is_moving = false;
        ASSERT_EQ(table.data(move.page), move.target);
        ASSERT_TRUE(table.unseal(move.page));
        table.seal(move.page);
        ++n_moved;
      } else {
        ++n_gone;
      }
    } else if (dice < 60) {
      Reader reader{table.epochs().begin(), {}};
      for (int i = 0; i < 5; ++i) {
        const PageRef page = pick()->first;
        if (reader.found.emplace(page, table.data(page)).second) {
          ++n_readers[page];
        }
      }
      readers.push_back(reader);
    } else if (dice < 66 && !readers.empty()) {
      const size_t i = generator() % readers.size();
      for (const auto& [page, data] : readers[i].found) {
        ASSERT_EQ(*reinterpret_cast<const uint8_t*>(data), held.at(page).mark);
        ASSERT_EQ(reinterpret_cast<const uint8_t*>(data)[size - 1], held.at(page).mark);
        --n_readers[page];
      }
      table.epochs().end(readers[i].epoch);
      readers.erase(readers.begin() + static_cast<ptrdiff_t>(i));
    } else if (dice < 72) {
      const auto it = pick();
      table.add_ref(it->first);
      ++it->second.n_refs;
    } else if (const auto it = pick(); it->second.n_refs > 1 || n_readers[it->first] == 0) {
      ASSERT_EQ(*reinterpret_cast<const uint8_t*>(table.data(it->first)), it->second.mark);
      if (table.release(it->first)) {
        ASSERT_EQ(it->second.n_refs, 1u);
        held.erase(it);
      } else {
        --it->second.n_refs;
      }
    }
    if (dice % 8 == 0) {
      table.free_left_frames();
    }
    ASSERT_EQ(table.n_pages(), held.size());
    if (step % 16 == 0) {
      table.check_accounts();
    }
  }
  EXPECT_GT(n_moved, 300u);
  EXPECT_GT(n_gone, 10u);
  for (const PageTable::Move& move : moves) {
    std::memcpy(move.target, move.source, move.size_bytes);
    table.end_move(move);
  }
  for (const Reader& reader : readers) {
    table.epochs().end(reader.epoch);
  }
  for (const auto& [page, record] : held) {
    for (uint32_t i = 0; i < record.n_refs; ++i) {
      table.release(page);
    }
  }
  table.free_left_frames();
  table.check_accounts();
  EXPECT_EQ(table.n_pages(), 0u);
  EXPECT_EQ(pool.n_frames(), 0u);
}

TEST(PageTable, LeftFramesAreFreedInParts) {
  MemoryBudget budget(64 * kMiB);
  HostPool pool(&budget, 0);
  PageTable table(&pool);
  const SlabClass slab_class = slab_class_of(1);
  constexpr size_t kPages = PageTable::kMostFreed + PageTable::kMostFreed / 2;
  std::vector<PageRef> pages;
  const uint64_t reader = table.epochs().begin();
  for (size_t i = 0; i < kPages; ++i) {
    pages.push_back(table.allocate(slab_class, payer_of(0)).value());
    table.seal(pages.back());
    table.end_move(table.begin_move(pages.back()).value());
  }
  EXPECT_FALSE(table.free_left_frames()) << "they are read";
  EXPECT_EQ(table.left_bytes(), kPages * slab_class.page_bytes());
  table.epochs().end(reader);
  EXPECT_TRUE(table.free_left_frames());
  EXPECT_EQ(table.left_bytes(), (kPages - PageTable::kMostFreed) * slab_class.page_bytes());
  EXPECT_TRUE(table.free_left_frames());
  EXPECT_EQ(table.left_bytes(), 0u);
  EXPECT_FALSE(table.free_left_frames());
  table.check_accounts();
  for (const PageRef page : pages) {
    table.release(page);
  }
}

// Every second of many pages is gone: half of the extents can be emptied into the others.
TEST(PageTable, ThinExtentsAreEmptied) {
  MemoryBudget budget(64 * kMiB);
  HostPool pool(&budget, 0);
  PageTable table(&pool);
  const SlabClass slab_class = slab_class_of(16);  // 256 KiB, eight an extent
  std::vector<PageRef> pages;
  for (uint8_t i = 0; i < 160; ++i) {
    pages.push_back(table.allocate(slab_class, payer_of(0)).value());
    std::memset(table.data(pages.back()), i, slab_class.page_bytes());
    table.seal(pages.back());
  }
  ASSERT_EQ(pool.extent_bytes(), 20 * kExtentBytes);
  EXPECT_FALSE(pool.close_thin_extent().has_value()) << "all are full";
  for (size_t i = 0; i < pages.size(); ++i) {
    if (i % 8 != 3) {
      EXPECT_TRUE(table.release(pages[i]));
    }
  }
  const uint64_t reader = table.epochs().begin();
  uint64_t n_moved = 0;
  for (;;) {
    const auto extent = pool.close_thin_extent();
    if (!extent.has_value()) {
      break;
    }
    std::vector<PageRef> movable;
    EXPECT_TRUE(table.collect_movable(*extent, &movable));
    for (const PageRef page : movable) {
      const PageTable::Move move = table.begin_move(page).value();
      std::memcpy(move.target, move.source, move.size_bytes);
      table.end_move(move);
      ++n_moved;
    }
    EXPECT_FALSE(table.has_pages(*extent));
    table.free_left_frames();
    table.check_accounts();
  }
  EXPECT_EQ(pool.extent_bytes() - pool.cached_bytes(), 20 * kExtentBytes) << "they are read";
  table.epochs().end(reader);
  table.free_left_frames();
  table.check_accounts();
  // Twenty pages fill two extents and a half; fewer than two extents' worth stay free.
  EXPECT_LE(pool.extent_bytes() - pool.cached_bytes(), 4 * kExtentBytes);
  EXPECT_GE(n_moved, 16u);
  EXPECT_LE(n_moved, 20u) << "no page moves twice";
  for (uint8_t i = 3; i < 160; i = static_cast<uint8_t>(i + 8)) {
    const auto* data = reinterpret_cast<const uint8_t*>(table.data(pages[i]));
    EXPECT_EQ(data[0], i);
    EXPECT_EQ(data[slab_class.page_bytes() - 1], i);
  }
}

// A frame that was left says nothing of the page that was in it, whose name may be another's.
TEST(PageTable, NamesOfPagesThatMovedAreUsedAgain) {
  MemoryBudget budget(64 * kMiB);
  HostPool pool(&budget, 0);
  PageTable table(&pool);
  const SlabClass slab_class = slab_class_of(16);
  std::vector<PageRef> pages;
  for (int i = 0; i < 24; ++i) {
    pages.push_back(table.allocate(slab_class, payer_of(0)).value());
    table.seal(pages.back());
  }
  for (size_t i = 0; i < pages.size(); ++i) {
    if (i % 8 != 0) {
      table.release(pages[i]);
    }
  }
  const uint64_t reader = table.epochs().begin();
  const auto extent = pool.close_thin_extent();
  ASSERT_TRUE(extent.has_value());
  std::vector<PageRef> movable;
  ASSERT_TRUE(table.collect_movable(*extent, &movable));
  ASSERT_EQ(movable.size(), 1u);
  const PageTable::Move move = table.begin_move(movable[0]).value();
  EXPECT_TRUE(table.has_pages(*extent));
  table.end_move(move);
  for (size_t i = 0; i < pages.size(); i += 8) {
    EXPECT_TRUE(table.release(pages[i]));
  }
  // Others take all directories, that of the class among them.
  for (uint32_t i = 1; i <= kMaxSlabs; ++i) {
    const SlabClass other = {.index_bytes = 64 * i};
    EXPECT_TRUE(table.release(table.allocate(other, payer_of(0)).value()));
  }
  EXPECT_FALSE(table.has_pages(*extent));
  movable.clear();
  EXPECT_TRUE(table.collect_movable(*extent, &movable));
  EXPECT_TRUE(movable.empty());
  table.check_accounts();
  table.epochs().end(reader);
  table.free_left_frames();
  EXPECT_EQ(pool.n_frames(), 0u);
  table.check_accounts();
}

TEST(ReadEpochs, WhatIsGivenUpWaitsForThoseWhoBeganBefore) {
  ReadEpochs epochs;
  EXPECT_FALSE(epochs.has_ended(epochs.now()));
  const uint64_t old = epochs.begin();
  const uint64_t given_up = epochs.now();
  epochs.advance();
  const uint64_t young = epochs.begin();
  const uint64_t beside = epochs.follow(old);
  EXPECT_FALSE(epochs.has_ended(given_up));
  epochs.end(old);
  EXPECT_FALSE(epochs.has_ended(given_up)) << "another took over what the old one found";
  epochs.end(beside);
  EXPECT_TRUE(epochs.has_ended(given_up));
  EXPECT_FALSE(epochs.has_ended(epochs.now()));
  epochs.end(young);
  epochs.advance();
  EXPECT_TRUE(epochs.has_ended(epochs.now() - 1));
}

// Each takes over what one found that is about to end: what was given up before the last of them
// began is free nevertheless.
TEST(ReadEpochs, AChainOfReadersKeepsNothing) {
  ReadEpochs epochs;
  uint64_t follower = epochs.begin();
  for (int i = 0; i < 200; ++i) {
    const uint64_t given_up = epochs.now();
    epochs.advance();
    const uint64_t request = epochs.begin();
    const uint64_t next = epochs.follow(request);
    epochs.end(request);
    epochs.end(follower);
    EXPECT_TRUE(epochs.has_ended(given_up));
    follower = next;
  }
}

// However far back the oldest reader is, what is given up waits for it, and goes when it ends.
TEST(ReadEpochs, AReaderMayStayForManyEpochs) {
  ReadEpochs epochs;
  const uint64_t old = epochs.begin();
  std::vector<uint64_t> given_up;
  for (uint64_t i = 0; i < 3 * ReadEpochs::kMaxEpochs; ++i) {
    const uint64_t reader = epochs.begin();
    given_up.push_back(epochs.now());
    epochs.advance();
    epochs.end(reader);
    for (const uint64_t epoch : given_up) {
      ASSERT_FALSE(epochs.has_ended(epoch));
    }
  }
  epochs.end(old);
  epochs.advance();
  for (const uint64_t epoch : given_up) {
    EXPECT_TRUE(epochs.has_ended(epoch));
  }
}

// A transfer that a test begins and ends with the table's move.
struct Way final : Transfer {
  void on_done() noexcept override { is_done = true; }
  PageTable::Move move;
  bool is_done = false;
  bool is_copy = false;  // a write after which the page stays in memory
};

// Pages that leave, are copied and come back, that are shared, released and adopted under another
// name at any point of their way, and whose transfers end in any order or fail, against a map.
TEST(PageTable, PagesLeaveAndComeBack) {
  MemoryBudget budget(16 * kMiB);
  HostPool pool(&budget, 4 * kMiB);
  SimulatedTier tier({.capacity_bytes = 6 * kMiB, .is_manual = true});
  PageTable table(&pool, &tier);
  std::mt19937 generator(7);
  const SlabClass slab_class = slab_class_of(4);
  struct Held {
    uint32_t n_refs = 1;
    uint8_t mark = 0;
    bool is_on_its_way = false;
  };
  std::map<PageRef, Held> held;
  std::vector<std::unique_ptr<Way>> ways;
  uint32_t n_failed = 0;
  uint32_t n_left = 0;
  uint32_t n_fetched = 0;
  uint32_t n_copied = 0;
  uint32_t n_adopted = 0;
  const auto end_write = [&](const Way& way) {
    const PlaceId place = way.status.is_ok() ? way.place : kNoPlace;
    if (way.is_copy) {
      table.end_copy(way.move, place);
    } else {
      table.end_leave(way.move, place);
    }
  };
  const auto any = [&] {
    auto it = held.begin();
    std::advance(it, generator() % held.size());
    return it;
  };
  for (int step = 0; step < 20000; ++step) {
    const auto dice = static_cast<uint32_t>(generator() % 10);
    if (generator() % 50 == 0) {
      const auto kind = generator() % 2 == 0 ? Transfer::Kind::kRead : Transfer::Kind::kWrite;
      tier.fail_next(kind, 1 + generator() % 3, {KVM_ERR_IO, "a fault of the test"});
    }
    if (held.empty() || (dice < 2 && held.size() < 80)) {
      const Result<PageRef> page = table.allocate(slab_class, payer_of(1));
      if (page.is_ok()) {
        const auto mark = static_cast<uint8_t>(generator());
        std::memset(table.data(page.value()), mark, slab_class.page_bytes());
        table.seal(page.value());
        ASSERT_TRUE(held.emplace(page.value(), Held{1, mark}).second);
      }
    } else if (dice < 4) {
      const auto it = any();
      if (!it->second.is_on_its_way) {
        auto way = std::make_unique<Way>();
        if (table.is_in_memory(it->first)) {
          way->kind = Transfer::Kind::kWrite;
          way->move = table.begin_leave(it->first);
          if (table.place(it->first) != kNoPlace) {
            table.end_leave(way->move, table.place(it->first));
            continue;
          }
          way->data = const_cast<std::byte*>(way->move.source);
          way->is_copy = generator() % 2 == 0;
        } else {
          const Result<PageTable::Move> move = table.begin_fetch(it->first);
          if (!move.is_ok()) {
            continue;
          }
          way->move = move.value();
          way->place = table.place(it->first);
          way->data = way->move.target;
        }
        EXPECT_TRUE(table.is_moving(it->first));
        it->second.is_on_its_way = true;
        way->size_bytes = static_cast<uint32_t>(way->move.size_bytes);
        Transfer* transfer = way.get();
        tier.submit({&transfer, 1});
        ways.push_back(std::move(way));
      }
    } else if (dice < 6 && tier.n_waiting() != 0) {
      tier.finish(generator() % tier.n_waiting());
    } else if (dice < 8) {
      std::erase_if(ways, [&](const std::unique_ptr<Way>& way) {
        if (!way->is_done) {
          return false;
        }
        n_failed += way->status.is_ok() ? 0 : 1;
        if (way->kind == Transfer::Kind::kWrite) {
          n_left += way->status.is_ok() && !way->is_copy ? 1 : 0;
          n_copied += way->status.is_ok() && way->is_copy ? 1 : 0;
          end_write(*way);
        } else {
          n_fetched += way->status.is_ok() ? 1 : 0;
          table.end_fetch(way->move, way->status.is_ok());
        }
        if (const auto it = held.find(way->move.page); it != held.end()) {
          it->second.is_on_its_way = false;
          if (way->is_copy) {
            EXPECT_TRUE(table.is_in_memory(it->first) && table.is_sealed(it->first));
            EXPECT_EQ(table.place(it->first) != kNoPlace, way->status.is_ok());
          }
        }
        return true;
      });
      while (table.free_left_frames()) {
      }
    } else if (dice == 8) {
      const auto it = any();
      if (table.is_in_memory(it->first)) {
        const auto* data = reinterpret_cast<const uint8_t*>(table.data(it->first));
        ASSERT_EQ(data[0], it->second.mark);
        ASSERT_EQ(data[slab_class.page_bytes() - 1], it->second.mark);
        // Who writes a page gives up what the tier has of it.
        if (it->second.n_refs == 1 && table.unseal(it->first)) {
          EXPECT_EQ(table.place(it->first), kNoPlace);
          it->second.mark = static_cast<uint8_t>(generator());
          std::memset(table.data(it->first), it->second.mark, slab_class.page_bytes());
          table.seal(it->first);
        }
      }
      if (const PlaceId place = table.place(it->first); place != kNoPlace && held.size() < 80) {
        tier.add_ref(place);
        const PageRef other = table.adopt(slab_class, payer_of(2), place).value();
        EXPECT_FALSE(table.is_in_memory(other));
        EXPECT_TRUE(table.is_sealed(other));
        EXPECT_EQ(table.place(other), place);
        EXPECT_EQ(table.payer(other), payer_of(2));
        ASSERT_TRUE(held.emplace(other, Held{1, it->second.mark}).second);
        ++n_adopted;
      }
      table.add_ref(it->first);
      ++it->second.n_refs;
    } else {
      const auto it = any();
      if (--it->second.n_refs == 0) {
        EXPECT_TRUE(table.release(it->first));
        held.erase(it);
      } else {
        EXPECT_FALSE(table.release(it->first));
      }
    }
    ASSERT_EQ(table.n_pages(), held.size());
    if (step % 16 == 0) {
      table.check_accounts();
    }
  }
  EXPECT_GT(n_copied, 100u);
  EXPECT_GT(n_adopted, 100u);
  EXPECT_GT(n_failed, 10u);
  EXPECT_GT(n_left, 100u);
  EXPECT_GT(n_fetched, 100u);
  tier.finish_all();
  for (const std::unique_ptr<Way>& way : ways) {
    if (way->kind == Transfer::Kind::kWrite) {
      end_write(*way);
    } else {
      table.end_fetch(way->move, way->status.is_ok());
    }
  }
  for (const auto& [page, record] : held) {
    for (uint32_t i = 0; i < record.n_refs; ++i) {
      table.release(page);
    }
  }
  while (table.free_left_frames()) {
  }
  table.check_accounts();
  EXPECT_EQ(pool.n_frames(), 0u);
  EXPECT_EQ(tier.used_bytes(), 0u);
}

// A page that is gone when its copy ends leaves no place behind.
TEST(PageTable, APageMayGoWhileItIsCopied) {
  MemoryBudget budget(16 * kMiB);
  HostPool pool(&budget, 0);
  SimulatedTier tier({.is_manual = true});
  PageTable table(&pool, &tier);
  const PageRef page = table.allocate(slab_class_of(4), payer_of(1)).value();
  table.seal(page);
  Way way;
  way.kind = Transfer::Kind::kWrite;
  way.move = table.begin_leave(page);
  way.data = const_cast<std::byte*>(way.move.source);
  way.size_bytes = static_cast<uint32_t>(way.move.size_bytes);
  Transfer* transfer = &way;
  tier.submit({&transfer, 1});
  EXPECT_TRUE(table.release(page));
  EXPECT_EQ(table.n_pages(), 0u);
  table.check_accounts();
  tier.finish_all();
  ASSERT_TRUE(way.status.is_ok());
  table.end_copy(way.move, way.place);
  table.check_accounts();
  EXPECT_EQ(pool.n_frames(), 0u);
  EXPECT_EQ(tier.used_bytes(), 0u);
}

}  // namespace
}  // namespace kvm::tiers
