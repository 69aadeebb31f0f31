// SPDX-License-Identifier: Apache-2.0
#include "daemon/machine.h"

#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>

#include "daemon/values.h"

namespace kvm::daemon {
namespace {

std::optional<uint64_t> read_number(const char* path) {
  std::ifstream file(path);
  std::string text;
  if (!(file >> text)) {
    return std::nullopt;
  }
  return parse_integer(text);  // "max" is not a number: no limit
}

}  // namespace

MachineMemory machine_memory() {
  MachineMemory memory;
  std::ifstream file("/proc/meminfo");
  std::string name;
  uint64_t kibibytes = 0;
  std::string unit;
  while (file >> name >> kibibytes && std::getline(file, unit)) {
    if (name == "MemTotal:") {
      memory.total_bytes = kibibytes * 1024;
    } else if (name == "MemAvailable:") {
      memory.free_bytes = kibibytes * 1024;
    }
  }
  const std::optional<uint64_t> limit = read_number("/sys/fs/cgroup/memory.max");
  const std::optional<uint64_t> used = read_number("/sys/fs/cgroup/memory.current");
  if (limit && used) {
    memory.total_bytes = std::min(memory.total_bytes, *limit);
    memory.free_bytes = std::min(memory.free_bytes, *limit - std::min(*limit, *used));
  }
  return memory;
}

void raise_open_file_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
}

}  // namespace kvm::daemon
