// SPDX-License-Identifier: Apache-2.0
#include "engine/run/room_line.h"

#include <algorithm>
#include <variant>

#include "base/assert.h"

namespace kvm::engine {
namespace {

uint64_t deadline_of(const Request& request) {
  const uint64_t deadline_ns = std::get<StepRequest>(request.what).deadline_ns;
  return deadline_ns == 0 ? UINT64_MAX : deadline_ns;
}

}  // namespace

bool RoomLine::enter(Request* request) {
  KVM_ASSERT(!request->is_parked && !request->is_reading);
  const bool is_first_time = request->room_number == 0;
  request->is_parked = true;
  request->ticket.is_resting = true;
  deadline_ns_ = std::min(deadline_ns(), deadline_of(*request));
  if (is_first_time) {
    request->room_number = ++n_entered_;
    line_.push_back(*request);
  } else {
    const auto behind = std::find_if(line_.begin(), line_.end(), [&](const Request& other) {
      return other.room_number > request->room_number;
    });
    line_.insert(behind, *request);
  }
  return is_first_time;
}

void RoomLine::leave(Request* request) {
  KVM_ASSERT(request->is_parked && request->LineHook::is_linked());
  request->LineHook::unlink();
  request->is_parked = false;
  request->ticket.is_resting = false;
}

Request* RoomLine::find_expired(uint64_t now_ns) {
  if (now_ns < deadline_ns()) {
    return nullptr;
  }
  deadline_ns_ = UINT64_MAX;
  for (Request& request : line_) {
    if (deadline_of(request) <= now_ns) {
      deadline_ns_ = 0;  // there may be more
      return &request;
    }
    deadline_ns_ = std::min(deadline_ns_, deadline_of(request));
  }
  return nullptr;
}

}  // namespace kvm::engine
