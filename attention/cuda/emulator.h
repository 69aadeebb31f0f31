// SPDX-License-Identifier: Apache-2.0
// Runs GPU kernels on a CPU, to check them where there is no GPU: each thread of a block is a
// fiber, operations of a warp are rendezvous of its 32 fibers. Not for speed, and not for use in
// the service.
//
// It is stricter than a GPU, so that a kernel that is wrong now and then is wrong here every time:
//   - An asynchronous copy reads and writes when its thread waits for it. Until then the target
//     holds NaNs, and touching it is a fault.
//   - Shared memory starts without contents; reading what nobody wrote is a fault.
//   - Every access to shared memory is checked against the last ones of other threads: two of
//     which one is a write must have a sync_warp (of both) or a sync_block between them. Shuffles,
//     votes and matrix instructions order nothing.
//   - Global memory outside the ranges of the launch, and misaligned access, is a fault; so is any
//     access of a kernel that begins early, before it has waited for the one before it, and a place
//     that a launch stores to twice: what two blocks both do is done in no order.
//   - Threads of a warp that meet at different operations, or wait for ones that have ended, are a
//     fault.
//   - load_matrix_x4 counts bank conflicts.
// LIMIT: exact arithmetic of the matrix unit (order and rounding of sums) is not modelled, nor is
// visibility of global memory between blocks: these take turns where they count together
// (count_up_to), in an order that the launch chooses, and nowhere else.
//
// Threads: launches on different threads do not know of each other.
#ifndef KVM_ATTENTION_CUDA_EMULATOR_H_
#define KVM_ATTENTION_CUDA_EMULATOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace kvm::attention::gpu::emulator {

struct Range {
  const void* data = nullptr;
  size_t size_bytes = 0;
};

// Who goes on where a block is about to count: the first one that has not ended, so that blocks run
// one after the other; the last one; each in turn; any.
enum class Order : uint32_t { kForward, kBackward, kTurns, kAny };

struct Launch {
  uint32_t blocks = 0;
  uint32_t threads = 0;  // per block, a multiple of 32, at most 1,024
  uint32_t shared_bytes = 0;
  std::span<const Range> memory;  // global memory that the kernel may touch
  bool begins_early = false;      // before the kernel in front of it has ended
  Order order = Order::kForward;
  uint64_t seed = 1;  // of Order::kAny
};

struct Report {
  uint64_t n_faults = 0;
  std::string first_fault;  // what the first one was
  uint64_t n_bank_conflicts = 0;
  bool lets_next_begin = false;  // before it ends: all blocks have said so
};

// Runs `kernel` for every thread of every block, blocks in the launch's order. After a fault in a
// block it goes on where it can; what it writes then means nothing.
Report run(const Launch& launch, const std::function<void()>& kernel);

// --- For primitives_emulated.h, within a launch -------------------------------------------------

uint32_t current_thread();
uint32_t current_block();
uint32_t current_block_count();
void sync_warp();
void sync_block();
void let_next_kernel_begin();
void wait_for_kernel_before();
uint64_t shuffle(uint64_t value, uint32_t lane);
bool any_lane(bool value);
void copy_async(uint32_t to, const void* from, uint32_t size_bytes, bool valid);
void copy_async_commit();
void copy_async_wait(uint32_t newest);
void load_matrix_x4(uint32_t (&to)[4], uint32_t from, bool transposed);
void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                 float (*widen)(uint16_t));
void store_shared(uint32_t at, const void* value, uint32_t size_bytes);
void load_shared(uint32_t at, void* value, uint32_t size_bytes);
// Says whether global memory may be touched there; reports a fault if not.
bool may_touch(const void* at, uint32_t size_bytes);
// Reports a fault where the launch has stored to this place before.
void note_store(const void* to);
// Lets the block go on whose turn it is.
void pass_turn();

}  // namespace kvm::attention::gpu::emulator

#endif  // KVM_ATTENTION_CUDA_EMULATOR_H_
