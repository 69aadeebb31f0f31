// SPDX-License-Identifier: Apache-2.0
// Texts that depend on nothing: names of statuses, statistics in Prometheus' format.
#ifndef KVM_CLIENT_STATS_TEXT_H_
#define KVM_CLIENT_STATS_TEXT_H_

#include <string>

#include "kvm.h"

namespace kvm::client {

// As kvm_status_name.
const char* status_name(kvm_status status);

// As kvm_get_stats_text.
std::string stats_text(const kvm_stats& stats);

}  // namespace kvm::client

#endif  // KVM_CLIENT_STATS_TEXT_H_
