// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>

#include "base/round.h"

namespace kvm::attention::gpu {
namespace {

// Between the query tokens of requests: that is how they are told apart.
constexpr uint32_t kTokensApart = 1u << 20;

struct Batch {
  std::vector<Request> requests;
  std::vector<PageClass> classes;
  std::vector<uint16_t> heads;
};

Batch uniform_batch(const std::vector<uint32_t>& lengths, uint32_t n_heads) {
  Batch batch;
  batch.classes.resize(1);
  batch.classes[0].n_heads = n_heads;
  for (uint32_t i = 0; i < n_heads; ++i) {
    batch.heads.push_back(static_cast<uint16_t>(i));
  }
  for (const uint32_t length : lengths) {
    Request request;
    request.q_token = kTokensApart * static_cast<uint32_t>(batch.requests.size());
    request.n_first = request.n_tokens = length;
    batch.requests.push_back(request);
  }
  return batch;
}

DecodePlan plan(const Batch& batch, const PlanOptions& options) {
  return plan_decode(batch.requests, batch.classes, batch.heads, options);
}

bool sees(const Sight& sight, uint32_t own, uint32_t token) {
  return token <= own && own - token < sight.window &&
         (token < sight.n_sinks || own - token < sight.n_recent);
}

// How many tokens a block of rows of a plan reads. Where its request is shorter than the whole one,
// these are the tokens that some row of the block sees, in order.
void expect_reads(const Request& whole, const Sight& sight, const Request& of, uint32_t n_tokens,
                  uint32_t query_first, uint32_t query_last) {
  uint32_t at = 0;
  for (uint32_t token = 0; token < whole.n_tokens; ++token) {
    bool seen = false;
    for (uint32_t query = query_first; query <= query_last; ++query) {
      seen = seen || sees(sight, whole.n_tokens - whole.n_query + query, token);
    }
    if (seen) {
      ASSERT_LT(at, n_tokens) << "token " << token << " is seen";
      ASSERT_EQ(at < of.n_first ? of.first + at : of.second + (at - of.n_first), token);
      ++at;
    }
  }
  ASSERT_EQ(at, n_tokens);
}

// Every token of every (request, head, row block) exactly once, slots and merges in step.
void expect_sound(const Batch& batch, const PlanOptions& options, const DecodePlan& plan) {
  ASSERT_LE(plan.n_blocks, options.blocks);
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, std::vector<Work>> items;
  size_t n_reached = 0;
  for (uint32_t block = 0; block < plan.n_blocks; ++block) {
    uint32_t i = block;
    do {
      const Work& work = plan.work[i];
      items[{work.request.q_token / kTokensApart, work.head, work.row_first}].push_back(work);
      ++n_reached;
      ASSERT_TRUE(work.next == 0 || (work.next >= plan.n_blocks && work.next < plan.work.size()));
      i = work.next;
    } while (i != 0);
  }
  ASSERT_EQ(n_reached + plan.n_tail, plan.work.size());
  ASSERT_TRUE(plan.n_tail == 0 || options.tail_part != 0);
  uint64_t n_tokens = 0, n_tail_tokens = 0;
  for (const Work& work : plan.work) {
    n_tokens += work.end - work.begin;
  }
  uint32_t n_cut = 0;
  for (auto work = plan.work.end() - plan.n_tail; work != plan.work.end(); ++work) {
    ASSERT_EQ(work->next, 0u);
    n_tail_tokens += work->end - work->begin;
    n_cut += work->begin != 0 ? 1 : 0;
    items[{work->request.q_token / kTokensApart, work->head, work->row_first}].push_back(*work);
  }
  ASSERT_LE(n_tail_tokens * options.tail_part, plan.n_tail == 0 ? 0 : n_tokens);
  ASSERT_TRUE(options.fixed_tokens != 0 || n_cut <= most_tail_cuts(n_tokens, options));
  size_t n_items = 0;
  for (uint32_t r = 0; r < batch.requests.size(); ++r) {
    const Request& request = batch.requests[r];
    const uint32_t rows = request.n_query * options.group;
    for (uint32_t head = 0; head < batch.classes[request.page_class].n_heads; ++head) {
      for (uint32_t row = 0; row < rows; row += options.block_rows) {
        ++n_items;
        auto& pieces = items[{r, head, row}];
        ASSERT_FALSE(pieces.empty());
        // Those of the tail come last here, from the item's end on.
        std::sort(pieces.begin(), pieces.end(),
                  [](const Work& a, const Work& b) { return a.begin < b.begin; });
        uint32_t at = 0;
        for (const Work& work : pieces) {
          ASSERT_EQ(work.begin, at);
          ASSERT_TRUE(work.end > at || request.n_tokens == 0);
          ASSERT_TRUE(work.begin % kCutTokens == 0);
          ASSERT_EQ(work.slot < 0, pieces.size() == 1);
          at = work.end;
        }
        if (options.sights.empty()) {
          ASSERT_EQ(at, request.n_tokens);
        } else if (head == 0) {
          const uint32_t last = std::min(row + options.block_rows, rows) - 1;
          ASSERT_NO_FATAL_FAILURE(expect_reads(request, options.sights[request.page_class],
                                               pieces[0].request, at, row / options.group,
                                               last / options.group));
        }
      }
    }
  }
  ASSERT_EQ(items.size(), n_items);
  if (options.fixed_tokens == 0) {
    EXPECT_LE(plan.work.size(), n_items + options.blocks + n_cut);
  }
  uint32_t slot = 0;
  for (const Merge& merge : plan.merges) {
    const auto& pieces = items[{merge.q_token / kTokensApart, merge.kv_head, merge.row_first}];
    ASSERT_EQ(merge.slot_first, slot);
    ASSERT_EQ(merge.n_slots, pieces.size());
    ASSERT_EQ(plan.work[merge.work].slot, static_cast<int32_t>(slot));
    ASSERT_EQ(plan.work[merge.work].begin, 0u);
    for (const Work& work : pieces) {
      ASSERT_EQ(work.slot, static_cast<int32_t>(slot++));
    }
  }
  ASSERT_EQ(slot, plan.n_slots);
}

TEST(Divider, DividesEveryTokenByEveryPageSize) {
  std::mt19937_64 random(3);
  for (uint32_t divisor = 1; divisor <= 5000; divisor += divisor < 300 ? 1 : 97) {
    const Divider by = make_divider(divisor);
    const auto check = [&](uint32_t n) {
      ASSERT_EQ((uint64_t{2 * n} * by.multiplier >> 32) >> by.shift, n / divisor)
          << n << " / " << divisor;
    };
    for (int i = 0; i < 200; ++i) {
      const uint32_t n = static_cast<uint32_t>(random()) % kMaxListTokens;
      check(n);
      check(n / divisor * divisor);
      check(n / divisor * divisor + divisor - 1 < kMaxListTokens ? n / divisor * divisor : 0);
    }
    check(kMaxListTokens - 1);
  }
}

TEST(Plan, RandomBatches) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
    std::vector<uint32_t> lengths(1 + below(20));
    for (uint32_t& length : lengths) {
      length = 8 + below(below(4) == 0 ? 100000 : 900);
    }
    Batch batch = uniform_batch(lengths, 1 + below(8));
    PlanOptions options;
    options.blocks = 1 + below(300);
    options.group = 1 + below(below(4) == 0 ? kMaxMlaGroup : kMaxGpuGroup);
    options.block_rows = kBlockRows[below(3)];
    options.fixed_tokens = below(3) == 0 ? 512 : 0;
    options.tail_part = below(3) == 0 ? 2 + below(30) : kTailPart;
    options.tail_load_tokens = below(2) == 0 ? below(3000) : kTailLoadTokens;
    options.least_tail_tokens = below(2) == 0 ? kCutTokens : kLeastTailTokens;
    for (Request& request : batch.requests) {
      request.n_query = 1 + below(8);
    }
    const DecodePlan made = plan(batch, options);
    ASSERT_NO_FATAL_FAILURE(expect_sound(batch, options, made));
    // The same cuts, whoever has the pieces.
    if (options.fixed_tokens != 0) {
      options.tail_part = 0;
      const DecodePlan without = plan(batch, options);
      ASSERT_EQ(without.n_tail, 0u);
      ASSERT_EQ(without.n_slots, made.n_slots);
      ASSERT_EQ(without.work.size(), made.work.size());
    }
  }
}

