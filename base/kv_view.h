// SPDX-License-Identifier: Apache-2.0
// How kernels see stored keys and values: runs of consecutive tokens inside one page.
//
// A page holds kPageTokens tokens of the kv heads of one head class: a K plane
// [kv head][kPageTokens][row], a V plane alike, and planes of parameters where their codecs have
// some (codecs/codec.h). Pages lie anywhere.
//
// Plain data that only refers to memory; the caller keeps every pointed-to byte alive and
// unchanged while a kernel works on it.
#ifndef KVM_BASE_KV_VIEW_H_
#define KVM_BASE_KV_VIEW_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/codec_id.h"
#include "base/limits.h"

namespace kvm {

// K, or V, of a page: all heads and tokens of it. Rows are aligned to 16 bytes, those of one byte
// an element to 8.
struct KvPlane {
  const void* rows = nullptr;    // null: the page is away, and only its shape is known
  const void* params = nullptr;  // null where the codec has none
  CodecId codec = CodecId::kBf16;
};

// Tokens at consecutive positions, stored in consecutive slots of one page.
//
// REQUIRES: 1 <= n_tokens, and position % kPageTokens + n_tokens <= kPageTokens: a run never
// crosses a multiple of kPageTokens in POSITION. Where slots and positions of a page are out of
// step (a fork or a truncate inside a page, entries dropped), the owner cuts the run in two there.
// Nothing is required of the slot at which a run starts within its page, nor of the order in which
// pages lie. Planes that are no page's (tokens kept of several pages) hold one head, and as many
// slots as they like.
struct KvRun {
  KvPlane k;
  KvPlane v;
  // Added to the logits of each token (natural log); null = 0. -inf removes a token; +inf and NaN
  // are not allowed. [n_tokens], of all heads.
  const float* log_weight = nullptr;
  uint64_t position = 0;  // of the first token
  uint32_t slot = 0;      // of the first token, in its planes
  uint16_t n_tokens = 0;
  uint16_t transform = 0;  // index into Problem::transforms
};

// Takes the first n tokens off a run. REQUIRES: n <= run->n_tokens.
inline void skip_tokens(KvRun* run, uint64_t n) {
  run->position += n;
  run->slot += static_cast<uint32_t>(n);
  run->n_tokens = static_cast<uint16_t>(run->n_tokens - n);
  run->log_weight = run->log_weight == nullptr ? nullptr : run->log_weight + n;
}

// Runs in strictly increasing position order, without overlap; gaps are allowed.
using KvRuns = std::span<const KvRun>;

// [begin, end) in token positions.
struct PositionRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

enum class RotationLayout : uint8_t {
  kInterleaved = 0,  // pair i is channels (2i, 2i + 1)
  kHalfSplit = 1,    // pair i is channels (i, i + n_pairs)
};

// A transform that is applied to a query before it meets the stored keys of a segment, so that
//   q . k_true  =  q' . k_stored      with      q' = channel_scale o (R q).
// R turns each pair (x, y) into (x cos - y sin, x sin + y cos); channels beyond 2 * n_pairs pass
// unchanged. Every part is optional: null pointers, n_pairs = 0.
struct QueryTransform {
  const float* cos = nullptr;  // [n_pairs] of query token 0; that of token i: i * token_stride on
  const float* sin = nullptr;  // likewise
  uint32_t token_stride = 0;   // floats; 0: one rotation for all query tokens
  uint32_t n_pairs = 0;        // 2 * n_pairs <= dim_k
  RotationLayout layout = RotationLayout::kHalfSplit;
  const float* channel_scale = nullptr;  // [dim_k]
};

}  // namespace kvm

#endif  // KVM_BASE_KV_VIEW_H_
