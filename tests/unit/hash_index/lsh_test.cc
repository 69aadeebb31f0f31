// SPDX-License-Identifier: Apache-2.0
#include "hash_index/lsh/lsh.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "base/dtype.h"
#include "base/simd/elem.h"
#include "codecs/codec.h"
#include "hash_index/lsh/planes.h"

namespace kvm::hash_index {
namespace {

using Rng = std::mt19937_64;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kInt8Scale = 0.0625f;  // of all int8 rows
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> normal(Rng* rng, size_t n, float scale = 1.0f) {
  std::normal_distribution<float> distribution(0.0f, scale);
  std::vector<float> x(n);
  for (float& value : x) {
    value = distribution(*rng);
  }
  return x;
}

// Memory aligned to 64 of exactly so many bytes, so that AddressSanitizer sees what is beyond.
struct FreeAligned {
  void operator()(std::byte* p) const { ::operator delete (p, std::align_val_t{64}); }
};
using Buffer = std::unique_ptr<std::byte[], FreeAligned>;
Buffer make_buffer(size_t bytes, int fill = 0xcd) {
  auto* p =
      static_cast<std::byte*>(::operator new (std::max<size_t>(bytes, 1), std::align_val_t{64}));
  std::memset(p, fill, bytes);
  return Buffer(p);
}

// Keys of head 1 of 2 in pages, from some position on, with a few runs before and behind them.
class KeyStore {
 public:
  KeyStore(const std::vector<float>& keys, uint32_t dim, CodecId codec = CodecId::kF32,
           uint64_t position = 640, uint32_t longest_run = kPageTokens)
      : n_(static_cast<uint32_t>(keys.size() / dim)), dim_(dim), position_(position) {
    const codecs::Codec& of = codecs::codec_of(codec);
    scales_.assign(2 * kPageTokens, f32_to_bf16(kInt8Scale));
    const uint64_t begin = position < 10 ? 0 : position - 10;
    const uint64_t end = position + n_ + 5;
    for (uint64_t at = begin; at < end;) {
      const uint64_t page_end = (at / kPageTokens + 1) * kPageTokens;
      const auto n =
          static_cast<uint32_t>(std::min<uint64_t>({longest_run, page_end - at, end - at}));
      pages_.push_back(std::make_unique<std::byte[]>(2 * of.head_rows_bytes(dim)));
      std::byte* page = pages_.back().get();
      for (uint32_t i = 0; i < n; ++i) {
        const bool ours = at + i >= position && at + i < position + n_;
        for (uint32_t d = 0; d < dim; ++d) {
          const float x = ours ? keys[(at + i - position) * dim + d] : 1e3f;
          put(page, ((kPageTokens + i) * size_t{dim} + d), codec, x);
        }
      }
      KvRun run;
      run.k = {page, of.is_scaled() ? scales_.data() : nullptr, codec};
      run.position = at;
      run.n_tokens = static_cast<uint16_t>(n);
      runs_.push_back(run);
      at += n;
    }
  }

  uint32_t n() const { return n_; }
  uint32_t dim() const { return dim_; }

  Buffer build(const Planes& planes, const float* center, std::vector<uint32_t> cuts = {}) const {
    return build_prefix(planes, center, n_, std::move(cuts));
  }
  Buffer build_prefix(const Planes& planes, const float* center, uint32_t n,
                      std::vector<uint32_t> cuts = {}) const {
    Buffer out = make_buffer(table_run_bytes(planes.params, n));
    cuts.insert(cuts.begin(), 0);
    cuts.push_back(planes.params.n_tables);
    for (size_t i = cuts.size() - 1; i-- > 0;) {
      const Buffer scratch = make_buffer(build_scratch_bytes(planes, n));
      build_tables(planes, runs_, 1, center, position_, n, cuts[i], cuts[i + 1], scratch.get(),
                   out.get());
    }
    return out;
  }

 private:
  // Of a value that is a code's, or of the largest.
  static std::byte f8_code(float x) {
    uint8_t code = 0;
    while (code < 0x7e && e4m3_to_f32(code) < std::abs(x)) {
      ++code;
    }
    return static_cast<std::byte>(x < 0 ? code | 0x80 : code);
  }
  static void put(std::byte* page, size_t element, CodecId codec, float x) {
    if (codec == CodecId::kF32) {
      std::memcpy(page + element * 4, &x, 4);
    } else if (codec == CodecId::kI8) {
      page[element] = static_cast<std::byte>(static_cast<int>(x / kInt8Scale));
    } else if (codec == CodecId::kF8) {
      page[element] = f8_code(x / kInt8Scale);
    } else {
      const uint16_t bits = codec == CodecId::kF16 ? f32_to_f16(x) : f32_to_bf16(x);
      std::memcpy(page + element * 2, &bits, 2);
    }
  }

