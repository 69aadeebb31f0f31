// SPDX-License-Identifier: Apache-2.0
// kvmctl evict: frees sequences, whoever owns them.
#include <fmt/format.h>

#include <charconv>
#include <memory>
#include <optional>
#include <string>

#include "tools/kvmctl/cli.h"

namespace kvm::tools {
namespace {

struct EvictOptions {
  std::optional<std::string> seq;
  std::optional<uint64_t> client;
  std::string space;
  bool disconnect = false;
};

// As `kvmctl seqs` prints it.
uint64_t parse_seq(const std::string& text) {
  uint64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value, 16);
  if (error != std::errc() || stop != end) {
    fail(fmt::format("--seq is '{}'; it must be a hexadecimal number, as kvmctl seqs prints it",
                     text),
         kExitUsage);
  }
  return value;
}

int run_evict(const Common& common, const EvictOptions& options) {
  if (options.disconnect && !options.client) {
    fail("--disconnect goes with --client", kExitUsage);
  }
  kvm_evict_params params{};
  params.struct_size = sizeof(params);
  const uint64_t seq = options.seq ? parse_seq(*options.seq) : 0;
  const Connection connection(common);
  if (options.seq) {
    params.what = KVM_EVICT_SEQ;
    params.id = seq;
  } else if (options.client) {
    params.what = KVM_EVICT_CLIENT;
    params.id = *options.client;
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
    fmt::print("{} sequence{} with {}\n", result.n_sequences, result.n_sequences == 1 ? "" : "s",
               bytes_text(result.bytes));
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
  what->add_option("--seq", options->seq, "this sequence, as kvmctl seqs prints it")
      ->type_name("ID");
  what->add_option("--client", options->client, "all sequences of this client")->type_name("ID");
  what->add_option("--space", options->space, "all sequences in this space")->type_name("NAME");
  what->require_option(1);
  evict->add_flag("--disconnect", options->disconnect,
                  "with --client: close its connection as well, with all that it has");
}

}  // namespace kvm::tools
