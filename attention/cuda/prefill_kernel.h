// SPDX-License-Identifier: Apache-2.0
// Exact attention of many query rows over paged keys and values: the prefill kernel. docs/gpu.md
// has the reasons.
//
// A block takes its pieces of work one after the other. Each warp has rows of its own, 16 or 32,
// and all read the same tiles: every warp copies a slice of each tile, kStages - 1 tiles ahead, and
// one block barrier for each tile both hands the tile on and frees the stage of the one before.
// What a warp makes of a tile is in warp_rows.h. Nothing is merged inside a block.
//
// Query tokens see each other in order, and a Sight says what of the tokens before them; the mask
// goes by a row's own list token. A warp does not evaluate a tile that none of its rows sees, and
// masks none that all of them see whole. Which tokens a block reads at all the plan says.
//
// Shared memory: kStages stages of [K tile][V tile] (tiles.h), behind them a log weight for each
// token. Where rows are bytes, then the words of the page that have its scales in one of their
// halves, [token] for K, then for V, and what is made of them, [token]{both scales, log2 of V's}.
// Where they are of 4 bits, words of steps [plane][group][token], and what is made of them, floats:
// scales and zeros [plane][group][token], what a maximum has of each value [token], and for each
// warp whether values that it copied are not numbers. Behind the stages queries, as far as
// registers lack: for each warp fragments [tile of rows][step][lane], each read by the lane that
// wrote it; where rows are of 4 bits, the sums of code_rows.h, and what lanes put aside between
// tiles. At the end of a piece the same bytes take results of 8 rows of each warp on their way out.
#ifndef KVM_ATTENTION_CUDA_PREFILL_KERNEL_H_
#define KVM_ATTENTION_CUDA_PREFILL_KERNEL_H_

#include "attention/cuda/code_rows.h"

namespace kvm::attention::gpu {

// REQUIRES: as TileShape; kStages >= 2; kTile / kWarps is a multiple of kStepRows, and a power of 2
// not above 32; where rows are of 4 bits, that many tokens have kLanesOfPlane groups.
template <Element kElementType, uint32_t kDimValue, uint32_t kTileTokens, uint32_t kStageCount,
          uint32_t kWarpCount, uint32_t kRowTileCount, uint32_t kHeldStepCount>
struct PrefillShape : TileShape<kElementType, kDimValue, kTileTokens> {
  using Tiles = TileShape<kElementType, kDimValue, kTileTokens>;
  static constexpr uint32_t kStages = kStageCount;
  static constexpr uint32_t kWarps = kWarpCount;
  static constexpr uint32_t kRowTiles = kRowTileCount;  // of 16 rows, of a warp
  // Steps of 16 channels whose queries are in registers; those of the others are in shared memory.
  static constexpr uint32_t kHeldSteps = kHeldStepCount;
  static constexpr uint32_t kSharedSteps = kDimValue / 16 - kHeldSteps;

  static constexpr uint32_t kThreads = 32 * kWarps;
  static constexpr uint32_t kWarpRowCount = 16 * kRowTiles;
  static constexpr uint32_t kRows = kWarps * kWarpRowCount;
  // A warp copies a slice of each tile: so many tokens, of both planes or, where that would be no
  // whole copies, of one: the first half of the warps then has K, the other one V.
  static constexpr bool kBothPlanes = kTileTokens / kWarps % Tiles::kStepRows == 0;
  static constexpr uint32_t kSlicesOfPlane = kBothPlanes ? kWarps : kWarps / 2;
  static constexpr uint32_t kSlice = kTileTokens / kSlicesOfPlane;
  // Lanes that copy words of steps, one each, of a plane of the slice.
  static constexpr uint32_t kLanesOfPlane = 16;
  // Words of steps of a plane of a tile, and of both.
  static constexpr uint32_t kPlaneSteps = Tiles::kGroups * kTileTokens;
  static constexpr uint32_t kSteps = 2 * kPlaneSteps;
  // From the beginning of a stage.
  static constexpr uint32_t kWeightsAt = 2 * Tiles::kPlaneBytes;
  static constexpr uint32_t kWordsAt = kWeightsAt + kTileTokens * 4;
  static constexpr uint32_t kColumnsAt = kWordsAt + kSteps * 4;
  static constexpr uint32_t kZerosAt = kColumnsAt + kSteps * 4;
  static constexpr uint32_t kLogsAt = kZerosAt + kSteps * 4;
  static constexpr uint32_t kBrokenAt = kLogsAt + kTileTokens * 4;
  static constexpr uint32_t kStageBytes =
      ((Tiles::kStepped  ? kBrokenAt + kWarps * 4
        : Tiles::kScaled ? kColumnsAt + kTileTokens * (kBothPlanes ? 8 : 12)
                         : kWordsAt) +
       127) /
      128 * 128;
  static constexpr uint32_t kRingBytes = kStages * kStageBytes;
  // Of a warp.
  static constexpr uint32_t kFragmentBytes = kRowTiles * kSharedSteps * 512;
  static constexpr uint32_t kSumBytes = Tiles::kStepped ? bytes_of_sums(kRowTiles) : 0;
  // Floats of each lane that are there between tiles.
  static constexpr uint32_t kAside = Tiles::kStepped ? 2 * kRowTiles * (2 + Tiles::kGroups) : 0;
  static constexpr uint32_t kWarpQueryBytes = kFragmentBytes + kSumBytes + kAside * 128;
  static constexpr uint32_t kQueryBytes = kWarps * kWarpQueryBytes;
  static constexpr uint32_t kResultBytes = 8 * Tiles::kStateStride * 4;  // of a warp
  static constexpr uint32_t kSharedBytes = kRingBytes + kQueryBytes > kWarps* kResultBytes
                                               ? kRingBytes + kQueryBytes
                                               : kWarps* kResultBytes;

