// SPDX-License-Identifier: Apache-2.0
// H2O: heads that keep the tokens with most attention mass, against the rule in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "base/round.h"
#include "engine/retention/policy_actions.h"
#include "tests/unit/engine/policy_testbed.h"
#include "tests/unit/engine/store_testbed.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kDim = 16;
constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kQHeads = 4;
const double kScale = 1.0 / std::sqrt(double{kDim});

struct Budget {
  uint64_t n_sinks = 0;
  uint64_t n_recent = 1;
  uint64_t slack = 0;
  uint64_t n_heavy = 1;
};

SpaceSpec make_heavy(const Budget& budget) {
  SpaceSpec spec = testing::make_spec("heavy", 1, kQHeads, kKvHeads, kDim);
  spec.policies = {{.retention = KVM_RETAIN_HEAVY,
                    .n_sinks = budget.n_sinks,
                    .n_recent = budget.n_recent,
                    .slack = budget.slack,
                    .n_heavy = budget.n_heavy}};
  return spec;
}

Row key(uint64_t position, uint32_t head) { return hashed_row(1, position, head, kDim, 2.0); }
Row value(uint64_t position, uint32_t head) { return hashed_row(2, position, head, kDim, 1.0); }
Row query(uint64_t position, uint32_t head) { return hashed_row(3, position, head, kDim, 2.0); }

// What a sequence should hold: per kv head, masses of what is stored.
struct Model {
  explicit Model(const Budget& b)
      : budget(b), begin(round_up(b.n_sinks, kPageTokens)), end(begin), masses(kKvHeads) {}

  void append(uint64_t n) {
    for (auto& head : masses) {
      for (uint64_t x = length; x < length + n; ++x) {
        head[x] = 0;
      }
    }
    length += n;
  }
  // The answer of a row, whose weights are added up.
  Answer attend(uint64_t p, uint32_t q_head, bool adds, const std::vector<kvm_range>& hidden) {
    std::map<uint64_t, double>& head = masses[q_head / 2];
    std::vector<Entry> entries;
    std::vector<uint64_t> seen;
    for (const auto& [x, mass] : head) {
      const bool is_hidden = std::any_of(hidden.begin(), hidden.end(), [x = x](const kvm_range& r) {
        return r.begin <= x && x < r.end;
      });
      if (x <= p && !is_hidden) {
        entries.push_back({key(x, q_head / 2), value(x, q_head / 2)});
        seen.push_back(x);
      }
    }
    const Row q = query(p, q_head);
    const Answer answer = attention_over(q, entries, kScale);
    for (size_t i = 0; i < seen.size() && adds; ++i) {
      double logit = 0;
      for (uint32_t d = 0; d < kDim; ++d) {
        logit += q[d] * entries[i].k[d];
      }
      head[seen[i]] += std::exp(logit * kScale - answer.lse);
    }
    return answer;
  }
  // False where two candidates are too near to each other to say which is larger.
  bool choose() {
    const uint64_t kept = budget.n_recent + budget.slack;
    const uint64_t limit = length > kept ? length - kept : 0;
    const uint64_t new_end = std::max(begin, limit / kPageTokens * kPageTokens);
    if (new_end <= end) {
      return true;
    }
    end = new_end;
    for (auto& head : masses) {
      std::vector<std::pair<double, uint64_t>> ranked;
      for (const auto& [x, mass] : head) {
        if (x >= begin && x < end) {
          ranked.emplace_back(-mass, x);
        }
      }
      std::sort(ranked.begin(), ranked.end());
      for (size_t i = budget.n_heavy; i < ranked.size(); ++i) {
        head.erase(ranked[i].second);
      }
      if (ranked.size() > budget.n_heavy) {
        const double last = -ranked[budget.n_heavy - 1].first;
        const double next = -ranked[budget.n_heavy].first;
        if (next != 0 && last - next < 1e-5 * last) {
          return false;
        }
      }
    }
    return true;
  }
  void truncate(uint64_t n) {
    for (auto& head : masses) {
      head.erase(head.lower_bound(n), head.end());
    }
    length = n;
  }

  Budget budget;
  uint64_t begin;
  uint64_t end;
  uint64_t length = 0;
  std::vector<std::map<uint64_t, double>> masses;
};

// Appends, attends, and compares every row.
void step(PolicyRig* rig, Model* model, kvm_seq_id seq, uint32_t n_append, uint32_t n_query) {
  rig->step(seq, n_append, n_query, rig->ranges.empty() ? 0u : uint32_t{KVM_ITEM_EXCLUDE_RANGES});
  model->append(n_append);
  for (uint32_t row = 0; row < n_query; ++row) {
    for (uint32_t h = 0; h < kQHeads; ++h) {
      const Answer expected = model->attend(rig->first_query + row, h, true, rig->ranges);
      ASSERT_LT(rig->error(row, h, expected), 1e-4)
          << "position " << rig->first_query + row << " head " << h << ", chosen to " << model->end;
    }
  }
}

