// SPDX-License-Identifier: Apache-2.0
// Replies to control messages (ipc/control.fbs), which all answer a message by its id.
//
// Threads: the dispatcher.
#ifndef KVM_DAEMON_REPLY_H_
#define KVM_DAEMON_REPLY_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "daemon/session.h"
#include "ipc/control.h"

namespace kvm::daemon {

// LIMIT: payload of a Bytes reply; the rest is fetched by further messages.
inline constexpr uint64_t kMaxBytesReply = 64 * 1024;
template <typename T>
inline constexpr size_t kMaxListed = kMaxBytesReply / sizeof(T);

// Gives the writer of short replies its memory. Throws std::bad_alloc.
void warm_up(ipc::ControlWriter* writer);
// The writer of the service, for a reply of a few numbers: it allocates nothing.
ipc::ControlWriter& short_writer(Session* session);

// Allocate nothing, but where the client does not read its replies.
void reply_error(Session* session, uint64_t id, const Status& status);
void reply_done(Session* session, uint64_t id);
void reply_status_or_done(Session* session, uint64_t id, const Status& status);
void reply_bytes(Session* session, uint64_t id, std::span<const uint8_t> data, uint64_t total);
// A page of a text, from `begin` on.
void reply_text(Session* session, uint64_t id, const std::string& text, uint64_t begin);

// One structure of kvm.h, or the reason why there is none.
template <typename T>
void reply_struct(Session* session, uint64_t id, Result<T> result) {
  if (!result.is_ok()) {
    reply_error(session, id, result.status());
    return;
  }
  result.value().struct_size = sizeof(T);
  reply_bytes(session, id, ipc::as_bytes(&result.value(), 1), 1);
}

// A part of a list, or all of it.
template <typename T>
void reply_list(Session* session, uint64_t id, std::vector<T> part, bool has_more) {
  for (T& item : part) {
    item.struct_size = sizeof(T);
  }
  reply_bytes(session, id, ipc::as_bytes(part.data(), part.size()),
              part.size() + (has_more ? 1 : 0));
}

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_REPLY_H_