  static_assert(kStages >= 2 && kTileTokens % kWarps == 0);
  static_assert(kBothPlanes || (Tiles::kScaled && kSlice == 32));
  static_assert(!Tiles::kStepped || kSlice * Tiles::kGroups == kLanesOfPlane);
  static_assert(kAside % 4 == 0);
  static_assert(kSlice % Tiles::kStepRows == 0 && 32 % kSlice == 0);
  static_assert(kColumnsAt % 16 == 0);
};

// The scales of a thread's columns of a tile, where they lie in shared memory.
template <class Shape, bool kScaled = Shape::kScaled, bool kStepped = Shape::kStepped,
          bool kBothPlanes = Shape::kBothPlanes>
struct SharedScales : NoScales {
  KVM_GPU explicit SharedScales(SharedAddress /*stage*/) {}
};

// Where no warp has both scales of a token: floats [token] of K's, of V's and of log2 of V's.
template <class Shape>
struct SharedScales<Shape, true, false, false> {
  SharedAddress at;  // of the lane's first column

  KVM_GPU explicit SharedScales(SharedAddress stage)
      : at(stage + Shape::kColumnsAt + lane_id() % 4 * 8) {}
  KVM_GPU float load(uint32_t what, uint32_t n, uint32_t i) const {
    return load_shared<float>(at + what * Shape::kTile * 4 + n * 32 + i * 4);
  }
  KVM_GPU float key(uint32_t n, uint32_t i) const { return load(0, n, i); }
  KVM_GPU float raise(float score, uint32_t n, uint32_t i) const { return score + load(2, n, i); }
  // The scale of a value that is not seen may be a NaN.
  KVM_GPU float apply(float weight, uint32_t n, uint32_t i) const {
    return product_or_zero(weight, load(1, n, i));
  }
};

template <class Shape>
struct SharedScales<Shape, true, false, true> {
  SharedAddress at;  // of the lane's first column

  KVM_GPU explicit SharedScales(SharedAddress stage)
      : at(stage + Shape::kColumnsAt + lane_id() % 4 * 16) {}
  KVM_GPU uint32_t both(uint32_t n, uint32_t i) const {
    return load_shared<uint32_t>(at + n * 64 + i * 8);
  }
  KVM_GPU float key(uint32_t n, uint32_t i) const { return float_from_bits(both(n, i) << 16); }
  KVM_GPU float raise(float score, uint32_t n, uint32_t i) const {
    return score + load_shared<float>(at + n * 64 + i * 8 + 4);
  }
  // The scale of a value that is not seen may be a NaN.
  KVM_GPU float apply(float weight, uint32_t n, uint32_t i) const {
    return product_or_zero(weight, float_from_bits(both(n, i) & 0xffff0000u));
  }
};

// Where rows are of 4 bits, only what a maximum has of values.
template <class Shape>
struct SharedScales<Shape, false, true, true> {
  SharedAddress at;  // of the lane's first column

  KVM_GPU explicit SharedScales(SharedAddress stage)
      : at(stage + Shape::kLogsAt + lane_id() % 4 * 8) {}
  KVM_GPU float raise(float score, uint32_t n, uint32_t i) const {
    return score + load_shared<float>(at + n * 32 + i * 4);
  }
  KVM_GPU float apply(float weight, uint32_t, uint32_t) const { return weight; }
};

// Steps of a plane of a tile as floats (code_rows.h): of this thread's columns of 16 tokens.
template <class Shape>
struct FloatSteps {
  SharedAddress at;  // the scale of the first column
  Float2 scales[2], zeros[2];

