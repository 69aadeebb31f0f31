// SPDX-License-Identifier: Apache-2.0
// Many requests in flight at once, of several clients, against a model that takes them one by one:
// requests that share a sequence must have the effects of their order, whatever runs beside them.
// KVM_SEED=n runs one seed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/engine/rig.h"

namespace kvm::engine::testing {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSlow = true;
#else
constexpr bool kSlow = false;
#endif

constexpr uint32_t kLayers = 2;
constexpr uint32_t kHeads = 2;  // head 1 keeps sinks and recent tokens only
constexpr uint32_t kDim = 16;
constexpr uint64_t kSinks = 70;
constexpr uint64_t kRecent = 300;
constexpr uint64_t kSlack = 200;

// Tokens of a layer as numbers; K and V of a token are its number everywhere.
using Tokens = std::vector<float>;

struct ModelSeq {
  Tokens layers[kLayers];
};

// Has twelve sequences at most.
ClientSpec of_twelve() {
  ClientSpec spec;
  spec.limits[Resource::kSequences] = 12;
  return spec;
}

struct Owner {
  ClientId client = 0;
  std::map<kvm_seq_id, ModelSeq> seqs;
  std::vector<kvm_seq_id> freed;
};

// Memory of one request, alive until its callback.
struct Pending {
  Buffer k, q, o, lse;
};

class Crowd {
 public:
  Crowd(uint64_t seed, uint32_t n_threads, uint64_t capacity_bytes)
      : random_(seed), rig_(n_threads, capacity_bytes) {
    SpaceSpec spec = make_spec("crowd", kLayers, kHeads, kHeads, kDim);
    spec.params.codec = KVM_CODEC_F32;
    spec.policies.push_back({.kv_head_mask = {2, 0},
                             .retention = KVM_RETAIN_SINKS_RECENT,
                             .n_sinks = kSinks,
                             .n_recent = kRecent,
                             .slack = kSlack});
    space_ = rig_.space(spec);
    for (int i = 0; i < 3; ++i) {
      join();
    }
  }

  void run(int n_rounds) {
    for (int round = 0; round < n_rounds && !::testing::Test::HasFailure(); ++round) {
      for (uint32_t n = pick(1, 40); n != 0; --n) {
        submit_one(owners_[pick(0, 2)].get());
      }
      if (pick(0, 3) == 0) {
        rig_.engine->poll();
      }
      if (pick(0, 1) == 0) {
        rig_.engine->work();
      }
      if (pick(0, 20) == 0) {
        leave(pick(0, 2));
      }
      if (pick(0, 2) == 0) {
        drain();
        check_lengths();
      }
    }
    drain();
    check_lengths();
  }

  // Everything is given back when all have left.
  void finish() {
    for (uint32_t i = 0; i < owners_.size(); ++i) {
      bool gone = false;
      rig_.engine->remove_client(owners_[i]->client, [&gone] { gone = true; });
      rig_.drive(gone);
    }
    const kvm_stats stats = rig_.engine->stats();
    EXPECT_EQ(stats.n_pages, 0u);
    EXPECT_EQ(stats.n_sequences, 0u);
    EXPECT_EQ(stats.host_page_bytes, 0u);
    EXPECT_EQ(stats.observed_bytes, 0u);
    EXPECT_TRUE(rig_.engine->drop_space(space_).is_ok());
  }

  uint64_t n_checked = 0;
  uint64_t n_failed = 0;
  uint64_t n_cancelled = 0;
  uint64_t n_stale = 0;

 private:
  uint32_t pick(uint32_t low, uint32_t high) {
    return std::uniform_int_distribution<uint32_t>(low, high)(random_);
  }

  void join() {
    owners_.push_back(std::make_unique<Owner>());
    owners_.back()->client = rig_.engine->add_client(of_twelve());
  }

  // A client goes with its requests in flight; another comes.
  void leave(uint32_t index) {
    std::unique_ptr<Owner> owner = std::move(owners_[index]);
    bool gone = false;
    rig_.engine->remove_client(owner->client, [&gone] { gone = true; });
    rig_.drive(gone);
    owners_[index] = std::make_unique<Owner>();
    owners_[index]->client = rig_.engine->add_client(of_twelve());
  }

  void drain() {
    for (int i = 0; i < 1000000 && rig_.engine->n_in_flight() != 0; ++i) {
      if (rig_.engine->poll() == 0 && !rig_.engine->work()) {
        rig_.engine->wait(1'000'000);
      }
    }
    ASSERT_EQ(rig_.engine->n_in_flight(), 0u);
  }

