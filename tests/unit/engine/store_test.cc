// SPDX-License-Identifier: Apache-2.0
// What the store answers, case by case; model_test.cc has the random operations.
#include "engine/store/store.h"
#include "engine/retention/policy_actions.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "engine/store/id_table.h"
#include "engine/store/sequence.h"
#include "tests/unit/engine/store_testbed.h"

namespace kvm::engine {
namespace {

class StoreTest : public testing::Test {
 protected:
  void SetUp() override { client_ = store_->add_client({}); }
  void TearDown() override { store_->check_accounts(); }

  Sequence* create(kvm_space_id space, uint32_t flags = 0) {
    return store_->find_seq(client_, store_->create_seq(client_, space, flags).value()).value();
  }
  Sequence* fork(Sequence* parent, uint64_t n_tokens = KVM_POSITION_END) {
    return store_->find_seq(client_, store_->fork_seq(parent, n_tokens).value()).value();
  }
  template <typename Recoded = NotRecoded>
  void expect_all(const Sequence* seq, std::span<const uint64_t> tokens, Recoded recoded = {}) {
    const Space& space = store_->seq_space(seq);
    for (uint32_t layer = 0; layer < space.n_layers; ++layer) {
      for (uint32_t head = 0; head < space.layers[layer].n_kv_heads; ++head) {
        expect_content(
            *store_, seq, layer, layer, head, tokens, [](uint64_t) { return true; }, recoded);
      }
    }
  }