  KVM_GPU void begin_group(uint32_t group) {
#pragma unroll
    for (uint32_t tile = 0; tile < 2; ++tile) {
      const SharedAddress from = at + group * Shape::kTile * 4 + tile * 32;
      scales[tile] = load_shared<Float2>(from);
      zeros[tile] = load_shared<Float2>(from + Shape::kZerosAt - Shape::kColumnsAt);
    }
  }
  KVM_GPU float scale(uint32_t tile, uint32_t column, uint32_t) const {
    return column == 0 ? scales[tile].x : scales[tile].y;
  }
  KVM_GPU float zero(uint32_t tile, uint32_t column, uint32_t) const {
    return column == 0 ? zeros[tile].x : zeros[tile].y;
  }
};
template <class Shape>
struct StepsByGroup {
  SharedAddress at;  // the first scale

  KVM_GPU uint32_t zero_word(uint32_t eight) const {
    return load_shared<uint32_t>(at + Shape::kZerosAt - Shape::kColumnsAt +
                                 (lane_id() % Shape::kGroups * Shape::kTile + lane_id() / 4) * 4 +
                                 eight * 32);
  }
  KVM_GPU FloatSteps<Shape> columns(uint32_t sixteen) const {
    FloatSteps<Shape> of;
    of.at = at + lane_id() % 4 * 8 + sixteen * 64;
    return of;
  }
};

// Queries of a warp: in registers as far as there are some.
template <class Shape>
struct HeldQueries {
  static constexpr bool kAreLoaded = Shape::kSharedSteps != 0;
  static constexpr uint32_t kSteps = Shape::kDim / 16;
  // One of no use where none is held: no array is empty.
  Fragment held[Shape::kRowTiles][Shape::kHeldSteps == 0 ? 1 : Shape::kHeldSteps];
  SharedAddress shared;  // this lane's fragments of the other steps

  KVM_GPU void place(SharedAddress queries) {
    shared = queries + warp_id() * Shape::kWarpQueryBytes + lane_id() * 16;
  }
  // Of the warp's rows, where they have some.
  KVM_GPU SharedAddress sums() const { return shared - lane_id() * 16 + Shape::kFragmentBytes; }
  // The first 4 floats that a lane puts aside; each 4 more are 512 bytes further on.
  KVM_GPU SharedAddress aside() const { return shared + Shape::kFragmentBytes + Shape::kSumBytes; }
  KVM_GPU void set(uint32_t row_tile, const Fragment (&q)[kSteps]) {
#pragma unroll
    for (uint32_t k = 0; k < kSteps; ++k) {
      if (is_held(k)) {
        held[row_tile][k] = q[k];
      } else {
        store_shared(at(row_tile, k),
                     Word4{q[k].words[0], q[k].words[1], q[k].words[2], q[k].words[3]});
      }
    }
  }
  KVM_GPU Fragment get(uint32_t row_tile, uint32_t step) const {
    if (is_held(step)) {
      return held[row_tile][step];
    }
    const auto four = load_shared<Word4>(at(row_tile, step));
    return {{four.x, four.y, four.z, four.w}};
  }

