// SPDX-License-Identifier: Apache-2.0
// Exact attention, written once over the vector wrapper that the including file has chosen.
// exact.h holds the formula, the order of operations and the error analysis.
//
// Two paths. Streaming (few rows): K and V flow once from memory, 16 tokens at a time, and meet
// tiles of 4 rows (1 where there is only one). Lanes of a score vector are [row][token], so that
// every lane works whatever the group. Blocked (many rows): 64 tokens are repacked and meet
// register tiles of rows, as in a matrix product.
//
// Everything here has internal linkage; see kernel_table.h.
#ifndef KVM_ATTENTION_EXACT_EXACT_KERNEL_H_
#define KVM_ATTENTION_EXACT_EXACT_KERNEL_H_

#include <stddef.h>
#include <stdint.h>

#include "attention/exact/elementary.h"
#include "attention/exact/exact_args.h"
#include "attention/exact/reader.h"
#if defined(__AVX2__)
#include "attention/exact/exact_codes.h"
#endif

namespace kvm {
namespace attention {
namespace {

// --- Streaming path: scores ---------------------------------------------------------------------

template <int kRows, bool kFirst, int kElem>
void scores_f32(const StreamArgs& args, const KvItem& item, uint32_t row,
                const uint8_t* const* reading, F* out) {
  using T = Tile<kRows>;
  constexpr size_t kElemBytes = vec::elem_bytes(kElem);
  const float* q = query_f32(args.q, item.variant, row);
  const size_t q_stride = args.q.stride;
  const size_t row_bytes = args.dim_k * kElemBytes;
  const uint32_t whole = args.dim_k / kW * kW;
  Reader<kFirst> reader(args, reading, row_bytes);
  for (int g = 0; g < T::kGroups; ++g) {
    const uint8_t* k = reader.rows() + static_cast<size_t>(g * T::kTokens) * row_bytes;
    F acc[kW];
#pragma GCC unroll 16
    for (int i = 0; i < kW; ++i)
      acc[i] = vec::zero();
    reader.turn();
    for (uint32_t c = 0; c < whole; c += kW) {
#pragma GCC unroll 16
      for (int t = 0; t < T::kTokens; ++t) {
        const uint8_t* p = k + static_cast<size_t>(t) * row_bytes;
        const F x = vec::load_as<kElem>(p, c);
        reader.template step<static_cast<int>(kW * kElemBytes)>();
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          F& a = acc[r * T::kTokens + t];
          a = vec::fma(x, vec::load(q + static_cast<size_t>(r) * q_stride + c), a);
        }
      }
    }
    if (whole < args.dim_k) {
      for (int t = 0; t < T::kTokens; ++t) {
        const uint8_t* p = k + static_cast<size_t>(t) * row_bytes;
        const F x = vec::load_as_n<kElem>(p, whole, args.dim_k - whole);
        for (int r = 0; r < kRows; ++r) {
          F& a = acc[r * T::kTokens + t];
          a = vec::fma(x, vec::load(q + static_cast<size_t>(r) * q_stride + whole), a);
        }
      }
    }
    out[g] = vec::reduce(acc);
  }
}

#if defined(__AVX512BF16__)
// kDim: dim_k, or 0 where it is only known at run time.
template <int kRows, bool kFirst, int kDim>
void scores_bf16(const StreamArgs& args, const KvItem& item, uint32_t row,
                 const uint8_t* const* reading, F* out) {
  using T = Tile<kRows>;
  const uint32_t dim = kDim != 0 ? static_cast<uint32_t>(kDim) : args.dim_k;
  const uint32_t whole = dim / 32 * 32;
  const uint16_t* q = query_bf16(args.q, item.variant, row);
  const size_t q_stride = args.q.stride;
  Reader<kFirst> reader(args, reading, dim * sizeof(uint16_t));
  const uint16_t* k = reinterpret_cast<const uint16_t*>(reader.rows());
  for (int g = 0; g < T::kGroups; ++g, k += static_cast<size_t>(T::kTokens) * dim) {
    F acc[kW];
#pragma GCC unroll 16
    for (int i = 0; i < kW; ++i)
      acc[i] = vec::zero();
    if constexpr (kDim != 0) {
#pragma GCC unroll 16
      for (int t = 0; t < T::kTokens; ++t) {
        if (t % 4 == 0)
          reader.turn();
#pragma GCC unroll 4
        for (uint32_t c = 0; c < whole; c += 32) {
          const vec::B x = vec::load_pairs(k + static_cast<size_t>(t) * dim + c);
          reader.template step<64>();
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            F& a = acc[r * T::kTokens + t];
            a = vec::dot(a, x, vec::load_pairs(q + static_cast<size_t>(r) * q_stride + c));
          }
        }
      }
    } else {
      reader.turn();
#pragma GCC unroll 4
      for (uint32_t c = 0; c < whole; c += 32) {
#pragma GCC unroll 16
        for (int t = 0; t < T::kTokens; ++t) {
          const uint16_t* p = k + static_cast<size_t>(t) * dim + c;
          const vec::B x = vec::load_pairs(p);
          reader.template step<64>();
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            F& a = acc[r * T::kTokens + t];
            a = vec::dot(a, x, vec::load_pairs(q + static_cast<size_t>(r) * q_stride + c));
          }
        }
      }
    }
    if (kDim == 0 && whole < dim) {
      for (int t = 0; t < T::kTokens; ++t) {
        const vec::B x = vec::load_pairs_n(k + static_cast<size_t>(t) * dim + whole, dim - whole);
        for (int r = 0; r < kRows; ++r) {
          F& a = acc[r * T::kTokens + t];
          a = vec::dot(a, x, vec::load_pairs(q + static_cast<size_t>(r) * q_stride + whole));
        }
      }
    }
    out[g] = vec::reduce(acc);
  }
}
#endif

// Rows of bytes meet queries and weights of 16 bits: int8 as words, whose sums are exact, and fp8
// as bf16.
template <int kElem>
struct ByteRows;

#if defined(__AVX512VNNI__)
template <>
struct ByteRows<vec::kElemI8> {
  typedef vec::I Sum;
  static Sum zero() { return vec::zero_i(); }
  static vec::I operand(const uint16_t* p) {
    return vec::load_words(reinterpret_cast<const int16_t*>(p));
  }
  static vec::I pair(const uint16_t* p) {
    return vec::set1_words(reinterpret_cast<const int16_t*>(p));
  }
  static vec::I load(const uint8_t* p) { return vec::load_i8_words(p); }
  static vec::I load_n(const uint8_t* p, unsigned n) { return vec::load_i8_words_n(p, n); }
  static void load_pairs(const uint8_t* x, const uint8_t* y, unsigned n, vec::I* lo, vec::I* hi) {
    vec::load_byte_pairs(x, y, n, lo, hi);
  }
  static Sum dot(Sum c, vec::I a, vec::I b) { return vec::dot_words(c, a, b); }
  static F reduce(const Sum* a) { return vec::to_floats(vec::reduce_i(a)); }
  static F to_floats(Sum a) { return vec::to_floats(a); }
};

inline const int16_t* query_i16(const QueryRows& q, uint32_t variant, uint32_t row) {
  return q.i16 + variant * q.variant_stride + static_cast<uint64_t>(row) * q.stride;
}
inline const uint8_t* query_i16_near(const QueryRows& q, uint32_t variant, uint32_t row) {
  return q.i16_near + static_cast<uint64_t>(variant) * q.variant_rows + row;
}
inline const float* query_i16_step(const QueryRows& q, uint32_t variant, uint32_t row) {
  return q.i16_step + static_cast<uint64_t>(variant) * q.variant_rows + row;
}
#endif

