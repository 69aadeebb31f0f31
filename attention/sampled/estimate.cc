// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/estimate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

namespace kvm::attention {
namespace {

struct KappaAt {
  double delta;
  double kappa;
};
constexpr std::array<KappaAt, 3> kKappas{{{0.1, 1.1}, {0.01, 1.45}, {0.003, 1.65}}};

double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    sum += a[i] * b[i];
  }
  return sum;
}

constexpr double kMostOwn = 0.99;  // of D, that a key's share is believed to be
// How much more mass than was read the sketch is believed to see: e^20, where what it says of a
// single key is cut off as well (gather_kernel.h).
constexpr double kMostControl = 4.85e8;

double root(double x) { return std::sqrt(std::max(x, 0.0)); }

// What came of sums that overflowed is no small number.
double known(double x) { return std::isnan(x) ? INFINITY : x; }

}  // namespace

double kappa_of(double delta) {
  const double x = std::log(std::clamp(delta, 1e-9, 1.0));
  size_t i = 0;
  while (i + 2 < kKappas.size() && delta < kKappas[i + 1].delta) {
    ++i;
  }
  const double from = std::log(kKappas[i].delta);
  const double to = std::log(kKappas[i + 1].delta);
  const double share = (x - from) / (to - from);
  const double kappa = kKappas[i].kappa + share * (kKappas[i + 1].kappa - kKappas[i].kappa);
  return std::max(kappa, kKappas[0].kappa);
}

double gaussian_of(double delta) {
  // P(|z| > x) = erfc(x / sqrt 2) falls with x: bisection.
  const double tail = std::clamp(delta, 1e-9, 0.99);
  double low = 0;
  double high = 8;
  for (int i = 0; i < 40; ++i) {
    const double middle = (low + high) / 2;
    (std::erfc(middle / std::numbers::sqrt2) > tail ? low : high) = middle;
  }
  return high;
}

double few_draws(double draws, double z) {
  const double n = std::max(2.0, draws - 1.0);  // in this order: no number counts as few
  const double g = (n - 1.5) / ((n - 1.0) * (n - 1.0));
  return std::max(std::sqrt(n * std::expm1(z * z * g)) / z, 1.0);
}

RowEstimate estimate_row(const RowTotals& t, const Kappas& kappas, std::span<double> o) {
  RowEstimate e;
  e.mass = t.fixed + t.closed + t.open;
  for (size_t d = 0; d < o.size(); ++d) {
    o[d] = e.mass > 0 ? (t.n_fixed[d] + t.n_sample[d]) / e.mass : 0.0;
  }
  const double o2 = dot(o, o);
  e.norm_o = root(o2);
  e.lse_mass = e.mass;
  e.bar = kBarFloor * e.norm_o;
  e.bar_lse = kLseBarFloor;
  if (!t.any_open) {
    return e;
  }
  if (t.open <= 0) {
    // Nothing of what was left to chance was drawn: no sigma can be had from the sample. What the
    // sketch says of it may be missing, and moves o by its share of |v - o|. Of how long its values
    // are, the closed keys give an idea; without them only what is below the floor is known.
    const double share = known(e.mass > 0 ? t.open_mass / e.mass : 1.0);
    const double length = t.closed > 0 ? root(t.norm2 / t.closed) : INFINITY;
    if (share > kBarFloor / 2) {
      e.bar = std::max(e.bar, known(share * (e.norm_o + length)));
    }
    e.bar_lse = std::max(e.bar_lse, share);
    return e;
  }
  const double a = t.open / std::max(t.hat, 1e-300);
  const double controlled = e.mass + a * (t.open_mass - t.hat);
  const bool is_believed = controlled <= kMostControl * e.mass;  // neither infinite nor no number
  if (is_believed && controlled > 0) {
    e.lse_mass = controlled;
  }
  const double mean = t.residual / t.open;
  const double variance = std::max(t.residual2 / t.open - mean * mean, 0.0);
  e.noise = root(variance);
  const double v2 = t.chance_norm2 - 2 * dot(o, t.chance_v) + o2 * t.chance;
  // Of a key's own share of D: o has moved towards its value by that much.
  const double own = std::min(t.chance / std::max(t.open * e.mass, 1e-300), kMostOwn);
  const double alone = 1.0 / (1.0 - own);
  e.sigma_o = alone * root(v2) / e.mass;
  const double lse2 = t.chance - 2 * a * t.chance_hat + a * a * t.chance_hat2;
  e.sigma_lse = root(lse2) / e.lse_mass;
  const double sample = t.closed + t.open;
  const double r2 = t.norm2 / sample - 2 * dot(o, t.n_sample) / sample + o2;
  const double noisy = std::exp(std::min(variance, 50.0));
  const double model = alone * a * root(noisy * t.spread * r2) / e.mass;
  const double model_lse = a * root((noisy - 1) * t.spread) / e.lse_mass;
  e.draws = std::min(t.n_open, t.open * t.open / std::max(t.chance, 1e-300));
  const double growth = few_draws(e.draws, kappas.gaussian) *
                        std::max(1.0, std::exp((std::min(variance, 50.0) - kNoiseAllowance) / 2));
  e.bar = std::max(e.bar, kappas.o * growth * std::max(known(e.sigma_o), known(model)));
  e.bar_lse =
      std::max(e.bar_lse, kappas.lse * growth * std::max(known(e.sigma_lse), known(model_lse)));
  if (!is_believed) {
    // Sketch and sample have nothing to do with each other, and neither says how far off it is.
    e.bar = e.bar_lse = INFINITY;
  }
  return e;
}

}  // namespace kvm::attention