  std::unique_ptr<Store> store_ = open_store(256 * kMiB);
  ClientId client_ = 0;
};

// --- Creation -----------------------------------------------------------------------------------

TEST_F(StoreTest, TablesHaveRoomForWhatIsExpected) {
  SpaceSpec spec = make_spec("m", 2, 3);
  spec.policies = {
      {.kv_head_mask = {1, 0}, .retention = KVM_RETAIN_SINKS_RECENT, .n_sinks = 4, .n_recent = 64}};
  const kvm_space_id space = store_->register_space(spec).value();
  const auto create_for = [&](uint64_t n_expected) {
    return store_->find_seq(client_, store_->create_seq(client_, space, 0, n_expected).value())
        .value();
  };
  for (const PageList& list : create_for(0)->lists) {
    EXPECT_EQ(list.room(), 0u);
  }
  Sequence* large = create_for(100'000);
  ASSERT_EQ(large->lists.size(), 4u);
  for (const PageList& list : large->lists) {
    EXPECT_GE(list.room(), 100'000u);
    EXPECT_LT(list.room(), 120'000u);
  }
  for (const PageList& list : create_for(kMaxTokens)->lists) {
    EXPECT_EQ(list.room(), kMaxExpectedTokens);
  }
  EXPECT_EQ(store_->client_bytes(client_), 0u);
  // Nobody pays for these tables, so those of a sequence of many lists together have a limit, too.
  const kvm_space_id wide = store_->register_space(make_spec("wide", 512, 1)).value();
  Sequence* many =
      store_->find_seq(client_, store_->create_seq(client_, wide, 0, kMaxTokens).value()).value();
  ASSERT_EQ(many->lists.size(), 512u);
  uint64_t n_expected = 0;
  for (const PageList& list : many->lists) {
    n_expected += list.room();
  }
  EXPECT_GE(n_expected, kMaxExpectedOfLists / 2);
  EXPECT_LE(n_expected, kMaxExpectedOfLists);
  // What was expected says nothing about what comes.
  const std::vector<uint64_t> tokens = numbered(0, 300);
  ASSERT_TRUE(append_all(*store_, large, tokens).is_ok());
  store_->check_accounts();
  Sequence* child = fork(large);
  store_->free_seq(large);
  expect_content(
      *store_, child, 1, 1, 1, tokens, [](uint64_t) { return true; }, NotRecoded{});
  store_->free_seq(child);
}

// --- Ids ----------------------------------------------------------------------------------------

TEST_F(StoreTest, IdsTellWhatBecameOfThem) {
  const kvm_space_id space = store_->register_space(make_spec("m", 1, 1)).value();
  const kvm_seq_id seq = store_->create_seq(client_, space, 0).value();
  EXPECT_TRUE(store_->find_seq(client_, seq).is_ok());
  for (const kvm_seq_id unknown : {kvm_seq_id{0}, kvm_seq_id{12345}, seq + 1, space,
                                   seq + (uint64_t{1} << kIdGenerationBits)}) {
    EXPECT_EQ(store_->find_seq(client_, unknown).status().code(), KVM_ERR_NOT_FOUND) << unknown;
  }
  const ClientId other = store_->add_client({});
  EXPECT_EQ(store_->find_seq(other, seq).status().code(), KVM_ERR_PERMISSION);
  store_->free_seq(store_->find_seq(client_, seq).value());
  EXPECT_EQ(store_->find_seq(client_, seq).status().code(), KVM_ERR_STALE);
  const kvm_seq_id next = store_->create_seq(client_, space, 0).value();
  EXPECT_NE(next, seq);
  EXPECT_EQ(store_->find_seq(client_, seq).status().code(), KVM_ERR_STALE);
  // An id of another start of the service.
  const kvm_seq_id foreign = next ^ uint64_t { 1 } << 63 ^ uint64_t { 1 } << 50;
  EXPECT_EQ(store_->find_seq(client_, foreign).status().code(), KVM_ERR_LOST);
  EXPECT_EQ(store_->space(space ^ uint64_t{1} << 47).status().code(), KVM_ERR_LOST);
  EXPECT_EQ(store_->space(next).status().code(), KVM_ERR_NOT_FOUND);
  const std::string sentence(store_->find_seq(client_, seq).status().message());
  EXPECT_NE(sentence.find(fmt::format("sequence {:#x} is gone", seq)), std::string::npos);
}

TEST(IdTable, GenerationsRunOutAndPlacesAreLeft) {
  IdTable<int> table("thing", 77, 1);
  const uint64_t first = table.insert(std::make_unique<int>(1));
  uint64_t last = first;
  for (uint64_t i = 1; i < kIdMaxGeneration; ++i) {
    table.erase(last);
    last = table.insert(std::make_unique<int>(2));
  }
  EXPECT_EQ(last & kIdMaxGeneration, kIdMaxGeneration);
  EXPECT_EQ(first >> kIdGenerationBits, last >> kIdGenerationBits);
  table.erase(last);
  const uint64_t beyond = table.insert(std::make_unique<int>(3));
  EXPECT_NE(beyond >> kIdGenerationBits, last >> kIdGenerationBits);
  EXPECT_EQ(table.find(last).status().code(), KVM_ERR_STALE);
  EXPECT_EQ(table.find(first).status().code(), KVM_ERR_STALE);
  EXPECT_EQ(*table.find(beyond).value(), 3);
}

// --- Spaces -------------------------------------------------------------------------------------

TEST_F(StoreTest, SpacesAreRegisteredOnce) {
  const kvm_space_id id = store_->register_space(make_spec("m", 2, 4, 16)).value();
  EXPECT_EQ(store_->register_space(make_spec("m", 2, 4, 16)).value(), id);
  const auto other = store_->register_space(make_spec("m", 3, 4, 16));
  EXPECT_EQ(other.status().code(), KVM_ERR_EXISTS);
  EXPECT_EQ(store_->find_space("m").value(), id);
  EXPECT_EQ(store_->find_space("n").status().code(), KVM_ERR_NOT_FOUND);
  Sequence* seq = create(id);
  const kvm_space_info info = store_->space_info(id).value();
  EXPECT_STREQ(info.name, "m");
  EXPECT_EQ(info.n_sequences, 1u);
  EXPECT_EQ(info.bytes_per_token, 2u * 4 * 16 * 2 * 2);
  EXPECT_EQ(info.page_tokens, 64u);
  EXPECT_EQ(store_->drop_space(id).code(), KVM_ERR_BUSY);
  store_->free_seq(seq);
  EXPECT_TRUE(store_->drop_space(id).is_ok());
  EXPECT_EQ(store_->space(id).status().code(), KVM_ERR_STALE);
  EXPECT_EQ(store_->drop_space(id).code(), KVM_ERR_STALE);
  // The name is free for other parameters now.
  EXPECT_NE(store_->register_space(make_spec("m", 3, 4, 16)).value(), id);
  EXPECT_EQ(store_->list_spaces().size(), 1u);
}

TEST_F(StoreTest, SpacesAreLimited) {
  for (int i = 0; i < 64; ++i) {
    EXPECT_TRUE(store_->register_space(make_spec(std::to_string(i), 1, 1)).is_ok());
  }
  EXPECT_EQ(store_->register_space(make_spec("more", 1, 1)).status().code(), KVM_ERR_LIMIT);
  EXPECT_TRUE(store_->register_space(make_spec("7", 1, 1)).is_ok());
}

// --- Appending ----------------------------------------------------------------------------------

TEST_F(StoreTest, BadAppendsAreRefusedWhole) {
  SpaceSpec spec = make_spec("m", 4, 2);
  spec.layers = {{.layer_begin = 1, .n_layers = 1, .kind = KVM_LAYER_ALIAS, .target = 0},
                 {.layer_begin = 2, .n_layers = 1, .kind = KVM_LAYER_ABSENT}};
  const kvm_space_id space = store_->register_space(spec).value();
  Sequence* seq = create(space);
  ASSERT_TRUE(append(*store_, seq, 0, numbered(0, 10)).is_ok());
  struct Case {
    AppendItem item;
    kvm_status code;
  };
  const std::vector<Case> cases = {
      {{seq, 0, 9, 1}, KVM_ERR_HOLE},
      {{seq, 0, 11, 1}, KVM_ERR_HOLE},
      {{seq, 3, 10, 1}, KVM_ERR_HOLE},
      {{seq, 4, 0, 1}, KVM_ERR_INVALID},
      {{seq, 1, KVM_POSITION_END, 1}, KVM_ERR_INVALID},
      {{seq, 2, KVM_POSITION_END, 1}, KVM_ERR_INVALID},
      {{seq, 0, 10, 0}, KVM_ERR_INVALID},
  };
  for (const Case& bad : cases) {
    const std::vector<AppendItem> items = {{seq, 3, 0, 5}, bad.item};
    std::vector<AppendPiece> pieces;
    EXPECT_EQ(store_->reserve_append(items, &pieces).code(), bad.code);
    EXPECT_TRUE(pieces.empty());
    EXPECT_EQ(store_->reserved_length(seq, 3), 0u);
  }
  // The same layer twice.
  const std::vector<AppendItem> twice = {{seq, 3, 0, 5}, {seq, 3, 0, 5}};
  std::vector<AppendPiece> pieces;
  EXPECT_EQ(store_->reserve_append(twice, &pieces).code(), KVM_ERR_INVALID);
  EXPECT_EQ(store_->reserved_length(seq, 3), 0u);
  EXPECT_EQ(stats_of(*store_).n_pages, 1u);
  EXPECT_EQ(store_->length(seq, 1), 10u);
  EXPECT_EQ(store_->length(seq, 2), 0u);
}

TEST_F(StoreTest, QuotaAndCapacityLeaveEverythingAsItWas) {
  // A page of this space is 128 KiB: 16 in an extent.
  const kvm_space_id space = store_->register_space(make_spec("m", 2, 4, 128)).value();
  const uint64_t page_bytes = 4 * 128 * 2 * 2 * kPageTokens;
  const ClientId poor = store_->add_client(limited(3 * page_bytes, 2));
  const auto seq = [&](kvm_seq_id id) { return store_->find_seq(poor, id).value(); };
  Sequence* a = seq(store_->create_seq(poor, space, 0).value());
  Sequence* b = seq(store_->create_seq(poor, space, 0).value());
  EXPECT_EQ(store_->create_seq(poor, space, 0).status().code(), KVM_ERR_QUOTA);
  EXPECT_EQ(store_->fork_seq(a, KVM_POSITION_END).status().code(), KVM_ERR_QUOTA);
  ASSERT_TRUE(append(*store_, a, 0, numbered(0, 100)).is_ok());
  EXPECT_EQ(store_->client_bytes(poor), 2 * page_bytes);
  std::vector<AppendPiece> pieces;
  // Each fits by itself; both do not.
  const std::vector<AppendItem> items = {{a, 1, 0, 1}, {b, 0, 0, 1}};
  const Status status = store_->reserve_append(items, &pieces);
  EXPECT_EQ(status.code(), KVM_ERR_QUOTA);
  EXPECT_NE(status.message().find(std::to_string(3 * page_bytes)), std::string::npos);
  EXPECT_EQ(stats_of(*store_).n_pages, 2u);
  EXPECT_TRUE(append(*store_, a, 1, numbered(0, 64)).is_ok());
  // Room in the tail page costs nothing.
  EXPECT_TRUE(append(*store_, a, 0, numbered(100, 28)).is_ok());
  EXPECT_EQ(append(*store_, a, 0, numbered(128, 1)).code(), KVM_ERR_QUOTA);
  store_->remove_client(poor);
  EXPECT_EQ(stats_of(*store_).n_pages, 0u);

  // Capacity: 256 MiB hold 2,048 pages.
  Sequence* big = create(space);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    ASSERT_TRUE(append_unwritten(*store_, big, layer, 1000 * kPageTokens).is_ok());
  }
  const kvm_stats before = stats_of(*store_);
  const std::vector<AppendItem> large = {{big, 0, KVM_POSITION_END, 40 * kPageTokens},
                                         {big, 1, KVM_POSITION_END, 40 * kPageTokens}};
  // The default quota is the capacity, and is met first; a richer client meets the capacity.
  EXPECT_EQ(store_->reserve_append(large, &pieces).code(), KVM_ERR_QUOTA);
  const ClientId rich = store_->add_client(limited(UINT64_MAX));
  Sequence* more = store_->find_seq(rich, store_->create_seq(rich, space, 0).value()).value();
  const AppendItem too_much = {more, 0, KVM_POSITION_END, 80 * kPageTokens};
  EXPECT_EQ(store_->reserve_append({&too_much, 1}, &pieces).code(), KVM_ERR_NO_SPACE);
  EXPECT_EQ(stats_of(*store_).n_pages, before.n_pages);
  EXPECT_EQ(store_->client_bytes(rich), 0u);
  EXPECT_LE(stats_of(*store_).host_peak_bytes, 256 * kMiB);
  EXPECT_EQ(store_->reserved_length(more, 0), 0u);
  store_->check_accounts();
}

TEST_F(StoreTest, PiecesCoverTheTokensInOrder) {
  const kvm_space_id space = store_->register_space(make_spec("m", 1, 3)).value();
  Sequence* seq = create(space);
  ASSERT_TRUE(append(*store_, seq, 0, numbered(0, 50)).is_ok());
  std::vector<AppendPiece> pieces;
  const AppendItem item = {seq, 0, 50, 100};
  ASSERT_TRUE(store_->reserve_append({&item, 1}, &pieces).is_ok());
  ASSERT_EQ(pieces.size(), 3u);
  EXPECT_EQ(pieces[0].n_tokens, 14u);
  EXPECT_EQ(pieces[1].token, 14u);
  EXPECT_EQ(pieces[1].n_tokens, 64u);
  EXPECT_EQ(pieces[2].token, 78u);
  EXPECT_EQ(pieces[2].n_tokens, 22u);
  EXPECT_EQ(store_->length(seq, 0), 50u);
  write_rows(pieces, 0, 0, numbered(50, 100));
  store_->publish({.seq = seq, .layer = 0});
  expect_all(seq, numbered(0, 150));
}

// --- Codecs -------------------------------------------------------------------------------------

TEST_F(StoreTest, OneSequenceWithFourCodecs) {
  SpaceSpec spec = make_spec("m", 1, 2, 16);
  spec.params.codec = KVM_CODEC_F32;
  const kvm_space_id space = store_->register_space(spec).value();
  Sequence* seq = create(space);
  const std::vector<uint64_t> tokens = numbered(0, 4 * kPageTokens + 20);
  ASSERT_TRUE(append(*store_, seq, 0, tokens).is_ok());
  Sequence* child = fork(seq);
  const uint64_t bytes_before = store_->client_bytes(client_);
  ASSERT_TRUE(apply_action(&store_->memory(), seq,
                           {.kind = policies::ActionKind::kDemote,
                            .range = {0, kPageTokens},
                            .codec_k = CodecId::kBf16,
                            .codec_v = CodecId::kBf16})
                  .is_ok());
  ASSERT_TRUE(apply_action(&store_->memory(), seq,
                           {.kind = policies::ActionKind::kDemote,
                            .range = {kPageTokens, 2 * kPageTokens},
                            .codec_k = CodecId::kF16,
                            .codec_v = CodecId::kF32})
                  .is_ok());
  ASSERT_TRUE(apply_action(&store_->memory(), seq,
                           {.kind = policies::ActionKind::kDemote,
                            .range = {2 * kPageTokens, 3 * kPageTokens},
                            .codec_k = CodecId::kF8,
                            .codec_v = CodecId::kI8})
                  .is_ok());
  std::vector<KvRun> runs;
  store_->collect_runs(seq, 0, 0, &runs);
  ASSERT_EQ(runs.size(), 5u);
  EXPECT_EQ(runs[0].k.codec, CodecId::kBf16);
  EXPECT_EQ(runs[1].k.codec, CodecId::kF16);
  EXPECT_EQ(runs[1].v.codec, CodecId::kF32);
  EXPECT_EQ(runs[2].v.codec, CodecId::kI8);
  EXPECT_EQ(runs[2].k.codec, CodecId::kF8);
  EXPECT_NE(runs[2].k.params, nullptr);
  EXPECT_EQ(runs[1].k.params, nullptr);
  EXPECT_NE(runs[2].v.params, nullptr);
  EXPECT_EQ(runs[3].k.codec, CodecId::kF32);
  expect_all(seq, tokens, [](uint64_t position, uint32_t plane) {
    const bool third = position / kPageTokens == 2;
    return third ? std::vector<CodecId>{plane == 0 ? CodecId::kF8 : CodecId::kI8}
                 : std::vector<CodecId>{};
  });
  // The fork has the old pages, so nothing is saved yet; then it goes.
  expect_all(child, tokens);
  runs.clear();
  store_->collect_runs(child, 0, 0, &runs);
  EXPECT_EQ(runs[0].k.codec, CodecId::kF32);
  EXPECT_GT(store_->client_bytes(client_), bytes_before);
  store_->free_seq(child);
  EXPECT_LT(store_->client_bytes(client_), bytes_before);
  // Cut inside a re-encoded page: what follows is stored as the space says.
  ASSERT_TRUE(store_->truncate_seq(seq, 30).is_ok());
  ASSERT_TRUE(append(*store_, seq, 0, numbered(1000, 5)).is_ok());
  runs.clear();
  store_->collect_runs(seq, 0, 0, &runs);
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_EQ(runs[0].k.codec, CodecId::kF32);
  std::vector<uint64_t> want = numbered(0, 30);
  const std::vector<uint64_t> added = numbered(1000, 5);
  want.insert(want.end(), added.begin(), added.end());
  expect_all(seq, want);
}

// --- Policies -----------------------------------------------------------------------------------

TEST_F(StoreTest, SinksRecentFreesMemoryHeadByHead) {
  SpaceSpec spec = make_spec("m", 1, 4, 64);
  spec.policies = {sinks_recent(0, 0b1110, 4, 128)};
  const kvm_space_id space = store_->register_space(spec).value();
  Sequence* seq = create(space);
  for (uint32_t i = 0; i < 100; ++i) {
    ASSERT_TRUE(append(*store_, seq, 0, numbered(i * 100, 100)).is_ok());
  }
  // 10,000 tokens: one head keeps them all, three keep the first page and at most four more.
  const uint64_t head_page = 64 * 64 * 2 * 2;
  const kvm_seq_info info = store_->seq_info(seq);
  EXPECT_EQ(info.n_committed, 10000u);
  EXPECT_LE(info.bytes, 157 * head_page + 3 * 5 * head_page);
  EXPECT_GT(stats_of(*store_).n_pages_dropped, 140u);
  EXPECT_TRUE(store_->check_visible(seq, 0, {.first_query = 9999}).is_ok());
  EXPECT_EQ(store_->check_visible(seq, 0, {.first_query = 5000}).code(), KVM_ERR_PARTIAL);
  EXPECT_EQ(store_->check_read(seq, 0, 100, 1).code(), KVM_ERR_PARTIAL);
  EXPECT_TRUE(store_->check_read(seq, 0, 9900, 100).is_ok());
  EXPECT_TRUE(store_->check_read(seq, 0, 0, 64).is_ok());
  EXPECT_EQ(store_->fork_seq(seq, 5000).status().code(), KVM_ERR_PARTIAL);
  EXPECT_EQ(store_->truncate_seq(seq, 5000).code(), KVM_ERR_PARTIAL);
  EXPECT_EQ(store_->length(seq, 0), 10000u);
}

TEST_F(StoreTest, NothingUncommittedIsDropped) {
  SpaceSpec spec = make_spec("m", 2, 1);
  spec.policies = {sinks_recent(0, 0, 0, 1), sinks_recent(1, 0, 0, 1)};
  const kvm_space_id space = store_->register_space(spec).value();
  Sequence* manual = create(space, KVM_SEQ_MANUAL_COMMIT);
  ASSERT_TRUE(append_all(*store_, manual, numbered(0, 500)).is_ok());
  EXPECT_EQ(store_->seq_info(manual).n_entries_dropped, 0u);
  EXPECT_TRUE(store_->truncate_seq(manual, 3).is_ok());
  ASSERT_TRUE(append_all(*store_, manual, numbered(0, 497)).is_ok());
  EXPECT_EQ(store_->commit_seq(manual, 501).code(), KVM_ERR_INVALID);
  ASSERT_TRUE(store_->commit_seq(manual, 300).is_ok());
  settle(*store_, manual);
  EXPECT_EQ(store_->seq_info(manual).n_entries_dropped, 2u * 256);
  EXPECT_TRUE(store_->truncate_seq(manual, 300).is_ok());
  EXPECT_EQ(store_->n_committed(manual), 300u);
  // By itself, the shortest layer commits.
  Sequence* automatic = create(space);
  ASSERT_TRUE(append(*store_, automatic, 0, numbered(0, 500)).is_ok());
  EXPECT_EQ(store_->n_committed(automatic), 0u);
  EXPECT_EQ(store_->seq_info(automatic).n_entries_dropped, 0u);
  ASSERT_TRUE(append(*store_, automatic, 1, numbered(0, 70)).is_ok());
  EXPECT_EQ(store_->n_committed(automatic), 70u);
  EXPECT_EQ(store_->seq_info(automatic).n_entries_dropped, 2u * 64);
}

TEST_F(StoreTest, ActionsAreChecked) {
  const kvm_space_id space = store_->register_space(make_spec("m", 2, 2)).value();
  Sequence* seq = create(space);
  ASSERT_TRUE(append_all(*store_, seq, numbered(0, 200)).is_ok());
  using policies::Action;
  using policies::ActionKind;
  const auto code = [&](const Action& action) {
    return apply_action(&store_->memory(), seq, action).code();
  };
  EXPECT_EQ(code({.layer = 2, .range = {0, 64}}), KVM_ERR_INVALID);
  EXPECT_EQ(code({.class_index = 1, .range = {0, 64}}), KVM_ERR_INVALID);
  EXPECT_EQ(code({.range = {0, 63}}), KVM_ERR_INVALID);
  EXPECT_EQ(code({.range = {64, 256}}), KVM_ERR_INVALID);  // beyond the commit point
  EXPECT_EQ(code({.range = {128, 64}}), KVM_ERR_INVALID);
  EXPECT_EQ(code({.kind = ActionKind::kFold, .range = {0, 64}}), KVM_ERR_UNSUPPORTED);
  expect_all(seq, numbered(0, 200));
  EXPECT_EQ(code({.kind = ActionKind::kDrop, .range = {64, 128}}), KVM_OK);
  EXPECT_EQ(store_->check_visible(seq, 0, {.first_query = 199}).code(), KVM_ERR_PARTIAL);
  EXPECT_TRUE(store_->check_visible(seq, 1, {.first_query = 199}).is_ok());
}

// --- Observations -------------------------------------------------------------------------------

TEST_F(StoreTest, ObservationsAreKeptChargedForkedAndCut) {
  const kvm_space_id space = store_->register_space(make_spec("m", 2, 1)).value();
  Sequence* seq = create(space);
  ASSERT_TRUE(append_all(*store_, seq, numbered(0, 1000)).is_ok());
  const uint64_t page_bytes = store_->client_bytes(client_);
  std::vector<float> queries(400 * 8);
  for (size_t i = 0; i < queries.size(); ++i) {
    queries[i] = static_cast<float>(i);
  }
  const std::vector<float> ones(1000, 1.0f);
  ObserveInput input = {.layer = 1,
                        .query_position = 600,
                        .n_rows = 400,
                        .q = queries.data(),
                        .column_begin = 0,
                        .n_columns = 1000,
                        .column_sums = ones.data()};
  ASSERT_TRUE(store_->observe(seq, input).is_ok());
  ObservedView view = store_->observed(seq, 1);
  EXPECT_EQ(view.n_rows, kMaxObservedRows);
  EXPECT_EQ(view.query_position, 600u + 400 - kMaxObservedRows);
  EXPECT_EQ(view.q[0], static_cast<float>((400 - kMaxObservedRows) * 8));
  EXPECT_EQ(view.n_columns, 1000u);
  const uint64_t observed_bytes = (kMaxObservedRows * 8 + 1000) * 4;
  EXPECT_EQ(store_->client_bytes(client_), page_bytes + observed_bytes);
  EXPECT_EQ(stats_of(*store_).observed_bytes, observed_bytes);
  EXPECT_EQ(store_->seq_info(seq).bytes_observed, observed_bytes);
  EXPECT_EQ(store_->seq_info(seq).n_rows_observed, kMaxObservedRows);
  store_->check_accounts();

  // A fork shares it, also in part; adding to one does not show in the other.
  Sequence* child = fork(seq, 800);
  EXPECT_EQ(stats_of(*store_).observed_bytes, observed_bytes);
  view = store_->observed(child, 1);
  EXPECT_EQ(view.n_rows, 800 - (600u + 400 - kMaxObservedRows));
  EXPECT_EQ(view.n_columns, 800u);
  input = {.layer = 1,
           .query_position = 800,
           .n_rows = 3,
           .q = queries.data(),
           .column_begin = 700,
           .n_columns = 50,
           .column_sums = ones.data()};
  ASSERT_TRUE(store_->observe(child, input).is_ok());
  view = store_->observed(child, 1);
  EXPECT_EQ(view.n_rows, 800 - (600u + 400 - kMaxObservedRows) + 3);
  EXPECT_EQ(view.column_sums[699], 1.0f);
  EXPECT_EQ(view.column_sums[700], 2.0f);
  EXPECT_EQ(view.column_sums[750], 1.0f);
  EXPECT_EQ(store_->observed(seq, 1).column_sums[700], 1.0f);
  store_->check_accounts();
  // In place; rows that do not follow replace.
  input.query_position = 10;
  input.n_columns = 0;
  ASSERT_TRUE(store_->observe(child, input).is_ok());
  EXPECT_EQ(store_->observed(child, 1).n_rows, 3u);
  EXPECT_EQ(store_->observed(child, 1).query_position, 10u);
  store_->check_accounts();

  // Queries may lie beyond the end; a cut there changes nothing.
  input = {.layer = 0, .query_position = 1500, .n_rows = 3, .q = queries.data()};
  ASSERT_TRUE(store_->observe(seq, input).is_ok());
  ASSERT_TRUE(store_->truncate_seq(seq, 1000).is_ok());
  EXPECT_EQ(store_->observed(seq, 0).n_rows, 3u);

  ASSERT_TRUE(store_->truncate_seq(seq, 100).is_ok());
  EXPECT_EQ(store_->observed(seq, 0).n_rows, 0u);
  EXPECT_EQ(store_->observed(seq, 1).n_rows, 0u);
  EXPECT_EQ(store_->observed(seq, 1).n_columns, 100u);
  store_->check_accounts();
  // Refusals.
  std::vector<float> bad(8, 0.0f);
  bad[3] = std::nanf("");
  EXPECT_EQ(store_->observe(seq, {.layer = 0, .n_rows = 1, .q = bad.data()}).code(),
            KVM_ERR_INVALID);
  EXPECT_EQ(store_->observe(seq, {.layer = 2}).code(), KVM_ERR_INVALID);
  EXPECT_EQ(
      store_
          ->observe(seq,
                    {.layer = 0, .column_begin = 99, .n_columns = 2, .column_sums = ones.data()})
          .code(),
      KVM_ERR_INVALID);
  EXPECT_EQ(
      store_
          ->observe(
              seq,
              {.layer = 0, .column_begin = UINT64_MAX, .n_columns = 2, .column_sums = ones.data()})
          .code(),
      KVM_ERR_INVALID);
  store_->free_seq(seq);
  store_->free_seq(child);
  EXPECT_EQ(stats_of(*store_).observed_bytes, 0u);
  EXPECT_EQ(store_->client_bytes(client_), 0u);
}

// What a client leaves behind goes in portions, and all of it.
TEST_F(StoreTest, SequencesOfAClientGoBitByBit) {
  const kvm_space_id space = store_->register_space(make_spec("m", 3, 1)).value();
  const ClientId leaving = store_->add_client({});
  std::set<kvm_seq_id> seqs;
  for (int i = 0; i < 40; ++i) {
    Sequence* own = create(space);  // of another client, in between
    ASSERT_TRUE(append(*store_, own, 0, numbered(0, 5)).is_ok());
    const kvm_seq_id id = store_->create_seq(leaving, space, 0).value();
    seqs.insert(id);
    for (uint32_t layer = 0; layer < 3; ++layer) {
      Sequence* seq = store_->find_seq(leaving, id).value();
      ASSERT_TRUE(append(*store_, seq, layer, numbered(0, 10 * kPageTokens)).is_ok());
    }
  }
  std::vector<kvm_seq_id> gone;
  uint32_t n_portions = 0;
  uint64_t n_pages = stats_of(*store_).n_pages;
  while (store_->free_some(leaving, 64, &gone)) {
    const uint64_t n_left = stats_of(*store_).n_pages;
    EXPECT_LE(n_pages - n_left, 64u + 10u) << "one list beyond the portion at most";
    n_pages = n_left;
    store_->check_accounts();
    ASSERT_LT(++n_portions, 1000u);
  }
  EXPECT_GT(n_portions, 10u);
  EXPECT_EQ(std::set<kvm_seq_id>(gone.begin(), gone.end()), seqs);
  EXPECT_EQ(gone.size(), seqs.size());
  EXPECT_EQ(store_->client_bytes(leaving), 0u);
  EXPECT_EQ(stats_of(*store_).n_pages, 40u);
  store_->remove_client(leaving);
}

TEST_F(StoreTest, ObservationsMeetTheQuota) {
  const kvm_space_id space = store_->register_space(make_spec("m", 1, 1)).value();
  const ClientId poor = store_->add_client(limited(3000));
  Sequence* seq = store_->find_seq(poor, store_->create_seq(poor, space, 0).value()).value();
  const std::vector<float> queries(100 * 8, 0.5f);
  EXPECT_EQ(store_->observe(seq, {.n_rows = 100, .q = queries.data()}).code(), KVM_ERR_QUOTA);
  EXPECT_EQ(store_->client_bytes(poor), 0u);
  EXPECT_TRUE(store_->observe(seq, {.n_rows = 90, .q = queries.data()}).is_ok());
  EXPECT_EQ(store_->observe(seq, {.query_position = 90, .n_rows = 10, .q = queries.data()}).code(),
            KVM_ERR_QUOTA);
  EXPECT_EQ(store_->observed(seq, 0).n_rows, 90u);
  store_->remove_client(poor);
}

// --- Memory -------------------------------------------------------------------------------------

TEST(Store, EmptiedMemoryGoesBack) {
  const auto store =
      Store::open({.host_capacity_bytes = 256 * kMiB, .cached_bytes = 4 * kMiB}).value();
  const ClientId client = store->add_client({});
  const kvm_space_id space = store->register_space(make_spec("m", 1, 4, 128)).value();
  Sequence* seq = store->find_seq(client, store->create_seq(client, space, 0).value()).value();
  ASSERT_TRUE(append_unwritten(*store, seq, 0, 1600 * kPageTokens).is_ok());
  EXPECT_EQ(stats_of(*store).host_used_bytes, 200 * kMiB);
  store->free_seq(seq);
  while (store->housekeep()) {
  }
  EXPECT_EQ(stats_of(*store).host_used_bytes, 4 * kMiB);
  EXPECT_EQ(stats_of(*store).host_page_bytes, 0u);
}

// --- Volume -------------------------------------------------------------------------------------

// Many sequences and operations on metadata; contents are model_test's.
TEST(Store, ManySequences) {
  const bool nightly = std::getenv("KVM_NIGHTLY") != nullptr;
  const uint32_t n_sequences = 2000;
  const uint32_t n_operations = nightly ? 200 : 10;
  const auto store = open_store(uint64_t{4} << 30);
  const ClientId client = store->add_client({});
  SpaceSpec spec = make_spec("m", 2, 2);
  spec.policies = {sinks_recent(0, 0b10, 4, 64)};
  const kvm_space_id space = store->register_space(spec).value();
  std::vector<Sequence*> seqs;
  std::mt19937 generator(1);
  const auto pick = [&](uint64_t n) { return static_cast<uint32_t>(generator() % n); };
  const auto find = [&](kvm_seq_id id) { return store->find_seq(client, id).value(); };
  for (uint32_t i = 0; i < n_sequences; ++i) {
    seqs.push_back(find(store->create_seq(client, space, 0).value()));
  }
  std::vector<AppendPiece> pieces;
  for (uint32_t i = 0; i < n_sequences * n_operations; ++i) {
    Sequence*& seq = seqs[pick(seqs.size())];
    switch (pick(8)) {
      case 0: {
        store->free_seq(seq);
        seq = find(store->fork_seq(seqs[&seq == &seqs[0] ? 1 : 0], KVM_POSITION_END).value());
        break;
      }
      case 1: {
        const uint64_t length = store->length(seq, 0);
        (void)store->truncate_seq(seq, length - std::min<uint64_t>(length, pick(20))).is_ok();
        break;
      }
      default: {
        const std::vector<AppendItem> items = {{seq, 0, KVM_POSITION_END, 1 + pick(90)},
                                               {seq, 1, KVM_POSITION_END, 1 + pick(90)}};
        pieces.clear();
        ASSERT_TRUE(store->reserve_append(items, &pieces).is_ok());
        store->publish({.seq = seq, .layer = 1});
        store->publish({.seq = seq, .layer = 0});
        settle(*store, seq);
      }
    }
  }
  store->check_accounts();
  store->remove_client(client);
  EXPECT_EQ(stats_of(*store).n_pages, 0u);
}

}  // namespace
}  // namespace kvm::engine
