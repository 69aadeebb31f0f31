// SPDX-License-Identifier: Apache-2.0
// Keys are coded with a frame: a basis, which frames share as long as it suits, and a centre and
// scales of its own.
//
// A key minus the centre, x, has the leading coordinates L_k^T x (L_k: lead_key, [dim_k][8]); the
// rest goes through one of two maps, then three rounds of random signs and Hadamard:
//
//   orthogonal  x - L_q L_k^T x, padded with zeros. L_q = L_k: principal axes of the keys. The
//               rest of a query is likewise q - L_k L_q^T q. Without a lead the rest is x itself.
//   balanced    coordinates 8, 9, ... of B^T x, for queries those of A^T q, where
//               C_q^(1/2) C_k^(1/2) = U S V^T, A = C_q^(-1/2) U S^(1/2), B = C_q^(1/2) U S^(-1/2):
//               there queries and keys have the same second moments S, and the noise, which goes
//               with |A^T q| |B^T x|, is smallest.
//
// Threads: immutable after make_frame. Memory: a balanced basis of dim 128 takes 0.14 MB, an
// orthogonal one 10 KB.
#ifndef KVM_HASH_INDEX_SKETCH_FRAME_H_
#define KVM_HASH_INDEX_SKETCH_FRAME_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "hash_index/sketch/layout.h"
#include "hash_index/sketch/sketch.h"

namespace kvm::hash_index {

struct Basis {
  SketchKind kind = SketchKind::kBits2;
  uint32_t dim_k = 0;
  uint32_t dim_pad = 0;
  uint64_t seed = 0;
  // [3][dim_pad]: the signs of the rotation; those of round 1 times dim_pad^-1.5, so that all three
  // rounds together keep lengths.
  std::vector<float> signs;
  std::vector<float> lead_key;    // L_k [dim_k][8]; empty without a lead
  std::vector<float> lead_query;  // L_q [dim_k][8]
  // Balanced bases only. Keys: [dim_k][8 + dim_pad], the lead and then the rotated rest. Queries:
  // [dim_k][dim_pad], the rest (coordinates below 8 are zero) before it is rotated.
  std::vector<float> key_matrix;
  std::vector<float> query_matrix;
  // |rest|^2 / (|lead|^2 + |rest|^2) over the keys from which the basis was made.
  double rest_share = 1;
  // For a basis without a lead, where one would have been taken: how close together the keys' axes
  // are (1 / sqrt(dim): all alike; 1: one alone), and whether queries had been seen.
  double closeness = 0;
  bool has_queries = false;
};

struct Frame {
  std::shared_ptr<const Basis> basis;
  std::vector<float> center;                 // [dim_k], of bf16 precision
  std::array<float, kLeadDims> lead_step{};  // of a lead code
  std::array<float, kLeadDims> lead_inverse{};
};

// x [dim_pad], in place: the three rounds.
void rotate(const Basis& basis, float* x);

}  // namespace kvm::hash_index

#endif  // KVM_HASH_INDEX_SKETCH_FRAME_H_
