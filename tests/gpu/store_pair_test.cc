// SPDX-License-Identifier: Apache-2.0
// A RemoteStore and the StoreServer that keeps its books, over two fake devices that share memory.
// Whatever order streams, the mover and threads come in, whichever calls of either driver fail: a
// page that the client's stream reads holds what that stream wrote, both sides know the same pages,
// nobody ends the client, and everything is given back. Sequences may turn out shorter on the
// device than the client says (Growth::max_unsure): rows go there, and to nobody else's page, and
// what query rows see of any such length is kept. KVM_NIGHTLY=1 takes more lives.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/round.h"
#include "base/splitmix.h"
#include "device/budget.h"
#include "device/remote_store.h"
#include "device/store_server.h"
#include "device/store_wire.h"
#include "ipc/frame_channel.h"
#include "ipc/memory.h"
#include "tests/gpu/fake_driver.h"

namespace kvm::device {
namespace {

using testing::FakeDriver;
using testing::FakeOptions;
using testing::Operation;

constexpr uint64_t kPatienceNs = 60'000'000'000;

// A thread that does what it is handed, in that order, and lets go of each when it is done.
class Beside {
 public:
  Beside() : thread_([this] { run(); }) {}
  // Returns when all is done.
  ~Beside() {
    hand(nullptr);
    thread_.join();
  }
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;

  void hand(std::function<void()> what) {
    const std::lock_guard lock(mutex_);
    handed_.push_back(std::move(what));
    changed_.notify_one();
  }
  size_t n_handed() {
    const std::lock_guard lock(mutex_);
    return handed_.size();
  }

