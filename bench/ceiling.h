// SPDX-License-Identifier: Apache-2.0
// Ceilings: how fast this machine can read given memory, copy it, and multiply bf16 pairs, with a
// given number of threads. Each judges the runs that it is interleaved with.
//
// Threads: one caller at a time; the pool's own threads do the work together with the caller.
#ifndef KVM_BENCH_CEILING_H_
#define KVM_BENCH_CEILING_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "bench/attention/read_kernels.h"
#include "engine/engine.h"

namespace kvm::bench {

// Runs a function on n threads at once; thread 0 is the caller.
class Team {
 public:
  explicit Team(uint32_t n_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  uint32_t size() const { return n_threads_; }
  // Returns the seconds from the start to the end of the slowest.
  double run(const std::function<void(uint32_t thread)>& work);

 private:
  void serve(uint32_t thread);

  uint32_t n_threads_;
  const std::function<void(uint32_t)>* work_ = nullptr;
  std::atomic<uint64_t> round_{0};
  std::atomic<uint32_t> n_done_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

// The read ceiling over given pieces. The kernels differ in prefetching and in the number of
// streams; which is best depends on the machine, so all run and the best median counts.
class ReadCeiling {
 public:
  ReadCeiling(Team& team, std::vector<engine::MemoryPiece> pieces);
  // Runs every kernel once over all pieces; returns the seconds of each.
  std::vector<double> run_once();
  uint64_t size_bytes() const { return size_bytes_; }
  // The best kernel's median so far, in bytes per second.
  double bytes_per_s() const;

 private:
  Team& team_;
  std::vector<std::vector<ReadSpan>> shares_;  // per thread
  uint64_t size_bytes_ = 0;
  std::vector<std::vector<double>> seconds_;  // per kernel
};

// One run of a register-only multiply-add loop on all threads, in floating-point operations per
// second: vdpbf16ps where the CPU has it, else fp32 multiply-adds.
double peak_flops(Team& team);

}  // namespace kvm::bench

#endif  // KVM_BENCH_CEILING_H_
