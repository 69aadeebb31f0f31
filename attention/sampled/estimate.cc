// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/estimate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace kvm::attention {
namespace {

double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    sum += a[i] * b[i];
  }
  return sum;
}

constexpr double kFewestDraws = 5;
// Wilson and Hilferty's root falls short by this much at one direction.
constexpr double kCarefully = 0.025;
// Of tr S at one direction; of more it falls with the fourth power of Kappa's `skew`.
constexpr double kStopping = 0.2;
constexpr double kLseCare = 1.1;
constexpr double kMostOwn = 0.99;  // of D, that a key's share is believed to be
// How much more mass than was read the sketch is believed to see: e^20, where what it says of a
// single key is cut off as well (gather_kernel.h).
constexpr double kMostControl = 4.85e8;
// Sums of squares are floats, whose smallest have lost digits: values this short, squared, are not
// believed to have the length that sums tell.
constexpr double kLeastSquare = 1e-30;

double root(double x) { return std::sqrt(std::max(x, 0.0)); }

// Sums that overflowed count as infinite, not as small.
double known(double x) { return std::isnan(x) ? INFINITY : x; }

}  // namespace

Kappa::Kappa(double delta, bool is_stopped) : stopping_(is_stopped ? kStopping : 0) {
  // P(z > x) = erfc(x / sqrt 2) / 2 falls with x: bisection.
  const double tail = 2 * std::clamp(delta, 1e-9, 0.4);
  double low = 0;
  double high = 8;
  for (int i = 0; i < 40; ++i) {
    const double middle = (low + high) / 2;
    (std::erfc(middle / std::numbers::sqrt2) > tail ? low : high) = middle;
  }
  z_ = high;
  log_delta_ = std::log(std::clamp(delta, 1e-9, 1.0));
}

double Kappa::chi_square(double n) const {
  // The cube root of a chi-square over its n degrees is normal with mean 1 - 2/(9n) and variance
  // 2/(9n).
  const double root = 1 - 2 / (9 * n) + z_ * std::sqrt(2 / (9 * n));
  return root * root * root;
}

double Kappa::fisher(double n, double m) const {
  // Solves for the ratio of two such roots: (mean_m x - mean_n)^2 = z^2 (var_m x^2 + var_n), x the
  // cube root.
  const double mean_n = 1 - 2 / (9 * n);
  const double mean_m = 1 - 2 / (9 * m);
  const double square = mean_m * mean_m - z_ * z_ * 2 / (9 * m);
  if (square <= 0) {
    return INFINITY;
  }
  const double rest = mean_n * mean_n - z_ * z_ * 2 / (9 * n);
  const double both = mean_n * mean_m;
  const double x = (both + std::sqrt(std::max(both * both - square * rest, 0.0))) / square;
  return x * x * x;
}

double Kappa::operator()(const ErrorShape& shape, double draws) const {
  const double m = std::max(kFewestDraws, std::min(draws, shape.terms)) - 1;
  const double n = 1 / shape.squares;
  const double skew = std::max(1.0, shape.squares / (shape.largest * shape.largest));
  const double known_variance = 1 + std::sqrt(shape.squares * skew) * (chi_square(skew) - 1);
  const double x2 = chi_square(1);
  const double skewed = 1 + shape.skewness2 * (x2 * x2 + 2 * x2 - 3) / 18;
  const double careful = 1 + kCarefully / skew + stopping_ / (skew * skew * skew * skew);
  return skewed * std::sqrt(careful * known_variance * fisher(n, m) / chi_square(n));
}

double Kappa::unseen_share(double draws) const {
  return -std::expm1(log_delta_ / std::max(1.0, draws));
}

double noise_growth(double variance) {
  return std::max(1.0, std::exp(std::min(variance, 50.0) - kNoiseAllowance));
}

double RowEstimate::bar(const Kappa& kappa, ErrorShape shape) const {
  shape.largest = std::max(shape.largest, least_largest);
  shape.squares = std::max(shape.squares, shape.largest * shape.largest);
  return std::max({least_bar, known(unseen * kappa.unseen_share(draws)),
                   known(kappa(shape, draws) * noise_growth(noise * noise) * sigma_o *
                         std::sqrt(1 + shape.heaviest))});
}

