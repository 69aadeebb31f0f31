// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/simulated_channel.h"

#include <unistd.h>

#include <array>
#include <deque>
#include <utility>

#include "ipc/wire.h"

namespace kvm::testing {

struct SimulatedChannel::Line {
  std::array<std::deque<ipc::ReceivedMessage>, 2> to;  // by the end that receives
  bool is_down = false;
};

SimulatedChannel::Pair SimulatedChannel::make(SimulatedClock* clock) {
  auto line = std::make_shared<Line>();
  std::unique_ptr<SimulatedChannel> first(new SimulatedChannel(clock, line, 0));
  std::unique_ptr<SimulatedChannel> second(new SimulatedChannel(clock, line, 1));
  return {std::move(first), std::move(second)};
}

Status SimulatedChannel::send(std::span<const uint8_t> bytes, std::span<const int> fds) {
  if (bytes.empty() || bytes.size() > ipc::kMaxControlBytes ||
      fds.size() > ipc::kMaxFdsPerMessage) {
    return Status(KVM_ERR_INVALID, "no message that may be sent");
  }
  if (line_->is_down) {
    return Status(KVM_ERR_DISCONNECTED, "the channel is down");
  }
  std::deque<ipc::ReceivedMessage>& to = line_->to[1 - end_];
  if (to.size() >= kCapacity) {
    return Status(KVM_ERR_AGAIN, "the peer does not read its messages");
  }
  ipc::ReceivedMessage message;
  message.bytes.assign(bytes.begin(), bytes.end());
  for (const int fd : fds) {
    message.fds.emplace_back(::dup(fd));
  }
  to.push_back(std::move(message));
  return Status::ok();
}

Result<bool> SimulatedChannel::receive(uint32_t max_fds, ipc::ReceivedMessage* into) {
  std::deque<ipc::ReceivedMessage>& own = line_->to[end_];
  if (own.empty()) {
    if (line_->is_down) {
      return Status(KVM_ERR_DISCONNECTED, "the other side closed the connection");
    }
    return false;
  }
  *into = std::move(own.front());
  own.pop_front();
  if (into->fds.size() > max_fds) {
    return Status(KVM_ERR_PROTOCOL, "more descriptors than allowed");
  }
  return true;
}

template <typename Condition>
Status SimulatedChannel::wait_for(uint64_t timeout_ns, Condition condition) {
  if (!condition() && on_wait_) {
    on_wait_();
  }
  if (condition()) {
    return Status::ok();
  }
  clock_->advance(timeout_ns);
  return Status(KVM_ERR_TIMEOUT, "nothing came");
}

Status SimulatedChannel::wait_readable(uint64_t timeout_ns) {
  return wait_for(timeout_ns, [this] { return line_->is_down || !line_->to[end_].empty(); });
}

Status SimulatedChannel::wait_writable(uint64_t timeout_ns) {
  return wait_for(timeout_ns,
                  [this] { return line_->is_down || line_->to[1 - end_].size() < kCapacity; });
}

bool SimulatedChannel::is_hung_up() const { return line_->is_down; }

void SimulatedChannel::shut_down() { line_->is_down = true; }

}  // namespace kvm::testing
