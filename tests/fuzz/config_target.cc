// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <unistd.h>

#include "base/assert.h"
#include "daemon/options.h"
#include "ipc/fd.h"
#include "tests/fuzz/targets.h"

namespace kvm::testing {
namespace {

Result<daemon::LoadedOptions> load(std::string_view text) {
  const ipc::Fd file(::memfd_create("config", MFD_CLOEXEC));
  KVM_ASSERT(::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  return daemon::load_options({"--config", "/proc/self/fd/" + std::to_string(file.get())},
                              [](const std::string&) { return std::nullopt; }, {});
}

// 024 and 24, yes and true.
bool mean_the_same(const daemon::OptionRow& row, const std::string& a, const std::string& b) {
  if (std::holds_alternative<daemon::IntegerField>(row.field)) {
    return a == b || (daemon::parse_integer(a).has_value() &&
                      daemon::parse_integer(a) == daemon::parse_integer(b));
  }
  if (std::holds_alternative<daemon::BoolField>(row.field)) {
    return daemon::parse_bool(a) == daemon::parse_bool(b);
  }
  return a == b;
}

}  // namespace

// What is accepted and printed is accepted again, and means the same.
void run_config(std::span<const uint8_t> input) {
  const Result<daemon::LoadedOptions> first =
      load({reinterpret_cast<const char*>(input.data()), input.size()});
  if (!first.is_ok()) {
    KVM_ASSERT(!first.status().message().empty());
    return;
  }
  const Result<daemon::LoadedOptions> second = load(daemon::print_options(first.value()));
  KVM_ASSERT(second.is_ok());
  for (size_t i = 0; i < first.value().settings.size(); ++i) {
    KVM_ASSERT(mean_the_same(daemon::option_rows()[i], first.value().settings[i].text,
                             second.value().settings[i].text));
  }
}

}  // namespace kvm::testing
