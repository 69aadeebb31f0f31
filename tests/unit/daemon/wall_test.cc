// SPDX-License-Identifier: Apache-2.0
// Clients that break the protocol: each is closed and counted, the daemon goes on, and a
// well-behaved client beside them notices nothing.
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include "ipc/doorbell.h"
#include "ipc/shared_words.h"
#include "tests/unit/daemon/raw_client.h"

namespace kvm::testing {
namespace {

namespace wire = ipc::wire;
using ipc::Opcode;
using ipc::RequestEntry;

constexpr uint64_t kArenaBytes = 64 * 1024;
constexpr uint64_t kResultOffset = 32 * 1024;

class WallTest : public ::testing::Test {
 protected:
  WallTest() : server_(run_server()), victim_(socket_path_of(*server_)) {}

  void SetUp() override {
    ASSERT_TRUE(victim_.hello().is_ok());
    auto queue = victim_.create_queue();
    ASSERT_TRUE(queue.is_ok()) << queue.status().message();
    victim_queue_ = std::move(queue).value();
    ASSERT_TRUE(victim_.nop(&victim_queue_).is_ok());
    ASSERT_TRUE(victim_.stats().is_ok());
    errors_before_ = victim_.stats().value().n_protocol_errors;
  }

  // The offender was closed, one error was counted, and the victim is as before.
  void expect_closed(RawClient* offender, const char* what) {
    EXPECT_TRUE(offender->is_closed_by_daemon()) << what;
    const auto stats = victim_.stats();
    ASSERT_TRUE(stats.is_ok()) << what << ": " << stats.status().message();
    EXPECT_EQ(stats.value().n_protocol_errors, errors_before_ + 1) << what;
    errors_before_ = stats.value().n_protocol_errors;
    EXPECT_EQ(stats.value().n_clients, 1u) << what;
    EXPECT_TRUE(victim_.nop(&victim_queue_).is_ok()) << what;
  }

