// SPDX-License-Identifier: Apache-2.0
// Codes of 4, 3 and 2 bits against their definition in double precision, and against the errors
// that published settings have on keys with large channels.
#include "codecs/low_bits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/limits.h"
#include "codecs/convert.h"

namespace kvm::codecs {
namespace {

const CodecId kAll[] = {kI4,         kI4Channel,  kI4Centred, kI2,        kI2Channel, kI2Centred,
                        kI4Balanced, kI2Balanced, kI3,        kI3Channel, kI3Centred};

uint32_t bits_of(CodecId id) { return id < kI2 || id == kI4Balanced ? 4 : id >= kI3 ? 3 : 2; }
bool is_balanced(CodecId id) { return id == kI4Balanced || id == kI2Balanced; }
bool is_centred(CodecId id) { return id == kI4Centred || id == kI3Centred || id == kI2Centred; }
bool is_by_channel(CodecId id) { return id == kI4Channel || id == kI3Channel || id == kI2Channel; }

struct Head {
  std::vector<uint8_t> codes;
  std::vector<uint16_t> params;
};

// With room behind, which nobody writes.
bool encode(const Codec& codec, const std::vector<float>& rows, uint32_t dim, Head* out,
            const float* largest_q = nullptr) {
  out->codes.assign(codec.head_rows_bytes(dim) + 1, uint8_t{0x99});
  out->params.assign(codec.n_scales(dim) + 1, uint16_t{0x4242});
  const bool is_encoded =
      encode_low_bits(codec, rows.data(), dim, largest_q, out->codes.data(), out->params.data());
  EXPECT_EQ(out->codes.back(), 0x99);
  EXPECT_EQ(out->params.back(), 0x4242);
  return is_encoded;
}

std::vector<float> decode(const Codec& codec, const Head& head, uint32_t dim) {
  std::vector<float> rows(size_t{kPageTokens} * dim);
  decode_low_bits(codec, head.codes.data(), head.params.data(), dim, 0, kPageTokens, dim,
                  rows.data());
  return rows;
}

// Channels of sizes that are far apart, and tokens, too; some are all alike.
std::vector<float> random_rows(uint32_t dim, std::mt19937_64* random) {
  std::normal_distribution<float> normal;
  std::vector<float> rows(size_t{kPageTokens} * dim);
  for (size_t i = 0; i < rows.size(); ++i) {
    const size_t channel = i % dim;
    const size_t token = i / dim;
    rows[i] = std::ldexp(normal(*random), static_cast<int>(channel % 11 + token % 5) * 4 - 30) +
              (channel % 7 == 0 ? 30.0f : 0.0f);
    if (channel % 13 == 5 || token == 20) {
      rows[i] = channel % 2 == 0 ? 0.0f : -2.5f;
    }
  }
  return rows;
}

double bf16(const Head& head, uint64_t i) { return double{bf16_to_f32(head.params[i])}; }

// What the definition says of element (t, i): its scale, zero, mean and factor.
struct Steps {
  double scale, zero, mean, factor;
};
Steps steps_at(const Codec& codec, const Head& head, uint32_t dim, uint32_t t, uint32_t i) {
  const uint32_t n_groups = (dim + 63) / 64;
  if (is_by_channel(codec.id)) {
    return {bf16(head, i), bf16(head, dim + i), 0, 1};
  }
  const uint64_t own = (uint64_t{t} * n_groups + i / 64) * 2;
  const uint64_t channel = uint64_t{kPageTokens} * n_groups * 2 + i;
  return {bf16(head, own), bf16(head, own + 1), is_centred(codec.id) ? bf16(head, channel) : 0,
          is_balanced(codec.id) ? bf16(head, channel) : 1};
}

uint32_t code_at(const Codec& codec, const Head& head, uint32_t dim, uint32_t t, uint32_t i) {
  const uint32_t bits = bits_of(codec.id);
  const uint8_t* row = head.codes.data() + uint64_t{t} * dim * bits / 8;
  uint32_t code = 0;
  for (uint32_t n = 0; n < bits; ++n) {
    const uint32_t bit = i * bits + n;
    code |= (row[bit / 8] >> bit % 8 & 1u) << n;
  }
  return code;
}

// The bytes of a row whose codes are 0, 1, ... up to the last, again and again.
TEST(LowBits, ElementsLieInTheOrderOfTheirBits) {
  struct Case {
    CodecId id;
    std::vector<uint8_t> row;
  };
  for (const Case& one :
       {Case{kI4, {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe}},
        Case{kI3, {0x88, 0xc6, 0xfa, 0x88, 0xc6, 0xfa}}, Case{kI2, {0xe4, 0xe4, 0xe4, 0xe4}}}) {
    const Codec& codec = codec_of(one.id);
    std::vector<float> rows(size_t{kPageTokens} * 16);
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i] = static_cast<float>(i % (codec.last_code() + 1));
    }
    Head head;
    ASSERT_TRUE(encode(codec, rows, 16, &head));
    EXPECT_EQ(std::vector<uint8_t>(head.codes.begin(), head.codes.begin() + codec.row_bytes(16)),
              one.row)
        << codec.name;
    EXPECT_EQ(decode(codec, head, 16), rows) << codec.name;
  }
}

