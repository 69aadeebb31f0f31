// SPDX-License-Identifier: Apache-2.0
// Memory Mosaics v1 and v2 (docs/policies/memory_mosaics.md): what an engine asks of kvm.h to have
// their memories, against the papers' batch formulas in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kvm.h"
#include "tests/integration/abi_rig.h"
#include "tests/integration/abi_steps.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kHeads = 2;
constexpr uint32_t kDim = 16;
constexpr size_t kRow = size_t{kHeads} * kDim;
// fp32 throughout (KVM_STEP_F32_VALUES), logits up to 30.
constexpr double kNear = 3e-5;
constexpr double kNothing = -std::numeric_limits<double>::infinity();

// Uniform in [-1, 1], the same for the same arguments.
double raw(uint64_t seed, uint64_t token, uint32_t head, uint32_t i) {
  uint64_t x = seed * 0x632be59bd9b4e019u + token * 0x9e3779b97f4a7c15u + head * 1009 + i;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return static_cast<double>(x >> 11) * 0x1p-52 - 1.0;
}

// A text as a memory has it. keys: [token][head][dim]; values: one token fewer, since each looks at
// the token behind its own.
struct Text {
  std::vector<float> keys;
  std::vector<float> values;

  uint64_t n_tokens() const { return keys.size() / kRow; }
  const float* key(uint64_t t, uint32_t head) const { return &keys[t * kRow + head * kDim]; }
  const float* value(uint64_t t, uint32_t head) const { return &values[t * kRow + head * kDim]; }
};

// Appends x, brought to a length.
void put_normed(const std::vector<double>& x, double length, std::vector<float>* to) {
  double sum = 0;
  for (const double value : x) {
    sum += value * value;
  }
  for (const double value : x) {
    to->push_back(static_cast<float>(length * value / std::sqrt(sum)));
  }
}

// The extractors of v1: a leaky average of what precedes a token is its key, the mean of itself and
// of the next is its value. seed: other weights. length: of keys, 1 in v2.
Text text_of(const std::vector<uint64_t>& tokens, uint64_t seed, double length = 2.0) {
  Text text;
  std::vector<std::vector<double>> average(kHeads, std::vector<double>(kDim));
  for (size_t t = 0; t < tokens.size(); ++t) {
    for (uint32_t head = 0; head < kHeads; ++head) {
      const double leak = std::exp(-0.5 - head);
      std::vector<double> ahead(kDim);
      for (uint32_t i = 0; i < kDim; ++i) {
        average[head][i] = leak * average[head][i] + raw(seed, tokens[t], head, i);
        if (t + 1 < tokens.size()) {
          ahead[i] =
              0.4 * raw(seed + 1, tokens[t], head, i) + 0.6 * raw(seed + 1, tokens[t + 1], head, i);
        }
      }
      put_normed(average[head], length, &text.keys);
      if (t + 1 < tokens.size()) {
        put_normed(ahead, 1.5, &text.values);
      }
    }
  }
  return text;
}

std::vector<uint64_t> random_tokens(uint64_t seed, size_t n) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> tokens(n);
  for (uint64_t& token : tokens) {
    token = random() % 40;
  }
  return tokens;
}

// The batch formula: of one head, a softmax over pairs whose logits are given; 0 over none.
class ReadOut {
 public:
  void add(double logit, const float* value) {
    logits_.push_back(logit);
    values_.push_back(value);
  }
  // Pairs [begin, end) as token t sees them.
  void add_pairs(const Text& text, uint64_t t, uint32_t head, uint64_t begin, uint64_t end,
                 double scale) {
    for (uint64_t i = begin; i < end; ++i) {
      double dot = 0;
      for (uint32_t d = 0; d < kDim; ++d) {
        dot +=
            static_cast<double>(text.key(t, head)[d]) * static_cast<double>(text.key(i, head)[d]);
      }
      add(scale * dot, text.value(i, head));
    }
  }
  // How far (o, lse) is from it.
  double error(const float* o, float lse) const {
    const double most = logits_.empty() ? 0 : *std::max_element(logits_.begin(), logits_.end());
    std::vector<double> sum(kDim);
    double weights = 0;
    for (size_t i = 0; i < logits_.size(); ++i) {
      const double weight = std::exp(logits_[i] - most);
      weights += weight;
      for (uint32_t d = 0; d < kDim; ++d) {
        sum[d] += weight * static_cast<double>(values_[i][d]);
      }
    }
    for (double& x : sum) {
      x /= logits_.empty() ? 1 : weights;
    }
    return std::max(difference(o, sum),
                    difference(&lse, {logits_.empty() ? kNothing : most + std::log(weights)}));
  }

