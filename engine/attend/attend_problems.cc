// SPDX-License-Identifier: Apache-2.0
// This file finds what a request attends to: its items become views, and these attention problems.
#include "engine/attend/attend_work.h"
#include "engine/index/sequence_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <span>

#include "base/assert.h"
#include "base/counted.h"
#include "base/round.h"

namespace kvm::engine {
namespace {

// From here on attention mass is summed up by tasks of its own.
constexpr uint64_t kMinSumsCost = 1 << 20;
// An item with more rows than so many approximate problems take is answered exactly: that reads
// every key once for all of them.
constexpr uint32_t kMaxApproxViews = 8;
// Views of a request beyond one for each (item, head class).
constexpr size_t kMaxExtraViews = 4096;
// Pages and position ranges of all views: what a request's lists may take, about 100 MB and 16 MB.
constexpr size_t kMaxListedPages = 2 << 20;
constexpr size_t kMaxListedRanges = 1 << 20;
// A lookup in hash tables takes at least as long as so many bytes for each key, whatever the
// budget: all keys are counted, and all that are found are scored.
constexpr uint64_t kLookupBytes = 16;
// Operations that take as long as reading a byte of K or V.
constexpr uint64_t kFlopsPerByte = 16;

// Cosine and sine of an angle times 0, 1, 2, ...: each of these alone decides its bits, not what it
// was reached from.
class Turner {
 public:
  explicit Turner(double angle)
      : angle_(angle), step_cos_(std::cos(angle)), step_sin_(std::sin(angle)) {}

  void turn_to(uint64_t n) {
    if (n < at_ || n / kSteps != at_ / kSteps) {
      at_ = n / kSteps * kSteps;
      cos_ = std::cos(angle_ * static_cast<double>(at_));
      sin_ = std::sin(angle_ * static_cast<double>(at_));
    }
    for (; at_ < n; ++at_) {
      const double turned = cos_ * step_cos_ - sin_ * step_sin_;
      sin_ = sin_ * step_cos_ + cos_ * step_sin_;
      cos_ = turned;
    }
  }
  double cos() const { return cos_; }
  double sin() const { return sin_; }

 private:
  static constexpr uint64_t kSteps = 16;  // from one multiple to the next, which is computed anew

