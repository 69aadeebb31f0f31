// SPDX-License-Identifier: Apache-2.0
// Completion scripts and the commands' part of the manual page, made from the definition of the
// command line, so that they cannot say anything else.
#include <fmt/format.h>

#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tools/kvmctl/cli.h"

namespace kvm::tools {
namespace {

struct Word {
  std::string text;
  std::string help;
  bool is_command = false;
  bool takes_value = false;
  bool takes_path = false;  // the value is one
};

// A Place is what may follow on the command line behind the commands of `path` (" config check",
// "").
struct Place {
  std::string path;
  std::vector<Word> words;
  bool takes_file = false;
};

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// Commands and options, those of groups of options (commands without a name) included.
std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  std::vector<const CLI::App*> commands = app.get_subcommands({});
  std::erase_if(commands, [](const CLI::App* command) { return command->get_name().empty(); });
  return commands;
}

std::vector<const CLI::Option*> options_of(const CLI::App& app) {
  std::vector<const CLI::Option*> options = app.get_options({});
  for (const CLI::App* group : app.get_subcommands({})) {
    if (group->get_name().empty()) {
      const std::vector<const CLI::Option*> more = group->get_options({});
      options.insert(options.end(), more.begin(), more.end());
    }
  }
  return options;
}

bool takes_value(const CLI::Option& option) { return option.get_items_expected_max() > 0; }

// "N" of what CLI11 keeps as "N:INT in [1 - 10]".
std::string type_of(const CLI::Option& option) {
  const std::string text = option.get_type_name();
  return text.substr(0, text.find(':'));
}

bool takes_path(const CLI::Option& option) { return type_of(option) == "PATH"; }

// Words of a positional argument whose type is written "bash|zsh|fish".
std::vector<std::string> choices_of(const CLI::Option& option) {
  std::vector<std::string> choices;
  const std::string type = type_of(option);
  if (type.find('|') != std::string::npos) {
    std::istringstream parts(type);
    for (std::string part; std::getline(parts, part, '|');) {
      choices.push_back(part);
    }
  }
  return choices;
}

void add_options(const CLI::App& app, Place* place) {
  for (const CLI::Option* option : options_of(app)) {
    for (const std::string& name : option->get_lnames()) {
      place->words.push_back({"--" + name, first_line(option->get_description()), false,
                              takes_value(*option) && !option->get_positional(),
                              takes_path(*option)});
    }
    if (option->get_positional()) {
      for (const std::string& choice : choices_of(*option)) {
        place->words.push_back({choice, first_line(option->get_description())});
      }
      place->takes_file =
          place->takes_file || type_of(*option) == "FILE" || type_of(*option) == "DIR";
    }
  }
}

void add_places(const CLI::App& root, const CLI::App& app, const std::string& path,
                std::vector<Place>* places) {
  Place place;
  place.path = path;
  for (const CLI::App* command : commands_of(app)) {
    place.words.push_back({command->get_name(), first_line(command->get_description()), true});
  }
  add_options(app, &place);
  if (&app != &root) {
    for (const CLI::Option* option : options_of(root)) {
      const std::vector<std::string>& names = option->get_lnames();
      if (!names.empty() && names[0] != "help" && names[0] != "version") {
        place.words.push_back({"--" + names[0], first_line(option->get_description()), false,
                               takes_value(*option), takes_path(*option)});
      }
    }
  }
  places->push_back(std::move(place));
  for (const CLI::App* command : commands_of(app)) {
    add_places(root, *command, path + " " + command->get_name(), places);
  }
}

// Options whose value is a path, and other options with a value, each as "--a|-a".
void add_valued(const CLI::App& app, std::vector<std::string>* files,
                std::vector<std::string>* others) {
  for (const CLI::Option* option : options_of(app)) {
    if (option->get_positional() || !takes_value(*option)) {
      continue;
    }
    std::vector<std::string>* to = takes_path(*option) ? files : others;
    for (const std::string& name : option->get_lnames()) {
      to->push_back("--" + name);
    }
    for (const std::string& name : option->get_snames()) {
      to->push_back("-" + name);
    }
  }
  for (const CLI::App* command : commands_of(app)) {
    add_valued(*command, files, others);
  }
}

// Inside of single quotes of a shell.
std::string quoted(const std::string& text) {
  std::string out;
  for (const char c : text) {
    out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  }
  return out;
}

std::string known_paths(const std::vector<Place>& places) {
  std::vector<std::string> paths;
  for (const Place& place : places) {
    if (!place.path.empty()) {
      paths.push_back("'" + place.path + "'");
    }
  }
  return fmt::format("{}", fmt::join(paths, "|"));
}

std::string bash_script(const CLI::App& app, const std::vector<Place>& places) {
  std::vector<std::string> files;
  std::vector<std::string> others;
  add_valued(app, &files, &others);
  std::string out =
      "# bash completion for kvmctl, by `kvmctl completion bash`.\n"
      "_kvmctl() {\n"
      "  local cur=\"${COMP_WORDS[COMP_CWORD]}\" prev=\"${COMP_WORDS[COMP_CWORD-1]}\"\n"
      "  local at='' words='' files='' i\n"
      "  for ((i = 1; i < COMP_CWORD; i++)); do\n"
      "    case \"$at ${COMP_WORDS[i]}\" in\n";
  out += fmt::format("      {}) at=\"$at ${{COMP_WORDS[i]}}\" ;;\n", known_paths(places));
  out += "    esac\n  done\n  case \"$prev\" in\n";
  out += fmt::format("    {}) COMPREPLY=($(compgen -f -- \"$cur\")); return ;;\n",
                     fmt::join(files, "|"));
  out += fmt::format("    {}) return ;;\n", fmt::join(others, "|"));
  out += "  esac\n  case \"$at\" in\n";
  for (const Place& place : places) {
    std::vector<std::string> words;
    for (const Word& word : place.words) {
      words.push_back(word.text);
    }
    out += fmt::format("    '{}') words='{}'{} ;;\n", place.path, fmt::join(words, " "),
                       place.takes_file ? " files=1" : "");
  }
  out +=
      "  esac\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n"
      "  [[ -z \"$files\" || \"$cur\" == -* ]] || COMPREPLY+=($(compgen -f -- \"$cur\"))\n"
      "}\n"
      "complete -o filenames -F _kvmctl kvmctl\n";
  return out;
}

std::string zsh_script(const CLI::App& app, const std::vector<Place>& places) {
  std::vector<std::string> files;
  std::vector<std::string> others;
  add_valued(app, &files, &others);
  std::string out =
      "#compdef kvmctl\n"
      "# zsh completion for kvmctl, by `kvmctl completion zsh`.\n"
      "_kvmctl() {\n"
      "  local at='' files='' i\n"
      "  local -a found\n"
      "  for ((i = 2; i < CURRENT; i++)); do\n"
      "    case \"$at $words[i]\" in\n";
  out += fmt::format("      ({}) at=\"$at $words[i]\" ;;\n", known_paths(places));
  out += "    esac\n  done\n  case \"$at\" in\n";
  for (const Place& place : places) {
    std::string words;
    for (const Word& word : place.words) {
      words += fmt::format(" '{}:{}'", word.text, quoted(word.help));
    }
    out += fmt::format("    ('{}') found=({}){} ;;\n", place.path, words.substr(1),
                       place.takes_file ? " files=1" : "");
  }
  out +=
      "  esac\n"
      "  _describe kvmctl found\n";
  out += fmt::format("  [[ -n \"$files\" || $words[CURRENT-1] == ({}) ]] && _files\n",
                     fmt::join(files, "|"));
  out +=
      "}\n"
      "compdef _kvmctl kvmctl\n";
  return out;
}

// When fish is at a place: its commands were given, and none of those below it.
std::string fish_condition(const Place& place) {
  std::string when;
  std::istringstream commands(place.path);
  for (std::string command; commands >> command;) {
    when += fmt::format("{}__fish_seen_subcommand_from {}", when.empty() ? "" : "; and ", command);
  }
  std::vector<std::string> below;
  for (const Word& word : place.words) {
    if (word.is_command) {
      below.push_back(word.text);
    }
  }
  if (!below.empty()) {
    when += fmt::format("{}not __fish_seen_subcommand_from {}", when.empty() ? "" : "; and ",
                        fmt::join(below, " "));
  }
  return when;
}

std::string fish_script(const std::vector<Place>& places) {
  std::string out =
      "# fish completion for kvmctl, by `kvmctl completion fish`.\n"
      "complete -c kvmctl -f\n"
      "complete -c kvmctl -l socket -r -F -d 'path of the daemon'\\''s socket'\n";
  for (const Place& place : places) {
    const std::string when = fish_condition(place);
    for (const Word& word : place.words) {
      if (word.text == "--socket") {
        continue;
      }
      const std::string what =
          word.text.starts_with("--") ? "-l " + word.text.substr(2) : "-a '" + word.text + "'";
      out += fmt::format("complete -c kvmctl -n '{}' {}{} -d '{}'\n", when, what,
                         word.takes_path    ? " -r -F"
                         : word.takes_value ? " -x"
                                            : "",
                         quoted(word.help));
    }
    if (place.takes_file) {
      out += fmt::format("complete -c kvmctl -n '{}' -F\n", when);
    }
  }
  return out;
}

// A text in which troff sees nothing of its own.
std::string roff(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else if (c == '\n') {
      out += ' ';
    } else {
      out += c;
    }
  }
  return out.starts_with('.') || out.starts_with('\'') ? "\\&" + out : out;
}

