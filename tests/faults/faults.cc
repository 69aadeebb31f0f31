// SPDX-License-Identifier: Apache-2.0
#include "tests/faults/faults.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <system_error>
#include <thread>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace kvm::testing {
namespace {

// Plain memory: used before and after everything else of the process.
constinit std::atomic<bool> g_is_armed{false};
constinit std::atomic<uint64_t> g_n_calls{0};
constinit std::atomic<uint64_t> g_n_refused{0};
constinit std::atomic<int64_t> g_n_blocks{0};
constinit std::atomic<int64_t> g_mapped_bytes{0};
// Written while nothing is armed.
Refused g_what = Refused::kAllocation;
uint64_t g_n = 0;
Until g_until = Until::kOnce;
Of g_whose = Of::kAnyThread;
// Of the thread that armed last.
thread_local bool t_armed = false;
thread_local bool t_in_product = false;

// Where a call was refused, for whoever looks into a failure: KVM_FAULT_STACK=1.
void print_stack() {
#if defined(__SANITIZE_ADDRESS__)
  static const bool kWanted = std::getenv("KVM_FAULT_STACK") != nullptr;
  if (kWanted) {
    std::fprintf(stderr, "refused %s, call %llu:\n", name_of(g_what),
                 static_cast<unsigned long long>(g_n_calls.load()));
    __sanitizer_print_stack_trace();
  }
#endif
}

bool concerns_this_thread() {
  return t_armed ? t_in_product && g_whose != Of::kOtherThreads : g_whose != Of::kThisThread;
}

// Counts a call, and tells whether it is to be refused.
bool is_refused(Refused what) {
  if (!g_is_armed.load(std::memory_order_acquire) || what != g_what || !concerns_this_thread()) {
    return false;
  }
  const uint64_t number = g_n_calls.fetch_add(1) + 1;
  if (number != g_n && (g_until == Until::kOnce || number < g_n)) {
    return false;
  }
  g_n_refused.fetch_add(1);
  print_stack();
  return true;
}

bool is_refused(Refused what, int error) {
  if (!is_refused(what)) {
    return false;
  }
  errno = error;
  return true;
}

void* allocate(size_t size, size_t align) {
  if (is_refused(Refused::kAllocation)) {
    return nullptr;
  }
  void* block = nullptr;
  if (align <= alignof(std::max_align_t)) {
    block = std::malloc(size == 0 ? 1 : size);
  } else if (::posix_memalign(&block, align, size) != 0) {
    block = nullptr;
  }
  g_n_blocks.fetch_add(block != nullptr ? 1 : 0, std::memory_order_relaxed);
  return block;
}

void* allocate_or_throw(size_t size, size_t align) {
  void* block = allocate(size, align);
  if (block == nullptr) {
    throw std::bad_alloc();
  }
  return block;
}

void release(void* block) {
  g_n_blocks.fetch_sub(block != nullptr ? 1 : 0, std::memory_order_relaxed);
  std::free(block);
}

int64_t count_descriptors() {
  int64_t n = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (folder != nullptr && ::readdir(folder) != nullptr) {
    ++n;
  }
  if (folder != nullptr) {
    ::closedir(folder);
  }
  return n;
}

}  // namespace

const char* name_of(Refused what) {
  switch (what) {
    case Refused::kAllocation:
      return "allocation";
    case Refused::kMapping:
      return "mapping";
    case Refused::kMemfd:
      return "memfd";
    case Refused::kDescriptor:
      return "descriptor";
    case Refused::kThread:
      return "thread";
    case Refused::kFutex:
      break;
  }
  return "futex";
}

void arm(Refused what, uint64_t n, Until until, Of whose) {
  g_what = what;
  g_n = n;
  g_until = until;
  g_whose = whose;
  g_n_calls.store(0);
  g_n_refused.store(0);
  t_armed = true;
  // SYNC: release: who sees it armed sees what is armed.
  g_is_armed.store(true, std::memory_order_release);
}

Seen disarm() {
  g_is_armed.store(false);
  t_armed = false;
  return {g_n_calls.load(), g_n_refused.load()};
}

InProduct::InProduct() { t_in_product = true; }
InProduct::~InProduct() { t_in_product = false; }

Held held() { return {g_n_blocks.load(), g_mapped_bytes.load(), count_descriptors()}; }

// --- What the linker puts in the place of the system's functions ---------------------------------

