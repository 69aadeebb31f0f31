// SPDX-License-Identifier: Apache-2.0
// Exact attention of query rows over paged latent rows: multi-head latent attention in its absorbed
// form (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). A key is a row of kMlaDim channels, its
// value the first kMlaValueDim of them, so a row is read once for both. docs/gpu.md and ADR 0034
// have the reasons.
//
// Many q heads share the kv head: results of 64 rows are 128 KiB in fp32, the registers of half an
// SM. So the warps of a block take each tile of kTile tokens together, in three steps with a block
// barrier before each:
//   1. Scores. Warp w computes a part of those of group w / kSlices of the rows: over every
//      kSlices-th step of 16 channels. The queries of that stay in its registers.
//   2. Weights. Of each 8 rows (an octet) one warp is the owner. It adds the four parts, and makes
//      weights of the scores as warp_rows.h says. Maxima and sums are its business alone.
//   3. Values. Each warp multiplies the weights of all rows with its own channels of the tile.
// So no product is computed twice, and no value read by two warps. What crosses between warps goes
// through shared memory: four parts of each score, weights, and the factors that bring results to
// the new maxima.
//
// The copy of a tile begins between steps 2 and 3 of the one kStages - 1 before it, into the stage
// that was read last before the barrier of step 1. Its pages are looked up before step 2, whose
// latency covers theirs.
//
// Shared memory, in this order:
//   stages      kStages tiles [token][kMlaDim], chunk c of row r at chunk c xor (r % 8); behind
//               each the log weights [token]
//   octets      scores [octet][slice][pair of tiles of 8 tokens][lane], 4 floats of a lane; over
//               them, when they have been added, weights [octet][row][token], rows of kWeightChunks
//               chunks of which c lies at c xor (r / kLineRows % kWeightChunks)
//   factors     [row] of the tile
//   inverses    [row] what results are multiplied by at the end of a piece
//   states      [row][lane % 4] maximum and sum of weights, each of one lane of an owner, which has
//               no registers left for them
#ifndef KVM_ATTENTION_CUDA_MLA_KERNEL_H_
#define KVM_ATTENTION_CUDA_MLA_KERNEL_H_

#include "attention/cuda/logits.h"
#include "attention/cuda/pages.h"
#include "attention/cuda/params.h"
#include "attention/cuda/primitives.h"

namespace kvm::attention::gpu {

// REQUIRES: kElementType is kBf16 or kF16; kTile 16 or 32; kStages >= 2; kRowTiles 1, 2 or 4.
template <Element kElementType, uint32_t kTileTokens, uint32_t kStageCount, uint32_t kRowTileCount>
struct MlaShape {
  static constexpr bool kIsMla = true;
  static constexpr Element kElement = kElementType;
  static constexpr uint32_t kDim = kMlaDim;
  static constexpr uint32_t kValueDim = kMlaValueDim;
  static constexpr uint32_t kTile = kTileTokens;
  static constexpr uint32_t kStages = kStageCount;
  static constexpr uint32_t kRowTiles = kRowTileCount;  // of 16 rows
  static constexpr uint32_t kRows = 16 * kRowTiles;

  // A group is kGroupTiles tiles of rows; it has a warp for each slice of the channels.
  static constexpr uint32_t kSlices = 4;
  static constexpr uint32_t kSliceSteps = kDim / (16 * kSlices);
  static constexpr uint32_t kGroupTiles = kRowTiles < 2 ? kRowTiles : 2;
  static constexpr uint32_t kWarps = kSlices * (kRowTiles / kGroupTiles);
  static constexpr uint32_t kThreads = 32 * kWarps;
  static constexpr uint32_t kOwners = 2 * kGroupTiles;  // of a group's warps: one for each octet
  static constexpr uint32_t kWarpChannels = kValueDim / kWarps;  // of values
  static constexpr uint32_t kOutTiles = kWarpChannels / 8;