TEST(LowBits, AreStepsFromTheSmallestToTheLargest) {
  std::mt19937_64 random(3);
  for (const CodecId id : kAll) {
    const Codec& codec = codec_of(id);
    const uint32_t last = (1u << bits_of(id)) - 1;
    for (const uint32_t dim : {8u, 64u, 72u, 128u, 576u}) {
      SCOPED_TRACE(std::string(codec.name) + " of " + std::to_string(dim));
      const std::vector<float> rows = random_rows(dim, &random);
      Head head;
      ASSERT_TRUE(encode(codec, rows, dim, &head));
      const std::vector<float> read = decode(codec, head, dim);
      // The smallest and the largest of those that share a scale.
      std::vector<double> smallest(rows.size(), INFINITY);
      std::vector<double> largest(rows.size(), -INFINITY);
      const bool by_channel = codec.group_params == 0;
      const auto shared = [&](uint32_t t, uint32_t i) {
        return by_channel ? i : uint64_t{t} * dim + i / 64;
      };
      for (uint32_t t = 0; t < kPageTokens; ++t) {
        for (uint32_t i = 0; i < dim; ++i) {
          // The rest without the mean is one of fp32.
          const Steps steps = steps_at(codec, head, dim, t, i);
          const float rest = (rows[t * dim + i] - static_cast<float>(steps.mean)) /
                             static_cast<float>(steps.factor);
          smallest[shared(t, i)] = std::min(smallest[shared(t, i)], double{rest});
          largest[shared(t, i)] = std::max(largest[shared(t, i)], double{rest});
        }
      }
      for (uint32_t t = 0; t < kPageTokens; ++t) {
        for (uint32_t i = 0; i < dim; ++i) {
          const Steps steps = steps_at(codec, head, dim, t, i);
          const double lo = smallest[shared(t, i)];
          const double hi = largest[shared(t, i)];
          ASSERT_LE(steps.zero, lo);
          ASSERT_GE(steps.zero, lo - std::abs(lo) / 128);
          const double rounding = (std::abs(hi) + std::abs(lo)) * 0x1p-22;  // of fp32
          ASSERT_GE(steps.zero + last * steps.scale, hi - rounding);
          ASSERT_LE(steps.scale, (hi - steps.zero) / last * (1 + 1.0 / 127) + 0x1p-126 + rounding);
          const double rest = double{(rows[t * dim + i] - static_cast<float>(steps.mean)) /
                                     static_cast<float>(steps.factor)};
          const uint32_t code = code_at(codec, head, dim, t, i);
          ASSERT_LE(std::abs(code * steps.scale + steps.zero - rest),
                    steps.scale * (0.5 + 0x1p-19) + rounding);
          const auto x = static_cast<float>(code * steps.scale + steps.zero);
          ASSERT_EQ(read[t * dim + i],
                    (x + static_cast<float>(steps.mean)) * static_cast<float>(steps.factor));
        }
      }
    }
  }
}

TEST(LowBits, MeansAreThoseOfThePage) {
  constexpr uint32_t kDim = 72;
  std::mt19937_64 random(4);
  const std::vector<float> rows = random_rows(kDim, &random);
  for (const CodecId id : {kI4Centred, kI3Centred, kI2Centred}) {
    Head head;
    ASSERT_TRUE(encode(codec_of(id), rows, kDim, &head));
    for (uint32_t i = 0; i < kDim; ++i) {
      double sum = 0;
      for (uint32_t t = 0; t < kPageTokens; ++t) {
        sum += double{rows[t * kDim + i]};
      }
      EXPECT_EQ(steps_at(codec_of(id), head, kDim, 0, i).mean,
                double{bf16_to_f32(f32_to_bf16(static_cast<float>(sum / kPageTokens)))});
    }
  }
}

