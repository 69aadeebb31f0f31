// SPDX-License-Identifier: Apache-2.0
// Indexes in the whole engine: who waits for them, and who gives way.
#include "engine/index/index_work.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/engine/rig.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kHeads = 2;
constexpr uint32_t kDim = 32;

SpaceSpec indexed_spec(uint32_t n_layers) {
  SpaceSpec spec = make_spec("indexed", n_layers, kHeads, kHeads, kDim);
  spec.indexes = {make_index()};
  return spec;
}

struct World : Rig {
  explicit World(uint32_t n_layers, uint32_t n_threads = 1, uint64_t capacity_bytes = 256 << 20)
      : Rig(n_threads, capacity_bytes), id(space(indexed_spec(n_layers))) {}

  RequestResult append(kvm_seq_id seq, uint32_t n, uint32_t n_layers, ClientId as = 0) {
    Buffer rows(Dtype::kBf16, n_layers, n, kHeads, kDim);
    std::mt19937_64 random(n);
    for (uint32_t t = 0; t < n; ++t) {
      for (uint32_t i = 0; i < kHeads * kDim * n_layers; ++i) {
        rows.set(i / (kHeads * kDim), t, i / kDim % kHeads, i % kDim,
                 static_cast<float>(random() % 256) / 128.0f - 1.0f);
      }
    }
    StepRequest step;
    step.append = true;
    step.space = id;
    step.n_layers = n_layers;
    step.items = {append_item(seq, n)};
    step.k = rows.view();
    step.v = rows.view();
    return run(std::move(step), as);
  }
  // One row for each of them, which is answered with samples.
  StepRequest attend_all(const std::vector<kvm_seq_id>& seqs) {
    StepRequest step = attend(seqs[0], KVM_MODE_SAMPLED, static_cast<uint32_t>(seqs.size()));
    step.items.clear();
    for (const kvm_seq_id seq : seqs) {
      step.items.push_back(query_item(seq, 1, static_cast<uint32_t>(step.items.size())));
    }
    return step;
  }
  StepRequest attend(kvm_seq_id seq, uint32_t mode, uint32_t n_query = 1) {
    q_ = Buffer(Dtype::kF32, 1, n_query, kHeads, kDim);
    std::mt19937_64 random(n_query);
    fill(&q_, 1, n_query, kHeads, random);
    o_ = Buffer(Dtype::kF32, 1, n_query, kHeads, kDim);
    StepRequest step;
    step.attend = true;
    step.space = id;
    step.items = {query_item(seq, n_query)};
    step.mode = mode;
    step.budget = mode == KVM_MODE_SAMPLED ? 200 : 0;
    step.q = q_.view();
    step.o = o_.view();
    return step;
  }
  // Submits without driving.
  template <typename What>
  void begin(What what, bool* done, RequestResult* result, ClientId as = 0) {
    engine->submit(as == 0 ? client : as, {1, ++n_submitted}, std::move(what),
                   [done, result](RequestResult&& r) {
                     *result = std::move(r);
                     *done = true;
                   });
  }
  uint64_t n_blocks() { return engine->stats().n_index_blocks; }

  kvm_space_id id;

 private:
  Buffer q_;
  Buffer o_;
};

TEST(IndexWork, NothingIsIndexedForARequestThatFails) {
  World world(1);
  const kvm_seq_id seq = world.create(world.id);
  ASSERT_TRUE(world.append(seq, 5000, 1).status.is_ok());
  EXPECT_EQ(world.verb(SeqVerb::kFork, seq, 5001).status.code(), KVM_ERR_INVALID);
  EXPECT_EQ(world.n_blocks(), 0u);
  // More rows than tokens, and a position that is not the length.
  StepRequest many = world.attend(seq, KVM_MODE_SAMPLED, 16);
  const kvm_seq_id empty = world.create(world.id);
  many.items.push_back(query_item(empty, 1, 0));
  many.items[0].n_query = 15;
  many.items[1].query_row = 15;
  EXPECT_EQ(world.run(std::move(many)).status.code(), KVM_ERR_INVALID);
  StepRequest step = world.attend(seq, KVM_MODE_SAMPLED);
  Buffer row(Dtype::kBf16, 1, 1, kHeads, kDim);
  step.append = true;
  step.items[0].n_append = 1;
  step.items[0].append_position = 4999;
  step.k = step.v = row.view();
  EXPECT_EQ(world.run(std::move(step)).status.code(), KVM_ERR_HOLE);
  EXPECT_EQ(world.n_blocks(), 0u);
  EXPECT_TRUE(world.run(world.attend(seq, KVM_MODE_SAMPLED)).status.is_ok());
  EXPECT_EQ(world.n_blocks(), kHeads * indexable_blocks(5000));
}

