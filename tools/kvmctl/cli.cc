// SPDX-License-Identifier: Apache-2.0
#include "tools/kvmctl/cli.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <system_error>
#include <utility>

#include "base/nearest_name.h"
#include "tools/kvmctl/answer.h"
#include "tools/kvmctl/values.h"

namespace kvm::tools {
namespace {

// Says what to try next, for somebody who has not used kvm before; "" where the sentence says it
// all.
std::string advice(kvm_status status) {
  switch (status) {
    case KVM_ERR_DISCONNECTED:
      return "\nStart a daemon with `kvmd` (the packaged service with `systemctl start kvmd`), or "
             "name the socket\nof a running one with --socket or KVM_SOCKET.";
    case KVM_ERR_PERMISSION:
      return "\nRun kvmctl as root, as the user that runs kvmd, or as a member of the socket's "
             "group "
             "(of the packaged\nservice: `usermod -aG kvmd USER`); or let more users in with "
             "kvmd's "
             "socket_mode.";
    case KVM_ERR_VERSION:
      return fmt::format(
          "\nThis is kvmctl {}; use the one that came with the running kvmd, or "
          "start the kvmd that came with this one.",
          kvm_version_string());
    case KVM_ERR_TIMEOUT:
      return "\nThe process may be stopped or starved: look at it with `ps`, and at its log.";
    case KVM_ERR_LIMIT:
      return "\nEnd a client, or raise kvmd's max_clients.";
    case KVM_ERR_PROTOCOL:
      return "\nWhatever listens there is no kvmd, or a broken one.";
    default:
      return "";
  }
}

// The commands of `app`; option groups, which have no name, are not among them.
std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) {
    if (!command->get_name().empty()) {
      names.push_back(command->get_name());
    }
  }
  return names;
}

// CLI11 would only say that a command is missing where it does not know the one that was given.
// Points to the help of the command that was found, "kvmctl quota set", say.
std::string usage_error(const CLI::App* app, const CLI::Error& error) {
  const CLI::App* command = app;
  std::string path = "kvmctl";
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
    path += ' ' + command->get_name();
  }
  const std::vector<std::string> names = command_names(*command);
  const std::vector<std::string> unknown = app->remaining(true);
  std::string what = error.what();
  if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr && !names.empty()) {
    what = "a command is missing";
    if (!unknown.empty()) {
      const std::string nearest = nearest_name(unknown[0], names);
      what = fmt::format("there is no '{}'{}", unknown[0],
                         nearest.empty() ? "" : fmt::format("; did you mean '{}'?", nearest));
    }
  }
  std::string text = fmt::format("{}: {}\n", path, what);
  if (!names.empty()) {
    text += fmt::format("Commands: {}. ", fmt::join(names, ", "));
  }
  return text + fmt::format("See {} --help.\n", path);
}

}  // namespace

Cli::Cli()
    : app_("Asks a running kvmd, the KV-cache service, how it is, and tells it what to do.",
           "kvmctl") {
  app_.failure_message(usage_error);
  app_.footer(
      "Exit status: 0 done, 1 the service answered with an error, or files could not be read or\n"
      "written, 2 wrong usage, 3 no daemon could be reached, 4 what was checked is wrong.\n"
      "`kvmctl COMMAND --help` has a command's options.");
  app_.set_version_flag("--version", kvm_version_string(), "print the version and exit");
  app_.require_subcommand(1);
  app_.fallthrough();
  app_.add_option("--socket", common_.socket,
                  "path of the daemon's socket (default: KVM_SOCKET, else\n"
                  "$XDG_RUNTIME_DIR/kvm/kvmd.sock if it exists, else /run/kvm/kvmd.sock)")
      ->type_name("PATH");
  app_.add_flag("--json", common_.json, "print JSON instead of a table");
}

CLI::App* Cli::add(const char* name, const char* help, std::function<int(const Common&)> run,
                   CLI::App* group) {
  CLI::App* added = (group == nullptr ? &app_ : group)->add_subcommand(name, help);
  added->callback([this, run = std::move(run)] { command_ = run; });
  return added;
}

CLI::App* Cli::add_group(const char* name, const char* help) {
  CLI::App* added = app_.add_subcommand(name, help);
  added->require_subcommand(1);
  return added;
}

