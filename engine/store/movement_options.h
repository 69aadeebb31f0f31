// SPDX-License-Identifier: Apache-2.0
// These values say how pages move between memory and the slow tier, and count what moved
// (engine/run/movement.h).
#ifndef KVM_ENGINE_STORE_MOVEMENT_OPTIONS_H_
#define KVM_ENGINE_STORE_MOVEMENT_OPTIONS_H_

#include <cstdint>

#include "kvm.h"

namespace kvm::engine {

// Which sequences leave memory first (engine/store/leaving_order.h).
enum class LeavingRule : uint8_t { kS3Fifo, kLru };

struct MovementOptions {
  // Off: pages leave and come back where somebody asks for that, and not else.
  bool is_automatic = true;
  // Of the capacity. Above `high` pages are sent away until `low` is reached, and below `low` pages
  // come back. REQUIRES: 0 < low < high <= 1.
  double high = 0.90;
  double low = 0.80;
  // Of what is sent and what comes back together, but for what appends wait for; 0: no limit.
  uint64_t bytes_per_s = 0;
  LeavingRule rule = LeavingRule::kS3Fifo;
  uint32_t max_priority = KVM_PRIORITY_MAX;  // as which higher ones count
};

// Since the engine was opened.
struct MovementStats {
  uint64_t n_pages_sent = 0;
  uint64_t bytes_sent = 0;
  uint64_t bytes_written = 0;  // of these: the tier did not have the rest yet
  uint64_t n_pages_back = 0;
  uint64_t bytes_back = 0;
  uint64_t n_failed = 0;  // transfers of either kind
  uint64_t n_appends_waited = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_MOVEMENT_OPTIONS_H_
