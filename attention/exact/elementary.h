// SPDX-License-Identifier: Apache-2.0
// Exponentials, soft caps and logits over the vector wrapper that the including file has chosen:
// shared by the kernels of exact and of approximate attention. Internal linkage throughout; see
// kernel_table.h.
#ifndef KVM_ATTENTION_EXACT_ELEMENTARY_H_
#define KVM_ATTENTION_EXACT_ELEMENTARY_H_

#include <stddef.h>
#include <stdint.h>

#include "attention/exact/exact_args.h"

namespace kvm {
namespace attention {
namespace {

using vec::F;
constexpr int kW = vec::kWidth;
constexpr float kNegInf = -__builtin_inff();
// Dot products that overflow count as this logit: finite, so that differences never are NaN.
constexpr float kHugeLogit = 1e38f;

// --- Elementary functions -----------------------------------------------------------------------

// e^x for x <= 0; exactly 0 below -87, where fp32 has no normal result. The polynomial is a
// minimax fit on |r| <= ln(2) / 2 with relative error 3e-9; the whole is within 1.5 ulp.
inline F exp_nonpositive(F x) {
  const F bound = vec::set1(-87.0f);
  const F y = vec::max(x, bound);
  const F n = vec::round_nearest(vec::mul(y, vec::set1(1.44269504f)));
  F r = vec::fma(n, vec::set1(-0.693359375f), y);
  r = vec::fma(n, vec::set1(2.12194440e-4f), r);
  F p = vec::set1(0x1.6a242ap-10f);
  p = vec::fma(p, r, vec::set1(0x1.1239e4p-7f));
  p = vec::fma(p, r, vec::set1(0x1.5558f2p-5f));
  p = vec::fma(p, r, vec::set1(0x1.555492p-3f));
  p = vec::fma(p, r, vec::set1(0x1.fffffcp-2f));
  p = vec::fma(p, r, vec::set1(1.0f));
  p = vec::fma(p, r, vec::set1(1.0f));
  return vec::keep_ge(x, bound, vec::scale_pow2(p, n));
}

// cap * tanh(x / cap), with absolute error of a few ulp of cap.
inline F soft_cap(F x, float cap) {
  const F y = vec::mul(x, vec::set1(1.0f / cap));
  const F positive = vec::max(y, vec::sub(vec::zero(), y));
  const F e = exp_nonpositive(vec::mul(positive, vec::set1(-2.0f)));
  const F one = vec::set1(1.0f);
  const F t = vec::mul(vec::div(vec::sub(one, e), vec::add(one, e)), vec::set1(cap));
  const F negative = vec::sub(vec::zero(), t);
  // y < 0 takes -t; both halves are kept by comparison, so that no sign bits are needed.
  const F keep_positive = vec::keep_ge(y, vec::zero(), t);
  const F keep_negative = vec::sub(negative, vec::keep_ge(y, vec::zero(), negative));
  return vec::add(keep_positive, keep_negative);
}

// Dot products to logits, without log weights and masks.
inline F to_logit(F dot, float scale, float softcap) {
  F x = vec::mul(dot, vec::set1(scale));
  // The constant stands where NaN is replaced: an overflow of both signs counts as huge.
  x = vec::max(vec::min(x, vec::set1(kHugeLogit)), vec::set1(-kHugeLogit));
  return softcap == 0.0f ? x : soft_cap(x, softcap);
}

// Notes whether numbers were finite: `bad` stays 0 in every lane as long as every x was, and is NaN
// in the lane of one that was not. Logits are clamped, so that differences never are NaN; this says
// that one may stand for a key that is not finite. One multiplication and addition for each vector.
inline F note_bad(F bad, F x) { return vec::fma(x, vec::zero(), bad); }
inline F note_bad_row(F bad, const float* x, size_t n) {
  for (size_t i = 0; i < n; i += kW)
    bad = note_bad(bad, vec::load(x + i));
  return bad;
}
inline void clear_bad(float* bad) {
  for (int i = 0; i < 16; i += kW)
    vec::store(bad + i, vec::zero());
}
inline bool is_bad(F bad) {
  float lanes[kW];
  vec::store(lanes, bad);
  bool any = false;
  for (int i = 0; i < kW; ++i)
    any = any || !(lanes[i] == 0.0f);
  return any;
}

// The reference for exponents: a row that has seen nothing yet uses 0, so that -inf - (-inf) never
// happens.
inline F finite_reference(F m) { return vec::max(m, vec::set1(-2.0f * kHugeLogit)); }

// e^(logit - reference), at most 1 whatever they are; 0 for a logit of -inf.
inline F weight_of(F logit, F reference) {
  return exp_nonpositive(vec::min(vec::sub(logit, reference), vec::zero()));
}

inline const float* query_f32(const QueryRows& q, uint32_t variant, uint32_t row) {
  return q.f32 + variant * q.variant_stride + static_cast<uint64_t>(row) * q.stride;
}
inline const uint16_t* query_bf16(const QueryRows& q, uint32_t variant, uint32_t row) {
  return q.bf16 + variant * q.variant_stride + static_cast<uint64_t>(row) * q.stride;
}

}  // namespace
}  // namespace attention
}  // namespace kvm

#endif  // KVM_ATTENTION_EXACT_ELEMENTARY_H_
