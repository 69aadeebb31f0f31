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

template <int kRows>
inline void logits_of_tile(const ScanQuery& q, const uint8_t* block, uint32_t first, float* out) {
  alignas(64) uint32_t sums[kRows][kScanKeys];
  code_sums<kRows>(q, first, block, sums);
  const auto* factors = reinterpret_cast<const uint32_t*>(block + q.shape.factor_offset);
  const auto* lead = reinterpret_cast<const uint32_t*>(block + q.shape.lead_offset);
  for (int i = 0; i < kVecs; ++i) {
    const int key = i * vec::kWidth;
    const F factor = float_of(load_u(factors + key) & splat(0xffff0000u));
    F l[kRows];
    for (uint32_t r = 0; r < kRows; ++r) {
      const F sum = to_float(load_u(sums[r] + key));
      const F t = vec::fma(sum, vec::set1(q.step[first + r]), vec::set1(q.offset[first + r]));
      l[r] = vec::fma(factor, t, vec::set1(q.base[first + r]));
    }
    if (q.shape.lead_offset != 0) {
      const U a = load_u(lead + key);
      const U b = load_u(lead + kScanKeys + key);
      for (uint32_t r = 0; r < kRows; ++r) {
        const U bias = splat(static_cast<uint32_t>(q.lead_bias[first + r]));
        const U sum = lead_sums(bias, a, b, q.lead[first + r]);
        l[r] = vec::fma(to_float(sum), vec::set1(q.lead_step[first + r]), l[r]);
      }
    }
    for (uint32_t r = 0; r < kRows; ++r) {
      vec::store(out + (first + r) * kScanKeys + key, l[r]);
    }
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

// What a scan adds up, in lanes, until it is flushed to doubles.
struct Lanes {
  F expected;
  F mass[kScanRows];
  F open_mass[kScanRows];
  F spread[kScanRows];
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

inline void clear(Lanes* lanes, uint32_t n_rows) {
  lanes->expected = vec::zero();
  for (uint32_t r = 0; r < n_rows; ++r) {
    lanes->mass[r] = lanes->open_mass[r] = lanes->spread[r] = vec::zero();
  }
}

inline void flush(Lanes* lanes, uint32_t n_rows, ScanSums* sums) {
  sums->expected += total(lanes->expected);
  for (uint32_t r = 0; r < n_rows; ++r) {
    sums->mass[r] += total(lanes->mass[r]);
    sums->open_mass[r] += total(lanes->open_mass[r]);
    sums->spread[r] += total(lanes->spread[r]);
  }
  clear(lanes, n_rows);
}

// A block's scratch.
struct BlockSpace {
  alignas(64) float logits[kScanRows][kScanKeys];
  alignas(64) float weights[kScanRows][kScanKeys];
  alignas(64) float size[kScanKeys];
  alignas(64) float random[kScanKeys];
};

// Weights and sizes of a block, its sums; returns the mask of candidates.
inline uint64_t weigh(const DrawArgs& args, const uint8_t* block, uint32_t position,
                      BlockSpace* space, Lanes* lanes) {
  const ScanQuery& q = *args.query;
  const F one = vec::set1(1.0f);
  F top[kVecs];
  for (F& t : top) {
    t = vec::zero();
  }
  for (uint32_t r = 0; r < q.n_rows; ++r) {
    const F log2_c = vec::set1(args.log2_c[r]);
    for (int i = 0; i < kVecs; ++i) {
      const F l = vec::load(space->logits[r] + i * vec::kWidth);
      F y = vec::fma(l, vec::set1(1.4426950408889634f), log2_c);
      // Beyond that a key is drawn anyway; squares and sums of weights stay finite.
      y = vec::min(y, vec::set1(60.0f));
      if constexpr (!kAnyPower) {
        y = vec::max(y, vec::set1(-126.0f));
      }
      const F w = exp2_of(y);
      vec::store(space->weights[r] + i * vec::kWidth, w);
      top[i] = vec::max(top[i], w);
    }
  }
  uint64_t mask = 0;
  F open[kVecs];  // 1 where p < 1, else 0
  F odds[kVecs];  // (1 - p) / p
  const auto* factors = reinterpret_cast<const uint32_t*>(block + q.shape.factor_offset);
  for (int i = 0; i < kVecs; ++i) {
    const uint32_t key = static_cast<uint32_t>(i) * vec::kWidth;
    const F norm = float_of(load_u(factors + key) << 16);
    F size = vec::min(vec::mul(top[i], norm), vec::set1(0x1p100f));
    size = vec::max(size, vec::set1(args.min_size));
    const F p = vec::min(size, one);
    lanes->expected = vec::add(lanes->expected, p);
    open[i] = vec::sub(one, vec::keep_ge(size, one, one));
    odds[i] = vec::mul(vec::sub(inverse_of(p), one), open[i]);
    const F random = random_of(position + key, args.hash_keys);
    vec::store(space->size + key, size);
    vec::store(space->random + key, random);
    mask |= static_cast<uint64_t>(mask_lt(random, vec::mul(size, vec::set1(args.reach)))) << key;
  }
  for (uint32_t r = 0; r < q.n_rows; ++r) {
    F mass = lanes->mass[r];
    F open_mass = lanes->open_mass[r];
    F spread = lanes->spread[r];
    for (int i = 0; i < kVecs; ++i) {
      const F w = vec::load(space->weights[r] + i * vec::kWidth);
      mass = vec::add(mass, w);
      open_mass = vec::fma(w, open[i], open_mass);
      spread = vec::fma(vec::mul(w, w), odds[i], spread);
    }
    lanes->mass[r] = mass;
    lanes->open_mass[r] = open_mass;
    lanes->spread[r] = spread;
  }
  return mask;
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

uint32_t scan_draw_kernel(DrawArgs* args, ScanSums* sums) {
  const ScanQuery& q = *args->query;
  // Lanes are flushed before their fp32 sums lose digits or overflow: weights reach 2^60.
  constexpr uint32_t kFlushBlocks = 32;
  constexpr uint32_t kAhead = 4;  // blocks
  BlockSpace space;
  Lanes lanes;
  clear(&lanes, q.n_rows);
  uint32_t fits = 1;
  for (uint32_t b = 0; b < args->n_blocks; ++b) {
    const uint8_t* block = args->blocks + static_cast<size_t>(b) * q.shape.bytes;
    if (b + kAhead < args->n_blocks) {
      const uint8_t* ahead = block + kAhead * q.shape.bytes;
      for (const uint8_t* end = ahead + q.shape.bytes; ahead < end; ahead += 256) {
        vec::prefetch(ahead);
        vec::prefetch(ahead + 64);
        vec::prefetch(ahead + 128);
        vec::prefetch(ahead + 192);
      }
    }
    logits_of(q, block, space.logits[0]);
    const uint64_t position = args->position + static_cast<uint64_t>(b) * kScanKeys;
    const uint64_t mask = weigh(*args, block, static_cast<uint32_t>(position), &space, &lanes);
    if (fits != 0) {
      fits = append(args, position, mask, space);
    }
    if (b % kFlushBlocks == kFlushBlocks - 1) {
      flush(&lanes, q.n_rows, sums);
    }
  }
  flush(&lanes, q.n_rows, sums);
  return fits;
}

}  // namespace
}  // namespace hash_index
}  // namespace kvm

#endif  // KVM_HASH_INDEX_SKETCH_SCAN_KERNEL_H_
