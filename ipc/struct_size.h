// SPDX-License-Identifier: Apache-2.0
// The struct_size rule of kvm.h, for structures that cross the ABI or the control socket: a larger
// one is accepted when the bytes that are not known are zero, a smaller one is extended with zeros.
#ifndef KVM_IPC_STRUCT_SIZE_H_
#define KVM_IPC_STRUCT_SIZE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/status.h"

namespace kvm::ipc {

// LIMIT: a struct_size above this is garbage, and is not followed.
inline constexpr uint32_t kMaxStructSize = 65536;

// Reads a structure of which `size_bytes` bytes are there. *out gets this library's form of it,
// struct_size included. Fails: INVALID.
template <typename T>
Status read_struct(const void* bytes, uint64_t size_bytes, T* out, const char* name) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (size_bytes < sizeof(uint32_t) || size_bytes > kMaxStructSize) {
    return Status(KVM_ERR_INVALID, std::string(name) + ".struct_size is " +
                                       std::to_string(size_bytes) + "; set it to sizeof(" + name +
                                       "), here " + std::to_string(sizeof(T)));
  }
  const size_t known = std::min<size_t>(size_bytes, sizeof(T));
  const auto* p = static_cast<const uint8_t*>(bytes);
  for (size_t i = known; i < size_bytes; ++i) {
    if (p[i] != 0) {
      return Status(KVM_ERR_INVALID, std::string(name) + ".struct_size is " +
                                         std::to_string(size_bytes) + ", and byte " +
                                         std::to_string(i) +
                                         " is set; this library knows the first " +
                                         std::to_string(sizeof(T)) + " bytes only");
    }
  }
  std::memset(static_cast<void*>(out), 0, sizeof(T));
  std::memcpy(static_cast<void*>(out), p, known);
  out->struct_size = sizeof(T);
  return Status::ok();
}

// The same for a parameter structure of a caller; nullptr means all defaults.
template <typename T>
Status read_params(const T* params, T* out, const char* name) {
  if (params == nullptr) {
    std::memset(static_cast<void*>(out), 0, sizeof(T));
    out->struct_size = sizeof(T);
    return Status::ok();
  }
  return read_struct(params, params->struct_size, out, name);
}

// Checks that an output structure of a caller has a plausible size.
template <typename T>
Status check_output(const T* out, const char* name) {
  if (out == nullptr) {
    return Status(KVM_ERR_INVALID, std::string(name) + " is NULL");
  }
  if (out->struct_size < sizeof(uint32_t) || out->struct_size > kMaxStructSize) {
    return Status(KVM_ERR_INVALID, std::string(name) + ".struct_size is " +
                                       std::to_string(out->struct_size) +
                                       "; set it to sizeof, here " + std::to_string(sizeof(T)));
  }
  return Status::ok();
}

// Writes `value` to memory of `size_bytes` bytes; what this library does not know becomes zero, and
// struct_size stays the caller's. REQUIRES: check_output.
template <typename T>
void write_struct(void* out, uint32_t size_bytes, T value) {
  value.struct_size = size_bytes;
  const size_t known = std::min<size_t>(size_bytes, sizeof(T));
  std::memcpy(out, &value, known);
  std::memset(static_cast<uint8_t*>(out) + known, 0, size_bytes - known);
}

}  // namespace kvm::ipc

#endif  // KVM_IPC_STRUCT_SIZE_H_
