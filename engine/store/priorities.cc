// SPDX-License-Identifier: Apache-2.0
#include "engine/store/priorities.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/clock.h"
#include "base/round.h"

namespace kvm::engine {
namespace {

using Part = Priorities::Part;

constexpr uint32_t kDefault = KVM_PRIORITY_DEFAULT;

bool says_same(const Part& a, const Part& b) {
  return a.priority == b.priority && a.until_ns == b.until_ns;
}

// Behind the others, or as one with the last.
void append(const Part& part, std::vector<Part>* to) {
  if (part.begin >= part.end) {
    return;
  }
  if (!to->empty() && to->back().end == part.begin && says_same(to->back(), part)) {
    to->back().end = part.end;
  } else {
    to->push_back(part);
  }
}

}  // namespace

Status Priorities::set(const PriorityRange& range, uint64_t now_ns) {
  KVM_ASSERT(range.begin < range.end);
  const Part added = {
      .begin = range.begin / kPageTokens,
      .end = (range.end - 1) / kPageTokens + 1,
      .until_ns = range.keep_ns == 0 ? UINT64_MAX : add_saturating(now_ns, range.keep_ns),
      .priority = range.priority};
  const bool is_default = added.priority == kDefault;
  std::vector<Part> parts;
  parts.reserve(parts_.size() + 2);
  bool is_added = is_default;
  for (const Part& old : parts_) {
    if (old.until_ns <= now_ns) {
      continue;
    }
    Part before = old;
    before.end = std::min(old.end, added.begin);
    append(before, &parts);
    if (!is_added && old.end > added.begin) {
      append(added, &parts);
      is_added = true;
    }
    Part behind = old;
    behind.begin = std::max(old.begin, added.end);
    append(behind, &parts);
  }
  if (!is_added) {
    append(added, &parts);
  }
  if (parts.size() > kMaxPriorityRanges) {
    return {KVM_ERR_LIMIT,
            fmt::format("the sequence has {} parts of different priorities; no more are allowed",
                        kMaxPriorityRanges)};
  }
  parts_ = std::move(parts);
  return Status::ok();
}

Priorities::Stretch Priorities::at(uint64_t page, uint64_t now_ns) const {
  for (const Part& part : parts_) {
    if (page < part.begin) {
      return {kDefault, part.begin};
    }
    if (page < part.end) {
      return {part.until_ns <= now_ns ? kDefault : part.priority, part.end};
    }
  }
  return {kDefault, UINT64_MAX};
}

Priorities Priorities::first(uint64_t n_tokens, uint64_t now_ns) const {
  const uint64_t end = div_up(n_tokens, kPageTokens);
  Priorities first;
  for (Part part : parts_) {
    part.end = std::min(part.end, end);
    if (part.until_ns > now_ns) {
      append(part, &first.parts_);
    }
  }
  return first;
}

bool Priorities::has(uint32_t priority) const {
  return std::any_of(parts_.begin(), parts_.end(),
                     [&](const Part& part) { return part.priority == priority; });
}

bool Priorities::has_expired(uint64_t now_ns) const {
  return std::any_of(parts_.begin(), parts_.end(),
                     [&](const Part& part) { return part.until_ns <= now_ns; });
}

void Priorities::expire(uint64_t now_ns) {
  std::erase_if(parts_, [&](const Part& part) { return part.until_ns <= now_ns; });
}

}  // namespace kvm::engine
