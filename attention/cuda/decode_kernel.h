// SPDX-License-Identifier: Apache-2.0
// Exact attention of a few query rows over paged keys and values: the split-KV decode kernel.
// docs/gpu.md has the reasons.
//
// A block takes its pieces of work one after the other. Its warps share the tiles of kTile tokens
// of a piece, tile t going to warp t % kWarps, and each streams its own through kStages stages of
// shared memory that no other warp touches: until the end of a piece there is no block barrier.
// Per tile:
//   S = Q K^T       mma m16n8k16, the rows of the group packed in M; fp32 sums
//   s = S * scale_log2, maybe soft-capped, + log weight * log2(e); -inf for tokens not seen
//   m' = max(m, s); p = 2^(s - m'); l = l 2^(m - m') + sum p; o = o 2^(m - m') + round(p) V
// p is rounded to the element type for the product with V, not for l. At the end the warps' states
// merge in a fixed order.
//
// Rows of bytes (codecs/int8.h, float8.h) become fp16 on their way to the products, which is exact;
// scores are multiplied by the scales of their keys. Scales of values have any size and fp16 has
// not, so they count in the maximum, and the largest weight is 1 whatever they are:
//   m' = max(m, s + log2 scale); p as above; o = o 2^(m - m') + round(p scale) V
// Beyond 2^+-kMostLogScale they count as that there, for then l would leave what fp32 has. Factors
// 2^(m - m') may leave it before: Decay.
//
// Shared memory, per warp: kStages stages of [K tile][V tile], a tile being [token][dim] with the
// 16-byte chunk c of row r at chunk c xor (r % 8), so that neither the copies into it nor
// load_matrix have bank conflicts (rows of 64 bytes lie two in a line: c xor (r / 2 % 4)). At the
// end of a piece the same bytes hold the warp's state: o [row][dim + 4], m [row], l [row] in fp32.
#ifndef KVM_ATTENTION_CUDA_DECODE_KERNEL_H_
#define KVM_ATTENTION_CUDA_DECODE_KERNEL_H_

#include "attention/cuda/pages.h"
#include "attention/cuda/params.h"
#include "attention/cuda/primitives.h"

namespace kvm::attention::gpu {

// REQUIRES: kDim of 64, 128, 256; kTile a multiple of 16, at most 32; kStages >= 2.
template <Element kElementType, uint32_t kDimValue, uint32_t kTileTokens, uint32_t kStageCount,
          uint32_t kWarpCount, uint32_t kRowTileCount>
struct DecodeShape {
  static constexpr Element kElement = kElementType;
  static constexpr uint32_t kDim = kDimValue;
  static constexpr uint32_t kTile = kTileTokens;
  static constexpr uint32_t kStages = kStageCount;
  static constexpr uint32_t kWarps = kWarpCount;
  static constexpr uint32_t kRowTiles = kRowTileCount;  // of 16 rows

  static constexpr uint32_t kThreads = 32 * kWarps;
  static constexpr uint32_t kRows = 16 * kRowTiles;
  static constexpr bool kScaled = kIsScaled<kElement>;  // rows of bytes
  // The matrix unit gets these: bytes of either kind are exact in fp16.
  static constexpr Element kOperand = kScaled ? Element::kF16 : kElement;
  static constexpr uint32_t kRowBytes = kDim * (kScaled ? 1 : 2);
  static constexpr uint32_t kRowChunks = kRowBytes / 16;
  static constexpr uint32_t kPlaneBytes = kTile * kRowBytes;
  static constexpr uint32_t kStageBytes = 2 * kPlaneBytes;
  static constexpr uint32_t kWarpBytes = kStages * kStageBytes;
  static constexpr uint32_t kSharedBytes = kWarps * kWarpBytes;
  // Four floats beyond the channels put the rows of a quad into different banks.
  static constexpr uint32_t kStateStride = kDim + 4;
  static constexpr uint32_t kStateBytes = kRows * (kStateStride + 2) * 4;

