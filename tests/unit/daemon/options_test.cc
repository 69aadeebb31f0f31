// SPDX-License-Identifier: Apache-2.0
#include "daemon/options.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

namespace kvm::daemon {
namespace {

class OptionsTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (!path_.empty()) {
      ::unlink(path_.c_str());
    }
  }

  // A configuration file with this text, named in KVM_CONFIG.
  void write_file(const std::string& text) {
    char path[] = "/tmp/kvmd-options-XXXXXX";
    const int fd = ::mkstemp(path);
    ASSERT_GE(fd, 0);
    ::close(fd);
    path_ = path;
    std::ofstream(path_) << text;
    environment_["KVM_CONFIG"] = path_;
  }

  Result<LoadedOptions> load(const std::vector<std::string>& arguments = {}) {
    std::vector<std::string> names;
    for (const auto& [name, value] : environment_) {
      names.push_back(name);
    }
    return load_options(
        arguments,
        [this](const std::string& name) {
          const auto at = environment_.find(name);
          return at == environment_.end() ? std::nullopt : std::optional<std::string>(at->second);
        },
        names);
  }

  std::string message_of(const std::vector<std::string>& arguments = {}) {
    const Result<LoadedOptions> loaded = load(arguments);
    return loaded.is_ok() ? "" : std::string(loaded.status().message());
  }

  std::map<std::string, std::string> environment_;
  std::string path_;
};

TEST_F(OptionsTest, DefaultsOfTheTableAreValid) {
  const auto loaded = load();
  ASSERT_TRUE(loaded.is_ok()) << loaded.status().message();
  EXPECT_EQ(loaded.value().options.spin_max_us, 200u);
  EXPECT_EQ(loaded.value().options.socket_mode, 0660u);
  EXPECT_TRUE(loaded.value().options.host_capacity.is_share);
  EXPECT_FALSE(loaded.value().options.pin_threads);
}

TEST_F(OptionsTest, FlagBeatsEnvironmentBeatsFileBeatsDefault) {
  write_file("threads = 2\nspin_max_us = 3\nmax_clients = 4\n");
  environment_["KVM_THREADS"] = "5";
  environment_["KVM_SPIN_MAX_US"] = "6";
  const auto loaded = load({"--threads", "7"});
  ASSERT_TRUE(loaded.is_ok()) << loaded.status().message();
  EXPECT_EQ(loaded.value().options.threads, 7u);
  EXPECT_EQ(loaded.value().options.spin_max_us, 6u);
  EXPECT_EQ(loaded.value().options.max_clients, 4u);
  EXPECT_EQ(loaded.value().options.max_queues, 16u);
  const std::string printed = print_options(loaded.value());
  EXPECT_NE(printed.find("threads = 7"), std::string::npos) << printed;
  EXPECT_NE(printed.find("# command line: --threads"), std::string::npos) << printed;
  EXPECT_NE(printed.find("# environment: KVM_SPIN_MAX_US"), std::string::npos);
  EXPECT_NE(printed.find("# file: " + path_ + ":3"), std::string::npos) << printed;
}

TEST_F(OptionsTest, PrintedOptionsAreAFileWithTheSameMeaning) {
  environment_["KVM_SPIN_MAX_US"] = "unlimited";
  environment_["KVM_HOST_CAPACITY"] = "12GiB";
  environment_["KVM_PIN_THREADS"] = "true";
  const auto first = load();
  ASSERT_TRUE(first.is_ok());
  environment_.clear();
  write_file(print_options(first.value()));
  const auto second = load();
  ASSERT_TRUE(second.is_ok()) << second.status().message();
  for (size_t i = 0; i < option_rows().size(); ++i) {
    EXPECT_EQ(second.value().settings[i].text, first.value().settings[i].text);
    EXPECT_EQ(second.value().settings[i].origin, Origin::kFile);
  }
  EXPECT_EQ(second.value().options.spin_max_us, kUnlimited);
}

