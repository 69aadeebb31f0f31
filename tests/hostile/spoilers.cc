// SPDX-License-Identifier: Apache-2.0
// For each reason a request that has it: the tables of requests.h.
#include <limits>
#include <utility>

#include "tests/hostile/requests.h"

namespace kvm::testing {
namespace {

using engine::Refusal;
using ipc::kStepAppend;
using ipc::kStepAttend;
using ipc::Reject;
using kvm::SeqVerb;

constexpr uint32_t kBoth = kStepAppend | kStepAttend;

// A step over the plain space, changed.
template <typename Reason>
Spoiler<Reason> step_with(Reason reason, uint32_t verbs, std::function<void(Draft*)> change,
                          uint32_t space = kPlain, uint32_t n_items = 1) {
  return {reason, [=](RequestMaker* maker, uint32_t slot) {
            Draft draft = maker->step(slot, verbs, space, n_items);
            draft.ranges.clear();
            draft.tree.clear();
            for (kvm_item& item : draft.items) {
              item.flags = 0;
              item.n_ranges = 0;
            }
            draft.seal();
            change(&draft);
            return draft;
          }};
}

// The same, with counts and lengths filled in after the change.
Spoiler<Refusal> sealed_step(Refusal refusal, uint32_t verbs, std::function<void(Draft*)> change,
                             uint32_t space = kPlain, uint32_t n_items = 1) {
  return step_with(
      refusal, verbs,
      [change = std::move(change)](Draft* draft) {
        change(draft);
        draft->seal();
      },
      space, n_items);
}

// As many items as together have more ranges than an engine takes, over ranges that they share.
Draft with_shared_ranges(RequestMaker* maker, uint32_t slot) {
  Draft draft = maker->step(slot, kStepAttend, kPlain, 5);
  draft.tree.clear();
  draft.ranges.assign(kMaxRanges, kvm_range{});
  for (kvm_item& item : draft.items) {
    item.flags = 0;
    item.range_begin = 0;
    item.n_ranges = kMaxRanges;
  }
  draft.entry.block_offset = kLargeBlockAt;
  draft.seal();
  return draft;
}

Spoiler<Refusal> read_with(Refusal refusal, std::function<void(ipc::ReadBlock*)> change) {
  return {refusal, [=](RequestMaker* maker, uint32_t slot) {
            Draft draft = maker->read(slot, kPlain);
            change(&draft.read);
            return draft;
          }};
}

Spoiler<Refusal> observe_with(Refusal refusal, std::function<void(ipc::ObserveBlock*)> change) {
  return {refusal, [=](RequestMaker* maker, uint32_t slot) {
            Draft draft = maker->observe(slot, kPlain);
            change(&draft.observe);
            return draft;
          }};
}

}  // namespace

const std::vector<Spoiler<Reject>>& reject_spoilers() {
  static const std::vector<Spoiler<Reject>> kAll = {
      step_with(Reject::kOpcode, kBoth, [](Draft* d) { d->entry.opcode = 77; }),
      step_with(Reject::kVersion, kBoth, [](Draft* d) { d->entry.version = 2; }),
      step_with(Reject::kEntryFlags, kBoth, [](Draft* d) { d->entry.flags = 1; }),
      step_with(Reject::kEntryReserved, kBoth, [](Draft* d) { d->entry.reserved[1] = 1; }),
      step_with(Reject::kUnknownRegion, kBoth, [](Draft* d) { d->entry.region = 1000; }),
      step_with(Reject::kBlockAlignment, kBoth, [](Draft* d) { d->entry.block_offset += 8; }),
      step_with(Reject::kBlockBounds, kBoth, [](Draft* d) { d->entry.block_offset = 1ull << 40; }),
      step_with(Reject::kBlockLength, kBoth, [](Draft* d) { d->entry.block_length += 8; }),
      step_with(Reject::kResultAlign, kBoth, [](Draft* d) { d->entry.result_offset += 4; }),
      step_with(Reject::kResultBounds, kBoth,
                [](Draft* d) { d->entry.result_offset = ~uint64_t{63}; }),
      step_with(Reject::kBlockReserved, kBoth, [](Draft* d) { d->step.reserved[2] = 1; }),
      step_with(Reject::kVerbs, kBoth, [](Draft* d) { d->step.verbs = 8; }),
      step_with(Reject::kBlockFlags, kBoth, [](Draft* d) { d->step.flags = 1u << 31; }),
      step_with(Reject::kItemCount, kBoth, [](Draft* d) { d->step.n_items = UINT32_MAX; }),
      step_with(Reject::kRangeCount, kBoth, [](Draft* d) { d->step.n_ranges = UINT32_MAX; }),
      step_with(Reject::kTreeCount, kBoth, [](Draft* d) { d->step.n_tree_words = UINT32_MAX; }),
      step_with(Reject::kMode, kBoth, [](Draft* d) { d->step.mode = 6; }),
      step_with(Reject::kProposal, kBoth, [](Draft* d) { d->step.proposal = 4; }),
      step_with(Reject::kNotFinite, kBoth,
                [](Draft* d) { d->step.scale = std::numeric_limits<float>::quiet_NaN(); }),
      step_with(Reject::kItemFlags, kBoth, [](Draft* d) { d->items[0].flags = 1u << 9; }),
      step_with(Reject::kItemReserved, kBoth, [](Draft* d) { d->items[0].reserved = 1; }),
      step_with(Reject::kItemRanges, kBoth, [](Draft* d) { d->items[0].n_ranges = 7; }),
      step_with(Reject::kItemTree, kBoth, [](Draft* d) { d->items[0].flags = KVM_ITEM_TREE; }),
      step_with(Reject::kItemRows, kBoth, [](Draft* d) { d->items[0].n_query = 1u << 20; }),
      step_with(Reject::kTensorAbsent, kBoth, [](Draft* d) { d->step.k.region = 0; }),
      step_with(Reject::kTensorDtype, kBoth, [](Draft* d) { d->step.q.dtype = 9; }),
      step_with(Reject::kTensorAlign, kBoth, [](Draft* d) { d->step.q.offset += 1; }),
      step_with(Reject::kTensorBounds, kBoth, [](Draft* d) { d->step.v.size_bytes = 1u << 30; }),
      step_with(Reject::kTensorOverlap, kBoth, [](Draft* d) { d->step.o = d->step.q; }),
      {Reject::kSeqVerb,
       [](RequestMaker* maker, uint32_t slot) {
         return maker->seq(slot, static_cast<SeqVerb>(static_cast<uint32_t>(kLastSeqVerb) + 1),
                           kPlain);
       }},
      {Reject::kSnapshotVerb,
       [](RequestMaker* maker, uint32_t slot) {
         return maker->snapshot(slot, static_cast<SnapshotVerb>(4), kPlain);
       }},
      {Reject::kSnapshotName,
       [](RequestMaker* maker, uint32_t slot) {
         Draft draft = maker->snapshot(slot, SnapshotVerb::kRemove, kPlain);
         draft.snapshot.name[127] = 'x';
         return draft;
       }},
  };
  return kAll;
}

const std::vector<Spoiler<Refusal>>& refusal_spoilers() {
  static const std::vector<Spoiler<Refusal>> kAll = {
      step_with(Refusal::kElementsOverlap, kBoth,
                [](Draft* d) {
                  d->items[0].n_append = 4;
                  d->step.k.stride_row = 1;
                }),
      step_with(Refusal::kTensorAbsent, kBoth, [](Draft* d) { d->step.v = {}; }),
      step_with(
          Refusal::kValuesInKeys, kBoth, [](Draft* d) { d->step.v = d->step.k; }, kLatent),
      step_with(Refusal::kLayers, kBoth, [](Draft* d) { d->step.layer_begin = 2; }),
      step_with(Refusal::kAttendOfLayers, kStepAttend, [](Draft* d) { d->step.n_layers = 2; }),
      step_with(
          Refusal::kAliasAppend, kStepAppend, [](Draft* d) { d->step.layer_begin = 1; }, kLayered),
      step_with(
          Refusal::kAbsentLayerAppend, kStepAppend, [](Draft* d) { d->step.layer_begin = 2; },
          kLayered),
      step_with(
          Refusal::kUnequalLayers, kStepAppend,
          [](Draft* d) {
            d->step.layer_begin = 3;
            d->step.n_layers = 2;
          },
          kLayered),
      step_with(Refusal::kGraph, kStepAttend,
                [](Draft* d) {
                  d->step.mode = KVM_MODE_SAMPLED;
                  d->step.proposal = KVM_PROPOSAL_GRAPH;
                }),
      step_with(Refusal::kTopkBudget, kStepAttend, [](Draft* d) { d->step.mode = KVM_MODE_TOPK; }),
      step_with(Refusal::kVerifiedLsh, kStepAttend,
                [](Draft* d) {
                  d->step.mode = KVM_MODE_VERIFIED;
                  d->step.proposal = KVM_PROPOSAL_LSH;
                }),
      step_with(Refusal::kScale, kBoth, [](Draft* d) { d->step.scale = -1; }),
      step_with(Refusal::kEps, kBoth, [](Draft* d) { d->step.eps = 1; }),
      step_with(Refusal::kDelta, kBoth, [](Draft* d) { d->step.delta = -1; }),
      sealed_step(Refusal::kRangeOrder, kStepAttend,
                  [](Draft* d) {
                    d->ranges.push_back({5, 3});
                    d->items[0].n_ranges = 1;
                  }),
      sealed_step(Refusal::kTreeNotCausal, kStepAttend,
                  [](Draft* d) {
                    d->tree.assign(d->items[0].n_query, 1);
                    d->items[0].flags = KVM_ITEM_TREE | KVM_ITEM_NOT_CAUSAL;
                  }),
      sealed_step(Refusal::kTreeBits, kStepAttend,
                  [](Draft* d) {
                    d->tree.assign(d->items[0].n_query, uint64_t{1} << 63);
                    d->items[0].flags = KVM_ITEM_TREE;
                  }),
      step_with(Refusal::kItemPosition, kStepAppend,
                [](Draft* d) { d->items[0].append_position = uint64_t{1} << 60; }),
      step_with(Refusal::kAppendInAttend, kStepAttend, [](Draft* d) { d->items[0].n_append = 1; }),
      sealed_step(
          Refusal::kAppendedTwice, kStepAppend, [](Draft* d) { d->items[1].seq = d->items[0].seq; },
          kPlain, 2),
      sealed_step(
          Refusal::kQueryRowsShared, kStepAttend, [](Draft* d) { d->items[1].query_row = 0; },
          kPlain, 2),
      {Refusal::kRangesOfItems, with_shared_ranges},
      read_with(Refusal::kLayer, [](ipc::ReadBlock* read) { read->layer = 2; }),
      step_with(
          Refusal::kAbsentLayer, kStepAttend, [](Draft* d) { d->step.layer_begin = 2; }, kLayered),
      step_with(Refusal::kStrideHead, kStepAppend,
                [](Draft* d) { d->step.k.stride_head = uint64_t{1} << 63; }),
      step_with(Refusal::kStrideLayer, kStepAppend,
                [](Draft* d) {
                  d->step.n_layers = 2;
                  d->step.k.stride_row = uint64_t{1} << 40;
                }),
      step_with(Refusal::kTensorBytes, kStepAppend, [](Draft* d) { d->items[0].n_append = 4096; }),
      read_with(Refusal::kReadTokens,
                [](ipc::ReadBlock* read) { read->n_tokens = uint64_t{1} << 50; }),
      observe_with(Refusal::kColumns,
                   [](ipc::ObserveBlock* observe) { observe->column_begin = uint64_t{1} << 60; }),
      observe_with(Refusal::kQueryPosition,
                   [](ipc::ObserveBlock* observe) { observe->query_position = uint64_t{1} << 60; }),
  };
  return kAll;
}

}  // namespace kvm::testing
