// SPDX-License-Identifier: Apache-2.0
// A client's connection to a daemon that answers late, or never, or ends: on simulated time,
// because a client waits for seconds.
#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "client/thin_connection.h"
#include "client/thin_queue.h"
#include "ipc/control.h"
#include "ipc/ring.h"
#include "ipc/validate.h"
#include "ipc/wire.h"
#include "tests/sim/simulated_channel.h"

namespace kvm::testing {
namespace {

namespace wire = ipc::wire;

constexpr uint64_t kTimeoutNs = 5'000'000'000;

// The daemon's end: what it has been asked, and answers to it.
class Script {
 public:
  explicit Script(std::unique_ptr<SimulatedChannel> channel) : channel_(std::move(channel)) {}

  struct Asked {
    uint64_t id = 0;
    wire::Body body = wire::Body::NONE;
  };
  std::optional<Asked> next() {
    ipc::ReceivedMessage received;
    ipc::make_room(&received);
    const Result<bool> is_there = channel_->receive(0, &received);
    if (!is_there.is_ok() || !is_there.value()) {
      return std::nullopt;
    }
    const wire::Message* message = ipc::read_message(received.bytes).value();
    return Asked{message->id(), message->body_type()};
  }
  void welcome(uint64_t id, uint32_t minor = ipc::kProtocolMinor) {
    kvm_client_info info{};
    info.struct_size = sizeof(info);
    info.protocol_minor = minor;
    ipc::ControlWriter writer;
    const auto bytes = writer.fbb().CreateVector(ipc::as_bytes(&info, 1).data(), sizeof(info));
    const ipc::Fd doorbell(::eventfd(0, EFD_CLOEXEC));
    send(writer.finish(id, wire::CreateWelcome(writer.fbb(), ipc::kProtocolMajor, minor, 1, bytes)),
         doorbell.get());
  }
  void done(uint64_t id) {
    ipc::ControlWriter writer;
    send(writer.finish(id, wire::CreateDone(writer.fbb())), -1);
  }
  // Returns the daemon's view of it.
  ipc::Mapping arena(uint64_t id, uint32_t region, uint64_t size_bytes = 4096) {
    auto memory =
        ipc::create_shared_memory("sim-arena", size_bytes, ipc::PeerAccess::kReadWrite).value();
    ipc::ControlWriter writer;
    send(writer.finish(id, wire::CreateArenaCreated(writer.fbb(), region, size_bytes)),
         memory.fd.get());
    return std::move(memory.mapping);
  }
  struct QueueMemory {
    ipc::Mapping client;
    ipc::Mapping daemon;
  };
  QueueMemory queue(uint64_t id) {
    auto client = ipc::create_shared_memory("sim-queue-client", sizeof(ipc::ClientRegion),
                                            ipc::PeerAccess::kReadWrite)
                      .value();
    auto daemon = ipc::create_shared_memory("sim-queue-daemon", sizeof(ipc::DaemonRegion),
                                            ipc::PeerAccess::kReadOnly)
                      .value();
    const int fds[] = {client.fd.get(), daemon.fd.get()};
    ipc::ControlWriter writer;
    EXPECT_TRUE(
        channel_->send(writer.finish(id, wire::CreateQueueCreated(writer.fbb(), 1, false)), fds)
            .is_ok());
    return {std::move(client.mapping), std::move(daemon.mapping)};
  }
  void end() { channel_->shut_down(); }

 private:
  void send(std::span<const uint8_t> bytes, int fd) {
    EXPECT_TRUE(channel_->send(bytes, {&fd, fd < 0 ? 0u : 1u}).is_ok());
  }