#if defined(__AVX512BF16__)
template <>
struct ByteRows<vec::kElemF8> {
  typedef F Sum;
  static Sum zero() { return vec::zero(); }
  static vec::B operand(const uint16_t* p) { return vec::load_pairs(p); }
  static vec::B pair(const uint16_t* p) { return vec::set1_pair(p); }
  static vec::B load(const uint8_t* p) { return vec::load_as_pairs<vec::kElemF8>(p, 0); }
  static vec::B load_n(const uint8_t* p, unsigned n) {
    return vec::f8_to_pairs(vec::load_i8_words_n(p, n));
  }
  static void load_pairs(const uint8_t* x, const uint8_t* y, unsigned n, vec::B* lo, vec::B* hi) {
    vec::I a, b;
    vec::load_byte_pairs(x, y, n, &a, &b);
    *lo = vec::f8_to_pairs(a);
    *hi = vec::f8_to_pairs(b);
  }
  static Sum dot(Sum c, vec::B a, vec::B b) { return vec::dot(c, a, b); }
  static F reduce(const Sum* a) { return vec::reduce(a); }
  static F to_floats(Sum a) { return a; }
};

// q: of the first row of the tile. kDim as above.
template <int kRows, bool kFirst, int kDim, int kElem>
void scores_bytes(const StreamArgs& args, const uint16_t* q, const uint8_t* const* reading,
                  F* out) {
  using T = Tile<kRows>;
  using Rows = ByteRows<kElem>;
  const uint32_t dim = kDim != 0 ? static_cast<uint32_t>(kDim) : args.dim_k;
  const size_t q_stride = args.q.stride;
  Reader<kFirst> reader(args, reading, dim);
  const uint8_t* k = reader.rows();
  for (int g = 0; g < T::kGroups; ++g) {
    typename Rows::Sum acc[kW];
#pragma GCC unroll 16
    for (int i = 0; i < kW; ++i)
      acc[i] = Rows::zero();
#pragma GCC unroll 4
    for (int first = 0; first < T::kTokens; first += 4, k += 4 * static_cast<size_t>(dim)) {
      reader.turn();
#pragma GCC unroll 4
      for (uint32_t c = 0; c < dim; c += 32) {
        decltype(Rows::operand(q)) y[kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          y[r] = Rows::operand(q + static_cast<size_t>(r) * q_stride + c);
#pragma GCC unroll 4
        for (int t = 0; t < 4; ++t) {
          const uint8_t* p = k + static_cast<size_t>(t) * dim + c;
          const auto x = kDim != 0 || c + 32 <= dim ? Rows::load(p) : Rows::load_n(p, dim - c);
          // Two vectors to a line; the parts of rows at the end are not worth asking for.
          if (t % 2 == 0 && (kDim != 0 || c + 32 <= dim))
            reader.template step<64>();
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            typename Rows::Sum& a = acc[r * T::kTokens + first + t];
            a = Rows::dot(a, x, y[r]);
          }
        }
      }
    }
    out[g] = Rows::reduce(acc);
  }
}

template <int kRows, bool kFirst, int kElem>
inline void scores_bytes_of_dim(const StreamArgs& args, const uint16_t* q,
                                const uint8_t* const* reading, F* out) {
  if (args.dim_k == 128) {
    scores_bytes<kRows, kFirst, 128, kElem>(args, q, reading, out);
  } else if (args.dim_k == 64) {
    scores_bytes<kRows, kFirst, 64, kElem>(args, q, reading, out);
  } else {
    scores_bytes<kRows, kFirst, 0, kElem>(args, q, reading, out);
  }
}
#endif

// Sixteen scales of an item as floats: what its rows, of the element, are multiplied by.
inline void load_scales(const StreamArgs& args, const uint16_t* scales, int elem, float* out) {
  const F unit = vec::set1(vec::elem_unit(elem));
  for (uint32_t i = 0; i < kItemTokens; i += kW)
    vec::store(out + i,
               vec::mul(vec::load_as<vec::kElemBf16>(scales + args.scale_offset, i), unit));
}

#if defined(__AVX512BF16__)
// How many rows of the tile are near enough as words. A tile that is part near, part not, takes
// both ways, so that each row has the bits that it has beside any others.
template <int kRows>
inline int rows_near(const StreamArgs& args, const KvItem& item, uint32_t row) {
  const uint8_t* near = query_i16_near(args.q, item.variant, row);
  int n = 0;
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
    n += near[r];
  return n;
}

template <int kRows, bool kFirst>
inline void scores_words(const StreamArgs& args, const KvItem& item, uint32_t row,
                         const uint8_t* const* reading, F* out) {
  const auto* q = reinterpret_cast<const uint16_t*>(query_i16(args.q, item.variant, row));
  scores_bytes_of_dim<kRows, kFirst, vec::kElemI8>(args, q, reading, out);
  const F step = vec::spread<Tile<kRows>::kTokens>(query_i16_step(args.q, item.variant, row));
#pragma GCC unroll 16
  for (int g = 0; g < Tile<kRows>::kGroups; ++g)
    out[g] = vec::mul(out[g], step);
}

// Puts what words give into the lanes of the rows that are near.
template <int kRows>
[[gnu::noinline]] void replace_near(const StreamArgs& args, const KvItem& item, uint32_t row,
                                    const uint8_t* const* reading, F* out) {
  using T = Tile<kRows>;
  const uint8_t* near = query_i16_near(args.q, item.variant, row);
  F words[T::kGroups];
  scores_words<kRows, false>(args, item, row, reading, words);
  for (int g = 0; g < T::kGroups; ++g) {
    float lanes[kW], other[kW];
    vec::store(lanes, out[g]);
    vec::store(other, words[g]);
    for (int i = 0; i < kW; ++i)
      lanes[i] = near[i / T::kTokens] != 0 ? other[i] : lanes[i];
    out[g] = vec::load(lanes);
  }
}
#endif

// Dot products with rows of K, int8 or fp8, without their scales.
template <int kRows, bool kFirst, int kElem>
inline void unscaled_scores(const StreamArgs& args, const KvItem& item, uint32_t row,
                            const uint8_t* const* reading, F* out) {
#if defined(__AVX512BF16__)
  if constexpr (kElem == vec::kElemI8) {
    const int n_near = rows_near<kRows>(args, item, row);
    if (n_near == kRows)
      return scores_words<kRows, kFirst>(args, item, row, reading, out);
    scores_f32<kRows, kFirst, kElem>(args, item, row, reading, out);
    if (n_near != 0)
      replace_near<kRows>(args, item, row, reading, out);
    return;
  } else if (args.q.bf16_exact[item.variant] != 0) {
    const uint16_t* q = query_bf16(args.q, item.variant, row);
    return scores_bytes_of_dim<kRows, kFirst, kElem>(args, q, reading, out);
  }
#endif
  scores_f32<kRows, kFirst, kElem>(args, item, row, reading, out);
}

// The same, times the scales of the tokens.
template <int kRows, bool kFirst, int kElem>
[[gnu::noinline]] void scaled_scores(const StreamArgs& args, const KvItem& item, uint32_t row,
                                     const uint8_t* const* reading, F* out) {
  using T = Tile<kRows>;
  unscaled_scores<kRows, kFirst, kElem>(args, item, row, reading, out);
  float scales[kItemTokens];
  load_scales(args, item.k_scale, kElem, scales);
  for (int g = 0; g < T::kGroups; ++g)
    out[g] = vec::mul(out[g], vec::load_repeated<T::kTokens>(scales + g * T::kTokens));
}

template <int kRows, bool kFirst>
void scores(const StreamArgs& args, const KvItem& item, uint32_t row, const uint8_t* const* reading,
            F* out) {
#if defined(__AVX2__)
  if (elem_is_codes(item.elem_k))
    return scores_of_codes<kRows, kFirst>(args, item, row, reading, out);
#endif
#if defined(__AVX512BF16__)
  if (item.elem_k == vec::kElemBf16 && args.q.bf16_exact[item.variant] != 0) {
    if (args.dim_k == 128)
      return scores_bf16<kRows, kFirst, 128>(args, item, row, reading, out);
    if (args.dim_k == 64)
      return scores_bf16<kRows, kFirst, 64>(args, item, row, reading, out);
    return scores_bf16<kRows, kFirst, 0>(args, item, row, reading, out);
  }
#endif
  switch (item.elem_k) {
    case vec::kElemI8:
      return scaled_scores<kRows, kFirst, vec::kElemI8>(args, item, row, reading, out);
    case vec::kElemF8:
      return scaled_scores<kRows, kFirst, vec::kElemF8>(args, item, row, reading, out);
    case vec::kElemF32:
      return scores_f32<kRows, kFirst, vec::kElemF32>(args, item, row, reading, out);
    case vec::kElemF16:
      return scores_f32<kRows, kFirst, vec::kElemF16>(args, item, row, reading, out);
    default:
      return scores_f32<kRows, kFirst, vec::kElemBf16>(args, item, row, reading, out);
  }
}

