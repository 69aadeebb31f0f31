// SPDX-License-Identifier: Apache-2.0
#include "device/store_server.h"

#include <algorithm>
#include <utility>

#include "attention/cuda/params.h"
#include "base/kill_point.h"
#include "base/round.h"
#include "base/undo.h"

namespace kvm::device {

using wire::Call;
using wire::CallKind;
using wire::FrameKind;
using wire::Note;
using wire::NoteKind;
using wire::Verdict;

namespace {

constexpr uint64_t kForEver = UINT64_MAX;
// LIMIT: heads and layers of a list, tokens of a policy.
constexpr uint32_t kMaxHeads = 1024;
constexpr uint32_t kMaxLayers = 4096;
constexpr uint64_t kMaxKept = uint64_t{1} << 40;

Status broken(const std::string& what) {
  return Status(KVM_ERR_PROTOCOL, "a client of device memory has sent " + what);
}

uint64_t n_entries_of(const DeviceSequence& seq, uint64_t n_tokens) {
  return wire::n_entries(seq.lists.size(), n_tokens);
}

// Says whether there are kernels for what a client says of its rows.
bool is_layout_of_device(const wire::Layout& rows, CodecId codec) {
  if (rows.v_in_k != 0) {
    return rows.v_in_k == 1 && rows.dim_k == attention::gpu::kMlaDim &&
           rows.dim_v == attention::gpu::kMlaValueDim && attention::gpu::is_mla_on_devices(codec);
  }
  return rows.dim_k == rows.dim_v && attention::gpu::is_head_dim_on_devices(codec, rows.dim_k);
}

}  // namespace

StoreServer::StoreServer(SharingDriver* device, Budget* memory, ipc::Fd channel, ipc::Mapping words)
    : device_(device),
      memory_(memory),
      channel_(std::move(channel)),
      words_(std::move(words)),
      driver_(std::make_shared<ClientDriver>(
          device, &channel_, reinterpret_cast<wire::Words*>(words_.data()), memory)) {}

StoreServer::~StoreServer() {
  driver_->let_go();
  for (const auto& [id, seq] : sequences_) {
    store_->clear(seq.get());
  }
  sequences_.clear();
  spaces_.clear();
  store_.reset();
  if (words_registered_) {
    device_->unregister_host(words_.data());
  }
}

void StoreServer::stop() {
  driver_->let_go();
  channel_.shut_down();
}

Status StoreServer::open(const DeviceStoreOptions& options) {
  KVM_TRY(device_->register_host(words_.data(), sizeof(wire::Words)));
  words_registered_ = true;
  KVM_TRY_ASSIGN(store_, DeviceStore::open_without_kernels(driver_, options));
  return Status::ok();
}

Status StoreServer::serve(const DeviceStoreOptions& options) {
  // However it ends, the client is to see it.
  const Undo shutting_down([this] { channel_.shut_down(); });
  const Status opened = open(options);
  reply_.clear();
  reply_.put_status(opened);
  KVM_KILL_POINT("device/opened");
  KVM_TRY(channel_.send(static_cast<uint32_t>(FrameKind::kReady), reply_.bytes()));
  KVM_TRY(opened);
  ipc::Frame frame;
  for (;;) {
    KVM_TRY(channel_.receive(kForEver, &frame, wire::kMaxCallBytes));
    KVM_KILL_POINT("device/call_read");
    KVM_TRY(answer(frame));
    KVM_KILL_POINT("device/answered");
  }
}

Status StoreServer::answer(const ipc::Frame& frame) {
  if (frame.kind != static_cast<uint32_t>(FrameKind::kCall) || frame.fd.is_open()) {
    return broken("a frame that is no call");
  }
  ipc::FrameReader reader(frame.bytes);
  const auto verdict = reader.get<Verdict>();
  const std::vector<Note> notes = reader.get_all<Note>(wire::kMaxNotes);
  const auto call = reader.get<Call>();
  if (call.marker >= wire::kPoison) {
    return broken("a marker that would not be reached when it is gone");
  }
  driver_->begin_call(call.marker);
  // A question of another thread may come between a growth and its verdict.
  if (verdict != Verdict::kNone || call.kind != CallKind::kIsMoving) {
    KVM_TRY(judge(verdict));
    for (const Note& one : notes) {
      KVM_TRY(note(one));
    }
    give_way();
  }
  KVM_KILL_POINT("device/noted");
  reply_.clear();
  reply_.put_status(Status::ok());
  const Status status = ask(call, &reader);
  if (status.code() == KVM_ERR_PROTOCOL) {
    return status;
  }
  if (!status.is_ok()) {
    reply_.clear();
    reply_.put_status(status);
  }
  reply_.put_all(driver_->commands());
  KVM_KILL_POINT("device/asked");
  return channel_.send(static_cast<uint32_t>(FrameKind::kReply), reply_.bytes());
}

void StoreServer::give_way() {
  if (const uint64_t n = memory_->n_refused(); n != n_refused_ && !growing_) {
    n_refused_ = n;
    // What a driver fails with here it fails with where it matters, too.
    (void)store_->pool().close_empty(UINT64_MAX);
  }
}

Status StoreServer::judge(Verdict verdict) {
  if ((verdict != Verdict::kNone) != growing_ || verdict > Verdict::kUndo) {
    return broken("a verdict on no growth, or none on one");
  }
  if (verdict == Verdict::kFinish) {
    store_->finish_growth();
  } else if (verdict == Verdict::kUndo) {
    store_->undo_growth();
    n_entries_ -= n_new_entries_;
  }
  growing_ = false;
  return Status::ok();
}

Result<DeviceSequence*> StoreServer::find(uint64_t id) const {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) {
    return broken("the number of a sequence that is none");
  }
  return found->second.get();
}

