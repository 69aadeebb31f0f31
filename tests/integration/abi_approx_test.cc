// SPDX-License-Identifier: Apache-2.0
// Indexes and the approximate modes of kvm.h, over both libraries.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/integration/abi_rig.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kTokens = 5000;
constexpr uint32_t kQHeads = 4;
constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kDim = 64;

class AbiApprox : public ServiceTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(open("abi-approx-test"));
    index_.kind = KVM_INDEX_SKETCH;
    index_.min_tokens = 512;
    space_params_.struct_size = sizeof(space_params_);
    space_params_.name = "approx";
    space_params_.n_layers = 1;
    space_params_.n_q_heads = kQHeads;
    space_params_.n_kv_heads = kKvHeads;
    space_params_.head_dim_k = kDim;
    space_params_.indexes = &index_;
    space_params_.n_indexes = 1;
    ASSERT_EQ(kvm_space_register(client_, &space_params_, &space_), KVM_OK) << kvm_last_error();
    ASSERT_EQ(kvm_seq_create(client_, space_, nullptr, &seq_), KVM_OK) << kvm_last_error();
    q_ = random_floats(&random_, size_t{kQHeads} * kDim);
    append();
  }

  void append() {
    auto k = random_floats(&random_, size_t{kTokens} * kKvHeads * kDim);
    auto v = random_floats(&random_, size_t{kTokens} * kKvHeads * kDim);
    for (float& value : v) {
      value += 0.5f;
    }
    const size_t at = size_t{1234} * kKvHeads * kDim + 17;  // of kv head 0
    if (spoil_ == Spoil::kKey) {
      k[at] = NAN;
    } else if (spoil_ == Spoil::kValue) {
      v[at] = INFINITY;
    }
    kvm_item item{};
    item.seq = seq_;
    item.append_position = KVM_POSITION_END;
    item.n_append = kTokens;
    kvm_step_params params = step_params(&item);
    params.k = tensor_of(k);
    params.v = tensor_of(v);
    ASSERT_EQ(kvm_append(queue_, &params), KVM_OK) << kvm_last_error();
  }
  kvm_step_params step_params(const kvm_item* item) const {
    kvm_step_params params{};
    params.struct_size = sizeof(params);
    params.flags = KVM_STEP_F32_VALUES;
    params.space = space_;
    params.n_items = 1;
    params.items = item;
    return params;
  }
  struct Answer {
    std::vector<float> o = std::vector<float>(size_t{kQHeads} * kDim);
    std::vector<float> lse = std::vector<float>(kQHeads);
    std::vector<float> err = std::vector<float>(size_t{kQHeads} * 2, -1.0f);
    kvm_step_stats stats{};
  };
  // The status of an attend with one row at the end. choose: sets mode and its numbers.
  template <typename Choose>
  kvm_status attend(Answer* answer, Choose choose) {
    kvm_item item{};
    item.seq = seq_;
    item.n_query = 1;
    item.query_position = KVM_POSITION_END;
    kvm_step_params params = step_params(&item);
    params.q = tensor_of(q_);
    params.o = tensor_of(answer->o);
    params.lse = tensor_of(answer->lse);
    params.err = tensor_of(answer->err);
    choose(&params);
    answer->stats.struct_size = sizeof(answer->stats);
    return kvm_attend(queue_, &params, &answer->stats);
  }
  static double relative_error(const Answer& a, const Answer& exact, uint32_t head) {
    double difference = 0;
    double norm = 0;
    for (size_t i = size_t{head} * kDim; i < (size_t{head} + 1) * kDim; ++i) {
      difference += std::pow(double{a.o[i]} - double{exact.o[i]}, 2);
      norm += std::pow(double{exact.o[i]}, 2);
    }
    return std::sqrt(difference / norm);
  }

  std::mt19937 random_{3};
  kvm_index_params index_{};
  kvm_space_params space_params_{};
  kvm_space_id space_ = 0;
  kvm_seq_id seq_ = 0;
  std::vector<float> q_;
  enum class Spoil { kNothing, kKey, kValue } spoil_ = Spoil::kNothing;
};

