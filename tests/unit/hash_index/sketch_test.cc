// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "codecs/codec.h"
#include "hash_index/sketch/eigen.h"
#include "hash_index/sketch/scan_args.h"
#include "tests/unit/hash_index/sketch_golden.inc"
#include "tests/unit/hash_index/sketch_testbed.h"

namespace kvm::hash_index {
namespace {

constexpr SketchKind kKinds[] = {SketchKind::kBits1, SketchKind::kLead8Bits1, SketchKind::kBits2};

// |v| as blocks have it: at least half of (the mean of the roots of |v|)^2.
std::vector<double> raised_norms(const Rows& values) {
  std::vector<double> norms;
  for (const std::vector<double>& v : values) {
    norms.push_back(std::sqrt(dot(v, v)));
  }
  for (size_t at = 0; at < norms.size(); at += kBlockKeys) {
    double mean = 0;
    for (size_t i = at; i < at + kBlockKeys; ++i) {
      mean += std::sqrt(norms[i]) / kBlockKeys;
    }
    for (size_t i = at; i < at + kBlockKeys; ++i) {
      norms[i] = std::max(norms[i], mean * mean / 2);
    }
  }
  return norms;
}

// Estimated logits of all keys: [row][key]; `norms` gets |v|.
struct Estimates {
  std::vector<std::vector<float>> logits;
  std::vector<float> norms;
};

Estimates estimate(const Frame& frame, const std::byte* blocks, uint32_t n_blocks,
                   const ScanRows& rows, const ScanTable* table) {
  const uint32_t n_rows = rows.n;
  Aligned query = aligned_bytes(scan_query_bytes(frame, n_rows, table));
  prepare_scan(frame, rows, query.get(), nullptr, table);
  const SketchSpan span{&frame, query.get(), blocks, n_blocks, 0};
  Estimates out;
  out.logits.resize(n_rows);
  for (uint32_t b = 0; b < n_blocks; ++b) {
    std::vector<float> logits(size_t{n_rows} * kBlockKeys);
    float norms[kBlockKeys];
    scan_logits(span, n_rows, b, logits.data(), norms, table);
    out.norms.insert(out.norms.end(), norms, norms + kBlockKeys);
    for (uint32_t r = 0; r < n_rows; ++r) {
      const auto first = logits.begin() + r * kBlockKeys;
      out.logits[r].insert(out.logits[r].end(), first, first + kBlockKeys);
    }
  }
  return out;
}

Estimates estimate(const Frame& frame, const std::byte* blocks, uint32_t n_blocks,
                   const std::vector<float>& q, uint32_t n_rows, float scale,
                   const ScanTable* table) {
  return estimate(frame, blocks, n_blocks, {.q = q.data(), .n = n_rows, .scale = scale}, table);
}

TEST(Random, KnownValues) {
  // models/house/tests/estimators_test.py pins the same ones.
  struct Known {
    uint64_t seed;
    uint64_t first;
    uint32_t values[4];
  };
  constexpr Known kKnown[] = {
      {0u, 0u, {8601915, 134215, 5833036, 10975883}},
      {1u, 0u, {1921361, 5117469, 10289115, 11869297}},
      {7u, 123456u, {14499800, 961951, 814972, 2583010}},
      {18446744073709551615u, 4294967294u, {9839450, 14443986, 5428208, 2581592}},
      {12345678901234567u, 42949672977u, {10310482, 11738624, 1269694, 8226507}},
  };
  for (const Known& known : kKnown) {
    for (uint32_t i = 0; i < 4; ++i) {
      EXPECT_EQ(permanent_random(known.seed, known.first + i) * 0x1p24f,
                static_cast<float>(known.values[i]));
    }
  }
}

TEST(Random, UniformAndIndependentOfNeighbours) {
  constexpr size_t kCount = 1 << 16;
  const double root = std::sqrt(static_cast<double>(kCount));
  for (uint64_t seed = 100; seed < 108; ++seed) {
    std::vector<double> u(kCount);
    std::vector<double> next(kCount);
    std::vector<double> bins(256, 0.0);
    std::vector<double> pairs(256, 0.0);
    for (size_t i = 0; i < kCount; ++i) {
      u[i] = double{permanent_random(seed, i)} - 0.5;
      next[i] = double{permanent_random(seed + 1, i)} - 0.5;
      ASSERT_TRUE(u[i] >= -0.5 && u[i] < 0.5);
      ++bins[static_cast<size_t>((u[i] + 0.5) * 256)];
      if (i % 2 == 1) {
        ++pairs[static_cast<size_t>((u[i] + 0.5) * 16) * 16 +
                static_cast<size_t>((u[i - 1] + 0.5) * 16)];
      }
    }
    // chi^2 with 255 degrees of freedom, in standard deviations.
    const auto z = [](const std::vector<double>& counts, double wanted) {
      double sum = 0;
      for (const double count : counts) {
        sum += (count - wanted) * (count - wanted) / wanted;
      }
      return (sum - 255) / std::sqrt(2 * 255.0);
    };
    EXPECT_LT(std::abs(z(bins, kCount / 256.0)), 4.5) << seed;
    EXPECT_LT(std::abs(z(pairs, kCount / 512.0)), 4.5) << seed;
    EXPECT_LT(std::abs(12 * dot(u, next)) / root, 4.5) << seed;
    for (const size_t lag : {1u, 2u, 3u, 16u, 63u, 64u, 4096u, 12288u}) {
      const double product =
          std::inner_product(u.begin() + static_cast<std::ptrdiff_t>(lag), u.end(), u.begin(), 0.0);
      EXPECT_LT(std::abs(12 * product) / root, 4.5) << "seed " << seed << " lag " << lag;
    }
  }
}

TEST(Eigen, ReconstructsAndOrders) {
  std::mt19937_64 random(1);
  for (const uint32_t n : {1u, 2u, 3u, 8u, 33u, 80u}) {
    for (const double rank : {1.0, 0.5, 0.0}) {
      // A Gram matrix of rank * n vectors: repeated zeros among the eigenvalues.
      const auto count = static_cast<size_t>(rank * n);
      const Rows rows = normal_rows(&random, count, n, 1, 0.9);
      std::vector<double> matrix(size_t{n} * n, 0.0);
      for (const auto& row : rows) {
        for (size_t i = 0; i < n * size_t{n}; ++i) {
          matrix[i] += row[i / n] * row[i % n];
        }
      }
      const Eigen eigen = symmetric_eigen(matrix, n, *active_scan_table().frame);
      double worst = 0;
      for (uint32_t i = 0; i < n; ++i) {
        EXPECT_TRUE(i == 0 || eigen.values[i] <= eigen.values[i - 1]);
        for (uint32_t j = 0; j < n; ++j) {
          double sum = 0;
          double product = 0;
          for (uint32_t k = 0; k < n; ++k) {
            sum += eigen.values[k] * eigen.vectors[k * n + i] * eigen.vectors[k * n + j];
            product += eigen.vectors[i * n + k] * eigen.vectors[j * n + k];
          }
          worst = std::max(worst, std::abs(sum - matrix[i * n + j]));
          worst = std::max(worst, std::abs(product - (i == j ? 1 : 0)));
        }
      }
      EXPECT_LT(worst, 1e-11 * (1 + std::abs(eigen.values[0]))) << n << " rank " << count;
      for (const ScanTable* table : available_scan_tables()) {
        const Eigen other = symmetric_eigen(matrix, n, *table->frame);
        EXPECT_EQ(other.values, eigen.values) << table->name;
        EXPECT_EQ(other.vectors, eigen.vectors) << table->name;
      }
    }
  }
}

TEST(Tables, AreOrderedAndNamed) {
  const auto tables = available_scan_tables();
  ASSERT_FALSE(tables.empty());
  EXPECT_STREQ(tables[0]->name, "scalar");
  for (const ScanTable* table : tables) {
    EXPECT_EQ(find_scan_table(table->name), table);
  }
  EXPECT_EQ(find_scan_table("sse9"), nullptr);
  const char* forced = std::getenv("KVM_FORCE_ISA");
  const ScanTable* wanted = forced != nullptr ? find_scan_table(forced) : nullptr;
  EXPECT_EQ(&active_scan_table(), wanted != nullptr ? wanted : tables.back());
}

TEST(Layout, BytesOfAKey) {
  const uint32_t wanted[][4] = {
      {128, 20, 28, 36}, {64, 12, 20, 20}, {8, 5, 13, 6}, {80, 20, 28, 36}, {256, 36, 44, 68}};
  for (const auto& row : wanted) {
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(block_bytes(kKinds[i], row[0]), row[i + 1] * kBlockKeys);
      EXPECT_EQ(block_bytes(kKinds[i], row[0]) % 64, 0u);
    }
  }
}

// The Python reference and this agree bit for bit, where nobody fits a basis.
TEST(Encode, GoldenCodesOfThePythonReference) {
  Rows keys(64, std::vector<double>(16));
  Rows values = keys;
  std::vector<float> q(3 * 16);
  for (size_t i = 0; i < 64 * 16; ++i) {
    keys[i / 16][i % 16] = kKeys[i] / 8.0;
    values[i / 16][i % 16] = kValues[i] / 16.0;
  }
  for (size_t i = 0; i < q.size(); ++i) {
    q[i] = static_cast<float>(kQueries[i]) / 16.0f;
  }
  const Pages pages(keys, values, CodecId::kBf16);
  for (const ScanTable* table : available_scan_tables()) {
    for (const SketchKind kind : {SketchKind::kBits1, SketchKind::kBits2}) {
      SCOPED_TRACE(std::string(table->name) + " kind " + std::to_string(static_cast<int>(kind)));
      const bool two = kind == SketchKind::kBits2;
      const FramePtr frame = pages.frame(&kind, 11);
      const Aligned blocks = pages.encode(*frame, table);
      const uint32_t offset = block_shape(kind, 16).factor_offset;
      std::vector<bool> other(64);
      for (uint32_t i = 0; i < 64; ++i) {
        const std::vector<int> y = stored_codeword(blocks.get(), *frame, i);
        const int8_t* wanted = (two ? kCodes2 : kCodes1) + i * 16;
        uint16_t halves[2];
        std::memcpy(halves, blocks.get() + offset + 4 * i, 4);
        EXPECT_EQ(halves[0], kNorms[i]);
        if (two && y != std::vector<int>(wanted, wanted + 16)) {
          other[i] = true;  // another codeword that is almost as good
          continue;
        }
        EXPECT_EQ(y, std::vector<int>(wanted, wanted + 16)) << i;
        // fp32 on the way to bf16 may tip a tie.
        EXPECT_NEAR(halves[1], (two ? kFactors2 : kFactors1)[i], 1);
      }
      EXPECT_LE(std::count(other.begin(), other.end(), true), 8);
      const Estimates got = estimate(*frame, blocks.get(), 1, q, 3, 1.0f, table);
      for (uint32_t i = 0; i < 3 * 64; ++i) {
        const float wanted = (two ? kScores2 : kScores1)[i];
        if (!other[i % 64]) {
          EXPECT_NEAR(got.logits[i / 64][i % 64], wanted, 0.02 * std::abs(wanted) + 0.4);
        }
      }
    }
  }
}

struct Shape {
  uint32_t dim;
  SketchKind kind;
  bool balanced;
  CodecId codec;
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  const CodecId codecs[] = {CodecId::kF32, CodecId::kF16, CodecId::kBf16, CodecId::kI8,
                            CodecId::kF8};
  size_t n = 0;
  for (const uint32_t dim : {8u, 16u, 40u, 64u, 80u, 96u, 112u, 128u, 256u}) {
    for (const SketchKind kind : kKinds) {
      for (const bool balanced : {false, true}) {
        if (!balanced || kind == SketchKind::kLead8Bits1) {
          all.push_back({dim, kind, balanced, codecs[n++ % std::size(codecs)]});
        }
      }
    }
  }
  return all;
}

std::string name_of(const Shape& shape) {
  return std::string(codecs::codec_of(shape.codec).name) + " dim " + std::to_string(shape.dim) +
         " kind " + std::to_string(static_cast<int>(shape.kind)) +
         (shape.balanced ? " balanced" : "");
}

// Every table codes and estimates as the fp64 version does; rows and shapes of all kinds.
TEST(Encode, AgreesWithTheOracle) {
  std::mt19937_64 random(7);
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    const Pages pages(normal_rows(&random, 128, shape.dim, 2, 0.97, 1),
                      normal_rows(&random, 128, 24), shape.codec, 3, 1);
    const std::vector<float> seen = floats(normal_rows(&random, 100, shape.dim, 1, 0.99));
    const FramePtr frame =
        pages.frame(&shape.kind, 5, shape.balanced ? seen : std::vector<float>{});
    ASSERT_EQ(frame->basis->key_matrix.empty(), !shape.balanced);
    const uint32_t n_rows = 5;
    const Rows queries = normal_rows(&random, n_rows, shape.dim);
    std::vector<OracleKey> codes;
    for (const auto& key : pages.keys) {
      codes.push_back(oracle_encode(*frame, key));
    }
    std::vector<OracleQuery> turned;
    for (const auto& query : queries) {
      turned.emplace_back(*frame, query);
    }
    const double scale = 1 / std::sqrt(static_cast<double>(shape.dim));
    for (const ScanTable* table : available_scan_tables()) {
      SCOPED_TRACE(table->name);
      const Aligned blocks = pages.encode(*frame, table);
      const size_t bytes = block_bytes(shape.kind, shape.dim);
      size_t wrong = 0;
      double lost = 0;
      Rows wanted(n_rows);
      for (uint32_t i = 0; i < 128; ++i) {
        const std::vector<int> y = stored_codeword(blocks.get() + i / 64 * bytes, *frame, i % 64);
        OracleKey code = codes[i];
        std::vector<double> stored(y.size());
        for (size_t j = 0; j < y.size(); ++j) {
          wrong += (code.codeword[j] > 0) == (y[j] > 0) ? 0u : 1u;
          stored[j] = 0.5 * y[j];
        }
        // With two bits the codeword need not be the best, only hardly worse.
        lost += 1 - cosine(stored, code.rest) / cosine(code.codeword, code.rest);
        code.set_codeword(stored);
        for (uint32_t r = 0; r < n_rows; ++r) {
          wanted[r].push_back(scale * turned[r].estimate(code));
        }
      }
      // A coordinate next to a boundary may fall on its other side in fp32. In dim 8 the lead is
      // everything: what is rotated is rounding noise.
      if (shape.dim != 8 || shape.kind != SketchKind::kLead8Bits1) {
        EXPECT_LE(wrong, 128 * frame->basis->dim_pad / 500);
        EXPECT_LT(lost / 128, 3e-4);
      }
      const Estimates got = estimate(*frame, blocks.get(), 2, floats(queries), n_rows,
                                     static_cast<float>(scale), table);
      double error = 0;
      double noise = 0;
      for (uint32_t r = 0; r < n_rows; ++r) {
        for (size_t i = 0; i < 128; ++i) {
          const double truth = scale * dot(pages.keys[i], queries[r]);
          error += std::pow(double{got.logits[r][i]} - wanted[r][i], 2);
          noise += std::pow(wanted[r][i] - truth, 2);
        }
      }
      // Rounding the query adds little to the noise that the code has by itself.
      const double allowed = 0.015;
      EXPECT_LT(error, allowed * noise + 1e-9) << "share " << error / noise;
      const std::vector<double> norms = raised_norms(pages.values);
      for (size_t i = 0; i < 128; ++i) {
        EXPECT_NEAR(double{got.norms[i]}, norms[i], 0.004 * norms[i]);
      }
    }
  }
}

