// SPDX-License-Identifier: Apache-2.0
#include "engine/run/fair_queue.h"

#include "base/assert.h"

namespace kvm::engine {

void FairQueue::push(Flow* flow, Request* request) {
  KVM_ASSERT(!request->LineHook::is_linked());
  flow->ready.push_back(*request);
  if (!flow->is_in_round) {
    flow->is_in_round = true;
    flow->deficit = 0;
    round_.push_back(flow);
  }
}

Request* FairQueue::take_from(Flow* flow) {
  KVM_ASSERT(flow->is_in_round && !flow->ready.empty());
  Request* request = &flow->ready.front();
  flow->ready.pop_front();
  flow->deficit -= std::min(flow->deficit, request->cost);
  if (flow->ready.empty()) {
    leave(flow);
  }
  return request;
}

void FairQueue::clear(Flow* flow) {
  flow->ready.clear();
  leave(flow);
}

void FairQueue::leave(Flow* flow) {
  const size_t n_places = std::erase(round_, flow);
  KVM_ASSERT(n_places == (flow->is_in_round ? 1 : 0));
  flow->is_in_round = false;
}

}  // namespace kvm::engine
