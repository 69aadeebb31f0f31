// SPDX-License-Identifier: Apache-2.0
// Steps whose lengths only the device knows (kvm_cuda_set_lengths), over a device of plain memory:
// speculative decoding planned ahead of what it finds, against fp64 arithmetic and against steps
// that were told true lengths.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/round.h"
#include "base/splitmix.h"
#include "device/sequence_store.h"
#include "tests/gpu/device_rig.h"

namespace kvm::device::testing {
namespace {

constexpr uint32_t kItems = 2;

struct LoopSpec {
  const char* name = "";
  Geometry geometry;
  bool emulate = false;
  uint32_t draft = 4;      // rows that a step appends and queries, of which it keeps 1 to all
  uint32_t again = 0;      // tokens that it appends once more in front of them, over themselves
  uint32_t ahead = 1;      // steps that are launched before the host knows what became of one
  uint32_t max_query = 8;  // of the batch
  uint32_t n_steps = 40;
  std::vector<uint64_t> prompts = {50, 3};
  bool tree = false;
  bool pauses = false;  // sometimes the host waits for everything
  uint32_t flags = 0;
};

// What a step of one sequence should have given.
struct Expected {
  Shadow shadow;  // with all rows of the step
  std::vector<uint64_t> tree;
};

// A speculative decoder. What it keeps of each draft is a function of the seed; with max_unsure the
// host learns of it `ahead` steps later, and lengths are on the device; without, it is told at
// once.
class Decoder {
 public:
  Decoder(const LoopSpec& spec, bool told)
      : spec_(spec),
        told_(told),
        rig_({.eagerness = 3, .emulate = spec.emulate}, spec.geometry),
        prompts_(rig_.batch(rig_.batch_params(1, kMostPrompt, 1, kMaxTokens))) {
    kvm_cuda_batch_params params =
        rig_.batch_params(kItems, kMostPrompt, spec.max_query, kMaxTokens);
    params.flags = spec.flags;
    params.max_unsure = told ? 0 : uint64_t{spec.ahead} * (spec.draft - 1) + spec.again;
    batch_ = rig_.batch(params);
    n_rows_ = kItems * spec.draft;
    n_appended_ = kItems * (spec.again + spec.draft);
  }

  void run() {
    for (uint32_t i = 0; i < kItems; ++i) {
      ASSERT_NO_FATAL_FAILURE(begin_sequence(i));
      ASSERT_NO_FATAL_FAILURE(cut(i, host_[i] - spec_.again));
    }
    ASSERT_NO_FATAL_FAILURE(capture());
    for (uint32_t t = 0; t < spec_.n_steps; ++t) {
      ASSERT_NO_FATAL_FAILURE(step(t)) << "step " << t;
      ASSERT_NO_FATAL_FAILURE(reconcile(t)) << "step " << t;
    }
    for (uint32_t i = 0; i < kItems; ++i) {
      ASSERT_NO_FATAL_FAILURE(cut(i, truth_[i].size() - spec_.again));
    }
    rig_.driver().settle();
  }

  void check() {
    for (uint32_t t = 0; t < spec_.n_steps; ++t) {
      for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
        for (uint32_t row = 0; row < n_rows_; ++row) {
          const Expected& of = expected_[t][row / spec_.draft];
          const uint64_t begin = of.shadow.keys.size() - spec_.draft;
          const uint32_t j = row % spec_.draft;
          rig_.expect_row(outputs_[t][layer], row, queries_[t][layer], layer, of.shadow,
                          of.tree.empty() ? Rig::Query{begin + j}
                                          : Rig::Query{begin + j, true, begin, of.tree[j]},
                          "step " + std::to_string(t) + " layer " + std::to_string(layer));
        }
      }
    }
    for (uint32_t i = 0; i < kItems; ++i) {
      kvm_seq_info info{};
      info.struct_size = sizeof info;
      ASSERT_EQ(kvm_seq_get_info(rig_.client(), seqs_[i], &info), KVM_OK);
      EXPECT_EQ(info.n_tokens_min, truth_[i].size() - spec_.again);
    }
  }

  // All results, o and lse of each layer of each step.
  std::vector<float> results() const {
    std::vector<float> all;
    const uint64_t n_lse = uint64_t{n_rows_} * spec_.geometry.n_q_heads;
    for (const std::vector<Rig::Outputs>& of_step : outputs_) {
      for (const Rig::Outputs& out : of_step) {
        all.insert(all.end(), out.o, out.o + n_lse * spec_.geometry.dim_v());
        all.insert(all.end(), out.lse, out.lse + n_lse);
      }
    }
    return all;
  }

