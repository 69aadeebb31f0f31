// SPDX-License-Identifier: Apache-2.0
#include "client/embedded_bridge.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/limits.h"
#include "base/round.h"
#include "base/undo.h"
#include "codecs/codec.h"

namespace kvm::client {

namespace {

constexpr uint64_t kDefaultStaging = 64 << 20;
constexpr uint32_t kMaxSlots = 16;
// The staging is divided into so many slots, if pieces are not too short for it then.
constexpr uint32_t kSlots = 8;
constexpr uint32_t kMaxPieceTokens = 4096;
// Alignment of rows in a slot; more than kernels and copies want.
constexpr uint64_t kAlignment = 4096;
// LIMIT: tokens of a load. The batch has room for as many rows to append.
constexpr uint64_t kMaxLoadTokens = 1 << 20;
constexpr char kTooLate[] = "the copy has not ended within its timeout_ns";

std::string number(uint64_t n) { return std::to_string(n); }
Status invalid(const std::string& sentence) { return Status(KVM_ERR_INVALID, sentence); }

// What a function of kvm.h has answered.
Status answer(kvm_status code) {
  return code == KVM_OK ? Status::ok() : Status(code, kvm_last_error());
}

// What rows travel as: no bit is lost that the target would have kept, and no byte crosses that it
// would drop.
Dtype dtype_between(CodecId source, CodecId target) {
  const codecs::Codec &from = codecs::codec_of(source), &to = codecs::codec_of(target);
  if (from.is_scaled() && to.is_scaled()) {
    return Dtype::kF32;
  }
  // That of the one whose elements are numbers; of two, the narrower.
  const bool as_target = from.is_scaled() || (!to.is_scaled() && to.bits() < from.bits());
  return static_cast<Dtype>(as_target ? to.elem : from.elem);
}

// The tokens that are meant of a source of n_tokens. Fails: INVALID.
Result<uint64_t> end_of(const BridgeCopy& copy, uint64_t n_tokens) {
  const uint64_t end = copy.end == KVM_POSITION_END ? n_tokens : copy.end;
  if (copy.begin >= end || end > n_tokens) {
    return invalid("begin is " + number(copy.begin) + " and end " + number(end) +
                   "; the source has " + number(n_tokens) + " tokens, and begin must be below end");
  }
  return end;
}

Result<kvm_seq_info> host_seq_info(kvm_client* host, kvm_seq_id seq) {
  kvm_seq_info info{};
  info.struct_size = sizeof info;
  KVM_TRY(answer(kvm_seq_get_info(host, seq, &info)));
  return info;
}

}  // namespace

// --- HostRequests -------------------------------------------------------------------------------

Status HostRequests::open(kvm_client* client) {
  kvm_queue_params params{};
  params.struct_size = sizeof params;
  params.n_entries = kMaxSlots;
  is_done_.resize(kMaxSlots);
  return answer(kvm_queue_create(client, &params, &queue_));
}

template <class Stage>
Status HostRequests::begin(uint32_t slot, Stage&& stage) {
  is_done_[slot] = false;
  KVM_TRY(answer(stage(queue_, uint64_t{slot})));
  ++n_outstanding_;
  return answer(kvm_submit(queue_));
}

Status HostRequests::take(uint32_t n_least, uint64_t deadline_ns) {
  kvm_completion completions[kMaxSlots];
  const int32_t n = n_least == 0
                        ? kvm_poll(queue_, completions, kMaxSlots)
                        : kvm_wait(queue_, completions, kMaxSlots, n_least, time_left(deadline_ns));
  if (n < 0) {
    return answer(n);
  }
  for (int32_t i = 0; i < n; ++i) {
    is_done_[completions[i].user_data] = true;
    --n_outstanding_;
    if (completions[i].status == KVM_ERR_DEADLINE && failure_.is_ok()) {
      failure_ = Status(KVM_ERR_TIMEOUT, kTooLate);
    } else if (completions[i].status != KVM_OK && failure_.is_ok()) {
      failure_ = Status(completions[i].status, completions[i].message);
    }
  }
  KVM_TRY(failure_);
  return static_cast<uint32_t>(n) >= n_least ? Status::ok() : Status(KVM_ERR_TIMEOUT, kTooLate);
}

Result<bool> HostRequests::is_done(uint32_t slot) {
  if (!is_done_[slot]) {
    KVM_TRY(take(0, 0));
  }
  return static_cast<bool>(is_done_[slot]);
}

Status HostRequests::await(uint32_t slot, uint64_t deadline_ns) {
  while (!is_done_[slot]) {
    KVM_TRY(take(1, deadline_ns));
  }
  return Status::ok();
}

void HostRequests::end_all() {
  for (uint32_t slot = 0; slot < kMaxSlots && n_outstanding_ != 0; ++slot) {
    if (!is_done_[slot]) {
      (void)kvm_cancel(queue_, slot);  // what has begun ends by itself
    }
  }
  kvm_completion completion;
  while (n_outstanding_ != 0 && kvm_wait(queue_, &completion, 1, 1, UINT64_MAX) == 1) {
    --n_outstanding_;
  }
  n_outstanding_ = 0;
  failure_ = Status::ok();
}

// --- DeviceBridge -------------------------------------------------------------------------------

Result<std::unique_ptr<DeviceBridge>> DeviceBridge::create(std::shared_ptr<DeviceClient> client,
                                                           const BridgeOptions& options) {
  std::unique_ptr<DeviceBridge> bridge(new DeviceBridge(std::move(client), options));
  KVM_TRY(bridge->init());
  return bridge;
}

DeviceBridge::~DeviceBridge() {
  device::Driver& driver = *client_->driver();
  if (stream_ != nullptr) {
    driver.destroy_stream(stream_);
  }
  if (batch_ != nullptr) {
    client_->destroy_batch(std::move(batch_));
  }
  if (on_device_ != nullptr) {
    driver.free(on_device_);
  }
  if (in_arena_ != nullptr) {
    driver.unregister_host(in_arena_);
  }
  kvm_arena_destroy(arena_);
}

Status DeviceBridge::init() {
  KVM_TRY(compare_spaces());
  KVM_TRY(divide_staging());
  KVM_TRY(requests_.open(&host_));
  kvm_arena_params arena{};
  arena.struct_size = sizeof arena;
  arena.size = staging_bytes_;
  KVM_TRY(answer(kvm_arena_create(&host_, &arena, &arena_)));
  KVM_TRY(answer(kvm_arena_alloc(arena_, staging_bytes_, kAlignment, &buffer_)));
  auto* const in_arena = static_cast<uint8_t*>(kvm_arena_data(arena_, buffer_));
  device::Driver& driver = *client_->driver();
  KVM_TRY(driver.register_host(in_arena, staging_bytes_));
  in_arena_ = in_arena;
  KVM_TRY_ASSIGN(on_device_, driver.allocate(staging_bytes_));
  KVM_TRY_ASSIGN(stream_, driver.create_stream());
  KVM_TRY_ASSIGN(behind_, events_.take());
  for (Slot& slot : slots_) {
    KVM_TRY_ASSIGN(slot.event, events_.take());
  }
  device::BatchOptions batch;
  batch.max_append = static_cast<uint32_t>(std::min(options_.max_tokens, kMaxLoadTokens));
  batch.max_tokens = options_.max_tokens;
  KVM_TRY_ASSIGN(batch_, client_->create_batch(options_.space, batch));
  return Status::ok();
}

Status DeviceBridge::compare_spaces() {
  KVM_TRY_ASSIGN(layout_, client_->layout(options_.space));
  KVM_TRY_ASSIGN(const kvm_space_info here, client_->space_info(options_.space));
  kvm_space_info there{};
  there.struct_size = sizeof there;
  KVM_TRY(answer(kvm_space_get_info(&host_, options_.host_space, &there)));
  const struct {
    const char* name;
    uint64_t here, there;
  } numbers[] = {{"n_layers", here.n_layers, there.n_layers},
                 {"n_kv_heads", here.n_kv_heads, there.n_kv_heads},
                 {"head_dim_k", here.head_dim_k, there.head_dim_k},
                 {"head_dim_v", here.head_dim_v, there.head_dim_v},
                 {"flags", here.flags, there.flags}};
  for (const auto& of : numbers) {
    if (of.here != of.there) {
      return invalid(std::string("the spaces do not agree: ") + of.name + " is " + number(of.here) +
                     " on the device and " + number(of.there) + " on the host");
    }
  }
  constexpr uint8_t kNone[sizeof there.geometry_digest] = {};
  if (std::memcmp(there.geometry_digest, kNone, sizeof kNone) == 0) {
    return Status(KVM_ERR_UNSUPPORTED,
                  "the service says nothing of the layers of its spaces: it "
                  "is older than this library");
  }
  if (std::memcmp(here.geometry_digest, there.geometry_digest, sizeof kNone) != 0) {
    return invalid(
        "the spaces do not agree: layers differ in what they store, in kv heads or in "
        "head dims");
  }
  if (std::memcmp(here.fingerprint, there.fingerprint, sizeof here.fingerprint) != 0) {
    return invalid("the spaces do not agree: they have different fingerprints");
  }
  const auto codec = static_cast<CodecId>(there.codec);
  dtype_out_ = dtype_between(layout_->codec, codec);
  dtype_in_ = dtype_between(codec, layout_->codec);
  for (uint32_t i = 0; i < layout_->layers.size(); ++i) {
    if (layout_->stores(i)) {
      layers_.push_back(i);
    }
  }
  return Status::ok();
}

Status DeviceBridge::divide_staging() {
  const uint64_t wanted = options_.staging_bytes != 0 ? options_.staging_bytes : kDefaultStaging;
  const Dtype widest =
      dtype_size_bytes(dtype_out_) > dtype_size_bytes(dtype_in_) ? dtype_out_ : dtype_in_;
  // Of the layer with most heads.
  const auto slot_bytes = [&](uint32_t n_tokens) {
    uint64_t most = 0;
    for (const uint32_t layer : layers_) {
      most = std::max(most, rows_of({layer, 0, n_tokens}, widest).n_bytes());
    }
    return round_up(most, kAlignment);
  };
  uint32_t n_tokens = kPageTokens;
  while (n_tokens < kMaxPieceTokens && slot_bytes(2 * n_tokens) * kSlots <= wanted) {
    n_tokens *= 2;
  }
  const uint64_t n_slots = std::min<uint64_t>(wanted / slot_bytes(n_tokens), kMaxSlots);
  if (n_slots < 2) {
    return invalid("staging_bytes is " + number(wanted) + "; it must be at least " +
                   number(2 * slot_bytes(n_tokens)) + ", twice what " + number(n_tokens) +
                   " tokens of a layer take");
  }
  piece_tokens_ = n_tokens;
  slots_.resize(n_slots);
  for (size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].at = i * slot_bytes(n_tokens);
  }
  staging_bytes_ = n_slots * slot_bytes(n_tokens);
  return Status::ok();
}

