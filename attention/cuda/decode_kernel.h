// SPDX-License-Identifier: Apache-2.0
// Exact attention of a few query rows over paged keys and values: the split-KV decode kernel.
// docs/gpu.md has the reasons.
//
// A block takes its pieces of work one after the other, then pieces of the tail (tail.h). Its warps
// share the tiles of kTile tokens of a piece, tile t going to warp t % kWarps, and each streams its
// own through kStages stages of shared memory that no other warp touches: until the end of a piece
// there is no block barrier. What a warp makes of a tile is in warp_rows.h and code_rows.h. At the
// end the warps' states merge in a fixed order.
//
// Shared memory, per warp: kStages stages of [K tile][V tile] (tiles.h). Where rows are bytes,
// words [token] for K, then for V, follow: the one of the page that has the token's scale in one of
// its halves, for copies take no less. Where they are of 4 bits, [token][group] words do, the steps
// of code_rows.h, and behind all stages what each lane has of sums of queries. At the end of a
// piece the same bytes hold the warp's state: o [row][kStateStride], m [row], l [row] in fp32.
// Behind that of the first warp, the number of the block's next piece.
#ifndef KVM_ATTENTION_CUDA_DECODE_KERNEL_H_
#define KVM_ATTENTION_CUDA_DECODE_KERNEL_H_

#include "attention/cuda/code_rows.h"
#include "attention/cuda/tail.h"

namespace kvm::attention::gpu {

// REQUIRES: as TileShape; kTile at most 32; kStages >= 2.
template <Element kElementType, uint32_t kDimValue, uint32_t kTileTokens, uint32_t kStageCount,
          uint32_t kWarpCount, uint32_t kRowTileCount>
struct DecodeShape : TileShape<kElementType, kDimValue, kTileTokens> {
  using Tiles = TileShape<kElementType, kDimValue, kTileTokens>;
  static constexpr uint32_t kStages = kStageCount;
  static constexpr uint32_t kWarps = kWarpCount;
  static constexpr uint32_t kRowTiles = kRowTileCount;  // of 16 rows

  static constexpr uint32_t kThreads = 32 * kWarps;
  static constexpr uint32_t kRows = 16 * kRowTiles;
  // Of a plane.
  static constexpr uint32_t kScaleBytes = Tiles::kNarrow ? kTileTokens * Tiles::kGroups * 4 : 0;
  static constexpr uint32_t kStageBytes = 2 * (Tiles::kPlaneBytes + kScaleBytes);
  static constexpr uint32_t kRingBytes = kStages * kStageBytes;
  static constexpr uint32_t kStateBytes = kRows * (Tiles::kStateStride + 2) * 4;
  static constexpr uint32_t kSumBytes = Tiles::kStepped ? bytes_of_sums(kRowTiles) : 0;
  static constexpr uint32_t kNextAt = kStateBytes;
  static constexpr uint32_t kWarpBytes = kRingBytes + kSumBytes > kNextAt + 4
                                             ? kRingBytes + kSumBytes
                                             : (kNextAt + 4 + 127) / 128 * 128;
  static constexpr uint32_t kSharedBytes = kWarps * kWarpBytes;

  static_assert(kTileTokens <= 32 && kStages >= 2 && kTileTokens % Tiles::kStepRows == 0);
  // moved() counts on it.
  static_assert(kStageBytes % 128 == 0 && kWarpBytes % 128 == 0);
};

// The scales of a thread's columns of a tile: of keys and of values.
template <uint32_t kTile, Element kElement, bool kScaled = kIsScaled<kElement>>
struct ColumnScales : NoScales {};

template <uint32_t kTile, Element kElement>
struct ColumnScales<kTile, kElement, true> {
  uint32_t both[kTile / 8][2];  // V's above K's
  float log[kTile / 8][2];      // of V's

  // own: those of this lane's token.
  KVM_GPU void spread(uint32_t own) {
    const float own_log = bounded_log_scale(float_from_bits(own & 0xffff0000u));
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

// Where rows are of 4 bits, of values only, and only what a maximum has of them: the steps of a
// group are read where they are used.
template <uint32_t kTile>
struct ColumnScales<kTile, Element::kI4, false> {
  float log[kTile / 8][2];

  KVM_GPU void spread(float own_log) {
#pragma unroll
    for (uint32_t n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        log[n][i] = shuffle(own_log, n * 8 + lane_id() % 4 * 2 + i);
      }
    }
  }
  KVM_GPU float raise(float score, uint32_t n, uint32_t i) const { return score + log[n][i]; }
  KVM_GPU float apply(float weight, uint32_t, uint32_t) const { return weight; }
};

// The part of a piece that one warp evaluates: its queries, its state, its stages.
template <class Shape>
struct WarpTask {
  using Rows = typename RowsFor<Shape>::Type;
  using Scores = typename Rows::Scores;
  using Columns = ColumnScales<Shape::kTile, Shape::kElement>;

