// SPDX-License-Identifier: Apache-2.0
// One connected client: its socket, its process, its queues and arenas.
//
//   accept --> waiting for Hello --> welcomed --> doomed --> (engine has let go) --> destroyed
//
// Destroying a session unmaps its memory, which takes time: the reaper thread does it.
//
// Threads: the dispatcher, until it is handed to the reaper.
#ifndef KVM_DAEMON_SESSION_H_
#define KVM_DAEMON_SESSION_H_

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/device_memory.h"
#include "daemon/served_queue.h"
#include "daemon/service.h"
#include "engine/engine.h"
#include "ipc/fd.h"
#include "ipc/region_table.h"
#include "ipc/socket.h"

namespace kvm::daemon {

// LIMIT: replies that wait for a client to read them, and parameter arrays of requests in flight.
inline constexpr size_t kMaxUnsentReplies = 16;
inline constexpr uint64_t kMaxPrivateBytes = 64ull << 20;
inline constexpr uint64_t kHandshakeTimeoutNs = 5'000'000'000;

class Session {
 public:
  Session(Service* service, uint64_t id, ipc::Fd socket, ipc::PeerCredentials peer);

  Service* service() const { return service_; }
  uint64_t id() const { return id_; }
  const ipc::Fd& socket() const { return socket_; }
  const ipc::PeerCredentials& peer() const { return peer_; }

  // Sends a reply, now or when the client reads again; dooms the session where neither can be done.
  // `fds` are taken over.
  void send(std::span<const uint8_t> bytes, std::vector<ipc::Fd> fds = {});
  // Sends what waits. Call it when the socket becomes writable.
  void flush();

  // Marks the session to be closed at the end of the turn. The first reason counts, as far as
  // there is room for it: want of memory may be one.
  void doom(std::string_view reason);
  // The same, for a breach of the protocol: counted.
  void doom_for_violation(std::string_view reason);
  bool is_doomed() const { return doomed_; }
  const char* doom_reason() const { return doom_reason_.data(); }
  bool is_violator() const { return violator_; }

  // It registers a space or makes a request: more than to look and to administer. Its coming and
  // going is worth a line of the log then.
  void note_engine();
  bool is_engine() const { return is_engine_; }

  // Closes what tells the client that it is gone. Memory stays until destruction.
  void hang_up();

  ServedQueue* find_queue(uint32_t id);
  uint64_t private_bytes() const;
  // Takes n of a resource back from its account, while it has one.
  void give_back(engine::Resource resource, uint64_t n);

  // Time between the last answer and the next request, for the length of spinning.
  void note_arrival(uint64_t now_ns);
  void note_answer(uint64_t now_ns) { last_answer_ns_ = now_ns; }
  uint64_t gap_ns() const { return gap_ns_; }

  bool has_spoken = false;  // a message of it has come
  bool welcomed = false;
  uint64_t handshake_deadline_ns = 0;
  engine::ClientId client = 0;  // once welcomed
  // The account of `client`; null before, and once the engine has been told that it is gone.
  engine::QuotaAccount* account = nullptr;
  std::string name;
  ipc::Fd pidfd;
  ipc::Fd doorbell;
  ipc::RegionTable regions;  // before queues: their requests pin regions
  std::vector<std::unique_ptr<ServedQueue>> queues;
  uint32_t last_queue_id = 0;
  size_t next_queue = 0;                 // of `queues`, which is served first
  uint64_t copied_bytes = 0;             // of parameter arrays, of all its requests
  std::string stats_text;                // what StatsText pages through
  std::unique_ptr<DeviceTenant> device;  // null: it has none
  uint32_t n_receives_begun = 0;         // of its socket, since one has come to its end

 private:
  struct Unsent {
    std::vector<uint8_t> bytes;
    std::vector<ipc::Fd> fds;
  };

  Status send_now(std::span<const uint8_t> bytes, const std::vector<ipc::Fd>& fds);
  void watch_socket(bool writable);

  Service* service_;
  uint64_t id_;
  ipc::Fd socket_;
  ipc::PeerCredentials peer_;
  std::deque<Unsent> unsent_;
  bool doomed_ = false;
  bool is_engine_ = false;
  bool violator_ = false;
  std::array<char, 256> doom_reason_{};
  uint64_t gap_ns_ = 0;  // 0: not known yet
  uint64_t last_answer_ns_ = 0;
};

// Gives the memory of an arena back on the reaper's thread; then it is not counted any more.
void discard_on_reaper(Service* service, ipc::Mapping mapping);

// epoll gives back a kind of event and a session's id.
enum class EventKind : uint8_t {
  kListener,
  kSignal,
  kWake,
  kNotifier,
  kSocket,
  kProcess,
  kDoorbell,
};
constexpr uint64_t event_token(EventKind kind, uint64_t session) {
  return static_cast<uint64_t>(kind) << 56 | session;
}

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_SESSION_H_
