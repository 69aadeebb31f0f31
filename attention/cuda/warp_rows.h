// SPDX-License-Identifier: Apache-2.0
// Rows of queries in the registers of a warp, and what it makes of a tile of keys and values. What
// the kernels that attend have in common; tiles.h is the other half of it.
//
// Per tile:
//   S = Q K^T       mma m16n8k16, query rows in M; fp32 sums
//   s = S * scale_log2, maybe soft-capped, + log weight * log2(e); -inf for tokens not seen
//   m' = max(m, s); p = 2^(s - m'); l = l 2^(m - m') + sum p; o = o 2^(m - m') + round(p) V
// p is rounded to the element type for the product with V, not for l.
//
// Rows of bytes (codecs/int8.h, float8.h) become fp16 on their way to the products, which is exact;
// scores are multiplied by the scales of their keys. Scales of values have any size and fp16 has
// not, so they count in the maximum, and the largest weight is 1 whatever they are:
//   m' = max(m, s + log2 scale); p as above; o = o 2^(m - m') + round(p scale) V
// Beyond 2^+-kMostLogScale they count as that there, for then l would leave what fp32 has. Factors
// 2^(m - m') may leave it before: Decay. Of rows of 4 bits code_rows.h has the products.
#ifndef KVM_ATTENTION_CUDA_WARP_ROWS_H_
#define KVM_ATTENTION_CUDA_WARP_ROWS_H_

#include "attention/cuda/logits.h"
#include "attention/cuda/tiles.h"

namespace kvm::attention::gpu {

inline constexpr float kMostLogScale = 100.0f;

// 2^x for a state whose maximum grows by -x. Scales of values may make it grow by more than the 126
// that floats have, but sums of weights, which do not have those scales in them, still count then:
// they are multiplied by the root twice.
template <bool kNarrow>
struct Decay {
  float whole, root;
  KVM_GPU explicit Decay(float x) {
    if constexpr (kNarrow) {
      root = exp2_fast(x * 0.5f);
      whole = root * root;
    } else {
      whole = exp2_fast(x);
    }
  }
  KVM_GPU float of_sum(float sum) const { return kNarrow ? sum * root * root : sum * whole; }
};

// log2 of the scale of a value, within what sums of weights have room for. Of a NaN, the least.
KVM_GPU float bounded_log_scale(float scale) {
  return fminf(fmaxf(log2_fast(scale), -kMostLogScale), kMostLogScale);
}

// Sixteen rows of queries times sixteen channels: an operand of mma_16x8x16.
struct Fragment {
  uint32_t words[4];
};

// The columns of tiles whose rows have no scales.
struct NoScales {
  KVM_GPU float raise(float score, uint32_t, uint32_t) const { return score; }
  KVM_GPU float apply(float weight, uint32_t, uint32_t) const { return weight; }
};

// Queries that a warp keeps in registers.
template <class Shape>
struct RegisterQueries {
  static constexpr bool kAreLoaded = false;  // at every get
  static constexpr uint32_t kSteps = Shape::kDim / 16;
  Fragment all[Shape::kRowTiles][kSteps];

  KVM_GPU Fragment get(uint32_t row_tile, uint32_t step) const { return all[row_tile][step]; }
};

// The state of the rows that one warp has: kRowTiles of 16; of each tile a lane has parts of rows
// lane / 4 and lane / 4 + 8, as the fragments of mma.m16n8k16 do.
template <class Shape>
struct WarpRows {
  static constexpr uint32_t kQuerySteps = Shape::kDim / 16;
  static constexpr uint32_t kOutTiles = Shape::kDim / 8;
  using Scores = float[Shape::kRowTiles][Shape::kTile / 8][4];

