// SPDX-License-Identifier: Apache-2.0
#include "client/embedded_device.h"

#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "attention/cuda/params.h"
#include "base/clock.h"
#include "base/limits.h"
#include "base/splitmix.h"
#include "base/stats_text.h"
#include "client/limits.h"
#include "client/thin_connection.h"
#include "codecs/codec.h"
#include "device/device_store.h"
#include "device/remote_store.h"
#include "engine/space/space_info.h"

namespace kvm::client {

namespace {

constexpr uint32_t kMaxSpaces = 64;
constexpr uint64_t kMaxSequences = 65536;
// In units of log 2 larger ones are infinite.
constexpr float kMostSinkLogit = 0x1p127f;
constexpr uint32_t kEpochTags = (1u << 20) - 1;

Status unsupported(const std::string& what) {
  return Status(KVM_ERR_UNSUPPORTED, "in device memory: " + what);
}

Status closed_status() { return Status(KVM_ERR_DISCONNECTED, "the client was closed"); }

const char* retention_name(uint32_t kind) {
  return kind == KVM_RETAIN_SINKS_RECENT_FOLD ? "SINKS_RECENT_FOLD"
         : kind == KVM_RETAIN_HEAVY           ? "HEAVY"
                                              : "PROMPT";
}

Status check_codec(CodecId id) {
  return attention::gpu::is_on_devices(id)
             ? Status::ok()
             : unsupported(std::string("pages of ") + codecs::codec_of(id).name +
                           " are not there; fp16, bf16, int8, fp8 and int4 are");
}

Status add_classes(const engine::Space& space, uint32_t layer, device::LayerLayout* to) {
  for (const engine::HeadClass& from : space.layers[layer].classes) {
    const engine::Retention& keeps = from.retention;
    if (keeps.kind != KVM_RETAIN_FULL && keeps.kind != KVM_RETAIN_SINKS_RECENT) {
      return unsupported(std::string("retention ") + retention_name(keeps.kind) +
                         " is not there; FULL and SINKS_RECENT are");
    }
    if (keeps.positions != KVM_POSITIONS_ABSOLUTE) {
      return unsupported("positions IN_CACHE are not there");
    }
    KVM_TRY(check_codec(from.slab_class.codec_k));
    KVM_TRY(check_codec(from.slab_class.codec_v));
    if (from.slab_class.codec_k != space.codec || from.slab_class.codec_v != space.codec) {
      return unsupported(std::string("heads of layer ") + std::to_string(layer) +
                         " are stored as " + from.slab_class.k().name + " and " +
                         from.slab_class.v().name + " in a space of " +
                         codecs::codec_of(space.codec).name + "; all must be alike");
    }
    to->classes.push_back({from.kv_heads, keeps.n_sinks, keeps.n_recent, keeps.slack, 0, 0});
  }
  return Status::ok();
}

}  // namespace

Result<device::SpaceLayout> layout_of(const engine::Space& space) {
  KVM_TRY(check_codec(space.codec));
  if (space.v_in_k) {
    if (space.head_dim_k != attention::gpu::kMlaDim ||
        space.head_dim_v != attention::gpu::kMlaValueDim ||
        !attention::gpu::is_mla_on_devices(space.codec)) {
      return unsupported("KVM_SPACE_V_IN_K with head_dim_k " + std::to_string(space.head_dim_k) +
                         " and head_dim_v " + std::to_string(space.head_dim_v) + " in pages of " +
                         codecs::codec_of(space.codec).name +
                         "; 576 and 512 are there, in pages of fp16 or bf16");
    }
  } else if (space.head_dim_k != space.head_dim_v ||
             !attention::gpu::is_head_dim_on_devices(space.codec, space.head_dim_k)) {
    return unsupported("head_dim_k is " + std::to_string(space.head_dim_k) + " and head_dim_v " +
                       std::to_string(space.head_dim_v) +
                       "; both must be 64, 128 or 256 or, but in pages of int4, 80, 96 or 192");
  }
  if (!space.alibi_slopes.empty()) {
    return unsupported("alibi_slopes are not there");
  }
  if (space.has_indexes) {
    return unsupported("indexes are not there: attention is exact");
  }
  if (space.has_pairs) {
    return unsupported("KVM_LAYER_PAIR is not there");
  }
  if (space.default_choice.mode != KVM_MODE_EXACT) {
    return unsupported("default_mode is " + std::to_string(space.default_choice.mode) +
                       "; attention is exact");
  }
  device::SpaceLayout layout;
  layout.codec = space.codec;
  layout.dim = space.head_dim_k;
  layout.scale = space.layers[0].softmax_scale;
  layout.softcap = space.logit_softcap;
  for (uint32_t i = 0; i < space.n_layers; ++i) {
    const engine::Layer& from = space.layers[i];
    if (from.dim_k != space.head_dim_k || from.dim_v != space.head_dim_v) {
      return unsupported("layer " + std::to_string(i) + " has head dims " +
                         std::to_string(from.dim_k) + "/" + std::to_string(from.dim_v) +
                         "; all layers must be alike");
    }
    if (const uint32_t most = attention::gpu::max_group(space.head_dim_k); from.group() > most) {
      return unsupported("layer " + std::to_string(i) + " has groups of " +
                         std::to_string(from.group()) + " q heads; at most " +
                         std::to_string(most));
    }
    device::LayerLayout layer;
    layer.has_keys = from.kind != KVM_LAYER_ABSENT;
    layer.storage_layer = from.storage_layer;
    layer.n_q_heads = from.n_q_heads;
    layer.n_kv_heads = from.n_kv_heads;
    layer.window = from.window;
    if (const float* sinks = space.layer_sink_logits(i); sinks != nullptr && layer.has_keys) {
      layer.sink_logits.assign(sinks, sinks + from.n_q_heads);
      for (float& logit : layer.sink_logits) {
        logit = std::min(logit, kMostSinkLogit);
      }
    }
    if (from.kind == KVM_LAYER_OWN) {
      KVM_TRY(add_classes(space, i, &layer));
    }
    if (layer.classes.size() > attention::gpu::kMaxClasses) {
      return unsupported("layer " + std::to_string(i) + " has " +
                         std::to_string(layer.classes.size()) + " head classes; at most " +
                         std::to_string(attention::gpu::kMaxClasses));
    }
    layout.layers.push_back(std::move(layer));
  }
  return layout;
}

namespace {

// Locking memory of the host takes kvmd a second for every few GB.
constexpr uint64_t kReadyNsPerByte = 4;
// An answer may have to wait for the device: for what is enqueued before a spill whose pages it
// hands out.
constexpr uint64_t kAnswerNs = 60'000'000'000;
constexpr uint64_t kMostBytes = uint64_t{1} << 50;

Result<std::unique_ptr<device::SequenceStore>> open_remote_store(
    const DeviceOptions& options, std::unique_ptr<device::Driver> driver) {
  KVM_TRY_ASSIGN(std::shared_ptr<Connection> connection, Connection::open(*options.server));
  DeviceMemoryAsked asked;
  asked.ordinal = options.ordinal;
  asked.uuid = driver->facts().uuid;
  asked.pool_bytes = options.pool_bytes;
  asked.host_bytes = options.host_bytes;
  asked.store_version = device::wire::kStoreVersion;
  asked.words_bytes = sizeof(device::wire::Words);
  KVM_TRY_ASSIGN(DeviceMemoryGiven given, connection->open_device(asked));
  device::RemoteStoreOptions remote;
  remote.timeout_ns = std::max(options.server->timeout_ns, kAnswerNs);
  remote.ready_within_ns = add_saturating(
      options.server->timeout_ns, std::min(options.host_bytes, kMostBytes) * kReadyNsPerByte);
  remote.held = std::move(connection);
  KVM_TRY_ASSIGN(std::unique_ptr<device::RemoteStore> store,
                 device::RemoteStore::open(std::move(driver), std::move(given.channel),
                                           std::move(given.words), remote));
  return std::unique_ptr<device::SequenceStore>(std::move(store));
}

}  // namespace

Result<std::shared_ptr<Client>> open_device_client(const DeviceOptions& options) {
  KVM_TRY_ASSIGN(std::unique_ptr<device::Driver> driver, device::open_driver(options.ordinal));
  const uint64_t start_ns = now_ns();
  const auto tag = static_cast<uint32_t>(
      splitmix64(start_ns ^ static_cast<uint64_t>(::getpid())) % kEpochTags + 1);
  auto service = std::make_shared<DeviceService>(tag);
  service->driver = driver.get();
  if (options.server.has_value()) {
    KVM_TRY_ASSIGN(service->store, open_remote_store(options, std::move(driver)));
  } else {
    device::DeviceStoreOptions store;
    store.pool_bytes =
        options.pool_bytes != 0 ? options.pool_bytes : driver->facts().free_bytes / 5 * 4;
    store.host_bytes = options.host_bytes;
    KVM_TRY_ASSIGN(service->store, device::DeviceStore::open(std::move(driver), store));
  }
  return std::shared_ptr<Client>(std::make_shared<DeviceClient>(std::move(service), start_ns));
}

Status DeviceService::check_open() const { return is_closed ? closed_status() : store->state(); }

void DeviceService::close() {
  is_closed = true;
  std::vector<uint64_t> ids;
  seqs.for_each([&](uint64_t id, SeqRecord& record) {
    store->clear(record.seq.get());
    ids.push_back(id);
  });
  for (const uint64_t id : ids) {
    seqs.erase(id);
  }
  store->finish_moves();
}

DeviceClient::DeviceClient(std::shared_ptr<DeviceService> service, uint64_t start_ns)
    : service_(std::move(service)), start_ns_(start_ns) {
  fill_limits(&info_);
  info_.features = KVM_FEATURE_EMBEDDED | KVM_FEATURE_DEVICE;
  info_.epoch = start_ns;
  info_.client_id = 1;
  info_.server_pid = static_cast<uint32_t>(::getpid());
  info_.max_queues = 0;
  info_.max_arenas = 0;
  info_.max_spaces = kMaxSpaces;
  info_.max_sequences = kMaxSequences;
  if (const auto figures = service_->store->figures(); figures.is_ok()) {
    info_.host_capacity_bytes = figures.value().host_bytes;
    info_.quota_bytes = figures.value().pool_bytes;
  }
  ::strncpy(info_.isa, "cuda", sizeof(info_.isa) - 1);
  ::strncpy(info_.server_version, kvm_version_string(), sizeof(info_.server_version) - 1);
}

DeviceClient::~DeviceClient() { close(); }

void DeviceClient::close() {
  const std::lock_guard lock(service_->mutex);
  if (!service_->is_closed) {
    service_->close();
  }
}

bool DeviceClient::is_closed() const {
  const std::lock_guard lock(service_->mutex);
  return service_->is_closed;
}

Status DeviceClient::ping() {
  const std::lock_guard lock(service_->mutex);
  KVM_TRY(service_->check_open());
  return service_->store->figures().status();
}

Result<std::unique_ptr<Queue>> DeviceClient::create_queue(uint32_t, uint64_t) {
  return unsupported("there are no queues; kvm_cuda.h enqueues steps on the caller's streams");
}

Result<ArenaMemory> DeviceClient::create_arena(uint64_t) {
  return unsupported("there are no arenas; tensors of kvm_cuda.h are device memory");
}

// --- Spaces -------------------------------------------------------------------------------------

Result<kvm_space_id> DeviceClient::register_space(const SpaceSpec& spec) {
  KVM_TRY_ASSIGN(std::shared_ptr<const engine::Space> space, engine::resolve_space(spec));
  KVM_TRY_ASSIGN(device::SpaceLayout layout, layout_of(*space));
  const std::lock_guard lock(service_->mutex);
  KVM_TRY(service_->check_open());
  kvm_space_id found = 0;
  Status status;
  service_->spaces.for_each([&](uint64_t id, const DeviceService::SpaceRecord& record) {
    if (record.space->name == space->name) {
      found = id;
      status = engine::compare_spaces(*record.space, *space);
    }
  });
  KVM_TRY(status);
  if (found != 0) {
    return found;
  }
  if (service_->spaces.size() == kMaxSpaces) {
    return Status(KVM_ERR_LIMIT,
                  "there are " + std::to_string(kMaxSpaces) + " spaces, the most that are allowed");
  }
  auto record = std::make_unique<DeviceService::SpaceRecord>();
  KVM_TRY_ASSIGN(record->layout, service_->store->prepare(std::move(layout)));
  record->space = std::move(space);
  return service_->spaces.insert(std::move(record));
}

Result<kvm_space_id> DeviceClient::find_space(const std::string& name) {
  const std::lock_guard lock(service_->mutex);
  KVM_TRY(service_->check_open());
  kvm_space_id found = 0;
  service_->spaces.for_each([&](uint64_t id, const DeviceService::SpaceRecord& record) {
    found = record.space->name == name ? id : found;
  });
  return found != 0 ? Result<kvm_space_id>(found)
                    : Status(KVM_ERR_NOT_FOUND, "no space is called '" + name + "'");
}

kvm_space_info DeviceClient::describe(uint64_t id, const DeviceService::SpaceRecord& record) const {
  kvm_space_info info = engine::describe_space(*record.space);
  info.space = id;
  info.uid = static_cast<uint32_t>(::geteuid());
  info.n_sequences = record.n_sequences;
  return info;
}

Result<kvm_space_info> DeviceClient::space_info(kvm_space_id space) {
  const std::lock_guard lock(service_->mutex);
  KVM_TRY(service_->check_open());
  KVM_TRY_ASSIGN(const DeviceService::SpaceRecord* record, service_->spaces.find(space));
  return describe(space, *record);
}

Result<std::vector<kvm_space_info>> DeviceClient::list_spaces() {
  const std::lock_guard lock(service_->mutex);
  KVM_TRY(service_->check_open());
  std::vector<kvm_space_info> list;
  service_->spaces.for_each([&](uint64_t id, const DeviceService::SpaceRecord& record) {
    list.push_back(describe(id, record));
  });
  return list;
}

Status DeviceClient::drop_space(kvm_space_id space) {
  const std::lock_guard lock(service_->mutex);
  KVM_TRY(service_->check_open());
  KVM_TRY_ASSIGN(const DeviceService::SpaceRecord* record, service_->spaces.find(space));
  if (record->n_sequences != 0) {
    return Status(KVM_ERR_BUSY,
                  "the space has " + std::to_string(record->n_sequences) + " sequences");
  }
  service_->spaces.erase(space);
  return Status::ok();
}

// --- Sequences ----------------------------------------------------------------------------------

kvm_seq_id DeviceClient::add_seq(device::SequencePtr seq, kvm_space_id space) {
  auto record = std::make_unique<DeviceService::SeqRecord>();
  record->seq = std::move(seq);
  record->space = space;
  ++service_->spaces.find(space).value()->n_sequences;
  return service_->seqs.insert(std::move(record));
}

Result<kvm_seq_id> DeviceClient::create_seq(const SeqRequest& call) {
  if ((call.flags & KVM_SEQ_MANUAL_COMMIT) != 0) {
    return unsupported("KVM_SEQ_MANUAL_COMMIT is not there; slack of a policy leaves room");
  }
  if (call.n_tokens > kMaxTokens) {
    return Status(KVM_ERR_INVALID, "reserve is " + std::to_string(call.n_tokens) + "; at most " +
                                       std::to_string(kMaxTokens) + " tokens fit into a sequence");
  }
  KVM_TRY_ASSIGN(const DeviceService::SpaceRecord* space, service_->spaces.find(call.space));
  KVM_TRY_ASSIGN(device::SequencePtr made, service_->store->create(space->layout));
  return add_seq(std::move(made), call.space);
}

void DeviceClient::finish_moves(std::span<const kvm_seq_id> ids, bool also_spills) {
  device::SequenceStore::Wait wait;
  {
    const std::lock_guard lock(service_->mutex);
    std::vector<device::DeviceSequence*> seqs;
    for (const kvm_seq_id id : ids) {
      const Result<DeviceService::SeqRecord*> record = service_->seqs.find(id);
      if (record.is_ok()) {
        seqs.push_back(record.value()->seq.get());
      }
    }
    if (!service_->is_closed) {
      wait = service_->store->moves_of(seqs, also_spills);
    }
  }
  if (wait != nullptr) {
    wait();
  }
}

Result<kvm_seq_id> DeviceClient::seq(const SeqRequest& call) {
  if (call.verb == SeqVerb::kFork || call.verb == SeqVerb::kTruncate) {
    finish_moves({&call.seq, 1}, false);
  }
  const std::lock_guard lock(service_->mutex);
  KVM_TRY(service_->check_open());
  const bool makes = call.verb == SeqVerb::kCreate || call.verb == SeqVerb::kFork;
  if (makes && service_->seqs.size() >= kMaxSequences) {
    return Status(KVM_ERR_LIMIT, "there are " + std::to_string(kMaxSequences) +
                                     " sequences, the most that are allowed");
  }
  if (call.verb == SeqVerb::kCreate) {
    return create_seq(call);
  }
  KVM_TRY_ASSIGN(const DeviceService::SeqRecord* record, service_->seqs.find(call.seq));
  device::DeviceSequence* const seq = record->seq.get();
  const uint64_t n_tokens = call.n_tokens == KVM_POSITION_END ? seq->n_tokens : call.n_tokens;
  switch (call.verb) {
    case SeqVerb::kFork: {
      KVM_TRY_ASSIGN(device::SequencePtr child, service_->store->fork(*seq, n_tokens));
      return add_seq(std::move(child), record->space);
    }
    case SeqVerb::kTruncate:
      KVM_TRY(service_->store->truncate(seq, n_tokens));
      return kvm_seq_id{0};
    case SeqVerb::kCommit:
      // Tokens are final when they are appended.
      if (n_tokens > seq->n_tokens) {
        return Status(KVM_ERR_INVALID, "n_tokens is " + std::to_string(n_tokens) +
                                           "; the sequence has " + std::to_string(seq->n_tokens));
      }
      return kvm_seq_id{0};
    case SeqVerb::kPublish:
    case SeqVerb::kTake:
      return Status(KVM_ERR_UNSUPPORTED,
                    "sequences on a device are of one process and are not published");
    case SeqVerb::kPrefetch:
    case SeqVerb::kSetPriority:
      return Status(KVM_ERR_UNSUPPORTED, "sequences on a device are in no slower tier");
    case SeqVerb::kDrop:
      return Status(KVM_ERR_UNSUPPORTED, "sequences on a device keep what they have");
    case SeqVerb::kCreate:
    case SeqVerb::kFree:
      break;
  }
  service_->store->clear(seq);
  --service_->spaces.find(record->space).value()->n_sequences;
  service_->seqs.erase(call.seq);
  return kvm_seq_id{0};
}

Result<kvm_seq_info> DeviceClient::describe(uint64_t id,
                                            const DeviceService::SeqRecord& record) const {
  KVM_TRY_ASSIGN(const device::SequenceStore::Usage usage, service_->store->usage(*record.seq));
  kvm_seq_info info{};
  info.struct_size = sizeof info;
  info.seq = id;
  info.space = record.space;
  info.client_id = info_.client_id;
  info.n_tokens_min = info.n_tokens_max = info.n_committed = record.seq->n_tokens;
  info.n_pages = usage.n_pages;
  info.bytes = usage.bytes;
  info.bytes_shared = usage.bytes_shared;
  info.n_entries_dropped = record.seq->n_dropped();
  return info;
}

Result<kvm_seq_info> DeviceClient::seq_info(kvm_seq_id seq) {
  const std::lock_guard lock(service_->mutex);
  KVM_TRY(service_->check_open());
  KVM_TRY_ASSIGN(const DeviceService::SeqRecord* record, service_->seqs.find(seq));
  return describe(seq, *record);
}

Result<std::vector<kvm_seq_info>> DeviceClient::list_seqs(kvm_space_id space, uint32_t) {
  const std::lock_guard lock(service_->mutex);
  KVM_TRY(service_->check_open());
  std::vector<kvm_seq_info> list;
  Status status;
  service_->seqs.for_each([&](uint64_t id, const DeviceService::SeqRecord& record) {
    if (status.is_ok() && (space == 0 || record.space == space)) {
      const Result<kvm_seq_info> info = describe(id, record);
      status = info.status();
      list.push_back(info.is_ok() ? info.value() : kvm_seq_info{});
    }
  });
  KVM_TRY(status);
  return list;
}

// --- Statistics ---------------------------------------------------------------------------------

Result<kvm_stats> DeviceClient::stats() {
  KVM_TRY_ASSIGN(const kvm_cuda_stats device, cuda_stats());
  const std::lock_guard lock(service_->mutex);
  kvm_stats stats{};
  stats.struct_size = sizeof stats;
  stats.n_clients = 1;
  stats.n_clients_total = 1;
  stats.uptime_ns = now_ns() - start_ns_;
  stats.n_spaces = service_->spaces.size();
  stats.n_sequences = service_->seqs.size();
  stats.n_pages = device.n_pages;
  stats.n_pages_copied = device.n_pages_copied;
  stats.host_capacity_bytes = device.host_bytes;
  stats.host_used_bytes = device.host_used_bytes;
  return stats;
}

Result<std::string> DeviceClient::stats_text() {
  KVM_TRY_ASSIGN(const kvm_stats all, stats());
  KVM_TRY_ASSIGN(const kvm_cuda_stats device, cuda_stats());
  StatsText text;
  write_stats(all, &text);
  text.gauge("kvm_device_pool_bytes", "Cap of device memory for pages.", device.pool_bytes);
  text.gauge("kvm_device_used_bytes", "Device memory mapped for pages.", device.pool_used_bytes);
  text.gauge("kvm_device_page_bytes", "Device memory in pages in use.", device.pool_page_bytes);
  text.gauge("kvm_device_batch_bytes", "Device memory of batches.", device.batch_bytes);
  text.gauge("kvm_device_spilled_sequences", "Sequences on the host.", device.n_spilled);
  text.counter("kvm_device_spilled_bytes_total", "Copied from the device to the host.",
               device.spilled_bytes);
  text.counter("kvm_device_fetched_bytes_total", "Copied from the host to the device.",
               device.fetched_bytes);
  text.counter("kvm_device_copies_total", "Copies that this took.", device.n_copies);
  text.counter("kvm_device_stored_bytes_total", "Rows that bridges have brought to the host.",
               device.stored_bytes);
  text.counter("kvm_device_loaded_bytes_total", "Rows that bridges have brought to the device.",
               device.loaded_bytes);
  text.counter("kvm_device_launches_total", "Kernels launched or captured.", device.n_launches);
  return text.take();
}

Result<kvm_cuda_stats> DeviceClient::cuda_stats() {
  const std::lock_guard lock(service_->mutex);
  KVM_TRY(service_->check_open());
  KVM_TRY_ASSIGN(const device::SequenceStore::Figures figures, service_->store->figures());
  kvm_cuda_stats stats{};
  stats.struct_size = sizeof stats;
  stats.n_sms = service_->driver->facts().n_sms;
  stats.pool_bytes = figures.pool_bytes;
  stats.pool_used_bytes = figures.pool_used_bytes;
  stats.pool_page_bytes = figures.pool_page_bytes;
  stats.pool_peak_bytes = figures.pool_peak_bytes;
  stats.n_pages = figures.n_pages;
  stats.n_pages_copied = figures.n_pages_copied;
  stats.batch_bytes = service_->batch_bytes;
  stats.host_bytes = figures.host_bytes;
  stats.host_used_bytes = figures.host_used_bytes;
  stats.n_spilled = figures.n_spilled;
  stats.spilled_bytes = figures.spilled_bytes;
  stats.fetched_bytes = figures.fetched_bytes;
  stats.n_copies = figures.n_copies;
  stats.n_launches = service_->n_launches;
  stats.stored_bytes = service_->stored_bytes;
  stats.loaded_bytes = service_->loaded_bytes;
  return stats;
}

// --- Steps --------------------------------------------------------------------------------------

Result<std::shared_ptr<const device::SpaceLayout>> DeviceClient::layout(kvm_space_id space) {
  const std::lock_guard lock(service_->mutex);
  KVM_TRY(service_->check_open());
  KVM_TRY_ASSIGN(const DeviceService::SpaceRecord* record, service_->spaces.find(space));
  return record->layout;
}

Result<std::unique_ptr<device::Batch>> DeviceClient::create_batch(
    kvm_space_id space, const device::BatchOptions& options) {
  const std::lock_guard lock(service_->mutex);
  KVM_TRY(service_->check_open());
  KVM_TRY_ASSIGN(const DeviceService::SpaceRecord* record, service_->spaces.find(space));
  KVM_TRY_ASSIGN(
      std::unique_ptr<device::Batch> batch,
      device::Batch::create(service_->driver, service_->store.get(), record->layout, options));
  service_->batch_bytes += batch->device_bytes();
  return batch;
}

void DeviceClient::destroy_batch(std::unique_ptr<device::Batch> batch) {
  const std::lock_guard lock(service_->mutex);
  service_->batch_bytes -= batch->device_bytes();
  batch.reset();
}

Status DeviceClient::update(device::Batch* batch, const kvm_cuda_item* items, uint32_t n_items,
                            device::Stream stream) {
  std::vector<kvm_seq_id> seqs(n_items);
  std::transform(items, items + n_items, seqs.begin(),
                 [](const kvm_cuda_item& of) { return of.seq; });
  finish_moves(seqs, false);
  return with_batch(batch, [&](device::Batch& of) -> Status {
    std::vector<device::BatchItem> resolved;
    resolved.reserve(n_items);
    for (uint32_t i = 0; i < n_items; ++i) {
      const kvm_cuda_item& item = items[i];
      device::BatchItem to{nullptr,      item.n_append,  item.append_row,
                           item.n_query, item.query_row, {}};
      if (item.tree_mask != nullptr) {
        to.tree = {item.tree_mask, item.n_query};
      }
      if (item.seq != 0) {
        KVM_TRY_ASSIGN(const DeviceService::SeqRecord* record, service_->seqs.find(item.seq));
        to.seq = record->seq;
      }
      resolved.push_back(std::move(to));
    }
    return of.update(resolved, stream);
  });
}

void DeviceClient::count_stored(uint64_t n_bytes) {
  const std::lock_guard lock(service_->mutex);
  service_->stored_bytes += n_bytes;
}

void DeviceClient::count_loaded(uint64_t n_bytes) {
  const std::lock_guard lock(service_->mutex);
  service_->loaded_bytes += n_bytes;
}

Status DeviceClient::merge(const device::StatesCall& call, device::Stream stream) {
  const std::lock_guard lock(service_->mutex);
  KVM_TRY(service_->check_open());
  KVM_TRY(device::merge_states(service_->driver, call, stream));
  ++service_->n_launches;
  return Status::ok();
}

Status DeviceClient::spill(kvm_seq_id seq, uint64_t begin, uint64_t end, device::Stream stream) {
  finish_moves({&seq, 1}, true);
  const std::lock_guard lock(service_->mutex);
  KVM_TRY(service_->check_open());
  KVM_TRY_ASSIGN(const DeviceService::SeqRecord* record, service_->seqs.find(seq));
  return service_->store->spill(record->seq.get(), begin, end, stream);
}

Status DeviceClient::fetch(kvm_seq_id seq, uint64_t begin, uint64_t end, device::Stream stream) {
  finish_moves({&seq, 1}, true);
  const std::lock_guard lock(service_->mutex);
  KVM_TRY(service_->check_open());
  KVM_TRY_ASSIGN(const DeviceService::SeqRecord* record, service_->seqs.find(seq));
  return service_->store->fetch(record->seq.get(), begin, end, stream);
}

Result<kvm_cuda_seq_info> DeviceClient::cuda_seq_info(kvm_seq_id seq) {
  const std::lock_guard lock(service_->mutex);
  KVM_TRY(service_->check_open());
  KVM_TRY_ASSIGN(const DeviceService::SeqRecord* record, service_->seqs.find(seq));
  KVM_TRY_ASSIGN(const device::SequenceStore::Residence is,
                 service_->store->residence(record->seq.get()));
  kvm_cuda_seq_info info{};
  info.struct_size = sizeof info;
  info.state = is.n_waiting_pages != 0 ? is.leaves ? KVM_CUDA_SEQ_LEAVING : KVM_CUDA_SEQ_COMING
               : is.on_host            ? KVM_CUDA_SEQ_AWAY
                                       : KVM_CUDA_SEQ_HERE;
  info.n_pages = is.n_pages;
  info.n_host_pages = is.n_host_pages;
  info.n_waiting_pages = is.n_waiting_pages;
  info.failure = static_cast<uint32_t>(is.failure);
  return info;
}

}  // namespace kvm::client