TEST(LowBits, FactorsAreThoseOfKeysAndQueries) {
  constexpr uint32_t kDim = 72;
  std::mt19937_64 random(4);
  const std::vector<float> rows = random_rows(kDim, &random);
  std::vector<float> queries(kDim);
  for (uint32_t i = 0; i < kDim; ++i) {
    queries[i] = i % 9 == 8 ? 0.0f : std::ldexp(1.0f, static_cast<int>(i % 12) - 6);
  }
  const std::vector<float> none(kDim);
  for (const CodecId id : {kI4Balanced, kI2Balanced}) {
    const float* const known[] = {queries.data(), none.data(), nullptr};
    for (const float* largest_q : known) {
      Head head;
      ASSERT_TRUE(encode(codec_of(id), rows, kDim, &head, largest_q));
      for (uint32_t i = 0; i < kDim; ++i) {
        double largest = 0;
        for (uint32_t t = 0; t < kPageTokens; ++t) {
          largest = std::max(largest, std::abs(double{rows[t * kDim + i]}));
        }
        // The largest query is 2^5, and none counts for less than 2^-10 of it.
        const double weight =
            largest_q == queries.data() ? std::max(double{queries[i]} / 32, 1.0 / 1024) : 1;
        const double expected = largest == 0 ? 1 : std::sqrt(largest / weight);
        EXPECT_NEAR(steps_at(codec_of(id), head, kDim, 0, i).factor, expected, expected / 256) << i;
      }
    }
  }
}

TEST(LowBits, ReadSomeChannelsOfSomeTokens) {
  constexpr uint32_t kDim = 136;
  std::mt19937_64 random(5);
  const std::vector<float> rows = random_rows(kDim, &random);
  for (const CodecId id : kAll) {
    const Codec& codec = codec_of(id);
    Head head;
    ASSERT_TRUE(encode(codec, rows, kDim, &head));
    const std::vector<float> all = decode(codec, head, kDim);
    for (const auto& [slot, n_tokens, n] :
         {std::array{0u, 64u, 8u}, std::array{63u, 1u, 136u}, std::array{17u, 16u, 72u}}) {
      std::vector<float> some(size_t{n_tokens} * n + 1, 7.0f);
      decode_low_bits(codec, head.codes.data() + slot * codec.row_bytes(kDim), head.params.data(),
                      kDim, slot, n_tokens, n, some.data());
      for (uint32_t t = 0; t < n_tokens; ++t) {
        for (uint32_t i = 0; i < n; ++i) {
          ASSERT_EQ(some[t * n + i], all[(slot + t) * kDim + i]) << codec.name;
        }
      }
      EXPECT_EQ(some.back(), 7.0f);
    }
  }
}

TEST(LowBits, ANumberThatCannotBeHeldIsRefused) {
  constexpr uint32_t kDim = 16;
  std::mt19937_64 random(6);
  for (const CodecId id : kAll) {
    for (const float x : {std::numeric_limits<float>::quiet_NaN(), INFINITY, -INFINITY,
                          std::numeric_limits<float>::max(), -0x1.000002p126f}) {
      for (const size_t at : {size_t{0}, size_t{kDim * 63 + 15}, size_t{500}}) {
        std::vector<float> rows = random_rows(kDim, &random);
        rows[at] = x;
        Head head;
        EXPECT_FALSE(encode(codec_of(id), rows, kDim, &head)) << x;
      }
    }
    // What just fits stays finite.
    std::vector<float> rows = random_rows(kDim, &random);
    rows[3] = 0x1p126f;
    rows[kDim + 3] = -0x1p126f;
    rows[2] = -0x1p126f;
    Head head;
    ASSERT_TRUE(encode(codec_of(id), rows, kDim, &head));
    for (const float x : decode(codec_of(id), head, kDim)) {
      ASSERT_TRUE(std::isfinite(x));
    }
    // Of balanced ones also where nobody asks for the channels that are so large.
    std::vector<float> largest_q(kDim, 1.0f);
    largest_q[3] = largest_q[2] = 0;
    ASSERT_TRUE(encode(codec_of(id), rows, kDim, &head, largest_q.data()));
    for (const float x : decode(codec_of(id), head, kDim)) {
      ASSERT_TRUE(std::isfinite(x));
    }
  }
}

// --- Errors on keys with large channels ----------------------------------------------------------

constexpr uint32_t kKeys = 1024;
constexpr uint32_t kKeyDim = 128;

