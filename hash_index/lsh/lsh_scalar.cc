// SPDX-License-Identifier: Apache-2.0
// LSH: the scalar table. CMakeLists.txt gives this file its flags.
#include "base/simd/vec_scalar.h"

namespace kvm {
namespace hash_index {
namespace {
namespace lane {

typedef int32_t V __attribute__((vector_size(16)));
typedef uint32_t B __attribute__((vector_size(16)));

constexpr uint32_t kLanes = 4;
constexpr uint32_t kMaxBits = 2;

inline V set1(int32_t x) { return V{x, x, x, x}; }
inline B load(const uint8_t* p) {
  B b;
  __builtin_memcpy(&b, p, sizeof b);
  return b;
}
inline B bytes(const int8_t* w) {
  return B{(uint32_t)w[0], (uint32_t)w[1], (uint32_t)w[2], (uint32_t)w[3]};
}
inline V dot(V a, B x, B w) {
  for (int i = 0; i < 4; ++i) {
    a += (V)((x >> (8 * i)) & 255u) * (int32_t)w[i];
  }
  return a;
}
inline V or_if_positive(V c, V a, int32_t bit) { return c | ((a > 0) & bit); }
inline void store(uint16_t* p, V c) {
  for (uint32_t i = 0; i < kLanes; ++i) {
    p[i] = (uint16_t)c[i];
  }
}

inline uint64_t not_zero(const uint8_t* p) {
  uint64_t bits = 0;
  for (int i = 0; i < 8; ++i) {
    uint64_t x;
    __builtin_memcpy(&x, p + 8 * i, sizeof x);
    for (int j = 0; x != 0; ++j, x >>= 8) {
      bits |= (uint64_t)((x & 255) != 0) << (8 * i + j);
    }
  }
  return bits;
}

}  // namespace lane
}  // namespace
}  // namespace hash_index
}  // namespace kvm

#include "hash_index/lsh/lsh_kernel.h"

namespace kvm {
namespace hash_index {

extern const LshKernels kLshScalar = {"scalar", pack, hash, collect, list, inclusion};

}  // namespace hash_index
}  // namespace kvm
