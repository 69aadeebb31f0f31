// SPDX-License-Identifier: Apache-2.0
// Gathered keys against the rows of a group, written once over the vector wrapper that the
// including file has chosen. sampled_args.h says what is computed.
//
// A batch of 16 keys passes four times: scores (K), norms (V), weights, values (V). Rows lie
// anywhere. The driver asks for each one two batches before it is used (gather.cc); since the core
// drops prefetches without a sign, their lines are asked for again here, one by one between the
// instructions that use another row: keys while values are summed and once more with the scores of
// the batch before, values with norms and with values.
//
// Everything here has internal linkage; see kernel_table.h.
#ifndef KVM_ATTENTION_SAMPLED_GATHER_KERNEL_H_
#define KVM_ATTENTION_SAMPLED_GATHER_KERNEL_H_

#include <stddef.h>
#include <stdint.h>

#include "attention/exact/elementary.h"
#include "attention/sampled/sampled_args.h"

namespace kvm {
namespace attention {
namespace {

constexpr int kKeys = static_cast<int>(kGatherKeys);
constexpr int kParts = kKeys / kW;  // vectors of 16 keys
constexpr uint32_t kLine = 64;
// The sketch may be this many nats above the largest logit read; squares stay finite.
constexpr float kMaxExcess = 20.0f;
constexpr float kMaxResidual = 100.0f;

// Calls body with the element type as a constant.
template <typename Body>
inline void with_elem(uint32_t elem, Body body) {
  switch (elem) {
    case vec::kElemF32:
      return body.template operator()<vec::kElemF32>();
    case vec::kElemF16:
      return body.template operator()<vec::kElemF16>();
    case vec::kElemI8:
      return body.template operator()<vec::kElemI8>();
    case vec::kElemF8:
      return body.template operator()<vec::kElemF8>();
    default:
      return body.template operator()<vec::kElemBf16>();
  }
}

// The kW elements of a row from c on; 0 beyond dim.
template <int kElem>
inline F load_row(const uint8_t* row, uint32_t c, uint32_t dim) {
  return c + kW <= dim ? vec::load_as<kElem>(row, c) : vec::load_as_n<kElem>(row, c, dim - c);
}

// Asks for the line at `offset` of the row that stands kBatches batches behind key's. ask: where
// offset is not known to begin a line.
template <uint32_t kBatches>
inline void ask_line(const uint8_t* const* rows, int key, uint32_t offset) {
  vec::prefetch(rows[kBatches * kGatherKeys + static_cast<uint32_t>(key)] + offset);
}
template <uint32_t kBatches>
inline void ask(const uint8_t* const* rows, int key, uint32_t offset) {
  if (offset % kLine == 0)
    ask_line<kBatches>(rows, key, offset);
}

// The same for the 32 channels from c on.
template <uint32_t kBatches, int kElem>
inline void ask_pairs(const uint8_t* const* rows, int key, uint32_t c) {
  if constexpr (32 * vec::elem_bytes(kElem) == kLine)
    ask_line<kBatches>(rows, key, c * vec::elem_bytes(kElem));
  else
    ask<kBatches>(rows, key, c * vec::elem_bytes(kElem));
}

// Calls body<kRows, kFirst>(row) for each tile of rows.
template <typename Body>
inline void for_tiles(uint32_t rows_padded, Body body) {
  if (rows_padded == 1)
    return body.template operator()<1, true>(0);
  body.template operator()<4, true>(0);
  for (uint32_t row = 4; row < rows_padded; row += 4)
    body.template operator()<4, false>(row);
}

// --- Scores -------------------------------------------------------------------------------------

// kRows rows meet kTokens keys at a time; lane r * kTokens + t of a sum is row r, key t.
template <int kRows>
struct KeyTile {
  static constexpr int kTokens = kW / kRows;
  static constexpr int kGroups = kKeys / kTokens;
};

// kFirst, here and below: of the tiles of rows, the one that asks for other rows.
template <int kRows, int kElem, bool kFirst>
void scores_f32(const GatherArgs& args, const GatherBatch& batch, uint32_t row, float* out) {
  using T = KeyTile<kRows>;
  const float* q = args.q + static_cast<size_t>(row) * args.q_stride;
  for (int g = 0; g < T::kGroups; ++g) {
    F acc[kW];
#pragma GCC unroll 16
    for (int i = 0; i < kW; ++i)
      acc[i] = vec::zero();
    for (uint32_t c = 0; c < args.dim_k; c += kW) {
#pragma GCC unroll 16
      for (int t = 0; t < T::kTokens; ++t) {
        const int key = g * T::kTokens + t;
        const F x = load_row<kElem>(batch.k[key], c, args.dim_k);
        if (kFirst)
          ask<1>(batch.k, key, c * vec::elem_bytes(kElem));
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          F& a = acc[r * T::kTokens + t];
          a = vec::fma(x, vec::load(q + static_cast<size_t>(r) * args.q_stride + c), a);
        }
      }
    }
    vec::store(out + g * kW, vec::reduce(acc));
  }
}

#if defined(__AVX512BF16__)
// Computes scores of rows of bf16, int8 or fp8, which are bf16 without rounding.
template <int kRows, int kElem, bool kFirst>
void scores_bf16(const GatherArgs& args, const GatherBatch& batch, uint32_t row, float* out) {
  using T = KeyTile<kRows>;
  const uint16_t* q = args.q_bf16 + static_cast<size_t>(row) * args.q_stride;
  const uint32_t whole = args.dim_k / 32 * 32;
  for (int g = 0; g < T::kGroups; ++g) {
    F acc[kW];
#pragma GCC unroll 16
    for (int i = 0; i < kW; ++i)
      acc[i] = vec::zero();
    for (uint32_t c = 0; c < whole; c += 32) {
#pragma GCC unroll 16
      for (int t = 0; t < T::kTokens; ++t) {
        const int key = g * T::kTokens + t;
        const vec::B x = vec::load_as_pairs<kElem>(batch.k[key], c);
        if (kFirst)
          ask_pairs<1, kElem>(batch.k, key, c);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          F& a = acc[r * T::kTokens + t];
          a = vec::dot(a, x, vec::load_pairs(q + static_cast<size_t>(r) * args.q_stride + c));
        }
      }
    }
    if (whole < args.dim_k) {
      for (int t = 0; t < T::kTokens; ++t) {
        const uint8_t* k = batch.k[g * T::kTokens + t];
        const vec::B x = vec::load_as_pairs_n<kElem>(k, whole, args.dim_k - whole);
        for (int r = 0; r < kRows; ++r) {
          F& a = acc[r * T::kTokens + t];
          a = vec::dot(a, x, vec::load_pairs(q + static_cast<size_t>(r) * args.q_stride + whole));
        }
      }
    }
    vec::store(out + g * kW, vec::reduce(acc));
  }
}
#endif

// Puts what the tiles of keys have left, [group][row][token], as [row][16].
template <int kRows>
inline void rows_of_dots(const float* dots, float* out) {
  using T = KeyTile<kRows>;
#if defined(__AVX512F__)
  if constexpr (kRows == 4) {  // quarters of registers change places
    const F a = vec::load(dots);
    const F b = vec::load(dots + kW);
    const F c = vec::load(dots + 2 * kW);
    const F d = vec::load(dots + 3 * kW);
    const F ab02 = _mm512_shuffle_f32x4(a, b, 0x88);  // a0 a2 b0 b2
    const F ab13 = _mm512_shuffle_f32x4(a, b, 0xDD);
    const F cd02 = _mm512_shuffle_f32x4(c, d, 0x88);
    const F cd13 = _mm512_shuffle_f32x4(c, d, 0xDD);
    vec::store(out, _mm512_shuffle_f32x4(ab02, cd02, 0x88));
    vec::store(out + kKeys, _mm512_shuffle_f32x4(ab13, cd13, 0x88));
    vec::store(out + 2 * kKeys, _mm512_shuffle_f32x4(ab02, cd02, 0xDD));
    vec::store(out + 3 * kKeys, _mm512_shuffle_f32x4(ab13, cd13, 0xDD));
    return;
  }
#endif
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kKeys; ++t)
      out[r * kKeys + t] = dots[t / T::kTokens * kW + r * T::kTokens + t % T::kTokens];
  }
}

