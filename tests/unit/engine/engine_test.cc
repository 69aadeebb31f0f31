// SPDX-License-Identifier: Apache-2.0
// Order, failure, cancelling and leaving: requests as a whole.
#include "engine/engine.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/mman.h>

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "base/status.h"
#include "tests/unit/engine/rig.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kHeads = 2;
constexpr uint32_t kDim = 16;

// One layer of 2 heads of 16: a page of 64 tokens takes 8 KiB.
struct Small : Rig {
  explicit Small(uint32_t n_threads = 1, uint64_t capacity_bytes = 64 << 20,
                 uint64_t worker_spin_ns = 50000)
      : Rig(n_threads, capacity_bytes, worker_spin_ns),
        id(space(make_spec("small", 2, kHeads, kHeads, kDim))) {}

  // Rows with the value `value` everywhere.
  StepRequest append(kvm_seq_id seq, uint32_t n, float value) {
    auto buffer = std::make_unique<Buffer>(Dtype::kF32, 1, n, kHeads, kDim);
    for (uint32_t r = 0; r < n; ++r) {
      for (uint32_t h = 0; h < kHeads; ++h) {
        for (uint32_t i = 0; i < kDim; ++i) {
          buffer->set(0, r, h, i, value);
        }
      }
    }
    StepRequest step;
    step.append = true;
    step.space = id;
    step.items = {append_item(seq, n)};
    step.k = step.v = buffer->view();
    buffers.push_back(std::move(buffer));
    return step;
  }
  // Attends with one row at the end; the result is in the buffer.
  std::pair<StepRequest, Buffer*> attend(kvm_seq_id seq, uint32_t n_query = 1) {
    buffers.push_back(std::make_unique<Buffer>(Dtype::kF32, 1, n_query, kHeads, kDim));
    Buffer* q = buffers.back().get();
    std::mt19937_64 random(1);
    fill(q, 1, n_query, kHeads, random);
    buffers.push_back(std::make_unique<Buffer>(Dtype::kF32, 1, n_query, kHeads, kDim));
    Buffer* o = buffers.back().get();
    StepRequest step;
    step.attend = true;
    step.space = id;
    step.items = {query_item(seq, n_query)};
    step.q = q->view();
    step.o = o->view();
    return {step, o};
  }

  kvm_space_id id;
  std::vector<std::unique_ptr<Buffer>> buffers;
};

// Collects results in the order of their callbacks.
struct Log {
  DoneCallback entry(const std::string& name) {
    return [this, name](RequestResult&& result) {
      names.push_back(name);
      results.push_back(std::move(result));
    };
  }
  void drive(Engine& engine, size_t n) {
    for (int i = 0; i < 100000 && names.size() < n; ++i) {
      if (engine.poll() == 0 && !engine.work()) {
        engine.wait(1'000'000);
      }
    }
    EXPECT_EQ(names.size(), n);
  }
  std::vector<std::string> names;
  std::vector<RequestResult> results;
};

TEST(Engine, QueuedRequestsOfASequenceRunInOrder) {
  for (const uint32_t n_threads : {1u, 3u}) {
    Small rig(n_threads);
    const kvm_seq_id seq = rig.create(rig.id);
    Log log;
    std::vector<Buffer*> answers;
    // Large appends take tasks; the attends behind them must see all of their tokens and no more.
    for (uint32_t i = 0; i < 6; ++i) {
      rig.engine->submit(rig.client, {1, i}, rig.append(seq, 4000, 1.0f + static_cast<float>(i)),
                         log.entry("append"));
      auto [attend, o] = rig.attend(seq);
      answers.push_back(o);
      rig.engine->submit(rig.client, {1, 100 + i}, std::move(attend), log.entry("attend"));
    }
    EXPECT_EQ(rig.engine->n_in_flight(), 12u);
    log.drive(*rig.engine, 12);
    EXPECT_EQ(rig.engine->n_in_flight(), 0u);
    for (uint32_t i = 0; i < 6; ++i) {
      EXPECT_EQ(log.names[2 * i], "append");
      EXPECT_EQ(log.names[2 * i + 1], "attend");
      const RequestResult& result = log.results[2 * i + 1];
      ASSERT_TRUE(result.status.is_ok()) << result.status.message();
      EXPECT_EQ(result.keys_present, 4000u * kHeads * (i + 1));
      EXPECT_GE(answers[i]->get(0, 0, 0, 0), 0.9f);
      EXPECT_LE(answers[i]->get(0, 0, 0, 0), 1.1f + static_cast<float>(i));
      EXPECT_GE(result.service_ns, result.compute_ns);
    }
    EXPECT_EQ(rig.length(seq), 24000u);
  }
}

