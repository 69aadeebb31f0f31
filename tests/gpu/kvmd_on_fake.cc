// SPDX-License-Identifier: Apache-2.0
// kvmd over fake devices, for tests of device memory that it owns. Ends with 99 where a device has
// complained, or something was not given back; the log says of what.
//
// $KVM_FAKE_SEED, $KVM_FAKE_MEMORY (bytes): of each device. $KVM_FAKE_FAIL: "copy=3,map=1", the
// operation's call of that number fails.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "daemon/run.h"
#include "engine/engine.h"
#include "engine/run/engine_disk.h"
#include "tests/gpu/fake_driver.h"

namespace {

using kvm::device::testing::FakeDriver;
using kvm::device::testing::FakeOptions;
using kvm::device::testing::Operation;

std::atomic<bool> is_wrong{false};

uint64_t number_of(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

void add_failures(FakeOptions* options) {
  const std::map<std::string, Operation> operations = {
      {"reserve", Operation::kReserve},   {"map", Operation::kMap},
      {"register", Operation::kRegister}, {"stream", Operation::kStream},
      {"event", Operation::kEvent},       {"record", Operation::kRecord},
      {"wait", Operation::kWait},         {"copy", Operation::kCopy},
      {"word", Operation::kWord},         {"query", Operation::kQuery}};
  const char* const text = std::getenv("KVM_FAKE_FAIL");
  std::string rest = text == nullptr ? "" : text;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find(','), rest.size());
    const std::string one = rest.substr(0, end);
    rest.erase(0, end + 1);
    const size_t sign = one.find('=');
    options->fail_first.emplace_back(operations.at(one.substr(0, sign)),
                                     std::stoull(one.substr(sign + 1)));
  }
}

kvm::Result<std::unique_ptr<kvm::device::SharingDriver>> open_fake(uint32_t ordinal) {
  if (ordinal > 1) {
    return kvm::Status(KVM_ERR_DEVICE,
                       "device is " + std::to_string(ordinal) + "; this machine has 2");
  }
  FakeOptions options;
  options.seed = number_of("KVM_FAKE_SEED", 1) + ordinal;
  options.number = static_cast<uint8_t>(ordinal);
  options.memory_bytes = number_of("KVM_FAKE_MEMORY", uint64_t{1} << 30);
  options.runs_by_itself = true;
  add_failures(&options);
  options.at_end = [](const FakeDriver& driver) {
    const std::string wrong = driver.complaints() + driver.leftovers();
    if (!wrong.empty()) {
      std::fprintf(stderr, "fake device: %s\n", wrong.c_str());
      is_wrong = true;
    }
  };
  return std::unique_ptr<kvm::device::SharingDriver>(std::make_unique<FakeDriver>(options));
}

}  // namespace

int main(int argc, char** argv) {
  const int status = kvm::daemon::run_kvmd(argc, argv, kvm::engine::Engine::open,
                                           kvm::engine::ring_bytes, open_fake);
  return is_wrong ? 99 : status;
}
