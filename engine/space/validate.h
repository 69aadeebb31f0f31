// SPDX-License-Identifier: Apache-2.0
// Validation of what a request says by itself: geometry, dtypes, strides against sizes, ranges,
// tree masks, parameters. What depends on a sequence's present state (lengths, holes, dropped
// tokens) is checked when the request begins, by Step and the store.
//
// Errors: INVALID and UNSUPPORTED, each with a sentence that names the value and what is allowed.
// Threads: pure functions.
#ifndef KVM_ENGINE_SPACE_VALIDATE_H_
#define KVM_ENGINE_SPACE_VALIDATE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "base/limits.h"
#include "base/request.h"
#include "base/status.h"
#include "engine/space/space.h"

namespace kvm::engine {

// RowRange is the rows that one item has of a tensor: begin <= row < end.
struct RowRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// A TensorShape says what a tensor has to hold: elements [layer][row][head][dim] for all indices
// below these.
struct TensorShape {
  const char* name = "";
  uint64_t n_layers = 1;
  uint64_t n_rows = 0;
  uint64_t n_heads = 0;
  uint32_t dim = 0;
  // Where only some of the rows are meant: theirs alone must not overlap.
  std::span<const RowRange> parts;
};

// A Tensor is a validated one with every stride filled in, in elements.
struct Tensor {
  std::byte* data = nullptr;  // null: absent
  Dtype dtype = Dtype::kF32;
  uint64_t stride_layer = 0;
  uint64_t stride_row = 0;
  uint64_t stride_head = 0;
  uint64_t row_bytes = 0;   // from the first to behind the last byte of one row's heads
  uint64_t used_bytes = 0;  // from the first to behind the last byte of all elements

  bool is_present() const { return data != nullptr; }
  std::byte* at(uint64_t layer, uint64_t row, uint64_t head) const {
    return data +
           (layer * stride_layer + row * stride_row + head * stride_head) * dtype_size_bytes(dtype);
  }
  uint64_t row_stride_bytes() const { return stride_row * dtype_size_bytes(dtype); }
  uint64_t head_stride_bytes() const { return stride_head * dtype_size_bytes(dtype); }
};

// ENSURES: every element of the shape lies within the view's size_bytes, no two elements overlap
// (of the same part, where there are parts), and elements are aligned to their size. An absent view
// gives an absent tensor.
Result<Tensor> resolve_tensor(const TensorView& view, const TensorShape& shape);

// OK when no element of `out` shares a byte with one of `other`. Tensors whose rows interleave are
// accepted where they have the same row stride; other interleavings are refused.
Status check_apart(const Tensor& out, const char* out_name, const Tensor& other,
                   const char* other_name);

// StepTensors are a step request's tensors, resolved. Those of a half that the request does not
// have, or that has no rows, are absent.
struct StepTensors {
  Tensor k, v, q, o, lse, err;
};

// Fills in what a request that attends with KVM_MODE_DEFAULT takes from its space: afterwards it
// names a mode. Fails: INVALID, UNSUPPORTED (it said numbers itself that contradict that mode).
Status take_defaults(const Space& space, StepRequest* request);

// Checks a step request against its space, except for the state of the sequences.
Result<StepTensors> check_step(const StepRequest& request, const Space& space);

struct ReadTensors {
  Tensor k, v;
};
Result<ReadTensors> check_read(const ReadRequest& request, const Space& space);

struct ObserveTensors {
  Tensor q, column_sums;
};
Result<ObserveTensors> check_observe(const ObserveRequest& request, const Space& space);

// Verb, flags and numbers only.
Status check_seq_request(const SeqRequest& request);

// The verb, the flags and the name.
Status check_snapshot_request(const SnapshotRequest& request);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_SPACE_VALIDATE_H_