// Sequences that grew side by side share their extents; the memory of those that are gone is there
// again, although one of them stays and is read throughout.
TEST(Engine, PagesMoveTogetherWhereOthersAreGone) {
  constexpr uint64_t kExtent = 2 << 20;
  constexpr uint32_t kSequences = 16;
  constexpr uint32_t kPages = 128;  // of each, 8 KiB a page
  for (const uint32_t n_threads : {1u, 3u}) {
    Small rig(n_threads, 24 << 20);
    Log log;
    std::vector<kvm_seq_id> seqs;
    for (uint32_t i = 0; i < kSequences; ++i) {
      seqs.push_back(rig.create(rig.id));
    }
    for (uint32_t page = 0; page < kPages; ++page) {
      for (uint32_t i = 0; i < kSequences; ++i) {
        const auto value = static_cast<float>(page * kSequences + i) / 1024.0f;
        rig.engine->submit(rig.client, {1, 1}, rig.append(seqs[i], 64, value), log.entry("append"));
      }
    }
    size_t n_done = size_t{kPages} * kSequences;
    log.drive(*rig.engine, n_done);
    const uint64_t used = rig.engine->stats().host_used_bytes;
    EXPECT_GE(used, 8 * kExtent);
    const auto attend = [&] {
      auto [step, o] = rig.attend(seqs[0], 4);
      rig.engine->submit(rig.client, {1, 1}, std::move(step), log.entry("attend"));
      return o;
    };
    const Buffer* expected = attend();
    log.drive(*rig.engine, ++n_done);
    // Forks of what stays share its pages, and see them where they are.
    for (uint32_t i = 0; i < 20; ++i) {
      SeqRequest fork;
      fork.verb = SeqVerb::kFork;
      fork.seq = seqs[0];
      fork.n_tokens = KVM_POSITION_END;
      rig.engine->submit(rig.client, {1, 1}, std::move(fork), log.entry("fork"));
    }
    for (uint32_t i = 1; i < kSequences; ++i) {
      SeqRequest free;
      free.verb = SeqVerb::kFree;
      free.seq = seqs[i];
      rig.engine->submit(rig.client, {1, 1}, std::move(free), log.entry("free"));
    }
    log.drive(*rig.engine, n_done += 20 + kSequences - 1);
    std::vector<Buffer*> answers;
    for (int round = 0; round < 200; ++round) {
      answers.push_back(attend());
      rig.engine->housekeep();
      rig.engine->poll();
    }
    log.drive(*rig.engine, n_done + answers.size());
    // A driver with nothing else to do comes back when it is told to.
    for (uint64_t again_ns = 0; again_ns != UINT64_MAX;) {
      const bool worked = rig.engine->work();
      again_ns = rig.engine->poll() != 0 || worked ? 0 : rig.engine->housekeep();
      ::usleep(again_ns == UINT64_MAX ? 0 : static_cast<useconds_t>(again_ns / 1000));
    }
    for (const Buffer* answer : answers) {
      for (uint32_t row = 0; row < 4; ++row) {
        for (uint32_t head = 0; head < kHeads; ++head) {
          for (uint32_t d = 0; d < kDim; ++d) {
            ASSERT_EQ(answer->get(0, row, head, d), expected->get(0, row, head, d));
          }
        }
      }
    }
    const kvm_stats stats = rig.engine->stats();
    EXPECT_EQ(stats.n_pages, kPages);
    EXPECT_GT(stats.n_pages_moved, 0u);
    EXPECT_LE(stats.n_pages_moved, kPages);
    EXPECT_LE(stats.host_used_bytes, 4 * kExtent) << "half an extent's pages, and one cached";
  }
}

TEST(Engine, SequenceVerbsKeepTheirPlaceInTheLine) {
  Small rig(2);
  const kvm_seq_id seq = rig.create(rig.id);
  Log log;
  const auto verb = [&](SeqVerb which, uint64_t n) {
    SeqRequest request;
    request.verb = which;
    request.seq = seq;
    request.n_tokens = n;
    rig.engine->submit(rig.client, {1, 1}, std::move(request), log.entry("verb"));
  };
  rig.engine->submit(rig.client, {1, 1}, rig.append(seq, 5000, 1), log.entry("append"));
  verb(SeqVerb::kFork, KVM_POSITION_END);
  verb(SeqVerb::kTruncate, 100);
  rig.engine->submit(rig.client, {1, 1}, rig.append(seq, 7, 1), log.entry("append"));
  verb(SeqVerb::kFork, KVM_POSITION_END);
  verb(SeqVerb::kFree, 0);
  auto [attend, o] = rig.attend(seq);
  rig.engine->submit(rig.client, {1, 1}, std::move(attend), log.entry("attend"));
  log.drive(*rig.engine, 7);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_TRUE(log.results[i].status.is_ok()) << i << ": " << log.results[i].status.message();
  }
  EXPECT_EQ(rig.length(log.results[1].seq), 5000u);
  EXPECT_EQ(rig.length(log.results[4].seq), 107u);
  EXPECT_EQ(log.results[6].status.code(), KVM_ERR_STALE);
  EXPECT_EQ(o->bytes()[0], std::byte{0x7f}) << "a failed attend wrote its output";
}

TEST(Engine, RequestsOfOtherSequencesOvertake) {
  Small rig(1);
  const kvm_seq_id a = rig.create(rig.id);
  const kvm_seq_id b = rig.create(rig.id);
  Log log;
  rig.engine->submit(rig.client, {1, 1}, rig.append(a, 8000, 1), log.entry("a"));
  rig.engine->submit(rig.client, {1, 2}, rig.append(a, 1, 1), log.entry("a"));
  rig.engine->submit(rig.client, {1, 3}, rig.append(b, 1, 1), log.entry("b"));
  log.drive(*rig.engine, 3);
  EXPECT_EQ(log.names, (std::vector<std::string>{"b", "a", "a"}));
}

TEST(Engine, AFailedRequestChangesNothing) {
  Small rig(1, 4 << 20);  // two extents
  const kvm_seq_id first = rig.create(rig.id);
  const kvm_seq_id second = rig.create(rig.id);
  ASSERT_TRUE(rig.run(rig.append(first, 70, 1)).status.is_ok());
  const auto before = rig.engine->seq_info(rig.client, first).value();

  StepRequest both = rig.append(first, 60000, 2);
  both.items[0].n_append = 10;
  both.items.push_back(append_item(second, 60000));
  const RequestResult full = rig.run(both);
  EXPECT_EQ(full.status.code(), KVM_ERR_QUOTA) << full.status.message();
  // What another client holds is missing.
  const ClientId other = rig.engine->add_client({});
  SeqRequest create;
  create.space = rig.id;
  const kvm_seq_id its = rig.run(create, other).seq;
  ASSERT_TRUE(rig.run(rig.append(its, 18000, 2), other).status.is_ok());
  both.items[1].n_append = 20000;
  EXPECT_EQ(rig.run(both).status.code(), KVM_ERR_NO_SPACE);
  const auto after = rig.engine->seq_info(rig.client, first).value();
  EXPECT_EQ(after.n_tokens_max, before.n_tokens_max);
  EXPECT_EQ(after.n_pages, before.n_pages);
  EXPECT_EQ(rig.length(second), 0u);

  // The attend half fails: the append half must not stay.
  auto [step, o] = rig.attend(first, 90);
  StepRequest append = rig.append(first, 10, 3);
  step.append = true;
  step.k = append.k;
  step.v = append.v;
  step.items[0].n_append = 10;
  const RequestResult bad = rig.run(step);
  EXPECT_EQ(bad.status.code(), KVM_ERR_INVALID) << bad.status.message();
  EXPECT_EQ(rig.length(first), 70u);
  EXPECT_EQ(o->bytes()[0], std::byte{0x7f});
  step.items[0].n_query = 80;
  EXPECT_TRUE(rig.run(step).status.is_ok());
  EXPECT_EQ(rig.length(first), 80u);
}