TEST_F(AbiApprox, ModesAnswerAndSayWhatTheyDid) {
  Answer exact;
  ASSERT_EQ(attend(&exact, [](auto*) {}), KVM_OK) << kvm_last_error();
  EXPECT_EQ(exact.stats.mode, uint32_t{KVM_MODE_EXACT});
  EXPECT_EQ(exact.err, std::vector<float>(size_t{kQHeads} * 2, 0.0f));
  EXPECT_EQ(exact.stats.keys_read, uint64_t{kTokens} * kKvHeads);

  Answer sampled;
  ASSERT_EQ(attend(&sampled,
                   [](kvm_step_params* p) {
                     p->mode = KVM_MODE_SAMPLED;
                     p->budget = 500;
                     p->seed = 4;
                   }),
            KVM_OK)
      << kvm_last_error();
  EXPECT_EQ(sampled.stats.mode, uint32_t{KVM_MODE_SAMPLED});
  EXPECT_EQ(sampled.stats.keys_present, exact.stats.keys_present);
  EXPECT_LT(sampled.stats.keys_read, exact.stats.keys_read / 2);
  EXPECT_LT(sampled.stats.bytes_read, exact.stats.bytes_read);
  EXPECT_GT(sampled.stats.err_max, 0.0f);

  Answer verified;
  ASSERT_EQ(attend(&verified,
                   [](kvm_step_params* p) {
                     p->mode = KVM_MODE_VERIFIED;
                     p->eps = 0.1f;
                   }),
            KVM_OK)
      << kvm_last_error();
  EXPECT_LE(verified.stats.err_max, 0.1f);
  for (uint32_t head = 0; head < kQHeads; ++head) {
    // Bars of 1 % and the like; three times as much is no accident.
    EXPECT_LE(relative_error(sampled, exact, head), 3 * double{sampled.err[size_t{head} * 2]});
    EXPECT_LE(relative_error(verified, exact, head), 0.1);
    EXPECT_NEAR(verified.lse[head], exact.lse[head], 0.1f);
  }

  Answer top;
  ASSERT_EQ(attend(&top,
                   [](kvm_step_params* p) {
                     p->mode = KVM_MODE_TOPK;
                     p->budget = 500;
                   }),
            KVM_OK)
      << kvm_last_error();
  EXPECT_EQ(top.stats.mode, uint32_t{KVM_MODE_TOPK});
  EXPECT_TRUE(std::isnan(top.stats.err_max));
  EXPECT_TRUE(std::isnan(top.err[0]));
  EXPECT_LT(top.lse[0], exact.lse[0]);
}

// One token whose key, or value, is not finite, in the middle of what the index covers: rows of its
// kv head answer NaN in every mode, and are counted; the others answer as ever.
TEST_F(AbiApprox, NotFiniteTokensAreSeenInEveryMode) {
  Answer before;
  ASSERT_EQ(attend(&before, [](auto*) {}), KVM_OK) << kvm_last_error();
  EXPECT_EQ(before.stats.n_not_finite, 0u);
  for (const bool key : {true, false}) {
    ASSERT_EQ(kvm_seq_free(client_, seq_), KVM_OK);
    ASSERT_EQ(kvm_seq_create(client_, space_, nullptr, &seq_), KVM_OK) << kvm_last_error();
    random_.seed(3);
    (void)random_floats(&random_, size_t{kQHeads} * kDim);
    spoil_ = key ? Spoil::kKey : Spoil::kValue;
    append();
    for (const uint32_t mode :
         {KVM_MODE_EXACT, KVM_MODE_TOPK, KVM_MODE_SAMPLED, KVM_MODE_VERIFIED, KVM_MODE_AUTO}) {
      SCOPED_TRACE(std::to_string(mode) + (key ? ", K" : ", V"));
      Answer answer;
      ASSERT_EQ(attend(&answer,
                       [mode](kvm_step_params* p) {
                         p->mode = mode;
                         const bool counts = mode == KVM_MODE_TOPK || mode == KVM_MODE_SAMPLED;
                         p->budget = counts ? 300 : 0;
                       }),
                KVM_OK)
          << kvm_last_error();
      if (mode == KVM_MODE_TOPK && !key) {
        // The key is not among those that the answer is made of: its value is not read.
        EXPECT_EQ(answer.stats.n_not_finite, 0u);
        EXPECT_FALSE(std::isnan(answer.o[0]));
        continue;
      }
      EXPECT_EQ(answer.stats.n_not_finite, 2u);
      EXPECT_TRUE(std::isnan(answer.stats.err_max));
      for (uint32_t head = 0; head < kQHeads; ++head) {
        const bool is_spoiled = head < 2;  // those of kv head 0
        EXPECT_EQ(std::isnan(answer.lse[head]), is_spoiled && key) << head;
        EXPECT_EQ(std::isnan(answer.err[size_t{head} * 2]), is_spoiled || mode == KVM_MODE_TOPK)
            << head;
        for (uint32_t d = 0; d < kDim; ++d) {
          ASSERT_EQ(std::isnan(answer.o[size_t{head} * kDim + d]), is_spoiled) << head;
        }
      }
      if (mode == KVM_MODE_EXACT) {
        EXPECT_TRUE(
            std::equal(before.o.begin() + 2 * kDim, before.o.end(), answer.o.begin() + 2 * kDim));
      }
    }
  }
}

