// SPDX-License-Identifier: Apache-2.0
// A libFuzzer program of the target KVM_FUZZ_TARGET.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const kvm::testing::FuzzTarget* const kTarget =
      kvm::testing::find_fuzz_target(KVM_FUZZ_TARGET);
  kTarget->run({data, size});
  return 0;
}