// An attend with 24 sequences to index, and a large one of somebody else behind it.
TEST(IndexWork, OthersComeInBetween) {
  constexpr uint32_t kSeqs = 24;
  World world(1);
  std::vector<kvm_seq_id> seqs;
  for (uint32_t i = 0; i < kSeqs; ++i) {
    seqs.push_back(world.create(world.id));
    ASSERT_TRUE(world.append(seqs.back(), 9000, 1).status.is_ok());
  }
  const ClientId other = world.engine->add_client({});
  SeqRequest create;
  create.space = world.id;
  const kvm_seq_id theirs = world.run(create, other).seq;
  ASSERT_TRUE(world.append(theirs, 9000, 1, other).status.is_ok());

  const auto count_tasks = [&world](const bool& done) {
    uint32_t n_tasks = 0;
    while (!done && n_tasks < 10000) {
      n_tasks += world.engine->work() ? 1 : 0;
      world.engine->poll();
    }
    return n_tasks;
  };
  RequestResult result;
  bool is_done = false;
  world.begin(world.attend(theirs, KVM_MODE_EXACT, 64), &is_done, &result, other);
  const uint32_t n_alone = count_tasks(is_done);
  ASSERT_GT(n_alone, 1u) << "too small to be cut";

  RequestResult mine;
  bool is_mine_done = false;
  world.begin(world.attend_all(seqs), &is_mine_done, &mine);
  is_done = false;
  Buffer q(Dtype::kF32, 1, 64, kHeads, kDim);
  Buffer o(Dtype::kF32, 1, 64, kHeads, kDim);
  StepRequest large;
  large.attend = true;
  large.space = world.id;
  large.items = {query_item(theirs, 64)};
  large.q = q.view();
  large.o = o.view();
  world.begin(std::move(large), &is_done, &result, other);
  const uint32_t n_behind = count_tasks(is_done);
  EXPECT_TRUE(result.status.is_ok());
  EXPECT_FALSE(is_mine_done);
  EXPECT_LE(n_behind, n_alone + 4) << "of " << kSeqs * kHeads << " frames";
  count_tasks(is_mine_done);
  EXPECT_TRUE(mine.status.is_ok()) << mine.status.message();
  EXPECT_EQ(world.n_blocks(), kSeqs * kHeads * indexable_blocks(9000));
}

// Forks that nobody has indexed, attended to at once: the request that is not building waits, and
// both get what a sequence of its own would.
TEST(IndexWork, OneRequestBuildsWhatAnotherWaitsFor) {
  World world(1, 3);
  const kvm_seq_id parent = world.create(world.id);
  ASSERT_TRUE(world.append(parent, 9000, 1).status.is_ok());
  std::vector<kvm_seq_id> forks;
  for (uint32_t i = 0; i < 4; ++i) {
    forks.push_back(world.verb(SeqVerb::kFork, parent, KVM_POSITION_END).seq);
  }
  EXPECT_EQ(world.n_blocks(), 0u) << "a fork waits for no index";
  constexpr uint32_t kRequests = 4;
  std::vector<Buffer> outputs;
  std::vector<RequestResult> results(kRequests);
  bool is_done[kRequests] = {};
  Buffer q(Dtype::kF32, 1, 1, kHeads, kDim);
  std::mt19937_64 random(7);
  fill(&q, 1, 1, kHeads, random);
  for (uint32_t i = 0; i < kRequests; ++i) {
    outputs.emplace_back(Dtype::kF32, 1, 1, kHeads, kDim);
  }
  for (uint32_t i = 0; i < kRequests; ++i) {
    StepRequest step = world.attend(forks[i], KVM_MODE_SAMPLED);
    step.q = q.view();
    step.o = outputs[i].view();
    world.begin(std::move(step), &is_done[i], &results[i]);
  }
  for (const bool& done : is_done) {
    world.drive(done);
  }
  EXPECT_EQ(world.n_blocks(), kHeads * indexable_blocks(9000));
  const kvm_seq_id alone = world.create(world.id);
  ASSERT_TRUE(world.append(alone, 9000, 1).status.is_ok());
  Buffer want(Dtype::kF32, 1, 1, kHeads, kDim);
  StepRequest step = world.attend(alone, KVM_MODE_SAMPLED);
  step.q = q.view();
  step.o = want.view();
  ASSERT_TRUE(world.run(std::move(step)).status.is_ok());
  for (uint32_t i = 0; i < kRequests; ++i) {
    ASSERT_TRUE(results[i].status.is_ok()) << results[i].status.message();
    EXPECT_EQ(results[i].mode, uint32_t{KVM_MODE_SAMPLED});
    for (uint32_t head = 0; head < kHeads; ++head) {
      EXPECT_EQ(outputs[i].get_row(0, 0, head), want.get_row(0, 0, head)) << i;
    }
  }
}

