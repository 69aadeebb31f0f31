// SPDX-License-Identifier: Apache-2.0
// D2O: tokens that a head gives up join the kept token with the nearest key, against the rule in
// double precision (kvm.h: KVM_MERGE_*).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/round.h"
#include "tests/unit/engine/policy_testbed.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kDim = 16;
constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kQHeads = 4;
// The form of the authors' code, which no head of the service has: the mean of the kept token, with
// weight 1, and of cos(e, c) e of each e that joins it.
constexpr uint32_t kReleased = 100;
const double kScale = 1.0 / std::sqrt(double{kDim});

struct Budget {
  uint64_t n_sinks = 4;
  uint64_t n_recent = 128;
  uint64_t n_heavy = 40;

  uint64_t begin() const { return round_up(n_sinks, kPageTokens); }
};

float rounded(double x) { return static_cast<float>(x); }

struct Data {
  uint64_t set = 0;  // tokens of different ones have nothing to do with each other
  uint32_t n_clusters = 24;
  double spread = 0.4;  // of a cluster's tokens
  double query_scale = 1.0;
};
Data data;

// Tokens of a cluster look alike.
Row near_centre(uint64_t kind, uint64_t position, uint32_t head) {
  const uint64_t seed = 100 * data.set;
  const double pick = (hashed_row(seed + 50, position, 0, 8, 1.0)[0] + 1) / 2;
  const auto cluster = static_cast<uint64_t>(pick * data.n_clusters);
  Row row = hashed_row(seed + kind, cluster, head, kDim, 2.0);
  const Row noise = hashed_row(seed + kind + 1, position, head, kDim, data.spread);
  for (uint32_t i = 0; i < kDim; ++i) {
    row[i] = double{rounded(row[i] + noise[i])};
  }
  return row;
}
Row key(uint64_t position, uint32_t head) { return near_centre(10, position, head); }
Row value(uint64_t position, uint32_t head) { return near_centre(20, position, head); }
// Looks at all clusters, at some more.
Row query(uint64_t position, uint32_t q_head) {
  return hashed_row(40 + 100 * data.set, position, q_head, kDim, data.query_scale);
}
// What kvm_observe says of a token: the mass that heads choose by.
float mass(uint64_t position, uint32_t head) {
  return rounded(1.0 + hashed_row(30, position, head, 8, 1.0)[0]);
}

double cosine(const Row& a, const Row& b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  return ab / std::sqrt(aa * bb);
}

// What a head should hold.
struct Head {
  struct Token {
    Row k;
    Row v;
    uint32_t count = 1;
  };
  std::map<uint64_t, Token> kept;
  uint64_t end = 0;
  bool has_threshold = false;
  double threshold = 0;
};

class Model {
 public:
  Model(const Budget& budget, uint32_t merge) : budget_(budget), merge_(merge), heads_(kKvHeads) {
    for (Head& head : heads_) {
      head.end = budget.begin();
    }
  }

  void append(uint64_t n) {
    length += n;
    const uint64_t limit = length > budget_.n_recent ? length - budget_.n_recent : 0;
    const uint64_t end = std::max(budget_.begin(), limit / kPageTokens * kPageTokens);
    for (uint32_t h = 0; h < kKvHeads; ++h) {
      if (end > heads_[h].end) {
        give_up(h, end);
      }
    }
  }
  // What a query behind all tokens sees.
  std::vector<Entry> entries(uint32_t h) const {
    std::vector<Entry> all;
    const Head& head = heads_[h];
    for (uint64_t x = 0; x < std::min(length, budget_.begin()); ++x) {
      all.push_back({key(x, h), value(x, h)});
    }
    for (const auto& [position, token] : head.kept) {
      const double weight =
          merge_ == KVM_MERGE_COUNTED ? std::log(static_cast<double>(token.count)) : 0.0;
      all.push_back({token.k, token.v, weight});
    }
    for (uint64_t x = head.end; x < length; ++x) {
      all.push_back({key(x, h), value(x, h)});
    }
    return all;
  }

