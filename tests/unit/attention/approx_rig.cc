// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/attention/approx_rig.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "attention/exact/visibility.h"
#include "attention/sampled/pilot.h"
#include "codecs/codec.h"
#include "codecs/convert.h"

namespace kvm::attention::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Rows with scales are rounded as a whole, where they are stored.
float rounded(CodecId codec, float x) {
  if (codecs::codec_of(codec).is_scaled()) {
    return x;
  }
  uint32_t bits = 0;
  put(&bits, codec, 0, x);
  return get(&bits, codec, 0);
}

// Stores n rows with scales, and leaves in `rows` what they say then. Returns their scales.
std::vector<uint16_t> store_scaled(std::vector<std::vector<float>>* rows, CodecId codec,
                                   std::byte* out) {
  std::vector<uint16_t> scales;
  for (std::vector<float>& row : *rows) {
    const auto n = static_cast<uint32_t>(row.size());
    std::byte* codes = out + scales.size() * n;
    scales.push_back(codecs::encode_row(row.data(), n, codec, codes));
    codecs::decode_row(codes, codec, &scales.back(), 0, n, row.data());
  }
  return scales;
}

}  // namespace

// Keys with a spectrum that falls, queries along the same axes: logits have a standard deviation of
// `sharpness`.
Head::Head(const HeadShape& s, uint64_t seed) : shape(s), random(seed) {
  std::normal_distribution<float> normal;
  std::vector<double> axis(s.dim_k);
  double power = 0;
  for (uint32_t d = 0; d < s.dim_k; ++d) {
    axis[d] = std::pow(1.0 + d, -0.5);
    power += axis[d] * axis[d] * axis[d] * axis[d];
  }
  const double scale_q = s.sharpness * std::sqrt(static_cast<double>(s.dim_k) / power);
  q.resize(size_t{rows()} * s.dim_k);
  for (size_t i = 0; i < q.size(); ++i) {
    q[i] =
        rounded(CodecId::kBf16, normal(random) * static_cast<float>(axis[i % s.dim_k] * scale_q));
  }
  k.resize(s.n_tokens);
  v.resize(s.n_tokens);
  for (uint64_t t = 0; t < s.n_tokens; ++t) {
    for (uint32_t d = 0; d < s.dim_k; ++d) {
      k[t].push_back(rounded(s.codec, 0.3f + normal(random) * static_cast<float>(axis[d])));
    }
    for (uint32_t d = 0; d < s.dim_v; ++d) {
      v[t].push_back(rounded(s.codec, 0.5f + normal(random)));
    }
  }
  problem.n_query = s.n_query;
  problem.group = s.group;
  problem.dim_k = s.dim_k;
  problem.dim_v = s.dim_v;
  problem.scale = 1.0f / std::sqrt(static_cast<float>(s.dim_k));
  problem.visible.query_position = s.n_tokens - std::min<uint64_t>(s.n_tokens, s.n_query);
  input.params.budget = 256;
  input.params.seed = seed;
}

