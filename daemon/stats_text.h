// SPDX-License-Identifier: Apache-2.0
// The counters of the whole service, as structures and as text (base/stats_text.h).
#ifndef KVM_DAEMON_STATS_TEXT_H_
#define KVM_DAEMON_STATS_TEXT_H_

#include <string>

#include "daemon/service.h"
#include "daemon/stats_snapshot.h"
#include "kvm.h"

namespace kvm::daemon {

// Threads: the dispatcher.
kvm_stats service_stats(const Service& service);
StatsSnapshot take_snapshot(const Service& service);
// Threads: any.
std::string stats_text(const StatsSnapshot& snapshot);

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_STATS_TEXT_H_
