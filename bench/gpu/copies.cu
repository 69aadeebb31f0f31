// SPDX-License-Identifier: Apache-2.0
// Copies between host and device by size of the pieces, alone and while the device reads (U5).
#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "bench/gpu/device.h"
#include "bench/gpu/workload.h"

namespace kvm::bench::gpu {
namespace {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string pieces_of(size_t size) {
  return size >= 1 << 20 ? std::to_string(size >> 20) + " MiB"
                         : std::to_string(size >> 10) + " KiB";
}

// Calls that copy many pieces at once came with CUDA 12.8.
constexpr bool kHasBatches = CUDART_VERSION >= 12080;

cudaError_t copy_batch(std::vector<void*>& to, std::vector<const void*>& from,
                       std::vector<size_t>& sizes, cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
#if CUDART_VERSION < 13000
  size_t failed = 0;
  return cudaMemcpyBatchAsync(to.data(), const_cast<void**>(from.data()), sizes.data(), to.size(),
                              &attributes, &first, 1, &failed, stream);
#else
  return cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), to.size(), &attributes, &first,
                              1, stream);
#endif
#else
  return cudaErrorNotSupported;
#endif
}

// Seconds of copying `total` bytes in pieces of `size`, as one call each, or as one batch.
double copy_seconds(uint8_t* device, uint8_t* host, size_t total, size_t size, bool to_device,
                    bool batch, cudaStream_t stream) {
  const size_t n = total / size;
  std::vector<void*> to(n);
  std::vector<const void*> from(n);
  std::vector<size_t> sizes(n, size);
  for (size_t i = 0; i < n; ++i) {
    // Far apart from each other on the device, as pages are.
    uint8_t* on_device = device + i * 7919 % n * size;
    uint8_t* on_host = host + i * size;
    to[i] = to_device ? on_device : on_host;
    from[i] = to_device ? on_host : on_device;
  }
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  const double begin = seconds_now();
  if (batch) {
    check(copy_batch(to, from, sizes, stream), "cudaMemcpyBatchAsync");
  } else {
    for (size_t i = 0; i < n; ++i) {
      check(cudaMemcpyAsync(to[i], from[i], size,
                            to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, stream),
            "cudaMemcpyAsync");
    }
  }
  check(cudaStreamSynchronize(stream), "copies");
  return seconds_now() - begin;
}

}  // namespace

int run_copies(const Args& args) {
  check(attention::gpu::attend_init(), "attend_init");
  const size_t total = args.quick ? 64 << 20 : 256 << 20;
  const DeviceBuffer device(total);
  void* host = nullptr;
  check(cudaMallocHost(&host, total), "cudaMallocHost");
  const Stream stream;
  const auto best_gbs = [&](size_t size, bool to_device, bool batch) {
    std::vector<double> gbs;
    for (int i = 0; i < (args.quick ? 3 : 7); ++i) {
      gbs.push_back(static_cast<double>(total) / 1e9 /
                    copy_seconds(device.data(), static_cast<uint8_t*>(host), total, size, to_device,
                                 batch, stream.get()));
    }
    return median(std::move(gbs));
  };
  for (const bool to_device : {true, false}) {
    const std::string direction = to_device ? "host to device" : "device to host";
    for (const bool batch : {false, true}) {
      if (batch && !kHasBatches) {
        print_fact("U5", direction + ", batch", "left out: compiled with a CUDA older than 12.8");
        continue;
      }
      for (const size_t size : {size_t{4} << 10, size_t{16} << 10, size_t{32} << 10,
                                size_t{64} << 10, size_t{256} << 10, size_t{2} << 20, total}) {
        print_figure("U5", direction + " " + pieces_of(size) + (batch ? ", batch" : ""), "GB/s",
                     best_gbs(size, to_device, batch));
      }
    }
  }

  // Attention while copies run.
  const DeviceBuffer memory(std::min<size_t>(size_t{3} << 30, device_facts().free_bytes / 2));
  fill_random(memory.data(), memory.size(), nullptr);
  WorkloadSpec spec;
  spec.lengths = {131072};
  const Workload workload(spec, memory);
  const double alone = workload.measure_us(args, 200);
  check(cudaDeviceSynchronize(), "synchronize");
  for (int i = 0; i < 60; ++i) {
    check(cudaMemcpyAsync(device.data(), host, total, cudaMemcpyHostToDevice, stream.get()),
          "cudaMemcpyAsync");
  }
  const double beside = time_us([&](uint32_t i, cudaStream_t s) { workload.launch(i, s); }, 20, 10);
  const bool copied = cudaStreamQuery(stream.get()) == cudaSuccess;
  stream.wait();
  print_figure(
      "U5",
      "decode, copies at full rate beside it" + std::string(copied ? " (which ended early)" : ""),
      "times the time alone", beside / alone);
  cudaFreeHost(host);
  return 0;
}

}  // namespace kvm::bench::gpu