 private:
  std::vector<double> logits_;
  std::vector<const float*> values_;
};

class AbiMosaics : public StepTest {
 protected:
  void SetUp() override { ASSERT_NO_FATAL_FAILURE(open("abi-mosaics-test")); }

  // Scale 1, no positions, no policy.
  kvm_space_params memory(const char* name, uint32_t n_layers = 1) {
    kvm_space_params params = params_of(name, n_layers, kHeads, kDim);
    params.softmax_scale = 1;
    return params;
  }
  // Pairs that token `before_end` has completed, from `begin` on: (k, v) of [begin, before_end).
  void complete(kvm_space_id space, kvm_seq_id seq, uint32_t layer, const Text& text,
                uint64_t begin, uint64_t before_end) {
    const std::vector<float> k(&text.keys[begin * kRow], &text.keys[0] + before_end * kRow);
    const std::vector<float> v(&text.values[begin * kRow], &text.values[0] + before_end * kRow);
    ASSERT_EQ(append(space, seq, layer, 1, static_cast<uint32_t>(before_end - begin), k, v), KVM_OK)
        << kvm_last_error();
  }
  // Tokens [begin, end) ask with their own keys, as if they stood at `position` and behind it.
  State ask(kvm_space_id space, kvm_seq_id seq, uint32_t layer, const Text& text, uint64_t begin,
            uint64_t end, uint64_t position, float scale = 0, uint32_t flags = 0) {
    const std::vector<float> q(&text.keys[begin * kRow], &text.keys[0] + end * kRow);
    return attend(space, seq, layer, position, q, static_cast<uint32_t>(end - begin), kHeads, scale,
                  flags);
  }
  // The whole text, `n` tokens at a time; the read-outs of all tokens but the first one.
  State run(kvm_space_id space, const Text& text, uint64_t n) {
    const kvm_seq_id seq = add_seq(space);
    State all;
    for (uint64_t begin = 0; begin < text.n_tokens(); begin += n) {
      const uint64_t end = std::min(begin + n, text.n_tokens());
      const uint64_t first = std::max(begin, uint64_t{1});
      if (first == end) {
        continue;  // token 0 has nothing to see
      }
      complete(space, seq, 0, text, first - 1, end - 1);
      const State part = ask(space, seq, 0, text, first, end, first - 1);
      all.o.insert(all.o.end(), part.o.begin(), part.o.end());
      all.lse.insert(all.lse.end(), part.lse.begin(), part.lse.end());
    }
    EXPECT_EQ(info_of(seq).n_tokens_max, text.n_tokens() - 1);
    return all;
  }
};

// v1: a pair is there once the next token has given its value, and a token sees those before it.
TEST_F(AbiMosaics, StepByStepIsTheBatchFormula) {
  const kvm_space_id space = add_space(memory("v1"));
  const Text text = text_of(random_tokens(1, 192), 10);
  const State decoded = run(space, text, 1);
  for (uint64_t t = 1; t < text.n_tokens(); ++t) {
    for (uint32_t head = 0; head < kHeads; ++head) {
      ReadOut expected;
      expected.add_pairs(text, t, head, 0, t, 1);
      const size_t at = (t - 1) * kHeads + head;
      ASSERT_LE(expected.error(&decoded.o[at * kDim], decoded.lse[at]), kNear) << "token " << t;
    }
  }
  EXPECT_EQ(run(space, text, 7), decoded) << "items of fewer than 24 rows have the same bits";
  const State whole = run(space, text, 192);
  EXPECT_EQ(run(space, text, 64), whole) << "and so have those of more";
  EXPECT_LE(difference(whole.o.data(), {decoded.o.begin(), decoded.o.end()}), kNear);
  // The first token sees an empty memory, which says 0.
  const State first = ask(space, add_seq(space), 0, text, 0, 1, 0);
  EXPECT_EQ(first.o, std::vector<float>(kRow));
  EXPECT_EQ(first.lse, std::vector<float>(kHeads, -std::numeric_limits<float>::infinity()));
}