namespace {

void count_mapped(int64_t size_bytes) {
  g_mapped_bytes.fetch_add(size_bytes, std::memory_order_relaxed);
}

int64_t mapped_bytes(size_t size_bytes) {
  return static_cast<int64_t>((size_bytes + 4095) & ~size_t{4095});
}

// A full table of descriptors: the kernel drops what a message brings and says so.
void drop_received(msghdr* message) {
  for (cmsghdr* header = CMSG_FIRSTHDR(message); header != nullptr;
       header = CMSG_NXTHDR(message, header)) {
    const size_t n = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; header->cmsg_type == SCM_RIGHTS && i < n; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      ::close(fd);
    }
  }
  message->msg_controllen = 0;
  message->msg_flags |= MSG_CTRUNC;
}

}  // namespace

// NOLINTBEGIN(bugprone-reserved-identifier): the linker's names.
extern "C" {

void* __real_mmap(void* address, size_t size, int protection, int flags, int fd, off_t offset);
void* __wrap_mmap(void* address, size_t size, int protection, int flags, int fd, off_t offset) {
  if (is_refused(Refused::kMapping, ENOMEM)) {
    return MAP_FAILED;
  }
  void* data = __real_mmap(address, size, protection, flags, fd, offset);
  // MAP_FIXED lies within what is counted already.
  count_mapped(data == MAP_FAILED || (flags & MAP_FIXED) != 0 ? 0 : mapped_bytes(size));
  return data;
}

int __real_munmap(void* address, size_t size);
int __wrap_munmap(void* address, size_t size) {
  count_mapped(-mapped_bytes(size));
  return __real_munmap(address, size);
}

int __real_mprotect(void* address, size_t size, int protection);
int __wrap_mprotect(void* address, size_t size, int protection) {
  return is_refused(Refused::kMapping, ENOMEM) ? -1 : __real_mprotect(address, size, protection);
}

int __real_memfd_create(const char* name, unsigned flags);
int __wrap_memfd_create(const char* name, unsigned flags) {
  return is_refused(Refused::kMemfd, ENFILE) ? -1 : __real_memfd_create(name, flags);
}

int __real_fallocate(int fd, int mode, off_t offset, off_t size);
int __wrap_fallocate(int fd, int mode, off_t offset, off_t size) {
  return is_refused(Refused::kMemfd, ENOSPC) ? -1 : __real_fallocate(fd, mode, offset, size);
}

int __real_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...) {
  va_list list;
  va_start(list, command);
  const long argument = va_arg(list, long);
  va_end(list);
  if (command == F_ADD_SEALS && is_refused(Refused::kMemfd, EBUSY)) {
    return -1;
  }
  return __real_fcntl(fd, command, argument);
}

int __real_eventfd(unsigned count, int flags);
int __wrap_eventfd(unsigned count, int flags) {
  return is_refused(Refused::kDescriptor, EMFILE) ? -1 : __real_eventfd(count, flags);
}

int __real_epoll_create1(int flags);
int __wrap_epoll_create1(int flags) {
  return is_refused(Refused::kDescriptor, EMFILE) ? -1 : __real_epoll_create1(flags);
}

int __real_epoll_ctl(int epoll, int operation, int fd, struct epoll_event* event);
int __wrap_epoll_ctl(int epoll, int operation, int fd, struct epoll_event* event) {
  // Of descriptors that a user watches there is a limit as well (max_user_watches).
  constexpr int kAdd = 1;
  return operation == kAdd && is_refused(Refused::kDescriptor, ENOSPC)
             ? -1
             : __real_epoll_ctl(epoll, operation, fd, event);
}

int __real_socket(int domain, int type, int protocol);
int __wrap_socket(int domain, int type, int protocol) {
  return is_refused(Refused::kDescriptor, EMFILE) ? -1 : __real_socket(domain, type, protocol);
}

int __real_accept4(int fd, sockaddr* address, socklen_t* size, int flags);
int __wrap_accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
  return is_refused(Refused::kDescriptor, EMFILE) ? -1 : __real_accept4(fd, address, size, flags);
}

int __real_dup(int fd);
int __wrap_dup(int fd) { return is_refused(Refused::kDescriptor, EMFILE) ? -1 : __real_dup(fd); }

