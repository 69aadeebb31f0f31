// SPDX-License-Identifier: Apache-2.0
#include "device/device_tensor.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

namespace kvm::device {

namespace {

std::string number(uint64_t n) { return std::to_string(n); }
Status invalid(std::string sentence) { return Status(KVM_ERR_INVALID, std::move(sentence)); }

// Whether no two elements are one: by ascending stride, each dimension steps over all that the ones
// before it span. REQUIRES: check_tensor.
bool elements_are_apart(const attention::gpu::RowTensor& tensor, uint64_t n_rows,
                        uint64_t n_heads) {
  std::pair<uint64_t, uint64_t> dims[] = {{static_cast<uint64_t>(tensor.stride_token), n_rows},
                                          {static_cast<uint64_t>(tensor.stride_head), n_heads}};
  std::sort(std::begin(dims), std::end(dims));
  uint64_t span = tensor.dim;
  for (const auto& [stride, count] : dims) {
    if (count <= 1) {
      continue;
    }
    if (stride < span) {
      return false;
    }
    span += stride * (count - 1);
  }
  return true;
}

}  // namespace

Status check_range(const char* name, uint64_t value, uint64_t most) {
  return value != 0 && value <= most ? Status::ok()
                                     : invalid(std::string(name) + " is " + number(value) +
                                               "; allowed are 1 to " + number(most));
}

Status check_tensor(const char* name, const DeviceTensor& tensor, uint64_t n_rows, uint64_t n_heads,
                    uint64_t dim, uint64_t alignment, uint64_t* stride_row, uint64_t* stride_head) {
  const uint64_t element = dtype_size_bytes(tensor.dtype);
  *stride_head = tensor.stride_head != 0 ? tensor.stride_head : dim;
  *stride_row = tensor.stride_row != 0 ? tensor.stride_row : n_heads * *stride_head;
  constexpr uint64_t kMostStride = uint64_t{1} << 40;
  if (*stride_head > kMostStride || *stride_row > kMostStride) {
    return invalid(std::string(name) + ": strides of " + number(*stride_row) + " and " +
                   number(*stride_head) + " elements");
  }
  if (reinterpret_cast<uintptr_t>(tensor.data) % alignment != 0 ||
      *stride_row * element % alignment != 0 || *stride_head * element % alignment != 0) {
    return invalid(std::string(name) + ": its address, and strides of " + number(*stride_row) +
                   " and " + number(*stride_head) + " elements, must be multiples of " +
                   number(alignment) + " bytes");
  }
  // Below it, sums and bytes of them do not overflow.
  constexpr uint64_t kMostElements = uint64_t{1} << 60;
  if (n_rows != 0 && n_rows - 1 > kMostElements / *stride_row) {
    return invalid(std::string(name) + ": " + number(n_rows) + " rows that are " +
                   number(*stride_row) + " elements apart");
  }
  const uint64_t last =
      n_rows == 0 ? 0 : (n_rows - 1) * *stride_row + (n_heads - 1) * *stride_head + dim;
  if (last * element > tensor.size_bytes) {
    return invalid(std::string(name) + ": " + number(n_rows) + " rows reach to byte " +
                   number(last * element) + " of " + number(tensor.size_bytes));
  }
  return Status::ok();
}

Result<attention::gpu::RowTensor> row_tensor(const char* name, const DeviceTensor& tensor,
                                             uint64_t n_rows, uint64_t n_heads, uint32_t dim,
                                             uint64_t alignment) {
  if (tensor.data == nullptr) {
    return attention::gpu::RowTensor{};
  }
  uint64_t row = 0, head = 0;
  KVM_TRY(check_tensor(name, tensor, n_rows, n_heads, dim, alignment, &row, &head));
  const attention::gpu::RowTensor rows{tensor.data, static_cast<int64_t>(row),
                                       static_cast<int64_t>(head), tensor.dtype, dim};
  if (!elements_are_apart(rows, n_rows, n_heads)) {
    return invalid(std::string(name) + ": elements overlap; strides are row " + number(row) +
                   " and head " + number(head) + ", a row has " + number(n_heads) + " heads of " +
                   number(dim));
  }
  return rows;
}

}  // namespace kvm::device
