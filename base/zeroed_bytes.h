// SPDX-License-Identifier: Apache-2.0
// ZeroedBytes is memory that reads as zeros until it is written. Where it is large the system gives
// it so, page by page as it is touched: whoever makes it does not wait for that.
//
// Errors: makers throw std::bad_alloc.
#ifndef KVM_BASE_ZEROED_BYTES_H_
#define KVM_BASE_ZEROED_BYTES_H_

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <utility>

namespace kvm {

class ZeroedBytes {
 public:
  ZeroedBytes() = default;
  explicit ZeroedBytes(size_t size)
      : bytes_(size == 0 ? nullptr : static_cast<std::byte*>(std::calloc(size, 1))), size_(size) {
    if (size != 0 && bytes_ == nullptr) {
      throw std::bad_alloc();
    }
  }
  explicit ZeroedBytes(std::span<const std::byte> from) : ZeroedBytes(from.size()) {
    if (size_ != 0) {
      std::memcpy(bytes_.get(), from.data(), size_);
    }
  }
  ZeroedBytes(const ZeroedBytes& from) : ZeroedBytes(from.bytes()) {}
  ZeroedBytes& operator=(const ZeroedBytes& from) { return *this = ZeroedBytes(from); }
  ZeroedBytes(ZeroedBytes&& from) noexcept
      : bytes_(std::move(from.bytes_)), size_(std::exchange(from.size_, 0)) {}
  ZeroedBytes& operator=(ZeroedBytes&& from) noexcept {
    bytes_ = std::move(from.bytes_);
    size_ = std::exchange(from.size_, 0);
    return *this;
  }

  size_t size() const { return size_; }
  std::byte* data() { return bytes_.get(); }
  const std::byte* data() const { return bytes_.get(); }
  std::span<const std::byte> bytes() const { return {bytes_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  std::unique_ptr<std::byte, Free> bytes_;
  size_t size_ = 0;
};

}  // namespace kvm

#endif  // KVM_BASE_ZEROED_BYTES_H_
