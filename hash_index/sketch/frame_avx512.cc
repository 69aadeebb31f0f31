// SPDX-License-Identifier: Apache-2.0
// Making frames: the avx512 table. CMakeLists.txt gives this file its flags.
#include "base/simd/vec_avx512.h"
//
#include "hash_index/sketch/frame_kernel.h"

namespace kvm {
namespace hash_index {

extern const FrameKernels kFrameAvx512 = {load,  squares, add_rows, subtract, moments,
                                          leads, turn,    multiply, eigen};

}  // namespace hash_index
}  // namespace kvm
