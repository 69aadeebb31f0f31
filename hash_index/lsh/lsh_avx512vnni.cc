// SPDX-License-Identifier: Apache-2.0
// LSH: the avx512vnni table. CMakeLists.txt gives this file its flags.
#include "base/simd/vec_avx512.h"
#include "hash_index/lsh/lane_avx512.h"
//
#include "hash_index/lsh/lsh_kernel.h"

namespace kvm {
namespace hash_index {

extern const LshKernels kLshAvx512Vnni = {"avx512vnni", pack, hash, collect, list, inclusion};

}  // namespace hash_index
}  // namespace kvm