// The client of the request that builds leaves: nobody waits for ever.
TEST(IndexWork, WaitersOfAClientThatLeavesEnd) {
  World world(1);
  const kvm_seq_id parent = world.create(world.id);
  ASSERT_TRUE(world.append(parent, 60000, 1).status.is_ok());
  RequestResult results[3];
  bool is_done[3] = {};
  for (int i = 0; i < 3; ++i) {
    const kvm_seq_id fork = world.verb(SeqVerb::kFork, parent, KVM_POSITION_END).seq;
    world.begin(world.attend(fork, KVM_MODE_SAMPLED), &is_done[i], &results[i]);
  }
  for (int i = 0; i < 6; ++i) {
    world.engine->work();
    world.engine->poll();
  }
  bool is_gone = false;
  world.engine->remove_client(world.client, [&is_gone] { is_gone = true; });
  world.drive(is_gone);
  EXPECT_FALSE(is_done[0] || is_done[1] || is_done[2]);
  EXPECT_LT(world.n_blocks(), 4 * kFrameBlocks);
  EXPECT_EQ(world.engine->stats().index_bytes, 0u);
}

// An attend over many sequences, whose planning takes long, and one of somebody else behind it.
TEST(IndexWork, PlanningComesInSlices) {
  World world(1);
  const kvm_seq_id seq = world.create(world.id);
  ASSERT_TRUE(world.append(seq, 60000, 1).status.is_ok());
  const ClientId other = world.engine->add_client({});
  SeqRequest create;
  create.space = world.id;
  const kvm_seq_id theirs = world.run(create, other).seq;
  ASSERT_TRUE(world.append(theirs, 9000, 1, other).status.is_ok());
  // 3 * 938 pages looked at for each item.
  constexpr uint32_t kItems = 120;
  Buffer q(Dtype::kF32, 1, kItems, kHeads, kDim);
  std::mt19937_64 random(1);
  fill(&q, 1, kItems, kHeads, random);
  Buffer o(Dtype::kF32, 1, kItems, kHeads, kDim);
  StepRequest many;
  many.attend = true;
  many.space = world.id;
  for (uint32_t i = 0; i < kItems; ++i) {
    many.items.push_back(query_item(seq, 1, i));
  }
  many.mode = KVM_MODE_SAMPLED;
  many.budget = 100;
  many.q = q.view();
  many.o = o.view();
  ASSERT_TRUE(world.run(world.attend(seq, KVM_MODE_SAMPLED)).status.is_ok());  // indexed

  RequestResult mine;
  bool is_mine_done = false;
  world.begin(many, &is_mine_done, &mine);
  RequestResult result;
  bool is_done = false;
  world.begin(world.attend(theirs, KVM_MODE_EXACT, 64), &is_done, &result, other);
  world.drive(is_done);
  EXPECT_TRUE(result.status.is_ok());
  EXPECT_FALSE(is_mine_done);
  world.drive(is_mine_done);
  ASSERT_TRUE(mine.status.is_ok()) << mine.status.message();
  EXPECT_EQ(mine.mode, uint32_t{KVM_MODE_SAMPLED});
  // As if each were asked for alone.
  for (const uint32_t i : {0u, 57u, kItems - 1}) {
    Buffer alone(Dtype::kF32, 1, 1, kHeads, kDim);
    StepRequest one = many;
    one.items = {query_item(seq, 1, 0)};
    one.q.data = static_cast<std::byte*>(one.q.data) + i * kHeads * kDim * sizeof(float);
    one.q.size_bytes -= i * kHeads * kDim * sizeof(float);
    one.o = alone.view();
    ASSERT_TRUE(world.run(one).status.is_ok());
    for (uint32_t head = 0; head < kHeads; ++head) {
      EXPECT_EQ(alone.get_row(0, 0, head), o.get_row(0, i, head)) << i;
    }
  }
}

