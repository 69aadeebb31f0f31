// SPDX-License-Identifier: Apache-2.0
// The arithmetic of making a frame, written once over a vector wrapper (base/simd/vec_*.h), which
// is included before, and over plain loops that the compiler turns into vectors.
//
// Compiled with -ffp-contract=off: a fused product would round otherwise than on other machines.
#ifndef KVM_HASH_INDEX_SKETCH_FRAME_KERNEL_H_
#define KVM_HASH_INDEX_SKETCH_FRAME_KERNEL_H_

#include "hash_index/sketch/frame_args.h"

namespace kvm {
namespace hash_index {
namespace {

typedef vec::F F;
// Eight doubles, in vectors as wide as this table has them.
constexpr uint32_t kDoubles = vec::kWidth / 2;
constexpr uint32_t kVectors = 8 / kDoubles;
typedef double D __attribute__((vector_size(sizeof(F))));
typedef float Half __attribute__((vector_size(sizeof(F) / 2)));

struct D8 {
  D part[kVectors] = {};
};
static_assert(sizeof(D8) == 64, "eight doubles");

inline D8 load_8(const float* p) {
  D8 out;
#pragma GCC unroll 4
  for (uint32_t i = 0; i < kVectors; ++i) {
    Half x;
    __builtin_memcpy(&x, p + i * kDoubles, sizeof x);
    out.part[i] = __builtin_convertvector(x, D);
  }
  return out;
}
inline void add_8(const D8& a, D8* sum) {
#pragma GCC unroll 4
  for (uint32_t i = 0; i < kVectors; ++i) {
    sum->part[i] += a.part[i];
  }
}
inline void add_product_8(const D8& a, const D8& b, D8* sum) {
#pragma GCC unroll 4
  for (uint32_t i = 0; i < kVectors; ++i) {
    sum->part[i] += a.part[i] * b.part[i];
  }
}
inline D8 set_8(double x) {
  D8 out;
#pragma GCC unroll 4
  for (uint32_t i = 0; i < kVectors; ++i) {
    out.part[i] = x - D{};
  }
  return out;
}

// --- Rows ---------------------------------------------------------------------------------------

template <int kElem>
inline void load_elements(const void* row, uint32_t dim, float* out) {
  uint32_t d = 0;
  for (; d + vec::kWidth <= dim; d += vec::kWidth) {
    vec::store(out + d, vec::load_as<kElem>(row, d));
  }
  if (d < dim) {
    vec::store(out + d, vec::load_as_n<kElem>(row, d, dim - d));
  }
}

void load(const void* row, uint32_t elem, float scale, uint32_t dim, uint32_t stride, float* out) {
  switch (elem) {
    case vec::kElemF32:
      load_elements<vec::kElemF32>(row, dim, out);
      break;
    case vec::kElemF16:
      load_elements<vec::kElemF16>(row, dim, out);
      break;
    case vec::kElemI8:
    case vec::kElemF8:
      if (elem == vec::kElemF8) {
        load_elements<vec::kElemF8>(row, dim, out);
        scale *= vec::elem_unit(vec::kElemF8);
      } else {
        load_elements<vec::kElemI8>(row, dim, out);
      }
      for (uint32_t d = 0; d < dim; ++d) {
        out[d] *= scale;
      }
      break;
    default:
      load_elements<vec::kElemBf16>(row, dim, out);
  }
  for (uint32_t d = dim; d < stride; ++d) {
    out[d] = 0.0f;
  }
}

void squares(const FrameRows* rows, double* out) {
  for (size_t i = 0; i < rows->n; ++i) {
    const float* row = rows->data + i * rows->stride;
    D8 all;
    for (uint32_t d = 0; d < rows->dim; d += 8) {
      const D8 x = load_8(row + d);
      add_product_8(x, x, &all);
    }
    double sum[8];
    __builtin_memcpy(sum, &all, sizeof sum);
    out[i] = ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
  }
}

template <uint32_t kParts>
inline void add_columns(const FrameRows& rows, uint32_t d, double* sum) {
  D8 all[kParts];
  __builtin_memcpy(static_cast<void*>(all), sum + d, sizeof all);
  for (size_t i = 0; i < rows.n; ++i) {
#pragma GCC unroll 4
    for (uint32_t part = 0; part < kParts; ++part) {
      add_8(load_8(rows.data + i * rows.stride + d + part * 8), all + part);
    }
  }
  __builtin_memcpy(sum + d, all, sizeof all);
}

void add_rows(const FrameRows* rows, double* sum) {
  uint32_t d = 0;
  for (; d + 32 <= rows->dim; d += 32) {
    add_columns<4>(*rows, d, sum);
  }
  for (; d < rows->dim; d += 8) {
    add_columns<1>(*rows, d, sum);
  }
}

void subtract(const float* x, size_t n, uint32_t stride, float* rows) {
  for (size_t i = 0; i < n; ++i) {
    float* row = rows + i * stride;
    for (uint32_t d = 0; d < stride; d += vec::kWidth) {
      vec::store(row + d, vec::sub(vec::load(row + d), vec::load(x + d)));
    }
  }
}

// --- Moments ------------------------------------------------------------------------------------

constexpr uint32_t kMomentRows = 8;    // of the matrix, that are summed up at once
constexpr uint32_t kMomentChunk = 64;  // keys whose sums are fp32

// Elements [i, i + kMomentRows) x [j, j + kWidth) over n rows of keys.
inline void moment_tile(const float* keys, size_t n, uint32_t stride, uint32_t i, uint32_t j,
                        float (*out)[vec::kWidth]) {
  F sum[kMomentRows];
#pragma GCC unroll 8
  for (uint32_t r = 0; r < kMomentRows; ++r) {
    sum[r] = vec::zero();
  }
  for (size_t key = 0; key < n; ++key) {
    const float* x = keys + key * stride;
    const F other = vec::load(x + j);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < kMomentRows; ++r) {
      sum[r] = vec::add(sum[r], vec::mul(vec::set1(x[i + r]), other));
    }
  }
#pragma GCC unroll 8
  for (uint32_t r = 0; r < kMomentRows; ++r) {
    vec::store(out[r], sum[r]);
  }
}

void moments(const FrameRows* rows, double* sum) {
  const uint32_t dim = rows->dim;
  for (size_t first = 0; first < rows->n; first += kMomentChunk) {
    const size_t left = rows->n - first;
    const size_t n = left < kMomentChunk ? left : size_t{kMomentChunk};
    const float* keys = rows->data + first * rows->stride;
    for (uint32_t i = 0; i < dim; i += kMomentRows) {
      for (uint32_t j = 0; j < i + kMomentRows; j += vec::kWidth) {
        alignas(64) float part[kMomentRows][vec::kWidth];
        moment_tile(keys, n, rows->stride, i, j, part);
        const uint32_t width = dim - j < vec::kWidth ? dim - j : uint32_t{vec::kWidth};
        for (uint32_t r = 0; r < kMomentRows; ++r) {
          double* to = sum + (size_t)(i + r) * dim + j;
          for (uint32_t c = 0; c < width; ++c) {
            to[c] += (double)part[r][c];
          }
        }
      }
    }
  }
}

// --- Leads --------------------------------------------------------------------------------------

template <uint32_t kRows>
inline void lead_rows(const float* x, uint32_t stride, uint32_t dim, const float* lead,
                      double* out) {
  D8 sum[kRows];
  for (uint32_t k = 0; k < dim; ++k) {
    const D8 axis = load_8(lead + (size_t)k * kLeadDims);
#pragma GCC unroll 4
    for (uint32_t r = 0; r < kRows; ++r) {
      add_product_8(axis, set_8((double)x[(size_t)r * stride + k]), sum + r);
    }
  }
  __builtin_memcpy(out, sum, sizeof sum);
}

void leads(const FrameRows* rows, const float* lead, double* out) {
  static_assert(kLeadDims == 8, "a vector of doubles");
  size_t i = 0;
  for (; i + 4 <= rows->n; i += 4) {
    lead_rows<4>(rows->data + i * rows->stride, rows->stride, rows->dim, lead, out + i * 8);
  }
  for (; i < rows->n; ++i) {
    lead_rows<1>(rows->data + i * rows->stride, rows->stride, rows->dim, lead, out + i * 8);
  }
}

void turn(const float* x, uint32_t dim, const float* m, uint32_t m_stride, uint32_t n_out,
          float* __restrict out) {
  for (uint32_t j = 0; j < n_out; ++j) {
    out[j] = 0.0f;
  }
  for (uint32_t k = 0; k < dim; ++k) {
    const float* row = m + (size_t)k * m_stride;
    for (uint32_t j = 0; j < n_out; ++j) {
      out[j] += x[k] * row[j];
    }
  }
}

// --- Matrices -----------------------------------------------------------------------------------

// y += a x over [begin, end). Loops of this form become vector code; sums over a row do not.
inline void add_multiple(const double* __restrict x, double a, uint32_t begin, uint32_t end,
                         double* __restrict y) {
  for (uint32_t j = begin; j < end; ++j) {
    y[j] += a * x[j];
  }
}

// Four rows of the result share each row of b.
void multiply(const double* a, const double* b, uint32_t n, double* c) {
  for (size_t i = 0; i < (size_t)n * n; ++i) {
    c[i] = 0;
  }
  for (uint32_t i = 0; i < n; i += 4) {
    const uint32_t end = n - i < 4 ? n : i + 4;
    for (uint32_t k = 0; k < n; ++k) {
      for (uint32_t row = i; row < end; ++row) {
        add_multiple(b + (size_t)k * n, a[(size_t)row * n + k], 0, n, c + (size_t)row * n);
      }
    }
  }
}

// H_0 A H_0 and so on, H_k = I - 2 v v^T, until A is tridiagonal (diagonal, below); row k of
// `reflectors` is v of step k.
inline void to_tridiagonal(double* a, uint32_t n, double* diagonal, double* below,
                           double* reflectors) {
  for (size_t i = 0; i < (size_t)n * n; ++i) {
    reflectors[i] = 0;
  }
  double w[kScanMaxDim];
  for (uint32_t k = 0; k + 2 < n; ++k) {
    double* v = reflectors + (size_t)k * n;
    double square = 0;
    for (uint32_t i = k + 1; i < n; ++i) {
      v[i] = a[(size_t)i * n + k];
      square += v[i] * v[i];
    }
    const double length = __builtin_sqrt(square);
    below[k] = v[k + 1] > 0 ? -length : length;
    const double first = v[k + 1] - below[k];
    const double norm = __builtin_sqrt(square - v[k + 1] * v[k + 1] + first * first);
    v[k + 1] = first;
    if (!(norm > 0)) {
      for (uint32_t i = 0; i < n; ++i) {
        v[i] = 0;
      }
      continue;
    }
    for (uint32_t i = k + 1; i < n; ++i) {
      v[i] /= norm;
    }
    // A - v w^T - w v^T with w = 2 (A v - (v.Av) v), over the part that is left.
    for (uint32_t i = 0; i < n; ++i) {
      w[i] = 0;
    }
    for (uint32_t i = k + 1; i < n; ++i) {
      add_multiple(a + (size_t)i * n, v[i], k + 1, n, w);
    }
    double dot = 0;
    for (uint32_t i = k + 1; i < n; ++i) {
      dot += v[i] * w[i];
    }
    for (uint32_t i = k + 1; i < n; ++i) {
      w[i] = 2 * (w[i] - dot * v[i]);
    }
    for (uint32_t i = k + 1; i < n; ++i) {
      double* row = a + (size_t)i * n;
      add_multiple(w, -v[i], k + 1, n, row);
      add_multiple(v, -w[i], k + 1, n, row);
    }
  }
  for (uint32_t k = 0; k < n; ++k) {
    diagonal[k] = a[(size_t)k * n + k];
  }
  if (n >= 2) {
    below[n - 2] = a[(size_t)(n - 1) * n + n - 2];
  }
}

// Rows of q become the columns of Q = H_0 H_1 ...
inline void accumulate(const double* reflectors, uint32_t n, double* q) {
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t j = 0; j < n; ++j) {
      q[(size_t)i * n + j] = i == j ? 1.0 : 0.0;
    }
  }
  // H_k Q = Q - 2 v (v^T Q), from the last to the first.
  double w[kScanMaxDim];
  for (uint32_t k = n >= 2 ? n - 2 : 0; k-- > 0;) {
    const double* v = reflectors + (size_t)k * n;
    for (uint32_t i = 0; i < n; ++i) {
      w[i] = 0;
    }
    for (uint32_t i = k + 1; i < n; ++i) {
      add_multiple(q + (size_t)i * n, v[i], k + 1, n, w);
    }
    for (uint32_t i = k + 1; i < n; ++i) {
      add_multiple(w, -2 * v[i], k + 1, n, q + (size_t)i * n);
    }
  }
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t j = 0; j < i; ++j) {
      const double x = q[(size_t)i * n + j];
      q[(size_t)i * n + j] = q[(size_t)j * n + i];
      q[(size_t)j * n + i] = x;
    }
  }
}

