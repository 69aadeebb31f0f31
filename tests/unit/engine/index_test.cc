// SPDX-License-Identifier: Apache-2.0
// The storage of indexes: whatever happens to a sequence, what its index holds is what one built
// from scratch would hold, byte for byte; forks share it, and every byte is charged and given back.
#include "engine/index/sequence_index.h"
#include "engine/store/layer_index.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/index/index_work.h"
#include "tests/unit/engine/store_testbed.h"

namespace kvm::engine {
namespace {

constexpr uint32_t kDim = 32;
constexpr uint32_t kMinTokens = 256;

kvm_index_params index_params(uint32_t kind, uint64_t head_mask = 0) {
  kvm_index_params params{};
  params.kv_head_mask[0] = head_mask;
  params.kind = kind;
  params.min_tokens = kMinTokens;
  params.lsh_bits = kind == KVM_INDEX_LSH ? 4 : 0;
  params.lsh_tables = kind == KVM_INDEX_LSH ? 20 : 0;
  return params;
}

// Two heads: one sketched, one hashed.
SpaceSpec indexed_spec(uint32_t n_layers = 1) {
  SpaceSpec spec = make_spec("indexed", n_layers, 2, kDim);
  spec.indexes = {index_params(KVM_INDEX_SKETCH, 1), index_params(KVM_INDEX_LSH, 2)};
  return spec;
}

// Two heads of one kind.
SpaceSpec alike_spec(uint32_t kind) {
  SpaceSpec spec = make_spec("alike", 1, 2, kDim);
  spec.indexes = {index_params(kind, 3)};
  return spec;
}

// Tokens from here on have keys whose channels are alike, but for those from kDrawnTogether on.
constexpr uint64_t kAlike = uint64_t{1} << 40;
constexpr uint64_t kDrawnTogether = uint64_t{1} << 41;

float key_element(uint64_t token, uint32_t head, uint32_t i) {
  const uint64_t bits = mix_seed(token, head, i);
  // Nearly normal, of unequal variances.
  const float sum = static_cast<float>((bits & 0xffff) + (bits >> 16 & 0xffff) +
                                       (bits >> 32 & 0xffff) + (bits >> 48)) /
                        65536.0f -
                    2.0f;
  const bool alike = token >= kAlike && token < kDrawnTogether;
  const float drawn = 0.05f + 8.0f * std::pow(0.8f, static_cast<float>(i));
  return sum * (alike ? 3.0f : drawn) + static_cast<float>(head);
}

void write_keys(const std::vector<AppendPiece>& pieces, std::span<const uint64_t> tokens) {
  float row[kDim];
  for (const AppendPiece& piece : pieces) {
    const tiers::SlabClass& slab = piece.cls->slab_class;
    for (uint32_t t = 0; t < piece.n_tokens; ++t) {
      for (uint32_t h = 0; h < slab.n_heads; ++h) {
        for (uint32_t i = 0; i < kDim; ++i) {
          row[i] = key_element(tokens[piece.token + t], piece.cls->kv_heads[h], i);
        }
        write_row(row, piece.k, kDim, h, piece.slot + t);
        write_row(row, piece.v, kDim, h, piece.slot + t);
      }
    }
  }
}

Status append_keys(Store& store, Sequence* seq, std::span<const uint64_t> tokens) {
  std::vector<AppendPiece> pieces;
  const AppendItem item = {.seq = seq, .n_tokens = static_cast<uint32_t>(tokens.size())};
  KVM_TRY(store.reserve_append({&item, 1}, &pieces));
  write_keys(pieces, tokens);
  store.publish({.seq = seq, .layer = 0});
  settle(store, seq);
  return Status::ok();
}

void build_index(Store& store, Sequence* seq, uint64_t n_append = 0) {
  IndexWork work;
  ThreadWorkspace workspace;
  JobPlan plan;
  work.add(seq, 0, n_append);
  while (work.next(store, 1, &plan) == IndexWork::Next::kTasks) {
    // The order within a job does not matter.
    for (uint32_t task = plan.n_tasks; task-- > 0;) {
      work.run(task, workspace);
    }
  }
}

// Everything that the index of a head says.
struct Content {
  std::map<uint64_t, std::vector<std::byte>> blocks;  // by position
  std::map<uint64_t, std::vector<std::byte>> tables;

  bool operator==(const Content&) const = default;
};

Content content_of(const Store& store, const Sequence* seq, uint32_t head) {
  std::vector<attention::SketchedRun> sketches;
  std::vector<attention::HashedRun> hashes;
  collect_head_index(seq, 0, head, store.length(seq, 0), &sketches, &hashes);
  Content content;
  for (const attention::SketchedRun& run : sketches) {
    const size_t size = hash_index::block_bytes(hash_index::frame_kind(*run.frame), kDim);
    for (uint32_t b = 0; b < run.n_blocks; ++b) {
      const std::byte* codes = run.blocks + b * size;
      content.blocks[run.position + b * uint64_t{kPageTokens}].assign(codes, codes + size);
    }
  }
  const Space& space = store.seq_space(seq);
  for (const attention::HashedRun& run : hashes) {
    const auto* tables = static_cast<const std::byte*>(run.tables);
    std::vector<std::byte>& bytes = content.tables[run.position];
    bytes.assign(tables, tables + hash_index::table_run_bytes(space.lsh, run.n_keys));
    const auto* center = reinterpret_cast<const std::byte*>(run.center);
    bytes.insert(bytes.end(), center, center + kDim * sizeof(float));
  }
  return content;
}

struct Rig {
  explicit Rig(uint64_t capacity_bytes = 256 * kMiB, uint64_t quota_bytes = 0,
               const SpaceSpec& spec = indexed_spec())
      : store(open_store(capacity_bytes, quota_bytes)) {
    client = store->add_client({});
    auto id = store->register_space(spec);
    EXPECT_TRUE(id.is_ok()) << id.status().message();
    space = id.value();
  }
  Sequence* create() {
    return store->find_seq(client, store->create_seq(client, space, 0).value()).value();
  }
  Sequence* fork(Sequence* parent, uint64_t n_tokens) {
    return store->find_seq(client, store->fork_seq(parent, n_tokens).value()).value();
  }

