// SPDX-License-Identifier: Apache-2.0
// A libFuzzer program of the target KVM_FUZZ_TARGET.
#include <spdlog/sinks/null_sink.h>
#include <spdlog/spdlog.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tests/fuzz/targets.h"

// What the targets log is formatted, and goes nowhere.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("fuzz", std::make_shared<spdlog::sinks::null_sink_mt>()));
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const kvm::testing::FuzzTarget* const kTarget =
      kvm::testing::find_fuzz_target(KVM_FUZZ_TARGET);
  kTarget->run({data, size});
  return 0;
}