  float o[Shape::kRowTiles][kOutTiles][4];
  float m[Shape::kRowTiles][2];  // in units of log 2
  float l[Shape::kRowTiles][2];  // of the columns of this thread
  // Used with rows of bytes. Queries are divided by powers of two, for bf16 has more of them than
  // fp16; these are multiplied by the softmax scale.
  float q_scale[Shape::kRowTiles][2];
  // Used with rows of 4 bits (code_rows.h): sums of p * zero, of the columns of this thread.
  float z[Shape::kRowTiles][2][Shape::kGroups];

  KVM_GPU void reset();
  // Loads this lane's part of row lane / 4 + 8 * half, whose channels begin at `from`; zeros where
  // it is not valid.
  KVM_GPU void load_queries(const uint16_t* from, bool valid, uint32_t row_tile, uint32_t half,
                            const DecodeParams& p, Fragment (&q)[kQuerySteps]);
  template <class Queries>
  KVM_GPU void scores(const Queries& queries, SharedAddress keys, Scores& s);
  // Columns: key(n, i), raise(score, n, i) and apply(weight, n, i) for column i of tile n of the
  // tile's columns that this lane has.
  template <class Columns>
  KVM_GPU void scale(const Columns& columns, float scale_log2, Scores& s);
  // weight_of(n, i): the log weight of the token of a column.
  template <class WeightOf>
  KVM_GPU void cap_and_weigh(const DecodeParams& p, WeightOf weight_of, Scores& s);
  template <class Columns>
  KVM_GPU void soften(uint32_t row_tile, const Columns& columns, float (&s)[Shape::kTile / 8][4]);
  KVM_GPU void add_values(SharedAddress values, const Scores& s);
  // Of all columns.
  KVM_GPU float sum_of(uint32_t row_tile, uint32_t half) const;
  // Stores the channels of a row that this lane has, times `factor`, into the row at `to`.
  KVM_GPU void store_channels(uint32_t row_tile, uint32_t half, float factor, SharedAddress to);

 private:
  KVM_GPU void add_bytes(const uint32_t (&a)[Shape::kRowTiles][4], uint32_t low, uint32_t high,
                         uint32_t chunk);
  KVM_GPU void load_scaled(const uint16_t* from, bool valid, uint32_t row_tile, uint32_t half,
                           Dtype dtype, float scale_log2, Fragment (&q)[kQuerySteps]);
};

template <class Shape>
KVM_GPU void WarpRows<Shape>::reset() {
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      m[t][half] = minus_infinity();
      l[t][half] = 0.0f;
      if constexpr (Shape::kStepped) {
#pragma unroll
        for (float& zeros : z[t][half]) {
          zeros = 0.0f;
        }
      }
    }
#pragma unroll
    for (uint32_t n = 0; n < kOutTiles; ++n) {
      o[t][n][0] = o[t][n][1] = o[t][n][2] = o[t][n][3] = 0.0f;
    }
  }
}

// A row of queries for keys of bytes, of which load_matrix gives each lane four channels of a step:
// they are channels 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of the product, so those of queries are
// dealt alike. Divided so that the largest of the row is about 2^8.
template <class Shape>
KVM_GPU void WarpRows<Shape>::load_scaled(const uint16_t* from, bool valid, uint32_t row_tile,
                                          uint32_t half, Dtype dtype, float scale_log2,
                                          Fragment (&q)[kQuerySteps]) {
  uint32_t top = 0;
#pragma unroll
  for (uint32_t k = 0; k < kQuerySteps; ++k) {
    const Word2 four = valid ? load_global<Word2>(from + k * 16) : Word2{0, 0};
    q[k].words[half] = four.x;
    q[k].words[half + 2] = four.y;
  }
  const bool is_bf16 = dtype == Dtype::kBf16;
  const auto number = [is_bf16](uint32_t packed, uint32_t i) {
    return is_bf16 ? unpack<Element::kBf16>(packed, i) : unpack<Element::kF16>(packed, i);
  };
#pragma unroll
  for (uint32_t k = 0; k < kQuerySteps; ++k) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t size =
          bits_from_float(number(q[k].words[half + i / 2 * 2], i % 2)) & 0x7fffffffu;
      top = size > top ? size : top;
    }
  }