  RegisterQueries<Shape> queries;
  Rows rows;
  // Of this lane's token in the i-th tile ahead, bit i: its scale of K is the upper half of the
  // word that was copied.
  uint32_t upper = 0;
  uint32_t limit_least;  // tokens that all rows see: tiles below need no mask

  SharedAddress stages;
  Place next;                // of the tile to be copied next
  float next_weight = 0.0f;  // log weight of this lane's token of the tile to be evaluated next

  KVM_GPU void load_queries(const DecodeParams& p, const Work& work);
  KVM_GPU void weigh(const DecodeParams& p, const Work& work, uint32_t token_first);
  // n_tokens: that the piece has from the first one of the tile on. The tile is the `ahead`-th
  // behind the one that is evaluated next.
  KVM_GPU void copy_tile(const DecodeParams& p, const PageClass& of, const Place& place,
                         SharedAddress to, uint32_t n_tokens, uint32_t ahead);
  KVM_GPU void copy_scales(const PageClass& of, const uint8_t* page, uint32_t row, SharedAddress to,
                           uint32_t n_tokens, uint32_t ahead);
  KVM_GPU void copy_steps(const PageClass& of, const uint8_t* page, uint32_t row, SharedAddress to,
                          uint32_t n_tokens);
  KVM_GPU SharedAddress sums() const { return stages + Shape::kRingBytes; }
  KVM_GPU void evaluate_tile(const DecodeParams& p, const PageClass& of, uint32_t piece,
                             SharedAddress stage, uint32_t token_first, bool weighted);
  KVM_GPU void hide_unseen(const DecodeParams& p, const Work& work, uint32_t token_first,
                           Scores& s);
  KVM_GPU uint32_t own_scales(const PageClass& of, SharedAddress scales);
  KVM_GPU void store_state(uint32_t n_rows);
};

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
      if constexpr (Shape::kStepped) {
        rows.load_queries(from, valid, t, half, p.tensors.dtype_q, sums(), queries.all[t]);
      } else {
        rows.load_queries(from, valid, t, half, p, queries.all[t]);
      }
    }
  }
  rows.reset();
  limit_least = seen_by_all(work);
  next_weight = 0.0f;
}

// Loads the log weight of the token of this lane in the tile whose first token is `token_first`.
template <class Shape>
KVM_GPU void WarpTask<Shape>::weigh(const DecodeParams& p, const Work& work, uint32_t token_first) {
  const uint32_t token = token_first + lane_id() % Shape::kTile;
  if (token < work.end) {
    next_weight = load_global<float>(log_weight_at(p, work, token));
  }
}

template <class Shape>
KVM_GPU void WarpTask<Shape>::copy_tile(const DecodeParams& p, const PageClass& of,
                                        const Place& place, SharedAddress to, uint32_t n_tokens,
                                        uint32_t ahead) {
  const uint8_t* page = page_of(p.pool, of, place.entry);
  copy_rows<Shape, Shape::kTile>(of, page, place, to, 0, n_tokens);
  if constexpr (Shape::kScaled) {
    copy_scales(of, page, place.row, to + 2 * Shape::kPlaneBytes, n_tokens, ahead);
  }
  if constexpr (Shape::kStepped) {
    copy_steps(of, page, place.row, to + 2 * Shape::kPlaneBytes, n_tokens);
  }
}

// row: of this lane's token.
template <class Shape>
KVM_GPU void WarpTask<Shape>::copy_scales(const PageClass& of, const uint8_t* page, uint32_t row,
                                          SharedAddress to, uint32_t n_tokens, uint32_t ahead) {
  const auto of_k =
      reinterpret_cast<uint64_t>(page + of.scales_offset_bytes + static_cast<uint64_t>(row) * 2);
  const uint64_t of_v = of_k + of.v_scales_offset_bytes;
  const bool valid = lane_id() % Shape::kTile < n_tokens;
  if constexpr (Shape::kTile == 32) {
    copy_async_4(to + lane_id() * 4, word_of(of_k), valid);
    copy_async_4(to + Shape::kScaleBytes + lane_id() * 4, word_of(of_v), valid);
  } else {
    // Half of the lanes would have nothing to copy: they take those of V.
    copy_async_4(to + lane_id() * 4, word_of(lane_id() < Shape::kTile ? of_k : of_v), valid);
  }
  upper |= static_cast<uint32_t>(is_upper(of_k)) << ahead;
}

// The steps of a token are as many bytes as one copy takes.
template <uint32_t kBytes>
KVM_GPU void copy_steps_of_token(SharedAddress to, const void* from, bool valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 4) {
    copy_async_4(to, from, valid);
  } else if constexpr (kBytes == 8) {
    copy_async_8(to, from, valid);
  } else {
    copy_async_16(to, from, valid);
  }
}

