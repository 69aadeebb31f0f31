// SPDX-License-Identifier: Apache-2.0
// Access to memory that another process can write at any time, and sleeping on it. A seam: the
// rings touch what they share through these functions only, and tests/sim/simulated_words puts
// others in their place.
#ifndef KVM_IPC_SHARED_WORDS_H_
#define KVM_IPC_SHARED_WORDS_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/kill_point.h"
#include "ipc/wire.h"

namespace kvm::ipc {

// std::atomic_ref has no form for read-only memory in C++20; the built-ins are the same thing.
inline uint32_t load_acquire(const ControlWord& word) {
  return __atomic_load_n(&word.value, __ATOMIC_ACQUIRE);
}
inline uint32_t load_seq_cst(const ControlWord& word) {
  return __atomic_load_n(&word.value, __ATOMIC_SEQ_CST);
}
inline void store_release(ControlWord* word, uint32_t value) {
  KVM_SHARED_STORE();
  __atomic_store_n(&word->value, value, __ATOMIC_RELEASE);
}
inline void store_seq_cst(ControlWord* word, uint32_t value) {
  KVM_SHARED_STORE();
  __atomic_store_n(&word->value, value, __ATOMIC_SEQ_CST);
}

// Copies `size` bytes that the peer may be changing. The barrier keeps the compiler from reading
// `from` again where the copy is used: what was validated is what is used.
inline void copy_once(void* to, const void* from, size_t size) {
  std::memcpy(to, from, size);
  asm volatile("" : : "r"(to) : "memory");
}

// Copies `size` bytes of ours to memory that the peer reads.
inline void copy_to_shared(void* to, const void* from, size_t size) {
  KVM_SHARED_STORE();
  std::memcpy(to, from, size);
}

// Sleeps while the word is `value`, at most timeout_ns, or until a signal. The kernel compares. The
// futex is shared, not private: the waker is another process.
inline void wait_while_equal(const ControlWord& word, uint32_t value, uint64_t timeout_ns) {
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(timeout_ns / 1000000000u);
  timeout.tv_nsec = static_cast<long>(timeout_ns % 1000000000u);
  ::syscall(SYS_futex, &word.value, FUTEX_WAIT, value, &timeout, nullptr, 0);
}
// Ends all sleeps on the word.
inline void wake_waiters(const ControlWord& word) {
  ::syscall(SYS_futex, &word.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace kvm::ipc

#endif  // KVM_IPC_SHARED_WORDS_H_
