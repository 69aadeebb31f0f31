// SPDX-License-Identifier: Apache-2.0
#include "daemon/metrics_server.h"

// libmicrohttpd: HTTP parsing with limits of memory, connections and time, in the caller's own
// loop; small, in every distribution, and read by many eyes.
#include <microhttpd.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <string_view>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "ipc/fd.h"

namespace kvm::daemon {
namespace {

constexpr size_t kConnectionMemoryBytes = 8192;
constexpr unsigned kIdleTimeoutSeconds = 3;
constexpr int kMaxPollMs = 1000;

class MicrohttpdServer final : public MetricsServer {
 public:
  MicrohttpdServer(ListenAddress address, MakeText make_text)
      : address_(std::move(address)), make_text_(std::move(make_text)) {}

  ~MicrohttpdServer() override {
    stopping_.store(true, std::memory_order_relaxed);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(stop_.get(), &one, sizeof(one));
    if (thread_.joinable()) {
      thread_.join();
    }
    if (daemon_ != nullptr) {
      MHD_stop_daemon(daemon_);
      if (address_.kind == ListenAddress::Kind::kUnix) {
        ::unlink(address_.path.c_str());
      }
    }
  }

  // Takes the listening socket over.
  Status open(ipc::Fd listener) {
    stop_ = ipc::Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    daemon_ = MHD_start_daemon(
        MHD_USE_EPOLL, 0, nullptr, nullptr, &MicrohttpdServer::on_request, this,
        MHD_OPTION_LISTEN_SOCKET, static_cast<MHD_socket>(listener.get()),
        MHD_OPTION_CONNECTION_LIMIT, unsigned{kMaxConnections}, MHD_OPTION_CONNECTION_TIMEOUT,
        kIdleTimeoutSeconds, MHD_OPTION_CONNECTION_MEMORY_LIMIT, kConnectionMemoryBytes,
        MHD_OPTION_NOTIFY_CONNECTION, &MicrohttpdServer::on_connection, this, MHD_OPTION_END);
    if (!stop_.is_open() || daemon_ == nullptr) {
      return Status(KVM_ERR_INTERNAL, "libmicrohttpd cannot serve metrics: no descriptors left?");
    }
    listener.release();  // MHD_stop_daemon closes it
    const MHD_DaemonInfo* info = MHD_get_daemon_info(daemon_, MHD_DAEMON_INFO_EPOLL_FD);
    if (info == nullptr) {
      return Status(KVM_ERR_INTERNAL, "this libmicrohttpd has no epoll");
    }
    thread_ = std::thread([this, epoll_fd = info->epoll_fd] { run(epoll_fd); });
    ::pthread_setname_np(thread_.native_handle(), "kvmd-metrics");
    return Status::ok();
  }

 private:
  void run(int epoll_fd) {
    while (!stopping_.load(std::memory_order_relaxed)) {
      MHD_UNSIGNED_LONG_LONG timeout_ms = kMaxPollMs;
      if (MHD_get_timeout(daemon_, &timeout_ms) != MHD_YES) {
        timeout_ms = kMaxPollMs;
      }
      pollfd waited[] = {{epoll_fd, POLLIN, 0}, {stop_.get(), POLLIN, 0}};
      ::poll(waited, 2, static_cast<int>(std::min<uint64_t>(timeout_ms, kMaxPollMs)));
      MHD_run(daemon_);
      end_overdue();
    }
  }

  // A scraper that sends or reads a byte now and then never idles: its time is up all the same.
  void end_overdue() {
    const uint64_t now = now_ns();
    for (auto& [connection, limit] : connections_) {
      if (now >= limit.deadline_ns && !limit.ended) {
        limit.ended = true;
        ::shutdown(limit.fd, SHUT_RDWR);
      }
    }
  }

  static void on_connection(void* self, MHD_Connection* connection, void** /*context*/,
                            MHD_ConnectionNotificationCode code) {
    auto& connections = static_cast<MicrohttpdServer*>(self)->connections_;
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
      connections.erase(connection);
      return;
    }
    const MHD_ConnectionInfo* info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    if (info != nullptr) {
      connections[connection] = {info->connect_fd, now_ns() + kMaxConnectionNs, false};
    }
  }

  static MHD_Result answer(MHD_Connection* connection, unsigned code, std::string_view body,
                           const char* allow = nullptr) {
    MHD_Response* response = MHD_create_response_from_buffer(
        body.size(), const_cast<char*>(body.data()), MHD_RESPMEM_MUST_COPY);
    if (response == nullptr) {
      return MHD_NO;
    }
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE,
                            code == MHD_HTTP_OK && body.starts_with('#')
                                ? "text/plain; version=0.0.4; charset=utf-8"
                                : "text/plain; charset=utf-8");
    if (allow != nullptr) {
      MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, allow);
    }
    const MHD_Result queued = MHD_queue_response(connection, code, response);
    MHD_destroy_response(response);
    return queued;
  }

  static MHD_Result on_request(void* self, MHD_Connection* connection, const char* url,
                               const char* method, const char* /*version*/,
                               const char* /*upload_data*/, size_t* upload_data_size,
                               void** /*context*/) {
    const std::string_view verb(method);
    if (verb != MHD_HTTP_METHOD_GET && verb != MHD_HTTP_METHOD_HEAD) {
      // A body that is not wanted is not read either.
      *upload_data_size = 0;
      return answer(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "GET and HEAD are allowed\n",
                    "GET, HEAD");
    }
    const std::string_view path(url);
    if (path != "/metrics" && path != "/healthz") {
      return answer(connection, MHD_HTTP_NOT_FOUND, "/metrics and /healthz are here\n");
    }
    const std::optional<std::string> text = static_cast<MicrohttpdServer*>(self)->make_text_();
    if (!text) {
      return answer(connection, MHD_HTTP_SERVICE_UNAVAILABLE,
                    "kvmd's dispatcher has not answered within a second\n");
    }
    return answer(connection, MHD_HTTP_OK, path == "/metrics" ? *text : "ok\n");
  }

  struct Limit {
    int fd = -1;
    uint64_t deadline_ns = 0;
    bool ended = false;
  };

  ListenAddress address_;
  MakeText make_text_;
  ipc::Fd stop_;
  MHD_Daemon* daemon_ = nullptr;
  std::atomic<bool> stopping_{false};
  std::map<MHD_Connection*, Limit> connections_;  // the thread's
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<MetricsServer>> MetricsServer::start(const ListenAddress& address,
                                                            mode_t mode, MakeText make_text) {
  KVM_TRY_ASSIGN(ipc::Fd listener, listen_for_streams(address, mode));
  auto server = std::make_unique<MicrohttpdServer>(address, std::move(make_text));
  KVM_TRY(server->open(std::move(listener)));
  return std::unique_ptr<MetricsServer>(std::move(server));
}

}  // namespace kvm::daemon