  uint64_t length = 0;
  uint64_t n_joined = 0;
  uint64_t n_dropped = 0;
  bool is_clear = true;  // false: a decision hangs on rounding

 private:
  void give_up(uint32_t h, uint64_t end) {
    Head& head = heads_[h];
    std::map<uint64_t, Head::Token> all = head.kept;
    for (uint64_t x = head.end; x < end; ++x) {
      all[x] = {key(x, h), value(x, h)};
    }
    head.end = end;
    std::vector<std::pair<float, uint64_t>> order;
    for (const auto& [position, token] : all) {
      order.emplace_back(-mass(position, h), position);
    }
    std::sort(order.begin(), order.end());
    order.resize(std::min<size_t>(order.size(), budget_.n_heavy));
    head.kept.clear();
    for (const auto& [negative, position] : order) {
      head.kept[position] = all[position];
      all.erase(position);
    }
    if (merge_ != KVM_MERGE_NONE && !all.empty()) {
      join(&head, all);
    }
  }

  void join(Head* head, const std::map<uint64_t, Head::Token>& goers) {
    struct Found {
      const Head::Token* goer;
      uint64_t to;
      double similarity;
    };
    std::vector<Found> found;
    double mean = 0;
    for (const auto& [position, goer] : goers) {
      Found best = {&goer, 0, -2};
      double second = -2;
      for (const auto& [to, token] : head->kept) {
        const double similarity = cosine(goer.k, token.k);
        if (similarity > best.similarity) {
          second = best.similarity;
          best = {&goer, to, similarity};
        } else {
          second = std::max(second, similarity);
        }
      }
      is_clear = is_clear && best.similarity - second > 3e-6;
      mean += best.similarity / static_cast<double>(goers.size());
      found.push_back(best);
    }
    head->threshold = head->has_threshold ? (head->threshold + mean) / 2 : mean;
    head->has_threshold = true;
    std::map<uint64_t, std::vector<const Found*>> joins;
    for (const Found& one : found) {
      is_clear = is_clear && std::abs(one.similarity - head->threshold) > 3e-6;
      if (one.similarity >= head->threshold) {
        joins[one.to].push_back(&one);
        ++n_joined;
      } else {
        ++n_dropped;
      }
    }
    for (const auto& [to, those] : joins) {
      Head::Token& token = head->kept[to];
      double sum = merge_ == kReleased ? 1.0 : std::exp(1.0);
      Row k = token.k, v = token.v;
      for (uint32_t i = 0; i < kDim; ++i) {
        k[i] *= sum;
        v[i] *= sum;
      }
      for (const Found* one : those) {
        const bool is_released = merge_ == kReleased;
        const double weight = is_released ? one->similarity : std::exp(one->similarity);
        sum += is_released ? 1.0 : weight;
        token.count += one->goer->count;
        for (uint32_t i = 0; i < kDim; ++i) {
          k[i] += weight * one->goer->k[i];
          v[i] += weight * one->goer->v[i];
        }
      }
      for (uint32_t i = 0; i < kDim; ++i) {
        token.k[i] = k[i] / sum;
        token.v[i] = v[i] / sum;
      }
    }
  }

  Budget budget_;
  uint32_t merge_;
  std::vector<Head> heads_;
};

Row answer_of(const Model& model, uint64_t position, uint32_t q_head) {
  return attention_over(query(position, q_head), model.entries(q_head / (kQHeads / kKvHeads)),
                        kScale)
      .o;
}

double error_of(const Row& got, const Row& expected) {
  double off = 0, size = 0;
  for (uint32_t i = 0; i < kDim; ++i) {
    off += std::pow(got[i] - expected[i], 2);
    size += expected[i] * expected[i];
  }
  return std::sqrt(off / size);
}

