// SPDX-License-Identifier: Apache-2.0
// What a warp makes of a tile whose rows are of 4 bits: as warp_rows.h, which has the rest.
//
// Such rows (codecs/low_bits.h, int4) are codes of steps up from a zero, with a scale and a zero
// for each group g of 64 channels: an element is code * scale_g + zero_g. So
//   q k = sum over g of scale_g (q code)_g + zero_g (sum of q)_g
//   o   = o 2^(m - m') + round(p scale_g) codes of V,  and z_g = z_g 2^(m - m') + sum p zero_g
// where z_g is added to all channels of the group at the end of a piece. The part of a maximum that
// scales of rows of bytes have is that of a row's largest group: the larger of scale_g and
// |zero_g| / 16. A code needs no conversion: its 4 bits, alone in 16, are the fp16 number
// code * 2^-24 or, 4 bits further up, code * 2^-20, which the matrix unit multiplies as it does all
// numbers. Queries are divided, and results multiplied, by what those lack.
//
// A word of steps has the scale in its lower half, the zero in the upper. How those of a tile lie
// in shared memory a type says, Steps below: StepsByToken, or that of the prefill kernel. It has
//   zero_word(eight)    a word in whose upper half is the zero that this lane has of a B fragment:
//                       of group lane % 4, of token lane / 4 of the eight-th 8
//   columns(sixteen)    those of this thread's columns of 16 tokens:
//     begin_group(g)
//     scale(h, i, g), zero(h, i, g)   of column i of 8 tokens h, of the group that was begun last
#ifndef KVM_ATTENTION_CUDA_CODE_ROWS_H_
#define KVM_ATTENTION_CUDA_CODE_ROWS_H_

#include "attention/cuda/warp_rows.h"

namespace kvm::attention::gpu {

// The two halves of a word of steps.
KVM_GPU float scale_of_steps(uint32_t steps) { return float_from_bits(steps << 16); }
KVM_GPU float zero_of_steps(uint32_t steps) { return float_from_bits(steps & 0xffff0000u); }

// From 8 codes to 4 pairs of fp16 numbers: pair j has codes j and j + 4, times 2^-24 where j is
// even, else 2^-20.
KVM_GPU void part_codes(uint32_t codes, uint32_t (&to)[4]) {
  to[0] = codes & 0x000f000fu;
  to[1] = codes & 0x00f000f0u;
  to[2] = codes >> 8 & 0x000f000fu;
  to[3] = codes >> 8 & 0x00f000f0u;
}
inline constexpr float kCodeUnit = 0x1p-24f, kUpperCodeUnit = 0x1p-20f;

// Bytes of shared memory that hold what a warp keeps of the sums of its queries.
constexpr uint32_t bytes_of_sums(uint32_t row_tiles) { return row_tiles * 32 * 16; }

// The state of the rows that one warp has, where keys and values are of 4 bits.
template <class Shape>
struct CodeRows : WarpRows<Shape> {
  using Base = WarpRows<Shape>;
  using Base::kOutTiles, Base::kQuerySteps;
  using Base::o, Base::z;
  using typename Base::Scores;

  // Where this lane's part of the sums that begin at `sums` is: of the A fragment that makes
  // q * zero from zeros. No other lane reads it. Of the rows lane / 4 and lane / 4 + 8, words 0 and
  // 1 have the first and second part, words 2 and 3 the third one, of the sum of the queries of
  // group lane % 4: as bf16, together they have the bits of a float. The upper half of the latter
  // two meets nothing; it has the power of two that makes up for divisions.
  KVM_GPU static SharedAddress sums_at(SharedAddress sums, uint32_t row_tile) {
    return sums + (row_tile * 32 + lane_id()) * 16;
  }

  // As of WarpRows; writes this lane's part of the sums too.
  KVM_GPU void load_queries(const uint16_t* from, bool valid, uint32_t row_tile, uint32_t half,
                            Dtype dtype, SharedAddress sums, Fragment (&q)[kQuerySteps]);
  // Scores in units of log 2. steps: of keys; of values, below.
  template <class Queries, class Steps>
  KVM_GPU void scores(const Queries& queries, SharedAddress keys, const Steps& steps,
                      SharedAddress sums, float scale_log2, Scores& s);
  // Rows that see a value which is not a number get one into their sums of zeros.
  // word_at(token, group): where the word of steps is.
  template <class WordAt>
  KVM_GPU void note_broken(WordAt word_at, const Scores& s);
  // REQUIRES: all steps are numbers.
  template <class Steps>
  KVM_GPU void add_values(SharedAddress values, const Steps& steps, const Scores& s);
  // Makes sums of p * zero those of all columns, which store_channels adds to the channels.
  KVM_GPU void gather_zeros(uint32_t row_tile, uint32_t half);
  KVM_GPU void store_channels(uint32_t row_tile, uint32_t half, float factor, SharedAddress to);