// A key whose value vanishes belongs to the denominator: it must have a chance to be drawn.
TEST(Encode, SmallValuesCountAsHalfOfTheBlocksTypicalOne) {
  std::mt19937_64 random(6);
  for (const CodecId codec : {CodecId::kF32, CodecId::kBf16}) {
    Rows values = normal_rows(&random, 192, 24);
    for (const size_t i : {0, 17, 63}) {
      values[i].assign(24, 0.0);
    }
    for (size_t i = 64; i < 128; ++i) {
      for (double& x : values[i]) {
        x *= i < 100 ? 1e-3 : i == 100 ? 1e3 : 1;
      }
    }
    for (size_t i = 128; i < 192; ++i) {
      values[i].assign(24, 0.0);
    }
    const Pages pages(normal_rows(&random, 192, 16), values, codec);
    const SketchKind kind = SketchKind::kBits2;
    const FramePtr frame = pages.frame(&kind, 1);
    const std::vector<double> wanted = raised_norms(pages.values);
    for (const ScanTable* table : available_scan_tables()) {
      const Aligned blocks = pages.encode(*frame, table);
      const Estimates got = estimate(*frame, blocks.get(), 3, std::vector<float>(16), 1, 1, table);
      for (size_t i = 0; i < 192; ++i) {
        EXPECT_NEAR(double{got.norms[i]}, wanted[i], 0.004 * wanted[i]) << i;
      }
      EXPECT_NEAR(got.norms[17], 0.5 * std::sqrt(24.0) * std::pow(61 / 64.0, 2), 0.2);
      EXPECT_EQ(got.norms[130], 0);  // nothing to compare with
    }
  }
}