DeviceBridge::Rows DeviceBridge::rows_of(const Piece& piece, Dtype dtype) const {
  const uint64_t n_rows = uint64_t{piece.n_tokens} * layout_->layers[piece.layer].n_kv_heads;
  Rows rows;
  rows.k_bytes = n_rows * layout_->dim * dtype_size_bytes(dtype);
  rows.v_bytes = layout_->v_in_k() ? 0 : n_rows * layout_->dim_v() * dtype_size_bytes(dtype);
  rows.v_at = rows.v_bytes == 0 ? rows.k_bytes : round_up(rows.k_bytes, kAlignment);
  return rows;
}

uint64_t DeviceBridge::row_bytes(uint64_t n_tokens, Dtype dtype) const {
  uint64_t n_bytes = 0;
  for (const uint32_t layer : layers_) {
    const Rows rows = rows_of({layer, 0, 1}, dtype);
    n_bytes += n_tokens * (rows.k_bytes + rows.v_bytes);
  }
  return n_bytes;
}

kvm_tensor DeviceBridge::host_tensor(const Slot& slot, uint64_t at, uint64_t n_bytes,
                                     Dtype dtype) const {
  kvm_tensor tensor{};
  if (n_bytes != 0) {
    tensor.buffer = buffer_;
    tensor.buffer.where += slot.at + at;
    tensor.buffer.size = n_bytes;
    tensor.dtype = static_cast<uint32_t>(dtype);
  }
  return tensor;
}

