// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/approx.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/sampled/core.h"
#include "attention/sampled/directions.h"
#include "attention/sampled/hashed.h"
#include "attention/sampled/pilot.h"
#include "attention/sampled/sample.h"
#include "attention/sampled/select.h"
#include "base/assert.h"
#include "base/merge.h"
#include "base/round.h"

namespace kvm::attention {
namespace {

// Below this many keys of R a sample that has to find its own size costs more than exact.
constexpr uint64_t kFewestKeys = 2048;
// Bounds the plug-in sigma over |o|: beyond it, what is taken for o is noise itself.
constexpr double kHopelessSigma = 0.5;
constexpr uint32_t kMostGrowths = 8;
// A round lets a row's variance fall by a factor between these. More is asked for by a few keys
// that the sketch puts too low, and these are closed, and out of the variance, when they have grown
// so much.
constexpr double kLeastGrowth = 1.02;
constexpr double kMostGrowth = 16.0;
// Variances of a larger sample are aimed so far below that of eps, and so many of their own
// standard deviations, for growing once more would cost more than reading that many more keys.
constexpr double kAimBelow = 0.03;
constexpr double kAimDeviations = 2.0;
// Candidates that growth is planned by.
constexpr uint32_t kPlanKeys = 512;
// How far the spread that a scan saw may exceed what was drawn tells of it, an estimate.
constexpr double kTellsEnough = 3;
// Of the keys: a sample that would have to grow beyond it costs more than all of them.
constexpr double kMostShare = 0.5;
// Bounds ln(c e^s_hat): its square is a float.
constexpr float kMostLogSize = 40.0f;

enum class Method : uint8_t { kSample, kHashed, kSelect };

Method method_of(const ApproxParams& params) {
  if (params.mode == ApproxMode::kTopK) {
    const bool all = params.proposal == Proposal::kLsh && params.budget == 0;
    return all ? Method::kHashed : Method::kSelect;
  }
  return params.proposal == Proposal::kLsh ? Method::kHashed : Method::kSample;
}

// Thresholds of a sample, or bars of sketched scores.
bool has_pilot(const ApproxParams& params) {
  const Method method = method_of(params);
  return method == Method::kSample ||
         (method == Method::kSelect && params.proposal == Proposal::kSketch);
}

bool solved_exactly(const ApproxInput& input, const Plan& exact, const Counts& counts) {
  const ApproxParams& params = input.params;
  if (exact.rows == 0 || exact.rows > kMaxApproxRows || counts.n_keys == 0 ||
      params.budget >= counts.n_keys) {
    return true;
  }
  switch (method_of(params)) {
    case Method::kSelect:
      return params.budget == 0;
    case Method::kHashed:
      return params.mode == ApproxMode::kVerified;  // there is no bar to verify
    case Method::kSample:
      return params.proposal != Proposal::kSketch ||
             (params.budget == 0 && !is_worth_a_pilot(params, *input.problem, counts.n_present)) ||
             (counts.n_keys < kFewestKeys &&
              (params.budget == 0 || params.mode == ApproxMode::kVerified));
  }
  return true;
}

// A HashedHead begins the state of a shard of hashed keys.
struct HashedHead {
  uint64_t keys_read = 0;
  uint64_t ids_read = 0;
};

struct HashedState {
  std::byte* exact;
  HashedHead* head;
  GatherSums sums;
};

HashedState carve_hashed(const Problem& problem, uint32_t rows, Carver& carver) {
  HashedState s{};
  s.exact = carver.take<std::byte>(state_bytes(problem, rows));
  s.head = carver.take<HashedHead>(1);
  std::byte* sums = carver.take<std::byte>(gather_sums_bytes(problem));
  if (sums != nullptr) {
    s.sums = gather_sums_view(problem, sums);
  }
  return s;
}

size_t hashed_state_bytes(const Problem& problem, uint32_t rows) {
  Carver carver(nullptr);
  carve_hashed(problem, rows, carver);
  return carver.used_bytes();
}

// Scratch and state of the proposal, without what exact evaluation needs.
struct Sizes {
  size_t scratch = 0;
  size_t state = 0;
};

Sizes sizes_of(const ApproxInput& input, uint64_t n_keys, uint32_t rows, uint32_t n_shards) {
  switch (method_of(input.params)) {
    case Method::kSelect:
      return {select_scratch_bytes(input, n_keys, rows), select_state_bytes(input, n_keys, rows)};
    case Method::kHashed:
      return {hashed_scratch_bytes(input), hashed_state_bytes(*input.problem, rows)};
    case Method::kSample:
      return {sample_scratch_bytes(input, n_keys, rows),
              sample_state_bytes(input, n_keys, rows, n_shards)};
  }
  return {};
}

// --- Results ------------------------------------------------------------------------------------

void write_state(const Context& c, void* state) {
  Plan plan = c.exact;
  plan.n_chunks = std::max(plan.n_chunks, 1u);
  write_result(c.problem, plan, {0, c.rows}, state);
}

// Sums of closed (or weighted) keys as a state: o, m, l.
void sums_to_state(const Context& c, const GatherSums& sums, void* state) {
  const StateView view = state_view(c.problem, c.rows, state);
  for (uint32_t r = 0; r < c.rows; ++r) {
    view.m[r] = sums.m[r];
    float l = 0;
    for (uint32_t i = 0; i < kGatherKeys; ++i) {
      l += sums.sums[(size_t{r} * kGatherSums + kSumClosed) * kGatherKeys + i];
    }
    view.l[r] = l;
    std::copy_n(sums.acc + size_t{r} * acc_stride(c.problem), c.problem.dim_v,
                view.o + size_t{r} * c.problem.dim_v);
  }
}

void merge_into(const Context& c, void* into, void* from) {
  const StateView a = state_view(c.problem, c.rows, into);
  const StateView b = state_view(c.problem, c.rows, from);
  for (uint32_t r = 0; r < c.rows; ++r) {
    const size_t at = size_t{r} * c.problem.dim_v;
    merge_row(a.o + at, a.m + r, a.l + r, b.o + at, b.m[r], b.l[r], c.problem.dim_v);
  }
}

struct FinishScratch {
  std::byte* method;  // sizes_of(...).scratch
  std::byte* state;   // one state
  std::byte* other;   // another
  std::byte* stack;   // of StateStack over shards
  std::byte* sums;
  std::byte* directions;
  float* plan_size;    // [rows][kPlanKeys]
  float* plan_excess;  // [rows][kPlanKeys]
  float* plan_weight;  // [kPlanKeys]
};

FinishScratch carve_finish(const ApproxInput& input, const Plan& exact, uint64_t n_keys,
                           Carver& carver) {
  const Problem& problem = *input.problem;
  const size_t stride = state_bytes(problem, exact.rows);
  const Shards shards(exact);
  const uint32_t depth =
      shards.count() == 0 ? 2 : StateStack::depth_for(shards.id(0), shards.id(shards.count() - 1));
  FinishScratch s;
  s.method = carver.take<std::byte>(sizes_of(input, n_keys, exact.rows, shards.count()).scratch);
  s.state = carver.take<std::byte>(stride);
  s.other = carver.take<std::byte>(stride);
  s.stack = carver.take<std::byte>((depth + 1) * stride);
  s.sums = carver.take<std::byte>(gather_sums_bytes(problem));
  s.directions = carver.take<std::byte>(Directions::scratch_bytes(problem));
  s.plan_size = carver.take<float>(size_t{kPlanKeys} * exact.rows);
  s.plan_excess = carver.take<float>(size_t{kPlanKeys} * exact.rows);
  s.plan_weight = carver.take<float>(kPlanKeys);
  return s;
}

// Says whether the exact part holds a row that is NaN, in o or in all.
bool exact_part_is_finite(const Context& c, const FinishScratch& s) {
  const StateView state = state_view(c.problem, c.rows, s.state);
  for (uint32_t r = 0; r < c.rows; ++r) {
    if (std::isnan(state.l[r]) || std::isnan(state.o[size_t{r} * c.problem.dim_v])) {
      return false;
    }
  }
  return true;
}

// The exact parts of all shards in one: a shard's state begins with its own.
void merge_exact(const Context& c, std::byte* states, const FinishScratch& s) {
  const Shards shards(c.exact);
  const size_t stride = state_bytes(c.problem, c.rows);
  StateStack stack(c.problem, s.stack);
  for (uint32_t i = 0; i < shards.count(); ++i) {
    std::memcpy(stack.next(), states + i * c.plan->state_bytes, stride);
    stack.push(shards.id(i));
  }
  stack.finish(s.state);
}

uint64_t keys_fixed(const Context& c) { return c.plan->n_keys_present - c.plan->n_keys_indexed; }

void report_start(const Context& c, ApproxReport* report) {
  *report = ApproxReport{};
  report->keys_present = c.plan->n_keys_present;
  std::fill_n(report->err_o, c.rows, std::numeric_limits<float>::quiet_NaN());
  std::fill_n(report->err_lse, c.rows, std::numeric_limits<float>::quiet_NaN());
  std::fill_n(report->noise, c.rows, std::numeric_limits<float>::quiet_NaN());
}

void report_exact(const Context& c, ApproxReport* report) {
  report->n_exact = c.rows;
  report->keys_read = c.plan->n_keys_present;
  report->bytes_read += c.plan->n_keys_present * row_bytes(c.problem);
  std::fill_n(report->err_o, c.rows, 0.0f);
  std::fill_n(report->err_lse, c.rows, 0.0f);
}

// --- TopK and hash tables -----------------------------------------------------------------------

bool finish_selected(const Context& c, const FinishScratch& s, std::byte* states,
                     ApproxReport* report) {
  const GatherSums sums = gather_sums_view(c.problem, s.sums);
  clear_sums(c.problem, sums);
  const Selected selected = gather_selected(c, s.method, states, sums);
  if (!sums_are_finite(c.problem, sums)) {
    return false;
  }
  sums_to_state(c, sums, s.other);
  merge_into(c, s.state, s.other);
  report->keys_read = keys_fixed(c) + selected.keys_read;
  report->bytes_read = report->keys_read * row_bytes(c.problem) + selected.index_bytes;
  write_state(c, s.state);
  return true;
}

// The runs of tables that begin in the shard.
void hash_shard(const Context& c, uint64_t id, void* scratch, void* state) {
  Carver carver(state);
  const HashedState s = carve_hashed(c.problem, c.rows, carver);
  *s.head = HashedHead{};
  clear_sums(c.problem, s.sums);
  for (const Use& use : c.uses()) {
    if (c.stretches()[use.first_stretch].position / kShardTokens != id) {
      continue;
    }
    const HashedKeys keys = look_up(c, use, scratch);
    gather_hashed(c, use, keys, scratch, s.sums);
    s.head->keys_read += keys.n;
    s.head->ids_read += keys.ids_read;
  }
}

bool finish_hashed(const Context& c, const FinishScratch& s, std::byte* states,
                   ApproxReport* report) {
  report->keys_read = keys_fixed(c);
  for (uint32_t i = 0; i < c.plan->n_shards; ++i) {
    Carver carver(states + i * c.plan->state_bytes);
    const HashedState state = carve_hashed(c.problem, c.rows, carver);
    if (!sums_are_finite(c.problem, state.sums)) {
      return false;
    }
    sums_to_state(c, state.sums, s.other);
    merge_into(c, s.state, s.other);
    report->keys_read += state.head->keys_read;
    report->bytes_read += state.head->ids_read * sizeof(uint16_t);
  }
  report->bytes_read += report->keys_read * row_bytes(c.problem);
  write_state(c, s.state);
  return true;
}

// --- Sampled and Verified -----------------------------------------------------------------------

double lanes(const GatherSums& sums, uint32_t row, uint32_t which) {
  const float* at = sums.sums + (size_t{row} * kGatherSums + which) * kGatherKeys;
  double sum = 0;
  for (uint32_t i = 0; i < kGatherKeys; ++i) {
    sum += static_cast<double>(at[i]);
  }
  return sum;
}

// A RowWork holds the totals of one row, with memory for their vectors.
struct RowWork {
  RowTotals totals;
  double n_fixed[kMaxIndexedDim];
  double n_sample[kMaxIndexedDim];
  double chance_v[kMaxIndexedDim];
  double o[kMaxIndexedDim];
};

class Sampler {
 public:
  Sampler(const Context& c, const FinishScratch& s, std::byte* states)
      : c_(c),
        s_(s),
        states_(states),
        kappa_(static_cast<double>(c.params().delta), c.params().mode == ApproxMode::kVerified),
        kappa_lse_(static_cast<double>(c.params().delta)) {
    std::copy_n(c.prepared.head->log_c, c.rows, log_c_);
  }

