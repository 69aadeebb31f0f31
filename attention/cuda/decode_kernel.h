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
// load_matrix have bank conflicts. Where rows are no multiple of 8 chunks, only every second one,
// or every fourth, begins with a line of 128 bytes: there it is c xor (r / 2 % 4), or c xor
// (r / 4 % 2). Where rows are bytes, words [token] for K, then for V, follow: the one of the page
// that has the token's scale in one of its halves, for copies take no less than a word. At the end
// of a piece the same bytes hold the warp's state: o [row][kStateStride], m [row], l [row] in fp32.
#ifndef KVM_ATTENTION_CUDA_DECODE_KERNEL_H_
#define KVM_ATTENTION_CUDA_DECODE_KERNEL_H_

#include "attention/cuda/logits.h"
#include "attention/cuda/pages.h"
#include "attention/cuda/params.h"
#include "attention/cuda/primitives.h"

namespace kvm::attention::gpu {

// How many lanes of a store of the state find their bank taken: 128 bytes are stored in a turn.
constexpr uint32_t conflicts_of_stores(uint32_t stride, uint32_t channels) {
  uint32_t conflicts = 0;
  for (uint32_t first = 0; first < 32; first += 32 / channels) {
    uint32_t banks = 0;
    for (uint32_t lane = first; lane < first + 32 / channels; ++lane) {
      const uint32_t taken = ((1u << channels) - 1)
                             << (lane / 4 * stride + lane % 4 * channels) % 32;
      conflicts += (banks & taken) != 0 ? 1 : 0;
      banks |= taken;
    }
  }
  return conflicts;
}

// The largest power of 2 that divides n, at most `most`, which is one.
constexpr uint32_t power_in(uint32_t n, uint32_t most) {
  return n % most == 0 ? most : power_in(n, most / 2);
}

// REQUIRES: kDim a multiple of 16, where rows are bytes of 32, at most 256; kTile a multiple of 16,
// at most 32; kStages >= 2.
template <Element kElementType, uint32_t kDimValue, uint32_t kTileTokens, uint32_t kStageCount,
          uint32_t kWarpCount, uint32_t kRowTileCount>
struct DecodeShape {
  static constexpr bool kIsMla = false;
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
  // Chunks of a row change places within groups of so many. Of rows that follow each other,
  // kLineRows begin at different places of a line.
  static constexpr uint32_t kGroupChunks = power_in(kRowChunks, 8);
  static constexpr uint32_t kLineRows = 8 / kGroupChunks;
  // A warp copies kStepRows rows, the least that are whole copies, in kStepCopies of them.
  static constexpr uint32_t kStepRows = 32 / power_in(kRowChunks, 32);
  static constexpr uint32_t kStepCopies = kStepRows * kRowChunks / 32;
  static constexpr uint32_t kPlaneBytes = kTile * kRowBytes;
  static constexpr uint32_t kScaleBytes = kScaled ? kTile * 4 : 0;  // of a plane
  static constexpr uint32_t kStageBytes = 2 * (kPlaneBytes + kScaleBytes);
  static constexpr uint32_t kRingBytes = kStages * kStageBytes;
  // Floats beyond the channels put the rows that a store takes in one turn into different banks.
  static constexpr uint32_t kStateChannels = kScaled ? 4 : 2;  // that a lane stores at once
  static constexpr uint32_t kStateStride = kDim + 4 * kStateChannels;
  static constexpr uint32_t kStateBytes = kRows * (kStateStride + 2) * 4;
  static constexpr uint32_t kWarpBytes = kRingBytes > kStateBytes ? kRingBytes
                                                                  : (kStateBytes + 127) / 128 * 128;
  static constexpr uint32_t kSharedBytes = kWarps * kWarpBytes;

