// SPDX-License-Identifier: Apache-2.0
// A ReadMeter finds the ReadRates of a device by what its reads take, while many are in flight. Of
// periods in which nearly all follow each other the bytes of a second, of periods in which most lie
// apart what each took beyond its bytes.
//
// Threads: begin() and end() on one; rates() on any.
#ifndef KVM_TIERS_READ_METER_H_
#define KVM_TIERS_READ_METER_H_

#include <atomic>
#include <cstdint>

#include "tiers/read_rates.h"

namespace kvm::tiers {

class ReadMeter {
 public:
  // A period of fewer reads says more of a single one's latency than of the device.
  static constexpr uint32_t kLeastReads = 16;
  // One that goes on for so long is looked at, and the next begins.
  static constexpr uint64_t kPeriodNs = 50'000'000;

  // A read begins, and one ends, that has brought so many bytes, or 0: it failed. is_apart: no
  // other that was asked for with it lies next to it.
  void begin(uint64_t now_ns);
  void end(uint64_t now_ns, uint64_t size_bytes, bool is_apart);
  ReadRates rates() const {
    return {bytes_per_s_.load(std::memory_order_relaxed),
            alone_ns_.load(std::memory_order_relaxed)};
  }

 private:
  void learn(uint64_t took_ns);

  // SYNC: none; each is by itself.
  std::atomic<double> bytes_per_s_{ReadRates().bytes_per_s};
  std::atomic<double> alone_ns_{ReadRates().alone_ns};
  // Of this period, which begins where one read begins and none is in flight.
  uint64_t begin_ns_ = 0;
  uint32_t n_in_flight_ = 0;
  uint32_t n_reads_ = 0;
  uint32_t n_apart_ = 0;
  uint64_t size_bytes_ = 0;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_READ_METER_H_
