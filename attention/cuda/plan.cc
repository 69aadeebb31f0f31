// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/plan.h"

#include <algorithm>

#include "base/assert.h"
#include "base/round.h"

namespace kvm::attention::gpu {
namespace {

// Items of one request and one page class are of one length.
uint32_t items_of(const Request& request, std::span<const PageClass> classes,
                  const PlanOptions& options) {
  KVM_ASSERT(request.n_query >= 1 && request.n_tokens + 1 >= request.n_query);
  const auto row_blocks =
      static_cast<uint32_t>(div_up(uint64_t{request.n_query} * options.group, options.block_rows));
  return classes[request.page_class].n_heads * row_blocks;
}

// A Filler fills blocks one after the other, each up to `load` tokens.
class Filler {
 public:
  Filler(uint64_t load, const PlanOptions& options)
      : load_(static_cast<int64_t>(load)), options_(options), room_(load_) {}

  // Calls piece(begin, end, block) for the pieces of an item of `n_tokens` tokens.
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
  // The same for n items, without saying where their pieces are.
  void fill_all(uint32_t n_tokens, uint32_t n) {
    const bool is_whole = options_.fixed_tokens == 0 || n_tokens <= fixed_piece(n_tokens);
    const int64_t costs = int64_t{n_tokens} + options_.overhead_tokens;
    while (n != 0) {
      // As many as fit whole, at once.
      if (is_whole && room_ >= costs) {
        const int64_t fit = std::min<int64_t>(n, room_ / costs);
        room_ -= fit * costs;
        used_ = true;
        n -= static_cast<uint32_t>(fit);
      }
      if (n != 0) {
        fill(n_tokens, [](uint32_t, uint32_t, uint32_t) {});
        --n;
      }
    }
  }
  uint32_t n_blocks() const { return block_ + 1; }

 private:
  void next_block() {
    ++block_;
    room_ = load_;
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

  const int64_t load_;
  const PlanOptions& options_;
  int64_t room_;
  uint32_t block_ = 0;
  bool used_ = false;  // the current block has work
};

// How much each block gets, and how many blocks that makes.
struct Load {
  uint64_t tokens = 0;
  uint32_t n_blocks = 0;
};

// About the least load for which the blocks suffice.
Load choose_load(std::span<const Request> requests, std::span<const PageClass> classes,
                 const PlanOptions& options) {
  // Loads that differ by less are the same: cuts are coarser.
  constexpr uint64_t kStep = kCutTokens / 4;
  const auto blocks_for = [&](uint64_t tokens) {
    Filler filler(tokens, options);
    for (const Request& request : requests) {
      filler.fill_all(request.n_tokens, items_of(request, classes, options));
      if (filler.n_blocks() > options.blocks) {
        break;
      }
    }
    return filler.n_blocks();
  };
  uint64_t total = 0;
  for (const Request& request : requests) {
    // Fixed pieces count their overhead each.
    const uint64_t pieces = options.fixed_tokens == 0
                                ? 1
                                : div_up(request.n_tokens, uint64_t{options.fixed_tokens}) + 1;
    total +=
        (request.n_tokens + pieces * options.overhead_tokens) * items_of(request, classes, options);
  }
  // Cuts add overheads, so the least load is not below the even share. What they and pieces that
  // are not cut add is mostly less than the first margin.
  uint64_t too_little = total / options.blocks;
  too_little = too_little == 0 ? 0 : too_little - 1;
  uint64_t margin = options.overhead_tokens + options.least_tokens + kCutTokens;
  Load enough{too_little + margin, 0};
  enough.n_blocks = blocks_for(enough.tokens);
  while (enough.n_blocks > options.blocks) {
    too_little = enough.tokens;
    margin *= 2;
    enough.tokens += margin;
    enough.n_blocks = blocks_for(enough.tokens);
  }
  while (too_little + kStep < enough.tokens) {
    const uint64_t middle = too_little + (enough.tokens - too_little) / 2;
    const uint32_t n_blocks = blocks_for(middle);
    if (n_blocks <= options.blocks) {
      enough = {middle, n_blocks};
    } else {
      too_little = middle;
    }
  }
  return enough;
}

// A Writer writes pieces, which come in order of blocks: the first ones of all blocks to the front,
// the others behind them, linked.
class Writer {
 public:
  Writer(uint32_t n_first, std::span<Work> work) : work_(work), n_(n_first) {}