// row: of this lane's token.
template <class Shape>
KVM_GPU void WarpTask<Shape>::copy_steps(const PageClass& of, const uint8_t* page, uint32_t row,
                                         SharedAddress to, uint32_t n_tokens) {
  constexpr uint32_t kBytes = Shape::kGroups * 4;
  const uint8_t* const k = page + of.scales_offset_bytes + static_cast<uint64_t>(row) * kBytes;
  const uint8_t* const v = k + of.v_scales_offset_bytes;
  const bool valid = lane_id() % Shape::kTile < n_tokens;
  if constexpr (Shape::kTile == 32) {
    copy_steps_of_token<kBytes>(to + lane_id() * kBytes, k, valid);
    copy_steps_of_token<kBytes>(to + Shape::kScaleBytes + lane_id() * kBytes, v, valid);
  } else {
    // Half of the lanes would have nothing to copy: they take those of V.
    copy_steps_of_token<kBytes>(to + lane_id() * kBytes, lane_id() < Shape::kTile ? k : v, valid);
  }
}

// The scales of this lane's token of a tile, V's above K's.
template <class Shape>
KVM_GPU uint32_t WarpTask<Shape>::own_scales(const PageClass& of, SharedAddress scales) {
  const SharedAddress at = scales + lane_id() % Shape::kTile * 4;
  const uint32_t k = load_shared<uint32_t>(at);
  const uint32_t v = load_shared<uint32_t>(at + Shape::kScaleBytes);
  return scales_in(of, k, v, (upper & 1) != 0);
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

// Folds the tile in `stage`, whose first token is `token_first`, into the state.
template <class Shape>
KVM_GPU void WarpTask<Shape>::evaluate_tile(const DecodeParams& p, const PageClass& of,
                                            uint32_t piece, SharedAddress stage,
                                            uint32_t token_first, bool weighted) {
  const SharedAddress scales = stage + 2 * Shape::kPlaneBytes;
  [[maybe_unused]] const StepsByToken<Shape::kGroups> key_steps{scales};
  [[maybe_unused]] const StepsByToken<Shape::kGroups> value_steps{scales + Shape::kScaleBytes};
  Scores s = {};
  Columns columns;
  bool broken = false;
  if constexpr (Shape::kStepped) {
    rows.scores(queries, stage, key_steps, sums(), p.scale_log2, s);
    columns.spread(own_log_steps<Shape::kTile>(value_steps, &broken));
  } else {
    rows.scores(queries, stage, s);
    if constexpr (Shape::kScaled) {
      columns.spread(own_scales(of, scales));
    }
    rows.scale(columns, p.scale_log2, s);
  }
  // One test for a tile, not one for a score: most have neither.
  if (weighted || p.softcap_log2 != 0.0f) {
    const auto weight_of = [&](uint32_t n, uint32_t i) {
      return weighted ? shuffle(next_weight, n * 8 + lane_id() % 4 * 2 + i) : 0.0f;
    };
    rows.cap_and_weigh(p, weight_of, s);
  }
  if (token_first + Shape::kTile > limit_least) {
    hide_unseen(p, p.work[piece], token_first, s);
  }
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
    rows.soften(t, columns, s[t]);
  }
  if constexpr (Shape::kStepped) {
    if (any_lane(broken)) {
      take_out_broken(rows, value_steps, s);
    }
    rows.add_values(stage + Shape::kPlaneBytes, value_steps, s);
  } else {
    rows.add_values(stage + Shape::kPlaneBytes, s);
  }
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
      const float sum = rows.sum_of(t, half);
      if constexpr (Shape::kStepped) {
        rows.gather_zeros(t, half);
      }
      const uint32_t row = t * 16 + half * 8 + lane_id() / 4;
      if (row < n_rows) {
        if (lane_id() % 4 == 0) {
          store_shared(m_at + row * 4, rows.m[t][half]);
          store_shared(l_at + row * 4, sum);
        }
        rows.store_channels(t, half, 1.0f, stages + row * Shape::kStateStride * 4);
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
  task.next = look_up<Shape::kTile>(p, work, token_first);
#pragma unroll 1
  for (uint32_t i = 0; i < kAhead; ++i) {
    const Place place = task.next;
    const uint32_t coming = token_first + i * kStride;
    task.next = look_up<Shape::kTile>(p, work, coming + kStride);
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
    task.next = look_up<Shape::kTile>(p, work, coming + kStride);
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
      const Decay<Shape::kNarrow> decay(load_shared<float>(state + m_at) - base);
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
    const uint32_t asked = thread_id() == 0 ? ask_for_piece(p, p.work[piece]) : kNotAsked;
    sync_block();
    finish_piece<Shape>(p, p.work[piece]);
    if (thread_id() == 0) {
      store_shared(shared_start() + Shape::kNextAt, piece_behind(p, p.work[piece], asked));
    }
    sync_block();
    piece = load_shared<uint32_t>(shared_start() + Shape::kNextAt);
    sync_block();  // before the next piece copies over it, and over the states
  } while (piece != 0);
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_DECODE_KERNEL_H_