 private:
  static constexpr uint32_t kMostPrompt = 4200;
  static constexpr uint64_t kMaxTokens = 8000;

  uint64_t chance(uint32_t t, uint32_t i) const { return splitmix64(t * 977 + i * 31 + 5); }
  uint32_t kept_of(uint32_t t, uint32_t i) const {
    return 1 + static_cast<uint32_t>(chance(t, i) % spec_.draft);
  }

  // The first one's prompt comes in the batch for prompts, the others' in that of the loop.
  void begin_sequence(uint32_t i) {
    seqs_[i] = rig_.create();
    const auto n = static_cast<uint32_t>(spec_.prompts[i]);
    kvm_cuda_item items[kItems] = {};
    items[i].seq = seqs_[i];
    items[i].n_append = n;
    kvm_cuda_batch* const batch = i == 0 ? prompts_ : batch_;
    ASSERT_EQ(kvm_cuda_update(batch, items, i == 0 ? 1 : kItems, rig_.stream()), KVM_OK)
        << kvm_last_error();
    if (i != 0 && !told_) {
      ASSERT_EQ(kvm_cuda_set_lengths(batch, nullptr, rig_.stream()), KVM_OK) << kvm_last_error();
    }
    std::vector<Rig::Row> rows;
    for (uint64_t p = 0; p < n; ++p) {
      rows.push_back({i + 1, p});
    }
    truth_[i].assign(n, i + 1);
    host_[i] = n;
    for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
      const kvm_tensor k = rig_.keys(rows, layer, false), v = rig_.keys(rows, layer, true);
      ASSERT_EQ(append(batch, layer, k, v), KVM_OK) << kvm_last_error();
    }
  }

  kvm_status append(kvm_cuda_batch* batch, uint32_t layer, const kvm_tensor& k,
                    const kvm_tensor& v) {
    for (const kvm_layer_params& of : spec_.geometry.layers) {
      if (of.kind == KVM_LAYER_ALIAS && layer >= of.layer_begin &&
          layer < of.layer_begin + of.n_layers) {
        return KVM_OK;
      }
    }
    return kvm_cuda_append(batch, layer, &k, &v, rig_.stream());
  }

