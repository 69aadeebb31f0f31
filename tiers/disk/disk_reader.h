// SPDX-License-Identifier: Apache-2.0
// A DiskReader reads stretches of files, many at a time.
//
// Threads: that of the DiskIo.  Memory: the buffers it is given.
#ifndef KVM_TIERS_DISK_DISK_READER_H_
#define KVM_TIERS_DISK_DISK_READER_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/assert.h"
#include "base/status.h"
#include "tiers/disk/disk_format.h"
#include "tiers/disk/disk_io.h"

namespace kvm::tiers {

class DiskReader {
 public:
  struct Stretch {
    uint32_t file;
    uint64_t begin;
    uint64_t n_bytes;
  };
  // Takes the bytes, which are gone when it returns. Empty: they could not be read.
  using Taker = std::function<void(size_t index, std::span<const std::byte> bytes)>;

  // LIMIT: reads at a time; more gain nothing.
  static constexpr size_t kMaxReads = 32;

  // REQUIRES: buffers: aligned, of at least one piece of piece_bytes, a multiple of 4 KiB above
  // 8 KiB.
  DiskReader(DiskIo* io, std::span<std::byte> buffers, uint32_t piece_bytes)
      : io_(io),
        piece_bytes_(piece_bytes),
        reads_(std::min(kMaxReads, buffers.size() / piece_bytes)) {
    KVM_ASSERT(!reads_.empty());
    for (size_t i = 0; i < reads_.size(); ++i) {
      reads_[i].data = buffers.data() + i * piece_bytes;
      idle_.push_back(&reads_[i]);
    }
  }

  // Why, of the last that could not be read. OK: all could.
  const Status& error() const { return error_; }

  // The largest stretch that can be read at once, wherever it begins.
  uint64_t max_bytes() const { return piece_bytes_ - 2 * uint64_t{kMaxDiskBlockBytes}; }

  // Reads n stretches: of(index) says which; take() is called for each, in any order.
  // REQUIRES: none is empty, or larger than max_bytes(); each lies within its file.
  template <typename Of>
  void run(size_t n, Of of, const Taker& take) {
    size_t n_begun = 0;
    size_t n_ended = 0;
    while (n_ended < n) {
      std::vector<DiskOp*> begun;
      while (n_begun < n && !idle_.empty()) {
        Read* const read = idle_.back();
        idle_.pop_back();
        const Stretch stretch = of(n_begun);
        KVM_ASSERT(stretch.n_bytes != 0 && stretch.n_bytes <= max_bytes());
        aim(read, stretch);
        read->index = n_begun++;
        begun.push_back(read);
      }
      io_->submit(begun);
      std::array<DiskOp*, kMaxReads> ended;
      const size_t n_now = io_->reap(ended, UINT64_MAX);
      for (size_t i = 0; i < n_now; ++i) {
        auto* const read = static_cast<Read*>(ended[i]);
        take(read->index, bytes_of(*read));
        idle_.push_back(read);
      }
      n_ended += n_now;
    }
  }

  // A stretch of any length, in pieces: to.size() bytes. False: not all could be read; the rest is
  // as it was.
  bool read(uint32_t file, uint64_t begin, std::span<std::byte> to);

 private:
  struct Read : DiskOp {
    // What of it is wanted: [begin, begin + n_bytes) of the file.
    uint64_t begin = 0;
    uint64_t n_bytes = 0;
    size_t index = 0;
  };

  void aim(Read* read, const Stretch& stretch) const;
  std::span<const std::byte> bytes_of(const Read& read);

  DiskIo* io_;
  uint32_t piece_bytes_;
  std::vector<Read> reads_;
  std::vector<Read*> idle_;
  Status error_;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_DISK_READER_H_
