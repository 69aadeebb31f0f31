// SPDX-License-Identifier: Apache-2.0
// Exact attention: order of operations and error bounds. attention.h has the formula,
// docs/kernels.md the reasons and the figures.
//
// Streaming path, fewer than kBlockedRows rows. Positions fall into items of 16. Per item and row:
//   dot_t    sum over channels, in kWidth (16, 8 or 4) lanes that are added in a fixed tree
//   logit_t  scale, clamp to +-1e38, soft cap, slope times distance, log weight, mask (-inf)
//   m'       max(m, logit_0 ... logit_15);  where m' > m: l and o are multiplied by e^(m - m')
//   p_t      e^(logit_t - m'), rounded to bf16 where V is bf16, unless fp32_weights
//   l        += p_t, in 16 sums by position, which are added in a fixed tree at the chunk's end
//   o        += p_t v_t, one token (fp32) or one pair of neighbouring tokens (bf16 dot) at a time
// Blocked path: the same with blocks of 64 positions. Tokens that differ in dtype or transform
// inside an item (a block) make an item (a block) each, in the order of those, with the others
// masked.
// A token that is not visible counts as a zero row with weight 0: adding it changes no bit, because
// accumulators start at +0 and -0 becomes +0 where a state is written.
//
// Errors, against exact arithmetic on the stored values. u = 2^-24; A_r = sum_t w_t |v_t| is what
// the error of row r is measured against, for o itself may cancel.
//   logit      |d| <= (dim_k / kWidth + 6) u sum_i |q_i k_i| scale, plus 3 u cap with a soft cap. A
//              weight's relative error is that absolute error: with the logits of models (sums of
//              products up to 40) at most 40 * 38 * 6e-8, in practice 2e-6. Slopes add 2 u |bias|.
//   e^x        1.5 ulp;    sums    (n / 16 + chunks) u, random signs
//   bf16 dot   products of bf16 are exact in fp32, so K in bf16 with q in bf16 has the error of
//              fp32; denormal inputs and results count as 0
//   weights    rounded to bf16: each by at most 2^-9 of itself. The denominator sums the rounded
//              weights, so o is an exact mean under weights off by 2^-9: |d o| <= 2^-8 A_r.
//              Rounding errors are independent: kvm.h has what is seen, at "Rounding".
//              lse inherits at most 2^-9.
//   int8       against what the stored rows decode to. Rows meet queries and weights in fp32, with
//              these two exceptions in tables with a dot product of words:
//   K in words q is rounded to 15 bits under its largest channel (a multiple of a power of two; to
//              14 from dim 520 on, for sums to fit 32), where that moves q by at most 2^-14 of its
//              length: logits by 2^-14 |q| |k| scale at most, by 1e-6 where a bf16 query has
//              channels of one size. Sums are exact.
//   V in words weight times scale of V is rounded to 15 bits under the largest of the item: each by
//              at most 2^-15 of that largest. The denominator sums the weights unrounded. Sums of
//              an item are exact.
//   codes      rows of 4, 3 and 2 bits, in tables that read them (ExactKernels::reads_codes),
//              against what they decode to. Where scales are those of channels, they are in the
//              query. Queries and weights are rounded to 15 bits as above, weights by the largest
//              of an item times scales of tokens. Where rounding the query may move a logit by more
//              than 2^-11, root mean square, what it lost is added in 15 bits of its own. Sums of
//              integers are exact. What GEAR adds to codes is added in fp32.
//   fp8        against what the stored rows decode to. Codes are exact in fp32 and bf16 (and read
//              as 2^-8 of their values, which scales make up for): K has the error of bf16. Weight
//              times scale of V is rounded to bf16 where weights are, each by at most 2^-9 of
//              itself; the denominator sums the weights unrounded.
#ifndef KVM_ATTENTION_EXACT_EXACT_H_
#define KVM_ATTENTION_EXACT_EXACT_H_

namespace kvm::attention {

// Bounds of |o - o*| / A_r (L2 over channels) and of |lse - lse*| / max(1, |lse*|) for moderate
// logits; each applicable term is added. Tests hold every table to them.
inline constexpr double kErrorFp32 = 1e-5;
inline constexpr double kErrorBf16Weights = 0x1p-8;
// Holds for logits, too, where |q| |k| scale is up to 16.
inline constexpr double kErrorI8Words = 0x1p-11;
inline constexpr double kErrorBf16Output = 0x1p-8;
inline constexpr double kErrorF16Output = 0x1p-11;

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_EXACT_EXACT_H_