  static_assert(kDim % 64 == 0 && kDim <= 256 && kTile % 16 == 0 && kTile <= 32 && kStages >= 2);
  static_assert(kStateBytes <= kWarpBytes);
};

inline constexpr float kMostLogScale = 100.0f;

// 2^x for a state whose maximum grows by -x. Scales of values may make it grow by more than the 126
// that floats have, but sums of weights, which do not have those scales in them, still count then:
// they are multiplied by the root twice.
template <bool kScaled>
struct Decay {
  float whole, root;
  KVM_GPU explicit Decay(float x) {
    if constexpr (kScaled) {
      root = exp2_fast(x * 0.5f);
      whole = root * root;
    } else {
      whole = exp2_fast(x);
    }
  }
  KVM_GPU float of_sum(float sum) const { return kScaled ? sum * root * root : sum * whole; }
};

// The scales of the values of a thread's columns of a tile.
template <uint32_t kTile, bool kScaled>
struct ValueScales {
  KVM_GPU void load(uint32_t) {}
  KVM_GPU float raise(float score, uint32_t, uint32_t) const { return score; }
  KVM_GPU float apply(float weight, uint32_t, uint32_t) const { return weight; }
};

template <uint32_t kTile>
struct ValueScales<kTile, true> {
  float scale[kTile / 8][2];
  float log[kTile / 8][2];

  // scales: of this lane's token, as WarpTask::scales has them.
  KVM_GPU void load(uint32_t scales) {
    const float own = float_from_bits(scales & 0xffff0000u);
    // A NaN becomes the least.
    const float own_log = fminf(fmaxf(log2_fast(own), -kMostLogScale), kMostLogScale);
#pragma unroll
    for (uint32_t n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        scale[n][i] = shuffle(own, n * 8 + lane_id() % 4 * 2 + i);
        log[n][i] = shuffle(own_log, n * 8 + lane_id() % 4 * 2 + i);
      }
    }
  }
  KVM_GPU float raise(float score, uint32_t n, uint32_t i) const { return score + log[n][i]; }
  // The scale of a value that is not seen may be a NaN.
  KVM_GPU float apply(float weight, uint32_t n, uint32_t i) const {
    return weight == 0.0f ? 0.0f : weight * scale[n][i];
  }
};

// The part of a piece that one warp evaluates: its queries, its state, its stages.
template <class Shape>
struct WarpTask {
  static constexpr uint32_t kQuerySteps = Shape::kDim / 16;
  static constexpr uint32_t kOutTiles = Shape::kDim / 8;

  // Fragments of mma.m16n8k16; rows lane / 4 and lane / 4 + 8 of each tile of rows.
  uint32_t q[Shape::kRowTiles][kQuerySteps][4];
  float o[Shape::kRowTiles][kOutTiles][4];
  float m[Shape::kRowTiles][2];  // in units of log 2
  float l[Shape::kRowTiles][2];  // of the columns of this thread
  // Used with rows of bytes. Queries are divided by powers of two, for bf16 has more of them than
  // fp16.
  float q_scale[Shape::kRowTiles][2];
  uint32_t scales[Shape::kStages] = {};  // of this lane's token of the next tiles: V's above K's
  uint32_t next_scales = 0;              // from next_row to the scale of its K, wrapping around
  uint32_t limit_least;                  // tokens that all rows see: tiles below need no mask

  SharedAddress stages;
  uint64_t next_row = 0;     // address of this lane's token of the tile to be copied next; 0 = none
  float next_weight = 0.0f;  // log weight, times log2(e), of its token of the next tile

  KVM_GPU void load_queries(const DecodeParams& p, const Work& work);
  KVM_GPU void load_row_of_queries(const uint16_t* from, bool valid, uint32_t row_tile,
                                   uint32_t half, Dtype dtype);
  KVM_GPU void resolve(const DecodeParams& p, const PageClass& of, const Work& work, uint32_t tile);
  KVM_GPU void weigh(const DecodeParams& p, const Work& work, uint32_t tile);
  // The tile is the `ahead`-th behind the one that is evaluated next.
  KVM_GPU void copy_tile(const PageClass& of, uint32_t stage, uint32_t ahead, const void* anywhere);
  KVM_GPU void evaluate_tile(const DecodeParams& p, uint32_t piece, uint32_t stage,
                             uint32_t token_first, bool weighted);
  KVM_GPU void hide_unseen(const DecodeParams& p, const Work& work, uint32_t token_first,
                           float (&s)[Shape::kRowTiles][Shape::kTile / 8][4]);
  KVM_GPU void scores(SharedAddress keys, float (&s)[Shape::kRowTiles][Shape::kTile / 8][4]);
  KVM_GPU void scale_scores(float (&s)[Shape::kRowTiles][Shape::kTile / 8][4]);
  KVM_GPU void soften(uint32_t row_tile, float (&s)[Shape::kTile / 8][4]);
  KVM_GPU void add_values(SharedAddress values,
                          const float (&s)[Shape::kRowTiles][Shape::kTile / 8][4]);
  KVM_GPU void store_state(uint32_t n_rows);
};

