// SPDX-License-Identifier: Apache-2.0
// ReadEpochs: says when what readers may have looked up is read by none of them any more.
//
// A reader looks addresses up and uses them until it ends, without a lock or a count for each. What
// is given up in epoch e may be used for something else when all readers that began in e or before
// have ended; those that begin later look it up where it is then.
//
// Threads: one.  Memory: fixed.
#ifndef KVM_TIERS_READ_EPOCHS_H_
#define KVM_TIERS_READ_EPOCHS_H_

#include <array>
#include <cstdint>

#include "base/assert.h"

namespace kvm::tiers {

class ReadEpochs {
 public:
  // LIMIT: epochs between the oldest reader and now.
  static constexpr uint64_t kMaxEpochs = 64;

  // Returns what the reader must end with.
  uint64_t begin() {
    ++n_readers_[now_ % kMaxEpochs];
    return now_;
  }
  // The same for one that takes over what a reader of this epoch looked up, which has not ended.
  uint64_t follow(uint64_t epoch) {
    KVM_ASSERT(epoch >= oldest_ && epoch <= now_ && n_readers_[epoch % kMaxEpochs] != 0);
    ++n_readers_[epoch % kMaxEpochs];
    return epoch;
  }
  void end(uint64_t epoch) {
    KVM_ASSERT(epoch >= oldest_ && epoch <= now_ && n_readers_[epoch % kMaxEpochs] != 0);
    --n_readers_[epoch % kMaxEpochs];
    while (oldest_ < now_ && n_readers_[oldest_ % kMaxEpochs] == 0) {
      ++oldest_;
    }
  }

  uint64_t now() const { return now_; }
  // Begins an epoch. Where the oldest reader is too far back the epoch stays as it is, and what is
  // given up waits for readers that begin later, too.
  void advance() {
    if (now_ - oldest_ + 1 < kMaxEpochs) {
      ++now_;
      oldest_ += oldest_ + 1 == now_ && n_readers_[oldest_ % kMaxEpochs] == 0 ? 1 : 0;
    }
  }
  // Whether all readers that began in this epoch or before have ended.
  bool has_ended(uint64_t epoch) const { return epoch < oldest_; }

 private:
  std::array<uint64_t, kMaxEpochs> n_readers_{};  // by epoch
  uint64_t now_ = 0;
  uint64_t oldest_ = 0;  // no reader of an earlier one is left
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_READ_EPOCHS_H_
