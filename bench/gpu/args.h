// SPDX-License-Identifier: Apache-2.0
// The sub-commands of kvm_gpu_check share this: options, lines of JSON, statistics.
#ifndef KVM_BENCH_GPU_ARGS_H_
#define KVM_BENCH_GPU_ARGS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace kvm::bench::gpu {

// ctest and scripts take it for "skipped".
inline constexpr int kExitNoDevice = 77;

struct Args {
  std::string command;
  uint64_t max_bytes = 60ull << 30;  // of device memory that a measurement may take
  bool quick = false;                // fewer cases, fewer repeats
  bool small = false;                // verify: as little as sanitizers can bear
  bool help = false;                 // asked for, in place of a command or behind one
  std::string role;                  // of a child process
  std::vector<std::string> rest;
};

// False where there is no command or an option is unknown; says which on stderr.
bool parse_args(int argc, char** argv, Args* out);

// One line on stdout: a bar that is met or not.
// what: the unit of measured, ceiling and limit. at_least: whether the limit is a lower one.
struct Bar {
  std::string bar;
  std::string name;  // the case
  std::string unit;
  double measured = 0;
  double ceiling = 0;  // 0 = none
  double limit = 0;
  bool at_least = true;
};
// Returns whether it is met, and counts it for bars_missed().
bool print_bar(const Bar& bar);
int bars_missed();

// One line on stdout: a figure without a bar.
void print_figure(const std::string& probe, const std::string& name, const std::string& unit,
                  double value);
void print_fact(const std::string& probe, const std::string& name, const std::string& value);

double median(std::vector<double> values);
// The value below which the given part of them lies.
double quantile(std::vector<double> values, double part);

}  // namespace kvm::bench::gpu

#endif  // KVM_BENCH_GPU_ARGS_H_
