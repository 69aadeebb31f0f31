// SPDX-License-Identifier: Apache-2.0
#include "base/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#include "base/assert.h"

#if defined(__SANITIZE_ADDRESS__)
#define KVM_FIBER_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVM_FIBER_ASAN 1
#endif
#endif
#ifdef KVM_FIBER_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#define KVM_FIBER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define KVM_FIBER_TSAN 1
#endif
#endif
#ifdef KVM_FIBER_TSAN
#include <sanitizer/tsan_interface.h>
#endif

// void kvm_fiber_switch(void** save, void* load): keeps what the calling convention says a call
// keeps, on the old stack, and continues on the new one. swapcontext would make two system calls.
asm(R"(
.text
.type kvm_fiber_switch, @function
.hidden kvm_fiber_switch
.globl kvm_fiber_switch
kvm_fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kvm_fiber_switch, .-kvm_fiber_switch
)");
extern "C" void kvm_fiber_switch(void** save, void* load);

namespace kvm {

namespace {
// The fiber that was left, for arrive() to learn the bounds of its stack.
thread_local Fiber* left_fiber = nullptr;
}  // namespace

Fiber::~Fiber() {
  if (stack_ != nullptr) {
    ::munmap(stack_, kStackBytes);
#ifdef KVM_FIBER_TSAN
    __tsan_destroy_fiber(thread_);
#endif
  }
}

void Fiber::reset(void (*entry)()) {
  if (stack_ == nullptr) {
    void* stack = ::mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    KVM_ASSERT(stack != MAP_FAILED);
    stack_ = static_cast<std::byte*>(stack);
    bottom_ = stack_;
    size_bytes_ = kStackBytes;
    stack_pointer_ = stack_;
  }
#ifdef KVM_FIBER_ASAN
  // Frames that were not returned from are still poisoned: those above where it was left.
  const auto* const left_at = static_cast<std::byte*>(stack_pointer_);
  __asan_unpoison_memory_region(left_at, static_cast<size_t>(stack_ + kStackBytes - left_at));
#endif
#ifdef KVM_FIBER_TSAN
  // Calls that did not return stay on its list, which has an end. To make one takes long.
  constexpr size_t kMostResets = 500;
  if (thread_ != nullptr && ++n_resets_ > kMostResets) {
    __tsan_destroy_fiber(thread_);
    thread_ = nullptr;
    n_resets_ = 0;
  }
  if (thread_ == nullptr) {
    thread_ = __tsan_create_fiber(0);
  }
#endif
  // kvm_fiber_switch pops this: six registers, then the address to go on at. There the stack must
  // look as it does behind a call: 8 below a multiple of 16.
  auto* top = reinterpret_cast<uint64_t*>(stack_ + kStackBytes);
  uint64_t* at = top - 10;
  for (int i = 0; i < 10; ++i) {
    at[i] = 0;
  }
  at[6] = reinterpret_cast<uint64_t>(entry);
  stack_pointer_ = at;
  shadow_ = nullptr;
}

void Fiber::leave_for(Fiber* next, bool for_good) {
  left_fiber = this;
#ifdef KVM_FIBER_ASAN
  __sanitizer_start_switch_fiber(for_good ? nullptr : &shadow_, next->bottom_, next->size_bytes_);
#else
  (void)for_good;
#endif
#ifdef KVM_FIBER_TSAN
  thread_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(next->thread_, 0);
#endif
  kvm_fiber_switch(&stack_pointer_, next->stack_pointer_);
}

void Fiber::switch_to(Fiber* next) {
  leave_for(next, false);
  arrive();
}

void Fiber::finish_to(Fiber* next) { leave_for(next, true); }

void Fiber::arrive() {
#ifdef KVM_FIBER_ASAN
  // The stack of the thread itself is known only once somebody has left it.
  __sanitizer_finish_switch_fiber(shadow_, &left_fiber->bottom_, &left_fiber->size_bytes_);
#endif
}

}  // namespace kvm