// "Help of an option." from "help of an option".
std::string sentence(std::string text) {
  if (!text.empty() && text[0] >= 'a' && text[0] <= 'z') {
    text[0] = static_cast<char>(text[0] - 'a' + 'A');
  }
  return text.ends_with('.') ? text : text + ".";
}

std::string option_roff(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.get_snames()) {
    names.push_back("\\fB" + roff("-" + name) + "\\fR");
  }
  for (const std::string& name : option.get_lnames()) {
    names.push_back("\\fB" + roff("--" + name) + "\\fR");
  }
  std::string out = fmt::format(".TP\n{}{}\n{}\n", fmt::join(names, ", "),
                                takes_value(option) && !option.get_positional()
                                    ? " \\fI" + roff(type_of(option)) + "\\fR"
                                    : "",
                                roff(sentence(option.get_description())));
  if (!option.get_default_str().empty() && takes_value(option)) {
    out += fmt::format("Default: {}.\n", roff(option.get_default_str()));
  }
  return out;
}

bool is_help(const CLI::Option& option) {
  return option.check_lname("help") || option.check_lname("version");
}

void append_command(const CLI::App& app, const std::string& path, std::string* out) {
  if (commands_of(app).empty()) {
    std::string positionals;
    for (const CLI::Option* option : options_of(app)) {
      if (option->get_positional()) {
        positionals += " " + roff(type_of(*option));
      }
    }
    *out += fmt::format(".SS \"kvmctl{}{}\"\n{}\n", roff(path), positionals,
                        roff(sentence(app.get_description())));
    for (const CLI::Option* option : options_of(app)) {
      if (!option->get_positional() && !is_help(*option)) {
        *out += option_roff(*option);
      }
    }
    if (!app.get_footer().empty()) {
      *out += fmt::format(".PP\n{}\n", roff(app.get_footer()));
    }
  }
  for (const CLI::App* command : commands_of(app)) {
    append_command(*command, path + " " + command->get_name(), out);
  }
}

int run_completion(const CLI::App& app, const std::string& shell) {
  fmt::print("{}", completion_script(app, shell));
  return kExitOk;
}

}  // namespace

std::string completion_script(const CLI::App& app, const std::string& shell) {
  std::vector<Place> places;
  add_places(app, app, "", &places);
  return shell == "bash"   ? bash_script(app, places)
         : shell == "zsh"  ? zsh_script(app, places)
         : shell == "fish" ? fish_script(places)
                           : "";
}

std::string commands_roff(const CLI::App& app) {
  std::string out = ".SH OPTIONS\n";
  for (const CLI::Option* option : options_of(app)) {
    out += option_roff(*option);
  }
  out += ".SH COMMANDS\n";
  append_command(app, "", &out);
  return out;
}

void add_completion_command(Cli* cli) {
  const auto shell = std::make_shared<std::string>();
  const CLI::App* app = &cli->app();
  cli->add("completion", "a script that makes a shell complete this command line",
           [app, shell](const Common&) { return run_completion(*app, *shell); })
      ->add_option("shell", *shell, "for which shell")
      ->check(CLI::IsMember({"bash", "zsh", "fish"}))
      ->type_name("bash|zsh|fish")
      ->required();
}

}  // namespace kvm::tools
