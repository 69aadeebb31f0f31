// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/attention/approx_reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/merge.h"

namespace kvm::attention::testing {

SampleState sample_of(const Head& head, uint32_t shard) {
  const Context c = make_context(head.input, head.plan, head.prepared->data());
  SampleState s =
      sample_state(c, head.states->data() + shard * head.plan.state_bytes, head.scratch->data());
  s.candidates.n = s.head->n_candidates;
  return s;
}

std::map<uint64_t, std::vector<double>> scan_all(const Head& head) {
  const Context c = make_context(head.input, head.plan, head.prepared->data());
  std::map<uint64_t, std::vector<double>> keys;
  for_stretches_in(c, 0, UINT64_MAX, [&](const Use& use, const Stretch& stretch) {
    const SketchedRun& run = head.sketches[stretch.index_run];
    const hash_index::SketchSpan span{.frame = run.frame,
                                      .query = c.prepared.queries + use.query_at,
                                      .blocks = run.blocks,
                                      .n_blocks = run.n_blocks,
                                      .position = run.position};
    for (uint64_t t = stretch.position; t < stretch.end(); t += 64) {
      std::vector<float> logits(size_t{c.rows} * 64);
      std::vector<float> norms(64);
      hash_index::scan_logits(span, c.rows, static_cast<uint32_t>((t - run.position) / 64),
                              logits.data(), norms.data());
      for (uint32_t i = 0; i < 64; ++i) {
        std::vector<double>& key = keys[t + i];
        for (uint32_t r = 0; r < c.rows; ++r) {
          key.push_back(static_cast<double>(logits[r * 64 + i]));
        }
        key.push_back(static_cast<double>(norms[i]));
      }
    }
  });
  return keys;
}

Want reference_of(const Head& head, uint32_t row) {
  struct Key {
    double s, s_hat, p;
    uint64_t t;
  };
  const auto scanned = scan_all(head);
  const SampleState sample = sample_of(head, 0);
  std::vector<Key> drawn;
  std::map<uint64_t, double> p_of;
  for (uint32_t i = 0; i < sample.candidates.n; ++i) {
    const auto size = static_cast<double>(sample.candidates.size[i]);
    const uint64_t t = sample.candidates.position[i];
    p_of[t] = std::min(1.0, size);
    if (static_cast<double>(sample.candidates.random[i]) < size) {
      drawn.push_back({head.logit(row, t),
                       static_cast<double>(sample.candidates.logits[i * head.rows() + row]),
                       std::min(1.0, size), t});
    }
  }
  double top = -INFINITY;
  for (uint64_t t = 0; t < head.shape.n_tokens; ++t) {
    if (head.sees(row, t)) {
      top = std::max(top, head.logit(row, t));
    }
  }
  const float* sinks = head.problem.sink_logits;
  double d_hat =
      sinks == nullptr ? 0 : std::exp(static_cast<double>(sinks[row % head.shape.group]) - top);
  std::vector<double> n_hat(head.shape.dim_v);
  const auto add = [&](uint64_t t, double weight) {
    d_hat += weight;
    for (uint32_t d = 0; d < head.shape.dim_v; ++d) {
      n_hat[d] += weight * static_cast<double>(head.v[t][d]);
    }
  };
  for (uint64_t t = 0; t < head.shape.n_tokens; ++t) {
    if (head.sees(row, t) && !scanned.contains(t)) {
      add(t, std::exp(head.logit(row, t) - top));
    }
  }
  double n_open = 0, open = 0, square = 0, hat = 0, mass = 0, e1 = 0, e2 = 0;
  for (const Key& key : drawn) {
    const double w = std::exp(key.s - top);
    add(key.t, w / key.p);
    mass += w / key.p;
    if (key.p < 1) {
      const double e = key.s - key.s_hat;
      open += w / key.p;
      n_open += 1;
      square += (1 - key.p) * (w / key.p) * (w / key.p);
      hat += std::exp(key.s_hat - top) / key.p;
      e1 += w / key.p * e;
      e2 += w / key.p * e * e;
    }
  }
  Want want;
  for (double n : n_hat) {
    want.o.push_back(n / d_hat);
  }
  const double a = open / hat;
  double open_mass = 0, spread = 0;
  const auto& log_c = sample.head->log_c;
  for (const auto& [t, key] : scanned) {
    double size = hash_index::kMinSize;
    for (uint32_t r = 0; r < head.rows(); ++r) {
      size = std::max(size, std::exp(key[r] + static_cast<double>(log_c[r])) * key.back());
    }
    const double p = p_of.contains(t) ? p_of[t] : std::min(1.0, size);
    const double h = std::exp(key[row] - top);
    open_mass += p < 1 ? h : 0;
    spread += p < 1 ? h * h * (1 - p) / p : 0;
  }
  const double d_lse = d_hat + a * (open_mass - hat);
  want.lse = top + std::log(d_lse);
  want.noise = std::sqrt(std::max(e2 / open - e1 / open * (e1 / open), 0.0));
  double v_o = 0, v_lse = 0, r2 = 0, o2 = 0;
  for (double x : want.o) {
    o2 += x * x;
  }
  for (const Key& key : drawn) {
    const double w = std::exp(key.s - top);
    double away = 0;
    for (uint32_t d = 0; d < head.shape.dim_v; ++d) {
      const double x = static_cast<double>(head.v[key.t][d]) - want.o[d];
      away += x * x;
    }
    const double chance = (1 - key.p) / (key.p * key.p);
    const double predicted = key.p < 1 ? a * std::exp(key.s_hat - top) : 0;
    v_o += chance * w * w * away;
    v_lse += chance * (w - predicted) * (w - predicted);
    r2 += w / key.p * away / mass;
  }
  want.sigma_o = std::sqrt(v_o) / d_hat;
  want.sigma_lse = std::sqrt(v_lse) / d_lse;
  const double v = want.noise * want.noise;
  const double model = a * std::sqrt(std::exp(v) * spread * r2) / d_hat;
  // Student's t by its density: its two-sided quantile of 0.01.
  const double n = std::max(std::min(open * open / square, n_open) - 1, 2.0);
  double t = 0;
  double tail = 1;
  const double norm = std::exp(std::lgamma((n + 1) / 2) - std::lgamma(n / 2)) / std::sqrt(n * M_PI);
  for (; tail > 0.01; t += 1e-3) {
    tail -= 2e-3 * norm * std::pow(1 + (t + 5e-4) * (t + 5e-4) / n, -(n + 1) / 2);
  }
  const double kappa = 1.45 * t / 2.575829 * std::max(1.0, std::exp((v - 0.36) / 2));
  const double alone = 1 / (1 - std::min(square / (open * d_hat), 0.99));
  want.bar = std::max(kappa * alone * std::max(want.sigma_o, model), 2e-3 * std::sqrt(o2));
  return want;
}

void expect_reference(const Head& head, double tolerance) {
  for (uint32_t r = 0; r < head.rows(); ++r) {
    SCOPED_TRACE(r);
    const Want want = reference_of(head, r);
    double size = 0;
    double difference = 0;
    for (uint32_t d = 0; d < head.shape.dim_v; ++d) {
      const double e = static_cast<double>(head.o[r * head.shape.dim_v + d]) - want.o[d];
      size += want.o[d] * want.o[d];
      difference += e * e;
    }
    EXPECT_LT(std::sqrt(difference / size), tolerance);
    EXPECT_NEAR(static_cast<double>(head.lse[r]), want.lse, tolerance);
    EXPECT_NEAR(static_cast<double>(head.report.err_o[r]), want.bar / std::sqrt(size),
                2e-2 * want.bar / std::sqrt(size));
    EXPECT_NEAR(static_cast<double>(head.report.noise[r]), want.noise, 1e-3 + 1e-2 * want.noise);
  }
}

std::set<uint64_t> drawn_by(const Head& head) {
  std::set<uint64_t> drawn;
  for (uint32_t shard = 0; shard < head.plan.n_shards; ++shard) {
    const SampleState s = sample_of(head, shard);
    for (uint32_t i = 0; i < s.candidates.n; ++i) {
      if (s.candidates.random[i] < s.candidates.size[i]) {
        drawn.insert(s.candidates.position[i]);
      }
    }
  }
  return drawn;
}

}  // namespace kvm::attention::testing