  double angle_;
  double step_cos_;
  double step_sin_;
  uint64_t at_ = 0;
  double cos_ = 1;
  double sin_ = 0;
};

// Says whether runs follow each other as KvRuns have to.
[[maybe_unused]] bool are_in_order(KvRuns runs) {
  uint64_t position = 0;
  for (const KvRun& run : runs) {
    if (run.n_tokens == 0 || run.position < position ||
        run.position % kPageTokens + run.n_tokens > kPageTokens) {
      return false;
    }
    position = run.position + run.n_tokens;
  }
  return true;
}

}  // namespace

// --- Views --------------------------------------------------------------------------------------

// Both until n_left pages have been looked at; it is 0 then, and else more than that.
Status AttendWork::plan_items(const Store& store, uint64_t* n_left) {
  for (; next_item_ < request_->items.size() && *n_left != 0; ++next_item_) {
    if (request_->items[next_item_].n_query != 0) {
      const size_t n_before = runs_.size() + sketches_.size();
      KVM_TRY(add_item(store, next_item_, seqs_[next_item_]));
      *n_left -= std::min<uint64_t>(*n_left, runs_.size() + sketches_.size() - n_before + 1);
      KVM_TRY(check_size(approx_bytes()));
    }
  }
  return Status::ok();
}

// From here on runs_, ranges_ and what indexes have stay where they are: problems point there.
Status AttendWork::plan_views(uint64_t* n_left) {
  while (next_view_ < views_.size() && *n_left != 0) {
    const auto n_heads = static_cast<uint32_t>(
        space_->head_class(request_->layer_begin, views_[next_view_].class_index).kv_heads.size());
    next_head_ = add_heads(next_view_, next_head_, n_left);
    if (next_head_ == n_heads) {
      next_head_ = 0;
      ++next_view_;
    }
    KVM_TRY(check_size(approx_bytes()));
  }
  return Status::ok();
}

Status AttendWork::add_item(const Store& store, uint32_t index, const Sequence* seq) {
  const kvm_item& item = request_->items[index];
  const uint32_t layer = request_->layer_begin;
  space_ = &store.seq_space(seq);
  scale_ = request_->scale != 0 ? request_->scale : space_->softmax_scale;
  View view;
  view.item = index;
  view.n_rows = item.n_query;
  view.position = item.query_position;
  if (item.query_position == KVM_POSITION_END) {
    const uint64_t length = store.reserved_length(seq, layer);
    if (length < item.n_query) {
      return {KVM_ERR_INVALID,
              fmt::format("item {} asks for the last {}; layer {} of its sequence has {}", index,
                          counted(item.n_query, "token"), layer, length)};
    }
    view.position = length - item.n_query;
  }
  KVM_TRY(store.check_visible(seq, layer, view.position));
  n_rows_ += item.n_query;
  add_ranges(item, &view);
  return add_views(store, seq, view);
}

// One view per head class and rule. A class's rule changes with the position of the query only
// where a layer's window is longer than what a head retains.
Status AttendWork::add_views(const Store& store, const Sequence* seq, const View& whole) {
  const uint32_t layer = request_->layer_begin;
  const auto n_classes = static_cast<uint32_t>(space_->storage(layer).classes.size());
  const kvm_item& item = request_->items[whole.item];
  const bool sees_nothing =
      item.n_ranges != 0 && whole.n_include == 0 && (item.flags & KVM_ITEM_EXCLUDE_RANGES) == 0;
  for (uint32_t c = 0; c < n_classes; ++c) {
    View view = whole;
    view.class_index = c;
    add_index(store, seq, &view);
    const size_t first_view = views_.size();
    visible_keys_.clear();
    const uint32_t n_plain = n_plain_rows(view);
    KVM_ASSERT(n_plain <= item.n_query);
    for (const uint32_t end : {n_plain, item.n_query}) {
      if (view.first_row == end) {
        continue;
      }
      view.end_row = end;
      view.run_begin = runs_.size();
      if (!sees_nothing) {
        store.collect_runs(seq, layer, c, &runs_, item.n_ranges == 0);
        if (runs_.size() > kMaxListedPages) {
          return {
              KVM_ERR_LIMIT,
              fmt::format("the items up to {} see more than {} pages of {} tokens in all; attend "
                          "to fewer at once",
                          whole.item, kMaxListedPages, kPageTokens)};
        }
      }
      const bool is_turned = view.first_row >= n_plain;
      if (is_turned) {
        turn_sinks(view.run_begin, space_->head_class(layer, c).retention.n_sinks);
      }
      view.n_runs = runs_.size() - view.run_begin;
      KVM_CHECK_INVARIANT(are_in_order(KvRuns(runs_).subspan(view.run_begin)));
      while (view.first_row < end) {
        KVM_TRY(choose_rule(whole, &view));
        KVM_ASSERT(view.n_rows != 0 && view.n_rows <= end - view.first_row);
        if (is_turned) {
          KVM_TRY(add_rotation(&view));
        }
        visible_keys_.add(visibility(view), view.n_rows);
        views_.push_back(view);
        view.first_row += view.n_rows;
      }
    }
    count_keys(first_view, KvRuns(runs_).subspan(view.run_begin, view.n_runs));
  }
  return Status::ok();
}

// How many rows, the first ones, meet all keys as they were appended. Those behind them, which are
// nearer to the sinks in the cache, are other views: what a row meets is its own affair, whatever
// rows its item has.
uint32_t AttendWork::n_plain_rows(const View& view) const {
  const kvm_item& item = request_->items[view.item];
  const Retention& retention =
      space_->head_class(request_->layer_begin, view.class_index).retention;
  const bool is_tree = (item.flags & KVM_ITEM_TREE) != 0;  // which is turned as its first row
  const uint64_t last = view.position + item.n_query - 1;
  if (retention.n_sinks == 0 || retention.shift(is_tree ? view.position : last) == 0) {
    return item.n_query;
  }
  const uint64_t first_turned = last + 1 - retention.shift(last);
  return is_tree || first_turned <= view.position
             ? 0
             : static_cast<uint32_t>(first_turned - view.position);
}

// Finds the indexes of a view's heads, and into how many rows the view is cut for them.
void AttendWork::add_index(const Store& store, const Sequence* seq, View* view) {
  const uint32_t layer = request_->layer_begin;
  const kvm_item& item = request_->items[view->item];
  const uint32_t most = attention::kMaxApproxRows / space_->layers[layer].group();
  const bool is_one = item.n_query <= most;
  const bool is_several =
      item.n_query <= kMaxApproxViews * most && (item.flags & KVM_ITEM_TREE) == 0;
  if (request_->mode <= KVM_MODE_EXACT || !(is_one || is_several)) {
    return;
  }
  const HeadClass& cls = space_->head_class(layer, view->class_index);
  const size_t index_begin = indexes_.size();
  const size_t n_before = sketches_.size() + hashes_.size();
  for (const uint16_t kv_head : cls.kv_heads) {
    IndexPart part = {.sketch_begin = sketches_.size(), .hash_begin = hashes_.size()};
    const bool is_hashed = space_->index(layer, kv_head).kind == KVM_INDEX_LSH;
    const uint32_t offered = is_hashed ? KVM_PROPOSAL_LSH : KVM_PROPOSAL_SKETCH;
    const bool is_asked =
        request_->proposal == KVM_PROPOSAL_DEFAULT || request_->proposal == offered;
    // Hash tables give no error bar that could be verified, or held against an error asked for.
    const bool needs_bar = request_->mode == KVM_MODE_VERIFIED ||
                           (request_->mode == KVM_MODE_AUTO && request_->budget == 0);
    if (is_asked && !(is_hashed && needs_bar)) {
      collect_head_index(store.memory(), seq, layer, kv_head, store.reserved_length(seq, layer),
                         &sketches_, &hashes_);
    }
    part.n_sketches = sketches_.size() - part.sketch_begin;
    part.n_hashes = hashes_.size() - part.hash_begin;
    indexes_.push_back(part);
  }
  if (sketches_.size() + hashes_.size() == n_before) {
    indexes_.resize(index_begin);
    return;
  }
  view->index_begin = index_begin;
  view->max_rows = is_one ? UINT32_MAX : most;
}

// The rule for the rows from view->first_row on, and how many of them it covers.
Status AttendWork::choose_rule(const View& whole, View* view) {
  const kvm_item& item = request_->items[whole.item];
  view->position = whole.position + view->first_row;
  view->rule = space_->visibility(request_->layer_begin, view->class_index, view->position);
  view->n_rows = static_cast<uint32_t>(
      std::min<uint64_t>(view->end_row - view->first_row, view->rule.end - view->position));
  view->n_rows = std::min(view->n_rows, view->max_rows);
  if (view->n_rows != item.n_query && (item.flags & KVM_ITEM_TREE) != 0) {
    return {KVM_ERR_UNSUPPORTED,
            fmt::format("the tree of item {} spans position {}, where the policy of a head of "
                        "layer {} begins to hide tokens; attend to the rows before it apart",
                        whole.item, view->rule.end, request_->layer_begin)};
  }
  // Views that begin where max_rows cut are bounded by the number of items.
  const bool is_extra = view->first_row % view->max_rows != 0;
  n_extra_views_ += is_extra ? 1 : 0;
  if (n_extra_views_ > kMaxExtraViews) {
    return {KVM_ERR_LIMIT,
            fmt::format("the rows of item {} see their tokens by more than {} different rules (a "
                        "window longer than n_recent, with sinks); attend to fewer rows at once",
                        whole.item, kMaxExtraViews)};
  }
  view->exclude_begin = whole.exclude_begin;
  view->n_exclude = whole.n_exclude;
  exclude_dropped_sinks(view);
  if (ranges_.size() > kMaxListedRanges) {
    return {KVM_ERR_LIMIT,
            fmt::format("the rows of the items up to {} need more than {} position ranges (a "
                        "window longer than n_recent, with sinks, takes a copy for each row); "
                        "attend to fewer rows at once",
                        whole.item, kMaxListedRanges)};
  }
  return Status::ok();
}

// Keys of the views from first_view on, which share runs: all of them counted with the first, and
// an estimate of each one's share of the work.
void AttendWork::count_keys(size_t first_view, KvRuns runs) {
  KVM_ASSERT(first_view < views_.size());
  views_[first_view].n_keys = visible_keys_.count(runs);
  if (views_.size() == first_view + 1) {
    views_[first_view].n_cost_keys = views_[first_view].n_keys;
    return;
  }
  const uint64_t n_stored = runs.size() * kPageTokens;
  for (size_t i = first_view; i < views_.size(); ++i) {
    View& view = views_[i];
    const uint64_t in_window = view.rule.window == 0 ? n_stored : view.rule.window + view.n_rows;
    view.n_cost_keys = std::min(n_stored, in_window + std::min(view.rule.n_sinks, n_stored));
  }
}

void AttendWork::add_ranges(const kvm_item& item, View* view) {
  const size_t begin = ranges_.size();
  for (uint32_t i = 0; i < item.n_ranges; ++i) {
    const kvm_range& range = request_->ranges[item.range_begin + i];
    if (range.begin != range.end) {
      ranges_.push_back({range.begin, range.end});
    }
  }
  const bool exclude = (item.flags & KVM_ITEM_EXCLUDE_RANGES) != 0;
  (exclude ? view->exclude_begin : view->include_begin) = begin;
  (exclude ? view->n_exclude : view->n_include) = ranges_.size() - begin;
}

// Adds [0, first_sink) to what a view's rows do not see, in a list of its own.
void AttendWork::exclude_dropped_sinks(View* view) {
  const uint64_t first_sink = view->rule.first_sink;
  if (first_sink == 0) {
    return;
  }
  const size_t begin = ranges_.size();
  ranges_.push_back({0, first_sink});
  for (size_t i = 0; i < view->n_exclude; ++i) {
    const PositionRange range = ranges_[view->exclude_begin + i];
    if (range.end > first_sink) {
      ranges_.push_back({std::max(range.begin, first_sink), range.end});
    }
  }
  view->exclude_begin = begin;
  view->n_exclude = ranges_.size() - begin;
}

// Runs from run_begin on are cut where the sinks of a head class end that has positions in the
// cache: queries are turned for those alone.
void AttendWork::turn_sinks(size_t run_begin, uint64_t n_sinks) {
  for (size_t i = run_begin; i < runs_.size() && runs_[i].position < n_sinks; ++i) {
    runs_[i].transform = 1;
    const uint64_t n = n_sinks - runs_[i].position;
    if (n >= runs_[i].n_tokens) {
      continue;
    }
    KvRun rest = runs_[i];
    const uint64_t k_bytes = space_->head_dim_k * dtype_size_bytes(rest.dtype_k);
    const uint64_t v_bytes = space_->head_dim_v * dtype_size_bytes(rest.dtype_v);
    rest.k = static_cast<const std::byte*>(rest.k) + n * k_bytes;
    rest.v = static_cast<const std::byte*>(rest.v) + n * v_bytes;
    rest.k_scale = rest.k_scale == nullptr ? nullptr : rest.k_scale + n;
    rest.v_scale = rest.v_scale == nullptr ? nullptr : rest.v_scale + n;
    rest.log_weight = rest.log_weight == nullptr ? nullptr : rest.log_weight + n;
    rest.position += n;
    rest.n_tokens = static_cast<uint16_t>(rest.n_tokens - n);
    rest.transform = 0;
    runs_[i].n_tokens = static_cast<uint16_t>(n);
    runs_.insert(runs_.begin() + static_cast<ptrdiff_t>(i) + 1, rest);
    break;
  }
}

// How queries of the view meet the sinks: turned back by how much nearer they are to them.
Status AttendWork::add_rotation(View* view) {
  const Retention& retention =
      space_->head_class(request_->layer_begin, view->class_index).retention;
  const bool is_tree = (request_->items[view->item].flags & KVM_ITEM_TREE) != 0;
  const std::vector<float>& inv_freq = space_->rope_inv_freq;
  const size_t n_pairs = inv_freq.size();
  const size_t n = view->n_rows * n_pairs;
  const size_t at = rotations_.size();
  KVM_TRY(check_size((at + 2 * n) * sizeof(float)));
  rotations_.resize(at + 2 * n);
  for (size_t pair = 0; pair < n_pairs; ++pair) {
    Turner turner(static_cast<double>(inv_freq[pair]));
    for (uint32_t row = 0; row < view->n_rows; ++row) {
      turner.turn_to(retention.shift(view->position + (is_tree ? 0 : row)));
      rotations_[at + row * n_pairs + pair] = static_cast<float>(turner.cos());
      rotations_[at + n + row * n_pairs + pair] = static_cast<float>(-turner.sin());
    }
  }
  view->transforms_at = transforms_.size();
  QueryTransform turn;
  turn.n_pairs = static_cast<uint32_t>(n_pairs);
  turn.token_stride = turn.n_pairs;
  turn.layout = space_->rope_layout == KVM_ROPE_INTERLEAVED ? RotationLayout::kInterleaved
                                                            : RotationLayout::kHalfSplit;
  transforms_.emplace_back();
  transforms_.push_back(turn);
  rotation_at_.push_back(at);
  return Status::ok();
}

attention::Visibility AttendWork::visibility(const View& view) const {
  const kvm_item& item = request_->items[view.item];
  const std::span<const PositionRange> ranges(ranges_);
  attention::Visibility v;
  v.query_position = view.position;
  v.window = view.rule.window;
  v.sinks = view.rule.n_sinks;
  v.causal = (item.flags & KVM_ITEM_NOT_CAUSAL) == 0;
  if ((item.flags & KVM_ITEM_TREE) != 0) {
    v.tree = request_->tree_mask.data() + item.tree_begin;
    v.tree_stride_words = 1;
  }
  v.include = ranges.subspan(view.include_begin, view.n_include);
  v.exclude = ranges.subspan(view.exclude_begin, view.n_exclude);
  return v;
}

uint32_t AttendWork::add_heads(uint32_t view_index, uint32_t first_head, uint64_t* n_left) {
  const View& view = views_[view_index];
  const uint32_t layer_index = request_->layer_begin;
  const Layer& layer = space_->layers[layer_index];
  const HeadClass& cls = space_->head_class(layer_index, view.class_index);
  const tiers::SlabClass& slab = cls.slab_class;
  const kvm_item& item = request_->items[view.item];
  const StepTensors& t = *tensors_;
  Head head;
  head.view = view_index;
  head.row = item.query_row + view.first_row;
  attention::Problem& p = head.problem;
  p.dtype_q = t.q.dtype;
  p.q_stride_query = t.q.stride_row;
  p.q_stride_head = t.q.stride_head;
  p.n_query = view.n_rows;
  p.group = layer.group();
  p.item_rows = item.n_query * p.group;
  p.dim_k = space_->head_dim_k;
  p.dim_v = space_->head_dim_v;
  p.scale = scale_;
  p.softcap = space_->logit_softcap;
  p.visible = visibility(view);
  p.runs = KvRuns(runs_).subspan(view.run_begin, view.n_runs);
  if (view.transforms_at != kNotShared) {
    QueryTransform& turn = transforms_[view.transforms_at + 1];
    turn.cos = rotations_.data() + rotation_at_[view.transforms_at / 2];
    turn.sin = turn.cos + uint64_t{view.n_rows} * turn.n_pairs;
    p.transforms = std::span(transforms_).subspan(view.transforms_at, 2);
  }
  p.log_weight_head_stride = slab.has_log_weights ? kPageTokens : 0;
  p.fp32_weights = (request_->flags & KVM_STEP_F32_VALUES) != 0;
  const uint64_t key_bytes = slab.token_bytes();
  // Something for the rows themselves, so that many rows without keys count as well.
  head.cost = exact_cost(view) + uint64_t{64} * view.n_rows * p.group;
  if (cls.retention.kind == KVM_RETAIN_HEAVY && view.n_runs != 0 && view.n_rows != 0) {
    static float unknown;  // plans depend on whether there are sums; where comes later
    head.wants_sums = true;
    head.sums_later = head.cost >= kMinSumsCost;
    head.n_positions = p.runs.back().position + p.runs.back().n_tokens - p.runs[0].position;
    p.column_sums = &unknown;
    p.column_position = p.runs[0].position;
  }
  p.dtype_o = t.o.dtype;
  p.o_stride_query = t.o.stride_row;
  p.o_stride_head = t.o.stride_head;
  p.lse_stride_query = t.lse.stride_row;
  p.lse_stride_head = t.lse.stride_head;
  const float* sinks = space_->layer_sink_logits(layer_index);
  const auto n_heads = static_cast<uint32_t>(cls.kv_heads.size());
  KVM_ASSERT(first_head <= n_heads && view.first_row + view.n_rows <= item.n_query);
  KVM_ASSERT(view.index_begin == kNotShared || view.index_begin + n_heads <= indexes_.size());
  for (uint32_t h = first_head; h < n_heads; ++h) {
    if (*n_left == 0) {
      return h;
    }
    *n_left -= std::min<uint64_t>(*n_left, 1 + (view.index_begin != kNotShared ? view.n_runs : 0));
    head.q_head = cls.kv_heads[h] * p.group;
    p.head = h;
    p.q = t.q.at(0, head.row, head.q_head);
    p.o = t.o.at(0, head.row, head.q_head);
    p.lse =
        t.lse.is_present() ? reinterpret_cast<float*>(t.lse.at(0, head.row, head.q_head)) : nullptr;
    p.sink_logits = sinks == nullptr ? nullptr : sinks + head.q_head;
    n_keys_ += view.n_keys;
    if (view.index_begin != kNotShared &&
        add_approx(head, cls.kv_heads[h], indexes_[view.index_begin + h])) {
      continue;
    }
    head.plan = attention::make_plan(p);
    heads_.push_back(head);
    cost_ += head.cost;
    n_exact_keys_ += view.n_keys;
    n_exact_bytes_ += view.n_keys * key_bytes;
    n_exact_rows_ += uint64_t{view.n_rows} * p.group;
  }
  return n_heads;
}

// Returns the cost of one head, in bytes.
uint64_t AttendWork::exact_cost(const View& view) const {
  const uint32_t layer = request_->layer_begin;
  const uint64_t rows = uint64_t{view.n_rows} * space_->layers[layer].group();
  const uint64_t dims = uint64_t{space_->head_dim_k} + space_->head_dim_v;
  const uint64_t key_bytes = space_->head_class(layer, view.class_index).slab_class.token_bytes();
  return std::max(view.n_cost_keys * key_bytes, 2 * view.n_cost_keys * rows * dims / kFlopsPerByte);
}

bool AttendWork::has_index(const View& view, uint32_t head) const {
  if (view.index_begin == kNotShared) {
    return false;
  }
  const IndexPart& part = indexes_[view.index_begin + head];
  return part.n_sketches + part.n_hashes != 0;
}

// --- AUTO ---------------------------------------------------------------------------------------

ProblemCost AttendWork::problem_cost(const View& view, const IndexPart& part) const {
  const uint32_t layer = request_->layer_begin;
  const tiers::SlabClass& slab = space_->head_class(layer, view.class_index).slab_class;
  ProblemCost cost;
  cost.rows = view.n_rows * space_->layers[layer].group();
  cost.dim = space_->head_dim_k + space_->head_dim_v;
  cost.row_bytes = slab.token_bytes();
  cost.is_scaled = dtype_is_scaled(slab.dtype_k) && dtype_is_scaled(slab.dtype_v);
  cost.is_hashed = part.n_hashes != 0;
  cost.n_present = view.n_cost_keys;
  for (size_t i = 0; i < part.n_sketches; ++i) {
    cost.n_indexed += uint64_t{sketches_[part.sketch_begin + i].n_blocks} * kPageTokens;
  }
  for (size_t i = 0; i < part.n_hashes; ++i) {
    cost.n_indexed += hashes_[part.hash_begin + i].n_keys;
  }
  cost.n_indexed = std::min(cost.n_indexed, cost.n_present);
  cost.exact_bytes = exact_cost(view);
  return cost;
}

void AttendWork::share_time() {
  const CostModel& model = costs_->model();
  double all = 0;
  double indexed = 0;
  for (const View& view : views_) {
    const double each = exact_ns(model, problem_cost(view, IndexPart{}));
    const HeadClass& cls = space_->head_class(request_->layer_begin, view.class_index);
    for (uint32_t h = 0; h < cls.kv_heads.size(); ++h) {
      all += each;
      indexed += has_index(view, h) ? each : 0;
    }
  }
  const double time = static_cast<double>(request_->budget) * costs_->n_threads();
  const double left = std::max(0.0, time - (all - indexed));
  time_share_ = all <= time || indexed <= 0 ? 1.0 : left / indexed;
}

// Sets mode and numbers; false where exact is to be preferred.
bool AttendWork::choose(const View& view, const IndexPart& part,
                        attention::ApproxParams* params) const {
  const CostModel& model = costs_->model();
  const ProblemCost cost = problem_cost(view, part);
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

// Returns the mode that most rows got.
uint32_t AttendWork::auto_mode() const {
  uint64_t n_rows[KVM_MODE_AUTO] = {};
  for (const ApproxHead& head : approx_) {
    n_rows[head.mode] += head.plan.rows - head.report.n_exact;
  }
  const auto* most = std::max_element(std::begin(n_rows), std::end(n_rows));
  return *most == 0 ? uint32_t{KVM_MODE_EXACT} : static_cast<uint32_t>(most - std::begin(n_rows));
}

// --- Approximate problems -----------------------------------------------------------------------

// The plan of a head is as a rule that of the one before: planning looks at all pages.
attention::ApproxPlan AttendWork::plan_like_last(const ApproxHead& head) const {
  if (!approx_.empty() && approx_.back().view == head.view) {
    attention::ApproxInput last = approx_.back().input;
    last.problem = &approx_.back().problem;
    if (attention::same_plan(head.input, last)) {
      const attention::ApproxPlan& plan = approx_.back().plan;
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

// Whether the problem is one to approximate.
bool AttendWork::add_approx(const Head& head, uint32_t kv_head, const IndexPart& part) {
  if (part.n_sketches + part.n_hashes == 0) {
    return false;
  }
  const uint32_t layer = request_->layer_begin;
  const IndexConfig config = space_->index(layer, kv_head);
  ApproxHead approx;
  approx.problem = head.problem;
  approx.view = head.view;
  approx.row = head.row;
  approx.q_head = head.q_head;
  attention::ApproxInput& input = approx.input;
  input.problem = &head.problem;
  input.index.sketches = std::span(sketches_).subspan(part.sketch_begin, part.n_sketches);
  input.index.hashes = std::span(hashes_).subspan(part.hash_begin, part.n_hashes);
  input.index.planes = space_->planes.get();
  attention::ApproxParams& params = input.params;
  params.mode = request_->mode == KVM_MODE_TOPK      ? attention::ApproxMode::kTopK
                : request_->mode == KVM_MODE_SAMPLED ? attention::ApproxMode::kSampled
                                                     : attention::ApproxMode::kVerified;
  params.proposal = part.n_hashes != 0 ? attention::Proposal::kLsh : attention::Proposal::kSketch;
  params.eps = request_->eps != 0 ? request_->eps : params.eps;
  params.delta = request_->delta != 0 ? request_->delta : params.delta;
  params.budget = request_->budget;
  if (request_->mode == KVM_MODE_AUTO && !choose(views_[head.view], part, &params)) {
    return false;
  }
  approx.mode = params.mode == attention::ApproxMode::kTopK      ? KVM_MODE_TOPK
                : params.mode == attention::ApproxMode::kSampled ? KVM_MODE_SAMPLED
                                                                 : KVM_MODE_VERIFIED;
  params.seed = mix_seed(request_->seed, layer, kv_head);
  params.n_sinks = config.n_sinks;
  params.n_recent = config.n_recent;
  approx.plan = plan_like_last(approx);
  if (approx.plan.exact) {
    return false;
  }
  if (part.n_hashes != 0) {
    uint64_t& cost_bytes = approx.plan.cost_bytes;
    cost_bytes = std::max(cost_bytes, approx.plan.n_keys_indexed * kLookupBytes);
  }
  scratch_bytes_ = std::max(scratch_bytes_, approx.plan.scratch_bytes);
  n_shards_ += approx.plan.n_shards;
  cost_ += approx.plan.cost_bytes;
  approx_.push_back(approx);
  return true;
}

}  // namespace kvm::engine
