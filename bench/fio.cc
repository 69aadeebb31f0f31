// SPDX-License-Identifier: Apache-2.0
#include "bench/fio.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

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

// Up to where a file has been written: what was set aside behind that is read from no disk.
uint64_t written_bytes(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const off_t hole = fd < 0 ? -1 : ::lseek(fd, 0, SEEK_HOLE);
  if (fd >= 0) {
    ::close(fd);
  }
  return hole < 0 ? 0 : static_cast<uint64_t>(hole);
}

std::string command_of(const FioRun& run) {
  const uint64_t file_bytes = run.file_bytes / run.block_bytes * run.block_bytes;
  return fmt::format(
      "fio --name=rival --filename='{}' --rw={} --bs={} --size={} --filesize={} --iodepth={} "
      "--file_service_type={} --ioengine=io_uring --direct=1 --registerfiles --fixedbufs --thread",
      fmt::join(run.files, ":"), run.how, run.block_bytes, file_bytes * run.files.size(),
      file_bytes, run.depth, std::string(run.how) == "randread" ? "random" : "sequential");
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

PacedFio::PacedFio(const FioRun& run, uint64_t bytes_per_s) {
  const std::string command =
      "exec " + command_of(run) +
      fmt::format(" --rate={} --time_based --runtime=60 >/dev/null 2>&1", bytes_per_s);
  child_ = ::fork();
  if (child_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    ::_exit(127);
  }
  require(child_ < 0 ? Status(KVM_ERR_LIMIT, std::strerror(errno)) : Status(), "fork");
}

PacedFio::~PacedFio() {
  const bool goes_on = ::waitpid(child_, nullptr, WNOHANG) == 0;
  require(goes_on ? Status() : Status(KVM_ERR_IO, "it ended before it was told to"), "fio");
  ::kill(child_, SIGKILL);
  while (::waitpid(child_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

double fio(const FioRun& run) {
  const std::string command = command_of(run) + " --output-format=json 2>/dev/null";
  const nlohmann::json report = nlohmann::json::parse(output_of(command), nullptr, false);
  const char* const side = std::string(run.how) == "write" ? "write" : "read";
  const nlohmann::json::json_pointer bandwidth(fmt::format("/jobs/0/{}/bw_bytes", side));
  if (report.is_discarded() || !report.contains(bandwidth)) {
    require(Status(KVM_ERR_IO, "it failed: " + command), "fio");
  }
  return report[bandwidth].get<double>();
}

double fio_on_segments(const DiskFolder& folder, const char* how, uint32_t block_bytes,
                       uint32_t depth, uint64_t max_bytes) {
  std::map<std::string, uint64_t> written;
  uint64_t most_bytes = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder.path())) {
    if (entry.path().extension() == ".segment") {
      const std::string path = entry.path().string();
      written[path] = written_bytes(path);
      most_bytes = std::max(most_bytes, written[path]);
    }
  }
  require(most_bytes < block_bytes
              ? Status(KVM_ERR_NOT_FOUND, "no segment has anything in it: " + folder.path())
              : Status(),
          "fio");
  std::vector<std::string> all;
  uint64_t file_bytes = most_bytes;
  for (const auto& [path, size_bytes] : written) {
    if (size_bytes >= std::max<uint64_t>(most_bytes / 2, block_bytes)) {
      all.push_back(path);
      file_bytes = std::min(file_bytes, size_bytes);
    }
  }
  const size_t n = std::clamp<size_t>(max_bytes / file_bytes, 1, all.size());
  std::vector<std::string> files;
  for (size_t i = 0; i < n; ++i) {
    files.push_back(all[i * all.size() / n]);
  }
  return fio({std::move(files), how, block_bytes, depth, file_bytes});
}

}  // namespace kvm::bench
