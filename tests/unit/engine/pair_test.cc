// SPDX-License-Identifier: Apache-2.0
// MiniCache: layers that share directions (KVM_LAYER_PAIR), against the rule in double precision,
// however tokens come, are committed, cut and shared.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/engine/policy_testbed.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kDim = 16;
constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kQHeads = 4;
constexpr uint32_t kLayers = 3;  // 1 and 2 are the pair
constexpr double kScale = 0.25;

struct Setting {
  float t = 0;
  float gamma = 0;
  uint32_t codec = KVM_CODEC_F32;
  uint32_t n_sinks = 0;
  uint32_t n_recent = 0;  // 0: all stay
  bool is_mixed = false;  // that is said of kv head 1 alone, with slack
};
constexpr uint64_t kSlack = 48;

SpaceSpec pair_spec(const Setting& setting = {}) {
  SpaceSpec spec = make_spec("paired", kLayers, kQHeads, kKvHeads, kDim);
  spec.params.codec = setting.codec;
  spec.layers = {{.layer_begin = 2,
                  .n_layers = 1,
                  .kind = KVM_LAYER_PAIR,
                  .pair_t = setting.t,
                  .pair_gamma = setting.gamma}};
  if (setting.n_recent != 0) {
    spec.policies = {{.retention = KVM_RETAIN_SINKS_RECENT,
                      .n_sinks = setting.n_sinks,
                      .n_recent = setting.n_recent}};
  }
  if (setting.is_mixed) {
    spec.policies[0].kv_head_mask[0] = 2;
    spec.policies[0].slack = kSlack;
  }
  return spec;
}

// K (plane 0) or V (1) of a layer. The layers of the pair are alike, and have other lengths.
Row row_of(uint32_t layer, uint32_t plane, uint64_t position, uint32_t head) {
  Row row = hashed_row(10 + plane, position, head, kDim, 1.0);
  const Row own = hashed_row(20 + 2 * layer + plane, position, head, kDim, 1.0);
  for (uint32_t i = 0; i < kDim; ++i) {
    row[i] =
        static_cast<double>(static_cast<float>((layer == 2 ? 1.7 : 0.9) * (row[i] + 0.5 * own[i])));
  }
  return row;
}
Row query_of(uint32_t layer, uint64_t position, uint32_t head) {
  return hashed_row(30 + layer, position, head, kDim, 2.0);
}

double length(const Row& row) {
  double sum = 0;
  for (const double x : row) {
    sum += x * x;
  }
  return std::sqrt(sum);
}
double angle(const Row& a, const Row& b) {
  double dot = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    dot += a[i] * b[i];
  }
  const double cosine = dot / length(a) / length(b);
  return cosine >= 1 ? 0 : std::acos(cosine);
}

// What a sequence should hold.
struct Model {
  explicit Model(const Setting& of) : setting(of) {
    n_kept = static_cast<uint32_t>(std::ceil((of.gamma == 0 ? 0.05 : double{of.gamma}) * 16)) * 4;
    t = of.t == 0 ? 0.6 : double{of.t};
  }

