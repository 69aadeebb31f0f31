// SPDX-License-Identifier: Apache-2.0
// kvm_policy_preset: published systems, by name, as entries of kvm_space_params. kvm.h names the
// paper of each, where its numbers are from.
//
// Threads: any; pure in the arguments.
#ifndef KVM_CLIENT_POLICY_PRESET_H_
#define KVM_CLIENT_POLICY_PRESET_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "kvm.h"

namespace kvm::client {

// What a preset resolves to.
struct Preset {
  std::vector<kvm_layer_params> layers;
  std::vector<kvm_policy_params> policies;
  std::vector<kvm_codec_params> codecs;
  std::vector<kvm_index_params> indexes;
  uint32_t default_mode = 0;
  uint64_t default_budget = 0;
  std::string text;
};

// Fails: as kvm_policy_preset, but for LIMIT.
Result<Preset> resolve_preset(const kvm_preset_params& params);

// Copies a preset to the caller's arrays. Fails: LIMIT, INVALID; nothing is written then.
Status write_preset(const Preset& preset, kvm_preset* out);

// Static; null behind the last.
const char* preset_name(uint32_t index);

}  // namespace kvm::client

#endif  // KVM_CLIENT_POLICY_PRESET_H_
