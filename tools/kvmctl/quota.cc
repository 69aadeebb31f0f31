// SPDX-License-Identifier: Apache-2.0
// kvmctl clients and kvmctl quota: what clients and users hold, and how much of it they may.
#include <fmt/format.h>
#include <pwd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/size_text.h"
#include "tools/kvmctl/cli.h"
#include "tools/kvmctl/series.h"
#include "tools/kvmctl/values.h"

namespace kvm::tools {
namespace {

struct Field {
  const char* name;  // in JSON; with dashes, the option's
  uint64_t kvm_amounts::*member;
  bool is_bytes;
  bool is_of_users = false;  // alone: clients have none
};
constexpr std::array<Field, 8> kFields = {
    {{"sequences", &kvm_amounts::sequences, false},
     {"bytes", &kvm_amounts::bytes, true},
     {"memory_bytes", &kvm_amounts::memory_bytes, true},
     {"arenas", &kvm_amounts::arenas, false},
     {"arena_bytes", &kvm_amounts::arena_bytes, true},
     {"queues", &kvm_amounts::queues, false},
     {"requests", &kvm_amounts::requests, false},
     {"snapshot_bytes", &kvm_amounts::snapshot_bytes, true, true}}};

// The last number means no user, to chown for one.
constexpr uint32_t kMaxUid = UINT32_MAX - 1;

enum class Holder { kClient, kUser };

// The fields that a client, or a user, has.
std::vector<Field> fields_of(Holder holder) {
  std::vector<Field> fields(kFields.begin(), kFields.end());
  if (holder == Holder::kClient) {
    std::erase_if(fields, [](const Field& field) { return field.is_of_users; });
  }
  return fields;
}

Json amounts_json(Holder holder, const kvm_amounts& amounts) {
  Json out;
  for (const Field& field : fields_of(holder)) {
    const uint64_t value = amounts.*field.member;
    out[field.name] = value == KVM_NO_LIMIT ? Json() : Json(value);
  }
  return out;
}

Json client_json(const kvm_client_entry& client) {
  const std::vector<Bucket> durations = client_durations(client);
  return {{"id", id_text(client.client_id)},
          {"name", client.name},
          {"pid", client.pid},
          {"uid", client.uid},
          {"used", amounts_json(Holder::kClient, client.used)},
          {"limits", amounts_json(Holder::kClient, client.limits)},
          {"refused", client.n_refused},
          {"requests", client.n_requests},
          {"request_p50_seconds", quantile(durations, 0.5)},
          {"request_p99_seconds", quantile(durations, 0.99)}};
}

Json user_json(const kvm_user_entry& user) {
  return {{"uid", user.uid},
          {"name", user_name(user.uid)},
          {"clients", user.n_clients},
          {"used", amounts_json(Holder::kUser, user.used)},
          {"limits", amounts_json(Holder::kUser, user.limits)}};
}

// "3" or "1.5 GiB", and with a limit "3 of 10".
std::string amount_text(const Field& field, uint64_t used, uint64_t limit) {
  const auto text = [&](uint64_t value) {
    return field.is_bytes ? bytes_text(value) : std::to_string(value);
  };
  return limit == KVM_NO_LIMIT ? text(used) : fmt::format("{} of {}", text(used), text(limit));
}

void add_amounts(Holder holder, const kvm_amounts& used, const kvm_amounts& limits,
                 std::vector<std::string>* row) {
  for (const Field& field : fields_of(holder)) {
    row->push_back(amount_text(field, used.*field.member, limits.*field.member));
  }
}

const std::vector<std::string> kAmountTitles = {"SEQUENCES",    "BYTES",  "STAYING", "ARENAS",
                                                "ARENA MEMORY", "QUEUES", "REQUESTS"};

std::vector<std::string> titles(std::vector<std::string> first) {
  first.insert(first.end(), kAmountTitles.begin(), kAmountTitles.end());
  return first;
}

int run_clients(const Common& common) {
  const Connection connection(common);
  std::vector<kvm_client_entry> clients = list_all_clients(connection.get());
  if (common.json) {
    Json out = Json::array();
    for (const kvm_client_entry& client : clients) {
      out.push_back(client_json(client));
    }
    print_json(out);
    return kExitOk;
  }
  print_table(client_rows(std::move(clients)));
  return kExitOk;
}

// --- quota --------------------------------------------------------------------------------------

// A Whose names a client or a user, as it was written; neither means all.
struct Whose {
  std::optional<std::string> client;
  std::optional<std::string> user;
};

void add_whose(CLI::App* command, const std::shared_ptr<Whose>& whose, bool required) {
  CLI::Option_group* group = command->add_option_group("whose");
  group
      ->add_option("--client", whose->client,
                   "of this client, as kvmctl clients prints it: 0x1f, or decimal")
      ->type_name("ID");
  group->add_option("--user", whose->user, "of all clients of this user, a name or a number")
      ->type_name("USER");
  group->require_option(required ? 1 : 0, 1);
}

int run_quota_get(const Common& common, const Whose& whose) {
  const uint32_t uid = whose.user ? parse_user(*whose.user) : 0;
  const uint64_t id = whose.client ? id_of("--client", *whose.client) : 0;
  const Connection connection(common);
  std::vector<kvm_client_entry> clients = list_all_clients(connection.get());
  auto users = list_all<kvm_user_entry>(
      [&](kvm_user_entry* out, size_t capacity, size_t* count) {
        return kvm_user_list(connection.get(), out, capacity, count);
      },
      "users");
  if (whose.client) {
    users.clear();
    std::erase_if(clients, [&](const auto& entry) { return entry.client_id != id; });
    if (clients.empty()) {
      fail(fmt::format("there is no client {} (KVM_ERR_NOT_FOUND)", id_text(id)), kExitService);
    }
  } else if (whose.user) {
    clients.clear();
    std::erase_if(users, [&](const kvm_user_entry& entry) { return entry.uid != uid; });
  }
  if (common.json) {
    Json out = {{"users", Json::array()}, {"clients", Json::array()}};
    for (const kvm_user_entry& user : users) {
      out["users"].push_back(user_json(user));
    }
    for (const kvm_client_entry& client : clients) {
      out["clients"].push_back(client_json(client));
    }
    print_json(out);
    return kExitOk;
  }
  std::vector<std::vector<std::string>> rows = {titles({"WHOSE"})};
  rows.back().push_back("SNAPSHOTS");
  for (const kvm_user_entry& user : users) {
    rows.push_back({fmt::format("user {}", user_name(user.uid))});
    add_amounts(Holder::kUser, user.used, user.limits, &rows.back());
  }
  for (const kvm_client_entry& client : clients) {
    rows.push_back({fmt::format("client {}", id_text(client.client_id))});
    add_amounts(Holder::kClient, client.used, client.limits, &rows.back());
    rows.back().push_back("-");
  }
  print_table(rows);
  return kExitOk;
}

using LimitTexts = std::array<std::string, kFields.size()>;

[[noreturn]] void refuse_limit(const Field& field, std::string_view why) {
  fail(fmt::format("the limit of {}: {}, or unlimited", field.name, why), kExitUsage);
}

uint64_t parse_limit(const Field& field, const std::string& text) {
  if (text == "unlimited") {
    return KVM_NO_LIMIT;
  }
  uint64_t value = 0;
  if (field.is_bytes) {
    const Result<uint64_t> bytes = parse_bytes(text);
    if (!bytes.is_ok()) {
      refuse_limit(field, bytes.status().message());
    }
    value = bytes.value();
  } else {
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    value = error == std::errc() && stop == end && value != KVM_NO_LIMIT ? value : 0;
  }
  if (value == 0) {
    refuse_limit(field, fmt::format("'{}' is no limit; allowed are {} above 0", text,
                                    field.is_bytes ? "sizes such as 20GiB" : "whole numbers"));
  }
  return value;
}

int run_quota_set(const Common& common, const Whose& whose, const LimitTexts& texts) {
  kvm_quota_params params{};
  params.struct_size = sizeof(params);
  params.whose = whose.client ? KVM_QUOTA_CLIENT : KVM_QUOTA_USER;
  params.id = whose.client ? id_of("--client", *whose.client) : parse_user(*whose.user);
  bool any = false;
  for (size_t i = 0; i < kFields.size(); ++i) {
    if (!texts[i].empty()) {
      if (kFields[i].is_of_users && whose.client) {
        fail("--snapshot-bytes goes with --user: snapshots are a user's", kExitUsage);
      }
      params.limits.*kFields[i].member = parse_limit(kFields[i], texts[i]);
      any = true;
    }
  }
  if (!any) {
    fail("no limit is named; see kvmctl quota set --help", kExitUsage);
  }
  const Connection connection(common);
  check(kvm_quota_set(connection.get(), &params), "quota");
  return run_quota_get(common, whose);
}

void add_quota_commands(Cli* cli) {
  CLI::App* quota = cli->add_group("quota", "limits of clients and of users");
  const auto of = std::make_shared<Whose>();
  CLI::App* get = cli->add(
      "get", "what is in use, and the limits",
      [of](const Common& common) { return run_quota_get(common, *of); }, quota);
  add_whose(get, of, false);
  const auto to = std::make_shared<Whose>();
  const auto texts = std::make_shared<LimitTexts>();
  CLI::App* set = cli->add(
      "set", "change limits, until the client leaves or, of a user, kvmd ends",
      [to, texts](const Common& common) { return run_quota_set(common, *to, *texts); }, quota);
  add_whose(set, to, true);
  for (size_t i = 0; i < kFields.size(); ++i) {
    std::string option = fmt::format("--{}", kFields[i].name);
    std::replace(option.begin(), option.end(), '_', '-');
    set->add_option(option, (*texts)[i],
                    fmt::format("{}{}, or unlimited", kFields[i].is_of_users ? "of a user: " : "",
                                kFields[i].is_bytes ? "a size such as 20GiB" : "a number"))
        ->type_name("LIMIT");
  }
}

}  // namespace

uint32_t parse_user(const std::string& text) {
  uint32_t uid = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, uid);
  if (error == std::errc() && stop == end && uid <= kMaxUid) {
    return uid;
  }
  const passwd* entry = ::getpwnam(text.c_str());
  if (entry == nullptr) {
    fail(fmt::format("--user is '{}', and no user of this machine has that name; it must be a "
                     "user's name, or a number from 0 to {}",
                     text, kMaxUid),
         kExitUsage);
  }
  return entry->pw_uid;
}

