// SPDX-License-Identifier: Apache-2.0
#include "tiers/read_meter.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <deque>

namespace kvm::tiers {
namespace {

constexpr uint64_t kPageBytes = 32 << 10;

// A device that takes so long for a byte, and for each read besides, one after the other.
struct Device {
  double byte_ns;
  double read_ns;
  double now = 1e9;

  // n reads, `depth` of them in flight.
  void read(ReadMeter* meter, int n, int depth, bool is_apart, uint64_t size_bytes = kPageBytes) {
    int n_begun = 0;
    for (int i = 0; i < n; ++i) {
      for (; n_begun < n && n_begun < i + depth; ++n_begun) {
        meter->begin(static_cast<uint64_t>(now));
      }
      now += byte_ns * static_cast<double>(size_bytes) + (is_apart ? read_ns : 0);
      meter->end(static_cast<uint64_t>(now), size_bytes, is_apart);
    }
    now += 1e6;  // that it is idle is nobody's time
  }
};

TEST(ReadMeter, FindsTheRates) {
  ReadMeter meter;
  EXPECT_EQ(meter.rates().bytes_per_s, ReadRates().bytes_per_s);
  Device device{.byte_ns = 0.25, .read_ns = 50'000};
  for (int i = 0; i < 40; ++i) {
    device.read(&meter, 500, 8, false);
    device.read(&meter, 100, 8, true);
  }
  EXPECT_NEAR(meter.rates().bytes_per_s, 4e9, 4e7);
  EXPECT_NEAR(meter.rates().alone_ns, 50'000, 500);
  device = {.byte_ns = 1, .read_ns = 0, .now = device.now};
  for (int i = 0; i < 40; ++i) {
    device.read(&meter, 500, 8, false);
    device.read(&meter, 100, 8, true);
  }
  EXPECT_NEAR(meter.rates().bytes_per_s, 1e9, 1e7);
  EXPECT_NEAR(meter.rates().alone_ns, 0, 100);
}

// A few reads say nothing, nor do those that fail.
TEST(ReadMeter, FewReadsSayNothing) {
  ReadMeter meter;
  Device device{.byte_ns = 100, .read_ns = 1e6};
  for (int i = 0; i < 100; ++i) {
    device.read(&meter, ReadMeter::kLeastReads - 1, 4, i % 2 == 0);
    device.read(&meter, 100, 4, i % 2 == 0, 0);
  }
  EXPECT_EQ(meter.rates().bytes_per_s, ReadRates().bytes_per_s);
  EXPECT_EQ(meter.rates().alone_ns, ReadRates().alone_ns);
}

// A device that is never idle is looked at as well, and each kind of reads when it is the rule.
TEST(ReadMeter, PeriodsEnd) {
  ReadMeter meter;
  double now = 1e9;
  const auto go_on = [&](int n, bool is_apart, double took_ns) {
    for (int i = 0; i < n; ++i) {
      meter.begin(static_cast<uint64_t>(now));
      now += took_ns;
      meter.end(static_cast<uint64_t>(now), kPageBytes, is_apart);
    }
  };
  meter.begin(static_cast<uint64_t>(now));
  go_on(100'000, false, kPageBytes);
  EXPECT_NEAR(meter.rates().bytes_per_s, 1e9, 1e6);
  go_on(100'000, true, kPageBytes + 7000);
  EXPECT_NEAR(meter.rates().alone_ns, 7000, 100);
}

}  // namespace
}  // namespace kvm::tiers
