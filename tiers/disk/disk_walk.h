// SPDX-License-Identifier: Apache-2.0
// A SegmentWalk goes over a segment from one end to the other and compares each record with its
// checksum. It is fed with what its file holds, stretch by stretch.
//
// Where a record lies that is wanted it is expected, whatever is there; others are found as
// recovery finds them, at each multiple of 64 bytes behind what is none.
//
// Threads: one.  Memory: none of its own.
#ifndef KVM_TIERS_DISK_DISK_WALK_H_
#define KVM_TIERS_DISK_DISK_WALK_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/status.h"
#include "tiers/disk/disk_format.h"
#include "tiers/disk/disk_recovery.h"

namespace kvm::tiers {

class SegmentWalk {
 public:
  // What it comes across. Offsets are those of records.
  class Listener {
   public:
    // The i-th of those that are wanted. reason: "": it is whole.
    virtual void on_wanted(size_t i, const std::string& reason) = 0;
    virtual void on_other(uint64_t offset, uint64_t n_bytes, bool is_whole) = 0;
    // What was a record of this segment once: its header is damaged. As far as it can be read.
    virtual void on_broken(uint64_t offset, const RecordHeader& header) = 0;

   protected:
    ~Listener() = default;
  };

  // wanted: by their offsets. All stay as they are until the walk ends.
  SegmentWalk(const SegmentHeader& header, std::span<const FoundPage> wanted, Listener* listener)
      : segment_(header), wanted_(wanted), listener_(listener) {}

  // The bytes from `begin` on, where those before have ended; where they cannot be read, as many
  // zeros, and why. REQUIRES: begin and the size are multiples of 4 KiB.
  void feed(uint64_t begin, std::span<const std::byte> bytes, const Status& error);
  // The file ends.
  void end();

 private:
  void begin_record(std::span<const std::byte> from, const Status& error);
  void expect_wanted(std::span<const std::byte> from, const Status& error);
  void end_record();
  bool was_record(const RecordHeader& header) const;
  uint64_t next_wanted() const {
    return next_ < wanted_.size() ? offset_of(wanted_[next_].unit) : UINT64_MAX;
  }

  const SegmentHeader segment_;
  const std::span<const FoundPage> wanted_;
  Listener* const listener_;
  size_t next_ = 0;  // of those that are wanted
  uint64_t at_ = kSegmentHeaderBytes;
  // The record that at_ is in, while there is any of its page to come.
  uint64_t left_bytes_ = 0;
  uint64_t record_begin_ = 0;
  bool is_wanted_ = false;
  uint32_t crc_ = 0;
  uint32_t expected_crc_ = 0;
  std::string error_;  // of reading it
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_DISK_WALK_H_
