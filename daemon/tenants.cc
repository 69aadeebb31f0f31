// SPDX-License-Identifier: Apache-2.0
#include "daemon/tenants.h"

#include <utility>

namespace kvm::daemon {
namespace {

using engine::Resource;

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') {
    text.remove_prefix(1);
  }
  while (!text.empty() && text.back() == ' ') {
    text.remove_suffix(1);
  }
  return text;
}

// The part before `separator`, which is removed with it.
std::string_view cut(std::string_view* text, char separator) {
  const size_t at = text->find(separator);
  const std::string_view part = text->substr(0, at);
  *text = at == std::string_view::npos ? std::string_view() : text->substr(at + 1);
  return trim(part);
}

bool is_memory(Resource resource) {
  return resource == Resource::kBytes || resource == Resource::kMemoryBytes ||
         resource == Resource::kArenaBytes || resource == Resource::kSnapshotBytes;
}

std::optional<Size> parse_limit(Resource resource, std::string_view text) {
  if (text == "unlimited") {
    return Size{.is_share = false, .percent = 0, .bytes = engine::kNoLimit};
  }
  if (is_memory(resource)) {
    return parse_size(text);
  }
  const std::optional<uint64_t> count = parse_integer(text);
  return count ? std::optional<Size>(Size{.is_share = false, .percent = 0, .bytes = *count})
               : std::nullopt;
}

bool parse_sizes(std::string_view text, TenantSizes* sizes) {
  do {
    std::string_view setting = cut(&text, ',');
    const std::optional<Resource> resource = engine::parse_resource(cut(&setting, '='));
    if (!resource || (*sizes)[*resource]) {
      return false;
    }
    (*sizes)[*resource] = parse_limit(*resource, trim(setting));
    if (!(*sizes)[*resource]) {
      return false;
    }
  } while (!text.empty());
  return true;
}

engine::LimitChanges changes_of(const TenantSizes& sizes, const engine::Amounts& wholes) {
  engine::LimitChanges changes;
  for (const Resource resource : engine::kResources) {
    if (sizes[resource]) {
      changes[resource] = sizes[resource]->resolve(wholes[resource]);
    }
  }
  return changes;
}

}  // namespace

std::optional<TenantOptions> parse_tenants(std::string_view text) {
  TenantOptions options;
  if (trim(text) == "none") {
    return options;
  }
  bool has_default = false;
  do {
    std::string_view settings = cut(&text, ';');
    const std::string_view who = cut(&settings, ':');
    TenantSizes* sizes = &options.each;
    if (who == "default") {
      if (std::exchange(has_default, true)) {
        return std::nullopt;
      }
    } else {
      const std::optional<uint64_t> uid = parse_integer(who);
      if (!uid || *uid > UINT32_MAX || options.own.contains(static_cast<uint32_t>(*uid))) {
        return std::nullopt;
      }
      sizes = &options.own[static_cast<uint32_t>(*uid)];
    }
    if (!parse_sizes(settings, sizes)) {
      return std::nullopt;
    }
  } while (!text.empty());
  return options;
}

engine::TenantLimits tenant_limits(const TenantOptions& options, const engine::Amounts& wholes) {
  engine::TenantLimits limits;
  const engine::LimitChanges each = changes_of(options.each, wholes);
  for (const Resource resource : engine::kResources) {
    limits.each[resource] = each[resource].value_or(engine::kNoLimit);
  }
  for (const auto& [uid, sizes] : options.own) {
    limits.own[uid] = changes_of(sizes, wholes);
  }
  return limits;
}

}  // namespace kvm::daemon
