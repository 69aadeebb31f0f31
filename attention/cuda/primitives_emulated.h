// SPDX-License-Identifier: Apache-2.0
// The primitives for the emulator (emulator.h). primitives.h has the contracts.
#ifndef KVM_ATTENTION_CUDA_PRIMITIVES_EMULATED_H_
#define KVM_ATTENTION_CUDA_PRIMITIVES_EMULATED_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention/cuda/emulator.h"
#include "attention/cuda/primitives.h"
#include "base/dtype.h"

#define KVM_GPU inline

namespace kvm::attention::gpu {

KVM_GPU uint32_t thread_id() { return emulator::current_thread(); }
KVM_GPU uint32_t lane_id() { return emulator::current_thread() % 32; }
// A shuffle, as on a GPU: whole warps ask for it.
KVM_GPU uint32_t warp_id() {
  return static_cast<uint32_t>(emulator::shuffle(emulator::current_thread() / 32, 0));
}
KVM_GPU uint32_t block_id() { return emulator::current_block(); }
KVM_GPU uint32_t block_count() { return emulator::current_block_count(); }

KVM_GPU void sync_warp() { emulator::sync_warp(); }
KVM_GPU void sync_block() { emulator::sync_block(); }

KVM_GPU void let_next_kernel_begin() { emulator::let_next_kernel_begin(); }
KVM_GPU void wait_for_kernel_before() { emulator::wait_for_kernel_before(); }

KVM_GPU uint64_t shuffle(uint64_t value, uint32_t lane) { return emulator::shuffle(value, lane); }
KVM_GPU uint32_t shuffle(uint32_t value, uint32_t lane) {
  return static_cast<uint32_t>(emulator::shuffle(value, lane));
}
KVM_GPU float shuffle(float value, uint32_t lane) {
  return std::bit_cast<float>(shuffle(std::bit_cast<uint32_t>(value), lane));
}
KVM_GPU float shuffle_xor(float value, uint32_t mask) { return shuffle(value, lane_id() ^ mask); }
KVM_GPU bool any_lane(bool value) { return emulator::any_lane(value); }

KVM_GPU SharedAddress shared_start() { return 0; }

KVM_GPU void copy_async_16(SharedAddress to, const void* from, bool valid) {
  emulator::copy_async(to, from, 16, valid);
}
KVM_GPU void copy_async_16(SharedAddress to, const void* from) {
  emulator::copy_async(to, from, 16, true);
}
KVM_GPU void copy_async_4(SharedAddress to, const void* from, bool valid) {
  emulator::copy_async(to, from, 4, valid);
}
KVM_GPU void copy_async_8(SharedAddress to, const void* from, bool valid) {
  emulator::copy_async(to, from, 8, valid);
}
KVM_GPU void copy_async_commit() { emulator::copy_async_commit(); }
template <uint32_t kNewest>
KVM_GPU void copy_async_wait() {
  emulator::copy_async_wait(kNewest);
}

KVM_GPU void load_matrix_x4(uint32_t (&to)[4], SharedAddress from) {
  emulator::load_matrix_x4(to, from, false);
}
KVM_GPU void load_matrix_x4_transposed(uint32_t (&to)[4], SharedAddress from) {
  emulator::load_matrix_x4(to, from, true);
}

template <uint32_t kSelector>
KVM_GPU uint32_t permute_bytes(uint32_t low, uint32_t high) {
  const uint64_t all = uint64_t{high} << 32 | low;
  uint32_t to = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    to |= static_cast<uint32_t>(all >> ((kSelector >> (4 * i) & 7) * 8) & 0xff) << (8 * i);
  }
  return to;
}

// As the instruction does it: NaN for the codes that are never stored.
KVM_GPU float float_from_f8(uint32_t bits) {
  return (bits & 0x7f) == 0x7f ? std::nanf("") : e4m3_to_f32(static_cast<uint8_t>(bits));
}

template <Element kElement>
KVM_GPU void widen(uint32_t bytes, uint32_t (&to)[2]) {
  static_assert(kIsScaled<kElement>);
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t byte = bytes >> (8 * i) & 0xff;
    const uint32_t half =
        f32_to_f16(kElement == Element::kI8 ? static_cast<float>(static_cast<int8_t>(byte))
                                            : float_from_f8(byte));
    to[i / 2] = i % 2 == 0 ? half : to[i / 2] | half << 16;
  }
}

KVM_GPU int32_t round_to_int(float x) { return static_cast<int32_t>(std::nearbyint(x)); }
KVM_GPU float rounded_quotient(float a, float b) { return a / b; }

KVM_GPU float float_from_bits(uint32_t bits) { return std::bit_cast<float>(bits); }
KVM_GPU uint32_t bits_from_float(float x) { return std::bit_cast<uint32_t>(x); }
KVM_GPU float float_from_f16(uint32_t bits) { return f16_to_f32(static_cast<uint16_t>(bits)); }

template <Element kElement>
KVM_GPU void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulator::mma_16x8x16(d, a, b0, b1, kElement == Element::kBf16 ? &bf16_to_f32 : &f16_to_f32);
}

template <Element kElement>
KVM_GPU uint32_t pack(float low, float high) {
  static_assert(!kIsNarrow<kElement>);
  const auto convert = kElement == Element::kBf16 ? &f32_to_bf16 : &f32_to_f16;
  return static_cast<uint32_t>(convert(low)) | static_cast<uint32_t>(convert(high)) << 16;
}

KVM_GPU float exp2_fast(float x) { return std::exp2(x); }
KVM_GPU float log2_fast(float x) { return std::log2(x); }
KVM_GPU float reciprocal_fast(float x) { return 1.0f / x; }
KVM_GPU float product_or_zero(float weight, float scale) {
  return weight == 0.0f ? weight : weight * scale;
}

template <class T>
KVM_GPU void store_shared(SharedAddress at, T value) {
  emulator::store_shared(at, &value, sizeof(T));
}
template <class T>
KVM_GPU T load_shared(SharedAddress at) {
  T value;
  emulator::load_shared(at, &value, sizeof(T));
  return value;
}
template <class T>
KVM_GPU T load_global(const void* from) {
  T value{};
  if (emulator::may_touch(from, sizeof(T))) {
    std::memcpy(&value, from, sizeof(T));
  }
  return value;
}
template <class T>
KVM_GPU void store_global(void* to, T value) {
  if (emulator::may_touch(to, sizeof(T))) {
    emulator::note_store(to);
    std::memcpy(to, &value, sizeof(T));
  }
}
KVM_GPU uint32_t count_up_to(uint32_t* global, uint32_t last) {
  emulator::pass_turn();
  if (!emulator::may_touch(global, sizeof *global)) {
    return 0;
  }
  const uint32_t count = *global;
  *global = count >= last ? 0 : count + 1;
  return count;
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_PRIMITIVES_EMULATED_H_
