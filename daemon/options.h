// SPDX-License-Identifier: Apache-2.0
// Options of kvmd: one table defines each option's name, default, range and help; the TOML file,
// the environment and the command line are three ways of setting the same rows.
//
//   name in the file   spin_max_us          environment   KVM_SPIN_MAX_US
//   command line       --spin-max-us        precedence    flag > environment > file > default
//
// docs/configuration.md contains options_markdown(), and a test compares the two.
//
// Threads: plain values.
#ifndef KVM_DAEMON_OPTIONS_H_
#define KVM_DAEMON_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/status.h"
#include "daemon/tenants.h"
#include "daemon/values.h"

namespace kvm::daemon {

inline constexpr uint64_t kUnlimited = UINT64_MAX;

struct Options {
  std::string socket;
  uint64_t socket_mode = 0;
  Size host_capacity;  // share: of the memory that is free at start
  Size default_quota;  // share: of host_capacity
  uint64_t threads = 0;
  bool pin_threads = false;
  uint64_t spin_max_us = 0;
  uint64_t worker_spin_us = 0;
  uint64_t max_clients = 0;
  uint64_t max_queues = 0;
  uint64_t max_arenas = 0;
  Size max_arena;
  Size arena_quota;     // share: of arena_capacity
  Size arena_capacity;  // share: of the machine's memory
  uint64_t max_sequences = 0;
  uint64_t max_requests = 0;
  TenantOptions tenants;
  uint64_t max_spaces = 0;
  uint64_t prefix_pages = 0;
  uint64_t audit_every = 0;
  std::string cost_model;
  uint64_t shutdown_timeout_ms = 0;
  std::string log_level;
  std::string metrics_listen;
  uint64_t metrics_socket_mode = 0;
  // daemon/disk.h makes of these what they come to.
  std::string disk_directories;
  Size disk_capacity;  // share: of what is free there
  Size disk_high;      // share, here and below: of host_capacity
  Size disk_low;
  Size disk_memory_quota;
  std::string disk_leaving;
  Size disk_move_rate;  // a second
  uint64_t disk_max_priority = 0;
  Size disk_compaction_rate;
  Size disk_daily_writes;
  std::string disk_backend;
  std::string disk_save_prefixes;
  // daemon/device_memory.h makes of these what they come to.
  Size device_pool;
  std::string device_numbers;
  Size device_quota;  // share: of device_pool
  Size device_host;
};

enum class Origin : uint8_t { kDefault, kFile, kEnvironment, kFlag };

struct IntegerField {
  uint64_t Options::*member;
  uint64_t min;
  uint64_t max;
  bool unlimited_allowed = false;
};
struct OctalField {
  uint64_t Options::*member;
  uint32_t max;
};
struct SizeField {
  Size Options::*member;
  const char* share_of;  // what a percentage refers to; nullptr: none allowed
  uint64_t min_bytes;
  uint64_t max_bytes;
};
struct BoolField {
  bool Options::*member;
};
struct TextField {
  std::string Options::*member;
  std::vector<std::string> choices;  // empty: any text that is not
  const char* allowed = nullptr;     // with is_allowed: what the text must be
  bool (*is_allowed)(const std::string& text) = nullptr;
};
// Limits of users, as daemon/tenants.h has them.
struct TenantsField {
  TenantOptions Options::*member;
};

struct OptionRow {
  std::string name;  // "metrics.listen" is the key `listen` of the section [metrics]
  std::string default_text;
  std::variant<IntegerField, OctalField, SizeField, BoolField, TextField, TenantsField> field;
  std::string help;  // one or two sentences
};

// The table, in the order in which people should read it.
const std::vector<OptionRow>& option_rows();
std::string environment_name(const OptionRow& row);
std::string flag_name(const OptionRow& row);
// "a whole number from 0 to 64", for messages and help.
std::string allowed_text(const OptionRow& row);

// A Setting is what an option is set to, and by whom.
struct Setting {
  std::string text;
  Origin origin = Origin::kDefault;
  std::string place;  // "/etc/kvm/kvmd.toml:3", "KVM_THREADS", "--threads"; empty for a default
};

// Problems collects what is wrong with options, one sentence each.
class Problems {
 public:
  void add(const Status& status);
  bool none() const { return n_ == 0; }
  // OK, or INVALID with a sentence a line: the first kMaxShown, and how many more there are.
  // One alone keeps its own code.
  Status status() const;

 private:
  // LIMIT: a screen.
  static constexpr size_t kMaxShown = 20;

  size_t n_ = 0;
  kvm_status code_ = KVM_OK;  // of the first
  std::string sentences_;
};

struct LoadedOptions {
  Options options;
  std::vector<Setting> settings;  // one for each row of the table
  std::string config_path;        // empty: no file was read
  bool print_config = false;
  bool list_kill_points = false;  // only where they are compiled in
  bool json = false;
  bool help = false;
  bool version = false;
};

// Looks a name of the environment up. For tests; the process's own is environment_of_process.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;
std::optional<std::string> environment_of_process(const std::string& name);

// An OptionsCheck finds what rows cannot say about their values alone. Options that are wrong have
// their defaults.
using OptionsCheck = std::function<void(const Options& options, Problems* problems)>;

// Reads all three sources. `names` are the names of the variables that exist, for catching those
// that are nearly one of ours. Fails: INVALID (unknown option or key, with the nearest known name;
// a value out of range; all that is wrong is said at once), IO (a file that was asked for cannot
// be read). LIMIT: files of 1 MiB; neither folders nor devices, but for /dev/null.
Result<LoadedOptions> load_options(const std::vector<std::string>& arguments,
                                   const Environment& environment,
                                   const std::vector<std::string>& environment_names,
                                   const OptionsCheck& check = {});

// The rest is in options_text.cc.

// "default", "file", "environment", "command line".
const char* origin_name(Origin origin);
// Effective values as a TOML file, each with its origin in a comment.
std::string print_options(const LoadedOptions& loaded);
// The same as a JSON object: version, file (or null) and options, a list of name, value, default,
// origin and place. Values have TOML's types.
std::string options_json(const LoadedOptions& loaded);
// A configuration file with every option, its help and its default, commented out.
std::string default_file();
// The options as paragraphs of a manual page (man(7)): by flag for kvmd.8, by key for kvmd.toml.5.
std::string options_roff(bool by_key);
// `kvmd --help`.
std::string help_text();
// The table of docs/configuration.md.
std::string options_markdown();

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_OPTIONS_H_
