// SPDX-License-Identifier: Apache-2.0
// MiKV: heads whose tokens with little attention mass stay in fewer bits, against the rule in
// double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
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

  // Whole pages are demoted, so whole pages are kept.
  uint64_t capacity() const { return round_up(n_heavy, kPageTokens); }
};

SpaceSpec make_demoting(const Budget& budget, uint32_t demoted_k, uint32_t demoted_v,
                        uint32_t codec = KVM_CODEC_F32, uint32_t dim = kDim) {
  SpaceSpec spec = testing::make_spec("demoting", 1, kQHeads, kKvHeads, dim);
  spec.policies = {{.retention = KVM_RETAIN_HEAVY,
                    .n_sinks = budget.n_sinks,
                    .n_recent = budget.n_recent,
                    .slack = budget.slack,
                    .n_heavy = budget.n_heavy,
                    .merge = KVM_MERGE_DEMOTED}};
  kvm_codec_params codecs{};
  codecs.codec_k = codec;
  codecs.codec_v = codec;
  codecs.demoted_k = demoted_k;
  codecs.demoted_v = demoted_v;
  spec.codecs = {codecs};
  return spec;
}

Row key(uint64_t position, uint32_t head) { return hashed_row(1, position, head, kDim, 2.0); }
Row value(uint64_t position, uint32_t head) { return hashed_row(2, position, head, kDim, 1.0); }
Row query(uint64_t position, uint32_t head) { return hashed_row(3, position, head, kDim, 2.0); }

// The bf16 next to x on that side.
float bf16_at(double x, bool above) {
  float near = bf16_to_f32(f32_to_bf16(static_cast<float>(x)));
  const auto step = [&](int by) {
    const bool is_up = (by > 0) == (near >= 0);
    const auto bits = static_cast<uint16_t>(f32_to_bf16(near) + (is_up ? 1 : -1));
    near = bf16_to_f32(bits);
  };
  if (above && static_cast<double>(near) < x) {
    step(1);
  }
  if (!above && static_cast<double>(near) > x) {
    step(-1);
  }
  return near;
}

// A row of one group in codes of `bits`, as docs/storage.md says.
Row in_codes(const Row& row, uint32_t bits) {
  const double last = (1 << bits) - 1;
  const auto [least, most] = std::minmax_element(row.begin(), row.end());
  const double zero = static_cast<double>(bf16_at(*least, false));
  const double scale = static_cast<double>(bf16_at((*most - zero) / last, true));
  Row out;
  for (const double x : row) {
    out.push_back(std::min(last, std::nearbyint((x - zero) / scale)) * scale + zero);
  }
  return out;
}

// What a sequence should hold: per kv head, masses of what is stored in full, and the others.
struct Model {
  Model(const Budget& b, uint32_t bits)
      : budget(b),
        n_bits(bits),
        begin(round_up(b.n_sinks, kPageTokens)),
        end(begin),
        masses(kKvHeads),
        demoted(kKvHeads) {}

