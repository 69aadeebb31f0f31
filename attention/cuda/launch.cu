// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/launch.h"

#include <cuda_runtime.h>

#include "attention/cuda/lengths_kernel.h"
#include "attention/cuda/read_kernel.h"
#include "attention/cuda/shapes.h"
#include "attention/cuda/states_kernel.h"
#include "attention/cuda/table_kernel.h"

namespace kvm::attention::gpu {
namespace {

// Two blocks run on an SM, or three where rows are of 4 bits and 64 channels. Told so, the compiler
// has registers enough for shapes of which, left alone, it would make four, and spill. Others stay
// as it makes them: 0 says nothing.
template <class Shape>
inline constexpr int kLeastBlocks = [] {
  if constexpr (Shape::kIsMla) {
    return static_cast<int>(256 / Shape::kThreads);
  } else if constexpr (Shape::kStepped && Shape::kDim == 64 && Shape::kRowTiles == 1) {
    return 3;
  } else {
    constexpr bool kFew = Shape::kRowTiles == 1 && ((Shape::kDim == 64 && Shape::kScaled) ||
                                                    (Shape::kDim == 80 && !Shape::kNarrow));
    return kFew || Shape::kDim == 96 ? 2 : 0;
  }
}();

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, kLeastBlocks<Shape>)
    decode_kernel(const __grid_constant__ DecodeParams params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  attend_thread<Sm80Shape<Shape>>(params);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  attend_thread<Shape>(params);
#else
  attend_thread<SmallShape<Shape>>(params);
#endif
}

// As many blocks as their registers let run on an SM: two of four warps, one of eight.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 8 / Shape::kWarps)
    prefill_kernel(const __grid_constant__ DecodeParams params) {
  attend_thread<Shape>(params);
}

template <class Shape>
constexpr auto attend_kernel() {
  if constexpr (kIsPrefill<Shape>) {
    return prefill_kernel<Shape>;
  } else {
    return decode_kernel<Shape>;
  }
}

// What the kernel takes on devices of a compute capability. Code for older ones than the device,
// made for it by the driver, takes less.
template <class Shape>
uint32_t shared_bytes_on(int major) {
  constexpr bool kAlone = Shape::kThreads == 256;  // on an SM
  static_assert(Shape::kSharedBytes <= (Shape::kIsMla && kAlone ? kAllOfSm90 : kMostSharedBytes) &&
                SmallShape<Shape>::kSharedBytes <= kMostSharedBytes &&
                Sm80Shape<Shape>::kSharedBytes <= (kAlone ? kMostSharedBytes : kHalfOfSm80));
  return major == 8   ? Sm80Shape<Shape>::kSharedBytes
         : major == 9 ? Shape::kSharedBytes
                      : SmallShape<Shape>::kSharedBytes;
}

cudaError_t current_major(int* major) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess
             ? error
             : cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device);
}

// With room for 8 blocks a SM the compiler has registers enough: left alone it saves on them, and
// spills.
template <uint32_t kDim>
__global__ void __launch_bounds__(kMergeThreads, 8)
    merge_kernel(const __grid_constant__ MergeParams params) {
  merge_thread<kDim>(params);
}

template <Element kElement>
__global__ void __launch_bounds__(kAppendThreads)
    append_kernel(const __grid_constant__ AppendParams params) {
  append_thread<kElement>(params);
}

template <Element kElement>
__global__ void __launch_bounds__(kReadThreads)
    read_kernel(const __grid_constant__ ReadParams params) {
  read_thread<kElement>(params);
}

__global__ void __launch_bounds__(kStatesThreads)
    merge_states_kernel(const __grid_constant__ StatesParams params) {
  merge_states_thread(params);
}

__global__ void __launch_bounds__(kLengthsThreads)
    lengths_kernel(const __grid_constant__ LengthsParams params) {
  lengths_thread(params);
}

__global__ void __launch_bounds__(kScatterThreads)
    scatter_kernel(const __grid_constant__ ScatterParams params) {
  scatter_thread(params);
}

__global__ void __launch_bounds__(kMoveThreads)
    move_kernel(const __grid_constant__ MoveParams params) {
  move_thread(params);
}

}  // namespace

namespace {

// Loads a kernel, which otherwise happens at its first launch, where nobody should wait.
template <class Kernel>
cudaError_t load(Kernel kernel) {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, kernel);
}

template <class Kernel>
cudaError_t load(Kernel kernel, uint32_t shared_bytes) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  // For as many blocks on an SM as fit.
  return error != cudaSuccess
             ? error
             : cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared);
}

}  // namespace

cudaError_t attend_init() {
  int major = 0;
  cudaError_t error = current_major(&major);
  const auto note = [&error](cudaError_t result) { error = error == cudaSuccess ? result : error; };
  for (const codecs::Codec& codec : codecs::kCodecs) {
    for (const uint32_t dim : kKeyDims) {
      for (const uint32_t rows : kBlockRows) {
        visit_shape(codec.id, dim, rows, [&]<class Shape>(Shape) {
          note(load(attend_kernel<Shape>(), shared_bytes_on<Shape>(major)));
        });
      }
    }
    visit_element(codec.id, [&]<class Tag>(Tag) {
      note(load(append_kernel<Tag::kElement>));
      note(load(read_kernel<Tag::kElement>));
    });
  }
  for (const uint32_t dim : kKeyDims) {
    visit_value_dim(value_dim(dim), [&]<class Tag>(Tag) { note(load(merge_kernel<Tag::kDim>)); });
  }
  note(load(merge_states_kernel));
  note(load(lengths_kernel));
  note(load(scatter_kernel));
  note(load(move_kernel));
  return error;
}

