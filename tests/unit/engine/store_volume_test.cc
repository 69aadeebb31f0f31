// SPDX-License-Identifier: Apache-2.0
// A hundred thousand small operations of three clients of two users on a store with a slow tier,
// against a model that keeps every sequence as numbers of tokens. After each the rows of the
// sequence that it touched are right to the bit, and the accounts are what a walk over all
// sequences says. What policies and codecs do is in model_test.cc, with fewer operations.
// KVM_STORE_OPERATIONS=n: about so many; KVM_SEED=n: from this seed on.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/splitmix.h"
#include "codecs/rows.h"
#include "engine/store/stored_runs.h"
#include "tests/common/environment.h"
#include "tests/unit/engine/store_testbed.h"
#include "tiers/simulated/simulated_tier.h"

namespace kvm::engine {
namespace {

constexpr uint32_t kLayers = 2;
constexpr uint32_t kHeads = 2;
constexpr uint32_t kDim = 32;
constexpr uint64_t kMostTokens = 500;    // of a layer, or somewhat more
constexpr uint64_t kMostSequences = 10;  // of a client, or of a library

using Row = std::array<uint64_t, kDim * sizeof(float) / sizeof(uint64_t)>;

// What is stored of a token: bits, which nobody computes with.
Row row_of(uint32_t token, uint32_t layer, uint32_t head, uint32_t plane) {
  Row row;
  uint64_t at = ((uint64_t{token} * kLayers + layer) * kHeads + head) * 2 + plane;
  for (uint64_t& bits : row) {
    at += kSplitMixStep;
    bits = splitmix64(at);
  }
  return row;
}

struct ModelSeq {
  size_t user = 0;
  size_t client = 0;  // kPublished: nobody's
  std::array<std::vector<uint32_t>, kLayers> tokens;
};

class World {
 public:
  World(uint64_t seed, uint64_t capacity_bytes, uint64_t quota_bytes)
      : random_(seed), quota_bytes_(quota_bytes), tier_({.is_manual = true}) {
    store_ = Store::open({.host_capacity_bytes = capacity_bytes, .slow_tier = &tier_}).value();
    for (size_t client = 0; client < clients_.size(); ++client) {
      connect(client);
    }
    SpaceSpec spec = make_spec("volume", kLayers, kHeads, kDim);
    spec.params.codec = KVM_CODEC_F32;
    space_ = store_->register_space(spec).value();
  }

  void step() {
    const uint32_t dice = pick(1000);
    if (seqs_.empty() || dice < 50) {
      create();
    } else if (dice < 400) {
      append();
    } else if (dice < 500) {
      fork();
    } else if (dice < 600) {
      truncate();
    } else if (dice < 615) {
      free_one();
    } else if (dice < 625) {
      evict();
    } else if (dice < 680) {
      hand_over();
    } else if (dice < 684) {
      kill();
    } else if (dice < 760) {
      begin_transfers();
    } else if (dice < 960) {
      end_transfers();
    } else {
      pages().free_left_frames();
    }
    if (!seqs_.empty()) {
      check(pick_seq()->first);
    }
    expect_accounts();
  }

  void check_everything() {
    for (const auto& [id, model] : seqs_) {
      check_all(id);
    }
    store_->check_accounts();
  }

  // Frees everything; nothing must be left.
  void finish() {
    while (!seqs_.empty()) {
      evict();
    }
    while (!moves_.empty()) {
      end_transfer(0);
    }
    while (pages().free_left_frames()) {
    }
    expect_accounts();
    store_->check_accounts();
    EXPECT_EQ(stats_of(*store_).n_pages, 0u);
    EXPECT_EQ(tier_.used_bytes(), 0u);
  }

  uint64_t n_refused = 0;  // appends
  uint64_t n_sent = 0;
  uint64_t n_fetched = 0;
  uint64_t n_moved = 0;
  uint64_t n_failed = 0;  // transfers
  uint64_t n_given = 0;
  uint64_t n_killed = 0;
  uint64_t n_away_read = 0;

 private:
  using Seqs = std::map<kvm_seq_id, ModelSeq>;
  enum class What { kMove, kLeave, kFetch };
  struct Moving final : tiers::Transfer {
    void on_done() noexcept override { is_done = true; }
    What what = What::kMove;
    bool is_done = false;
    tiers::PageTable::Move move;
  };

  uint32_t pick(uint64_t n) { return static_cast<uint32_t>(random_() % n); }
  tiers::PageTable& pages() { return store_->memory().pages(); }

