// SPDX-License-Identifier: Apache-2.0
#include "tools/kvmctl/doctor.h"

#include <fmt/format.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include "base/machine.h"

namespace kvm::tools {

namespace {

std::string read_text(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  std::string out = text.str();
  while (!out.empty() && out.back() == '\n') {
    out.pop_back();
  }
  return out;
}

// Returns what kvmd says of itself, "" where it does not: none runs, or one that is older.
std::string reported_huge_pages(const std::string& metrics) {
  const std::string name = "\nkvm_huge_pages_info{setting=\"";
  const size_t at = metrics.find(name);
  const size_t begin = at + name.size();
  return at == std::string::npos ? "" : metrics.substr(begin, metrics.find('"', begin) - begin);
}

Finding instruction_sets(const kvm_client_info* info) {
  Finding out;
  out.subject = "instruction set";
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  out.found = fmt::format("scalar{}{}{}", avx2 ? ", avx2" : "", avx512 ? ", avx512" : "",
                          bf16 ? ", avx512bf16" : "");
  if (!avx2) {
    out.verdict = Verdict::kFallback;
    out.consequence = "scalar kernels: attention runs at a small part of memory speed";
  }
#else
  out.found = "scalar";
  out.verdict = Verdict::kFallback;
  out.consequence = "scalar kernels: attention runs at a small part of memory speed";
#endif
  if (info != nullptr) {
    out.found += fmt::format("; kvmd uses {}", info->isa);
  }
  return out;
}

Finding huge_pages(const std::string& metrics) {
  Finding out;
  out.subject = "transparent huge pages";
  const std::string reported = reported_huge_pages(metrics);
  const std::string setting = reported.empty() ? huge_page_setting() : reported;
  out.found = (setting == "absent" ? "not in this kernel" : setting) +
              (reported.empty() ? " (for kvmctl; no kvmd tells)" : " (for kvmd)");
  if (setting != "always" && setting != "madvise") {
    out.verdict = Verdict::kFallback;
    out.consequence =
        "4-KiB pages: reads lose to address translation, first touches are several times slower. ";
    out.consequence += setting == "disabled"
                           ? "The process that started kvmd has disabled them (PR_SET_THP_DISABLE)"
                           : "Set /sys/kernel/mm/transparent_hugepage/enabled to madvise";
  }
  return out;
}

Finding io_uring() {
  Finding out;
  out.subject = "io_uring";
  // An invalid size: the call fails with EINVAL where io_uring is allowed.
  errno = 0;
  const long result = syscall(SYS_io_uring_setup, 0, nullptr);
  const int error = errno;
  if (result < 0 && (error == ENOSYS || error == EPERM)) {
    out.found = error == ENOSYS ? "not in this kernel, or filtered" : "disabled for this user";
    out.verdict = Verdict::kFallback;
    out.consequence =
        "kvm_queue_fd returns -1: engines poll or wait instead of using epoll; the disk is read "
        "and written by threads";
  } else {
    out.found = "available";
  }
  return out;
}

// The process whose limits are looked at: kvmd's, or where it cannot be seen (other process
// numbers, in a container) those of this process.
struct Process {
  std::string folder = "/proc/self";
  const char* whose = " (of kvmctl; kvmd is not seen from here)";
};

Process process_of(const kvm_client_info* info) {
  Process out;
  if (info != nullptr) {
    const std::string folder = fmt::format("/proc/{}", info->server_pid);
    if (read_text(folder + "/comm") == "kvmd") {
      out = {folder, " (of kvmd)"};
    }
  }
  return out;
}

// The soft limit in the line of /proc/PID/limits that begins with `name`; nothing: unlimited.
std::optional<uint64_t> soft_limit(const Process& process, const std::string& name) {
  std::ifstream in(process.folder + "/limits");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(name)) {
      std::istringstream rest(line.substr(name.size()));
      uint64_t limit = 0;
      return rest >> limit ? std::optional(limit) : std::nullopt;
    }
  }
  return std::nullopt;
}

Finding memory_lock(const Process& process) {
  Finding out;
  out.subject = "locked memory limit";
  const std::optional<uint64_t> limit = soft_limit(process, "Max locked memory");
  out.found = (limit ? fmt::format("{} KiB", *limit / 1024) : "unlimited") + process.whose;
  return out;  // nothing locks memory on the CPU tier
}

Finding open_files(const Process& process) {
  Finding out;
  out.subject = "open files limit";
  const std::optional<uint64_t> limit = soft_limit(process, "Max open files");
  out.found = (limit ? std::to_string(*limit) : "unlimited") + process.whose;
  if (limit && *limit < 4096) {
    out.verdict = Verdict::kFallback;
    out.consequence =
        "each client needs 3 descriptors, 3 per queue and 1 per arena; 64 busy clients need more. "
        "Raise it with ulimit -n or LimitNOFILE=";
  }
  return out;
}

Finding cores(const kvm_client_info* info) {
  Finding out;
  out.subject = "cores";
  const long n = sysconf(_SC_NPROCESSORS_ONLN);
  out.found = std::to_string(n);
  if (info != nullptr) {
    out.found += fmt::format("; kvmd computes on {}", info->n_threads);
    if (static_cast<long>(info->n_threads) > n) {
      out.verdict = Verdict::kProblem;
      out.consequence = "more threads than cores: they take turns. Lower kvmd's `threads`";
    }
  }
  return out;
}