  std::unique_ptr<SimulatedChannel> channel_;
};

class SimulatedConnection : public ::testing::Test {
 protected:
  void SetUp() override {
    SimulatedChannel::Pair pair = SimulatedChannel::make(&clock_);
    script_ = std::make_unique<Script>(std::move(pair.second));
    near_ = pair.first.get();
    first_ = std::move(pair.first);
  }
  // Has the daemon act whenever the client waits.
  void play(std::function<void()> scene) { near_->set_on_wait(std::move(scene)); }
  Result<std::shared_ptr<client::Connection>> open() {
    client::ConnectOptions options;
    options.client_name = "simulated";
    options.timeout_ns = kTimeoutNs;
    return client::Connection::open_over(std::move(first_), &clock_, options);
  }
  std::shared_ptr<client::Connection> welcomed(uint32_t minor = ipc::kProtocolMinor) {
    play([this, minor] { script_->welcome(script_->next()->id, minor); });
    auto connection = open();
    EXPECT_TRUE(connection.is_ok()) << connection.status().message();
    play([] {});
    return std::move(connection).value();
  }
  static Status drop_space(client::Connection* connection) {
    return connection
        ->call([](ipc::ControlWriter* writer, uint64_t id) {
          return writer->finish(id, wire::CreateSpaceDrop(writer->fbb(), 1));
        })
        .status();
  }

