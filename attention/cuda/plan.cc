// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/plan.h"

#include <algorithm>

#include "base/assert.h"
#include "base/round.h"

namespace kvm::attention::gpu {
namespace {

// What is cut: one request's tokens for one head and one block of rows.
struct Item {
  Work whole;
  uint32_t rows;
};

std::vector<Item> list_items(std::span<const Request> requests, std::span<const PageClass> classes,
                             std::span<const uint16_t> heads, const PlanOptions& options) {
  std::vector<Item> items;
  for (uint32_t r = 0; r < requests.size(); ++r) {
    const Request& request = requests[r];
    const PageClass& of = classes[request.page_class];
    const uint32_t rows = request.n_query * options.group;
    KVM_ASSERT(request.n_query >= 1 && request.n_tokens + 1 >= request.n_query);
    for (uint32_t head = 0; head < of.n_heads; ++head) {
      // Blocks of rows of one item stand side by side: the second reads K and V from the cache.
      for (uint32_t row = 0; row < rows; row += options.block_rows) {
        Item item;
        item.whole.request = r;
        item.whole.head = static_cast<uint16_t>(head);
        item.whole.kv_head = heads[of.heads_first + head];
        item.whole.row_first = row;
        item.whole.end = request.n_tokens;
        item.rows = std::min(rows - row, options.block_rows);
        items.push_back(item);
      }
    }
  }
  return items;
}

// Fills blocks one after the other, each up to `load` tokens.
class Filler {
 public:
  Filler(uint64_t load, const PlanOptions& options)
      : load_(load), options_(options), room_(static_cast<int64_t>(load)) {}

  // Calls piece(begin, end, block) for the pieces of `n_tokens` tokens.
  template <class Piece>
  void fill(uint32_t n_tokens, Piece piece) {
    uint32_t begin = 0;
    do {
      const uint32_t left = n_tokens - begin;
      const int64_t least = options_.overhead_tokens + std::min(left, least_piece());
      if (room_ < least && used_) {
        next_block();
      }
      const uint32_t take =
          std::min(left, options_.fixed_tokens != 0 ? fixed_piece(n_tokens) : piece_for_room(left));
      piece(begin, begin + take, block_);
      used_ = true;
      room_ -= int64_t{take} + options_.overhead_tokens;
      begin += take;
    } while (begin < n_tokens);
  }
  uint32_t n_blocks() const { return block_ + 1; }

 private:
  void next_block() {
    ++block_;
    room_ = static_cast<int64_t>(load_);
    used_ = false;
  }
  uint32_t least_piece() const {
    return options_.fixed_tokens != 0 ? options_.fixed_tokens : options_.least_tokens;
  }
  uint32_t fixed_piece(uint32_t n_tokens) const {
    uint64_t piece = options_.fixed_tokens;
    while (div_up(n_tokens, piece) > kMaxMergeSlots) {
      piece *= 2;
    }
    return static_cast<uint32_t>(std::min<uint64_t>(piece, kMaxListTokens));
  }
  // What fits, unless so little would be left that it is not worth a piece.
  uint32_t piece_for_room(uint32_t left) const {
    const int64_t room = std::max<int64_t>(room_ - options_.overhead_tokens, options_.least_tokens);
    if (room >= left) {
      return left;
    }
    uint32_t take = static_cast<uint32_t>(room) / kCutTokens * kCutTokens;
    if (left - take < options_.least_tokens) {
      take = left < 2 * options_.least_tokens
                 ? left
                 : (left - options_.least_tokens) / kCutTokens * kCutTokens;
    }
    return take;
  }

  uint64_t load_;
  const PlanOptions& options_;
  int64_t room_;
  uint32_t block_ = 0;
  bool used_ = false;  // the current block has work
};

uint32_t blocks_needed(std::span<const Item> items, uint64_t load, const PlanOptions& options) {
  Filler filler(load, options);
  for (const Item& item : items) {
    filler.fill(item.whole.end, [](uint32_t, uint32_t, uint32_t) {});
  }
  return filler.n_blocks();
}

// The least load for which the blocks suffice.
uint64_t choose_load(std::span<const Item> items, const PlanOptions& options) {
  uint64_t total = 0;
  for (const Item& item : items) {
    // Fixed pieces count their overhead each.
    const uint64_t pieces =
        options.fixed_tokens == 0 ? 1 : div_up(item.whole.end, options.fixed_tokens) + 1;
    total += item.whole.end + pieces * options.overhead_tokens;
  }
  // With `total` one block suffices. Cuts add overheads, so the least load is not below this.
  uint64_t enough = std::max<uint64_t>(total, 1);
  uint64_t too_little = total / options.blocks;
  too_little = too_little == 0 ? 0 : too_little - 1;
  while (too_little + 1 < enough) {
    const uint64_t middle = too_little + (enough - too_little) / 2;
    if (blocks_needed(items, middle, options) <= options.blocks) {
      enough = middle;
    } else {
      too_little = middle;
    }
  }
  return enough;
}

}  // namespace

DecodePlan plan_decode(std::span<const Request> requests, std::span<const PageClass> classes,
                       std::span<const uint16_t> heads, const PlanOptions& options) {
  KVM_ASSERT(options.blocks >= 1 && options.blocks <= kMaxMergeSlots);
  KVM_ASSERT(options.group >= 1 && options.group <= 16);
  KVM_ASSERT(options.least_tokens % kCutTokens == 0 && options.least_tokens > 0);
  const std::vector<Item> items = list_items(requests, classes, heads, options);
  DecodePlan plan;
  plan.block_work = {0};
  if (items.empty()) {
    return plan;
  }
  Filler filler(choose_load(items, options), options);
  for (const Item& item : items) {
    const size_t first = plan.work.size();
    filler.fill(item.whole.end, [&](uint32_t begin, uint32_t end, uint32_t block) {
      while (plan.block_work.size() < block + 1) {
        plan.block_work.push_back(static_cast<uint32_t>(plan.work.size()));
      }
      Work work = item.whole;
      work.begin = begin;
      work.end = end;
      plan.work.push_back(work);
    });
    const uint32_t n_pieces = static_cast<uint32_t>(plan.work.size() - first);
    if (n_pieces == 1) {
      continue;
    }
    KVM_ASSERT(n_pieces <= kMaxMergeSlots);
    Merge merge;
    merge.request = item.whole.request;
    merge.head = item.whole.head;
    merge.kv_head = item.whole.kv_head;
    merge.row_first = item.whole.row_first;
    merge.slot_first = plan.n_slots;
    merge.n_slots = n_pieces;
    plan.merges.push_back(merge);
    plan.max_rows = std::max(plan.max_rows, item.rows);
    for (size_t i = first; i < plan.work.size(); ++i) {
      plan.work[i].slot = static_cast<int32_t>(plan.n_slots++);
    }
  }
  plan.block_work.push_back(static_cast<uint32_t>(plan.work.size()));
  return plan;
}

uint64_t longest_block_tokens(const DecodePlan& plan, const PlanOptions& options) {
  uint64_t longest = 0;
  for (uint32_t block = 0; block < plan.n_blocks(); ++block) {
    uint64_t tokens = 0;
    for (uint32_t i = plan.block_work[block]; i < plan.block_work[block + 1]; ++i) {
      tokens += plan.work[i].end - plan.work[i].begin + options.overhead_tokens;
    }
    longest = std::max(longest, tokens);
  }
  return longest;
}

}  // namespace kvm::attention::gpu
