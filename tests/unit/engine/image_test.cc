// SPDX-License-Identifier: Apache-2.0
// Sequences as bytes, and made of them again: what comes back is what was, to the bit; what cannot
// have been is refused, whatever the bytes are.
#include "engine/image/sequence_image.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/image/image_pages.h"
#include "engine/image/image_restore.h"
#include "engine/retention/policy_actions.h"
#include "tests/unit/engine/store_testbed.h"
#include "tiers/simulated/simulated_tier.h"

namespace kvm::engine {
namespace {

using tiers::ObjectRequest;
using tiers::PageRef;
using tiers::PlaceId;
using tiers::SimulatedTier;

struct Way final : tiers::Transfer {
  void on_done() noexcept override {}
};

// A store over a tier in which transfers end at once.
struct Saved {
  std::vector<std::byte> body;
  std::vector<ObjectRequest::Page> places;  // with a reference on each
  std::vector<uint32_t> page_bytes() const {
    std::vector<uint32_t> sizes;
    for (const ObjectRequest::Page& page : places) {
      sizes.push_back(page.size_bytes);
    }
    return sizes;
  }
};

class ImageRig {
 public:
  ImageRig() {
    StoreOptions options;
    options.host_capacity_bytes = 256 * kMiB;
    options.default_quota_bytes = 1024 * kMiB;
    options.slow_tier = &tier;
    store = Store::open(options).value();
    client = store->add_client({});
  }
  ~ImageRig() {
    store->check_accounts();
    store.reset();
    EXPECT_EQ(tier.used_bytes(), 0u) << "nothing has a reference any more";
  }

  Sequence* create(const SpaceSpec& spec, uint32_t flags = 0) {
    const kvm_space_id space = store->register_space(spec).value();
    return store->find_seq(client, store->create_seq(client, space, flags).value()).value();
  }
  tiers::PageTable& pages() { return store->memory().pages(); }

  // What a save does: pages get places.
  Saved save(const Sequence* seq) {
    Saved saved;
    Aside* fork = store->fork_aside(seq).value();
    store->check_accounts();
    ImagePages numbers;
    while (!numbers.go_on(pages(), *fork->seq, 3)) {
    }
    for (const PageRef page : numbers.pages()) {
      if (pages().place(page) == tiers::kNoPlace) {
        Way way;
        way.kind = tiers::Transfer::Kind::kWrite;
        const tiers::PageTable::Move move = pages().begin_leave(page);
        way.data = const_cast<std::byte*>(move.source);
        way.size_bytes = static_cast<uint32_t>(move.size_bytes);
        run(&way);
        pages().end_copy(move, way.place);
      }
      const PlaceId place = pages().place(page);
      tier.add_ref(place);
      saved.places.push_back({place, static_cast<uint32_t>(pages().page_bytes(page))});
    }
    Result<std::vector<std::byte>> body = encode_image(*fork->seq, numbers.lists());
    EXPECT_TRUE(body.is_ok()) << body.status().message();
    saved.body = std::move(body).value();
    while (!store->free_aside_part(fork, 2)) {
      store->check_accounts();
    }
    return saved;
  }
  void forget(const Saved& saved) {
    for (const ObjectRequest::Page& page : saved.places) {
      tier.release(page.place);
    }
  }

