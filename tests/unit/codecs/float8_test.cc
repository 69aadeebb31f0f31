// SPDX-License-Identifier: Apache-2.0
#include "codecs/float8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "codecs/int8.h"
#include "tests/unit/codecs/encoded_row.h"

namespace kvm::codecs {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kSmallestScale = 0x1p-126;

// --- Reference: the table of the format, and a search through it in fp64 ------------------------

// The value of a code by the words of the OCP specification; NaN for 0x7f and 0xff.
double value_of(uint32_t code) {
  const double sign = (code & 0x80) != 0 ? -1.0 : 1.0;
  const int exponent = static_cast<int>(code >> 3 & 15);
  const int mantissa = static_cast<int>(code & 7);
  if (exponent == 15 && mantissa == 7) {
    return std::nan("");
  }
  return exponent == 0 ? sign * std::ldexp(mantissa, -9)
                       : sign * std::ldexp(8 + mantissa, exponent - 10);
}

// The nearest of all finite codes, the even one of two as near; 0 has no sign.
uint8_t nearest(double x) {
  uint32_t best = 0;
  for (uint32_t code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f || code == 0x80) {
      continue;
    }
    const double off = std::abs(value_of(code) - x);
    const double least = std::abs(value_of(best) - x);
    if (off < least || (off == least && code % 2 == 0 && best % 2 != 0)) {
      best = code;
    }
  }
  return static_cast<uint8_t>(best);
}

// The nearest bf16 to a positive number that is normal there, ties to even.
double nearest_bf16(double x) {
  const double ulp = std::ldexp(1.0, std::ilogb(x) - 7);
  return std::nearbyint(x / ulp) * ulp;
}

using Encoded = EncodedRow<uint8_t>;

Encoded encode(const std::vector<float>& row) { return encode_as<uint8_t>(row, CodecId::kF8); }
std::vector<float> decode(const Encoded& row) { return decode_as(row, CodecId::kF8); }

// What float8.h promises of a row of finite numbers.
void check_row(const std::vector<float>& row) {
  const Encoded encoded = encode(row);
  const double scale = static_cast<double>(bf16_to_f32(encoded.scale));
  double top = 0;
  for (const float x : row) {
    top = std::max(top, std::abs(static_cast<double>(x)));
  }
  if (top <= kSmallestScale * 0x1p-10) {
    ASSERT_EQ(encoded.scale, 0);
  } else {
    const auto quotient = static_cast<double>(static_cast<float>(top) / 448.0f);
    ASSERT_EQ(scale, nearest_bf16(std::max(quotient, kSmallestScale))) << top;
  }
  const std::vector<float> back = decode(encoded);
  for (size_t i = 0; i < row.size(); ++i) {
    const uint8_t code = encoded.q[i];
    const auto x = static_cast<double>(row[i]);
    if (encoded.scale == 0) {
      ASSERT_EQ(code, 0);
    } else {
      ASSERT_EQ(code, nearest(static_cast<double>(row[i] / static_cast<float>(scale)))) << x;
      // The bound of kvm.h: relative, or absolute where that is more.
      ASSERT_LE(std::abs(static_cast<double>(back[i]) - x),
                std::max(std::abs(x) * (0x1p-4 + 0x1p-20), scale * (0x1p-10 + 0x1p-20)))
          << x << " of " << top;
    }
    ASSERT_LE(code & 0x7f, 0x7e);
    ASSERT_NE(code, 0x80);
    ASSERT_EQ(static_cast<double>(back[i]), value_of(code) * scale) << "not exact";
  }
  ASSERT_EQ(encode(back), encoded) << "read and stored again";
}

// --- Codes --------------------------------------------------------------------------------------

// A largest channel of 448 makes the scale 1.
uint8_t code_of(float x) {
  const Encoded row = encode({448.0f, x});
  EXPECT_EQ(bf16_to_f32(row.scale), 1.0f);
  EXPECT_EQ(row.q[0], 0x7e);
  return row.q[1];
}

