// SPDX-License-Identifier: Apache-2.0
#include "client/thin_client.h"

#include <sys/mman.h>
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/undo.h"
#include "ipc/struct_size.h"
#include "ipc/wire.h"

namespace kvm::client {

namespace {

namespace wire = ipc::wire;

constexpr uint32_t kOwnQueueEntries = 16;
constexpr uint64_t kOwnQueueSpinNs = 50'000;

Status unexpected_reply() {
  return Status(KVM_ERR_PROTOCOL, "the daemon's reply is not what the protocol says");
}

// The structures of one Bytes reply. Each has the size that its struct_size says; all the same.
template <typename T>
Result<std::vector<T>> unpack(const wire::Bytes& bytes, const char* name) {
  std::vector<T> out;
  const auto* data = bytes.data();
  const size_t size = data == nullptr ? 0 : data->size();
  uint32_t stride = 0;
  if (size >= sizeof(stride)) {
    std::memcpy(&stride, data->data(), sizeof(stride));
  }
  if (size == 0) {
    return out;
  }
  if (stride < sizeof(stride) || stride > ipc::kMaxStructSize || size % stride != 0) {
    return unexpected_reply();
  }
  for (size_t at = 0; at < size; at += stride) {
    T value;
    // Fields of a newer daemon beyond this library's structure are left out.
    KVM_TRY(ipc::read_struct(data->data() + at, std::min<size_t>(stride, sizeof(T)), &value, name));
    out.push_back(value);
  }
  return out;
}

}  // namespace

Result<std::shared_ptr<Client>> connect_client(const ConnectOptions& options) {
  return ThinClient::open(options);
}

Result<std::shared_ptr<Client>> ThinClient::open(const ConnectOptions& options) {
  std::shared_ptr<ThinClient> client(new ThinClient(options));
  KVM_TRY_ASSIGN(client->connection_, Connection::open(options));
  return std::shared_ptr<Client>(std::move(client));
}

std::shared_ptr<Connection> ThinClient::connection() const {
  const std::lock_guard lock(connection_mutex_);
  return connection_;
}

void ThinClient::close() {
  connection()->close();
  const std::lock_guard lock(own_queue_mutex_);
  own_queue_.reset();
  late_makers_.clear();
  unwanted_seqs_.clear();
}

bool ThinClient::is_closed() const { return connection()->is_down(); }

Status ThinClient::reconnect() {
  if (!connection()->look_for_hangup()) {
    return Status::ok();
  }
  if (n_handles.load() != 0) {
    return Status(KVM_ERR_BUSY, std::to_string(n_handles.load()) +
                                    " queues and arenas of the old connection exist; destroy them "
                                    "first");
  }
  close();
  KVM_TRY_ASSIGN(std::shared_ptr<Connection> fresh, Connection::open(options_));
  {
    const std::lock_guard lock(own_queue_mutex_);
    auto lost = std::make_shared<std::unordered_set<kvm_seq_id>>(connection()->seqs().take());
    if (lost_ != nullptr) {
      lost->insert(lost_->begin(), lost_->end());
    }
    lost_ = std::move(lost);
  }
  const std::lock_guard lock(connection_mutex_);
  connection_ = std::move(fresh);
  return Status::ok();
}

kvm_client_info ThinClient::info() const { return connection()->info(); }

Result<ThinQueue*> ThinClient::own_queue() {
  if (own_queue_ == nullptr) {
    KVM_TRY_ASSIGN(own_queue_,
                   ThinQueue::create(connection(), lost_, kOwnQueueEntries, kOwnQueueSpinNs));
  }
  return own_queue_.get();
}

template <typename Stage>
Result<kvm_seq_id> ThinClient::call_own_queue(bool makes, Stage stage) {
  const std::lock_guard lock(own_queue_mutex_);
  KVM_TRY_ASSIGN(ThinQueue * queue, own_queue());
  KVM_TRY(tidy_own_queue());
  const uint64_t number = ++last_own_number_;
  if (makes) {
    prepare_to_make(number);
  }
  KVM_TRY(stage(queue, number));
  KVM_TRY(queue->submit());
  KVM_TRY_ASSIGN(const kvm_completion completion, await_own_answer(number));
  if (makes) {
    late_makers_.erase(number);
  }
  if (completion.status != KVM_OK) {
    return Status(completion.status, completion.message);
  }
  return makes ? completion.seq : kvm_seq_id{0};
}

// Whatever fails from here on, the sequence that it may still make is not lost; and where nothing
// fails, noting it needs no memory.
void ThinClient::prepare_to_make(uint64_t number) {
  unwanted_seqs_.reserve(unwanted_seqs_.size() + late_makers_.size() + 1);
  late_makers_.insert(number);
}

// Its sentence is valid until the own queue is used again.
Result<kvm_completion> ThinClient::await_own_answer(uint64_t number) {
  const std::shared_ptr<Connection> current = connection();
  const uint64_t deadline_ns = add_saturating(now_ns(), current->timeout_ns());
  for (;;) {
    kvm_completion completion;
    KVM_TRY_ASSIGN(const uint32_t n,
                   own_queue_->take(&completion, 1, 1, time_left(deadline_ns), {}));
    if (n == 0) {
      return current->timeout_status();
    }
    if (completion.user_data == number) {
      return completion;
    }
    settle_late_answer(completion);
  }
}

// A sequence whose maker has given up waiting has no owner that knows it.
void ThinClient::settle_late_answer(const kvm_completion& completion) {
  if (late_makers_.erase(completion.user_data) != 0 && completion.status == KVM_OK) {
    unwanted_seqs_.push_back(completion.seq);
  }
}

// Takes late answers, and gives back what they made. Fails: TIMEOUT (the queue is full of calls
// that the daemon has not answered), DISCONNECTED.
Status ThinClient::tidy_own_queue() {
  kvm_completion completion;
  while (own_queue_->n_outstanding() > 0) {
    KVM_TRY_ASSIGN(const uint32_t n, own_queue_->take(&completion, 1, 0, 0, {}));
    if (n == 0) {
      break;
    }
    settle_late_answer(completion);
  }
  // A slot stays free, so that no answer is taken out of the ring but here.
  while (!unwanted_seqs_.empty() && own_queue_->n_outstanding() + 2 < kOwnQueueEntries) {
    SeqRequest call;
    call.verb = SeqVerb::kFree;
    call.seq = unwanted_seqs_.back();
    KVM_TRY(own_queue_->stage_seq(call, ++last_own_number_));
    KVM_TRY(own_queue_->submit());
    unwanted_seqs_.pop_back();
  }
  if (own_queue_->n_outstanding() + 1 >= kOwnQueueEntries) {
    return Status(KVM_ERR_TIMEOUT, "kvmd has not answered the last " +
                                       std::to_string(own_queue_->n_outstanding()) +
                                       " calls on sequences; no more are sent before it does");
  }
  return Status::ok();
}

Status ThinClient::ping() {
  return call_own_queue(false,
                        [](ThinQueue* queue, uint64_t number) { return queue->stage_nop(number); })
      .status();
}

Result<std::unique_ptr<Queue>> ThinClient::create_queue(uint32_t n_entries, uint64_t spin_ns) {
  LostSeqs lost;
  {
    const std::lock_guard lock(own_queue_mutex_);
    lost = lost_;
  }
  KVM_TRY_ASSIGN(std::unique_ptr<ThinQueue> queue,
                 ThinQueue::create(connection(), std::move(lost), n_entries, spin_ns));
  return std::unique_ptr<Queue>(std::move(queue));
}

Result<ArenaMemory> ThinClient::create_arena(uint64_t size_bytes) {
  const std::shared_ptr<Connection> current = connection();
  KVM_TRY_ASSIGN(SharedArena memory, current->create_arena(size_bytes));
  const ArenaMemory arena{memory.region, memory.mapping.data(), memory.mapping.size_bytes()};
  Undo destroying([&] { current->destroy_arena(arena.region); });
  const std::lock_guard lock(arenas_mutex_);
  own_arenas_.emplace(arena.data, OwnArena{current, std::move(memory)});
  destroying.dismiss();
  return arena;
}

void ThinClient::destroy_arena(const ArenaMemory& arena) {
  OwnArena own;
  {
    const std::lock_guard lock(arenas_mutex_);
    const auto it = own_arenas_.find(arena.data);
    if (it == own_arenas_.end()) {
      return;
    }
    own = std::move(it->second);
    own_arenas_.erase(it);
  }
  own.connection->destroy_arena(own.memory.region);
}

Result<kvm_space_id> ThinClient::call_for_space_id(const Connection::Encode& encode) {
  KVM_TRY_ASSIGN(const Connection::Reply reply, connection()->call(encode));
  const wire::SpaceId* body = reply.root->body_as_SpaceId();
  if (body == nullptr) {
    return unexpected_reply();
  }
  return kvm_space_id{body->space()};
}

Result<kvm_space_id> ThinClient::register_space(const SpaceSpec& space) {
  if (space.params.flags != 0) {
    KVM_TRY(connection()->need_minor(6, "kvm_space_params.flags"));
  }
  const auto shares = [](const kvm_policy_params& policy) { return policy.budgets != 0; };
  if (std::any_of(space.policies.begin(), space.policies.end(), shares)) {
    KVM_TRY(connection()->need_minor(7, "kvm_policy_params.budgets"));
  }
  if (!space.alibi_slopes.empty()) {  // which an older kvmd would leave out without a word
    KVM_TRY(connection()->need_minor(6, "kvm_space_params.alibi_slopes"));
  }
  return call_for_space_id([&](ipc::ControlWriter* writer, uint64_t id) {
    return writer->finish(id, ipc::encode_space(writer, space));
  });
}

Result<kvm_space_id> ThinClient::find_space(const std::string& name) {
  return call_for_space_id([&](ipc::ControlWriter* writer, uint64_t id) {
    const auto text = writer->fbb().CreateString(name);
    return writer->finish(id, wire::CreateSpaceFind(writer->fbb(), text));
  });
}

Status ThinClient::drop_space(kvm_space_id space) {
  auto reply = connection()->call([&](ipc::ControlWriter* writer, uint64_t id) {
    return writer->finish(id, wire::CreateSpaceDrop(writer->fbb(), space));
  });
  return reply.status();
}

template <typename T>
Result<T> ThinClient::call_for_struct(const Connection::Encode& encode, const char* name) {
  KVM_TRY_ASSIGN(const Connection::Reply reply, connection()->call(encode));
  const wire::Bytes* body = reply.root->body_as_Bytes();
  if (body == nullptr) {
    return unexpected_reply();
  }
  KVM_TRY_ASSIGN(const std::vector<T> all, unpack<T>(*body, name));
  if (all.size() != 1) {
    return unexpected_reply();
  }
  return all[0];
}

// Collects a list that may take several replies; `encode` gets the id to begin with.
template <typename T>
Result<std::vector<T>> ThinClient::call_for_list(
    const std::function<std::span<const uint8_t>(ipc::ControlWriter*, uint64_t, uint64_t)>& encode,
    uint64_t (*id_of)(const T&), const char* name) {
  std::vector<T> out;
  uint64_t begin = 0;
  for (;;) {
    KVM_TRY_ASSIGN(const Connection::Reply reply,
                   connection()->call([&](ipc::ControlWriter* writer, uint64_t id) {
                     return encode(writer, id, begin);
                   }));
    const wire::Bytes* body = reply.root->body_as_Bytes();
    if (body == nullptr) {
      return unexpected_reply();
    }
    KVM_TRY_ASSIGN(const std::vector<T> part, unpack<T>(*body, name));
    for (const T& item : part) {
      // Ascending, or it might go on for ever.
      if (id_of(item) < begin || id_of(item) == UINT64_MAX) {
        return unexpected_reply();
      }
      begin = id_of(item) + 1;
      out.push_back(item);
    }
    if (part.empty() || part.size() >= body->total()) {
      return out;
    }
  }
}

Result<kvm_space_info> ThinClient::space_info(kvm_space_id space) {
  return call_for_struct<kvm_space_info>(
      [&](ipc::ControlWriter* writer, uint64_t id) {
        return writer->finish(id, wire::CreateSpaceInfo(writer->fbb(), space));
      },
      "kvm_space_info");
}

Result<std::vector<kvm_space_info>> ThinClient::list_spaces() {
  return call_for_list<kvm_space_info>(
      [](ipc::ControlWriter* writer, uint64_t id, uint64_t begin) {
        return writer->finish(id, wire::CreateSpaceList(writer->fbb(), begin));
      },
      [](const kvm_space_info& info) { return uint64_t{info.space}; }, "kvm_space_info");
}

Result<kvm_seq_id> ThinClient::seq(const SeqRequest& call) {
  return call_own_queue(
      call.verb == SeqVerb::kCreate || call.verb == SeqVerb::kFork,
      [&](ThinQueue* queue, uint64_t number) { return queue->stage_seq(call, number); });
}

Result<std::shared_ptr<const ThinClient::Prefixes>> ThinClient::prefixes() {
  const std::shared_ptr<Connection> current = connection();
  if (current->is_down()) {
    return current->down_status();
  }
  const std::lock_guard lock(prefixes_mutex_);
  if (prefixes_ != nullptr && prefixes_->connection == current) {
    return prefixes_;
  }
  KVM_TRY(current->need_minor(9, "kvm_prefix_find"));
  KVM_TRY_ASSIGN(const Connection::Reply reply,
                 current->call([](ipc::ControlWriter* writer, uint64_t id) {
                   return writer->finish(id, wire::CreatePrefixTable(writer->fbb()));
                 }));
  const wire::PrefixTableGiven* given = reply.root->body_as_PrefixTableGiven();
  if (given == nullptr || reply.message.fds.size() != 1) {
    return unexpected_reply();
  }
  KVM_TRY_ASSIGN(ipc::Mapping mapping, ipc::map_shared_memory(reply.message.fds[0], given->size(),
                                                              ipc::PeerAccess::kReadOnly));
  // Else each page of it would be brought in by the first lookup that comes to it, at some
  // microseconds. Refused by old kernels.
  (void)::madvise(mapping.data(), mapping.size_bytes(), MADV_POPULATE_READ);
  const std::optional<PrefixTableReader> table = PrefixTableReader::over(
      std::as_bytes(std::span(mapping.data(), static_cast<size_t>(mapping.size_bytes()))));
  if (!table.has_value()) {
    return unexpected_reply();
  }
  prefixes_ = std::make_shared<const Prefixes>(current, std::move(mapping), *table);
  return prefixes_;
}

Result<PrefixPage> ThinClient::find_prefix(kvm_space_id space,
                                           std::span<const kvm_prefix_hash> hashes) {
  KVM_TRY_ASSIGN(const std::shared_ptr<const Prefixes> prefixes, this->prefixes());
  return prefixes->table.find(space, hashes);
}

Result<PrefixWeight> ThinClient::weigh_prefix(const PrefixPage& page, double prefill_rate) {
  const std::shared_ptr<Connection> current = connection();
  if (!current->need_minor(10, "kvm_prefix_find_params.prefill_rate").is_ok()) {
    return PrefixWeight();  // as kvm.h says of such a kvmd
  }
  KVM_TRY_ASSIGN(
      const Connection::Reply reply, current->call([&](ipc::ControlWriter* writer, uint64_t id) {
        return writer->finish(
            id, wire::CreatePrefixWeigh(writer->fbb(), page.seq,
                                        uint64_t{page.n_pages} * KVM_PREFIX_TOKENS, prefill_rate));
      }));
  const wire::PrefixWeighed* weighed = reply.root->body_as_PrefixWeighed();
  if (weighed == nullptr) {
    return unexpected_reply();
  }
  return PrefixWeight{.is_faster = weighed->is_faster(), .read_ns = weighed->read_ns()};
}

Result<kvm_seq_id> ThinClient::snapshot(const SnapshotRequest& call) {
  return call_own_queue(call.verb == SnapshotVerb::kLoad, [&](ThinQueue* queue, uint64_t number) {
    return queue->stage_snapshot(call, number);
  });
}

namespace {

bool is_before(const kvm_snapshot_info& a, const kvm_snapshot_info& b) {
  return a.uid != b.uid ? a.uid < b.uid : std::strcmp(a.name, b.name) < 0;
}

}  // namespace

Result<std::vector<kvm_snapshot_info>> ThinClient::list_snapshots(uint32_t flags) {
  KVM_TRY(connection()->need_minor(8, "kvm_snapshot_list"));
  std::vector<kvm_snapshot_info> all;
  for (;;) {
    KVM_TRY_ASSIGN(const Connection::Reply reply, connection()->call([&](ipc::ControlWriter* writer,
                                                                         uint64_t id) {
      const auto name = writer->fbb().CreateString(all.empty() ? "" : all.back().name);
      return writer->finish(id, wire::CreateSnapshotList(writer->fbb(), flags,
                                                         all.empty() ? 0 : all.back().uid, name));
    }));
    const wire::Bytes* body = reply.root->body_as_Bytes();
    if (body == nullptr) {
      return unexpected_reply();
    }
    KVM_TRY_ASSIGN(const std::vector<kvm_snapshot_info> part,
                   unpack<kvm_snapshot_info>(*body, "kvm_snapshot_info"));
    for (const kvm_snapshot_info& info : part) {
      // Ascending, or it might go on for ever.
      if (::strnlen(info.name, sizeof(info.name)) == sizeof(info.name) ||
          (!all.empty() && !is_before(all.back(), info))) {
        return unexpected_reply();
      }
      all.push_back(info);
    }
    if (part.empty() || part.size() >= body->total()) {
      return all;
    }
  }
}

Result<kvm_seq_info> ThinClient::seq_info(kvm_seq_id seq) {
  {
    const std::lock_guard lock(own_queue_mutex_);
    if (lost_ != nullptr && lost_->contains(seq)) {
      return Status(KVM_ERR_LOST, "the sequence was lost with the connection that made it");
    }
  }
  return call_for_struct<kvm_seq_info>(
      [&](ipc::ControlWriter* writer, uint64_t id) {
        return writer->finish(id, wire::CreateSeqInfo(writer->fbb(), seq));
      },
      "kvm_seq_info");
}

Result<std::vector<kvm_seq_info>> ThinClient::list_seqs(kvm_space_id space, uint32_t flags) {
  return call_for_list<kvm_seq_info>(
      [&](ipc::ControlWriter* writer, uint64_t id, uint64_t begin) {
        return writer->finish(id, wire::CreateSeqList(writer->fbb(), space, flags, begin));
      },
      [](const kvm_seq_info& info) { return uint64_t{info.seq}; }, "kvm_seq_info");
}

Result<kvm_stats> ThinClient::stats() {
  return call_for_struct<kvm_stats>(
      [](ipc::ControlWriter* writer, uint64_t id) {
        return writer->finish(id, wire::CreateStats(writer->fbb()));
      },
      "kvm_stats");
}

Result<std::string> ThinClient::call_for_text(
    const std::function<std::span<const uint8_t>(ipc::ControlWriter*, uint64_t, uint64_t)>&
        encode) {
  std::string text;
  for (;;) {
    KVM_TRY_ASSIGN(const Connection::Reply reply,
                   connection()->call([&](ipc::ControlWriter* writer, uint64_t id) {
                     return encode(writer, id, text.size());
                   }));
    const wire::Bytes* body = reply.root->body_as_Bytes();
    if (body == nullptr) {
      return unexpected_reply();
    }
    const size_t n = body->data() == nullptr ? 0 : body->data()->size();
    if (n != 0) {
      text.append(reinterpret_cast<const char*>(body->data()->data()), n);
    }
    if (n == 0 || text.size() >= body->total()) {
      return text;
    }
  }
}

Result<std::string> ThinClient::stats_text() {
  return call_for_text([](ipc::ControlWriter* writer, uint64_t id, uint64_t begin) {
    return writer->finish(id, wire::CreateStatsText(writer->fbb(), begin));
  });
}

Result<std::string> ThinClient::config_text() {
  KVM_TRY(connection()->need_minor(1, "kvm_get_config_text"));
  return call_for_text([](ipc::ControlWriter* writer, uint64_t id, uint64_t begin) {
    return writer->finish(id, wire::CreateConfigText(writer->fbb(), begin));
  });
}

Result<kvm_evict_result> ThinClient::evict(const kvm_evict_params& params) {
  KVM_TRY(connection()->need_minor(1, "kvm_evict"));
  kvm_evict_result out{};
  uint64_t begin = 0;
  for (;;) {
    KVM_TRY_ASSIGN(const Connection::Reply reply,
                   connection()->call([&](ipc::ControlWriter* writer, uint64_t id) {
                     return writer->finish(id, wire::CreateEvict(writer->fbb(), params.what,
                                                                 params.id, begin, params.flags));
                   }));
    const wire::Evicted* body = reply.root->body_as_Evicted();
    // Ascending, or it might go on for ever.
    if (body == nullptr || (body->next() != 0 && body->next() <= begin)) {
      return unexpected_reply();
    }
    out.n_sequences += body->n_sequences();
    out.bytes += body->bytes();
    begin = body->next();
    if (begin == 0) {
      return out;
    }
  }
}

Result<std::vector<kvm_client_entry>> ThinClient::list_clients() {
  KVM_TRY(connection()->need_minor(1, "kvm_client_list"));
  return call_for_list<kvm_client_entry>(
      [](ipc::ControlWriter* writer, uint64_t id, uint64_t begin) {
        return writer->finish(id, wire::CreateClientList(writer->fbb(), begin));
      },
      [](const kvm_client_entry& entry) { return entry.client_id; }, "kvm_client_entry");
}

Result<std::vector<kvm_user_entry>> ThinClient::list_users() {
  KVM_TRY(connection()->need_minor(1, "kvm_user_list"));
  return call_for_list<kvm_user_entry>(
      [](ipc::ControlWriter* writer, uint64_t id, uint64_t begin) {
        return writer->finish(id, wire::CreateUserList(writer->fbb(), begin));
      },
      [](const kvm_user_entry& entry) { return uint64_t{entry.uid}; }, "kvm_user_entry");
}

Status ThinClient::set_quota(const kvm_quota_params& params) {
  KVM_TRY(connection()->need_minor(1, "kvm_quota_set"));
  auto reply = connection()->call([&](ipc::ControlWriter* writer, uint64_t id) {
    const auto bytes = ipc::as_bytes(&params, 1);
    const auto vector = writer->fbb().CreateVector(bytes.data(), bytes.size());
    return writer->finish(id, wire::CreateQuotaSet(writer->fbb(), vector));
  });
  return reply.status();
}

}  // namespace kvm::client