  std::unique_ptr<Store> store;
  ClientId client = 0;
  kvm_space_id space = 0;
};

TEST(Index, CoversWholeBlocksButTheLast) {
  Rig rig;
  Sequence* seq = rig.create();
  const std::vector<uint64_t> tokens = numbered(0, 1000);
  ASSERT_TRUE(append_keys(*rig.store, seq, tokens).is_ok());
  EXPECT_TRUE(content_of(*rig.store, seq, 0).blocks.empty());
  build_index(*rig.store, seq);
  rig.store->check_accounts();
  EXPECT_EQ(content_of(*rig.store, seq, 0).blocks.size(), (1000u - 64) / 64);
  EXPECT_TRUE(content_of(*rig.store, seq, 0).tables.empty());
  const Content hashed = content_of(*rig.store, seq, 1);
  EXPECT_TRUE(hashed.blocks.empty());
  // 896 tokens: 512 and 256 of them.
  ASSERT_EQ(hashed.tables.size(), 2u);
  EXPECT_EQ(hashed.tables.rbegin()->first, 512u);
}

TEST(Index, BeginsAtMinTokens) {
  Rig rig;
  Sequence* seq = rig.create();
  ASSERT_TRUE(append_keys(*rig.store, seq, numbered(0, kMinTokens + 63)).is_ok());
  build_index(*rig.store, seq);
  EXPECT_EQ(stats_of(*rig.store).index_bytes, 0u);
  // With an append in the same request, as if it had been appended before.
  build_index(*rig.store, seq, 1);
  EXPECT_NE(stats_of(*rig.store).index_bytes, 0u);
  ASSERT_TRUE(append_keys(*rig.store, seq, numbered(1000, 1)).is_ok());
  EXPECT_EQ(content_of(*rig.store, seq, 0).blocks.size(), kMinTokens / 64);
  rig.store->check_accounts();
}

TEST(Index, HashRunsAreAFunctionOfTheLength) {
  for (uint64_t n : {0u, 255u, 256u, 300u, 4096u, 8191u, 65535u, 65536u, 200000u}) {
    uint64_t end = 0;
    uint32_t size = hash_index::kMaxRunKeys;
    for (const HashRun& run : hash_runs(n, 300)) {
      EXPECT_EQ(run.position, end);
      EXPECT_LE(run.n_keys, size);
      end = run.end();
      size = run.n_keys;
    }
    EXPECT_EQ(end, n - n % 256);
  }
  EXPECT_EQ(hash_runs(65536 * 2 + 12288, 8192).size(), 4u);  // and 8192 + 4096
}

// The sequences of a random history, with what they hold.
class History {
 public:
  History(uint64_t seed, const SpaceSpec& spec) : random_(seed), rig_(256 * kMiB, 0, spec) {
    seqs_.emplace_back();
    seqs_.back().seq = rig_.create();
  }
  void step() {
    const size_t at = pick(0, seqs_.size() - 1);
    One& one = seqs_[at];
    const uint64_t length = one.tokens.size();
    if (one.work != nullptr) {
      go_on(&one);  // nothing else may happen to it
      return;
    }
    switch (pick(0, 9)) {
      case 0:
      case 1:
      case 2:
      case 3: {
        const uint64_t n = pick(0, 3) == 0 ? pick(1, 2500) : pick(1, 200);
        std::vector<uint64_t> fresh = numbered(next_token_, length > 9500 ? 1 : n);
        next_token_ += fresh.size();
        ASSERT_TRUE(append_keys(*rig_.store, one.seq, fresh).is_ok());
        one.tokens.insert(one.tokens.end(), fresh.begin(), fresh.end());
        break;
      }
      case 4:
        build_index(*rig_.store, one.seq, pick(0, 64));
        break;
      case 5:
      case 6:
        one.work = std::make_unique<IndexWork>();
        one.work->add(one.seq, 0, pick(0, 64));
        go_on(&one);
        break;
      case 7: {
        const uint64_t n =
            pick(0, 3) == 0 ? pick(0, length) : length - std::min(length, pick(0, 99));
        ASSERT_TRUE(rig_.store->truncate_seq(one.seq, n).is_ok());
        one.tokens.resize(n);
        break;
      }
      case 8:
        if (seqs_.size() < 6) {
          const uint64_t n = pick(0, 1) == 0 ? length : pick(length / 2, length);
          One child;
          child.seq = rig_.fork(one.seq, n);
          child.tokens.assign(one.tokens.begin(), one.tokens.begin() + static_cast<ptrdiff_t>(n));
          seqs_.push_back(std::move(child));
        }
        break;
      default:
        if (seqs_.size() > 1) {
          rig_.store->free_seq(one.seq);
          seqs_.erase(seqs_.begin() + static_cast<ptrdiff_t>(at));
        }
    }
    // What an open build is charged for is no index yet.
    if (std::none_of(seqs_.begin(), seqs_.end(), [](const One& o) { return o.n_tasks != 0; })) {
      rig_.store->check_accounts();
    }
  }
  void expect_as_from_scratch() {
    for (bool is_open = true; is_open;) {
      is_open = false;
      for (One& one : seqs_) {
        if (one.work != nullptr) {
          go_on(&one);
          is_open = true;
        }
      }
    }
    for (One& one : seqs_) {
      // Tables may have been made for tokens that did not come: they come now.
      const std::vector<uint64_t> last = numbered(next_token_, 64);
      next_token_ += last.size();
      ASSERT_TRUE(append_keys(*rig_.store, one.seq, last).is_ok());
      one.tokens.insert(one.tokens.end(), last.begin(), last.end());
      build_index(*rig_.store, one.seq);
      Sequence* fresh = rig_.create();
      if (!one.tokens.empty()) {
        ASSERT_TRUE(append_keys(*rig_.store, fresh, one.tokens).is_ok());
      }
      build_index(*rig_.store, fresh);
      for (uint32_t head = 0; head < 2; ++head) {
        EXPECT_TRUE(content_of(*rig_.store, one.seq, head) == content_of(*rig_.store, fresh, head))
            << "head " << head << ", " << one.tokens.size() << " tokens";
      }
      rig_.store->free_seq(fresh);
      n_tokens_ += one.tokens.size();
    }
  }
  void free_all() {
    for (const One& one : seqs_) {
      rig_.store->free_seq(one.seq);
    }
    rig_.store->check_accounts();
    EXPECT_EQ(stats_of(*rig_.store).index_bytes, 0u);
    EXPECT_EQ(rig_.store->client_bytes(rig_.client), 0u);
  }
  uint64_t n_tokens() const { return n_tokens_; }
  uint64_t n_waits() const { return n_waits_; }