 private:
  // Of signed numbers: there may be none.
  KVM_GPU static bool is_held(uint32_t step) {
    return static_cast<int32_t>(step) < static_cast<int32_t>(Shape::kHeldSteps);
  }
  KVM_GPU SharedAddress at(uint32_t row_tile, uint32_t step) const {
    return shared + (row_tile * Shape::kSharedSteps + step - Shape::kHeldSteps) * 512;
  }
};

// Rows [first, end) of a request, whose query tokens are [query_first, query_last].
struct RowSpan {
  uint32_t first, end;
  uint32_t query_first, query_last;
};

// Of a warp. REQUIRES: the request has the first one.
template <class Shape>
KVM_GPU RowSpan rows_of_warp(const DecodeParams& p, const Work& work) {
  const uint32_t n_rows = work.request.n_query * p.tensors.group;
  RowSpan rows;
  rows.first = work.row_first + warp_id() * Shape::kWarpRowCount;
  rows.end =
      rows.first + Shape::kWarpRowCount < n_rows ? rows.first + Shape::kWarpRowCount : n_rows;
  rows.query_first = rows.first / p.tensors.group;
  rows.query_last = (rows.end - 1) / p.tensors.group;
  return rows;
}

// Tokens [begin, end) of a request.
struct TokenSpan {
  uint32_t begin, end;
};

// The token of a request that list token `list` is, or would be; of those in front of the last run
// the first one of that run.
KVM_GPU uint32_t token_of_last_run(const Request& request, uint32_t list) {
  const bool two = request.n_tokens > request.n_first;
  const uint32_t run = two ? request.second : request.first;
  const uint32_t begin = two ? request.n_first : 0;
  return list <= run ? begin : begin + (list - run);
}

// The first list token that a row at list token `own` sees, sinks aside.
KVM_GPU uint32_t seen_from(const Sight& sight, uint32_t own) {
  const uint32_t reach = sight.window < sight.n_recent ? sight.window : sight.n_recent;
  return own < reach ? 0 : own - reach + 1;
}

// The tokens that all rows of a span see.
KVM_GPU TokenSpan seen_by_all(const Sight& sight, const Work& work, const RowSpan& rows) {
  const Request& request = work.request;
  const uint32_t end = request.n_tokens - request.n_query + 1 + rows.query_first;
  return {token_of_last_run(request, seen_from(sight, query_list_token(request, rows.query_last))),
          end < work.end ? end : work.end};
}

// Says whether rows of a span may see a token of [begin, end): false only where none does.
KVM_GPU bool is_seen(const Sight& sight, const Work& work, const RowSpan& rows, uint32_t begin,
                     uint32_t end) {
  const Request& request = work.request;
  const bool two = request.n_tokens > request.n_first;
  const uint32_t low =
      token_of_last_run(request, seen_from(sight, query_list_token(request, rows.query_first)));
  // Of sinks, none is in the last of two runs; a single run may begin with some.
  const uint32_t sinks_end = two                              ? request.n_first
                             : sight.n_sinks <= request.first ? 0
                                                              : sight.n_sinks - request.first;
  return begin < request.n_tokens - request.n_query + 1 + rows.query_last &&
         (begin < sinks_end || end > low);
}

// The part of a piece that one warp evaluates, and what it copies for all.
template <class Shape>
struct PrefillTask {
  using Rows = typename RowsFor<Shape>::Type;
  using Scores = typename Rows::Scores;

  HeldQueries<Shape> queries;
  Rows rows;
  // Of this lane's token of the slice of the i-th tile ahead, bit i: as in the decode kernel.
  uint32_t upper = 0;
  TokenSpan plain;  // tiles inside need no mask
  bool has_rows;    // the request has some for this warp
  Place next;       // of the slice to be copied next

  // Of a tile, the first token that a warp copies, and whether it copies values alone.
  KVM_GPU static uint32_t first_of_slice(uint32_t warp) {
    return (Shape::kBothPlanes ? warp : warp % Shape::kSlicesOfPlane) * Shape::kSlice;
  }
  KVM_GPU static bool has_values(uint32_t warp) {
    return !Shape::kBothPlanes && warp >= Shape::kSlicesOfPlane;
  }
  KVM_GPU void load_queries(const DecodeParams& p, const Work& work);
  // Begins copying this warp's slice of the tile at `token_first`, the `ahead`-th behind the one
  // that is evaluated next, to the stage at `to`.
  KVM_GPU void copy_slice(const DecodeParams& p, const PageClass& of, const Work& work,
                          const Place& place, SharedAddress to, uint32_t token_first,
                          uint32_t ahead);
  KVM_GPU void copy_steps(const PageClass& of, const uint8_t* page, uint32_t row, SharedAddress to,
                          uint32_t n_tokens);
  KVM_GPU void unpack_scales(const PageClass& of, SharedAddress stage);
  KVM_GPU static uint32_t own_step();
  // Where rows are of 4 bits, maxima and sums of rows are in registers from one to the other:
  // beside a tile's first products these have no room for them.
  KVM_GPU void bring_sums();
  KVM_GPU void put_aside();
  // The i-th of Shape::kAside.
  KVM_GPU float* state(uint32_t i);
  KVM_GPU void unpack_steps(SharedAddress stage);
  KVM_GPU void evaluate_tile(const DecodeParams& p, const Work& work, SharedAddress stage,
                             uint32_t token_first, bool weighted);
  KVM_GPU void hide_unseen(const DecodeParams& p, const Work& work, uint32_t token_first,
                           Scores& s);
  KVM_GPU void finish(const DecodeParams& p, const Work& work, SharedAddress results);
};

template <class Shape>
KVM_GPU void PrefillTask<Shape>::load_queries(const DecodeParams& p, const Work& work) {
  const Request& request = work.request;
  const uint32_t n_rows = request.n_query * p.tensors.group;
  const uint32_t first = work.row_first + warp_id() * Shape::kWarpRowCount;
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
    Fragment q[WarpRows<Shape>::kQuerySteps];
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = first + t * 16 + half * 8 + lane_id() / 4;
      const RowPlace at = row_place(request.q_token, work.kv_head, p.tensors.group, row);
      const uint16_t* from = static_cast<const uint16_t*>(p.tensors.q) +
                             at.token * p.tensors.q_stride_token +
                             at.q_head * p.tensors.q_stride_head;
      if constexpr (Shape::kStepped) {
        rows.load_queries(from, row < n_rows, t, half, p.tensors.dtype_q, queries.sums(), q);
      } else {
        rows.load_queries(from, row < n_rows, t, half, p, q);
      }
    }
    queries.set(t, q);
  }
  rows.reset();
  if constexpr (Shape::kStepped) {
    put_aside();
  }
  has_rows = first < n_rows;
  plain = {0, 0};
  if (has_rows) {
    plain = seen_by_all(p.sights[request.page_class], work, rows_of_warp<Shape>(p, work));
  }
}