// v2: smoothing by a Gaussian kernel of |k - k_i| whose bandwidth depends on how many pairs there
// are. With keys of length 1 that is a softmax whose scale is said with each request.
TEST_F(AbiMosaics, TheScaleGrowsWithTheCount) {
  const auto beta = [](uint64_t n) { return 0.8 * std::pow(static_cast<double>(n), 0.4) + 1.5; };
  const kvm_space_id space = add_space(memory("v2-scale"));
  const kvm_seq_id seq = add_seq(space);
  const Text text = text_of(random_tokens(2, 150), 20, 1.0);
  for (uint64_t t = 1; t < text.n_tokens(); ++t) {
    complete(space, seq, 0, text, t - 1, t);
    const auto scale = static_cast<float>(2 * beta(t));
    const State state = ask(space, seq, 0, text, t, t + 1, t - 1, scale);
    // Rows of one request with scales of their own have them in q.
    std::vector<float> q(text.key(t, 0), text.key(t, 0) + kRow);
    std::transform(q.begin(), q.end(), q.begin(), [&](float x) { return x * scale; });
    const State scaled = attend(space, seq, 0, t - 1, q, 1, kHeads);
    for (uint32_t head = 0; head < kHeads; ++head) {
      ReadOut expected;
      for (uint64_t i = 0; i < t; ++i) {
        double squares = 0;
        for (uint32_t d = 0; d < kDim; ++d) {
          squares += std::pow(
              static_cast<double>(text.key(t, head)[d]) - static_cast<double>(text.key(i, head)[d]),
              2);
        }
        // 2 beta k.k_i = 2 beta - beta |k - k_i|^2
        expected.add(2 * beta(t) - beta(t) * squares, text.value(i, head));
      }
      ASSERT_LE(expected.error(&state.o[head * kDim], state.lse[head]), kNear) << "token " << t;
      ASSERT_LE(expected.error(&scaled.o[head * kDim], scaled.lse[head]), kNear) << "token " << t;
    }
  }
}

// v2's masks: what the short-term memory has, t-h+1 to t-1, and the long-term one, up to t-m, is
// everything, and h-m pairs are in both. Keys are zeros, so that e^lse is how many are seen.
class AbiMosaicsV2 : public AbiMosaics {
 protected:
  static constexpr uint64_t kShort = 256;  // h
  static constexpr uint64_t kLag = 64;     // m
  enum Layer : uint32_t { kLongTerm = 0, kShortTerm = 1 };

  void SetUp() override {
    AbiMosaics::SetUp();
    recent_.layer_begin = kShortTerm;
    recent_.n_layers = 1;
    recent_.retention = KVM_RETAIN_SINKS_RECENT;
    recent_.n_recent = kShort - 1;
    recent_.slack = 64;
    kvm_space_params params = memory("v2", 2);
    params.policies = &recent_;
    params.n_policies = 1;
    space_ = add_space(params);
  }
  // The newest token asks both. It sees nothing in the long-term memory where t < m.
  State ask_short(kvm_seq_id seq, const Text& text, uint64_t t, float scale = 0) {
    return ask(space_, seq, kShortTerm, text, t, t + 1, t - 1, scale);
  }
  State ask_long(kvm_seq_id seq, const Text& text, uint64_t t, float scale = 0) {
    if (t < kLag) {
      return {std::vector<float>(kRow),
              std::vector<float>(kHeads, -std::numeric_limits<float>::infinity())};
    }
    return ask(space_, seq, kLongTerm, text, t, t + 1, t - kLag, scale);
  }

  kvm_policy_params recent_{};
  kvm_space_id space_ = 0;
};