  // Lengths, appends and attends of all layers, over tensors whose addresses stay.
  void capture() {
    lengths_ = rig_.allocate(kItems * sizeof(uint32_t));
    const uint64_t row_bytes = uint64_t{spec_.geometry.n_kv_heads} * spec_.geometry.dim * 4;
    q_bytes_ = uint64_t{n_rows_} * spec_.geometry.n_q_heads * spec_.geometry.dim * 2;
    k_bytes_ = n_appended_ * row_bytes;
    for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
      k_.push_back(rig_.allocate(k_bytes_));
      v_.push_back(rig_.allocate(k_bytes_));
      q_.push_back(rig_.allocate(q_bytes_));
      out_.push_back(rig_.outputs(n_rows_));
    }
    ASSERT_EQ(kvm_cuda_update(batch_, nullptr, 0, rig_.stream()), KVM_OK) << kvm_last_error();
    rig_.driver().begin_capture(rig_.stream());
    if (!told_) {
      const kvm_buffer lengths =
          kvm_device_tensor(lengths_, kItems * sizeof(uint32_t), KVM_DTYPE_F32).buffer;
      ASSERT_EQ(kvm_cuda_set_lengths(batch_, &lengths, rig_.stream()), KVM_OK) << kvm_last_error();
    }
    for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
      const kvm_tensor k = kvm_device_tensor(k_[layer], k_bytes_, KVM_DTYPE_F32);
      const kvm_tensor v = spec_.geometry.v_in_k
                               ? kvm_tensor{}
                               : kvm_device_tensor(v_[layer], k_bytes_, KVM_DTYPE_F32);
      ASSERT_EQ(append(batch_, layer, k, v), KVM_OK) << kvm_last_error();
      kvm_cuda_attend_params attend{};
      attend.struct_size = sizeof attend;
      attend.layer = layer;
      attend.q = kvm_device_tensor(q_[layer], q_bytes_, spec_.geometry.query_dtype());
      attend.o = out_[layer].o_tensor;
      attend.lse = out_[layer].lse_tensor;
      ASSERT_EQ(kvm_cuda_attend(batch_, &attend, rig_.stream()), KVM_OK) << kvm_last_error();
    }
    graph_ = rig_.driver().end_capture(rig_.stream());
  }

  void copy(void* to, const void* from, uint64_t size_bytes) {
    ASSERT_TRUE(rig_.driver().copy(to, from, size_bytes, rig_.stream()).is_ok());
  }

  // Everything is enqueued: the device may be steps behind.
  void step(uint32_t t) {
    std::vector<kvm_cuda_item> items(kItems);
    std::vector<uint32_t> lengths;
    std::vector<Rig::Row> rows;
    expected_.emplace_back(kItems);
    for (uint32_t i = 0; i < kItems; ++i) {
      Expected& of = expected_.back()[i];
      items[i].seq = seqs_[i];
      items[i].n_append = spec_.again + spec_.draft;
      items[i].append_row = i * items[i].n_append;
      items[i].n_query = spec_.draft;
      items[i].query_row = i * spec_.draft;
      if (spec_.tree && t % 3 != 2) {
        for (uint32_t row = 0; row < spec_.draft; ++row) {
          of.tree.push_back(chance(t, 100 + i * 64 + row) >> (64 - spec_.draft));
        }
        items[i].tree_mask = of.tree.data();
      }
      const uint64_t begin = truth_[i].size() - spec_.again;
      lengths.push_back(static_cast<uint32_t>(begin));
      for (uint64_t p = begin; p < truth_[i].size(); ++p) {
        rows.push_back({truth_[i][p], p});
      }
      of.shadow.keys = truth_[i];
      const uint64_t key = 1000 * (i + 1) + t;
      for (uint32_t row = 0; row < spec_.draft; ++row) {
        rows.push_back({key, of.shadow.keys.size()});
        of.shadow.keys.push_back(key);
      }
      truth_[i].insert(truth_[i].end(), kept_of(t, i), key);
      host_[i] += items[i].n_append;
    }
    ASSERT_EQ(kvm_cuda_update(batch_, items.data(), kItems, rig_.stream()), KVM_OK)
        << kvm_last_error();
    copy(lengths_, rig_.upload(lengths.data(), kItems * sizeof(uint32_t)),
         kItems * sizeof(uint32_t));
    queries_.emplace_back();
    outputs_.emplace_back();
    for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
      queries_.back().push_back(rig_.queries(t * 100 + layer, n_rows_));
      copy(q_[layer], rig_.upload(queries_.back().back().data(), q_bytes_), q_bytes_);
      const kvm_tensor k = rig_.keys(rows, layer, false), v = rig_.keys(rows, layer, true);
      copy(k_[layer], reinterpret_cast<const void*>(k.buffer.where), k_bytes_);
      if (!spec_.geometry.v_in_k) {
        copy(v_[layer], reinterpret_cast<const void*>(v.buffer.where), k_bytes_);
      }
    }
    rig_.driver().replay(graph_, rig_.stream());
    const uint64_t lse_bytes = uint64_t{n_rows_} * spec_.geometry.n_q_heads * sizeof(float);
    for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
      const Rig::Outputs out = rig_.outputs(n_rows_);
      copy(out.o, out_[layer].o, lse_bytes * spec_.geometry.dim_v());
      copy(out.lse, out_[layer].lse, lse_bytes);
      outputs_.back().push_back(out);
    }
    lengths_of_.push_back({truth_[0].size(), truth_[1].size()});
  }

  void cut(uint32_t i, uint64_t n_tokens) {
    ASSERT_LE(n_tokens, host_[i]);
    ASSERT_EQ(kvm_seq_truncate(rig_.client(), seqs_[i], n_tokens), KVM_OK) << kvm_last_error();
    host_[i] = n_tokens;
  }

  // What the host says behind the launch of step t.
  void reconcile(uint32_t t) {
    const uint32_t ahead = told_ || (spec_.pauses && chance(t, 77) % 5 == 0) ? 0 : spec_.ahead;
    for (uint32_t i = 0; i < kItems; ++i) {
      // Behind a pause the host knows more than usual for a while.
      uint64_t most = host_[i] - spec_.again;
      if (t >= ahead) {
        most =
            std::min(most, lengths_of_[t - ahead][i] + uint64_t{ahead} * spec_.draft - spec_.again);
      }
      ASSERT_NO_FATAL_FAILURE(cut(i, most));
    }
  }

  const LoopSpec spec_;
  const bool told_;
  Rig rig_;
  kvm_cuda_batch* const prompts_;
  kvm_cuda_batch* batch_ = nullptr;
  uint32_t n_rows_ = 0, n_appended_ = 0;
  kvm_seq_id seqs_[kItems] = {};
  std::vector<uint64_t> truth_[kItems];            // keys of what was kept
  uint64_t host_[kItems] = {};                     // what the host has told
  std::vector<std::vector<uint64_t>> lengths_of_;  // [step] once it was kept what was
  uint8_t* lengths_ = nullptr;
  uint64_t q_bytes_ = 0, k_bytes_ = 0;
  std::vector<uint8_t*> k_, v_, q_;
  std::vector<Rig::Outputs> out_;
  FakeDriver::Graph graph_;
  std::vector<std::vector<Expected>> expected_;              // [step][item]
  std::vector<std::vector<std::vector<uint16_t>>> queries_;  // [step][layer]
  std::vector<std::vector<Rig::Outputs>> outputs_;           // likewise
};