// Logits of kRows rows: out [kRows][16]. bad [kRows][16], or null: 0, but NaN in a lane of a
// product that is not finite.
template <int kRows, bool kFirst>
void tile_logits(const GatherArgs& args, const GatherBatch& batch, uint32_t row, float* out,
                 float* bad) {
  float dots[kRows * kKeys];
  bool done = false;
#if defined(__AVX512BF16__)
  if (args.q_bf16 != nullptr && batch.elem_k == vec::kElemBf16) {
    scores_bf16<kRows, vec::kElemBf16, kFirst>(args, batch, row, dots);
    done = true;
  } else if (args.q_bf16 != nullptr && batch.elem_k == vec::kElemI8) {
    scores_bf16<kRows, vec::kElemI8, kFirst>(args, batch, row, dots);
    done = true;
  } else if (args.q_bf16 != nullptr && batch.elem_k == vec::kElemF8) {
    scores_bf16<kRows, vec::kElemF8, kFirst>(args, batch, row, dots);
    done = true;
  }
#endif
  if (!done) {
    with_elem(batch.elem_k,
              [&]<int kElem>() { scores_f32<kRows, kElem, kFirst>(args, batch, row, dots); });
  }
  rows_of_dots<kRows>(dots, out);
  for (int r = 0; r < kRows; ++r) {
    float* to = out + r * kKeys;
    for (int j = 0; j < kParts; ++j) {
      const F scaled = vec::mul(vec::load(to + j * kW), vec::load(batch.k_scale + j * kW));
      if (bad != nullptr)
        vec::store(bad + r * kKeys + j * kW, note_bad(vec::zero(), scaled));
      vec::store(to + j * kW, to_logit(scaled, args.scale, args.softcap));
    }
  }
}

