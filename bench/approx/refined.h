// SPDX-License-Identifier: Apache-2.0
// Measures what two additions to the sampled mode would gain if their kernels cost nothing: a finer
// code for the candidates of the scan, and block means of V. Weights and values are exact and in
// fp64; the first code is the product's, with its kernels.
//
//   sampled   D = D_F + sum_S w/p, N = N_F + sum_S (w/p) v, o = N / D, p = min(1, c h |v|), the
//             largest over the q heads of the group: docs/approximate_attention.md
//   refined   candidates with p1 = min(1, reach c1 h1 |v|), h1 from the scanned code; of them those
//             are read that have u < p2 = c2 h2 |v|, h2 from a code that only candidates are scored
//             with. Both go by the same u, so that S = {u < p}, p = min(p1, p2): a function of the
//             codes alone, whence D and N stay unbiased.
//   means     sampled, with the control h m, m the mean value of a key's block of 64:
//               D = D_F + sum_S w/p + sum_x g_x (sum_{R_x} h - sum_{S_x} h/p)
//               N = N_F + sum_S (w/p) v + sum_x g_x (sum_b m_b sum_{b, R_x} h - sum_{S_x} (h/p) m)
//             over the two halves x of R, even and odd positions. D and N need the same g: then the
//             linearised error of o is that of sum_S (w (v - o) - g h (m - o)) / p, and the g of
//             least variance is the regression of the one on the other,
//               g = sum (1-p)/p^2 <w (v - o), h (m - o)> / sum (1-p)/p^2 |h (m - o)|^2,
//             for x taken over the sample of the other half, with that half's o. Halves of a
//             Poisson sample are independent, so each bracket's mean is 0 whatever its g: unbiased,
//             where a g from the same keys is so in the limit only. Difference and regression
//             estimators: Särndal, Swensson and Wretman 1992, chapter 6; the halves are ours.
//
// Every c solves sum min(1, c h |v|) = budget over all keys, where the product has its pilot.
//
// Threads: pure; codes and means are immutable once made.
#ifndef KVM_BENCH_APPROX_REFINED_H_
#define KVM_BENCH_APPROX_REFINED_H_

#include <cstdint>
#include <vector>

#include "bench/approx/baselines.h"
#include "bench/approx/index.h"

namespace kvm::bench {

// Codes of 2 to 4 bits a coordinate in the basis of a head's sketches: y = +-(u + 1/2) with the
// step of largest cosine, f = |x|^2 / <y, x> as bf16. Lead and |v| are those of the sketch.
class FineCodes {
 public:
  FineCodes(const HeadData& head, const Sketches& sketches, uint32_t bits);
  // Estimated logits of one q head for all keys of the sketches: [n_keys].
  void logits(const HeadData& head, uint32_t set, uint32_t g, float* out) const;
  uint64_t n_keys() const { return factors_.size(); }
  // The sign is in the sketch: bits - 1 planes and the factor.
  double bytes_per_key() const { return (bits_ - 1) * dim_pad_ / 8.0 + 2; }

 private:
  void encode(const HeadData& head, uint64_t token, const hash_index::Frame& frame);
  void encode_rest(const std::vector<float>& x, uint64_t token);

  uint32_t bits_;
  uint32_t dim_pad_;
  std::vector<attention::SketchedRun> runs_;
  std::vector<int8_t> codes_;   // [key][dim_pad]: 2 y
  std::vector<int8_t> leads_;   // [key][8]
  std::vector<float> factors_;  // [key]
};

// Mean values of blocks of 64 keys, as int8 with a scale in bf16.
class BlockMeans {
 public:
  explicit BlockMeans(const HeadData& head);
  const float* of(uint64_t token) const { return means_.data() + token / 64 * dim_; }
  double bytes_per_key() const { return (dim_ + 2) / 64.0; }

 private:
  uint32_t dim_;
  std::vector<float> means_;  // [block][dim]
};

// The facts of R that are known before a row is read. R: the product's, whole blocks.
struct Proposed {
  std::vector<uint64_t> tokens;  // of R, ascending
  std::vector<uint64_t> fixed;   // F
  std::vector<float> norms;      // [R]: |v| as stored
  std::vector<float> coarse;     // [group][R]: e^(s_hat - shift) of the scanned code
  std::vector<float> fine;       // the same of the finer code; empty: none
  std::vector<double> shift;     // [group]: the largest logit
  double scanned_bytes = 0;
};
// fine: may be null.
Proposed propose(const HeadData& head, uint32_t set, const Logits& logits, const Sketches& sketches,
                 const FineCodes* fine);
// By the true weights, for no bytes: what no code can beat.
Proposed propose_ideally(const HeadData& head, uint32_t set, const Logits& logits,
                         const Sketches& sketches);

// One cache line: what reading the finer code of a candidate costs.
inline constexpr double kCandidateBytes = 64;

struct Sampled : Estimate {
  std::vector<double> mass;  // [group]: D e^-shift
  std::vector<double> sums;  // [group][dim]: N e^-shift
};
Sampled sample(const HeadData& head, const Logits& logits, const Proposed& proposed, uint64_t count,
               uint64_t seed);
// REQUIRES: proposed.fine; reach >= 1.
Sampled sample_refined(const HeadData& head, const Logits& logits, const Proposed& proposed,
                       uint64_t count, double reach, uint64_t seed);
Sampled sample_with_means(const HeadData& head, const Logits& logits, const Proposed& proposed,
                          const BlockMeans& means, uint64_t count, uint64_t seed);

}  // namespace kvm::bench

#endif  // KVM_BENCH_APPROX_REFINED_H_
