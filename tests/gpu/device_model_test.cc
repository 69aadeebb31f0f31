// SPDX-License-Identifier: Apache-2.0
// Random operations on a client of kvm_cuda.h, over the fake driver, and on an engine for CPUs:
// they have to give the same results. In a small pool and with little room on the host, what is
// refused is held against a count of pages. KVM_NIGHTLY=1 takes more of them.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "attention/cuda/params.h"
#include "base/splitmix.h"
#include "device/host_chunks.h"
#include "tests/gpu/device_rig.h"

namespace kvm::device::testing {
namespace {

constexpr uint32_t kMaxItems = 4, kMaxQuery = 4, kSlack = 16, kLayers = 3;
constexpr uint32_t kMaxChunk = 130;  // query tokens of an item, in the batch of the prefill kernel
constexpr uint64_t kPageTokens = 64;
constexpr uint64_t kPartBytes = 32768;  // a layer's part of a page: two heads of 64 channels

Geometry mixed_geometry() {
  Geometry geometry;
  geometry.n_layers = kLayers;
  kvm_policy_params policy{};
  policy.layer_begin = 1;
  policy.n_layers = 1;
  policy.kv_head_mask[0] = 1;
  policy.retention = KVM_RETAIN_SINKS_RECENT;
  policy.n_sinks = 3;
  policy.n_recent = 64;
  policy.slack = kSlack;
  geometry.policies = {policy};
  kvm_layer_params window{};
  window.layer_begin = 2;
  window.n_layers = 1;
  window.window = 50;
  geometry.layers = {window};
  geometry.softcap = 3.0f;
  for (uint32_t n = 0; n < kLayers * geometry.n_q_heads; ++n) {
    geometry.sink_logits.push_back(n % 4 == 3 ? -INFINITY : 0.7f * static_cast<float>(n) - 2.0f);
  }
  return geometry;
}

Geometry plain_geometry() {
  Geometry geometry;
  geometry.n_layers = kLayers;
  return geometry;
}

struct World {
  Geometry geometry = mixed_geometry();
  uint64_t pool_bytes = 3 << 20;
  uint64_t host_bytes = 16 << 20;
  uint32_t move_percent = 10;  // of the operations
  // All layers alike: there is one kind of page, and room for so many. 0: not counted.
  uint64_t pool_pages = 0;
  uint64_t host_chunks = 0;
};

// A page, which is of all layers, counted while somebody holds it.
struct CountedPage {
  explicit CountedPage(uint64_t* n) : n_pages(n) { ++*n_pages; }
  ~CountedPage() { --*n_pages; }
  CountedPage(const CountedPage&) = delete;
  CountedPage& operator=(const CountedPage&) = delete;
  uint64_t* n_pages;
};

struct Refusals {
  uint64_t steps = 0, spills = 0, fetches = 0;
};

// The same model twice.
class Twins {
 public:
  Twins(uint64_t seed, const World& world)
      : world_(world),
        state_(seed),
        rig_(options(seed), world.geometry, world.pool_bytes, world.host_bytes) {
    kvm_embedded_params params{};
    params.struct_size = sizeof params;
    params.n_threads = 1;
    params.host_capacity_bytes = 256 << 20;
    EXPECT_EQ(kvm_open_embedded(&params, &host_), KVM_OK) << kvm_last_error();
    const Geometry& geometry = rig_.geometry();
    kvm_space_params space{};
    space.struct_size = sizeof space;
    space.name = "model";
    space.n_layers = geometry.n_layers;
    space.n_q_heads = geometry.n_q_heads;
    space.n_kv_heads = geometry.n_kv_heads;
    space.flags = geometry.v_in_k ? uint32_t{KVM_SPACE_V_IN_K} : 0;
    space.head_dim_k = geometry.dim;
    space.head_dim_v = geometry.dim_v();
    // Newest tokens of int4 are bf16 there. So its rows are those that a device reads, as they are.
    const uint32_t decoded = KVM_CODEC_F32;
    space.codec = geometry.codec == KVM_CODEC_I4 ? decoded : geometry.codec;
    space.logit_softcap = geometry.softcap;
    space.sink_logits = geometry.sink_logits.empty() ? nullptr : geometry.sink_logits.data();
    space.layers = geometry.layers.data();
    space.n_layer_params = static_cast<uint32_t>(geometry.layers.size());
    space.policies = geometry.policies.data();
    space.n_policies = static_cast<uint32_t>(geometry.policies.size());
    EXPECT_EQ(kvm_space_register(host_, &space, &host_space_), KVM_OK) << kvm_last_error();
    EXPECT_EQ(kvm_queue_create(host_, nullptr, &queue_), KVM_OK) << kvm_last_error();
    // Two batches, so that sequences change from one to the other, and one for chunks of prompts.
    for (kvm_cuda_batch*& batch : batches_) {
      batch = rig_.batch(rig_.batch_params(kMaxItems, 200, kMaxQuery, 600));
    }
    if (attention::gpu::is_prefill_on_devices(static_cast<CodecId>(rig_.geometry().codec),
                                              rig_.geometry().dim)) {
      chunks_ = rig_.batch(rig_.batch_params(kMaxItems, 200, kMaxChunk, 600));
    }
  }
  ~Twins() {
    kvm_queue_destroy(queue_);
    kvm_client_close(host_);
  }
  Twins(const Twins&) = delete;
  Twins& operator=(const Twins&) = delete;

