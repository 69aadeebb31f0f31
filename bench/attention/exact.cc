// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>

#include "attention/attention.h"
#include "base/dtype.h"
#include "bench/attention/attention_bench.h"
#include "bench/attention/read_kernels.h"
#include "bench/attention/workers.h"

namespace kvm::bench {
namespace {

using attention::Plan;
using attention::Problem;

// A stretch of chunks of one problem.
struct Task {
  uint32_t problem;
  uint64_t chunk;
  uint32_t n;
};

class ExactBench {
 public:
  ExactBench(const ExactShape& shape, uint32_t threads) : shape_(shape), workers_(threads) {
    fill_pool();
    build_problems();
    build_tasks(threads);
  }

  uint64_t bytes() const {
    return uint64_t{shape_.n_sequences} * shape_.tokens * shape_.kv_heads * row_bytes();
  }
  double flops() const {
    return 2.0 * shape_.n_sequences * shape_.tokens * shape_.q_heads * (shape_.dim + dim_v());
  }

  double attention_seconds() {
    for (auto& left : left_) {
      left.store(problem_tasks_, std::memory_order_relaxed);
    }
    next_.store(0, std::memory_order_relaxed);
    const double start = now_s();
    workers_.run([this](uint32_t worker) { work(worker); });
    return now_s() - start;
  }

  double read_seconds(const ReadKernel& kernel) {
    next_.store(0, std::memory_order_relaxed);
    const double start = now_s();
    workers_.run([this, &kernel](uint32_t) {
      for (uint32_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_.size();) {
        sink_.fetch_xor(kernel.read(reads_[i]), std::memory_order_relaxed);
      }
    });
    return now_s() - start;
  }

 private:
  uint32_t dim_v() const { return shape_.v_in_k != 0 ? shape_.v_in_k : shape_.dim; }
  // K and V of a token of a head.
  size_t row_bytes() const { return size_t{shape_.dim} * (shape_.v_in_k != 0 ? 2 : 4); }

  void fill_pool() {
    const uint32_t pages_each = (shape_.tokens + kPageTokens - 1) / kPageTokens;
    const size_t n_pages = size_t{pages_each} * shape_.n_sequences;
    const size_t plane = size_t{shape_.kv_heads} * kPageTokens * shape_.dim * 2;
    const size_t page_bytes = size_t{shape_.kv_heads} * kPageTokens * row_bytes();
    pool_ = std::make_unique<HugeBuffer>(n_pages * page_bytes);
    std::mt19937 random(1);
    std::vector<uint32_t> slots(n_pages);
    std::iota(slots.begin(), slots.end(), 0u);
    std::shuffle(slots.begin(), slots.end(), random);
    // Values in [-2, 2) from cheap random bits: the speed does not depend on them.
    auto* values = reinterpret_cast<uint16_t*>(pool_->data());
    uint32_t state = 1;
    for (size_t i = 0; i < n_pages * page_bytes / 2; ++i) {
      state = state * 1664525u + 1013904223u;
      values[i] = static_cast<uint16_t>((state >> 16 & 0x807fu) | 0x3f00u | (state >> 9 & 0x80u));
    }
    runs_.resize(n_pages);
    for (size_t i = 0; i < n_pages; ++i) {
      const size_t position = i % pages_each * kPageTokens;
      const std::byte* page = pool_->data() + slots[i] * page_bytes;
      runs_[i].k.rows = page;
      runs_[i].v.rows = shape_.v_in_k != 0 ? page : page + plane;
      runs_[i].position = position;
      runs_[i].n_tokens =
          static_cast<uint16_t>(std::min<size_t>(kPageTokens, shape_.tokens - position));
    }
    q_.resize(size_t{shape_.n_sequences} * shape_.q_heads * shape_.dim);
    for (uint16_t& x : q_) {
      x = f32_to_bf16(std::uniform_real_distribution<float>(-1.0f, 1.0f)(random));
    }
    o_.resize(size_t{shape_.n_sequences} * shape_.q_heads * dim_v());
    lse_.resize(size_t{shape_.n_sequences} * shape_.q_heads);
  }

  void build_problems() {
    const size_t pages_each = runs_.size() / shape_.n_sequences;
    const uint32_t group = shape_.q_heads / shape_.kv_heads;
    size_t prepared = 0;
    size_t states = 0;
    for (uint32_t s = 0; s < shape_.n_sequences; ++s) {
      for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
        Problem p;
        const size_t row = size_t{s} * shape_.q_heads + h * group;
        p.q = q_.data() + row * shape_.dim;
        p.q_stride_head = shape_.dim;
        p.n_query = 1;
        p.group = group;
        p.dim_k = shape_.dim;
        p.dim_v = dim_v();
        p.v_in_k = shape_.v_in_k != 0;
        p.scale = 1.0f / std::sqrt(static_cast<float>(shape_.dim));
        p.visible.query_position = shape_.tokens - 1;
        p.runs = {runs_.data() + s * pages_each, pages_each};
        p.head = h;
        p.o = o_.data() + row * dim_v();
        p.dtype_o = Dtype::kF32;
        p.o_stride_head = dim_v();
        p.lse = lse_.data() + row;
        p.lse_stride_head = 1;
        problems_.push_back(p);
        plans_.push_back(attention::make_plan(p));
        prepared_at_.push_back(prepared);
        states_at_.push_back(states);
        prepared += plans_.back().prepared_bytes;
        states += plans_.back().n_chunks * attention::state_bytes(p, plans_.back().rows);
      }
    }
    prepared_ = std::make_unique<HugeBuffer>(prepared);
    states_ = std::make_unique<HugeBuffer>(states);
    scratch_bytes_ = plans_[0].scratch_bytes;
  }