 private:
  struct One {
    Sequence* seq = nullptr;
    std::vector<uint64_t> tokens;
    std::unique_ptr<IndexWork> work;  // with a build that is open, or waits for another's
    uint32_t n_tasks = 0;
  };
  // Runs the tasks of an open build and plans what comes next.
  void go_on(One* one) {
    ThreadWorkspace workspace;
    for (uint32_t task = 0; task < one->n_tasks; ++task) {
      one->work->run(task, workspace);
    }
    one->n_tasks = 0;
    JobPlan plan;
    switch (one->work->next(*rig_.store, 1, &plan)) {
      case IndexWork::Next::kTasks:
        one->n_tasks = plan.n_tasks;
        break;
      case IndexWork::Next::kWait:
        ++n_waits_;
        break;
      case IndexWork::Next::kDone:
        one->work.reset();
        break;
    }
  }
  uint64_t pick(uint64_t low, uint64_t high) {
    return std::uniform_int_distribution<uint64_t>(low, high)(random_);
  }

  std::mt19937_64 random_;
  Rig rig_;
  std::vector<One> seqs_;
  uint64_t next_token_ = 0;
  uint64_t n_tokens_ = 0;
  uint64_t n_waits_ = 0;
};

TEST(Index, IsWhatOneFromScratchWouldBe) {
  uint64_t n_tokens = 0;
  uint64_t n_waits = 0;
  const SpaceSpec specs[] = {indexed_spec(), alike_spec(KVM_INDEX_SKETCH),
                             alike_spec(KVM_INDEX_LSH)};
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    History history(seed, specs[seed % 3]);
    for (int i = 0; i < 100; ++i) {
      history.step();
    }
    history.expect_as_from_scratch();
    history.free_all();
    n_tokens += history.n_tokens();
    n_waits += history.n_waits();
  }
  EXPECT_GT(n_tokens, 12000u) << "these histories came to nothing";
  EXPECT_GT(n_waits, 10u) << "no sequence built what another shared";
}

TEST(Index, SecondFrameFromTheFirstRunWhateverTheCuts) {
  Rig rig;
  Sequence* once = rig.create();
  Sequence* often = rig.create();
  const std::vector<uint64_t> tokens = numbered(0, 8192 + 500);
  ASSERT_TRUE(append_keys(*rig.store, once, tokens).is_ok());
  build_index(*rig.store, once);
  for (size_t at = 0; at < tokens.size(); at += 700) {
    const size_t n = std::min<size_t>(700, tokens.size() - at);
    ASSERT_TRUE(append_keys(*rig.store, often, std::span(tokens).subspan(at, n)).is_ok());
    build_index(*rig.store, often);
  }
  EXPECT_EQ(content_of(*rig.store, once, 0).blocks.size(), (8192u + 500 - 64) / 64);
  EXPECT_TRUE(content_of(*rig.store, once, 0) == content_of(*rig.store, often, 0));
  EXPECT_TRUE(content_of(*rig.store, once, 1) == content_of(*rig.store, often, 1));
  rig.store->check_accounts();
}

// --- Kinds chosen again -------------------------------------------------------------------------

constexpr uint64_t kRun = 8192;
constexpr auto kLead = hash_index::SketchKind::kLead8Bits1;
constexpr auto kTwoBits = hash_index::SketchKind::kBits2;
using Kinds = std::vector<hash_index::SketchKind>;

// Of head 0, by run.
Kinds kinds_of(const Store& store, const Sequence* seq) {
  std::vector<attention::SketchedRun> sketches;
  std::vector<attention::HashedRun> hashes;
  collect_head_index(seq, 0, 0, store.length(seq, 0), &sketches, &hashes);
  std::map<uint64_t, hash_index::SketchKind> kinds;
  for (const attention::SketchedRun& run : sketches) {
    kinds[run.position / kRun] = hash_index::frame_kind(*run.frame);
  }
  Kinds found;
  for (const auto& [run, kind] : kinds) {
    found.push_back(kind);
  }
  return found;
}

void grow(Rig* rig, Sequence* seq, uint64_t first_token, uint64_t n) {
  ASSERT_TRUE(append_keys(*rig->store, seq, numbered(first_token, n)).is_ok());
  build_index(*rig->store, seq);
}

TEST(Index, KeysThatTurnFlatOrSharpChangeTheKindOfTheNextRun) {
  Rig rig;
  Sequence* seq = rig.create();
  grow(&rig, seq, kAlike, 2 * kRun);
  grow(&rig, seq, kDrawnTogether, kRun);
  grow(&rig, seq, 2 * kAlike - kRun, kRun);  // the last of those that are alike
  grow(&rig, seq, kAlike + 5 * kRun, 500);
  EXPECT_EQ(kinds_of(*rig.store, seq), (Kinds{kTwoBits, kTwoBits, kTwoBits, kLead, kTwoBits}));
  rig.store->check_accounts();
}

TEST(Index, ForksShareItUntilTheyGrow) {
  Rig rig;
  Sequence* parent = rig.create();
  ASSERT_TRUE(append_keys(*rig.store, parent, numbered(0, 5000)).is_ok());
  build_index(*rig.store, parent);
  const uint64_t before = stats_of(*rig.store).index_bytes;
  EXPECT_EQ(rig.store->seq_info(parent).bytes_index, before);
  Sequence* child = rig.fork(parent, KVM_POSITION_END);
  Sequence* shorter = rig.fork(parent, 3000);
  EXPECT_EQ(stats_of(*rig.store).index_bytes, before);
  EXPECT_EQ(content_of(*rig.store, child, 0), content_of(*rig.store, parent, 0));
  EXPECT_EQ(content_of(*rig.store, shorter, 0).blocks.size(), (3000u - 64) / 64);
  const Content of_parent = content_of(*rig.store, parent, 0);

  ASSERT_TRUE(append_keys(*rig.store, child, numbered(9000, 64)).is_ok());
  build_index(*rig.store, child);
  rig.store->check_accounts();
  // One page was copied for the sketches; no more than that was added but the tables.
  const uint64_t after = stats_of(*rig.store).index_bytes;
  EXPECT_GT(after, before);
  EXPECT_EQ(content_of(*rig.store, child, 0).blocks.size(), of_parent.blocks.size() + 1);
  EXPECT_TRUE(content_of(*rig.store, parent, 0) == of_parent);

  rig.store->free_seq(parent);
  rig.store->check_accounts();
  EXPECT_EQ(content_of(*rig.store, child, 0).blocks.size(), of_parent.blocks.size() + 1);
  rig.store->free_seq(child);
  rig.store->free_seq(shorter);
  rig.store->check_accounts();
  EXPECT_EQ(stats_of(*rig.store).index_bytes, 0u);
}

// A fork builds nothing, and what it shares with its parent and its siblings is built once, whoever
// needs it first.
TEST(Index, WhatForksShareIsBuiltOnce) {
  for (const uint32_t kind : {KVM_INDEX_SKETCH, KVM_INDEX_LSH}) {
    Rig rig(256 * kMiB, 0, alike_spec(kind));
    Sequence* parent = rig.create();
    ASSERT_TRUE(append_keys(*rig.store, parent, numbered(0, 20000)).is_ok());
    Sequence* child = rig.fork(parent, KVM_POSITION_END);
    Sequence* shorter = rig.fork(parent, 9000);
    Sequence* grandchild = rig.fork(child, 12000);
    const auto n_built = [&rig] { return stats_of(*rig.store).n_index_blocks; };
    EXPECT_EQ(n_built(), 0u);
    EXPECT_EQ(stats_of(*rig.store).index_bytes, 0u);
    // Of a fork's own tokens nobody else has the index.
    ASSERT_TRUE(append_keys(*rig.store, child, numbered(90000, 64)).is_ok());
    ASSERT_TRUE(append_keys(*rig.store, parent, numbered(80000, 64)).is_ok());
    build_index(*rig.store, grandchild);
    // Tables are of 256 tokens and more.
    const uint64_t of_grandchild = kind == KVM_INDEX_SKETCH ? indexable_blocks(12000) : 184;
    EXPECT_EQ(n_built(), 2 * of_grandchild);
    build_index(*rig.store, child);
    build_index(*rig.store, shorter);
    build_index(*rig.store, parent);
    const uint64_t whole = 2 * indexable_blocks(20000);
    if (kind == KVM_INDEX_SKETCH) {
      EXPECT_EQ(n_built(), whole + 2 * 2) << "and a block of each head for child and parent";
    } else {
      EXPECT_LE(n_built(), 3 * whole) << "tables of the last runs are made again when these grow";
    }
    for (Sequence* seq : {parent, child, shorter, grandchild}) {
      rig.store->free_seq(seq);
    }
    rig.store->check_accounts();
    EXPECT_EQ(stats_of(*rig.store).index_bytes, 0u);
  }
}

// What is open is not shared with a fork's copy: tasks write into its last page.
TEST(Index, ACopyOfOneThatIsBuiltHasWholePages) {
  Rig rig(256 * kMiB, 0, alike_spec(KVM_INDEX_SKETCH));
  Sequence* parent = rig.create();
  std::vector<uint64_t> tokens = numbered(0, 5000);
  ASSERT_TRUE(append_keys(*rig.store, parent, tokens).is_ok());
  build_index(*rig.store, parent);
  Sequence* child = rig.fork(parent, KVM_POSITION_END);
  const std::vector<uint64_t> more = numbered(5000, 2000);
  ASSERT_TRUE(append_keys(*rig.store, parent, more).is_ok());
  StoreMemory* memory = &rig.store->memory();
  PlannedBuild build = plan_index_build(memory, parent, 0, 0, 1 << 20);
  ASSERT_NE(build.slice, nullptr);
  const uint64_t begin = build.slice->position_begin() / kPageTokens;
  open_index_build(memory, build.slice.get());
  EXPECT_NE(begin % kIndexPageBlocks, 0u);
  const uint64_t length = 2048;
  ASSERT_TRUE(rig.store->truncate_seq(child, length + 100).is_ok());
  Sequence* grandchild = rig.fork(child, KVM_POSITION_END);
  EXPECT_TRUE(plan_index_build(memory, child, 0, 64, 1 << 20).slice == nullptr);
  close_index_build(memory, build.slice.get());
  build.slice.reset();
  tokens.resize(length + 100);
  const std::vector<uint64_t> fresh = numbered(50000, 500);
  tokens.insert(tokens.end(), fresh.begin(), fresh.end());
  ASSERT_TRUE(append_keys(*rig.store, grandchild, fresh).is_ok());
  build_index(*rig.store, grandchild);
  Sequence* scratch = rig.create();
  ASSERT_TRUE(append_keys(*rig.store, scratch, tokens).is_ok());
  build_index(*rig.store, scratch);
  EXPECT_TRUE(content_of(*rig.store, grandchild, 0) == content_of(*rig.store, scratch, 0));
  rig.store->check_accounts();
}

// The parent's tables of these positions are of other tokens.
TEST(Index, ForksThatDivergeHashTheirOwnTokens) {
  for (const bool truncates : {false, true}) {
    Rig rig;
    Sequence* parent = rig.create();
    std::vector<uint64_t> tokens = numbered(0, 1100);
    ASSERT_TRUE(append_keys(*rig.store, parent, tokens).is_ok());
    build_index(*rig.store, parent);
    Sequence* child = rig.fork(parent, truncates ? 1100 : 700);
    if (truncates) {
      ASSERT_TRUE(rig.store->truncate_seq(child, 700).is_ok());
    }
    tokens.resize(700);
    const std::vector<uint64_t> fresh = numbered(5000, 400);
    tokens.insert(tokens.end(), fresh.begin(), fresh.end());
    ASSERT_TRUE(append_keys(*rig.store, child, fresh).is_ok());
    build_index(*rig.store, child);
    rig.store->check_accounts();

    Sequence* scratch = rig.create();
    ASSERT_TRUE(append_keys(*rig.store, scratch, tokens).is_ok());
    build_index(*rig.store, scratch);
    EXPECT_EQ(content_of(*rig.store, scratch, 1).tables.size(), 1u);
    for (const uint32_t head : {0u, 1u}) {
      EXPECT_TRUE(content_of(*rig.store, child, head) == content_of(*rig.store, scratch, head))
          << "head " << head << (truncates ? ", truncated" : ", forked");
    }
  }
}

TEST(Index, WithoutMemoryTokensStayUnindexed) {
  const std::vector<uint64_t> tokens = numbered(0, 4000);
  uint64_t page_bytes = 0;
  uint64_t all_bytes = 0;
  {
    Rig rig;
    Sequence* seq = rig.create();
    ASSERT_TRUE(append_keys(*rig.store, seq, tokens).is_ok());
    page_bytes = rig.store->client_bytes(rig.client);
    build_index(*rig.store, seq);
    all_bytes = rig.store->client_bytes(rig.client);
  }
  ASSERT_GT(all_bytes, page_bytes);
  for (const uint64_t part : {0u, 1u, 2u, 3u}) {
    const uint64_t quota = page_bytes + (all_bytes - page_bytes) * part / 4;
    Rig rig(256 * kMiB, quota);
    Sequence* seq = rig.create();
    ASSERT_TRUE(append_keys(*rig.store, seq, tokens).is_ok());
    build_index(*rig.store, seq);
    rig.store->check_accounts();
    EXPECT_LE(rig.store->client_bytes(rig.client), quota);
    EXPECT_GT(stats_of(*rig.store).n_index_refused, 0u) << part;
    const uint64_t refused = stats_of(*rig.store).n_index_refused;
    build_index(*rig.store, seq);  // not again at every request
    EXPECT_EQ(stats_of(*rig.store).n_index_refused, refused);
  }
}

// Each block counts once, however often it is asked for again.
TEST(Index, RefusalsAreNotCountedAgainByRetries) {
  Rig rig(256 * kMiB, 0);
  const ClientId poor = rig.store->add_client(limited(7 * kMiB));
  Sequence* seq =
      rig.store->find_seq(poor, rig.store->create_seq(poor, rig.space, 0).value()).value();
  // 256 bytes a token: the last MiB holds some pages of an index, and then no more.
  uint64_t n = 0;
  for (; rig.store->client_bytes(poor) < 6 * kMiB; n += 2500) {
    ASSERT_TRUE(append_keys(*rig.store, seq, numbered(n, 2500)).is_ok());
    build_index(*rig.store, seq);
  }
  for (int i = 0; i < 4; ++i, n += 2200) {
    (void)append_keys(*rig.store, seq, numbered(n, 1000)).is_ok();
    build_index(*rig.store, seq);
  }
  const uint64_t n_blocks = indexable_blocks(rig.store->length(seq, 0));
  EXPECT_LE(stats_of(*rig.store).n_index_refused, 2 * n_blocks);
  rig.store->check_accounts();
}

// --- Making way ---------------------------------------------------------------------------------

bool has_index(const Store& store, const Sequence* seq) {
  return !content_of(store, seq, 0).blocks.empty() || !content_of(store, seq, 1).tables.empty();
}

TEST(Index, MakesWayForAppendsWithinAQuota) {
  const std::vector<uint64_t> tokens = numbered(0, 4000);
  uint64_t page_bytes = 0;
  {
    Rig rig;
    Sequence* seq = rig.create();
    ASSERT_TRUE(append_keys(*rig.store, seq, tokens).is_ok());
    page_bytes = rig.store->client_bytes(rig.client);
  }
  // Room for two such sequences, and no index beside them.
  Rig rig(256 * kMiB, 2 * page_bytes);
  Sequence* first = rig.create();
  Sequence* second = rig.create();
  ASSERT_TRUE(append_keys(*rig.store, first, tokens).is_ok());
  build_index(*rig.store, first);
  ASSERT_TRUE(has_index(*rig.store, first));
  const uint64_t n_made = stats_of(*rig.store).n_index_blocks;
  const Status status = append_keys(*rig.store, second, tokens);
  EXPECT_TRUE(status.is_ok()) << status.message();
  EXPECT_FALSE(has_index(*rig.store, first));
  EXPECT_EQ(stats_of(*rig.store).n_index_dropped, n_made);
  EXPECT_EQ(stats_of(*rig.store).index_bytes, 0u);
  rig.store->check_accounts();
  // Not built again only to go again; but once there is room.
  build_index(*rig.store, first);
  EXPECT_EQ(stats_of(*rig.store).n_index_blocks, n_made);
  rig.store->free_seq(second);
  build_index(*rig.store, first);
  EXPECT_TRUE(has_index(*rig.store, first));
  rig.store->check_accounts();

  // What does not fit without any index drops none.
  Sequence* third = rig.create();
  EXPECT_EQ(append_keys(*rig.store, third, numbered(0, 4200)).code(), KVM_ERR_QUOTA);
  EXPECT_TRUE(has_index(*rig.store, first));
}

TEST(Index, MakesWayForAppendsWithinTheCapacity) {
  const auto fill = [](bool is_indexed) {
    Rig rig(24 * kMiB);
    Sequence* first = rig.create();
    EXPECT_TRUE(append_keys(*rig.store, first, numbered(0, 20000)).is_ok());
    if (is_indexed) {
      build_index(*rig.store, first);
      EXPECT_TRUE(has_index(*rig.store, first));
    }
    // Of another client, whose quota does not matter here.
    const ClientId other = rig.store->add_client({});
    Sequence* second =
        rig.store->find_seq(other, rig.store->create_seq(other, rig.space, 0).value()).value();
    uint64_t n = 0;
    Status status;
    while (status.is_ok()) {
      status = append_keys(*rig.store, second, numbered(n, 500));
      n += status.is_ok() ? 500 : 0;
      rig.store->check_accounts();
    }
    EXPECT_EQ(status.code(), KVM_ERR_NO_SPACE);
    EXPECT_EQ(has_index(*rig.store, first), false);
    return n;
  };
  const uint64_t without = fill(false);
  EXPECT_GT(without, 10000u);
  EXPECT_EQ(fill(true), without);
}

TEST(Index, MakesWayForObservations) {
  uint64_t quota_bytes = 0;
  {
    Rig rig;
    Sequence* seq = rig.create();
    ASSERT_TRUE(append_keys(*rig.store, seq, numbered(0, 6000)).is_ok());
    build_index(*rig.store, seq);
    quota_bytes = rig.store->client_bytes(rig.client) + 8192;  // a frame, while it is made
  }
  Rig rig(256 * kMiB, quota_bytes);
  Sequence* seq = rig.create();
  ASSERT_TRUE(append_keys(*rig.store, seq, numbered(0, 6000)).is_ok());
  build_index(*rig.store, seq);
  EXPECT_EQ(stats_of(*rig.store).n_index_refused, 0u);
  const std::vector<float> sums(6000 * 2);
  EXPECT_TRUE(rig.store->observe(seq, {.n_columns = 6000, .column_sums = sums.data()}).is_ok());
  EXPECT_GT(stats_of(*rig.store).n_index_dropped, 0u);
  rig.store->check_accounts();
}

struct Three : Rig {
  explicit Three(uint64_t quota_bytes) : Rig(256 * kMiB, quota_bytes) {
    for (uint64_t i = 0; i < 3; ++i) {
      seqs.push_back(create());
      EXPECT_TRUE(append_keys(*store, seqs.back(), numbered(i * 9000, 4000)).is_ok());
      build_index(*store, seqs.back());
    }
    other = create();
  }
  // Appends until an index goes.
  Status press() {
    const uint64_t dropped = stats_of(*store).n_index_dropped;
    Status status;
    while (status.is_ok() && stats_of(*store).n_index_dropped == dropped) {
      status = append_unwritten(*store, other, 0, 64);
    }
    store->check_accounts();
    return status;
  }

