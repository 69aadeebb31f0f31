// SPDX-License-Identifier: Apache-2.0
#include "codecs/convert_f16c.h"

#include <immintrin.h>

namespace kvm::codecs {

uint64_t f16_to_f32_f16c(const void* src, void* dst, uint64_t n) {
  const char* in = static_cast<const char*>(src);
  char* out = static_cast<char*>(dst);
  const uint64_t n_done = n / 8 * 8;
  for (uint64_t i = 0; i < n_done; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 2 * i));
    _mm256_storeu_ps(reinterpret_cast<float*>(out + 4 * i), _mm256_cvtph_ps(half));
  }
  return n_done;
}

uint64_t f32_to_f16_f16c(const void* src, void* dst, uint64_t n) {
  const char* in = static_cast<const char*>(src);
  char* out = static_cast<char*>(dst);
  const uint64_t n_done = n / 8 * 8;
  for (uint64_t i = 0; i < n_done; i += 8) {
    const __m256 single = _mm256_loadu_ps(reinterpret_cast<const float*>(in + 4 * i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i),
                     _mm256_cvtps_ph(single, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  return n_done;
}

}  // namespace kvm::codecs
