// SPDX-License-Identifier: Apache-2.0
#include "engine/attend/calibration.h"

#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "attention/attention.h"
#include "attention/sampled/approx.h"
#include "base/assert.h"
#include "base/clock.h"
#include "base/dtype.h"
#include "base/splitmix.h"
#include "hash_index/sketch/sketch.h"

namespace kvm::engine {
namespace {

using attention::ApproxInput;
using attention::Problem;

constexpr uint32_t kDim = 128;
constexpr uint32_t kGroup = 4;
constexpr uint64_t kRowBytes = uint64_t{2} * kDim * sizeof(uint16_t);
constexpr uint64_t kInt8RowBytes = uint64_t{2} * kDim;
constexpr uint64_t kPageBytes = kPageTokens * kRowBytes;
// Caches must not hold it: of all threads together, of one at least, and of one at most.
constexpr uint64_t kTotalBytes = uint64_t{48} << 20;
constexpr uint64_t kLeastBytes = uint64_t{8} << 20;
constexpr uint64_t kMostBytes = uint64_t{24} << 20;
// More threads than this read no faster, as a rule.
constexpr uint32_t kMostThreads = 32;
// Repeated, for the kernels do not care.
constexpr size_t kPatternKeys = 2048;
constexpr int kRepeats = 8;
constexpr int kLeastRepeats = 3;
constexpr int kPasses = 2;
constexpr uint32_t kSliceTokens = 2048;
constexpr uint64_t kFewRows = 48;  // budgets of a row
constexpr uint64_t kManyRows = 768;
constexpr uint64_t kUnindexed = 128;
// A part that takes longer, because of what happens around, is not repeated.
constexpr uint64_t kMostNs = 15'000'000;

struct Free {
  void operator()(void* data) const { std::free(data); }
};
using Memory = std::unique_ptr<std::byte, Free>;

Memory allocate(size_t size_bytes) {
  constexpr size_t kAlign = 2 << 20;
  const size_t rounded = (size_bytes + kAlign - 1) / kAlign * kAlign;
  Memory memory(static_cast<std::byte*>(std::aligned_alloc(kAlign, rounded)));
  if (memory != nullptr) {
    ::madvise(memory.get(), rounded, MADV_HUGEPAGE);
  }
  return memory;
}

// About normal, mean 0, variance 1: the sum of four bytes.
float noise(uint64_t* state) {
  *state += kSplitMixStep;
  const uint64_t x = splitmix64(*state);
  const auto sum =
      static_cast<float>((x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24 & 255));
  return (sum - 510.0f) / 148.0f;
}

// Timings are what one thread has found; all 0: the machine refused memory.
struct Timings {
  double bf16 = 0;  // of a key
  double int8 = 0;
  // These are of a sample: with a small and a large budget, and the small one over half of the
  // keys.
  double few = 0;
  double many = 0;
  double half = 0;
  uint64_t n_few = 0;  // keys read
  uint64_t n_many = 0;
  uint64_t n_keys = 0;  // scanned; n_half in the last
  uint64_t n_half = 0;

  bool is_complete() const { return bf16 > 0 && int8 > 0 && few > 0 && many > 0 && half > 0; }
};

// A Bench is what one thread measures with. build() returns false where the machine refused memory.
class Bench {
 public:
  explicit Bench(uint64_t size_bytes) : n_pages_(size_bytes / kPageBytes) {}

  bool build();
  Timings measure();

 private:
  void fill();
  bool encode();
  // Nanoseconds of the fastest of some runs.
  template <typename Run>
  static double fastest(Run run);
  // Returns the time of a key; 0: the machine refused memory.
  double exact_ns(const std::vector<KvRun>& runs);
  // Returns the time of all; *n_read: keys.
  double sampled_ns(uint64_t n_blocks, uint64_t budget, uint64_t* n_read);

