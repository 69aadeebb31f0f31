// SPDX-License-Identifier: Apache-2.0
// Precompiled into every library and program. Standard headers only: a file must still include what
// it uses, since a build with KVM_PCH=OFF has none of this.
#ifndef KVM_CMAKE_PCH_H_
#define KVM_CMAKE_PCH_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#endif  // KVM_CMAKE_PCH_H_
