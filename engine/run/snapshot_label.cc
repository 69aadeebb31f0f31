// SPDX-License-Identifier: Apache-2.0
#include "engine/run/snapshot_label.h"

#include <fmt/format.h>

#include <charconv>
#include <cstring>
#include <utility>

#include "base/limits.h"
#include "base/request.h"

namespace kvm::engine {
namespace {

constexpr size_t kUidDigits = 10;
static_assert(kUidDigits + 1 + kMaxSnapshotNameBytes <= tiers::kMaxObjectKeyBytes);
static_assert(sizeof(SnapshotLabel) + kMaxNameBytes <= tiers::kMaxObjectLabelBytes);

}  // namespace

std::string snapshot_key(const SnapshotName& name) {
  return fmt::format("{:010}/{}", name.uid, name.name);
}

std::optional<SnapshotName> parse_snapshot_key(std::string_view key) {
  SnapshotName name;
  if (key.size() <= kUidDigits + 1 || key[kUidDigits] != '/') {
    return std::nullopt;
  }
  const char* end = key.data() + kUidDigits;
  const auto [parsed, error] = std::from_chars(key.data(), end, name.uid);
  if (error != std::errc() || parsed != end) {
    return std::nullopt;
  }
  name.name = key.substr(kUidDigits + 1);
  return name;
}

std::string snapshot_label(const Space& space, uint64_t n_tokens, uint64_t saved_ns,
                           uint32_t keep_s) {
  SnapshotLabel label;
  label.keep_s = keep_s;
  label.n_tokens = n_tokens;
  label.saved_ns = saved_ns;
  label.layout_digest = space.layout_digest;
  label.policy_digest = space.policy_digest;
  label.fingerprint = space.fingerprint;
  std::string bytes(sizeof label, '\0');
  std::memcpy(bytes.data(), &label, sizeof label);
  return bytes + space.name;
}

std::optional<SnapshotInfo> snapshot_info(const tiers::ObjectInfo& object) {
  std::optional<SnapshotName> name = parse_snapshot_key(object.key);
  if (!name) {
    return std::nullopt;
  }
  SnapshotInfo info;
  info.name = std::move(*name);
  info.bytes = object.page_bytes + object.body_bytes;
  info.is_lost = object.is_lost;
  SnapshotLabel label;
  if (object.label.size() > sizeof label && object.label.size() <= sizeof label + kMaxNameBytes) {
    std::memcpy(&label, object.label.data(), sizeof label);
    if (label.version == 1) {
      info.space_name = object.label.substr(sizeof label);
      info.layout_digest = label.layout_digest;
      info.policy_digest = label.policy_digest;
      info.fingerprint = label.fingerprint;
      info.n_tokens = label.n_tokens;
      info.saved_ns = label.saved_ns;
      info.keep_s = label.keep_s;
    }
  }
  return info;
}

}  // namespace kvm::engine
