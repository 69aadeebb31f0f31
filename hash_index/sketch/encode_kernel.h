// SPDX-License-Identifier: Apache-2.0
// Coding of keys, written once over a vector wrapper (base/simd/vec_*.h), which is included before.
//
// Keys lie in the lanes: [coordinate][kStrip keys]. So rotations, thresholds and the packing of
// bits need no shuffles, only the reading of K does (a transpose).
#ifndef KVM_HASH_INDEX_SKETCH_ENCODE_KERNEL_H_
#define KVM_HASH_INDEX_SKETCH_ENCODE_KERNEL_H_

#include "hash_index/sketch/lanes.h"
#include "hash_index/sketch/scan_args.h"

namespace kvm {
namespace hash_index {
namespace {

// The file that includes this defines mask_lt (scan_kernel.h) and root_of(a), the square root.

constexpr int kPair = 2;  // vectors of keys that go together
constexpr uint32_t kStrip = kPair * vec::kWidth;

struct Strip {
  alignas(64) float x[kScanMaxDim][kStrip];
  alignas(64) float y[kLeadDims + kScanMaxDim][kStrip];
};

inline F magnitude(F a) { return float_of(bits_of(a) & splat(0x7fffffffu)); }

inline U to_bf16(F a) {
  const U bits = bits_of(a);
  return (bits + splat(0x7fffu) + ((bits >> 16) & splat(1))) >> 16;
}

// kWidth rows of dim elements, columns [at, at + kWidth), as vectors of the rows' lanes.
template <int kElem>
inline void load_columns(const uint8_t* rows, uint32_t dim, uint32_t at, F* out) {
  constexpr size_t kBytes = kElem == vec::kElemF32 ? 4 : 2;
  for (int i = 0; i < vec::kWidth; ++i) {
    const uint8_t* row = rows + static_cast<size_t>(i) * dim * kBytes;
    out[i] = at + vec::kWidth <= dim ? vec::load_as<kElem>(row, at)
                                     : vec::load_as_n<kElem>(row, at, dim - at);
  }
  vec::transpose(out);
}

// The length of a value that is not finite, as root_of makes it.
constexpr float kHugeValue = 1e18f;

// Centred keys into s->x. What is no finite number becomes a key at the centre whose value is huge:
// such a key must be read, not overlooked.
template <int kElem>
inline void load_strip(const EncodeArgs& args, uint32_t first, Strip* s) {
  constexpr size_t kBytes = kElem == vec::kElemF32 ? 4 : 2;
  const size_t row_bytes = args.dim_k * kBytes;
  F square[kPair];
  for (int p = 0; p < kPair; ++p) {
    const uint8_t* rows = args.k + (first + static_cast<uint32_t>(p) * vec::kWidth) * row_bytes;
    square[p] = vec::zero();
    for (uint32_t at = 0; at < args.dim_k; at += vec::kWidth) {
      F column[vec::kWidth];
      load_columns<kElem>(rows, args.dim_k, at, column);
      const uint32_t n = args.dim_k - at < vec::kWidth ? args.dim_k - at : vec::kWidth;
      for (uint32_t j = 0; j < n; ++j) {
        const F x = vec::sub(column[j], vec::set1(args.center[at + j]));
        square[p] = vec::fma(x, x, square[p]);
        vec::store(s->x[at + j] + p * vec::kWidth, x);
      }
    }
  }
  const F limit = vec::set1(1e30f);
  for (int p = 0; p < kPair; ++p) {
    const uint32_t fits = mask_lt(square[p], limit);
    if (fits != (vec::kWidth == 32 ? ~0u : (1u << vec::kWidth) - 1)) {
      for (uint32_t k = 0; k < args.dim_k; ++k) {
        for (int i = 0; i < vec::kWidth; ++i) {
          if ((fits >> i & 1) == 0) {
            s->x[k][p * vec::kWidth + i] = 0.0f;
          }
        }
      }
      for (int i = 0; i < vec::kWidth; ++i) {
        if ((fits >> i & 1) == 0) {
          args.value_norms[first + static_cast<uint32_t>(p * vec::kWidth + i)] = kHugeValue;
        }
      }
    }
  }
}

// y[j] = sum over k of m[k * stride + j] x[k], for kOut outputs j.
template <int kOut>
inline void multiply(const float* m, uint32_t stride, uint32_t dim, const float (*x)[kStrip],
                     float (*y)[kStrip]) {
  F acc[kOut][kPair];
  for (int j = 0; j < kOut; ++j) {
    acc[j][0] = acc[j][1] = vec::zero();
  }
  for (uint32_t k = 0; k < dim; ++k) {
    const F x0 = vec::load(x[k]);
    const F x1 = vec::load(x[k] + vec::kWidth);
    for (int j = 0; j < kOut; ++j) {
      const F b = vec::set1(m[k * stride + static_cast<uint32_t>(j)]);
      acc[j][0] = vec::fma(b, x0, acc[j][0]);
      acc[j][1] = vec::fma(b, x1, acc[j][1]);
    }
  }
  for (int j = 0; j < kOut; ++j) {
    vec::store(y[j], acc[j][0]);
    vec::store(y[j] + vec::kWidth, acc[j][1]);
  }
}

// A register file holds 16 sums beside the operands, or 8.
constexpr int kOutTile = vec::kWidth == 16 ? 8 : 4;

inline void multiply_all(const float* m, uint32_t n_out, uint32_t dim, const float (*x)[kStrip],
                         float (*y)[kStrip]) {
  for (uint32_t j = 0; j < n_out; j += kOutTile) {
    multiply<kOutTile>(m + j, n_out, dim, x, y + j);
  }
}

// x minus its part along the lead, whose coordinates are y[0 .. 8).
inline void remove_lead(const EncodeArgs& args, Strip* s) {
  F y[kLeadDims][kPair];  // with the other sign
#pragma GCC unroll 8
  for (uint32_t j = 0; j < kLeadDims; ++j) {
#pragma GCC unroll 2
    for (int p = 0; p < kPair; ++p) {
      y[j][p] = float_of(bits_of(vec::load(s->y[j] + p * vec::kWidth)) ^ splat(0x80000000u));
    }
  }
  for (uint32_t k = 0; k < args.dim_k; ++k) {
    F x0 = vec::load(s->x[k]);
    F x1 = vec::load(s->x[k] + vec::kWidth);
#pragma GCC unroll 8
    for (uint32_t j = 0; j < kLeadDims; ++j) {
      const F a = vec::set1(args.lead_query[k * kLeadDims + j]);
      x0 = vec::fma(a, y[j][0], x0);
      x1 = vec::fma(a, y[j][1], x1);
    }
    vec::store(s->x[k], x0);
    vec::store(s->x[k] + vec::kWidth, x1);
  }
}

// Three rounds of signs and Hadamard, in place, as many butterflies at each reading as registers
// hold.
inline void butterfly(F* a, F* b) {
  const F sum = vec::add(*a, *b);
  *b = vec::sub(*a, *b);
  *a = sum;
}

constexpr int kMostLog = vec::kWidth == 16 ? 4 : 3;

// One vector of keys: coordinates half apart.
template <int kLog, bool kSigns>
inline void butterflies(uint32_t half, const float* signs, float* x) {
  constexpr uint32_t kCount = 1u << kLog;
  const size_t pitch = size_t{half} * kStrip;
  F a[kCount];
#pragma GCC unroll 16
  for (uint32_t i = 0; i < kCount; ++i) {
    a[i] = vec::load(x + i * pitch);
    if (kSigns) {
      a[i] = vec::mul(a[i], vec::set1(signs[i * half]));
    }
  }
#pragma GCC unroll 4
  for (uint32_t step = 1; step < kCount; step *= 2) {
#pragma GCC unroll 16
    for (uint32_t i = 0; i < kCount; ++i) {
      if ((i & step) == 0) {
        butterfly(a + i, a + i + step);
      }
    }
  }
#pragma GCC unroll 16
  for (uint32_t i = 0; i < kCount; ++i) {
    vec::store(x + i * pitch, a[i]);
  }
}

template <int kLog, bool kSigns>
inline void hadamard_pass(uint32_t dim, uint32_t half, const float* signs, float (*x)[kStrip]) {
  for (uint32_t base = 0; base < dim; base += half << kLog) {
    for (uint32_t j = base; j < base + half; ++j) {
#pragma GCC unroll 1
      for (int p = 0; p < kPair; ++p) {
        butterflies<kLog, kSigns>(half, signs + j, x[j] + p * vec::kWidth);
      }
    }
  }
}

// The passes from `half` on; signs belong to the first.
template <int kLog, bool kSigns>
inline void hadamard_from(uint32_t dim, uint32_t half, const float* signs, float (*x)[kStrip]) {
  if constexpr (kLog > 0) {
    if ((dim / half) % (1u << kLog) != 0) {
      return hadamard_from<kLog - 1, kSigns>(dim, half, signs, x);
    }
    hadamard_pass<kLog, kSigns>(dim, half, signs, x);
    if ((half << kLog) < dim) {
      hadamard_from<kMostLog, false>(dim, half << kLog, signs, x);
    }
  }
}

inline void rotate(uint32_t dim, const float* signs, float (*x)[kStrip]) {
  for (uint32_t turn = 0; turn < 3; ++turn, signs += dim) {
    hadamard_from<kMostLog, true>(dim, 1, signs, x);
  }
}

// The threshold over which a coordinate gets the larger of two magnitudes: the one of a few whose
// codeword y has the largest cosine with x, then improved by t = <y, x> / |y|^2, at which for given
// y the nearest multiple of a codeword lies (Lloyd's iteration: the cosine never falls).
inline F dot_of(F sum_abs, F sum_large) { return vec::fma(vec::set1(0.5f), sum_abs, sum_large); }
inline F square_of(uint32_t dim, F n_large) {
  return vec::fma(vec::set1(2.0f), n_large, vec::set1(0.25f * static_cast<float>(dim)));
}

struct Threshold {
  F at;
  F quality;  // squared cosine times |x|^2
  F dot;
  F next;
};

// Sums over coordinates run in chains, since an addition takes longer than a coordinate does.
constexpr uint32_t kChains = 4;
inline F sum_of(const F* chains) {
  return vec::add(vec::add(chains[0], chains[1]), vec::add(chains[2], chains[3]));
}

template <int kTries>
inline void try_thresholds(uint32_t dim, const float (*x)[kStrip], int p, F sum_abs, const F* at,
                           Threshold* best) {
  F sums[kTries][kChains];
  F counts[kTries][kChains];
#pragma GCC unroll 4
  for (int t = 0; t < kTries; ++t) {
#pragma GCC unroll 4
    for (uint32_t c = 0; c < kChains; ++c) {
      sums[t][c] = counts[t][c] = vec::zero();
    }
  }
  // Many thresholds are chains enough.
  constexpr uint32_t kOwn = kTries < 4 ? kChains : 1;
  const F one = vec::set1(1.0f);
  for (uint32_t k = 0; k < dim; k += kOwn) {
#pragma GCC unroll 4
    for (uint32_t c = 0; c < kOwn; ++c) {
      const F a = magnitude(vec::load(x[k + c] + p * vec::kWidth));
#pragma GCC unroll 4
      for (int t = 0; t < kTries; ++t) {
        sums[t][c] = vec::add(sums[t][c], vec::keep_ge(a, at[t], a));
        counts[t][c] = vec::add(counts[t][c], vec::keep_ge(a, at[t], one));
      }
    }
  }
  F sum[kTries];
  F count[kTries];
  for (int t = 0; t < kTries; ++t) {
    sum[t] = sum_of(sums[t]);
    count[t] = sum_of(counts[t]);
  }
  for (int t = 0; t < kTries; ++t) {
    const F dot = dot_of(sum_abs, sum[t]);
    const F square = square_of(dim, count[t]);
    const F next = vec::div(dot, square);
    const F quality = vec::mul(dot, next);
    const U better = (U)(quality > best->quality);
    const auto choose = [better](F a, F b) {
      return float_of((bits_of(a) & better) | (bits_of(b) & ~better));
    };
    best->at = choose(at[t], best->at);
    best->dot = choose(dot, best->dot);
    best->next = choose(next, best->next);
    best->quality = choose(quality, best->quality);
  }
}

inline Threshold find_threshold(uint32_t dim, const float (*x)[kStrip], int p, F sum_abs) {
  constexpr int kTries = 4;
  constexpr float kOfMean[kTries] = {0.85f, 1.1f, 1.35f, 1.7f};  // of |x|; 1.25 is best for normals
  const F mean = vec::mul(sum_abs, vec::set1(1.0f / static_cast<float>(dim)));
  F at[kTries];
  for (int t = 0; t < kTries; ++t) {
    at[t] = vec::mul(mean, vec::set1(kOfMean[t]));
  }
  Threshold best{vec::zero(), vec::set1(-1.0f), vec::zero(), vec::zero()};
  try_thresholds<kTries>(dim, x, p, sum_abs, at, &best);
  for (int turn = 0; turn < 2; ++turn) {
    const F next = best.next;
    try_thresholds<1>(dim, x, p, sum_abs, &next, &best);
  }
  return best;
}

// Position of the dwords of a vector's keys in a code row, and where in the dword.
struct Place {
  uint32_t dword;
  uint32_t shift;
};
inline Place place_of(uint32_t key) { return {key % 16, key / 16 * 8}; }

inline void or_into(uint8_t* row, Place place, U byte) {
  uint8_t* p = row + 4 * place.dword;
  store_u(p, load_u(p) | (byte << static_cast<int>(place.shift)));
}

// Sets plane 0 of kWidth keys; returns |x|^2 and the sum of the |x_k|.
inline void put_signs(const EncodeArgs& args, Place place, const float (*rest)[kStrip], int p,
                      F* square, F* sum_abs) {
  F squares[kChains];
  F sums[kChains];
#pragma GCC unroll 4
  for (uint32_t c = 0; c < kChains; ++c) {
    squares[c] = sums[c] = vec::zero();
  }
  for (uint32_t row = 0; row < args.shape.code_rows; ++row) {
    U high = U{};
#pragma GCC unroll 8
    for (uint32_t bit = 8; bit-- > 0;) {
      const F x = vec::load(rest[row * 8 + bit] + p * vec::kWidth);
      squares[bit % kChains] = vec::fma(x, x, squares[bit % kChains]);
      sums[bit % kChains] = vec::add(sums[bit % kChains], magnitude(x));
      high = (high << 1) | (~bits_of(x) >> 31);
    }
    or_into(args.block + row * kScanKeys, place, high);
  }
  *square = sum_of(squares);
  *sum_abs = sum_of(sums);
}

// Sets plane 1.
inline void put_magnitudes(const EncodeArgs& args, Place place, const float (*rest)[kStrip], int p,
                           F threshold) {
  uint8_t* plane = args.block + args.shape.code_rows * kScanKeys;
  for (uint32_t row = 0; row < args.shape.code_rows; ++row) {
    U low = U{};
#pragma GCC unroll 8
    for (uint32_t bit = 8; bit-- > 0;) {
      const F x = vec::load(rest[row * 8 + bit] + p * vec::kWidth);
      const U negative = bits_of(x) >> 31;
      const U large = bits_of(vec::keep_ge(magnitude(x), threshold, float_of(splat(1))));
      low = (low << 1) | (large ^ negative);
    }
    or_into(plane + row * kScanKeys, place, low);
  }
}

// Bits of kWidth keys from key on, and their factors. `rest` [dim_pad], rotated.
inline void put_codes(const EncodeArgs& args, uint32_t key, const float (*rest)[kStrip], int p) {
  const Place place = place_of(key);
  F square;
  F sum_abs;
  put_signs(args, place, rest, p, &square, &sum_abs);
  F of_code = vec::mul(sum_abs, vec::set1(0.5f));
  if (args.shape.planes == 2) {
    const Threshold threshold = find_threshold(args.dim_pad, rest, p, sum_abs);
    put_magnitudes(args, place, rest, p, threshold.at);
    of_code = threshold.dot;
  }
  // f = |x|^2 / <y, x>; 0 for the zero vector. Below 1e-30 keys count as zero: no denormals.
  const F tiny = vec::set1(1e-30f);
  const F dot = vec::max(of_code, tiny);
  const F factor = vec::keep_ge(square, tiny, vec::div(square, dot));
  const U norm = to_bf16(vec::load(args.value_norms + key));
  store_u(args.block + args.shape.factor_offset + 4 * key, (to_bf16(factor) << 16) | norm);
}

// Lead codes of kWidth keys: round(y / step), within 127, plus 128.
inline void put_lead(const EncodeArgs& args, uint32_t key, const float (*y)[kStrip], int p) {
  for (uint32_t word = 0; word < 2; ++word) {
    U bytes = U{};
    for (uint32_t j = 4; j-- > 0;) {
      const F inverse = vec::set1(args.lead_inverse[4 * word + j]);
      F c = vec::mul(vec::load(y[4 * word + j] + p * vec::kWidth), inverse);
      c = vec::min(vec::max(c, vec::set1(-127.0f)), vec::set1(127.0f));
      c = vec::add(vec::round_nearest(c), vec::set1(128.0f));
      bytes = (bytes << 8) | (U) __builtin_convertvector(c, S);
    }
    store_u(args.block + args.shape.lead_offset + word * (4 * kScanKeys) + 4 * key, bytes);
  }
}

template <int kElem>
inline void encode_rows(const EncodeArgs& args) {
  Strip s;
  for (uint32_t i = 0; i < args.shape.planes * args.shape.code_rows * kScanKeys; i += sizeof(U)) {
    store_u(args.block + i, U{});
  }
  for (uint32_t first = 0; first < kScanKeys; first += kStrip) {
    load_strip<kElem>(args, first, &s);
    float(*rest)[kStrip] = s.x;
    if (args.matrix != nullptr) {
      multiply_all(args.matrix, kLeadDims + args.dim_pad, args.dim_k, s.x, s.y);
      rest = s.y + kLeadDims;
    } else {
      if (args.lead != 0) {
        multiply_all(args.lead_key, kLeadDims, args.dim_k, s.x, s.y);
        remove_lead(args, &s);
      }
      for (uint32_t k = args.dim_k; k < args.dim_pad; ++k) {
        for (int p = 0; p < kPair; ++p) {
          vec::store(s.x[k] + p * vec::kWidth, vec::zero());
        }
      }
      rotate(args.dim_pad, args.signs, s.x);
    }
    for (int p = 0; p < kPair; ++p) {
      const uint32_t key = first + static_cast<uint32_t>(p) * vec::kWidth;
      put_codes(args, key, rest, p);
      if (args.lead != 0) {
        put_lead(args, key, s.y, p);
      }
    }
  }
}

void encode_kernel(const EncodeArgs* args) {
  switch (args->elem_k) {
    case vec::kElemF32:
      return encode_rows<vec::kElemF32>(*args);
    case vec::kElemF16:
      return encode_rows<vec::kElemF16>(*args);
    default:
      return encode_rows<vec::kElemBf16>(*args);
  }
}

template <int kElem>
inline void norms_of(const uint8_t* rows, uint32_t dim, const uint8_t* next, size_t next_bytes,
                     float* out) {
  constexpr uint32_t kLine = 64;
  constexpr size_t kBytes = kElem == vec::kElemF32 ? 4 : 2;
  for (uint32_t first = 0; first < kScanKeys; first += vec::kWidth) {
    F sums[vec::kWidth];
    for (uint32_t i = 0; i < vec::kWidth; ++i) {
      const uint8_t* row = rows + static_cast<size_t>(first + i) * dim * kBytes;
      const size_t end = next_bytes * (first + i + 1) / kScanKeys;
      for (size_t line = next_bytes * (first + i) / kScanKeys / kLine * kLine; line < end;
           line += kLine) {
        vec::prefetch(next + line);
      }
      sums[i] = vec::zero();
      uint32_t at = 0;
      for (; at + vec::kWidth <= dim; at += vec::kWidth) {
        const F v = vec::load_as<kElem>(row, at);
        sums[i] = vec::fma(v, v, sums[i]);
      }
      if (at < dim) {
        const F v = vec::load_as_n<kElem>(row, at, dim - at);
        sums[i] = vec::fma(v, v, sums[i]);
      }
    }
    // Values that are not finite count as huge: such a key must be read, not overlooked.
    const F squares = vec::min(vec::reduce(sums), vec::set1(kHugeValue * kHugeValue));
    vec::store(out + first, root_of(squares));
  }
}

void norms_kernel(const uint8_t* rows, uint32_t elem, uint32_t dim, const uint8_t* next,
                  size_t next_bytes, float* out) {
  switch (elem) {
    case vec::kElemF32:
      return norms_of<vec::kElemF32>(rows, dim, next, next_bytes, out);
    case vec::kElemF16:
      return norms_of<vec::kElemF16>(rows, dim, next, next_bytes, out);
    default:
      return norms_of<vec::kElemBf16>(rows, dim, next, next_bytes, out);
  }
}

}  // namespace
}  // namespace hash_index
}  // namespace kvm

#endif  // KVM_HASH_INDEX_SKETCH_ENCODE_KERNEL_H_
