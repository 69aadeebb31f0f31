// SPDX-License-Identifier: Apache-2.0
// A row's bits do not depend on the rows that are solved with it: docs/kernels.md, "The same bits".
// Every table is held to it.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "attention/exact/layout.h"
#include "codecs/codec.h"
#include "tests/common/environment.h"
#include "tests/unit/attention/testbed.h"

namespace kvm::attention::testing {
namespace {

constexpr CodecId kCodecs[] = {CodecId::kF32,      CodecId::kF16,        CodecId::kBf16,
                               CodecId::kI8,       CodecId::kF8,         codecs::kI8Channel,
                               codecs::kI4,        codecs::kI4Channel,   codecs::kI4Centred,
                               codecs::kI3,        codecs::kI3Channel,   codecs::kGear3,
                               codecs::kI2Channel, codecs::kI2Centred,   codecs::kI2Balanced,
                               codecs::kGear4,     codecs::kGear2Channel};

// What is written for query tokens [first, first + count), every NaN as the same one.
std::vector<uint32_t> bits_of(const Case& c, uint32_t first, uint32_t count) {
  const Problem& p = c.problem();
  std::vector<float> all;
  for (uint32_t row = first * p.group; row < (first + count) * p.group; ++row) {
    const auto o = c.o.begin() + static_cast<ptrdiff_t>(size_t{row} * p.dim_v);
    all.insert(all.end(), o, o + p.dim_v);
    all.push_back(c.lse[row]);
  }
  for (float& x : all) {
    x = std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : x;
  }
  std::vector<uint32_t> bits(all.size());
  std::memcpy(bits.data(), all.data(), all.size() * sizeof(float));
  return bits;
}

// Solves the query tokens of a case in items of their own and compares.
class Items {
 public:
  Items(Case& c, const KernelTable* table)
      : c_(c), table_(table), n_(c.problem().n_query), group_(c.problem().group) {
    c.wants_column_sums = false;
    c.run(table);
    whole_ = bits_of(c, 0, n_);
    is_tree_ = c.problem().visible.tree != nullptr;
  }

  // Items of fewer than 24 rows: of one query token, of random numbers of them, of all.
  void check_few_rows() {
    const uint32_t most = std::min(n_, (kBlockedRows - 1) / group_);
    if (most == 0) {
      return;  // a single query token has as many
    }
    if (is_tree_) {
      solve(0, most);
      const std::vector<uint32_t> expected = bits_of(c_, 0, most);
      for (uint32_t count = 1; count < most; ++count) {
        solve(0, count);
        expect(expected, 0, count);
      }
      return;
    }
    for (uint32_t i = 0; i < n_; ++i) {
      solve(i, 1);
    }
    const std::vector<uint32_t> alone = bits_of(c_, 0, n_);
    if (n_ <= most) {
      ASSERT_EQ(whole_, alone) << table_->name << ", all together";
    }
    for (int round = 0; round < 3; ++round) {
      for (uint32_t first = 0, count = 0; first < n_; first += count) {
        count = std::min(1 + pick(most), n_ - first);
        solve(first, count);
        expect(alone, first, count);
      }
    }
  }

  // Items of 24 rows and more, and problems of any number of rows that belong to one.
  void check_many_rows() {
    const uint32_t least = (kBlockedRows + group_ - 1) / group_;
    if (n_ < least) {
      return;
    }
    for (int round = 0; round < 4; ++round) {
      const bool is_part = round % 2 == 1;
      for (uint32_t first = 0, count = 0; first < n_; first += count) {
        count = (is_part ? 1u : least) + pick(2 * least);
        // What is left over goes with the last.
        count = first + count + least > n_ ? n_ - first : count;
        if (is_tree_) {
          count = std::max(count, is_part ? 1u : least);
          solve(0, count, is_part ? n_ * group_ : 0);
          expect(whole_, 0, count);
          continue;
        }
        solve(first, count, is_part ? n_ * group_ : 0);
        expect(whole_, first, count);
      }
    }
  }

 private:
  uint32_t pick(uint32_t n) { return static_cast<uint32_t>(c_.random()() % n); }
  void solve(uint32_t first, uint32_t count, uint32_t item_rows = 0) {
    c_.run_item(table_, first, count, item_rows);
  }
  void expect(const std::vector<uint32_t>& expected, uint32_t first, uint32_t count) {
    const size_t each = expected.size() == 0 ? 0 : size_t{group_} * (c_.problem().dim_v + 1);
    const std::vector<uint32_t> part(
        expected.begin() + static_cast<ptrdiff_t>(first * each),
        expected.begin() + static_cast<ptrdiff_t>((first + count) * each));
    const std::vector<uint32_t> got = bits_of(c_, first, count);
    for (size_t i = 0; i < part.size(); ++i) {
      ASSERT_EQ(got[i], part[i]) << table_->name << ", " << count << " query tokens from " << first
                                 << ", row " << i / (each / group_) << ", value "
                                 << i % (each / group_);
    }
  }

