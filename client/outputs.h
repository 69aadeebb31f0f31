// SPDX-License-Identifier: Apache-2.0
// Lists and texts on their way into buffers of the caller.
//
// Threads: pure functions.
#ifndef KVM_CLIENT_OUTPUTS_H_
#define KVM_CLIENT_OUTPUTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/status.h"
#include "client/checks.h"
#include "client/handles.h"
#include "ipc/struct_size.h"

namespace kvm::client {

// Fills an array whose stride the caller gives in out[0].struct_size.
template <typename T>
Status write_list(const std::vector<T>& list, T* out, size_t capacity, size_t* out_count,
                  const char* name) {
  if (capacity != 0) {
    KVM_TRY(ipc::check_output(out, name));
    const uint32_t stride = out->struct_size;
    const size_t n = std::min(capacity, list.size());
    auto* to = reinterpret_cast<uint8_t*>(out);
    for (size_t i = 0; i < n; ++i, to += stride) {
      ipc::write_struct(to, stride, list[i]);
    }
  }
  *out_count = list.size();
  return Status::ok();
}

// A text into the caller's buffer, cut where that is too small.
template <typename MakeText>
kvm_status write_text(const kvm_client* client, char* buffer, size_t capacity, size_t* out_length,
                      MakeText make_text) {
  return guarded([&]() -> Status {
    KVM_TRY(check_handle(client, "client"));
    KVM_TRY(check_not_null(out_length, "out_length"));
    if (capacity != 0) {
      KVM_TRY(check_not_null(buffer, "buffer"));
    }
    KVM_TRY_ASSIGN(const std::string text, make_text());
    if (capacity != 0) {
      const size_t n = std::min(text.size(), capacity - 1);
      std::memcpy(buffer, text.data(), n);
      buffer[n] = '\0';
    }
    *out_length = text.size();
    return Status::ok();
  });
}

}  // namespace kvm::client

#endif  // KVM_CLIENT_OUTPUTS_H_
