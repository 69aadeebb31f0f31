// SPDX-License-Identifier: Apache-2.0
#include "base/assert.h"

#include <cstdio>
#include <cstdlib>

namespace kvm {

void assertion_failed(const char* expression, const char* file, int line) {
  std::fprintf(stderr, "kvm: assertion failed: %s (%s:%d)\n", expression, file, line);
  std::abort();
}

}  // namespace kvm