  Case& c_;
  const KernelTable* table_;
  uint32_t n_;
  uint32_t group_;
  bool is_tree_ = false;
  std::vector<uint32_t> whole_;
};

// Stops at the first difference.
void check(Case& c) {
  for (const KernelTable* table : available_tables()) {
    Items items(c, table);
    items.check_few_rows();
    if (::testing::Test::HasFailure())
      return;
    items.check_many_rows();
    if (::testing::Test::HasFailure())
      return;
  }
}

TEST(Batch, DtypesDimsAndGroups) {
  uint64_t seed = 0;
  for (const uint32_t dim : {64u, 80u, 96u, 128u, 256u}) {
    for (const uint32_t group : {1u, 4u, 7u}) {
      for (const CodecId codec : kCodecs) {
        SCOPED_TRACE("dim " + std::to_string(dim) + ", group " + std::to_string(group) + ", " +
                     codecs::codec_of(codec).name);
        ++seed;
        if ((seed + seed / std::size(kCodecs)) % 2 > kvm::testing::by_day(0, 1)) {
          continue;
        }
        const uint32_t n_query = seed % 2 == 0 ? 23 / group : 30 + static_cast<uint32_t>(seed % 11);
        Case c(Shape{.n_query = n_query,
                     .group = group,
                     .dim_k = dim,
                     .dim_v = seed % 3 == 0 ? 264 - dim : dim,
                     .n_tokens = 90 + seed % 200,
                     .dtype_q = seed % 5 == 4 ? Dtype::kF32 : Dtype::kBf16},
               seed);
        for (TokenKind& kind : c.kinds) {
          kind = {codec, codec, 0};
        }
        c.store(static_cast<int>(seed % 4));
        check(c);
        if (HasFailure())
          return;
      }
    }
  }
}

// Tree rows that see tokens of later rows cannot be an item without those.
void forget_later_rows(Case& c) {
  const Visibility& v = c.problem().visible;
  auto* words = const_cast<uint64_t*>(v.tree);
  for (uint32_t i = 0; v.tree != nullptr && i < c.problem().n_query; ++i) {
    for (uint32_t j = i + 1; j < v.tree_stride_words * 64; ++j) {
      words[uint64_t{i} * v.tree_stride_words + j / 64] &= ~(uint64_t{1} << (j % 64));
    }
  }
}

TEST(Batch, RandomProblems) {
  for (uint64_t seed = 5000; seed < 5000 + kvm::testing::by_day(20, 60); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    auto c = random_case(seed);
    forget_later_rows(*c);
    check(*c);
    if (HasFailure())
      return;
  }
}

// Kinds that take turns within 16 tokens, the first of which a window hides from later rows.
TEST(Batch, KindsThatTakeTurns) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Case c(Shape{.n_query = seed % 2 == 0 ? 5u : 60u,
                 .group = 4,
                 .dim_k = 64,
                 .dim_v = 64,
                 .n_tokens = 150},
           seed);
    c.add_transform(false, RotationLayout::kInterleaved, false);
    c.add_transform(true, RotationLayout::kHalfSplit, true);
    for (TokenKind& kind : c.kinds) {
      kind = {kCodecs[c.random()() % std::size(kCodecs)],
              kCodecs[c.random()() % std::size(kCodecs)], static_cast<uint16_t>(c.random()() % 2)};
    }
    c.problem().visible.window = 1 + c.random()() % 70;
    c.problem().visible.sinks = c.random()() % 20;
    c.store(0);
    check(c);
    if (HasFailure())
      return;
  }
}

// Chunks of both paths, some of which windows and ranges hide from some rows or from all.
TEST(Batch, LongContexts) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Case c(Shape{.n_query = seed % 3 == 0 ? 70u : 5u,
                 .group = seed % 2 == 0 ? 4u : 3u,
                 .dim_k = 16,
                 .dim_v = 16,
                 .n_tokens = 9000 + 3001 * (seed % 4),
                 .first_position = seed % 4 == 1 ? 777u : 0u,
                 .q_size = 3.0f},
           seed);
    const CodecId codec = kCodecs[seed % std::size(kCodecs)];
    for (TokenKind& kind : c.kinds) {
      kind = {codec, codec, 0};
    }
    Visibility& v = c.problem().visible;
    if (seed % 4 == 2) {
      v.window = 1500;
      v.sinks = 5;
    }
    if (seed % 4 == 3) {
      c.use_ranges(true, 3);
    }
    if (seed % 5 == 0) {
      c.use_sinks();
    }
    // Edges of chunks fall between the rows.
    v.query_position = seed % 2 == 0 ? 8190 : c.end_position() - c.problem().n_query;
    c.store(2);
    check(c);
    if (HasFailure())
      return;
  }
}

