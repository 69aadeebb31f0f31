// SPDX-License-Identifier: Apache-2.0
// Keys and values that are no finite numbers: which query tokens see one.
#include <algorithm>
#include <limits>

#include "attention/exact/layout.h"
#include "attention/exact/visibility.h"

namespace kvm::attention {
namespace {

// All bits of the exponent set: an infinity or a NaN.
template <typename Word>
bool all_finite(const void* elements, uint32_t n, Word exponent) {
  const Word* words = static_cast<const Word*>(elements);
  uint32_t n_not = 0;
  for (uint32_t i = 0; i < n; ++i) {
    n_not += (words[i] & exponent) == exponent ? 1 : 0;
  }
  return n_not == 0;
}

}  // namespace

bool elements_are_finite(const void* elements, uint8_t elem, uint32_t n) {
  switch (elem) {
    case vec::kElemF32:
      return all_finite<uint32_t>(elements, n, 0x7f800000u);
    case vec::kElemF16:
      return all_finite<uint16_t>(elements, n, 0x7c00u);
    case vec::kElemBf16:
      return all_finite<uint16_t>(elements, n, 0x7f80u);
    default:  // bytes, whose scales say it
      return true;
  }
}

bool query_is_finite(const Problem& problem, uint32_t row) {
  const uint64_t from =
      row / problem.group * problem.q_stride_query + row % problem.group * problem.q_stride_head;
  const auto* q = static_cast<const std::byte*>(problem.q);
  return elements_are_finite(q + from * dtype_size_bytes(problem.dtype_q),
                             static_cast<uint8_t>(problem.dtype_q), problem.dim_k);
}

NotFinite not_finite_seen(const Problem& problem, uint32_t query, uint64_t begin, uint64_t end) {
  const auto scale_is_finite = [](const uint16_t* scale) {
    return scale == nullptr || elements_are_finite(scale, vec::kElemBf16, 1);
  };
  const VisibleSet visible(problem.visible, problem.n_query, query, 1);
  NotFinite found;
  for (size_t i = first_run_after(problem.runs, begin);
       i < problem.runs.size() && problem.runs[i].position < end; ++i) {
    const KvRun& run = problem.runs[i];
    const uint8_t elem_k = codecs::codec_of(run.k.codec).elem;
    const uint8_t elem_v = codecs::codec_of(run.v.codec).elem;
    const uint64_t base = run.position / kPageTokens * kPageTokens;
    const uint64_t seen = visible.one(base, query) & visible.any(base);
    for (uint32_t token = 0; token < run.n_tokens; ++token) {
      const uint64_t position = run.position + token;
      if ((seen >> (position - base) & 1) == 0 || position < begin || position >= end) {
        continue;
      }
      found.key = found.key ||
                  !elements_are_finite(k_row(problem, run, token), elem_k, problem.dim_k) ||
                  !scale_is_finite(k_scale(problem, run, token));
      found.value = found.value ||
                    !elements_are_finite(v_row(problem, run, token), elem_v, problem.dim_v) ||
                    !scale_is_finite(v_scale(problem, run, token));
    }
  }
  return found;
}

void spoil_state(const Problem& problem, const StateView& state, uint32_t row, NotFinite what) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  if (what.key || what.value) {
    std::fill_n(state.o + size_t{row} * problem.dim_v, problem.dim_v, kNan);
  }
  if (what.key) {
    state.m[row] = 0.0f;  // that of an empty state would be merged away
    state.l[row] = kNan;
  }
}

}  // namespace kvm::attention
