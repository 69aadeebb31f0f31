// SPDX-License-Identifier: Apache-2.0
#include "daemon/server.h"

#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/counted.h"
#include "base/kill_point.h"
#include "base/spin.h"
#include "daemon/control.h"
#include "daemon/reply.h"
#include "daemon/requests.h"
#include "daemon/stats_text.h"
#include "ipc/socket.h"
#include "ipc/validate.h"

namespace kvm::daemon {
namespace {

// A client gets so much in a turn: entries, taken in portions, and bytes copied for them.
constexpr uint32_t kEntriesPerTurn = 32;
constexpr uint32_t kEntriesAtOnce = 8;
constexpr uint64_t kPrivateBytesPerTurn = 256 << 10;
constexpr uint32_t kMessagesPerEvent = 4;
// Sockets are looked at this often while requests keep the dispatcher busy, and while it spins.
constexpr uint64_t kBusyEventPeriodNs = 200'000;
constexpr uint64_t kSpinEventPeriodNs = 50'000;
// Spinning for less than this is not worth it: the client's own turnaround takes as long.
constexpr uint64_t kMinSpinNs = 50'000;
// One that always has requests tidies up so often.
constexpr uint64_t kBusyHousekeepNs = 1'000'000;
// A dispatcher that never sleeps tidies up when nothing has come for this long.
constexpr uint64_t kMinHousekeepIdleNs = 1'000'000;
// One that sleeps where it would spin, as others want its core, tidies up after so long.
constexpr uint64_t kCutSpinSleepNs = 1'000'000;
// After an accept that failed, for want of descriptors as a rule.
constexpr uint64_t kListenerPauseNs = 100'000'000;
// How often drives are looked at, and prefixes, which takes a while where there are many; and how
// long it is until a warning may be repeated.
constexpr uint64_t kDiskLookNs = 1'000'000'000;
constexpr uint64_t kPrefixLookNs = 60'000'000'000;
constexpr uint64_t kDiskWarningNs = 600'000'000'000;
// Tries to receive one message, for which there may be no memory.
constexpr uint32_t kMaxReceives = 8;
// Connections beyond max_clients that may be told so.
constexpr size_t kMaxUnwelcomed = 16;

// Whether one may be said now; then the next may be said later.
bool may_warn(uint64_t now, uint64_t* next_ns) {
  const bool may = now >= *next_ns;
  *next_ns = may ? now + kDiskWarningNs : *next_ns;
  return may;
}

uint64_t random_epoch() {
  std::random_device device;
  uint64_t epoch = 0;
  while (epoch == 0) {
    epoch = static_cast<uint64_t>(device()) << 32 | device();
  }
  return epoch;
}

// Fails: LIMIT (of what a user may watch, or of kernel memory).
Status watch(const ipc::Fd& epoll, int fd, uint32_t events, uint64_t token) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = token;
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return Status(KVM_ERR_LIMIT, std::string("epoll_ctl: ") + std::strerror(errno));
  }
  return Status::ok();
}

void watch_again(const ipc::Fd& epoll, const ipc::Fd& fd, uint32_t events, uint64_t token) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = token;
  ::epoll_ctl(epoll.get(), EPOLL_CTL_MOD, fd.get(), &event);
}

}  // namespace

Server::Server(engine::Engine* engine, ServerOptions options)
    : service_(std::make_unique<Service>()), options_(std::move(options)) {
  service_->engine = engine;
  service_->disk = options_.disk;
  service_->prefix_memory = options_.prefix_memory;
  service_->ring_bytes = options_.ring_bytes;
  service_->devices = options_.devices;
  service_->limits = options_.limits;
  service_->config_text = options_.config_text;
  service_->epoch = random_epoch();
  service_->start_ns = now_ns();
  service_->uid = ::geteuid();
  service_->close_client = [this](engine::ClientId client, const std::string& reason) {
    return close_client(client, reason);
  };
  engine->set_wake([service = service_.get()] { service->wake.wake(); });
  options_.clock->set_wake([service = service_.get()] { service->wake.wake(); });
}

