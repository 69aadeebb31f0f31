// SPDX-License-Identifier: Apache-2.0
// GEAR against its definition in double precision, against the best low-rank parts, and against the
// errors that published settings have.
#include "codecs/gear.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/limits.h"
#include "codecs/low_bits.h"

namespace kvm::codecs {
namespace {

const CodecId kAll[] = {kGear4Channel, kGear4, kGear3Channel, kGear3, kGear2Channel, kGear2};
constexpr uint32_t kDims[] = {8, 64, 80, 128, 256, 576};

using Rows = std::vector<float>;

Codec gear(CodecId id, uint32_t rank, uint32_t outliers) {
  Codec codec = codec_of(id);
  codec.rank = static_cast<uint8_t>(rank);
  codec.outliers = static_cast<uint8_t>(outliers);
  return codec;
}

bool is_by_channel(const Codec& codec) {
  return codec.id == kGear4Channel || codec.id == kGear3Channel || codec.id == kGear2Channel;
}

std::string text_of(const Codec& codec, uint32_t dim) {
  return std::string(codec.name) + " of " + std::to_string(dim) + ", rank " +
         std::to_string(codec.rank) + ", outliers " + std::to_string(codec.outliers);
}

struct Head {
  std::vector<uint8_t> codes;
  std::vector<uint16_t> params;
};

// With room behind, which nobody writes.
bool encode(const Codec& codec, const Rows& rows, uint32_t dim, Head* out) {
  out->codes.assign(codec.head_rows_bytes(dim) + 1, uint8_t{0x99});
  out->params.assign(codec.n_scales(dim) + 1, uint16_t{0x4242});
  const bool is_encoded =
      encode_gear(codec, rows.data(), dim, out->codes.data(), out->params.data());
  EXPECT_EQ(out->codes.back(), 0x99);
  EXPECT_EQ(out->params.back(), 0x4242);
  return is_encoded;
}

Rows decode(const Codec& codec, const Head& head, uint32_t dim) {
  Rows rows(size_t{kPageTokens} * dim);
  decode_gear(codec, head.codes.data(), head.params.data(), dim, 0, kPageTokens, dim, rows.data());
  return rows;
}

// What the header says of a head, without the code's own layout. All are [64][dim].
struct Parts {
  std::vector<double> codes;
  std::vector<double> low_rank;
  std::vector<double> deltas;  // 0 where there is none
  std::vector<double> sizes;   // of all that is added up
  std::vector<bool> is_outlier;