// Texts that TOML does not take as they stand.
TEST_F(OptionsTest, PrintedTextsAreToml) {
  const std::string socket = "/tmp/a \"b\" \\c\n\t\x7f\u00e4";
  environment_["KVM_SPIN_MAX_US"] = "0024";
  environment_["KVM_SOCKET"] = socket;
  const auto first = load();
  ASSERT_TRUE(first.is_ok()) << first.status().message();
  environment_.clear();
  write_file(print_options(first.value()));
  const auto second = load();
  ASSERT_TRUE(second.is_ok()) << second.status().message() << print_options(first.value());
  EXPECT_EQ(second.value().options.spin_max_us, 24u);
  EXPECT_EQ(second.value().options.socket, socket);
}

TEST_F(OptionsTest, UnknownKeyNamesTheNearest) {
  write_file("socket = '/tmp/x'\nspin_max = 3\n");
  const std::string message = message_of();
  EXPECT_NE(message.find("unknown option 'spin_max'"), std::string::npos) << message;
  EXPECT_NE(message.find(path_ + ":2"), std::string::npos) << message;
  EXPECT_NE(message.find("did you mean 'spin_max_us'?"), std::string::npos) << message;
}

TEST_F(OptionsTest, KeyInTheWrongSectionIsToldWhereItBelongs) {
  for (const char* key : {"threads", "threds"}) {
    write_file(std::string("[metrics]\n") + key + " = 2\n");
    EXPECT_NE(message_of().find("did you mean 'threads', which stands above the first section?"),
              std::string::npos)
        << message_of();
  }
  write_file("listen = '127.0.0.1:9464'\n");
  EXPECT_NE(message_of().find("did you mean 'listen' below [metrics]?"), std::string::npos)
      << message_of();
  write_file("[metrics]\nunheard_of = 2\n");
  EXPECT_EQ(message_of().find("did you mean"), std::string::npos) << message_of();
}

TEST_F(OptionsTest, OctalNumberWithoutQuotesIsToldSo) {
  write_file("socket_mode = 0660\n");
  EXPECT_NE(message_of().find("; write it in quotes"), std::string::npos) << message_of();
}

TEST_F(OptionsTest, UnknownFlagNamesTheNearest) {
  EXPECT_NE(message_of({"--soket", "/tmp/x"}).find("did you mean '--socket'?"), std::string::npos)
      << message_of({"--soket", "/tmp/x"});
  EXPECT_NE(message_of({"--threds=3"}).find("did you mean '--threads'?"), std::string::npos);
  EXPECT_NE(message_of({"start"}).find("unexpected argument 'start'"), std::string::npos);
  EXPECT_NE(message_of({"--threads"}).find("--threads"), std::string::npos) << "value missing";
}

TEST_F(OptionsTest, NearMissInTheEnvironmentIsAnError) {
  environment_["KVM_SOKET"] = "/tmp/x";
  EXPECT_NE(message_of().find("did you mean 'KVM_SOCKET'?"), std::string::npos) << message_of();
  environment_.clear();
  environment_["KVM_BIN_DIR"] = "/tmp";  // of the tests; near to nothing
  EXPECT_EQ(message_of(), "");
}

TEST_F(OptionsTest, BadValuesNameTheValueAndTheRange) {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"--threads", "-1"},
      {"--threads", "2000"},
      {"--max-clients", "0"},
      {"--max-clients", "65"},
      {"--host-capacity", "1"},
      {"--host-capacity", "120%"},
      {"--host-capacity", "0%"},
      {"--max-arena", "50%"},
      {"--max-arena", "8GiB"},
      {"--spin-max-us", "always"},
      {"--pin-threads", "2"},
      {"--socket-mode", "999"},
      {"--log-level", "loud"},
      {"--max-requests", "0"},
      {"--tenants", "1000"},
      {"--tenants", "1000: bytes"},
      {"--tenants", "me: bytes=1GiB"},
      {"--tenants", "1: bytes=1GiB; 1: queues=2"},
      {"--tenants", "1: queues=50%"},
      {"--tenants", "1: queues=2, queues=3"},
      {"--tenants", "1: pages=2"},
      {"--tenants", "4294967296: queues=2"},

  };
  for (const auto& [flag, value] : bad) {
    const std::string message = message_of({flag + "=" + value});
    EXPECT_NE(message.find("is '" + value + "'"), std::string::npos) << flag << ": " << message;
    EXPECT_NE(message.find("it must be"), std::string::npos) << message;
    EXPECT_NE(message.find(flag), std::string::npos) << message;
  }
}

