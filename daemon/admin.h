// SPDX-License-Identifier: Apache-2.0
// Verbs that only operators may use: root, and the user that runs kvmd.
//
// Usage and limits of all clients and users are service.engine->quotas() (engine/store/quota.h),
// whose snapshots need no permission here.
//
// Threads: the dispatcher.
#ifndef KVM_DAEMON_ADMIN_H_
#define KVM_DAEMON_ADMIN_H_

#include <cstdint>

#include "base/status.h"
#include "daemon/session.h"

namespace kvm::daemon {

bool is_administrator(const Session& session);
// what: "list the sequences of all clients". Fails: PERMISSION.
Status check_administrator(const Session& session, const char* what);

// Sets limits of a client, or of all clients of a user; both last until kvmd ends. A limit below
// what is held takes nothing away. Fails: NOT_FOUND (the client).
Status set_client_quota(Service* service, engine::ClientId client,
                        const engine::LimitChanges& changes);
void set_tenant_quota(Service* service, uint32_t uid, const engine::LimitChanges& changes);

// Frees a sequence, whoever owns it, behind the requests that are in flight. Fails: NOT_FOUND,
// STALE, LOST.
Status evict_sequence(Service* service, kvm_seq_id seq);
// Closes a client at the end of the turn: it finds itself disconnected, and what it holds is freed.
// Fails: NOT_FOUND.
Status evict_client(Service* service, engine::ClientId client);

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_ADMIN_H_
