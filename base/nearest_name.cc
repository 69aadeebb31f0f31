// SPDX-License-Identifier: Apache-2.0
#include "base/nearest_name.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace kvm {

uint32_t edit_distance(std::string_view a, std::string_view b) {
  // Rows i-2, i-1 and i of the usual table; the oldest serves the swap of neighbours.
  std::vector<uint32_t> oldest(b.size() + 1);
  std::vector<uint32_t> previous(b.size() + 1);
  std::vector<uint32_t> current(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) {
    previous[j] = static_cast<uint32_t>(j);
  }
  for (size_t i = 1; i <= a.size(); ++i) {
    current[0] = static_cast<uint32_t>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const uint32_t replace = previous[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      current[j] = std::min({replace, previous[j] + 1, current[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        current[j] = std::min(current[j], oldest[j - 2] + 1);
      }
    }
    std::swap(oldest, previous);
    std::swap(previous, current);
  }
  return previous[b.size()];
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates) {
  std::string best;
  // A third of the letters wrong, and it is another word.
  uint32_t best_distance = static_cast<uint32_t>(name.size() / 3) + 2;
  for (const std::string& candidate : candidates) {
    uint32_t distance = edit_distance(name, candidate);
    if (!name.empty() && candidate.starts_with(name)) {
      distance = std::min(distance, 1u);
    }
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

}  // namespace kvm
