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
//   bar = max(kappa max(sigma_o, model_o), unseen, 2e-3 |o|),
//   kappa = kappa(delta; shape, draws) max(1, e^(noise^2 - 0.81)): class Kappa
//   unseen = (1 - delta^(1/draws)) (sum_S w/p) / D 2 (|o| + R_v), R_v^2 = mean of |v|^2 over S:
// how far keys may move o whose values are unlike all that was drawn. A share of the mass
//            is not drawn at all with a chance of (1 - share)^draws; 2, for a key with a small
//            value is drawn up to twice as seldom
// The error of lse is one number, so its bar is that of one direction, a tenth larger, and
// model_lse^2 = a^2 (e^(noise^2) - 1) sum h^2 (1 - p)/p / D^2.
#ifndef KVM_ATTENTION_SAMPLED_ESTIMATE_H_
#define KVM_ATTENTION_SAMPLED_ESTIMATE_H_

#include <cmath>
#include <cstdint>
#include <span>

#include "attention/attention.h"

namespace kvm::attention {

// Variance of the sketch, nats^2, from which on bars grow with it. Up to .9 nats the two sigmas
// hold by themselves (bars of kvm-bench coverage over model, isotropic, real); of rows of `flat`
// beyond 1.5 nats 10 % would miss a bar of .1, and 6 % one of .01.
inline constexpr double kNoiseAllowance = 0.81;
inline constexpr double kBarFloor = 2e-3;     // of |o|: arithmetic in bf16, not sampling
inline constexpr double kLseBarFloor = 5e-4;  // likewise, absolute

// An ErrorShape says how the length of an error varies, by its covariance S; eigenvalues are
// relative to their sum, tr S. The default is an error of one direction.
struct ErrorShape {
  double largest = 1;       // eigenvalue
  double squares = 1;       // their sum: tr S^2 / (tr S)^2
  double along_o = 1;       // share of tr S along o
  double heaviest = 0;      // largest share of tr S that one term has
  double terms = INFINITY;  // how many equal terms would tell tr S as well: at most the draws
  // Square of the skewness that the error has along the first eigenvector, relative to tr S:
  // (sum of the cubes of the terms)^2 / (tr S)^3.
  double skewness2 = 0;
};

// Kappa says how many standard deviations make a bar that is exceeded with a chance of delta.
//
// |error|^2 / tr S is a sum of chi-squares of one degree, weighted with the eigenvalues: mean 1,
// variance 2 squares. Its quantile is that of the chi-square with the same mean, variance and
// skewness (Hall 1983, Buckley and Eagleson 1988); the sum of the cubes of the eigenvalues, which
// the skewness needs, is put at largest * squares: no smaller than it is, and right both where all
// are equal and where one stands out. tr S is itself estimated, by few draws badly: it is a
// chi-square of draws degrees of freedom over their number (Satterthwaite 1946), so that the
// quantile grows as Fisher's does beside the chi-square's. Where the error is skewed, tr S comes
// out small when the error is large: of one direction x standard deviations become
// x (1 + skewness^2 (x^4 + 2 x^2 - 3) / 18) (Hall 1992, for what is divided by its own deviation).
// Quantiles by Wilson and Hilferty's cube root (1931).
//
// A sample that grows until its bar is small enough stops where the variance came out small. Errors
// of many directions have room for that; with one direction a request was over its bar in 12.6 % of
// 5,000 seeds where delta was .1 (kvm-bench coverage --data zeros): is_stopped makes up for it.
class Kappa {
 public:
  explicit Kappa(double delta, bool is_stopped = false);
  // draws: fewer than five, and what is no number, count as five.
  double operator()(const ErrorShape& shape, double draws) const;

  // Quantile of Fisher's distribution that is exceeded with a chance of delta: from 2.5 % below it
  // (one degree) to a few per cent above. Infinite where m says nothing at so small a delta.
  double fisher(double n, double m) const;
  // Returns the quantile of the chi-square over its n degrees.
  double chi_square(double n) const;
  // The share of which nothing is found among so many draws with a chance of delta.
  double unseen_share(double draws) const;

 private:
  double z_;  // the Gaussian quantile
  double stopping_;
  double log_delta_;
};

// RowTotals are sums of one row, relative to e^top. Sums with a chance are over open keys of S with
// (1 - p)/p^2.
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

// By how much a bar is wider where the sketch is off by so much: its variance, nats^2.
double noise_growth(double variance);

struct RowEstimate {
  double mass = 0;        // D, relative to e^top
  double lse_mass = 0;    // e^(lse - top)
  double norm_o = 0;      // |o|
  bool any_open = false;  // RowTotals::any_open
  // Larger of plug-in and model, but for `plug_in`, which is of o.
  double sigma_o = 0;
  double sigma_lse = 0;
  double plug_in = 0;
  double noise = 0;
  double draws = 0;
  // The mean of the terms of S says: the largest eigenvalue is no smaller, relative to tr S.
  double least_largest = 0;
  // Bars are no smaller, absolute. Infinite where sketch and sample have nothing to do with each
  // other; that of o also where values are too short for their squares to be told.
  double least_bar = 0;
  double least_bar_lse = 0;
  double unseen = 0;  // what a share of all open mass may move o by

  // Absolute, of o. shape: of directions.h.
  double bar(const Kappa& kappa, ErrorShape shape) const;
  // The same over |o|. The true o may be shorter than the estimate, by the part of the error that
  // lies along it. Infinite where that may be all of it; 0 where nothing was left to chance.
  double relative_bar(const Kappa& kappa, const ErrorShape& shape) const;
  double bar_lse(const Kappa& kappa) const;
};

// o [dim_v].
RowEstimate estimate_row(const RowTotals& totals, std::span<double> o);

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_SAMPLED_ESTIMATE_H_
