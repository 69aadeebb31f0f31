// SPDX-License-Identifier: Apache-2.0
#include "daemon/disk.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "daemon/values.h"

namespace kvm::daemon {
namespace {

tiers::DiskBackend backend_of(const std::string& name) {
  return name == "io_uring"  ? tiers::DiskBackend::kUring
         : name == "threads" ? tiers::DiskBackend::kThreads
                             : tiers::DiskBackend::kAny;
}

}  // namespace

std::vector<std::string> directory_list(std::string_view text) {
  std::vector<std::string> list;
  if (text == "none") {
    return list;
  }
  for (;;) {
    const size_t comma = text.find(',');
    std::string_view path = text.substr(0, comma);
    path.remove_prefix(std::min(path.find_first_not_of(' '), path.size()));
    path = path.substr(0, path.find_last_not_of(' ') + 1);
    list.emplace_back(path);
    if (comma == std::string_view::npos) {
      return list;
    }
    text.remove_prefix(comma + 1);
  }
}

bool is_directory_list(const std::string& text) {
  const std::vector<std::string> list = directory_list(text);
  return std::all_of(list.begin(), list.end(),
                     [](const std::string& path) { return path.starts_with('/'); });
}

Result<std::unique_ptr<tiers::DiskTier>> open_disk(const Options& options) {
  tiers::DiskTierOptions tier;
  tier.directories = directory_list(options.disk_directories);
  if (tier.directories.empty()) {
    return std::unique_ptr<tiers::DiskTier>();
  }
  // First of all they are taken: what another kvmd has there is nothing that is left over.
  KVM_TRY_ASSIGN(std::vector<tiers::DataDirectory> directories,
                 tiers::open_directories(tier.directories));
  KVM_TRY_ASSIGN(const uint64_t whole, tiers::free_bytes(directories));
  tier.capacity_bytes = options.disk_capacity.resolve(whole);
  if (tier.capacity_bytes > whole) {
    spdlog::warn("disk.capacity is {}, and {} has {} free: pages will find the drive full first",
                 format_bytes(tier.capacity_bytes), options.disk_directories, format_bytes(whole));
  }
  tier.backend = backend_of(options.disk_backend);
  tier.move_bytes_per_s = options.disk_compaction_rate.bytes;
  tier.write_bytes_per_day = options.disk_daily_writes.bytes;
  return tiers::DiskTier::open_in(std::move(directories), tier);
}

Result<engine::MovementOptions> movement_options(const Options& options,
                                                 uint64_t host_capacity_bytes) {
  const uint64_t high = options.disk_high.resolve(host_capacity_bytes);
  const uint64_t low = options.disk_low.resolve(host_capacity_bytes);
  if (low == 0 || low >= high || high > host_capacity_bytes) {
    return Status(
        KVM_ERR_INVALID,
        fmt::format("disk.low is {} and disk.high is {}; they must be above 0, in this "
                    "order, and at most host_capacity, which is {}",
                    format_bytes(low), format_bytes(high), format_bytes(host_capacity_bytes)));
  }
  engine::MovementOptions out;
  out.high = static_cast<double>(high) / static_cast<double>(host_capacity_bytes);
  out.low = static_cast<double>(low) / static_cast<double>(host_capacity_bytes);
  out.bytes_per_s = options.disk_move_rate.bytes;
  out.max_priority = static_cast<uint32_t>(options.disk_max_priority);
  out.rule =
      options.disk_leaving == "lru" ? engine::LeavingRule::kLru : engine::LeavingRule::kS3Fifo;
  return out;
}

}  // namespace kvm::daemon