class World {
 public:
  World(const Budget& budget, uint32_t merge, uint32_t codec = KVM_CODEC_F32,
        uint32_t n_threads = 1, uint32_t flags = 0)
      : rig(n_threads) {
    SpaceSpec spec = make_spec("merge", 1, kQHeads, kKvHeads, kDim);
    spec.params.codec = codec;
    spec.policies = {{.retention = KVM_RETAIN_HEAVY,
                      .n_sinks = budget.n_sinks,
                      .n_recent = budget.n_recent,
                      .n_heavy = budget.n_heavy,
                      .merge = merge}};
    space_ = rig.space(spec);
    seq = rig.create(space_, flags);
  }

  // Appends, attends with the last token's query, and says what masses the tokens have.
  void append(kvm_seq_id to, uint32_t n) {
    const uint64_t first = rig.length(to);
    Buffer k(Dtype::kF32, 1, n, kKvHeads, kDim), v = k;
    Buffer sums(Dtype::kF32, 1, n, kKvHeads, 1);
    for (uint32_t t = 0; t < n; ++t) {
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        put(&k, t, h, key(first + t, h));
        put(&v, t, h, value(first + t, h));
        sums.set(0, t, h, 0, mass(first + t, h));
      }
    }
    StepRequest step;
    step.space = space_;
    step.append = true;
    step.items = {append_item(to, n)};
    step.k = k.view();
    step.v = v.view();
    ASSERT_TRUE(rig.run(step).status.is_ok());
    attend(to, first + n - 1);
    ASSERT_FALSE(::testing::Test::HasFatalFailure());
    ObserveRequest observe;
    observe.seq = to;
    observe.column_begin = first;
    observe.n_columns = n;
    observe.column_sums = sums.view();
    ASSERT_TRUE(rig.run(observe).status.is_ok());
  }
  // With the query of a position, over all that is there.
  void attend(kvm_seq_id to, uint64_t position) {
    Buffer q(Dtype::kF32, 1, 1, kQHeads, kDim);
    o = q;
    for (uint32_t h = 0; h < kQHeads; ++h) {
      put(&q, 0, h, query(position, h));
    }
    StepRequest step;
    step.space = space_;
    step.attend = true;
    step.flags = KVM_STEP_F32_VALUES | KVM_STEP_NO_STATISTICS;
    step.items = {query_item(to, 1)};
    step.q = q.view();
    step.o = o.view();
    ASSERT_TRUE(rig.run(step).status.is_ok());
  }
  // The errors of the q heads of the last attend, which was at `position`.
  std::vector<double> errors(const Model& model, uint64_t position) const {
    std::vector<double> all;
    for (uint32_t h = 0; h < kQHeads; ++h) {
      const std::vector<float> row = o.get_row(0, 0, h);
      all.push_back(error_of({row.begin(), row.end()}, answer_of(model, position, h)));
    }
    return all;
  }
  double mean_error(const std::vector<Row>& expected) const {
    double mean = 0;
    for (uint32_t h = 0; h < kQHeads; ++h) {
      const std::vector<float> row = o.get_row(0, 0, h);
      mean += error_of({row.begin(), row.end()}, expected[h]) / kQHeads;
    }
    return mean;
  }

  Rig rig;
  kvm_seq_id seq = 0;
  Buffer o;

 private:
  static void put(Buffer* buffer, uint32_t row, uint32_t head, const Row& values) {
    for (uint32_t i = 0; i < kDim; ++i) {
      buffer->set(0, row, head, i, rounded(values[i]));
    }
  }
  kvm_space_id space_ = 0;
};

