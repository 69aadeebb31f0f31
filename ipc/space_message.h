// SPDX-License-Identifier: Apache-2.0
// kvm_space_params with everything it points to, as a value, and its form on the control socket.
#ifndef KVM_IPC_SPACE_MESSAGE_H_
#define KVM_IPC_SPACE_MESSAGE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "ipc/control.h"
#include "kvm.h"

namespace kvm::ipc {

struct SpaceMessage {
  std::string name;
  kvm_space_params params{};  // the pointers are null; the counts match the vectors
  std::vector<float> rope_inv_freq;
  std::vector<float> sink_logits;  // empty or [n_layers][n_q_heads]
  std::vector<kvm_layer_params> layers;
  std::vector<kvm_policy_params> policies;
  std::vector<kvm_codec_params> codecs;
  std::vector<kvm_index_params> indexes;
};

// Copies what a caller's (already read) parameters point to. Fails: INVALID (counts and pointers
// that contradict each other or exceed the limits). Values are the engine's to judge.
Result<SpaceMessage> copy_space(const kvm_space_params& params);

// The body of a SpaceRegister message.
flatbuffers::Offset<wire::SpaceRegister> encode_space(ControlWriter* writer,
                                                      const SpaceMessage& space);

// The daemon's side. Fails: INVALID, as copy_space.
Result<SpaceMessage> decode_space(const wire::SpaceRegister& message);

}  // namespace kvm::ipc

#endif  // KVM_IPC_SPACE_MESSAGE_H_