  void append(uint64_t n) {
    for (auto& head : masses) {
      for (uint64_t x = length; x < length + n; ++x) {
        head[x] = 0;
      }
    }
    length += n;
  }
  Answer attend(uint64_t p, uint32_t q_head) {
    std::map<uint64_t, double>& head = masses[q_head / 2];
    std::vector<Entry> entries;
    std::vector<uint64_t> seen;
    for (const auto& [x, mass] : head) {
      if (x <= p) {
        entries.push_back({key(x, q_head / 2), value(x, q_head / 2)});
        seen.push_back(x);
      }
    }
    for (const auto& [x, rows] : demoted[q_head / 2]) {
      entries.push_back(rows);
    }
    const Row q = query(p, q_head);
    const Answer answer = attention_over(q, entries, kScale);
    for (size_t i = 0; i < seen.size(); ++i) {
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
    for (uint32_t h = 0; h < kKvHeads; ++h) {
      std::map<uint64_t, double>& head = masses[h];
      std::vector<std::pair<double, uint64_t>> ranked;
      for (const auto& [x, mass] : head) {
        if (x >= begin && x < end) {
          ranked.emplace_back(-mass, x);
        }
      }
      std::sort(ranked.begin(), ranked.end());
      for (size_t i = budget.capacity(); i < ranked.size(); ++i) {
        const uint64_t x = ranked[i].second;
        head.erase(x);
        demoted[h][x] = {in_codes(key(x, h), n_bits), in_codes(value(x, h), n_bits)};
      }
      if (ranked.size() > budget.capacity()) {
        const double last = -ranked[budget.capacity() - 1].first;
        const double next = -ranked[budget.capacity()].first;
        if (next != 0 && last - next < 1e-5 * last) {
          return false;
        }
      }
    }
    return true;
  }
  void truncate(uint64_t n) {
    for (uint32_t h = 0; h < kKvHeads; ++h) {
      masses[h].erase(masses[h].lower_bound(n), masses[h].end());
      if (n <= begin) {
        demoted[h].clear();
      }
    }
    end = n <= begin ? begin : end;
    length = n;
  }

  Budget budget;
  uint32_t n_bits;
  uint64_t begin;
  uint64_t end;
  uint64_t length = 0;
  std::vector<std::map<uint64_t, double>> masses;
  std::vector<std::map<uint64_t, Entry>> demoted;
};

// Appends, attends, and compares every row.
void step(PolicyRig* rig, Model* model, kvm_seq_id seq, uint32_t n_append, uint32_t n_query) {
  rig->step(seq, n_append, n_query);
  model->append(n_append);
  for (uint32_t row = 0; row < n_query; ++row) {
    for (uint32_t h = 0; h < kQHeads; ++h) {
      const Answer expected = model->attend(rig->first_query + row, h);
      ASSERT_LT(rig->error(row, h, expected), 2e-4)
          << "position " << rig->first_query + row << " head " << h << ", chosen to " << model->end;
    }
  }
}

// Reads give what was appended, of tokens that are there in full; of others they say so.
void read_some(PolicyRig* rig, const Model& model, kvm_seq_id seq, std::mt19937* random) {
  for (int i = 0; i < 40 && model.length != 0; ++i) {
    const uint64_t begin = (*random)() % model.length;
    const uint64_t n = std::min<uint64_t>(model.length - begin, i % 4 == 3 ? 1 + i : 1);
    bool holds_all = true;
    for (uint64_t x = begin; x < begin + n; ++x) {
      for (const auto& head : model.masses) {
        holds_all = holds_all && head.contains(x);
      }
    }
    const Status status = rig->read(seq, begin, n);
    ASSERT_EQ(status.code(), holds_all ? KVM_OK : KVM_ERR_PARTIAL)
        << begin << " + " << n << " of " << model.length << ", chosen to " << model.end << ": "
        << status.message();
    for (uint32_t row = 0; row < n && holds_all; ++row) {
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        ASSERT_EQ(rig->read_k.get(0, row, h, 3), static_cast<float>(key(begin + row, h)[3]));
        ASSERT_EQ(rig->read_v.get(0, row, h, 5), static_cast<float>(value(begin + row, h)[5]));
      }
    }
  }
}

TEST(Demote, WhatIsNotKeptStaysInFewerBits) {
  std::mt19937 random(5);
  const auto pick = [&](uint32_t low, uint32_t high) {
    return low + static_cast<uint32_t>(random() % (high - low + 1));
  };
  int n_ambiguous = 0;
  for (int trial = 0; trial < (kInstrumented ? 6 : 24); ++trial) {
    const uint32_t bits = trial % 2 == 0 ? 4 : 2;
    const uint32_t codec = bits == 4 ? KVM_CODEC_I4 : KVM_CODEC_I2;
    const Budget budget = {.n_sinks = trial % 3 == 0 ? 0 : pick(1, 100),
                           .n_recent = pick(1, 100),
                           .slack = 40,
                           .n_heavy = pick(1, 150)};
    PolicyRig rig(make_demoting(budget, codec, codec), key, value, query);
    std::map<kvm_seq_id, Model> models = {{rig.seq, Model(budget, bits)}};
    bool is_clear = true;
    for (int turn = 0; turn < 16 && is_clear; ++turn) {
      const auto at = std::next(models.begin(), pick(0, static_cast<uint32_t>(models.size()) - 1));
      const kvm_seq_id seq = at->first;
      Model& model = at->second;
      const uint32_t n = turn % 4 == 3 ? pick(100, 400) : pick(1, 70);
      step(&rig, &model, seq, n, std::min(n, pick(0, 20)));
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
        // Within the slack, or among tokens that may have been demoted, or before all of these.
        const uint64_t to = turn % 2 == 0 ? pick(0, static_cast<uint32_t>(model.length))
                                          : model.length - std::min<uint64_t>(39, model.length);
        const bool may_go = to <= model.begin || to >= model.end || model.end == model.begin;
        const Status cut = rig.rig.verb(SeqVerb::kTruncate, seq, to).status;
        ASSERT_EQ(cut.code(), may_go ? KVM_OK : KVM_ERR_PARTIAL) << cut.message();
        if (may_go) {
          model.truncate(to);
        }
      }
    }
    n_ambiguous += is_clear ? 0 : 1;
  }
  EXPECT_LE(n_ambiguous, 2);
}

