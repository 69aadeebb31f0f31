// SPDX-License-Identifier: Apache-2.0
#include "client/merge.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/limits.h"
#include "base/merge.h"
#include "client/checks.h"

namespace kvm::client {

namespace {

// A checked HOST tensor [rows][heads][dim].
struct Rows {
  uint8_t* data = nullptr;
  Dtype dtype = Dtype::kF32;
  uint64_t stride_row = 0;
  uint64_t stride_head = 0;

  bool is_present() const { return data != nullptr; }
};

float load(const Rows& rows, uint64_t at) {
  const uint8_t* p = rows.data + at * dtype_size_bytes(rows.dtype);
  switch (rows.dtype) {
    case Dtype::kF32:
      return *reinterpret_cast<const float*>(p);
    case Dtype::kF16:
      return f16_to_f32(*reinterpret_cast<const uint16_t*>(p));
    case Dtype::kBf16:
      return bf16_to_f32(*reinterpret_cast<const uint16_t*>(p));
  }
  return 0;
}

void store(const Rows& rows, uint64_t at, float value) {
  uint8_t* p = rows.data + at * dtype_size_bytes(rows.dtype);
  switch (rows.dtype) {
    case Dtype::kF32:
      *reinterpret_cast<float*>(p) = value;
      return;
    case Dtype::kF16:
      *reinterpret_cast<uint16_t*>(p) = f32_to_f16(value);
      return;
    case Dtype::kBf16:
      *reinterpret_cast<uint16_t*>(p) = f32_to_bf16(value);
      return;
  }
}

// a * b, or UINT64_MAX when that does not fit.
uint64_t product_of(uint64_t a, uint64_t b) {
  uint64_t out = 0;
  return __builtin_mul_overflow(a, b, &out) ? UINT64_MAX : out;
}

Status check_extent(const kvm_merge_params& params, const Rows& rows, uint64_t dim,
                    uint64_t size_bytes, const std::string& name) {
  const uint64_t spans[] = {product_of(params.n_rows - 1, rows.stride_row),
                            product_of(params.n_heads - 1, rows.stride_head), dim};
  uint64_t elements = 0;
  uint64_t bytes = 0;
  for (const uint64_t span : spans) {
    if (__builtin_add_overflow(elements, span, &elements)) {
      elements = UINT64_MAX;
    }
  }
  if (__builtin_mul_overflow(elements, uint64_t{dtype_size_bytes(rows.dtype)}, &bytes) ||
      bytes > size_bytes) {
    return Status(KVM_ERR_INVALID, name + " has " + std::to_string(size_bytes) +
                                       " bytes; its shape and strides need " +
                                       std::to_string(elements) + " elements");
  }
  return Status::ok();
}

Status resolve(const kvm_merge_params& params, const kvm_tensor& tensor, const std::string& name,
               Element element, uint64_t dim, Rows* out) {
  if (tensor.buffer.kind != KVM_BUFFER_HOST) {
    return Status(KVM_ERR_INVALID, name + " has buffer kind " + std::to_string(tensor.buffer.kind) +
                                       "; kvm_merge takes HOST buffers");
  }
  static const ArenaDirectory kNoArenas;
  Tensor checked;
  const TensorSlot slot{&tensor, name.c_str(), element, &checked};
  KVM_TRY(kNoArenas.resolve({&slot, 1}));
  out->data = checked.data;
  out->dtype = static_cast<Dtype>(checked.dtype);
  out->stride_head = checked.stride_head != 0 ? checked.stride_head : dim;
  out->stride_row =
      checked.stride_row != 0 ? checked.stride_row : product_of(params.n_heads, out->stride_head);
  return check_extent(params, *out, dim, checked.size_bytes, name);
}

struct Merge {
  std::vector<Rows> o;
  std::vector<Rows> lse;
  Rows out_o;
  Rows out_lse;
};

Status resolve_all(const kvm_merge_params& params, Merge* merge) {
  const uint64_t dim = params.dim;
  merge->o.resize(params.n_states);
  merge->lse.resize(params.n_states);
  for (uint32_t i = 0; i < params.n_states; ++i) {
    char name[24];
    std::snprintf(name, sizeof(name), "o[%u]", i);
    KVM_TRY(resolve(params, params.o[i], name, Element::kAny, dim, &merge->o[i]));
    std::snprintf(name, sizeof(name), "lse[%u]", i);
    KVM_TRY(resolve(params, params.lse[i], name, Element::kF32, 1, &merge->lse[i]));
  }
  KVM_TRY(resolve(params, params.out_o, "out_o", Element::kAny, dim, &merge->out_o));
  if (params.out_lse.buffer.kind != KVM_BUFFER_NONE) {
    KVM_TRY(resolve(params, params.out_lse, "out_lse", Element::kF32, 1, &merge->out_lse));
  }
  return Status::ok();
}

uint64_t element_at(const Rows& rows, uint64_t row, uint64_t head) {
  return row * rows.stride_row + head * rows.stride_head;
}

// A public state (o, lse) is (o, m = lse, l = 1).
void merge_one(const Merge& merge, uint64_t row, uint64_t head, uint32_t dim,
               std::vector<float>* sum, std::vector<float>* part) {
  std::fill(sum->begin(), sum->end(), 0.0f);
  float m = kEmptyLse;
  float l = 0.0f;
  for (size_t i = 0; i < merge.o.size(); ++i) {
    const float lse = load(merge.lse[i], element_at(merge.lse[i], row, head));
    const uint64_t at = element_at(merge.o[i], row, head);
    for (uint32_t d = 0; d < dim; ++d) {
      (*part)[d] = load(merge.o[i], at + d);
    }
    merge_row(sum->data(), &m, &l, part->data(), lse, 1.0f, dim);
  }
  const uint64_t at = element_at(merge.out_o, row, head);
  const float scale = l == 0.0f ? 0.0f : 1.0f / l;
  for (uint32_t d = 0; d < dim; ++d) {
    store(merge.out_o, at + d, (*sum)[d] * scale);
  }
  if (merge.out_lse.is_present()) {
    store(merge.out_lse, element_at(merge.out_lse, row, head), std::isnan(l) ? l : state_lse(m, l));
  }
}

}  // namespace

Status merge_states(const kvm_merge_params& params) {
  KVM_TRY(check_flags(params.flags, 0, "kvm_merge_params"));
  KVM_TRY(check_reserved(params.reserved, std::size(params.reserved), "kvm_merge_params"));
  if (params.n_states < 1 || params.n_states > kMaxMergedStates) {
    return Status(KVM_ERR_INVALID, "n_states is " + std::to_string(params.n_states) +
                                       "; allowed are 1 to " + std::to_string(kMaxMergedStates));
  }
  if (params.n_rows == 0 || params.n_heads == 0 || params.dim == 0 || params.o == nullptr ||
      params.lse == nullptr) {
    return Status(KVM_ERR_INVALID, "n_rows, n_heads, dim, o and lse are required");
  }
  Merge merge;
  KVM_TRY(resolve_all(params, &merge));
  std::vector<float> sum(params.dim);
  std::vector<float> part(params.dim);
  for (uint64_t row = 0; row < params.n_rows; ++row) {
    for (uint64_t head = 0; head < params.n_heads; ++head) {
      merge_one(merge, row, head, params.dim, &sum, &part);
    }
  }
  return Status::ok();
}

}  // namespace kvm::client
