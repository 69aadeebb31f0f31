// SPDX-License-Identifier: Apache-2.0
#include "codecs/int8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "tests/unit/codecs/encoded_row.h"

namespace kvm::codecs {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kSmallestScale = 0x1p-126;

using Encoded = EncodedRow<int8_t>;

Encoded encode(const std::vector<float>& row) { return encode_as<int8_t>(row, CodecId::kI8); }
std::vector<float> decode(const Encoded& row) { return decode_as(row, CodecId::kI8); }

// What int8.h promises of a row of finite numbers, in double precision.
void check_row(const std::vector<float>& row) {
  const Encoded encoded = encode(row);
  const double scale = static_cast<double>(bf16_to_f32(encoded.scale));
  double top = 0;
  for (const float x : row) {
    top = std::max(top, std::abs(static_cast<double>(x)));
  }
  if (top <= kSmallestScale / 2) {
    ASSERT_EQ(encoded.scale, 0);
  } else {
    // The nearest bf16 has 8 significant bits; below the smallest scale nothing is nearer than it.
    const double wanted = std::max(top / 127, kSmallestScale);
    ASSERT_LE(std::abs(scale - wanted), wanted * 0x1p-8) << top;
    ASSERT_GE(scale, kSmallestScale);
  }
  const std::vector<float> back = decode(encoded);
  for (size_t i = 0; i < row.size(); ++i) {
    ASSERT_EQ(static_cast<double>(back[i]), encoded.q[i] * scale) << "not exact";
    ASSERT_NE(encoded.q[i], -128);
    ASSERT_LE(std::abs(static_cast<double>(back[i]) - static_cast<double>(row[i])),
              std::max(scale, kSmallestScale) * 0.5)
        << row[i] << " of " << top;
  }
  ASSERT_EQ(encode(back), encoded) << "read and stored again";
}

TEST(Int8, RowsOfAllSizesKeepTheirBound) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  for (const uint32_t n : {1u, 8u, 16u, 64u, 80u, 128u, 256u}) {
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

// Every significand of the largest channel: no rounding of the scale takes it beyond 127 steps.
TEST(Int8, LargestChannelTakes127Steps) {
  std::mt19937_64 random(2);
  for (uint32_t i = 0; i < 1u << 18; ++i) {
    const uint32_t significand = i < 1u << 16 ? i << 7 : static_cast<uint32_t>(random()) >> 9;
    const float top = std::bit_cast<float>(0x3f800000u | significand);
    const Encoded row = encode({top, -top, 0.25f});
    ASSERT_EQ(row.q[0], 127) << top;
    ASSERT_EQ(row.q[1], -127) << top;
  }
}

TEST(Int8, TiesGoToEven) {
  // The scale is 1: 127 is the largest channel.
  const Encoded row = encode({127.0f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -126.5f, 125.5f});
  EXPECT_EQ(bf16_to_f32(row.scale), 1.0f);
  EXPECT_EQ(row.q, (std::vector<int8_t>{127, 0, 2, 2, 0, -2, -126, 126}));
}

// Every significand that a scale may have, every tie, and the floats beside it.
TEST(Int8, TiesOfEveryScaleGoToEven) {
  for (uint32_t significand = 0x80; significand < 0x100; ++significand) {
    for (const int exponent : {-30, 0, 17}) {
      const float scale = std::ldexp(static_cast<float>(significand), exponent - 7);
      std::vector<float> row = {127 * scale};
      std::vector<int8_t> expected = {127};
      for (int step = -127; step < 127; ++step) {
        const float tie = (static_cast<float>(step) + 0.5f) * scale;
        row.insert(row.end(), {tie, std::nextafter(tie, -kInf), std::nextafter(tie, kInf)});
        const int even = step % 2 == 0 ? step : step + 1;
        for (const int q : {even, step, step + 1}) {
          expected.push_back(static_cast<int8_t>(q));
        }
      }
      ASSERT_EQ(bf16_to_f32(encode({row[0]}).scale), scale);
      for (size_t begin = 1; begin < row.size(); begin += 255) {
        const size_t end = std::min(row.size(), begin + 255);
        std::vector<float> part = {row[0]};
        part.insert(part.end(), row.begin() + static_cast<ptrdiff_t>(begin),
                    row.begin() + static_cast<ptrdiff_t>(end));
        std::vector<int8_t> wanted = {127};
        wanted.insert(wanted.end(), expected.begin() + static_cast<ptrdiff_t>(begin),
                      expected.begin() + static_cast<ptrdiff_t>(end));
        ASSERT_EQ(encode(part).q, wanted) << scale << " from " << begin;
      }
    }
  }
}

TEST(Int8, Extremes) {
  constexpr float kMost = std::numeric_limits<float>::max();
  constexpr float kLeast = std::numeric_limits<float>::denorm_min();
  check_row({kMost, -kMost, 1.0f, 0.0f});
  check_row({kMost, kLeast});
  check_row({kLeast, -kLeast, 0.0f});
  check_row({std::numeric_limits<float>::min(), kLeast});
  check_row({1e-36f, -1e-37f, 1e-38f, 1e-39f});
  for (const std::vector<float>& zero : {std::vector<float>(16, 0.0f), {0.0f, -0.0f}}) {
    const Encoded row = encode(zero);
    EXPECT_EQ(row.scale, 0);
    for (const float x : decode(row)) {
      EXPECT_EQ(std::bit_cast<uint32_t>(x), 0u);
    }
  }
}

TEST(Int8, RowsThatAreNotFiniteReadAsNaN) {
  for (const float bad : {kInf, -kInf, std::nanf(""), -std::nanf("")}) {
    for (size_t at = 0; at < 8; ++at) {
      std::vector<float> values(8, 1.0f);
      values[at] = bad;
      const Encoded row = encode(values);
      EXPECT_EQ(row.q, std::vector<int8_t>(8, 0));
      for (const float x : decode(row)) {
        EXPECT_TRUE(std::isnan(x));
      }
    }
  }
}

// The step is max / 127 and the error uniform in it: scale / sqrt(12) of each channel.
TEST(Int8, ErrorOfGaussianRows) {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  double error = 0;
  double norm = 0;
  for (int i = 0; i < 2000; ++i) {
    std::vector<float> row(128);
    for (float& x : row) {
      x = normal(random);
    }
    const std::vector<float> back = decode(encode(row));
    for (size_t d = 0; d < row.size(); ++d) {
      const double x = static_cast<double>(row[d]);
      const double off = static_cast<double>(back[d]) - x;
      error += off * off;
      norm += x * x;
    }
  }
  EXPECT_GT(std::sqrt(error / norm), 0.005);
  EXPECT_LT(std::sqrt(error / norm), 0.007);
}

}  // namespace
}  // namespace kvm::codecs