// Room for all: the cache is that of a head that keeps everything.
TEST(Demote, RoomForAllIsTheWholeCache) {
  for (const uint64_t n_recent : {uint64_t{1}, uint64_t{2000}}) {
    PolicyRig whole(testing::make_spec("whole", 1, kQHeads, kKvHeads, kDim), key, value, query);
    PolicyRig rig(
        make_demoting({.n_recent = n_recent, .n_heavy = 2000}, KVM_CODEC_I2, KVM_CODEC_I2), key,
        value, query);
    for (int i = 0; i < 20; ++i) {
      rig.step(rig.seq, 70, 3);
      whole.step(whole.seq, 70, 3);
      for (uint32_t row = 0; row < 3; ++row) {
        for (uint32_t h = 0; h < kQHeads; ++h) {
          for (uint32_t d = 0; d < kDim; ++d) {
            const float own = rig.output(row, h)[d];
            const float expected = whole.output(row, h)[d];
            // Sums of another order, where tokens stand elsewhere.
            ASSERT_NEAR(own, expected, n_recent == 2000 ? 0 : 1e-5) << n_recent;
          }
        }
      }
    }
    EXPECT_EQ(rig.info(rig.seq).n_entries_dropped, 0u);
  }
}

// (r hi + (1 - r) lo) / 16 of bf16's bytes: 32.5, 23.1, 18.1 and 15.6 % at a fifth in full (MiKV's
// table of cache sizes, which counts half a bit of scales and zeros in int8, too).
TEST(Demote, BytesAreThoseOfTheFormula) {
  constexpr uint64_t kTokens = 20480;  // of which a tenth is whole pages
  constexpr uint32_t kWide = 128;
  struct Case {
    uint32_t codec;
    double bits;
    double published;
  };
  const auto rows = [](uint64_t position, uint32_t head) {
    return hashed_row(7, position, head, kWide, 1.0);
  };
  for (const Case& c : {Case{KVM_CODEC_BF16, 16, 0.325}, Case{KVM_CODEC_I8, 8.125, 0.231},
                        Case{KVM_CODEC_I4, 4.5, 0.181}, Case{KVM_CODEC_I2, 2.5, 0.156}}) {
    const Budget budget = {.n_recent = kTokens / 10, .n_heavy = kTokens / 10};
    PolicyRig rig(make_demoting(budget, KVM_CODEC_I2, KVM_CODEC_I2, c.codec, kWide), rows, rows,
                  rows);
    for (uint64_t at = 0; at < kTokens; at += 1024) {
      rig.step(rig.seq, 1024, 0);
    }
    const double whole = 2.0 * 2 * kKvHeads * kWide * kTokens;
    const double share = static_cast<double>(rig.bytes(rig.seq)) / whole;
    RecordProperty("share_" + std::to_string(c.codec), std::to_string(share));
    // Beside rows there are 16 bytes for each heavy token.
    EXPECT_NEAR(share, (0.2 * c.bits + 0.8 * 2.5) / 16 + 0.1 * 16 / 512, 1e-6) << c.codec;
    EXPECT_NEAR(share, c.published, 0.022 * c.published) << "codec " << c.codec;
  }
}

