// SPDX-License-Identifier: Apache-2.0
// Device memory, streams and times for kvm_gpu_check. A CUDA error ends the program with a line on
// stderr and status 2: there is nothing to go on with.
#ifndef KVM_BENCH_GPU_DEVICE_H_
#define KVM_BENCH_GPU_DEVICE_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <span>

#include "bench/gpu/args.h"

namespace kvm::bench::gpu {

void check(cudaError_t error, const char* what);

// Says whether there is a device; where there is none, why, on stderr.
bool have_device();

class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t size_bytes = 0);
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer();
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Its contents are there for every stream: a copy from memory that is not page-locked may return
// before its last bytes have arrived, and only the default stream waits for them.
template <class T>
DeviceBuffer upload(std::span<const T> values) {
  DeviceBuffer buffer(values.size_bytes());
  check(cudaMemcpy(buffer.data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice),
        "cudaMemcpy to the device");
  check(cudaStreamSynchronize(nullptr), "cudaMemcpy to the device");
  return buffer;
}

class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  void wait() const;

 private:
  cudaStream_t stream_ = nullptr;
};

// Microseconds of one call of work(i, stream), i counting calls: the median over `repeats` of a
// graph that holds `calls` of them, so that launching costs what it costs in an engine's graph.
double time_us(const std::function<void(uint32_t, cudaStream_t)>& work, uint32_t calls,
               uint32_t repeats);

// How many calls and repeats take about a quarter of a second, for calls that take about `us`.
struct Effort {
  uint32_t calls;
  uint32_t repeats;
};
Effort effort_for(double us, const Args& args);

// bf16 values in [-1, 1), a function of their place: random data, for zeros are faster.
void fill_random(void* data, size_t size_bytes, cudaStream_t stream);
// For pages of rows of bytes: every byte is a number in int8 and in e4m3, and every pair of them a
// positive one in bf16, so that planes of scales need no care.
void fill_random_bytes(void* data, size_t size_bytes, cudaStream_t stream);

// GB/s of reading `size_bytes` at `data` by the best of some plain kernels: the ceiling for
// whatever reads that much in one launch. `data` has `span_bytes`, over which calls move along so
// that none finds its bytes in the L2.
double read_ceiling(const uint8_t* data, size_t span_bytes, size_t size_bytes, const Args& args);

struct DeviceFacts {
  int sms = 0;
  size_t free_bytes = 0;
  size_t l2_bytes = 0;
  int major = 0, minor = 0;
};
DeviceFacts device_facts();

// The sub-commands. Each returns the exit status.
int run_caps(const Args& args);
int run_verify(const Args& args);
int run_bench(const Args& args);
int run_sweep(const Args& args);
int run_copies(const Args& args);
int run_gather(const Args& args);
int run_rows(const Args& args);
int run_ipc(const Args& args);
int run_engine(const Args& args);
int run_server(const Args& args);
int run_child(const Args& args);
// Part of run_bench: tails of launches. memory: bf16 numbers.
void run_tails(const Args& args, const DeviceBuffer& memory);
int run_kernels(const Args& args);

}  // namespace kvm::bench::gpu

#endif  // KVM_BENCH_GPU_DEVICE_H_