  using Head = std::vector<Row>;  // [token]
  void append(uint32_t layer, uint64_t n) {
    for (uint32_t plane = 0; plane < 2; ++plane) {
      for (uint32_t head = 0; head < kKvHeads; ++head) {
        Head& rows = at(layer, plane, head);
        for (uint64_t i = 0; i < n; ++i) {
          rows.push_back(row_of(layer, plane, rows.size(), head));
        }
      }
    }
  }
  uint64_t size(uint32_t layer) const { return layers[layer][0][0].size(); }
  // Pages up to there are merged.
  void commit(uint64_t n) {
    n_committed = std::max(n_committed, n);
    for (; n_kept < kPageTokens && (n_merged + 1) * kPageTokens <= n_committed; ++n_merged) {
      for (uint32_t plane = 0; plane < 2; ++plane) {
        for (uint32_t head = 0; head < kKvHeads; ++head) {
          merge(plane, head, n_merged * kPageTokens);
        }
      }
    }
  }
  void commit_all() { commit(std::min({size(0), size(1), size(2)})); }
  void cut(uint64_t n) {
    for (auto& layer : layers) {
      for (auto& plane : layer) {
        for (Head& head : plane) {
          head.resize(std::min<size_t>(head.size(), n));
        }
      }
    }
    n_committed = std::min(n_committed, n);
    n_merged = std::min(n_merged, n / kPageTokens);
  }
  void merge(uint32_t plane, uint32_t head, uint64_t begin) {
    Head& shallow = at(1, plane, head);
    Head& deep = at(2, plane, head);
    std::vector<std::pair<double, uint64_t>> angles;
    for (uint64_t x = begin; x < begin + kPageTokens; ++x) {
      angles.emplace_back(-angle(shallow[x], deep[x]), x);
    }
    std::sort(angles.begin(), angles.end());
    for (size_t i = n_kept; i < angles.size(); ++i) {
      const double omega = -angles[i].first;
      Row& v = shallow[angles[i].second];
      Row& u = deep[angles[i].second];
      const double of_v = omega < 1e-4 ? 1 - t : std::sin((1 - t) * omega) / std::sin(omega);
      const double of_u = omega < 1e-4 ? t : std::sin(t * omega) / std::sin(omega);
      const double v_length = length(v);
      const double u_length = length(u);
      for (uint32_t d = 0; d < kDim; ++d) {
        const double e = of_v * v[d] / v_length + of_u * u[d] / u_length;
        v[d] = v_length * e;
        u[d] = u_length * e;
      }
    }
  }
  Answer attend(uint32_t layer, uint64_t p, uint32_t q_head) {
    std::vector<Entry> entries;
    const bool has_all = setting.n_recent == 0 || (setting.is_mixed && q_head / 2 == 0);
    for (uint64_t x = 0; x <= p && x < size(layer); ++x) {
      if (has_all || x < setting.n_sinks || x + setting.n_recent > p) {
        entries.push_back({at(layer, 0, q_head / 2)[x], at(layer, 1, q_head / 2)[x]});
      }
    }
    return attention_over(query_of(layer, p, q_head), entries, kScale);
  }
  Head& at(uint32_t layer, uint32_t plane, uint32_t head) { return layers[layer][plane][head]; }

  Setting setting;
  uint32_t n_kept;
  double t;
  uint64_t n_committed = 0;
  uint64_t n_merged = 0;  // pages
  std::array<std::array<std::array<Head, kKvHeads>, 2>, kLayers> layers;
};

// A sequence beside its model.
struct Twin {
  kvm_seq_id seq = 0;
  Model model{Setting()};
};

class World {
 public:
  explicit World(const Setting& of = {}, uint32_t n_threads = 1, uint64_t capacity = 256 << 20)
      : rig(n_threads, capacity), setting(of) {
    space = rig.space(pair_spec(of));
  }