// SO_PEERPIDFD makes a descriptor.
int __real_getsockopt(int fd, int level, int option, void* value, socklen_t* size);
int __wrap_getsockopt(int fd, int level, int option, void* value, socklen_t* size) {
  constexpr int kPeerPidfd = 77;
  return option == kPeerPidfd && is_refused(Refused::kDescriptor, EMFILE)
             ? -1
             : __real_getsockopt(fd, level, option, value, size);
}

ssize_t __real_recvmsg(int fd, msghdr* message, int flags);
ssize_t __wrap_recvmsg(int fd, msghdr* message, int flags) {
  const ssize_t n = __real_recvmsg(fd, message, flags);
  if (n > 0 && CMSG_FIRSTHDR(message) != nullptr && is_refused(Refused::kDescriptor)) {
    drop_received(message);
  }
  return n;
}

#if KVM_HAVE_URING
int __real_io_uring_queue_init(unsigned entries, struct io_uring* ring, unsigned flags);
int __wrap_io_uring_queue_init(unsigned entries, struct io_uring* ring, unsigned flags) {
  return is_refused(Refused::kDescriptor) ? -EMFILE
                                          : __real_io_uring_queue_init(entries, ring, flags);
}
#endif

long __real_syscall(long number, ...);
// Nobody says how many arguments there are: six are read, as by the function of libc, and those
// that the caller did not give may lie in what ASan guards.
__attribute__((no_sanitize_address)) long __wrap_syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long a[6];
  for (long& argument : a) {
    argument = va_arg(list, long);
  }
  va_end(list);
  if (number == SYS_pidfd_open && is_refused(Refused::kDescriptor, EMFILE)) {
    return -1;
  }
  // Those of the standard library are private, and cannot lose a wake-up.
  if (number == SYS_futex && (a[1] & FUTEX_PRIVATE_FLAG) == 0 && is_refused(Refused::kFutex)) {
    errno = EINTR;
    return a[1] == FUTEX_WAIT ? -1 : 0;
  }
  return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

void* __real_aligned_alloc(size_t align, size_t size);
void* __wrap_aligned_alloc(size_t align, size_t size) {
  return is_refused(Refused::kAllocation, ENOMEM) ? nullptr : __real_aligned_alloc(align, size);
}

// std::thread::_M_start_thread(std::unique_ptr<_State>, void (*)()), which throws as here.
using StartedState = std::unique_ptr<std::thread::_State>;
void __real__ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE(
    std::thread* self, StartedState state, void (*depend)());
void __wrap__ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE(
    std::thread* self, StartedState state, void (*depend)()) {
  if (is_refused(Refused::kThread)) {
    throw std::system_error(EAGAIN, std::generic_category());
  }
  __real__ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE(
      self, std::move(state), depend);
}

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier)

}  // namespace kvm::testing

// --- The program's operator new ------------------------------------------------------------------

using kvm::testing::allocate;
using kvm::testing::allocate_or_throw;
using kvm::testing::release;

void* operator new(size_t size) { return allocate_or_throw(size, 1); }
void* operator new[](size_t size) { return allocate_or_throw(size, 1); }
void* operator new(size_t size, std::align_val_t align) {
  return allocate_or_throw(size, static_cast<size_t>(align));
}
void* operator new[](size_t size, std::align_val_t align) {
  return allocate_or_throw(size, static_cast<size_t>(align));
}
void* operator new(size_t size, const std::nothrow_t&) noexcept { return allocate(size, 1); }
void* operator new[](size_t size, const std::nothrow_t&) noexcept { return allocate(size, 1); }
void* operator new(size_t size, std::align_val_t align, const std::nothrow_t&) noexcept {
  return allocate(size, static_cast<size_t>(align));
}
void* operator new[](size_t size, std::align_val_t align, const std::nothrow_t&) noexcept {
  return allocate(size, static_cast<size_t>(align));
}
void operator delete(void* block) noexcept { release(block); }
void operator delete[](void* block) noexcept { release(block); }
void operator delete(void* block, size_t) noexcept { release(block); }
void operator delete[](void* block, size_t) noexcept { release(block); }
void operator delete(void* block, std::align_val_t) noexcept { release(block); }
void operator delete[](void* block, std::align_val_t) noexcept { release(block); }
void operator delete(void* block, size_t, std::align_val_t) noexcept { release(block); }
void operator delete[](void* block, size_t, std::align_val_t) noexcept { release(block); }
void operator delete(void* block, const std::nothrow_t&) noexcept { release(block); }
void operator delete[](void* block, const std::nothrow_t&) noexcept { release(block); }