  static constexpr uint32_t kRowBytes = kDim * 2;
  static constexpr uint32_t kTileBytes = kTile * kRowBytes;
  static constexpr uint32_t kStageBytes = kTileBytes + 128;
  static constexpr uint32_t kRingBytes = kStages * kStageBytes;
  static constexpr uint32_t kPartBytes = 8 * kTile * 4;
  static constexpr uint32_t kOctetBytes = kSlices * kPartBytes;
  // Of a row of weights, of which kLineRows are 128 bytes.
  static constexpr uint32_t kWeightBytes = kTile * 2;
  static constexpr uint32_t kWeightChunks = kWeightBytes / 16;
  static constexpr uint32_t kLineRows = 128 / kWeightBytes;
  static constexpr uint32_t kFactorsAt = kRingBytes + kRows / 8 * kOctetBytes;
  static constexpr uint32_t kInversesAt = kFactorsAt + kRows * 4;
  static constexpr uint32_t kStatesAt = kInversesAt + kRows * 4;
  static constexpr uint32_t kSharedBytes = kStatesAt + kRows * 32;

  // A copy of a warp takes 128 bytes of each of kCopyRows rows.
  static constexpr uint32_t kCopyRows = 4;
  static constexpr uint32_t kCopies = kRowBytes / 128;  // of a row
  // Of so many rows a lane copies a part; where a tile has no more than 16, half the warps do.
  static constexpr uint32_t kCopyWarps = kWarps < kTile / kCopyRows ? kWarps : kTile / kCopyRows;
  static constexpr uint32_t kLaneRows = kTile / (kCopyRows * kCopyWarps);

  static_assert(!kIsScaled<kElement> && (kTile == 16 || kTile == 32) && kStages >= 2);
  static_assert(kRowTiles == 1 || kRowTiles == 2 || kRowTiles == 4);
  // Steps of a slice are a line of 128 bytes apart, and a warp's channels of values begin one.
  static_assert(kSlices * 32 == 128 && kDim % (16 * kSlices) == 0 && kWarpChannels % 64 == 0);
  static_assert(kLaneRows * kCopyRows * kCopyWarps == kTile);
  static_assert(8 * kWeightBytes <= kOctetBytes && kOctetBytes % 128 == 0);
};

// The part of a piece that one thread has.
template <class Shape>
struct MlaTask {
  using Own = float[Shape::kTile / 8][2];  // of the row lane / 4 of the warp's octet, as of mma

  // Fragments of mma.m16n8k16: queries of the warp's group and slice; results of all rows, of the
  // warp's channels.
  uint32_t q[Shape::kGroupTiles][Shape::kSliceSteps][4];
  float o[Shape::kRowTiles][Shape::kOutTiles][4];
  SharedAddress shared;
  uint32_t warp;
  // Of this lane's rows of the tile that is copied next: the page's entry (where the piece has no
  // such token, 0, which is one too), and the row in the page.
  uint32_t next_entry[Shape::kLaneRows], next_row[Shape::kLaneRows];

  KVM_GPU uint32_t slice() const { return warp % Shape::kSlices; }
  KVM_GPU bool is_owner() const { return slice() < Shape::kOwners; }
  // The first row of the warp's group.
  KVM_GPU uint32_t group_row() const { return warp / Shape::kSlices * Shape::kGroupTiles * 16; }
  // The row of this lane in the octet that its warp owns.
  KVM_GPU uint32_t own_row() const { return group_row() + slice() * 8 + lane_id() / 4; }
  KVM_GPU SharedAddress octet(uint32_t row) const {
    return shared + Shape::kRingBytes + row / 8 * Shape::kOctetBytes;
  }
  KVM_GPU SharedAddress state_at() const {
    return shared + Shape::kStatesAt + own_row() * 32 + lane_id() % 4 * 8;
  }
  // From an octet to a chunk of the weights of one of its rows.
  KVM_GPU static uint32_t weight_offset(uint32_t row, uint32_t chunk) {
    return row * Shape::kWeightBytes +
           ((chunk ^ (row / Shape::kLineRows % Shape::kWeightChunks)) * 16);
  }

