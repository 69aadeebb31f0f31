// SPDX-License-Identifier: Apache-2.0
#include "policies/sinks_recent.h"

#include <algorithm>

namespace kvm::policies {
namespace {

class Full : public Policy {
 public:
  EventSet events() const override { return 0; }
  void decide(const View&, ActionList* actions) const override {
    actions->next_commit = UINT64_MAX;
  }
};

// Takes the pages out of the middle.
class SinksRecent : public Policy {
 public:
  explicit SinksRecent(ActionKind kind) : kind_(kind) {}
  EventSet events() const override { return event_bit(Event::kCommitted); }
  bool decides_by_list() const override { return true; }

  void decide(const View& view, ActionList* actions) const override {
    actions->next_commit = UINT64_MAX;
    for (const ListView& list : view.lists) {
      const uint64_t kept = list.n_recent + list.slack;
      const uint64_t limit = view.n_committed > kept ? view.n_committed - kept : 0;
      const uint64_t begin = (list.n_sinks + kPageTokens - 1) / kPageTokens * kPageTokens;
      const uint64_t end = std::max(begin, limit / kPageTokens * kPageTokens);
      for (const StoredRange& stored : list.stored) {
        // A page may begin in its middle (after a cut inside a dropped one); it goes whole.
        const uint64_t first_page = stored.positions.begin / kPageTokens * kPageTokens;
        const PositionRange range = {std::max(begin, first_page),
                                     list.full_pages(std::min(end, stored.positions.end))};
        if (range.begin >= range.end) {
          continue;
        }
        if (!actions->add({.kind = kind_,
                           .layer = list.layer,
                           .class_index = list.class_index,
                           .range = range})) {
          return;
        }
      }
      actions->next_commit = std::min(actions->next_commit, end + kPageTokens + kept);
    }
  }

 private:
  ActionKind kind_;
};

}  // namespace

const Policy& full() {
  static const Full policy;
  return policy;
}

const Policy& sinks_recent() {
  static const SinksRecent policy(ActionKind::kDrop);
  return policy;
}

const Policy& sinks_recent_fold() {
  static const SinksRecent policy(ActionKind::kFold);
  return policy;
}

}  // namespace kvm::policies
