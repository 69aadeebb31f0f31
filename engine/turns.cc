// SPDX-License-Identifier: Apache-2.0
#include "engine/turns.h"

namespace kvm::engine {

void Turns::push(Queue* queue, Request* request) {
  queue->ready.push_back(*request);
  if (!queue->is_in_round) {
    queue->is_in_round = true;
    queue->deficit = 0;
    round_.push_back(queue);
  }
}

Request* Turns::take_from(Queue* queue) {
  Request* request = &queue->ready.front();
  queue->ready.pop_front();
  queue->deficit -= std::min(queue->deficit, request->cost);
  if (queue->ready.empty()) {
    leave(queue);
  }
  return request;
}

void Turns::clear(Queue* queue) {
  queue->ready.clear();
  leave(queue);
}

void Turns::leave(Queue* queue) {
  queue->is_in_round = false;
  std::erase(round_, queue);
}

}  // namespace kvm::engine
