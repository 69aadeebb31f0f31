// SPDX-License-Identifier: Apache-2.0
// What models/house/estimators.py says of the sample that a head drew in its last run.
#ifndef KVM_TESTS_UNIT_ATTENTION_APPROX_REFERENCE_H_
#define KVM_TESTS_UNIT_ATTENTION_APPROX_REFERENCE_H_

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "attention/sampled/sample.h"
#include "tests/unit/attention/approx_rig.h"

namespace kvm::attention::testing {

// Candidates that the last run of a head drew, by shard.
SampleState sample_of(const Head& head, uint32_t shard);

// What a scan says of all keys of R: by position, logits of all rows and then |v|.
std::map<uint64_t, std::vector<double>> scan_all(const Head& head);

struct Want {
  std::vector<double> o;
  double lse = 0;
  double sigma_o = 0;
  double sigma_lse = 0;
  double noise = 0;
  double bar = 0;  // relative
};

// sampled_head and error_bar of models/house/estimators.py, with the candidates of the last run.
Want reference_of(const Head& head, uint32_t row);
// That the last answers, bars and noise of all rows are those.
void expect_reference(const Head& head, double tolerance);

// Positions that the last run drew.
std::set<uint64_t> drawn_by(const Head& head);

}  // namespace kvm::attention::testing

#endif  // KVM_TESTS_UNIT_ATTENTION_APPROX_REFERENCE_H_