  std::vector<Sequence*> seqs;
  Sequence* other = nullptr;
};

TEST(Index, TheLongestUnusedGoesFirstAndAPinnedOneStays) {
  Three free(0);
  Three rig(free.store->client_bytes(free.client) + 8192);
  EXPECT_EQ(stats_of(*rig.store).n_index_refused, 0u);
  IndexPin pinned = pin_layer_index(rig.seqs[1], 0);
  { const IndexPin used = pin_layer_index(rig.seqs[0], 0); }
  // In the order of use: 2, 1, 0.
  EXPECT_TRUE(rig.press().is_ok());
  EXPECT_FALSE(has_index(*rig.store, rig.seqs[2]));
  EXPECT_TRUE(has_index(*rig.store, rig.seqs[1]));
  EXPECT_TRUE(has_index(*rig.store, rig.seqs[0]));
  EXPECT_TRUE(rig.press().is_ok());
  EXPECT_FALSE(has_index(*rig.store, rig.seqs[0])) << "1 is read by somebody";
  EXPECT_TRUE(has_index(*rig.store, rig.seqs[1]));
  EXPECT_EQ(rig.press().code(), KVM_ERR_QUOTA);
  EXPECT_TRUE(has_index(*rig.store, rig.seqs[1]));
  pinned = IndexPin();
  EXPECT_TRUE(rig.press().is_ok());
  EXPECT_FALSE(has_index(*rig.store, rig.seqs[1]));
}

// A fork's index is its parent's: it goes for both, and comes again for each.
TEST(Index, ASharedOneMakesWayForAllThatHaveIt) {
  Rig rig;
  Sequence* parent = rig.create();
  ASSERT_TRUE(append_keys(*rig.store, parent, numbered(0, 4000)).is_ok());
  build_index(*rig.store, parent);
  const Content before = content_of(*rig.store, parent, 0);
  Sequence* child = rig.fork(parent, 3000);
  const ClientId greedy = rig.store->add_client({});
  Sequence* other =
      rig.store->find_seq(greedy, rig.store->create_seq(greedy, rig.space, 0).value()).value();
  while (append_unwritten(*rig.store, other, 0, 6400).is_ok()) {
  }
  EXPECT_FALSE(has_index(*rig.store, parent));
  EXPECT_FALSE(has_index(*rig.store, child));
  rig.store->check_accounts();
  // Who looks for it, and more pressure, do not bring it back before there is room.
  { const IndexPin looked = pin_layer_index(parent, 0); }
  EXPECT_FALSE(append_unwritten(*rig.store, other, 0, 6400).is_ok());
  const uint64_t n_made = stats_of(*rig.store).n_index_blocks;
  build_index(*rig.store, parent);
  EXPECT_EQ(stats_of(*rig.store).n_index_blocks, n_made);
  EXPECT_EQ(stats_of(*rig.store).n_index_refused, 0u) << "it was asked for";
  rig.store->free_seq(other);
  build_index(*rig.store, child);
  build_index(*rig.store, parent);
  EXPECT_TRUE(content_of(*rig.store, parent, 0) == before);
  EXPECT_EQ(content_of(*rig.store, child, 0).blocks.size(), (3000u - 64) / 64);
  rig.store->check_accounts();
}

// --- Slices -------------------------------------------------------------------------------------

TEST(Index, WorkComesInBoundedJobs) {
  constexpr uint32_t kLayers = 16;
  Rig rig(256 * kMiB, 0, indexed_spec(kLayers));
  Sequence* seq = rig.create();
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    ASSERT_TRUE(append_unwritten(*rig.store, seq, layer, 20000).is_ok());
  }
  IndexWork work;
  ThreadWorkspace workspace;
  JobPlan plan;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    work.add(seq, layer, 0);
  }
  uint64_t n_before = 0;
  while (work.next(*rig.store, 1, &plan) == IndexWork::Next::kTasks) {
    // At most four heads' frames and a run's sums, or their codes and tables.
    EXPECT_LE(plan.n_tasks, 30u);
    for (uint32_t task = 0; task < plan.n_tasks; ++task) {
      work.run(task, workspace);
    }
    const uint64_t n_blocks = stats_of(*rig.store).n_index_blocks;
    EXPECT_LE(n_blocks - n_before, 4 * 1024u);
    n_before = n_blocks;
  }
  rig.store->check_accounts();
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    std::vector<attention::SketchedRun> sketches;
    std::vector<attention::HashedRun> hashes;
    collect_head_index(seq, layer, 0, 20000, &sketches, &hashes);
    uint64_t n_blocks = 0;
    for (const attention::SketchedRun& run : sketches) {
      n_blocks += run.n_blocks;
    }
    EXPECT_EQ(n_blocks, indexable_blocks(20000)) << layer;
  }
}