Finding numa() {
  Finding out;
  out.subject = "NUMA nodes";
  int nodes = 0;
  std::error_code ignored;
  for (const auto& entry :
       std::filesystem::directory_iterator("/sys/devices/system/node", ignored)) {
    nodes += entry.path().filename().string().starts_with("node") ? 1 : 0;
  }
  out.found = std::to_string(nodes > 0 ? nodes : 1);
  if (nodes > 1) {
    out.verdict = Verdict::kFallback;
    out.consequence = "memory of all nodes is used alike; start one kvmd per node with numactl";
  }
  return out;
}

Finding memory(const kvm_client_info* info) {
  Finding out;
  out.subject = "memory";
  std::ifstream in("/proc/meminfo");
  std::string key;
  std::string unit;
  uint64_t kib = 0;
  uint64_t available_kib = 0;
  while (in >> key >> kib >> unit) {
    if (key == "MemAvailable:") {
      available_kib = kib;
    }
  }
  out.found = fmt::format("{:.1f} GiB available", static_cast<double>(available_kib) / 1048576.0);
  if (info != nullptr) {
    out.found += fmt::format("; kvmd may use {:.1f} GiB",
                             static_cast<double>(info->host_capacity_bytes) / 1073741824.0);
  }
  return out;
}

Finding swap() {
  Finding out;
  out.subject = "swap";
  std::ifstream in("/proc/meminfo");
  std::string key;
  std::string unit;
  uint64_t kib = 0;
  uint64_t total_kib = 0;
  while (in >> key >> kib >> unit) {
    total_kib = key == "SwapTotal:" ? kib : total_kib;
  }
  out.found = total_kib == 0
                  ? "none"
                  : fmt::format("{:.1f} GiB", static_cast<double>(total_kib) / 1048576.0);
  if (total_kib != 0) {
    out.verdict = Verdict::kFallback;
    out.consequence =
        "keys and values that are swapped out come back a page fault at a time, a thousand times "
        "slower. Set MemorySwapMax=0 in kvmd's unit, or swapoff";
  }
  return out;
}

// The lowest limit of the process's control group and of all above it, or no number.
uint64_t group_limit(const Process& process) {
  uint64_t lowest = UINT64_MAX;
  std::ifstream groups(process.folder + "/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::/")) {
      continue;
    }
    std::string path = line.substr(3);
    for (size_t end = path.size(); end != std::string::npos; end = path.rfind('/')) {
      path.resize(end);
      for (const char* name : {"/memory.max", "/memory.high"}) {
        std::ifstream in("/sys/fs/cgroup" + path + name);
        uint64_t limit = 0;
        lowest = in >> limit ? std::min(lowest, limit) : lowest;
      }
    }
  }
  return lowest;
}

Finding memory_cap(const Process& process, const kvm_client_info* info) {
  Finding out;
  out.subject = "memory limit";
  const uint64_t limit = group_limit(process);
  out.found = (limit == UINT64_MAX ? "none of a control group"
                                   : fmt::format("{:.1f} GiB of a control group",
                                                 static_cast<double>(limit) / 1073741824.0)) +
              process.whose;
  if (info != nullptr && info->host_capacity_bytes > limit) {
    out.verdict = Verdict::kProblem;
    out.consequence =
        "keys and values may take more: the kernel would kill kvmd. Lower its "
        "`host_capacity`, or raise MemoryMax=";
  }
  return out;
}

Finding gpu(const kvm_client_info* info) {
  Finding out;
  out.subject = "GPU";
  int count = 0;
  std::error_code ignored;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", ignored)) {
    count += entry.is_directory(ignored) ? 1 : 0;
  }
  out.found = count == 0 ? "none with an NVIDIA driver" : fmt::format("{} of NVIDIA", count);
  if (count != 0 && info != nullptr && (info->features & KVM_FEATURE_DEVICE) == 0) {
    out.verdict = Verdict::kFallback;
    out.consequence =
        "this kvmd owns no memory of it (`device.pool` is 0): engines may use it with memory of "
        "their own, by kvm_cuda_open; what they ask of kvmd runs on CPUs";
  }
  return out;
}

Finding daemon(const kvm_client_info* info, const std::string& why_none) {
  Finding out;
  out.subject = "daemon";
  if (info == nullptr) {
    out.verdict = Verdict::kProblem;
    out.found = why_none.empty() ? "no answer" : why_none;
    out.consequence = "start kvmd, or name its socket with --socket or KVM_SOCKET";
    return out;
  }
  out.found = fmt::format("kvmd {}, process {}, protocol {}.{}", info->server_version,
                          info->server_pid, info->protocol_major, info->protocol_minor);
  return out;
}

}  // namespace

const char* verdict_name(Verdict verdict) {
  switch (verdict) {
    case Verdict::kGood:
      return "good";
    case Verdict::kFallback:
      return "fallback";
    case Verdict::kProblem:
      return "problem";
  }
  return "problem";
}

std::vector<Finding> examine(const DaemonFacts& facts) {
  const kvm_client_info* info = facts.info;
  const Process process = process_of(info);
  std::vector<Finding> out = {daemon(info, facts.why_none),
                              instruction_sets(info),
                              huge_pages(facts.metrics),
                              io_uring(),
                              memory_lock(process),
                              open_files(process),
                              cores(info),
                              numa(),
                              memory(info),
                              memory_cap(process, info),
                              swap(),
                              gpu(info)};
  if (info != nullptr && (info->features & KVM_FEATURE_EVENTFD) == 0) {
    out.push_back({"completion events", Verdict::kFallback, "not offered by this daemon",
                   "kvm_queue_fd returns -1: engines poll or wait instead of using epoll"});
  }
  return out;
}

}  // namespace kvm::tools