TEST(Merge, TokensJoinTheNearestThatStays) {
  for (const uint32_t merge : {KVM_MERGE_NONE, KVM_MERGE_WEIGHTED, KVM_MERGE_COUNTED}) {
    uint32_t n_checked = 0;
    for (uint64_t seed = 1; seed <= 6; ++seed) {
      SCOPED_TRACE("merge " + std::to_string(merge) + ", seed " + std::to_string(seed));
      std::mt19937_64 random(seed);
      const Budget budget = {.n_sinks = random() % 100, .n_heavy = 1 + random() % 90};
      World world(budget, merge, KVM_CODEC_F32, 1 + seed % 2);
      Model model(budget, merge);
      while (model.length < 1500 && model.is_clear) {
        const auto n = static_cast<uint32_t>(1 + random() % 100);
        world.append(world.seq, n);
        model.append(n);
        ASSERT_FALSE(HasFatalFailure());
        if (model.is_clear) {
          ASSERT_LT(std::ranges::max(world.errors(model, model.length - 1)), 2e-5) << model.length;
          ++n_checked;
        }
      }
      if (merge != KVM_MERGE_NONE && model.is_clear) {
        EXPECT_GT(model.n_joined, 100u);
        EXPECT_GT(model.n_dropped, 100u);
      }
    }
    EXPECT_GE(n_checked, 80u);
  }
}

// The mean errors, to attention over all tokens, of what is dropped, joined as the authors' code
// does, joined as the paper says, and counted.
struct Errors {
  double dropped = 0;
  double released = 0;
  double weighted = 0;
  double counted = 0;

  std::string text() const {
    return "dropped, released, weighted, counted: " + std::to_string(dropped) + " " +
           std::to_string(released) + " " + std::to_string(weighted) + " " +
           std::to_string(counted);
  }
};

Errors mean_errors(const Data& of, const Budget& budget, uint32_t n_tokens, uint64_t n_sets) {
  const uint64_t last = n_tokens - 1;
  int n_checked = 0;
  Errors mean;
  data = of;
  for (data.set = 1; data.set <= n_sets; ++data.set) {
    Model all({.n_sinks = 1 << 20}, KVM_MERGE_NONE);  // everything stays
    all.append(n_tokens);
    std::vector<Row> expected;
    for (uint32_t h = 0; h < kQHeads; ++h) {
      expected.push_back(answer_of(all, last, h));
    }
    // Tokens are given up at once, by the masses that were observed before.
    const auto served = [&](uint32_t merge) {
      World world(budget, merge, KVM_CODEC_F32, 1, KVM_SEQ_MANUAL_COMMIT);
      world.append(world.seq, n_tokens);
      EXPECT_LT(world.mean_error(expected), 1e-5) << "all tokens are there";
      EXPECT_TRUE(world.rig.verb(SeqVerb::kCommit, world.seq, n_tokens).status.is_ok());
      world.attend(world.seq, last);
      if (data.set <= 3) {
        Model model(budget, merge);
        model.append(n_tokens);
        EXPECT_TRUE(!model.is_clear || std::ranges::max(world.errors(model, last)) < 2e-5);
        n_checked += model.is_clear ? 1 : 0;
      }
      return world.mean_error(expected) / static_cast<double>(n_sets);
    };
    mean.dropped += served(KVM_MERGE_NONE);
    mean.weighted += served(KVM_MERGE_WEIGHTED);
    mean.counted += served(KVM_MERGE_COUNTED);
    Model released(budget, kReleased);
    released.append(n_tokens);
    for (uint32_t h = 0; h < kQHeads; ++h) {
      mean.released += error_of(answer_of(released, last, h), expected[h]) /
                       static_cast<double>(n_sets * kQHeads);
    }
  }
  EXPECT_GE(n_checked, 5) << "of 9 answers, against the rule";
  data = {};
  return mean;
}

// The order of errors that clustered tokens give: what is dropped is missing, what joins by the
// released form shrinks its token, by the paper's it has the weight of one token, what is counted
// that of all. It is .484, .451, .440, .277.
TEST(Merge, JoiningLosesLessThanDropping) {
  const Errors errors = mean_errors({.n_clusters = 48, .spread = 0.8, .query_scale = 2.0},
                                    {.n_sinks = 0, .n_recent = 64, .n_heavy = 102}, 512, 30);
  EXPECT_LT(errors.released, 0.95 * errors.dropped) << errors.text();
  EXPECT_LT(errors.weighted, 0.985 * errors.released) << errors.text();
  EXPECT_LT(errors.counted, 0.8 * errors.weighted) << errors.text();
}