// Byte offset of chunk `chunk` of row `row` of a tile.
template <class Shape>
KVM_GPU uint32_t tile_offset(uint32_t row, uint32_t chunk) {
  if constexpr (Shape::kRowChunks >= 8) {
    return row * Shape::kRowBytes + ((chunk ^ (row % 8)) * 16);
  } else {
    return row * Shape::kRowBytes + ((chunk ^ (row / 2 % 4)) * 16);
  }
}

// A row of queries for keys of bytes, of which load_matrix gives each lane four channels of a step:
// they are channels 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of the product, so those of queries are
// dealt alike. Divided so that the largest of the row is about 2^8.
template <class Shape>
KVM_GPU void WarpTask<Shape>::load_row_of_queries(const uint16_t* from, bool valid,
                                                  uint32_t row_tile, uint32_t half, Dtype dtype) {
  uint32_t top = 0;
#pragma unroll
  for (uint32_t k = 0; k < kQuerySteps; ++k) {
    const Word2 four = valid ? load_global<Word2>(from + k * 16) : Word2{0, 0};
    q[row_tile][k][half] = four.x;
    q[row_tile][k][half + 2] = four.y;
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
          bits_from_float(number(q[row_tile][k][half + i / 2 * 2], i % 2)) & 0x7fffffffu;
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
  q_scale[row_tile][half] = float_from_bits((e - 8) << 23);
  const float down = float_from_bits((127 + 8 + 127 - e) << 23);
#pragma unroll
  for (uint32_t k = 0; k < kQuerySteps; ++k) {
#pragma unroll
    for (uint32_t i = 0; i < 4; i += 2) {
      uint32_t& two = q[row_tile][k][half + i];
      two = pack<Element::kF16>(number(two, 0) * down, number(two, 1) * down);
    }
  }
}

template <class Shape>
KVM_GPU void WarpTask<Shape>::load_queries(const DecodeParams& p, const Work& work) {
  const Request& request = work.request;
  const uint32_t n_rows = request.n_query * p.tensors.group;
  const uint32_t n_before = request.n_tokens - request.n_query + 1;
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = work.row_first + t * 16 + half * 8 + lane_id() / 4;
      const bool valid = row < n_rows;
      const RowPlace at = row_place(request.q_token, work.kv_head, p.tensors.group, row);
      const uint16_t* from = static_cast<const uint16_t*>(p.tensors.q) +
                             at.token * p.tensors.q_stride_token +
                             at.q_head * p.tensors.q_stride_head;
      if constexpr (Shape::kScaled) {
        load_row_of_queries(from + lane_id() % 4 * 4, valid, t, half, p.tensors.dtype_q);
      } else {
        from += lane_id() % 4 * 2;
#pragma unroll
        for (uint32_t k = 0; k < kQuerySteps; ++k) {
          q[t][k][half] = valid ? load_global<uint32_t>(from + k * 16) : 0;
          q[t][k][half + 2] = valid ? load_global<uint32_t>(from + k * 16 + 8) : 0;
        }
      }
      m[t][half] = minus_infinity();
      l[t][half] = 0.0f;
    }
#pragma unroll
    for (uint32_t n = 0; n < kOutTiles; ++n) {
      o[t][n][0] = o[t][n][1] = o[t][n][2] = o[t][n][3] = 0.0f;
    }
  }
  limit_least = n_before < request.tree_first ? n_before : request.tree_first;
  limit_least = limit_least < work.end ? limit_least : work.end;
  next_weight = 0.0f;
}

