// SPDX-License-Identifier: Apache-2.0
#include "bench/ceiling.h"

#include <immintrin.h>  // _mm_pause

#include <algorithm>

#include "bench/attention/peak.h"
#include "bench/harness.h"

namespace kvm::bench {

namespace {

std::atomic<uint64_t> g_sink{0};  // keeps the reads from being optimised away

}  // namespace

Team::Team(uint32_t n_threads) : n_threads_(n_threads) {
  for (uint32_t i = 1; i < n_threads; ++i) {
    threads_.emplace_back([this, i] { serve(i); });
  }
}

Team::~Team() {
  stop_.store(true);
  round_.fetch_add(1);
  round_.notify_all();
  for (auto& thread : threads_) {
    thread.join();
  }
}

void Team::serve(uint32_t thread) {
  uint64_t seen = 0;
  while (true) {
    for (int spin = 0; spin < 20000 && round_.load(std::memory_order_acquire) == seen; ++spin) {
      _mm_pause();
    }
    round_.wait(seen);
    seen = round_.load();
    if (stop_.load()) {
      return;
    }
    (*work_)(thread);
    n_done_.fetch_add(1);
  }
}

double Team::run(const std::function<void(uint32_t)>& work) {
  work_ = &work;
  n_done_.store(0);
  const double begin = now_s();
  round_.fetch_add(1);
  round_.notify_all();
  work(0);
  while (n_done_.load() + 1 < n_threads_) {
    _mm_pause();
  }
  return now_s() - begin;
}

ReadCeiling::ReadCeiling(Team& team, std::vector<engine::MemoryPiece> pieces)
    : team_(team), shares_(team.size()), seconds_(read_kernels().size()) {
  // Rows alone: scales, which lie behind them, are a small part.
  uint64_t largest = 0;
  for (const engine::MemoryPiece& piece : pieces) {
    largest = std::max(largest, piece.size_bytes);
  }
  std::erase_if(pieces, [&](const auto& piece) { return piece.size_bytes < largest / 2; });
  // K and V planes alternate. What is no multiple of 4 KiB (a page that is not full) is left out.
  std::vector<ReadSpan> spans;
  for (size_t i = 0; i + 1 < pieces.size(); i += 2) {
    const uint64_t size = std::min(pieces[i].size_bytes, pieces[i + 1].size_bytes) & ~4095ull;
    if (size != 0) {
      spans.push_back({static_cast<const std::byte*>(pieces[i].data),
                       static_cast<const std::byte*>(pieces[i + 1].data), size});
      size_bytes_ += size * 2;
    }
  }
  // Contiguous shares of equal size, as attention cuts a sequence.
  const uint64_t share = size_bytes_ / team.size() + 1;
  uint64_t at = 0;
  for (const auto& span : spans) {
    shares_[at / share].push_back(span);
    at += span.bytes * 2;
  }
}

std::vector<double> ReadCeiling::run_once() {
  std::vector<double> out;
  for (size_t kernel = 0; kernel < read_kernels().size(); ++kernel) {
    out.push_back(team_.run([&](uint32_t thread) {
      g_sink.fetch_xor(read_kernels()[kernel].read(shares_[thread]), std::memory_order_relaxed);
    }));
    seconds_[kernel].push_back(out.back());
  }
  return out;
}

double ReadCeiling::bytes_per_s() const {
  double best = 0;
  for (const auto& seconds : seconds_) {
    best = std::max(best, static_cast<double>(size_bytes_) / median(seconds));
  }
  return best;
}

double peak_flops(Team& team) {
  constexpr uint64_t kRounds = 2'000'000;
  std::atomic<double> flops{0};
  const double seconds = team.run([&](uint32_t thread) {
    const double done = run_multiply_adds(kRounds);
    if (thread == 0) {
      flops.store(done);
    }
  });
  return flops.load() * team.size() / seconds;
}

}  // namespace kvm::bench
