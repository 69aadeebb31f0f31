// SPDX-License-Identifier: Apache-2.0
// Pages of two layers against the closed form of their errors (MiniCache, arXiv 2405.14366):
// whatever the rows, a restored row is as long as it was, and off by a chord of its share of the
// angle; tokens that are kept are what they were, bit by bit.
#include "codecs/pair.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "base/dtype.h"
#include "base/limits.h"
#include "codecs/convert.h"

namespace kvm::codecs {
namespace {

constexpr CodecId kRows[] = {CodecId::kF32, CodecId::kF16, CodecId::kBf16};

using Rows = std::vector<float>;  // [kPageTokens][dim]

Rows rounded(const Rows& rows, CodecId codec) {
  std::vector<uint8_t> stored(rows.size() * sizeof(float));
  Rows back(rows.size());
  const auto dtype = static_cast<Dtype>(codec_of(codec).elem);
  convert(rows.data(), Dtype::kF32, stored.data(), dtype, rows.size());
  convert(stored.data(), dtype, back.data(), Dtype::kF32, rows.size());
  return back;
}

struct Layers {
  Rows shallow;
  Rows deep;
};

// Rows of `cosine` to each other, about; lengths of the layers differ.
Layers random_layers(uint32_t dim, double cosine, CodecId codec, std::mt19937_64* random) {
  std::normal_distribution<double> normal;
  Layers layers;
  const double other = std::sqrt(1 - cosine * cosine);
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    const double length = std::exp(normal(*random));
    for (uint32_t i = 0; i < dim; ++i) {
      const double common = normal(*random);
      layers.shallow.push_back(static_cast<float>(length * common));
      layers.deep.push_back(
          static_cast<float>(1.3 * length * (cosine * common + other * normal(*random))));
    }
  }
  return {rounded(layers.shallow, codec), rounded(layers.deep, codec)};
}

struct Page {
  const Codec* codec = nullptr;
  std::vector<uint8_t> rows;
  std::vector<uint16_t> params;
};

// With room behind, which nobody writes.
bool encode(const Layers& layers, CodecId rows, uint32_t n_kept, uint32_t dim, float t, Page* out) {
  out->codec = &codec_of(pair_codec(rows, PairSide::kShallow, n_kept));
  out->rows.assign(out->codec->head_rows_bytes(dim) + 1, uint8_t{0x99});
  out->params.assign(out->codec->n_scales(dim) + 1, uint16_t{0x4242});
  const bool is_encoded = encode_pair(*out->codec, layers.shallow.data(), layers.deep.data(), dim,
                                      t, out->rows.data(), out->params.data());
  EXPECT_EQ(out->rows.back(), 0x99);
  EXPECT_EQ(out->params.back(), 0x4242);
  return is_encoded;
}

Rows decode(const Page& page, PairSide side, uint32_t dim) {
  Rows rows(size_t{kPageTokens} * dim);
  decode_scaled(page.rows.data(), seen_from(side, page.codec->id), page.params.data(), dim, 0,
                kPageTokens, dim, rows.data());
  return rows;
}

double length(const float* row, uint32_t dim) {
  double sum = 0;
  for (uint32_t i = 0; i < dim; ++i) {
    sum += double{row[i]} * double{row[i]};
  }
  return std::sqrt(sum);
}

double angle(const float* a, const float* b, uint32_t dim) {
  double dot = 0;
  for (uint32_t i = 0; i < dim; ++i) {
    dot += double{a[i]} * double{b[i]};
  }
  return std::acos(std::clamp(dot / length(a, dim) / length(b, dim), -1.0, 1.0));
}

double relative_error(const float* row, const float* read, uint32_t dim) {
  Rows off(dim);
  for (uint32_t i = 0; i < dim; ++i) {
    off[i] = row[i] - read[i];
  }
  return length(off.data(), dim) / length(row, dim);
}

std::set<uint32_t> kept_slots(const Page& page, uint32_t dim) {
  const PairLayout layout(*page.codec, dim);
  const uint16_t* slots = page.params.data() + PairLayout::slots();
  return {slots, slots + layout.n_kept};
}

TEST(Pair, IdsNameRowsSidesAndKeptTokens) {
  std::set<CodecId> ids;
  EXPECT_FALSE(can_pair(CodecId::kI8));
  for (const CodecId rows : kRows) {
    EXPECT_TRUE(can_pair(rows));
    for (uint32_t n_kept = 4; n_kept < kPageTokens; n_kept += 4) {
      const CodecId shallow = pair_codec(rows, PairSide::kShallow, n_kept);
      const CodecId deep = pair_codec(rows, PairSide::kDeep, n_kept);
      ids.insert({shallow, deep});
      EXPECT_EQ(codec_of(shallow).id, shallow);
      EXPECT_EQ(codec_of(deep).id, deep);
      EXPECT_EQ(codec_of(shallow).tail, rows);
      EXPECT_EQ(codec_of(deep).pair_kept, n_kept);
      EXPECT_EQ(seen_from(PairSide::kDeep, shallow), deep);
      EXPECT_EQ(seen_from(PairSide::kShallow, deep), shallow);
      EXPECT_FALSE(codec_is_known(static_cast<uint32_t>(shallow)));
      EXPECT_FALSE(codec_of(shallow).rows_stand_alone());
    }
  }
  EXPECT_EQ(ids.size(), kPairCodecs.size());
  EXPECT_EQ(seen_from(PairSide::kDeep, CodecId::kBf16), CodecId::kBf16);
}

TEST(Pair, ErrorsAreTheClosedForm) {
  std::mt19937_64 random(1);
  for (const double cosine : {0.999999, 0.95, 0.85, 0.7, 0.0, -0.9}) {
    for (const float t : {0.1f, 0.5f, 0.6f, 1.0f}) {
      const uint32_t dim = cosine > 0.9 ? 8 : 128;
      const Layers layers = random_layers(dim, cosine, CodecId::kF32, &random);
      Page page;
      ASSERT_TRUE(encode(layers, CodecId::kF32, 4, dim, t, &page));
      const Rows shallow = decode(page, PairSide::kShallow, dim);
      const Rows deep = decode(page, PairSide::kDeep, dim);
      const std::set<uint32_t> kept = kept_slots(page, dim);
      for (uint32_t slot = 0; slot < kPageTokens; ++slot) {
        const float* v = &layers.shallow[slot * dim];
        const float* u = &layers.deep[slot * dim];
        const double omega = angle(v, u, dim);
        const bool is_kept = kept.contains(slot);
        EXPECT_NEAR(length(&shallow[slot * dim], dim) / length(v, dim), 1, 1e-6);
        EXPECT_NEAR(length(&deep[slot * dim], dim) / length(u, dim), 1, 1e-6);
        EXPECT_NEAR(relative_error(v, &shallow[slot * dim], dim),
                    is_kept ? 0 : 2 * std::sin(t * omega / 2), 1e-6);
        EXPECT_NEAR(relative_error(u, &deep[slot * dim], dim),
                    is_kept ? 0 : 2 * std::sin((1 - t) * omega / 2), 1e-6);
      }
    }
  }
}

// The figures of the design: at mean cosines of .95, .85 and .7 and t = .6.
TEST(Pair, ErrorsAtMeanCosines) {
  std::mt19937_64 random(2);
  const double expected[][3] = {{.95, .191, .127}, {.85, .332, .222}, {.7, .472, .317}};
  for (const auto& [cosine, of_shallow, of_deep] : expected) {
    const Layers layers = random_layers(128, cosine, CodecId::kBf16, &random);
    Page page;
    ASSERT_TRUE(encode(layers, CodecId::kBf16, 4, 128, 0.6f, &page));
    const Rows shallow = decode(page, PairSide::kShallow, 128);
    const Rows deep = decode(page, PairSide::kDeep, 128);
    double sums[2] = {};
    for (uint32_t slot = 0; slot < kPageTokens; ++slot) {
      sums[0] += relative_error(&layers.shallow[slot * 128], &shallow[slot * 128], 128);
      sums[1] += relative_error(&layers.deep[slot * 128], &deep[slot * 128], 128);
    }
    // Four tokens of 64 are off by nothing.
    EXPECT_NEAR(sums[0] / (kPageTokens - 4), of_shallow, .02);
    EXPECT_NEAR(sums[1] / (kPageTokens - 4), of_deep, .02);
  }
}

TEST(Pair, KeptTokensAreThoseOfTheLargestAnglesAndKeepTheirBits) {
  std::mt19937_64 random(3);
  for (const CodecId rows : kRows) {
    for (const uint32_t n_kept : {4u, 12u, 32u, 60u}) {
      for (const uint32_t dim : {8u, 72u, 128u}) {
        const Layers layers = random_layers(dim, 0.8, rows, &random);
        Page page;
        ASSERT_TRUE(encode(layers, rows, n_kept, dim, 0.6f, &page));
        const std::set<uint32_t> kept = kept_slots(page, dim);
        ASSERT_EQ(kept.size(), n_kept);
        const Rows shallow = decode(page, PairSide::kShallow, dim);
        const Rows deep = decode(page, PairSide::kDeep, dim);
        double least = M_PI;  // angle of those that are kept
        double most = 0;      // of the others
        for (uint32_t slot = 0; slot < kPageTokens; ++slot) {
          const auto at = static_cast<ptrdiff_t>(slot * dim);
          const double omega = angle(&layers.shallow[slot * dim], &layers.deep[slot * dim], dim);
          if (!kept.contains(slot)) {
            most = std::max(most, omega);
            continue;
          }
          least = std::min(least, omega);
          EXPECT_TRUE(std::equal(shallow.begin() + at, shallow.begin() + at + dim,
                                 layers.shallow.begin() + at));
          EXPECT_TRUE(
              std::equal(deep.begin() + at, deep.begin() + at + dim, layers.deep.begin() + at));
        }
        EXPECT_GE(least, most - 1e-9);
      }
    }
  }
}

TEST(Pair, LengthsAreExactInAllElements) {
  std::mt19937_64 random(4);
  for (const CodecId rows : kRows) {
    const Layers layers = random_layers(64, 0.9, rows, &random);
    Page page;
    ASSERT_TRUE(encode(layers, rows, 4, 64, 0.6f, &page));
    const Rows shallow = decode(page, PairSide::kShallow, 64);
    const Rows deep = decode(page, PairSide::kDeep, 64);
    for (uint32_t at = 0; at < shallow.size(); at += 64) {
      EXPECT_NEAR(length(&shallow[at], 64) / length(&layers.shallow[at], 64), 1, 1e-6);
      EXPECT_NEAR(length(&deep[at], 64) / length(&layers.deep[at], 64), 1, 1e-6);
    }
  }
}

// What is read from the middle of a page, a few channels of it, is what the whole page says.
TEST(Pair, AnyPartIsThatOfTheWhole) {
  std::mt19937_64 random(5);
  const Layers layers = random_layers(64, 0.6, CodecId::kBf16, &random);
  Page page;
  ASSERT_TRUE(encode(layers, CodecId::kBf16, 20, 64, 0.6f, &page));
  for (const PairSide side : {PairSide::kShallow, PairSide::kDeep}) {
    const Rows whole = decode(page, side, 64);
    for (uint32_t slot = 0; slot < kPageTokens; slot += 5) {
      const uint32_t n_rows = std::min(7u, kPageTokens - slot);
      Rows part(n_rows * 16);
      decode_scaled(page.rows.data() + slot * page.codec->row_bytes(64),
                    seen_from(side, page.codec->id), page.params.data(), 64, slot, n_rows, 16,
                    part.data());
      for (uint32_t i = 0; i < part.size(); ++i) {
        EXPECT_EQ(part[i], whole[(slot + i / 16) * 64 + i % 16]);
      }
    }
  }
}

// What has been merged is merged again without a loss but that of rounding.
TEST(Pair, MergingAgainLosesNothing) {
  std::mt19937_64 random(6);
  const Layers layers = random_layers(64, 0.8, CodecId::kF32, &random);
  Page page;
  ASSERT_TRUE(encode(layers, CodecId::kF32, 4, 64, 0.6f, &page));
  const Layers once = {decode(page, PairSide::kShallow, 64), decode(page, PairSide::kDeep, 64)};
  ASSERT_TRUE(encode(once, CodecId::kF32, 4, 64, 0.6f, &page));
  const Layers twice = {decode(page, PairSide::kShallow, 64), decode(page, PairSide::kDeep, 64)};
  for (uint32_t at = 0; at < once.shallow.size(); at += 64) {
    EXPECT_LT(relative_error(&once.shallow[at], &twice.shallow[at], 64), 1e-6);
    EXPECT_LT(relative_error(&once.deep[at], &twice.deep[at], 64), 1e-6);
  }
}

TEST(Pair, ZerosEqualsAndOpposites) {
  constexpr uint32_t kDim = 16;
  std::mt19937_64 random(7);
  Layers layers = random_layers(kDim, 0.5, CodecId::kF32, &random);
  const auto row = [](Rows& rows, uint32_t slot) { return rows.begin() + slot * kDim; };
  std::fill_n(row(layers.shallow, 10), kDim, 0.0f);
  std::fill_n(row(layers.deep, 11), kDim, 0.0f);
  std::fill_n(row(layers.shallow, 12), kDim, 0.0f);
  std::fill_n(row(layers.deep, 12), kDim, 0.0f);
  std::copy_n(row(layers.shallow, 13), kDim, row(layers.deep, 13));
  std::transform(row(layers.shallow, 14), row(layers.shallow, 14) + kDim, row(layers.deep, 14),
                 [](float x) { return -2 * x; });
  for (uint32_t slot = 20; slot < 30; ++slot) {  // more than are kept
    std::transform(row(layers.shallow, slot), row(layers.shallow, slot) + kDim,
                   row(layers.deep, slot), [](float x) { return -x; });
  }
  for (const float t : {0.5f, 0.6f}) {
    Page page;
    ASSERT_TRUE(encode(layers, CodecId::kF32, 4, kDim, t, &page));
    const Rows shallow = decode(page, PairSide::kShallow, kDim);
    const Rows deep = decode(page, PairSide::kDeep, kDim);
    EXPECT_EQ(length(&shallow[10 * kDim], kDim), 0);
    EXPECT_LT(relative_error(&layers.deep[10 * kDim], &deep[10 * kDim], kDim), 1e-6);
    EXPECT_EQ(length(&deep[11 * kDim], kDim), 0);
    EXPECT_LT(relative_error(&layers.shallow[11 * kDim], &shallow[11 * kDim], kDim), 1e-6);
    EXPECT_EQ(length(&shallow[12 * kDim], kDim), 0);
    EXPECT_EQ(length(&deep[12 * kDim], kDim), 0);
    EXPECT_LT(relative_error(&layers.shallow[13 * kDim], &shallow[13 * kDim], kDim), 1e-6);
    for (uint32_t slot = 20; slot < 30; ++slot) {  // the deeper row is right where t leans to it
      EXPECT_LT(relative_error(&layers.deep[slot * kDim], &deep[slot * kDim], kDim), 1e-6);
      EXPECT_NEAR(length(&shallow[slot * kDim], kDim) / length(&layers.shallow[slot * kDim], kDim),
                  1, 1e-6);
    }
  }
}

TEST(Pair, RowsWithoutALengthAreNotEncoded) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity(), 1e36f, 1e-36f}) {
    for (const bool in_deep : {false, true}) {
      std::mt19937_64 random(8);
      Layers layers = random_layers(8, 0.5, CodecId::kF32, &random);
      Rows& rows = in_deep ? layers.deep : layers.shallow;
      std::fill_n(rows.begin() + 17 * 8, 8, bad);
      Page page;
      EXPECT_FALSE(encode(layers, CodecId::kF32, 4, 8, 0.6f, &page)) << bad;
    }
  }
}

