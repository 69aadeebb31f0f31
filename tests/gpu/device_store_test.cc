// SPDX-License-Identifier: Apache-2.0
// The accounts of pages in device memory: recounted after every operation.
#include "device/device_store.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "base/splitmix.h"
#include "device/batch.h"
#include "tests/gpu/fake_driver.h"

namespace {

// Which allocation from now on fails; 0: none.
uint64_t g_fail_new = 0;

}  // namespace

void* operator new(size_t size) {
  if (g_fail_new != 0 && --g_fail_new == 0) {
    throw std::bad_alloc();
  }
  if (void* const memory = std::malloc(size); memory != nullptr) {
    return memory;
  }
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace kvm::device {
namespace {

using testing::FakeDriver;
using testing::FakeOptions;

tiers::SlabClass slab_of(uint16_t n_heads) {
  tiers::SlabClass of;
  of.dim_k = of.dim_v = 64;
  of.n_heads = n_heads;
  return of;
}

TEST(DevicePoolTest, PagesHaveTheAddressesOfTheirSlots) {
  FakeDriver driver;
  PagePool pool(&driver, 16 << 20);
  // Three heads: 48 KiB, which does not divide the granularity of 64 KiB.
  const uint32_t slab = pool.open_slab(slab_of(3)).value();
  EXPECT_EQ(pool.open_slab(slab_of(3)).value(), slab);
  const uint32_t other = pool.open_slab(slab_of(1)).value();
  EXPECT_NE(slab, other);
  EXPECT_EQ(pool.used_bytes(), 0u);
  std::vector<tiers::PageRef> pages;
  for (uint32_t i = 0; i < 20; ++i) {
    pages.push_back(pool.allocate(slab).value());
    EXPECT_EQ(pages.back(), tiers::make_page_ref(slab, i));
    EXPECT_EQ(pool.data(pages.back()), pool.base(slab) + i * 49152);
    pool.data(pages.back())[49151] = 1;  // it is there
  }
  EXPECT_EQ(pool.used_bytes() % (3 * 65536), 0u);
  EXPECT_EQ(pool.page_bytes_in_use(), 20u * 49152);
  pool.add_ref(pages[3]);
  EXPECT_FALSE(pool.release(pages[3]));
  EXPECT_TRUE(pool.release(pages[3]));
  EXPECT_TRUE(pool.release(pages[1]));
  EXPECT_EQ(pool.allocate(slab).value(), pages[1]);  // the lowest
  pool.check_accounts();
}

TEST(DevicePoolTest, ExtentsGoToWhoNeedsThem) {
  FakeDriver driver;
  {
    PagePool pool(&driver, 1 << 20);
    const uint32_t a = pool.open_slab(slab_of(4)).value(), b = pool.open_slab(slab_of(8)).value();
    std::vector<tiers::PageRef> pages;
    for (Result<tiers::PageRef> page = pool.allocate(a); page.is_ok(); page = pool.allocate(a)) {
      pages.push_back(page.value());
    }
    EXPECT_EQ(pages.size(), 16u);
    EXPECT_EQ(pool.allocate(b).status().code(), KVM_ERR_NO_SPACE);
    pool.release(pages[5]);
    EXPECT_EQ(pool.allocate(b).status().code(), KVM_ERR_NO_SPACE);  // 128 KiB are needed
    pool.release(pages[9]);
    const uint64_t waits = driver.counts(testing::Operation::kSynchronize);
    EXPECT_TRUE(pool.allocate(b).is_ok());
    EXPECT_EQ(driver.counts(testing::Operation::kSynchronize), waits + 1);
    EXPECT_EQ(pool.used_bytes(), uint64_t{1} << 20);
    pool.check_accounts();
  }
  EXPECT_EQ(driver.leftovers(), "");
  EXPECT_EQ(driver.complaints(), "");
}

TEST(DevicePoolTest, LimitsAreSaid) {
  FakeDriver driver;
  PagePool pool(&driver, 1 << 20);
  EXPECT_EQ(pool.open_slab(slab_of(128)).status().code(), KVM_ERR_NO_SPACE);  // 2 MiB a page
  driver.fail(testing::Operation::kMap, 1);
  const uint32_t slab = pool.open_slab(slab_of(1)).value();
  EXPECT_EQ(pool.allocate(slab).status().code(), KVM_ERR_NO_SPACE);
  EXPECT_EQ(pool.used_bytes(), 0u);
  EXPECT_TRUE(pool.allocate(slab).is_ok());
  pool.check_accounts();
}

// Locked pages would be copied by the fork itself.
TEST(DeviceStoreTest, ForksOfTheProcessDoNotGetTheHostsChunks) {
  FakeDriver driver;
  const auto chunks = HostChunks::create(&driver, 2 * kChunkBytes).value();
  uint8_t* const first = chunks->data(0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(::msync(first, kChunkBytes, MS_ASYNC) != 0 && errno == ENOMEM ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// What a device would do with a message.
void scatter(const Message& message, std::vector<uint32_t>* to) {
  const auto* const words =
      reinterpret_cast<const uint32_t*>(message.data() + message.words_begin());
  const auto* const runs =
      reinterpret_cast<const attention::gpu::WordRun*>(message.data() + message.begin());
  for (uint32_t i = 0; i < message.n_runs(); ++i) {
    ASSERT_LE(runs[i].n_words, attention::gpu::kMaxRunWords);
    ASSERT_LE(message.words_begin() + (uint64_t{runs[i].from} + runs[i].n_words) * 4,
              message.end());
    for (uint32_t word = 0; word < runs[i].n_words; ++word) {
      to->at(runs[i].to + word) = words[runs[i].from + word];
    }
  }
}

TEST(MessageTest, BringsEveryWordToItsPlace) {
  constexpr uint32_t kMaxRuns = 40, kMaxWords = 9000, kWords = 20000;
  std::vector<attention::gpu::WordRun> memory(Message::bytes_for(kMaxRuns, kMaxWords) /
                                              sizeof(attention::gpu::WordRun));
  uint64_t state = 1;
  uint64_t n_full = 0;
  for (uint32_t round = 0; round < 200; ++round) {
    Message message(reinterpret_cast<uint8_t*>(memory.data()), kMaxRuns, kMaxWords);
    EXPECT_EQ(message.begin(), message.words_begin());
    std::vector<uint32_t> expected(kWords, 7), got = expected;
    for (uint32_t at = 0;;) {
      const uint64_t most = ++state % 4 == 0 ? 3000 : 30;
      const auto n = static_cast<uint32_t>(splitmix64(state) % most + 1);
      at += static_cast<uint32_t>(splitmix64(++state) % 5);
      if (!message.has_room<uint32_t>(n)) {
        ++n_full;
        break;
      }
      uint32_t* const values = message.add<uint32_t>(uint64_t{at} * 4, n);
      for (uint32_t i = 0; i < n; ++i, ++at) {
        expected[at] = values[i] = static_cast<uint32_t>(splitmix64(++state));
      }
    }
    ASSERT_NO_FATAL_FAILURE(scatter(message, &got));
    ASSERT_EQ(got, expected) << "round " << round;
    ASSERT_LE(message.end(), Message::bytes_for(kMaxRuns, kMaxWords));
  }
  EXPECT_EQ(n_full, 200u);
}

TEST(DeviceStoreTest, UpdatesWithoutMemoryOfTheHostChangeNothing) {
  FakeOptions options;
  options.emulate = false;
  auto owned = std::make_unique<FakeDriver>(options);
  FakeDriver* const driver = owned.get();
  auto store = DeviceStore::open(std::move(owned), {8 << 20, 0}).value();
  SpaceLayout layout;
  layout.dim = 64;
  LayerLayout layer;
  layer.n_q_heads = layer.n_kv_heads = 2;
  layer.classes = {{{0, 1}, 0, 0, 0, 0, 0}};
  layout.layers = {layer};
  const auto space = store->prepare(layout).value();
  BatchOptions batch_options;
  batch_options.max_items = 2;
  batch_options.max_append = 400;
  batch_options.max_query_rows = 2;
  batch_options.max_tokens = 4096;
  auto batch = Batch::create(store.get(), space, batch_options).value();
  auto parent = store->create(space);
  const std::vector<BatchItem> first = {{parent, 100, 0, 1, 0, {}}};
  ASSERT_TRUE(batch->update(first, nullptr).is_ok());
  auto child = store->fork(*parent, 100).value();
  const std::vector<BatchItem> both = {{parent, 200, 0, 1, 0, {}}, {child, 200, 200, 1, 1, {}}};
  bool done = false;
  uint64_t n_failed = 0;
  for (; !done; ++n_failed) {
    g_fail_new = n_failed + 1;
    try {
      done = batch->update(both, nullptr).is_ok();
    } catch (const std::bad_alloc&) {
    }
    g_fail_new = 0;
    ASSERT_EQ(parent->n_tokens, done ? 300u : 100u);
    store->check_accounts(std::vector<const DeviceSequence*>{parent.get(), child.get()});
  }
  EXPECT_GT(n_failed, 5u);
  driver->settle();
  batch.reset();
  for (const auto& seq : {parent, child}) {
    store->clear(seq.get());
  }
  store->check_accounts({});
}

TEST(DeviceStoreTest, AccountsHoldAfterEveryOperation) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FakeOptions options;
    options.seed = seed;
    options.eagerness = static_cast<uint32_t>(seed % 3 * 5);
    options.at_end = [](const FakeDriver& driver) {
      EXPECT_EQ(driver.complaints(), "");
      EXPECT_EQ(driver.leftovers(), "");
    };
    auto owned = std::make_unique<FakeDriver>(options);
    FakeDriver* const driver = owned.get();
    auto store = DeviceStore::open(std::move(owned), {3 << 20, 6 << 20}).value();
    SpaceLayout layout;
    layout.dim = 64;
    LayerLayout layer;
    layer.n_q_heads = layer.n_kv_heads = 3;
    layer.classes = {{{0, 2}, 0, 0, 0, 0, 0}, {{1}, 4, 40, 8, 0, 0}};
    layout.layers = {layer, layer};
    layout.layers[1].storage_layer = 1;
    const auto space = store->prepare(layout).value();
    EXPECT_EQ(space->lists.size(), 2u);  // of both layers

    std::vector<std::shared_ptr<DeviceSequence>> seqs;
    uint64_t state = seed;
    const auto below = [&state](uint64_t n) {
      state += kSplitMixStep;
      return splitmix64(state) % n;
    };
    uint32_t n_failed = 0;
    for (uint32_t i = 0; i < 600; ++i) {
      // Something fails now and then.
      if (below(20) == 0) {
        driver->fail(static_cast<testing::Operation>(below(12)), 1 + below(3));
      }
      const uint64_t chance = below(100);
      if (seqs.empty() || (chance < 10 && seqs.size() < 10)) {
        seqs.push_back(store->create(space));
      } else {
        DeviceSequence* const seq = seqs[below(seqs.size())].get();
        Status status;
        if (chance < 20 && seqs.size() < 10) {
          auto child = store->fork(*seq, below(seq->n_tokens + 1));
          status = child.status();
          if (child.is_ok()) {
            seqs.push_back(child.value());
          }
        } else if (chance < 30) {
          status = store->truncate(seq, below(seq->n_tokens + 1));
        } else if (chance < 36) {
          store->clear(seq);
          std::erase_if(seqs, [seq](const auto& of) { return of.get() == seq; });
        } else if (chance < 46) {
          status = store->spill(seq, nullptr);
        } else if (chance < 60) {
          status = store->fetch(seq, nullptr);
        } else {
          const uint64_t before = seq->n_tokens;
          const DeviceStore::Growth growth{seq, static_cast<uint32_t>(below(90)), 0};
          status = store->begin_growth({&growth, 1}, nullptr);
          if (status.is_ok() && below(5) == 0) {
            store->undo_growth();
            EXPECT_EQ(seq->n_tokens, before);
          } else if (status.is_ok()) {
            store->finish_growth();
            EXPECT_EQ(seq->n_tokens, before + growth.n_append);
          } else {
            EXPECT_EQ(seq->n_tokens, before);
          }
        }
        n_failed += status.is_ok() ? 0 : 1;
      }
      std::vector<const DeviceSequence*> all;
      for (const auto& seq : seqs) {
        all.push_back(seq.get());
      }
      store->check_accounts(all);
    }
    EXPECT_GT(n_failed, 5u);
    for (uint32_t i = 0; i < 12; ++i) {
      driver->fail(static_cast<testing::Operation>(i), 0);  // the end waits for the device
    }
    for (const auto& seq : seqs) {
      store->clear(seq.get());
    }
    store->check_accounts({});
    seqs.clear();
  }
}

}  // namespace
}  // namespace kvm::device
