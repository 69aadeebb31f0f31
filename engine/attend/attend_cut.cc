// SPDX-License-Identifier: Apache-2.0
// How a request's problems are cut into tasks, and where in shared memory their states lie.
#include "engine/attend/attend_work.h"

#include <fmt/format.h>

#include <algorithm>
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
// States and prepared queries together; a request that needs more is refused.
constexpr uint64_t kMaxRequestBytes = 1 << 30;
// Rows of a blocked problem that one task takes through a chunk: enough to make up for repacking
// the keys, and few enough for their accumulators to stay in the cache.
constexpr uint32_t kRowBlock = 768;
constexpr uint32_t kRowUnit = 64;
// All states of a unit that one thread evaluates.
constexpr uint64_t kMaxUnitStateBytes = 32 << 20;
// Preparing an approximate problem (its exact part, a scan of some blocks) takes about this part of
// all of it.
constexpr uint64_t kPrepareShare = 8;

constexpr size_t align_up(size_t bytes) { return round_up(bytes, attention::kBufferAlign); }

}  // namespace

// Beside what tasks share: the lists of approximate problems, and the scratch of all threads.
size_t AttendWork::approx_bytes() const {
  return approx_.size() * sizeof(ApproxHead) + indexes_.size() * sizeof(IndexPart) +
         sketches_.size() * sizeof(attention::SketchedRun) +
         hashes_.size() * sizeof(attention::HashedRun) +
         std::min<uint64_t>(crew_.n_threads, n_shards_) * scratch_bytes_;
}

Status AttendWork::check_size(size_t size_bytes) const {
  if (size_bytes > kMaxRequestBytes) {
    return {KVM_ERR_LIMIT,
            fmt::format("{} query rows need {} bytes for intermediate results; {} are allowed: "
                        "attend to fewer at once",
                        n_rows_, size_bytes, kMaxRequestBytes)};
  }
  return Status::ok();
}

Status AttendWork::plan_tasks() {
  KVM_ASSERT(!is_planned_ && units_.empty() && tasks_.empty());
  for (ApproxHead& head : approx_) {
    head.input.problem = &head.problem;
  }
  const uint64_t wanted_cost = std::clamp(cost_ / (kTasksPerThread * crew_.n_threads), kMinTaskCost,
                                          crew_.is_shared ? kMaxSharedTaskCost : kMaxTaskCost);
  add_units(wanted_cost);
  const uint64_t task_cost = choose_task_cost(wanted_cost);
  const size_t shared_bytes = lay_out(task_cost);
  KVM_TRY(check_size(shared_bytes + approx_bytes()));
  if (shared_bytes != 0) {
    shared_ = shared_memory_.reserve(shared_bytes);
    if (shared_ == nullptr) {
      return {KVM_ERR_NO_MEMORY,
              fmt::format("{} bytes for intermediate results were refused", shared_bytes)};
    }
  }
  shared_bytes_ = shared_bytes;
  point_to_sums();
  add_tasks(task_cost);
  KVM_CHECK_INVARIANT(covers_all_rows());
  KVM_CHECK_INVARIANT(covers_all_chunks());
  KVM_CHECK_INVARIANT(is_laid_out_apart());
  is_planned_ = true;
  return Status::ok();
}

// Heads of a view become gangs, as large as a chunk of one still is a task of its own.
void AttendWork::add_units(uint64_t gang_cost) {
  for (uint32_t i = 0; i < heads_.size();) {
    const Head& head = heads_[i];
    if (head.plan.blocked) {
      add_row_blocks(i++);
      continue;
    }
    const uint64_t chunk_cost = head.cost / std::max(1u, head.plan.n_chunks);
    const uint64_t most =
        std::clamp<uint64_t>(gang_cost / std::max<uint64_t>(1, chunk_cost), 1, attention::kMaxGang);
    Unit unit;
    unit.head = i;
    unit.n_heads = 0;
    unit.rows = {0, head.plan.rows};
    while (i < heads_.size() && heads_[i].view == head.view && unit.n_heads < most) {
      // The states of a gang lie n_chunks apart, and its prepared queries prepared_bytes.
      KVM_ASSERT(heads_[i].plan.n_chunks == head.plan.n_chunks &&
                 heads_[i].plan.first_chunk == head.plan.first_chunk &&
                 heads_[i].plan.prepared_bytes == head.plan.prepared_bytes);
      unit.cost += heads_[i].cost;
      ++unit.n_heads;
      ++i;
    }
    units_.push_back(unit);
  }
}

