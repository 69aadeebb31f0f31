// SPDX-License-Identifier: Apache-2.0
// kvmctl evict: frees sequences, whoever owns them.
#include <fmt/format.h>

#include <memory>
#include <optional>
#include <string>

#include "base/counted.h"
#include "tools/kvmctl/cli.h"

namespace kvm::tools {
namespace {

struct EvictOptions {
  std::optional<std::string> seq;
  std::optional<std::string> client;
  std::string space;
  bool disconnect = false;
};

int run_evict(const Common& common, const EvictOptions& options) {
  if (options.disconnect && !options.client) {
    fail("--disconnect goes with --client", kExitUsage);
  }
  kvm_evict_params params{};
  params.struct_size = sizeof(params);
  const uint64_t seq = options.seq ? id_of("--seq", *options.seq) : 0;
  const uint64_t client = options.client ? id_of("--client", *options.client) : 0;
  const Connection connection(common);
  if (options.seq) {
    params.what = KVM_EVICT_SEQ;
    params.id = seq;
  } else if (options.client) {
    params.what = KVM_EVICT_CLIENT;
    params.id = client;
    params.flags = options.disconnect ? KVM_EVICT_DISCONNECT : 0;
  } else {
    params.what = KVM_EVICT_SPACE;
    kvm_space_id space = 0;
    check(kvm_space_find(connection.get(), options.space.c_str(), &space), "space");
    params.id = space;
  }
  kvm_evict_result result{};
  result.struct_size = sizeof(result);
  check(kvm_evict(connection.get(), &params, &result), "evict");
  if (common.json) {
    print_json({{"sequences", result.n_sequences}, {"bytes", result.bytes}});
  } else {
    fmt::print("{} with {}\n", counted(result.n_sequences, "sequence"), bytes_text(result.bytes));
  }
  return kExitOk;
}

}  // namespace

void add_evict_command(Cli* cli) {
  const auto options = std::make_shared<EvictOptions>();
  CLI::App* evict =
      cli->add("evict", "free sequences, whoever owns them; who uses one later is told it is stale",
               [options](const Common& common) { return run_evict(common, *options); });
  CLI::Option_group* what = evict->add_option_group("what");
  what->add_option("--seq", options->seq,
                   "this sequence, as kvmctl seqs prints it: 0x1f, or decimal")
      ->type_name("ID");
  what->add_option("--client", options->client,
                   "all sequences of this client, as kvmctl clients prints it")
      ->type_name("ID");
  what->add_option("--space", options->space, "all sequences in this space")->type_name("NAME");
  what->require_option(1);
  evict->add_flag("--disconnect", options->disconnect,
                  "with --client: close its connection as well, with all that it has");
}

}  // namespace kvm::tools