  KVM_GPU void begin(const DecodeParams& p, const Work& work);
  KVM_GPU void look_up(const DecodeParams& p, const Work& work, uint32_t token_first);
  KVM_GPU void copy_tile(const DecodeParams& p, const Work& work, SharedAddress to,
                         uint32_t token_first);
  KVM_GPU void scores(SharedAddress keys);
  KVM_GPU void own_weights(const DecodeParams& p, const Work& work, SharedAddress stage,
                           uint32_t token_first);
  KVM_GPU void add_parts(Own& own);
  KVM_GPU void add_values(SharedAddress values);
  KVM_GPU void finish_rows(const DecodeParams& p, const Work& work);
  KVM_GPU void store_results(const DecodeParams& p, const Work& work);
};

template <class Shape>
KVM_GPU void MlaTask<Shape>::begin(const DecodeParams& p, const Work& work) {
  const Request& request = work.request;
  const uint32_t n_rows = request.n_query * p.tensors.group;
#pragma unroll
  for (uint32_t t = 0; t < Shape::kGroupTiles; ++t) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = work.row_first + group_row() + t * 16 + half * 8 + lane_id() / 4;
      const bool valid = row < n_rows;
      const RowPlace at = row_place(request.q_token, work.kv_head, p.tensors.group, row);
      const uint16_t* from = static_cast<const uint16_t*>(p.tensors.q) +
                             at.token * p.tensors.q_stride_token +
                             at.q_head * p.tensors.q_stride_head + slice() * 16 + lane_id() % 4 * 2;
#pragma unroll
      for (uint32_t k = 0; k < Shape::kSliceSteps; ++k) {
        const uint16_t* const step = from + k * Shape::kSlices * 16;
        q[t][k][half] = valid ? load_global<uint32_t>(step) : 0;
        q[t][k][half + 2] = valid ? load_global<uint32_t>(step + 8) : 0;
      }
    }
  }
  if (is_owner()) {
    store_shared(state_at(), Float2{minus_infinity(), 0.0f});
  }
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
    for (uint32_t n = 0; n < Shape::kOutTiles; ++n) {
      o[t][n][0] = o[t][n][1] = o[t][n][2] = o[t][n][3] = 0.0f;
    }
  }
}

// Finds the tokens of which this lane copies a part, in the tile whose first token is
// `token_first`.
template <class Shape>
KVM_GPU void MlaTask<Shape>::look_up(const DecodeParams& p, const Work& work,
                                     uint32_t token_first) {
#pragma unroll
  for (uint32_t i = 0; i < Shape::kLaneRows; ++i) {
    const uint32_t token =
        token_first + (i * Shape::kCopyWarps + warp) * Shape::kCopyRows + lane_id() / 8;
    const uint32_t at = list_token(work.request, token);
    const uint32_t page = divide(p.pool.page_tokens, at);
    next_entry[i] = 0;
    if (token < work.end) {
      next_entry[i] = load_global<uint32_t>(p.page_table + work.request.table + page);
    }
    next_row[i] = at - page * p.pool.page_tokens.divisor;
  }
}

// Begins copying the tile that was looked up last. Tokens that the piece does not have become zero
// rows: a value that is multiplied by a weight of 0 must not be a NaN.
template <class Shape>
KVM_GPU void MlaTask<Shape>::copy_tile(const DecodeParams& p, const Work& work, SharedAddress to,
                                       uint32_t token_first) {
  const PageClass& of = p.pool.classes[work.request.page_class];
  const uint32_t chunk = lane_id() % 8;
#pragma unroll
  for (uint32_t i = 0; i < Shape::kLaneRows; ++i) {
    const uint32_t row = (i * Shape::kCopyWarps + warp) * Shape::kCopyRows + lane_id() / 8;
    const uint8_t* from = page_row(p.pool, of, next_entry[i], next_row[i], Shape::kRowBytes) +
                          static_cast<uint64_t>(work.head) * of.head_stride_bytes + chunk * 16;
    const SharedAddress at = to + row * Shape::kRowBytes + ((chunk ^ row % 8) * 16);
    const bool valid = token_first + row < work.end;
    if (Shape::kCopyWarps == Shape::kWarps || warp < Shape::kCopyWarps) {
#pragma unroll
      for (uint32_t n = 0; n < Shape::kCopies; ++n) {
        copy_async_16(at + n * 128, from + n * 128, valid);
      }
    }
  }
  if (work.request.log_weights >= 0 && warp == 0 && lane_id() < Shape::kTile) {
    const uint32_t token = token_first + lane_id();
    copy_async_4(to + Shape::kTileBytes + lane_id() * 4, log_weight_at(p, work, token),
                 token < work.end);
  }
}