TEST(Index, StoppedWorkLeavesAnIndexOfWholeSlices) {
  Rig rig;
  Sequence* seq = rig.create();
  Sequence* scratch = rig.create();
  const std::vector<uint64_t> tokens = numbered(0, 20000);
  ASSERT_TRUE(append_keys(*rig.store, seq, tokens).is_ok());
  ASSERT_TRUE(append_keys(*rig.store, scratch, tokens).is_ok());
  IndexWork work;
  ThreadWorkspace workspace;
  JobPlan plan;
  work.add(seq, 0, 0);
  while (work.next(*rig.store, 1, &plan) == IndexWork::Next::kTasks) {
    for (uint32_t task = 0; task < plan.n_tasks; ++task) {
      work.run(task, workspace);
    }
    work.stop();
  }
  rig.store->check_accounts();
  EXPECT_EQ(content_of(*rig.store, seq, 0).blocks.size(), kFrameBlocks);
  build_index(*rig.store, seq);
  build_index(*rig.store, scratch);
  for (const uint32_t head : {0u, 1u}) {
    EXPECT_TRUE(content_of(*rig.store, seq, head) == content_of(*rig.store, scratch, head));
  }
}

// What a frame may take is charged before a task makes it.
TEST(Index, FramesAreChargedWhileTheyAreMade) {
  Rig rig;
  Sequence* seq = rig.create();
  ASSERT_TRUE(append_keys(*rig.store, seq, numbered(0, 4000)).is_ok());
  const uint64_t before = rig.store->client_bytes(rig.client);
  {
    const PlannedBuild build = plan_index_build(&rig.store->memory(), seq, 0, 0, 1 << 20);
    ASSERT_NE(build.slice, nullptr);
    EXPECT_GT(rig.store->client_bytes(rig.client), before + sizeof(hash_index::FramePtr));
  }
  EXPECT_EQ(rig.store->client_bytes(rig.client), before) << "given up";
  build_index(*rig.store, seq);
  rig.store->check_accounts();
}

