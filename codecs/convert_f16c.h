// SPDX-License-Identifier: Apache-2.0
// Conversions between fp16 and fp32 with the F16C instructions. Callers check the processor.
#ifndef KVM_CODECS_CONVERT_F16C_H_
#define KVM_CODECS_CONVERT_F16C_H_

#include <cstdint>

namespace kvm::codecs {

// Convert the first n / 8 * 8 elements and return how many that was. src, dst: any alignment.
// REQUIRES: cpu_features().f16c.
uint64_t f16_to_f32_f16c(const void* src, void* dst, uint64_t n);
uint64_t f32_to_f16_f16c(const void* src, void* dst, uint64_t n);

}  // namespace kvm::codecs

#endif  // KVM_CODECS_CONVERT_F16C_H_