// A needle that nobody asked for until now: dropped tokens are gone, demoted ones answer.
TEST(Demote, ANeedleSurvivesThatEvictionLoses) {
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
    row[0] = p >= 5000 ? 8 : -1;
    return row;
  };
  for (const bool demotes : {true, false}) {
    SpaceSpec spec =
        make_demoting({.n_sinks = 4, .n_recent = 100, .n_heavy = 64}, KVM_CODEC_I2, KVM_CODEC_I2);
    if (!demotes) {
      spec.policies[0].merge = KVM_MERGE_NONE;
      spec.codecs[0].demoted_k = 0;
      spec.codecs[0].demoted_v = 0;
    }
    PolicyRig rig(spec, needle_key, needle_value, needle_query);
    for (int i = 0; i < 100; ++i) {
      rig.step(rig.seq, 50, 10);
    }
    rig.step(rig.seq, 1, 1);
    for (uint32_t h = 0; h < kQHeads; ++h) {
      EXPECT_EQ(rig.output(0, h)[3] > 4.9f, demotes) << rig.output(0, h)[3];
    }
  }
}

// Rows at old positions see all that was demoted, or nothing is answered.
TEST(Demote, RowsAtOldPositionsAreRefused) {
  PolicyRig rig(
      make_demoting({.n_sinks = 4, .n_recent = 50, .n_heavy = 64}, KVM_CODEC_I2, KVM_CODEC_I2), key,
      value, query);
  rig.step(rig.seq, 500, 1);
  constexpr uint64_t kEnd = (500 - 50) / kPageTokens * kPageTokens;
  Buffer q(Dtype::kF32, 1, 10, kQHeads, kDim);
  Buffer o(Dtype::kF32, 1, 10, kQHeads, kDim);
  for (const uint64_t position : {uint64_t{10}, uint64_t{60}, uint64_t{64}, kEnd - 1, kEnd}) {
    StepRequest request;
    request.space = rig.space;
    request.attend = true;
    request.items = {query_item(rig.seq, 10, 0, position)};
    request.q = q.view();
    request.o = o.view();
    const Status status = rig.rig.run(std::move(request)).status;
    EXPECT_EQ(status.code(), position < kEnd ? KVM_ERR_PARTIAL : KVM_OK) << position;
  }
}

// A prompt of many rows at once, on several threads: the same bits.
TEST(Demote, ThreadsDoNotMatter) {
  std::vector<std::vector<float>> outputs;
  for (const uint32_t n_threads : {1u, 3u}) {
    PolicyRig rig(
        make_demoting({.n_sinks = 4, .n_recent = 64, .n_heavy = 100}, KVM_CODEC_I4, KVM_CODEC_I2),
        key, value, query, 256 << 20, n_threads);
    const uint32_t n = kInstrumented ? 450 : 3000;
    rig.step(rig.seq, n, n / 3);
    for (int i = 0; i < 3; ++i) {
      rig.step(rig.seq, 65, 1);
    }
    outputs.push_back(rig.output(0, 2));
  }
  EXPECT_EQ(outputs[0], outputs[1]);
}

// A head with a number that no codes can hold demotes nothing any more, and loses nothing.
TEST(Demote, NumbersThatCannotBeEncodedStay) {
  const auto odd_value = [](uint64_t p, uint32_t h) {
    Row row = value(p, h);
    row[2] = p == 500 && h == 1 ? 1e38 : row[2];
    return row;
  };
  for (const uint32_t codec : {KVM_CODEC_F32, KVM_CODEC_I4}) {
    PolicyRig rig(make_demoting({.n_recent = 50, .n_heavy = 64}, KVM_CODEC_I2, KVM_CODEC_I2, codec),
                  key, odd_value, query);
    for (int i = 0; i < 20; ++i) {
      rig.step(rig.seq, 100, 2);
      const std::vector<float> other = rig.output(0, 0);
      EXPECT_TRUE(std::isfinite(other[2])) << "the head beside it";
    }
    // Each head keeps 64 heavy tokens and up to 113 recent ones in full; one of them all from 448
    // on.
    const double row_bytes = codec == KVM_CODEC_F32 ? 2.0 * kDim * 4 : 2.0 * (kDim / 2 + 4);
    EXPECT_GT(static_cast<double>(rig.bytes(rig.seq)), 1400 * row_bytes);
    EXPECT_LT(static_cast<double>(rig.bytes(rig.seq)), 2.2 * 2000 * 2.0 * kDim * 4);
    ASSERT_TRUE(rig.rig.verb(SeqVerb::kFree, rig.seq, 0).status.is_ok());
  }
}

