// SPDX-License-Identifier: Apache-2.0
// kvmctl config: the options of a kvmd. Which names and values there are is for kvmd to know, so
// what concerns a file or a future kvmd is asked of the kvmd beside this program.
#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/counted.h"
#include "tools/kvmctl/cli.h"

namespace kvm::tools {
namespace {

// The kvmd that was installed with this kvmctl, else the one of the PATH.
std::string find_kvmd() {
  std::string path(4096, '\0');
  const ssize_t n = ::readlink("/proc/self/exe", path.data(), path.size());
  path.resize(n > 0 ? static_cast<size_t>(n) : 0);
  path = path.substr(0, path.rfind('/') + 1) + "kvmd";
  return ::access(path.c_str(), X_OK) == 0 ? path : "kvmd";
}

struct Outcome {
  int exit_status = -1;
  std::string out;
  std::string err;
};

// A file in memory, for what a child writes: of any length, and nobody has to read meanwhile.
std::string take_text(int fd) {
  std::string text;
  char buffer[4096];
  ::lseek(fd, 0, SEEK_SET);
  for (ssize_t n = 0; (n = ::read(fd, buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<size_t>(n));
  }
  ::close(fd);
  return text;
}

// Runs kvmd to its end. with_environment: it sees the KVM_ variables of this process.
Outcome run_kvmd(std::vector<std::string> arguments, bool with_environment) {
  const std::string program = find_kvmd();
  arguments.insert(arguments.begin(), "kvmd");
  std::vector<char*> argv;
  for (std::string& argument : arguments) {
    argv.push_back(argument.data());
  }
  argv.push_back(nullptr);
  std::vector<char*> environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (with_environment || !std::string_view(*entry).starts_with("KVM_")) {
      environment.push_back(*entry);
    }
  }
  environment.push_back(nullptr);
  const int out = ::memfd_create("out", MFD_CLOEXEC);
  const int err = ::memfd_create("err", MFD_CLOEXEC);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, err, STDERR_FILENO);
  pid_t pid = 0;
  const int error =
      ::posix_spawnp(&pid, program.c_str(), &actions, nullptr, argv.data(), environment.data());
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    fail(fmt::format("cannot run '{}', which knows the options: {}", program, std::strerror(error)),
         kExitService);
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, take_text(out), take_text(err)};
}

// kvmd's sentences, a line each, without its name.
std::vector<std::string> sentences_of(std::string_view text) {
  std::vector<std::string> sentences;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    const std::string_view name = "kvmd: ";
    line.remove_prefix(line.starts_with(name) ? name.size() : 0);
    sentences.emplace_back(line);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return sentences;
}

Json parse_config(const std::string& text) {
  Json config = Json::parse(text, nullptr, false);
  if (!config.is_object() || !config.contains("options")) {
    fail("kvmd's configuration is not the JSON that this kvmctl understands", kExitService);
  }
  return config;
}

// As TOML writes a value: JSON's texts and numbers are TOML's.
void print_options(const Json& options) {
  for (const Json& option : options) {
    const std::string line = fmt::format("{} = {}", option.value("name", ""),
                                         option.contains("value") ? option["value"].dump() : "");
    const bool has_place = option.contains("place") && option["place"].is_string();
    fmt::print("{:<40}  # {}{}{}\n", line, option.value("origin", ""), has_place ? ": " : "",
               has_place ? option["place"].get<std::string>() : "");
  }
}

// Exits so where an option is wrong.
Json config_here(std::vector<std::string> arguments, Exit exit) {
  arguments.insert(arguments.end(), {"--print-config", "--json"});
  const Outcome outcome = run_kvmd(std::move(arguments), true);
  if (outcome.exit_status != 0) {
    fail(fmt::format("{}", fmt::join(sentences_of(outcome.err), "\nkvmctl: ")), exit);
  }
  return parse_config(outcome.out);
}

int run_dump(const Common& common, bool offline) {
  Json config;
  if (offline) {
    config = config_here({}, kExitCheck);
  } else {
    const Connection connection(common);
    config = parse_config(text_of(connection.get(), kvm_get_config_text, "configuration"));
  }
  if (common.json) {
    print_json(config);
    return kExitOk;
  }
  fmt::print("# Options of kvmd {}{}.\n", config.value("version", ""),
             offline ? " as it would start here" : ", which runs");
  fmt::print("# {}\n", config["file"].is_string()
                           ? fmt::format("Read from {}.", config["file"].get<std::string>())
                           : "No configuration file was read.");
  print_options(config["options"]);
  return kExitOk;
}

int run_check(const Common& common, const std::string& file) {
  // The file alone: a variable of the operator's own would hide what it says.
  const Outcome outcome = run_kvmd({"--config", file, "--print-config", "--json"}, false);
  const bool is_right = outcome.exit_status == 0;
  Json options = Json::array();
  if (is_right) {
    const Json config = parse_config(outcome.out);
    for (const Json& option : config["options"]) {
      if (option.value("origin", "") == "file") {
        options.push_back(option);
      }
    }
  }
  const std::vector<std::string> errors =
      is_right ? std::vector<std::string>() : sentences_of(outcome.err);
  if (common.json) {
    print_json({{"file", file},
                {"valid", is_right},
                {"error", is_right ? Json() : Json(fmt::format("{}", fmt::join(errors, "\n")))},
                {"errors", errors},
                {"options", options}});
    return is_right ? kExitOk : kExitCheck;
  }
  if (!is_right) {
    fail(fmt::format("{}", fmt::join(errors, "\nkvmctl: ")), kExitCheck);
  }
  fmt::print("{} is right and sets {}.\n", file, counted(options.size(), "option"));
  print_options(options);
  return kExitOk;
}

}  // namespace

Json options_here(std::vector<std::string> arguments) {
  return config_here(std::move(arguments), kExitUsage)["options"];
}

void add_config_commands(Cli* cli) {
  CLI::App* config = cli->add_group("config", "the options of kvmd, and where each comes from");
  const auto file = std::make_shared<std::string>();
  cli->add(
         "check", "whether a configuration file is right, and what it sets",
         [file](const Common& common) { return run_check(common, *file); }, config)
      ->add_option("file", *file, "the file")
      ->type_name("FILE")
      ->required();
  const auto offline = std::make_shared<bool>(false);
  cli->add(
         "dump", "the options in force, each with its origin",
         [offline](const Common& common) { return run_dump(common, *offline); }, config)
      ->add_flag("--offline", *offline,
                 "of a kvmd that would be started here and now, not of the running one");
}

}  // namespace kvm::tools