// A query that is not finite spoils its row, whatever the mode.
TEST_F(AbiApprox, NotFiniteQueriesAreSeenInEveryMode) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    q_[3] = bad;
    for (const uint32_t mode :
         {KVM_MODE_EXACT, KVM_MODE_TOPK, KVM_MODE_SAMPLED, KVM_MODE_VERIFIED, KVM_MODE_AUTO}) {
      SCOPED_TRACE(mode);
      Answer answer;
      ASSERT_EQ(attend(&answer,
                       [mode](kvm_step_params* p) {
                         p->mode = mode;
                         p->budget = mode == KVM_MODE_TOPK || mode == KVM_MODE_SAMPLED ? 300 : 0;
                       }),
                KVM_OK)
          << kvm_last_error();
      EXPECT_EQ(answer.stats.n_not_finite, 1u);
      EXPECT_TRUE(std::isnan(answer.stats.err_max));
      EXPECT_TRUE(std::isnan(answer.lse[0]) && std::isnan(answer.err[0]));
      EXPECT_TRUE(std::isnan(answer.o[0]) && std::isnan(answer.o[kDim - 1]));
      EXPECT_FALSE(std::isnan(answer.lse[1]) || std::isnan(answer.o[kDim]));
    }
  }
  // kvmd adds them up: three numbers, five modes, one row each.
  std::string text(1 << 20, '\0');
  size_t length = 0;
  ASSERT_EQ(kvm_get_stats_text(client_, text.data(), text.size(), &length), KVM_OK);
  text.resize(length);
  const std::string series = "\nkvm_attend_not_finite_rows_total ";
  if (const size_t at = text.find(series); at != std::string::npos) {
    EXPECT_EQ(std::stoul(text.substr(at + series.size())), 15u);
  } else {
    EXPECT_TRUE(is_embedded()) << text;
  }
}

TEST_F(AbiApprox, AutoKeepsAnErrorOrATime) {
  Answer exact;
  ASSERT_EQ(attend(&exact, [](auto*) {}), KVM_OK) << kvm_last_error();
  // Whatever this machine is measured to be: the error is kept, and what was done is said.
  Answer by_error;
  ASSERT_EQ(attend(&by_error,
                   [](kvm_step_params* p) {
                     p->mode = KVM_MODE_AUTO;
                     p->eps = 0.15f;
                   }),
            KVM_OK)
      << kvm_last_error();
  EXPECT_TRUE(by_error.stats.mode == KVM_MODE_EXACT || by_error.stats.mode == KVM_MODE_VERIFIED)
      << by_error.stats.mode;
  EXPECT_EQ(by_error.stats.mode == KVM_MODE_EXACT, by_error.stats.n_exact == kQHeads);
  EXPECT_LE(by_error.stats.err_max, 0.15f);
  // A second is enough for everything.
  Answer by_time;
  ASSERT_EQ(attend(&by_time,
                   [](kvm_step_params* p) {
                     p->mode = KVM_MODE_AUTO;
                     p->budget = 1'000'000'000;
                   }),
            KVM_OK)
      << kvm_last_error();
  EXPECT_EQ(by_time.stats.mode, uint32_t{KVM_MODE_EXACT});
  EXPECT_EQ(by_time.stats.n_exact, kQHeads);
  EXPECT_EQ(by_time.o, exact.o);
  for (uint32_t head = 0; head < kQHeads; ++head) {
    EXPECT_LE(relative_error(by_error, exact, head), 0.15);
  }
}

