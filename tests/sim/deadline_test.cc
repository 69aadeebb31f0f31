// SPDX-License-Identifier: Apache-2.0
// Deadlines of requests are those of the engine's clock, to the nanosecond.
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "engine/engine.h"
#include "tests/sim/simulated_clock.h"
#include "tests/unit/engine/rig.h"

namespace kvm::testing {
namespace {

using engine::Engine;
using kvm::StepRequest;

constexpr uint32_t kHeads = 1;
constexpr uint32_t kDim = 8;

class Deadlines : public ::testing::Test {
 protected:
  void SetUp() override {
    engine::EngineOptions options;
    options.n_threads = 1;
    options.host_capacity_bytes = 64 << 20;
    options.clock = &clock_;
    engine_ = Engine::open(options).value();
    client_ = engine_->add_client({});
    space_ =
        engine_->register_space(engine::testing::make_spec("deadlines", 1, kHeads, kHeads, kDim))
            .value();
    engine_->submit(client_, {0, 1}, SeqRequest{.verb = SeqVerb::kCreate, .space = space_},
                    [this](kvm::RequestResult&& result) { seq_ = result.seq; });
    drive();
  }
  void drive() {
    while (engine_->n_in_flight() != 0) {
      engine_->work();
      engine_->poll();
    }
  }
  // Of an append of one token.
  void submit(uint64_t deadline_ns, kvm_status* out) {
    StepRequest step;
    step.append = true;
    step.space = space_;
    kvm_item item{};
    item.seq = seq_;
    item.n_append = 1;
    item.append_position = KVM_POSITION_END;
    step.items = {item};
    step.k = step.v = row_.view();
    step.deadline_ns = deadline_ns;
    engine_->submit(client_, {0, 2}, std::move(step),
                    [out](kvm::RequestResult&& result) { *out = result.status.code(); });
  }

  SimulatedClock clock_;
  engine::testing::Buffer row_{Dtype::kF32, 1, 1, kHeads, kDim};
  std::unique_ptr<Engine> engine_;
  engine::ClientId client_ = 0;
  kvm_space_id space_ = 0;
  kvm_seq_id seq_ = 0;
};

TEST_F(Deadlines, OneNanosecondDecides) {
  kvm_status status = KVM_ERR_INTERNAL;
  const uint64_t deadline = clock_.now_ns() + 100;
  clock_.advance(99);
  submit(deadline, &status);
  drive();
  EXPECT_EQ(status, KVM_OK);
  clock_.advance(1);
  submit(deadline, &status);
  drive();
  EXPECT_EQ(status, KVM_ERR_DEADLINE);
  EXPECT_EQ(engine_->seq_info(client_, seq_).value().n_tokens_max, 1u) << "nothing was appended";
}

}  // namespace
}  // namespace kvm::testing
