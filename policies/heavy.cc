// SPDX-License-Identifier: Apache-2.0
#include "policies/heavy.h"

#include <algorithm>
#include <vector>

#include "base/assert.h"

namespace kvm::policies {
namespace {

// Tokens that one choice looks at, besides those kept before; more are chosen from in turn, which
// comes to the same where those that go are dropped.
constexpr uint64_t kMaxChosenFrom = 16 << 10;
constexpr uint64_t kMaxMergedFrom = 1 << 10;

struct Candidate {
  uint64_t position = 0;
  double mass = 0;
};

class Heavy : public Policy {
 public:
  EventSet events() const override { return event_bit(Event::kCommitted); }
  bool decides_by_list() const override { return true; }

  void decide(const View& view, ActionList* actions) const override {
    actions->next_commit = UINT64_MAX;
    for (const ListView& list : view.lists) {
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

 private:
  static double mass_of(const ListView& list, uint64_t position, double own) {
    const bool is_seen = position < list.n_columns;
    return own + (is_seen ? static_cast<double>(
                                list.column_sums[position * list.n_kv_heads + list.kv_heads[0]])
                          : 0.0);
  }

  // False when the list of actions is full.
  static bool choose(const ListView& list, PositionRange aged, ActionList* actions) {
    const uint64_t most = list.merges ? kMaxMergedFrom : kMaxChosenFrom;
    std::vector<Candidate> candidates;
    for (const StoredRange& stored : list.stored) {
      PositionRange range = {std::max(aged.begin, stored.positions.begin),
                             std::min(aged.end, stored.positions.end)};
      if (candidates.empty() && range.begin < range.end && aged.end - range.begin > most) {
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
    if (candidates.empty()) {
      return true;
    }
    const PositionRange range = {candidates.front().position, candidates.back().position + 1};
    for (const KeptToken& token : list.kept) {
      const double own = static_cast<double>(token.mass);
      candidates.push_back({token.position, mass_of(list, token.position, own)});
    }
    const size_t n = std::min<size_t>(list.n_heavy, candidates.size());
    std::nth_element(candidates.begin(), candidates.begin() + static_cast<ptrdiff_t>(n),
                     candidates.end(), [](const Candidate& a, const Candidate& b) {
                       return a.mass > b.mass || (a.mass == b.mass && a.position < b.position);
                     });
    const size_t first = actions->kept.size();
    for (size_t i = 0; i < n; ++i) {
      actions->kept.push_back(candidates[i].position);
    }
    if (actions->add({.kind = ActionKind::kKeep,
                      .layer = list.layer,
                      .class_index = list.class_index,
                      .range = range,
                      .first_kept = first,
                      .n_kept = n})) {
      std::sort(actions->kept.begin() + static_cast<ptrdiff_t>(first), actions->kept.end());
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
