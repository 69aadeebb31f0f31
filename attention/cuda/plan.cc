// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/plan.h"

#include <algorithm>

#include "base/assert.h"
#include "base/round.h"

namespace kvm::attention::gpu {
namespace {

// An Item is cut into pieces: one request's tokens for one head and one block of rows.
struct Item {
  Work whole;
  uint32_t rows;
};

std::vector<Item> list_items(std::span<const Request> requests, std::span<const PageClass> classes,
                             std::span<const uint16_t> heads, const PlanOptions& options) {
  std::vector<Item> items;
  for (const Request& request : requests) {
    const PageClass& of = classes[request.page_class];
    const uint32_t rows = request.n_query * options.group;
    KVM_ASSERT(request.n_query >= 1 && request.n_tokens + 1 >= request.n_query);
    for (uint32_t head = 0; head < of.n_heads; ++head) {
      // Blocks of rows of one item stand side by side: the second reads K and V from the cache.
      for (uint32_t row = 0; row < rows; row += options.block_rows) {
        Item item;
        item.whole.request = request;
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

// A Filler fills blocks one after the other, each up to `load` tokens.
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
  // Returns as much as fits, unless so little would be left that it is not worth a piece.
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

struct Piece {
  Work work;
  uint32_t block;
};

// Lays out pieces, which are in order of blocks: the first ones of all blocks, then the others.
void link_pieces(std::span<const Piece> pieces, DecodePlan* plan) {
  plan->work.resize(plan->n_blocks);
  uint32_t last = 0;  // of the current block
  for (size_t i = 0; i < pieces.size(); ++i) {
    const uint32_t block = pieces[i].block;
    if (i == 0 || block != pieces[i - 1].block) {
      plan->work[block] = pieces[i].work;
      last = block;
    } else {
      plan->work[last].next = static_cast<uint32_t>(plan->work.size());
      last = plan->work[last].next;
      plan->work.push_back(pieces[i].work);
    }
  }
}

}  // namespace

DecodePlan plan_decode(std::span<const Request> requests, std::span<const PageClass> classes,
                       std::span<const uint16_t> heads, const PlanOptions& options) {
  KVM_ASSERT(options.blocks >= 1 && options.blocks <= kMaxMergeSlots);
  KVM_ASSERT(options.group >= 1 && options.group <= 16);
  KVM_ASSERT(options.least_tokens % kCutTokens == 0 && options.least_tokens > 0);
  const std::vector<Item> items = list_items(requests, classes, heads, options);
  DecodePlan plan;
  if (items.empty()) {
    return plan;
  }
  Filler filler(choose_load(items, options), options);
  std::vector<Piece> pieces;
  for (const Item& item : items) {
    const size_t first = pieces.size();
    filler.fill(item.whole.end, [&](uint32_t begin, uint32_t end, uint32_t block) {
      Piece piece{item.whole, block};
      piece.work.begin = begin;
      piece.work.end = end;
      pieces.push_back(piece);
    });
    const auto n_pieces = static_cast<uint32_t>(pieces.size() - first);
    if (n_pieces == 1) {
      continue;
    }
    KVM_ASSERT(n_pieces <= kMaxMergeSlots);
    plan.merges.push_back({item.whole.request.q_token, item.whole.request.n_query,
                           item.whole.kv_head, item.whole.row_first, plan.n_slots, n_pieces});
    plan.max_rows = std::max(plan.max_rows, item.rows);
    for (size_t i = first; i < pieces.size(); ++i) {
      pieces[i].work.slot = static_cast<int32_t>(plan.n_slots++);
    }
  }
  plan.n_blocks = filler.n_blocks();
  link_pieces(pieces, &plan);
  return plan;
}

uint64_t longest_block_tokens(const DecodePlan& plan, const PlanOptions& options) {
  uint64_t longest = 0;
  for (uint32_t block = 0; block < plan.n_blocks; ++block) {
    uint64_t tokens = 0;
    uint32_t i = block;
    do {
      tokens += plan.work[i].end - plan.work[i].begin + options.overhead_tokens;
      i = plan.work[i].next;
    } while (i != 0);
    longest = std::max(longest, tokens);
  }
  return longest;
}

}  // namespace kvm::attention::gpu
