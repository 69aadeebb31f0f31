// SPDX-License-Identifier: Apache-2.0
// Planes of rows that have a scale each, whatever the codec.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "base/kv_view.h"
#include "codecs/convert.h"
#include "tests/unit/codecs/encoded_row.h"

namespace kvm::codecs {
namespace {

constexpr std::array kTensorDtypes = {Dtype::kF32, Dtype::kF16, Dtype::kBf16};

constexpr std::array kScaledCodecs = {CodecId::kI8, CodecId::kF8};

using Encoded = EncodedRow<uint8_t>;

// A page's plane of scaled rows.
struct Plane {
  Plane(CodecId stored, uint32_t n_heads, uint32_t row_elements) : codec(stored), n(row_elements) {
    q.assign(uint64_t{n_heads} * kPageTokens * n, uint8_t{99});
    scales.assign(uint64_t{n_heads} * kPageTokens, uint16_t{0x4242});
  }
  TargetRows target(uint32_t slot) {
    return {q.data(), codec,         n,           uint64_t{n} * kPageTokens,
            nullptr,  scales.data(), kPageTokens, slot};
  }
  SourceRows source(uint32_t slot) const {
    return {q.data(), codec,         n,           uint64_t{n} * kPageTokens,
            nullptr,  scales.data(), kPageTokens, slot};
  }
  CodecId codec;
  uint32_t n;
  std::vector<uint8_t> q;
  std::vector<uint16_t> scales;
};

// [token][head][n] with the heads in another order.
void check_tensors_in_and_out(CodecId codec) {
  constexpr uint32_t kHeads = 3;
  constexpr uint32_t kRows = 40;
  constexpr uint32_t kSlot = 7;
  const std::array<uint16_t, kHeads> heads = {2, 0, 1};
  std::mt19937_64 random(4);
  std::normal_distribution<float> normal(0, 2);
  for (const uint32_t n : {8u, 80u, 128u, 256u}) {
    std::vector<float> values(uint64_t{kRows} * kHeads * n);
    for (float& x : values) {
      x = normal(random);
    }
    for (const Dtype dtype : kTensorDtypes) {
      const uint64_t row_bytes = uint64_t{n} * dtype_size_bytes(dtype);
      std::vector<char> tensor(values.size() * dtype_size_bytes(dtype) + 1);
      convert(values.data(), Dtype::kF32, tensor.data() + 1, dtype, values.size());
      std::vector<float> rounded(values.size());
      convert(tensor.data() + 1, dtype, rounded.data(), Dtype::kF32, values.size());
      Plane plane(codec, kHeads, n);
      convert_rows(
          {tensor.data() + 1, codec_of_tensor(dtype), row_bytes * kHeads, row_bytes, heads.data()},
          plane.target(kSlot), kRows, kHeads, n);
      std::vector<char> back(tensor.size());
      convert_rows(
          plane.source(kSlot),
          {back.data() + 1, codec_of_tensor(dtype), row_bytes * kHeads, row_bytes, heads.data()},
          kRows, kHeads, n);
      for (uint32_t slot = 0; slot < kPageTokens; ++slot) {
        for (uint32_t h = 0; h < kHeads; ++h) {
          const uint64_t at = uint64_t{h} * kPageTokens + slot;
          const uint8_t* stored = plane.q.data() + at * n;
          if (slot < kSlot || slot >= kSlot + kRows) {
            ASSERT_EQ(plane.scales[at], 0x4242);
            ASSERT_TRUE(std::all_of(stored, stored + n, [](uint8_t x) { return x == 99; }));
            continue;
          }
          const uint64_t from = (uint64_t{slot - kSlot} * kHeads + heads[h]) * n;
          const Encoded want =
              encode_as<uint8_t>({rounded.begin() + static_cast<ptrdiff_t>(from),
                                  rounded.begin() + static_cast<ptrdiff_t>(from + n)},
                                 codec);
          ASSERT_EQ(plane.scales[at], want.scale);
          ASSERT_EQ(std::vector<uint8_t>(stored, stored + n), want.q);
          std::vector<char> decoded(row_bytes);
          convert(decode_as(want, codec).data(), Dtype::kF32, decoded.data(), dtype, n);
          ASSERT_EQ(std::memcmp(back.data() + 1 + from * dtype_size_bytes(dtype), decoded.data(),
                                row_bytes),
                    0);
        }
      }
    }
  }
}

TEST(ScaledRows, TensorsOfEveryDtypeGoInAndOut) {
  for (const CodecId codec : kScaledCodecs) {
    SCOPED_TRACE(codec_of(codec).name);
    check_tensors_in_and_out(codec);
  }
}

// As demoting does: what was read of the one is what the other is made of.
TEST(ScaledRows, FromOneScaledCodecToTheOther) {
  constexpr uint32_t kHeads = 2;
  constexpr uint32_t kDim = 80;
  std::mt19937_64 random(6);
  std::normal_distribution<float> normal;
  for (const CodecId first : kScaledCodecs) {
    const CodecId second = first == CodecId::kI8 ? CodecId::kF8 : CodecId::kI8;
    Plane from(first, kHeads, kDim);
    for (uint64_t at = 0; at < uint64_t{kHeads} * kPageTokens; ++at) {
      std::vector<float> row(kDim);
      std::generate(row.begin(), row.end(), [&] { return normal(random); });
      from.scales[at] = encode_row(row.data(), kDim, first, from.q.data() + at * kDim);
    }
    Plane to(second, kHeads, kDim);
    convert_rows(from.source(0), to.target(0), kPageTokens, kHeads, kDim);
    for (uint64_t at = 0; at < uint64_t{kHeads} * kPageTokens; ++at) {
      const auto begin = static_cast<ptrdiff_t>(at * kDim);
      const Encoded stored{{from.q.begin() + begin, from.q.begin() + begin + kDim},
                           from.scales[at]};
      const Encoded want = encode_as<uint8_t>(decode_as(stored, first), second);
      ASSERT_EQ(to.scales[at], want.scale);
      ASSERT_TRUE(std::equal(want.q.begin(), want.q.end(), to.q.begin() + begin));
    }
  }
}

// Few rows, and so many that stores go around the caches.
TEST(ScaledRows, CopiesKeepEveryBit) {
  for (const uint32_t n_heads : {2u, 16u}) {
    Plane from(CodecId::kF8, n_heads, 128);
    std::mt19937_64 random(5);
    std::generate(from.q.begin(), from.q.end(), [&] { return static_cast<uint8_t>(random()); });
    std::generate(from.scales.begin(), from.scales.end(),
                  [&] { return static_cast<uint16_t>(random()); });
    Plane to(CodecId::kF8, n_heads, 128);
    convert_rows(from.source(3), to.target(3), 60, n_heads, 128);
    for (uint32_t h = 0; h < n_heads; ++h) {
      for (uint32_t slot = 0; slot < kPageTokens; ++slot) {
        const uint64_t at = uint64_t{h} * kPageTokens + slot;
        const bool copied = slot >= 3 && slot < 63;
        ASSERT_EQ(to.scales[at], copied ? from.scales[at] : 0x4242);
        for (uint64_t d = at * 128; d < (at + 1) * 128; ++d) {
          ASSERT_EQ(to.q[d], copied ? from.q[d] : 99);
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvm::codecs
