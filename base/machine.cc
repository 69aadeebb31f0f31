// SPDX-License-Identifier: Apache-2.0
#include "base/machine.h"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

namespace kvm {
namespace {

// Nothing where no number stands there: "max" says that there is no limit.
std::optional<uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;
}

// The number behind a name in a file of lines "name number"; 0 where there is none.
uint64_t read_named(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  std::string found;
  uint64_t number = 0;
  while (file >> found >> number) {
    if (found == name) {
      return number;
    }
  }
  return 0;
}

// The files of a version of control groups.
struct Layout {
  const char* controllers;  // in /proc/self/cgroup
  const char* mount;
  std::array<const char*, 2> limits;  // the lower one counts; null: there is one only
  const char* usage;
  const char* droppable;  // a line of memory.stat
};
constexpr Layout kLayouts[] = {
    {"", "/sys/fs/cgroup", {"/memory.max", "/memory.high"}, "/memory.current", "inactive_file"},
    {"memory",
     "/sys/fs/cgroup/memory",
     {"/memory.limit_in_bytes", nullptr},
     "/memory.usage_in_bytes",
     "total_inactive_file"}};

void lower_to_group(const std::string& folder, const Layout& layout, MachineMemory* memory) {
  const std::optional<uint64_t> usage = read_number(folder + layout.usage);
  for (const char* name : layout.limits) {
    const std::optional<uint64_t> limit =
        name != nullptr ? read_number(folder + name) : std::nullopt;
    if (limit) {
      const uint64_t droppable = read_named(folder + "/memory.stat", layout.droppable);
      const uint64_t used = usage.value_or(0) - std::min(usage.value_or(0), droppable);
      memory->total_bytes = std::min(memory->total_bytes, *limit);
      memory->free_bytes = std::min(memory->free_bytes, *limit - std::min(*limit, used));
    }
  }
}

// The group of this process in a line "7:cpu,memory:/a/b" of /proc/self/cgroup; nothing where the
// line is of other controllers. A group outside of what can be seen begins with "/..": the root.
std::optional<std::string> group_in(const std::string& line, std::string_view controllers) {
  const size_t first = line.find(':');
  const size_t second = line.find(':', first + 1);
  if (first == std::string::npos || second == std::string::npos ||
      line.substr(first + 1, second - first - 1) != controllers) {
    return std::nullopt;
  }
  const std::string path = line.substr(second + 1);
  return path.size() < 2 || !path.starts_with('/') || path.starts_with("/..") ? std::string()
                                                                              : path;
}

}  // namespace

MachineMemory machine_memory(const std::string& root) {
  MachineMemory memory;
  std::ifstream file(root + "/proc/meminfo");
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
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    for (const Layout& layout : kLayouts) {
      std::optional<std::string> path = group_in(line, layout.controllers);
      while (path) {
        lower_to_group(root + layout.mount + *path, layout, &memory);
        path = path->empty() ? std::nullopt : std::optional(path->substr(0, path->rfind('/')));
      }
    }
  }
  return memory;
}

std::string huge_page_setting(const std::string& root) {
  if (::prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) > 0) {
    return "disabled";
  }
  std::ifstream file(root + "/sys/kernel/mm/transparent_hugepage/enabled");
  std::string line;
  std::getline(file, line);
  for (const char* setting : {"always", "madvise", "never"}) {
    if (line.find(std::string("[") + setting + "]") != std::string::npos) {
      return setting;
    }
  }
  return "absent";
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
