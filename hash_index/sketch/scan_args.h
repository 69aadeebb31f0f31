// SPDX-License-Identifier: Apache-2.0
// The arguments of the per-ISA kernels, from sketch.cc. Plain data: kernel files include nothing
// else of ours. hash_index/sketch/layout.h says how blocks are laid out.
#ifndef KVM_HASH_INDEX_SKETCH_SCAN_ARGS_H_
#define KVM_HASH_INDEX_SKETCH_SCAN_ARGS_H_

#include <stddef.h>
#include <stdint.h>

namespace kvm {
namespace hash_index {

enum : uint32_t {
  kScanKeys = 64,     // of a block
  kScanRows = 16,     // queries at once, at most
  kScanTile = 4,      // rows that share the reading of a code
  kScanMaxDim = 256,  // padded
  kLeadDims = 8,
  kLookupOffset = 1152,  // from a ScanQuery to its lookup tables; a multiple of 64
};

// The shape of a block, in bytes from its start.
struct BlockShape {
  uint32_t code_rows;    // rows of 64 bytes in a plane of the code: padded dim / 8
  uint32_t planes;       // 1, 2
  uint32_t lead_offset;  // 0: no lead
  uint32_t factor_offset;
  uint32_t bytes;
};

// Queries, prepared. Sums over a code come in integers: with q_j the rounded query, S = sum of q_j
// over the set bits (two planes: 2 S_high + S_low), shifted to be never negative. Then
//   x = factor * (factor * spread + S * step + offset) + (lead codes . lead + lead_bias) *
//   lead_step + base,
//   logit = x, or where there is a cap: cap tanh(x / cap) = cap - 2 cap / (1 + 2^(x cap_power)).
// Lookup tables follow: for each tile of kScanTile rows and each group of code bits the tables of
// the tile's rows, one after the other. A group is a nibble, low before high, of a code row
// (16 bytes), or six bits (64 bytes): of code rows 3 t, 3 t + 1, 3 t + 2 the six low bits of each,
// and then the two high bits of the three; likewise of the one or two rows that remain.
struct ScanQuery {
  BlockShape shape;
  uint32_t n_rows;
  uint32_t six_bits;    // which kind of groups
  uint32_t n_groups;    // of one plane
  uint32_t chunk_rows;  // code rows whose sum fits 8 bits; a multiple of 3
  float cap;            // 0: none
  float cap_power;      // 2 log2(e) / cap
  float step[kScanRows];
  float offset[kScanRows];
  float spread[kScanRows];  // 0, or variance of the logit over factor^2 (ScanRows::careful)
  float base[kScanRows];
  float lead_step[kScanRows];
  int32_t lead_bias[kScanRows];
  uint32_t lead[kScanRows][2];  // int8, four of them in a word
  // From the basis, for sketch.cc: leading coordinates of the queries, and which count at all.
  float turned[kScanRows][kLeadDims];
  uint8_t usable[kScanRows];
};
static_assert(sizeof(ScanQuery) <= kLookupOffset, "the lookup tables begin behind it");

// Sums over keys; sketch.h, DrawSums.
struct ScanSums {
  double expected;
  double open_mass[kScanRows];
  double spread[kScanRows];
};

// Consecutive blocks whose positions agree in the upper 32 bits.
struct DrawArgs {
  const ScanQuery* query;
  const uint8_t* blocks;
  uint32_t n_blocks;
  const uint8_t* next;  // blocks that are read after these; null: none. Asked for, not read.
  uint32_t hash_keys[2];
  uint64_t position;
  float log2_c[kScanRows];
  float reach;
  float min_size;
  // Candidates.
  uint64_t* out_position;
  float* out_size;
  float* out_random;
  float* out_logits;
  uint32_t capacity;
  uint32_t n;  // in and out
};

// One block of keys. Rows of K and V are dense.
struct EncodeArgs {
  BlockShape shape;
  const uint8_t* k;
  uint32_t elem_k;  // vec::Elem; neither int8 nor fp8
  uint32_t dim_k;
  uint32_t dim_pad;           // power of two
  uint32_t lead;              // 0 or kLeadDims
  const float* center;        // [dim_k]
  const float* signs;         // [3][dim_pad]: of the rotation, the first round scaled
  const float* lead_key;      // [dim_k][kLeadDims]
  const float* lead_query;    // [dim_k][kLeadDims]
  const float* matrix;        // [dim_k][kLeadDims + dim_pad], or null
  const float* lead_inverse;  // [kLeadDims]: 1 / step
  float* value_norms;         // [64]; those of keys that are not finite are made huge
  uint8_t* block;
};

struct ScanKernels {
  uint32_t six_bits;
  // out [n_rows][64].
  void (*logits)(const ScanQuery* query, const uint8_t* block, float* out);
  // Returns 0 where capacity ran out.
  uint32_t (*draw)(DrawArgs* args, ScanSums* sums);
  void (*encode)(const EncodeArgs* args);
  // Norms of 64 dense rows. next: what is read after them, and asked for in between.
  void (*norms)(const uint8_t* rows, uint32_t elem, uint32_t dim, const uint8_t* next,
                size_t next_bytes, float* out);
};

// One object per per-ISA file.
extern const ScanKernels kScanScalar;
extern const ScanKernels kScanAvx2;
extern const ScanKernels kScanAvx512;
extern const ScanKernels kScanAvx512Vbmi;

}  // namespace hash_index
}  // namespace kvm

#endif  // KVM_HASH_INDEX_SKETCH_SCAN_ARGS_H_