  Twin create(uint32_t flags = 0) { return {rig.create(space, flags), Model(setting)}; }
  Twin fork(const Twin& from, uint64_t n) {
    Twin child = from;
    const RequestResult result = rig.verb(SeqVerb::kFork, from.seq, n);
    EXPECT_TRUE(result.status.is_ok()) << result.status.message();
    child.seq = result.seq;
    child.model.cut(n);
    return child;
  }
  void cut(Twin* twin, uint64_t n) {
    ASSERT_TRUE(rig.verb(SeqVerb::kTruncate, twin->seq, n).status.is_ok());
    twin->model.cut(n);
  }
  // Appends to one layer and asks with the last n_query tokens.
  Status step(Twin* twin, uint32_t layer, uint32_t n_append, uint32_t n_query) {
    Model& model = twin->model;
    const uint64_t before = model.size(layer);
    Buffer k(Dtype::kF32, 1, n_append, kKvHeads, kDim);
    Buffer v(Dtype::kF32, 1, n_append, kKvHeads, kDim);
    Buffer q(Dtype::kF32, 1, n_query, kQHeads, kDim);
    o = Buffer(Dtype::kF32, 1, n_query, kQHeads, kDim);
    lse = Buffer(Dtype::kF32, 1, n_query, kQHeads, 1);
    const uint64_t first = before + n_append - n_query;
    const auto put = [](Buffer* buffer, uint32_t row, uint32_t head, const Row& values) {
      for (uint32_t i = 0; i < kDim; ++i) {
        buffer->set(0, row, head, i, static_cast<float>(values[i]));
      }
    };
    for (uint32_t row = 0; row < n_append; ++row) {
      for (uint32_t head = 0; head < kKvHeads; ++head) {
        put(&k, row, head, row_of(layer, 0, before + row, head));
        put(&v, row, head, row_of(layer, 1, before + row, head));
      }
    }
    for (uint32_t row = 0; row < n_query; ++row) {
      for (uint32_t head = 0; head < kQHeads; ++head) {
        put(&q, row, head, query_of(layer, first + row, head));
      }
    }
    StepRequest request;
    request.space = space;
    request.layer_begin = layer;
    request.append = n_append != 0;
    request.attend = n_query != 0;
    kvm_item item = append_item(twin->seq, n_append);
    item.n_query = n_query;
    request.items = {item};
    if (request.append) {
      request.k = k.view();
      request.v = v.view();
    }
    if (request.attend) {
      request.q = q.view();
      request.o = o.view();
      request.lse = lse.view();
    }
    const RequestResult result = rig.run(std::move(request));
    if (!result.status.is_ok()) {
      return result.status;
    }
    model.append(layer, n_append);
    for (uint32_t row = 0; row < n_query; ++row) {
      for (uint32_t head = 0; head < kQHeads; ++head) {
        const Answer expected = model.attend(layer, first + row, head);
        EXPECT_NEAR(double{lse.get(0, row, head, 0)}, expected.lse, 2e-5);
        for (uint32_t i = 0; i < kDim; ++i) {
          EXPECT_NEAR(double{o.get(0, row, head, i)}, expected.o[i], 2e-5)
              << "layer " << layer << " position " << first + row << " head " << head;
        }
      }
    }
    return Status::ok();
  }
  // n tokens through all layers.
  void append(Twin* twin, uint32_t n, uint32_t n_query = 0) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      ASSERT_TRUE(step(twin, layer, n, n_query).is_ok());
    }
    twin->model.commit_all();
  }
  void expect_stored(Twin* twin) {
    Model& model = twin->model;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const uint64_t n = model.size(layer);
      read(*twin, layer, 0, n);
      for (uint64_t x = 0; x < n; ++x) {
        for (uint32_t head = 0; head < kKvHeads; ++head) {
          for (uint32_t i = 0; i < kDim; ++i) {
            ASSERT_NEAR(double{read_k.get(0, x, head, i)}, model.at(layer, 0, head)[x][i], 1e-5)
                << "layer " << layer << " position " << x;
            ASSERT_NEAR(double{read_v.get(0, x, head, i)}, model.at(layer, 1, head)[x][i], 1e-5);
          }
        }
      }
    }
  }
  void read(const Twin& twin, uint32_t layer, uint64_t position, uint64_t n) {
    read_k = Buffer(Dtype::kF32, 1, n, kKvHeads, kDim);
    read_v = Buffer(Dtype::kF32, 1, n, kKvHeads, kDim);
    ReadRequest request;
    request.seq = twin.seq;
    request.layer = layer;
    request.position = position;
    request.n_tokens = n;
    request.k = read_k.view();
    request.v = read_v.view();
    const Status status = rig.run(std::move(request)).status;
    ASSERT_TRUE(status.is_ok()) << status.message();
  }
  kvm_seq_info info(const Twin& twin) { return rig.engine->seq_info(rig.client, twin.seq).value(); }

  Rig rig;
  Setting setting;
  kvm_space_id space = 0;
  Buffer o, lse, read_k, read_v;
};

