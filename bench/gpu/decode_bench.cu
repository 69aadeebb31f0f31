// SPDX-License-Identifier: Apache-2.0
// Decode and prefill attention against their bars (U3). Ceilings are those of plain kernels,
// measured in the same run: one that reads the same bytes, one that multiplies matrices out of
// registers.
#include <algorithm>
#include <string>
#include <vector>

#include "attention/cuda/primitives.h"
#include "bench/gpu/device.h"
#include "bench/gpu/workload.h"
#include "codecs/codec.h"

namespace kvm::bench::gpu {
namespace {

constexpr uint32_t kRounds = 4096, kSums = 8;

// Multiplies what no memory is read for: kSums products that do not wait for each other, kRounds
// times.
__global__ void __launch_bounds__(128) product_kernel(float* out) {
  using namespace attention::gpu;
  float sums[kSums][4] = {};
  const uint32_t a[4] = {thread_id(), lane_id(), 0x3f803f80u, 0x3f003f00u};
#pragma unroll 1
  for (uint32_t round = 0; round < kRounds; ++round) {
#pragma unroll
    for (float(&sum)[4] : sums) {
      mma_16x8x16<Element::kBf16>(sum, a, round, 0x3f803f80u);
    }
  }
  float all = 0;
#pragma unroll
  for (const float(&sum)[4] : sums) {
    all += sum[0] + sum[1] + sum[2] + sum[3];
  }
  if (all == 0.12345f) {
    *out = all;
  }
}

// TFLOP/s of mma.sync, with as many warps as the prefill kernel has on an SM.
double product_ceiling(const Args& args) {
  const DeviceBuffer out(4);
  const auto blocks = static_cast<unsigned>(2 * device_facts().sms);
  const double flops = 4096.0 * kSums * kRounds * 4 * blocks;
  const Effort effort = effort_for(flops / 4e8, args);
  const double us = time_us(
      [&](uint32_t, cudaStream_t stream) {
        product_kernel<<<blocks, 128, 0, stream>>>(reinterpret_cast<float*>(out.data()));
      },
      effort.calls, effort.repeats);
  return flops / us / 1e6;
}

class Bench {
 public:
  explicit Bench(const Args& args)
      : args_(args),
        memory_(std::min<size_t>(args.max_bytes, device_facts().free_bytes / 16 * 15)) {
    fill_random(memory_.data(), memory_.size(), nullptr);
    check(cudaDeviceSynchronize(), "fill");
    const size_t size = std::min<size_t>(size_t{2} << 30, memory_.size() / 2);
    ceiling_ = read_ceiling(memory_.data(), std::min<size_t>(memory_.size(), size * 4), size, args);
    print_figure("U1", "read ceiling of this run", "GB/s", ceiling_);
  }

  bool fits(const WorkloadSpec& spec) const {
    // Whole pages: a little more than the tokens.
    return spec.kv_bytes() / 100 * 101 * std::max(1u, spec.layers_per_page) + (64 << 20) <
           memory_.size();
  }

  // Prints the time of one workload and the bars that hold for its size.
  double decode(const WorkloadSpec& spec, double share_limit = 0) {
    const double bytes = static_cast<double>(spec.kv_bytes());
    const double least_us = bytes / ceiling_ / 1e3;
    const Workload workload(spec, memory_);
    const double us = workload.measure_us(args_, least_us + 8);
    print_figure("decode", spec.name(), "us", us);
    // Narrow rows have as many numbers to compute with in half of the bytes, or a quarter.
    const uint32_t bits = codecs::codec_of(spec.codec).bits();
    const double narrow_share = bits == 4 ? 0.50 : 0.70;
    const bool is_narrow = bits < 16;
    if (bytes >= 16e6 && !spec.is_latent()) {
      print_bar({"time", spec.name(), "us", us, least_us,
                 8 + least_us / (is_narrow ? narrow_share : 0.85), false});
    }
    const double limit = share_limit != 0               ? share_limit
                         : is_narrow && bytes >= 256e6  ? narrow_share
                         : spec.is_latent()             ? 0
                         : !is_narrow && bytes >= 512e6 ? 0.85
                         : !is_narrow && bytes >= 256e6 ? 0.80
                                                        : 0;
    if (limit != 0) {
      print_bar({"share of read ceiling", spec.name(), "fraction", least_us / us, 1, limit, true});
    }
    return us;
  }