  uint32_t n_;
  uint32_t dim_;
  uint64_t position_;
  std::vector<uint16_t> scales_;
  std::vector<std::unique_ptr<std::byte[]>> pages_;
  std::vector<KvRun> runs_;
};

// What a vector is hashed as, written down from the contract alone.
std::vector<uint16_t> reference_codes(const Planes& planes, const float* x, const float* center) {
  const LshParams& params = planes.params;
  const uint32_t dim = planes.dim_k;
  std::vector<float> y(x, x + dim);
  float top = 0.0f;
  bool finite = true;
  for (uint32_t d = 0; d < dim; ++d) {
    y[d] -= center != nullptr ? center[d] : 0.0f;
    finite = finite && std::isfinite(y[d]);
    top = std::max(top, std::fabs(y[d]));
  }
  const float scale = finite && top >= 1e-30f ? 127.0f / top : 0.0f;
  std::vector<int64_t> rounded(dim);
  for (uint32_t d = 0; scale != 0.0f && d < dim; ++d) {
    rounded[d] = static_cast<int64_t>(std::nearbyintf(y[d] * scale));
  }
  std::vector<uint16_t> codes(params.n_tables);
  for (uint32_t t = 0; t < params.n_tables; ++t) {
    for (uint32_t b = 0; b < params.n_bits; ++b) {
      const int8_t* weights = &planes.weights[(t * params.n_bits + b) * size_t{dim}];
      int64_t sum = 0;
      for (uint32_t d = 0; d < dim; ++d) {
        sum += rounded[d] * weights[d];
      }
      codes[t] = static_cast<uint16_t>(codes[t] | (sum > 0 ? 1 << b : 0));
    }
  }
  return codes;
}

struct Met {
  uint32_t id;
  uint32_t rows;
  bool operator==(const Met&) const = default;
};

std::vector<Met> brute_force(const Planes& planes, const std::vector<float>& keys,
                             const float* center, const std::vector<uint16_t>& codes,
                             uint32_t n_rows, uint64_t* ids_read) {
  const LshParams& params = planes.params;
  std::vector<Met> met;
  *ids_read = 0;
  for (uint32_t i = 0; i < keys.size() / planes.dim_k; ++i) {
    const std::vector<uint16_t> key = reference_codes(planes, &keys[i * planes.dim_k], center);
    uint32_t rows = 0;
    for (uint32_t r = 0; r < n_rows; ++r) {
      uint32_t hits = 0;
      for (uint32_t t = 0; t < params.n_tables; ++t) {
        hits += key[t] == codes[r * params.n_tables + t] ? 1u : 0u;
      }
      *ids_read += hits;
      rows |= hits >= 2 ? 1u << r : 0u;
    }
    if (rows != 0) {
      met.push_back({i, rows});
    }
  }
  return met;
}

std::vector<Met> look_up(const Planes& planes, const Buffer& tables, uint32_t n_keys,
                         uint32_t n_live, const std::vector<uint16_t>& codes, uint32_t n_rows,
                         uint64_t* ids_read = nullptr) {
  const Buffer scratch = make_buffer(lookup_scratch_bytes(n_keys, n_rows));
  const Buffer out = make_buffer(n_live * sizeof(LshCandidate));
  auto* candidates = reinterpret_cast<LshCandidate*>(out.get());
  const uint32_t n = lookup(planes, tables.get(), n_keys, n_live, codes.data(), n_rows,
                            scratch.get(), candidates, ids_read);
  EXPECT_LE(n, n_live);
  std::vector<Met> met;
  for (uint32_t i = 0; i < n; ++i) {
    met.push_back({candidates[i].id, candidates[i].rows});
  }
  return met;
}

std::vector<uint16_t> codes_of(const Planes& planes, const std::vector<float>& q) {
  const auto n_rows = static_cast<uint32_t>(q.size() / planes.dim_k);
  std::vector<uint16_t> codes(n_rows * planes.params.n_tables);
  hash_queries(planes, q.data(), n_rows, codes.data());
  return codes;
}

bool same_bytes(const Buffer& a, const Buffer& b, size_t n) {
  return std::memcmp(a.get(), b.get(), n) == 0;
}

TEST(Planes, AreNormalDeviatesOfTheSeed) {
  const PlanesPtr planes = make_planes({10, 40, 7}, 128);
  std::vector<double> counts(64);
  double sum = 0;
  double square = 0;
  for (const int8_t w : planes->weights) {
    ASSERT_EQ(w & 1, 1);
    counts[static_cast<size_t>((w + 63) / 2)] += 1;
    sum += w;
    square += w * w;
  }
  const auto n = static_cast<double>(planes->weights.size());
  EXPECT_NEAR(sum / n, 0.0, 4 * 16 / std::sqrt(n));
  EXPECT_NEAR(square / n, 256.3, 4 * 256.3 * std::sqrt(2 / n));
  for (int level = 0; level < 64; ++level) {
    const double low = level == 0 ? -100.0 : (level - 32) / 8.0;
    const double high = level == 63 ? 100.0 : (level - 31) / 8.0;
    const double p = 0.5 * (std::erf(high / std::sqrt(2.0)) - std::erf(low / std::sqrt(2.0)));
    EXPECT_NEAR(counts[static_cast<size_t>(level)], n * p, 5 * std::sqrt(n * p) + 1) << level;
  }
  for (uint32_t p = 0; p < 400; p += 37) {
    int32_t bias = 0;
    for (uint32_t d = 0; d < 128; ++d) {
      EXPECT_EQ(planes->weights[p * 128 + d], plane_weight(7, p, d));
      bias -= 128 * plane_weight(7, p, d);
    }
    EXPECT_EQ(planes->bias[p], bias);
  }
  EXPECT_NE(make_planes({10, 40, 8}, 128)->weights, planes->weights);
  EXPECT_EQ(planes_params(*planes), (LshParams{10, 40, 7}));
  EXPECT_GE(planes_bytes(*planes), 400u * 132);
}

// Written down once: tables of one machine have to suit the queries of another.
TEST(Planes, AreTheSameOnEveryMachine) {
  const int8_t expected[2][8] = {{-5, -15, 17, -9, 15, -19, -3, 19},
                                 {11, 5, -5, -13, -19, -5, 5, 5}};
  for (uint32_t d = 0; d < 8; ++d) {
    EXPECT_EQ(plane_weight(0, 0, d), expected[0][d]) << d;
    EXPECT_EQ(plane_weight(12345678901234567u, 7679, 248 + d), expected[1][d]) << d;
  }
}

TEST(Kernels, GiveTheCodesOfTheContract) {
  Rng rng(1);
  for (const LshKernels* kernels : available_lsh_kernels()) {
    for (const uint32_t dim : {8u, 24u, 128u, 256u}) {
      for (uint32_t n_bits = 1; n_bits <= kMaxLshBits; n_bits += dim == 24 ? 1 : 7) {
        const PlanesPtr planes = make_planes({n_bits, 3, dim}, dim);
        const std::vector<float> keys = normal(&rng, size_t{kPackKeys} * dim, 3.0f);
        const std::vector<float> center = normal(&rng, dim);
        const Buffer packed = make_buffer(size_t{dim} * kPackKeys);
        PackArgs pack{};
        pack.center = center.data();
        pack.packed = reinterpret_cast<uint8_t*>(packed.get());
        pack.elem = vec::kElemF32;
        pack.dim = dim;
        for (const uint32_t n : {1u, 47u, 16u}) {  // in three stretches
          pack.rows = reinterpret_cast<const uint8_t*>(&keys[size_t{pack.first} * dim]);
          pack.n = n;
          kernels->pack(&pack);
          pack.first += n;
        }
        HashArgs hash{};
        hash.packed = pack.packed;
        hash.weights = planes->weights.data();
        hash.bias = planes->bias.data();
        hash.code_stride = kPackKeys;
        hash.dim = dim;
        hash.n_bits = n_bits;
        hash.table_begin = 1;
        hash.table_end = 3;
        for (const uint32_t n_keys : {16u, 48u, 64u}) {
          std::vector<uint16_t> codes(2 * kPackKeys, 0xffff);
          hash.codes = codes.data();
          hash.n_keys = n_keys;
          kernels->hash(&hash);
          for (uint32_t i = 0; i < kPackKeys; ++i) {
            const auto expected = reference_codes(*planes, &keys[size_t{i} * dim], center.data());
            for (uint32_t t = 1; t < 3; ++t) {
              ASSERT_EQ(codes[(t - 1) * kPackKeys + i], i < n_keys ? expected[t] : 0xffff)
                  << kernels->name << " dim " << dim << " bits " << n_bits << " key " << i;
            }
          }
        }
      }
    }
  }
}

TEST(Kernels, ReadEveryElement) {
  Rng rng(2);
  for (const LshKernels* kernels : available_lsh_kernels()) {
    for (const uint32_t dim : {8u, 40u, 64u}) {
      const std::vector<float> center = normal(&rng, dim, 0.5f);
      std::vector<int8_t> bytes(dim * size_t{kPackKeys});
      std::vector<uint16_t> scales(kPackKeys);
      std::vector<uint16_t> halves(bytes.size());
      std::vector<uint16_t> brains(bytes.size());
      std::vector<float> floats(bytes.size());
      for (uint32_t i = 0; i < kPackKeys; ++i) {
        scales[i] = f32_to_bf16(i == 5 ? kNan : 0.0078125f);
        for (size_t e = size_t{i} * dim; e < (size_t{i} + 1) * dim; ++e) {
          bytes[e] = i == 5 ? int8_t{0} : static_cast<int8_t>(rng() % 255 - 127);
          floats[e] = static_cast<float>(bytes[e]) * bf16_to_f32(scales[i]);
          halves[e] = f32_to_f16(floats[e]);
          brains[e] = f32_to_bf16(floats[e]);
        }
      }
      std::vector<std::vector<std::byte>> packed;
      const void* rows[] = {floats.data(), halves.data(), brains.data(), bytes.data()};
      for (uint32_t elem = vec::kElemF32; elem <= vec::kElemI8; ++elem) {
        const Buffer out = make_buffer(size_t{dim} * kPackKeys);
        PackArgs pack{};
        pack.rows = static_cast<const uint8_t*>(rows[elem - vec::kElemF32]);
        pack.scales = scales.data();
        pack.center = center.data();
        pack.packed = reinterpret_cast<uint8_t*>(out.get());
        pack.elem = elem;
        pack.n = kPackKeys;
        pack.dim = dim;
        kernels->pack(&pack);
        packed.emplace_back(out.get(), out.get() + size_t{dim} * kPackKeys);
        EXPECT_EQ(packed.back(), packed.front()) << kernels->name << " element " << elem;
      }
    }
  }
}

TEST(Kernels, ListWhatWasMetTwice) {
  Rng rng(12);
  for (const LshKernels* kernels : available_lsh_kernels()) {
    for (const uint32_t n : {1u, 7u, 8u, 9u, 63u, 64u, 65u, 70u, 72u, 1000u}) {
      for (const uint32_t rarity : {1u, 3u, 30u}) {
        const size_t rounded = (n + 63) / 64 * 64;
        std::vector<Met> expected(n);
        const Buffer counts = make_buffer(rounded);
        const Buffer masks = make_buffer(2 * rounded, 0);
        for (const uint32_t row : {0u, 3u, 7u, 8u, 15u}) {
          for (uint32_t i = 0; i < rounded; ++i) {
            const auto count = static_cast<uint8_t>(rng() % rarity == 0 ? rng() % 256 : rng() % 2);
            counts[i] = static_cast<std::byte>(i < n ? count : 0);
            if (i < n) {
              expected[i].id = i;
              expected[i].rows |= count >= 2 ? 1u << row : 0u;
            }
          }
          auto* plane = reinterpret_cast<uint8_t*>(masks.get()) + row / 8 * rounded;
          kernels->collect(reinterpret_cast<uint8_t*>(counts.get()), rounded, 1u << row % 8, plane);
          EXPECT_TRUE(std::all_of(counts.get(), counts.get() + rounded,
                                  [](std::byte b) { return b == std::byte{0}; }));
        }
        for (const bool both : {false, true}) {
          const Buffer out = make_buffer(n * sizeof(LshCandidate));
          const auto* low = reinterpret_cast<const uint8_t*>(masks.get());
          const uint32_t listed = kernels->list(low, both ? low + rounded : nullptr, n,
                                                reinterpret_cast<uint16_t*>(out.get()));
          const auto* candidates = reinterpret_cast<const LshCandidate*>(out.get());
          uint32_t at = 0;
          for (const Met& met : expected) {
            const uint32_t rows = both ? met.rows : met.rows & 255;
            if (rows != 0) {
              ASSERT_LT(at, listed);
              EXPECT_EQ(candidates[at].id, met.id) << kernels->name << " n " << n;
              EXPECT_EQ(candidates[at].rows, rows) << kernels->name << " n " << n;
              ++at;
            }
          }
          EXPECT_EQ(at, listed) << kernels->name << " n " << n;
        }
      }
    }
  }
}

TEST(Tables, AreTheKeysInTheOrderOfTheirCodes) {
  Rng rng(3);
  const uint32_t dim = 16;
  for (const uint32_t n : {0u, 1u, 63u, 64u, 65u, 200u}) {
    for (const CodecId codec :
         {CodecId::kF32, CodecId::kBf16, CodecId::kF16, CodecId::kI8, CodecId::kF8}) {
      const PlanesPtr planes = make_planes({5, 7, n}, dim);
      std::vector<float> keys = normal(&rng, size_t{n} * dim);
      for (float& x : keys) {
        x = kInt8Scale * std::round(x / kInt8Scale);  // exact in every codec, fp8 with 16 at most
        x = std::clamp(x, -16 * kInt8Scale, 16 * kInt8Scale);
      }
      const std::vector<float> center = normal(&rng, dim);
      const KeyStore store(keys, dim, codec, 123, 17);  // uneven runs, none aligned
      const Buffer tables = store.build(*planes, center.data());
      const TableLayout layout = TableLayout::make(planes->params, n);
      EXPECT_EQ(layout.stride_bytes * 7, table_run_bytes(planes->params, n));
      for (uint32_t t = 0; t < 7; ++t) {
        const std::byte* table = tables.get() + t * layout.stride_bytes;
        std::vector<std::vector<uint16_t>> buckets(32);
        for (uint32_t i = 0; i < n; ++i) {
          const auto codes = reference_codes(*planes, &keys[size_t{i} * dim], center.data());
          buckets[codes[t]].push_back(static_cast<uint16_t>(i));
        }
        const auto* offsets = reinterpret_cast<const uint16_t*>(table);
        const auto* ids = reinterpret_cast<const uint16_t*>(table + layout.ids_offset_bytes);
        for (uint32_t c = 0; c < 32; ++c) {
          ASSERT_LE(offsets[c], offsets[c + 1]);
          EXPECT_EQ(std::vector<uint16_t>(ids + offsets[c], ids + offsets[c + 1]), buckets[c]);
        }
        EXPECT_EQ(offsets[0], 0);
        EXPECT_EQ(offsets[32], n);
      }
    }
  }
}

TEST(Tables, DoNotDependOnThePieces) {
  Rng rng(4);
  const uint32_t dim = 64;
  const PlanesPtr planes = make_planes({9, 20, 1}, dim);
  const KeyStore store(normal(&rng, 777 * dim), dim);
  const Buffer whole = store.build(*planes, nullptr);
  const size_t bytes = table_run_bytes(planes->params, 777);
  for (const auto& cuts : {std::vector<uint32_t>{1}, {10}, {3, 3, 4, 19}, {5, 10, 15}}) {
    EXPECT_TRUE(same_bytes(store.build(*planes, nullptr, cuts), whole, bytes));
  }
}

TEST(Tables, FitTheirBudget) {
  EXPECT_LE(table_run_bytes({10, 150, 0}, kMaxRunKeys), size_t{kMaxRunKeys} * 320);
  for (const auto& [bits, n_tables] : {std::pair{8u, 75u}, {9u, 120u}, {10u, 170u}, {11u, 300u}}) {
    for (const uint32_t n : {0u, 1u, 1000u, kMaxRunKeys - 1, kMaxRunKeys}) {
      const size_t bytes = table_run_bytes({bits, n_tables, 0}, n);
      EXPECT_EQ(bytes % 64, 0u);
      EXPECT_LE(bytes, n_tables * (2 * (size_t{n} + 64) + 4 * ((size_t{1} << bits) + 16)));
    }
  }
}

TEST(Lookup, EqualsBruteForceForEveryNumberOfBitsAndRows) {
  Rng rng(5);
  const uint32_t dim = 24;
  for (uint32_t n_bits = 1; n_bits <= kMaxLshBits; ++n_bits) {
    const LshParams params{n_bits, n_bits == 7 ? kMaxLshTables : 2 + 3 * n_bits, 99 + n_bits};
    const PlanesPtr planes = make_planes(params, dim);
    const uint32_t n = 150 + 13 * n_bits;
    std::vector<float> keys = normal(&rng, size_t{n} * dim);
    const std::vector<float> center = normal(&rng, dim, 0.3f);
    const uint32_t n_rows = n_bits == 1 ? 16 : n_bits;
    std::vector<float> q = normal(&rng, size_t{n_rows} * dim);
    for (uint32_t i = 0; i < n; i += 3) {  // some keys near some query
      for (uint32_t d = 0; d < dim; ++d) {
        keys[i * dim + d] = center[d] + q[(i % n_rows) * dim + d] + 0.4f * keys[i * dim + d];
      }
    }
    const KeyStore store(keys, dim);
    const Buffer tables = store.build(*planes, center.data());
    const std::vector<uint16_t> codes = codes_of(*planes, q);
    for (uint32_t r = 0; r < n_rows; ++r) {
      const auto row = reference_codes(*planes, &q[r * dim], nullptr);
      ASSERT_TRUE(std::equal(row.begin(), row.end(), &codes[r * params.n_tables])) << r;
    }
    uint64_t expected_read = 0;
    uint64_t ids_read = 0;
    const auto expected = brute_force(*planes, keys, center.data(), codes, n_rows, &expected_read);
    EXPECT_GT(expected.size(), 10u) << n_bits;
    EXPECT_EQ(look_up(*planes, tables, n, n, codes, n_rows, &ids_read), expected) << n_bits;
    EXPECT_EQ(ids_read, expected_read);
    EXPECT_EQ(look_up(*planes, tables, n, n, codes, n_rows), expected);
  }
}

TEST(Lookup, CutsLikeTablesOfThePrefix) {
  Rng rng(6);
  const uint32_t dim = 32;
  const PlanesPtr planes = make_planes({4, 12, 5}, dim);
  const std::vector<float> center = normal(&rng, dim, 0.2f);
  const KeyStore store(normal(&rng, 500 * dim), dim);
  const Buffer tables = store.build(*planes, center.data());
  const std::vector<uint16_t> codes = codes_of(*planes, normal(&rng, 5 * dim));
  for (const uint32_t n_live : {0u, 1u, 63u, 64u, 65u, 127u, 300u, 499u, 500u}) {
    const Buffer prefix = store.build_prefix(*planes, center.data(), n_live);
    EXPECT_EQ(look_up(*planes, tables, 500, n_live, codes, 5),
              look_up(*planes, prefix, n_live, n_live, codes, 5))
        << n_live;
  }
  EXPECT_TRUE(look_up(*planes, tables, 500, 500, codes, 0).empty());
}

TEST(Lookup, OfAFullRun) {
  Rng rng(7);
  const uint32_t dim = 8;
  const PlanesPtr planes = make_planes({6, 3, 5}, dim);
  for (const uint32_t n : {kMaxRunKeys - 1, kMaxRunKeys}) {
    const std::vector<float> keys = normal(&rng, size_t{n} * dim);
    const KeyStore store(keys, dim, CodecId::kF32, 1u << 20);
    const Buffer tables = store.build(*planes, nullptr);
    const std::vector<uint16_t> codes = codes_of(*planes, normal(&rng, 2 * dim));
    uint64_t expected_read = 0;
    uint64_t ids_read = 0;
    const auto expected = brute_force(*planes, keys, nullptr, codes, 2, &expected_read);
    EXPECT_EQ(look_up(*planes, tables, n, n, codes, 2, &ids_read), expected);
    EXPECT_EQ(ids_read, expected_read);
  }
}

TEST(Lookup, OfEqualKeys) {
  const uint32_t dim = 8;
  std::vector<float> q = {1, 2, -3, 4, -5, 6, 7, -8};
  for (const uint32_t n : {1u, 700u, kMaxRunKeys - 1, kMaxRunKeys}) {
    for (const float sign : {1.0f, -1.0f}) {
      std::vector<float> keys;
      for (uint32_t i = 0; i < n; ++i) {
        for (const float x : q) {
          keys.push_back(2 * sign * x);
        }
      }
      const PlanesPtr planes = make_planes({3, 257, 1}, dim);  // more meetings than a byte counts
      const KeyStore store(keys, dim);
      const Buffer tables = store.build(*planes, nullptr);
      const auto met = look_up(*planes, tables, n, n, codes_of(*planes, q), 1);
      if (sign < 0) {
        EXPECT_TRUE(met.empty());
      } else {
        ASSERT_EQ(met.size(), n);
        for (uint32_t i = 0; i < n; ++i) {
          ASSERT_EQ(met[i], (Met{i, 1}));
        }
      }
    }
  }
}

TEST(Lookup, OfKeysThatAreNotNumbersOrNothing) {
  Rng rng(8);
  const uint32_t dim = 16;
  const std::vector<float> center = normal(&rng, dim);
  std::vector<float> keys = normal(&rng, 100 * dim);
  const float odd[] = {kNan, kInfinity, -kInfinity, 3.4e38f};
  for (uint32_t i = 0; i < 4; ++i) {
    keys[(10 + i) * dim + i] = odd[i];  // of these only 3.4e38 has a direction
  }
  std::copy(center.begin(), center.end(), &keys[20 * dim]);  // zero once centred
  std::vector<float> tiny(dim, 1e-31f);
  const PlanesPtr planes = make_planes({4, 30, 2}, dim);
  const KeyStore store(keys, dim);
  const Buffer tables = store.build(*planes, center.data());
  std::vector<float> q = normal(&rng, 3 * dim);
  q[0] = kNan;
  std::copy(tiny.begin(), tiny.end(), &q[dim]);
  const std::vector<uint16_t> codes = codes_of(*planes, q);
  EXPECT_EQ(std::count(codes.begin(), codes.begin() + 60, 0), 60);
  uint64_t ids_read = 0;
  const auto expected = brute_force(*planes, keys, center.data(), codes, 3, &ids_read);
  EXPECT_EQ(look_up(*planes, tables, 100, 100, codes, 3), expected);
  for (const uint32_t id : {10u, 11u, 12u, 20u}) {
    const auto found = std::find_if(expected.begin(), expected.end(),
                                    [&](const Met& met) { return met.id == id; });
    ASSERT_NE(found, expected.end());
    EXPECT_EQ(found->rows & 3, 3u);
  }
}

TEST(Lookup, TrustsNoByteOfTheTables) {
  Rng rng(9);
  const uint32_t dim = 8;
  for (int round = 0; round < 60; ++round) {
    const LshParams params{static_cast<uint32_t>(1 + rng() % 8), 20, rng()};
    const PlanesPtr planes = make_planes(params, dim);
    const uint32_t n = round % 10 == 0 ? kMaxRunKeys : static_cast<uint32_t>(rng() % 900);
    const auto n_live = static_cast<uint32_t>(rng() % (n + 1));
    const size_t bytes = table_run_bytes(params, n);
    Buffer tables = make_buffer(bytes, round % 3 == 0 ? 0xff : 0);
    if (round % 3 != 0) {
      const KeyStore store(normal(&rng, size_t{n} * dim), dim);
      tables = store.build(*planes, nullptr);
      for (uint32_t i = 0; bytes > 0 && i < 1 + bytes / 50; ++i) {
        tables[rng() % bytes] = static_cast<std::byte>(rng());
      }
    }
    std::vector<uint16_t> codes(16 * params.n_tables);
    for (uint16_t& code : codes) {
      code = static_cast<uint16_t>(rng());  // not even of K bits
    }
    uint32_t after = 0;
    for (const Met& met : look_up(*planes, tables, n, n_live, codes, 16)) {
      ASSERT_TRUE(met.id < n_live && met.rows != 0 && (after == 0 || met.id >= after));
      after = met.id + 1;
    }
  }
}

// What the estimators divide by: over planes, keys are met as often as u says.
TEST(Probability, IsHowOftenKeysAreMet) {
  Rng rng(10);
  const uint32_t dim = 64;
  const std::vector<double> cosines = {-0.5, -0.2, 0.0, 0.2, 0.4, 0.6, 0.8, 0.95};
  const uint32_t n_rows = 16;
  const int n_seeds = 150;
  for (const auto& [n_bits, n_tables] : {std::pair{4u, 10u}, {8u, 40u}}) {
    std::vector<double> met(cosines.size());
    for (int seed = 0; seed < n_seeds; ++seed) {
      const LshParams params{n_bits, n_tables, static_cast<uint64_t>(seed)};
      const PlanesPtr planes = make_planes(params, dim);
      const std::vector<float> center = normal(&rng, dim);
      std::vector<float> q = normal(&rng, n_rows * dim);
      std::vector<float> keys;
      for (const double cosine : cosines) {
        for (uint32_t r = 0; r < n_rows; ++r) {
          // q and a direction at right angles to it, both of length 1, at the wanted angle.
          float* x = &q[r * dim];
          std::vector<float> y = normal(&rng, dim);
          const double xx = std::sqrt(std::inner_product(x, x + dim, x, 0.0));
          const double xy = std::inner_product(x, x + dim, y.begin(), 0.0) / xx;
          double yy = 0;
          for (uint32_t d = 0; d < dim; ++d) {
            y[d] -= static_cast<float>(xy * x[d] / xx);
            yy += y[d] * y[d];
          }
          for (uint32_t d = 0; d < dim; ++d) {
            const double key =
                cosine * x[d] / xx + std::sqrt(1 - cosine * cosine) * y[d] / std::sqrt(yy);
            keys.push_back(static_cast<float>(3 * key) + center[d]);
          }
        }
      }
      const KeyStore store(keys, dim);
      const Buffer tables = store.build(*planes, center.data());
      for (const Met& m :
           look_up(*planes, tables, store.n(), store.n(), codes_of(*planes, q), n_rows)) {
        met[m.id / n_rows] += m.rows >> (m.id % n_rows) & 1;
      }
    }
    const double n = n_rows * n_seeds;
    for (size_t i = 0; i < cosines.size(); ++i) {
      const double u = inclusion_probability(cosines[i], {n_bits, n_tables, 0});
      EXPECT_NEAR(met[i], n * u, 3 * std::sqrt(n * u * (1 - u)) + 0.5) << cosines[i];
    }
  }
}

// P(at least two of L), summed term by term.
long double binomial_tail(long double c, uint32_t n_tables) {
  long double sum = 0;
  for (uint32_t j = 2; j <= n_tables; ++j) {
    const long double choose =
        std::lgamma(n_tables + 1.0L) - std::lgamma(j + 1.0L) - std::lgamma(n_tables - j + 1.0L);
    if (c < 1) {
      sum += std::exp(choose + j * std::log(c) + (n_tables - j) * std::log1p(-c));
    }
  }
  return c < 1 ? sum : 1.0L;
}

TEST(Probability, IsAccurateForEveryShape) {
  for (const uint32_t n_bits : {1u, 2u, 7u, 8u, 9u, 10u, 11u, 15u}) {
    for (const uint32_t n_tables : {2u, 3u, 5u, 40u, 75u, 150u, 300u, 512u}) {
      double last = 0;
      for (int i = 0; i <= 100; ++i) {
        const float cosine = i == 100 ? 1.0f : static_cast<float>(-1.0 + i * 0.02);
        const long double p = std::acos(-static_cast<long double>(cosine)) / std::acos(-1.0L);
        const long double u = binomial_tail(std::pow(p, static_cast<int>(n_bits)), n_tables);
        const double expected = static_cast<double>(std::max<long double>(u, kMinInclusion));
        const double actual = inclusion_probability(cosine, {n_bits, n_tables, 0});
        EXPECT_NEAR(actual / expected, 1.0, 1e-8) << n_bits << " " << n_tables << " " << cosine;
        EXPECT_GE(actual, last * (1 - 1e-12));
        EXPECT_LE(actual, 1.0);
        last = actual;
      }
      EXPECT_EQ(last, 1.0);
      EXPECT_NEAR(collision_probability(0.5, n_bits), std::pow(2.0 / 3, n_bits), 1e-12);
    }
  }
}

TEST(Probability, OfAnyNumberIsOne) {
  const LshParams params{10, 150, 0};
  EXPECT_EQ(inclusion_probability(1.5, params), 1.0);
  EXPECT_EQ(inclusion_probability(kInfinity, params), 1.0);
  EXPECT_EQ(inclusion_probability(-1.0, params), kMinInclusion);
  EXPECT_EQ(inclusion_probability(-kInfinity, params), kMinInclusion);
  EXPECT_EQ(inclusion_probability(kNan, params), inclusion_probability(0.0, params));
  float x[] = {1.5f, kInfinity, -1.0f, -kInfinity, kNan, 0.0f};
  log_inclusion(x, 6, params, x);
  EXPECT_NEAR(x[0], 0.0f, 1e-6f);
  EXPECT_EQ(x[1], x[0]);
  EXPECT_NEAR(x[2], std::log(kMinInclusion), 1e-4);
  EXPECT_EQ(x[3], x[2]);
  EXPECT_EQ(x[4], x[5]);
  float y[] = {2.0f, 0.0f, -1.0f};
  inverse_inclusion(y, 3, params, y);
  EXPECT_NEAR(y[0], 1.0f, 1e-6f);
  EXPECT_NEAR(y[1] * inclusion_probability(0.0, params), 1.0, 2e-5);
  EXPECT_NEAR(y[2] * kMinInclusion, 1.0, 1e-5);
}

TEST(Probability, OfVectorsIsThatOfDoubles) {
  Rng rng(11);
  double worst = 0;
  for (const uint32_t n_bits : {1u, 2u, 7u, 8u, 9u, 10u, 11u, 15u}) {
    for (const uint32_t n_tables : {2u, 3u, 5u, 40u, 75u, 150u, 300u, 512u}) {
      std::vector<float> x = {-1.0f, std::nextafter(-1.0f, 0.0f), -0.0f, 0.0f,
                              1.0f,  std::nextafter(1.0f, 0.0f)};
      std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
      while (x.size() < 397) {
        const float y = uniform(rng);
        x.push_back(x.size() % 3 == 0 ? y : x.size() % 3 == 1 ? 1 - y * y * y * y : y * y * y);
      }
      const LshParams params{n_bits, n_tables, 0};
      InclusionArgs args = {n_bits, n_tables, static_cast<float>(kMinInclusion), 0};
      std::vector<float> scalar(x.size());
      kLshScalar.inclusion(&args, x.data(), x.size(), scalar.data());
      args.inverse = 1;
      std::vector<float> inverse(x.size());
      kLshScalar.inclusion(&args, x.data(), x.size(), inverse.data());
      for (size_t i = 0; i < x.size(); ++i) {
        const double u = inclusion_probability(x[i], params);
        worst = std::max(worst, std::fabs(scalar[i] - std::log(u)));
        EXPECT_NEAR(scalar[i], std::log(u), 2e-5) << n_bits << " " << n_tables << " " << x[i];
        EXPECT_NEAR(inverse[i] * u, 1.0, 2e-5) << n_bits << " " << n_tables << " " << x[i];
      }
      for (const LshKernels* kernels : available_lsh_kernels()) {
        for (const uint32_t form : {0u, 1u}) {
          args.inverse = form;
          std::vector<float> out(x.size() + 1, 7.0f);
          kernels->inclusion(&args, x.data(), x.size(), out.data());
          const std::vector<float>& expected = form == 0 ? scalar : inverse;
          EXPECT_EQ(std::memcmp(out.data(), expected.data(), x.size() * sizeof(float)), 0)
              << kernels->name;
          EXPECT_EQ(out.back(), 7.0f);
        }
      }
    }
  }
  RecordProperty("worst_error", std::to_string(worst));
}

}  // namespace
}  // namespace kvm::hash_index
