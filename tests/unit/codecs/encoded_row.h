// SPDX-License-Identifier: Apache-2.0
// A row in a scaled codec, for tests of the codecs.
#ifndef KVM_TESTS_UNIT_CODECS_ENCODED_ROW_H_
#define KVM_TESTS_UNIT_CODECS_ENCODED_ROW_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "codecs/convert.h"

namespace kvm::codecs {

template <class Code>
struct EncodedRow {
  std::vector<Code> q;
  uint16_t scale = 0;

  bool operator==(const EncodedRow&) const = default;
};

template <class Code>
EncodedRow<Code> encode_as(const std::vector<float>& row, CodecId codec) {
  EncodedRow<Code> out;
  out.q.assign(row.size() + 1, Code{99});
  out.scale = encode_row(row.data(), static_cast<uint32_t>(row.size()), codec, out.q.data());
  EXPECT_EQ(out.q.back(), 99) << "written beyond the row";
  out.q.pop_back();
  return out;
}

template <class Code>
std::vector<float> decode_as(const EncodedRow<Code>& row, CodecId codec) {
  std::vector<float> out(row.q.size());
  decode_row(row.q.data(), codec, &row.scale, 0, static_cast<uint32_t>(out.size()), out.data());
  return out;
}

}  // namespace kvm::codecs

#endif  // KVM_TESTS_UNIT_CODECS_ENCODED_ROW_H_
