// SPDX-License-Identifier: Apache-2.0
// What the driver of an engine does between the calls of kvm.h, while memory is refused: several
// clients, requests that wait for each other, sequences that are given up in parts, audits.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "base/splitmix.h"
#include "tests/common/items.h"
#include "tests/faults/faults.h"
#include "tiers/simulated/simulated_tier.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kDim = 8;
constexpr const char* kSpaceName = "faults";
// Enough for an attend that the driver does not do at once.
constexpr uint32_t kJobTokens = 8300;
// Two windows.
constexpr uint32_t kAwayTokens = 2200;

// A ring of 16 MiB, and an extent: 32 pages.
constexpr uint64_t kNarrowBytes = 37 << 19;
constexpr uint32_t kNarrowDim = 128;
constexpr uint32_t kNarrowTokens = 1000;
constexpr uint32_t kWaitingTokens = 1250;

// An engine with two clients, whose driver is the test's thread and the only one that computes.
class World {
 public:
  explicit World(uint64_t audit_every = 0, bool has_space = true, bool is_narrow = false)
      : tier_({.is_manual = true}),
        codec_(is_narrow ? KVM_CODEC_F32 : 0),
        dim_(is_narrow ? kNarrowDim : kDim) {
    engine::EngineOptions options;
    options.slow_tier = &tier_;
    options.n_threads = 1;
    options.host_capacity_bytes = is_narrow ? kNarrowBytes : 128 << 20;
    options.default_quota_bytes = 128 << 20;
    options.movement.high = 0.95;
    options.movement.low = 0.92;
    options.audit_every = audit_every;
    engine_ = std::move(engine::Engine::open(options)).value();
    clients_[0] = engine_->add_client({});
    clients_[1] = engine_->add_client({});
    q_.assign(dim_, 1.0f);
    o_.assign(dim_, 0.0f);
    spoiled_.assign(dim_, std::numeric_limits<float>::quiet_NaN());
    EXPECT_TRUE(!has_space || enter_space());
  }
  // Asks for the space. Returns whether there was memory for it.
  bool enter_space() {
    const InProduct in_product;
    try {
      SpaceSpec spec;
      spec.name = kSpaceName;
      spec.params.struct_size = sizeof(kvm_space_params);
      spec.params.n_layers = 1;
      spec.params.n_q_heads = 1;
      spec.params.head_dim_k = dim_;
      spec.params.codec = codec_;
      kvm_index_params index{};
      index.kind = KVM_INDEX_SKETCH;
      index.min_tokens = 256;
      spec.indexes = {index};
      const Result<kvm_space_id> space = engine_->register_space(spec);
      if (!space.is_ok()) {
        return false;
      }
      space_ = space.value();
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  bool has_space() const { return engine_->find_space(kSpaceName).is_ok(); }

  kvm_seq_id create(uint32_t n_tokens) {
    SeqRequest request;
    request.space = space_;
    submit(std::move(request));
    drive();
    const kvm_seq_id seq = results_.back().seq;
    std::vector<float> k(size_t{n_tokens} * dim_);
    uint64_t at = 0;
    for (float& x : k) {
      at += kSplitMixStep;
      x = static_cast<float>(static_cast<int64_t>(splitmix64(at))) * 0x1p-63f;
    }
    StepRequest step;
    step.append = true;
    step.space = space_;
    step.items = {item_of(seq, n_tokens, 0)};
    step.k = step.v = view(&k);
    submit(std::move(step));
    drive();
    EXPECT_TRUE(results_.back().status.is_ok()) << results_.back().status.message();
    return seq;
  }
  StepRequest attend(kvm_seq_id seq, uint32_t mode = KVM_MODE_EXACT) {
    StepRequest step;
    step.attend = true;
    step.space = space_;
    step.items = {item_of(seq, 0, 1)};
    step.mode = mode;
    step.budget = mode == KVM_MODE_SAMPLED ? 32 : 0;
    step.q = view(&q_);
    step.o = view(&o_);
    return step;
  }
  // Appends a key that is no number, and attends to it: what cannot be approximated is answered by
  // a second job.
  StepRequest append_spoiled(kvm_seq_id seq, uint32_t mode) {
    StepRequest step = attend(seq, mode);
    step.append = true;
    step.items = {item_of(seq, 1, 1)};
    step.k = view(&spoiled_);
    step.v = view(&q_);
    return step;
  }
  StepRequest append_one(const std::vector<kvm_seq_id>& seqs) {
    StepRequest step;
    step.append = true;
    step.space = space_;
    for (const kvm_seq_id seq : seqs) {
      step.items.push_back(item_of(seq, 1, 0));
    }
    step.k = step.v = view(&q_);
    return step;
  }
  // The same number in every row.
  StepRequest append_many(kvm_seq_id seq, uint32_t n_tokens) {
    many_.assign(size_t{n_tokens} * dim_, 0.5f);
    StepRequest step;
    step.append = true;
    step.space = space_;
    step.items = {item_of(seq, n_tokens, 0)};
    step.k = step.v = view(&many_);
    return step;
  }
  static SeqRequest drop(kvm_seq_id seq, uint64_t begin, uint64_t end) {
    SeqRequest request = verb(SeqVerb::kDrop, seq);
    request.range = {.begin = begin, .end = end};
    return request;
  }
  // As append_many, of tokens that were dropped.
  StepRequest restore(kvm_seq_id seq, uint64_t position, uint32_t n_tokens) {
    StepRequest step = append_many(seq, n_tokens);
    step.items[0].append_position = position;
    step.items[0].flags = KVM_ITEM_RESTORE;
    return step;
  }
  // What the last request made; nothing: no sequence.
  kvm_seq_id last_seq() const { return results_[n_submitted_ - 1].seq; }
  static SeqRequest verb(SeqVerb which, kvm_seq_id seq, uint64_t n_tokens = 0) {
    SeqRequest request;
    request.verb = which;
    request.seq = seq;
    request.n_tokens = n_tokens;
    return request;
  }
  template <typename What>
  void submit(What what) {
    const size_t i = n_submitted_++;
    results_.resize(n_submitted_);
    results_.reserve(64);
    const InProduct in_product;
    engine_->submit(clients_[0], {1, i}, std::move(what), [this, i](RequestResult&& result) {
      results_[i] = std::move(result);
      ++n_done_;
    });
  }
  // Until all is answered, and nothing is on its way.
  void drive() {
    const InProduct in_product;
    const auto is_busy = [this] {
      return n_done_ < n_submitted_ || engine_->is_sending() || engine_->is_fetching() ||
             tier_.n_waiting() != 0;
    };
    for (uint32_t i = 0; i < 20'000 && is_busy(); ++i) {
      tier_.finish_all();
      if (engine_->poll() == 0 && !engine_->work()) {
        engine_->wait(1'000'000);
      }
    }
  }
  // Returns whether there was memory to begin.
  bool send_away(kvm_seq_id seq) {
    const InProduct in_product;
    return engine_->send_away(seq).is_ok();
  }
  bool prefetch(kvm_seq_id seq) {
    const InProduct in_product;
    try {
      return engine_->prefetch(seq).is_ok();
    } catch (const std::bad_alloc&) {
      return false;
    }
  }
  engine::MovementStats moved() const { return engine_->movement_stats(); }
  void check_accounts() const { engine_->check_accounts(); }
  uint64_t n_pages_away() const { return engine_->n_pages_away(); }
  uint64_t tier_bytes() const { return tier_.used_bytes(); }
  // Removes the client that submits, and waits until it is gone.
  void leave() {
    const InProduct in_product;
    engine_->remove_client(clients_[0], [this] { is_gone_ = true; });
    for (uint32_t i = 0; i < 20'000 && !is_gone_; ++i) {
      tier_.finish_all();
      if (engine_->poll() == 0 && !engine_->work() && !is_gone_) {
        engine_->wait(1'000'000);
      }
    }
  }
  // A client comes and goes. Returns whether there was memory for it.
  bool visit() {
    const InProduct in_product;
    try {
      engine_->remove_client(engine_->add_client({}), [] {});
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }
  // Does what a driver does that has time, until nothing is left of it.
  void rest() {
    const InProduct in_product;
    for (uint32_t i = 0; i < 1'000 && engine_->housekeep() != UINT64_MAX; ++i) {
      engine_->work();
      engine_->poll();
    }
  }
  bool is_gone() const { return is_gone_; }
  float output() const { return o_[0]; }
  size_t n_left() const { return n_submitted_ - n_done_; }
  kvm_status status(size_t nth_last) const {
    return results_[n_submitted_ - 1 - nth_last].status.code();
  }
  kvm_stats stats() const { return engine_->stats(); }

 private:
  static TensorView view(std::vector<float>* values) {
    return {.data = values->data(),
            .size_bytes = values->size() * sizeof(float),
            .dtype = KVM_DTYPE_F32};
  }

  tiers::SimulatedTier tier_;
  const uint32_t codec_;
  const uint32_t dim_;
  std::unique_ptr<engine::Engine> engine_;
  engine::ClientId clients_[2] = {};
  kvm_space_id space_ = 0;
  std::vector<float> q_, o_, spoiled_, many_;
  bool is_gone_ = false;
  std::vector<RequestResult> results_;
  size_t n_submitted_ = 0;
  size_t n_done_ = 0;
};

// Refuses the first allocation of `scenario`, the second, ..., until one in which none was; each
// once, and with all that follow.
void refuse_each(const std::function<std::unique_ptr<World>()>& prepare,
                 const std::function<void(World*)>& scenario,
                 const std::function<void(World*)>& check) {
  for (const Until until : {Until::kOnce, Until::kForEver}) {
    for (uint64_t n = 1;; ++n) {
      SCOPED_TRACE("allocation " + std::to_string(n) + (until == Until::kOnce ? "" : " and on"));
      const std::unique_ptr<World> world = prepare();
      arm(Refused::kAllocation, n, until, Of::kThisThread);
      scenario(world.get());
      const Seen seen = disarm();
      check(world.get());
      if (seen.n_refused == 0) {
        EXPECT_GT(n, 1u);
        break;
      }
      ASSERT_LT(n, 2000u);
    }
  }
}

// The client has gone, with what it had in the slow tier.
void expect_left_nothing(const World& world) {
  EXPECT_TRUE(world.is_gone());
  EXPECT_EQ(world.n_pages_away(), 0u);
  EXPECT_EQ(world.tier_bytes(), 0u);
}

// A sequence is what it was; then its client goes.
void expect_intact(World* world, kvm_seq_id seq, float expected) {
  world->submit(world->attend(seq));
  world->drive();
  EXPECT_EQ(world->status(0), KVM_OK);
  EXPECT_EQ(world->output(), expected);
  world->leave();
  expect_left_nothing(*world);
}

bool is_answer(kvm_status status) { return status == KVM_OK || status == KVM_ERR_NO_MEMORY; }

// Forks share segments and pages: what is dropped and restored is copied first.
TEST(EngineFaults, DroppedTokensComeBackOrStayAway) {
  constexpr uint32_t kTokens = 16384;
  kvm_seq_id seq = 0;
  kvm_seq_id parent = 0;
  float expected = 0;
  refuse_each(
      [&] {
        auto world = std::make_unique<World>();
        parent = world->create(kTokens);
        world->submit(world->attend(parent));
        world->drive();
        expected = world->output();
        world->submit(World::verb(SeqVerb::kFork, parent, KVM_POSITION_END));
        world->drive();
        seq = world->last_seq();
        return world;
      },
      [&](World* world) {
        world->submit(World::drop(seq, 640, 9600));
        world->drive();
        world->submit(world->restore(seq, 1280, 1280));
        world->drive();
        world->submit(world->restore(seq, 640, 8960));
        world->drive();
      },
      [&](World* world) {
        ASSERT_EQ(world->n_left(), 0u);
        for (size_t i = 0; i < 3; ++i) {
          EXPECT_TRUE(is_answer(world->status(i))) << i << ": " << world->status(i);
        }
        world->check_accounts();
        world->submit(world->restore(seq, 640, 8960));
        world->submit(world->attend(seq));
        world->drive();
        EXPECT_EQ(world->status(1), KVM_OK);
        EXPECT_EQ(world->status(0), KVM_OK);
        expect_intact(world, parent, expected);
      });
}

// The first attend is a job, so that the others wait for their turns.
TEST(EngineFaults, RequestsBehindOthersAreAnswered) {
  kvm_seq_id seq = 0;
  refuse_each(
      [&] {
        auto world = std::make_unique<World>();
        seq = world->create(kJobTokens);
        return world;
      },
      [&](World* world) {
        world->submit(world->attend(seq));
        world->submit(World::verb(SeqVerb::kFork, seq, 8000));
        world->submit(world->append_spoiled(seq, KVM_MODE_SAMPLED));
        world->submit(World::verb(SeqVerb::kTruncate, seq, 500));
        world->submit(world->attend(seq, KVM_MODE_SAMPLED));
        world->submit(World::verb(SeqVerb::kFree, seq));
        world->submit(world->attend(seq));
        world->drive();
      },
      [](World* world) {
        ASSERT_EQ(world->n_left(), 0u);
        for (size_t i = 2; i < 7; ++i) {
          EXPECT_TRUE(is_answer(world->status(i))) << i << ": " << world->status(i);
        }
        const kvm_status freed = world->status(1);
        const kvm_status behind = world->status(0);
        EXPECT_TRUE(is_answer(freed)) << freed;
        EXPECT_TRUE(behind == KVM_ERR_NO_MEMORY ||
                    behind == (freed == KVM_OK ? KVM_ERR_STALE : KVM_OK))
            << behind;
      });
}

TEST(EngineFaults, ClientsLeaveWithRequestsBehindOthers) {
  kvm_seq_id seq = 0;
  refuse_each(
      [&] {
        auto world = std::make_unique<World>();
        seq = world->create(kJobTokens);
        return world;
      },
      [&](World* world) {
        world->submit(world->append_spoiled(seq, KVM_MODE_SAMPLED));
        world->submit(world->attend(seq));
        world->submit(World::verb(SeqVerb::kFree, seq));
        world->submit(world->attend(seq));
        world->leave();
      },
      [](World* world) {
        EXPECT_TRUE(world->is_gone());
        EXPECT_EQ(world->stats().n_sequences, 0u);
        EXPECT_EQ(world->stats().host_page_bytes, 0u);
      });
}

// More pages than go at a time: what begins a part may fail, what goes on may not.
TEST(EngineFaults, SequencesThatGoInPartsGoToTheirEnd) {
  constexpr uint32_t kTokens = 5000 * 64;
  for (const SeqVerb verb : {SeqVerb::kTruncate, SeqVerb::kFree}) {
    World world;
    const kvm_seq_id seq = world.create(kTokens);
    world.submit(World::verb(verb, seq, 100));
    world.submit(world.attend(seq));
    ASSERT_EQ(world.n_left(), 2u) << "there is one part only";
    arm(Refused::kAllocation, 1, Until::kForEver, Of::kThisThread);
    world.drive();
    const Seen seen = disarm();
    EXPECT_TRUE(verb == SeqVerb::kTruncate || seen.n_refused != 0) << "nobody asked for memory";
    ASSERT_EQ(world.n_left(), 0u);
    EXPECT_EQ(world.status(1), KVM_OK);
    EXPECT_EQ(world.stats().n_sequences, verb == SeqVerb::kFree ? 0u : 1u);
  }
}

// On its way a sequence may be refused, and is then where it was; it is never between two.
TEST(EngineFaults, SequencesOnTheirWayArriveOrStay) {
  constexpr uint32_t kTokens = 5000 * 64;
  kvm_seq_id seq = 0;
  refuse_each(
      [&] {
        auto world = std::make_unique<World>();
        seq = world->create(kTokens);
        return world;
      },
      [&](World* world) {
        world->submit(World::verb(SeqVerb::kPublish, seq));
        world->submit(World::verb(SeqVerb::kTake, seq));
        world->submit(World::verb(SeqVerb::kPublish, seq));
        world->drive();
      },
      [&](World* world) {
        ASSERT_EQ(world->n_left(), 0u);
        // The last is refused where the second was, for it is the library's then.
        const kvm_status last = world->status(0);
        EXPECT_TRUE(is_answer(last) ||
                    (last == KVM_ERR_PERMISSION && world->status(1) == KVM_ERR_NO_MEMORY))
            << last;
        EXPECT_TRUE(is_answer(world->status(1))) << world->status(1);
        EXPECT_TRUE(is_answer(world->status(2))) << world->status(2);
        world->submit(World::verb(SeqVerb::kTake, seq));
        world->submit(World::verb(SeqVerb::kTruncate, seq, 100));
        world->submit(World::verb(SeqVerb::kFree, seq));
        world->drive();
        for (size_t i = 0; i < 3; ++i) {
          EXPECT_EQ(world->status(i), KVM_OK) << i;
        }
        EXPECT_EQ(world->stats().host_page_bytes, 0u);
      });
}

TEST(EngineFaults, AnEngineGoesWithWhatIsPublished) {
  auto world = std::make_unique<World>();
  for (int i = 0; i < 3; ++i) {
    const kvm_seq_id seq = world->create(1000);
    world->submit(World::verb(SeqVerb::kPublish, seq));
  }
  world->drive();
  EXPECT_EQ(world->stats().n_sequences, 3u);
  arm(Refused::kAllocation, 1, Until::kForEver, Of::kThisThread);
  world.reset();
  disarm();
}

// A space is there, and what is away can be read through rings; or it is not.
TEST(EngineFaults, SpacesComeOrDoNot) {
  bool has_come = false;
  refuse_each([] { return std::make_unique<World>(0, false); },
              [&](World* world) { has_come = world->enter_space(); },
              [&](World* world) {
                EXPECT_EQ(world->has_space(), has_come);
                ASSERT_TRUE(world->enter_space());
                const kvm_seq_id seq = world->create(kAwayTokens);
                EXPECT_TRUE(world->send_away(seq));
                world->drive();
                world->submit(world->attend(seq));
                world->drive();
                EXPECT_EQ(world->status(0), KVM_OK);
              });
}

TEST(EngineFaults, ClientsComeOrDoNot) {
  bool has_come = false;
  refuse_each([] { return std::make_unique<World>(); },
              [&](World* world) { has_come = world->visit(); },
              [&](World* world) {
                EXPECT_EQ(world->stats().n_sequences, 0u);
                EXPECT_TRUE(world->visit()) << "whether or not one had come before: " << has_come;
              });
}

// Pages of some sequences lie in extents that others have left: 128 of 1,024 in each. Where there
// is no memory to move them, they stay, and move when there is.
TEST(EngineFaults, PagesThatMoveStayWhatTheyAre) {
  float expected = 0;
  kvm_seq_id seq = 0;
  refuse_each(
      [&] {
        auto world = std::make_unique<World>();
        std::vector<kvm_seq_id> between;
        for (uint32_t extent = 0; extent < 4; ++extent) {
          seq = world->create(128 * 64);
          between.push_back(world->create(896 * 64));
        }
        world->submit(world->attend(seq));
        for (const kvm_seq_id gone : between) {
          world->submit(World::verb(SeqVerb::kFree, gone));
        }
        world->drive();
        expected = world->output();
        std::this_thread::sleep_for(std::chrono::milliseconds(11));  // the engine is at rest
        return world;
      },
      [&](World* world) {
        world->rest();
        world->submit(world->attend(seq));
        world->drive();
      },
      [&](World* world) {
        ASSERT_EQ(world->n_left(), 0u);
        EXPECT_TRUE(is_answer(world->status(0))) << world->status(0);
        world->rest();
        EXPECT_GT(world->stats().n_pages_moved, 0u);
        world->submit(world->attend(seq));
        world->drive();
        EXPECT_EQ(world->status(0), KVM_OK);
        EXPECT_EQ(world->output(), expected);
      });
}

// Pages leave, are streamed, and come back to be appended to: where there is no memory for that, a
// request is refused and a page stays where it is, and nothing is lost.
TEST(EngineFaults, PagesThatAreAwayAreNotLost) {
  float expected = 0;
  kvm_seq_id seq = 0;
  refuse_each(
      [&] {
        auto world = std::make_unique<World>();
        seq = world->create(kAwayTokens);
        world->submit(world->attend(seq));
        world->drive();
        expected = world->output();
        EXPECT_TRUE(world->send_away(seq));
        world->drive();
        EXPECT_EQ(world->n_pages_away(), kAwayTokens / 64);
        return world;
      },
      [&](World* world) {
        world->submit(world->attend(seq));
        world->submit(World::verb(SeqVerb::kFork, seq, 2000));
        world->drive();
        world->send_away(seq);
        world->submit(world->attend(seq, KVM_MODE_SAMPLED));
        world->submit(World::verb(SeqVerb::kFork, seq, 900));
        world->drive();
        const kvm_seq_id first = world->last_seq();
        world->submit(World::verb(SeqVerb::kFork, seq, 1010));
        world->drive();
        const kvm_seq_id second = world->last_seq();
        world->submit(world->append_one({first, second}));
        world->submit(World::verb(SeqVerb::kFree, first));
        world->submit(World::verb(SeqVerb::kFree, second));
        world->drive();
      },
      [&](World* world) {
        ASSERT_EQ(world->n_left(), 0u);
        for (size_t i = 0; i < 8; ++i) {
          const kvm_status status = world->status(i);
          EXPECT_TRUE(is_answer(status) || (i < 3 && status == KVM_ERR_NOT_FOUND)) << status;
        }
        expect_intact(world, seq, expected);
      });
}

// What is appended is there once it was begun, though it fills several segments of a list.
TEST(EngineFaults, LongAppendsComeOrDoNot) {
  kvm_seq_id seq = 0;
  refuse_each(
      [&] {
        auto world = std::make_unique<World>();
        seq = world->create(100);
        return world;
      },
      [&](World* world) {
        world->submit(world->append_many(seq, 312 * 64));
        world->drive();
      },
      [&](World* world) {
        ASSERT_EQ(world->n_left(), 0u);
        EXPECT_TRUE(is_answer(world->status(0))) << world->status(0);
        world->check_accounts();
        world->submit(world->append_one({seq}));
        world->drive();
        EXPECT_EQ(world->status(0), KVM_OK);
      });
}

// A client that leaves with its pages on their way takes them along.
TEST(EngineFaults, ClientsLeaveWithPagesOnTheirWay) {
  kvm_seq_id seq = 0;
  refuse_each(
      [&] {
        auto world = std::make_unique<World>();
        seq = world->create(kAwayTokens);
        EXPECT_TRUE(world->send_away(seq));
        world->drive();
        return world;
      },
      [&](World* world) {
        world->submit(world->attend(seq));
        world->submit(World::verb(SeqVerb::kTruncate, seq, 1500));
        world->submit(world->append_one({seq}));
        world->leave();
      },
      [](World* world) { expect_left_nothing(*world); });
}

// An append waits until pages have gone by themselves, and what is used again comes back: where
// there is no memory for that, the append is refused or pages stay, and nothing is lost.
TEST(EngineFaults, AppendsThatWaitAreAnswered) {
  float expected = 0;
  kvm_seq_id seq = 0;
  kvm_seq_id growing = 0;
  bool has_waited = false;
  bool has_come_back = false;
  refuse_each(
      [&] {
        auto world = std::make_unique<World>(0, true, true);
        seq = world->create(kNarrowTokens);
        world->submit(world->attend(seq));
        world->drive();
        expected = world->output();
        growing = world->create(100);
        return world;
      },
      [&](World* world) {
        world->submit(world->append_many(growing, kWaitingTokens));
        world->drive();
        world->submit(world->attend(seq));
        world->submit(world->attend(seq));
        world->submit(World::verb(SeqVerb::kTruncate, growing, 100));
        world->drive();
        world->prefetch(seq);
        world->drive();
      },
      [&](World* world) {
        ASSERT_EQ(world->n_left(), 0u);
        has_waited |= world->moved().n_appends_waited != 0;
        has_come_back |= world->moved().n_pages_back != 0;
        for (size_t i = 0; i < 4; ++i) {
          const kvm_status status = world->status(i);
          EXPECT_TRUE(is_answer(status) || (i == 3 && status == KVM_ERR_NO_SPACE)) << status;
        }
        world->check_accounts();
        expect_intact(world, seq, expected);
      });
  EXPECT_TRUE(has_waited);
  EXPECT_TRUE(has_come_back);
}

TEST(EngineFaults, AnswersOutliveTheirAudits) {
  kvm_seq_id seq = 0;
  refuse_each(
      [&] {
        auto world = std::make_unique<World>(1);
        seq = world->create(700);
        return world;
      },
      [&](World* world) {
        world->submit(world->attend(seq, KVM_MODE_SAMPLED));
        world->drive();
      },
      [](World* world) {
        ASSERT_EQ(world->n_left(), 0u);
        const kvm_status status = world->status(0);
        EXPECT_TRUE(is_answer(status)) << status;
      });
}

}  // namespace
}  // namespace kvm::testing