Server::~Server() {
  draining_ = true;
  // Tasks of the engine may still write to arenas: wait for them, then unmap.
  for (auto& session : sessions_) {
    session->doom("shutdown");
  }
  bury_doomed();
  while (!leaving_.empty()) {
    if (!service_->engine->work() && service_->engine->poll() == 0 && !leaving_.empty()) {
      service_->engine->wait(1'000'000);
    }
  }
  service_->engine->set_wake({});
  options_.clock->set_wake({});
  remove_socket();
  service_->snapshots.stop();
}

Status Server::start() {
  service_->epoll = ipc::Fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!service_->epoll.is_open() || service_->wake.fd() < 0) {
    return Status(KVM_ERR_LIMIT, "kvmd has no file descriptors left to begin with");
  }
  warm_up(&service_->reply_writer);
  KVM_TRY(service_->reaper.start());
  KVM_TRY(service_->allocator.start());
  KVM_TRY_ASSIGN(listener_, ipc::listen_at(options_.socket_path, options_.socket_mode));
  struct stat facts {};
  if (::stat(options_.socket_path.c_str(), &facts) == 0) {
    socket_inode_ = facts.st_ino;
  }
  const uint64_t none = 0;
  KVM_TRY(
      watch(service_->epoll, listener_.get(), EPOLLIN, event_token(EventKind::kListener, none)));
  KVM_TRY(
      watch(service_->epoll, service_->wake.fd(), EPOLLIN, event_token(EventKind::kWake, none)));
  if (options_.signal_fd >= 0) {
    KVM_TRY(
        watch(service_->epoll, options_.signal_fd, EPOLLIN, event_token(EventKind::kSignal, none)));
  }
  if (options_.offer_eventfd) {
    Result<std::unique_ptr<UringNotifier>> notifier = UringNotifier::open();
    if (notifier.is_ok()) {
      service_->notifier = std::move(notifier).value();
      KVM_TRY(watch(service_->epoll, service_->notifier->fd(), EPOLLIN,
                    event_token(EventKind::kNotifier, none)));
    } else {
      spdlog::warn("completion eventfds are not offered ({}); clients that want them will poll",
                   notifier.status().message());
    }
  }
  next_watchdog_ns_ = options_.watchdog_period_ns == 0 ? UINT64_MAX : 0;
  return start_metrics();
}

Status Server::start_metrics() {
  if (options_.metrics.kind == ListenAddress::Kind::kOff) {
    return Status::ok();
  }
  constexpr uint64_t kTimeoutNs = 1'000'000'000;
  const auto make_text = [service = service_.get()]() -> std::optional<std::string> {
    const std::shared_ptr<const StatsSnapshot> snapshot = service->snapshots.get(kTimeoutNs);
    return snapshot == nullptr ? std::nullopt : std::optional(stats_text(*snapshot));
  };
  KVM_TRY_ASSIGN(metrics_,
                 MetricsServer::start(options_.metrics, options_.metrics_mode, make_text));
  return Status::ok();
}

void Server::run() {
  uint64_t last_active = now_ns();
  uint64_t last_events = 0;
  uint64_t last_housekeep = last_active;
  SharedSpin spin(&share_);
  bool may_spin = true;  // nobody else wants the core
  while (!stop_requested_.load(std::memory_order_relaxed)) {
    const bool active = turn();
    const uint64_t now = now_ns();
    if (active) {
      last_active = now;
      spin.finish();
      spin = SharedSpin(&share_);
      may_spin = true;
    }
    if (now - last_events >= (active ? kBusyEventPeriodNs : kSpinEventPeriodNs)) {
      handle_events(0);
      last_events = now;
    }
    notify_eventfds();
    if (active) {
      if (now - last_housekeep >= kBusyHousekeepNs) {
        service_->engine->housekeep();
        last_housekeep = now;
      }
      continue;
    }
    const uint64_t idle_ns = now - last_active;
    const bool never_sleep = options_.spin_max_ns == UINT64_MAX;
    if (idle_ns < (never_sleep ? kMinHousekeepIdleNs : spin_window_ns()) &&
        (may_spin || never_sleep)) {
      may_spin = spin.relax();
      continue;
    }
    // Not sooner: it may take a millisecond, and the next request would have to wait for it.
    const bool is_idle = idle_ns >= spin_window_ns();
    const uint64_t sleep_ns = is_idle ? service_->engine->housekeep() : kCutSpinSleepNs;
    if (sleep_ns == 0 || never_sleep) {
      continue;
    }
    sleep(sleep_ns);
    last_events = now_ns();
  }
  shut_down();
}

