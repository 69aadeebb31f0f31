// SPDX-License-Identifier: Apache-2.0
// Batch: what one step of up to max_items sequences of a space needs on the device, in memory of
// its own whose addresses never change: page tables, the plan, partial results. update brings it up
// to date in stream order; append and attend are launches with fixed parameters, so that a graph
// that holds them serves every later step.
//
// Device memory:  table [list][item][max_pages], of which a list is of many layers (ListLayout);
//                 for each kind of layer: work, merges, tokens to append, kv heads, and where
//                 plans may have a tail, what it is and a count that kernels keep; sink logits
//                 [layer][q head]; tree masks [query row]; partial states; a message. Where the
//                 device may know better how long sequences are: work, merges and tokens once
//                 more, which a kernel makes of those that were planned (lengths_kernel.h).
// Host memory:    kRing page-locked messages (message.h), each with an event. Updates wait for the
//                 oldest only when all are under way.
//
// An update enqueues one copy and one kernel, whatever it changes: a message of what differs from
// what the device has. What it costs the host goes by sequences, not by layers: page tables and
// plans are those of lists and kinds.
//
// A kind is what layers have in common that share a plan: which heads keep what, the window, the
// group. For the decode kernel, requests are per item where all its rows see the same but for
// causality, else per row; for the prefill kernel, which a batch has that may query more tokens of
// an item than that, per item.
//
// Threads: one at a time for the store and all its batches.
#ifndef KVM_DEVICE_BATCH_H_
#define KVM_DEVICE_BATCH_H_

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "attention/cuda/plan.h"
#include "base/dtype.h"
#include "base/status.h"
#include "device/device_tensor.h"
#include "device/event_pool.h"
#include "device/message.h"
#include "device/sequence_store.h"

namespace kvm::device {

inline constexpr uint32_t kRing = 4;
// Where results must not depend on the rest of the batch, items are cut every so many tokens.
inline constexpr uint32_t kFixedTokens = 4096;

struct BatchOptions {
  uint32_t max_items = 1;
  uint32_t max_append = 1;
  uint32_t max_query = 1;
  uint32_t max_query_rows = 1;
  uint64_t max_tokens = 0;
  uint64_t log_weight_stride_item = 0;  // both 0: none
  uint64_t log_weight_stride_head = 0;
  uint32_t max_unsure = 0;  // 0: sequences are as long as they are said to be
  bool reproducible = false;
};

struct BatchItem {
  std::shared_ptr<DeviceSequence> seq;  // null: nothing in this place
  uint32_t n_append = 0;
  uint32_t append_row = 0;
  uint32_t n_query = 0;
  uint32_t query_row = 0;
  // [n_query] bit i of word j: query row j sees the token of row i. Empty: rows see those up to
  // their own. Read by update.
  std::span<const uint64_t> tree;
};

struct AttendCall {
  uint32_t layer = 0;
  float scale = 0;  // 0: the space's
  DeviceTensor q, o, lse;
  DeviceTensor log_weights;
};

// Tokens [position, position + n_tokens) of an item of the last update.
struct ReadCall {
  uint32_t item = 0;
  uint32_t layer = 0;
  uint64_t position = 0;
  uint64_t n_tokens = 0;
  DeviceTensor k, v;
};

// Where the pages of one head class of a layer lie, for kernels of others: strides in bytes.
struct PagesPlace {
  const ClassLayout* of = nullptr;
  uint32_t n_classes = 0;  // of the layer
  tiers::SlabClass lies;
  uint64_t page_bytes = 0;  // of all layers
  uint8_t* base = nullptr;  // of page 0, the layer's share
  uint64_t n_pages = 0;     // that there may be
  const uint32_t* table = nullptr;
  uint64_t table_stride = 0;  // from item to item
};

class Batch {
 public:
  // `driver` and `store` must outlive the batch. Fails: INVALID, UNSUPPORTED, NO_SPACE, NO_MEMORY,
  // DEVICE.
  static Result<std::unique_ptr<Batch>> create(Driver* driver, SequenceStore* store,
                                               std::shared_ptr<const SpaceLayout> space,
                                               const BatchOptions& options);
  // Waits for the device.
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  // As kvm_cuda_update, kvm_cuda_append, kvm_cuda_attend, kvm_cuda_read.
  Status update(std::span<const BatchItem> items, Stream stream);
  // As kvm_cuda_set_lengths. lengths: [max_items], of size_bytes; or null.
  Status set_lengths(const uint8_t* lengths, uint64_t size_bytes, Stream stream);
  Status append(uint32_t layer, const DeviceTensor& k, const DeviceTensor& v, Stream stream);
  // The same of a part of the tokens that the last update's only item appends: those from `first`
  // on, n_tokens of them, whose rows are the first ones of k and v. REQUIRES: the stream is not
  // being captured.
  Status append_part(uint32_t layer, uint32_t first, uint32_t n_tokens, const DeviceTensor& k,
                     const DeviceTensor& v, Stream stream);
  Status attend(const AttendCall& call, Stream stream);
  Status read(const ReadCall& call, Stream stream);

