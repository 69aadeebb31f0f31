// SPDX-License-Identifier: Apache-2.0
// The doorbell: an eventfd that a client writes to wake the daemon.
//
// The daemon never reads or writes it. A client shares the open file and could clear O_NONBLOCK,
// saturate or empty the counter, and so make any read or write of the daemon block. Every write of
// a client is an edge for epoll (EPOLLET) whatever the counter holds, and that is all that is
// needed (docs/adr/0004-doorbell-without-reads.md).
#ifndef KVM_IPC_DOORBELL_H_
#define KVM_IPC_DOORBELL_H_

#include <cstdint>

#include "base/status.h"
#include "ipc/fd.h"

namespace kvm::ipc {

// The daemon: makes a doorbell. Fails: LIMIT.
Result<Fd> make_doorbell();

// The daemon: adds it to an epoll set, edge-triggered; `token` comes back in epoll_event.data.u64.
// Fails: IO.
Status watch_doorbell(const Fd& epoll, const Fd& doorbell, uint64_t token);

// The client: wakes the daemon. Never blocks in practice: the counter overflows after 2^64 rings.
void ring_doorbell(const Fd& doorbell);

}  // namespace kvm::ipc

#endif  // KVM_IPC_DOORBELL_H_
