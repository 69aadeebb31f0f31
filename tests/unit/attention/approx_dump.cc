// SPDX-License-Identifier: Apache-2.0
// Answers one query set of a record by sampling and prints, as JSON, what the answer was made from:
// for approx_numpy_test.py, which computes the same with models/house/estimators.py.
//
//   attention_approx_dump FILE.kvrec GROUP QUERY BUDGET SEED
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "attention/sampled/core.h"
#include "attention/sampled/sample.h"
#include "bench/recorded/record_file.h"
#include "codecs/codec.h"
#include "tests/unit/attention/approx_rig.h"

namespace kvm::attention {
namespace {

using testing::Head;
using testing::HeadShape;

void read_rows(const bench::RecordedArray& from, uint64_t first, float* to, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) {
    from.read_row(first + i, to + i * from.head_dim);
  }
}

Head read_head(const bench::RecordFile& file, uint32_t group_index, uint32_t query) {
  const bench::RecordedGroup& group = file.groups()[group_index];
  HeadShape shape;
  shape.n_tokens = static_cast<uint64_t>(file.query_steps()[query]) + 1;
  shape.group = static_cast<uint32_t>(group.q_heads.size());
  shape.dim_k = shape.dim_v = file.head_dim();
  shape.codec = codecs::codec_of_tensor(group.k.dtype);
  Head head(shape, 1);
  read_rows(group.q, uint64_t{query} * shape.group, head.q.data(), shape.group);
  for (uint64_t t = 0; t < shape.n_tokens; ++t) {
    read_rows(group.k, t, head.k[t].data(), 1);
    read_rows(group.v, t, head.v[t].data(), 1);
  }
  head.problem.scale = static_cast<float>(file.softmax_scale());
  head.problem.fp32_weights = true;
  return head;
}

// Positions of R, the logits that a scan estimates for them, and |v|.
void add_scanned(const Head& head, const Context& c, nlohmann::json* out) {
  std::vector<uint64_t> positions;
  std::vector<std::vector<float>> logits(c.rows);
  std::vector<float> norms;
  for_stretches_in(c, 0, UINT64_MAX, [&](const Use& use, const Stretch& stretch) {
    const SketchedRun& run = head.sketches[stretch.index_run];
    const hash_index::SketchSpan span{.frame = run.frame,
                                      .query = c.prepared.queries + use.query_at,
                                      .blocks = run.blocks,
                                      .n_blocks = run.n_blocks,
                                      .position = run.position};
    for (uint64_t t = stretch.position; t < stretch.end(); t += kPageTokens) {
      std::vector<float> block(size_t{c.rows} * kPageTokens), norm(kPageTokens);
      hash_index::scan_logits(span, c.rows, static_cast<uint32_t>((t - run.position) / kPageTokens),
                              block.data(), norm.data());
      for (uint32_t i = 0; i < kPageTokens; ++i) {
        positions.push_back(t + i);
        norms.push_back(norm[i]);
        for (uint32_t r = 0; r < c.rows; ++r) {
          logits[r].push_back(block[r * kPageTokens + i]);
        }
      }
    }
  });
  (*out)["positions"] = positions;
  (*out)["logits"] = logits;
  (*out)["norms"] = norms;
}

nlohmann::json describe(const Head& head) {
  nlohmann::json out;
  const Context c = make_context(head.input, head.plan, head.prepared->data());
  add_scanned(head, c, &out);
  std::vector<uint64_t> drawn;
  std::vector<float> drawn_random;
  std::vector<uint64_t> told;
  for (uint32_t shard = 0; shard < head.plan.n_shards; ++shard) {
    SampleState s =
        sample_state(c, head.states->data() + shard * head.plan.state_bytes, head.scratch->data());
    const auto* log_c = s.head->log_c;
    told.insert(told.end(), s.told.position, s.told.position + s.told.n);
    out["log_c"] = std::vector<float>(log_c, log_c + head.rows());
    for (uint32_t i = 0; i < s.head->n_candidates; ++i) {
      if (s.candidates.random[i] < s.candidates.size[i]) {
        drawn.push_back(s.candidates.position[i]);
        drawn_random.push_back(s.candidates.random[i]);
      }
    }
  }
  out["drawn"] = drawn;
  out["told"] = told;
  out["random"] = drawn_random;
  const auto rows = [&](const float* x) { return std::vector<float>(x, x + head.rows()); };
  out["o"] = head.o;
  out["lse"] = head.lse;
  out["err_o"] = rows(&head.report.err_o[0]);
  out["noise"] = rows(&head.report.noise[0]);
  return out;
}

int run(char** arguments) {
  Result<bench::RecordFile> file = bench::RecordFile::open(arguments[1]);
  const auto number = [&](int i) { return std::strtoull(arguments[i], nullptr, 10); };
  const bool is_there = file.is_ok() && number(2) < file.value().groups().size() &&
                        number(3) < file.value().n_queries();
  if (!is_there) {
    const std::string why(file.is_ok() ? "no such group or query" : file.status().message());
    std::fprintf(stderr, "%s\n", why.c_str());
    return 1;
  }
  Head head =
      read_head(file.value(), static_cast<uint32_t>(number(2)), static_cast<uint32_t>(number(3)));
  head.input.params.budget = number(4);
  head.input.params.seed = number(5);
  head.input.params.delta = 0.01f;
  head.build();
  head.run();
  if (head.plan.exact) {
    std::fprintf(stderr, "nothing was left to sample\n");
    return 1;
  }
  std::printf("%s\n", describe(head).dump().c_str());
  return 0;
}

}  // namespace
}  // namespace kvm::attention

int main(int n_arguments, char** arguments) {
  if (n_arguments != 6) {
    std::fprintf(stderr, "usage: %s FILE.kvrec GROUP QUERY BUDGET SEED\n", arguments[0]);
    return 2;
  }
  return kvm::attention::run(arguments);
}