Status StoreServer::check_entries(uint64_t n_new) const {
  return n_new <= wire::kMaxEntries - n_entries_ ? Status::ok()
                                                 : wire::too_many_entries(n_entries_);
}

Status StoreServer::note(const Note& note) {
  if (note.kind == NoteKind::kDropSpace) {
    return spaces_.erase(note.id) == 1 ? Status::ok() : broken("the end of a space that is none");
  }
  if (note.kind == NoteKind::kCreate || note.kind == NoteKind::kFork) {
    if (sequences_.size() >= wire::kMaxSequences || sequences_.contains(note.id)) {
      return broken("a sequence too many, or one twice");
    }
    SequencePtr made;
    if (note.kind == NoteKind::kCreate) {
      const auto space = spaces_.find(note.of);
      if (space == spaces_.end()) {
        return broken("a sequence of no space");
      }
      if (!check_entries(wire::n_entries(space->second->lists.size(), 0)).is_ok()) {
        return broken("a sequence that its entries have no room for");
      }
      KVM_TRY_ASSIGN(made, store_->create(space->second));
    } else {
      KVM_TRY_ASSIGN(DeviceSequence* const parent, find(note.of));
      if (!check_entries(n_entries_of(*parent, note.n_tokens)).is_ok()) {
        return broken("a fork that its entries have no room for");
      }
      Result<SequencePtr> child = store_->fork(*parent, note.n_tokens);
      if (!child.is_ok()) {
        return broken("a fork that it should have known to fail: " +
                      std::string(child.status().message()));
      }
      made = std::move(child).value();
    }
    n_entries_ += n_entries_of(*made, made->n_tokens);
    sequences_.emplace(note.id, std::move(made));
    return Status::ok();
  }
  KVM_TRY_ASSIGN(DeviceSequence* const seq, find(note.id));
  const uint64_t n_before = n_entries_of(*seq, seq->n_tokens);
  if (note.kind == NoteKind::kTruncate) {
    if (const Status status = store_->truncate(seq, note.n_tokens); !status.is_ok()) {
      return broken("a cut that it should have known to fail: " + std::string(status.message()));
    }
    n_entries_ -= n_before - n_entries_of(*seq, seq->n_tokens);
    return Status::ok();
  }
  if (note.kind == NoteKind::kExtend) {
    if (const Status status = store_->extend(seq, note.n_tokens); !status.is_ok()) {
      return broken("tokens that it should have asked for: " + std::string(status.message()));
    }
    return Status::ok();
  }
  if (note.kind == NoteKind::kClear) {
    store_->clear(seq);
    n_entries_ -= n_before;
    sequences_.erase(note.id);
    return Status::ok();
  }
  return broken("a note of no kind");
}

Status StoreServer::ask(const Call& call, ipc::FrameReader* reader) {
  switch (call.kind) {
    case CallKind::kPrepare:
      return prepare(call.id, reader);
    case CallKind::kGrow:
      return grow(reader);
    case CallKind::kIsMoving:
      return is_moving(call, reader);
    default:
      break;
  }
  if (!reader->is_whole()) {
    return broken("a call of another length");
  }
  switch (call.kind) {
    case CallKind::kFlush:
      return Status::ok();
    case CallKind::kFinishMoves:
      store_->finish_moves();
      return Status::ok();
    case CallKind::kFigures: {
      KVM_TRY_ASSIGN(const SequenceStore::Figures figures, store_->figures());
      reply_.put(figures);
      return Status::ok();
    }
    case CallKind::kSettle:
      return settle(call.id);
    default:
      break;
  }
  KVM_TRY_ASSIGN(DeviceSequence* const seq, find(call.id));
  switch (call.kind) {
    case CallKind::kSpill:
      return store_->spill(seq, call.begin, call.end, kClientStream);
    case CallKind::kFetch:
      return store_->fetch(seq, call.begin, call.end, kClientStream);
    case CallKind::kUsage: {
      KVM_TRY_ASSIGN(const SequenceStore::Usage usage, store_->usage(*seq));
      reply_.put(usage);
      return Status::ok();
    }
    case CallKind::kResidence: {
      KVM_TRY_ASSIGN(const SequenceStore::Residence is, store_->residence(seq));
      reply_.put(wire::Residence{is.on_host ? 1u : 0u, is.leaves ? 1u : 0u, is.n_pages,
                                 is.n_host_pages, is.n_waiting_pages, is.failure});
      return Status::ok();
    }
    default:
      return broken("a call of no kind");
  }
}