template <class Shape>
KVM_GPU void PrefillTask<Shape>::copy_slice(const DecodeParams& p, const PageClass& of,
                                            const Work& work, const Place& place, SharedAddress to,
                                            uint32_t token_first, uint32_t ahead) {
  const uint8_t* page = page_of(p.pool, of, place.entry);
  const uint32_t warp = warp_id();
  const uint32_t first = first_of_slice(warp);
  const bool of_v = has_values(warp);
  const uint32_t token = token_first + first;
  const uint32_t n_tokens = token < work.end ? work.end - token : 0;
  if constexpr (Shape::kBothPlanes) {
    copy_rows<Shape, Shape::kSlice>(of, page, place, to, first, n_tokens);
  } else {
    copy_rows<Shape, Shape::kSlice, 1>(of, of_v ? page + of.v_offset_bytes : page, place,
                                       of_v ? to + Shape::kPlaneBytes : to, first, n_tokens);
  }
  const bool valid = lane_id() < n_tokens;
  if (work.request.log_weights >= 0 && !of_v && lane_id() < Shape::kSlice) {
    copy_async_4(to + Shape::kWeightsAt + (first + lane_id()) * 4,
                 log_weight_at(p, work, token + lane_id()), valid);
  }
  if constexpr (Shape::kScaled) {
    const auto of_first = reinterpret_cast<uint64_t>(page + of.scales_offset_bytes +
                                                     static_cast<uint64_t>(place.row) * 2 +
                                                     (of_v ? of.v_scales_offset_bytes : 0));
    const SharedAddress words =
        to + Shape::kWordsAt + (first + lane_id() + (of_v ? Shape::kTile : 0)) * 4;
    if (lane_id() < Shape::kSlice) {
      copy_async_4(words, word_of(of_first), valid);
      if constexpr (Shape::kBothPlanes) {
        copy_async_4(words + Shape::kTile * 4, word_of(of_first + of.v_scales_offset_bytes), valid);
      }
    }
    upper |= static_cast<uint32_t>(is_upper(of_first)) << ahead;
  }
  if constexpr (Shape::kStepped) {
    copy_steps(of, page, place.row, to, n_tokens);
  }
}

// The word of steps of the slice that this lane copies and unpacks, among those of a tile: [plane]
// [group][token]. A slice has as many as a warp has lanes.
template <class Shape>
KVM_GPU uint32_t PrefillTask<Shape>::own_step() {
  return lane_id() / Shape::kSlice * Shape::kTile + thread_id() / 32 * Shape::kSlice +
         lane_id() % Shape::kSlice;
}

// row: of this lane's token.
template <class Shape>
KVM_GPU void PrefillTask<Shape>::copy_steps(const PageClass& of, const uint8_t* page, uint32_t row,
                                            SharedAddress to, uint32_t n_tokens) {
  const bool of_v = lane_id() >= Shape::kLanesOfPlane;
  const uint32_t group = lane_id() / Shape::kSlice % Shape::kGroups;
  const uint8_t* const from = page + of.scales_offset_bytes +
                              (static_cast<uint64_t>(row) * Shape::kGroups + group) * 4 +
                              (of_v ? of.v_scales_offset_bytes : 0);
  copy_async_4(to + Shape::kWordsAt + own_step() * 4, from, lane_id() % Shape::kSlice < n_tokens);
}

