// SPDX-License-Identifier: Apache-2.0
// The daemon counts the requests that it has answered: by verb how many and how long, by
// mode of attention how many keys. docs/operations.md lists the series.
//
// Threads: values.
#ifndef KVM_DAEMON_REQUEST_STATS_H_
#define KVM_DAEMON_REQUEST_STATS_H_

#include <array>
#include <cstdint>

#include "base/stats_text.h"
#include "engine/engine.h"

namespace kvm::daemon {

// kNull: nop and cancel, which the daemon answers itself, within the turn that took them.
enum class RequestVerb : uint8_t {
  kAppend,
  kAttend,
  kStep,
  kRead,
  kObserve,
  kSequence,
  kSnapshot,
  kNull
};
inline constexpr std::array<const char*, 8> kRequestVerbNames = {
    "append", "attend", "step", "read", "observe", "sequence", "snapshot", "null"};

// Modes that attention can have had (KVM_MODE_*, not DEFAULT or AUTO).
inline constexpr std::array<const char*, 4> kAttendModeNames = {"exact", "topk", "sampled",
                                                                "verified"};

// Times up to kDurationBoundsNs[i], and above the bound before; the last: the rest. From a null
// request's turn to the longest prefill, about a factor of two apart.
inline constexpr std::array<uint64_t, 22> kDurationBoundsNs = {
    1'000,         2'000,         5'000,         10'000,        20'000,      50'000,
    100'000,       200'000,       500'000,       1'000'000,     2'000'000,   5'000'000,
    10'000'000,    20'000'000,    50'000'000,    100'000'000,   200'000'000, 500'000'000,
    1'000'000'000, 2'000'000'000, 5'000'000'000, 10'000'000'000};

struct DurationHistogram {
  std::array<uint64_t, kDurationBoundsNs.size() + 1> buckets{};
  uint64_t sum_ns = 0;

  void add(uint64_t ns);
};

struct AttendModeStats {
  uint64_t n_requests = 0;
  uint64_t keys_present = 0;
  uint64_t keys_read = 0;
};

struct RequestStats {
  std::array<DurationHistogram, kRequestVerbNames.size()> durations{};
  std::array<AttendModeStats, kAttendModeNames.size()> modes{};
  uint64_t n_not_finite = 0;  // (row, q head) that were answered NaN

  void add(RequestVerb verb, const RequestResult& result);
};

void write_requests(const RequestStats& stats, StatsText* out);

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_REQUEST_STATS_H_
