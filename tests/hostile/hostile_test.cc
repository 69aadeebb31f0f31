// SPDX-License-Identifier: Apache-2.0
// A hostile client against a whole daemon: valid, bent and spoiled requests while bytes flip in all
// memory that it can write, with a victim beside it whose answers must not change by a bit.
//
// The daemon runs in this process, so the sanitizers see all that it does; inaccessible pages stand
// around every mapping (ipc/memory.cc). What is counted comes from the daemon's own statistics.
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/splitmix.h"
#include "engine/engine.h"
#include "engine/space/refusal.h"
#include "ipc/doorbell.h"
#include "ipc/shared_words.h"
#include "tests/common/another_user.h"
#include "tests/common/environment.h"
#include "tests/hostile/messages.h"
#include "tests/hostile/requests.h"
#include "tests/hostile/victim.h"
#include "tests/unit/daemon/raw_client.h"

namespace kvm::testing {
namespace {

namespace wire = ipc::wire;
using engine::Refusal;
using ipc::Reject;

constexpr uint64_t kEnough = 100;  // times that each reason must be reached

std::unique_ptr<engine::Engine> open_engine() {
  engine::EngineOptions options;
  options.n_threads = 2;
  options.host_capacity_bytes = 512ull << 20;
  options.default_quota_bytes = 4ull << 20;
  options.max_sequences_per_client = 16;
  options.max_spaces = 2 * kSpaces + 3;
  options.worker_spin_ns = 0;
  return engine::Engine::open(options).value();
}

// --- The spaces of the test ----------------------------------------------------------------------

// With a sequence in each, whose ids the offender will try.
SpaceIds register_spaces(RawClient* client, std::vector<kvm_seq_id>* seqs) {
  SpaceIds ids{};
  for (uint32_t space = 0; space < kSpaces; ++space) {
    const Result<RawReply> reply = client->call([&](ipc::ControlWriter* writer, uint64_t id) {
      return writer->finish(id, ipc::encode_space(writer, space_message(space)));
    });
    EXPECT_TRUE(reply.is_ok()) << reply.status().message();
    ids[space] = reply.value().root->body_as_SpaceId()->space();
    // Nobody can drop it while it has a sequence.
    auto queue = client->create_queue();
    auto arena = client->create_arena(kArenaBytes);
    EXPECT_TRUE(queue.is_ok() && arena.is_ok());
    RequestMaker maker(1, ids, {});
    maker.begin_session(arena.value().region);
    const Draft draft = maker.seq(0, SeqVerb::kCreate, space);
    draft.write(arena.value().memory.data(), kSlotBytes);
    client->submit(&queue.value(), draft.entry);
    EXPECT_EQ(client->wait(&queue.value()).value().status, KVM_OK);
    kvm_seq_id seq = 0;
    std::memcpy(&seq, arena.value().memory.data() + kResultsAt, sizeof(seq));
    seqs->push_back(seq);
  }
  return ids;
}

// --- What the daemon has counted -----------------------------------------------------------------

class Counts {
 public:
  explicit Counts(const std::string& text) : text_(text) {}
  uint64_t of(const std::string& series) const {
    const std::string line = "\n" + series + " ";
    const size_t at = text_.find(line);
    EXPECT_NE(at, std::string::npos) << series;
    return at == std::string::npos ? 0 : std::stoull(text_.substr(at + line.size()));
  }
  uint64_t rejects(Reject reject) const {
    return of(std::string("kvm_rejected_requests_total{reason=\"") + ipc::reject_name(reject) +
              "\"}");
  }
  uint64_t all_rejects() const {
    uint64_t sum = 0;
    for (size_t i = 1; i < ipc::kRejects; ++i) {
      sum += rejects(static_cast<Reject>(i));
    }
    return sum;
  }
  uint64_t refusals(Refusal refusal) const {
    return of(std::string("kvm_refused_requests_total{reason=\"") +
              engine::kRefusalNames[static_cast<size_t>(refusal)] + "\"}");
  }
  uint64_t requests() const {
    return of("kvm_requests_total{result=\"ok\"}") + of("kvm_requests_total{result=\"error\"}") +
           all_rejects();
  }

