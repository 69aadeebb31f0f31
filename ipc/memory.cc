// SPDX-License-Identifier: Apache-2.0
#include "ipc/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "base/children.h"

namespace kvm::ipc {

namespace {

constexpr uint64_t kOsPageBytes = 4096;
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

Status memory_error(const char* what, uint64_t size_bytes) {
  return Status(KVM_ERR_NO_MEMORY, std::string(what) + " of " + std::to_string(size_bytes) +
                                       " bytes of shared memory: " + ::strerror(errno));
}

// Where invariants are checked, inaccessible pages stand on both sides of a mapping:
// AddressSanitizer knows nothing of where a mapping ends, and the next one may begin there.
#if KVM_CHECK >= 2
constexpr uint64_t kGuardBytes = kOsPageBytes;
#else
constexpr uint64_t kGuardBytes = 0;
#endif

constexpr uint64_t round_to_pages(uint64_t size_bytes) {
  return (size_bytes + kOsPageBytes - 1) & ~(kOsPageBytes - 1);
}

// As mmap: MAP_FAILED, and errno.
void* map_file(uint64_t size_bytes, int protection, const Fd& fd) {
  if (kGuardBytes == 0) {
    return ::mmap(nullptr, size_bytes, protection, MAP_SHARED, fd.get(), 0);
  }
  const uint64_t reserved_bytes = round_to_pages(size_bytes) + 2 * kGuardBytes;
  void* reserved = ::mmap(nullptr, reserved_bytes, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    return MAP_FAILED;
  }
  void* data = ::mmap(static_cast<uint8_t*>(reserved) + kGuardBytes, size_bytes, protection,
                      MAP_SHARED | MAP_FIXED, fd.get(), 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    ::munmap(reserved, reserved_bytes);
    errno = error;
  }
  return data;
}

}  // namespace

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    unmap();
    data_ = std::exchange(other.data_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
  }
  return *this;
}

Mapping::~Mapping() { unmap(); }

void Mapping::discard_contents() {
  if (data_ != nullptr) {
    // Refused for memory that is sealed against writing, which is small.
    (void)::madvise(data_, size_bytes_, MADV_REMOVE);
  }
}

void Mapping::unmap() {
  if (data_ != nullptr) {
    ::munmap(data() - kGuardBytes, round_to_pages(size_bytes_) + 2 * kGuardBytes);
    data_ = nullptr;
  }
}

Result<SharedMemory> create_shared_memory(const char* name, uint64_t size_bytes,
                                          PeerAccess access) {
  if (size_bytes == 0 || size_bytes > uint64_t{INT64_MAX} - kOsPageBytes) {
    return Status(KVM_ERR_NO_MEMORY,
                  "shared memory of " + std::to_string(size_bytes) + " bytes cannot be made");
  }
  size_bytes = round_to_pages(size_bytes);
  SharedMemory memory;
  memory.fd = Fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.fd.is_open()) {
    return memory_error("memfd_create", size_bytes);
  }
  // Allocated now: a sparse file would fault at the first touch once memory has run out.
  while (::fallocate(memory.fd.get(), 0, 0, static_cast<off_t>(size_bytes)) != 0) {
    if (errno != EINTR) {
      return memory_error("allocation", size_bytes);
    }
  }
  void* data = map_file(size_bytes, PROT_READ | PROT_WRITE, memory.fd);
  if (data == MAP_FAILED) {
    return memory_error("mapping", size_bytes);
  }
  memory.mapping = Mapping(data, size_bytes);
  // After our own mapping, which F_SEAL_FUTURE_WRITE leaves writable.
  const int seals = kSizeSeals | (access == PeerAccess::kReadOnly ? F_SEAL_FUTURE_WRITE : 0);
  if (::fcntl(memory.fd.get(), F_ADD_SEALS, seals) != 0) {
    return memory_error("sealing", size_bytes);
  }
  return memory;
}

Result<Mapping> map_shared_memory(const Fd& fd, uint64_t size_bytes, PeerAccess access) {
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  const int wanted = F_SEAL_SHRINK | F_SEAL_GROW;
  if (seals < 0 || (seals & wanted) != wanted) {
    return Status(KVM_ERR_PROTOCOL, "the daemon sent memory whose size is not sealed (seals " +
                                        std::to_string(seals) + ")");
  }
  struct stat facts {};
  if (::fstat(fd.get(), &facts) != 0 || size_bytes == 0 ||
      static_cast<uint64_t>(facts.st_size) < size_bytes) {
    return Status(KVM_ERR_PROTOCOL, "the daemon sent memory of " + std::to_string(facts.st_size) +
                                        " bytes where " + std::to_string(size_bytes) +
                                        " were promised");
  }
  const int protection = access == PeerAccess::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = map_file(size_bytes, protection, fd);
  if (data == MAP_FAILED) {
    return memory_error("mapping", size_bytes);
  }
  leave_out_of_children(data, size_bytes);
  return Mapping(data, size_bytes);
}

}  // namespace kvm::ipc
