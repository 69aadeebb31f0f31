// SPDX-License-Identifier: Apache-2.0
// Words of 32 bits beside the floats of the vector wrapper that was included before.
#ifndef KVM_HASH_INDEX_SKETCH_LANES_H_
#define KVM_HASH_INDEX_SKETCH_LANES_H_

#include <stddef.h>
#include <stdint.h>

namespace kvm {
namespace hash_index {
namespace {

typedef vec::F F;
typedef uint32_t U __attribute__((vector_size(sizeof(F))));
typedef int32_t S __attribute__((vector_size(sizeof(F))));

inline U bits_of(F a) { return (U)a; }
inline F float_of(U a) { return (F)a; }
inline U splat(uint32_t a) { return a - U{}; }
inline U load_u(const void* p) {
  U r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}
inline void store_u(void* p, U a) { __builtin_memcpy(p, &a, sizeof a); }
inline F to_float(U a) { return (F) __builtin_convertvector((S)a, F); }

}  // namespace
}  // namespace hash_index
}  // namespace kvm

#endif  // KVM_HASH_INDEX_SKETCH_LANES_H_