// Where clusters are tight and queries ask for nothing in particular, joining does little without
// counts, and the released form no less than the paper's.
TEST(Merge, CountsMatterMostWhereQueriesAreFlat) {
  const Errors errors = mean_errors({}, {.n_sinks = 0, .n_recent = 64, .n_heavy = 72}, 768, 12);
  EXPECT_LT(errors.released, errors.dropped) << errors.text();
  EXPECT_LT(errors.weighted, errors.dropped) << errors.text();
  EXPECT_NEAR(errors.weighted, errors.released, 0.02 * errors.dropped) << errors.text();
  EXPECT_LT(errors.counted, 0.8 * errors.weighted) << errors.text();
}

// Forks go on from what their parent has, each for itself, and threads change no bit.
TEST(Merge, ForksAndThreads) {
  for (const uint32_t codec : {KVM_CODEC_BF16, KVM_CODEC_I8, KVM_CODEC_F8E4M3}) {
    SCOPED_TRACE(codec);
    std::vector<std::vector<std::byte>> answers;
    for (const uint32_t n_threads : {1u, 3u}) {
      World world({.n_heavy = 70}, KVM_MERGE_COUNTED, codec, n_threads);
      for (int i = 0; i < 12; ++i) {
        world.append(world.seq, 60);
      }
      const RequestResult child = world.rig.verb(SeqVerb::kFork, world.seq, KVM_POSITION_END);
      ASSERT_TRUE(child.status.is_ok());
      for (int i = 0; i < 5; ++i) {
        world.append(world.seq, 90);
      }
      answers.push_back(world.o.bytes());
      ASSERT_TRUE(world.rig.verb(SeqVerb::kFree, world.seq).status.is_ok());
      for (int i = 0; i < 5; ++i) {
        world.append(child.seq, 90);
      }
      answers.push_back(world.o.bytes());
    }
    for (const auto& answer : answers) {
      EXPECT_EQ(answer, answers[0]);
    }
  }
}

// A prompt that comes at once is given up 1,024 tokens at a time.
TEST(Merge, LongPrompts) {
  World world({.n_recent = 200, .n_heavy = 1500}, KVM_MERGE_COUNTED, KVM_CODEC_BF16, 2);
  world.append(world.seq, 6000);
  auto info = world.rig.engine->seq_info(world.rig.client, world.seq);
  ASSERT_TRUE(info.is_ok());
  EXPECT_LT(info.value().bytes, uint64_t{3000} * kKvHeads * 2 * kDim * 2);
  for (uint32_t h = 0; h < kQHeads; ++h) {
    for (uint32_t i = 0; i < kDim; ++i) {
      EXPECT_TRUE(std::isfinite(world.o.get(0, 0, h, i)));
    }
  }
}

// Keys that are 0 or no numbers are near to nothing, and go.
TEST(Merge, KeysWithoutADirection) {
  World world({.n_sinks = 0, .n_recent = 1, .n_heavy = 8}, KVM_MERGE_WEIGHTED);
  Buffer k(Dtype::kF32, 1, 128, kKvHeads, kDim), v = k;
  for (uint32_t t = 0; t < 128; ++t) {
    for (uint32_t h = 0; h < kKvHeads; ++h) {
      for (uint32_t i = 0; i < kDim; ++i) {
        k.set(0, t, h, i, t % 2 == 0 ? 0.0f : NAN);
        v.set(0, t, h, i, 1.0f);
      }
    }
  }
  StepRequest step;
  step.space = world.rig.engine->seq_info(world.rig.client, world.seq).value().space;
  step.append = true;
  step.items = {append_item(world.seq, 128)};
  step.k = k.view();
  step.v = v.view();
  EXPECT_TRUE(world.rig.run(std::move(step)).status.is_ok());
}

}  // namespace
}  // namespace kvm::engine::testing
