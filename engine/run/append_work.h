// SPDX-License-Identifier: Apache-2.0
// AppendWork is the append half of a request: it reserves room for the tokens of all items and
// copies their K and V rows into pages, encoded as they are stored.
#ifndef KVM_ENGINE_RUN_APPEND_WORK_H_
#define KVM_ENGINE_RUN_APPEND_WORK_H_

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "engine/space/validate.h"
#include "engine/store/store.h"

namespace kvm::engine {

// What an item of a step appends to the nth of its layers.
inline AppendItem append_item_of(Sequence* seq, const StepRequest& step, const kvm_item& item,
                                 uint32_t nth = 0) {
  const bool is_last = nth + 1 == std::max(1u, step.n_layers);
  return {seq,
          step.layer_begin + nth,
          item.append_position,
          item.n_append,
          is_last && (item.flags & KVM_ITEM_LAST_LAYER) != 0,
          (item.flags & KVM_ITEM_PROMPT_END) != 0,
          (item.flags & KVM_ITEM_RESTORE) != 0};
}

// Threads: copy() on any thread, each task once; the rest on the driver.
class AppendWork {
 public:
  // Forgets the last request.
  void clear();
  // Reserves room for the items that append, or for none. seqs[i] belongs to request.items[i].
  // What the arguments refer to stays alive and unchanged until close().
  // Fails: as Store::reserve_append.
  Status reserve(Store& store, const StepRequest& request, std::span<Sequence* const> seqs,
                 const StepTensors& tensors);
  // Returns the size of K and V as stored.
  uint64_t n_bytes() const { return n_bytes_; }
  // Cuts the copying into tasks of at least task_bytes, the last excepted.
  void cut(uint64_t task_bytes);
  uint32_t n_tasks() const { return static_cast<uint32_t>(tasks_.size()); }
  void copy(uint32_t task) const;
  // Publishes what was reserved, or rolls it back. Nothing when nothing is reserved.
  void close(Store& store, bool publish);

 private:
  struct Task {
    uint32_t piece_begin = 0;
    uint32_t piece_end = 0;
  };
  void copy_piece(const AppendPiece& piece) const;

  const StepRequest* request_ = nullptr;
  const StepTensors* tensors_ = nullptr;
  std::vector<AppendItem> items_;
  std::vector<uint32_t> request_items_;  // of items_[i]: its index in the request
  std::vector<AppendPiece> pieces_;
  std::vector<Task> tasks_;
  uint64_t n_bytes_ = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_APPEND_WORK_H_