// Makes of the words of this warp's slice, which have landed for the lanes that copied them, what
// all warps read behind the barrier: only the lane that copied a word knows which half it is.
template <class Shape>
KVM_GPU void PrefillTask<Shape>::unpack_scales(const PageClass& of, SharedAddress stage) {
  const uint32_t token = first_of_slice(thread_id() / 32) + lane_id();
  if constexpr (!Shape::kBothPlanes) {
    const bool of_v = has_values(thread_id() / 32);
    const SharedAddress own = stage + (token + (of_v ? Shape::kTile : 0)) * 4;
    const uint32_t word = load_shared<uint32_t>(own + Shape::kWordsAt);
    const float scale = float_from_bits((upper & 1) != 0 ? word & 0xffff0000u : word << 16);
    store_shared(own + Shape::kColumnsAt, scale);
    if (of_v) {
      store_shared(own + Shape::kColumnsAt + Shape::kTile * 4, bounded_log_scale(scale));
    }
  } else if (lane_id() < Shape::kSlice) {
    const SharedAddress words = stage + Shape::kWordsAt + token * 4;
    const uint32_t both =
        scales_in(of, load_shared<uint32_t>(words), load_shared<uint32_t>(words + Shape::kTile * 4),
                  (upper & 1) != 0);
    store_shared(
        stage + Shape::kColumnsAt + token * 8,
        Word2{both, bits_from_float(bounded_log_scale(float_from_bits(both & 0xffff0000u)))});
  }
}

// As unpack_scales. Steps of values that are not numbers become 0, for no weight makes them
// harmless to rows that do not see them.
template <class Shape>
KVM_GPU void PrefillTask<Shape>::unpack_steps(SharedAddress stage) {
  const bool of_v = lane_id() >= Shape::kLanesOfPlane;
  const SharedAddress own = stage + own_step() * 4;
  const uint32_t word = load_shared<uint32_t>(own + Shape::kWordsAt);
  const float scale = scale_of_steps(word), zero = zero_of_steps(word), sum = scale + zero;
  const bool broken = of_v && sum != sum;
  store_shared(own + Shape::kColumnsAt, broken ? 0.0f : scale);
  store_shared(own + Shape::kZerosAt, broken ? 0.0f : zero);
  float top = fmaxf(scale, fabsf(zero) * 0x1p-4f);
#pragma unroll
  for (uint32_t mask = Shape::kSlice; mask < Shape::kLanesOfPlane; mask *= 2) {
    top = fmaxf(top, shuffle_xor(top, mask));
  }
  if (of_v && lane_id() < Shape::kLanesOfPlane + Shape::kSlice) {
    store_shared(own + Shape::kLogsAt - Shape::kPlaneSteps * 4, bounded_log_scale(top));
  }
  const bool any_broken = any_lane(broken);
  if (lane_id() == 0) {
    store_shared(stage + Shape::kBrokenAt + thread_id() / 32 * 4, uint32_t{any_broken});
  }
}

template <class Shape>
KVM_GPU float* PrefillTask<Shape>::state(uint32_t i) {
  constexpr uint32_t kRowsOfLane = 2 * Shape::kRowTiles;
  const uint32_t row = i % kRowsOfLane;
  return i < kRowsOfLane       ? &rows.m[row / 2][row % 2]
         : i < 2 * kRowsOfLane ? &rows.l[row / 2][row % 2]
                               : &rows.z[row / 2][row % 2][i / kRowsOfLane - 2];
}

template <class Shape>
KVM_GPU void PrefillTask<Shape>::bring_sums() {
#pragma unroll
  for (uint32_t i = 0; i < Shape::kAside; i += 4) {
    const auto four = load_shared<Float4>(queries.aside() + i * 128);
    *state(i) = four.x, *state(i + 1) = four.y, *state(i + 2) = four.z, *state(i + 3) = four.w;
  }
}

template <class Shape>
KVM_GPU void PrefillTask<Shape>::put_aside() {
#pragma unroll
  for (uint32_t i = 0; i < Shape::kAside; i += 4) {
    store_shared(queries.aside() + i * 128,
                 Float4{*state(i), *state(i + 1), *state(i + 2), *state(i + 3)});
  }
}

// Sets the scores of tokens that a row does not see to -inf. The request is read again: registers
// are what the loop over tiles is short of.
template <class Shape>
KVM_GPU void PrefillTask<Shape>::hide_unseen(const DecodeParams& p, const Work& work,
                                             uint32_t token_first, Scores& s) {
  const Sight sight = p.sights[work.request.page_class];
  const uint32_t first = work.row_first + warp_id() * Shape::kWarpRowCount;
  uint32_t own[Shape::kRowTiles][2];
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = first + t * 16 + half * 8 + lane_id() / 4;
      own[t][half] = query_list_token(work.request, row / p.tensors.group);
    }
  }
