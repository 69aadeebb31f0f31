// SPDX-License-Identifier: Apache-2.0
#include "codecs/convert.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace kvm::codecs {
namespace {

constexpr std::array kDtypes = {Dtype::kF32, Dtype::kF16, Dtype::kBf16};

// The value of a stored element, by the definition of the format, in double precision.
double value_of(const char* address, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    float value;
    std::memcpy(&value, address, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, address, sizeof bits);
  const int mantissa_bits = dtype == Dtype::kF16 ? 10 : 7;
  const int exponent_bits = 15 - mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) {
    return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  }
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

// Half the distance between neighbours of `dtype` near `value`: the most that rounding may change.
double half_ulp(double value, Dtype dtype) {
  const int mantissa_bits = dtype == Dtype::kF32 ? 23 : dtype == Dtype::kF16 ? 10 : 7;
  const int lowest = dtype == Dtype::kF16 ? -14 : -126;
  int exponent = 0;
  std::frexp(value, &exponent);
  return std::ldexp(0.5, std::max(exponent - 1, lowest) - mantissa_bits);
}

double largest(Dtype dtype) {
  return dtype == Dtype::kF16    ? 65504.0
         : dtype == Dtype::kBf16 ? std::ldexp(255, 127 - 7)
                                 : static_cast<double>(std::numeric_limits<float>::max());
}

std::vector<char> some_elements(Dtype dtype, uint64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> values(n);
  for (uint64_t i = 0; i < n; ++i) {
    switch (random() % 8) {
      case 0:
        values[i] = std::bit_cast<float>(static_cast<uint32_t>(random()));
        break;
      case 1:
        values[i] = normal(random) * 1e-6f;
        break;
      default:
        values[i] = normal(random);
    }
  }
  std::vector<char> out(n * dtype_size_bytes(dtype));
  convert(values.data(), Dtype::kF32, out.data(), dtype, n);
  return out;
}

TEST(Convert, EveryPairRoundsToNearest) {
  for (const Dtype from : kDtypes) {
    for (const Dtype to : kDtypes) {
      for (const uint64_t n : {1u, 7u, 8u, 9u, 64u, 257u, 1031u}) {
        const std::vector<char> src = some_elements(from, n, 17);
        // Odd addresses: nothing may assume alignment.
        std::vector<char> unaligned(src.size() + 1);
        std::memcpy(unaligned.data() + 1, src.data(), src.size());
        std::vector<char> dst(n * dtype_size_bytes(to) + 1);
        convert(unaligned.data() + 1, from, dst.data() + 1, to, n);
        for (uint64_t i = 0; i < n; ++i) {
          const double want = value_of(src.data() + i * dtype_size_bytes(from), from);
          const double got = value_of(dst.data() + 1 + i * dtype_size_bytes(to), to);
          if (std::isnan(want)) {
            EXPECT_TRUE(std::isnan(got));
          } else if (std::isinf(got)) {
            EXPECT_GE(std::abs(want) + half_ulp(largest(to), to), largest(to));
            EXPECT_EQ(std::signbit(want), std::signbit(got));
          } else {
            EXPECT_LE(std::abs(got - want), half_ulp(want, to))
                << dtype_name(from) << " to " << dtype_name(to) << ": " << want;
            EXPECT_EQ(std::signbit(want), std::signbit(got));
          }
        }
      }
    }
  }
}

TEST(Convert, EveryHalfIsTheSameWithAndWithoutInstructions) {
  std::vector<uint16_t> halves(65536);
  for (uint32_t i = 0; i < halves.size(); ++i) {
    halves[i] = static_cast<uint16_t>(i);
  }
  std::vector<float> singles(halves.size());
  convert(halves.data(), Dtype::kF16, singles.data(), Dtype::kF32, halves.size());
  std::vector<uint16_t> back(halves.size());
  convert(singles.data(), Dtype::kF32, back.data(), Dtype::kF16, halves.size());
  for (uint32_t i = 0; i < halves.size(); ++i) {
    const float scalar = f16_to_f32(halves[i]);
    if (std::isnan(scalar)) {
      EXPECT_TRUE(std::isnan(singles[i]));
      EXPECT_EQ(back[i] & 0x7c00, 0x7c00);
      EXPECT_NE(back[i] & 0x3ff, 0);
      continue;
    }
    EXPECT_EQ(std::bit_cast<uint32_t>(scalar), std::bit_cast<uint32_t>(singles[i]));
    EXPECT_EQ(back[i], halves[i]);
    EXPECT_EQ(f32_to_f16(scalar), halves[i]);
  }
}

TEST(Convert, HalfTiesGoToEven) {
  // Midpoints between neighbouring halves, and their neighbours in fp32.
  std::vector<float> values;
  for (uint32_t bits = 0; bits + 1 < 0x7c00; ++bits) {
    const double middle = (static_cast<double>(f16_to_f32(static_cast<uint16_t>(bits))) +
                           static_cast<double>(f16_to_f32(static_cast<uint16_t>(bits + 1)))) /
                          2;
    values.push_back(static_cast<float>(middle));
  }
  std::vector<uint16_t> got(values.size());
  convert(values.data(), Dtype::kF32, got.data(), Dtype::kF16, values.size());
  for (uint32_t bits = 0; bits < values.size(); ++bits) {
    EXPECT_EQ(got[bits], bits + (bits & 1)) << values[bits];
    EXPECT_EQ(f32_to_f16(values[bits]), got[bits]);
  }
}

TEST(ConvertRows, EveryLayout) {
  std::mt19937 generator(5);
  const auto random = [&] { return static_cast<uint32_t>(generator()); };
  for (int trial = 0; trial < 200; ++trial) {
    SCOPED_TRACE(trial);
    const Dtype from = kDtypes[random() % 3];
    const Dtype to = kDtypes[random() % 3];
    const uint32_t n_elements = 8 * (1 + random() % 32);
    const uint32_t n_heads = 1 + random() % 4;
    const uint64_t n_rows = 1 + random() % 80;
    const uint32_t all_heads = n_heads + random() % 3;
    std::vector<uint16_t> heads(n_heads);
    for (uint32_t i = 0; i < n_heads; ++i) {
      heads[i] = static_cast<uint16_t>(i + all_heads - n_heads);
    }
    const uint64_t from_bytes = uint64_t{n_elements} * dtype_size_bytes(from);
    const uint64_t to_bytes = uint64_t{n_elements} * dtype_size_bytes(to);
    const uint64_t gap = random() % 2 * 6;
    const uint64_t src_row = all_heads * from_bytes + gap;
    const std::vector<char> src = [&] {
      std::vector<char> bytes(n_rows * src_row);
      for (uint64_t row = 0; row < n_rows; ++row) {
        const auto values = some_elements(from, uint64_t{all_heads} * n_elements, random());
        std::memcpy(bytes.data() + row * src_row, values.data(), values.size());
      }
      return bytes;
    }();
    // Heads outermost, as in a page; guarded by a pattern on both ends.
    const uint64_t dst_head = n_rows * to_bytes;
    std::vector<char> dst(n_heads * dst_head + 64, char{0x5a});
    const uint64_t offset = random() % 2 * 3;
    convert_rows({src.data(), codec_of_tensor(from), src_row, from_bytes, heads.data()},
                 {dst.data() + offset, codec_of_tensor(to), to_bytes, dst_head, nullptr}, n_rows,
                 n_heads, n_elements);
    std::vector<char> want(to_bytes);
    for (uint64_t row = 0; row < n_rows; ++row) {
      for (uint32_t head = 0; head < n_heads; ++head) {
        convert(src.data() + row * src_row + heads[head] * from_bytes, from, want.data(), to,
                n_elements);
        ASSERT_EQ(std::memcmp(want.data(), dst.data() + offset + head * dst_head + row * to_bytes,
                              to_bytes),
                  0);
      }
    }
    for (uint64_t i = 0; i < 64 - offset; ++i) {
      ASSERT_EQ(dst[offset + n_heads * dst_head + i], 0x5a);
    }
  }
}

TEST(ConvertRows, LargeAlignedCopiesAreStreamed) {
  // Big and aligned enough for streaming stores; bf16 to bf16, 64 tokens of 8 heads of 128.
  constexpr uint64_t kRow = 256;
  const auto src = some_elements(Dtype::kBf16, 64 * 8 * 128, 3);
  struct alignas(64) Page {
    std::array<char, 64 * 8 * kRow> bytes;
  };
  auto page = std::make_unique<Page>();
  convert_rows({src.data(), CodecId::kBf16, 8 * kRow, kRow, nullptr},
               {page->bytes.data(), CodecId::kBf16, kRow, 64 * kRow, nullptr}, 64, 8, 128);
  for (uint64_t row = 0; row < 64; ++row) {
    for (uint64_t head = 0; head < 8; ++head) {
      ASSERT_EQ(std::memcmp(src.data() + row * 8 * kRow + head * kRow,
                            page->bytes.data() + head * 64 * kRow + row * kRow, kRow),
                0);
    }
  }
}

}  // namespace
}  // namespace kvm::codecs
