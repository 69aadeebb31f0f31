// SPDX-License-Identifier: Apache-2.0
// Every bad input has its own status and a sentence that names it.
#include "engine/space/validate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

namespace kvm::engine {
namespace {

constexpr uint64_t kRows = 10;

struct Memory {
  std::vector<uint64_t> words = std::vector<uint64_t>(1 << 16);
  TensorView view(size_t word, uint64_t size_bytes, uint32_t dtype) {
    return {words.data() + word, size_bytes, dtype, 0, 0, 0};
  }
};

std::shared_ptr<const Space> make_space() {
  SpaceSpec spec;
  spec.name = "v";
  spec.params.struct_size = sizeof(kvm_space_params);
  spec.params.n_layers = 5;
  spec.params.n_q_heads = 4;
  spec.params.n_kv_heads = 2;
  spec.params.head_dim_k = 16;
  spec.params.head_dim_v = 8;
  kvm_layer_params alias{};
  alias.layer_begin = 2;
  alias.n_layers = 1;
  alias.kind = KVM_LAYER_ALIAS;
  alias.target = 0;
  kvm_layer_params absent{};
  absent.layer_begin = 3;
  absent.n_layers = 1;
  absent.kind = KVM_LAYER_ABSENT;
  kvm_layer_params wide{};
  wide.layer_begin = 4;
  wide.n_layers = 1;
  wide.n_kv_heads = 4;
  spec.layers = {alias, absent, wide};
  spec.params.n_layer_params = 3;
  auto space = resolve_space(spec);
  EXPECT_TRUE(space.is_ok()) << space.status().message();
  return space.value();
}

// A valid step of one item; tests spoil one thing at a time.
struct Good {
  Good() {
    step.append = true;
    step.attend = true;
    kvm_item item{};
    item.seq = 1;
    item.append_position = KVM_POSITION_END;
    item.n_append = kRows;
    item.n_query = kRows;
    item.query_position = KVM_POSITION_END;
    step.items = {item};
    step.k = memory.view(0, kRows * 2 * 16 * 2, KVM_DTYPE_BF16);
    step.v = memory.view(1000, kRows * 2 * 8 * 2, KVM_DTYPE_BF16);
    step.q = memory.view(2000, kRows * 4 * 16 * 2, KVM_DTYPE_F16);
    step.o = memory.view(4000, kRows * 4 * 8 * 4, KVM_DTYPE_F32);
    step.lse = memory.view(6000, kRows * 4 * 4, KVM_DTYPE_F32);
    step.err = memory.view(7000, kRows * 4 * 2 * 4, KVM_DTYPE_F32);
  }
  Memory memory;
  StepRequest step;
};

struct Bad {
  const char* word;  // in the sentence
  std::function<void(StepRequest&)> spoil;
  kvm_status code = KVM_ERR_INVALID;
};

TEST(Validate, AcceptsAGoodStepAndFillsStrides) {
  const auto space = make_space();
  Good good;
  const auto tensors = check_step(good.step, *space);
  ASSERT_TRUE(tensors.is_ok()) << tensors.status().message();
  EXPECT_EQ(tensors.value().k.stride_head, 16u);
  EXPECT_EQ(tensors.value().k.stride_row, 32u);
  EXPECT_EQ(tensors.value().k.used_bytes, kRows * 2 * 16 * 2);
  EXPECT_EQ(tensors.value().err.stride_row, 8u);
  EXPECT_EQ(tensors.value().o.at(0, 1, 2) - tensors.value().o.at(0, 0, 0), (32 + 16) * 4);
}

// A request's own numbers, the space's, and what holds then.
struct Defaulted {
  ModeChoice space;
  ModeChoice own;
  ModeChoice holds;
};

ModeChoice choice_of(const StepRequest& step) {
  return {step.mode, step.proposal, step.eps, step.delta, step.budget};
}

void ask(const ModeChoice& choice, StepRequest* step) {
  step->mode = choice.mode;
  step->proposal = choice.proposal;
  step->eps = choice.eps;
  step->delta = choice.delta;
  step->budget = choice.budget;
}

TEST(Validate, ARequestThatNamesNoModeTakesTheSpaces) {
  constexpr uint32_t kDefault = KVM_MODE_DEFAULT;
  constexpr uint32_t kSketch = KVM_PROPOSAL_SKETCH;
  const ModeChoice sampled = {KVM_MODE_SAMPLED, kSketch, 0, 0.2f, 300};
  const ModeChoice aimed = {KVM_MODE_SAMPLED, 0, 0.1f, 0.2f, 0};
  const ModeChoice balanced = {KVM_MODE_SAMPLED, 0, 0.1f, 0.2f, 300};
  const ModeChoice top = {KVM_MODE_TOPK, kSketch, 0.1f, 0.2f, 300};
  const ModeChoice timed = {KVM_MODE_AUTO, 0, 0.1f, 0.2f, 5000};
  const ModeChoice verified = {KVM_MODE_VERIFIED, 0, 0.1f, 0.2f, 0};
  const ModeChoice bounded = {KVM_MODE_VERIFIED, 0, 0.1f, 0.2f, 700};
  const Defaulted cases[] = {
      {sampled, {kDefault}, sampled},
      {verified, {kDefault}, verified},
      // Own numbers hold, one by one.
      {sampled, {kDefault, KVM_PROPOSAL_LSH}, {KVM_MODE_SAMPLED, KVM_PROPOSAL_LSH, 0, 0.2f, 300}},
      {sampled, {kDefault, 0, 0, 0.5f}, {KVM_MODE_SAMPLED, kSketch, 0, 0.5f, 300}},
      {sampled, {kDefault, 0, 0, 0, 64}, {KVM_MODE_SAMPLED, kSketch, 0, 0.2f, 64}},
      {verified, {kDefault, 0, 0.5f}, {KVM_MODE_VERIFIED, 0, 0.5f, 0.2f, 0}},
      {verified, {kDefault, 0, 0, 0, 64}, {KVM_MODE_VERIFIED, 0, 0.1f, 0.2f, 64}},
      // Both mean something there.
      {bounded, {kDefault, 0, 0.5f}, {KVM_MODE_VERIFIED, 0, 0.5f, 0.2f, 700}},
      {balanced, {kDefault, 0, 0.5f}, {KVM_MODE_SAMPLED, 0, 0.5f, 0.2f, 300}},
      {balanced, {kDefault, 0, 0, 0, 64}, {KVM_MODE_SAMPLED, 0, 0.1f, 0.2f, 64}},
      {balanced, {kDefault}, balanced},
      // An eps would mean nothing, or something else, beside the space's budget; or likewise.
      {aimed, {kDefault, 0, 0, 0, 64}, {KVM_MODE_SAMPLED, 0, 0, 0.2f, 64}},
      {sampled, {kDefault, 0, 0.5f}, {KVM_MODE_SAMPLED, kSketch, 0.5f, 0.2f, 0}},
      {timed, {kDefault, 0, 0.5f}, {KVM_MODE_AUTO, 0, 0.5f, 0.2f, 0}},
      {sampled, {kDefault, 0, 0.5f, 0, 64}, {KVM_MODE_SAMPLED, kSketch, 0.5f, 0.2f, 64}},
      // TOPK has none, and wants its budget.
      {top, {kDefault, 0, 0.5f}, {KVM_MODE_TOPK, kSketch, 0.5f, 0.2f, 300}},
      // Who names a mode takes nothing.
      {sampled, {KVM_MODE_EXACT}, {KVM_MODE_EXACT}},
      {sampled, {KVM_MODE_SAMPLED}, {KVM_MODE_SAMPLED}},
      {verified, {KVM_MODE_AUTO, 0, 0, 0, 9}, {KVM_MODE_AUTO, 0, 0, 0, 9}},
      // A space that names none.
      {{}, {kDefault, 0, 0.5f, 0, 9}, {kDefault, 0, 0.5f, 0, 9}},
  };
  Space space;
  for (const Defaulted& one : cases) {
    StepRequest step;
    step.attend = true;
    ask(one.own, &step);
    space.default_choice = one.space;
    const Status status = take_defaults(space, &step);
    EXPECT_TRUE(status.is_ok()) << status.message();
    EXPECT_EQ(choice_of(step), one.holds) << &one - cases;
  }
  // An append reads no keys.
  StepRequest append;
  append.append = true;
  append.budget = 9;
  space.default_choice = verified;
  EXPECT_TRUE(take_defaults(space, &append).is_ok());
  EXPECT_EQ(append.mode, kDefault);
}

TEST(Validate, OwnNumbersMustSuitTheModeOfTheSpace) {
  Space space;
  space.name = "v";
  space.default_choice = {.mode = KVM_MODE_VERIFIED, .eps = 0.1f, .delta = 0.1f};
  const Bad cases[] = {
      {"proposal is LSH with mode VERIFIED", [](StepRequest& s) { s.proposal = KVM_PROPOSAL_LSH; }},
      {"proposal GRAPH", [](StepRequest& s) { s.proposal = KVM_PROPOSAL_GRAPH; },
       KVM_ERR_UNSUPPORTED},
      {"eps is 1", [](StepRequest& s) { s.eps = 1; }},
      {"delta is nan", [](StepRequest& s) { s.delta = NAN; }},
  };
  for (const Bad& bad : cases) {
    StepRequest step;
    step.attend = true;
    bad.spoil(step);
    const Status status = take_defaults(space, &step);
    EXPECT_EQ(status.code(), bad.code) << bad.word;
    EXPECT_NE(status.message().find(bad.word), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("the mode is the default of space 'v'"), std::string::npos)
        << status.message();
    EXPECT_NE(status.detail(), 0u);
  }
}

TEST(Validate, EveryBadNumberHasItsSentence) {
  const auto space = make_space();
  const Bad cases[] = {
      {"flags", [](StepRequest& s) { s.flags = 4; }},
      {"mode", [](StepRequest& s) { s.mode = 6; }},
      {"budget is 0 with mode TOPK", [](StepRequest& s) { s.mode = KVM_MODE_TOPK; }},
      {"proposal is LSH with mode VERIFIED",
       [](StepRequest& s) {
         s.mode = KVM_MODE_VERIFIED;
         s.proposal = KVM_PROPOSAL_LSH;
       }},
      {"proposal GRAPH",
       [](StepRequest& s) {
         s.mode = KVM_MODE_SAMPLED;
         s.proposal = KVM_PROPOSAL_GRAPH;
       },
       KVM_ERR_UNSUPPORTED},
      {"proposal", [](StepRequest& s) { s.proposal = 4; }},
      {"scale", [](StepRequest& s) { s.scale = NAN; }},
      {"scale", [](StepRequest& s) { s.scale = INFINITY; }},
      {"scale", [](StepRequest& s) { s.scale = -1; }},
      {"eps", [](StepRequest& s) { s.eps = NAN; }},
      {"eps", [](StepRequest& s) { s.eps = -0.1f; }},
      {"eps", [](StepRequest& s) { s.eps = 1; }},
      {"delta", [](StepRequest& s) { s.delta = 1; }},
      {"delta", [](StepRequest& s) { s.delta = NAN; }},
      {"layer 5 asked for", [](StepRequest& s) { s.layer_begin = 5; }},
      {"layer 4294967295 asked for", [](StepRequest& s) { s.layer_begin = UINT32_MAX; }},
      {"n_layers is 2", [](StepRequest& s) { s.n_layers = 2; }},
      {"the space has layers 0 to 4", [](StepRequest& s) { s.n_layers = UINT32_MAX; }},
      {"layer 2 reads", [](StepRequest& s) { s.layer_begin = 2; }},
      {"layer 3 is absent", [](StepRequest& s) { s.layer_begin = 3; }},
      {"n_items is 0", [](StepRequest& s) { s.items.clear(); }},
      {"n_items", [](StepRequest& s) { s.items.resize(kMaxItems + 1, s.items[0]); }},
      {"n_ranges", [](StepRequest& s) { s.ranges.resize(kMaxRanges + 1); }},
      {"items 0 to 2 have 65538 ranges together",
       [](StepRequest& s) {
         s.ranges.resize(21846);
         s.items[0].n_append = 0;
         s.items[0].n_ranges = 21846;
         s.items.resize(9, s.items[0]);
       }},
      {"flags of item 0", [](StepRequest& s) { s.items[0].flags = 1u << 31; }},
      {"reserved", [](StepRequest& s) { s.items[0].reserved = 1; }},
      {"append_position", [](StepRequest& s) { s.items[0].append_position = kMaxTokens; }},
      {"query_position", [](StepRequest& s) { s.items[0].query_position = kMaxTokens; }},
      {"query_position", [](StepRequest& s) { s.items[0].query_position = KVM_POSITION_END - 1; }},
      {"query rows", [](StepRequest& s) { s.items[0].n_query = kMaxQueryRows + 1; }},
      {"n_append must be 0", [](StepRequest& s) { s.append = false; }},
      {"same sequence",
       [](StepRequest& s) {
         s.items.push_back(s.items[0]);
         s.items[1].query_row = kRows;
       }},
      {"share query row",
       [](StepRequest& s) {
         s.items.push_back(s.items[0]);
         s.items[1].seq = 2;
         s.items[1].query_row = kRows - 1;
       }},
  };
  for (const Bad& bad : cases) {
    Good good;
    bad.spoil(good.step);
    const auto result = check_step(good.step, *space);
    ASSERT_FALSE(result.is_ok()) << bad.word;
    EXPECT_EQ(result.status().code(), bad.code) << result.status().message();
    EXPECT_NE(result.status().message().find(bad.word), std::string::npos)
        << result.status().message();
  }
}

TEST(Validate, RangesAndTrees) {
  const auto space = make_space();
  const auto status_of = [&](std::vector<kvm_range> ranges, std::vector<uint64_t> tree,
                             const std::function<void(kvm_item&)>& set) {
    Good good;
    good.step.items[0].n_query = 3;
    good.step.ranges = std::move(ranges);
    good.step.tree_mask = std::move(tree);
    set(good.step.items[0]);
    return check_step(good.step, *space).status();
  };
  const auto two_ranges = [](kvm_item& item) { item.n_ranges = 2; };
  const auto tree = [](kvm_item& item) { item.flags = KVM_ITEM_TREE; };
  EXPECT_TRUE(status_of({{0, 3}, {3, 9}}, {}, two_ranges).is_ok());
  EXPECT_TRUE(status_of({{4, 4}, {4, 4}}, {}, two_ranges).is_ok());
  EXPECT_FALSE(status_of({{0, 4}, {3, 9}}, {}, two_ranges).is_ok());
  EXPECT_FALSE(status_of({{5, 9}, {0, 3}}, {}, two_ranges).is_ok());
  EXPECT_FALSE(status_of({{0, 3}, {9, 8}}, {}, two_ranges).is_ok());
  EXPECT_FALSE(status_of({{0, 3}}, {}, two_ranges).is_ok());
  EXPECT_FALSE(status_of({{0, 3}}, {}, [](kvm_item& item) {
                 item.range_begin = UINT32_MAX;
                 item.n_ranges = UINT32_MAX;
               }).is_ok());
  EXPECT_TRUE(status_of({}, {1, 3, 5}, tree).is_ok());
  EXPECT_FALSE(status_of({}, {1, 3}, tree).is_ok());
  EXPECT_FALSE(status_of({}, {1, 3, 8}, tree).is_ok());
  EXPECT_FALSE(status_of({}, {1, 3, 5}, [](kvm_item& item) {
                 item.flags = KVM_ITEM_TREE | KVM_ITEM_NOT_CAUSAL;
               }).is_ok());
  EXPECT_FALSE(status_of({}, {1, 3, 5}, [](kvm_item& item) {
                 item.flags = KVM_ITEM_TREE;
                 item.tree_begin = UINT32_MAX;
               }).is_ok());
  EXPECT_FALSE(status_of({}, std::vector<uint64_t>(65), [](kvm_item& item) {
                 item.flags = KVM_ITEM_TREE;
                 item.n_query = 65;
               }).is_ok());
}

TEST(Validate, TensorsMustFitAlignAndNotOverlap) {
  const auto space = make_space();
  const Bad cases[] = {
      {"k is absent", [](StepRequest& s) { s.k = {}; }},
      {"v is absent", [](StepRequest& s) { s.v = {}; }},
      {"q is absent", [](StepRequest& s) { s.q = {}; }},
      {"o is absent", [](StepRequest& s) { s.o = {}; }},
      {"dtype of q", [](StepRequest& s) { s.q.dtype = 0; }},
      {"dtype of k", [](StepRequest& s) { s.k.dtype = 4; }},
      {"dtype of lse", [](StepRequest& s) { s.lse.dtype = KVM_DTYPE_BF16; }},
      {"dtype of err", [](StepRequest& s) { s.err.dtype = KVM_DTYPE_F16; }},
      {"k has 639 bytes", [](StepRequest& s) { s.k.size_bytes -= 1; }},
      {"o has", [](StepRequest& s) { s.o.size_bytes = 0; }},
      {"v has",
       [](StepRequest& s) {
         s.items[0].append_row = 1;
         s.k.size_bytes = 1000;
       }},
      {"q has", [](StepRequest& s) { s.items[0].query_row = 1; }},
      {"q has", [](StepRequest& s) { s.items[0].query_row = UINT32_MAX; }},
      {"elements of q overlap", [](StepRequest& s) { s.q.stride_row = 63; }},
      {"elements of q overlap", [](StepRequest& s) { s.q.stride_head = 15; }},
      {"elements of o overlap",
       [](StepRequest& s) {
         s.o.stride_row = 8;
         s.o.stride_head = 9;
       }},
      {"stride_head", [](StepRequest& s) { s.q.stride_head = UINT64_MAX; }},
      {"q has", [](StepRequest& s) { s.q.stride_row = UINT64_MAX; }},
      {"q has", [](StepRequest& s) { s.q.stride_row = UINT64_MAX / 9 + 1; }},
      {"q has", [](StepRequest& s) { s.q.stride_head = UINT64_MAX / 4; }},
      {"multiple", [](StepRequest& s) { s.q.data = static_cast<char*>(s.q.data) + 1; }},
      {"multiple", [](StepRequest& s) { s.lse.data = static_cast<char*>(s.lse.data) + 2; }},
      {"o and q overlap", [](StepRequest& s) { s.o.data = s.q.data; }},
      {"o and k overlap", [](StepRequest& s) { s.o.data = s.k.data; }},
      {"o and lse overlap", [](StepRequest& s) { s.lse.data = s.o.data; }},
      {"lse and err overlap", [](StepRequest& s) { s.err.data = s.lse.data; }},
  };
  for (const Bad& bad : cases) {
    Good good;
    bad.spoil(good.step);
    const auto result = check_step(good.step, *space);
    ASSERT_FALSE(result.is_ok()) << bad.word;
    EXPECT_EQ(result.status().code(), KVM_ERR_INVALID);
    EXPECT_NE(result.status().message().find(bad.word), std::string::npos)
        << result.status().message();
  }
}

TEST(Validate, TransposedAndInterleavedTensorsAreFine) {
  const auto space = make_space();
  Good good;
  good.step.q.stride_row = 16;  // [head][row][dim]
  good.step.q.stride_head = 16 * kRows;
  // o and lse as one record per row: 32 values, then 4 sums, then a gap.
  good.step.o = good.memory.view(4000, kRows * 40 * 4, KVM_DTYPE_F32);
  good.step.o.stride_row = 40;
  good.step.lse = good.memory.view(4000 + 32 / 2, (9 * 40 + 4) * 4, KVM_DTYPE_F32);
  good.step.lse.stride_row = 40;
  const auto result = check_step(good.step, *space);
  EXPECT_TRUE(result.is_ok()) << result.status().message();
  good.step.lse.data = static_cast<float*>(good.step.o.data) + 31;
  EXPECT_FALSE(check_step(good.step, *space).is_ok());
  good.step.lse.data = static_cast<float*>(good.step.o.data) + 37;  // reaches the next record
  EXPECT_FALSE(check_step(good.step, *space).is_ok());
}

// [batch][head][token][dim]: rows of an item lie behind each other, and those of the next item
// behind all heads of the one before.
TEST(Validate, RowsOfItemsMayLieBehindEachOther) {
  const auto space = make_space();
  constexpr uint32_t kHeads = 4;
  constexpr uint32_t kTokens = 2;
  Good good;
  good.step.append = false;
  good.step.items = {good.step.items[0], good.step.items[0]};
  for (uint32_t i = 0; i < 2; ++i) {
    kvm_item& item = good.step.items[i];
    item.seq = 1 + i;
    item.n_append = 0;
    item.n_query = kTokens;
    item.query_row = i * kHeads * kTokens;
  }
  constexpr uint64_t kBytes = 2 * kHeads * kTokens * 16 * 4;
  good.step.q = good.memory.view(0, kBytes, KVM_DTYPE_F32);
  good.step.o = good.memory.view(4000, kBytes, KVM_DTYPE_F32);
  good.step.lse = {};
  good.step.err = {};
  for (TensorView* tensor : {&good.step.q, &good.step.o}) {
    tensor->stride_row = 16;
    tensor->stride_head = 16 * kTokens;
  }
  const auto result = check_step(good.step, *space);
  EXPECT_TRUE(result.is_ok()) << result.status().message();

  // A row closer, the second item writes where the first one's last head lies.
  good.step.items[1].query_row -= 1;
  const auto overlapping = check_step(good.step, *space);
  ASSERT_FALSE(overlapping.is_ok());
  EXPECT_NE(overlapping.status().message().find("of o, which are of different items, overlap"),
            std::string::npos)
      << overlapping.status().message();
  // Where it is read only, nobody minds: o has rows of its own now.
  good.step.o.stride_row = 0;
  good.step.o.stride_head = 0;
  good.step.o.size_bytes = 2 * kHeads * kTokens * kHeads * 16 * 4;
  EXPECT_TRUE(check_step(good.step, *space).is_ok());
  // But not within an item.
  good.step.q.stride_head = 16 * kTokens - 1;
  EXPECT_FALSE(check_step(good.step, *space).is_ok());
  // A byte short of the last head's last row.
  good.step.q.stride_head = 16 * kTokens;
  good.step.items[1].query_row += 1;
  good.step.q.size_bytes -= 1;
  EXPECT_FALSE(check_step(good.step, *space).is_ok());
}

TEST(Validate, AppendOfSeveralLayers) {
  const auto space = make_space();
  Good good;
  good.step.attend = false;
  good.step.n_layers = 2;
  const auto short_of_bytes = check_step(good.step, *space);
  EXPECT_FALSE(short_of_bytes.is_ok());
  good.step.k.size_bytes *= 2;
  good.step.v.size_bytes *= 2;
  EXPECT_TRUE(check_step(good.step, *space).is_ok());
  good.step.k.stride_layer = kRows * 32 - 1;
  EXPECT_FALSE(check_step(good.step, *space).is_ok());
  good.step.k.stride_layer = 0;
  good.step.n_layers = 3;  // with the alias
  EXPECT_FALSE(check_step(good.step, *space).is_ok());
  good.step.layer_begin = 4;
  good.step.n_layers = 0;
  EXPECT_TRUE(check_step(good.step, *space).is_ok());
}

TEST(Validate, ReadsAndObservations) {
  const auto space = make_space();
  Memory memory;
  ReadRequest read;
  read.n_tokens = kRows;
  read.k = memory.view(0, kRows * 2 * 16 * 4, KVM_DTYPE_F32);
  EXPECT_TRUE(check_read(read, *space).is_ok());
  read.layer = 3;
  EXPECT_FALSE(check_read(read, *space).is_ok());
  read.layer = 9;
  EXPECT_FALSE(check_read(read, *space).is_ok());
  read.layer = 2;
  EXPECT_TRUE(check_read(read, *space).is_ok());
  read.n_tokens = UINT64_MAX;
  EXPECT_FALSE(check_read(read, *space).is_ok());
  read.n_tokens = kRows + 1;
  EXPECT_FALSE(check_read(read, *space).is_ok());

  ObserveRequest observed;
  observed.n_rows = kRows;
  observed.q = memory.view(0, kRows * 4 * 16 * 2, KVM_DTYPE_BF16);
  EXPECT_TRUE(check_observe(observed, *space).is_ok());
  observed.n_columns = 3;
  EXPECT_FALSE(check_observe(observed, *space).is_ok());
  observed.column_sums = memory.view(0, 3 * 2 * 4, KVM_DTYPE_F32);
  EXPECT_TRUE(check_observe(observed, *space).is_ok());
  observed.column_sums.dtype = KVM_DTYPE_BF16;
  EXPECT_FALSE(check_observe(observed, *space).is_ok());
  observed.column_sums.dtype = KVM_DTYPE_F32;
  observed.column_begin = UINT64_MAX;
  EXPECT_FALSE(check_observe(observed, *space).is_ok());
}

TEST(Validate, SequenceRequests) {
  SeqRequest request;
  EXPECT_TRUE(check_seq_request(request).is_ok());
  request.flags = 2;
  EXPECT_FALSE(check_seq_request(request).is_ok());
  request.verb = static_cast<SeqVerb>(9);
  EXPECT_FALSE(check_seq_request(request).is_ok());
}

}  // namespace
}  // namespace kvm::engine
