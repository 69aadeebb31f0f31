// SPDX-License-Identifier: Apache-2.0
// The dispatcher with well-behaved clients, clients that die, and limits.
#include "daemon/server.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/spin.h"
#include "daemon/notify.h"
#include "daemon/session.h"
#include "daemon/stats_text.h"
#include "ipc/shared_words.h"
#include "tests/unit/daemon/raw_client.h"

namespace kvm::testing {
namespace {

namespace wire = ipc::wire;

RawClient connected(const RunningServer& server) {
  RawClient client(socket_path_of(server));
  EXPECT_TRUE(client.hello().is_ok());
  return client;
}

// Waits until `condition` holds, 5 s at most.
template <typename F>
bool eventually(F condition) {
  const uint64_t deadline = now_ns() + 5'000'000'000;
  while (!condition()) {
    if (now_ns() > deadline) {
      return false;
    }
    ::usleep(1000);
  }
  return true;
}

ipc::RequestEntry block_entry(ipc::Opcode opcode, const RawArena& arena, uint32_t length) {
  ipc::RequestEntry entry{};
  entry.opcode = static_cast<uint8_t>(opcode);
  entry.version = 1;
  entry.region = arena.region;
  entry.block_length = length;
  entry.result_offset = 4096;
  entry.result_region = arena.region;
  return entry;
}

template <typename Block>
ipc::RequestEntry write_block(ipc::Opcode opcode, const RawArena& arena, const Block& block) {
  std::memcpy(arena.memory.data(), &block, sizeof(block));
  return block_entry(opcode, arena, sizeof(block));
}

// A request that the fake engine never finishes by itself.
void submit_endless(RawClient* client, RawQueue* queue, const RawArena& arena, uint64_t number) {
  ipc::ReadBlock read{};
  read.seq = 1;
  ipc::RequestEntry entry = write_block(ipc::Opcode::kRead, arena, read);
  entry.user_data = number;
  client->submit(queue, entry);
}

TEST(Server, WelcomeSaysWhatHolds) {
  const auto server = run_server();
  RawClient client = connected(*server);
  const kvm_client_info& info = client.info();
  EXPECT_EQ(info.struct_size, sizeof(info));
  EXPECT_EQ(info.max_queues, 4u);
  EXPECT_EQ(info.max_outstanding, kMaxOutstanding);
  EXPECT_EQ(info.server_pid, static_cast<uint32_t>(::getpid()));
  EXPECT_STREQ(info.isa, "scalar");
  EXPECT_NE(info.epoch, 0u);
  EXPECT_EQ(info.epoch, client.epoch());
}

TEST(Server, EveryStartHasItsOwnEpoch) {
  std::set<uint64_t> epochs;
  for (int i = 0; i < 4; ++i) {
    const auto server = run_server();
    epochs.insert(connected(*server).epoch());
  }
  EXPECT_EQ(epochs.size(), 4u);
}

TEST(Server, RequestsAcrossSleeps) {
  const auto server = run_server({.spin_max_ns = 0});
  RawClient client = connected(*server);
  auto queue = client.create_queue().value();
  for (int i = 0; i < 200; ++i) {
    ASSERT_TRUE(client.nop(&queue).is_ok()) << i;
    if (i % 10 == 0) {
      ::usleep(2000);
    }
  }
}

TEST(Server, SequencesAndSentences) {
  const auto server = run_server();
  RawClient client = connected(*server);
  auto queue = client.create_queue().value();
  auto arena = client.create_arena(8192).value();
  const auto* result = reinterpret_cast<const ipc::ResultBlock*>(arena.memory.data() + 4096);

  ipc::SeqBlock block{};
  block.verb = static_cast<uint32_t>(SeqVerb::kCreate);
  block.space = 1;
  client.submit(&queue, write_block(ipc::Opcode::kSeq, arena, block));
  ASSERT_EQ(client.wait(&queue).value().status, KVM_OK);
  EXPECT_NE(result->seq, 0u);
  EXPECT_STREQ(result->message, "");

  block.verb = static_cast<uint32_t>(SeqVerb::kFree);
  block.space = 0;
  block.seq = 12345;
  client.submit(&queue, write_block(ipc::Opcode::kSeq, arena, block));
  EXPECT_EQ(client.wait(&queue).value().status, KVM_ERR_NOT_FOUND);
  EXPECT_STREQ(result->message, "there is no such sequence");
}

TEST(Server, CancelAndUnknownCancel) {
  const auto server = run_server();
  RawClient client = connected(*server);
  auto queue = client.create_queue().value();
  auto arena = client.create_arena(8192).value();
  submit_endless(&client, &queue, arena, 42);
  // The block may be written anew only after the daemon has copied it.
  ASSERT_TRUE(eventually([&] { return ipc::load_acquire(queue.daemon()->sq_head) == 1; }));
  ASSERT_TRUE(client.nop(&queue).is_ok());
  ipc::CancelBlock cancel{};
  cancel.user_data = 42;
  ipc::RequestEntry entry = write_block(ipc::Opcode::kCancel, arena, cancel);
  entry.user_data = 43;
  client.submit(&queue, entry);
  std::set<std::pair<uint64_t, int32_t>> seen;
  for (int i = 0; i < 2; ++i) {
    const auto done = client.wait(&queue);
    ASSERT_TRUE(done.is_ok());
    seen.insert({done.value().user_data, done.value().status});
  }
  EXPECT_TRUE(seen.contains({42, KVM_ERR_CANCELLED}));
  EXPECT_TRUE(seen.contains({43, KVM_OK}));
  client.submit(&queue, entry);
  EXPECT_EQ(client.wait(&queue).value().status, KVM_ERR_NOT_FOUND);
}

TEST(Server, DestroyingAQueueCancelsWhatIsInFlight) {
  const auto server = run_server();
  RawClient client = connected(*server);
  auto queue = client.create_queue().value();
  auto arena = client.create_arena(8192).value();
  submit_endless(&client, &queue, arena, 1);
  ASSERT_TRUE(eventually([&] { return ipc::load_acquire(queue.daemon()->sq_head) == 1; }));
  EXPECT_TRUE(client.destroy_queue(queue.id).is_ok());
  EXPECT_EQ(client.destroy_queue(queue.id).code(), KVM_ERR_NOT_FOUND);
  EXPECT_TRUE(client.destroy_arena(arena.region).is_ok());
}

// The reply is due after the message was handled: the dispatcher must not go to sleep in between.
// It is about to sleep whenever the message comes, in one of the many rounds.
TEST(Server, DestroyingAQueueIsAnsweredHoweverTheDispatcherIsAboutToSleep) {
  const auto server = run_server({.spin_max_ns = 60'000});
  RawClient client = connected(*server);
  for (int i = 0; i < 3000; ++i) {
    auto queue = client.create_queue();
    ASSERT_TRUE(queue.is_ok()) << i << ": " << queue.status().message();
    const uint64_t until = now_ns() + static_cast<uint64_t>(i % 150) * 1000;
    Spin spin;
    while (now_ns() < until) {
      spin.relax();
    }
    const Status status = client.destroy_queue(queue.value().id);
    ASSERT_TRUE(status.is_ok()) << i << ": " << status.message();
  }
}

TEST(Server, ArenaDestroyedUnderARequestStaysMapped) {
  const auto server = run_server();
  RawClient client = connected(*server);
  auto queue = client.create_queue().value();
  auto arena = client.create_arena(8192).value();
  submit_endless(&client, &queue, arena, 1);
  ASSERT_TRUE(eventually([&] { return ipc::load_acquire(queue.daemon()->sq_head) == 1; }));
  EXPECT_TRUE(client.destroy_arena(arena.region).is_ok());
  EXPECT_EQ(client.destroy_arena(arena.region).code(), KVM_ERR_NOT_FOUND);
  // Answering writes into the arena.
  EXPECT_TRUE(client.destroy_queue(queue.id).is_ok());
}

// A client that keeps its mapping must not hold memory that no limit counts.
TEST(Server, MemoryOfArenasGoesThoughTheClientStillMapsThem) {
  const auto server = run_server();
  constexpr uint64_t kBytes = 1 << 20;
  std::optional<RawClient> client(connected(*server));
  auto destroyed = client->create_arena(kBytes).value();
  auto left = client->create_arena(kBytes).value();
  std::memset(destroyed.memory.data(), 7, kBytes);
  std::memset(left.memory.data(), 7, kBytes);
  const auto byte_of = [](const RawArena& arena) {
    return __atomic_load_n(&arena.memory.data()[kBytes - 1], __ATOMIC_RELAXED);
  };
  EXPECT_TRUE(client->destroy_arena(destroyed.region).is_ok());
  EXPECT_TRUE(eventually([&] { return byte_of(destroyed) == 0; }));
  EXPECT_EQ(byte_of(left), 7);
  client.reset();
  EXPECT_TRUE(eventually([&] { return byte_of(left) == 0; }));
}

// The daemon's end takes no results away that it has just announced.
TEST(Server, ArenasStayReadableWhenTheDaemonEnds) {
  const auto server = run_server();
  RawClient client = connected(*server);
  auto arena = client.create_arena(4096).value();
  arena.memory.data()[0] = 7;
  stop(server.get());
  EXPECT_TRUE(client.is_closed_by_daemon());
  EXPECT_EQ(arena.memory.data()[0], 7);
}

TEST(Server, Limits) {
  const auto server = run_server({.max_clients = 2, .max_queues = 1, .max_arenas = 1});
  RawClient client = connected(*server);
  RawClient second = connected(*server);
  RawClient third(socket_path_of(*server));
  EXPECT_EQ(third.hello().code(), KVM_ERR_LIMIT);
  EXPECT_TRUE(third.is_closed_by_daemon());

  auto q1 = client.create_queue();
  auto q2 = client.create_queue();
  EXPECT_TRUE(q1.is_ok() && q2.is_ok());
  EXPECT_EQ(client.create_queue().status().code(), KVM_ERR_QUOTA);
  EXPECT_TRUE(client.destroy_queue(q1.value().id).is_ok());
  EXPECT_TRUE(client.create_queue().is_ok()) << "a destroyed queue makes room";

  EXPECT_EQ(client.create_arena(0).status().code(), KVM_ERR_INVALID);
  EXPECT_EQ(client.create_arena(UINT64_MAX).status().code(), KVM_ERR_LIMIT);
  EXPECT_EQ(client.create_arena(9ull << 20).status().code(), KVM_ERR_QUOTA);
  auto a1 = client.create_arena(6ull << 20);
  ASSERT_TRUE(a1.is_ok());
  EXPECT_EQ(client.create_arena(3ull << 20).status().code(), KVM_ERR_QUOTA);
  // One for the application, and four for each of two queues.
  std::vector<RawArena> small;
  for (int i = 0; i < 8; ++i) {
    auto arena = client.create_arena(4096);
    ASSERT_TRUE(arena.is_ok()) << i;
    small.push_back(std::move(arena).value());
  }
  EXPECT_EQ(client.create_arena(4096).status().code(), KVM_ERR_QUOTA);
  EXPECT_TRUE(client.destroy_arena(a1.value().region).is_ok());
  EXPECT_TRUE(client.create_arena(6ull << 20).is_ok()) << "a destroyed arena makes room";
}

// What a client asks for beyond its requests in flight is refused, one by one, and nothing is lost.
TEST(Server, RequestsBeyondTheQuotaAreAnswered) {
  const auto server = run_server({.max_requests = 2});
  RawClient client = connected(*server);
  RawClient other = connected(*server);
  auto queue = client.create_queue().value();
  auto second = client.create_queue().value();
  auto arena = client.create_arena(8192).value();
  const auto* result = reinterpret_cast<const ipc::ResultBlock*>(arena.memory.data() + 4096);
  submit_endless(&client, &queue, arena, 1);
  submit_endless(&client, &second, arena, 2);
  ASSERT_TRUE(client.nop(&queue).is_ok()) << "what is answered at once does not count";
  submit_endless(&client, &second, arena, 3);
  const auto refused = client.wait(&second);
  ASSERT_TRUE(refused.is_ok());
  EXPECT_EQ(refused.value().user_data, 3u);
  EXPECT_EQ(refused.value().status, KVM_ERR_QUOTA);
  EXPECT_STREQ(result->message,
               "a request: this client holds 2 of 2 requests in flight, and 1 more does not fit");
  // Another client has its own.
  auto other_queue = other.create_queue().value();
  auto other_arena = other.create_arena(8192).value();
  submit_endless(&other, &other_queue, other_arena, 1);
  ASSERT_TRUE(other.nop(&other_queue).is_ok());

  ipc::CancelBlock cancel{};
  cancel.user_data = 1;
  ipc::RequestEntry entry = write_block(ipc::Opcode::kCancel, arena, cancel);
  entry.user_data = 4;
  client.submit(&queue, entry);
  ASSERT_TRUE(client.wait(&queue).is_ok());
  ASSERT_TRUE(client.wait(&queue).is_ok());
  submit_endless(&client, &second, arena, 5);
  ASSERT_TRUE(client.nop(&queue).is_ok()) << "there is room again, so 5 is in flight";
}

// Clients of one user share what the user may have; what one held comes back when it goes.
TEST(Server, ClientsOfAUserShareItsQuota) {
  engine::TenantLimits tenants;
  tenants.each[engine::Resource::kQueues] = 3;
  tenants.each[engine::Resource::kArenas] = 2;
  tenants.each[engine::Resource::kArenaBytes] = 1 << 20;
  const auto server = run_server({.tenants = tenants});
  std::optional<RawClient> first(connected(*server));
  RawClient second = connected(*server);
  EXPECT_TRUE(first->create_queue().is_ok());
  EXPECT_TRUE(first->create_queue().is_ok());
  EXPECT_TRUE(second.create_queue().is_ok());
  const Status queue = second.create_queue().status();
  EXPECT_EQ(queue.code(), KVM_ERR_QUOTA);
  EXPECT_NE(queue.message().find("holds 3 of 3"), std::string::npos) << queue.message();
  const auto large = first->create_arena(768 << 10);
  EXPECT_TRUE(large.is_ok());
  EXPECT_EQ(second.create_arena(512 << 10).status().code(), KVM_ERR_QUOTA);
  EXPECT_TRUE(second.create_arena(256 << 10).is_ok());
  EXPECT_EQ(second.create_arena(4096).status().code(), KVM_ERR_QUOTA);
  EXPECT_TRUE(first->destroy_arena(large.value().region).is_ok());
  EXPECT_TRUE(second.create_arena(768 << 10).is_ok()) << "a destroyed arena makes room";
  first.reset();
  EXPECT_TRUE(eventually([&] { return second.create_queue().is_ok(); }));
}

// Sequences that live throughout are seen once, whatever comes and goes between two parts.
TEST(Server, ListsComeInPartsThatFitTogether) {
  const auto server = run_server();
  RawClient client = connected(*server);
  auto queue = client.create_queue().value();
  auto arena = client.create_arena(8192).value();
  const auto* result = reinterpret_cast<const ipc::ResultBlock*>(arena.memory.data() + 4096);
  const auto run = [&](SeqVerb verb, kvm_seq_id seq) {
    ipc::SeqBlock block{};
    block.verb = static_cast<uint32_t>(verb);
    block.space = verb == SeqVerb::kCreate ? 1 : 0;
    block.seq = seq;
    client.submit(&queue, write_block(ipc::Opcode::kSeq, arena, block));
    EXPECT_EQ(client.wait(&queue).value().status, KVM_OK);
    return result->seq;
  };
  std::vector<kvm_seq_id> seqs;
  for (int i = 0; i < 1500; ++i) {  // more than fit two replies
    seqs.push_back(run(SeqVerb::kCreate, 0));
  }
  std::multiset<kvm_seq_id> seen;
  uint64_t n_parts = 0;
  bool has_more = true;
  for (uint64_t begin = 0; has_more; ++n_parts) {
    const auto reply = client.call([begin](ipc::ControlWriter* writer, uint64_t id) {
      return writer->finish(id, wire::CreateSeqList(writer->fbb(), 0, 0, begin));
    });
    ASSERT_TRUE(reply.is_ok()) << reply.status().message();
    const wire::Bytes* bytes = reply.value().root->body_as_Bytes();
    const size_t n = bytes->data()->size() / sizeof(kvm_seq_info);
    has_more = bytes->total() > n;
    ASSERT_TRUE(n > 0 || !has_more);
    for (size_t i = 0; i < n; ++i) {
      kvm_seq_info info;
      std::memcpy(&info, bytes->data()->data() + i * sizeof(info), sizeof(info));
      EXPECT_EQ(info.struct_size, sizeof(info));
      seen.insert(info.seq);
      begin = info.seq + 1;
    }
    // The first ones, which were seen, go, and others come.
    for (size_t i = 0; i < 10; ++i) {
      (void)run(SeqVerb::kFree, seqs[n_parts * 10 + i]);
      (void)run(SeqVerb::kCreate, 0);
    }
  }
  EXPECT_GT(n_parts, 2u);
  for (size_t i = n_parts * 10; i < seqs.size(); ++i) {
    EXPECT_EQ(seen.count(seqs[i]), 1u) << i;
  }
}

#if !defined(__SANITIZE_ADDRESS__)  // UBSan, which comes with it, needs descriptors for its checks
// Whoever waits to be accepted must not keep the dispatcher awake.
TEST(Server, WithoutDescriptorsItSleepsAndAcceptsLater) {
  const auto server = run_server();
  RawClient witness = connected(*server);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    RawClient client(socket_path_of(*server));
    ::_exit(client.hello().is_ok() ? 0 : 1);
  }
  const rlimit none{3, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const uint64_t sleeps = witness.n_sleeps();
  ::usleep(250'000);
  EXPECT_LT(witness.n_sleeps() - sleeps, 30u);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0) << "accepted in the end";
}
#endif

TEST(Server, KilledClientLeavesNothing) {
  const auto server = run_server();
  RawClient witness = connected(*server);
  auto witness_queue = witness.create_queue().value();
  for (int round = 0; round < 3; ++round) {
    int ready[2];
    ASSERT_EQ(::pipe(ready), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      RawClient client(socket_path_of(*server));
      if (!client.hello().is_ok()) {
        ::_exit(1);
      }
      auto queue = client.create_queue();
      auto arena = client.create_arena(4ull << 20);
      submit_endless(&client, &queue.value(), arena.value(), 1);
      while (ipc::load_acquire(queue.value().daemon()->sq_head) != 1) {
      }
      [[maybe_unused]] const ssize_t n = ::write(ready[1], "x", 1);
      for (;;) {
        ::pause();
      }
    }
    char byte = 0;
    ASSERT_EQ(::read(ready[0], &byte, 1), 1);
    EXPECT_EQ(witness.stats().value().n_clients, 2u);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    ::close(ready[0]);
    ::close(ready[1]);
    EXPECT_TRUE(eventually([&] { return witness.stats().value().n_clients == 1; }));
    EXPECT_TRUE(witness.nop(&witness_queue).is_ok());
  }
  EXPECT_TRUE(eventually([&] {
    return witness.stats_text().value().find("\nkvm_arena_bytes 0\n") != std::string::npos;
  })) << witness.stats_text().value();
}

TEST(Server, CompletionEventfdBecomesReadable) {
  const auto server = run_server();
  RawClient client = connected(*server);
  auto queue = client.create_queue().value();
  if (!queue.eventfd.is_open()) {
    GTEST_SKIP() << "io_uring is not available here";
  }
  ipc::store_seq_cst(&queue.client()->cq_eventfd, 1);
  for (int i = 0; i < 20; ++i) {
    ipc::RequestEntry nop{};
    nop.opcode = static_cast<uint8_t>(ipc::Opcode::kNop);
    nop.version = 1;
    client.submit(&queue, nop);
    pollfd entry{queue.eventfd.get(), POLLIN, 0};
    ASSERT_EQ(::poll(&entry, 1, 5000), 1) << i;
    uint64_t count = 0;
    ASSERT_EQ(::read(queue.eventfd.get(), &count, sizeof(count)), 8);
    ASSERT_TRUE(client.wait(&queue).is_ok());
  }
}

TEST(Server, SaturatedEventfdBlocksNobody) {
  const auto server = run_server();
  RawClient hostile = connected(*server);
  RawClient client = connected(*server);
  auto queue = client.create_queue().value();
  auto hostile_queue = hostile.create_queue().value();
  if (!hostile_queue.eventfd.is_open()) {
    GTEST_SKIP() << "io_uring is not available here";
  }
  ipc::store_seq_cst(&hostile_queue.client()->cq_eventfd, 1);
  const uint64_t full = UINT64_MAX - 1;
  ASSERT_EQ(::write(hostile_queue.eventfd.get(), &full, sizeof(full)), 8);
  ASSERT_EQ(::fcntl(hostile_queue.eventfd.get(), F_SETFL, 0), 0);
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(hostile.nop(&hostile_queue).is_ok());
    ::usleep(200);
    ASSERT_TRUE(client.nop(&queue).is_ok());
  }
  EXPECT_TRUE(hostile.destroy_queue(hostile_queue.id).is_ok());
}

TEST(Server, StopRemovesTheSocketAndClosesClients) {
  const auto server = run_server();
  RawClient client = connected(*server);
  auto queue = client.create_queue().value();
  auto arena = client.create_arena(8192).value();
  submit_endless(&client, &queue, arena, 1);  // outlives shutdown_timeout
  stop(server.get());
  EXPECT_NE(::access(socket_path_of(*server).c_str(), F_OK), 0);
  EXPECT_TRUE(client.is_closed_by_daemon());
}

// What is in flight when the daemon is told to stop is finished and answered; then everybody is
// disconnected.
TEST(Server, StopLetsRequestsInFlightFinish) {
  const auto server = run_server();
  RawClient client = connected(*server);
  RawClient idle = connected(*server);
  auto queue = client.create_queue().value();
  auto arena = client.create_arena(8192).value();
  ipc::ObserveBlock observe{};
  observe.seq = 1;
  observe.n_rows = 1;
  observe.q = {arena.region, KVM_DTYPE_F32, 2048, 64, 0, 0, 0};
  ipc::RequestEntry entry = write_block(ipc::Opcode::kObserve, arena, observe);
  entry.user_data = 11;
  client.submit(&queue, entry);
  ASSERT_TRUE(client.nop(&queue).is_ok()) << "so the request before it was taken";
  stop(server.get());
  const auto done = client.wait(&queue);
  ASSERT_TRUE(done.is_ok()) << done.status().message();
  EXPECT_EQ(done.value().user_data, 11u);
  EXPECT_EQ(done.value().status, KVM_OK);
  EXPECT_TRUE(client.is_closed_by_daemon());
  EXPECT_TRUE(idle.is_closed_by_daemon());
}

TEST(Server, StatsTextHasEverySeriesFromTheStart) {
  const auto server = run_server();
  RawClient client = connected(*server);
  const std::string text = client.stats_text().value();
  std::istringstream lines(text);
  std::set<std::string> families;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("# TYPE ")) {
      std::istringstream words(line.substr(7));
      std::string name;
      std::string type;
      words >> name >> type;
      EXPECT_TRUE(name.starts_with("kvm_")) << name;
      EXPECT_TRUE(families.insert(name).second) << name << " twice";
      if (type == "histogram") {
        families.insert({name + "_bucket", name + "_sum", name + "_count"});
      }
      EXPECT_EQ(type == "counter", name.ends_with("_total")) << name;
    } else if (!line.starts_with("#")) {
      EXPECT_TRUE(families.contains(line.substr(0, line.find_first_of("{ ")))) << line;
    }
  }
  for (const char* line : {"kvm_clients 1\n", "kvm_tier_used_bytes{tier=\"dram\"} 0\n",
                           "kvm_requests_total{result=\"error\"} 0\n"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << "in\n" << text;
  }
}

TEST(Server, DocumentationListsEverySeries) {
  const char* root = std::getenv("KVM_SOURCE_DIR");
  ASSERT_NE(root, nullptr);
  std::ifstream file(std::string(root) + "/docs/operations.md");
  std::stringstream page;
  page << file.rdbuf();
  const auto server = run_server();
  RawClient client = connected(*server);
  std::istringstream lines(client.stats_text().value());
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("# TYPE ")) {
      const std::string name = line.substr(7, line.find(' ', 7) - 7);
      EXPECT_NE(page.str().find("`" + name), std::string::npos) << name;
    }
  }
}