// Unbiased over rotations, with the noise that the theory gives: sd = |q| |x| tau / sqrt(d - 1),
// tau = .755 with one bit, .36 with two.
TEST(Estimates, AreUnbiasedOverRotationsWithTheNoiseOfTheory) {
  constexpr uint32_t kDim = 64;
  constexpr int kRotations = 300;
  std::mt19937_64 random(9);
  const Pages pages(normal_rows(&random, 64, kDim, 1, 0.99, 2), normal_rows(&random, 64, 8),
                    CodecId::kF32);
  const Rows queries = normal_rows(&random, 1, kDim);
  const std::vector<float> seen = floats(normal_rows(&random, 200, kDim, 1, 0.98));
  for (const SketchKind kind : kKinds) {
    for (const bool balanced : {false, true}) {
      if (balanced && kind != SketchKind::kLead8Bits1) {
        continue;
      }
      std::vector<double> sum(64, 0.0);
      std::vector<double> square(64, 0.0);
      std::vector<double> theory(64, 0.0);
      for (int turn = 0; turn < kRotations; ++turn) {
        const FramePtr frame =
            pages.frame(&kind, static_cast<uint64_t>(turn), balanced ? seen : std::vector<float>{});
        const Aligned blocks = pages.encode(*frame, nullptr);
        const Estimates got = estimate(*frame, blocks.get(), 1, floats(queries), 1, 1.0f, nullptr);
        for (size_t i = 0; i < 64; ++i) {
          const double error = double{got.logits[0][i]} - dot(pages.keys[i], queries[0]);
          sum[i] += error;
          square[i] += error * error;
        }
        if (turn == 0) {
          std::vector<double> lead;
          std::vector<double> rest;
          oracle_turn(*frame->basis, queries[0], true, &lead, &rest);
          for (size_t i = 0; i < 64; ++i) {
            const OracleKey code = oracle_encode(*frame, pages.keys[i]);
            theory[i] = std::sqrt(dot(rest, rest) * dot(code.rest, code.rest) / (kDim - 1)) *
                        (kind == SketchKind::kBits2 ? 0.36 : 0.755);
          }
        }
      }
      double ratio = 0;
      double worst = 0;
      for (size_t i = 0; i < 64; ++i) {
        const double mean = sum[i] / kRotations;
        const double sd = std::sqrt(square[i] / kRotations - mean * mean);
        // The lead's rounding does not change with the rotation: at most .02 sd of it.
        const double fixed = kind == SketchKind::kLead8Bits1 ? 0.25 : 0;
        worst = std::max(worst, (std::abs(mean) - fixed) / (sd / std::sqrt(1.0 * kRotations)));
        ratio += sd / theory[i] / 64;
      }
      EXPECT_LT(worst, 4.5) << static_cast<int>(kind) << balanced;
      EXPECT_NEAR(ratio, 1.0, 0.1) << static_cast<int>(kind) << balanced;
    }
  }
}

