// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/plan.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "attention/cuda/stretch.h"
#include "base/assert.h"
#include "base/round.h"

namespace kvm::attention::gpu {
namespace {

uint32_t row_blocks_of(const Request& request, const PlanOptions& options) {
  return static_cast<uint32_t>(
      div_up(uint64_t{request.n_query} * options.group, options.block_rows));
}

uint32_t items_of(const Request& request, std::span<const PageClass> classes,
                  const PlanOptions& options) {
  KVM_ASSERT(request.n_query >= 1 && request.n_tokens + 1 >= request.n_query);
  return classes[request.page_class].n_heads * row_blocks_of(request, options);
}

// What a block of rows reads: the first `n_tokens` tokens of `request`.
struct BlockSight {
  Request request;
  uint32_t n_tokens = 0;
};

// What rows see of a list that has `end` tokens, or up to max_unsure fewer: of whichever they see
// most of. Of lists that get longer, a row sees more until it has all sinks or its window is full;
// then as many, and fewer when the window leaves sinks behind.
Stretch widest_stretch(const Sight& sight, uint32_t n_before, uint32_t end, uint32_t max_unsure) {
  const uint64_t reach = std::min(sight.window, sight.n_recent);
  const uint64_t full = std::min<uint64_t>(sight.window, sight.n_sinks + reach);
  const auto fewer =
      static_cast<uint32_t>(n_before <= full ? 0 : std::min<uint64_t>(max_unsure, n_before - full));
  return stretch_of(sight, n_before - fewer, end - fewer);
}

// Of the rows of a block in the prefill kernel: what none of them sees is not among its tokens.
BlockSight seen_by(const Request& whole, const PlanOptions& options, uint32_t row_first) {
  KVM_ASSERT(whole.first == 0 && whole.n_first == whole.n_tokens && whole.tree_first == kNoTree);
  // Tokens up to the first row's own; 0 where the list is empty and it has none.
  const uint32_t n_before = whole.n_tokens - whole.n_query + row_first / options.group + 1;
  BlockSight seen{whole, 0};
  set_stretch(&seen.request,
              widest_stretch(options.sights[whole.page_class], n_before, whole.n_tokens,
                             options.max_unsure),
              0);
  const uint32_t behind =
      tokens_behind(row_first, whole.n_query, options.group, options.block_rows);
  seen.n_tokens = seen.request.n_tokens - std::min(seen.request.n_tokens, behind);
  return seen;
}

// Calls visit(seen, row_first, n_rows) for the blocks of rows of a request, until it says false.
template <class Visit>
void visit_row_blocks(const Request& request, const PlanOptions& options, Visit visit) {
  const uint32_t rows = request.n_query * options.group;
  for (uint32_t row = 0; row < rows; row += options.block_rows) {
    const uint32_t n = std::min(rows - row, options.block_rows);
    const bool goes_on = options.sights.empty()
                             ? visit(BlockSight{request, request.n_tokens}, row, n)
                             : visit(seen_by(request, options, row), row, n);
    if (!goes_on) {
      return;
    }
  }
}

// A Filler fills blocks one after the other, each up to `load` tokens.
class Filler {
 public:
  Filler(uint64_t load, const PlanOptions& options)
      : load_(static_cast<int64_t>(load)), options_(options), room_(load_) {}

