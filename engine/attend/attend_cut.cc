// SPDX-License-Identifier: Apache-2.0
#include "engine/attend/attend_cut.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "base/round.h"

namespace kvm::engine {
namespace {

// Below this a task costs more to hand over than it gains.
constexpr uint64_t kMinTaskCost = 256 << 10;
// Some 0.1 ms, and a quarter of that where there are other clients: their tasks, and the
// dispatcher's next look at what they ask, wait as long.
constexpr uint64_t kMaxTaskCost = 2 << 20;
constexpr uint64_t kMaxSharedTaskCost = 512 << 10;
// Tasks per thread: a straggler costs at most one of them, but each begins with lines that nobody
// has prefetched. 32 took 5 % longer on two threads.
constexpr uint64_t kTasksPerThread = 16;
// States of cut units; where more would be needed the cut is made coarser.
constexpr uint64_t kMaxSharedBytes = 256 << 20;
// Rows of a blocked problem that one task takes through a chunk: enough to make up for repacking
// the keys, and few enough for their accumulators to stay in the cache.
constexpr uint32_t kRowBlock = 768;
constexpr uint32_t kRowUnit = 64;
// All states of a unit that one thread evaluates.
constexpr uint64_t kMaxUnitStateBytes = 32 << 20;
// Preparing an approximate problem (its exact part, a scan of some blocks) takes about this part of
// all of it.
constexpr uint64_t kPrepareShare = 8;

using Head = AttendPlan::Head;
using Sums = AttendPlan::Sums;
using Unit = AttendPlan::Unit;

// Bytes of shared memory that are handed out one after the other.
class Layout {
 public:
  MemoryAt take(size_t size_bytes) {
    const MemoryAt at = {size_bytes_};
    size_bytes_ += round_up(size_bytes, attention::kBufferAlign);
    return at;
  }
  size_t size_bytes() const { return size_bytes_; }

