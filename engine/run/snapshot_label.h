// SPDX-License-Identifier: Apache-2.0
// What an object of the slow tier is called, and what is said of it, where it is a snapshot. DISK:
//
//   key    the uid in ten decimal digits, '/', the name: so the keys of a user follow each other
//   label  a SnapshotLabel, and the name of the space
//
// Threads: any.
#ifndef KVM_ENGINE_RUN_SNAPSHOT_LABEL_H_
#define KVM_ENGINE_RUN_SNAPSHOT_LABEL_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "engine/space/space.h"
#include "engine/store/snapshot_info.h"
#include "tiers/object_store.h"

namespace kvm::engine {

// What the names of snapshots of prefixes begin with (engine/run/kept_prefixes.h). Nobody else
// saves under such a name.
inline constexpr std::string_view kPrefixSnapshots = ".prefix/";

std::string snapshot_key(const SnapshotName& name);
// nullopt: no snapshot has such a key.
std::optional<SnapshotName> parse_snapshot_key(std::string_view key);

// Little-endian.
struct SnapshotLabel {
  uint32_t version = 1;
  uint32_t keep_s = 0;  // of a prefix that nobody forks, rounded up; 0: for ever, or it is none
  uint64_t n_tokens = 0;
  uint64_t saved_ns = 0;
  std::array<uint8_t, 16> layout_digest{};
  std::array<uint8_t, 16> policy_digest{};
  std::array<uint8_t, 32> fingerprint{};
};
static_assert(sizeof(SnapshotLabel) == 88);

std::string snapshot_label(const Space& space, uint64_t n_tokens, uint64_t saved_ns,
                           uint32_t keep_s = 0);
// What a listing shows. A label that is none leaves most of it empty. nullopt: it is no snapshot.
std::optional<SnapshotInfo> snapshot_info(const tiers::ObjectInfo& object);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_SNAPSHOT_LABEL_H_