// Log weights and masks of a tile, in its lane layout.
template <int kRows>
void fill_addend(const StreamArgs& args, const KvItem& item, uint32_t row, float* addend) {
  using T = Tile<kRows>;
  const float* log_weight = item.log_weight;
  for (int r = 0; r < kRows; ++r) {
    uint32_t mask = item.mask;
    if (item.row_masks != nullptr) {
      const uint32_t real = row + static_cast<uint32_t>(r);
      const uint32_t last = args.q.rows - 1;
      mask &= item.row_masks[(real < last ? real : last) / args.q.group];
    }
    for (int t = 0; t < static_cast<int>(kItemTokens); ++t) {
      const float weight = log_weight != nullptr ? log_weight[t] : 0.0f;
      addend[T::lane(r, t)] = (mask >> t & 1) != 0 ? weight : kNegInf;
    }
  }
}

// The query's side of PositionBias for a row: its slope, and how far `position` lies behind it.
struct RowBias {
  float slope;
  float distance;
};
inline RowBias bias_of_row(const PositionBias& bias, const QueryRows& q, uint32_t row,
                           uint64_t position) {
  const uint32_t real = row < q.rows ? row : q.rows - 1;
  const uint64_t behind = position - (bias.query_position + real / q.group);
  return {bias.slopes[real % q.group], static_cast<float>(static_cast<int64_t>(behind))};
}

// Adds PositionBias to the logits of a tile.
template <int kRows>
[[gnu::noinline]] void add_position_bias(const StreamArgs& args, const KvItem& item, uint32_t row,
                                         F* out) {
  using T = Tile<kRows>;
  float slopes[kW];
  float distances[T::kLanes];
  for (int r = 0; r < kRows; ++r) {
    const RowBias bias =
        bias_of_row(args.bias, args.q, row + static_cast<uint32_t>(r), item.position);
    for (int t = 0; t < T::kTokens; ++t)
      slopes[r * T::kTokens + t] = bias.slope;
    for (int t = 0; t < static_cast<int>(kItemTokens); ++t)
      distances[T::lane(r, t)] = bias.distance + static_cast<float>(t);
  }
  for (int g = 0; g < T::kGroups; ++g)
    out[g] = vec::fma(vec::load(slopes), vec::load(distances + g * kW), out[g]);
}

// The logits of one tile: out[kGroups]. bad: see note_bad.
template <int kRows, bool kFirst>
inline void tile_logits(const StreamArgs& args, const KvItem& item, uint32_t row,
                        const uint8_t* const* reading, F* out, F* bad) {
  using T = Tile<kRows>;
  scores<kRows, kFirst>(args, item, row, reading, out);
#pragma GCC unroll 16
  for (int g = 0; g < T::kGroups; ++g)
    *bad = note_bad(*bad, out[g]);
  for (int g = 0; g < T::kGroups; ++g)
    out[g] = to_logit(out[g], args.scale, args.softcap);
  if (args.bias.slopes != nullptr)
    add_position_bias<kRows>(args, item, row, out);
  if (item.log_weight != nullptr || item.row_masks != nullptr || item.mask != 0xffff) {
    float addend[T::kLanes];
    fill_addend<kRows>(args, item, row, addend);
    for (int g = 0; g < T::kGroups; ++g) {
      out[g] = vec::add(out[g], vec::load(addend + g * kW));
    }
  }
}

// --- Streaming path: softmax --------------------------------------------------------------------

// Says whether weights meet V's rows of bf16 or fp8 as bf16.
inline bool item_uses_bf16_pv(const StreamArgs& args, const KvItem& item) {
  return vec::kHasBf16Dot && (item.elem_v == vec::kElemBf16 || item.elem_v == vec::kElemF8) &&
         args.fp32_weights == 0;
}

// Says whether weights meet V's int8 rows as integers of 16 bits.
inline bool item_uses_i16_pv(const StreamArgs& args, const KvItem& item) {
  return vec::kHasWordDot && item.elem_v == vec::kElemI8 && args.fp32_weights == 0;
}

// Brings acc of a tile to a new reference: row r is multiplied by lane r * kTokens of factor.
template <int kRows>
void rescale(const StreamArgs& args, uint32_t row, F factor) {
  float lanes[kW];
  vec::store(lanes, factor);
  for (int r = 0; r < kRows; ++r) {
    const F f = vec::set1(lanes[r * Tile<kRows>::kTokens]);
    float* acc = args.acc + (row + static_cast<uint32_t>(r)) * static_cast<size_t>(args.acc_stride);
    for (uint32_t d = 0; d < args.acc_stride; d += kW) {
      vec::store(acc + d, vec::mul(vec::load(acc + d), f));
    }
  }
}

// The weights of the at-th pair of item and tile.
inline float* weights_of(const StreamArgs& args, uint32_t at) {
  return args.weights + at * (kRowTile * kItemTokens);
}
// Behind weights of 16 bits: the value of 1, in the lanes of their rows.
inline float* steps_of(float* weights) { return weights + kRowTile * kItemTokens / 2; }
inline const float* steps_of(const float* weights) { return weights + kRowTile * kItemTokens / 2; }

// Weights of a tile relative to `reference`, for int8 and fp8 rows of V: stored times the scales of
// those, as floats or bf16, or as words and a step for each row (steps_of). The denominator sums
// the weights themselves: l gets them. Stands apart so that other elements do not share its
// registers.
template <int kRows>
[[gnu::noinline]] void scaled_weights(const StreamArgs& args, const KvItem& item, F reference, F* p,
                                      float* l, float* weights) {
  using T = Tile<kRows>;
  float scales[kItemTokens];
  load_scales(args, item.v_scale, item.elem_v, scales);
#pragma GCC unroll 16
  for (int g = 0; g < T::kGroups; ++g) {
    p[g] = exp_nonpositive(vec::sub(p[g], reference));
    vec::store(l + g * kW, vec::add(vec::load(l + g * kW), p[g]));
  }
  F w[T::kGroups];
#pragma GCC unroll 16
  for (int g = 0; g < T::kGroups; ++g)
    w[g] = vec::mul(p[g], vec::load_repeated<T::kTokens>(scales + g * T::kTokens));
#if defined(__AVX512VNNI__)
  if (item_uses_i16_pv(args, item)) {
    // Integers order weights, which are not negative, as floats do, with NaN on top.
    vec::I top = vec::as_ints(w[0]);
#pragma GCC unroll 16
    for (int g = 1; g < T::kGroups; ++g)
      top = vec::max_i(top, vec::as_ints(w[g]));
    F inverse;
    vec::store(steps_of(weights), vec::word_step(vec::group_max_i<T::kTokens>(top), &inverse));
#pragma GCC unroll 16
    for (int g = 0; g < T::kGroups; ++g)
      vec::store_words(reinterpret_cast<int16_t*>(weights) + g * kW, vec::mul(w[g], inverse));
    return;
  }
#endif
#if defined(__AVX512BF16__)
  if (item_uses_bf16_pv(args, item)) {
#pragma GCC unroll 16
    for (int g = 0; g < T::kGroups; ++g)
      vec::store_rounded(reinterpret_cast<uint16_t*>(weights) + g * kW, w[g]);
    return;
  }
#endif
#pragma GCC unroll 16
  for (int g = 0; g < T::kGroups; ++g)
    vec::store(weights + g * kW, w[g]);
}