 private:
  template <class Queries>
  KVM_GPU static void get_group(const Queries& queries, uint32_t group,
                                Fragment (&q)[Shape::kRowTiles][4]);
  template <class Columns>
  KVM_GPU static void add_group(const Fragment (&q)[Shape::kRowTiles][4], SharedAddress from,
                                const Columns& own, uint32_t sixteen, uint32_t group, Scores& s);
};

// The state of rows as the shape's keys and values need it.
template <class Shape, bool kStepped = Shape::kStepped>
struct RowsFor {
  using Type = WarpRows<Shape>;
};
template <class Shape>
struct RowsFor<Shape, true> {
  using Type = CodeRows<Shape>;
};

// The larger of two magnitudes, as bits.
KVM_GPU uint32_t larger_of(uint32_t a, uint32_t b) { return a > b ? a : b; }

// A row of queries for keys of 4 bits, of which load_matrix gives each lane 8 channels that follow
// each other: part_codes pairs them as dealt here. Divided so that the largest of the row is about
// 2^12, and those that meet codes times 2^-20 by 2^4 more. LIMIT: queries below 2^119, which then
// fit into fp16.
template <class Shape>
KVM_GPU void CodeRows<Shape>::load_queries(const uint16_t* from, bool valid, uint32_t row_tile,
                                           uint32_t half, Dtype dtype, SharedAddress sums,
                                           Fragment (&q)[kQuerySteps]) {
  from += lane_id() % 4 * 8;
  const bool is_bf16 = dtype == Dtype::kBf16;
  const auto number = [is_bf16](uint32_t packed, uint32_t i) {
    return is_bf16 ? unpack<Element::kBf16>(packed, i) : unpack<Element::kF16>(packed, i);
  };
  uint32_t top = 0;
#pragma unroll
  for (uint32_t c = 0; c < Shape::kRowChunks; ++c) {
    const Word4 eight = valid ? load_global<Word4>(from + c * 32) : Word4{0, 0, 0, 0};
    q[2 * c].words[half] = eight.x;
    q[2 * c].words[half + 2] = eight.y;
    q[2 * c + 1].words[half] = eight.z;
    q[2 * c + 1].words[half + 2] = eight.w;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t packed = q[2 * c + i / 4].words[half + i / 2 % 2 * 2];
      top = larger_of(top, bits_from_float(number(packed, i % 2)) & 0x7fffffffu);
    }
  }
#pragma unroll
  for (uint32_t mask = 1; mask <= 2; mask *= 2) {
    top = larger_of(top, bits_from_float(shuffle_xor(float_from_bits(top), mask)));
  }
  // As for rows of bytes; 2^(e - 12 + 24) has to be there.
  constexpr uint32_t kLeast = 13, kMost = 242;
  const uint32_t exponent = top >> 23;
  const uint32_t e = exponent < kLeast ? kLeast : exponent > kMost ? kMost : exponent;
  const float down = float_from_bits((127 + 12 + 127 - e) << 23);
  float own_sums[Shape::kGroups] = {};
#pragma unroll
  for (uint32_t c = 0; c < Shape::kRowChunks; ++c) {
    float x[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      x[i] = number(q[2 * c + i / 4].words[half + i / 2 % 2 * 2], i % 2) * down;
      own_sums[c / 2] += x[i];
    }
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      const float unit = j % 2 == 0 ? 1.0f : kCodeUnit / kUpperCodeUnit;
      q[2 * c + j / 2].words[half + j % 2 * 2] = pack<Element::kF16>(x[j] * unit, x[j + 4] * unit);
    }
  }
  float own = 0.0f;
