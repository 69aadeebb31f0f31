// SPDX-License-Identifier: Apache-2.0
// What policies do after a commit is done in slices beside other requests: requests behind a commit
// see all of it, bits do not depend on threads, and nobody waits for the whole of somebody else's.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/engine/policy_testbed.h"
#include "tests/unit/engine/store_testbed.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kLayers = 2;
constexpr uint32_t kHeads = 4;  // 0: all tokens; 1: a window; 2: folds; 3: chooses
constexpr uint32_t kDim = 32;

SpaceSpec make_mixed() {
  SpaceSpec spec = make_spec("slice", kLayers, kHeads, kHeads, kDim);
  const auto add = [&](uint32_t head, uint32_t retention, uint64_t n_heavy) {
    kvm_policy_params params{};
    params.kv_head_mask[0] = uint64_t{1} << head;
    params.retention = retention;
    params.n_sinks = 4;
    params.n_recent = 100;
    params.slack = 64;
    params.n_heavy = n_heavy;
    spec.policies.push_back(params);
  };
  add(1, KVM_RETAIN_SINKS_RECENT, 0);
  add(2, KVM_RETAIN_SINKS_RECENT_FOLD, 0);
  add(3, KVM_RETAIN_HEAVY, 200);
  return spec;
}

// One request of a script, and what came back.
struct Op {
  enum class Kind { kStep, kTruncate, kCommit, kFork } kind = Kind::kStep;
  uint32_t seq = 0;  // index
  uint32_t layer = 0;
  uint32_t n_append = 0;
  uint32_t n_query = 0;
  uint64_t n_tokens = 0;
  uint64_t seed = 0;
};

struct Pending {
  Buffer k, v, q, o, lse;
  int code = -1;
};

std::vector<Op> make_script(uint64_t seed, uint32_t n_ops) {
  std::mt19937_64 random(seed);
  const auto pick = [&](uint32_t low, uint32_t high) {
    return low + static_cast<uint32_t>(random() % (high - low + 1));
  };
  std::vector<Op> script;
  uint32_t n_seqs = 4;
  while (script.size() < n_ops) {
    Op op;
    op.seq = pick(0, n_seqs - 1);
    const uint32_t dice = pick(0, 19);
    if (dice == 0 && n_seqs < 10) {
      op.kind = Op::Kind::kFork;
      ++n_seqs;
      script.push_back(op);
    } else if (dice <= 2) {
      op.kind = Op::Kind::kTruncate;
      op.n_tokens = pick(1, 60);  // back from the end
      script.push_back(op);
    } else if (dice <= 4) {
      op.kind = Op::Kind::kCommit;
      script.push_back(op);
    } else {
      op.n_append = dice == 5 ? pick(1500, 3000) : pick(1, 90);
      op.n_query = std::min(op.n_append, dice == 5 ? pick(1, 200) : pick(0, 20));
      for (op.layer = 0; op.layer < kLayers; ++op.layer) {
        op.seed = random();
        script.push_back(op);
      }
    }
  }
  return script;
}

class Player {
 public:
  explicit Player(uint32_t n_threads) : rig_(n_threads) {
    space_ = rig_.space(make_mixed());
    for (uint32_t i = 0; i < 4; ++i) {
      clients_.push_back(i < 2 ? rig_.client : rig_.engine->add_client({}));
      SeqRequest request;
      request.space = space_;
      request.flags = i % 2 == 0 ? 0 : KVM_SEQ_MANUAL_COMMIT;
      seqs_.push_back(rig_.run(request, clients_[i]).seq);
      lengths_.push_back(0);
    }
  }

  // n_flight: requests that are not waited for.
  void play(const std::vector<Op>& script, uint32_t n_flight) {
    for (const Op& op : script) {
      submit(op);
      while (n_open_ >= n_flight || (op.kind == Op::Kind::kFork && n_open_ != 0)) {
        drive();
      }
    }
    while (n_open_ != 0) {
      drive();
    }
  }

