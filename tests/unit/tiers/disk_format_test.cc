// SPDX-License-Identifier: Apache-2.0
// The checksum, and what lies in the files of the disk tier, byte by byte.
#include "tiers/disk/disk_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/common/slow_page.h"
#include "tiers/disk/crc32c.h"
#include "tiers/disk/disk_tier.h"
#include "tiers/disk/simulated_disk.h"

namespace kvm::testing {
namespace {

using tiers::check_record_header;
using tiers::crc32c;
using tiers::crc32c_by_table;
using tiers::DiskTier;
using tiers::DiskTierOptions;
using tiers::kind_of_file;
using tiers::RecordHeader;
using tiers::SegmentFile;
using tiers::SegmentHeader;
using tiers::SimulatedDisk;

using Bytes = std::vector<std::byte>;

// RFC 3720, B.4, and the check value of the catalogue of CRCs.
TEST(Crc32c, IsThatOfThePublishedVectors) {
  Bytes up(32);
  Bytes down(32);
  for (size_t i = 0; i < 32; ++i) {
    up[i] = static_cast<std::byte>(i);
    down[i] = static_cast<std::byte>(31 - i);
  }
  constexpr std::string_view kDigits = "123456789";
  Bytes digits(kDigits.size());
  std::memcpy(digits.data(), kDigits.data(), kDigits.size());
  for (const auto function : {crc32c, crc32c_by_table}) {
    EXPECT_EQ(function(Bytes(32, std::byte{0}), 0), 0x8a9136aau);
    EXPECT_EQ(function(Bytes(32, std::byte{0xff}), 0), 0x62a8ab43u);
    EXPECT_EQ(function(up, 0), 0x46dd794eu);
    EXPECT_EQ(function(down, 0), 0x113fdb5cu);
    EXPECT_EQ(function(digits, 0), 0xe3069283u);
    EXPECT_EQ(function({}, 0), 0u);
  }
}

TEST(Crc32c, OfPartsIsThatOfTheWhole) {
  const Bytes bytes = marked_bytes(3, 20'000);
  const uint32_t whole = crc32c_by_table(bytes);
  std::mt19937 generator(5);
  for (int i = 0; i < 100; ++i) {
    const std::span<const std::byte> all(bytes);
    const size_t cut = generator() % bytes.size();
    EXPECT_EQ(crc32c(all.subspan(cut), crc32c(all.first(cut))), whole) << cut;
  }
}

// Wherever both begin and end, and nothing beside it changes.
TEST(Crc32c, ACopyIsTheWholeOfIt) {
  const Bytes bytes = marked_bytes(3, 20'000);
  std::mt19937 generator(6);
  for (int i = 0; i < 600; ++i) {
    const size_t to = generator() % 130;
    const size_t from = generator() % 130;
    const size_t n = i < 300 ? static_cast<size_t>(i) : generator() % (bytes.size() - from);
    const std::span<const std::byte> source = std::span(bytes).subspan(from, n);
    Bytes copy(to + n + 100, std::byte{0xa5});
    Bytes expected = copy;
    std::copy(source.begin(), source.end(), expected.begin() + static_cast<ptrdiff_t>(to));
    EXPECT_EQ(tiers::copy_crc32c(copy.data() + to, source), crc32c_by_table(source));
    ASSERT_EQ(copy, expected) << n << " bytes from " << from << " to " << to;
  }
}

RecordHeader some_record() {
  return {.name = 7,
          .run_id = 0x0123456789abcdef,
          .generation = 3,
          .offset = 4096,
          .segment = 2,
          .size_bytes = 640,
          .page_crc = 0xdeadbeef};
}

TEST(RecordHeader, EveryFieldIsCompared) {
  const RecordHeader good = some_record();
  std::array<std::byte, 64> bytes{};
  uint32_t page_crc = 0;
  tiers::write_record_header(good, bytes.data());
  EXPECT_EQ(check_record_header(good, bytes, &page_crc), nullptr);
  EXPECT_EQ(page_crc, 0xdeadbeef);
  const auto reason = [&](auto change) {
    RecordHeader other = good;
    change(other);
    const char* why = check_record_header(other, bytes, &page_crc);
    return std::string(why == nullptr ? "" : why);
  };
  EXPECT_EQ(reason([](RecordHeader& h) { h.run_id = 0; }),
            "the record is one that lay there before");
  EXPECT_EQ(reason([](RecordHeader& h) { h.generation = 4; }),
            "the record is one that lay there before");
  EXPECT_EQ(reason([](RecordHeader& h) { h.offset = 0; }), "the record belongs to another offset");
  EXPECT_EQ(reason([](RecordHeader& h) { h.segment = 1; }), "the record belongs to another offset");
  EXPECT_EQ(reason([](RecordHeader& h) { h.name = 12; }), "the record is another one");
  EXPECT_EQ(reason([](RecordHeader& h) { h.size_bytes = 64; }),
            "the record's page has another size");
  RecordHeader newer = good;
  newer.version = 3;
  tiers::write_record_header(newer, bytes.data());
  EXPECT_EQ(reason([](RecordHeader&) {}), "the record is of another version of the format");
}

TEST(RecordHeader, EveryFlippedBitIsFound) {
  const RecordHeader good = some_record();
  std::array<std::byte, 64> bytes{};
  tiers::write_record_header(good, bytes.data());
  uint32_t page_crc = 0;
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    const std::byte mask{static_cast<uint8_t>(1u << (bit % 8))};
    bytes[bit / 8] ^= mask;
    EXPECT_NE(check_record_header(good, bytes, &page_crc), nullptr) << bit;
    bytes[bit / 8] ^= mask;
  }
}

TEST(SegmentHeader, TellsItsVersion) {
  Bytes bytes(tiers::kSegmentHeaderBytes);
  uint16_t version = 0;
  EXPECT_EQ(kind_of_file(bytes, &version), SegmentFile::kNone);
  tiers::write_segment_header({.segment = 4}, bytes.data());
  EXPECT_EQ(kind_of_file(bytes, &version), SegmentFile::kOurs);
  EXPECT_EQ(version, tiers::kDiskFormatVersion);
  tiers::write_segment_header({.version = 9}, bytes.data());
  EXPECT_EQ(kind_of_file(bytes, &version), SegmentFile::kNewer);
  EXPECT_EQ(version, 9);
  tiers::write_segment_header({.version = 1}, bytes.data());
  EXPECT_EQ(kind_of_file(bytes, &version), SegmentFile::kOlder);
  bytes[20] ^= std::byte{1};
  EXPECT_EQ(kind_of_file(bytes, &version), SegmentFile::kNone);
  EXPECT_EQ(kind_of_file(std::span(bytes).first(40), &version), SegmentFile::kNone);
}

// A segment of two pages, of 100 and 128 bytes, that were written together; and one of 64 bytes.
Bytes written_segment() {
  DiskTierOptions options{.directories = {"d"},
                          .capacity_bytes = 2 * DiskTier::kMinSegmentBytes,
                          .segment_bytes = DiskTier::kMinSegmentBytes,
                          .is_manual = true};
  auto made = std::make_unique<SimulatedDisk>(
      tiers::SimulatedDiskOptions{.io = DiskTier::io_options(options).value()});
  SimulatedDisk& disk = *made;
  const std::unique_ptr<DiskTier> tier = DiskTier::over(std::move(made), options).value();
  SlowPage pages[] = {{1, 100}, {2, 128}, {3, 64}};
  tiers::Transfer* transfers[] = {&pages[0], &pages[1], &pages[2]};
  tier->submit(std::span(transfers).first(2));
  while (tier->turn()) {
  }
  tier->submit(std::span(transfers).last(1));
  while (tier->turn()) {
  }
  const Bytes bytes(disk.bytes(0).begin(), disk.bytes(0).begin() + 3 * 4096);
  for (const SlowPage& page : pages) {
    EXPECT_TRUE(page.status.is_ok());
    tier->release(page.place);
  }
  return bytes;
}

// The file was written by the version that its name says, and must never change. Of a new version
// there will be another. KVM_WRITE_GOLDEN=1 writes it.
TEST(DiskFormat, IsThatOfTheGoldenFile) {
  const Bytes written = written_segment();
  const char* const source = std::getenv("KVM_SOURCE_DIR");
  ASSERT_NE(source, nullptr);
  const std::string path = std::string(source) + "/tests/golden/disk_segment_v2.bin";
  if (std::getenv("KVM_WRITE_GOLDEN") != nullptr) {
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(written.data()),
               static_cast<std::streamsize>(written.size()));
  }
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> golden{std::istreambuf_iterator<char>(file), {}};
  ASSERT_EQ(golden.size(), written.size());
  for (size_t i = 0; i < golden.size(); ++i) {
    ASSERT_EQ(static_cast<std::byte>(golden[i]), written[i]) << "byte " << i;
  }
}

// What docs/disk_format.md says of the golden file, read without the code that wrote it.
TEST(DiskFormat, IsThatOfItsPage) {
  const Bytes bytes = written_segment();
  const auto number = [&](size_t at, size_t size) {
    uint64_t n = 0;
    for (size_t i = 0; i < size; ++i) {
      n |= static_cast<uint64_t>(bytes[at + i]) << (8 * i);
    }
    return n;
  };
  const std::span<const std::byte> all(bytes);
  EXPECT_EQ(std::memcmp(bytes.data(), "KVMS", 4), 0);
  EXPECT_EQ(number(4, 2), 2u);
  EXPECT_EQ(number(6, 2), 4096u);
  EXPECT_EQ(number(8, 8), 1u) << "the run";
  EXPECT_EQ(number(16, 8), 1u) << "the generation";
  EXPECT_EQ(number(24, 8), DiskTier::kMinSegmentBytes);
  EXPECT_EQ(number(32, 4), 0u) << "the segment";
  EXPECT_EQ(number(36, 4), 1u) << "the number of the run";
  EXPECT_EQ(number(60, 4), crc32c_by_table(all.first(60)));
  struct Record {
    size_t at;
    uint32_t mark;
    uint32_t size;
  };
  const Record records[] = {{4096, 1, 100}, {4096 + 64 + 128, 2, 128}, {8192, 3, 64}};
  for (uint32_t i = 0; i < 3; ++i) {
    const auto& [at, mark, size] = records[i];
    EXPECT_EQ(std::memcmp(bytes.data() + at, "KVMR", 4), 0);
    EXPECT_EQ(number(at + 4, 2), 2u);
    EXPECT_EQ(number(at + 6, 2), 64u);
    EXPECT_EQ(number(at + 8, 8), (uint64_t{1} << 40) + i) << "the name";
    EXPECT_EQ(number(at + 16, 8), 1u);
    EXPECT_EQ(number(at + 24, 8), 1u);
    EXPECT_EQ(number(at + 32, 8), at);
    EXPECT_EQ(number(at + 40, 4), 0u);
    EXPECT_EQ(number(at + 48, 4), size);
    const std::span<const std::byte> page = all.subspan(at + 64, size);
    EXPECT_EQ(number(at + 52, 4), crc32c_by_table(page));
    EXPECT_EQ(number(at + 60, 4), crc32c_by_table(all.subspan(at, 60)));
    EXPECT_TRUE(std::equal(page.begin(), page.end(), marked_bytes(mark, size).begin()));
  }
}

}  // namespace
}  // namespace kvm::testing