// Where a layer's window begins to hide a head's sinks, rows of one tree would see by different
// rules.
TEST(Engine, TreesAcrossAChangeOfRulesAreRefusedWhole) {
  Small rig;
  SpaceSpec spec = make_spec("rules", 1, kHeads, kHeads, kDim);
  spec.layers.push_back({.n_layers = 1, .window = 100});
  spec.policies.push_back({.retention = KVM_RETAIN_SINKS_RECENT, .n_sinks = 4, .n_recent = 20});
  rig.id = rig.space(spec);
  const kvm_seq_id seq = rig.create(rig.id, KVM_SEQ_MANUAL_COMMIT);
  ASSERT_TRUE(rig.run(rig.append(seq, 95, 1)).status.is_ok());
  auto [step, o] = rig.attend(seq, 4);
  StepRequest append = rig.append(seq, 7, 1);
  step.append = true;
  step.k = append.k;
  step.v = append.v;
  step.items[0].n_append = 7;
  step.items[0].flags = KVM_ITEM_TREE;
  step.tree_mask = {1, 3, 7, 15};
  const RequestResult refused = rig.run(step);
  EXPECT_EQ(refused.status.code(), KVM_ERR_UNSUPPORTED) << refused.status.message();
  EXPECT_EQ(rig.length(seq), 95u);
  EXPECT_EQ(o->bytes()[0], std::byte{0x7f});
  step.items[0].query_position = 96;  // all of them before position 100
  EXPECT_TRUE(rig.run(step).status.is_ok());
  EXPECT_EQ(rig.length(seq), 102u);
}

TEST(Engine, HolesAndWrongIdsHaveTheirOwnStatus) {
  Small rig;
  const kvm_seq_id seq = rig.create(rig.id);
  StepRequest step = rig.append(seq, 5, 1);
  step.items[0].append_position = 1;
  EXPECT_EQ(rig.run(step).status.code(), KVM_ERR_HOLE);
  step.items[0].append_position = 0;
  EXPECT_TRUE(rig.run(step).status.is_ok());
  EXPECT_EQ(rig.run(step).status.code(), KVM_ERR_HOLE);
  EXPECT_EQ(rig.length(seq), 5u);

  step.items[0].append_position = KVM_POSITION_END;
  StepRequest wrong = step;
  wrong.items[0].seq = 0;
  EXPECT_EQ(rig.run(wrong).status.code(), KVM_ERR_NOT_FOUND);
  wrong = step;
  wrong.space = 0;
  EXPECT_EQ(rig.run(wrong).status.code(), KVM_ERR_NOT_FOUND);
  wrong = step;
  wrong.space = rig.space(make_spec("other", 2, kHeads, kHeads, kDim));
  EXPECT_EQ(rig.run(wrong).status.code(), KVM_ERR_INVALID);

  const ClientId other = rig.engine->add_client({});
  EXPECT_EQ(rig.run(step, other).status.code(), KVM_ERR_PERMISSION);
  EXPECT_EQ(rig.run(step, 12345).status.code(), KVM_ERR_PERMISSION);
  EXPECT_EQ(rig.engine->seq_info(other, seq).status().code(), KVM_ERR_PERMISSION);

  ASSERT_TRUE(rig.verb(SeqVerb::kFree, seq).status.is_ok());
  EXPECT_EQ(rig.run(step).status.code(), KVM_ERR_STALE);
  EXPECT_EQ(rig.verb(SeqVerb::kFree, seq).status.code(), KVM_ERR_STALE);
  EXPECT_EQ(rig.verb(SeqVerb::kTruncate, seq).status.code(), KVM_ERR_STALE);
  EXPECT_GT(rig.engine->stats().n_requests_failed, 7u);
}

TEST(Engine, NullWorkIsAnsweredAtOnce) {
  Small rig;
  const kvm_seq_id seq = rig.create(rig.id);
  int n_calls = 0;
  StepRequest step;
  step.append = true;
  step.space = rig.id;
  step.items = {append_item(seq, 0)};
  rig.engine->submit(rig.client, {1, 1}, std::move(step), [&](RequestResult&& result) {
    EXPECT_TRUE(result.status.is_ok());
    ++n_calls;
  });
  EXPECT_EQ(n_calls, 1);
  EXPECT_EQ(rig.engine->n_in_flight(), 0u);
}

TEST(Engine, EmptySequencesAnswerWithNothing) {
  Small rig;
  auto [attend, o] = rig.attend(rig.create(rig.id));
  attend.items[0].query_position = 0;
  Buffer lse(Dtype::kF32, 1, 1, kHeads, 1);
  attend.lse = lse.view();
  const RequestResult result = rig.run(attend);
  ASSERT_TRUE(result.status.is_ok()) << result.status.message();
  EXPECT_EQ(o->get(0, 0, 1, 3), 0.0f);
  EXPECT_EQ(lse.get(0, 0, 1, 0), -INFINITY);
  EXPECT_EQ(result.keys_present, 0u);
}

TEST(Engine, CancelTakesWhatHasNotBegun) {
  Small rig(1);
  const kvm_seq_id seq = rig.create(rig.id);
  Log log;
  rig.engine->submit(rig.client, {1, 1}, rig.append(seq, 8000, 1), log.entry("running"));
  rig.engine->submit(rig.client, {1, 2}, rig.append(seq, 1, 1), log.entry("cancelled"));
  rig.engine->submit(rig.client, {1, 3}, rig.append(seq, 2, 1), log.entry("after"));
  EXPECT_TRUE(rig.engine->cancel(rig.client, {1, 2}));
  EXPECT_TRUE(rig.engine->cancel(rig.client, {1, 1})) << "known, though it runs";
  EXPECT_FALSE(rig.engine->cancel(rig.client, {1, 4}));
  EXPECT_FALSE(rig.engine->cancel(rig.client, {2, 3}));
  EXPECT_FALSE(rig.engine->cancel(rig.client + 1, {1, 3}));
  EXPECT_TRUE(log.names.empty()) << "callbacks come from poll()";
  log.drive(*rig.engine, 3);
  EXPECT_EQ(log.names, (std::vector<std::string>{"cancelled", "running", "after"}));
  EXPECT_EQ(log.results[0].status.code(), KVM_ERR_CANCELLED);
  EXPECT_TRUE(log.results[1].status.is_ok());
  EXPECT_TRUE(log.results[2].status.is_ok());
  EXPECT_EQ(rig.length(seq), 8002u);
  EXPECT_FALSE(rig.engine->cancel(rig.client, {1, 3})) << "done long ago";
}

