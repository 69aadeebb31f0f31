// SPDX-License-Identifier: Apache-2.0
// Pages scaled by channel against the definition in double precision.
#include "codecs/int8_channel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "codecs/convert.h"
#include "codecs/rows.h"

namespace kvm::codecs {
namespace {

struct Head {
  std::vector<int8_t> codes;
  std::vector<uint16_t> scales;

  bool operator==(const Head&) const = default;
};

// With room behind, which nobody writes.
bool encode(const std::vector<float>& rows, uint32_t dim, Head* out) {
  out->codes.assign(rows.size() + 1, int8_t{99});
  out->scales.assign(dim + 1, uint16_t{0x4242});
  const bool is_encoded =
      encode_i8_channel(rows.data(), dim, out->codes.data(), out->scales.data());
  EXPECT_EQ(out->codes.back(), 99);
  EXPECT_EQ(out->scales.back(), 0x4242);
  out->codes.pop_back();
  out->scales.pop_back();
  return is_encoded;
}

std::vector<float> decode(const Head& head, uint32_t dim) {
  std::vector<float> rows(head.codes.size());
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    decode_i8_channel(head.codes.data() + t * dim, head.scales.data(), dim, rows.data() + t * dim);
  }
  return rows;
}

// Channels of sizes that are far apart, as those of keys are.
std::vector<float> random_rows(uint32_t dim, std::mt19937_64* random) {
  std::normal_distribution<float> normal;
  std::vector<float> rows(size_t{kPageTokens} * dim);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = std::ldexp(normal(*random), static_cast<int>(i % dim % 11) * 9 - 40);
  }
  return rows;
}

TEST(Int8Channel, IsTheNearestMultipleOfTheChannelsScale) {
  std::mt19937_64 random(3);
  for (const uint32_t dim : {8u, 40u, 128u, 256u}) {
    const std::vector<float> rows = random_rows(dim, &random);
    Head head;
    ASSERT_TRUE(encode(rows, dim, &head));
    for (uint32_t i = 0; i < dim; ++i) {
      double largest = 0;
      for (uint32_t t = 0; t < kPageTokens; ++t) {
        largest = std::max(largest, std::abs(double{rows[t * dim + i]}));
      }
      const double scale = double{bf16_to_f32(head.scales[i])};
      EXPECT_NEAR(scale, largest / 127, largest / 127 / 256);
      for (uint32_t t = 0; t < kPageTokens; ++t) {
        ASSERT_EQ(head.codes[t * dim + i], std::nearbyint(double{rows[t * dim + i]} / scale));
      }
    }
    // What is read is what would be encoded again.
    Head again;
    ASSERT_TRUE(encode(decode(head, dim), dim, &again));
    EXPECT_EQ(again, head);
  }
}

TEST(Int8Channel, TiesGoToEvenAndNothingIsNothing) {
  constexpr uint32_t kDim = 8;
  std::vector<float> rows(kPageTokens * kDim, 0.0f);
  rows[0] = 127.0f;
  rows[kDim] = 2.5f;
  rows[2 * kDim] = -3.5f;
  rows[3 * kDim] = 126.5f;
  rows[1] = 0x1p-127f;  // half of the smallest scale
  rows[2] = -0.0f;
  rows[3] = 0x1p-126f;
  rows[4] = 0x1p127f;
  Head head;
  ASSERT_TRUE(encode(rows, kDim, &head));
  EXPECT_EQ(bf16_to_f32(head.scales[0]), 1.0f);
  EXPECT_EQ(head.codes[0], 127);
  EXPECT_EQ(head.codes[kDim], 2);
  EXPECT_EQ(head.codes[2 * kDim], -4);
  EXPECT_EQ(head.codes[3 * kDim], 126);
  EXPECT_EQ(head.scales[1], 0);
  EXPECT_EQ(head.codes[1], 0);
  EXPECT_EQ(head.scales[2], 0);
  EXPECT_EQ(bf16_to_f32(head.scales[3]), 0x1p-126f);
  EXPECT_EQ(head.codes[3], 1);
  EXPECT_TRUE(std::isfinite(decode(head, kDim)[4]));
}

TEST(Int8Channel, ANumberThatCannotBeHeldIsRefused) {
  constexpr uint32_t kDim = 16;
  std::mt19937_64 random(4);
  for (const float x : {std::numeric_limits<float>::quiet_NaN(), INFINITY, -INFINITY,
                        std::numeric_limits<float>::max(), -0x1.000002p127f}) {
    for (const size_t at : {size_t{0}, size_t{kDim * 63 + 15}, size_t{500}}) {
      std::vector<float> rows = random_rows(kDim, &random);
      rows[at] = x;
      Head head;
      EXPECT_FALSE(encode(rows, kDim, &head)) << x;
    }
  }
}

