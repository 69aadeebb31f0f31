// SPDX-License-Identifier: Apache-2.0
// scan: what building an index and scanning it costs for each key, by kind of sketch, and what
// building takes where the engine does it; the hash tables of MagicPIG for comparison.
#include <cmath>

#include "bench/approx/engine_index.h"
#include "bench/approx/passes.h"
#include "bench/approx/settings.h"
#include "bench/approx/tally.h"

namespace kvm::bench {
namespace {

using hash_index::SketchKind;

constexpr uint32_t kHeads = 8;

// One thread scans with a ScanBuffers.
struct ScanBuffers {
  ScanBuffers(uint32_t capacity, uint32_t rows, size_t query_bytes)
      : position(capacity),
        size(capacity),
        random(capacity),
        logits(size_t{capacity} * rows),
        query(query_bytes) {
    candidates = {position.data(), size.data(), random.data(), logits.data(), capacity, 0};
  }
  std::vector<uint64_t> position;
  std::vector<float> size, random, logits;
  HugeBuffer query;
  hash_index::Candidates candidates;
};

// One frame for each head, and blocks of all of its keys.
class ScanRun {
 public:
  ScanRun(const Case& c, SketchKind kind, Team& team) : case_(c), team_(team), kind_(kind) {
    const HeadData& first = c.data.heads[0];
    for (const HeadData& head : c.data.heads) {
      frames_.push_back(make_frame(head));
    }
    n_blocks_ = c.data.n_tokens / hash_index::kBlockKeys;
    block_bytes_ = hash_index::block_bytes(kind, first.dim);
    blocks_ = std::make_unique<HugeBuffer>(c.data.heads.size() * n_blocks_ * block_bytes_);
    for (uint32_t t = 0; t < team.size(); ++t) {
      buffers_.push_back(std::make_unique<ScanBuffers>(
          static_cast<uint32_t>(n_blocks_ * hash_index::kBlockKeys), first.group,
          hash_index::scan_query_bytes(*frames_[0], first.group)));
    }
  }

  double n_keys() const {
    return static_cast<double>(case_.data.heads.size() * n_blocks_ * hash_index::kBlockKeys);
  }
  double bytes_per_key() const {
    return static_cast<double>(block_bytes_) / hash_index::kBlockKeys;
  }

  double frame_seconds() {
    const double begin = now_s();
    make_frame(case_.data.heads[0]);
    return now_s() - begin;
  }

  // Heads are shared out over the threads, here and below.
  double encode_seconds() {
    return team_.run([this](uint32_t thread) {
      for (uint32_t h = thread; h < case_.data.heads.size(); h += team_.size()) {
        const HeadData& head = case_.data.heads[h];
        for (uint64_t b = 0; b < n_blocks_; ++b) {
          hash_index::encode_block(*frames_[h], head.runs[b], head.head, head.dim, block(h, b));
        }
      }
    });
  }

  double scan_seconds(uint32_t set) {
    return team_.run([this, set](uint32_t thread) {
      for (uint32_t h = thread; h < case_.data.heads.size(); h += team_.size()) {
        scan(h, set, buffers_[thread].get());
      }
    });
  }

 private:
  hash_index::FramePtr make_frame(const HeadData& head) const {
    hash_index::FrameInput input;
    input.runs = head.runs.first(std::min<size_t>(head.runs.size(), kFrameTokens / kPageTokens));
    input.head = head.head;
    input.dim_k = head.dim;
    input.seed = 1;
    return hash_index::make_frame(input, &kind_);
  }

  std::byte* block(uint32_t head, uint64_t b) {
    return blocks_->data() + (head * n_blocks_ + b) * block_bytes_;
  }

  // About one key in a hundred is drawn: c = m / sum w |v|, |v| being about sqrt(dim).
  void scan(uint32_t h, uint32_t set, ScanBuffers* buffers) {
    const HeadData& head = case_.data.heads[h];
    float q[hash_index::kMaxRows * hash_index::kMaxSketchDim];
    hash_index::DrawParams params;
    params.seed = 1;
    const double wanted = 0.01 * case_.data.n_tokens / std::sqrt(head.dim);
    for (uint32_t g = 0; g < head.group; ++g) {
      params.log_c[g] = static_cast<float>(std::log(wanted) - case_.answers[h][set].lse[g]);
    }
    for (size_t i = 0; i < size_t{head.group} * head.dim; ++i) {
      q[i] = head.to_float(head.q_rows(set)[i]);
    }
    hash_index::prepare_scan(*frames_[h], {.q = q, .n = head.group, .scale = head.scale},
                             buffers->query.data());
    const hash_index::SketchSpan span{frames_[h].get(), buffers->query.data(), block(h, 0),
                                      static_cast<uint32_t>(n_blocks_), 0};
    hash_index::DrawSums sums;
    buffers->candidates.n = 0;
    hash_index::scan_draw({&span, 1}, head.group, params, &buffers->candidates, &sums);
  }

