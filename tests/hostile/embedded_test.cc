// SPDX-License-Identifier: Apache-2.0
// What an engine in the client's own process refuses by itself, where the daemon has closed the
// client before: the rest of engine/space/refusal.h.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "tests/hostile/requests.h"

namespace kvm::testing {
namespace {

using engine::Refusal;
using kvm::StepRequest;

constexpr uint64_t kEnough = 100;

struct StepCase {
  Refusal refusal;
  std::function<void(StepRequest*)> spoil;
};

const std::vector<StepCase>& step_cases() {
  static const std::vector<StepCase> kAll = {
      {Refusal::kDtype, [](StepRequest* s) { s->k.dtype = 9; }},
      {Refusal::kDtypeNotF32, [](StepRequest* s) { s->lse.dtype = KVM_DTYPE_BF16; }},
      {Refusal::kStepFlags, [](StepRequest* s) { s->flags = 1u << 31; }},
      {Refusal::kMode, [](StepRequest* s) { s->mode = 6; }},
      {Refusal::kProposal, [](StepRequest* s) { s->proposal = 4; }},
      {Refusal::kItemRanges, [](StepRequest* s) { s->items[0].n_ranges = 1; }},
      {Refusal::kTreeRows,
       [](StepRequest* s) {
         s->items[0].flags = KVM_ITEM_TREE;
         s->items[0].n_query = 65;
       }},
      {Refusal::kTreeWords, [](StepRequest* s) { s->items[0].flags = KVM_ITEM_TREE; }},
      {Refusal::kItemFlags, [](StepRequest* s) { s->items[0].flags = 1u << 20; }},
      {Refusal::kItemReserved, [](StepRequest* s) { s->items[0].reserved = 1; }},
      {Refusal::kItemRows, [](StepRequest* s) { s->items[0].n_query = 1u << 20; }},
      {Refusal::kItemCount, [](StepRequest* s) { s->items.clear(); }},
      {Refusal::kRangeCount, [](StepRequest* s) { s->ranges.resize(65537); }},
      {Refusal::kTensorAlign,
       [](StepRequest* s) { s->q.data = static_cast<std::byte*>(s->q.data) + 1; }},
      {Refusal::kTensorOverlap, [](StepRequest* s) { s->o = s->q; }},
  };
  return kAll;
}

TEST(HostileEmbedded, EngineRefusesTheRest) {
  engine::EngineOptions options;
  options.n_threads = 1;
  options.host_capacity_bytes = 64ull << 20;
  const std::unique_ptr<engine::Engine> engine = engine::Engine::open(options).value();
  const engine::ClientId client = engine->add_client({});
  SpaceSpec spec;
  spec.name = "hostile";
  spec.params.struct_size = sizeof(spec.params);
  spec.params.n_layers = 1;
  spec.params.n_q_heads = 1;
  spec.params.head_dim_k = 8;
  const kvm_space_id space = engine->register_space(spec).value();
  std::array<float, 6 * 16> floats{};
  const auto view = [&floats](size_t i) {
    return TensorView{.data = floats.data() + 16 * i, .size_bytes = 64, .dtype = KVM_DTYPE_F32};
  };
  uint64_t n_answers = 0;
  const auto count = [&n_answers](kvm::RequestResult&& result) {
    ++n_answers;
    EXPECT_EQ(result.status.code(), KVM_ERR_INVALID) << result.status.message();
  };
  std::set<Refusal> reached;
  for (uint64_t i = 0; i < kEnough; ++i) {
    for (const auto& [refusal, spoil] : step_cases()) {
      StepRequest step;
      step.append = true;
      step.attend = true;
      step.space = space;
      step.items.push_back({.append_position = KVM_POSITION_END,
                            .n_append = 1,
                            .n_query = 1,
                            .query_position = KVM_POSITION_END});
      step.k = view(0);
      step.v = view(1);
      step.q = view(2);
      step.o = view(3);
      step.lse = view(4);
      step.err = view(5);
      spoil(&step);
      engine->submit(client, {}, std::move(step), count);
      reached.insert(refusal);
    }
    engine->submit(
        client, {},
        SeqRequest{.verb = static_cast<SeqVerb>(static_cast<uint32_t>(kLastSeqVerb) + 1)}, count);
    engine->submit(client, {},
                   SeqRequest{.verb = SeqVerb::kCreate, .flags = 1u << 9, .space = space}, count);
    engine->submit(client, {},
                   SeqRequest{.verb = SeqVerb::kCreate, .space = space, .n_tokens = kMaxTokens + 1},
                   count);
    engine->submit(client, {}, SeqRequest{.verb = SeqVerb::kFree, .hashes = {{}}}, count);
    engine->submit(
        client, {},
        SeqRequest{.verb = SeqVerb::kPublish, .n_tokens = kMaxPrefixKeepNs + 1, .hashes = {{}}},
        count);
    for (const PriorityRange& range :
         {PriorityRange{.priority = KVM_PRIORITY_MAX + 1, .end = 1}, PriorityRange{.end = 0},
          PriorityRange{.end = 1, .keep_ns = kMaxPriorityKeepNs + 1}}) {
      engine->submit(client, {}, SeqRequest{.verb = SeqVerb::kSetPriority, .range = range}, count);
    }
  }
  reached.insert({Refusal::kSeqVerb, Refusal::kSeqFlags, Refusal::kSeqReserve,
                  Refusal::kPrefixHashes, Refusal::kPrefixKeep, Refusal::kPriority,
                  Refusal::kPriorityRange, Refusal::kPriorityKeep});
  EXPECT_EQ(n_answers, kEnough * reached.size());
  const std::span<const uint64_t> refusals = engine->refusals();
  for (const Refusal refusal : reached) {
    EXPECT_EQ(refusals[static_cast<size_t>(refusal)], kEnough)
        << engine::kRefusalNames[static_cast<size_t>(refusal)];
  }
  // With those that clients of the daemon hear these are all.
  for (const Spoiler<Refusal>& spoiler : refusal_spoilers()) {
    EXPECT_TRUE(reached.insert(spoiler.reason).second);
  }
  EXPECT_EQ(reached.size() + 1, engine::kRefusals);
}

}  // namespace
}  // namespace kvm::testing