TEST_F(AbiMosaicsV2, TheTwoMemoriesCoverEverything) {
  const kvm_seq_id seq = add_seq(space_);
  Text text;
  text.keys.resize(1200 * kRow);
  text.values.resize(1199 * kRow);
  uint64_t n_pairs = 0;
  for (const uint64_t t : {1u, 2u, 63u, 64u, 65u, 128u, 255u, 256u, 257u, 400u, 1000u}) {
    for (const uint32_t layer : {kLongTerm, kShortTerm}) {
      complete(space_, seq, layer, text, n_pairs, t);
    }
    n_pairs = t;
    const State recent = ask_short(seq, text, t);
    const State distant = ask_long(seq, text, t);
    const uint64_t n_recent = std::min(t, kShort - 1);
    const uint64_t n_distant = t < kLag ? 0 : t - kLag + 1;
    for (uint32_t head = 0; head < kHeads; ++head) {
      EXPECT_EQ(std::lround(std::exp(recent.lse[head])), static_cast<long>(n_recent)) << t;
      EXPECT_EQ(std::lround(std::exp(distant.lse[head])), static_cast<long>(n_distant)) << t;
    }
    if (t >= kShort) {
      EXPECT_EQ(n_recent + n_distant - t, kShort - kLag);
    }
  }
  // The short-term memory is a ring; the long-term one keeps everything.
  constexpr uint64_t kPage = KVM_PREFIX_TOKENS;
  const uint64_t n_left = (1000 - (kShort - 1) - 64) / kPage * kPage;
  EXPECT_EQ(info_of(seq).n_entries_dropped, n_left);
  EXPECT_EQ(info_of(seq).bytes, (2 * 1024 - n_left) * kRow * 2 * sizeof(float));
}

// Both memories, with keys and values of their own, and a persistent one that all sequences share:
// static pairs in a sequence that is published, merged with the long-term memory by their states.
TEST_F(AbiMosaicsV2, ThreeMemoriesTogether) {
  constexpr uint64_t kStatic = 90;
  constexpr uint64_t kPrompt = 384;
  constexpr uint64_t kTokens = 420;
  const std::vector<uint64_t> tokens = random_tokens(3, kTokens);
  const Text distant = text_of(tokens, 30, 1.0);
  const Text recent = text_of(tokens, 40, 1.0);
  const Text fixed = text_of(random_tokens(4, kStatic + 1), 50, 1.0);
  const auto scale = [](uint64_t n) {
    return static_cast<float>(2 * (0.5 * std::pow(static_cast<double>(n), 0.35) + 1));
  };
  constexpr float kStaticScale = 4;

  const kvm_space_id persistent = add_space(memory("persistent"));
  const kvm_seq_id table = add_seq(persistent);
  complete(persistent, table, 0, fixed, 0, kStatic);
  ASSERT_EQ(kvm_seq_publish(client_, table), KVM_OK) << kvm_last_error();
  EXPECT_EQ(append(persistent, table, 0, 1, 1, std::vector<float>(kRow), std::vector<float>(kRow)),
            KVM_ERR_PERMISSION)
      << "it is read-only";

  const auto ask_static = [&](uint64_t t) {
    return ask(persistent, table, 0, distant, t, t + 1, 0, kStaticScale, KVM_ITEM_NOT_CAUSAL);
  };
  // Both states of a row and of all its heads, in one.
  const auto merged = [](const State& a, const State& b) {
    State state = {std::vector<float>(kRow), std::vector<float>(kHeads)};
    const kvm_tensor o[] = {tensor_of(a.o), tensor_of(b.o)};
    const kvm_tensor lse[] = {tensor_of(a.lse), tensor_of(b.lse)};
    kvm_merge_params params{};
    params.struct_size = sizeof(params);
    params.n_states = 2;
    params.n_rows = 1;
    params.n_heads = kHeads;
    params.dim = kDim;
    params.o = o;
    params.lse = lse;
    params.out_o = tensor_of(state.o);
    params.out_lse = tensor_of(state.lse);
    EXPECT_EQ(kvm_merge(&params), KVM_OK) << kvm_last_error();
    return state;
  };

  const kvm_seq_id seq = add_seq(space_);
  const auto check = [&](uint64_t t, const State& in_short, const State& in_long) {
    const uint64_t first = t < kShort ? 0 : t - kShort + 1;
    const uint64_t end = t < kLag ? 0 : t - kLag + 1;
    const State in_static = ask_static(t);
    const State in_both = merged(in_long, in_static);
    for (uint32_t head = 0; head < kHeads; ++head) {
      const size_t at = head * kDim;
      ReadOut of_short, of_long, of_static, of_both;
      of_short.add_pairs(recent, t, head, first, t, static_cast<double>(scale(t - first)));
      of_long.add_pairs(distant, t, head, 0, end, static_cast<double>(scale(end)));
      of_both = of_long;
      for (uint64_t i = 0; i < kStatic; ++i) {
        double dot = 0;
        for (uint32_t d = 0; d < kDim; ++d) {
          dot += static_cast<double>(distant.key(t, head)[d]) *
                 static_cast<double>(fixed.key(i, head)[d]);
        }
        of_static.add(static_cast<double>(kStaticScale) * dot, fixed.value(i, head));
        of_both.add(static_cast<double>(kStaticScale) * dot, fixed.value(i, head));
      }
      ASSERT_LE(of_short.error(&in_short.o[at], in_short.lse[head]), kNear) << t;
      ASSERT_LE(of_long.error(&in_long.o[at], in_long.lse[head]), kNear) << t;
      ASSERT_LE(of_static.error(&in_static.o[at], in_static.lse[head]), kNear) << t;
      ASSERT_LE(of_both.error(&in_both.o[at], in_both.lse[head]), kNear) << t;
    }
  };
  const auto decode = [&](kvm_seq_id of, uint64_t t) {
    complete(space_, of, kLongTerm, distant, t - 1, t);
    complete(space_, of, kShortTerm, recent, t - 1, t);
    const uint64_t end = t < kLag ? 0 : t - kLag + 1;
    const uint64_t first = t < kShort ? 0 : t - kShort + 1;
    return std::vector<State>{ask_short(of, recent, t, scale(t - first)),
                              ask_long(of, distant, t, scale(std::max(end, uint64_t{1})))};
  };
  for (uint64_t t = 1; t < 80 && !HasFailure(); ++t) {
    const std::vector<State> states = decode(seq, t);
    check(t, states[0], states[1]);
  }
  // The rest of the prompt comes at once, then tokens again.
  complete(space_, seq, kLongTerm, distant, 79, kPrompt - 1);
  complete(space_, seq, kShortTerm, recent, 79, kPrompt - 1);
  kvm_seq_id child = 0;
  ASSERT_EQ(kvm_seq_fork(client_, seq, KVM_POSITION_END, &child), KVM_OK) << kvm_last_error();
  for (uint64_t t = kPrompt; t < kTokens && !HasFailure(); ++t) {
    const std::vector<State> states = decode(seq, t);
    check(t, states[0], states[1]);
    EXPECT_EQ(decode(child, t), states) << "a fork goes on alike";
  }

  // Other clients of the user have the static pairs, too.
  if (!is_embedded()) {
    kvm_client* other = connect_to_daemon(*daemon_, "another");
    kvm_queue* queue = nullptr;
    ASSERT_EQ(kvm_queue_create(other, nullptr, &queue), KVM_OK) << kvm_last_error();
    const std::vector<float> q(distant.key(9, 0), distant.key(9, 0) + kRow);
    EXPECT_EQ(
        attend(persistent, table, 0, 0, q, 1, kHeads, kStaticScale, KVM_ITEM_NOT_CAUSAL, queue),
        ask_static(9));
    kvm_queue_destroy(queue);
    kvm_client_close(other);
  }
}

