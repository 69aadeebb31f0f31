// SPDX-License-Identifier: Apache-2.0
// Arguments that the driver (exact.cc) hands to the per-ISA kernels. Plain data: kernel files
// include nothing else of ours.
#ifndef KVM_ATTENTION_EXACT_EXACT_ARGS_H_
#define KVM_ATTENTION_EXACT_EXACT_ARGS_H_

#include <stddef.h>
#include <stdint.h>

namespace kvm {
namespace attention {

enum : uint32_t {
  kItemTokens = 16,     // tokens per item of the streaming path, aligned by position
  kBlockTokens = 64,    // tokens per block of the blocked path, aligned by position
  kGroupItems = 4,      // items whose K, and then whose V, are read together: a block
  kAttempts = 4,        // how often each line is prefetched on its way; see Reader
  kReadAhead = 12,      // stretches of 16 rows by which prefetching runs ahead of reading, at most
  kMaxStreamRows = 32,  // rows of the streaming path, at most
  kRowTile = 4,         // rows that meet an item at once in the streaming path (1 where rows == 1)
  kRowPad = 8,          // query rows readable beyond the last
  kMaxCodeRank = 16,    // of codecs/gear.h
  kMaxCodeDim = 576,    // channels of rows of codes that are not decoded, at most
  kDimPad = 32,         // query channels are padded with zeros to a multiple of this
};

// Rows of items beside those of vec::Elem: codes of codecs/low_bits.h. Their parameters are
// CodeParams.
enum : uint8_t { kElemCodes4 = 16, kElemCodes3 = 17, kElemCodes2 = 18 };
constexpr bool elem_is_codes(uint8_t elem) { return elem >= kElemCodes4; }

// Parameters of codes, bf16 as bits. By channel: channels alone, scales [dim] and zeros [dim]. By
// token: steps [16][dim / 64][2], scale and zero; centred: means [dim] in channels as well;
// balanced, of K: factors [dim] there. Of codecs/gear.h also A [16][rank], and B [rank][dim] with
// pairs of outliers behind it.
struct CodeParams {
  const uint16_t* steps;     // of the first token of the item
  const uint16_t* channels;  // of the page
  const uint16_t* a;         // of the first token of the item
  const uint16_t* b;         // of the page; null where there are neither
  int32_t slot;              // in its page of the first token of the item, present or not
  uint16_t rank;
  uint16_t n_pairs;
  bool is_balanced;
};

// A KvItem is up to 16 tokens of consecutive, aligned positions whose rows are contiguous.
struct KvItem {
  const uint8_t* k;         // of the first of the heads that share the item
  const uint8_t* v;         // likewise
  const float* log_weight;  // likewise; [16], or null
  const uint16_t* k_scale;  // likewise; bf16 [16] where K is int8 or fp8, else null
  const uint16_t* v_scale;
  CodeParams k_codes;  // of this head; where elem_k is codes
  CodeParams v_codes;
  const uint16_t* row_masks;  // visible tokens per query token, or null: `mask` for all rows
  uint16_t mask;              // tokens that count; rows of the others hold finite values
  uint16_t variant;           // of the queries
  uint8_t elem_k;             // vec::Elem, or codes
  uint8_t elem_v;
  uint64_t position;  // of the first token, present or not
  // For the driver.
  uint16_t flags;  // exact.cc
  uint32_t run;    // index of the first run that holds tokens of the item
};

// The queries of a problem as prepare_queries lays them out.
struct QueryRows {
  const float* f32;           // [variant][rows + kRowPad][stride]
  const uint16_t* bf16;       // same shape, for variants where bf16_exact
  const uint8_t* bf16_exact;  // [variant]
  // As integers of 16 bits, same shape: a channel is i16 times the row's step, a power of two.
  const int16_t* i16;
  const float* i16_step;    // [variant][rows + kRowPad]
  const uint8_t* i16_near;  // [variant][rows + kRowPad]: whether that is near enough, 0 or 1
  uint64_t variant_stride;  // elements
  uint32_t stride;          // elements; a multiple of kDimPad
  uint32_t rows;
  uint32_t group;
  uint32_t variant_rows;  // rows + kRowPad
};

// What logits grow by from position to position.
struct PositionBias {
  const float* slopes;      // [group], or null: nothing
  uint64_t query_position;  // of query token 0
};

// What the queries of StreamArgs::code_words are for. They are kept while this does not change.
struct FoldedFor {
  const uint16_t* page;  // CodeParams::b, or else channels
  uint8_t elem;          // 0: nothing
  uint16_t variant;
  bool by_token;
};

// Shape and scratch of a run of items: the streaming path.
struct StreamArgs {
  QueryRows q;
  uint32_t dim_k;
  uint32_t dim_v;
  uint32_t v_stride;    // elements from a row of V to the next: dim_v, or more
  uint32_t acc_stride;  // floats per row of acc; a multiple of 32, >= dim_v
  uint32_t fp32_weights;
  float scale;
  float softcap;
  PositionBias bias;
  uint8_t ahead[kAttempts];  // in quarters of a stretch, less than 4 * kReadAhead - 3
  uint8_t far_ahead;         // the same, into the second level
  int64_t scale_offset;      // elements from an item's scales to those of this head
  // Per tile of rows; the layout of m and l is the kernel's own.
  float* acc;  // [rows rounded up to kRowTile][acc_stride]
  float* m;    // [tiles][16]
  float* l;    // [tiles][kRowTile * 16], [16] where rows == 1: one for each token of an item
  float* bad;  // [16]: not 0 in all lanes once a dot product of a row was not finite
  // Where items may be codes; exact_codes.h.
  int16_t* code_words;  // [2][rows rounded up to kRowTile][dim_k]
  float* code_terms;    // [tiles][3 + dim_k / 64 + kMaxCodeRank][8]
  float* code_sparse;   // [tiles][kItemTokens + kBlockTokens + kItemTokens][kRowTile]
  float* code_folded;   // [dim_k]
  float* code_turned;   // [dim_k][kRowTile]
  FoldedFor* folded_for;
  // stream_keys leaves these to stream_values.
  float* weights;   // [kGroupItems][tiles][kRowTile * kItemTokens]
  float* factors;   // [kGroupItems][tiles][16]: rescales acc before the values of an item
  uint32_t* grown;  // [kGroupItems][tiles]: whether it has to be
};

// BlockArgs describe one block of 64 tokens against a range of rows: the blocked path.
struct BlockArgs {
  QueryRows q;
  uint32_t dim_k;
  uint32_t dim_v;
  uint32_t acc_stride;
  float scale;
  float softcap;
  PositionBias bias;
  uint64_t position;  // of the first token of the block
  // Per token of the block; null rows are absent and count as zero.
  const uint8_t* k[kBlockTokens];
  const uint8_t* v[kBlockTokens];
  uint8_t elem_k[kBlockTokens];
  uint8_t elem_v[kBlockTokens];
  uint32_t variant;
  uint32_t bf16_qk;  // use the bf16 dot product; K rows are no wider, q is exact in bf16
  uint32_t bf16_pv;  // likewise for weights and V
  // Per token, times elem_unit, or null: no row present is int8 or fp8; all of them are where it is
  // not.
  const float* k_scale;
  const float* v_scale;
  uint64_t mask;              // tokens that count
  const float* log_weight;    // [64], or null
  const uint64_t* row_masks;  // per query token, or null: `mask` for all rows
  uint32_t query_first;       // the query token of row_masks[0]
  uint32_t row_first;
  uint32_t row_count;
  void* packed_k;  // [dim_k rounded up to 2][64] floats
  void* packed_v;  // [64][acc_stride] floats
  float* acc;      // [row_count + kRowPad][acc_stride]
  float* m;        // [row_count + kRowPad]
  float* l;        // [row_count + kRowPad][16]
  float* bad;      // [16]: as above
  // Used by block_sums alone, which needs neither values nor acc, m, l.
  const float* references;  // [row_count + kRowPad]: as in stream_sums
  float* sums;              // [64]: what is added to
};

struct ExactKernels {
  // Whether the streaming path takes items of codes, of rows with a multiple of 64 channels and
  // without fp32_weights.
  bool reads_codes;
  // Sets acc, m and l of all rows to the empty state.
  void (*stream_begin)(const StreamArgs* args);
  // Fold up to kGroupItems items into the state: the keys of all of them, and then their values.
  // reading [n + kReadAhead]: the rows of the items, 16 each, and then those that will be read
  // after this call. The latter are prefetched and need not be valid addresses.
  void (*stream_keys)(const StreamArgs* args, const KvItem* items, uint32_t n,
                      const uint8_t* const* reading);
  void (*stream_values)(const StreamArgs* args, const KvItem* items, uint32_t n,
                        const uint8_t* const* reading);
  // Writes the state: o [rows][dim_v], m [rows], l [rows]. Returns whether a dot product or an
  // element of o was not finite, of any row: the state may then be spoiled.
  bool (*stream_end)(const StreamArgs* args, float* o, float* m, float* l);
  // Weights e^(logit - reference), at most 1, of the tokens of one item, added up over all rows:
  // sums [kItemTokens]; 0 where not visible. Reads the rows at item->k. references [rows rounded up
  // to kRowTile]: finite, and those beyond the last row so large that nothing comes of them.
  void (*stream_sums)(const StreamArgs* args, const KvItem* item, const float* references,
                      float* sums);

  void (*block_begin)(const BlockArgs* args);
  void (*block)(const BlockArgs* args);
  bool (*block_end)(const BlockArgs* args, float* o, float* m, float* l);
  // Likewise for the tokens of a block.
  void (*block_sums)(const BlockArgs* args);
};

// One object per per-ISA file.
extern const ExactKernels kExactScalar;
extern const ExactKernels kExactAvx2;
extern const ExactKernels kExactAvx512;
extern const ExactKernels kExactAvx512Bf16;

}  // namespace attention
}  // namespace kvm

#endif  // KVM_ATTENTION_EXACT_EXACT_ARGS_H_
