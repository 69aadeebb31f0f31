// SPDX-License-Identifier: Apache-2.0
#include "daemon/prefix_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvm::daemon {
namespace {

constexpr uint64_t kBytes = 1 << 16;

TEST(PrefixMemory, CannotBeWrittenByWhoIsGivenIt) {
  PrefixMemory memory;
  const std::span<std::byte> table = memory.make(1000, kBytes).value();
  ASSERT_EQ(table.size(), kBytes);
  const ipc::Fd fd = memory.share(1000).value();
  EXPECT_EQ(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0), MAP_FAILED);
  EXPECT_EQ(::pwrite(fd.get(), "x", 1, 0), -1);
  EXPECT_EQ(::ftruncate(fd.get(), 0), -1);
  EXPECT_EQ(::ftruncate(fd.get(), 2 * kBytes), -1);
  const ipc::Mapping mapping =
      ipc::map_shared_memory(fd, kBytes, ipc::PeerAccess::kReadOnly).value();
  EXPECT_EQ(::mprotect(mapping.data(), kBytes, PROT_READ | PROT_WRITE), -1);
  // What the service writes is seen.
  table[5] = std::byte{7};
  EXPECT_EQ(mapping.data()[5], 7);
}

TEST(PrefixMemory, IsEachUsersOwn) {
  PrefixMemory memory;
  memory.make(1, kBytes).value()[0] = std::byte{1};
  memory.make(2, kBytes).value()[0] = std::byte{2};
  for (const uint32_t uid : {1u, 2u}) {
    const ipc::Mapping mapping =
        ipc::map_shared_memory(memory.share(uid).value(), kBytes, ipc::PeerAccess::kReadOnly)
            .value();
    EXPECT_EQ(mapping.data()[0], uid);
  }
}

}  // namespace
}  // namespace kvm::daemon