  std::vector<std::unique_ptr<Pending>> results;
  std::vector<kvm_seq_info> infos() {
    std::vector<kvm_seq_info> all;
    for (size_t i = 0; i < seqs_.size(); ++i) {
      all.push_back(rig_.engine->seq_info(clients_[i], seqs_[i]).value());
    }
    return all;
  }

 private:
  void drive() {
    if (rig_.engine->poll() == 0 && !rig_.engine->work()) {
      rig_.engine->wait(1'000'000);
    }
  }

  void submit(const Op& op) {
    results.push_back(std::make_unique<Pending>());
    Pending* pending = results.back().get();
    ++n_open_;
    const auto on_done = [this, pending](RequestResult&& result) {
      pending->code = result.status.code();
      --n_open_;
    };
    const RequestTag tag = {1, results.size()};
    const ClientId client = clients_[op.seq];
    if (op.kind == Op::Kind::kStep) {
      rig_.engine->submit(client, tag, step(op, pending), on_done);
      return;
    }
    SeqRequest request;
    request.seq = seqs_[op.seq];
    request.n_tokens = KVM_POSITION_END;
    if (op.kind == Op::Kind::kTruncate) {
      uint64_t& length = lengths_[op.seq];
      length -= std::min(length, op.n_tokens);
      request.verb = SeqVerb::kTruncate;
      request.n_tokens = length;
      rig_.engine->submit(client, tag, std::move(request), [this, on_done, op](RequestResult&& r) {
        EXPECT_TRUE(r.status.is_ok() || r.status.code() == KVM_ERR_PARTIAL);
        on_done(std::move(r));
      });
      return;
    }
    if (op.kind == Op::Kind::kCommit) {
      request.verb = SeqVerb::kCommit;
      rig_.engine->submit(client, tag, std::move(request), on_done);
      return;
    }
    request.verb = SeqVerb::kFork;
    rig_.engine->submit(client, tag, std::move(request), [this, on_done, op](RequestResult&& r) {
      clients_.push_back(clients_[op.seq]);
      seqs_.push_back(r.seq);
      lengths_.push_back(lengths_[op.seq]);
      on_done(std::move(r));
    });
  }

  StepRequest step(const Op& op, Pending* pending) {
    std::mt19937_64 random(op.seed);
    pending->k = Buffer(Dtype::kBf16, 1, op.n_append, kHeads, kDim);
    pending->v = Buffer(Dtype::kBf16, 1, op.n_append, kHeads, kDim);
    pending->q = Buffer(Dtype::kBf16, 1, op.n_query, kHeads, kDim);
    pending->o = Buffer(Dtype::kF32, 1, op.n_query, kHeads, kDim);
    pending->lse = Buffer(Dtype::kF32, 1, op.n_query, kHeads, 1);
    fill(&pending->k, 1, op.n_append, kHeads, random, 2.0f);
    fill(&pending->v, 1, op.n_append, kHeads, random);
    fill(&pending->q, 1, op.n_query, kHeads, random, 2.0f);
    StepRequest request;
    request.space = space_;
    request.layer_begin = op.layer;
    request.append = true;
    request.attend = op.n_query != 0;
    kvm_item item = append_item(seqs_[op.seq], op.n_append);
    item.n_query = op.n_query;
    request.items = {item};
    request.k = pending->k.view();
    request.v = pending->v.view();
    if (request.attend) {
      request.q = pending->q.view();
      request.o = pending->o.view();
      request.lse = pending->lse.view();
    }
    lengths_[op.seq] += op.layer == 0 ? op.n_append : 0;
    return request;
  }

  Rig rig_;
  kvm_space_id space_ = 0;
  std::vector<ClientId> clients_;
  std::vector<kvm_seq_id> seqs_;
  std::vector<uint64_t> lengths_;  // as far as truncates succeed; else they only differ in their n
  uint32_t n_open_ = 0;
};