// A read answers OK exactly where every head holds every token, in a page or as one that it kept,
// and gives what was appended.
void read_some(PolicyRig* rig, const Model& model, kvm_seq_id seq, std::mt19937* random) {
  const auto is_held = [&](uint64_t x) {
    return std::all_of(model.masses.begin(), model.masses.end(),
                       [x](const auto& head) { return head.contains(x); });
  };
  const auto pick = [&](uint64_t n) { return (*random)() % n; };
  for (int i = 0; i < 60 && model.length != 0; ++i) {
    // Reads of one token mostly begin where some head keeps one of an old page.
    uint64_t begin = pick(model.length);
    if (i % 2 == 0) {
      const std::map<uint64_t, double>& head = model.masses[pick(kKvHeads)];
      const auto kept = head.lower_bound(begin);
      begin = kept == head.end() ? begin : kept->first;
    }
    const uint64_t n = i % 4 != 3 ? 1 : std::min(model.length - begin, 1 + pick(80));
    bool holds_all = true;
    for (uint64_t x = begin; x < begin + n; ++x) {
      holds_all = holds_all && is_held(x);
    }
    const Status status = rig->read(seq, begin, n);
    ASSERT_EQ(status.code(), holds_all ? KVM_OK : KVM_ERR_PARTIAL)
        << begin << " + " << n << " of " << model.length << ", chosen to " << model.end << ": "
        << status.message();
    for (uint32_t row = 0; row < n && holds_all; ++row) {
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        const Row k = key(begin + row, h);
        const Row v = value(begin + row, h);
        for (uint32_t d = 0; d < kDim; ++d) {
          ASSERT_EQ(rig->read_k.get(0, row, h, d), static_cast<float>(k[d]));
          ASSERT_EQ(rig->read_v.get(0, row, h, d), static_cast<float>(v[d]));
        }
      }
    }
  }
}

TEST(HeavyHitters, KeptSetIsThatOfTheRule) {
  std::mt19937 random(3);
  const auto pick = [&](uint32_t low, uint32_t high) {
    return low + static_cast<uint32_t>(random() % (high - low + 1));
  };
  int n_ambiguous = 0;
  for (int trial = 0; trial < (kInstrumented ? 5 : 25); ++trial) {
    const Budget budget = {.n_sinks = trial % 3 == 0 ? 0 : pick(1, 100),
                           .n_recent = pick(1, 100),
                           .slack = 40,
                           .n_heavy = pick(1, 150)};
    PolicyRig rig(make_heavy(budget), key, value, query);
    rig.wants_lse = trial % 2 == 0;
    std::map<kvm_seq_id, Model> models = {{rig.seq, Model(budget)}};
    bool is_clear = true;
    for (int turn = 0; turn < 14 && is_clear; ++turn) {
      const auto at = std::next(models.begin(), pick(0, static_cast<uint32_t>(models.size()) - 1));
      const kvm_seq_id seq = at->first;
      Model& model = at->second;
      const uint32_t n = turn % 4 == 3 ? pick(100, 300) : pick(1, 70);
      // Ranges hide tokens that were kept as well as stored ones.
      rig.ranges.clear();
      if (turn % 5 == 4 && model.length > 60) {
        rig.ranges = {{model.length / 3, model.length / 2}};
      }
      step(&rig, &model, seq, n, std::min(n, pick(0, 30)));
      if (::testing::Test::HasFatalFailure()) {
        return;
      }
      is_clear = model.choose();
      if (is_clear) {
        read_some(&rig, model, seq, &random);
        if (::testing::Test::HasFatalFailure()) {
          return;
        }
      }
      if (turn % 3 == 1) {
        const kvm_seq_id child = rig.fork(seq);
        models.emplace(child, model);
      }
      if (turn % 3 == 2) {
        const uint64_t less = std::min<uint64_t>(pick(1, 39), model.length);
        if (model.end != model.begin && model.length - less < model.end + budget.n_recent) {
          continue;  // truncates of several turns may add up to more than the slack
        }
        ASSERT_TRUE(rig.rig.verb(SeqVerb::kTruncate, seq, model.length - less).status.is_ok());
        model.truncate(model.length - less);
      }
    }
    n_ambiguous += is_clear ? 0 : 1;
  }
  EXPECT_LE(n_ambiguous, 2);
}

// A prompt of many rows at once, cut into blocks of rows, on several threads.
TEST(HeavyHitters, PromptsCountAllOfTheirRows) {
  const Budget budget = {.n_sinks = 4, .n_recent = 64, .n_heavy = 100};
  int n_clear = 0;
  // As many as make masses a job of their own.
  for (const uint32_t n : {kInstrumented ? 420u : 900u, kInstrumented ? 450u : 1000u}) {
    for (const uint32_t n_threads : {1u, 3u}) {
      PolicyRig rig(make_heavy(budget), key, value, query, 256 << 20, n_threads);
      Model model(budget);
      step(&rig, &model, rig.seq, n, n);
      if (model.choose()) {
        step(&rig, &model, rig.seq, 3, 3);
        ++n_clear;
      }
    }
  }
  EXPECT_GE(n_clear, 2);
}

