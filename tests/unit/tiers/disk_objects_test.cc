// SPDX-License-Identifier: Apache-2.0
// Objects of the disk tier in real directories: what a start finds, what it says of what is missing
// or damaged, and what it leaves alone. tests/sim/disk_objects_test.cc has crashes.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/common/temporary_directory.h"
#include "tests/unit/tiers/object_rig.h"
#include "tiers/disk/crc32c.h"
#include "tiers/disk/disk_format.h"
#include "tiers/disk/disk_tier.h"
#include "tiers/disk/manifest.h"
#include "tiers/object_store.h"

namespace kvm::testing {
namespace {

size_t n_files(const TemporaryDirectory& directory, const std::string& suffix) {
  size_t n = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
    n += entry.path().string().ends_with(suffix) ? 1 : 0;
  }
  return n;
}

TEST(DiskObjects, AreThereWhenTheTierIsOpenedAgain) {
  const TemporaryDirectory directory;
  ObjectRig store({directory.path()});
  ASSERT_TRUE(store.open().is_ok());
  ASSERT_TRUE(store.put("one", 1, 3).is_ok());
  ASSERT_TRUE(store.put("two", 10, 0, 0).is_ok());
  ASSERT_TRUE(store.put("three", 20, 30, 700'000).is_ok()) << "of many chunks and segments";
  ASSERT_TRUE(store.put("one", 40, 2).is_ok()) << "in the place of the first";
  EXPECT_EQ(store.remove("four").code(), KVM_ERR_NOT_FOUND);
  ASSERT_TRUE(store.put("four", 50, 1).is_ok());
  ASSERT_TRUE(store.remove("four").is_ok());
  EXPECT_EQ(store.check("four", 0, 0).code(), KVM_ERR_NOT_FOUND);
  const uint64_t used = store.tier->used_bytes();
  for (int i = 0; i < 3; ++i) {
    store.tier.reset();
    ASSERT_TRUE(store.open().is_ok());
    EXPECT_EQ(store.keys(), (std::vector<std::string>{"one", "three", "two"}));
    EXPECT_EQ(store.tier->objects()->list("one", 1)[0].label, "label of three");
    EXPECT_EQ(store.tier->objects()->recovery().n_objects, 3u);
    EXPECT_EQ(store.tier->objects()->recovery().n_lost_objects, 0u);
    EXPECT_EQ(store.tier->objects()->recovery().n_pages, 32u);
    EXPECT_EQ(store.tier->used_bytes(), used);
    EXPECT_TRUE(store.check("one", 40, 2).is_ok());
    EXPECT_TRUE(store.check("two", 10, 0, 0).is_ok());
    EXPECT_TRUE(store.check("three", 20, 30, 700'000).is_ok());
    EXPECT_LE(store.tier->stats().physical_bytes, store.tier->stats().capacity_bytes);
  }
  for (const char* key : {"one", "two", "three"}) {
    ASSERT_TRUE(store.remove(key).is_ok());
  }
  EXPECT_EQ(store.tier->used_bytes(), 0u);
  store.tier.reset();
  EXPECT_EQ(n_files(directory, ".segment"), 0u);
  EXPECT_EQ(n_files(directory, ".manifest"), 0u);
}

TEST(DiskObjects, OfManyChangesAreInAListThatIsBegunAnew) {
  const TemporaryDirectory one;
  const TemporaryDirectory two;
  ObjectRig store({one.path(), two.path()});
  ASSERT_TRUE(store.open().is_ok());
  for (uint32_t i = 0; i < 300; ++i) {
    ASSERT_TRUE(store.put("key " + std::to_string(i % 7), i, i % 3).is_ok()) << i;
  }
  EXPECT_EQ(n_files(one, ".manifest"), 1u) << "of the last list, a copy";
  EXPECT_EQ(n_files(two, ".manifest"), 1u);
  store.tier.reset();
  ASSERT_TRUE(store.open().is_ok());
  for (uint32_t i = 293; i < 300; ++i) {
    EXPECT_TRUE(store.check("key " + std::to_string(i % 7), i, i % 3).is_ok()) << i;
  }
  // Either copy is enough, and the directories may be named in any order.
  store.tier.reset();
  for (const auto& entry : std::filesystem::directory_iterator(one.path())) {
    if (entry.path().string().ends_with(".manifest")) {
      std::filesystem::resize_file(entry.path(), 4096);
    }
  }
  ObjectRig swapped({two.path(), one.path()});
  ASSERT_TRUE(swapped.open().is_ok());
  for (uint32_t i = 293; i < 300; ++i) {
    EXPECT_TRUE(swapped.check("key " + std::to_string(i % 7), i, i % 3).is_ok()) << i;
  }
  ASSERT_TRUE(swapped.put("another", 7, 1).is_ok());
}

// Each byte of what a start reads, changed in turn: an object is as it was, or is reported, and so
// is a list that cannot be read. Nothing else comes of it.
TEST(DiskObjects, WithAByteChangedAreAsTheyWereOrReported) {
  const TemporaryDirectory directory;
  {
    ObjectRig store({directory.path()});
    ASSERT_TRUE(store.open().is_ok());
    ASSERT_TRUE(store.put("one", 1, 14, 3000).is_ok()) << "more than a segment: one has a table";
    ASSERT_TRUE(store.put("two", 30, 2, 300).is_ok());
  }
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
    if (!entry.path().string().ends_with(".lock")) {
      files.push_back(entry.path().string());
    }
  }
  ASSERT_GE(files.size(), 4u);
  uint32_t n_reported = 0;
  uint32_t n_refused = 0;
  for (const std::string& file : files) {
    const uint64_t size = std::filesystem::file_size(file);
    const auto flip = [&](uint64_t at) {
      std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
      stream.seekg(static_cast<std::streamoff>(at));
      const int byte = stream.get();
      stream.seekp(static_cast<std::streamoff>(at));
      stream.put(static_cast<char>(byte ^ 0x41));
    };
    const bool is_manifest = file.ends_with(".manifest");
    const bool is_mark = file.ends_with("kvm.set");
    const bool is_segment = file.ends_with(".segment");
    // All of headers and tables, and some of the rest.
    for (uint64_t at = 0; at < size; at += at % 4096 < 160 || at > size - 200 ? 23 : 4001) {
      if (is_manifest && at >= 8192) {
        break;
      }
      flip(at);
      ObjectRig store({directory.path()});
      const Status status = store.open();
      if (status.is_ok()) {
        for (const auto& [key, mark, n_pages, body] :
             {std::tuple("one", 1u, 14u, 3000u), std::tuple("two", 30u, 2u, 300u)}) {
          const Status found = store.check(key, mark, n_pages, body);
          EXPECT_TRUE(found.is_ok() || found.code() == KVM_ERR_LOST ||
                      found.code() == KVM_ERR_CORRUPT)
              << found.message();
          n_reported += found.is_ok() ? 0 : 1;
        }
        EXPECT_EQ(store.keys().size(), 2u);
        // What it holds is to stay for the next byte.
        store.tier.reset();
      } else {
        EXPECT_EQ(status.code(), KVM_ERR_CORRUPT) << status.message();
        // Of a segment whose header cannot be read, too: what it has is not thrown away.
        n_refused += is_mark || (is_segment && at < 64) ? 0 : 1;
      }
      flip(at);
      if (HasFailure()) {
        FAIL() << file << " at " << at;
      }
    }
  }
  EXPECT_GT(n_reported, 20u);
  EXPECT_EQ(n_refused, 0u) << "the list has a copy";
  ObjectRig store({directory.path()});
  ASSERT_TRUE(store.open().is_ok());
}

TEST(DiskObjects, WithoutAListThatCanBeReadAreNotThrownAway) {
  const TemporaryDirectory directory;
  {
    ObjectRig store({directory.path()});
    ASSERT_TRUE(store.open().is_ok());
    ASSERT_TRUE(store.put("one", 1, 3).is_ok());
    ASSERT_TRUE(store.put("two", 9, 1).is_ok());
  }
  const size_t n_segments = n_files(directory, ".segment");
  std::vector<std::pair<std::string, std::string>> kept;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
    if (entry.path().string().ends_with(".manifest")) {
      std::fstream stream(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
      stream.seekp(20);
      stream.put('x');
    }
  }
  ObjectRig store({directory.path()});
  const Status status = store.open();
  EXPECT_EQ(status.code(), KVM_ERR_CORRUPT);
  EXPECT_NE(status.message().find("kvm-*.manifest"), std::string::npos);
  EXPECT_EQ(n_files(directory, ".segment"), n_segments);
}

TEST(DiskObjects, ACapacityThatTheyDoNotFitIntoIsRefused) {
  const TemporaryDirectory directory;
  {
    ObjectRig store({directory.path()});
    ASSERT_TRUE(store.open().is_ok());
    ASSERT_TRUE(store.put("one", 1, 60).is_ok());
  }
  ObjectRig small({directory.path()}, 3);
  const Status status = small.open();
  EXPECT_EQ(status.code(), KVM_ERR_INVALID);
  EXPECT_NE(status.message().find("too small"), std::string::npos) << status.message();
  ObjectRig store({directory.path()});
  ASSERT_TRUE(store.open().is_ok());
  EXPECT_TRUE(store.check("one", 1, 60).is_ok());
}

// There are as many segments as there may be, of the size that they have.
TEST(DiskObjects, ACapacityThatIsMoreThanTheirSegmentsMayHoldIsCut) {
  const TemporaryDirectory directory;
  DiskTierOptions options{.directories = {directory.path()}, .capacity_bytes = 8 * kSegment};
  {
    ObjectRig store({directory.path()});
    ASSERT_TRUE(store.open().is_ok());
    ASSERT_TRUE(store.put("one", 1, 60).is_ok());
  }
  for (const uint64_t wanted : {uint64_t{DiskTier::kMaxSegments} * kSegment + (1 << 20),
                                uint64_t{100} << 30, uint64_t{1} << 60}) {
    options.capacity_bytes = wanted;
    const Result<std::unique_ptr<DiskTier>> tier = DiskTier::open(options);
    ASSERT_TRUE(tier.is_ok()) << tier.status().message();
    EXPECT_EQ(tier.value()->stats().capacity_bytes, DiskTier::kMaxSegments * kSegment);
    EXPECT_TRUE(tier.value()->stats().is_capacity_cut);
    EXPECT_EQ(tier.value()->objects()->recovery().n_objects, 1u);
  }
  ObjectRig store({directory.path()});
  ASSERT_TRUE(store.open().is_ok());
  EXPECT_FALSE(store.tier->stats().is_capacity_cut);
  EXPECT_TRUE(store.check("one", 1, 60).is_ok());
}

TEST(DiskObjects, ShareTheirPages) {
  const TemporaryDirectory directory;
  ObjectRig store({directory.path()});
  ASSERT_TRUE(store.open().is_ok());
  Request first(ObjectRequest::Kind::kPut, "first");
  for (uint32_t i = 0; i < 5; ++i) {
    first.pages.push_back({store.write(i), kPage});
  }
  Request second(ObjectRequest::Kind::kPut, "second");
  second.pages = first.pages;
  ASSERT_TRUE(store.run(&first).is_ok());
  const uint64_t used = store.tier->used_bytes();
  ASSERT_TRUE(store.run(&second).is_ok());
  EXPECT_LT(store.tier->used_bytes(), used + 5000) << "a body";
  for (const ObjectRequest::Page& page : first.pages) {
    store.tier->release(page.place);
  }
  ASSERT_TRUE(store.remove("first").is_ok());
  store.tier.reset();
  ASSERT_TRUE(store.open().is_ok());
  EXPECT_TRUE(store.check("second", 0, 5, 0).is_ok());
  EXPECT_LT(store.tier->used_bytes(), used + 5000);
}

TEST(DiskObjects, ThatAreTooLargeAreRefused) {
  const TemporaryDirectory directory;
  ObjectRig store({directory.path()});
  ASSERT_TRUE(store.open().is_ok());
  Request named(ObjectRequest::Kind::kPut, std::string(257, 'k'));
  EXPECT_EQ(store.run(&named).code(), KVM_ERR_LIMIT);
  Request nameless(ObjectRequest::Kind::kPut, "");
  EXPECT_EQ(store.run(&nameless).code(), KVM_ERR_LIMIT);
  Request labelled(ObjectRequest::Kind::kPut, "k");
  labelled.label = std::string(1025, 'l');
  EXPECT_EQ(store.run(&labelled).code(), KVM_ERR_LIMIT);
  EXPECT_EQ(store.put("large", 1, 0, 16 * kSegment).code(), KVM_ERR_NO_SPACE);
  EXPECT_TRUE(store.keys().empty());
  EXPECT_EQ(store.tier->used_bytes(), 0u);
}

// What docs/disk_format.md says, read without the code that wrote it: of the table of a sealed
// segment, of an object, and of the manifest.
TEST(DiskFormat, OfObjectsIsThatOfItsPage) {
  const TemporaryDirectory directory;
  {
    ObjectRig store({directory.path()});
    ASSERT_TRUE(store.open().is_ok());
    ASSERT_TRUE(store.put("the key", 1, 14, 100).is_ok());
  }
  const auto read = [](const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> text{std::istreambuf_iterator<char>(file), {}};
    std::vector<std::byte> bytes(text.size());
    std::memcpy(bytes.data(), text.data(), text.size());
    return bytes;
  };
  const auto number = [](const std::vector<std::byte>& bytes, size_t at, size_t size) {
    uint64_t n = 0;
    for (size_t i = 0; i < size; ++i) {
      n |= static_cast<uint64_t>(bytes[at + i]) << (8 * i);
    }
    return n;
  };
  const uint64_t first_name = uint64_t{1} << 40;
  const std::vector<std::byte> sealed = read(directory / "kvm-00000.segment");
  const size_t trailer = sealed.size() - 64;
  EXPECT_EQ(std::memcmp(sealed.data() + trailer, "KVMT", 4), 0);
  EXPECT_EQ(number(sealed, trailer + 4, 2), 2u);
  EXPECT_EQ(number(sealed, trailer + 6, 2), 64u);
  EXPECT_EQ(number(sealed, trailer + 8, 8), number(sealed, 8, 8)) << "the run";
  EXPECT_EQ(number(sealed, trailer + 16, 8), 1u) << "the generation";
  const uint64_t table = number(sealed, trailer + 24, 8);
  EXPECT_EQ(table, sealed.size() - 4096);
  const uint64_t n_records = number(sealed, trailer + 32, 4);
  EXPECT_EQ(n_records, 12u);
  EXPECT_EQ(number(sealed, trailer + 36, 4), 0u) << "the segment";
  EXPECT_EQ(number(sealed, trailer + 40, 4),
            tiers::crc32c_by_table(std::span(sealed).subspan(table, 16 * n_records)));
  EXPECT_EQ(number(sealed, trailer + 60, 4),
            tiers::crc32c_by_table(std::span(sealed).subspan(trailer, 60)));
  for (uint64_t i = 0; i < n_records; ++i) {
    const uint64_t at = table + 16 * i;
    EXPECT_EQ(number(sealed, at, 8), first_name + i);
    EXPECT_EQ(number(sealed, at + 12, 4), kPage);
    const uint64_t record = 64 * number(sealed, at + 8, 4);
    EXPECT_EQ(std::memcmp(sealed.data() + record, "KVMR", 4), 0);
    EXPECT_EQ(number(sealed, record + 8, 8), first_name + i);
  }

  const std::vector<std::byte> list = read(directory / "kvm-0-0.manifest");
  EXPECT_EQ(list, read(directory / "kvm-0-1.manifest"));
  EXPECT_EQ(list.size(), 64u * 4096u);
  EXPECT_EQ(std::memcmp(list.data(), "KVMM", 4), 0);
  EXPECT_EQ(number(list, 4, 2), 2u);
  EXPECT_EQ(number(list, 6, 2), 64u);
  EXPECT_EQ(number(list, 8, 8), 1u) << "the manifest";
  EXPECT_EQ(number(list, 16, 8), 0u) << "the block";
  const uint64_t entry_bytes = 40 + 7 + 16 + 1;
  EXPECT_EQ(number(list, 24, 4), entry_bytes);
  EXPECT_EQ(number(list, 28, 4), 3u) << "the start, which it ends";
  EXPECT_EQ(number(list, 32, 4), 1u) << "the number of the run";
  std::vector<std::byte> summed(list.begin(), list.begin() + 60);
  summed.insert(summed.end(), list.begin() + 64,
                list.begin() + static_cast<ptrdiff_t>(64 + entry_bytes));
  EXPECT_EQ(number(list, 60, 4), tiers::crc32c_by_table(summed));
  EXPECT_EQ(number(list, 64, 2), 1u) << "a put";
  EXPECT_EQ(number(list, 66, 2), 7u);
  EXPECT_EQ(number(list, 68, 2), 16u);
  EXPECT_EQ(number(list, 72, 8), first_name + 14) << "its first chunk";
  EXPECT_EQ(number(list, 80, 8), 14u * kPage);
  EXPECT_EQ(number(list, 88, 8), 100u);
  EXPECT_EQ(number(list, 96, 4), 14u);
  EXPECT_EQ(number(list, 100, 4), 64u + 8 * 14 + 100);
  EXPECT_EQ(std::memcmp(list.data() + 104, "the keylabel of the key", 23), 0);

  // The chunk is the third record of the next segment.
  const std::vector<std::byte> open = read(directory / "kvm-00001.segment");
  size_t at = 4096;
  while (std::memcmp(open.data() + at, "KVMR", 4) != 0 ||
         number(open, at + 8, 8) != first_name + 14) {
    at += 64;
    ASSERT_LT(at, open.size());
  }
  EXPECT_EQ(number(open, at + 48, 4), 64u + 8 * 14 + 100);
  at += 64;
  EXPECT_EQ(std::memcmp(open.data() + at, "KVMO", 4), 0);
  EXPECT_EQ(number(open, at + 4, 2), 2u);
  EXPECT_EQ(number(open, at + 6, 2), 64u);
  EXPECT_EQ(number(open, at + 8, 8), 100u);
  EXPECT_EQ(number(open, at + 16, 4), 14u);
  EXPECT_EQ(number(open, at + 20, 4), 1u);
  EXPECT_EQ(number(open, at + 24, 4), 131072u);
  EXPECT_EQ(number(open, at + 28, 4),
            tiers::crc32c_by_table(std::span(open).subspan(at + 64, 8 * 14 + 100)));
  EXPECT_EQ(number(open, at + 60, 4), tiers::crc32c_by_table(std::span(open).subspan(at, 60)));
  for (uint64_t i = 0; i < 14; ++i) {
    EXPECT_EQ(number(open, at + 64 + 8 * i, 8), first_name + i);
  }
}

}  // namespace
}  // namespace kvm::testing
