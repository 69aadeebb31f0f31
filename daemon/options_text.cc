// SPDX-License-Identifier: Apache-2.0
// The table of options as people and programs read it: help, files, JSON, tables, manual pages.
#include <fmt/format.h>

#include <nlohmann/json.hpp>  // JSON output; nobody should print JSON by hand
#include <sstream>

#include "daemon/options.h"
#include "kvm.h"

namespace kvm::daemon {
namespace {

using Json = nlohmann::ordered_json;

// "  NAME" blocks of --help are wrapped at this column.
constexpr size_t kHelpColumns = 96;

std::string wrap(const std::string& text, size_t indent) {
  std::string out(indent, ' ');
  size_t column = indent;
  size_t begin = 0;
  while (begin < text.size()) {
    size_t end = text.find(' ', begin);
    end = end == std::string::npos ? text.size() : end;
    if (column > indent && column + 1 + (end - begin) > kHelpColumns) {
      out += '\n' + std::string(indent, ' ');
      column = indent;
    }
    if (column > indent) {
      out += ' ';
      ++column;
    }
    out.append(text, begin, end - begin);
    column += end - begin;
    begin = end + 1;
  }
  return out + "\n";
}

// A value as TOML writes it: numbers and switches bare, the rest quoted.
std::string toml_value(const OptionRow& row, const std::string& text) {
  // TOML has no zeros in front, and 63 bits.
  if (const std::optional<uint64_t> number = parse_integer(text);
      number && *number <= INT64_MAX && std::holds_alternative<IntegerField>(row.field)) {
    return std::to_string(*number);
  }
  if (std::holds_alternative<BoolField>(row.field)) {
    return parse_bool(text).value_or(false) ? "true" : "false";
  }
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      quoted += fmt::format("\\u{:04x}", byte);
      continue;
    }
    if (c == '"' || c == '\\') {
      quoted += '\\';
    }
    quoted += c;
  }
  return quoted + "\"";
}

Json json_value(const OptionRow& row, const std::string& text) {
  if (const std::optional<uint64_t> number = parse_integer(text);
      number && std::holds_alternative<IntegerField>(row.field)) {
    return *number;
  }
  if (std::holds_alternative<BoolField>(row.field)) {
    return parse_bool(text).value_or(false);
  }
  return text;
}

// A text in which troff sees nothing of its own.
std::string roff(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      if (out.empty() && (c == '.' || c == '\'')) {
        out += "\\&";
      }
      out += c;
    }
  }
  return out;
}

}  // namespace

const char* origin_name(Origin origin) {
  switch (origin) {
    case Origin::kDefault:
      return "default";
    case Origin::kFile:
      return "file";
    case Origin::kEnvironment:
      return "environment";
    case Origin::kFlag:
      break;
  }
  return "command line";
}

std::string print_options(const LoadedOptions& loaded) {
  std::string out = "# Effective options of kvmd, as a configuration file.\n";
  out += loaded.config_path.empty() ? "# No configuration file was read.\n"
                                    : fmt::format("# Read from {}.\n", loaded.config_path);
  for (size_t i = 0; i < option_rows().size(); ++i) {
    const Setting& setting = loaded.settings[i];
    const std::string line =
        fmt::format("{} = {}", option_rows()[i].name, toml_value(option_rows()[i], setting.text));
    out += fmt::format("{:<40}  # {}{}{}\n", line, origin_name(setting.origin),
                       setting.place.empty() ? "" : ": ", setting.place);
  }
  return out;
}

