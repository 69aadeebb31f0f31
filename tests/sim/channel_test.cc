// SPDX-License-Identifier: Apache-2.0
// What every ControlChannel must hold to, over a real socket and the simulated one.
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ipc/control_channel.h"
#include "ipc/wire.h"
#include "tests/sim/simulated_channel.h"

namespace kvm::testing {
namespace {

using Ends = std::pair<std::unique_ptr<ipc::ControlChannel>, std::unique_ptr<ipc::ControlChannel>>;

struct RealTransport {
  Ends make() {
    int fds[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
    return {std::make_unique<ipc::SocketChannel>(ipc::Fd(fds[0])),
            std::make_unique<ipc::SocketChannel>(ipc::Fd(fds[1]))};
  }
};
struct SimulatedTransport {
  SimulatedClock clock;
  Ends make() {
    SimulatedChannel::Pair pair = SimulatedChannel::make(&clock);
    return {std::move(pair.first), std::move(pair.second)};
  }
};

Result<std::optional<ipc::ReceivedMessage>> receive(ipc::ControlChannel* channel,
                                                    uint32_t max_fds) {
  ipc::ReceivedMessage message;
  ipc::make_room(&message);
  KVM_TRY_ASSIGN(const bool is_there, channel->receive(max_fds, &message));
  return is_there ? std::optional<ipc::ReceivedMessage>(std::move(message)) : std::nullopt;
}

template <typename Transport>
class ChannelConformance : public ::testing::Test {
 protected:
  Transport transport_;
  Ends ends_ = transport_.make();
  ipc::ControlChannel& near_ = *ends_.first;
  ipc::ControlChannel& far_ = *ends_.second;