#pragma unroll
  for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t token = token_first + n * 8 + lane_id() % 4 * 2 + i;
      const uint32_t list = list_token(work.request, token);
#pragma unroll
      for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
          if (token >= work.end || !sees(sight, own[t][half], list)) {
            s[t][n][2 * half + i] = minus_infinity();
          }
        }
      }
    }
  }
}

// Folds the tile in `stage`, whose first token is `token_first`, into the state of the warp's rows.
template <class Shape>
KVM_GPU void PrefillTask<Shape>::evaluate_tile(const DecodeParams& p, const Work& work,
                                               SharedAddress stage, uint32_t token_first,
                                               bool weighted) {
  const uint32_t token_end = token_first + Shape::kTile;
  const bool masked = token_first < plain.begin || token_end > plain.end;
  if (masked) {
    if (!has_rows || !is_seen(p.sights[work.request.page_class], work, rows_of_warp<Shape>(p, work),
                              token_first, token_end)) {
      return;
    }
  }
  Scores s = {};
  if constexpr (Shape::kStepped) {
    rows.scores(queries, stage, StepsByGroup<Shape>{stage + Shape::kColumnsAt}, queries.sums(),
                p.scale_log2, s);
  } else {
    rows.scores(queries, stage, s);
  }
  const SharedScales<Shape> columns(stage);
  if constexpr (!Shape::kStepped) {
    rows.scale(columns, p.scale_log2, s);
  }
  if (weighted || p.softcap_log2 != 0.0f) {
    const SharedAddress weights = stage + Shape::kWeightsAt + lane_id() % 4 * 8;
    const auto weight_of = [weighted, weights](uint32_t n, uint32_t i) {
      return weighted ? load_shared<float>(weights + n * 32 + i * 4) : 0.0f;
    };
    rows.cap_and_weigh(p, weight_of, s);
  }
  if (masked) {
    hide_unseen(p, work, token_first, s);
  }
  if constexpr (Shape::kStepped) {
    bring_sums();
  }
  // Not a loop: nvcc 12.4 does not unroll it where a tile has 64 tokens, and what is indexed by a
  // variable lies in memory.
  static_assert(Shape::kRowTiles <= 2);
  rows.soften(0, columns, s[0]);
  if constexpr (Shape::kRowTiles == 2) {
    rows.soften(1, columns, s[1]);
  }
  if constexpr (Shape::kStepped) {
    if (any_lane(load_shared<uint32_t>(stage + Shape::kBrokenAt + lane_id() % Shape::kWarps * 4) !=
                 0)) {
      const SharedAddress words = stage + Shape::kWordsAt + Shape::kPlaneSteps * 4;
      rows.note_broken(
          [words](uint32_t token, uint32_t group) {
            return words + (group * Shape::kTile + token) * 4;
          },
          s);
    }
    rows.add_values(stage + Shape::kPlaneBytes,
                    StepsByGroup<Shape>{stage + Shape::kColumnsAt + Shape::kPlaneSteps * 4}, s);
    put_aside();
  } else {
    rows.add_values(stage + Shape::kPlaneBytes, s);
  }
}

