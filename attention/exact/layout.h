// SPDX-License-Identifier: Apache-2.0
// How prepared queries, scratch memory and states are laid out. Internal to attention/.
#ifndef KVM_ATTENTION_EXACT_LAYOUT_H_
#define KVM_ATTENTION_EXACT_LAYOUT_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/attention.h"
#include "attention/exact/exact_args.h"
#include "base/dtype.h"
#include "base/round.h"
#include "codecs/convert.h"
#include "codecs/rows.h"

namespace kvm::attention {

// Streaming path up to this many rows, exclusive; from here on the blocked path is faster.
inline constexpr uint32_t kBlockedRows = 24;
static_assert(kBlockedRows <= kMaxStreamRows);
inline constexpr uint32_t kStreamChunkTokens = 2048;
inline constexpr uint32_t kBlockedChunkTokens = kMaxChunkTokens;
static_assert(kStreamChunkTokens <= kMaxChunkTokens);
// Rows that the blocked path takes through a chunk at once: their accumulators stay in L2.
inline constexpr uint32_t kRowBlock = 768;

// Hands out aligned pieces of a buffer, or with a null buffer only adds up their sizes.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<std::byte*>(base)) {}

  template <typename T>
  T* take(size_t n) {
    std::byte* at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(n * sizeof(T), kBufferAlign);
    return reinterpret_cast<T*>(at);
  }
  size_t used_bytes() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

// Writable view of the prepared queries.
struct PreparedQueries {
  float* f32;
  uint16_t* bf16;
  uint8_t* bf16_exact;
  int16_t* i16;
  float* i16_step;
  uint8_t* i16_near;
  uint32_t n_variants;
  uint32_t variant_rows;
  uint32_t stride;
};
PreparedQueries carve_queries(const Problem& problem, Carver& carver);

// The same memory as kernels see it.
QueryRows query_rows(const Problem& problem, const void* prepared);

struct StateView {
  float* o;  // [rows][dim_v]
  float* m;
  float* l;
};
StateView state_view(const Problem& problem, uint32_t row_count, void* state);

// Scratch of one eval call of each path, column sums included.
size_t stream_scratch_bytes(const Problem& problem);
size_t block_scratch_bytes(const Problem& problem);

// A chunk's worth of work for one path; exact_stream.cc and exact_block.cc.
void stream_chunks(const Problem& problem, const Plan& plan, const void* prepared, uint64_t chunk,
                   uint32_t n, void* scratch, void* states);
void stream_gang(std::span<const GangMember> members, const Plan& plan, uint64_t chunk, uint32_t n,
                 void* scratch);
void block_chunks(const Problem& problem, const Plan& plan, const void* prepared, RowRange rows,
                  uint64_t chunk, uint32_t n, void* scratch, void* states);

// Adds to the column sums of positions in [begin, end).
void stream_sums(const Problem& problem, const Plan& plan, const void* prepared, uint64_t begin,
                 uint64_t end, void* scratch);
void block_sums(const Problem& problem, const Plan& plan, const void* prepared, uint64_t begin,
                uint64_t end, void* scratch);

// Returns what the weights of a row are relative to, as stream_sums of the kernels takes it: its
// lse, finite where the row sees nothing; and so large that nothing comes of it behind the last
// row.
inline constexpr float kNoReference = 3e38f;
inline float reference_of(const Problem& problem, uint32_t row) {
  const uint32_t query = row / problem.group;
  if (query >= problem.n_query) {
    return kNoReference;
  }
  const float lse =
      problem.lse[query * problem.lse_stride_query + row % problem.group * problem.lse_stride_head];
  if (std::isnan(lse)) {
    return kNoReference;
  }
  return std::max(lse, -kNoReference);
}

// Rows that are not finite (attention.h). The kernels tell that a chunk may hold one; whose rows it
// spoils is then found out here, query token by query token.
//
// elem: vec::Elem; codes of one byte are always finite.
bool elements_are_finite(const void* elements, uint8_t elem, uint32_t n);
// Says whether the query of the row is finite, as it was given.
bool query_is_finite(const Problem& problem, uint32_t row);
// A NotFinite says whether a key, or a value, that query token `query` sees at positions [begin,
// end) has an element that is no finite number.
struct NotFinite {
  bool key = false;
  bool value = false;
};
NotFinite not_finite_seen(const Problem& problem, uint32_t query, uint64_t begin, uint64_t end);
// Makes o of the row NaN, after a key l as well; merges keep that.
void spoil_state(const Problem& problem, const StateView& state, uint32_t row, NotFinite what);

// Index of the first run that ends behind `position`.
size_t first_run_after(KvRuns runs, uint64_t position);

// Row `token` of a run's K or V, for the problem's head.
inline const uint8_t* k_row(const Problem& problem, const KvRun& run, uint64_t token) {
  return codecs::row_at(run.k, problem.dim_k, problem.head, run.slot + token);
}
inline const uint8_t* v_row(const Problem& problem, const KvRun& run, uint64_t token) {
  return problem.v_in_k ? k_row(problem, run, token)
                        : codecs::row_at(run.v, problem.dim_v, problem.head, run.slot + token);
}
// Its scale, where rows have some of their own; else null.
inline const uint16_t* k_scale(const Problem& problem, const KvRun& run, uint64_t token) {
  return codecs::row_scale_at(run.k, problem.head, run.slot + token);
}
inline const uint16_t* v_scale(const Problem& problem, const KvRun& run, uint64_t token) {
  return codecs::row_scale_at(run.v, problem.head, run.slot + token);
}
// Returns a stored row as kernels load it: where it lies, or decoded to `decoded` [dim].
inline const uint8_t* kernel_row(const KvPlane& plane, uint32_t dim, uint32_t head, uint64_t slot,
                                 float* decoded) {
  const uint8_t* row = codecs::row_at(plane, dim, head, slot);
  if (codecs::codec_of(plane.codec).has_kernels()) {
    return row;
  }
  codecs::decode_row(row, plane.codec, codecs::params_at(plane, dim, head),
                     static_cast<uint32_t>(slot), dim, decoded);
  return reinterpret_cast<const uint8_t*>(decoded);
}
// Channels from one row of V to the next.
inline uint32_t v_row_dim(const Problem& problem) {
  return problem.v_in_k ? problem.dim_k : problem.dim_v;
}
inline PositionBias position_bias(const Problem& problem) {
  return {.slopes = problem.slopes, .query_position = problem.visible.query_position};
}
// Returns the factor by which a row of elements, as kernels load it, is multiplied.
inline float row_factor(uint8_t elem, uint16_t scale) {
  return bf16_to_f32(scale) * vec::elem_unit(elem);
}
inline const float* log_weight_at(const KvRun& run, uint64_t token) {
  return run.log_weight == nullptr ? nullptr : run.log_weight + token;
}

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_EXACT_LAYOUT_H_