  // What a load does. Null: it was refused.
  Sequence* load(const Saved& saved, kvm_space_id space, Status* status) {
    Result<SequenceImage> image =
        decode_image(saved.body, *store->space(space).value(), saved.page_bytes());
    *status = image.status();
    if (!image.is_ok()) {
      return nullptr;
    }
    std::vector<ObjectRequest::Page> places = saved.places;
    for (const ObjectRequest::Page& page : places) {
      tier.add_ref(page.place);
    }
    ImageRestore restore(std::move(places));
    restore.take(std::move(image).value());
    const KvBytes page_bytes = restore.page_bytes(*store->space(space).value());
    Aside* aside = store->begin_aside(client, space, page_bytes).value();
    for (;;) {
      const Result<bool> is_done = restore.go_on(store.get(), aside, 3);
      store->check_accounts();
      *status = is_done.status();
      if (!is_done.is_ok()) {
        while (!restore.release_some(&tier, 2)) {
        }
        while (!store->free_aside_part(aside, 2)) {
        }
        return nullptr;
      }
      if (is_done.value()) {
        break;
      }
    }
    EXPECT_TRUE(restore.release_some(&tier, 1));
    return store->find_seq(client, store->admit_aside(aside)).value();
  }
  // Brings all pages of a sequence back.
  void fetch(const Sequence* seq) {
    for (const PageList& list : seq->lists) {
      list.for_each([&](const PageEntry& entry, bool) {
        if (!pages().is_in_memory(entry.page)) {
          const tiers::PageTable::Move move = pages().begin_fetch(entry.page).value();
          Way way;
          way.place = pages().place(entry.page);
          way.data = move.target;
          way.size_bytes = static_cast<uint32_t>(move.size_bytes);
          run(&way);
          pages().end_fetch(move, true);
        }
      });
    }
  }

  SimulatedTier tier{{.is_manual = true}};
  std::unique_ptr<Store> store;
  ClientId client = 0;

