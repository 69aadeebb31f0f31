// SPDX-License-Identifier: Apache-2.0
#include "bench/ceiling.h"

#include <immintrin.h>

#include <algorithm>

#include "bench/harness.h"

namespace kvm::bench {

namespace {

std::atomic<uint64_t> g_sink{0};  // keeps the reads from being optimised away

// Streams of one piece are read side by side, `ahead` bytes prefetched (0: the hardware's own).
template <int kStreams>
__attribute__((target("avx512f,avx512dq"))) uint64_t read_avx512(const char* data, uint64_t size,
                                                                 uint64_t ahead) {
  const uint64_t stream = size / kStreams & ~uint64_t{255};
  __m512i sum[4] = {};
  for (uint64_t at = 0; at < stream; at += 256) {
    for (int s = 0; s < kStreams; ++s) {
      const char* line = data + static_cast<uint64_t>(s) * stream + at;
      if (ahead != 0) {
        for (int i = 0; i < 4; ++i) {
          _mm_prefetch(line + ahead + i * 64, _MM_HINT_T0);
        }
      }
      for (int i = 0; i < 4; ++i) {
        sum[i] = _mm512_xor_si512(sum[i], _mm512_loadu_si512(line + i * 64));
      }
    }
  }
  const __m512i all =
      _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3]));
  return static_cast<uint64_t>(_mm512_reduce_add_epi64(all));
}

template <int kStreams>
__attribute__((target("avx2"))) uint64_t read_avx2(const char* data, uint64_t size,
                                                   uint64_t ahead) {
  const uint64_t stream = size / kStreams & ~uint64_t{255};
  __m256i sum[4] = {};
  for (uint64_t at = 0; at < stream; at += 256) {
    for (int s = 0; s < kStreams; ++s) {
      const char* line = data + static_cast<uint64_t>(s) * stream + at;
      if (ahead != 0) {
        for (int i = 0; i < 4; ++i) {
          _mm_prefetch(line + ahead + i * 64, _MM_HINT_T0);
        }
      }
      for (int i = 0; i < 8; ++i) {
        const auto* from = reinterpret_cast<const __m256i*>(line + i * 32);
        sum[i & 3] = _mm256_xor_si256(sum[i & 3], _mm256_loadu_si256(from));
      }
    }
  }
  const __m256i all =
      _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]), _mm256_xor_si256(sum[2], sum[3]));
  alignas(32) uint64_t words[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(words), all);
  return words[0] ^ words[1] ^ words[2] ^ words[3];
}

uint64_t read_piece(int kernel, const char* data, uint64_t size) {
  static const bool has_avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
  switch (kernel) {
    case 0:
      return has_avx512 ? read_avx512<1>(data, size, 0) : read_avx2<1>(data, size, 0);
    case 1:
      return has_avx512 ? read_avx512<1>(data, size, 2048) : read_avx2<1>(data, size, 2048);
    case 2:
      return has_avx512 ? read_avx512<1>(data, size, 8192) : read_avx2<1>(data, size, 8192);
    default:
      return has_avx512 ? read_avx512<2>(data, size, 4096) : read_avx2<2>(data, size, 4096);
  }
}

__attribute__((target("avx512f,avx512bf16"))) float dot_bf16(uint64_t rounds) {
  __m512 sum[16] = {};
  const __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  const __m512bh b = (__m512bh)_mm512_set1_epi32(0x00800080);
  for (uint64_t i = 0; i < rounds; ++i) {
    for (auto& lane : sum) {
      lane = _mm512_dpbf16_ps(lane, a, b);
    }
    // The loop must stay: the values are unknown to the compiler after this.
    asm volatile("" ::: "memory");
  }
  float total = 0;
  for (auto& lane : sum) {
    total += _mm512_reduce_add_ps(lane);
  }
  return total;
}

__attribute__((target("avx2,fma"))) float dot_fma(uint64_t rounds) {
  __m256 sum[12] = {};
  const __m256 a = _mm256_set1_ps(1.0f);
  const __m256 b = _mm256_set1_ps(1e-30f);
  for (uint64_t i = 0; i < rounds; ++i) {
    for (auto& lane : sum) {
      lane = _mm256_fmadd_ps(a, b, lane);
    }
    asm volatile("" ::: "memory");
  }
  float total = 0;
  for (auto& lane : sum) {
    total += lane[0];
  }
  return total;
}

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

ReadCeiling::ReadCeiling(Team& team, const std::vector<engine::MemoryPiece>& pieces)
    : team_(team), shares_(team.size()) {
  for (const auto& piece : pieces) {
    size_bytes_ += piece.size_bytes;
  }
  // Contiguous shares of equal size, as attention cuts a sequence.
  const uint64_t share = size_bytes_ / team.size() + 1;
  uint64_t at = 0;
  for (const auto& piece : pieces) {
    shares_[at / share].push_back(piece);
    at += piece.size_bytes;
  }
}

std::array<double, ReadCeiling::kKernels> ReadCeiling::run_once() {
  std::array<double, kKernels> out{};
  for (int kernel = 0; kernel < kKernels; ++kernel) {
    out[kernel] = team_.run([&](uint32_t thread) {
      uint64_t sum = 0;
      for (const auto& piece : shares_[thread]) {
        sum ^= read_piece(kernel, static_cast<const char*>(piece.data), piece.size_bytes);
      }
      g_sink.fetch_xor(sum, std::memory_order_relaxed);
    });
    seconds_[kernel].push_back(out[kernel]);
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
  static const bool has_bf16 = __builtin_cpu_supports("avx512bf16");
  constexpr uint64_t kRounds = 2'000'000;
  const double seconds = team.run([&](uint32_t) {
    const float total = has_bf16 ? dot_bf16(kRounds) : dot_fma(kRounds);
    g_sink.fetch_xor(static_cast<uint64_t>(total), std::memory_order_relaxed);
  });
  const double per_round = has_bf16 ? 16.0 * 16 * 2 * 2 : 12.0 * 8 * 2;
  return per_round * static_cast<double>(kRounds) * team.size() / seconds;
}

}  // namespace kvm::bench
