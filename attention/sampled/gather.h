// SPDX-License-Identifier: Apache-2.0
// Reads given keys, wherever their rows lie, and adds them to the sums of all rows of a problem.
// Where the keys come from (a sketch's proposal, hash tables, a selection) is not its affair.
#ifndef KVM_ATTENTION_SAMPLED_GATHER_H_
#define KVM_ATTENTION_SAMPLED_GATHER_H_

#include <span>

#include "attention/exact/layout.h"
#include "attention/sampled/sampled_args.h"
#include "base/cpu_features.h"

namespace kvm::attention {

struct GatherContext {
  const Problem* problem = nullptr;
  const SampledKernels* kernels = nullptr;
  QueryRows q;  // of prepare_queries
  bool bf16_dot = false;
};
GatherContext gather_context(const Problem& problem, const KernelTable& table,
                             const void* prepared_queries);

uint32_t padded_rows(uint32_t rows);

// Sums of one problem, empty. bytes: gather_sums_bytes.
size_t gather_sums_bytes(const Problem& problem);
GatherSums gather_sums_view(const Problem& problem, void* memory);
// Says whether every key that was added, and its value, had finite numbers only, as far as sums
// tell: products or squares that overflow count as not finite.
bool sums_are_finite(const Problem& problem, const GatherSums& sums);
void clear_sums(const Problem& problem, const GatherSums& sums);
uint32_t acc_stride(const Problem& problem);

// A GatherList holds keys by id, that is by place in the columns.
struct GatherList {
  GatherKind kind = kGatherClosed;
  std::span<const uint32_t> ids;       // positions ascend; each is stored
  const uint64_t* position = nullptr;  // by id
  const float* p = nullptr;            // by id; kGatherOpen, kGatherGrown: 1 and more is closed
  const float* p_before = nullptr;     // by id; kGatherGrown
  const float* per_row = nullptr;      // by id, [rows] each; all but kGatherClosed
  bool keys_only = false;              // values will not be read
};
void gather(const GatherContext& context, const GatherList& list, const GatherSums& sums);

// Factors of kGatherWeighted: 1 for the rows in the mask of a key, 0 for the others. per_row
// [padded rows][16], of n keys.
void fill_row_masks(uint32_t rows, const uint16_t* masks, uint32_t n, float* per_row);

// A BatchMaker walks over the same batches without summing: body(batch, first) with ids[first,
// first + batch.n). Used where logits alone are wanted.
class BatchMaker {
 public:
  BatchMaker(const GatherContext& context, const GatherList& list)
      : context_(context), list_(list) {}
  // The next batch with its queries, or false at the end.
  bool next(GatherArgs* args, GatherBatch* batch);
  size_t first() const { return first_; }  // in list.ids, of the batch

 private:
  // Rows that are resolved, and asked for, ahead of the batch that is given out.
  static constexpr uint32_t kAhead = kGatherAhead * kGatherKeys;
  static constexpr uint32_t kRoom = 512;

  // The run that rows are taken from.
  struct Source {
    uint64_t begin = 0;
    uint64_t end = 0;
    const uint8_t* k = nullptr;
    const uint8_t* v = nullptr;
    uint32_t k_bytes = 0;  // of a row
    uint32_t v_bytes = 0;
    const uint16_t* k_scale = nullptr;
    const uint16_t* v_scale = nullptr;
    uint16_t variant = 0;
    uint8_t elem_k = 0;
    uint8_t elem_v = 0;
    bool same_kind(const Source& o) const {
      return variant == o.variant && elem_k == o.elem_k && elem_v == o.elem_v;
    }
  };
  void fill();
  bool find(uint64_t position);
  void open(uint64_t position);
  void make_room();
  void pad();

  const GatherContext& context_;
  const GatherList& list_;
  const uint8_t* k_[kRoom];
  const uint8_t* v_[kRoom];
  const uint16_t* k_scale_[kRoom];  // where rows have scales
  const uint16_t* v_scale_[kRoom];
  alignas(64) float k_scales_[kGatherKeys];  // of the batch that was given out
  alignas(64) float v_scales_[kGatherKeys];
  const bool is_large_ = has_large_first_level();
  Source source_;      // of the row resolved last
  uint32_t n_ = 0;     // rows that are there, all of one kind
  uint32_t at_ = 0;    // first one that was not given out
  bool done_ = false;  // the row behind them is of another kind, or there is none
  size_t resolved_ = 0;
  size_t first_ = 0;
  size_t next_first_ = 0;
  size_t run_ = SIZE_MAX;
};

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_SAMPLED_GATHER_H_