void Server::request_stop() {
  stop_requested_.store(true, std::memory_order_relaxed);
  service_->wake.wake();
}

void Server::shut_down() {
  spdlog::info("shutting down: clients: {}, requests in flight: {}", sessions_.size(),
               service_->engine->n_in_flight());
  draining_ = true;
  KVM_KILL_POINT("daemon/stopping");
  if (options_.on_stopping) {
    options_.on_stopping();
  }
  listener_.reset();
  remove_socket();
  const Clock& clock = *options_.clock;
  const uint64_t deadline = add_saturating(clock.now_ns(), options_.shutdown_timeout_ns);
  while (service_->engine->n_in_flight() > 0 && clock.now_ns() < deadline) {
    if (!turn()) {
      service_->engine->wait(1'000'000);
    }
  }
  if (const uint32_t n = service_->engine->n_in_flight(); n > 0) {
    spdlog::warn("requests given up: {}; shutdown_timeout_ms has passed", n);
  }
  for (auto& session : sessions_) {
    session->doom("shutdown");
  }
  bury_doomed();
}

void Server::remove_socket() {
  // Another daemon may have taken the path over in the meantime.
  struct stat facts {};
  if (socket_inode_ != 0 && ::stat(options_.socket_path.c_str(), &facts) == 0 &&
      facts.st_ino == socket_inode_) {
    ::unlink(options_.socket_path.c_str());
  }
  socket_inode_ = 0;
}

// --- A turn -------------------------------------------------------------------------------------

bool Server::turn() {
  bool active = false;
  if (!draining_) {
    active = serve_queues();
    publish();
  }
  active |= service_->engine->work();
  active |= service_->engine->poll() > 0;
  publish();
  finish_arenas();
  finish_closing_queues();
  bury_doomed();
  publish_snapshot();
  return active;
}

void Server::publish_snapshot() {
  try {
    if (service_->snapshots.is_wanted()) {
      service_->snapshots.publish(take_snapshot(*service_));
    }
  } catch (const std::bad_alloc&) {
    // Still wanted: the next turn tries again, until who asked has no patience left.
  }
}

bool Server::serve_queues() {
  bool active = false;
  const size_t n = sessions_.size();
  first_session_ = n == 0 ? 0 : (first_session_ + 1) % n;
  for (size_t i = 0; i < n; ++i) {
    Session* session = sessions_[(first_session_ + i) % n].get();
    if (serve_session(session)) {
      session->note_arrival(now_ns());
      active = true;
    }
  }
  return active;
}

// LIMIT: what others wait for one client: kEntriesPerTurn of all its queues, which take turns at
// being the first.
bool Server::serve_session(Session* session) {
  uint32_t n_left = kEntriesPerTurn;
  const uint64_t copied_before = session->copied_bytes;
  const size_t n_queues = session->queues.size();
  for (size_t i = 0; i < n_queues; ++i) {
    ServedQueue* queue = session->queues[(session->next_queue + i) % n_queues].get();
    uint32_t n_taken = 0;
    do {
      n_taken = serve_queue(session, queue, std::min(n_left, kEntriesAtOnce));
      n_left -= n_taken;
    } while (n_taken == kEntriesAtOnce && n_left != 0 &&
             session->copied_bytes - copied_before < kPrivateBytesPerTurn);
    if (n_left == 0 || session->copied_bytes - copied_before >= kPrivateBytesPerTurn) {
      session->next_queue = (session->next_queue + i + 1) % n_queues;
      break;
    }
  }
  return n_left != kEntriesPerTurn;
}

