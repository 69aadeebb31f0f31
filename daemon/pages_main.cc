// SPDX-License-Identifier: Apache-2.0
// A program of the build: writes what is installed and made from the table of options.
//
//   kvmd_pages config               the configuration file, all commented out
//   kvmd_pages flags|keys TEMPLATE  a manual page: TEMPLATE with @OPTIONS@ and @VERSION@ replaced
#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

#include "daemon/options.h"
#include "kvm.h"

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "config" && argc == 2) {
    fmt::print("{}", kvm::daemon::default_file());
    return 0;
  }
  if ((what != "flags" && what != "keys") || argc != 3) {
    fmt::print(stderr, "usage: kvmd_pages config | kvmd_pages flags|keys TEMPLATE\n");
    return 2;
  }
  std::ifstream file(argv[2]);
  std::string line;
  bool replaced = false;
  while (std::getline(file, line)) {
    if (line == "@OPTIONS@") {
      fmt::print("{}", kvm::daemon::options_roff(what == "keys"));
      replaced = true;
      continue;
    }
    const std::string name = "@VERSION@";
    if (const size_t at = line.find(name); at != std::string::npos) {
      line.replace(
          at, name.size(),
          fmt::format("{}.{}.{}", KVM_VERSION_MAJOR, KVM_VERSION_MINOR, KVM_VERSION_PATCH));
    }
    fmt::print("{}\n", line);
  }
  return replaced ? 0 : 1;
}