  static std::vector<uint8_t> message(uint8_t first, size_t size) {
    std::vector<uint8_t> bytes(size);
    for (size_t i = 0; i < size; ++i) {
      bytes[i] = static_cast<uint8_t>(first + i);
    }
    return bytes;
  }
};
using Transports = ::testing::Types<RealTransport, SimulatedTransport>;
TYPED_TEST_SUITE(ChannelConformance, Transports);

TYPED_TEST(ChannelConformance, MessagesComeWholeAndInOrder) {
  const auto nothing = receive(&this->far_, 0);
  ASSERT_TRUE(nothing.is_ok());
  EXPECT_FALSE(nothing.value().has_value());
  const size_t sizes[] = {1, 100, ipc::kMaxControlBytes};
  for (const size_t size : sizes) {
    ASSERT_TRUE(this->near_.send(this->message(3, size), {}).is_ok()) << size;
  }
  for (const size_t size : sizes) {
    ASSERT_TRUE(this->far_.wait_readable(1'000'000'000).is_ok());
    const auto received = receive(&this->far_, 0);
    ASSERT_TRUE(received.is_ok() && received.value().has_value());
    EXPECT_EQ(received.value()->bytes, this->message(3, size));
    EXPECT_TRUE(received.value()->fds.empty());
  }
  EXPECT_FALSE(receive(&this->near_, 0).value().has_value()) << "nothing went the other way";
}

TYPED_TEST(ChannelConformance, DescriptorsTravel) {
  const ipc::Fd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  const int number = event.get();
  ASSERT_TRUE(this->near_.send(this->message(1, 8), {&number, 1}).is_ok());
  const auto received = receive(&this->far_, ipc::kMaxFdsPerMessage);
  ASSERT_TRUE(received.is_ok() && received.value().has_value());
  ASSERT_EQ(received.value()->fds.size(), 1u);
  EXPECT_FALSE(received.value()->lost_fds);
  const ipc::Fd& copy = received.value()->fds[0];
  EXPECT_NE(copy.get(), number) << "of the receiver's own";
  uint64_t count = 5;
  ASSERT_EQ(::write(number, &count, sizeof(count)), static_cast<ssize_t>(sizeof(count)));
  count = 0;
  EXPECT_EQ(::read(copy.get(), &count, sizeof(count)), static_cast<ssize_t>(sizeof(count)));
  EXPECT_EQ(count, 5u) << "the same file";
}

TYPED_TEST(ChannelConformance, DescriptorsWhereNoneMayComeAreABreach) {
  const ipc::Fd event(::eventfd(0, EFD_CLOEXEC));
  const int number = event.get();
  ASSERT_TRUE(this->near_.send(this->message(1, 8), {&number, 1}).is_ok());
  EXPECT_EQ(receive(&this->far_, 0).status().code(), KVM_ERR_PROTOCOL);
}

TYPED_TEST(ChannelConformance, WhatMayNotBeSentIsNot) {
  EXPECT_EQ(this->near_.send({}, {}).code(), KVM_ERR_INVALID);
  EXPECT_EQ(this->near_.send(this->message(0, ipc::kMaxControlBytes + 1), {}).code(),
            KVM_ERR_INVALID);
  const std::vector<int> fds(ipc::kMaxFdsPerMessage + 1, 0);
  EXPECT_EQ(this->near_.send(this->message(0, 1), fds).code(), KVM_ERR_INVALID);
  EXPECT_FALSE(receive(&this->far_, 0).value().has_value());
}

TYPED_TEST(ChannelConformance, WhoDoesNotReadHoldsNobodyUp) {
  const std::vector<uint8_t> bytes = this->message(0, 4096);
  Status status;
  for (int i = 0; i < 100'000 && status.is_ok(); ++i) {
    status = this->near_.send(bytes, {});
  }
  ASSERT_EQ(status.code(), KVM_ERR_AGAIN);
  EXPECT_EQ(this->near_.wait_writable(1'000'000).code(), KVM_ERR_TIMEOUT);
  for (Result<std::optional<ipc::ReceivedMessage>> received = receive(&this->far_, 0);
       received.is_ok() && received.value().has_value(); received = receive(&this->far_, 0)) {
    EXPECT_EQ(received.value()->bytes, bytes);
  }
  EXPECT_TRUE(this->near_.wait_writable(1'000'000'000).is_ok());
  EXPECT_TRUE(this->near_.send(bytes, {}).is_ok());
}

TYPED_TEST(ChannelConformance, WaitsEnd) {
  EXPECT_EQ(this->near_.wait_readable(1'000'000).code(), KVM_ERR_TIMEOUT);
  EXPECT_EQ(this->near_.wait_readable(0).code(), KVM_ERR_TIMEOUT);
  EXPECT_TRUE(this->near_.wait_writable(0).is_ok());
  ASSERT_TRUE(this->far_.send(this->message(9, 9), {}).is_ok());
  EXPECT_TRUE(this->near_.wait_readable(1'000'000'000).is_ok());
}

TYPED_TEST(ChannelConformance, TheEndIsSeenAfterWhatWasSaidBefore) {
  EXPECT_FALSE(this->near_.is_hung_up());
  EXPECT_FALSE(this->far_.is_hung_up());
  ASSERT_TRUE(this->near_.send(this->message(4, 4), {}).is_ok());
  this->near_.shut_down();
  EXPECT_TRUE(this->far_.is_hung_up());
  EXPECT_TRUE(this->far_.wait_readable(1'000'000'000).is_ok());
  const auto last = receive(&this->far_, 0);
  ASSERT_TRUE(last.is_ok() && last.value().has_value());
  EXPECT_EQ(last.value()->bytes, this->message(4, 4));
  EXPECT_EQ(receive(&this->far_, 0).status().code(), KVM_ERR_DISCONNECTED);
  EXPECT_EQ(this->far_.send(this->message(4, 4), {}).code(), KVM_ERR_DISCONNECTED);
}

TYPED_TEST(ChannelConformance, AnEndThatIsGoneIsAnEnd) {
  this->ends_.second.reset();
  EXPECT_TRUE(this->near_.is_hung_up());
  EXPECT_EQ(receive(&this->near_, 0).status().code(), KVM_ERR_DISCONNECTED);
}

}  // namespace
}  // namespace kvm::testing
