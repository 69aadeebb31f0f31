// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/select.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "attention/sampled/hashed.h"

namespace kvm::attention {
namespace {

// How many times the budget is re-ranked by exact scores where a sketch proposes.
constexpr uint32_t kRerank = 4;

uint32_t budget_of(const ApproxParams& params, uint64_t n_keys) {
  return static_cast<uint32_t>(
      std::clamp<uint64_t>(params.budget, 1, std::max<uint64_t>(n_keys, 1)));
}

// Returns how many keys all shards together keep.
uint32_t keep_of(const ApproxParams& params, uint64_t n_keys) {
  const uint64_t times = params.proposal == Proposal::kSketch ? kRerank : 1;
  return static_cast<uint32_t>(std::min(n_keys, budget_of(params, n_keys) * times));
}

SelectState carve_state(const ApproxInput& input, uint64_t n_keys, uint32_t rows, Carver& carver) {
  SelectState s;
  s.exact = carver.take<std::byte>(state_bytes(*input.problem, rows));
  s.head = carver.take<SelectHead>(1);
  s.items = carver.take<Scored>(size_t{rows} * 2 * keep_in_shard(input.params, n_keys));
  return s;
}

struct SelectScratch {
  // Used by eval_shard.
  float* block_logits;  // [rows][64]
  float* block_norms;
  std::byte* hashed;
  float* work;  // [2 * keep]
  // Used by finish.
  Scored* items;       // [rows][2 * keep]
  uint64_t* position;  // [rows * keep]
  uint16_t* rows;
  uint32_t* ids;
};

SelectScratch carve_scratch(const ApproxInput& input, uint64_t n_keys, uint32_t rows,
                            Carver& carver) {
  const size_t keep = keep_of(input.params, n_keys);
  SelectScratch s;
  s.block_logits = carver.take<float>(size_t{rows} * kPageTokens);
  s.block_norms = carver.take<float>(kPageTokens);
  s.hashed = carver.take<std::byte>(
      input.params.proposal == Proposal::kLsh ? hashed_scratch_bytes(input) : 0);
  s.work = carver.take<float>(2 * keep);
  s.items = carver.take<Scored>(rows * 2 * keep);
  s.position = carver.take<uint64_t>(rows * keep);
  s.rows = carver.take<uint16_t>(rows * keep);
  s.ids = carver.take<uint32_t>(rows * keep);
  return s;
}

// Exact logits of keys in order: body(i, n, logits of keys i to i + n: [row][kGatherKeys]).
template <typename Body>
void score_keys(const Context& c, const GatherList& list, Body body) {
  const GatherContext context = c.gathering();
  BatchMaker maker(context, list);
  GatherArgs args;
  GatherBatch batch;
  alignas(64) float logits[kMaxGatherRows * kGatherKeys];
  while (maker.next(&args, &batch)) {
    context.kernels->logits(&args, &batch, logits);
    body(maker.first(), batch.n, logits);
  }
}

// Bits that order as the numbers do.
uint32_t ordered_bits(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return bits ^ ((0u - (bits >> 31)) | 0x80000000u);
}
float from_ordered(uint32_t bits) {
  return std::bit_cast<float>(bits ^ (((bits >> 31) - 1) | 0x80000000u));
}

class ShardLists {
 public:
  ShardLists(const Context& c, Scored* items, uint32_t keep, float* work) : c_(c) {
    for (uint32_t r = 0; r < c.rows; ++r) {
      lists_[r] = TopList(items + size_t{r} * 2 * keep, keep, work);
    }
  }
  TopList& operator[](uint32_t row) { return lists_[row]; }
  // logits [rows][kGatherKeys]
  void push_keys(const uint64_t* positions, uint32_t n, const float* logits) {
    for (uint32_t r = 0; r < c_.rows; ++r) {
      lists_[r].push(logits + size_t{r} * kGatherKeys, n, positions);
    }
  }
  // logits [rows][kPageTokens]
  void push_block(uint64_t position, const float* logits) {
    for (uint32_t r = 0; r < c_.rows; ++r) {
      lists_[r].push(logits + size_t{r} * kPageTokens, 1, kPageTokens, position);
    }
  }

