// SPDX-License-Identifier: Apache-2.0
#include "codecs/gear.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/assert.h"
#include "codecs/low_bits.h"
#include "codecs/row_scale.h"

namespace kvm::codecs {
namespace {

constexpr uint32_t kLargest = 0x7e800000u;  // 2^126

// Multiplications by the Gram matrix for each column of A. Singular values of what is rounded lie
// close together, and then any of their vectors will do: what is left was at most 0.6 % above what
// the best part of rank 4 leaves (Gear.LowRankPartIsNearTheBest); with 12 it was 0.7, with 24 0.3.
constexpr uint32_t kSweeps = 16;

// INVARIANT: all that is multiplied here is of fp32, so a product is exact in double precision and
// a sum of products does not depend on whether they are fused.
using Vector = std::array<float, kPageTokens>;

// The elements that outliers are the largest and smallest of.
struct VectorShape {
  VectorShape(const GearLayout& layout, uint32_t dim)
      : length(layout.by_channel ? kPageTokens : dim),
        step(layout.by_channel ? dim : 1),
        stride(layout.by_channel ? 1 : dim) {}
  uint32_t length;
  uint32_t step;    // from element to element
  uint32_t stride;  // from vector to vector
};

// Elements of a vector; those that are taken are NaN, which is neither above nor below any number.
using Elements = std::array<float, std::max(kMaxHeadDim, kPageTokens)>;

uint32_t take_largest(Elements* elements, uint32_t n, float sign) {
  float largest = -std::numeric_limits<float>::infinity();
  uint32_t at = 0;
  for (uint32_t j = 0; j < n; ++j) {
    const float x = sign * (*elements)[j];
    if (x > largest) {
      largest = x;
      at = j;
    }
  }
  (*elements)[at] = std::numeric_limits<float>::quiet_NaN();
  return at;
}

// Of those of n elements that are not taken; 0 where all are.
float mean_of_rest(const float* elements, uint32_t n) {
  double sum = 0;
  uint32_t count = 0;
  for (uint32_t j = 0; j < n; ++j) {
    if (!std::isnan(elements[j])) {
      sum += double{elements[j]};
      ++count;
    }
  }
  return count == 0 ? 0.0f : static_cast<float>(sum / count);
}

// Finds the outliers of rows [kPageTokens][dim], with deltas of 0, and puts means in their place.
void take_outliers(const GearLayout& layout, float* rows, uint32_t dim, uint16_t* params) {
  std::fill_n(params + layout.outliers, layout.n_pairs * layout.pair_params, uint16_t{0});
  const VectorShape shape(layout, dim);
  for (uint32_t v = 0; v < layout.n_vectors && layout.n_pairs != 0; ++v) {
    float* vector = rows + v * shape.stride;
    Elements elements;
    for (uint32_t j = 0; j < shape.length; ++j) {
      elements[j] = vector[j * shape.step];
    }
    for (uint32_t pair = 0; pair < layout.n_pairs; ++pair) {
      for (const uint32_t side : {0u, 1u}) {
        const uint32_t at = take_largest(&elements, shape.length, side == 0 ? 1.0f : -1.0f);
        uint16_t* place = params + layout.places(pair, side) + v;
        *place = static_cast<uint16_t>(*place | at << layout.place_bit(side));
      }
    }
    // A mean of elements that share their steps is between them.
    for (uint32_t begin = 0; begin < shape.length; begin += Codec::kGroupChannels) {
      const uint32_t n = std::min(shape.length - begin, Codec::kGroupChannels);
      const float mean = mean_of_rest(&elements[begin], n);
      for (uint32_t j = begin; j < begin + n; ++j) {
        if (std::isnan(elements[j])) {
          vector[j * shape.step] = mean;
        }
      }
    }
  }
}

template <typename Function>
void for_each_outlier(const GearLayout& layout, const uint16_t* params, uint32_t first_vector,
                      uint32_t n_vectors, const Function& function) {
  for (uint32_t pair = 0; pair < layout.n_pairs; ++pair) {
    for (const uint32_t side : {0u, 1u}) {
      for (uint32_t v = first_vector; v < first_vector + n_vectors; ++v) {
        function(layout.outlier(params, pair, side, v), layout.deltas(pair, side) + v);
      }
    }
  }
}

double dot(const float* x, const float* y, uint32_t n) {
  std::array<double, 8> sums{};
  for (uint32_t i = 0; i < n; i += 8) {
    for (uint32_t k = 0; k < 8; ++k) {
      sums[k] += double{x[i + k]} * double{y[i + k]};
    }
  }
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

// The Gram matrix of rows: R R^T. INVARIANT: its elements are of fp32.
struct Gram {
  Gram(const float* rows, uint32_t dim);
  // Subtracts x y^T + y x^T.
  void subtract(const Vector& x, const Vector& y);
  // y = R R^T x.
  void multiply(const Vector& x, std::array<double, kPageTokens>* y) const;

  std::array<std::array<double, kPageTokens>, kPageTokens> cells{};
};

Gram::Gram(const float* rows, uint32_t dim) {
  constexpr uint32_t kChannels = 8;
  std::array<std::array<double, kPageTokens>, kChannels> columns;
  for (uint32_t begin = 0; begin < dim; begin += kChannels) {
    for (uint32_t t = 0; t < kPageTokens; ++t) {
      for (uint32_t c = 0; c < kChannels; ++c) {
        columns[c][t] = double{rows[t * dim + begin + c]};
      }
    }
    // Those on and above the diagonal, and a few more.
    for (uint32_t t = 0; t < kPageTokens; ++t) {
      for (uint32_t u = t / 8 * 8; u < kPageTokens; u += 8) {
        for (uint32_t k = u; k < u + 8; ++k) {
          double sum = cells[t][k];
          for (uint32_t c = 0; c < kChannels; ++c) {
            sum += columns[c][t] * columns[c][k];
          }
          cells[t][k] = sum;
        }
      }
    }
  }
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    for (uint32_t u = t; u < kPageTokens; ++u) {
      cells[u][t] = cells[t][u] = double{static_cast<float>(cells[t][u])};
    }
  }
}

void Gram::subtract(const Vector& x, const Vector& y) {
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    for (uint32_t u = 0; u < kPageTokens; ++u) {
      double cell = cells[t][u];
      cell -= double{x[t]} * double{y[u]};
      cell -= double{y[t]} * double{x[u]};
      cells[t][u] = double{static_cast<float>(cell)};
    }
  }
}

void Gram::multiply(const Vector& x, std::array<double, kPageTokens>* y) const {
  y->fill(0);
  for (uint32_t t = 0; t < kPageTokens; t += 4) {
    const std::array<double, 4> own = {double{x[t]}, double{x[t + 1]}, double{x[t + 2]},
                                       double{x[t + 3]}};
    for (uint32_t u = 0; u < kPageTokens; ++u) {
      double sum = (*y)[u];
      sum += own[0] * cells[t][u];
      sum += own[1] * cells[t + 1][u];
      sum += own[2] * cells[t + 2][u];
      sum += own[3] * cells[t + 3][u];
      (*y)[u] = sum;
    }
  }
}

// A vector near the one of the largest singular value: its largest magnitude is in [1, 2].
// exponent: of the square of that value, within a few. False: there is none.
bool iterate(const Gram& gram, Vector* x, int* exponent) {
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    // Any that no page is made for: steps of the golden ratio around a circle.
    (*x)[t] = static_cast<float>(((t + 1) * 0x9e3779b9u) >> 8) * 0x1p-23f - 1.0f;
  }
  for (uint32_t sweep = 0; sweep < kSweeps; ++sweep) {
    std::array<double, kPageTokens> y;
    gram.multiply(*x, &y);
    double largest = 0;
    for (const double each : y) {
      largest = std::max(largest, std::abs(each));
    }
    if (largest == 0) {
      return false;
    }
    *exponent = std::ilogb(largest);
    const double scale = std::ldexp(1.0, -*exponent);
    for (uint32_t t = 0; t < kPageTokens; ++t) {
      (*x)[t] = static_cast<float>(y[t] * scale);
    }
  }
  return true;
}