// Finds the token of this lane in tile `tile` of the piece.
template <class Shape>
KVM_GPU void WarpTask<Shape>::resolve(const DecodeParams& p, const PageClass& of, const Work& work,
                                      uint32_t tile) {
  const Request& request = work.request;
  const uint32_t token = work.begin + tile * Shape::kTile + lane_id() % Shape::kTile;
  next_row = 0;
  if (token < work.end) {
    const uint32_t at = list_token(request, token);
    const uint32_t page = divide(p.pool.page_tokens, at);
    const uint32_t row = at - page * p.pool.page_tokens.divisor;
    const uint32_t entry = load_global<uint32_t>(p.page_table + request.table + page);
    next_row = reinterpret_cast<uint64_t>(page_row(p.pool, of, entry, row, Shape::kRowBytes) +
                                          static_cast<uint64_t>(work.head) * of.head_stride_bytes);
    if constexpr (Shape::kScaled) {
      next_scales = of.scales_offset_bytes + (work.head * p.pool.page_tokens.divisor + row) * 2 -
                    row * Shape::kRowBytes - work.head * of.head_stride_bytes;
    }
  }
}

// Loads the log weight of the token of this lane in tile `tile`.
template <class Shape>
KVM_GPU void WarpTask<Shape>::weigh(const DecodeParams& p, const Work& work, uint32_t tile) {
  const Request& request = work.request;
  const uint32_t token = work.begin + tile * Shape::kTile + lane_id() % Shape::kTile;
  if (token < work.end) {
    const int64_t at = request.log_weights +
                       static_cast<int64_t>(work.kv_head) * request.log_weight_stride +
                       list_token(request, token);
    next_weight = load_global<float>(p.log_weights + at) * kLog2E;
  }
}

// Begins copying the resolved tile. Tokens that the piece does not have become zero rows: a row of
// V that is multiplied by a weight of 0 must not hold a NaN.
template <class Shape>
KVM_GPU void WarpTask<Shape>::copy_tile(const PageClass& of, uint32_t stage, uint32_t ahead,
                                        const void* anywhere) {
  if constexpr (Shape::kScaled) {
    uint32_t loaded = 0;
    if (next_row != 0) {
      const auto* k_scale =
          reinterpret_cast<const uint8_t*>(next_row) + static_cast<int32_t>(next_scales);
      loaded = load_global<uint16_t>(k_scale) |
               static_cast<uint32_t>(load_global<uint16_t>(k_scale + of.v_scales_offset_bytes))
                   << 16;
    }
    scales[ahead] = loaded;
  }
  const SharedAddress to = stages + stage * Shape::kStageBytes;
  constexpr uint32_t kSteps = Shape::kTile * Shape::kRowChunks / 32;
#pragma unroll
  for (uint32_t step = 0; step < kSteps; ++step) {
    const uint32_t index = step * 32 + lane_id();
    const uint32_t row = index / Shape::kRowChunks;
    const uint32_t chunk = index % Shape::kRowChunks;
    const uint64_t from = shuffle(next_row, row);
    const bool valid = from != 0;
    const uint8_t* k = valid ? reinterpret_cast<const uint8_t*>(from) + chunk * 16
                             : static_cast<const uint8_t*>(anywhere);
    const uint8_t* v = valid ? k + of.v_offset_bytes : k;
    const SharedAddress at = to + tile_offset<Shape>(row, chunk);
    copy_async_16(at, k, valid);
    copy_async_16(at + Shape::kPlaneBytes, v, valid);
  }
}

template <class Shape>
KVM_GPU void WarpTask<Shape>::scores(SharedAddress keys,
                                     float (&s)[Shape::kRowTiles][Shape::kTile / 8][4]) {
  const uint32_t row = lane_id() / 16 * 8 + lane_id() % 8;
  const uint32_t half = lane_id() / 8 % 2;
  // Two chunks of 16 bytes of each key: a step of 16 channels or, of bytes, two.
#pragma unroll
  for (uint32_t k = 0; k < Shape::kRowChunks / 2; ++k) {
#pragma unroll
    for (uint32_t n = 0; n < Shape::kTile / 16; ++n) {
      uint32_t b[4];
      load_matrix_x4(b, keys + tile_offset<Shape>(n * 16 + row, k * 2 + half));
      if constexpr (Shape::kScaled) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          uint32_t wide[2];
          widen<Shape::kElement>(b[i], wide);
#pragma unroll
          for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
            mma_16x8x16<Shape::kOperand>(s[t][2 * n + i / 2], q[t][2 * k + i % 2], wide[0],
                                         wide[1]);
          }
        }
      } else {
#pragma unroll
        for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
          mma_16x8x16<Shape::kOperand>(s[t][2 * n], q[t][k], b[0], b[1]);
          mma_16x8x16<Shape::kOperand>(s[t][2 * n + 1], q[t][k], b[2], b[3]);
        }
      }
    }
  }
}

