// SPDX-License-Identifier: Apache-2.0
#include "tests/faults/loop.h"

#include <gtest/gtest.h>
#include <stdio.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

namespace kvm::testing {
namespace {

bool is_leaking() {
#if defined(__SANITIZE_ADDRESS__)
  return __lsan_do_recoverable_leak_check() != 0;
#else
  return false;
#endif
}

// How many calls of the kind a life has in which none is refused.
uint64_t count_calls(const Loop& loop, const Attempt& attempt) {
  arm(loop.what, UINT64_MAX, loop.until, loop.whose);
  const Outcome outcome = attempt(loop.until);
  const Seen seen = disarm();
  EXPECT_STREQ(outcome.wrong(), "") << "with nothing refused";
  EXPECT_TRUE(outcome.failures().empty()) << "with nothing refused";
  return seen.n_calls;
}

// "" or what is wrong.
std::string judge(const Loop& loop, const Outcome& outcome) {
  for (const kvm_status status : outcome.failures()) {
    if (std::find(loop.allowed.begin(), loop.allowed.end(), status) == loop.allowed.end()) {
      return std::string("a call failed with ") + kvm_status_name(status);
    }
  }
  return outcome.wrong();
}

// By the status, without its sign.
using Tally = std::array<uint64_t, 128>;

void print_summary(const Loop& loop, uint64_t n_runs, uint64_t n, const Tally& tally) {
  std::printf("%-10s %-8s %4llu runs to call %llu:", name_of(loop.what),
              loop.until == Until::kOnce ? "once" : "for ever",
              static_cast<unsigned long long>(n_runs), static_cast<unsigned long long>(n));
  for (size_t i = 0; i < tally.size(); ++i) {
    if (tally[i] != 0) {
      std::printf(" %s x%llu", kvm_status_name(-static_cast<kvm_status>(i)),
                  static_cast<unsigned long long>(tally[i]));
    }
  }
  std::printf("\n");
}

}  // namespace

void run_loop(const Loop& loop, const Attempt& attempt,
              const std::function<std::string()>& settled) {
  // Twice: what is made once a process is there after the first.
  count_calls(loop, attempt);
  const uint64_t n_calls = count_calls(loop, attempt);
  ASSERT_EQ(settled(), "");
  const bool all = std::getenv("KVM_FAULTS_ALL") != nullptr;
  const uint64_t step = all ? 1 : 1 + n_calls / kRunsInEveryBuild;
  const char* first = std::getenv("KVM_FAULTS_FIRST");
  uint64_t n = first == nullptr ? 1 : std::strtoull(first, nullptr, 10);
  uint64_t n_runs = 0;
  Tally tally{};
  for (;; n += step) {
    arm(loop.what, n, loop.until, loop.whose);
    const Outcome outcome = attempt(loop.until);
    const Seen seen = disarm();
    ++n_runs;
    for (const kvm_status status : outcome.failures()) {
      ++tally[static_cast<size_t>(-status)];
    }
    EXPECT_EQ(judge(loop, outcome), "") << name_of(loop.what) << " refused at call " << n
                                        << (loop.until == Until::kOnce ? "" : " and from there on");
    ASSERT_EQ(settled(), "") << name_of(loop.what) << " refused at call " << n;
    if (seen.n_refused == 0) {
      EXPECT_TRUE(outcome.failures().empty());
      break;
    }
    ASSERT_LT(n, 8 * n_calls + 1000) << "the loop does not come to an end";
  }
  print_summary(loop, n_runs, n, tally);
  EXPECT_FALSE(is_leaking()) << name_of(loop.what);
}

}  // namespace kvm::testing