double RowEstimate::relative_bar(const Kappa& kappa, const ErrorShape& shape) const {
  const double absolute = bar(kappa, shape);
  if (absolute == 0) {
    return any_open ? INFINITY : 0;
  }
  // Rounding has no direction.
  const double shorter = absolute > least_bar ? root(shape.along_o) * absolute : 0;
  const double length = norm_o - shorter;
  return length > 0 ? known(absolute / length) : INFINITY;
}

double RowEstimate::bar_lse(const Kappa& kappa) const {
  return std::max(least_bar_lse, known(kLseCare * kappa(ErrorShape{}, draws) *
                                       noise_growth(noise * noise) * sigma_lse));
}

RowEstimate estimate_row(const RowTotals& t, std::span<double> o) {
  RowEstimate e;
  e.mass = t.fixed + t.closed + t.open;
  for (size_t d = 0; d < o.size(); ++d) {
    o[d] = e.mass > 0 ? (t.n_fixed[d] + t.n_sample[d]) / e.mass : 0.0;
  }
  const double o2 = dot(o, o);
  e.norm_o = root(o2);
  e.any_open = t.any_open;
  e.lse_mass = e.mass;
  e.least_bar = kBarFloor * e.norm_o;
  e.least_bar_lse = kLseBarFloor;
  if (!t.any_open) {
    return e;
  }
  const double sample = t.closed + t.open;
  if (sample > 0 && t.norm2 / sample + o2 < kLeastSquare) {
    e.least_bar = INFINITY;
  }
  if (t.open <= 0) {
    // Nothing of what was left to chance was drawn: no sigma can be had from the sample. What the
    // sketch says of it may be missing, and moves o by its share of |v - o|. How long its
    // values are, the closed keys tell roughly; without them only what is below the floor is known.
    const double share = known(e.mass > 0 ? t.open_mass / e.mass : 1.0);
    const double length = t.closed > 0 ? root(t.norm2 / t.closed) : INFINITY;
    if (share > kBarFloor / 2) {
      e.least_bar = std::max(e.least_bar, known(share * (e.norm_o + length)));
    }
    e.least_bar_lse = std::max(e.least_bar_lse, share);
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
  // Corrects for a key's own share of D: o has moved towards its value by that much.
  const double own = std::min(t.chance / std::max(t.open * e.mass, 1e-300), kMostOwn);
  const double alone = 1.0 / (1.0 - own);
  e.plug_in = alone * root(v2) / e.mass;
  const double lse2 = t.chance - 2 * a * t.chance_hat + a * a * t.chance_hat2;
  const double r2 = t.norm2 / sample - 2 * dot(o, t.n_sample) / sample + o2;
  const double noisy = std::exp(std::min(variance, 50.0));
  const double model = alone * a * root(noisy * t.spread * r2) / e.mass;
  const double model_lse = a * root((noisy - 1) * t.spread) / e.lse_mass;
  e.sigma_o = std::max(known(e.plug_in), known(model));
  e.sigma_lse = std::max(known(root(lse2) / e.lse_mass), known(model_lse));
  e.draws = std::min(t.n_open, t.open * t.open / std::max(t.chance, 1e-300));
  e.unseen = 2 * t.open / e.mass * (e.norm_o + root(t.norm2 / sample));
  // S along the mean of its terms, chance |mean - o|^2, is no more than lambda_max.
  double along = 0;
  for (size_t d = 0; d < o.size(); ++d) {
    const double away = t.chance_v[d] - t.chance * o[d];
    along += away * away;
  }
  e.least_largest = std::min(1.0, along / std::max(v2 * t.chance, 1e-300));
  if (!is_believed) {
    // Sketch and sample have nothing to do with each other, and neither says how far off it is.
    e.least_bar = e.least_bar_lse = INFINITY;
  }
  return e;
}

}  // namespace kvm::attention