// Logits of a tile to weights relative to its running maximum, stored as floats, or as bf16 where
// PV uses the bf16 dot; there the denominator sums the rounded weights, so that rounding does not
// bias the mean. Where the maximum has grown, returns true: acc of the tile, with all earlier items
// in it, has to be rescaled by *factor before the values of this item.
template <int kRows>
inline bool tile_weights(const StreamArgs& args, const KvItem& item, uint32_t row, float* weights,
                         F* s, float* factor) {
  using T = Tile<kRows>;
  const uint32_t tile = row / kRows;
  float* m_at = args.m + tile * 16;
  float* l_at = args.l + static_cast<size_t>(tile) * T::kLanes;
  F top = s[0];
#pragma GCC unroll 16
  for (int g = 1; g < T::kGroups; ++g)
    top = vec::max(top, s[g]);
  top = vec::group_max<T::kTokens>(top);
  F m = vec::load(m_at);
  const bool grown = vec::any_gt(top, m);
  if (grown) {
    top = vec::max(top, m);
    const F down = exp_nonpositive(vec::sub(m, finite_reference(top)));
    vec::store(factor, down);
#pragma GCC unroll 16
    for (int g = 0; g < T::kGroups; ++g)
      vec::store(l_at + g * kW, vec::mul(vec::load(l_at + g * kW), down));
    m = top;
    vec::store(m_at, m);
  }
  const F reference = finite_reference(m);
  if (item.v_scale != nullptr) {
    scaled_weights<kRows>(args, item, reference, s, l_at, weights);
    return grown;
  }
  const bool round = item_uses_bf16_pv(args, item);
#pragma GCC unroll 16
  for (int g = 0; g < T::kGroups; ++g) {
    F p = exp_nonpositive(vec::sub(s[g], reference));
#if defined(__AVX512BF16__)
    if (round) {
      p = vec::store_rounded(reinterpret_cast<uint16_t*>(weights) + g * kW, p);
    } else {
      vec::store(weights + g * kW, p);
    }
#else
    (void)round;
    vec::store(weights + g * kW, p);
#endif
    vec::store(l_at + g * kW, vec::add(vec::load(l_at + g * kW), p));
  }
  return grown;
}

// --- Streaming path: values ---------------------------------------------------------------------

// kVecs vectors of every row of V, starting at channel d, into the accumulators of a tile. kPart:
// the vector ends beyond dim_v.
template <int kRows, bool kFirst, int kElem, int kVecs, bool kPart>
inline void values_f32_slice(const StreamArgs& args, uint32_t row, const float* weights, uint32_t d,
                             Reader<kFirst>& reader) {
  using T = Tile<kRows>;
  constexpr size_t kElemBytes = vec::elem_bytes(kElem);
  float* acc = args.acc + row * static_cast<size_t>(args.acc_stride) + d;
  const size_t row_bytes = args.v_stride * kElemBytes;
  F a[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      a[r][i] = vec::load(acc + static_cast<size_t>(r) * args.acc_stride + i * kW);
    }
  }
  for (int t = 0; t < static_cast<int>(kItemTokens); ++t) {
    if (t % 4 == 0)
      reader.turn();
    const uint8_t* p = reader.rows() + static_cast<size_t>(t) * row_bytes;
    F x[kVecs];
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      const uint32_t e = d + static_cast<uint32_t>(i * kW);
      x[i] = kPart ? vec::load_as_n<kElem>(p, e, args.dim_v - e) : vec::load_as<kElem>(p, e);
      reader.template step<static_cast<int>(kW * kElemBytes)>();
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const F w = vec::set1(weights[T::lane(r, t)]);
#pragma GCC unroll 4
      for (int i = 0; i < kVecs; ++i)
        a[r][i] = vec::fma(w, x[i], a[r][i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      vec::store(acc + static_cast<size_t>(r) * args.acc_stride + i * kW, a[r][i]);
    }
  }
}

template <int kRows, bool kFirst, int kElem>
void values_f32(const StreamArgs& args, uint32_t row, const float* weights,
                const uint8_t* const* reading) {
  constexpr uint32_t kSlice = 2 * kW;
  Reader<kFirst> reader(args, reading, args.dim_v * vec::elem_bytes(kElem));
  uint32_t d = 0;
  for (; d + kSlice <= args.dim_v; d += kSlice) {
    values_f32_slice<kRows, kFirst, kElem, 2, false>(args, row, weights, d, reader);
  }
  for (; d + kW <= args.dim_v; d += kW) {
    values_f32_slice<kRows, kFirst, kElem, 1, false>(args, row, weights, d, reader);
  }
  if (d < args.dim_v) {
    values_f32_slice<kRows, kFirst, kElem, 1, true>(args, row, weights, d, reader);
  }
}

#if defined(__AVX512BF16__)
// kVecs times 32 channels from channel d on, token pair by token pair. kDim, here and below: both
// dim_v and v_stride, or 0 where they are only known at run time.
template <int kRows, bool kFirst, int kDim, int kVecs, bool kPart>
inline void values_bf16_slice(const StreamArgs& args, uint32_t row, const uint16_t* weights,
                              uint32_t d, Reader<kFirst>& reader) {
  using T = Tile<kRows>;
  const size_t stride = kDim != 0 ? static_cast<size_t>(kDim) : args.v_stride;
  float* acc = args.acc + row * static_cast<size_t>(args.acc_stride) + d;
  F a[kRows][2 * kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kVecs; ++i) {
      a[r][i] = vec::load(acc + static_cast<size_t>(r) * args.acc_stride + i * kW);
    }
  }
  const uint16_t* v = reinterpret_cast<const uint16_t*>(reader.rows()) + d;
#pragma GCC unroll 8
  for (int t = 0; t < static_cast<int>(kItemTokens); t += 2, v += 2 * stride) {
    if (t % 4 == 0)
      reader.turn();
    vec::B w[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
      w[r] = vec::set1_pair(weights + T::lane(r, t));
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      const uint16_t* even = v + i * 32;
      const uint16_t* odd = even + stride;
      const uint32_t left = args.dim_v - d;
      const vec::B x = kPart ? vec::load_pairs_n(even, left) : vec::load_pairs(even);
      reader.template step<64>();
      const vec::B y = kPart ? vec::load_pairs_n(odd, left) : vec::load_pairs(odd);
      reader.template step<64>();
      const vec::B lo = vec::interleave_lo(x, y);
      const vec::B hi = vec::interleave_hi(x, y);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        a[r][2 * i] = vec::dot(a[r][2 * i], lo, w[r]);
        a[r][2 * i + 1] = vec::dot(a[r][2 * i + 1], hi, w[r]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kVecs; ++i) {
      vec::store(acc + static_cast<size_t>(r) * args.acc_stride + i * kW, a[r][i]);
    }
  }
}

template <int kRows, bool kFirst, int kDim>
void values_bf16(const StreamArgs& args, uint32_t row, const float* buffer,
                 const uint8_t* const* reading) {
  const uint16_t* weights = reinterpret_cast<const uint16_t*>(buffer);
  Reader<kFirst> reader(args, reading, args.dim_v * sizeof(uint16_t));
  const uint32_t dim = kDim != 0 ? static_cast<uint32_t>(kDim) : args.dim_v;
  uint32_t d = 0;
  if constexpr (kRows == 1) {
    for (; d + 128 <= dim; d += 128) {
      values_bf16_slice<kRows, kFirst, kDim, 4, false>(args, row, weights, d, reader);
    }
  }
  for (; d + 64 <= dim; d += 64) {
    values_bf16_slice<kRows, kFirst, kDim, 2, false>(args, row, weights, d, reader);
  }
  if (kDim != 0)
    return;
  for (; d + 32 <= dim; d += 32) {
    values_bf16_slice<kRows, kFirst, kDim, 1, false>(args, row, weights, d, reader);
  }
  if (d < dim) {
    values_bf16_slice<kRows, kFirst, kDim, 1, true>(args, row, weights, d, reader);
  }
}
#endif