 private:
  void run(Way* way) {
    tiers::Transfer* transfer = way;
    tier.submit({&transfer, 1});
    tier.finish_all();
    ASSERT_TRUE(way->status.is_ok());
  }
};

// A kind of sequence, with what it holds made up.
struct Kind {
  const char* name;
  SpaceSpec spec;
  uint32_t flags = 0;
  uint64_t cut = 0;  // tokens that are taken away again
};

kvm_policy_params heavy(uint64_t head_mask, uint32_t merge, uint32_t budgets) {
  return {.layer_begin = 0,
          .n_layers = 2,
          .kv_head_mask = {head_mask, 0},
          .retention = KVM_RETAIN_HEAVY,
          .n_sinks = 4,
          .n_recent = 130,
          .n_heavy = 50,
          .merge = merge,
          .budgets = budgets};
}

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  all.push_back({"plain", make_spec("plain", 2, 2)});
  all.push_back({"cut", make_spec("cut", 2, 2), 0, 100});
  all.push_back({"uncommitted", make_spec("uncommitted", 2, 2), KVM_SEQ_MANUAL_COMMIT});
  Kind window = {"window", make_spec("window", 2, 2)};
  window.spec.policies = {sinks_recent(0, 1, 4, 100), sinks_recent(1, 3, 70, 200)};
  all.push_back(window);
  Kind fold = {"fold", make_spec("fold", 2, 2)};
  fold.spec.policies = {sinks_recent(0, 1, 4, 100)};
  fold.spec.policies[0].retention = KVM_RETAIN_SINKS_RECENT_FOLD;
  all.push_back(fold);
  Kind counted = {"counted", make_spec("counted", 2, 2)};
  counted.spec.policies = {heavy(2, KVM_MERGE_COUNTED, KVM_BUDGETS_EQUAL)};
  all.push_back(counted);
  Kind shared = {"shared", make_spec("shared", 2, 2)};
  shared.spec.policies = {heavy(3, KVM_MERGE_NONE, KVM_BUDGETS_BY_DENSITY)};
  shared.spec.codecs = {codec(0, 3, KVM_CODEC_I8, KVM_CODEC_I8)};
  all.push_back(shared);
  for (const uint32_t id : {KVM_CODEC_I4, KVM_CODEC_I2}) {
    Kind demotes = {"demotes", make_spec("demotes" + std::to_string(id), 2, 2)};
    demotes.spec.policies = {heavy(3, KVM_MERGE_DEMOTED, KVM_BUDGETS_EQUAL)};
    demotes.spec.codecs = {codec(0, 3, id, id)};
    demotes.spec.codecs[0].n_layers = 0;
    demotes.spec.codecs[0].demoted_k = KVM_CODEC_I2;
    demotes.spec.codecs[0].demoted_v = KVM_CODEC_I2;
    all.push_back(demotes);
  }
  Kind settles = {"settles", make_spec("settles", 2, 2)};
  settles.spec.codecs = {codec(0, 3, KVM_CODEC_I8_CHANNEL, KVM_CODEC_I8_CHANNEL)};
  all.push_back(settles);
  Kind settles_by_hand = {"settles_by_hand", settles.spec, KVM_SEQ_MANUAL_COMMIT};
  settles_by_hand.spec.name = "settles_by_hand";
  all.push_back(settles_by_hand);
  Kind inside = {"inside", make_spec("inside", 2, 1, 16)};
  inside.spec.params.flags = KVM_SPACE_V_IN_K;
  inside.spec.params.head_dim_v = 8;
  all.push_back(inside);
  Kind skipped = {"skipped", make_spec("skipped", 2, 2)};
  skipped.spec.policies = {{.layer_begin = 1, .n_layers = 1, .retention = KVM_RETAIN_PROMPT}};
  all.push_back(skipped);
  Kind aliased = {"aliased", make_spec("aliased", 3, 2)};
  aliased.spec.layers = {{.layer_begin = 2, .n_layers = 1, .kind = KVM_LAYER_ALIAS, .target = 0}};
  all.push_back(aliased);
  return all;
}

constexpr uint64_t kTokens = 1000;

Sequence* make(ImageRig& rig, const Kind& kind) {
  Sequence* seq = rig.create(kind.spec, kind.flags);
  Store& store = *rig.store;
  const Space& space = seq->space();
  for (uint64_t at = 0; at < kTokens; at += 250) {
    EXPECT_TRUE(append_all(store, seq, numbered(at, 250)).is_ok());
    for (uint32_t layer = 0; layer < space.n_layers; ++layer) {
      const Layer& own = space.layers[layer];
      std::vector<float> sums(at + 250);
      for (size_t i = 0; i < sums.size(); ++i) {
        sums[i] = static_cast<float>((i * 7919 + layer) % 101) / 16;
      }
      for (uint32_t i = 0; own.kind == KVM_LAYER_OWN && i < own.classes.size(); ++i) {
        if (own.classes[i].retention.kind == KVM_RETAIN_HEAVY) {
          add_list_masses(&store.memory(), seq, layer, i, sums, 0, false);
        }
      }
      std::vector<float> rows(size_t{3} * own.n_q_heads * own.dim_k, 0.25f);
      std::vector<float> columns(size_t{200} * own.n_kv_heads, 1.5f);
      EXPECT_TRUE(store
                      .observe(seq, {.layer = layer,
                                     .query_position = at,
                                     .n_rows = 3,
                                     .q = rows.data(),
                                     .column_begin = at,
                                     .n_columns = 200,
                                     .column_sums = columns.data()})
                      .is_ok());
    }
  }
  EXPECT_TRUE(append_all(store, seq, numbered(kTokens, 1)).is_ok()) << "the prompt has ended";
  if ((kind.flags & KVM_SEQ_MANUAL_COMMIT) != 0) {
    EXPECT_TRUE(store.commit_seq(seq, 333).is_ok());
    settle(store, seq);
  }
  if (kind.cut != 0) {
    EXPECT_TRUE(store.truncate_seq(seq, kTokens - kind.cut).is_ok());
  }
  return seq;
}

// The bytes that attention reads of a list.
std::vector<std::byte> runs_of(const Store& store, const Sequence* seq, uint32_t layer,
                               uint32_t class_index) {
  const tiers::SlabClass& slab_class = seq->space().head_class(layer, class_index).slab_class;
  // Where kept tokens were, and all that queries see.
  std::vector<KvRun> runs;
  store.collect_runs(seq, layer, class_index, &runs, false);
  store.collect_runs(seq, layer, class_index, &runs, true);
  std::vector<std::byte> all;
  std::vector<float> row(std::max(slab_class.dim_k, slab_class.dim_v));
  const auto add = [&](const void* data, size_t n) {
    const auto* bytes = static_cast<const std::byte*>(data);
    all.insert(all.end(), bytes, bytes + n);
  };
  for (const KvRun& run : runs) {
    add(&run.position, sizeof run.position);
    for (uint32_t t = 0; t < run.n_tokens; ++t) {
      for (uint32_t head = 0; head < slab_class.n_heads; ++head) {
        read_row(run.k, slab_class.dim_k, head, run.slot + t, row.data());
        add(row.data(), slab_class.dim_k * sizeof(float));
        if (!slab_class.v_in_k) {
          read_row(run.v, slab_class.dim_v, head, run.slot + t, row.data());
          add(row.data(), slab_class.dim_v * sizeof(float));
        }
      }
      if (run.log_weight != nullptr) {
        add(run.log_weight + t, sizeof(float));
      }
    }
  }
  return all;
}

void expect_same(ImageRig& rig, const Sequence* a, const Sequence* b) {
  const Space& space = a->space();
  for (uint32_t layer = 0; layer < space.n_layers; ++layer) {
    for (uint32_t i = 0; i < space.storage(layer).classes.size(); ++i) {
      EXPECT_TRUE(runs_of(*rig.store, a, layer, i) == runs_of(*rig.store, b, layer, i))
          << "class " << i << " of layer " << layer;
    }
  }
  const kvm_seq_info of_a = rig.store->seq_info(a);
  const kvm_seq_info of_b = rig.store->seq_info(b);
  EXPECT_EQ(of_a.n_committed, of_b.n_committed);
  EXPECT_EQ(of_a.bytes, of_b.bytes);
  EXPECT_GE(of_a.bytes_observed, of_b.bytes_observed) << "without what a cut has left";
  EXPECT_EQ(of_a.n_rows_observed, of_b.n_rows_observed);
  EXPECT_EQ(of_a.n_entries_dropped, of_b.n_entries_dropped);
  EXPECT_EQ(of_a.flags, of_b.flags);
}

TEST(Image, WhatComesBackIsWhatWas) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    ImageRig rig;
    Sequence* seq = make(rig, kind);
    const Saved saved = rig.save(seq);
    Status status;
    Sequence* loaded = rig.load(saved, seq->record->id, &status);
    ASSERT_NE(loaded, nullptr) << status.message();
    EXPECT_EQ(rig.pages().n_pages_away(), saved.places.size());
    rig.fetch(loaded);
    expect_same(rig, seq, loaded);
    const Saved again = rig.save(loaded);
    EXPECT_TRUE(again.body == saved.body);
    // Both go on alike. A sequence that is made has other tokens to be settled or chosen from.
    for (uint64_t at = 0; at < 300; at += 60) {
      EXPECT_TRUE(append_all(*rig.store, seq, numbered(5000 + at, 60)).is_ok());
      EXPECT_TRUE(append_all(*rig.store, loaded, numbered(5000 + at, 60)).is_ok());
    }
    if ((kind.flags & KVM_SEQ_MANUAL_COMMIT) != 0) {
      for (Sequence* one : {seq, loaded}) {
        EXPECT_TRUE(rig.store->commit_seq(one, KVM_POSITION_END).is_ok());
        settle(*rig.store, one);
      }
    }
    expect_same(rig, seq, loaded);
    rig.forget(saved);
    rig.forget(again);
  }
}

