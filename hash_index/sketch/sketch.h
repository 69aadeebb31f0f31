// SPDX-License-Identifier: Apache-2.0
// Sketches: a few bits for each key from which q.k is estimated without reading the key, and the
// scan that proposes which keys to read.
//
//   Frame   what the keys of a run (8,192 tokens) are coded with: a basis, a centre, the scales of
//           the leading coordinates. Frozen once made: codes are appended and never rebuilt.
//   Block   the codes of 64 keys of one kv head at positions [64 b, 64 b + 64), laid out for SIMD.
//   Span    consecutive blocks of one frame, which a scan reads from front to back.
//
// A key k is centred with c and written in the basis: q.k = q.c + (A^T q).(B^T (k - c)), A B^T = I.
// Its first `lead` coordinates are kept as int8; the rest x is rotated at random and coded with 1
// or 2 bits for each coordinate after RaBitQ (Gao and Long, arXiv 2405.12497; several bits:
// 2409.09913): codeword y, factor f = |x|^2 / <y, x>, and <x, q'> is estimated by f <y, q'>. f and
// |v| are stored as bf16, |v| as at least half of what is typical of the block: (mean of the
// roots of |v|)^2. The basis is a matter of variance only: whatever it is, estimates are
// unbiased over the rotation. models/house/sketches.py is the reference.
//
// Functions that take a `table` use its instructions; null: those of active_scan_table(). Blocks
// are the same for all tables, prepared queries belong to the table that prepared them.
//
// Threads: everything here is pure in its arguments; frames are immutable.
// Memory: no function allocates except make_frame. Errors: none at run time; callers validate.
#ifndef KVM_HASH_INDEX_SKETCH_SKETCH_H_
#define KVM_HASH_INDEX_SKETCH_SKETCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/kv_view.h"
#include "base/limits.h"
#include "hash_index/sketch/scan_table.h"