// Computes the warp's part of the scores of its group, and leaves it to the owners.
template <class Shape>
KVM_GPU void MlaTask<Shape>::scores(SharedAddress keys) {
  const uint32_t row = lane_id() / 16 * 8 + lane_id() % 8;
  const SharedAddress at =
      keys + row * Shape::kRowBytes + (((slice() * 2 + lane_id() / 8 % 2) ^ row % 8) * 16);
  const SharedAddress parts = octet(group_row()) + slice() * Shape::kPartBytes + lane_id() * 16;
#pragma unroll
  for (uint32_t pair = 0; pair < Shape::kTile / 16; ++pair) {
    float s[Shape::kGroupTiles][2][4] = {};
#pragma unroll
    for (uint32_t k = 0; k < Shape::kSliceSteps; ++k) {
      uint32_t b[4];
      load_matrix_x4(b, at + pair * 16 * Shape::kRowBytes + k * 128);
#pragma unroll
      for (uint32_t t = 0; t < Shape::kGroupTiles; ++t) {
        mma_16x8x16<Shape::kElement>(s[t][0], q[t][k], b[0], b[1]);
        mma_16x8x16<Shape::kElement>(s[t][1], q[t][k], b[2], b[3]);
      }
    }
#pragma unroll
    for (uint32_t n = 0; n < Shape::kOwners; ++n) {
      const float(&low)[4] = s[n / 2][0];
      const float(&high)[4] = s[n / 2][1];
      store_shared(
          parts + n * Shape::kOctetBytes + pair * 512,
          Float4{low[n % 2 * 2], low[n % 2 * 2 + 1], high[n % 2 * 2], high[n % 2 * 2 + 1]});
    }
  }
}

// Adds the parts of the scores of the owner's row, in the order of the slices.
template <class Shape>
KVM_GPU void MlaTask<Shape>::add_parts(Own& own) {
  const SharedAddress at = octet(own_row()) + lane_id() * 16;
#pragma unroll
  for (uint32_t pair = 0; pair < Shape::kTile / 16; ++pair) {
    Float4 sum = load_shared<Float4>(at + pair * 512);
#pragma unroll
    for (uint32_t part = 1; part < Shape::kSlices; ++part) {
      const Float4 one = load_shared<Float4>(at + part * Shape::kPartBytes + pair * 512);
      sum = {sum.x + one.x, sum.y + one.y, sum.z + one.z, sum.w + one.w};
    }
    own[2 * pair][0] = sum.x;
    own[2 * pair][1] = sum.y;
    own[2 * pair + 1][0] = sum.z;
    own[2 * pair + 1][1] = sum.w;
  }
}

// From the parts of scores to weights; brings the state of the owner's rows to the new maximum.
template <class Shape>
KVM_GPU void MlaTask<Shape>::own_weights(const DecodeParams& p, const Work& work,
                                         SharedAddress stage, uint32_t token_first) {
  const bool masked = token_first + Shape::kTile > seen_by_all(work);
  Own own;
  add_parts(own);
#pragma unroll
  for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      own[n][i] *= p.scale_log2;
    }
  }
  if (p.softcap_log2 != 0.0f) {
#pragma unroll
    for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        own[n][i] = soft_cap(p, own[n][i]);
      }
    }
  }
  if (work.request.log_weights >= 0) {
    const SharedAddress at = stage + Shape::kTileBytes + lane_id() % 4 * 8;
#pragma unroll
    for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
      const Float2 two = load_shared<Float2>(at + n * 32);
      own[n][0] += two.x * kLog2E;
      own[n][1] += two.y * kLog2E;
    }
  }
  if (masked) {
    const Request& request = work.request;
    const bool tree = request.tree_first != kNoTree;
    const uint32_t query = (work.row_first + own_row()) / p.tensors.group;
    const uint64_t seen = tree && query < request.n_query
                              ? load_global<uint64_t>(p.tree_mask + request.q_token + query)
                              : 0;
    const uint32_t visible = request.n_tokens - request.n_query + 1 + query;
    const uint32_t limit = tree || visible > work.end ? work.end : visible;
#pragma unroll
    for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t token = token_first + n * 8 + lane_id() % 4 * 2 + i;
        bool sees = token < limit;
        if (tree && token >= request.tree_first) {
          sees = sees && (seen >> (list_token(request, token) - request.tree_list) % 64 & 1) != 0;
        }
        own[n][i] = sees ? own[n][i] : minus_infinity();
      }
    }
  }
  const Float2 state = load_shared<Float2>(state_at());
  float top = state.x;
#pragma unroll
  for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
    top = fmaxf(top, fmaxf(own[n][0], own[n][1]));
  }
  top = fmaxf(top, shuffle_xor(top, 1));
  top = fmaxf(top, shuffle_xor(top, 2));
  // A row that has seen nothing yet: -inf - -inf would be NaN.
  const float base = top == minus_infinity() ? 0.0f : top;
  const float factor = top > state.x ? exp2_fast(state.x - base) : 1.0f;
  float sum = 0.0f;
  // Weights go where the parts were: all lanes must have read these.
  sync_warp();
  const uint32_t row = lane_id() / 4;
  const SharedAddress weights = octet(own_row()) + lane_id() % 4 * 4;
