// SPDX-License-Identifier: Apache-2.0
#include "tiers/read_meter.h"

#include <algorithm>

#include "base/assert.h"

namespace kvm::tiers {
namespace {

// A period's part of what is known after it: a drive that others use for a while is not taken for
// slow for long.
constexpr double kShare = 0.25;
constexpr double kLeastBytesPerS = 1e6;

void move_towards(std::atomic<double>* rate, double seen) {
  const double known = rate->load(std::memory_order_relaxed);
  rate->store(known + kShare * (seen - known), std::memory_order_relaxed);
}

}  // namespace

void ReadMeter::begin(uint64_t now_ns) {
  if (n_in_flight_++ == 0) {
    begin_ns_ = now_ns;
    n_reads_ = n_apart_ = 0;
    size_bytes_ = 0;
  }
}

void ReadMeter::end(uint64_t now_ns, uint64_t size_bytes, bool is_apart) {
  KVM_ASSERT(n_in_flight_ != 0);
  --n_in_flight_;
  if (size_bytes != 0) {
    ++n_reads_;
    n_apart_ += is_apart ? 1 : 0;
    size_bytes_ += size_bytes;
  }
  const uint64_t took_ns = now_ns - std::min(begin_ns_, now_ns);
  if (n_in_flight_ == 0 || took_ns >= kPeriodNs) {
    learn(took_ns);
    begin_ns_ = now_ns;
    n_reads_ = n_apart_ = 0;
    size_bytes_ = 0;
  }
}

void ReadMeter::learn(uint64_t took_ns) {
  if (n_reads_ < kLeastReads || took_ns == 0) {
    return;
  }
  const auto took = static_cast<double>(took_ns);
  if (n_apart_ * 8 <= n_reads_) {
    move_towards(&bytes_per_s_,
                 std::max(static_cast<double>(size_bytes_) / took * 1e9, kLeastBytesPerS));
  } else if (n_apart_ * 2 >= n_reads_) {
    const double beyond = took - rates().in_order_ns(size_bytes_);
    move_towards(&alone_ns_, std::max(beyond / n_apart_, 0.0));
  }
}

}  // namespace kvm::tiers