// All tables read the same blocks to the same numbers: the sums over codes are integers.
TEST(Tables, EstimateTheSameFromTheSameBlocks) {
  std::mt19937_64 random(11);
  for (const Shape& shape : shapes()) {
    for (const uint32_t n_rows : {1u, 2u, 3u, 4u, 6u, 7u, 16u}) {
      const Pages pages(normal_rows(&random, 64, shape.dim), normal_rows(&random, 64, 8),
                        CodecId::kF32);
      const FramePtr frame = pages.frame(&shape.kind, n_rows);
      const Aligned blocks = pages.encode(*frame, nullptr);
      const std::vector<float> q = floats(normal_rows(&random, n_rows, shape.dim));
      const ScanTable* scalar = find_scan_table("scalar");
      const Estimates wanted = estimate(*frame, blocks.get(), 1, q, n_rows, 1.0f, scalar);
      for (const ScanTable* table : available_scan_tables()) {
        const Estimates got = estimate(*frame, blocks.get(), 1, q, n_rows, 1.0f, table);
        EXPECT_EQ(got.norms, wanted.norms);
        for (uint32_t r = 0; r < n_rows; ++r) {
          for (size_t i = 0; i < 64; ++i) {
            ASSERT_NEAR(got.logits[r][i], wanted.logits[r][i],
                        1e-4 * (1 + std::sqrt(1.0 * shape.dim)))
                << table->name << " " << name_of(shape) << " rows " << n_rows;
          }
        }
      }
    }
  }
}

// Of what the estimates are without them, in double precision; caps from one that hardly bends to
// one that leaves signs.
TEST(Estimates, HaveTheirCap) {
  constexpr uint32_t kRows = 5;
  std::mt19937_64 random(12);
  const Pages pages(normal_rows(&random, 64, 64, 1, 0.99, 0.5), normal_rows(&random, 64, 8),
                    CodecId::kF32);
  const std::vector<float> q = floats(normal_rows(&random, kRows, 64));
  for (const SketchKind kind : kKinds) {
    const FramePtr frame = pages.frame(&kind, 3);
    const Aligned blocks = pages.encode(*frame, nullptr);
    for (const ScanTable* table : available_scan_tables()) {
      ScanRows rows{.q = q.data(), .n = kRows, .scale = 0.5f};
      const Estimates bare = estimate(*frame, blocks.get(), 1, rows, table);
      for (const float cap : {0.0f, 1e4f, 50.0f, 3.0f, 1e-3f}) {
        rows.softcap = cap;
        const Estimates got = estimate(*frame, blocks.get(), 1, rows, table);
        for (uint32_t r = 0; r < kRows; ++r) {
          for (size_t i = 0; i < 64; ++i) {
            const double x = double{bare.logits[r][i]};
            const double wanted = cap == 0 ? x : double{cap} * std::tanh(x / double{cap});
            ASSERT_NEAR(got.logits[r][i], wanted, 2e-5 + 5e-6 * double{cap})
                << table->name << " cap " << cap;
          }
        }
      }
    }
  }
}

// --- Drawing ------------------------------------------------------------------------------------

struct Drawn {
  std::vector<uint64_t> position;
  std::vector<float> size;
  std::vector<float> random;
  std::vector<float> logits;
  DrawSums sums;
  bool fits = false;
};

