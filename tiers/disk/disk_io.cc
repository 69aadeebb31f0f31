// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/disk_io.h"

#include <string.h>

#include <cerrno>
#include <new>
#include <utility>

#include "base/assert.h"
#include "tiers/disk/pool_disk.h"
#include "tiers/disk/uring_disk.h"

namespace kvm::tiers {
namespace {

// LIMIT: an op that a thousand times did not get on is given up: a device that answers EAGAIN for
// ever would keep its pages in flight for ever.
constexpr uint32_t kMaxRetries = 1000;

const char* verb_of(DiskOp::Kind kind) {
  switch (kind) {
    case DiskOp::Kind::kRead:
      return "reading";
    case DiskOp::Kind::kWrite:
      return "writing";
    case DiskOp::Kind::kSync:
      return "syncing";
  }
  return "?";
}

Status failed(const DiskOp& op, int error, const char* reason) noexcept {
  const kvm_status code = error == ENOSPC || error == EDQUOT ? KVM_ERR_NO_SPACE : KVM_ERR_IO;
  try {
    return Status(code, std::string(verb_of(op.kind)) + " " + std::to_string(op.size_bytes) +
                            " bytes at " + std::to_string(op.offset) + ": " + reason);
  } catch (const std::bad_alloc&) {
    return Status::fixed(code, "the disk failed (there is no memory for the sentence)");
  }
}

}  // namespace

void DiskOp::begin() {
  status = Status();
  n_done_bytes = 0;
  n_retries = 0;
}

bool DiskOp::take(int64_t result, uint32_t block_bytes) noexcept {
  if (result < 0) {
    const int error = static_cast<int>(-result);
    if ((error == EAGAIN || error == EINTR) && ++n_retries <= kMaxRetries) {
      return false;
    }
    status = failed(*this, error, ::strerror(error));
    return true;
  }
  if (kind == Kind::kSync) {
    return true;
  }
  if (result == 0) {
    status = failed(*this, EIO, kind == Kind::kRead ? "the file ends there" : "nothing is taken");
    return true;
  }
  KVM_ASSERT(static_cast<uint64_t>(result) <= size_bytes - n_done_bytes);
  const uint32_t n_before = n_done_bytes;
  n_done_bytes += static_cast<uint32_t>(result);
  if (n_done_bytes == size_bytes) {
    return true;
  }
  n_done_bytes -= n_done_bytes % block_bytes;  // where direct I/O can go on
  if (n_done_bytes == n_before && ++n_retries > kMaxRetries) {
    status = failed(*this, EIO, "it does not get on");
    return true;
  }
  return false;
}

Result<std::unique_ptr<DiskIo>> open_disk_io(DiskBackend backend, const DiskIoOptions& options) {
  if (backend != DiskBackend::kThreads) {
    Result<std::unique_ptr<DiskIo>> uring = open_uring_disk(options);
    if (uring.is_ok() || backend == DiskBackend::kUring) {
      return uring;
    }
  }
  return open_pool_disk(options);
}

}  // namespace kvm::tiers