device::DeviceTensor DeviceBridge::device_tensor(const Slot& slot, uint64_t at, uint64_t n_bytes,
                                                 Dtype dtype) const {
  device::DeviceTensor tensor;
  if (n_bytes != 0) {
    tensor.data = on_device_ + slot.at + at;
    tensor.size_bytes = n_bytes;
    tensor.dtype = dtype;
  }
  return tensor;
}

// What becomes of a piece takes two steps, each on one side. As many pieces as there are slots are
// under way; both steps go through them in order.
template <class First, class Second>
Status DeviceBridge::run(uint64_t n_tokens, First&& first, Second&& second) {
  const uint64_t n_pieces = div_up(n_tokens, piece_tokens_) * layers_.size();
  const auto piece = [&](uint64_t i) {
    const uint64_t from = i / layers_.size() * piece_tokens_;
    return Piece{layers_[i % layers_.size()], from,
                 static_cast<uint32_t>(std::min<uint64_t>(piece_tokens_, n_tokens - from))};
  };
  const auto slot = [&](uint64_t i) { return static_cast<uint32_t>(i % slots_.size()); };
  uint64_t n_begun = 0, n_passed = 0, n_ended = 0;
  while (n_ended < n_pieces) {
    for (; n_begun < n_pieces && n_begun - n_ended < slots_.size(); ++n_begun) {
      KVM_TRY(first.begin(piece(n_begun), slot(n_begun)));
    }
    bool passes = false, ends = false;
    if (n_passed < n_begun) {
      KVM_TRY_ASSIGN(passes, first.is_done(slot(n_passed)));
    }
    if (n_ended < n_passed) {
      KVM_TRY_ASSIGN(ends, second.is_done(slot(n_ended)));
    }
    if (!passes && !ends) {
      // Whichever is further: what waits behind it goes on meanwhile.
      ends = n_ended < n_passed;
      passes = !ends;
      KVM_TRY(ends ? second.await(slot(n_ended)) : first.await(slot(n_passed)));
    }
    if (passes) {
      KVM_TRY(second.begin(piece(n_passed), slot(n_passed)));
      ++n_passed;
    }
    n_ended += ends ? 1 : 0;
  }
  return Status::ok();
}

