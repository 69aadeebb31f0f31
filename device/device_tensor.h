// SPDX-License-Identifier: Apache-2.0
// A DeviceTensor is a tensor of the caller that kernels read or write: rows of heads of channels,
// in device memory or in page-locked host memory that the device can address.
#ifndef KVM_DEVICE_DEVICE_TENSOR_H_
#define KVM_DEVICE_DEVICE_TENSOR_H_

#include <cstdint>

#include "attention/cuda/params.h"
#include "base/dtype.h"
#include "base/status.h"

namespace kvm::device {

struct DeviceTensor {
  uint8_t* data = nullptr;  // null: absent
  uint64_t size_bytes = 0;
  Dtype dtype = Dtype::kF32;
  uint64_t stride_row = 0;  // in elements; 0: packed
  uint64_t stride_head = 0;
};

// Fails: INVALID, unless `value` is 1 to `most`.
Status check_range(const char* name, uint64_t value, uint64_t most);

// Checks a tensor of n_rows rows, 0 of which need no room, n_heads heads and dim channels, whose
// address and strides are to be multiples of `alignment` bytes; its strides in elements go to
// *stride_row and *stride_head. REQUIRES: n_heads and dim are below 2^16, and not 0.
// Fails: INVALID, in a sentence that begins with `name`.
Status check_tensor(const char* name, const DeviceTensor& tensor, uint64_t n_rows, uint64_t n_heads,
                    uint64_t dim, uint64_t alignment, uint64_t* stride_row, uint64_t* stride_head);

// The same, as kernels take it, of elements of which no two are one; an absent tensor is one
// without data.
Result<attention::gpu::RowTensor> row_tensor(const char* name, const DeviceTensor& tensor,
                                             uint64_t n_rows, uint64_t n_heads, uint32_t dim,
                                             uint64_t alignment);

}  // namespace kvm::device

#endif  // KVM_DEVICE_DEVICE_TENSOR_H_
