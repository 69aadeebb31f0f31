// SPDX-License-Identifier: Apache-2.0
// Status and Result<T>: the one way in which fallible code inside kvm reports operating errors.
//
// A Status is a code of the public ABI (kvm.h) and, when it is an error, a sentence that names the
// offending value and what is allowed. OK carries no sentence and costs one compare.
//
// Threads: values, no shared state.  Memory: an error owns one heap string; OK owns nothing. Where
// there is none to be had an error loses its sentence, never its code: making and copying a Status
// does not throw.
#ifndef KVM_BASE_STATUS_H_
#define KVM_BASE_STATUS_H_

#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "base/assert.h"
#include "kvm.h"

namespace kvm {

class [[nodiscard]] Status {
 public:
  Status() = default;
  // `detail`: which of its author's listed reasons this is (engine::Refusal, say); 0: of no list.
  // REQUIRES: code != KVM_OK.
  Status(kvm_status code, std::string message, uint32_t detail = 0) noexcept
      : code_(code), detail_(detail) {
    KVM_ASSERT(code != KVM_OK);
    keep(std::move(message));
  }
  Status(const Status& other) noexcept { *this = other; }
  Status(Status&&) noexcept = default;
  Status& operator=(const Status& other) noexcept {
    code_ = other.code_;
    detail_ = other.detail_;
    fixed_ = other.fixed_;
    message_.reset();
    if (other.message_ != nullptr) {
      keep(*other.message_);
    }
    return *this;
  }
  Status& operator=(Status&&) noexcept = default;

  // An error whose sentence lives for ever: it allocates nothing, for those who have no memory.
  // REQUIRES: code != KVM_OK.
  static Status fixed(kvm_status code, const char* sentence) noexcept {
    KVM_ASSERT(code != KVM_OK);
    Status status;
    status.code_ = code;
    status.fixed_ = sentence;
    return status;
  }
  static Status ok() { return {}; }

  bool is_ok() const { return code_ == KVM_OK; }
  kvm_status code() const { return code_; }
  uint32_t detail() const { return detail_; }
  // The sentence, without the name of the code. Empty when OK.
  std::string_view message() const {
    return message_ ? std::string_view(*message_) : std::string_view(fixed_);
  }

 private:
  // Either form of a sentence.
  template <typename String>
  void keep(String&& message) noexcept {
    try {
      message_ = std::make_unique<std::string>(std::forward<String>(message));
    } catch (const std::bad_alloc&) {
      fixed_ = "(there is no memory for the sentence)";
    }
  }

  kvm_status code_ = KVM_OK;
  uint32_t detail_ = 0;
  const char* fixed_ = "";
  std::unique_ptr<std::string> message_;
};

// A value or the reason why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : data_(std::in_place_index<0>, std::move(value)) {}        // NOLINT: implicit
  Result(Status status) : data_(std::in_place_index<1>, std::move(status)) {  // NOLINT: implicit
    KVM_ASSERT(!std::get<1>(data_).is_ok());
  }

  bool is_ok() const { return data_.index() == 0; }
  Status status() const { return is_ok() ? Status() : std::get<1>(data_); }
  // REQUIRES: is_ok().
  T& value() & {
    KVM_ASSERT(is_ok());
    return std::get<0>(data_);
  }
  const T& value() const& {
    KVM_ASSERT(is_ok());
    return std::get<0>(data_);
  }
  T&& value() && {
    KVM_ASSERT(is_ok());
    return std::get<0>(std::move(data_));
  }

 private:
  std::variant<T, Status> data_;
};

#define KVM_CONCAT_INNER(a, b) a##b
#define KVM_CONCAT(a, b) KVM_CONCAT_INNER(a, b)

// Returns from the enclosing function when `expr` (a Status) is an error.
#define KVM_TRY(expr)                           \
  do {                                          \
    ::kvm::Status kvm_try_status = (expr);      \
    if (!kvm_try_status.is_ok()) [[unlikely]] { \
      return kvm_try_status;                    \
    }                                           \
  } while (false)

// Declares or assigns `lhs` from a Result, or returns its Status from the enclosing function.
#define KVM_TRY_ASSIGN(lhs, expr) KVM_TRY_ASSIGN_INNER(lhs, expr, KVM_CONCAT(kvm_result_, __LINE__))
#define KVM_TRY_ASSIGN_INNER(lhs, expr, name) \
  auto name = (expr);                         \
  if (!name.is_ok()) [[unlikely]] {           \
    return name.status();                     \
  }                                           \
  lhs = std::move(name).value()

}  // namespace kvm

#endif  // KVM_BASE_STATUS_H_