// Queries with one channel that is up to 1e5 times the others: their words would not be near
// enough, and they take another way beside rows that do not.
TEST(Batch, OutliersOfQueries) {
  for (uint64_t seed = 1; seed <= kvm::testing::by_day(12, 24); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const uint32_t dim = seed % 3 == 0 ? 80 : 128;
    const uint32_t group = seed % 4 == 0 ? 7 : static_cast<uint32_t>(seed % 4);
    Case c(Shape{.n_query = seed % 2 == 0 ? 23 / group : 40,
                 .group = group,
                 .dim_k = dim,
                 .dim_v = 64,
                 .n_tokens = 100 + seed,
                 .q_size = 1e-2f},
           seed);
    for (TokenKind& kind : c.kinds) {
      kind = {CodecId::kI8, seed % 2 == 0 ? CodecId::kI8 : CodecId::kBf16, 0};
    }
    std::vector<float>& q = c.queries();
    for (uint32_t row = 0; row < c.problem().n_query * group; ++row) {
      const auto at = size_t{row} * dim + c.random()() % dim;
      q[at] = c.random()() % 3 == 0 ? (c.random()() % 2 == 0 ? 1024.0f : 16.0f) : q[at];
      if (c.random()() % 8 == 0) {
        std::fill_n(q.begin() + static_cast<ptrdiff_t>(size_t{row} * dim), dim, 0.0f);
      }
    }
    c.store(0);
    check(c);
    if (HasFailure())
      return;
  }
}

// Rows that are no numbers, by their query or by a token that only some see, beside others; log
// weights of -inf; stored rows of all sizes.
TEST(Batch, NotFiniteRowsBeside) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (uint64_t seed = 1; seed <= kvm::testing::by_day(20, 40); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const CodecId codec = kCodecs[seed % std::size(kCodecs)];
    Case c(Shape{.n_query = seed % 2 == 0 ? 7u : 40u,
                 .group = seed % 3 == 0 ? 1u : 3u,
                 .dim_k = 64,
                 .dim_v = 64,
                 .n_tokens = 130 + seed,
                 .uneven = seed % 4 == 0},
           seed);
    for (TokenKind& kind : c.kinds) {
      kind = {codec, codec, 0};
    }
    if (seed % 3 == 0) {
      for (size_t t = 0; t < c.kinds.size(); ++t) {
        c.log_weights.push_back(c.random()() % 4 == 0 ? -kInf : 0.5f);
      }
    }
    c.problem().visible.window = seed % 5 == 0 ? 40 : 0;
    for (int i = 0; i < 2; ++i) {
      c.queries()[c.random()() % c.queries().size()] = seed % 2 == 0 ? -kInf : std::nanf("");
    }
    c.store(1);
    // One of the last tokens, which only later rows see.
    const KvRun& run = c.problem().runs.back();
    spoil_row(seed % 4 < 2 ? run.k : run.v, 64, c.problem().head, run.slot + run.n_tokens / 2,
              static_cast<uint32_t>(seed), kInf);
    check(c);
    if (HasFailure())
      return;
  }
}

// Logits that overflow and logits that are all but equal, weights that vanish.
TEST(Batch, LogitsOfAllSizes) {
  for (uint64_t seed = 1; seed <= 15; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    constexpr float kSizes[] = {1e-20f, 0.0f, 30.0f, 1e4f, 1e30f};
    Case c(Shape{.n_query = seed % 2 == 0 ? 5u : 33u,
                 .group = 4,
                 .dim_k = 128,
                 .dim_v = 128,
                 .n_tokens = 200,
                 .dtype_q = seed % 3 == 0 ? Dtype::kF32 : Dtype::kBf16,
                 .q_size = kSizes[seed % 5],
                 .uneven = seed % 3 == 1},
           seed);
    const CodecId codec = kCodecs[(seed / 3) % std::size(kCodecs)];
    for (TokenKind& kind : c.kinds) {
      kind = {codec, codec, 0};
    }
    c.problem().softcap = seed % 4 == 0 ? 20.0f : 0.0f;
    c.store(0);
    check(c);
    if (HasFailure())
      return;
  }
}

}  // namespace
}  // namespace kvm::attention::testing
