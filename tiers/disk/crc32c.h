// SPDX-License-Identifier: Apache-2.0
// CRC-32C: the checksum of iSCSI (RFC 3720, B.4 has its test vectors), which x86 has an instruction
// for. Debian has no package of it.
//
// Threads: pure functions.
#ifndef KVM_TIERS_DISK_CRC32C_H_
#define KVM_TIERS_DISK_CRC32C_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvm::tiers {

// Of `before` and `bytes` together, where `crc` is that of `before`; 0 is that of nothing.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc = 0);
// Copies `from` to `to` and returns the checksum of what was copied.
uint32_t copy_crc32c(std::byte* to, std::span<const std::byte> from);
// The same as crc32c(), by table: what machines without the instruction take.
uint32_t crc32c_by_table(std::span<const std::byte> bytes, uint32_t crc = 0);

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_CRC32C_H_
