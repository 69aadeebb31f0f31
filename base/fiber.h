// SPDX-License-Identifier: Apache-2.0
// Coroutines with stacks of their own, for what runs many threads in a chosen order: the emulator
// of GPU kernels, and tests. x86-64, one operating-system thread.
#ifndef KVM_BASE_FIBER_H_
#define KVM_BASE_FIBER_H_

#include <cstddef>
#include <memory>

namespace kvm {

// A stack and where it stands. Fibers switch to each other; none returns from its entry.
class Fiber {
 public:
  // The one that is running: it has the stack of its thread.
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  // Makes the fiber begin with entry(), which must end with finish_to, at the next switch to it.
  // Whatever it did before is forgotten; the stack is allocated once.
  void reset(void (*entry)());

  // Runs `next` until somebody switches back to this fiber. REQUIRES: this one is running.
  void switch_to(Fiber* next);
  // The same, for the last time.
  void finish_to(Fiber* next);
  // REQUIRED first in entry(): completes the switch that began the fiber.
  void arrive();

 private:
  static constexpr size_t kStackBytes = 256 << 10;
  void leave_for(Fiber* next, bool for_good);

  void* stack_pointer_ = nullptr;
  std::byte* stack_ = nullptr;
  void* shadow_ = nullptr;  // AddressSanitizer's
  void* thread_ = nullptr;  // ThreadSanitizer's
  size_t n_resets_ = 0;     // since it was made
  const void* bottom_ = nullptr;
  size_t size_bytes_ = 0;
};

}  // namespace kvm

#endif  // KVM_BASE_FIBER_H_