// One thread that waits for each request, and several with many requests in flight.
TEST(RetentionSlice, BitsDoNotDependOnThreadsOrWaiting) {
  const uint64_t n_seeds = is_nightly() ? 40 : kInstrumented ? 2 : 6;
  for (uint64_t seed = 1; seed <= n_seeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const std::vector<Op> script = make_script(seed, kInstrumented ? 120 : 300);
    Player patient(1);
    patient.play(script, 1);
    Player hasty(3);
    hasty.play(script, 24);
    uint64_t n_chosen = 0;
    ASSERT_EQ(patient.results.size(), hasty.results.size());
    for (size_t i = 0; i < script.size(); ++i) {
      const Pending& a = *patient.results[i];
      const Pending& b = *hasty.results[i];
      ASSERT_EQ(a.code, b.code) << "request " << i;
      ASSERT_EQ(a.o.bytes(), b.o.bytes()) << "request " << i;
      ASSERT_EQ(a.lse.bytes(), b.lse.bytes()) << "request " << i;
    }
    const std::vector<kvm_seq_info> a = patient.infos();
    const std::vector<kvm_seq_info> b = hasty.infos();
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].n_committed, b[i].n_committed);
      EXPECT_EQ(a[i].n_entries_dropped, b[i].n_entries_dropped);
      EXPECT_EQ(a[i].n_pages, b[i].n_pages);
      EXPECT_EQ(a[i].bytes, b[i].bytes);
      EXPECT_EQ(a[i].bytes_observed, b[i].bytes_observed);
      n_chosen += a[i].n_entries_dropped;
    }
    EXPECT_GT(n_chosen, 1000u);
  }
}

SeqRequest commit_of(kvm_seq_id seq) {
  SeqRequest request;
  request.verb = SeqVerb::kCommit;
  request.seq = seq;
  request.n_tokens = KVM_POSITION_END;
  return request;
}

// With the last token.
StepRequest attend_of(kvm_space_id space, kvm_seq_id seq, Buffer* q, Buffer* o) {
  StepRequest request;
  request.space = space;
  request.attend = true;
  request.items = {query_item(seq, 1)};
  request.q = q->view();
  request.o = o->view();
  return request;
}

// A client that commits much by hand, and another with a small request: on one thread, which does
// all of it in turns.
TEST(RetentionSlice, NobodyWaitsForAWholeCommit) {
  constexpr uint32_t kManyHeads = 64;
  constexpr uint32_t kManyLayers = 4;
  constexpr uint32_t kTokens = 600;
  for (const uint32_t retention : {KVM_RETAIN_SINKS_RECENT_FOLD, KVM_RETAIN_HEAVY}) {
    Rig rig(1, 512 << 20);
    SpaceSpec spec = make_spec("many", kManyLayers, kManyHeads, kManyHeads, kDim);
    spec.policies = {{.retention = retention,
                      .n_sinks = 4,
                      .n_recent = 64,
                      .n_heavy = retention == KVM_RETAIN_HEAVY ? uint64_t{32} : 0}};
    const kvm_space_id space = rig.space(spec);
    const ClientId other = rig.engine->add_client({});
    std::mt19937_64 random(1);
    Buffer kv(Dtype::kBf16, 1, kTokens, kManyHeads, kDim);
    fill(&kv, 1, kTokens, kManyHeads, random);
    const auto append = [&](ClientId client, kvm_seq_id seq, uint32_t layer, uint32_t n) {
      StepRequest request;
      request.space = space;
      request.layer_begin = layer;
      request.append = true;
      request.items = {append_item(seq, n)};
      request.k = kv.view();
      request.v = kv.view();
      ASSERT_TRUE(rig.run(std::move(request), client).status.is_ok());
    };
    const kvm_seq_id big = rig.create(space, KVM_SEQ_MANUAL_COMMIT);
    SeqRequest create;
    create.space = space;
    const kvm_seq_id small = rig.run(create, other).seq;
    for (uint32_t layer = 0; layer < kManyLayers; ++layer) {
      append(rig.client, big, layer, kTokens);
    }
    append(other, small, 0, 4);
    const uint64_t before = rig.engine->seq_info(rig.client, big).value().n_pages;

    bool is_committed = false;
    bool is_attended = false;
    rig.engine->submit(rig.client, {1, 1000}, commit_of(big),
                       [&](RequestResult&&) { is_committed = true; });
    EXPECT_FALSE(is_committed);
    Buffer o(Dtype::kF32, 1, 1, kManyHeads, kDim);
    rig.engine->submit(other, {1, 1001}, attend_of(space, small, &kv, &o),
                       [&](RequestResult&& result) {
                         EXPECT_TRUE(result.status.is_ok());
                         is_attended = true;
                       });
    for (int i = 0; i < 100000 && !is_attended; ++i) {
      rig.engine->poll();
      rig.engine->work();
    }
    EXPECT_FALSE(is_committed) << "the small request waited for all of the commit";
    rig.drive(is_committed);
    const kvm_seq_info info = rig.engine->seq_info(rig.client, big).value();
    EXPECT_LT(info.n_pages, before / 2);
    EXPECT_GT(info.n_entries_dropped, 0u);
  }
}

