// SPDX-License-Identifier: Apache-2.0
// KVM_ASSERT: for programmer errors only. It stays on in release builds and aborts with a sentence.
// Nothing that a client sends or a disk holds may reach an assertion: those are Status.
#ifndef KVM_BASE_ASSERT_H_
#define KVM_BASE_ASSERT_H_

namespace kvm {
[[noreturn]] void assertion_failed(const char* expression, const char* file, int line);
}  // namespace kvm

#define KVM_ASSERT(expression)                                  \
  do {                                                          \
    if (!(expression)) [[unlikely]] {                           \
      ::kvm::assertion_failed(#expression, __FILE__, __LINE__); \
    }                                                           \
  } while (false)

// Expensive invariants: recounts and scans. Compiled in where KVM_CHECK >= 2 (the dev preset).
#if defined(KVM_CHECK) && KVM_CHECK >= 2
#define KVM_CHECK_INVARIANT(expression) KVM_ASSERT(expression)
#else
#define KVM_CHECK_INVARIANT(expression) \
  do {                                  \
  } while (false)
#endif

#endif  // KVM_BASE_ASSERT_H_