TEST_F(OptionsTest, LimitsOfUsersAsTextAndAsTables) {
  write_file(
      "[tenants.default]\nbytes = '50%'\nmemory_bytes = '10%'\nsnapshot_bytes = '25%'\nsequences = "
      "1000\n"
      "[tenants.1000]\narena_bytes = '1GiB'\nrequests = 'unlimited'\n");
  const auto tables = load();
  ASSERT_TRUE(tables.is_ok()) << tables.status().message();
  const auto text =
      load({"--tenants",
            "default: bytes=50%, memory_bytes=10%, snapshot_bytes=25%, sequences=1000;"
            "1000:arena_bytes=1GiB,requests=unlimited"});
  ASSERT_TRUE(text.is_ok()) << text.status().message();
  for (const auto& loaded : {tables, text}) {
    using engine::Resource;
    engine::Amounts wholes;
    wholes[Resource::kBytes] = 4000;
    wholes[Resource::kMemoryBytes] = 1000;
    wholes[Resource::kSnapshotBytes] = 3000;
    const engine::TenantLimits limits = tenant_limits(loaded.value().options.tenants, wholes);
    EXPECT_EQ(limits.each[Resource::kBytes], 2000u);
    EXPECT_EQ(limits.each[Resource::kMemoryBytes], 100u);
    EXPECT_EQ(limits.each[Resource::kSnapshotBytes], 750u);
    EXPECT_EQ(limits.each[Resource::kSequences], 1000u);
    EXPECT_EQ(limits.each[Resource::kQueues], engine::kNoLimit);
    ASSERT_EQ(limits.own.size(), 1u);
    EXPECT_EQ(limits.own.at(1000)[Resource::kArenaBytes], uint64_t{1} << 30);
    EXPECT_EQ(limits.own.at(1000)[Resource::kRequests], engine::kNoLimit);
    EXPECT_EQ(limits.own.at(1000)[Resource::kBytes], std::nullopt);
  }
  write_file("[tenants]\n1000 = 5\n");
  EXPECT_NE(message_of().find("tenants in"), std::string::npos) << message_of();
}

TEST_F(OptionsTest, FilesThatAreNotTomlOrNotThere) {
  write_file("threads = [1, 2]\n");
  EXPECT_NE(message_of().find("must be a whole number"), std::string::npos) << message_of();
  std::ofstream(path_) << "threads = = 1\n";
  EXPECT_NE(message_of().find("is not TOML"), std::string::npos) << message_of();
  EXPECT_NE(message_of({"--config", "/nonexistent/x.toml"}).find("/nonexistent/x.toml"),
            std::string::npos);
}

TEST(OptionTable, NamesAreUniqueAndHelpMentionsEach) {
  std::set<std::string> names;
  const std::string help = help_text();
  for (const OptionRow& row : option_rows()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_NE(help.find("  " + flag_name(row) + " "), std::string::npos) << row.name;
    EXPECT_FALSE(row.help.empty());
  }
}

TEST(OptionTable, DocumentationHasTheTable) {
  const char* root = std::getenv("KVM_SOURCE_DIR");
  ASSERT_NE(root, nullptr);
  std::ifstream file(std::string(root) + "/docs/configuration.md");
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_NE(text.str().find(options_markdown()), std::string::npos)
      << "docs/configuration.md must contain this table:\n"
      << options_markdown();
}

}  // namespace
}  // namespace kvm::daemon
