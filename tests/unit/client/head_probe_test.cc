// SPDX-License-Identifier: Apache-2.0
// The probe finds heads that were made to echo and to induce, and only those.
#include "client/head_probe.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace kvm::client {
namespace {

constexpr uint32_t kDim = 64;
constexpr uint32_t kPeriod = 40;
constexpr uint32_t kCopies = 4;
constexpr uint32_t kPrefix = 1;
constexpr uint32_t kTokens = kPrefix + kPeriod * kCopies;
constexpr uint32_t kKvHeads = 4;
constexpr uint32_t kGroup = 3;

// A prompt whose tokens have random directions. q head 4 (kv head 1) asks for its own token; q head
// 8 (kv head 2) asks for what the token before each key was, as an induction head does; all
// others ask for anything.
struct Prompt {
  Prompt() : q(kTokens * kKvHeads * kGroup * kDim), k(kTokens * kKvHeads * kDim) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    std::vector<std::vector<float>> words(kPeriod + 1, std::vector<float>(kDim));
    for (std::vector<float>& word : words) {
      for (float& x : word) {
        x = normal(random);
      }
    }
    const auto word_at = [&](uint32_t t) -> const std::vector<float>& {
      return t < kPrefix ? words[kPeriod] : words[(t - kPrefix) % kPeriod];
    };
    for (uint32_t t = 0; t < kTokens; ++t) {
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        const std::vector<float>& said = h == 2 && t > 0 ? word_at(t - 1) : word_at(t);
        for (uint32_t i = 0; i < kDim; ++i) {
          k[(t * kKvHeads + h) * kDim + i] = h == 1 || h == 2 ? said[i] : normal(random);
        }
      }
      for (uint32_t h = 0; h < kKvHeads * kGroup; ++h) {
        for (uint32_t i = 0; i < kDim; ++i) {
          q[(t * kKvHeads * kGroup + h) * kDim + i] =
              h == 4 || h == 8 ? 2 * word_at(t)[i] : normal(random);
        }
      }
    }
  }
  kvm_probe_params params() const {
    kvm_probe_params p{};
    p.struct_size = sizeof p;
    p.n_tokens = kTokens;
    p.n_prefix = kPrefix;
    p.period = kPeriod;
    p.n_q_heads = kKvHeads * kGroup;
    p.n_kv_heads = kKvHeads;
    p.head_dim = kDim;
    p.q = kvm_host_tensor(q.data(), q.size() * sizeof(float), KVM_DTYPE_F32);
    p.k = kvm_host_tensor(k.data(), k.size() * sizeof(float), KVM_DTYPE_F32);
    return p;
  }

  std::vector<float> q;
  std::vector<float> k;
};

TEST(HeadProbe, FindsPlantedHeads) {
  const Prompt prompt;
  for (const uint32_t n_rows : {0u, 20u, 100000u}) {
    kvm_probe_params params = prompt.params();
    params.n_rows = n_rows;
    float echo[kKvHeads];
    float induction[kKvHeads];
    ASSERT_TRUE(probe_heads(params, echo, induction).is_ok());
    for (uint32_t h = 0; h < kKvHeads; ++h) {
      // An echo head also gives its own position a share: 1 of up to 4 copies.
      EXPECT_EQ(echo[h] > 0.4f, h == 1) << "echo of " << h << " is " << echo[h];
      EXPECT_EQ(induction[h] > 0.8f, h == 2) << "induction of " << h << " is " << induction[h];
      EXPECT_LE(echo[h], 1.0f);
      EXPECT_LE(induction[h], 1.0f);
    }
  }
}

