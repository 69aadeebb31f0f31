// SPDX-License-Identifier: Apache-2.0
// The simulated implementation of ipc/shared_words.h: the same functions, each of them a place
// where tests/sim/interleaving.h may let the other side go on. A test that compiles ipc/ring.cc
// with this folder before the root of the tree among its include paths gets these.
#ifndef KVM_TESTS_SIM_SIMULATED_WORDS_IPC_SHARED_WORDS_H_
#define KVM_TESTS_SIM_SIMULATED_WORDS_IPC_SHARED_WORDS_H_

#include <cstddef>
#include <cstdint>

#include "ipc/wire.h"
#include "tests/sim/interleaving.h"

namespace kvm::ipc {

inline uint32_t load_acquire(const ControlWord& word) { return sim::load(&word.value); }
inline uint32_t load_seq_cst(const ControlWord& word) { return sim::load(&word.value); }
inline void store_release(ControlWord* word, uint32_t value) {
  sim::store(&word->value, &value, sizeof(value), sim::Order::kRelease);
}
inline void store_seq_cst(ControlWord* word, uint32_t value) {
  sim::store(&word->value, &value, sizeof(value), sim::Order::kSeqCst);
}
inline void copy_once(void* to, const void* from, size_t size) { sim::read(to, from, size); }
inline void copy_to_shared(void* to, const void* from, size_t size) {
  sim::store(to, from, size, sim::Order::kRelease);
}
// No timeout ever ends a sleep here, so that a wake-up that was lost is one for good.
inline void wait_while_equal(const ControlWord& word, uint32_t value, uint64_t /*timeout_ns*/) {
  sim::wait_while_equal(&word.value, value);
}
inline void wake_waiters(const ControlWord& word) { sim::wake_waiters(&word.value); }

}  // namespace kvm::ipc

#endif  // KVM_TESTS_SIM_SIMULATED_WORDS_IPC_SHARED_WORDS_H_
