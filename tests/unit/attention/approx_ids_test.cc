// SPDX-License-Identifier: Apache-2.0
// Which keys are drawn: the same for a seed on every instruction table, but for those whose chance
// lies within a rounding of their random number; and the sums that shards keep are those of the
// keys that were drawn, in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "attention/sampled/approx.h"
#include "attention/sampled/core.h"
#include "attention/sampled/sample.h"
#include "tests/unit/attention/approx_rig.h"

namespace kvm::attention {
namespace {

using testing::Head;

struct Drawn {
  uint64_t position = 0;
  double p = 0;
};

SampleState state_of(const Head& head, const Context& c, uint32_t shard) {
  SampleState s =
      sample_state(c, head.states->data() + shard * head.plan.state_bytes, head.scratch->data());
  s.candidates.n = s.head->n_candidates;
  return s;
}

// The sample of the last run; `doubtful` gets those whose random number is within 1e-3 of their p.
std::vector<Drawn> drawn_of(const Head& head, std::set<uint64_t>* doubtful = nullptr) {
  const Context c = make_context(head.input, head.plan, head.prepared->data());
  std::vector<Drawn> out;
  for (uint32_t shard = 0; shard < head.plan.n_shards; ++shard) {
    const SampleState s = state_of(head, c, shard);
    for (uint32_t i = 0; i < s.candidates.n; ++i) {
      const double size = s.candidates.size[i];
      const double random = s.candidates.random[i];
      if (random < size) {
        out.push_back({s.candidates.position[i], std::min(1.0, size)});
      }
      if (doubtful != nullptr && std::fabs(random / size - 1) < 1e-3) {
        doubtful->insert(s.candidates.position[i]);
      }
    }
  }
  return out;
}

TEST(SampledIds, AreTheSameOnEveryInstructionTable) {
  for (const uint64_t seed : {1, 2, 3}) {
    std::set<uint64_t> first, doubtful;
    for (const KernelTable* table : available_tables()) {
      SCOPED_TRACE(std::string(table->name) + ", seed " + std::to_string(seed));
      Head head({.n_tokens = 12000}, 40 + seed);
      head.input.table = table;
      head.input.params.budget = 400;
      head.input.params.seed = seed;
      head.build();
      head.run();
      std::set<uint64_t> ids;
      for (const Drawn& key : drawn_of(head, &doubtful)) {
        ids.insert(key.position);
      }
      ASSERT_GT(ids.size(), 300u);
      if (first.empty()) {
        first = ids;
        continue;
      }
      std::vector<uint64_t> differ;
      std::set_symmetric_difference(first.begin(), first.end(), ids.begin(), ids.end(),
                                    std::back_inserter(differ));
      for (const uint64_t id : differ) {
        EXPECT_TRUE(doubtful.contains(id)) << id;
      }
      EXPECT_LT(differ.size(), ids.size() / 50);
    }
  }
}

TEST(SampledSums, OfShardsAreThoseOfTheDrawnKeys) {
  Head head({.n_tokens = 70000, .group = 2, .dim_k = 16, .dim_v = 8}, 23);
  head.problem.fp32_weights = true;
  // A sample that may grow, so that every shard keeps its candidates, and need not.
  head.input.params.mode = ApproxMode::kVerified;
  head.input.params.eps = 0.5f;
  head.input.params.budget = 1500;
  head.build();
  head.run();
  ASSERT_GT(head.plan.n_shards, 1u);
  ASSERT_EQ(head.report.n_exact, 0u);
  const Context c = make_context(head.input, head.plan, head.prepared->data());
  for (uint32_t row = 0; row < head.rows(); ++row) {
    double d = 0;
    std::vector<double> n(head.shape.dim_v);
    double top = -INFINITY;
    for (const Drawn& key : drawn_of(head)) {
      top = std::max(top, head.logit(row, key.position));
    }
    for (const Drawn& key : drawn_of(head)) {
      const double w = std::exp(head.logit(row, key.position) - top) / key.p;
      d += w;
      for (uint32_t i = 0; i < head.shape.dim_v; ++i) {
        n[i] += w * static_cast<double>(head.v[key.position][i]);
      }
    }
    double d_shards = 0;
    std::vector<double> n_shards(head.shape.dim_v);
    for (uint32_t shard = 0; shard < head.plan.n_shards; ++shard) {
      const SampleState s = state_of(head, c, shard);
      const double w = std::exp(static_cast<double>(s.sums.m[row]) - top);
      for (uint32_t i = 0; i < kGatherKeys; ++i) {
        for (const GatherSum which : {kSumClosed, kSumOpen}) {
          d_shards +=
              w * static_cast<double>(s.sums.sums[(row * kGatherSums + which) * kGatherKeys + i]);
        }
      }
      for (const GatherVector which : {kVecClosed, kVecOpen}) {
        const float* acc =
            s.sums.acc + (which * padded_rows(head.rows()) + row) * acc_stride(head.problem);
        for (uint32_t i = 0; i < head.shape.dim_v; ++i) {
          n_shards[i] += w * static_cast<double>(acc[i]);
        }
      }
    }
    EXPECT_NEAR(d_shards / d, 1.0, 1e-4);
    for (uint32_t i = 0; i < head.shape.dim_v; ++i) {
      EXPECT_NEAR(n_shards[i] / d, n[i] / d, 1e-3);
    }
  }
}

}  // namespace
}  // namespace kvm::attention