// Scores of keys of bytes: times the scales of the keys and of the queries.
template <class Shape>
KVM_GPU void WarpTask<Shape>::scale_scores(float (&s)[Shape::kRowTiles][Shape::kTile / 8][4]) {
#pragma unroll
  for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const float k_scale =
          shuffle(float_from_bits(scales[0] << 16), n * 8 + lane_id() % 4 * 2 + i);
#pragma unroll
      for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
        s[t][n][i] *= k_scale * q_scale[t][0];
        s[t][n][2 + i] *= k_scale * q_scale[t][1];
      }
    }
  }
}

// From scores, in units of log 2, to weights; brings the state of 16 rows to the new maximum.
template <class Shape>
KVM_GPU void WarpTask<Shape>::soften(uint32_t row_tile, float (&s)[Shape::kTile / 8][4]) {
  float factor[2];
  bool grew = false;
  ValueScales<Shape::kTile, Shape::kScaled> of_columns;
  of_columns.load(scales[0]);
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    float top = m[row_tile][half];
#pragma unroll
    for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        top = fmaxf(top, of_columns.raise(s[n][2 * half + i], n, i));
      }
    }
    top = fmaxf(top, shuffle_xor(top, 1));
    top = fmaxf(top, shuffle_xor(top, 2));
    // A row that has seen nothing yet: -inf - -inf would be NaN.
    const float base = top == minus_infinity() ? 0.0f : top;
    const Decay<Shape::kScaled> decay(m[row_tile][half] - base);
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
        weight = of_columns.apply(weight, n, i);
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
  }
}

template <class Shape>
KVM_GPU void WarpTask<Shape>::add_values(SharedAddress values,
                                         const float (&s)[Shape::kRowTiles][Shape::kTile / 8][4]) {
  const uint32_t row = lane_id() / 8 % 2 * 8 + lane_id() % 8;
  const uint32_t half = lane_id() / 16;
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
#pragma unroll
    for (uint32_t n = 0; n < Shape::kRowChunks / 2; ++n) {
      uint32_t b[4];
      load_matrix_x4_transposed(b, values + tile_offset<Shape>(k * 16 + row, n * 2 + half));
      if constexpr (Shape::kScaled) {
        // Pairs of bytes were transposed: the even channels of a chunk make one tile of results,
        // the odd ones the next.
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          const uint32_t low = b[i / 2 * 2], high = b[i / 2 * 2 + 1];
          uint32_t wide[2];
          widen<Shape::kElement>(
              i % 2 == 0 ? permute_bytes<0x6420>(low, high) : permute_bytes<0x7531>(low, high),
              wide);
#pragma unroll
          for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
            mma_16x8x16<Shape::kOperand>(o[t][4 * n + i], a[t], wide[0], wide[1]);
          }
        }
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

// A logit in units of log 2, soft-capped. Its error is a few ulp of the cap.
KVM_GPU float soft_cap(const DecodeParams& p, float score) {
  const float decay = exp2_fast(-fabsf(score * p.softcap_rate));
  const float size = p.softcap_log2 * (1.0f - decay) * reciprocal_fast(1.0f + decay);
  return score < 0.0f ? -size : size;
}

// Sets the scores of tokens that a row does not see to -inf. Only tiles at the end of a piece come
// here, so the request is read again: registers are what the loop over tiles is short of.
template <class Shape>
KVM_GPU void WarpTask<Shape>::hide_unseen(const DecodeParams& p, const Work& work,
                                          uint32_t token_first,
                                          float (&s)[Shape::kRowTiles][Shape::kTile / 8][4]) {
  const Request& request = work.request;
  const bool tree = request.tree_first != kNoTree;
  const uint32_t n_before = request.n_tokens - request.n_query + 1;
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = work.row_first + t * 16 + half * 8 + lane_id() / 4;
      const uint32_t query = row / p.tensors.group;
      const uint64_t seen = tree && query < request.n_query
                                ? load_global<uint64_t>(p.tree_mask + request.q_token + query)
                                : 0;
      const uint32_t limit = tree || n_before + query > work.end ? work.end : n_before + query;
#pragma unroll
      for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
          const uint32_t token = token_first + n * 8 + lane_id() % 4 * 2 + i;
          bool sees = token < limit;
          if (tree && token >= request.tree_first) {
            sees = sees && (seen >> (list_token(request, token) - request.tree_list) % 64 & 1) != 0;
          }
          if (!sees) {
            s[t][n][2 * half + i] = minus_infinity();
          }
        }
      }
    }
  }
}

