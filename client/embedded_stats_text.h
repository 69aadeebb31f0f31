// SPDX-License-Identifier: Apache-2.0
// kvm_get_stats_text of an engine in this process. The series have the names that kvmd gives them
// (daemon/stats_text.h); those about sockets and rings are not there.
#ifndef KVM_CLIENT_EMBEDDED_STATS_TEXT_H_
#define KVM_CLIENT_EMBEDDED_STATS_TEXT_H_

#include <string>

#include "kvm.h"

namespace kvm::client {

std::string embedded_stats_text(const kvm_stats& stats);

}  // namespace kvm::client

#endif  // KVM_CLIENT_EMBEDDED_STATS_TEXT_H_