#pragma unroll
  for (uint32_t g = 0; g < Shape::kGroups; ++g) {
    float sum = own_sums[g];
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    own = lane_id() % 4 == g ? sum * kCodeUnit : own;
  }
  const uint32_t first = pack<Element::kBf16>(own, 0.0f);
  own -= unpack<Element::kBf16>(first, 0);
  const uint32_t second = pack<Element::kBf16>(own, 0.0f);
  own -= unpack<Element::kBf16>(second, 0);
  const SharedAddress at = sums_at(sums, row_tile) + half * 4;
  store_shared(at, first | second << 16);
  store_shared(at + 8, pack<Element::kBf16>(own, 0.0f) | (e + 12) << 7 << 16);
}

// The steps of this thread's columns of 16 tokens: [score tile][column of it]. Four groups are
// loaded one by one, where they are used: registers do not hold them all.
template <uint32_t kGroups>
struct StepsOfColumns {
  static constexpr bool kAtOnce = kGroups < 4;
  SharedAddress at;  // of the first column
  uint32_t of[2][2][kAtOnce ? kGroups : 1];

  // steps: of the first token.
  KVM_GPU explicit StepsOfColumns(SharedAddress steps)
      : at(steps + lane_id() % 4 * 2 * kGroups * 4) {
    static_assert(kGroups == 1 || kGroups == 2 || kGroups == 4);
#pragma unroll
    for (uint32_t tile = 0; tile < 2; ++tile) {
      const SharedAddress from = at + tile * 8 * kGroups * 4;
      if constexpr (kGroups == 1) {
        const Word2 both = load_shared<Word2>(from);
        of[tile][0][0] = both.x, of[tile][1][0] = both.y;
      } else if constexpr (kGroups == 2) {
        const Word4 all = load_shared<Word4>(from);
        of[tile][0][0] = all.x, of[tile][0][1] = all.y, of[tile][1][0] = all.z,
        of[tile][1][1] = all.w;
      }
    }
  }
  KVM_GPU void begin_group(uint32_t group) {
    if constexpr (!kAtOnce) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        of[i / 2][i % 2][0] =
            load_shared<uint32_t>(at + ((i / 2 * 8 + i % 2) * kGroups + group) * 4);
      }
    }
  }
  // Of the group that was begun last.
  KVM_GPU float scale(uint32_t tile, uint32_t column, uint32_t group) const {
    return scale_of_steps(of[tile][column][kAtOnce ? group : 0]);
  }
  KVM_GPU float zero(uint32_t tile, uint32_t column, uint32_t group) const {
    return zero_of_steps(of[tile][column][kAtOnce ? group : 0]);
  }
};

// Steps of the keys or the values of a tile as words [token][group].
template <uint32_t kGroups>
struct StepsByToken {
  SharedAddress at;

  KVM_GPU SharedAddress word_at(uint32_t token, uint32_t group) const {
    return at + (token * kGroups + group) * 4;
  }
  KVM_GPU uint32_t zero_word(uint32_t eight) const {
    return load_shared<uint32_t>(word_at(lane_id() / 4, lane_id() % kGroups) +
                                 eight * 8 * kGroups * 4);
  }
  KVM_GPU StepsOfColumns<kGroups> columns(uint32_t sixteen) const {
    return StepsOfColumns<kGroups>(at + sixteen * 16 * kGroups * 4);
  }
};

template <class Shape>
template <class Queries>
KVM_GPU void CodeRows<Shape>::get_group(const Queries& queries, uint32_t group,
                                        Fragment (&q)[Shape::kRowTiles][4]) {
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
    for (uint32_t step = 0; step < 4; ++step) {
      q[t][step] = queries.get(t, 4 * group + step);
    }
  }
}

// Adds what a group of channels makes with 16 keys, of which a lane has a row at `from`.
template <class Shape>
template <class Columns>
KVM_GPU void CodeRows<Shape>::add_group(const Fragment (&q)[Shape::kRowTiles][4],
                                        SharedAddress from, const Columns& own, uint32_t sixteen,
                                        uint32_t group, Scores& s) {
  uint32_t b[4];
  load_matrix_x4(b, from);
  float part[Shape::kRowTiles][2][4] = {};
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    uint32_t codes[4];
    part_codes(b[i], codes);
#pragma unroll
    for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
      const uint32_t step = i % 2 * 2;
      mma_16x8x16<Shape::kOperand>(part[t][i / 2], q[t][step].words, codes[0], codes[1]);
      mma_16x8x16<Shape::kOperand>(part[t][i / 2], q[t][step + 1].words, codes[2], codes[3]);
    }
  }
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        s[t][sixteen * 2 + h][i] += own.scale(h, i % 2, group) * part[t][h][i];
      }
    }
  }
}

