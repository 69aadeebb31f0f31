// SPDX-License-Identifier: Apache-2.0
// The three sources of options: file, environment, command line.
#include <errno.h>
#include <fmt/format.h>
#include <string.h>
#include <unistd.h>

#include <toml++/toml.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <sstream>
#include <utility>

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

Status apply(size_t index, Setting setting, LoadedOptions* loaded) {
  const OptionRow& row = option_rows()[index];
  if (!std::visit(Assign{&loaded->options, setting.text}, row.field)) {
    return Status(KVM_ERR_INVALID, fmt::format("{} is '{}'{}{}; it must be {}", row.name,
                                               setting.text, setting.place.empty() ? "" : " in ",
                                               setting.place, allowed_text(row)));
  }
  loaded->settings[index] = std::move(setting);
  return Status::ok();
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
std::string hint(std::string_view name, const std::vector<std::string>& candidates) {
  const std::string nearest = nearest_name(name, candidates);
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

// What an unknown key of the file may have meant. It may be right and stand in the wrong section:
// what is added at the end of a file belongs to the last one.
std::string file_hint(const std::string& name) {
  const auto names = names_of([](const OptionRow& row) { return row.name; });
  const auto keys = names_of([](const OptionRow& row) { return key_of(row.name); });
  auto key = std::find(keys.begin(), keys.end(), key_of(name));
  std::string meant = hint(name, names);
  if (key == keys.end() && !meant.empty()) {
    return meant;
  }
  if (key == keys.end()) {
    key = std::find(keys.begin(), keys.end(), nearest_name(key_of(name), keys));
  }
  if (key == keys.end()) {
    return {};
  }
  const std::string& whole = names[static_cast<size_t>(key - keys.begin())];
  return whole == *key
             ? fmt::format("; did you mean '{}', which stands above the first section?", whole)
             : fmt::format("; did you mean '{}' below [{}]?", *key,
                           whole.substr(0, whole.size() - key->size() - 1));
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
Status load_table(const toml::table& table, const std::string& prefix, const std::string& path,
                  LoadedOptions* loaded) {
  for (const auto& [key, node] : table) {
    const std::string name = prefix + std::string(key.str());
    if (const toml::table* section = node.as_table();
        section != nullptr && is_section(name + ".")) {
      KVM_TRY(load_table(*section, name + ".", path, loaded));
      continue;
    }
    const std::string place =
        fmt::format("{}:{}", path, static_cast<uint32_t>(node.source().begin.line));
    const std::optional<size_t> index = find_row(name);
    if (!index) {
      return Status(KVM_ERR_INVALID,
                    fmt::format("unknown option '{}' in {}{}", name, place, file_hint(name)));
    }
    const bool is_tenants = std::holds_alternative<TenantsField>(option_rows()[*index].field);
    std::optional<std::string> text =
        is_tenants && node.is_table() ? tenants_text(*node.as_table()) : text_of(node);
    if (!text) {
      return Status(KVM_ERR_INVALID, fmt::format("{} in {} must be {}", name, place,
                                                 allowed_text(option_rows()[*index])));
    }
    KVM_TRY(apply(*index, Setting{std::move(*text), Origin::kFile, place}, loaded));
  }
  return Status::ok();
}

Status load_file(const std::string& path, LoadedOptions* loaded) {
  std::ifstream file(path);
  std::stringstream text;
  // Nothing to read is no failure: so a file is told that there are no options.
  if (!file || (file.peek(), file.bad()) || (!file.eof() && !(text << file.rdbuf()))) {
    return Status(KVM_ERR_IO, fmt::format("cannot read the configuration file '{}': {}", path,
                                          ::strerror(errno)));
  }
  loaded->config_path = path;
  // toml++ as packaged reports errors by exceptions; they end here.
  try {
    return load_table(toml::parse(text.str(), path), "", path, loaded);
  } catch (const toml::parse_error& error) {
    // socket_mode = 0660, as one would write it elsewhere.
    const bool is_octal = error.description().find("leading zeroes") != std::string_view::npos;
    return Status(KVM_ERR_INVALID,
                  fmt::format("{}:{} is not TOML: {}{}", path,
                              static_cast<uint32_t>(error.source().begin.line), error.description(),
                              is_octal ? "; write it in quotes" : ""));
  }
}

Status load_environment(const Environment& environment, const std::vector<std::string>& names,
                        LoadedOptions* loaded) {
  std::vector<std::string> known = names_of(environment_name);
  known.push_back(kConfigVariable);
  for (size_t i = 0; i < option_rows().size(); ++i) {
    const std::string name = known[i];
    // An empty variable counts as unset, as it does for clients.
    if (const std::optional<std::string> value = environment(name); value && !value->empty()) {
      KVM_TRY(apply(i, Setting{*value, Origin::kEnvironment, name}, loaded));
    }
  }
  // Clients, tests and build scripts have KVM_ variables of their own, so only a near miss is one.
  for (const std::string& name : names) {
    if (!name.starts_with("KVM_") || std::find(known.begin(), known.end(), name) != known.end()) {
      continue;
    }
    for (const std::string& candidate : known) {
      if (edit_distance(name, candidate) <= 2) {
        return Status(KVM_ERR_INVALID,
                      fmt::format("unknown variable '{}' in the environment; did you mean '{}'?",
                                  name, candidate));
      }
    }
  }
  return Status::ok();
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
  const std::string nearest = hint(name, known);
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

Result<LoadedOptions> load_options(const std::vector<std::string>& arguments,
                                   const Environment& environment,
                                   const std::vector<std::string>& environment_names) {
  LoadedOptions loaded;
  loaded.settings.resize(option_rows().size());
  CommandLine line;
  KVM_TRY(parse_command_line(arguments, &line, &loaded));
  for (size_t i = 0; i < option_rows().size(); ++i) {
    KVM_TRY(apply(i, Setting{option_rows()[i].default_text, Origin::kDefault, {}}, &loaded));
  }
  std::optional<std::string> config = line.config ? line.config : environment(kConfigVariable);
  if (!config && ::access(kDefaultConfigPath, F_OK) == 0) {
    config = kDefaultConfigPath;
  }
  if (config) {
    KVM_TRY(load_file(*config, &loaded));
  }
  KVM_TRY(load_environment(environment, environment_names, &loaded));
  for (size_t i = 0; i < option_rows().size(); ++i) {
    if (line.values[i]) {
      const std::string flag = flag_name(option_rows()[i]);
      KVM_TRY(apply(i, Setting{*line.values[i], Origin::kFlag, flag}, &loaded));
    }
  }
  return loaded;
}

}  // namespace kvm::daemon
