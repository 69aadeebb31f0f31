// SPDX-License-Identifier: Apache-2.0
// Serves metrics over HTTP on a thread of its own:
//
//   GET /metrics    Prometheus' text format
//   GET /healthz    200 "ok" while the dispatcher turns, else 503
//
// Nothing that a scraper does reaches the dispatcher but the wish for a copy of its counters
// (daemon/snapshots.h). LIMITs: kMaxConnections at a time, kMaxConnectionNs for each from accept to
// close however slowly it sends or reads, 8 KiB of request.
//
// Threads: one that owns it.
#ifndef KVM_DAEMON_METRICS_SERVER_H_
#define KVM_DAEMON_METRICS_SERVER_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/status.h"
#include "daemon/listen_address.h"

namespace kvm::daemon {

class MetricsServer {
 public:
  static constexpr uint32_t kMaxConnections = 32;
  static constexpr uint64_t kMaxConnectionNs = 5'000'000'000;

  // The text of the metrics, or nothing when the dispatcher does not answer; called on the thread
  // of the server, may wait for a second.
  using MakeText = std::function<std::optional<std::string>()>;

  // Listens and starts the thread. REQUIRES: address.kind is not kOff.
  // Fails: as listen_for_streams; UNSUPPORTED (a build without libmicrohttpd), INTERNAL.
  static Result<std::unique_ptr<MetricsServer>> start(const ListenAddress& address, mode_t mode,
                                                      MakeText make_text);
  // Closes all connections, ends the thread, removes the socket's file.
  virtual ~MetricsServer() = default;
};

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_METRICS_SERVER_H_