// Appends rows of one layer at positions from `position` on.
Status append_at(World* world, kvm_seq_id seq, uint32_t layer, uint64_t position, uint32_t n,
                 uint32_t flags = 0) {
  Buffer k(Dtype::kF32, 1, n, kKvHeads, kDim);
  Buffer v(Dtype::kF32, 1, n, kKvHeads, kDim);
  for (uint32_t row = 0; row < n; ++row) {
    for (uint32_t head = 0; head < kKvHeads; ++head) {
      for (uint32_t i = 0; i < kDim; ++i) {
        k.set(0, row, head, i, static_cast<float>(row_of(layer, 0, position + row, head)[i]));
        v.set(0, row, head, i, static_cast<float>(row_of(layer, 1, position + row, head)[i]));
      }
    }
  }
  StepRequest request;
  request.space = world->space;
  request.layer_begin = layer;
  request.append = true;
  kvm_item item = append_item(seq, n);
  item.append_position = position;
  item.flags = flags;
  request.items = {item};
  request.k = k.view();
  request.v = v.view();
  return world->rig.run(std::move(request)).status;
}

constexpr uint64_t kTailBytes = 2ull * kKvHeads * kPageTokens * kDim * 4;

// Of a pair's page: directions and factors of both, and what is kept.
uint64_t pair_bytes(uint32_t n_kept) {
  const auto up = [](uint64_t n) { return (n + 63) / 64 * 64; };
  return kTailBytes + 2 * up(kKvHeads * (2ull * kPageTokens * 4 + n_kept * (2 + kDim * 4ull)));
}

TEST(Pair, TokensOneByOne) {
  World world;
  Twin twin = world.create();
  for (uint32_t x = 0; x < 200; ++x) {
    world.append(&twin, 1, 1);
  }
  world.expect_stored(&twin);
  EXPECT_EQ(twin.model.n_merged, 3u);
  world.rig.engine->check_accounts();
}

TEST(Pair, ChunksOfAnySizeGiveTheSame) {
  for (const uint32_t chunk : {7u, 64u, 100u, 333u}) {
    World world;
    Twin twin = world.create();
    for (uint32_t n = 0; n < 333; n += chunk) {
      world.append(&twin, std::min(chunk, 333 - n), 1);
    }
    world.append(&twin, 1, 1);
    world.expect_stored(&twin);
  }
}

TEST(Pair, SettingsOfTAndGamma) {
  for (const float t : {0.3f, 0.5f, 1.0f}) {
    for (const float gamma : {0.01f, 0.2f, 0.9f}) {
      World world({.t = t, .gamma = gamma});
      Twin twin = world.create();
      world.append(&twin, 150, 3);
      world.append(&twin, 20, 20);
      world.expect_stored(&twin);
      EXPECT_EQ(world.info(twin).bytes,
                3 * 3 * kTailBytes - 4 * kTailBytes + 2 * pair_bytes(twin.model.n_kept));
    }
  }
}

// A token is merged when both layers have its page, whatever the order that they come in.
TEST(Pair, WaitsForBothLayers) {
  World world;
  Twin twin = world.create();
  ASSERT_TRUE(world.step(&twin, 0, 200, 0).is_ok());
  ASSERT_TRUE(world.step(&twin, 2, 200, 1).is_ok());
  ASSERT_TRUE(world.step(&twin, 1, 100, 1).is_ok());
  EXPECT_EQ(world.info(twin).n_pages, 4u + 2 + 4 - 1);
  twin.model.commit_all();
  EXPECT_EQ(twin.model.n_merged, 1u);
  world.expect_stored(&twin);
  ASSERT_TRUE(world.step(&twin, 1, 100, 1).is_ok());
  twin.model.commit_all();
  EXPECT_EQ(twin.model.n_merged, 3u);
  world.expect_stored(&twin);
  EXPECT_EQ(world.info(twin).n_pages, 4u + 3 + 2);
}

TEST(Pair, DraftsAreNotMerged) {
  World world;
  Twin twin = world.create(KVM_SEQ_MANUAL_COMMIT);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    ASSERT_TRUE(world.step(&twin, layer, 200, 2).is_ok());
  }
  world.expect_stored(&twin);
  EXPECT_EQ(world.info(twin).n_pages, 12u);
  ASSERT_TRUE(world.rig.verb(SeqVerb::kCommit, twin.seq, 130).status.is_ok());
  twin.model.commit(130);
  EXPECT_EQ(world.info(twin).n_pages, 10u);
  world.expect_stored(&twin);
}