  void connect(size_t client) {
    clients_[client] = store_->add_client(client_spec(client, quota_bytes_, kMostSequences));
  }
  Seqs::iterator pick_seq() {
    auto it = seqs_.begin();
    std::advance(it, pick(seqs_.size()));
    return it;
  }
  // A client that may use the sequence.
  size_t user_of(const ModelSeq& model) {
    return model.client != kPublished ? model.client : model.user == 1 ? 2 : pick(2);
  }
  Sequence* find(kvm_seq_id id) { return store_->find_any_seq(id).value(); }
  void expect_refused(const Status& status) {
    EXPECT_TRUE(status.code() == KVM_ERR_QUOTA || status.code() == KVM_ERR_NO_SPACE)
        << status.message();
  }

  // --- Operations -------------------------------------------------------------------------------

  void create() {
    const size_t client = pick(clients_.size());
    const Result<kvm_seq_id> id = store_->create_seq(clients_[client], space_, 0);
    if (!id.is_ok()) {
      return expect_refused(id.status());
    }
    seqs_[id.value()] = {.user = kClientUsers[client], .client = client, .tokens = {}};
  }

  void append() {
    const auto it = pick_seq();
    ModelSeq& model = it->second;
    const Result<Sequence*> own = store_->find_seq(clients_[user_of(model)], it->first);
    if (model.client == kPublished) {
      EXPECT_EQ(own.status().code(), KVM_ERR_PERMISSION);
      return;
    }
    const uint32_t n = 1 + pick(pick(3) == 0 ? 150 : 5);
    const uint32_t first = pick(kLayers);
    const uint32_t end = pick(2) == 0 ? first + 1 : kLayers;
    std::vector<AppendItem> items;
    for (uint32_t layer = first; layer < end; ++layer) {
      if (model.tokens[layer].size() < kMostTokens) {
        items.push_back({.seq = own.value(), .layer = layer, .n_tokens = n});
      }
    }
    // While one comes, another may leave.
    while (!std::ranges::all_of(items, [&](const AppendItem& item) { return is_there(item); })) {
      for (const AppendItem& item : items) {
        if (!fetch_tail(item)) {
          return;
        }
      }
    }
    std::vector<AppendPiece> pieces;
    const Status status = store_->reserve_append(items, &pieces);
    if (!status.is_ok()) {
      ++n_refused;
      return expect_refused(status);
    }
    const bool undo = pick(10) == 0;
    for (const AppendPiece& piece : pieces) {
      write(piece, items[piece.item].layer);
    }
    for (const AppendItem& item : items) {
      if (undo) {
        store_->rollback(item.seq, item.layer);
        continue;
      }
      store_->publish(item);
      for (uint32_t i = 0; i < n; ++i) {
        model.tokens[item.layer].push_back(next_token_ + i);
      }
    }
    settle(*store_, own.value());
    next_token_ += n;
    check(it->first);
  }

  static tiers::PageRef tail_of(const AppendItem& item) {
    return item.seq->layer_lists(item.layer)[0].tail().page;
  }
  bool is_there(const AppendItem& item) {
    const tiers::PageRef page = tail_of(item);
    return page == tiers::kNoPage || pages().is_in_memory(page);
  }
  // Brings the tail into memory, where it is away. False: there was no room.
  bool fetch_tail(const AppendItem& item) {
    while (!is_there(item)) {
      if (pages().is_sealed(tail_of(item)) && !begin_fetch(tail_of(item))) {
        return false;
      }
      end_transfer(pick(moves_.size()));
    }
    return true;
  }

  static void write(const AppendPiece& piece, uint32_t slot, uint32_t layer, uint32_t token) {
    for (uint32_t head = 0; head < kHeads; ++head) {
      const Row k = row_of(token, layer, head, 0);
      const Row v = row_of(token, layer, head, 1);
      std::memcpy(place(piece.k, head, slot), k.data(), sizeof k);
      std::memcpy(place(piece.v, head, slot), v.data(), sizeof v);
    }
  }
  void write(const AppendPiece& piece, uint32_t layer) const {
    for (uint32_t i = 0; i < piece.n_tokens; ++i) {
      write(piece, piece.slot + i, layer, next_token_ + piece.token + i);
    }
  }
  static uint8_t* place(const KvPlane& plane, uint32_t head, uint32_t slot) {
    return const_cast<uint8_t*>(codecs::row_at(plane, kDim, head, slot));
  }

  static void cut(ModelSeq* model, uint64_t n) {
    for (std::vector<uint32_t>& tokens : model->tokens) {
      tokens.resize(std::min<uint64_t>(tokens.size(), n));
    }
  }

