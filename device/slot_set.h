// SPDX-License-Identifier: Apache-2.0
// SlotSet: a set of numbers below 2^22, of which the lowest is asked for. Bits in three levels,
// each of which says which words of the one below are not zero: all operations take a few loads,
// whatever the set holds.
#ifndef KVM_DEVICE_SLOT_SET_H_
#define KVM_DEVICE_SLOT_SET_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvm::device {

class SlotSet {
 public:
  // Makes room for numbers below n. What is in the set stays.
  void resize(uint32_t n) {
    size_t words = n;
    for (std::vector<uint64_t>& level : levels_) {
      words = (words + 63) / 64;
      level.resize(words);
    }
  }
  bool empty() const { return size_ == 0; }
  uint32_t size() const { return size_; }
  // REQUIRES: below the size of resize, here and below.
  bool contains(uint32_t slot) const { return (levels_[0][slot / 64] >> slot % 64 & 1) != 0; }

  // REQUIRES: it is not in the set.
  void insert(uint32_t slot) {
    ++size_;
    for (std::vector<uint64_t>& level : levels_) {
      level[slot / 64] |= uint64_t{1} << slot % 64;
      slot /= 64;
    }
  }
  // REQUIRES: it is in the set.
  void erase(uint32_t slot) {
    --size_;
    for (std::vector<uint64_t>& level : levels_) {
      level[slot / 64] &= ~(uint64_t{1} << slot % 64);
      if (level[slot / 64] != 0) {
        return;  // the levels above say so already
      }
      slot /= 64;
    }
  }
  // REQUIRES: !empty().
  uint32_t lowest() const {
    size_t word = 0;
    while (levels_[2][word] == 0) {
      ++word;  // at most 16 of them
    }
    for (size_t level = 2; level > 0; --level) {
      word = word * 64 + static_cast<size_t>(std::countr_zero(levels_[level][word]));
    }
    return static_cast<uint32_t>(word * 64 +
                                 static_cast<size_t>(std::countr_zero(levels_[0][word])));
  }

 private:
  std::vector<uint64_t> levels_[3];  // [0]: a bit for each number
  uint32_t size_ = 0;
};

}  // namespace kvm::device

#endif  // KVM_DEVICE_SLOT_SET_H_