// Tasks of a commit are charged to whoever commits: on one thread, small requests of another client
// are done between them, however many of them are ready.
TEST(RetentionSlice, SmallRequestsGoBeforeTasksOfACommit) {
  constexpr uint32_t kManyHeads = 8;
  constexpr uint32_t kTokens = 8192;
  for (const uint32_t retention : {KVM_RETAIN_SINKS_RECENT_FOLD, KVM_RETAIN_HEAVY}) {
    Rig rig(1, 512 << 20);
    SpaceSpec spec = make_spec("charged", 1, kManyHeads, kManyHeads, kDim);
    spec.policies = {{.retention = retention,
                      .n_sinks = 4,
                      .n_recent = 64,
                      .n_heavy = retention == KVM_RETAIN_HEAVY ? uint64_t{2048} : 0}};
    const kvm_space_id space = rig.space(spec);
    const kvm_space_id plain = rig.space(make_spec("plain", 1, kManyHeads, kManyHeads, kDim));
    const ClientId other = rig.engine->add_client({});
    std::mt19937_64 random(1);
    Buffer kv(Dtype::kBf16, 1, kTokens, kManyHeads, kDim);
    fill(&kv, 1, kTokens, kManyHeads, random);
    Buffer o(Dtype::kF32, 1, 1, kManyHeads, kDim);
    const auto created = [&](ClientId client, kvm_space_id in, uint32_t n_tokens, uint32_t flags) {
      SeqRequest create;
      create.space = in;
      create.flags = flags;
      const kvm_seq_id seq = rig.run(create, client).seq;
      StepRequest append;
      append.space = in;
      append.append = true;
      append.items = {append_item(seq, n_tokens)};
      append.k = kv.view();
      append.v = kv.view();
      EXPECT_TRUE(rig.run(std::move(append), client).status.is_ok());
      return seq;
    };
    const kvm_seq_id big = created(rig.client, space, kTokens, KVM_SEQ_MANUAL_COMMIT);
    const kvm_seq_id small = created(other, plain, 2048, 0);
    // Turns of the driver until it is answered; each runs a task at most.
    const auto turns_of_attend = [&] {
      bool is_attended = false;
      rig.engine->submit(other, {1, 1}, attend_of(plain, small, &kv, &o),
                         [&](RequestResult&&) { is_attended = true; });
      uint32_t n_turns = 0;
      for (rig.engine->poll(); !is_attended; rig.engine->poll(), ++n_turns) {
        rig.engine->work();
      }
      return n_turns;
    };
    const uint32_t n_alone = turns_of_attend();
    ASSERT_GT(n_alone, 0u) << "too small to be a job";
    bool is_committed = false;
    rig.engine->submit(rig.client, {1, 2}, commit_of(big),
                       [&](RequestResult&&) { is_committed = true; });
    uint32_t n_beside = 0;
    uint32_t most = 0;
    for (; !is_committed && n_beside < 100'000; ++n_beside) {
      most = std::max(most, turns_of_attend());
    }
    EXPECT_TRUE(is_committed) << "it had none of the turns";
    // Where they are charged nothing, 3 are done beside it, and one of them takes 148 turns.
    EXPECT_GE(n_beside, 10u);
    EXPECT_LE(most, 4 * n_alone) << "of " << n_beside << " beside it";
  }
}