  void check_lengths() {
    for (const auto& owner : owners_) {
      for (const auto& [id, model] : owner->seqs) {
        const Result<kvm_seq_info> info = rig_.engine->seq_info(owner->client, id);
        ASSERT_TRUE(info.is_ok()) << info.status().message();
        EXPECT_EQ(info.value().n_tokens_max,
                  std::max(model.layers[0].size(), model.layers[1].size()));
        EXPECT_EQ(info.value().n_tokens_min,
                  std::min(model.layers[0].size(), model.layers[1].size()));
      }
    }
  }

  // One that may have been freed meanwhile; 0 where there are none.
  kvm_seq_id some_seq(Owner* owner) {
    if (!owner->freed.empty() && pick(0, 30) == 0) {
      return owner->freed[pick(0, static_cast<uint32_t>(owner->freed.size()) - 1)];
    }
    if (owner->seqs.empty()) {
      return 0;
    }
    auto it = owner->seqs.begin();
    std::advance(it, pick(0, static_cast<uint32_t>(owner->seqs.size()) - 1));
    return it->first;
  }

  template <typename What, typename Then>
  void submit(Owner* owner, What&& what, std::shared_ptr<Pending> memory, Then then) {
    const RequestTag tag{owner->client, ++n_submitted_};
    const ClientId client = owner->client;
    rig_.engine->submit(client, tag, std::move(what),
                        [this, owner, memory, then](RequestResult&& result) {
                          switch (result.status.code()) {
                            case KVM_OK:
                              ++n_checked;
                              break;
                            case KVM_ERR_CANCELLED:
                              ++n_cancelled;
                              break;
                            case KVM_ERR_STALE:
                              ++n_stale;
                              break;
                            default:
                              ++n_failed;
                          }
                          then(owner, std::move(result), *memory);
                        });
    if (pick(0, 25) == 0) {
      rig_.engine->cancel(client, {client, n_submitted_ - pick(0, 3)});
    }
  }

  void submit_one(Owner* owner) {
    const uint32_t dice = pick(0, 99);
    const kvm_seq_id seq = some_seq(owner);
    if (seq == 0 || dice < 5) {
      create(owner);
    } else if (dice < 65) {
      step(owner);
    } else if (dice < 78) {
      read(owner, seq);
    } else {
      change(owner, seq, dice);
    }
  }

  void create(Owner* owner) {
    SeqRequest request;
    request.space = space_;
    submit(owner, std::move(request), std::make_shared<Pending>(),
           [](Owner* of, RequestResult&& result, Pending&) {
             if (result.status.is_ok()) {
               of->seqs[result.seq];
             } else if (result.status.code() != KVM_ERR_CANCELLED) {
               EXPECT_EQ(result.status.code(), KVM_ERR_QUOTA);
               EXPECT_EQ(of->seqs.size(), 12u);
             }
           });
  }

  void change(Owner* owner, kvm_seq_id seq, uint32_t dice) {
    SeqRequest request;
    request.seq = seq;
    const auto found = owner->seqs.find(seq);
    const uint64_t longest = found == owner->seqs.end() ? 0 : longest_of(found->second);
    request.n_tokens = longest - std::min<uint64_t>(longest, pick(0, 260));
    if (dice < 86) {
      request.verb = SeqVerb::kFork;
      request.n_tokens = pick(0, 1) == 0 ? KVM_POSITION_END : request.n_tokens;
    } else {
      request.verb = dice < 93 ? SeqVerb::kTruncate : dice < 95 ? SeqVerb::kCommit : SeqVerb::kFree;
    }
    const SeqVerb verb = request.verb;
    const uint64_t n = request.n_tokens;
    submit(owner, std::move(request), std::make_shared<Pending>(),
           [verb, seq, n](Owner* of, RequestResult&& result, Pending&) {
             if (result.status.is_ok()) {
               apply(of, verb, seq, n, result.seq);
             } else {
               const kvm_status code = result.status.code();
               EXPECT_TRUE(code == KVM_ERR_STALE || code == KVM_ERR_PARTIAL ||
                           code == KVM_ERR_INVALID || code == KVM_ERR_CANCELLED ||
                           code == KVM_ERR_QUOTA)
                   << result.status.message();
             }
           });
  }

  static uint64_t longest_of(const ModelSeq& model) {
    return std::max(model.layers[0].size(), model.layers[1].size());
  }

