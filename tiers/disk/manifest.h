// SPDX-License-Identifier: Apache-2.0
// The manifest: which objects there are. A log of blocks, each written once:
//
//   block 0 ... block c: all objects there were when it was begun | block c + 1 ...: what changed
//
// A manifest counts from when block c is there, which says so. When there is no room for another
// block, or something went wrong in writing one, the next manifest is begun, with a number one
// above; it lies in other files. Each block lies in two files: of the two, either will do.
//
// Threads: pure functions, and values.
#ifndef KVM_TIERS_DISK_MANIFEST_H_
#define KVM_TIERS_DISK_MANIFEST_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tiers/object_store.h"

namespace kvm::tiers {

// DISK: all of this is frozen by kDiskFormatVersion.
inline constexpr uint32_t kManifestMagic = 0x4d'4d'56'4b;  // "KVMM"
inline constexpr uint32_t kManifestBlockBytes = 4096;
inline constexpr uint32_t kManifestCopies = 2;
inline constexpr uint32_t kManifestSlots = 2;  // manifests take turns
// Their files have room for so many blocks at least: shorter ones were cut off.
inline constexpr uint64_t kMinManifestBlocks = 64;
// The file of a copy of the manifests of a slot: its name alone.
std::string manifest_file_name(uint32_t slot, uint32_t copy);

struct ManifestBlockHeader {
  static constexpr uint32_t kStart = 1;      // blocks 0 to c
  static constexpr uint32_t kEndsStart = 2;  // block c

  uint32_t magic = kManifestMagic;
  uint16_t version = 2;
  uint16_t header_bytes = 64;
  uint64_t number = 0;  // of the manifest
  uint64_t block = 0;
  uint32_t used_bytes = 0;  // of entries, behind the header; the rest is zero
  uint32_t flags = 0;
  uint32_t run_number = 0;  // of who wrote it
  uint32_t reserved[6] = {};
  uint32_t header_crc = 0;  // CRC-32C of the header before it and of the entries
};
static_assert(sizeof(ManifestBlockHeader) == 64);

// An entry, followed by the key and the label, up to a multiple of 8 bytes.
struct ManifestEntryHeader {
  enum Kind : uint16_t { kPut = 1, kRemove = 2 };

  uint16_t kind = kPut;
  uint16_t key_bytes = 0;
  uint16_t label_bytes = 0;  // of a removal, like all below, 0
  uint16_t reserved = 0;
  uint64_t first_chunk = 0;  // a name
  uint64_t page_bytes = 0;
  uint64_t body_bytes = 0;
  uint32_t n_pages = 0;
  uint32_t first_chunk_bytes = 0;
};
static_assert(sizeof(ManifestEntryHeader) == 40);

// A ManifestChange is an entry.
struct ManifestChange {
  ManifestEntryHeader header;
  std::string_view key;
  std::string_view label;
};

// A ManifestWriter makes blocks of a manifest: those of changes that are made durable together.
class ManifestWriter {
 public:
  // begin: the number of the first block; from 0 on it is the start of the manifest.
  ManifestWriter(uint64_t number, uint64_t begin, uint32_t run_number)
      : number_(number), begin_(begin), run_number_(run_number) {}

  // Throws std::bad_alloc.
  void add(const ManifestChange& change);
  // Ends the last block, and the start of the manifest with it. Throws std::bad_alloc.
  void end();
  // REQUIRES: end() was called.
  std::span<const std::byte> bytes() const { return bytes_; }
  uint64_t n_blocks() const { return bytes_.size() / kManifestBlockBytes; }

 private:
  void end_block(uint32_t flags);

  uint64_t number_;
  uint64_t begin_;
  uint32_t run_number_;
  std::vector<std::byte> bytes_;
  uint32_t used_bytes_ = 0;  // of the last block; 0: there is none that is open
};

// What a manifest says.
struct ManifestState {
  struct Object {
    ManifestEntryHeader header;
    std::string label;
  };

  std::map<std::string, Object> objects;
  uint64_t number = 0;
  uint32_t slot = 0;
  uint32_t run_number = 0;        // the largest of who wrote it
  uint64_t n_torn_blocks = 0;     // behind the last one that can be read: they never counted
  uint64_t n_damaged_blocks = 0;  // of which neither copy can be read: what they said is not here
};

// A block of a copy that is not as it was written.
struct ManifestFault {
  // kOneCopy: the other has it. kUnused: nothing was written there yet.
  enum class Kind : uint8_t { kOneCopy, kBothCopies, kUnused };
  uint32_t copy = 0;
  uint64_t block = 0;
  Kind kind = Kind::kOneCopy;
};

// Reads a block. False: it is none, or is not as it was written.
// REQUIRES: it has kManifestBlockBytes.
bool read_manifest_block(std::span<const std::byte> block, ManifestBlockHeader* header);

// Reads the copies of a manifest. False: its start is not there, or not whole; *counted says then
// whether it has been, so that something is lost. Throws std::bad_alloc.
bool read_manifest(const std::span<const std::byte> (&copies)[kManifestCopies],
                   ManifestState* state, bool* counted);

// Compares the copies of a manifest of this number, of which the start can be read; one that is not
// there is empty. What a write has left that had not come to its end is no fault. Throws
// std::bad_alloc.
std::vector<ManifestFault> find_manifest_faults(
    const std::span<const std::byte> (&copies)[kManifestCopies], uint64_t number);

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_MANIFEST_H_
