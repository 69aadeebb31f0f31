// SPDX-License-Identifier: Apache-2.0
// The scan, written once over a vector wrapper (base/simd/vec_*.h), which is included before. The
// file that includes this defines, before it, how its instructions sum codes and leads:
//
//   code_sums<kRows>(query, first, block, sums)
//       sums [kRows][64]: S of the keys for the kRows rows of the tile that begins at `first`
//   lead_sums(bias, a, b, lead)
//       bias + the products of the lead's codes (words a and b of kWidth keys) with lead[0], [1]
//   mask_lt(a, b)      bit i: a_i < b_i
//   inverse_of(a)      1 / a within 1e-6
//   kAnyPower          vec::scale_pow2 takes any power that is finite
//
// Keys lie in the order of positions in every vector: layout.h says how the bytes of a code row are
// permuted so that widening them needs no shuffle.
#ifndef KVM_HASH_INDEX_SKETCH_SCAN_KERNEL_H_
#define KVM_HASH_INDEX_SKETCH_SCAN_KERNEL_H_

#include "hash_index/sketch/lanes.h"
#include "hash_index/sketch/scan_args.h"

namespace kvm {
namespace hash_index {
namespace {

constexpr int kVecs = kScanKeys / vec::kWidth;

// 2^x within 4e-6, x finite, and at least -126 unless kAnyPower: 2^n times a polynomial that is
// minimax on [-.5, .5].
inline F exp2_of(F x) {
  const F n = vec::round_nearest(x);
  const F f = vec::sub(x, n);
  F p = vec::set1(0.009570102207362652f);
  p = vec::fma(p, f, vec::set1(0.05591785907745361f));
  p = vec::fma(p, f, vec::set1(0.240247443318367f));
  p = vec::fma(p, f, vec::set1(0.6931217908859253f));
  p = vec::fma(p, f, vec::set1(0.9999992847442627f));
  return vec::scale_pow2(p, n);
}

// Exponents beyond which the cap is reached and 2^x is a number yet.
inline F capped(F x, const ScanQuery& q) {
  F power = vec::mul(x, vec::set1(q.cap_power));
  power = vec::max(vec::min(power, vec::set1(60.0f)), vec::set1(-60.0f));
  const F share = inverse_of(vec::add(exp2_of(power), vec::set1(1.0f)));
  return vec::fma(share, vec::set1(-2.0f * q.cap), vec::set1(q.cap));
}

// Calls body(i, logits of vector i of the keys) for one row, whose sums over the code are given.
template <typename Body>
inline void for_logits(const ScanQuery& q, const uint8_t* block, uint32_t row, const uint32_t* sums,
                       Body body) {
  const auto* factors = reinterpret_cast<const uint32_t*>(block + q.shape.factor_offset);
  const auto* lead = reinterpret_cast<const uint32_t*>(block + q.shape.lead_offset);
  const F step = vec::set1(q.step[row]);
  const F offset = vec::set1(q.offset[row]);
  const F spread = vec::set1(q.spread[row]);
  const F base = vec::set1(q.base[row]);
  const F lead_step = vec::set1(q.lead_step[row]);
  const U lead_bias = splat(static_cast<uint32_t>(q.lead_bias[row]));
  const bool has_lead = q.shape.lead_offset != 0;
  const bool has_cap = q.cap != 0.0f;
#pragma GCC unroll 4
  for (int i = 0; i < kVecs; ++i) {
    const int key = i * vec::kWidth;
    const F factor = float_of(load_u(factors + key) & splat(0xffff0000u));
    const F of_code = vec::fma(to_float(load_u(sums + key)), step, offset);
    F l = vec::fma(factor, vec::fma(factor, spread, of_code), base);
    if (has_lead) {
      const U sum =
          lead_sums(lead_bias, load_u(lead + key), load_u(lead + kScanKeys + key), q.lead[row]);
      l = vec::fma(to_float(sum), lead_step, l);
    }
    if (has_cap) {
      l = capped(l, q);
    }
    body(i, l);
  }
}

template <int kRows>
inline void logits_of_tile(const ScanQuery& q, const uint8_t* block, uint32_t first, float* out) {
  alignas(64) uint32_t sums[kRows][kScanKeys];
  code_sums<kRows>(q, first, block, sums);
  for (uint32_t r = 0; r < kRows; ++r) {
    float* to = out + (first + r) * kScanKeys;
    for_logits(q, block, first + r, sums[r],
               [&](int i, F l) { vec::store(to + i * vec::kWidth, l); });
  }
}

inline void logits_of(const ScanQuery& q, const uint8_t* block, float* out) {
  uint32_t first = 0;
  for (; first + kScanTile <= q.n_rows; first += kScanTile) {
    logits_of_tile<4>(q, block, first, out);
  }
  switch (q.n_rows - first) {
    case 3:
      return logits_of_tile<3>(q, block, first, out);
    case 2:
      return logits_of_tile<2>(q, block, first, out);
    case 1:
      return logits_of_tile<1>(q, block, first, out);
    default:
      return;
  }
}

// random.h, permanent_random.
inline F random_of(uint32_t position, const uint32_t* keys) {
  U lanes = U{};
  for (int i = 0; i < vec::kWidth; ++i) {
    lanes[i] = static_cast<uint32_t>(i) * 0x9E3779B1u;
  }
  U x = lanes + splat(position * 0x9E3779B1u + keys[0]);
  x = (x ^ (x >> 16)) * 0x21f0aaadu;
  x = x ^ splat(keys[1]);
  x = (x ^ (x >> 15)) * 0x735a2d97u;
  return vec::mul(to_float(x >> 8), vec::set1(0x1p-24f));
}

// The sums of a scan, in lanes, until they are flushed to doubles.
template <int kRows>
struct Lanes {
  F expected;
  F open_mass[kRows];
  F spread[kRows];
};

inline double total(F a) {
  alignas(64) float lanes[vec::kWidth];
  vec::store(lanes, a);
  double sum = 0;
  for (int i = 0; i < vec::kWidth; ++i) {
    sum += static_cast<double>(lanes[i]);
  }
  return sum;
}

template <int kRows>
inline void clear(Lanes<kRows>* lanes) {
  lanes->expected = vec::zero();
  for (int r = 0; r < kRows; ++r) {
    lanes->open_mass[r] = lanes->spread[r] = vec::zero();
  }
}

template <int kRows>
inline void flush(const Lanes<kRows>& lanes, uint32_t n_rows, ScanSums* sums) {
  sums->expected += total(lanes.expected);
  for (uint32_t r = 0; r < n_rows; ++r) {
    sums->open_mass[r] += total(lanes.open_mass[r]);
    sums->spread[r] += total(lanes.spread[r]);
  }
}

// A block's scratch.
struct BlockSpace {
  alignas(64) float logits[kScanRows][kScanKeys];
  alignas(64) float weights[kScanRows][kScanKeys];
  alignas(64) float size[kScanKeys];
  alignas(64) float random[kScanKeys];
};

// e^(l + log c) from l and log2 c. Beyond 2^60 a key is drawn anyway; squares and sums of weights
// stay finite.
inline F weight_of(F l, F log2_c) {
  F y = vec::fma(l, vec::set1(1.4426950408889634f), log2_c);
  y = vec::min(y, vec::set1(60.0f));
  if constexpr (!kAnyPower) {
    y = vec::max(y, vec::set1(-126.0f));
  }
  return exp2_of(y);
}

// The chances of some keys, from the largest weight of each, `top`.
struct Chances {
  F open;         // 1 where p < 1, else 0
  F odds;         // (1 - p) / p where open, else 0
  uint64_t mask;  // of candidates
};
inline Chances chances_of(const DrawArgs& args, F top, U factors, uint32_t position, uint32_t key,
                          BlockSpace* space, F* expected) {
  const F one = vec::set1(1.0f);
  const F norm = float_of(factors << 16);
  F size = vec::min(vec::mul(top, norm), vec::set1(0x1p100f));
  size = vec::max(size, vec::set1(args.min_size));
  const F p = vec::min(size, one);
  *expected = vec::add(*expected, p);
  Chances c;
  c.open = vec::sub(one, vec::keep_ge(size, one, one));
  c.odds = vec::mul(vec::sub(inverse_of(p), one), c.open);
  const F random = random_of(position + key, args.hash_keys);
  vec::store(space->size + key, size);
  vec::store(space->random + key, random);
  c.mask = static_cast<uint64_t>(mask_lt(random, vec::mul(size, vec::set1(args.reach)))) << key;
  return c;
}

inline void add_weight(F w, const Chances& chances, F* open_mass, F* spread) {
  *open_mass = vec::fma(w, chances.open, *open_mass);
  *spread = vec::fma(vec::mul(w, w), chances.odds, *spread);
}

// Sizes of a block's keys from the largest weight of each, and what its weights add to the sums;
// returns the mask of candidates.
template <int kRows>
inline uint64_t add_block(const DrawArgs& args, const uint8_t* block, uint32_t position,
                          uint32_t n_rows, const F* top, BlockSpace* space, Lanes<kRows>* lanes) {
  const auto* factors = reinterpret_cast<const uint32_t*>(block + args.query->shape.factor_offset);
  Chances chances[kVecs];
  uint64_t mask = 0;
#pragma GCC unroll 4
  for (int i = 0; i < kVecs; ++i) {
    const uint32_t key = static_cast<uint32_t>(i) * vec::kWidth;
    chances[i] =
        chances_of(args, top[i], load_u(factors + key), position, key, space, &lanes->expected);
    mask |= chances[i].mask;
  }
  for (uint32_t r = 0; r < n_rows; ++r) {
    F open_mass = lanes->open_mass[r];
    F spread = lanes->spread[r];
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      add_weight(vec::load(space->weights[r] + i * vec::kWidth), chances[i], &open_mass, &spread);
    }
    lanes->open_mass[r] = open_mass;
    lanes->spread[r] = spread;
  }
  return mask;
}

// Asks for blocks that will be scanned, some lines at a time between the instructions of the
// present one: a core whose queues are full drops what it is asked for in a burst, without a sign.
// So each line is also asked for twice: early into the second level, and later into the first.
// docs/kernels.md has the figures.
class Ahead {
 public:
  // step() is called n_steps times for each block.
  Ahead(const DrawArgs& args, uint32_t n_steps)
      : args_(args), n_lines_((args.query->shape.bytes / 64 + n_steps - 1) / n_steps) {}

