// SPDX-License-Identifier: Apache-2.0
// DiskIo: files that are read and written asynchronously, each known by a small number.
//
//   create(file), or attach(file) --> submit(op, op, ...) --> reap(): ops that have ended
//     --> remove(file)
//
// Three implementations: io_uring (uring_disk.h), a pool of threads with pread and pwrite
// (pool_disk.h), and a disk made of memory, with faults from a seed (simulated_disk.h). Completions
// are taken by the caller, in reap(): who uses a DiskIo has one thread for it, so what belongs to
// an op in flight needs no lock, and a simulated disk replays the same run from the same seed.
//
// An op ends when all of it is done, or with an error: short transfers are continued, EINTR and
// EAGAIN begun again.
//
// Threads: one, but for wake().  Memory: buffers() as asked for at the start; submit() and reap()
// allocate nothing but the sentence of an error.
#ifndef KVM_TIERS_DISK_DISK_IO_H_
#define KVM_TIERS_DISK_DISK_IO_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"

namespace kvm::tiers {

// Direct I/O wants offsets, sizes and addresses that are multiples of the device's block.
// LIMIT: no device in use has blocks of more than 4 KiB; where one has, its files are buffered.
inline constexpr uint32_t kMaxDiskBlockBytes = 4096;

// A DiskOp is one stretch of a file on its way. It and the memory at `data` stay as they are from
// submit() until reap() returns it.
struct DiskOp {
  enum class Kind : uint8_t { kRead, kWrite, kSync };

  Kind kind = Kind::kRead;
  uint32_t file = 0;
  // REQUIRES: of reads and writes, multiples of block_bytes(); the size is not 0, and the file is
  // as long.
  uint64_t offset = 0;
  std::byte* data = nullptr;
  uint32_t size_bytes = 0;
  // Of an op that reap() returned: OK; NO_SPACE; IO. What a failed read has left at `data`, and a
  // failed write in the file, is undefined.
  Status status;

  // --- Of the DiskIo that has it ----------------------------------------------------------------

  void begin();
  // Takes the result of a system call for what is left: bytes, or -errno. Returns whether the op
  // has ended; else it goes on at n_done_bytes.
  bool take(int64_t result, uint32_t block_bytes) noexcept;

  uint32_t n_done_bytes = 0;
  uint32_t n_retries = 0;
};

struct DiskIoOptions {
  uint32_t n_files = 1;       // file numbers are below it
  uint32_t queue_depth = 32;  // ops in flight, at most
  uint64_t buffer_bytes = 0;  // of buffers()
  uint32_t n_threads = 16;    // of a pool
  bool is_read_only = false;  // files are attached to be read, and nothing else is done
  // What a system call has returned (bytes, or -errno) becomes what this returns, for tests; none:
  // it stays. Called on the pool's threads too.
  std::function<int64_t(const DiskOp& op, int64_t result)> rewrite;
};

class DiskIo {
 public:
  // REQUIRES: no op is in flight. Files stay on the disk; remove() takes them away.
  virtual ~DiskIo() = default;

  // "io_uring", "threads" or "simulated".
  virtual const char* name() const = 0;
  // Whether no file so far goes through the page cache, because its file system knows no direct
  // I/O.
  virtual bool is_direct() const = 0;
  // Of the files so far: a power of two from 512 to kMaxDiskBlockBytes.
  virtual uint32_t block_bytes() const = 0;
  // Memory for ops, aligned to kMaxDiskBlockBytes; of io_uring it is registered where the system
  // allows that. Other memory does as well, if it is aligned.
  virtual std::span<std::byte> buffers() = 0;

  // Makes the file, of `size_bytes`, with room on the disk for all of it.
  // Fails: NO_SPACE; EXISTS; IO; nothing has changed then. REQUIRES: the number is not in use, and
  // the size is a multiple of kMaxDiskBlockBytes.
  virtual Status create(uint32_t file, const std::string& path, uint64_t size_bytes) = 0;
  // Opens a file that is there, and returns its size. Fails: NOT_FOUND; IO; nothing has changed
  // then. REQUIRES: the number is not in use.
  virtual Result<uint64_t> attach(uint32_t file, const std::string& path) = 0;
  // From now on a crash does not take the file itself; what is in it is a matter of kSync. Blocks
  // for some milliseconds. Fails: IO.
  virtual Status sync_entry(uint32_t file) = 0;
  // REQUIRES: no op of the file is in flight.
  virtual void remove(uint32_t file) noexcept = 0;

  // Begins them all. REQUIRES: with them no more than queue_depth are in flight, and no two writes
  // of the same bytes.
  virtual void submit(std::span<DiskOp* const> ops) noexcept = 0;
  // Returns how many of `ended` it has set, to ops that have ended. Where there is none it waits:
  // for one, for wake(), or for so long; UINT64_MAX: without end.
  virtual size_t reap(std::span<DiskOp*> ended, uint64_t timeout_ns) noexcept = 0;
  // Ends the wait of reap(), or of the next one. On any thread.
  virtual void wake() noexcept = 0;
};

enum class DiskBackend : uint8_t { kAny, kUring, kThreads };

// io_uring; threads where the system refuses that, if any will do. Fails: UNSUPPORTED (io_uring
// is refused and nothing else would do); NO_MEMORY; LIMIT.
Result<std::unique_ptr<DiskIo>> open_disk_io(DiskBackend backend, const DiskIoOptions& options);

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_DISK_IO_H_
