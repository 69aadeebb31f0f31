// SPDX-License-Identifier: Apache-2.0
#include "hash_index/sketch/eigen.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

namespace kvm::hash_index {
namespace {

using Matrix = std::vector<double>;

// y += a x over [begin, end). Loops of this form become vector code; sums over a row do not.
void add_multiple(const double* x, double a, uint32_t begin, uint32_t end, double* y) {
  for (uint32_t j = begin; j < end; ++j) {
    y[j] += a * x[j];
  }
}

// H_0 A H_0 and so on, H_k = I - 2 v v^T, until A is tridiagonal (diagonal, below); row k of
// `reflectors` is v of step k.
void to_tridiagonal(Matrix* a, uint32_t n, std::vector<double>* diagonal,
                    std::vector<double>* below, Matrix* reflectors) {
  reflectors->assign(size_t{n} * n, 0.0);
  std::vector<double> w(n);
  for (uint32_t k = 0; k + 2 < n; ++k) {
    double* v = reflectors->data() + size_t{k} * n;
    double square = 0;
    for (uint32_t i = k + 1; i < n; ++i) {
      v[i] = (*a)[size_t{i} * n + k];
      square += v[i] * v[i];
    }
    const double length = std::sqrt(square);
    (*below)[k] = v[k + 1] > 0 ? -length : length;
    const double first = v[k + 1] - (*below)[k];
    const double norm = std::sqrt(square - v[k + 1] * v[k + 1] + first * first);
    v[k + 1] = first;
    if (!(norm > 0)) {
      std::fill(v, v + n, 0.0);
      continue;
    }
    for (uint32_t i = k + 1; i < n; ++i) {
      v[i] /= norm;
    }
    // A - v w^T - w v^T with w = 2 (A v - (v.Av) v), over the part that is left.
    std::fill(w.begin(), w.end(), 0.0);
    for (uint32_t i = k + 1; i < n; ++i) {
      add_multiple(a->data() + size_t{i} * n, v[i], k + 1, n, w.data());
    }
    const double dot = std::inner_product(v + k + 1, v + n, w.begin() + k + 1, 0.0);
    for (uint32_t i = k + 1; i < n; ++i) {
      w[i] = 2 * (w[i] - dot * v[i]);
    }
    for (uint32_t i = k + 1; i < n; ++i) {
      double* row = a->data() + size_t{i} * n;
      add_multiple(w.data(), -v[i], k + 1, n, row);
      add_multiple(v, -w[i], k + 1, n, row);
    }
  }
  for (uint32_t k = 0; k < n; ++k) {
    (*diagonal)[k] = (*a)[size_t{k} * n + k];
  }
  if (n >= 2) {
    (*below)[n - 2] = (*a)[size_t{n - 1} * n + n - 2];
  }
}

// Rows of the result are the columns of Q = H_0 H_1 ...
Matrix accumulate(const Matrix& reflectors, uint32_t n) {
  Matrix q(size_t{n} * n, 0.0);
  for (uint32_t i = 0; i < n; ++i) {
    q[size_t{i} * n + i] = 1.0;
  }
  // H_k Q = Q - 2 v (v^T Q), from the last to the first.
  std::vector<double> w(n);
  for (uint32_t k = n >= 2 ? n - 2 : 0; k-- > 0;) {
    const double* v = reflectors.data() + size_t{k} * n;
    std::fill(w.begin(), w.end(), 0.0);
    for (uint32_t i = k + 1; i < n; ++i) {
      add_multiple(q.data() + size_t{i} * n, v[i], k + 1, n, w.data());
    }
    for (uint32_t i = k + 1; i < n; ++i) {
      add_multiple(w.data(), -2 * v[i], k + 1, n, q.data() + size_t{i} * n);
    }
  }
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t j = 0; j < i; ++j) {
      std::swap(q[size_t{i} * n + j], q[size_t{j} * n + i]);
    }
  }
  return q;
}

// One implicit QL step on [first, last]: a shift from the top corner, chased from the bottom up.
// The rotations meet pairs of rows of `vectors`.
void ql_step(uint32_t first, uint32_t last, uint32_t n, std::vector<double>* diagonal,
             std::vector<double>* below, Matrix* vectors) {
  std::vector<double>& d = *diagonal;
  std::vector<double>& e = *below;
  const double half = (d[first + 1] - d[first]) / (2 * e[first]);
  const double shift = d[first] - e[first] / (half + std::copysign(std::hypot(half, 1.0), half));
  double g = d[last] - shift;
  double s = 1;
  double c = 1;
  double p = 0;
  for (uint32_t i = last; i-- > first;) {
    const double f = s * e[i];
    const double b = c * e[i];
    const double r = std::hypot(f, g);
    e[i + 1] = r;
    if (r == 0) {
      d[i + 1] -= p;
      e[last] = 0;
      return;
    }
    s = f / r;
    c = g / r;
    const double above = d[i + 1] - p;
    const double t = (d[i] - above) * s + 2 * c * b;
    p = s * t;
    d[i + 1] = above + p;
    g = c * t - b;
    double* x = vectors->data() + size_t{i} * n;
    double* y = x + n;
    for (uint32_t k = 0; k < n; ++k) {
      const double old = y[k];
      y[k] = s * x[k] + c * old;
      x[k] = c * x[k] - s * old;
    }
  }
  d[first] -= p;
  e[first] = g;
  e[last] = 0;
}

}  // namespace

Eigen symmetric_eigen(const std::vector<double>& matrix, uint32_t n) {
  Matrix a = matrix;
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t j = i + 1; j < n; ++j) {
      a[size_t{i} * n + j] = a[size_t{j} * n + i];
    }
  }
  std::vector<double> d(n);
  std::vector<double> e(n, 0.0);
  Matrix reflectors;
  to_tridiagonal(&a, n, &d, &e, &reflectors);
  Matrix q = accumulate(reflectors, n);

  constexpr int kMaxSteps = 60;  // for one value; two or three are usual
  for (uint32_t first = 0; first < n; ++first) {
    for (int step = 0; step < kMaxSteps; ++step) {
      uint32_t last = first;
      while (last + 1 < n && std::abs(e[last]) > std::numeric_limits<double>::epsilon() *
                                                     (std::abs(d[last]) + std::abs(d[last + 1]))) {
        ++last;
      }
      if (last == first) {
        break;
      }
      ql_step(first, last, n, &d, &e, &q);
    }
  }

  std::vector<uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&d](uint32_t i, uint32_t j) { return d[i] > d[j]; });
  Eigen result{std::vector<double>(n), Matrix(size_t{n} * n)};
  for (uint32_t i = 0; i < n; ++i) {
    const double* row = q.data() + size_t{order[i]} * n;
    const double* top = std::max_element(
        row, row + n, [](double x, double y) { return std::abs(x) < std::abs(y); });
    const double sign = *top < 0 ? -1.0 : 1.0;
    result.values[i] = d[order[i]];
    std::transform(row, row + n, result.vectors.begin() + static_cast<std::ptrdiff_t>(i) * n,
                   [sign](double x) { return sign * x; });
  }
  return result;
}

}  // namespace kvm::hash_index