void Head::build() {
  const HeadShape& s = shape;
  const uint64_t n_pages = (s.n_tokens + kPageTokens - 1) / kPageTokens + 1;
  k_rows_ = std::make_unique<Buffer>(n_pages * kPageTokens * s.dim_k * 4);
  v_rows_ = std::make_unique<Buffer>(n_pages * kPageTokens * s.dim_v * 4);
  const bool is_scaled = codecs::codec_of(s.codec).is_scaled();
  if (is_scaled) {
    k_scale_ = store_scaled(&k, s.codec, k_rows_->data());
    v_scale_ = store_scaled(&v, s.codec, v_rows_->data());
  }
  for (uint64_t t = 0; t < s.n_tokens && !is_scaled; ++t) {
    for (uint32_t d = 0; d < s.dim_k; ++d) {
      put(k_rows_->data(), s.codec, t * s.dim_k + d, k[t][d]);
    }
    for (uint32_t d = 0; d < s.dim_v; ++d) {
      put(v_rows_->data(), s.codec, t * s.dim_v + d, v[t][d]);
    }
  }
  const auto run_of = [&](uint64_t position, uint64_t n) {
    KvRun run;
    run.k = {k_rows_->data(), is_scaled ? k_scale_.data() : nullptr, s.codec};
    run.v = {v_rows_->data(), is_scaled ? v_scale_.data() : nullptr, s.codec};
    run.slot = static_cast<uint32_t>(position);
    run.position = position;
    run.n_tokens = static_cast<uint16_t>(n);
    return run;
  };
  // For the index, whole pages whatever is dropped later; for the problem, cut where tokens differ.
  std::vector<KvRun> whole;
  runs_.clear();
  for (uint64_t t = 0; t < s.n_tokens; ++t) {
    if (t % kPageTokens == 0) {
      whole.push_back(run_of(t, std::min<uint64_t>(kPageTokens, s.n_tokens - t)));
    }
    if (!dropped.empty() && dropped[t] != 0) {
      continue;
    }
    const bool joins = t % kPageTokens != 0 && !runs_.empty() &&
                       runs_.back().position + runs_.back().n_tokens == t &&
                       (transform.empty() || transform[t] == transform[t - 1]);
    if (joins) {
      ++runs_.back().n_tokens;
      continue;
    }
    runs_.push_back(run_of(t, 1));
    runs_.back().transform = transform.empty() ? uint16_t{0} : transform[t];
    if (!log_weight.empty()) {
      runs_.back().log_weight = log_weight.data() + t;
    }
  }
  // Only pages with a weight in them are weighted.
  for (KvRun& run : runs_) {
    if (run.log_weight != nullptr && std::all_of(run.log_weight, run.log_weight + run.n_tokens,
                                                 [](float w) { return w == 0; })) {
      run.log_weight = nullptr;
    }
  }
  problem.runs = runs_;
  problem.transforms = transforms;
  if (input.params.max_read_fraction == 0 && !runs_.empty()) {
    // As of a long context: so few keys are not worth a sample.
    input.params.max_read_fraction = static_cast<float>(max_read_fraction({}, problem, UINT64_MAX));
  }

  const auto n_blocks = static_cast<uint32_t>(s.n_tokens / kPageTokens);
  sketches.clear();
  hashes.clear();
  if (n_blocks > 0) {
    frame_ = hash_index::make_frame({.runs = whole, .dim_k = s.dim_k, .seed = 7}, nullptr);
    const size_t block = hash_index::block_bytes(hash_index::frame_kind(*frame_), s.dim_k);
    blocks_ = std::make_unique<Buffer>(n_blocks * block);
    for (uint32_t b = 0; b < n_blocks; ++b) {
      hash_index::encode_block(*frame_, whole[b], 0, s.dim_v, blocks_->data() + b * block);
    }
    // Two runs of the index, so that its borders are met.
    const uint32_t half = n_blocks / 2;
    sketches.push_back({0, half, frame_.get(), blocks_->data()});
    sketches.push_back({uint64_t{half} * kPageTokens, n_blocks - half, frame_.get(),
                        blocks_->data() + half * block});
  }
  if (s.with_tables) {
    planes_ = hash_index::make_planes(s.lsh, s.dim_k);
    const auto n = static_cast<uint32_t>(std::min<uint64_t>(s.n_tokens, hash_index::kMaxRunKeys));
    center_.assign(s.dim_k, 0.0f);
    for (uint64_t t = 0; t < n; ++t) {
      for (uint32_t d = 0; d < s.dim_k; ++d) {
        center_[d] += k[t][d] / static_cast<float>(n);
      }
    }
    tables_ = std::make_unique<Buffer>(hash_index::table_run_bytes(s.lsh, n));
    Buffer work(hash_index::build_scratch_bytes(*planes_, n));
    hash_index::build_tables(*planes_, whole, 0, center_.data(), 0, n, 0, s.lsh.n_tables,
                             work.data(), tables_->data());
    hashes.push_back({0, n, tables_->data(), center_.data()});
    input.index.planes = planes_.get();
  }
  input.index.sketches = sketches;
  input.index.hashes = hashes;

  q_stored_.resize(q.size());
  std::transform(q.begin(), q.end(), q_stored_.begin(), f32_to_bf16);
  problem.q = q_stored_.data();
  problem.dtype_q = Dtype::kBf16;
  problem.q_stride_head = s.dim_k;
  problem.q_stride_query = uint64_t{s.dim_k} * s.group;
  o.assign(size_t{rows()} * s.dim_v, -7.0f);
  lse.assign(rows(), -7.0f);
  problem.o = o.data();
  problem.o_stride_head = s.dim_v;
  problem.o_stride_query = uint64_t{s.dim_v} * s.group;
  problem.lse = lse.data();
  problem.lse_stride_head = 1;
  problem.lse_stride_query = s.group;
  input.problem = &problem;
}

void Head::run() {
  std::fill(o.begin(), o.end(), -7.0f);
  plan = plan_approx(input);
  if (plan.exact) {
    report = ApproxReport{};
    report.n_exact = rows();
    run_exact();
    return;
  }
  // Memory of an earlier run is taken again: what is in it must not matter.
  prepared = std::make_unique<Buffer>(plan.prepared_bytes);
  scratch = std::make_unique<Buffer>(plan.scratch_bytes);
  states = std::make_unique<Buffer>(plan.state_bytes * plan.n_shards);
  std::fill_n(prepared->data(), plan.prepared_bytes, std::byte{0xff});
  std::fill_n(states->data(), plan.state_bytes * plan.n_shards, std::byte{0xff});
  std::fill_n(scratch->data(), plan.scratch_bytes, std::byte{0xff});
  prepare_approx(input, plan, prepared->data(), scratch->data());
  std::vector<uint32_t> order(plan.n_shards);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), random);
  for (uint32_t shard : order) {
    eval_shard(input, plan, prepared->data(), shard, scratch->data(),
               states->data() + shard * plan.state_bytes);
  }
  if (!finish_approx(input, plan, prepared->data(), scratch->data(), states->data(), &report)) {
    run_exact();
    for (uint32_t row = 0; row < rows(); ++row) {
      if (!answer_is_finite(problem, row)) {
        report.err_o[row] = report.err_lse[row] = std::numeric_limits<float>::quiet_NaN();
      }
    }
  }
}