Drawn draw(const std::vector<SketchSpan>& spans, uint32_t n_rows, const DrawParams& params,
           uint32_t capacity, const ScanTable* table) {
  Drawn drawn;
  drawn.position.resize(capacity);
  drawn.size.resize(capacity);
  drawn.random.resize(capacity);
  drawn.logits.resize(size_t{capacity} * n_rows);
  Candidates candidates{drawn.position.data(), drawn.size.data(), drawn.random.data(),
                        drawn.logits.data(),   capacity,          0};
  drawn.fits = scan_draw(spans, n_rows, params, &candidates, &drawn.sums, table);
  drawn.position.resize(candidates.n);
  drawn.size.resize(candidates.n);
  drawn.random.resize(candidates.n);
  drawn.logits.resize(size_t{candidates.n} * n_rows);
  return drawn;
}

struct Scene {
  uint32_t n_rows;
  Pages pages;
  FramePtr frame;
  Aligned blocks;
  Aligned query;
  std::vector<SketchSpan> spans;
  Estimates estimates;

  Scene(uint32_t rows, SketchKind kind, uint32_t dim, size_t n_keys, uint64_t position,
        const ScanTable* table)
      : n_rows(rows),
        pages(make_pages(dim, n_keys, position)),
        frame(pages.frame(&kind, 3)),
        blocks(pages.encode(*frame, find_scan_table("scalar"))) {
    std::mt19937_64 random(rows * 1000 + dim);
    const std::vector<float> q = floats(normal_rows(&random, rows, dim));
    const float scale = 2.0f / std::sqrt(static_cast<float>(dim));
    // With a cap where rows are odd.
    const ScanRows asked{
        .q = q.data(), .n = rows, .scale = scale, .softcap = rows % 2 == 1 ? 4.0f : 0.0f};
    query = aligned_bytes(scan_query_bytes(*frame, rows, table));
    prepare_scan(*frame, asked, query.get(), nullptr, table);
    // Two spans with a gap between: the second begins 640 positions later than it could.
    const auto n_blocks = static_cast<uint32_t>(n_keys / 64);
    const size_t bytes = block_bytes(kind, dim);
    const uint32_t cut = n_blocks / 3;
    spans = {{frame.get(), query.get(), blocks.get(), cut, position},
             {frame.get(), query.get(), blocks.get() + cut * bytes, n_blocks - cut,
              position + 64 * cut + 640}};
    estimates = estimate(*frame, blocks.get(), n_blocks, asked, table);
  }

  static Pages make_pages(uint32_t dim, size_t n_keys, uint64_t position) {
    std::mt19937_64 random(dim);
    return Pages(normal_rows(&random, n_keys, dim, 1, 0.99, 0.5), normal_rows(&random, n_keys, 16),
                 CodecId::kBf16, 1, 0, position);
  }

  uint64_t position_of(size_t i) const {
    const size_t cut = spans[0].n_blocks * size_t{64};
    return i < cut ? spans[0].position + i : spans[1].position + (i - cut);
  }
};

TEST(Draw, AgreesWithBruteForce) {
  for (const ScanTable* table : available_scan_tables()) {
    for (const SketchKind kind : kKinds) {
      for (const uint32_t n_rows : {1u, 3u, 4u, 9u, 16u}) {
        // Positions across 2^32: the hash changes its key there.
        const uint64_t first = (uint64_t{1} << 32) - 64 * 10;
        const Scene scene(n_rows, kind, 64, 64 * 40, first, table);
        DrawParams params;
        params.seed = 77 + n_rows;
        params.reach = 3.0f;
        for (uint32_t r = 0; r < n_rows; ++r) {
          params.log_c[r] = -5.0f - 0.25f * static_cast<float>(r);
        }
        const Drawn got = draw(scene.spans, n_rows, params, 4096, table);
        ASSERT_TRUE(got.fits);
        SCOPED_TRACE(std::string(table->name) + " rows " + std::to_string(n_rows) + " kind " +
                     std::to_string(static_cast<int>(kind)));

        std::vector<uint64_t> wanted;
        DrawSums sums;
        double mass[kMaxRows] = {};
        size_t at = 0;
        for (size_t i = 0; i < scene.estimates.norms.size(); ++i) {
          std::vector<double> w(n_rows);
          double top = 0;
          for (uint32_t r = 0; r < n_rows; ++r) {
            w[r] = std::exp(double{scene.estimates.logits[r][i]} + double{params.log_c[r]});
            top = std::max(top, w[r]);
          }
          const double size = std::max(top * double{scene.estimates.norms[i]}, double{kMinSize});
          const double p = std::min(1.0, size);
          const float u = permanent_random(params.seed, scene.position_of(i));
          sums.n_keys += 1;
          sums.expected += p;
          for (uint32_t r = 0; r < n_rows; ++r) {
            mass[r] += w[r];
            sums.open_mass[r] += p < 1 ? w[r] : 0;
            sums.spread[r] += w[r] * w[r] * (1 - p) / p;
          }
          const bool reported =
              at < got.position.size() && got.position[at] == scene.position_of(i);
          // Sizes are equal up to rounding; the decision is exact for the size that is reported.
          if (std::abs(double{u} - 3 * size) > 1e-4 * size) {
            EXPECT_EQ(reported, double{u} < 3 * size) << i;
          }
          if (!reported) {
            continue;
          }
          EXPECT_NEAR(double{got.size[at]}, size, 2e-5 * size);
          EXPECT_EQ(got.random[at], u);
          EXPECT_LT(got.random[at], got.size[at] * params.reach);
          for (uint32_t r = 0; r < n_rows; ++r) {
            EXPECT_EQ(got.logits[at * n_rows + r], scene.estimates.logits[r][i]);
          }
          ++at;
        }
        EXPECT_EQ(at, got.position.size());  // all were met, in order
        EXPECT_GT(at, 20u);
        EXPECT_EQ(got.sums.n_keys, sums.n_keys);
        EXPECT_NEAR(got.sums.expected, sums.expected, 1e-4 * sums.expected);
        for (uint32_t r = 0; r < n_rows; ++r) {
          EXPECT_NEAR(got.sums.open_mass[r], sums.open_mass[r], 1e-4 * mass[r]);
          EXPECT_NEAR(got.sums.spread[r], sums.spread[r], 1e-3 * sums.spread[r]);
        }
      }
    }
  }
}

