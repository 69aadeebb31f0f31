// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/manifest.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/assert.h"
#include "tiers/disk/crc32c.h"
#include "tiers/disk/disk_format.h"

namespace kvm::tiers {
namespace {

using Copies = std::span<const std::byte>[kManifestCopies];

constexpr uint32_t kHeaderBytes = sizeof(ManifestBlockHeader);
// What is written of a sector of a disk is written as a whole or not at all.
constexpr size_t kSectorBytes = 512;
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

// Empty: the copy is not there, or ends before.
std::span<const std::byte> block_of(std::span<const std::byte> copy, uint64_t block) {
  const uint64_t at = block * kManifestBlockBytes;
  return at + kManifestBlockBytes <= copy.size() ? copy.subspan(at, kManifestBlockBytes)
                                                 : std::span<const std::byte>();
}

// What there is of a block that cannot be read. A write that had not come to its end has left some
// sectors as they were before, zero.
enum class Remains : uint8_t {
  kNothing,
  kStray,    // some bytes where nothing was written
  kPart,     // of what was being written
  kDamaged,  // all of it had been written
};
Remains remains_of(std::span<const std::byte> block, uint64_t number, uint64_t index) {
  constexpr int kFewBytes = 16;
  const auto n_set =
      std::count_if(block.begin(), block.end(), [](std::byte byte) { return byte != std::byte{}; });
  if (n_set <= kFewBytes) {
    return n_set == 0 ? Remains::kNothing : Remains::kStray;
  }
  if (!is_any_set(block.first(kSectorBytes))) {
    return Remains::kPart;
  }
  ManifestBlockHeader header;
  std::memcpy(&header, block.data(), sizeof(header));
  const uint64_t used_bytes = kHeaderBytes + uint64_t{header.used_bytes};
  if (header.magic != kManifestMagic || header.number != number || header.block != index ||
      used_bytes > block.size()) {
    return Remains::kDamaged;
  }
  for (uint64_t at = kSectorBytes; at < used_bytes; at += kSectorBytes) {
    if (!is_any_set(block.subspan(at, kSectorBytes))) {
      return Remains::kPart;
    }
  }
  return Remains::kDamaged;
}

// Whether the write of this copy of a block had not come to its end: each sector is as in the other
// copy, or zero.
bool is_unfinished(std::span<const std::byte> copy, std::span<const std::byte> other) {
  for (size_t at = 0; at + kSectorBytes <= copy.size(); at += kSectorBytes) {
    const std::span<const std::byte> sector = copy.subspan(at, kSectorBytes);
    if (is_any_set(sector) &&
        (other.empty() ||
         !std::equal(sector.begin(), sector.end(), other.begin() + static_cast<ptrdiff_t>(at)))) {
      return false;
    }
  }
  return true;
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

bool read_manifest(const Copies& copies, ManifestState* state, bool* counted) {
  bool has_start = false;
  bool is_whole = true;  // so far, of the start
  uint64_t n_unread = 0;
  uint64_t n_spoilt = 0;  // of these, behind the last one that was read: those that are damaged
  *counted = false;
  const uint64_t n_blocks = std::max(copies[0].size(), copies[1].size()) / kManifestBlockBytes;
  for (uint64_t block = 0; block < n_blocks; ++block) {
    bool is_read = false;
    for (const std::span<const std::byte>& copy : copies) {
      const std::span<const std::byte> bytes = block_of(copy, block);
      ManifestBlockHeader header;
      if (is_read || bytes.empty() || !read_manifest_block(bytes, &header) ||
          header.block != block || (state->number != 0 && header.number != state->number) ||
          header.number == 0) {
        continue;
      }
      state->number = header.number;
      state->run_number = std::max(state->run_number, header.run_number);
      is_read = apply(bytes.subspan(kHeaderBytes, header.used_bytes), state);
      has_start |= is_read && (header.flags & ManifestBlockHeader::kEndsStart) != 0;
      // What follows a start was written when that was synced; so was a start but the first, and
      // the manifest before it is gone only then.
      *counted |= header.number > 1 || (header.flags & ManifestBlockHeader::kStart) == 0;
    }
    if (is_read) {
      state->n_damaged_blocks += std::exchange(n_unread, 0);
      state->n_torn_blocks = 0;
      n_spoilt = 0;
    } else {
      // Behind the last block that can be read it was being written, and never counted; unless it
      // had been written from one end to the other.
      ++n_unread;
      const Remains remains =
          std::max(remains_of(block_of(copies[0], block), state->number, block),
                   remains_of(block_of(copies[1], block), state->number, block));
      n_spoilt += remains == Remains::kDamaged ? 1 : 0;
      state->n_torn_blocks += remains == Remains::kPart ? 1 : 0;
      is_whole &= has_start;
    }
  }
  state->n_damaged_blocks += n_spoilt;
  return has_start && is_whole;
}

std::vector<ManifestFault> find_manifest_faults(const Copies& copies, uint64_t number) {
  const uint64_t n_blocks = std::max(copies[0].size(), copies[1].size()) / kManifestBlockBytes;
  std::vector<std::array<bool, kManifestCopies>> is_whole(n_blocks);
  uint64_t end = 0;  // of the blocks that can be read
  for (uint64_t block = 0; block < n_blocks; ++block) {
    for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
      ManifestBlockHeader header;
      const std::span<const std::byte> bytes = block_of(copies[copy], block);
      is_whole[block][copy] = !bytes.empty() && read_manifest_block(bytes, &header) &&
                              header.number == number && header.block == block;
      end = is_whole[block][copy] ? block + 1 : end;
    }
  }
  std::vector<ManifestFault> faults;
  for (uint64_t block = 0; block < n_blocks; ++block) {
    for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
      const std::span<const std::byte> bytes = block_of(copies[copy], block);
      if (is_whole[block][copy] || copies[copy].empty()) {
        continue;
      }
      using Kind = ManifestFault::Kind;
      const bool is_elsewhere = is_whole[block][1 - copy];
      const Remains remains = remains_of(bytes, number, block);
      if (block < end) {
        if (block + 1 != end || !is_unfinished(bytes, block_of(copies[1 - copy], block))) {
          faults.push_back({copy, block, is_elsewhere ? Kind::kOneCopy : Kind::kBothCopies});
        }
      } else if (remains == Remains::kDamaged || remains == Remains::kStray) {
        faults.push_back(
            {copy, block, remains == Remains::kStray ? Kind::kUnused : Kind::kBothCopies});
      }
    }
  }
  return faults;
}

}  // namespace kvm::tiers