// What zeros add to scores is one product of bf16, which has their range: a lane of B has one zero
// for all three parts of the sum of a group's queries.
template <class Shape>
template <class Queries, class Steps>
KVM_GPU void CodeRows<Shape>::scores(const Queries& queries, SharedAddress keys, const Steps& steps,
                                     SharedAddress sums, float scale_log2, Scores& s) {
  constexpr uint32_t kGroups = Shape::kGroups;
  const SharedAddress at = first_keys<Shape>(keys);
  if constexpr (Queries::kAreLoaded) {
#pragma unroll
    for (uint32_t g = 0; g < kGroups; ++g) {
      Fragment q[Shape::kRowTiles][4];
      get_group(queries, g, q);
#pragma unroll
      for (uint32_t n = 0; n < Shape::kTile / 16; ++n) {
        auto own = steps.columns(n);
        own.begin_group(g);
        add_group(q, moved<Shape>(at, n * 16, g * 2), own, n, g, s);
      }
    }
  } else {
#pragma unroll
    for (uint32_t n = 0; n < Shape::kTile / 16; ++n) {
      auto own = steps.columns(n);
#pragma unroll
      for (uint32_t g = 0; g < kGroups; ++g) {
        own.begin_group(g);
        Fragment q[Shape::kRowTiles][4];
        get_group(queries, g, q);
        add_group(q, moved<Shape>(at, n * 16, g * 2), own, n, g, s);
      }
    }
  }
  uint32_t q_sums[Shape::kRowTiles][4];
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
    const Word4 own = load_shared<Word4>(sums_at(sums, t));
    q_sums[t][0] = own.x, q_sums[t][1] = own.y, q_sums[t][2] = own.z, q_sums[t][3] = own.w;
  }
#pragma unroll
  for (uint32_t column = 0; column < Shape::kTile / 8; ++column) {
    const uint32_t word = steps.zero_word(column);
    const uint32_t twice = permute_bytes<0x3232>(word, 0), once = permute_bytes<0x5432>(word, 0);
#pragma unroll
    for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
      mma_16x8x16<Element::kBf16>(s[t][column], q_sums[t], twice, once);
    }
  }
#pragma unroll
  for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const float unit = float_from_bits(q_sums[t][2 + i / 2] & 0xffff0000u) * scale_log2;
#pragma unroll
      for (uint32_t column = 0; column < Shape::kTile / 8; ++column) {
        s[t][column][i] *= unit;
      }
    }
  }
}

// What a maximum has of the value of this lane's token of a warp's own tile. broken: a step of it
// is not a number.
template <uint32_t kTile, uint32_t kGroups>
KVM_GPU float own_log_steps(const StepsByToken<kGroups>& steps, bool* broken) {
  float top = 0.0f, sum = 0.0f;
#pragma unroll
  for (uint32_t g = 0; g < kGroups; ++g) {
    const uint32_t own = load_shared<uint32_t>(steps.word_at(lane_id() % kTile, g));
    const float scale = scale_of_steps(own), zero = fabsf(zero_of_steps(own)) * 0x1p-4f;
    top = fmaxf(top, fmaxf(scale, zero));
    sum += scale + zero;
  }
  *broken = sum != sum;
  return bounded_log_scale(top);
}

template <class Shape>
template <class WordAt>
KVM_GPU void CodeRows<Shape>::note_broken(WordAt word_at, const Scores& s) {
#pragma unroll
  for (uint32_t n = 0; n < Shape::kTile / 8; ++n) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
#pragma unroll
      for (uint32_t g = 0; g < Shape::kGroups; ++g) {
        const uint32_t own = load_shared<uint32_t>(word_at(n * 8 + lane_id() % 4 * 2 + i, g));
        const float sum = scale_of_steps(own) + zero_of_steps(own);
#pragma unroll
        for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
          for (uint32_t half = 0; half < 2; ++half) {
            if (sum != sum && s[t][n][2 * half + i] != 0.0f) {
              z[t][half][g] = sum;
            }
          }
        }
      }
    }
  }
}

