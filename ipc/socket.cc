// SPDX-License-Identifier: Apache-2.0
#include "ipc/socket.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/clock.h"

namespace kvm::ipc {

namespace {

// The kernel's own numbers: the C library's headers may be older than the kernel.
constexpr int kSoPeerPidfd = 77;

Status system_error(kvm_status code, const std::string& what) {
  return Status(code, what + ": " + ::strerror(errno));
}

static_assert(sizeof(sockaddr_un::sun_path) == kMaxSocketPathBytes + 1);

Result<sockaddr_un> address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() > kMaxSocketPathBytes) {
    return Status(KVM_ERR_INVALID, "socket path '" + path + "' has " + std::to_string(path.size()) +
                                       " bytes; allowed are 1 to " +
                                       std::to_string(kMaxSocketPathBytes));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

Fd unix_socket(int type, int flags) {
  return Fd(::socket(AF_UNIX, type | SOCK_CLOEXEC | flags, 0));
}

int connect_fd(const Fd& fd, const sockaddr_un& address) {
  return ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
}

kvm_status code_of_errno() {
  switch (errno) {
    case EACCES:
    case EPERM:
    case EROFS:
      return KVM_ERR_PERMISSION;
    case ENOENT:
    case ECONNREFUSED:
    case ECONNRESET:
    case EPIPE:
    case ENOTCONN:
      return KVM_ERR_DISCONNECTED;
    case EMFILE:
    case ENFILE:
      return KVM_ERR_LIMIT;
    default:
      return KVM_ERR_IO;
  }
}

Status no_answer(const std::string& what, uint64_t timeout_ns) {
  return Status(KVM_ERR_TIMEOUT, what + " within " + std::to_string(timeout_ns / 1000000u) +
                                     " ms: kvmd may be stopped, or busy beyond measure");
}

timespec timespec_of(uint64_t ns) {
  timespec out{};
  out.tv_sec = static_cast<time_t>(std::min<uint64_t>(ns / 1000000000u, 1u << 20));
  out.tv_nsec = static_cast<long>(ns % 1000000000u);
  return out;
}

// Waits for `events`, a hang-up or an error.
Status wait_for(const Fd& socket, short events, uint64_t timeout_ns) {
  const uint64_t start = now_ns();
  uint64_t left = timeout_ns;
  for (;;) {
    pollfd entry{socket.get(), events, 0};
    const timespec wait = timespec_of(left);
    const int n = ::ppoll(&entry, 1, &wait, nullptr);
    if (n > 0) {
      return Status::ok();
    }
    if (n < 0 && errno != EINTR) {
      return system_error(KVM_ERR_IO, "poll");
    }
    const uint64_t passed = now_ns() - start;
    if (passed >= timeout_ns) {
      return no_answer("no answer from the daemon", timeout_ns);
    }
    left = timeout_ns - passed;
  }
}

bool is_socket(const std::string& path) {
  struct stat facts {};
  return ::lstat(path.c_str(), &facts) == 0 && S_ISSOCK(facts.st_mode);
}

// Says what a user can do about a failed connect.
Status connect_error(const std::string& path) {
  const int error = errno;
  const std::string at = "'" + path + "'";
  if (error == EACCES || error == EPERM) {
    return Status(KVM_ERR_PERMISSION,
                  "user " + std::to_string(::geteuid()) + " may not connect to " + at +
                      ": the mode of the socket, or of a folder above it, does not allow it");
  }
  struct stat facts {};
  // It may have come since.
  const bool exists = error != ENOENT && ::lstat(path.c_str(), &facts) == 0;
  const char* why = !exists                   ? ": there is no such file"
                    : S_ISSOCK(facts.st_mode) ? ": a daemon that has ended left its socket there"
                                              : ": the file is no socket";
  errno = error;
  const bool known = error == ENOENT || error == ECONNREFUSED;
  return Status(code_of_errno(),
                "no kvmd answers at " + at + (known ? why : std::string(": ") + ::strerror(error)));
}

// Takes every descriptor out of the control data, so that none leaks whatever happens next.
// REQUIRES: *fds has room for what fits into the control data.
void take_fds(msghdr* message, std::vector<Fd>* fds) {
  for (cmsghdr* header = CMSG_FIRSTHDR(message); header != nullptr;
       header = CMSG_NXTHDR(message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const size_t n = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < n; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      fds->emplace_back(fd);
    }
  }
}

// Daemons that begin in one folder do so one after the other: what one finds there, and removes, is
// no other's that has just come. Closed: who may only enter the folder, or waits for others' locks
// on it too long, goes without.
Fd lock_folder_of(const std::string& path) {
  constexpr int kTries = 200;
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  Fd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  for (int i = 0; fd.is_open() && ::flock(fd.get(), LOCK_EX | LOCK_NB) != 0; ++i) {
    if (i == kTries) {
      return Fd();
    }
    ::usleep(10'000);
  }
  return fd;
}

// Removes the socket of a daemon that has ended. was_refused: what is there refuses connections;
// else it may be that of one that runs, which this user may not reach.
Status make_way(const std::string& path, bool was_refused) {
  struct stat facts {};
  if (::lstat(path.c_str(), &facts) != 0) {
    return Status::ok();
  }
  // Files that are no sockets refuse as well, and are not ours to remove; nor are links.
  if (!S_ISSOCK(facts.st_mode)) {
    return Status(KVM_ERR_EXISTS, "'" + path + "' is a " +
                                      (S_ISLNK(facts.st_mode) ? "link" : "file") +
                                      " and no socket; remove it, or name another path");
  }
  if (!was_refused) {
    return Status(KVM_ERR_BUSY, "another daemon's socket is at '" + path + "'");
  }
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return system_error(code_of_errno(), "a daemon that has ended left its socket at '" + path +
                                             "', which cannot be removed");
  }
  return Status::ok();
}

}  // namespace

std::string default_socket_path() {
  if (const char* path = std::getenv("KVM_SOCKET"); path != nullptr && *path != '\0') {
    return path;
  }
  if (const char* folder = std::getenv("XDG_RUNTIME_DIR"); folder != nullptr && *folder != '\0') {
    return std::string(folder) + "/kvm/kvmd.sock";
  }
  return "/run/kvm/kvmd.sock";
}

std::string find_socket_path(const std::string& system_path) {
  const char* named = std::getenv("KVM_SOCKET");
  const std::string path = default_socket_path();
  const bool is_own = (named != nullptr && *named != '\0') || ::access(path.c_str(), F_OK) == 0;
  return is_own || ::access(system_path.c_str(), F_OK) != 0 ? path : system_path;
}

Result<Fd> listen_at(const std::string& path, mode_t mode, int type) {
  KVM_TRY_ASSIGN(const sockaddr_un address, address_of(path));
  const Fd turn = lock_folder_of(path);
  {
    // EAGAIN: somebody listens, and has more connections waiting than it was ready for.
    const Fd probe = unix_socket(type, SOCK_NONBLOCK);
    if (probe.is_open() && (connect_fd(probe, address) == 0 || errno == EAGAIN)) {
      return Status(KVM_ERR_BUSY, "another daemon listens at '" + path + "'");
    }
    KVM_TRY(make_way(path, probe.is_open() && errno == ECONNREFUSED));
  }
  Fd listener = unix_socket(type, SOCK_NONBLOCK);
  if (!listener.is_open()) {
    return system_error(code_of_errno(), "socket");
  }
  // Whoever sees the file may connect: it gets its name when it listens. Where the longer name does
  // not fit, it is made in place, and refuses for a moment.
  const std::string made = path + ".new";
  const bool fits = made.size() <= kMaxSocketPathBytes;
  const std::string& bound = fits ? made : path;
  if (fits && is_socket(made)) {
    ::unlink(made.c_str());  // of one that was killed here
  }
  KVM_TRY_ASSIGN(const sockaddr_un bound_address, address_of(bound));
  // The permission bits must hold from the first moment, so they come from the socket's own inode,
  // which bind copies to the file.
  bool is_done = ::fchmod(listener.get(), mode) == 0 &&
                 ::bind(listener.get(), reinterpret_cast<const sockaddr*>(&bound_address),
                        sizeof(bound_address)) == 0;
  const bool has_file = is_done;
  is_done = is_done && ::chmod(bound.c_str(), mode) == 0 && ::listen(listener.get(), 64) == 0 &&
            (!fits || ::rename(made.c_str(), path.c_str()) == 0);
  if (!is_done) {
    const int error = errno;
    if (has_file) {
      ::unlink(bound.c_str());
    }
    errno = error;
    const bool missing = error == ENOENT;
    return system_error(missing ? KVM_ERR_IO : code_of_errno(), "cannot listen at '" + path + "'");
  }
  return listener;
}

Result<std::optional<Fd>> accept_from(const Fd& listener) {
  Fd fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd.is_open()) {
    return std::optional<Fd>(std::move(fd));
  }
  if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) {
    return std::optional<Fd>();
  }
  return system_error(errno == EMFILE || errno == ENFILE ? KVM_ERR_LIMIT : KVM_ERR_IO, "accept");
}

