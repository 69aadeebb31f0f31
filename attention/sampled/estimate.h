// SPDX-License-Identifier: Apache-2.0
// The estimator and its error bar, from sums over the exact set F and over the sample S of the
// rest. models/house/estimators.py is the reference (sampled_head, error_bar).
//
// With keys i of weight w_i, sketched weight h_i and inclusion probability p_i; open keys are those
// with p < 1, e_i = s_i - s_hat_i:
//   D  = D_F + sum_S w/p             N = N_F + sum_S (w/p) v             o = N / D
//   a  = sum_S w/p / sum_S h/p       over open keys: the calibration of the sketch
//   lse = ln(D + a (sum h - sum_S h/p))  over open keys: the scalar control of the denominator,
//                                    for the scan knows h of every key; ln D, and infinite bars,
//                                    where that is more than e^20 D
//   sigma_o^2   = sum_S (1 - p)/p^2 w^2 |v - o|^2 / D^2 / (1 - own)^2
//                                    Poisson sampling, linearised ratio
//   own = sum_S (1 - p)/p^2 w^2 / (D sum_S w/p) over open keys, at most 0.99: a drawn key's mean
//         share of D, by which o has moved towards its value
//   sigma_lse^2 = sum_S (1 - p)/p^2 (w - a h)^2 / D^2
//   noise^2     = variance of e over open keys of S, each counted w/p
//   model_o^2   = a^2 e^(noise^2) sum h^2 (1 - p)/p R^2 / D^2 / (1 - own)^2,  R^2 = mean of
//             |v - o|^2 over S
//   draws = (sum_S w/p)^2 / sum_S (1 - p)/p^2 w^2 over open keys, at most their number: how many
//           equal ones say as much
//   bar = max(kappa max(sigma_o, model_o), 2e-3 |o|),
//   kappa = kappa(delta) few(draws) max(1, e^((noise^2 - 0.36)/2))
// few = t / z: the two-sided quantile of Student's t with draws - 1 degrees of freedom over the
// Gaussian one. A variance of a few draws is itself uncertain (Satterthwaite 1946 gives a sum of n
// like squares n degrees of freedom). The bar of lse has a Gaussian quantile in place of
// kappa(delta), and model_lse^2 = a^2 (e^(noise^2) - 1) sum h^2 (1 - p)/p / D^2.
#ifndef KVM_ATTENTION_SAMPLED_ESTIMATE_H_
#define KVM_ATTENTION_SAMPLED_ESTIMATE_H_

#include <cstdint>
#include <span>

#include "attention/attention.h"

namespace kvm::attention {

inline constexpr double kNoiseAllowance = 0.36;
inline constexpr double kBarFloor = 2e-3;     // of |o|: arithmetic in bf16, not sampling
inline constexpr double kLseBarFloor = 5e-4;  // likewise, absolute

// Standard deviations that make the bar of o: 1.1 at delta 0.1, 1.45 at 0.01, 1.65 at 0.003, linear
// in ln(delta) between and beyond, at least 1.1. Found by simulation; the error of o is a vector of
// many channels, whose norm hardly exceeds its root mean square.
double kappa_of(double delta);
// The two-sided Gaussian quantile of delta.
double gaussian_of(double delta);
// By how much a bar of so many draws is wider than one of very many; z = gaussian_of(delta).
// Gaver and Kafadar's approximation of t (1984), within 3 % from four draws on; fewer than three
// count as three.
double few_draws(double draws, double z);

// Of one row, relative to e^top. Sums with a chance are over open keys of S with (1 - p)/p^2.
struct RowTotals {
  double top = 0;
  double fixed = 0;                  // D_F, a sink's logit included
  double closed = 0;                 // sum w over keys of S with p = 1
  double open = 0;                   // sum w/p
  double n_open = 0;                 // open keys of S
  double norm2 = 0;                  // sum (w/p) |v|^2 over S
  double hat = 0;                    // sum h/p over open keys
  double residual = 0;               // sum (w/p) e
  double residual2 = 0;              // sum (w/p) e^2
  double chance = 0;                 // sum w^2 (1 - p)/p^2
  double chance_norm2 = 0;           // w^2 |v|^2
  double chance_hat = 0;             // w h
  double chance_hat2 = 0;            // h^2
  double open_mass = 0;              // sum h over all open keys
  double spread = 0;                 // sum h^2 (1 - p)/p over all keys
  bool any_open = false;             // whether anything was left to chance
  std::span<const double> n_fixed;   // [dim_v]: N_F
  std::span<const double> n_sample;  // sum_S (w/p) v
  std::span<const double> chance_v;  // sum w^2 (1 - p)/p^2 v
};

struct RowEstimate {
  double mass = 0;      // D, relative to e^top
  double lse_mass = 0;  // e^(lse - top)
  double norm_o = 0;    // |o|
  double sigma_o = 0;
  double sigma_lse = 0;
  double noise = 0;
  double draws = 0;
  double bar = 0;      // absolute, of o
  double bar_lse = 0;  // absolute
};

// Of a delta, for all rows.
struct Kappas {
  explicit Kappas(double delta)
      : o(kappa_of(delta)), gaussian(gaussian_of(delta)), lse(1.1 * gaussian) {}
  double o;
  double gaussian;
  double lse;
};

// o [dim_v].
RowEstimate estimate_row(const RowTotals& totals, const Kappas& kappas, std::span<double> o);

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_SAMPLED_ESTIMATE_H_