  // Returns the place, or null where there is none left; it counts all the same.
  Work* add(const Work& piece, uint32_t block) {
    const bool begins = block != block_;
    const uint32_t at = begins ? block : n_++;
    if (!begins && last_ < work_.size()) {
      work_[last_].next = at;
    }
    block_ = block;
    last_ = at;
    if (at >= work_.size()) {
      return nullptr;
    }
    work_[at] = piece;
    return &work_[at];
  }
  uint32_t n() const { return n_; }

 private:
  const std::span<Work> work_;
  uint32_t n_;
  uint32_t block_ = UINT32_MAX;
  uint32_t last_ = 0;
};

}  // namespace

PlanCounts plan_decode(std::span<const Request> requests, std::span<const PageClass> classes,
                       std::span<const uint16_t> heads, const PlanOptions& options,
                       uint32_t n_first, std::span<Work> work, std::vector<Merge>* merges) {
  KVM_ASSERT(options.blocks >= 1 && options.blocks <= kMaxMergeSlots);
  KVM_ASSERT(options.group >= 1 && options.group <= kMaxMlaGroup);
  KVM_ASSERT(options.least_tokens % kCutTokens == 0 && options.least_tokens > 0);
  PlanCounts counts;
  merges->clear();
  if (std::none_of(requests.begin(), requests.end(), [&](const Request& request) {
        return items_of(request, classes, options) != 0;
      })) {
    counts.n_work = n_first;
    return counts;
  }
  const Load load = choose_load(requests, classes, options);
  counts.n_blocks = load.n_blocks;
  KVM_ASSERT(n_first == 0 || n_first >= load.n_blocks);
  Filler filler(load.tokens, options);
  Writer writer(n_first == 0 ? load.n_blocks : n_first, work);
  const auto add_item = [&](Work whole, uint32_t rows) {
    Work* first = nullptr;
    uint32_t n_pieces = 0;
    filler.fill(whole.request.n_tokens, [&](uint32_t begin, uint32_t end, uint32_t block) {
      whole.begin = begin;
      whole.end = end;
      whole.slot = n_pieces == 0 ? -1 : static_cast<int32_t>(counts.n_slots + n_pieces);
      Work* const piece = writer.add(whole, block);
      first = n_pieces++ == 0 ? piece : first;
    });
    if (n_pieces == 1) {
      return;
    }
    KVM_ASSERT(n_pieces <= kMaxMergeSlots);
    if (first != nullptr) {
      first->slot = static_cast<int32_t>(counts.n_slots);
    }
    merges->push_back({whole.request.q_token, whole.request.n_query, whole.kv_head, whole.row_first,
                       counts.n_slots, n_pieces});
    counts.max_rows = std::max(counts.max_rows, rows);
    counts.n_slots += n_pieces;
  };
  for (const Request& request : requests) {
    const PageClass& of = classes[request.page_class];
    const uint32_t rows = request.n_query * options.group;
    for (uint32_t head = 0; head < of.n_heads; ++head) {
      // Blocks of rows of one item stand side by side: the second reads K and V from the cache.
      for (uint32_t row = 0; row < rows; row += options.block_rows) {
        Work whole;
        whole.request = request;
        whole.head = static_cast<uint16_t>(head);
        whole.kv_head = heads[of.heads_first + head];
        whole.row_first = row;
        add_item(whole, std::min(rows - row, options.block_rows));
      }
    }
  }
  KVM_ASSERT(filler.n_blocks() == load.n_blocks);
  counts.n_work = writer.n();
  return counts;
}

DecodePlan plan_decode(std::span<const Request> requests, std::span<const PageClass> classes,
                       std::span<const uint16_t> heads, const PlanOptions& options) {
  // Every cut is the end of a block, or as far from the last one as fixed_tokens says.
  uint64_t most = options.blocks;
  for (const Request& request : requests) {
    const uint64_t cuts = options.fixed_tokens == 0 ? 0 : request.n_tokens / options.fixed_tokens;
    most += (cuts + 1) * items_of(request, classes, options);
  }
  DecodePlan plan;
  plan.work.resize(most);
  const PlanCounts counts =
      plan_decode(requests, classes, heads, options, 0, plan.work, &plan.merges);
  KVM_ASSERT(counts.n_work <= most);
  plan.work.resize(counts.n_work);
  plan.n_blocks = counts.n_blocks;
  plan.n_slots = counts.n_slots;
  plan.max_rows = counts.max_rows;
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
