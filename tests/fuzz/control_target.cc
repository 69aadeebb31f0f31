// SPDX-License-Identifier: Apache-2.0
#include <sys/epoll.h>
#include <sys/socket.h>

#include <future>
#include <memory>
#include <optional>

#include "base/assert.h"
#include "daemon/control.h"
#include "daemon/reply.h"
#include "daemon/service.h"
#include "daemon/session.h"
#include "ipc/control.h"
#include "ipc/socket.h"
#include "tests/fuzz/seeds.h"
#include "tests/fuzz/targets.h"
#include "tests/unit/daemon/fake_engine.h"

namespace kvm::testing {
namespace {

// What a dispatcher has around a session, without a dispatcher.
class Surroundings {
 public:
  Surroundings() {
    service_.epoll = ipc::Fd(::epoll_create1(EPOLL_CLOEXEC));
    service_.limits.max_arena_bytes = 1 << 20;
    service_.limits.arena_quota_bytes = 1 << 20;
    service_.limits.arena_capacity_bytes = 1 << 20;
    daemon::warm_up(&service_.reply_writer);
    KVM_ASSERT(service_.reaper.start().is_ok() && service_.allocator.start().is_ok());
    service_.config_text = R"({"version":1,"file":null,"options":[]})";
    service_.close_client = [this](engine::ClientId client, const std::string& reason) {
      const bool is_it = session_ != nullptr && session_->client == client;
      if (is_it) {
        session_->doom(reason);
      }
      return is_it;
    };
  }

  // Runs the messages through a connection of their own. Greeted: one that has said Hello. Its
  // engine knows nothing of earlier inputs: a limit that one of them sets would refuse all later.
  void run(const std::vector<Bytes>& messages, bool greeted) {
    engine_.emplace(options());
    service_.engine = &*engine_;
    int sockets[2];
    KVM_ASSERT(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sockets) ==
               0);
    const ipc::Fd peer(sockets[1]);
    auto session = std::make_unique<daemon::Session>(&service_, ++last_id_, ipc::Fd(sockets[0]),
                                                     ipc::PeerCredentials{});
    session_ = session.get();
    if (greeted) {
      static const Bytes kHello = hello_seeds().front().second;
      daemon::handle_message(session.get(), kHello);
      KVM_ASSERT(session->welcomed);
    }
    for (const Bytes& message : messages) {
      if (session->is_doomed()) {
        break;
      }
      const uint64_t n_arenas = n_arenas_of(*session);
      daemon::handle_message(session.get(), message);
      if (n_arenas_of(*session) > n_arenas) {
        finish_arenas(session.get());
      }
      while (auto reply = take_reply(peer)) {
        KVM_ASSERT(ipc::read_message(reply->bytes).is_ok());
      }
    }
    session_ = nullptr;
    end(std::move(session));
  }

 private:
  static engine::EngineOptions options() {
    engine::EngineOptions options;
    options.host_capacity_bytes = 1 << 20;
    return options;
  }

  static std::optional<ipc::ReceivedMessage> take_reply(const ipc::Fd& peer) {
    Result<std::optional<ipc::ReceivedMessage>> reply =
        ipc::receive_message(peer, ipc::kMaxFdsPerMessage);
    return reply.is_ok() ? std::move(reply).value() : std::nullopt;
  }

  static uint64_t n_arenas_of(const daemon::Session& session) {
    return session.account == nullptr ? 0 : session.account->used(engine::Resource::kArenas);
  }

  // Jobs are done in order: when this one runs, all before it are finished.
  static void wait_for(daemon::BackgroundThread* thread) {
    std::promise<void> done;
    thread->post([&done] { done.set_value(); });
    done.get_future().wait();
  }

  void finish_arenas(daemon::Session* session) {
    wait_for(&service_.allocator);
    daemon::FinishedArenas finished;
    {
      const std::lock_guard lock(service_.finished_mutex);
      finished.swap(service_.finished);
    }
    for (daemon::FinishedArena& arena : finished) {
      daemon::finish_arena(&service_, session, std::move(arena));
    }
  }

  // As the dispatcher does it.
  void end(std::unique_ptr<daemon::Session> session) {
    service_.n_queues -= session->queues.size();
    service_.n_clients -= session->welcomed ? 1 : 0;
    session->hang_up();
    session->account = nullptr;
    engine_->remove_client(session->client, [] {});
    engine_->poll();
    session->queues.clear();
    service_.arena_bytes -= session->regions.total_bytes();
    service_.dirty.clear();
    session.reset();
    wait_for(&service_.reaper);
    KVM_ASSERT(service_.arena_bytes == 0 && service_.n_clients == 0 && service_.n_queues == 0);
  }

  std::optional<FakeEngine> engine_;
  daemon::Service service_;
  daemon::Session* session_ = nullptr;
  uint64_t last_id_ = 0;
};

Surroundings& surroundings() {
  static Surroundings* const kAll = new Surroundings;
  return *kAll;
}

}  // namespace

void run_hello(std::span<const uint8_t> input) {
  surroundings().run({Bytes(input.begin(), input.end())}, false);
}

void run_control(std::span<const uint8_t> input) {
  InputReader reader(input);
  std::vector<Bytes> messages;  // each aligned, as received ones are
  while (!reader.is_empty() && messages.size() < 16) {
    const std::span<const uint8_t> message = reader.take_bytes(reader.take<uint16_t>());
    messages.emplace_back(message.begin(), message.end());
  }
  surroundings().run(messages, true);
}

}  // namespace kvm::testing