void Head::run_exact() {
  const Plan exact = make_plan(problem, input.table);
  Buffer queries(exact.prepared_bytes);
  Buffer work(exact.scratch_bytes);
  prepare_queries(problem, exact, queries.data());
  const RowRange all{0, exact.rows};
  Buffer chunks(state_bytes(problem, exact.rows) * std::max(exact.n_chunks, 1u));
  if (exact.n_chunks > 0) {
    eval_chunks(problem, exact, queries.data(), all, exact.first_chunk, exact.n_chunks, work.data(),
                chunks.data());
  }
  merge_chunks(problem, exact, all, chunks.data());
}

bool Head::sees(uint32_t row, uint64_t t) const {
  if (!dropped.empty() && dropped[t] != 0) {
    return false;
  }
  const VisibleSet visible(problem.visible, problem.n_query, 0, problem.n_query);
  return (visible.one(t / 64 * 64, row / shape.group) >> (t % 64) & 1) != 0;
}

std::vector<uint8_t> Head::seen_by(uint32_t row) const {
  const VisibleSet visible(problem.visible, problem.n_query, 0, problem.n_query);
  std::vector<uint8_t> seen(shape.n_tokens);
  uint64_t bits = 0;
  for (uint64_t t = 0; t < shape.n_tokens; ++t) {
    bits = t % 64 == 0 ? visible.one(t, row / shape.group) : bits;
    seen[t] = (bits >> (t % 64) & 1) != 0 && (dropped.empty() || dropped[t] == 0) ? 1 : 0;
  }
  return seen;
}

double Head::logit(uint32_t row, uint64_t t) const {
  const uint32_t dim = shape.dim_k;
  const QueryTransform* change =
      transforms.empty() ? nullptr : &transforms[transform.empty() ? 0 : transform[t]];
  double dot = 0;
  for (uint32_t d = 0; d < dim; ++d) {
    auto x = static_cast<double>(q[row * dim + d]);
    if (change != nullptr && change->channel_scale != nullptr) {
      x *= static_cast<double>(change->channel_scale[d]);
    }
    dot += x * static_cast<double>(k[t][d]);
  }
  double s = dot * static_cast<double>(problem.scale);
  if (problem.softcap > 0) {
    const auto cap = static_cast<double>(problem.softcap);
    s = cap * std::tanh(s / cap);
  }
  return s + (log_weight.empty() ? 0.0 : static_cast<double>(log_weight[t]));
}

void Head::reference(uint32_t row, std::vector<double>* out, double* log_sum) const {
  std::vector<std::pair<double, uint64_t>> logits;
  const float* sinks = problem.sink_logits;
  double top = sinks == nullptr ? -kInf : static_cast<double>(sinks[row % shape.group]);
  const double sink = top;
  const std::vector<uint8_t> seen = seen_by(row);
  for (uint64_t t = 0; t < shape.n_tokens; ++t) {
    if (seen[t] != 0) {
      logits.emplace_back(logit(row, t), t);
      top = std::max(top, logits.back().first);
    }
  }
  out->assign(shape.dim_v, 0.0);
  double mass = sinks == nullptr ? 0.0 : std::exp(sink - top);
  for (const auto& [s, t] : logits) {
    const double w = std::exp(s - top);
    mass += w;
    for (uint32_t d = 0; d < shape.dim_v; ++d) {
      (*out)[d] += w * static_cast<double>(v[t][d]);
    }
  }
  for (double& x : *out) {
    x = mass > 0 ? x / mass : 0.0;
  }
  *log_sum = mass > 0 ? top + std::log(mass) : -kInf;
}

double Head::norm_o(uint32_t row) const {
  double sum = 0;
  for (uint32_t d = 0; d < shape.dim_v; ++d) {
    const auto x = static_cast<double>(o[size_t{row} * shape.dim_v + d]);
    sum += x * x;
  }
  return std::sqrt(sum);
}

double Head::error_o(uint32_t row) const {
  std::vector<double> want;
  double unused = 0;
  reference(row, &want, &unused);
  double difference = 0;
  double size = 0;
  for (uint32_t d = 0; d < shape.dim_v; ++d) {
    const double e = static_cast<double>(o[size_t{row} * shape.dim_v + d]) - want[d];
    difference += e * e;
    size += want[d] * want[d];
  }
  return std::sqrt(difference / size);
}

double Head::error_lse(uint32_t row) const {
  std::vector<double> unused;
  double want = 0;
  reference(row, &unused, &want);
  return std::abs(static_cast<double>(lse[row]) - want);
}

}  // namespace kvm::attention::testing
