// SPDX-License-Identifier: Apache-2.0
#include "policies/heavy.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/assert.h"

namespace kvm::policies {
namespace {

// Tokens that one choice looks at, besides those kept before; more are chosen from in turn, which
// comes to the same where those that go are dropped.
constexpr uint64_t kMaxChosenFrom = 8 << 10;
constexpr uint64_t kMaxMergedFrom = 1 << 10;
// Of these 16 pages at most are made before the old ones go.
constexpr uint64_t kMaxDemotedFrom = 1 << 10;
// LIMIT: tokens measured at a time: 0.10 ms on a core of Zen 5 (98,304: 0.56 ms).
constexpr uint64_t kMaxMeasured = 16 << 10;

struct Candidate {
  uint64_t position = 0;
  double mass = 0;
};

// Appends the positions of the n with the most mass, of equal ones the first, in their order.
void append_heaviest(std::span<const Candidate> candidates, size_t n,
                     std::vector<uint64_t>* positions) {
  if (n == 0) {
    return;
  }
  std::vector<double> masses;
  masses.reserve(candidates.size());
  for (const Candidate& candidate : candidates) {
    masses.push_back(candidate.mass);
  }
  const auto last = masses.begin() + static_cast<ptrdiff_t>(n - 1);
  std::nth_element(masses.begin(), last, masses.end(), std::greater<>());
  const double least = *last;
  auto n_equal = n - static_cast<size_t>(std::count_if(
                         masses.begin(), last, [least](double mass) { return mass > least; }));
  const size_t n_wanted = positions->size() + n;
  positions->reserve(n_wanted);
  for (const Candidate& candidate : candidates) {
    const bool is_equal = candidate.mass == least && n_equal != 0;
    n_equal -= is_equal ? 1 : 0;
    if (is_equal || candidate.mass > least) {
      positions->push_back(candidate.position);
    }
  }
  KVM_ASSERT(positions->size() == n_wanted);
}

// One layer's share, and the lists of `lists` that it is about.
struct LayerShare {
  size_t begin = 0;
  size_t end = 0;
  double share = 0;
};

// D2O's F: how uneven attention is within a layer, 0 to 1.
double unevenness(std::span<const Measured> lists) {
  double lowest = HUGE_VAL;
  double highest = -HUGE_VAL;
  double sum = 0;
  uint32_t n = 0;
  for (const Measured& list : lists) {
    if (list.shares_budget) {
      lowest = std::min(lowest, list.measure);
      highest = std::max(highest, list.measure);
      sum += list.measure;
      ++n;
    }
  }
  const double range = highest - lowest;
  return n != 0 && range > 0 ? (sum / n - lowest) / range : 0.0;
}

// Of `total` tokens of each list of all layers together, those of one layer: cumulated shares are
// rounded, so that nothing gets lost on the way.
uint64_t part_of(uint64_t n, double before, double after) {
  const auto rounded = [n](double share) {
    return static_cast<uint64_t>(std::llround(share * static_cast<double>(n)));
  };
  return std::max<uint64_t>(1, rounded(after) - rounded(before));
}

class Heavy : public Policy {
 public:
  EventSet events() const override {
    return event_bit(Event::kCommitted) | event_bit(Event::kPromptEnd);
  }
  bool decides_by_list() const override { return true; }

  void decide(const View& view, ActionList* actions) const override {
    actions->next_commit = UINT64_MAX;
    for (const ListView& list : view.lists) {
      if (view.event == Event::kPromptEnd) {
        if (list.awaits_share) {
          measure(list, actions);
        }
        continue;
      }
      if (list.awaits_share) {
        continue;
      }
      const uint64_t n_last = list.n_recent + list.slack;
      const uint64_t limit = view.n_committed > n_last ? view.n_committed - n_last : 0;
      const uint64_t begin = (list.n_sinks + kPageTokens - 1) / kPageTokens * kPageTokens;
      const uint64_t end = std::max(begin, limit / kPageTokens * kPageTokens);
      if (!choose(list, {begin, list.full_pages(end)}, actions)) {
        return;
      }
      actions->next_commit = std::min(actions->next_commit, end + kPageTokens + n_last);
    }
  }

