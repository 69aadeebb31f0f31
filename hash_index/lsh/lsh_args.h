// SPDX-License-Identifier: Apache-2.0
// The arguments of the per-ISA kernels, from build and lookup. Plain data: kernel files include
// nothing else of ours.
//
// All of it is integer arithmetic, or fp32 arithmetic in one fixed order without fused operations,
// so every table gives the same bits.
#ifndef KVM_HASH_INDEX_LSH_LSH_ARGS_H_
#define KVM_HASH_INDEX_LSH_LSH_ARGS_H_

#include <stddef.h>
#include <stdint.h>

namespace kvm {
namespace hash_index {

enum : uint32_t {
  kPackKeys = 64,      // keys that are hashed together
  kMaxLshDim = 256,    // channels of a key; a multiple of 8
  kWeightOffset = 128  // what a packed byte is above its value
};

// Rows of one head at consecutive addresses, into columns [first, first + n) of `packed`.
struct PackArgs {
  const uint8_t* rows;
  const uint16_t* scales;  // bf16 [n], of int8 and fp8 rows; null for the other types
  const float* center;     // [dim], or null: zero
  // [dim / 4][kPackKeys][4] bytes, aligned to 64: round(127 x / max |x|) + kWeightOffset.
  uint8_t* packed;
  uint32_t elem;  // vec::Elem
  uint32_t n;
  uint32_t first;
  uint32_t dim;
};

struct HashArgs {
  const uint8_t* packed;
  const int8_t* weights;  // [plane][dim], -63 to 63: sums of two products fit 16 bits
  const int32_t* bias;    // [plane]: -kWeightOffset * sum of its weights
  uint16_t* codes;        // of key k and table t: codes[(t - table_begin) * code_stride + k]
  uint64_t code_stride;
  uint32_t n_keys;  // a multiple of 16, at most kPackKeys
  uint32_t dim;
  uint32_t n_bits;
  uint32_t table_begin;
  uint32_t table_end;
};

// u for the cosines x: see log_inclusion in lsh.h.
struct InclusionArgs {
  uint32_t n_bits;
  uint32_t n_tables;
  float floor;       // of u
  uint32_t inverse;  // 1 / u is wanted, else ln u
};

struct LshKernels {
  const char* name;
  void (*pack)(const PackArgs* args);
  void (*hash)(const HashArgs* args);
  // masks[i] |= bit where counts[i] >= 2, and counts[i] = 0; n a multiple of 64.
  void (*collect)(uint8_t* counts, size_t n, uint32_t bit, uint8_t* masks);
  // Pairs (i, masks[i] | high[i] << 8) of the i where that is not 0, ascending; high may be null.
  // Returns how many. Readable: masks and high up to a multiple of 64, zero from n on.
  uint32_t (*list)(const uint8_t* masks, const uint8_t* high, uint32_t n, uint16_t* out);
  void (*inclusion)(const InclusionArgs* args, const float* x, size_t n, float* out);
};

// One object per per-ISA file.
extern const LshKernels kLshScalar;
extern const LshKernels kLshAvx2;
extern const LshKernels kLshAvx512;
extern const LshKernels kLshAvx512Vnni;

}  // namespace hash_index
}  // namespace kvm

#endif  // KVM_HASH_INDEX_LSH_LSH_ARGS_H_
