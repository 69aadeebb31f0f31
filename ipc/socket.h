// SPDX-License-Identifier: Apache-2.0
// The control socket: Unix SOCK_SEQPACKET, one message per packet, file descriptors beside it.
//
// Received descriptors are close-on-exec, bounded, and closed when nobody takes them. Sending never
// blocks on the daemon's side.
#ifndef KVM_IPC_SOCKET_H_
#define KVM_IPC_SOCKET_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "ipc/fd.h"
#include "ipc/wire.h"

namespace kvm::ipc {

// Where kvmd listens when nothing else is said: $KVM_SOCKET, else $XDG_RUNTIME_DIR/kvm/kvmd.sock,
// else /run/kvm/kvmd.sock.
std::string default_socket_path();

// Where a client looks when nothing else is said: the same, but for the system's kvmd (at
// `system_path`) where $KVM_SOCKET is not set and the user has none in $XDG_RUNTIME_DIR: every
// login session has that variable.
std::string find_socket_path(const std::string& system_path = "/run/kvm/kvmd.sock");

// A non-blocking listening socket of this type at `path` with permission bits `mode`. Whoever sees
// the file can connect (but at a path of 104 bytes and more, where it may refuse for a moment): it
// is made as `path`.new. A socket file that nobody listens on is replaced; a file of any other kind
// is left alone. Fails: INVALID (path longer than 107 bytes), BUSY (somebody listens there), EXISTS
// (a file that is no socket), PERMISSION, IO.
Result<Fd> listen_at(const std::string& path, mode_t mode, int type = SOCK_SEQPACKET);

// The next connection of a listening socket, non-blocking; nothing when there is none.
// Fails: LIMIT (no descriptors left), IO.
Result<std::optional<Fd>> accept_from(const Fd& listener);

// A connected socket, blocking, as clients use it. Where connections queue before a daemon that
// accepts none, it waits for at most timeout_ns. Fails: INVALID, DISCONNECTED (nobody listens),
// TIMEOUT, PERMISSION, LIMIT (no descriptors left), IO.
Result<Fd> connect_to(const std::string& path, uint64_t timeout_ns);

// The most recent peer of a connected socket, as the kernel recorded it at connect.
struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
};
Result<PeerCredentials> peer_credentials(const Fd& socket);

// A pidfd of the peer: readable once that process has exited. Without SO_PEERPIDFD (Linux 6.5) it
// is opened by number, and the pid could in theory have been reused: `credentials` are compared
// again afterwards and the socket must still be open. Fails: DISCONNECTED (gone already), IO.
Result<Fd> peer_pidfd(const Fd& socket, const PeerCredentials& credentials);

struct ReceivedMessage {
  std::vector<uint8_t> bytes;
  std::vector<Fd> fds;
  bool lost_fds = false;  // this process had no descriptors left for some that came
};

// One message, whole or not at all, without blocking. `fds` are passed along.
// Fails: AGAIN (the peer does not read; it may be dropped for that), DISCONNECTED, INVALID (longer
// than kMaxControlBytes, too many descriptors).
Status send_message(const Fd& socket, std::span<const uint8_t> bytes, std::span<const int> fds);

// Gives `message` the memory that a message may need. Throws std::bad_alloc.
void make_room(ReceivedMessage* message);

// The next message; nothing when there is none yet. With a blocking socket, call wait_readable
// first. `max_fds` is 0 where the protocol passes none: any are closed and PROTOCOL is returned.
// Fails: DISCONNECTED (the peer closed), PROTOCOL (too long, too many descriptors, empty). Throws
// std::bad_alloc: the message is still there.
Result<std::optional<ReceivedMessage>> receive_message(const Fd& socket, uint32_t max_fds);
// The same into memory that is there: whether there was one. REQUIRES: make_room(into), since the
// last message came into it.
Result<bool> receive_into(const Fd& socket, uint32_t max_fds, ReceivedMessage* into);

// Waits until a message can be received, or sent, or the peer is gone. Fails: TIMEOUT.
Status wait_readable(const Fd& socket, uint64_t timeout_ns);
Status wait_writable(const Fd& socket, uint64_t timeout_ns);

// Says whether the peer has closed its end or died. Never blocks, consumes nothing.
bool is_hung_up(const Fd& socket);

}  // namespace kvm::ipc

#endif  // KVM_IPC_SOCKET_H_