  void share_out(std::span<Measured> lists) const override {
    std::vector<LayerShare> layers;
    double sum = 0;
    for (size_t begin = 0, end = 0; begin < lists.size(); begin = end) {
      bool shares = false;
      for (; end < lists.size() && lists[end].layer == lists[begin].layer; ++end) {
        shares = shares || lists[end].shares_budget;
      }
      if (shares) {
        const double weight = std::exp(-unevenness(lists.subspan(begin, end - begin)));
        layers.push_back({begin, end, weight});
        sum += weight;
      }
    }
    double before = 0;
    double weights = 0;
    for (const LayerShare& layer : layers) {
      weights += layer.share;
      const double after = static_cast<double>(layers.size()) * (weights / sum);
      for (Measured& list : lists.subspan(layer.begin, layer.end - layer.begin)) {
        if (list.shares_budget) {
          list.budget = {part_of(list.budget.n_recent, before, after),
                         part_of(list.budget.n_heavy, before, after)};
        }
      }
      before = after;
    }
  }

 private:
  // The attention mass of the tokens that queries have given some to, or might have.
  static void measure(const ListView& list, ActionList* actions) {
    const uint64_t first = (list.n_sinks + kPageTokens - 1) / kPageTokens * kPageTokens;
    const uint64_t begin = std::max(first, list.measured_end);
    const uint64_t end = std::max(begin, std::min(list.length, begin + kMaxMeasured));
    Moments moments;
    for (uint64_t x = begin; x < end; ++x) {
      const bool is_known = x >= list.mass_begin && x - list.mass_begin < list.masses.size();
      const double own = is_known ? static_cast<double>(list.masses[x - list.mass_begin]) : 0.0;
      moments.add(mass_of(list, x, own));
    }
    actions->add({.kind = ActionKind::kMeasure,
                  .layer = list.layer,
                  .class_index = list.class_index,
                  .range = {begin, end},
                  .moments = moments});
    actions->more = end < list.length;
  }

  static double mass_of(const ListView& list, uint64_t position, double own) {
    const bool is_seen = position < list.n_columns;
    return own + (is_seen ? static_cast<double>(
                                list.column_sums[position * list.n_kv_heads + list.kv_heads[0]])
                          : 0.0);
  }

  // False when the list of actions is full.
  static bool choose(const ListView& list, PositionRange aged, ActionList* actions) {
    const uint64_t most = list.merges    ? kMaxMergedFrom
                          : list.demotes ? kMaxDemotedFrom
                                         : kMaxChosenFrom;
    // What was kept before lies before what is to be chosen from: positions are in order.
    std::vector<Candidate> candidates;
    candidates.reserve(list.kept.size() +
                       std::min(most, aged.end - std::min(aged.begin, aged.end)));
    for (const KeptToken& token : list.kept) {
      const double own = static_cast<double>(token.mass);
      candidates.push_back({token.position, mass_of(list, token.position, own)});
    }
    const size_t n_before = candidates.size();
    for (const StoredRange& stored : list.stored) {
      PositionRange range = {std::max({aged.begin, list.chosen_end, stored.positions.begin}),
                             std::min(aged.end, stored.positions.end)};
      if (candidates.size() == n_before && range.begin < range.end &&
          aged.end - range.begin > most) {
        aged.end = range.begin + most;
        range.end = std::min(range.end, aged.end);
        actions->more = true;
      }
      for (uint64_t x = range.begin; x < range.end; ++x) {
        const bool is_known = x >= list.mass_begin && x - list.mass_begin < list.masses.size();
        const double own = is_known ? static_cast<double>(list.masses[x - list.mass_begin]) : 0.0;
        candidates.push_back({x, mass_of(list, x, own)});
      }
    }
    if (candidates.size() == n_before) {
      return true;
    }
    const PositionRange range = {candidates[n_before].position, candidates.back().position + 1};
    const size_t n = std::min<size_t>(list.n_heavy, candidates.size());
    const size_t first = actions->kept.size();
    append_heaviest(candidates, n, &actions->kept);
    if (actions->add({.kind = ActionKind::kKeep,
                      .layer = list.layer,
                      .class_index = list.class_index,
                      .range = range,
                      .first_kept = first,
                      .n_kept = n})) {
      return true;
    }
    actions->kept.resize(first);
    return false;
  }
};

}  // namespace

const Policy& heavy() {
  static const Heavy policy;
  return policy;
}

}  // namespace kvm::policies