// What threads need for approximate problems counts: 16 rows with as many candidates as keys.
TEST(IndexWork, ScratchIsPartOfTheLimit) {
  constexpr uint32_t kTokens = 600000;
  constexpr uint32_t kRows = 16;
  Rig rig(16);
  SpaceSpec spec = make_spec("long", 1, 1, 1, 8);
  kvm_index_params params{};
  params.kind = KVM_INDEX_SKETCH_1BIT;
  spec.indexes = {params};
  const kvm_space_id id = rig.space(spec);
  const kvm_seq_id seq = rig.create(id);
  Buffer rows(Dtype::kBf16, 1, kTokens, 1, 8);
  for (uint32_t t = 0; t < kTokens; ++t) {
    rows.set(0, t, 0, t % 8, 1.0f);
  }
  StepRequest step;
  step.append = true;
  step.space = id;
  step.items = {append_item(seq, kTokens)};
  step.k = step.v = rows.view();
  ASSERT_TRUE(rig.run(std::move(step)).status.is_ok());
  Buffer q(Dtype::kF32, 1, kRows, 1, 8);
  Buffer o(Dtype::kF32, 1, kRows, 1, 8);
  const auto attend = [&](uint32_t n_rows, uint64_t budget) {
    StepRequest asked;
    asked.attend = true;
    asked.space = id;
    asked.items = {query_item(seq, n_rows)};
    asked.mode = KVM_MODE_TOPK;
    asked.budget = budget;
    asked.q = q.view();
    asked.o = o.view();
    return rig.run(std::move(asked)).status;
  };
  EXPECT_TRUE(attend(1, 1000).is_ok());
  const Status status = attend(kRows, 500000);
  EXPECT_EQ(status.code(), KVM_ERR_LIMIT) << status.message();
}

// A client that leaves while its sequence is indexed: no slice more than the one that is made.
TEST(IndexWork, EndsWithItsClient) {
  World world(1);
  const kvm_seq_id seq = world.create(world.id);
  ASSERT_TRUE(world.append(seq, 90000, 1).status.is_ok());
  RequestResult attended;
  bool is_attended = false;
  world.begin(world.attend(seq, KVM_MODE_SAMPLED), &is_attended, &attended);
  bool is_gone = false;
  world.engine->remove_client(world.client, [&is_gone] { is_gone = true; });
  world.drive(is_gone);
  EXPECT_FALSE(is_attended);
  EXPECT_LT(world.n_blocks(), 4 * kFrameBlocks);
  EXPECT_EQ(world.engine->stats().index_bytes, 0u);
}

// Appends fill the memory while attends of other sequences run, on other threads: what they read
// stays, what nobody reads goes.
TEST(IndexWork, MakesWayWhileOthersAttend) {
  World world(1, 3, 8 << 20);
  std::vector<kvm_seq_id> seqs;
  for (int i = 0; i < 4; ++i) {
    seqs.push_back(world.create(world.id));
    ASSERT_TRUE(world.append(seqs.back(), 4000, 1).status.is_ok());
    const RequestResult result = world.run(world.attend(seqs.back(), KVM_MODE_SAMPLED));
    ASSERT_TRUE(result.status.is_ok()) << result.status.message();
    EXPECT_EQ(result.mode, uint32_t{KVM_MODE_SAMPLED});
  }
  // One attend at a time, appends behind it without waiting for it.
  uint32_t n_refused = 0;
  for (int i = 0; i < 60; ++i) {
    RequestResult attended;
    bool is_attended = false;
    world.begin(world.attend(seqs[i % 4], KVM_MODE_SAMPLED), &is_attended, &attended);
    const kvm_seq_id fresh = world.create(world.id);
    const Status status = world.append(fresh, 500, 1).status;
    n_refused += status.is_ok() ? 0 : 1;
    EXPECT_TRUE(status.is_ok() || status.code() == KVM_ERR_NO_SPACE ||
                status.code() == KVM_ERR_QUOTA)
        << status.message();
    world.drive(is_attended);
    EXPECT_TRUE(attended.status.is_ok()) << attended.status.message();
  }
  EXPECT_GT(n_refused, 0u) << "there was room for all";
  EXPECT_GT(world.engine->stats().n_index_dropped, 0u);
}

}  // namespace
}  // namespace kvm::engine::testing