// Of both layers' bytes: the directions, a factor for each of two rows, and what is kept.
TEST(Pair, BytesAreThoseOfTheFormula) {
  const Codec& codec = codec_of(pair_codec(CodecId::kBf16, PairSide::kShallow, 4));
  const double both = 2.0 * 64 * 128 * 2;
  const double page =
      static_cast<double>(codec.head_rows_bytes(128) + codec.head_params_bytes(128));
  EXPECT_NEAR(page / both, (64.0 * 256 + 2 * 64 * 4 + 4 * 2 + 4 * 256) / both, 1e-9);
  EXPECT_NEAR(page / both, .5471, .0001);
}

TEST(Pair, PagesOfSeveralHeads) {
  constexpr uint32_t kDim = 24;
  constexpr uint32_t kHeads = 3;
  std::mt19937_64 random(9);
  const CodecId rows = CodecId::kBf16;
  const CodecId id = pair_codec(rows, PairSide::kShallow, 8);
  const Codec& codec = codec_of(id);
  std::vector<uint8_t> planes[3];
  planes[0].resize(kHeads * codec_of(rows).head_rows_bytes(kDim));
  planes[1].resize(planes[0].size());
  planes[2].resize(kHeads * codec.head_rows_bytes(kDim));
  std::vector<uint16_t> params(kHeads * codec.n_scales(kDim));
  std::vector<Layers> heads;
  for (uint32_t head = 0; head < kHeads; ++head) {
    heads.push_back(random_layers(kDim, 0.9, rows, &random));
    const uint64_t at = head * codec_of(rows).head_rows_bytes(kDim);
    convert(heads[head].shallow.data(), Dtype::kF32, &planes[0][at], Dtype::kBf16,
            kPageTokens * kDim);
    convert(heads[head].deep.data(), Dtype::kF32, &planes[1][at], Dtype::kBf16, kPageTokens * kDim);
  }
  std::vector<float> scratch(2 * kPageTokens * kDim);
  const KvPlane to = {planes[2].data(), params.data(), id};
  for (uint32_t head = 0; head < kHeads; ++head) {
    ASSERT_TRUE(encode_pair_head({planes[0].data(), nullptr, rows},
                                 {planes[1].data(), nullptr, rows}, to, head, kDim, 0.6f,
                                 scratch.data()));
  }
  for (const PairSide side : {PairSide::kShallow, PairSide::kDeep}) {
    const KvPlane seen = {planes[2].data(), params.data(), seen_from(side, id)};
    for (uint16_t head = 0; head < kHeads; ++head) {
      SourceRows source = rows_of(seen, kDim, 0);
      source.heads = &head;
      Rows read(kPageTokens * kDim);
      convert_rows(source, writable_rows({read.data(), nullptr, CodecId::kF32}, kDim, 0),
                   kPageTokens, 1, kDim);
      Page alone;
      ASSERT_TRUE(encode(heads[head], rows, 8, kDim, 0.6f, &alone));
      EXPECT_EQ(read, decode(alone, side, kDim));
    }
  }
}

}  // namespace
}  // namespace kvm::codecs