  static_assert(kRowChunks % 2 == 0 && kDim <= 256 && kTile % 16 == 0 && kTile <= 32 &&
                kStages >= 2);
  static_assert(kTile % kStepRows == 0);
  static_assert(kStateStride % kStateChannels == 0);
  static_assert(conflicts_of_stores(kStateStride, kStateChannels) == 0);
  // moved() counts on it.
  static_assert(kStageBytes % 128 == 0 && kWarpBytes % 128 == 0);
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

// The scales of a thread's columns of a tile: of keys and of values.
template <uint32_t kTile, bool kScaled>
struct ColumnScales {
  KVM_GPU float raise(float score, uint32_t, uint32_t) const { return score; }
  KVM_GPU float apply(float weight, uint32_t, uint32_t) const { return weight; }
};

template <uint32_t kTile>
struct ColumnScales<kTile, true> {
  uint32_t both[kTile / 8][2];  // V's above K's
  float log[kTile / 8][2];      // of V's

  // own: those of this lane's token.
  KVM_GPU void spread(uint32_t own) {
    // A NaN becomes the least.
    const float own_log =
        fminf(fmaxf(log2_fast(float_from_bits(own & 0xffff0000u)), -kMostLogScale), kMostLogScale);
#pragma unroll
    for (uint32_t n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        both[n][i] = shuffle(own, n * 8 + lane_id() % 4 * 2 + i);
        log[n][i] = shuffle(own_log, n * 8 + lane_id() % 4 * 2 + i);
      }
    }
  }
  KVM_GPU float key(uint32_t n, uint32_t i) const { return float_from_bits(both[n][i] << 16); }
  KVM_GPU float raise(float score, uint32_t n, uint32_t i) const { return score + log[n][i]; }
  // The scale of a value that is not seen may be a NaN.
  KVM_GPU float apply(float weight, uint32_t n, uint32_t i) const {
    return product_or_zero(weight, float_from_bits(both[n][i] & 0xffff0000u));
  }
};

// Where the token of this lane in a tile lies. The entry is loaded a tile ahead of its use, which
// therefore must not be before the copy: an address made of it is waited for.
struct Place {
  uint32_t entry;  // of the token's page; where the piece has no such token, 0, which is one too
  uint32_t row;    // among those of all heads of a plane of the page
  bool inside;     // all tokens of the tile are there, in rows of one page that follow each other
};

// The part of a piece that one warp evaluates: its queries, its state, its stages.
template <class Shape>
struct WarpTask {
  static constexpr uint32_t kQuerySteps = Shape::kDim / 16;
  static constexpr uint32_t kOutTiles = Shape::kDim / 8;
  using Scores = float[Shape::kRowTiles][Shape::kTile / 8][4];
  using Columns = ColumnScales<Shape::kTile, Shape::kScaled>;

  // Fragments of mma.m16n8k16; rows lane / 4 and lane / 4 + 8 of each tile of rows.
  uint32_t q[Shape::kRowTiles][kQuerySteps][4];
  float o[Shape::kRowTiles][kOutTiles][4];
  float m[Shape::kRowTiles][2];  // in units of log 2
  float l[Shape::kRowTiles][2];  // of the columns of this thread
  // Used with rows of bytes. Queries are divided by powers of two, for bf16 has more of them than
  // fp16; these are multiplied by the softmax scale.
  float q_scale[Shape::kRowTiles][2];
  // Of this lane's token in the i-th tile ahead, bit i: its scale of K is the upper half of the
  // word that was copied.
  uint32_t upper = 0;
  uint32_t limit_least;  // tokens that all rows see: tiles below need no mask

  SharedAddress stages;
  Place next;                // of the tile to be copied next
  float next_weight = 0.0f;  // log weight of this lane's token of the tile to be evaluated next