void logits_and_bad(const GatherArgs& args, const GatherBatch& batch, float* out, float* bad) {
  for_tiles(args.rows_padded, [&]<int kRows, bool kFirst>(uint32_t row) {
    tile_logits<kRows, kFirst>(args, batch, row, out + row * kKeys,
                               bad == nullptr ? nullptr : bad + row * kKeys);
  });
}

void all_logits(const GatherArgs* args, const GatherBatch* batch, float* out) {
  logits_and_bad(*args, *batch, out, nullptr);
}

template <int kElem>
void norms_of(const uint8_t* const* rows, uint32_t dim, float* out) {
  for (int part = 0; part < kParts; ++part) {
    F acc[kW];
#pragma GCC unroll 16
    for (int i = 0; i < kW; ++i)
      acc[i] = vec::zero();
#if defined(__AVX512BF16__)
    if constexpr (kElem != vec::kElemF32 && kElem != vec::kElemF16) {
      for (uint32_t d = 0; d < dim; d += 32) {
#pragma GCC unroll 16
        for (int i = 0; i < kW; ++i) {
          const uint8_t* row = rows[part * kW + i];
          const vec::B x = d + 32 <= dim ? vec::load_as_pairs<kElem>(row, d)
                                         : vec::load_as_pairs_n<kElem>(row, d, dim - d);
          ask_pairs<1, kElem>(rows, part * kW + i, d);
          acc[i] = vec::dot(acc[i], x, x);
        }
      }
      vec::store(out + part * kW, vec::reduce(acc));
      continue;
    }
#endif
    for (uint32_t d = 0; d < dim; d += kW) {
#pragma GCC unroll 16
      for (int i = 0; i < kW; ++i) {
        const F x = load_row<kElem>(rows[part * kW + i], d, dim);
        ask<1>(rows, part * kW + i, d * vec::elem_bytes(kElem));
        acc[i] = vec::fma(x, x, acc[i]);
      }
    }
    vec::store(out + part * kW, vec::reduce(acc));
  }
}

void norms(const uint8_t* const* rows, uint32_t elem, uint32_t dim, float* out) {
  with_elem(elem, [&]<int kElem>() { norms_of<kElem>(rows, dim, out); });
}

// --- Weights ------------------------------------------------------------------------------------

// Vectors of sums that one batch adds to: kVecOpen and kVecSquare, or kVecClosed alone.
constexpr int kMostSums = 2;

// How values meet their coefficients: in fp32; in bf16, pairs of keys at a time; and in bf16 with
// scales in the coefficients.
enum class Meeting { kFp32, kBf16, kScaledBf16 };

// Coefs are the coefficients of the values of a batch, by vector of sums:
// [kMostSums][rows_padded][16].
struct Coefs {
  float at[kMostSums][kMaxGatherRows * kKeys];
#if defined(__AVX512BF16__)
  uint16_t bf16[kMostSums][kMaxGatherRows * kKeys];  // instead, but for kFp32
#endif
};

inline Meeting meeting_of(const GatherArgs& args, const GatherBatch& batch) {
#if defined(__AVX512BF16__)
  if (args.fp32_weights == 0 && batch.elem_v == vec::kElemBf16)
    return Meeting::kBf16;
  if (args.fp32_weights == 0 && (batch.elem_v == vec::kElemI8 || batch.elem_v == vec::kElemF8))
    return Meeting::kScaledBf16;
#else
  (void)args;
  (void)batch;
#endif
  return Meeting::kFp32;
}

// Stores coefficients of a vector of keys; returns them as values will meet them, scales apart. A
// product with a scale that is next to nothing says nothing of what it was made of.
template <Meeting kMeeting>
inline F put_coef(Coefs& coefs, int which, uint32_t at, F x, F v_scale) {
#if defined(__AVX512BF16__)
  if constexpr (kMeeting == Meeting::kBf16)
    return vec::store_rounded(coefs.bf16[which] + at, x);
  if constexpr (kMeeting == Meeting::kScaledBf16) {
    const F tiny = vec::set1(1e-30f);
    const F rounded = vec::store_rounded(coefs.bf16[which] + at, vec::mul(x, v_scale));
    const F one = vec::set1(1.0f);
    const F unscaled = vec::div(rounded, vec::max(v_scale, tiny));
    const F told = vec::keep_ge(rounded, tiny, one);
    return vec::fma(told, vec::sub(unscaled, x), x);
  }
#endif
  vec::store(coefs.at[which] + at, vec::mul(x, v_scale));
  return x;
}

inline void scale_vector(float* x, uint32_t n, float factor) {
  for (uint32_t d = 0; d < n; d += kW)
    vec::store(x + d, vec::mul(vec::load(x + d), vec::set1(factor)));
}

// Brings everything that a row has summed to a larger reference.
void rescale(const GatherArgs& args, const GatherSums& sums, uint32_t row, float down) {
  const float down2 = down * down;
  for (uint32_t i = 0; i < kGatherSums; ++i) {
    scale_vector(sums.sums + (row * kGatherSums + i) * kKeys, kKeys, i < kSumSquare ? down : down2);
  }
  for (uint32_t i = 0; i < kGatherVectors; ++i) {
    scale_vector(sums.acc + (static_cast<size_t>(i) * args.rows_padded + row) * args.acc_stride,
                 args.acc_stride, i < kVecSquare ? down : down2);
  }
}

