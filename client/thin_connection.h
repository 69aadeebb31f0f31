// SPDX-License-Identifier: Apache-2.0
// One connection to kvmd: the control socket, and the shared memory that came through it.
//
// Queues and arenas hold the connection they were made on, so that it may be closed or replaced
// under them; they then answer DISCONNECTED and their memory stays mapped until they go.
//
// Threads: any; control calls take turns.
#ifndef KVM_CLIENT_THIN_CONNECTION_H_
#define KVM_CLIENT_THIN_CONNECTION_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "client/backend.h"
#include "client/own_seqs.h"
#include "ipc/control.h"
#include "ipc/control_channel.h"
#include "ipc/fd.h"
#include "ipc/memory.h"

namespace kvm::client {

// A SharedArena is an arena as the daemon made it.
struct SharedArena {
  uint32_t region = 0;
  ipc::Mapping mapping;
};

// A QueueMemory is what a queue needs of its rings.
struct QueueMemory {
  uint32_t queue = 0;
  ipc::Mapping client_region;  // of ipc::ClientRegion
  ipc::Mapping daemon_region;  // of ipc::DaemonRegion, read-only
  ipc::Fd eventfd;             // may be closed
};

// DeviceMemoryAsked is what device memory is wanted of kvmd, and by which version of
// device/store_wire.h the rest goes, whose words have words_bytes. `uuid` names the device, ordinal
// is this process's number of it.
struct DeviceMemoryAsked {
  uint32_t ordinal = 0;
  std::array<uint8_t, 16> uuid{};
  uint64_t pool_bytes = 0;
  uint64_t host_bytes = 0;
  uint32_t store_version = 0;
  uint64_t words_bytes = 0;
};

// DeviceMemoryGiven is how to speak to who keeps it.
struct DeviceMemoryGiven {
  ipc::Fd channel;
  ipc::Mapping words;
};

class Connection {
 public:
  // Connects and exchanges Hello and Welcome. Fails: as kvm_connect.
  static Result<std::shared_ptr<Connection>> open(const ConnectOptions& options);
  // The same over a channel that is there, with time as `clock` has it.
  static Result<std::shared_ptr<Connection>> open_over(std::unique_ptr<ipc::ControlChannel> channel,
                                                       const Clock* clock,
                                                       const ConnectOptions& options);

  // Shuts the socket down: the daemon frees what belongs to the connection.
  void close();
  // Says whether close was called or the daemon's end was seen to be gone.
  bool is_down() const { return down_.load(std::memory_order_relaxed); }
  // Looks at the socket; cheap enough for once per 40 ms, too slow for a spinning loop.
  bool look_for_hangup();
  Status down_status() const;
  // For others to watch; it hangs up when the connection is down.
  int socket_fd() const { return channel_->fd(); }
  OwnSeqs& seqs() { return seqs_; }

  const kvm_client_info& info() const { return info_; }
  // That the daemon knows `what`: an older one would take it for a breach of the protocol.
  // Fails: UNSUPPORTED, naming it and the versions.
  Status need_minor(uint32_t minor, const char* what) const;
  // Wakes the daemon.
  void ring() const;

  // One request and its reply, which is verified and carries no error.
  using Encode = std::function<std::span<const uint8_t>(ipc::ControlWriter*, uint64_t id)>;
  struct Reply {
    ipc::ReceivedMessage message;
    const ipc::wire::Message* root = nullptr;
  };
  // Fails: what the reply says, DISCONNECTED, PROTOCOL, TIMEOUT (the daemon did not take or did not
  // answer the request in time; it may still take effect, but for queues and arenas, which are
  // given back when the late reply comes; the connection stays).
  Result<Reply> call(const Encode& encode) { return call(encode, timeout_ns_); }
  // The same with another time in place of timeout_ns(); 0: the request is sent, and its answer is
  // taken if it is there.
  Result<Reply> call(const Encode& encode, uint64_t within_ns);

  // How long a call may take once its turn has come.
  uint64_t timeout_ns() const { return timeout_ns_; }
  Status timeout_status() const;
  // Says whether the daemon answers anything at all within the time: not when stopped or gone.
  bool is_answering(uint64_t within_ns);

  Result<SharedArena> create_arena(uint64_t size_bytes);
  // Destroying does what it can: the daemon has the rest until the end of the connection. A request
  // that was sent takes effect even if nobody waits for its answer.
  void destroy_arena(uint32_t region) noexcept { destroy_arena(region, timeout_ns_); }
  void destroy_arena(uint32_t region, uint64_t within_ns) noexcept;
  // Fails: as call; what admits clients (daemon/device_memory.h). Once for each connection.
  Result<DeviceMemoryGiven> open_device(const DeviceMemoryAsked& asked);
  Result<QueueMemory> create_queue(uint32_t n_entries);
  void destroy_queue(uint32_t queue) noexcept { destroy_queue(queue, timeout_ns_); }
  void destroy_queue(uint32_t queue, uint64_t within_ns) noexcept;

 private:
  Connection() = default;
  Status shake_hands(const ConnectOptions& options);
  uint64_t time_until(uint64_t deadline_ns) const;
  Status send(std::span<const uint8_t> bytes, uint64_t deadline_ns);
  Status receive_reply(uint64_t id, uint64_t deadline_ns, Reply* reply);
  void give_back(const ipc::wire::Message& reply);
  Status fail(Status status);
  // Sends what `write`, an Encode, makes; `what`: of which thing the failure is noted.
  template <typename Write>
  void destroy(const Write& write, const char* what, uint64_t within_ns) noexcept;

  std::unique_ptr<ipc::ControlChannel> channel_;
  const Clock* clock_ = nullptr;
  ipc::Fd doorbell_;
  kvm_client_info info_{};
  uint64_t timeout_ns_ = 0;
  std::atomic<bool> down_{false};
  OwnSeqs seqs_;

  std::mutex mutex_;
  uint64_t last_id_ = 0;
};

}  // namespace kvm::client

#endif  // KVM_CLIENT_THIN_CONNECTION_H_
