// SPDX-License-Identifier: Apache-2.0
#include "daemon/control.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/counted.h"
#include "base/kill_point.h"
#include "base/limits.h"
#include "daemon/admin.h"
#include "daemon/admin_messages.h"
#include "daemon/reply.h"
#include "daemon/requests.h"
#include "daemon/stats_text.h"
#include "engine/run/engine_disk.h"
#include "ipc/control.h"
#include "ipc/doorbell.h"
#include "ipc/space_message.h"

namespace kvm::daemon {
namespace {

namespace wire = ipc::wire;

constexpr uint64_t kOsPageBytes = 4096;

Status no_memory() {
  return Status::fixed(KVM_ERR_NO_MEMORY, "the machine refused memory to kvmd");
}

// Printable ASCII only: the name goes to logs and terminals.
std::string printable_name(const flatbuffers::String* text) {
  std::string name = text == nullptr ? std::string() : text->str().substr(0, kMaxNameBytes);
  for (char& c : name) {
    c = c >= ' ' && c <= '~' ? c : '?';
  }
  return name.empty() ? "unnamed" : name;
}

// Returns what an application may have at most, where its account may allow less.
uint32_t own_limit(const Session& session, engine::Resource resource, uint32_t limit) {
  return static_cast<uint32_t>(std::min<uint64_t>(session.account->limit(resource), limit));
}

engine::ClientSpec spec_of(const Session& session) {
  using engine::Resource;
  const Limits& limits = session.service()->limits;
  engine::ClientSpec spec{.uid = static_cast<uint32_t>(session.peer().uid),
                          .pid = static_cast<uint32_t>(session.peer().pid),
                          .name = session.name,
                          .limits = {},
                          .beside = {}};
  spec.limits[Resource::kQueues] = limits.max_queues;
  spec.limits[Resource::kArenas] = limits.max_arenas;
  spec.beside[Resource::kQueues] = ipc::own_queues();
  spec.beside[Resource::kArenas] = ipc::own_arenas(limits.max_queues);
  spec.limits[Resource::kArenaBytes] = limits.arena_quota_bytes;
  spec.limits[Resource::kRequests] = limits.max_requests;
  return spec;
}

kvm_client_info info_for(const Session& session) {
  const Service& service = *session.service();
  const engine::EngineOptions& options = service.engine->options();
  kvm_client_info info{};
  info.struct_size = sizeof(info);
  info.protocol_major = ipc::kProtocolMajor;
  info.protocol_minor = ipc::kProtocolMinor;
  info.features |= service.notifier != nullptr ? KVM_FEATURE_EVENTFD : 0;
  info.features |= service.devices != nullptr ? KVM_FEATURE_DEVICE : 0;
  info.epoch = service.epoch;
  info.client_id = session.client;
  info.server_pid = static_cast<uint32_t>(::getpid());
  info.n_threads = service.engine->n_threads();
  info.max_queues = own_limit(session, engine::Resource::kQueues, service.limits.max_queues);
  info.max_arenas = own_limit(session, engine::Resource::kArenas, service.limits.max_arenas);
  info.max_outstanding = kMaxOutstanding;
  info.max_items = kMaxItems;
  info.max_query_rows = kMaxQueryRows;
  info.max_spaces = options.max_spaces;
  info.max_arena_bytes = service.limits.max_arena_bytes;
  info.max_sequences = session.account->limit(engine::Resource::kSequences);
  info.host_capacity_bytes = options.host_capacity_bytes;
  info.quota_bytes =
      std::min(session.account->limit(engine::Resource::kBytes), options.host_capacity_bytes);
  std::strncpy(info.isa, service.engine->isa(), sizeof(info.isa) - 1);
  const std::string version =
      fmt::format("{}.{}.{}", KVM_VERSION_MAJOR, KVM_VERSION_MINOR, KVM_VERSION_PATCH);
  std::strncpy(info.server_version, version.c_str(), sizeof(info.server_version) - 1);
  return info;
}

// A refusal before the welcome: said, then closed.
void refuse(Session* session, uint64_t id, const Status& status) {
  reply_error(session, id, status);
  session->doom(status.message());
}

void handle_hello(Session* session, uint64_t id, const wire::Hello& hello) {
  KVM_KILL_POINT("daemon/hello_read");
  Service* service = session->service();
  if (hello.magic() != ipc::kHelloMagic) {
    const Status status(KVM_ERR_PROTOCOL,
                        fmt::format("Hello.magic is {:#x}; a client of kvmd sends {:#x}",
                                    hello.magic(), ipc::kHelloMagic));
    reply_error(session, id, status);
    session->doom_for_violation(status.message());
    return;
  }
  if (hello.protocol_major_min() > ipc::kProtocolMajor ||
      hello.protocol_major_max() < ipc::kProtocolMajor) {
    refuse(session, id,
           Status(KVM_ERR_VERSION,
                  fmt::format("the client speaks protocols {} to {}, this kvmd speaks {}",
                              hello.protocol_major_min(), hello.protocol_major_max(),
                              ipc::kProtocolMajor)));
    return;
  }
  if (service->n_clients >= service->limits.max_clients) {
    refuse(session, id,
           Status(KVM_ERR_LIMIT,
                  fmt::format("{} connected; max_clients is {}",
                              counted(service->n_clients, "client"), service->limits.max_clients)));
    return;
  }
  Result<ipc::Fd> doorbell = ipc::make_doorbell();
  ipc::Fd copy(doorbell.is_ok() ? ::dup(doorbell.value().get()) : -1);
  if (!copy.is_open() || !ipc::watch_doorbell(service->epoll, doorbell.value(),
                                              event_token(EventKind::kDoorbell, session->id()))
                              .is_ok()) {
    refuse(session, id, Status(KVM_ERR_LIMIT, "kvmd has no file descriptors left"));
    return;
  }
  std::vector<ipc::Fd> fds;
  fds.push_back(std::move(copy));
  session->doorbell = std::move(doorbell).value();
  session->name = printable_name(hello.client_name());
  session->client = service->engine->add_client(spec_of(*session));
  session->account = service->engine->quotas().find(session->client);
  session->welcomed = true;
  ++service->n_clients;
  ++service->n_clients_total;
  const kvm_client_info info = info_for(*session);
  ipc::ControlWriter& writer = short_writer(session);
  const auto bytes = writer.fbb().CreateVector(ipc::as_bytes(&info, 1).data(), sizeof(info));
  session->send(writer.finish(id, wire::CreateWelcome(writer.fbb(), ipc::kProtocolMajor,
                                                      ipc::kProtocolMinor, service->epoch, bytes)),
                std::move(fds));
  KVM_KILL_POINT("daemon/welcomed");
}

// --- Queues -------------------------------------------------------------------------------------

struct QueueMemory {
  ipc::SharedMemory client;
  ipc::SharedMemory daemon;
  ipc::Fd eventfd;       // open where eventfds are offered
  ipc::Fd eventfd_copy;  // for the client
};

Result<QueueMemory> make_queue_memory(bool has_eventfd) {
  QueueMemory memory;
  KVM_TRY_ASSIGN(memory.client,
                 ipc::create_shared_memory("kvm-queue-client", sizeof(ipc::ClientRegion),
                                           ipc::PeerAccess::kReadWrite));
  KVM_TRY_ASSIGN(memory.daemon,
                 ipc::create_shared_memory("kvm-queue-daemon", sizeof(ipc::DaemonRegion),
                                           ipc::PeerAccess::kReadOnly));
  if (has_eventfd) {
    memory.eventfd = ipc::Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    memory.eventfd_copy = ipc::Fd(::dup(memory.eventfd.get()));
    if (!memory.eventfd_copy.is_open()) {
      return Status(KVM_ERR_LIMIT, "kvmd has no file descriptors left");
    }
  }
  return memory;
}

void handle_queue_create(Session* session, uint64_t id, const wire::QueueCreate& message) {
  Service* service = session->service();
  if (message.n_entries() > kMaxOutstanding) {
    reply_error(session, id,
                Status(KVM_ERR_INVALID, fmt::format("n_entries is {}; at most {}",
                                                    message.n_entries(), kMaxOutstanding)));
    return;
  }
  if (const Status room = session->account->check(engine::Resource::kQueues, 1, "a new queue");
      !room.is_ok()) {
    reply_error(session, id, room);
    return;
  }
  const bool has_eventfd = service->notifier != nullptr;
  Result<QueueMemory> made = make_queue_memory(has_eventfd);
  if (!made.is_ok()) {
    reply_error(session, id, made.status());
    return;
  }
  QueueMemory& memory = made.value();
  // Everything that needs memory comes before anything is changed.
  session->queues.reserve(session->queues.size() + 1);
  service->dirty.reserve(service->n_queues + 1);
  const uint32_t queue_id = ++session->last_queue_id;
  std::vector<ipc::Fd> fds;
  fds.reserve(ipc::kMaxFdsPerMessage);
  fds.push_back(std::move(memory.client.fd));
  fds.push_back(std::move(memory.daemon.fd));
  if (has_eventfd) {
    fds.push_back(std::move(memory.eventfd_copy));
  }
  session->queues.push_back(
      std::make_unique<ServedQueue>(session, queue_id, std::move(memory.client.mapping),
                                    std::move(memory.daemon.mapping), std::move(memory.eventfd)));
  ++service->n_queues;
  session->account->charge(engine::Resource::kQueues, 1);
  ipc::ControlWriter& writer = short_writer(session);
  KVM_KILL_POINT("daemon/queue_made");
  session->send(writer.finish(id, wire::CreateQueueCreated(writer.fbb(), queue_id, has_eventfd)),
                std::move(fds));
}

void handle_queue_destroy(Session* session, uint64_t id, const wire::QueueDestroy& message) {
  ServedQueue* queue = session->find_queue(message.queue());
  if (queue == nullptr || queue->closing) {
    reply_error(session, id,
                Status(KVM_ERR_NOT_FOUND, fmt::format("there is no queue {}", message.queue())));
    return;
  }
  queue->closing = true;
  queue->close_message_id = id;
  cancel_all(session, queue);
}

// --- Arenas -------------------------------------------------------------------------------------

Status check_arena(Session* session, uint64_t size_bytes) {
  const Service& service = *session->service();
  const Limits& limits = service.limits;
  if (size_bytes == 0 || size_bytes > limits.max_arena_bytes) {
    return Status(size_bytes == 0 ? KVM_ERR_INVALID : KVM_ERR_LIMIT,
                  fmt::format("an arena of {} bytes; allowed are 1 to {} (max_arena)", size_bytes,
                              limits.max_arena_bytes));
  }
  KVM_TRY(session->account->check(engine::Resource::kArenas, 1, "a new arena"));
  KVM_TRY(session->account->check(engine::Resource::kArenaBytes, size_bytes, "a new arena"));
  const uint64_t held = service.arena_bytes;
  if (size_bytes > limits.arena_capacity_bytes || held > limits.arena_capacity_bytes - size_bytes) {
    return Status(KVM_ERR_QUOTA,
                  fmt::format("an arena of {} bytes beside {} bytes of arenas of all clients; "
                              "arena_capacity is {}",
                              size_bytes, held, limits.arena_capacity_bytes));
  }
  return Status::ok();
}

// On the allocator's thread: makes the one arena of the list, or notes why not.
void make_arena(Service* service, FinishedArenas* asked) {
  FinishedArena& arena = asked->front();
  try {
    arena.memory =
        ipc::create_shared_memory("kvm-arena", arena.size_bytes, ipc::PeerAccess::kReadWrite);
  } catch (const std::bad_alloc&) {
    arena.memory = no_memory();
  }
  {
    const std::lock_guard lock(service->finished_mutex);
    service->finished.splice(service->finished.end(), *asked);
    // SYNC: release: the dispatcher that sees it takes the lock.
    service->has_finished.store(true, std::memory_order_release);
  }
  service->wake.wake();
}

void handle_arena_create(Session* session, uint64_t id, const wire::ArenaCreate& message) {
  Service* service = session->service();
  // A size near 2^64 must not wrap to a small one.
  const uint64_t size_bytes = message.size() > ipc::kMaxArenaBytes
                                  ? message.size()
                                  : (message.size() + kOsPageBytes - 1) & ~(kOsPageBytes - 1);
  if (const Status status = check_arena(session, size_bytes); !status.is_ok()) {
    reply_error(session, id, status);
    return;
  }
  KVM_KILL_POINT("daemon/arena_asked");
  auto arena = std::make_shared<FinishedArenas>();
  arena->push_back({session->id(), id, size_bytes, no_memory()});
  // Before it is asked for: it may be there, and given up, before this thread comes to charge it.
  session->account->charge(engine::Resource::kArenas, 1);
  session->account->charge(engine::Resource::kArenaBytes, size_bytes);
  service->arena_bytes += size_bytes;
  try {
    service->allocator.post([service, arena] { make_arena(service, arena.get()); });
  } catch (const std::bad_alloc&) {
    finish_arena(service, session, std::move(arena->front()));
  }
}

void handle_arena_destroy(Session* session, uint64_t id, const wire::ArenaDestroy& message) {
  reply_status_or_done(
      session, id,
      session->regions.remove(message.region())
          ? Status::ok()
          : Status(KVM_ERR_NOT_FOUND, fmt::format("there is no arena {}", message.region())));
}

// --- Spaces and sequences -----------------------------------------------------------------------

void reply_space_id(Session* session, uint64_t id, const Result<kvm_space_id>& space) {
  if (!space.is_ok()) {
    reply_error(session, id, space.status());
    return;
  }
  ipc::ControlWriter& writer = short_writer(session);
  session->send(writer.finish(id, wire::CreateSpaceId(writer.fbb(), space.value())));
}

void handle_space_register(Session* session, uint64_t id, const wire::SpaceRegister& message) {
  session->note_engine();
  const Result<SpaceSpec> space = ipc::decode_space(message);
  if (!space.is_ok()) {
    reply_error(session, id, space.status());
    return;
  }
  Result<kvm_space_id> made =
      session->service()->engine->register_space(space.value(), session->peer().uid);
  KVM_KILL_POINT("daemon/space_registered");
  reply_space_id(session, id, std::move(made));
}

void handle_seq_list(Session* session, uint64_t id, const wire::SeqList& message) {
  if ((message.flags() & ~uint32_t{KVM_LIST_ALL_CLIENTS}) != 0) {
    reply_error(session, id,
                Status(KVM_ERR_INVALID, fmt::format("flags are {:#x}; known is {:#x}",
                                                    message.flags(), KVM_LIST_ALL_CLIENTS + 0)));
    return;
  }
  const bool all_clients = (message.flags() & KVM_LIST_ALL_CLIENTS) != 0;
  if (all_clients) {
    const Status status = check_administrator(*session, "list the sequences of all clients");
    if (!status.is_ok()) {
      reply_error(session, id, status);
      return;
    }
  }
  engine::SeqPage page = session->service()->engine->list_seqs(
      session->client, message.space(), all_clients, message.begin(), kMaxListed<kvm_seq_info>);
  reply_list(session, id, std::move(page.infos), page.has_more);
}

kvm_snapshot_info snapshot_info(const engine::SnapshotInfo& from) {
  kvm_snapshot_info info{};
  info.struct_size = sizeof(info);
  info.flags = from.is_lost ? KVM_SNAPSHOT_LOST + 0u : 0u;
  info.uid = from.name.uid;
  from.name.name.copy(info.name, sizeof(info.name) - 1);
  from.space_name.copy(info.space_name, sizeof(info.space_name) - 1);
  std::copy(from.layout_digest.begin(), from.layout_digest.end(), info.layout);
  std::copy(from.policy_digest.begin(), from.policy_digest.end(), info.policy);
  std::copy(from.fingerprint.begin(), from.fingerprint.end(), info.fingerprint);
  info.n_tokens = from.n_tokens;
  info.bytes = from.bytes;
  info.saved_ns = from.saved_ns;
  return info;
}

void handle_prefix_table(Session* session, uint64_t id) {
  Service* service = session->service();
  const uint32_t uid = session->peer().uid;
  if (service->prefix_memory == nullptr) {
    reply_error(session, id, Status::fixed(KVM_ERR_UNSUPPORTED, "this service shares no prefixes"));
    return;
  }
  const Result<std::span<const std::byte>> table = service->engine->prefix_table(uid);
  if (!table.is_ok()) {
    reply_error(session, id, table.status());
    return;
  }
  Result<ipc::Fd> fd = service->prefix_memory->share(uid);
  if (!fd.is_ok()) {
    reply_error(session, id, fd.status());
    return;
  }
  std::vector<ipc::Fd> fds;
  fds.push_back(std::move(fd).value());
  ipc::ControlWriter& writer = short_writer(session);
  session->send(writer.finish(id, wire::CreatePrefixTableGiven(writer.fbb(), table.value().size())),
                std::move(fds));
}

void handle_prefix_weigh(Session* session, uint64_t id, const wire::PrefixWeigh& message) {
  if (!std::isfinite(message.prefill_rate()) || message.prefill_rate() <= 0 ||
      message.n_tokens() > kMaxTokens) {
    reply_error(session, id,
                Status(KVM_ERR_INVALID,
                       fmt::format("{} tokens are weighed at {} a second; at most {} are allowed, "
                                   "at a rate above 0",
                                   message.n_tokens(), message.prefill_rate(), kMaxTokens)));
    return;
  }
  const Result<PrefixWeight> weight = session->service()->engine->weigh_prefix(
      session->client, message.seq(), message.n_tokens(), message.prefill_rate());
  if (!weight.is_ok()) {
    reply_error(session, id, weight.status());
    return;
  }
  ipc::ControlWriter& writer = short_writer(session);
  session->send(writer.finish(id, wire::CreatePrefixWeighed(writer.fbb(), weight.value().is_faster,
                                                            weight.value().read_ns)));
}

void handle_snapshot_list(Session* session, uint64_t id, const wire::SnapshotList& message) {
  const bool all_users = (message.flags() & KVM_LIST_ALL_CLIENTS) != 0;
  Status status;
  if ((message.flags() & ~uint32_t{KVM_LIST_ALL_CLIENTS}) != 0) {
    status = Status(KVM_ERR_INVALID, fmt::format("flags are {:#x}; known is {:#x}", message.flags(),
                                                 KVM_LIST_ALL_CLIENTS + 0));
  } else if (all_users) {
    status = check_administrator(*session, "list the snapshots of all users");
  }
  if (status.is_ok() && !session->service()->engine->keeps_snapshots()) {
    status = Status::fixed(KVM_ERR_UNSUPPORTED, engine::kNoDisk);
  }
  if (!status.is_ok()) {
    reply_error(session, id, status);
    return;
  }
  const uint32_t uid = all_users ? engine::kEverybody : session->peer().uid;
  engine::SnapshotName after;
  if (message.name() != nullptr && message.name()->size() != 0) {
    after = {message.uid(), message.name()->str()};
  }
  std::vector<engine::SnapshotInfo> found =
      session->service()->engine->list_snapshots(uid, after, kMaxListed<kvm_snapshot_info> + 1);
  const bool has_more = found.size() > kMaxListed<kvm_snapshot_info>;
  std::vector<kvm_snapshot_info> infos;
  for (size_t i = 0; i < found.size() - (has_more ? 1 : 0); ++i) {
    infos.push_back(snapshot_info(found[i]));
  }
  reply_list(session, id, std::move(infos), has_more);
}

// Opening it, which may take long, is for its own thread: the client hears of it on the channel.
void handle_device_open(Session* session, uint64_t id, const wire::DeviceOpen& message) {
  session->note_engine();
  DeviceMemory* const devices = session->service()->devices;
  const auto refuse = [session, id](kvm_status code, std::string why) {
    reply_error(session, id, Status(code, std::move(why)));
  };
  if (devices == nullptr) {
    return refuse(KVM_ERR_UNSUPPORTED, "kvmd owns no device memory: its option device.pool is 0");
  }
  if (message.store_version() != device::wire::kStoreVersion) {
    return refuse(KVM_ERR_VERSION,
                  fmt::format("the client keeps device memory by version {} of its protocol, this "
                              "kvmd by version {}",
                              message.store_version(), device::wire::kStoreVersion));
  }
  if (session->device != nullptr) {
    return refuse(KVM_ERR_EXISTS, "this connection has device memory already");
  }
  DeviceMemory::Asked asked;
  if (message.uuid() == nullptr || message.uuid()->size() != asked.uuid.size()) {
    return refuse(KVM_ERR_INVALID, "DeviceOpen has no uuid of 16 bytes");
  }
  std::copy(message.uuid()->begin(), message.uuid()->end(), asked.uuid.begin());
  asked.ordinal = message.ordinal();
  asked.pool_bytes = message.pool_bytes();
  asked.host_bytes = message.host_bytes();
  std::vector<ipc::Fd> fds;
  fds.reserve(2);
  Result<DeviceMemory::Admitted> admitted =
      devices->admit(asked, fmt::format("client {:#x} '{}'", session->client, session->name));
  if (!admitted.is_ok()) {
    reply_error(session, id, admitted.status());
    return;
  }
  session->device = std::move(admitted.value().tenant);
  fds.push_back(std::move(admitted.value().channel));
  fds.push_back(std::move(admitted.value().words));
  ipc::ControlWriter& writer = short_writer(session);
  KVM_KILL_POINT("device/admitted");
  session->send(
      writer.finish(id, wire::CreateDeviceOpened(writer.fbb(), admitted.value().pool_bytes)),
      std::move(fds));
}

bool may_see(const Session& session, const kvm_space_info& space) {
  return space.uid == session.peer().uid || is_administrator(session);
}

// Fails: as kvm_space_get_info.
Result<kvm_space_info> visible_space(const Session& session, kvm_space_id id) {
  KVM_TRY_ASSIGN(const kvm_space_info info, session.service()->engine->space_info(id));
  if (!may_see(session, info)) {
    return Status(KVM_ERR_PERMISSION,
                  fmt::format("space {:#x} is one of user {}; user {} may not see it", id, info.uid,
                              session.peer().uid));
  }
  return info;
}

Status drop_space(const Session& session, kvm_space_id id) {
  KVM_TRY(visible_space(session, id).status());
  return session.service()->engine->drop_space(id);
}

void handle_space_list(Session* session, uint64_t id, const wire::SpaceList& message) {
  std::vector<kvm_space_info> spaces = session->service()->engine->list_spaces();
  std::erase_if(spaces, [&](const kvm_space_info& info) {
    return info.space < message.begin() || !may_see(*session, info);
  });
  const bool has_more = spaces.size() > kMaxListed<kvm_space_info>;
  spaces.resize(std::min(spaces.size(), kMaxListed<kvm_space_info>));
  reply_list(session, id, std::move(spaces), has_more);
}

void handle_stats_text(Session* session, uint64_t id, uint64_t begin) {
  // The pages of one text must fit together, so they are cut from one copy.
  if (begin == 0) {
    session->stats_text = stats_text(take_snapshot(*session->service()));
  }
  reply_text(session, id, session->stats_text, begin);
}

std::string string_of(const flatbuffers::String* text) {
  return text == nullptr ? std::string() : text->str();
}

void handle_welcomed(Session* session, const wire::Message& message) {
  engine::Engine* engine = session->service()->engine;
  const uint64_t id = message.id();
  switch (message.body_type()) {
    case wire::Body::QueueCreate:
      return handle_queue_create(session, id, *message.body_as_QueueCreate());
    case wire::Body::QueueDestroy:
      return handle_queue_destroy(session, id, *message.body_as_QueueDestroy());
    case wire::Body::ArenaCreate:
      return handle_arena_create(session, id, *message.body_as_ArenaCreate());
    case wire::Body::ArenaDestroy:
      return handle_arena_destroy(session, id, *message.body_as_ArenaDestroy());
    case wire::Body::SpaceRegister:
      return handle_space_register(session, id, *message.body_as_SpaceRegister());
    case wire::Body::SpaceFind:
      return reply_space_id(
          session, id,
          engine->find_space(string_of(message.body_as_SpaceFind()->name()), session->peer().uid));
    case wire::Body::SpaceInfo:
      return reply_struct(session, id,
                          visible_space(*session, message.body_as_SpaceInfo()->space()));
    case wire::Body::SpaceList:
      return handle_space_list(session, id, *message.body_as_SpaceList());
    case wire::Body::SpaceDrop:
      return reply_status_or_done(session, id,
                                  drop_space(*session, message.body_as_SpaceDrop()->space()));
    case wire::Body::SeqInfo:
      return reply_struct(session, id,
                          engine->seq_info(session->client, message.body_as_SeqInfo()->seq()));
    case wire::Body::SeqList:
      return handle_seq_list(session, id, *message.body_as_SeqList());
    case wire::Body::SnapshotList:
      return handle_snapshot_list(session, id, *message.body_as_SnapshotList());
    case wire::Body::PrefixTable:
      return handle_prefix_table(session, id);
    case wire::Body::PrefixWeigh:
      return handle_prefix_weigh(session, id, *message.body_as_PrefixWeigh());
    case wire::Body::DeviceOpen:
      return handle_device_open(session, id, *message.body_as_DeviceOpen());
    case wire::Body::Stats:
      return reply_struct(session, id, Result<kvm_stats>(service_stats(*session->service())));
    case wire::Body::StatsText:
      return handle_stats_text(session, id, message.body_as_StatsText()->begin());
    case wire::Body::ConfigText:
    case wire::Body::Evict:
    case wire::Body::ClientList:
    case wire::Body::UserList:
    case wire::Body::QuotaSet:
      return handle_admin(session, message);
    default:
      session->doom_for_violation(fmt::format("a control message with body {} from a client",
                                              static_cast<uint32_t>(message.body_type())));
  }
}

}  // namespace

void handle_message(Session* session, std::span<const uint8_t> bytes) {
  const Result<const wire::Message*> message = ipc::read_message(bytes);
  if (!message.is_ok()) {
    session->doom_for_violation(message.status().message());
    return;
  }
  const wire::Hello* hello = message.value()->body_as_Hello();
  if (session->welcomed == (hello != nullptr)) {
    session->doom_for_violation(hello != nullptr ? "a second Hello" : "no Hello before the rest");
    return;
  }
  // One client's message must not take the others down with it, whatever a library throws.
  try {
    hello != nullptr ? handle_hello(session, message.value()->id(), *hello)
                     : handle_welcomed(session, *message.value());
  } catch (const std::bad_alloc&) {
    // Nothing of it has happened: who changes anything needs no memory after that.
    reply_error(session, message.value()->id(), no_memory());
  } catch (const std::exception& error) {
    session->doom(error.what());
  }
}

namespace {

// An arena that its client does not get.
void give_up_arena(Service* service, Session* session, FinishedArena* arena) {
  if (session != nullptr) {
    session->give_back(engine::Resource::kArenas, 1);
    session->give_back(engine::Resource::kArenaBytes, arena->size_bytes);
  }
  if (arena->memory.is_ok()) {
    discard_on_reaper(service, std::move(arena->memory.value().mapping));
  } else {
    service->arena_bytes -= arena->size_bytes;
  }
}

}  // namespace

void finish_arena(Service* service, Session* session, FinishedArena arena) {
  if (session == nullptr || session->is_doomed()) {
    give_up_arena(service, session, &arena);
    return;
  }
  if (!arena.memory.is_ok()) {
    reply_error(session, arena.message_id, arena.memory.status());
    give_up_arena(service, session, &arena);
    return;
  }
  ipc::SharedMemory& memory = arena.memory.value();
  std::vector<ipc::Fd> fds;
  uint32_t region = 0;
  try {
    fds.reserve(1);
    region = session->regions.add(std::move(memory.mapping));
  } catch (const std::bad_alloc&) {
    reply_error(session, arena.message_id, no_memory());
    give_up_arena(service, session, &arena);
    return;
  }
  fds.push_back(std::move(memory.fd));
  KVM_KILL_POINT("daemon/arena_made");
  ipc::ControlWriter& writer = short_writer(session);
  session->send(writer.finish(arena.message_id,
                              wire::CreateArenaCreated(writer.fbb(), region, arena.size_bytes)),
                std::move(fds));
}

void finish_queue_destroy(Session* session, uint64_t message_id) {
  reply_done(session, message_id);
}

}  // namespace kvm::daemon
