// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numbers>

#include "hash_index/lsh/planes.h"

namespace kvm::hash_index {

double collision_probability(double cosine, uint32_t n_bits) {
  const double x = std::isnan(cosine) ? 0.0 : std::clamp(cosine, -1.0, 1.0);
  // 1 - acos(x) / pi, without the cancellation at x near -1.
  return std::pow(std::acos(-x) / std::numbers::pi, static_cast<double>(n_bits));
}

double inclusion_probability(double cosine, const LshParams& params) {
  const double c = collision_probability(cosine, params.n_bits);
  const double tables = params.n_tables;
  const double m = tables - 1.0;
  double u = 0.0;
  if (m * c < 0.1) {
    // 1 - ... would cancel. Two of L, plus three of L, ...: the terms shrink by more than 30 each.
    double term = 0.5 * tables * m * c * c * std::exp((m - 1.0) * std::log1p(-c));
    for (double hits = 2.0; hits <= tables && hits < 14.0; ++hits) {
      u += term;
      term *= (tables - hits) / (hits + 1.0) * (c / (1.0 - c));
    }
  } else {
    u = -std::expm1(m * std::log1p(-c) + std::log1p(m * c));
  }
  return std::clamp(u, kMinInclusion, 1.0);
}

void log_inclusion(const float* cosines, size_t n, const LshParams& params, float* out) {
  const InclusionArgs args = {params.n_bits, params.n_tables, static_cast<float>(kMinInclusion), 0};
  active_lsh_kernels().inclusion(&args, cosines, n, out);
}

void inverse_inclusion(const float* cosines, size_t n, const LshParams& params, float* out) {
  const InclusionArgs args = {params.n_bits, params.n_tables, static_cast<float>(kMinInclusion), 1};
  active_lsh_kernels().inclusion(&args, cosines, n, out);
}

}  // namespace kvm::hash_index
