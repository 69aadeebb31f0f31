// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "base/assert.h"
#include "engine/image/image_check.h"
#include "tests/fuzz/seeds.h"
#include "tests/fuzz/targets.h"
#include "tiers/disk/crc32c.h"
#include "tiers/disk/object_file.h"

namespace kvm::testing {
namespace {

using namespace tiers;

template <typename T>
void seal(T* header) {
  header->header_crc = crc32c(std::as_bytes(std::span(header, 1)).first(offsetof(T, header_crc)));
}

// A file that says of itself what it is, with checksums that match as far as that goes: the reader
// sees what they would hide.
Bytes sealed(std::span<const uint8_t> input) {
  Bytes file(input.begin(), input.end());
  ObjectFileHeader header;
  if (file.size() < sizeof(header)) {
    return file;
  }
  std::memcpy(&header, file.data(), sizeof(header));
  header.file_bytes = file.size();
  const uint64_t n_names = uint64_t{header.key_bytes} + header.label_bytes;
  const auto bytes_at = [&](uint64_t begin, uint64_t n) {
    begin = std::min<uint64_t>(begin, file.size());
    return std::as_bytes(std::span(file)).subspan(begin, std::min(n, file.size() - begin));
  };
  const uint64_t body = sizeof(header) + (n_names + 63) / 64 * 64;
  header.name_crc = crc32c(bytes_at(sizeof(header), n_names));
  header.body_crc = crc32c(bytes_at(body, header.body_bytes));
  seal(&header);
  std::memcpy(file.data(), &header, sizeof(header));
  uint64_t at = body + std::min<uint64_t>(header.body_bytes, file.size());
  at = (at + 63) / 64 * 64;
  for (uint32_t i = 0; i < header.n_pages && at + sizeof(ObjectFilePage) <= file.size(); ++i) {
    ObjectFilePage page;
    std::memcpy(&page, file.data() + at, sizeof(page));
    page.page_crc = crc32c(bytes_at(at + sizeof(page), page.size_bytes));
    seal(&page);
    std::memcpy(file.data() + at, &page, sizeof(page));
    at += sizeof(page) + (uint64_t{page.size_bytes} + 63) / 64 * 64;
  }
  if (at + sizeof(ObjectFileEnd) == file.size()) {
    ObjectFileEnd end;
    std::memcpy(&end, file.data() + at, sizeof(end));
    end.file_crc = crc32c(bytes_at(0, at));
    end.file_bytes = file.size();
    seal(&end);
    std::memcpy(file.data() + at, &end, sizeof(end));
  }
  return file;
}

void read_file(std::span<const uint8_t> bytes) {
  const int fd = ::memfd_create("object", MFD_CLOEXEC);
  KVM_ASSERT(fd >= 0);
  KVM_ASSERT(bytes.empty() ||
             ::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  Result<ObjectFileReader> reader = ObjectFileReader::over(fd, "the file");
  if (!reader.is_ok()) {
    KVM_ASSERT(!reader.status().message().empty());
    return;
  }
  const ObjectFileHead& head = reader.value().head();
  for (int look = 0; look < 2; ++look) {
    uint64_t page_bytes = 0;
    uint32_t n_pages = 0;
    const Status status =
        reader.value().read_pages([&](uint32_t index, std::span<const std::byte> page) {
          KVM_ASSERT(index == n_pages++ && !page.empty());
          page_bytes += page.size();
          return Status::ok();
        });
    KVM_ASSERT(!status.is_ok() || (n_pages == head.n_pages && page_bytes == head.page_bytes));
  }
  (void)engine::check_image(head.body, head.n_pages);
}

}  // namespace

void run_object_file(std::span<const uint8_t> input) {
  read_file(input);
  read_file(sealed(input));
}

Seeds object_file_seeds() {
  // The bodies are those of images, behind the sizes of their pages.
  Seeds seeds;
  for (const auto& [name, image] : image_seeds()) {
    InputReader reader(image);
    std::vector<uint32_t> sizes(reader.take<uint16_t>());
    for (uint32_t& size : sizes) {
      size = 1 + reader.take<uint32_t>() % 200;  // so that the files are small
    }
    const std::span<const uint8_t> body = reader.take_bytes(image.size());
    ObjectFileHead head{.key = "0000000000/" + name, .label = "a label", .body = {}};
    std::transform(body.begin(), body.end(), std::back_inserter(head.body),
                   [](uint8_t byte) { return std::byte{byte}; });
    head.n_pages = static_cast<uint32_t>(sizes.size());
    const std::string path =
        (std::filesystem::temp_directory_path() / ("seed-" + std::to_string(::getpid()))).string();
    Result<ObjectFileWriter> writer = ObjectFileWriter::create(path, true, head, sizes);
    KVM_ASSERT(writer.is_ok());
    for (const uint32_t size : sizes) {
      std::vector<std::byte> page(size);
      std::fill(page.begin(), page.end(), static_cast<std::byte>(size));
      KVM_ASSERT(writer.value().add_page(page).is_ok());
    }
    KVM_ASSERT(writer.value().finish().is_ok());
    std::ifstream file(path, std::ios::binary);
    seeds.emplace_back(name, Bytes(std::istreambuf_iterator<char>(file), {}));
    std::filesystem::remove(path);
  }
  return seeds;
}

}  // namespace kvm::testing