namespace {

// A step of copies on the host's queue: request(piece, slot, queue, user_data) stages it.
template <class Request>
struct HostStep {
  HostRequests* requests;
  uint64_t deadline_ns;
  Request request;

  template <class Piece>
  Status begin(const Piece& piece, uint32_t slot) {
    return requests->begin(slot, [&](kvm_queue* queue, uint64_t user_data) {
      return request(piece, slot, queue, user_data);
    });
  }
  Result<bool> is_done(uint32_t slot) { return requests->is_done(slot); }
  Status await(uint32_t slot) { return requests->await(slot, deadline_ns); }
};

// On the bridge's stream: enqueue(piece, slot), which records the slot's event.
template <class Slots, class Enqueue>
struct StreamStep {
  device::Driver* driver;
  const Slots* slots;
  uint64_t deadline_ns;
  Enqueue enqueue;

  template <class Piece>
  Status begin(const Piece& piece, uint32_t slot) {
    return time_left(deadline_ns) != 0 ? enqueue(piece, slot) : Status(KVM_ERR_TIMEOUT, kTooLate);
  }
  Result<bool> is_done(uint32_t slot) { return driver->is_done((*slots)[slot].event.get()); }
  Status await(uint32_t slot) { return driver->synchronize((*slots)[slot].event.get()); }
};

}  // namespace

Status DeviceBridge::update(kvm_seq_id seq, uint64_t n_append, device::Stream stream) {
  kvm_cuda_item item{};
  item.seq = seq;
  item.n_append = static_cast<uint32_t>(n_append);
  KVM_TRY(client_->update(batch_.get(), &item, 1, stream));
  KVM_TRY(client_->driver()->record(behind_.get(), stream));
  return client_->driver()->wait(stream_, behind_.get());
}