  static void apply(Owner* owner, SeqVerb verb, kvm_seq_id seq, uint64_t n, kvm_seq_id child) {
    ASSERT_EQ(owner->seqs.count(seq), 1u) << "a sequence that was freed before";
    ModelSeq& model = owner->seqs.at(seq);
    const auto cut = [n](ModelSeq* m) {
      for (Tokens& tokens : m->layers) {
        tokens.resize(std::min<uint64_t>(tokens.size(), n));
      }
    };
    if (verb == SeqVerb::kFork) {
      ModelSeq copy = model;
      cut(&copy);
      EXPECT_TRUE(owner->seqs.emplace(child, std::move(copy)).second);
    } else if (verb == SeqVerb::kTruncate) {
      cut(&model);
    } else if (verb == SeqVerb::kFree) {
      owner->freed.push_back(seq);
      owner->seqs.erase(seq);
    }
  }

  // Appends to and attends to one to three sequences, either half possibly empty.
  void step(Owner* owner) {
    StepRequest request;
    request.space = space_;
    request.layer_begin = pick(0, 1);
    request.append = pick(0, 3) != 0;
    request.attend = !request.append || pick(0, 1) == 0;
    uint32_t append_rows = 0;
    uint32_t query_rows = 0;
    std::set<kvm_seq_id> taken;
    for (uint32_t i = pick(1, 3); i != 0; --i) {
      const kvm_seq_id seq = some_seq(owner);
      if (seq == 0 || !taken.insert(seq).second) {
        continue;
      }
      kvm_item item = append_item(seq, 0);
      if (request.append) {
        item.append_row = append_rows;
        item.n_append = pick(0, 5) == 0 ? pick(500, 3000) : pick(1, 90);
        append_rows += item.n_append;
      }
      if (request.attend) {
        item.query_row = query_rows;
        item.n_query = pick(0, 4) == 0 ? pick(1, 40) : 1;
        query_rows += item.n_query;
      }
      request.items.push_back(item);
    }
    if (request.items.empty()) {
      return;
    }
    auto memory = std::make_shared<Pending>();
    if (request.append) {
      memory->k = Buffer(Dtype::kF32, 1, append_rows, kHeads, kDim);
      for (uint32_t r = 0; r < append_rows; ++r) {
        fill_row(&memory->k, r, static_cast<float>(pick(1, 1 << 20)));
      }
      request.k = request.v = memory->k.view();
    }
    if (request.attend) {
      // Queries of zero: every visible token has the same weight, and lse is the logarithm of
      // their number.
      memory->q = Buffer(Dtype::kF32, 1, query_rows, kHeads, kDim);
      for (uint32_t r = 0; r < query_rows; ++r) {
        fill_row(&memory->q, r, 0.0f);
      }
      memory->o = Buffer(Dtype::kF32, 1, query_rows, kHeads, kDim);
      memory->lse = Buffer(Dtype::kF32, 1, query_rows, kHeads, 1);
      request.q = memory->q.view();
      request.o = memory->o.view();
      request.lse = memory->lse.view();
    }
    const std::vector<kvm_item> items = request.items;
    const uint32_t layer = request.layer_begin;
    submit(owner, std::move(request), memory,
           [items, layer](Owner* of, RequestResult&& result, Pending& buffers) {
             take_step(of, items, layer, result, buffers);
           });
  }

  static void fill_row(Buffer* buffer, uint32_t row, float value) {
    for (uint32_t h = 0; h < kHeads; ++h) {
      for (uint32_t i = 0; i < kDim; ++i) {
        buffer->set(0, row, h, i, value);
      }
    }
  }

  static void take_step(Owner* owner, const std::vector<kvm_item>& items, uint32_t layer,
                        const RequestResult& result, const Pending& buffers) {
    if (!result.status.is_ok()) {
      const kvm_status code = result.status.code();
      // HOLE: the end of a layer that ends before what was committed.
      EXPECT_TRUE(code == KVM_ERR_STALE || code == KVM_ERR_PARTIAL || code == KVM_ERR_INVALID ||
                  code == KVM_ERR_CANCELLED || code == KVM_ERR_NO_SPACE || code == KVM_ERR_QUOTA ||
                  code == KVM_ERR_HOLE)
          << result.status.message();
      return;
    }
    for (const kvm_item& item : items) {
      ASSERT_EQ(owner->seqs.count(item.seq), 1u) << "a sequence that was freed before";
      Tokens& tokens = owner->seqs.at(item.seq).layers[layer];
      for (uint32_t t = 0; t < item.n_append; ++t) {
        tokens.push_back(buffers.k.get(0, item.append_row + t, 0, 0));
      }
    }
    for (const kvm_item& item : items) {
      const Tokens& tokens = owner->seqs.at(item.seq).layers[layer];
      for (uint32_t r = 0; r < item.n_query; ++r) {
        const uint64_t p = tokens.size() - item.n_query + r;
        for (uint32_t h = 0; h < kHeads; ++h) {
          check_row(tokens, p, h, buffers.o.get(0, item.query_row + r, h, kDim - 1),
                    buffers.lse.get(0, item.query_row + r, h, 0));
        }
      }
    }
  }