TEST(Engine, DeadlinesAreForTheStart) {
  Small rig(1);
  const kvm_seq_id seq = rig.create(rig.id);
  StepRequest late = rig.append(seq, 1, 1);
  late.deadline_ns = 1;
  EXPECT_EQ(rig.run(late).status.code(), KVM_ERR_DEADLINE);
  late.deadline_ns = UINT64_MAX;
  EXPECT_TRUE(rig.run(late).status.is_ok());
  EXPECT_EQ(rig.length(seq), 1u);
}

// Whoever asks for much does not keep others from having theirs.
TEST(Engine, ALightClientDoesNotWaitForAllOfAHeavyOne) {
  for (const uint32_t n_threads : {1u, 3u}) {
    Small rig(n_threads);
    const ClientId heavy = rig.engine->add_client({});
    const ClientId light = rig.engine->add_client({});
    rig.client = heavy;
    std::vector<kvm_seq_id> large;
    for (int i = 0; i < 60; ++i) {
      large.push_back(rig.create(rig.id));
      ASSERT_TRUE(rig.run(rig.append(large.back(), 6000, 1)).status.is_ok());
    }
    rig.client = light;
    const kvm_seq_id small = rig.create(rig.id);
    ASSERT_TRUE(rig.run(rig.append(small, 100, 1)).status.is_ok());

    uint32_t n_heavy = 0;
    uint32_t n_heavy_before = 0;
    uint32_t n_light = 0;
    const auto submit = [&](ClientId client, kvm_seq_id seq, uint32_t rows, uint64_t number,
                            DoneCallback on_done) {
      rig.client = client;
      rig.engine->submit(client, {1, number}, rig.attend(seq, rows).first, std::move(on_done));
    };
    for (uint64_t i = 0; i < 60; ++i) {
      submit(heavy, large[i], 8, i, [&](RequestResult&& result) {
        EXPECT_TRUE(result.status.is_ok()) << result.status.message();
        ++n_heavy;
      });
    }
    // One after the other, as a client does that waits for each.
    std::function<void(RequestResult &&)> next = [&](RequestResult&& result) {
      EXPECT_TRUE(result.status.is_ok()) << result.status.message();
      if (++n_light < 5) {
        submit(light, small, 1, n_light, next);
      } else {
        n_heavy_before = n_heavy;
      }
    };
    submit(light, small, 1, 0, next);
    bool done = false;
    for (int i = 0; i < 1'000'000 && !done; ++i) {
      if (rig.engine->poll() == 0 && !rig.engine->work()) {
        rig.engine->wait(1'000'000);
      }
      done = n_heavy == 60 && n_light == 5;
    }
    ASSERT_TRUE(done) << n_heavy << " and " << n_light;
    EXPECT_LT(n_heavy_before, 30u) << "before the five of the light one were done";
  }
}

TEST(Engine, AClientLeavesWithRequestsInFlight) {
  for (const uint32_t n_threads : {1u, 3u}) {
    Small rig(n_threads);
    const ClientId stays = rig.client;
    const kvm_seq_id kept = rig.create(rig.id);
    rig.client = rig.engine->add_client({});
    const kvm_seq_id seq = rig.create(rig.id);
    ASSERT_TRUE(rig.run(rig.append(seq, 6000, 1)).status.is_ok());
    Log log;
    auto [attend, o] = rig.attend(seq, 200);
    rig.engine->submit(rig.client, {1, 1}, std::move(attend), log.entry("running"));
    rig.engine->submit(rig.client, {1, 2}, rig.append(seq, 3, 1), log.entry("waiting"));
    rig.engine->submit(rig.client, {1, 3}, SeqRequest{.verb = SeqVerb::kFree, .seq = seq},
                       log.entry("waiting"));
    rig.engine->submit(stays, {1, 4}, rig.append(kept, 9, 1), log.entry("stays"));
    bool gone = false;
    rig.engine->remove_client(rig.client, [&] {
      EXPECT_EQ(rig.engine->n_in_flight(), 0u);
      gone = true;
    });
    EXPECT_FALSE(gone) << "only from poll()";
    rig.drive(gone);
    EXPECT_EQ(log.names, (std::vector<std::string>{"stays"}));
    EXPECT_EQ(rig.engine->stats().n_sequences, 1u);
    EXPECT_EQ(rig.run(rig.append(seq, 1, 1)).status.code(), KVM_ERR_PERMISSION);
    rig.client = stays;
    EXPECT_TRUE(rig.run(rig.append(kept, 1, 1)).status.is_ok());
    bool gone_too = false;
    rig.engine->remove_client(stays, [&] { gone_too = true; });
    rig.drive(gone_too);
    EXPECT_EQ(rig.engine->stats().n_pages, 0u);
    rig.engine->remove_client(stays, [] { ADD_FAILURE() << "left twice"; });
    rig.engine->poll();
  }
}

// One head of 8 channels: a page takes 2 KiB, so a sequence may have many.
struct Giant : Rig {
  Giant() : Rig(1), space_id(space(make_spec("giant", 1, 1, 1, 8))), seq(create(space_id)) {
    Buffer rows(Dtype::kF32, 1, 1 << 18, 1, 8);
    for (int i = 0; i < 3; ++i) {
      StepRequest step;
      step.append = true;
      step.space = space_id;
      step.items = {append_item(seq, 1 << 18)};
      step.k = step.v = rows.view();
      EXPECT_TRUE(run(step).status.is_ok());
    }
  }
  kvm_space_id space_id;
  kvm_seq_id seq;
};