// An element of A or B; 0 where there is none of x, which may be no number.
uint16_t factor_of(double x) {
  const double magnitude = std::abs(x);
  return magnitude >= 0x1p-60 && magnitude <= 0x1p60 ? f32_to_bf16(static_cast<float>(x)) : 0;
}

// The row of B for a column of A, such that no other leaves less: R^T a by the square of a. Where
// a is 0 so is the row.
void fit_row(const float* rest, uint32_t dim, const Vector& a, int exponent, uint16_t* row) {
  std::array<double, kMaxHeadDim> sums{};
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    const auto own = double{a[t]};
    for (uint32_t i = 0; i < dim; ++i) {
      sums[i] += own * double{rest[t * dim + i]};
    }
  }
  const double square = dot(a.data(), a.data(), kPageTokens);
  const double unit = std::ldexp(1.0, exponent);
  for (uint32_t i = 0; i < dim; ++i) {
    row[i] = factor_of(sums[i] / square * unit);
  }
}

// Subtracts a b^T from the rest, and what that means from its Gram matrix.
void deflate(float* rest, uint32_t dim, const Vector& a, const float* b, Gram* gram) {
  // (R - a b^T)(R - a b^T)^T = R R^T - a w^T - w a^T, where w = R b - a (b . b) / 2.
  Vector w;
  const auto half = static_cast<float>(dot(b, b, dim) / 2);
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    const auto product = static_cast<float>(dot(rest + t * dim, b, dim));
    w[t] = static_cast<float>(double{product} - double{half} * double{a[t]});
  }
  gram->subtract(a, w);
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    const auto own = double{a[t]};
    for (uint32_t i = 0; i < dim; ++i) {
      float& x = rest[t * dim + i];
      x = static_cast<float>(double{x} - own * double{b[i]});
    }
  }
}

