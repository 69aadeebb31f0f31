// SPDX-License-Identifier: Apache-2.0
// Configurations for the kernels that read rows back and merge states, as cases.h has them for
// others: for the emulator suite and kvm_gpu_check verify.
#ifndef KVM_TESTS_GPU_ROW_CASES_H_
#define KVM_TESTS_GPU_ROW_CASES_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention/cuda/params.h"
#include "base/dtype.h"
#include "tests/gpu/cases.h"

namespace kvm::attention::gpu::testing {

struct ReadSpec {
  CodecId from = CodecId::kBf16;  // of pages
  Dtype to = Dtype::kF32;
  uint32_t dim = 64;
  uint32_t page_tokens = 16;
  bool v_in_k = false;
  bool gaps = false;  // tensors have some between heads and between tokens
  bool wants_k = true, wants_v = true;
};

std::vector<ReadSpec> all_reads();

// Pages of two head classes as an append should have made them (AppendCase), and the tensors that
// some of their tokens should make: to the bit what fp64 arithmetic makes of the stored bytes,
// rounded to a float and then to the tensor's dtype.
class ReadCase {
 public:
  ReadCase(const ReadSpec& spec, uint64_t seed);

  std::string name() const;
  // With host addresses, as Case::decode_params: segment kAppendSegment of the pool, its heads, the
  // page table and the tensors.
  ReadParams params();
  std::vector<std::span<uint8_t>> memory();
  // Whether the tensors are as they should be, gaps and all that is not wanted as it was.
  bool right() const;

  AppendCase pages;
  std::vector<uint32_t> page_table;
  Bytes k, v;

 private:
  double stored(uint32_t head, uint32_t token, uint32_t channel, bool is_v) const;
  uint32_t dim(bool is_v) const { return is_v ? value_dim(spec_.dim) : spec_.dim; }
  RowTensor tensor(bool is_v);

  ReadSpec spec_;
  uint32_t n_tokens_ = 0;
};

struct StatesSpec {
  std::vector<Dtype> dtypes = {Dtype::kF32, Dtype::kF32};  // of each state's o
  Dtype dtype_out = Dtype::kF32;
  uint32_t n_rows = 3;
  uint32_t n_heads = 2;
  uint32_t dim = 64;
  // A result in the place of this state's; its dtype is dtype_out. -1: of its own.
  int in_place = -1;
  bool gaps = false;         // tensors have some between heads and between rows
  bool not_numbers = false;  // some o and some lse are none
  bool writes_lse = true;
};

std::vector<StatesSpec> all_states();

// States, some of them empty with an o that is not a number, and the merge of each row in fp64.
class StatesCase {
 public:
  StatesCase(const StatesSpec& spec, uint64_t seed);

  std::string name() const;
  // With the arena at `base`.
  StatesParams params(uint8_t* base) const;
  struct Errors {
    double o = 0;  // largest |o - o*|, of numbers up to 1
    double lse = 0;
    double bound_o = 0;
    bool ok() const { return o <= bound_o && lse <= 1e-5; }
  };
  // Infinite where something is written that should not be, or not that should be.
  Errors errors() const;

  Bytes arena;  // all tensors

 private:
  struct Place {
    uint64_t at = 0;  // in the arena, in bytes
    Dtype dtype = Dtype::kF32;
    uint32_t dim = 0;
    uint64_t stride_row = 0, stride_head = 0;
  };
  Place add(Dtype dtype, uint32_t dim);
  RowTensor tensor(const Place& place, uint8_t* base) const;
  static uint64_t byte_of(const Place& place, uint32_t row, uint32_t head, uint32_t channel);
  float get(const Place& place, uint32_t row, uint32_t head, uint32_t channel) const;
  void set(const Place& place, uint32_t row, uint32_t head, uint32_t channel, float value);
  void expect(uint32_t row, uint32_t head);

  StatesSpec spec_;
  uint64_t size_ = 0;
  std::vector<Place> o_, lse_;
  Place out_o_, out_lse_;
  std::vector<double> expected_o_, expected_lse_;  // [row][head][dim], [row][head]
  std::vector<uint8_t> before_;                    // of the arena
};

}  // namespace kvm::attention::gpu::testing

#endif  // KVM_TESTS_GPU_ROW_CASES_H_