 private:
  size_t size_bytes_ = 0;
};

// States of chunks that come window by window: a window that begins finds those of all chunks
// merged, as far as they can be, that are StreamShape::kMaxSlots before it. Returns how many places
// are needed, which is that plus one for each level of the tree, or a few more.
uint32_t add_state_slots(const attention::Plan& cut, std::vector<uint16_t>* slots) {
  const attention::MergeTree tree(cut);
  const auto merged_at = [&](uint32_t chunk) {
    attention::MergeTree::Node node = tree.leaf(chunk);
    while (const auto merge = tree.next(&node)) {
      if (merge->from == chunk) {
        return tree.states_end(node);
      }
    }
    return UINT32_MAX;  // the first, into which all others go
  };
  struct Held {
    uint32_t free_at;  // the first chunk that may have the slot
    uint16_t slot;
  };
  const auto is_later = [](const Held& a, const Held& b) { return a.free_at > b.free_at; };
  std::vector<Held> held;  // a heap
  uint32_t n_slots = 0;
  for (uint32_t chunk = 0; chunk < cut.n_chunks; ++chunk) {
    auto slot = static_cast<uint16_t>(n_slots);
    if (!held.empty() && held.front().free_at <= chunk) {
      slot = held.front().slot;
      std::ranges::pop_heap(held, is_later);
      held.pop_back();
    } else {
      ++n_slots;
    }
    slots->push_back(slot);
    const uint32_t end = merged_at(chunk);
    if (end != UINT32_MAX) {
      held.push_back({end - 1 + StreamShape::kMaxSlots, slot});
      std::ranges::push_heap(held, is_later);
    }
  }
  return n_slots;
}

void place_states(AttendPlan* plan) {
  const Head* last = nullptr;
  for (Head& head : plan->heads) {
    const attention::Plan& cut = head.plan;
    head.n_states = cut.n_chunks;
    head.state_slots = {};
    if (head.away == AttendPlan::kNoAway) {
      continue;
    }
    if (last != nullptr && last->view == head.view) {  // and so the same chunks
      head.state_slots = last->state_slots;
      head.n_states = last->n_states;
    } else {
      head.state_slots = {plan->state_slots.size(), cut.n_chunks};
      head.n_states = add_state_slots(cut, &plan->state_slots);
    }
    last = &head;
  }
}

void add_row_blocks(uint32_t index, AttendPlan* plan) {
  const Head& head = plan->heads[index];
  const uint32_t rows = head.plan.rows;
  uint32_t block = rows;
  if (head.plan.rows_divisible) {
    const uint64_t bytes =
        attention::state_bytes(head.problem, kRowUnit) * std::max(1u, head.n_states);
    const uint64_t fitting = std::max<uint64_t>(1, kMaxUnitStateBytes / bytes) * kRowUnit;
    const uint32_t most = static_cast<uint32_t>(std::min<uint64_t>(kRowBlock, fitting));
    block = static_cast<uint32_t>(round_up(div_up(rows, div_up(rows, most)), kRowUnit));
  }
  KVM_ASSERT(block != 0);
  for (uint32_t first = 0; first < rows; first += block) {
    const uint32_t count = std::min(block, rows - first);
    Unit unit;
    unit.head = index;
    unit.rows = {first, count};
    unit.cost = head.cost * count / rows;
    plan->units.push_back(unit);
  }
}

// Heads of a view become gangs, as large as a chunk of one still is a task of its own.
void add_units(uint64_t gang_cost, AttendPlan* plan) {
  const std::vector<Head>& heads = plan->heads;
  for (uint32_t i = 0; i < heads.size();) {
    const Head& head = heads[i];
    if (head.plan.blocked) {
      add_row_blocks(i++, plan);
      continue;
    }
    const uint64_t chunk_cost = head.cost / std::max(1u, head.plan.n_chunks);
    const uint64_t most =
        std::clamp<uint64_t>(gang_cost / std::max<uint64_t>(1, chunk_cost), 1, attention::kMaxGang);
    Unit unit;
    unit.head = i;
    unit.n_heads = 0;
    unit.rows = {0, head.plan.rows};
    while (i < heads.size() && heads[i].view == head.view && unit.n_heads < most) {
      // The states of a gang lie n_chunks apart, and its prepared queries prepared_bytes.
      KVM_ASSERT(heads[i].plan.n_chunks == head.plan.n_chunks &&
                 heads[i].plan.first_chunk == head.plan.first_chunk &&
                 heads[i].plan.prepared_bytes == head.plan.prepared_bytes);
      unit.cost += heads[i].cost;
      ++unit.n_heads;
      ++i;
    }
    plan->units.push_back(unit);
  }
}

void lay_out_sums(AttendPlan* plan, Layout* layout) {
  for (Sums& part : plan->sums) {
    const Head& head = plan->heads[part.head];
    part.sums_at = layout->take(part.n_positions * sizeof(float));
    if (head.problem.lse == nullptr) {
      part.lse_at = layout->take(head.plan.rows * sizeof(float));
    }
    part.n_units = 0;
  }
  for (const Unit& unit : plan->units) {
    const Head& head = plan->heads[unit.head];
    // Only the first head of a unit counts its units and gets sums.
    KVM_ASSERT(unit.n_heads == 1 || head.sums == AttendPlan::kNoSums);
    if (head.sums != AttendPlan::kNoSums) {
      plan->sums[head.sums].n_units += 1;
    }
  }
}

// Whether the pages of a unit come window by window.
bool is_away(const AttendPlan& plan, const Unit& unit) {
  return plan.heads[unit.head].away != AttendPlan::kNoAway;
}

// Decides into how many pieces each unit is cut and where its states and queries lie.
void lay_out(uint64_t task_cost, AttendPlan* plan) {
  Layout layout;
  plan->prepare.clear();
  plan->prepare_bytes = 0;
  for (AttendPlan::ApproxHead& head : plan->approx) {
    head.prepared_at = layout.take(head.plan.prepared_bytes);
    head.states_at = layout.take(head.plan.n_shards * head.plan.state_bytes);
    plan->prepare_bytes += head.plan.cost_bytes / kPrepareShare;
  }
  std::vector<Unit>& units = plan->units;
  for (uint32_t i = 0; i < units.size(); ++i) {
    Unit& unit = units[i];
    const uint32_t n_chunks = std::max(1u, plan->heads[unit.head].plan.n_chunks);
    const bool first_of_head = i == 0 || units[i - 1].head != unit.head;
    const bool only_of_head =
        first_of_head && (i + 1 == units.size() || units[i + 1].head != unit.head);
    unit.n_pieces = static_cast<uint32_t>(
        std::min<uint64_t>(n_chunks, (unit.cost + task_cost - 1) / task_cost));
    unit.n_pieces = is_away(*plan, unit) ? AttendPlan::kInWindows : std::max(1u, unit.n_pieces);
    for (uint32_t h = unit.head; first_of_head && h < unit.head + unit.n_heads; ++h) {
      Head& head = plan->heads[h];
      const bool is_summed_later =
          head.sums != AttendPlan::kNoSums && plan->sums[head.sums].is_later;
      head.prepared_at = {};
      if (!only_of_head || unit.n_pieces != 1 || is_summed_later) {
        head.prepared_at = layout.take(head.plan.prepared_bytes);
        plan->prepare.push_back(h);
        plan->prepare_bytes += head.plan.prepared_bytes;
      }
    }
    unit.states_at = unit.n_pieces != 1 ? layout.take(plan->unit_state_bytes(unit)) : MemoryAt{};
  }
  lay_out_sums(plan, &layout);
  plan->shared_bytes = layout.size_bytes();
}

// Lays out tasks of about wanted_cost, or of more where their states would take too much memory.
// Returns the cost of a task.
uint64_t choose_task_cost(uint64_t wanted_cost, AttendPlan* plan) {
  uint64_t task_cost = wanted_cost;
  lay_out(task_cost, plan);
  while (plan->shared_bytes > kMaxSharedBytes && task_cost < plan->cost) {
    task_cost *= 2;
    lay_out(task_cost, plan);
  }
  return task_cost;
}

void number_counters(AttendPlan* plan) {
  size_t n = 0;
  for (Unit& unit : plan->units) {
    if (unit.n_pieces != 1) {
      unit.n_complete = {n};
      n += plan->heads[unit.head].plan.n_chunks;
    }
  }
  for (AttendPlan::ApproxHead& head : plan->approx) {
    head.n_evaluated = {n++};
  }
  for (AttendPlan::DrawnWindow& window : plan->drawn_windows) {
    window.n_found = {n++};
  }
  for (Sums& part : plan->sums) {
    part.n_evaluated = {n++};
  }
  plan->n_counters = n;
}

void add_tasks(uint64_t task_cost, AttendPlan* plan) {
  std::vector<AttendPlan::Task>& tasks = plan->tasks;
  for (uint32_t i = 0; i < plan->approx.size(); ++i) {
    for (uint32_t shard = 0; shard < plan->approx[i].plan.n_shards; ++shard) {
      tasks.push_back({.unit = i, .first_chunk = shard, .is_approx = true});
    }
  }
  uint64_t gathered = 0;  // cost of the last task, if more whole units may join it
  bool may_join = false;
  for (uint32_t i = 0; i < plan->units.size(); ++i) {
    const Unit& unit = plan->units[i];
    if (unit.n_pieces == AttendPlan::kInWindows) {
      may_join = false;
      continue;
    }
    if (unit.n_pieces == 1) {
      if (!may_join || gathered + unit.cost > task_cost) {
        tasks.push_back({.unit = i});
        gathered = 0;
      }
      ++tasks.back().n_units;
      gathered += unit.cost;
      may_join = true;
      continue;
    }
    may_join = false;
    const uint64_t n_chunks = plan->heads[unit.head].plan.n_chunks;
    for (uint64_t piece = 0; piece < unit.n_pieces; ++piece) {
      const auto begin = static_cast<uint32_t>(n_chunks * piece / unit.n_pieces);
      const auto end = static_cast<uint32_t>(n_chunks * (piece + 1) / unit.n_pieces);
      tasks.push_back({.unit = i, .n_units = 0, .first_chunk = begin, .n_chunks = end - begin});
    }
  }
}

// The windows of an Away, whose units are [first, end), by position: of each chunk the tasks of all
// units that have it.
void add_windows(uint32_t index, uint32_t first, uint32_t end, AttendPlan* plan) {
  std::vector<uint32_t> next(end - first);  // chunk of each unit
  const auto chunk_of = [&](uint32_t unit) {
    const Head& head = plan->heads[plan->units[unit].head];
    const uint32_t at = next[unit - first];
    return head.away == index && at < head.plan.n_chunks
               ? head.plan.absolute(head.plan.first_chunk + at)
               : UINT64_MAX;
  };
  for (;;) {
    uint64_t chunk = UINT64_MAX;
    for (uint32_t u = first; u < end; ++u) {
      chunk = std::min(chunk, chunk_of(u));
    }
    if (chunk == UINT64_MAX) {
      return;
    }
    const auto window = static_cast<uint32_t>(plan->windows.size());
    for (uint32_t u = first; u < end; ++u) {
      if (chunk_of(u) == chunk) {
        plan->tasks.push_back({.unit = u,
                               .n_units = 0,
                               .first_chunk = next[u - first]++,
                               .n_chunks = 1,
                               .window = window});
      }
    }
    const uint32_t chunk_tokens = plan->heads[plan->units[first].head].plan.chunk_tokens;
    const Part<AwayPage> pages = plan->pages_of(index, chunk, chunk + 1, chunk_tokens);
    plan->windows.push_back(
        {.away = index, .pages = pages, .tasks_end = static_cast<uint32_t>(plan->tasks.size())});
    uint64_t size_bytes = 0;
    for (const AwayPage& page : pages.in(std::as_const(plan->away_pages))) {
      size_bytes += page.size_bytes;
    }
    plan->stream_shape.add_window(static_cast<uint32_t>(pages.n), size_bytes);
  }
}

void add_all_windows(AttendPlan* plan) {
  plan->n_tasks_there = static_cast<uint32_t>(plan->tasks.size());
  plan->stream_shape = {};
  const auto away_of = [plan](uint32_t unit) { return plan->heads[plan->units[unit].head].away; };
  const auto n_units = static_cast<uint32_t>(plan->units.size());
  for (uint32_t i = 0; i < n_units;) {
    const uint32_t first = i;
    const uint32_t away = away_of(first);
    uint32_t end = ++i;
    // Units of which everything is there may lie between.
    for (; away != AttendPlan::kNoAway && i < n_units &&
           (away_of(i) == away || away_of(i) == AttendPlan::kNoAway);
         ++i) {
      end = away_of(i) == away ? i + 1 : end;
    }
    if (away != AttendPlan::kNoAway) {
      add_windows(away, first, end, plan);
    }
    i = end;
  }
}

// The windows of an Away of which heads [first, end) of the plan's approximate ones are drawn: of
// each shard of positions the tasks of all heads that have it.
void add_drawn_windows(uint32_t away, uint32_t first, uint32_t end, AttendPlan* plan) {
  struct Shard {
    uint64_t number;
    AttendPlan::Task task;
  };
  const std::vector<AttendPlan::ApproxHead>& heads = plan->approx;
  std::vector<Shard> shards;
  std::vector<uint64_t> numbers;  // of the head before
  uint32_t last = end;            // that head
  for (uint32_t i = first; i < end; ++i) {
    if (heads[i].away != away) {
      continue;
    }
    const uint32_t n = heads[i].plan.n_shards;
    if (last == end || heads[i].view != heads[last].view || numbers.size() != n) {
      numbers.clear();
      for (uint32_t shard = 0; shard < n; ++shard) {
        numbers.push_back(attention::shard_number(heads[i].input, shard));
      }
    }
    last = i;
    for (uint32_t shard = 0; shard < n; ++shard) {
      shards.push_back({numbers[shard], {.unit = i, .first_chunk = shard, .is_approx = true}});
    }
  }
  std::ranges::stable_sort(shards, {}, &Shard::number);
  std::vector<AttendPlan::DrawnWindow>& all = plan->drawn_windows;
  Part<AttendPlan::DrawnWindow>& windows = plan->aways[away].drawn;
  windows = {all.size(), 0};
  for (const Shard& shard : shards) {
    if (windows.is_empty() || all.back().number != shard.number) {
      all.push_back(
          {.away = away,
           .number = shard.number,
           .pages = plan->pages_of(away, shard.number, shard.number + 1, attention::kShardTokens),
           .tasks = {plan->drawn_tasks.size(), 0}});
      ++windows.n;
    }
    ++all.back().tasks.n;
    plan->drawn_tasks.push_back(shard.task);
  }
}

void add_all_drawn_windows(AttendPlan* plan) {
  const std::vector<AttendPlan::ApproxHead>& heads = plan->approx;
  const auto n_heads = static_cast<uint32_t>(heads.size());
  for (uint32_t i = 0; i < n_heads;) {
    const uint32_t first = i;
    const uint32_t away = heads[first].away;
    uint32_t end = ++i;
    // Heads that read nothing that is away may lie between.
    for (; away != AttendPlan::kNoAway && i < n_heads &&
           (heads[i].away == away || heads[i].away == AttendPlan::kNoAway);
         ++i) {
      end = heads[i].away == away ? i + 1 : end;
    }
    if (away != AttendPlan::kNoAway) {
      plan->aways[away].drawn_heads = {first, end - first};
      add_drawn_windows(away, first, end, plan);
    }
    i = end;
  }
}

void add_sum_tasks(uint32_t n_threads, AttendPlan* plan) {
  uint64_t cost = 0;
  for (const Sums& part : plan->sums) {
    cost += part.is_later ? plan->heads[part.head].cost : 0;
  }
  const uint64_t task_cost = std::max(kMinTaskCost, cost / (kTasksPerThread * n_threads));
  for (uint32_t i = 0; i < plan->sums.size(); ++i) {
    const Sums& part = plan->sums[i];
    if (!part.is_later) {
      continue;
    }
    const Head& head = plan->heads[part.head];
    const uint64_t n_tasks = head.cost / task_cost;
    const uint64_t n_all = div_up(part.n_positions, kPageTokens);
    for (const PositionRange& stretch : plan->summed(part)) {
      const uint64_t begin = stretch.begin / kPageTokens;
      const uint64_t n_blocks = stretch.end / kPageTokens - begin;
      if (n_blocks == 0) {
        continue;
      }
      const uint64_t n = std::clamp<uint64_t>(n_tasks * n_blocks / n_all, 1, n_blocks);
      for (uint64_t piece = 0; piece < n; ++piece) {
        plan->sum_tasks.push_back({.sums = i,
                                   .begin = (begin + n_blocks * piece / n) * kPageTokens,
                                   .end = (begin + n_blocks * (piece + 1) / n) * kPageTokens});
      }
    }
  }
}

}  // namespace

Status cut_into_tasks(const TaskCrew& crew, size_t other_bytes, AttendPlan* plan) {
  KVM_ASSERT(plan->units.empty() && plan->tasks.empty() && plan->sum_tasks.empty());
  for (AttendPlan::ApproxHead& head : plan->approx) {
    head.input.problem = &head.problem;
  }
  const uint64_t wanted_cost =
      std::clamp(plan->cost / (kTasksPerThread * crew.n_threads), kMinTaskCost,
                 crew.is_shared ? kMaxSharedTaskCost : kMaxTaskCost);
  add_all_drawn_windows(plan);
  place_states(plan);
  add_units(wanted_cost, plan);
  const uint64_t task_cost = choose_task_cost(wanted_cost, plan);
  KVM_TRY(plan->check_size(plan->shared_bytes + other_bytes));
  number_counters(plan);
  add_tasks(task_cost, plan);
  add_all_windows(plan);
  add_sum_tasks(crew.n_threads, plan);
  KVM_CHECK_INVARIANT(plan->is_valid());
  return Status::ok();
}

}  // namespace kvm::engine
