// SPDX-License-Identifier: Apache-2.0
// Every kernel table against the double-precision reference.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>
#include <string>

#include "codecs/codec.h"
#include "codecs/rows.h"
#include "tests/common/environment.h"
#include "tests/unit/attention/testbed.h"

namespace kvm::attention::testing {
namespace {

constexpr Dtype kDtypes[] = {Dtype::kF32, Dtype::kF16, Dtype::kBf16};
constexpr CodecId kCodecs[] = {
    CodecId::kF32,      CodecId::kF16,         CodecId::kBf16,      CodecId::kI8,
    CodecId::kF8,       codecs::kI8Channel,    codecs::kI4,         codecs::kI4Channel,
    codecs::kI4Centred, codecs::kI2Channel,    codecs::kI2Centred,  codecs::kI2,
    codecs::kGear4,     codecs::kGear2Channel, codecs::kI2Balanced, codecs::kI3,
    codecs::kI3Channel, codecs::kI3Centred,    codecs::kGear3,      codecs::kI3Balanced};

void check(Case& c, const std::string& what) {
  c.run_reference();
  for (const KernelTable* table : available_tables()) {
    c.run(table, 3, 2);
    const double bound = error_bound(c, *table);
    const std::string where = what + " on " + table->name;
    EXPECT_LE(c.error_o(), bound) << where;
    EXPECT_LE(c.error_lse(), bound) << where;
    for (size_t t = 0; t < c.present.size(); ++t) {
      if (c.present[t] != 0 && c.column_sums[t] != -1.0f) {
        EXPECT_NEAR(static_cast<double>(c.column_sums[t]), c.ref_column_sums[t],
                    (bound + 1e-5) * (c.ref_column_sums[t] + 1e-4))
            << where << ", token " << t;
      } else if (c.present[t] != 0) {
        EXPECT_EQ(c.ref_column_sums[t], 0.0) << where << ", token " << t << " not written";
      }
    }
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
}

// By day rows of few bits take one turn of three.
bool takes_turn(bool few_bits, uint64_t turn) {
  return !few_bits || turn % kvm::testing::by_day(3, 1) == 0;
}
bool takes_turn(CodecId codec, uint64_t turn) {
  return takes_turn(codecs::codec_of(codec).is_low_bits(), turn);
}

void set_kinds(Case& c, CodecId k, CodecId v) {
  for (TokenKind& kind : c.kinds) {
    kind = {k, v, 0};
  }
}

TEST(Exact, EmptyProblem) {
  Case c(Shape{.n_tokens = 0}, 1);
  c.store(0);
  check(c, "no tokens");
  EXPECT_EQ(c.lse[0], -std::numeric_limits<float>::infinity());
}

TEST(Exact, EmptyProblemWithSink) {
  Case c(Shape{.n_tokens = 0}, 1);
  c.use_sinks();
  c.store(0);
  check(c, "no tokens, sinks");
  EXPECT_EQ(c.lse[1], c.problem().sink_logits[1]);
}

TEST(Exact, Lengths) {
  for (uint64_t n : {1u, 15u, 16u, 17u, 63u, 64u, 65u, 1023u, 1024u, 1025u, 2500u}) {
    for (uint32_t group : {1u, 4u}) {
      Case c(Shape{.group = group, .n_tokens = n}, n);
      c.store(0);
      check(c, "length " + std::to_string(n) + " group " + std::to_string(group));
    }
  }
}

TEST(Exact, Groups) {
  std::vector<uint32_t> groups(16);
  std::iota(groups.begin(), groups.end(), 1);
  groups.insert(groups.end(), {23, 24, 48, 71, kMaxGroup});
  for (const uint32_t group : groups) {
    Case c(Shape{.group = group, .dim_k = 64, .dim_v = 64, .n_tokens = 200}, group);
    c.store(3);
    check(c, "group " + std::to_string(group));
  }
}

TEST(Exact, LargeDims) {
  uint64_t seed = 0;
  for (const uint32_t dim : {320u, 512u, 520u, 576u}) {
    for (const CodecId codec : kCodecs) {
      for (const Dtype q : {Dtype::kBf16, Dtype::kF32}) {
        for (const uint32_t n_query : {1u, 9u}) {
          Case c(Shape{.n_query = n_query,
                       .group = 3,
                       .dim_k = dim,
                       .dim_v = seed % 2 == 0 ? dim : 832 - dim,
                       .n_tokens = 90,
                       .dtype_q = q},
                 ++seed);
          if (!takes_turn(codec, seed)) {
            continue;
          }
          set_kinds(c, codec, codec);
          c.store(1);
          check(c, "dim " + std::to_string(dim) + " " + dtype_name(q) + " " +
                       codecs::codec_of(codec).name + " queries " + std::to_string(n_query));
          if (HasFailure()) {
            return;
          }
        }
      }
    }
  }
}

// The largest sums that words may give: all channels of a query and of int8 rows at their limits.
TEST(Exact, SumsOfWordsStayWithin32Bits) {
  for (const uint32_t dim : {512u, 520u, kMaxHeadDim}) {
    Case c(Shape{.group = 2, .dim_k = dim, .dim_v = 8, .n_tokens = 64, .flat = true}, dim);
    set_kinds(c, CodecId::kI8, CodecId::kF32);
    c.problem().scale = 1.0f / static_cast<float>(dim);
    c.store(0);
    check(c, "flat rows of dim " + std::to_string(dim));
    EXPECT_GT(c.ref_lse[0], 4.9) << "ln 64 and a logit near 1";
  }
}

// Multi-head latent attention: one key for many q heads, whose first channels are the value.
TEST(Exact, ValuesInKeys) {
  uint64_t seed = 0;
  for (const CodecId codec : kCodecs) {
    for (const uint32_t group : {1u, 16u, 128u}) {
      for (const uint32_t n_query : {1u, 3u}) {
        for (const int cuts : {0, 9}) {
          Shape shape{.n_query = n_query,
                      .group = group,
                      .dim_k = cuts == 0 ? 576u : 72u,
                      .dim_v = cuts == 0 ? 512u : 64u,
                      .n_tokens = 90,
                      .v_in_k = true};
          Case c(shape, ++seed);
          if (!takes_turn(codec, seed)) {
            continue;
          }
          set_kinds(c, codec, codec);
          c.store(cuts);
          check(c, std::string("V in K, ") + codecs::codec_of(codec).name + " group " +
                       std::to_string(group) + " queries " + std::to_string(n_query));
          if (HasFailure()) {
            return;
          }
        }
      }
    }
  }
}

// Where V lies changes no bit of what it says.
TEST(Exact, ValuesInKeysHaveTheBitsOfValuesApart) {
  for (const CodecId codec : {CodecId::kF32, CodecId::kF16, CodecId::kBf16, codecs::kI8Channel}) {
    for (const uint32_t dim_v : {40u, 64u, 128u, 512u}) {
      for (const uint32_t n_query : {1u, 5u, 12u}) {
        Case c(Shape{.n_query = n_query,
                     .dim_k = dim_v + 64,
                     .dim_v = dim_v,
                     .n_tokens = 200,
                     .v_in_k = true},
               dim_v);
        set_kinds(c, codec, codec);
        c.store(0);
        for (const KernelTable* table : available_tables()) {
          c.store_v_in_k(true);
          c.run(table);
          const std::vector<float> o = c.o;
          const std::vector<float> lse = c.lse;
          c.store_v_in_k(false);
          c.run(table);
          ASSERT_EQ(c.o, o) << table->name << ", " << codecs::codec_of(codec).name << ' ' << dim_v;
          ASSERT_EQ(c.lse, lse) << table->name << ", " << codecs::codec_of(codec).name;
        }
      }
    }
  }
}

TEST(Exact, BiasesByPosition) {
  uint64_t seed = 0;
  for (const uint32_t group : {1u, 4u, 12u, 71u}) {
    for (const uint32_t n_query : {1u, 2u, 7u}) {
      for (const uint64_t first : {uint64_t{0}, uint64_t{100'000}}) {
        Case c(Shape{.n_query = n_query,
                     .group = group,
                     .dim_k = 64,
                     .dim_v = 64,
                     .n_tokens = 700,
                     .first_position = first},
               ++seed);
        c.use_slopes();
        c.problem().visible.causal = seed % 3 != 0;
        c.problem().softcap = seed % 2 == 0 ? 20.0f : 0.0f;
        c.store(2);
        check(c, "slopes, group " + std::to_string(group) + " from " + std::to_string(first));
      }
    }
  }
}

TEST(Exact, DtypesAndDims) {
  uint64_t seed = 0;
  for (uint32_t dim : {8u, 64u, 80u, 96u, 128u, 192u, 256u}) {
    for (CodecId k : kCodecs) {
      for (CodecId v : kCodecs) {
        // Rows of few bits take the place of either side in turns.
        const bool has_codes =
            codecs::codec_of(k).is_low_bits() || codecs::codec_of(v).is_low_bits();
        const auto turn = 7 * static_cast<uint32_t>(k) + 3 * static_cast<uint32_t>(v) + dim / 64;
        if (has_codes && turn % 6 != 0) {
          continue;
        }
        for (Dtype q : kDtypes) {
          // Each combination with one of them, so that each pair of anything comes.
          const uint32_t n_query = seed / 2 % 2 == 0 ? 1 : 9;
          const uint32_t dim_v = seed % 2 == 0 ? dim : 264 - dim;
          Case c(Shape{.n_query = n_query,
                       .group = 3,
                       .dim_k = dim,
                       .dim_v = dim_v,
                       .n_tokens = 100,
                       .dtype_q = q},
                 ++seed);
          if (!takes_turn(has_codes, turn / 6 + static_cast<uint32_t>(q))) {
            continue;
          }
          set_kinds(c, k, v);
          c.store(1);
          check(c, "dim " + std::to_string(dim) + "/" + std::to_string(dim_v) + " " +
                       dtype_name(q) + " " + codecs::codec_of(k).name + " " +
                       codecs::codec_of(v).name + " queries " + std::to_string(n_query));
          if (HasFailure())
            return;
        }
      }
    }
  }
}

TEST(Exact, OutputDtypes) {
  for (Dtype o : kDtypes) {
    for (uint32_t n_query : {1u, 30u}) {
      Case c(Shape{.n_query = n_query, .n_tokens = 300, .dtype_o = o}, 5);
      c.store(0);
      check(c, std::string("o as ") + dtype_name(o));
    }
  }
}

TEST(Exact, Prefill) {
  for (uint32_t n_query : {7u, 64u, 100u, 333u}) {
    Case c(Shape{.n_query = n_query, .group = 4, .dim_k = 64, .dim_v = 64, .n_tokens = 700},
           n_query);
    c.store(0);
    check(c, "prefill " + std::to_string(n_query));
  }
}

TEST(Exact, LongContext) {
  for (uint32_t n_query : {1u, 8u}) {
    Case c(Shape{.n_query = n_query, .dim_k = 64, .dim_v = 64, .n_tokens = 33000}, n_query);
    c.store(5);
    check(c, "33000 tokens");
  }
}

TEST(Exact, HugeLogitsStayFinite) {
  for (uint32_t n_query : {1u, 12u}) {
    for (CodecId k : kCodecs) {
      Case c(Shape{.n_query = n_query, .n_tokens = 200, .dtype_q = Dtype::kF32, .q_size = 4e37f},
             3);
      set_kinds(c, k, CodecId::kF32);
      c.problem().scale = 1.0f;
      c.store(0);
      for (const KernelTable* table : available_tables()) {
        c.run(table);
        for (float x : c.o)
          ASSERT_TRUE(std::isfinite(x)) << table->name;
        for (float x : c.lse)
          ASSERT_TRUE(std::isfinite(x)) << table->name;
      }
    }
  }
}

// What storing costs: for Gaussian data and int8 0.67 % from K and as much from V, 0.94 % together;
// for fp8 four times that. The error of a few rows scatters by a fifteenth of it, hence many.
void check_error_of_gaussian_data(CodecId codec, double least, double most) {
  for (uint32_t n_query : {1u, 2u}) {  // either path
    std::vector<double> off(available_tables().size());
    double size = 0;
    for (uint64_t seed = 1; seed <= 12; ++seed) {
      const Shape shape{.n_query = n_query, .group = 16, .n_tokens = 2000};
      Case whole(shape, seed);
      set_kinds(whole, CodecId::kF32, CodecId::kF32);
      whole.store(0);
      whole.run_reference();
      Case stored(shape, seed);  // the same rows
      set_kinds(stored, codec, codec);
      stored.store(0);
      for (const double x : whole.ref_o)
        size += x * x;
      for (size_t t = 0; t < off.size(); ++t) {
        stored.run(available_tables()[t]);
        for (size_t i = 0; i < stored.o.size(); ++i)
          off[t] += std::pow(static_cast<double>(stored.o[i]) - whole.ref_o[i], 2);
      }
    }
    for (size_t t = 0; t < off.size(); ++t) {
      const double error = std::sqrt(off[t] / size);
      EXPECT_GT(error, least) << available_tables()[t]->name;
      EXPECT_LT(error, most) << available_tables()[t]->name;
    }
  }
}

TEST(Exact, ErrorOfInt8RowsOfGaussianData) {
  check_error_of_gaussian_data(CodecId::kI8, 0.003, 0.0099);
}

TEST(Exact, ErrorOfFp8RowsOfGaussianData) {
  check_error_of_gaussian_data(CodecId::kF8, 0.012, 0.0396);
}

// An int8 or fp8 row that was not finite has scale NaN, and who sees it is told so.
TEST(Exact, ValuesWithScaleNaNShow) {
  for (const uint32_t i : {0u, 1u, 2u, 3u}) {  // either path, either codec
    Case c(Shape{.n_query = i % 2 == 0 ? 1u : 12u, .n_tokens = 200}, 4);
    const CodecId codec = i < 2 ? CodecId::kI8 : CodecId::kF8;
    set_kinds(c, codec, codec);
    for (int cuts : {0, 50}) {
      c.store(cuts);
      const KvRun& run = c.problem().runs.front();  // every row sees its first token
      *const_cast<uint16_t*>(codecs::row_scale_at(run.v, c.shape().head, run.slot)) = 0x7fc0;
      for (const KernelTable* table : available_tables()) {
        c.run(table);
        for (float x : c.o)
          ASSERT_TRUE(std::isnan(x)) << table->name;
        for (float x : c.lse)
          ASSERT_TRUE(std::isfinite(x)) << table->name;
      }
    }
  }
}

// Largest over rows of |o - ref|, without channel 0, over the size of what was added there.
double error_beside_outliers(const Case& c) {
  const uint32_t dim = c.shape().dim_v;
  double worst = 0;
  for (size_t row = 0; row < c.ref_o.size() / dim; ++row) {
    double off = 0, size = 0;
    for (size_t i = row * dim + 1; i < (row + 1) * dim; ++i) {
      off += std::pow(static_cast<double>(c.o[i]) - c.ref_o[i], 2);
      size += c.ref_abs[i] * c.ref_abs[i];
    }
    const double error = std::sqrt(off / size);
    worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
  }
  return worst;
}

// Codes of 2^-9 to 7 * 2^-9 are numbers as others are, in every instruction that meets them.
TEST(Exact, SubnormalCodesBesideOutliers) {
  for (const uint32_t dim : {8u, 24u, 64u, 72u, 128u, 200u, 248u}) {
    for (const uint32_t i : {0u, 1u, 2u, 3u}) {  // either path, queries that are bf16 or not
      Case c(Shape{.n_query = i % 2 == 0 ? 1u : 12u,
                   .dim_k = dim,
                   .dim_v = dim,
                   .n_tokens = 150,
                   .dtype_q = i < 2 ? Dtype::kBf16 : Dtype::kF32,
                   .outliers = true},
             i);
      set_kinds(c, CodecId::kF8, CodecId::kF8);
      c.store(1);
      check(c, "outliers, dim " + std::to_string(dim));
      for (const KernelTable* table : available_tables()) {
        c.run(table, 3, 2);
        EXPECT_LE(error_beside_outliers(c), error_bound(c, *table)) << table->name << ", " << dim;
      }
    }
  }
}

TEST(Exact, RowsOfAllSizes) {
  for (const CodecId k : kCodecs) {
    for (const CodecId v : {CodecId::kF32, CodecId::kBf16, CodecId::kI8, CodecId::kF8}) {
      for (const uint32_t i : {0u, 1u, 2u, 3u, 4u, 5u}) {  // all groups of a few queries, or more
        if (!takes_turn(k, 2 * static_cast<uint32_t>(v) + i + static_cast<uint32_t>(k))) {
          continue;
        }
        const bool many = i % 2 == 1;
        Case c(Shape{.n_query = many ? 9u : 1u,
                     .group = 1 + i * 3,
                     .dim_k = 72,
                     .dim_v = 40,
                     .n_tokens = 300,
                     .dtype_q = i < 3 ? Dtype::kBf16 : Dtype::kF32,
                     .uneven = true},
               i);
        set_kinds(c, k, v);
        if (i % 3 == 1) {
          c.use_sinks();
          c.problem().softcap = 2.0f;
        }
        c.store(2);
        check(c, std::string("uneven ") + codecs::codec_of(k).name + " " +
                     codecs::codec_of(v).name + " group " + std::to_string(c.shape().group));
        if (HasFailure()) {
          return;
        }
      }
    }
  }
}

TEST(Exact, LargeLogits) {
  for (uint32_t n_query : {1u, 12u}) {
    Case c(Shape{.n_query = n_query, .n_tokens = 500, .q_size = 30.0f}, 3);
    set_kinds(c, CodecId::kF32, CodecId::kF32);
    c.store(0);
    c.run_reference();
    for (const KernelTable* table : available_tables()) {
      c.run(table);
      // Logits near 100 carry fp32 rounding of 1e-5; the weights inherit it.
      EXPECT_LE(c.error_o(), 1e-4) << table->name;
      EXPECT_LE(c.error_lse(), 1e-5) << table->name;
    }
  }
}

// Every cap that a space may have (engine/space/space.h), on logits of all sizes around it.
TEST(Exact, SoftCapsOfAnySize) {
  for (const float cap : {1e-3f, 0.1f, 5.0f, 50.0f, 1e3f, 1e4f}) {
    for (uint32_t n_query : {1u, 12u}) {
      for (const float size : {0.0f, 1e-4f, 1.0f, 30.0f}) {
        Case c(Shape{.n_query = n_query, .n_tokens = 200, .dtype_q = Dtype::kF32, .q_size = size},
               7);
        set_kinds(c, CodecId::kF32, CodecId::kF32);
        c.problem().softcap = cap;
        c.store(0);
        c.run_reference();
        const double bound = 1e-4 + 3 * 0x1p-24 * static_cast<double>(cap);
        for (const KernelTable* table : available_tables()) {
          SCOPED_TRACE(std::string(table->name) + ", cap " + std::to_string(cap) + ", queries of " +
                       std::to_string(size));
          c.run(table);
          EXPECT_LE(c.error_o(), 2 * bound);
          EXPECT_LE(c.error_lse(), bound);
        }
      }
    }
  }
}

// Random cases of each kind of test: more of them at night.
uint64_t n_seeds(uint64_t everyday) {
  return kvm::testing::number_from_environment("KVM_ATTENTION_SEEDS", everyday);
}

TEST(Exact, RandomProblems) {
  for (uint64_t seed = 1; seed <= n_seeds(40); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    auto c = random_case(seed);
    check(*c, "random");
    if (HasFailure())
      return;
  }
}

// Bits of the outputs of one row.
std::vector<uint32_t> row_bits(const Case& c, uint32_t row) {
  const uint32_t dim = c.problem().dim_v;
  std::vector<float> all(c.o.begin() + row * dim, c.o.begin() + (row + 1) * dim);
  all.push_back(c.lse[row]);
  std::vector<uint32_t> bits(all.size());
  std::memcpy(bits.data(), all.data(), all.size() * sizeof(float));
  return bits;
}

// Writes a number that is not finite into the token's row of K or V, or its scale; returns false
// where the token has none that counts.
bool spoil(Case& c, uint64_t token, bool key, uint32_t channel, float value) {
  const Problem& p = c.problem();
  key = key || p.v_in_k;
  for (const KvRun& run : p.runs) {
    const uint64_t at = c.shape().first_position + token - run.position;
    if (at >= run.n_tokens) {
      continue;
    }
    if (run.log_weight != nullptr && std::isinf(run.log_weight[at])) {
      return false;
    }
    return spoil_row(key ? run.k : run.v, key ? p.dim_k : p.dim_v, p.head, run.slot + at, channel,
                     value);
  }
  return false;
}

void expect_spoiled(const Case& c, uint32_t row, bool lse_too) {
  for (uint32_t d = 0; d < c.problem().dim_v; ++d) {
    ASSERT_TRUE(std::isnan(c.o[row * c.problem().dim_v + d])) << "row " << row;
  }
  ASSERT_EQ(std::isnan(c.lse[row]), lse_too) << "row " << row;
}

constexpr float kNotFinite[] = {std::numeric_limits<float>::quiet_NaN(),
                                std::numeric_limits<float>::infinity(),
                                -std::numeric_limits<float>::infinity()};

// Who sees a key or a value that is not finite is told so; no other row changes a bit.
TEST(Exact, NotFiniteTokensSpoilWhoSeesThem) {
  uint32_t n_spoiled = 0;
  uint32_t n_kept = 0;
  for (uint64_t seed = 2000; seed < 2000 + n_seeds(24); ++seed) {
    for (const bool key : {true, false}) {
      SCOPED_TRACE("seed " + std::to_string(seed) + (key ? ", K" : ", V"));
      for (const KernelTable* table : available_tables()) {
        auto c = random_case(seed);
        if (c->problem().runs.empty()) {
          continue;
        }
        c->run(table, 2, 2);
        std::vector<std::vector<uint32_t>> before;
        for (uint32_t row = 0; row < c->lse.size(); ++row) {
          before.push_back(row_bits(*c, row));
        }
        const uint64_t token = c->random()() % c->shape().n_tokens;
        const auto channel = static_cast<uint32_t>(c->random()() % kMaxHeadDim);
        if (!spoil(*c, token, key, channel, kNotFinite[seed % 3])) {
          continue;
        }
        c->run(table, 1, 3);
        for (uint32_t row = 0; row < c->lse.size(); ++row) {
          if (c->sees(row / c->problem().group, c->shape().first_position + token)) {
            ++n_spoiled;
            expect_spoiled(*c, row, key || c->shape().v_in_k);
          } else {
            ++n_kept;
            ASSERT_EQ(row_bits(*c, row), before[row]) << table->name << ", row " << row;
          }
          if (HasFatalFailure()) {
            FAIL() << table->name;
          }
        }
      }
    }
  }
  EXPECT_GT(n_spoiled, 25 * n_seeds(16));
  EXPECT_GT(n_kept, 1000u);
}

TEST(Exact, NotFiniteQueriesSpoilTheirRow) {
  for (uint64_t seed = 2200; seed < 2200 + n_seeds(30); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    for (const KernelTable* table : available_tables()) {
      auto c = random_case(seed);
      const auto rows = static_cast<uint32_t>(c->queries().size() / c->problem().dim_k);
      c->run(table);
      std::vector<std::vector<uint32_t>> before;
      for (uint32_t row = 0; row < rows; ++row) {
        before.push_back(row_bits(*c, row));
      }
      const uint64_t at = c->random()() % c->queries().size();
      c->queries()[at] = kNotFinite[seed % 3];
      c->run(table);
      for (uint32_t row = 0; row < rows; ++row) {
        if (row == at / c->problem().dim_k) {
          expect_spoiled(*c, row, true);
        } else {
          ASSERT_EQ(row_bits(*c, row), before[row]) << table->name << ", row " << row;
        }
      }
    }
  }
}

// The same bits however runs are cut, pages are placed, chunks are scheduled, rows are divided.
TEST(Exact, SameBitsForAnyCut) {
  for (uint64_t seed = 1000; seed < 1000 + n_seeds(16); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    auto c = random_case(seed);
    for (const KernelTable* table : available_tables()) {
      c->store(0);
      c->run(table);
      const auto bits = [&] {
        std::vector<float> all = c->o;
        all.insert(all.end(), c->lse.begin(), c->lse.end());
        all.insert(all.end(), c->column_sums.begin(), c->column_sums.end());
        std::vector<uint32_t> out(all.size());
        std::copy_n(reinterpret_cast<const std::byte*>(all.data()), all.size() * 4,
                    reinterpret_cast<std::byte*>(out.data()));
        return out;
      };
      const std::vector<uint32_t> expected = bits();
      for (int cuts : {1, 20, 400}) {
        c->store(cuts);
        c->run(table, 1 + cuts % 7, 1 + cuts % 3);
        ASSERT_EQ(bits(), expected) << table->name << ", " << cuts << " cuts";
      }
    }
  }
}

TEST(Exact, SameBitsForLongContextInAnyPieces) {
  for (uint32_t n_query : {1u, 40u}) {
    Case c(Shape{.n_query = n_query, .dim_k = 64, .dim_v = 64, .n_tokens = 20000}, 9);
    c.store(0);
    for (const KernelTable* table : available_tables()) {
      c.run(table);
      const std::vector<float> o = c.o;
      const std::vector<float> lse = c.lse;
      for (int pieces : {2, 5, 20}) {
        c.run(table, pieces, pieces);
        ASSERT_EQ(c.o, o) << table->name;
        ASSERT_EQ(c.lse, lse) << table->name;
      }
    }
  }
}

// Chunks between sinks and window are not evaluated, and that shows in no bit, in any pieces.
TEST(Exact, HiddenChunksChangeNoBit) {
  uint64_t n_gaps = 0;
  for (uint64_t seed = 1; seed <= n_seeds(20); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    Case c(Shape{.n_query = 1 + static_cast<uint32_t>(random() % (seed % 3 == 0 ? 40 : 5)),
                 .group = 1 + static_cast<uint32_t>(random() % 4),
                 .dim_k = 8,
                 .dim_v = 8,
                 .n_tokens = 2000 + random() % 40000},
           seed);
    Visibility& v = c.problem().visible;
    v.window = 1 + random() % 3000;
    v.sinks = random() % 2 == 0 ? random() % 100 : random() % 30000;
    if (random() % 2 == 0) {  // what nobody sees has been dropped, or part of it
      const uint64_t end = c.end_position() - std::min(c.end_position(), v.window + 50);
      for (uint64_t t = v.sinks + random() % 5000; t < end; ++t) {
        c.present[t] = 0;
      }
    }
    c.store(3);
    for (const KernelTable* table : available_tables()) {
      c.wants_column_sums = true;
      c.run(table, 3);
      ASSERT_EQ(c.plan.gap_chunks, 0u);
      const uint32_t n_dense = c.plan.n_chunks;
      const std::vector<float> o = c.o;
      const std::vector<float> lse = c.lse;
      c.wants_column_sums = false;
      for (const int pieces : {1, 4, 50}) {
        c.run(table, pieces);
        ASSERT_EQ(c.o, o) << table->name;
        ASSERT_EQ(c.lse, lse) << table->name;
      }
      ASSERT_EQ(c.plan.n_chunks + c.plan.gap_chunks, n_dense);
      n_gaps += c.plan.gap_chunks != 0 ? 1u : 0u;
    }
  }
  EXPECT_GT(n_gaps, n_seeds(20) / 2);
}

// Heads evaluated page by page have the bits that each of them has alone.
TEST(Exact, GangsGiveTheBitsOfTheirMembers) {
  uint64_t n_compared = 0;
  for (uint64_t seed = 2000; seed < 2000 + n_seeds(30); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    auto c = random_case(seed);
    c->store(static_cast<int>(seed % 30));
    for (const KernelTable* table : available_tables()) {
      c->run(table);  // sets the queries up
      const Problem& problem = c->problem();
      Problem other = problem;
      other.head = 0;
      const Problem* heads[] = {&problem, &other, &problem};
      const Plan plan = make_plan(problem, table);
      if (plan.blocked || plan.n_chunks == 0) {
        continue;
      }
      const Buffer prepared(plan.prepared_bytes);
      prepare_queries(problem, plan, prepared.data());
      const size_t bytes = plan.n_chunks * state_bytes(problem, plan.rows);
      const Buffer scratch(3 * plan.scratch_bytes);
      const Buffer alone(3 * bytes);
      const Buffer together(3 * bytes);
      std::fill_n(alone.data(), 3 * bytes, std::byte{0});
      std::fill_n(together.data(), 3 * bytes, std::byte{0});
      GangMember members[3];
      for (size_t h = 0; h < 3; ++h) {
        eval_chunks(*heads[h], plan, prepared.data(), {0, plan.rows}, plan.first_chunk,
                    plan.n_chunks, scratch.data(), alone.data() + h * bytes);
        members[h] = {heads[h], prepared.data(), together.data() + h * bytes};
      }
      eval_chunks(members, plan, plan.first_chunk, plan.n_chunks, scratch.data());
      ASSERT_EQ(std::memcmp(alone.data(), together.data(), 3 * bytes), 0) << table->name;
      ++n_compared;
    }
  }
  EXPECT_GT(n_compared, n_seeds(30) / 2);
}

}  // namespace
}  // namespace kvm::attention::testing