// A head with sinks and a window beside one that keeps all, a layer with a window, one that reads
// the keys of another. No slack: what a shorter sequence sees is kept for it alone.
Geometry mixed_geometry() {
  Geometry geometry;
  geometry.n_layers = 3;
  kvm_policy_params policy{};
  policy.layer_begin = 0;
  policy.n_layers = 2;
  policy.kv_head_mask[0] = 2;
  policy.retention = KVM_RETAIN_SINKS_RECENT;
  policy.n_sinks = 5;
  policy.n_recent = 30;
  geometry.policies = {policy};
  kvm_layer_params layers[2] = {};
  layers[0].layer_begin = 1;
  layers[0].n_layers = 1;
  layers[0].window = 33;
  layers[1].layer_begin = 2;
  layers[1].n_layers = 1;
  layers[1].kind = KVM_LAYER_ALIAS;
  layers[1].target = 0;
  geometry.layers = {layers[0], layers[1]};
  return geometry;
}

Geometry small_geometry() {
  Geometry geometry;
  geometry.n_layers = 1;
  return geometry;
}

std::vector<LoopSpec> all_loops() {
  std::vector<LoopSpec> loops;
  loops.push_back({.name = "plain", .geometry = small_geometry(), .emulate = true, .n_steps = 12});
  loops.push_back({.name = "mixed", .geometry = mixed_geometry(), .n_steps = 90});
  loops.push_back({.name = "two_ahead",
                   .geometry = mixed_geometry(),
                   .draft = 6,
                   .ahead = 2,
                   .n_steps = 60,
                   .pauses = true});
  loops.push_back({.name = "trees",
                   .geometry = mixed_geometry(),
                   .draft = 7,
                   .ahead = 2,
                   .n_steps = 40,
                   .tree = true,
                   .pauses = true});
  loops.push_back({.name = "paths",
                   .geometry = mixed_geometry(),
                   .draft = 5,
                   .again = 3,
                   .ahead = 2,
                   .tree = true,
                   .pauses = true});
  loops.push_back({.name = "kernels",
                   .geometry = mixed_geometry(),
                   .emulate = true,
                   .draft = 3,
                   .n_steps = 16,
                   .prompts = {60, 28},
                   .tree = true});
  loops.push_back({.name = "chunks",
                   .geometry = mixed_geometry(),
                   .emulate = true,
                   .max_query = 70,
                   .n_steps = 12,
                   .prompts = {58, 120}});
  loops.push_back({.name = "latent",
                   .geometry = latent_geometry(16),
                   .emulate = true,
                   .draft = 2,
                   .n_steps = 6,
                   .prompts = {62, 1}});
  Geometry codes = small_geometry();
  codes.codec = KVM_CODEC_I8;
  codes.sink_logits = {1, 2, -INFINITY, 0};
  loops.push_back({.name = "int8_sinks", .geometry = codes, .emulate = true, .n_steps = 10});
  return loops;
}

class DeviceLengths : public ::testing::TestWithParam<LoopSpec> {};

TEST_P(DeviceLengths, StepsThatWerePlannedAheadSeeTheTruth) {
  Decoder decoder(GetParam(), false);
  ASSERT_NO_FATAL_FAILURE(decoder.run());
  decoder.check();
}

INSTANTIATE_TEST_SUITE_P(All, DeviceLengths, ::testing::ValuesIn(all_loops()),
                         [](const auto& param) { return param.param.name; });

