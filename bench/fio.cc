// SPDX-License-Identifier: Apache-2.0
#include "bench/fio.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

namespace kvm::bench {
namespace {

namespace fs = std::filesystem;

// What a command prints; empty where it cannot be run.
std::string output_of(const std::string& command) {
  std::string text;
  FILE* const pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) {
    return text;
  }
  std::array<char, 4096> part;
  for (size_t n = 0; (n = std::fread(part.data(), 1, part.size(), pipe)) != 0;) {
    text.append(part.data(), n);
  }
  return ::pclose(pipe) == 0 ? text : std::string();
}

// Removed where the program ends early, as require() has it.
std::string* folder_left() {
  static auto* const path = new std::string;
  return path;
}

void remove_left() {
  std::error_code ignored;
  if (!folder_left()->empty()) {
    fs::remove_all(*folder_left(), ignored);
  }
}

void require_none(const std::error_code& error, const std::string& path) {
  require(error ? Status(KVM_ERR_IO, path + ": " + error.message()) : Status(), "folder");
}

}  // namespace

DiskFolder::DiskFolder(const Options& options) {
  const fs::path parent = options.directory.empty() ? "." : options.directory;
  std::error_code error;
  free_bytes_ = fs::space(parent, error).available;
  require_none(error, parent.string());
  path_ = (parent / fmt::format("kvm-bench-{}", ::getpid())).string();
  fs::create_directory(path_, error);
  require_none(error, path_);
  *folder_left() = path_;
  std::atexit(remove_left);
}

DiskFolder::~DiskFolder() {
  remove_left();
  folder_left()->clear();
}

void DiskFolder::require_free(uint64_t size_bytes) const {
  require(size_bytes > free_bytes_ ? Status(KVM_ERR_NO_SPACE, "there is no room for " + path_)
                                   : Status(),
          "folder");
}

bool has_fio() { return !output_of("fio --version 2>/dev/null").empty(); }

double fio(const FioRun& run) {
  const std::string command = fmt::format(
      "fio --name=rival --filename='{}' --rw={} --bs={} --size={} --iodepth={} "
      "--ioengine=io_uring --direct=1 --registerfiles --fixedbufs --output-format=json 2>/dev/null",
      run.file, run.how, run.block_bytes, run.size_bytes, run.depth);
  const nlohmann::json report = nlohmann::json::parse(output_of(command), nullptr, false);
  const char* const side = std::string(run.how) == "write" ? "write" : "read";
  const nlohmann::json::json_pointer bandwidth(fmt::format("/jobs/0/{}/bw_bytes", side));
  if (report.is_discarded() || !report.contains(bandwidth)) {
    require(Status(KVM_ERR_IO, "it failed: " + command), "fio");
  }
  return report[bandwidth].get<double>();
}

}  // namespace kvm::bench