  KVM_GPU void load_queries(const DecodeParams& p, const Work& work);
  KVM_GPU void load_row_of_queries(const uint16_t* from, bool valid, uint32_t row_tile,
                                   uint32_t half, Dtype dtype, float scale_log2);
  KVM_GPU void look_up(const DecodeParams& p, const Work& work, uint32_t token_first);
  KVM_GPU void weigh(const DecodeParams& p, const Work& work, uint32_t token_first);
  // n_tokens: that the piece has from the first one of the tile on. The tile is the `ahead`-th
  // behind the one that is evaluated next.
  KVM_GPU void copy_tile(const DecodeParams& p, const PageClass& of, const Place& place,
                         SharedAddress to, uint32_t n_tokens, uint32_t ahead);
  KVM_GPU void copy_scales(const PageClass& of, const uint8_t* page, uint32_t row, SharedAddress to,
                           uint32_t n_tokens, uint32_t ahead);
  KVM_GPU void evaluate_tile(const DecodeParams& p, const PageClass& of, uint32_t piece,
                             SharedAddress stage, uint32_t token_first, bool weighted);
  KVM_GPU void hide_unseen(const DecodeParams& p, const Work& work, uint32_t token_first,
                           Scores& s);
  KVM_GPU void scores(SharedAddress keys, Scores& s);
  KVM_GPU uint32_t own_scales(const PageClass& of, SharedAddress scales);
  KVM_GPU void cap_and_weigh(const DecodeParams& p, bool weighted, Scores& s);
  KVM_GPU void soften(uint32_t row_tile, const Columns& columns, float (&s)[Shape::kTile / 8][4]);
  KVM_GPU void add_values(SharedAddress values, const Scores& s);
  KVM_GPU void store_state(uint32_t n_rows);
};

// Byte offset of chunk `chunk` of row `row` of a tile.
template <class Shape>
KVM_GPU uint32_t tile_offset(uint32_t row, uint32_t chunk) {
  return row * Shape::kRowBytes + ((chunk ^ (row / Shape::kLineRows % Shape::kGroupChunks)) * 16);
}

// From the address of (row, chunk) of a tile to that of (row + rows, chunk + chunks): constants,
// but for an exclusive or. REQUIRES: the numbers that are added have no bit in common, of rows in
// the lowest three.
template <class Shape>
KVM_GPU SharedAddress moved(SharedAddress from, uint32_t rows, uint32_t chunks) {
  constexpr uint32_t kInGroup = Shape::kGroupChunks - 1;
  return (from ^ (((chunks ^ rows / Shape::kLineRows) & kInGroup) * 16)) + rows * Shape::kRowBytes +
         (chunks & ~kInGroup) * 16;
}

// A row of queries for keys of bytes, of which load_matrix gives each lane four channels of a step:
// they are channels 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of the product, so those of queries are
// dealt alike. Divided so that the largest of the row is about 2^8.
template <class Shape>
KVM_GPU void WarpTask<Shape>::load_row_of_queries(const uint16_t* from, bool valid,
                                                  uint32_t row_tile, uint32_t half, Dtype dtype,
                                                  float scale_log2) {
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
  q_scale[row_tile][half] = float_from_bits((e - 8) << 23) * scale_log2;
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
        load_row_of_queries(from + lane_id() % 4 * 4, valid, t, half, p.tensors.dtype_q,
                            p.scale_log2);
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
  limit_least = seen_by_all(work);
  next_weight = 0.0f;
}

// Finds the token of this lane in the tile whose first token is `token_first`.
template <class Shape>
KVM_GPU void WarpTask<Shape>::look_up(const DecodeParams& p, const Work& work,
                                      uint32_t token_first) {
  const Request& request = work.request;
  const uint32_t lane = lane_id() % Shape::kTile;
  const uint32_t token = token_first + lane;
  const uint32_t at = list_token(request, token);
  const uint32_t page = divide(p.pool.page_tokens, at);
  const uint32_t row = at - page * p.pool.page_tokens.divisor;
  next.entry = 0;
  if (token < work.end) {
    next.entry = load_global<uint32_t>(p.page_table + request.table + page);
  }
  next.row = work.head * p.pool.page_tokens.divisor + row;
  // Tokens of one run follow each other; then the last one's row says whether a page began.
  const uint32_t run_end =
      token < request.n_first && request.n_first < work.end ? request.n_first : work.end;
  next.inside = !any_lane(row < lane || token_first + Shape::kTile > run_end);
}

// Loads the log weight of the token of this lane in the tile whose first token is `token_first`.
template <class Shape>
KVM_GPU void WarpTask<Shape>::weigh(const DecodeParams& p, const Work& work, uint32_t token_first) {
  const uint32_t token = token_first + lane_id() % Shape::kTile;
  if (token < work.end) {
    next_weight = load_global<float>(log_weight_at(p, work, token));
  }
}

// Begins copying a tile. Tokens that the piece does not have become zero rows: a row of V that is
// multiplied by a weight of 0 must not hold a NaN.
template <class Shape>
KVM_GPU void WarpTask<Shape>::copy_tile(const DecodeParams& p, const PageClass& of,
                                        const Place& place, SharedAddress to, uint32_t n_tokens,
                                        uint32_t ahead) {
  constexpr uint32_t kChunks = Shape::kRowChunks;
  const uint8_t* page = page_of(p.pool, of, place.entry);
  uint32_t row[Shape::kStepCopies], chunk[Shape::kStepCopies];
  SharedAddress at[Shape::kStepCopies];
#pragma unroll
  for (uint32_t part = 0; part < Shape::kStepCopies; ++part) {
    row[part] = (part * 32 + lane_id()) / kChunks;
    chunk[part] = (part * 32 + lane_id()) % kChunks;
    at[part] = to + tile_offset<Shape>(row[part], chunk[part]);
  }
  if (place.inside) {
    // The tile is one stretch of the plane, of which each lane takes every 32nd chunk.
    const uint32_t first = place.row * kChunks + (lane_id() - lane_id() % Shape::kTile * kChunks);
    const uint8_t* k = page + static_cast<uint64_t>(first) * 16;
    const uint8_t* v = k + of.v_offset_bytes;
#pragma unroll
    for (uint32_t rows = 0; rows < Shape::kTile; rows += Shape::kStepRows) {
#pragma unroll
      for (uint32_t part = 0; part < Shape::kStepCopies; ++part) {
        const SharedAddress there = moved<Shape>(at[part], rows, 0);
        const uint32_t offset = part * 512 + rows * Shape::kRowBytes;
        copy_async_16(there, k + offset);
        copy_async_16(there + Shape::kPlaneBytes, v + offset);
      }
    }
  } else {
    const auto own =
        reinterpret_cast<uint64_t>(page + static_cast<uint64_t>(place.row) * Shape::kRowBytes);
#pragma unroll
    for (uint32_t rows = 0; rows < Shape::kTile; rows += Shape::kStepRows) {
#pragma unroll
      for (uint32_t part = 0; part < Shape::kStepCopies; ++part) {
        const SharedAddress there = moved<Shape>(at[part], rows, 0);
        const bool valid = rows + row[part] < n_tokens;
        const auto* k =
            reinterpret_cast<const uint8_t*>(shuffle(own, rows + row[part])) + chunk[part] * 16;
        copy_async_16(there, k, valid);
        copy_async_16(there + Shape::kPlaneBytes, k + of.v_offset_bytes, valid);
      }
    }
  }
  if constexpr (Shape::kScaled) {
    copy_scales(of, page, place.row, to + 2 * Shape::kPlaneBytes, n_tokens, ahead);
  }
}

// Says which half of its word a scale is.
KVM_GPU bool is_upper(uint64_t address) { return (address & 2) != 0; }

// row: of this lane's token.
template <class Shape>
KVM_GPU void WarpTask<Shape>::copy_scales(const PageClass& of, const uint8_t* page, uint32_t row,
                                          SharedAddress to, uint32_t n_tokens, uint32_t ahead) {
  const auto of_k =
      reinterpret_cast<uint64_t>(page + of.scales_offset_bytes + static_cast<uint64_t>(row) * 2);
  const uint64_t of_v = of_k + of.v_scales_offset_bytes;
  const auto word = [](uint64_t scale) {
    return reinterpret_cast<const void*>(scale & ~uint64_t{3});
  };
  const bool valid = lane_id() % Shape::kTile < n_tokens;
  if constexpr (Shape::kTile == 32) {
    copy_async_4(to + lane_id() * 4, word(of_k), valid);
    copy_async_4(to + Shape::kScaleBytes + lane_id() * 4, word(of_v), valid);
  } else {
    // Half of the lanes would have nothing to copy: they take those of V.
    copy_async_4(to + lane_id() * 4, word(lane_id() < Shape::kTile ? of_k : of_v), valid);
  }
  upper |= static_cast<uint32_t>(is_upper(of_k)) << ahead;
}

// The scales of this lane's token of a tile, V's above K's.
template <class Shape>
KVM_GPU uint32_t WarpTask<Shape>::own_scales(const PageClass& of, SharedAddress scales) {
  const SharedAddress at = scales + lane_id() % Shape::kTile * 4;
  const uint32_t k = load_shared<uint32_t>(at);
  const uint32_t v = load_shared<uint32_t>(at + Shape::kScaleBytes);
  const bool k_upper = (upper & 1) != 0;
  const bool v_upper = k_upper != is_upper(of.v_scales_offset_bytes);
  return (k >> (k_upper ? 16 : 0) & 0xffffu) | (v << (v_upper ? 0 : 16) & 0xffff0000u);
}

template <class Shape>
KVM_GPU void WarpTask<Shape>::scores(SharedAddress keys, Scores& s) {
  const SharedAddress at =
      keys + tile_offset<Shape>(lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2);
  // Two chunks of 16 bytes of each key: a step of 16 channels or, of bytes, two.
#pragma unroll
  for (uint32_t k = 0; k < Shape::kRowChunks / 2; ++k) {
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

// From scores, in units of log 2, to weights; brings the state of 16 rows to the new maximum.
template <class Shape>
KVM_GPU void WarpTask<Shape>::soften(uint32_t row_tile, const Columns& columns,
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
  }
}

template <class Shape>
KVM_GPU void WarpTask<Shape>::add_values(SharedAddress values, const Scores& s) {
  const SharedAddress at =
      values + tile_offset<Shape>(lane_id() / 8 % 2 * 8 + lane_id() % 8, lane_id() / 16);
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
      load_matrix_x4_transposed(b, moved<Shape>(at, k * 16, n * 2));
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

// Sets the scores of tokens that a row does not see to -inf. Only tiles at the end of a piece come
// here, so the request is read again: registers are what the loop over tiles is short of.
template <class Shape>
KVM_GPU void WarpTask<Shape>::hide_unseen(const DecodeParams& p, const Work& work,
                                          uint32_t token_first, Scores& s) {
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

// Soft-caps scores and adds the log weights of their tokens.
template <class Shape>
KVM_GPU void WarpTask<Shape>::cap_and_weigh(const DecodeParams& p, bool weighted, Scores& s) {
  const bool capped = p.softcap_log2 != 0.0f;
#pragma unroll
  for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const float weight =
          weighted ? shuffle(next_weight, n * 8 + lane_id() % 4 * 2 + i) * kLog2E : 0.0f;
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

// Folds the tile in `stage`, whose first token is `token_first`, into the state.
template <class Shape>
KVM_GPU void WarpTask<Shape>::evaluate_tile(const DecodeParams& p, const PageClass& of,
                                            uint32_t piece, SharedAddress stage,
                                            uint32_t token_first, bool weighted) {
  Scores s = {};
  scores(stage, s);
  Columns columns;
  if constexpr (Shape::kScaled) {
    columns.spread(own_scales(of, stage + 2 * Shape::kPlaneBytes));
  }
#pragma unroll
  for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
#pragma unroll
      for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
        if constexpr (Shape::kScaled) {
          s[t][n][i] *= columns.key(n, i % 2) * q_scale[t][i / 2];
        } else {
          s[t][n][i] *= p.scale_log2;
        }
      }
    }
  }
  // One test for a tile, not one for a score: most have neither.
  if (weighted || p.softcap_log2 != 0.0f) {
    cap_and_weigh(p, weighted, s);
  }
  if (token_first + Shape::kTile > limit_least) {
    hide_unseen(p, p.work[piece], token_first, s);
  }
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
    soften(t, columns, s[t]);
  }
  add_values(stage + Shape::kPlaneBytes, s);
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
  constexpr uint32_t kAhead = Shape::kStages - 1;  // tiles under way
  constexpr uint32_t kStride = Shape::kWarps * Shape::kTile;
  const Work work = p.work[piece];
  const PageClass& of = p.pool.classes[work.request.page_class];
  const bool weighted = work.request.log_weights >= 0;
  WarpTask<Shape> task;
  // From a shuffle, as warp_id(): it cannot be computed again, which would take several
  // instructions for every access.
  task.stages = shuffle(shared_start() + thread_id() / 32 * Shape::kWarpBytes, 0);
  uint32_t token_first = work.begin + warp_id() * Shape::kTile;  // of the tile

  SharedAddress free = task.stages;
  task.look_up(p, work, token_first);
#pragma unroll 1
  for (uint32_t i = 0; i < kAhead; ++i) {
    const Place place = task.next;
    const uint32_t coming = token_first + i * kStride;
    task.look_up(p, work, coming + kStride);
    if (coming < work.end) {
      task.copy_tile(p, of, place, free, work.end - coming, i);
    }
    copy_async_commit();
    free += Shape::kStageBytes;
  }
  task.load_queries(p, work);
  if (weighted) {
    task.weigh(p, work, token_first);
  }

  SharedAddress full = task.stages;
  for (; token_first < work.end; token_first += kStride) {
    // One group is committed per tile, empty or not, so counting groups counts tiles.
    copy_async_wait<kAhead - 1>();
    sync_warp();
    // The stage of the tile before: every lane has read it, for all have come past the barrier.
    const uint32_t coming = token_first + kAhead * kStride;
    if (coming < work.end) {
      task.copy_tile(p, of, task.next, free, work.end - coming, kAhead);
    }
    copy_async_commit();
    task.look_up(p, work, coming + kStride);
    task.evaluate_tile(p, of, piece, full, token_first, weighted);
    if (weighted) {
      task.weigh(p, work, token_first + kStride);
    }
    task.upper >>= 1;
    free = full;
    full += Shape::kStageBytes;
    full = full == task.stages + Shape::kRingBytes ? task.stages : full;
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
  const SharedAddress states = shared_start();
  for (uint32_t index = thread_id(); index < n_rows * kColumns; index += Shape::kThreads) {
    const uint32_t row = index / kColumns, channel = index % kColumns * 4;
    const uint32_t m_at = (Shape::kRows * Shape::kStateStride + row) * 4;
    const uint32_t l_at = m_at + Shape::kRows * 4;
    const RowPlace at =
        row_place(work.request.q_token, work.kv_head, p.tensors.group, work.row_first + row);
    // A state with l = 1 and o = 0. Of a piece whose state is merged with others it is not part.
    const float sink = work.slot < 0 ? sink_of(p.tensors, at) * kLog2E : minus_infinity();
    float top = sink;
#pragma unroll
    for (uint32_t warp = 0; warp < Shape::kWarps; ++warp) {
      top = fmaxf(top, load_shared<float>(states + warp * Shape::kWarpBytes + m_at));
    }
    const float base = top == minus_infinity() ? 0.0f : top;
    float sum = exp2_fast(sink - base);
    Float4 o{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (uint32_t warp = 0; warp < Shape::kWarps; ++warp) {
      const SharedAddress state = states + warp * Shape::kWarpBytes;
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
