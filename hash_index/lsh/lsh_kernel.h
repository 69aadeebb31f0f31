// SPDX-License-Identifier: Apache-2.0
// The LSH kernels, written once over a vector wrapper (base/simd/vec_*.h) and over what each
// per-ISA file defines in namespace `lane`:
//
//   V, B                 int32 sums of kLanes keys; their packed bytes
//   kLanes, kMaxBits     a divisor of 16; how many planes a tile takes
//   set1(x)              x in every lane
//   load(p)              the bytes of kLanes keys, 4 each
//   bytes(w)             the 4 signed bytes w at every lane
//   dot(a, x, w)         lane i = a_i + sum over its 4 bytes of x (unsigned) times w (signed)
//   or_if_positive(c, a, bit)   lane i = a_i > 0 ? c_i | bit : c_i
//   store(p, c)          kLanes codes as uint16_t
//   not_zero(p)          bit i: p[i] != 0, of 64 bytes
//
// Compiled with -ffp-contract=off: a fused product would round otherwise than on other machines.
#ifndef KVM_HASH_INDEX_LSH_LSH_KERNEL_H_
#define KVM_HASH_INDEX_LSH_LSH_KERNEL_H_

#include <stddef.h>
#include <stdint.h>

#include "base/simd/elem.h"
#include "hash_index/lsh/lsh_args.h"