uint64_t tail_tokens(const DecodePlan& made) {
  uint64_t tokens = 0;
  for (auto work = made.work.end() - made.n_tail; work != made.work.end(); ++work) {
    tokens += work->end - work->begin;
  }
  return tokens;
}

TEST(Plan, LongLaunchesHaveATail) {
  PlanOptions options;
  options.blocks = 264;
  // Long sequences, and many short ones: of both a 16th, to the last pieces that were owed.
  for (const uint32_t length : {1u << 20, 65536u, 4096u, 3000u, 700u}) {
    SCOPED_TRACE(length);
    const uint64_t wanted = uint64_t{2} * kTailLoadTokens * options.blocks;
    const auto n = static_cast<uint32_t>(div_up(wanted, uint64_t{length} * 8));
    const Batch batch = uniform_batch(std::vector<uint32_t>(n, length), 8);
    const DecodePlan made = plan(batch, options);
    ASSERT_NO_FATAL_FAILURE(expect_sound(batch, options, made));
    const uint64_t part = uint64_t{length} * n * 8 / kTailPart;
    EXPECT_LE(tail_tokens(made), part);
    EXPECT_GE(tail_tokens(made), part - 4096);
    // The first pieces are a block's share of the tail, the last ones are the shortest.
    uint32_t before = UINT32_MAX;
    for (auto work = made.work.end() - made.n_tail; work != made.work.end(); ++work) {
      const uint32_t tokens = work->end - work->begin;
      EXPECT_LE(tokens, before);
      EXPECT_GE(tokens, kLeastTailTokens);
      before = tokens;
    }
    const Work& first = made.work[made.work.size() - made.n_tail];
    EXPECT_LE(first.end - first.begin, part / options.blocks + options.least_tokens);
    EXPECT_LE(before, kLeastTailTokens + options.least_tokens);
    // What blocks have of their own is even.
    EXPECT_EQ(made.n_blocks, options.blocks);
    EXPECT_LE(longest_block_tokens(made, options),
              (uint64_t{length} * n * 8 - tail_tokens(made) +
               (made.work.size() - made.n_tail) * options.overhead_tokens) /
                      options.blocks +
                  options.least_tokens + 2 * kCutTokens);
    options.tail_part = 0;
    EXPECT_EQ(plan(batch, options).n_tail, 0u);
    options.tail_part = kTailPart;
  }
  // One token less than makes a launch long.
  options.blocks = 4;
  EXPECT_GT(plan(uniform_batch({4 * kTailLoadTokens}, 1), options).n_tail, 0u);
  EXPECT_EQ(plan(uniform_batch({4 * kTailLoadTokens - 1}, 1), options).n_tail, 0u);
  EXPECT_EQ(most_tail_cuts(4 * kTailLoadTokens, options), kTailCuts * options.blocks);
  EXPECT_EQ(most_tail_cuts(4 * kTailLoadTokens - 1, options), 0u);
}