// Returns how many entries were taken.
uint32_t Server::serve_queue(Session* session, ServedQueue* queue, uint32_t n_max) {
  if (queue->closing || session->is_doomed()) {
    return 0;
  }
  // LIMIT: what one client makes us hold in private memory; its next requests wait for those that
  // hold it, whatever queue they came from.
  if (session->private_bytes() > kMaxPrivateBytes) {
    return 0;
  }
  std::array<ipc::RequestEntry, kEntriesAtOnce> entries;
  const Result<uint32_t> taken = queue->take(entries.data(), n_max);
  if (!taken.is_ok()) {
    session->doom_for_violation(taken.status().message());
    return 1;
  }
  if (taken.value() > 0) {
    KVM_KILL_POINT("daemon/entries_taken");
  }
  for (uint32_t i = 0; i < taken.value() && !session->is_doomed(); ++i) {
    ipc::Request request;
    ipc::Reject reject = ipc::Reject::kNone;
    try {
      reject = ipc::validate_request(entries[i], &session->regions, &request);
    } catch (const std::bad_alloc&) {
      answer_no_memory(queue, request);
      continue;
    }
    if (reject != ipc::Reject::kNone) {
      ++service_->n_rejects[static_cast<size_t>(reject)];
      session->doom_for_violation(ipc::reject_text(reject));
      break;
    }
    KVM_KILL_POINT("daemon/request_validated");
    dispatch_request(session, queue, std::move(request));
  }
  return taken.value();
}

void Server::publish() {
  if (service_->dirty.empty()) {
    return;
  }
  const uint64_t now = now_ns();
  for (ServedQueue* queue : service_->dirty) {
    queue->is_dirty = false;
    KVM_KILL_POINT("daemon/completion_staged");
    queue->publish();
    queue->session()->note_answer(now);
    if (!queue->must_notify && queue->wants_eventfd()) {
      queue->must_notify = true;
      ++n_unnotified_;
    }
  }
  KVM_KILL_POINT("daemon/completion_published");
  service_->dirty.clear();
  notify_eventfds();
}

void Server::notify_eventfds() {
  if (n_unnotified_ == 0) {
    return;
  }
  for (const auto& session : sessions_) {
    for (const auto& queue : session->queues) {
      if (!queue->must_notify || queue->notification_under_way) {
        continue;
      }
      const uint64_t token = session->id() << 32 | queue->id();
      queue->notification_under_way = service_->notifier->notify(queue->eventfd(), token);
      queue->must_notify = !queue->notification_under_way;
      n_unnotified_ -= queue->must_notify ? 0 : 1;
      ++service_->n_notifications;
    }
  }
  // Nearly always done already, and then it does not wake us later.
  reap_notifications();
}

void Server::reap_notifications() {
  service_->notifier->reap([this](uint64_t token) {
    Session* session = find_session(token >> 32);
    ServedQueue* queue =
        session == nullptr ? nullptr : session->find_queue(static_cast<uint32_t>(token));
    if (queue != nullptr) {
      queue->notification_under_way = false;
    }
  });
}

void Server::finish_closing_queues() {
  for (const auto& session : sessions_) {
    std::erase_if(session->queues, [this, &session](const std::unique_ptr<ServedQueue>& queue) {
      if (!queue->closing || queue->n_in_flight() > 0) {
        return false;
      }
      if (queue->notification_under_way) {
        service_->notifier->cancel(session->id() << 32 | queue->id());
      }
      n_unnotified_ -= queue->must_notify ? 1 : 0;
      --service_->n_queues;
      session->give_back(engine::Resource::kQueues, 1);
      finish_queue_destroy(session.get(), queue->close_message_id);
      return true;
    });
  }
}

