// SPDX-License-Identifier: Apache-2.0
// Decoding of codecs/low_bits.h with AVX2: the same bits. Callers check the processor.
#ifndef KVM_CODECS_LOW_BITS_AVX2_H_
#define KVM_CODECS_LOW_BITS_AVX2_H_

#include <cstdint>

namespace kvm::codecs {

// The first n channels of n_tokens rows, which lie row_bytes apart, to out [n_tokens][n].
// REQUIRES: cpu_features().avx2; bits is 4, 3 or 2; n is a multiple of 8.
void decode_by_channel_avx2(uint32_t bits, const uint8_t* codes, uint64_t row_bytes,
                            const uint16_t* scales, const uint16_t* zeros, uint32_t n_tokens,
                            uint32_t n, float* out);

// steps: scale and zero of each 64 channels of the first token; those of the next lie n_groups
// pairs further. means, factors: of each channel, or null; not both. REQUIRES: likewise.
void decode_by_token_avx2(uint32_t bits, const uint8_t* codes, uint64_t row_bytes,
                          const uint16_t* steps, uint32_t n_groups, const uint16_t* means,
                          const uint16_t* factors, uint32_t n_tokens, uint32_t n, float* out);

}  // namespace kvm::codecs

#endif  // KVM_CODECS_LOW_BITS_AVX2_H_
