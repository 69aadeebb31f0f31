// SPDX-License-Identifier: Apache-2.0
// The accounts of pages in device memory: recounted after every operation.
#include "device/device_store.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "base/round.h"
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
  // Three heads: 48 KiB, which does not divide the granularity of 64 KiB, nor extents of 256 KiB.
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
  EXPECT_EQ(pool.slab_extent_bytes(slab), 262144u);
  EXPECT_EQ(pool.used_bytes(), 4 * 262144u);  // of which the end of the 20th page touches the last
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

// Pages of int8 and fp8 have few factors of two, for the sake of their scales: an extent of whole
// pages and whole granules would be hundreds of MiB.
TEST(DevicePoolTest, ExtentsAreLongerInLargePools) {
  constexpr uint64_t kMiB = 1 << 20, kGiB = 1 << 30;
  EXPECT_EQ(extent_target(kGiB), 16 * kMiB);
  EXPECT_EQ(extent_target(2 * kGiB), 32 * kMiB);
  EXPECT_EQ(extent_target(8 * kGiB), 32 * kMiB);
  EXPECT_EQ(extent_target(16 * kGiB), 64 * kMiB);
  EXPECT_EQ(extent_target(64 * kGiB), 256 * kMiB);
  EXPECT_EQ(extent_target(1024 * kGiB), 256 * kMiB);
}

TEST(DevicePoolTest, ExtentsAreShortWhateverThePage) {
  constexpr uint64_t kGranule = uint64_t{2} << 20, kCapacity = uint64_t{24} << 20;
  FakeOptions options;
  options.granularity_bytes = kGranule;
  FakeDriver driver(options);
  constexpr uint16_t kDims[] = {64, 80, 96, 128, 192, 256};
  constexpr uint16_t kHeads[] = {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 64, 128};
  uint32_t n_classes = 0;
  for (const CodecId codec :
       {CodecId::kBf16, CodecId::kF16, CodecId::kI8, CodecId::kF8, codecs::kI4}) {
    for (const uint16_t dim : kDims) {
      for (const uint16_t n_heads : kHeads) {
        tiers::SlabClass of = slab_of(n_heads);
        of.codec_k = of.codec_v = codec;
        of.dim_k = of.dim_v = dim;
        if (of.page_bytes() > tiers::kExtentBytes) {
          continue;  // such heads are several classes
        }
        SCOPED_TRACE("codec " + std::to_string(static_cast<uint32_t>(codec)) + " dim " +
                     std::to_string(dim) + " heads " + std::to_string(n_heads));
        ++n_classes;
        {
          PagePool large(&driver, uint64_t{8} << 30);
          EXPECT_EQ(large.slab_extent_bytes(large.open_slab(of).value()), 32u << 20);
        }
        PagePool pool(&driver, kCapacity);
        const uint32_t slab = pool.open_slab(of).value();
        EXPECT_EQ(pool.slab_extent_bytes(slab), kGranule);
        // Filled page by page: never more than an extent and the rest of a page ahead.
        uint64_t n_pages = 0;
        for (; pool.allocate(slab).is_ok(); ++n_pages) {
          const uint64_t needed = (n_pages + 1) * of.page_bytes();
          ASSERT_GE(pool.used_bytes(), needed);
          ASSERT_LT(pool.used_bytes(), needed + kGranule);
        }
        EXPECT_EQ(n_pages, kCapacity / of.page_bytes());  // the end of one page is all that is lost
        pool.check_accounts();
      }
    }
  }
  EXPECT_GT(n_classes, 120u);
  EXPECT_EQ(driver.complaints(), "");
  EXPECT_EQ(driver.leftovers(), "");
}