void Server::finish_arenas() {
  // SYNC: acquire: a hint only; the lock orders the vector.
  if (!service_->has_finished.load(std::memory_order_acquire)) {
    return;
  }
  FinishedArenas finished;
  {
    const std::lock_guard lock(service_->finished_mutex);
    finished.swap(service_->finished);
    service_->has_finished.store(false, std::memory_order_relaxed);
  }
  for (FinishedArena& arena : finished) {
    Session* session = find_session(arena.session);
    finish_arena(service_.get(), session, std::move(arena));
  }
}

// --- The end of a session -----------------------------------------------------------------------

void Server::bury_doomed() {
  const auto is_doomed = [](const auto& session) { return session->is_doomed(); };
  if (std::none_of(sessions_.begin(), sessions_.end(), is_doomed)) {
    return;
  }
  publish();
  for (size_t i = 0; i < sessions_.size();) {
    if (!sessions_[i]->is_doomed()) {
      ++i;
      continue;
    }
    std::unique_ptr<Session> session = std::move(sessions_[i]);
    sessions_.erase(sessions_.begin() + static_cast<ptrdiff_t>(i));
    bury(std::move(session));
  }
}

void Server::bury(std::unique_ptr<Session> session) {
  KVM_KILL_POINT("daemon/session_doomed");
  // One that never said a word is a kvmd that looks whether another listens here.
  const bool is_visitor = (session->welcomed || !session->has_spoken) && !session->is_engine();
  spdlog::log(session->is_violator() ? spdlog::level::warn
              : is_visitor           ? spdlog::level::debug
                                     : spdlog::level::info,
              "client {:#x} '{}' (process {}, user {}) closed: {}", session->client, session->name,
              session->peer().pid, session->peer().uid, session->doom_reason());
  for (const auto& queue : session->queues) {
    if (queue->notification_under_way) {
      service_->notifier->cancel(session->id() << 32 | queue->id());
    }
    n_unnotified_ -= queue->must_notify ? 1 : 0;
  }
  service_->n_queues -= session->queues.size();
  service_->n_clients -= session->welcomed ? 1 : 0;
  session->hang_up();
  session->account = nullptr;  // The engine gives back what it holds, all at once.
  const uint64_t id = session->id();
  const bool welcomed = session->welcomed;
  const engine::ClientId client = session->client;
  leaving_.push_back(std::move(session));
  if (welcomed) {
    service_->engine->remove_client(client, [this, id] { let_go(id); });
  } else {
    let_go(id);
  }
}

bool Server::close_client(engine::ClientId client, const std::string& reason) {
  for (const auto& session : sessions_) {
    if (session->welcomed && session->client == client && !session->is_doomed()) {
      session->doom(reason);
      return true;
    }
  }
  return false;
}

void Server::let_go(uint64_t session_id) {
  const auto at = std::find_if(leaving_.begin(), leaving_.end(),
                               [=](const auto& session) { return session->id() == session_id; });
  if (at == leaving_.end()) {
    return;
  }
  std::unique_ptr<Session> session = std::move(*at);
  leaving_.erase(at);
  KVM_KILL_POINT("daemon/session_let_go");
  // Requests that were dropped still pin regions; the accounts of these belong to this thread.
  session->queues.clear();
  // When the daemon ends, results that clients were just told of stay readable for them.
  const auto discard = [service = service_.get(), keep = draining_](Session* gone) {
    const uint64_t size_bytes = gone->regions.total_bytes();
    if (!keep) {
      gone->regions.discard_contents();
    }
    service->arena_bytes -= size_bytes;
  };
  std::function<void()> job;
  try {
    auto held = std::make_shared<std::unique_ptr<Session>>();
    job = [discard, held] { discard(held->get()); };
    // The job has the session, which ends, and whose memory is unmapped, over there.
    *held = std::move(session);
    held.reset();
    service_->reaper.post(std::move(job));
  } catch (const std::bad_alloc&) {
    job ? job() : discard(session.get());  // here, and slower
  }
}

