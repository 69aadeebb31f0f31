// SPDX-License-Identifier: Apache-2.0
// Message: what an update changes in a batch's device memory, gathered in memory of the host so
// that one copy brings all of it to the device, where a kernel puts each run of words in its place
// (attention/cuda/table_kernel.h).
//
//    | ... run 2 | run 1 | run 0 | words ...          runs grow downwards, words upwards:
//          ^ begin                       ^ end        what is used lies together
//
// Threads: one at a time.
#ifndef KVM_DEVICE_MESSAGE_H_
#define KVM_DEVICE_MESSAGE_H_

#include <algorithm>
#include <cstdint>

#include "attention/cuda/params.h"
#include "base/assert.h"
#include "base/round.h"

namespace kvm::device {

class Message {
 public:
  static constexpr uint64_t bytes_for(uint32_t max_runs, uint32_t max_words) {
    return uint64_t{max_runs} * sizeof(attention::gpu::WordRun) + uint64_t{max_words} * 4;
  }
  // Runs and words that `size_bytes` may take at most where they begin at multiples of 16 bytes.
  static constexpr uint32_t words_for(uint64_t size_bytes) {
    return static_cast<uint32_t>(round_up(size_bytes, 16) / 4);
  }
  static constexpr uint32_t runs_for(uint64_t size_bytes) {
    return static_cast<uint32_t>(div_up(size_bytes, 4 * attention::gpu::kMaxRunWords));
  }

  // In `memory`, of bytes_for(max_runs, max_words) bytes, aligned to 16. Empty.
  Message(uint8_t* memory, uint32_t max_runs, uint32_t max_words)
      : memory_(memory), max_runs_(max_runs), max_words_(max_words) {}

  void clear() { n_runs_ = n_words_ = 0; }
  // Says whether n more values fit, with the runs that they take.
  template <class T>
  bool has_room(uint64_t n) const {
    return n_runs_ + runs_for(n * sizeof(T)) <= max_runs_ &&
           uint64_t{n_words_} + words_for(n * sizeof(T)) <= max_words_;
  }
  // Where n values are written that go to byte `to` of the batch's memory.
  // REQUIRES: has_room<T>(n); `to` is a multiple of 4, and so is the size of all values together.
  template <class T>
  T* add(uint64_t to, uint64_t n) {
    T* const at = next<T>();
    end(to, at + n);
    return at;
  }
  // Likewise in two steps, where it is seen only later how many they are: next says where they are
  // written, end where they end.
  template <class T>
  T* next() const {
    return reinterpret_cast<T*>(words() + n_words_);
  }
  template <class T>
  void end(uint64_t to, const T* values_end) {
    const auto n_bytes = static_cast<uint64_t>(reinterpret_cast<const uint8_t*>(values_end) -
                                               reinterpret_cast<const uint8_t*>(next<uint8_t>()));
    KVM_ASSERT(to % 4 == 0 && n_bytes % 4 == 0 && has_room<uint8_t>(n_bytes));
    const auto n_words = static_cast<uint32_t>(n_bytes / 4);
    for (uint32_t done = 0; done < n_words; done += attention::gpu::kMaxRunWords) {
      *(runs_end() - ++n_runs_) = {to / 4 + done, n_words_ + done,
                                   std::min(n_words - done, attention::gpu::kMaxRunWords)};
    }
    n_words_ += words_for(n_bytes);
  }

  uint32_t n_runs() const { return n_runs_; }
  // What is copied, and where runs and words are in it, in bytes from the memory's beginning.
  uint64_t begin() const { return uint64_t{max_runs_ - n_runs_} * sizeof(attention::gpu::WordRun); }
  uint64_t words_begin() const { return uint64_t{max_runs_} * sizeof(attention::gpu::WordRun); }
  uint64_t end() const { return words_begin() + uint64_t{n_words_} * 4; }
  const uint8_t* data() const { return memory_; }

 private:
  attention::gpu::WordRun* runs_end() const {
    return reinterpret_cast<attention::gpu::WordRun*>(memory_ + words_begin());
  }
  uint32_t* words() const { return reinterpret_cast<uint32_t*>(memory_ + words_begin()); }

  uint8_t* memory_;
  uint32_t max_runs_;
  uint32_t max_words_;
  uint32_t n_runs_ = 0;
  uint32_t n_words_ = 0;
};

}  // namespace kvm::device

#endif  // KVM_DEVICE_MESSAGE_H_