void AttendWork::add_row_blocks(uint32_t index) {
  const Head& head = heads_[index];
  const uint32_t rows = head.plan.rows;
  uint32_t block = rows;
  if (head.plan.rows_divisible) {
    const uint64_t bytes =
        attention::state_bytes(head.problem, kRowUnit) * std::max(1u, head.plan.n_chunks);
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
    units_.push_back(unit);
  }
}

uint64_t AttendWork::choose_task_cost(uint64_t task_cost) {
  while (lay_out(task_cost) > kMaxSharedBytes && task_cost < cost_) {
    task_cost *= 2;
  }
  return task_cost;
}

size_t AttendWork::unit_state_bytes(const Unit& unit) const {
  const Head& head = heads_[unit.head];
  return unit.n_heads * size_t{head.plan.n_chunks} *
         attention::state_bytes(head.problem, unit.rows.count);
}

// Decides into how many pieces each unit is cut and where its states and queries lie. Returns the
// bytes of shared memory that takes.
size_t AttendWork::lay_out(uint64_t task_cost) {
  size_t at = 0;
  prepare_.clear();
  prepare_bytes_ = 0;
  for (ApproxHead& head : approx_) {
    head.prepared_at = at;
    at += align_up(head.plan.prepared_bytes);
    head.states_at = at;
    at += align_up(head.plan.n_shards * head.plan.state_bytes);
    prepare_bytes_ += head.plan.cost_bytes / kPrepareShare;
  }
  for (uint32_t i = 0; i < units_.size(); ++i) {
    Unit& unit = units_[i];
    const uint32_t n_chunks = std::max(1u, heads_[unit.head].plan.n_chunks);
    const bool first_of_head = i == 0 || units_[i - 1].head != unit.head;
    const bool only_of_head =
        first_of_head && (i + 1 == units_.size() || units_[i + 1].head != unit.head);
    unit.n_pieces = static_cast<uint32_t>(
        std::min<uint64_t>(n_chunks, (unit.cost + task_cost - 1) / task_cost));
    unit.n_pieces = std::max(1u, unit.n_pieces);
    for (uint32_t h = unit.head; first_of_head && h < unit.head + unit.n_heads; ++h) {
      Head& head = heads_[h];
      head.prepared_at = kNotShared;
      if (!only_of_head || unit.n_pieces > 1 || head.sums_later) {
        head.prepared_at = at;
        at += align_up(head.plan.prepared_bytes);
        prepare_.push_back(h);
        prepare_bytes_ += head.plan.prepared_bytes;
      }
    }
    unit.states_at = kNotShared;
    if (unit.n_pieces > 1) {
      unit.states_at = at;
      at += unit_state_bytes(unit);
    }
  }
  return lay_out_sums(at);
}

size_t AttendWork::lay_out_sums(size_t at) {
  for (Head& head : heads_) {
    head.n_units = 0;
    if (!head.wants_sums) {
      continue;
    }
    head.sums_at = at;
    at += align_up(head.n_positions * sizeof(float));
    if (!tensors_->lse.is_present()) {
      head.lse_at = at;
      at += align_up(head.plan.rows * sizeof(float));
    }
  }
  for (const Unit& unit : units_) {
    // Only the first head of a unit counts its units and gets sums.
    KVM_ASSERT(unit.n_heads == 1 || !heads_[unit.head].wants_sums);
    heads_[unit.head].n_units += 1;
  }
  KVM_ASSERT(at % attention::kBufferAlign == 0);
  return at;
}

