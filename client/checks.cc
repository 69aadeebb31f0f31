// SPDX-License-Identifier: Apache-2.0
#include "client/checks.h"

#include <cmath>
#include <iterator>
#include <string>

#include "base/limits.h"
#include "ipc/struct_size.h"

namespace kvm::client {

namespace {

Status invalid(const std::string& sentence) { return Status(KVM_ERR_INVALID, sentence); }

Status check_count(uint64_t value, uint64_t least, uint64_t most, const char* name) {
  if (value < least || value > most) {
    return invalid(std::string(name) + " is " + std::to_string(value) + "; allowed are " +
                   std::to_string(least) + " to " + std::to_string(most));
  }
  return Status::ok();
}

Status check_array(const void* data, uint64_t count, const char* name) {
  if (count != 0 && data == nullptr) {
    return invalid(std::string(name) + " is NULL, but its count is " + std::to_string(count));
  }
  return Status::ok();
}

Status check_finite(float value, const char* name) {
  if (!std::isfinite(value)) {
    return invalid(std::string(name) + " is " + std::to_string(value) + "; it must be finite");
  }
  return Status::ok();
}

// Says whether [begin, begin + n) lies within `size` entries.
bool within(uint64_t begin, uint64_t n, uint64_t size) { return n <= size && begin <= size - n; }

Status check_item(const kvm_step_params& params, uint32_t index, bool attend_only) {
  const kvm_item& item = params.items[index];
  const std::string name = "items[" + std::to_string(index) + "]";
  if ((item.flags & ~kItemFlags) != 0) {
    return invalid(name + ".flags is " + std::to_string(item.flags) + "; known are the bits " +
                   std::to_string(kItemFlags));
  }
  if (item.reserved != 0) {
    return invalid(name + ".reserved must be zero");
  }
  if (item.n_query > kMaxQueryRows) {
    return invalid(name + ".n_query is " + std::to_string(item.n_query) + "; at most " +
                   std::to_string(kMaxQueryRows));
  }
  if (attend_only && item.n_append != 0) {
    return invalid(name + ".n_append is " + std::to_string(item.n_append) +
                   "; kvm_attend appends nothing");
  }
  if (!within(item.range_begin, item.n_ranges, params.n_ranges)) {
    return invalid(name + " uses ranges " + std::to_string(item.range_begin) + " + " +
                   std::to_string(item.n_ranges) + "; the request has " +
                   std::to_string(params.n_ranges));
  }
  if ((item.flags & KVM_ITEM_TREE) != 0 &&
      (item.n_query > kMaxTreeRows ||
       !within(item.tree_begin, item.n_query, params.n_tree_words))) {
    return invalid(name + " has a tree mask of " + std::to_string(item.n_query) +
                   " rows from word " + std::to_string(item.tree_begin) + "; allowed are " +
                   std::to_string(kMaxTreeRows) + " rows within the request's " +
                   std::to_string(params.n_tree_words) + " words");
  }
  return Status::ok();
}

// The same checks without a name to build: the sentence is made for the first bad item only.
bool item_is_plain(const kvm_item& item) {
  return (item.flags & ~uint32_t{KVM_ITEM_NOT_CAUSAL}) == 0 && item.reserved == 0 &&
         item.n_query <= kMaxQueryRows && item.n_ranges == 0 && item.range_begin == 0;
}

Status check_items(const kvm_step_params& params, bool attend_only) {
  for (uint32_t i = 0; i < params.n_items; ++i) {
    const kvm_item& item = params.items[i];
    if (!item_is_plain(item) || (attend_only && item.n_append != 0)) [[unlikely]] {
      KVM_TRY(check_item(params, i, attend_only));
    }
  }
  return Status::ok();
}

}  // namespace

Status check_reserved(const uint64_t* words, size_t n_words, const char* structure) {
  for (size_t i = 0; i < n_words; ++i) {
    if (words[i] != 0) {
      return invalid(std::string(structure) + ".reserved must be zero");
    }
  }
  return Status::ok();
}

Status check_flags(uint32_t flags, uint32_t known, const char* structure) {
  if ((flags & ~known) != 0) {
    return invalid(std::string(structure) + ".flags is " + std::to_string(flags) +
                   "; known are the bits " + std::to_string(known));
  }
  return Status::ok();
}

Status check_step(const kvm_step_params& params, bool append, bool attend,
                  const ArenaDirectory& arenas, StepCall* call) {
  KVM_TRY(check_flags(params.flags, kStepFlags, "kvm_step_params"));
  KVM_TRY(check_reserved(params.reserved, std::size(params.reserved), "kvm_step_params"));
  KVM_TRY(check_count(params.n_items, 1, kMaxItems, "n_items"));
  KVM_TRY(check_count(params.n_ranges, 0, kMaxRanges, "n_ranges"));
  KVM_TRY(check_count(params.n_tree_words, 0, kMaxTreeWords, "n_tree_words"));
  KVM_TRY(check_array(params.items, params.n_items, "items"));
  KVM_TRY(check_array(params.ranges, params.n_ranges, "ranges"));
  KVM_TRY(check_array(params.tree_mask, params.n_tree_words, "tree_mask"));
  KVM_TRY(check_count(params.mode, 0, KVM_MODE_AUTO, "mode"));
  KVM_TRY(check_count(params.proposal, 0, KVM_PROPOSAL_GRAPH, "proposal"));
  KVM_TRY(check_finite(params.scale, "scale"));
  KVM_TRY(check_finite(params.eps, "eps"));
  KVM_TRY(check_finite(params.delta, "delta"));
  KVM_TRY(check_items(params, !append));
  *call = StepCall{};
  call->append = append;
  call->attend = attend;
  call->params = &params;
  const TensorSlot slots[] = {{&params.k, "k", Element::kAny, &call->k},
                              {&params.v, "v", Element::kAny, &call->v},
                              {&params.q, "q", Element::kAny, &call->q},
                              {&params.o, "o", Element::kAny, &call->o},
                              {&params.lse, "lse", Element::kF32, &call->lse},
                              {&params.err, "err", Element::kF32, &call->err}};
  const size_t first = append ? 0 : 2;
  const size_t last = attend ? 6 : 2;
  KVM_TRY(arenas.resolve(std::span(slots).subspan(first, last - first)));
  return check_overlap(std::span(slots).first(3), std::span(slots).last(3));
}

Status check_read(const kvm_read_params& params, const ArenaDirectory& arenas, ReadCall* call) {
  KVM_TRY(check_flags(params.flags | params.reserved0, 0, "kvm_read_params"));
  KVM_TRY(check_reserved(params.reserved, std::size(params.reserved), "kvm_read_params"));
  *call = ReadCall{};
  call->params = &params;
  const TensorSlot slots[] = {{&params.k, "k", Element::kAny, &call->k},
                              {&params.v, "v", Element::kAny, &call->v}};
  KVM_TRY(arenas.resolve(slots));
  return check_overlap({}, slots);
}

Status check_observe(const kvm_observe_params& params, const ArenaDirectory& arenas,
                     ObserveCall* call) {
  KVM_TRY(check_flags(params.flags, 0, "kvm_observe_params"));
  KVM_TRY(check_reserved(params.reserved, std::size(params.reserved), "kvm_observe_params"));
  *call = ObserveCall{};
  call->params = &params;
  const TensorSlot slots[] = {
      {&params.q, "q", Element::kAny, &call->q},
      {&params.column_sums, "column_sums", Element::kF32, &call->column_sums}};
  return arenas.resolve(slots);
}

Status check_prefix(kvm_seq_id seq, const kvm_prefix_hash* hashes, uint32_t n_hashes,
                    uint64_t keep_ns, SeqRequest* call) {
  if (n_hashes == 0 || n_hashes > kMaxPrefixPages) {
    return Status(KVM_ERR_INVALID, "n_hashes is " + std::to_string(n_hashes) + "; 1 to " +
                                       std::to_string(kMaxPrefixPages) + " are allowed");
  }
  if (keep_ns > kMaxPrefixKeepNs) {
    return Status(KVM_ERR_INVALID, "keep_ns is " + std::to_string(keep_ns) + "; at most " +
                                       std::to_string(kMaxPrefixKeepNs) + " is allowed");
  }
  *call = {.verb = SeqVerb::kPublish, .seq = seq, .n_tokens = keep_ns};
  call->hashes.assign(hashes, hashes + n_hashes);
  return Status::ok();
}

Status read_priority(const kvm_priority_params* params, SeqRequest* call) {
  kvm_priority_params p;
  KVM_TRY(ipc::read_params(params, &p, "kvm_priority_params"));
  KVM_TRY(check_reserved(p.reserved, std::size(p.reserved), "kvm_priority_params"));
  if (p.priority > KVM_PRIORITY_MAX) {
    return Status(KVM_ERR_INVALID, "priority is " + std::to_string(p.priority) + "; 0 to " +
                                       std::to_string(KVM_PRIORITY_MAX) + " are allowed");
  }
  if (p.begin >= p.end) {
    return Status(KVM_ERR_INVALID, "begin is " + std::to_string(p.begin) + " and end is " +
                                       std::to_string(p.end) + "; begin must be below end");
  }
  if (p.keep_ns > kMaxPriorityKeepNs) {
    return Status(KVM_ERR_INVALID, "keep_ns is " + std::to_string(p.keep_ns) + "; at most " +
                                       std::to_string(kMaxPriorityKeepNs) + " is allowed");
  }
  *call = {.verb = SeqVerb::kSetPriority,
           .seq = p.seq,
           .range = {.priority = p.priority, .begin = p.begin, .end = p.end, .keep_ns = p.keep_ns}};
  return Status::ok();
}

Status check_snapshot(const char* name, uint32_t flags, SnapshotRequest* call) {
  KVM_TRY(check_flags(flags, call->verb == SnapshotVerb::kSave ? KVM_SAVE_REPLACE : 0, "the call"));
  const size_t n = ::strnlen(name, kMaxSnapshotNameBytes + 1);
  if (n == 0 || n > kMaxSnapshotNameBytes) {
    return Status(KVM_ERR_INVALID, "name has " + std::string(n == 0 ? "no" : "more than 127") +
                                       " bytes; 1 to 127 are allowed");
  }
  call->flags = flags;
  call->name.assign(name, n);
  return Status::ok();
}

Status check_create(kvm_space_id space, const kvm_seq_params* params, SeqRequest* call) {
  kvm_seq_params p;
  KVM_TRY(ipc::read_params(params, &p, "kvm_seq_params"));
  KVM_TRY(check_flags(p.flags, kSeqFlags, "kvm_seq_params"));
  KVM_TRY(check_reserved(p.reserved, std::size(p.reserved), "kvm_seq_params"));
  *call = {SeqVerb::kCreate, p.flags, space, 0, p.reserve};
  return Status::ok();
}

}  // namespace kvm::client
