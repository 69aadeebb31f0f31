// SPDX-License-Identifier: Apache-2.0
// What somebody may have meant who wrote a name that is not there.
//
// Threads: pure functions.
#ifndef KVM_BASE_NEAREST_NAME_H_
#define KVM_BASE_NEAREST_NAME_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvm {

// Edits (insert, delete, replace, swap neighbours) that turn one into the other.
uint32_t edit_distance(std::string_view a, std::string_view b);
// The candidate with the fewest edits, the first of several; one that begins with the name is one
// edit away. Empty when none is near enough to be meant.
std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace kvm

#endif  // KVM_BASE_NEAREST_NAME_H_