TEST(Float8, EveryCodeIsItsValue) {
  EXPECT_EQ(value_of(0x7e), 448.0);
  EXPECT_EQ(value_of(0x01), 0x1p-9);
  EXPECT_EQ(value_of(0x08), 0x1p-6);
  for (uint32_t code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) {
      continue;
    }
    const auto value = static_cast<float>(value_of(code));
    EXPECT_EQ(e4m3_to_f32(static_cast<uint8_t>(code)), value) << code;
    EXPECT_EQ(code_of(value), code == 0x80 ? 0 : code);
  }
}

// Between each two neighbours: the tie, and the floats beside it.
TEST(Float8, TiesGoToEven) {
  for (uint32_t code = 0; code < 0x7e; ++code) {
    const auto tie = static_cast<float>((value_of(code) + value_of(code + 1)) / 2);
    ASSERT_EQ(static_cast<double>(tie), (value_of(code) + value_of(code + 1)) / 2);
    const uint32_t even = code + code % 2;
    const float below = std::nextafter(tie, 0.0f);
    const float above = std::nextafter(tie, kInf);
    EXPECT_EQ(code_of(tie), even);
    EXPECT_EQ(code_of(below), code);
    EXPECT_EQ(code_of(above), code + 1);
    EXPECT_EQ(code_of(-tie), even == 0 ? 0 : even | 0x80);
    EXPECT_EQ(code_of(-below), code == 0 ? 0 : code | 0x80);
    EXPECT_EQ(code_of(-above), (code + 1) | 0x80);
  }
  EXPECT_EQ(code_of(-0.0f), 0);
}

TEST(Float8, NearestOfAllCodes) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<float> exponent(-12.0f, 8.8f);
  for (int i = 0; i < 20000; ++i) {
    const float x = std::min(std::exp2(exponent(random)), 448.0f) * (i % 2 == 0 ? 1.0f : -1.0f);
    ASSERT_EQ(code_of(x), nearest(static_cast<double>(x))) << x;
  }
}

// --- Rows ---------------------------------------------------------------------------------------

TEST(Float8, RowsOfAllSizesKeepTheirBound) {
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal;
  for (const uint32_t n : {1u, 8u, 16u, 80u, 256u}) {
    for (int exponent = -149; exponent <= 127; ++exponent) {
      std::vector<float> row(n);
      for (float& x : row) {
        x = std::ldexp(std::clamp(normal(random), -1.99f, 1.99f), exponent);
      }
      check_row(row);
      if (HasFatalFailure()) {
        return;
      }
    }
  }
}

// Every significand of the largest channel: no rounding of the scale takes it beyond 448.
TEST(Float8, LargestChannelIs448) {
  std::mt19937_64 random(3);
  for (uint32_t i = 0; i < 1u << 18; ++i) {
    const uint32_t significand = i < 1u << 16 ? i << 7 : static_cast<uint32_t>(random()) >> 9;
    const float top = std::bit_cast<float>(0x3f800000u | significand);
    const Encoded row = encode({top, -top, 0.25f});
    ASSERT_EQ(row.q[0], 0x7e) << top;
    ASSERT_EQ(row.q[1], 0xfe) << top;
  }
}

// Every code with every significand that a scale may have, at both ends of the range too.
TEST(Float8, ProductsWithScalesAreExact) {
  for (const int exponent : {-126, -120, 0, 118, 119}) {
    for (uint32_t significand = 0; significand < 128; ++significand) {
      const float scale = std::ldexp(1.0f + static_cast<float>(significand) / 128.0f, exponent);
      for (uint32_t code = 0; code < 0x7f; ++code) {
        const double product = value_of(code) * static_cast<double>(scale);
        if (product <= static_cast<double>(std::numeric_limits<float>::max())) {
          const auto stored = static_cast<uint8_t>(code);
          float read = 0;
          decode_f8(&stored, f32_to_bf16(scale), 1, &read);
          ASSERT_EQ(static_cast<double>(read), product);
        }
      }
    }
  }
}

