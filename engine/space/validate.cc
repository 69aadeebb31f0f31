// SPDX-License-Identifier: Apache-2.0
#include "engine/space/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "base/counted.h"
#include "engine/space/refusal.h"

namespace kvm::engine {
namespace {

// Wide enough for any product of a stride and an index of a request.
__extension__ typedef unsigned __int128 Wide;

// Elements do not overlap when, taken by ascending stride, each dimension steps over all that the
// ones before it span. Dimensions of one index never step.
// Whether no two of the elements of `n_rows` rows are one.
bool elements_are_apart(const TensorShape& shape, const Tensor& tensor, uint64_t n_rows) {
  std::array<std::pair<uint64_t, uint64_t>, 3> dims = {{{tensor.stride_layer, shape.n_layers},
                                                        {tensor.stride_row, n_rows},
                                                        {tensor.stride_head, shape.n_heads}}};
  std::sort(dims.begin(), dims.end());
  Wide span = shape.dim;
  for (const auto& [stride, count] : dims) {
    if (count <= 1) {
      continue;
    }
    if (stride < span) {
      return false;
    }
    span += Wide{stride} * (count - 1);
  }
  return true;
}

Status check_strides(const TensorShape& shape, const Tensor& tensor) {
  const bool is_apart =
      elements_are_apart(shape, tensor, shape.n_rows) ||
      (!shape.parts.empty() &&
       std::all_of(shape.parts.begin(), shape.parts.end(), [&](const RowRange& part) {
         return elements_are_apart(shape, tensor, part.end - part.begin);
       }));
  if (!is_apart) {
    return refuse(
        Refusal::kElementsOverlap,
        "elements of {} overlap: strides are layer {}, row {}, head {}; a row has {} of {}",
        shape.name, tensor.stride_layer, tensor.stride_row, tensor.stride_head,
        counted(shape.n_heads, "head"), shape.dim);
  }
  return Status::ok();
}

// Outputs of different items must not overlap either. They may lie in each other's gaps only where
// all rows together are apart.
Status check_parts_apart(const TensorShape& shape, const Tensor& tensor) {
  if (!tensor.is_present() || elements_are_apart(shape, tensor, shape.n_rows)) {
    return Status::ok();
  }
  std::vector<RowRange> parts(shape.parts.begin(), shape.parts.end());
  std::sort(parts.begin(), parts.end(),
            [](const RowRange& a, const RowRange& b) { return a.begin < b.begin; });
  const Wide row_span = Wide{tensor.stride_head} * (shape.n_heads - 1) + shape.dim;
  for (size_t i = 1; i < parts.size(); ++i) {
    const RowRange& before = parts[i - 1];
    const Wide end = Wide{tensor.stride_row} * (before.end - 1) + row_span;
    if (Wide{tensor.stride_row} * parts[i].begin < end) {
      return refuse(Refusal::kElementsOverlap,
                    "rows {} to {} and row {} of {}, which are of different items, overlap: "
                    "strides are row {}, head {}",
                    before.begin, before.end - 1, parts[i].begin, shape.name, tensor.stride_row,
                    tensor.stride_head);
    }
  }
  return Status::ok();
}

Status check_dtype(const TensorView& view, const TensorShape& shape, uint32_t only = 0) {
  if (!dtype_is_known(view.dtype)) {
    return refuse(Refusal::kDtype, "dtype of {} is {}; it must be 1 (F32), 2 (F16) or 3 (BF16)",
                  shape.name, view.dtype);
  }
  if (only != 0 && view.dtype != only) {
    return refuse(Refusal::kDtypeNotF32, "dtype of {} is {}; it must be F32", shape.name,
                  dtype_name(static_cast<Dtype>(view.dtype)));
  }
  return Status::ok();
}

Result<Tensor> resolve_required(const TensorView& view, const TensorShape& shape) {
  if (view.data == nullptr) {
    return refuse(Refusal::kTensorAbsent, "{} is absent; it must hold {} rows of {} heads of {}",
                  shape.name, shape.n_rows, shape.n_heads, shape.dim);
  }
  return resolve_tensor(view, shape);
}

Result<Tensor> resolve_f32(const TensorView& view, const TensorShape& shape) {
  if (view.data != nullptr) {
    KVM_TRY(check_dtype(view, shape, KVM_DTYPE_F32));
  }
  return resolve_tensor(view, shape);
}

Status check_layers(const StepRequest& request, const Space& space) {
  const uint32_t n_layers = std::max(1u, request.n_layers);
  if (request.layer_begin >= space.n_layers || n_layers > space.n_layers - request.layer_begin) {
    return refuse(Refusal::kLayers, "{} asked for; the space has layers 0 to {}",
                  numbered(request.layer_begin, n_layers, "layer"), space.n_layers - 1);
  }
  if (n_layers > 1 && request.attend) {
    return refuse(Refusal::kAttendOfLayers, "n_layers is {}; only an append may have more than one",
                  n_layers);
  }
  return Status::ok();
}

Status check_append_layers(const StepRequest& request, const Space& space) {
  const Layer& first = space.layers[request.layer_begin];
  for (uint32_t i = 0; i < std::max(1u, request.n_layers); ++i) {
    const uint32_t index = request.layer_begin + i;
    const Layer& layer = space.layers[index];
    if (layer.kind != KVM_LAYER_OWN) {
      return layer.kind == KVM_LAYER_ALIAS
                 ? refuse(Refusal::kAliasAppend,
                          "layer {} reads the store of layer {}; append there", index,
                          layer.storage_layer)
                 : refuse(Refusal::kAbsentLayerAppend, "layer {} is absent; it stores nothing",
                          index);
    }
    if (layer.n_kv_heads != first.n_kv_heads) {
      return refuse(Refusal::kUnequalLayers,
                    "layers {} and {} have {} and {} kv heads; append to them apart",
                    request.layer_begin, index, first.n_kv_heads, layer.n_kv_heads);
    }
    if (layer.dim_k != first.dim_k || layer.dim_v != first.dim_v) {
      return refuse(Refusal::kUnequalLayers,
                    "layers {} and {} have head dims {}/{} and {}/{}; append to them apart",
                    request.layer_begin, index, first.dim_k, first.dim_v, layer.dim_k, layer.dim_v);
    }
  }
  return Status::ok();
}

ModeChoice choice_of(const StepRequest& request) {
  return {request.mode, request.proposal, request.eps, request.delta, request.budget};
}

Status check_numbers(const StepRequest& request) {
  if ((request.flags & ~kStepFlags) != 0) {
    return refuse(Refusal::kStepFlags, "flags are {:#x}; only {:#x} are known", request.flags,
                  kStepFlags);
  }
  if (!std::isfinite(request.scale) || request.scale < 0) {
    return refuse(Refusal::kScale, "scale is {}; it must be positive, or 0 for the space's",
                  request.scale);
  }
  return check_choice(choice_of(request));
}

Status check_ranges(const StepRequest& request, const kvm_item& item, size_t index) {
  const uint64_t end = uint64_t{item.range_begin} + item.n_ranges;
  if (end > request.ranges.size()) {
    return refuse(Refusal::kItemRanges, "item {} has {}; the request has {}", index,
                  numbered(item.range_begin, item.n_ranges, "range"),
                  counted(request.ranges.size(), "range"));
  }
  uint64_t previous = 0;
  for (uint64_t i = item.range_begin; i < end; ++i) {
    const kvm_range& range = request.ranges[i];
    if (range.begin > range.end || range.begin < previous) {
      return refuse(Refusal::kRangeOrder,
                    "range {} of item {} is [{}, {}) behind {}; ranges must be sorted and disjoint",
                    i - item.range_begin, index, range.begin, range.end, previous);
    }
    previous = range.end;
  }
  return Status::ok();
}

Status check_tree(const StepRequest& request, const kvm_item& item, size_t index) {
  if ((item.flags & KVM_ITEM_TREE) == 0) {
    return Status::ok();
  }
  if ((item.flags & KVM_ITEM_NOT_CAUSAL) != 0) {
    return refuse(Refusal::kTreeNotCausal,
                  "item {} has both TREE and NOT_CAUSAL; they exclude each other", index);
  }
  if (item.n_query > kMaxTreeRows) {
    return refuse(Refusal::kTreeRows, "item {} has a tree of {} rows; at most {} are allowed",
                  index, item.n_query, kMaxTreeRows);
  }
  const uint64_t end = uint64_t{item.tree_begin} + item.n_query;
  if (end > request.tree_mask.size()) {
    return refuse(Refusal::kTreeWords, "item {} has {}; the request has {}", index,
                  numbered(item.tree_begin, item.n_query, "tree word"),
                  counted(request.tree_mask.size(), "tree word"));
  }
  const uint64_t allowed =
      item.n_query == kMaxTreeRows ? ~uint64_t{0} : (uint64_t{1} << item.n_query) - 1;
  for (uint32_t row = 0; row < item.n_query; ++row) {
    const uint64_t word = request.tree_mask[item.tree_begin + row];
    if ((word & ~allowed) != 0) {
      return refuse(Refusal::kTreeBits,
                    "tree word {} of item {} is {:#x}, but the item has {} rows", row, index, word,
                    item.n_query);
    }
  }
  return Status::ok();
}

bool position_is_possible(uint64_t position, uint64_t n) {
  return position <= kMaxTokens && n <= kMaxTokens - position;
}

Status check_item_position(uint64_t position, uint64_t n, const char* what, size_t index) {
  if (position != KVM_POSITION_END && !position_is_possible(position, n)) {
    return refuse(Refusal::kItemPosition, "{} of item {} is {}; positions end at {}", what, index,
                  position, kMaxTokens);
  }
  return Status::ok();
}

Status check_item(const StepRequest& request, size_t index) {
  const kvm_item& item = request.items[index];
  if ((item.flags & ~kItemFlags) != 0) {
    return refuse(Refusal::kItemFlags, "flags of item {} are {:#x}; only {:#x} are known", index,
                  item.flags, kItemFlags);
  }
  if (item.reserved != 0) {
    return refuse(Refusal::kItemReserved, "reserved of item {} is {}; it must be 0", index,
                  item.reserved);
  }
  if (request.append) {
    KVM_TRY(check_item_position(item.append_position, item.n_append, "append_position", index));
  } else if (item.n_append != 0) {
    return refuse(Refusal::kAppendInAttend,
                  "item {} appends {} tokens in an attend; n_append must be 0", index,
                  item.n_append);
  }
  if (!request.attend) {
    return Status::ok();
  }
  if (item.n_append != 0 && (item.flags & KVM_ITEM_RESTORE) != 0) {
    return refuse(Refusal::kItemFlags, "item {} restores tokens (KVM_ITEM_RESTORE); append them",
                  index);
  }
  if (item.n_query > kMaxQueryRows) {
    return refuse(Refusal::kItemRows, "item {} has {} query rows; at most {} are allowed", index,
                  item.n_query, kMaxQueryRows);
  }
  KVM_TRY(check_item_position(item.query_position, item.n_query, "query_position", index));
  KVM_TRY(check_ranges(request, item, index));
  return check_tree(request, item, index);
}

Status check_appended_once(const StepRequest& request) {
  std::vector<std::pair<kvm_seq_id, size_t>> seen;
  for (size_t i = 0; i < request.items.size(); ++i) {
    if (request.items[i].n_append != 0) {
      seen.emplace_back(request.items[i].seq, i);
    }
  }
  std::sort(seen.begin(), seen.end());
  for (size_t i = 1; i < seen.size(); ++i) {
    if (seen[i].first == seen[i - 1].first) {
      return refuse(Refusal::kAppendedTwice, "items {} and {} append to the same sequence {:#x}",
                    seen[i - 1].second, seen[i].second, seen[i].first);
    }
  }
  return Status::ok();
}

Status check_query_rows_apart(const StepRequest& request) {
  std::vector<std::pair<uint64_t, size_t>> rows;
  for (size_t i = 0; i < request.items.size(); ++i) {
    if (request.items[i].n_query != 0) {
      rows.emplace_back(request.items[i].query_row, i);
    }
  }
  std::sort(rows.begin(), rows.end());
  for (size_t i = 1; i < rows.size(); ++i) {
    const kvm_item& before = request.items[rows[i - 1].second];
    if (uint64_t{before.query_row} + before.n_query > rows[i].first) {
      return refuse(Refusal::kQueryRowsShared, "items {} and {} share query row {}",
                    rows[i - 1].second, rows[i].second, rows[i].first);
    }
  }
  return Status::ok();
}

Status check_items(const StepRequest& request) {
  if (request.items.empty() || request.items.size() > kMaxItems) {
    return refuse(Refusal::kItemCount, "n_items is {}; 1 to {} are allowed", request.items.size(),
                  kMaxItems);
  }
  if (request.ranges.size() > kMaxRanges) {
    return refuse(Refusal::kRangeCount, "n_ranges is {}; at most {} are allowed",
                  request.ranges.size(), kMaxRanges);
  }
  uint64_t n_item_ranges = 0;
  for (size_t i = 0; i < request.items.size(); ++i) {
    KVM_TRY(check_item(request, i));
    n_item_ranges += request.attend ? request.items[i].n_ranges : 0;
    // Each item gets ranges of its own: without a bound 4,096 items that share 65,536 ranges would
    // take gigabytes.
    if (n_item_ranges > kMaxRanges) {
      return refuse(Refusal::kRangesOfItems,
                    "items 0 to {} have {} ranges together; at most {} are allowed", i,
                    n_item_ranges, kMaxRanges);
    }
  }
  if (request.items.size() == 1) {
    return Status::ok();
  }
  if (request.append) {
    KVM_TRY(check_appended_once(request));
  }
  return request.attend ? check_query_rows_apart(request) : Status::ok();
}

// The rows that the items of a request have in its tensors.
struct RowsOfItems {
  uint64_t n = 0;  // so many rows the tensors must have
  std::vector<RowRange> parts;

