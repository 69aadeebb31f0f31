// SPDX-License-Identifier: Apache-2.0
// Parts that the commands of kvmctl share: the command line under construction, the connection,
// exit statuses, tables and JSON.
#ifndef KVM_TOOLS_KVMCTL_CLI_H_
#define KVM_TOOLS_KVMCTL_CLI_H_

#include <CLI/CLI.hpp>  // CLI11: sub-commands, validation and help in one header
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>  // JSON output; nobody should print JSON by hand
#include <string>
#include <vector>

#include "kvm.h"

namespace kvm::tools {

using Json = nlohmann::ordered_json;

// Exit statuses; stable, and listed in --help.
enum Exit {
  kExitOk = 0,
  kExitService = 1,     // the service answered with an error
  kExitUsage = 2,       // wrong usage
  kExitConnection = 3,  // no daemon could be reached
  kExitCheck = 4        // what was checked is wrong
};

struct Common {
  std::string socket;
  bool json = false;
};

// The command line. Each file of commands adds its own; docs and completions are made from it.
class Cli {
 public:
  Cli();

  // A command, of `group` where that is not null.
  CLI::App* add(const char* name, const char* help, std::function<int(const Common&)> run,
                CLI::App* group = nullptr);
  // A command that only has commands of its own.
  CLI::App* add_group(const char* name, const char* help);

  // Parses and runs. Returns the exit status.
  int run(int argc, char** argv);
  const CLI::App& app() const { return app_; }

 private:
  CLI::App app_;
  Common common_;
  std::function<int(const Common&)> command_;
};

void add_status_commands(Cli* cli);     // status, ping, metrics
void add_top_command(Cli* cli);         // top
void add_list_commands(Cli* cli);       // spaces, seqs, snapshot
void add_client_commands(Cli* cli);     // clients, quota
void add_evict_command(Cli* cli);       // evict
void add_audit_command(Cli* cli);       // audit
void add_fsck_command(Cli* cli);        // fsck
void add_bench_command(Cli* cli);       // bench
void add_doctor_command(Cli* cli);      // doctor
void add_config_commands(Cli* cli);     // config
void add_completion_command(Cli* cli);  // completion
// snapshot export, snapshot import
void add_snapshot_file_commands(Cli* cli, CLI::App* snapshot);
// All of them, in the order of --help.
void add_commands(Cli* cli);

// The scripts that make a shell complete kvmctl's command line; "" for a shell that is not known.
std::string completion_script(const CLI::App& app, const std::string& shell);
// The commands as the body of a manual page (man(7)).
std::string commands_roff(const CLI::App& app);

[[noreturn]] void fail(const std::string& sentence, Exit exit);
// The id that an option has, or the end of the program with a sentence.
uint64_t id_of(const char* option, const std::string& text);
// Ends the program with a sentence unless the status is KVM_OK. `what` was asked for.
void check(kvm_status status, const char* what);

// Times of an option. CLI::Range lets NaN pass.
CLI::Validator seconds_between(double min, double max);

kvm_status connect(const Common& common, kvm_client** out);

// A Connection connects, or ends the program with a sentence.
class Connection {
 public:
  explicit Connection(const Common& common);
  ~Connection() { kvm_client_close(client_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  kvm_client* get() const { return client_; }
  kvm_client_info info() const;
  kvm_stats stats() const;

 private:
  kvm_client* client_ = nullptr;
};

// A text of the service, with one of the functions that write one to a buffer.
using TextFunction = kvm_status (*)(kvm_client*, char*, size_t, size_t*);
std::string text_of(kvm_client* client, TextFunction function, const char* what);

// The options, as JSON, of a kvmd that would be started here and now with these arguments, as the
// kvmd beside this program says; it is what knows them. Ends the program where they are wrong.
Json options_here(std::vector<std::string> arguments);

// Calls a kvm_*_list function until its answer fits.
template <typename Info, typename List>
std::vector<Info> list_all(const List& list, const char* what) {
  std::vector<Info> out(256);
  while (true) {
    size_t count = 0;
    out[0].struct_size = sizeof(Info);
    check(list(out.data(), out.size(), &count), what);
    if (count <= out.size()) {
      out.resize(count);
      return out;
    }
    out.resize(count + 64);
  }
}
std::vector<kvm_seq_info> list_all_seqs(kvm_client* client);
std::vector<kvm_space_info> list_all_spaces(kvm_client* client);
std::vector<kvm_client_entry> list_all_clients(kvm_client* client);

// Returns the name of a number; the number where it has none.
std::string user_name(uint32_t uid);
// "user 0 (root)", for sentences: those of kvmd have the number, as it looks up no names.
std::string user_text(uint32_t uid);
// The user that --user names, by name or number. Ends the program where there is none.
uint32_t parse_user(const std::string& text);
// A table of clients with its head, who holds most first.
std::vector<std::vector<std::string>> client_rows(std::vector<kvm_client_entry> clients);

// For people: "1.5 GiB", "3.2 %".
std::string bytes_text(uint64_t bytes);
std::string percent_text(double share);

// Columns as wide as they need, without trailing spaces; a table is one text.
std::string table_text(const std::vector<std::vector<std::string>>& rows);
void print_table(const std::vector<std::vector<std::string>>& rows);
void print_json(const Json& json);

}  // namespace kvm::tools

#endif  // KVM_TOOLS_KVMCTL_CLI_H_
