// SPDX-License-Identifier: Apache-2.0
#include "bench/approx/index.h"

#include <algorithm>
#include <cmath>

namespace kvm::bench {

using attention::HashedRun;
using attention::SketchedRun;
using hash_index::kBlockKeys;
using hash_index::SketchKind;

namespace {

constexpr uint64_t kUnsettledTokens = 64;  // at the end of a sequence: not indexed

std::vector<float> observed_queries(const HeadData& head, uint32_t n_sets) {
  std::vector<float> out;
  const size_t n = size_t{std::min(n_sets, head.n_sets())} * head.group * head.dim;
  for (size_t i = 0; i < n; ++i) {
    out.push_back(head.to_float(head.q[i]));
  }
  return out;
}

// Mean of the keys of [begin, end), rounded to bf16 as the original does.
std::vector<float> mean_key(const HeadData& head, uint64_t begin, uint64_t end) {
  std::vector<double> sums(head.dim);
  for (uint64_t t = begin; t < end; ++t) {
    const uint16_t* k = head.k_row(t);
    for (uint32_t j = 0; j < head.dim; ++j) {
      sums[j] += head.to_float(k[j]);
    }
  }
  std::vector<float> mean(head.dim);
  for (uint32_t j = 0; j < head.dim; ++j) {
    const double x = sums[j] / static_cast<double>(end - begin);
    mean[j] = bf16_to_f32(f32_to_bf16(static_cast<float>(x)));
  }
  return mean;
}

// The tokens that the frame of the blocks [first, first + n) is made from.
std::vector<KvRun> frame_runs(const HeadData& head, uint64_t first, uint64_t n, bool fresh) {
  constexpr uint64_t kFrameBlocks = kFrameTokens / kBlockKeys;
  KvRuns runs = head.kernel_runs.subspan(first, n);
  if (!fresh) {
    runs = first == 0 ? runs.first(std::min(n, kFirstFrameTokens / kBlockKeys))
                      : head.kernel_runs.subspan(first - kFrameBlocks, kFrameBlocks);
  }
  std::vector<KvRun> out(runs.begin(), runs.end());
  if (out[0].position == 0) {
    skip_tokens(&out[0], kSinkTokens);
  }
  return out;
}

}  // namespace

const char* kind_name(SketchKind kind) {
  switch (kind) {
    case SketchKind::kBits1:
      return "1b";
    case SketchKind::kLead8Bits1:
      return "8i8+1b";
    case SketchKind::kBits2:
      return "2b";
  }
  return "?";
}

Sketches::Sketches(const HeadData& head, const SketchOptions& options) {
  constexpr uint64_t kFrameBlocks = kFrameTokens / kBlockKeys;
  const uint64_t n_tokens = head.runs.back().position + head.runs.back().n_tokens;
  const uint64_t n_blocks = (n_tokens - kUnsettledTokens) / kBlockKeys;
  const std::vector<float> queries = observed_queries(head, options.n_observed);
  for (uint64_t first = 0; first < n_blocks; first += kFrameBlocks) {
    hash_index::FrameInput input;
    const uint64_t n = std::min(kFrameBlocks, n_blocks - first);
    const std::vector<KvRun> runs = frame_runs(head, first, n, options.fresh);
    input.runs = runs;
    if (!options.fresh && !frames_.empty()) {
      input.previous = frames_.back().get();
    }
    input.head = head.head;
    input.dim_k = head.dim;
    input.queries = queries;
    input.seed = options.seed;
    frames_.push_back(hash_index::make_frame(input, options.kind ? &*options.kind : nullptr));
    SketchedRun run;
    run.position = first * kBlockKeys;
    run.n_blocks = static_cast<uint32_t>(n);
    run.frame = frames_.back().get();
    size_bytes_ += hash_index::frame_bytes(*run.frame);
    code_bytes_ += n * hash_index::block_bytes(hash_index::frame_kind(*run.frame), head.dim);
    runs_.push_back(run);
  }
  n_keys_ = n_blocks * kBlockKeys;
  size_bytes_ += code_bytes_;
  encode(head);
}

void Sketches::encode(const HeadData& head) {
  blocks_ = std::make_unique<HugeBuffer>(code_bytes_);
  std::byte* at = blocks_->data();
  for (SketchedRun& run : runs_) {
    run.blocks = at;
    for (uint32_t b = 0; b < run.n_blocks; ++b) {
      hash_index::encode_block(*run.frame, head.kernel_runs[run.position / kBlockKeys + b],
                               head.head, head.dim, at);
      at += hash_index::block_bytes(hash_index::frame_kind(*run.frame), head.dim);
    }
  }
}

std::string Sketches::kind_name() const {
  const SketchKind first = hash_index::frame_kind(*runs_.front().frame);
  const bool same = std::all_of(runs_.begin(), runs_.end(), [&](const SketchedRun& run) {
    return hash_index::frame_kind(*run.frame) == first;
  });
  return same ? bench::kind_name(first) : "mixed";
}

LshTables::LshTables(const HeadData& head, hash_index::PlanesPtr planes,
                     const hash_index::LshParams& params)
    : planes_(std::move(planes)), params_(params) {
  const uint64_t n_tokens = head.runs.back().position + head.runs.back().n_tokens;
  for (uint64_t first = 0; first < n_tokens; first += hash_index::kMaxRunKeys) {
    HashedRun run;
    run.position = first;
    run.n_keys =
        static_cast<uint32_t>(std::min<uint64_t>(hash_index::kMaxRunKeys, n_tokens - first));
    centers_.push_back(mean_key(head, first, first + run.n_keys));
    const size_t bytes = hash_index::table_run_bytes(params, run.n_keys);
    size_bytes_ += bytes;
    tables_.push_back(std::make_unique<HugeBuffer>(bytes));
    const HugeBuffer scratch(hash_index::build_scratch_bytes(*planes_, run.n_keys));
    hash_index::build_tables(*planes_, head.kernel_runs, head.head, centers_.back().data(), first,
                             run.n_keys, 0, params.n_tables, scratch.data(),
                             tables_.back()->data());
    run.tables = tables_.back()->data();
    run.center = centers_.back().data();
    runs_.push_back(run);
  }
}

LshTables::Candidates LshTables::lookup(const HeadData& head, uint32_t set) const {
  std::vector<float> q(size_t{head.group} * head.dim);
  for (size_t i = 0; i < q.size(); ++i) {
    q[i] = head.to_float(head.q_rows(set)[i]);
  }
  std::vector<uint16_t> codes(size_t{head.group} * params_.n_tables);
  hash_index::hash_queries(*planes_, q.data(), head.group, codes.data());
  Candidates out;
  out.ids.resize(head.group);
  out.inclusion.resize(head.group);
  for (size_t run = 0; run < runs_.size() && runs_[run].position < head.n_visible(set); ++run) {
    look_up_run(head, set, run, codes.data(), &out);
  }
  return out;
}

void LshTables::look_up_run(const HeadData& head, uint32_t set, size_t index, const uint16_t* codes,
                            Candidates* out) const {
  const HashedRun& run = runs_[index];
  const auto n_live =
      static_cast<uint32_t>(std::min<uint64_t>(run.n_keys, head.n_visible(set) - run.position));
  const HugeBuffer scratch(hash_index::lookup_scratch_bytes(run.n_keys, head.group));
  std::vector<hash_index::LshCandidate> found(n_live);
  uint64_t ids_read = 0;
  found.resize(hash_index::lookup(*planes_, run.tables, run.n_keys, n_live, codes, head.group,
                                  scratch.data(), found.data(), &ids_read));
  out->bytes_read += 2.0 * static_cast<double>(ids_read) + 8.0 * params_.n_tables * head.group;
  for (const auto& candidate : found) {
    const uint16_t* k = head.k_row(run.position + candidate.id);
    for (uint32_t g = 0; g < head.group; ++g) {
      if ((candidate.rows >> g & 1) == 0) {
        continue;
      }
      const uint16_t* q = head.q_rows(set) + size_t{g} * head.dim;
      double qk = 0, qq = 0, kk = 0;
      for (uint32_t j = 0; j < head.dim; ++j) {
        const double x = head.to_float(q[j]);
        const double y = double{head.to_float(k[j])} - run.center[j];
        qk += x * y;
        qq += x * x;
        kk += y * y;
      }
      const double cosine = qk / std::sqrt(std::max(qq * kk, 1e-300));
      out->ids[g].push_back(run.position + candidate.id);
      out->inclusion[g].push_back(hash_index::inclusion_probability(cosine, params_));
    }
  }
}

attention::HeadIndex make_index(const Sketches* sketches, const LshTables* tables) {
  attention::HeadIndex index;
  if (sketches != nullptr) {
    index.sketches = sketches->runs();
  }
  if (tables != nullptr) {
    index.hashes = tables->runs();
    index.planes = tables->planes();
  }
  return index;
}

}  // namespace kvm::bench