  void turn(uint32_t block) {
    near_ = after(block, kNearBlocks);
    far_ = after(block, kFarBlocks);
    at_ = 0;
  }
  void step() {
    for (uint32_t line = 0; line < n_lines_ && at_ < args_.query->shape.bytes; ++line, at_ += 64) {
      vec::prefetch(near_ + at_);
      vec::prefetch_l2(far_ + at_);
    }
  }

 private:
  static constexpr uint32_t kNearBlocks = 4;
  static constexpr uint32_t kFarBlocks = 12;

  const uint8_t* after(uint32_t block, uint32_t ahead) const {
    const size_t bytes = args_.query->shape.bytes;
    const uint32_t at = block + ahead;
    if (at < args_.n_blocks)
      return args_.blocks + at * bytes;
    return args_.next != nullptr ? args_.next + (at - args_.n_blocks) * bytes
                                 : args_.blocks + block * bytes;
  }

  const DrawArgs& args_;
  uint32_t n_lines_;  // of a step
  uint32_t at_ = 0;
  const uint8_t* near_ = nullptr;
  const uint8_t* far_ = nullptr;
};

// Sizes of a block's keys and their sums; returns the mask of candidates. Rows of one tile.
template <int kRows>
inline uint64_t draw_block(const DrawArgs& args, const uint8_t* block, uint32_t position,
                           Ahead* ahead, BlockSpace* space, Lanes<kRows>* lanes) {
  const ScanQuery& q = *args.query;
  alignas(64) uint32_t sums[kRows][kScanKeys];
  code_sums<kRows>(q, 0, block, sums);
  F top[kVecs];
  for (F& t : top) {
    t = vec::zero();
  }
  for (uint32_t r = 0; r < kRows; ++r) {
    const F log2_c = vec::set1(args.log2_c[r]);
    for_logits(q, block, r, sums[r], [&](int i, F l) {
      vec::store(space->logits[r] + i * vec::kWidth, l);
      const F w = weight_of(l, log2_c);
      vec::store(space->weights[r] + i * vec::kWidth, w);
      top[i] = vec::max(top[i], w);
      ahead->step();
    });
  }
  return add_block(args, block, position, kRows, top, space, lanes);
}

// The same for more rows than one tile has.
template <>
inline uint64_t draw_block<kScanRows>(const DrawArgs& args, const uint8_t* block, uint32_t position,
                                      Ahead* ahead, BlockSpace* space, Lanes<kScanRows>* lanes) {
  const ScanQuery& q = *args.query;
  logits_of(q, block, space->logits[0]);
  F top[kVecs];
  for (F& t : top) {
    t = vec::zero();
  }
  for (uint32_t r = 0; r < q.n_rows; ++r) {
    const F log2_c = vec::set1(args.log2_c[r]);
    for (int i = 0; i < kVecs; ++i) {
      const F w = weight_of(vec::load(space->logits[r] + i * vec::kWidth), log2_c);
      vec::store(space->weights[r] + i * vec::kWidth, w);
      top[i] = vec::max(top[i], w);
      ahead->step();
    }
  }
  return add_block(args, block, position, q.n_rows, top, space, lanes);
}

inline uint32_t append(DrawArgs* args, uint64_t position, uint64_t mask, const BlockSpace& space) {
  const uint32_t n_rows = args->query->n_rows;
  for (; mask != 0; mask &= mask - 1) {
    if (args->n == args->capacity) {
      return 0;
    }
    const int key = __builtin_ctzll(mask);
    const size_t at = args->n++;
    args->out_position[at] = position + static_cast<uint64_t>(key);
    args->out_size[at] = space.size[key];
    args->out_random[at] = space.random[key];
    for (uint32_t r = 0; r < n_rows; ++r) {
      args->out_logits[at * n_rows + r] = space.logits[r][key];
    }
  }
  return 1;
}

void scan_logits_kernel(const ScanQuery* query, const uint8_t* block, float* out) {
  logits_of(*query, block, out);
}

template <int kRows>
uint32_t draw_blocks(DrawArgs* args, ScanSums* sums) {
  const ScanQuery& q = *args->query;
  // Lanes are flushed before their fp32 sums lose digits or overflow: weights reach 2^60.
  constexpr uint32_t kFlushBlocks = 32;
  // Candidates of a block are written while the next one is computed: how many there are is chance,
  // and a branch on it must not wait for the end of a long chain. With two planes that chain is
  // hidden by the next block's codes, and a second space costs more.
  const uint32_t late = q.shape.planes == 1 ? 1 : 0;
  BlockSpace spaces[2];
  uint64_t last_mask = 0;
  uint64_t last_position = 0;
  Lanes<kRows> lanes;
  clear(&lanes);
  uint32_t fits = 1;
  Ahead ahead(*args, q.n_rows * kVecs);
  for (uint32_t b = 0; b < args->n_blocks; ++b) {
    const uint8_t* block = args->blocks + static_cast<size_t>(b) * q.shape.bytes;
    ahead.turn(b);
    const uint64_t position = args->position + static_cast<uint64_t>(b) * kScanKeys;
    const uint64_t mask = draw_block<kRows>(*args, block, static_cast<uint32_t>(position), &ahead,
                                            &spaces[b & late], &lanes);
    if (fits != 0) {
      fits = late != 0 ? append(args, last_position, last_mask, spaces[~b & 1])
                       : append(args, position, mask, spaces[0]);
    }
    last_mask = mask;
    last_position = position;
    if (b % kFlushBlocks == kFlushBlocks - 1) {
      flush(lanes, q.n_rows, sums);
      clear(&lanes);
    }
  }
  flush(lanes, q.n_rows, sums);
  if (fits != 0 && late != 0) {
    fits = append(args, last_position, last_mask, spaces[~args->n_blocks & 1]);
  }
  return fits;
}

uint32_t scan_draw_kernel(DrawArgs* args, ScanSums* sums) {
  switch (args->query->n_rows) {
    case 4:
      return draw_blocks<4>(args, sums);
    case 3:
      return draw_blocks<3>(args, sums);
    case 2:
      return draw_blocks<2>(args, sums);
    case 1:
      return draw_blocks<1>(args, sums);
    default:
      return draw_blocks<kScanRows>(args, sums);
  }
}

}  // namespace
}  // namespace hash_index
}  // namespace kvm

#endif  // KVM_HASH_INDEX_SKETCH_SCAN_KERNEL_H_