 private:
  std::function<void()> next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !handed_.empty(); });
    std::function<void()> what = std::move(handed_.front());
    handed_.pop_front();
    return what;
  }
  void run() {
    while (const std::function<void()> what = next()) {
      what();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> handed_;  // null: the end
  std::thread thread_;
};

// Three layers, each with a list of its own; the second one has a window.
SpaceLayout layout_of(size_t n_layers) {
  SpaceLayout layout;
  layout.dim = 64;
  layout.layers.resize(3);
  for (uint32_t i = 0; i < 3; ++i) {
    layout.layers[i].storage_layer = i;
    layout.layers[i].n_q_heads = layout.layers[i].n_kv_heads = 1;
    layout.layers[i].classes = {{{0}, 0, 0, 0, 0, 0}};
  }
  layout.layers[1].classes[0].n_recent = 200;
  layout.layers[2].n_q_heads = layout.layers[2].n_kv_heads = 2;
  layout.layers[2].classes[0].kv_heads = {0, 1};
  layout.layers.resize(n_layers);
  return layout;
}

// A life of a client: random steps over a pool that is too small for all of its sequences.
class Pair {
 public:
  Pair(uint64_t seed, bool faults)
      : state_(seed),
        faults_(faults),
        max_unsure_(seed % 3 == 0 ? 0 : static_cast<uint32_t>(1 + below(200))),
        device_(options_of(seed)),
        budget_(kPoolBytes) {
    auto ends = ipc::FrameChannel::make_pair().value();
    auto words =
        ipc::create_shared_memory("words", sizeof(wire::Words), ipc::PeerAccess::kReadWrite)
            .value();
    auto mapped =
        ipc::map_shared_memory(words.fd, sizeof(wire::Words), ipc::PeerAccess::kReadWrite).value();
    server_ = std::make_unique<StoreServer>(&device_, &budget_, std::move(ends.first),
                                            std::move(words.mapping));
    thread_ = std::thread([this] { why_ = server_->serve({kPoolBytes, kHostBytes}); });
    FakeOptions options = options_of(seed + 1000);
    options.at_end = [](const FakeDriver& driver) {
      EXPECT_EQ(driver.complaints(), "");
      EXPECT_EQ(driver.leftovers(), "");
    };
    auto owned = std::make_unique<FakeDriver>(options);
    driver_ = owned.get();
    store_ = RemoteStore::open(std::move(owned), std::move(ends.second), std::move(mapped),
                               {kPatienceNs, kPatienceNs, nullptr})
                 .value();
    memory_ = static_cast<uint64_t*>(::mmap(nullptr, 2 * kMemoryWords * 8, PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_TRUE(driver_->register_host(memory_, 2 * kMemoryWords * 8).is_ok());
    for (uint64_t i = 0; i < kMemoryWords; ++i) {
      memory_[i] = i;
    }
    space_ = store_->prepare(layout_of(3)).value();
  }
  ~Pair() {
    waiter_.reset();
    dropper_.reset();
    disarm();
    for (const Seq& one : seqs_) {
      store_->clear(one.seq.get());
    }
    seqs_.clear();
    space_.reset();
    EXPECT_TRUE(driver_->synchronize_device().is_ok());
    driver_->unregister_host(memory_);
    store_.reset();
    ::munmap(memory_, 2 * kMemoryWords * 8);
    thread_.join();
    EXPECT_EQ(why_.code(), KVM_ERR_DISCONNECTED) << why_.message();
    server_.reset();
    EXPECT_EQ(budget_.used(), 0u);
    EXPECT_EQ(device_.complaints(), "");
    EXPECT_EQ(device_.leftovers(), "");
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  void run(uint32_t n_steps) {
    for (uint32_t i = 0; i < n_steps && !::testing::Test::HasFailure(); ++i) {
      arm();
      const Status status = operate();
      if (!status.is_ok()) {
        const bool refused = status.code() == KVM_ERR_NO_SPACE || status.code() == KVM_ERR_BUSY ||
                             status.code() == KVM_ERR_PARTIAL;
        ASSERT_TRUE(refused || faults_) << status.message();
        n_refused_ += refused ? 1 : 0;
        n_failed_ += refused ? 0 : 1;
      }
      ASSERT_TRUE(store_->state().is_ok()) << store_->state().message();
      wait_beside();
    }
    disarm();
    while (!seqs_.empty() && !::testing::Test::HasFailure()) {
      finish_one();
    }
    if (!::testing::Test::HasFailure()) {
      check_nothing_is_left();
    }
  }

  uint64_t n_read() const { return n_read_; }
  uint64_t n_refused() const { return n_refused_; }
  uint64_t n_failed() const { return n_failed_; }
  uint64_t n_copies() const { return n_copies_; }
  uint64_t n_waits() const { return n_waits_; }
  uint64_t n_drops() const { return n_drops_; }
  uint64_t n_unsure() const { return n_unsure_; }

 private:
  static constexpr uint64_t kPoolBytes = 6 << 20, kHostBytes = 8 << 20;
  static constexpr uint64_t kMemoryWords = 1 << 18;
  // One sequence fits whatever the others have left behind; six do not.
  static constexpr uint64_t kMostTokens = 2000, kMostSequences = 6;

  // What the first and the last word of a page hold. The first is written when the page is begun:
  // where it is found in a page that was shared, it has been copied.
  struct Stamps {
    uint64_t first = 0;
    uint64_t last = 0;
  };
  struct Seq {
    SequencePtr seq;
    uint64_t n_tokens = 0;
    std::vector<std::vector<Stamps>> stamps;  // [list][block]

    void cut(uint64_t n_left) {
      n_tokens = n_left;
      for (std::vector<Stamps>& list : stamps) {
        list.resize(div_up(n_left, kPageTokens));
      }
    }
  };

  static FakeOptions options_of(uint64_t seed) {
    FakeOptions options;
    options.seed = seed;
    options.emulate = false;
    options.runs_by_itself = true;
    return options;
  }

  uint64_t below(uint64_t n) {
    state_ += kSplitMixStep;
    return splitmix64(state_) % n;
  }

  void arm() {
    constexpr Operation kOfServer[] = {Operation::kMap,   Operation::kCopy,  Operation::kRecord,
                                       Operation::kWait,  Operation::kWord,  Operation::kReserve,
                                       Operation::kEvent, Operation::kQuery, Operation::kLaunch};
    constexpr Operation kOfClient[] = {Operation::kMap, Operation::kCopy, Operation::kWord};
    if (faults_ && below(6) == 0) {
      device_.fail(kOfServer[below(std::size(kOfServer))], 1 + below(6));
    }
    if (faults_ && below(6) == 0) {
      driver_->fail(kOfClient[below(std::size(kOfClient))], 1 + below(3));
    }
  }
  void disarm() {
    for (uint32_t i = 0; i < static_cast<uint32_t>(Operation::kCount); ++i) {
      device_.fail(static_cast<Operation>(i), 0);
      driver_->fail(static_cast<Operation>(i), 0);
    }
  }

  Status operate() {
    const uint64_t chance = below(100);
    if (seqs_.empty() || (chance < 10 && seqs_.size() < kMostSequences)) {
      return create();
    }
    const size_t index = below(seqs_.size());
    DeviceSequence* const seq = seqs_[index].seq.get();
    uint64_t begin = 0, end = UINT64_MAX;
    if (below(3) == 0) {
      begin = below(500);
      end = 500 + below(500);
    }
    if (chance < 20 && seqs_.size() < kMostSequences) {
      return fork(seqs_[index]);
    }
    if (chance < 50) {
      return grow();
    }
    if (chance < 58) {
      return truncate(&seqs_[index]);
    }
    if (chance < 61) {
      store_->clear(seq);
      seqs_.erase(seqs_.begin() + static_cast<std::ptrdiff_t>(index));
      return Status::ok();
    }
    if (chance < 66) {
      return drop_beside();
    }
    if (chance < 75) {
      return store_->spill(seq, begin, end, nullptr);
    }
    return chance < 87 ? store_->fetch(seq, begin, end, nullptr) : read(seqs_[index]);
  }

  Status create() {
    KVM_TRY_ASSIGN(auto seq, store_->create(space_));
    seqs_.push_back({seq, 0, std::vector<std::vector<Stamps>>(space_->lists.size())});
    return Status::ok();
  }

  // Most cuts are short ones: behind a long one, a window misses what it had let go of.
  uint64_t length_of_cut(const Seq& one) {
    const uint64_t n_at_most[] = {5, 100, one.n_tokens};
    return one.n_tokens - below(std::min(n_at_most[below(3)], one.n_tokens) + 1);
  }

  Status fork(const Seq& parent) {
    const uint64_t n_tokens = length_of_cut(parent);
    KVM_TRY_ASSIGN(auto seq, store_->fork(*parent.seq, n_tokens));
    Seq child{seq, 0, parent.stamps};
    child.cut(n_tokens);
    seqs_.push_back(std::move(child));
    return Status::ok();
  }

  Status truncate(Seq* one) {
    const uint64_t n_left = length_of_cut(*one);
    KVM_TRY(store_->truncate(one->seq.get(), n_left));
    one->cut(n_left);
    return Status::ok();
  }

  // A step of up to two sequences.
  Status grow() {
    std::vector<Growth> growths;
    std::vector<Seq*> grown;
    for (Seq& one : seqs_) {
      if (growths.size() < 2 && below(2) == 0) {
        constexpr uint64_t kAtMost[] = {600, 70, 8};
        const uint64_t at_most = kAtMost[below(3)];
        const uint64_t n_append = below(std::min(at_most, kMostTokens - one.n_tokens) + 1);
        Growth growth = Growth::of(one.seq.get(), static_cast<uint32_t>(n_append), 0,
                                   below(8) == 0 ? 0 : max_unsure_);
        // Of more rows than it appends, a window may have dropped what the first ones see.
        const uint64_t n_least = one.n_tokens + n_append - growth.n_unsure;
        const uint64_t n_rows = below(4) == 0 ? n_append + 8 : std::min<uint64_t>(n_append, 1);
        growth.n_query = static_cast<uint32_t>(std::min(n_least, n_rows));
        growths.push_back(growth);
        grown.push_back(&one);
        n_unsure_ += growth.n_unsure != 0 ? 1 : 0;
      }
    }
    if (growths.empty()) {
      return Status::ok();
    }
    const Status begun = store_->begin_growth(growths, nullptr);
    driver_->fail(Operation::kCopy, 0);
    if (!begun.is_ok()) {
      // What it was to have the stream wait for, whatever comes next waits for.
      (void)read(*grown.front());
      return begun;
    }
    const bool undone = below(6) == 0;
    for (size_t i = 0; i < growths.size(); ++i) {
      if (undone) {
        write_in_vain(*grown[i]);
      } else {
        check_visible(growths[i], growths[i].seq->n_tokens);
        write_rows(grown[i], growths[i]);
      }
    }
    if (undone) {
      store_->undo_growth();
    } else {
      store_->finish_growth();
      for (const Growth& growth : growths) {
        check_visible(growth, growth.seq->n_tokens);
      }
    }
    return Status::ok();
  }

  // What the rows of a growth see is there, of the shortest sequence, too, and what they are
  // appended to.
  void check_visible(const Growth& growth, uint64_t n_after) {
    const uint64_t n_least = n_after - growth.n_unsure;
    for (uint32_t list = 0; list < growth.seq->lists.size(); ++list) {
      const std::vector<tiers::PageRef>& pages = growth.seq->lists[list].pages;
      ASSERT_EQ(pages.size(), div_up(n_after, kPageTokens));
      const uint64_t n_recent = space_->lists[list].n_recent;
      uint64_t begin = n_least - std::max(growth.n_append, growth.n_query);
      if (growth.n_query != 0) {
        const uint64_t end = n_least - growth.n_query + 1;
        begin = std::min(begin, n_recent == 0 || end <= n_recent ? 0 : end - n_recent);
      }
      for (uint64_t block = begin / kPageTokens; block < pages.size(); ++block) {
        ASSERT_NE(pages[block], tiers::kNoPage) << "list " << list << " block " << block;
      }
    }
  }

  // At a length that the sequence may have on the device.
  void write_rows(Seq* one, const Growth& growth) {
    if (growth.n_append == 0) {
      return;
    }
    const uint64_t n_before = one->n_tokens - below(uint64_t{growth.n_unsure} + 1);
    one->cut(one->n_tokens + growth.n_append);
    for (uint32_t list = 0; list < one->stamps.size(); ++list) {
      for (uint64_t block = n_before / kPageTokens; block < one->stamps[list].size(); ++block) {
        Stamps& stamps = one->stamps[list][block];
        if (block * kPageTokens >= n_before) {
          write(first_word(*one, list, block), stamps.first = ++last_stamp_);
        }
        write(last_word(*one, list, block), stamps.last = ++last_stamp_);
      }
    }
  }
  // Pages that are begun and given back are written to all the same, before somebody else's rows.
  void write_in_vain(const Seq& one) {
    for (uint32_t list = 0; list < one.seq->lists.size(); ++list) {
      const size_t n_blocks = one.seq->lists[list].pages.size();
      for (uint64_t block = div_up(one.n_tokens, kPageTokens); block < n_blocks; ++block) {
        write(first_word(one, list, block), ++last_stamp_);
        write(last_word(one, list, block), ++last_stamp_);
      }
    }
  }

  uint64_t* first_word(const Seq& one, uint32_t list, uint64_t block) const {
    const SlabPlace place = store_->slab(space_->lists[list].slab);
    const tiers::PageRef page = one.seq->lists[list].pages[block];
    return reinterpret_cast<uint64_t*>(place.base + tiers::page_slot(page) * place.page_bytes);
  }
  uint64_t* last_word(const Seq& one, uint32_t list, uint64_t block) const {
    const SlabPlace place = store_->slab(space_->lists[list].slab);
    return first_word(one, list, block) + place.page_bytes / 8 - 1;
  }
  void write(uint64_t* to, uint64_t stamp) {
    ASSERT_LT(stamp, kMemoryWords);
    ASSERT_TRUE(driver_->copy(to, memory_ + stamp, 8, nullptr).is_ok());
  }

  Status read(const Seq& one) {
    const Growth growth = Growth::of(one.seq.get(), 0, 0, max_unsure_);
    KVM_TRY(store_->begin_growth({&growth, 1}, nullptr));
    store_->finish_growth();
    driver_->fail(Operation::kCopy, 0);
    check_contents(one);
    KVM_TRY_ASSIGN(const SequenceStore::Usage usage, store_->usage(*one.seq));
    EXPECT_EQ(usage.n_pages, n_pages_of(*one.seq));
    EXPECT_EQ(usage.host_bytes, 0u);
    return Status::ok();
  }

  static uint64_t n_pages_of(const DeviceSequence& seq) {
    uint64_t n = 0;
    for (const DevicePageList& list : seq.lists) {
      n += list.pages.size() -
           static_cast<uint64_t>(std::count(list.pages.begin(), list.pages.end(), tiers::kNoPage));
    }
    return n;
  }
  // Whether the next token sees one of the block.
  bool is_seen(const Seq& one, uint32_t list, uint64_t block) const {
    const uint64_t n_recent = space_->lists[list].n_recent;
    return n_recent == 0 || (block + 1) * kPageTokens + n_recent > one.n_tokens + 1;
  }

  void check_contents(const Seq& one) {
    ASSERT_EQ(one.seq->n_tokens, one.n_tokens);
    std::vector<uint64_t> expected;
    uint64_t* const got = memory_ + kMemoryWords;
    for (uint32_t list = 0; list < one.stamps.size(); ++list) {
      const std::vector<tiers::PageRef>& pages = one.seq->lists[list].pages;
      ASSERT_EQ(pages.size(), one.stamps[list].size());
      for (uint64_t block = 0; block < pages.size(); ++block) {
        if (pages[block] == tiers::kNoPage) {
          ASSERT_FALSE(is_seen(one, list, block)) << "list " << list << " block " << block;
          continue;
        }
        for (const auto& [word, stamp] :
             {std::pair(first_word(one, list, block), one.stamps[list][block].first),
              std::pair(last_word(one, list, block), one.stamps[list][block].last)}) {
          ASSERT_TRUE(driver_->copy(got + expected.size(), word, 8, nullptr).is_ok());
          expected.push_back(stamp);
        }
      }
    }
    ASSERT_TRUE(driver_->synchronize_stream(nullptr).is_ok());
    ASSERT_EQ(std::vector<uint64_t>(got, got + expected.size()), expected);
    n_read_ += expected.size();
  }

  // Somebody asks for the end of moves while others use the store.
  void wait_beside() {
    if (waiter_->n_handed() != 0) {
      return;
    }
    std::vector<DeviceSequence*> all;
    for (const Seq& one : seqs_) {
      all.push_back(one.seq.get());
    }
    if (SequenceStore::Wait wait = store_->moves_of(all, true); wait != nullptr) {
      waiter_->hand([this, wait = std::move(wait)] {
        wait();
        ++n_waits_;
      });
    }
  }
  // The last owner of a layout lets go of it while others use the store.
  Status drop_beside() {
    KVM_TRY_ASSIGN(auto space, store_->prepare(layout_of(1 + below(3))));
    dropper_->hand([this, space = std::move(space)] { ++n_drops_; });
    return Status::ok();
  }

  // Reads the first sequence and lets it go; or puts it behind the others, if it does not fit yet.
  void finish_one() {
    Seq one = std::move(seqs_.front());
    seqs_.erase(seqs_.begin());
    Status status;
    for (uint32_t i = 0; i < 4; ++i) {  // moves of before say what had failed
      status = store_->fetch(one.seq.get(), 0, UINT64_MAX, nullptr);
      if (status.is_ok()) {
        status = read(one);
      }
      if (status.is_ok() || status.code() == KVM_ERR_NO_SPACE) {
        break;
      }
    }
    if (status.is_ok()) {
      store_->clear(one.seq.get());
      return;
    }
    ASSERT_EQ(status.code(), KVM_ERR_NO_SPACE) << status.message();
    ASSERT_FALSE(seqs_.empty());  // alone it must fit
    ASSERT_LT(++n_put_off_, 1000u);
    (void)store_->spill(one.seq.get(), 0, UINT64_MAX, nullptr);
    seqs_.push_back(std::move(one));
  }

  void check_nothing_is_left() {
    // Pages that are still copied are given back behind that.
    SequenceStore::Figures figures;
    for (uint32_t i = 0; i < 10'000 && (i == 0 || figures.n_pages != 0); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      store_->finish_moves();
      figures = store_->figures().value();
    }
    EXPECT_EQ(figures.n_pages, 0u);
    EXPECT_EQ(figures.n_spilled, 0u);
    n_copies_ = figures.n_copies;
  }

  uint64_t state_;
  const bool faults_;
  const uint32_t max_unsure_;  // of most growths
  FakeDriver device_;          // the server's
  Budget budget_;
  std::unique_ptr<StoreServer> server_;
  std::thread thread_;
  Status why_;
  FakeDriver* driver_ = nullptr;  // the client's
  std::unique_ptr<RemoteStore> store_;
  std::shared_ptr<const SpaceLayout> space_;
  uint64_t* memory_ = nullptr;  // every stamp at its index, and then what was read
  std::vector<Seq> seqs_;
  uint64_t last_stamp_ = 0;
  uint64_t n_read_ = 0, n_refused_ = 0, n_failed_ = 0, n_copies_ = 0, n_put_off_ = 0;
  uint64_t n_unsure_ = 0;  // growths of sequences that may have been shorter
  std::atomic<uint64_t> n_waits_{0}, n_drops_{0};
  std::unique_ptr<Beside> waiter_ = std::make_unique<Beside>();
  std::unique_ptr<Beside> dropper_ = std::make_unique<Beside>();
};

size_t n_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

TEST(StorePairTest, PagesHoldWhatTheClientWrote) {
  const uint64_t n_lives = std::getenv("KVM_NIGHTLY") != nullptr ? 200 : 10;
  const size_t n_open = n_descriptors();
  uint64_t n_read = 0, n_refused = 0, n_failed = 0, n_copies = 0, n_waits = 0, n_drops = 0;
  uint64_t n_unsure = 0;
  for (uint64_t seed = 1; seed <= n_lives; ++seed) {
    const bool faults = seed % 2 == 0;
    SCOPED_TRACE("seed " + std::to_string(seed) + (faults ? " with faults" : ""));
    {
      Pair pair(seed, faults);
      pair.run(400);
      n_read += pair.n_read();
      n_refused += pair.n_refused();
      n_failed += pair.n_failed();
      n_copies += pair.n_copies();
      n_waits += pair.n_waits();
      n_drops += pair.n_drops();
      n_unsure += pair.n_unsure();
    }
    EXPECT_EQ(n_descriptors(), n_open);
    if (HasFailure()) {
      return;
    }
  }
  std::printf(
      "%llu words read, %llu calls refused and %llu failed, %llu copies, %llu waits and %llu "
      "layouts dropped beside\n",
      static_cast<unsigned long long>(n_read), static_cast<unsigned long long>(n_refused),
      static_cast<unsigned long long>(n_failed), static_cast<unsigned long long>(n_copies),
      static_cast<unsigned long long>(n_waits), static_cast<unsigned long long>(n_drops));
  EXPECT_GT(n_read, 5000u);
  EXPECT_GT(n_refused, 50u);
  EXPECT_GT(n_failed, 10u);
  EXPECT_GT(n_copies, 50u);
  EXPECT_GT(n_waits, 0u);
  EXPECT_GT(n_drops, 0u);
  EXPECT_GT(n_unsure, 50u);
}

}  // namespace
}  // namespace kvm::device