// Also where a sequence turns out to have one piece that the plan has cut in two, and with sinks,
// which count where results are written.
TEST(DeviceLengthsTest, ReproducibleBatchesGiveTheBitsOfTrueLengths) {
  LoopSpec spec;
  spec.geometry.n_layers = 1;
  spec.geometry.n_q_heads = 2;
  spec.geometry.n_kv_heads = 1;
  spec.geometry.sink_logits = {3, -1};
  spec.emulate = true;
  spec.draft = 5;
  spec.ahead = 2;
  spec.n_steps = 6;
  spec.prompts = {4083, 20};
  spec.flags = KVM_CUDA_REPRODUCIBLE;
  for (const uint32_t max_query : {8u, 80u}) {
    SCOPED_TRACE(max_query);
    spec.max_query = max_query;
    Decoder ahead(spec, false), told(spec, true);
    ASSERT_NO_FATAL_FAILURE(ahead.run());
    ASSERT_NO_FATAL_FAILURE(told.run());
    const std::vector<float> results = ahead.results(), expected = told.results();
    ASSERT_EQ(results.size(), expected.size());
    EXPECT_EQ(std::memcmp(results.data(), expected.data(), results.size() * sizeof(float)), 0);
  }
}

// --- What is kept -------------------------------------------------------------------------------

// A list of one head that keeps sinks and a window, without a device: whatever steps query of
// whichever length turns out to be true is there, what they append is, too, and the rest goes, but
// in steps that neither append nor query.
class Keeper {
 public:
  explicit Keeper(uint64_t seed) : seed_(seed), max_unsure_(1 + below(150)), seq_(layout()) {}

  void run() {
    for (uint32_t step = 0; step < 60; ++step) {
      ASSERT_NO_FATAL_FAILURE(grow()) << "step " << step;
    }
    EXPECT_GT(seq_.lists[0].kept_from, seq_.space->lists[0].first_droppable());
  }

 private:
  uint64_t below(uint64_t n) { return splitmix64(seed_ += kSplitMixStep) % n; }

  std::shared_ptr<const SpaceLayout> layout() {
    auto space = std::make_shared<SpaceLayout>();
    ListLayout list;
    list.n_heads = list.n_layers = 1;
    list.n_sinks = below(100);
    list.n_recent = 1 + below(100);
    list.slack = below(2) == 0 ? 0 : below(20);
    space->lists.push_back(list);
    return space;
  }

  void grow() {
    const ListLayout& of = seq_.space->lists[0];
    DevicePageList& list = seq_.lists[0];
    // A prompt, or a draft; by a batch that knows lengths, for which the host has waited, or not.
    const bool sure = below(6) == 0;
    const auto n_append = static_cast<uint32_t>(below(below(4) == 0 ? 300 : max_unsure_ + 4));
    if (sure) {
      ASSERT_NO_FATAL_FAILURE(truncate(length_));
    }
    const uint64_t n_before = seq_.n_tokens;
    Growth growth = Growth::of(&seq_, n_append, 0, sure ? 0 : static_cast<uint32_t>(max_unsure_));
    const uint64_t n_query =
        below(std::min(of.slack + 1, n_before - growth.n_unsure) + n_append + 1);
    growth.n_query = static_cast<uint32_t>(n_query);
    ASSERT_GE(length_, n_before - growth.n_unsure);
    ASSERT_TRUE(growth.check().is_ok()) << growth.check().message();
    // Not of sinks, but of the window of the first row.
    const uint64_t first = length_ + n_append - n_query;
    const uint64_t seen = first + 1 > of.n_recent ? first + 1 - of.n_recent : 0;
    ASSERT_TRUE(n_query == 0 || list.kept_from == of.first_droppable() || seen >= list.kept_from);
    seq_.n_tokens += n_append;
    list.pages.resize(div_up(seq_.n_tokens, kPageTokens), tiers::PageRef{1});
    growth.finish(n_before, [](tiers::PageRef) {});
    ASSERT_TRUE(list.kept_from == of.first_droppable() ||
                (list.kept_from <= length_ / kPageTokens * kPageTokens &&
                 (n_query == 0 || list.kept_from <= seen)));
    const uint64_t at_most = of.n_recent + of.slack + n_query + 2 * max_unsure_ + n_append;
    ASSERT_TRUE((n_append == 0 && n_query == 0) ||
                list.kept_from + at_most + 2 * kPageTokens >= seq_.n_tokens);
    // What is kept of it, and how much of that the host says.
    const uint64_t rejected = sure ? 0 : below(std::min<uint64_t>(n_append, max_unsure_) + 1);
    length_ += n_append - rejected;
    const uint64_t longest = std::min(seq_.n_tokens, length_ + max_unsure_);
    const bool needs = seq_.n_tokens > longest;
    ASSERT_NO_FATAL_FAILURE(
        truncate(needs || below(2) == 0 ? length_ + below(longest - length_ + 1) : longest));
  }

