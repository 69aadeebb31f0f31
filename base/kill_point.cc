// SPDX-License-Identifier: Apache-2.0
#include "base/kill_point.h"

#include <signal.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace kvm {
namespace {

std::string_view text_of(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

}  // namespace

void reach_kill_point(std::string_view name) {
  static const std::string_view kWanted = text_of("KVM_KILL_POINT");
  if (name == kWanted) {
    ::raise(SIGKILL);
  }
}

void count_shared_store() {
  // Read each time: a test sets it in a child, after stores of the parent.
  const std::string_view wanted = text_of("KVM_KILL_AT_STORE");
  if (wanted.empty()) {
    return;
  }
  static std::atomic<uint64_t> n_stores{0};
  if (n_stores.fetch_add(1) + 1 == std::strtoull(wanted.data(), nullptr, 10)) {
    ::raise(SIGKILL);
  }
}

}  // namespace kvm