// Takes the logits of the row into its reference and returns that.
inline F raise_reference(const GatherArgs& args, const GatherSums& sums, uint32_t row,
                         const F* logits) {
  F top = logits[0];
#pragma GCC unroll 4
  for (int j = 1; j < kParts; ++j)
    top = vec::max(top, logits[j]);
  top = vec::group_max<kW>(top);
  const F m = vec::set1(sums.m[row]);
  if (vec::any_gt(top, m)) {
    float lanes[kW];
    vec::store(lanes, exp_nonpositive(vec::sub(m, finite_reference(top))));
    rescale(args, sums, row, lanes[0]);
    vec::store(lanes, top);
    sums.m[row] = lanes[0];
  }
  return finite_reference(vec::max(top, m));
}

inline F bounded_exp(F x, float bound) { return exp_nonpositive(vec::min(x, vec::set1(bound))); }

inline void add_to(float* sum, F x) { vec::store(sum, vec::add(vec::load(sum), x)); }

// The row's logits of a part of the batch; -inf for keys that do not count.
inline F counted(const GatherBatch& batch, const float* logits, const float* factor, int part) {
  static const float kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const F index = vec::load(kIndex + part * kW);
  const F last = vec::set1(static_cast<float>(batch.n) - 1.0f);
  // log of 1 or 0: what keep_ge leaves of a large number, minus that number.
  const F huge = vec::set1(2.0f * kHugeLogit);
  F drop = vec::sub(vec::keep_ge(last, index, huge), huge);
  if (factor != nullptr) {
    const F f = vec::load(factor + part * kW);
    drop = vec::min(drop, vec::sub(vec::keep_ge(f, vec::set1(1e-38f), huge), huge));
  }
  return vec::add(vec::load(logits + part * kW), vec::mul(drop, vec::set1(4.0f)));
}

template <Meeting kMeeting>
void weigh_closed(const GatherArgs& args, const GatherBatch& batch, const GatherSums& sums,
                  uint32_t row, const float* logits, const float* squares, Coefs& coefs) {
  const float* factor = batch.kind == kGatherWeighted ? batch.per_row + row * kKeys : nullptr;
  F s[kParts];
  for (int j = 0; j < kParts; ++j)
    s[j] = counted(batch, logits, factor, j);
  const F reference = raise_reference(args, sums, row, s);
  float* sum = sums.sums + static_cast<size_t>(row) * kGatherSums * kKeys;
  for (int j = 0; j < kParts; ++j) {
    const int at = j * kW;
    F w = exp_nonpositive(vec::sub(s[j], reference));
    if (factor != nullptr)
      w = vec::mul(w, vec::load(factor + at));
    w = put_coef<kMeeting>(coefs, 0, row * kKeys + static_cast<uint32_t>(at), w,
                           vec::load(batch.v_scale + at));
    add_to(sum + kSumClosed * kKeys + at, w);
    add_to(sum + kSumClosedNorm * kKeys + at, vec::mul(w, vec::load(squares + at)));
  }
}

// OpenTerms are what open keys of one p add to the sums of a row.
struct OpenTerms {
  F wp;
  F hp;
  F square;
  F square_hat;
  F square_hat2;
};

// inverse: 1 / p. wp and square as values meet them.
template <Meeting kMeeting>
inline OpenTerms open_terms(Coefs& coefs, uint32_t to, F w, F h, F inverse, F v_scale) {
  OpenTerms t;
  const F wp = vec::mul(w, inverse);
  t.hp = vec::mul(h, inverse);
  t.wp = put_coef<kMeeting>(coefs, 0, to, wp, v_scale);
  const F odds = vec::sub(inverse, vec::set1(1.0f));
  t.square = put_coef<kMeeting>(coefs, 1, to, vec::mul(vec::mul(odds, wp), w), v_scale);
  const F odds_h = vec::mul(odds, h);
  t.square_hat = vec::mul(odds_h, wp);
  t.square_hat2 = vec::mul(odds_h, t.hp);
  return t;
}

