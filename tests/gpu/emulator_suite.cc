// SPDX-License-Identifier: Apache-2.0
// Runs every kernel in the emulator and compares it with fp64 arithmetic.
//
//   gpu_emulator_suite [--quiet] [--first] [--seed N]
//
// Prints a line per configuration and the largest errors; exits 1 if one of them is wrong, with
// --first at once. Without GoogleTest, for planted_bugs.py compiles it many times over, and only
// the part of it that finds a mistake soonest (emulated_attention.h).
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string_view>
#include <vector>

#include "attention/cuda/emulator.h"
#include "attention/cuda/lengths_kernel.h"
#include "attention/cuda/read_kernel.h"
#include "attention/cuda/shapes.h"
#include "attention/cuda/states_kernel.h"
#include "attention/cuda/table_kernel.h"
#include "base/splitmix.h"
#include "tests/gpu/cases.h"
#include "tests/gpu/emulated_attention.h"
#include "tests/gpu/row_cases.h"

namespace kvm::attention::gpu::testing {
namespace {

class Suite {
 public:
  Suite(uint64_t seed, bool quiet, bool first) : seed_(seed), quiet_(quiet), first_(first) {}

  // With the kernel that is shipped for it.
  void attend(const CaseSpec& spec);
  // Does nothing with a kernel that is not compiled.
  void attend_with(const EmulatedKernel& kernel, const CaseSpec& spec, const char* shape_name);
  void merge(uint32_t dim, uint32_t n_slots, uint32_t n_empty, bool sinks = false);
  void append(const AppendSpec& spec);
  void read(const ReadSpec& spec);
  void merge_states(const StatesSpec& spec);
  void lengths_of_tokens(bool told);
  void scatter(uint32_t n_runs, uint32_t n_words);
  void move(uint32_t n_pages, uint64_t page_bytes, bool pack);

  int finish() const {
    std::printf(
        "largest error of o where something is rounded to bf16 %.1e, elsewhere %.1e, of lse %.1e\n",
        worst_o_bf16_, worst_o_, worst_lse_);
    std::printf("%d configurations, %d wrong\n", n_run_, n_wrong_);
    return n_wrong_ == 0 && n_run_ > 0 ? 0 : 1;
  }

 private:
  // Says whether the kernel lets the next one begin. begins_early: it may itself.
  bool launch(const char* kernel, uint32_t blocks, uint32_t threads, uint32_t shared_bytes,
              std::span<const std::span<uint8_t>> memory, const std::function<void()>& body,
              bool begins_early = false, emulator::Order order = emulator::Order::kForward);
  void attend_once(const EmulatedKernel& kernel, Case* one, const DecodePlan& plan,
                   const DecodeParams& params, const MergeParams& merge, emulator::Order order);
  void conclude(const std::string& name, bool right, double error_o, double error_lse);