void DeviceBridge::end_copy() {
  requests_.end_all();
  (void)client_->driver()->synchronize_stream(stream_);
}

Result<kvm_seq_id> DeviceBridge::make_here(kvm_seq_id onto, uint64_t n_before) {
  return client_->seq(onto == 0
                          ? SeqRequest{.verb = SeqVerb::kCreate, .space = options_.space}
                          : SeqRequest{.verb = SeqVerb::kFork, .seq = onto, .n_tokens = n_before});
}

void DeviceBridge::free_here(kvm_seq_id seq) {
  // If it fails, everything of the client is gone.
  (void)client_->seq({.verb = SeqVerb::kFree, .seq = seq});
}

Result<kvm_seq_id> DeviceBridge::make_there(kvm_seq_id onto, uint64_t n_before, uint64_t n_new) {
  kvm_seq_id seq = 0;
  if (onto != 0) {
    KVM_TRY(answer(kvm_seq_fork(&host_, onto, n_before, &seq)));
    return seq;
  }
  kvm_seq_params params{};
  params.struct_size = sizeof params;
  params.reserve = n_new;
  KVM_TRY(answer(kvm_seq_create(&host_, options_.host_space, &params, &seq)));
  return seq;
}

Result<kvm_seq_id> DeviceBridge::store(const BridgeCopy& copy, device::Stream stream) {
  BridgeCopy of = copy;
  KVM_TRY_ASSIGN(const kvm_seq_info source, client_->seq_info(copy.source));
  KVM_TRY_ASSIGN(of.end, end_of(copy, source.n_tokens_max));
  // Whatever becomes of the source, its pages stay as they are.
  KVM_TRY_ASSIGN(of.source, make_here(copy.source, KVM_POSITION_END));
  const Undo forgetting([&] { free_here(of.source); });
  KVM_TRY_ASSIGN(const kvm_seq_id to, make_there(copy.onto, of.begin, of.end - of.begin));
  Undo freeing([&] { (void)kvm_seq_free(&host_, to); });
  const Undo ending([this] { end_copy(); });  // before the others
  KVM_TRY(update(of.source, 0, stream));
  KVM_TRY(copy_out(of, to));
  freeing.dismiss();
  return to;
}

Status DeviceBridge::copy_out(const BridgeCopy& copy, kvm_seq_id to) {
  KVM_TRY_ASSIGN(const kvm_seq_info before, host_seq_info(&host_, to));
  const uint64_t n_before = copy.onto == 0 ? 0 : copy.begin;
  if (before.n_tokens_min != n_before) {
    return invalid("a layer of onto has " + number(before.n_tokens_min) + " tokens; begin is " +
                   number(n_before));
  }
  device::Driver* const driver = client_->driver();
  const auto read = [&](const Piece& piece, uint32_t at) -> Status {
    const Slot& slot = slots_[at];
    const Rows rows = rows_of(piece, dtype_out_);
    device::ReadCall call{0, piece.layer, copy.begin + piece.first, piece.n_tokens, {}, {}};
    call.k = device_tensor(slot, 0, rows.k_bytes, dtype_out_);
    call.v = device_tensor(slot, rows.v_at, rows.v_bytes, dtype_out_);
    KVM_TRY(client_->with_batch(batch_.get(),
                                [&](device::Batch& of) { return of.read(call, stream_); }));
    KVM_TRY(driver->copy(in_arena_ + slot.at, on_device_ + slot.at, rows.n_bytes(), stream_));
    return driver->record(slot.event.get(), stream_);
  };
  const auto append = [&](const Piece& piece, uint32_t at, kvm_queue* queue, uint64_t user_data) {
    const Rows rows = rows_of(piece, dtype_out_);
    kvm_item item{};
    item.seq = to;
    item.append_position = n_before + piece.first;
    item.n_append = piece.n_tokens;
    kvm_step_params params{};
    params.struct_size = sizeof params;
    params.space = options_.host_space;
    params.layer_begin = piece.layer;
    params.n_items = 1;
    params.items = &item;
    params.k = host_tensor(slots_[at], 0, rows.k_bytes, dtype_out_);
    params.v = host_tensor(slots_[at], rows.v_at, rows.v_bytes, dtype_out_);
    params.deadline_ns = copy.deadline_ns == UINT64_MAX ? 0 : copy.deadline_ns;
    return kvm_append_async(queue, &params, user_data);
  };
  const uint64_t n_tokens = copy.end - copy.begin;
  KVM_TRY(run(n_tokens, StreamStep{driver, &slots_, copy.deadline_ns, read},
              HostStep{&requests_, copy.deadline_ns, append}));
  client_->count_stored(row_bytes(n_tokens, dtype_out_));
  return Status::ok();
}

