// SPDX-License-Identifier: Apache-2.0
// kvm_gpu_check: verifies and measures the GPU kernels. Needs a driver and libc, nothing else.
#include <cstdio>
#include <string>

#include "bench/gpu/args.h"
#include "bench/gpu/device.h"

namespace {

constexpr const char* kHelp = R"(kvm_gpu_check COMMAND [--quick] [--max-gib N]

  caps      the device, its read and copy ceilings, what a launch costs (U1, U2)
  verify    every kernel against fp64 arithmetic; --small for sanitizers
  bench     decode attention against its bars (U3), and the tails of its launches (U11)
  sweep     other tiles, stages and residencies of the decode kernel (U4)
  copies    between host and device, by size of the pieces (U5)
  gather    rows of host memory read by a kernel, by row size and blocks (U5)
  rows      rows of pages read back into host memory, and states merged that lie there (U10)
  ipc       two processes: time slices, memory by file descriptor and by handle, death of either
            side, registered memory, flags (U6 to U9)
  engine    sequences in device memory: steps, forks, graphs, moves, against fp64 arithmetic; what
            a decode step of 32 layers costs
  server    the same in memory of a second process that keeps the books, as kvmd does; and its death
  all       all of the above, in this order
  kernels   the compiled shapes and their shared memory; needs no device

Writes a line of JSON per figure: {"bar", "case", "unit", "measured", "ceiling", "limit", "pass"}
for what has a bar, {"probe", "case", "unit", "measured"} for the rest; U1 to U11 above are names of
probes. --quick takes fewer cases and repeats, --max-gib the device memory that may be used (60).
Exit status: 0; 1 when a bar is missed or a result is wrong; 2 on a CUDA error or wrong usage; 77
without a device.
)";

int run(const kvm::bench::gpu::Args& args) {
  using namespace kvm::bench::gpu;
  if (args.command == "kernels") {
    return run_kernels(args);
  }
  if (args.command == "child") {
    return run_child(args);
  }
  const std::string& c = args.command;
  const bool all = c == "all";
  if (!all && c != "caps" && c != "verify" && c != "bench" && c != "sweep" && c != "copies" &&
      c != "gather" && c != "rows" && c != "ipc" && c != "engine" && c != "server") {
    std::fprintf(stderr, "kvm_gpu_check: no command is called '%s'; --help lists them\n",
                 c.c_str());
    return 2;
  }
  if (!have_device()) {
    return kExitNoDevice;
  }
  int status = 0;
  if (all || c == "caps") {
    status |= run_caps(args);
  }
  if (all || c == "verify") {
    status |= run_verify(args);
  }
  if (all || c == "bench") {
    status |= run_bench(args);
  }
  if (all || c == "sweep") {
    status |= run_sweep(args);
  }
  if (all || c == "copies") {
    status |= run_copies(args);
  }
  if (all || c == "gather") {
    status |= run_gather(args);
  }
  if (all || c == "rows") {
    status |= run_rows(args);
  }
  if (all || c == "ipc") {
    status |= run_ipc(args);
  }
  if (all || c == "engine") {
    status |= run_engine(args);
  }
  if (all || c == "server") {
    status |= run_server(args);
  }
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  kvm::bench::gpu::Args args;
  if (!kvm::bench::gpu::parse_args(argc, argv, &args)) {
    std::fputs("kvm_gpu_check --help has the commands and options\n", stderr);
    return 2;
  }
  if (args.help) {
    std::fputs(kHelp, stdout);
    return 0;
  }
  return run(args);
}
