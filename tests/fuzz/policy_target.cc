// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/assert.h"
#include "engine/space/space.h"
#include "ipc/control.h"
#include "ipc/space_message.h"
#include "tests/fuzz/targets.h"

namespace kvm::testing {
namespace {

constexpr size_t kMost = 64;  // of each array; the limits themselves have unit tests

SpaceSpec message_of(std::span<const uint8_t> input) {
  InputReader reader(input);
  SpaceSpec message;
  message.name = "fuzzed";
  message.params = reader.take<kvm_space_params>();
  kvm_space_params& params = message.params;
  params.struct_size = sizeof(params);
  params.name = nullptr;
  params.rope_inv_freq = nullptr;
  params.sink_logits = nullptr;
  params.layers = nullptr;
  params.policies = nullptr;
  params.codecs = nullptr;
  params.indexes = nullptr;
  message.layers = reader.take_many<kvm_layer_params>(params.n_layer_params % kMost);
  message.policies = reader.take_many<kvm_policy_params>(params.n_policies % kMost);
  message.codecs = reader.take_many<kvm_codec_params>(params.n_codecs % kMost);
  message.indexes = reader.take_many<kvm_index_params>(params.n_indexes % kMost);
  message.rope_inv_freq = reader.take_many<float>(params.n_rope_pairs % kMost);
  params.n_layer_params = static_cast<uint32_t>(message.layers.size());
  params.n_policies = static_cast<uint32_t>(message.policies.size());
  params.n_codecs = static_cast<uint32_t>(message.codecs.size());
  params.n_indexes = static_cast<uint32_t>(message.indexes.size());
  params.n_rope_pairs = static_cast<uint32_t>(message.rope_inv_freq.size());
  if (!reader.is_empty() && params.n_layers <= 512 && params.n_q_heads <= 1024) {
    message.sink_logits = reader.take_many<float>(size_t{params.n_layers} * params.n_q_heads);
  }
  return message;
}

// Every kv head is in one class, at the place that it names.
void check_space(const engine::Space& space) {
  for (const engine::Layer& layer : space.layers) {
    if (layer.kind != KVM_LAYER_OWN) {
      KVM_ASSERT(layer.storage_layer < space.n_layers);
      continue;
    }
    if (layer.partner != engine::Layer::kNoPartner) {
      KVM_ASSERT(space.layers.at(layer.partner).classes.size() == layer.classes.size());
    }
    size_t n_heads = 0;
    for (const engine::HeadClass& head_class : layer.classes) {
      n_heads += head_class.kv_heads.size();
    }
    KVM_ASSERT(n_heads == layer.n_kv_heads && layer.heads.size() == layer.n_kv_heads);
    for (uint32_t head = 0; head < layer.n_kv_heads; ++head) {
      const engine::HeadPlace place = layer.heads[head];
      KVM_ASSERT(layer.classes.at(place.class_index).kv_heads.at(place.head) == head);
    }
  }
}

}  // namespace

void run_policy(std::span<const uint8_t> input) {
  const SpaceSpec message = message_of(input);
  ipc::ControlWriter writer;
  const auto bytes = writer.finish(1, ipc::encode_space(&writer, message));
  const Result<const ipc::wire::Message*> read = ipc::read_message(bytes);
  KVM_ASSERT(read.is_ok());
  Result<SpaceSpec> decoded = ipc::decode_space(*read.value()->body_as_SpaceRegister());
  if (!decoded.is_ok()) {
    return;
  }
  SpaceSpec& space = decoded.value();
  const SpaceSpec spec{.name = std::move(space.name),
                       .params = space.params,
                       .rope_inv_freq = std::move(space.rope_inv_freq),
                       .sink_logits = std::move(space.sink_logits),
                       .layers = std::move(space.layers),
                       .policies = std::move(space.policies),
                       .codecs = std::move(space.codecs),
                       .indexes = std::move(space.indexes)};
  const auto resolved = engine::resolve_space(spec);
  if (resolved.is_ok()) {
    check_space(*resolved.value());
  } else {
    KVM_ASSERT(!resolved.status().message().empty());
  }
}

}  // namespace kvm::testing
