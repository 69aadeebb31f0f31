// SPDX-License-Identifier: Apache-2.0
#include "daemon/reply.h"

#include <algorithm>

namespace kvm::daemon {

namespace wire = ipc::wire;

namespace {

// LIMIT: of a sentence, so that a reply fits into what the writer has.
constexpr size_t kMaxSentence = 512;

}  // namespace

void warm_up(ipc::ControlWriter* writer) {
  const std::string longest(kMaxSentence, ' ');
  writer->finish_error(0, Status(KVM_ERR_NO_MEMORY, longest));
}

ipc::ControlWriter& short_writer(Session* session) {
  ipc::ControlWriter& writer = session->service()->reply_writer;
  writer.reset();
  return writer;
}

void reply_error(Session* session, uint64_t id, const Status& status) {
  session->send(short_writer(session).finish_error(id, status, kMaxSentence));
}

void reply_done(Session* session, uint64_t id) {
  ipc::ControlWriter& writer = short_writer(session);
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