  // Returns false where the problem has to be answered exactly.
  bool solve(ApproxReport* report);

 private:
  SampleState shard(uint32_t i) const {
    return sample_state(c_, states_ + i * c_.plan->state_bytes, nullptr);
  }
  void add_untold(uint32_t row, RowTotals* t);
  void total(uint32_t row, RowWork* work);
  void add_shard(const SampleState& state, uint32_t row, RowWork* work) const;
  double estimate(ApproxReport* report);
  void write_row(uint32_t row, const RowWork& work, const RowEstimate& estimate) const;
  void count_reads(ApproxReport* report) const;
  bool all_closed() const;
  bool is_finite() const;
  uint32_t add_shares(const SampleState& state, uint64_t stride, uint64_t* skip, KeyShares* keys,
                      double* variance) const;
  bool is_balanced() const { return c_.params().mode == ApproxMode::kBalanced; }
  bool is_enough(double worst, uint32_t stage) const;
  double wanted_growth(uint32_t row) const;
  double plan_growth(double* growth) const;
  void grow(const double* growth);

  const Context& c_;
  const FinishScratch& s_;
  std::byte* states_;
  Kappa kappa_;
  Kappa kappa_lse_;  // nothing stops at its bar
  float log_c_[kMaxApproxRows];
  // From the last estimate:
  double over_eps_[kMaxApproxRows] = {};  // bar / (eps |o|)
  double draws_[kMaxApproxRows] = {};
  double sigma_ = 0;  // largest plug-in sigma over |o|
  // RowTotals::spread of the last scan, relative to e^untold_top_; 0 where what was drawn told it.
  double untold_[kMaxApproxRows] = {};
  double untold_top_[kMaxApproxRows] = {};
};

bool Sampler::all_closed() const {
  double n_open = 0;
  for (uint32_t i = 0; i < c_.plan->n_shards; ++i) {
    const SampleHead& head = *shard(i).head;
    n_open += head.sums.n_keys - static_cast<double>(head.n_closed);
  }
  return n_open <= 0;
}

// Looks at what was drawn.
bool Sampler::is_finite() const {
  for (uint32_t i = 0; i < c_.plan->n_shards; ++i) {
    if (!sums_are_finite(c_.problem, shard(i).sums)) {
      return false;
    }
  }
  return true;
}

void Sampler::add_shard(const SampleState& state, uint32_t row, RowWork* work) const {
  RowTotals& t = work->totals;
  const SampleHead& head = *state.head;
  // The sketch's sums have no reference but c.
  const double hat = std::exp(-static_cast<double>(head.log_c[row]) - t.top);
  t.open_mass += hat * head.sums.open_mass[row];
  if (!head.redrawn) {
    t.spread += hat * hat * head.sums.spread[row];
  }
  t.any_open = t.any_open || head.sums.n_keys > static_cast<double>(head.n_closed);
  const GatherSums& sums = state.sums;
  if (sums.m[row] == kEmptyLse) {
    return;
  }
  const double w = std::exp(static_cast<double>(sums.m[row]) - t.top);
  const auto sum = [&](GatherSum which) { return lanes(sums, row, which); };
  t.closed += w * sum(kSumClosed);
  t.open += w * sum(kSumOpen);
  t.norm2 += w * (sum(kSumClosedNorm) + sum(kSumOpenNorm));
  t.hat += w * sum(kSumHat);
  t.residual += w * sum(kSumResidual);
  t.residual2 += w * sum(kSumResidual2);
  t.n_open += static_cast<double>(head.n_open);
  t.chance += w * w * sum(kSumSquare);
  t.chance_norm2 += w * w * sum(kSumSquareNorm);
  t.chance_hat += w * w * sum(kSumSquareHat);
  const double chance_hat2 = w * w * sum(kSumSquareHat2);
  t.chance_hat2 += chance_hat2;
  if (head.redrawn) {
    t.spread += chance_hat2;  // of which it is the expectation
  }
  const uint32_t stride = acc_stride(c_.problem);
  const auto vector = [&](GatherVector which) {
    return sums.acc + (size_t{which} * padded_rows(c_.rows) + row) * stride;
  };
  for (uint32_t d = 0; d < c_.problem.dim_v; ++d) {
    work->n_sample[d] +=
        w * (static_cast<double>(vector(kVecClosed)[d]) + static_cast<double>(vector(kVecOpen)[d]));
    work->chance_v[d] += w * w * static_cast<double>(vector(kVecSquare)[d]);
  }
}

// Where a sample has grown among the candidates of its scan, what is drawn tells the spread. What
// is hardly ever drawn, whatever c, as keys of next to no value are, only a scan tells: what it
// said stays.
void Sampler::add_untold(uint32_t row, RowTotals* t) {
  if (shard(0).head->redrawn) {
    t->spread += untold_[row] * std::exp(2 * (untold_top_[row] - t->top));
  } else {
    untold_[row] = t->spread > kTellsEnough * t->chance_hat2 ? t->spread : 0.0;
    untold_top_[row] = t->top;
  }
}

void Sampler::total(uint32_t row, RowWork* work) {
  const uint32_t dim = c_.problem.dim_v;
  const StateView fixed = state_view(c_.problem, c_.rows, s_.state);
  const float* sinks = c_.problem.sink_logits;
  const double sink =
      sinks == nullptr ? -INFINITY : static_cast<double>(sinks[row % c_.problem.group]);
  RowTotals& t = work->totals;
  t = RowTotals{};
  t.top = std::max(static_cast<double>(fixed.m[row]), sink);
  for (uint32_t i = 0; i < c_.plan->n_shards; ++i) {
    t.top = std::max(t.top, static_cast<double>(shard(i).sums.m[row]));
  }
  if (t.top == -INFINITY) {
    t.top = 0;
  }
  const double of_fixed = std::exp(static_cast<double>(fixed.m[row]) - t.top);
  t.fixed = of_fixed * static_cast<double>(fixed.l[row]) + std::exp(sink - t.top);
  for (uint32_t d = 0; d < dim; ++d) {
    work->n_fixed[d] = of_fixed * static_cast<double>(fixed.o[size_t{row} * dim + d]);
  }
  std::fill_n(work->n_sample, dim, 0.0);
  std::fill_n(work->chance_v, dim, 0.0);
  for (uint32_t i = 0; i < c_.plan->n_shards; ++i) {
    add_shard(shard(i), row, work);
  }
  add_untold(row, &t);
  t.n_fixed = {work->n_fixed, dim};
  t.n_sample = {work->n_sample, dim};
  t.chance_v = {work->chance_v, dim};
}

// As a state from which write_result makes o = work.o and lse = top + ln(lse_mass), a sink
// included.
void Sampler::write_row(uint32_t row, const RowWork& work, const RowEstimate& e) const {
  const RowTotals& t = work.totals;
  const StateView out = state_view(c_.problem, c_.rows, s_.other);
  const float* sinks = c_.problem.sink_logits;
  const double sink =
      sinks == nullptr ? 0.0 : std::exp(static_cast<double>(sinks[row % c_.problem.group]) - t.top);
  out.m[row] = e.mass > 0 ? static_cast<float>(t.top) : kEmptyLse;
  out.l[row] = static_cast<float>(std::max(e.lse_mass - sink, 0.0));
  for (uint32_t d = 0; d < c_.problem.dim_v; ++d) {
    out.o[size_t{row} * c_.problem.dim_v + d] = static_cast<float>(work.o[d] * e.lse_mass);
  }
}

// All rows into s_.other and the report. Returns the largest relative bar.
double Sampler::estimate(ApproxReport* report) {
  double worst = 0;
  sigma_ = 0;
  Directions directions(c_, s_.directions);
  for (uint32_t i = 0; i < c_.plan->n_shards; ++i) {
    directions.add(shard(i).told);
  }
  directions.read();
  for (uint32_t r = 0; r < c_.rows; ++r) {
    RowWork work;
    total(r, &work);
    const std::span<double> o(work.o, c_.problem.dim_v);
    const RowEstimate e = estimate_row(work.totals, o);
    const double relative = e.relative_bar(kappa_, directions.shape(r, o));
    worst = std::max(worst, relative);
    over_eps_[r] = relative / static_cast<double>(c_.params().eps);
    draws_[r] = e.draws;
    sigma_ = std::max(sigma_, e.norm_o > 0 ? e.plug_in / e.norm_o : 0.0);
    report->err_o[r] = static_cast<float>(relative);
    report->err_lse[r] = static_cast<float>(e.bar_lse(kappa_lse_));
    report->noise[r] = static_cast<float>(e.noise);
    write_row(r, work, e);
  }
  return worst;
}

// Every `stride`-th candidate, from `skip` on, that is left to chance, to the shares; sum of
// excess (1 - p)/p to `variance`. Returns the closed ones among them, and leaves in skip what is
// for the next shard.
uint32_t Sampler::add_shares(const SampleState& state, uint64_t stride, uint64_t* skip,
                             KeyShares* keys, double* variance) const {
  const SampleHead& head = *state.head;
  const hash_index::Candidates& list = state.candidates;
  const uint32_t rows = c_.rows;
  uint32_t n_closed = 0;
  for (; *skip < list.n; *skip += stride) {
    const auto i = static_cast<uint32_t>(*skip);
    const float size = list.size[i];
    if (size >= 1.0f) {
      ++n_closed;
      continue;
    }
    float h[kMaxApproxRows];
    for (uint32_t r = 0; r < rows; ++r) {
      h[r] = std::exp(std::min(list.logits[size_t{i} * rows + r] + head.log_c[r], kMostLogSize));
    }
    // Candidates are all keys with their own chance to be one.
    const float weight = static_cast<float>(stride) / std::min(1.0f, size * head.reach);
    const float unit = size / std::max(*std::max_element(h, h + rows), 1e-37f);  // |v|
    const float odds = 1.0f / size - 1.0f;
    for (uint32_t r = 0; r < rows; ++r) {
      const size_t at = size_t{r} * keys->stride + keys->n;
      keys->size[at] = h[r] * unit;
      keys->excess[at] = h[r] * h[r] * weight;
      variance[r] += static_cast<double>(h[r] * h[r] * weight * odds);
    }
    s_.plan_weight[keys->n++] = weight;
  }
  *skip -= list.n;
  return n_closed;
}

// By what the variance of a row is to be divided. Balanced: by as much as the row is due more keys.
// Verified: for its bar to meet eps, and somewhat more.
double Sampler::wanted_growth(uint32_t row) const {
  if (is_balanced()) {
    return std::min(kMostBudgets, over_eps_[row]);  // NaN: the most
  }
  const double margin =
      1.0 + kAimBelow + kAimDeviations / std::max(over_eps_[row] * std::sqrt(draws_[row]), 1.0);
  return std::min(kMostGrowth, margin * over_eps_[row] * over_eps_[row]);  // NaN: the most
}

// The growth of each row's c that is wanted; returns how many keys that would read. By some of the
// candidates, which are a sample of all keys: the squares of their sketched weights say how the
// variance falls.
double Sampler::plan_growth(double* growth) const {
  const uint32_t rows = c_.rows;
  uint64_t n_candidates = 0;
  for (uint32_t i = 0; i < c_.plan->n_shards; ++i) {
    n_candidates += shard(i).candidates.n;
  }
  const uint64_t stride = n_candidates / kPlanKeys + 1;
  KeyShares keys{
      .n = 0, .stride = kPlanKeys, .rows = rows, .size = s_.plan_size, .excess = s_.plan_excess};
  double variance[kMaxApproxRows] = {};
  double n_closed = 0;
  uint64_t skip = 0;
  for (uint32_t i = 0; i < c_.plan->n_shards; ++i) {
    n_closed += add_shares(shard(i), stride, &skip, &keys, variance);
  }
  double wanted[kMaxApproxRows];
  for (uint32_t r = 0; r < rows; ++r) {
    wanted[r] = wanted_growth(r);
    const auto scale = static_cast<float>(variance[r] > 0 ? wanted[r] / variance[r] : 0.0);
    for (uint32_t i = 0; i < keys.n; ++i) {
      keys.excess[size_t{r} * kPlanKeys + i] *= scale;
    }
  }
  solve_growth(keys, 1.0, growth);
  for (uint32_t r = 0; r < rows; ++r) {
    if (over_eps_[r] > 1.0) {
      growth[r] = std::max({growth[r], kLeastGrowth, variance[r] > 0 ? 0.0 : wanted[r]});
    }
  }
  double n = n_closed * static_cast<double>(stride);
  for (uint32_t i = 0; i < keys.n; ++i) {
    double chance = 0;
    for (uint32_t r = 0; r < rows; ++r) {
      chance =
          std::max(chance, growth[r] * static_cast<double>(keys.size[size_t{r} * kPlanKeys + i]));
    }
    n += static_cast<double>(s_.plan_weight[i]) * std::min(chance, 1.0);
  }
  return n;
}

// Draws more: of what the scan has found, or with another scan.
void Sampler::grow(const double* growth) {
  float log_growth[kMaxApproxRows];
  for (uint32_t r = 0; r < c_.rows; ++r) {
    log_growth[r] = static_cast<float>(std::log(growth[r]));
    log_c_[r] += log_growth[r];
  }
  const double most = *std::max_element(growth, growth + c_.rows);
  bool reached = true;
  for (uint32_t i = 0; i < c_.plan->n_shards; ++i) {
    reached = reached && most <= static_cast<double>(shard(i).head->reach);
  }
  const Shards shards(c_.exact);
  for (uint32_t i = 0; i < c_.plan->n_shards; ++i) {
    if (reached) {
      redraw_shard(c_, log_growth, s_.method, shard(i));
    } else {
      draw_shard(c_, shards.id(i), log_c_, kReachAgain, s_.method, shard(i));
    }
  }
}

void Sampler::count_reads(ApproxReport* report) const {
  uint64_t index_bytes = 0;
  uint64_t keys = 0;
  for (uint32_t i = 0; i < c_.plan->n_shards; ++i) {
    const SampleState state = shard(i);
    keys += state.head->n_open + state.head->n_closed;
    index_bytes += state.head->index_bytes;
  }
  // A key that is drawn after it was probed counts twice: nobody keeps a list.
  keys += keys_fixed(c_) + c_.prepared.head->n_probed;
  report->keys_read = std::min(keys, c_.plan->n_keys_present);
  report->bytes_read = index_bytes + keys * row_bytes(c_.problem);
}

// worst: the largest bar. Balanced grows once.
bool Sampler::is_enough(double worst, uint32_t stage) const {
  return c_.params().mode == ApproxMode::kSampled || (is_balanced() && stage > 0) ||
         worst <= static_cast<double>(c_.params().eps);
}

bool Sampler::solve(ApproxReport* report) {
  const double share = is_balanced()
                           ? kMostShare
                           : max_read_fraction(c_.params(), c_.problem, c_.plan->n_keys_present);
  const double most = share * static_cast<double>(c_.plan->n_keys_present);
  for (uint32_t stage = 0;; ++stage) {
    count_reads(report);
    if (all_closed() || !is_finite()) {
      return false;
    }
    const double worst = estimate(report);
    if (is_enough(worst, stage)) {
      return true;
    }
    double growth[kMaxApproxRows];
    const bool hopeless = !is_balanced() && sigma_ > kHopelessSigma;
    if (hopeless || stage == kMostGrowths || plan_growth(growth) > most) {
      return false;
    }
    grow(growth);
    ++report->n_grown;
  }
}

}  // namespace

namespace {

// Returns what schedulers weigh: a row gathered counts twice.
uint64_t cost_bytes(const ApproxInput& input, const ApproxPlan& plan) {
  const uint64_t row = row_bytes(*input.problem);
  const ApproxParams& params = input.params;
  const uint64_t fixed = plan.n_keys_present - plan.n_keys_indexed;
  uint64_t drawn = params.budget * plan.rows;
  if (params.budget == 0) {
    drawn = usual_keys(params, plan.rows);
  }
  drawn = std::min(drawn, plan.n_keys_indexed);
  const uint64_t index = params.proposal == Proposal::kSketch ? 36 : 0;
  return fixed * row + 2 * drawn * row + plan.n_keys_indexed * index;
}

void make_uses(const Context& c) {
  uint32_t n = 0;
  size_t query_at = 0;
  for (uint32_t i = 0; i < c.plan->n_stretches; ++i) {
    const Stretch& stretch = c.prepared.stretches[i];
    if (i > 0 && same_use(*c.input, stretch, c.prepared.stretches[i - 1])) {
      ++c.prepared.uses[n - 1].n_stretches;
      continue;
    }
    c.prepared.uses[n++] = {stretch.index_run, stretch.variant, i, 1, query_at};
    query_at += use_query_bytes(*c.input, stretch);
  }
}

// dense [rows][dim_k]: for what it takes.
void prepare_uses(const Context& c, float* dense) {
  hash_index::SketchSpan last;
  uint16_t variant = 0;
  for (const Use& use : c.uses()) {
    std::byte* out = c.prepared.queries + use.query_at;
    if (c.params().proposal == Proposal::kLsh) {
      prepare_hashed(c, use, out);
    } else if (c.params().proposal == Proposal::kSketch) {
      const bool same_queries = last.frame != nullptr && variant == use.variant;
      if (!same_queries) {
        dense_queries(c, use.variant, dense);
      }
      const hash_index::Frame& frame = *c.input->index.sketches[use.index_run].frame;
      const hash_index::ScanRows rows{.q = dense,
                                      .n = c.rows,
                                      .scale = c.problem.scale,
                                      .softcap = c.problem.softcap,
                                      .careful = method_of(c.params()) == Method::kSample};
      hash_index::prepare_scan(frame, rows, out, same_queries ? &last : nullptr);
      last.frame = &frame;
      last.query = out;
      variant = use.variant;
    }
  }
}

}  // namespace

// --- The interface ------------------------------------------------------------------------------

ApproxPlan plan_approx(const ApproxInput& input) {
  ApproxPlan plan;
  Problem problem = *input.problem;
  KVM_ASSERT(std::max(problem.dim_k, problem.dim_v) <= kMaxIndexedDim && !problem.v_in_k &&
             problem.slopes == nullptr);
  problem.wants_column_sums = false;
  const Plan exact = make_plan(problem, input.table);
  const bool has_many = exact.rows > kMaxApproxRows;
  const Counts counts = exact.n_chunks == 0 || has_many ? Counts{} : count_stretches(input);
  if (solved_exactly(input, exact, counts)) {
    plan.exact = true;
    return plan;
  }
  plan.rows = exact.rows;
  plan.n_shards = Shards(exact).count();
  const Sizes sizes = sizes_of(input, counts.n_keys, exact.rows, plan.n_shards);
  plan.n_keys_indexed = counts.n_keys;
  plan.n_stretches = counts.n_stretches;
  plan.n_uses = counts.n_uses;
  plan.n_keys_present = counts.n_present;
  plan.prepared_bytes = prepared_bytes(input, exact, counts);
  plan.state_bytes = sizes.state;
  Carver finish(nullptr);
  carve_finish(input, exact, counts.n_keys, finish);
  plan.scratch_bytes =
      std::max(finish.used_bytes(), round_up(exact_scratch_bytes(problem, exact), kBufferAlign) +
                                        round_up(sizes.scratch, kBufferAlign));
  if (has_pilot(input.params)) {
    plan.scratch_bytes =
        std::max(plan.scratch_bytes, pilot_scratch_bytes(input, exact, counts.n_keys));
  }
  plan.scratch_bytes += size_t{exact.rows} * problem.dim_k * sizeof(float) + kBufferAlign;
  plan.cost_bytes = cost_bytes(input, plan);
  return plan;
}

bool same_plan(const ApproxInput& a, const ApproxInput& b) {
  ApproxParams params = b.params;
  params.seed = a.params.seed;
  return a.params == params && a.table == b.table && a.is_in_parts == b.is_in_parts &&
         same_index_runs(a, b);
}

void prepare_approx(const ApproxInput& input, const ApproxPlan& plan, void* prepared,
                    void* scratch) {
  KVM_ASSERT(!plan.exact);
  Context c = make_context(input, plan, prepared);
  *c.prepared.head = PreparedHead{};
  fill_stretches(input, {c.prepared.stretches, plan.n_stretches});
  make_uses(c);
  c.prepared.head->n_fixed =
      static_cast<uint32_t>(fill_fixed_ranges(input, c.stretches(), c.prepared.fixed));
  prepare_queries(c.problem, c.exact, c.prepared.exact);
  prepare_uses(c, static_cast<float*>(scratch));
  if (method_of(input.params) == Method::kSample) {
    find_thresholds(c, scratch);
  } else if (has_pilot(input.params)) {
    find_bars(c, scratch);
  }
}

void eval_shard(const ApproxInput& input, const ApproxPlan& plan, const void* prepared,
                uint32_t shard, void* scratch, void* state) {
  KVM_ASSERT(!plan.exact && shard < plan.n_shards);
  const Context c = make_context(input, plan, prepared);
  const uint64_t id = Shards(c.exact).id(shard);
  const uint64_t chunks = kShardTokens / c.exact.chunk_tokens;
  if (c.prepared.head->answer_exactly != 0) {
    return;
  }
  // Every state begins with the exact part.
  const Problem part = c.fixed_problem();
  eval_exact(part, make_plan(part, c.table), c.prepared.exact, id * chunks, (id + 1) * chunks,
             scratch, state);
  switch (method_of(input.params)) {
    case Method::kSelect:
      select_shard(c, id, has_pilot(input.params), scratch, select_state(c, state));
      break;
    case Method::kHashed:
      hash_shard(c, id, scratch, state);
      break;
    case Method::kSample: {
      const SampleState sample = sample_state(c, state, scratch);
      *sample.head = SampleHead{};
      draw_shard(c, id, c.prepared.head->log_c, c.prepared.head->reach, scratch, sample);
      if (input.is_in_parts) {
        ToldKeys told = sample.told;
        told.n = sample.head->n_told;
        read_told(c, told);
      }
      break;
    }
  }
}

bool may_be_in_parts(const ApproxParams& params) {
  return params.mode == ApproxMode::kSampled && params.proposal == Proposal::kSketch &&
         params.budget != 0;
}

uint64_t shard_number(const ApproxInput& input, uint32_t shard) {
  Problem problem = *input.problem;
  problem.wants_column_sums = false;
  return Shards(make_plan(problem, input.table)).id(shard);
}

bool find_blocks(const ApproxInput& input, const ApproxPlan& plan, const void* prepared,
                 uint32_t shard, void* scratch, void* state, uint64_t* blocks) {
  KVM_ASSERT(!plan.exact && shard < plan.n_shards && may_be_in_parts(input.params));
  const Context c = make_context(input, plan, prepared);
  if (c.prepared.head->answer_exactly != 0) {
    return false;
  }
  const uint64_t id = Shards(c.exact).id(shard);
  const uint64_t begin = id * kShardTokens;
  const auto set = [&](uint64_t position) {
    const uint64_t block = (position - begin) / kPageTokens;
    blocks[block / 64] |= uint64_t{1} << block % 64;
  };
  const Problem part = c.fixed_problem();
  const VisibleSet fixed(part.visible, part.n_query, 0, part.n_query);
  for (size_t i = first_run_after(part.runs, begin);
       i < part.runs.size() && part.runs[i].position < begin + kShardTokens; ++i) {
    const uint64_t position = part.runs[i].position;
    if (fixed.any(position - position % kPageTokens) != 0) {
      set(position);
    }
  }
  const SampleState sample = sample_state(c, state, scratch);
  *sample.head = SampleHead{};
  const hash_index::Candidates list =
      scan_shard(c, id, c.prepared.head->log_c, c.prepared.head->reach, sample);
  for (uint32_t i = 0; i < list.n; ++i) {
    if (list.size[i] >= 1.0f || list.random[i] < list.size[i]) {
      set(list.position[i]);
    }
  }
  return true;
}

namespace {

// Returns false where the problem has to be answered exactly.
bool finish_approximately(const Context& c, const FinishScratch& s, std::byte* shards,
                          ApproxReport* report) {
  switch (method_of(c.params())) {
    case Method::kSelect:
      return finish_selected(c, s, shards, report);
    case Method::kHashed:
      return finish_hashed(c, s, shards, report);
    case Method::kSample:
      break;
  }
  if (!Sampler(c, s, shards).solve(report)) {
    return false;
  }
  write_state(c, s.other);
  return true;
}

// Nothing is known of the error of a row that is no number.
void report_not_finite(const Context& c, ApproxReport* report) {
  for (uint32_t row = 0; row < c.rows; ++row) {
    if (!answer_is_finite(c.problem, row)) {
      report->err_o[row] = report->err_lse[row] = report->noise[row] =
          std::numeric_limits<float>::quiet_NaN();
    }
  }
}

}  // namespace

bool finish_approx(const ApproxInput& input, const ApproxPlan& plan, const void* prepared,
                   void* scratch, void* states, ApproxReport* report) {
  KVM_ASSERT(!plan.exact);
  const Context c = make_context(input, plan, prepared);
  report_start(c, report);
  if (c.prepared.head->answer_exactly != 0) {
    report_exact(c, report);
    return false;
  }
  Carver carver(scratch);
  const FinishScratch s = carve_finish(input, c.exact, plan.n_keys_indexed, carver);
  auto* shards = static_cast<std::byte*>(states);
  merge_exact(c, shards, s);
  // Where a number that was read is not finite, exact evaluation finds out whose rows it spoils.
  if (!exact_part_is_finite(c, s) || !finish_approximately(c, s, shards, report)) {
    report_exact(c, report);
    return false;
  }
  report_not_finite(c, report);
  return true;
}

void report_left(const ApproxInput& input, const ApproxPlan& plan, ApproxReport* report) {
  const Context c = make_context(input, plan, nullptr);
  report_start(c, report);
  report_exact(c, report);
}

}  // namespace kvm::attention
