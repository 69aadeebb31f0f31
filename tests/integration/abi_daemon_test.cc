// SPDX-License-Identifier: Apache-2.0
// What only a daemon can do: serve several clients, die, be left.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client/thin_connection.h"
#include "ipc/control.h"
#include "ipc/shared_words.h"
#include "ipc/socket.h"
#include "ipc/wire.h"
#include "tests/common/another_user.h"
#include "tests/common/temporary_directory.h"
#include "tests/integration/abi_rig.h"

namespace kvm::testing {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

kvm_stats stats_of(kvm_client* client) {
  kvm_stats stats{};
  stats.struct_size = sizeof(stats);
  EXPECT_EQ(kvm_get_stats(client, &stats), KVM_OK) << kvm_last_error();
  return stats;
}

kvm_seq_id make_seq(kvm_client* client, kvm_space_id space) {
  kvm_seq_id seq = 0;
  EXPECT_EQ(kvm_seq_create(client, space, nullptr, &seq), KVM_OK) << kvm_last_error();
  return seq;
}

TEST(Daemon, NobodyListens) {
  kvm_connect_params params{};
  params.struct_size = sizeof(params);
  params.socket_path = "/nonexistent/kvmd.sock";
  kvm_client* client = nullptr;
  EXPECT_EQ(kvm_connect(&params, &client), KVM_ERR_DISCONNECTED);
  EXPECT_NE(std::strstr(kvm_last_error(), "/nonexistent/kvmd.sock"), nullptr);
  const std::string long_path(200, 'x');
  params.socket_path = long_path.c_str();
  EXPECT_EQ(kvm_connect(&params, &client), KVM_ERR_INVALID);
}

TEST(Daemon, TwoClientsShareSpacesButNotSequences) {
  const class Daemon daemon;
  kvm_client* a = connect_to_daemon(daemon, "a");
  kvm_client* b = connect_to_daemon(daemon, "b");
  const kvm_space_id space = register_space(a, "shared", {});
  EXPECT_EQ(register_space(b, "shared", {}), space);
  const kvm_seq_id seq = make_seq(a, space);
  EXPECT_EQ(kvm_seq_truncate(b, seq, 0), KVM_ERR_PERMISSION);
  size_t count = 9;
  EXPECT_EQ(kvm_seq_list(b, 0, 0, nullptr, 0, &count), KVM_OK);
  EXPECT_EQ(count, 0u);
  EXPECT_EQ(kvm_seq_list(b, 0, KVM_LIST_ALL_CLIENTS, nullptr, 0, &count), KVM_OK)
      << kvm_last_error();
  EXPECT_EQ(count, 1u);
  EXPECT_EQ(stats_of(b).n_clients, 2u);
  kvm_client_close(a);
  for (int i = 0; i < 200 && stats_of(b).n_sequences != 0; ++i) {
    ::usleep(10'000);
  }
  EXPECT_EQ(stats_of(b).n_sequences, 0u) << "sequences go with their client";
  kvm_client_close(b);
}

std::vector<std::string> spaces_of(kvm_client* client) {
  std::vector<kvm_space_info> infos(8);
  infos[0].struct_size = sizeof(infos[0]);
  size_t count = 0;
  EXPECT_EQ(kvm_space_list(client, infos.data(), infos.size(), &count), KVM_OK) << kvm_last_error();
  std::vector<std::string> spaces;
  for (size_t i = 0; i < count; ++i) {
    spaces.push_back(infos[i].name + std::string(" of ") + std::to_string(infos[i].uid));
  }
  return spaces;
}

// An append of n_tokens to the first layer behind the end of item->seq; K and V are `rows`.
kvm_step_params append_of(kvm_space_id space, kvm_item* item, uint32_t n_tokens,
                          const std::vector<float>& rows) {
  item->append_position = KVM_POSITION_END;
  item->n_append = n_tokens;
  kvm_step_params step{};
  step.struct_size = sizeof(step);
  step.space = space;
  step.n_layers = 1;
  step.items = item;
  step.n_items = 1;
  step.k = step.v = tensor_of(rows);
  return step;
}

// Two users who call their models alike do not meet.
TEST(Daemon, NamesOfSpacesAreThoseOfAUser) {
  if (!AnotherUser::is_possible()) {
    GTEST_SKIP() << "needs root, to connect as somebody else";
  }
  const class Daemon daemon;
  kvm_client* root = connect_to_daemon(daemon, "root");  // and so an administrator
  AnotherUser::admit_to(daemon.socket_path());
  kvm_client* other = nullptr;
  kvm_client* second = nullptr;
  {
    const AnotherUser another;
    other = connect_to_daemon(daemon, "other");
    second = connect_to_daemon(daemon, "second");
  }
  const Geometry wide{.dim = 128};
  const kvm_space_id of_root = register_space(root, "model", {});
  const kvm_space_id of_other = register_space(other, "model", wide);
  EXPECT_NE(of_root, of_other);
  EXPECT_EQ(register_space(second, "model", wide), of_other);
  kvm_space_id found = 0;
  EXPECT_EQ(kvm_space_find(root, "model", &found), KVM_OK);
  EXPECT_EQ(found, of_root);
  EXPECT_EQ(kvm_space_find(second, "model", &found), KVM_OK);
  EXPECT_EQ(found, of_other);
  const kvm_space_id secret = register_space(root, "secret", {});
  EXPECT_EQ(kvm_space_find(other, "secret", &found), KVM_ERR_NOT_FOUND);
  EXPECT_EQ(spaces_of(other), std::vector<std::string>({"model of 65534"}));
  EXPECT_EQ(spaces_of(root),
            std::vector<std::string>({"model of 0", "model of 65534", "secret of 0"}));
  kvm_space_info info{};
  info.struct_size = sizeof(info);
  EXPECT_EQ(kvm_space_get_info(other, secret, &info), KVM_ERR_PERMISSION);
  EXPECT_NE(std::strstr(kvm_last_error(), "user 0"), nullptr) << kvm_last_error();
  EXPECT_EQ(kvm_space_drop(other, secret), KVM_ERR_PERMISSION);
  kvm_seq_id seq = 0;
  EXPECT_EQ(kvm_seq_create(other, secret, nullptr, &seq), KVM_ERR_PERMISSION);
  // A request that names it learns nothing of it, its heads and layers neither.
  kvm_queue* queue = nullptr;
  ASSERT_EQ(kvm_queue_create(other, nullptr, &queue), KVM_OK) << kvm_last_error();
  const std::vector<float> row(1);
  kvm_item item{};
  item.seq = make_seq(other, of_other);
  const kvm_step_params step = append_of(secret, &item, 1, row);
  EXPECT_EQ(kvm_append(queue, &step), KVM_ERR_PERMISSION);
  EXPECT_EQ(std::strstr(kvm_last_error(), "secret"), nullptr) << kvm_last_error();
  EXPECT_EQ(kvm_seq_free(other, item.seq), KVM_OK) << kvm_last_error();
  kvm_queue_destroy(queue);
  // Nor does an administrator put sequences among those of others.
  EXPECT_EQ(kvm_seq_create(root, of_other, nullptr, &seq), KVM_ERR_PERMISSION);
  EXPECT_EQ(kvm_space_get_info(root, of_other, &info), KVM_OK) << kvm_last_error();
  EXPECT_EQ(info.uid, 65534u);
  EXPECT_EQ(kvm_space_drop(root, of_other), KVM_OK) << kvm_last_error();
  EXPECT_EQ(kvm_space_find(other, "model", &found), KVM_ERR_NOT_FOUND);
  for (kvm_client* client : {second, other, root}) {
    kvm_client_close(client);
  }
}

TEST(Daemon, APublishedPromptOutlivesItsClient) {
  const class Daemon daemon;
  const Geometry geometry{.n_layers = 1};
  kvm_client* a = connect_to_daemon(daemon, "a");
  kvm_client* b = connect_to_daemon(daemon, "b");
  const kvm_space_id space = register_space(a, "prompts", geometry);
  const kvm_seq_id prompt = make_seq(a, space);
  std::mt19937 random(7);
  const std::vector<float> rows =
      random_floats(&random, size_t{200} * geometry.n_kv_heads * geometry.dim);
  kvm_queue* queue = nullptr;
  ASSERT_EQ(kvm_queue_create(a, nullptr, &queue), KVM_OK) << kvm_last_error();
  kvm_item item{};
  item.seq = prompt;
  const kvm_step_params step = append_of(space, &item, 200, rows);
  ASSERT_EQ(kvm_append(queue, &step), KVM_OK) << kvm_last_error();
  kvm_seq_id chat = 0;
  EXPECT_EQ(kvm_seq_fork(b, prompt, KVM_POSITION_END, &chat), KVM_ERR_PERMISSION);
  ASSERT_EQ(kvm_seq_publish(a, prompt), KVM_OK) << kvm_last_error();
  EXPECT_EQ(kvm_append(queue, &step), KVM_ERR_PERMISSION);
  EXPECT_NE(std::strstr(kvm_last_error(), "published"), nullptr) << kvm_last_error();
  EXPECT_EQ(kvm_seq_publish(a, prompt), KVM_ERR_PERMISSION) << "it is the library's";
  kvm_queue_destroy(queue);
  kvm_client_close(a);
  for (int i = 0; i < 200 && stats_of(b).n_clients != 1; ++i) {
    ::usleep(10'000);
  }
  EXPECT_EQ(stats_of(b).n_sequences, 1u);

  ASSERT_EQ(kvm_seq_fork(b, prompt, KVM_POSITION_END, &chat), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_queue_create(b, nullptr, &queue), KVM_OK) << kvm_last_error();
  std::vector<float> got(rows.size());
  kvm_read_params read{};
  read.struct_size = sizeof(read);
  read.seq = chat;
  read.n_tokens = 200;
  read.k = tensor_of(got);
  ASSERT_EQ(kvm_read(queue, &read), KVM_OK) << kvm_last_error();
  EXPECT_EQ(got, rows);
  kvm_seq_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kvm_seq_get_info(b, chat, &info), KVM_OK) << kvm_last_error();
  EXPECT_EQ(info.bytes_shared, info.bytes);
  EXPECT_EQ(info.bytes_paid, 0u) << "the library pays";
  item.seq = chat;
  ASSERT_EQ(kvm_append(queue, &step), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_get_info(b, chat, &info), KVM_OK) << kvm_last_error();
  EXPECT_EQ(info.bytes_paid, info.bytes - info.bytes_shared);
  EXPECT_GT(info.bytes_shared, 0u);
  EXPECT_EQ(info.bytes_away, 0u);
  ASSERT_EQ(kvm_seq_get_info(b, prompt, &info), KVM_OK) << kvm_last_error();
  EXPECT_EQ(info.bytes_paid, info.bytes);
  EXPECT_NE(info.flags & KVM_SEQ_PUBLISHED, 0u);
  EXPECT_EQ(info.n_tokens_max, 200u);
  size_t count = 0;
  EXPECT_EQ(kvm_seq_list(b, 0, 0, nullptr, 0, &count), KVM_OK);
  EXPECT_EQ(count, 2u);

  ASSERT_EQ(kvm_seq_take(b, prompt), KVM_OK) << kvm_last_error();
  EXPECT_EQ(kvm_seq_truncate(b, prompt, 10), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_seq_publish(b, chat), KVM_OK) << kvm_last_error();
  kvm_evict_params evict{};
  evict.struct_size = sizeof(evict);
  evict.what = KVM_EVICT_SEQ;
  evict.id = chat;
  kvm_evict_result result{};
  result.struct_size = sizeof(result);
  EXPECT_EQ(kvm_evict(b, &evict, &result), KVM_OK) << kvm_last_error();
  EXPECT_EQ(kvm_seq_free(b, prompt), KVM_OK) << kvm_last_error();
  for (int i = 0; i < 200 && stats_of(b).n_sequences != 0; ++i) {
    ::usleep(10'000);
  }
  EXPECT_EQ(stats_of(b).n_pages, 0u);
  kvm_queue_destroy(queue);
  kvm_client_close(b);
}

// The value of a series of the statistics.
uint64_t series(kvm_client* client, const std::string& name) {
  std::string text(1 << 16, '\0');
  size_t n_bytes = 0;
  EXPECT_EQ(kvm_get_stats_text(client, text.data(), text.size(), &n_bytes), KVM_OK);
  EXPECT_LT(n_bytes, text.size());
  const size_t at = text.find("\n" + name + " ");
  EXPECT_NE(at, std::string::npos) << name;
  return at == std::string::npos ? 0 : std::strtoull(&text[at + name.size() + 2], nullptr, 10);
}

// Three times the memory, of which the disk takes what is not used; each answer is that over all
// tokens.
TEST(Daemon, SequencesOutgrowMemoryOntoADisk) {
  const TemporaryDirectory folder;
  const class Daemon daemon({"--host-capacity", "24MiB", "--disk-directories", folder.path(),
                             "--disk-capacity", "256MiB"});
  kvm_client* client = connect_to_daemon(daemon, "big");
  const Geometry geometry{.n_layers = 8};
  constexpr uint32_t kSequences = 9;
  constexpr uint32_t kTokens = 4096;
  constexpr uint32_t kChunk = 512;
  const kvm_space_id space = register_space(client, "big", geometry);
  kvm_queue* queue = nullptr;
  ASSERT_EQ(kvm_queue_create(client, nullptr, &queue), KVM_OK) << kvm_last_error();
  std::mt19937 random(3);
  std::vector<kvm_seq_id> seqs;
  std::vector<NaiveLayer> last_layers;  // of these alone, for time
  const size_t row = size_t{geometry.n_kv_heads} * geometry.dim;
  for (uint32_t i = 0; i < kSequences; ++i) {
    seqs.push_back(make_seq(client, space));
    last_layers.emplace_back(geometry);
    for (uint32_t at = 0; at < kTokens; at += kChunk) {
      for (uint32_t layer = 0; layer < geometry.n_layers; ++layer) {
        const std::vector<float> k = random_floats(&random, kChunk * row);
        kvm_item item{};
        item.seq = seqs.back();
        kvm_step_params step = append_of(space, &item, kChunk, k);
        step.layer_begin = layer;
        ASSERT_EQ(kvm_append(queue, &step), KVM_OK) << kvm_last_error();
        if (layer + 1 == geometry.n_layers) {
          last_layers.back().append(k, k);
        }
      }
    }
  }
  kvm_stats stats = stats_of(client);
  EXPECT_GT(stats.n_pages_away, 0u);
  EXPECT_LE(stats.host_peak_bytes, uint64_t{24} << 20);
  for (uint32_t i = 0; i < kSequences; ++i) {
    const std::vector<float> q = random_floats(&random, size_t{geometry.n_q_heads} * geometry.dim);
    std::vector<float> o(q.size());
    kvm_item item{};
    item.seq = seqs[i];
    item.n_query = 1;
    item.query_position = KVM_POSITION_END;
    kvm_step_params step{};
    step.struct_size = sizeof(step);
    step.space = space;
    step.layer_begin = geometry.n_layers - 1;
    step.n_layers = 1;
    step.items = &item;
    step.n_items = 1;
    step.q = tensor_of(q);
    step.o = tensor_of(o);
    ASSERT_EQ(kvm_attend(queue, &step, nullptr), KVM_OK) << kvm_last_error();
    std::vector<double> expected, lse;
    last_layers[i].attend(
        q.data(), [](uint64_t) { return true; }, &expected, &lse);
    EXPECT_LT(difference(o.data(), expected), 1e-5) << "sequence " << i;
  }
  EXPECT_GT(series(client, "kvm_disk_read_bytes_total"), 0u);
  EXPECT_GT(series(client, "kvm_disk_live_bytes"), 0u);
  EXPECT_GT(series(client, "kvm_sent_pages_total"), 0u);
  for (const kvm_seq_id seq : seqs) {
    EXPECT_EQ(kvm_seq_free(client, seq), KVM_OK) << kvm_last_error();
  }
  for (int i = 0; i < 500 && series(client, "kvm_disk_live_bytes") != 0; ++i) {
    ::usleep(10'000);
  }
  EXPECT_EQ(series(client, "kvm_disk_live_bytes"), 0u);
  EXPECT_EQ(stats_of(client).n_pages, 0u);
  kvm_queue_destroy(queue);
  kvm_client_close(client);
}

TEST(Daemon, KilledClientLeavesNothing) {
  const class Daemon daemon;
  kvm_client* watcher = connect_to_daemon(daemon, "watcher");
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    kvm_client* client = connect_to_daemon(daemon, "victim");
    const kvm_space_id space = register_space(client, "victim", {});
    for (int i = 0; i < 10; ++i) {
      make_seq(client, space);
    }
    kvm_queue* queue = nullptr;
    kvm_queue_create(client, nullptr, &queue);
    [[maybe_unused]] const ssize_t n = ::write(ready[1], "x", 1);
    for (;;) {
      kvm_nop_async(queue, 1);
      kvm_submit(queue);
      kvm_completion completion;
      kvm_wait(queue, &completion, 1, 1, UINT64_MAX);
    }
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_EQ(stats_of(watcher).n_sequences, 10u);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  for (int i = 0; i < 500 && stats_of(watcher).n_clients != 1; ++i) {
    ::usleep(10'000);
  }
  EXPECT_EQ(stats_of(watcher).n_clients, 1u);
  EXPECT_EQ(stats_of(watcher).n_sequences, 0u);
  EXPECT_EQ(kvm_client_ping(watcher, nullptr), KVM_OK);
  kvm_client_close(watcher);
  ::close(ready[0]);
  ::close(ready[1]);
}

// Of an event loop, which waits for its descriptor and then takes what is there, and of a client
// that looks again and again.
TEST(Daemon, KilledDaemonIsNoticedByWhoPolls) {
  for (const bool has_loop : {true, false}) {
    class Daemon daemon;
    kvm_client* client = connect_to_daemon(daemon, "poller");
    kvm_queue* queue = nullptr;
    ASSERT_EQ(kvm_queue_create(client, nullptr, &queue), KVM_OK) << kvm_last_error();
    const int fd = has_loop ? kvm_queue_fd(queue) : -1;
    ::kill(daemon.pid(), SIGSTOP);
    ASSERT_EQ(kvm_nop_async(queue, 1), KVM_OK);
    ASSERT_EQ(kvm_submit(queue), KVM_OK);
    kvm_completion completion{};
    EXPECT_EQ(kvm_poll(queue, &completion, 1), 0);
    daemon.kill_hard();
    pollfd readable{fd, POLLIN, 0};
    if (fd >= 0) {
      EXPECT_EQ(::poll(&readable, 1, 20'000), 1) << "an event loop sleeps on";
    }
    int32_t n = 0;
    for (int i = 0; i < 20'000 && n == 0; ++i) {
      n = kvm_poll(queue, &completion, 1);
      ::usleep(fd >= 0 ? 0 : 1000);
    }
    EXPECT_EQ(n, 1);
    EXPECT_EQ(completion.status, KVM_ERR_DISCONNECTED);
    EXPECT_EQ(kvm_poll(queue, &completion, 1), KVM_ERR_DISCONNECTED);
    kvm_queue_destroy(queue);
    kvm_client_close(client);
  }
}

// The daemon is stopped, so that the client certainly waits, and then killed.
TEST(Daemon, KilledDaemonReleasesAWaitingClient) {
  class Daemon daemon;
  kvm_client* client = connect_to_daemon(daemon, "waiter");
  kvm_queue* queue = nullptr;
  ASSERT_EQ(kvm_queue_create(client, nullptr, &queue), KVM_OK) << kvm_last_error();
  const kvm_space_id space = register_space(client, "waiter", {});
  const kvm_seq_id seq = make_seq(client, space);
  kvm_completion made;
  ASSERT_EQ(kvm_seq_create_async(queue, space, nullptr, 1), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_submit(queue), KVM_OK);
  ASSERT_EQ(kvm_wait(queue, &made, 1, 1, UINT64_MAX), 1);
  ::kill(daemon.pid(), SIGSTOP);
  ASSERT_EQ(kvm_nop_async(queue, 1), KVM_OK);
  ASSERT_EQ(kvm_nop_async(queue, 2), KVM_OK);
  ASSERT_EQ(kvm_submit(queue), KVM_OK);
  std::thread killer([&] {
    ::usleep(250'000);
    daemon.kill_hard();
  });
  kvm_completion completions[2];
  const int32_t n = kvm_wait(queue, completions, 2, 2, UINT64_MAX);
  killer.join();
  ASSERT_EQ(n, 2) << kvm_last_error();
  EXPECT_EQ(completions[0].status, KVM_ERR_DISCONNECTED);
  EXPECT_EQ(completions[1].status, KVM_ERR_DISCONNECTED);
  EXPECT_EQ(kvm_poll(queue, completions, 2), KVM_ERR_DISCONNECTED);
  kvm_stats stats{};
  stats.struct_size = sizeof(stats);
  EXPECT_EQ(kvm_get_stats(client, &stats), KVM_ERR_DISCONNECTED);

  // Back to a new daemon: queues first, then the old ids are lost.
  EXPECT_EQ(kvm_client_reconnect(client), KVM_ERR_BUSY);
  kvm_queue_destroy(queue);
  EXPECT_EQ(kvm_client_reconnect(client), KVM_ERR_DISCONNECTED) << "nobody listens";
  daemon.start();
  kvm_status status = KVM_ERR_DISCONNECTED;
  for (int i = 0; i < 500 && status == KVM_ERR_DISCONNECTED; ++i) {
    status = kvm_client_reconnect(client);
    ::usleep(10'000);
  }
  ASSERT_EQ(status, KVM_OK) << kvm_last_error();
  EXPECT_EQ(kvm_seq_truncate(client, seq, 0), KVM_ERR_LOST);
  EXPECT_EQ(kvm_seq_truncate(client, made.seq, 0), KVM_ERR_LOST) << "made on a queue";
  ASSERT_EQ(kvm_queue_create(client, nullptr, &queue), KVM_OK) << kvm_last_error();
  const kvm_space_id again = register_space(client, "waiter", {});
  const kvm_seq_id fresh = make_seq(client, again);
  EXPECT_NE(fresh, seq) << "ids are never used again";
  ASSERT_EQ(kvm_seq_truncate_async(queue, seq, 0, 1), KVM_OK);
  ASSERT_EQ(kvm_submit(queue), KVM_OK);
  ASSERT_EQ(kvm_wait(queue, completions, 2, 1, UINT64_MAX), 1);
  EXPECT_EQ(completions[0].status, KVM_ERR_LOST);
  kvm_queue_destroy(queue);
  kvm_client_close(client);
}

kvm_client* connect_impatiently(const class Daemon& daemon, uint64_t timeout_ns = 200'000'000) {
  kvm_connect_params params{};
  params.struct_size = sizeof(params);
  params.socket_path = daemon.socket_path().c_str();
  params.timeout_ns = timeout_ns;
  kvm_client_close(connect_to_daemon(daemon, "waits until it is there"));
  kvm_client* client = nullptr;
  EXPECT_EQ(kvm_connect(&params, &client), KVM_OK) << kvm_last_error();
  return client;
}

uint64_t arena_bytes_of(kvm_client* client) {
  std::string text(65536, ' ');
  size_t length = 0;
  EXPECT_EQ(kvm_get_stats_text(client, text.data(), text.size(), &length), KVM_OK);
  return std::stoull(text.substr(text.find("\nkvm_arena_bytes ") + 17));
}

// Whoever interrupts every wait learns of the daemon's end all the same.
TEST(Daemon, KilledDaemonEndsWaitsThatAreAlwaysInterrupted) {
  class Daemon daemon;
  kvm_client* client = connect_to_daemon(daemon, "impatient");
  kvm_queue_params params{};
  params.struct_size = sizeof(params);
  params.is_interrupted = [](void*) { return 1; };
  kvm_queue* queue = nullptr;
  ASSERT_EQ(kvm_queue_create(client, &params, &queue), KVM_OK) << kvm_last_error();
  ::kill(daemon.pid(), SIGSTOP);
  ASSERT_EQ(kvm_nop_async(queue, 1), KVM_OK);
  ASSERT_EQ(kvm_submit(queue), KVM_OK);
  kvm_completion done{};
  EXPECT_EQ(kvm_wait(queue, &done, 1, 1, UINT64_MAX), KVM_ERR_INTERRUPTED);
  daemon.kill_hard();
  int32_t n = KVM_ERR_INTERRUPTED;
  for (int i = 0; i < 1000 && n == KVM_ERR_INTERRUPTED; ++i) {
    n = kvm_wait(queue, &done, 1, 1, UINT64_MAX);
  }
  ASSERT_EQ(n, 1) << kvm_last_error();
  EXPECT_EQ(done.status, KVM_ERR_DISCONNECTED);
  kvm_queue_destroy(queue);
  kvm_client_close(client);
}

// A daemon that is stopped keeps its socket and its memory: nothing says that it is gone.
TEST(Daemon, StoppedDaemonHangsNoControlCall) {
  const class Daemon daemon;
  kvm_client* client = connect_impatiently(daemon);
  const kvm_space_id space = register_space(client, "stopped", {});
  const kvm_seq_id seq = make_seq(client, space);
  const uint64_t bytes_before = arena_bytes_of(client);
  ::kill(daemon.pid(), SIGSTOP);
  kvm_seq_id made = 77;
  EXPECT_EQ(kvm_client_ping(client, nullptr), KVM_ERR_TIMEOUT);
  EXPECT_NE(std::strstr(kvm_last_error(), "200 ms"), nullptr) << kvm_last_error();
  EXPECT_EQ(kvm_seq_create(client, space, nullptr, &made), KVM_ERR_TIMEOUT);
  EXPECT_EQ(kvm_seq_fork(client, seq, 0, &made), KVM_ERR_TIMEOUT);
  EXPECT_EQ(made, 77u) << "untouched on failure";
  kvm_seq_info info{};
  info.struct_size = sizeof(info);
  EXPECT_EQ(kvm_seq_get_info(client, seq, &info), KVM_ERR_TIMEOUT);
  kvm_arena_params arena_params{};
  arena_params.struct_size = sizeof(arena_params);
  arena_params.size = 1 << 20;
  kvm_arena* arena = nullptr;
  EXPECT_EQ(kvm_arena_create(client, &arena_params, &arena), KVM_ERR_TIMEOUT);
  kvm_queue* queue = nullptr;
  EXPECT_EQ(kvm_queue_create(client, nullptr, &queue), KVM_ERR_TIMEOUT);
  kvm_client* late = nullptr;
  kvm_connect_params params{};
  params.struct_size = sizeof(params);
  params.socket_path = daemon.socket_path().c_str();
  params.timeout_ns = 100'000'000;
  EXPECT_EQ(kvm_connect(&params, &late), KVM_ERR_TIMEOUT);

  // It goes on as if nothing had been: what the calls made late belongs to nobody, and goes.
  ::kill(daemon.pid(), SIGCONT);
  kvm_status status = KVM_ERR_TIMEOUT;
  for (int i = 0; i < 100 && status == KVM_ERR_TIMEOUT; ++i) {
    status = kvm_client_ping(client, nullptr);
  }
  EXPECT_EQ(status, KVM_OK) << kvm_last_error();
  for (int i = 0;
       i < 500 && (stats_of(client).n_sequences != 1 || arena_bytes_of(client) != bytes_before);
       ++i) {
    ::usleep(10'000);
    EXPECT_EQ(kvm_client_ping(client, nullptr), KVM_OK) << kvm_last_error();
  }
  EXPECT_EQ(stats_of(client).n_sequences, 1u);
  EXPECT_EQ(arena_bytes_of(client), bytes_before);
  EXPECT_EQ(kvm_seq_free(client, seq), KVM_OK) << kvm_last_error();
  EXPECT_EQ(stats_of(client).n_sequences, 0u);
  kvm_client_close(client);
}

TEST(Daemon, ManyCallsOnAStoppedDaemon) {
  const class Daemon daemon;
  kvm_connect_params params{};
  params.struct_size = sizeof(params);
  params.socket_path = daemon.socket_path().c_str();
  params.timeout_ns = 2'000'000;
  kvm_client* first = connect_to_daemon(daemon, "waits until it is there");
  kvm_client* client = nullptr;
  kvm_status status = KVM_ERR_TIMEOUT;
  for (int i = 0; i < 500 && status == KVM_ERR_TIMEOUT; ++i) {
    status = kvm_connect(&params, &client);
  }
  ASSERT_EQ(status, KVM_OK) << kvm_last_error();
  const kvm_space_id space = register_space(first, "stopped", {});
  while ((status = kvm_client_ping(client, nullptr)) == KVM_ERR_TIMEOUT) {
  }
  ASSERT_EQ(status, KVM_OK) << kvm_last_error();
  ::kill(daemon.pid(), SIGSTOP);
  // More than the own queue, and than the socket, takes.
  kvm_seq_id made = 0;
  kvm_space_id found = 0;
  for (int i = 0; i < 400; ++i) {
    ASSERT_EQ(kvm_seq_create(client, space, nullptr, &made), KVM_ERR_TIMEOUT) << i;
    ASSERT_EQ(kvm_space_find(client, "stopped", &found), KVM_ERR_TIMEOUT) << i;
  }
  ::kill(daemon.pid(), SIGCONT);
  for (int i = 0;
       i < 500 && (kvm_client_ping(client, nullptr) != KVM_OK || stats_of(first).n_sequences != 0);
       ++i) {
    ::usleep(10'000);
  }
  EXPECT_EQ(stats_of(first).n_sequences, 0u);
  // A busy machine may take longer than the 2 ms over one answer.
  status = KVM_ERR_TIMEOUT;
  for (int i = 0; i < 500 && status == KVM_ERR_TIMEOUT; ++i) {
    status = kvm_space_find(client, "stopped", &found);
  }
  EXPECT_EQ(status, KVM_OK) << kvm_last_error();
  EXPECT_EQ(found, space);
  kvm_client_close(client);
  kvm_client_close(first);
}

// However much there is to give back, a stopped daemon is waited for once.
TEST(Daemon, DestroyingAQueueOfAStoppedDaemonTakesOneTimeout) {
  constexpr double kTimeoutMs = 1000;
  const class Daemon daemon;
  kvm_client* client = connect_impatiently(daemon, 1'000'000'000);
  const Geometry geometry;
  const kvm_space_id space = register_space(client, "stopped", geometry);
  const kvm_seq_id seq = make_seq(client, space);
  const uint64_t bytes_before = arena_bytes_of(client);
  // An idle queue, and one with a request in flight; both have arenas that copy HOST buffers.
  for (const bool is_idle : {true, false}) {
    kvm_queue* queue = nullptr;
    ASSERT_EQ(kvm_queue_create(client, nullptr, &queue), KVM_OK) << kvm_last_error();
    const std::vector<float> rows(size_t{geometry.n_kv_heads} * geometry.dim, 1.0f);
    kvm_item item{};
    item.seq = seq;
    item.append_position = KVM_POSITION_END;
    item.n_append = 1;
    kvm_step_params params{};
    params.struct_size = sizeof(params);
    params.space = space;
    params.n_items = 1;
    params.items = &item;
    params.k = tensor_of(rows);
    params.v = tensor_of(rows);
    ASSERT_EQ(kvm_append(queue, &params), KVM_OK) << kvm_last_error();
    ::kill(daemon.pid(), SIGSTOP);
    if (!is_idle) {
      ASSERT_EQ(kvm_append_async(queue, &params, 1), KVM_OK) << kvm_last_error();
      ASSERT_EQ(kvm_submit(queue), KVM_OK);
    }
    const Clock::time_point start = Clock::now();
    kvm_queue_destroy(queue);
    const double took_ms = ms_since(start);
    EXPECT_GE(took_ms, 0.9 * kTimeoutMs);
    EXPECT_LE(took_ms, 1.7 * kTimeoutMs);
    ::kill(daemon.pid(), SIGCONT);
    if (is_idle) {
      // The connection stays; what was to be destroyed goes when the daemon wakes.
      for (int i = 0; i < 500 && kvm_client_ping(client, nullptr) != KVM_OK; ++i) {
      }
      // The queue of pings has come.
      const uint64_t most = bytes_before + (1 << 18);
      for (int i = 0; i < 500 && arena_bytes_of(client) > most; ++i) {
        ::usleep(10'000);
      }
      EXPECT_LE(arena_bytes_of(client), most);
    } else {
      EXPECT_EQ(kvm_client_ping(client, nullptr), KVM_ERR_DISCONNECTED);
    }
  }
  kvm_client_close(client);
}

// A daemon that has died, which nobody has noticed yet.
TEST(Daemon, CallsOnADeadDaemonAreDisconnectedWhateverIsOutstanding) {
  class Daemon daemon;
  kvm_client* client = connect_to_daemon(daemon, "outstanding");
  kvm_queue* queue = nullptr;
  ASSERT_EQ(kvm_queue_create(client, nullptr, &queue), KVM_OK) << kvm_last_error();
  ASSERT_EQ(kvm_nop_async(queue, 1), KVM_OK);
  daemon.kill_hard();
  kvm_observe_params observe{};
  observe.struct_size = sizeof(observe);
  EXPECT_EQ(kvm_observe(queue, &observe), KVM_ERR_DISCONNECTED) << kvm_last_error();
  EXPECT_EQ(kvm_cancel(queue, 9), KVM_ERR_DISCONNECTED) << kvm_last_error();
  kvm_completion completion{};
  EXPECT_EQ(kvm_submit(queue), KVM_ERR_DISCONNECTED);
  EXPECT_EQ(kvm_wait(queue, &completion, 1, 1, UINT64_MAX), 1);
  EXPECT_EQ(completion.status, KVM_ERR_DISCONNECTED);
  EXPECT_EQ(kvm_cancel(queue, 1), KVM_ERR_DISCONNECTED) << kvm_last_error();
  kvm_queue_destroy(queue);
  kvm_client_close(client);
}

TEST(Daemon, QueuesOfAStoppedDaemonCanBeDestroyed) {
  const class Daemon daemon;
  kvm_client* client = connect_impatiently(daemon);
  kvm_queue* queue = nullptr;
  ASSERT_EQ(kvm_queue_create(client, nullptr, &queue), KVM_OK) << kvm_last_error();
  kvm_arena* arena = nullptr;
  ASSERT_EQ(kvm_arena_create(client, nullptr, &arena), KVM_OK) << kvm_last_error();
  ::kill(daemon.pid(), SIGSTOP);
  ASSERT_EQ(kvm_nop_async(queue, 1), KVM_OK);
  ASSERT_EQ(kvm_submit(queue), KVM_OK);
  kvm_queue_destroy(queue);
  kvm_arena_destroy(arena);
  EXPECT_EQ(kvm_client_ping(client, nullptr), KVM_ERR_DISCONNECTED);
  kvm_client_close(client);
}

TEST(Daemon, CallerInsideStepReturnsSoonAfterTheDaemonDies) {
  class Daemon daemon;
  kvm_client* client = connect_to_daemon(daemon, "caller");
  std::thread killer([&] {
    ::usleep(300'000);
    daemon.kill_hard();
  });
  // Pings until it fails; each goes through the rings.
  kvm_status status = KVM_OK;
  Clock::time_point last = Clock::now();
  while (status == KVM_OK) {
    last = Clock::now();
    status = kvm_client_ping(client, nullptr);
  }
  const double waited_ms = ms_since(last);
  killer.join();
  EXPECT_EQ(status, KVM_ERR_DISCONNECTED);
  // A generous bound: it only has to tell "soon" from "never".
  EXPECT_LT(waited_ms, 5000);
  RecordProperty("waited_ms", static_cast<int>(waited_ms));
  kvm_client_close(client);
}

TEST(Daemon, QueueDescriptorPolls) {
  const class Daemon daemon;
  kvm_client* client = connect_to_daemon(daemon, "poller");
  kvm_client_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kvm_client_get_info(client, &info), KVM_OK);
  kvm_queue* queue = nullptr;
  ASSERT_EQ(kvm_queue_create(client, nullptr, &queue), KVM_OK) << kvm_last_error();
  const int fd = kvm_queue_fd(queue);
  if ((info.features & KVM_FEATURE_EVENTFD) == 0) {
    EXPECT_EQ(fd, -1);
  } else {
    for (int round = 0; round < 100; ++round) {
      pollfd entry{fd, POLLIN, 0};
      ASSERT_EQ(kvm_nop_async(queue, 1), KVM_OK);
      ASSERT_EQ(kvm_nop_async(queue, 2), KVM_OK);
      ASSERT_EQ(kvm_submit(queue), KVM_OK);
      kvm_completion completion;
      for (int taken = 0; taken < 2;) {
        ASSERT_EQ(::poll(&entry, 1, 10'000), 1) << "round " << round << ", taken " << taken;
        const int32_t n = kvm_poll(queue, &completion, 1);
        ASSERT_GE(n, 0) << kvm_last_error();
        taken += n;
      }
    }
  }
  kvm_queue_destroy(queue);
  kvm_client_close(client);
}

TEST(Daemon, BrokenClientsAreClosedAndOthersServed) {
  const class Daemon daemon;
  kvm_client* honest = connect_to_daemon(daemon, "honest");
  for (int kind = 0; kind < 3; ++kind) {
    auto socket = ipc::connect_to(daemon.socket_path(), 5'000'000'000);
    ASSERT_TRUE(socket.is_ok());
    std::vector<uint8_t> bytes(100, static_cast<uint8_t>(kind * 77));
    if (kind == 2) {
      ipc::ControlWriter writer;
      const auto body = ipc::wire::CreateStats(writer.fbb());
      const auto message = writer.finish(1, body);  // before Hello
      bytes.assign(message.begin(), message.end());
    }
    ASSERT_TRUE(ipc::send_message(socket.value(), bytes, {}).is_ok());
    bool closed = false;
    for (int i = 0; i < 500 && !closed; ++i) {
      ::usleep(10'000);
      closed = ipc::is_hung_up(socket.value());
    }
    EXPECT_TRUE(closed) << kind;
    EXPECT_EQ(kvm_client_ping(honest, nullptr), KVM_OK) << kvm_last_error();
  }
  EXPECT_GE(stats_of(honest).n_protocol_errors, 3u);
  kvm_client_close(honest);
}

// A client that speaks the protocol up to the rings, and then sends what libkvm never would.
TEST(Daemon, HostileRingEntriesCloseTheirClient) {
  const class Daemon daemon;
  kvm_client* honest = connect_to_daemon(daemon, "honest");
  for (int kind = 0; kind < 4; ++kind) {
    client::ConnectOptions options{daemon.socket_path(), "hostile", 5'000'000'000};
    auto connection = client::Connection::open(options);
    ASSERT_TRUE(connection.is_ok()) << connection.status().message();
    auto queue = connection.value()->create_queue(8);
    ASSERT_TRUE(queue.is_ok()) << queue.status().message();
    auto arena = connection.value()->create_arena(4096);
    ASSERT_TRUE(arena.is_ok()) << arena.status().message();
    auto* region = reinterpret_cast<ipc::ClientRegion*>(queue.value().client_region.data());
    ipc::RequestEntry& entry = region->entries[0];
    entry.opcode = static_cast<uint8_t>(ipc::Opcode::kSeq);
    entry.version = ipc::kBlockVersion;
    entry.region = entry.result_region = arena.value().region;
    entry.block_length = sizeof(ipc::SeqBlock);
    entry.result_offset = 1024;
    uint32_t tail = 1;
    if (kind == 0) {
      tail = 100'000;
    } else if (kind == 1) {
      entry.opcode = 99;
    } else if (kind == 2) {
      entry.block_offset = UINT64_MAX - 63;
    } else {
      entry.result_region = 777;
    }
    ipc::store_seq_cst(&region->sq_tail, tail);
    connection.value()->ring();
    bool closed = false;
    for (int i = 0; i < 500 && !closed; ++i) {
      ::usleep(10'000);
      closed = connection.value()->look_for_hangup();
    }
    EXPECT_TRUE(closed) << kind;
    EXPECT_EQ(kvm_client_ping(honest, nullptr), KVM_OK) << kvm_last_error();
  }
  EXPECT_EQ(stats_of(honest).n_protocol_errors, 4u);
  EXPECT_EQ(stats_of(honest).n_clients, 1u);
  kvm_client_close(honest);
}

}  // namespace
}  // namespace kvm::testing