// A service that audits every answer.
class AbiAudit : public AbiApprox {
 protected:
  void SetUp() override {
    ::setenv("KVM_AUDIT_EVERY", "1", 1);
    AbiApprox::SetUp();
    ::unsetenv("KVM_AUDIT_EVERY");
  }
  // A number of the metrics, whose line begins with `name`.
  uint64_t metric(const std::string& name) {
    std::string text(1 << 20, '\0');
    size_t length = 0;
    EXPECT_EQ(kvm_get_stats_text(client_, text.data(), text.size(), &length), KVM_OK);
    const size_t at = text.find("\n" + name + " ");
    EXPECT_NE(at, std::string::npos) << name;
    return at == std::string::npos ? 0 : std::stoull(text.substr(at + name.size() + 2));
  }
};

TEST_F(AbiAudit, TrueErrorsAreInTheMetrics) {
  EXPECT_EQ(metric("kvm_audit_every"), 1u);
  const std::string done = "kvm_audit_answers_total{mode=\"sampled\"}";
  EXPECT_EQ(metric(done), 0u);
  Answer answer;
  ASSERT_EQ(attend(&answer,
                   [](kvm_step_params* p) {
                     p->mode = KVM_MODE_SAMPLED;
                     p->budget = 100;
                   }),
            KVM_OK)
      << kvm_last_error();
  for (int i = 0; i < 2000 && metric(done) < kKvHeads; ++i) {
    ::usleep(10'000);
  }
  EXPECT_EQ(metric(done), kKvHeads);
  EXPECT_EQ(metric("kvm_audit_error_count{mode=\"sampled\",kind=\"true\"}"), kQHeads);
  EXPECT_EQ(metric("kvm_audit_barred_rows_total{mode=\"sampled\"}"), kQHeads);
  EXPECT_EQ(metric("kvm_audit_answers_total{mode=\"topk\"}"), 0u);
}

TEST(AbiAuditOptions, WrongOnesAreRefused) {
  if (!is_embedded()) {
    GTEST_SUCCEED() << "kvmd has options of its own";
    return;
  }
  for (const char* name : {"KVM_AUDIT_EVERY", "KVM_COST_MODEL"}) {
    ::setenv(name, "often", 1);
    kvm_client* client = nullptr;
    EXPECT_EQ(kvm_open_embedded(nullptr, &client), KVM_ERR_INVALID) << name;
    EXPECT_NE(std::string(kvm_last_error()).find("often"), std::string::npos) << kvm_last_error();
    ::unsetenv(name);
  }
}

TEST_F(AbiApprox, IndexMemoryIsCounted) {
  Answer answer;
  ASSERT_EQ(attend(&answer,
                   [](kvm_step_params* p) {
                     p->mode = KVM_MODE_SAMPLED;
                     p->budget = 500;
                   }),
            KVM_OK);
  kvm_stats stats{};
  stats.struct_size = sizeof(stats);
  ASSERT_EQ(kvm_get_stats(client_, &stats), KVM_OK);
  EXPECT_GT(stats.index_bytes, 0u);
  EXPECT_EQ(stats.n_index_blocks, (kTokens - 64) / 64 * kKvHeads);
  EXPECT_EQ(stats.n_index_refused, 0u);
  kvm_seq_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kvm_seq_get_info(client_, seq_, &info), KVM_OK);
  EXPECT_EQ(info.bytes_index, stats.index_bytes);
  ASSERT_EQ(kvm_seq_free(client_, seq_), KVM_OK);
  ASSERT_EQ(kvm_get_stats(client_, &stats), KVM_OK);
  EXPECT_EQ(stats.index_bytes, 0u);
}

