// SPDX-License-Identifier: Apache-2.0
// Answers the control messages of operators (kvm.h, part 11): ConfigText, Evict, ClientList,
// UserList and QuotaSet.
//
// Threads: the dispatcher.
#ifndef KVM_DAEMON_ADMIN_MESSAGES_H_
#define KVM_DAEMON_ADMIN_MESSAGES_H_

#include "daemon/session.h"
#include "ipc/control.h"

namespace kvm::daemon {

// REQUIRES: the message is one of these.
void handle_admin(Session* session, const ipc::wire::Message& message);

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_ADMIN_MESSAGES_H_
