// SPDX-License-Identifier: Apache-2.0
// kvmctl: what an operator asks of a running kvmd. Sees the service as any client does.
#include "tools/kvmctl/cli.h"

int main(int argc, char** argv) {
  kvm::tools::Cli cli;
  kvm::tools::add_commands(&cli);
  return cli.run(argc, argv);
}
