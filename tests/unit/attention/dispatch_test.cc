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

TEST(Dispatch, AForcedTableThatIsNotThereIsNamedWithThoseThatAre) {
  const char* forced = std::getenv("KVM_FORCE_ISA");
  const std::string before = forced == nullptr ? "" : forced;
  ::setenv("KVM_FORCE_ISA", "sse9", 1);
  const Status status = check_forced_isa();
  EXPECT_EQ(status.code(), KVM_ERR_INVALID);
  std::string names = "scalar";
  for (const KernelTable* table : available_tables().subspan(1)) {
    names += std::string(", ") + table->name;
  }
  EXPECT_EQ(status.message(), "KVM_FORCE_ISA is 'sse9'; this machine can run " + names);
  for (const KernelTable* table : available_tables()) {
    ::setenv("KVM_FORCE_ISA", table->name, 1);
    EXPECT_TRUE(check_forced_isa().is_ok()) << table->name;
  }
  ::setenv("KVM_FORCE_ISA", before.c_str(), 1);
  EXPECT_TRUE(before.empty() ? check_forced_isa().is_ok() : true) << "empty is unset";
}

}  // namespace
}  // namespace kvm::attention