// Means by channel, four of them large; a part of rank 8, and noise, some of it ten times as large.
std::vector<double> keys_with_large_channels(std::mt19937_64* random) {
  std::normal_distribution<double> normal;
  std::array<double, kKeyDim> offset;
  for (double& x : offset) {
    x = 0.5 * normal(*random);
  }
  constexpr double kLarge[] = {10, -9, 8, -12};
  for (uint32_t k = 0; k < 4; ++k) {
    offset[17 + 29 * k] = kLarge[k];
  }
  std::vector<double> left(kKeys * 8);
  std::vector<double> right(8 * kKeyDim);
  for (std::vector<double>* part : {&left, &right}) {
    for (double& x : *part) {
      x = normal(*random);
    }
  }
  std::vector<double> keys(size_t{kKeys} * kKeyDim);
  std::uniform_real_distribution<double> uniform;
  for (uint32_t t = 0; t < kKeys; ++t) {
    for (uint32_t i = 0; i < kKeyDim; ++i) {
      double x = 0;
      for (uint32_t k = 0; k < 8; ++k) {
        x += left[t * 8 + k] * right[k * kKeyDim + i] / (k + 1);
      }
      x += (uniform(*random) < 0.001 ? 5 : 0.5) * normal(*random);
      keys[t * kKeyDim + i] = offset[i] + x;
    }
  }
  return keys;
}

struct Errors {
  double of_keys;    // relative to their energy without the means of channels
  double of_scores;  // likewise of scores, without the mean of each query's: what the softmax sees
};

Errors errors_of(CodecId id, const std::vector<double>& keys, const std::vector<double>& queries,
                 const float* largest_q = nullptr) {
  const Codec& codec = codec_of(id);
  std::vector<double> error(keys.size());
  for (uint32_t page = 0; page < kKeys; page += kPageTokens) {
    const size_t at = size_t{page} * kKeyDim;
    const std::vector<float> rows(keys.begin() + static_cast<ptrdiff_t>(at),
                                  keys.begin() + static_cast<ptrdiff_t>(at + 64 * kKeyDim));
    Head head;
    EXPECT_TRUE(encode(codec, rows, kKeyDim, &head, largest_q));
    const std::vector<float> read = decode(codec, head, kKeyDim);
    for (size_t i = 0; i < read.size(); ++i) {
      error[at + i] = double{read[i]} - keys[at + i];
    }
  }
  double sum = 0;
  double all = 0;
  for (uint32_t i = 0; i < kKeyDim; ++i) {
    double mean = 0;
    for (uint32_t t = 0; t < kKeys; ++t) {
      mean += keys[t * kKeyDim + i] / kKeys;
    }
    for (uint32_t t = 0; t < kKeys; ++t) {
      sum += error[t * kKeyDim + i] * error[t * kKeyDim + i];
      all += std::pow(keys[t * kKeyDim + i] - mean, 2);
    }
  }
  Errors out{std::sqrt(sum / all), 0};
  double score_sum = 0;
  double score_all = 0;
  for (uint32_t q = 0; q < queries.size() / kKeyDim; ++q) {
    std::vector<double> wrong(kKeys);
    std::vector<double> right(kKeys);
    for (uint32_t t = 0; t < kKeys; ++t) {
      for (uint32_t i = 0; i < kKeyDim; ++i) {
        wrong[t] += queries[q * kKeyDim + i] * error[t * kKeyDim + i];
        right[t] += queries[q * kKeyDim + i] * keys[t * kKeyDim + i];
      }
    }
    for (std::vector<double>* scores : {&wrong, &right}) {
      double mean = 0;
      for (const double x : *scores) {
        mean += x / kKeys;
      }
      for (const double x : *scores) {
        (scores == &wrong ? score_sum : score_all) += (x - mean) * (x - mean);
      }
    }
  }
  out.of_scores = std::sqrt(score_sum / score_all);
  return out;
}

// KIVI's finding: large channels take the bits of the others where scales belong to tokens. And a
// shift by the mean, which the softmax does not see, does as much as scales of channels.
TEST(LowBits, LargeChannelsCostMuchByTokenAndLittleByChannelOrCentred) {
  std::mt19937_64 random(7);
  const std::vector<double> keys = keys_with_large_channels(&random);
  std::normal_distribution<double> normal;
  std::vector<double> queries(32 * kKeyDim);
  for (double& x : queries) {
    x = normal(random);
  }
  struct Case {
    CodecId by_token, by_channel, centred;
    double expected_by_token, expected_by_channel;  // of keys, in arithmetic of double precision
  };
  for (const Case& one : {Case{kI4, kI4Channel, kI4Centred, 0.271, 0.091},
                          Case{kI3, kI3Channel, kI3Centred, 0.599, 0.195},
                          Case{kI2, kI2Channel, kI2Centred, 1.458, 0.454}}) {
    const Errors by_token = errors_of(one.by_token, keys, queries);
    const Errors by_channel = errors_of(one.by_channel, keys, queries);
    const Errors centred = errors_of(one.centred, keys, queries);
    std::printf("%s: keys %.3f by token, %.3f by channel, %.3f centred; scores %.3f, %.3f, %.3f\n",
                codec_of(one.by_token).name, by_token.of_keys, by_channel.of_keys, centred.of_keys,
                by_token.of_scores, by_channel.of_scores, centred.of_scores);
    EXPECT_GE(by_token.of_keys / by_channel.of_keys, 2.5);
    EXPECT_GE(by_token.of_scores / centred.of_scores, 2.5);
    EXPECT_NEAR(by_token.of_keys, one.expected_by_token, one.expected_by_token / 4);
    EXPECT_NEAR(by_channel.of_keys, one.expected_by_channel, one.expected_by_channel / 4);
  }
}