// Its pages go in parts, between which others have their turns.
TEST(Engine, AGiantThatIsFreedHoldsNobodyUp) {
  Giant rig;
  const uint64_t n_pages = rig.engine->stats().n_pages;
  const kvm_seq_id small = rig.create(rig.space_id);
  const kvm_seq_id child = rig.verb(SeqVerb::kFork, rig.seq, 1 << 19).seq;
  Log log;
  const auto free_later = [&](kvm_seq_id seq, const char* name) {
    rig.engine->submit(rig.client, {1, 1}, SeqRequest{.verb = SeqVerb::kFree, .seq = seq},
                       log.entry(name));
  };
  free_later(child, "child");
  free_later(rig.seq, "giant");
  free_later(rig.seq, "again");
  free_later(small, "small");
  rig.engine->poll();
  EXPECT_EQ(log.names, (std::vector<std::string>{"child", "small"}));
  EXPECT_LT(rig.engine->stats().n_pages, n_pages);
  EXPECT_GT(rig.engine->stats().n_pages, n_pages / 3);
  EXPECT_LT(rig.length(rig.seq), uint64_t{3} << 18);
  log.drive(*rig.engine, 4);
  EXPECT_EQ(log.names[2], "giant");
  EXPECT_TRUE(log.results[2].status.is_ok());
  EXPECT_EQ(log.results[3].status.code(), KVM_ERR_STALE);
  EXPECT_EQ(rig.engine->stats().n_pages, 0u);
  EXPECT_EQ(rig.engine->stats().n_sequences, 0u);
}

// A giant is published in parts: others have their turns, requests behind it find it published, and
// it outlives its maker.
TEST(Engine, AGiantIsPublishedAndTakenInParts) {
  Giant rig;
  const uint64_t n_pages = rig.engine->stats().n_pages;
  const kvm_seq_id small = rig.create(rig.space_id);
  Log log;
  const auto later = [&](ClientId client, SeqVerb verb, kvm_seq_id seq, const char* name,
                         uint64_t n_tokens = KVM_POSITION_END) {
    rig.engine->submit(client, {1, 1}, SeqRequest{.verb = verb, .seq = seq, .n_tokens = n_tokens},
                       log.entry(name));
  };
  later(rig.client, SeqVerb::kPublish, rig.seq, "publish");
  later(rig.client, SeqVerb::kTruncate, rig.seq, "truncate", 5);
  later(rig.client, SeqVerb::kFree, small, "small");
  rig.engine->poll();
  EXPECT_EQ(log.names, (std::vector<std::string>{"small"}));
  log.drive(*rig.engine, 3);
  EXPECT_EQ(log.names, (std::vector<std::string>{"small", "publish", "truncate"}));
  EXPECT_TRUE(log.results[1].status.is_ok()) << log.results[1].status.message();
  EXPECT_EQ(log.results[2].status.code(), KVM_ERR_PERMISSION);

  // Two want it. The second finds that it belongs to the first.
  const ClientId a = rig.engine->add_client({});
  const ClientId b = rig.engine->add_client({});
  later(a, SeqVerb::kTake, rig.seq, "a takes");
  later(b, SeqVerb::kTake, rig.seq, "b takes");
  later(b, SeqVerb::kFree, rig.seq, "b frees");
  bool gone = false;
  rig.engine->remove_client(rig.client, [&] { gone = true; });
  log.drive(*rig.engine, 6);
  rig.drive(gone);
  EXPECT_TRUE(log.results[3].status.is_ok()) << log.results[3].status.message();
  EXPECT_EQ(log.results[4].status.code(), KVM_ERR_PERMISSION);
  EXPECT_EQ(log.results[5].status.code(), KVM_ERR_PERMISSION);
  EXPECT_EQ(rig.engine->stats().n_pages, n_pages);

  // And back, while its owner leaves.
  later(a, SeqVerb::kPublish, rig.seq, "a publishes");
  gone = false;
  rig.engine->remove_client(a, [&] { gone = true; });
  rig.drive(gone);
  EXPECT_EQ(rig.engine->stats().n_pages, n_pages);
  EXPECT_NE(rig.engine->seq_info(b, rig.seq).value().flags & KVM_SEQ_PUBLISHED, 0u);

  // An operator evicts it while it is being taken: it goes, whoever has it by then.
  later(b, SeqVerb::kFork, rig.seq, "b forks");
  later(b, SeqVerb::kTake, rig.seq, "b takes");
  EXPECT_TRUE(rig.engine->evict(rig.seq).is_ok());
  later(b, SeqVerb::kFork, rig.seq, "b is late");
  log.drive(*rig.engine, 9);
  EXPECT_TRUE(log.results[6].status.is_ok()) << log.results[6].status.message();
  EXPECT_TRUE(log.results[7].status.is_ok()) << log.results[7].status.message();
  EXPECT_EQ(log.results[8].status.code(), KVM_ERR_STALE);
  EXPECT_EQ(rig.engine->stats().n_sequences, 1u);
  EXPECT_EQ(rig.run(SeqRequest{.verb = SeqVerb::kFree, .seq = log.results[6].seq}, b).status.code(),
            KVM_OK);
  EXPECT_EQ(rig.engine->stats().n_pages, 0u);
  EXPECT_EQ(rig.engine->n_in_flight(), 0u);
}

// A client is thrown out while what it publishes is on its way, and that is evicted.
TEST(Engine, AGiantIsEvictedWhileItIsPublished) {
  Giant rig;
  rig.engine->submit(rig.client, {1, 1}, SeqRequest{.verb = SeqVerb::kPublish, .seq = rig.seq},
                     [](RequestResult&&) { ADD_FAILURE() << "a client that is gone is told"; });
  EXPECT_TRUE(rig.engine->evict(rig.seq).is_ok());
  bool gone = false;
  rig.engine->remove_client(rig.client, [&] { gone = true; });
  rig.drive(gone);
  EXPECT_EQ(rig.engine->n_in_flight(), 0u);
  EXPECT_EQ(rig.engine->stats().n_sequences, 0u);
  EXPECT_EQ(rig.engine->stats().n_pages, 0u);
}