  void truncate(uint64_t n_tokens) {
    ASSERT_TRUE(seq_.check_visible(n_tokens, n_tokens).is_ok());
    seq_.cut(n_tokens, [](tiers::PageRef) {});
  }

  uint64_t seed_;
  const uint64_t max_unsure_;
  DeviceSequence seq_;
  uint64_t length_ = 0;  // the true one
};

TEST(DeviceLengthsTest, PoliciesKeepWhatShorterSequencesSee) {
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE(seed);
    Keeper keeper(seed);
    ASSERT_NO_FATAL_FAILURE(keeper.run());
  }
}

// --- Single steps -------------------------------------------------------------------------------

kvm_cuda_batch* unsure_batch(Rig* rig, uint32_t max_append, uint64_t max_unsure) {
  kvm_cuda_batch_params params = rig->batch_params(2, max_append, 4);
  params.max_unsure = max_unsure;
  return rig->batch(params);
}

// A step of one sequence that appends rows of `key` at `position` and later, and queries as many.
struct OneStep {
  std::vector<uint16_t> q;
  Rig::Outputs out;
};
OneStep one_step(Rig* rig, kvm_cuda_batch* batch, kvm_seq_id seq, uint64_t key, uint64_t position,
                 uint32_t n, const uint32_t* length) {
  OneStep step;
  kvm_cuda_item item{};
  item.seq = seq;
  item.n_append = n;
  item.n_query = std::min(n, 4u);
  EXPECT_EQ(kvm_cuda_update(batch, &item, 1, rig->stream()), KVM_OK) << kvm_last_error();
  if (length != nullptr) {
    const std::vector<uint32_t> lengths = {*length, 0};
    const kvm_buffer buffer = rig->tensor(lengths, KVM_DTYPE_F32).buffer;
    EXPECT_EQ(kvm_cuda_set_lengths(batch, &buffer, rig->stream()), KVM_OK) << kvm_last_error();
  }
  std::vector<Rig::Row> rows;
  for (uint32_t i = 0; i < n; ++i) {
    rows.push_back({key, position + i});
  }
  const kvm_tensor k = rig->keys(rows, 0, false), v = rig->keys(rows, 0, true);
  EXPECT_EQ(kvm_cuda_append(batch, 0, &k, &v, rig->stream()), KVM_OK) << kvm_last_error();
  step.q = rig->queries(key, item.n_query);
  step.out = rig->outputs(item.n_query);
  kvm_cuda_attend_params attend{};
  attend.struct_size = sizeof attend;
  attend.q = rig->tensor(step.q, rig->geometry().query_dtype());
  attend.o = step.out.o_tensor;
  attend.lse = step.out.lse_tensor;
  EXPECT_EQ(kvm_cuda_attend(batch, &attend, rig->stream()), KVM_OK) << kvm_last_error();
  return step;
}

// The lengths that count are those that a sequence can have.
TEST(DeviceLengthsTest, LengthsThatCannotBeCountAsTheNearest) {
  Rig rig({}, small_geometry());
  kvm_cuda_batch* const batch = unsure_batch(&rig, 200, 10);
  kvm_cuda_batch* const sure = rig.batch(rig.batch_params(1, 200, 4));
  // 100 tokens that are sure, then 20 of which 10 are not, 4 tokens behind them; and what counts.
  const struct {
    uint32_t told, counts;
  } cases[] = {{0, 110}, {109, 110}, {113, 113}, {120, 120}, {121, 120}, {UINT32_MAX, 120}};
  for (const auto& [told, counts] : cases) {
    SCOPED_TRACE(told);
    const kvm_seq_id seq = rig.create();
    one_step(&rig, sure, seq, 1, 0, 100, nullptr);
    // None of the first 100 is in doubt.
    const uint32_t nothing = 0, n = 4;
    const OneStep first = one_step(&rig, batch, seq, 2, 100, 20, &nothing);
    const OneStep second = one_step(&rig, batch, seq, 3, counts, n, &told);
    rig.driver().settle();
    Shadow shadow;
    shadow.keys.assign(100, 1);
    shadow.keys.resize(120, 2);
    for (uint32_t row = 0; row < 4; ++row) {
      rig.expect_row(first.out, row, first.q, 0, shadow, {116 + row}, "first");
    }
    shadow.keys.resize(counts);
    shadow.keys.resize(counts + n, 3);
    for (uint32_t row = 0; row < n; ++row) {
      rig.expect_row(second.out, row, second.q, 0, shadow, {counts + row}, "second");
    }
    ASSERT_EQ(kvm_seq_free(rig.client(), seq), KVM_OK);
  }
}