#pragma unroll
  for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
    const float low = exp2_fast(own[n][0] - base), high = exp2_fast(own[n][1] - base);
    sum += low + high;
    store_shared(weights + weight_offset(row, n), pack<Shape::kElement>(low, high));
  }
  store_shared(state_at(), Float2{top, state.y * factor + sum});
  if (lane_id() % 4 == 0) {
    store_shared(shared + Shape::kFactorsAt + own_row() * 4, factor);
  }
}

// Brings the results to the new maxima and adds the weighted values of the tile.
template <class Shape>
KVM_GPU void MlaTask<Shape>::add_values(SharedAddress values) {
  const uint32_t token = lane_id() % 16;
  const SharedAddress at = values + token * Shape::kRowBytes + warp * Shape::kWarpChannels * 2 +
                           ((lane_id() / 16 ^ token % 8) * 16);
  const SharedAddress weights =
      octet(lane_id() / 8 % 2 * 8) + weight_offset(lane_id() % 8, lane_id() / 16);
  const SharedAddress factors = shared + Shape::kFactorsAt + lane_id() / 4 * 4;
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
    const float low = load_shared<float>(factors + t * 64);
    const float high = load_shared<float>(factors + t * 64 + 32);
    // Most tiles move no maximum; then all factors are 1.
    if (any_lane(low != 1.0f || high != 1.0f)) {
#pragma unroll
      for (uint32_t n = 0; n < Shape::kOutTiles; ++n) {
        o[t][n][0] *= low;
        o[t][n][1] *= low;
        o[t][n][2] *= high;
        o[t][n][3] *= high;
      }
    }
  }
#pragma unroll
  for (uint32_t k = 0; k < Shape::kTile / 16; ++k) {
    uint32_t a[Shape::kRowTiles][4];
#pragma unroll
    for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
      load_matrix_x4(a[t], (weights ^ (k * 32)) + t * 2 * Shape::kOctetBytes);
    }
#pragma unroll
    for (uint32_t n = 0; n < Shape::kOutTiles / 2; ++n) {
      uint32_t b[4];
      load_matrix_x4_transposed(b, (at ^ (n % 4 * 32)) + n / 4 * 128 + k * 16 * Shape::kRowBytes);
#pragma unroll
      for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
        mma_16x8x16<Shape::kElement>(o[t][2 * n], a[t], b[0], b[1]);
        mma_16x8x16<Shape::kElement>(o[t][2 * n + 1], a[t], b[2], b[3]);
      }
    }
  }
}

// Says what the results of the owner's rows are multiplied by, and writes the rows' lse.
template <class Shape>
KVM_GPU void MlaTask<Shape>::finish_rows(const DecodeParams& p, const Work& work) {
  const Float2 state = load_shared<Float2>(state_at());
  float sum = state.y;
  sum += shuffle_xor(sum, 1);
  sum += shuffle_xor(sum, 2);
  const uint32_t row = own_row();
  const bool valid = work.row_first + row < work.request.n_query * p.tensors.group;
  const RowPlace at =
      row_place(work.request.q_token, work.kv_head, p.tensors.group, work.row_first + row);
  // A state with l = 1 and o = 0. Of a piece whose state is merged with others it is not part.
  const float sink = work.slot < 0 && valid ? sink_of(p.tensors, at) * kLog2E : minus_infinity();
  const float top = fmaxf(state.x, sink);
  const float base = top == minus_infinity() ? 0.0f : top;
  const float factor = exp2_fast(state.x - base);
  sum = sum * factor + exp2_fast(sink - base);
  // A sum that is not a number says that the row saw one.
  const float inverse = sum != 0.0f ? factor / sum : 0.0f;
  if (lane_id() % 4 == 0) {
    store_shared(shared + Shape::kInversesAt + row * 4, inverse);
    const float lse = sum != 0.0f ? (top + log2_fast(sum)) * kLn2 : minus_infinity();
    if (work.slot >= 0) {
      store_global(p.partial_lse + static_cast<uint64_t>(work.slot) * Shape::kRows + row, lse);
    } else if (valid) {
      store_lse(p.tensors, at, lse);
    }
  }
}