// A token that ends before the pair's layers leaves them behind: they are merged when they follow.
TEST(Pair, LayersThatTokensLeftBehind) {
  World world;
  Twin twin = world.create();
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    ASSERT_TRUE(world.step(&twin, layer, 64, 1).is_ok());
  }
  twin.model.commit_all();
  StepRequest request;
  Buffer k(Dtype::kF32, 1, 100, kKvHeads, kDim);
  std::mt19937_64 random(1);
  fill(&k, 1, 100, kKvHeads, random);
  request.space = world.space;
  request.append = true;
  kvm_item item = append_item(twin.seq, 100);
  item.flags = KVM_ITEM_LAST_LAYER;
  request.items = {item};
  request.k = k.view();
  request.v = k.view();
  ASSERT_TRUE(world.rig.run(std::move(request)).status.is_ok());
  EXPECT_EQ(world.info(twin).n_committed, 164u);
  ASSERT_TRUE(append_at(&world, twin.seq, 2, 64, 64).is_ok());
  EXPECT_EQ(world.info(twin).n_pages, 3u + 1 + 1);  // of the pair: one merged, one of its own
  ASSERT_TRUE(append_at(&world, twin.seq, 1, 64, 64).is_ok());
  EXPECT_EQ(world.info(twin).n_pages, 3u + 2);
  world.rig.engine->check_accounts();
}

TEST(Pair, CutsInAPageMakeTwoOfIt) {
  for (const uint64_t at : {30u, 63u, 64u, 65u, 127u, 150u}) {
    World world;
    Twin twin = world.create();
    world.append(&twin, 200, 1);
    Twin other = world.fork(twin, 200);
    world.cut(&twin, at);
    world.expect_stored(&twin);
    world.append(&twin, 1, 1);
    world.expect_stored(&twin);
    world.append(&twin, 130, 2);
    world.expect_stored(&twin);
    world.append(&other, 70, 1);
    world.expect_stored(&other);
    world.rig.engine->check_accounts();
  }
}

TEST(Pair, WindowsDropPagesOfBoth) {
  World world({.n_sinks = 4, .n_recent = 100});
  Twin twin = world.create();
  for (uint32_t n = 0; n < 600; n += 60) {
    world.append(&twin, 60, 2);
  }
  // Of 600 tokens the first page and those from 500 on: one, and pages 7, 8 and 9.
  EXPECT_EQ(world.info(twin).n_pages, 4u + 3 + 2);
  world.rig.engine->check_accounts();
}

// A page with a number that has no direction stays two, and others do not.
TEST(Pair, PagesThatCannotBeSharedStay) {
  World world;
  Twin twin = world.create();
  Buffer k(Dtype::kF32, 1, 192, kKvHeads, kDim);
  std::mt19937_64 random(1);
  fill(&k, 1, 192, kKvHeads, random);
  Buffer bad = k;
  bad.set(0, 70, 1, 3, std::numeric_limits<float>::infinity());
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    StepRequest request;
    request.space = world.space;
    request.layer_begin = layer;
    request.append = true;
    request.items = {append_item(twin.seq, 192)};
    request.k = layer == 1 ? bad.view() : k.view();
    request.v = k.view();
    ASSERT_TRUE(world.rig.run(std::move(request)).status.is_ok());
  }
  EXPECT_EQ(world.info(twin).n_pages, 3u + 2 + 2);
  world.read(twin, 1, 70, 1);
  EXPECT_EQ(world.read_k.get(0, 0, 1, 3), std::numeric_limits<float>::infinity());
  world.rig.engine->check_accounts();
}

