// SPDX-License-Identifier: Apache-2.0
// A client of kvmd that says exactly what a test tells it to, right or wrong.
#ifndef KVM_TESTS_UNIT_DAEMON_RAW_CLIENT_H_
#define KVM_TESTS_UNIT_DAEMON_RAW_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "engine/store/quota.h"
#include "ipc/control.h"
#include "ipc/memory.h"
#include "ipc/ring.h"
#include "ipc/socket.h"
#include "ipc/wire.h"

namespace kvm::testing {

struct RawReply {
  ipc::ReceivedMessage message;
  const ipc::wire::Message* root = nullptr;
};

struct RawQueue {
  uint32_t id = 0;
  ipc::Mapping client_memory;
  ipc::Mapping daemon_memory;
  ipc::Fd eventfd;

  ipc::ClientRegion* client() const {
    return reinterpret_cast<ipc::ClientRegion*>(client_memory.data());
  }
  const ipc::DaemonRegion* daemon() const {
    return reinterpret_cast<const ipc::DaemonRegion*>(daemon_memory.data());
  }
};

struct RawArena {
  uint32_t region = 0;
  ipc::Mapping memory;
};

// Every function waits at most 5 s. Threads: one.
class RawClient {
 public:
  using Encode = std::function<std::span<const uint8_t>(ipc::ControlWriter*, uint64_t id)>;

  // Connects, without Hello.
  explicit RawClient(const std::string& path);

  Status send(std::span<const uint8_t> bytes, std::span<const int> fds = {});
  // The next message. Fails: DISCONNECTED (closed by the daemon), TIMEOUT.
  Result<RawReply> receive();
  // Sends a message and receives its reply; an error reply is a Status.
  Result<RawReply> call(const Encode& encode);
  // Whether the daemon closes the connection within 5 s.
  bool is_closed_by_daemon();

  Status hello(uint64_t magic = ipc::kHelloMagic, uint32_t major_min = ipc::kProtocolMajor,
               uint32_t major_max = ipc::kProtocolMajor);
  Result<RawQueue> create_queue();
  Status destroy_queue(uint32_t id);
  Result<RawArena> create_arena(uint64_t size_bytes);
  Status destroy_arena(uint32_t region);
  Result<std::vector<uint8_t>> get_bytes(const Encode& encode);
  Result<kvm_stats> stats();
  Result<std::string> stats_text();
  // How often the dispatcher has slept. REQUIRES: connected.
  uint64_t n_sleeps();

  // Publishes an entry in the request ring and rings the doorbell.
  void submit(RawQueue* queue, const ipc::RequestEntry& entry);
  // The next completion.
  Result<ipc::CompletionEntry> wait(RawQueue* queue);
  // A null request there and back.
  Status nop(RawQueue* queue);

  const kvm_client_info& info() const { return info_; }
  uint64_t epoch() const { return epoch_; }
  const ipc::Fd& socket() const { return socket_; }
  const ipc::Fd& doorbell() const { return doorbell_; }

 private:
  ipc::Fd socket_;
  ipc::Fd doorbell_;
  kvm_client_info info_{};
  uint64_t epoch_ = 0;
  uint64_t last_id_ = 0;
};

// A server with a FakeEngine on a thread of its own, listening in a folder that goes with it.
class RunningServer;
struct ServerOverrides {
  uint32_t max_clients = 8;
  uint32_t max_queues = 4;
  uint32_t max_arenas = 4;
  uint64_t arena_quota_bytes = 8ull << 20;
  uint64_t arena_capacity_bytes = 16ull << 20;
  uint64_t spin_max_ns = 20'000;
  uint64_t max_requests = engine::kNoLimit;
  engine::TenantLimits tenants;
};
std::shared_ptr<RunningServer> run_server(const ServerOverrides& overrides = {});
// The same over another engine.
std::shared_ptr<RunningServer> run_server(const ServerOverrides& overrides,
                                          std::unique_ptr<engine::Engine> engine);
std::string socket_path_of(const RunningServer& server);
void stop(RunningServer* server);

}  // namespace kvm::testing

#endif  // KVM_TESTS_UNIT_DAEMON_RAW_CLIENT_H_
