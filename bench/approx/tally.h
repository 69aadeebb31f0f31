// SPDX-License-Identifier: Apache-2.0
// Errors of an answer against the fp64 reference, added up over heads and query sets.
#ifndef KVM_BENCH_APPROX_TALLY_H_
#define KVM_BENCH_APPROX_TALLY_H_

#include <cstdint>
#include <mutex>
#include <vector>

#include "bench/approx/baselines.h"
#include "bench/approx/data.h"
#include "bench/approx/reference.h"
#include "bench/approx/solver.h"

namespace kvm::bench {

// Data with the fp64 answers to all of its queries.
struct Case {
  DataSet data;
  std::vector<std::vector<Logits>> logits;   // [head][set]; of no tokens where not kept
  std::vector<std::vector<Answer>> answers;  // [head][set]

  // Bytes of K and V that exact attention over bf16 rows reads for a query set.
  double exact_bytes(uint32_t head, uint32_t set) const {
    return static_cast<double>(data.heads[head].n_visible(set) * data.heads[head].row_bytes());
  }
};

// Ends the program where the data cannot be made.
Case make_case(const DataSpec& spec, uint32_t threads, bool keep_logits);

// Threads: add may be called by several at once; the rest after all of them.
class Tally {
 public:
  // An answer of the product, o [group][dim] and lse (null: not looked at).
  void add(const Case& c, uint32_t head, uint32_t set, const float* o, const float* lse,
           const attention::ApproxReport& report);
  void add(const Case& c, uint32_t head, uint32_t set, const Estimate& estimate);

  double error_mean() const { return mean(errors_); }
  double error_percentile(double p) const;
  double lse_error() const { return mean(lse_errors_); }
  double keys_fraction() const { return mean(keys_); }
  double bytes_fraction() const { return mean(bytes_); }
  size_t n_rows() const { return errors_.size(); }

 private:
  static double mean(const std::vector<double>& values);
  template <typename T>
  void add_rows(const Case& c, uint32_t head, uint32_t set, const T* o, const T* lse);

  std::mutex mutex_;
  std::vector<double> errors_, lse_errors_;
  std::vector<double> keys_, bytes_;  // shares of a query set
};

}  // namespace kvm::bench

#endif  // KVM_BENCH_APPROX_TALLY_H_
