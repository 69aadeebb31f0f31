// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/disk_reader.h"

namespace kvm::tiers {

void DiskReader::aim(Read* read, const Stretch& stretch) const {
  const uint64_t block = io_->block_bytes();
  read->kind = DiskOp::Kind::kRead;
  read->file = stretch.file;
  read->begin = stretch.begin;
  read->n_bytes = stretch.n_bytes;
  read->offset = align_down(stretch.begin, block);
  read->size_bytes =
      static_cast<uint32_t>(align_up(stretch.begin + stretch.n_bytes, block) - read->offset);
}

std::span<const std::byte> DiskReader::bytes_of(const Read& read) {
  if (!read.status.is_ok()) {
    error_ = read.status;
    return {};
  }
  const std::span<const std::byte> all(read.data, read.size_bytes);
  return all.subspan(read.begin - read.offset, read.n_bytes);
}

bool DiskReader::read(uint32_t file, uint64_t begin, std::span<std::byte> to) {
  const uint64_t piece = align_down(max_bytes(), kMaxDiskBlockBytes);
  bool is_read = true;
  run((to.size() + piece - 1) / piece,
      [&](size_t i) {
        return Stretch{file, begin + i * piece, std::min<uint64_t>(piece, to.size() - i * piece)};
      },
      [&](size_t i, std::span<const std::byte> bytes) {
        is_read &= !bytes.empty();
        std::copy(bytes.begin(), bytes.end(), to.begin() + static_cast<ptrdiff_t>(i * piece));
      });
  return is_read;
}

}  // namespace kvm::tiers
