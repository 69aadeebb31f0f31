// SPDX-License-Identifier: Apache-2.0
// Launches the GPU kernels on a stream. For code that is built where there is a CUDA toolkit.
//
// All calls return at once, allocate nothing and can be captured in a CUDA graph. What parameters
// point to is device memory (or host memory that the device can address) and stays unchanged until
// the launch has ended. REQUIRES: attend_init has succeeded on the current device.
// Errors: what the runtime says of the launch; cudaErrorInvalidValue for a shape that is not
// compiled (shapes.h). Threads: any.
#ifndef KVM_ATTENTION_CUDA_LAUNCH_H_
#define KVM_ATTENTION_CUDA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/params.h"

namespace kvm::attention::gpu {

// Prepares the kernels for the current device: they take more shared memory than the default.
cudaError_t attend_init();

// Blocks of the kernel that run on one SM at once, and what each takes of its shared memory.
struct Residency {
  int blocks_per_sm = 0;
  uint32_t threads = 0;
  uint32_t shared_bytes = 0;
};
cudaError_t decode_residency(const DecodeKernel& kernel, Residency* out);
// The part of it that needs no device, for those of a compute capability. False where the shape is
// not compiled.
bool decode_shape(const DecodeKernel& kernel, int major, Residency* out);

// n_blocks: of the plan; nothing is launched for 0.
cudaError_t launch_decode(const DecodeKernel& kernel, const DecodeParams& params, uint32_t n_blocks,
                          cudaStream_t stream);
// n_merges, n_tokens: for so many there are blocks; where params count them on the device there may
// be more. dim: channels of a result. The merge begins before the launch in front of it on the
// stream has ended, if that lets it (DecodeParams::merge_follows), and waits for its end before it
// reads anything.
cudaError_t launch_merge(uint32_t dim, const MergeParams& params, uint32_t n_merges,
                         cudaStream_t stream);
// codec: of the pages.
cudaError_t launch_append(CodecId codec, const AppendParams& params, uint32_t n_tokens,
                          cudaStream_t stream);
// n_blocks: they take tokens in turn.
cudaError_t launch_read(CodecId codec, const ReadParams& params, uint32_t n_blocks,
                        cudaStream_t stream);
// n_blocks: their warps take rows in turn.
cudaError_t launch_merge_states(const StatesParams& params, uint32_t n_blocks, cudaStream_t stream);
// n_threads: at least; each has pieces, merges and tokens in turn.
cudaError_t launch_lengths(const LengthsParams& params, uint32_t n_threads, cudaStream_t stream);
cudaError_t launch_scatter(const ScatterParams& params, cudaStream_t stream);
cudaError_t launch_move(const MoveParams& params, cudaStream_t stream);

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_LAUNCH_H_