  double at(size_t i) const { return codes[i] + low_rank[i] + deltas[i]; }
};

uint32_t bits_of(CodecId id) {
  return id == kGear2 || id == kGear2Channel ? 2 : id == kGear3 || id == kGear3Channel ? 3 : 4;
}

Parts parts_of(const Codec& codec, const Head& head, uint32_t dim) {
  const auto param = [&](uint64_t i) { return double{bf16_to_f32(head.params[i])}; };
  const bool by_channel = is_by_channel(codec);
  const uint32_t bits = bits_of(codec.id);
  const uint32_t n_groups = (dim + 63) / 64;
  const size_t n = size_t{64} * dim;
  const std::vector<double> zeros(n);
  Parts out{zeros, zeros, zeros, zeros, std::vector<bool>(n)};
  const uint64_t a = by_channel ? 2 * dim : 2 * 64 * n_groups;
  const uint64_t b = a + 64 * codec.rank;
  for (uint32_t t = 0; t < 64; ++t) {
    for (uint32_t i = 0; i < dim; ++i) {
      uint32_t code = 0;
      for (uint32_t bit = 0; bit < bits; ++bit) {
        const uint64_t at = (uint64_t{t} * dim + i) * bits + bit;
        code |= (uint32_t{head.codes[at / 8]} >> at % 8 & 1) << bit;
      }
      const uint64_t group = 2 * (uint64_t{t} * n_groups + i / 64);
      out.codes[t * dim + i] =
          by_channel ? code * param(i) + param(dim + i) : code * param(group) + param(group + 1);
      out.sizes[t * dim + i] = std::abs(out.codes[t * dim + i]);
      for (uint32_t k = 0; k < codec.rank; ++k) {
        const double product = param(a + t * codec.rank + k) * param(b + k * dim + i);
        out.low_rank[t * dim + i] += product;
        out.sizes[t * dim + i] += std::abs(product);
      }
    }
  }
  uint64_t pair = b + codec.rank * dim;
  const uint32_t n_vectors = by_channel ? dim : 64;
  for (uint32_t p = 0; p < codec.outliers; ++p, pair += (by_channel ? 3 : 4) * n_vectors) {
    for (uint32_t v = 0; v < n_vectors; ++v) {
      for (const uint32_t side : {0u, 1u}) {
        const uint32_t place = by_channel
                                   ? head.params[pair + 2 * n_vectors + v] >> (8 * side) & 255
                                   : head.params[pair + (2 + side) * n_vectors + v];
        EXPECT_LT(place, by_channel ? 64 : dim);
        const size_t at = by_channel ? size_t{place} * dim + v : size_t{v} * dim + place;
        EXPECT_FALSE(out.is_outlier[at]) << "twice";
        out.is_outlier[at] = true;
        out.deltas[at] = param(pair + side * n_vectors + v);
        out.sizes[at] += std::abs(out.deltas[at]);
      }
    }
  }
  return out;
}

// --- Data ----------------------------------------------------------------------------------------

Rows normal_rows(uint32_t dim, std::mt19937_64* random) {
  std::normal_distribution<float> normal;
  Rows rows(size_t{kPageTokens} * dim);
  for (float& x : rows) {
    x = normal(*random);
  }
  return rows;
}

// Channels of sizes that are far apart, and tokens, too; some are all alike.
Rows uneven_rows(uint32_t dim, std::mt19937_64* random) {
  Rows rows = normal_rows(dim, random);
  for (size_t i = 0; i < rows.size(); ++i) {
    const size_t channel = i % dim;
    const size_t token = i / dim;
    rows[i] = std::ldexp(rows[i], static_cast<int>(channel % 11 + token % 5) * 4 - 30) +
              (channel % 7 == 0 ? 30.0f : 0.0f);
    if (channel % 13 == 5 || token == 20) {
      rows[i] = channel % 2 == 0 ? 0.0f : -2.5f;
    }
  }
  return rows;
}

// All that the codes lose is of rank 1, and most of what they could.
Rows rows_between_steps(uint32_t dim) {
  Rows rows(size_t{kPageTokens} * dim);
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    for (uint32_t i = 0; i < dim; ++i) {
      const bool is_end = t < 2 || i % 64 < 2;
      rows[t * dim + i] = is_end ? ((t + i) % 2 == 0 ? 0.0f : 15.0f) : 7.45f;
    }
  }
  return rows;
}

// Two blocks: one token has the most energy, and many others have more together.
Rows rows_of_blocks(uint32_t dim, std::mt19937_64* random) {
  Rows rows = normal_rows(dim, random);
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    for (uint32_t i = 0; i < dim; ++i) {
      const bool is_first = i < dim / 2;
      float& x = rows[t * dim + i];
      x = (t == 5) != is_first ? 1e-4f * x : t == 5 ? 3 * x : rows[9 * dim + i] + 1e-3f * x;
    }
  }
  return rows;
}

// Single large elements, of either sign.
Rows rows_with_spikes(uint32_t dim, std::mt19937_64* random) {
  Rows rows = normal_rows(dim, random);
  for (size_t i = 0; i < rows.size(); i += 97) {
    rows[i] *= i % 2 == 0 ? 1e3f : -1e6f;
  }
  return rows;
}

constexpr uint32_t kTokens = 512;
constexpr uint32_t kDim = 128;

// A part of rank 8, and noise, some of it ten times as large.
Rows coherent_rows(std::mt19937_64* random) {
  std::normal_distribution<double> normal;
  std::vector<double> left(kTokens * 8);
  std::vector<double> right(8 * kDim);
  for (std::vector<double>* part : {&left, &right}) {
    for (double& x : *part) {
      x = normal(*random);
    }
  }
  Rows rows(size_t{kTokens} * kDim);
  std::uniform_real_distribution<double> uniform;
  for (uint32_t t = 0; t < kTokens; ++t) {
    for (uint32_t i = 0; i < kDim; ++i) {
      double x = (uniform(*random) < 0.001 ? 5 : 0.5) * normal(*random);
      for (uint32_t k = 0; k < 8; ++k) {
        x += left[t * 8 + k] * right[k * kDim + i] / (k + 1);
      }
      rows[t * kDim + i] = static_cast<float>(x);
    }
  }
  return rows;
}