 private:
  const Context& c_;
  TopList lists_[kMaxApproxRows];
};

void select_sketched(const Context& c, const Use& use, const Stretch& stretch,
                     const SelectScratch& s, ShardLists& lists, SelectHead* head) {
  const SketchedRun& run = c.input->index.sketches[stretch.index_run];
  const hash_index::SketchSpan span{.frame = run.frame,
                                    .query = c.prepared.queries + use.query_at,
                                    .blocks = run.blocks,
                                    .n_blocks = run.n_blocks,
                                    .position = run.position};
  const auto offset = static_cast<uint32_t>((stretch.position - run.position) / kPageTokens);
  for (uint32_t b = 0; b < stretch.n_blocks; ++b) {
    hash_index::scan_logits(span, c.rows, offset + b, s.block_logits, s.block_norms);
    // A token whose key or value is not finite is coded as huge: it is read.
    if (c.table->sampled->largest(s.block_norms, kPageTokens) >= hash_index::kHugeNorm) {
      for (uint32_t i = 0; i < kPageTokens; ++i) {
        for (uint32_t r = 0; r < c.rows && s.block_norms[i] >= hash_index::kHugeNorm; ++r) {
          s.block_logits[size_t{r} * kPageTokens + i] = 1e38f;
        }
      }
    }
    lists.push_block(stretch.position + uint64_t{b} * kPageTokens, s.block_logits);
  }
  head->index_bytes += stretch.n_blocks *
                       hash_index::block_bytes(hash_index::frame_kind(*run.frame), c.problem.dim_k);
}

void select_hashed(const Context& c, const Use& use, const SelectScratch& s, ShardLists& lists,
                   SelectHead* head) {
  const HashedKeys keys = look_up(c, use, s.hashed);
  head->index_bytes += keys.ids_read * sizeof(uint16_t);
  head->keys_scored += keys.n;
  uint32_t ids[kPageTokens];
  for (uint32_t from = 0; from < keys.n; from += kPageTokens) {
    const uint32_t n = std::min(keys.n - from, kPageTokens);
    std::iota(ids, ids + n, from);
    const GatherList list{.ids = {ids, n}, .position = keys.position, .keys_only = true};
    score_keys(c, list, [&](size_t at, uint32_t n_scored, const float* logits) {
      for (uint32_t i = 0; i < n_scored; ++i) {
        const size_t key = from + at + i;
        for (uint32_t r = 0; r < c.rows; ++r) {
          if ((keys.rows[key] >> r & 1) != 0) {
            lists[r].push(logits[r * kGatherKeys + i], keys.position[key]);
          }
        }
      }
    });
  }
}

// The union of the rows' lists: positions ascending, with masks of the rows. Returns how many.
uint32_t unite(const Context& c, const SelectScratch& s, uint32_t keep, const uint32_t* n) {
  uint32_t at[kMaxApproxRows] = {};
  uint32_t n_out = 0;
  while (true) {
    uint64_t least = UINT64_MAX;
    for (uint32_t r = 0; r < c.rows; ++r) {
      if (at[r] < n[r]) {
        least = std::min(least, s.items[size_t{r} * 2 * keep + at[r]].position);
      }
    }
    if (least == UINT64_MAX) {
      return n_out;
    }
    uint16_t mask = 0;
    for (uint32_t r = 0; r < c.rows; ++r) {
      if (at[r] < n[r] && s.items[size_t{r} * 2 * keep + at[r]].position == least) {
        mask = static_cast<uint16_t>(mask | 1u << r);
        ++at[r];
      }
    }
    s.position[n_out] = least;
    s.rows[n_out] = mask;
    s.ids[n_out] = n_out;
    ++n_out;
  }
}

void gather_masked(const Context& c, const GatherList& list, const uint16_t* rows,
                   const GatherSums& sums) {
  const GatherContext context = c.gathering();
  BatchMaker maker(context, list);
  GatherArgs args;
  GatherBatch batch;
  alignas(64) float per_row[kMaxGatherRows * kGatherKeys];
  while (maker.next(&args, &batch)) {
    fill_row_masks(c.rows, rows + maker.first(), batch.n, per_row);
    batch.kind = kGatherWeighted;
    batch.per_row = per_row;
    context.kernels->gather(&args, &batch, &sums);
  }
}

}  // namespace

// Counts leading bits and goes on with those of the same: no branch depends on a number.
float kth_largest(float* x, uint32_t n, uint32_t k) {
  constexpr int kBits[3] = {11, 11, 10};
  int shift = 32;
  uint32_t prefix = 0;
  for (const int bits : kBits) {
    shift -= bits;
    const uint32_t mask = (1u << bits) - 1;
    uint32_t count[1u << 11] = {};
    for (uint32_t i = 0; i < n; ++i) {
      ++count[ordered_bits(x[i]) >> shift & mask];
    }
    uint32_t digit = mask;
    for (; count[digit] < k; --digit) {
      k -= count[digit];
    }
    uint32_t left = 0;
    for (uint32_t i = 0; i < n; ++i) {
      const float y = x[i];
      x[left] = y;
      left += (ordered_bits(y) >> shift & mask) == digit ? 1 : 0;
    }
    n = left;
    prefix = prefix << bits | digit;
  }
  return from_ordered(prefix);
}

double keys_above_bars(const Context& c, double share) {
  // Keys of a block are alike, so that counts vary more than those of independent ones would.
  constexpr double kMore = 1.5;
  constexpr double kDeviations = 4;
  constexpr double kFew = 8;
  const double in_pilot = keep_of(c.params(), c.plan->n_keys_indexed) / share;
  return share * (kMore * in_pilot + kDeviations * std::sqrt(in_pilot) + kFew);
}

// No branch guesses which keys are good enough: all are written, and the next one overwrites those
// that were not meant.
template <typename Position>
void TopList::add(const float* scores, uint32_t stride, uint32_t n, Position position_of) {
  Scored* const items = items_;
  uint32_t at = n_;
  float bar = bar_;
  for (uint32_t i = 0; i < n; ++i) {
    const float score = scores[size_t{i} * stride];
    items[at] = {score, position_of(i)};
    at += score > bar ? 1 : 0;
    if (at == 2 * keep_) {
      n_ = at;
      shrink();
      at = n_;
      bar = bar_;
    }
  }
  n_ = at;
}

void TopList::push(const float* scores, uint32_t stride, uint32_t n, uint64_t position) {
  add(scores, stride, n, [&](uint32_t i) { return position + i; });
}

void TopList::push(const float* scores, uint32_t n, const uint64_t* positions) {
  add(scores, 1, n, [&](uint32_t i) { return positions[i]; });
}

// By the score of the last one that is kept, found in a copy, so that the order stays.
void TopList::shrink() {
  for (uint32_t i = 0; i < n_; ++i) {
    work_[i] = items_[i].score;
  }
  bar_ = kth_largest(work_, n_, keep_);
  uint32_t n_above = 0;
  for (uint32_t i = 0; i < n_; ++i) {
    n_above += items_[i].score > bar_ ? 1 : 0;
  }
  uint32_t n_equal = keep_ - n_above;
  uint32_t n = 0;
  for (uint32_t i = 0; i < n_; ++i) {
    const Scored item = items_[i];
    const uint32_t equal = item.score == bar_ && n_equal > 0 ? 1 : 0;
    items_[n] = item;
    n += equal + (item.score > bar_ ? 1 : 0);
    n_equal -= equal;
  }
  n_ = n;
}

uint32_t TopList::finish() {
  if (n_ > keep_) {
    shrink();
  }
  return n_;
}

uint32_t keep_in_shard(const ApproxParams& params, uint64_t n_keys) {
  // Hash tables of a run are asked for all its keys at once, and a run may be longer than a shard.
  return std::min<uint32_t>(keep_of(params, n_keys),
                            std::max<uint32_t>(kShardTokens, hash_index::kMaxRunKeys));
}

size_t select_state_bytes(const ApproxInput& input, uint64_t n_keys, uint32_t rows) {
  Carver carver(nullptr);
  carve_state(input, n_keys, rows, carver);
  return carver.used_bytes();
}

size_t select_scratch_bytes(const ApproxInput& input, uint64_t n_keys, uint32_t rows) {
  Carver carver(nullptr);
  carve_scratch(input, n_keys, rows, carver);
  return carver.used_bytes();
}

SelectState select_state(const Context& c, void* state) {
  Carver carver(state);
  return carve_state(*c.input, c.plan->n_keys_indexed, c.rows, carver);
}

void select_shard(const Context& c, uint64_t shard_id, bool bars, void* scratch,
                  const SelectState& state) {
  Carver carver(scratch);
  const SelectScratch s = carve_scratch(*c.input, c.plan->n_keys_indexed, c.rows, carver);
  const uint32_t keep = keep_in_shard(c.params(), c.plan->n_keys_indexed);
  *state.head = SelectHead{};
  ShardLists lists(c, state.items, keep, s.work);
  for (uint32_t r = 0; bars && r < c.rows; ++r) {
    lists[r].raise_bar(c.prepared.head->log_c[r]);
  }
  if (c.params().proposal == Proposal::kLsh) {
    for (const Use& use : c.uses()) {
      if (c.stretches()[use.first_stretch].position / kShardTokens == shard_id) {
        select_hashed(c, use, s, lists, state.head);
      }
    }
  } else {
    for_stretches_in(c, shard_id * kShardTokens, (shard_id + 1) * kShardTokens,
                     [&](const Use& use, const Stretch& stretch) {
                       select_sketched(c, use, stretch, s, lists, state.head);
                     });
  }
  for (uint32_t r = 0; r < c.rows; ++r) {
    state.head->n[r] = lists[r].finish();
  }
}

namespace {

bool enough(const Context& c, std::byte* states, uint32_t keep) {
  for (uint32_t r = 0; r < c.rows; ++r) {
    uint64_t n = 0;
    for (uint32_t shard = 0; shard < c.plan->n_shards; ++shard) {
      n += select_state(c, states + shard * c.plan->state_bytes).head->n[r];
    }
    if (n < keep) {
      return false;
    }
  }
  return true;
}

}  // namespace

Selected gather_selected(const Context& c, void* scratch, std::byte* states,
                         const GatherSums& sums) {
  Carver carver(scratch);
  const SelectScratch s = carve_scratch(*c.input, c.plan->n_keys_indexed, c.rows, carver);
  const uint32_t keep = keep_of(c.params(), c.plan->n_keys_indexed);
  const uint32_t keep_shard = keep_in_shard(c.params(), c.plan->n_keys_indexed);
  Selected result;
  uint32_t n[kMaxApproxRows];
  if (c.params().proposal == Proposal::kSketch && !enough(c, states, keep)) {
    const Shards shards(c.exact);
    for (uint32_t i = 0; i < shards.count(); ++i) {
      select_shard(c, shards.id(i), false, scratch,
                   select_state(c, states + i * c.plan->state_bytes));
    }
  }
  ShardLists lists(c, s.items, keep, s.work);
  for (uint32_t shard = 0; shard < c.plan->n_shards; ++shard) {
    const SelectState state = select_state(c, states + shard * c.plan->state_bytes);
    result.keys_read += state.head->keys_scored;
    result.index_bytes += state.head->index_bytes;
    for (uint32_t r = 0; r < c.rows; ++r) {
      const Scored* items = state.items + size_t{r} * 2 * keep_shard;
      for (uint32_t i = 0; i < state.head->n[r]; ++i) {
        lists[r].push(items[i].score, items[i].position);
      }
    }
  }
  for (uint32_t r = 0; r < c.rows; ++r) {
    n[r] = lists[r].finish();
  }
  uint32_t n_keys = unite(c, s, keep, n);
  if (c.params().proposal == Proposal::kSketch) {
    const uint32_t budget = budget_of(c.params(), c.plan->n_keys_indexed);
    result.keys_read = n_keys;
    ShardLists best(c, s.items, budget, s.work);
    const GatherList list{.ids = {s.ids, n_keys}, .position = s.position, .keys_only = true};
    score_keys(c, list, [&](size_t i, uint32_t n_scored, const float* logits) {
      best.push_keys(s.position + i, n_scored, logits);
    });
    for (uint32_t r = 0; r < c.rows; ++r) {
      n[r] = best[r].finish();
    }
    n_keys = unite(c, s, budget, n);
  }
  gather_masked(c, {.ids = {s.ids, n_keys}, .position = s.position}, s.rows, sums);
  return result;
}

}  // namespace kvm::attention
