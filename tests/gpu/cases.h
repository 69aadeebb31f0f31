// SPDX-License-Identifier: Apache-2.0
// Configurations for the GPU kernels with the result that fp64 arithmetic gives: what the emulator
// suite runs on a CPU, kvm_gpu_check verify runs on a GPU.
#ifndef KVM_TESTS_GPU_CASES_H_
#define KVM_TESTS_GPU_CASES_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention/cuda/params.h"
#include "attention/cuda/plan.h"
#include "base/dtype.h"
#include "codecs/codec.h"

namespace kvm::attention::gpu::testing {

// Heads of one class, and which tokens they keep: all, or the first `sinks` and the last `window`.
struct ClassSpec {
  uint32_t n_heads = 1;
  uint32_t sinks = 0;
  uint32_t window = 0;  // 0 = all tokens
};

enum class Weights { kNone, kSome, kHidden };  // log weights: none, random, random and -inf

// The elements of pages of two bytes an element.
inline Dtype half_of(CodecId codec) { return codec == CodecId::kF16 ? Dtype::kF16 : Dtype::kBf16; }

struct CaseSpec {
  std::string name;
  CodecId codec = CodecId::kBf16;  // of pages
  Dtype dtype_q = Dtype::kBf16;    // of queries where pages are of narrow rows; else theirs
  Dtype dtype_o = Dtype::kF32;
  uint32_t dim = 128;  // of keys; with kMlaDim values are in them
  uint32_t group = 4;
  uint32_t n_query = 1;
  // By the prefill kernel: a class's window, and the layer's, move with each row; pages that no row
  // sees are not there.
  bool prefill = false;
  uint32_t layer_window = 0;  // of it; 0 = none
  uint32_t page_tokens = 64;
  std::vector<ClassSpec> classes = {{}};
  std::vector<uint32_t> lengths = {100};  // per sequence
  // [sequence] tokens that the plan counts on and the sequence has not; the lengths kernel brings
  // the plan to `lengths`. Windows move with each row then, too. Empty: the plan is for `lengths`.
  std::vector<uint32_t> missing = {};
  uint32_t blocks = 4;
  uint32_t fixed_tokens = 0;
  uint32_t least_tokens = 64;
  // Of the decode kernel's plans: 1 / tail_part of the tokens is taken piece by piece; 0: none.
  uint32_t tail_part = 0;
  uint32_t least_tail_tokens = 64;
  Weights weights = Weights::kNone;
  bool tree = false;     // the query tokens see each other as a random mask says, not in order
  float softcap = 0.0f;  // of logits
  bool sinks = false;    // heads have logits without a value
  float q_size = 1.0f;   // standard deviation of queries
  float k_size = 1.0f;   // and of keys, about; where pages are of narrow rows
  bool uneven = false;   // values of very different sizes, some of them 0; likewise
  // Values of 2^far and 2^-far times the size, 64 tokens of these and 64 of those; likewise.
  int far = 0;
  // Every 50th token has a K or a V that is not a number, of 64 channels alone where a V is of 4
  // bits; likewise.
  bool not_numbers = false;
  bool reads_lse = true;

  // Of the shipped kernel for it.
  uint32_t block_rows() const;
  bool v_in_k() const { return dim == kMlaDim; }
  // Whether its kernel takes pieces of a tail.
  bool takes_tails() const { return !prefill && dim != kMlaDim; }
  uint32_t dim_v() const { return value_dim(dim); }
  bool is_late() const { return !missing.empty(); }
  bool windows_move() const { return prefill || is_late(); }
  Dtype query_dtype() const {
    return codecs::codec_of(codec).is_scaled() ? dtype_q : half_of(codec);
  }
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

  // Of a late one: what brings `plan` to the lengths that there are, into *to, which becomes as
  // large and has nothing of it yet. Both must outlive the launch.
  LengthsParams lengths_params(const DecodePlan& plan, DecodePlan* to);

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
  // that nothing wrote is an error of infinity; so is one written where none belongs. Rows that see
  // what is not a number have to show it.
  Errors errors();

