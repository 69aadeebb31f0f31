// SPDX-License-Identifier: Apache-2.0
// The option `tenants`: limits of users.
//
//   text    default: bytes=50%, sequences=1000; 1000: bytes=20GiB, requests=unlimited
//   TOML    [tenants.default]                   [tenants.1000]
//           bytes = "50%"                       bytes = "20GiB"
//           sequences = 1000                    requests = "unlimited"
//
// Names are those of engine/store/quota.h; a user's own limits replace those of `default` one by
// one.
//
// Threads: pure functions.
#ifndef KVM_DAEMON_TENANTS_H_
#define KVM_DAEMON_TENANTS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "daemon/values.h"
#include "engine/store/quota.h"

namespace kvm::daemon {

// TenantSizes are what amounts are set to: unset, kNoLimit as bytes, or a Size (of things that are
// counted, the number as bytes).
using TenantSizes = engine::PerResource<std::optional<Size>>;

struct TenantOptions {
  TenantSizes each;                     // "default"
  std::map<uint32_t, TenantSizes> own;  // by uid
};

// "none": no limits. Shares are for bytes, memory_bytes, snapshot_bytes and arena_bytes. nullopt:
// not exactly such a text.
std::optional<TenantOptions> parse_tenants(std::string_view text);

// wholes: what shares of each amount refer to.
engine::TenantLimits tenant_limits(const TenantOptions& options, const engine::Amounts& wholes);

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_TENANTS_H_