namespace kvm {
namespace hash_index {
namespace {

inline uint32_t to_bits(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
}
inline float to_float(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, sizeof x);
  return x;
}

// --- Packing -------------------------------------------------------------------------------------

inline void load_halves(const uint8_t* row, uint32_t dim, float* x) {
  uint32_t d = 0;
  for (; d + vec::kWidth <= dim; d += vec::kWidth) {
    vec::store(x + d, vec::load_as<vec::kElemF16>(row, d));
  }
  if (d < dim) {  // x has room for a whole vector
    vec::store(x + d, vec::load_as_n<vec::kElemF16>(row, d, dim - d));
  }
}

// x [dim]: the row as floats, minus the centre.
inline void load_row(const PackArgs& a, const uint8_t* row, uint32_t key, float* x) {
  switch (a.elem) {
    case vec::kElemF32:
      __builtin_memcpy(x, row, a.dim * sizeof(float));
      break;
    case vec::kElemF16:
      load_halves(row, a.dim, x);
      break;
    case vec::kElemI8: {
      const float scale = to_float((uint32_t)a.scales[key] << 16);
      for (uint32_t d = 0; d < a.dim; ++d) {
        x[d] = (float)(int8_t)row[d] * scale;
      }
      break;
    }
    case vec::kElemF8: {
      // e4m3 with its exponent in the place of fp32's, and 2^120 for the difference of the biases.
      const float scale = to_float((uint32_t)a.scales[key] << 16);
      for (uint32_t d = 0; d < a.dim; ++d) {
        const uint32_t bits = (uint32_t)(row[d] & 0x80u) << 24 | (uint32_t)(row[d] & 0x7fu) << 20;
        x[d] = to_float(bits) * 0x1p120f * scale;
      }
      break;
    }
    default: {
      const uint16_t* e = reinterpret_cast<const uint16_t*>(row);
      for (uint32_t d = 0; d < a.dim; ++d) {
        x[d] = to_float((uint32_t)e[d] << 16);
      }
    }
  }
  if (a.center != nullptr) {
    for (uint32_t d = 0; d < a.dim; ++d) {
      x[d] -= a.center[d];
    }
  }
}

// Factor that makes the largest |x| 127; 0 where one is not finite or all are below 1e-30. Bits of
// magnitudes order as integers, and what is not finite comes last.
inline float scale_of(const float* x, uint32_t dim) {
  int32_t top = 0;
  for (uint32_t d = 0; d < dim; ++d) {
    const int32_t bits = (int32_t)(to_bits(x[d]) & 0x7fffffffu);
    top = bits > top ? bits : top;
  }
  const float largest = to_float((uint32_t)top);
  return top < 0x7f800000 && largest >= 1e-30f ? 127.0f / largest : 0.0f;
}

void pack(const PackArgs* args) {
  const PackArgs& a = *args;
  const size_t row_bytes = (size_t)a.dim * vec::elem_bytes((int)a.elem);
  float x[kMaxLshDim + 16];
  alignas(64) uint8_t bytes[kMaxLshDim];
  for (uint32_t key = 0; key < a.n; ++key) {
    load_row(a, a.rows + key * row_bytes, key, x);
    const float scale = scale_of(x, a.dim);
    if (scale != 0.0f) {
      for (uint32_t d = 0; d < a.dim; ++d) {
        // The sum's low byte is the product rounded to nearest even.
        bytes[d] = (uint8_t)(to_bits(x[d] * scale + 12582912.0f) + kWeightOffset);
      }
    } else {
      __builtin_memset(bytes, (int)kWeightOffset, a.dim);
    }
    uint8_t* to = a.packed + 4 * (a.first + key);
    for (uint32_t d = 0; d < a.dim; d += 4) {
      __builtin_memcpy(to + (size_t)d * kPackKeys, bytes + d, 4);
    }
  }
}

// --- Hashing -------------------------------------------------------------------------------------

// Sums of kBits planes for kVecs vectors of keys. A function of its own that leaves the sums in
// memory: with their use behind the loop, GCC 12 keeps half of them on the stack inside it.
template <uint32_t kVecs, uint32_t kBits>
__attribute__((noinline)) void sum_planes(const int8_t* weights, const int32_t* bias, uint32_t dim,
                                          const uint8_t* packed, lane::V* out) {
  lane::V sum[kBits][kVecs];
#pragma GCC unroll 8
  for (uint32_t b = 0; b < kBits; ++b) {
#pragma GCC unroll 8
    for (uint32_t v = 0; v < kVecs; ++v) {
      sum[b][v] = lane::set1(bias[b]);
    }
  }
  for (uint32_t d = 0; d < dim; d += 4) {
    lane::B x[kVecs];
#pragma GCC unroll 8
    for (uint32_t v = 0; v < kVecs; ++v) {
      x[v] = lane::load(packed + (size_t)d * kPackKeys + v * lane::kLanes * 4);
    }
#pragma GCC unroll 8
    for (uint32_t b = 0; b < kBits; ++b) {
      const lane::B w = lane::bytes(weights + (size_t)b * dim + d);
#pragma GCC unroll 8
      for (uint32_t v = 0; v < kVecs; ++v) {
        sum[b][v] = lane::dot(sum[b][v], x[v], w);
      }
    }
  }
#pragma GCC unroll 8
  for (uint32_t b = 0; b < kBits; ++b) {
#pragma GCC unroll 8
    for (uint32_t v = 0; v < kVecs; ++v) {
      out[b * kVecs + v] = sum[b][v];
    }
  }
}

template <uint32_t kVecs, uint32_t kBits>
inline void sum_some_planes(uint32_t n, const int8_t* weights, const int32_t* bias, uint32_t dim,
                            const uint8_t* packed, lane::V* out) {
  if (n == kBits) {
    sum_planes<kVecs, kBits>(weights, bias, dim, packed, out);
  } else if constexpr (kBits > 1) {
    sum_some_planes<kVecs, kBits - 1>(n, weights, bias, dim, packed, out);
  }
}

template <uint32_t kVecs>
inline void hash_keys(const HashArgs& a, uint32_t key) {
  const uint8_t* packed = a.packed + (size_t)key * 4;
  // Tiles of about equal size: 8 bits are 4 + 4, not 5 + 3.
  const uint32_t n_tiles = (a.n_bits + lane::kMaxBits - 1) / lane::kMaxBits;
  for (uint32_t table = a.table_begin; table < a.table_end; ++table) {
    lane::V sum[16 * kVecs];
    for (uint32_t t = 0; t < n_tiles; ++t) {
      const uint32_t bit = a.n_bits * t / n_tiles;
      const uint32_t n = a.n_bits * (t + 1) / n_tiles - bit;
      const size_t plane = (size_t)table * a.n_bits + bit;
      sum_some_planes<kVecs, lane::kMaxBits>(n, a.weights + plane * a.dim, a.bias + plane, a.dim,
                                             packed, sum + bit * kVecs);
    }
    uint16_t* out = a.codes + (table - a.table_begin) * a.code_stride + key;
    for (uint32_t v = 0; v < kVecs; ++v) {
      lane::V code = lane::set1(0);
      for (uint32_t b = 0; b < a.n_bits; ++b) {
        code = lane::or_if_positive(code, sum[b * kVecs + v], 1 << b);
      }
      lane::store(out + v * lane::kLanes, code);
    }
  }
}

void hash(const HashArgs* args) {
  uint32_t key = 0;
  for (; key + 4 * lane::kLanes <= args->n_keys; key += 4 * lane::kLanes) {
    hash_keys<4>(*args, key);
  }
  for (; key < args->n_keys; key += 16) {
    hash_keys<16 / lane::kLanes>(*args, key);
  }
}

// --- Lookup --------------------------------------------------------------------------------------

void collect(uint8_t* counts, size_t n, uint32_t bit, uint8_t* masks) {
  const uint8_t mask = (uint8_t)bit;
  for (size_t i = 0; i < n; ++i) {
    masks[i] = (uint8_t)(masks[i] | (counts[i] >= 2 ? mask : 0));
    counts[i] = 0;
  }
}

template <bool kHigh>
inline void put_pair(uint32_t id, const uint8_t* masks, const uint8_t* high, uint16_t* out) {
  out[0] = (uint16_t)id;
  out[1] = (uint16_t)(kHigh ? masks[id] | high[id] << 8 : masks[id]);
}

// Few ids of 64 are listed, and how many is anyone's guess: eight pairs are written at once, and
// the next word overwrites those that were not meant.
template <bool kHigh>
inline uint32_t list_pairs(const uint8_t* masks, const uint8_t* high, uint32_t n, uint16_t* out) {
  uint32_t listed = 0;
  for (uint32_t first = 0; first < n; first += 64) {
    uint64_t bits = lane::not_zero(masks + first);
    if (kHigh) {
      bits |= lane::not_zero(high + first);
    }
    uint32_t left = (uint32_t)__builtin_popcountll(bits);
    uint16_t* to = out + (size_t)listed * 2;
    listed += left;
    if (first + 8 <= n) {  // out has room for n pairs
      while (true) {
#pragma GCC unroll 8
        for (uint32_t i = 0; i < 8; ++i) {
          const uint64_t some = bits | (uint64_t)1 << 63;
          put_pair<kHigh>(first + (uint32_t)__builtin_ctzll(some), masks, high, to + 2 * i);
          bits &= bits - 1;
        }
        if (left <= 8) {
          break;
        }
        left -= 8;
        to += 16;
        if (left < 8) {
          break;
        }
      }
    }
    for (; bits != 0; bits &= bits - 1, to += 2) {
      put_pair<kHigh>(first + (uint32_t)__builtin_ctzll(bits), masks, high, to);
    }
  }
  return listed;
}

uint32_t list(const uint8_t* masks, const uint8_t* high, uint32_t n, uint16_t* out) {
  return high != nullptr ? list_pairs<true>(masks, high, n, out)
                         : list_pairs<false>(masks, high, n, out);
}

// --- Inclusion probability -----------------------------------------------------------------------

// Branch-free, so that the loop below becomes vectors.

// x a positive normal number; relative error 2e-7.
inline float natural_log(float x) {
  const int32_t bits = (int32_t)to_bits(x);
  const int32_t exponent = (bits - 0x3f3504f3) >> 23;  // mantissa in [sqrt(1/2), sqrt(2))
  const float mantissa = to_float((uint32_t)(bits - exponent * (1 << 23)));
  const float s = (mantissa - 1.0f) / (mantissa + 1.0f);
  const float z = s * s;
  const float tail = z * (0.666666667f + z * (0.4f + z * (0.285714286f + z * 0.222222222f)));
  const float e = (float)exponent;
  return e * 0.693359375f + ((2.0f * s + s * tail) + e * -2.12194440e-4f);
}

// x in [-87, 0].
inline float exponential(float x) {
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  const float p =
      1.0f +
      r * (1.0f + r * (0.5f + r * (0.166666667f + r * (0.0416666667f + r * (0.00833333333f +
                                                                            r * 0.00138888889f)))));
  return p * to_float((to_bits(shifted) << 23) + 0x3f800000u);
}

// acos(y) / pi for y in [0, 1]: sqrt(1 - y) times a polynomial fitted to 2.4e-9 relative.
inline float acos_over_pi(float y) {
  const float p =
      0.499999999f +
      y * (-0.0683096919f +
           y * (0.0283395976f +
                y * (-0.0161077547f +
                     y * (0.010380526f + y * (-0.00662471332f +
                                              y * (0.00354182141f + y * (-0.00128424969f +
                                                                         y * 0.000222624704f)))))));
  return __builtin_sqrtf(1.0f - y) * p;
}

constexpr int kSeriesTerms = 8;

struct InclusionShape {
  float m;      // L - 1
  float pairs;  // L (L - 1) / 2
  float floor;
  float ratio[kSeriesTerms];  // (L - 2 - i) / (3 + i), 0 where the series ends
};

// u of a collision probability c of one table.
inline float two_or_more(float c, const InclusionShape& k) {
  c = c < 0.99999994f ? c : 0.99999994f;
  // ln(1 - c), accurate for small c: the rounding of 1 - c is divided out.
  const float rest = 1.0f - c;
  const float step = rest - 1.0f;
  const float log_rest = step == 0.0f ? -c : natural_log(rest) * (-c / step);
  float z = (k.m - 1.0f) * log_rest;
  z = z > -87.0f ? z : -87.0f;
  const float power = exponential(z);  // (1 - c)^(L - 2)
  // Two of L, plus three of L, ...: nothing cancels, and few terms are needed for small L c.
  const float odds = c / rest;
  float series = 1.0f;
  for (int i = kSeriesTerms - 1; i >= 0; --i) {
    series = 1.0f + k.ratio[i] * odds * series;
  }
  const float few = k.pairs * c * c * power * series;
  const float many = 1.0f - power * rest * (1.0f + k.m * c);
  const float u = k.m * c < 0.5f ? few : many;
  return u > k.floor ? u : k.floor;
}

void inclusion(const InclusionArgs* args, const float* x, size_t n, float* out) {
  InclusionShape k;
  const float tables = (float)args->n_tables;
  k.m = tables - 1.0f;
  k.pairs = 0.5f * tables * k.m;
  k.floor = args->floor;
  for (int i = 0; i < kSeriesTerms; ++i) {
    const float left = tables - 2.0f - (float)i;
    k.ratio[i] = left > 0.0f ? left / (float)(3 + i) : 0.0f;
  }
  enum : size_t { kChunk = 64 };
  float p[kChunk];
  float c[kChunk];
  for (size_t begin = 0; begin < n; begin += kChunk) {
    const size_t count = n - begin < kChunk ? n - begin : kChunk;
    for (size_t i = 0; i < kChunk; ++i) {
      p[i] = 0.0f;
      c[i] = 1.0f;
    }
    __builtin_memcpy(p, x + begin, count * sizeof(float));
    for (size_t i = 0; i < kChunk; ++i) {
      const float cosine = p[i] == p[i] ? p[i] : 0.0f;
      float y = cosine < 0.0f ? -cosine : cosine;
      y = y < 1.0f ? y : 1.0f;
      const float a = acos_over_pi(y);
      p[i] = cosine < 0.0f ? a : 1.0f - a;
    }
    for (uint32_t bits = args->n_bits; bits != 0; bits >>= 1) {
      if ((bits & 1) != 0) {
        for (size_t i = 0; i < kChunk; ++i) {
          c[i] *= p[i];
        }
      }
      for (size_t i = 0; i < kChunk; ++i) {
        p[i] *= p[i];
      }
    }
    for (size_t i = 0; i < kChunk; ++i) {
      c[i] = two_or_more(c[i], k);
    }
    if (args->inverse != 0) {
      for (size_t i = 0; i < kChunk; ++i) {
        c[i] = 1.0f / c[i];
      }
    } else {
      for (size_t i = 0; i < kChunk; ++i) {
        c[i] = natural_log(c[i]);
      }
    }
    __builtin_memcpy(out + begin, c, count * sizeof(float));
  }
}

}  // namespace
}  // namespace hash_index
}  // namespace kvm

#endif  // KVM_HASH_INDEX_LSH_LSH_KERNEL_H_
