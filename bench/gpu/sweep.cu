// SPDX-License-Identifier: Apache-2.0
// Other tiles, stages and warps of the decode kernel, to choose shapes.h by measurement (U4). For
// sm_90 only: what is compiled for three architectures is what is shipped.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "attention/cuda/shapes.h"
#include "bench/gpu/device.h"
#include "bench/gpu/workload.h"

namespace kvm::bench::gpu {
namespace {

using attention::gpu::DecodeParams;
using attention::gpu::DecodeShape;
using attention::gpu::Element;

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    sweep_kernel(const __grid_constant__ DecodeParams params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  attention::gpu::decode_thread<Shape>(params);
#else
  (void)params;
#endif
}

template <class Shape>
void measure(Workload* workload, const WorkloadSpec& spec, const Args& args) {
  const std::string shape = "T" + std::to_string(Shape::kTile) + " S" +
                            std::to_string(Shape::kStages) + " W" + std::to_string(Shape::kWarps);
  if (cudaFuncSetAttribute(sweep_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(Shape::kSharedBytes)) != cudaSuccess) {
    (void)cudaGetLastError();  // more shared memory than this device has
    return;
  }
  int most = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&most, sweep_kernel<Shape>, Shape::kThreads,
                                                      Shape::kSharedBytes),
        "occupancy");
  for (int per_sm = 1; per_sm <= std::min(most, 3); ++per_sm) {
    workload->plan(static_cast<uint32_t>(per_sm * device_facts().sms));
    const Effort effort = effort_for(static_cast<double>(spec.kv_bytes()) / 3.5e6 + 8, args);
    const double us = time_us(
        [&](uint32_t i, cudaStream_t stream) {
          sweep_kernel<Shape>
              <<<workload->current_plan().n_blocks, Shape::kThreads, Shape::kSharedBytes, stream>>>(
                  workload->decode_params(i));
          check(cudaGetLastError(), "sweep kernel");
          workload->launch_merge(stream);
        },
        effort.calls, effort.repeats);
    print_figure("U4", spec.name() + " " + shape + " x" + std::to_string(per_sm), "GB/s",
                 static_cast<double>(spec.kv_bytes()) / us / 1e3);
  }
}

template <uint32_t kDim, uint32_t kTile, uint32_t kStages, uint32_t kWarps>
using Bf16Shape = DecodeShape<Element::kBf16, kDim, kTile, kStages, kWarps, 1>;
template <uint32_t kTile, uint32_t kStages, uint32_t kWarps>
using F8Shape = DecodeShape<Element::kF8, 128, kTile, kStages, kWarps, 1>;

}  // namespace

int run_sweep(const Args& args) {
  const DeviceFacts facts = device_facts();
  if (facts.major != 9) {
    print_fact("U4", "sweep", "left out: the device is not of compute capability 9.0");
    return 0;
  }
  check(attention::gpu::attend_init(), "attend_init");
  const DeviceBuffer memory(std::min<size_t>(size_t{3} << 30, facts.free_bytes / 16 * 15));
  fill_random(memory.data(), memory.size(), nullptr);
  for (const uint32_t n : {16384u, 131072u, 262144u}) {
    WorkloadSpec spec;
    spec.lengths = {n};
    Workload workload(spec, memory);
    measure<Bf16Shape<128, 16, 2, 4>>(&workload, spec, args);
    measure<Bf16Shape<128, 16, 3, 4>>(&workload, spec, args);
    measure<Bf16Shape<128, 16, 4, 4>>(&workload, spec, args);
    measure<Bf16Shape<128, 16, 3, 8>>(&workload, spec, args);
    measure<Bf16Shape<128, 32, 2, 4>>(&workload, spec, args);
    measure<Bf16Shape<128, 32, 3, 4>>(&workload, spec, args);
  }
  fill_random_bytes(memory.data(), memory.size(), nullptr);
  for (const uint32_t n : {32768u, 262144u}) {
    WorkloadSpec spec;
    spec.lengths = {n};
    spec.codec = CodecId::kF8;
    Workload workload(spec, memory);
    measure<F8Shape<16, 4, 4>>(&workload, spec, args);
    measure<F8Shape<16, 6, 4>>(&workload, spec, args);
    measure<F8Shape<32, 2, 4>>(&workload, spec, args);
    measure<F8Shape<32, 3, 4>>(&workload, spec, args);
    measure<F8Shape<32, 3, 8>>(&workload, spec, args);
  }
  return 0;
}

}  // namespace kvm::bench::gpu
