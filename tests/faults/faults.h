// SPDX-License-Identifier: Apache-2.0
// Makes the system refuse what the product asks it for: at the n-th such call once, or from the
// n-th call on. The calls of the product's objects go through here by the linker (--wrap, see
// CMakeLists.txt) and by this program's own operator new, so nothing of it is in the product.
//
//   arm(Refused::kMapping, 3, Until::kOnce, Of::kAnyThread);
//   ...                          // the third mmap or mprotect fails with ENOMEM
//   const Seen seen = disarm();  // seen.n_refused == 0: there were fewer than three
//
// What is held (blocks of operator new, mapped bytes, descriptors) is counted all the time, so that
// a test can compare before and after.
//
// Threads: arm, disarm and InProduct are for the test's thread; the calls come from any.
#ifndef KVM_TESTS_FAULTS_FAULTS_H_
#define KVM_TESTS_FAULTS_FAULTS_H_

#include <array>
#include <cstdint>

namespace kvm::testing {

enum class Refused : uint8_t {
  kAllocation,  // operator new, aligned_alloc
  kMapping,     // mmap, mprotect
  kMemfd,       // memfd_create, fallocate, sealing
  kDescriptor,  // eventfd, epoll, socket, accept, dup, pidfd, io_uring, received descriptors
  kThread,      // of std::thread
  kFutex,       // on memory that processes share: a wait is interrupted, a wake wakes nobody
};
inline constexpr std::array<Refused, 6> kAllRefused = {Refused::kAllocation, Refused::kMapping,
                                                       Refused::kMemfd,      Refused::kDescriptor,
                                                       Refused::kThread,     Refused::kFutex};
const char* name_of(Refused what);

enum class Until : uint8_t { kOnce, kForEver };
// Whose calls are counted and refused: relative to the thread that arms.
enum class Of : uint8_t { kAnyThread, kThisThread, kOtherThreads };

// n: from 1 on.
void arm(Refused what, uint64_t n, Until until, Of whose);

// Of the thread that arms, only what it does within such a scope is the product's: the test's own
// memory is never refused.
class InProduct {
 public:
  InProduct();
  ~InProduct();
  InProduct(const InProduct&) = delete;
  InProduct& operator=(const InProduct&) = delete;
};

struct Seen {
  uint64_t n_calls = 0;
  uint64_t n_refused = 0;
};
Seen disarm();

struct Held {
  int64_t n_blocks = 0;
  int64_t mapped_bytes = 0;
  int64_t n_descriptors = 0;

  bool operator==(const Held&) const = default;
};
Held held();

}  // namespace kvm::testing

#endif  // KVM_TESTS_FAULTS_FAULTS_H_