  void shapes() {
    for (const uint32_t n : {16384u, 32768u, 65536u, 131072u}) {
      for (const uint32_t batch : {1u, 2u, 4u, 8u, 16u, 32u, 64u}) {
        for (const uint32_t group : {1u, 4u, 8u}) {
          WorkloadSpec spec;
          spec.lengths.assign(batch, n);
          spec.group = group;
          const bool sample = batch == 1 || batch == 8;
          if (fits(spec) && (sample || !args_.quick)) {
            decode(spec);
          }
        }
      }
    }
    for (const CodecId codec : {CodecId::kBf16, CodecId::kF16}) {
      for (const uint32_t dim : attention::gpu::kHeadDims) {
        for (const uint32_t group : {2u, 16u}) {
          WorkloadSpec spec;
          spec.lengths.assign(8, 32768);
          spec.dim = dim;
          spec.group = group;
          spec.codec = codec;
          if (fits(spec)) {
            decode(spec);
          }
        }
      }
    }
  }

  void pages() {
    for (const uint32_t batch : {1u, 8u}) {
      WorkloadSpec spec;
      spec.lengths.assign(batch, 65536);
      spec.group = 4;
      spec.page_tokens = 65536;
      spec.ordered = true;
      const double contiguous = decode(spec);
      spec.ordered = false;
      for (const uint32_t page : {64u, 16u, 1u}) {
        spec.page_tokens = page;
        const double us = decode(spec);
        const double limit = page == 1 ? 1.15 : 1.05;
        print_bar({"pages against contiguous", spec.name(), "ratio of times", us / contiguous, 1,
                   limit, false});
      }
      // A layer's parts lie 8 MiB apart.
      spec.page_tokens = 64;
      spec.layers_per_page = 32;
      if (fits(spec)) {
        print_bar({"pages against contiguous", spec.name(), "ratio of times",
                   decode(spec) / contiguous, 1, 1.05, false});
      }
    }
  }

  void skewed() {
    WorkloadSpec spec;
    spec.lengths.assign(64, 2048);
    spec.lengths[0] = 131072;
    decode(spec, 0.78);
  }

  void rows() {
    WorkloadSpec spec;
    spec.lengths.assign(4, 32768);
    spec.group = 4;
    const double one = decode(spec);
    const auto against_one = [&] {
      const double us = decode(spec);
      print_bar(
          {"32 rows against one token", spec.name(), "ratio of times", us / one, 1, 1.10, false});
    };
    spec.n_query = 4;
    decode(spec);
    spec.n_query = 8;
    against_one();
    spec.tree = true;
    against_one();
    spec.tree = false;
    spec.n_query = 1;
    spec.softcap = 30.0f;
    decode(spec);
  }

  void tails() { run_tails(args_, memory_); }

  // Latent rows, shared by the q heads of a rank of 8, 4, 2 and 1, and with a draft. There is no
  // bar yet: docs/gpu.md has what is modelled.
  void latent() {
    for (const uint32_t q_heads : {16u, 32u, 64u, 128u}) {
      for (const uint32_t n_query : {1u, 2u}) {
        WorkloadSpec spec;
        spec.dim = attention::gpu::kMlaDim;
        spec.q_heads = spec.group = q_heads;
        spec.n_query = n_query;
        spec.lengths.assign(32, 16384);
        if (fits(spec) && (n_query == 1 || !args_.quick)) {
          decode(spec);
        }
      }
    }
  }