// What a client that leaves has begun ends, and nobody is told.
void leave_amid(SeqVerb verb, uint64_t n_tokens) {
  Giant rig;
  rig.engine->submit(rig.client, {1, 1},
                     SeqRequest{.verb = verb, .seq = rig.seq, .n_tokens = n_tokens},
                     [](RequestResult&&) { ADD_FAILURE() << "a client that is gone is told"; });
  EXPECT_GT(rig.engine->stats().n_pages, 0u);
  bool gone = false;
  rig.engine->remove_client(rig.client, [&] { gone = true; });
  rig.drive(gone);
  EXPECT_EQ(rig.engine->stats().n_pages, 0u);
  EXPECT_EQ(rig.engine->n_in_flight(), 0u);
}

TEST(Engine, AClientLeavesWhileItsGiantIsFreed) { leave_amid(SeqVerb::kFree, 0); }

TEST(Engine, AClientLeavesWhileItsGiantIsCut) { leave_amid(SeqVerb::kTruncate, 1); }

TEST(Engine, AGiantThatIsCutHoldsNobodyUp) {
  Giant rig;
  const uint64_t n_pages = rig.engine->stats().n_pages;
  const kvm_seq_id small = rig.create(rig.space_id);
  Log log;
  const auto later = [&](SeqVerb verb, kvm_seq_id seq, uint64_t n_tokens, const char* name) {
    rig.engine->submit(rig.client, {1, 1},
                       SeqRequest{.verb = verb, .seq = seq, .n_tokens = n_tokens}, log.entry(name));
  };
  later(SeqVerb::kTruncate, rig.seq, 1000, "cut");
  later(SeqVerb::kFork, rig.seq, 1001, "fork beyond the cut");
  later(SeqVerb::kFree, small, 0, "small");
  rig.engine->poll();
  EXPECT_EQ(log.names, (std::vector<std::string>{"small"}));
  EXPECT_LT(rig.engine->stats().n_pages, n_pages);
  EXPECT_GT(rig.engine->stats().n_pages, n_pages / 3);
  log.drive(*rig.engine, 3);
  EXPECT_EQ(log.names[1], "cut");
  EXPECT_TRUE(log.results[1].status.is_ok());
  EXPECT_EQ(log.results[2].status.code(), KVM_ERR_INVALID) << "it sees the sequence as it was cut";
  EXPECT_EQ(rig.length(rig.seq), 1000u);
  EXPECT_EQ(rig.engine->stats().n_pages, 1000 / 64 + 1);
}

TEST(Engine, CallbacksMaySubmitAgain) {
  Small rig(2);
  const kvm_seq_id seq = rig.create(rig.id);
  uint32_t n_done = 0;
  bool finished = false;
  std::function<void()> next = [&] {
    rig.engine->submit(rig.client, {1, n_done}, rig.append(seq, 1 + n_done % 700, 1),
                       [&](RequestResult&& result) {
                         EXPECT_TRUE(result.status.is_ok());
                         if (++n_done < 1000) {
                           next();
                         } else {
                           finished = true;
                         }
                       });
  };
  next();
  rig.drive(finished);
  EXPECT_EQ(n_done, 1000u);
}

TEST(Engine, ManyMoreRequestsThanSlots) {
  Small rig(3, 256 << 20);
  std::vector<kvm_seq_id> seqs;
  Log log;
  for (uint32_t i = 0; i < 150; ++i) {
    seqs.push_back(rig.create(rig.id));
    rig.engine->submit(rig.client, {1, i}, rig.append(seqs[i], 3000, 1), log.entry("append"));
    auto [attend, o] = rig.attend(seqs[i]);
    rig.engine->submit(rig.client, {1, i}, std::move(attend), log.entry("attend"));
  }
  log.drive(*rig.engine, 300);
  for (const RequestResult& result : log.results) {
    EXPECT_TRUE(result.status.is_ok()) << result.status.message();
  }
  const kvm_stats stats = rig.engine->stats();
  EXPECT_EQ(stats.n_tokens_appended, 150u * 3000);
  EXPECT_EQ(stats.n_rows_attended, 150u);
  EXPECT_EQ(stats.keys_read, 150u * 3000 * kHeads);
  EXPECT_EQ(stats.bytes_read, 150u * 3000 * kHeads * kDim * 2 * 2);
  EXPECT_EQ(stats.n_requests, 450u);
  EXPECT_GT(stats.busy_ns, 0u);
}

TEST(Engine, EndsWithRequestsInFlight) {
  Small rig(3);
  const kvm_seq_id seq = rig.create(rig.id);
  ASSERT_TRUE(rig.run(rig.append(seq, 20000, 1)).status.is_ok());
  for (int i = 0; i < 3; ++i) {
    auto [attend, o] = rig.attend(seq, 60);
    rig.engine->submit(rig.client, {1, 1}, std::move(attend),
                       [](RequestResult&&) { ADD_FAILURE() << "called after the end"; });
  }
  rig.engine.reset();
}

