// SPDX-License-Identifier: Apache-2.0
// Stored keys and values with every awkward property, a double-precision reference for attention
// over them, and a way to run the real thing.
#ifndef KVM_TESTS_UNIT_ATTENTION_TESTBED_H_
#define KVM_TESTS_UNIT_ATTENTION_TESTBED_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "attention/attention.h"
#include "base/dtype.h"
#include "codecs/codec.h"

namespace kvm::attention::testing {

// Memory of kBufferAlign alignment.
class Buffer {
 public:
  explicit Buffer(size_t bytes)
      : data_(static_cast<std::byte*>(
            std::aligned_alloc(kBufferAlign, (bytes / kBufferAlign + 1) * kBufferAlign))) {}
  std::byte* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> data_;
};

// What a token is stored as.
struct TokenKind {
  CodecId codec_k = CodecId::kBf16;
  CodecId codec_v = CodecId::kBf16;
  uint16_t transform = 0;
};

struct Shape {
  uint32_t n_query = 1;
  uint32_t group = 4;
  uint32_t dim_k = 128;
  uint32_t dim_v = 128;
  uint64_t n_tokens = 0;
  uint64_t first_position = 0;
  uint32_t heads = 2;  // of a page
  uint32_t head = 1;
  bool v_in_k = false;  // dim_v <= dim_k then, and every token has one codec for both
  Dtype dtype_q = Dtype::kBf16;
  Dtype dtype_o = Dtype::kF32;
  float q_size = 1.0f;  // standard deviation of queries; keys and values have 1
  // Channel 0 of keys and values is so large beside the others that those have subnormal codes
  // where they are fp8, and that of queries is 0.
  bool outliers = false;
  // Rows of V of very different sizes, those of K 1 or less; each may be next to nothing, or 0, or
  // have one size in all channels.
  bool uneven = false;
  // Queries and keys are 1 in all channels.
  bool flat = false;
};

// The parameters of one page in each codec that has some of a page, NaN until they are set.
class PageParams {
 public:
  PageParams(uint32_t heads, uint32_t dim) : heads_(heads), dim_(dim) {}
  // As many as the page's heads have. REQUIRES: the codec has some of a page.
  uint16_t* of(CodecId codec) {
    std::vector<uint16_t>& params = of_codec_[codec];
    if (params.empty()) {
      params.assign(size_t{heads_} * codecs::codec_of(codec).n_scales(dim_), 0xffff);
    }
    return params.data();
  }

 private:
  uint32_t heads_;
  uint32_t dim_;
  std::map<CodecId, std::vector<uint16_t>> of_codec_;
};

// Owns everything a Problem refers to. Pages have a random order in memory; tokens carry their
// values in fp32 (already rounded as they are stored) for the reference.
class Case {
 public:
  Case(const Shape& shape, uint64_t seed);

  Problem& problem() { return problem_; }
  const Problem& problem() const { return problem_; }
  std::mt19937_64& random() { return random_; }
  const Shape& shape() const { return shape_; }
  uint64_t end_position() const { return shape_.first_position + shape_.n_tokens; }

  // Setup, before store().
  std::vector<TokenKind> kinds;    // per token; default: one kind
  std::vector<float> log_weights;  // per token, or empty
  std::vector<uint8_t> present;    // per token; absent tokens have no run
  std::vector<QueryTransform> transforms;
  void add_transform(bool rotate, RotationLayout layout, bool scale);
  void use_sinks();
  void use_slopes();
  void use_tree(double density);
  void use_ranges(bool include, int n);

  // Lays the tokens out in pages and cuts them into runs; every boundary between kinds and each
  // page border cuts, `extra_cuts` random others do too. Then the problem can be run.
  void store(int extra_cuts);
  // Stores them once more, with V in K or apart. REQUIRES: Shape::v_in_k, at first.
  void store_v_in_k(bool v_in_k);

  bool wants_column_sums = true;

  // Runs with `table`, chunks cut into `pieces` calls in random order, row ranges if possible.
  // Outputs below.
  void run(const KernelTable* table, int pieces = 1, int row_pieces = 1);
  // Solves once more, as an item of their own, query tokens [first, first + count), which lie where
  // they lay; `item_rows` as in Problem. Overwrites their part of the outputs but column_sums.
  // REQUIRES: run() has run; with a tree, first is 0 and no row sees tokens at or behind count.
  void run_item(const KernelTable* table, uint32_t first, uint32_t count, uint32_t item_rows = 0);
  void run_reference();

  Plan plan;                                            // of run()
  std::vector<float> o, lse, column_sums;               // of run()
  std::vector<double> ref_o, ref_lse, ref_column_sums;  // of run_reference()
  std::vector<double> ref_abs;  // sum of |weight * v| per output: the scale of its rounding error

  // Largest over rows of |o - ref| / |ref| (L2 over the row; the scale is that of ref_abs where
  // terms cancel), and of |lse - ref| / max(1, |ref|). NaN or a wrong infinity gives +inf.
  double error_o() const;
  double error_lse() const;

  bool sees(uint32_t query, uint64_t position) const;
  // [rows][dim_k]; what is changed counts from the next run on.
  std::vector<float>& queries() { return q_; }

 private:
  struct Token {
    std::vector<float> k, v;
  };
  double logit(uint32_t row, uint64_t token) const;
  std::vector<double> transformed(uint32_t row, uint32_t transform) const;
  void cut_runs(int extra_cuts);
  void read_results();

  Shape shape_;
  std::mt19937_64 random_;
  Problem problem_;
  std::vector<float> q_;  // as stored, in fp32, row-major [rows][dim_k]
  std::vector<std::byte> q_stored_;
  std::vector<Token> tokens_;
  std::vector<std::unique_ptr<Buffer>> pages_k_, pages_v_, pages_w_, pages_s_;
  std::vector<PageParams> params_k_, params_v_;
  std::map<CodecId, size_t> rooms_;  // of codecs in a page's buffers
  std::vector<KvRun> runs_;
  std::vector<float> sinks_;
  std::vector<float> slopes_;
  std::vector<uint64_t> tree_;
  std::vector<PositionRange> include_, exclude_;
  std::vector<std::unique_ptr<std::vector<float>>> tables_;
  std::vector<std::byte> o_stored_;
};

// A random problem with any mix of features, stored.
std::unique_ptr<Case> random_case(uint64_t seed);

// Stores value i of an array of `dtype`, and reads it back.
void put(void* p, Dtype dtype, uint64_t i, float value);
// The same of stored elements, of a codec that is not scaled.
void put(void* p, CodecId codec, uint64_t i, float value);
float get(const void* p, CodecId codec, uint64_t i);
float get(const void* p, Dtype dtype, uint64_t i);

// Writes a number into a stored row, or NaN into its scale where it has one. False: the codec holds
// finite numbers only.
bool spoil_row(const KvPlane& plane, uint32_t dim, uint32_t head, uint64_t slot, uint32_t channel,
               float value);

// The bounds of exact.h for a table and how tokens are stored.
double error_bound(const Case& c, const KernelTable& table);

}  // namespace kvm::attention::testing

#endif  // KVM_TESTS_UNIT_ATTENTION_TESTBED_H_