// What a graph will do has not been done for launches beside it, whose plan would be of another
// step, or none.
TEST(DeviceLengthsTest, CapturedLengthsAreThoseOfWhatIsCaptured) {
  Rig rig({}, small_geometry());
  kvm_cuda_batch* const batch = unsure_batch(&rig, 100, 3);
  kvm_cuda_item item{};
  item.seq = rig.create();
  item.n_append = 5;
  ASSERT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_OK) << kvm_last_error();
  std::vector<Rig::Row> rows(5);
  const kvm_tensor k = rig.keys(rows, 0, false), v = rig.keys(rows, 0, true);
  rig.driver().begin_capture(rig.stream());
  EXPECT_EQ(kvm_cuda_append(batch, 0, &k, &v, rig.stream()), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_cuda_set_lengths(batch, nullptr, rig.stream()), KVM_OK) << kvm_last_error();
  EXPECT_EQ(kvm_cuda_append(batch, 0, &k, &v, rig.stream()), KVM_OK) << kvm_last_error();
  rig.driver().end_capture(rig.stream());
  EXPECT_EQ(kvm_cuda_append(batch, 0, &k, &v, rig.stream()), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_cuda_set_lengths(batch, nullptr, rig.stream()), KVM_OK) << kvm_last_error();
  EXPECT_EQ(kvm_cuda_append(batch, 0, &k, &v, rig.stream()), KVM_OK) << kvm_last_error();
  // A graph may have the appends alone.
  rig.driver().begin_capture(rig.stream());
  EXPECT_EQ(kvm_cuda_append(batch, 0, &k, &v, rig.stream()), KVM_OK) << kvm_last_error();
  rig.driver().end_capture(rig.stream());
  rig.driver().settle();
}

// What the device may write over is nobody else's.
TEST(DeviceLengthsTest, PagesThatForksShareAreCopiedWhereTheTruthMayLie) {
  Rig rig({}, small_geometry());
  kvm_cuda_batch* const batch = unsure_batch(&rig, 200, 6);
  kvm_cuda_batch* const sure = rig.batch(rig.batch_params(1, 200, 4));
  const kvm_seq_id seq = rig.create();
  one_step(&rig, sure, seq, 1, 0, 124, nullptr);
  uint32_t length = 124;
  one_step(&rig, batch, seq, 2, 124, 6, &length);
  kvm_seq_id child = 0;
  ASSERT_EQ(kvm_seq_fork(rig.client(), seq, KVM_POSITION_END, &child), KVM_OK);
  // Two tokens count: the next ones lie from the second page on, of which the fork has all.
  length = 126;
  const OneStep step = one_step(&rig, batch, seq, 3, 126, 4, &length);
  const OneStep of_child = one_step(&rig, sure, child, 4, 130, 1, nullptr);
  rig.driver().settle();
  kvm_cuda_stats stats{};
  stats.struct_size = sizeof stats;
  ASSERT_EQ(kvm_cuda_get_stats(rig.client(), &stats), KVM_OK);
  EXPECT_EQ(stats.n_pages_copied, 2u);
  Shadow shadow;
  shadow.keys.assign(124, 1);
  shadow.keys.resize(126, 2);
  shadow.keys.resize(130, 3);
  for (uint32_t row = 0; row < 4; ++row) {
    rig.expect_row(step.out, row, step.q, 0, shadow, {126 + row}, "parent");
  }
  std::fill(shadow.keys.begin() + 124, shadow.keys.end(), 2);
  shadow.keys.push_back(4);
  rig.expect_row(of_child.out, 0, of_child.q, 0, shadow, {130}, "child");
}

