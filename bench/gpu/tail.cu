// SPDX-License-Identifier: Apache-2.0
// The tail of a launch (U11, ADR 0038): how far behind the mean its last block ends, and what it
// gains that blocks take the last pieces by a counter.
#include <cuda_runtime.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "attention/cuda/shapes.h"
#include "bench/gpu/device.h"
#include "bench/gpu/workload.h"
#include "codecs/codec.h"

namespace kvm::bench::gpu {
namespace {

using attention::gpu::DecodeParams;
using attention::gpu::Element;
using attention::gpu::kTailLoadTokens;
using attention::gpu::kTailPart;

// When a block began and ended, in nanoseconds of the device's clock, and where it ran.
struct Life {
  uint64_t begin_ns, end_ns;
  uint32_t sm;
};

// The decode kernel that is shipped for these rows.
using Shape = attention::gpu::ShapeOf<Element::kBf16, 128, 1>::Type;

// It, with a note of each block's life: the product's kernels take none. For sm_90 only, as the
// sweep.
__global__ void __launch_bounds__(Shape::kThreads)
    life_kernel(const __grid_constant__ DecodeParams params, Life* lives) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  uint64_t begin_ns = 0, end_ns = 0;
  uint32_t sm = 0;
  if (threadIdx.x == 0) {
    asm volatile("mov.u64 %0, %%globaltimer;\n" : "=l"(begin_ns));
    lives[blockIdx.x].begin_ns = begin_ns;
  }
  attention::gpu::decode_thread<Shape>(params);
  if (threadIdx.x == 0) {
    asm volatile("mov.u64 %0, %%globaltimer;\n" : "=l"(end_ns));
    asm volatile("mov.u32 %0, %%smid;\n" : "=r"(sm));
    lives[blockIdx.x].end_ns = end_ns;
    lives[blockIdx.x].sm = sm;
  }
#else
  (void)params;
  (void)lives;
#endif
}

// How far the last block ends behind the mean, as a part of the launch; the same of SMs, whose
// blocks' ends are averaged over all launches: what a plan that knows the SMs could even out.
void print_spread(const WorkloadSpec& spec, const Workload& workload, const std::string& plan) {
  constexpr uint32_t kLaunches = 25, kWarm = 5;
  const uint32_t n = workload.current_plan().n_blocks;
  const DeviceBuffer buffer(n * sizeof(Life));
  std::vector<Life> lives(n);
  std::vector<double> spreads, sum_of_sm, n_of_sm;
  const Stream stream;
  for (uint32_t i = 0; i < kWarm + kLaunches; ++i) {
    life_kernel<<<n, Shape::kThreads, Shape::kSharedBytes, stream.get()>>>(
        workload.decode_params(i), reinterpret_cast<Life*>(buffer.data()));
    check(cudaGetLastError(), "life kernel");
    stream.wait();
    check(cudaMemcpy(lives.data(), buffer.data(), n * sizeof(Life), cudaMemcpyDeviceToHost),
          "cudaMemcpy to the host");
    if (i < kWarm) {
      continue;
    }
    uint64_t first = UINT64_MAX, last = 0;
    for (const Life& life : lives) {
      first = std::min(first, life.begin_ns);
      last = std::max(last, life.end_ns);
    }
    const auto lasts = static_cast<double>(last - first);
    double mean = 0;
    for (const Life& life : lives) {
      const double end = static_cast<double>(life.end_ns - first) / lasts;
      mean += end / n;
      const size_t n_sms = std::max<size_t>(n_of_sm.size(), life.sm + 1);
      sum_of_sm.resize(n_sms);
      n_of_sm.resize(n_sms);
      sum_of_sm[life.sm] += end;
      n_of_sm[life.sm] += 1;
    }
    spreads.push_back(1 - mean);
  }
  double latest = 0, mean = 0, n_sms = 0;
  for (size_t sm = 0; sm < n_of_sm.size(); ++sm) {
    if (n_of_sm[sm] != 0) {
      latest = std::max(latest, sum_of_sm[sm] / n_of_sm[sm]);
      mean += sum_of_sm[sm] / n_of_sm[sm];
      n_sms += 1;
    }
  }
  print_figure("U11", spec.name() + ", " + plan, "last end behind the mean, part of the launch",
               median(spreads));
  print_figure("U11", spec.name() + ", " + plan, "the same of SMs over all launches",
               latest - mean / n_sms);
}

std::string name_of(uint32_t tail_part) {
  return tail_part == 0 ? "no tail" : "a tail of 1/" + std::to_string(tail_part);
}

// Times of plans with and without a tail, in turns. A launch that is long enough to have one must
// not be slower for it.
void compare(const WorkloadSpec& spec, Workload* workload, const std::vector<uint32_t>& parts,
             const Args& args) {
  const uint32_t blocks = workload->resident_blocks(), n_rounds = args.quick ? 3 : 5;
  const double expected_us = static_cast<double>(spec.kv_bytes()) / 3.5e6 + 8;
  const Effort effort = effort_for(expected_us, args);
  std::vector<std::vector<double>> us(parts.size());
  for (uint32_t round = 0; round < n_rounds; ++round) {
    for (size_t i = 0; i < parts.size(); ++i) {
      workload->plan(blocks, parts[i], 0);
      us[i].push_back(
          time_us([&](uint32_t call, cudaStream_t stream) { workload->launch(call, stream); },
                  effort.calls, std::max(3u, effort.repeats / n_rounds)));
    }
  }
  const double without = median(us[0]);
  const uint64_t tokens =
      spec.kv_bytes() / (spec.n_planes() * codecs::codec_of(spec.codec).token_bytes(spec.dim));
  for (size_t i = 0; i < parts.size(); ++i) {
    print_figure("U11", spec.name() + ", " + name_of(parts[i]), "us", median(us[i]));
    if (parts[i] == kTailPart && tokens >= uint64_t{kTailLoadTokens} * blocks) {
      print_bar({"tail against none", spec.name(), "ratio of times", median(us[i]) / without, 1,
                 1.005, false});
    }
  }
}

}  // namespace

void run_tails(const Args& args, const DeviceBuffer& memory) {
  const bool has_lives = device_facts().major == 9;
  if (has_lives) {
    check(cudaFuncSetAttribute(life_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(Shape::kSharedBytes)),
          "shared memory of the life kernel");
  } else {
    print_fact("U11", "lives of blocks", "left out: the device is not of compute capability 9.0");
  }
  struct Size {
    uint32_t length, batch;
  };
  // From 0.5 to 17 GB: on an H200 blocks have 4, 18, 32 and 127 thousand tokens each.
  for (const Size of : {Size{131072, 1}, Size{65536, 9}, Size{131072, 8}, Size{131072, 32}}) {
    WorkloadSpec spec;
    spec.lengths.assign(of.batch, of.length);
    // Whole pages: a little more than the tokens.
    if (spec.kv_bytes() / 100 * 101 > memory.size()) {
      continue;
    }
    Workload workload(spec, memory);
    const bool all = of.batch == 8 && !args.quick;
    compare(spec, &workload,
            all ? std::vector<uint32_t>{0, 32, kTailPart, 8} : std::vector<uint32_t>{0, kTailPart},
            args);
    for (const uint32_t part : {0u, kTailPart}) {
      if (has_lives) {
        workload.plan(workload.resident_blocks(), part, 0);
        print_spread(spec, workload, name_of(part));
      }
    }
  }
}

}  // namespace kvm::bench::gpu
