// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/disk_walk.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "tiers/disk/crc32c.h"

namespace kvm::tiers {

void SegmentWalk::feed(uint64_t begin, std::span<const std::byte> bytes, const Status& error) {
  const uint64_t end = begin + bytes.size();
  while (at_ < end) {
    if (left_bytes_ == 0) {
      begin_record(bytes.subspan(at_ - begin), error);
      continue;
    }
    const uint64_t n = std::min(left_bytes_, end - at_);
    crc_ = crc32c(bytes.subspan(at_ - begin, n), crc_);
    if (!error.is_ok()) {
      error_ = error.message();
    }
    at_ += n;
    left_bytes_ -= n;
    if (left_bytes_ == 0) {
      end_record();
    }
  }
}

// Whether it is the header of a record that was written here, but for a part of it: what lay there
// before has a checksum that matches.
bool SegmentWalk::was_record(const RecordHeader& header) const {
  const RecordHeader expected;
  const std::array<bool, 5> matches = {header.magic == expected.magic,
                                       header.run_id == segment_.run_id,
                                       header.generation == segment_.generation,
                                       header.segment == segment_.segment, header.offset == at_};
  const auto n_matches = std::count(matches.begin(), matches.end(), true);
  return n_matches + 1 >= static_cast<ptrdiff_t>(matches.size()) &&
         crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(RecordHeader, header_crc))) !=
             header.header_crc;
}

// Where a record may begin: goes on into its page, or to where the next may.
void SegmentWalk::begin_record(std::span<const std::byte> from, const Status& error) {
  for (; next_wanted() < at_; ++next_) {
    listener_->on_wanted(next_, "another record lies there");
  }
  if (next_wanted() == at_) {
    return expect_wanted(from, error);
  }
  RecordHeader header;
  const bool is_record = read_record_header(from, segment_, at_, &header);
  if (!is_record || record_bytes(header.size_bytes) > next_wanted() - at_) {
    std::memcpy(&header, from.data(), sizeof(header));
    if (!is_record && was_record(header)) {
      listener_->on_broken(at_, header);
    }
    at_ += kRecordUnitBytes;
    return;
  }
  is_wanted_ = false;
  record_begin_ = at_;
  left_bytes_ = header.size_bytes;
  expected_crc_ = header.page_crc;
  crc_ = 0;
  error_.clear();
  at_ += sizeof(header);
}

void SegmentWalk::expect_wanted(std::span<const std::byte> from, const Status& error) {
  const FoundPage& page = wanted_[next_];
  const RecordHeader expected{.name = page.name,
                              .run_id = segment_.run_id,
                              .generation = segment_.generation,
                              .offset = at_,
                              .segment = segment_.segment,
                              .size_bytes = page.size_bytes};
  const char* const reason = check_record_header(expected, from, &expected_crc_);
  if (reason != nullptr) {
    listener_->on_wanted(next_, error.is_ok() ? std::string(reason) : std::string(error.message()));
    ++next_;
    // What it was to hold is no record of its own.
    at_ = std::min(at_ + record_bytes(page.size_bytes), next_wanted());
    return;
  }
  is_wanted_ = true;
  record_begin_ = at_;
  left_bytes_ = page.size_bytes;
  crc_ = 0;
  error_.clear();
  at_ += sizeof(RecordHeader);
}

void SegmentWalk::end_record() {
  at_ = align_up(at_, kRecordUnitBytes);
  const bool is_whole = error_.empty() && crc_ == expected_crc_;
  if (!is_wanted_) {
    return listener_->on_other(record_begin_, at_ - record_begin_, is_whole);
  }
  const char* const reason = is_whole ? "" : "the checksum of the page does not match";
  listener_->on_wanted(next_++, error_.empty() ? std::string(reason) : error_);
}

void SegmentWalk::end() {
  for (; next_ < wanted_.size(); ++next_) {
    listener_->on_wanted(next_, "the file ends before it does");
  }
}

}  // namespace kvm::tiers
