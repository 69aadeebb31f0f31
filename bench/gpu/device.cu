// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/device.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

namespace kvm::bench::gpu {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s: %s (%s)\n", what, cudaGetErrorString(error), cudaGetErrorName(error));
    std::exit(2);
  }
}

bool have_device() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    // The driver has to be of the runtime's major version at least: the first thing to look at.
    int driver = 0, runtime = 0;
    (void)cudaDriverGetVersion(&driver);
    (void)cudaRuntimeGetVersion(&runtime);
    if (driver == 0) {
      std::fputs("no CUDA device: no NVIDIA driver (libcuda.so.1) was found\n", stderr);
      return false;
    }
    std::fprintf(stderr, "no CUDA device: %s (CUDA of the driver %d, of this program %d)\n",
                 error == cudaSuccess ? "none is there" : cudaGetErrorString(error), driver,
                 runtime);
    return false;
  }
  return true;
}

DeviceBuffer::DeviceBuffer(size_t size_bytes) : size_(size_bytes) {
  if (size_bytes != 0) {
    void* data = nullptr;
    check(cudaMalloc(&data, size_bytes), "cudaMalloc");
    data_ = static_cast<uint8_t*>(data);
  }
}
DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}
DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) {
    cudaFree(data_);
  }
}

Stream::Stream() {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
}
Stream::~Stream() { cudaStreamDestroy(stream_); }
void Stream::wait() const { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

double time_us(const std::function<void(uint32_t, cudaStream_t)>& work, uint32_t calls,
               uint32_t repeats) {
  const Stream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "begin capture");
  for (uint32_t i = 0; i < calls; ++i) {
    work(i, stream.get());
  }
  check(cudaStreamEndCapture(stream.get(), &graph), "end capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  for (int i = 0; i < 3; ++i) {
    check(cudaGraphLaunch(executable, stream.get()), "cudaGraphLaunch");
  }
  std::vector<double> times;
  for (uint32_t i = 0; i < repeats; ++i) {
    check(cudaEventRecord(begin, stream.get()), "cudaEventRecord");
    check(cudaGraphLaunch(executable, stream.get()), "cudaGraphLaunch");
    check(cudaEventRecord(end, stream.get()), "cudaEventRecord");
    check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    times.push_back(1000.0 * ms / calls);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  return median(std::move(times));
}

Effort effort_for(double us, const Args& args) {
  const double budget_us = args.quick ? 5e4 : 2.5e5;
  const double calls = std::clamp(budget_us / 40 / us, 1.0, 20.0);
  const double repeats = std::clamp(budget_us / (calls * us), 5.0, 30.0);
  return {static_cast<uint32_t>(calls), static_cast<uint32_t>(repeats)};
}

namespace {

__global__ void fill_kernel(uint32_t* data, size_t words, uint32_t mask) {
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += stride) {
    uint64_t x = i * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    // Random signs and mantissas; exponents of 1/4 to 1.
    const uint32_t low = 0x3e80u + static_cast<uint32_t>(x & 0xffu);
    const uint32_t high = 0x3e80u + static_cast<uint32_t>((x >> 8) & 0xffu);
    const uint32_t signs = static_cast<uint32_t>(x >> 32) & 0x80008000u;
    data[i] = ((low | high << 16) | signs) & mask;
  }
}

template <int kUnroll>
__global__ void read_kernel(const uint4* data, size_t vectors, uint32_t* out) {
  const size_t stride = size_t{gridDim.x} * blockDim.x * kUnroll;
  uint32_t sum = 0;
  for (size_t i = size_t{blockIdx.x} * blockDim.x * kUnroll + threadIdx.x; i < vectors;
       i += stride) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const size_t at = i + size_t{blockDim.x} * u;
      v[u] = at < vectors ? __ldcs(data + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
  }
  if (sum == 0x12345678u) {  // never, but the compiler does not know
    *out = sum;
  }
}

}  // namespace

void fill_random(void* data, size_t size_bytes, cudaStream_t stream) {
  fill_kernel<<<2048, 256, 0, stream>>>(static_cast<uint32_t*>(data), size_bytes / 4, ~0u);
  check(cudaGetLastError(), "fill");
}

void fill_random_bytes(void* data, size_t size_bytes, cudaStream_t stream) {
  fill_kernel<<<2048, 256, 0, stream>>>(static_cast<uint32_t*>(data), size_bytes / 4, 0x7fbf7fbfu);
  check(cudaGetLastError(), "fill");
}

double read_ceiling(const uint8_t* data, size_t span_bytes, size_t size_bytes, const Args& args) {
  const DeviceFacts facts = device_facts();
  const DeviceBuffer out(4);
  const size_t n_places = std::max<size_t>(1, span_bytes / size_bytes);
  double best = 0;
  const Effort effort = effort_for(static_cast<double>(size_bytes) / 4e6 + 4, args);
  for (const int blocks_per_sm : {1, 2, 4, 8}) {
    for (const bool wide : {false, true}) {
      const int threads = wide ? 1024 : 512;
      if (blocks_per_sm * threads > 2048) {
        continue;
      }
      const double us = time_us(
          [&](uint32_t i, cudaStream_t stream) {
            const auto* at = reinterpret_cast<const uint4*>(data + i % n_places * size_bytes);
            const auto blocks = static_cast<unsigned>(facts.sms * blocks_per_sm);
            read_kernel<8><<<blocks, threads, 0, stream>>>(at, size_bytes / 16,
                                                           reinterpret_cast<uint32_t*>(out.data()));
          },
          effort.calls, effort.repeats);
      best = std::max(best, static_cast<double>(size_bytes) / us / 1e3);
    }
  }
  return best;
}

DeviceFacts device_facts() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  size_t free_bytes = 0, total = 0;
  check(cudaMemGetInfo(&free_bytes, &total), "cudaMemGetInfo");
  return {properties.multiProcessorCount, free_bytes, static_cast<size_t>(properties.l2CacheSize),
          properties.major, properties.minor};
}

}  // namespace kvm::bench::gpu
