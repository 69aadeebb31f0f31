// SPDX-License-Identifier: Apache-2.0
// The items of a request become views.
#include "engine/attend/attend_planner.h"
#include "engine/index/sequence_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <span>

#include "base/assert.h"
#include "base/counted.h"
#include "base/round.h"
#include "codecs/codec.h"

namespace kvm::engine {
namespace {

// An item with more rows than so many approximate problems take is answered exactly: that reads
// every key once for all of them.
constexpr uint32_t kMaxApproxViews = 8;
// Views of a request beyond one for each (item, head class).
constexpr size_t kMaxExtraViews = 4096;
// Pages and position ranges of all views: what a request's lists may take, about 100 MB and 16 MB.
constexpr size_t kMaxListedPages = 2 << 20;
constexpr size_t kMaxListedRanges = 1 << 20;

// Bytes of n_keys tokens of the runs in one head. Where pages of a list are stored in two ways,
// each counts as the mean of all.
uint64_t key_bytes(const HeadClass& head_class, KvRuns runs, uint64_t n_keys) {
  const tiers::SlabClass& slab_class = head_class.slab_class;
  if (!head_class.has_classes() || runs.empty()) {
    return n_keys * slab_class.token_bytes();
  }
  uint64_t n_tokens = 0;
  uint64_t n_bytes = 0;
  for (const KvRun& run : runs) {
    n_tokens += run.n_tokens;
    tiers::SlabClass stored = slab_class;
    stored.codec_k = run.k.codec;
    stored.codec_v = run.v.codec;
    n_bytes += run.n_tokens * stored.token_bytes();
  }
  return n_keys * n_bytes / n_tokens;
}

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

// Ranges ask for tokens by their positions, which demoted ones have lost.
Status check_ranges(const Space& space, uint32_t layer, uint32_t index, const kvm_item& item) {
  const std::vector<HeadClass>& classes = space.storage(layer).classes;
  const auto demoting = std::find_if(classes.begin(), classes.end(),
                                     [](const HeadClass& of) { return of.demotes(); });
  if (item.n_ranges == 0 || demoting == classes.end()) {
    return Status::ok();
  }
  return {KVM_ERR_UNSUPPORTED,
          fmt::format("item {} has {}, and kv head {} of layer {} KVM_MERGE_DEMOTED: where demoted "
                      "tokens were is not kept; ask for all",
                      index, counted(item.n_ranges, "range"), demoting->kv_heads[0], layer)};
}

}  // namespace

SeenPart seen_part(const StepRequest& request, const kvm_item& item, uint64_t first_query) {
  const bool is_causal = (item.flags & KVM_ITEM_NOT_CAUSAL) == 0;
  return {.first_query = first_query,
          .end = is_causal ? first_query + item.n_query : KVM_POSITION_END,
          .ranges = std::span(request.ranges).subspan(item.range_begin, item.n_ranges),
          .excludes = item.n_ranges == 0 || (item.flags & KVM_ITEM_EXCLUDE_RANGES) != 0};
}

Status AttendPlanner::plan_items(const Store& store, uint64_t* n_left) {
  for (; next_item_ < request_->items.size() && *n_left != 0; ++next_item_) {
    if (request_->items[next_item_].n_query != 0) {
      const size_t n_before = plan_->runs.size() + plan_->sketches.size();
      KVM_TRY(add_item(store, next_item_, seqs_[next_item_]));
      *n_left -=
          std::min<uint64_t>(*n_left, plan_->runs.size() + plan_->sketches.size() - n_before + 1);
      KVM_TRY(plan_->check_size(other_bytes()));
    }
  }
  return Status::ok();
}

Status AttendPlanner::add_item(const Store& store, uint32_t index, const Sequence* seq) {
  const kvm_item& item = request_->items[index];
  const uint32_t layer = request_->layer_begin;
  space_ = &store.seq_space(seq);
  scale_ = request_->scale != 0 ? request_->scale : space_->layers[layer].softmax_scale;
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
  KVM_TRY(store.check_visible(seq, layer, seen_part(*request_, item, view.position)));
  KVM_TRY(check_ranges(*space_, layer, index, item));
  plan_->n_rows += item.n_query;
  add_ranges(item, &view);
  return add_views(store, seq, view);
}

// One view per head class and rule. A class's rule changes with the position of the query only
// where a layer's window is longer than what a head retains.
Status AttendPlanner::add_views(const Store& store, const Sequence* seq, const View& whole) {
  const uint32_t layer = request_->layer_begin;
  const auto n_classes = static_cast<uint32_t>(space_->storage(layer).classes.size());
  const kvm_item& item = request_->items[whole.item];
  const bool sees_nothing =
      item.n_ranges != 0 && whole.include.is_empty() && (item.flags & KVM_ITEM_EXCLUDE_RANGES) == 0;
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
      view.runs = {.begin = plan_->runs.size()};
      away_.clear();
      if (!sees_nothing) {
        KVM_TRY(collect_runs(store, seq, &view));
      }
      add_away(&view);
      const bool is_turned = view.first_row >= n_plain;
      if (is_turned) {
        turn_sinks(view.runs.begin, retention(view).n_sinks);
      }
      view.runs.n = plan_->runs.size() - view.runs.begin;
      KVM_CHECK_INVARIANT(are_in_order(view.runs.in(plan_->runs)));
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
    count_keys(first_view, view.runs.in(plan_->runs));
  }
  return Status::ok();
}

