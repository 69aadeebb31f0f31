// SPDX-License-Identifier: Apache-2.0
// Plans of random requests, made and carried out without a thread: each row is computed once,
// whatever the cut, and a plan that is damaged says so.
#include "engine/attend/attend_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "codecs/rows.h"
#include "engine/attend/attend_executor.h"
#include "engine/attend/attend_planner.h"
#include "engine/index/index_work.h"
#include "tests/common/environment.h"
#include "tests/common/items.h"
#include "tests/unit/engine/store_testbed.h"

namespace kvm::engine {
namespace {

constexpr uint32_t kDim = 32;

// A World is a space with one layer and random features, and a request that attends to some of its
// sequences.
class World {
 public:
  explicit World(uint64_t seed) : random_(seed) {
    n_kv_heads_ = pick(1, 4);
    group_ = std::vector<uint32_t>{1, 2, 4}[pick(0, 2)];
    SpaceSpec spec = make_spec("plans", 1, n_kv_heads_, kDim, group_);
    const uint64_t all = (uint64_t{1} << n_kv_heads_) - 1;
    const uint64_t some = pick(1, static_cast<uint32_t>(all));
    const uint32_t policy = pick(0, 3);
    if (policy == 1) {
      spec.policies = {sinks_recent(0, some, pick(0, 8), pick(1, 900), 256)};
    } else if (policy == 2) {
      spec.policies = {{.layer_begin = 0,
                        .n_layers = 1,
                        .kv_head_mask = {some, 0},
                        .retention = KVM_RETAIN_HEAVY,
                        .n_recent = 256,
                        .slack = 256,
                        .n_heavy = 2048}};
    }
    if (pick(0, 3) != 0) {
      spec.indexes = {
          {.n_layers = 1, .kv_head_mask = {all, 0}, .kind = KVM_INDEX_SKETCH, .min_tokens = 256}};
    }
    space_ = store_->register_space(spec).value();
    client_ = store_->add_client({});
    for (uint32_t i = pick(1, 5); i != 0; --i) {
      add_sequence();
    }
    make_request();
  }

  uint32_t pick(uint32_t low, uint32_t high) {
    return std::uniform_int_distribution<uint32_t>(low, high)(random_);
  }
  const StepRequest& request() const { return request_; }
  uint32_t n_q_heads() const { return n_kv_heads_ * group_; }

  // Some rows lie too far back for what their heads retain: no request, then.
  bool is_refused() {
    AttendPlan plan;
    return this->plan({1, false}, &plan).code() == KVM_ERR_PARTIAL;
  }
  Status plan(const TaskCrew& crew, AttendPlan* plan) {
    tensors_ = check_step(request_, store_->seq_space(seqs_[0])).value();
    AttendPlanner planner;
    Status status = planner.begin(*store_, request_, seqs_, tensors_, costs_, crew, plan);
    while (status.is_ok() && !planner.is_done()) {
      status = planner.go_on(*store_);
    }
    return status;
  }

  // Carries a plan out, the tasks of each kind in random order, and what it leaves; returns outputs
  // and lse as bits, for some are NaN.
  std::vector<uint32_t> run(AttendPlan& plan, const TaskCrew& crew, RequestResult* result) {
    std::fill(o_.begin(), o_.end(), -7.0f);
    std::fill(lse_.begin(), lse_.end(), -7.0f);
    AttendExecutor executor;
    run_tasks(plan, &executor);
    const std::span<const uint32_t> left = executor.find_left();
    n_left += left.size();
    AttendPlan left_plan;
    AttendExecutor left_executor;
    if (!left.empty()) {
      EXPECT_TRUE(plan_left(&plan, left, crew, &left_plan).is_ok());
      EXPECT_TRUE(left_plan.is_valid());
      run_tasks(left_plan, &left_executor);
    }
    executor.report(left.empty() ? nullptr : &left_executor, result);
    std::vector<uint32_t> all;
    for (const std::vector<float>* values : {&o_, &lse_}) {
      for (const float x : *values) {
        all.push_back(std::bit_cast<uint32_t>(x));
      }
    }
    return all;
  }
  size_t n_left = 0;

  // Returns which row of the outputs and which q head an address of `o` belongs to.
  std::pair<uint64_t, uint64_t> place_of(const void* o) const {
    const auto at = static_cast<uint64_t>(static_cast<const float*>(o) - o_.data());
    return {at / kDim / n_q_heads(), at / kDim % n_q_heads()};
  }

 private:
  void run_tasks(const AttendPlan& plan, AttendExecutor* executor) {
    ASSERT_TRUE(executor->begin(plan).is_ok());
    ThreadWorkspace workspace;
    const auto run_all = [&](size_t n, const auto& task) {
      std::vector<uint32_t> order(n);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random_);
      for (const uint32_t i : order) {
        EXPECT_TRUE(task(i));
      }
    };
    run_all(plan.n_prepare_tasks(), [&](uint32_t i) { return executor->prepare(i, workspace); });
    run_all(plan.tasks.size(), [&](uint32_t i) { return executor->evaluate(i, workspace); });
    run_all(plan.sum_tasks.size(), [&](uint32_t i) { return executor->sum(i, workspace); });
  }

