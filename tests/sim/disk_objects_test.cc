// SPDX-License-Identifier: Apache-2.0
// Objects of the disk tier over a disk whose power fails, and which fails as its seed says. What
// was answered is there after any crash, byte for byte, or is reported as lost or damaged; what was
// under way is there whole or not at all; nothing is there that nobody put; when all objects are
// gone, nothing is used.
//
// KVM_DISK_SEED=n runs seed n, KVM_DISK_SEEDS=n so many from there on, or from 0.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/common/environment.h"
#include "tests/common/forwarded_disk.h"
#include "tests/common/slow_page.h"
#include "tiers/disk/disk_tier.h"
#include "tiers/disk/simulated_disk.h"
#include "tiers/object_store.h"

namespace kvm::testing {
namespace {

using tiers::DiskFault;
using tiers::DiskTier;
using tiers::DiskTierOptions;
using tiers::ObjectInfo;
using tiers::ObjectRequest;
using tiers::PlaceId;
using tiers::SimulatedDisk;
using tiers::SimulatedDiskOptions;

constexpr uint32_t kMaxTurns = 20'000;

struct Request final : ObjectRequest {
  void on_done() noexcept override { is_done = true; }
  bool is_done = false;
};

struct Tally {
  uint64_t n_put = 0;
  uint64_t n_failed = 0;
  uint64_t n_crashes = 0;
  uint64_t n_found = 0;      // objects that were there after one
  uint64_t n_undecided = 0;  // of these, that were under way
  uint64_t n_lost = 0;       // that were reported so
  uint64_t n_moved = 0;
};

// What an object holds follows from its mark.
struct Content {
  uint32_t mark = 0;
  std::vector<std::pair<uint32_t, uint32_t>> pages;  // marks and sizes

  std::string label() const { return "label " + std::to_string(mark); }
  std::vector<std::byte> body() const {
    return mark % 5 == 0 ? std::vector<std::byte>()
                         : marked_bytes(mark, 1 + mark * 977 % (mark % 11 == 0 ? 300'000 : 20'000));
  }
};

class Life {
 public:
  enum class Kind { kSound, kFaulty, kLying };