  // Tasks small enough that threads finish together, large enough that cold starts do not count.
  void build_tasks(uint32_t threads) {
    const uint32_t n_chunks = plans_[0].n_chunks;
    const uint64_t total = uint64_t{n_chunks} * problems_.size();
    const uint64_t wanted = std::max<uint64_t>(1, total / (threads * 24));
    const uint32_t n = static_cast<uint32_t>(std::min<uint64_t>({wanted, 16, n_chunks}));
    for (uint32_t p = 0; p < problems_.size(); ++p) {
      for (uint32_t c = 0; c < n_chunks; c += n) {
        tasks_.push_back({p, c, std::min(n, n_chunks - c)});
      }
    }
    problem_tasks_ = static_cast<uint32_t>(tasks_.size() / problems_.size());
    left_ = std::vector<std::atomic<uint32_t>>(problems_.size());
    scratch_ = std::make_unique<HugeBuffer>(scratch_bytes_ * threads);
    const size_t head_bytes = size_t{kPageTokens} * shape_.dim * 2;
    for (const Task& t : tasks_) {
      std::vector<ReadSpan> spans;
      const Problem& p = problems_[t.problem];
      const uint64_t first = t.chunk * plans_[0].chunk_tokens / kPageTokens;
      const uint64_t end = (t.chunk + t.n) * plans_[0].chunk_tokens / kPageTokens;
      for (uint64_t i = first; i < std::min<uint64_t>(end, p.runs.size()); ++i) {
        const auto at = [&](const KvPlane& plane) {
          return static_cast<const std::byte*>(plane.rows) + p.head * head_bytes;
        };
        if (shape_.v_in_k != 0) {  // one plane, in two streams
          const std::byte* rows = at(p.runs[i].k);
          spans.push_back({rows, rows + head_bytes / 2, head_bytes / 2});
        } else {
          spans.push_back({at(p.runs[i].k), at(p.runs[i].v), head_bytes});
        }
      }
      reads_.push_back(std::move(spans));
    }
  }

  void work(uint32_t worker) {
    std::byte* scratch = scratch_->data() + worker * scratch_bytes_;
    for (uint32_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_.size();) {
      const Task& t = tasks_[i];
      const Problem& p = problems_[t.problem];
      const Plan& plan = plans_[t.problem];
      std::byte* states = states_->data() + states_at_[t.problem];
      // Each task prepares its own copy: a few kilobytes, and no dependency between tasks.
      std::byte* prepared = prepared_->data() + prepared_at_[t.problem];
      if (t.chunk == 0) {
        attention::prepare_queries(p, plan, prepared);
      }
      const size_t stride = attention::state_bytes(p, plan.rows);
      attention::eval_chunks(p, plan, prepared, {0, plan.rows}, t.chunk, t.n, scratch,
                             states + t.chunk * stride);
      // SYNC: acq_rel makes the states of all tasks of the problem visible to the last one.
      if (left_[t.problem].fetch_sub(1, std::memory_order_acq_rel) == 1) {
        attention::merge_chunks(p, plan, {0, plan.rows}, states);
      }
    }
  }

  ExactShape shape_;
  Workers workers_;
  std::unique_ptr<HugeBuffer> pool_, prepared_, states_, scratch_;
  std::vector<KvRun> runs_;
  std::vector<uint16_t> q_;
  std::vector<float> o_, lse_;
  std::vector<Problem> problems_;
  std::vector<Plan> plans_;
  std::vector<size_t> prepared_at_, states_at_;
  size_t scratch_bytes_ = 0;
  std::vector<Task> tasks_;
  std::vector<std::vector<ReadSpan>> reads_;
  uint32_t problem_tasks_ = 0;
  std::vector<std::atomic<uint32_t>> left_;
  std::atomic<uint32_t> next_{0};
  std::atomic<uint64_t> sink_{0};
};

}  // namespace

ExactResult measure_exact(const ExactShape& shape, uint32_t threads, int repeats) {
  ExactBench bench(shape, threads);
  const auto kernels = read_kernels();
  bench.attention_seconds();
  std::vector<double> attention;
  std::vector<std::vector<double>> reads(kernels.size());
  for (int r = 0; r < repeats; ++r) {
    attention.push_back(bench.attention_seconds());
    for (size_t k = 0; k < kernels.size(); ++k) {
      reads[k].push_back(bench.read_seconds(kernels[k]));
      // Once more between the read kernels: whatever the machine does, both sides see it.
      if (k == kernels.size() / 2) {
        attention.push_back(bench.attention_seconds());
      }
    }
  }
  size_t best = 0;
  for (size_t k = 1; k < kernels.size(); ++k) {
    best = median(reads[k]) < median(reads[best]) ? k : best;
  }
  const double seconds = median(attention);
  ExactResult result;
  result.isa = attention::active_table().name;
  result.threads = threads;
  result.ms = seconds * 1e3;
  result.gbps = static_cast<double>(bench.bytes()) / seconds * 1e-9;
  result.gflops = bench.flops() / seconds * 1e-9;
  result.ceiling_gbps = static_cast<double>(bench.bytes()) / median(reads[best]) * 1e-9;
  result.fraction = result.gbps / result.ceiling_gbps;
  result.ceiling_kernel = kernels[best].name;
  return result;
}

}  // namespace kvm::bench