// Against the definition, on attention that is nothing in particular.
TEST(HeadProbe, ScoresAreTheMeanMassOnTheTargets) {
  const Prompt prompt;
  kvm_probe_params params = prompt.params();
  params.n_rows = kTokens;
  params.scale = 0.3f;
  float echo[kKvHeads];
  float induction[kKvHeads];
  ASSERT_TRUE(probe_heads(params, echo, induction).is_ok());
  for (uint32_t h = 0; h < kKvHeads; ++h) {
    double best_echo = 0;
    double best_induction = 0;
    for (uint32_t g = 0; g < kGroup; ++g) {
      double sums[2] = {};
      for (uint32_t t = kPrefix + kPeriod; t < kTokens; ++t) {
        double mass[3] = {};  // of all, of echo targets, of induction targets
        for (uint32_t x = 0; x <= t; ++x) {
          double dot = 0;
          for (uint32_t i = 0; i < kDim; ++i) {
            dot += double{prompt.q[(t * kKvHeads * kGroup + h * kGroup + g) * kDim + i]} *
                   double{prompt.k[(x * kKvHeads + h) * kDim + i]};
          }
          const double weight = std::exp(dot * double{params.scale} - 60);
          mass[0] += weight;
          mass[1] += x >= kPrefix && x < t && (t - x) % kPeriod == 0 ? weight : 0;
          mass[2] += x > kPrefix && x <= t && (t + 1 - x) % kPeriod == 0 ? weight : 0;
        }
        sums[0] += mass[1] / mass[0] / (kTokens - kPrefix - kPeriod);
        sums[1] += mass[2] / mass[0] / (kTokens - kPrefix - kPeriod);
      }
      best_echo = std::max(best_echo, sums[0]);
      best_induction = std::max(best_induction, sums[1]);
    }
    EXPECT_NEAR(double{echo[h]}, best_echo, 1e-4);
    EXPECT_NEAR(double{induction[h]}, best_induction, 1e-4);
  }
}

// A stride of 0 is packed: rows follow what the heads of one span, as in every other call.
TEST(HeadProbe, RowsArePackedBehindHeadsThatAreApart) {
  const Prompt prompt;
  std::vector<float> apart(prompt.k.size() * 2, NAN);
  for (size_t i = 0; i < prompt.k.size(); ++i) {
    apart[i / kDim * 2 * kDim + i % kDim] = prompt.k[i];
  }
  kvm_probe_params params = prompt.params();
  float expected[kKvHeads] = {}, echo[kKvHeads] = {};
  ASSERT_TRUE(probe_heads(params, expected, nullptr).is_ok());
  params.k = kvm_host_tensor(apart.data(), apart.size() * sizeof(float), KVM_DTYPE_F32);
  params.k.stride_head = 2 * kDim;
  ASSERT_TRUE(probe_heads(params, echo, nullptr).is_ok());
  for (uint32_t h = 0; h < kKvHeads; ++h) {
    EXPECT_EQ(echo[h], expected[h]);
  }
}

TEST(HeadProbe, RefusesWhatItCannotBe) {
  const Prompt prompt;
  const auto message_of = [&](auto spoil) {
    kvm_probe_params params = prompt.params();
    spoil(&params);
    float echo[kKvHeads] = {-1};
    const Status status = probe_heads(params, echo, nullptr);
    EXPECT_EQ(status.code(), KVM_ERR_INVALID);
    EXPECT_EQ(echo[0], -1.0f);
    return std::string(status.message());
  };
  EXPECT_NE(message_of([](auto* p) { p->n_tokens -= 1; }).find("n_tokens is 160"),
            std::string::npos);
  EXPECT_NE(message_of([](auto* p) { p->period = 1; }).find("period is 1"), std::string::npos);
  EXPECT_NE(message_of([](auto* p) { p->n_kv_heads = 5; }).find("n_q_heads is 12"),
            std::string::npos);
  EXPECT_NE(message_of([](auto* p) { p->head_dim = 0; }).find("head_dim is 0"), std::string::npos);
  EXPECT_NE(message_of([](auto* p) { p->q.buffer.size /= 2; }).find("q has"), std::string::npos);
  EXPECT_NE(message_of([](auto* p) { p->k.stride_row = UINT64_MAX; }).find("k has"),
            std::string::npos);
  EXPECT_NE(message_of([](auto* p) { p->scale = -1; }).find("scale is -1"), std::string::npos);
}

}  // namespace
}  // namespace kvm::client