  void add(uint64_t begin, uint64_t n_rows) {
    if (n_rows != 0) {
      parts.push_back({begin, begin + n_rows});
      n = std::max(n, begin + n_rows);
    }
  }
};

Status check_outputs_apart(const StepTensors& t) {
  const std::pair<const Tensor*, const char*> all[] = {
      {&t.o, "o"}, {&t.lse, "lse"}, {&t.err, "err"}, {&t.q, "q"}, {&t.k, "k"}, {&t.v, "v"}};
  constexpr size_t kOutputs = 3;
  for (size_t i = 0; i < kOutputs; ++i) {
    for (size_t j = i + 1; j < std::size(all); ++j) {
      KVM_TRY(check_apart(*all[i].first, all[i].second, *all[j].first, all[j].second));
    }
  }
  return Status::ok();
}

Status check_layer(uint32_t index, const Space& space) {
  if (index >= space.n_layers) {
    return refuse(Refusal::kLayer, "layer {} does not exist; the space has {}", index,
                  space.n_layers);
  }
  if (space.layers[index].kind == KVM_LAYER_ABSENT) {
    return refuse(Refusal::kAbsentLayer, "layer {} is absent; it stores nothing", index);
  }
  return Status::ok();
}

}  // namespace

Result<Tensor> resolve_tensor(const TensorView& view, const TensorShape& shape) {
  if (view.data == nullptr) {
    return Tensor{};
  }
  KVM_TRY(check_dtype(view, shape));
  Tensor tensor;
  tensor.data = static_cast<std::byte*>(view.data);
  tensor.dtype = static_cast<Dtype>(view.dtype);
  const uint64_t size = dtype_size_bytes(tensor.dtype);
  if (reinterpret_cast<uintptr_t>(view.data) % size != 0) {
    return refuse(Refusal::kTensorAlign,
                  "{} starts at an address that is no multiple of {}, its element size", shape.name,
                  size);
  }
  // Packed strides are products of numbers of 64 bits at most that the request itself bounds to far
  // less, except the given ones: those are checked before they are multiplied.
  const uint64_t n_elements = view.size_bytes / size;
  tensor.stride_head = view.stride_head != 0 ? view.stride_head : shape.dim;
  const Wide packed_row = Wide{tensor.stride_head} * shape.n_heads;
  if (packed_row > UINT64_MAX) {
    return refuse(Refusal::kStrideHead,
                  "stride_head of {} is {}; rows of {} heads do not fit into {} bytes", shape.name,
                  view.stride_head, shape.n_heads, view.size_bytes);
  }
  tensor.stride_row = view.stride_row != 0 ? view.stride_row : static_cast<uint64_t>(packed_row);
  const Wide packed_layer = Wide{tensor.stride_row} * shape.n_rows;
  if (view.stride_layer == 0 && shape.n_layers > 1 && packed_layer > n_elements) {
    return refuse(Refusal::kStrideLayer,
                  "{} has {} bytes; layers of {} rows {} elements apart do not fit", shape.name,
                  view.size_bytes, shape.n_rows, tensor.stride_row);
  }
  tensor.stride_layer =
      view.stride_layer != 0 ? view.stride_layer : static_cast<uint64_t>(packed_layer);
  if (shape.n_layers == 0 || shape.n_rows == 0 || shape.n_heads == 0) {
    return tensor;
  }
  const Wide row_span = Wide{tensor.stride_head} * (shape.n_heads - 1) + shape.dim;
  const Wide end = Wide{tensor.stride_layer} * (shape.n_layers - 1) +
                   Wide{tensor.stride_row} * (shape.n_rows - 1) + row_span;
  if (end > n_elements) {
    const auto needed = static_cast<uint64_t>(std::min<Wide>(end * size, UINT64_MAX));
    return refuse(Refusal::kTensorBytes, "{} has {}; {}, {}, {} of {} {} need {}", shape.name,
                  counted(view.size_bytes, "byte"), counted(shape.n_layers, "layer"),
                  counted(shape.n_rows, "row"), counted(shape.n_heads, "head"), shape.dim,
                  dtype_name(tensor.dtype), needed);
  }
  KVM_TRY(check_strides(shape, tensor));
  tensor.row_bytes = static_cast<uint64_t>(row_span) * size;
  tensor.used_bytes = static_cast<uint64_t>(end) * size;
  return tensor;
}

Status check_apart(const Tensor& out, const char* out_name, const Tensor& other,
                   const char* other_name) {
  if (!out.is_present() || !other.is_present()) {
    return Status::ok();
  }
  const auto a = reinterpret_cast<uintptr_t>(out.data);
  const auto b = reinterpret_cast<uintptr_t>(other.data);
  if (a + out.used_bytes <= b || b + other.used_bytes <= a) {
    return Status::ok();
  }
  const uint64_t stride = out.row_stride_bytes();
  if (stride == other.row_stride_bytes() && stride != 0) {
    // Both repeat every `stride` bytes: look at one period that begins with a row of `out`.
    const uint64_t at = b >= a ? (b - a) % stride : (stride - (a - b) % stride) % stride;
    if (out.row_bytes <= at && at + other.row_bytes <= stride) {
      return Status::ok();
    }
  }
  return refuse(Refusal::kTensorOverlap, "{} and {} overlap in memory", out_name, other_name);
}

Status take_defaults(const Space& space, StepRequest* request) {
  const ModeChoice& from = space.default_choice;
  if (!request->attend || request->mode != KVM_MODE_DEFAULT || from.mode == KVM_MODE_EXACT) {
    return Status::ok();
  }
  request->mode = from.mode;
  if (request->proposal == KVM_PROPOSAL_DEFAULT) {
    request->proposal = from.proposal;
  }
  // The space's budget would take the place of the request's own eps, except in TOPK, which knows
  // no eps, and where the space's mode has both. Likewise its eps beside a budget.
  const bool has_both = from.mode == KVM_MODE_VERIFIED ||
                        (from.mode == KVM_MODE_SAMPLED && from.budget != 0 && from.eps != 0);
  const bool takes_budget = request->eps == 0 || from.mode == KVM_MODE_TOPK || has_both;
  const bool takes_eps = request->budget == 0 || from.mode != KVM_MODE_SAMPLED || has_both;
  if (request->budget == 0 && takes_budget) {
    request->budget = from.budget;
  }
  if (request->eps == 0 && takes_eps) {
    request->eps = from.eps;
  }
  if (request->delta == 0) {
    request->delta = from.delta;
  }
  const Status status = check_choice(choice_of(*request));
  return status.is_ok() ? Status::ok()
                        : Status(status.code(),
                                 fmt::format("{}; the mode is the default of space '{}'",
                                             status.message(), space.name),
                                 status.detail());
}

Result<StepTensors> check_step(const StepRequest& request, const Space& space) {
  KVM_TRY(check_numbers(request));
  KVM_TRY(check_layers(request, space));
  KVM_TRY(check_items(request));
  RowsOfItems appended;
  RowsOfItems queries;
  for (const kvm_item& item : request.items) {
    appended.add(item.append_row, request.append ? item.n_append : 0);
    queries.add(item.query_row, request.attend ? item.n_query : 0);
  }
  const Layer& layer = space.layers[request.layer_begin];
  StepTensors t;
  if (appended.n != 0) {
    KVM_TRY(check_append_layers(request, space));
    TensorShape shape = {"k",         std::max(1u, request.n_layers),
                         appended.n,  layer.n_kv_heads,
                         layer.dim_k, appended.parts};
    KVM_TRY_ASSIGN(t.k, resolve_required(request.k, shape));
    shape.name = "v";
    shape.dim = layer.dim_v;
    if (!space.v_in_k) {
      KVM_TRY_ASSIGN(t.v, resolve_required(request.v, shape));
    } else if (request.v.data != nullptr) {
      return refuse(Refusal::kValuesInKeys,
                    "v is there; space '{}' has KVM_SPACE_V_IN_K, so it must be NONE", space.name);
    }
  }
  if (request.attend) {
    KVM_TRY(check_layer(request.layer_begin, space));
  }
  if (queries.n != 0) {
    const auto shape_of = [&](const char* name, uint32_t dim) {
      return TensorShape{name, 1, queries.n, layer.n_q_heads, dim, queries.parts};
    };
    const TensorShape o = shape_of("o", layer.dim_v);
    const TensorShape lse = shape_of("lse", 1);
    const TensorShape err = shape_of("err", 2);
    KVM_TRY_ASSIGN(t.q, resolve_required(request.q, shape_of("q", layer.dim_k)));
    KVM_TRY_ASSIGN(t.o, resolve_required(request.o, o));
    KVM_TRY_ASSIGN(t.lse, resolve_f32(request.lse, lse));
    KVM_TRY_ASSIGN(t.err, resolve_f32(request.err, err));
    KVM_TRY(check_parts_apart(o, t.o));
    KVM_TRY(check_parts_apart(lse, t.lse));
    KVM_TRY(check_parts_apart(err, t.err));
    KVM_TRY(check_outputs_apart(t));
  }
  return t;
}

Result<ReadTensors> check_read(const ReadRequest& request, const Space& space) {
  KVM_TRY(check_layer(request.layer, space));
  const Layer& layer = space.layers[request.layer];
  const uint64_t n_heads = layer.n_kv_heads;
  ReadTensors t;
  if (request.n_tokens > kMaxTokens) {
    return refuse(Refusal::kReadTokens, "n_tokens is {}; at most {} are allowed", request.n_tokens,
                  kMaxTokens);
  }
  if (request.n_tokens != 0) {
    KVM_TRY_ASSIGN(t.k,
                   resolve_tensor(request.k, {"k", 1, request.n_tokens, n_heads, layer.dim_k}));
    KVM_TRY_ASSIGN(t.v,
                   resolve_tensor(request.v, {"v", 1, request.n_tokens, n_heads, layer.dim_v}));
    KVM_TRY(check_apart(t.k, "k", t.v, "v"));
  }
  return t;
}

Result<ObserveTensors> check_observe(const ObserveRequest& request, const Space& space) {
  KVM_TRY(check_layer(request.layer, space));
  const Layer& layer = space.layers[request.layer];
  if (!position_is_possible(request.column_begin, request.n_columns)) {
    return refuse(Refusal::kColumns, "columns {} to {} + {} do not exist; positions end at {}",
                  request.column_begin, request.column_begin, request.n_columns, kMaxTokens);
  }
  if (!position_is_possible(request.query_position, request.n_rows)) {
    return refuse(Refusal::kQueryPosition, "query_position is {}; positions end at {}",
                  request.query_position, kMaxTokens);
  }
  ObserveTensors t;
  if (request.n_rows != 0) {
    KVM_TRY_ASSIGN(
        t.q, resolve_required(request.q, {"q", 1, request.n_rows, layer.n_q_heads, layer.dim_k}));
  }
  if (request.n_columns != 0) {
    const TensorShape shape = {"column_sums", 1, request.n_columns, layer.n_kv_heads, 1};
    KVM_TRY_ASSIGN(t.column_sums, resolve_required(request.column_sums, shape));
    KVM_TRY(check_dtype(request.column_sums, shape, KVM_DTYPE_F32));
  }
  return t;
}

Status check_priority(const PriorityRange& range) {
  if (range.priority > KVM_PRIORITY_MAX) {
    return refuse(Refusal::kPriority, "priority is {}; 0 to {} are allowed", range.priority,
                  static_cast<uint32_t>(KVM_PRIORITY_MAX));
  }
  if (range.begin >= range.end) {
    return refuse(Refusal::kPriorityRange, "begin is {} and end is {}; begin must be below end",
                  range.begin, range.end);
  }
  if (range.keep_ns > kMaxPriorityKeepNs) {
    return refuse(Refusal::kPriorityKeep, "keep_ns is {}; at most {} is allowed", range.keep_ns,
                  kMaxPriorityKeepNs);
  }
  return Status::ok();
}

Status check_seq_request(const SeqRequest& request) {
  if (request.verb < SeqVerb::kCreate || request.verb > kLastSeqVerb) {
    return refuse(Refusal::kSeqVerb, "verb {} is unknown", static_cast<uint32_t>(request.verb));
  }
  if (request.verb == SeqVerb::kCreate && (request.flags & ~kSeqFlags) != 0) {
    return refuse(Refusal::kSeqFlags, "flags are {:#x}; only {:#x} is known", request.flags,
                  kSeqFlags);
  }
  if (request.verb == SeqVerb::kCreate && request.n_tokens > kMaxTokens) {
    return refuse(Refusal::kSeqReserve, "reserve is {}; at most {} tokens fit into a sequence",
                  request.n_tokens, kMaxTokens);
  }
  if (request.verb == SeqVerb::kSetPriority) {
    KVM_TRY(check_priority(request.range));
  }
  if (request.hashes.size() > kMaxPrefixPages ||
      (!request.hashes.empty() && request.verb != SeqVerb::kPublish)) {
    return refuse(Refusal::kPrefixHashes, "a prefix has {} hashes; 1 to {} are allowed",
                  request.hashes.size(), kMaxPrefixPages);
  }
  if (!request.hashes.empty() && request.n_tokens > kMaxPrefixKeepNs) {
    return refuse(Refusal::kPrefixKeep, "keep_ns is {}; at most {} is allowed", request.n_tokens,
                  kMaxPrefixKeepNs);
  }
  return Status::ok();
}

Status check_snapshot_request(const SnapshotRequest& request) {
  if (request.verb < SnapshotVerb::kSave || request.verb > SnapshotVerb::kRemove) {
    return {KVM_ERR_INVALID,
            fmt::format("verb {} is unknown", static_cast<uint32_t>(request.verb))};
  }
  const uint32_t known = request.verb == SnapshotVerb::kSave ? kSaveReplace : 0;
  if ((request.flags & ~known) != 0) {
    return {KVM_ERR_INVALID,
            fmt::format("flags are {:#x}; only {:#x} is known", request.flags, known)};
  }
  if (request.name.empty() || request.name.size() > kMaxSnapshotNameBytes) {
    return {KVM_ERR_INVALID, fmt::format("the snapshot's name has {} bytes; 1 to {} are allowed",
                                         request.name.size(), kMaxSnapshotNameBytes)};
  }
  for (const char c : request.name) {
    const bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (!is_letter && !(c >= '-' && c <= '9') && c != '_') {  // "-./" and digits
      return {KVM_ERR_INVALID,
              fmt::format("the snapshot's name has a byte {:#04x}; letters, digits and any of "
                          "._/- are allowed",
                          static_cast<unsigned char>(c))};
    }
  }
  return Status::ok();
}

}  // namespace kvm::engine