// kGrown: what terms change by, with coefficients for values in fp32: a difference of rounded ones
// is none that bf16 holds.
template <Meeting kMeeting, bool kGrown>
void weigh_open(const GatherArgs& args, const GatherBatch& batch, const GatherSums& sums,
                uint32_t row, const float* logits, const float* squares, Coefs& coefs) {
  F s[kParts];
  for (int j = 0; j < kParts; ++j)
    s[j] = counted(batch, logits, nullptr, j);
  const F reference = raise_reference(args, sums, row, s);
  float* sum = sums.sums + static_cast<size_t>(row) * kGatherSums * kKeys;
  const F one = vec::set1(1.0f);
  const F most = vec::set1(kMaxResidual);
  for (int j = 0; j < kParts; ++j) {
    const int at = j * kW;
    const uint32_t to = row * kKeys + static_cast<uint32_t>(at);
    const auto add = [&](GatherSum which, F x) {
      add_to(sum + static_cast<int>(which) * kKeys + at, x);
    };
    const F hat = vec::load(batch.per_row + row * kKeys + at);
    const F v2 = vec::load(squares + at);
    const F v_scale = vec::load(batch.v_scale + at);
    const F w = exp_nonpositive(vec::sub(s[j], reference));
    const F h = bounded_exp(vec::sub(hat, reference), kMaxExcess);
    const F e = vec::max(vec::min(vec::sub(s[j], hat), most), vec::sub(vec::zero(), most));
    OpenTerms t =
        open_terms<kMeeting>(coefs, to, w, h, vec::div(one, vec::load(batch.p + at)), v_scale);
    if constexpr (kGrown) {
      const OpenTerms before = open_terms<kMeeting>(
          coefs, to, w, h, vec::div(one, vec::load(batch.p_before + at)), v_scale);
      t.wp = put_coef<Meeting::kFp32>(coefs, 0, to, vec::sub(t.wp, before.wp), v_scale);
      t.square = put_coef<Meeting::kFp32>(coefs, 1, to, vec::sub(t.square, before.square), v_scale);
      t.hp = vec::sub(t.hp, before.hp);
      t.square_hat = vec::sub(t.square_hat, before.square_hat);
      t.square_hat2 = vec::sub(t.square_hat2, before.square_hat2);
    }
    const F residual = vec::mul(t.wp, e);
    add(kSumOpen, t.wp);
    add(kSumOpenNorm, vec::mul(t.wp, v2));
    add(kSumHat, t.hp);
    add(kSumResidual, residual);
    add(kSumResidual2, vec::mul(residual, e));
    add(kSumSquare, t.square);
    add(kSumSquareNorm, vec::mul(t.square, v2));
    add(kSumSquareHat, t.square_hat);
    add(kSumSquareHat2, t.square_hat2);
  }
}

template <Meeting kMeeting>
void weigh(const GatherArgs& args, const GatherBatch& batch, const GatherSums& sums,
           const float* logits, const float* squares, Coefs& coefs) {
  for (uint32_t row = 0; row < args.rows; ++row) {
    const float* of_row = logits + row * kKeys;
    if (batch.kind == kGatherOpen)
      weigh_open<kMeeting, false>(args, batch, sums, row, of_row, squares, coefs);
    else if (batch.kind == kGatherGrown)
      weigh_open<kMeeting, true>(args, batch, sums, row, of_row, squares, coefs);
    else
      weigh_closed<kMeeting>(args, batch, sums, row, of_row, squares, coefs);
  }
  for (uint32_t row = args.rows; row < args.rows_padded; ++row) {
    for (int which = 0; which < kMostSums; ++which) {
      for (int j = 0; j < kParts; ++j) {
        const uint32_t at = row * kKeys + static_cast<uint32_t>(j * kW);
        put_coef<kMeeting>(coefs, which, at, vec::zero(), vec::zero());
        if (batch.kind == kGatherGrown)
          put_coef<Meeting::kFp32>(coefs, which, at, vec::zero(), vec::zero());
      }
    }
  }
}

// --- Values -------------------------------------------------------------------------------------

// Adds kVecs vectors of every value of the batch, from channel d on, to kSums vectors of sums of
// each of kRows rows, from vector `first` on. kPart: the last one ends at or beyond dim_v.
template <int kSums, int kRows, bool kFirst, int kElem, int kVecs, bool kPart>
inline void value_slice(const GatherArgs& args, const GatherBatch& batch, const GatherSums& sums,
                        uint32_t row, uint32_t first, uint32_t d, const Coefs& coefs) {
  const auto acc_at = [&](int j, int r) {
    return sums.acc +
           ((first + static_cast<uint32_t>(j)) * static_cast<size_t>(args.rows_padded) + row +
            static_cast<uint32_t>(r)) *
               args.acc_stride +
           d;
  };
  F a[kSums][kRows][kVecs];
#pragma GCC unroll 2
  for (int j = 0; j < kSums; ++j) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int i = 0; i < kVecs; ++i)
        a[j][r][i] = vec::load(acc_at(j, r) + i * kW);
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < kKeys; ++t) {
    F x[kVecs];
#pragma GCC unroll 2
    for (int i = 0; i < kVecs; ++i) {
      const uint32_t c = d + static_cast<uint32_t>(i * kW);
      if (kPart) {
        x[i] = c < args.dim_v ? load_row<kElem>(batch.v[t], c, args.dim_v) : vec::zero();
      } else {
        x[i] = vec::load_as<kElem>(batch.v[t], c);
      }
      if (kFirst) {
        ask<1>(batch.v, t, c * vec::elem_bytes(kElem));
        ask<2>(batch.k, t, c * vec::elem_bytes(kElem));
      }
    }
#pragma GCC unroll 2
    for (int j = 0; j < kSums; ++j) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const F w = vec::set1(
            coefs.at[j][(row + static_cast<uint32_t>(r)) * kKeys + static_cast<uint32_t>(t)]);
#pragma GCC unroll 2
        for (int i = 0; i < kVecs; ++i)
          a[j][r][i] = vec::fma(w, x[i], a[j][r][i]);
      }
    }
  }