// What was looked at often in the past is there when it is asked for again, although it left the
// window long ago; a head that goes by position has lost it.
TEST(HeavyHitters, NeedleWithPastMassSurvives) {
  constexpr uint64_t kNeedle = 300;
  const auto needle_key = [](uint64_t p, uint32_t h) {
    Row row = key(p, h);
    row[0] = p == kNeedle ? 30 : 0;
    return row;
  };
  const auto needle_value = [](uint64_t p, uint32_t h) {
    return p == kNeedle ? Row(kDim, 5.0) : value(p, h);
  };
  const auto needle_query = [](uint64_t p, uint32_t h) {
    Row row = query(p, h);
    row[0] = (p > kNeedle && p < 400) || p >= 5000 ? 8 : 0;
    return row;
  };
  for (const bool heavy : {true, false}) {
    SpaceSpec spec = make_heavy({.n_sinks = 4, .n_recent = 100, .n_heavy = 64});
    if (!heavy) {
      spec.policies[0].retention = KVM_RETAIN_SINKS_RECENT;
      spec.policies[0].n_heavy = 0;
    }
    PolicyRig rig(spec, needle_key, needle_value, needle_query);
    for (int i = 0; i < 100; ++i) {
      rig.step(rig.seq, 50, 10);
    }
    EXPECT_GT(rig.info(rig.seq).n_entries_dropped, 4500u);
    rig.step(rig.seq, 1, 1);
    for (uint32_t h = 0; h < kQHeads; ++h) {
      EXPECT_EQ(rig.output(0, h)[3] > 4.9f, heavy);
    }
    EXPECT_LT(rig.bytes(rig.seq), 2 * kKvHeads * kDim * sizeof(float) * 500u);
  }
}

// Memory beside pages is charged and given back; every encoding is kept as it is.
TEST(HeavyHitters, AccountsHold) {
  for (const uint32_t codec : {KVM_CODEC_F32, KVM_CODEC_F16, KVM_CODEC_BF16, KVM_CODEC_I8,
                               KVM_CODEC_F8E4M3, KVM_CODEC_I8_CHANNEL}) {
    auto store = Store::open({.host_capacity_bytes = 64 << 20}).value();
    SpaceSpec spec = engine::make_spec("heavy", 2, 3);
    spec.params.codec = codec;
    spec.policies = {{.retention = KVM_RETAIN_HEAVY, .n_sinks = 4, .n_recent = 50, .n_heavy = 70}};
    const kvm_space_id space = store->register_space(spec).value();
    const ClientId client = store->add_client({});
    Sequence* seq = store->find_seq(client, store->create_seq(client, space, 0).value()).value();
    const std::vector<uint64_t> tokens = numbered(0, 1000);
    std::set<uint64_t> loved;
    for (uint64_t at = 0; at < tokens.size(); at += 100) {
      ASSERT_TRUE(append_all(*store, seq, std::span(tokens).subspan(at, 100)).is_ok());
      // Every 14th of the last 40 tokens gets mass, in one head of one layer.
      std::vector<float> sums(40);
      for (uint64_t i = 0; i < sums.size(); ++i) {
        sums[i] = (at + 60 + i) % 14 == 0 ? 1.0f : 0.0f;
        if (sums[i] != 0) {
          loved.insert(at + 60 + i);
        }
      }
      add_list_masses(&store->memory(), seq, 1, 2, sums, at + 60, true);
      store->check_accounts();
    }
    const uint64_t end = (1000 - 50) / kPageTokens * kPageTokens;
    const auto content = [&](const Sequence* of) {
      uint64_t n_kept = 0;
      std::vector<KvRun> runs;
      store->collect_runs(of, 1, 2, &runs, false);
      for (const KvRun& run : runs) {
        for (uint64_t x = run.position; x < run.position + run.n_tokens; ++x) {
          n_kept += x >= 64 && x < end ? 1 : 0;
        }
      }
      EXPECT_EQ(n_kept, 70u);
      for (const uint64_t x : loved) {
        const bool is_there = std::any_of(runs.begin(), runs.end(), [x](const KvRun& run) {
          return run.position <= x && x < run.position + run.n_tokens;
        });
        EXPECT_TRUE(is_there) << x;
      }
    };
    content(seq);
    Sequence* child =
        store->find_seq(client, store->fork_seq(seq, KVM_POSITION_END).value()).value();
    Sequence* cut = store->find_seq(client, store->fork_seq(seq, 30).value()).value();
    store->check_accounts();
    ASSERT_TRUE(append_all(*store, child, tokens).is_ok());
    add_list_masses(&store->memory(), child, 1, 2, std::vector<float>(10, 1.0f), 1200, true);
    store->check_accounts();
    content(seq);
    store->free_seq(seq);
    store->check_accounts();
    ASSERT_TRUE(append_all(*store, cut, tokens).is_ok());
    ASSERT_EQ(store->truncate_seq(cut, 500).code(), KVM_ERR_PARTIAL);
    ASSERT_TRUE(store->truncate_seq(cut, 10).is_ok());
    store->check_accounts();
    store->free_seq(cut);
    store->free_seq(child);
    EXPECT_EQ(store->client_bytes(client), 0u);
    store->check_accounts();
  }
}

}  // namespace
}  // namespace kvm::engine::testing
