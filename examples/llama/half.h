// SPDX-License-Identifier: Apache-2.0
/* 16-bit floating point by integer arithmetic: bfloat16, the upper half of a float, and IEEE
 * binary16. Loops over these functions vectorise. */
#ifndef KVM_EXAMPLES_LLAMA_HALF_H_
#define KVM_EXAMPLES_LLAMA_HALF_H_

#include <stdint.h>
#include <string.h>

/* Always: the loops around them vectorise only then, whatever a sanitizer thinks of it. */
#define HALF_INLINE static inline __attribute__((always_inline))

HALF_INLINE float float_of_bits(uint32_t bits) {
  float out;
  memcpy(&out, &bits, sizeof out);
  return out;
}

HALF_INLINE uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

HALF_INLINE float bf16_to_float(uint16_t value) { return float_of_bits((uint32_t)value << 16); }

/* To nearest, ties to even. REQUIRES: not a NaN. */
HALF_INLINE uint16_t bf16_from_float(float value) {
  const uint32_t bits = bits_of_float(value);
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* Exponent and mantissa land where a float has them, and the product moves the exponent from a bias
 * of 15 to 127, which also normalises what is denormal. REQUIRES: finite. */
HALF_INLINE float f16_to_float(uint16_t value) {
  const float magnitude = float_of_bits((uint32_t)(value & 0x7fff) << 13) * 0x1p112f;
  return float_of_bits(bits_of_float(magnitude) | (uint32_t)(value & 0x8000) << 16);
}

/* To nearest, ties to even; beyond the range to infinity. REQUIRES: not a NaN. */
HALF_INLINE uint16_t f16_from_float(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x477ff000u) { /* 65520: rounds to infinity */
    return (uint16_t)(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) { /* below 2^-14: denormal. The sum's last bit is worth 2^-24 */
    const uint32_t sum = bits_of_float(float_of_bits(magnitude) + 0.5f);
    return (uint16_t)(sign | (sum - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return (uint16_t)(sign | (rounded - 0x38000000u) >> 13);
}

#endif /* KVM_EXAMPLES_LLAMA_HALF_H_ */
