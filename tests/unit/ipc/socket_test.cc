// SPDX-License-Identifier: Apache-2.0
// The control socket: whole messages, descriptors that never leak, death of the peer.
#include "ipc/socket.h"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ipc/doorbell.h"

namespace kvm::ipc {
namespace {

struct Pair {
  Pair() {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
    a = Fd(fds[0]);
    b = Fd(fds[1]);
  }
  Fd a, b;
};

constexpr uint64_t kTimeoutNs = 5'000'000'000;

size_t open_descriptors() {
  size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++n;
  }
  return n;
}

std::vector<uint8_t> bytes_of(size_t n) { return std::vector<uint8_t>(n, 7); }

TEST(Socket, MessageAndDescriptorArrive) {
  Pair pair;
  const Fd doorbell = make_doorbell().value();
  const int fd = doorbell.get();
  ASSERT_TRUE(send_message(pair.a, bytes_of(5), {&fd, 1}).is_ok());
  auto received = receive_message(pair.b, 1);
  ASSERT_TRUE(received.is_ok() && received.value().has_value());
  EXPECT_EQ(received.value()->bytes.size(), 5u);
  ASSERT_EQ(received.value()->fds.size(), 1u);
  EXPECT_TRUE((::fcntl(received.value()->fds[0].get(), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST(Socket, NothingThere) {
  Pair pair;
  auto received = receive_message(pair.b, 0);
  ASSERT_TRUE(received.is_ok());
  EXPECT_FALSE(received.value().has_value());
  EXPECT_EQ(wait_readable(pair.b, 2'000'000).code(), KVM_ERR_TIMEOUT);
}

TEST(Socket, UnexpectedDescriptorsAreClosed) {
  Pair pair;
  const Fd doorbell = make_doorbell().value();
  const int fds[] = {doorbell.get(), doorbell.get(), doorbell.get()};
  const size_t before = open_descriptors();
  for (uint32_t allowed : {0u, 2u}) {
    ASSERT_TRUE(send_message(pair.a, bytes_of(5), fds).is_ok());
    EXPECT_EQ(receive_message(pair.b, allowed).status().code(), KVM_ERR_PROTOCOL);
    EXPECT_EQ(open_descriptors(), before);
  }
}

TEST(Socket, MoreDescriptorsThanRoomIsAProtocolError) {
  Pair pair;
  const Fd doorbell = make_doorbell().value();
  constexpr size_t kMany = kMaxFdsPerMessage + 10;
  char control[CMSG_SPACE(sizeof(int) * kMany)] = {};
  char byte = 1;
  iovec part{&byte, 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int) * kMany);
  for (size_t i = 0; i < kMany; ++i) {
    const int fd = doorbell.get();
    std::memcpy(CMSG_DATA(header) + i * sizeof(int), &fd, sizeof(int));
  }
  ASSERT_EQ(::sendmsg(pair.a.get(), &message, 0), 1);
  const size_t before = open_descriptors();
  EXPECT_EQ(receive_message(pair.b, kMaxFdsPerMessage).status().code(), KVM_ERR_PROTOCOL);
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Socket, MessagesBeyondTheLimitAreRefusedOnBothSides) {
  Pair pair;
  EXPECT_EQ(send_message(pair.a, bytes_of(kMaxControlBytes + 1), {}).code(), KVM_ERR_INVALID);
  EXPECT_EQ(send_message(pair.a, {}, {}).code(), KVM_ERR_INVALID);
  const auto large = bytes_of(kMaxControlBytes + 1);
  ASSERT_GT(::send(pair.a.get(), large.data(), large.size(), 0), 0);
  EXPECT_EQ(receive_message(pair.b, 0).status().code(), KVM_ERR_PROTOCOL);
  ASSERT_TRUE(send_message(pair.a, bytes_of(kMaxControlBytes), {}).is_ok());
  EXPECT_EQ(receive_message(pair.b, 0).value()->bytes.size(), kMaxControlBytes);
}

TEST(Socket, WritableOnceThePeerHasRead) {
  Pair pair;
  EXPECT_TRUE(wait_writable(pair.a, kTimeoutNs).is_ok());
  while (send_message(pair.a, bytes_of(100), {}).is_ok()) {
  }
  EXPECT_EQ(wait_writable(pair.a, 2'000'000).code(), KVM_ERR_TIMEOUT);
  while (receive_message(pair.b, 0).value().has_value()) {
  }
  EXPECT_TRUE(wait_writable(pair.a, kTimeoutNs).is_ok());
}

TEST(Socket, SendingNeverBlocks) {
  Pair pair;
  Status status;
  for (int i = 0; i < 100000 && status.is_ok(); ++i) {
    status = send_message(pair.a, bytes_of(1000), {});
  }
  EXPECT_EQ(status.code(), KVM_ERR_AGAIN);
}

TEST(Socket, DeathOfThePeerIsSeen) {
  Pair pair;
  EXPECT_FALSE(is_hung_up(pair.b));
  pair.a.reset();
  EXPECT_TRUE(is_hung_up(pair.b));
  EXPECT_EQ(receive_message(pair.b, 0).status().code(), KVM_ERR_DISCONNECTED);
  EXPECT_EQ(send_message(pair.b, bytes_of(1), {}).code(), KVM_ERR_DISCONNECTED);
}

class Listening : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/kvm-socket-test-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    folder_ = name;
    path_ = folder_ + "/socket";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string folder_, path_;
};

TEST_F(Listening, AcceptsAndKnowsThePeer) {
  auto listener = listen_at(path_, 0600);
  ASSERT_TRUE(listener.is_ok()) << listener.status().message();
  EXPECT_FALSE(accept_from(listener.value()).value().has_value());
  auto client = connect_to(path_, kTimeoutNs);
  ASSERT_TRUE(client.is_ok());
  auto accepted = accept_from(listener.value());
  ASSERT_TRUE(accepted.value().has_value());
  const PeerCredentials peer = peer_credentials(*accepted.value()).value();
  EXPECT_EQ(peer.pid, ::getpid());
  EXPECT_EQ(peer.uid, ::getuid());
  EXPECT_TRUE(peer_pidfd(*accepted.value(), peer).is_ok());
}

TEST_F(Listening, PidfdFiresWhenThePeerExits) {
  auto listener = listen_at(path_, 0600);
  ASSERT_TRUE(listener.is_ok());
  const pid_t child = ::fork();
  if (child == 0) {
    auto client = connect_to(path_, kTimeoutNs);
    ::pause();
    ::_exit(client.is_ok() ? 0 : 1);
  }
  ASSERT_TRUE(wait_readable(listener.value(), 5'000'000'000).is_ok());
  auto accepted = accept_from(listener.value());
  const Fd pidfd =
      peer_pidfd(*accepted.value(), peer_credentials(*accepted.value()).value()).value();
  pollfd entry{pidfd.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 0), 0);
  ::kill(child, SIGKILL);
  EXPECT_EQ(::poll(&entry, 1, 5000), 1);
  ::waitpid(child, nullptr, 0);
}

TEST_F(Listening, SecondDaemonIsRefusedAndAStaleSocketReplaced) {
  {
    auto listener = listen_at(path_, 0600);
    ASSERT_TRUE(listener.is_ok());
    EXPECT_EQ(listen_at(path_, 0600).status().code(), KVM_ERR_BUSY);
  }
  EXPECT_EQ(connect_to(path_, kTimeoutNs).status().code(), KVM_ERR_DISCONNECTED);
  EXPECT_TRUE(listen_at(path_, 0600).is_ok());
}

// Else a client that comes with the daemon is told that it has ended.
TEST_F(Listening, WhoSeesTheFileCanConnect) {
  for (int i = 0; i < 200; ++i) {
    const std::string path = path_ + std::to_string(i);
    std::string refusal;  // of a file that was there
    std::thread client([&] {
      for (;;) {
        const Status status = connect_to(path, kTimeoutNs).status();
        if (status.is_ok() || status.message().find("no such file") == std::string_view::npos) {
          refusal = status.message();
          return;
        }
      }
    });
    const auto listener = listen_at(path, 0600);
    client.join();
    ASSERT_TRUE(listener.is_ok()) << listener.status().message();
    ASSERT_EQ(refusal, "");
  }
  // Nothing else is left in the folder.
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 200);
}

TEST_F(Listening, OneOfThoseThatBeginAtOnceListens) {
  constexpr int kDaemons = 4;
  for (int i = 0; i < 50; ++i) {
    const std::string path = path_ + std::to_string(i);
    int gate[2];
    int answers[2];
    ASSERT_EQ(::pipe(gate), 0);
    ASSERT_EQ(::pipe(answers), 0);
    std::vector<pid_t> children;
    for (int child = 0; child < kDaemons; ++child) {
      children.push_back(::fork());
      if (children.back() == 0) {
        ::close(gate[1]);
        char byte = 0;
        (void)!::read(gate[0], &byte, 1);  // until all are let go
        const auto listener = listen_at(path, 0600);
        byte = listener.is_ok() ? 'l' : listener.status().code() == KVM_ERR_BUSY ? 'b' : '?';
        (void)!::write(answers[1], &byte, 1);
        ::pause();
      }
    }
    ::close(gate[0]);
    ::close(gate[1]);
    std::string said;
    while (said.size() < kDaemons) {
      char byte = 0;
      ASSERT_EQ(::read(answers[0], &byte, 1), 1);
      said += byte;
    }
    ::close(answers[0]);
    ::close(answers[1]);
    for (const pid_t child : children) {
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
    }
    std::sort(said.begin(), said.end());
    ASSERT_EQ(said, "bbbl");
  }
}

// Also where a daemon was killed before it had its name.
TEST_F(Listening, WhatAKilledDaemonLeftIsReplaced) {
  {
    auto half = listen_at(path_ + ".new", 0600);
    ASSERT_TRUE(half.is_ok());
    auto whole = listen_at(path_, 0600);
    ASSERT_TRUE(whole.is_ok()) << whole.status().message();
  }
  EXPECT_TRUE(listen_at(path_, 0600).is_ok());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
}

TEST_F(Listening, ALinkThatLeadsNowhereIsLeftAlone) {
  std::filesystem::create_symlink(folder_ + "/nothing", path_);
  const Status status = listen_at(path_, 0600).status();
  EXPECT_EQ(status.code(), KVM_ERR_EXISTS);
  EXPECT_NE(status.message().find("is a link"), std::string_view::npos) << status.message();
}

// Another kind of socket, of one that lives.
TEST_F(Listening, WhatDoesNotRefuseIsNotReplaced) {
  auto other = listen_at(path_, 0600, SOCK_STREAM);
  ASSERT_TRUE(other.is_ok());
  EXPECT_EQ(listen_at(path_, 0600).status().code(), KVM_ERR_BUSY);
  EXPECT_TRUE(connect_to(path_, kTimeoutNs).status().code() != KVM_OK);
  EXPECT_EQ(listen_at(path_, 0600, SOCK_STREAM).status().code(), KVM_ERR_BUSY);
}

TEST_F(Listening, LongPathsAreListenedAtInPlace) {
  for (const size_t size : {size_t{102}, size_t{103}, size_t{104}, size_t{107}}) {
    const std::string path = folder_ + "/" + std::string(size - folder_.size() - 1, 'x');
    ASSERT_EQ(path.size(), size);
    ASSERT_TRUE(listen_at(path, 0600).is_ok());
    ASSERT_TRUE(listen_at(path, 0600).is_ok()) << "what is stale is replaced";
  }
}

TEST_F(Listening, AFileThatIsNoSocketIsLeftAlone) {
  std::ofstream(path_) << "precious";
  EXPECT_EQ(listen_at(path_, 0600).status().code(), KVM_ERR_EXISTS);
  std::string text;
  std::ifstream(path_) >> text;
  EXPECT_EQ(text, "precious");
  const Status status = connect_to(path_, kTimeoutNs).status();
  EXPECT_EQ(status.code(), KVM_ERR_DISCONNECTED);
  EXPECT_NE(status.message().find("no socket"), std::string_view::npos) << status.message();
}

// As a daemon that is stopped: the kernel takes connections for it until its queue is full.
TEST_F(Listening, AListenerThatAcceptsNothingIsNotWaitedForForEver) {
  auto listener = listen_at(path_, 0600);
  ASSERT_TRUE(listener.is_ok());
  std::vector<Fd> waiting;
  Status status;
  while (status.is_ok() && waiting.size() < 1000) {
    auto client = connect_to(path_, 20'000'000);
    status = client.status();
    if (client.is_ok()) {
      waiting.push_back(std::move(client).value());
    }
  }
  EXPECT_EQ(status.code(), KVM_ERR_TIMEOUT) << status.message();
  EXPECT_EQ(listen_at(path_, 0600).status().code(), KVM_ERR_BUSY);
}

TEST_F(Listening, PathsAreChecked) {
  EXPECT_EQ(connect_to(folder_ + "/nobody", kTimeoutNs).status().code(), KVM_ERR_DISCONNECTED);
  EXPECT_EQ(connect_to(std::string(108, 'x'), kTimeoutNs).status().code(), KVM_ERR_INVALID);
  EXPECT_EQ(listen_at(folder_ + "/missing/socket", 0600).status().code(), KVM_ERR_IO);
}

// Login sessions have XDG_RUNTIME_DIR; the system's kvmd must be found from them as well.
TEST(Socket, ClientsFindTheSystemsDaemon) {
  char folder[] = "socket-test-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::string own = std::string(folder) + "/kvm/kvmd.sock";
  const std::string system = std::string(folder) + "/system.sock";
  const char* named = std::getenv("KVM_SOCKET");
  const std::string named_before = named != nullptr ? named : "";
  ::unsetenv("KVM_SOCKET");
  ::setenv("XDG_RUNTIME_DIR", folder, 1);
  EXPECT_EQ(default_socket_path(), own);
  EXPECT_EQ(find_socket_path(system), own) << "neither is there: the message names the first";
  std::ofstream(system).put('x');
  EXPECT_EQ(find_socket_path(system), system);
  EXPECT_EQ(default_socket_path(), own) << "kvmd listens where it did";
  std::filesystem::create_directory(std::string(folder) + "/kvm");
  std::ofstream(own).put('x');
  EXPECT_EQ(find_socket_path(system), own);
  ::setenv("KVM_SOCKET", "/nowhere", 1);
  EXPECT_EQ(find_socket_path(system), "/nowhere");
  ::unsetenv("XDG_RUNTIME_DIR");
  ::setenv("KVM_SOCKET", named_before.c_str(), 1);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace kvm::ipc
