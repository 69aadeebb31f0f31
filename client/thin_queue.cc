// SPDX-License-Identifier: Apache-2.0
#include "client/thin_queue.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/limits.h"
#include "base/spin.h"
#include "base/undo.h"
#include "ipc/shared_words.h"

namespace kvm::client {

namespace {

using ipc::Opcode;

// How long a wait sleeps or spins before it looks whether the daemon is still there: nobody wakes
// a futex of a dead process. The socket tells only after the system has taken the process's memory
// apart, which takes a while where it held much, so there is not much to add to that.
constexpr uint64_t kLivenessSliceNs = 40'000'000;
constexpr uint32_t kLooksPerClock = 16;
// A queue that is destroyed asks after so long whether the daemon, which has not answered its
// requests, answers anything.
constexpr uint64_t kProbeNs = 100'000'000;
// A wait that is expected to end at some time may end earlier or later by this part of it ...
constexpr uint64_t kWaitVariation = 32;
// ... and who sleeps until then wakes up so much later.
constexpr uint64_t kWakeNs = 60'000;

constexpr uint64_t kCancelBit = 1u << 8;
constexpr uint32_t kSerialShift = 9;
static_assert(kMaxOutstanding <= kCancelBit);

// A sentence is worth no failure of its own.
void say(std::string_view text, std::string* sentence) {
  try {
    sentence->assign(text);
  } catch (const std::bad_alloc&) {
    sentence->clear();
  }
}

constexpr uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Readable when the eventfd is, or when the peer of the socket is gone; closed where the system has
// no more descriptors.
ipc::Fd watch(int eventfd, int socket) {
  ipc::Fd both(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event on_eventfd{.events = EPOLLIN, .data = {}};
  epoll_event on_socket{.events = EPOLLRDHUP, .data = {}};
  if (both.is_open() && (::epoll_ctl(both.get(), EPOLL_CTL_ADD, eventfd, &on_eventfd) != 0 ||
                         ::epoll_ctl(both.get(), EPOLL_CTL_ADD, socket, &on_socket) != 0)) {
    both.reset();
  }
  return both;
}

// Copies the elements of `now` that are not those of `before`, and writes no others: somebody else
// may be writing them. Blocks in which all or none have changed, which is nearly all of them, are
// compared and copied as a whole.
template <typename Element>
void copy_changed(const uint8_t* now, const uint8_t* before, uint64_t size_bytes, uint8_t* to) {
  constexpr uint64_t kBlockBytes = 64;
  using Block = std::array<Element, kBlockBytes / sizeof(Element)>;
  const uint64_t end = size_bytes - size_bytes % sizeof(Element);
  uint64_t at = 0;
  const auto copy_until = [&](uint64_t stop) {
    for (; at < stop; at += sizeof(Element)) {
      if (std::memcmp(now + at, before + at, sizeof(Element)) != 0) {
        std::memcpy(to + at, now + at, sizeof(Element));
      }
    }
  };
  while (end - at >= kBlockBytes) {
    Block a;
    Block b;
    std::memcpy(&a, now + at, kBlockBytes);
    std::memcpy(&b, before + at, kBlockBytes);
    Element n_changed = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      n_changed = static_cast<Element>(n_changed + (a[i] != b[i] ? 1 : 0));
    }
    if (n_changed == a.size()) {
      std::memcpy(to + at, &a, kBlockBytes);
      at += kBlockBytes;
    } else if (n_changed == 0) {
      at += kBlockBytes;
    } else {
      copy_until(at + kBlockBytes);
    }
  }
  copy_until(end);
}

}  // namespace

constexpr uint64_t kInlineBlockBytes =
    round_up(sizeof(ipc::StepBlock) + 64 * sizeof(kvm_item), ipc::kBlockAlign);
constexpr uint64_t kSlotBytes =
    kInlineBlockBytes + sizeof(ipc::CancelBlock) + sizeof(ipc::ResultBlock) * 2;

Result<std::unique_ptr<ThinQueue>> ThinQueue::create(std::shared_ptr<Connection> connection,
                                                     LostSeqs lost, uint32_t n_entries,
                                                     uint64_t spin_ns) {
  KVM_TRY_ASSIGN(QueueMemory memory, connection->create_queue(n_entries));
  Undo destroying_queue([&, id = memory.queue] { connection->destroy_queue(id); });
  KVM_TRY_ASSIGN(SharedArena arena, connection->create_arena(n_entries * kSlotBytes));
  Undo destroying_arena([&, region = arena.region] { connection->destroy_arena(region); });
  std::unique_ptr<ThinQueue> queue(new ThinQueue(connection, std::move(memory), std::move(arena),
                                                 std::move(lost), n_entries, spin_ns));
  destroying_queue.dismiss();
  destroying_arena.dismiss();
  return queue;
}

ThinQueue::ThinQueue(std::shared_ptr<Connection> connection, QueueMemory memory, SharedArena arena,
                     LostSeqs lost, uint32_t n_entries, uint64_t spin_ns)
    : connection_(std::move(connection)),
      memory_(std::move(memory)),
      arena_(std::move(arena)),
      lost_(std::move(lost)),
      n_entries_(n_entries),
      spin_ns_(spin_ns),
      requests_(reinterpret_cast<ipc::ClientRegion*>(memory_.client_region.data()),
                reinterpret_cast<const ipc::DaemonRegion*>(memory_.daemon_region.data())),
      completions_(reinterpret_cast<ipc::ClientRegion*>(memory_.client_region.data()),
                   reinterpret_cast<const ipc::DaemonRegion*>(memory_.daemon_region.data())),
      staging_(connection_),
      slots_(n_entries),
      sentences_(n_entries) {
  // So that nothing fails between an entry in the ring and the note that it is there.
  staged_.reserve(n_entries);
  free_slots_.reserve(n_entries);
  ready_.reserve(n_entries);
  // Low slots are used first: their blocks are the ones in cache.
  for (uint32_t i = n_entries; i > 0; --i) {
    free_slots_.push_back(i - 1);
  }
}

ThinQueue::~ThinQueue() {
  // Staged requests were never seen by the daemon. Submitted ones may still read and write staging
  // memory: they are waited for.
  requests_.discard_staged();
  for (Slot& slot : slots_) {
    if (slot.state == SlotState::kStaged) {
      release_pieces(&slot);
      free_slot(&slot);
    }
  }
  staged_.clear();
  try {
    for (Slot& slot : slots_) {
      if (slot.state == SlotState::kSubmitted) {
        (void)cancel(slot.user_data);
      }
    }
    std::vector<kvm_seq_id> made;
    made.reserve(n_entries_);
    finish_submitted(&made);
    free_untaken(made);
  } catch (const std::bad_alloc&) {
    // They cannot be waited for, and must not be written to any more.
    connection_->close();
  }
  // All of these together have the time of one call.
  const uint64_t deadline_ns = add_saturating(now_ns(), connection_->timeout_ns());
  staging_.close(deadline_ns);
  connection_->destroy_queue(memory_.queue, time_left(deadline_ns));
  connection_->destroy_arena(arena_.region, time_left(deadline_ns));
}

// Waits for requests as long as they take, but not for a daemon that answers nothing at all for the
// time of one call.
void ThinQueue::finish_submitted(std::vector<kvm_seq_id>* made) {
  kvm_completion completion;
  uint64_t deadline_ns = add_saturating(now_ns(), connection_->timeout_ns());
  while (n_submitted_ + n_ready() > 0) {
    const auto taken = take(&completion, 1, 1, std::min(kProbeNs, time_left(deadline_ns)), {});
    if (!taken.is_ok()) {
      return;
    }
    if (taken.value() != 0 && completion.seq != 0) {
      made->push_back(completion.seq);
    }
    if (taken.value() != 0 || connection_->is_answering(time_left(deadline_ns))) {
      deadline_ns = add_saturating(now_ns(), connection_->timeout_ns());
    } else {
      // The caller may use its buffers again when this returns. Should the daemon wake, it must not
      // begin what it has not begun, and nobody may take what it then writes for a result.
      connection_->close();
    }
  }
}

// Slots stay in use until their cancel requests are answered, too: waits for that as above.
// REQUIRES: nothing is outstanding.
void ThinQueue::finish_cancels() {
  uint64_t deadline_ns = add_saturating(now_ns(), connection_->timeout_ns());
  while (free_slots_.size() < n_entries_) {
    const size_t n_free = free_slots_.size();
    const uint64_t slice_ns = std::min(kProbeNs, time_left(deadline_ns));
    await_completion(add_saturating(now_ns(), slice_ns), slice_ns);
    if (const Status drained = drain_to_ready(); !drained.is_ok()) {
      is_broken_ = true;
      connection_->close();
      fail_outstanding(drained);
    } else if (connection_->look_for_hangup()) {
      fail_outstanding(connection_->down_status());
    } else if (free_slots_.size() > n_free || connection_->is_answering(time_left(deadline_ns))) {
      deadline_ns = add_saturating(now_ns(), connection_->timeout_ns());
    } else {
      connection_->close();
    }
  }
}

// Nobody knows the sequences that requests have made whose completions nobody took.
void ThinQueue::free_untaken(const std::vector<kvm_seq_id>& seqs) {
  std::vector<kvm_seq_id> none;
  for (const kvm_seq_id seq : seqs) {
    SeqRequest call;
    call.verb = SeqVerb::kFree;
    call.seq = seq;
    if (stage_seq(call, 0).code() == KVM_ERR_AGAIN) {
      // Once all is answered, all slots are free and the daemon has emptied the ring.
      (void)submit();
      finish_submitted(&none);
      finish_cancels();
      (void)stage_seq(call, 0);
    }
  }
  if (!seqs.empty()) {
    (void)submit();
    finish_submitted(&none);
  }
}

uint64_t ThinQueue::block_offset(uint32_t slot) const { return slot * kSlotBytes; }
uint64_t ThinQueue::cancel_offset(uint32_t slot) const {
  return slot * kSlotBytes + kInlineBlockBytes;
}
// The second result block is that of the cancel request.
uint64_t ThinQueue::result_offset(uint32_t slot) const {
  return cancel_offset(slot) + sizeof(ipc::CancelBlock);
}

Result<uint32_t> ThinQueue::claim_slot(Opcode opcode, uint64_t user_data) {
  if (connection_->is_down()) [[unlikely]] {
    return connection_->down_status();
  }
  if (free_slots_.empty()) [[unlikely]] {
    KVM_TRY(drain_to_ready());
  }
  if (free_slots_.empty() || n_outstanding() >= n_entries_) [[unlikely]] {
    return Status(KVM_ERR_AGAIN, "the queue holds " + std::to_string(n_outstanding()) +
                                     " requests of at most " + std::to_string(n_entries_) +
                                     ": take completions first");
  }
  const uint32_t index = free_slots_.back();
  free_slots_.pop_back();
  Slot& slot = slots_[index];
  slot.serial = ++last_serial_;
  slot.user_data = user_data;
  slot.opcode = opcode;
  slot.state = SlotState::kStaged;
  return index;
}

void ThinQueue::free_slot(Slot* slot) {
  slot->state = SlotState::kFree;
  slot->place = OwnSeqs::Place();
  free_slots_.push_back(static_cast<uint32_t>(slot - slots_.data()));
}

void ThinQueue::release_pieces(Slot* slot) {
  for (uint32_t i = 0; i < slot->n_pieces; ++i) {
    staging_.free(slot->pieces[i].memory);
    slot->pieces[i].before.reset();
  }
  slot->n_pieces = 0;
}

// HOST memory is copied through a staging piece. Outputs are copied in as well: requests may write
// some rows only, and how long a row is only the service knows, so the copy back looks at what has
// changed. `before` is copied on, lest others change the caller's bytes between two copies of them.
Status ThinQueue::stage_tensor(const Tensor& tensor, Use use, Slot* slot, ipc::TensorRef* out) {
  if (tensor.data == nullptr) {
    return Status::ok();
  }
  *out =
      ipc::TensorRef{tensor.region,       tensor.dtype,      tensor.offset,     tensor.size_bytes,
                     tensor.stride_layer, tensor.stride_row, tensor.stride_head};
  if (tensor.region != 0) {
    return Status::ok();
  }
  KVM_TRY_ASSIGN(const StagingPool::Piece memory, staging_.allocate(tensor.size_bytes));
  Piece& piece = slot->pieces[slot->n_pieces++];
  piece = Piece{memory, use == Use::kInput ? nullptr : tensor.data, nullptr, 0};
  const uint8_t* from = tensor.data;
  if (use == Use::kOutput) {
    piece.before = std::make_unique_for_overwrite<uint8_t[]>(tensor.size_bytes);
    piece.element_bytes = dtype_size_bytes(static_cast<Dtype>(tensor.dtype));
    std::memcpy(piece.before.get(), tensor.data, tensor.size_bytes);
    from = piece.before.get();
  }
  ipc::copy_to_shared(memory.data, from, tensor.size_bytes);
  out->region = memory.region;
  out->offset = memory.offset;
  return Status::ok();
}

void ThinQueue::copy_back(const Piece& piece) {
  const uint64_t size_bytes = piece.memory.size_bytes;
  if (piece.before == nullptr) {
    std::memcpy(piece.host, piece.memory.data, size_bytes);
  } else if (piece.element_bytes == sizeof(uint32_t)) {
    copy_changed<uint32_t>(piece.memory.data, piece.before.get(), size_bytes, piece.host);
  } else {
    copy_changed<uint16_t>(piece.memory.data, piece.before.get(), size_bytes, piece.host);
  }
}

// A read writes all rows that there are, so that packed ones have no gaps. Those of a step may be
// the rows of some items in the buffer of all.
ThinQueue::Use ThinQueue::use_of_read(const Tensor& tensor, uint64_t n_tokens) {
  const bool is_packed = tensor.stride_row == 0 && tensor.stride_head == 0;
  const bool is_trimmed = n_tokens != 0 && tensor.size_bytes % n_tokens == 0;
  return is_packed && is_trimmed ? Use::kDenseOutput : Use::kOutput;
}

Status ThinQueue::push(uint32_t index, ipc::RequestEntry entry) {
  const Slot& slot = slots_[index];
  entry.opcode = static_cast<uint8_t>(slot.opcode);
  entry.version = ipc::kBlockVersion;
  entry.user_data = slot.serial << kSerialShift | index;
  if (slot.opcode != Opcode::kNop) {
    entry.result_region = arena_.region;
    entry.result_offset = result_offset(index);
  }
  KVM_TRY_ASSIGN(const uint32_t room, requests_.room());
  if (room == 0) {
    return Status(KVM_ERR_AGAIN, "the request ring is full: the daemon has not taken requests yet");
  }
  requests_.stage(entry);
  staged_.push_back(index);
  return Status::ok();
}

template <typename Block>
Status ThinQueue::push_block(uint32_t index, const Block& block) {
  static_assert(sizeof(Block) <= kInlineBlockBytes);
  ipc::RequestEntry entry{};
  entry.region = arena_.region;
  entry.block_offset = block_offset(index);
  entry.block_length = sizeof(Block);
  uint8_t* to = arena_.mapping.data() + entry.block_offset;
  ipc::copy_to_shared(to, &block, sizeof(Block));
  slots_[index].block = to;
  return push(index, entry);
}

// A request that could not be staged leaves no trace.
template <typename Fill>
Status ThinQueue::stage(Opcode opcode, uint64_t user_data, Fill&& fill) {
  KVM_TRY_ASSIGN(const uint32_t index, claim_slot(opcode, user_data));
  Slot& slot = slots_[index];
  Status status;
  try {
    status = fill(index, &slot);
  } catch (const std::bad_alloc&) {
    status = Status::fixed(KVM_ERR_NO_MEMORY, "the process is out of memory");
  }
  if (!status.is_ok()) [[unlikely]] {
    release_pieces(&slot);
    free_slot(&slot);
  }
  return status;
}

Status ThinQueue::stage_nop(uint64_t user_data) {
  return stage(Opcode::kNop, user_data,
               [&](uint32_t index, Slot*) { return push(index, ipc::RequestEntry{}); });
}

Status ThinQueue::stage_step_tensors(const StepCall& call, Slot* slot, ipc::StepBlock* block) {
  KVM_TRY(stage_tensor(call.k, Use::kInput, slot, &block->k));
  KVM_TRY(stage_tensor(call.v, Use::kInput, slot, &block->v));
  KVM_TRY(stage_tensor(call.q, Use::kInput, slot, &block->q));
  KVM_TRY(stage_tensor(call.o, Use::kOutput, slot, &block->o));
  KVM_TRY(stage_tensor(call.lse, Use::kOutput, slot, &block->lse));
  return stage_tensor(call.err, Use::kOutput, slot, &block->err);
}

// Where the block of a slot goes, in the queue's arena if it fits.
Result<uint8_t*> ThinQueue::block_memory(uint32_t index, uint64_t length,
                                         ipc::RequestEntry* entry) {
  entry->block_length = static_cast<uint32_t>(length);
  Slot& slot = slots_[index];
  uint8_t* to = nullptr;
  if (length <= kInlineBlockBytes) {
    entry->region = arena_.region;
    entry->block_offset = block_offset(index);
    to = arena_.mapping.data() + entry->block_offset;
  } else {
    KVM_TRY_ASSIGN(const StagingPool::Piece memory, staging_.allocate(length));
    slot.pieces[slot.n_pieces++] = Piece{memory, nullptr, nullptr, 0};
    entry->region = memory.region;
    entry->block_offset = memory.offset;
    to = memory.data;
  }
  slot.block = to;
  return to;
}

Status ThinQueue::write_step_block(const StepCall& call, const ipc::StepBlock& head, uint32_t index,
                                   ipc::RequestEntry* entry) {
  const kvm_step_params& params = *call.params;
  const uint64_t items_bytes = uint64_t{params.n_items} * sizeof(kvm_item);
  const uint64_t ranges_bytes = uint64_t{params.n_ranges} * sizeof(kvm_range);
  const uint64_t tree_bytes = uint64_t{params.n_tree_words} * sizeof(uint64_t);
  const uint64_t length = sizeof(head) + items_bytes + ranges_bytes + tree_bytes;
  KVM_TRY_ASSIGN(uint8_t * to, block_memory(index, length, entry));
  ipc::copy_to_shared(to, &head, sizeof(head));
  to += sizeof(head);
  ipc::copy_to_shared(to, params.items, items_bytes);
  if (ranges_bytes != 0) {
    ipc::copy_to_shared(to + items_bytes, params.ranges, ranges_bytes);
  }
  if (tree_bytes != 0) {
    ipc::copy_to_shared(to + items_bytes + ranges_bytes, params.tree_mask, tree_bytes);
  }
  return Status::ok();
}

Status ThinQueue::stage_step(const StepCall& call, uint64_t user_data) {
  const kvm_step_params& params = *call.params;
  if ((params.flags & KVM_STEP_NO_STATISTICS) != 0) {
    KVM_TRY(connection_->need_minor(3, "KVM_STEP_NO_STATISTICS"));
  }
  const auto any_has = [&](uint32_t flag) {
    return std::any_of(params.items, params.items + params.n_items,
                       [flag](const kvm_item& item) { return (item.flags & flag) != 0; });
  };
  if (any_has(KVM_ITEM_LAST_LAYER)) {
    KVM_TRY(connection_->need_minor(5, "KVM_ITEM_LAST_LAYER"));
  }
  if (any_has(KVM_ITEM_PROMPT_END)) {
    KVM_TRY(connection_->need_minor(7, "KVM_ITEM_PROMPT_END"));
  }
  if (any_has(KVM_ITEM_RESTORE)) {
    KVM_TRY(connection_->need_minor(12, "KVM_ITEM_RESTORE"));
  }
  ipc::StepBlock head{};
  head.verbs = (call.append ? ipc::kStepAppend : 0) | (call.attend ? ipc::kStepAttend : 0);
  head.flags = params.flags;
  head.space = params.space;
  head.layer_begin = params.layer_begin;
  head.n_layers = params.n_layers;
  head.n_items = params.n_items;
  head.n_ranges = params.n_ranges;
  head.n_tree_words = params.n_tree_words;
  head.mode = params.mode;
  head.proposal = params.proposal;
  head.scale = params.scale;
  head.eps = params.eps;
  head.delta = params.delta;
  head.budget = params.budget;
  head.seed = params.seed;
  head.deadline_ns = params.deadline_ns;
  return stage(Opcode::kStep, user_data, [&](uint32_t index, Slot* slot) -> Status {
    ipc::RequestEntry entry{};
    KVM_TRY(stage_step_tensors(call, slot, &head));
    KVM_TRY(write_step_block(call, head, index, &entry));
    return push(index, entry);
  });
}

Status ThinQueue::stage_read(const ReadCall& call, uint64_t user_data) {
  ipc::ReadBlock block{};
  block.seq = call.params->seq;
  block.layer = call.params->layer;
  block.position = call.params->position;
  block.n_tokens = call.params->n_tokens;
  return stage(Opcode::kRead, user_data, [&](uint32_t index, Slot* slot) -> Status {
    const uint64_t n_tokens = block.n_tokens;
    KVM_TRY(stage_tensor(call.k, use_of_read(call.k, n_tokens), slot, &block.k));
    KVM_TRY(stage_tensor(call.v, use_of_read(call.v, n_tokens), slot, &block.v));
    return push_block(index, block);
  });
}

Status ThinQueue::stage_observe(const ObserveCall& call, uint64_t user_data) {
  const kvm_observe_params& params = *call.params;
  ipc::ObserveBlock block{};
  block.seq = params.seq;
  block.layer = params.layer;
  block.n_rows = params.n_rows;
  block.query_position = params.query_position;
  block.column_begin = params.column_begin;
  block.n_columns = params.n_columns;
  return stage(Opcode::kObserve, user_data, [&](uint32_t index, Slot* slot) -> Status {
    KVM_TRY(stage_tensor(call.q, Use::kInput, slot, &block.q));
    KVM_TRY(stage_tensor(call.column_sums, Use::kInput, slot, &block.column_sums));
    return push_block(index, block);
  });
}

Status ThinQueue::stage_seq(const SeqRequest& call, uint64_t user_data) {
  if (call.verb == SeqVerb::kPrefetch) {
    KVM_TRY(connection_->need_minor(8, "kvm_seq_prefetch"));
  } else if (call.verb == SeqVerb::kSetPriority) {
    KVM_TRY(connection_->need_minor(11, "kvm_seq_set_priority"));
  } else if (call.verb == SeqVerb::kDrop) {
    KVM_TRY(connection_->need_minor(12, "kvm_seq_drop"));
  }
  if (!call.hashes.empty()) {
    KVM_TRY(connection_->need_minor(9, "kvm_prefix_publish"));
  } else if (call.verb == SeqVerb::kPublish || call.verb == SeqVerb::kTake) {
    KVM_TRY(connection_->need_minor(
        4, call.verb == SeqVerb::kTake ? "kvm_seq_take" : "kvm_seq_publish"));
  }
  ipc::SeqBlock block{};
  block.verb = static_cast<uint32_t>(call.verb);
  block.flags = call.flags;
  block.space = call.space;
  block.seq = call.seq;
  block.n_tokens = call.n_tokens;
  block.begin = call.range.begin;
  block.end = call.range.end;
  block.keep_ns = call.range.keep_ns;
  block.priority = call.range.priority;
  const bool adds =
      call.verb == SeqVerb::kCreate || call.verb == SeqVerb::kFork || call.verb == SeqVerb::kTake;
  return stage(Opcode::kSeq, user_data, [&](uint32_t index, Slot* slot) {
    slot->place = adds ? connection_->seqs().prepare() : OwnSeqs::Place();
    return call.hashes.empty() ? push_block(index, block) : push_prefix(index, block, call.hashes);
  });
}

Status ThinQueue::push_prefix(uint32_t index, const ipc::SeqBlock& block,
                              std::span<const kvm_prefix_hash> hashes) {
  ipc::RequestEntry entry{};
  KVM_TRY_ASSIGN(uint8_t* const to,
                 block_memory(index, sizeof(block) + hashes.size_bytes(), &entry));
  ipc::copy_to_shared(to, &block, sizeof(block));
  ipc::copy_to_shared(to + sizeof(block), hashes.data(), hashes.size_bytes());
  return push(index, entry);
}

Status ThinQueue::stage_snapshot(const SnapshotRequest& call, uint64_t user_data) {
  KVM_TRY(connection_->need_minor(8, "a snapshot"));
  ipc::SnapshotBlock block{};
  block.verb = static_cast<uint32_t>(call.verb);
  block.flags = call.flags;
  block.space = call.space;
  block.seq = call.seq;
  block.name_bytes = static_cast<uint32_t>(call.name.copy(block.name, sizeof(block.name) - 1));
  return stage(Opcode::kSnapshot, user_data, [&](uint32_t index, Slot* slot) {
    slot->place =
        call.verb == SnapshotVerb::kLoad ? connection_->seqs().prepare() : OwnSeqs::Place();
    return push_block(index, block);
  });
}

Status ThinQueue::submit() {
  if (connection_->is_down()) [[unlikely]] {
    fail_outstanding(connection_->down_status());
    return connection_->down_status();
  }
  for (const uint32_t index : staged_) {
    slots_[index].state = SlotState::kSubmitted;
  }
  n_submitted_ += static_cast<uint32_t>(staged_.size());
  staged_.clear();
  if (requests_.publish()) {
    connection_->ring();
  }
  return Status::ok();
}

Status ThinQueue::cancel(uint64_t user_data) {
  bool found = false;
  for (uint32_t index = 0; index < n_entries_; ++index) {
    Slot& slot = slots_[index];
    const bool outstanding =
        slot.state == SlotState::kStaged || slot.state == SlotState::kSubmitted;
    if (!outstanding || slot.user_data != user_data) {
      continue;
    }
    found = true;
    if (slot.cancel_pending) {
      continue;
    }
    KVM_TRY_ASSIGN(const uint32_t room, requests_.room());
    if (room == 0) {
      KVM_TRY(submit());
      return Status(KVM_ERR_AGAIN,
                    "the request ring is full: the daemon has not taken requests yet; try again");
    }
    ipc::CancelBlock block{};
    block.user_data = slot.serial << kSerialShift | index;
    ipc::copy_to_shared(arena_.mapping.data() + cancel_offset(index), &block, sizeof(block));
    ipc::RequestEntry entry{};
    entry.opcode = static_cast<uint8_t>(Opcode::kCancel);
    entry.version = ipc::kBlockVersion;
    entry.user_data = block.user_data | kCancelBit;
    entry.region = arena_.region;
    entry.block_offset = cancel_offset(index);
    entry.block_length = sizeof(block);
    entry.result_region = arena_.region;
    entry.result_offset = result_offset(index) + sizeof(ipc::ResultBlock);
    requests_.stage(entry);
    slot.cancel_pending = true;
  }
  if (!found) {
    KVM_TRY(check_open());
    return Status(KVM_ERR_NOT_FOUND, "no request with user_data " + std::to_string(user_data) +
                                         " is outstanding on this queue");
  }
  return submit();
}

Status ThinQueue::check_open() {
  return connection_->look_for_hangup() ? connection_->down_status() : Status::ok();
}

bool ThinQueue::names_lost_seq(const Slot& slot) const {
  if (lost_ == nullptr || lost_->empty()) {
    return false;
  }
  // The blocks are our own, as we wrote them.
  switch (slot.opcode) {
    case Opcode::kStep: {
      const auto* head = reinterpret_cast<const ipc::StepBlock*>(slot.block);
      const auto* items = reinterpret_cast<const kvm_item*>(slot.block + sizeof(ipc::StepBlock));
      return std::any_of(items, items + head->n_items,
                         [this](const kvm_item& item) { return lost_->contains(item.seq); });
    }
    case Opcode::kRead:
      return lost_->contains(reinterpret_cast<const ipc::ReadBlock*>(slot.block)->seq);
    case Opcode::kObserve:
      return lost_->contains(reinterpret_cast<const ipc::ObserveBlock*>(slot.block)->seq);
    case Opcode::kSeq:
      return lost_->contains(reinterpret_cast<const ipc::SeqBlock*>(slot.block)->seq);
    case Opcode::kSnapshot:
      return lost_->contains(reinterpret_cast<const ipc::SnapshotBlock*>(slot.block)->seq);
    case Opcode::kNop:
    case Opcode::kCancel:
      break;
  }
  return false;
}

// Takes one entry of the ring apart. Fails: PROTOCOL (no such request).
Status ThinQueue::finish(const ipc::CompletionEntry& entry, kvm_completion* out,
                         std::string* sentence, bool* is_cancel) {
  const uint64_t index = entry.user_data & (kCancelBit - 1);
  *is_cancel = (entry.user_data & kCancelBit) != 0;
  if (index >= n_entries_ || slots_[index].serial != entry.user_data >> kSerialShift ||
      (*is_cancel ? !slots_[index].cancel_pending : slots_[index].state != SlotState::kSubmitted)) {
    return Status(KVM_ERR_PROTOCOL, "the daemon answered request " +
                                        std::to_string(entry.user_data) +
                                        ", which is not outstanding");
  }
  Slot& slot = slots_[index];
  if (*is_cancel) {
    slot.cancel_pending = false;
    if (slot.state == SlotState::kAnswered) {
      free_slot(&slot);
    }
    return Status::ok();
  }
  *out = {};
  out->user_data = slot.user_data;
  out->status = entry.status;
  out->mode = entry.mode;
  out->keys_present = entry.keys_present;
  out->keys_read = entry.keys_read;
  out->bytes_read = entry.bytes_read;
  out->service_ns = entry.service_ns;
  out->compute_ns = entry.compute_ns;
  out->err_max = entry.err_max;
  out->n_exact = entry.n_exact;
  out->message = "";
  const auto* result = reinterpret_cast<const ipc::ResultBlock*>(
      arena_.mapping.data() + result_offset(static_cast<uint32_t>(index)));
  // Also of a step that fails: ACCURACY comes with an answer.
  out->n_not_finite =
      counts_not_finite() && slot.opcode == Opcode::kStep ? result->n_not_finite : 0;
  if (entry.status != KVM_OK) {
    if (slot.opcode != Opcode::kNop) {
      say({result->message, ::strnlen(result->message, sizeof(result->message))}, sentence);
    }
    const bool unknown = entry.status == KVM_ERR_STALE || entry.status == KVM_ERR_NOT_FOUND;
    if (unknown && names_lost_seq(slot)) {
      out->status = KVM_ERR_LOST;
      say("the sequence was lost with the connection that made it", sentence);
    }
  } else {
    bool has_result = slot.opcode == Opcode::kSeq;
    if (slot.opcode == Opcode::kSnapshot && !slot.place.empty()) {
      has_result = true;
      out->seq = result->seq;
      connection_->seqs().add(std::move(slot.place), result->seq);
    } else if (has_result) {
      note_seq(*reinterpret_cast<const ipc::SeqBlock*>(slot.block), *result, &slot, out);
    }
    for (uint32_t i = 0; i < slot.n_pieces; ++i) {
      const Piece& piece = slot.pieces[i];
      if (piece.host != nullptr) {
        copy_back(piece);
        has_result = true;
      }
    }
    // A daemon that closes a client hangs up, and then clears its arenas: while it has not hung up,
    // what was copied is what it wrote.
    if (has_result && connection_->look_for_hangup()) {
      const Status status = connection_->down_status();
      out->status = status.code();
      out->seq = 0;
      say(status.message(), sentence);
    }
  }
  release_pieces(&slot);
  --n_submitted_;
  slot.state = SlotState::kAnswered;
  if (!slot.cancel_pending) {
    free_slot(&slot);
  }
  return Status::ok();
}

void ThinQueue::note_seq(const ipc::SeqBlock& call, const ipc::ResultBlock& result, Slot* slot,
                         kvm_completion* out) {
  const auto verb = static_cast<SeqVerb>(call.verb);
  if (!slot->place.empty() && verb == SeqVerb::kTake) {
    connection_->seqs().add(std::move(slot->place), call.seq);
  } else if (!slot->place.empty()) {
    out->seq = result.seq;
    connection_->seqs().add(std::move(slot->place), result.seq);
  } else if (verb == SeqVerb::kFree) {
    connection_->seqs().erase(call.seq);
  }
}

// Moves completions from the ring to out, from *n on, which counts them.
Status ThinQueue::drain(kvm_completion* out, uint32_t n_max, uint32_t* n) {
  while (*n < n_max && !is_broken_) {
    std::array<ipc::CompletionEntry, 16> entries;
    const uint32_t wanted = std::min<uint32_t>(n_max - *n, entries.size());
    KVM_TRY_ASSIGN(const uint32_t taken, completions_.take(entries.data(), wanted));
    for (uint32_t i = 0; i < taken; ++i) {
      bool is_cancel = false;
      std::string sentence;
      KVM_TRY(finish(entries[i], &out[*n], &sentence, &is_cancel));
      if (!is_cancel) {
        out[(*n)++].message = sentences_.keep(sentence);
      }
    }
    if (taken < wanted) {
      break;
    }
  }
  return Status::ok();
}

// Their sentences stay with them: those of the last call that took some are still the caller's.
Status ThinQueue::drain_to_ready() {
  ipc::CompletionEntry entry;
  while (!is_broken_) {
    KVM_TRY_ASSIGN(const uint32_t n, completions_.take(&entry, 1));
    if (n == 0) {
      break;
    }
    Ready ready;
    bool is_cancel = false;
    KVM_TRY(finish(entry, &ready.completion, &ready.sentence, &is_cancel));
    if (!is_cancel) {
      ready_.push_back(std::move(ready));
    }
  }
  return Status::ok();
}

uint32_t ThinQueue::take_ready(kvm_completion* out, uint32_t n_max) {
  const auto n = static_cast<uint32_t>(std::min<size_t>(n_max, ready_.size()));
  for (uint32_t i = 0; i < n; ++i) {
    out[i] = ready_[i].completion;
    out[i].message = sentences_.keep(ready_[i].sentence);
  }
  ready_.erase(ready_.begin(), ready_.begin() + n);
  return n;
}

// Every outstanding request completes with `status`; what the ring still holds comes first.
void ThinQueue::fail_outstanding(const Status& status) {
  if (status.code() == KVM_ERR_DISCONNECTED) {
    (void)drain_to_ready();
  }
  for (Slot& slot : slots_) {
    if (slot.state == SlotState::kStaged || slot.state == SlotState::kSubmitted) {
      Ready& failed = ready_.emplace_back();
      failed.completion = {};
      failed.completion.user_data = slot.user_data;
      failed.completion.status = status.code();
      failed.completion.err_max = std::numeric_limits<float>::quiet_NaN();
      say(status.message(), &failed.sentence);
    }
    if (slot.state != SlotState::kFree) {
      release_pieces(&slot);
      slot.cancel_pending = false;
      free_slot(&slot);
    }
  }
  staged_.clear();
  n_submitted_ = 0;
}

// Says whether there is something. False, before the end: others want the core.
bool ThinQueue::spin_until(uint64_t end_ns) {
  const bool is_patient = spin_ns_ != UINT64_MAX;
  // On a machine with few cores one of kvmd's threads may have had this one, for the answer.
  SharedSpin spin(&share_, 1);
  do {
    for (uint32_t i = 0; i < kLooksPerClock; ++i) {
      if (completions_.is_ready()) {
        spin.finish();
        return true;
      }
      if (!spin.relax() && is_patient) {
        return false;
      }
    }
  } while (now_ns() < end_ns);
  spin.finish();
  return false;
}

// Waits until the ring has something or the deadline has passed; returns early to have the
// connection looked at. Short waits spin. Where waits have been longer than spinning pays, this one
// sleeps until shortly before it should be over and spins then: to be woken takes longer (100 us
// where the core went idle) than most of what a client does between two requests.
void ThinQueue::await_completion(uint64_t deadline_ns, uint64_t slice_ns) {
  const uint64_t start = now_ns();
  const uint64_t slice_end = std::min(deadline_ns, add_saturating(start, slice_ns));
  const uint64_t expected_ns = std::min(wait_ns_[0], wait_ns_[1]);
  uint64_t spin_end = add_saturating(start, spin_ns_);
  if (expected_ns > spin_ns_ && start + expected_ns < slice_end) {
    const uint64_t margin_ns = kWakeNs + expected_ns / kWaitVariation;
    if (margin_ns < expected_ns && !completions_.is_ready()) {
      completions_.sleep(expected_ns - margin_ns);
    }
    spin_end = start + expected_ns + margin_ns;
  }
  if (!spin_until(std::min(slice_end, spin_end))) {
    const uint64_t now = now_ns();
    if (now < slice_end) {
      completions_.sleep(slice_end - now);
    }
  }
  wait_ns_[0] = std::exchange(wait_ns_[1], now_ns() - start);
}

Result<uint32_t> ThinQueue::take(kvm_completion* out, uint32_t n_max, uint32_t n_min,
                                 uint64_t timeout_ns, Interrupt interrupt) {
  uint32_t n = 0;
  sentences_.clear();
  reset_eventfd();
  bool was_interrupted = false;
  const bool waits = n_min > 0 && timeout_ns > 0;
  const uint64_t deadline =
      waits && timeout_ns != UINT64_MAX ? add_saturating(now_ns(), timeout_ns) : UINT64_MAX;
  for (;;) {
    if (!ready_.empty()) [[unlikely]] {
      n += take_ready(out + n, n_max - n);
    }
    if (const Status drained = drain(out, n_max, &n); !drained.is_ok()) {
      is_broken_ = true;
      connection_->close();
      fail_outstanding(drained);
      continue;
    }
    if (n == 0 && !waits && is_cut_off() && n_submitted_ != 0) {
      fail_outstanding(connection_->down_status());
      continue;
    }
    const bool enough = n >= std::min(n_min, n_max) || n_submitted_ + n_ready() == 0;
    if (enough || !waits) {
      break;
    }
    await_completion(deadline, interrupt ? kInterruptSliceNs : kLivenessSliceNs);
    if (!completions_.is_ready()) {
      // First whether the daemon is there: who always interrupts would never learn.
      if (connection_->look_for_hangup()) {
        fail_outstanding(connection_->down_status());
      } else if (interrupt.is_raised()) {
        was_interrupted = true;
        break;
      } else if (deadline != UINT64_MAX && now_ns() >= deadline) {
        break;
      }
    }
  }
  if (eventfd_used_ && (n_ready() > 0 || completions_.is_ready())) {
    raise_eventfd();
  }
  if (n == 0 && was_interrupted) {
    return Interrupt::status();
  }
  if (n == 0 && n_outstanding() == 0 && connection_->is_down()) {
    return connection_->down_status();
  }
  return n;
}

// A caller that polls without waiting learns of the daemon's end here. An event loop calls when its
// descriptor says that there is something; others may call all the time.
bool ThinQueue::is_cut_off() {
  if (!eventfd_used_ && !connection_->is_down()) {
    const uint64_t now = now_ns();
    if (now < next_look_ns_) {
      return false;
    }
    next_look_ns_ = now + kLivenessSliceNs;
  }
  return connection_->look_for_hangup();
}

// Before the ring is looked at, so that what arrives later makes it readable again.
void ThinQueue::reset_eventfd() const {
  if (eventfd_used_) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t n = ::read(memory_.eventfd.get(), &count, sizeof(count));
  }
}

void ThinQueue::raise_eventfd() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(memory_.eventfd.get(), &one, sizeof(one));
}

// The daemon writes the eventfd when there are completions, and cannot when it is gone: the socket
// tells of that.
int ThinQueue::fd() {
  if (!memory_.eventfd.is_open()) {
    return -1;
  }
  if (!watched_.is_open()) {
    watched_ = watch(memory_.eventfd.get(), connection_->socket_fd());
  }
  if (watched_.is_open() && !eventfd_used_) {
    eventfd_used_ = true;
    if (completions_.request_eventfd() || n_ready() > 0) {
      raise_eventfd();
    }
  }
  return watched_.get();
}

}  // namespace kvm::client
