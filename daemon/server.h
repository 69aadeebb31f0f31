// SPDX-License-Identifier: Apache-2.0
// The dispatcher of kvmd: one thread that serves all clients and drives the engine.
//
//   turn:   for each client, take up to 32 requests, validate, hand to the engine
//           let the engine do one task here, and retire what has finished
//           publish completions
//   idle:   spin for as long as the next request can be expected (at most spin_max), then sleep in
//           epoll_wait until a doorbell, a socket, a process's end, a finished task or a signal
//
// Before it sleeps it raises sq_need_wakeup on every queue and its own flag (daemon/wake.h), and
// then looks at everything once more, so nothing that was published before is missed.
//
// Threads: start() and run() belong to one thread, which the engine then counts as its driver.
#ifndef KVM_DAEMON_SERVER_H_
#define KVM_DAEMON_SERVER_H_

#include <sys/epoll.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/spin.h"
#include "base/status.h"
#include "daemon/listen_address.h"
#include "daemon/metrics_server.h"
#include "daemon/prefix_memory.h"
#include "daemon/service.h"
#include "daemon/session.h"
#include "engine/engine.h"
#include "ipc/fd.h"
#include "tiers/disk/disk_tier.h"

namespace kvm::daemon {

struct ServerOptions {
  std::string socket_path;
  mode_t socket_mode = 0600;
  Limits limits;
  uint64_t spin_max_ns = 200'000;  // UINT64_MAX: never sleep
  uint64_t shutdown_timeout_ns = 2'000'000'000;
  int signal_fd = -1;  // readable: shut down; -1: none
  bool offer_eventfd = true;
  std::function<void()> on_stopping;      // called when the shutdown begins
  std::string config_text;                // what ConfigText answers
  const tiers::DiskTier* disk = nullptr;  // outlives the server; null: there is none
  std::function<uint64_t()> ring_bytes;   // of the engine (engine/run/engine_disk.h); null: none
  // Of the engine; outlives the server. Null: clients cannot look for prefixes.
  const PrefixMemory* prefix_memory = nullptr;
  DeviceMemory* devices = nullptr;  // outlives the server; null: there are none
  ListenAddress metrics;
  mode_t metrics_mode = 0600;
  // on_watchdog is called from the dispatcher's turn at least so often; 0: never.
  uint64_t watchdog_period_ns = 0;
  std::function<void()> on_watchdog;
  // The watchdog, handshakes, pauses and the shutdown go by it. Outlives the server.
  Clock* clock = system_clock();
};

class Server {
 public:
  // `engine` must outlive the server.
  Server(engine::Engine* engine, ServerOptions options);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Listens, for metrics too. Fails: as ipc::listen_at and MetricsServer::start; LIMIT.
  Status start();
  // Serves until request_stop() or a signal, then shuts down: nothing new is accepted, requests in
  // flight may finish for shutdown_timeout, clients are closed, the socket is removed.
  void run();
  // Threads: any, and any number of times.
  void request_stop();

  const Service& service() const { return *service_; }

 private:
  bool turn();
  void publish_snapshot();
  bool serve_queues();
  bool serve_session(Session* session);
  uint32_t serve_queue(Session* session, ServedQueue* queue, uint32_t n_max);
  void publish();
  void finish_closing_queues();
  void finish_arenas();
  void bury_doomed();
  void bury(std::unique_ptr<Session> session);
  void let_go(uint64_t session_id);
  bool close_client(engine::ClientId client, const std::string& reason);
  void shut_down();
  Status start_metrics();
  void remove_socket();

  void handle_events(int timeout_ms);
  void handle_event(const epoll_event& event);
  void dispatch_event(const epoll_event& event);
  void handle_listener();
  void handle_socket(Session* session, uint32_t events);
  void run_timers();
  void look_at_disk(uint64_t now);
  void look_at_prefixes(uint64_t now);
  Session* find_session(uint64_t id);

  uint64_t spin_window_ns() const;
  bool prepare_sleep();
  void finish_sleep(size_t n_flagged);
  void sleep(uint64_t most_ns);
  int sleep_timeout_ms(uint64_t most_ns) const;
  void notify_eventfds();
  void reap_notifications();

  std::unique_ptr<Service> service_;
  ServerOptions options_;
  ipc::Fd listener_;
  ino_t socket_inode_ = 0;
  std::vector<std::unique_ptr<Session>> sessions_;
  std::vector<std::unique_ptr<Session>> leaving_;  // the engine may still touch their memory
  uint64_t last_session_id_ = 0;
  size_t first_session_ = 0;           // who is served first in this turn
  uint32_t n_unnotified_ = 0;          // queues with must_notify set
  std::vector<ServedQueue*> flagged_;  // queues with sq_need_wakeup raised
  std::atomic<bool> stop_requested_{false};
  uint64_t listener_resume_ns_ = UINT64_MAX;  // when connections are accepted again
  uint64_t next_watchdog_ns_ = UINT64_MAX;
  uint64_t next_disk_look_ns_ = 0;
  uint64_t next_prefix_look_ns_ = 0;
  // What is wrong with the disk is said now and then: when each may be said again, and what was.
  struct DiskWarnings {
    uint64_t unmarked_ns = 0;
    uint64_t passed_over_ns = 0;
    uint64_t corrupt_ns = 0;
    uint64_t prefixes_ns = 0;
    uint64_t n_corrupt = 0;
    uint64_t n_failed_prefixes = 0;
  };
  DiskWarnings warnings_;
  bool draining_ = false;
  CoreShare share_;                         // of run()
  std::unique_ptr<MetricsServer> metrics_;  // its thread asks service_ for snapshots
};

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_SERVER_H_