  void run(uint32_t n_operations) {
    for (uint32_t i = 0; i < n_operations && !::testing::Test::HasFailure(); ++i) {
      const uint64_t chance = below(100);
      if (pairs_.size() < 3 || (chance < 6 && pairs_.size() < 8)) {
        create();
      } else if (chance < 14 && pairs_.size() < 8) {
        fork();
      } else if (chance < 20) {
        truncate();
      } else if (chance < 26) {
        free_one();
      } else if (chance < 26 + world_.move_percent) {
        move();
      } else {
        step();
      }
      if (chance % 8 == 0) {
        settle();
      }
    }
    settle();
    while (!pairs_.empty() && !::testing::Test::HasFailure()) {
      free_one();
    }
    kvm_cuda_stats stats{};
    stats.struct_size = sizeof stats;
    ASSERT_EQ(kvm_cuda_get_stats(rig_.client(), &stats), KVM_OK);
    EXPECT_EQ(stats.n_spilled, 0u);
    EXPECT_GT(n_reads_, 0u);
    std::printf(
        "%llu steps of which %llu found no room, %llu rows, %llu reads, %llu pages copied\n",
        static_cast<unsigned long long>(n_steps_), static_cast<unsigned long long>(refusals_.steps),
        static_cast<unsigned long long>(n_rows_), static_cast<unsigned long long>(n_reads_),
        static_cast<unsigned long long>(stats.n_pages_copied));
  }
  const Refusals& refusals() const { return refusals_; }

 private:
  struct Pair {
    kvm_seq_id device = 0;
    kvm_seq_id host = 0;
    uint64_t n_tokens = 0;
    uint64_t key = 0;
    bool spilled = false;
    std::vector<std::shared_ptr<CountedPage>> pages;  // null: on the host
  };
  // A row that the device has not come to, and what it should be.
  struct Expected {
    const float* o;
    const float* lse;
    std::vector<float> host_o;
    std::vector<float> host_lse;
  };

  // Rows that are read back from the device, and by the engine for CPUs.
  struct ReadBack {
    const uint8_t* device;
    std::vector<uint8_t> host;
  };

  static FakeOptions options(uint64_t seed) {
    FakeOptions options;
    options.seed = seed;
    options.eagerness = static_cast<uint32_t>(seed % 3 * 4);
    options.emulate = seed % 4 == 0;
    return options;
  }
  uint64_t below(uint64_t n) {
    state_ += kSplitMixStep;
    return splitmix64(state_) % n;
  }
  Pair& any() { return pairs_[below(pairs_.size())]; }

