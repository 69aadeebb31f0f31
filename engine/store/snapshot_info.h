// SPDX-License-Identifier: Apache-2.0
// What is known of a snapshot without loading it (docs/adr/0022-snapshots.md).
#ifndef KVM_ENGINE_STORE_SNAPSHOT_INFO_H_
#define KVM_ENGINE_STORE_SNAPSHOT_INFO_H_

#include <array>
#include <cstdint>
#include <string>

#include "engine/store/quota.h"

namespace kvm::engine {

// A SnapshotName is a user's. Names are in the order of uids, and of bytes.
struct SnapshotName {
  uint32_t uid = 0;
  std::string name;
};

struct SnapshotInfo {
  SnapshotName name;
  std::string space_name;  // when it was saved; empty: what the disk says of it is damaged
  std::array<uint8_t, 16> layout_digest{};
  std::array<uint8_t, 16> policy_digest{};
  std::array<uint8_t, 32> fingerprint{};
  bool is_lost = false;   // not all of it is there any more
  uint64_t n_tokens = 0;  // of the longest layer
  uint64_t saved_ns = 0;  // since 1970
  uint32_t keep_s = 0;    // of a prefix that nobody forks; 0: for ever, or it is none
  uint64_t bytes = 0;     // charged: of its pages, whole, and of what it has besides
};

// What became of a save or a load that had begun.
enum class SnapshotEnd : uint8_t { kOk, kQuota, kNoSpace, kIo, kLost, kCorrupt, kOther };
inline constexpr std::array<const char*, 7> kSnapshotEndNames = {
    "ok", "quota", "no_space", "io", "lost", "corrupt", "other"};

struct SnapshotStats {
  uint64_t n_snapshots = 0;
  uint64_t bytes = 0;   // charged for them
  uint64_t n_lost = 0;  // not whole any more when the tier was opened
  // Since the engine was opened, by SnapshotEnd.
  std::array<uint64_t, kSnapshotEndNames.size()> n_saves{};
  std::array<uint64_t, kSnapshotEndNames.size()> n_loads{};
  uint64_t bytes_written = 0;  // by saves: of pages that the tier did not have yet
  // Those that are under way, and the pages of these saves that are in the tier, or still to go.
  uint64_t n_saving = 0;
  uint64_t n_loading = 0;
  uint64_t n_pages_saved = 0;
  uint64_t n_pages_to_save = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_SNAPSHOT_INFO_H_
