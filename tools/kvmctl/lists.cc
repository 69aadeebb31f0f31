// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/counted.h"
#include "tools/kvmctl/cli.h"
#include "tools/kvmctl/values.h"

namespace kvm::tools {
namespace {

// Rows of `kvmctl seqs` without --all.
constexpr size_t kSeqsShown = 40;

const char* codec_text(uint32_t codec) {
  const char* name = kvm_codec_name(codec);
  return name == nullptr ? "?" : name;  // one of a newer kvmd
}

const char* mode_text(uint32_t mode) {
  switch (mode) {
    case KVM_MODE_TOPK:
      return "topk";
    case KVM_MODE_SAMPLED:
      return "sampled";
    case KVM_MODE_VERIFIED:
      return "verified";
    case KVM_MODE_AUTO:
      return "auto";
    default:
      return "exact";  // 0 of a kvmd that knows no defaults of a space
  }
}

const char* proposal_text(uint32_t proposal) {
  switch (proposal) {
    case KVM_PROPOSAL_SKETCH:
      return "sketch";
    case KVM_PROPOSAL_LSH:
      return "lsh";
    default:
      return "default";
  }
}

std::string digest_text(const uint8_t (&digest)[16]) {
  return fmt::format("{:02x}", fmt::join(digest, ""));
}

// 0.05 as it was said, not the double nearest to the float.
double short_number(float value) { return std::strtod(fmt::format("{}", value).c_str(), nullptr); }

// How requests that name no mode are answered, with the numbers that count.
std::string default_text(const kvm_space_info& space) {
  std::string text = mode_text(space.default_mode);
  if (space.default_mode == KVM_MODE_AUTO && space.default_budget != 0) {
    text += fmt::format(" {} us", space.default_budget / 1000);
  } else if (space.default_budget != 0) {
    text += fmt::format(" {}", space.default_budget);
  } else if (space.default_mode > KVM_MODE_EXACT) {
    text += fmt::format(" eps {:g}", space.default_eps);
  }
  if (space.default_proposal != KVM_PROPOSAL_DEFAULT) {
    text += fmt::format(" {}", proposal_text(space.default_proposal));
  }
  return text;
}

// Of K, and of V where it is another; in brackets where V is a part of K.
std::string dim_text(const kvm_space_info& space) {
  if ((space.flags & KVM_SPACE_V_IN_K) != 0) {
    return fmt::format("{} ({})", space.head_dim_k, space.head_dim_v);
  }
  return space.head_dim_k == space.head_dim_v
             ? std::to_string(space.head_dim_k)
             : fmt::format("{}/{}", space.head_dim_k, space.head_dim_v);
}

int run_spaces(const Common& common) {
  const Connection connection(common);
  const auto spaces = list_all_spaces(connection.get());
  if (common.json) {
    Json out = Json::array();
    for (const auto& space : spaces) {
      out.push_back({{"id", id_text(space.space)},
                     {"name", space.name},
                     {"uid", space.uid},
                     {"layers", space.n_layers},
                     {"q_heads", space.n_q_heads},
                     {"kv_heads", space.n_kv_heads},
                     {"head_dim_k", space.head_dim_k},
                     {"head_dim_v", space.head_dim_v},
                     {"values_in_keys", (space.flags & KVM_SPACE_V_IN_K) != 0},
                     {"codec", codec_text(space.codec)},
                     {"head_classes", space.n_head_classes},
                     {"sequences", space.n_sequences},
                     {"bytes_per_token", space.bytes_per_token},
                     {"geometry_digest", digest_text(space.geometry_digest)},
                     {"layout_digest", digest_text(space.layout_digest)},
                     {"policy_digest", digest_text(space.policy_digest)},
                     {"index_digest", digest_text(space.index_digest)},
                     {"default_mode", mode_text(space.default_mode)},
                     {"default_proposal", proposal_text(space.default_proposal)},
                     {"default_eps", short_number(space.default_eps)},
                     {"default_delta", short_number(space.default_delta)},
                     {"default_budget", space.default_budget}});
    }
    print_json(out);
    return kExitOk;
  }
  std::vector<std::vector<std::string>> rows = {{"NAME", "USER", "LAYERS", "HEADS", "DIM",
                                                 "DEFAULT CODEC", "CLASSES", "SEQUENCES", "A TOKEN",
                                                 "MODE"}};
  for (const auto& space : spaces) {
    rows.push_back({space.name, user_name(space.uid), std::to_string(space.n_layers),
                    fmt::format("{}/{}", space.n_q_heads, space.n_kv_heads), dim_text(space),
                    codec_text(space.codec), std::to_string(space.n_head_classes),
                    std::to_string(space.n_sequences), bytes_text(space.bytes_per_token),
                    default_text(space)});
  }
  print_table(rows);
  return kExitOk;
}

int run_seqs(const Common& common, bool all) {
  const Connection connection(common);
  auto seqs = list_all_seqs(connection.get());
  if (common.json) {
    Json out = Json::array();
    for (const auto& seq : seqs) {
      out.push_back({{"id", id_text(seq.seq)},
                     {"space", id_text(seq.space)},
                     {"client", id_text(seq.client_id)},
                     {"published", (seq.flags & KVM_SEQ_PUBLISHED) != 0},
                     {"tokens_min", seq.n_tokens_min},
                     {"tokens_max", seq.n_tokens_max},
                     {"committed", seq.n_committed},
                     {"pages", seq.n_pages},
                     {"bytes", seq.bytes},
                     {"bytes_shared", seq.bytes_shared},
                     {"bytes_paid", seq.bytes_paid},
                     {"bytes_away", seq.bytes_away},
                     {"entries_dropped", seq.n_entries_dropped},
                     {"bytes_observed", seq.bytes_observed},
                     {"bytes_index", seq.bytes_index}});
    }
    print_json(out);
    return kExitOk;
  }
  // For the eye: the largest first, and not more than a screen of them.
  std::stable_sort(seqs.begin(), seqs.end(),
                   [](const kvm_seq_info& a, const kvm_seq_info& b) { return a.bytes > b.bytes; });
  const size_t n_shown = all ? seqs.size() : std::min<size_t>(seqs.size(), kSeqsShown);
  std::vector<std::vector<std::string>> rows = {{"SEQUENCE", "CLIENT", "TOKENS", "COMMITTED",
                                                 "BYTES", "ON DISK", "SHARED", "INDEX", "DROPPED"}};
  for (size_t i = 0; i < n_shown; ++i) {
    const kvm_seq_info& seq = seqs[i];
    rows.push_back({id_text(seq.seq),
                    (seq.flags & KVM_SEQ_PUBLISHED) != 0 ? "published" : id_text(seq.client_id),
                    seq.n_tokens_min == seq.n_tokens_max
                        ? std::to_string(seq.n_tokens_max)
                        : fmt::format("{}-{}", seq.n_tokens_min, seq.n_tokens_max),
                    std::to_string(seq.n_committed), bytes_text(seq.bytes),
                    bytes_text(seq.bytes_away), bytes_text(seq.bytes_shared),
                    bytes_text(seq.bytes_index), std::to_string(seq.n_entries_dropped)});
  }
  print_table(rows);
  if (n_shown < seqs.size()) {
    fmt::print("and {} smaller; --all shows them\n", seqs.size() - n_shown);
  }
  return kExitOk;
}

// What kvmd calls the snapshots that keep prefixes, and it alone.
constexpr std::string_view kPrefixNames = ".prefix/";

bool is_kept_prefix(const kvm_snapshot_info& snapshot) {
  return std::string_view(snapshot.name).starts_with(kPrefixNames);
}

int run_snapshots(const Common& common, bool all, bool shows_prefixes) {
  const Connection connection(common);
  const auto snapshots = list_all<kvm_snapshot_info>(
      [&](kvm_snapshot_info* out, size_t capacity, size_t* count) {
        return kvm_snapshot_list(connection.get(), all ? KVM_LIST_ALL_CLIENTS : 0, out, capacity,
                                 count);
      },
      "snapshots");
  if (common.json) {
    Json out = Json::array();
    for (const kvm_snapshot_info& snapshot : snapshots) {
      out.push_back({{"name", snapshot.name},
                     {"uid", snapshot.uid},
                     {"prefix", is_kept_prefix(snapshot)},
                     {"lost", (snapshot.flags & KVM_SNAPSHOT_LOST) != 0},
                     {"space", snapshot.space_name},
                     {"tokens", snapshot.n_tokens},
                     {"bytes", snapshot.bytes},
                     {"saved", time_text(snapshot.saved_ns)},
                     {"layout_digest", digest_text(snapshot.layout)},
                     {"policy_digest", digest_text(snapshot.policy)}});
    }
    print_json(out);
    return kExitOk;
  }
  std::vector<std::vector<std::string>> rows = {
      {"NAME", "USER", "SPACE", "TOKENS", "BYTES", "SAVED", ""}};
  uint64_t n_hidden = 0;
  for (const kvm_snapshot_info& snapshot : snapshots) {
    if (is_kept_prefix(snapshot) && !shows_prefixes) {
      ++n_hidden;
      continue;
    }
    rows.push_back({snapshot.name, user_name(snapshot.uid), snapshot.space_name,
                    std::to_string(snapshot.n_tokens), bytes_text(snapshot.bytes),
                    time_text(snapshot.saved_ns),
                    (snapshot.flags & KVM_SNAPSHOT_LOST) != 0 ? "parts are lost" : ""});
  }
  print_table(rows);
  if (n_hidden != 0) {
    fmt::print("and {} of kept prefixes; --prefixes shows them\n", counted(n_hidden, "snapshot"));
  }
  return kExitOk;
}

int run_snapshot_delete(const Common& common, const std::vector<std::string>& names) {
  const Connection connection(common);
  int exit = kExitOk;
  for (const std::string& name : names) {
    const kvm_status status = kvm_snapshot_delete(connection.get(), name.c_str());
    if (status == KVM_ERR_DISCONNECTED || status == KVM_ERR_TIMEOUT) {
      check(status, name.c_str());
    }
    if (status != KVM_OK) {
      // The others are deleted nevertheless.
      fmt::print(stderr, "kvmctl: {}: {} ({})\n", name, kvm_last_error(), kvm_status_name(status));
      exit = kExitService;
    }
  }
  return exit;
}

void add_snapshot_commands(Cli* cli) {
  CLI::App* snapshot = cli->add_group("snapshot", "saved sequences of this user");
  const auto all = std::make_shared<bool>(false);
  const auto prefixes = std::make_shared<bool>(false);
  CLI::App* const list = cli->add(
      "list", "what was saved, and how large it is",
      [all, prefixes](const Common& common) {
        return run_snapshots(common, *all, *all || *prefixes);
      },
      snapshot);
  list->add_flag("--all", *all, "of all users, kept prefixes too: for kvmd's own user and root");
  list->add_flag("--prefixes", *prefixes,
                 "kept prefixes, too, which kvmd names .prefix/...; --json has them always");
  const auto names = std::make_shared<std::vector<std::string>>();
  cli->add(
         "delete", "delete some; sequences that were loaded from them stay",
         [names](const Common& common) { return run_snapshot_delete(common, *names); }, snapshot)
      ->add_option("name", *names, "of the snapshots")
      ->required()
      ->type_name("NAME");
  add_snapshot_file_commands(cli, snapshot);
}

}  // namespace

void add_list_commands(Cli* cli) {
  cli->add("spaces", "the registered model geometries", run_spaces);
  const auto all = std::make_shared<bool>(false);
  cli->add("seqs", "the sequences of all clients, and the memory they hold",
           [all](const Common& common) { return run_seqs(common, *all); })
      ->add_flag("--all", *all, "every one, not the largest only; --json has them all");
  add_snapshot_commands(cli);
}

}  // namespace kvm::tools
