// SPDX-License-Identifier: Apache-2.0
// Rivals of our approximate modes, in fp64 on the same data: what each is good for when its kernels
// cost nothing. All read the same exact set F, the first n_sinks and the last n_recent tokens.
//
//   oracle top-k       the keys with the largest true logits
//   uniform residual   half the budget as oracle top-k, half drawn evenly from what remains, as
//                      vAttention (Desai et al., arXiv 2510.05688), with the true logits for top-k
//   page bounds        whole pages of 16 tokens with the largest bound on q.k, as Quest (Tang et
//                      al., arXiv 2406.10774)
//   MagicPIG           LSH candidates weighted by 1/u (Chen et al., arXiv 2410.16179)
//
// Threads: pure; PageBounds and LshTables are immutable once made.
#ifndef KVM_BENCH_APPROX_BASELINES_H_
#define KVM_BENCH_APPROX_BASELINES_H_

#include <cstdint>
#include <vector>

#include "bench/approx/data.h"
#include "bench/approx/index.h"
#include "bench/approx/reference.h"

namespace kvm::bench {

inline constexpr uint64_t kSinks = 4;
inline constexpr uint64_t kRecents = 64;

struct Estimate {
  Answer answer;
  uint64_t rows = 0;         // of R, over the heads of the group, counted for each
  uint64_t unique_rows = 0;  // of F and R, as memory sees them
  double index_bytes = 0;    // scanned or looked up
};

Estimate oracle_top_k(const HeadData& head, const Logits& logits, uint64_t count);
Estimate uniform_residual(const HeadData& head, const Logits& logits, uint64_t count,
                          uint64_t seed);

// Smallest and largest value of each channel over the keys of each page, as bf16 would hold them.
class PageBounds {
 public:
  static constexpr uint32_t kTokens = 16;
  explicit PageBounds(const HeadData& head);
  // An upper bound of q.k for each page, over n tokens.
  std::vector<double> scores(const HeadData& head, const uint16_t* q, uint64_t n) const;
  double bytes_per_token() const { return 4.0 * dim_ / kTokens; }

 private:
  uint32_t dim_;
  std::vector<float> low_, high_;  // [pages][dim]
};
Estimate page_bounds(const HeadData& head, const Logits& logits, const PageBounds& bounds,
                     uint32_t set, uint64_t count);

// weighted = false: the candidates with weight 1, to show what the weights do.
Estimate magicpig(const HeadData& head, const Logits& logits, const LshTables& tables, uint32_t set,
                  bool weighted = true);

}  // namespace kvm::bench

#endif  // KVM_BENCH_APPROX_BASELINES_H_