// --- Events -------------------------------------------------------------------------------------

void Server::handle_events(int timeout_ms) {
  std::array<epoll_event, 64> events;
  const int n = ::epoll_wait(service_->epoll.get(), events.data(), static_cast<int>(events.size()),
                             timeout_ms);
  for (int i = 0; i < n; ++i) {
    handle_event(events[static_cast<size_t>(i)]);
  }
  run_timers();
  bury_doomed();
}

// A client that connects, or writes, while there is no memory waits or goes; the others are served.
void Server::handle_event(const epoll_event& event) {
  try {
    dispatch_event(event);
  } catch (const std::bad_alloc&) {
    // A message that could not be received is tried again, a connection in hand is closed.
  }
}

void Server::dispatch_event(const epoll_event& event) {
  const auto kind = static_cast<EventKind>(event.data.u64 >> 56);
  switch (kind) {
    case EventKind::kListener:
      return handle_listener();
    case EventKind::kSignal:
      stop_requested_.store(true, std::memory_order_relaxed);
      return;
    case EventKind::kNotifier:
      return reap_notifications();
    case EventKind::kWake:
    case EventKind::kDoorbell:
      return;  // Being awake is all that was asked for.
    case EventKind::kSocket:
    case EventKind::kProcess:
      break;
  }
  Session* session = find_session(event.data.u64 & ~(uint64_t{0xff} << 56));
  if (session == nullptr || session->is_doomed()) {
    return;
  }
  if (kind == EventKind::kProcess) {
    session->doom("its process has ended");
    return;
  }
  handle_socket(session, event.events);
}

void Server::handle_listener() {
  Result<std::optional<ipc::Fd>> accepted = ipc::accept_from(listener_);
  if (!accepted.is_ok()) {
    // A client that waits would make the listener readable at once, again and again.
    spdlog::error("accept: {}; tried again in {} ms", accepted.status().message(),
                  kListenerPauseNs / 1'000'000);
    watch_again(service_->epoll, listener_, 0, event_token(EventKind::kListener, 0));
    listener_resume_ns_ = options_.clock->now_ns() + kListenerPauseNs;
    return;
  }
  std::optional<ipc::Fd>& socket = accepted.value();
  // Places for it, all the way.
  sessions_.reserve(sessions_.size() + 1);
  leaving_.reserve(sessions_.size() + leaving_.size() + 1);
  if (!socket || sessions_.size() >= service_->limits.max_clients + kMaxUnwelcomed) {
    return;
  }
  const Result<ipc::PeerCredentials> peer = ipc::peer_credentials(*socket);
  if (!peer.is_ok()) {
    return;
  }
  auto session = std::make_unique<Session>(service_.get(), ++last_session_id_, std::move(*socket),
                                           peer.value());
  session->handshake_deadline_ns = options_.clock->now_ns() + kHandshakeTimeoutNs;
  KVM_KILL_POINT("daemon/accepted");
  // One that could not be heard is closed.
  const Status watched = watch(service_->epoll, session->socket().get(), EPOLLIN | EPOLLRDHUP,
                               event_token(EventKind::kSocket, session->id()));
  if (!watched.is_ok()) {
    spdlog::error("a connection is closed: {}", watched.message());
    return;
  }
  // Without a pidfd (old kernel, other process namespace) the socket alone tells of the end.
  if (Result<ipc::Fd> pidfd = ipc::peer_pidfd(session->socket(), peer.value()); pidfd.is_ok()) {
    session->pidfd = std::move(pidfd).value();
    (void)watch(service_->epoll, session->pidfd.get(), EPOLLIN,
                event_token(EventKind::kProcess, session->id()));
  }
  sessions_.push_back(std::move(session));
}