  void add_sequence() {
    Sequence* seq =
        store_->find_seq(client_, store_->create_seq(client_, space_, 0).value()).value();
    const uint32_t lengths[] = {pick(0, 1) * pick(1, 200), pick(200, 3000), pick(3000, 9000),
                                pick(3000, 9000)};
    const uint32_t length = lengths[pick(0, 3)];
    if (length != 0) {
      ASSERT_TRUE(append(*store_, seq, 0, numbered(pick(0, 1000), length)).is_ok());
    }
    IndexWork work;
    work.add(seq, 0, 0);
    ThreadWorkspace workspace;
    JobPlan job;
    while (work.next(*store_, 1, &job) == IndexWork::Next::kTasks) {
      for (uint32_t i = 0; i < job.n_tasks; ++i) {
        work.run(i, workspace);
      }
    }
    if (length != 0 && pick(0, 2) == 0) {
      spoil_last_key(seq);
    }
    lengths_.push_back(length);
    seqs_.push_back(seq);
  }

  // No approximation answers rows that see this key.
  void spoil_last_key(const Sequence* seq) {
    std::vector<KvRun> runs;
    store_->collect_runs(seq, 0, 0, &runs);
    const KvRun& last = runs.back();
    const uint8_t* row = codecs::row_at(last.k, kDim, 0, last.slot + last.n_tokens - 1);
    *reinterpret_cast<uint16_t*>(const_cast<uint8_t*>(row)) = 0x7fc0;  // NaN as bf16
  }

  void make_request() {
    const uint32_t modes[] = {KVM_MODE_EXACT, KVM_MODE_VERIFIED, KVM_MODE_SAMPLED, KVM_MODE_SAMPLED,
                              KVM_MODE_TOPK};
    request_.attend = true;
    request_.space = space_;
    request_.mode = modes[pick(0, 4)];
    const bool has_budget = request_.mode == KVM_MODE_SAMPLED || request_.mode == KVM_MODE_TOPK;
    request_.budget = has_budget ? 200 : 0;
    request_.scale = 1e-4f;  // rows are integers up to 127
    uint32_t row = 0;
    for (const uint32_t length : lengths_) {
      const uint32_t counts[] = {pick(0, 1), pick(1, 4), pick(1, 8), pick(1, 220)};
      kvm_item item{};
      item.n_query = std::min(counts[pick(0, 3)], length);
      item.query_position = KVM_POSITION_END;
      item.query_row = row;
      row += item.n_query;
      request_.items.push_back(item);
    }
    n_rows_ = row;
    const uint64_t n = uint64_t{std::max(row, 1u)} * n_q_heads() * kDim;
    q_.resize(n);
    for (float& x : q_) {
      x = std::normal_distribution<float>(0.0f, 1.0f)(random_);
    }
    o_.resize(n);
    lse_.resize(n / kDim);
    const auto view = [](std::vector<float>* values) {
      return TensorView{.data = values->data(),
                        .size_bytes = values->size() * sizeof(float),
                        .dtype = KVM_DTYPE_F32};
    };
    request_.q = view(&q_);
    request_.o = view(&o_);
    request_.lse = pick(0, 1) == 0 ? TensorView{} : view(&lse_);
  }