// MiKV's finding: where some channels of keys, or of queries, are large, scores are nearer to what
// they were when codes are shared out by both.
TEST(LowBits, BalancedKeysKeepScoresBetter) {
  std::mt19937_64 random(9);
  std::normal_distribution<double> normal;
  struct Case {
    CodecId plain, balanced;
    bool has_large_query;
    double expected_plain, expected_balanced;  // in arithmetic of double precision
  };
  for (const Case& one :
       {Case{kI4, kI4Balanced, false, 0.16, 0.053}, Case{kI4, kI4Balanced, true, 0.25, 0.055},
        Case{kI2, kI2Balanced, false, 0.81, 0.26}, Case{kI2, kI2Balanced, true, 1.24, 0.27}}) {
    std::vector<double> keys(size_t{kKeys} * kKeyDim);
    std::vector<double> queries(64 * kKeyDim);
    for (size_t i = 0; i < keys.size(); ++i) {
      keys[i] = normal(random) * ((i % kKeyDim) % 29 == 17 ? 15 : 1);
    }
    for (size_t i = 0; i < queries.size(); ++i) {
      queries[i] = normal(random) * (one.has_large_query && i % kKeyDim == 5 ? 10 : 1);
    }
    std::vector<float> largest_q(kKeyDim);
    for (size_t i = 0; i < queries.size(); ++i) {
      float& own = largest_q[i % kKeyDim];
      own = std::max(own, static_cast<float>(std::abs(queries[i])));
    }
    const double plain = errors_of(one.plain, keys, queries).of_scores;
    const double balanced = errors_of(one.balanced, keys, queries, largest_q.data()).of_scores;
    std::printf("%s, %s query: scores %.3f, balanced %.3f\n", codec_of(one.plain).name,
                one.has_large_query ? "large" : "plain", plain, balanced);
    EXPECT_GE(plain / balanced, 2.5);
    EXPECT_NEAR(plain, one.expected_plain, one.expected_plain / 5);
    EXPECT_NEAR(balanced, one.expected_balanced, one.expected_balanced / 5);
  }
}

// Keys that have all moved alike have the weights that they had: the means take the shift.
TEST(LowBits, CentredKeysDoNotSeeAShift) {
  constexpr uint32_t kDim = 64;
  std::mt19937_64 random(8);
  std::normal_distribution<float> normal;
  std::vector<float> rows(size_t{kPageTokens} * kDim);
  for (float& x : rows) {
    // Multiples of 2^-8 below 4: sums with the shifts are exact.
    x = std::clamp(std::nearbyint(normal(random) * 256), -1000.0f, 1000.0f) / 256;
  }
  // Means of the rest that are bf16 exactly: opposite rows.
  for (uint32_t t = 0; t < kPageTokens; t += 2) {
    for (uint32_t i = 0; i < kDim; ++i) {
      rows[(t + 1) * kDim + i] = -rows[t * kDim + i];
    }
  }
  std::vector<float> moved = rows;
  for (size_t i = 0; i < moved.size(); ++i) {
    moved[i] += static_cast<float>(i % kDim) * 0.5f - 16;
  }
  for (const CodecId id : {kI4Centred, kI3Centred, kI2Centred}) {
    Head head;
    Head head_moved;
    ASSERT_TRUE(encode(codec_of(id), rows, kDim, &head));
    ASSERT_TRUE(encode(codec_of(id), moved, kDim, &head_moved));
    EXPECT_EQ(head.codes, head_moved.codes);
    const std::vector<float> read = decode(codec_of(id), head, kDim);
    const std::vector<float> read_moved = decode(codec_of(id), head_moved, kDim);
    for (size_t i = 0; i < read.size(); ++i) {
      ASSERT_NEAR(read_moved[i] - read[i], moved[i] - rows[i], 1e-5);
    }
  }
}

}  // namespace
}  // namespace kvm::codecs
