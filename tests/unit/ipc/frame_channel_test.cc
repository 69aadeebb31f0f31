// SPDX-License-Identifier: Apache-2.0
#include "ipc/frame_channel.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

namespace kvm::ipc {
namespace {

constexpr uint64_t kPatienceNs = 60'000'000'000;

class FrameChannelTest : public ::testing::Test {
 protected:
  FrameChannelTest() {
    auto ends = FrameChannel::make_pair().value();
    raw_ = ends.first.get();
    one_ = std::make_unique<FrameChannel>(std::move(ends.first));
    other_ = std::make_unique<FrameChannel>(std::move(ends.second));
  }
  // Writes bytes that need not be a frame, with so many descriptors.
  void write_raw(const void* bytes, size_t n, size_t n_fds) const {
    iovec part{const_cast<void*>(bytes), n};
    std::vector<int> fds(n_fds, STDIN_FILENO);
    alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (n_fds != 0) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
      cmsghdr* const rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
      std::memcpy(CMSG_DATA(rights), fds.data(), n_fds * sizeof(int));
    }
    ASSERT_EQ(::sendmsg(raw_, &message, MSG_NOSIGNAL), static_cast<ssize_t>(n));
  }
  Status receive() { return other_->receive(kPatienceNs, &frame_); }

  int raw_ = -1;
  std::unique_ptr<FrameChannel> one_, other_;
  Frame frame_;
};

TEST_F(FrameChannelTest, FramesOfAllLengthsArriveInOrder) {
  const std::vector<size_t> lengths = {0, 1, 100, 300'000, 5'000'000, 0, 7};
  std::thread sender([&] {
    for (size_t i = 0; i < lengths.size(); ++i) {
      std::vector<uint8_t> bytes(lengths[i]);
      std::iota(bytes.begin(), bytes.end(), static_cast<uint8_t>(i));
      ASSERT_TRUE(one_->send(static_cast<uint32_t>(i), bytes).is_ok());
    }
  });
  for (size_t i = 0; i < lengths.size(); ++i) {
    const Status got = receive();
    ASSERT_TRUE(got.is_ok()) << got.message();
    EXPECT_EQ(frame_.kind, i);
    ASSERT_EQ(frame_.bytes.size(), lengths[i]);
    for (size_t n = 0; n < lengths[i]; ++n) {
      ASSERT_EQ(frame_.bytes[n], static_cast<uint8_t>(i + n));
    }
    EXPECT_FALSE(frame_.fd.is_open());
  }
  sender.join();
}

TEST_F(FrameChannelTest, ADescriptorComesWithItsFrame) {
  const Fd file(::memfd_create("frame", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(file.get(), 12345), 0);
  const std::vector<uint8_t> bytes(10);
  ASSERT_TRUE(one_->send(1, bytes).is_ok());
  ASSERT_TRUE(one_->send(2, bytes, file.get()).is_ok());
  ASSERT_TRUE(one_->send(3, {}).is_ok());
  ASSERT_TRUE(receive().is_ok());
  EXPECT_FALSE(frame_.fd.is_open());
  ASSERT_TRUE(receive().is_ok());
  ASSERT_TRUE(frame_.fd.is_open());
  struct stat facts {};
  ASSERT_EQ(::fstat(frame_.fd.get(), &facts), 0);
  EXPECT_EQ(facts.st_size, 12345);
  ASSERT_TRUE(receive().is_ok());
  EXPECT_FALSE(frame_.fd.is_open());
}

TEST_F(FrameChannelTest, EndsAreNoticed) {
  EXPECT_EQ(other_->receive(1'000'000, &frame_).code(), KVM_ERR_TIMEOUT);
  ASSERT_TRUE(one_->send(4, {}).is_ok());
  one_->shut_down();
  EXPECT_TRUE(receive().is_ok());  // what was sent before
  EXPECT_EQ(receive().code(), KVM_ERR_DISCONNECTED);
  EXPECT_EQ(other_->send(5, {}).code(), KVM_ERR_DISCONNECTED);
  EXPECT_EQ(one_->send(5, {}).code(), KVM_ERR_DISCONNECTED);
}

// The receiver says how much: what a head promises takes memory before it comes.
TEST_F(FrameChannelTest, LongerFramesThanTheReceiverWantsAreRefused) {
  const std::vector<uint8_t> bytes(101);
  ASSERT_TRUE(one_->send(1, std::span(bytes).first(100)).is_ok());
  ASSERT_TRUE(one_->send(1, bytes).is_ok());
  EXPECT_TRUE(other_->receive(kPatienceNs, &frame_, 100).is_ok());
  EXPECT_EQ(other_->receive(kPatienceNs, &frame_, 100).code(), KVM_ERR_PROTOCOL);
}

TEST_F(FrameChannelTest, WhoeverWaitsIsLetGo) {
  std::thread ender([&] {
    ::usleep(20'000);
    other_->shut_down();
  });
  EXPECT_EQ(receive().code(), KVM_ERR_DISCONNECTED);
  ender.join();
}

TEST_F(FrameChannelTest, BytesThatAreNoFrameAreRefused) {
  struct {
    uint32_t magic = 0x464d564b, kind = 1, n_bytes = 0, n_fds = 0;
  } head;
  const auto refused = [&] { return receive().code() == KVM_ERR_PROTOCOL; };
  auto wrong = head;
  wrong.magic = 1;
  write_raw(&wrong, sizeof wrong, 0);
  EXPECT_TRUE(refused());
  wrong = head;
  wrong.n_bytes = kMaxFrameBytes + 1;
  write_raw(&wrong, sizeof wrong, 0);
  EXPECT_TRUE(refused());
  wrong = head;
  wrong.n_fds = 1;  // which does not come
  write_raw(&wrong, sizeof wrong, 0);
  EXPECT_TRUE(refused());
  write_raw(&head, sizeof head, 1);  // which it does not say
  EXPECT_TRUE(refused());
  wrong.n_fds = 1;
  write_raw(&wrong, sizeof wrong, 3);
  EXPECT_TRUE(refused());
  // A frame that is cut off.
  wrong = head;
  wrong.n_bytes = 100;
  write_raw(&wrong, sizeof wrong, 0);
  one_->shut_down();
  EXPECT_EQ(receive().code(), KVM_ERR_DISCONNECTED);
}

TEST(FrameReader, ReadsWhatWasWrittenAndNothingElse) {
  FrameWriter writer;
  writer.put(uint32_t{7});
  writer.put_all(std::span<const uint16_t>(std::vector<uint16_t>{1, 2, 3}));
  writer.put_text("a text");
  const std::vector<uint8_t> bytes(writer.bytes().begin(), writer.bytes().end());
  {
    FrameReader reader(bytes);
    EXPECT_EQ(reader.get<uint32_t>(), 7u);
    EXPECT_EQ(reader.get_all<uint16_t>(3), (std::vector<uint16_t>{1, 2, 3}));
    EXPECT_FALSE(reader.is_whole());
    EXPECT_EQ(reader.get_text(), "a text");
    EXPECT_TRUE(reader.is_whole());
    EXPECT_EQ(reader.get<uint64_t>(), 0u);
    EXPECT_FALSE(reader.is_whole());
  }
  {
    FrameReader reader(bytes);
    (void)reader.get<uint32_t>();
    EXPECT_TRUE(reader.get_all<uint16_t>(2).empty());  // there are more
    EXPECT_FALSE(reader.is_whole());
  }
  for (size_t n = 0; n < bytes.size(); ++n) {
    FrameReader reader(std::span<const uint8_t>(bytes).first(n));
    (void)reader.get<uint32_t>();
    (void)reader.get_all<uint16_t>(3);
    (void)reader.get_text();
    EXPECT_FALSE(reader.is_whole()) << n;
  }
  // A number of elements that overflows with their size.
  FrameWriter vast;
  vast.put(UINT64_MAX / 8 + 2);
  vast.put(uint64_t{1});
  FrameReader reader(vast.bytes());
  EXPECT_TRUE(reader.get_all<uint64_t>(UINT64_MAX).empty());
  EXPECT_FALSE(reader.is_whole());
}

}  // namespace
}  // namespace kvm::ipc
