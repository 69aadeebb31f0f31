// SPDX-License-Identifier: Apache-2.0
#include "daemon/admin.h"

#include <fmt/format.h>

namespace kvm::daemon {

bool is_administrator(const Session& session) {
  const uid_t uid = session.peer().uid;
  return uid == 0 || uid == session.service()->uid;
}

Status check_administrator(const Session& session, const char* what) {
  if (is_administrator(session)) {
    return Status::ok();
  }
  const uid_t uid = session.peer().uid;
  const uid_t own = session.service()->uid;
  return Status(KVM_ERR_PERMISSION, fmt::format("user {} may not {}: that is for root and user {}, "
                                                "which runs kvmd",
                                                uid, what, own));
}

Status set_client_quota(Service* service, engine::ClientId client,
                        const engine::LimitChanges& changes) {
  return service->engine->quotas().set_client_limits(client, changes);
}

void set_tenant_quota(Service* service, uint32_t uid, const engine::LimitChanges& changes) {
  service->engine->quotas().set_tenant_limits(uid, changes);
}

Status evict_sequence(Service* service, kvm_seq_id seq) { return service->engine->evict(seq); }

Status evict_client(Service* service, engine::ClientId client) {
  return service->close_client(client, "closed by an operator")
             ? Status::ok()
             : Status(KVM_ERR_NOT_FOUND, fmt::format("there is no client {:#x}", client));
}

}  // namespace kvm::daemon