#pragma GCC unroll 2
  for (int j = 0; j < kSums; ++j) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int i = 0; i < kVecs; ++i)
        vec::store(acc_at(j, r) + i * kW, a[j][r][i]);
    }
  }
}

#if defined(__AVX512BF16__)
// The same for 32 channels of bf16, int8 or fp8, two keys at a time. kPart: the last of them.
template <int kSums, int kRows, bool kFirst, int kElem, bool kPart>
inline void value_slice_bf16(const GatherArgs& args, const GatherBatch& batch,
                             const GatherSums& sums, uint32_t row, uint32_t first, uint32_t d,
                             const Coefs& coefs) {
  const auto acc_at = [&](int j, int r) {
    return sums.acc +
           ((first + static_cast<uint32_t>(j)) * static_cast<size_t>(args.rows_padded) + row +
            static_cast<uint32_t>(r)) *
               args.acc_stride +
           d;
  };
  const auto load = [&](int t) {
    return kPart ? vec::load_as_pairs_n<kElem>(batch.v[t], d, args.dim_v - d)
                 : vec::load_as_pairs<kElem>(batch.v[t], d);
  };
  F a[kSums][kRows][2];
#pragma GCC unroll 2
  for (int j = 0; j < kSums; ++j) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      a[j][r][0] = vec::load(acc_at(j, r));
      a[j][r][1] = vec::load(acc_at(j, r) + kW);
    }
  }
#pragma GCC unroll 2
  for (int t = 0; t < kKeys; t += 2) {
    const vec::B x = load(t);
    const vec::B y = load(t + 1);
    const vec::B lo = vec::interleave_lo(x, y);
    const vec::B hi = vec::interleave_hi(x, y);
#pragma GCC unroll 2
    for (int j = 0; j < kSums; ++j) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const vec::B w = vec::set1_pair(coefs.bf16[j] + (row + static_cast<uint32_t>(r)) * kKeys +
                                        static_cast<uint32_t>(t));
        a[j][r][0] = vec::dot(a[j][r][0], w, lo);
        a[j][r][1] = vec::dot(a[j][r][1], w, hi);
        if (kFirst && j == 0 && r < 2) {
          ask_pairs<1, kElem>(batch.v, t + r, d);
          ask_pairs<2, kElem>(batch.k, t + r, d);
        }
      }
    }
    if (kFirst && kRows == 1) {
      ask_pairs<1, kElem>(batch.v, t + 1, d);
      ask_pairs<2, kElem>(batch.k, t + 1, d);
    }
  }
#pragma GCC unroll 2
  for (int j = 0; j < kSums; ++j) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      vec::store(acc_at(j, r), a[j][r][0]);
      vec::store(acc_at(j, r) + kW, a[j][r][1]);
    }
  }
}

template <int kSums, int kRows, bool kFirst, int kElem>
void add_values_bf16(const GatherArgs& args, const GatherBatch& batch, const GatherSums& sums,
                     uint32_t row, uint32_t first, const Coefs& coefs) {
  uint32_t d = 0;
  for (; d + 32 <= args.dim_v; d += 32)
    value_slice_bf16<kSums, kRows, kFirst, kElem, false>(args, batch, sums, row, first, d, coefs);
  if (d < args.dim_v)
    value_slice_bf16<kSums, kRows, kFirst, kElem, true>(args, batch, sums, row, first, d, coefs);
}
#endif

template <int kSums, int kRows, bool kFirst, int kElem>
void add_values(const GatherArgs& args, const GatherBatch& batch, const GatherSums& sums,
                uint32_t row, uint32_t first, const Coefs& coefs) {
  // As many vectors at once as registers hold.
  constexpr int kVecs = kW == 16 ? 2 : 1;
  uint32_t d = 0;
  for (; d + kVecs * kW <= args.dim_v; d += kVecs * kW)
    value_slice<kSums, kRows, kFirst, kElem, kVecs, false>(args, batch, sums, row, first, d, coefs);
  if (d < args.dim_v)
    value_slice<kSums, kRows, kFirst, kElem, kVecs, true>(args, batch, sums, row, first, d, coefs);
}

template <int kSums>
void values(const GatherArgs& args, const GatherBatch& batch, const GatherSums& sums,
            uint32_t first, const Coefs& coefs) {
#if defined(__AVX512BF16__)
  if (meeting_of(args, batch) != Meeting::kFp32 && batch.kind != kGatherGrown) {
    for_tiles(args.rows_padded, [&]<int kRows, bool kFirst>(uint32_t row) {
      if (batch.elem_v == vec::kElemI8)
        add_values_bf16<kSums, kRows, kFirst, vec::kElemI8>(args, batch, sums, row, first, coefs);
      else if (batch.elem_v == vec::kElemF8)
        add_values_bf16<kSums, kRows, kFirst, vec::kElemF8>(args, batch, sums, row, first, coefs);
      else
        add_values_bf16<kSums, kRows, kFirst, vec::kElemBf16>(args, batch, sums, row, first, coefs);
    });
    return;
  }
#endif
  with_elem(batch.elem_v, [&]<int kElem>() {
    for_tiles(args.rows_padded, [&]<int kRows, bool kFirst>(uint32_t row) {
      add_values<kSums, kRows, kFirst, kElem>(args, batch, sums, row, first, coefs);
    });
  });
}

