// SPDX-License-Identifier: Apache-2.0
// What the options of [disk] come to: the tier of files that pages go to when memory fills up.
//
// Threads: any; the functions keep nothing.
#ifndef KVM_DAEMON_DISK_H_
#define KVM_DAEMON_DISK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "daemon/options.h"
#include "engine/store/movement_options.h"
#include "tiers/disk/disk_tier.h"

namespace kvm::daemon {

// "none", or paths from the root with commas between them.
bool is_directory_list(const std::string& text);
std::vector<std::string> directory_list(std::string_view text);

// Opens the tier; null: no directory is named. A share of disk.capacity is one of what
// tiers::free_bytes() says of the directories. Fails: as tiers::DiskTier::open; IO.
Result<std::unique_ptr<tiers::DiskTier>> open_disk(const Options& options);

// Fails: INVALID: disk.low is not below disk.high, or disk.high is more than host_capacity_bytes.
Result<engine::MovementOptions> movement_options(const Options& options,
                                                 uint64_t host_capacity_bytes);

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_DISK_H_