  uint64_t seed_;
  bool quiet_;
  bool first_;
  int n_run_ = 0;
  int n_wrong_ = 0;
  double worst_o_bf16_ = 0, worst_o_ = 0, worst_lse_ = 0;
  std::string faults_;  // of the current configuration
};

bool Suite::launch(const char* kernel, uint32_t blocks, uint32_t threads, uint32_t shared_bytes,
                   std::span<const std::span<uint8_t>> memory, const std::function<void()>& body,
                   bool begins_early, emulator::Order order) {
  std::vector<emulator::Range> ranges;
  for (const std::span<uint8_t> range : memory) {
    ranges.push_back({range.data(), range.size()});
  }
  const emulator::Report report =
      emulator::run({blocks, threads, shared_bytes, ranges, begins_early, order, seed_}, body);
  if (report.n_faults != 0) {
    faults_ += std::string(kernel) + ": " + std::to_string(report.n_faults) +
               " faults, first: " + report.first_fault + ". ";
  }
  if (report.n_bank_conflicts != 0) {
    faults_ +=
        std::string(kernel) + ": " + std::to_string(report.n_bank_conflicts) + " bank conflicts. ";
  }
  return report.lets_next_begin;
}

void Suite::conclude(const std::string& name, bool right, double error_o, double error_lse) {
  right = right && faults_.empty();
  ++n_run_;
  n_wrong_ += right ? 0 : 1;
  if (!right || !quiet_) {
    std::printf("%s  %-52s o %.1e  lse %.1e  %s\n", right ? "right" : "WRONG", name.c_str(),
                error_o, error_lse, faults_.c_str());
  }
  faults_.clear();
  if (!right && first_) {
    std::exit(finish());
  }
}

void Suite::attend(const CaseSpec& spec) {
  if (const auto kernel = attention_kernel(spec.codec, spec.dim, spec.block_rows())) {
    attend_with(*kernel, spec, "");
  } else {
    conclude(spec.name + ": no such kernel", false, 0, 0);
  }
}

void Suite::attend_with(const EmulatedKernel& kernel, const CaseSpec& spec,
                        const char* shape_name) {
  if (!kernel) {
    return;
  }
  Case one(spec, seed_);
  DecodePlan plan = one.plan();
  if (spec.is_late()) {
    DecodePlan brought;
    const LengthsParams lengths = one.lengths_params(plan, &brought);
    const auto n_blocks = static_cast<uint32_t>(1 + plan.work.size() / (2 * kLengthsThreads));
    launch("lengths", n_blocks, kLengthsThreads, 0, one.memory(), [&] { lengths_thread(lengths); });
    plan = std::move(brought);
  }
  const DecodeParams params = one.decode_params(plan);
  const MergeParams merge = one.merge_params(plan);
  // Who takes a piece of a tail changes no bit, and nothing of it is left for the next launch.
  std::vector<emulator::Order> orders = {emulator::Order::kForward};
  if (plan.n_tail != 0) {
    orders.insert(orders.end(),
                  {emulator::Order::kTurns, emulator::Order::kBackward, emulator::Order::kAny});
  }
  Case::Errors errors;
  std::vector<uint8_t> first_o;
  for (const emulator::Order order : orders) {
    one.clear_results();
    attend_once(kernel, &one, plan, params, merge, order);
    if (first_o.empty()) {
      errors = one.errors();
      first_o.assign(one.o.data(), one.o.data() + one.o.size());
    } else if (std::memcmp(first_o.data(), one.o.data(), one.o.size()) != 0) {
      faults_ += "attention: other bits in another order of blocks. ";
    }
    if (one.tail.n_asked != 0) {
      faults_ += "attention: leaves a count of " + std::to_string(one.tail.n_asked) + ". ";
    }
  }
  const bool bf16 = spec.codec == CodecId::kBf16 || spec.dtype_o == Dtype::kBf16;
  double* const worst = bf16 ? &worst_o_bf16_ : &worst_o_;
  *worst = std::max(*worst, errors.o);
  worst_lse_ = std::max(worst_lse_, errors.lse);
  if (spec.tail_part != 0 && plan.n_tail == 0) {
    faults_ += "the plan has no tail. ";
  }
  conclude(spec.name + shape_name, errors.ok(), errors.o, errors.lse);
}

void Suite::attend_once(const EmulatedKernel& kernel, Case* one, const DecodePlan& plan,
                        const DecodeParams& params, const MergeParams& merge,
                        emulator::Order order) {
  const CaseSpec& spec = one->spec();
  const auto memory = one->memory();
  const bool lets_begin = launch(
      spec.prefill ? "prefill" : "decode", plan.n_blocks, kernel.threads, kernel.shared_bytes,
      memory, [&] { kernel.thread(params); }, false, order);
  // Whatever else may come next need not wait.
  if (lets_begin != (plan.n_blocks != 0 && !plan.merges.empty())) {
    faults_ += lets_begin ? "attention: lets others than a merge begin. "
                          : "attention: does not let the merge begin. ";
  }
  if (!plan.merges.empty()) {
    const auto blocks = static_cast<uint32_t>(plan.merges.size()) * plan.max_rows;
    launch(
        "merge", blocks, kMergeThreads, kMergeSharedBytes, memory,
        [&] {
          visit_value_dim(spec.dim_v(),
                          [&merge]<class Tag>(Tag) { merge_thread<Tag::kDim>(merge); });
        },
        true);
  }
}

// Partial states of random sizes, some of them empty, against sums in fp64.
void Suite::merge(uint32_t dim, uint32_t n_slots, uint32_t n_empty, bool sinks) {
  constexpr uint32_t kRows = 3, kBlockRows = 16;
  std::vector<float> partial_o(size_t{n_slots} * kBlockRows * dim, NAN);
  std::vector<float> partial_lse(size_t{n_slots} * kBlockRows, NAN);
  std::vector<float> o(size_t{kRows} * dim, NAN), lse(kRows, NAN);
  uint64_t state = seed_;
  const auto uniform = [&state] {
    state += kSplitMixStep;
    return static_cast<float>(splitmix64(state) >> 40) * 0x1p-24f;
  };
  double worst = 0, worst_lse = 0;
  std::vector<double> sums(size_t{kRows} * dim), totals(kRows);
  for (uint32_t slot = 0; slot < n_slots; ++slot) {
    for (uint32_t row = 0; row < kRows; ++row) {
      const size_t at = size_t{slot} * kBlockRows + row;
      const bool empty = (slot + row) % n_slots < n_empty;
      partial_lse[at] = empty ? -INFINITY : 20.0f * uniform() - 5.0f;
      const double weight = std::exp(static_cast<double>(partial_lse[at]));
      totals[row] += weight;
      for (uint32_t i = 0; i < dim; ++i) {
        partial_o[at * dim + i] = empty ? 0.0f : uniform();
        sums[row * dim + i] += weight * partial_o[at * dim + i];
      }
    }
  }
  std::vector<float> sink_logits = {8.0f, -INFINITY, 14.0f};
  for (uint32_t row = 0; sinks && row < kRows; ++row) {
    totals[row] += std::exp(static_cast<double>(sink_logits[row]));
  }
  Merge merge;
  merge.n_slots = n_slots;
  uint32_t n_merges = 1;
  MergeParams params;
  params.n_merges = &n_merges;
  params.tensors.o = o.data();
  params.tensors.o_stride_head = dim;
  params.tensors.lse = lse.data();
  params.tensors.lse_stride_head = 1;
  params.tensors.group = kRows;
  params.tensors.sink_logits = sinks ? sink_logits.data() : nullptr;
  params.merges = &merge;
  params.partial_o = partial_o.data();
  params.partial_lse = partial_lse.data();
  params.rows = kRows;
  params.block_rows = kBlockRows;
  const auto bytes = [](std::vector<float>& of) {
    return std::span(reinterpret_cast<uint8_t*>(of.data()), of.size() * sizeof(float));
  };
  const std::vector<std::span<uint8_t>> memory = {
      bytes(partial_o),   bytes(partial_lse),
      bytes(o),           bytes(lse),
      bytes(sink_logits), {reinterpret_cast<uint8_t*>(&n_merges), sizeof n_merges}};
  // Fewer blocks than rows.
  launch(
      "merge", kRows / 2 + 1, kMergeThreads, kMergeSharedBytes, memory,
      [&] { visit_value_dim(dim, [&params]<class Tag>(Tag) { merge_thread<Tag::kDim>(params); }); },
      true);
  bool right = true;
  for (uint32_t row = 0; row < kRows; ++row) {
    const bool empty = totals[row] == 0;
    const double off = lse[row] - std::log(totals[row]);
    right = right && (empty ? lse[row] == -INFINITY : std::fabs(off) <= 1e-4);
    worst_lse = empty ? worst_lse : std::max(worst_lse, std::fabs(off));
    for (uint32_t i = 0; i < dim; ++i) {
      const double expected = empty ? 0 : sums[row * dim + i] / totals[row];
      const double wrong = std::fabs(o[row * dim + i] - expected);
      right = right && wrong <= 1e-5;
      worst = std::max(worst, wrong);
    }
  }
  conclude("merge d" + std::to_string(dim) + " of " + std::to_string(n_slots) + ", " +
               std::to_string(n_empty) + " empty" + (sinks ? ", sinks" : ""),
           right, worst, worst_lse);
}

// Appends rows of a tensor into pages.
void Suite::append(const AppendSpec& spec) {
  AppendCase one(spec, seed_);
  const AppendParams params = one.params();
  // Fewer blocks than tokens.
  launch("append", one.n_tokens / 2 + 1, kAppendThreads, 0, one.memory(), [&] {
    visit_element(spec.to, [&]<class Tag>(Tag) { append_thread<Tag::kElement>(params); });
  });
  conclude(one.name(), one.right(), 0, 0);
}

// Reads rows of pages back into tensors.
void Suite::read(const ReadSpec& spec) {
  ReadCase one(spec, seed_);
  const ReadParams params = one.params();
  // Fewer blocks than tokens.
  launch("read", params.n_tokens / 2 + 1, kReadThreads, 0, one.memory(), [&] {
    visit_element(spec.from, [&]<class Tag>(Tag) { read_thread<Tag::kElement>(params); });
  });
  conclude(one.name(), one.right(), 0, 0);
}

// Merges states of several sources.
void Suite::merge_states(const StatesSpec& spec) {
  StatesCase one(spec, seed_);
  const StatesParams params = one.params(one.arena.data());
  const std::vector<std::span<uint8_t>> memory = {{one.arena.data(), one.arena.size()}};
  // Fewer warps than rows.
  launch("merge_states", spec.n_rows * spec.n_heads / 8 + 1, kStatesThreads, 0, memory,
         [&] { merge_states_thread(params); });
  const StatesCase::Errors errors = one.errors();
  conclude(one.name(), errors.ok(), errors.o, errors.lse);
}

// New tokens of two lists of three sequences, in plans of which one has none, move to where the
// sequences end: over the edges of pages, and not. What is behind the counted ones stays.
void Suite::lengths_of_tokens(bool told) {
  constexpr uint32_t kItems = 3, kLists = 2, kPages = 5, kPageTokens = 6, kNew = 8;
  const LengthsItem items[kItems] = {
      {.n_before = 13, .n_unsure = 8, .n_append = kNew, .n_query = 1},
      {.n_before = 18, .n_unsure = 2, .n_append = kNew, .n_query = 1},
      {.n_before = 5, .n_unsure = 5, .n_append = kNew, .n_query = 1}};
  const uint32_t lengths[kItems] = {11, 3, 9};
  const uint32_t missing[kItems] = {told ? 2u : 0, told ? 2u : 0, 0};
  std::vector<AppendToken> planned, expected;
  for (uint32_t list = 0; list < kLists; ++list) {
    for (uint32_t item = 0; item < kItems; ++item) {
      const uint32_t table = (list * kItems + item) * kPages;
      for (uint32_t i = 0; i < kNew; ++i) {
        const uint32_t at = items[item].n_before + i, is = at - missing[item];
        planned.push_back({table + at / kPageTokens, at % kPageTokens, i, list});
        expected.push_back({table + is / kPageTokens, is % kPageTokens, i, list});
      }
    }
  }
  const auto n_tokens = static_cast<uint32_t>(planned.size()), nothing = 0u;
  planned.push_back(planned.back());
  expected.emplace_back();
  std::vector<AppendToken> tokens(planned.size());
  LengthsParams params;
  params.n_kinds = 3;
  for (uint32_t k = 0; k < params.n_kinds; ++k) {
    params.kinds[k].n_work = params.kinds[k].n_merges = &nothing;
  }
  params.kinds[2].planned_tokens = planned.data();
  params.kinds[2].tokens = tokens.data();
  params.kinds[2].n_tokens = &n_tokens;
  params.items = items;
  params.lengths = told ? lengths : nullptr;
  params.max_items = kItems;
  params.max_pages = kPages;
  params.page_tokens = kPageTokens;
  const auto range = [](const auto& of, size_t size_bytes) {
    return std::span(const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(&of)), size_bytes);
  };
  launch("lengths", 2, kLengthsThreads, 0,
         {{range(items, sizeof items), range(lengths, sizeof lengths),
           range(n_tokens, sizeof n_tokens), range(nothing, sizeof nothing)}},
         [&] { lengths_thread(params); });
  const bool right =
      std::memcmp(tokens.data(), expected.data(), tokens.size() * sizeof(AppendToken)) == 0;
  conclude(told ? "lengths of tokens" : "lengths of tokens, as planned", right, 0, 0);
}

// Runs of 1 to n_words words with gaps of a word between them: aligned in both places, in one, in
// none.
void Suite::scatter(uint32_t n_runs, uint32_t n_words) {
  std::vector<uint32_t> to, words;
  std::vector<WordRun> runs;
  for (uint32_t i = 0; i < n_runs; ++i) {
    const uint32_t n = 1 + i * 37 % n_words;
    to.resize(to.size() + (i % 3 == 0 ? (4 - to.size() % 4) % 4 : 1), 7);
    words.resize(words.size() + (i % 2 == 0 ? (4 - words.size() % 4) % 4 : 1), 8);
    runs.push_back({to.size(), static_cast<uint32_t>(words.size()), n});
    to.resize(to.size() + n, 7);
    words.resize(words.size() + n);
  }
  to.push_back(7);
  std::vector<uint32_t> expected = to;
  uint32_t next = 1000;
  for (const WordRun& run : runs) {
    for (uint32_t i = 0; i < run.n_words; ++i) {
      words[run.from + i] = expected[run.to + i] = next++;
    }
  }
  std::reverse(runs.begin(), runs.end());
  const ScatterParams params{to.data(), words.data(), runs.data(), n_runs};
  const std::vector<std::span<uint8_t>> memory = {
      {reinterpret_cast<uint8_t*>(to.data()), to.size() * 4},
      {reinterpret_cast<uint8_t*>(words.data()), words.size() * 4},
      {reinterpret_cast<uint8_t*>(runs.data()), runs.size() * sizeof(WordRun)}};
  launch("scatter", n_runs, kScatterThreads, 0, memory, [&] { scatter_thread(params); });
  conclude("scatter " + std::to_string(n_runs), to == expected, 0, 0);
}

// Pages in reverse order, with gaps between them, into a buffer, or back.
void Suite::move(uint32_t n_pages, uint64_t page_bytes, bool pack) {
  Bytes pool(2 * n_pages * page_bytes), buffer(n_pages * page_bytes);
  for (size_t i = 0; i < pool.size(); ++i) {
    pool.data()[i] = static_cast<uint8_t>(splitmix64(seed_ + i));
  }
  for (size_t i = 0; i < buffer.size(); ++i) {
    buffer.data()[i] = static_cast<uint8_t>(splitmix64(~seed_ + i));
  }
  const std::vector<uint8_t> pool_before(pool.data(), pool.data() + pool.size());
  MoveParams params;
  params.packed = buffer.data();
  params.page_bytes = page_bytes;
  params.n_pages = n_pages;
  params.pack = pack;
  for (uint32_t i = 0; i < n_pages; ++i) {
    params.pages[i] = pool.data() + 2 * (n_pages - 1 - i) * page_bytes;
  }
  const std::vector<std::span<uint8_t>> memory = {{pool.data(), pool.size()},
                                                  {buffer.data(), buffer.size()}};
  launch("move", n_pages * kMoveBlocks, kMoveThreads, 0, memory, [&] { move_thread(params); });
  bool right = true;
  for (size_t i = 0; i < pool.size(); ++i) {
    const size_t page = i / page_bytes;
    if (page % 2 != 0) {
      right = right && pool.data()[i] == pool_before[i];
      continue;
    }
    const size_t at = (n_pages - 1 - page / 2) * page_bytes + i % page_bytes;
    right =
        right && pool.data()[i] == buffer.data()[at] && (!pack || pool.data()[i] == pool_before[i]);
  }
  conclude(std::string(pack ? "pack " : "unpack ") + std::to_string(n_pages) + " pages of " +
               std::to_string(page_bytes),
           right, 0, 0);
}

void run_attention(Suite* suite) {
  for (const CaseSpec& spec : all_cases()) {
    suite->attend(spec);
  }
  const CaseSpec other{.group = 4, .page_tokens = 16, .lengths = {900, 33}, .blocks = 2};
  visit_other_kernels([&](const EmulatedKernel& kernel, const char* shape) {
    suite->attend_with(kernel, other, shape);
  });
  // What other devices have instead of the shapes of sm_90a.
  const auto attend_in = [suite](ShapeFor what, const CaseSpec& spec, const char* shape) {
    if (const auto kernel = attention_kernel(spec.codec, spec.dim, spec.block_rows(), what)) {
      suite->attend_with(*kernel, spec, shape);
    }
  };
  for (const codecs::Codec& codec : codecs::kCodecs) {
    for (const uint32_t dim : kKeyDims) {
      for (const uint32_t n_query : {1u, 7u}) {
        CaseSpec spec{
            .codec = codec.id, .dim = dim, .n_query = n_query, .lengths = {500, 33}, .blocks = 3};
        spec.name =
            std::string(codec.name) + " d" + std::to_string(dim) + " nq" + std::to_string(n_query);
        attend_in(ShapeFor::kSm80, spec, " of sm_80");
      }
    }
    for (const uint32_t group : {16u, 32u, 128u}) {
      CaseSpec spec{
          .codec = codec.id, .dim = kMlaDim, .group = group, .lengths = {300, 33}, .blocks = 3};
      spec.name = std::string(codec.name) + " mla g" + std::to_string(group);
      attend_in(ShapeFor::kSm80, spec, " of sm_80");
      attend_in(ShapeFor::kOthers, spec, " of sm_120");
    }
  }
}

// Merges, appends, reads, tables and moves.
void run_others(Suite* suite) {
  for (const uint32_t key_dim : kKeyDims) {
    const uint32_t dim = value_dim(key_dim);
    suite->merge(dim, 2, 0);
    suite->merge(dim, 37, 5);
    suite->merge(dim, kMaxMergeSlots, 100);
    suite->merge(dim, 4, 4);
    suite->merge(dim, 4, 4, true);
    suite->merge(dim, 37, 5, true);
  }
  for (const AppendSpec& spec : all_appends()) {
    suite->append(spec);
  }
  for (const ReadSpec& spec : all_reads()) {
    suite->read(spec);
  }
  for (const StatesSpec& spec : all_states()) {
    suite->merge_states(spec);
  }
  suite->lengths_of_tokens(true);
  suite->lengths_of_tokens(false);
  suite->scatter(1, 1);
  suite->scatter(40, kMaxRunWords);
  for (const bool pack : {true, false}) {
    suite->move(3, 16384, pack);
    suite->move(5, 1040, pack);
  }
}

int run(bool quiet, bool first, uint64_t seed) {
  Suite suite(seed, quiet, first);
  run_attention(&suite);
  if constexpr (is_in_suite(16)) {
    run_others(&suite);
  }
  return suite.finish();
}

}  // namespace
}  // namespace kvm::attention::gpu::testing

int main(int argc, char** argv) {
  constexpr const char* kUsage = "usage: gpu_emulator_suite [--quiet] [--first] [--seed N]\n";
  bool quiet = false;
  bool first = false;
  uint64_t seed = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--quiet") {
      quiet = true;
    } else if (argument == "--first") {
      first = true;
    } else if (argument == "--seed" && i + 1 < argc) {
      const std::string_view number = argv[++i];
      std::from_chars(number.data(), number.data() + number.size(), seed);
    } else {
      const bool help = argument == "--help" || argument == "-h";
      std::fputs(kUsage, help ? stdout : stderr);
      return help ? 0 : 2;
    }
  }
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  return kvm::attention::gpu::testing::run(quiet, first, seed);
}
