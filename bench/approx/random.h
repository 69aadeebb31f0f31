// SPDX-License-Identifier: Apache-2.0
// Random numbers of the generators: xoshiro256++ (Blackman and Vigna, 2018) seeded by SplitMix64,
// and normals by Box and Muller. The same sequence on every machine, up to the last bits of log,
// sine and cosine.
#ifndef KVM_BENCH_APPROX_RANDOM_H_
#define KVM_BENCH_APPROX_RANDOM_H_

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>

#include "base/splitmix.h"

namespace kvm::bench {

class Random {
 public:
  explicit Random(uint64_t seed) {
    for (uint64_t& word : state_) {
      seed += kSplitMixStep;
      word = splitmix64(seed);
    }
  }

  uint64_t bits() {
    const uint64_t result = std::rotl(state_[0] + state_[3], 23) + state_[0];
    const uint64_t shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = std::rotl(state_[3], 45);
    return result;
  }

  // In [0, 1), the top 53 bits.
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

  uint32_t below(uint32_t n) { return static_cast<uint32_t>(uniform() * n); }

  // Both values of a pair are used, the sine second.
  double normal() {
    if (has_spare_) {
      has_spare_ = false;
      return spare_;
    }
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    const double angle = 2.0 * std::numbers::pi * uniform();
    spare_ = radius * std::sin(angle);
    has_spare_ = true;
    return radius * std::cos(angle);
  }

  // n normals, n even, 32 random bits each and in fp32: several times as fast, none beyond 6.7.
  void fill_normals(float* out, size_t n) {
    for (size_t i = 0; i < n; i += 2) {
      const uint64_t x = bits();
      const float u = (static_cast<float>(x >> 32) + 0.5f) * 0x1p-32f;
      const float angle = static_cast<float>(x >> 8 & 0xffffff) * kAngleStep;
      const float radius = std::sqrt(-2.0f * std::log(u));
      out[i] = radius * std::cos(angle);
      out[i + 1] = radius * std::sin(angle);
    }
  }

 private:
  static constexpr float kAngleStep = 0x1p-23f * std::numbers::pi_v<float>;

  uint64_t state_[4];
  double spare_ = 0;
  bool has_spare_ = false;
};

}  // namespace kvm::bench

#endif  // KVM_BENCH_APPROX_RANDOM_H_