  // As kvm_cuda_batch_get_pages and kvm_cuda_batch_get_indices.
  Result<PagesPlace> pages(uint32_t layer, uint32_t head_class) const;
  Result<uint64_t> indices(uint32_t layer, uint32_t head_class, uint32_t item,
                           std::span<int32_t> out);

  uint64_t device_bytes() const { return device_bytes_; }
  uint64_t n_launches() const { return n_launches_; }

 private:
  struct Kind {
    // Steps of one kind agree in these.
    std::vector<ClassLayout> classes;
    uint64_t window = 0;
    uint32_t group = 1;

    std::vector<attention::gpu::PageClass> page_classes;
    std::vector<attention::gpu::Sight> sights;  // [page class]
    std::vector<uint16_t> heads;
    bool stores = false;  // some layer of it appends
    uint32_t work_capacity = 0;
    uint32_t merge_capacity = 0;
    uint32_t slot_capacity = 0;
    uint32_t token_capacity = 0;
    uint32_t tail_cuts = 0;  // pieces that plans' tails may cut off items; 0: they have none
    uint32_t merge_rows = 0;
    // In device memory. What updates write, and what kernels read: the same where lengths are sure.
    uint64_t planned_work_at = 0, planned_merges_at = 0, planned_tokens_at = 0;
    uint64_t work_at = 0, merges_at = 0, tokens_at = 0;
    uint64_t heads_at = 0, n_work_at = 0, n_merges_at = 0, n_tokens_at = 0, tail_at = 0;
    // Counts of the last update.
    uint32_t n_blocks = 0, n_work = 0, n_merges = 0, n_tokens = 0, n_tail = 0;
  };
  // A Place is what the table says of an item.
  struct Place {
    std::shared_ptr<DeviceSequence> seq;
    uint64_t version = 0;
  };
  struct Slot {
    EventPtr event;  // null: never used
    uint8_t* data = nullptr;
  };

  Batch(Driver* driver, SequenceStore* store, std::shared_ptr<const SpaceLayout> space,
        const BatchOptions& options);
  Status init();
  Status make_kinds();
  Status size_kind(Kind* kind) const;
  Status lay_out();
  Status allocate();
  bool is_prefill() const { return kernel_.block_rows == attention::gpu::kPrefillRows; }
  bool per_row(const Kind& kind) const;
  uint64_t max_row_blocks(const Kind& kind) const;
  attention::gpu::PlanOptions plan_options(const Kind& kind) const;
  uint32_t max_merge_rows(const Kind& kind) const;

