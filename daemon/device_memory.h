// SPDX-License-Identifier: Apache-2.0
// Device memory that kvmd owns for clients that run on GPUs (docs/gpu.md, "Memory that kvmd owns").
// Each such client has a DeviceTenant: a thread of its own that keeps its books
// (device/store_server.h), so that no client waits for another one's device or process.
//
// Threads: the dispatcher, except where said.
#ifndef KVM_DAEMON_DEVICE_MEMORY_H_
#define KVM_DAEMON_DEVICE_MEMORY_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/status.h"
#include "daemon/options.h"
#include "device/budget.h"
#include "device/driver.h"
#include "device/store_server.h"
#include "ipc/fd.h"
#include "ipc/memory.h"

namespace kvm::daemon {

// "0,1": ordinals of devices, each once.
bool is_device_list(const std::string& text);
std::vector<uint32_t> device_list(std::string_view text);

using OpenDevice = std::function<Result<std::unique_ptr<device::SharingDriver>>(uint32_t ordinal)>;

// What one client has of a device. Destroying it gives everything back, and waits until that is
// done: threads that may wait do so.
class DeviceTenant {
 public:
  ~DeviceTenant();
  DeviceTenant(const DeviceTenant&) = delete;
  DeviceTenant& operator=(const DeviceTenant&) = delete;

  // Nothing is done for the client from here on. Does not wait.
  void stop();

 private:
  friend class DeviceMemory;
  DeviceTenant(std::unique_ptr<device::StoreServer> server, device::Budget* host,
               const device::DeviceStoreOptions& options, std::atomic<uint64_t>* n_tenants,
               std::string name);
  void run(const device::DeviceStoreOptions& options);

  std::mutex mutex_;  // guards the pointer, not what it points to
  std::unique_ptr<device::StoreServer> server_;
  device::Budget* const host_;
  std::atomic<uint64_t>* const n_tenants_;
  const std::string name_;  // for the log
  std::thread thread_;
};

// DeviceFigures is what operators see of one device.
struct DeviceFigures {
  uint32_t ordinal = 0;
  uint64_t pool_bytes = 0;
  uint64_t used_bytes = 0;
  uint64_t n_clients = 0;
};

class DeviceMemory {
 public:
  // Opens the devices of the options; null: device.pool is 0. Fails: DEVICE, UNSUPPORTED, as
  // `open`; INVALID (a pool larger than what a device has free).
  static Result<std::unique_ptr<DeviceMemory>> open(const Options& options, const OpenDevice& open);

  struct Asked {
    device::DeviceUuid uuid{};
    uint32_t ordinal = 0;     // what the client calls it
    uint64_t pool_bytes = 0;  // 0: as many as a client may have
    uint64_t host_bytes = 0;
  };
  // A client's share, and what the client gets of it: the other end of the channel, and the words
  // that both sides map.
  // Fails: NOT_FOUND (no such device), QUOTA, NO_SPACE (of host memory), NO_MEMORY, LIMIT (no
  // descriptors left).
  struct Admitted {
    std::unique_ptr<DeviceTenant> tenant;
    ipc::Fd channel;
    ipc::Fd words;
    uint64_t pool_bytes = 0;
  };
  Result<Admitted> admit(const Asked& asked, const std::string& name);

  std::vector<DeviceFigures> figures() const;
  uint64_t host_capacity_bytes() const { return host_.capacity(); }
  uint64_t host_used_bytes() const { return host_.used(); }

 private:
  struct Device {
    uint32_t ordinal = 0;
    std::unique_ptr<device::SharingDriver> driver;
    std::unique_ptr<device::Budget> pool;
    std::atomic<uint64_t> n_tenants{0};
  };

  explicit DeviceMemory(uint64_t host_bytes) : host_(host_bytes) {}

  std::vector<std::unique_ptr<Device>> devices_;
  device::Budget host_;
  uint64_t quota_bytes_ = 0;
};

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_DEVICE_MEMORY_H_