// Folds the tile in `stage`, whose first token is `token_first`, into the state.
template <class Shape>
KVM_GPU void WarpTask<Shape>::evaluate_tile(const DecodeParams& p, uint32_t piece, uint32_t stage,
                                            uint32_t token_first, bool weighted) {
  const SharedAddress keys = stages + stage * Shape::kStageBytes;
  float s[Shape::kRowTiles][Shape::kTile / 8][4] = {};
  scores(keys, s);
  if constexpr (Shape::kScaled) {
    scale_scores(s);
  }
  const bool capped = p.softcap_log2 != 0.0f;
#pragma unroll
  for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t column = n * 8 + lane_id() % 4 * 2 + i;
      const float weight = weighted ? shuffle(next_weight, column) : 0.0f;
#pragma unroll
      for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
          float& score = s[t][n][2 * half + i];
          score = (capped ? soft_cap(p, score) : score * p.scale_log2) + weight;
        }
      }
    }
  }
  if (token_first + Shape::kTile > limit_least) {
    hide_unseen(p, p.work[piece], token_first, s);
  }
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
    soften(t, s[t]);
  }
  add_values(keys + Shape::kPlaneBytes, s);
}

// Writes the warp's state where its stages were.
template <class Shape>
KVM_GPU void WarpTask<Shape>::store_state(uint32_t n_rows) {
  const SharedAddress m_at = stages + Shape::kRows * Shape::kStateStride * 4;
  const SharedAddress l_at = m_at + Shape::kRows * 4;
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      float sum = l[t][half];
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      const uint32_t row = t * 16 + half * 8 + lane_id() / 4;
      if (row < n_rows) {
        if (lane_id() % 4 == 0) {
          store_shared(m_at + row * 4, m[t][half]);
          store_shared(l_at + row * 4, sum);
        }
        const SharedAddress to = stages + row * Shape::kStateStride * 4;
        if constexpr (Shape::kScaled) {
#pragma unroll
          for (uint32_t n = 0; n < kOutTiles; n += 2) {
            const float(&even)[4] = o[t][n];
            const float(&odd)[4] = o[t][n + 1];
            store_shared(
                to + (n * 8 + lane_id() % 4 * 4) * 4,
                Float4{even[2 * half], odd[2 * half], even[2 * half + 1], odd[2 * half + 1]});
          }
        } else {
#pragma unroll
          for (uint32_t n = 0; n < kOutTiles; ++n) {
            store_shared(to + (n * 8 + lane_id() % 4 * 2) * 4,
                         Float2{o[t][n][2 * half], o[t][n][2 * half + 1]});
          }
        }
      }
    }
  }
}

// Rows of the piece that there are.
template <class Shape>
KVM_GPU uint32_t piece_rows(const DecodeParams& p, const Work& work) {
  const uint32_t rows_left = work.request.n_query * p.tensors.group - work.row_first;
  return rows_left < Shape::kRows ? rows_left : Shape::kRows;
}

