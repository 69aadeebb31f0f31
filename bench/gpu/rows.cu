// SPDX-License-Identifier: Apache-2.0
// What lies between a device and host memory (U10, docs/adr/0037 and 0039): rows of pages read back
// into page-locked memory, directly and through slots, beside a copy of as much, and states merged
// of which one lies there.
#include <string>
#include <vector>

#include "attention/cuda/launch.h"
#include "bench/gpu/device.h"
#include "bench/gpu/workload.h"
#include "codecs/codec.h"

namespace kvm::bench::gpu {
namespace {

using attention::gpu::ReadParams;
using attention::gpu::RowTensor;
using attention::gpu::StatesParams;

constexpr uint32_t kTokens = 8192, kHeads = 8, kDim = 128;
constexpr uint32_t kQueryHeads = 32, kSequences = 64;
constexpr uint32_t kBlocksPerSm = 16;  // as kvm_cuda_read and kvm_cuda_merge have them

// Page-locked memory of the host, which kernels reach at the same address.
class LockedBuffer {
 public:
  explicit LockedBuffer(size_t size_bytes) {
    check(cudaHostAlloc(&data_, size_bytes, cudaHostAllocPortable), "cudaHostAlloc");
    fill_random(data_, size_bytes, nullptr);
    check(cudaDeviceSynchronize(), "fill");
  }
  ~LockedBuffer() { cudaFreeHost(data_); }
  LockedBuffer(const LockedBuffer&) = delete;
  LockedBuffer& operator=(const LockedBuffer&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

RowTensor packed(void* data, Dtype dtype, uint32_t n_heads, uint32_t dim) {
  return {data, int64_t{n_heads} * dim, dim, dtype, dim};
}

// Of rows that a workload has in its pages; where they go to and how many the caller says.
ReadParams read_params(const Workload& workload) {
  const attention::gpu::DecodeParams& from = workload.decode_params(0);
  ReadParams params;
  params.pool = from.pool;
  params.page_table = from.page_table;
  params.n_classes = 1;
  params.dim = kDim;
  return params;
}

void read(CodecId codec, const ReadParams& params, cudaStream_t stream) {
  const uint32_t most = kBlocksPerSm * static_cast<uint32_t>(device_facts().sms);
  check(launch_read(codec, params, params.n_tokens < most ? params.n_tokens : most, stream),
        "read");
}

void measure_reads(CodecId codec, const LockedBuffer& k, const LockedBuffer& v,
                   const DeviceBuffer& memory, const Args& args) {
  WorkloadSpec spec;
  spec.codec = codec;
  spec.lengths = {kTokens};
  const Workload workload(spec, memory);
  ReadParams params = read_params(workload);
  params.k = packed(k.data(), Dtype::kBf16, kHeads, kDim);
  params.v = packed(v.data(), Dtype::kBf16, kHeads, kDim);
  for (const uint32_t n_tokens : {1u, 64u, 1024u, kTokens}) {
    params.n_tokens = n_tokens;
    const double us = time_us([&](uint32_t, cudaStream_t stream) { read(codec, params, stream); },
                              4, args.quick ? 3 : 9);
    const std::string name = std::to_string(n_tokens) + " tokens of " +
                             codecs::codec_of(codec).name + " into page-locked memory, ";
    print_figure("U10", name + "time", "us", us);
    print_figure("U10", name + "rate", "GB/s", 4.0 * n_tokens * kHeads * kDim / us / 1e3);
  }
}

// The device's half of kvm_cuda_store (docs/adr/0039): pieces are read into slots on the device,
// and copied from there.
void measure_store(const LockedBuffer& host, const DeviceBuffer& memory, const Args& args) {
  constexpr uint32_t kPiece = 2048;
  constexpr size_t kPlane = size_t{kPiece} * kHeads * kDim * 2;
  WorkloadSpec spec;
  spec.lengths = {kTokens};
  const Workload workload(spec, memory);
  const DeviceBuffer slots(kTokens / kPiece * 2 * kPlane);
  ReadParams params = read_params(workload);
  params.n_tokens = kPiece;
  const double us = time_us(
      [&](uint32_t, cudaStream_t stream) {
        for (uint32_t piece = 0; piece < kTokens / kPiece; ++piece) {
          uint8_t* const slot = slots.data() + piece * 2 * kPlane;
          params.first = piece * kPiece;
          params.k = packed(slot, Dtype::kBf16, kHeads, kDim);
          params.v = packed(slot + kPlane, Dtype::kBf16, kHeads, kDim);
          read(CodecId::kBf16, params, stream);
          check(cudaMemcpyAsync(host.data(), slot, 2 * kPlane, cudaMemcpyDeviceToHost, stream),
                "cudaMemcpyAsync");
        }
      },
      4, args.quick ? 3 : 9);
  print_figure("U10", "rows of bf16 through slots of 8 MiB to the host, rate", "GB/s",
               4.0 * kTokens * kHeads * kDim / us / 1e3);
}

// Two states of a batch's rows, the second one at `other`.
double merge_us(const DeviceBuffer& device, void* other, Dtype dtype, const Args& args) {
  const size_t o_bytes = size_t{kSequences} * kQueryHeads * kDim * 4;
  const size_t lse_bytes = size_t{kSequences} * kQueryHeads * 4;
  StatesParams params;
  params.n_states = 2;
  params.n_rows = kSequences;
  params.n_heads = kQueryHeads;
  params.dim = kDim;
  params.o[0] = packed(device.data(), Dtype::kF32, kQueryHeads, kDim);
  params.lse[0] = packed(device.data() + o_bytes, Dtype::kF32, kQueryHeads, 1);
  params.o[1] = packed(other, dtype, kQueryHeads, kDim);
  params.lse[1] = packed(static_cast<uint8_t*>(other) + o_bytes, Dtype::kF32, kQueryHeads, 1);
  params.out_o = packed(device.data() + o_bytes + lse_bytes, Dtype::kBf16, kQueryHeads, kDim);
  return time_us(
      [&](uint32_t, cudaStream_t stream) {
        check(launch_merge_states(params, kSequences * kQueryHeads / attention::gpu::kStatesWarps,
                                  stream),
              "merge_states");
      },
      20, args.quick ? 3 : 15);
}

}  // namespace

int run_rows(const Args& args) {
  check(attention::gpu::attend_init(), "attend_init");
  const size_t size = size_t{kTokens} * kHeads * kDim * 2;
  const DeviceBuffer memory(size_t{256} << 20);
  fill_random_bytes(memory.data(), memory.size(), nullptr);
  check(cudaDeviceSynchronize(), "fill");
  const LockedBuffer k(size), v(size);
  const double us = time_us(
      [&](uint32_t, cudaStream_t stream) {
        check(cudaMemcpyAsync(k.data(), memory.data(), size, cudaMemcpyDeviceToHost, stream),
              "cudaMemcpyAsync");
      },
      4, args.quick ? 3 : 9);
  print_figure("U10", "link: one copy of " + std::to_string(size >> 20) + " MiB to the host",
               "GB/s", static_cast<double>(size) / us / 1e3);
  for (const CodecId codec : {CodecId::kBf16, CodecId::kI8, CodecId::kF8}) {
    measure_reads(codec, k, v, memory, args);
  }

  measure_store(k, memory, args);

  const DeviceBuffer here(size_t{8} << 20), there(size_t{8} << 20);
  fill_random(here.data(), here.size(), nullptr);
  fill_random(there.data(), there.size(), nullptr);
  check(cudaDeviceSynchronize(), "fill");
  const std::string name =
      "merge of two states of " + std::to_string(kSequences * kQueryHeads) + " rows and heads, ";
  print_figure("U10", name + "both on the device", "us",
               merge_us(here, there.data(), Dtype::kF32, args));
  print_figure("U10", name + "one in host memory, fp32", "us",
               merge_us(here, k.data(), Dtype::kF32, args));
  print_figure("U10", name + "one in host memory, bf16", "us",
               merge_us(here, k.data(), Dtype::kBf16, args));
  return 0;
}

}  // namespace kvm::bench::gpu
