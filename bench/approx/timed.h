// SPDX-License-Identifier: Apache-2.0
// Approximate steps timed against exact ones: each approximate decode step of one layer comes right
// after an exact one over the same heads, which also leaves the caches full of other rows.
#ifndef KVM_BENCH_APPROX_TIMED_H_
#define KVM_BENCH_APPROX_TIMED_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/approx/passes.h"
#include "bench/approx/settings.h"
#include "bench/approx/tally.h"
#include "bench/harness.h"

namespace kvm::bench {

// One thing that is timed.
struct Rival {
  std::string mode;
  std::string code;
  std::string rows = "bf16";
  attention::ApproxParams params;
  double budget = 0;  // share of the keys
  double index_bytes_per_token = 0;
  std::unique_ptr<ApproxPass> pass;  // null: exact_pass
  std::unique_ptr<ExactPass> exact_pass;
  std::vector<double> seconds, exact_seconds;
  std::unique_ptr<Tally> tally = std::make_unique<Tally>();
};

// Heads of one layer, their reference, and the exact pass that everything is compared with.
class TimedLayer {
 public:
  TimedLayer(const Options& options, const std::string& data, uint32_t tokens);
  Case& data() { return case_; }
  uint32_t n_sets() const { return case_.data.heads[0].n_sets(); }
  uint32_t threads() const { return team_.size(); }
  Team& team() { return team_; }

  // A pass of a mode. indexes: alive as long as the rival.
  Rival make_rival(std::string mode, std::string code, const attention::ApproxParams& params,
                   const std::vector<attention::HeadIndex>& indexes);
  // The smallest budget whose mean error over the query sets is at most `error`, found by halving.
  double find_budget(const attention::ApproxParams& params,
                     const std::vector<attention::HeadIndex>& indexes, double error);
  // Times the rivals in turn and adds up their errors.
  void time(std::vector<Rival>* rivals);
  // Errors only, over all query sets.
  void add_errors(ApproxPass* pass, Tally* tally);
  void add_row(Report* report, const Rival& rival,
               std::vector<std::pair<std::string, nlohmann::json>> more = {}) const;

 private:
  double run_rival(Rival* rival, uint32_t set);

  const Options& options_;
  Team team_;
  Case case_;
  std::unique_ptr<ExactPass> exact_;
};

}  // namespace kvm::bench

#endif  // KVM_BENCH_APPROX_TIMED_H_
