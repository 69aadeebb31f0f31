// SPDX-License-Identifier: Apache-2.0
#include "daemon/reply.h"

#include <algorithm>

namespace kvm::daemon {

namespace wire = ipc::wire;

void reply_error(Session* session, uint64_t id, const Status& status) {
  ipc::ControlWriter writer;
  session->send(writer.finish_error(id, status));
}

void reply_done(Session* session, uint64_t id) {
  ipc::ControlWriter writer;
  session->send(writer.finish(id, wire::CreateDone(writer.fbb())));
}

void reply_status_or_done(Session* session, uint64_t id, const Status& status) {
  status.is_ok() ? reply_done(session, id) : reply_error(session, id, status);
}

void reply_bytes(Session* session, uint64_t id, std::span<const uint8_t> data, uint64_t total) {
  ipc::ControlWriter writer;
  const auto vector = writer.fbb().CreateVector(data.data(), data.size());
  session->send(writer.finish(id, wire::CreateBytes(writer.fbb(), vector, total)));
}

void reply_text(Session* session, uint64_t id, const std::string& text, uint64_t begin) {
  const uint64_t first = std::min<uint64_t>(begin, text.size());
  const uint64_t n = std::min<uint64_t>(text.size() - first, kMaxBytesReply);
  reply_bytes(session, id, ipc::as_bytes(text.data() + first, n), text.size());
}

}  // namespace kvm::daemon
