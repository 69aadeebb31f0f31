// SPDX-License-Identifier: Apache-2.0
#include "base/machine.h"

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>
#include <thread>

namespace kvm {
namespace {

// Nothing where no number stands there: "max" says that there is no limit.
std::optional<uint64_t> read_number(const char* path) {
  std::ifstream file(path);
  uint64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;
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

uint32_t usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (::sched_getaffinity(0, sizeof(cores), &cores) == 0) {
    return static_cast<uint32_t>(std::max(1, CPU_COUNT(&cores)));
  }
  return std::max(1u, std::thread::hardware_concurrency());
}

void raise_open_file_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
}

}  // namespace kvm