// Streams the warp's tiles of a piece and leaves the state in shared memory.
template <class Shape>
KVM_GPU void evaluate_piece(const DecodeParams& p, uint32_t piece) {
  const Work work = p.work[piece];
  const PageClass& of = p.pool.classes[work.request.page_class];
  const uint32_t n_tiles = (work.end - work.begin + Shape::kTile - 1) / Shape::kTile;
  const bool weighted = work.request.log_weights >= 0;
  WarpTask<Shape> task;
  task.stages = warp_id() * Shape::kWarpBytes;

  uint32_t ahead = warp_id();  // the next tile to copy
#pragma unroll
  for (uint32_t stage = 0; stage + 1 < Shape::kStages; ++stage) {
    if (ahead < n_tiles) {
      task.resolve(p, of, work, ahead);
      task.copy_tile(of, stage, stage, p.pool.segments[0]);
    }
    copy_async_commit();
    ahead += Shape::kWarps;
  }
  task.load_queries(p, work);
  task.resolve(p, of, work, ahead);
  if (weighted) {
    task.weigh(p, work, warp_id());
  }

  uint32_t stage = 0;
  for (uint32_t tile = warp_id(); tile < n_tiles; tile += Shape::kWarps) {
    // One group is committed per tile, empty or not, so counting groups counts tiles.
    copy_async_wait<Shape::kStages - 2>();
    sync_warp();
    // The stage of the tile before: every lane has read it, for all have come past the barrier.
    if (ahead < n_tiles) {
      task.copy_tile(of, stage == 0 ? Shape::kStages - 1 : stage - 1, Shape::kStages - 1,
                     p.pool.segments[0]);
    }
    copy_async_commit();
    ahead += Shape::kWarps;
    task.resolve(p, of, work, ahead);
    task.evaluate_tile(p, piece, stage, work.begin + tile * Shape::kTile, weighted);
    if (weighted) {
      task.weigh(p, work, tile + Shape::kWarps);
    }
    if constexpr (Shape::kScaled) {
#pragma unroll
      for (uint32_t i = 0; i + 1 < Shape::kStages; ++i) {
        task.scales[i] = task.scales[i + 1];
      }
    }
    stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
  }
  // No copy is under way: the groups not waited for are empty. But lanes may still read stages.
  sync_warp();
  task.store_state(piece_rows<Shape>(p, p.work[piece]));
}

// Merges the warps' states and writes the result of the piece.
template <class Shape>
KVM_GPU void finish_piece(const DecodeParams& p, const Work& work) {
  const uint32_t n_rows = piece_rows<Shape>(p, work);
  constexpr uint32_t kColumns = Shape::kDim / 4;
  for (uint32_t index = thread_id(); index < n_rows * kColumns; index += Shape::kThreads) {
    const uint32_t row = index / kColumns, channel = index % kColumns * 4;
    const SharedAddress m_at = (Shape::kRows * Shape::kStateStride + row) * 4;
    const SharedAddress l_at = m_at + Shape::kRows * 4;
    float top = minus_infinity();
#pragma unroll
    for (uint32_t warp = 0; warp < Shape::kWarps; ++warp) {
      top = fmaxf(top, load_shared<float>(warp * Shape::kWarpBytes + m_at));
    }
    const float base = top == minus_infinity() ? 0.0f : top;
    float sum = 0.0f;
    Float4 o{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (uint32_t warp = 0; warp < Shape::kWarps; ++warp) {
      const SharedAddress state = warp * Shape::kWarpBytes;
      const Decay<Shape::kScaled> decay(load_shared<float>(state + m_at) - base);
      const float factor = decay.whole;
      const Float4 part = load_shared<Float4>(state + (row * Shape::kStateStride + channel) * 4);
      sum += decay.of_sum(load_shared<float>(state + l_at));
      o.x += factor * part.x;
      o.y += factor * part.y;
      o.z += factor * part.z;
      o.w += factor * part.w;
    }
    // A sum that is not a number says that the row saw one.
    const float inverse = sum != 0.0f ? 1.0f / sum : 0.0f;
    o = {o.x * inverse, o.y * inverse, o.z * inverse, o.w * inverse};
    const float lse = sum != 0.0f ? (top + log2_fast(sum)) * kLn2 : minus_infinity();
    if (work.slot < 0) {
      const RowPlace at =
          row_place(work.request.q_token, work.kv_head, p.tensors.group, work.row_first + row);
      store_result(p.tensors, at, channel, o);
      if (channel == 0) {
        store_lse(p.tensors, at, lse);
      }
    } else {
      const uint64_t slot_row = static_cast<uint64_t>(work.slot) * Shape::kRows + row;
      store_global(p.partial_o + slot_row * Shape::kDim + channel, o);
      if (channel == 0) {
        store_global(p.partial_lse + slot_row, lse);
      }
    }
  }
}

// Does the work of one thread of one block.
template <class Shape>
KVM_GPU void decode_thread(const DecodeParams& p) {
  uint32_t piece = block_id();
  do {
    // The piece is read again at its end: registers are what the loop over tiles is short of.
    evaluate_piece<Shape>(p, piece);
    sync_block();
    finish_piece<Shape>(p, p.work[piece]);
    sync_block();  // before the next piece copies over the states
    piece = p.work[piece].next;
  } while (piece != 0);
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_DECODE_KERNEL_H_
