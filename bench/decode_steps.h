// SPDX-License-Identifier: Apache-2.0
// DecodeSteps are decode steps of the same sequences, one after the other, on an engine that is
// driven as kvmd drives it: for the benches of what happens meanwhile.
#ifndef KVM_BENCH_DECODE_STEPS_H_
#define KVM_BENCH_DECODE_STEPS_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "bench/engine_rig.h"
#include "bench/harness.h"
#include "bench/timing.h"

namespace kvm::bench {

class DecodeSteps {
 public:
  // The rig outlives it.
  DecodeSteps(Rig* rig, const Shape& shape, uint32_t max_sequences)
      : rig_(rig),
        q_(uint64_t{max_sequences} * shape.n_q_heads * shape.head_dim * 2),
        o_(uint64_t{max_sequences} * shape.n_q_heads * shape.head_dim * 4),
        lse_(uint64_t{max_sequences} * shape.n_q_heads * 4) {
    fill_random_bf16(q_.as<uint16_t>(), q_.size_bytes() / 2, 7);
  }
  void add(kvm_seq_id seq) { seqs_.push_back(seq); }
  const std::vector<kvm_seq_id>& seqs() const { return seqs_; }

  // One step of all sequences. Returns seconds.
  double run() {
    return run([] {});
  }
  // The same, with a call after each turn.
  template <typename Call>
  double run(Call after_turn) {
    engine::Engine& engine = rig_->engine();
    bool is_done = false;
    const double begin_s = now_s();
    engine.submit(rig_->client(), {}, rig_->attend(seqs_, 1, q_, o_, lse_),
                  [&](kvm::RequestResult&& result) {
                    require(result.status, "attend");
                    is_done = true;
                  });
    while (!is_done) {
      turn();
      after_turn();
    }
    return now_s() - begin_s;
  }
  // The seconds of each step.
  std::vector<double> run_for(double seconds) {
    std::vector<double> took;
    for (const double begin_s = now_s(); now_s() - begin_s < seconds;) {
      took.push_back(run());
    }
    return took;
  }
  // How long each turn of the driver was in which it computed nothing, since they were last taken.
  std::vector<double> take_stalls_us() { return std::exchange(stalls_us_, {}); }
  // Likewise of whole turns, with the task of a request or a part of a move that each may hold.
  std::vector<double> take_turns_us() { return std::exchange(turns_us_, {}); }
  // Of the engine, which computes in it if it can.
  void turn() {
    const uint64_t begin_ns = now_ns();
    turn_engine();
    turns_us_.push_back(static_cast<double>(now_ns() - begin_ns) * 1e-3);
  }

 private:
  static constexpr uint64_t kHousekeepNs = 1'000'000;  // as kvmd does while it has requests

  void turn_engine() {
    engine::Engine& engine = rig_->engine();
    engine.work();
    note_stall([&] { engine.poll(); });
    if (const uint64_t now = now_ns(); now - housekeep_ns_ >= kHousekeepNs) {
      housekeep_ns_ = now;
      note_stall([&] { engine.housekeep(); });
    }
  }
  template <typename Call>
  void note_stall(Call call) {
    const uint64_t begin_ns = now_ns();
    call();
    stalls_us_.push_back(static_cast<double>(now_ns() - begin_ns) * 1e-3);
  }

  Rig* const rig_;
  const Memory q_, o_, lse_;
  std::vector<kvm_seq_id> seqs_;
  std::vector<double> stalls_us_;
  std::vector<double> turns_us_;
  uint64_t housekeep_ns_ = 0;
};

}  // namespace kvm::bench

#endif  // KVM_BENCH_DECODE_STEPS_H_