// With means by channel, four of them large.
Rows keys_with_large_channels(std::mt19937_64* random) {
  std::normal_distribution<float> normal;
  std::array<float, kDim> offset;
  for (float& x : offset) {
    x = 0.5f * normal(*random);
  }
  constexpr float kLarge[] = {10, -9, 8, -12};
  for (uint32_t k = 0; k < 4; ++k) {
    offset[17 + 29 * k] = kLarge[k];
  }
  Rows keys = coherent_rows(random);
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] += offset[i % kDim];
  }
  return keys;
}

// With sizes by token.
Rows values_of_uneven_tokens(std::mt19937_64* random) {
  std::normal_distribution<float> normal;
  Rows values = coherent_rows(random);
  for (uint32_t t = 0; t < kTokens; ++t) {
    const float size = std::exp(0.5f * normal(*random));
    std::for_each_n(values.begin() + t * kDim, kDim, [&](float& x) { x *= size; });
  }
  return values;
}

Rows page_of(const Rows& rows, uint32_t page) {
  const auto begin = rows.begin() + page * kPageTokens * kDim;
  return {begin, begin + kPageTokens * kDim};
}

struct NamedRows {
  const char* name;
  Rows rows;
};

// Pages of kDim.
std::vector<NamedRows> pages(std::mt19937_64* random) {
  return {{"normal", normal_rows(kDim, random)},
          {"uneven", uneven_rows(kDim, random)},
          {"between steps", rows_between_steps(kDim)},
          {"blocks", rows_of_blocks(kDim, random)},
          {"spikes", rows_with_spikes(kDim, random)},
          {"keys", page_of(keys_with_large_channels(random), 3)},
          {"values", page_of(values_of_uneven_tokens(random), 4)}};
}

double norm(const std::vector<double>& x) {
  double sum = 0;
  for (const double each : x) {
    sum += each * each;
  }
  return std::sqrt(sum);
}

// --- The formula ---------------------------------------------------------------------------------

TEST(Gear, ReadsTheSumOfItsParts) {
  std::mt19937_64 random(3);
  for (const CodecId id : kAll) {
    for (const uint32_t dim : kDims) {
      for (const auto& [rank, outliers] : {std::array{2u, 1u}, std::array{16u, 4u}}) {
        if (rank > 2 && dim > 128) {
          continue;  // takes long
        }
        const Codec codec = gear(id, rank, outliers);
        SCOPED_TRACE(text_of(codec, dim));
        const Rows rows = uneven_rows(dim, &random);
        Head head;
        ASSERT_TRUE(encode(codec, rows, dim, &head));
        const Parts parts = parts_of(codec, head, dim);
        const Rows read = decode(codec, head, dim);
        for (size_t i = 0; i < rows.size(); ++i) {
          ASSERT_NEAR(read[i], parts.at(i), parts.sizes[i] * (rank + 2) * 0x1p-24);
        }
      }
    }
  }
}

TEST(Gear, OutliersAreTheLargestAndSmallestAndExact) {
  std::mt19937_64 random(4);
  for (const CodecId id : {kGear4Channel, kGear2}) {
    for (const uint32_t dim : kDims) {
      for (const uint32_t outliers : {1u, 4u}) {
        const Codec codec = gear(id, 1, outliers);
        SCOPED_TRACE(text_of(codec, dim));
        const Rows rows = normal_rows(dim, &random);
        Head head;
        ASSERT_TRUE(encode(codec, rows, dim, &head));
        const Parts parts = parts_of(codec, head, dim);
        const Rows read = decode(codec, head, dim);
        const bool by_channel = is_by_channel(codec);
        for (uint32_t v = 0; v < (by_channel ? dim : 64); ++v) {
          Rows all;
          Rows taken;
          for (uint32_t j = 0; j < (by_channel ? 64 : dim); ++j) {
            const size_t at = by_channel ? size_t{j} * dim + v : size_t{v} * dim + j;
            all.push_back(rows[at]);
            if (parts.is_outlier[at]) {
              taken.push_back(rows[at]);
              ASSERT_LE(std::abs(double{read[at]} - double{rows[at]}),
                        std::abs(parts.deltas[at]) * 0x1p-8 + std::abs(double{rows[at]}) * 0x1p-23);
            }
          }
          std::sort(all.begin(), all.end());
          std::sort(taken.begin(), taken.end());
          all.erase(all.begin() + outliers, all.end() - outliers);
          ASSERT_EQ(taken, all);
        }
      }
    }
  }
}

