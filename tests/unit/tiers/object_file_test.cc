// SPDX-License-Identifier: Apache-2.0
// An object in a file of its own: what was written is read, and nothing else is, whichever byte of
// the file has changed and wherever it ends.
#include "tiers/disk/object_file.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "tests/common/temporary_directory.h"
#include "tiers/disk/crc32c.h"

namespace kvm::testing {
namespace {

using namespace tiers;

std::vector<std::byte> bytes_from(uint32_t seed, size_t n) {
  std::vector<std::byte> bytes(n);
  for (std::byte& byte : bytes) {
    seed = seed * 1664525 + 1013904223;
    byte = static_cast<std::byte>(seed >> 24);
  }
  return bytes;
}

std::string text_of(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

struct Copy {
  ObjectFileHead head;
  std::vector<std::vector<std::byte>> pages;
};

Copy make(const std::vector<uint32_t>& sizes, size_t body_bytes) {
  Copy copy;
  copy.head.key = "0000000007/chat/1";
  copy.head.label = "a label";
  copy.head.body = bytes_from(1, body_bytes);
  for (const uint32_t size : sizes) {
    copy.pages.push_back(bytes_from(size, size));
    copy.head.page_bytes += size;
  }
  copy.head.n_pages = static_cast<uint32_t>(sizes.size());
  return copy;
}

Status write(const std::string& path, const Copy& copy, bool replaces = false) {
  std::vector<uint32_t> sizes;
  for (const auto& page : copy.pages) {
    sizes.push_back(static_cast<uint32_t>(page.size()));
  }
  KVM_TRY_ASSIGN(ObjectFileWriter writer,
                 ObjectFileWriter::create(path, replaces, copy.head, sizes));
  for (const auto& page : copy.pages) {
    KVM_TRY(writer.add_page(page));
  }
  return writer.finish();
}

Result<Copy> read(const std::string& path) {
  KVM_TRY_ASSIGN(ObjectFileReader reader, ObjectFileReader::open(path));
  Copy copy;
  copy.head = reader.head();
  KVM_TRY(reader.read_pages([&](uint32_t, std::span<const std::byte> page) {
    copy.pages.emplace_back(page.begin(), page.end());
    return Status::ok();
  }));
  return copy;
}

void expect_same(const Copy& a, const Copy& b) {
  EXPECT_EQ(a.head.key, b.head.key);
  EXPECT_EQ(a.head.label, b.head.label);
  EXPECT_EQ(a.head.body, b.head.body);
  EXPECT_EQ(a.head.page_bytes, b.head.page_bytes);
  EXPECT_EQ(a.pages, b.pages);
}

class ObjectFileTest : public ::testing::Test {
 protected:
  TemporaryDirectory folder_;
  const std::string path_ = folder_ / "file";
};

TEST_F(ObjectFileTest, GivesBackWhatWasWritten) {
  for (const Copy& copy : {make({}, 0), make({1}, 1), make({64, 65, 63, 4096}, 1000),
                           make({3'000'000, 20'000}, 200'000)}) {
    ASSERT_TRUE(write(path_, copy, true).is_ok());
    const Result<Copy> found = read(path_);
    ASSERT_TRUE(found.is_ok()) << found.status().message();
    expect_same(found.value(), copy);
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_.path()), {}), 1);
}

TEST_F(ObjectFileTest, ReplacesOnlyWhereItIsTold) {
  const Copy first = make({100}, 10);
  ASSERT_TRUE(write(path_, first).is_ok());
  EXPECT_EQ(write(path_, make({200}, 20)).code(), KVM_ERR_EXISTS);
  expect_same(read(path_).value(), first);
  ASSERT_TRUE(write(path_, make({200}, 20), true).is_ok());
  expect_same(read(path_).value(), make({200}, 20));
  EXPECT_EQ(write(folder_ / "none/file", first).code(), KVM_ERR_NOT_FOUND);
  EXPECT_EQ(write(folder_.path(), first, true).code(), KVM_ERR_INVALID);
}

TEST_F(ObjectFileTest, ThatIsNotEndedLeavesNothing) {
  const Copy copy = make({100, 200}, 10);
  const std::vector<uint32_t> sizes = {100, 200};
  {
    Result<ObjectFileWriter> writer = ObjectFileWriter::create(path_, false, copy.head, sizes);
    ASSERT_TRUE(writer.is_ok());
    ASSERT_TRUE(writer.value().add_page(copy.pages[0]).is_ok());
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

TEST_F(ObjectFileTest, WithAnyByteChangedIsRefused) {
  ASSERT_TRUE(write(path_, make({70, 128}, 90)).is_ok());
  const std::string whole = text_of(path_);
  std::fstream stream(path_, std::ios::binary | std::ios::in | std::ios::out);
  const auto put = [&](size_t at, char byte) {
    stream.seekp(static_cast<std::streamoff>(at)).put(byte).flush();
  };
  for (size_t at = 0; at < whole.size(); ++at) {
    put(at, static_cast<char>(whole[at] ^ (1 << (at % 8))));
    const Result<Copy> found = read(path_);
    put(at, whole[at]);
    ASSERT_FALSE(found.is_ok()) << at;
    EXPECT_EQ(found.status().code(), at < 8 ? KVM_ERR_INVALID : KVM_ERR_CORRUPT) << at;
    EXPECT_NE(found.status().message().find(path_), std::string::npos);
  }
}

TEST_F(ObjectFileTest, ThatEndsElsewhereIsRefused) {
  ASSERT_TRUE(write(path_, make({70, 128}, 90)).is_ok());
  const std::string whole = text_of(path_);
  // From the end on: what is cut off comes back as zeros.
  for (size_t size = whole.size() + 130; size-- > 0;) {
    if (size != whole.size()) {
      std::filesystem::resize_file(path_, size);
      EXPECT_FALSE(read(path_).is_ok()) << size;
    }
  }
  EXPECT_EQ(read(folder_ / "none").status().code(), KVM_ERR_NOT_FOUND);
  EXPECT_EQ(read(folder_.path()).status().code(), KVM_ERR_INVALID);
}

// Headers whose own checksums match, and which say what the file does not bear out.
TEST_F(ObjectFileTest, ThatSaysTooMuchIsRefused) {
  ASSERT_TRUE(write(path_, make({70, 128}, 90)).is_ok());
  const std::string whole = text_of(path_);
  ObjectFileHeader header;
  std::memcpy(&header, whole.data(), sizeof(header));
  const auto code_of = [&](ObjectFileHeader changed) {
    changed.header_crc = crc32c(std::as_bytes(std::span(&changed, 1)).first(60));
    std::string spoilt = whole;
    std::memcpy(spoilt.data(), &changed, sizeof(changed));
    write_text(path_, spoilt);
    return read(path_).status().code();
  };
  EXPECT_EQ(code_of(header), KVM_OK);
  ObjectFileHeader changed = header;
  changed.version = kObjectFileVersion + 1;
  EXPECT_EQ(code_of(changed), KVM_ERR_VERSION);
  for (const uint64_t much : {uint64_t{91}, uint64_t{1} << 20, UINT64_MAX}) {
    changed = header;
    changed.body_bytes = much;
    EXPECT_EQ(code_of(changed), KVM_ERR_CORRUPT);
    changed = header;
    changed.page_bytes = much;
    EXPECT_EQ(code_of(changed), KVM_ERR_CORRUPT);
    changed = header;
    changed.n_pages = static_cast<uint32_t>(much);
    EXPECT_EQ(code_of(changed), KVM_ERR_CORRUPT);
    changed = header;
    changed.key_bytes = static_cast<uint16_t>(much);
    EXPECT_EQ(code_of(changed), KVM_ERR_CORRUPT);
  }
}

}  // namespace
}  // namespace kvm::testing
