// SPDX-License-Identifier: Apache-2.0
// Permanent random numbers: a hash of (seed, position) that a scan computes in lanes of 32 bits.
//
//   key  = mix(seed * kMixSeed + (upper half of position + 1) * step)    once for 2^32 positions
//   x    = lower half of position * 0x9E3779B1 + lower half of key
//   x    = (x ^ x >> 16) * 0x21f0aaad;   x ^= upper half of key;
//   x    = (x ^ x >> 15) * 0x735a2d97;   u = (x >> 8) / 2^24
//
// mix is splitmix64, step kSplitMixStep. The last two multipliers are
// from Chris Wellons' search for 32-bit hashes with little bias; without the first one positions
// 12,288 apart are correlated. models/house/sketches.py has the same function; a test of each pins
// the same values.
#ifndef KVM_HASH_INDEX_SKETCH_RANDOM_H_
#define KVM_HASH_INDEX_SKETCH_RANDOM_H_

#include <cstdint>

#include "base/splitmix.h"

namespace kvm::hash_index {

inline constexpr uint64_t kMixSeed = 0xD1342543DE82EF95;
inline constexpr uint32_t kMixPosition = 0x9E3779B1;

struct RandomKeys {
  uint32_t low = 0;
  uint32_t high = 0;
};

constexpr RandomKeys random_keys(uint64_t seed, uint64_t position) {
  const uint64_t key = splitmix64(seed * kMixSeed + ((position >> 32) + 1) * kSplitMixStep);
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

constexpr float random_at(RandomKeys keys, uint64_t position) {
  uint32_t x = static_cast<uint32_t>(position) * kMixPosition + keys.low;
  x = (x ^ (x >> 16)) * 0x21f0aaadu;
  x ^= keys.high;
  x = (x ^ (x >> 15)) * 0x735a2d97u;
  return static_cast<float>(x >> 8) * 0x1p-24f;
}

}  // namespace kvm::hash_index

#endif  // KVM_HASH_INDEX_SKETCH_RANDOM_H_