  void create() {
    Pair pair;
    pair.device = rig_.create();
    ASSERT_EQ(kvm_seq_create(host_, host_space_, nullptr, &pair.host), KVM_OK);
    pair.key = ++last_key_;
    pairs_.push_back(pair);
  }

  // Mostly within the slack, so that a policy allows it.
  uint64_t cut_of(const Pair& pair) {
    const uint64_t most = below(4) == 0 ? pair.n_tokens : kSlack / 2;
    return below(std::min<uint64_t>(pair.n_tokens, most) + 1);
  }

  void fork() {
    const Pair parent = any();
    Pair child = parent;
    child.key = ++last_key_;
    child.n_tokens -= cut_of(parent);
    child.pages.resize((child.n_tokens + kPageTokens - 1) / kPageTokens);
    const kvm_status status =
        kvm_seq_fork(rig_.client(), parent.device, child.n_tokens, &child.device);
    if (parent.spilled) {
      ASSERT_EQ(status, KVM_ERR_BUSY);
      return;
    }
    if (status == KVM_ERR_PARTIAL) {
      ASSERT_EQ(kvm_seq_fork(host_, parent.host, child.n_tokens, &child.host), KVM_ERR_PARTIAL)
          << parent.n_tokens << " " << child.n_tokens;
      return;  // rolled back before
    }
    ASSERT_EQ(status, KVM_OK) << kvm_last_error();
    ASSERT_EQ(kvm_seq_fork(host_, parent.host, child.n_tokens, &child.host), KVM_OK)
        << kvm_last_error();
    pairs_.push_back(child);
  }

  void truncate() {
    Pair& pair = any();
    const uint64_t n = pair.n_tokens - cut_of(pair);
    const kvm_status status = kvm_seq_truncate(rig_.client(), pair.device, n);
    if (pair.spilled || status == KVM_ERR_PARTIAL) {
      ASSERT_EQ(status, pair.spilled ? KVM_ERR_BUSY : KVM_ERR_PARTIAL);
      if (!pair.spilled) {
        ASSERT_EQ(kvm_seq_truncate(host_, pair.host, n), KVM_ERR_PARTIAL)
            << pair.n_tokens << " " << n;
      }
      return;
    }
    ASSERT_EQ(status, KVM_OK) << kvm_last_error();
    ASSERT_EQ(kvm_seq_truncate(host_, pair.host, n), KVM_OK) << kvm_last_error();
    pair.n_tokens = n;
    pair.pages.resize((n + kPageTokens - 1) / kPageTokens);
  }

