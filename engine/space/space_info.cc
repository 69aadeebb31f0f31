// SPDX-License-Identifier: Apache-2.0
#include "engine/space/space_info.h"

#include <algorithm>
#include <cstring>

#include "base/limits.h"

namespace kvm::engine {

kvm_space_info describe_space(const Space& space) {
  kvm_space_info info{};
  info.struct_size = sizeof info;
  info.n_layers = space.n_layers;
  std::memcpy(info.name, space.name.data(), space.name.size());  // shorter than info.name
  std::copy(space.fingerprint.begin(), space.fingerprint.end(), info.fingerprint);
  info.n_q_heads = space.n_q_heads;
  info.n_kv_heads = space.n_kv_heads;
  info.head_dim_k = space.head_dim_k;
  info.head_dim_v = space.head_dim_v;
  info.codec = static_cast<uint32_t>(space.codec);
  info.n_head_classes = space.n_lists;
  info.bytes_per_token = space.bytes_per_token;
  info.page_tokens = kPageTokens;
  info.default_mode = space.default_choice.mode;
  info.default_proposal = space.default_choice.proposal;
  info.default_eps = space.default_choice.eps;
  info.default_delta = space.default_choice.delta;
  info.default_budget = space.default_choice.budget;
  info.flags = space.flags();
  std::copy(space.geometry_digest.begin(), space.geometry_digest.end(), info.geometry_digest);
  return info;
}

}  // namespace kvm::engine
