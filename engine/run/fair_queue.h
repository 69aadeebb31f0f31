// SPDX-License-Identifier: Apache-2.0
// A FairQueue says whose request starts next, where several clients have some that are ready.
//
// Deficit round robin (Shreedhar and Varghese, SIGCOMM 1995): a client's turn adds kQuantum bytes
// to what it may start, and it starts requests in their order while their costs fit; who has
// nothing ready keeps nothing. So each client starts the same number of bytes a round, whatever the
// size of its requests. Who is the only one with something ready has every turn.
//
// Threads: the driver.
#ifndef KVM_ENGINE_RUN_FAIR_QUEUE_H_
#define KVM_ENGINE_RUN_FAIR_QUEUE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/run/request.h"

namespace kvm::engine {

class FairQueue {
 public:
  // A turn is worth so many bytes of K and V, as Request::cost counts them.
  static constexpr uint64_t kQuantum = uint64_t{16} << 20;

  // A Flow is a client's requests that are ready. REQUIRES: neither moved nor destroyed while it
  // holds requests.
  struct Flow {
    RequestLine ready;
    uint64_t deficit = 0;  // what it may start before others have their turn
    bool is_in_round = false;
    uint32_t n_running = 0;  // for the caller: started, and not finished
    uint32_t n_next = 0;     // likewise: started, and to run before others do
  };

  // So that push throws nothing while no more than n_flows are in use. Throws std::bad_alloc.
  void reserve(size_t n_flows) { round_.reserve(n_flows); }

  void push(Flow* flow, Request* request);

  // Takes the next request of those flows for which may_start(flow) holds; null: there is none.
  // A flow that may not start anything keeps its place and its deficit.
  template <typename MayStart>
  Request* take(MayStart may_start) {
    Flow* flow = next(may_start);
    return flow == nullptr ? nullptr : take_from(flow);
  }

  // Whether take() would find one.
  template <typename MayStart>
  bool any(MayStart may_start) const {
    return std::any_of(round_.begin(), round_.end(),
                       [&](const Flow* flow) { return !flow->ready.empty() && may_start(*flow); });
  }

  // Forgets a flow's requests.
  void clear(Flow* flow);

 private:
  template <typename MayStart>
  Flow* next(MayStart may_start) {
    for (size_t n_looked = 0; n_looked < round_.size();) {
      Flow* flow = round_.front();
      if (flow->ready.empty()) {  // its requests have left by themselves: they were cancelled
        leave(flow);
        continue;
      }
      if (may_start(*flow)) {
        if (round_.size() == 1 || flow->deficit >= flow->ready.front().cost) {
          return flow;
        }
        flow->deficit += kQuantum;
        n_looked = 0;  // its turn comes, after enough of them
      } else {
        ++n_looked;
      }
      std::rotate(round_.begin(), round_.begin() + 1, round_.end());
    }
    return nullptr;
  }
  Request* take_from(Flow* flow);
  void leave(Flow* flow);

  std::vector<Flow*> round_;  // with requests that are ready, in the order of their turns
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_FAIR_QUEUE_H_