// --- Tables -------------------------------------------------------------------------------------

TEST(TableReclaimer, UnmapsBitByBit) {
  tiers::MemoryBudget budget(64 * kMiB);
  TableReclaimer reclaimer(&budget);
  EXPECT_FALSE(reclaimer.unmap_some(kMiB));
  const uint64_t size = table_map_bytes(5 * kMiB + 1);
  EXPECT_EQ(size % 4096, 0u);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(budget.charge(size));
    std::byte* data = map_tables(size);
    ASSERT_NE(data, nullptr);
    std::memset(data, 1, size);
    reclaimer.reclaim(data, size);
  }
  EXPECT_EQ(budget.used_bytes(), 2 * size);
  int n_calls = 0;
  while (reclaimer.unmap_some(kMiB)) {
    ++n_calls;
    EXPECT_EQ(budget.used_bytes(), reclaimer.size_bytes());
  }
  EXPECT_EQ(n_calls, 11);  // 10 MiB and two OS pages
  EXPECT_EQ(budget.used_bytes(), 0u);
}

// Freeing a sequence does not unmap all its tables at once, but they are charged no more.
TEST(Index, TablesAreGivenBackBitByBit) {
  SpaceSpec spec = make_spec("indexed", 1, 4, 8);
  spec.indexes = {index_params(KVM_INDEX_LSH)};
  spec.indexes[0].lsh_bits = 8;
  spec.indexes[0].lsh_tables = 512;
  Rig rig(256 * kMiB, 0, spec);
  Sequence* seq = rig.create();
  ASSERT_TRUE(append_unwritten(*rig.store, seq, 0, 8192 + 64).is_ok());
  EXPECT_EQ(rig.store->seq_space(seq).planes.get(), nullptr) << "nobody has wanted them";
  build_index(*rig.store, seq);
  EXPECT_NE(rig.store->seq_space(seq).planes.get(), nullptr);
  EXPECT_GT(stats_of(*rig.store).index_bytes, 32 * kMiB);
  while (rig.store->housekeep()) {
  }
  rig.store->free_seq(seq);
  EXPECT_EQ(rig.store->client_bytes(rig.client), 0u);
  EXPECT_EQ(stats_of(*rig.store).index_bytes, 0u);
  rig.store->check_accounts();
  int n_calls = 0;
  while (rig.store->housekeep()) {
    ++n_calls;
    rig.store->check_accounts();
  }
  EXPECT_GE(n_calls, 2);
}

