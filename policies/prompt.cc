// SPDX-License-Identifier: Apache-2.0
#include "policies/prompt.h"

#include <algorithm>

namespace kvm::policies {
namespace {

// It does not act on kPromptEnd, which is for those whose budgets are shared out then.
class Prompt : public Policy {
 public:
  EventSet events() const override { return event_bit(Event::kCommitted); }
  bool decides_by_list() const override { return true; }

  void decide(const View& view, ActionList* actions) const override {
    actions->next_commit = UINT64_MAX;
    for (const ListView& list : view.lists) {
      if (list.prompt_end > view.n_committed) {
        actions->next_commit = std::min(actions->next_commit, list.prompt_end);
        continue;
      }
      for (const StoredRange& stored : list.stored) {
        // A page may begin in its middle (after a cut inside a dropped one); it goes whole.
        const PositionRange range = {
            stored.positions.begin / kPageTokens * kPageTokens,
            list.full_pages(std::min(view.n_committed, stored.positions.end))};
        if (range.begin < range.end && !actions->add({.kind = ActionKind::kDrop,
                                                      .layer = list.layer,
                                                      .class_index = list.class_index,
                                                      .range = range})) {
          return;
        }
      }
      actions->next_commit =
          std::min(actions->next_commit, (view.n_committed / kPageTokens + 1) * kPageTokens);
    }
  }
};

}  // namespace

const Policy& prompt() {
  static const Prompt policy;
  return policy;
}

}  // namespace kvm::policies
