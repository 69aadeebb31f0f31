// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/daemon/raw_client.h"

#include <stdlib.h>
#include <unistd.h>

#include <cstring>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "daemon/server.h"
#include "ipc/doorbell.h"
#include "ipc/shared_words.h"
#include "tests/unit/daemon/fake_engine.h"

namespace kvm::testing {
namespace {

namespace wire = ipc::wire;

constexpr uint64_t kTimeoutNs = 5'000'000'000;

Status unexpected(const char* what) { return Status(KVM_ERR_PROTOCOL, what); }

}  // namespace

RawClient::RawClient(const std::string& path) {
  Result<ipc::Fd> socket = ipc::connect_to(path, kTimeoutNs);
  if (socket.is_ok()) {
    socket_ = std::move(socket).value();
  }
}

Status RawClient::send(std::span<const uint8_t> bytes, std::span<const int> fds) {
  return ipc::send_message(socket_, bytes, fds);
}

Result<RawReply> RawClient::receive() {
  KVM_TRY(ipc::wait_readable(socket_, kTimeoutNs));
  KVM_TRY_ASSIGN(auto received, ipc::receive_message(socket_, ipc::kMaxFdsPerMessage));
  if (!received.has_value()) {
    return unexpected("readable without a message");
  }
  RawReply reply{std::move(*received), nullptr};
  KVM_TRY_ASSIGN(reply.root, ipc::read_message(reply.message.bytes));
  return reply;
}

Result<RawReply> RawClient::call(const Encode& encode) {
  ipc::ControlWriter writer;
  KVM_TRY(send(encode(&writer, ++last_id_)));
  KVM_TRY_ASSIGN(RawReply reply, receive());
  if (reply.root->id() != last_id_) {
    return unexpected("a reply to another message");
  }
  KVM_TRY(ipc::reply_status(*reply.root));
  return reply;
}

bool RawClient::is_closed_by_daemon() {
  const uint64_t deadline = now_ns() + kTimeoutNs;
  while (now_ns() < deadline) {
    const Result<RawReply> reply = receive();
    // Replies to what was sent before may still lie in the socket.
    if (!reply.is_ok() && reply.status().code() == KVM_ERR_DISCONNECTED) {
      return true;
    }
  }
  return false;
}

Status RawClient::hello(uint64_t magic, uint32_t major_min, uint32_t major_max) {
  KVM_TRY_ASSIGN(RawReply reply, call([&](ipc::ControlWriter* writer, uint64_t id) {
                   const auto name = writer->fbb().CreateString("raw");
                   return writer->finish(
                       id, wire::CreateHello(writer->fbb(), magic, major_min, major_max, name));
                 }));
  const wire::Welcome* welcome = reply.root->body_as_Welcome();
  if (welcome == nullptr || welcome->info()->size() != sizeof(info_) ||
      reply.message.fds.size() != 1) {
    return unexpected("not a Welcome");
  }
  std::memcpy(&info_, welcome->info()->data(), sizeof(info_));
  epoch_ = welcome->epoch();
  doorbell_ = std::move(reply.message.fds[0]);
  return Status::ok();
}

Result<RawQueue> RawClient::create_queue() {
  KVM_TRY_ASSIGN(RawReply reply, call([](ipc::ControlWriter* writer, uint64_t id) {
                   return writer->finish(id, wire::CreateQueueCreate(writer->fbb(), 256));
                 }));
  const wire::QueueCreated* created = reply.root->body_as_QueueCreated();
  if (created == nullptr || reply.message.fds.size() != (created->has_eventfd() ? 3u : 2u)) {
    return unexpected("not a QueueCreated");
  }
  RawQueue queue;
  queue.id = created->queue();
  KVM_TRY_ASSIGN(queue.client_memory,
                 ipc::map_shared_memory(reply.message.fds[0], sizeof(ipc::ClientRegion),
                                        ipc::PeerAccess::kReadWrite));
  KVM_TRY_ASSIGN(queue.daemon_memory,
                 ipc::map_shared_memory(reply.message.fds[1], sizeof(ipc::DaemonRegion),
                                        ipc::PeerAccess::kReadOnly));
  if (created->has_eventfd()) {
    queue.eventfd = std::move(reply.message.fds[2]);
  }
  return queue;
}

Status RawClient::destroy_queue(uint32_t queue) {
  return call([queue](ipc::ControlWriter* writer, uint64_t id) {
           return writer->finish(id, wire::CreateQueueDestroy(writer->fbb(), queue));
         })
      .status();
}

Result<RawArena> RawClient::create_arena(uint64_t size_bytes) {
  KVM_TRY_ASSIGN(RawReply reply, call([=](ipc::ControlWriter* writer, uint64_t id) {
                   return writer->finish(id, wire::CreateArenaCreate(writer->fbb(), size_bytes));
                 }));
  const wire::ArenaCreated* created = reply.root->body_as_ArenaCreated();
  if (created == nullptr || reply.message.fds.size() != 1) {
    return unexpected("not an ArenaCreated");
  }
  RawArena arena;
  arena.region = created->region();
  KVM_TRY_ASSIGN(arena.memory, ipc::map_shared_memory(reply.message.fds[0], created->size(),
                                                      ipc::PeerAccess::kReadWrite));
  return arena;
}

Status RawClient::destroy_arena(uint32_t region) {
  return call([region](ipc::ControlWriter* writer, uint64_t id) {
           return writer->finish(id, wire::CreateArenaDestroy(writer->fbb(), region));
         })
      .status();
}

Result<std::vector<uint8_t>> RawClient::get_bytes(const Encode& encode) {
  KVM_TRY_ASSIGN(RawReply reply, call(encode));
  const wire::Bytes* bytes = reply.root->body_as_Bytes();
  if (bytes == nullptr) {
    return unexpected("not a Bytes");
  }
  return bytes->data() == nullptr
             ? std::vector<uint8_t>()
             : std::vector<uint8_t>(bytes->data()->begin(), bytes->data()->end());
}

Result<kvm_stats> RawClient::stats() {
  KVM_TRY_ASSIGN(const std::vector<uint8_t> bytes,
                 get_bytes([](ipc::ControlWriter* writer, uint64_t id) {
                   return writer->finish(id, wire::CreateStats(writer->fbb()));
                 }));
  kvm_stats stats{};
  if (bytes.size() != sizeof(stats)) {
    return unexpected("not a kvm_stats");
  }
  std::memcpy(&stats, bytes.data(), sizeof(stats));
  return stats;
}

Result<std::string> RawClient::stats_text() {
  KVM_TRY_ASSIGN(const std::vector<uint8_t> bytes,
                 get_bytes([](ipc::ControlWriter* writer, uint64_t id) {
                   return writer->finish(id, wire::CreateStatsText(writer->fbb(), 0));
                 }));
  return std::string(bytes.begin(), bytes.end());
}

uint64_t RawClient::n_sleeps() {
  const std::string text = stats_text().value();
  const std::string name = "\nkvm_dispatcher_sleeps_total ";
  return std::stoull(text.substr(text.find(name) + name.size()));
}

void RawClient::submit(RawQueue* queue, const ipc::RequestEntry& entry) {
  ipc::ClientRegion* region = queue->client();
  const uint32_t tail = ipc::load_acquire(region->sq_tail);
  region->entries[tail % ipc::kRequestEntries] = entry;
  // SYNC: sequentially consistent: the entry before the index, and the doorbell after both.
  ipc::store_seq_cst(&region->sq_tail, tail + 1);
  ipc::ring_doorbell(doorbell_);
}

Result<ipc::CompletionEntry> RawClient::wait(RawQueue* queue) {
  ipc::ClientRegion* region = queue->client();
  const uint32_t head = ipc::load_acquire(region->cq_head);
  const uint64_t deadline = now_ns() + kTimeoutNs;
  // SYNC: acquire: the entry that the index covers.
  while (ipc::load_acquire(queue->daemon()->cq_tail) == head) {
    if (ipc::is_hung_up(socket_)) {
      return Status(KVM_ERR_DISCONNECTED, "closed by the daemon");
    }
    if (now_ns() > deadline) {
      return Status(KVM_ERR_TIMEOUT, "no completion");
    }
    ::usleep(50);
  }
  ipc::CompletionEntry entry;
  ipc::copy_once(&entry, &queue->daemon()->entries[head % ipc::kCompletionEntries], sizeof(entry));
  // SYNC: sequentially consistent: before a look at sq_need_wakeup.
  ipc::store_seq_cst(&region->cq_head, head + 1);
  return entry;
}

Status RawClient::nop(RawQueue* queue) {
  ipc::RequestEntry entry{};
  entry.opcode = static_cast<uint8_t>(ipc::Opcode::kNop);
  entry.version = 1;
  entry.user_data = ++last_id_;
  submit(queue, entry);
  KVM_TRY_ASSIGN(const ipc::CompletionEntry done, wait(queue));
  return done.user_data == last_id_ && done.status == KVM_OK ? Status::ok()
                                                             : unexpected("not the nop's answer");
}

class RunningServer {
 public:
  RunningServer(const ServerOverrides& overrides, std::unique_ptr<engine::Engine> engine)
      : engine_(std::move(engine)) {
    char folder[] = "/tmp/kvmd-test-XXXXXX";
    folder_ = ::mkdtemp(folder);
    daemon::ServerOptions options;
    options.socket_path = folder_ + "/kvmd.sock";
    options.limits.max_clients = overrides.max_clients;
    options.limits.max_queues = overrides.max_queues;
    options.limits.max_arenas = overrides.max_arenas;
    options.limits.max_arena_bytes = 1ull << 30;
    options.limits.arena_quota_bytes = overrides.arena_quota_bytes;
    options.limits.arena_capacity_bytes = overrides.arena_capacity_bytes;
    options.limits.max_requests = overrides.max_requests;
    options.spin_max_ns = overrides.spin_max_ns;
    options.shutdown_timeout_ns = 100'000'000;
    server_ = std::make_unique<daemon::Server>(engine_.get(), options);
    status_ = server_->start();
    if (status_.is_ok()) {
      thread_ = std::thread([this] { server_->run(); });
    }
  }
  ~RunningServer() {
    stop();
    server_.reset();
    ::rmdir(folder_.c_str());
  }

  void stop() {
    if (thread_.joinable()) {
      server_->request_stop();
      thread_.join();
    }
  }
  std::string path() const { return folder_ + "/kvmd.sock"; }

 private:
  std::string folder_;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<daemon::Server> server_;
  Status status_;
  std::thread thread_;
};

std::shared_ptr<RunningServer> run_server(const ServerOverrides& overrides) {
  engine::EngineOptions options;
  options.host_capacity_bytes = 1ull << 30;
  options.tenant_limits = overrides.tenants;
  return run_server(overrides, std::make_unique<FakeEngine>(options));
}
std::shared_ptr<RunningServer> run_server(const ServerOverrides& overrides,
                                          std::unique_ptr<engine::Engine> engine) {
  return std::make_shared<RunningServer>(overrides, std::move(engine));
}
std::string socket_path_of(const RunningServer& server) { return server.path(); }
void stop(RunningServer* server) { server->stop(); }

}  // namespace kvm::testing