namespace kvm::hash_index {

inline constexpr uint32_t kBlockKeys = 64;
inline constexpr uint32_t kMaxRows = 16;  // queries that are scanned for at once
inline constexpr uint32_t kMaxSketchDim = kMaxIndexedDim;
static_assert(kBlockKeys == kPageTokens);

// Bytes of a key at dim 128 / 64.
enum class SketchKind : uint8_t {
  kBits1 = 1,       // 1 bit for each coordinate: 20 / 12
  kLead8Bits1 = 2,  // 8 leading coordinates in int8, 1 bit for each of the rest: 28 / 20
  kBits2 = 3,       // 2 bits for each coordinate: 36 / 20
};

// Bytes of a block: a multiple of 64.
size_t block_bytes(SketchKind kind, uint32_t dim_k);

struct Frame;  // sketch/frame.h
using FramePtr = std::shared_ptr<const Frame>;

// A frame is made from this. Keys: those of `head` of the runs, at least 64; where there are many,
// some 2,048 that are spread evenly are used.
// Queries: those that were seen, 0 or more; their second moments are shrunk by 30 % towards a
// multiple of the identity.
struct FrameInput {
  KvRuns runs;
  uint32_t head = 0;
  uint32_t dim_k = 0;
  std::span<const float> queries;  // [n][dim_k]
  uint64_t seed = 0;               // of the rotation
  // The basis of this frame is kept, with a new centre, unless the keys have left it (the rest's
  // share of the variance has grown by 30 %) or, where no lead was found, may have one now (their
  // axes have drawn together by 20 %, or queries are seen for the first time). May be null.
  const Frame* previous = nullptr;
};

// `kind`, or with nullptr the one that suits the keys: kLead8Bits1 where there are 1,024 keys or
// more and its estimates are expected to have a quarter of the variance of those of kBits2 or less,
// else kBits2. The same bits for every table.
FramePtr make_frame(const FrameInput& input, const SketchKind* kind,
                    const ScanTable* table = nullptr);

SketchKind frame_kind(const Frame& frame);
size_t frame_bytes(const Frame& frame);  // of memory, shared parts included
// No frame of make_frame takes more. kind: as there.
size_t max_frame_bytes(const SketchKind* kind, uint32_t dim_k, bool has_queries);

// A block says a |v| of this or more for a key that must be read: it or its value is not finite, or
// that long.
inline constexpr float kHugeNorm = 9e17f;

// Codes the 64 keys of `run` (n_tokens == 64, position a multiple of 64), of `head`, into `block`
// (block_bytes, aligned to 64). Keys that are not finite, and zero vectors, get codes that are
// legal; what is estimated for them is arbitrary but finite, and where K or V is not, or |k| is
// above 1e15, |v| counts as huge. REQUIRES: dim_v a multiple of 8, at
// most kMaxSketchDim. Uses 130 KB of stack.
void encode_block(const Frame& frame, const KvRun& run, uint32_t head, uint32_t dim_v, void* block,
                  const ScanTable* table = nullptr);

// Says whether all leading coordinates of a block's keys lie within their range. One that does not
// is cut off, so that its logits are always too small, and no random number makes up for it: such a
// block is better read than estimated.
bool is_within_range(const Frame& frame, const void* block);

// Consecutive blocks, coded with one frame, and the queries prepared for it.
struct SketchSpan {
  const Frame* frame = nullptr;
  const void* query = nullptr;        // prepare_scan's
  const std::byte* blocks = nullptr;  // n_blocks, block_bytes apart
  uint32_t n_blocks = 0;
  uint64_t position = 0;  // of the first key, a multiple of 64
};

// The queries of a scan, and what logits are made of their products with keys:
//   x = scale * q.k        logit = x, or softcap * tanh(x / softcap)
struct ScanRows {
  const float* q = nullptr;  // [n][dim_k]
  uint32_t n = 0;
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none, else 1e-6 or more; kept within 5e-6 of itself
  // True where a logit has its own variance added: what a code does not know of a key goes with the
  // length that it codes, and the best chance of being drawn goes with the root of the expected
  // square of the weight, e^(logit + variance). So a key that is much longer than its neighbours is
  // read rather than guessed. Logits are no estimates then.
  bool careful = false;
};
// Turned into the frame and quantised for its kernels: within 0.3 % of the code's own noise, in
// variance at most 1 %. Bytes at dim 128 and 4 rows: 6,272.
size_t scan_query_bytes(const Frame& frame, uint32_t n_rows, const ScanTable* table = nullptr);
// `out`: scan_query_bytes, aligned to 64. Rows that are not finite or longer than 1e15 have logits
// of 0.
// `like` (may be null): a frame and what was prepared for it of the same rows and table. Where the
// frames share their basis (FrameInput::previous) little is left to do; same bits.
void prepare_scan(const Frame& frame, const ScanRows& rows, void* out,
                  const SketchSpan* like = nullptr, const ScanTable* table = nullptr);

// Estimated logits of one block for all rows, and |v| as stored: logits [n_rows][64], value_norms
// [64].
void scan_logits(const SketchSpan& span, uint32_t n_rows, uint32_t block, float* logits,
                 float* value_norms, const ScanTable* table = nullptr);

// How likely a key is to be drawn. Key i has size_i = max over rows r of
//   exp(logit_ir + log_c[r]) * |v_i|, at least kMinSize, at most 2^100
// (the exponential within 1e-5 of itself and clamped to 2^60 from above), and inclusion probability
// p_i = min(1, size_i): all rows use every key that is drawn, with that common p. It is drawn where
// u_i < p_i, u_i = permanent_random(seed, position of i). Samples of growing c are nested.
struct DrawParams {
  float log_c[kMaxRows] = {};
  uint64_t seed = 0;
  // Candidates are the keys with u < reach * size: enough to grow all c by that factor later
  // without another scan. >= 1.
  float reach = 1.0f;
  // Blocks that will be scanned after these spans, in the same layout: they are asked for, not
  // read. Null: none.
  const std::byte* next_blocks = nullptr;
};
inline constexpr float kMinSize = 0x1p-20f;  // random numbers come in steps of 2^-24

// In [0, 1), of 24 bits: random.h. The same on every machine and for every instruction table.
float permanent_random(uint64_t seed, uint64_t position);

// Candidates in position order, as columns; all have room for `capacity`.
struct Candidates {
  uint64_t* position = nullptr;
  float* size = nullptr;
  float* random = nullptr;
  float* logits = nullptr;  // estimated, [capacity][n_rows]
  uint32_t capacity = 0;
  uint32_t n = 0;
};

// Over all keys of the spans; they add up over calls.
struct DrawSums {
  double n_keys = 0;
  double expected = 0;              // sum p: rows that will be read
  double open_mass[kMaxRows] = {};  // sum w over keys with p < 1, w = exp(logit + log_c)
  double spread[kMaxRows] = {};     // sum w^2 (1 - p) / p
};

// Scans the spans and appends what may be drawn. Returns false where capacity ran out (candidates
// are then incomplete, the sums are not). The kernel: see docs/kernels.md.
// ENSURES: candidates, p and sums agree between instruction tables up to rounding of the
// estimates; ids for given sizes agree exactly. For one table they depend on the arguments alone.
bool scan_draw(std::span<const SketchSpan> spans, uint32_t n_rows, const DrawParams& params,
               Candidates* candidates, DrawSums* sums, const ScanTable* table = nullptr);

}  // namespace kvm::hash_index

#endif  // KVM_HASH_INDEX_SKETCH_SKETCH_H_