void Server::handle_socket(Session* session, uint32_t events) {
  if ((events & EPOLLOUT) != 0) {
    session->flush();
  }
  // Messages that were sent before a hang-up are still answered, into the void; the loop then sees
  // the end.
  for (uint32_t i = 0; i < kMessagesPerEvent && !session->is_doomed(); ++i) {
    // Until it comes to its end: a message that found no memory is still in the socket.
    if (++session->n_receives_begun > kMaxReceives) {
      session->doom("there is no memory for its messages");
      return;
    }
    const Result<std::optional<ipc::ReceivedMessage>> received =
        ipc::receive_message(session->socket(), 0);
    session->n_receives_begun = 0;
    if (!received.is_ok()) {
      const Status status = received.status();
      status.code() == KVM_ERR_PROTOCOL ? session->doom_for_violation(status.message())
                                        : session->doom(status.message());
      return;
    }
    if (!received.value().has_value()) {
      break;
    }
    const bool was_welcomed = session->welcomed;
    session->has_spoken = true;
    handle_message(session, received.value()->bytes);
    if (session->welcomed && !was_welcomed) {
      spdlog::debug("client {:#x} '{}' (process {}, user {}) connected", session->client,
                    session->name, session->peer().pid, session->peer().uid);
    }
  }
  if ((events & (EPOLLHUP | EPOLLERR)) != 0) {
    session->doom("it has closed the connection");
  }
}

// Says where a drive takes nothing, or does not give back what it has taken. Nobody wakes for that,
// as it happens only while there is something to do.
void Server::look_at_disk(uint64_t now) {
  const tiers::DiskTierStats stats = options_.disk->stats();
  if (stats.is_list_unmarked && may_warn(now, &warnings_.unmarked_ns)) {
    spdlog::warn(
        "kvm.set cannot be written in each of the directories: were the list of snapshots "
        "lost now, the next start might take it for none; it is tried again with each "
        "save");
  }
  if (stats.n_passed_over != 0 && may_warn(now, &warnings_.passed_over_ns)) {
    spdlog::warn("{} of {} for pages on disk {} nothing new for now: {}", stats.n_passed_over,
                 counted(stats.n_directories, "drive"), stats.n_passed_over == 1 ? "takes" : "take",
                 stats.refusal.empty() ? "writes have failed" : stats.refusal);
  }
  if (stats.n_corrupt != warnings_.n_corrupt && may_warn(now, &warnings_.corrupt_ns)) {
    spdlog::warn(
        "pages on disk that were read and are not what had been written: {}; requests that need "
        "them fail with KVM_ERR_CORRUPT; look after the drive; the last: {}",
        stats.n_corrupt - warnings_.n_corrupt, stats.corruption);
    warnings_.n_corrupt = stats.n_corrupt;
  }
}

// Prefixes of a kvmd before may come any time: with the first client that registers their space.
void Server::look_at_prefixes(uint64_t now) {
  const uint64_t n_failed = service_->engine->prefix_stats().n_failed_loads;
  if (n_failed != warnings_.n_failed_prefixes && may_warn(now, &warnings_.prefixes_ns)) {
    spdlog::warn(
        "kept prefixes that could not be loaded: {}; those of which parts are missing or damaged "
        "were removed, the others are tried again",
        n_failed - warnings_.n_failed_prefixes);
    warnings_.n_failed_prefixes = n_failed;
  }
}

void Server::run_timers() {
  const uint64_t now = options_.clock->now_ns();
  if (now >= next_watchdog_ns_) {
    next_watchdog_ns_ = now + options_.watchdog_period_ns;
    options_.on_watchdog();
  }
  if (options_.disk != nullptr && now >= next_disk_look_ns_) {
    next_disk_look_ns_ = now + kDiskLookNs;
    look_at_disk(now);
  }
  if (options_.disk != nullptr && now >= next_prefix_look_ns_) {
    next_prefix_look_ns_ = now + kPrefixLookNs;
    look_at_prefixes(now);
  }
  if (now >= listener_resume_ns_) {
    watch_again(service_->epoll, listener_, EPOLLIN, event_token(EventKind::kListener, 0));
    listener_resume_ns_ = UINT64_MAX;
  }
  for (const auto& session : sessions_) {
    if (!session->welcomed && now >= session->handshake_deadline_ns) {
      session->doom("no Hello in time");
    }
  }
}