// Writes the warp's rows of the piece, results or partial states, by way of shared memory, so that
// a row goes out in long stretches. results: of this warp.
template <class Shape>
KVM_GPU void PrefillTask<Shape>::finish(const DecodeParams& p, const Work& work,
                                        SharedAddress results) {
  constexpr uint32_t kColumns = Shape::kDim / 4;
  const uint32_t n_rows = work.request.n_query * p.tensors.group;
  const uint64_t slot_row = static_cast<uint64_t>(work.slot < 0 ? 0 : work.slot) * Shape::kRows;
  const auto place = [&](uint32_t row) {
    return row_place(work.request.q_token, work.kv_head, p.tensors.group, row);
  };
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t first = work.row_first + warp_id() * Shape::kWarpRowCount + t * 16 + half * 8;
      const uint32_t own = first + lane_id() / 4;
      // A state with l = 1 and o = 0. Of a piece whose state is merged with others it is not part.
      const float sink = work.slot < 0 && own < n_rows ? sink_of(p.tensors, place(own)) * kLog2E
                                                       : minus_infinity();
      const float top = fmaxf(rows.m[t][half], sink);
      const float base = top == minus_infinity() ? 0.0f : top;
      const Decay<Shape::kNarrow> decay(rows.m[t][half] - base);
      const float sum = decay.of_sum(rows.sum_of(t, half)) + exp2_fast(sink - base);
      if constexpr (Shape::kStepped) {
        rows.gather_zeros(t, half);
      }
      // A sum that is not a number says that the row saw one.
      const float inverse = sum != 0.0f ? 1.0f / sum : 0.0f;
      if (lane_id() % 4 == 0 && own < n_rows) {
        const float lse = sum != 0.0f ? (top + log2_fast(sum)) * kLn2 : minus_infinity();
        if (work.slot < 0) {
          store_lse(p.tensors, place(own), lse);
        } else {
          store_global(p.partial_lse + slot_row + (own - work.row_first), lse);
        }
      }
      rows.store_channels(t, half, decay.whole * inverse,
                          results + lane_id() / 4 * Shape::kStateStride * 4);
      sync_warp();
      for (uint32_t index = lane_id(); index < 8 * kColumns; index += 32) {
        const uint32_t row = first + index / kColumns, channel = index % kColumns * 4;
        if (row < n_rows) {
          const auto o =
              load_shared<Float4>(results + ((row - first) * Shape::kStateStride + channel) * 4);
          if (work.slot < 0) {
            store_result(p.tensors, place(row), channel, o);
          } else {
            store_global(p.partial_o + (slot_row + (row - work.row_first)) * Shape::kDim + channel,
                         o);
          }
        }
      }
      sync_warp();  // before the next eight rows
    }
  }
}

// Streams the tiles of a piece through shared memory, and writes what the piece makes.
template <class Shape>
KVM_GPU void prefill_piece(const DecodeParams& p, const Work& work) {
  constexpr uint32_t kAhead = Shape::kStages - 1;  // tiles under way
  const PageClass& of = p.pool.classes[work.request.page_class];
  const bool weighted = work.request.log_weights >= 0;
  PrefillTask<Shape> task;
  // From a shuffle: it cannot be computed again, which would take several instructions for every
  // access.
  const SharedAddress stages = shuffle(shared_start(), 0);
  const uint32_t slice = PrefillTask<Shape>::first_of_slice(warp_id());
  uint32_t token_first = work.begin;  // of the tile

  SharedAddress free = stages;
  task.next = look_up<Shape::kSlice>(p, work, token_first + slice);
#pragma unroll 1
  for (uint32_t i = 0; i < kAhead; ++i) {
    const Place place = task.next;
    const uint32_t coming = token_first + i * Shape::kTile;
    task.next = look_up<Shape::kSlice>(p, work, coming + Shape::kTile + slice);
    if (coming < work.end) {
      task.copy_slice(p, of, work, place, free, coming, i);
    }
    copy_async_commit();
    free += Shape::kStageBytes;
  }
  task.queries.place(stages + Shape::kRingBytes);
  task.load_queries(p, work);

  SharedAddress full = stages;
  for (; token_first < work.end; token_first += Shape::kTile) {
    // One group is committed per tile, empty or not, so counting groups counts tiles.
    copy_async_wait<kAhead - 1>();
    if constexpr (Shape::kScaled) {
      task.unpack_scales(of, full);
    }
    if constexpr (Shape::kStepped) {
      task.unpack_steps(full);
    }
    sync_block();
    // The stage of the tile before: every warp has read it, for all have come past the barrier.
    const uint32_t coming = token_first + kAhead * Shape::kTile;
    if (coming < work.end) {
      task.copy_slice(p, of, work, task.next, free, coming, kAhead);
    }
    copy_async_commit();
    task.next = look_up<Shape::kSlice>(p, work, coming + Shape::kTile + slice);
    task.evaluate_tile(p, work, full, token_first, weighted);
    task.upper >>= 1;
    free = full;
    full += Shape::kStageBytes;
    full = full == stages + Shape::kRingBytes ? stages : full;
  }
  if constexpr (Shape::kStepped) {
    task.bring_sums();
  }
  sync_block();  // results go where stages and queries were, of other warps too
  task.finish(p, work, stages + warp_id() * Shape::kResultBytes);
}

// Does the work of one thread of one block.
template <class Shape>
KVM_GPU void prefill_thread(const DecodeParams& p) {
  const Work* work = p.work + block_id();
  for (;;) {
    prefill_piece<Shape>(p, *work);
    sync_block();  // before the next piece copies over the results
    if (work->next == 0) {
      return;
    }
    work = p.work + work->next;
  }
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_PREFILL_KERNEL_H_
