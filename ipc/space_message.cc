// SPDX-License-Identifier: Apache-2.0
#include "ipc/space_message.h"

#include <cstring>
#include <string>
#include <utility>

#include "base/limits.h"
#include "ipc/struct_size.h"

namespace kvm::ipc {

namespace {

Status check_count(uint64_t count, uint64_t limit, const char* name) {
  if (count > limit) {
    return Status(KVM_ERR_INVALID, std::string("kvm_space_params.") + name + " is " +
                                       std::to_string(count) + "; at most " +
                                       std::to_string(limit));
  }
  return Status::ok();
}

// The counts bound every allocation and every product below.
Status check_counts(const kvm_space_params& params) {
  KVM_TRY(check_count(params.n_layers, kMaxLayers, "n_layers"));
  KVM_TRY(check_count(params.n_q_heads, kMaxQHeads, "n_q_heads"));
  KVM_TRY(check_count(params.n_rope_pairs, kMaxRopePairs, "n_rope_pairs"));
  KVM_TRY(check_count(params.n_layer_params, kMaxOverrides, "n_layer_params"));
  KVM_TRY(check_count(params.n_policies, kMaxOverrides, "n_policies"));
  KVM_TRY(check_count(params.n_codecs, kMaxOverrides, "n_codecs"));
  return check_count(params.n_indexes, kMaxOverrides, "n_indexes");
}

template <typename T>
Status copy_array(const T* data, size_t count, const char* name, std::vector<T>* out) {
  if (count != 0 && data == nullptr) {
    return Status(KVM_ERR_INVALID, std::string("kvm_space_params.") + name + " is NULL, but " +
                                       std::to_string(count) + " entries were announced");
  }
  out->assign(data, data + count);
  return Status::ok();
}

void clear_pointers(kvm_space_params* params) {
  params->name = nullptr;
  params->rope_inv_freq = nullptr;
  params->sink_logits = nullptr;
  params->alibi_slopes = nullptr;
  params->layers = nullptr;
  params->policies = nullptr;
  params->codecs = nullptr;
  params->indexes = nullptr;
}

Status check_equal(size_t count, size_t announced, const char* name) {
  if (count != announced) {
    return Status(KVM_ERR_INVALID, std::string("kvm_space_params.") + name + " has " +
                                       std::to_string(count) + " entries, but " +
                                       std::to_string(announced) + " were announced");
  }
  return Status::ok();
}

std::vector<float> floats_of(const flatbuffers::Vector<float>* field) {
  return field == nullptr ? std::vector<float>() : std::vector<float>(field->begin(), field->end());
}

}  // namespace

Result<SpaceSpec> copy_space(const kvm_space_params& params) {
  KVM_TRY(check_counts(params));
  if (params.name == nullptr) {
    return Status(KVM_ERR_INVALID, "kvm_space_params.name is NULL");
  }
  SpaceSpec space;
  // One byte more than a valid name has, so that the engine sees that it is too long.
  space.name.assign(params.name, ::strnlen(params.name, kMaxNameBytes + 1));
  space.params = params;
  clear_pointers(&space.params);
  KVM_TRY(
      copy_array(params.rope_inv_freq, params.n_rope_pairs, "rope_inv_freq", &space.rope_inv_freq));
  const size_t n_sinks =
      params.sink_logits == nullptr ? 0 : size_t{params.n_layers} * params.n_q_heads;
  KVM_TRY(copy_array(params.sink_logits, n_sinks, "sink_logits", &space.sink_logits));
  KVM_TRY(copy_array(params.alibi_slopes, params.alibi_slopes == nullptr ? 0 : params.n_q_heads,
                     "alibi_slopes", &space.alibi_slopes));
  KVM_TRY(copy_array(params.layers, params.n_layer_params, "layers", &space.layers));
  KVM_TRY(copy_array(params.policies, params.n_policies, "policies", &space.policies));
  KVM_TRY(copy_array(params.codecs, params.n_codecs, "codecs", &space.codecs));
  KVM_TRY(copy_array(params.indexes, params.n_indexes, "indexes", &space.indexes));
  return space;
}

flatbuffers::Offset<wire::SpaceRegister> encode_space(ControlWriter* writer,
                                                      const SpaceSpec& space) {
  flatbuffers::FlatBufferBuilder& fbb = writer->fbb();
  const auto bytes = [&fbb](std::span<const uint8_t> data) {
    return fbb.CreateVector(data.data(), data.size());
  };
  const auto params = bytes(as_bytes(&space.params, 1));
  const auto name = fbb.CreateString(space.name);
  const auto rope = fbb.CreateVector(space.rope_inv_freq);
  const auto sinks = fbb.CreateVector(space.sink_logits);
  const auto slopes = fbb.CreateVector(space.alibi_slopes);
  const auto layers = bytes(as_bytes(space.layers.data(), space.layers.size()));
  const auto policies = bytes(as_bytes(space.policies.data(), space.policies.size()));
  const auto codecs = bytes(as_bytes(space.codecs.data(), space.codecs.size()));
  const auto indexes = bytes(as_bytes(space.indexes.data(), space.indexes.size()));
  return wire::CreateSpaceRegister(fbb, params, name, rope, sinks, layers, policies, codecs,
                                   indexes, slopes);
}

Result<SpaceSpec> decode_space(const wire::SpaceRegister& message) {
  if (message.params() == nullptr || message.name() == nullptr) {
    return Status(KVM_ERR_INVALID, "a space without parameters or name");
  }
  SpaceSpec space;
  KVM_TRY(read_struct(message.params()->data(), message.params()->size(), &space.params,
                      "kvm_space_params"));
  clear_pointers(&space.params);
  KVM_TRY(check_counts(space.params));
  space.name = message.name()->str();
  space.rope_inv_freq = floats_of(message.rope_inv_freq());
  space.sink_logits = floats_of(message.sink_logits());
  space.alibi_slopes = floats_of(message.alibi_slopes());
  KVM_TRY_ASSIGN(space.layers,
                 structs_of<kvm_layer_params>(message.layers(), kMaxOverrides, "layers"));
  KVM_TRY_ASSIGN(space.policies,
                 structs_of<kvm_policy_params>(message.policies(), kMaxOverrides, "policies"));
  KVM_TRY_ASSIGN(space.codecs,
                 structs_of<kvm_codec_params>(message.codecs(), kMaxOverrides, "codecs"));
  KVM_TRY_ASSIGN(space.indexes,
                 structs_of<kvm_index_params>(message.indexes(), kMaxOverrides, "indexes"));
  const kvm_space_params& params = space.params;
  KVM_TRY(check_equal(space.rope_inv_freq.size(), params.n_rope_pairs, "rope_inv_freq"));
  if (!space.sink_logits.empty()) {
    KVM_TRY(check_equal(space.sink_logits.size(), size_t{params.n_layers} * params.n_q_heads,
                        "sink_logits"));
  }
  if (!space.alibi_slopes.empty()) {
    KVM_TRY(check_equal(space.alibi_slopes.size(), params.n_q_heads, "alibi_slopes"));
  }
  KVM_TRY(check_equal(space.layers.size(), params.n_layer_params, "layers"));
  KVM_TRY(check_equal(space.policies.size(), params.n_policies, "policies"));
  KVM_TRY(check_equal(space.codecs.size(), params.n_codecs, "codecs"));
  KVM_TRY(check_equal(space.indexes.size(), params.n_indexes, "indexes"));
  return space;
}

}  // namespace kvm::ipc
