// SPDX-License-Identifier: Apache-2.0
#include "policies/sinks_recent.h"

#include <algorithm>

namespace kvm::policies {
namespace {

class Full : public Policy {
 public:
  const char* name() const override { return "full"; }
  EventSet events() const override { return 0; }
  void decide(const View&, ActionList* actions) const override {
    actions->next_commit = UINT64_MAX;
  }
};

class SinksRecent : public Policy {
 public:
  const char* name() const override { return "sinks_recent"; }
  EventSet events() const override { return event_bit(Event::kCommitted); }

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
                                     std::min(end, stored.positions.end)};
        if (range.begin >= range.end) {
          continue;
        }
        if (!actions->add({.kind = ActionKind::kDrop,
                           .layer = list.layer,
                           .class_index = list.class_index,
                           .range = range})) {
          return;
        }
      }
      actions->next_commit = std::min(actions->next_commit, end + kPageTokens + kept);
    }
  }
};

}  // namespace

const Policy& full() {
  static const Full policy;
  return policy;
}

const Policy& sinks_recent() {
  static const SinksRecent policy;
  return policy;
}

}  // namespace kvm::policies
