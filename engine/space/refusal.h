// SPDX-License-Identifier: Apache-2.0
// A Refusal is why a request is refused for what it says by itself (engine/space/validate.h): the
// detail of its Status. They are one list, so that tests can count that each is reached.
//
// For some of them the daemon closes the client before the engine sees the request
// (ipc/validate.h): only an engine in the client's own process answers these.
#ifndef KVM_ENGINE_SPACE_REFUSAL_H_
#define KVM_ENGINE_SPACE_REFUSAL_H_

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/status.h"
#include "kvm.h"

namespace kvm::engine {

enum class Refusal : uint8_t {
  kNone = 0,
  kElementsOverlap,
  kDtype,
  kDtypeNotF32,
  kTensorAbsent,
  kValuesInKeys,
  kLayers,
  kAttendOfLayers,
  kAliasAppend,
  kAbsentLayerAppend,
  kUnequalLayers,
  kGraph,
  kTopkBudget,
  kVerifiedLsh,
  kStepFlags,
  kMode,
  kProposal,
  kScale,
  kEps,
  kDelta,
  kItemRanges,
  kRangeOrder,
  kTreeNotCausal,
  kTreeRows,
  kTreeWords,
  kTreeBits,
  kItemPosition,
  kItemFlags,
  kItemReserved,
  kAppendInAttend,
  kItemRows,
  kAppendedTwice,
  kQueryRowsShared,
  kItemCount,
  kRangeCount,
  kRangesOfItems,
  kLayer,
  kAbsentLayer,
  kTensorAlign,
  kStrideHead,
  kStrideLayer,
  kTensorBytes,
  kTensorOverlap,
  kReadTokens,
  kColumns,
  kQueryPosition,
  kSeqVerb,
  kSeqFlags,
  kPrefixHashes,
  kPrefixKeep,
  kPriority,
  kPriorityRange,
  kPriorityKeep,
  kSeqReserve,
  kCount,  // not a reason
};

inline constexpr size_t kRefusals = static_cast<size_t>(Refusal::kCount);

// Labels in statistics, by Refusal.
inline constexpr std::array<const char*, kRefusals> kRefusalNames = {
    "none",
    "elements_overlap",
    "dtype",
    "dtype_not_f32",
    "tensor_absent",
    "values_in_keys",
    "layers",
    "attend_of_layers",
    "alias_append",
    "absent_layer_append",
    "unequal_layers",
    "graph",
    "topk_budget",
    "verified_lsh",
    "step_flags",
    "mode",
    "proposal",
    "scale",
    "eps",
    "delta",
    "item_ranges",
    "range_order",
    "tree_not_causal",
    "tree_rows",
    "tree_words",
    "tree_bits",
    "item_position",
    "item_flags",
    "item_reserved",
    "append_in_attend",
    "item_rows",
    "appended_twice",
    "query_rows_shared",
    "item_count",
    "range_count",
    "ranges_of_items",
    "layer",
    "absent_layer",
    "tensor_align",
    "stride_head",
    "stride_layer",
    "tensor_bytes",
    "tensor_overlap",
    "read_tokens",
    "columns",
    "query_position",
    "seq_verb",
    "seq_flags",
    "prefix_hashes",
    "prefix_keep",
    "priority",
    "priority_range",
    "priority_keep",
    "seq_reserve",
};
static_assert(kRefusalNames.back() != nullptr, "a refusal has no label");

// INVALID for this reason, with its sentence.
template <typename... Args>
Status refuse(Refusal reason, fmt::format_string<Args...> format, Args&&... args) {
  return {KVM_ERR_INVALID, fmt::format(format, std::forward<Args>(args)...),
          static_cast<uint32_t>(reason)};
}

}  // namespace kvm::engine

#endif  // KVM_ENGINE_SPACE_REFUSAL_H_
