// SPDX-License-Identifier: Apache-2.0
// Control messages of a hostile client, and the spaces that its requests are about.
#ifndef KVM_TESTS_HOSTILE_MESSAGES_H_
#define KVM_TESTS_HOSTILE_MESSAGES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "ipc/control.h"
#include "ipc/space_message.h"
#include "tests/hostile/requests.h"

namespace kvm::testing {

// How kPlain, kIndexed, kLayered and kLatent are registered.
SpaceSpec space_message(uint32_t space);

// What others have.
struct Prey {
  std::vector<kvm_seq_id> seqs;
  std::vector<uint64_t> clients;
};

// Anything that a client may send, of no good intent. The result lives as long as the writer, as
// below.
std::span<const uint8_t> any_message(RequestMaker* maker, ipc::ControlWriter* writer, uint64_t id);
// What root and the daemon's user may ask, aimed at the prey.
std::span<const uint8_t> admin_message(RequestMaker* maker, const Prey& prey,
                                       ipc::ControlWriter* writer, uint64_t id);

}  // namespace kvm::testing

#endif  // KVM_TESTS_HOSTILE_MESSAGES_H_
