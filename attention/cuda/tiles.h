// SPDX-License-Identifier: Apache-2.0
// Tiles of keys and values in shared memory: how they lie there, and how a warp copies what lies in
// pages. What the kernels that attend have in common; warp_rows.h is the other half of it.
//
// A stage is [K tile][V tile], a tile being [token][dim] with the 16-byte chunk c of row r at chunk
// c xor (r % 8), so that neither the copies into it nor load_matrix have bank conflicts. Where rows
// are no multiple of 8 chunks, only every second one, or every fourth, begins with a line of 128
// bytes: there it is c xor (r / 2 % 4), or c xor (r / 4 % 2).
#ifndef KVM_ATTENTION_CUDA_TILES_H_
#define KVM_ATTENTION_CUDA_TILES_H_

#include "attention/cuda/pages.h"
#include "attention/cuda/params.h"
#include "attention/cuda/primitives.h"

namespace kvm::attention::gpu {

// How many lanes of a store of rows find their bank taken: 128 bytes are stored in a turn. Of lanes
// that follow each other in a row, each begins `pitch` channels further on.
constexpr uint32_t conflicts_of_stores(uint32_t stride, uint32_t channels, uint32_t pitch) {
  uint32_t conflicts = 0;
  for (uint32_t first = 0; first < 32; first += 32 / channels) {
    uint32_t banks = 0;
    for (uint32_t lane = first; lane < first + 32 / channels; ++lane) {
      const uint32_t taken = ((1u << channels) - 1) << (lane / 4 * stride + lane % 4 * pitch) % 32;
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

// REQUIRES: kDim a multiple of 16, of 64 where rows are of 4 bits, at most 256; kTile, in tokens, a
// multiple of 16, and of 32 where a row has an odd number of chunks.
template <Element kElementType, uint32_t kDimValue, uint32_t kTileTokens>
struct TileShape {
  static constexpr bool kIsMla = false;
  static constexpr Element kElement = kElementType;
  static constexpr uint32_t kDim = kDimValue;
  static constexpr uint32_t kTile = kTileTokens;

  static constexpr bool kScaled = kIsScaled<kElement>;           // rows of bytes
  static constexpr bool kStepped = kHasSteps<kElement>;          // rows of 4 bits
  static constexpr bool kNarrow = kIsNarrow<kElement>;           // either
  static constexpr uint32_t kGroups = kStepped ? kDim / 64 : 1;  // of a row, with parameters each
  // The matrix unit gets these: bytes of either kind, and codes, are exact in fp16.
  static constexpr Element kOperand = kNarrow ? Element::kF16 : kElement;
  static constexpr uint32_t kRowBytes = kDim * kElementBits<kElement> / 8;
  static constexpr uint32_t kRowChunks = kRowBytes / 16;
  // Chunks of a row change places within groups of so many. Of rows that follow each other,
  // kLineRows begin at different places of a line.
  static constexpr uint32_t kGroupChunks = power_in(kRowChunks, 8);
  static constexpr uint32_t kLineRows = 8 / kGroupChunks;
  // A warp copies kStepRows rows, the least that are whole copies, in kStepCopies of them.
  static constexpr uint32_t kStepRows = 32 / power_in(kRowChunks, 32);
  static constexpr uint32_t kStepCopies = kStepRows * kRowChunks / 32;
  static constexpr uint32_t kPlaneBytes = kTile * kRowBytes;
  // Rows of results in fp32, where a warp leaves them in shared memory: floats beyond the channels
  // put the rows that a store takes in one turn into different banks.
  static constexpr uint32_t kStateChannels = kNarrow ? 4 : 2;  // that a lane stores at once
  static constexpr uint32_t kStatePitch = kStepped ? 8 : kStateChannels;
  static constexpr uint32_t kStateStride = kStepped  ? kDim + 4
                                           : kScaled ? kDim + (48 - kDim % 32) % 32
                                                     : kDim + 8;

  static_assert(kDim <= 256 && kTile % 16 == 0);
  static_assert(kRowChunks % 2 == 0 || (kScaled && kTile % 32 == 0));
  static_assert(!kStepped || kDim % 64 == 0);
  static_assert(kStateStride % kStateChannels == 0);
  static_assert(conflicts_of_stores(kStateStride, kStateChannels, kStatePitch) == 0);
};

// Byte offset of chunk `chunk` of row `row` of a tile.
template <class Shape>
KVM_GPU uint32_t tile_offset(uint32_t row, uint32_t chunk) {
  return row * Shape::kRowBytes + ((chunk ^ (row / Shape::kLineRows % Shape::kGroupChunks)) * 16);
}

// From the address of (row, chunk) of a tile to that of (row + rows, chunk + chunks): constants,
// but for an exclusive or. REQUIRES: the numbers that are added have no bit in common, of rows in
// the lowest three; tiles begin at multiples of 128.
template <class Shape>
KVM_GPU SharedAddress moved(SharedAddress from, uint32_t rows, uint32_t chunks) {
  constexpr uint32_t kInGroup = Shape::kGroupChunks - 1;
  return (from ^ (((chunks ^ rows / Shape::kLineRows) & kInGroup) * 16)) + rows * Shape::kRowBytes +
         (chunks & ~kInGroup) * 16;
}

// This lane's row of the first four matrices: 16 tokens by two chunks. Of K, the chunks of 8 tokens
// follow each other; of V, the tokens of a chunk.
template <class Shape>
KVM_GPU SharedAddress first_keys(SharedAddress keys) {
  return keys + tile_offset<Shape>(lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2);
}
template <class Shape>
KVM_GPU SharedAddress first_values(SharedAddress values) {
  return values + tile_offset<Shape>(lane_id() / 8 % 2 * 8 + lane_id() % 8, lane_id() / 16);
}

// Where the token of this lane in a stretch of tokens lies. The entry is loaded a tile ahead of its
// use, which therefore must not be before the copy: an address made of it is waited for.
struct Place {
  uint32_t entry;  // of the token's page; where the piece has no such token, 0, which is one too
  uint32_t row;    // among those of all heads of a plane of the page
  bool inside;  // all tokens of the stretch are there, in rows of one page that follow each other
};

// Finds the token of this lane in the kTokens, at most 32, from `token_first` of the request on.
template <uint32_t kTokens>
KVM_GPU Place look_up(const DecodeParams& p, const Work& work, uint32_t token_first) {
  const Request& request = work.request;
  const uint32_t lane = lane_id() % kTokens;
  const uint32_t token = token_first + lane;
  const uint32_t at = list_token(request, token);
  const uint32_t page = divide(p.pool.page_tokens, at);
  const uint32_t row = at - page * p.pool.page_tokens.divisor;
  Place place;
  place.entry = 0;
  if (token < work.end) {
    place.entry = load_global<uint32_t>(p.page_table + request.table + page);
  }
  place.row = work.head * p.pool.page_tokens.divisor + row;
  // Tokens of one run follow each other; then the last one's row says whether a page began.
  const uint32_t run_end =
      token < request.n_first && request.n_first < work.end ? request.n_first : work.end;
  place.inside = !any_lane(row < lane || token_first + kTokens > run_end);
  return place;
}

// Begins copying kTokens rows of K and of V, of the page that `page` is for this lane, to the rows
// from `first` on of the stage at `to`. Tokens that the piece does not have become zero rows: a row
// of V that is multiplied by a weight of 0 must not hold a NaN. n_tokens: that the piece has from
// the first of these on. kPlanes: 1 copies one plane alone, of V where `page` and `to` are those of
// V. REQUIRES: `first` is a multiple of kTokens.
template <class Shape, uint32_t kTokens, uint32_t kPlanes = 2>
KVM_GPU void copy_rows(const PageClass& of, const uint8_t* page, const Place& place,
                       SharedAddress to, uint32_t first, uint32_t n_tokens) {
  constexpr uint32_t kChunks = Shape::kRowChunks;
  static_assert(kTokens <= 32 && kTokens % Shape::kStepRows == 0);
  uint32_t row[Shape::kStepCopies], chunk[Shape::kStepCopies];
  SharedAddress at[Shape::kStepCopies];
#pragma unroll
  for (uint32_t part = 0; part < Shape::kStepCopies; ++part) {
    row[part] = (part * 32 + lane_id()) / kChunks;
    chunk[part] = (part * 32 + lane_id()) % kChunks;
    at[part] = to + tile_offset<Shape>(first + row[part], chunk[part]);
  }
  if (place.inside) {
    // The rows are one stretch of the plane, of which each lane takes every 32nd chunk.
    const uint32_t start = place.row * kChunks + (lane_id() - lane_id() % kTokens * kChunks);
    const uint8_t* k = page + static_cast<uint64_t>(start) * 16;
    [[maybe_unused]] const uint8_t* v = k + of.v_offset_bytes;
#pragma unroll
    for (uint32_t rows = 0; rows < kTokens; rows += Shape::kStepRows) {
#pragma unroll
      for (uint32_t part = 0; part < Shape::kStepCopies; ++part) {
        const SharedAddress there = moved<Shape>(at[part], rows, 0);
        const uint32_t offset = part * 512 + rows * Shape::kRowBytes;
        copy_async_16(there, k + offset);
        if constexpr (kPlanes == 2) {
          copy_async_16(there + Shape::kPlaneBytes, v + offset);
        }
      }
    }
  } else {
    const auto own =
        reinterpret_cast<uint64_t>(page + static_cast<uint64_t>(place.row) * Shape::kRowBytes);
#pragma unroll
    for (uint32_t rows = 0; rows < kTokens; rows += Shape::kStepRows) {
#pragma unroll
      for (uint32_t part = 0; part < Shape::kStepCopies; ++part) {
        const SharedAddress there = moved<Shape>(at[part], rows, 0);
        const bool valid = rows + row[part] < n_tokens;
        const auto* k =
            reinterpret_cast<const uint8_t*>(shuffle(own, rows + row[part])) + chunk[part] * 16;
        copy_async_16(there, k, valid);
        if constexpr (kPlanes == 2) {
          copy_async_16(there + Shape::kPlaneBytes, k + of.v_offset_bytes, valid);
        }
      }
    }
  }
}

// Scales of rows of bytes lie two in a word, and copies take no less than a word: says which half
// of its word a scale is, and where the word lies.
KVM_GPU bool is_upper(uint64_t address) { return (address & 2) != 0; }
KVM_GPU const void* word_of(uint64_t address) {
  return reinterpret_cast<const void*>(address & ~uint64_t{3});
}

// The scales of a token, V's above K's, of the words that have them.
KVM_GPU uint32_t scales_in(const PageClass& of, uint32_t k, uint32_t v, bool k_upper) {
  const bool v_upper = k_upper != is_upper(of.v_scales_offset_bytes);
  return (k >> (k_upper ? 16 : 0) & 0xffffu) | (v << (v_upper ? 0 : 16) & 0xffff0000u);
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_TILES_H_