// Tokens that a verifier rejects take their pairs along, and the pair before the first of them,
// whose value saw it. What follows is as if they had never been there.
TEST_F(AbiMosaicsV2, ADraftThatIsTakenBackWasNeverThere) {
  constexpr uint64_t kDraft = 5;
  const std::vector<uint64_t> tokens = random_tokens(5, 460);
  const Text text = text_of(tokens, 60);
  const kvm_seq_id calm = add_seq(space_);
  const kvm_seq_id bold = add_seq(space_);
  const auto complete_both = [&](kvm_seq_id seq, const Text& of, uint64_t begin, uint64_t end) {
    complete(space_, seq, kLongTerm, of, begin, end);
    complete(space_, seq, kShortTerm, of, begin, end);
  };
  complete_both(calm, text, 0, 339);
  complete_both(bold, text, 0, 339);
  uint64_t t = 340;  // the next token; pairs up to t - 2 are there
  for (uint64_t n_right = 0; t + kDraft < tokens.size(); n_right = (n_right + 1) % kDraft) {
    std::vector<uint64_t> drafted(tokens.begin(), tokens.begin() + static_cast<long>(t + kDraft));
    for (uint64_t i = t + n_right; i < drafted.size(); ++i) {
      drafted[i] = 40 + i % 7;
    }
    const Text draft = text_of(drafted, 60);
    complete_both(bold, draft, t - 1, t + kDraft - 1);
    ask(space_, bold, kShortTerm, draft, t, t + kDraft, t - 1);
    ask(space_, bold, kLongTerm, draft, t, t + kDraft, t - kLag);
    ASSERT_EQ(kvm_seq_truncate(client_, bold, t - 1 + n_right), KVM_OK) << kvm_last_error();
    // The verifier's own token, and its read-outs.
    complete_both(bold, text, t - 1 + n_right, t + n_right);
    complete_both(calm, text, t - 1, t + n_right);
    t += n_right;
    ASSERT_EQ(ask_short(bold, text, t), ask_short(calm, text, t)) << t;
    ASSERT_EQ(ask_long(bold, text, t), ask_long(calm, text, t)) << t;
    ++t;
  }
  EXPECT_GT(info_of(calm).n_entries_dropped, 0u);
  for (const bool is_short : {false, true}) {
    const State state = is_short ? ask_short(bold, text, t - 1) : ask_long(bold, text, t - 1);
    for (uint32_t head = 0; head < kHeads; ++head) {
      ReadOut expected;
      expected.add_pairs(text, t - 1, head, is_short ? t - kShort : 0, is_short ? t - 1 : t - kLag,
                         1);
      EXPECT_LE(expected.error(&state.o[head * kDim], state.lse[head]), kNear);
    }
  }
}