bool decode_shape(const DecodeKernel& kernel, int major, Residency* out) {
  return visit_shape(kernel.codec, kernel.dim, kernel.block_rows, [&]<class Shape>(Shape) {
    out->threads = Shape::kThreads;
    out->shared_bytes = shared_bytes_on<Shape>(major);
  });
}

cudaError_t decode_residency(const DecodeKernel& kernel, Residency* out) {
  int major = 0;
  cudaError_t error = current_major(&major);
  if (error != cudaSuccess) {
    return error;
  }
  error = decode_shape(kernel, major, out) ? error : cudaErrorInvalidValue;
  visit_shape(kernel.codec, kernel.dim, kernel.block_rows, [&]<class Shape>(Shape) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &out->blocks_per_sm, attend_kernel<Shape>(), Shape::kThreads, out->shared_bytes);
  });
  return error;
}

cudaError_t launch_decode(const DecodeKernel& kernel, const DecodeParams& params, uint32_t n_blocks,
                          cudaStream_t stream) {
  int major = 0;
  cudaError_t error = current_major(&major);
  if (error != cudaSuccess) {
    return error;
  }
  error = cudaErrorInvalidValue;
  visit_shape(kernel.codec, kernel.dim, kernel.block_rows, [&]<class Shape>(Shape) {
    if (n_blocks != 0) {
      constexpr auto kKernel = attend_kernel<Shape>();
      kKernel<<<n_blocks, Shape::kThreads, shared_bytes_on<Shape>(major), stream>>>(params);
    }
    error = cudaGetLastError();
  });
  return error;
}

cudaError_t launch_merge(uint32_t dim, const MergeParams& params, uint32_t n_merges,
                         cudaStream_t stream) {
  const uint32_t blocks = n_merges * params.rows;
  if (blocks == 0) {
    return cudaSuccess;
  }
  int major = 0;
  cudaError_t error = current_major(&major);
  if (error != cudaSuccess) {
    return error;
  }
  // Begins when the blocks of the kernel before say so, and waits for its end. In a graph that is
  // captured it is an edge of its own kind, which drivers know from CUDA 12.3 on.
  static const bool is_known_to_captures = [] {
    int driver = 0;
    return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12030;
  }();
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kMergeThreads);
  config.dynamicSmemBytes = kMergeSharedBytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = is_known_to_captures && major >= 9 ? 1 : 0;
  const bool known = visit_value_dim(dim, [&]<class Tag>(Tag) {
    error = cudaLaunchKernelEx(&config, merge_kernel<Tag::kDim>, params);
  });
  return known ? error : cudaErrorInvalidValue;
}

cudaError_t launch_append(CodecId codec, const AppendParams& params, uint32_t n_tokens,
                          cudaStream_t stream) {
  if (n_tokens == 0) {
    return cudaSuccess;
  }
  const bool known = visit_element(codec, [&]<class Tag>(Tag) {
    append_kernel<Tag::kElement><<<n_tokens, kAppendThreads, 0, stream>>>(params);
  });
  return known ? cudaGetLastError() : cudaErrorInvalidValue;
}

cudaError_t launch_read(CodecId codec, const ReadParams& params, uint32_t n_blocks,
                        cudaStream_t stream) {
  if (n_blocks == 0) {
    return cudaSuccess;
  }
  const bool known = visit_element(codec, [&]<class Tag>(Tag) {
    read_kernel<Tag::kElement><<<n_blocks, kReadThreads, 0, stream>>>(params);
  });
  return known ? cudaGetLastError() : cudaErrorInvalidValue;
}

cudaError_t launch_merge_states(const StatesParams& params, uint32_t n_blocks,
                                cudaStream_t stream) {
  if (n_blocks == 0) {
    return cudaSuccess;
  }
  merge_states_kernel<<<n_blocks, kStatesThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_lengths(const LengthsParams& params, uint32_t n_threads, cudaStream_t stream) {
  if (n_threads == 0) {
    return cudaSuccess;
  }
  const uint32_t n_blocks = (n_threads + kLengthsThreads - 1) / kLengthsThreads;
  lengths_kernel<<<n_blocks, kLengthsThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_scatter(const ScatterParams& params, cudaStream_t stream) {
  if (params.n_runs == 0) {
    return cudaSuccess;
  }
  scatter_kernel<<<params.n_runs, kScatterThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_move(const MoveParams& params, cudaStream_t stream) {
  if (params.n_pages == 0) {
    return cudaSuccess;
  }
  move_kernel<<<params.n_pages * kMoveBlocks, kMoveThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace kvm::attention::gpu