#if defined(__AVX512BF16__)
// kVecs times 32 channels of rows of bytes from channel d on, token pair by token pair. Sums of
// an item of int8 are exact.
template <int kRows, bool kFirst, int kDim, int kElem, int kVecs, bool kPart>
inline void values_bytes_slice(const StreamArgs& args, uint32_t row, const float* buffer,
                               uint32_t d, Reader<kFirst>& reader) {
  using T = Tile<kRows>;
  using Rows = ByteRows<kElem>;
  const size_t stride = kDim != 0 ? static_cast<size_t>(kDim) : args.v_stride;
  const uint16_t* weights = reinterpret_cast<const uint16_t*>(buffer);
  typename Rows::Sum sum[kRows][2 * kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kVecs; ++i)
      sum[r][i] = Rows::zero();
  }
  const uint8_t* v = reader.rows() + d;
#pragma GCC unroll 8
  for (int t = 0; t < static_cast<int>(kItemTokens); t += 2, v += 2 * stride) {
    if (t % 4 == 0)
      reader.turn();
    decltype(Rows::pair(weights)) w[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
      w[r] = Rows::pair(weights + T::lane(r, t));
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      const uint32_t n = kPart ? args.dim_v - d : 32;
      decltype(Rows::pair(weights)) lo, hi;
      Rows::load_pairs(v + i * 32, v + stride + i * 32, n, &lo, &hi);
      if (!kPart)
        reader.template step<64>();  // two vectors of half a line
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sum[r][2 * i] = Rows::dot(sum[r][2 * i], lo, w[r]);
        sum[r][2 * i + 1] = Rows::dot(sum[r][2 * i + 1], hi, w[r]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const F step = vec::set1(kElem == vec::kElemI8 ? steps_of(buffer)[r * T::kTokens] : 1.0f);
    float* acc = args.acc + (row + static_cast<uint32_t>(r)) * static_cast<size_t>(args.acc_stride);
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      F lo, hi;
      vec::split_pair_sums(Rows::to_floats(sum[r][2 * i]), Rows::to_floats(sum[r][2 * i + 1]), &lo,
                           &hi);
      float* at = acc + d + i * 32;
      vec::store(at, vec::fma(lo, step, vec::load(at)));
      vec::store(at + kW, vec::fma(hi, step, vec::load(at + kW)));
    }
  }
}

template <int kRows, bool kFirst, int kDim, int kElem>
void values_bytes(const StreamArgs& args, uint32_t row, const float* weights,
                  const uint8_t* const* reading) {
  Reader<kFirst> reader(args, reading, args.dim_v);
  const uint32_t dim = kDim != 0 ? static_cast<uint32_t>(kDim) : args.dim_v;
  uint32_t d = 0;
  if constexpr (kRows == 1) {
    for (; d + 128 <= dim; d += 128) {
      values_bytes_slice<kRows, kFirst, kDim, kElem, 4, false>(args, row, weights, d, reader);
    }
  }
  for (; d + 64 <= dim; d += 64) {
    values_bytes_slice<kRows, kFirst, kDim, kElem, 2, false>(args, row, weights, d, reader);
  }
  if (kDim != 0)
    return;
  for (; d < dim; d += 32) {
    values_bytes_slice<kRows, kFirst, kDim, kElem, 1, true>(args, row, weights, d, reader);
  }
}

// Says whether the rows of V have `dim` channels and nothing between them.
inline bool v_is_packed(const StreamArgs& args, uint32_t dim) {
  return args.dim_v == dim && args.v_stride == dim;
}

template <int kRows, bool kFirst, int kElem>
inline void values_bytes_of_dim(const StreamArgs& args, uint32_t row, const float* weights,
                                const uint8_t* const* reading) {
  if (v_is_packed(args, 128))
    return values_bytes<kRows, kFirst, 128, kElem>(args, row, weights, reading);
  if (v_is_packed(args, 64))
    return values_bytes<kRows, kFirst, 64, kElem>(args, row, weights, reading);
  return values_bytes<kRows, kFirst, 0, kElem>(args, row, weights, reading);
}
#endif

template <int kRows, bool kFirst>
void tile_values(const StreamArgs& args, const KvItem& item, uint32_t row, const float* weights,
                 const uint8_t* const* reading) {
#if defined(__AVX2__)
  if (elem_is_codes(item.elem_v))
    return values_of_codes<kRows, kFirst>(args, item, row, weights, reading);
#endif
#if defined(__AVX512BF16__)
  if (item_uses_bf16_pv(args, item)) {
    if (item.elem_v == vec::kElemF8)
      return values_bytes_of_dim<kRows, kFirst, vec::kElemF8>(args, row, weights, reading);
    if (v_is_packed(args, 128))
      return values_bf16<kRows, kFirst, 128>(args, row, weights, reading);
    if (v_is_packed(args, 64))
      return values_bf16<kRows, kFirst, 64>(args, row, weights, reading);
    return values_bf16<kRows, kFirst, 0>(args, row, weights, reading);
  }
  if (item_uses_i16_pv(args, item))
    return values_bytes_of_dim<kRows, kFirst, vec::kElemI8>(args, row, weights, reading);
#endif
  switch (item.elem_v) {
    case vec::kElemI8:
      return values_f32<kRows, kFirst, vec::kElemI8>(args, row, weights, reading);
    case vec::kElemF8:
      return values_f32<kRows, kFirst, vec::kElemF8>(args, row, weights, reading);
    case vec::kElemF32:
      return values_f32<kRows, kFirst, vec::kElemF32>(args, row, weights, reading);
    case vec::kElemF16:
      return values_f32<kRows, kFirst, vec::kElemF16>(args, row, weights, reading);
    default:
      return values_f32<kRows, kFirst, vec::kElemBf16>(args, row, weights, reading);
  }
}

// --- Streaming path: entry points ---------------------------------------------------------------

void stream_begin(const StreamArgs* args) {
  const uint32_t rows = (args->q.rows + kRowTile - 1) / kRowTile * kRowTile;
  const size_t n = static_cast<size_t>(rows) * args->acc_stride;
  for (size_t i = 0; i < n; i += kW)
    vec::store(args->acc + i, vec::zero());
  const uint32_t tiles = args->q.rows == 1 ? 1 : rows / kRowTile;
  for (uint32_t i = 0; i < tiles * 16; i += kW)
    vec::store(args->m + i, vec::set1(kNegInf));
  for (uint32_t i = 0; i < rows * kItemTokens; i += kW)
    vec::store(args->l + i, vec::zero());
  clear_bad(args->bad);
}

// Makes the queries that rows of codes meet.
template <int kRows>
inline void prepare_codes(const StreamArgs& args, const KvItem& item) {
#if defined(__AVX2__)
  if (elem_is_codes(item.elem_k))
    fold_queries<kRows>(args, item);
#else
  (void)args;
  (void)item;
#endif
}

template <int kRows>
void keys_of_tiles(const StreamArgs& args, const KvItem* items, uint32_t n,
                   const uint8_t* const* reading) {
  const uint32_t tiles = (args.q.rows + kRows - 1) / kRows;
  // Logits of all items come first: each softmax is one long chain, and those of several items
  // overlap where nothing large stands between them.
  F s[kGroupItems * (kRows == 1 ? 1 : kMaxStreamRows / kRowTile)][Tile<kRows>::kGroups];
  F bad = vec::load(args.bad);
  for (uint32_t i = 0; i < n; ++i) {
    prepare_codes<kRows>(args, items[i]);
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      F* out = s[i * tiles + tile];
      if (tile == 0) {
        tile_logits<kRows, true>(args, items[i], 0, reading + i, out, &bad);
      } else {
        tile_logits<kRows, false>(args, items[i], tile * kRows, reading + i, out, &bad);
      }
    }
  }
  vec::store(args.bad, bad);
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      const uint32_t at = i * tiles + tile;
      args.grown[at] = tile_weights<kRows>(args, items[i], tile * kRows, weights_of(args, at),
                                           s[at], args.factors + at * 16);
    }
  }
}

template <int kRows>
void values_of_tiles(const StreamArgs& args, const KvItem* items, uint32_t n,
                     const uint8_t* const* reading) {
  const uint32_t tiles = (args.q.rows + kRows - 1) / kRows;
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      const uint32_t at = i * tiles + tile;
      if (args.grown[at] != 0)
        rescale<kRows>(args, tile * kRows, vec::load(args.factors + at * 16));
      if (tile == 0) {
        tile_values<kRows, true>(args, items[i], 0, weights_of(args, at), reading + i);
      } else {
        tile_values<kRows, false>(args, items[i], tile * kRows, weights_of(args, at), reading + i);
      }
    }
  }
}