  std::mt19937_64 random_;
  uint32_t n_kv_heads_ = 0;
  uint32_t group_ = 0;
  std::unique_ptr<Store> store_ = open_store(256 * kMiB);
  ClientId client_ = 0;
  kvm_space_id space_ = 0;
  std::vector<Sequence*> seqs_;
  std::vector<uint32_t> lengths_;
  StepRequest request_;
  StepTensors tensors_;
  Costs costs_{CostModel{}, 1};
  uint32_t n_rows_ = 0;
  std::vector<float> q_, o_, lse_;
};

// Counts how often each (row, q head) is an output of a problem.
std::map<std::pair<uint64_t, uint64_t>, int> outputs_of(const World& world,
                                                        const AttendPlan& plan) {
  std::map<std::pair<uint64_t, uint64_t>, int> n;
  const auto add = [&](const attention::Problem& p) {
    const auto [row, head] = world.place_of(p.o);
    for (uint32_t i = 0; i < p.n_query; ++i) {
      for (uint32_t g = 0; g < p.group; ++g) {
        ++n[{row + i, head + g}];
      }
    }
  };
  for (const AttendPlan::Head& head : plan.heads) {
    add(head.problem);
  }
  for (const AttendPlan::ApproxHead& head : plan.approx) {
    add(head.problem);
  }
  return n;
}

TEST(AttendPlan, ComputesEachRowOnceAndTheSameWhateverTheCut) {
  const TaskCrew crews[] = {{1, false}, {2, false}, {16, true}, {64, false}};
  size_t n_approx = 0;
  size_t n_left = 0;
  size_t n_cut = 0;
  size_t n_gangs = 0;
  size_t n_blocked = 0;
  size_t n_sums_later = 0;
  for (uint64_t seed = 0; seed < kvm::testing::by_day(12, 24); ++seed) {
    SCOPED_TRACE(seed);
    World world(seed);
    if (world.is_refused()) {
      continue;
    }
    std::vector<uint32_t> first;
    RequestResult first_result;
    for (const TaskCrew& crew : crews) {
      AttendPlan plan;
      const Status status = world.plan(crew, &plan);
      ASSERT_TRUE(status.is_ok()) << status.message();
      ASSERT_TRUE(plan.is_valid());
      uint64_t n_rows = 0;
      for (const kvm_item& item : world.request().items) {
        n_rows += item.n_query;
      }
      EXPECT_EQ(plan.n_rows, n_rows);
      const auto outputs = outputs_of(world, plan);
      EXPECT_EQ(outputs.size(), n_rows * world.n_q_heads());
      for (const auto& [place, n] : outputs) {
        ASSERT_EQ(n, 1) << "row " << place.first << ", q head " << place.second;
      }
      RequestResult result;
      const std::vector<uint32_t> all = world.run(plan, crew, &result);
      if (first.empty()) {
        first = all;
        first_result = result;
      }
      ASSERT_EQ(all, first);
      EXPECT_EQ(result.keys_read, first_result.keys_read);
      EXPECT_EQ(result.n_exact, first_result.n_exact);
      EXPECT_EQ(result.n_not_finite, first_result.n_not_finite);
      n_approx += plan.approx.size();
      n_sums_later += plan.sum_tasks.size();
      for (const AttendPlan::Unit& unit : plan.units) {
        n_cut += unit.n_pieces > 1 ? 1 : 0;
        n_gangs += unit.n_heads > 1 ? 1 : 0;
        n_blocked += plan.heads[unit.head].plan.blocked ? 1 : 0;
      }
    }
    n_left += world.n_left;
  }
  // The requests above reach every kind of work.
  const uint64_t least = kvm::testing::by_day(10, 20);
  EXPECT_GT(n_approx, least);
  EXPECT_GT(n_left, least / 5);
  EXPECT_GT(n_cut, least);
  EXPECT_GT(n_gangs, least);
  EXPECT_GT(n_blocked, least);
  EXPECT_GT(n_sums_later, least);
}

TEST(AttendPlan, SaysWhenItIsDamaged) {
  // Each changes a plan where it applies, and says whether it did.
  const std::function<bool(AttendPlan*)> damages[] = {
      [](AttendPlan* p) { return !p->tasks.empty() && (p->tasks.pop_back(), true); },
      [](AttendPlan* p) { return !p->tasks.empty() && (p->tasks.push_back(p->tasks[0]), true); },
      [](AttendPlan* p) { return !p->units.empty() && (p->units.pop_back(), true); },
      [](AttendPlan* p) { return !p->units.empty() && (p->units[0].rows.count += 1, true); },
      [](AttendPlan* p) {
        return p->shared_bytes != 0 && (p->shared_bytes -= attention::kBufferAlign, true);
      },
      [](AttendPlan* p) { return p->n_counters != 0 && (p->n_counters -= 1, true); },
      [](AttendPlan* p) {
        return p->prepare.size() > 1 &&
               (p->heads[p->prepare[1]].prepared_at = p->heads[p->prepare[0]].prepared_at, true);
      },
      [](AttendPlan* p) {
        return !p->sum_tasks.empty() && (p->sum_tasks[0].end += kPageTokens, true);
      },
      [](AttendPlan* p) {
        return !p->approx.empty() && (p->approx[0].states_at.offset += 4, true);
      },
  };
  std::vector<int> n(std::size(damages), 0);
  for (uint64_t seed = 0; seed < kvm::testing::by_day(10, 20); ++seed) {
    SCOPED_TRACE(seed);
    World world(seed);
    if (world.is_refused()) {
      continue;
    }
    for (size_t i = 0; i < std::size(damages); ++i) {
      AttendPlan plan;
      const Status status = world.plan({64, false}, &plan);
      ASSERT_TRUE(status.is_ok()) << status.message();
      if (damages[i](&plan)) {
        EXPECT_FALSE(plan.is_valid()) << "damage " << i;
        ++n[i];
      }
    }
  }
  for (size_t i = 0; i < n.size(); ++i) {
    EXPECT_GT(n[i], 0) << "damage " << i << " was never done";
  }
}

// Few rows: many are cut by chunks that take long.
TEST(AttendPlan, CutsLargeRequestsForAllThreads) {
  size_t n_large = 0;
  for (uint64_t seed = 0; seed < kvm::testing::by_day(20, 40); ++seed) {
    SCOPED_TRACE(seed);
    World world(seed);
    AttendPlan plan;
    if (!world.plan({4, false}, &plan).is_ok() || !plan.approx.empty() || plan.cost < 2 << 20) {
      continue;
    }
    const bool is_blocked =
        std::any_of(plan.heads.begin(), plan.heads.end(),
                    [](const AttendPlan::Head& head) { return head.plan.blocked; });
    if (!is_blocked) {
      EXPECT_GE(plan.tasks.size(), 4u);
      ++n_large;
    }
  }
  EXPECT_GT(n_large, kvm::testing::by_day(1, 3));
}

}  // namespace
}  // namespace kvm::engine
