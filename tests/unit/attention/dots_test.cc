// SPDX-License-Identifier: Apache-2.0
// Dot products of one row with many, against long double; and the same bits from every table.
#include "attention/dots/dots.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "attention/kernel_table.h"

namespace kvm::attention {
namespace {

using Dots = std::array<float, kDotRows>;

TEST(Dots, AreThoseOfTheRowsAndTheSameInEveryTable) {
  std::mt19937_64 random(1);
  for (const uint32_t dim : {8u, 64u, 80u, 128u, 576u}) {
    std::normal_distribution<float> normal(0, 3);
    std::vector<float> columns(dim * kDotRows);
    std::vector<float> row(dim);
    for (std::vector<float>* values : {&columns, &row}) {
      for (float& value : *values) {
        value = normal(random);
      }
    }
    Dots first{};
    for (const KernelTable* table : available_tables()) {
      SCOPED_TRACE(table->name + std::string(", dim ") + std::to_string(dim));
      Dots dots{};
      table->dots->dots(columns.data(), row.data(), dim, dots.data());
      for (uint32_t i = 0; i < kDotRows; ++i) {
        long double sum = 0;
        long double size = 0;
        for (uint32_t channel = 0; channel < dim; ++channel) {
          const auto product = static_cast<long double>(columns[channel * kDotRows + i]) *
                               static_cast<long double>(row[channel]);
          sum += product;
          size += std::fabs(product);
        }
        // Of each product and of the dim / 8 + 3 sums above it, half a unit in the last place.
        const long double bound = size * (dim / 8 + 4) * 0x1p-24L;
        EXPECT_LE(std::fabs(static_cast<long double>(dots[i]) - sum), bound) << i;
      }
      if (table == available_tables().front()) {
        first = dots;
      }
      EXPECT_EQ(std::memcmp(dots.data(), first.data(), sizeof dots), 0);
    }
  }
}

// A row without a number spoils its own product, and no other.
TEST(Dots, NoNumberStaysInItsRow) {
  constexpr uint32_t kDim = 16;
  std::vector<float> columns(kDim * kDotRows, 0.5f);
  const std::vector<float> row(kDim, 2.0f);
  columns[3 * kDotRows + 17] = NAN;
  for (const KernelTable* table : available_tables()) {
    Dots dots{};
    table->dots->dots(columns.data(), row.data(), kDim, dots.data());
    for (uint32_t i = 0; i < kDotRows; ++i) {
      EXPECT_EQ(std::isnan(dots[i]), i == 17) << table->name << ", row " << i;
      EXPECT_TRUE(i == 17 || dots[i] == kDim) << table->name << ", row " << i;
    }
  }
}

}  // namespace
}  // namespace kvm::attention
