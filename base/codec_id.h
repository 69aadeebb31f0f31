// SPDX-License-Identifier: Apache-2.0
// The names of the encodings of stored K and V.
#ifndef KVM_BASE_CODEC_ID_H_
#define KVM_BASE_CODEC_ID_H_

#include <cstdint>

namespace kvm {

// A CodecId names a row of the table in codecs/codec.h, which says what the encoding is. The values
// listed here are those that code speaks of; the table has all.
//
// WIRE: the values are those of KVM_CODEC_* and appear in requests and in stored headers.
enum class CodecId : uint8_t {
  kNone = 0,
  kF32 = 1,
  kF16 = 2,
  kBf16 = 3,
  kI8 = 4,
  kF8 = 5,
};

}  // namespace kvm

#endif  // KVM_BASE_CODEC_ID_H_