TEST(Draw, SamplesOfGrowingThresholdsAreNestedAndReachCoversThem) {
  const ScanTable* table = &active_scan_table();
  const Scene scene(4, SketchKind::kLead8Bits1, 128, 64 * 64, 0, table);
  DrawParams params;
  params.seed = 5;
  params.reach = 16.0f;
  std::fill_n(params.log_c, 4, -8.0f);
  const Drawn wide = draw(scene.spans, 4, params, 8192, table);
  std::vector<uint64_t> before;
  for (const float factor : {1.0f, 2.0f, 6.0f, 16.0f}) {
    params.reach = 1.0f;
    std::fill_n(params.log_c, 4, -8.0f + std::log(factor));
    const Drawn got = draw(scene.spans, 4, params, 8192, table);
    EXPECT_TRUE(
        std::includes(got.position.begin(), got.position.end(), before.begin(), before.end()));
    EXPECT_GT(got.position.size(), before.size());
    // What the wide scan kept is enough to draw this sample from, but for ties in rounding.
    std::vector<uint64_t> again;
    for (size_t i = 0; i < wide.position.size(); ++i) {
      if (wide.random[i] < factor * wide.size[i]) {
        again.push_back(wide.position[i]);
      }
    }
    std::vector<uint64_t> differing;
    std::set_symmetric_difference(again.begin(), again.end(), got.position.begin(),
                                  got.position.end(), std::back_inserter(differing));
    EXPECT_LE(differing.size(), 1u);
    before = got.position;
  }
}

TEST(Draw, ReportsThatCapacityRanOutAndKeepsTheSums) {
  for (const ScanTable* table : available_scan_tables()) {
    const Scene scene(2, SketchKind::kBits2, 32, 64 * 16, 64 * 100, table);
    DrawParams params;
    params.log_c[0] = params.log_c[1] = 30.0f;  // everything is drawn
    const Drawn all = draw(scene.spans, 2, params, 2048, table);
    EXPECT_TRUE(all.fits);
    EXPECT_EQ(all.position.size(), 64u * 16);
    EXPECT_EQ(all.sums.expected, 64.0 * 16);
    EXPECT_EQ(all.sums.open_mass[0], 0);
    EXPECT_EQ(all.sums.spread[0], 0);
    const Drawn few = draw(scene.spans, 2, params, 100, table);
    EXPECT_FALSE(few.fits);
    EXPECT_EQ(few.position.size(), 100u);
    EXPECT_EQ(few.sums.expected, all.sums.expected);
    params.log_c[0] = params.log_c[1] = -std::numeric_limits<float>::infinity();
    const Drawn none = draw(scene.spans, 2, params, 2048, table);
    EXPECT_TRUE(none.position.empty());
    EXPECT_NEAR(none.sums.expected, 64 * 16 * double{kMinSize}, 1e-9);
  }
}

// --- Frames -------------------------------------------------------------------------------------

TEST(Frames, KindFollowsTheSpectrum) {
  std::mt19937_64 random(21);
  const Rows values = normal_rows(&random, 1024, 8);
  const Pages steep(normal_rows(&random, 1024, 64, 4, 0.8), values, CodecId::kBf16);
  const Pages flat(normal_rows(&random, 1024, 64), values, CodecId::kBf16);
  EXPECT_EQ(frame_kind(*steep.frame(nullptr, 1)), SketchKind::kLead8Bits1);
  EXPECT_EQ(frame_kind(*flat.frame(nullptr, 1)), SketchKind::kBits2);
  // Flat keys of which the queries see eight directions: with some of the moments shrunk away they
  // still hold most of the logits' variance.
  Rows queries = normal_rows(&random, 400, 64, 1, 0.5);
  EXPECT_EQ(frame_kind(*flat.frame(nullptr, 1, floats(queries))), SketchKind::kLead8Bits1);
}

TEST(Frames, ALeadIsChosenWhereItHasFarLessNoise) {
  constexpr size_t kKeys = 1024;
  constexpr uint32_t kRows = 16;
  std::mt19937_64 random(25);
  const Rows values = normal_rows(&random, kKeys, 8);
  uint32_t n_leads = 0;
  for (const double decay : {1.0, 0.95, 0.9, 0.85, 0.8, 0.75}) {
    for (const double asked : {1.0, 0.95, 1.05, 0.85}) {  // how the moments of queries fall
      for (const bool seen : {false, true}) {
        SCOPED_TRACE(testing::Message() << decay << " " << asked << " " << seen);
        const Pages pages(normal_rows(&random, kKeys, 64, 1, decay), values, CodecId::kF32);
        const std::vector<float> observed =
            seen ? floats(normal_rows(&random, 400, 64, 1, asked)) : std::vector<float>{};
        const Rows queries = normal_rows(&random, kRows, 64, 1, asked);
        const auto noise_of = [&](SketchKind kind) {
          const FramePtr frame = pages.frame(&kind, 1, observed);
          const Aligned blocks = pages.encode(*frame, nullptr);
          const Estimates got =
              estimate(*frame, blocks.get(), kKeys / 64, floats(queries), kRows, 1.0f, nullptr);
          double noise = 0;
          for (uint32_t r = 0; r < kRows; ++r) {
            for (size_t i = 0; i < kKeys; ++i) {
              noise += std::pow(double{got.logits[r][i]} - dot(pages.keys[i], queries[r]), 2);
            }
          }
          return noise;
        };
        const double ratio = noise_of(SketchKind::kLead8Bits1) / noise_of(SketchKind::kBits2);
        // Queries that look where keys vary are not foreseen unless they are seen, and seen ones
        // are trusted in part.
        const bool has_lead =
            frame_kind(*pages.frame(nullptr, 1, observed)) == SketchKind::kLead8Bits1;
        n_leads += has_lead ? 1 : 0;
        if (has_lead && (seen || asked == 1.0)) {
          EXPECT_LT(ratio, 0.35);
        }
        if (!has_lead && asked == 1.0) {
          EXPECT_GT(ratio, 0.15);
        }
      }
    }
  }
  EXPECT_GE(n_leads, 8u);
  EXPECT_LE(n_leads, 40u);
}

