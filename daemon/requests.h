// SPDX-License-Identifier: Apache-2.0
// From validated messages of a ring to requests of the engine, and back to completions.
#ifndef KVM_DAEMON_REQUESTS_H_
#define KVM_DAEMON_REQUESTS_H_

#include <cstdint>

#include "daemon/session.h"
#include "ipc/validate.h"

namespace kvm::daemon {

// Hands one validated request of `queue` to the engine, or answers it. Its completion is staged on
// the queue, which is then in service->dirty, at once or from a later Engine::poll.
// Threads: the dispatcher.
void dispatch_request(Session* session, ServedQueue* queue, ipc::Request&& request);

// Answers an entry that the engine does not get to see.
void answer_request(ServedQueue* queue, uint64_t user_data, kvm_status status);
// Likewise, of one that was not read or not handed on to the end for want of memory.
void answer_no_memory(ServedQueue* queue, const ipc::Request& request);

// Asks the engine not to start what the queue has in flight.
void cancel_all(Session* session, ServedQueue* queue);

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_REQUESTS_H_
