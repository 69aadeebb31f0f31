// SPDX-License-Identifier: Apache-2.0
// The views of a request become attention problems.
#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "base/assert.h"
#include "base/round.h"
#include "engine/attend/attend_cut.h"
#include "engine/attend/attend_planner.h"

namespace kvm::engine {
namespace {

// From here on attention mass is summed up by tasks of its own.
constexpr uint64_t kMinSumsCost = 1 << 20;
// A lookup in hash tables takes at least as long as so many bytes for each key, whatever the
// budget: all keys are counted, and all that are found are scored.
constexpr uint64_t kLookupBytes = 16;
// Operations that take as long as reading a byte of K or V.
constexpr uint64_t kFlopsPerByte = 16;

}  // namespace

void AttendPlanner::clear() {
  empty(&views_);
  empty(&indexes_);
  empty(&away_);
  plan_ = nullptr;
  n_extra_views_ = 0;
  time_share_ = 0;
  next_item_ = next_view_ = next_head_ = 0;
  is_done_ = false;
}

Status AttendPlanner::begin(const Store& store, const StepRequest& request,
                            std::span<Sequence* const> seqs, const StepTensors& tensors,
                            const Costs& costs, const TaskCrew& crew, AttendPlan* plan) {
  KVM_ASSERT(seqs.size() == request.items.size() && crew.n_threads != 0);
  KVM_ASSERT(plan->heads.empty() && plan->approx.empty() && plan->tasks.empty());
  clear();
  plan->mode = request.mode;
  plan->layer = request.layer_begin;
  plan->err = tensors.err;
  request_ = &request;
  tensors_ = &tensors;
  costs_ = &costs;
  seqs_ = seqs;
  crew_ = crew;
  plan_ = plan;
  return go_on(store);
}

Status AttendPlanner::go_on(const Store& store) {
  KVM_ASSERT(plan_ != nullptr && !is_done_);
  uint64_t n_left = kPlanPages;
  KVM_TRY(plan_items(store, &n_left));
  if (n_left != 0) {
    const bool is_first = next_view_ == 0 && next_head_ == 0;
    if (is_first && request_->mode == KVM_MODE_AUTO && request_->budget != 0) {
      share_time();
    }
    KVM_TRY(plan_views(&n_left));
  }
  if (n_left != 0) {
    KVM_TRY(cut_into_tasks(crew_, other_bytes(), plan_));
    is_done_ = true;
  }
  return Status::ok();
}

size_t AttendPlanner::other_bytes() const {
  return plan_->approx_bytes(crew_.n_threads) + indexes_.size() * sizeof(IndexPart);
}

// From here on the lists of the plan that problems refer to stay where they are.
Status AttendPlanner::plan_views(uint64_t* n_left) {
  while (next_view_ < views_.size() && *n_left != 0) {
    const auto n_heads = static_cast<uint32_t>(
        space_->head_class(request_->layer_begin, views_[next_view_].class_index).kv_heads.size());
    next_head_ = add_heads(next_view_, next_head_, n_left);
    if (next_head_ == n_heads) {
      next_head_ = 0;
      ++next_view_;
    }
    KVM_TRY(plan_->check_size(other_bytes()));
  }
  return Status::ok();
}

// Returns the problem of a view's first head; that of another differs in its head, queries, sink
// logits and outputs.
attention::Problem AttendPlanner::problem_of(const View& view) {
  const uint32_t layer = request_->layer_begin;
  const HeadClass& cls = space_->head_class(layer, view.class_index);
  const StepTensors& t = *tensors_;
  attention::Problem p;
  p.dtype_q = t.q.dtype;
  p.q_stride_query = t.q.stride_row;
  p.q_stride_head = t.q.stride_head;
  p.n_query = view.n_rows;
  p.group = space_->layers[layer].group();
  p.item_rows = request_->items[view.item].n_query * p.group;
  p.dim_k = space_->layers[layer].dim_k;
  p.dim_v = space_->layers[layer].dim_v;
  p.v_in_k = space_->v_in_k;
  p.scale = scale_;
  p.softcap = space_->logit_softcap;
  p.visible = visibility(view);
  p.runs = view.runs.in(plan_->runs);
  if (!view.transforms.is_empty()) {
    const std::span<QueryTransform> transforms = view.transforms.in(plan_->transforms);
    const std::span<const float> rotations = view.rotations.in(plan_->rotations);
    transforms[1].cos = rotations.data();
    transforms[1].sin = rotations.data() + rotations.size() / 2;
    p.transforms = transforms;
  }
  p.fp32_weights = (request_->flags & KVM_STEP_F32_VALUES) != 0;
  const bool feeds_statistics = (request_->flags & KVM_STEP_NO_STATISTICS) == 0;
  p.wants_column_sums = feeds_statistics && cls.retention.kind == KVM_RETAIN_HEAVY &&
                        !view.runs.is_empty() && view.n_rows != 0;
  p.column_position = p.wants_column_sums ? p.runs[0].position : 0;
  p.dtype_o = t.o.dtype;
  p.o_stride_query = t.o.stride_row;
  p.o_stride_head = t.o.stride_head;
  p.lse_stride_query = t.lse.stride_row;
  p.lse_stride_head = t.lse.stride_head;
  return p;
}

namespace {

// The next head of plan->heads is of a view with pages that are away.
void add_away_view(uint32_t view, Part<KvRun> runs, AttendPlan* plan, uint32_t away) {
  std::vector<AttendPlan::Away::View>& all = plan->away_views;
  Part<AttendPlan::Away::View>& views = plan->aways[away].views;
  if (views.is_empty()) {
    views.begin = all.size();
  } else if (all.back().view == view) {
    return;
  }
  ++views.n;
  all.push_back(
      {.runs = runs, .first_head = static_cast<uint32_t>(plan->heads.size()), .view = view});
  KVM_ASSERT(views.begin + views.n == all.size());
}

}  // namespace

// Adds the problems of a view's heads from first_head on. Returns where n_left came to an end.
uint32_t AttendPlanner::add_heads(uint32_t view_index, uint32_t first_head, uint64_t* n_left) {
  const View& view = views_[view_index];
  const uint32_t layer = request_->layer_begin;
  const HeadClass& cls = space_->head_class(layer, view.class_index);
  const StepTensors& t = *tensors_;
  const float* sinks = space_->layer_sink_logits(layer);
  const float* slopes = space_->slopes();
  std::span<const IndexPart> indexes = view.indexes.in(indexes_);
  if (!may_approximate(view)) {
    indexes = {};
  }
  const auto n_heads = static_cast<uint32_t>(cls.kv_heads.size());
  KVM_ASSERT(first_head <= n_heads && (indexes.empty() || indexes.size() == n_heads));
  KVM_ASSERT(view.first_row + view.n_rows <= request_->items[view.item].n_query);
  attention::Problem p = problem_of(view);
  for (uint32_t h = first_head; h < n_heads; ++h) {
    if (*n_left == 0) {
      return h;
    }
    *n_left -= std::min<uint64_t>(*n_left, 1 + (indexes.empty() ? 0 : view.runs.n));
    const uint32_t row = first_row(view);
    const uint32_t q_head = cls.kv_heads[h] * p.group;
    p.head = h;
    p.q = t.q.at(0, row, q_head);
    p.o = t.o.at(0, row, q_head);
    p.lse = t.lse.is_present() ? reinterpret_cast<float*>(t.lse.at(0, row, q_head)) : nullptr;
    p.sink_logits = sinks == nullptr ? nullptr : sinks + q_head;
    p.slopes = slopes == nullptr ? nullptr : slopes + q_head;
    if (!indexes.empty() && add_parts(p, view_index, cls.kv_heads[h], indexes[h])) {
      continue;
    }
    if (view.away != AttendPlan::kNoAway &&
        plan_->aways[view.away].choice == AttendPlan::Away::Choice::kDrawn &&
        plan_->sees_away(attention::make_plan(p), view.away)) {
      add_left(p, view_index, q_head);
    } else {
      add_exact(p, view_index, q_head);
      indexes = may_approximate(view) ? indexes : std::span<const IndexPart>();
    }
  }
  return n_heads;
}

namespace {

// The q heads [first, first + count) of a problem's group.
attention::Problem part_of(const attention::Problem& problem, uint32_t first, uint32_t count) {
  attention::Problem part = problem;
  part.group = count;
  part.q = static_cast<const std::byte*>(problem.q) +
           first * problem.q_stride_head * dtype_size_bytes(problem.dtype_q);
  part.o = static_cast<std::byte*>(problem.o) +
           first * problem.o_stride_head * dtype_size_bytes(problem.dtype_o);
  part.lse = problem.lse == nullptr ? nullptr : problem.lse + first * problem.lse_stride_head;
  part.sink_logits = problem.sink_logits == nullptr ? nullptr : problem.sink_logits + first;
  return part;
}

}  // namespace

// Adds what is approximated of a head: all of its group, or parts that share a sample. Returns
// false where nothing is.
bool AttendPlanner::add_parts(const attention::Problem& problem, uint32_t view_index,
                              uint32_t kv_head, const IndexPart& index) {
  const auto n_parts = static_cast<uint32_t>(div_up(problem.group, attention::kMaxApproxRows));
  const uint32_t q_head = kv_head * problem.group;
  for (uint32_t i = 0; i < n_parts; ++i) {
    const uint32_t begin = problem.group * i / n_parts;
    const uint32_t end = problem.group * (i + 1) / n_parts;
    const attention::Problem part = part_of(problem, begin, end - begin);
    if (add_approx(part, view_index, kv_head, q_head + begin, index)) {
      continue;
    }
    if (i == 0) {
      return false;  // the parts are alike
    }
    add_exact(part, view_index, q_head + begin);
  }
  return true;
}

// Tokens that were demoted stay so, whatever their mass.
PositionRange AttendPlanner::unwanted_masses(const View& view) const {
  const uint32_t list = space_->storage(request_->layer_begin).first_list + view.class_index;
  const KeptTokens* kept = seqs_[view.item]->kept_of(list);
  return kept == nullptr ? PositionRange() : kept->unkept_places();
}

void AttendPlanner::add_exact(const attention::Problem& problem, uint32_t view_index,
                              uint32_t q_head) {
  const View& view = views_[view_index];
  AttendPlan::Head head;
  head.problem = problem;
  head.plan = attention::make_plan(problem);
  head.cost = head_cost(view);
  head.view = view_index;
  head.row = first_row(view);
  head.q_head = q_head;
  head.away = plan_->sees_away(head.plan, view.away) ? view.away : AttendPlan::kNoAway;
  if (head.away != AttendPlan::kNoAway) {
    plan_->aways[view.away].choice = AttendPlan::Away::Choice::kStreamed;
    add_away_view(view_index, view.runs, plan_, view.away);
  }
  if (problem.wants_column_sums) {
    KVM_ASSERT(view.away == AttendPlan::kNoAway);  // such lists stay in memory
    const KvRun& last = problem.runs.back();
    head.sums = static_cast<uint32_t>(plan_->sums.size());
    plan_->sums.push_back({.head = static_cast<uint32_t>(plan_->heads.size()),
                           .item = view.item,
                           .class_index = view.class_index,
                           .is_packed = is_packed(view),
                           .is_later = head.cost >= kMinSumsCost,
                           .n_positions = last.position + last.n_tokens - problem.column_position,
                           .unwanted = unwanted_masses(view)});
  }
  plan_->heads.push_back(head);
  plan_->cost += head.cost;
  count_exact(view, problem.group);
}

void AttendPlanner::count_exact(const View& view, uint32_t group) {
  plan_->n_keys += view.n_keys;
  plan_->n_exact_keys += view.n_keys;
  plan_->n_exact_bytes += view.n_key_bytes;
  plan_->n_exact_rows += uint64_t{view.n_rows} * group;
}

// Views of an Away are all drawn, or all streamed: what is read for one is read once for all.
bool AttendPlanner::may_approximate(const View& view) const {
  return view.away == AttendPlan::kNoAway ||
         plan_->aways[view.away].choice != AttendPlan::Away::Choice::kStreamed;
}

// Without what says how it is approximated.
AttendPlan::ApproxHead AttendPlanner::approx_head(const attention::Problem& problem,
                                                  uint32_t view_index, uint32_t q_head) const {
  const View& view = views_[view_index];
  AttendPlan::ApproxHead approx;
  approx.problem = problem;
  approx.exact_cost = head_cost(view);
  approx.view = view_index;
  approx.item = view.item;
  approx.class_index = view.class_index;
  approx.row = first_row(view);
  approx.q_head = q_head;
  return approx;
}

// A head that is to be exact, of an Away that is drawn: with it the others will be left.
void AttendPlanner::add_left(const attention::Problem& problem, uint32_t view_index,
                             uint32_t q_head) {
  const View& view = views_[view_index];
  AttendPlan::ApproxHead approx = approx_head(problem, view_index, q_head);
  approx.mode = KVM_MODE_SAMPLED;
  approx.away = view.away;
  plan_->approx.push_back(approx);
  count_exact(view, problem.group);
}

void AttendPlanner::add_drawn_runs(const View& view) {
  Part<Part<KvRun>>& all = plan_->aways[view.away].drawn_runs;
  if (all.is_empty()) {
    all.begin = plan_->drawn_runs.size();
  } else if (plan_->drawn_runs.back().begin == view.runs.begin) {
    return;
  }
  ++all.n;
  plan_->drawn_runs.push_back(view.runs);
  KVM_ASSERT(all.begin + all.n == plan_->drawn_runs.size());
}

// Returns which row of the tensors the first of a view is.
uint32_t AttendPlanner::first_row(const View& view) const {
  return request_->items[view.item].query_row + view.first_row;
}

// Returns the cost of one head, in bytes.
uint64_t AttendPlanner::exact_cost(const View& view) const {
  const uint32_t layer = request_->layer_begin;
  const uint64_t rows = uint64_t{view.n_rows} * space_->layers[layer].group();
  const uint64_t dims = uint64_t{space_->layers[layer].dim_k} + space_->layers[layer].dim_v;
  const uint64_t key_bytes = space_->head_class(layer, view.class_index).slab_class.token_bytes();
  return std::max(view.n_cost_keys * key_bytes, 2 * view.n_cost_keys * rows * dims / kFlopsPerByte);
}

// Returns the cost of a problem that is solved exactly: something for the rows themselves, so that
// many rows without keys count as well.
uint64_t AttendPlanner::head_cost(const View& view) const {
  const uint64_t rows = uint64_t{view.n_rows} * space_->layers[request_->layer_begin].group();
  return exact_cost(view) + 64 * rows;
}

// --- AUTO ---------------------------------------------------------------------------------------

ProblemCost AttendPlanner::problem_cost(const View& view, uint32_t group,
                                        const IndexPart& part) const {
  const uint32_t layer = request_->layer_begin;
  const tiers::SlabClass& slab = space_->head_class(layer, view.class_index).slab_class;
  ProblemCost cost;
  cost.rows = view.n_rows * group;
  cost.dim = space_->layers[layer].dim_k + space_->layers[layer].dim_v;
  cost.row_bytes = slab.token_bytes();
  cost.is_scaled = slab.k().is_scaled() && slab.v().is_scaled();
  cost.is_hashed = !part.hashes.is_empty();
  cost.n_present = view.n_cost_keys;
  for (const attention::SketchedRun& run : part.sketches.in(plan_->sketches)) {
    cost.n_indexed += uint64_t{run.n_blocks} * kPageTokens;
  }
  for (const attention::HashedRun& run : part.hashes.in(plan_->hashes)) {
    cost.n_indexed += run.n_keys;
  }
  cost.n_indexed = std::min(cost.n_indexed, cost.n_present);
  // Parts of a group that are answered exactly are so together.
  const uint32_t whole = space_->layers[layer].group();
  cost.exact_bytes = exact_cost(view) * group / whole;
  if (view.away != AttendPlan::kNoAway) {
    const auto n_heads =
        static_cast<uint32_t>(space_->head_class(layer, view.class_index).kv_heads.size());
    const std::span<const AwayPage> pages =
        plan_->aways[view.away].pages.in(std::as_const(plan_->away_pages));
    cost.n_pages_away =
        std::min<uint64_t>(pages.size(), div_up(view.n_cost_keys, uint64_t{kPageTokens}) + 1);
    cost.n_sharing = n_heads * static_cast<uint32_t>(div_up(whole, group));
    const tiers::ReadRates rates = costs_->read_rates();
    const double own = static_cast<double>(costs_->n_threads()) / cost.n_sharing;
    const uint64_t page_bytes = pages[0].size_bytes;
    cost.stream_ns = rates.in_order_ns(cost.n_pages_away * page_bytes) * own;
    cost.page_ns = rates.apart_ns(1, page_bytes) * own;
  }
  return cost;
}

void AttendPlanner::share_time() {
  const CostModel& model = costs_->model();
  double all = 0;
  double indexed = 0;
  for (const View& view : views_) {
    const uint32_t group = space_->layers[request_->layer_begin].group();
    const double each = exact_ns(model, problem_cost(view, group, IndexPart{}));
    const HeadClass& cls = space_->head_class(request_->layer_begin, view.class_index);
    all += each * static_cast<double>(cls.kv_heads.size());
    for (const IndexPart& part : view.indexes.in(indexes_)) {
      indexed += part.is_empty() ? 0 : each;
    }
  }
  const double time = static_cast<double>(request_->budget) * costs_->n_threads();
  const double left = std::max(0.0, time - (all - indexed));
  time_share_ = all <= time || indexed <= 0 ? 1.0 : left / indexed;
}

// Sets mode and numbers; false where exact is to be preferred.
bool AttendPlanner::choose(const View& view, uint32_t group, const IndexPart& part,
                           attention::ApproxParams* params) const {
  const CostModel& model = costs_->model();
  const ProblemCost cost = problem_cost(view, group, part);
  const AutoChoice choice = request_->budget == 0
                                ? choose_for_error(model, cost)
                                : choose_for_time(model, cost, time_share_ * exact_ns(model, cost));
  params->budget = choice.budget;
  params->max_read_fraction = choice.max_read_fraction;
  params->mode = choice.mode == AutoMode::kTopK      ? attention::ApproxMode::kTopK
                 : choice.mode == AutoMode::kSampled ? attention::ApproxMode::kSampled
                                                     : attention::ApproxMode::kVerified;
  return choice.mode != AutoMode::kExact;
}

// --- Approximate problems -----------------------------------------------------------------------

// The plan of a head is as a rule that of the one before: planning looks at all pages.
attention::ApproxPlan AttendPlanner::plan_like_last(const AttendPlan::ApproxHead& head) const {
  if (!plan_->approx.empty() && plan_->approx.back().view == head.view &&
      plan_->approx.back().problem.group == head.problem.group) {
    attention::ApproxInput last = plan_->approx.back().input;
    last.problem = &plan_->approx.back().problem;
    if (attention::same_plan(head.input, last)) {
      const attention::ApproxPlan& plan = plan_->approx.back().plan;
      KVM_CHECK_INVARIANT([&] {
        attention::ApproxPlan own = attention::plan_approx(head.input);
        own.cost_bytes = plan.cost_bytes;  // of tables, more
        return own == plan;
      }());
      return plan;
    }
  }
  return attention::plan_approx(head.input);
}

namespace {

// What `budget` keys for each row are of n_present, at most nearly all: who asks for fewer keys at
// any price would still not have them one by one where that is all of them.
float read_fraction(uint64_t budget, const attention::Problem& problem, uint64_t n_present) {
  constexpr double kMost = 0.9;
  const double keys = static_cast<double>(budget) * problem.n_query * problem.group;
  return static_cast<float>(
      std::clamp(keys / static_cast<double>(std::max<uint64_t>(n_present, 1)), 1e-6, kMost));
}

// AUTO decides for each head (choose).
attention::ApproxMode approx_mode(const StepRequest& request) {
  switch (request.mode) {
    case KVM_MODE_TOPK:
      return attention::ApproxMode::kTopK;
    case KVM_MODE_SAMPLED:
      return request.budget != 0 && request.eps != 0 ? attention::ApproxMode::kBalanced
                                                     : attention::ApproxMode::kSampled;
    default:
      return attention::ApproxMode::kVerified;
  }
}

}  // namespace

// Adds the problem, if it is one to approximate.
bool AttendPlanner::add_approx(const attention::Problem& problem, uint32_t view_index,
                               uint32_t kv_head, uint32_t q_head, const IndexPart& part) {
  if (part.is_empty()) {
    return false;
  }
  const View& view = views_[view_index];
  const uint32_t layer = request_->layer_begin;
  const IndexConfig config = space_->index(layer, kv_head);
  AttendPlan::ApproxHead approx = approx_head(problem, view_index, q_head);
  attention::ApproxInput& input = approx.input;
  input.problem = &problem;
  input.index.sketches = part.sketches.in(plan_->sketches);
  input.index.hashes = part.hashes.in(plan_->hashes);
  input.index.planes = space_->planes.get();
  attention::ApproxParams& params = input.params;
  params.mode = approx_mode(*request_);
  params.proposal =
      !part.hashes.is_empty() ? attention::Proposal::kLsh : attention::Proposal::kSketch;
  params.eps = request_->eps != 0 ? request_->eps : params.eps;
  params.delta = request_->delta != 0 ? request_->delta : params.delta;
  if (request_->mode == KVM_MODE_VERIFIED && request_->budget != 0) {
    params.max_read_fraction = read_fraction(request_->budget, problem, view.n_cost_keys);
  } else {
    params.budget = request_->budget;
  }
  if (request_->mode == KVM_MODE_AUTO && !choose(view, problem.group, part, &params)) {
    return false;
  }
  approx.mode = params.mode == attention::ApproxMode::kTopK       ? KVM_MODE_TOPK
                : params.mode == attention::ApproxMode::kVerified ? KVM_MODE_VERIFIED
                                                                  : KVM_MODE_SAMPLED;
  params.seed = mix_seed(request_->seed, layer, kv_head);
  params.n_sinks = config.n_sinks;
  params.n_recent = config.n_recent;
  if (view.away != AttendPlan::kNoAway &&
      plan_->sees_away(attention::make_plan(problem), view.away)) {
    if (!attention::may_be_in_parts(params)) {
      return false;
    }
    approx.away = view.away;
    input.is_in_parts = true;
  }
  approx.plan = plan_like_last(approx);
  if (approx.plan.exact) {
    return false;
  }
  if (approx.away != AttendPlan::kNoAway) {
    plan_->aways[approx.away].choice = AttendPlan::Away::Choice::kDrawn;
    add_drawn_runs(view);
  }
  if (!part.hashes.is_empty()) {
    uint64_t& cost_bytes = approx.plan.cost_bytes;
    cost_bytes = std::max(cost_bytes, approx.plan.n_keys_indexed * kLookupBytes);
  }
  plan_->scratch_bytes = std::max(plan_->scratch_bytes, approx.plan.scratch_bytes);
  plan_->n_shards += approx.plan.n_shards;
  plan_->cost += approx.plan.cost_bytes;
  plan_->n_keys += view.n_keys;
  plan_->approx.push_back(approx);
  return true;
}

namespace {

// Says whether `next` is the part of the same group that begins n_heads q heads behind `first`.
bool follows(const AttendPlan::ApproxHead& next, const AttendPlan::ApproxHead& first,
             uint32_t n_heads) {
  return next.view == first.view && next.problem.head == first.problem.head &&
         next.q_head == first.q_head + n_heads;
}

}  // namespace

// REQUIRES: problems are in order.
Status plan_left(AttendPlan* whole, std::span<const uint32_t> problems, const TaskCrew& crew,
                 AttendPlan* left) {
  const AttendPlan& plan = *whole;
  left->layer = plan.layer;
  left->err = plan.err;
  const bool has_away = std::ranges::any_of(
      problems, [&](uint32_t i) { return plan.approx[i].away != AttendPlan::kNoAway; });
  const KvRun* first_run = plan.runs.data();
  if (has_away) {
    // Moved as they are: problems refer to runs.
    left->runs = std::move(whole->runs);
    left->away_pages = std::move(whole->away_pages);
    left->aways = std::move(whole->aways);
    for (AttendPlan::Away& away : left->aways) {
      away = {.pages = away.pages};
    }
  }
  for (size_t at = 0; at < problems.size();) {
    const AttendPlan::ApproxHead& approx = plan.approx[problems[at]];
    AttendPlan::Head head;
    head.problem = approx.problem;
    // Neighbouring parts of a group are one problem again, so that keys are read once.
    for (++at;
         at < problems.size() && follows(plan.approx[problems[at]], approx, head.problem.group);
         ++at) {
      head.problem.group += plan.approx[problems[at]].problem.group;
    }
    head.problem.wants_column_sums = false;  // nobody sums what was to be approximated
    head.plan = attention::make_plan(head.problem);
    head.cost = approx.exact_cost;
    head.view = approx.view;
    head.row = approx.row;
    head.q_head = approx.q_head;
    head.away = left->sees_away(head.plan, approx.away) ? approx.away : AttendPlan::kNoAway;
    if (head.away != AttendPlan::kNoAway) {
      const auto begin = static_cast<size_t>(head.problem.runs.data() - first_run);
      add_away_view(approx.view, {begin, head.problem.runs.size()}, left, head.away);
    }
    left->heads.push_back(head);
    left->cost += head.cost;
    left->n_rows += head.problem.n_query;
  }
  return cut_into_tasks(crew, 0, left);
}

}  // namespace kvm::engine
