// SPDX-License-Identifier: Apache-2.0
#include "engine/run/room_line.h"

#include <algorithm>
#include <variant>

#include "base/assert.h"
#include "base/clock.h"

namespace kvm::engine {
namespace {

uint64_t deadline_of(const Request& request) {
  const uint64_t deadline_ns = std::get<StepRequest>(request.what).deadline_ns;
  return deadline_ns == 0 ? UINT64_MAX : deadline_ns;
}

}  // namespace

bool RoomLine::enter(Flow* flow, Request* request, uint64_t needed_bytes) {
  KVM_ASSERT(!request->is_parked && !request->is_reading);
  const bool is_first_time = request->room_number == 0;
  request->is_parked = true;
  request->ticket.is_resting = true;
  request->room_bytes = needed_bytes;
  deadline_ns_ = std::min(deadline_ns(), deadline_of(*request));
  if (flow->line.empty()) {
    round_.push_back(*flow);
    ++n_flows_;
  }
  if (is_first_time) {
    request->room_number = ++n_entered_;
    flow->line.push_back(*request);
  } else {
    const auto behind = std::find_if(
        flow->line.begin(), flow->line.end(),
        [&](const Request& other) { return other.room_number > request->room_number; });
    flow->line.insert(behind, *request);
  }
  return is_first_time;
}

void RoomLine::unlink(Flow* flow, Request* request) {
  KVM_ASSERT(request->is_parked && request->LineHook::is_linked());
  request->LineHook::unlink();
  request->is_parked = false;
  request->ticket.is_resting = false;
  if (flow->line.empty()) {
    flow->RoundHook::unlink();
    --n_flows_;
    n_turns_ = std::min(n_turns_, n_flows_);
  }
}

void RoomLine::leave(Flow* flow, Request* request) {
  unlink(flow, request);
  if (favoured_ == request) {
    favoured_ = nullptr;
    set_aside_bytes_ = 0;
  }
}

Request* RoomLine::take_turn(uint64_t free_bytes, bool is_in_vain) {
  KVM_ASSERT(has_to_serve() && !round_.empty());
  --n_turns_;
  Flow& flow = round_.front();
  round_.splice(round_.end(), round_, round_.begin());
  Request* request = &flow.line.front();
  // What was free and did not do is tried again once more is free: what the request itself brought
  // back for the attempt, and what has gone since, is no more than there was.
  request->room_tried_bytes =
      std::min(request->room_tried_bytes, add_saturating(free_bytes, request->tail_bytes));
  const bool is_news = request->room_tried_bytes == 0 || free_bytes > request->room_tried_bytes;
  if (is_in_vain || (is_news && may_have(*request, free_bytes))) {
    request->room_tried_bytes = free_bytes;
    request->tail_bytes = 0;
    return request;
  }
  favoured_ = favoured_ == nullptr ? request : favoured_;
  return nullptr;
}

uint64_t RoomLine::set_aside_after(uint64_t taken_bytes) const {
  return std::min(favoured_->room_bytes, add_saturating(set_aside_bytes_, taken_bytes));
}

bool RoomLine::may_have(const Request& request, uint64_t free_bytes) const {
  const uint64_t kept =
      favoured_ == nullptr || favoured_ == &request ? 0 : set_aside_after(request.room_bytes);
  return kept <= free_bytes && request.room_bytes <= free_bytes - kept;
}

void RoomLine::begin_serving(Flow* flow, Request* request) { unlink(flow, request); }

void RoomLine::end_serving(Request* request) {
  if (request->is_parked) {  // the room was there, but not as it needs it
    favoured_ = favoured_ == nullptr ? request : favoured_;
  } else if (favoured_ == request) {
    favoured_ = nullptr;
    set_aside_bytes_ = 0;
  } else if (favoured_ != nullptr) {
    set_aside_bytes_ = set_aside_after(request->room_bytes);
  }
}

Request* RoomLine::find_expired(uint64_t now_ns) {
  if (now_ns < deadline_ns()) {
    return nullptr;
  }
  deadline_ns_ = UINT64_MAX;
  for (Flow& flow : round_) {
    for (Request& request : flow.line) {
      if (deadline_of(request) <= now_ns) {
        deadline_ns_ = 0;  // there may be more
        return &request;
      }
      deadline_ns_ = std::min(deadline_ns_, deadline_of(request));
    }
  }
  return nullptr;
}

}  // namespace kvm::engine