// What a fork has of less than its parent is saved as it is.
// Sequences that have not given anything up yet, and end within the sinks' pages.
TEST(Image, ShortSequencesComeBack) {
  for (const Kind& kind : kinds()) {
    for (const uint64_t n_tokens : {0, 1, 30, 63, 64, 65}) {
      SCOPED_TRACE(std::string(kind.name) + ", " + std::to_string(n_tokens));
      ImageRig rig;
      Sequence* seq = rig.create(kind.spec, kind.flags);
      if (n_tokens != 0) {
        ASSERT_TRUE(append_all(*rig.store, seq, numbered(0, n_tokens)).is_ok());
      }
      const Saved saved = rig.save(seq);
      Status status;
      Sequence* loaded = rig.load(saved, seq->record->id, &status);
      ASSERT_NE(loaded, nullptr) << status.message();
      rig.fetch(loaded);
      expect_same(rig, seq, loaded);
      rig.store->free_seq(seq);
      rig.store->free_seq(loaded);
      rig.forget(saved);
    }
  }
}

TEST(Image, ForksOfAPartComeBack) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    ImageRig rig;
    Sequence* seq = make(rig, kind);
    const Result<kvm_seq_id> id = rig.store->fork_seq(seq, kind.cut != 0 ? 700 : 990);
    if (!id.is_ok()) {
      EXPECT_EQ(id.status().code(), KVM_ERR_PARTIAL);
      continue;
    }
    Sequence* fork = rig.store->find_seq(rig.client, id.value()).value();
    const Saved saved = rig.save(fork);
    Status status;
    Sequence* loaded = rig.load(saved, seq->record->id, &status);
    ASSERT_NE(loaded, nullptr) << status.message();
    rig.fetch(loaded);
    expect_same(rig, fork, loaded);
    rig.forget(saved);
  }
}