  // Narrow rows. Afterwards the memory holds bytes.
  void narrow() {
    fill_random_bytes(memory_.data(), memory_.size(), nullptr);
    for (const CodecId codec : {CodecId::kI8, CodecId::kF8, codecs::kI4}) {
      WorkloadSpec spec;
      spec.codec = codec;
      for (const uint32_t batch : {1u, 2u, 8u}) {
        for (const uint32_t group : {1u, 4u, 8u}) {
          spec.lengths.assign(batch, 131072);
          spec.group = group;
          if (fits(spec) && (group == 4 || !args_.quick)) {
            decode(spec);
          }
        }
      }
      spec.lengths.assign(8, 65536);
      for (const uint32_t dim : {64u, 256u}) {
        spec.dim = dim;
        if (fits(spec)) {
          decode(spec);
        }
      }
      spec.dim = 128;
      spec.group = 4;
      for (const uint32_t n_query : {4u, 8u}) {
        spec.n_query = n_query;
        decode(spec);
      }
    }
  }

  // Prompts, suffixes behind a prefix, few rows behind a long context. Of narrow rows the memory
  // holds bytes.
  void prefills(CodecId codec) {
    struct Suffix {
      uint32_t n_query, length, batch;
    };
    const bool scaled = codecs::codec_of(codec).is_scaled();
    const double ceiling = product_ceiling(args_);
    print_figure("U1", "products of mma.sync", "TFLOP/s", ceiling);
    for (const uint32_t dim : attention::gpu::kHeadDims) {
      if (!attention::gpu::is_prefill_on_devices(codec, dim)) {
        continue;
      }
      for (const Suffix of :
           {Suffix{8192, 8192, 1}, Suffix{8192, 131072, 1}, Suffix{2048, 16384, 4},
            Suffix{128, 131072, 1}, Suffix{128, 4096, 16}}) {
        WorkloadSpec spec;
        spec.codec = codec;
        spec.dim = dim;
        spec.prefill = true;
        spec.n_query = of.n_query;
        spec.lengths.assign(of.batch, of.length);
        if (!fits(spec) || (args_.quick && (dim != 128 || of.n_query == 2048))) {
          continue;
        }
        const double least_us = spec.flops() / ceiling / 1e6;
        const Workload workload(spec, memory_);
        const double us = workload.measure_us(args_, least_us * 2 + 8);
        print_figure("prefill", spec.name(), "us", us);
        if (spec.flops() >= 1e11) {
          print_bar({"share of products", spec.name(), "fraction", least_us / us, 1,
                     scaled ? 0.35 : 0.50, true});
        }
      }
    }
  }

  // Takes the time of what is there without keys: one tile, and the merge of what a split leaves
  // (U2).
  void floors() {
    WorkloadSpec spec;
    spec.lengths = {16};
    print_figure("U2", "decode of one tile", "us", Workload(spec, memory_).measure_us(args_, 5));
    spec.lengths = {131072};
    const Workload split(spec, memory_);
    print_figure(
        "U2", "merge of " + std::to_string(split.current_plan().n_slots) + " states", "us",
        time_us([&](uint32_t, cudaStream_t stream) { split.launch_merge(stream); }, 20, 30));
  }

 private:
  const Args& args_;
  DeviceBuffer memory_;
  double ceiling_ = 0;
};

}  // namespace

int run_bench(const Args& args) {
  check(attention::gpu::attend_init(), "attend_init");
  Bench bench(args);
  const int missed = bars_missed();
  bench.floors();
  bench.pages();
  bench.skewed();
  bench.rows();
  bench.shapes();
  bench.tails();
  bench.latent();
  bench.prefills(CodecId::kBf16);
  bench.narrow();
  bench.prefills(CodecId::kI8);
  bench.prefills(CodecId::kF8);
  bench.prefills(codecs::kI4);
  return bars_missed() == missed ? 0 : 1;
}

}  // namespace kvm::bench::gpu