void AttendWork::point_to_sums() {
  for (Head& head : heads_) {
    if (!head.wants_sums) {
      continue;
    }
    head.problem.column_sums =
        reinterpret_cast<float*>(shared_at(head.sums_at, head.n_positions * sizeof(float)));
    if (head.lse_at != kNotShared) {
      head.problem.lse =
          reinterpret_cast<float*>(shared_at(head.lse_at, head.plan.rows * sizeof(float)));
      head.problem.lse_stride_query = head.problem.group;
      head.problem.lse_stride_head = 1;
    }
  }
}

void AttendWork::add_tasks(uint64_t task_cost) {
  size_t n_arrivals = 0;
  for (Unit& unit : units_) {
    if (unit.n_pieces > 1) {
      unit.arrivals_at = n_arrivals;
      n_arrivals += heads_[unit.head].plan.n_chunks;
    }
  }
  for (ApproxHead& head : approx_) {
    head.arrivals_at = n_arrivals++;
  }
  for (Head& head : heads_) {
    if (head.wants_sums) {
      head.arrivals_at = n_arrivals++;
    }
  }
  if (arrivals_size_ < n_arrivals) {
    // The size last: there may be no memory.
    const size_t size = n_arrivals + n_arrivals / 4;
    arrivals_ = std::make_unique<std::atomic<uint32_t>[]>(size);
    arrivals_size_ = size;
  }
  for (size_t i = 0; i < n_arrivals; ++i) {
    arrivals_[i].store(0, std::memory_order_relaxed);
  }
  for (uint32_t i = 0; i < approx_.size(); ++i) {
    for (uint32_t shard = 0; shard < approx_[i].plan.n_shards; ++shard) {
      tasks_.push_back({.unit = i, .first_chunk = shard, .is_approx = true});
    }
  }
  uint64_t gathered = 0;  // cost of the last task, if more whole units may join it
  bool may_join = false;
  for (uint32_t i = 0; i < units_.size(); ++i) {
    const Unit& unit = units_[i];
    if (unit.n_pieces == 1) {
      if (!may_join || gathered + unit.cost > task_cost) {
        tasks_.push_back({.unit = i});
        gathered = 0;
      }
      ++tasks_.back().n_units;
      gathered += unit.cost;
      may_join = true;
      continue;
    }
    may_join = false;
    const uint64_t n_chunks = heads_[unit.head].plan.n_chunks;
    for (uint64_t piece = 0; piece < unit.n_pieces; ++piece) {
      const auto begin = static_cast<uint32_t>(n_chunks * piece / unit.n_pieces);
      const auto end = static_cast<uint32_t>(n_chunks * (piece + 1) / unit.n_pieces);
      tasks_.push_back({.unit = i, .n_units = 0, .first_chunk = begin, .n_chunks = end - begin});
    }
  }
}

uint64_t AttendWork::sums_end(const Head& head) {
  return round_up(head.problem.column_position + head.n_positions, kPageTokens);
}

uint32_t AttendWork::plan_sums() {
  uint64_t cost = 0;
  for (const Head& head : heads_) {
    cost += head.sums_later ? head.cost : 0;
  }
  const uint64_t task_cost = std::max(kMinTaskCost, cost / (kTasksPerThread * crew_.n_threads));
  for (uint32_t i = 0; i < heads_.size(); ++i) {
    if (!heads_[i].sums_later) {
      continue;
    }
    const uint64_t begin = heads_[i].problem.column_position / kPageTokens;
    const uint64_t n_blocks = sums_end(heads_[i]) / kPageTokens - begin;
    KVM_ASSERT(n_blocks != 0);
    const uint64_t n = std::clamp<uint64_t>(heads_[i].cost / task_cost, 1, n_blocks);
    for (uint64_t piece = 0; piece < n; ++piece) {
      sum_tasks_.push_back({.head = i,
                            .begin = (begin + n_blocks * piece / n) * kPageTokens,
                            .end = (begin + n_blocks * (piece + 1) / n) * kPageTokens});
    }
  }
  return static_cast<uint32_t>(sum_tasks_.size());
}