  Status check_items(std::span<const BatchItem> items);
  Status check_current();
  // Null: the place is empty. Fails: INVALID.
  Result<const DeviceSequence*> sequence_at(uint32_t item) const;
  // Also whether the plan has been brought to the lengths of this step: where the launch is
  // captured, it may be so by what is captured before it.
  Status check_launch(bool captured);
  void forget_device();
  void undo_update();
  Status enqueue_update(std::span<const BatchItem> items, Stream stream);
  Status plan_kind(Kind* kind, std::span<const BatchItem> items, Message* message);
  void list_requests(const Kind& kind, std::span<const BatchItem> items);
  void add_tokens(Kind* kind, std::span<const BatchItem> items, Message* message);
  void add_heads(Message* message);
  void add_sinks(Message* message);
  void add_trees(std::span<const BatchItem> items, Message* message);
  void add_lengths_items(std::span<const BatchItem> items, Message* message);
  Status add_table(std::span<const BatchItem> items, Slot** slot, Message* message, Stream stream);
  Result<Slot*> next_slot();
  Message message_in(const Slot& slot) const { return {slot.data, max_runs_, max_words_}; }
  Status send(const Slot& slot, const Message& message, Stream stream);
  attention::gpu::LengthsKind lengths_kind(const Kind& kind) const;
  attention::gpu::PagePool pool_of(const Kind& kind, uint32_t layer) const;
  Status check_values(const DeviceTensor& k, const DeviceTensor& v, uint64_t n_rows,
                      uint64_t n_heads, uint64_t row, uint64_t head) const;
  // Parameters of an append of the update's tokens, of tensors of n_rows rows.
  Result<attention::gpu::AppendParams> append_params(uint32_t layer, const DeviceTensor& k,
                                                     const DeviceTensor& v, uint64_t n_rows) const;
  Status check_log_weights(const DeviceTensor& log_weights, uint64_t n_kv_heads) const;
  // Checks the tensors of an attend, and tells the kernels where they lie.
  Status resolve_tensors(const AttendCall& call, uint64_t n_rows,
                         attention::gpu::AttendTensors* tensors) const;
  attention::gpu::DecodeParams decode_params(const AttendCall& call, const Kind& kind,
                                             const attention::gpu::AttendTensors& tensors) const;
  attention::gpu::MergeParams merge_params(const Kind& kind,
                                           const attention::gpu::AttendTensors& tensors) const;
  // Where the entries of a list of an item begin in the page tables.
  uint64_t table_row(uint32_t list, uint32_t item) const {
    return (uint64_t{list} * options_.max_items + item) * max_pages_;
  }
  const uint32_t* table() const { return reinterpret_cast<const uint32_t*>(device_ + table_at_); }

  Driver* const driver_;
  EventPool events_;
  SequenceStore* const store_;
  const std::shared_ptr<const SpaceLayout> space_;
  const BatchOptions options_;
  uint64_t max_pages_ = 0;
  uint32_t blocks_ = 0;  // of a decode launch, at most
  attention::gpu::DecodeKernel kernel_;
  std::vector<Kind> kinds_;
  std::vector<uint32_t> kind_of_layer_;
  std::vector<uint64_t> sinks_at_;  // [layer] in device memory; 0: it has none
  uint64_t lengths_items_at_ = 0;
  uint64_t tree_at_ = 0, message_at_ = 0, table_at_ = 0, partial_o_at_ = 0, partial_lse_at_ = 0;
  uint32_t max_runs_ = 0, max_words_ = 0;  // of a message
  uint64_t slot_bytes_ = 0;                // of a ring slot: a message
  uint64_t device_bytes_ = 0;
  uint8_t* device_ = nullptr;
  uint8_t* host_ = nullptr;  // the ring
  Slot ring_[kRing];
  uint32_t next_ = 0;

  std::vector<Place> places_;
  bool constants_written_ = false;  // heads and sinks
  uint64_t n_changes_ = 0;  // of the store, when places_ were last compared with their sequences
  // Of one update, kept for the next.
  std::vector<Growth> growths_;
  std::vector<attention::gpu::Request> requests_;
  std::vector<attention::gpu::Merge> merges_;
  std::vector<const DeviceSequence*> seqs_;
  std::vector<std::pair<uint32_t, uint32_t>> rows_;
  bool current_ = false;      // there has been an update, and the last one did not stop half-way
  bool has_lengths_ = false;  // set_lengths has been called since, outside of captures
  // Likewise, in one.
  bool captures_lengths_ = false;
  uint32_t append_rows_ = 0;  // of the last update: rows of tensors that it refers to
  uint32_t query_rows_ = 0;
  uint64_t n_launches_ = 0;
};

}  // namespace kvm::device

#endif  // KVM_DEVICE_BATCH_H_