// Gamma 1 is a cache of layers that know nothing of each other, bit by bit.
TEST(Pair, GammaOneIsAPlainCache) {
  World paired({.gamma = 1.0f});
  World plain;
  SpaceSpec spec = pair_spec();
  spec.name = "plain";
  spec.layers.clear();
  plain.space = plain.rig.space(spec);
  plain.setting.gamma = 1.0f;  // of its model
  Twin a = paired.create();
  Twin b = plain.create();
  for (const uint32_t n : {1u, 63u, 100u, 1u, 200u}) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      ASSERT_TRUE(paired.step(&a, layer, n, 1).is_ok());
      ASSERT_TRUE(plain.step(&b, layer, n, 1).is_ok());
      EXPECT_EQ(paired.o.bytes(), plain.o.bytes());
      EXPECT_EQ(paired.lse.bytes(), plain.lse.bytes());
      const uint64_t length = a.model.size(layer);
      paired.read(a, layer, 0, length);
      plain.read(b, layer, 0, length);
      EXPECT_EQ(paired.read_k.bytes(), plain.read_k.bytes());
      EXPECT_EQ(paired.read_v.bytes(), plain.read_v.bytes());
    }
  }
  EXPECT_EQ(paired.info(a).bytes, plain.info(b).bytes);
}

// Tokens that keep their rows are what they were, in every codec; others have their lengths.
TEST(Pair, WhatIsKeptIsBitEqual) {
  for (const uint32_t codec : {KVM_CODEC_F32, KVM_CODEC_F16, KVM_CODEC_BF16}) {
    World world({.gamma = 0.25f, .codec = codec});
    Twin twin = world.create();
    std::array<std::array<Buffer, 2>, 2> before;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      ASSERT_TRUE(world.step(&twin, layer, 63, 0).is_ok());
    }
    ASSERT_TRUE(world.step(&twin, 1, 1, 0).is_ok());
    ASSERT_TRUE(world.step(&twin, 2, 1, 0).is_ok());
    for (const uint32_t layer : {1u, 2u}) {
      world.read(twin, layer, 0, 64);
      before[layer - 1] = {world.read_k, world.read_v};
    }
    ASSERT_TRUE(world.step(&twin, 0, 1, 0).is_ok());
    EXPECT_EQ(world.info(twin).n_pages, 2u);
    for (const uint32_t layer : {1u, 2u}) {
      world.read(twin, layer, 0, 64);
      for (uint32_t plane = 0; plane < 2; ++plane) {
        const Buffer& now = plane == 0 ? world.read_k : world.read_v;
        for (uint32_t head = 0; head < kKvHeads; ++head) {
          uint32_t n_equal = 0;
          for (uint32_t x = 0; x < 64; ++x) {
            const std::vector<float> a = before[layer - 1][plane].get_row(0, x, head);
            const std::vector<float> b = now.get_row(0, x, head);
            n_equal += a == b ? 1 : 0;
            EXPECT_NEAR(length(Row(b.begin(), b.end())) / length(Row(a.begin(), a.end())), 1, 1e-6);
          }
          EXPECT_EQ(n_equal, 16u);
        }
      }
    }
  }
}

// A pair's page is paid for once, and every account adds up, whoever shares, cuts, takes or leaves.
TEST(Pair, AccountsAddUp) {
  World world;
  Twin twin = world.create();
  world.append(&twin, 640);
  const kvm_seq_info info = world.info(twin);
  EXPECT_EQ(info.bytes, 10 * kTailBytes + 10 * pair_bytes(4));
  EXPECT_EQ(info.bytes_paid, info.bytes);
  EXPECT_EQ(info.bytes_shared, 0u);
  EXPECT_EQ(info.n_pages, 20u);
  const auto used = [&] { return world.rig.engine->stats().host_page_bytes; };
  EXPECT_EQ(used(), info.bytes);
  Twin child = world.fork(twin, 300);
  EXPECT_EQ(world.info(child).bytes_shared, world.info(child).bytes);
  EXPECT_EQ(used(), info.bytes);
  world.append(&child, 40);
  world.rig.engine->check_accounts();
  ASSERT_TRUE(world.rig.verb(SeqVerb::kFree, twin.seq).status.is_ok());
  world.rig.engine->check_accounts();
  EXPECT_EQ(used(), world.info(child).bytes);
  ASSERT_TRUE(world.rig.verb(SeqVerb::kPublish, child.seq).status.is_ok());
  world.rig.engine->check_accounts();
  Twin taken = world.fork(child, 340);
  world.append(&taken, 30, 1);
  world.expect_stored(&taken);
  world.rig.engine->check_accounts();
  ASSERT_TRUE(world.rig.verb(SeqVerb::kTake, child.seq).status.is_ok());
  world.rig.engine->check_accounts();
  ASSERT_TRUE(world.rig.verb(SeqVerb::kFree, child.seq).status.is_ok());
  ASSERT_TRUE(world.rig.verb(SeqVerb::kFree, taken.seq).status.is_ok());
  world.rig.engine->check_accounts();
  EXPECT_EQ(used(), 0u);
}