// 8 axes of few keys hold most of what these keys are, not of what later ones are.
TEST(Frames, FewKeysGetNoLeadUntilThereAreMore) {
  std::mt19937_64 random(26);
  const Rows keys = normal_rows(&random, 1088, 64, 4, 0.8);
  const Rows values = normal_rows(&random, 1088, 8);
  const Pages few({keys.begin(), keys.begin() + 960}, {values.begin(), values.begin() + 960},
                  CodecId::kBf16);
  const Pages more(keys, values, CodecId::kBf16);
  const FramePtr frame = few.frame(nullptr, 1);
  EXPECT_EQ(frame_kind(*frame), SketchKind::kBits2);
  EXPECT_EQ(frame_kind(*more.frame(nullptr, 2, {}, frame.get())), SketchKind::kLead8Bits1);
}

// An index holds the same whichever machine makes it, as far as frames go.
TEST(Frames, AreTheSameForEveryTable) {
  std::mt19937_64 random(24);
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    const Pages pages(normal_rows(&random, 256, shape.dim, 2, 0.9, 1), normal_rows(&random, 256, 8),
                      shape.codec, 2, 1);
    const std::vector<float> seen = floats(normal_rows(&random, 90, shape.dim, 1, 0.95));
    FrameInput input;
    input.runs = pages.runs;
    input.head = 1;
    input.dim_k = shape.dim;
    input.seed = 9;
    input.queries = shape.balanced ? std::span<const float>(seen) : std::span<const float>();
    const FramePtr wanted = make_frame(input, &shape.kind, find_scan_table("scalar"));
    for (const ScanTable* table : available_scan_tables()) {
      SCOPED_TRACE(table->name);
      const FramePtr got = make_frame(input, &shape.kind, table);
      EXPECT_EQ(got->center, wanted->center);
      EXPECT_EQ(got->lead_step, wanted->lead_step);
      EXPECT_EQ(got->basis->lead_key, wanted->basis->lead_key);
      EXPECT_EQ(got->basis->lead_query, wanted->basis->lead_query);
      EXPECT_EQ(got->basis->key_matrix, wanted->basis->key_matrix);
      EXPECT_EQ(got->basis->query_matrix, wanted->basis->query_matrix);
      EXPECT_EQ(got->basis->rest_share, wanted->basis->rest_share);
    }
  }
}

TEST(Frames, BasisIsKeptUntilTheKeysLeaveIt) {
  std::mt19937_64 random(22);
  const Rows values = normal_rows(&random, 1024, 8);
  const Pages first(normal_rows(&random, 1024, 64, 4, 0.8), values, CodecId::kBf16);
  const Pages same(normal_rows(&random, 1024, 64, 4, 0.8, 2), values, CodecId::kBf16);
  Rows reversed = normal_rows(&random, 1024, 64, 4, 0.8);
  for (auto& row : reversed) {
    std::reverse(row.begin(), row.end());
  }
  const Pages other(reversed, values, CodecId::kBf16);
  for (const bool balanced : {false, true}) {
    const std::vector<float> seen =
        balanced ? floats(normal_rows(&random, 300, 64)) : std::vector<float>{};
    const FramePtr frame = first.frame(nullptr, 1, seen);
    const FramePtr kept = same.frame(nullptr, 2, seen, frame.get());
    EXPECT_EQ(kept->basis, frame->basis);
    EXPECT_NE(kept->center, frame->center);
    const FramePtr fresh = other.frame(nullptr, 2, seen, frame.get());
    EXPECT_NE(fresh->basis, frame->basis);
    EXPECT_EQ(frame_kind(*fresh), SketchKind::kLead8Bits1);

    // With a shared basis, preparing after another frame gives the same bytes.
    const Rows queries = normal_rows(&random, 4, 64);
    const size_t bytes = scan_query_bytes(*kept, 4);
    const Aligned a = aligned_bytes(bytes);
    const Aligned b = aligned_bytes(bytes);
    const Aligned c = aligned_bytes(bytes);
    prepare_scan(*frame, {.q = floats(queries).data(), .n = 4, .scale = 0.5f}, a.get());
    prepare_scan(*kept, {.q = floats(queries).data(), .n = 4, .scale = 0.5f}, b.get());
    const SketchSpan like{frame.get(), a.get(), nullptr, 0, 0};
    prepare_scan(*kept, {.q = floats(queries).data(), .n = 4, .scale = 0.5f}, c.get(), &like);
    EXPECT_EQ(std::memcmp(b.get(), c.get(), bytes), 0);
    prepare_scan(*fresh, {.q = floats(queries).data(), .n = 4, .scale = 0.5f}, b.get());
    prepare_scan(*fresh, {.q = floats(queries).data(), .n = 4, .scale = 0.5f}, c.get(), &like);
    EXPECT_EQ(std::memcmp(b.get(), c.get(), bytes), 0);
  }
}

