// SPDX-License-Identifier: Apache-2.0
#include "tests/hostile/messages.h"

#include <cstring>
#include <string>

namespace kvm::testing {
namespace {

namespace wire = ipc::wire;

kvm_space_params params_of(uint32_t n_layers) {
  kvm_space_params params{};
  params.struct_size = sizeof(params);
  params.n_layers = n_layers;
  params.n_q_heads = kHeads;
  params.n_kv_heads = kKvHeads;
  params.head_dim_k = kDim;
  return params;
}

// An id of the prey, or any number.
uint64_t some_id(RequestMaker* maker, const std::vector<uint64_t>& ids) {
  return ids.empty() || maker->one_in(4) ? maker->boundary() : ids[maker->below(ids.size())];
}

std::span<const uint8_t> evict_message(RequestMaker* maker, const Prey& prey,
                                       ipc::ControlWriter* writer, uint64_t id) {
  const auto what = static_cast<uint32_t>(1 + maker->below(3));
  const uint64_t whom = what == KVM_EVICT_SEQ      ? some_id(maker, prey.seqs)
                        : what == KVM_EVICT_CLIENT ? some_id(maker, prey.clients)
                                                   : maker->spaces()[maker->below(kSpaces)];
  const uint32_t flags =
      what == KVM_EVICT_CLIENT && maker->one_in(2) ? uint32_t{KVM_EVICT_DISCONNECT} : 0;
  return writer->finish(id, wire::CreateEvict(writer->fbb(), what, whom, 0, flags));
}

std::span<const uint8_t> quota_message(RequestMaker* maker, const Prey& prey,
                                       ipc::ControlWriter* writer, uint64_t id) {
  kvm_quota_params params{};
  params.struct_size = sizeof(params);
  params.whose = static_cast<uint32_t>(1 + maker->below(2));
  params.id = params.whose == KVM_QUOTA_CLIENT ? some_id(maker, prey.clients) : 0;
  params.limits.bytes = 1 + maker->below(4096);
  params.limits.sequences = 1;
  params.limits.queues = 1;
  const uint64_t size = maker->one_in(8) ? maker->below(sizeof(params)) : sizeof(params);
  const auto bytes = writer->fbb().CreateVector(reinterpret_cast<const uint8_t*>(&params), size);
  return writer->finish(id, wire::CreateQuotaSet(writer->fbb(), bytes));
}

}  // namespace

SpaceSpec space_message(uint32_t space) {
  SpaceSpec message;
  if (space == kPlain) {
    message.name = "plain";
    message.params = params_of(2);
  } else if (space == kIndexed) {
    message.name = "indexed";
    message.params = params_of(1);
    message.indexes.push_back({.kind = KVM_INDEX_SKETCH, .n_recent = 16, .min_tokens = 256});
  } else if (space == kLatent) {
    message.name = "latent";
    message.params = params_of(1);
    message.params.flags = KVM_SPACE_V_IN_K;
    message.params.head_dim_v = kDim / 2;
    message.alibi_slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
    static_assert(kHeads == 4);
  } else {
    message.name = "layered";
    message.params = params_of(5);
    message.layers.push_back(
        {.layer_begin = 1, .n_layers = 1, .kind = KVM_LAYER_ALIAS, .target = 0});
    message.layers.push_back({.layer_begin = 2, .n_layers = 1, .kind = KVM_LAYER_ABSENT});
    message.layers.push_back({.layer_begin = 4, .n_layers = 1, .n_kv_heads = 2 * kKvHeads});
    message.policies.push_back(
        {.retention = KVM_RETAIN_SINKS_RECENT, .n_sinks = 2, .n_recent = 32});
  }
  message.params.n_layer_params = static_cast<uint32_t>(message.layers.size());
  message.params.n_policies = static_cast<uint32_t>(message.policies.size());
  message.params.n_indexes = static_cast<uint32_t>(message.indexes.size());
  return message;
}

std::span<const uint8_t> any_message(RequestMaker* maker, ipc::ControlWriter* writer, uint64_t id) {
  auto& fbb = writer->fbb();
  const uint64_t value = maker->boundary();
  switch (maker->below(11)) {
    case 0:
      return writer->finish(id, wire::CreateSpaceDrop(fbb, maker->spaces()[maker->below(kSpaces)]));
    case 1:
      return writer->finish(id, wire::CreateSeqInfo(fbb, value));
    case 2:
      return writer->finish(id, wire::CreateStatsText(fbb, value));
    case 3:
      return writer->finish(id, wire::CreateArenaCreate(fbb, value));
    case 4:
      return writer->finish(id, wire::CreateQueueCreate(fbb, static_cast<uint32_t>(value)));
    case 5:
      return writer->finish(id, wire::CreateSeqList(fbb, value, maker->one_in(2), value));
    case 6: {
      // Any bytes, of any length.
      std::string name(maker->below(1000), '\0');
      for (char& c : name) {
        c = static_cast<char>(maker->below(256));
      }
      const auto flags = static_cast<uint32_t>(maker->one_in(2) ? 0 : value);
      const auto after = maker->one_in(8) ? 0 : fbb.CreateString(name);
      return writer->finish(
          id, wire::CreateSnapshotList(fbb, flags, static_cast<uint32_t>(value), after));
    }
    case 7:
      return writer->finish(id, wire::CreatePrefixTable(fbb));
    case 8: {
      double rate = 0;
      std::memcpy(&rate, &value, sizeof(rate));
      const uint64_t n_tokens = maker->boundary();
      return writer->finish(
          id, wire::CreatePrefixWeigh(fbb, value, n_tokens, maker->one_in(2) ? rate : 1000.0));
    }
    default: {
      SpaceSpec message = space_message(static_cast<uint32_t>(maker->below(kSpaces)));
      uint8_t* field = reinterpret_cast<uint8_t*>(&message.params) + 4 * maker->below(40);
      std::memcpy(field, &value, 4);
      message.name = "hostile" + std::to_string(maker->below(4));
      return writer->finish(id, ipc::encode_space(writer, message));
    }
  }
}

std::span<const uint8_t> admin_message(RequestMaker* maker, const Prey& prey,
                                       ipc::ControlWriter* writer, uint64_t id) {
  auto& fbb = writer->fbb();
  const uint64_t begin = maker->one_in(2) ? 0 : maker->boundary();
  switch (maker->below(9)) {
    case 0:
      return writer->finish(id, wire::CreateConfigText(fbb, begin));
    case 1:
      return writer->finish(id, wire::CreateClientList(fbb, begin));
    case 2:
      return writer->finish(id, wire::CreateUserList(fbb, begin));
    case 3:
      return writer->finish(id, wire::CreateSeqList(fbb, 0, KVM_LIST_ALL_CLIENTS, begin));
    case 4:
    case 5:
      return quota_message(maker, prey, writer, id);
    case 6:
      return writer->finish(
          id, wire::CreateSnapshotList(fbb, KVM_LIST_ALL_CLIENTS, static_cast<uint32_t>(begin)));
    default:
      return evict_message(maker, prey, writer, id);
  }
}

}  // namespace kvm::testing
