// SPDX-License-Identifier: Apache-2.0
// Configurations for the GPU kernels with the result that fp64 arithmetic gives: what the emulator
// suite runs on a CPU, kvm_gpu_check verify runs on a GPU.
#ifndef KVM_TESTS_GPU_CASES_H_
#define KVM_TESTS_GPU_CASES_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention/cuda/params.h"
#include "attention/cuda/plan.h"

namespace kvm::attention::gpu::testing {

// Heads of one class, and which tokens they keep: all, or the first `sinks` and the last `window`.
struct ClassSpec {
  uint32_t n_heads = 1;
  uint32_t sinks = 0;
  uint32_t window = 0;  // 0 = all tokens
};

enum class Weights { kNone, kSome, kHidden };  // log weights: none, random, random and -inf

struct CaseSpec {
  std::string name;
  Dtype dtype = Dtype::kBf16;
  Dtype dtype_o = Dtype::kF32;
  uint32_t dim = 128;
  uint32_t group = 4;
  uint32_t n_query = 1;
  uint32_t page_tokens = 64;
  std::vector<ClassSpec> classes = {{}};
  std::vector<uint32_t> lengths = {100};  // per sequence
  uint32_t blocks = 4;
  uint32_t fixed_tokens = 0;
  uint32_t least_tokens = 64;
  Weights weights = Weights::kNone;
  bool tree = false;     // the query tokens see each other as a random mask says, not in order
  float softcap = 0.0f;  // of logits
  float q_size = 1.0f;   // standard deviation of queries
  bool reads_lse = true;

  // Of the shipped kernel for it.
  uint32_t block_rows() const;
};

// At least 40 configurations.
std::vector<CaseSpec> all_cases();

// Memory of 64-byte alignment.
class Bytes {
 public:
  explicit Bytes(size_t size_bytes = 0);
  uint8_t* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> data_;
  size_t size_;
};

// A configuration laid out in memory. Pages lie in random order in several segments; whatever is
// not a token of its class is NaN: rows behind the end, pages of nobody, and tensors' gaps.
class Case {
 public:
  Case(const CaseSpec& spec, uint64_t seed);

  const CaseSpec& spec() const { return spec_; }
  uint32_t block_rows() const { return spec_.block_rows(); }
  DecodePlan plan() const;

  // The launch's parameters, with host addresses. Whoever runs it elsewhere copies what they point
  // to; sizes are those of the vectors. `plan` must outlive the launch.
  DecodeParams decode_params(const DecodePlan& plan);
  MergeParams merge_params(const DecodePlan& plan);

  // Everything that a kernel may touch, for the emulator.
  std::vector<std::span<uint8_t>> memory();

  // Fills results and partial states with NaN.
  void clear_results();
  struct Errors {
    double o = 0;    // largest over rows of |o - o*| / |o*|, L2
    double lse = 0;  // largest |lse - lse*|
    bool ok() const;
    double bound_o = 0;
    double bound_lse = 0;
  };
  // Compares results with the reference, which is computed at the first call. A NaN or a value
  // that nothing wrote is an error of infinity; so is one written where none belongs.
  Errors errors();

  std::vector<Bytes> segments;
  std::vector<uint32_t> page_table;
  std::vector<uint16_t> heads;  // of all classes
  std::vector<PageClass> classes;
  std::vector<Request> requests;
  std::vector<float> log_weights;
  std::vector<uint64_t> tree_mask;  // [query token], where spec().tree
  Bytes q, o;
  std::vector<float> lse, partial_o, partial_lse;

 private:
  struct Sequence;
  void place(uint32_t sequence, uint32_t page_class, uint64_t* free_page);
  uint16_t stored(uint32_t sequence, uint32_t kv_head, uint32_t position, uint32_t channel,
                  bool is_v) const;
  float weight_of(uint32_t sequence, uint32_t kv_head, uint32_t position) const;
  bool keeps(const ClassSpec& of, uint32_t length, uint32_t position) const;
  bool sees(uint32_t query_token, uint32_t length, uint32_t position) const;
  void reference();
  AttendTensors tensors();
  PagePool pool();

  CaseSpec spec_;
  uint64_t seed_;
  uint32_t n_kv_heads_ = 0;
  uint32_t n_tokens_q_ = 0;
  std::vector<uint32_t> page_order_;
  std::vector<double> ref_o_, ref_lse_;
};

}  // namespace kvm::attention::gpu::testing

#endif  // KVM_TESTS_GPU_CASES_H_
