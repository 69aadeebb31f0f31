// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>
#include <memory>
#include <random>

#include "attention/attention.h"
#include "base/dtype.h"
#include "bench/attention/attention_bench.h"
#include "bench/attention/peak.h"
#include "bench/attention/workers.h"

namespace kvm::bench {
namespace {

using attention::Plan;
using attention::Problem;

constexpr uint32_t kKvHeads = 8;
constexpr uint32_t kGroup = 4;
constexpr uint32_t kDim = 128;

class PrefillBench {
 public:
  PrefillBench(uint32_t n_query, uint32_t tokens, uint32_t threads)
      : n_query_(n_query), tokens_(tokens), threads_(threads), workers_(threads) {
    const uint32_t n_pages = (tokens + kPageTokens - 1) / kPageTokens;
    const size_t plane = size_t{kKvHeads} * kPageTokens * kDim * 2;
    pool_ = std::make_unique<HugeBuffer>(n_pages * plane * 2);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    auto* values = reinterpret_cast<uint16_t*>(pool_->data());
    std::vector<uint16_t> sample(65536);
    for (uint16_t& x : sample)
      x = f32_to_bf16(normal(random));
    for (size_t i = 0; i < n_pages * plane; ++i)
      values[i] = sample[(i * 40503u >> 4) % 65536];
    runs_.resize(n_pages);
    for (uint32_t i = 0; i < n_pages; ++i) {
      runs_[i].k.rows = pool_->data() + i * plane * 2;
      runs_[i].v.rows = pool_->data() + i * plane * 2 + plane;
      runs_[i].position = i * kPageTokens;
      runs_[i].n_tokens = kPageTokens;
    }
    q_.resize(size_t{n_query} * kKvHeads * kGroup * kDim);
    for (uint16_t& x : q_)
      x = f32_to_bf16(normal(random));
    o_.resize(q_.size());
    lse_.resize(q_.size() / kDim);
    for (uint32_t h = 0; h < kKvHeads; ++h)
      problems_.push_back(problem(h));
    plan_ = attention::make_plan(problems_[0]);
    row_step_ = plan_.rows / std::max(1u, plan_.rows / 1024);
    prepared_ = std::make_unique<HugeBuffer>(plan_.prepared_bytes * kKvHeads);
    scratch_ = std::make_unique<HugeBuffer>(plan_.scratch_bytes * threads);
    state_bytes_ = attention::state_bytes(problems_[0], row_step_) * plan_.n_chunks;
    states_ = std::make_unique<HugeBuffer>(state_bytes_ * threads);
  }

  double flops() const {
    const double pairs =
        static_cast<double>(n_query_) * (static_cast<double>(tokens_) - (n_query_ - 1) * 0.5);
    return pairs * kKvHeads * kGroup * 4 * kDim;
  }

  double attention_seconds() {
    std::atomic<uint32_t> next{0};
    const uint32_t parts = plan_.rows / row_step_;
    const double start = now_s();
    workers_.run([&](uint32_t) {
      for (uint32_t h; (h = next.fetch_add(1, std::memory_order_relaxed)) < kKvHeads;) {
        attention::prepare_queries(problems_[h], plan_, prepared(h));
      }
    });
    next.store(0, std::memory_order_relaxed);
    workers_.run([&](uint32_t worker) {
      std::byte* scratch = scratch_->data() + worker * plan_.scratch_bytes;
      std::byte* states = states_->data() + worker * state_bytes_;
      for (uint32_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < parts * kKvHeads;) {
        const Problem& p = problems_[i / parts];
        const attention::RowRange rows{i % parts * row_step_, row_step_};
        attention::eval_chunks(p, plan_, prepared(i / parts), rows, plan_.first_chunk,
                               plan_.n_chunks, scratch, states);
        attention::merge_chunks(p, plan_, rows, states);
      }
    });
    return now_s() - start;
  }

  // Flops per second of the table's fastest multiply-add on all threads.
  double peak() {
    constexpr uint64_t kRounds = 2'000'000;
    const double start = now_s();
    double flops = 0;
    workers_.run([&](uint32_t worker) {
      const double done = run_multiply_adds(kRounds);
      if (worker == 0)
        flops = done;
    });
    return flops * threads_ / (now_s() - start);
  }

 private:
  std::byte* prepared(uint32_t head) const {
    return prepared_->data() + head * plan_.prepared_bytes;
  }

  Problem problem(uint32_t head) {
    Problem p;
    const size_t at = size_t{head} * kGroup * kDim;
    p.q = q_.data() + at;
    p.q_stride_query = uint64_t{kKvHeads} * kGroup * kDim;
    p.q_stride_head = kDim;
    p.n_query = n_query_;
    p.group = kGroup;
    p.dim_k = p.dim_v = kDim;
    p.scale = 1.0f / std::sqrt(static_cast<float>(kDim));
    p.visible.query_position = tokens_ - n_query_;
    p.runs = runs_;
    p.head = head;
    p.o = o_.data() + at;
    p.dtype_o = Dtype::kBf16;
    p.o_stride_query = p.q_stride_query;
    p.o_stride_head = kDim;
    p.lse = lse_.data() + head * kGroup;
    p.lse_stride_query = kKvHeads * kGroup;
    p.lse_stride_head = 1;
    return p;
  }

  uint32_t n_query_;
  uint32_t tokens_;
  uint32_t threads_;
  uint32_t row_step_ = 0;
  Workers workers_;
  std::unique_ptr<HugeBuffer> pool_, prepared_, scratch_, states_;
  size_t state_bytes_ = 0;
  std::vector<KvRun> runs_;
  std::vector<uint16_t> q_, o_;
  std::vector<float> lse_;
  std::vector<Problem> problems_;
  Plan plan_;
};

}  // namespace

PrefillResult measure_prefill(uint32_t n_query, uint32_t tokens, uint32_t threads, int repeats) {
  PrefillBench bench(n_query, tokens, threads);
  std::vector<double> seconds;
  std::vector<double> peaks;
  bench.attention_seconds();
  for (int r = 0; r < repeats; ++r) {
    peaks.push_back(attention::active_table().has_bf16_dot ? bench.peak() : 0.0);
    seconds.push_back(bench.attention_seconds());
  }
  PrefillResult result;
  result.isa = attention::active_table().name;
  result.threads = threads;
  result.ms = median(seconds) * 1e3;
  result.gflops = bench.flops() / median(seconds) * 1e-9;
  result.peak_gflops = median(peaks) * 1e-9;
  result.fraction = result.peak_gflops > 0 ? result.gflops / result.peak_gflops : 0.0;
  return result;
}

}  // namespace kvm::bench