// --- Policies and observations ------------------------------------------------------------------

// A head of which no more is visible than is read anyway has nothing beside its keys.
TEST(Index, StreamingHeadsHaveNone) {
  SpaceSpec spec = make_spec("indexed", 3, 2, kDim);
  spec.indexes = {index_params(KVM_INDEX_SKETCH)};
  spec.policies = {sinks_recent(0, 1, 4, 64)};
  spec.layers = {{.layer_begin = 1, .n_layers = 1, .window = 128},
                 {.layer_begin = 2, .n_layers = 1, .window = 4096}};
  const auto resolved = resolve_space(spec);
  ASSERT_TRUE(resolved.is_ok()) << resolved.status().message();
  const Space& space = *resolved.value();
  EXPECT_EQ(space.index(0, 0).kind, uint32_t{KVM_INDEX_NONE});
  EXPECT_EQ(space.index(0, 1).kind, uint32_t{KVM_INDEX_SKETCH});
  EXPECT_EQ(space.index(1, 0).kind, uint32_t{KVM_INDEX_NONE});
  EXPECT_EQ(space.index(2, 1).kind, uint32_t{KVM_INDEX_SKETCH});
  // A layer that reads the same store without a window wants it.
  spec.layers[0] = {.layer_begin = 0, .n_layers = 1, .window = 128};
  spec.layers[1] = {.layer_begin = 1, .n_layers = 1, .kind = KVM_LAYER_ALIAS, .target = 0};
  const auto aliased = resolve_space(spec);
  ASSERT_TRUE(aliased.is_ok()) << aliased.status().message();
  EXPECT_EQ(aliased.value()->index(0, 1).kind, uint32_t{KVM_INDEX_SKETCH});
  EXPECT_EQ(aliased.value()->index(0, 0).kind, uint32_t{KVM_INDEX_NONE});
}

// Frames of runs of which all is dropped go with them.
TEST(Index, FramesOfDroppedRunsGo) {
  SpaceSpec spec = make_spec("indexed", 1, 1, kDim);
  spec.indexes = {index_params(KVM_INDEX_SKETCH_8I8)};
  spec.policies = {sinks_recent(0, 0, 4, 512)};
  Rig rig(256 * kMiB, 0, spec);
  Sequence* seq = rig.create();
  // The most of a run's length, early and late.
  uint64_t early_bytes = 0;
  uint64_t late_bytes = 0;
  for (uint64_t at = 0; at < 9 * 8192; at += 512) {
    build_index(*rig.store, seq);
    ASSERT_TRUE(append_keys(*rig.store, seq, numbered(at, 512)).is_ok());
    const uint64_t index_bytes = stats_of(*rig.store).index_bytes;
    early_bytes = at / 8192 == 2 ? std::max(early_bytes, index_bytes) : early_bytes;
    late_bytes = at / 8192 == 8 ? std::max(late_bytes, index_bytes) : late_bytes;
  }
  rig.store->check_accounts();
  EXPECT_GT(early_bytes, 0u);
  EXPECT_LE(late_bytes, early_bytes);
}

