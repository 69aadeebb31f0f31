// SPDX-License-Identifier: Apache-2.0
#include "device/states.h"

#include <algorithm>
#include <string>
#include <utility>

#include "attention/cuda/params.h"
#include "base/limits.h"
#include "base/round.h"

namespace kvm::device {

namespace {

using attention::gpu::kMaxStates;
using attention::gpu::kStatesWarps;
using attention::gpu::RowTensor;
using attention::gpu::StatesParams;

// LIMIT: rows and heads of what an attend answers.
constexpr uint32_t kMaxStateRows = 1u << 20;
constexpr uint32_t kBlocksPerSm = 16;

Result<RowTensor> lse_tensor(const char* name, const DeviceTensor& lse, const StatesCall& call) {
  if (lse.data != nullptr && lse.dtype != Dtype::kF32) {
    return Status(KVM_ERR_INVALID, std::string(name) + " is not F32");
  }
  return row_tensor(name, lse, call.n_rows, call.n_heads, 1, sizeof(float));
}

// A warp has read a row of all states before it writes that row, and no other: a result in the
// place of a state must have its rows where that has them.
Status check_place(const char* name, const RowTensor& out, const char* of_name, uint32_t state,
                   const RowTensor& of, const StatesCall& call) {
  const bool is_alike = out.dtype == of.dtype &&
                        (call.n_rows == 1 || out.stride_token == of.stride_token) &&
                        (call.n_heads == 1 || out.stride_head == of.stride_head);
  return out.data == nullptr || out.data != of.data || is_alike
             ? Status::ok()
             : Status(KVM_ERR_INVALID, std::string(name) + " is in the place of " +
                                           state_name(of_name, state) +
                                           ", with another dtype or other strides");
}

}  // namespace

std::string state_name(const char* tensor, uint32_t state) {
  return std::string(tensor) + "[" + std::to_string(state) + "]";
}

Status merge_states(Driver* driver, const StatesCall& call, Stream stream) {
  KVM_TRY(check_range("n_states", call.o.size(), kMaxStates));
  KVM_TRY(check_range("n_rows", call.n_rows, kMaxStateRows));
  KVM_TRY(check_range("n_heads", call.n_heads, kMaxQHeads));
  if (call.dim == 0 || call.dim > kMaxHeadDim || call.dim % kMinHeadDim != 0) {
    return Status(KVM_ERR_INVALID, "dim is " + std::to_string(call.dim) +
                                       "; allowed are multiples of " + std::to_string(kMinHeadDim) +
                                       " up to " + std::to_string(kMaxHeadDim));
  }
  StatesParams params;
  params.n_states = static_cast<uint32_t>(call.o.size());
  params.n_rows = call.n_rows;
  params.n_heads = call.n_heads;
  params.dim = call.dim;
  for (uint32_t i = 0; i < params.n_states; ++i) {
    const std::string o = state_name("o", i), lse = state_name("lse", i);
    KVM_TRY_ASSIGN(params.o[i],
                   row_tensor(o.c_str(), call.o[i], call.n_rows, call.n_heads, call.dim, 16));
    KVM_TRY_ASSIGN(params.lse[i], lse_tensor(lse.c_str(), call.lse[i], call));
  }
  KVM_TRY_ASSIGN(params.out_o,
                 row_tensor("out_o", call.out_o, call.n_rows, call.n_heads, call.dim, 16));
  KVM_TRY_ASSIGN(params.out_lse, lse_tensor("out_lse", call.out_lse, call));
  for (uint32_t i = 0; i < params.n_states; ++i) {
    KVM_TRY(check_place("out_o", params.out_o, "o", i, params.o[i], call));
    KVM_TRY(check_place("out_lse", params.out_lse, "lse", i, params.lse[i], call));
  }
  const uint64_t blocks = div_up(uint64_t{call.n_rows} * call.n_heads, kStatesWarps);
  const uint64_t most = uint64_t{kBlocksPerSm} * driver->facts().n_sms;
  return driver->merge_states(params, static_cast<uint32_t>(std::min(blocks, most)), stream);
}

}  // namespace kvm::device