Status StoreServer::prepare(uint64_t id, ipc::FrameReader* reader) {
  const auto head = reader->get<wire::Layout>();
  const std::vector<wire::List> lists = reader->get_all<wire::List>(wire::kMaxLists);
  if (!reader->is_whole() || lists.empty() || spaces_.contains(id)) {
    return broken("a layout of another length, or one twice");
  }
  const auto codec = static_cast<CodecId>(head.codec);
  if (!codecs::codec_is_known(head.codec) || !attention::gpu::is_on_devices(codec) ||
      !is_layout_of_device(head, codec)) {
    return broken("a layout that is none of a device's");
  }
  if (spaces_.size() >= wire::kMaxSpaces) {
    return Status(KVM_ERR_LIMIT, "the client has " + std::to_string(spaces_.size()) +
                                     " spaces, the most that are allowed");
  }
  SpaceLayout layout;
  layout.codec = codec;
  layout.dim = head.dim_k;
  for (const wire::List& from : lists) {
    if (from.n_heads == 0 || from.n_heads > kMaxHeads || from.n_layers == 0 ||
        from.n_layers > kMaxLayers ||
        std::max({from.n_sinks, from.n_recent, from.slack}) > kMaxKept) {
      return broken("a list with numbers that are none of a layout's");
    }
    ListLayout list;
    list.n_heads = from.n_heads;
    list.n_layers = from.n_layers;
    list.n_sinks = from.n_sinks;
    list.n_recent = from.n_recent;
    list.slack = from.slack;
    list.layer_bytes = layout.slab_class(from.n_heads).page_bytes();
    layout.lists.push_back(list);
  }
  KVM_TRY_ASSIGN(std::shared_ptr<const SpaceLayout> space, store_->prepare(std::move(layout)));
  std::vector<wire::Slab> slabs;
  for (const ListLayout& list : space->lists) {
    const SlabPlace place = store_->slab(list.slab);
    slabs.push_back({list.slab, driver_->range_at(place.base), place.page_bytes, place.n_slots});
  }
  reply_.put_all(std::span<const wire::Slab>(slabs));
  spaces_.emplace(id, std::move(space));
  return Status::ok();
}

Status StoreServer::settle(uint64_t id) {
  KVM_TRY_ASSIGN(DeviceSequence* const seq, find(id));
  KVM_TRY(store_->settle_for_use(seq));
  for (const DevicePageList& list : seq->lists) {
    reply_.put_all(std::span<const tiers::PageRef>(list.pages));
  }
  return Status::ok();
}

Status StoreServer::is_moving(const Call& call, ipc::FrameReader* reader) {
  const std::vector<uint64_t> ids = reader->get_all<uint64_t>(wire::kMaxSequences);
  if (!reader->is_whole()) {
    return broken("a call of another length");
  }
  const bool moving = std::any_of(ids.begin(), ids.end(), [&](uint64_t id) {
    const auto found = sequences_.find(id);
    return found != sequences_.end() && store_->is_moving(*found->second, call.also_spills != 0);
  });
  reply_.put(static_cast<uint32_t>(moving));
  return Status::ok();
}

Status StoreServer::grow(ipc::FrameReader* reader) {
  const std::vector<wire::Grow> items = reader->get_all<wire::Grow>(wire::kMaxGrowths);
  if (!reader->is_whole()) {
    return broken("a call of another length");
  }
  std::vector<Growth> growths;
  std::vector<const DeviceSequence*> sorted;
  for (const wire::Grow& item : items) {
    KVM_TRY_ASSIGN(DeviceSequence* const seq, find(item.id));
    if (seq->n_tokens + item.n_append >= attention::gpu::kMaxListTokens) {
      return broken("more tokens than a sequence has");
    }
    if (item.n_unsure > std::min<uint64_t>(item.max_unsure, seq->n_tokens)) {
      return broken("more unsure tokens than the sequence has");
    }
    growths.push_back({seq, item.n_append, item.n_query, item.n_unsure, item.max_unsure});
    sorted.push_back(seq);
  }
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    return broken("a sequence twice in a step");
  }
  uint64_t n_new = 0;
  for (const Growth& growth : growths) {
    n_new += n_entries_of(*growth.seq, growth.seq->n_tokens + growth.n_append) -
             n_entries_of(*growth.seq, growth.seq->n_tokens);
  }
  KVM_TRY(check_entries(n_new));
  KVM_TRY(store_->begin_growth(growths, kClientStream));
  n_entries_ += n_new;
  n_new_entries_ = n_new;
  growing_ = true;
  KVM_KILL_POINT("device/growing");
  std::vector<wire::Change> changes;
  uint32_t growth = 0;  // changes are in the order of growths
  for (const DeviceStore::Change& change : store_->changes()) {
    while (growths[growth].seq != change.seq) {
      ++growth;
    }
    changes.push_back(
        {growth, change.list, change.block, change.seq->lists[change.list].pages[change.block]});
  }
  reply_.put_all(std::span<const wire::Change>(changes));
  return Status::ok();
}

}  // namespace kvm::device
