// SPDX-License-Identifier: Apache-2.0
// RawBytes is memory that nobody has written yet: whoever makes it does not wait for the system to
// clear it, which takes .1 to .4 ms a MiB where it is new.
//
// Errors: makers throw std::bad_alloc.
#ifndef KVM_BASE_RAW_BYTES_H_
#define KVM_BASE_RAW_BYTES_H_

#include <cstddef>
#include <memory>
#include <utility>

namespace kvm {

class RawBytes {
 public:
  RawBytes() = default;
  explicit RawBytes(size_t size)
      : bytes_(size == 0 ? nullptr : std::make_unique_for_overwrite<std::byte[]>(size)),
        size_(size) {}
  RawBytes(RawBytes&& from) noexcept
      : bytes_(std::move(from.bytes_)), size_(std::exchange(from.size_, 0)) {}
  RawBytes& operator=(RawBytes&& from) noexcept {
    bytes_ = std::move(from.bytes_);
    size_ = std::exchange(from.size_, 0);
    return *this;
  }

  size_t size() const { return size_; }
  std::byte* data() { return bytes_.get(); }
  const std::byte* data() const { return bytes_.get(); }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  size_t size_ = 0;
};

}  // namespace kvm

#endif  // KVM_BASE_RAW_BYTES_H_