// Few queries that miss half of the space: the shrunk moments keep the noise where axes alone are.
TEST(Frames, PoorQueriesDoNotBlowUpTheNoise) {
  std::mt19937_64 random(23);
  const Pages pages(normal_rows(&random, 1024, 64, 3, 0.9), normal_rows(&random, 1024, 8),
                    CodecId::kF32);
  Rows few = normal_rows(&random, 12, 64);
  for (auto& row : few) {
    std::fill(row.begin() + 32, row.end(), 0.0);
  }
  const Rows queries = normal_rows(&random, 4, 64);
  const SketchKind kind = SketchKind::kLead8Bits1;
  double noise[2] = {};
  for (const bool balanced : {false, true}) {
    const FramePtr frame = pages.frame(&kind, 1, balanced ? floats(few) : std::vector<float>{});
    const Aligned blocks = pages.encode(*frame, nullptr);
    const Estimates got = estimate(*frame, blocks.get(), 16, floats(queries), 4, 1.0f, nullptr);
    for (uint32_t r = 0; r < 4; ++r) {
      for (size_t i = 0; i < 1024; ++i) {
        noise[balanced] += std::pow(double{got.logits[r][i]} - dot(pages.keys[i], queries[r]), 2);
      }
    }
  }
  EXPECT_LT(noise[1], 2.5 * noise[0]);
}

TEST(Exotic, NothingThatIsStoredOrAskedMakesNonsense) {
  std::mt19937_64 random(31);
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const uint32_t dim : {8u, 80u, 128u}) {
    std::vector<std::pair<std::string, Rows>> cases;
    cases.emplace_back("zero", Rows(128, std::vector<double>(dim, 0.0)));
    cases.emplace_back("equal", Rows(128, std::vector<double>(dim, 1.5)));
    cases.emplace_back("not finite", normal_rows(&random, 128, dim));
    cases.back().second[3][0] = nan;
    cases.back().second[64][dim - 1] = inf;
    cases.back().second[127].assign(dim, -inf);
    cases.emplace_back("all nan", Rows(128, std::vector<double>(dim, nan)));
    cases.emplace_back("huge", normal_rows(&random, 128, dim));
    cases.back().second[9].assign(dim, 1e30);
    cases.back().second[10].assign(dim, 3e38);
    cases.emplace_back("denormal", Rows(128, std::vector<double>(dim, 1e-42)));
    for (const auto& [name, rows] : cases) {
      Rows values = normal_rows(&random, 128, 16);
      values[0].assign(16, nan);
      values[1].assign(16, 3e38);
      values[2].assign(16, 0.0);
      const Pages pages(rows, values, CodecId::kF32);
      for (const SketchKind& kind : kKinds) {
        for (const std::vector<float>& seen :
             {std::vector<float>{}, floats(normal_rows(&random, 20, dim)),
              std::vector<float>(dim, std::nanf(""))}) {
          const FramePtr frame = pages.frame(&kind, 1, seen);
          Rows queries = normal_rows(&random, 4, dim);
          queries[1].assign(dim, 1e30);
          queries[2][0] = nan;
          queries[3].assign(dim, 0.0);
          for (const ScanTable* table : available_scan_tables()) {
            SCOPED_TRACE(name + " " + table->name + " dim " + std::to_string(dim) + " kind " +
                         std::to_string(static_cast<int>(kind)));
            const Aligned blocks = pages.encode(*frame, table);
            const Estimates got =
                estimate(*frame, blocks.get(), 2, floats(queries), 4, 0.1f, table);
            for (size_t i = 0; i < 128; ++i) {
              for (uint32_t r = 0; r < 4; ++r) {
                ASSERT_TRUE(std::isfinite(got.logits[r][i]));
              }
              ASSERT_TRUE(std::isfinite(got.norms[i]) && got.norms[i] >= 0);
            }
            EXPECT_GT(got.norms[0], 1e15f);
            EXPECT_GT(got.norms[1], 1e15f);
            EXPECT_GT(got.norms[2], 0);
            if (name == "zero" || name == "equal") {
              // The centre is the key: the estimate is exact but for the rounding of the centre.
              EXPECT_NEAR(got.logits[0][5], 0.1 * dot(pages.keys[5], queries[0]), 1e-4);
            }
            const Aligned query = aligned_bytes(scan_query_bytes(*frame, 4, table));
            prepare_scan(*frame, {.q = floats(queries).data(), .n = 4, .scale = 0.1f}, query.get(),
                         nullptr, table);
            DrawParams params;
            params.log_c[0] = 1e30f;
            params.log_c[1] = std::nanf("");
            const Drawn drawn =
                draw({{frame.get(), query.get(), blocks.get(), 2, 0}}, 4, params, 128, table);
            EXPECT_TRUE(drawn.fits);
            EXPECT_TRUE(std::isfinite(drawn.sums.expected) &&
                        std::isfinite(drawn.sums.open_mass[0]));
          }
        }
      }
    }
  }
}

// One key of another size than the rest does not spoil what is estimated for the rest.
TEST(Exotic, OneHugeKeyDoesNotMoveTheFrame) {
  std::mt19937_64 random(33);
  Rows keys = normal_rows(&random, 512, 64, 2, 0.9);
  keys[100].assign(64, 1e6);
  const Pages pages(keys, normal_rows(&random, 512, 8), CodecId::kF32);
  const Rows queries = normal_rows(&random, 1, 64);
  for (const SketchKind kind : kKinds) {
    const FramePtr frame = pages.frame(&kind, 1);
    const Aligned blocks = pages.encode(*frame, nullptr);
    const Estimates got = estimate(*frame, blocks.get(), 8, floats(queries), 1, 1.0f, nullptr);
    double noise = 0;
    double signal = 0;
    for (size_t i = 0; i < 512; ++i) {
      const double truth = dot(pages.keys[i], queries[0]);
      if (i != 100) {
        noise += std::pow(double{got.logits[0][i]} - truth, 2);
        signal += truth * truth;
      } else {
        EXPECT_GT(double{got.logits[0][i]} / truth, 0.0);
      }
    }
    EXPECT_LT(noise, 0.7 * signal);
  }
}

}  // namespace
}  // namespace kvm::hash_index