TEST(Gear, ASpikeDisturbsNoOther) {
  std::mt19937_64 random(5);
  for (const CodecId id : kAll) {
    const Rows rows = normal_rows(kDim, &random);
    Rows spiked = rows;
    const size_t spike = 33 * kDim + 70;
    spiked[spike] = 4000;
    // Root mean square of the errors of the others in its channel, or token.
    const auto error_of = [&](const Codec& codec, const Rows& from) {
      Head head;
      EXPECT_TRUE(encode(codec, from, kDim, &head));
      const Rows read = decode(codec, head, kDim);
      double sum = 0;
      for (size_t i = 0; i < read.size(); ++i) {
        const bool is_near = is_by_channel(codec) ? i % kDim == spike % kDim : i / 64 == spike / 64;
        sum += is_near && i != spike ? std::pow(double{read[i]} - double{from[i]}, 2) : 0.0;
      }
      return std::sqrt(sum / 63);
    };
    const double plain = error_of(gear(id, 0, 0), rows);
    EXPECT_LE(error_of(gear(id, 2, 1), spiked), 1.1 * plain) << codec_of(id).name;
    EXPECT_GE(error_of(gear(id, 0, 0), spiked), 4 * plain) << codec_of(id).name;
  }
}

// --- The low-rank part ---------------------------------------------------------------------------

// Squares of the singular values of rows [64][dim], from the largest on: by rotations of pairs of
// rows until all are orthogonal.
std::vector<double> squared_singular_values(std::vector<double> rows, uint32_t dim) {
  for (uint32_t sweep = 0; sweep < 12; ++sweep) {
    double off = 0;
    for (uint32_t p = 0; p < 64; ++p) {
      for (uint32_t q = p + 1; q < 64; ++q) {
        double pp = 0;
        double qq = 0;
        double pq = 0;
        double* x = &rows[size_t{p} * dim];
        double* y = &rows[size_t{q} * dim];
        for (uint32_t i = 0; i < dim; ++i) {
          pp += x[i] * x[i];
          qq += y[i] * y[i];
          pq += x[i] * y[i];
        }
        if (std::abs(pq) <= 1e-10 * std::sqrt(pp * qq)) {
          continue;
        }
        off = std::max(off, std::abs(pq) / std::sqrt(pp * qq));
        const double zeta = (qq - pp) / (2 * pq);
        const double tangent = (zeta < 0 ? -1 : 1) / (std::abs(zeta) + std::sqrt(1 + zeta * zeta));
        const double cosine = 1 / std::sqrt(1 + tangent * tangent);
        for (uint32_t i = 0; i < dim; ++i) {
          const double old = x[i];
          x[i] = cosine * (old - tangent * y[i]);
          y[i] = cosine * (tangent * old + y[i]);
        }
      }
    }
    if (off < 1e-4) {
      break;
    }
  }
  std::vector<double> out(64);
  for (size_t i = 0; i < rows.size(); ++i) {
    out[i / dim] += rows[i] * rows[i];
  }
  std::sort(out.rbegin(), out.rend());
  return out;
}

// What the low-rank part is asked for.
std::vector<double> rest_of(const Parts& parts, const Rows& rows) {
  std::vector<double> rest(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    rest[i] = parts.is_outlier[i] ? 0.0 : double{rows[i]} - parts.codes[i];
  }
  return rest;
}

