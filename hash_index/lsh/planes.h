// SPDX-License-Identifier: Apache-2.0
// Shared by the LSH files: the planes, the layout of a table run, the choice of kernels.
#ifndef KVM_HASH_INDEX_LSH_PLANES_H_
#define KVM_HASH_INDEX_LSH_PLANES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "hash_index/lsh/lsh.h"
#include "hash_index/lsh/lsh_args.h"

namespace kvm::hash_index {

// Weight of a plane: 16 times a normal deviate, rounded away from zero to the odd numbers from -63
// to 63. So no weight is zero, and signs are as likely as each other for sparse vectors too.
struct Planes {
  LshParams params;
  uint32_t dim_k = 0;
  std::vector<int8_t> weights;  // [L * K][dim_k]
  std::vector<int32_t> bias;    // HashArgs::bias
};

// The weight of channel `channel` of plane `plane`. Integer arithmetic throughout.
int8_t plane_weight(uint64_t seed, uint32_t plane, uint32_t channel);

// WIRE: a table run is L tables, stride_bytes apart. A table is 2^K + 1 offsets, the first of them
// 0 and the last n_keys, and from ids_offset_bytes on the ids of the keys in the order of their
// codes: those of code c are at [offset c, offset c + 1), ascending. Offsets are uint16_t, or
// uint32_t where n_keys is 65,536. Little-endian; what is left between the parts is zero.
struct TableLayout {
  uint32_t n_buckets = 0;
  uint32_t offset_bytes = 0;  // of one offset
  size_t ids_offset_bytes = 0;
  size_t stride_bytes = 0;

  static TableLayout make(const LshParams& params, uint32_t n_keys);
};

// Kernels that this machine can run, worst first; never empty. Constant while the process lives.
std::span<const LshKernels* const> available_lsh_kernels();

// The best, or where the environment variable KVM_FORCE_ISA names a kernel table ("scalar", "avx2",
// "avx512"), no better than that one. Read once.
const LshKernels& active_lsh_kernels();

}  // namespace kvm::hash_index

#endif  // KVM_HASH_INDEX_LSH_PLANES_H_