// Memory beside pages is charged and given back, forks go their own ways.
TEST(Demote, AccountsHold) {
  struct Case {
    uint32_t codec;
    uint32_t demoted_k;
    uint32_t demoted_v;
  };
  for (const Case& c : {Case{KVM_CODEC_BF16, KVM_CODEC_I2_BALANCED, KVM_CODEC_I2},
                        Case{KVM_CODEC_F32, KVM_CODEC_I4_CHANNEL, KVM_CODEC_I4},
                        Case{KVM_CODEC_I8, KVM_CODEC_I4_BALANCED, KVM_CODEC_I4_CENTRED},
                        Case{KVM_CODEC_I4, KVM_CODEC_I2_CHANNEL, KVM_CODEC_I2},
                        Case{KVM_CODEC_I2, KVM_CODEC_I2, KVM_CODEC_I2},
                        Case{KVM_CODEC_F16, KVM_CODEC_GEAR2_CHANNEL, KVM_CODEC_GEAR2},
                        Case{KVM_CODEC_BF16, KVM_CODEC_I3_BALANCED, KVM_CODEC_I3},
                        Case{KVM_CODEC_F8E4M3, KVM_CODEC_I8, KVM_CODEC_F8E4M3}}) {
    SCOPED_TRACE(c.codec);
    auto store = Store::open({.host_capacity_bytes = 64 << 20}).value();
    SpaceSpec spec = engine::make_spec("demoting", 2, 3);
    spec.policies = {{.retention = KVM_RETAIN_HEAVY,
                      .n_sinks = 4,
                      .n_recent = 50,
                      .n_heavy = 70,
                      .merge = KVM_MERGE_DEMOTED}};
    kvm_codec_params codecs{};
    codecs.codec_k = c.codec;
    codecs.codec_v = c.codec;
    codecs.demoted_k = c.demoted_k;
    codecs.demoted_v = c.demoted_v;
    spec.codecs = {codecs};
    const kvm_space_id space = store->register_space(spec).value();
    const ClientId client = store->add_client({});
    Sequence* seq = store->find_seq(client, store->create_seq(client, space, 0).value()).value();
    const std::vector<uint64_t> tokens = numbered(0, 1000);
    for (uint64_t at = 0; at < tokens.size(); at += 100) {
      ASSERT_TRUE(append_all(*store, seq, std::span(tokens).subspan(at, 100)).is_ok());
      std::vector<float> sums(40, 0.5f);
      add_list_masses(&store->memory(), seq, 1, 2, sums, at + 60, true);
      store->check_accounts();
    }
    const uint64_t end = (1000 - 50) / kPageTokens * kPageTokens;
    const auto count = [&](const Sequence* of) {
      std::map<CodecId, uint64_t> n;
      std::vector<KvRun> runs;
      uint64_t last = 0;
      store->collect_runs(of, 1, 2, &runs, true);
      for (const KvRun& run : runs) {
        EXPECT_GE(run.position, last) << "in order";
        last = run.position + run.n_tokens;
        n[run.k.codec] += run.n_tokens;
      }
      return n;
    };
    const auto counted = count(seq);
    const uint64_t n_demoted = end - kPageTokens - 2 * kPageTokens;
    if (c.codec != c.demoted_k) {
      EXPECT_EQ(counted.at(static_cast<CodecId>(c.demoted_k)), n_demoted);
    }
    uint64_t n_all = 0;
    for (const auto& [codec, n] : counted) {
      n_all += n;
    }
    EXPECT_EQ(n_all, 1000u) << "all are somewhere";
    Sequence* child =
        store->find_seq(client, store->fork_seq(seq, KVM_POSITION_END).value()).value();
    Sequence* cut = store->find_seq(client, store->fork_seq(seq, 30).value()).value();
    EXPECT_EQ(store->fork_seq(seq, 500).status().code(), KVM_ERR_PARTIAL);
    store->check_accounts();
    ASSERT_TRUE(append_all(*store, child, tokens).is_ok());
    add_list_masses(&store->memory(), child, 1, 2, std::vector<float>(10, 1.0f), 1200, true);
    store->check_accounts();
    EXPECT_EQ(count(seq), counted) << "the child's choices are its own";
    store->free_seq(seq);
    store->check_accounts();
    ASSERT_TRUE(append_all(*store, cut, tokens).is_ok());
    ASSERT_EQ(store->truncate_seq(cut, 500).code(), KVM_ERR_PARTIAL);
    ASSERT_TRUE(store->truncate_seq(cut, 10).is_ok());
    store->check_accounts();
    ASSERT_TRUE(append_all(*store, cut, tokens).is_ok());
    store->check_accounts();
    store->free_seq(cut);
    store->free_seq(child);
    EXPECT_EQ(store->client_bytes(client), 0u);
    store->check_accounts();
  }
}