// Of a warp's own tile with values that are not numbers: rows that see one have it in their sum of
// zeros, and its steps become 0, for no weight makes them harmless to the other rows. Rarely
// called, so that add_values need not ask.
template <class Shape>
KVM_GPU void take_out_broken(CodeRows<Shape>& rows, const StepsByToken<Shape::kGroups>& steps,
                             const typename CodeRows<Shape>::Scores& s) {
  rows.note_broken([steps](uint32_t token, uint32_t group) { return steps.word_at(token, group); },
                   s);
  sync_warp();
#pragma unroll
  for (uint32_t g = 0; g < Shape::kGroups; ++g) {
    const SharedAddress own_at = steps.word_at(lane_id() % Shape::kTile, g);
    const uint32_t own = load_shared<uint32_t>(own_at);
    const float sum = scale_of_steps(own) + zero_of_steps(own);
    if (sum != sum && lane_id() < Shape::kTile) {
      store_shared(own_at, uint32_t{0});
    }
  }
  sync_warp();
}

// Pairs of bytes were transposed, 4 channels of two tokens in a word: what
// part_codes makes of it are the B fragments of 4 tiles of results, of channels 4 u + j for column
// u of tile j.
template <class Shape>
template <class Steps>
KVM_GPU void CodeRows<Shape>::add_values(SharedAddress values, const Steps& steps,
                                         const Scores& s) {
  const SharedAddress at = first_values<Shape>(values);
#pragma unroll
  for (uint32_t k = 0; k < Shape::kTile / 16; ++k) {
    auto own = steps.columns(k);
#pragma unroll
    for (uint32_t g = 0; g < Shape::kGroups; ++g) {
      own.begin_group(g);
      uint32_t a[Shape::kRowTiles][4];
#pragma unroll
      for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          // Columns of score tile 2 k + i / 2, in the upper rows or the lower ones.
          const float* const weight = &s[t][2 * k + i / 2][i % 2 * 2];
          a[t][i] = pack<Shape::kOperand>(weight[0] * own.scale(i / 2, 0, g),
                                          weight[1] * own.scale(i / 2, 1, g));
          z[t][i % 2][g] += weight[0] * own.zero(i / 2, 0, g);
          z[t][i % 2][g] += weight[1] * own.zero(i / 2, 1, g);
        }
      }
      uint32_t b[4];
      load_matrix_x4_transposed(b, moved<Shape>(at, k * 16, g * 2));
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c) {
        uint32_t low[4], high[4];
        part_codes(b[2 * c], low);
        part_codes(b[2 * c + 1], high);
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
#pragma unroll
          for (uint32_t t = 0; t < Shape::kRowTiles; ++t) {
            mma_16x8x16<Shape::kOperand>(o[t][8 * g + 4 * c + j], a[t], low[j], high[j]);
          }
        }
      }
    }
  }
}

template <class Shape>
KVM_GPU void CodeRows<Shape>::gather_zeros(uint32_t row_tile, uint32_t half) {
#pragma unroll
  for (float& zeros : z[row_tile][half]) {
    zeros += shuffle_xor(zeros, 1);
    zeros += shuffle_xor(zeros, 2);
  }
}

template <class Shape>
KVM_GPU void CodeRows<Shape>::store_channels(uint32_t row_tile, uint32_t half, float factor,
                                             SharedAddress to) {
#pragma unroll
  for (uint32_t g = 0; g < Shape::kGroups; ++g) {
    const float zero = z[row_tile][half][g];
#pragma unroll
    for (uint32_t c = 0; c < 2; ++c) {
      // Of 32 channels, the lane has 8 side by side: the j-th and j + 4-th in tile j.
      const float(&of)[kOutTiles][4] = o[row_tile];
      const uint32_t first = 8 * g + 4 * c;
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        store_shared(to + ((g * 2 + c) * 32 + lane_id() % 4 * 8 + i * 4) * 4,
                     Float4{(of[first][2 * half + i] / kCodeUnit + zero) * factor,
                            (of[first + 1][2 * half + i] / kUpperCodeUnit + zero) * factor,
                            (of[first + 2][2 * half + i] / kCodeUnit + zero) * factor,
                            (of[first + 3][2 * half + i] / kUpperCodeUnit + zero) * factor});
      }
    }
  }
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_CODE_ROWS_H_
