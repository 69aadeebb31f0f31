// SPDX-License-Identifier: Apache-2.0
#include "bench/approx/tally.h"

#include <cmath>
#include <numeric>

#include "bench/approx/parallel.h"
#include "bench/harness.h"

namespace kvm::bench {

Case make_case(const DataSpec& spec, uint32_t threads, bool keep_logits) {
  Case out;
  out.data = require(make_data(spec, threads), "data");
  const HeadData& first = out.data.heads[0];
  if (first.dim % 8 != 0 || first.dim > kMaxHeadDim || first.group > kMaxGroup) {
    require(Status(KVM_ERR_UNSUPPORTED,
                   "more than 16 q heads for a kv head, or a head dim that is "
                   "no multiple of 8 up to 256"),
            "data");
  }
  const auto n_heads = static_cast<uint32_t>(out.data.heads.size());
  const uint32_t n_sets = first.n_sets();
  out.logits.assign(n_heads, std::vector<Logits>(n_sets));
  out.answers.assign(n_heads, std::vector<Answer>(n_sets));
  parallel_for(threads, size_t{n_heads} * n_sets, [&](size_t i) {
    const auto h = static_cast<uint32_t>(i / n_sets);
    const auto set = static_cast<uint32_t>(i % n_sets);
    Logits logits = compute_logits(out.data.heads[h], set);
    out.answers[h][set] = attend_all(out.data.heads[h], logits);
    if (keep_logits) {
      out.logits[h][set] = std::move(logits);
    }
  });
  return out;
}

template <typename T>
void Tally::add_rows(const Case& c, uint32_t head, uint32_t set, const T* o, const T* lse) {
  const HeadData& data = c.data.heads[head];
  const Answer& answer = c.answers[head][set];
  for (uint32_t g = 0; g < data.group; ++g) {
    errors_.push_back(
        relative_error(o + size_t{g} * data.dim, answer.o.data() + size_t{g} * data.dim, data.dim));
    if (lse != nullptr) {
      lse_errors_.push_back(std::fabs(lse[g] - answer.lse[g]));
    }
  }
}

void Tally::add(const Case& c, uint32_t head, uint32_t set, const float* o, const float* lse,
                const attention::ApproxReport& report) {
  const std::lock_guard lock(mutex_);
  add_rows(c, head, set, o, lse);
  keys_.push_back(static_cast<double>(report.keys_read) / static_cast<double>(report.keys_present));
  bytes_.push_back(static_cast<double>(report.bytes_read) / c.exact_bytes(head, set));
}

void Tally::add(const Case& c, uint32_t head, uint32_t set, const Estimate& estimate) {
  const HeadData& data = c.data.heads[head];
  const auto n = static_cast<double>(data.n_visible(set));
  const std::lock_guard lock(mutex_);
  add_rows(c, head, set, estimate.answer.o.data(), estimate.answer.lse.data());
  keys_.push_back(static_cast<double>(estimate.unique_rows) / n);
  const double row_bytes =
      static_cast<double>(estimate.unique_rows) * static_cast<double>(data.row_bytes());
  bytes_.push_back((estimate.index_bytes + row_bytes) / c.exact_bytes(head, set));
}

double Tally::error_percentile(double p) const { return percentile(errors_, p); }

double Tally::mean(const std::vector<double>& values) {
  return values.empty() ? 0
                        : std::accumulate(values.begin(), values.end(), 0.0) /
                              static_cast<double>(values.size());
}

}  // namespace kvm::bench