Status AttendPlanner::collect_runs(const Store& store, const Sequence* seq, View* view) {
  store.collect_runs(seq, request_->layer_begin, view->class_index, &plan_->runs, is_packed(*view),
                     &away_);
  if (plan_->runs.size() > kMaxListedPages) {
    return {KVM_ERR_LIMIT,
            fmt::format("the items up to {} see more than {} pages of {} tokens in all; attend to "
                        "fewer at once",
                        view->item, kMaxListedPages, kPageTokens)};
  }
  return Status::ok();
}

// A view of which pages are away is answered exactly, as they come, unless its index alone says
// which rows are to be read.
void AttendPlanner::add_away(View* view) {
  if (away_.empty() || view->away != AttendPlan::kNoAway) {
    return;  // or the same pages as those of the rows before
  }
  // Whoever sent them may have known of another sequence only that has them, too.
  seqs_[view->item]->residence.has_away = true;
  view->away = static_cast<uint32_t>(plan_->aways.size());
  if (!may_draw(*view)) {
    view->indexes = {};
    view->max_rows = UINT32_MAX;
  }
  plan_->aways.push_back({.pages = {plan_->away_pages.size(), away_.size()}});
  plan_->away_pages.insert(plan_->away_pages.end(), away_.begin(), away_.end());
}

// Whether all heads of a view may be sampled though pages are away; AUTO has yet to choose.
bool AttendPlanner::may_draw(const View& view) const {
  const bool is_sampled = request_->mode == KVM_MODE_SAMPLED && request_->eps == 0;
  const auto has_sketch = [](const IndexPart& part) {
    return !part.sketches.is_empty() && part.hashes.is_empty();
  };
  return (is_sampled || request_->mode == KVM_MODE_AUTO) && request_->budget != 0 &&
         !view.indexes.is_empty() && std::ranges::all_of(view.indexes.in(indexes_), has_sketch);
}

const Retention& AttendPlanner::retention(const View& view) const {
  return space_->head_class(request_->layer_begin, view.class_index).retention;
}

