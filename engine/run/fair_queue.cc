// SPDX-License-Identifier: Apache-2.0
#include "engine/run/fair_queue.h"

namespace kvm::engine {

void FairQueue::push(Flow* flow, Request* request) {
  flow->ready.push_back(*request);
  if (!flow->is_in_round) {
    flow->is_in_round = true;
    flow->deficit = 0;
    round_.push_back(flow);
  }
}

Request* FairQueue::take_from(Flow* flow) {
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
  flow->is_in_round = false;
  std::erase(round_, flow);
}

}  // namespace kvm::engine
