// SPDX-License-Identifier: Apache-2.0
// What is said of an engine and its slow tier beside what Engine itself says.
//
// Threads: the driver.
#ifndef KVM_ENGINE_RUN_ENGINE_DISK_H_
#define KVM_ENGINE_RUN_ENGINE_DISK_H_

#include <cstdint>

#include "engine/engine.h"

namespace kvm::engine {

// What is answered where something needs a slow tier and there is none.
inline constexpr char kNoDisk[] =
    "there is no disk here; a kvmd has one that is given disk.directories";

// The memory set aside for what pages that are away pass through (tiers/host/ring_memory.h): of the
// capacity, and not part of host_used_bytes. 0: none.
uint64_t ring_bytes(const Engine& engine);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_ENGINE_DISK_H_