TEST(Gear, LowRankPartIsNearTheBest) {
  std::mt19937_64 random(6);
  for (const NamedRows& one : pages(&random)) {
    for (const CodecId id : {kGear4Channel, kGear2}) {
      const Codec codec = gear(id, 4, 1);
      SCOPED_TRACE(std::string(one.name) + ": " + text_of(codec, kDim));
      Head head;
      ASSERT_TRUE(encode(codec, one.rows, kDim, &head));
      const Parts parts = parts_of(codec, head, kDim);
      std::vector<double> rest = rest_of(parts, one.rows);
      const std::vector<double> squares = squared_singular_values(rest, kDim);
      double all = 0;
      double best = 0;
      for (uint32_t k = 0; k < 64; ++k) {
        all += squares[k];
        best += k < 4 ? 0 : squares[k];
      }
      for (size_t i = 0; i < rest.size(); ++i) {
        rest[i] -= parts.low_rank[i];
      }
      const double error = norm(rest);
      std::printf("%-14s %-13s of what codes lose, left: %.4f, at best %.4f\n", one.name,
                  codec.name, error / std::sqrt(all), std::sqrt(best / all));
      // Factors of 8 bits lose a little of what is of low rank.
      EXPECT_LE(error, 1.01 * std::sqrt(best) + 0.004 * std::sqrt(all));
    }
  }
}

TEST(Gear, AnErrorFallsWithTheRank) {
  std::mt19937_64 random(7);
  for (const NamedRows& one : pages(&random)) {
    double size = 0;
    for (const float x : one.rows) {
      size += double{x} * double{x};
    }
    const double rounding = std::sqrt(size) * 0x1p-22;  // of fp32
    for (const auto& [id, outliers] : {std::pair{kGear4Channel, 0u}, std::pair{kGear2, 1u}}) {
      Head plain;
      std::vector<bool> is_outlier;
      double without = 0;
      double before = INFINITY;
      for (uint32_t rank = 0; rank <= 8; ++rank) {
        const Codec codec = gear(id, rank, outliers);
        SCOPED_TRACE(std::string(one.name) + ": " + text_of(codec, kDim));
        Head head;
        ASSERT_TRUE(encode(codec, one.rows, kDim, &head));
        const Rows read = decode(codec, head, kDim);
        if (rank == 0) {
          plain = head;
          is_outlier = parts_of(codec, head, kDim).is_outlier;
        }
        std::vector<double> errors(read.size());
        for (size_t i = 0; i < read.size(); ++i) {
          errors[i] = is_outlier[i] ? 0 : double{read[i]} - double{one.rows[i]};
        }
        const double error = norm(errors);
        without = rank == 0 ? error : without;
        EXPECT_EQ(head.codes, plain.codes);
        EXPECT_LE(error, without + rounding);
        // What A B is off by at outliers is not seen, and may make up for more elsewhere.
        EXPECT_LE(error, before * (outliers == 0 ? 1 : 1.001) + rounding);
        before = error;
      }
    }
  }
}

TEST(Gear, APartOfRankHasThoseOfLowerRankInIt) {
  std::mt19937_64 random(8);
  const Rows rows = normal_rows(80, &random);
  Head small;
  Head large;
  ASSERT_TRUE(encode(gear(kGear4, 3, 0), rows, 80, &small));
  ASSERT_TRUE(encode(gear(kGear4, 5, 0), rows, 80, &large));
  constexpr uint32_t kA = 64 * 2 * 2;
  for (uint32_t k = 0; k < 3; ++k) {
    for (uint32_t t = 0; t < 64; ++t) {
      ASSERT_EQ(small.params[kA + t * 3 + k], large.params[kA + t * 5 + k]);
    }
    for (uint32_t i = 0; i < 80; ++i) {
      ASSERT_EQ(small.params[kA + 64 * 3 + k * 80 + i], large.params[kA + 64 * 5 + k * 80 + i]);
    }
  }
}

// --- Readers -------------------------------------------------------------------------------------