// Forks share int8 and fp8 rows with their scales, copies of a tail page take both along, and reads
// from inside a page find the scales of their rows.
void check_scaled_rows_after_fork_truncate_and_append(CodecId codec_k, CodecId codec_v) {
  Rig rig(2);
  SpaceSpec spec = make_spec("scaled", 1, kHeads, kHeads, kDim, kDim);
  spec.codecs = {{.n_layers = 1,
                  .kv_head_mask = {(uint64_t{1} << kHeads) - 1, 0},
                  .codec_k = static_cast<uint32_t>(codec_k),
                  .codec_v = static_cast<uint32_t>(codec_v)}};
  const kvm_space_id space = rig.space(spec);
  constexpr uint32_t kTokens = 300;
  std::mt19937_64 random(6);
  Buffer k(Dtype::kBf16, 1, 2 * kTokens, kHeads, kDim);
  Buffer v(Dtype::kF32, 1, 2 * kTokens, kHeads, kDim);
  fill(&k, 1, 2 * kTokens, kHeads, random);
  fill(&v, 1, 2 * kTokens, kHeads, random);
  const auto append = [&](kvm_seq_id seq, uint32_t n, uint32_t row) {
    StepRequest step;
    step.append = true;
    step.space = space;
    step.k = k.view();
    step.v = v.view();
    step.items = {append_item(seq, n, row)};
    ASSERT_TRUE(rig.run(step).status.is_ok());
  };
  // rows[i]: which row of the tensors the token at position i has.
  const auto expect = [&](kvm_seq_id seq, const std::vector<uint32_t>& rows) {
    for (const uint64_t begin : {0u, 61u, 100u}) {
      const uint64_t n = rows.size() - begin;
      Buffer out_k(Dtype::kF32, 1, n, kHeads, kDim);
      Buffer out_v(Dtype::kF32, 1, n, kHeads, kDim);
      ReadRequest read;
      read.seq = seq;
      read.position = begin;
      read.n_tokens = n;
      read.k = out_k.view();
      read.v = out_v.view();
      ASSERT_TRUE(rig.run(read).status.is_ok());
      for (uint64_t t = 0; t < n; ++t) {
        for (uint32_t h = 0; h < kHeads; ++h) {
          const uint32_t row = rows[begin + t];
          ASSERT_EQ(out_k.get_row(0, t, h), round_row(codec_k, k.get_row(0, row, h)));
          ASSERT_EQ(out_v.get_row(0, t, h), round_row(codec_v, v.get_row(0, row, h)));
        }
      }
    }
  };
  const kvm_seq_id seq = rig.create(space);
  append(seq, kTokens, 0);
  const RequestResult forked = rig.verb(SeqVerb::kFork, seq, 170);
  ASSERT_TRUE(forked.status.is_ok());
  const kvm_seq_id child = forked.seq;
  append(child, 50, kTokens);       // copies the tail page first
  append(seq, 7, 2 * kTokens - 7);  // in place
  ASSERT_TRUE(rig.verb(SeqVerb::kTruncate, child, 200).status.is_ok());
  append(child, 3, 0);
  std::vector<uint32_t> rows(kTokens);
  std::iota(rows.begin(), rows.end(), 0u);
  std::vector<uint32_t> child_rows(rows.begin(), rows.begin() + 170);
  for (uint32_t i = 0; i < 7; ++i) {
    rows.push_back(2 * kTokens - 7 + i);
  }
  for (uint32_t i = 0; i < 30; ++i) {
    child_rows.push_back(kTokens + i);
  }
  child_rows.insert(child_rows.end(), {0, 1, 2});
  expect(seq, rows);
  expect(child, child_rows);
}

TEST(Engine, ScaledRowsAreReadBackAfterForkTruncateAndAppend) {
  check_scaled_rows_after_fork_truncate_and_append(CodecId::kI8, CodecId::kI8);
  check_scaled_rows_after_fork_truncate_and_append(CodecId::kF8, CodecId::kF8);
  check_scaled_rows_after_fork_truncate_and_append(CodecId::kBf16, CodecId::kF8);
  check_scaled_rows_after_fork_truncate_and_append(CodecId::kF8, CodecId::kI8);
}

TEST(Engine, ReadGivesBackWhatWasAppended) {
  for (const uint32_t n_threads : {1u, 2u}) {
    Small rig(n_threads);
    const kvm_seq_id seq = rig.create(rig.id);
    constexpr uint32_t kTokens = 3000;
    std::mt19937_64 random(5);
    Buffer k(Dtype::kF32, 1, kTokens, kHeads, kDim);
    Buffer v(Dtype::kF16, 1, kTokens, kHeads, kDim, 3);
    fill(&k, 1, kTokens, kHeads, random);
    fill(&v, 1, kTokens, kHeads, random);
    StepRequest append = rig.append(seq, kTokens, 0);
    append.k = k.view();
    append.v = v.view();
    ASSERT_TRUE(rig.run(append).status.is_ok());
    for (const auto& [begin, n] : {std::pair<uint64_t, uint64_t>{0, kTokens},
                                   {63, 2},
                                   {100, 900},
                                   {kTokens - 1, 1},
                                   {7, 0}}) {
      Buffer out_k(Dtype::kF32, 1, n + 1, kHeads, kDim, 5);
      Buffer out_v(Dtype::kBf16, 1, n + 1, kHeads, kDim);
      ReadRequest read;
      read.seq = seq;
      read.position = begin;
      read.n_tokens = n;
      read.k = out_k.view();
      read.v = out_v.view();
      const RequestResult result = rig.run(read);
      ASSERT_TRUE(result.status.is_ok()) << result.status.message();
      for (uint64_t t = 0; t < n; ++t) {
        for (uint32_t h = 0; h < kHeads; ++h) {
          for (uint32_t i = 0; i < kDim; ++i) {
            ASSERT_EQ(out_k.get(0, t, h, i), round_to(CodecId::kBf16, k.get(0, begin + t, h, i)));
            ASSERT_EQ(out_v.get(0, t, h, i), round_to(CodecId::kBf16, v.get(0, begin + t, h, i)));
          }
        }
      }
    }
    ReadRequest beyond;
    beyond.seq = seq;
    beyond.position = kTokens - 1;
    beyond.n_tokens = 2;
    EXPECT_EQ(rig.run(beyond).status.code(), KVM_ERR_INVALID);
  }
}

TEST(Engine, ObservationsAreTakenAndCounted) {
  Small rig;
  const kvm_seq_id seq = rig.create(rig.id);
  ASSERT_TRUE(rig.run(rig.append(seq, 300, 1)).status.is_ok());
  std::mt19937_64 random(5);
  Buffer q(Dtype::kBf16, 1, 300, kHeads, kDim);
  Buffer sums(Dtype::kF32, 1, 300, kHeads, 1);
  fill(&q, 1, 300, kHeads, random);
  fill(&sums, 1, 300, kHeads, random);
  ObserveRequest observed;
  observed.seq = seq;
  observed.n_rows = 300;
  observed.q = q.view();
  observed.n_columns = 300;
  observed.column_sums = sums.view();
  ASSERT_TRUE(rig.run(observed).status.is_ok());
  const auto info = rig.engine->seq_info(rig.client, seq).value();
  EXPECT_EQ(info.n_rows_observed, 256u);
  EXPECT_GT(info.bytes_observed, 0u);
  observed.n_columns = 299;
  observed.column_begin = 2;
  EXPECT_EQ(rig.run(observed).status.code(), KVM_ERR_INVALID);
}

