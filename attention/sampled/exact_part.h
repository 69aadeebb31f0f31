// SPDX-License-Identifier: Apache-2.0
// Exact attention over a stretch of positions, as one state: what eval_chunks and merge_chunks
// give, bit for bit, without the chunks that hold nothing.
#ifndef KVM_ATTENTION_SAMPLED_EXACT_PART_H_
#define KVM_ATTENTION_SAMPLED_EXACT_PART_H_

#include "attention/attention.h"

namespace kvm::attention {

// Merges states of runs of chunks in the tree of MergeTree, where they come in ascending order and
// absent ones count as empty: two neighbours merge before either merges with a third when their
// indices share more leading bits.
class StateStack {
 public:
  // `memory`: depth_for(...) states, which are aligned.
  StateStack(const Problem& problem, void* memory);
  static uint32_t depth_for(uint64_t first_index, uint64_t last_index);

  // Where the state of `index` is to be written before push(index). Indices ascend.
  void* next() { return state(n_); }
  void push(uint64_t index);
  // All that was pushed, or the empty state.
  void finish(void* out);

 private:
  static constexpr uint32_t kMaxDepth = 66;
  void* state(uint32_t i) const { return memory_ + i * stride_; }
  void merge_top();

  const Problem& problem_;
  std::byte* memory_;
  size_t stride_;
  uint64_t index_[kMaxDepth];
  uint32_t n_ = 0;
};

// Scratch of eval_exact for any stretch of the problem that `plan` is of.
size_t exact_scratch_bytes(const Problem& problem, const Plan& plan);

// The state of all rows over the visible tokens in chunks [begin, end), by absolute index.
// REQUIRES: `prepared` from a problem with the same queries and a plan of the same path.
void eval_exact(const Problem& problem, const Plan& plan, const void* prepared, uint64_t begin,
                uint64_t end, void* scratch, void* state);

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_SAMPLED_EXACT_PART_H_
