// SPDX-License-Identifier: Apache-2.0
// Sealed memory: what a client can and cannot do with a descriptor, and what it refuses.
#include "ipc/memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

namespace kvm::ipc {
namespace {

TEST(SharedMemory, BothSidesSeeTheSameBytes) {
  auto memory = create_shared_memory("test", 10000, PeerAccess::kReadWrite);
  ASSERT_TRUE(memory.is_ok());
  EXPECT_EQ(memory.value().mapping.size_bytes(), 12288u);
  auto mapping = map_shared_memory(memory.value().fd, 10000, PeerAccess::kReadWrite);
  ASSERT_TRUE(mapping.is_ok());
  mapping.value().data()[9999] = 42;
  EXPECT_EQ(memory.value().mapping.data()[9999], 42);
}

TEST(SharedMemory, DiscardedContentsAreGoneForAllWhoMapIt) {
  constexpr uint64_t kBytes = 1 << 20;
  auto made = create_shared_memory("test", kBytes, PeerAccess::kReadWrite);
  ASSERT_TRUE(made.is_ok());
  auto peer = map_shared_memory(made.value().fd, kBytes, PeerAccess::kReadWrite);
  ASSERT_TRUE(peer.is_ok());
  std::memset(peer.value().data(), 7, kBytes);
  struct stat facts {};
  ASSERT_EQ(::fstat(made.value().fd.get(), &facts), 0);
  EXPECT_GE(static_cast<uint64_t>(facts.st_blocks) * 512, kBytes);
  made.value().mapping.discard_contents();
  ASSERT_EQ(::fstat(made.value().fd.get(), &facts), 0);
  EXPECT_EQ(facts.st_blocks, 0);
  EXPECT_EQ(peer.value().data()[kBytes - 1], 0) << "still mapped";
}

TEST(SharedMemory, SizeIsFinal) {
  auto memory = create_shared_memory("test", 8192, PeerAccess::kReadWrite);
  ASSERT_TRUE(memory.is_ok());
  EXPECT_NE(::ftruncate(memory.value().fd.get(), 4096), 0);
  EXPECT_NE(::ftruncate(memory.value().fd.get(), 16384), 0);
  EXPECT_NE(::fcntl(memory.value().fd.get(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

TEST(SharedMemory, ReadOnlyMemoryCannotBeWrittenByTheReceiver) {
  auto memory = create_shared_memory("test", 4096, PeerAccess::kReadOnly);
  ASSERT_TRUE(memory.is_ok());
  const int fd = memory.value().fd.get();
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  const char byte = 1;
  EXPECT_LT(::pwrite(fd, &byte, 1, 0), 0);
  EXPECT_NE(::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
  auto mapping = map_shared_memory(memory.value().fd, 4096, PeerAccess::kReadOnly);
  ASSERT_TRUE(mapping.is_ok());
  EXPECT_NE(::mprotect(mapping.value().data(), 4096, PROT_READ | PROT_WRITE), 0);
  memory.value().mapping.data()[7] = 9;
  EXPECT_EQ(mapping.value().data()[7], 9);
}

TEST(SharedMemory, ClientRefusesWhatIsNotSealedOrTooSmall) {
  Fd unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), 4096), 0);
  EXPECT_EQ(map_shared_memory(unsealed, 4096, PeerAccess::kReadWrite).status().code(),
            KVM_ERR_PROTOCOL);
  auto memory = create_shared_memory("test", 4096, PeerAccess::kReadWrite);
  ASSERT_TRUE(memory.is_ok());
  EXPECT_EQ(map_shared_memory(memory.value().fd, 4097, PeerAccess::kReadWrite).status().code(),
            KVM_ERR_PROTOCOL);
}

#if KVM_CHECK >= 2
TEST(SharedMemory, InaccessiblePagesStandAroundIt) {
  auto memory = create_shared_memory("test", 4096, PeerAccess::kReadWrite);
  ASSERT_TRUE(memory.is_ok());
  auto peer = map_shared_memory(memory.value().fd, 4096, PeerAccess::kReadOnly);
  ASSERT_TRUE(peer.is_ok());
  for (const Mapping* mapping : {&memory.value().mapping, &peer.value()}) {
    const volatile uint8_t* data = mapping->data();
    EXPECT_DEATH((void)data[-1], "");
    EXPECT_DEATH((void)data[4096], "");
    EXPECT_EQ(data[4095], 0);
  }
}
#endif

TEST(SharedMemory, ImpossibleSizesAreRefused) {
  EXPECT_EQ(create_shared_memory("test", 0, PeerAccess::kReadWrite).status().code(),
            KVM_ERR_NO_MEMORY);
  EXPECT_EQ(create_shared_memory("test", UINT64_MAX, PeerAccess::kReadWrite).status().code(),
            KVM_ERR_NO_MEMORY);
}

}  // namespace
}  // namespace kvm::ipc