  void fork() {
    const auto it = pick_seq();
    ModelSeq child = it->second;
    child.client = user_of(child);
    const uint64_t longest = std::max(child.tokens[0].size(), child.tokens[1].size());
    const uint64_t n = pick(longest + 2);
    const Result<kvm_seq_id> id = store_->fork_seq(find(it->first), n, clients_[child.client]);
    if (n > longest) {
      EXPECT_EQ(id.status().code(), KVM_ERR_INVALID);
    } else if (!id.is_ok()) {
      expect_refused(id.status());
    } else {
      cut(&child, n);
      seqs_[id.value()] = std::move(child);
      check(id.value());
    }
  }

  void truncate() {
    const auto it = pick_seq();
    ModelSeq& model = it->second;
    if (model.client == kPublished) {
      return;
    }
    const uint64_t longest = std::max(model.tokens[0].size(), model.tokens[1].size());
    const uint64_t n = pick(2) == 0 ? pick(longest + 1) : longest - std::min<uint64_t>(longest, 9);
    const uint64_t max_pages = 1 + pick(4);
    Result<bool> part = store_->truncate_part(find(it->first), n, max_pages);
    while (part.is_ok() && !part.value()) {
      part = store_->truncate_part(find(it->first), n, max_pages);
    }
    EXPECT_TRUE(part.is_ok()) << part.status().message();
    cut(&model, n);
    check(it->first);
  }

  void free_one() {
    const auto it = pick_seq();
    const Result<Sequence*> seq =
        store_->find_seq(clients_[user_of(it->second)], it->first, Access::kUse);
    store_->free_seq(seq.value());
    seqs_.erase(it);
  }

  // As the service itself does, which may free what is anyone's.
  void evict() {
    const auto it = pick_seq();
    const uint64_t max_pages = 1 + pick(5);
    while (!store_->free_part(find(it->first), max_pages)) {
    }
    seqs_.erase(it);
  }

  void hand_over() {
    const auto it = pick_seq();
    ModelSeq& model = it->second;
    const bool publishes = model.client != kPublished;
    const size_t client = user_of(model);
    const uint64_t max_pages = 1 + pick(5);
    Sequence* seq = find(it->first);
    const auto next_part = [&] {
      return publishes ? store_->publish_part(seq, max_pages)
                       : store_->take_part(seq, clients_[client], max_pages);
    };
    Result<bool> part = next_part();
    while (part.is_ok() && !part.value()) {
      // Others go on between two parts.
      end_transfers();
      expect_accounts();
      part = next_part();
    }
    if (!part.is_ok()) {
      return expect_refused(part.status());
    }
    model.client = publishes ? kPublished : client;
    ++n_given;
    check(it->first);
  }

  // A client goes with what it has, and somebody of the same user comes.
  void kill() {
    const size_t client = pick(clients_.size());
    const uint64_t max_pages = 1 + pick(20);
    bool has_more = true;
    while (has_more) {
      std::vector<kvm_seq_id> gone;
      has_more = store_->free_some(clients_[client], max_pages, &gone);
      for (const kvm_seq_id id : gone) {
        EXPECT_EQ(seqs_.at(id).client, client);
        seqs_.erase(id);
      }
      expect_accounts();
    }
    EXPECT_TRUE(std::ranges::none_of(
        seqs_, [client](const auto& entry) { return entry.second.client == client; }));
    store_->remove_client(clients_[client]);
    connect(client);
    ++n_killed;
  }

  // --- Pages that come and go -------------------------------------------------------------------

  void begin_transfers() {
    const auto it = pick_seq();
    for (const PageList& list : find(it->first)->lists) {
      list.for_each([&](const PageEntry& entry, bool) {
        if (!pages().is_sealed(entry.page) || pick(3) == 0) {
          return;
        }
        if (!pages().is_in_memory(entry.page)) {
          if (pick(4) == 0) {
            begin_fetch(entry.page);
          }
        } else if (pick(3) == 0) {
          begin_move(entry.page);
        } else if (entry.count == kPageTokens) {
          begin_leave(entry.page);
        }
      });
    }
  }