int Cli::run(int argc, char** argv) {
  try {
    app_.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app_.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  try {
    const int status = command_(common_);
    flush_answer();
    return status;
  } catch (const std::system_error& error) {  // of fmt, which wrote
    fail(fmt::format("the answer cannot be written: {}", error.code().message()), kExitService);
  }
}

void flush_answer() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    fail(fmt::format("the answer cannot be written: {}", std::strerror(errno)), kExitService);
  }
}

void add_commands(Cli* cli) {
  add_status_commands(cli);
  add_top_command(cli);
  add_list_commands(cli);
  add_client_commands(cli);
  add_evict_command(cli);
  add_audit_command(cli);
  add_fsck_command(cli);
  add_bench_command(cli);
  add_doctor_command(cli);
  add_config_commands(cli);
  add_completion_command(cli);
}

void fail(const std::string& sentence, Exit exit) {
  fmt::print(stderr, "kvmctl: {}\n", sentence);
  std::exit(exit);
}

uint64_t id_of(const char* option, const std::string& text) {
  const Result<uint64_t> id = parse_id(text);
  if (!id.is_ok()) {
    fail(fmt::format("{}: {}", option, id.status().message()), kExitUsage);
  }
  return id.value();
}

void check(kvm_status status, const char* what) {
  if (status != KVM_OK) {
    fail(fmt::format("{}: {} ({})", what, kvm_last_error(), kvm_status_name(status)),
         status == KVM_ERR_DISCONNECTED || status == KVM_ERR_TIMEOUT ? kExitConnection
                                                                     : kExitService);
  }
}

CLI::Validator seconds_between(double min, double max) {
  return CLI::Validator(
      [min, max](std::string& text) {
        return std::string(parse_seconds(text, min, max).status().message());
      },
      "");
}

kvm_status connect(const Common& common, kvm_client** out) {
  kvm_connect_params params{};
  params.struct_size = sizeof(params);
  params.socket_path = common.socket.empty() ? nullptr : common.socket.c_str();
  params.client_name = "kvmctl";
  return kvm_connect(&params, out);
}

Connection::Connection(const Common& common) {
  if (const kvm_status status = connect(common, &client_); status != KVM_OK) {
    fail(fmt::format("{} ({}){}", kvm_last_error(), kvm_status_name(status), advice(status)),
         status == KVM_ERR_INVALID ? kExitUsage : kExitConnection);
  }
}

kvm_client_info Connection::info() const {
  kvm_client_info out{};
  out.struct_size = sizeof(out);
  check(kvm_client_get_info(client_, &out), "info");
  return out;
}

kvm_stats Connection::stats() const {
  kvm_stats out{};
  out.struct_size = sizeof(out);
  check(kvm_get_stats(client_, &out), "stats");
  return out;
}

std::string text_of(kvm_client* client, TextFunction function, const char* what) {
  std::string text;
  size_t length = 64 << 10;
  do {
    text.resize(length + 1);
    check(function(client, text.data(), text.size(), &length), what);
  } while (length >= text.size());
  text.resize(length);
  return text;
}

std::vector<kvm_seq_info> list_all_seqs(kvm_client* client) {
  return list_all<kvm_seq_info>(
      [client](kvm_seq_info* out, size_t capacity, size_t* count) {
        return kvm_seq_list(client, 0, KVM_LIST_ALL_CLIENTS, out, capacity, count);
      },
      "sequences");
}

std::vector<kvm_space_info> list_all_spaces(kvm_client* client) {
  return list_all<kvm_space_info>(
      [client](kvm_space_info* out, size_t capacity, size_t* count) {
        return kvm_space_list(client, out, capacity, count);
      },
      "spaces");
}

std::string bytes_text(uint64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(units)) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

std::string percent_text(double share) { return fmt::format("{:.3g} %", 100 * share); }

std::string table_text(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> width;
  for (const auto& row : rows) {
    width.resize(std::max(width.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) {
      width[i] = std::max(width[i], row[i].size());
    }
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += fmt::format("{:<{}}  ", row[i], width[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

void print_table(const std::vector<std::vector<std::string>>& rows) {
  fmt::print("{}", table_text(rows));
}

void print_json(const Json& json) {
  // Names of clients may be any bytes; JSON is UTF-8.
  fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
}

}  // namespace kvm::tools