void stream_keys(const StreamArgs* args, const KvItem* items, uint32_t n,
                 const uint8_t* const* reading) {
  if (args->q.rows == 1) {
    keys_of_tiles<1>(*args, items, n, reading);
  } else {
    keys_of_tiles<kRowTile>(*args, items, n, reading);
  }
}

void stream_values(const StreamArgs* args, const KvItem* items, uint32_t n,
                   const uint8_t* const* reading) {
  if (args->q.rows == 1) {
    values_of_tiles<1>(*args, items, n, reading);
  } else {
    values_of_tiles<kRowTile>(*args, items, n, reading);
  }
}

// The denominator of row r of a tile: its 16 sums, one for each position modulo 16, added in one
// order whatever the tile and the table.
template <int kRows>
inline float sum_of_row(const float* l, int r) {
  float sums[kItemTokens];
  for (int t = 0; t < static_cast<int>(kItemTokens); ++t)
    sums[t] = l[Tile<kRows>::lane(r, t)];
  for (uint32_t n = kItemTokens / 2; n > 0; n /= 2) {
    for (uint32_t t = 0; t < n; ++t)
      sums[t] += sums[t + n];
  }
  return sums[0];
}

template <int kRows>
bool stream_end_tiles(const StreamArgs& args, float* o, float* m, float* l) {
  F bad = vec::load(args.bad);
  for (uint32_t row = 0; row < args.q.rows; ++row) {
    const float* acc = args.acc + row * static_cast<size_t>(args.acc_stride);
    float* out = o + static_cast<size_t>(row) * args.dim_v;
    bad = note_bad_row(bad, acc, args.acc_stride);
    // Adding +0 turns -0 into +0; see exact.h.
    for (uint32_t d = 0; d < args.dim_v; ++d)
      out[d] = acc[d] + 0.0f;
    const uint32_t tile = row / kRows;
    const uint32_t in_tile = row % kRows;
    l[row] = sum_of_row<kRows>(args.l + static_cast<size_t>(tile) * Tile<kRows>::kLanes,
                               static_cast<int>(in_tile));
    m[row] = args.m[tile * 16 + in_tile * Tile<kRows>::kTokens] + 0.0f;
  }
  return is_bad(bad);
}

bool stream_end(const StreamArgs* args, float* o, float* m, float* l) {
  return args->q.rows == 1 ? stream_end_tiles<1>(*args, o, m, l)
                           : stream_end_tiles<kRowTile>(*args, o, m, l);
}

void stream_sums(const StreamArgs* args, const KvItem* item, const float* references, float* sums) {
  using T = Tile<kRowTile>;
  F total[T::kGroups];
  for (int g = 0; g < T::kGroups; ++g)
    total[g] = vec::zero();
  F bad = vec::zero();  // is known from the first pass
  prepare_codes<kRowTile>(*args, *item);
  for (uint32_t row = 0; row < args->q.rows; row += kRowTile) {
    F s[T::kGroups];
    tile_logits<kRowTile, false>(*args, *item, row, &item->k, s, &bad);
    float lanes[kW];
    for (int i = 0; i < kW; ++i)
      lanes[i] = references[row + static_cast<uint32_t>(i / T::kTokens)];
    const F reference = vec::load(lanes);
    for (int g = 0; g < T::kGroups; ++g)
      total[g] = vec::add(total[g], weight_of(s[g], reference));
  }
  float lanes[T::kLanes];
  for (int g = 0; g < T::kGroups; ++g)
    vec::store(lanes + g * kW, total[g]);
  for (int t = 0; t < static_cast<int>(kItemTokens); ++t) {
    float sum = 0.0f;
    for (int r = 0; r < static_cast<int>(kRowTile); ++r)
      sum += lanes[T::lane(r, t)];
    sums[t] = sum;
  }
}

// --- Blocked path -------------------------------------------------------------------------------

constexpr int kB = static_cast<int>(kBlockTokens);
constexpr int kMr = vec::kTileRows;
constexpr int kNv = vec::kTileVecs;

// kW channels from channel d on of one row; zero beyond `dim` and where the row is absent.
inline F load_channels(const uint8_t* row, uint8_t elem, uint32_t d, uint32_t dim) {
  if (row == nullptr || d >= dim)
    return vec::zero();
  const uint32_t left = dim - d;
  const bool whole = left >= static_cast<uint32_t>(kW);
  switch (elem) {
    case vec::kElemF32:
      return whole ? vec::load_as<vec::kElemF32>(row, d)
                   : vec::load_as_n<vec::kElemF32>(row, d, left);
    case vec::kElemF16:
      return whole ? vec::load_as<vec::kElemF16>(row, d)
                   : vec::load_as_n<vec::kElemF16>(row, d, left);
    case vec::kElemI8:
      return whole ? vec::load_as<vec::kElemI8>(row, d)
                   : vec::load_as_n<vec::kElemI8>(row, d, left);
    case vec::kElemF8:
      return whole ? vec::load_as<vec::kElemF8>(row, d)
                   : vec::load_as_n<vec::kElemF8>(row, d, left);
    default:
      return whole ? vec::load_as<vec::kElemBf16>(row, d)
                   : vec::load_as_n<vec::kElemBf16>(row, d, left);
  }
}

// K of the block as [channel][token] floats.
void pack_k_f32(const BlockArgs& args, float* out) {
  for (uint32_t t = 0; t < kBlockTokens; t += kW) {
    for (uint32_t d = 0; d < args.dim_k; d += kW) {
      F x[kW];
      for (uint32_t i = 0; i < kW; ++i) {
        x[i] = load_channels(args.k[t + i], args.elem_k[t + i], d, args.dim_k);
        if (args.k_scale != nullptr)
          x[i] = vec::mul(x[i], vec::set1(args.k_scale[t + i]));
      }
      vec::transpose(x);
      const uint32_t n = args.dim_k - d < kW ? args.dim_k - d : kW;
      for (uint32_t i = 0; i < n; ++i)
        vec::store(out + (d + i) * kBlockTokens + t, x[i]);
    }
  }
}

// V of the block as [token][acc_stride] floats, zero beyond dim_v and where absent.
void pack_v_f32(const BlockArgs& args, float* out) {
  for (uint32_t t = 0; t < kBlockTokens; ++t) {
    float* to = out + static_cast<size_t>(t) * args.acc_stride;
    for (uint32_t d = 0; d < args.acc_stride; d += kW) {
      F x = load_channels(args.v[t], args.elem_v[t], d, args.dim_v);
      if (args.v_scale != nullptr)
        x = vec::mul(x, vec::set1(args.v_scale[t]));
      vec::store(to + d, x);
    }
  }
}

// Dot products of kMr rows with all tokens of the block: s [kMr][64].
void block_scores_f32(const BlockArgs& args, uint32_t row, float* s) {
  const float* q = query_f32(args.q, args.variant, row);
  const float* packed = static_cast<const float*>(args.packed_k);
  for (int c = 0; c < kB; c += kNv * kW) {
    F acc[kMr][kNv];
#pragma GCC unroll 8
    for (int r = 0; r < kMr; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kNv; ++i)
        acc[r][i] = vec::zero();
    }
    for (uint32_t d = 0; d < args.dim_k; ++d) {
      F x[kNv];
#pragma GCC unroll 4
      for (int i = 0; i < kNv; ++i)
        x[i] = vec::load(packed + d * kBlockTokens + c + i * kW);
#pragma GCC unroll 8
      for (int r = 0; r < kMr; ++r) {
        const F w = vec::set1(q[static_cast<size_t>(r) * args.q.stride + d]);
#pragma GCC unroll 4
        for (int i = 0; i < kNv; ++i)
          acc[r][i] = vec::fma(x[i], w, acc[r][i]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kMr; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kNv; ++i)
        vec::store(s + r * kB + c + i * kW, acc[r][i]);
    }
  }
}

