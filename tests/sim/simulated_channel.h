// SPDX-License-Identifier: Apache-2.0
// Two ends of a control channel in one process, on simulated time. Who waits has the other end act
// first (on_wait); where that brings nothing, the clock moves to the end of the wait.
//
// Threads: one.
#ifndef KVM_TESTS_SIM_SIMULATED_CHANNEL_H_
#define KVM_TESTS_SIM_SIMULATED_CHANNEL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "ipc/control_channel.h"
#include "tests/sim/simulated_clock.h"

namespace kvm::testing {

class SimulatedChannel final : public ipc::ControlChannel {
 public:
  // LIMIT: messages that wait for the other end, as a socket's buffer has one.
  static constexpr size_t kCapacity = 8;
  using Pair = std::pair<std::unique_ptr<SimulatedChannel>, std::unique_ptr<SimulatedChannel>>;
  static Pair make(SimulatedClock* clock);

  // Called before each wait.
  void set_on_wait(std::function<void()> on_wait) { on_wait_ = std::move(on_wait); }

  Status send(std::span<const uint8_t> bytes, std::span<const int> fds) override;
  Result<bool> receive(uint32_t max_fds, ipc::ReceivedMessage* into) override;
  Status wait_readable(uint64_t timeout_ns) override;
  Status wait_writable(uint64_t timeout_ns) override;
  bool is_hung_up() const override;
  int fd() const override { return -1; }
  void shut_down() override;
  ~SimulatedChannel() override { shut_down(); }

 private:
  struct Line;  // what both ends share

  SimulatedChannel(SimulatedClock* clock, std::shared_ptr<Line> line, int end)
      : clock_(clock), line_(std::move(line)), end_(end) {}
  template <typename Condition>
  Status wait_for(uint64_t timeout_ns, Condition condition);

  SimulatedClock* clock_;
  std::shared_ptr<Line> line_;
  int end_;
  std::function<void()> on_wait_;
};

}  // namespace kvm::testing

#endif  // KVM_TESTS_SIM_SIMULATED_CHANNEL_H_