TEST_F(AbiApprox, BadNumbersHaveTheirSentence) {
  struct Bad {
    kvm_status status;
    const char* sentence;
    void (*choose)(kvm_step_params*);
  };
  const Bad cases[] = {
      {KVM_ERR_INVALID, "budget is 0", [](kvm_step_params* p) { p->mode = KVM_MODE_TOPK; }},
      {KVM_ERR_INVALID, "proposal is LSH",
       [](kvm_step_params* p) {
         p->mode = KVM_MODE_VERIFIED;
         p->proposal = KVM_PROPOSAL_LSH;
       }},
      {KVM_ERR_INVALID, "eps is 1.5",
       [](kvm_step_params* p) {
         p->mode = KVM_MODE_SAMPLED;
         p->eps = 1.5f;
       }},
      {KVM_ERR_INVALID, "delta is 1",
       [](kvm_step_params* p) {
         p->mode = KVM_MODE_SAMPLED;
         p->delta = 1;
       }},
      {KVM_ERR_INVALID, "mode", [](kvm_step_params* p) { p->mode = 6; }},
      {KVM_ERR_INVALID, "proposal", [](kvm_step_params* p) { p->proposal = 4; }},
      {KVM_ERR_UNSUPPORTED, "GRAPH",
       [](kvm_step_params* p) {
         p->mode = KVM_MODE_SAMPLED;
         p->proposal = KVM_PROPOSAL_GRAPH;
       }},
  };
  for (const Bad& bad : cases) {
    SCOPED_TRACE(bad.sentence);
    Answer answer;
    EXPECT_EQ(attend(&answer, bad.choose), bad.status);
    EXPECT_NE(std::string(kvm_last_error()).find(bad.sentence), std::string::npos)
        << kvm_last_error();
    EXPECT_EQ(answer.err[0], -1.0f);
  }
}

TEST_F(AbiApprox, ASpaceSaysForCallsThatDoNot) {
  space_params_.name = "defaults";
  space_params_.default_mode = KVM_MODE_SAMPLED;
  space_params_.default_proposal = KVM_PROPOSAL_SKETCH;
  space_params_.default_delta = 0.1f;
  space_params_.default_budget = 500;
  ASSERT_EQ(kvm_space_register(client_, &space_params_, &space_), KVM_OK) << kvm_last_error();
  kvm_space_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kvm_space_get_info(client_, space_, &info), KVM_OK) << kvm_last_error();
  EXPECT_EQ(info.default_mode, uint32_t{KVM_MODE_SAMPLED});
  EXPECT_EQ(info.default_proposal, uint32_t{KVM_PROPOSAL_SKETCH});
  EXPECT_EQ(info.default_eps, 0.0f);  // of a sample with a budget, none is none
  EXPECT_EQ(info.default_delta, 0.1f);
  EXPECT_EQ(info.default_budget, 500u);
  ASSERT_EQ(kvm_seq_create(client_, space_, nullptr, &seq_), KVM_OK) << kvm_last_error();
  append();

  const auto answer = [this](auto choose) {
    Answer got;
    EXPECT_EQ(attend(&got, choose), KVM_OK) << kvm_last_error();
    return got;
  };
  const auto expect_same = [](const Answer& got, const Answer& named) {
    EXPECT_EQ(got.stats.mode, named.stats.mode);
    EXPECT_EQ(got.stats.keys_read, named.stats.keys_read);
    EXPECT_EQ(got.o, named.o);
    EXPECT_EQ(got.lse, named.lse);
    EXPECT_EQ(got.err, named.err);
  };
  const auto named = [](float eps, uint64_t budget) {
    return [eps, budget](kvm_step_params* p) {
      p->mode = KVM_MODE_SAMPLED;
      p->proposal = KVM_PROPOSAL_SKETCH;
      p->eps = eps;
      p->delta = 0.1f;
      p->budget = budget;
      p->seed = 4;
    };
  };
  const Answer sampled = answer([](kvm_step_params* p) { p->seed = 4; });
  EXPECT_EQ(sampled.stats.mode, uint32_t{KVM_MODE_SAMPLED});
  EXPECT_GT(sampled.stats.err_max, 0.0f);
  expect_same(sampled, answer(named(0, 500)));
  // Own numbers; an own eps is not for the space's budget to overrule.
  expect_same(answer([](kvm_step_params* p) {
                p->budget = 100;
                p->seed = 4;
              }),
              answer(named(0, 100)));
  expect_same(answer([](kvm_step_params* p) {
                p->eps = 0.2f;
                p->seed = 4;
              }),
              answer(named(0.2f, 0)));
  const Answer exact = answer([](kvm_step_params* p) { p->mode = KVM_MODE_EXACT; });
  EXPECT_EQ(exact.stats.mode, uint32_t{KVM_MODE_EXACT});
  EXPECT_EQ(exact.stats.keys_read, exact.stats.keys_present);
  EXPECT_EQ(exact.stats.n_exact, 0u);
}