// However long the launch, tails cut so many pieces, and an item has no more than can be merged.
TEST(Plan, TailsAreOfAFewPiecesForEachBlock) {
  for (const uint32_t blocks : {1u, 3u, 264u, 1000u, kMaxMergeSlots}) {
    for (const uint32_t length : {1u << 24, 1u << 30}) {
      const PlanOptions options{.blocks = blocks};
      const Batch batch = uniform_batch({length}, 1);
      const DecodePlan made = plan(batch, options);
      ASSERT_NO_FATAL_FAILURE(expect_sound(batch, options, made));
      EXPECT_LE(made.n_tail, kTailCuts * blocks);
      EXPECT_LE(made.n_slots, kMaxMergeSlots);
      EXPECT_EQ(made.n_tail == 0, blocks == kMaxMergeSlots);
    }
  }
}

TEST(Plan, RandomPrefills) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
    std::vector<uint32_t> lengths(1 + below(4));
    for (uint32_t& length : lengths) {
      length = 1 + below(below(3) == 0 ? 3000 : 200);
    }
    Batch batch = uniform_batch(lengths, 1 + below(8));
    Sight sight;
    sight.window = below(3) == 0 ? 1 + below(500) : UINT32_MAX;
    if (below(2) == 0) {
      sight.n_sinks = below(3) == 0 ? 0 : below(300);
      sight.n_recent = 1 + below(300);
    }
    PlanOptions options;
    options.blocks = 1 + below(300);
    options.group = 1 + below(16);
    options.block_rows = kPrefillRows;
    options.least_tokens = below(2) == 0 ? kCutTokens : kLeastPrefillTokens;
    options.fixed_tokens = below(3) == 0 ? 64 : 0;
    options.sights = {&sight, 1};
    for (Request& request : batch.requests) {
      request.n_query = 1 + below(std::min(request.n_tokens, 400u));
    }
    const DecodePlan made = plan(batch, options);
    ASSERT_NO_FATAL_FAILURE(expect_sound(batch, options, made));
  }
}