TEST(DeviceLengthsTest, WhatCannotBeHadIsRefused) {
  Rig rig({}, small_geometry());
  const auto says = [](const char* words) {
    return std::string(kvm_last_error()).find(words) != std::string::npos;
  };
  kvm_cuda_batch_params params = rig.batch_params(2, 100, 4);
  params.max_unsure = 65537;
  kvm_cuda_batch* none = nullptr;
  EXPECT_EQ(kvm_cuda_batch_create(rig.client(), &params, &none), KVM_ERR_INVALID);
  EXPECT_TRUE(says("max_unsure is 65537")) << kvm_last_error();

  kvm_cuda_batch* const sure = rig.batch(rig.batch_params(2, 100, 4));
  EXPECT_EQ(kvm_cuda_set_lengths(sure, nullptr, rig.stream()), KVM_ERR_INVALID);
  EXPECT_TRUE(says("max_unsure 0")) << kvm_last_error();
  kvm_cuda_batch* const batch = unsure_batch(&rig, 100, 3);
  EXPECT_EQ(kvm_cuda_set_lengths(batch, nullptr, rig.stream()), KVM_ERR_INVALID);
  EXPECT_TRUE(says("no update")) << kvm_last_error();

  kvm_cuda_item item{};
  item.seq = rig.create();
  item.n_append = 5;
  ASSERT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_OK) << kvm_last_error();
  std::vector<Rig::Row> rows(5);
  const kvm_tensor k = rig.keys(rows, 0, false), v = rig.keys(rows, 0, true);
  EXPECT_EQ(kvm_cuda_append(batch, 0, &k, &v, rig.stream()), KVM_ERR_INVALID);
  EXPECT_TRUE(says("kvm_cuda_set_lengths has not been called")) << kvm_last_error();
  kvm_buffer lengths = rig.tensor(std::vector<uint32_t>(3), KVM_DTYPE_F32).buffer;
  lengths.size = 7;
  EXPECT_EQ(kvm_cuda_set_lengths(batch, &lengths, rig.stream()), KVM_ERR_INVALID);
  EXPECT_TRUE(says("lengths has 7 bytes")) << kvm_last_error();
  lengths.size = 8;
  lengths.where += 2;
  EXPECT_EQ(kvm_cuda_set_lengths(batch, &lengths, rig.stream()), KVM_ERR_INVALID);
  EXPECT_TRUE(says(("at address " + std::to_string(lengths.where)).c_str())) << kvm_last_error();
  lengths.where += 2;
  lengths.kind = KVM_BUFFER_NONE;
  EXPECT_EQ(kvm_cuda_set_lengths(batch, &lengths, rig.stream()), KVM_ERR_INVALID);
  EXPECT_TRUE(says("lengths is no device memory")) << kvm_last_error();
  lengths.kind = KVM_BUFFER_DEVICE;
  rig.driver().fail(Operation::kLaunch, 1);
  EXPECT_EQ(kvm_cuda_set_lengths(batch, &lengths, rig.stream()), KVM_ERR_DEVICE);
  EXPECT_EQ(kvm_cuda_append(batch, 0, &k, &v, rig.stream()), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_cuda_set_lengths(batch, &lengths, rig.stream()), KVM_OK) << kvm_last_error();
  EXPECT_EQ(kvm_cuda_append(batch, 0, &k, &v, rig.stream()), KVM_OK) << kvm_last_error();

  // Two tokens are sure, three are not: four rows may be more than there are.
  item.n_append = 1;
  item.n_query = 4;
  EXPECT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_ERR_INVALID);
  EXPECT_TRUE(says("has 3 tokens after the append, and may have no more")) << kvm_last_error();
  item.n_query = 3;
  EXPECT_EQ(kvm_cuda_update(batch, &item, 1, rig.stream()), KVM_OK) << kvm_last_error();
  EXPECT_EQ(kvm_cuda_append(batch, 0, &k, &v, rig.stream()), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_cuda_set_lengths(batch, nullptr, rig.stream()), KVM_OK) << kvm_last_error();
  // Of another sequence's change it is known as everywhere.
  ASSERT_EQ(kvm_seq_truncate(rig.client(), item.seq, 2), KVM_OK);
  EXPECT_EQ(kvm_cuda_set_lengths(batch, nullptr, rig.stream()), KVM_ERR_INVALID);
  EXPECT_TRUE(says("has changed since")) << kvm_last_error();
  rig.driver().settle();
}

}  // namespace
}  // namespace kvm::device::testing
