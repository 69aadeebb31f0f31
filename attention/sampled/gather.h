// SPDX-License-Identifier: Apache-2.0
// Reads given keys, wherever their rows lie, and adds them to the sums of all rows of a problem.
// Where the keys come from (a sketch's proposal, hash tables, a selection) is not its affair.
#ifndef KVM_ATTENTION_SAMPLED_GATHER_H_
#define KVM_ATTENTION_SAMPLED_GATHER_H_

#include <span>

#include "attention/exact/layout.h"
#include "attention/sampled/sampled_args.h"

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
void clear_sums(const Problem& problem, const GatherSums& sums);
uint32_t acc_stride(const Problem& problem);

// Keys by id, that is by place in the columns.
struct GatherList {
  GatherKind kind = kGatherClosed;
  bool split = false;  // kGatherOpen, see GatherBatch
  float sign = 1.0f;
  std::span<const uint32_t> ids;       // positions ascend; each is stored
  const uint64_t* position = nullptr;  // by id
  const float* p = nullptr;            // by id; kGatherOpen
  const float* per_row = nullptr;      // by id, [rows] each; kGatherOpen, kGatherWeighted
};
void gather(const GatherContext& context, const GatherList& list, const GatherSums& sums);

// Factors of kGatherWeighted: 1 for the rows in the mask of a key, 0 for the others. per_row
// [padded rows][16], of n keys.
void fill_row_masks(uint32_t rows, const uint16_t* masks, uint32_t n, float* per_row);

// Walks over the same batches without summing: body(batch, first) with ids[first, first + batch.n).
// Used where logits alone are wanted.
class BatchMaker {
 public:
  BatchMaker(const GatherContext& context, const GatherList& list)
      : context_(context), list_(list) {}
  // The next batch with its queries, or false at the end.
  bool next(GatherArgs* args, GatherBatch* batch);
  size_t first() const { return first_; }  // in list.ids, of the batch

 private:
  struct Row {
    const uint8_t* k;
    const uint8_t* v;
    float k_scale;
    float v_scale;
    uint16_t variant;
    uint8_t dtype_k;
    uint8_t dtype_v;
    bool same_kind(const Row& o) const {
      return variant == o.variant && dtype_k == o.dtype_k && dtype_v == o.dtype_v;
    }
  };
  void fill();
  Row find(uint64_t position);

  const GatherContext& context_;
  const GatherList& list_;
  Row rows_[3 * kGatherKeys];
  uint32_t n_rows_ = 0;
  uint32_t used_ = 0;  // of rows_, by the batch given out last
  size_t resolved_ = 0;
  size_t first_ = 0;
  size_t next_first_ = 0;
  size_t run_ = SIZE_MAX;
};

}  // namespace kvm::attention

#endif  // KVM_ATTENTION_SAMPLED_GATHER_H_