// How many rows, the first ones, meet all keys as they were appended. Those behind them, which are
// nearer to the sinks in the cache, are other views: what a row meets is its own affair, whatever
// rows its item has.
uint32_t AttendPlanner::n_plain_rows(const View& view) const {
  const kvm_item& item = request_->items[view.item];
  const Retention& retention = this->retention(view);
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

// Finds the indexes of a view's heads, as many as its class has, and into how many rows the view is
// cut for them. Without any it stays as it is, and is answered exactly.
void AttendPlanner::add_index(const Store& store, const Sequence* seq, View* view) {
  const uint32_t layer = request_->layer_begin;
  const kvm_item& item = request_->items[view->item];
  // Larger groups are sampled in parts.
  const uint32_t most = std::max(1u, attention::kMaxApproxRows / space_->layers[layer].group());
  const bool is_one = item.n_query <= most;
  const bool is_several =
      item.n_query <= kMaxApproxViews * most && (item.flags & KVM_ITEM_TREE) == 0;
  if (request_->mode <= KVM_MODE_EXACT || !(is_one || is_several)) {
    return;
  }
  const HeadClass& cls = space_->head_class(layer, view->class_index);
  const size_t begin = indexes_.size();
  bool is_any = false;
  for (const uint16_t kv_head : cls.kv_heads) {
    IndexPart part;
    part.sketches.begin = plan_->sketches.size();
    part.hashes.begin = plan_->hashes.size();
    const bool is_hashed = space_->index(layer, kv_head).kind == KVM_INDEX_LSH;
    const uint32_t offered = is_hashed ? KVM_PROPOSAL_LSH : KVM_PROPOSAL_SKETCH;
    const bool is_asked =
        request_->proposal == KVM_PROPOSAL_DEFAULT || request_->proposal == offered;
    // Hash tables give no error bar that could be verified, or held against an error asked for.
    const bool needs_bar = request_->mode == KVM_MODE_VERIFIED ||
                           (request_->mode == KVM_MODE_AUTO && request_->budget == 0);
    if (is_asked && !(is_hashed && needs_bar)) {
      collect_head_index(seq, layer, kv_head, store.reserved_length(seq, layer), &plan_->sketches,
                         &plan_->hashes);
    }
    part.sketches.n = plan_->sketches.size() - part.sketches.begin;
    part.hashes.n = plan_->hashes.size() - part.hashes.begin;
    is_any |= !part.is_empty();
    indexes_.push_back(part);
  }
  if (!is_any) {
    indexes_.resize(begin);
    return;
  }
  view->indexes = {begin, cls.kv_heads.size()};
  view->max_rows = is_one ? UINT32_MAX : most;
}

// The rule for the rows from view->first_row on, and how many of them it covers.
Status AttendPlanner::choose_rule(const View& whole, View* view) {
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
  view->exclude = whole.exclude;
  exclude_dropped_sinks(view);
  if (plan_->ranges.size() > kMaxListedRanges) {
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
void AttendPlanner::count_keys(size_t first_view, KvRuns runs) {
  KVM_ASSERT(first_view < views_.size());
  View& first = views_[first_view];
  first.n_keys = visible_keys_.count(runs);
  first.n_key_bytes =
      key_bytes(space_->head_class(request_->layer_begin, first.class_index), runs, first.n_keys);
  if (views_.size() == first_view + 1) {
    first.n_cost_keys = first.n_keys;
    return;
  }
  const uint64_t n_stored = runs.size() * kPageTokens;
  for (size_t i = first_view; i < views_.size(); ++i) {
    View& view = views_[i];
    const uint64_t in_window = view.rule.window == 0 ? n_stored : view.rule.window + view.n_rows;
    view.n_cost_keys = std::min(n_stored, in_window + std::min(view.rule.n_sinks, n_stored));
  }
}

void AttendPlanner::add_ranges(const kvm_item& item, View* view) {
  const size_t begin = plan_->ranges.size();
  for (uint32_t i = 0; i < item.n_ranges; ++i) {
    const kvm_range& range = request_->ranges[item.range_begin + i];
    if (range.begin != range.end) {
      plan_->ranges.push_back({range.begin, range.end});
    }
  }
  const bool exclude = (item.flags & KVM_ITEM_EXCLUDE_RANGES) != 0;
  (exclude ? view->exclude : view->include) = {begin, plan_->ranges.size() - begin};
}

// Adds [0, first_sink) to what a view's rows do not see, in a list of its own.
void AttendPlanner::exclude_dropped_sinks(View* view) {
  const uint64_t first_sink = view->rule.first_sink;
  if (first_sink == 0) {
    return;
  }
  const size_t begin = plan_->ranges.size();
  plan_->ranges.push_back({0, first_sink});
  for (size_t i = 0; i < view->exclude.n; ++i) {
    const PositionRange range = plan_->ranges[view->exclude.begin + i];
    if (range.end > first_sink) {
      plan_->ranges.push_back({std::max(range.begin, first_sink), range.end});
    }
  }
  view->exclude = {begin, plan_->ranges.size() - begin};
}

// Runs from run_begin on are cut where the sinks of a head class end that has positions in the
// cache: queries are turned for those alone.
void AttendPlanner::turn_sinks(size_t run_begin, uint64_t n_sinks) {
  std::vector<KvRun>& runs = plan_->runs;
  for (size_t i = run_begin; i < runs.size() && runs[i].position < n_sinks; ++i) {
    runs[i].transform = 1;
    const uint64_t n = n_sinks - runs[i].position;
    if (n >= runs[i].n_tokens) {
      continue;
    }
    KvRun rest = runs[i];
    skip_tokens(&rest, n);
    rest.transform = 0;
    runs[i].n_tokens = static_cast<uint16_t>(n);
    runs.insert(runs.begin() + static_cast<ptrdiff_t>(i) + 1, rest);
    break;
  }
}

// How queries of the view meet the sinks: turned back by how much nearer they are to them.
Status AttendPlanner::add_rotation(View* view) {
  std::vector<float>& rotations = plan_->rotations;
  const Retention& retention = this->retention(*view);
  const bool is_tree = (request_->items[view->item].flags & KVM_ITEM_TREE) != 0;
  const std::vector<float>& inv_freq = space_->rope_inv_freq;
  const size_t n_pairs = inv_freq.size();
  const size_t n = view->n_rows * n_pairs;
  const size_t at = rotations.size();
  KVM_TRY(plan_->check_size((at + 2 * n) * sizeof(float)));
  rotations.resize(at + 2 * n);
  for (size_t pair = 0; pair < n_pairs; ++pair) {
    Turner turner(static_cast<double>(inv_freq[pair]));
    for (uint32_t row = 0; row < view->n_rows; ++row) {
      turner.turn_to(retention.shift(view->position + (is_tree ? 0 : row)));
      rotations[at + row * n_pairs + pair] = static_cast<float>(turner.cos());
      rotations[at + n + row * n_pairs + pair] = static_cast<float>(-turner.sin());
    }
  }
  view->rotations = {at, 2 * n};
  view->transforms = {plan_->transforms.size(), 2};
  QueryTransform turn;
  turn.n_pairs = static_cast<uint32_t>(n_pairs);
  turn.token_stride = turn.n_pairs;
  turn.layout = space_->rope_layout == KVM_ROPE_INTERLEAVED ? RotationLayout::kInterleaved
                                                            : RotationLayout::kHalfSplit;
  plan_->transforms.emplace_back();
  plan_->transforms.push_back(turn);
  return Status::ok();
}

attention::Visibility AttendPlanner::visibility(const View& view) const {
  const kvm_item& item = request_->items[view.item];
  attention::Visibility v;
  v.query_position = view.position;
  v.window = view.rule.window;
  v.sinks = view.rule.n_sinks;
  v.causal = (item.flags & KVM_ITEM_NOT_CAUSAL) == 0;
  if ((item.flags & KVM_ITEM_TREE) != 0) {
    v.tree = request_->tree_mask.data() + item.tree_begin;
    v.tree_stride_words = 1;
  }
  v.include = view.include.in(plan_->ranges);
  v.exclude = view.exclude.in(plan_->ranges);
  return v;
}

}  // namespace kvm::engine