// A prefix of n tokens has n - 1 pairs: the last one's value is not known, and differs.
TEST_F(AbiMosaics, APrefixHasOnePairLess) {
  constexpr uint64_t kShared = 130;
  const kvm_space_id space = add_space(memory("prefix"));
  std::vector<uint64_t> tokens = random_tokens(6, 150);
  const Text one = text_of(tokens, 70);
  for (size_t t = kShared; t < tokens.size(); ++t) {
    tokens[t] = 40 + t % 9;
  }
  const Text two = text_of(tokens, 70);
  EXPECT_TRUE(std::equal(one.keys.begin(), one.keys.begin() + kShared * kRow, two.keys.begin()));
  EXPECT_TRUE(std::equal(one.values.begin(), one.values.begin() + (kShared - 1) * kRow,
                         two.values.begin()));
  EXPECT_NE(*one.value(kShared - 1, 0), *two.value(kShared - 1, 0));
  const kvm_seq_id prefix = add_seq(space);
  complete(space, prefix, 0, one, 0, kShared - 1);
  for (const Text* text : {&one, &two}) {
    kvm_seq_id seq = 0;
    ASSERT_EQ(kvm_seq_fork(client_, prefix, KVM_POSITION_END, &seq), KVM_OK) << kvm_last_error();
    for (uint64_t t = kShared; t < tokens.size(); ++t) {
      complete(space, seq, 0, *text, t - 1, t);
      const State state = ask(space, seq, 0, *text, t, t + 1, t - 1);
      for (uint32_t head = 0; head < kHeads; ++head) {
        ReadOut expected;
        expected.add_pairs(*text, t, head, 0, t, 1);
        ASSERT_LE(expected.error(&state.o[head * kDim], state.lse[head]), kNear) << t;
      }
    }
  }
}

// A B .. A: one layer answers B, since the value of the first A is what came behind it.
TEST_F(AbiMosaics, OneLayerSolvesInduction) {
  constexpr uint32_t kWords = kDim;
  const kvm_space_id space = add_space(memory("induction"));
  std::mt19937_64 random(7);
  std::vector<uint32_t> words(kWords);
  for (uint32_t i = 0; i < kWords; ++i) {
    words[i] = i;
  }
  for (int trial = 0; trial < 5; ++trial) {
    std::shuffle(words.begin(), words.end(), random);
    Text text;
    text.keys.resize((kWords + 1) * kRow);
    text.values.resize(kWords * kRow);
    const uint64_t again = random() % (kWords - 1);
    for (uint64_t t = 0; t <= kWords; ++t) {
      for (uint32_t head = 0; head < kHeads; ++head) {
        text.keys[t * kRow + head * kDim + (t < kWords ? words[t] : words[again])] = 6;
        if (t + 1 < kWords) {
          text.values[t * kRow + head * kDim + words[t + 1]] = 1;
        }
      }
    }
    const State all = run(space, text, 1);
    const float* const o = &all.o[(kWords - 1) * kRow];
    EXPECT_EQ(std::max_element(o, o + kDim) - o, words[again + 1]);
    EXPECT_GT(o[words[again + 1]], 0.99f);
  }
}

}  // namespace
}  // namespace kvm::testing