  Moving* add(What what, const tiers::PageTable::Move& move) {
    moves_.push_back(std::make_unique<Moving>());
    Moving* moving = moves_.back().get();
    moving->what = what;
    moving->move = move;
    moving->kind =
        what == What::kFetch ? tiers::Transfer::Kind::kRead : tiers::Transfer::Kind::kWrite;
    moving->data = what == What::kFetch ? move.target : const_cast<std::byte*>(move.source);
    moving->size_bytes = static_cast<uint32_t>(move.size_bytes);
    return moving;
  }
  void submit(Moving* moving) {
    if (pick(8) == 0) {
      tier_.fail_next(moving->kind, 1, {KVM_ERR_IO, "sector 7 is gone"});
    }
    tiers::Transfer* const transfer = moving;
    tier_.submit({&transfer, 1});
  }
  void begin_move(tiers::PageRef page) {
    if (const Result<tiers::PageTable::Move> move = pages().begin_move(page); move.is_ok()) {
      add(What::kMove, move.value())->is_done = true;
    }
  }
  void begin_leave(tiers::PageRef page) {
    const tiers::PageTable::Move move = pages().begin_leave(page);
    if (pages().place(page) != tiers::kNoPlace) {
      pages().end_leave(move, pages().place(page));
      ++n_sent;
    } else {
      submit(add(What::kLeave, move));
    }
  }
  bool begin_fetch(tiers::PageRef page) {
    const Result<tiers::PageTable::Move> move = store_->memory().begin_fetch(page);
    if (!move.is_ok()) {
      expect_refused(move.status());
      return false;
    }
    Moving* moving = add(What::kFetch, move.value());
    moving->place = pages().place(page);
    submit(moving);
    return true;
  }

  void end_transfers() {
    for (size_t n = moves_.empty() ? 0 : pick(moves_.size() + 1); n > 0; --n) {
      end_transfer(pick(moves_.size()));
    }
  }
  void end_transfer(size_t i) {
    while (!moves_[i]->is_done) {
      tier_.finish(pick(tier_.n_waiting()));
    }
    const Moving& moving = *moves_[i];
    const bool is_there = moving.status.is_ok();
    n_failed += is_there ? 0 : 1;
    switch (moving.what) {
      case What::kMove:
        std::memcpy(moving.move.target, moving.move.source, moving.move.size_bytes);
        pages().end_move(moving.move);
        ++n_moved;
        break;
      case What::kLeave:
        pages().end_leave(moving.move, is_there ? moving.place : tiers::kNoPlace);
        n_sent += is_there ? 1 : 0;
        break;
      case What::kFetch:
        pages().end_fetch(moving.move, is_there);
        n_fetched += is_there ? 1 : 0;
        break;
    }
    moves_.erase(moves_.begin() + static_cast<ptrdiff_t>(i));
  }

  // --- Checks -----------------------------------------------------------------------------------

  void check(kvm_seq_id id) { check_layer(id, pick(kLayers), 3); }
  void check_all(kvm_seq_id id) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      check_layer(id, layer, 0);
    }
  }
  // n: so many rows that are drawn, and the last one; 0: all.
  void check_layer(kvm_seq_id id, uint32_t layer, uint32_t n) {
    const ModelSeq& model = seqs_.at(id);
    const std::vector<uint32_t>& tokens = model.tokens[layer];
    const Sequence* seq = find(id);
    ASSERT_EQ(store_->length(seq, layer), tokens.size());
    runs_.clear();
    away_.clear();
    store_->collect_runs(seq, layer, 0, &runs_, false, &away_);
    uint64_t end = 0;
    for (const KvRun& run : runs_) {
      ASSERT_EQ(run.position, end);
      end += run.n_tokens;
    }
    ASSERT_EQ(end, tokens.size());
    if (tokens.empty()) {
      return;
    }
    if (n == 0) {
      for (uint64_t position = 0; position < tokens.size(); ++position) {
        expect_row(layer, position, tokens[position]);
      }
      return;
    }
    expect_row(layer, tokens.size() - 1, tokens.back());
    for (uint32_t i = 0; i < n; ++i) {
      const uint64_t position = pick(tokens.size());
      expect_row(layer, position, tokens[position]);
    }
  }

  void expect_row(uint32_t layer, uint64_t position, uint32_t token) {
    const auto after = std::ranges::upper_bound(runs_, position, {}, &KvRun::position);
    KvRun run = *(after - 1);
    const uint64_t block = position / kPageTokens;
    const auto away = std::ranges::find(away_, block, &AwayPage::block);
    std::vector<std::byte> read;
    if (away != away_.end()) {
      read = read_page(*away);
      point_to_page(*away->slab_class, read.data(), &run);
    }
    const uint32_t head = pick(kHeads);
    const auto slot = static_cast<uint32_t>(run.slot + position - run.position);
    const Row k = row_of(token, layer, head, 0);
    const Row v = row_of(token, layer, head, 1);
    ASSERT_EQ(std::memcmp(place(run.k, head, slot), k.data(), sizeof k), 0)
        << "K of token " << token << " at " << position << " of layer " << layer;
    ASSERT_EQ(std::memcmp(place(run.v, head, slot), v.data(), sizeof v), 0)
        << "V of token " << token << " at " << position << " of layer " << layer;
  }