std::string options_json(const LoadedOptions& loaded) {
  Json options = Json::array();
  for (size_t i = 0; i < option_rows().size(); ++i) {
    const OptionRow& row = option_rows()[i];
    const Setting& setting = loaded.settings[i];
    options.push_back({{"name", row.name},
                       {"value", json_value(row, setting.text)},
                       {"default", json_value(row, row.default_text)},
                       {"origin", origin_name(setting.origin)},
                       {"place", setting.place.empty() ? Json() : Json(setting.place)}});
  }
  const Json all = {
      {"version", fmt::format("{}.{}.{}", KVM_VERSION_MAJOR, KVM_VERSION_MINOR, KVM_VERSION_PATCH)},
      {"file", loaded.config_path.empty() ? Json() : Json(loaded.config_path)},
      {"options", options}};
  // A text of the environment may be any bytes; JSON is UTF-8.
  return all.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string default_file() {
  std::string out =
      "# Configuration of kvmd. Every option is here with its default, commented out: see\n"
      "# kvmd.toml(5). `kvmctl config check FILE` checks a file, `kvmctl config dump` shows what "
      "a\n"
      "# running kvmd uses and where each value comes from.\n";
  std::string section;
  for (const OptionRow& row : option_rows()) {
    const size_t dot = row.name.find('.');
    if (dot != std::string::npos && row.name.substr(0, dot) != section) {
      section = row.name.substr(0, dot);
      out += fmt::format("\n[{}]\n", section);
    }
    out += '\n';
    std::istringstream lines(wrap(row.help, 0));
    for (std::string line; std::getline(lines, line);) {
      out += fmt::format("# {}\n", line);
    }
    const std::string key = dot == std::string::npos ? row.name : row.name.substr(dot + 1);
    const std::string value = row.name == "socket" ? "/run/kvm/kvmd.sock" : row.default_text;
    out += fmt::format("#{} = {}\n", key, toml_value(row, value));
  }
  return out;
}

std::string options_roff(bool by_key) {
  std::string out;
  for (const OptionRow& row : option_rows()) {
    out += by_key ? fmt::format(".TP\n.B {}\n", roff(row.name))
                  : fmt::format(".TP\n.BI {} \" VALUE\"\n", roff(flag_name(row)));
    out += roff(row.help) + "\n";
    if (row.name != "socket") {
      out += fmt::format("Default: {}.\n", roff(row.default_text));
    }
    out += fmt::format("Allowed: {}.\n", roff(allowed_text(row)));
    out += fmt::format("Environment: {}.\n", roff(environment_name(row)));
  }
  return out;
}

std::string help_text() {
  std::string out =
      "Usage: kvmd [OPTIONS]\n"
      "\n"
      "kvmd keeps the keys and values of LLM inference engines in memory and computes attention\n"
      "where they lie. Engines connect through a Unix socket with libkvm (kvm.h).\n"
      "\n"
      "Every option has a default: `kvmd` alone starts a working service. Stop it with SIGTERM or\n"
      "Ctrl-C. `kvmctl status` and `kvmctl doctor` show how it is doing.\n"
      "\n"
      "An option can be given in three ways; the first one found counts:\n"
      "  1. on the command line                    --spin-max-us 50\n"
      "  2. in the environment                     KVM_SPIN_MAX_US=50\n"
      "  3. in a TOML file (see --config)          spin_max_us = 50\n"
      "\n"
      "General\n"
      "  --config PATH\n"
      "      The TOML file. Default: $KVM_CONFIG, else /etc/kvm/kvmd.toml if it exists.\n"
      "  --print-config\n"
      "      Prints the effective options, with the origin of each, and exits.\n"
      "  --json\n"
      "      With --print-config: as JSON.\n"
      "  --version\n"
      "      Prints the version and exits.\n"
      "  -h, --help\n"
      "      Prints this page and exits.\n"
      "\n"
      "Options\n";
  for (const OptionRow& row : option_rows()) {
    const std::string shown = row.name == "socket" ? "see below" : row.default_text;
    out += fmt::format("  {} VALUE    [{}]\n", flag_name(row), shown);
    out += wrap(row.help, 6);
    if (!std::holds_alternative<TextField>(row.field) || row.name != "socket") {
      out += wrap("Allowed: " + allowed_text(row) + ".", 6);
    }
  }
  out +=
      "\n"
      "Exit status: 0 after SIGTERM or SIGINT; 1 when the service could not start; 2 when an\n"
      "option is wrong.\n";
  return out;
}

std::string options_markdown() {
  std::string out =
      "| In the file | Environment | Command line | Default | Allowed | Meaning |\n"
      "|---|---|---|---|---|---|\n";
  for (const OptionRow& row : option_rows()) {
    const std::string shown = row.name == "socket" ? "see the text" : "`" + row.default_text + "`";
    out += fmt::format("| `{}` | `{}` | `{}` | {} | {} | {} |\n", row.name, environment_name(row),
                       flag_name(row), shown, allowed_text(row), row.help);
  }
  return out;
}

}  // namespace kvm::daemon