Result<Fd> connect_to(const std::string& path, uint64_t timeout_ns) {
  KVM_TRY_ASSIGN(const sockaddr_un address, address_of(path));
  Fd fd = unix_socket(SOCK_SEQPACKET, 0);
  if (!fd.is_open()) {
    return system_error(code_of_errno(), "socket");
  }
  const uint64_t start = now_ns();
  uint64_t left = timeout_ns;
  for (;;) {
    // A connect waits as long as a send would; 0 would be for ever.
    const timespec limit = timespec_of(std::max<uint64_t>(left, 1000));
    const timeval wait{limit.tv_sec, limit.tv_nsec / 1000};
    ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
    if (connect_fd(fd, address) == 0) {
      return fd;
    }
    if (errno != EINTR && errno != EAGAIN) {
      return connect_error(path);
    }
    const uint64_t passed = now_ns() - start;
    if (passed >= timeout_ns) {
      return no_answer("no connection accepted at '" + path + "'", timeout_ns);
    }
    left = timeout_ns - passed;
  }
}

Result<PeerCredentials> peer_credentials(const Fd& socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return system_error(KVM_ERR_IO, "SO_PEERCRED");
  }
  return PeerCredentials{credentials.pid, credentials.uid, credentials.gid};
}

Result<Fd> peer_pidfd(const Fd& socket, const PeerCredentials& credentials) {
  int number = -1;
  socklen_t size = sizeof(number);
  if (::getsockopt(socket.get(), SOL_SOCKET, kSoPeerPidfd, &number, &size) == 0) {
    Fd fd(number);
    ::fcntl(fd.get(), F_SETFD, FD_CLOEXEC);
    return fd;
  }
  Fd fd(static_cast<int>(::syscall(SYS_pidfd_open, credentials.pid, 0)));
  if (!fd.is_open()) {
    return system_error(errno == ESRCH ? KVM_ERR_DISCONNECTED : KVM_ERR_IO, "pidfd_open");
  }
  if (is_hung_up(socket)) {
    return Status(KVM_ERR_DISCONNECTED, "the peer is gone");
  }
  return fd;
}

