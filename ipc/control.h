// SPDX-License-Identifier: Apache-2.0
// Control messages: encoding and verified decoding of ipc/control.fbs, for both sides.
//
//   ControlWriter writer;                                  auto message = read_message(bytes);
//   auto body = wire::CreateArenaCreate(writer.fbb(), n);  if (auto* t = message.value()
//   send_message(socket, writer.finish(id, body), {});           ->body_as_ArenaCreate()) ...
//
// Threads: values.
#ifndef KVM_IPC_CONTROL_H_
#define KVM_IPC_CONTROL_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/status.h"
#include "ipc/control_generated.h"
#include "kvm.h"

namespace kvm::ipc {

class ControlWriter {
 public:
  ControlWriter() : fbb_(1024) {}

  flatbuffers::FlatBufferBuilder& fbb() { return fbb_; }
  // Ready for the next message, in the memory of the last one.
  void reset() { fbb_.Clear(); }

  // The message with this body. Valid as long as the writer; call one finish function once.
  template <typename Table>
  std::span<const uint8_t> finish(uint64_t id, flatbuffers::Offset<Table> body) {
    return finish_with(id, KVM_OK, {}, wire::BodyTraits<Table>::enum_value, body.Union());
  }
  // A reply without a body: the request failed. The sentence is cut to max_sentence bytes.
  // REQUIRES: !status.is_ok().
  std::span<const uint8_t> finish_error(uint64_t id, const Status& status,
                                        size_t max_sentence = SIZE_MAX);

 private:
  std::span<const uint8_t> finish_with(uint64_t id, kvm_status status, std::string_view sentence,
                                       wire::Body type, flatbuffers::Offset<void> body);

  flatbuffers::FlatBufferBuilder fbb_;
};

// Verifies every offset, length and string of a received message; what it returns points into
// `bytes` and is safe to walk. A message without a body is left for the caller to see (body_type
// NONE); any other type that the schema knows has its table. Fails: PROTOCOL.
Result<const wire::Message*> read_message(std::span<const uint8_t> bytes);

// The status that a reply carries.
Status reply_status(const wire::Message& reply);

// A vector field of structures, as bytes.
template <typename T>
std::span<const uint8_t> as_bytes(const T* data, size_t count) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {reinterpret_cast<const uint8_t*>(data), count * sizeof(T)};
}

// Copies a field of bytes into structures; nullptr is an empty field. Fails: INVALID (not a whole
// number of structures, or more than n_max).
template <typename T>
Result<std::vector<T>> structs_of(const flatbuffers::Vector<uint8_t>* field, size_t n_max,
                                  const char* name) {
  static_assert(std::is_trivially_copyable_v<T>);
  const size_t size = field == nullptr ? 0 : field->size();
  if (size % sizeof(T) != 0 || size / sizeof(T) > n_max) {
    return Status(KVM_ERR_INVALID, std::string(name) + " has " + std::to_string(size) +
                                       " bytes; allowed are at most " + std::to_string(n_max) +
                                       " structures of " + std::to_string(sizeof(T)));
  }
  std::vector<T> out(size / sizeof(T));
  if (size != 0) {
    std::memcpy(out.data(), field->data(), size);
  }
  return out;
}

}  // namespace kvm::ipc

#endif  // KVM_IPC_CONTROL_H_
