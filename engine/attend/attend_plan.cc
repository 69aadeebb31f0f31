// SPDX-License-Identifier: Apache-2.0
#include "engine/attend/attend_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/round.h"

namespace kvm::engine {
namespace {

// States and prepared queries together; a request that needs more is refused.
constexpr uint64_t kMaxRequestBytes = 1 << 30;

// A Stretch is [begin, begin + size) of something that is handed out in stretches.
struct Stretch {
  size_t begin = 0;
  size_t size = 0;
};

// Says whether no two stretches have anything in common, and all end by `end`.
bool are_apart(std::vector<Stretch> all, size_t end) {
  std::sort(all.begin(), all.end(), [](const Stretch& a, const Stretch& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.size < b.size;
  });
  size_t at = 0;
  for (const Stretch& stretch : all) {
    if (stretch.begin < at || stretch.begin > end || stretch.size > end - stretch.begin) {
      return false;
    }
    at = stretch.begin + stretch.size;
  }
  return true;
}

}  // namespace

void AttendPlan::clear() {
  AttendPlan rest;
  const auto keep = [](auto* list, auto* to) {
    empty(list);
    std::swap(*list, *to);
  };
  keep(&runs, &rest.runs);
  keep(&ranges, &rest.ranges);
  keep(&transforms, &rest.transforms);
  keep(&rotations, &rest.rotations);
  keep(&sketches, &rest.sketches);
  keep(&hashes, &rest.hashes);
  keep(&heads, &rest.heads);
  keep(&sums, &rest.sums);
  keep(&approx, &rest.approx);
  keep(&state_slots, &rest.state_slots);
  keep(&units, &rest.units);
  keep(&prepare, &rest.prepare);
  keep(&tasks, &rest.tasks);
  keep(&windows, &rest.windows);
  keep(&sum_tasks, &rest.sum_tasks);
  keep(&away_pages, &rest.away_pages);
  keep(&away_views, &rest.away_views);
  keep(&aways, &rest.aways);
  keep(&drawn_runs, &rest.drawn_runs);
  keep(&drawn_tasks, &rest.drawn_tasks);
  keep(&drawn_windows, &rest.drawn_windows);
  *this = std::move(rest);
}

Status AttendPlan::check_size(size_t size_bytes) const {
  if (size_bytes > kMaxRequestBytes) {
    return {KVM_ERR_LIMIT,
            fmt::format("{} query rows need {} bytes for intermediate results; {} are allowed: "
                        "attend to fewer at once",
                        n_rows, size_bytes, kMaxRequestBytes)};
  }
  return Status::ok();
}

size_t AttendPlan::approx_bytes(uint32_t n_threads) const {
  return approx.size() * (sizeof(ApproxHead) + sizeof(attention::ApproxReport)) +
         sketches.size() * sizeof(attention::SketchedRun) +
         hashes.size() * sizeof(attention::HashedRun) +
         std::min<uint64_t>(n_threads, n_shards) * scratch_bytes;
}

size_t AttendPlan::unit_state_bytes(const Unit& unit) const {
  const Head& head = heads[unit.head];
  return unit.n_heads * size_t{head.n_states} *
         attention::state_bytes(head.problem, unit.rows.count);
}

Part<AwayPage> AttendPlan::pages_of(uint32_t away, uint64_t begin, uint64_t end,
                                    uint32_t chunk_tokens) const {
  const Part<AwayPage>& all = aways[away].pages;
  const std::span<const AwayPage> pages = all.in(away_pages);
  const auto at = [&](uint64_t chunk) {
    return static_cast<size_t>(std::ranges::lower_bound(pages, chunk * (chunk_tokens / kPageTokens),
                                                        {}, &AwayPage::block) -
                               pages.begin());
  };
  return {all.begin + at(begin), at(end) - at(begin)};
}

bool AttendPlan::sees_away(const attention::Plan& cut, uint32_t away) const {
  const auto has_any = [&](uint64_t from, uint64_t to) {
    return from < to && pages_of(away, from, to, cut.chunk_tokens).n != 0;
  };
  const uint64_t end = cut.first_chunk + cut.n_chunks;  // in chunks that have a number
  const uint64_t gap_at = std::clamp(cut.gap_at, cut.first_chunk, end);
  return away != kNoAway && (has_any(cut.first_chunk, gap_at) ||
                             has_any(gap_at + cut.gap_chunks, end + cut.gap_chunks));
}

std::array<PositionRange, 2> AttendPlan::summed(const Sums& part) const {
  const uint64_t first = heads[part.head].problem.column_position;
  const uint64_t begin = first - first % kPageTokens;
  const uint64_t end = round_up(first + part.n_positions, kPageTokens);
  const PositionRange unwanted{std::clamp(part.unwanted.begin, begin, end),
                               std::clamp(part.unwanted.end, begin, end)};
  return {PositionRange{begin, unwanted.begin}, PositionRange{unwanted.end, end}};
}

// --- Checks -------------------------------------------------------------------------------------

bool AttendPlan::is_valid() const {
  return covers_all_rows() && covers_all_chunks() && keeps_states_apart() && covers_all_sums() &&
         is_laid_out_apart() && counts_apart() && covers_all_draws();
}

// Chunks come in order, each when those kMaxSlots before it are done: finds no state where another
// is that has not been merged.
bool AttendPlan::keeps_states_apart() const {
  return std::ranges::all_of(heads, [this](const Head& head) {
    const attention::MergeTree tree(head.plan);
    std::vector<uint32_t> owners(head.n_states, UINT32_MAX);
    std::vector<uint32_t> n_complete(head.plan.n_chunks);
    const auto merge = [&](uint32_t chunk) {
      attention::MergeTree::Node node = tree.leaf(chunk);
      for (auto next = tree.next(&node); next; next = tree.next(&node)) {
        if (++n_complete[next->from] == 1) {
          return;
        }
        owners[state_slot(head, next->from)] = UINT32_MAX;
      }
    };
    for (uint32_t chunk = 0; chunk < head.plan.n_chunks; ++chunk) {
      if (!head.state_slots.is_empty() && chunk >= StreamShape::kMaxSlots) {
        merge(chunk - StreamShape::kMaxSlots);
      }
      const uint32_t slot = state_slot(head, chunk);
      if (slot >= head.n_states || owners[slot] != UINT32_MAX) {
        return false;
      }
      owners[slot] = chunk;
    }
    return head.plan.n_chunks == 0 || state_slot(head, 0) == 0;
  });
}

bool AttendPlan::covers_all_rows() const {
  uint32_t head = 0;
  uint32_t row = 0;
  for (const Unit& unit : units) {
    if (head >= heads.size() || unit.head != head || unit.rows.first != row ||
        unit.rows.count == 0 || unit.n_heads == 0 || unit.n_heads > attention::kMaxGang) {
      return false;
    }
    row += unit.rows.count;
    const bool is_whole = row == heads[head].plan.rows;
    if (!is_whole && unit.n_heads != 1) {
      return false;
    }
    head += is_whole ? unit.n_heads : 0;
    row = is_whole ? 0 : row;
  }
  return head == heads.size() && row == 0;
}

bool AttendPlan::covers_all_chunks() const {
  uint32_t head = 0;
  uint32_t shard = 0;
  uint32_t window = 0;
  std::vector<uint32_t> next(units.size());  // chunk of each unit
  const auto n_chunks = [&](uint32_t unit) {
    return std::max(1u, heads[units[unit].head].plan.n_chunks);
  };
  for (uint32_t i = 0; i < tasks.size(); ++i) {
    const Task& task = tasks[i];
    if (task.is_approx) {
      while (head < approx.size() && approx[head].plan.n_shards == 0) {
        ++head;
      }
      if (head >= approx.size() || task.unit != head || task.first_chunk != shard) {
        return false;
      }
      const bool is_last = ++shard == approx[head].plan.n_shards;
      head += is_last ? 1 : 0;
      shard = is_last ? 0 : shard;
      continue;
    }
    const uint32_t n_units = std::max(1u, task.n_units);
    if (task.unit > units.size() || n_units > units.size() - task.unit) {
      return false;
    }
    for (uint32_t u = task.unit; u < task.unit + n_units; ++u) {
      const bool is_windowed = units[u].n_pieces == kInWindows;
      const uint32_t n = task.n_units != 0 ? n_chunks(u) : task.n_chunks;
      if (task.first_chunk != next[u] || n == 0 || n > n_chunks(u) - next[u] ||
          is_windowed != (task.window != kNoWindow) || is_windowed != (i >= n_tasks_there) ||
          (is_windowed && task.n_units != 0)) {
        return false;
      }
      next[u] += n;
    }
    if (task.window != kNoWindow) {
      const bool is_new = window < windows.size() && i == windows[window].tasks_end;
      window += is_new ? 1 : 0;
      if (window >= windows.size() || task.window != window || task.n_chunks != 1) {
        return false;
      }
    }
  }
  for (uint32_t u = 0; u < units.size(); ++u) {
    if (next[u] != n_chunks(u)) {
      return false;
    }
  }
  while (head < approx.size() && approx[head].plan.n_shards == 0) {
    ++head;
  }
  const bool has_all_windows =
      windows.empty() || (window + 1 == windows.size() && windows.back().tasks_end == tasks.size());
  return head == approx.size() && shard == 0 && has_all_windows;
}

// Each shard of a head that reads pages which are away is drawn once, in a window of its Away.
bool AttendPlan::covers_all_draws() const {
  std::vector<uint32_t> n_drawn(approx.size());
  size_t next = 0;
  for (const DrawnWindow& window : drawn_windows) {
    if (window.tasks.begin != next || window.tasks.is_empty()) {
      return false;
    }
    next += window.tasks.n;
    for (const Task& task : window.tasks.in(drawn_tasks)) {
      const ApproxHead& head = approx[task.unit];
      if (head.away != window.away || task.first_chunk >= head.plan.n_shards ||
          attention::shard_number(head.input, task.first_chunk) != window.number) {
        return false;
      }
      ++n_drawn[task.unit];
    }
  }
  for (uint32_t i = 0; i < approx.size(); ++i) {
    if (n_drawn[i] != (approx[i].away == kNoAway ? 0 : approx[i].plan.n_shards)) {
      return false;
    }
  }
  return next == drawn_tasks.size();
}

bool AttendPlan::covers_all_sums() const {
  auto task = sum_tasks.begin();
  for (uint32_t i = 0; i < sums.size(); ++i) {
    const Sums& part = sums[i];
    if (part.head >= heads.size() || heads[part.head].sums != i) {
      return false;
    }
    if (!part.is_later) {
      continue;
    }
    for (const PositionRange& stretch : summed(part)) {
      uint64_t at = stretch.begin;
      for (; at < stretch.end && task != sum_tasks.end() && task->sums == i; ++task) {
        if (task->begin != at || task->begin >= task->end) {
          return false;
        }
        at = task->end;
      }
      if (at != stretch.end) {
        return false;
      }
    }
  }
  return task == sum_tasks.end();
}

bool AttendPlan::is_laid_out_apart() const {
  std::vector<Stretch> all;
  const auto add = [&all](MemoryAt at, size_t size_bytes) {
    if (at.is_set()) {
      all.push_back({at.offset, round_up(size_bytes, attention::kBufferAlign)});
    }
  };
  for (const ApproxHead& head : approx) {
    add(head.prepared_at, head.plan.prepared_bytes);
    add(head.states_at, head.plan.n_shards * head.plan.state_bytes);
  }
  for (const Head& head : heads) {
    add(head.prepared_at, head.plan.prepared_bytes);
  }
  for (const Sums& part : sums) {
    add(part.sums_at, part.n_positions * sizeof(float));
    add(part.lse_at, heads[part.head].plan.rows * sizeof(float));
  }
  for (const Unit& unit : units) {
    add(unit.states_at, unit_state_bytes(unit));
  }
  return std::all_of(
             all.begin(), all.end(),
             [](const Stretch& stretch) { return stretch.begin % attention::kBufferAlign == 0; }) &&
         are_apart(std::move(all), shared_bytes);
}

bool AttendPlan::counts_apart() const {
  std::vector<Stretch> all;
  for (const Unit& unit : units) {
    if (unit.n_pieces != 1) {
      all.push_back({unit.n_complete.index, heads[unit.head].plan.n_chunks});
    }
  }
  for (const ApproxHead& head : approx) {
    all.push_back({head.n_evaluated.index, 1});
  }
  for (const DrawnWindow& window : drawn_windows) {
    all.push_back({window.n_found.index, 1});
  }
  for (const Sums& part : sums) {
    all.push_back({part.n_evaluated.index, 1});
  }
  return are_apart(std::move(all), n_counters);
}

}  // namespace kvm::engine
