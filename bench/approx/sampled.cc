// SPDX-License-Identifier: Apache-2.0
// sampled: sampled, verified and TopK decode steps against exact ones, all cores.
#include "bench/approx/timed.h"

namespace kvm::bench {
namespace {

using attention::ApproxMode;
using attention::ApproxParams;
using attention::Proposal;

// The error at which sampling is quoted.
double target_error(const std::string& data) {
  return data == "real" ? 0.065 : data == "diffuse" ? 0.10 : 0.03;
}

ApproxParams make_params(ApproxMode mode, uint64_t budget) {
  ApproxParams params;
  params.mode = mode;
  params.proposal = Proposal::kSketch;
  params.budget = budget;
  params.eps = 0.03f;
  params.delta = 0.1f;
  params.seed = 1;
  return params;
}

class SampledRun {
 public:
  SampledRun(const Options& options, const std::string& data, uint32_t tokens)
      : options_(options), layer_(options, data, tokens), target_(target_error(data)) {}

  void run(Report* report) {
    DataSet& data = layer_.data().data;
    const SketchOptions sketch_options{{}, options_.observed};
    const auto sketches = build_sketches(data, sketch_options, layer_.threads());
    add_exact("bf16");
    add_sketched(sketches, "bf16");
    data.use_int8_rows(layer_.threads());
    const auto int8_sketches = build_sketches(data, sketch_options, layer_.threads());
    add_sketched(int8_sketches, "int8");
    add_exact("int8");
    data.use_own_rows();
    layer_.time(&rivals_);
    for (const Rival& rival : rivals_) {
      layer_.add_row(report, rival);
    }
  }

 private:
  using SketchList = std::vector<std::unique_ptr<Sketches>>;

  void add(const std::string& mode, const ApproxParams& params, const SketchList& sketches,
           const std::string& rows) {
    Rival rival = layer_.make_rival(mode, sketches[0]->kind_name(), params, indexes_of(sketches));
    rival.rows = rows;
    rival.index_bytes_per_token = bytes_per_token(layer_.data().data, sketches);
    rivals_.push_back(std::move(rival));
  }

  void add_sketched(const SketchList& sketches, const std::string& rows) {
    const double n = layer_.data().data.n_tokens;
    ApproxParams params = make_params(ApproxMode::kSampled, 0);
    const double budget = layer_.find_budget(params, indexes_of(sketches), target_);
    params.budget = static_cast<uint64_t>(budget * n);
    add("sampled", params, sketches, rows);
    add("sampled_eps", make_params(ApproxMode::kSampled, 0), sketches, rows);
    add("verified", make_params(ApproxMode::kVerified, 0), sketches, rows);
    if (rows != "bf16" || options_.quick) {
      return;
    }
    for (const double share : {0.0025, 0.005, 0.01, 0.02, 0.05}) {
      const auto count = static_cast<uint64_t>(share * n);
      add("sampled", make_params(ApproxMode::kSampled, count), sketches, rows);
      add("topk", make_params(ApproxMode::kTopK, count), sketches, rows);
    }
  }

  // REQUIRES: these rows are in use.
  void add_exact(const std::string& rows) {
    Rival rival;
    rival.mode = "exact";
    rival.code = "none";
    rival.rows = rows;
    rival.exact_pass = std::make_unique<ExactPass>(layer_.data().data, layer_.team());
    rivals_.push_back(std::move(rival));
  }

  const Options& options_;
  TimedLayer layer_;
  double target_;
  std::vector<Rival> rivals_;
};

}  // namespace

int run_sampled(const Options& options) {
  Report report("sampled", options);
  for (const std::string& data : chosen_data(options, {"model", "real"})) {
    const std::vector<uint32_t> lengths = data == "model"
                                              ? std::vector<uint32_t>{32768, 98304, 131072}
                                              : std::vector<uint32_t>{98304};
    for (const uint32_t tokens : chosen_tokens(options, data, lengths)) {
      SampledRun(options, data, tokens).run(&report);
    }
  }
  return report.finish();
}

}  // namespace kvm::bench