Status send_message(const Fd& socket, std::span<const uint8_t> bytes, std::span<const int> fds) {
  if (bytes.empty() || bytes.size() > kMaxControlBytes || fds.size() > kMaxFdsPerMessage) {
    return Status(KVM_ERR_INVALID, "a control message of " + std::to_string(bytes.size()) +
                                       " bytes with " + std::to_string(fds.size()) +
                                       " descriptors; allowed are 1 to " +
                                       std::to_string(kMaxControlBytes) + " and at most " +
                                       std::to_string(kMaxFdsPerMessage));
  }
  iovec part{const_cast<uint8_t*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFdsPerMessage)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  for (;;) {
    if (::sendmsg(socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) {
      return Status::ok();
    }
    if (errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS) {
      return system_error(KVM_ERR_AGAIN, "the peer does not read its messages");
    }
    if (errno != EINTR) {
      return system_error(code_of_errno(), "sendmsg");
    }
  }
}

void make_room(ReceivedMessage* message) {
  // One byte more than allowed, so that a longer message is recognised; the kernel drops the rest.
  message->bytes.resize(kMaxControlBytes + 1);
  message->fds.clear();
  message->fds.reserve(kMaxFdsPerMessage);
}

Result<std::optional<ReceivedMessage>> receive_message(const Fd& socket, uint32_t max_fds) {
  ReceivedMessage received;
  // Before the message is taken: where there is no memory, it stays in the socket.
  make_room(&received);
  KVM_TRY_ASSIGN(const bool is_there, receive_into(socket, max_fds, &received));
  return is_there ? std::optional<ReceivedMessage>(std::move(received)) : std::nullopt;
}

Result<bool> receive_into(const Fd& socket, uint32_t max_fds, ReceivedMessage* into) {
  ReceivedMessage& received = *into;
  // Room for more descriptors than allowed: those beyond the room would be dropped (MSG_CTRUNC).
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFdsPerMessage)];
  iovec part{received.bytes.data(), received.bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t n = 0;
  do {
    n = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n < 0) {
    if (errno == EAGAIN) {
      return false;
    }
    return system_error(code_of_errno(), "recvmsg");
  }
  take_fds(&message, &received.fds);
  if (n == 0) {
    // A SEQPACKET peer can send an empty packet, which looks the same; both end the connection.
    return Status(KVM_ERR_DISCONNECTED, "the other side closed the connection");
  }
  // Fewer came than there was room for: the process has none left for the others.
  received.lost_fds = (message.msg_flags & MSG_CTRUNC) != 0 && received.fds.size() < max_fds;
  const bool is_cut = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  if ((is_cut && !received.lost_fds) || static_cast<size_t>(n) > kMaxControlBytes ||
      received.fds.size() > max_fds) {
    return Status(KVM_ERR_PROTOCOL,
                  "a control message of " + std::to_string(n) + " bytes or more with " +
                      std::to_string(received.fds.size()) + " descriptors or more; allowed are " +
                      std::to_string(kMaxControlBytes) + " and " + std::to_string(max_fds));
  }
  received.bytes.resize(static_cast<size_t>(n));
  return true;
}

Status wait_readable(const Fd& socket, uint64_t timeout_ns) {
  return wait_for(socket, POLLIN, timeout_ns);
}

Status wait_writable(const Fd& socket, uint64_t timeout_ns) {
  return wait_for(socket, POLLOUT, timeout_ns);
}

bool is_hung_up(const Fd& socket) {
  pollfd entry{socket.get(), POLLRDHUP, 0};
  if (::poll(&entry, 1, 0) <= 0) {
    return false;
  }
  return (entry.revents & (POLLHUP | POLLRDHUP | POLLERR | POLLNVAL)) != 0;
}

}  // namespace kvm::ipc