  uint64_t n_pages_;
  Memory pages_;
  Memory blocks_;
  std::vector<uint16_t> scales_;
  std::vector<float> q_;
  std::vector<float> o_;
  std::vector<KvRun> runs_;
  std::vector<KvRun> int8_runs_;
  hash_index::FramePtr frame_;
  Problem problem_;
  Memory prepared_, scratch_, states_;
  size_t prepared_bytes_ = 0, scratch_bytes_ = 0, states_bytes_ = 0;
};

double lower_quartile(std::vector<double>* values) {
  const auto at = values->begin() + static_cast<ptrdiff_t>(values->size() / 4);
  std::nth_element(values->begin(), at, values->end());
  return values->empty() ? 0 : *at;
}

bool reserve(Memory* memory, size_t* have_bytes, size_t size_bytes) {
  if (size_bytes > *have_bytes) {
    *memory = allocate(size_bytes);
    *have_bytes = *memory == nullptr ? 0 : size_bytes;
  }
  return *memory != nullptr;
}

bool Bench::build() {
  pages_ = allocate(n_pages_ * kPageBytes);
  if (pages_ == nullptr) {
    return false;
  }
  fill();
  scales_.assign(kPageTokens, f32_to_bf16(0.01f));
  for (uint64_t i = 0; i < n_pages_; ++i) {
    KvRun run;
    run.k.rows = pages_.get() + i * kPageBytes;
    run.v.rows = pages_.get() + i * kPageBytes + kPageBytes / 2;
    run.position = i * kPageTokens;
    run.n_tokens = kPageTokens;
    runs_.push_back(run);
  }
  // The same bytes as twice as many rows of int8.
  for (uint64_t i = 0; i < 2 * n_pages_; ++i) {
    KvRun run;
    run.k = {pages_.get() + i * kPageTokens * kInt8RowBytes, scales_.data(), CodecId::kI8};
    run.v = run.k;
    run.v.rows = pages_.get() + i * kPageTokens * kInt8RowBytes + kPageTokens * kDim;
    run.position = i * kPageTokens;
    run.n_tokens = kPageTokens;
    int8_runs_.push_back(run);
  }
  uint64_t state = 1;
  q_.resize(kGroup * kDim);
  std::generate(q_.begin(), q_.end(), [&] { return 1.5f * noise(&state); });
  o_.resize(kGroup * kDim);
  problem_.q = q_.data();
  problem_.dtype_q = Dtype::kF32;
  problem_.q_stride_query = kGroup * kDim;
  problem_.q_stride_head = kDim;
  problem_.n_query = 1;
  problem_.group = kGroup;
  problem_.dim_k = problem_.dim_v = kDim;
  problem_.scale = 0.088f;
  problem_.visible.causal = false;
  problem_.o = o_.data();
  problem_.o_stride_query = kGroup * kDim;
  problem_.o_stride_head = kDim;
  return encode();
}

void Bench::fill() {
  uint64_t state = 7;
  const uint64_t n = std::min<uint64_t>(n_pages_, kPatternKeys / kPageTokens);
  auto* rows = reinterpret_cast<uint16_t*>(pages_.get());
  std::generate(rows, rows + n * kPageBytes / sizeof(uint16_t),
                [&] { return f32_to_bf16(noise(&state)); });
  for (uint64_t i = n; i < n_pages_; ++i) {
    std::memcpy(pages_.get() + i * kPageBytes, pages_.get() + i % n * kPageBytes, kPageBytes);
  }
}

bool Bench::encode() {
  const hash_index::SketchKind kind = hash_index::SketchKind::kLead8Bits1;
  const size_t block_bytes = hash_index::block_bytes(kind, kDim);
  blocks_ = allocate(n_pages_ * block_bytes);
  if (blocks_ == nullptr) {
    return false;
  }
  const uint64_t n = std::min<uint64_t>(n_pages_, kPatternKeys / kPageTokens);
  hash_index::FrameInput input;
  input.runs = KvRuns(runs_).first(n);
  input.dim_k = kDim;
  frame_ = hash_index::make_frame(input, &kind);
  for (uint64_t i = 0; i < n_pages_; ++i) {
    std::byte* block = blocks_.get() + i * block_bytes;
    if (i < n) {
      hash_index::encode_block(*frame_, runs_[i], 0, kDim, block);
    } else {
      std::memcpy(block, blocks_.get() + i % n * block_bytes, block_bytes);
    }
  }
  return true;
}

template <typename Run>
double Bench::fastest(Run run) {
  uint64_t least = UINT64_MAX;
  const uint64_t begin_ns = now_ns();
  for (int i = 0; i < kLeastRepeats || (i < kRepeats && now_ns() - begin_ns < kMostNs); ++i) {
    const uint64_t start_ns = now_ns();
    run();
    least = std::min(least, now_ns() - start_ns);
  }
  return static_cast<double>(least);
}

// It times slices of some 50 us each: who is put aside for a while loses some of them, not the
// measure.
double Bench::exact_ns(const std::vector<KvRun>& runs) {
  problem_.runs = runs;
  const attention::Plan plan = attention::make_plan(problem_);
  const size_t state_bytes = attention::state_bytes(problem_, kGroup);
  if (!reserve(&prepared_, &prepared_bytes_, plan.prepared_bytes) ||
      !reserve(&scratch_, &scratch_bytes_, plan.scratch_bytes) ||
      !reserve(&states_, &states_bytes_, plan.n_chunks * state_bytes)) {
    return 0;
  }
  const uint32_t slice = std::max(1u, kSliceTokens / plan.chunk_tokens);
  attention::prepare_queries(problem_, plan, prepared_.get());
  std::vector<double> rates;
  const uint64_t begin_ns = now_ns();
  for (int i = 0; i < kPasses && now_ns() - begin_ns < kMostNs; ++i) {
    for (uint32_t c = 0; c + slice <= plan.n_chunks; c += slice) {
      const uint64_t start_ns = now_ns();
      attention::eval_chunks(problem_, plan, prepared_.get(), {0, kGroup}, plan.first_chunk + c,
                             slice, scratch_.get(), states_.get() + c * state_bytes);
      rates.push_back(static_cast<double>(now_ns() - start_ns) / (slice * plan.chunk_tokens));
    }
  }
  return lower_quartile(&rates);
}

double Bench::sampled_ns(uint64_t n_blocks, uint64_t budget, uint64_t* n_read) {
  KVM_ASSERT(n_blocks + kUnindexed / kPageTokens <= runs_.size());
  problem_.runs = KvRuns(runs_).first(n_blocks + kUnindexed / kPageTokens);
  const attention::SketchedRun sketched{.position = 0,
                                        .n_blocks = static_cast<uint32_t>(n_blocks),
                                        .frame = frame_.get(),
                                        .blocks = blocks_.get()};
  ApproxInput input;
  input.problem = &problem_;
  input.index.sketches = {&sketched, 1};
  input.params.budget = budget;
  const attention::ApproxPlan plan = attention::plan_approx(input);
  if (plan.exact || !reserve(&prepared_, &prepared_bytes_, plan.prepared_bytes) ||
      !reserve(&scratch_, &scratch_bytes_, plan.scratch_bytes) ||
      !reserve(&states_, &states_bytes_, plan.n_shards * plan.state_bytes)) {
    return 0;
  }
  attention::ApproxReport report{};
  const double ns = fastest([&] {
    (void)attention::plan_approx(input);
    attention::prepare_approx(input, plan, prepared_.get(), scratch_.get());
    for (uint32_t i = 0; i < plan.n_shards; ++i) {
      attention::eval_shard(input, plan, prepared_.get(), i, scratch_.get(),
                            states_.get() + i * plan.state_bytes);
    }
    // With a budget it is answered.
    (void)attention::finish_approx(input, plan, prepared_.get(), scratch_.get(), states_.get(),
                                   &report);
  });
  *n_read = report.keys_read;
  return ns;
}

Timings Bench::measure() {
  Timings t;
  t.bf16 = exact_ns(runs_);
  t.int8 = exact_ns(int8_runs_);
  const uint64_t n_blocks = n_pages_ - kUnindexed / kPageTokens;
  uint64_t n_read = 0;
  t.few = sampled_ns(n_blocks, kFewRows, &t.n_few);
  t.many = sampled_ns(n_blocks, kManyRows, &t.n_many);
  t.half = sampled_ns(n_blocks / 2, kFewRows, &n_read);
  t.n_keys = n_blocks * kPageTokens;
  t.n_half = n_blocks / 2 * kPageTokens;
  return t;
}

// All threads begin to measure together.
Timings measure_one(uint64_t size_bytes, std::barrier<>* together) {
  Bench bench(size_bytes);
  bool is_built = false;
  try {
    is_built = bench.build();
  } catch (const std::bad_alloc&) {
  }
  together->arrive_and_wait();
  return is_built ? bench.measure() : Timings();
}

// Threads that read take turns, so their rates are averaged. Of samples the fastest counts: what
// happens around only ever makes them longer.
CostModel combine(const std::vector<Timings>& all) {
  const CostModel usual;
  CostModel model;
  Timings best = all[0];
  double bf16 = 0, int8 = 0;
  for (const Timings& t : all) {
    if (!t.is_complete()) {
      return usual;
    }
    bf16 += t.bf16;
    int8 += t.int8;
    best.few = std::min(best.few, t.few);
    best.many = std::min(best.many, t.many);
    best.half = std::min(best.half, t.half);
  }
  model.exact_bf16 = bf16 / static_cast<double>(all.size());
  model.exact_int8 = int8 / static_cast<double>(all.size());
  // Whatever disturbed the clock, rates stay of their kind: no row is read for less than in order.
  const auto n_gathered = static_cast<double>(std::max(best.n_many, best.n_few + 1) - best.n_few);
  model.gather = std::clamp((best.many - best.few) / n_gathered, model.exact_bf16,
                            10 * std::max(model.exact_bf16, usual.exact_bf16));
  const auto n_scanned = static_cast<double>(best.n_keys - best.n_half);
  model.scan = std::clamp((best.few - best.half) / n_scanned, 0.3 * usual.scan, model.exact_bf16);
  model.start = std::clamp(best.few - model.scan * static_cast<double>(best.n_keys) -
                               model.gather * static_cast<double>(best.n_few),
                           0.1 * usual.start, 10 * usual.start);
  return model;
}

}  // namespace

CostModel measure_costs(uint32_t n_threads) {
  const uint32_t n = std::clamp(n_threads, 1u, kMostThreads);
  const uint64_t size_bytes = std::clamp(kTotalBytes / n, kLeastBytes, kMostBytes);
  std::vector<Timings> timings(n);
  std::barrier together(n);
  std::vector<std::thread> threads;
  for (uint32_t i = 1; i < n; ++i) {
    try {
      threads.emplace_back([&, i] { timings[i] = measure_one(size_bytes, &together); });
    } catch (const std::system_error&) {
      together.arrive_and_drop();
    }
  }
  timings[0] = measure_one(size_bytes, &together);
  for (std::thread& thread : threads) {
    thread.join();
  }
  return combine(timings);
}

namespace {

struct Measured {
  std::mutex mutex;
  std::map<uint32_t, CostModel> by_threads;  // guarded by mutex; entries stay
};

Measured& all_measured() {
  static Measured measured;
  return measured;
}

}  // namespace

const CostModel& measured_costs(uint32_t n_threads) {
  Measured& measured = all_measured();
  const std::lock_guard lock(measured.mutex);
  auto found = measured.by_threads.find(n_threads);
  if (found == measured.by_threads.end()) {
    found = measured.by_threads.emplace(n_threads, measure_costs(n_threads)).first;
  }
  return found->second;
}

const CostModel* find_measured_costs(uint32_t n_threads) {
  Measured& measured = all_measured();
  const std::unique_lock lock(measured.mutex, std::try_to_lock);
  if (!lock.owns_lock()) {
    return nullptr;
  }
  const auto found = measured.by_threads.find(n_threads);
  return found == measured.by_threads.end() ? nullptr : &found->second;
}

}  // namespace kvm::engine