// acc of kMr rows += weights [kMr][64] times V, kVecs vectors of channels from d on.
template <int kVecs>
inline void block_values_f32_slice(const BlockArgs& args, const float* weights, float* acc,
                                   uint32_t d) {
  const float* packed = static_cast<const float*>(args.packed_v) + d;
  F a[kMr][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kMr; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      a[r][i] = vec::load(acc + static_cast<size_t>(r) * args.acc_stride + d + i * kW);
    }
  }
  for (int t = 0; t < kB; ++t) {
    F x[kVecs];
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      x[i] = vec::load(packed + static_cast<size_t>(t) * args.acc_stride + i * kW);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kMr; ++r) {
      const F w = vec::set1(weights[r * kB + t]);
#pragma GCC unroll 4
      for (int i = 0; i < kVecs; ++i)
        a[r][i] = vec::fma(x[i], w, a[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kMr; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      vec::store(acc + static_cast<size_t>(r) * args.acc_stride + d + i * kW, a[r][i]);
    }
  }
}

void block_values_f32(const BlockArgs& args, const float* weights, float* acc) {
  uint32_t d = 0;
  for (; d + kNv * kW <= args.acc_stride; d += kNv * kW) {
    block_values_f32_slice<kNv>(args, weights, acc, d);
  }
  for (; d < args.acc_stride; d += 2 * kW) {
    block_values_f32_slice<2>(args, weights, acc, d);
  }
}

#if defined(__AVX512BF16__)
template <int kElem>
inline vec::B load_pairs_to(const uint8_t* row, uint32_t d, uint32_t left) {
  return left >= 32 ? vec::load_as_pairs<kElem>(row, d) : vec::load_as_pairs_n<kElem>(row, d, left);
}

// 32 channels from channel d on of one row of bf16, int8 or fp8; zero beyond `dim` and where the
// row is absent.
inline vec::B load_channel_pairs(const uint8_t* row, uint8_t elem, uint32_t d, uint32_t dim) {
  if (row == nullptr)
    return vec::no_pairs();
  switch (elem) {
    case vec::kElemI8:
      return load_pairs_to<vec::kElemI8>(row, d, dim - d);
    case vec::kElemF8:
      return load_pairs_to<vec::kElemF8>(row, d, dim - d);
    default:
      return load_pairs_to<vec::kElemBf16>(row, d, dim - d);
  }
}

// K of the block as [channel pair][token], each entry two bf16; int8 and fp8 without scales.
void pack_k_bf16(const BlockArgs& args, float* out) {
  const uint32_t pairs = args.dim_k / 2;
  for (uint32_t t = 0; t < kBlockTokens; t += 16) {
    for (uint32_t d = 0; d < pairs; d += 16) {
      F x[16];
      const uint32_t n = pairs - d < 16 ? pairs - d : 16;
      for (uint32_t i = 0; i < 16; ++i) {
        x[i] = vec::as_floats(
            load_channel_pairs(args.k[t + i], args.elem_k[t + i], 2 * d, args.dim_k));
      }
      vec::transpose(x);
      for (uint32_t i = 0; i < n; ++i)
        vec::store(out + (d + i) * kBlockTokens + t, x[i]);
    }
  }
}

// V of the block as [token pair][channel], each entry two bf16; int8 and fp8 without scales.
void pack_v_bf16(const BlockArgs& args, uint16_t* out) {
  for (uint32_t t = 0; t < kBlockTokens; t += 2) {
    uint16_t* to = out + static_cast<size_t>(t) * args.acc_stride;
    for (uint32_t d = 0; d < args.acc_stride; d += 32) {
      const vec::B x = load_channel_pairs(args.v[t], args.elem_v[t], d, args.dim_v);
      const vec::B y = load_channel_pairs(args.v[t + 1], args.elem_v[t + 1], d, args.dim_v);
      vec::store_pairs(to + 2 * d, vec::interleave_lo(x, y));
      vec::store_pairs(to + 2 * d + 32, vec::interleave_hi(x, y));
    }
  }
}

void block_scores_bf16(const BlockArgs& args, uint32_t row, float* s) {
  static_assert(kNv * kW == kB, "one pass covers the block");
  const uint16_t* q = query_bf16(args.q, args.variant, row);
  const uint16_t* packed = static_cast<const uint16_t*>(args.packed_k);
  F acc[kMr][kNv];
#pragma GCC unroll 8
  for (int r = 0; r < kMr; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kNv; ++i)
      acc[r][i] = vec::zero();
  }
  for (uint32_t d = 0; d < args.dim_k; d += 2) {
    vec::B x[kNv];
#pragma GCC unroll 4
    for (int i = 0; i < kNv; ++i)
      x[i] = vec::load_pairs(packed + d * kBlockTokens + i * 32);
#pragma GCC unroll 8
    for (int r = 0; r < kMr; ++r) {
      const vec::B w = vec::set1_pair(q + static_cast<size_t>(r) * args.q.stride + d);
#pragma GCC unroll 4
      for (int i = 0; i < kNv; ++i)
        acc[r][i] = vec::dot(acc[r][i], x[i], w);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kMr; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kNv; ++i)
      vec::store(s + r * kB + i * kW, acc[r][i]);
  }
}

template <int kVecs>
inline void block_values_bf16_slice(const BlockArgs& args, const uint16_t* weights, float* acc,
                                    uint32_t d) {
  const uint16_t* packed = static_cast<const uint16_t*>(args.packed_v) + 2 * d;
  F a[kMr][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kMr; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      a[r][i] = vec::load(acc + static_cast<size_t>(r) * args.acc_stride + d + i * kW);
    }
  }
  for (int t = 0; t < kB; t += 2) {
    vec::B x[kVecs];
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      x[i] = vec::load_pairs(packed + static_cast<size_t>(t) * args.acc_stride + i * 32);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kMr; ++r) {
      const vec::B w = vec::set1_pair(weights + r * kB + t);
#pragma GCC unroll 4
      for (int i = 0; i < kVecs; ++i)
        a[r][i] = vec::dot(a[r][i], x[i], w);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kMr; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      vec::store(acc + static_cast<size_t>(r) * args.acc_stride + d + i * kW, a[r][i]);
    }
  }
}

void block_values_bf16(const BlockArgs& args, const uint16_t* weights, float* acc) {
  uint32_t d = 0;
  for (; d + kNv * kW <= args.acc_stride; d += kNv * kW) {
    block_values_bf16_slice<kNv>(args, weights, acc, d);
  }
  for (; d < args.acc_stride; d += 2 * kW) {
    block_values_bf16_slice<2>(args, weights, acc, d);
  }
}
#endif

// Log weights and masks of one row of the block.
void block_addend(const BlockArgs& args, uint64_t mask, float* addend) {
  for (int t = 0; t < kB; ++t) {
    const float weight = args.log_weight != nullptr ? args.log_weight[t] : 0.0f;
    addend[t] = (mask >> t & 1) != 0 ? weight : kNegInf;
  }
}

// Adds PositionBias to the logits of one row of the block.
[[gnu::noinline]] void add_position_bias(const BlockArgs& args, uint32_t row, F* x) {
  const RowBias bias = bias_of_row(args.bias, args.q, row, args.position);
  float distances[kB];
  for (int t = 0; t < kB; ++t)
    distances[t] = bias.distance + static_cast<float>(t);
  for (int i = 0; i < kB / kW; ++i)
    x[i] = vec::fma(vec::set1(bias.slope), vec::load(distances + i * kW), x[i]);
}

// Scores of a row (s, 64 floats) to logits. bad: see note_bad.
inline void block_logits(const BlockArgs& args, uint32_t row, uint64_t mask, const float* s, F* x,
                         F* bad) {
  constexpr int kVecs = kB / kW;
  // Rows that were packed as floats have their scales in them.
  const float* k_scale = args.bf16_qk != 0 ? args.k_scale : nullptr;
#pragma GCC unroll 16
  for (int i = 0; i < kVecs; ++i) {
    x[i] = vec::load(s + i * kW);
    if (k_scale != nullptr)
      x[i] = vec::mul(x[i], vec::load(k_scale + i * kW));
    *bad = note_bad(*bad, x[i]);
    x[i] = to_logit(x[i], args.scale, args.softcap);
  }
  if (args.bias.slopes != nullptr)
    add_position_bias(args, row, x);
  if (mask != ~static_cast<uint64_t>(0) || args.log_weight != nullptr) {
    float addend[kB];
    block_addend(args, mask, addend);
    for (int i = 0; i < kVecs; ++i)
      x[i] = vec::add(x[i], vec::load(addend + i * kW));
  }
}

