// SPDX-License-Identifier: Apache-2.0
// RoomLine: requests that found no room for what they append, in the order in which they came. One
// that stands here has begun nothing: it holds no page, no turn to run, and reads nothing.
//
// Threads: the driver.  Memory: links in the requests.
#ifndef KVM_ENGINE_RUN_ROOM_LINE_H_
#define KVM_ENGINE_RUN_ROOM_LINE_H_

#include <cstdint>

#include "engine/run/request.h"

namespace kvm::engine {

class RoomLine {
 public:
  bool is_empty() const { return line_.empty(); }
  // REQUIRES: !is_empty().
  Request* front() { return &line_.front(); }
  // Lines a step up; one that stood here before has its place again. Returns whether it is here for
  // the first time.
  bool enter(Request* request);
  // It stands here no more, as Request::is_parked says.
  void leave(Request* request);

  // There may be room for the first one, or for none, since it was seen last.
  void note_news() { has_news_ = true; }
  void forget_news() { has_news_ = false; }
  bool has_to_serve() const { return has_news_ && !line_.empty(); }

  // None has an earlier deadline; UINT64_MAX: none has one.
  uint64_t deadline_ns() const { return line_.empty() ? UINT64_MAX : deadline_ns_; }
  // One whose deadline has come, which still stands here; null: there is none. O(those that stand
  // here) where deadline_ns() has come.
  Request* find_expired(uint64_t now_ns);

 private:
  RequestLine line_;  // by Request::room_number
  bool has_news_ = false;
  uint64_t deadline_ns_ = UINT64_MAX;
  uint64_t n_entered_ = 0;  // ever, each once
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_ROOM_LINE_H_