TEST(Session, GapFollowsShortGapsDespiteOnePause) {
  daemon::Service service;
  daemon::Session session(&service, 1, ipc::Fd(), {});
  uint64_t now = 1'000'000;
  session.note_answer(now);
  for (int i = 0; i < 50; ++i) {
    now += 10'000;
    session.note_arrival(now);
    session.note_answer(now);
  }
  EXPECT_NEAR(static_cast<double>(session.gap_ns()), 10'000, 500);
  now += 50'000'000;
  session.note_arrival(now);
  EXPECT_LT(session.gap_ns(), 20'000u);
}

TEST(Notify, SendsToTheSocketOfTheServiceManager) {
  char folder[] = "/tmp/kvmd-notify-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::string path = std::string(folder) + "/notify";
  const ipc::Fd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ::setenv("NOTIFY_SOCKET", path.c_str(), 1);
  EXPECT_TRUE(daemon::notify_service_manager("READY=1"));
  ::unsetenv("NOTIFY_SOCKET");
  EXPECT_FALSE(daemon::notify_service_manager("READY=1"));
  char buffer[32] = {};
  EXPECT_EQ(::recv(fd.get(), buffer, sizeof(buffer), MSG_DONTWAIT), 7);
  EXPECT_STREQ(buffer, "READY=1");
  ::unlink(path.c_str());
  ::rmdir(folder);
}

}  // namespace
}  // namespace kvm::testing
