// SPDX-License-Identifier: Apache-2.0
// Making frames: the avx2 table. CMakeLists.txt gives this file its flags.
#include "base/simd/vec_avx2.h"
//
#include "hash_index/sketch/frame_kernel.h"

namespace kvm {
namespace hash_index {

extern const FrameKernels kFrameAvx2 = {load,  squares, add_rows, subtract, moments,
                                        leads, turn,    multiply, eigen};

}  // namespace hash_index
}  // namespace kvm