// The queries of a layer that aliases another shape the index that both read.
TEST(Index, QueriesOfAliasLayersAreUsed) {
  SpaceSpec spec = make_spec("indexed", 2, 1, kDim);
  spec.layers = {{.layer_begin = 1, .n_layers = 1, .kind = KVM_LAYER_ALIAS, .target = 0}};
  spec.indexes = {index_params(KVM_INDEX_SKETCH_8I8)};
  std::vector<float> queries(100 * kDim);
  for (size_t i = 0; i < queries.size(); ++i) {
    queries[i] = key_element(i / kDim, 3, static_cast<uint32_t>(kDim - 1 - i % kDim));
  }
  std::vector<Content> contents;
  for (const int layer : {-1, 0, 1}) {
    Rig rig(256 * kMiB, 0, spec);
    Sequence* seq = rig.create();
    ASSERT_TRUE(append_keys(*rig.store, seq, numbered(0, 2000)).is_ok());
    if (layer >= 0) {
      const ObserveInput input = {
          .layer = static_cast<uint32_t>(layer), .n_rows = 100, .q = queries.data()};
      ASSERT_TRUE(rig.store->observe(seq, input).is_ok());
    }
    build_index(*rig.store, seq);
    contents.push_back(content_of(*rig.store, seq, 0));
  }
  EXPECT_FALSE(contents[0] == contents[1]);
  EXPECT_TRUE(contents[1] == contents[2]);
}

TEST(Index, GoesWithTheTokensThatPoliciesDrop) {
  SpaceSpec spec = indexed_spec();
  spec.policies = {sinks_recent(0, 0, 4, 1024)};
  Rig rig(256 * kMiB, 0, spec);
  Sequence* seq = rig.create();
  uint64_t most = 0;
  for (uint64_t at = 0; at < 20000; at += 500) {
    ASSERT_TRUE(append_keys(*rig.store, seq, numbered(at, 500)).is_ok());
    build_index(*rig.store, seq);
    rig.store->check_accounts();
    most = std::max(most, content_of(*rig.store, seq, 0).blocks.size());
  }
  EXPECT_GT(most, 4u);
  EXPECT_LT(most, 2048u / 64);
  EXPECT_LT(content_of(*rig.store, seq, 0).blocks.size(), 2048u / 64);
  for (const auto& [position, codes] : content_of(*rig.store, seq, 0).blocks) {
    EXPECT_TRUE(position == 0 || position + 2048 > 20000) << position;
  }
}

// Blocks that are dropped as soon as they are indexed leave no page behind: there are that of the
// sinks and the last.
TEST(Index, PagesThatPoliciesEmptyAreGivenBack) {
  SpaceSpec spec = make_spec("indexed", 1, 1, kDim);
  spec.indexes = {index_params(KVM_INDEX_SKETCH_2BIT)};
  spec.policies = {sinks_recent(0, 0, 4, kMinTokens)};
  Rig rig(256 * kMiB, 0, spec);
  Sequence* seq = rig.create();
  uint64_t early_bytes = 0;
  for (uint64_t at = 0; at < 8192; at += 64) {
    build_index(*rig.store, seq, 64);
    ASSERT_TRUE(append_keys(*rig.store, seq, numbered(at, 64)).is_ok());
    rig.store->check_accounts();
    early_bytes = at == 3072 ? stats_of(*rig.store).index_bytes : early_bytes;
  }
  EXPECT_GT(early_bytes, 0u);
  EXPECT_LE(stats_of(*rig.store).index_bytes, early_bytes);
}

TEST(Index, ConfigurationIsPartOfTheSpace) {
  const auto store = open_store(64 * kMiB);
  ASSERT_TRUE(store->register_space(indexed_spec()).is_ok());
  EXPECT_TRUE(store->register_space(indexed_spec()).is_ok());
  SpaceSpec other = indexed_spec();
  other.indexes[0].n_recent = 128;
  const auto refused = store->register_space(other);
  ASSERT_FALSE(refused.is_ok());
  EXPECT_EQ(refused.status().code(), KVM_ERR_EXISTS);
  EXPECT_NE(refused.status().message().find("n_recent"), std::string::npos);
  other = indexed_spec();
  other.indexes[0].n_recent = 64;  // the default, written out
  EXPECT_TRUE(store->register_space(other).is_ok());
}

TEST(Index, BadConfigurationsHaveTheirSentence) {
  struct Bad {
    const char* sentence;
    void (*spoil)(SpaceSpec*);
  };
  const Bad cases[] = {
      {"kind is 6", [](SpaceSpec* s) { s->indexes[0].kind = 6; }},
      {"lsh_bits is 16", [](SpaceSpec* s) { s->indexes[1].lsh_bits = 16; }},
      {"lsh_tables is 1;", [](SpaceSpec* s) { s->indexes[1].lsh_tables = 1; }},
      {"lsh_bits * lsh_tables is 7680",
       [](SpaceSpec* s) {
         s->indexes[1].lsh_bits = 15;
         s->indexes[1].lsh_tables = 512;
       }},
      {"lsh_bits 3", [](SpaceSpec* s) { s->indexes[0].lsh_bits = 3; }},
      {"n_sinks is 65537", [](SpaceSpec* s) { s->indexes[0].n_sinks = 65537; }},
      {"n_recent is 65537", [](SpaceSpec* s) { s->indexes[0].n_recent = 65537; }},
      {"min_tokens is 255", [](SpaceSpec* s) { s->indexes[0].min_tokens = 255; }},
      {"min_tokens is 8193", [](SpaceSpec* s) { s->indexes[0].min_tokens = 8193; }},
      {"layer_begin is 1", [](SpaceSpec* s) { s->indexes[0].layer_begin = 1; }},
      {"kv head 2", [](SpaceSpec* s) { s->indexes[0].kv_head_mask[0] = 4; }},
      {"reserved[1] is 3", [](SpaceSpec* s) { s->indexes[0].reserved[1] = 3; }},
      {"must agree",
       [](SpaceSpec* s) {
         s->indexes.push_back(s->indexes[1]);
         s->indexes[2].seed = 5;
       }},
      {"n_indexes is 1025", [](SpaceSpec* s) { s->indexes.resize(1025, s->indexes[0]); }},
  };
  for (const Bad& bad : cases) {
    SpaceSpec spec = indexed_spec();
    bad.spoil(&spec);
    const auto resolved = resolve_space(spec);
    ASSERT_FALSE(resolved.is_ok()) << bad.sentence;
    EXPECT_EQ(resolved.status().code(), KVM_ERR_INVALID);
    EXPECT_NE(resolved.status().message().find(bad.sentence), std::string::npos)
        << resolved.status().message();
  }
}

}  // namespace
}  // namespace kvm::engine
