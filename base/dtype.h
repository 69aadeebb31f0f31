// SPDX-License-Identifier: Apache-2.0
// Element types of tensors, with their conversions. How K and V are stored: codecs/codec.h.
//
// fp16 and bf16 conversions round to nearest even; NaN stays NaN.
#ifndef KVM_BASE_DTYPE_H_
#define KVM_BASE_DTYPE_H_

#include <bit>
#include <cstdint>

#include "kvm.h"

namespace kvm {

// WIRE: the values are those of KVM_DTYPE_* and appear in requests.
enum class Dtype : uint8_t {
  kF32 = KVM_DTYPE_F32,
  kF16 = KVM_DTYPE_F16,
  kBf16 = KVM_DTYPE_BF16,
};

constexpr bool dtype_is_known(uint32_t value) {
  return value == KVM_DTYPE_F32 || value == KVM_DTYPE_F16 || value == KVM_DTYPE_BF16;
}

// The size of one element.
constexpr uint32_t dtype_size_bytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

constexpr const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32:
      return "fp32";
    case Dtype::kF16:
      return "fp16";
    case Dtype::kBf16:
      return "bf16";
  }
  return "unknown";
}

constexpr float bf16_to_f32(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

constexpr uint16_t f32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  }
  const uint32_t rounding = 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>((bits + rounding) >> 16);
}

constexpr float f16_to_f32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  uint32_t exponent = (bits >> 10) & 0x1fu;
  uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1fu) {
    return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  }
  if (exponent == 0) {
    // Subnormals: value = mantissa * 2^-24, exact in fp32.
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  exponent += 127 - 15;
  return std::bit_cast<float>(sign | (exponent << 23) | (mantissa << 13));
}

constexpr uint16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u);
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity.
    return static_cast<uint16_t>(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 aligns the mantissa so that fp32 rounding does the work.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rebased = magnitude - 0x38000000u;
  const uint32_t rounded = rebased + 0xfffu + ((rebased >> 13) & 1u);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

// The value of an e4m3 code (codecs/float8.h). 0x7f and 0xff, which are not stored, give 480.
constexpr float e4m3_to_f32(uint8_t code) {
  // An exponent of 4 bits in the place of 8: 2^120 makes up for the bias, and exactly so for
  // subnormal codes, too.
  const float magnitude = std::bit_cast<float>((code & 0x7fu) << 20) * 0x1p120f;
  return (code & 0x80u) != 0 ? -magnitude : magnitude;
}

}  // namespace kvm

#endif  // KVM_BASE_DTYPE_H_
