// SPDX-License-Identifier: Apache-2.0
#include "client/process_token.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

#include "base/clock.h"

namespace kvm::client {

namespace {

constexpr size_t kOsPageBytes = 4096;

// A page that the kernel clears in children (MADV_WIPEONFORK, Linux 4.14); nullptr where there is
// none.
std::atomic<uint64_t>* wiped_word() {
  static std::atomic<uint64_t>* const word = []() -> std::atomic<uint64_t>* {
    void* page =
        ::mmap(nullptr, kOsPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) {
      return nullptr;
    }
    if (::madvise(page, kOsPageBytes, MADV_WIPEONFORK) != 0) {
      ::munmap(page, kOsPageBytes);
      return nullptr;
    }
    return static_cast<std::atomic<uint64_t>*>(page);
  }();
  return word;
}

}  // namespace

uint64_t process_token() {
  std::atomic<uint64_t>* const word = wiped_word();
  if (word == nullptr) {
    return static_cast<uint64_t>(::getpid());
  }
  // SYNC: relaxed: the word stands for itself.
  uint64_t token = word->load(std::memory_order_relaxed);
  if (token == 0) [[unlikely]] {
    // Process ids are used again, points in time are not.
    const uint64_t fresh = now_ns() | 1u;
    if (word->compare_exchange_strong(token, fresh, std::memory_order_relaxed)) {
      token = fresh;
    }
  }
  return token;
}

}  // namespace kvm::client