// Scores of one row (s, 64 floats) to weights: floats in place of s, or bf16 in `rounded` where
// that is not null. `at` is the row's index in acc, m and l.
inline void block_weights(const BlockArgs& args, uint32_t at, uint64_t mask, float* s,
                          uint16_t* rounded, F* bad) {
  constexpr int kVecs = kB / kW;
  F x[kVecs];
  block_logits(args, args.row_first + at, mask, s, x, bad);
  F top = vec::set1(kNegInf);
#pragma GCC unroll 16
  for (int i = 0; i < kVecs; ++i)
    top = vec::max(top, x[i]);
  top = vec::group_max<kW>(top);
  F m = vec::set1(args.m[at]);
  F l = vec::load(args.l + at * 16);
  if (vec::any_gt(top, m)) {
    const F factor = exp_nonpositive(vec::sub(m, finite_reference(top)));
    float lanes[kW];
    vec::store(lanes, top);
    args.m[at] = lanes[0];
    m = top;
    l = vec::mul(l, factor);
    float* acc = args.acc + static_cast<size_t>(at) * args.acc_stride;
    for (uint32_t d = 0; d < args.acc_stride; d += kW) {
      vec::store(acc + d, vec::mul(vec::load(acc + d), factor));
    }
  }
  const F reference = finite_reference(m);
#pragma GCC unroll 16
  for (int i = 0; i < kVecs; ++i) {
    F p = exp_nonpositive(vec::sub(x[i], reference));
#if defined(__AVX512BF16__)
    if (rounded != nullptr && args.v_scale != nullptr) {
      vec::store_rounded(rounded + i * kW, vec::mul(p, vec::load(args.v_scale + i * kW)));
    } else if (rounded != nullptr) {
      p = vec::store_rounded(rounded + i * kW, p);
    } else {
      vec::store(s + i * kW, p);
    }
#else
    (void)rounded;
    vec::store(s + i * kW, p);
#endif
    l = vec::add(l, p);
  }
  vec::store(args.l + at * 16, l);
}

inline uint64_t block_row_mask(const BlockArgs& args, uint32_t row) {
  if (args.row_masks == nullptr)
    return args.mask;
  const uint32_t last = args.row_first + args.row_count - 1;
  const uint32_t query = (row < last ? row : last) / args.q.group;
  return args.mask & args.row_masks[query - args.query_first];
}

void block_begin(const BlockArgs* args) {
  const size_t rows = args->row_count + kRowPad;
  for (size_t i = 0; i < rows * args->acc_stride; i += kW)
    vec::store(args->acc + i, vec::zero());
  for (size_t i = 0; i < rows; ++i)
    args->m[i] = kNegInf;
  for (size_t i = 0; i < rows * 16; i += kW)
    vec::store(args->l + i, vec::zero());
  clear_bad(args->bad);
}

void pack_k(const BlockArgs& args) {
#if defined(__AVX512BF16__)
  if (args.bf16_qk != 0)
    return pack_k_bf16(args, static_cast<float*>(args.packed_k));
#endif
  pack_k_f32(args, static_cast<float*>(args.packed_k));
}

void block_scores(const BlockArgs& args, uint32_t row, float* s) {
#if defined(__AVX512BF16__)
  if (args.bf16_qk != 0)
    return block_scores_bf16(args, row, s);
#endif
  block_scores_f32(args, row, s);
}

void block(const BlockArgs* args) {
  pack_k(*args);
#if defined(__AVX512BF16__)
  const bool bf16_pv = args->bf16_pv != 0;
  if (bf16_pv) {
    pack_v_bf16(*args, static_cast<uint16_t*>(args->packed_v));
  } else {
    pack_v_f32(*args, static_cast<float*>(args->packed_v));
  }
#else
  pack_v_f32(*args, static_cast<float*>(args->packed_v));
#endif
  F bad = vec::load(args->bad);
  for (uint32_t at = 0; at < args->row_count; at += kMr) {
    const uint32_t row = args->row_first + at;
    uint64_t masks[kMr];
    uint64_t any = 0;
    for (int r = 0; r < kMr; ++r) {
      masks[r] = block_row_mask(*args, row + static_cast<uint32_t>(r));
      any |= masks[r];
    }
    if (any == 0)
      continue;
    float s[kMr * kB];
    float* acc = args->acc + static_cast<size_t>(at) * args->acc_stride;
    block_scores(*args, row, s);
#if defined(__AVX512BF16__)
    uint16_t rounded[kMr * kB];
    for (int r = 0; r < kMr; ++r) {
      const uint32_t i = static_cast<uint32_t>(r);
      block_weights(*args, at + i, masks[r], s + r * kB, bf16_pv ? rounded + r * kB : nullptr,
                    &bad);
    }
    if (bf16_pv) {
      block_values_bf16(*args, rounded, acc);
    } else {
      block_values_f32(*args, s, acc);
    }
#else
    for (int r = 0; r < kMr; ++r) {
      const uint32_t i = static_cast<uint32_t>(r);
      block_weights(*args, at + i, masks[r], s + r * kB, nullptr, &bad);
    }
    block_values_f32(*args, s, acc);
#endif
  }
  vec::store(args->bad, bad);
}

bool block_end(const BlockArgs* args, float* o, float* m, float* l) {
  F bad = vec::load(args->bad);
  for (uint32_t row = 0; row < args->row_count; ++row) {
    const float* acc = args->acc + static_cast<size_t>(row) * args->acc_stride;
    float* out = o + static_cast<size_t>(row) * args->dim_v;
    bad = note_bad_row(bad, acc, args->acc_stride);
    for (uint32_t d = 0; d < args->dim_v; ++d)
      out[d] = acc[d] + 0.0f;
    float lanes[kW];
    vec::store(lanes, vec::group_sum<kW>(vec::load(args->l + row * 16)));
    l[row] = lanes[0];
    m[row] = args->m[row] + 0.0f;
  }
  return is_bad(bad);
}

void block_sums(const BlockArgs* args) {
  constexpr int kVecs = kB / kW;
  pack_k(*args);
  F total[kVecs];
  for (int i = 0; i < kVecs; ++i)
    total[i] = vec::zero();
  F bad = vec::zero();  // is known from the first pass
  for (uint32_t at = 0; at < args->row_count; at += kMr) {
    const uint32_t row = args->row_first + at;
    uint64_t masks[kMr];
    uint64_t any = 0;
    for (int r = 0; r < kMr; ++r) {
      masks[r] = block_row_mask(*args, row + static_cast<uint32_t>(r));
      any |= masks[r];
    }
    if (any == 0)
      continue;
    float s[kMr * kB];
    block_scores(*args, row, s);
    for (int r = 0; r < kMr; ++r) {
      const uint32_t i = static_cast<uint32_t>(r);
      F x[kVecs];
      block_logits(*args, row + i, masks[r], s + r * kB, x, &bad);
      const F reference = vec::set1(args->references[at + i]);
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v)
        total[v] = vec::add(total[v], weight_of(x[v], reference));
    }
  }
  for (int i = 0; i < kVecs; ++i)
    vec::store(args->sums + i * kW, vec::add(vec::load(args->sums + i * kW), total[i]));
}

#if defined(__AVX2__)
constexpr bool kReadsCodes = true;
#else
constexpr bool kReadsCodes = false;
#endif
constexpr ExactKernels kKernels = {kReadsCodes, stream_begin, stream_keys, stream_values,
                                   stream_end,  stream_sums,  block_begin, block,
                                   block_end,   block_sums};

}  // namespace
}  // namespace attention
}  // namespace kvm

#endif  // KVM_ATTENTION_EXACT_EXACT_KERNEL_H_