TEST(Gear, ReadsSomeChannelsOfSomeTokens) {
  std::mt19937_64 random(9);
  for (const CodecId id : kAll) {
    for (const uint32_t dim : kDims) {
      const Codec codec = gear(id, 3, 2);
      SCOPED_TRACE(text_of(codec, dim));
      Head head;
      ASSERT_TRUE(encode(codec, uneven_rows(dim, &random), dim, &head));
      const Rows all = decode(codec, head, dim);
      for (const auto& [slot, n_tokens, n] :
           {std::array{0u, 64u, 8u}, std::array{63u, 1u, dim}, std::array{17u, 16u, dim / 16 * 8},
            std::array{1u, 62u, dim}, std::array{40u, 0u, dim}}) {
        Rows some(size_t{n_tokens} * n + 1, 7.0f);
        decode_gear(codec, head.codes.data() + slot * codec.row_bytes(dim), head.params.data(), dim,
                    slot, n_tokens, n, some.data());
        for (uint32_t t = 0; t < n_tokens; ++t) {
          for (uint32_t i = 0; i < n; ++i) {
            ASSERT_EQ(some[t * n + i], all[(slot + t) * dim + i]);
          }
        }
        EXPECT_EQ(some.back(), 7.0f);
      }
    }
  }
}

// As attention does that decodes nothing but codes.
TEST(Gear, ScoresAreSumsOfThoseOfTheParts) {
  std::mt19937_64 random(10);
  const Rows query = normal_rows(kDim, &random);
  for (const CodecId id : kAll) {
    const Codec codec = gear(id, 2, 1);
    Head head;
    ASSERT_TRUE(encode(codec, normal_rows(kDim, &random), kDim, &head));
    const uint16_t* params = head.params.data();
    const GearLayout layout(codec, kDim);
    Rows codes(size_t{kPageTokens} * kDim);
    decode_low_bits(codec, head.codes.data(), params, kDim, 0, kPageTokens, kDim, codes.data());
    std::array<double, kPageTokens> scores{};
    for (size_t i = 0; i < codes.size(); ++i) {
      scores[i / kDim] += double{query[i % kDim]} * double{codes[i]};
    }
    for (uint32_t k = 0; k < layout.rank; ++k) {
      double by_row = 0;
      for (uint32_t i = 0; i < kDim; ++i) {
        by_row += double{query[i]} * double{bf16_to_f32(params[layout.b + k * kDim + i])};
      }
      for (uint32_t t = 0; t < kPageTokens; ++t) {
        scores[t] += by_row * double{bf16_to_f32(params[layout.a + t * layout.rank + k])};
      }
    }
    for (uint32_t v = 0; v < layout.n_vectors; ++v) {
      for (const uint32_t side : {0u, 1u}) {
        const Outlier outlier = layout.outlier(params, 0, side, v);
        scores[outlier.slot] += double{query[outlier.channel]} * double{outlier.delta};
      }
    }
    const Rows read = decode(codec, head, kDim);
    for (uint32_t t = 0; t < kPageTokens; ++t) {
      double score = 0;
      for (uint32_t i = 0; i < kDim; ++i) {
        score += double{query[i]} * double{read[t * kDim + i]};
      }
      ASSERT_NEAR(scores[t], score, 1e-4) << codec.name;
    }
  }
}

// --- Edges ---------------------------------------------------------------------------------------

TEST(Gear, ANumberThatCannotBeHeldIsRefused) {
  constexpr uint32_t kFew = 16;
  std::mt19937_64 random(11);
  for (const CodecId id : kAll) {
    for (const float x : {std::numeric_limits<float>::quiet_NaN(), INFINITY, -INFINITY,
                          std::numeric_limits<float>::max(), -0x1.000002p126f}) {
      for (const size_t at : {size_t{0}, size_t{kFew * 63 + 15}, size_t{500}}) {
        Rows rows = uneven_rows(kFew, &random);
        rows[at] = x;
        Head head;
        EXPECT_FALSE(encode(codec_of(id), rows, kFew, &head)) << x;
      }
    }
  }
}