  std::vector<Bytes> segments;
  std::vector<uint32_t> page_table;
  std::vector<uint16_t> heads;  // of all classes
  std::vector<PageClass> classes;
  std::vector<Request> requests;
  std::vector<float> log_weights;
  std::vector<uint64_t> tree_mask;  // [query token], where spec().tree
  // Where spec().is_late: what the plan counts on, what is said of it, and how many pieces and
  // merges there are.
  std::vector<LengthsItem> items;
  std::vector<uint32_t> told;
  std::vector<uint32_t> counts;
  std::vector<float> sink_logits;  // [q head], where spec().sinks
  Tail tail;
  Bytes q, o;
  std::vector<float> lse, partial_o, partial_lse;

 private:
  struct Sequence;
  void place(uint32_t sequence, uint32_t page_class, uint64_t* free_page);
  void add_requests_of(uint32_t sequence, const Request& list);
  void tell_lengths();
  // Tokens that the plan counts on.
  uint32_t planned(uint32_t sequence) const {
    return spec_.lengths[sequence] + (spec_.is_late() ? spec_.missing[sequence] : 0);
  }
  uint32_t max_unsure() const;
  // Bits of an element, of its row's or its group's parameters (bf16), and what they stand for.
  uint16_t stored(uint32_t sequence, uint32_t kv_head, uint32_t position, uint32_t channel,
                  bool is_v) const;
  uint16_t scale_of(uint32_t sequence, uint32_t kv_head, uint32_t position, uint32_t group,
                    bool is_v) const;
  bool is_flat(uint32_t position) const;
  uint16_t zero_of(uint32_t sequence, uint32_t kv_head, uint32_t position, uint32_t group,
                   bool is_v) const;
  void store_row(uint32_t sequence, uint32_t kv_head, uint32_t position, bool is_v, uint8_t* row,
                 uint8_t* params) const;
  double value(uint32_t sequence, uint32_t kv_head, uint32_t position, uint32_t channel,
               bool is_v) const;
  float weight_of(uint32_t sequence, uint32_t kv_head, uint32_t position) const;
  bool keeps(const ClassSpec& of, uint32_t length, uint32_t position) const;
  bool sees(const ClassSpec& of, uint32_t query_token, uint32_t length, uint32_t position) const;
  std::vector<Sight> sights() const;
  void reference();
  AttendTensors tensors();
  PagePool pool();

  CaseSpec spec_;
  uint64_t seed_;
  uint32_t n_kv_heads_ = 0;
  uint32_t n_tokens_q_ = 0;
  uint32_t max_pages_ = 0;  // of a list, where is_late
  std::vector<uint32_t> page_order_;
  std::vector<double> ref_o_, ref_lse_;
};

struct AppendSpec {
  Dtype from = Dtype::kF32;
  CodecId to = CodecId::kBf16;
  uint32_t dim = 64;
  uint32_t page_tokens = 16;
  bool v_in_k = false;  // there are no rows of V
};

std::vector<AppendSpec> all_appends();

// New tokens of two head classes, and the pages that they should make: to the bit what codecs/ make
// of the same rows. These are of all kinds: with outliers, next to nothing, huge, zero, with an
// element that is not a number.
class AppendCase {
 public:
  AppendCase(const AppendSpec& spec, uint64_t seed);

  std::string name() const;
  // With host addresses, as Case::decode_params.
  AppendParams params() const;
  std::vector<std::span<uint8_t>> memory();
  // Whether all pages are as they should be, with what nobody appended to as it was.
  bool right() const;
  // Makes the pages what an append should make of them.
  void fill() { std::copy(expected_.begin(), expected_.end(), pages.data()); }

  Bytes k, v, pages;
  std::vector<uint16_t> heads;
  std::vector<uint32_t> page_table;
  std::vector<AppendToken> tokens;
  uint32_t n_tokens = 0;  // that count: the last one does not

 private:
  Bytes& tensor(bool is_v) { return is_v ? v : k; }
  void make_rows(uint64_t seed);
  void expect_token(const AppendToken& token);

  AppendSpec spec_;
  PageClass classes_[2];
  std::vector<std::vector<float>> rows_[2];  // [of V][token * kv heads + kv head], as in the tensor
  std::vector<uint8_t> expected_;
};

// The segment that the pages of an AppendCase are.
inline constexpr uint32_t kAppendSegment = 7;

}  // namespace kvm::attention::gpu::testing

#endif  // KVM_TESTS_GPU_CASES_H_