  // Calls piece(begin, end, block) for the pieces of the first `n_tokens` tokens of an item, which
  // is cut every so many; 0: where blocks end.
  template <class Piece>
  void fill(uint32_t n_tokens, uint32_t piece_tokens, Piece piece) {
    uint32_t begin = 0;
    do {
      const uint32_t left = n_tokens - begin;
      const int64_t least = options_.overhead_tokens + std::min(left, least_piece());
      if (room_ < least && used_) {
        next_block();
      }
      const uint32_t take = std::min(left, piece_tokens != 0 ? piece_tokens : piece_for_room(left));
      piece(begin, begin + take, block_);
      used_ = true;
      room_ -= int64_t{take} + options_.overhead_tokens;
      begin += take;
    } while (begin < n_tokens);
  }
  // The same for n items, without saying where their pieces are.
  void fill_all(uint32_t n_tokens, uint32_t piece_tokens, uint32_t n) {
    const bool is_whole = piece_tokens == 0 || n_tokens <= piece_tokens;
    const int64_t costs = int64_t{n_tokens} + options_.overhead_tokens;
    while (n != 0) {
      // As many as fit whole, at once.
      if (is_whole && room_ >= costs) {
        // A division takes longer than all the rest.
        const int64_t fit = n == 1 ? 1 : std::min<int64_t>(n, room_ / costs);
        room_ -= fit * costs;
        used_ = true;
        n -= static_cast<uint32_t>(fit);
      }
      if (n != 0) {
        fill(n_tokens, piece_tokens, [](uint32_t, uint32_t, uint32_t) {});
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

// Items of the request are cut every so many tokens, or twice as many, and so on; 0 = where blocks
// end.
uint64_t fixed_tokens_of(const Request& request, const PlanOptions& options) {
  return uint64_t{options.fixed_tokens} *
         (options.sights.empty() ? 1 : row_blocks_of(request, options));
}

// The same of an item of so many tokens.
uint32_t fixed_piece_of(const Request& request, uint32_t n_tokens, const PlanOptions& options) {
  uint64_t piece = fixed_tokens_of(request, options);
  while (piece != 0 && div_up(n_tokens, piece) > kMaxMergeSlots) {
    piece *= 2;
  }
  return static_cast<uint32_t>(std::min<uint64_t>(piece, kMaxListTokens));
}

// A TailCut is what the tail has of items: pieces from the end of each, or a short one whole.
// Tokens that items give are owed as they come by, so that many short ones together give what a
// long one does. Of items that are cut every so many tokens these pieces go, and nothing is cut.
//
// Items of a request give alike, unless they are so many that the tail would be cut coarsely: the
// search for a load takes alike items at once.
class TailCut {
 public:
  struct Piece {
    uint32_t begin, end;
  };
  // Items that give something: the same pieces each, which follow those of the giver before, the
  // last one first.
  struct Giver {
    uint32_t first = 0;  // item, in the order of requests, their heads and blocks of rows
    uint32_t n = 0;
    uint32_t n_kept = 0;
    uint32_t pieces_first = 0;
    uint32_t n_pieces = 0;
  };

  TailCut(std::span<const Request> requests, std::span<const PageClass> classes,
          const PlanOptions& options)
      : options_(options) {
    uint64_t n_tokens = 0;
    for (const Request& request : requests) {
      n_tokens += uint64_t{request.n_tokens} * items_of(request, classes, options);
    }
    cuts_left_ = most_tail_cuts(n_tokens, options);
    if (cuts_left_ == 0) {
      return;
    }
    rest_ = n_tokens / options.tail_part;
    // So that not many more pieces are cut than there are blocks, times two (docs/adr/0038).
    least_ = static_cast<uint32_t>(std::max<uint64_t>(
        options.least_tail_tokens, round_up(rest_ / (6 * options.blocks), kCutTokens)));
    uint32_t item = 0;
    for (const Request& request : requests) {
      const uint32_t piece = fixed_piece_of(request, request.n_tokens, options);
      const uint32_t n = items_of(request, classes, options);
      const uint32_t alike = options.fixed_tokens == 0 && n <= options.blocks / kAlikePart ? n : 1;
      for (const uint32_t end = item + n; item < end; item += alike) {
        take_from({item, alike, request.n_tokens, 0, 0}, piece);
      }
    }
  }
  std::span<const Giver> givers() const { return givers_; }
  // Of an item of a giver.
  std::span<const Piece> pieces(const Giver& of) const {
    return std::span(pieces_).subspan(of.pieces_first, of.n_pieces);
  }
  uint32_t n_pieces() const { return n_pieces_; }  // of all items

 private:
  // Items of a request that are more than this part of the blocks give one by one: the debt of the
  // last request, which nobody pays, would be much of the tail (with a quarter, simulated launches
  // that just have a tail took .4 % longer). So do those of fixed pieces, whose debts are large.
  static constexpr uint32_t kAlikePart = 8;

  // from: which has given nothing yet.
  void take_from(Giver from, uint32_t piece_tokens) {
    const uint32_t n_tokens = from.n_kept;
    owed_ += uint64_t{n_tokens} * from.n;
    from.pieces_first = static_cast<uint32_t>(pieces_.size());
    while (from.n_kept != 0) {
      const uint32_t begin = next_cut(from, n_tokens, piece_tokens);
      const uint64_t n = uint64_t{from.n_kept - begin} * from.n;
      if (n == 0 || owed_ < n * options_.tail_part) {
        break;
      }
      pieces_.push_back({begin, from.n_kept});
      n_pieces_ += from.n;
      owed_ -= n * options_.tail_part;
      rest_ -= std::min(rest_, n);
      cuts_left_ -= piece_tokens == 0 && begin != 0 ? from.n : 0;
      from.n_kept = begin;
      ++from.n_pieces;
    }
    if (from.n_pieces != 0) {
      givers_.push_back(from);
    }
  }
  // Returns where the next piece begins, which ends at n_kept; n_kept where there is none.
  uint32_t next_cut(const Giver& from, uint32_t n_tokens, uint32_t piece_tokens) const {
    const uint32_t kept = from.n_kept;
    if (piece_tokens != 0) {
      const uint32_t begin = (kept - 1) / piece_tokens * piece_tokens;
      // The first piece of several is some block's own: the merge knows the item by it.
      return begin == 0 && kept != n_tokens ? kept : begin;
    }
    const uint32_t size = std::max(
        least_, static_cast<uint32_t>(std::min<uint64_t>(rest_ / options_.blocks, kMaxListTokens)));
    if (kept == n_tokens && kept < size + options_.least_tokens) {
      return 0;
    }
    // Blocks cut an item, too, as many of them as there are.
    if (cuts_left_ < from.n || from.n_pieces + options_.blocks >= kMaxMergeSlots || kept <= size) {
      return kept;
    }
    const uint32_t begin = (kept - size) / kCutTokens * kCutTokens;
    return begin < options_.least_tokens ? kept : begin;
  }

  const PlanOptions& options_;
  uint32_t cuts_left_ = 0;
  uint64_t rest_ = 0;  // tokens that the tail will have, those that it has left out
  uint32_t least_ = 0;
  uint64_t owed_ = 0;  // tokens of items, of which the tail gets 1 / tail_part
  uint32_t n_pieces_ = 0;
  std::vector<Piece> pieces_;
  std::vector<Giver> givers_;
};

// What blocks are given of `n` items that follow each other: of each the first n_tokens, which are
// cut every piece_tokens (0: where blocks end).
struct Alike {
  uint32_t n_tokens, piece_tokens, n;
};

// Of all items, in order. The search for a load goes through them many times.
std::vector<Alike> items_of_blocks(std::span<const Request> requests,
                                   std::span<const PageClass> classes, const PlanOptions& options,
                                   const TailCut& tail) {
  std::vector<Alike> items;
  items.reserve(2 * (requests.size() + tail.givers().size()));
  const auto add = [&items](uint32_t n_tokens, uint32_t piece_tokens, uint32_t n) {
    if (!items.empty() && items.back().n_tokens == n_tokens &&
        items.back().piece_tokens == piece_tokens) {
      items.back().n += n;
    } else if (n != 0) {
      items.push_back({n_tokens, piece_tokens, n});
    }
  };
  auto giver = tail.givers().begin();
  uint32_t item = 0;
  for (const Request& request : requests) {
    if (!options.sights.empty()) {
      for (uint32_t head = 0; head < classes[request.page_class].n_heads; ++head) {
        visit_row_blocks(request, options, [&](const BlockSight& seen, uint32_t, uint32_t) {
          add(seen.n_tokens, fixed_piece_of(request, seen.n_tokens, options), 1);
          return true;
        });
      }
      continue;
    }
    const uint32_t piece = fixed_piece_of(request, request.n_tokens, options);
    const uint32_t end = item + items_of(request, classes, options);
    for (; giver != tail.givers().end() && giver->first < end; ++giver) {
      add(request.n_tokens, piece, giver->first - item);
      add(giver->n_kept, piece, giver->n_kept != 0 ? giver->n : 0);
      item = giver->first + giver->n;
    }
    add(request.n_tokens, piece, end - item);
    item = end;
  }
  return items;
}

// Of all that blocks are given, overheads included.
uint64_t total_tokens(std::span<const Alike> items, const PlanOptions& options) {
  uint64_t total = 0;
  for (const Alike& of : items) {
    // Fixed pieces count their overhead each.
    const uint64_t pieces = of.piece_tokens == 0 ? 1 : div_up(of.n_tokens, of.piece_tokens) + 1;
    total += (of.n_tokens + pieces * options.overhead_tokens) * of.n;
  }
  return total;
}

// How much each block gets, and how many blocks that makes.
struct Load {
  uint64_t tokens = 0;
  uint32_t n_blocks = 0;
};

// About the least load for which the blocks suffice.
Load choose_load(std::span<const Alike> items, const PlanOptions& options) {
  const auto blocks_for = [&](uint64_t tokens) {
    Filler filler(tokens, options);
    for (const Alike& of : items) {
      filler.fill_all(of.n_tokens, of.piece_tokens, of.n);
      if (filler.n_blocks() > options.blocks) {
        break;
      }
    }
    return filler.n_blocks();
  };
  const uint64_t total = total_tokens(items, options);
  // Cuts add overheads, so the least load is not below the even share. What they and pieces that
  // are not cut add is mostly less than the first margin.
  uint64_t too_little = total / options.blocks;
  // Loads that differ by less are the same: cuts are coarser, and a 2,000th of the time is nothing.
  const uint64_t step = std::max<uint64_t>(kCutTokens / 4, too_little / 2048);
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
  while (too_little + step < enough.tokens) {
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

  // Returns the place, which `work` may not have; it counts all the same.
  uint32_t add(const Work& piece, uint32_t block) {
    const bool begins = block != block_;
    const uint32_t at = begins ? block : n_++;
    if (!begins && last_ < work_.size()) {
      work_[last_].next = at;
    }
    block_ = block;
    last_ = at;
    if (at < work_.size()) {
      work_[at] = piece;
    }
    return at;
  }
  uint32_t n() const { return n_; }

 private:
  const std::span<Work> work_;
  uint32_t n_;
  uint32_t block_ = UINT32_MAX;
  uint32_t last_ = 0;
};

Work work_of(const BlockSight& seen, const PageClass& of, std::span<const uint16_t> heads,
             uint32_t head, uint32_t row) {
  Work work;
  work.request = seen.request;
  work.head = static_cast<uint16_t>(head);
  work.kv_head = heads[of.heads_first + head];
  work.row_first = row;
  work.end = seen.n_tokens;
  return work;
}

// A Whole gives items to blocks whole: the longest one first, to the block that has least.
class Whole {
 public:
  Whole(std::span<const Request> requests, std::span<const PageClass> classes,
        const PlanOptions& options)
      : options_(options) {
    for (const Request& request : requests) {
      visit_row_blocks(request, options, [&](const BlockSight& seen, uint32_t row, uint32_t) {
        kinds_.push_back({seen, row});
        return true;
      });
    }
    std::stable_sort(kinds_.begin(), kinds_.end(), [](const Kind& a, const Kind& b) {
      return a.seen.n_tokens > b.seen.n_tokens;
    });
    using Loaded = std::pair<uint64_t, uint32_t>;  // tokens, block
    std::priority_queue<Loaded, std::vector<Loaded>, std::greater<>> least;
    for (uint32_t block = 0; block < options.blocks; ++block) {
      least.emplace(0, block);
    }
    for (uint32_t kind = 0; kind < kinds_.size(); ++kind) {
      const BlockSight& seen = kinds_[kind].seen;
      const uint64_t tokens = uint64_t{seen.n_tokens} + options.overhead_tokens;
      for (uint32_t head = 0; head < classes[seen.request.page_class].n_heads; ++head) {
        const auto [had, block] = least.top();
        least.pop();
        least.emplace(had + tokens, block);
        items_.push_back({kind, head, block});
        total_ += tokens;
        longest_ = std::max(longest_, had + tokens);
      }
    }
    n_blocks_ = static_cast<uint32_t>(std::min<uint64_t>(options.blocks, items_.size()));
    std::stable_sort(items_.begin(), items_.end(),
                     [](const Item& a, const Item& b) { return a.block < b.block; });
  }

  // Says whether cutting items would gain little: an eighth, or what no cut could be made of.
  bool is_even() const {
    const uint64_t even = total_ / options_.blocks;
    return longest_ <= std::max<uint64_t>(even + even / 8, 2 * uint64_t{options_.least_tokens} +
                                                               options_.overhead_tokens);
  }
  uint32_t n_blocks() const { return n_blocks_; }
  void write(std::span<const PageClass> classes, std::span<const uint16_t> heads,
             Writer* writer) const {
    for (const Item& item : items_) {
      const Kind& kind = kinds_[item.kind];
      const PageClass& of = classes[kind.seen.request.page_class];
      writer->add(work_of(kind.seen, of, heads, item.head, kind.row), item.block);
    }
  }

 private:
  // What items of all heads of a class have in common.
  struct Kind {
    BlockSight seen;
    uint32_t row;
  };
  struct Item {
    uint32_t kind, head, block;
  };

  const PlanOptions& options_;
  std::vector<Kind> kinds_;
  std::vector<Item> items_;
  uint64_t total_ = 0, longest_ = 0;  // tokens, overheads included: of all blocks, and of one
  uint32_t n_blocks_ = 0;
};

}  // namespace

void add_requests(const Request& request, uint32_t n_tokens, const Sight& sight,
                  uint32_t max_unsure, std::vector<Request>* to) {
  const uint32_t tree_list = n_tokens - request.n_query;
  if (n_tokens <= std::min(sight.window, sight.n_recent)) {
    set_stretch(&to->emplace_back(request), {0, n_tokens, 0, n_tokens}, tree_list);
    return;
  }
  for (uint32_t row = 0; row < request.n_query; ++row) {
    const uint32_t n_before = tree_list + row + 1;
    const uint32_t end = request.tree_first == kNoTree ? n_before : n_tokens;
    Request& of_row = to->emplace_back(request);
    of_row.q_token = request.q_token + row;
    of_row.n_query = 1;
    set_stretch(&of_row, widest_stretch(sight, n_before, end, max_unsure), tree_list);
  }
}

uint32_t most_tail_cuts(uint64_t n_tokens, const PlanOptions& options) {
  return options.tail_part == 0 || !options.sights.empty() ||
                 n_tokens < uint64_t{options.tail_load_tokens} * options.blocks
             ? 0
             : kTailCuts * options.blocks;
}

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
  if (!options.sights.empty() && options.fixed_tokens == 0) {
    const Whole whole(requests, classes, options);
    if (whole.is_even()) {
      KVM_ASSERT(n_first == 0 || n_first >= whole.n_blocks());
      counts.n_blocks = whole.n_blocks();
      Writer writer(n_first == 0 ? counts.n_blocks : n_first, work);
      whole.write(classes, heads, &writer);
      counts.n_work = writer.n();
      return counts;
    }
  }
  const TailCut tail(requests, classes, options);
  const Load load = choose_load(items_of_blocks(requests, classes, options, tail), options);
  counts.n_blocks = load.n_blocks;
  KVM_ASSERT(n_first == 0 || n_first >= load.n_blocks);
  Filler filler(load.tokens, options);
  Writer writer(n_first == 0 ? load.n_blocks : n_first, work);
  std::vector<Work> of_tail;
  of_tail.reserve(tail.n_pieces());
  uint32_t item = 0;
  auto giver = tail.givers().begin();
  const auto add_item = [&](Work whole, uint32_t n_tokens, uint32_t piece_tokens, uint32_t rows) {
    uint32_t n_kept = n_tokens;
    std::span<const TailCut::Piece> given;  // from the end
    if (giver != tail.givers().end() && giver->first <= item) {
      n_kept = giver->n_kept;
      given = tail.pieces(*giver);
      giver += item + 1 == giver->first + giver->n ? 1 : 0;
    }
    ++item;
    const auto n_given = static_cast<uint32_t>(given.size());
    uint32_t first = 0, n_pieces = 0;
    if (n_kept != 0 || n_given == 0) {
      filler.fill(n_kept, piece_tokens, [&](uint32_t begin, uint32_t end, uint32_t block) {
        whole.begin = begin;
        whole.end = end;
        whole.slot = n_pieces == 0 ? -1 : static_cast<int32_t>(counts.n_slots + n_pieces);
        const uint32_t piece = writer.add(whole, block);
        first = n_pieces++ == 0 ? piece : first;
      });
    }
    n_pieces += n_given;
    // Slots are in the order of tokens, and the tail has them from the end.
    for (uint32_t i = 0; i < n_given; ++i) {
      whole.begin = given[i].begin;
      whole.end = given[i].end;
      whole.slot = n_pieces == 1 ? -1 : static_cast<int32_t>(counts.n_slots + n_pieces - 1 - i);
      of_tail.push_back(whole);
    }
    if (n_pieces == 1) {
      return;
    }
    KVM_ASSERT(n_pieces <= kMaxMergeSlots && n_given < n_pieces);
    if (first < work.size()) {
      work[first].slot = static_cast<int32_t>(counts.n_slots);
    }
    merges->push_back({whole.request.q_token, whole.request.n_query, whole.kv_head, whole.row_first,
                       counts.n_slots, n_pieces, first});
    counts.max_rows = std::max(counts.max_rows, rows);
    counts.n_slots += n_pieces;
  };
  for (const Request& request : requests) {
    const PageClass& of = classes[request.page_class];
    for (uint32_t head = 0; head < of.n_heads; ++head) {
      // Blocks of rows of one item stand side by side: the second reads K and V from the cache.
      visit_row_blocks(request, options, [&](const BlockSight& seen, uint32_t row, uint32_t n) {
        add_item(work_of(seen, of, heads, head, row), seen.n_tokens,
                 fixed_piece_of(request, seen.n_tokens, options), n);
        return true;
      });
    }
  }
  KVM_ASSERT(filler.n_blocks() == load.n_blocks);
  // Longest first: what is taken last is short. Pieces that are cut come so, items that go whole
  // and fixed pieces need not.
  std::stable_sort(of_tail.begin(), of_tail.end(),
                   [](const Work& a, const Work& b) { return a.end - a.begin > b.end - b.begin; });
  counts.n_tail = static_cast<uint32_t>(of_tail.size());
  counts.n_work = writer.n() + counts.n_tail;
  if (writer.n() < work.size()) {
    std::copy_n(of_tail.begin(), std::min<size_t>(of_tail.size(), work.size() - writer.n()),
                work.begin() + writer.n());
  }
  return counts;
}

DecodePlan plan_decode(std::span<const Request> requests, std::span<const PageClass> classes,
                       std::span<const uint16_t> heads, const PlanOptions& options) {
  // Every cut is the end of a block, or the tail's, or as far from the last one as fixed_tokens
  // says.
  uint64_t most = options.blocks, n_tokens = 0;
  for (const Request& request : requests) {
    const uint64_t fixed = fixed_tokens_of(request, options);
    const uint64_t cuts = fixed == 0 ? 0 : request.n_tokens / fixed;
    const uint32_t n_items = items_of(request, classes, options);
    most += (cuts + 1) * n_items;
    n_tokens += uint64_t{request.n_tokens} * n_items;
  }
  most += most_tail_cuts(n_tokens, options);
  DecodePlan plan;
  plan.work.resize(most);
  const PlanCounts counts =
      plan_decode(requests, classes, heads, options, 0, plan.work, &plan.merges);
  KVM_ASSERT(counts.n_work <= most);
  plan.work.resize(counts.n_work);
  plan.n_blocks = counts.n_blocks;
  plan.n_tail = counts.n_tail;
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
