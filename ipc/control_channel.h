// SPDX-License-Identifier: Apache-2.0
// ControlChannel: how a client's control messages travel. The real one is a socket (ipc/socket.h);
// tests put one in its place whose other end does what they say, when they say it
// (tests/sim/simulated_channel.h). Control calls are rare, and looking for a hang-up is a system
// call anyway, so being virtual costs nothing.
//
// Threads: one at a time, but for is_hung_up, fd and shut_down: any.
#ifndef KVM_IPC_CONTROL_CHANNEL_H_
#define KVM_IPC_CONTROL_CHANNEL_H_

#include <cstdint>
#include <span>
#include <utility>

#include "base/status.h"
#include "ipc/fd.h"
#include "ipc/socket.h"

namespace kvm::ipc {

class ControlChannel {
 public:
  virtual ~ControlChannel() = default;
  // As send_message, receive_into, wait_readable, wait_writable and is_hung_up of ipc/socket.h.
  virtual Status send(std::span<const uint8_t> bytes, std::span<const int> fds) = 0;
  virtual Result<bool> receive(uint32_t max_fds, ReceivedMessage* into) = 0;
  virtual Status wait_readable(uint64_t timeout_ns) = 0;
  virtual Status wait_writable(uint64_t timeout_ns) = 0;
  virtual bool is_hung_up() const = 0;
  // For others to watch: it hangs up when the channel has ended. -1: there is none.
  virtual int fd() const = 0;
  // Ends it for both sides. What was sent before can still be received.
  virtual void shut_down() = 0;
};

class SocketChannel final : public ControlChannel {
 public:
  explicit SocketChannel(Fd socket) : socket_(std::move(socket)) {}

  Status send(std::span<const uint8_t> bytes, std::span<const int> fds) override {
    return send_message(socket_, bytes, fds);
  }
  Result<bool> receive(uint32_t max_fds, ReceivedMessage* into) override {
    return receive_into(socket_, max_fds, into);
  }
  Status wait_readable(uint64_t timeout_ns) override {
    return ipc::wait_readable(socket_, timeout_ns);
  }
  Status wait_writable(uint64_t timeout_ns) override {
    return ipc::wait_writable(socket_, timeout_ns);
  }
  bool is_hung_up() const override { return ipc::is_hung_up(socket_); }
  int fd() const override { return socket_.get(); }
  // Not closed: other threads may be looking at the descriptor.
  void shut_down() override { ::shutdown(socket_.get(), SHUT_RDWR); }

 private:
  Fd socket_;
};

}  // namespace kvm::ipc

#endif  // KVM_IPC_CONTROL_CHANNEL_H_