 private:
  std::string text_;
};

// --- Flipping bytes ------------------------------------------------------------------------------

// Writable memory of the present session. The flipper holds the lock while it writes.
struct Target {
  std::mutex mutex;
  uint8_t* arena = nullptr;
  uint64_t arena_bytes = 0;
  ipc::ClientRegion* region = nullptr;
};

void flip_bits(uint8_t* bytes, uint64_t size, uint64_t random) {
  volatile uint8_t* byte = bytes + random % size;
  *byte = static_cast<uint8_t>(*byte ^ (1u << (random >> 61)));
}

// Mostly tensors and results; parameter blocks, ring entries and control words at a rate that lets
// sessions live for some hundred requests. So is the large block: one bit among its ranges puts
// them out of order, and hides every other reason to refuse it.
void flip_one(Target* target, uint64_t random) {
  const uint64_t where = (random >> 32) % 100'000;
  if (where < 1) {
    flip_bits(reinterpret_cast<uint8_t*>(target->region), sizeof(ipc::ControlWord) * 4, random);
  } else if (where < 8) {
    flip_bits(reinterpret_cast<uint8_t*>(target->region->entries), sizeof(target->region->entries),
              random);
  } else if (where < 50) {
    flip_bits(target->arena, kResultsAt, random);
  } else if (where < 55) {
    flip_bits(target->arena + kResultsAt, target->arena_bytes - kResultsAt, random);
  } else {
    flip_bits(target->arena + kResultsAt, kArenaBytes - kResultsAt, random);
  }
}

void flip_until(const std::atomic<bool>* stop, Target* target, uint64_t seed,
                std::atomic<uint64_t>* n_flipped) {
  uint64_t random = seed;
  while (!stop->load()) {
    {
      const std::lock_guard lock(target->mutex);
      for (uint32_t i = 0; i < 256 && target->region != nullptr; ++i) {
        random += kSplitMixStep;
        flip_one(target, splitmix64(random));
        n_flipped->fetch_add(1, std::memory_order_relaxed);
      }
    }
    ::usleep(100);
  }
}

// --- The offender --------------------------------------------------------------------------------

// As another user than the daemon's, where the test may.
void connect_as_another(const std::string& path, std::optional<RawClient>* client) {
  std::optional<AnotherUser> another;
  if (AnotherUser::is_possible()) {
    another.emplace();
  }
  client->emplace(path);
}

// One connection after the other: each ends with a breach of the protocol.
class Offender {
 public:
  Offender(std::string path, uint64_t seed, const SpaceIds& spaces, Prey prey, Target* target)
      : path_(std::move(path)),
        maker_(seed, spaces, prey.seqs),
        prey_(std::move(prey)),
        target_(target) {}
  ~Offender() { end_session(); }

  // A session that, unless a flipped byte ends it before, ends with what `last` says.
  void run_session(const Spoiler<Reject>& last, uint32_t n_requests);
  uint64_t n_sessions() const { return n_sessions_; }
  uint64_t n_timeouts() const { return n_timeouts_; }
  uint64_t n_admin() const { return n_admin_; }
  const std::map<int32_t, uint64_t>& statuses() const { return statuses_; }
  uint64_t n_of(kvm_status status) const {
    const auto found = statuses_.find(status);
    return found == statuses_.end() ? 0 : found->second;
  }

 private:
  bool begin_session();
  void end_session();
  void send_control();
  bool push(const std::function<Draft(uint32_t slot)>& make);
  bool wait_for_room();
  void publish();
  void take_completions();
  Draft next(uint32_t slot);