// Publishing needs the room of what is there, not that of both layers.
TEST(Pair, GivingCountsAPageOnce) {
  World world;
  Twin twin = world.create();
  world.append(&twin, 64 * 20);
  ClientSpec spec;
  spec.limits[Resource::kBytes] = world.info(twin).bytes;
  const ClientId taker = world.rig.engine->add_client(spec);
  ASSERT_TRUE(world.rig.verb(SeqVerb::kPublish, twin.seq).status.is_ok());
  SeqRequest take;
  take.verb = SeqVerb::kTake;
  take.seq = twin.seq;
  const Status status = world.rig.run(take, taker).status;
  EXPECT_TRUE(status.is_ok()) << status.message();
  world.rig.engine->check_accounts();
}

// Where the quota has no room for a page that takes the place of two, tokens stay as they came.
TEST(Pair, FullQuotasLeavePagesAsTheyAre) {
  World world;
  ClientSpec spec;
  spec.limits[Resource::kBytes] = 3 * 3 * kTailBytes;
  world.rig.client = world.rig.engine->add_client(spec);
  Twin twin = world.create();
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    ASSERT_TRUE(world.step(&twin, layer, 192, 1).is_ok());
  }
  EXPECT_EQ(world.info(twin).n_pages, 9u);
  world.expect_stored(&twin);
  EXPECT_EQ(world.step(&twin, 0, 1, 0).code(), KVM_ERR_QUOTA);
  // Once there is room they follow.
  world.cut(&twin, 150);
  world.append(&twin, 42, 1);
  world.rig.engine->check_accounts();
}

TEST(Pair, WorldsAtRandom) {
  for (uint64_t seed = 0; seed < (is_nightly() ? 40 : 6); ++seed) {
    std::mt19937_64 random(seed);
    const auto pick = [&](uint64_t n) { return random() % n; };
    World world({.t = pick(2) == 0 ? 0.0f : 0.4f, .gamma = pick(2) == 0 ? 0.0f : 0.3f},
                static_cast<uint32_t>(1 + pick(3)));
    std::vector<Twin> twins = {world.create()};
    for (uint32_t i = 0; i < 25 && !::testing::Test::HasFailure(); ++i) {
      Twin& twin = twins[pick(twins.size())];
      const uint64_t length = twin.model.size(0);
      switch (pick(5)) {
        case 0:
          if (twins.size() < 5) {
            twins.push_back(world.fork(twin, pick(length + 1)));
          }
          break;
        case 1:
          world.cut(&twin, length - pick(std::min<uint64_t>(length + 1, 100)));
          break;
        default: {
          const auto n = static_cast<uint32_t>(1 + pick(pick(2) == 0 ? 3 : 150));
          if (length < 1000) {
            world.append(&twin, n, 1 + static_cast<uint32_t>(pick(std::min(n, 4u))));
          }
        }
      }
    }
    for (Twin& twin : twins) {
      world.expect_stored(&twin);
    }
    world.rig.engine->check_accounts();
  }
}

// What kvm_seq_drop has dropped of both layers comes back layer by layer, and is merged again.
TEST(Pair, DroppedPagesComeBackAndAreMerged) {
  for (const bool deep_first : {false, true}) {
    World world;
    Twin twin = world.create();
    world.append(&twin, 330, 1);
    Twin other = world.fork(twin, 330);
    const uint64_t n_pages = world.info(twin).n_pages;
    SeqRequest drop;
    drop.verb = SeqVerb::kDrop;
    drop.seq = twin.seq;
    drop.range = {.begin = 64, .end = 192};
    ASSERT_TRUE(world.rig.run(std::move(drop)).status.is_ok());
    EXPECT_EQ(world.info(twin).n_pages, n_pages - 2 - 2);
    world.rig.engine->check_accounts();
    const auto restore = [&](uint32_t layer) {
      const Status status = append_at(&world, twin.seq, layer, 64, 128, KVM_ITEM_RESTORE);
      ASSERT_TRUE(status.is_ok()) << status.message();
    };
    restore(0);
    restore(deep_first ? 2 : 1);
    EXPECT_EQ(world.info(twin).n_pages, n_pages);  // two of one layer, not yet of both
    restore(deep_first ? 1 : 2);
    EXPECT_EQ(world.info(twin).n_pages, n_pages);
    world.expect_stored(&twin);
    world.append(&twin, 10, 2);
    world.append(&other, 10, 2);
    world.rig.engine->check_accounts();
  }
}

