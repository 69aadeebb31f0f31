// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/manifest.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/assert.h"
#include "tiers/disk/crc32c.h"
#include "tiers/disk/disk_format.h"

namespace kvm::tiers {
namespace {

constexpr uint32_t kHeaderBytes = sizeof(ManifestBlockHeader);
constexpr uint64_t kEntryAlign = 8;
static_assert(kHeaderBytes + sizeof(ManifestEntryHeader) + kMaxObjectKeyBytes +
                      kMaxObjectLabelBytes <=
                  kManifestBlockBytes,
              "an entry fits into a block");
static_assert(offsetof(ManifestBlockHeader, header_crc) == kHeaderBytes - sizeof(uint32_t));

uint32_t crc_of(std::span<const std::byte> block, uint32_t used_bytes) {
  return crc32c(block.subspan(kHeaderBytes, used_bytes),
                crc32c(block.first(offsetof(ManifestBlockHeader, header_crc))));
}

bool is_any_set(std::span<const std::byte> bytes) {
  return std::any_of(bytes.begin(), bytes.end(),
                     [](std::byte byte) { return byte != std::byte{}; });
}

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// False: the entries do not fit each other.
bool apply(std::span<const std::byte> entries, ManifestState* state) {
  while (!entries.empty()) {
    ManifestEntryHeader header;
    if (entries.size() < sizeof(header)) {
      return false;
    }
    std::memcpy(&header, entries.data(), sizeof(header));
    const uint64_t size =
        align_up(sizeof(header) + header.key_bytes + header.label_bytes, kEntryAlign);
    if (size > entries.size() || header.key_bytes == 0 || header.key_bytes > kMaxObjectKeyBytes ||
        header.label_bytes > kMaxObjectLabelBytes) {
      return false;
    }
    std::string key(text_of(entries.subspan(sizeof(header), header.key_bytes)));
    if (header.kind == ManifestEntryHeader::kPut) {
      state->objects[std::move(key)] = {
          header, std::string(text_of(
                      entries.subspan(sizeof(header) + header.key_bytes, header.label_bytes)))};
    } else if (header.kind == ManifestEntryHeader::kRemove) {
      state->objects.erase(key);
    } else {
      return false;
    }
    entries = entries.subspan(size);
  }
  return true;
}

}  // namespace

std::string manifest_file_name(uint32_t slot, uint32_t copy) {
  return "kvm-" + std::to_string(slot) + "-" + std::to_string(copy) + ".manifest";
}

void ManifestWriter::add(const ManifestChange& change) {
  KVM_ASSERT(!change.key.empty() && change.key.size() <= kMaxObjectKeyBytes &&
             change.label.size() <= kMaxObjectLabelBytes);
  ManifestEntryHeader header = change.header;
  header.key_bytes = static_cast<uint16_t>(change.key.size());
  header.label_bytes = static_cast<uint16_t>(change.label.size());
  const uint64_t size =
      align_up(sizeof(header) + change.key.size() + change.label.size(), kEntryAlign);
  if (used_bytes_ != 0 && used_bytes_ + size > kManifestBlockBytes) {
    end_block(0);
  }
  if (used_bytes_ == 0) {
    bytes_.resize(bytes_.size() + kManifestBlockBytes);
    used_bytes_ = kHeaderBytes;
  }
  std::byte* at = bytes_.data() + bytes_.size() - kManifestBlockBytes + used_bytes_;
  std::memcpy(at, &header, sizeof(header));
  at = std::copy_n(reinterpret_cast<const std::byte*>(change.key.data()), change.key.size(),
                   at + sizeof(header));
  std::copy_n(reinterpret_cast<const std::byte*>(change.label.data()), change.label.size(), at);
  used_bytes_ += static_cast<uint32_t>(size);
}

void ManifestWriter::end() {
  if (used_bytes_ == 0) {
    bytes_.resize(bytes_.size() + kManifestBlockBytes);
    used_bytes_ = kHeaderBytes;
  }
  end_block(begin_ == 0 ? ManifestBlockHeader::kEndsStart : 0);
}

void ManifestWriter::end_block(uint32_t flags) {
  const std::span<std::byte> block = std::span(bytes_).last(kManifestBlockBytes);
  ManifestBlockHeader header{.number = number_,
                             .block = begin_ + n_blocks() - 1,
                             .used_bytes = used_bytes_ - kHeaderBytes,
                             .flags = flags | (begin_ == 0 ? ManifestBlockHeader::kStart : 0),
                             .run_number = run_number_};
  std::memcpy(block.data(), &header, sizeof(header));
  header.header_crc = crc_of(block, header.used_bytes);
  std::memcpy(block.data(), &header, sizeof(header));
  used_bytes_ = 0;
}

bool read_manifest_block(std::span<const std::byte> block, ManifestBlockHeader* header) {
  const ManifestBlockHeader expected;
  std::memcpy(header, block.data(), sizeof(*header));
  return header->magic == expected.magic && header->version == expected.version &&
         header->header_bytes == expected.header_bytes &&
         header->used_bytes <= kManifestBlockBytes - kHeaderBytes &&
         header->header_crc == crc_of(block, header->used_bytes);
}

bool read_manifest(const std::span<const std::byte> (&copies)[kManifestCopies],
                   ManifestState* state, bool* counted) {
  bool has_start = false;
  bool is_whole = true;  // so far, of the start
  uint64_t n_unread = 0;
  *counted = false;
  const uint64_t n_blocks = std::max(copies[0].size(), copies[1].size()) / kManifestBlockBytes;
  for (uint64_t block = 0; block < n_blocks; ++block) {
    bool is_read = false;
    bool is_written = false;
    for (const std::span<const std::byte>& copy : copies) {
      const uint64_t at = block * kManifestBlockBytes;
      ManifestBlockHeader header;
      is_written |= at + kManifestBlockBytes <= copy.size() &&
                    is_any_set(copy.subspan(at, kManifestBlockBytes));
      if (is_read || at + kManifestBlockBytes > copy.size() ||
          !read_manifest_block(copy.subspan(at, kManifestBlockBytes), &header) ||
          header.block != block || (state->number != 0 && header.number != state->number) ||
          header.number == 0) {
        continue;
      }
      state->number = header.number;
      state->run_number = std::max(state->run_number, header.run_number);
      is_read = apply(copy.subspan(at + kHeaderBytes, header.used_bytes), state);
      has_start |= is_read && (header.flags & ManifestBlockHeader::kEndsStart) != 0;
      // What follows a start was written when that was synced; so was a start but the first, and
      // the manifest before it is gone only then.
      *counted |= header.number > 1 || (header.flags & ManifestBlockHeader::kStart) == 0;
    }
    if (is_read) {
      // What lies behind the last block that can be read was being written, and never counted.
      state->n_damaged_blocks += std::exchange(n_unread, 0);
      state->n_torn_blocks = 0;
    } else {
      ++n_unread;
      state->n_torn_blocks += is_written ? 1 : 0;
      is_whole &= has_start;
    }
  }
  return has_start && is_whole;
}

}  // namespace kvm::tiers
