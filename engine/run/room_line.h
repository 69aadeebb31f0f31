// SPDX-License-Identifier: Apache-2.0
// RoomLine: requests that found no room for what they append. One that stands here has begun
// nothing: it holds no page, no turn to run, and reads nothing.
//
// Each client has a line of its own, in the order in which its requests came; its sequences' order
// follows from that, and from SequenceOrder. Room is offered to clients in turn, to the first of
// each line:
//
//   what is free is enough    it is served, and the client's next turn comes after all the others'
//   it is not enough          the client keeps its place, and others are looked at
//   it was, and did not do    the same, until more is free: memory that is free may be of pages of
//                             another kind, and tails that come back for an attempt go again
//
// So that a large one is not passed for ever, the first that finds too little in its turn is
// **favoured** until it is served: each that passes it must leave as much free as it takes, which
// is set aside for the favoured one. So it is passed with no more bytes than it needs itself, and
// whoever needs little gets half of what becomes free, at least, until then. Who is favoured next
// is found in the order of turns, from the one on that was served last.
//
// Each call is O(1), but for enter() of one that stood here before, and find_expired().
//
// Threads: the driver.  Memory: links in the requests and in what the caller has of clients.
#ifndef KVM_ENGINE_RUN_ROOM_LINE_H_
#define KVM_ENGINE_RUN_ROOM_LINE_H_

#include <boost/intrusive/list.hpp>
#include <cstdint>

#include "engine/run/request.h"

namespace kvm::engine {

class RoomLine {
  using RoundHook =
      boost::intrusive::list_base_hook<boost::intrusive::link_mode<boost::intrusive::auto_unlink>>;

 public:
  // A Flow is a client's line. It is in the round while somebody stands in it.
  struct Flow : RoundHook {
    RequestLine line;  // by Request::room_number
  };

  bool is_empty() const { return round_.empty(); }
  // Lines a step up in its client's line, which needs so many bytes of pages; one that stood here
  // before has its place again. Returns whether it is here for the first time.
  bool enter(Flow* flow, Request* request, uint64_t needed_bytes);
  // It stands here no more, as Request::is_parked says. The flow is its client's.
  void leave(Flow* flow, Request* request);

  // There may be room that was not there: each client has a turn.
  void note_news() { n_turns_ = n_flows_; }
  bool has_to_serve() const { return n_turns_ != 0; }
  // Whose turn it is: the first of its client, that client's next turn being the last. null: what
  // it needs is not free for it. Where nobody waits any more for room (is_in_vain), none is asked
  // for. REQUIRES: has_to_serve().
  Request* take_turn(uint64_t free_bytes, bool is_in_vain);
  // Around an attempt to serve what take_turn() returned: it leaves, and may enter meanwhile.
  void begin_serving(Flow* flow, Request* request);
  void end_serving(Request* request);

  // None has an earlier deadline; UINT64_MAX: none has one.
  uint64_t deadline_ns() const { return is_empty() ? UINT64_MAX : deadline_ns_; }
  // One whose deadline has come, which still stands here; null: there is none. O(those that stand
  // here) where deadline_ns() has come.
  Request* find_expired(uint64_t now_ns);

 private:
  // Whether it may have what it needs while so much is free.
  bool may_have(const Request& request, uint64_t free_bytes) const;
  // What is set aside once somebody else has taken so much.
  uint64_t set_aside_after(uint64_t taken_bytes) const;
  void unlink(Flow* flow, Request* request);

  using Round = boost::intrusive::list<Flow, boost::intrusive::base_hook<RoundHook>,
                                       boost::intrusive::constant_time_size<false>>;

  Round round_;           // in the order of turns
  uint64_t n_flows_ = 0;  // in it
  uint64_t n_turns_ = 0;  // to come, since there were news
  Request* favoured_ = nullptr;
  uint64_t set_aside_bytes_ = 0;  // for favoured_
  uint64_t deadline_ns_ = UINT64_MAX;
  uint64_t n_entered_ = 0;  // ever, each once
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_ROOM_LINE_H_
