// SPDX-License-Identifier: Apache-2.0
// The three sources of options: file, environment, command line.
#include <errno.h>
#include <fmt/format.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <toml++/toml.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <utility>

#include "base/nearest_name.h"
#include "daemon/options.h"

namespace kvm::daemon {
namespace {

constexpr const char* kDefaultConfigPath = "/etc/kvm/kvmd.toml";
constexpr const char* kConfigVariable = "KVM_CONFIG";

// Writes a value into its field. Returns false when the text is not allowed.
struct Assign {
  Options* options;
  std::string_view text;

  bool operator()(const IntegerField& field) const {
    if (field.unlimited_allowed && text == "unlimited") {
      options->*field.member = kUnlimited;
      return true;
    }
    const std::optional<uint64_t> value = parse_integer(text);
    if (!value || *value < field.min || *value > field.max) {
      return false;
    }
    options->*field.member = *value;
    return true;
  }
  bool operator()(const OctalField& field) const {
    const std::optional<uint32_t> value = parse_octal(text);
    if (!value || *value > field.max) {
      return false;
    }
    options->*field.member = *value;
    return true;
  }
  bool operator()(const SizeField& field) const {
    const std::optional<Size> value = parse_size(text);
    if (!value) {
      return false;
    }
    const bool allowed = value->is_share
                             ? field.share_of != nullptr && value->percent > 0
                             : value->bytes >= field.min_bytes && value->bytes <= field.max_bytes;
    if (allowed) {
      options->*field.member = *value;
    }
    return allowed;
  }
  bool operator()(const BoolField& field) const {
    const std::optional<bool> value = parse_bool(text);
    if (!value) {
      return false;
    }
    options->*field.member = *value;
    return true;
  }
  bool operator()(const TenantsField& field) const {
    std::optional<TenantOptions> value = parse_tenants(text);
    if (value) {
      options->*field.member = std::move(*value);
    }
    return value.has_value();
  }
  bool operator()(const TextField& field) const {
    if (text.empty()) {
      return false;
    }
    if (!field.choices.empty() &&
        std::find(field.choices.begin(), field.choices.end(), text) == field.choices.end()) {
      return false;
    }
    if (field.is_allowed != nullptr && !field.is_allowed(std::string(text))) {
      return false;
    }
    options->*field.member = std::string(text);
    return true;
  }
};

Status apply_one(size_t index, Setting setting, LoadedOptions* loaded) {
  const OptionRow& row = option_rows()[index];
  if (!std::visit(Assign{&loaded->options, setting.text}, row.field)) {
    return Status(KVM_ERR_INVALID, fmt::format("{} is '{}'{}{}; it must be {}", row.name,
                                               setting.text, setting.place.empty() ? "" : " in ",
                                               setting.place, allowed_text(row)));
  }
  loaded->settings[index] = std::move(setting);
  return Status::ok();
}

void apply(size_t index, Setting setting, LoadedOptions* loaded, Problems* problems) {
  problems->add(apply_one(index, std::move(setting), loaded));
}

std::optional<size_t> find_row(std::string_view name) {
  for (size_t i = 0; i < option_rows().size(); ++i) {
    if (option_rows()[i].name == name) {
      return i;
    }
  }
  return std::nullopt;
}

// "; did you mean 'socket'?", or nothing.
std::string hint(const std::string& nearest) {
  return nearest.empty() ? std::string() : fmt::format("; did you mean '{}'?", nearest);
}

std::vector<std::string> names_of(std::string (*name_of)(const OptionRow&)) {
  std::vector<std::string> names;
  for (const OptionRow& row : option_rows()) {
    names.push_back(name_of(row));
  }
  return names;
}

std::string key_of(const std::string& name) { return name.substr(name.rfind('.') + 1); }

// Suggests what an unknown key of the file may have meant. It may be right, or nearly, and stand in
// the wrong section: what is added at the end of a file belongs to the last one.
std::string file_hint(const std::string& name) {
  const auto names = names_of([](const OptionRow& row) { return row.name; });
  const auto keys = names_of([](const OptionRow& row) { return key_of(row.name); });
  const std::string as_it_stands = nearest_name(name, names);
  const std::string key = nearest_name(key_of(name), keys);
  if (key.empty() || (!as_it_stands.empty() &&
                      edit_distance(name, as_it_stands) <= edit_distance(key_of(name), key))) {
    return hint(as_it_stands);
  }
  const auto found = std::find(keys.begin(), keys.end(), key);
  const std::string& whole = names[static_cast<size_t>(found - keys.begin())];
  return whole == key
             ? fmt::format("; did you mean '{}', which stands above the first section?", key)
             : fmt::format("; did you mean '{}' below [{}]?", key,
                           whole.substr(0, whole.size() - key.size() - 1));
}

// The value of a key as text; nothing for tables, arrays and dates.
std::optional<std::string> text_of(const toml::node& node) {
  if (const auto* text = node.as_string()) {
    return text->get();
  }
  if (const auto* number = node.as_integer()) {
    return std::to_string(number->get());
  }
  if (const auto* flag = node.as_boolean()) {
    return flag->get() ? "true" : "false";
  }
  return std::nullopt;
}

bool is_section(const std::string& prefix) {
  return std::any_of(option_rows().begin(), option_rows().end(),
                     [&](const OptionRow& row) { return row.name.starts_with(prefix); });
}

// [tenants.default] and [tenants.1000] as the text of the option; nothing where a value is neither.
std::optional<std::string> tenants_text(const toml::table& tenants) {
  std::string out;
  for (const auto& [who, node] : tenants) {
    const toml::table* limits = node.as_table();
    if (limits == nullptr) {
      return std::nullopt;
    }
    out += fmt::format("{}{}:", out.empty() ? "" : "; ", who.str());
    bool is_first = true;
    for (const auto& [name, value] : *limits) {
      const std::optional<std::string> text = text_of(value);
      if (!text) {
        return std::nullopt;
      }
      out += fmt::format("{} {}={}", std::exchange(is_first, false) ? "" : ",", name.str(), *text);
    }
  }
  return out;
}

// `prefix` is "" or the section with its dot.
void load_table(const toml::table& table, const std::string& prefix, const std::string& path,
                LoadedOptions* loaded, Problems* problems) {
  for (const auto& [key, node] : table) {
    const std::string name = prefix + std::string(key.str());
    if (const toml::table* section = node.as_table();
        section != nullptr && is_section(name + ".")) {
      load_table(*section, name + ".", path, loaded, problems);
      continue;
    }
    const std::string place =
        fmt::format("{}:{}", path, static_cast<uint32_t>(node.source().begin.line));
    const std::optional<size_t> index = find_row(name);
    if (!index) {
      problems->add(Status(KVM_ERR_INVALID, fmt::format("unknown option '{}' in {}{}", name, place,
                                                        file_hint(name))));
      continue;
    }
    const bool is_tenants = std::holds_alternative<TenantsField>(option_rows()[*index].field);
    std::optional<std::string> text =
        is_tenants && node.is_table() ? tenants_text(*node.as_table()) : text_of(node);
    if (!text) {
      problems->add(Status(KVM_ERR_INVALID, fmt::format("{} in {} must be {}", name, place,
                                                        allowed_text(option_rows()[*index]))));
      continue;
    }
    apply(*index, Setting{std::move(*text), Origin::kFile, place}, loaded, problems);
  }
}

Status cannot_read(const std::string& path, std::string_view why) {
  return Status(KVM_ERR_IO, fmt::format("cannot read the configuration file '{}': {}", path, why));
}

// LIMIT: a file with every option and its help has 10 KiB.
constexpr size_t kMaxFileBytes = 1 << 20;

// Regular files, pipes (of a shell's <(...)) and /dev/null, which sets nothing. Another device may
// have no end, or do something when it is read.
bool may_be_read(const struct stat& facts) {
  const bool is_null = S_ISCHR(facts.st_mode) && facts.st_rdev == ::makedev(1, 3);
  return S_ISREG(facts.st_mode) || S_ISFIFO(facts.st_mode) || is_null;
}

Result<std::string> read_config(const std::string& path) {
  struct stat facts {};
  if (::stat(path.c_str(), &facts) != 0) {
    return cannot_read(path, ::strerror(errno));
  }
  if (!may_be_read(facts)) {
    return cannot_read(path, S_ISDIR(facts.st_mode)
                                 ? "it is a folder; it must be a file"
                                 : "it is a device or a socket; it must be a file");
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return cannot_read(path, ::strerror(errno));
  }
  std::string text(kMaxFileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) {
    return cannot_read(path, ::strerror(errno));
  }
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxFileBytes) {
    return cannot_read(path, fmt::format("it is larger than {}, which no configuration is",
                                         format_bytes(kMaxFileBytes)));
  }
  return text;
}

void load_file(const std::string& path, LoadedOptions* loaded, Problems* problems) {
  const Result<std::string> text = read_config(path);
  if (!text.is_ok()) {
    problems->add(text.status());
    return;
  }
  loaded->config_path = path;
  // toml++ as packaged reports errors by exceptions; they end here.
  try {
    load_table(toml::parse(text.value(), path), "", path, loaded, problems);
  } catch (const toml::parse_error& error) {
    // socket_mode = 0660, as one would write it elsewhere.
    const bool is_octal = error.description().find("leading zeroes") != std::string_view::npos;
    problems->add(Status(KVM_ERR_INVALID,
                         fmt::format("{}:{} is not TOML: {}{}", path,
                                     static_cast<uint32_t>(error.source().begin.line),
                                     error.description(), is_octal ? "; write it in quotes" : "")));
  }
}

void load_environment(const Environment& environment, const std::vector<std::string>& names,
                      LoadedOptions* loaded, Problems* problems) {
  std::vector<std::string> known = names_of(environment_name);
  known.push_back(kConfigVariable);
  for (size_t i = 0; i < option_rows().size(); ++i) {
    const std::string name = known[i];
    // An empty variable counts as unset, as it does for clients.
    if (const std::optional<std::string> value = environment(name); value && !value->empty()) {
      apply(i, Setting{*value, Origin::kEnvironment, name}, loaded, problems);
    }
  }
  // Clients, tests and build scripts have KVM_ variables of their own, so only a near miss is one.
  for (const std::string& name : names) {
    if (!name.starts_with("KVM_") || std::find(known.begin(), known.end(), name) != known.end()) {
      continue;
    }
    const auto meant = std::find_if(known.begin(), known.end(), [&](const std::string& candidate) {
      return edit_distance(name, candidate) <= 2;
    });
    if (meant != known.end()) {
      problems->add(
          Status(KVM_ERR_INVALID,
                 fmt::format("unknown variable '{}' in the environment; did you mean '{}'?", name,
                             *meant)));
    }
  }
}

struct CommandLine {
  std::vector<std::optional<std::string>> values;  // by row
  std::optional<std::string> config;
};

Status unexpected_argument(const std::string& argument) {
  if (!argument.starts_with("-")) {
    return Status(KVM_ERR_INVALID, fmt::format("unexpected argument '{}'; options begin with --, "
                                               "see kvmd --help",
                                               argument));
  }
  std::vector<std::string> known = names_of(flag_name);
  known.insert(known.end(), {"--config", "--print-config", "--json", "--version", "--help"});
  const std::string name = argument.substr(0, argument.find('='));
  const std::string nearest = hint(nearest_name(name, known));
  return Status(KVM_ERR_INVALID, fmt::format("unknown option '{}'{}", name,
                                             nearest.empty() ? "; see kvmd --help" : nearest));
}

Status parse_command_line(std::vector<std::string> arguments, CommandLine* line,
                          LoadedOptions* loaded) {
  CLI::App app;
  app.set_help_flag();
  app.allow_extras();
  line->values.resize(option_rows().size());
  for (size_t i = 0; i < option_rows().size(); ++i) {
    app.add_option(flag_name(option_rows()[i]), line->values[i]);
  }
  app.add_option("--config", line->config);
  app.add_flag("--print-config", loaded->print_config);
#if defined(KVM_KILL_POINTS) && KVM_KILL_POINTS
  app.add_flag("--list-kill-points", loaded->list_kill_points);
#endif
  app.add_flag("--json", loaded->json);
  app.add_flag("--version", loaded->version);
  app.add_flag("-h,--help", loaded->help);
  // CLI11 reports errors by exceptions, and takes its arguments in reverse order.
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::ParseError& error) {
    return Status(KVM_ERR_INVALID, fmt::format("{}; see kvmd --help", error.what()));
  }
  const std::vector<std::string> extras = app.remaining();
  return extras.empty() ? Status::ok() : unexpected_argument(extras.front());
}

}  // namespace