#pragma unroll
  for (uint32_t mask = 1; mask <= 2; mask *= 2) {
    const uint32_t other = bits_from_float(shuffle_xor(float_from_bits(top), mask));
    top = other > top ? other : top;
  }
  // 2^e by its bits, e + 127 << 23. Within what fp32 has, both of 2^(8 - e) and 2^(e - 8).
  constexpr uint32_t kLeast = 9, kMost = 254;
  const uint32_t exponent = top >> 23;
  const uint32_t e = exponent < kLeast ? kLeast : exponent > kMost ? kMost : exponent;
  q_scale[row_tile][half] = float_from_bits((e - 8) << 23) * scale_log2;
  const float down = float_from_bits((127 + 8 + 127 - e) << 23);
#pragma unroll
  for (uint32_t k = 0; k < kQuerySteps; ++k) {
#pragma unroll
    for (uint32_t i = 0; i < 4; i += 2) {
      uint32_t& two = q[k].words[half + i];
      two = pack<Element::kF16>(number(two, 0) * down, number(two, 1) * down);
    }
  }
}

template <class Shape>
KVM_GPU void WarpRows<Shape>::load_queries(const uint16_t* from, bool valid, uint32_t row_tile,
                                           uint32_t half, const DecodeParams& p,
                                           Fragment (&q)[kQuerySteps]) {
  if constexpr (Shape::kScaled) {
    load_scaled(from + lane_id() % 4 * 4, valid, row_tile, half, p.tensors.dtype_q, p.scale_log2,
                q);
  } else {
    from += lane_id() % 4 * 2;
#pragma unroll
    for (uint32_t k = 0; k < kQuerySteps; ++k) {
      q[k].words[half] = valid ? load_global<uint32_t>(from + k * 16) : 0;
      q[k].words[half + 2] = valid ? load_global<uint32_t>(from + k * 16 + 8) : 0;
    }
  }
}

template <class Shape>
template <class Queries>
KVM_GPU void WarpRows<Shape>::scores(const Queries& queries, SharedAddress keys, Scores& s) {
  const SharedAddress at = first_keys<Shape>(keys);
  // Two chunks of 16 bytes of each key: a step of 16 channels or, of bytes, two.
  constexpr uint32_t kSteps = Shape::kScaled ? 2 : 1;
#pragma unroll
  for (uint32_t k = 0; k < Shape::kRowChunks / 2; ++k) {
    Fragment q[Shape::kRowTiles][kSteps];
#pragma unroll
    for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
      for (uint32_t step = 0; step < kSteps; ++step) {
        q[t][step] = queries.get(t, k * kSteps + step);
      }
    }
#pragma unroll
    for (uint32_t n = 0; n < Shape::kTile / 16; ++n) {
      uint32_t b[4];
      load_matrix_x4(b, moved<Shape>(at, n * 16, k * 2));
      if constexpr (Shape::kScaled) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          uint32_t wide[2];
          widen<Shape::kElement>(b[i], wide);
#pragma unroll
          for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
            mma_16x8x16<Shape::kOperand>(s[t][2 * n + i / 2], q[t][i % 2].words, wide[0], wide[1]);
          }
        }
      } else {
#pragma unroll
        for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
          mma_16x8x16<Shape::kOperand>(s[t][2 * n], q[t][0].words, b[0], b[1]);
          mma_16x8x16<Shape::kOperand>(s[t][2 * n + 1], q[t][0].words, b[2], b[3]);
        }
      }
    }
  }
  if constexpr (Shape::kRowChunks % 2 != 0) {
    // The chunk without a neighbour, of 32 tokens at once.
    constexpr uint32_t kLast = Shape::kRowChunks - 1;
    Fragment q[Shape::kRowTiles];
#pragma unroll
    for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
      q[t] = queries.get(t, kLast);
    }
