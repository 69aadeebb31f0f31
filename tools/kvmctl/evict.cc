// SPDX-License-Identifier: Apache-2.0
// kvmctl evict: frees sequences, whoever owns them.
#include <fmt/format.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/counted.h"
#include "tools/kvmctl/cli.h"

namespace kvm::tools {
namespace {

struct EvictOptions {
  std::optional<std::string> seq;
  std::optional<std::string> client;
  std::string space;
  std::optional<std::string> user;
  bool disconnect = false;
};

// Names are those of a user, and an operator sees all of them.
kvm_space_id space_of(kvm_client* client, const EvictOptions& options) {
  const std::optional<uint32_t> uid =
      options.user ? std::optional(parse_user(*options.user)) : std::nullopt;
  std::vector<kvm_space_info> found = list_all_spaces(client);
  std::erase_if(found, [&](const kvm_space_info& space) {
    return options.space != space.name || (uid && *uid != space.uid);
  });
  if (found.empty()) {
    fail(fmt::format("no space{} is named \"{}\" (kvmctl spaces lists them)",
                     options.user ? " of user " + *options.user : "", options.space),
         kExitService);
  }
  if (found.size() > 1) {
    std::vector<std::string> users;
    for (const kvm_space_info& space : found) {
      users.push_back(user_name(space.uid));
    }
    fail(fmt::format("the users {} each have a space named \"{}\"; say whose by --user",
                     fmt::join(users, ", "), options.space),
         kExitUsage);
  }
  return found[0].space;
}

int run_evict(const Common& common, const EvictOptions& options) {
  if (options.disconnect && !options.client) {
    fail("--disconnect goes with --client", kExitUsage);
  }
  if (options.user && options.space.empty()) {
    fail("--user goes with --space", kExitUsage);
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
    params.id = space_of(connection.get(), options);
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
  evict->add_option("--user", options->user, "with --space: the user whose space it is")
      ->type_name("USER");
  evict->add_flag("--disconnect", options->disconnect,
                  "with --client: close its connection as well, with all that it has");
}

}  // namespace kvm::tools