TEST(Float8, Extremes) {
  constexpr float kMost = std::numeric_limits<float>::max();
  constexpr float kLeast = std::numeric_limits<float>::denorm_min();
  check_row({kMost, -kMost, 1.0f, 0.0f});
  check_row({kMost, kLeast});
  check_row({kLeast, -kLeast, 0.0f});
  check_row({0x1p-136f, -0x1p-137f});  // halfway to the least code of the smallest scale
  check_row({std::nextafter(0x1p-136f, 1.0f), -0x1p-136f});
  check_row({std::numeric_limits<float>::min(), kLeast});
  check_row({1e-36f, -1e-37f, 1e-38f, 1e-39f, -1e-41f});
  for (const std::vector<float>& zero : {std::vector<float>(16, 0.0f), {0.0f, -0.0f}}) {
    const Encoded row = encode(zero);
    EXPECT_EQ(row.scale, 0);
    for (const float x : decode(row)) {
      EXPECT_EQ(std::bit_cast<uint32_t>(x), 0u);
    }
  }
}

TEST(Float8, RowsThatAreNotFiniteReadAsNaN) {
  for (const float bad : {kInf, -kInf, std::nanf(""), -std::nanf("")}) {
    for (size_t at = 0; at < 8; ++at) {
      std::vector<float> values(8, 1.0f);
      values[at] = bad;
      const Encoded row = encode(values);
      EXPECT_EQ(row.q, std::vector<uint8_t>(8, 0));
      for (const float x : decode(row)) {
        EXPECT_TRUE(std::isnan(x));
      }
    }
  }
}

// --- Errors, next to those of int8 --------------------------------------------------------------

struct Errors {
  double f8 = 0;
  double i8 = 0;
};

// Of rows of 128 Gaussian channels, the first of them `outlier` times as large: of the channels
// from `first` on, relative to their length.
Errors errors_of_rows(float outlier, size_t first) {
  std::mt19937_64 random(4);
  std::normal_distribution<float> normal;
  double norm = 0;
  Errors sum;
  for (int i = 0; i < 2000; ++i) {
    std::vector<float> row(128);
    std::generate(row.begin(), row.end(), [&] { return normal(random); });
    row[0] *= outlier;
    const std::vector<float> f8 = decode(encode(row));
    std::vector<int8_t> q(row.size());
    std::vector<float> i8(row.size());
    const uint16_t scale = encode_i8(row.data(), 128, q.data());
    decode_i8(q.data(), scale, 128, i8.data());
    for (size_t d = first; d < row.size(); ++d) {
      const auto x = static_cast<double>(row[d]);
      norm += x * x;
      sum.f8 += std::pow(static_cast<double>(f8[d]) - x, 2);
      sum.i8 += std::pow(static_cast<double>(i8[d]) - x, 2);
    }
  }
  return {std::sqrt(sum.f8 / norm), std::sqrt(sum.i8 / norm)};
}

TEST(Float8, ErrorOfGaussianRows) {
  const Errors errors = errors_of_rows(1.0f, 0);
  EXPECT_GT(errors.f8, 0.024);
  EXPECT_LT(errors.f8, 0.028);
  EXPECT_GT(errors.f8, 3 * errors.i8);
}

// What one large channel does to the others: nothing, where int8 loses more the larger it is. They
// meet where it is a dozen times as large.
TEST(Float8, ErrorBesideAnOutlier) {
  for (const float outlier : {1.0f, 10.0f, 30.0f, 100.0f}) {
    const Errors errors = errors_of_rows(outlier, 1);
    EXPECT_LT(errors.f8, 0.028) << outlier;
    EXPECT_EQ(errors.f8<errors.i8, outlier> 20) << outlier;
  }
  const Errors errors = errors_of_rows(100.0f, 1);
  EXPECT_LT(errors.f8, errors.i8 / 8);
}

}  // namespace
}  // namespace kvm::codecs