TEST(Image, SpacesThatDifferAreNamed) {
  ImageRig rig;
  Kind kind = kinds()[0];
  const Saved saved = rig.save(make(rig, kind));
  const auto refusal = [&](const SpaceSpec& spec) {
    Status status;
    EXPECT_EQ(rig.load(saved, rig.store->register_space(spec).value(), &status), nullptr);
    EXPECT_EQ(status.code(), KVM_ERR_INVALID);
    return std::string(status.message());
  };
  SpaceSpec other = kind.spec;
  other.name = "other_codec";
  other.codecs = {codec(0, 1, KVM_CODEC_F16, KVM_CODEC_F16)};
  EXPECT_NE(refusal(other).find("another layout"), std::string::npos);
  other = kind.spec;
  other.name = "other_policy";
  other.policies = {sinks_recent(0, 1, 4, 100)};
  EXPECT_NE(refusal(other).find("another policies"), std::string::npos);
  other = kind.spec;
  other.name = "other_model";
  other.params.fingerprint[3] = 7;
  EXPECT_NE(refusal(other).find("another fingerprint"), std::string::npos);
  // The name is only a name, and an index is made anew.
  other = kind.spec;
  other.name = "the_same";
  Status status;
  EXPECT_NE(rig.load(saved, rig.store->register_space(other).value(), &status), nullptr);
  rig.forget(saved);
}

TEST(Image, AnotherVersionIsNamed) {
  ImageRig rig;
  Sequence* seq = make(rig, kinds()[0]);
  Saved saved = rig.save(seq);
  saved.body[8] = std::byte{9};
  Status status;
  EXPECT_EQ(rig.load(saved, seq->record->id, &status), nullptr);
  EXPECT_EQ(status.code(), KVM_ERR_UNSUPPORTED);
  rig.forget(saved);
}

// Nobody saves pages that two layers share, so an image that has some is not ours.
TEST(Image, PagesOfPairsAreRefused) {
  ImageRig rig;
  Kind paired = {"paired", make_spec("paired", 2, 2)};
  paired.spec.layers = {{.layer_begin = 1, .n_layers = 1, .kind = KVM_LAYER_PAIR}};
  Sequence* seq = make(rig, paired);
  const Saved saved = rig.save(seq);
  Status status;
  EXPECT_EQ(rig.load(saved, seq->record->id, &status), nullptr);
  EXPECT_EQ(status.code(), KVM_ERR_CORRUPT);
  EXPECT_NE(status.message().find("pages of two layers"), std::string::npos) << status.message();
  rig.forget(saved);
}