Result<kvm_seq_id> DeviceBridge::load(const BridgeCopy& copy, device::Stream stream) {
  BridgeCopy of = copy;
  // As in store; and of a prefix, it is a use that counts.
  KVM_TRY(answer(kvm_seq_fork(&host_, copy.source, KVM_POSITION_END, &of.source)));
  const Undo forgetting([&] { (void)kvm_seq_free(&host_, of.source); });
  KVM_TRY_ASSIGN(const kvm_seq_info source, host_seq_info(&host_, of.source));
  KVM_TRY_ASSIGN(of.end, end_of(copy, source.n_tokens_min));
  if (source.space != options_.host_space) {
    return invalid("the source is of space " + number(source.space) + "; the bridge is of " +
                   number(options_.host_space));
  }
  KVM_TRY_ASSIGN(const kvm_seq_id to, make_here(copy.onto, of.begin));
  Undo freeing([&] { free_here(to); });
  const Undo ending([this] { end_copy(); });  // before the others
  KVM_TRY(copy_in(of, to, stream));
  // A service that closes the connection clears the arena, and may have while rows were in it.
  KVM_TRY(host_seq_info(&host_, of.source).status());
  freeing.dismiss();
  return to;
}

Status DeviceBridge::copy_in(const BridgeCopy& copy, kvm_seq_id to, device::Stream stream) {
  device::Driver* const driver = client_->driver();
  const auto read = [&](const Piece& piece, uint32_t at, kvm_queue* queue, uint64_t user_data) {
    const Rows rows = rows_of(piece, dtype_in_);
    kvm_read_params params{};
    params.struct_size = sizeof params;
    params.seq = copy.source;
    params.layer = piece.layer;
    params.position = copy.begin + piece.first;
    params.n_tokens = piece.n_tokens;
    params.k = host_tensor(slots_[at], 0, rows.k_bytes, dtype_in_);
    params.v = host_tensor(slots_[at], rows.v_at, rows.v_bytes, dtype_in_);
    return kvm_read_async(queue, &params, user_data);
  };
  const auto append = [&](const Piece& piece, uint32_t at) -> Status {
    const Slot& slot = slots_[at];
    const Rows rows = rows_of(piece, dtype_in_);
    KVM_TRY(driver->copy(on_device_ + slot.at, in_arena_ + slot.at, rows.n_bytes(), stream_));
    KVM_TRY(client_->with_batch(batch_.get(), [&](device::Batch& of) {
      return of.append_part(piece.layer, static_cast<uint32_t>(piece.first), piece.n_tokens,
                            device_tensor(slot, 0, rows.k_bytes, dtype_in_),
                            device_tensor(slot, rows.v_at, rows.v_bytes, dtype_in_), stream_);
    }));
    return driver->record(slot.event.get(), stream_);
  };
  const uint64_t n_tokens = copy.end - copy.begin;
  if (n_tokens > kMaxLoadTokens) {
    return Status(KVM_ERR_LIMIT, "a load of " + number(n_tokens) + " tokens; at most " +
                                     number(kMaxLoadTokens) + " are allowed");
  }
  // All pages at once: what there is no room for is known before anything crosses, and nothing is
  // enqueued on the caller's stream later.
  KVM_TRY(update(to, n_tokens, stream));
  KVM_TRY(run(n_tokens, HostStep{&requests_, copy.deadline_ns, read},
              StreamStep{driver, &slots_, copy.deadline_ns, append}));
  client_->count_loaded(row_bytes(n_tokens, dtype_in_));
  return Status::ok();
}

}  // namespace kvm::client
