// SPDX-License-Identifier: Apache-2.0
// An engine in this process under refusals of every kind.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/faults/faults.h"
#include "tests/faults/life.h"
#include "tests/faults/loop.h"

namespace kvm::testing {
namespace {

kvm_status open_engine(kvm_client** out) {
  kvm_embedded_params params{};
  params.struct_size = sizeof(params);
  params.n_threads = 3;
  params.host_capacity_bytes = 64 << 20;
  return kvm_open_embedded(&params, out);
}

class EmbeddedFaults : public ::testing::TestWithParam<std::tuple<Refused, Until>> {
 protected:
  static void SetUpTestSuite() {
    // Measured costs would be calls that differ from life to life.
    ::setenv("KVM_COST_MODEL", "exact_bf16=13.5,exact_int8=8,scan=1.5,gather=28,start=40000", 1);
  }
};

std::vector<kvm_status> allowed_for(Refused what) {
  switch (what) {
    case Refused::kThread:
      return {KVM_ERR_LIMIT};
    case Refused::kAllocation:
    case Refused::kMapping:
      return {KVM_ERR_NO_MEMORY};
    default:
      return {};
  }
}

TEST_P(EmbeddedFaults, EachCallRefused) {
  Loop loop;
  loop.what = std::get<0>(GetParam());
  loop.until = std::get<1>(GetParam());
  loop.allowed = allowed_for(loop.what);
  Life clean(open_engine, false);
  clean.live();
  ASSERT_TRUE(clean.is_complete()) << kvm_last_error();
  {
    Life warm(open_engine, false);
    warm.live();
  }
  const Held before = held();
  const Attempt attempt = [&clean](Until until) {
    Life life(open_engine, until == Until::kOnce);
    life.live();
    Outcome outcome = life.outcome();
    outcome.complain(compare(clean.answers(), life.answers()).c_str());
    if (until == Until::kOnce && !life.is_complete()) {
      outcome.complain("the life did not come to its end");
    }
    return outcome;
  };
  run_loop(loop, attempt, [&before] {
    const Held now = held();
    return now == before
               ? std::string()
               : std::to_string(now.n_blocks - before.n_blocks) + " blocks, " +
                     std::to_string(now.mapped_bytes - before.mapped_bytes) + " mapped bytes, " +
                     std::to_string(now.n_descriptors - before.n_descriptors) +
                     " descriptors are left";
  });
}

INSTANTIATE_TEST_SUITE_P(All, EmbeddedFaults,
                         ::testing::Combine(::testing::Values(Refused::kThread, Refused::kMapping,
                                                              Refused::kAllocation),
                                            ::testing::Values(Until::kOnce, Until::kForEver)),
                         [](const auto& test) {
                           return std::string(name_of(std::get<0>(test.param))) +
                                  (std::get<1>(test.param) == Until::kOnce ? "Once" : "ForEver");
                         });

}  // namespace
}  // namespace kvm::testing
