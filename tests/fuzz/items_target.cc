// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <optional>

#include "base/assert.h"
#include "engine/engine.h"
#include "tests/fuzz/targets.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kLayers = 2;
constexpr uint32_t kQHeads = 2;
constexpr uint32_t kFuzzDim = 8;
constexpr uint32_t kRows = 64;
constexpr uint64_t kTokens = 40;  // of each of the two sequences when an input begins

// An engine with two sequences, and tensors of exactly kRows rows.
class Bench {
 public:
  Bench() {
    engine::EngineOptions options;
    options.n_threads = 1;
    options.host_capacity_bytes = 64ull << 20;
    engine_ = engine::Engine::open(options).value();
    client_ = engine_->add_client({});
    SpaceSpec spec;
    spec.name = "fuzzed";
    spec.params.struct_size = sizeof(spec.params);
    spec.params.n_layers = kLayers;
    spec.params.n_q_heads = kQHeads;
    spec.params.head_dim_k = kFuzzDim;
    spec.policies.push_back(
        {.layer_begin = 1, .retention = KVM_RETAIN_SINKS_RECENT, .n_sinks = 2, .n_recent = 16});
    spec.params.n_policies = 1;
    space_ = engine_->register_space(spec).value();
  }

  kvm_space_id space() const { return space_; }
  kvm_seq_id seq(size_t i) const { return seqs_[i]; }

  // Both sequences anew, kTokens long in each layer.
  void begin() {
    for (kvm_seq_id& seq : seqs_) {
      if (seq != 0) {
        submit(SeqRequest{.verb = SeqVerb::kFree, .seq = seq});
      }
      seq = submit(SeqRequest{.verb = SeqVerb::kCreate, .space = space_}).seq;
      StepRequest append;
      append.append = true;
      append.space = space_;
      append.n_layers = 1;
      append.items.push_back(
          {.seq = seq, .append_position = KVM_POSITION_END, .n_append = kTokens});
      give_tensors(&append);
      for (append.layer_begin = 0; append.layer_begin < kLayers; ++append.layer_begin) {
        KVM_ASSERT(submit(StepRequest(append)).status.is_ok());
      }
    }
  }

  void give_tensors(StepRequest* step) {
    step->k = view(&k_, kQHeads * kFuzzDim * kLayers);
    step->v = view(&v_, kQHeads * kFuzzDim * kLayers);
    step->q = view(&q_, kQHeads * kFuzzDim);
    step->o = view(&o_, kQHeads * kFuzzDim);
    step->lse = view(&lse_, kQHeads);
    step->err = view(&err_, kQHeads * 2);
  }

  template <typename Request>
  kvm::RequestResult submit(Request&& request) {
    std::optional<kvm::RequestResult> got;
    engine_->submit(client_, {}, std::forward<Request>(request),
                    [&got](kvm::RequestResult&& result) { got = std::move(result); });
    while (!got.has_value()) {
      engine_->work();
      engine_->poll();
    }
    KVM_ASSERT(engine_->n_in_flight() == 0);
    return std::move(*got);
  }

 private:
  static TensorView view(std::vector<float>* floats, size_t row) {
    floats->resize(kRows * row, 0.5f);
    return {.data = floats->data(),
            .size_bytes = floats->size() * sizeof(float),
            .dtype = KVM_DTYPE_F32};
  }

  std::unique_ptr<engine::Engine> engine_;
  engine::ClientId client_ = 0;
  kvm_space_id space_ = 0;
  kvm_seq_id seqs_[2] = {};
  std::vector<float> k_, v_, q_, o_, lse_, err_;
};

}  // namespace

void run_items(std::span<const uint8_t> input) {
  static Bench* const kBench = new Bench;
  InputReader reader(input);
  const auto head = reader.take<ItemsHead>();
  StepRequest step;
  step.append = (head.verbs & 1) != 0;
  step.attend = (head.verbs & 2) != 0;
  step.flags = head.flags;
  step.layer_begin = head.layer_begin;
  step.n_layers = head.n_layers;
  step.mode = head.mode;
  step.proposal = head.proposal;
  step.scale = head.scale;
  step.eps = head.eps;
  step.delta = head.delta;
  step.budget = head.budget;
  step.space = kBench->space();
  step.items = reader.take_many<kvm_item>(head.n_items);
  step.ranges = reader.take_many<kvm_range>(head.n_ranges);
  step.tree_mask = reader.take_many<uint64_t>(head.n_tree_words);
  kBench->begin();
  for (kvm_item& item : step.items) {
    item.seq = item.seq < 2 ? kBench->seq(item.seq) : item.seq;
  }
  kBench->give_tensors(&step);
  const kvm::RequestResult result = kBench->submit(std::move(step));
  KVM_ASSERT(result.status.is_ok() || !result.status.message().empty());
}

}  // namespace kvm::testing
