// SPDX-License-Identifier: Apache-2.0
// Answers control messages (ipc/control.fbs).
//
// Threads: the dispatcher. Everything here is quick: memory of arenas is allocated elsewhere and
// answered by finish_arena.
#ifndef KVM_DAEMON_CONTROL_H_
#define KVM_DAEMON_CONTROL_H_

#include <span>

#include "daemon/session.h"

namespace kvm::daemon {

// Handles one message of a client. A breach of the protocol dooms the session.
void handle_message(Session* session, std::span<const uint8_t> bytes);

// Hands an allocated arena to its client, or says why there is none. session == nullptr: the client
// is gone, the memory is given up.
void finish_arena(Service* service, Session* session, FinishedArena arena);

// Answers the QueueDestroy message that has waited for the queue's requests.
void finish_queue_destroy(Session* session, uint64_t message_id);

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_CONTROL_H_