inline void turn_pair(double s, double c, uint32_t n, double* __restrict x, double* __restrict y) {
  for (uint32_t k = 0; k < n; ++k) {
    const double old = y[k];
    y[k] = s * x[k] + c * old;
    x[k] = c * x[k] - s * old;
  }
}

// One implicit QL step on [first, last]: a shift from the top corner, chased from the bottom up.
// The rotations meet pairs of rows of `vectors`.
inline void ql_step(uint32_t first, uint32_t last, uint32_t n, double* d, double* e,
                    double* vectors) {
  const double half = (d[first + 1] - d[first]) / (2 * e[first]);
  const double root = __builtin_hypot(half, 1.0);
  const double shift = d[first] - e[first] / (half + __builtin_copysign(root, half));
  double g = d[last] - shift;
  double s = 1;
  double c = 1;
  double p = 0;
  for (uint32_t i = last; i-- > first;) {
    const double f = s * e[i];
    const double b = c * e[i];
    const double r = __builtin_hypot(f, g);
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
    turn_pair(s, c, n, vectors + (size_t)i * n, vectors + (size_t)(i + 1) * n);
  }
  d[first] -= p;
  e[first] = g;
  e[last] = 0;
}

void eigen(double* a, uint32_t n, double* values, double* vectors, double* scratch) {
  constexpr int kMaxSteps = 60;  // for one value; two or three are usual
  constexpr double kEpsilon = 0x1p-52;
  double* e = scratch + (size_t)n * n;
  for (uint32_t i = 0; i < n; ++i) {
    e[i] = 0;
  }
  to_tridiagonal(a, n, values, e, scratch);
  accumulate(scratch, n, vectors);
  for (uint32_t first = 0; first < n; ++first) {
    for (int step = 0; step < kMaxSteps; ++step) {
      uint32_t last = first;
      while (last + 1 < n &&
             __builtin_fabs(e[last]) >
                 kEpsilon * (__builtin_fabs(values[last]) + __builtin_fabs(values[last + 1]))) {
        ++last;
      }
      if (last == first) {
        break;
      }
      ql_step(first, last, n, values, e, vectors);
    }
  }
}

}  // namespace
}  // namespace hash_index
}  // namespace kvm

#endif  // KVM_HASH_INDEX_SKETCH_FRAME_KERNEL_H_