  static void check_row(const Tokens& tokens, uint64_t p, uint32_t head, float o, float lse) {
    double sum = 0;
    uint64_t n = 0;
    for (uint64_t x = 0; x <= p; ++x) {
      if (head == 0 || x < kSinks || x + kRecent > p) {
        sum += double{tokens[x]};
        ++n;
      }
    }
    ASSERT_NEAR(double{lse}, std::log(static_cast<double>(n)), 1e-4);
    ASSERT_NEAR(double{o}, sum / static_cast<double>(n), 1e-5 * (1 << 20));
  }

  void read(Owner* owner, kvm_seq_id seq) {
    const auto found = owner->seqs.find(seq);
    const uint32_t layer = pick(0, 1);
    const uint64_t length = found == owner->seqs.end() ? 5 : found->second.layers[layer].size();
    if (length == 0) {
      return;
    }
    // Of what is there now; it may be less when the request's turn comes.
    ReadRequest request;
    request.seq = seq;
    request.layer = layer;
    request.n_tokens = pick(1, static_cast<uint32_t>(std::min<uint64_t>(length, 600)));
    request.position = length - request.n_tokens;
    auto memory = std::make_shared<Pending>();
    memory->k = Buffer(Dtype::kF32, 1, request.n_tokens, kHeads, kDim);
    request.k = memory->k.view();
    const uint64_t begin = request.position;
    const uint64_t n = request.n_tokens;
    submit(owner, std::move(request), memory,
           [seq, layer, begin, n](Owner* of, RequestResult&& result, Pending& buffers) {
             if (!result.status.is_ok()) {
               return;
             }
             ASSERT_EQ(of->seqs.count(seq), 1u);
             const Tokens& tokens = of->seqs.at(seq).layers[layer];
             ASSERT_LE(begin + n, tokens.size());
             for (uint64_t t = 0; t < n; ++t) {
               for (uint32_t h = 0; h < kHeads; ++h) {
                 ASSERT_EQ(buffers.k.get(0, t, h, 3), tokens[begin + t]) << begin + t;
               }
             }
           });
  }

  std::mt19937_64 random_;
  Rig rig_;
  kvm_space_id space_ = 0;
  std::vector<std::unique_ptr<Owner>> owners_;
  uint64_t n_submitted_ = 0;
};

std::vector<uint64_t> seeds() {
  if (const char* seed = std::getenv("KVM_SEED")) {
    return {std::strtoull(seed, nullptr, 10)};
  }
  std::vector<uint64_t> all;
  for (uint64_t i = 1; i <= (kSlow ? 3 : 12); ++i) {
    all.push_back(i);
  }
  return all;
}

void run_crowd(uint64_t capacity_bytes) {
  uint64_t n_checked = 0;
  uint64_t n_failed = 0;
  uint64_t n_cancelled = 0;
  uint64_t n_stale = 0;
  for (const uint64_t seed : seeds()) {
    SCOPED_TRACE("KVM_SEED=" + std::to_string(seed));
    Crowd crowd(seed, static_cast<uint32_t>(1 + seed % 4), capacity_bytes);
    crowd.run(40);
    crowd.finish();
    n_checked += crowd.n_checked;
    n_failed += crowd.n_failed;
    n_cancelled += crowd.n_cancelled;
    n_stale += crowd.n_stale;
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
  if (seeds().size() > 1) {
    EXPECT_GT(n_checked, 1000u);
    EXPECT_GT(n_failed, 10u);
    EXPECT_GT(n_cancelled, 10u);
    EXPECT_GT(n_stale, 5u);
  }
}

TEST(Concurrent, RequestsHaveTheEffectsOfTheirOrder) { run_crowd(uint64_t{512} << 20); }

TEST(Concurrent, TheSameWithoutRoomForAll) { run_crowd(uint64_t{24} << 20); }

}  // namespace
}  // namespace kvm::engine::testing