// A row of a list that may turn out shorter is planned for as many tokens as it can see at most.
TEST(Plan, ShorterListsFitIntoWhatIsPlanned) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
    Sight sight;
    sight.window = below(3) == 0 ? UINT32_MAX : 1 + below(60);
    if (below(2) == 0) {
      sight.n_sinks = below(50);
      sight.n_recent = 1 + below(40);
    }
    Request list;
    list.n_query = 1 + below(5);
    list.tree_first = below(2) == 0 ? 0 : kNoTree;
    const uint32_t unsure = below(40), n_tokens = list.n_query + unsure + below(100);
    std::vector<Request> planned;
    add_requests(list, n_tokens, sight, unsure, &planned);
    const uint32_t rows = static_cast<uint32_t>(planned.size());
    ASSERT_EQ(rows * planned[0].n_query, list.n_query);
    for (uint32_t row = 0; row < rows; ++row) {
      uint32_t most = 0;
      for (uint32_t missing = 0; missing <= unsure; ++missing) {
        const uint32_t n = n_tokens - missing;
        const uint32_t own = n - list.n_query + row;
        const uint32_t last = rows == 1 || list.tree_first != kNoTree ? n - 1 : own;
        uint32_t seen = 0;
        for (uint32_t token = 0; token <= last; ++token) {
          seen += token > own || sees(sight, own, token) ? 1 : 0;
        }
        most = std::max(most, seen);
      }
      ASSERT_EQ(planned[row].n_tokens, most) << "row " << row;
    }
  }
}

// Tokens, overheads included, that blocks would have if all had the same.
uint64_t even_share(const DecodePlan& made, const PlanOptions& options) {
  uint64_t tokens = 0;
  for (const Work& work : made.work) {
    tokens += work.end - work.begin + options.overhead_tokens;
  }
  return tokens / options.blocks;
}