Session* Server::find_session(uint64_t id) {
  for (const auto& session : sessions_) {
    if (session->id() == id) {
      return session.get();
    }
  }
  return nullptr;
}

// --- Sleeping -----------------------------------------------------------------------------------

uint64_t Server::spin_window_ns() const {
  uint64_t window = 0;
  for (const auto& session : sessions_) {
    if (session->queues.empty()) {
      continue;
    }
    const uint64_t gap = session->gap_ns();
    const uint64_t wanted = gap == 0 ? options_.spin_max_ns : std::max(4 * gap, kMinSpinNs);
    window = std::max(window, std::min(wanted, options_.spin_max_ns));
  }
  return window;
}

bool Server::prepare_sleep() {
  service_->wake.prepare_sleep();
  flagged_.clear();
  try {
    flagged_.reserve(service_->n_queues);
  } catch (const std::bad_alloc&) {
    return false;
  }
  for (const auto& session : sessions_) {
    if (session->private_bytes() > kMaxPrivateBytes) {
      continue;  // Nothing more is taken from it before a request of its own finishes.
    }
    for (const auto& queue : session->queues) {
      if (queue->closing) {
        if (queue->n_in_flight() == 0) {
          return false;  // Its client waits for the reply, which is due at the end of a turn.
        }
        continue;
      }
      if (!queue->prepare_sleep()) {
        return false;
      }
      flagged_.push_back(queue.get());
    }
  }
  // work() comes last: what poll() finds finished may leave more to do, without a request's being
  // retired. What finishes later wakes.
  return !service_->has_finished.load(std::memory_order_acquire) &&
         !service_->snapshots.is_wanted() && !stop_requested_.load(std::memory_order_relaxed) &&
         service_->engine->poll() == 0 && !service_->engine->work();
}

void Server::finish_sleep(size_t n_flagged) {
  for (size_t i = 0; i < n_flagged; ++i) {
    flagged_[i]->finish_sleep();
  }
  service_->wake.finish_sleep();
}

void Server::sleep(uint64_t most_ns) {
  const bool may_sleep = prepare_sleep();
  const size_t n_flagged = flagged_.size();
  if (may_sleep && service_->dirty.empty()) {
    ++service_->n_sleeps;
    KVM_KILL_POINT("daemon/sleeping");
    std::array<epoll_event, 64> events;
    const int n = ::epoll_wait(service_->epoll.get(), events.data(),
                               static_cast<int>(events.size()), sleep_timeout_ms(most_ns));
    // Flags first: events may destroy queues.
    finish_sleep(n_flagged);
    for (int i = 0; i < n; ++i) {
      handle_event(events[static_cast<size_t>(i)]);
    }
    run_timers();
    bury_doomed();
    return;
  }
  finish_sleep(n_flagged);
}

int Server::sleep_timeout_ms(uint64_t most_ns) const {
  uint64_t deadline = std::min(listener_resume_ns_, next_watchdog_ns_);
  for (const auto& session : sessions_) {
    if (!session->welcomed) {
      deadline = std::min(deadline, session->handshake_deadline_ns);
    }
  }
  const uint64_t patience_ns = std::min(options_.clock->patience_ns(deadline), most_ns);
  constexpr uint64_t kMostMs = 1'000'000'000;
  if (patience_ns == UINT64_MAX) {
    return -1;
  }
  return patience_ns == 0 ? 0 : static_cast<int>(std::min(patience_ns / 1'000'000 + 1, kMostMs));
}

}  // namespace kvm::daemon
