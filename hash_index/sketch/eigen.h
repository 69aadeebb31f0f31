// SPDX-License-Identifier: Apache-2.0
// Eigenvalues and eigenvectors of small symmetric matrices.
#ifndef KVM_HASH_INDEX_SKETCH_EIGEN_H_
#define KVM_HASH_INDEX_SKETCH_EIGEN_H_

#include <cstdint>
#include <vector>

#include "hash_index/sketch/frame_args.h"

namespace kvm::hash_index {

struct Eigen {
  std::vector<double> values;   // [n], descending
  std::vector<double> vectors;  // [n][n]: row i is the unit vector of value i
};

// Eigenvalues and eigenvectors of the symmetric matrix [n][n], whose lower triangle is read, by
// Householder's reduction to a tridiagonal matrix, then QL steps with implicit shifts (Golub and
// Van Loan, Matrix Computations, 8.3). The largest component of each vector is positive; the same
// bits for all kernels.
// REQUIRES: finite elements; n <= kScanMaxDim.
Eigen symmetric_eigen(const std::vector<double>& matrix, uint32_t n, const FrameKernels& kernels);

}  // namespace kvm::hash_index

#endif  // KVM_HASH_INDEX_SKETCH_EIGEN_H_
