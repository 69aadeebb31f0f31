// SPDX-License-Identifier: Apache-2.0
#include "bench/approx/passes.h"

#include <immintrin.h>  // _mm_pause

#include <algorithm>
#include <utility>

namespace kvm::bench {

ExactPass::ExactPass(const DataSet& data, Team& team) : data_(data), team_(team) {
  const HeadData& first = data.heads[0];
  o_stride_ = size_t{first.group} * first.dim;
  o_.resize(o_stride_ * data.heads.size());
  lse_.resize(size_t{first.group} * data.heads.size());
  const attention::Problem problem = make_problem(first, 0, o_.data(), lse_.data());
  plan_ = attention::make_plan(problem);
  state_bytes_ = attention::state_bytes(problem, plan_.rows);
  // Sixteen tasks a thread: they end together, and cold starts do not count.
  task_chunks_ = std::max(1u, plan_.n_chunks / (16 * team.size()));
  prepared_ = std::make_unique<HugeBuffer>(plan_.prepared_bytes * data.heads.size());
  states_ = std::make_unique<HugeBuffer>(state_bytes_ * plan_.n_chunks * data.heads.size());
  scratch_ = std::make_unique<HugeBuffer>(plan_.scratch_bytes * attention::kMaxGang * team.size());
  arrived_ = std::vector<std::atomic<uint8_t>>(size_t{plan_.n_chunks} * data.heads.size());
}

double ExactPass::run(uint32_t set) {
  const double begin = now_s();
  std::vector<attention::Problem> problems;
  for (uint32_t h = 0; h < data_.heads.size(); ++h) {
    problems.push_back(make_problem(data_.heads[h], set, o_.data() + h * o_stride_,
                                    lse_.data() + h * data_.heads[h].group));
  }
  solve(std::move(problems));
  return now_s() - begin;
}

void ExactPass::solve(std::vector<attention::Problem> problems) {
  problems_ = std::move(problems);
  for (uint32_t h = 0; h < problems_.size(); ++h) {
    attention::prepare_queries(problems_[h], plan_, prepared_->data() + h * plan_.prepared_bytes);
  }
  for (auto& flag : arrived_) {
    flag.store(0, std::memory_order_relaxed);
  }
  next_.store(0, std::memory_order_relaxed);
  team_.run([this](uint32_t thread) { work(thread); });
}

void ExactPass::work(uint32_t thread) {
  std::byte* scratch = scratch_->data() + thread * plan_.scratch_bytes * attention::kMaxGang;
  const auto n_heads = static_cast<uint32_t>(problems_.size());
  const uint32_t n_gangs = (n_heads + attention::kMaxGang - 1) / attention::kMaxGang;
  for (uint32_t i;;) {
    i = next_.fetch_add(1, std::memory_order_relaxed);
    const uint32_t chunk = i / n_gangs * task_chunks_;
    if (chunk >= plan_.n_chunks) {
      return;
    }
    const uint32_t n = std::min(task_chunks_, plan_.n_chunks - chunk);
    const uint32_t first = i % n_gangs * attention::kMaxGang;
    const uint32_t end = std::min(first + attention::kMaxGang, n_heads);
    std::vector<attention::GangMember> gang;
    for (uint32_t h = first; h < end; ++h) {
      gang.push_back({&problems_[h], prepared_->data() + h * plan_.prepared_bytes,
                      states_->data() + (size_t{h} * plan_.n_chunks + chunk) * state_bytes_});
    }
    attention::eval_chunks(gang, plan_, plan_.first_chunk + chunk, n, scratch);
    for (uint32_t h = first; h < end; ++h) {
      for (uint32_t c = chunk; c < chunk + n; ++c) {
        climb(h, c);
      }
    }
  }
}

void ExactPass::climb(uint32_t head, uint32_t chunk) {
  const attention::MergeTree tree(plan_);
  std::byte* states = states_->data() + size_t{head} * plan_.n_chunks * state_bytes_;
  auto node = tree.leaf(chunk);
  while (const auto merge = tree.next(&node)) {
    auto& flag = arrived_[size_t{head} * plan_.n_chunks + merge->from];
    // SYNC: acq_rel: whoever arrives second sees the state that the first one wrote.
    if (flag.exchange(1, std::memory_order_acq_rel) == 0) {
      return;
    }
    attention::merge_states(problems_[head], {0, plan_.rows}, *merge, states);
  }
  attention::write_result(problems_[head], plan_, {0, plan_.rows}, states);
}

ApproxPass::ApproxPass(const DataSet& data, std::vector<attention::HeadIndex> indexes,
                       const attention::ApproxParams& params, Team& team)
    : data_(data),
      team_(team),
      scratch_(team.size()),
      solvers_(team.size()),
      exact_(data, team),
      times_(team.size()) {
  for (uint32_t h = 0; h < data.heads.size(); ++h) {
    auto head = std::make_unique<Head>();
    head->o.resize(size_t{data.heads[h].group} * data.heads[h].dim);
    head->lse.resize(data.heads[h].group);
    head->input.index = indexes[h];
    head->input.params = params;
    head->input.params.seed = params.seed + h;
    heads_.push_back(std::move(head));
  }
  // The buffers of every query set are there before anything is timed.
  for (uint32_t set = 0; set < data.heads[0].n_sets(); ++set) {
    plan(set);
    for (auto& head : heads_) {
      head->prepared.get(head->plan.prepared_bytes);
      head->states.get(head->plan.n_shards * head->plan.state_bytes);
      for (auto& scratch : scratch_) {
        scratch.get(head->plan.scratch_bytes);
      }
    }
  }
}

void ApproxPass::plan(uint32_t set) {
  set_ = set;
  tasks_.clear();
  uint32_t n_shards = 0;
  for (uint32_t h = 0; h < heads_.size(); ++h) {
    Head& head = *heads_[h];
    head.problem = make_problem(data_.heads[h], set, head.o.data(), head.lse.data());
    head.input.problem = &head.problem;
    head.plan = attention::plan_approx(head.input);
    head.is_prepared.store(false, std::memory_order_relaxed);
    head.left.store(head.plan.n_shards, std::memory_order_relaxed);
    n_shards = std::max(n_shards, head.plan.n_shards);
    tasks_.push_back({h, kPrepare});
  }
  for (uint32_t s = 0; s < n_shards; ++s) {
    for (uint32_t h = 0; h < heads_.size(); ++h) {
      if (s < heads_[h]->plan.n_shards) {
        tasks_.push_back({h, s});
      }
    }
  }
}

double ApproxPass::run(uint32_t set) {
  const double begin = now_s();
  plan(set);
  times_[0].plan += now_s() - begin;
  times_[0].n_heads += heads_.size();
  next_.store(0, std::memory_order_relaxed);
  team_.run([this](uint32_t thread) { work(thread); });
  std::vector<attention::Problem> left;
  for (const auto& head : heads_) {
    if (!head->is_answered) {
      left.push_back(head->problem);
    }
  }
  if (!left.empty()) {
    exact_.solve(std::move(left));
  }
  return now_s() - begin;
}

PassTimes ApproxPass::times() const {
  PassTimes sum;
  for (const PassTimes& of_thread : times_) {
    sum.add(of_thread);
  }
  return sum;
}

void ApproxPass::work(uint32_t thread) {
  for (uint32_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_.size();) {
    const Task task = tasks_[i];
    Head& head = *heads_[task.head];
    const double begin = now_s();
    if (task.shard == kPrepare) {
      prepare(&head, thread);
      times_[thread].prepare += now_s() - begin;
      continue;
    }
    // SYNC: acquire pairs with prepare(): the prepared queries are there. All preparations come
    // before the shards in the order of tasks, so the wait ends.
    while (!head.is_prepared.load(std::memory_order_acquire)) {
      _mm_pause();
    }
    attention::eval_shard(head.input, head.plan, head.prepared.get(0), task.shard,
                          scratch_[thread].get(0),
                          head.states.get(0) + task.shard * head.plan.state_bytes);
    times_[thread].shards += now_s() - begin;
    // SYNC: acq_rel makes all shards' states visible to the last one.
    if (head.left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      finish(&head, thread);
    }
  }
}

void ApproxPass::prepare(Head* head, uint32_t thread) {
  head->report = {};
  head->is_answered = true;
  if (head->plan.exact) {
    Solved solved = solvers_[thread].solve_exact(data_.heads[head->problem.head], set_);
    head->o = std::move(solved.o);
    head->lse = std::move(solved.lse);
    head->report = solved.report;
    return;
  }
  attention::prepare_approx(head->input, head->plan, head->prepared.get(0),
                            scratch_[thread].get(0));
  // SYNC: release publishes the prepared queries to work().
  head->is_prepared.store(true, std::memory_order_release);
  if (head->plan.n_shards == 0) {
    finish(head, thread);
  }
}

void ApproxPass::finish(Head* head, uint32_t thread) {
  const double begin = now_s();
  head->is_answered =
      attention::finish_approx(head->input, head->plan, head->prepared.get(0),
                               scratch_[thread].get(0), head->states.get(0), &head->report);
  times_[thread].finish += now_s() - begin;
}

}  // namespace kvm::bench
