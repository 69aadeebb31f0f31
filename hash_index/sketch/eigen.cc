// SPDX-License-Identifier: Apache-2.0
#include "hash_index/sketch/eigen.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "base/assert.h"

namespace kvm::hash_index {

Eigen symmetric_eigen(const std::vector<double>& matrix, uint32_t n, const FrameKernels& kernels) {
  KVM_ASSERT(n <= kScanMaxDim);
  std::vector<double> a = matrix;
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t j = i + 1; j < n; ++j) {
      a[size_t{i} * n + j] = a[size_t{j} * n + i];
    }
  }
  std::vector<double> values(n);
  std::vector<double> vectors(size_t{n} * n);
  std::vector<double> scratch(size_t{n} * (n + 1));
  kernels.eigen(a.data(), n, values.data(), vectors.data(), scratch.data());

  std::vector<uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&values](uint32_t i, uint32_t j) { return values[i] > values[j]; });
  Eigen result{std::vector<double>(n), std::vector<double>(size_t{n} * n)};
  for (uint32_t i = 0; i < n; ++i) {
    const double* row = vectors.data() + size_t{order[i]} * n;
    const double* top = std::max_element(
        row, row + n, [](double x, double y) { return std::abs(x) < std::abs(y); });
    const double sign = *top < 0 ? -1.0 : 1.0;
    result.values[i] = values[order[i]];
    std::transform(row, row + n, result.vectors.begin() + static_cast<std::ptrdiff_t>(i) * n,
                   [sign](double x) { return sign * x; });
  }
  return result;
}

}  // namespace kvm::hash_index
