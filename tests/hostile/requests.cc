// SPDX-License-Identifier: Apache-2.0
#include "tests/hostile/requests.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

namespace kvm::testing {
namespace {

using ipc::Opcode;

// Tensors, behind kTensorsAt.
constexpr uint64_t kPartBytes = 40 << 10;
constexpr uint64_t kSmallBytes = 8 << 10;
constexpr uint64_t kKAt = kTensorsAt;
constexpr uint64_t kVAt = kKAt + kPartBytes;
constexpr uint64_t kQAt = kVAt + kPartBytes;
constexpr uint64_t kOAt = kQAt + kPartBytes;
constexpr uint64_t kLseAt = kOAt + kPartBytes;
constexpr uint64_t kErrAt = kLseAt + kSmallBytes;
static_assert(kErrAt + kSmallBytes <= kArenaBytes);

constexpr size_t kMaxSeqs = 12;

Opcode opcode_of(const Draft& draft) { return static_cast<Opcode>(draft.entry.opcode); }

}  // namespace

uint8_t* Draft::block() {
  switch (opcode_of(*this)) {
    case Opcode::kStep:
      return reinterpret_cast<uint8_t*>(&step);
    case Opcode::kRead:
      return reinterpret_cast<uint8_t*>(&read);
    case Opcode::kObserve:
      return reinterpret_cast<uint8_t*>(&observe);
    case Opcode::kSeq:
      return reinterpret_cast<uint8_t*>(&seq);
    case Opcode::kSnapshot:
      return reinterpret_cast<uint8_t*>(&snapshot);
    default:
      return reinterpret_cast<uint8_t*>(&cancel);
  }
}

size_t Draft::block_bytes() const {
  switch (opcode_of(*this)) {
    case Opcode::kStep:
      return sizeof(step);
    case Opcode::kRead:
      return sizeof(read);
    case Opcode::kObserve:
      return sizeof(observe);
    case Opcode::kSeq:
      return sizeof(seq);
    case Opcode::kSnapshot:
      return sizeof(snapshot);
    default:
      return sizeof(cancel);
  }
}

void Draft::seal() {
  if (opcode_of(*this) == Opcode::kNop) {
    return;
  }
  entry.block_length = static_cast<uint32_t>(block_bytes());
  if (opcode_of(*this) == Opcode::kStep) {
    step.n_items = static_cast<uint32_t>(items.size());
    step.n_ranges = static_cast<uint32_t>(ranges.size());
    step.n_tree_words = static_cast<uint32_t>(tree.size());
    entry.block_length +=
        static_cast<uint32_t>(items.size() * sizeof(kvm_item) + ranges.size() * sizeof(kvm_range) +
                              tree.size() * sizeof(uint64_t));
  }
}

void Draft::write(uint8_t* to, uint64_t room) const {
  const auto put = [&](const void* from, uint64_t size) {
    size = std::min(size, room);
    if (size != 0) {
      std::memcpy(to, from, size);
    }
    to += size;
    room -= size;
  };
  put(const_cast<Draft*>(this)->block(), block_bytes());
  if (opcode_of(*this) == Opcode::kStep) {
    put(items.data(), items.size() * sizeof(kvm_item));
    put(ranges.data(), ranges.size() * sizeof(kvm_range));
    put(tree.data(), tree.size() * sizeof(uint64_t));
  }
}

void RequestMaker::begin_session(uint32_t region) {
  region_ = region;
  for (auto& seqs : seqs_) {
    seqs.clear();
  }
}

void RequestMaker::add_seq(uint32_t space, kvm_seq_id seq) {
  std::vector<kvm_seq_id>& seqs = seqs_[space];
  seqs.size() < kMaxSeqs ? seqs.push_back(seq) : void(seqs[below(kMaxSeqs)] = seq);
}

uint32_t RequestMaker::index_of(kvm_space_id space) const {
  return static_cast<uint32_t>(std::find(spaces_.begin(), spaces_.end(), space) - spaces_.begin());
}

uint64_t RequestMaker::boundary() {
  switch (below(6)) {
    case 0:
      return 0;
    case 1:
      return ~uint64_t{0} - below(2);
    case 2:
      return uint64_t{1} << below(64);
    case 3:
      return (uint64_t{1} << below(64)) - 1;
    case 4:
      return below(300);
    default:
      return random_();
  }
}

kvm_seq_id RequestMaker::some_seq(uint32_t space) {
  const std::vector<kvm_seq_id>& seqs = seqs_[space];
  if (seqs.empty() || one_in(64)) {
    return one_in(2) || others_.empty() ? boundary() : others_[below(others_.size())];
  }
  return seqs[below(seqs.size())];
}

ipc::TensorRef RequestMaker::tensor(uint64_t offset, uint64_t size_bytes, uint32_t dtype) const {
  return {.region = region_, .dtype = dtype, .offset = offset, .size_bytes = size_bytes};
}

Draft RequestMaker::blank(uint32_t slot, Opcode opcode) {
  Draft draft;
  draft.entry.opcode = static_cast<uint8_t>(opcode);
  draft.entry.version = ipc::kBlockVersion;
  draft.entry.user_data = ++last_number_ << 8 | slot;
  if (opcode != Opcode::kNop) {
    draft.entry.region = region_;
    draft.entry.result_region = region_;
    draft.entry.block_offset = slot * kSlotBytes;
    draft.entry.result_offset = kResultsAt + slot * sizeof(ipc::ResultBlock);
  }
  return draft;
}

Draft RequestMaker::step(uint32_t slot, uint32_t verbs, uint32_t space, uint32_t n_items) {
  Draft draft = blank(slot, Opcode::kStep);
  ipc::StepBlock& step = draft.step;
  step.verbs = verbs;
  step.space = spaces_[space];
  step.n_layers = 1;
  step.mode = space == kIndexed ? static_cast<uint32_t>(below(5)) : 0;
  step.budget = step.mode == KVM_MODE_TOPK || step.mode == KVM_MODE_SAMPLED ? 1 + below(64) : 0;
  step.seed = random_();
  step.deadline_ns = one_in(256) ? 1 + below(1000) : 0;  // long past
  uint32_t append_row = 0;
  uint32_t query_row = 0;
  for (uint32_t i = 0; i < n_items; ++i) {
    kvm_item item{};
    item.seq = some_seq(space);
    item.append_position = one_in(64) ? below(200) : KVM_POSITION_END;
    item.query_position = KVM_POSITION_END;
    if ((verbs & ipc::kStepAppend) != 0) {
      item.n_append = static_cast<uint32_t>(one_in(32) ? 1 + below(100) : 1 + below(8));
      item.append_row = append_row;
      append_row += item.n_append;
    }
    if ((verbs & ipc::kStepAttend) != 0) {
      item.n_query = static_cast<uint32_t>(1 + below(2));
      item.query_row = query_row;
      query_row += item.n_query;
      if (one_in(8)) {
        item.range_begin = static_cast<uint32_t>(draft.ranges.size());
        item.n_ranges = 1;
        item.flags = one_in(2) ? 0 : uint32_t{KVM_ITEM_EXCLUDE_RANGES};
        draft.ranges.push_back({below(4), 4 + below(100)});
      } else if (one_in(8)) {
        item.tree_begin = static_cast<uint32_t>(draft.tree.size());
        item.flags = KVM_ITEM_TREE;
        draft.tree.insert(draft.tree.end(), item.n_query, 1);
      }
    }
    draft.items.push_back(item);
  }
  if ((verbs & ipc::kStepAppend) != 0) {
    step.k = tensor(kKAt, kPartBytes, KVM_DTYPE_BF16);
    if (space != kLatent) {
      step.v = tensor(kVAt, kPartBytes, KVM_DTYPE_BF16);
    }
  }
  if ((verbs & ipc::kStepAttend) != 0) {
    step.q = tensor(kQAt, kPartBytes, KVM_DTYPE_F32);
    step.o = tensor(kOAt, kPartBytes, KVM_DTYPE_F32);
    step.lse = tensor(kLseAt, kSmallBytes, KVM_DTYPE_F32);
    step.err = tensor(kErrAt, kSmallBytes, KVM_DTYPE_F32);
  }
  draft.seal();
  return draft;
}

Draft RequestMaker::seq(uint32_t slot, SeqVerb verb, uint32_t space) {
  Draft draft = blank(slot, Opcode::kSeq);
  draft.seq.verb = static_cast<uint32_t>(verb);
  if (verb == SeqVerb::kCreate) {
    draft.seq.space = spaces_[space];
    draft.seq.flags = one_in(4) ? uint32_t{KVM_SEQ_MANUAL_COMMIT} : 0;
  } else {
    draft.seq.seq = some_seq(space);
    draft.seq.n_tokens = one_in(2) ? KVM_POSITION_END : below(64);
  }
  if (verb == SeqVerb::kSetPriority) {
    draft.seq.priority = static_cast<uint32_t>(below(KVM_PRIORITY_MAX + 1));
    draft.seq.begin = below(256);
    draft.seq.end = one_in(2) ? KVM_POSITION_END : draft.seq.begin + 1 + below(256);
    draft.seq.keep_ns = below(3) * 1'000'000;
  }
  draft.seal();
  return draft;
}

Draft RequestMaker::snapshot(uint32_t slot, SnapshotVerb verb, uint32_t space) {
  Draft draft = blank(slot, Opcode::kSnapshot);
  draft.snapshot.verb = static_cast<uint32_t>(verb);
  if (verb == SnapshotVerb::kSave) {
    draft.snapshot.seq = some_seq(space);
    draft.snapshot.flags = one_in(2) ? uint32_t{KVM_SAVE_REPLACE} : 0;
  } else if (verb == SnapshotVerb::kLoad) {
    draft.snapshot.space = spaces_[space];
  }
  const std::string name = "s" + std::to_string(below(8));
  draft.snapshot.name_bytes =
      static_cast<uint32_t>(name.copy(draft.snapshot.name, sizeof(draft.snapshot.name)));
  draft.seal();
  return draft;
}

Draft RequestMaker::read(uint32_t slot, uint32_t space) {
  Draft draft = blank(slot, Opcode::kRead);
  draft.read.seq = some_seq(space);
  draft.read.position = below(8);
  draft.read.n_tokens = 1 + below(16);
  draft.read.k = tensor(kKAt, kPartBytes, KVM_DTYPE_F32);
  draft.read.v = tensor(kVAt, kPartBytes, KVM_DTYPE_BF16);
  draft.seal();
  return draft;
}

Draft RequestMaker::observe(uint32_t slot, uint32_t space) {
  Draft draft = blank(slot, Opcode::kObserve);
  draft.observe.seq = some_seq(space);
  draft.observe.n_rows = static_cast<uint32_t>(below(4));
  draft.observe.n_columns = below(4);
  draft.observe.q = tensor(kQAt, kPartBytes, KVM_DTYPE_F32);
  draft.observe.column_sums = tensor(kErrAt, kSmallBytes, KVM_DTYPE_F32);
  draft.seal();
  return draft;
}

Draft RequestMaker::any(uint32_t slot) {
  const auto space = static_cast<uint32_t>(below(kSpaces));
  const uint64_t kind = below(100);
  if (kind < 30) {
    return blank(slot, Opcode::kNop);
  }
  if (kind < 35) {
    Draft draft = blank(slot, Opcode::kCancel);
    draft.cancel.user_data = (last_number_ - below(8)) << 8 | below(256);
    draft.seal();
    return draft;
  }
  if (kind < 41) {
    return seq(slot, SeqVerb::kCreate, space);
  }
  if (kind < 58) {
    return seq(slot, static_cast<SeqVerb>(2 + below(4)), space);
  }
  if (kind < 59) {
    return seq(slot, SeqVerb::kSetPriority, space);
  }
  if (kind < 60) {
    return snapshot(slot, static_cast<SnapshotVerb>(1 + below(3)), space);
  }
  if (kind < 65) {
    return read(slot, space);
  }
  if (kind < 68) {
    return observe(slot, space);
  }
  const uint32_t verbs = kind < 80   ? ipc::kStepAppend
                         : kind < 90 ? ipc::kStepAttend
                                     : ipc::kStepAppend | ipc::kStepAttend;
  return step(slot, verbs, space, one_in(8) ? 1 + static_cast<uint32_t>(below(4)) : 1);
}

void RequestMaker::bend(Draft* draft) {
  const uint64_t value = boundary();
  ipc::StepBlock& step = draft->step;
  kvm_item none{};
  kvm_item& item = draft->items.empty() ? none : draft->items[below(draft->items.size())];
  ipc::TensorRef* tensors[] = {&step.k,        &step.v,        &step.q,          &step.o,
                               &draft->read.k, &draft->read.v, &draft->observe.q};
  ipc::TensorRef* some = tensors[below(std::size(tensors))];
  uint64_t* wide[] = {&step.space,
                      &step.budget,
                      &step.deadline_ns,
                      &some->stride_layer,
                      &some->stride_row,
                      &some->stride_head,
                      &item.seq,
                      &item.append_position,
                      &item.query_position,
                      &draft->read.seq,
                      &draft->read.position,
                      &draft->read.n_tokens,
                      &draft->observe.seq,
                      &draft->observe.query_position,
                      &draft->observe.column_begin,
                      &draft->observe.n_columns,
                      &draft->seq.space,
                      &draft->seq.seq,
                      &draft->seq.n_tokens};
  uint32_t* narrow[] = {&step.layer_begin,      &step.n_layers,       &item.n_append,
                        &item.append_row,       &item.query_row,      &draft->read.layer,
                        &draft->observe.n_rows, &draft->observe.layer};
  // What no request of this kind has is changed in vain, which is a valid request more.
  if (one_in(2)) {
    *wide[below(std::size(wide))] = value;
  } else {
    *narrow[below(std::size(narrow))] = static_cast<uint32_t>(value);
  }
}

void RequestMaker::mutate(Draft* draft) {
  const uint64_t value = boundary();
  const size_t size = size_t{1} << below(4);
  if (one_in(3)) {
    auto* bytes = reinterpret_cast<uint8_t*>(&draft->entry);
    std::memcpy(bytes + below(sizeof(draft->entry) / size) * size, &value, size);
  } else if (!draft->items.empty() && one_in(2)) {
    auto* bytes = reinterpret_cast<uint8_t*>(draft->items.data());
    std::memcpy(bytes + below(sizeof(kvm_item) / size) * size, &value, size);
  } else {
    std::memcpy(draft->block() + below(draft->block_bytes() / size) * size, &value, size);
  }
}

}  // namespace kvm::testing