// What balances keys are the queries that kvm_observe has left: channels that these ask for get
// more of the codes.
TEST(Demote, KeysAreBalancedByObservedQueries) {
  // Four channels are 15 times as large as the others, and queries hardly ask for these.
  const auto wide_key = [](uint64_t p, uint32_t h) {
    Row row = key(p, h);
    for (uint32_t i = 0; i < 4; ++i) {
      row[4 * i + 1] *= 15;
    }
    return row;
  };
  const auto narrow_query = [](uint64_t p, uint32_t h) {
    Row row = query(p, h);
    for (uint32_t i = 0; i < 4; ++i) {
      row[4 * i + 1] *= 0.02;
    }
    return row;
  };
  const auto error_of = [&](uint32_t codec, bool observes) {
    PolicyRig whole(testing::make_spec("whole", 1, kQHeads, kKvHeads, kDim), wide_key, value,
                    narrow_query);
    PolicyRig rig(make_demoting({.n_recent = 32, .n_heavy = 1}, codec, KVM_CODEC_I8), wide_key,
                  value, narrow_query);
    if (observes) {
      Buffer q(Dtype::kF32, 1, 8, kQHeads, kDim);
      rig.step(rig.seq, 8, 0);
      whole.step(whole.seq, 8, 0);
      for (uint32_t t = 0; t < 8; ++t) {
        for (uint32_t h = 0; h < kQHeads; ++h) {
          const Row row = narrow_query(t, h);
          for (uint32_t d = 0; d < kDim; ++d) {
            q.set(0, t, h, d, static_cast<float>(row[d]));
          }
        }
      }
      ObserveRequest request;
      request.seq = rig.seq;
      request.query_position = 0;
      request.n_rows = 8;
      request.q = q.view();
      const Status status = rig.rig.run(std::move(request)).status;
      EXPECT_TRUE(status.is_ok()) << status.message();
    }
    rig.step(rig.seq, 500, 0);
    whole.step(whole.seq, 500, 0);
    double sum = 0;
    for (int i = 0; i < 10; ++i) {
      rig.step(rig.seq, 1, 1);
      whole.step(whole.seq, 1, 1);
      for (uint32_t h = 0; h < kQHeads; ++h) {
        sum += std::fabs(double{rig.lse(0, h)} - double{whole.lse(0, h)});
        for (uint32_t d = 0; d < kDim; ++d) {
          sum += std::fabs(double{rig.output(0, h)[d]} - double{whole.output(0, h)[d]});
        }
      }
    }
    return sum;
  };
  const double plain = error_of(KVM_CODEC_I4, true);
  const double alone = error_of(KVM_CODEC_I4_BALANCED, false);
  const double balanced = error_of(KVM_CODEC_I4_BALANCED, true);
  EXPECT_GT(plain / balanced, 2.5) << plain << " " << balanced;
  EXPECT_LT(balanced, alone) << "queries tell more than keys do";
}

}  // namespace
}  // namespace kvm::engine::testing
