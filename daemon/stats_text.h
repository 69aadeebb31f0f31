// SPDX-License-Identifier: Apache-2.0
// Counters in Prometheus' text format: prefix kvm_, base units, every series present from the
// start. docs/operations.md lists them.
#ifndef KVM_DAEMON_STATS_TEXT_H_
#define KVM_DAEMON_STATS_TEXT_H_

#include <string>

#include "daemon/service.h"
#include "kvm.h"

namespace kvm::daemon {

// Counters of the whole service.
kvm_stats service_stats(const Service& service);
std::string stats_text(const Service& service);

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_STATS_TEXT_H_