  void free_one() {
    const size_t i = below(pairs_.size());
    ASSERT_EQ(kvm_seq_free(rig_.client(), pairs_[i].device), KVM_OK) << kvm_last_error();
    ASSERT_EQ(kvm_seq_free(host_, pairs_[i].host), KVM_OK) << kvm_last_error();
    pairs_.erase(pairs_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  void move() {
    Pair& pair = any();
    pair.spilled ? fetch(&pair) : spill(&pair);
  }

  // Chunks that a sequence takes on the host, all layers behind each other.
  static uint64_t chunks_of(uint64_t n_pages) {
    constexpr uint64_t kPartsPerChunk = kChunkBytes / kPartBytes;
    return (kLayers * n_pages + kPartsPerChunk - 1) / kPartsPerChunk;
  }

  void spill(Pair* pair) {
    uint64_t n_own = 0, n_chunks = 0;
    for (const auto& page : pair->pages) {
      n_own += page.use_count() == 1 ? 1 : 0;
    }
    for (const Pair& other : pairs_) {
      n_chunks += other.spilled ? chunks_of(pages_on_host(other)) : 0;
    }
    const Snapshot before = snapshot();
    const kvm_status status = kvm_cuda_spill(rig_.client(), pair->device, rig_.stream());
    if (world_.host_chunks != 0) {
      const bool fits = n_chunks + chunks_of(n_own) <= world_.host_chunks;
      ASSERT_EQ(status, fits ? KVM_OK : KVM_ERR_NO_SPACE) << kvm_last_error();
    }
    if (status == KVM_ERR_NO_SPACE) {
      ++refusals_.spills;
      ASSERT_TRUE(before == snapshot());
      return;
    }
    ASSERT_EQ(status, KVM_OK) << kvm_last_error();
    pair->spilled = true;
    for (auto& page : pair->pages) {
      if (page.use_count() == 1) {
        page.reset();
      }
    }
  }

  void fetch(Pair* pair) {
    const Snapshot before = snapshot();
    const kvm_status status = kvm_cuda_fetch(rig_.client(), pair->device, rig_.stream());
    if (world_.pool_pages != 0) {
      const bool fits = n_pages_ + pages_on_host(*pair) <= world_.pool_pages;
      ASSERT_EQ(status, fits ? KVM_OK : KVM_ERR_NO_SPACE) << kvm_last_error();
    }
    if (status == KVM_ERR_NO_SPACE) {
      ++refusals_.fetches;
      ASSERT_TRUE(before == snapshot());
      return;
    }
    ASSERT_EQ(status, KVM_OK) << kvm_last_error();
    pair->spilled = false;
    for (auto& page : pair->pages) {
      page = page != nullptr ? page : std::make_shared<CountedPage>(&n_pages_);
    }
  }

  static uint64_t pages_on_host(const Pair& pair) {
    uint64_t n = 0;
    for (const auto& page : pair.pages) {
      n += page == nullptr ? 1 : 0;
    }
    return n;
  }

  // What a caller can see of the sequences. Not the pages and chunks in use: those that copies were
  // on their way from or to go back whenever somebody looks. If one were lost, the count of pages
  // would disagree with what is refused later.
  struct Snapshot {
    uint64_t n_spilled, spilled_bytes, fetched_bytes;
    std::vector<uint64_t> seqs;
    bool operator==(const Snapshot&) const = default;
  };
  Snapshot snapshot() const {
    kvm_cuda_stats stats{};
    stats.struct_size = sizeof stats;
    EXPECT_EQ(kvm_cuda_get_stats(rig_.client(), &stats), KVM_OK) << kvm_last_error();
    EXPECT_TRUE(world_.pool_pages == 0 || stats.n_pages >= n_pages_);
    Snapshot seen{stats.n_spilled, stats.spilled_bytes, stats.fetched_bytes, {}};
    for (const Pair& pair : pairs_) {
      kvm_seq_info info{};
      info.struct_size = sizeof info;
      EXPECT_EQ(kvm_seq_get_info(rig_.client(), pair.device, &info), KVM_OK) << kvm_last_error();
      EXPECT_EQ(info.n_tokens_min, pair.n_tokens);
      seen.seqs.insert(seen.seqs.end(), {info.n_tokens_min, info.n_pages, info.bytes,
                                         info.bytes_shared, info.n_entries_dropped});
    }
    return seen;
  }

  // Pages that appends take, the copies of pages that forks share among them.
  static uint64_t pages_needed(const std::vector<kvm_cuda_item>& items,
                               const std::vector<Pair*>& whose) {
    uint64_t n = 0;
    std::map<const CountedPage*, long> n_left;  // references that this update gave up
    for (size_t i = 0; i < items.size(); ++i) {
      if (whose[i] == nullptr || items[i].n_append == 0) {
        continue;
      }
      const Pair& pair = *whose[i];
      if (pair.n_tokens % kPageTokens != 0) {
        const auto& last = pair.pages.back();
        if (last.use_count() - n_left[last.get()] > 1) {
          ++n_left[last.get()];
          ++n;
        }
      }
      n += (pair.n_tokens + items[i].n_append + kPageTokens - 1) / kPageTokens - pair.pages.size();
    }
    return n;
  }

  void grow(Pair* pair, uint32_t n_append) {
    if (n_append != 0 && pair->n_tokens % kPageTokens != 0 && pair->pages.back().use_count() > 1) {
      pair->pages.back() = std::make_shared<CountedPage>(&n_pages_);
    }
    pair->n_tokens += n_append;
    while (pair->pages.size() * kPageTokens < pair->n_tokens) {
      pair->pages.push_back(std::make_shared<CountedPage>(&n_pages_));
    }
  }

  void step();
  void host_step(Pair* pair, const kvm_cuda_item& of, uint32_t layer,
                 const std::vector<uint16_t>& q, Expected* expected);
  // Of an item of the batch's last update, some rows of a layer, behind the appends of both.
  void read_back(kvm_cuda_batch* batch, uint32_t item, uint32_t layer, const Pair& pair,
                 uint64_t n_tokens);
  void settle();

  const World world_;
  uint64_t state_;
  Rig rig_;
  kvm_client* host_ = nullptr;
  kvm_space_id host_space_ = 0;
  kvm_queue* queue_ = nullptr;
  kvm_cuda_batch* batches_[2] = {};
  kvm_cuda_batch* chunks_ = nullptr;  // null: of rows that the prefill kernel has not
  uint64_t n_pages_ = 0;              // in use by pairs_
  std::vector<Pair> pairs_;
  std::vector<Expected> pending_;
  std::vector<ReadBack> pending_reads_;
  uint64_t last_key_ = 0;
  uint64_t n_steps_ = 0, n_rows_ = 0, n_reads_ = 0;
  Refusals refusals_;
};

void Twins::step() {
  const uint64_t which = below(8);
  const bool prefill = which == 7 && chunks_ != nullptr;
  kvm_cuda_batch* const batch = prefill ? chunks_ : batches_[which % 2];
  std::vector<kvm_cuda_item> items;
  std::vector<Pair*> whose;
  std::vector<Rig::Row> rows;
  uint64_t trees[kMaxItems][kMaxQuery];
  uint32_t query_row = 0;
  for (Pair& pair : pairs_) {
    if (items.size() == kMaxItems || pair.spilled || below(3) == 0) {
      continue;
    }
    if (below(6) == 0 && items.size() + 1 < kMaxItems) {
      items.push_back({});  // a place left empty
      whose.push_back(nullptr);
    }
    kvm_cuda_item item{};
    item.seq = pair.device;
    item.n_append = static_cast<uint32_t>(below(4) == 0 ? below(50) : 1);
    if (prefill) {
      const uint64_t room = 200 - kMaxItems + items.size() - rows.size();  // a row for each other
      const uint64_t n = below(2) == 0 ? item.n_append : 1 + below(kMaxChunk);
      item.n_append = static_cast<uint32_t>(std::min(n, room));
    }
    if (pair.n_tokens + item.n_append == 0 || pair.n_tokens + item.n_append > 600) {
      item.n_append = pair.n_tokens == 0 ? 1 : 0;
    }
    item.append_row = static_cast<uint32_t>(rows.size());
    item.n_query = static_cast<uint32_t>(
        std::min<uint64_t>(below(kMaxQuery + 1), pair.n_tokens + item.n_append));
    if (prefill && item.n_append > kMaxQuery) {
      item.n_query = item.n_append - static_cast<uint32_t>(below(kMaxQuery));
    }
    item.query_row = query_row;
    query_row += item.n_query;
    if (below(3) == 0 && !prefill) {
      uint64_t* const words = trees[items.size()];
      for (uint32_t row = 0; row < item.n_query; ++row) {
        words[row] = below(uint64_t{1} << item.n_query);
      }
      item.tree_mask = words;
    }
    for (uint32_t t = 0; t < item.n_append; ++t) {
      rows.push_back({pair.key, pair.n_tokens + t});
    }
    items.push_back(item);
    whose.push_back(&pair);
  }
  ++n_steps_;
  const Snapshot before = snapshot();
  const bool fits = n_pages_ + pages_needed(items, whose) <= world_.pool_pages;
  const kvm_status status =
      kvm_cuda_update(batch, items.data(), static_cast<uint32_t>(items.size()), rig_.stream());
  if (world_.pool_pages != 0) {
    ASSERT_EQ(status, fits ? KVM_OK : KVM_ERR_NO_SPACE) << kvm_last_error();
  }
  if (status == KVM_ERR_NO_SPACE || status == KVM_ERR_PARTIAL) {
    ++refusals_.steps;
    ASSERT_TRUE(before == snapshot());
    return;
  }
  ASSERT_EQ(status, KVM_OK) << kvm_last_error();
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    if (!rows.empty()) {
      const kvm_tensor k = rig_.keys(rows, layer, false), v = rig_.keys(rows, layer, true);
      ASSERT_EQ(kvm_cuda_append(batch, layer, &k, &v, rig_.stream()), KVM_OK) << kvm_last_error();
    }
    const std::vector<uint16_t> q = rig_.queries(n_steps_ * 8 + layer, std::max(query_row, 1u));
    const Rig::Outputs out = rig_.outputs(std::max(query_row, 1u));
    kvm_cuda_attend_params attend{};
    attend.struct_size = sizeof attend;
    attend.layer = layer;
    attend.q = rig_.tensor(q, rig_.geometry().query_dtype());
    attend.o = out.o_tensor;
    attend.lse = out.lse_tensor;
    ASSERT_EQ(kvm_cuda_attend(batch, &attend, rig_.stream()), KVM_OK) << kvm_last_error();
    const uint64_t o_row = rig_.geometry().n_q_heads * rig_.geometry().dim_v();
    for (size_t i = 0; i < items.size(); ++i) {
      if (whose[i] != nullptr) {
        Expected expected{out.o + items[i].query_row * o_row,
                          out.lse + items[i].query_row * rig_.geometry().n_q_heads,
                          {},
                          {}};
        host_step(whose[i], items[i], layer, q, &expected);
        pending_.push_back(std::move(expected));
        if (below(4) == 0) {
          read_back(batch, static_cast<uint32_t>(i), layer, *whose[i],
                    whose[i]->n_tokens + items[i].n_append);
        }
      }
    }
  }
  for (size_t i = 0; i < items.size(); ++i) {
    if (whose[i] != nullptr) {
      grow(whose[i], items[i].n_append);
    }
  }
}

void Twins::host_step(Pair* pair, const kvm_cuda_item& of, uint32_t layer,
                      const std::vector<uint16_t>& q, Expected* expected) {
  const uint32_t n_append = of.n_append, n_query = of.n_query;
  const Geometry& geometry = rig_.geometry();
  std::vector<float> k, v;
  for (uint32_t t = 0; t < n_append; ++t) {
    for (uint32_t head = 0; head < geometry.n_kv_heads; ++head) {
      const uint64_t position = pair->n_tokens + t;
      for (const bool is_v : {false, true}) {
        std::vector<float>& to = is_v ? v : k;
        if (geometry.codec == KVM_CODEC_I4) {
          const std::vector<float> row = rig_.stored_row(pair->key, layer, head, position, is_v);
          to.insert(to.end(), row.begin(), row.end());
          continue;
        }
        for (uint32_t i = 0; i < geometry.dim; ++i) {
          to.push_back(stored_number(pair->key, layer, head, position, i, is_v));
        }
      }
    }
  }
  if (n_append == 0 && n_query == 0) {
    return;
  }
  const uint64_t row = uint64_t{geometry.n_q_heads} * geometry.dim;
  const uint64_t o_row = uint64_t{geometry.n_q_heads} * geometry.dim_v();
  expected->host_o.resize(n_query * o_row);
  expected->host_lse.resize(n_query * geometry.n_q_heads);
  kvm_item item{};
  item.seq = pair->host;
  item.append_position = KVM_POSITION_END;
  item.n_append = n_append;
  item.n_query = n_query;
  item.query_position = KVM_POSITION_END;
  kvm_step_params params{};
  params.struct_size = sizeof params;
  params.space = host_space_;
  params.layer_begin = layer;
  params.n_items = 1;
  params.items = &item;
  if (of.tree_mask != nullptr && n_query != 0) {
    item.flags = KVM_ITEM_TREE;
    params.tree_mask = of.tree_mask;
    params.n_tree_words = n_query;
  }
  params.k = kvm_host_tensor(k.data(), k.size() * 4, KVM_DTYPE_F32);
  if (!geometry.v_in_k) {
    params.v = kvm_host_tensor(v.data(), v.size() * 4, KVM_DTYPE_F32);
  }
  params.q =
      kvm_host_tensor(q.data() + of.query_row * row, n_query * row * 2, geometry.query_dtype());
  params.o = kvm_host_tensor(expected->host_o.data(), n_query * o_row * 4, KVM_DTYPE_F32);
  params.lse =
      kvm_host_tensor(expected->host_lse.data(), expected->host_lse.size() * 4, KVM_DTYPE_F32);
  const kvm_status status = n_query == 0    ? kvm_append(queue_, &params)
                            : n_append == 0 ? kvm_attend(queue_, &params, nullptr)
                                            : kvm_step(queue_, &params, nullptr);
  ASSERT_EQ(status, KVM_OK) << kvm_last_error();
}

void Twins::read_back(kvm_cuda_batch* batch, uint32_t item, uint32_t layer, const Pair& pair,
                      uint64_t n_tokens) {
  const Geometry& geometry = rig_.geometry();
  if (n_tokens == 0) {
    return;
  }
  constexpr uint32_t kDtypes[] = {KVM_DTYPE_F32, KVM_DTYPE_F16, KVM_DTYPE_BF16};
  const uint32_t dtype = kDtypes[below(3)];
  const bool is_v = below(2) == 0;
  kvm_cuda_read_params params{};
  params.struct_size = sizeof params;
  params.item = item;
  params.layer = layer;
  params.position = below(n_tokens);
  params.n_tokens = 1 + below(n_tokens - params.position);
  const uint64_t row = uint64_t{geometry.n_kv_heads} * (is_v ? geometry.dim_v() : geometry.dim);
  const uint64_t size_bytes = params.n_tokens * row * (dtype == KVM_DTYPE_F32 ? 4 : 2);
  ReadBack read{rig_.allocate(size_bytes), std::vector<uint8_t>(size_bytes)};
  (is_v ? params.v : params.k) = kvm_device_tensor(read.device, size_bytes, dtype);
  const kvm_status status = kvm_cuda_read(batch, &params, rig_.stream());
  kvm_read_params there{};
  there.struct_size = sizeof there;
  there.seq = pair.host;
  there.layer = layer;
  there.position = params.position;
  there.n_tokens = params.n_tokens;
  (is_v ? there.v : there.k) = kvm_host_tensor(read.host.data(), size_bytes, dtype);
  const kvm_status status_there = kvm_read(queue_, &there);
  if (status == KVM_ERR_PARTIAL) {
    // Neither sinks' pages nor what a token of the window sees.
    ASSERT_FALSE(geometry.policies.empty());
    ASSERT_GT(params.position + params.n_tokens, kPageTokens);
    ASSERT_LT(params.position + geometry.policies[0].n_recent, n_tokens);
    return;
  }
  ASSERT_EQ(status, KVM_OK) << kvm_last_error();
  if (status_there != KVM_ERR_PARTIAL) {
    ASSERT_EQ(status_there, KVM_OK) << kvm_last_error();
    pending_reads_.push_back(std::move(read));
  }
}

void Twins::settle() {
  rig_.driver().settle();
  for (const ReadBack& read : pending_reads_) {
    ASSERT_EQ(std::memcmp(read.device, read.host.data(), read.host.size()), 0);
    ++n_reads_;
  }
  pending_reads_.clear();
  const uint32_t dim = rig_.geometry().dim_v();
  for (const Expected& row : pending_) {
    for (size_t h = 0; h < row.host_lse.size(); ++h) {
      double wrong = 0, norm = 0;
      for (uint32_t i = 0; i < dim; ++i) {
        const double there = row.host_o[h * dim + i], here = row.o[h * dim + i];
        wrong += (here - there) * (here - there);
        norm += there * there;
      }
      ASSERT_TRUE(std::sqrt(wrong) <= 1e-2 * std::sqrt(norm)) << std::sqrt(wrong / norm);
      ASSERT_TRUE(row.lse[h] == row.host_lse[h] || std::fabs(row.lse[h] - row.host_lse[h]) <= 4e-3)
          << row.lse[h] << " and " << row.host_lse[h];
      ++n_rows_;
    }
  }
  pending_.clear();
  rig_.forget_memory();
}

TEST(DeviceModelTest, RandomOperationsGiveWhatTheEngineForCpusGives) {
  const bool nightly = std::getenv("KVM_NIGHTLY") != nullptr;
  for (uint64_t seed = 1; seed <= (nightly ? 60u : 5u); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    constexpr uint32_t kCodecs[] = {KVM_CODEC_F16, KVM_CODEC_I8, KVM_CODEC_BF16, KVM_CODEC_F8E4M3,
                                    KVM_CODEC_I4};
    World world;
    world.geometry.codec = kCodecs[(seed + seed / 5) % 5];
    constexpr uint32_t kDims[] = {80, 64, 96, 192};
    if (seed % 5 == 3) {
      world.geometry.codec = seed % 2 == 0 ? KVM_CODEC_F16 : KVM_CODEC_BF16;
      world.geometry.dim = 576;
      world.geometry.v_in_k = true;
    } else if (world.geometry.codec != KVM_CODEC_I4) {
      world.geometry.dim = kDims[seed / 2 % 4];
    }
    world.pool_bytes = world.pool_bytes * world.geometry.dim / 64;
    Twins twins(seed, world);
    // The emulator takes longer.
    twins.run((nightly ? 600u : 120u) / (seed % 4 == 0 ? 6 : 1));
    if (HasFailure()) {
      return;
    }
  }
}

TEST(DeviceModelTest, FullPoolsRefuseWhatDoesNotFitAndChangeNothing) {
  const bool nightly = std::getenv("KVM_NIGHTLY") != nullptr;
  Refusals all;
  for (uint64_t seed = 1; seed <= (nightly ? 60u : 3u); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    World world;
    world.geometry = plain_geometry();
    world.pool_pages = 8;
    world.move_percent = 30;
    world.pool_bytes = world.pool_pages * kLayers * kPartBytes;
    world.host_chunks = 3;
    world.host_bytes = world.host_chunks * kChunkBytes;
    Twins twins(seed, world);
    twins.run((nightly ? 900u : 200u) / (seed % 4 == 0 ? 6 : 1));
    if (HasFailure()) {
      return;
    }
    all.steps += twins.refusals().steps;
    all.spills += twins.refusals().spills;
    all.fetches += twins.refusals().fetches;
  }
  std::printf("refused: %llu steps, %llu spills, %llu fetches\n",
              static_cast<unsigned long long>(all.steps),
              static_cast<unsigned long long>(all.spills),
              static_cast<unsigned long long>(all.fetches));
  // Otherwise nothing was tried.
  EXPECT_GT(all.steps, 20u);
  EXPECT_GT(all.spills, 0u);
  EXPECT_GT(all.fetches, 5u);
}

}  // namespace
}  // namespace kvm::device::testing
