// SPDX-License-Identifier: Apache-2.0
// Parameters that the host hands to the GPU kernels: plain data, the same for nvcc and for the
// emulator.
//
// Keys and values lie in pages as docs/storage.md describes them: a K plane
// [head of the class][page token][dim], then a V plane of the same shape; where rows are narrower
// than 16 bits an element, then planes of parameters in bf16, of K and of V: a scale [head][page
// token] of rows of bytes; scale and zero [head][page token][dim / 64] of rows of 4 bits. A page is
// named by an entry of 32 bits, segment << 22 | slot: segments are what one process has mapped of
// the device pool, so entries mean the same to every process and addresses need not. A page may
// hold several layers, their parts one behind the other: one page table then serves them all.
//
// A request attends, with the heads of one class, to tokens of one page list. Heads of a layer that
// keep different tokens are different requests with the same queries, in one launch: a head that
// keeps sinks and a window costs only the pages that it has.
#ifndef KVM_ATTENTION_CUDA_PARAMS_H_
#define KVM_ATTENTION_CUDA_PARAMS_H_

#include <stdint.h>

#include <numbers>

#include "base/dtype.h"
#include "codecs/codec.h"

namespace kvm::attention::gpu {

inline constexpr uint32_t kMaxSegments = 64;
inline constexpr uint32_t kMaxClasses = 16;
// LIMIT: q heads per kv head, and where keys have kMlaDim channels.
inline constexpr uint32_t kMaxGpuGroup = 16;
inline constexpr uint32_t kMaxMlaGroup = 128;
inline constexpr uint32_t kEntrySlotBits = 22;
inline constexpr uint32_t kEntrySlotMask = (1u << kEntrySlotBits) - 1;
// LIMIT: tokens of a page list; the division below is exact up to here.
inline constexpr uint32_t kMaxListTokens = 1u << 31;
// LIMIT: partial states that one merge takes.
inline constexpr uint32_t kMaxMergeSlots = 1024;

// A Divider computes n / divisor for n < 2^31, without a division: Granlund and Montgomery,
// "Division by invariant integers using multiplication", 1994. It is the upper half of the product
// 2 n * multiplier, shifted: one instruction multiplies so.
struct Divider {
  uint32_t multiplier = 1u << 31;
  uint32_t shift = 0;
  uint32_t divisor = 1;
};

// REQUIRES: 1 <= divisor < 2^31.
constexpr Divider make_divider(uint32_t divisor) {
  uint32_t bits = 0;
  while ((uint64_t{1} << bits) < divisor) {
    ++bits;
  }
  const uint64_t numerator = uint64_t{1} << (31 + bits);
  return {static_cast<uint32_t>((numerator + divisor - 1) / divisor), bits, divisor};
}

// A PageClass says how pages of one head class lie.
struct PageClass {
  uint64_t page_bytes = 0;         // LIMIT: below 4 GiB
  uint64_t v_offset_bytes = 0;     // from a row of K to the same row of V; 0: V is in K
  uint32_t head_stride_bytes = 0;  // from head to head inside a plane
  uint32_t heads_first = 0;        // into PagePool::heads
  uint32_t n_heads = 0;
  uint32_t scales_offset_bytes = 0;    // of narrow rows: from a page to the parameters of K
  uint32_t v_scales_offset_bytes = 0;  // from those of a row of K to those of V
  uint32_t layer_offset_bytes = 0;     // from a page to the part of it that is the layer's
};

// A PagePool says where pages are. Everything that kernels of one launch have in common.
struct PagePool {
  uint8_t* segments[kMaxSegments] = {};
  PageClass classes[kMaxClasses] = {};
  const uint16_t* heads = nullptr;  // kv head of the layer, per head of a class
  Divider page_tokens;
};

inline constexpr uint32_t kNoTree = UINT32_MAX;

// The tokens of a request are a first run of list tokens and a second one (sinks and window; or one
// run). Token i of the request, i < n_tokens, is list token
//   i < n_first ? first + i : second + (i - n_first).
// Query token j of n_query sees tokens [0, n_tokens - n_query + 1 + j): the new ones are the last.
//
// With a tree it sees the tokens before tree_first, and behind them those that its word of
// DecodeParams::tree_mask has a bit for: bit b is list token tree_list + b, b < 64.
struct Request {
  uint64_t table = 0;              // index of the list's first entry in the page table
  int64_t log_weights = -1;        // index of those of list token 0, kv head 0; -1 = all zero
  uint32_t log_weight_stride = 0;  // from kv head to kv head
  uint32_t first = 0;
  uint32_t n_first = 0;
  uint32_t second = 0;
  uint32_t n_tokens = 0;
  uint32_t q_token = 0;  // of query token 0, in the query and output tensors
  uint32_t n_query = 1;
  uint32_t page_class = 0;
  uint32_t tree_first = kNoTree;
  uint32_t tree_list = 0;
};

// A Sight says what rows see of the tokens up to their own: a row whose query token is list token t
// sees list token s where t - s is below `window`, and s below n_sinks or t - s below n_recent. The
// prefill kernel reads it; for the others, requests have no token that it hides.
struct Sight {
  uint32_t window = UINT32_MAX;
  uint32_t n_sinks = 0;
  uint32_t n_recent = UINT32_MAX;
};

// A Work is a stretch of tokens of (request, head) against a block of rows. Row r of a request is
// query token r / group and the r % group-th of the q heads that share the kv head.
//
// It has the request with it: a block that begins finds what it needs in one read, not in a chain.
struct Work {
  Request request;
  uint16_t head = 0;     // of the class
  uint16_t kv_head = 0;  // of the layer
  uint32_t row_first = 0;
  uint32_t begin = 0;  // tokens of the request
  uint32_t end = 0;
  int32_t slot = -1;  // of the partial states; -1: write the result itself
  uint32_t next = 0;  // the block's next piece; 0 = none but of the launch's tail
};

// A Tail is pieces that no block has been given: each that has done its own takes one of them, and
// another one, until there are none (tail.h).
struct Tail {
  uint32_t first = 0;  // the pieces are Work [first, first + n)
  uint32_t n = 0;
  uint32_t n_asked = 0;  // how often a block has asked for one; kernels count, and leave 0
};

// Partial states [slot_first, slot_first + n_slots) make one result.
struct Merge {
  uint32_t q_token = 0;  // of the request, as its n_query
  uint32_t n_query = 1;
  uint32_t kv_head = 0;
  uint32_t row_first = 0;
  uint32_t slot_first = 0;
  uint32_t n_slots = 0;
  uint32_t work = 0;  // the piece that has the first of them
};

// Queries and results: element (token, q head, channel) at token * stride_token + head *
// stride_head + channel, in elements. LSE likewise, without channels; natural logarithm.
struct AttendTensors {
  const void* q = nullptr;
  int64_t q_stride_token = 0;
  int64_t q_stride_head = 0;
  void* o = nullptr;
  int64_t o_stride_token = 0;
  int64_t o_stride_head = 0;
  float* lse = nullptr;  // or null
  int64_t lse_stride_token = 0;
  int64_t lse_stride_head = 0;
  Dtype dtype_q = Dtype::kBf16;  // that of the keys; where these are narrow, kF16 or kBf16
  Dtype dtype_o = Dtype::kF32;   // kF32, kF16, kBf16
  uint32_t group = 1;            // q heads per kv head, 1 to max_group
  // [q head] a logit without a value that counts in every sum of the head, or null; -inf counts
  // nothing. Where a row's pieces are merged it counts there, once. At most 2^127.
  const float* sink_logits = nullptr;
};

struct DecodeParams {
  PagePool pool;
  AttendTensors tensors;
  const uint32_t* page_table = nullptr;
  const float* log_weights = nullptr;
  const uint64_t* tree_mask = nullptr;  // [token of the query tensor]; of requests with a tree
  const Work* work = nullptr;           // block b begins with piece b
  // Of the decode kernel's plan, or null: it has none. One launch at a time counts in it.
  Tail* tail = nullptr;
  // Partial states: o [slot][rows of a block][value_dim], normalised, and lse [slot][rows of a
  // block].
  float* partial_o = nullptr;
  float* partial_lse = nullptr;
  float scale_log2 = 1.0f;  // softmax scale times log2(e)
  // Soft cap c of logits, c * tanh(logit / c): c times log2(e), 0 for none; and 2 / c.
  float softcap_log2 = 0.0f;
  float softcap_rate = 0.0f;
  // The next launch on the stream merges the partial states. It may begin early, and waits for this
  // one; whatever else is launched next might not.
  bool merge_follows = false;
  Sight sights[kMaxClasses] = {};  // [page class], of the prefill kernel
};

// REQUIRES: softcap is 0 or positive.
inline void set_scale(DecodeParams* params, float scale, float softcap) {
  params->scale_log2 = scale * std::numbers::log2e_v<float>;
  params->softcap_log2 = softcap * std::numbers::log2e_v<float>;
  params->softcap_rate = softcap == 0.0f ? 0.0f : 2.0f / softcap;
}

struct MergeParams {
  AttendTensors tensors;
  // Blocks take rows of merges in turn: row b % rows of merge b / rows. There are as many merges as
  // *n_merges says (null: as the launch has blocks for).
  const Merge* merges = nullptr;
  const uint32_t* n_merges = nullptr;
  const float* partial_o = nullptr;
  const float* partial_lse = nullptr;
  uint32_t rows = 0;        // of the largest request, at most those of a block
  uint32_t block_rows = 0;  // row stride of the partial states
};

// Says whether there are kernels for pages of the codec. Of those that CPUs encode by the page,
// only the one whose rows need nothing of their neighbours: a device encodes them as they come.
constexpr bool is_on_devices(CodecId id) {
  const codecs::Codec& codec = codecs::codec_of(id);
  return id == codecs::kI4 || (codec.has_kernels() && codec.elem != vec::kElemF32);
}

// Bytes of the parameters of a row: of its scale, or of the steps of its groups. REQUIRES:
// is_on_devices.
constexpr uint32_t row_params_bytes(CodecId codec, uint32_t dim) {
  const codecs::Codec& of = codecs::codec_of(codec);
  return of.is_scaled() ? static_cast<uint32_t>(of.head_params_bytes(dim) / kPageTokens) : 0;
}

// Channels of heads that there are kernels for; in rows of 4 bits not all of them.
inline constexpr uint32_t kHeadDims[] = {64, 80, 96, 128, 192, 256};

// Multi-head latent attention (mla_kernel.h): keys of so many channels, of which the first ones are
// the value. Rows are stored once; pages of two bytes an element.
inline constexpr uint32_t kMlaDim = 576;
inline constexpr uint32_t kMlaValueDim = 512;

// Channels of keys that there are kernels for.
inline constexpr uint32_t kKeyDims[] = {64, 80, 96, 128, 192, 256, kMlaDim};

// Channels of a value, and of a result, where keys have so many.
constexpr uint32_t value_dim(uint32_t dim) { return dim == kMlaDim ? kMlaValueDim : dim; }

// The most q heads that share a kv head, where keys have so many channels.
constexpr uint32_t max_group(uint32_t dim) { return dim == kMlaDim ? kMaxMlaGroup : kMaxGpuGroup; }

// Says whether there are MLA kernels for pages of the codec.
constexpr bool is_mla_on_devices(CodecId codec) {
  return is_on_devices(codec) && codecs::codec_of(codec).bits() == 16;
}

// Says whether there are kernels for heads of so many channels, of K and V alike, in pages of the
// codec, which has some.
constexpr bool is_head_dim_on_devices(CodecId codec, uint32_t dim) {
  return dim == 64 || dim == 128 || dim == 256 ||
         (codec != codecs::kI4 && (dim == 80 || dim == 96 || dim == 192));
}

// Rows of a block of the prefill kernel, whatever the codec and the dim.
inline constexpr uint32_t kPrefillRows = 128;

// Says whether the prefill kernel has them: all but latent rows.
constexpr bool is_prefill_on_devices(CodecId codec, uint32_t dim) {
  return is_head_dim_on_devices(codec, dim);
}

// A DecodeKernel names one kernel: codec of K and V; channels of K; rows of a block:
// block_rows_for, or kPrefillRows of the prefill kernel.
struct DecodeKernel {
  CodecId codec = CodecId::kBf16;
  uint32_t dim = 0;
  uint32_t block_rows = 16;
};

// Rows of a block that there may be.
inline constexpr uint32_t kBlockRows[] = {16, 32, 64, kPrefillRows};

// Rows of a block where the largest request has `rows`: as many, where there is such a shape
// (shapes.h).
constexpr uint32_t block_rows_for(CodecId codec, uint32_t dim, uint32_t rows) {
  if (dim == kMlaDim) {
    return rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
  }
  const uint32_t bits = codecs::codec_of(codec).bits();
  const uint32_t most_dim = bits == 4 ? 64 : bits == 8 ? 96 : 128;
  return rows <= 16 || dim > most_dim ? 16 : 32;
}

// An AppendToken is one new token of one head class: its rows of all heads go to one row of one
// page.
struct AppendToken {
  uint32_t table = 0;   // index of the page's entry in the page table
  uint32_t row = 0;     // within the page
  uint32_t source = 0;  // token of the tensors
  uint32_t page_class = 0;
};

struct AppendParams {
  PagePool pool;
  const uint32_t* page_table = nullptr;
  // Element (token, kv head, channel) as in AttendTensors. Where V is in K there is no v.
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t stride_token = 0;
  int64_t stride_head = 0;
  const AppendToken* tokens = nullptr;  // blocks take them in turn
  const uint32_t* n_tokens = nullptr;   // how many there are; null: as many as blocks
  Dtype dtype = Dtype::kBf16;           // of the tensors
  uint32_t dim = 0;                     // a multiple of 8
};

// A RowTensor is rows of the caller's: element (token, head, channel) at token * stride_token +
// head * stride_head + channel, in elements. In device memory, or in host memory that kernels can
// address.
struct RowTensor {
  void* data = nullptr;  // null: not wanted, and no channels
  int64_t stride_token = 0;
  int64_t stride_head = 0;
  Dtype dtype = Dtype::kF32;
  uint32_t dim = 0;  // channels, a multiple of 8
};

// Tokens of one sequence, list tokens [first, first + n_tokens), of all head classes of a layer.
struct ReadParams {
  PagePool pool;
  const uint32_t* page_table = nullptr;
  uint64_t tables[kMaxClasses] = {};  // [page class] index of the list's first entry
  uint32_t n_classes = 0;
  uint32_t first = 0;
  uint32_t n_tokens = 0;
  uint32_t dim = 0;  // channels of a stored row of K, a multiple of 8
  RowTensor k;       // row i is of token i
  RowTensor v;       // where V is in K, its first channels
};

// LIMIT: states that one launch merges, one for each lane of a warp at most; sinks and recent
// tokens, the middle, and a shared prefix are three.
inline constexpr uint32_t kMaxStates = 8;

// Rows that a block of their kernel has at once, one for each warp.
inline constexpr uint32_t kStatesWarps = 4;

// States of rows and heads over different tokens: o [state] of [row][head][dim], any dtype; lse
// [state] of [row][head], fp32, natural logarithm. The results may be in the place of a state's,
// with its dtype and strides.
struct StatesParams {
  RowTensor o[kMaxStates];
  RowTensor lse[kMaxStates];
  RowTensor out_o;
  RowTensor out_lse;  // data null: not wanted
  uint32_t n_states = 0;
  uint32_t n_rows = 0;
  uint32_t n_heads = 0;
  uint32_t dim = 0;  // of o, a multiple of 8
};

// LIMIT: words of a WordRun, which is a block's work.
inline constexpr uint32_t kMaxRunWords = 1024;

// A WordRun is words that lie side by side in a message, and where they go.
struct WordRun {
  uint64_t to = 0;    // word of ScatterParams::to
  uint32_t from = 0;  // word of ScatterParams::words
  uint32_t n_words = 0;
};

struct ScatterParams {
  uint32_t* to = nullptr;
  const uint32_t* words = nullptr;
  const WordRun* runs = nullptr;  // no word of `to` in two; block b takes run b
  uint32_t n_runs = 0;
};

// A LengthsItem is what a plan counts on of one sequence, which may turn out to have fewer tokens
// (lengths_kernel.h).
struct LengthsItem {
  uint32_t n_before = 0;  // tokens before the append, at most
  uint32_t n_unsure = 0;  // by which they may be fewer; at most n_before
  uint32_t n_append = 0;
  uint32_t n_query = 0;    // REQUIRES: at most n_before - n_unsure + n_append, or 1 where that is 0
  uint32_t query_row = 0;  // query token 0, in the query and output tensors
};

// A LengthsKind is one plan, and the room for what becomes of it: as many pieces, merges and tokens
// to append. Plans of a step differ in sights and in the group.
struct LengthsKind {
  const Work* planned_work = nullptr;
  const Merge* planned_merges = nullptr;
  const AppendToken* planned_tokens = nullptr;
  Work* work = nullptr;
  Merge* merges = nullptr;
  AppendToken* tokens = nullptr;
  // How many of each the plan has; n_tokens null: none.
  const uint32_t* n_work = nullptr;
  const uint32_t* n_merges = nullptr;
  const uint32_t* n_tokens = nullptr;
  uint32_t group = 1;
  Sight sights[kMaxClasses] = {};  // [page class]
};

// LIMIT: plans of one launch.
inline constexpr uint32_t kMaxLengthsKinds = 8;

struct LengthsParams {
  LengthsKind kinds[kMaxLengthsKinds] = {};
  uint32_t n_kinds = 0;
  const LengthsItem* items = nullptr;  // [max_items]
  // [item] tokens before the append; null: as many as the plan counts on.
  const uint32_t* lengths = nullptr;
  // A list has max_pages entries of the page table for each of max_items items, in their order.
  uint32_t max_items = 1;
  uint32_t max_pages = 1;
  uint32_t page_tokens = 64;
  uint32_t block_rows = 16;
};

// LIMIT: pages that one launch moves.
inline constexpr uint32_t kMaxMovedPages = 256;

// Pages, and a buffer in which they lie one behind the other.
struct MoveParams {
  uint8_t* pages[kMaxMovedPages] = {};
  uint8_t* packed = nullptr;
  uint64_t page_bytes = 0;  // a multiple of 16
  uint32_t n_pages = 0;
  bool pack = false;  // from the pages to the buffer; else back
};

// Parameters travel in constant memory, 4 KiB on every architecture.
static_assert(sizeof(DecodeParams) <= 4096 && sizeof(AppendParams) <= 4096 &&
              sizeof(LengthsParams) <= 4096 && sizeof(MoveParams) <= 4096 &&
              sizeof(ReadParams) <= 4096 && sizeof(StatesParams) <= 4096);

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_PARAMS_H_
