// SPDX-License-Identifier: Apache-2.0
// Attention states in tensors of the caller, merged on the device: kvm_cuda_merge.
#ifndef KVM_DEVICE_STATES_H_
#define KVM_DEVICE_STATES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "device/device_tensor.h"
#include "device/driver.h"

namespace kvm::device {

// States over different tokens, of the same rows and heads.
struct StatesCall {
  uint32_t n_rows = 0;
  uint32_t n_heads = 0;
  uint32_t dim = 0;
  std::vector<DeviceTensor> o;    // [state]
  std::vector<DeviceTensor> lse;  // [state]
  DeviceTensor out_o, out_lse;    // the latter may be absent
};

// What sentences call a tensor of a state: "o[2]".
std::string state_name(const char* tensor, uint32_t state);

// Enqueues their merge: one launch with parameters of its own, which may be captured.
// Fails: INVALID, DEVICE. Threads: any.
Status merge_states(Driver* driver, const StatesCall& call, Stream stream);

}  // namespace kvm::device

#endif  // KVM_DEVICE_STATES_H_