  std::string path_;
  RequestMaker maker_;
  Prey prey_;
  Target* target_;
  std::optional<RawClient> client_;
  RawQueue queue_;
  RawArena arena_;
  uint32_t tail_ = 0;
  uint32_t published_ = 0;
  uint32_t head_ = 0;
  std::array<uint32_t, ipc::kRequestEntries> created_in_{};  // by slot: the space of a kCreate
  uint64_t n_sessions_ = 0;
  uint64_t n_timeouts_ = 0;
  uint64_t n_admin_ = 0;
  size_t next_refusal_ = 0;
  std::map<int32_t, uint64_t> statuses_;
};

bool Offender::begin_session() {
  ++n_sessions_;
  connect_as_another(path_, &client_);
  if (!client_->hello().is_ok()) {
    return false;
  }
  Result<RawQueue> queue = client_->create_queue();
  Result<RawArena> arena =
      client_->create_arena(n_sessions_ % 8 == 0 ? kLargeArenaBytes : kArenaBytes);
  if (!queue.is_ok() || !arena.is_ok()) {
    return false;
  }
  queue_ = std::move(queue).value();
  arena_ = std::move(arena).value();
  tail_ = published_ = head_ = 0;
  maker_.begin_session(arena_.region);
  const std::lock_guard lock(target_->mutex);
  target_->arena = arena_.memory.data();
  target_->arena_bytes = arena_.memory.size_bytes();
  target_->region = queue_.client();
  return true;
}

void Offender::end_session() {
  const std::lock_guard lock(target_->mutex);
  target_->region = nullptr;
  queue_ = {};
  arena_ = {};
  client_.reset();
}

// Control messages of no good intent; their replies are not waited for. Those of an administrator
// come from whom they are refused to.
void Offender::send_control() {
  for (uint64_t n = 1 + maker_.below(3); n != 0; --n) {
    ipc::ControlWriter writer;
    const bool is_admin = AnotherUser::is_possible() && maker_.one_in(2);
    const std::span<const uint8_t> bytes =
        is_admin ? admin_message(&maker_, prey_, &writer, 1) : any_message(&maker_, &writer, 1);
    n_admin_ += is_admin ? 1 : 0;
    std::vector<uint8_t> copy(bytes.begin(), bytes.end());
    if (maker_.one_in(8)) {
      copy[maker_.below(copy.size())] ^= static_cast<uint8_t>(1u << maker_.below(8));
    }
    (void)client_->send(copy);
  }
}

void Offender::publish() {
  if (published_ != tail_) {
    published_ = tail_;
    // SYNC: sequentially consistent: entries before the index, and the flag after it.
    ipc::store_seq_cst(&queue_.client()->sq_tail, tail_);
    if (ipc::load_seq_cst(queue_.daemon()->sq_need_wakeup) != 0) {
      ipc::ring_doorbell(client_->doorbell());
    }
  }
}

void Offender::take_completions() {
  const uint32_t tail = ipc::load_acquire(queue_.daemon()->cq_tail);
  while (head_ != tail) {
    const ipc::CompletionEntry done = queue_.daemon()->entries[head_ % ipc::kCompletionEntries];
    ++head_;
    ++statuses_[done.status];
    const uint32_t slot = done.user_data % ipc::kRequestEntries;
    if (done.status == KVM_OK && created_in_[slot] < kSpaces) {
      // Flipped bits may have made it anything.
      kvm_seq_id seq = 0;
      std::memcpy(&seq, arena_.memory.data() + kResultsAt + slot * sizeof(ipc::ResultBlock),
                  sizeof(seq));
      maker_.add_seq(created_in_[slot], seq);
    }
  }
  ipc::store_seq_cst(&queue_.client()->cq_head, head_);
}

// False when the daemon has closed the connection.
bool Offender::wait_for_room() {
  const uint64_t deadline = now_ns() + 60'000'000'000;
  for (uint32_t i = 0;; ++i) {
    take_completions();
    if (tail_ - ipc::load_acquire(queue_.daemon()->sq_head) < ipc::kRequestEntries) {
      return true;
    }
    publish();
    if (i % 16 == 15) {
      // The index or the flag may have been flipped: once more.
      ipc::store_seq_cst(&queue_.client()->sq_tail, tail_);
      ipc::ring_doorbell(client_->doorbell());
      if (ipc::is_hung_up(client_->socket())) {
        return false;
      }
      if (now_ns() > deadline) {
        ++n_timeouts_;
        return false;
      }
    }
    ::usleep(20);
  }
}

bool Offender::push(const std::function<Draft(uint32_t slot)>& make) {
  if (!wait_for_room()) {
    return false;
  }
  const uint32_t slot = tail_ % ipc::kRequestEntries;
  const Draft draft = make(slot);
  const uint64_t at = draft.entry.block_offset;
  if (draft.entry.opcode != static_cast<uint8_t>(ipc::Opcode::kNop)) {
    const uint64_t room = at == kLargeBlockAt ? kLargeArenaBytes - kLargeBlockAt : kSlotBytes;
    if (at % ipc::kBlockAlign == 0 && at < arena_.memory.size_bytes() &&
        room <= arena_.memory.size_bytes() - at) {
      draft.write(arena_.memory.data() + at, room);
    }
  }
  created_in_[slot] = draft.entry.opcode == static_cast<uint8_t>(ipc::Opcode::kSeq) &&
                              draft.seq.verb == static_cast<uint32_t>(SeqVerb::kCreate)
                          ? maker_.index_of(draft.seq.space)
                          : kSpaces;
  queue_.client()->entries[slot] = draft.entry;
  ++tail_;
  if (tail_ - published_ >= 16 + maker_.below(64)) {
    publish();
  }
  return true;
}

Draft Offender::next(uint32_t slot) {
  if (maker_.one_in(8)) {
    const auto& all = refusal_spoilers();
    const Spoiler<Refusal>& spoiler = all[next_refusal_++ % all.size()];
    if (spoiler.reason != Refusal::kRangesOfItems) {
      return spoiler.make(&maker_, slot);
    }
    if (arena_.memory.size_bytes() == kLargeArenaBytes) {
      return spoiler.make(&maker_, slot);
    }
  }
  Draft draft = maker_.any(slot);
  if (maker_.one_in(4)) {
    maker_.bend(&draft);
  }
  if (maker_.one_in(1000)) {
    maker_.mutate(&draft);
  }
  return draft;
}

void Offender::run_session(const Spoiler<Reject>& last, uint32_t n_requests) {
  bool alive = begin_session();
  for (uint32_t space = 0; alive && space < kSpaces; ++space) {
    alive = push([&](uint32_t slot) { return maker_.seq(slot, SeqVerb::kCreate, space); });
  }
  publish();
  if (alive && maker_.one_in(4)) {
    send_control();
  }
  for (uint32_t i = 0; alive && i < n_requests; ++i) {
    alive = push([this](uint32_t slot) { return next(slot); });
  }
  alive = alive && push([&](uint32_t slot) { return last.make(&maker_, slot); });
  if (alive) {
    publish();
    // Until it is noticed. A flipped index may hide the last entries: they are shown again.
    const uint64_t deadline = now_ns() + 60'000'000'000;
    while (!ipc::is_hung_up(client_->socket())) {
      take_completions();
      ipc::store_seq_cst(&queue_.client()->sq_tail, tail_);
      ipc::ring_doorbell(client_->doorbell());
      ::usleep(20);
      if (now_ns() > deadline) {
        ++n_timeouts_;
        break;
      }
    }
  }
  end_session();
}

// --- What administrators may do ------------------------------------------------------------------

template <typename Entry>
std::vector<Entry> entries_of(RawClient* administrator, const RawClient::Encode& encode) {
  const Result<std::vector<uint8_t>> bytes = administrator->get_bytes(encode);
  EXPECT_TRUE(bytes.is_ok()) << bytes.status().message();
  std::vector<Entry> entries(bytes.value().size() / sizeof(Entry));
  std::memcpy(entries.data(), bytes.value().data(), entries.size() * sizeof(Entry));
  return entries;
}

std::vector<kvm_client_entry> clients_of(RawClient* administrator) {
  return entries_of<kvm_client_entry>(administrator, [](ipc::ControlWriter* writer, uint64_t id) {
    return writer->finish(id, wire::CreateClientList(writer->fbb(), 0));
  });
}

// The sequences and all clients of now.
Prey prey_of(RawClient* administrator, const std::vector<kvm_seq_id>& seqs) {
  Prey prey{.seqs = seqs, .clients = {}};
  for (const kvm_client_entry& client : clients_of(administrator)) {
    prey.clients.push_back(client.client_id);
  }
  return prey;
}

// The sequences live.
void expect_there(RawClient* owner, const std::vector<kvm_seq_id>& seqs) {
  for (const kvm_seq_id seq : seqs) {
    const auto info =
        entries_of<kvm_seq_info>(owner, [seq](ipc::ControlWriter* writer, uint64_t id) {
          return writer->finish(id, wire::CreateSeqInfo(writer->fbb(), seq));
        });
    EXPECT_EQ(info.size(), 1u);
  }
}

// Sequences of clients. Flipped bytes may have published one: it is its user's then, and stays.
uint64_t n_of_clients(RawClient* administrator) {
  const auto all =
      entries_of<kvm_seq_info>(administrator, [](ipc::ControlWriter* writer, uint64_t id) {
        return writer->finish(id, wire::CreateSeqList(writer->fbb(), 0, KVM_LIST_ALL_CLIENTS, 0));
      });
  return static_cast<uint64_t>(std::count_if(all.begin(), all.end(), [](const kvm_seq_info& seq) {
    return (seq.flags & KVM_SEQ_PUBLISHED) == 0;
  }));
}

// And nobody's limits have become those of admin_message().
void expect_unharmed(RawClient* administrator, const std::vector<kvm_seq_id>& seqs) {
  expect_there(administrator, seqs);
  for (const kvm_client_entry& client : clients_of(administrator)) {
    EXPECT_GT(client.limits.bytes, 4096u) << client.name;
    EXPECT_GT(client.limits.sequences, 1u) << client.name;
  }
  const auto users =
      entries_of<kvm_user_entry>(administrator, [](ipc::ControlWriter* writer, uint64_t id) {
        return writer->finish(id, wire::CreateUserList(writer->fbb(), 0));
      });
  for (const kvm_user_entry& user : users) {
    EXPECT_EQ(user.limits.bytes, KVM_NO_LIMIT) << user.uid;
  }
}

TEST(Hostile, WhatIsForAdministratorsIsRefusedToOthers) {
  if (!AnotherUser::is_possible()) {
    GTEST_SKIP() << "needs root, to connect as somebody else";
  }
  spdlog::set_level(spdlog::level::off);
  const auto server = run_server({}, open_engine());
  const std::string path = socket_path_of(*server);
  AnotherUser::admit_to(path);
  RawClient monitor(path);
  ASSERT_TRUE(monitor.hello().is_ok());
  std::vector<kvm_seq_id> seqs;
  RequestMaker maker(1, register_spaces(&monitor, &seqs), {});
  const Prey prey = prey_of(&monitor, seqs);
  std::optional<RawClient> other;
  connect_as_another(path, &other);
  ASSERT_TRUE(other->hello().is_ok());
  for (uint32_t i = 0; i < 5000; ++i) {
    const Result<RawReply> reply = other->call([&](ipc::ControlWriter* writer, uint64_t id) {
      return admin_message(&maker, prey, writer, id);
    });
    ASSERT_EQ(reply.status().code(), KVM_ERR_PERMISSION) << reply.status().message();
  }
  expect_unharmed(&monitor, seqs);
}

// --- The tests -----------------------------------------------------------------------------------

// The reason of which the daemon has seen the fewest.
const Spoiler<Reject>& rarest_reject(const Counts& counts, uint64_t* n) {
  const auto& all = reject_spoilers();
  const Spoiler<Reject>* rarest = &all[0];
  *n = UINT64_MAX;
  for (const Spoiler<Reject>& spoiler : all) {
    if (counts.rejects(spoiler.reason) < *n) {
      *n = counts.rejects(spoiler.reason);
      rarest = &spoiler;
    }
  }
  return *rarest;
}

bool all_refused_enough(const Counts& counts) {
  return std::all_of(
      refusal_spoilers().begin(), refusal_spoilers().end(),
      [&](const Spoiler<Refusal>& spoiler) { return counts.refusals(spoiler.reason) >= kEnough; });
}

constexpr kvm_status kStatusesToSee[] = {KVM_ERR_INVALID,     KVM_ERR_NOT_FOUND, KVM_ERR_STALE,
                                         KVM_ERR_PERMISSION,  KVM_ERR_QUOTA,     KVM_ERR_HOLE,
                                         KVM_ERR_UNSUPPORTED, KVM_ERR_DEADLINE,  KVM_OK};

bool all_seen_enough(const Offender& offender) {
  return std::all_of(std::begin(kStatusesToSee), std::end(kStatusesToSee),
                     [&](kvm_status status) { return offender.n_of(status) >= kEnough; });
}

constexpr uint64_t kVictimSeeds = 4;

TEST(Hostile, ClientHarmsNobodyButItself) {
  spdlog::set_level(spdlog::level::off);
  const uint64_t n_wanted = number_from_environment("KVM_HOSTILE_REQUESTS", 100'000);
  const uint64_t seed = number_from_environment("KVM_HOSTILE_SEED", now_ns());
  std::printf("seed %llu (KVM_HOSTILE_SEED), %llu requests\n",
              static_cast<unsigned long long>(seed), static_cast<unsigned long long>(n_wanted));
  ServerOverrides overrides;
  overrides.arena_capacity_bytes = 256ull << 20;
  overrides.arena_quota_bytes = 64ull << 20;
  overrides.max_queues = 8;
  overrides.max_arenas = 8;
  const auto server = run_server(overrides, open_engine());
  const std::string path = socket_path_of(*server);
  if (AnotherUser::is_possible()) {
    AnotherUser::admit_to(path);
  } else {
    std::printf("not root: no messages of administrators, to whom the offender belongs\n");
  }
  RawClient monitor(path);
  ASSERT_TRUE(monitor.hello().is_ok());
  std::vector<kvm_seq_id> others;
  register_spaces(&monitor, &others);
  // Spaces are a user's: the offender has its own, which stay as long as somebody else is in them.
  std::optional<RawClient> host;
  connect_as_another(path, &host);
  ASSERT_TRUE(host->hello().is_ok());
  std::vector<kvm_seq_id> hosted;
  const SpaceIds spaces = register_spaces(&*host, &hosted);

  Victim victim(path);
  std::array<uint64_t, kVictimSeeds> alone{};
  for (uint64_t i = 0; i < kVictimSeeds; ++i) {
    alone[i] = victim.live_once(i);
    ASSERT_EQ(victim.live_once(i), alone[i]) << "not even alone: " << victim.failure();
  }
  const kvm_stats before = monitor.stats().value();

  std::atomic<bool> stop{false};
  std::atomic<uint64_t> n_flipped{0};
  std::atomic<uint64_t> n_lives{0};
  std::atomic<uint64_t> n_different{0};
  Target target;
  std::thread flipper([&] { flip_until(&stop, &target, seed, &n_flipped); });
  std::thread beside([&] {
    while (!stop.load()) {
      const uint64_t i = n_lives.fetch_add(1) % kVictimSeeds;
      n_different += victim.live_once(i) == alone[i] ? 0 : 1;
      ::usleep(20'000);
    }
  });
  Offender offender(path, seed, spaces, prey_of(&monitor, others), &target);
  const auto& all = reject_spoilers();
  for (uint64_t n = 0;; ++n) {
    if (n % 64 != 0) {
      // A flipped byte ends most sessions before their last request: each second one has no other.
      offender.run_session(all[n / 2 % all.size()], n % 2 == 0 ? 0 : 300);
      continue;
    }
    const Counts counts(monitor.stats_text().value());
    uint64_t n_rarest = 0;
    const Spoiler<Reject>& rarest = rarest_reject(counts, &n_rarest);
    if (counts.requests() >= n_wanted && n_rarest >= kEnough && all_refused_enough(counts) &&
        all_seen_enough(offender)) {
      break;
    }
    offender.run_session(rarest, 0);
    ASSERT_EQ(offender.n_timeouts(), 0u) << "the daemon does not close a violator";
  }
  stop = true;
  flipper.join();
  beside.join();

  EXPECT_EQ(n_different.load(), 0u) << "of " << n_lives.load();
  EXPECT_EQ(victim.failure(), "");
  EXPECT_GT(n_lives.load(), 0u);
  const Counts counts(monitor.stats_text().value());
  for (const Spoiler<Reject>& spoiler : all) {
    EXPECT_GE(counts.rejects(spoiler.reason), kEnough) << ipc::reject_name(spoiler.reason);
  }
  for (const kvm_status status : kStatusesToSee) {
    EXPECT_GE(offender.n_of(status), kEnough) << kvm_status_name(status);
  }
  EXPECT_EQ(all.size() + 1, ipc::kRejects) << "a reason without a spoiler";
  // Nothing of the closed sessions remains.
  const uint64_t deadline = now_ns() + 30'000'000'000;
  const auto n_clients = [&] { return monitor.stats().value().n_clients; };
  while ((n_of_clients(&monitor) != before.n_sequences || n_clients() != before.n_clients) &&
         now_ns() < deadline) {
    ::usleep(1000);
  }
  EXPECT_EQ(n_of_clients(&monitor), before.n_sequences);
  EXPECT_EQ(n_clients(), before.n_clients);
  expect_unharmed(&monitor, others);
  expect_there(&*host, hosted);
  EXPECT_EQ(offender.n_admin() >= kEnough, AnotherUser::is_possible()) << offender.n_admin();
  std::printf("%llu requests in %llu sessions, %llu bytes flipped, %llu lives of the victim\n",
              static_cast<unsigned long long>(counts.requests()),
              static_cast<unsigned long long>(offender.n_sessions()),
              static_cast<unsigned long long>(n_flipped.load()),
              static_cast<unsigned long long>(n_lives.load()));
  for (const Spoiler<Refusal>& spoiler : refusal_spoilers()) {
    if (counts.refusals(spoiler.reason) < 2 * kEnough) {
      std::printf("  seldom refused: %-24s %llu\n",
                  engine::kRefusalNames[static_cast<size_t>(spoiler.reason)],
                  static_cast<unsigned long long>(counts.refusals(spoiler.reason)));
    }
  }
  for (const auto& [status, n] : offender.statuses()) {
    std::printf("  %-24s %llu\n", kvm_status_name(status), static_cast<unsigned long long>(n));
  }
}

}  // namespace
}  // namespace kvm::testing