TEST_F(AbiApprox, BadDefaultsHaveTheirSentence) {
  const auto expect = [](kvm_status got, kvm_status status, const char* sentence) {
    EXPECT_EQ(got, status) << sentence;
    EXPECT_NE(std::string(kvm_last_error()).find(sentence), std::string::npos) << kvm_last_error();
  };
  const auto registered = [this] {
    kvm_space_id id = 0;
    return kvm_space_register(client_, &space_params_, &id);
  };
  space_params_.default_mode = KVM_MODE_VERIFIED;
  expect(registered(), KVM_ERR_EXISTS, "default_mode is 1 there and 4 here");
  space_params_.name = "defaults";
  space_params_.default_budget = 9;
  space_params_.default_mode = KVM_MODE_DEFAULT;
  expect(registered(), KVM_ERR_INVALID, "and default_budget 9; these must be 0");
  space_params_.default_budget = 0;
  space_params_.default_mode = 6;
  expect(registered(), KVM_ERR_INVALID, "default_mode is 6");
  space_params_.default_mode = KVM_MODE_SAMPLED;
  space_params_.default_eps = INFINITY;
  expect(registered(), KVM_ERR_INVALID, "default_eps is inf");
  space_params_.default_eps = 0;
  space_params_.default_proposal = KVM_PROPOSAL_GRAPH;
  expect(registered(), KVM_ERR_UNSUPPORTED, "default_proposal GRAPH");

  // Without an index: exact, as where the call names the mode.
  space_params_.default_proposal = KVM_PROPOSAL_DEFAULT;
  space_params_.default_mode = KVM_MODE_VERIFIED;
  space_params_.n_indexes = 0;
  ASSERT_EQ(kvm_space_register(client_, &space_params_, &space_), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_create(client_, space_, nullptr, &seq_), KVM_OK) << kvm_last_error();
  append();
  Answer answer;
  ASSERT_EQ(attend(&answer, [](auto*) {}), KVM_OK) << kvm_last_error();
  EXPECT_EQ(answer.stats.mode, uint32_t{KVM_MODE_EXACT});
  EXPECT_EQ(answer.stats.n_exact, kQHeads);
  // A call's own numbers meet the space's mode.
  expect(attend(&answer, [](kvm_step_params* p) { p->proposal = KVM_PROPOSAL_LSH; }),
         KVM_ERR_INVALID, "proposal is LSH with mode VERIFIED");
  EXPECT_NE(std::string(kvm_last_error()).find("the default of space 'defaults'"),
            std::string::npos)
      << kvm_last_error();
}

TEST_F(AbiApprox, IndexParametersAreOfTheSpace) {
  kvm_space_id same = 0;
  EXPECT_EQ(kvm_space_register(client_, &space_params_, &same), KVM_OK) << kvm_last_error();
  EXPECT_EQ(same, space_);
  space_params_.n_indexes = 0;
  EXPECT_EQ(kvm_space_register(client_, &space_params_, &same), KVM_ERR_EXISTS);
  EXPECT_NE(std::string(kvm_last_error()).find("index"), std::string::npos) << kvm_last_error();
  space_params_.name = "other";
  space_params_.n_indexes = 1;
  index_.kind = 6;
  EXPECT_EQ(kvm_space_register(client_, &space_params_, &same), KVM_ERR_INVALID);
  EXPECT_NE(std::string(kvm_last_error()).find("indexes[0].kind is 6"), std::string::npos)
      << kvm_last_error();
  space_params_.indexes = nullptr;
  EXPECT_EQ(kvm_space_register(client_, &space_params_, &same), KVM_ERR_INVALID);
  EXPECT_NE(std::string(kvm_last_error()).find("indexes is NULL"), std::string::npos)
      << kvm_last_error();
}

}  // namespace
}  // namespace kvm::testing