  const Case& case_;
  Team& team_;
  SketchKind kind_;
  std::vector<hash_index::FramePtr> frames_;
  uint64_t n_blocks_ = 0;
  size_t block_bytes_ = 0;
  std::unique_ptr<HugeBuffer> blocks_;
  std::vector<std::unique_ptr<ScanBuffers>> buffers_;
};

uint32_t index_kind(SketchKind kind) {
  switch (kind) {
    case SketchKind::kBits1:
      return KVM_INDEX_SKETCH_1BIT;
    case SketchKind::kLead8Bits1:
      return KVM_INDEX_SKETCH_8I8;
    case SketchKind::kBits2:
      return KVM_INDEX_SKETCH_2BIT;
  }
  return KVM_INDEX_SKETCH;
}

void measure_sketches(const Options& options, const Case& c, uint32_t threads, Report* report) {
  Team team(threads);
  ExactPass exact(c.data, team);
  constexpr uint32_t kBuilds = 3;  // through the engine: of 0.4 GB of keys and values each
  for (const SketchKind kind : {SketchKind::kBits1, SketchKind::kLead8Bits1, SketchKind::kBits2}) {
    ScanRun run(c, kind, team);
    std::vector<double> encode, scan, exact_seconds, frame;
    run.encode_seconds();
    for (uint32_t r = 0; r < options.repeats; ++r) {
      const uint32_t set = r % c.data.heads[0].n_sets();
      // In between, the exact step leaves the caches full of other rows.
      exact_seconds.push_back(exact.run(set));
      scan.push_back(run.scan_seconds(set));
      frame.push_back(run.frame_seconds());
      if (r < 7) {
        encode.push_back(run.encode_seconds());
      }
    }
    EngineIndex in_engine(c.data, index_kind(kind), threads);
    std::vector<double> build;
    for (uint32_t r = 0; r < kBuilds; ++r) {
      build.push_back(in_engine.build_seconds());
    }
    // The time of one core: all of them are busy all the time.
    const double ns = 1e9 * threads / run.n_keys();
    report->add(
        {{"data", c.data.name},
         {"tokens", c.data.n_tokens},
         {"threads", threads},
         {"code", kind_name(kind)},
         {"bytes_per_key", run.bytes_per_key()},
         {"encode_ns_per_key", median(encode) * ns},
         {"index_build_ns_per_key_core", median(build) * 1e9 * threads / in_engine.n_keys()},
         {"index_bytes_per_key", in_engine.bytes_per_key()},
         {"frame_ms", median(frame) * 1e3},
         {"scan_ns_per_key", median(scan) * ns},
         {"scan_gbps", run.n_keys() * run.bytes_per_key() / median(scan) * 1e-9},
         {"exact_ns_per_key", median(exact_seconds) * ns}});
  }
}

void measure_tables(const Case& c, const hash_index::LshParams& params, uint32_t threads,
                    Report* report) {
  const double begin = now_s();
  const auto tables = build_tables(c.data, params, threads);
  const double seconds = now_s() - begin;
  report->add(
      {{"data", c.data.name},
       {"tokens", c.data.n_tokens},
       {"threads", threads},
       {"code", lsh_name(params)},
       {"bytes_per_key", bytes_per_token(c.data, tables)},
       {"encode_ns_per_key",
        seconds * 1e9 * threads / static_cast<double>(c.data.heads.size()) / c.data.n_tokens}});
}

}  // namespace

int run_scan(const Options& options) {
  Report report("scan", options);
  const uint32_t threads = thread_count(options);
  for (const std::string& data : chosen_data(options, {"model"})) {
    for (const uint32_t tokens : chosen_tokens(options, data, {98304})) {
      DataSpec spec;
      spec.name = data;
      spec.tokens = tokens;
      spec.heads = kHeads;
      spec.sets = 2;
      const Case c = make_case(spec, threads, false);
      measure_sketches(options, c, 1, &report);
      if (threads > 1) {
        measure_sketches(options, c, threads, &report);
      }
      for (const auto& params : lsh_choices(options.quick)) {
        measure_tables(c, params, threads, &report);
      }
    }
  }
  report.note("nanoseconds are of one core; a step of four q heads for each kv head");
  return report.finish();
}

}  // namespace kvm::bench
