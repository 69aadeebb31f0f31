// SPDX-License-Identifier: Apache-2.0
#include "ipc/validate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/dtype.h"
#include "base/limits.h"
#include "ipc/shared_words.h"

namespace kvm::ipc {

namespace {

#define KVM_CHECK_OR_REJECT(condition, reason) \
  do {                                         \
    if (!(condition)) [[unlikely]] {           \
      return Reject::reason;                   \
    }                                          \
  } while (false)

#define KVM_TRY_REJECT(expression)                  \
  do {                                              \
    const Reject kvm_reject = (expression);         \
    if (kvm_reject != Reject::kNone) [[unlikely]] { \
      return kvm_reject;                            \
    }                                               \
  } while (false)

// No sum that could wrap is ever formed.
bool fits(uint64_t offset, uint64_t length, uint64_t size) {
  return length <= size && offset <= size - length;
}

template <typename Word, size_t N>
bool all_zero(const Word (&words)[N]) {
  return std::all_of(words, words + N, [](Word word) { return word == 0; });
}

enum class Element : uint8_t { kAny, kF32 };

Reject resolve_tensor(const TensorRef& ref, Element element, RegionTable* regions, RegionPins* pins,
                      TensorView* out) {
  if (ref.region == 0) {
    const bool empty = ref.dtype == 0 && ref.offset == 0 && ref.size_bytes == 0 &&
                       ref.stride_layer == 0 && ref.stride_row == 0 && ref.stride_head == 0;
    return empty ? Reject::kNone : Reject::kTensorAbsent;
  }
  KVM_CHECK_OR_REJECT(
      element == Element::kF32 ? ref.dtype == KVM_DTYPE_F32 : dtype_is_known(ref.dtype),
      kTensorDtype);
  const RegionView region = regions->pin(ref.region, pins);
  KVM_CHECK_OR_REJECT(region.data != nullptr, kUnknownRegion);
  const uint32_t element_bytes = dtype_size_bytes(static_cast<Dtype>(ref.dtype));
  KVM_CHECK_OR_REJECT(ref.offset % element_bytes == 0, kTensorAlign);
  KVM_CHECK_OR_REJECT(ref.size_bytes != 0 && fits(ref.offset, ref.size_bytes, region.size_bytes),
                      kTensorBounds);
  *out = TensorView{region.data + ref.offset, ref.size_bytes, ref.dtype,
                    ref.stride_layer,         ref.stride_row, ref.stride_head};
  return Reject::kNone;
}

bool overlap(const TensorView& a, const TensorView& b) {
  const auto* a_data = static_cast<const uint8_t*>(a.data);
  const auto* b_data = static_cast<const uint8_t*>(b.data);
  return a_data != nullptr && b_data != nullptr && a_data < b_data + b.size_bytes &&
         b_data < a_data + a.size_bytes;
}

Reject check_items(const StepRequest& step) {
  const uint64_t n_ranges = step.ranges.size();
  const uint64_t n_words = step.tree_mask.size();
  for (const kvm_item& item : step.items) {
    KVM_CHECK_OR_REJECT((item.flags & ~kItemFlags) == 0, kItemFlags);
    KVM_CHECK_OR_REJECT(item.reserved == 0, kItemReserved);
    KVM_CHECK_OR_REJECT(item.n_query <= kMaxQueryRows, kItemRows);
    KVM_CHECK_OR_REJECT(fits(item.range_begin, item.n_ranges, n_ranges), kItemRanges);
    if ((item.flags & KVM_ITEM_TREE) != 0) {
      KVM_CHECK_OR_REJECT(
          item.n_query <= kMaxTreeRows && fits(item.tree_begin, item.n_query, n_words), kItemTree);
    }
  }
  return Reject::kNone;
}

// Copies the arrays behind a StepBlock. `block` is client memory; the counts come from our copy.
Reject copy_arrays(const StepBlock& head, const uint8_t* block, uint32_t length,
                   StepRequest* step) {
  KVM_CHECK_OR_REJECT(head.n_items >= 1 && head.n_items <= kMaxItems, kItemCount);
  KVM_CHECK_OR_REJECT(head.n_ranges <= kMaxRanges, kRangeCount);
  KVM_CHECK_OR_REJECT(head.n_tree_words <= kMaxTreeWords, kTreeCount);
  const uint64_t items_bytes = uint64_t{head.n_items} * sizeof(kvm_item);
  const uint64_t ranges_bytes = uint64_t{head.n_ranges} * sizeof(kvm_range);
  const uint64_t tree_bytes = uint64_t{head.n_tree_words} * sizeof(uint64_t);
  // The counts are bounded: this sum is far from wrapping.
  KVM_CHECK_OR_REJECT(sizeof(StepBlock) + items_bytes + ranges_bytes + tree_bytes == length,
                      kBlockLength);
  const uint8_t* from = block + sizeof(StepBlock);
  step->items.resize(head.n_items);
  copy_once(step->items.data(), from, items_bytes);
  if (head.n_ranges != 0) {
    step->ranges.resize(head.n_ranges);
    copy_once(step->ranges.data(), from + items_bytes, ranges_bytes);
  }
  if (head.n_tree_words != 0) {
    step->tree_mask.resize(head.n_tree_words);
    copy_once(step->tree_mask.data(), from + items_bytes + ranges_bytes, tree_bytes);
  }
  return Reject::kNone;
}

Reject resolve_step_tensors(const StepBlock& head, RegionTable* regions, RegionPins* pins,
                            StepRequest* step) {
  KVM_TRY_REJECT(resolve_tensor(head.k, Element::kAny, regions, pins, &step->k));
  KVM_TRY_REJECT(resolve_tensor(head.v, Element::kAny, regions, pins, &step->v));
  KVM_TRY_REJECT(resolve_tensor(head.q, Element::kAny, regions, pins, &step->q));
  KVM_TRY_REJECT(resolve_tensor(head.o, Element::kAny, regions, pins, &step->o));
  KVM_TRY_REJECT(resolve_tensor(head.lse, Element::kF32, regions, pins, &step->lse));
  KVM_TRY_REJECT(resolve_tensor(head.err, Element::kF32, regions, pins, &step->err));
  const TensorView* inputs[] = {&step->k, &step->v, &step->q};
  const TensorView* outputs[] = {&step->o, &step->lse, &step->err};
  for (size_t i = 0; i < 3; ++i) {
    for (size_t j = 0; j < 3; ++j) {
      KVM_CHECK_OR_REJECT(!overlap(*outputs[i], *inputs[j]), kTensorOverlap);
      KVM_CHECK_OR_REJECT(i == j || !overlap(*outputs[i], *outputs[j]), kTensorOverlap);
    }
  }
  return Reject::kNone;
}

Reject parse_step(const uint8_t* block, uint32_t length, RegionTable* regions, Request* out) {
  KVM_CHECK_OR_REJECT(length >= sizeof(StepBlock), kBlockLength);
  StepBlock head;
  copy_once(&head, block, sizeof(head));
  KVM_CHECK_OR_REJECT(head.verbs != 0 && (head.verbs & ~(kStepAppend | kStepAttend)) == 0, kVerbs);
  KVM_CHECK_OR_REJECT((head.flags & ~kStepFlags) == 0, kBlockFlags);
  KVM_CHECK_OR_REJECT(all_zero(head.reserved), kBlockReserved);
  KVM_CHECK_OR_REJECT(head.mode <= KVM_MODE_AUTO, kMode);
  KVM_CHECK_OR_REJECT(head.proposal <= KVM_PROPOSAL_GRAPH, kProposal);
  KVM_CHECK_OR_REJECT(
      std::isfinite(head.scale) && std::isfinite(head.eps) && std::isfinite(head.delta),
      kNotFinite);
  StepRequest& step = out->message.emplace<StepRequest>();
  step.append = (head.verbs & kStepAppend) != 0;
  step.attend = (head.verbs & kStepAttend) != 0;
  step.flags = head.flags;
  step.space = head.space;
  step.layer_begin = head.layer_begin;
  step.n_layers = head.n_layers;
  step.mode = head.mode;
  step.proposal = head.proposal;
  step.scale = head.scale;
  step.eps = head.eps;
  step.delta = head.delta;
  step.budget = head.budget;
  step.seed = head.seed;
  step.deadline_ns = head.deadline_ns;
  KVM_TRY_REJECT(copy_arrays(head, block, length, &step));
  KVM_TRY_REJECT(check_items(step));
  return resolve_step_tensors(head, regions, &out->pins, &step);
}

// Copies a block of fixed size.
template <typename Block>
Reject copy_block(const uint8_t* block, uint32_t length, Block* out) {
  KVM_CHECK_OR_REJECT(length == sizeof(Block), kBlockLength);
  copy_once(out, block, sizeof(Block));
  KVM_CHECK_OR_REJECT(all_zero(out->reserved), kBlockReserved);
  return Reject::kNone;
}

Reject parse_read(const uint8_t* block, uint32_t length, RegionTable* regions, Request* out) {
  ReadBlock head;
  KVM_TRY_REJECT(copy_block(block, length, &head));
  KVM_CHECK_OR_REJECT(head.flags == 0, kBlockFlags);
  ReadRequest& read = out->message.emplace<ReadRequest>();
  read.seq = head.seq;
  read.layer = head.layer;
  read.position = head.position;
  read.n_tokens = head.n_tokens;
  KVM_TRY_REJECT(resolve_tensor(head.k, Element::kAny, regions, &out->pins, &read.k));
  KVM_TRY_REJECT(resolve_tensor(head.v, Element::kAny, regions, &out->pins, &read.v));
  KVM_CHECK_OR_REJECT(!overlap(read.k, read.v), kTensorOverlap);
  return Reject::kNone;
}

Reject parse_observe(const uint8_t* block, uint32_t length, RegionTable* regions, Request* out) {
  ObserveBlock head;
  KVM_TRY_REJECT(copy_block(block, length, &head));
  ObserveRequest& observe = out->message.emplace<ObserveRequest>();
  observe.seq = head.seq;
  observe.layer = head.layer;
  observe.n_rows = head.n_rows;
  observe.query_position = head.query_position;
  observe.column_begin = head.column_begin;
  observe.n_columns = head.n_columns;
  KVM_TRY_REJECT(resolve_tensor(head.q, Element::kAny, regions, &out->pins, &observe.q));
  return resolve_tensor(head.column_sums, Element::kF32, regions, &out->pins, &observe.column_sums);
}

Reject parse_seq(const uint8_t* block, uint32_t length, Request* out) {
  SeqBlock head;
  KVM_CHECK_OR_REJECT(length >= sizeof(head), kBlockLength);
  KVM_TRY_REJECT(copy_block(block, sizeof(head), &head));
  const uint32_t hashes_bytes = length - static_cast<uint32_t>(sizeof(head));
  KVM_CHECK_OR_REJECT(hashes_bytes == 0 || head.verb == static_cast<uint32_t>(SeqVerb::kPublish),
                      kBlockLength);
  KVM_CHECK_OR_REJECT(hashes_bytes % sizeof(kvm_prefix_hash) == 0 &&
                          hashes_bytes / sizeof(kvm_prefix_hash) <= kMaxPrefixPages,
                      kBlockLength);
  KVM_CHECK_OR_REJECT(head.verb >= static_cast<uint32_t>(SeqVerb::kCreate) &&
                          head.verb <= static_cast<uint32_t>(kLastSeqVerb),
                      kSeqVerb);
  const bool creates = head.verb == static_cast<uint32_t>(SeqVerb::kCreate);
  const uint32_t known_flags = creates ? kSeqFlags : 0;
  KVM_CHECK_OR_REJECT((head.flags & ~known_flags) == 0, kBlockFlags);
  const bool sets_priority = head.verb == static_cast<uint32_t>(SeqVerb::kSetPriority);
  const bool has_range = sets_priority || head.verb == static_cast<uint32_t>(SeqVerb::kDrop);
  KVM_CHECK_OR_REJECT(sets_priority || (head.priority | head.keep_ns) == 0, kBlockReserved);
  KVM_CHECK_OR_REJECT(has_range || (head.begin | head.end) == 0, kBlockReserved);
  out->message = SeqRequest{.verb = static_cast<SeqVerb>(head.verb),
                            .flags = head.flags,
                            .space = head.space,
                            .seq = head.seq,
                            .n_tokens = head.n_tokens,
                            .range = {.priority = head.priority,
                                      .begin = head.begin,
                                      .end = head.end,
                                      .keep_ns = head.keep_ns}};
  if (hashes_bytes != 0) {
    std::vector<kvm_prefix_hash>& hashes = std::get<SeqRequest>(out->message).hashes;
    hashes.resize(hashes_bytes / sizeof(kvm_prefix_hash));
    copy_once(hashes.data(), block + sizeof(head), hashes_bytes);
  }
  return Reject::kNone;
}

Reject parse_snapshot(const uint8_t* block, uint32_t length, Request* out) {
  SnapshotBlock head;
  KVM_TRY_REJECT(copy_block(block, length, &head));
  KVM_CHECK_OR_REJECT(head.reserved0 == 0, kBlockReserved);
  KVM_CHECK_OR_REJECT(head.verb >= static_cast<uint32_t>(SnapshotVerb::kSave) &&
                          head.verb <= static_cast<uint32_t>(SnapshotVerb::kRemove),
                      kSnapshotVerb);
  const bool saves = head.verb == static_cast<uint32_t>(SnapshotVerb::kSave);
  KVM_CHECK_OR_REJECT((head.flags & ~(saves ? kSaveReplace : 0)) == 0, kBlockFlags);
  KVM_CHECK_OR_REJECT(head.name_bytes <= kMaxSnapshotNameBytes, kSnapshotName);
  KVM_CHECK_OR_REJECT(std::all_of(head.name + head.name_bytes, std::end(head.name),
                                  [](char c) { return c == '\0'; }),
                      kSnapshotName);
  out->message = SnapshotRequest{.verb = static_cast<SnapshotVerb>(head.verb),
                                 .flags = head.flags,
                                 .seq = head.seq,
                                 .space = head.space,
                                 .name = std::string(head.name, head.name_bytes)};
  return Reject::kNone;
}

Reject parse_cancel(const uint8_t* block, uint32_t length, Request* out) {
  CancelBlock head;
  KVM_TRY_REJECT(copy_block(block, length, &head));
  out->message = CancelMessage{head.user_data};
  return Reject::kNone;
}

}  // namespace

Reject validate_request(const RequestEntry& entry, RegionTable* regions, Request* out) {
  const auto opcode = static_cast<Opcode>(entry.opcode);
  KVM_CHECK_OR_REJECT(opcode >= Opcode::kNop && opcode <= Opcode::kSnapshot, kOpcode);
  KVM_CHECK_OR_REJECT(entry.version == kBlockVersion, kVersion);
  KVM_CHECK_OR_REJECT(entry.flags == 0, kEntryFlags);
  KVM_CHECK_OR_REJECT(all_zero(entry.reserved), kEntryReserved);
  out->user_data = entry.user_data;
  if (opcode == Opcode::kNop) {
    KVM_CHECK_OR_REJECT(entry.region == 0 && entry.block_offset == 0 && entry.block_length == 0 &&
                            entry.result_region == 0 && entry.result_offset == 0,
                        kEntryReserved);
    return Reject::kNone;
  }
  const RegionView region = regions->pin(entry.region, &out->pins);
  KVM_CHECK_OR_REJECT(region.data != nullptr, kUnknownRegion);
  KVM_CHECK_OR_REJECT(entry.block_offset % kBlockAlign == 0, kBlockAlignment);
  KVM_CHECK_OR_REJECT(fits(entry.block_offset, entry.block_length, region.size_bytes),
                      kBlockBounds);
  const RegionView results = regions->pin(entry.result_region, &out->pins);
  KVM_CHECK_OR_REJECT(results.data != nullptr, kUnknownRegion);
  KVM_CHECK_OR_REJECT(entry.result_offset % kBlockAlign == 0, kResultAlign);
  KVM_CHECK_OR_REJECT(fits(entry.result_offset, sizeof(ResultBlock), results.size_bytes),
                      kResultBounds);
  out->result = reinterpret_cast<ResultBlock*>(results.data + entry.result_offset);
  const uint8_t* block = region.data + entry.block_offset;
  switch (opcode) {
    case Opcode::kStep:
      return parse_step(block, entry.block_length, regions, out);
    case Opcode::kRead:
      return parse_read(block, entry.block_length, regions, out);
    case Opcode::kObserve:
      return parse_observe(block, entry.block_length, regions, out);
    case Opcode::kSeq:
      return parse_seq(block, entry.block_length, out);
    case Opcode::kCancel:
      return parse_cancel(block, entry.block_length, out);
    case Opcode::kSnapshot:
      return parse_snapshot(block, entry.block_length, out);
    case Opcode::kNop:
      break;
  }
  return Reject::kOpcode;
}

const char* reject_text(Reject reject) {
  static constexpr const char* kTexts[] = {
      "accepted",
      "unknown opcode",
      "unknown block version",
      "unknown flags in a ring entry",
      "reserved fields of a ring entry are set",
      "a region id that this client does not have",
      "a parameter block that is not aligned",
      "a parameter block outside its region",
      "a parameter block whose length contradicts its contents",
      "a result block that is not aligned",
      "a result block outside its region",
      "reserved fields of a parameter block are set",
      "a step that neither appends nor attends, or unknown verbs",
      "unknown flags in a parameter block",
      "a number of items out of its limits",
      "more ranges than the limit",
      "more tree words than the limit",
      "an unknown mode",
      "an unknown proposal",
      "a number that is not finite",
      "unknown flags of an item",
      "reserved fields of an item are set",
      "an item whose ranges lie outside the request's",
      "an item whose tree words lie outside the request's",
      "more query rows in an item than the limit",
      "an absent tensor with fields set",
      "an unknown or unsuitable dtype",
      "a tensor that is not aligned to its elements",
      "a tensor outside its region",
      "an output that overlaps another tensor",
      "an unknown verb on a sequence",
      "an unknown verb on a snapshot",
      "a snapshot's name that is too long, or is followed by more",
  };
  static_assert(std::size(kTexts) == static_cast<size_t>(Reject::kCount));
  const auto index = static_cast<size_t>(reject);
  return index < std::size(kTexts) ? kTexts[index] : "unknown";
}

const char* reject_name(Reject reject) {
  static constexpr const char* kNames[] = {
      "none",           "opcode",          "version",       "entry_flags",   "entry_reserved",
      "unknown_region", "block_alignment", "block_bounds",  "block_length",  "result_align",
      "result_bounds",  "block_reserved",  "verbs",         "block_flags",   "item_count",
      "range_count",    "tree_count",      "mode",          "proposal",      "not_finite",
      "item_flags",     "item_reserved",   "item_ranges",   "item_tree",     "item_rows",
      "tensor_absent",  "tensor_dtype",    "tensor_align",  "tensor_bounds", "tensor_overlap",
      "seq_verb",       "snapshot_verb",   "snapshot_name",
  };
  static_assert(std::size(kNames) == kRejects);
  const auto index = static_cast<size_t>(reject);
  return index < kRejects ? kNames[index] : "unknown";
}

namespace {

// Where the last word ends that fits into n_max bytes; of one very long word, a character.
size_t end_of_words(std::string_view sentence, size_t n_max) {
  constexpr size_t kLongWord = 80;  // of paths, as a rule
  size_t end = sentence.find_last_of(' ', n_max);
  if (end == std::string_view::npos || end + kLongWord < n_max) {
    end = n_max;
    while (end > 0 && (static_cast<uint8_t>(sentence[end]) & 0xc0) == 0x80) {
      --end;  // within a character of UTF-8
    }
  }
  return end;
}

}  // namespace

void write_result(ResultBlock* result, uint64_t seq, std::string_view sentence,
                  uint64_t n_not_finite) {
  if (result == nullptr) {
    return;
  }
  result->seq = seq;
  result->n_not_finite = n_not_finite;
  constexpr size_t kRoom = sizeof(result->message) - 1;
  constexpr std::string_view kMore = " ...";
  const bool is_cut = sentence.size() > kRoom;
  const size_t n = is_cut ? end_of_words(sentence, kRoom - kMore.size()) : sentence.size();
  sentence.copy(result->message, n);
  if (is_cut) {
    kMore.copy(result->message + n, kMore.size());
  }
  result->message[n + (is_cut ? kMore.size() : 0)] = '\0';
}

}  // namespace kvm::ipc
