// SPDX-License-Identifier: Apache-2.0
// The loop: refuse the first call of a kind, the second, ..., until a life in which none was.
#ifndef KVM_TESTS_FAULTS_LOOP_H_
#define KVM_TESTS_FAULTS_LOOP_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kvm.h"
#include "tests/faults/faults.h"

namespace kvm::testing {

struct Loop {
  Refused what = Refused::kAllocation;
  Until until = Until::kOnce;
  Of whose = Of::kAnyThread;
  // Statuses that a call may fail with.
  std::vector<kvm_status> allowed;
};

// What came of one life. Has its memory in itself, so that what is held can be counted beside it.
class Outcome {
 public:
  void add_failure(kvm_status status) {
    failures_[n_failures_] = status;
    n_failures_ += n_failures_ + 1 < failures_.size() ? 1 : 0;
  }
  // The first one counts.
  void complain(const char* wrong) {
    if (wrong_[0] == '\0') {
      std::strncpy(wrong_.data(), wrong, wrong_.size() - 1);
    }
  }
  std::span<const kvm_status> failures() const { return {failures_.data(), n_failures_}; }
  const char* wrong() const { return wrong_.data(); }  // "" where nothing is

 private:
  std::array<kvm_status, 32> failures_{};
  size_t n_failures_ = 0;
  std::array<char, 512> wrong_{};
};

// Once: a call is made again after it has failed, and all must be done in the end.
using Attempt = std::function<Outcome(Until until)>;

// LIMIT: runs of a loop in every build, spread evenly; all of them where KVM_FAULTS_ALL is set.
inline constexpr uint64_t kRunsInEveryBuild = 30;

// Runs the loop; each complaint is a test failure that names the call. `settled` is asked after
// each attempt, with nothing refused: "" or what is left behind.
void run_loop(const Loop& loop, const Attempt& attempt,
              const std::function<std::string()>& settled);

}  // namespace kvm::testing

#endif  // KVM_TESTS_FAULTS_LOOP_H_
