// SPDX-License-Identifier: Apache-2.0
// The device, its ceilings (U1) and what a launch costs (U2).
#include <algorithm>
#include <cstdio>
#include <string>

#include "attention/cuda/launch.h"
#include "bench/gpu/device.h"
#include "codecs/codec.h"

namespace kvm::bench::gpu {
namespace {

__global__ void empty_kernel() {}

std::string mib(size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

void print_device() {
  int device = 0, driver = 0, runtime = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  cudaDeviceProp p{};
  check(cudaGetDeviceProperties(&p, device), "cudaGetDeviceProperties");
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  print_fact("device", "name", p.name);
  print_fact("device", "compute capability",
             std::to_string(p.major) + "." + std::to_string(p.minor));
  print_fact("device", "CUDA of driver and runtime",
             std::to_string(driver) + ", " + std::to_string(runtime));
  print_figure("device", "SMs", "count", p.multiProcessorCount);
  print_figure("device", "memory", "MiB", static_cast<double>(p.totalGlobalMem >> 20));
  print_figure("device", "L2", "MiB", static_cast<double>(p.l2CacheSize) / (1 << 20));
  print_figure("device", "shared memory per block, opted in", "KiB",
               static_cast<double>(p.sharedMemPerBlockOptin) / 1024);
  int clock_khz = 0;
  if (cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device) == cudaSuccess) {
    print_figure("device", "SM clock, peak", "MHz", clock_khz / 1e3);
  }
}

void print_bandwidths(const Args& args) {
  const size_t span =
      std::min<size_t>({args.max_bytes, device_facts().free_bytes / 4 * 3, size_t{8} << 30});
  const DeviceBuffer data(span);
  fill_random(data.data(), span, nullptr);
  check(cudaDeviceSynchronize(), "fill");
  for (size_t size = 16 << 20; size <= span / 2 && size <= size_t{4} << 30; size *= 2) {
    print_figure("U1", "read " + mib(size), "GB/s", read_ceiling(data.data(), span, size, args));
  }
  for (size_t size = 64 << 20; size <= span / 2 && size <= size_t{4} << 30; size *= 4) {
    const Effort effort = effort_for(static_cast<double>(size) / 2e6 + 4, args);
    const double us = time_us(
        [&](uint32_t i, cudaStream_t stream) {
          const size_t from = i % 2 * size;
          check(cudaMemcpyAsync(data.data() + size - from, data.data() + from, size,
                                cudaMemcpyDeviceToDevice, stream),
                "cudaMemcpyAsync");
        },
        effort.calls, effort.repeats);
    print_figure("U1", "copy, bytes read and written, " + mib(size), "GB/s",
                 2.0 * static_cast<double>(size) / us / 1e3);
  }
}

void print_floors(const Args& args) {
  (void)args;
  print_figure(
      "U2", "empty kernel in a graph", "us",
      time_us([](uint32_t, cudaStream_t stream) { empty_kernel<<<1, 32, 0, stream>>>(); }, 20, 30));
  const auto sms = static_cast<unsigned>(device_facts().sms);
  print_figure(
      "U2", "empty kernel on every SM", "us",
      time_us([&](uint32_t, cudaStream_t stream) { empty_kernel<<<sms, 128, 0, stream>>>(); }, 20,
              30));
}

}  // namespace

int run_kernels(const Args& args) {
  (void)args;
  using attention::gpu::DecodeKernel;
  for (const codecs::Codec& codec : codecs::kCodecs) {
    for (const uint32_t dim : attention::gpu::kKeyDims) {
      for (const uint32_t rows : attention::gpu::kBlockRows) {
        attention::gpu::Residency shape, of_sm_80, of_sm_120;
        const DecodeKernel kernel{codec.id, dim, rows};
        if (attention::gpu::decode_shape(kernel, 9, &shape) &&
            attention::gpu::decode_shape(kernel, 8, &of_sm_80) &&
            attention::gpu::decode_shape(kernel, 12, &of_sm_120)) {
          std::printf("%s %s d%u rows%u threads %u shared %u on sm_80 %u on sm_120 %u\n",
                      rows == attention::gpu::kPrefillRows ? "prefill" : "decode", codec.name, dim,
                      rows, shape.threads, shape.shared_bytes, of_sm_80.shared_bytes,
                      of_sm_120.shared_bytes);
        }
      }
    }
  }
  return 0;
}

int run_caps(const Args& args) {
  print_device();
  print_bandwidths(args);
  print_floors(args);
  return 0;
}

}  // namespace kvm::bench::gpu
