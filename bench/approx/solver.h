// SPDX-License-Identifier: Apache-2.0
// Runs the approximate modes of attention/sampled on one head at a time, on the calling thread.
#ifndef KVM_BENCH_APPROX_SOLVER_H_
#define KVM_BENCH_APPROX_SOLVER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/sampled/approx.h"
#include "bench/approx/data.h"
#include "bench/attention/workers.h"

namespace kvm::bench {

// Memory that grows and keeps nothing.
class GrowingBuffer {
 public:
  std::byte* get(size_t bytes) {
    if (bytes > size_) {
      buffer_ = std::make_unique<HugeBuffer>(bytes);
      size_ = bytes;
    }
    return buffer_ != nullptr ? buffer_->data() : nullptr;
  }

 private:
  std::unique_ptr<HugeBuffer> buffer_;
  size_t size_ = 0;
};

// A Solved is what a query set gets.
struct Solved {
  std::vector<float> o;    // [group][dim]
  std::vector<float> lse;  // [group]
  attention::ApproxReport report;
  bool planned_exact = false;  // nothing was left to approximate
};

// Threads: one Solver for each.
class Solver {
 public:
  Solved solve(const HeadData& head, uint32_t set, const attention::HeadIndex& index,
               const attention::ApproxParams& params);
  // All keys, by the exact kernels.
  Solved solve_exact(const HeadData& head, uint32_t set);

 private:
  void solve_exactly(const attention::Problem& problem);
  void fill_exact(const attention::Problem& problem, Solved* out);

  GrowingBuffer prepared_, scratch_, states_;
};

}  // namespace kvm::bench

#endif  // KVM_BENCH_APPROX_SOLVER_H_
