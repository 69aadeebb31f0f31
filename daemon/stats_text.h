// SPDX-License-Identifier: Apache-2.0
// The counters of the whole service, as a structure and as text (base/stats_text.h).
#ifndef KVM_DAEMON_STATS_TEXT_H_
#define KVM_DAEMON_STATS_TEXT_H_

#include <string>

#include "daemon/service.h"
#include "kvm.h"

namespace kvm::daemon {

kvm_stats service_stats(const Service& service);
std::string stats_text(const Service& service);

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_STATS_TEXT_H_
