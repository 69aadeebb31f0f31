// SPDX-License-Identifier: Apache-2.0
#include "ipc/control.h"

#include <string_view>

namespace kvm::ipc {

namespace {

// LIMIT: the schema nests two deep; a message has one root and one body.
constexpr uint32_t kMaxDepth = 8;
constexpr uint32_t kMaxTables = 16;

}  // namespace

std::span<const uint8_t> ControlWriter::finish_error(uint64_t id, const Status& status,
                                                     size_t max_sentence) {
  return finish_with(id, status.code(), status.message().substr(0, max_sentence), wire::Body::NONE,
                     {});
}

std::span<const uint8_t> ControlWriter::finish_with(uint64_t id, kvm_status status,
                                                    std::string_view sentence, wire::Body type,
                                                    flatbuffers::Offset<void> body) {
  flatbuffers::Offset<flatbuffers::String> text;
  if (!sentence.empty()) {
    text = fbb_.CreateString(sentence.data(), sentence.size());
  }
  wire::FinishMessageBuffer(fbb_, wire::CreateMessage(fbb_, id, status, text, type, body));
  return {fbb_.GetBufferPointer(), fbb_.GetSize()};
}

Result<const wire::Message*> read_message(std::span<const uint8_t> bytes) {
  flatbuffers::Verifier verifier(bytes.data(), bytes.size(), kMaxDepth, kMaxTables);
  if (bytes.size() < 8 || !wire::VerifyMessageBuffer(verifier)) {
    return Status(KVM_ERR_PROTOCOL, "a control message of " + std::to_string(bytes.size()) +
                                        " bytes does not verify");
  }
  const wire::Message* message = wire::GetMessage(bytes.data());
  // The verifier has nothing to look at in a table that is absent, and accepts it.
  if (message->body_type() != wire::Body::NONE && message->body() == nullptr) {
    return Status(KVM_ERR_PROTOCOL, std::string("a control message announces a body of type ") +
                                        std::to_string(static_cast<int>(message->body_type())) +
                                        " and has none");
  }
  return message;
}

Status reply_status(const wire::Message& reply) {
  if (reply.status() == KVM_OK) {
    return Status::ok();
  }
  const auto* message = reply.message();
  return Status(reply.status(), message == nullptr ? std::string() : message->str());
}

}  // namespace kvm::ipc
