// SPDX-License-Identifier: Apache-2.0
#include "client/thin_connection.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "base/clock.h"
#include "client/last_error.h"
#include "ipc/doorbell.h"
#include "ipc/struct_size.h"
#include "ipc/wire.h"

namespace kvm::client {

namespace {

namespace wire = ipc::wire;

// Destroying has no status to answer with. A lost connection has freed everything already.
void note_failure(const Status& status, const char* what) {
  if (!status.is_ok() && status.code() != KVM_ERR_DISCONNECTED) {
    const std::string sentence =
        std::string(what) + " could not be destroyed: " + std::string(status.message());
    log_message(KVM_LOG_WARNING, sentence.c_str());
  }
}

void note_no_memory() {
  log_message(
      KVM_LOG_WARNING,
      "there was no memory to destroy a queue or an arena: kvmd has it until the end of the "
      "connection");
}

Status unexpected_reply(const char* to) {
  return Status(KVM_ERR_PROTOCOL,
                std::string("the daemon's reply to ") + to + " is not what the protocol says");
}

}  // namespace

Result<std::shared_ptr<Connection>> Connection::open(const ConnectOptions& options) {
  KVM_TRY_ASSIGN(ipc::Fd socket, ipc::connect_to(options.socket_path, options.timeout_ns));
  return open_over(std::make_unique<ipc::SocketChannel>(std::move(socket)), system_clock(),
                   options);
}

Result<std::shared_ptr<Connection>> Connection::open_over(
    std::unique_ptr<ipc::ControlChannel> channel, const Clock* clock,
    const ConnectOptions& options) {
  std::shared_ptr<Connection> connection(new Connection());
  connection->channel_ = std::move(channel);
  connection->clock_ = clock;
  connection->timeout_ns_ = options.timeout_ns;
  KVM_TRY(connection->shake_hands(options));
  return connection;
}

Status Connection::shake_hands(const ConnectOptions& options) {
  KVM_TRY_ASSIGN(Reply reply, call([&](ipc::ControlWriter* writer, uint64_t id) {
                   auto& fbb = writer->fbb();
                   const auto name = fbb.CreateString(options.client_name);
                   const auto version = fbb.CreateString(kvm_version_string());
                   return writer->finish(
                       id, wire::CreateHello(fbb, ipc::kHelloMagic, ipc::kProtocolMajor,
                                             ipc::kProtocolMajor, name, version));
                 }));
  const wire::Welcome* welcome = reply.root->body_as_Welcome();
  if (welcome == nullptr || welcome->info() == nullptr || reply.message.fds.size() != 1) {
    return fail(unexpected_reply("Hello"));
  }
  if (welcome->protocol_major() != ipc::kProtocolMajor) {
    return fail(Status(KVM_ERR_VERSION,
                       "the daemon speaks protocol " + std::to_string(welcome->protocol_major()) +
                           ", this library " + std::to_string(ipc::kProtocolMajor)));
  }
  // Fields of a newer daemon beyond this library's structure are left out.
  KVM_TRY(ipc::read_struct(welcome->info()->data(),
                           std::min<uint64_t>(welcome->info()->size(), sizeof(info_)), &info_,
                           "kvm_client_info"));
  doorbell_ = std::move(reply.message.fds[0]);
  return Status::ok();
}

void Connection::close() {
  down_.store(true, std::memory_order_relaxed);
  channel_->shut_down();
}

bool Connection::look_for_hangup() {
  if (!is_down() && channel_->is_hung_up()) {
    down_.store(true, std::memory_order_relaxed);
    log_message(KVM_LOG_ERROR, "connection to kvmd lost");
  }
  return is_down();
}

Status Connection::down_status() const {
  return Status::fixed(KVM_ERR_DISCONNECTED,
                       "the connection to kvmd is closed; see kvm_client_reconnect");
}

Status Connection::timeout_status() const {
  return Status(KVM_ERR_TIMEOUT, "kvmd has not answered within " +
                                     std::to_string(timeout_ns_ / 1'000'000u) +
                                     " ms (timeout_ns of kvm_connect_params); the call may still "
                                     "take effect");
}

void Connection::ring() const { ipc::ring_doorbell(doorbell_); }

// The connection is of no use after a broken reply: close it, so that all see it.
Status Connection::fail(Status status) {
  if (status.code() == KVM_ERR_PROTOCOL || status.code() == KVM_ERR_DISCONNECTED) {
    close();
  }
  return status;
}

Result<Connection::Reply> Connection::call(const Encode& encode, uint64_t within_ns) {
  const std::lock_guard lock(mutex_);
  if (is_down()) {
    return down_status();
  }
  ipc::ControlWriter writer;
  const uint64_t id = ++last_id_;
  const std::span<const uint8_t> bytes = encode(&writer, id);
  if (bytes.size() > ipc::kMaxControlBytes) {
    return Status(KVM_ERR_LIMIT, "the parameters make a control message of " +
                                     std::to_string(bytes.size()) + " bytes; at most " +
                                     std::to_string(ipc::kMaxControlBytes));
  }
  const uint64_t deadline_ns = add_saturating(clock_->now_ns(), within_ns);
  // Whoever asks can hear the answer: want of memory comes before anything has happened.
  Reply reply;
  ipc::make_room(&reply.message);
  KVM_TRY(send(bytes, deadline_ns));
  KVM_TRY(receive_reply(id, deadline_ns, &reply));
  return reply;
}

bool Connection::is_answering(uint64_t within_ns) {
  const auto ask = [](ipc::ControlWriter* writer, uint64_t id) {
    return writer->finish(id, wire::CreateStats(writer->fbb()));
  };
  return call(ask, within_ns).is_ok();
}

uint64_t Connection::time_until(uint64_t deadline_ns) const {
  const uint64_t now = clock_->now_ns();
  return deadline_ns == UINT64_MAX ? UINT64_MAX : deadline_ns - std::min(deadline_ns, now);
}

Status Connection::send(std::span<const uint8_t> bytes, uint64_t deadline_ns) {
  for (;;) {
    Status status = channel_->send(bytes, {});
    if (status.code() != KVM_ERR_AGAIN) {
      return fail(std::move(status));
    }
    // Full of messages that the daemon has not read.
    if (!channel_->wait_writable(time_until(deadline_ns)).is_ok()) {
      return timeout_status();
    }
  }
}

Status Connection::receive_reply(uint64_t id, uint64_t deadline_ns, Reply* reply) {
  for (;;) {
    const Result<bool> received = channel_->receive(ipc::kMaxFdsPerMessage, &reply->message);
    if (!received.is_ok()) {
      return fail(received.status());
    }
    if (!received.value()) {
      const uint64_t left = time_until(deadline_ns);
      if (left == 0 || !channel_->wait_readable(left).is_ok()) {
        return timeout_status();
      }
      continue;
    }
    const auto root = ipc::read_message(reply->message.bytes);
    if (!root.is_ok()) {
      return fail(root.status());
    }
    reply->root = root.value();
    if (reply->root->id() != id) {
      give_back(*reply->root);
      ipc::make_room(&reply->message);
      continue;
    }
    if (reply->message.lost_fds) {
      give_back(*reply->root);
      return Status(KVM_ERR_LIMIT, "this process has no file descriptors left for what kvmd sends");
    }
    return ipc::reply_status(*reply->root);
  }
}

// Nobody waits for this reply, or can use it. An object that it made would count against the
// client until its end. REQUIRES: mutex_ is held.
void Connection::give_back(const wire::Message& reply) {
  ipc::ControlWriter writer;
  const uint64_t id = ++last_id_;
  if (const auto* arena = reply.body_as_ArenaCreated(); arena != nullptr) {
    (void)channel_->send(writer.finish(id, wire::CreateArenaDestroy(writer.fbb(), arena->region())),
                         {});
  } else if (const auto* queue = reply.body_as_QueueCreated(); queue != nullptr) {
    (void)channel_->send(writer.finish(id, wire::CreateQueueDestroy(writer.fbb(), queue->queue())),
                         {});
  }
}

Result<SharedArena> Connection::create_arena(uint64_t size_bytes) {
  KVM_TRY_ASSIGN(Reply reply, call([&](ipc::ControlWriter* writer, uint64_t id) {
                   return writer->finish(id, wire::CreateArenaCreate(writer->fbb(), size_bytes));
                 }));
  const wire::ArenaCreated* created = reply.root->body_as_ArenaCreated();
  if (created == nullptr || created->region() == 0 || created->size() < size_bytes ||
      reply.message.fds.size() != 1) {
    return fail(unexpected_reply("ArenaCreate"));
  }
  auto mapping =
      ipc::map_shared_memory(reply.message.fds[0], created->size(), ipc::PeerAccess::kReadWrite);
  if (!mapping.is_ok()) {
    const std::lock_guard lock(mutex_);
    give_back(*reply.root);
    return fail(mapping.status());
  }
  return SharedArena{created->region(), std::move(mapping).value()};
}

template <typename Write>
void Connection::destroy(const Write& write, const char* what, uint64_t within_ns) noexcept {
  try {
    note_failure(call(write, within_ns).status(), what);
  } catch (const std::bad_alloc&) {
    note_no_memory();
  }
}

void Connection::destroy_arena(uint32_t region, uint64_t within_ns) noexcept {
  destroy(
      [region](ipc::ControlWriter* writer, uint64_t id) {
        return writer->finish(id, wire::CreateArenaDestroy(writer->fbb(), region));
      },
      "an arena", within_ns);
}

Result<DeviceMemoryGiven> Connection::open_device(const DeviceMemoryAsked& asked) {
  KVM_TRY(need_minor(13, "device memory of kvmd"));
  KVM_TRY_ASSIGN(Reply reply, call([&](ipc::ControlWriter* writer, uint64_t id) {
                   const auto uuid =
                       writer->fbb().CreateVector(asked.uuid.data(), asked.uuid.size());
                   return writer->finish(
                       id, wire::CreateDeviceOpen(writer->fbb(), asked.ordinal, asked.pool_bytes,
                                                  asked.host_bytes, asked.store_version, uuid));
                 }));
  if (reply.root->body_as_DeviceOpened() == nullptr || reply.message.fds.size() != 2) {
    return fail(unexpected_reply("DeviceOpen"));
  }
  auto words =
      ipc::map_shared_memory(reply.message.fds[1], asked.words_bytes, ipc::PeerAccess::kReadWrite);
  if (!words.is_ok()) {
    return fail(words.status());
  }
  return DeviceMemoryGiven{std::move(reply.message.fds[0]), std::move(words).value()};
}

Result<QueueMemory> Connection::create_queue(uint32_t n_entries) {
  KVM_TRY_ASSIGN(Reply reply, call([&](ipc::ControlWriter* writer, uint64_t id) {
                   return writer->finish(id, wire::CreateQueueCreate(writer->fbb(), n_entries));
                 }));
  const wire::QueueCreated* created = reply.root->body_as_QueueCreated();
  auto& fds = reply.message.fds;
  if (created == nullptr || fds.size() != (created->has_eventfd() ? 3u : 2u)) {
    return fail(unexpected_reply("QueueCreate"));
  }
  QueueMemory memory;
  memory.queue = created->queue();
  auto client_region =
      ipc::map_shared_memory(fds[0], sizeof(ipc::ClientRegion), ipc::PeerAccess::kReadWrite);
  auto daemon_region =
      ipc::map_shared_memory(fds[1], sizeof(ipc::DaemonRegion), ipc::PeerAccess::kReadOnly);
  if (!client_region.is_ok() || !daemon_region.is_ok()) {
    const std::lock_guard lock(mutex_);
    give_back(*reply.root);
    return fail(client_region.is_ok() ? daemon_region.status() : client_region.status());
  }
  memory.client_region = std::move(client_region).value();
  memory.daemon_region = std::move(daemon_region).value();
  if (created->has_eventfd()) {
    memory.eventfd = std::move(fds[2]);
  }
  return memory;
}

void Connection::destroy_queue(uint32_t queue, uint64_t within_ns) noexcept {
  destroy(
      [queue](ipc::ControlWriter* writer, uint64_t id) {
        return writer->finish(id, wire::CreateQueueDestroy(writer->fbb(), queue));
      },
      "a queue", within_ns);
}

Status Connection::need_minor(uint32_t minor, const char* what) const {
  if (info_.protocol_minor >= minor) {
    return Status::ok();
  }
  return Status(KVM_ERR_UNSUPPORTED, std::string(what) + " needs a kvmd that speaks protocol 1." +
                                         std::to_string(minor) + "; this one (" +
                                         info_.server_version + ") speaks 1." +
                                         std::to_string(info_.protocol_minor));
}

}  // namespace kvm::client