// A client that goes while its commit is being worked on leaves nothing behind.
TEST(RetentionSlice, ClientsMayGoMeanwhile) {
  for (uint32_t n_turns = 0; n_turns < 12; ++n_turns) {
    Rig rig(2, 256 << 20);
    const kvm_space_id space = rig.space(make_mixed());
    const ClientId client = rig.engine->add_client({});
    SeqRequest create;
    create.space = space;
    create.flags = KVM_SEQ_MANUAL_COMMIT;
    const kvm_seq_id seq = rig.run(create, client).seq;
    std::mt19937_64 random(n_turns);
    Buffer kv(Dtype::kBf16, 1, 4000, kHeads, kDim);
    fill(&kv, 1, 4000, kHeads, random);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      StepRequest request;
      request.space = space;
      request.layer_begin = layer;
      request.append = true;
      request.items = {append_item(seq, 4000)};
      request.k = kv.view();
      request.v = kv.view();
      ASSERT_TRUE(rig.run(std::move(request), client).status.is_ok());
    }
    rig.engine->submit(client, {1, 1000}, commit_of(seq), [](RequestResult&&) {});
    for (uint32_t i = 0; i < n_turns; ++i) {
      rig.engine->work();
      rig.engine->poll();
    }
    bool is_gone = false;
    rig.engine->remove_client(client, [&] { is_gone = true; });
    rig.drive(is_gone);
    const kvm_stats stats = rig.engine->stats();
    EXPECT_EQ(stats.n_pages, 0u);
    EXPECT_EQ(stats.host_page_bytes, 0u);
    EXPECT_EQ(stats.observed_bytes, 0u);
  }
}

// Where there is no room for what a policy would leave, pages stay, and go with a later commit.
TEST(RetentionSlice, NoRoomLeavesPagesToALaterCommit) {
  for (const uint32_t retention : {KVM_RETAIN_SINKS_RECENT_FOLD, KVM_RETAIN_HEAVY}) {
    auto store = Store::open({.host_capacity_bytes = 64 << 20}).value();
    SpaceSpec spec = engine::make_spec("tight", 1, 1);
    spec.policies = {{.retention = retention,
                      .n_recent = 10,
                      .n_heavy = retention == KVM_RETAIN_HEAVY ? uint64_t{16} : 0}};
    const kvm_space_id space = store->register_space(spec).value();
    const uint64_t page_bytes = 2 * uint64_t{kPageTokens} * 8 * 2;
    const ClientId client = store->add_client(limited(5 * page_bytes));
    Sequence* seq = store->find_seq(client, store->create_seq(client, space, 0).value()).value();
    ASSERT_TRUE(engine::append(*store, seq, 0, numbered(0, 5 * kPageTokens)).is_ok());
    EXPECT_EQ(store->seq_info(seq).n_entries_dropped, 0u);
    store->check_accounts();
    // A token less makes a page free, and the next commit finds room.
    ASSERT_TRUE(store->truncate_seq(seq, 4 * kPageTokens).is_ok());
    ASSERT_TRUE(store->commit_seq(seq, 4 * kPageTokens).is_ok());
    settle(*store, seq);
    ASSERT_TRUE(engine::append(*store, seq, 0, numbered(4 * kPageTokens, 1)).is_ok());
    store->check_accounts();
    store->free_seq(seq);
    EXPECT_EQ(store->client_bytes(client), 0u);
  }
}

}  // namespace
}  // namespace kvm::engine::testing
