// SPDX-License-Identifier: Apache-2.0
// A program of the build: writes kvmctl's manual page, which is TEMPLATE with @OPTIONS@ and
// @VERSION@ replaced, from the definition of the command line.
#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "tools/kvmctl/cli.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    fmt::print(stderr, "usage: kvmctl_page TEMPLATE\n");
    return 2;
  }
  kvm::tools::Cli cli;
  kvm::tools::add_commands(&cli);
  std::ifstream file(argv[1]);
  std::string line;
  bool replaced = false;
  while (std::getline(file, line)) {
    if (line == "@OPTIONS@") {
      fmt::print("{}", kvm::tools::commands_roff(cli.app()));
      replaced = true;
      continue;
    }
    const std::string name = "@VERSION@";
    if (const size_t at = line.find(name); at != std::string::npos) {
      line.replace(at, name.size(), kvm_version_string());
    }
    fmt::print("{}\n", line);
  }
  return replaced ? 0 : 1;
}
