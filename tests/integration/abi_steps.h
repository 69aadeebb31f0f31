// SPDX-License-Identifier: Apache-2.0
// Appends and attends of one item through kvm.h, as tests of published systems make them.
#ifndef KVM_TESTS_INTEGRATION_ABI_STEPS_H_
#define KVM_TESTS_INTEGRATION_ABI_STEPS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "kvm.h"
#include "tests/integration/abi_rig.h"

namespace kvm::testing {

// What an attend answered: o [row][n_q_heads][dim], lse [row][n_q_heads].
struct State {
  std::vector<float> o;
  std::vector<float> lse;

  bool operator==(const State& other) const = default;  // bits, where no number is NaN or zero
};

// A service with spaces of fp32 rows, whose K and V have the same dim.
class StepTest : public ServiceTest {
 protected:
  // Its params without arrays: one kv head for each q head.
  static kvm_space_params params_of(const char* name, uint32_t n_layers, uint32_t n_heads,
                                    uint32_t dim) {
    kvm_space_params params{};
    params.struct_size = sizeof(params);
    params.name = name;
    params.n_layers = n_layers;
    params.n_q_heads = n_heads;
    params.head_dim_k = dim;
    params.codec = KVM_CODEC_F32;
    return params;
  }
  kvm_space_id add_space(const kvm_space_params& params) {
    kvm_space_id space = 0;
    EXPECT_EQ(kvm_space_register(client_, &params, &space), KVM_OK) << kvm_last_error();
    return space;
  }
  kvm_seq_id add_seq(kvm_space_id space) {
    kvm_seq_id seq = 0;
    EXPECT_EQ(kvm_seq_create(client_, space, nullptr, &seq), KVM_OK) << kvm_last_error();
    return seq;
  }
  kvm_seq_info info_of(kvm_seq_id seq) {
    kvm_seq_info info{};
    info.struct_size = sizeof(info);
    EXPECT_EQ(kvm_seq_get_info(client_, seq, &info), KVM_OK) << kvm_last_error();
    return info;
  }

  // Of layers [layer, layer + n_layers); k and v: [n_layers][n][n_heads][dim].
  kvm_status append(kvm_space_id space, kvm_seq_id seq, uint32_t layer, uint32_t n_layers,
                    uint32_t n, const std::vector<float>& k, const std::vector<float>& v) {
    kvm_item item = item_at(seq, 0);
    item.n_append = n;
    kvm_step_params params = step_of(space, layer, &item);
    params.n_layers = n_layers;
    params.k = tensor_of(k);
    params.v = tensor_of(v);
    return kvm_append(queue_, &params);
  }
  // Rows of q at `position` and behind it. scale: 0 is the space's. flags: KVM_ITEM_*.
  State attend(kvm_space_id space, kvm_seq_id seq, uint32_t layer, uint64_t position,
               const std::vector<float>& q, uint32_t n_rows, uint32_t n_heads, float scale = 0,
               uint32_t flags = 0, kvm_queue* queue = nullptr) {
    State state = {std::vector<float>(q.size(), -1), std::vector<float>(n_rows * n_heads, -1)};
    kvm_item item = item_at(seq, position);
    item.n_query = n_rows;
    item.flags = flags;
    kvm_step_params params = step_of(space, layer, &item);
    params.flags = KVM_STEP_F32_VALUES;
    params.scale = scale;
    params.q = tensor_of(q);
    params.o = tensor_of(state.o);
    params.lse = tensor_of(state.lse);
    EXPECT_EQ(kvm_attend(queue == nullptr ? queue_ : queue, &params, nullptr), KVM_OK)
        << kvm_last_error();
    return state;
  }

 private:
  static kvm_item item_at(kvm_seq_id seq, uint64_t query_position) {
    kvm_item item{};
    item.seq = seq;
    item.append_position = KVM_POSITION_END;
    item.query_position = query_position;
    return item;
  }
  static kvm_step_params step_of(kvm_space_id space, uint32_t layer, const kvm_item* item) {
    kvm_step_params params{};
    params.struct_size = sizeof(params);
    params.space = space;
    params.layer_begin = layer;
    params.n_items = 1;
    params.items = item;
    return params;
  }
};

}  // namespace kvm::testing

#endif  // KVM_TESTS_INTEGRATION_ABI_STEPS_H_