TEST(Gear, SizesFromEndToEndOfFloatsAreRead) {
  std::mt19937_64 random(12);
  for (const CodecId id : kAll) {
    for (const uint32_t outliers : {0u, 4u}) {
      for (const int exponent : {-147, -130, -126, -118, -100, -60, 0, 60, 100, 118, 123}) {
        const Codec codec = gear(id, 6, outliers);
        SCOPED_TRACE(text_of(codec, 72) + ", 2^" + std::to_string(exponent));
        Rows rows = normal_rows(72, &random);
        double size = 0;
        for (float& x : rows) {
          x = std::ldexp(std::clamp(x, -4.0f, 4.0f), exponent);
          size = std::max(size, std::abs(double{x}));
        }
        Head head;
        ASSERT_TRUE(encode(codec, rows, 72, &head));
        const Rows read = decode(codec, head, 72);
        for (size_t i = 0; i < rows.size(); ++i) {
          ASSERT_LE(std::abs(double{read[i]} - double{rows[i]}), size / 2 + 0x1p-125);
        }
        // Products of factors are exact in fp32.
        const GearLayout layout(codec, 72);
        for (uint32_t i = layout.a; i < layout.outliers; ++i) {
          const float x = std::abs(bf16_to_f32(head.params[i]));
          ASSERT_TRUE(x == 0 || (x >= 0x1p-60f && x <= 0x1p60f && std::abs(exponent) < 118));
        }
      }
    }
  }
}

TEST(Gear, PagesWithoutARestAreExact) {
  for (const CodecId id : kAll) {
    for (const float x : {0.0f, -0.0f, -2.5f, 0x1p-130f, 0x1p126f, 0x1p-149f}) {
      for (const uint32_t dim : {8u, 72u}) {
        const Codec codec = gear(id, 16, 4);
        SCOPED_TRACE(text_of(codec, dim));
        const Rows rows(size_t{kPageTokens} * dim, x);
        Head head;
        ASSERT_TRUE(encode(codec, rows, dim, &head));
        for (const float read : decode(codec, head, dim)) {
          ASSERT_NEAR(read, x, 0x1p-133);  // of subnormal bf16
        }
      }
    }
  }
}

// A rest of rank 8 leaves nothing to rank 16 but what factors of 8 bits lose, which it finds.
TEST(Gear, ARankAboveThatOfTheRestDoesNoHarm) {
  std::mt19937_64 random(13);
  const Rows rows = normal_rows(8, &random);
  for (const CodecId id : kAll) {
    Head head;
    ASSERT_TRUE(encode(gear(id, 16, 0), rows, 8, &head));
    const Rows read = decode(gear(id, 16, 0), head, 8);
    for (size_t i = 0; i < rows.size(); ++i) {
      ASSERT_NEAR(read[i], rows[i], 0.01);
    }
  }
}

// DISK: bytes of pages that exist. Of integers, so that rows are the same everywhere.
TEST(Gear, BytesAreTheSameOnEveryProcessor) {
  uint64_t hash = 0xcbf29ce484222325u;
  const auto add = [&](uint64_t x) { hash = (hash ^ x) * 0x100000001b3u; };
  std::mt19937_64 random(14);
  const auto add_pages = [&](std::initializer_list<CodecId> ids) {
    for (const CodecId id : ids) {
      Rows rows(size_t{kPageTokens} * kDim);
      for (float& x : rows) {
        x = static_cast<float>(static_cast<int32_t>(random() >> 40) - (1 << 23)) * 0x1p-20f;
      }
      Head head;
      ASSERT_TRUE(encode(gear(id, 4, 1), rows, kDim, &head));
      std::for_each(head.codes.begin(), head.codes.end(), add);
      std::for_each(head.params.begin(), head.params.end(), add);
      for (const float x : decode(gear(id, 4, 1), head, kDim)) {
        add(std::bit_cast<uint32_t>(x));
      }
    }
  };
  add_pages({kGear4Channel, kGear4, kGear2Channel, kGear2});
  EXPECT_EQ(hash, 11430009029593662863u);
  add_pages({kGear3Channel, kGear3});
  EXPECT_EQ(hash, 18167565551195782420u);
}

// --- Errors and bits -----------------------------------------------------------------------------

double bits_of(const Codec& codec, uint32_t dim) {
  return 8.0 * static_cast<double>(codec.head_rows_bytes(dim) + codec.head_params_bytes(dim)) /
         (64.0 * dim);
}