  std::shared_ptr<RunningServer> server_;
  RawClient victim_;
  RawQueue victim_queue_;
  uint64_t errors_before_ = 0;
};

// --- The socket ---------------------------------------------------------------------------------

TEST_F(WallTest, BadMagicIsAnsweredThenClosed) {
  RawClient client(socket_path_of(*server_));
  const Status status = client.hello(0x1234);
  EXPECT_EQ(status.code(), KVM_ERR_PROTOCOL);
  EXPECT_NE(status.message().find("0x1234"), std::string_view::npos) << status.message();
  expect_closed(&client, "magic");
}

TEST_F(WallTest, NoCommonVersionIsAnsweredThenClosedAndIsNoViolation) {
  RawClient client(socket_path_of(*server_));
  EXPECT_EQ(client.hello(ipc::kHelloMagic, 2, 9).code(), KVM_ERR_VERSION);
  EXPECT_TRUE(client.is_closed_by_daemon());
  EXPECT_EQ(victim_.stats().value().n_protocol_errors, errors_before_);
}

TEST_F(WallTest, BytesThatDoNotVerify) {
  for (size_t size : {size_t{1}, size_t{7}, size_t{64}, size_t{4096}}) {
    RawClient client(socket_path_of(*server_));
    const std::vector<uint8_t> bytes(size, 0xa5);
    ASSERT_TRUE(client.send(bytes).is_ok());
    expect_closed(&client, "garbage");
  }
}

TEST_F(WallTest, OversizedMessage) {
  RawClient client(socket_path_of(*server_));
  ASSERT_TRUE(client.hello().is_ok());
  const std::vector<uint8_t> bytes(ipc::kMaxControlBytes + 1, 0);
  ASSERT_EQ(::send(client.socket().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  expect_closed(&client, "oversized");
}

TEST_F(WallTest, UnexpectedDescriptors) {
  RawClient client(socket_path_of(*server_));
  ASSERT_TRUE(client.hello().is_ok());
  ipc::ControlWriter writer;
  const ipc::Fd fd(::eventfd(0, EFD_CLOEXEC));
  const int fds[] = {fd.get(), fd.get(), fd.get()};
  ASSERT_TRUE(client.send(writer.finish(9, wire::CreateStats(writer.fbb())), fds).is_ok());
  expect_closed(&client, "descriptors");
}

TEST_F(WallTest, MessagesOutOfTurn) {
  {
    RawClient client(socket_path_of(*server_));
    ipc::ControlWriter writer;
    ASSERT_TRUE(client.send(writer.finish(1, wire::CreateStats(writer.fbb()))).is_ok());
    expect_closed(&client, "no Hello");
  }
  {
    RawClient client(socket_path_of(*server_));
    ASSERT_TRUE(client.hello().is_ok());
    (void)client.hello();
    expect_closed(&client, "second Hello");
  }
  {
    RawClient client(socket_path_of(*server_));
    ASSERT_TRUE(client.hello().is_ok());
    ipc::ControlWriter writer;
    ASSERT_TRUE(client.send(writer.finish(1, wire::CreateDone(writer.fbb()))).is_ok());
    expect_closed(&client, "a reply from a client");
  }
}

// The verifier of FlatBuffers accepts a union whose type is set and whose table is absent.
TEST_F(WallTest, BodiesThatAreNamedButAbsent) {
  for (int type = 1; type <= static_cast<int>(wire::Body::MAX); ++type) {
    RawClient client(socket_path_of(*server_));
    ASSERT_TRUE(client.hello().is_ok());
    flatbuffers::FlatBufferBuilder fbb;
    wire::FinishMessageBuffer(
        fbb, wire::CreateMessage(fbb, 1, KVM_OK, 0, static_cast<wire::Body>(type), 0));
    ASSERT_TRUE(client.send({fbb.GetBufferPointer(), fbb.GetSize()}).is_ok());
    expect_closed(&client, wire::EnumNameBody(static_cast<wire::Body>(type)));
  }
}

TEST_F(WallTest, ClientThatDoesNotReadItsReplies) {
  RawClient client(socket_path_of(*server_));
  ASSERT_TRUE(client.hello().is_ok());
  bool closed = false;
  for (uint64_t i = 0; i < 1'000'000 && !closed; ++i) {
    ipc::ControlWriter writer;
    const Status status = client.send(writer.finish(i, wire::CreateStatsText(writer.fbb(), 0)));
    closed = status.code() == KVM_ERR_DISCONNECTED;
  }
  EXPECT_TRUE(closed);
  EXPECT_TRUE(victim_.nop(&victim_queue_).is_ok());
}

// --- The rings ----------------------------------------------------------------------------------

// A hostile client with a queue and an arena, and a valid entry to spoil.
struct Offender {
  explicit Offender(const RunningServer& server) : client(socket_path_of(server)) {
    EXPECT_TRUE(client.hello().is_ok());
    queue = client.create_queue().value();
    arena = client.create_arena(kArenaBytes).value();
    entry.opcode = static_cast<uint8_t>(Opcode::kStep);
    entry.version = 1;
    entry.region = arena.region;
    entry.block_length = sizeof(ipc::StepBlock) + sizeof(kvm_item);
    entry.result_region = arena.region;
    entry.result_offset = kResultOffset;
    step.verbs = ipc::kStepAttend;
    step.space = 1;
    step.n_layers = 1;
    step.n_items = 1;
    item.seq = 1;
    item.n_query = 1;
    item.query_position = KVM_POSITION_END;
  }

  void write_block() {
    // A hostile offset may leave no room: then the daemon must not look, and nothing is written.
    const uint64_t at = entry.block_offset % kArenaBytes;
    if (at <= kArenaBytes - sizeof(step)) {
      std::memcpy(arena.memory.data() + at, &step, sizeof(step));
    }
    std::memcpy(arena.memory.data() + sizeof(step), &item, sizeof(item));
  }
  void submit() { client.submit(&queue, entry); }

  RawClient client;
  RawQueue queue;
  RawArena arena;
  RequestEntry entry{};
  ipc::StepBlock step{};
  kvm_item item{};
};

TEST_F(WallTest, ValidEntryIsAnswered) {
  Offender client(*server_);
  client.write_block();
  client.submit();
  const auto done = client.client.wait(&client.queue);
  ASSERT_TRUE(done.is_ok()) << done.status().message();
  EXPECT_EQ(done.value().status, KVM_OK);
}

TEST_F(WallTest, SpoiledEntries) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::pair<const char*, std::function<void(Offender*)>>> spoilers = {
      {"unknown opcode", [](Offender* o) { o->entry.opcode = 77; }},
      {"opcode zero", [](Offender* o) { o->entry.opcode = 0; }},
      {"unknown version", [](Offender* o) { o->entry.version = 2; }},
      {"entry flags", [](Offender* o) { o->entry.flags = 1; }},
      {"entry reserved", [](Offender* o) { o->entry.reserved[2] = 1; }},
      {"unknown region", [](Offender* o) { o->entry.region = 1000; }},
      {"region zero", [](Offender* o) { o->entry.region = 0; }},
      {"block not aligned", [](Offender* o) { o->entry.block_offset = 8; }},
      {"block outside", [](Offender* o) { o->entry.block_offset = kArenaBytes; }},
      {"block offset wraps", [](Offender* o) { o->entry.block_offset = UINT64_MAX - 63; }},
      {"block too short", [](Offender* o) { o->entry.block_length = 8; }},
      {"block longer than its arrays", [](Offender* o) { o->entry.block_length += 8; }},
      {"block length huge", [](Offender* o) { o->entry.block_length = UINT32_MAX; }},
      {"unknown result region", [](Offender* o) { o->entry.result_region = 1000; }},
      {"result outside", [](Offender* o) { o->entry.result_offset = kArenaBytes - 64; }},
      {"result wraps", [](Offender* o) { o->entry.result_offset = UINT64_MAX - 63; }},
      {"no verbs", [](Offender* o) { o->step.verbs = 0; }},
      {"unknown verbs", [](Offender* o) { o->step.verbs = 1u << 9; }},
      {"unknown flags", [](Offender* o) { o->step.flags = 1u << 31; }},
      {"block reserved", [](Offender* o) { o->step.reserved[0] = 1; }},
      {"items contradict length", [](Offender* o) { o->step.n_items = 2; }},
      {"items overflow", [](Offender* o) { o->step.n_items = UINT32_MAX; }},
      {"ranges overflow", [](Offender* o) { o->step.n_ranges = 1u << 28; }},
      {"tree words overflow", [](Offender* o) { o->step.n_tree_words = UINT32_MAX; }},
      {"NaN scale", [=](Offender* o) { o->step.scale = nan; }},
      {"infinite eps", [](Offender* o) { o->step.eps = std::numeric_limits<float>::infinity(); }},
      {"unknown mode", [](Offender* o) { o->step.mode = 99; }},
      {"item flags", [](Offender* o) { o->item.flags = 1u << 20; }},
      {"item reserved", [](Offender* o) { o->item.reserved = 1; }},
      {"item ranges outside", [](Offender* o) { o->item.n_ranges = 5; }},
      {"tensor in no region",
       [](Offender* o) {
         o->step.q = {77, KVM_DTYPE_F32, 0, 64};
       }},
      {"tensor wraps",
       [](Offender* o) {
         o->step.q = {o->arena.region, KVM_DTYPE_F32, UINT64_MAX - 63, 128};
       }},
      {"tensor too long",
       [](Offender* o) {
         o->step.q = {o->arena.region, KVM_DTYPE_F32, 0, kArenaBytes + 4};
       }},
      {"tensor dtype",
       [](Offender* o) {
         o->step.q = {o->arena.region, 9, 0, 64};
       }},
      {"output over input",
       [](Offender* o) {
         o->step.q = {o->arena.region, KVM_DTYPE_F32, 4096, 256};
         o->step.o = {o->arena.region, KVM_DTYPE_F32, 4096 + 128, 256};
       }},
  };
  for (const auto& [what, spoil] : spoilers) {
    Offender client(*server_);
    spoil(&client);
    client.write_block();
    client.submit();
    expect_closed(&client.client, what);
  }
}

TEST_F(WallTest, TailBeyondTheRing) {
  for (const uint32_t jump : {ipc::kRequestEntries + 1, 1u << 31, UINT32_MAX}) {
    Offender client(*server_);
    ipc::store_seq_cst(&client.queue.client()->sq_tail, jump);
    ipc::ring_doorbell(client.client.doorbell());
    expect_closed(&client.client, "sq_tail");
  }
}

TEST_F(WallTest, HeadBeyondTheRing) {
  Offender client(*server_);
  ipc::store_seq_cst(&client.queue.client()->cq_head, 5);
  RequestEntry nop{};
  nop.opcode = static_cast<uint8_t>(Opcode::kNop);
  nop.version = 1;
  client.client.submit(&client.queue, nop);
  expect_closed(&client.client, "cq_head");
}

TEST_F(WallTest, ClientThatTakesNoCompletionsStallsItselfOnly) {
  Offender client(*server_);
  ipc::ClientRegion* region = client.queue.client();
  RequestEntry nop{};
  nop.opcode = static_cast<uint8_t>(Opcode::kNop);
  nop.version = 1;
  // Keeps the request ring full without moving cq_head, until nothing more is taken.
  constexpr uint32_t kTotal = ipc::kCompletionEntries + ipc::kRequestEntries;
  for (uint32_t tail = 0; tail < kTotal;) {
    if (tail - ipc::load_acquire(client.queue.daemon()->sq_head) < ipc::kRequestEntries) {
      region->entries[tail % ipc::kRequestEntries] = nop;
      ipc::store_seq_cst(&region->sq_tail, ++tail);
      ipc::ring_doorbell(client.client.doorbell());
    }
  }
  ::usleep(20'000);
  EXPECT_EQ(ipc::load_acquire(client.queue.daemon()->sq_head), ipc::kCompletionEntries);
  EXPECT_TRUE(victim_.nop(&victim_queue_).is_ok());
  // It costs nothing while it waits: the daemon sleeps.
  const uint64_t sleeps = victim_.n_sleeps();
  ::usleep(100'000);
  EXPECT_LT(victim_.n_sleeps() - sleeps, 20u);
  // Once it takes them and rings it goes on.
  for (uint32_t i = 0; i < kTotal; ++i) {
    ASSERT_TRUE(client.client.wait(&client.queue).is_ok()) << i;
    if (ipc::load_seq_cst(client.queue.daemon()->sq_need_wakeup) != 0) {
      ipc::ring_doorbell(client.client.doorbell());
    }
  }
  EXPECT_TRUE(client.client.nop(&client.queue).is_ok());
}

TEST_F(WallTest, DaemonRegionCannotBeMappedForWriting) {
  RawClient client(socket_path_of(*server_));
  ASSERT_TRUE(client.hello().is_ok());
  const auto reply = client.call([](ipc::ControlWriter* writer, uint64_t id) {
    return writer->finish(id, wire::CreateQueueCreate(writer->fbb(), 256));
  });
  ASSERT_TRUE(reply.is_ok());
  const ipc::Fd& fd = reply.value().message.fds[1];
  EXPECT_FALSE(
      ipc::map_shared_memory(fd, sizeof(ipc::DaemonRegion), ipc::PeerAccess::kReadWrite).is_ok());
  EXPECT_NE(::ftruncate(fd.get(), 0), 0);
}

}  // namespace
}  // namespace kvm::testing