// A page of planes with memory of its own.
struct Page {
  Page(CodecId codec, uint32_t heads, uint32_t dim)
      : rows(heads * codec_of(codec).head_rows_bytes(dim), uint8_t{0x5a}),
        params(heads * codec_of(codec).head_params_bytes(dim) / 2, uint16_t{0x4242}),
        plane{rows.data(), params.empty() ? nullptr : params.data(), codec} {}
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;

  std::vector<uint8_t> rows;
  std::vector<uint16_t> params;
  KvPlane plane;
};

std::vector<float> read(const Page& page, uint32_t heads, uint32_t dim) {
  std::vector<float> out(size_t{heads} * kPageTokens * dim);
  convert_rows(rows_of(page.plane, dim, 0),
               writable_rows({out.data(), nullptr, CodecId::kF32}, dim, 0), kPageTokens, heads,
               dim);
  return out;
}

// scratch: [kPageTokens][dim]
bool encode_heads(const KvPlane& from, const KvPlane& to, uint32_t heads, uint32_t dim,
                  float* scratch) {
  for (uint16_t head = 0; head < heads; ++head) {
    if (!encode_page_head(from, to, head, dim, nullptr, scratch)) {
      return false;
    }
  }
  return true;
}

TEST(EncodePage, FromEveryCodecToEveryCodec) {
  constexpr uint32_t kHeads = 3;
  constexpr uint32_t kDim = 40;
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> values(size_t{kHeads} * kPageTokens * kDim);
  for (float& x : values) {
    x = normal(random);
  }
  std::vector<float> scratch(kPageTokens * kDim);
  const KvPlane given{values.data(), nullptr, CodecId::kF32};
  for (const Codec& from : kCodecs) {
    Page source(from.id, kHeads, kDim);
    ASSERT_TRUE(encode_heads(given, source.plane, kHeads, kDim, scratch.data()));
    const std::vector<float> stored = read(source, kHeads, kDim);
    for (const Codec& to : kCodecs) {
      SCOPED_TRACE(std::string(from.name) + " to " + to.name);
      Page target(to.id, kHeads, kDim);
      ASSERT_TRUE(encode_heads(source.plane, target.plane, kHeads, kDim, scratch.data()));
      // Not of low bits: the largest step that counts may be another one the second time.
      if (from.id == to.id && !from.is_low_bits()) {
        EXPECT_EQ(target.rows, source.rows);
        EXPECT_EQ(target.params, source.params);
      }
      // Head by head what the rows alone would become.
      Page expected(to.id, kHeads, kDim);
      for (uint16_t head = 0; head < kHeads; ++head) {
        const std::vector<float> own(stored.begin() + ptrdiff_t{head} * kPageTokens * kDim,
                                     stored.begin() + ptrdiff_t{head + 1} * kPageTokens * kDim);
        Page one(to.id, 1, kDim);
        ASSERT_TRUE(
            encode_heads({own.data(), nullptr, CodecId::kF32}, one.plane, 1, kDim, scratch.data()));
        std::copy(one.rows.begin(), one.rows.end(),
                  expected.rows.begin() + static_cast<ptrdiff_t>(head * one.rows.size()));
        std::copy(one.params.begin(), one.params.end(),
                  expected.params.begin() + static_cast<ptrdiff_t>(head * one.params.size()));
      }
      EXPECT_EQ(target.rows, expected.rows);
      EXPECT_EQ(target.params, expected.params);
    }
  }
}

// Rows of a page that is scaled by channel, taken to another place with their scales.
TEST(EncodePage, SomeRowsOfAPageMove) {
  constexpr uint32_t kHeads = 3;
  constexpr uint32_t kDim = 24;
  std::mt19937_64 random(6);
  std::vector<float> values;
  for (uint32_t h = 0; h < kHeads; ++h) {
    const std::vector<float> rows = random_rows(kDim, &random);
    values.insert(values.end(), rows.begin(), rows.end());
  }
  std::vector<float> scratch(kPageTokens * kDim);
  Page source(kI8Channel, kHeads, kDim);
  ASSERT_TRUE(encode_heads({values.data(), nullptr, CodecId::kF32}, source.plane, kHeads, kDim,
                           scratch.data()));
  const std::vector<float> stored = read(source, kHeads, kDim);
  Page target(kI8Channel, 1, kDim);
  SourceRows from = rows_of(source.plane, kDim, 20);
  const uint16_t head = 2;
  from.heads = &head;
  convert_rows(from, writable_rows(target.plane, kDim, 3), 10, 1, kDim);
  const std::vector<float> moved = read(target, 1, kDim);
  for (uint32_t t = 0; t < 10; ++t) {
    for (uint32_t i = 0; i < kDim; ++i) {
      ASSERT_EQ(moved[(3 + t) * kDim + i],
                stored[(size_t{head} * kPageTokens + 20 + t) * kDim + i]);
    }
  }
  EXPECT_EQ(target.rows[2 * kDim], 0x5a);
  EXPECT_EQ(target.rows[13 * kDim], 0x5a);
}

}  // namespace
}  // namespace kvm::codecs