void Problems::add(const Status& status) {
  if (status.is_ok()) {
    return;
  }
  ++n_;
  if (n_ == 1) {
    code_ = status.code();
  }
  if (n_ <= kMaxShown) {
    sentences_ += (n_ == 1 ? "" : "\n") + std::string(status.message());
  }
}

Status Problems::status() const {
  if (n_ == 0) {
    return Status::ok();
  }
  const std::string more = n_ > kMaxShown ? fmt::format("\nand {} more", n_ - kMaxShown) : "";
  return Status(n_ == 1 ? code_ : KVM_ERR_INVALID, sentences_ + more);
}

Result<LoadedOptions> load_options(const std::vector<std::string>& arguments,
                                   const Environment& environment,
                                   const std::vector<std::string>& environment_names,
                                   const OptionsCheck& check) {
  LoadedOptions loaded;
  loaded.settings.resize(option_rows().size());
  CommandLine line;
  KVM_TRY(parse_command_line(arguments, &line, &loaded));
  Problems problems;
  for (size_t i = 0; i < option_rows().size(); ++i) {
    apply(i, Setting{option_rows()[i].default_text, Origin::kDefault, {}}, &loaded, &problems);
  }
  std::optional<std::string> config = line.config ? line.config : environment(kConfigVariable);
  if (!config && ::access(kDefaultConfigPath, F_OK) == 0) {
    config = kDefaultConfigPath;
  }
  if (config) {
    load_file(*config, &loaded, &problems);
  }
  load_environment(environment, environment_names, &loaded, &problems);
  for (size_t i = 0; i < option_rows().size(); ++i) {
    if (line.values[i]) {
      const std::string flag = flag_name(option_rows()[i]);
      apply(i, Setting{*line.values[i], Origin::kFlag, flag}, &loaded, &problems);
    }
  }
  if (check) {
    check(loaded.options, &problems);
  }
  KVM_TRY(problems.status());
  return loaded;
}

}  // namespace kvm::daemon
