// SPDX-License-Identifier: Apache-2.0
// attention_bench [exact|prefill] [filter] [repeats]: the library-level figures, one line each.
#include <charconv>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

#include "bench/attention/attention_bench.h"

namespace {

void exact(const std::string& filter, int repeats) {
  const kvm::bench::ExactShape shapes[] = {{"gqa_8192", 1, 8192},
                                           {"gqa_65536", 1, 65536},
                                           {"gqa_98304", 1, 98304},
                                           {"gqa_16x4096", 16, 4096},
                                           {"gqa_32x3072", 32, 3072},
                                           {"mha_65536", 1, 65536, 8, 8},
                                           {"mha_98304", 1, 98304, 8, 8},
                                           // DeepSeek's latent form: V2-Lite's heads and V3's.
                                           {"mla_16_65536", 1, 65536, 16, 1, 576, 512},
                                           {"mla_128_65536", 1, 65536, 128, 1, 576, 512},
                                           {"mqa_71_65536", 1, 65536, 71, 1, 64}};
  const uint32_t all = std::max(1u, std::thread::hardware_concurrency());
  for (const auto& shape : shapes) {
    if (shape.name.find(filter) == std::string::npos) {
      continue;
    }
    for (uint32_t threads : {1u, all}) {
      const auto r = kvm::bench::measure_exact(shape, threads, repeats);
      std::printf("exact %-13s threads %u %s %8.3f ms %6.1f GB/s %6.0f GFLOP/s ",
                  shape.name.c_str(), threads, r.isa.c_str(), r.ms, r.gbps, r.gflops);
      std::printf("ceiling %6.1f (%s) fraction %.3f\n", r.ceiling_gbps, r.ceiling_kernel.c_str(),
                  r.fraction);
      std::fflush(stdout);
      if (all == 1) {
        break;
      }
    }
  }
}

void prefill(int repeats) {
  const uint32_t all = std::max(1u, std::thread::hardware_concurrency());
  for (uint32_t n_query : {512u, 2048u}) {
    const auto r = kvm::bench::measure_prefill(n_query, 32768, all, repeats);
    std::printf("prefill %4u threads %u %s %8.1f ms %7.1f GFLOP/s peak %7.1f fraction %.3f\n",
                n_query, r.threads, r.isa.c_str(), r.ms, r.gflops, r.peak_gflops, r.fraction);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "exact";
  const std::string filter = argc > 2 ? argv[2] : "";
  int repeats = 9;
  if (argc > 3) {
    std::from_chars(argv[3], argv[3] + std::strlen(argv[3]), repeats);
  }
  if (what == "prefill") {
    prefill(repeats);
  } else {
    exact(filter, repeats);
  }
  return 0;
}