// Pages of other sizes than the lists say, or fewer, or more.
TEST(Image, PagesFitTheirLists) {
  for (const int change : {0, 1, 2}) {
    ImageRig rig;
    Sequence* seq = make(rig, kinds()[0]);
    const Saved saved = rig.save(seq);
    Saved damaged = saved;
    if (change == 0) {
      damaged.places.pop_back();
    } else if (change == 1) {
      damaged.places.push_back(damaged.places.back());
    } else {
      damaged.places[3].size_bytes += 64;
    }
    Status status;
    EXPECT_EQ(rig.load(damaged, seq->record->id, &status), nullptr);
    EXPECT_EQ(status.code(), KVM_ERR_CORRUPT) << status.message();
    rig.forget(saved);
  }
}

// Whatever a byte becomes, there is a sequence that can be used, or a refusal.
TEST(Image, EachByteMayBeAnother) {
  std::mt19937 random(3);
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    ImageRig rig;
    Sequence* seq = make(rig, kind);
    const Saved saved = rig.save(seq);
    const kvm_space_id space = seq->record->id;
    uint64_t n_refused = 0;
    uint64_t n_loaded = 0;
    const auto change = [&](size_t at, std::byte value) {
      Saved damaged = saved;
      if (damaged.body[at] == value) {
        return;
      }
      damaged.body[at] = value;
      const Result<SequenceImage> image =
          decode_image(damaged.body, *rig.store->space(space).value(), damaged.page_bytes());
      if (!image.is_ok()) {
        EXPECT_FALSE(image.status().message().empty());
        ++n_refused;
        return;
      }
      if (++n_loaded % 32 != 0) {
        return;
      }
      Status status;
      Sequence* loaded = rig.load(damaged, space, &status);
      ASSERT_NE(loaded, nullptr) << status.message();
      rig.fetch(loaded);
      if (append_all(*rig.store, loaded, numbered(9000, 130)).is_ok()) {
        rig.store->truncate_seq(loaded, 500).is_ok();
      }
      rig.store->check_accounts();
      rig.store->free_seq(loaded);
    };
    const size_t stride = 1 + saved.body.size() / 1500;
    for (size_t at = random() % stride; at < saved.body.size(); at += stride) {
      change(at, static_cast<std::byte>(random()));
      change(at, saved.body[at] ^ static_cast<std::byte>(1u << random() % 8));
      change(at, std::byte{0xff});
    }
    for (size_t n = 0; n < saved.body.size(); n += 1 + n / 16) {
      EXPECT_FALSE(
          decode_image(std::span(saved.body).first(n), seq->space(), saved.page_bytes()).is_ok());
    }
    EXPECT_GT(n_refused, 50u);
    rig.forget(saved);
  }
}

TEST(Image, ARefusedLoadLeavesNothing) {
  ImageRig rig;
  Sequence* seq = make(rig, kinds()[0]);
  const Saved saved = rig.save(seq);
  const kvm_space_id space = seq->record->id;
  const uint64_t used = rig.store->client_bytes(rig.client);
  EXPECT_EQ(rig.store->begin_aside(rig.client, space, {2048 * kMiB, 0}).status().code(),
            KVM_ERR_QUOTA);
  const ClientId other = rig.store->add_client(limited(0, 1));
  EXPECT_TRUE(rig.store->create_seq(other, space, 0).is_ok());
  EXPECT_EQ(rig.store->begin_aside(other, space, {}).status().code(), KVM_ERR_QUOTA);
  EXPECT_EQ(rig.store->client_bytes(rig.client), used);
  rig.forget(saved);
}

}  // namespace
}  // namespace kvm::engine
