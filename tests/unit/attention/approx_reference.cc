// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/attention/approx_reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

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

namespace {

struct Key {
  double s, s_hat, p;
  uint64_t t;
};

// error_shape of models/house/estimators.py, over the keys that the shards tell of.
ErrorShape shape_of(const Head& head, const std::vector<Key>& drawn, const std::vector<double>& o,
                    double top) {
  std::map<uint64_t, Key> by_position;
  for (const Key& key : drawn) {
    by_position[key.t] = key;
  }
  std::vector<std::vector<double>> terms;
  std::vector<double> weights;
  for (uint32_t shard = 0; shard < head.plan.n_shards; ++shard) {
    const ToldKeys told = sample_of(head, shard).told;
    const uint32_t most = std::max(kMostTold / head.plan.n_shards, 1u);
    const uint32_t step = (told.n + most - 1) / most;
    for (uint32_t i = 0; i < told.n; i += step) {
      const Key& key = by_position.at(told.position[i]);
      weights.push_back(static_cast<double>(told.weight) * step);
      const double c = std::exp(key.s - top) * std::sqrt((1 - key.p) * weights.back()) / key.p;
      terms.emplace_back();
      for (size_t d = 0; d < o.size(); ++d) {
        terms.back().push_back(c * (static_cast<double>(head.v[key.t][d]) - o[d]));
      }
    }
  }
  const auto product = [](const std::vector<double>& a, const std::vector<double>& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  };
  const size_t n = terms.size();
  double trace = 0, single = 0, pairs = 0, along = 0, count = 0;
  size_t start = 0;
  for (size_t i = 0; i < n; ++i) {
    const double own = product(terms[i], terms[i]);
    trace += own;
    single += own * own;
    along += std::pow(product(terms[i], o), 2);
    count += weights[i];
    start = own > product(terms[start], terms[start]) ? i : start;
    for (size_t j = 0; j < n; ++j) {
      pairs += i != j ? std::pow(product(terms[i], terms[j]), 2) : 0;
    }
  }
  ErrorShape shape;
  if (!(trace > 0)) {
    return shape;
  }
  single /= trace * trace;
  shape.along_o = along / (trace * product(o, o));
  shape.heaviest = product(terms[start], terms[start]) / (trace * weights[start]);
  shape.terms = count / static_cast<double>(n) / single;
  shape.squares = std::max(std::min(pairs / (trace * trace) / (1 - single), 1.0), single / 2);
  // Three rounds of power iteration over the terms.
  std::vector<double> u(n);
  u[start] = 1;
  double grown = 0;
  for (int round = 0; round < 3; ++round) {
    std::vector<double> sum(o.size());
    for (size_t i = 0; i < n; ++i) {
      for (size_t d = 0; d < o.size(); ++d) {
        sum[d] += u[i] * terms[i][d] / trace;
      }
    }
    for (size_t i = 0; i < n; ++i) {
      u[i] = product(terms[i], sum);
    }
    grown = std::sqrt(product(u, u));
    for (double& x : u) {
      x /= grown;
    }
  }
  double own = 0;
  double cubes = 0;
  for (size_t i = 0; i < n; ++i) {
    cubes += u[i] * u[i] * u[i];
    own += u[i] * u[i] * product(terms[i], terms[i]) / trace;
  }
  shape.largest = std::clamp((grown - own) / (1 - single), shape.squares, 1.0);
  shape.skewness2 = std::pow(shape.largest, 3) * cubes * cubes * static_cast<double>(n) / count;
  // No smaller than what the mean of the terms of all drawn keys says.
  std::vector<double> mean(o.size());
  double all = 0, spread = 0;
  for (const Key& key : drawn) {
    const double c = std::exp(2 * (key.s - top)) * (1 - key.p) / (key.p * key.p);
    all += c;
    for (size_t d = 0; d < o.size(); ++d) {
      const double away = static_cast<double>(head.v[key.t][d]) - o[d];
      mean[d] += c * away;
      spread += c * away * away;
    }
  }
  shape.largest = std::max(shape.largest, product(mean, mean) / (all * spread));
  shape.squares = std::max(shape.squares, shape.largest * shape.largest);
  return shape;
}

}  // namespace

Want reference_of(const Head& head, uint32_t row) {
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
  const ErrorShape shape = shape_of(head, drawn, want.o, top);
  const double draws = std::min(open * open / square, n_open);
  const double alone = 1 / (1 - std::min(square / (open * d_hat), 0.99));
  const double growth = std::max(1.0, std::exp(v - 0.81)) * std::sqrt(1 + shape.heaviest);
  const Kappa kappa(static_cast<double>(head.input.params.delta),
                    head.input.params.mode == ApproxMode::kVerified);
  double v2 = 0;
  for (const Key& key : drawn) {
    for (const float x : head.v[key.t]) {
      v2 += std::exp(key.s - top) / key.p / mass * static_cast<double>(x) * static_cast<double>(x);
    }
  }
  const double share = 1 - std::pow(static_cast<double>(head.input.params.delta), 1 / draws);
  const double unseen = 2 * share * open / d_hat * (std::sqrt(o2) + std::sqrt(v2));
  const double least = 2e-3 * std::sqrt(o2);
  const double bar = std::max(
      {kappa(shape, draws) * growth * alone * std::max(want.sigma_o, model), unseen, least});
  const double shorter = bar > least ? std::sqrt(shape.along_o) * bar : 0;
  want.bar = bar / (std::sqrt(o2) - shorter);
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
    EXPECT_NEAR(static_cast<double>(head.report.err_o[r]), want.bar, 2e-2 * want.bar);
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
