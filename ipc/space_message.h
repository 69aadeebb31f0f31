// SPDX-License-Identifier: Apache-2.0
// kvm_space_params with everything it points to, as a value, and its form on the control socket.
#ifndef KVM_IPC_SPACE_MESSAGE_H_
#define KVM_IPC_SPACE_MESSAGE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/request.h"
#include "base/status.h"
#include "ipc/control.h"
#include "kvm.h"

namespace kvm::ipc {

// Copies what a caller's (already read) parameters point to. Fails: INVALID (counts and pointers
// that contradict each other or exceed the limits). Values are the engine's to judge.
Result<SpaceSpec> copy_space(const kvm_space_params& params);

// The body of a SpaceRegister message.
flatbuffers::Offset<wire::SpaceRegister> encode_space(ControlWriter* writer,
                                                      const SpaceSpec& space);

// The daemon's side. Fails: INVALID, as copy_space.
Result<SpaceSpec> decode_space(const wire::SpaceRegister& message);

}  // namespace kvm::ipc

#endif  // KVM_IPC_SPACE_MESSAGE_H_
