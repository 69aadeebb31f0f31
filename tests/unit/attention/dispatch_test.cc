// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "attention/kernel_table.h"

namespace kvm::attention {
namespace {

TEST(Dispatch, TablesAreOrderedAndNamed) {
  const auto tables = available_tables();
  ASSERT_FALSE(tables.empty());
  EXPECT_STREQ(tables[0]->name, "scalar");
  for (const KernelTable* table : tables) {
    EXPECT_EQ(find_table(table->name), table);
    EXPECT_NE(table->exact, nullptr);
    EXPECT_EQ(table->has_bf16_dot, std::string(table->name) == "avx512bf16");
  }
  EXPECT_EQ(find_table("sse9"), nullptr);
}

// The choice is made once per process: ctest starts this program once per name, and once without.
TEST(Dispatch, ForcedTableIsActive) {
  const char* forced = std::getenv("KVM_FORCE_ISA");
  const KernelTable* wanted = forced != nullptr ? find_table(forced) : nullptr;
  if (wanted == nullptr) {
    wanted = available_tables().back();
  }
  EXPECT_STREQ(active_table().name, wanted->name);
}

}  // namespace
}  // namespace kvm::attention
