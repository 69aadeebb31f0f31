// SPDX-License-Identifier: Apache-2.0
// Work shared out over threads where it is not timed.
#ifndef KVM_BENCH_APPROX_PARALLEL_H_
#define KVM_BENCH_APPROX_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace kvm::bench {

// Calls work(i) for every i below n, on `threads` threads in no order, and waits for all.
template <typename Work>
void parallel_for(uint32_t threads, size_t n, const Work& work) {
  std::atomic<size_t> next{0};
  const auto serve = [&] {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) {
      work(i);
    }
  };
  std::vector<std::thread> helpers;
  for (size_t t = 1; t < std::min<size_t>(threads, n); ++t) {
    helpers.emplace_back(serve);
  }
  serve();
  for (auto& helper : helpers) {
    helper.join();
  }
}

}  // namespace kvm::bench

#endif  // KVM_BENCH_APPROX_PARALLEL_H_
