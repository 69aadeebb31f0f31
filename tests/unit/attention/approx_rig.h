// SPDX-License-Identifier: Apache-2.0
// One kv head with an index, the exact answer in double precision, and ways to run approximate
// attention over it, whole and in parts.
#ifndef KVM_TESTS_UNIT_ATTENTION_APPROX_RIG_H_
#define KVM_TESTS_UNIT_ATTENTION_APPROX_RIG_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "attention/sampled/approx.h"
#include "tests/unit/attention/testbed.h"

namespace kvm::attention::testing {

struct HeadShape {
  uint64_t n_tokens = 4096;
  uint32_t n_query = 1;
  uint32_t group = 4;
  uint32_t dim_k = 64;
  uint32_t dim_v = 32;
  CodecId codec = CodecId::kBf16;
  double sharpness = 2.0;  // standard deviation of the logits
  bool with_tables = false;
  hash_index::LshParams lsh = {.n_bits = 6, .n_tables = 40, .seed = 5};
};

// Everything a problem refers to; tokens lie at positions [0, n). Settings may be changed between
// build() and run(); k and v before build().
class Head {
 public:
  Head(const HeadShape& shape, uint64_t seed);

  // Stores k and v in pages, and codes them; of int8 and fp8 rows k and v become what is stored.
  void build();

  HeadShape shape;
  std::vector<float> q;  // [rows][dim_k], exact in bf16
  std::vector<std::vector<float>> k, v;
  std::vector<float> log_weight;    // per token, or empty
  std::vector<uint16_t> transform;  // per token, or empty
  std::vector<uint8_t> dropped;     // per token, or empty
  std::vector<QueryTransform> transforms;
  Problem problem;
  ApproxInput input;
  uint32_t rows() const { return shape.n_query * shape.group; }

  // Runs everything; what the pieces write is kept for a look at it.
  void run();
  void run_exact();  // o and lse by the exact machinery

  // The reference over the tokens that are stored.
  bool sees(uint32_t row, uint64_t t) const;
  double logit(uint32_t row, uint64_t t) const;
  void reference(uint32_t row, std::vector<double>* o, double* lse) const;
  double error_o(uint32_t row) const;  // relative, of o from the last run
  double error_lse(uint32_t row) const;
  double norm_o(uint32_t row) const;

  ApproxPlan plan;
  ApproxReport report;
  std::vector<float> o, lse;
  std::unique_ptr<Buffer> prepared, scratch, states;
  std::mt19937_64 random;
  std::vector<SketchedRun> sketches;
  std::vector<HashedRun> hashes;

 private:
  std::vector<uint8_t> seen_by(uint32_t row) const;

  std::vector<uint16_t> q_stored_;
  std::vector<uint16_t> k_scale_, v_scale_;  // of int8 and fp8 rows
  std::unique_ptr<Buffer> k_rows_, v_rows_, blocks_, tables_;
  std::vector<KvRun> runs_;
  hash_index::FramePtr frame_;
  hash_index::PlanesPtr planes_;
  std::vector<float> center_;
};

}  // namespace kvm::attention::testing

#endif  // KVM_TESTS_UNIT_ATTENTION_APPROX_RIG_H_