std::string user_name(uint32_t uid) {
  const passwd* entry = ::getpwuid(uid);
  return entry == nullptr ? std::to_string(uid) : entry->pw_name;
}

std::string user_text(uint32_t uid) {
  const passwd* entry = ::getpwuid(uid);
  return entry == nullptr ? fmt::format("user {}", uid)
                          : fmt::format("user {} ({})", uid, entry->pw_name);
}

std::vector<kvm_client_entry> list_all_clients(kvm_client* client) {
  return list_all<kvm_client_entry>(
      [client](kvm_client_entry* out, size_t capacity, size_t* count) {
        return kvm_client_list(client, out, capacity, count);
      },
      "clients");
}

std::vector<std::vector<std::string>> client_rows(std::vector<kvm_client_entry> clients) {
  std::stable_sort(clients.begin(), clients.end(),
                   [](const auto& a, const auto& b) { return a.used.bytes > b.used.bytes; });
  std::vector<std::string> head = titles({"CLIENT", "NAME", "PROCESS", "USER"});
  head.push_back("REFUSED");
  std::vector<std::vector<std::string>> rows = {head};
  for (const kvm_client_entry& client : clients) {
    rows.push_back({id_text(client.client_id), client.name, std::to_string(client.pid),
                    user_name(client.uid)});
    add_amounts(Holder::kClient, client.used, client.limits, &rows.back());
    rows.back().push_back(std::to_string(client.n_refused));
  }
  return rows;
}

void add_client_commands(Cli* cli) {
  cli->add("clients", "who is connected, what they hold and what they may", run_clients);
  add_quota_commands(cli);
}

}  // namespace kvm::tools