  std::vector<std::byte> read_page(const AwayPage& away) {
    std::vector<std::byte> bytes(away.size_bytes);
    Moving reading;
    reading.kind = tiers::Transfer::Kind::kRead;
    reading.place = away.place;
    reading.data = bytes.data();
    reading.size_bytes = away.size_bytes;
    tiers::Transfer* const transfer = &reading;
    tier_.clear_faults();
    tier_.submit({&transfer, 1});
    tier_.finish(tier_.n_waiting() - 1);
    EXPECT_TRUE(reading.is_done && reading.status.is_ok());
    ++n_away_read;
    return bytes;
  }

  // What each account pays for, by a walk over all sequences.
  void expect_accounts() {
    walked_.clear();
    uint64_t n_in_memory = 0;
    uint64_t n_away = 0;
    std::map<const Account*, uint64_t> n_sequences;
    for (const auto& [id, model] : seqs_) {
      const Sequence* seq = find(id);
      ++n_sequences[seq->account];
      EXPECT_TRUE(seq->giving != nullptr ||
                  seq->account->is_library == (model.client == kPublished));
      for (const PageList& list : seq->lists) {
        list.for_each([&](const PageEntry& entry, bool) { walked_.push_back(entry.page); });
      }
    }
    std::sort(walked_.begin(), walked_.end());
    walked_.erase(std::unique(walked_.begin(), walked_.end()), walked_.end());
    std::map<const Account*, uint64_t> bytes;
    for (const tiers::PageRef page : walked_) {
      bytes[&store_->memory().page_payer(page)] += pages().page_bytes(page);
      ++(pages().is_in_memory(page) ? n_in_memory : n_away);
    }
    for (const auto& [client, account] : store_->memory().accounts()) {
      ASSERT_EQ(account->quota->used(Resource::kBytes), bytes[account.get()]);
      ASSERT_EQ(account->quota->used(Resource::kSequences), n_sequences[account.get()]);
    }
    ASSERT_EQ(pages().n_pages(), walked_.size());
    ASSERT_EQ(pages().n_pages_away(), n_away);
  }

  std::mt19937_64 random_;
  const uint64_t quota_bytes_;
  tiers::SimulatedTier tier_;
  std::unique_ptr<Store> store_;
  kvm_space_id space_ = 0;
  std::array<ClientId, kClientUsers.size()> clients_{};
  Seqs seqs_;
  std::vector<std::unique_ptr<Moving>> moves_;
  std::vector<KvRun> runs_;
  std::vector<AwayPage> away_;
  std::vector<tiers::PageRef> walked_;
  uint32_t next_token_ = 0;
};

void run_volume(uint64_t capacity_bytes, uint64_t quota_bytes, bool expect_refusals) {
  constexpr uint64_t kSteps = 33'334;  // there are three tests
  const uint64_t first = kvm::testing::number_from_environment("KVM_SEED", 1);
  const uint64_t n_seeds = std::max<uint64_t>(
      1, kvm::testing::number_from_environment("KVM_STORE_OPERATIONS", 100'000) / (3 * kSteps - 2));
  for (uint64_t seed = first; seed < first + n_seeds; ++seed) {
    SCOPED_TRACE("KVM_SEED=" + std::to_string(seed));
    World world(seed, capacity_bytes, quota_bytes);
    for (uint64_t i = 1; i <= kSteps; ++i) {
      world.step();
      if (i % 1000 == 0) {
        world.check_everything();
      }
      ASSERT_FALSE(::testing::Test::HasFailure()) << "step " << i;
    }
    world.finish();
    // A run that never meets what it is there for tests nothing.
    EXPECT_EQ(world.n_refused > 0, expect_refusals) << world.n_refused;
    EXPECT_GT(world.n_sent, 20u);
    EXPECT_GT(world.n_fetched, 20u);
    EXPECT_GT(world.n_moved, 20u);
    EXPECT_GT(world.n_failed, 2u);
    EXPECT_GT(world.n_given, 20u);
    EXPECT_GT(world.n_killed, 2u);
    EXPECT_GT(world.n_away_read, 100u);
  }
  std::printf("%llu operations on a store\n", static_cast<unsigned long long>(n_seeds * kSteps));
}

TEST(StoreVolume, WithRoom) { run_volume(512 * kMiB, 0, false); }

TEST(StoreVolume, WithLittleCapacity) { run_volume(2 * kMiB, 0, true); }

TEST(StoreVolume, WithLittleQuota) { run_volume(512 * kMiB, kMiB, true); }

}  // namespace
}  // namespace kvm::engine