#pragma unroll
    for (uint32_t first = 0; first < Shape::kTile; first += 32) {
      uint32_t b[4];
      load_matrix_x4(b, keys + tile_offset<Shape>(first + lane_id(), kLast));
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        uint32_t wide[2];
        widen<Shape::kElement>(b[i], wide);
#pragma unroll
        for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
          mma_16x8x16<Shape::kOperand>(s[t][first / 8 + i], q[t].words, wide[0], wide[1]);
        }
      }
    }
  }
}

template <class Shape>
template <class Columns>
KVM_GPU void WarpRows<Shape>::scale(const Columns& columns, float scale_log2, Scores& s) {
#pragma unroll
  for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
#pragma unroll
      for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
        if constexpr (Shape::kScaled) {
          s[t][n][i] *= columns.key(n, i % 2) * q_scale[t][i / 2];
        } else {
          s[t][n][i] *= scale_log2;
        }
      }
    }
  }
}

template <class Shape>
template <class WeightOf>
KVM_GPU void WarpRows<Shape>::cap_and_weigh(const DecodeParams& p, WeightOf weight_of, Scores& s) {
  const bool capped = p.softcap_log2 != 0.0f;
#pragma unroll
  for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const float weight = weight_of(n, i) * kLog2E;
#pragma unroll
      for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
          float& score = s[t][n][2 * half + i];
          score = (capped ? soft_cap(p, score) : score) + weight;
        }
      }
    }
  }
}

// From scores, in units of log 2, to weights; brings the state of 16 rows to the new maximum.
template <class Shape>
template <class Columns>
KVM_GPU void WarpRows<Shape>::soften(uint32_t row_tile, const Columns& columns,
                                     float (&s)[Shape::kTile / 8][4]) {
  float factor[2];
  bool grew = false;
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    float top = m[row_tile][half];
#pragma unroll
    for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        top = fmaxf(top, columns.raise(s[n][2 * half + i], n, i));
      }
    }
    top = fmaxf(top, shuffle_xor(top, 1));
    top = fmaxf(top, shuffle_xor(top, 2));
    // A row that has seen nothing yet: -inf - -inf would be NaN.
    const float base = top == minus_infinity() ? 0.0f : top;
    const Decay<Shape::kNarrow> decay(m[row_tile][half] - base);
    factor[half] = decay.whole;
    grew = grew || top > m[row_tile][half];
    float sum = 0.0f;
#pragma unroll
    for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        float& weight = s[n][2 * half + i];
        weight = exp2_fast(weight - base);
        sum += weight;
        weight = columns.apply(weight, n, i);
      }
    }
    l[row_tile][half] = decay.of_sum(l[row_tile][half]) + sum;
    m[row_tile][half] = top;
  }
  // Most tiles move no maximum; then all factors are 1.
  if (any_lane(grew)) {
#pragma unroll
    for (uint32_t n = 0; n < kOutTiles; ++n) {
      o[row_tile][n][0] *= factor[0];
      o[row_tile][n][1] *= factor[0];
      o[row_tile][n][2] *= factor[1];
      o[row_tile][n][3] *= factor[1];
    }
    if constexpr (Shape::kStepped) {
#pragma unroll
      for (uint32_t g = 0; g < Shape::kGroups; ++g) {
        z[row_tile][0][g] *= factor[0];
        z[row_tile][1][g] *= factor[1];
      }
    }
  }
}

// Adds a chunk of values that are bytes: a is weights of 16 tokens, low and high are of 8 each.
// Pairs of bytes were transposed: the even channels of the chunk make one tile of results, the odd
// ones the next.
template <class Shape>
KVM_GPU void WarpRows<Shape>::add_bytes(const uint32_t (&a)[Shape::kRowTiles][4], uint32_t low,
                                        uint32_t high, uint32_t chunk) {
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    uint32_t wide[2];
    widen<Shape::kElement>(
        i == 0 ? permute_bytes<0x6420>(low, high) : permute_bytes<0x7531>(low, high), wide);
#pragma unroll
    for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
      mma_16x8x16<Shape::kOperand>(o[t][2 * chunk + i], a[t], wide[0], wide[1]);
    }
  }
}