  Life(uint64_t seed, Kind kind) : kind_(kind), generator_(seed) {
    options_ = {.directories = {"one", "two"},
                .capacity_bytes = (4 + below(6)) * DiskTier::kMinSegmentBytes,
                .segment_bytes = DiskTier::kMinSegmentBytes,
                .transfer_bytes = 64 << 10,
                .queue_depth = 2 + below(7),
                .is_manual = true};
    SimulatedDiskOptions disk{.io = DiskTier::io_options(options_).value(),
                              .seed = seed,
                              .max_latency = below(6),
                              .can_crash = true};
    if (kind == Kind::kFaulty) {
      // What a disk admits.
      for (const DiskFault fault : {DiskFault::kReadError, DiskFault::kWriteError,
                                    DiskFault::kNoSpace, DiskFault::kAgain, DiskFault::kShort}) {
        disk.of(fault) = below(2) * below(60'000);
      }
    } else if (kind == Kind::kLying) {
      // And what it does not.
      for (uint32_t& rate : disk.per_million) {
        rate = below(2) * below(20'000);
      }
    }
    disk_ = std::make_unique<SimulatedDisk>(disk);
  }

  void live(Tally* tally) {
    const uint32_t n_runs = 2 + below(4);
    for (uint32_t run = 0; run < n_runs && !::testing::Test::HasFailure(); ++run) {
      if (!open(tally)) {
        return;
      }
      for (uint32_t step = 0; step < 25 && !::testing::Test::HasFailure(); ++step) {
        begin_some();
        for (uint32_t n = below(20); n != 0; --n) {
          tier_->turn();
        }
        take_ended(tally);
        release_some();
      }
      tally->n_moved += tier_->stats().n_moved;
      if (below(3) == 0) {
        close(tally);
      } else {
        crash(tally);
      }
    }
    disk_->heal();
    if (open(tally)) {
      remove_all(tally);
    }
  }

 private:
  struct Held {
    PlaceId place;
    uint32_t mark;
    uint32_t size;
  };
  struct Put {
    std::unique_ptr<Request> request;
    std::optional<Content> content;  // none: a removal
  };

  uint32_t below(uint32_t n) { return static_cast<uint32_t>(generator_() % n); }
  tiers::ObjectStore& objects() { return *tier_->objects(); }

  // False: what is there cannot be opened, which is right of a disk that lies.
  bool open(Tally* tally) {
    const auto try_open = [&] {
      return DiskTier::over(std::make_unique<ForwardedDisk>(disk_.get()), options_);
    };
    Result<std::unique_ptr<DiskTier>> opened = try_open();
    for (int i = 0; i < 3 && !opened.is_ok() && opened.status().code() == KVM_ERR_IO; ++i) {
      opened = try_open();
    }
    if (kind_ == Kind::kFaulty && !opened.is_ok()) {
      EXPECT_EQ(opened.status().code(), KVM_ERR_IO) << opened.status().message();
      disk_->heal();
      opened = try_open();
    }
    if (!opened.is_ok()) {
      EXPECT_EQ(kind_, Kind::kLying) << opened.status().message();
      ++tally->n_lost;
      return false;
    }
    tier_ = std::move(opened).value();
    check(tally);
    return true;
  }

  // What there is after a start.
  void check(Tally* tally) {
    std::map<std::string, ObjectInfo> there;
    std::string after;
    for (;;) {
      const std::vector<ObjectInfo> some = objects().list(after, 1 + below(3));
      if (some.empty()) {
        break;
      }
      for (const ObjectInfo& info : some) {
        EXPECT_TRUE(there.emplace(info.key, info).second);
        after = info.key;
      }
    }
    std::set<std::string> keys;
    for (const auto& [key, contents] : may_be_) {
      keys.insert(key);
    }
    for (const auto& [key, info] : there) {
      EXPECT_TRUE(keys.contains(key)) << key << ": nobody put it";
    }
    const bool is_damaged = tier_->objects()->recovery().n_damaged_blocks != 0;
    for (const std::string& key : keys) {
      const auto it = there.find(key);
      std::vector<std::optional<Content>>& may = may_be_[key];
      if (it == there.end()) {
        const bool may_not =
            std::any_of(may.begin(), may.end(), [](const auto& one) { return !one.has_value(); });
        EXPECT_TRUE(may_not || kind_ == Kind::kLying) << key << " is gone";
        tally->n_lost += may_not ? 0 : 1;
        may = {std::nullopt};
        continue;
      }
      ++tally->n_found;
      tally->n_undecided += may.size() > 1 ? 1 : 0;
      Request get;
      get.kind = ObjectRequest::Kind::kGet;
      get.key = key;
      run(&get);
      if (!get.status.is_ok()) {
        EXPECT_NE(kind_, Kind::kSound) << key << ": " << get.status.message();
        ++tally->n_lost;
        continue;
      }
      const auto is_this = [&](const std::optional<Content>& one) {
        return one.has_value() && one->label() == it->second.label;
      };
      const auto found = std::find_if(may.begin(), may.end(), is_this);
      // A disk that lies may have an older one.
      if (found == may.end() && kind_ == Kind::kLying) {
        ++tally->n_lost;
        give_back(get);
        continue;
      }
      if (found == may.end()) {
        ADD_FAILURE() << key << " is another one: " << it->second.label << ", damaged "
                      << is_damaged;
        return;
      }
      const Content content = **found;
      EXPECT_EQ(get.body, content.body()) << key;
      if (get.pages.size() != content.pages.size()) {
        ADD_FAILURE() << key << " has " << get.pages.size() << " pages";
        return;
      }
      for (size_t i = 0; i < get.pages.size(); ++i) {
        EXPECT_EQ(get.pages[i].size_bytes, content.pages[i].second);
        check_page(get.pages[i].place, content.pages[i].first, content.pages[i].second);
      }
      give_back(get);
      may = {content};
    }
  }

  void check_page(PlaceId place, uint32_t mark, uint32_t size) {
    SlowPage page(place, size);
    tiers::Transfer* const transfer = &page;
    tier_->submit({&transfer, 1});
    for (uint32_t i = 0; i < kMaxTurns && !page.is_done.load(); ++i) {
      tier_->turn();
    }
    ASSERT_TRUE(page.is_done.load());
    if (page.status.is_ok()) {
      EXPECT_TRUE(page.holds(mark)) << "a page of mark " << mark;
    } else {
      EXPECT_NE(kind_, Kind::kSound) << page.status.message();
    }
  }

  void give_back(const Request& get) {
    for (const ObjectRequest::Page& page : get.pages) {
      tier_->release(page.place);
    }
  }

  void run(Request* request) {
    objects().submit(request);
    for (uint32_t i = 0; i < kMaxTurns && !request->is_done; ++i) {
      tier_->turn();
    }
    ASSERT_TRUE(request->is_done);
  }

  void begin_some() {
    std::vector<tiers::Transfer*> transfers;
    for (uint32_t n = below(4); n != 0; --n) {
      const uint32_t size = below(8) == 0 ? 100'000 : 64 * (1 + below(256));
      pages_.push_back(std::make_unique<SlowPage>(next_mark_, size));
      marks_.push_back(next_mark_++);
      transfers.push_back(pages_.back().get());
    }
    tier_->submit(transfers);
    for (uint32_t n = below(3); n != 0; --n) {
      Put put;
      put.request = std::make_unique<Request>();
      put.request->key = "key " + std::to_string(below(6));
      std::vector<std::optional<Content>>& may = may_be_[put.request->key];
      if (may.empty()) {
        may = {std::nullopt};
      }
      if (below(4) == 0) {
        put.request->kind = ObjectRequest::Kind::kRemove;
      } else {
        put.request->kind = ObjectRequest::Kind::kPut;
        put.content = Content{.mark = next_mark_++, .pages = {}};
        put.request->label = put.content->label();
        put.request->body = put.content->body();
        for (uint32_t i = below(6); i != 0 && !held_.empty(); --i) {
          const Held& held = held_[below(static_cast<uint32_t>(held_.size()))];
          put.content->pages.emplace_back(held.mark, held.size);
          put.request->pages.push_back({held.place, held.size});
          tier_->add_ref(held.place);
        }
      }
      may.push_back(put.content);
      objects().submit(put.request.get());
      puts_.push_back(std::move(put));
    }
  }

  void take_ended(Tally* tally) {
    for (size_t i = 0; i < pages_.size();) {
      if (!pages_[i]->is_done.load()) {
        ++i;
        continue;
      }
      if (pages_[i]->status.is_ok()) {
        held_.push_back({pages_[i]->place, marks_[i], pages_[i]->size_bytes});
      }
      pages_.erase(pages_.begin() + static_cast<ptrdiff_t>(i));
      marks_.erase(marks_.begin() + static_cast<ptrdiff_t>(i));
    }
    for (auto it = puts_.begin(); it != puts_.end();) {
      if (!it->request->is_done) {
        ++it;
        continue;
      }
      const Request& request = *it->request;
      give_back(request);
      std::vector<std::optional<Content>>& may = may_be_[request.key];
      const bool is_ok = request.status.is_ok() || request.status.code() == KVM_ERR_NOT_FOUND;
      if (is_ok) {
        ++tally->n_put;
        // What was before it may not be any more; what was begun after it, may.
        const auto is_this = [&](const std::optional<Content>& one) {
          return one.has_value() == it->content.has_value() &&
                 (!one.has_value() || one->mark == it->content->mark);
        };
        // Removals look alike: the first of them that is left.
        auto found = std::find_if(may.begin() + 1, may.end(), is_this);
        EXPECT_NE(found, may.end());
        may.erase(may.begin(), found);
      } else {
        ++tally->n_failed;
        EXPECT_NE(request.status.code(), KVM_ERR_CORRUPT);
        if (kind_ == Kind::kSound) {
          EXPECT_EQ(request.status.code(), KVM_ERR_NO_SPACE) << request.status.message();
        }
        // After a failed one the one before is there; after a crash it may be this one.
      }
      it = puts_.erase(it);
    }
  }

  void release_some() {
    for (uint32_t n = below(4); n != 0 && !held_.empty(); --n) {
      const uint32_t index = below(static_cast<uint32_t>(held_.size()));
      tier_->release(held_[index].place);
      held_[index] = held_.back();
      held_.pop_back();
    }
  }

  void drain(Tally* tally) {
    for (uint32_t i = 0; i < kMaxTurns && tier_->turn(); ++i) {
    }
    take_ended(tally);
    EXPECT_TRUE(pages_.empty());
    EXPECT_TRUE(puts_.empty());
    for (const Held& held : held_) {
      tier_->release(held.place);
    }
    held_.clear();
  }

  void close(Tally* tally) {
    drain(tally);
    tier_.reset();
    // The power may fail later, too.
    if (below(2) == 0) {
      disk_->crash();
    }
  }

  void crash(Tally* tally) {
    ++tally->n_crashes;
    take_ended(tally);
    disk_->forget_in_flight();
    tier_->abandon();
    tier_.reset();
    if (below(3) != 0) {
      disk_->crash();
    }
    pages_.clear();
    marks_.clear();
    puts_.clear();
    held_.clear();
  }

  void remove_all(Tally* tally) {
    for (const auto& [key, contents] : may_be_) {
      Request request;
      request.kind = ObjectRequest::Kind::kRemove;
      request.key = key;
      run(&request);
      EXPECT_TRUE(request.status.is_ok() || request.status.code() == KVM_ERR_NOT_FOUND)
          << request.status.message();
    }
    drain(tally);
    EXPECT_TRUE(objects().list("", 100).empty());
    EXPECT_EQ(tier_->used_bytes(), 0u);
    tier_.reset();
  }

  const Kind kind_;
  std::mt19937_64 generator_;
  DiskTierOptions options_;
  std::unique_ptr<SimulatedDisk> disk_;
  std::unique_ptr<DiskTier> tier_;
  std::vector<std::unique_ptr<SlowPage>> pages_;  // being written
  std::vector<uint32_t> marks_;
  std::vector<Held> held_;
  std::list<Put> puts_;  // that have not ended
  // What a key may hold: what was answered last, and then what was begun since.
  std::map<std::string, std::vector<std::optional<Content>>> may_be_;
  uint32_t next_mark_ = 1;
};

class DiskObjects : public ::testing::TestWithParam<Life::Kind> {};

TEST_P(DiskObjects, AreThereAfterAnyCrashOrReportedAsLost) {
  const bool is_one = std::getenv("KVM_DISK_SEED") != nullptr;
  const uint64_t first = number_from_environment("KVM_DISK_SEED", 0);
  const uint64_t n = number_from_environment("KVM_DISK_SEEDS", is_one ? 1 : by_day(200, 1000));
  Tally tally;
  for (uint64_t seed = first; seed < first + n; ++seed) {
    SCOPED_TRACE("KVM_DISK_SEED=" + std::to_string(seed));
    Life(seed, GetParam()).live(&tally);
    if (HasFailure()) {
      return;
    }
  }
  std::printf(
      "%llu seeds: %llu answered, %llu failed, %llu crashes, %llu objects found, %llu of "
      "them under way, %llu reported as lost, %llu pages moved\n",
      static_cast<unsigned long long>(n), static_cast<unsigned long long>(tally.n_put),
      static_cast<unsigned long long>(tally.n_failed),
      static_cast<unsigned long long>(tally.n_crashes),
      static_cast<unsigned long long>(tally.n_found),
      static_cast<unsigned long long>(tally.n_undecided),
      static_cast<unsigned long long>(tally.n_lost),
      static_cast<unsigned long long>(tally.n_moved));
  if (n >= 150) {
    EXPECT_GT(tally.n_put, 10 * n);
    EXPECT_GT(tally.n_crashes, n);
    EXPECT_GT(tally.n_found, n);
    EXPECT_GT(tally.n_moved, n);
  }
}

INSTANTIATE_TEST_SUITE_P(Disks, DiskObjects,
                         ::testing::Values(Life::Kind::kSound, Life::Kind::kFaulty,
                                           Life::Kind::kLying),
                         [](const auto& about) {
                           return std::string(about.param == Life::Kind::kSound    ? "Sound"
                                              : about.param == Life::Kind::kFaulty ? "Faulty"
                                                                                   : "Lying");
                         });

}  // namespace
}  // namespace kvm::testing