TEST(Engine, LayerMemoryIsWhatAnAttendReads) {
  Small rig;
  const kvm_seq_id seq = rig.create(rig.id);
  ASSERT_TRUE(rig.run(rig.append(seq, 1000, 1)).status.is_ok());
  auto [attend, o] = rig.attend(seq);
  const uint64_t bytes_read = rig.run(attend).bytes_read;
  uint64_t bytes = 0;
  const auto pieces = rig.engine->layer_memory(seq, 0);
  ASSERT_TRUE(pieces.is_ok());
  for (const MemoryPiece& piece : pieces.value()) {
    bytes += piece.size_bytes;
    for (uint64_t i = 0; i < piece.size_bytes / 2; ++i) {  // 1.0 in bf16 everywhere
      ASSERT_EQ(static_cast<const uint16_t*>(piece.data)[i], 0x3f80);
    }
  }
  EXPECT_EQ(bytes, bytes_read);
  EXPECT_FALSE(rig.engine->layer_memory(seq, 2).is_ok());
  EXPECT_FALSE(rig.engine->layer_memory(seq + 1000, 0).is_ok());
}

// The tensors cannot be touched: the request must fail before any of its bytes is read.
TEST(Engine, RowsBeyondAnyMemoryAreRefused) {
  constexpr uint64_t kRows = 65536;
  constexpr uint64_t kBytes = kRows * 16 * 256 * 2;
  Rig rig;
  const kvm_space_id space = rig.space(make_spec("large", 1, 16, 16, 256));
  const kvm_seq_id seq = rig.create(space);
  std::vector<uint16_t> row(16 * 256);
  StepRequest append;
  append.append = true;
  append.space = space;
  append.items = {append_item(seq, 1)};
  append.k = append.v = {row.data(), row.size() * 2, KVM_DTYPE_BF16, 0, 0, 0};
  ASSERT_TRUE(rig.run(append).status.is_ok());
  void* memory = mmap(nullptr, 2 * kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  StepRequest attend;
  attend.attend = true;
  attend.space = space;
  attend.items = {query_item(seq, kRows, 0, 0)};
  attend.q = {memory, kBytes, KVM_DTYPE_BF16, 0, 0, 0};
  attend.o = {static_cast<char*>(memory) + kBytes, kBytes, KVM_DTYPE_BF16, 0, 0, 0};
  EXPECT_EQ(rig.run(attend).status.code(), KVM_ERR_LIMIT);
  munmap(memory, 2 * kBytes);
}

// Thousands of items may name one long sequence: its pages are listed for each.
TEST(Engine, PagesOfAllItemsAreLimited) {
  constexpr uint64_t kTokens = 65536;
  constexpr uint32_t kItems = 4096;
  Rig rig;
  const kvm_space_id space = rig.space(make_spec("narrow", 1, 1, 1, 8));
  const kvm_seq_id seq = rig.create(space);
  std::vector<uint16_t> rows(kTokens * 8);
  StepRequest append;
  append.append = true;
  append.space = space;
  append.items = {append_item(seq, kTokens)};
  append.k = append.v = {rows.data(), rows.size() * 2, KVM_DTYPE_BF16, 0, 0, 0};
  ASSERT_TRUE(rig.run(append).status.is_ok());
  std::vector<uint16_t> q(kItems * 8);
  std::vector<float> o(kItems * 8);
  StepRequest attend;
  attend.attend = true;
  attend.space = space;
  for (uint32_t i = 0; i < kItems; ++i) {
    attend.items.push_back(query_item(seq, 1, i, kTokens - 1));
  }
  attend.q = {q.data(), q.size() * 2, KVM_DTYPE_BF16, 0, 0, 0};
  attend.o = {o.data(), o.size() * 4, KVM_DTYPE_F32, 0, 0, 0};
  const RequestResult result = rig.run(attend);
  EXPECT_EQ(result.status.code(), KVM_ERR_LIMIT);
  EXPECT_NE(result.status.message().find("pages"), std::string::npos) << result.status.message();
  attend.items.resize(1);
  EXPECT_TRUE(rig.run(attend).status.is_ok());
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
// What the C library has mapped for large blocks.
uint64_t mapped_bytes() { return mallinfo2().hblkhd; }

TEST(Engine, IdleRequestsKeepLittleMemory) {
  constexpr uint32_t kRows = 65536;
  Rig rig;
  const kvm_space_id space = rig.space(make_spec("wide", 1, 1, 1, 256, 8));
  const kvm_seq_id seq = rig.create(space);
  Buffer q(Dtype::kBf16, 1, kRows, 1, 256);
  Buffer o(Dtype::kBf16, 1, kRows, 1, 8);
  StepRequest step;
  step.space = space;
  step.append = step.attend = true;
  step.items = {append_item(seq, 1)};
  step.items[0].n_query = kRows;
  step.items[0].query_position = 0;
  step.k = step.v = step.q = q.view();
  step.o = o.view();
  const uint64_t before = mapped_bytes();
  ASSERT_TRUE(rig.run(step).status.is_ok());  // some 100 MB of prepared queries
  EXPECT_LE(mapped_bytes(), before + (uint64_t{64} << 20));
}
#endif

TEST(Engine, OptionsHaveDefaultsAndLimits) {
  auto engine = Engine::open({});
  ASSERT_TRUE(engine.is_ok()) << engine.status().message();
  EXPECT_GE(engine.value()->n_threads(), 1u);
  EXPECT_GT(engine.value()->options().host_capacity_bytes, 0u);
  EXPECT_EQ(engine.value()->options().default_quota_bytes,
            engine.value()->options().host_capacity_bytes);
  EXPECT_NE(std::string(engine.value()->isa()), "");
  EngineOptions options;
  options.n_threads = 5000;
  EXPECT_EQ(Engine::open(options).status().code(), KVM_ERR_INVALID);
}

}  // namespace
}  // namespace kvm::engine::testing