// Writes the results of all rows, of the warp's channels. Lanes swap pairs of channels with their
// neighbours, so that each has four that lie side by side.
template <class Shape>
KVM_GPU void MlaTask<Shape>::store_results(const DecodeParams& p, const Work& work) {
  const uint32_t n_rows = work.request.n_query * p.tensors.group;
  const bool odd = lane_id() % 2 != 0;
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = t * 16 + half * 8 + lane_id() / 4;
      const float inverse = load_shared<float>(shared + Shape::kInversesAt + row * 4);
      const bool valid = work.row_first + row < n_rows;
      const RowPlace at =
          row_place(work.request.q_token, work.kv_head, p.tensors.group, work.row_first + row);
      // A number, not an address: without a slot there may be no partial states at all.
      const uint64_t partial =
          (static_cast<uint64_t>(work.slot) * Shape::kRows + row) * Shape::kValueDim;
#pragma unroll
      for (uint32_t n = 0; n < Shape::kOutTiles; n += 2) {
        const float low[2] = {o[t][n][2 * half], o[t][n][2 * half + 1]};
        const float high[2] = {o[t][n + 1][2 * half], o[t][n + 1][2 * half + 1]};
        const float first = shuffle_xor(odd ? low[0] : high[0], 1);
        const float second = shuffle_xor(odd ? low[1] : high[1], 1);
        const Float4 four =
            odd ? Float4{first * inverse, second * inverse, high[0] * inverse, high[1] * inverse}
                : Float4{low[0] * inverse, low[1] * inverse, first * inverse, second * inverse};
        const uint32_t channel =
            warp * Shape::kWarpChannels + (n + (odd ? 1 : 0)) * 8 + lane_id() % 4 / 2 * 4;
        if (work.slot >= 0) {
          store_global(p.partial_o + partial + channel, four);
        } else if (valid) {
          store_result(p.tensors, at, channel, four);
        }
      }
    }
  }
}

// Evaluates a piece and writes its result. The piece is read where it is wanted, over and over:
// registers are what the loop over tiles is short of.
template <class Shape>
KVM_GPU void mla_piece(const DecodeParams& p, const Work& work) {
  constexpr uint32_t kAhead = Shape::kStages - 1;  // tiles under way
  MlaTask<Shape> task;
  // From a shuffle, as warp_id(): several instructions, which are not to be repeated.
  task.shared = shuffle(shared_start(), 0);
  task.warp = warp_id();
  uint32_t token_first = work.begin;

  SharedAddress stage = task.shared;
#pragma unroll 1
  for (uint32_t i = 0; i < kAhead; ++i) {
    const uint32_t coming = token_first + i * Shape::kTile;
    task.look_up(p, work, coming);
    if (coming < work.end) {
      task.copy_tile(p, work, stage, coming);
    }
    copy_async_commit();
    stage += Shape::kStageBytes;
  }
  task.begin(p, work);

  stage = task.shared;
#pragma unroll 1
  for (; token_first < work.end; token_first += Shape::kTile) {
    // One group is committed per tile, empty or not, so counting groups counts tiles.
    copy_async_wait<kAhead - 1>();
    sync_block();
    task.scores(stage);
    sync_block();
    const uint32_t coming = token_first + kAhead * Shape::kTile;
    task.look_up(p, work, coming);
    if (task.is_owner()) {
      task.own_weights(p, work, stage, token_first);
    }
    sync_block();
    // Into the stage of the tile before.
    if (coming < work.end) {
      task.copy_tile(
          p, work, (stage == task.shared ? stage + Shape::kRingBytes : stage) - Shape::kStageBytes,
          coming);
    }
    copy_async_commit();
    task.add_values(stage);
    stage += Shape::kStageBytes;
    stage = stage == task.shared + Shape::kRingBytes ? task.shared : stage;
  }
  if (task.is_owner()) {
    task.finish_rows(p, work);
  }
  sync_block();
  task.store_results(p, work);
}

// Does the work of one thread of one block.
template <class Shape>
KVM_GPU void mla_thread(const DecodeParams& p) {
  uint32_t piece = block_id();
  do {
    mla_piece<Shape>(p, p.work[piece]);
    sync_block();  // before the next piece writes where this one's results are read
    piece = p.work[piece].next;
  } while (piece != 0);
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_MLA_KERNEL_H_