void gather(const GatherArgs* args, const GatherBatch* batch, const GatherSums* sums) {
  float logits[kMaxGatherRows * kKeys];
  float bad[kMaxGatherRows * kKeys];
  float squares[kKeys];
  Coefs coefs;
  logits_and_bad(*args, *batch, logits, bad);
  norms(batch->v, batch->elem_v, args->dim_v, squares);
  for (int j = 0; j < kParts; ++j) {
    const F scale = vec::load(batch->v_scale + j * kW);
    vec::store(squares + j * kW, vec::mul(vec::load(squares + j * kW), vec::mul(scale, scale)));
  }
  // Logits are clamped: the sum shows that one stands for what is no finite number.
  for (uint32_t row = 0; row < args->rows; ++row) {
    float* sum = sums->sums + (static_cast<size_t>(row) * kGatherSums + kSumClosedNorm) * kKeys;
    for (int j = 0; j < kParts; ++j)
      add_to(sum + j * kW, vec::load(bad + row * kKeys + static_cast<uint32_t>(j * kW)));
  }
  switch (meeting_of(*args, *batch)) {
    case Meeting::kFp32:
      weigh<Meeting::kFp32>(*args, *batch, *sums, logits, squares, coefs);
      break;
    case Meeting::kBf16:
      weigh<Meeting::kBf16>(*args, *batch, *sums, logits, squares, coefs);
      break;
    case Meeting::kScaledBf16:
      weigh<Meeting::kScaledBf16>(*args, *batch, *sums, logits, squares, coefs);
      break;
  }
  if (batch->kind == kGatherOpen || batch->kind == kGatherGrown)
    values<2>(*args, *batch, *sums, kVecOpen, coefs);
  else
    values<1>(*args, *batch, *sums, kVecClosed, coefs);
}

// --- Directions ---------------------------------------------------------------------------------

template <int kElem>
void widen_of(const uint8_t* const* rows, const float* scale, uint32_t dim, uint32_t n,
              uint32_t stride, float* out) {
  for (uint32_t i = 0; i < n; ++i) {
    const F factor = vec::set1(scale[i]);
    float* to = out + static_cast<size_t>(i) * stride;
    for (uint32_t d = 0; d < stride; d += kW)
      vec::store(to + d,
                 d < dim ? vec::mul(load_row<kElem>(rows[i], d, dim), factor) : vec::zero());
  }
}

void widen(const uint8_t* const* rows, const float* scale, uint32_t elem, uint32_t dim, uint32_t n,
           uint32_t stride, float* out) {
  with_elem(elem, [&]<int kElem>() { widen_of<kElem>(rows, scale, dim, n, stride, out); });
}

// Tiles of four vectors by as many as fill a register with sums; those below the diagonal are
// copied.
void products(const float* x, uint32_t n, uint32_t stride, uint32_t out_stride, float* out) {
  using T = KeyTile<4>;
  constexpr uint32_t kTokens = T::kTokens;
  for (uint32_t i = 0; i < n; i += 4) {
    for (uint32_t j = i / kTokens * kTokens; j < n; j += kTokens) {
      F acc[kW];
#pragma GCC unroll 16
      for (int a = 0; a < kW; ++a)
        acc[a] = vec::zero();
      for (uint32_t d = 0; d < stride; d += kW) {
        F left[4];
#pragma GCC unroll 4
        for (uint32_t r = 0; r < 4; ++r)
          left[r] = vec::load(x + static_cast<size_t>(i + r) * stride + d);
#pragma GCC unroll 4
        for (uint32_t t = 0; t < kTokens; ++t) {
          const F right = vec::load(x + static_cast<size_t>(j + t) * stride + d);
#pragma GCC unroll 4
          for (uint32_t r = 0; r < 4; ++r)
            acc[r * kTokens + t] = vec::fma(left[r], right, acc[r * kTokens + t]);
        }
      }
      float sums[kW];
      vec::store(sums, vec::reduce(acc));
      for (uint32_t r = 0; r < 4; ++r) {
        for (uint32_t t = 0; t < kTokens; ++t) {
          out[static_cast<size_t>(i + r) * out_stride + j + t] = sums[r * kTokens + t];
          out[static_cast<size_t>(j + t) * out_stride + i + r] = sums[r * kTokens + t];
        }
      }
    }
  }
}

inline float sum_of(F x) {
  float lanes[kW];
  vec::store(lanes, x);
  float sum = 0;
  for (int i = 0; i < kW; ++i)
    sum += lanes[i];
  return sum;
}