// Several slabs in a pool that is too small for all, against a recount that knows only which pages
// were handed out: they do not overlap, they keep what was written to them, and a pool says that it
// is full only if it is.
TEST(DevicePoolTest, SlabsTakeExtentsFromEachOther) {
  constexpr uint64_t kCapacity = uint64_t{2} << 20;
  uint64_t n_refused = 0, n_waits = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FakeOptions options;
    options.granularity_bytes = 4096u << seed % 5;
    FakeDriver driver(options);
    {
      PagePool pool(&driver, kCapacity);
      struct Class {
        uint32_t slab;
        uint64_t page_bytes, extent_bytes;
      };
      std::vector<Class> classes;
      for (const uint16_t n_heads : std::to_array<uint16_t>({1, 3, 5, 16})) {
        tiers::SlabClass of = slab_of(n_heads);
        of.codec_k = of.codec_v = n_heads % 4 == 1 ? CodecId::kI8 : CodecId::kBf16;
        const uint32_t slab = pool.open_slab(of).value();
        classes.push_back({slab, of.page_bytes(), pool.slab_extent_bytes(slab)});
      }
      uint64_t state = seed;
      const auto below = [&state](uint64_t n) {
        state += kSplitMixStep;
        return splitmix64(state) % n;
      };
      struct Held {
        size_t of;
        uint64_t offset;
        uint8_t mark;
      };
      std::map<tiers::PageRef, Held> held;
      const auto touched = [&](size_t of) {
        std::set<uint64_t> extents;
        for (const auto& [page, in] : held) {
          if (in.of == of) {
            extents.insert(in.offset / classes[of].extent_bytes);
            extents.insert((in.offset + classes[of].page_bytes - 1) / classes[of].extent_bytes);
          }
        }
        return extents;
      };
      size_t favourite = 0;
      for (uint32_t i = 0; i < 3000; ++i) {
        if (i % 200 == 0) {
          favourite = below(classes.size());
        }
        if (below(100) < (i / 500 % 2 == 0 ? 65u : 40u)) {
          const size_t of = below(3) == 0 ? below(classes.size()) : favourite;
          const uint64_t page_bytes = classes[of].page_bytes;
          const Result<tiers::PageRef> page = pool.allocate(classes[of].slab);
          if (page.is_ok()) {
            const auto offset =
                static_cast<uint64_t>(pool.data(page.value()) - pool.base(classes[of].slab));
            ASSERT_EQ(offset, tiers::page_slot(page.value()) * page_bytes);
            const auto mark = static_cast<uint8_t>(below(256));
            ASSERT_TRUE(held.emplace(page.value(), Held{of, offset, mark}).second);
            std::memset(pool.data(page.value()), mark, page_bytes);
          } else {
            ASSERT_EQ(page.status().code(), KVM_ERR_NO_SPACE);
            ++n_refused;
            uint64_t used = 0;
            for (size_t other = 0; other < classes.size(); ++other) {
              used += touched(other).size() * classes[other].extent_bytes;
            }
            ASSERT_GT(used + classes[of].extent_bytes, kCapacity);
          }
        } else if (!held.empty()) {
          auto one = held.lower_bound(static_cast<tiers::PageRef>(tiers::make_page_ref(
              static_cast<uint32_t>(below(classes.size())), static_cast<uint32_t>(below(200)))));
          one = one == held.end() ? held.begin() : one;
          const uint8_t* const data = pool.data(one->first);
          for (uint64_t at = 0; at < classes[one->second.of].page_bytes; at += 1000) {
            ASSERT_EQ(data[at], one->second.mark);
          }
          ASSERT_TRUE(pool.release(one->first));
          held.erase(one);
        }
        uint64_t bytes = 0;
        for (const auto& [page, in] : held) {
          bytes += classes[in.of].page_bytes;
        }
        ASSERT_EQ(pool.page_bytes_in_use(), bytes);
        ASSERT_EQ(pool.n_pages(), held.size());
        ASSERT_EQ(pool.used_bytes(), driver.mapped_bytes());
        ASSERT_LE(pool.used_bytes(), kCapacity);
        pool.check_accounts();
      }
      n_waits += driver.counts(testing::Operation::kSynchronize);
    }
    EXPECT_EQ(driver.leftovers(), "");
    EXPECT_EQ(driver.complaints(), "");
  }
  EXPECT_GT(n_refused, 1000u);
  EXPECT_GT(n_waits, 100u);  // else no extent changed hands
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
  auto batch = Batch::create(driver, store.get(), space, batch_options).value();
  auto parent = store->create(space).value();
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
    options.moves_in_a_thread = seed % 2 == 0;
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

    std::vector<SequencePtr> seqs;
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
        seqs.push_back(store->create(space).value());
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
          status = store->spill(seq, 0, UINT64_MAX, nullptr);
        } else if (chance < 60) {
          status = store->fetch(seq, 0, UINT64_MAX, nullptr);
        } else {
          const uint64_t before = seq->n_tokens;
          const Growth growth{seq, static_cast<uint32_t>(below(90)), 0};
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

// Sequences whose pages hold marks, moved about at random: whatever order the device, the mover
// and the callers come in, whatever fails, a page that the timeline reads holds what the timeline
// wrote.
class Marked {
 public:
  Marked(uint64_t seed, bool in_a_thread, bool faults) : state_(seed), faults_(faults) {
    FakeOptions options;
    options.seed = seed;
    options.eagerness = static_cast<uint32_t>(seed % 4 * 3);
    options.emulate = false;
    options.moves_in_a_thread = in_a_thread;
    options.at_end = [](const FakeDriver& driver) {
      EXPECT_EQ(driver.complaints(), "");
      EXPECT_EQ(driver.leftovers(), "");
    };
    auto owned = std::make_unique<FakeDriver>(options);
    driver_ = owned.get();
    store_ = DeviceStore::open(std::move(owned), {kPoolBytes, kHostBytes}).value();
    memory_ = static_cast<uint8_t*>(
        ::mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_TRUE(driver_->register_host(memory_, kMemoryBytes).is_ok());
    SpaceLayout layout;
    layout.dim = 256;
    LayerLayout layer;
    layer.n_q_heads = layer.n_kv_heads = 15;
    // Pages of 768 KiB and of 192 KiB: two and ten to a chunk.
    layer.classes = {{{}, 0, 0, 0, 0}, {{12, 13, 14}, 0, 0, 0, 0}};
    for (uint16_t head = 0; head < 12; ++head) {
      layer.classes[0].kv_heads.push_back(head);
    }
    layout.layers = {layer};
    space_ = store_->prepare(layout).value();
  }
  ~Marked() {
    driver_->settle();
    driver_->unregister_host(memory_);
    seqs_.clear();
    store_.reset();
    ::munmap(memory_, kMemoryBytes);
  }
  Marked(const Marked&) = delete;
  Marked& operator=(const Marked&) = delete;

  void run(uint32_t n_operations) {
    for (uint32_t i = 0; i < n_operations && !::testing::Test::HasFailure(); ++i) {
      if (faults_ && below(2) == 0) {
        using testing::Operation;
        constexpr Operation kFaults[] = {
            Operation::kMap,         Operation::kEvent, Operation::kRecord, Operation::kWait,
            Operation::kSynchronize, Operation::kCopy,  Operation::kLaunch, Operation::kQuery};
        driver_->fail(kFaults[below(std::size(kFaults))], 1 + below(3));
      }
      const Status status = operate();
      for (uint64_t n = below(4); n > 0; --n) {
        (void)store_->mover()->step(kLanes[below(2)]);
      }
      disarm();
      if (!status.is_ok()) {
        const bool refused = status.code() == KVM_ERR_NO_SPACE || status.code() == KVM_ERR_BUSY;
        ASSERT_TRUE(refused || faults_) << status.message();
        n_refused_ += refused ? 1 : 0;
        n_failed_ += refused ? 0 : 1;
      }
      check_accounts();
      if (below(20) == 0 || used_ > kMemoryBytes / 2) {
        settle();
      }
    }
    while (!seqs_.empty() && !::testing::Test::HasFailure()) {
      finish_one();
    }
    if (::testing::Test::HasFailure()) {
      return;
    }
    check_accounts();
    store_->finish_moves();
    driver_->settle();
    store_->check_accounts({});
    EXPECT_EQ(store_->figures().value().n_spilled, 0u);
  }

  uint64_t n_read() const { return n_read_; }
  uint64_t n_refused() const { return n_refused_; }
  uint64_t n_failed() const { return n_failed_; }
  uint64_t n_copies() const { return store_->figures().value().n_copies; }

 private:
  static constexpr uint64_t kPoolBytes = 14 << 20, kHostBytes = 8 << 20, kMemoryBytes = 8 << 20;
  static constexpr uint64_t kMostTokens = 600, kSample = 64;
  struct Seq {
    SequencePtr seq;
    std::vector<std::vector<uint64_t>> marks;  // [list][block]
  };
  struct Expected {
    uint64_t at;
    uint64_t mark;
  };

  uint64_t below(uint64_t n) {
    state_ += kSplitMixStep;
    return splitmix64(state_) % n;
  }
  void disarm() {
    for (uint32_t i = 0; i < static_cast<uint32_t>(testing::Operation::kCount); ++i) {
      driver_->fail(static_cast<testing::Operation>(i), 0);
    }
  }
  void check_accounts() const {
    std::vector<const DeviceSequence*> all;
    for (const Seq& one : seqs_) {
      all.push_back(one.seq.get());
    }
    store_->check_accounts(all);
  }

  Status operate() {
    const uint64_t chance = below(100);
    if (seqs_.empty() || (chance < 8 && seqs_.size() < 7)) {
      seqs_.push_back({store_->create(space_).value(), std::vector<std::vector<uint64_t>>(2)});
      return Status::ok();
    }
    const size_t index = below(seqs_.size());
    Seq& one = seqs_[index];
    const uint64_t n = one.seq->n_tokens;
    uint64_t begin = 0, end = UINT64_MAX;
    if (below(3) == 0) {
      begin = below(n + 1);
      end = below(2) == 0 ? UINT64_MAX : begin + 1 + below(200);
    }
    if (chance < 14 && seqs_.size() < 7) {
      return fork(index, below(n + 1));
    }
    if (chance < 20) {
      const uint64_t left = below(n + 1);
      KVM_TRY(store_->truncate(one.seq.get(), left));
      resize(&one);
      return Status::ok();
    }
    if (chance < 26) {
      store_->clear(one.seq.get());
      seqs_.erase(seqs_.begin() + static_cast<std::ptrdiff_t>(index));
      return Status::ok();
    }
    if (chance < 46) {
      return store_->spill(one.seq.get(), begin, end, nullptr);
    }
    if (chance < 68) {
      return store_->fetch(one.seq.get(), begin, end, nullptr);
    }
    return chance < 84 ? grow(&one) : read(one);
  }

  void resize(Seq* one) {
    for (std::vector<uint64_t>& list : one->marks) {
      list.resize(div_up(one->seq->n_tokens, kPageTokens));
    }
  }

  Status fork(size_t index, uint64_t n_tokens) {
    KVM_TRY_ASSIGN(auto child, store_->fork(*seqs_[index].seq, n_tokens));
    Seq copy{child, seqs_[index].marks};
    resize(&copy);
    seqs_.push_back(std::move(copy));
    return Status::ok();
  }

  // As a step: what is appended is written behind begin_growth, on the timeline.
  Status grow(Seq* one) {
    const uint64_t before = one->seq->n_tokens;
    const Growth growth{one->seq.get(),
                        static_cast<uint32_t>(below(std::min<uint64_t>(kMostTokens - before, 200))),
                        0};
    KVM_TRY(store_->begin_growth({&growth, 1}, nullptr));
    disarm();
    if (below(6) == 0) {
      driver_->settle();
      store_->undo_growth();
      return Status::ok();
    }
    store_->finish_growth();
    resize(one);
    if (growth.n_append == 0) {
      return Status::ok();
    }
    for (uint32_t list = 0; list < 2; ++list) {
      for (uint64_t block = before / kPageTokens; block < one->marks[list].size(); ++block) {
        one->marks[list][block] = ++last_mark_;
        const uint64_t from = take_memory();
        std::fill_n(reinterpret_cast<uint64_t*>(memory_ + from), kSample / 8, last_mark_);
        for_samples(one->seq->lists[list].pages[block], [&](uint8_t* at) {
          EXPECT_TRUE(driver_->copy(at, memory_ + from, kSample, nullptr).is_ok());
        });
      }
    }
    return Status::ok();
  }

  Status read(const Seq& one) {
    if (one.seq->n_tokens == 0) {
      return Status::ok();
    }
    const Growth growth{one.seq.get(), 0, 1};
    KVM_TRY(store_->begin_growth({&growth, 1}, nullptr));
    store_->finish_growth();
    disarm();
    for (uint32_t list = 0; list < 2; ++list) {
      for (uint64_t block = 0; block < one.marks[list].size(); ++block) {
        for_samples(one.seq->lists[list].pages[block], [&](uint8_t* at) {
          const uint64_t to = take_memory();
          EXPECT_TRUE(driver_->copy(memory_ + to, at, kSample, nullptr).is_ok());
          expected_.push_back({to, one.marks[list][block]});
        });
      }
    }
    return Status::ok();
  }

  // The first bytes of a page, some in the middle, and the last ones.
  template <class Do>
  void for_samples(tiers::PageRef page, Do&& what) {
    const uint64_t size = store_->pool().page_bytes(page);
    for (const uint64_t at : {uint64_t{0}, size / 2, size - kSample}) {
      what(store_->pool().data(page) + at);
    }
  }

  uint64_t take_memory() {
    const uint64_t at = used_;
    used_ += kSample;
    EXPECT_LE(used_, kMemoryBytes);
    return at;
  }

  void settle() {
    driver_->settle();
    for (const Expected& one : expected_) {
      const auto* const words = reinterpret_cast<const uint64_t*>(memory_ + one.at);
      for (uint64_t i = 0; i < kSample / 8; ++i) {
        ASSERT_EQ(words[i], one.mark);
      }
      ++n_read_;
    }
    expected_.clear();
    used_ = 0;
  }

  // Reads the first sequence and lets it go; or puts it behind the others, if it does not fit yet.
  void finish_one() {
    Seq one = seqs_.front();
    seqs_.erase(seqs_.begin());
    Status status = store_->fetch(one.seq.get(), 0, UINT64_MAX, nullptr);
    if (!status.is_ok() && status.code() != KVM_ERR_NO_SPACE) {
      status = store_->fetch(one.seq.get(), 0, UINT64_MAX, nullptr);  // it said what had failed
    }
    if (!status.is_ok()) {
      ASSERT_EQ(status.code(), KVM_ERR_NO_SPACE) << status.message();
      ASSERT_FALSE(seqs_.empty());  // alone it must fit
      seqs_.push_back(std::move(one));
      // Somebody who is here has to go first.
      const auto here = std::find_if(seqs_.begin(), seqs_.end(), [](const Seq& of) {
        return !static_cast<HeldSequence&>(*of.seq).on_host;
      });
      std::rotate(seqs_.begin(), here == seqs_.end() ? seqs_.begin() : here, seqs_.end());
      ASSERT_LT(++n_put_off_, 1000u);
      return;
    }
    status = read(one);
    ASSERT_TRUE(status.is_ok()) << status.message();
    settle();
    store_->clear(one.seq.get());
  }

  uint64_t state_;
  const bool faults_;
  FakeDriver* driver_ = nullptr;
  std::unique_ptr<DeviceStore> store_;
  std::shared_ptr<const SpaceLayout> space_;
  uint8_t* memory_ = nullptr;  // sources of marks, and what was read
  uint64_t used_ = 0;
  std::vector<Seq> seqs_;
  std::vector<Expected> expected_;
  uint64_t last_mark_ = 0, n_read_ = 0, n_refused_ = 0, n_failed_ = 0, n_put_off_ = 0;
};

TEST(DeviceMovesTest, PagesHoldWhatTheTimelineWrote) {
  const bool nightly = std::getenv("KVM_NIGHTLY") != nullptr;
  uint64_t n_read = 0, n_refused = 0, n_copies = 0, n_failed = 0;
  for (uint64_t seed = 1; seed <= (nightly ? 120u : 20u); ++seed) {
    for (const bool faults : {false, true}) {
      SCOPED_TRACE("seed " + std::to_string(seed) + (faults ? " with faults" : ""));
      Marked marked(seed, seed % 3 == 0, faults);
      marked.run(nightly ? 1500 : 600);
      n_read += marked.n_read();
      n_refused += marked.n_refused();
      n_failed += marked.n_failed();
      n_copies += marked.n_copies();
      if (HasFailure()) {
        return;
      }
    }
  }
  std::printf("%llu samples read, %llu calls refused and %llu failed, %llu copies\n",
              static_cast<unsigned long long>(n_read), static_cast<unsigned long long>(n_refused),
              static_cast<unsigned long long>(n_failed), static_cast<unsigned long long>(n_copies));
  EXPECT_GT(n_read, 10000u);
  EXPECT_GT(n_refused, 100u);
  EXPECT_GT(n_failed, 100u);
  EXPECT_GT(n_copies, 500u);
}

// 32 layers in pages that lie scattered. What the calling thread asks of the driver does not depend
// on the length; what it spends besides is printed.
TEST(DeviceMovesTest, LongSequencesTakeAFewCallsOfTheDriver) {
  const uint64_t n_tokens = std::getenv("KVM_NIGHTLY") != nullptr ? 131072 : 16384;
  FakeOptions options;
  options.emulate = false;
  options.granularity_bytes = 2 << 20;
  auto owned = std::make_unique<FakeDriver>(options);
  FakeDriver* const driver = owned.get();
  auto store = DeviceStore::open(std::move(owned), {uint64_t{1} << 30, uint64_t{1} << 30}).value();
  SpaceLayout layout;
  layout.codec = CodecId::kI8;
  layout.dim = 64;
  LayerLayout layer;
  layer.n_q_heads = layer.n_kv_heads = 1;
  layer.classes = {{{0}, 0, 0, 0, 0}};
  layout.layers.assign(32, layer);
  const auto space = store->prepare(layout).value();
  const auto seq = store->create(space).value(), beside = store->create(space).value();
  while (seq->n_tokens < n_tokens) {
    const std::vector<Growth> step = {{seq.get(), 64, 0}, {beside.get(), 1, 0}};
    ASSERT_TRUE(store->begin_growth(step, nullptr).is_ok());
    store->finish_growth();
  }
  const uint64_t n_pages = n_tokens / 64;
  const auto measured = [&](const char* what, Status (DeviceStore::*move)(DeviceSequence*, uint64_t,
                                                                          uint64_t, Stream)) {
    const uint64_t calls = FakeDriver::calls_of_this_thread();
    const auto start = std::chrono::steady_clock::now();
    ASSERT_TRUE((store.get()->*move)(seq.get(), 0, UINT64_MAX, nullptr).is_ok());
    const std::chrono::duration<double, std::milli> spent =
        std::chrono::steady_clock::now() - start;
    EXPECT_LE(FakeDriver::calls_of_this_thread() - calls, 12u) << what;
    std::printf("%s of %llu pages of 32 layers: %.2f ms of the calling thread\n", what,
                static_cast<unsigned long long>(n_pages), spent.count());
    store->finish_moves();
  };
  measured("spill", &DeviceStore::spill);
  measured("fetch", &DeviceStore::fetch);
  // A gather and a copy for each chunk, either way: seven pages of 264 KiB.
  EXPECT_LE(store->figures().value().n_copies, 2 * div_up(n_pages, 7));
  driver->settle();
  EXPECT_EQ(driver->complaints(), "");
  store->clear(seq.get());
  store->clear(beside.get());
}

}  // namespace
}  // namespace kvm::device