TEST(Gear, BitsAreThoseOfTheFormula) {
  for (const CodecId id : kAll) {
    for (const uint32_t dim : kDims) {
      for (uint32_t rank = 0; rank <= 4; ++rank) {
        for (uint32_t outliers = 0; outliers <= 2; ++outliers) {
          const Codec codec = gear(id, rank, outliers);
          const bool by_channel = is_by_channel(codec);
          const double bits = bits_of(id);
          // Of a token, the last channels have steps of their own.
          const double group = by_channel ? 64 : dim / std::ceil(dim / 64.0);
          const double share = 2.0 * outliers / (by_channel ? 64 : dim);
          const double index_bits = by_channel ? 8 : 16;
          EXPECT_NEAR(bits_of(codec, dim),
                      bits + 32 / group + 16.0 * rank * (64 + dim) / (64.0 * dim) +
                          share * (16 + index_bits),
                      1e-9)
              << text_of(codec, dim);
        }
      }
    }
  }
}

// Relative to the energy without the means of channels.
double error_of(const Codec& codec, const Rows& rows) {
  double sum = 0;
  for (uint32_t page = 0; page < kTokens / kPageTokens; ++page) {
    const Rows own = page_of(rows, page);
    Head head;
    EXPECT_TRUE(encode(codec, own, kDim, &head));
    const Rows read = decode(codec, head, kDim);
    for (size_t i = 0; i < read.size(); ++i) {
      sum += std::pow(double{read[i]} - double{own[i]}, 2);
    }
  }
  double all = 0;
  for (uint32_t i = 0; i < kDim; ++i) {
    double mean = 0;
    for (uint32_t t = 0; t < kTokens; ++t) {
      mean += double{rows[t * kDim + i]} / kTokens;
    }
    for (uint32_t t = 0; t < kTokens; ++t) {
      all += std::pow(double{rows[t * kDim + i]} - mean, 2);
    }
  }
  return std::sqrt(sum / all);
}

// GEAR's finding: either part helps, and both do more. At a price in bits, which is printed, too.
TEST(Gear, EitherPartHelpsAndBothDoMore) {
  std::mt19937_64 random(15);
  struct Case {
    const char* what;
    const Rows rows;
    std::array<CodecId, 3> ids;  // of 4, 3 and 2 bits
    // With groups of 64, without either part, and of GEAR's 2 % and rank 4 for all tokens, where
    // they were measured, in double precision; 0: not.
    std::array<double, 3> expected_plain, expected_gear;
  };
  const Case cases[] = {
      {"keys",
       keys_with_large_channels(&random),
       {kGear4Channel, kGear3Channel, kGear2Channel},
       {0.091, 0.195, 0.454},
       {0.070, 0, 0.351}},
      {"values", values_of_uneven_tokens(&random), {kGear4, kGear3, kGear2}, {}, {}}};
  const CodecId by_tokens[] = {kGear4, kGear3, kGear2};
  for (const Case& one : cases) {
    for (const uint32_t k : {0u, 1u, 2u}) {
      const CodecId id = one.ids[k];
      std::array<std::array<double, 2>, 5> errors;
      for (const uint32_t rank : {0u, 2u, 4u}) {
        for (const uint32_t outliers : {0u, 1u}) {
          const Codec codec = gear(id, rank, outliers);
          errors[rank][outliers] = error_of(codec, one.rows);
          std::printf("%s, %s: rank %u, outliers %u: %.4f in %.2f bits\n", one.what, codec.name,
                      rank, outliers, errors[rank][outliers], bits_of(codec, kDim));
        }
      }
      for (const uint32_t outliers : {0u, 1u}) {
        EXPECT_LT(errors[2][outliers], 0.97 * errors[0][outliers]);
        EXPECT_LT(errors[4][outliers], 0.97 * errors[2][outliers]);
      }
      EXPECT_LT(errors[2][1], 0.9 * errors[2][0]);
      if (one.expected_gear[k] != 0) {
        EXPECT_NEAR(errors[2][1], one.expected_gear[k], one.expected_gear[k] / 10);
      }
      if (one.expected_plain[k] != 0) {
        EXPECT_NEAR(errors[0][0], one.expected_plain[k], one.expected_plain[k] / 10);
        EXPECT_GT(error_of(gear(by_tokens[k], 0, 0), one.rows), 2.5 * errors[0][0]);
      }
    }
  }
}

}  // namespace
}  // namespace kvm::codecs