// Heads of a pair that keep all beside others with a window: each has pages of its own.
TEST(Pair, HeadsWithPoliciesOfTheirOwn) {
  for (uint64_t seed = 0; seed < (is_nightly() ? 20 : 3); ++seed) {
    std::mt19937_64 random(seed);
    const auto pick = [&](uint64_t n) { return random() % n; };
    World world({.n_sinks = 3, .n_recent = 90, .is_mixed = true});
    std::vector<Twin> twins = {world.create()};
    for (uint32_t i = 0; i < 25 && !::testing::Test::HasFailure(); ++i) {
      Twin& twin = twins[pick(twins.size())];
      const uint64_t length = twin.model.size(0);
      const uint64_t n_cut = pick(std::min(length, kSlack) + 1);
      if (pick(4) == 0) {
        world.cut(&twin, length - n_cut);
      } else if (pick(4) == 0 && twins.size() < 4) {
        twins.push_back(world.fork(twin, length - n_cut));
      } else if (length < 1000) {
        world.append(&twin, static_cast<uint32_t>(1 + pick(130)), 1);
      }
    }
    EXPECT_GT(world.rig.engine->stats().n_pages_dropped, 0u);
    world.rig.engine->check_accounts();
  }
}

// There is no index, so whoever asks for a part is answered by all, and told so.
TEST(Pair, ApproximateModesAreAnsweredExactly) {
  World world;
  Twin twin = world.create();
  world.append(&twin, 300);
  ASSERT_TRUE(world.step(&twin, 2, 1, 1).is_ok());
  const std::vector<std::byte> exact = world.o.bytes();
  for (const uint32_t mode : {KVM_MODE_TOPK, KVM_MODE_SAMPLED, KVM_MODE_VERIFIED, KVM_MODE_AUTO}) {
    Buffer q(Dtype::kF32, 1, 1, kQHeads, kDim);
    for (uint32_t head = 0; head < kQHeads; ++head) {
      const Row row = query_of(2, 300, head);
      for (uint32_t i = 0; i < kDim; ++i) {
        q.set(0, 0, head, i, static_cast<float>(row[i]));
      }
    }
    Buffer o(Dtype::kF32, 1, 1, kQHeads, kDim);
    StepRequest request;
    request.space = world.space;
    request.layer_begin = 2;
    request.attend = true;
    request.mode = mode;
    request.budget = 32;
    request.items = {query_item(twin.seq, 1)};
    request.q = q.view();
    request.o = o.view();
    const RequestResult result = world.rig.run(std::move(request));
    ASSERT_TRUE(result.status.is_ok()) << result.status.message();
    EXPECT_EQ(result.mode, uint32_t{KVM_MODE_EXACT}) << mode;
    EXPECT_EQ(o.bytes(), exact) << mode;
  }
}

// The same bits whatever the number of threads, and however appends were cut.
TEST(Pair, ThreadsGiveTheSameBits) {
  std::vector<std::byte> expected;
  for (const uint32_t n_threads : {1u, 3u}) {
    World world({}, n_threads);
    Twin twin = world.create();
    world.append(&twin, 900);
    ASSERT_TRUE(world.step(&twin, 1, 1, 1).is_ok());
    const std::vector<std::byte> got = world.o.bytes();
    EXPECT_EQ(expected.empty() ? got : expected, got);
    expected = got;
  }
}

}  // namespace
}  // namespace kvm::engine::testing
