// SPDX-License-Identifier: Apache-2.0
#include "policies/settle.h"

#include <algorithm>

namespace kvm::policies {
namespace {

class Settle : public Policy {
 public:
  EventSet events() const override { return event_bit(Event::kCommitted); }
  bool decides_by_list() const override { return true; }

  void decide(const View& view, ActionList* actions) const override {
    actions->next_commit = (view.n_committed / kPageTokens + 1) * kPageTokens;
    for (const ListView& list : view.lists) {
      const uint64_t end = list.full_pages(view.n_committed);
      if (list.settled_end < end && !actions->add({.kind = ActionKind::kDemote,
                                                   .layer = list.layer,
                                                   .class_index = list.class_index,
                                                   .range = {list.settled_end, end},
                                                   .codec_k = list.codec_k,
                                                   .codec_v = list.codec_v})) {
        return;
      }
    }
  }
};

}  // namespace

const Policy& settle() {
  static const Settle policy;
  return policy;
}

}  // namespace kvm::policies