void dots(const float* x, uint32_t n, uint32_t stride, const float* y, float* out) {
  for (uint32_t i = 0; i < n; ++i) {
    F sum[2] = {vec::zero(), vec::zero()};
    const float* row = x + static_cast<size_t>(i) * stride;
    for (uint32_t d = 0; d < stride; d += 2 * kW) {  // stride is a multiple of 32
      sum[0] = vec::fma(vec::load(row + d), vec::load(y + d), sum[0]);
      sum[1] = vec::fma(vec::load(row + d + kW), vec::load(y + d + kW), sum[1]);
    }
    out[i] = sum_of(vec::add(sum[0], sum[1]));
  }
}

float terms(const float* products, const float* along, const float* root, uint32_t n,
            uint32_t stride, float* out) {
  F squares = vec::zero();
  for (uint32_t i = 0; i < n; ++i) {
    const F own_root = vec::set1(root[i]);
    const F own_along = vec::set1(along[i]);
    const size_t at = static_cast<size_t>(i) * stride;
    for (uint32_t j = 0; j < n; j += kW) {
      const F product =
          vec::sub(vec::sub(vec::load(products + at + j), own_along), vec::load(along + j));
      const F x = vec::mul(vec::mul(own_root, vec::load(root + j)), product);
      vec::store(out + at + j, x);
      squares = vec::fma(x, x, squares);
    }
  }
  return sum_of(squares);
}

void turn(const float* terms, uint32_t n, uint32_t stride, float* u, float* room) {
  for (uint32_t j = 0; j < n; j += kW) {
    F sum = vec::zero();
    for (uint32_t i = 0; i < n; ++i)
      sum = vec::fma(vec::set1(u[i]), vec::load(terms + static_cast<size_t>(i) * stride + j), sum);
    vec::store(room + j, sum);
  }
  for (uint32_t j = 0; j < n; j += kW)
    vec::store(u + j, vec::load(room + j));
}

// --- Thresholds ---------------------------------------------------------------------------------

float largest(const float* x, size_t n) {
  F top = vec::set1(kNegInf);
  for (size_t i = 0; i < n; i += kW)
    top = vec::max(vec::load(x + i), top);
  float lanes[kW];
  vec::store(lanes, vec::group_max<kW>(top));
  return lanes[0];
}

void sizes(const float* x, const float* norm, float top, size_t n, float* out) {
  const F reference = vec::set1(top);
  for (size_t i = 0; i < n; i += kW) {
    const F e = bounded_exp(vec::sub(vec::load(x + i), reference), 80.0f);
    vec::store(out + i, vec::mul(e, vec::load(norm + i)));
  }
}

void raise(const float* x, float factor, size_t n, float* out) {
  const F f = vec::set1(factor);
  for (size_t i = 0; i < n; i += kW)
    vec::store(out + i, vec::max(vec::load(out + i), vec::mul(vec::load(x + i), f)));
}

void saturation(const float* x, float limit, size_t n, uint64_t* count, double* sum) {
  constexpr size_t kChains = 4;  // additions that do not wait for each other
  const F bound = vec::set1(limit);
  const F one = vec::set1(1.0f);
  F chains[kChains];
  F reach[kChains];
  for (size_t j = 0; j < kChains; ++j)
    chains[j] = reach[j] = vec::zero();
  const auto add = [&](size_t j, size_t i) {
    const F y = vec::load(x + i);
    reach[j] = vec::add(reach[j], vec::keep_ge(y, bound, one));
    chains[j] = vec::add(chains[j], vec::sub(y, vec::keep_ge(y, bound, y)));
  };
  size_t i = 0;
  for (; i + kChains * kW <= n; i += kChains * kW) {
#pragma GCC unroll 4
    for (size_t j = 0; j < kChains; ++j)
      add(j, i + j * kW);
  }
  for (; i < n; i += kW)
    add(0, i);
  const F reaching = vec::add(vec::add(reach[0], reach[1]), vec::add(reach[2], reach[3]));
  const F all = vec::add(vec::add(chains[0], chains[1]), vec::add(chains[2], chains[3]));
  float counts[kW];
  float sums[kW];
  vec::store(counts, reaching);
  vec::store(sums, all);
  double total = 0.0;
  double n_reaching = 0.0;
  for (int lane = 0; lane < kW; ++lane) {
    total += static_cast<double>(sums[lane]);
    n_reaching += static_cast<double>(counts[lane]);
  }
  *count = static_cast<uint64_t>(n_reaching);
  *sum = total;
}

constexpr SampledKernels kKernels{.gather = gather,
                                  .logits = all_logits,
                                  .norms = norms,
                                  .widen = widen,
                                  .products = products,
                                  .dots = dots,
                                  .terms = terms,
                                  .turn = turn,
                                  .largest = largest,
                                  .sizes = sizes,
                                  .raise = raise,
                                  .saturation = saturation};

}  // namespace
}  // namespace attention
}  // namespace kvm

#endif  // KVM_ATTENTION_SAMPLED_GATHER_KERNEL_H_