TEST(Plan, PrefillIsCutWhereBlocksWouldIdle) {
  const Sight sight;
  PlanOptions options;
  options.blocks = 264;
  options.group = 4;
  options.block_rows = kPrefillRows;
  options.least_tokens = kLeastPrefillTokens;
  options.sights = {&sight, 1};
  // A suffix of 128 tokens behind 128K is 32 items: all blocks have a part.
  Batch batch = uniform_batch({131072}, 8);
  batch.requests[0].n_query = 128;
  const DecodePlan cut = plan(batch, options);
  EXPECT_EQ(cut.n_blocks, options.blocks);
  EXPECT_LE(longest_block_tokens(cut, options),
            even_share(cut, options) + options.least_tokens + kCutTokens);
  // 600 items of one length, more than two for each block, would leave blocks idle for a third.
  batch.requests[0].n_query = 2400;
  const DecodePlan rest = plan(batch, options);
  EXPECT_GT(rest.n_slots, 0u);
  EXPECT_LE(longest_block_tokens(rest, options),
            even_share(rest, options) + options.least_tokens + kCutTokens);
  // A prompt's items are of all lengths: put together they come out even.
  for (const uint32_t length : {2048u, 8192u}) {
    batch = uniform_batch({length}, 8);
    batch.requests[0].n_query = length;
    const DecodePlan whole = plan(batch, options);
    EXPECT_EQ(whole.n_slots, 0u) << length;
    EXPECT_LE(longest_block_tokens(whole, options), even_share(whole, options) * 9 / 8) << length;
  }
  // Too short to be cut, however few there are.
  batch = uniform_batch({512}, 2);
  batch.requests[0].n_query = 100;
  EXPECT_EQ(plan(batch, options).n_slots, 0u);
}

TEST(Plan, FixedPiecesOfPrefillGoByItsRows) {
  const Sight sight;
  PlanOptions options;
  options.blocks = 7;
  options.group = 4;
  options.block_rows = kPrefillRows;
  options.fixed_tokens = 4096;
  options.sights = {&sight, 1};
  Batch batch = uniform_batch({50000}, 1);
  batch.requests[0].n_query = 32;  // one block of rows
  EXPECT_EQ(plan(batch, options).n_slots, 13u);
  batch.requests[0].n_query = 128;  // four, cut four times as seldom
  EXPECT_EQ(plan(batch, options).n_slots, 16u);
}

TEST(Plan, BlocksHaveTheSameToDo) {
  PlanOptions options;
  options.blocks = 264;
  // One long and 63 short sequences, and one long one alone.
  std::vector<uint32_t> skewed(64, 2048);
  skewed[0] = 131072;
  for (const auto& lengths : {skewed, std::vector<uint32_t>{131072}, {16384}}) {
    const Batch batch = uniform_batch(lengths, 8);
    const DecodePlan made = plan(batch, options);
    ASSERT_NO_FATAL_FAILURE(expect_sound(batch, options, made));
    uint64_t tokens = 0;
    for (const uint32_t length : lengths) {
      tokens += uint64_t{length} * 8;
    }
    const uint64_t even = (tokens + made.work.size() * options.overhead_tokens) / options.blocks;
    EXPECT_LE(longest_block_tokens(made, options), even + options.least_tokens + kCutTokens);
  }
}

TEST(Plan, EmptyRequestsAreStillAnswered) {
  const Batch batch = uniform_batch({0, 100, 0}, 2);
  const PlanOptions options{.blocks = 4};
  const DecodePlan made = plan(batch, options);
  ASSERT_NO_FATAL_FAILURE(expect_sound(batch, options, made));
  EXPECT_EQ(plan(Batch{}, options).n_blocks, 0u);
}

TEST(Plan, FixedPiecesDependOnNothingElse) {
  PlanOptions options{.blocks = 100, .fixed_tokens = 4096};
  const DecodePlan alone = plan(uniform_batch({50000}, 1), options);
  options.blocks = 7;
  const DecodePlan together = plan(uniform_batch({50000, 3, 70000}, 1), options);
  ASSERT_EQ(alone.work.size(), 13u);
  const auto ends = [](const DecodePlan& of) {
    std::vector<std::pair<uint32_t, uint32_t>> pieces;
    for (const Work& work : of.work) {
      if (work.request.q_token == 0) {
        pieces.emplace_back(work.begin, work.end);
      }
    }
    std::sort(pieces.begin(), pieces.end());
    return pieces;
  };
  EXPECT_EQ(ends(alone), ends(together));
  // So long that 4,096 would make too many.
  const DecodePlan longest = plan(uniform_batch({20u << 20}, 1), options);
  EXPECT_LE(longest.n_slots, kMaxMergeSlots);
}

}  // namespace
}  // namespace kvm::attention::gpu