template <class Shape>
KVM_GPU void WarpRows<Shape>::add_values(SharedAddress values, const Scores& s) {
  const SharedAddress at = first_values<Shape>(values);
  // The chunk without a neighbour, of 32 tokens at once.
  [[maybe_unused]] constexpr uint32_t kLast = Shape::kRowChunks - 1;
  [[maybe_unused]] uint32_t last[4];
#pragma unroll
  for (uint32_t k = 0; k < Shape::kTile / 16; ++k) {
    // The accumulators of two score tiles are, packed, the A fragment of the next product.
    uint32_t a[Shape::kRowTiles][4];
#pragma unroll
    for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
      a[t][0] = pack<Shape::kOperand>(s[t][2 * k][0], s[t][2 * k][1]);
      a[t][1] = pack<Shape::kOperand>(s[t][2 * k][2], s[t][2 * k][3]);
      a[t][2] = pack<Shape::kOperand>(s[t][2 * k + 1][0], s[t][2 * k + 1][1]);
      a[t][3] = pack<Shape::kOperand>(s[t][2 * k + 1][2], s[t][2 * k + 1][3]);
    }
    if constexpr (Shape::kRowChunks % 2 != 0) {
      if (k % 2 == 0) {
        load_matrix_x4_transposed(last, values + tile_offset<Shape>(k * 16 + lane_id(), kLast));
      }
      add_bytes(a, last[k % 2 * 2], last[k % 2 * 2 + 1], kLast);
    }
#pragma unroll
    for (uint32_t n = 0; n < Shape::kRowChunks / 2; ++n) {
      uint32_t b[4];
      load_matrix_x4_transposed(b, moved<Shape>(at, k * 16, n * 2));
      if constexpr (Shape::kScaled) {
        add_bytes(a, b[0], b[1], 2 * n);
        add_bytes(a, b[2], b[3], 2 * n + 1);
      } else {
#pragma unroll
        for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
          mma_16x8x16<Shape::kOperand>(o[t][2 * n], a[t], b[0], b[1]);
          mma_16x8x16<Shape::kOperand>(o[t][2 * n + 1], a[t], b[2], b[3]);
        }
      }
    }
  }
}

template <class Shape>
KVM_GPU float WarpRows<Shape>::sum_of(uint32_t row_tile, uint32_t half) const {
  float sum = l[row_tile][half];
  sum += shuffle_xor(sum, 1);
  sum += shuffle_xor(sum, 2);
  return sum;
}

template <class Shape>
KVM_GPU void WarpRows<Shape>::store_channels(uint32_t row_tile, uint32_t half, float factor,
                                             SharedAddress to) {
  if constexpr (Shape::kScaled) {
#pragma unroll
    for (uint32_t n = 0; n < kOutTiles; n += 2) {
      const float(&even)[4] = o[row_tile][n];
      const float(&odd)[4] = o[row_tile][n + 1];
      store_shared(to + (n * 8 + lane_id() % 4 * 4) * 4,
                   Float4{even[2 * half] * factor, odd[2 * half] * factor,
                          even[2 * half + 1] * factor, odd[2 * half + 1] * factor});
    }
  } else {
#pragma unroll
    for (uint32_t n = 0; n < kOutTiles; ++n) {
      store_shared(
          to + (n * 8 + lane_id() % 4 * 2) * 4,
          Float2{o[row_tile][n][2 * half] * factor, o[row_tile][n][2 * half + 1] * factor});
    }
  }
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_WARP_ROWS_H_
