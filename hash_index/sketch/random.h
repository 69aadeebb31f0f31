// SPDX-License-Identifier: Apache-2.0
// Permanent random numbers: a hash of (seed, position) that a scan computes in lanes of 32 bits.
//
//   key  = mix(seed * kMixSeed + (upper half of position + 1) * kMixAdd)    once for 2^32 positions
//   x    = lower half of position * 0x9E3779B1 + lower half of key
//   x    = (x ^ x >> 16) * 0x21f0aaad;   x ^= upper half of key;
//   x    = (x ^ x >> 15) * 0x735a2d97;   u = (x >> 8) / 2^24
//
// mix is the finaliser of SplitMix64 (Steele, Lea and Flood 2014). The last two multipliers are
// from Chris Wellons' search for 32-bit hashes with little bias; without the first one positions
// 12,288 apart are correlated. models/house/sketches.py has the same function; a test of each pins
// the same values.
#ifndef KVM_HASH_INDEX_SKETCH_RANDOM_H_
#define KVM_HASH_INDEX_SKETCH_RANDOM_H_

#include <cstdint>

namespace kvm::hash_index {

inline constexpr uint64_t kMixAdd = 0x9E3779B97F4A7C15;
inline constexpr uint64_t kMixSeed = 0xD1342543DE82EF95;
inline constexpr uint32_t kMixPosition = 0x9E3779B1;

constexpr uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

struct RandomKeys {
  uint32_t low = 0;
  uint32_t high = 0;
};

constexpr RandomKeys random_keys(uint64_t seed, uint64_t position) {
  const uint64_t key = mix64(seed * kMixSeed + ((position >> 32) + 1) * kMixAdd);
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
