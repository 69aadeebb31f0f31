// SPDX-License-Identifier: Apache-2.0
// kvm_merge: how tensors lie. What it computes is compared in tests/integration/abi_test.cc.
#include "client/merge.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace kvm::client {
namespace {

// A stride of 0 is packed: rows follow what the heads of one span, as in every other call.
TEST(Merge, RowsArePackedBehindHeadsThatAreApart) {
  constexpr uint32_t kRows = 2, kHeads = 3, kDim = 8, kApart = 16;
  std::vector<float> o(kRows * kHeads * kApart), out(kRows * kHeads * kDim, -1);
  std::vector<float> lse(kRows * kHeads, 0.5f);
  for (uint32_t i = 0; i < o.size(); ++i) {
    o[i] = static_cast<float>(i);
  }
  kvm_tensor states = kvm_host_tensor(o.data(), o.size() * sizeof(float), KVM_DTYPE_F32);
  states.stride_head = kApart;
  const kvm_tensor weights = kvm_host_tensor(lse.data(), lse.size() * sizeof(float), KVM_DTYPE_F32);
  kvm_merge_params params{};
  params.struct_size = sizeof params;
  params.n_states = 1;
  params.n_rows = kRows;
  params.n_heads = kHeads;
  params.dim = kDim;
  params.o = &states;
  params.lse = &weights;
  params.out_o = kvm_host_tensor(out.data(), out.size() * sizeof(float), KVM_DTYPE_F32);
  ASSERT_TRUE(merge_states(params).is_ok());
  for (uint32_t i = 0; i < out.size(); ++i) {
    EXPECT_EQ(out[i], static_cast<float>(i / kDim * kApart + i % kDim)) << i;
  }
  states.buffer.size -= kApart * sizeof(float);
  EXPECT_EQ(merge_states(params).code(), KVM_ERR_INVALID);
  states.stride_head = UINT64_MAX / 2;
  EXPECT_EQ(merge_states(params).code(), KVM_ERR_INVALID);
}

}  // namespace
}  // namespace kvm::client