  SimulatedClock clock_;
  std::unique_ptr<Script> script_;
  SimulatedChannel* near_ = nullptr;  // of the connection
  std::unique_ptr<SimulatedChannel> first_;
};

TEST_F(SimulatedConnection, ADaemonThatNeverAnswersIsGivenUpAtTheTimeout) {
  const uint64_t begin = clock_.now_ns();
  EXPECT_EQ(open().status().code(), KVM_ERR_TIMEOUT);
  EXPECT_EQ(clock_.now_ns() - begin, kTimeoutNs);
}

TEST_F(SimulatedConnection, AnAnswerInTheLastNanosecondCounts) {
  const auto connection = welcomed();
  play([this] {
    clock_.advance(kTimeoutNs - 1);
    script_->done(script_->next()->id);
  });
  EXPECT_TRUE(drop_space(connection.get()).is_ok());
}

TEST_F(SimulatedConnection, AnAnswerThatIsLateBelongsToNobody) {
  const auto connection = welcomed();
  EXPECT_EQ(drop_space(connection.get()).code(), KVM_ERR_TIMEOUT);
  const uint64_t late = script_->next()->id;
  // The next call gets its own answer, behind that of the one before.
  play([this, late] {
    script_->done(late);
    script_->done(script_->next()->id);
  });
  EXPECT_TRUE(drop_space(connection.get()).is_ok());
  EXPECT_FALSE(connection->is_down());
}

TEST_F(SimulatedConnection, AnArenaThatComesLateIsGivenBack) {
  const auto connection = welcomed();
  EXPECT_EQ(connection->create_arena(4096).status().code(), KVM_ERR_TIMEOUT);
  const uint64_t late = script_->next()->id;
  std::vector<wire::Body> asked;
  play([&] {
    script_->arena(late, 7);
    const auto own = script_->next();
    asked.push_back(own->body);
    script_->done(own->id);
  });
  EXPECT_TRUE(drop_space(connection.get()).is_ok());
  const auto given_back = script_->next();
  ASSERT_TRUE(given_back.has_value());
  EXPECT_EQ(given_back->body, wire::Body::ArenaDestroy);
  EXPECT_EQ(asked, std::vector<wire::Body>{wire::Body::SpaceDrop});
}

TEST_F(SimulatedConnection, ADaemonThatEndsInsteadOfAnAnswer) {
  const auto connection = welcomed();
  const uint64_t begin = clock_.now_ns();
  play([this] { script_->end(); });
  EXPECT_EQ(drop_space(connection.get()).code(), KVM_ERR_DISCONNECTED);
  EXPECT_EQ(clock_.now_ns(), begin) << "at once";
  EXPECT_TRUE(connection->is_down());
  EXPECT_EQ(drop_space(connection.get()).code(), KVM_ERR_DISCONNECTED);
}

// A daemon that reads nothing any more: the client waits for room as long as for an answer.
TEST_F(SimulatedConnection, ADaemonThatReadsNothing) {
  const auto connection = welcomed();
  for (size_t i = 0; i < SimulatedChannel::kCapacity; ++i) {
    EXPECT_EQ(drop_space(connection.get()).code(), KVM_ERR_TIMEOUT);
  }
  const uint64_t begin = clock_.now_ns();
  EXPECT_EQ(drop_space(connection.get()).code(), KVM_ERR_TIMEOUT);
  EXPECT_EQ(clock_.now_ns() - begin, kTimeoutNs);
}

// A daemon of minor version 1 leaves the field of n_not_finite alone; one of version 2 fills it,
// also beside an error that comes with an answer.
TEST_F(SimulatedConnection, RowsThatAreNotFiniteAreCountedByDaemonsOfMinorVersion2) {
  for (const uint32_t minor : {1u, 2u}) {
    SetUp();
    const auto connection = welcomed(minor);
    Script::QueueMemory rings;
    ipc::Mapping arena;
    play([&] {
      const auto asked = script_->next();
      if (asked->body == wire::Body::QueueCreate) {
        rings = script_->queue(asked->id);
      } else if (asked->body == wire::Body::ArenaCreate) {
        arena = script_->arena(asked->id, 7, 1 << 16);
      } else {
        script_->done(asked->id);
      }
    });
    auto queue = client::ThinQueue::create(connection, nullptr, 1, 0);
    ASSERT_TRUE(queue.is_ok()) << queue.status().message();
    const auto* of_client = reinterpret_cast<const ipc::ClientRegion*>(rings.client.data());
    auto* of_daemon = reinterpret_cast<ipc::DaemonRegion*>(rings.daemon.data());
    ipc::RequestConsumer requests(of_client, of_daemon);
    ipc::CompletionProducer completions(of_client, of_daemon);
    kvm_item item{};
    kvm_step_params params{};
    params.n_items = 1;
    params.items = &item;
    client::StepCall call;
    call.attend = true;
    call.params = &params;
    uint64_t n = 3;
    for (const kvm_status status : {KVM_OK, KVM_ERR_ACCURACY}) {
      ASSERT_TRUE(queue.value()->stage_step(call, 5).is_ok());
      ASSERT_TRUE(queue.value()->submit().is_ok());
      ipc::RequestEntry entry;
      ASSERT_EQ(requests.take(&entry, 1).value(), 1u);
      ipc::write_result(reinterpret_cast<ipc::ResultBlock*>(arena.data() + entry.result_offset), 0,
                        "", n);
      ASSERT_EQ(completions.room().value(), ipc::kCompletionEntries);
      completions.stage({.user_data = entry.user_data, .status = status});
      completions.publish();
      kvm_completion completion{};
      const auto taken = queue.value()->take(&completion, 1, 1, UINT64_MAX, {});
      ASSERT_TRUE(taken.is_ok() && taken.value() == 1);
      EXPECT_EQ(completion.status, status);
      EXPECT_EQ(completion.n_not_finite, minor == 1 ? 0 : n) << minor << " " << status;
      ++n;
    }
  }
}

TEST_F(SimulatedConnection, SnapshotsAndPrefetchNeedADaemonOfMinorVersion8) {
  for (const uint32_t minor : {7u, 8u, 10u, 11u}) {
    SetUp();
    const auto connection = welcomed(minor);
    Script::QueueMemory rings;
    ipc::Mapping arena;
    play([&] {
      const auto asked = script_->next();
      if (asked->body == wire::Body::QueueCreate) {
        rings = script_->queue(asked->id);
      } else if (asked->body == wire::Body::ArenaCreate) {
        arena = script_->arena(asked->id, 7, 1 << 16);
      } else {
        script_->done(asked->id);
      }
    });
    auto queue = client::ThinQueue::create(connection, nullptr, 8, 0);
    ASSERT_TRUE(queue.is_ok()) << queue.status().message();
    const kvm_status expected = minor < 8 ? KVM_ERR_UNSUPPORTED : KVM_OK;
    for (const SnapshotVerb verb :
         {SnapshotVerb::kSave, SnapshotVerb::kLoad, SnapshotVerb::kRemove}) {
      const SnapshotRequest request{.verb = verb, .name = "one"};
      EXPECT_EQ(queue.value()->stage_snapshot(request, 1).code(), expected);
    }
    EXPECT_EQ(queue.value()->stage_seq({.verb = SeqVerb::kPrefetch, .seq = 1}, 1).code(), expected);
    const SeqRequest priority{.verb = SeqVerb::kSetPriority, .seq = 1, .range = {.end = 64}};
    EXPECT_EQ(queue.value()->stage_seq(priority, 1).code(),
              minor < 11 ? KVM_ERR_UNSUPPORTED : KVM_OK);
  }
}

}  // namespace
}  // namespace kvm::testing