std::byte* AttendWork::shared_at(size_t offset, size_t size_bytes) const {
  KVM_ASSERT(offset <= shared_bytes_ && size_bytes <= shared_bytes_ - offset);
  return shared_ + offset;
}

// --- Checks -------------------------------------------------------------------------------------

// Says whether each row of each head belongs to one unit.
bool AttendWork::covers_all_rows() const {
  uint32_t head = 0;
  uint32_t row = 0;
  for (const Unit& unit : units_) {
    if (head >= heads_.size() || unit.head != head || unit.rows.first != row ||
        unit.rows.count == 0 || unit.n_heads == 0 || unit.n_heads > attention::kMaxGang) {
      return false;
    }
    row += unit.rows.count;
    const bool is_whole = row == heads_[head].plan.rows;
    if (!is_whole && unit.n_heads != 1) {
      return false;
    }
    head += is_whole ? unit.n_heads : 0;
    row = is_whole ? 0 : row;
  }
  return head == heads_.size() && row == 0;
}

// Says whether each chunk of each unit, and each shard of each approximate head, belongs to one
// task.
bool AttendWork::covers_all_chunks() const {
  uint32_t approx = 0;
  uint32_t shard = 0;
  uint32_t unit = 0;
  uint32_t chunk = 0;
  for (const Task& task : tasks_) {
    if (task.is_approx) {
      if (unit != 0 || chunk != 0 || task.unit != approx || task.first_chunk != shard) {
        return false;
      }
      const bool is_last = ++shard == approx_[approx].plan.n_shards;
      approx += is_last ? 1 : 0;
      shard = is_last ? 0 : shard;
      continue;
    }
    if (unit >= units_.size() || task.unit != unit || task.first_chunk != chunk) {
      return false;
    }
    if (task.n_units != 0) {
      unit += task.n_units;
      continue;
    }
    chunk += task.n_chunks;
    const bool is_last = chunk == heads_[units_[unit].head].plan.n_chunks;
    if (task.n_chunks == 0) {
      return false;
    }
    unit += is_last ? 1 : 0;
    chunk = is_last ? 0 : chunk;
  }
  return approx == approx_.size() && shard == 0 && unit == units_.size() && chunk == 0;
}

// Says whether what lies in shared_ is aligned, within it, and without a byte in common.
bool AttendWork::is_laid_out_apart() const {
  struct Stretch {
    size_t begin;
    size_t size_bytes;
  };
  std::vector<Stretch> all;
  const auto add = [&all](size_t begin, size_t size_bytes) {
    if (begin != kNotShared) {
      all.push_back({begin, size_bytes});
    }
  };
  for (const ApproxHead& head : approx_) {
    add(head.prepared_at, head.plan.prepared_bytes);
    add(head.states_at, head.plan.n_shards * head.plan.state_bytes);
  }
  for (const Head& head : heads_) {
    add(head.prepared_at, head.plan.prepared_bytes);
    add(head.wants_sums ? head.sums_at : kNotShared, head.n_positions * sizeof(float));
    add(head.wants_sums ? head.lse_at : kNotShared, head.plan.rows * sizeof(float));
  }
  for (const Unit& unit : units_) {
    add(unit.states_at, unit_state_bytes(unit));
  }
  std::sort(all.begin(), all.end(), [](const Stretch& a, const Stretch& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.size_bytes < b.size_bytes;
  });
  size_t end = 0;
  for (const Stretch& stretch : all) {
    if (stretch.begin < end || stretch.begin % attention::kBufferAlign != 0) {
      return false;
    }
    end = stretch.begin + stretch.size_bytes;
  }
  return end <= shared_bytes_;
}

}  // namespace kvm::engine