// A and B of rest [kPageTokens][dim], which means nothing afterwards.
void factorise(const GearLayout& layout, float* rest, uint32_t dim, uint16_t* params) {
  std::fill_n(params + layout.a, layout.outliers - layout.a, uint16_t{0});
  const uint32_t n = kPageTokens * dim;
  uint32_t top = 0;
  for (uint32_t i = 0; i < n; ++i) {
    top = std::max(top, magnitude_bits(rest[i]));
  }
  const int exponent = static_cast<int>(top >> 23) - 127;
  if (layout.rank == 0 || std::abs(exponent) > 110) {
    return;
  }
  // The largest is in [1, 2), so what is made of it is within the range of fp32.
  const float scale = std::ldexp(1.0f, -exponent);
  for (uint32_t i = 0; i < n; ++i) {
    rest[i] *= scale;
  }
  Gram gram(rest, dim);
  for (uint32_t k = 0; k < layout.rank; ++k) {
    Vector x;
    int square_exponent = 0;
    if (!iterate(gram, &x, &square_exponent)) {
      return;
    }
    // Both factors get half of the singular value's exponent.
    const double share = std::ldexp(1.0, (square_exponent / 2 + exponent) / 2);
    Vector a;
    for (uint32_t t = 0; t < kPageTokens; ++t) {
      uint16_t& stored = params[layout.a + t * layout.rank + k];
      stored = factor_of(double{x[t]} * share);
      a[t] = bf16_to_f32(stored);
    }
    uint16_t* row = params + layout.b + k * dim;
    fit_row(rest, dim, a, exponent, row);
    if (k + 1 < layout.rank) {
      std::array<float, kMaxHeadDim> b;
      for (uint32_t i = 0; i < dim; ++i) {
        b[i] = bf16_to_f32(row[i]) * scale;
      }
      deflate(rest, dim, a, b.data(), &gram);
    }
  }
}

}  // namespace

bool encode_gear(const Codec& codec, const float* rows, uint32_t dim, uint8_t* codes,
                 uint16_t* params) {
  KVM_ASSERT(codec.is_low_bits() && dim <= kMaxHeadDim && dim % 8 == 0);
  KVM_ASSERT(codec.rank <= kMaxGearRank && codec.outliers <= kMaxGearOutliers);
  KVM_ASSERT(codec.group_params == 0 || codec.channel_params == 0);
  const uint32_t n = kPageTokens * dim;
  if (!std::all_of(rows, rows + n, [](float x) { return magnitude_bits(x) <= kLargest; })) {
    return false;
  }
  const GearLayout layout(codec, dim);
  std::array<float, kPageTokens * kMaxHeadDim> rest;
  std::copy_n(rows, n, rest.begin());
  take_outliers(layout, rest.data(), dim, params);
  if (!encode_low_bits(codec, rest.data(), dim, nullptr, codes, params)) {
    return false;
  }
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    std::array<float, kMaxHeadDim> row;
    decode_low_bits(codec, codes + t * codec.row_bytes(dim), params, dim, t, 1, dim, row.data());
    for (uint32_t i = 0; i < dim; ++i) {
      rest[t * dim + i] -= row[i];
    }
  }
  for_each_outlier(layout, params, 0, layout.n_vectors, [&](const Outlier& outlier, uint32_t) {
    rest[outlier.slot * dim + outlier.channel] = 0;
  });
  factorise(layout, rest.data(), dim, params);
  // Deltas are still 0.
  if (layout.n_pairs != 0) {
    decode_gear(codec, codes, params, dim, 0, kPageTokens, dim, rest.data());
    for_each_outlier(layout, params, 0, layout.n_vectors,
                     [&](const Outlier& outlier, uint32_t delta) {
                       const uint32_t at = outlier.slot * dim + outlier.channel;
                       params[delta] = f32_to_bf16(rows[at] - rest[at]);
                     });
  }
  return true;
}

void decode_gear(const Codec& codec, const uint8_t* codes, const uint16_t* params, uint32_t row_dim,
                 uint32_t slot, uint32_t n_tokens, uint32_t n, float* out) {
  decode_low_bits(codec, codes, params, row_dim, slot, n_tokens, n, out);
  const GearLayout layout(codec, row_dim);
  for (uint32_t t = 0; t < n_tokens; ++t) {
    float* row = out + uint64_t{t} * n;
    for (uint32_t k = 0; k < layout.rank; ++k) {
      const float a = bf16_to_f32(params[layout.a + (slot + t) * layout.rank + k]);
      const uint16_t* b = params + layout.b + k * row_dim;
      for (uint32_t i = 0; i < n; ++i) {
        row[i] += a * bf16_to_f32(b[i]);
      }
    }
  }
  for_each_outlier(layout, params, layout.by_channel ? 0 : slot, layout.by_channel ? n : n_tokens,
                   [&](const Outlier& outlier, uint32_t) {
                     // Unsigned: what comes before the first is far away, too.
                     const uint32_t t = outlier.slot - slot;
                     if (t < n_tokens && outlier.channel < n) {
                       out[uint64_t{t} * n + outlier.channel] += outlier.delta;
                     }
                   });
}

}  // namespace kvm::codecs
