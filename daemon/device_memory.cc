// SPDX-License-Identifier: Apache-2.0
#include "daemon/device_memory.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include "base/round.h"
#include "daemon/values.h"
#include "device/host_chunks.h"
#include "device/store_wire.h"
#include "ipc/frame_channel.h"

namespace kvm::daemon {

namespace {

constexpr uint32_t kMostDevices = 64;

}  // namespace

std::vector<uint32_t> device_list(std::string_view text) {
  std::vector<uint32_t> list;
  for (;;) {
    const size_t end = std::min(text.find(','), text.size());
    const std::optional<uint64_t> number = parse_integer(text.substr(0, end));
    if (!number.has_value() || *number >= kMostDevices ||
        std::find(list.begin(), list.end(), *number) != list.end()) {
      return {};
    }
    list.push_back(static_cast<uint32_t>(*number));
    if (end == text.size()) {
      return list;
    }
    text.remove_prefix(end + 1);
  }
}

bool is_device_list(const std::string& text) { return !device_list(text).empty(); }

// --- A client -----------------------------------------------------------------------------------

DeviceTenant::DeviceTenant(std::unique_ptr<device::StoreServer> server, device::Budget* host,
                           const device::DeviceStoreOptions& options,
                           std::atomic<uint64_t>* n_tenants, std::string name)
    : server_(std::move(server)), host_(host), n_tenants_(n_tenants), name_(std::move(name)) {
  thread_ = std::thread([this, options] { run(options); });
  n_tenants_->fetch_add(1, std::memory_order_relaxed);
}

DeviceTenant::~DeviceTenant() {
  stop();
  if (thread_.joinable()) {
    thread_.join();
    n_tenants_->fetch_sub(1, std::memory_order_relaxed);
  }
}

void DeviceTenant::stop() {
  const std::lock_guard lock(mutex_);
  if (server_ != nullptr) {
    server_->stop();
  }
}

void DeviceTenant::run(const device::DeviceStoreOptions& options) {
  Status why;
  try {
    why = server_->serve(options);
  } catch (const std::bad_alloc&) {
    why = Status::fixed(KVM_ERR_NO_MEMORY, "there is no memory for what it asks");
  }
  // That a client goes is the session's to tell.
  if (why.code() != KVM_ERR_DISCONNECTED) {
    spdlog::warn("device memory of {} is given back: {}", name_, why.message());
  }
  std::unique_ptr<device::StoreServer> ending;
  {
    const std::lock_guard lock(mutex_);
    ending = std::move(server_);
  }
  ending.reset();
  host_->give_back(options.host_bytes);
}

// --- Devices ------------------------------------------------------------------------------------

Result<std::unique_ptr<DeviceMemory>> DeviceMemory::open(const Options& options,
                                                         const OpenDevice& open) {
  if (options.device_pool.bytes == 0) {
    return std::unique_ptr<DeviceMemory>();
  }
  std::unique_ptr<DeviceMemory> memory(new DeviceMemory(options.device_host.bytes));
  const uint64_t pool = options.device_pool.bytes;
  memory->quota_bytes_ = options.device_quota.resolve(pool);
  for (const uint32_t ordinal : device_list(options.device_numbers)) {
    Result<std::unique_ptr<device::SharingDriver>> driver = open(ordinal);
    if (!driver.is_ok()) {
      return Status(driver.status().code(), fmt::format("device {} of device.numbers: {}", ordinal,
                                                        driver.status().message()));
    }
    const uint64_t free = driver.value()->facts().free_bytes;
    if (pool > free) {
      return Status(KVM_ERR_INVALID, fmt::format("device.pool is {}; device {} has {} free",
                                                 format_bytes(pool), ordinal, format_bytes(free)));
    }
    auto device = std::make_unique<Device>();
    device->ordinal = ordinal;
    device->driver = std::move(driver).value();
    device->pool = std::make_unique<device::Budget>(pool);
    memory->devices_.push_back(std::move(device));
  }
  return memory;
}

Result<DeviceMemory::Admitted> DeviceMemory::admit(const Asked& asked, const std::string& name) {
  const auto found = std::find_if(devices_.begin(), devices_.end(), [&asked](const auto& device) {
    return device->driver->facts().uuid == asked.uuid;
  });
  if (found == devices_.end()) {
    std::string own;
    for (const auto& device : devices_) {
      own += fmt::format("{}{} (device {})", own.empty() ? "" : ", ",
                         device::uuid_text(device->driver->facts().uuid), device->ordinal);
    }
    return Status(KVM_ERR_NOT_FOUND,
                  fmt::format("device {} of the client is {}; kvmd owns memory of {}, by its "
                              "device.numbers",
                              asked.ordinal, device::uuid_text(asked.uuid), own));
  }
  Device& of = **found;
  const uint64_t host_bytes = asked.host_bytes;
  device::DeviceStoreOptions options;
  options.pool_bytes = asked.pool_bytes == 0 ? quota_bytes_ : asked.pool_bytes;
  if (options.pool_bytes > quota_bytes_) {
    return Status(KVM_ERR_QUOTA,
                  fmt::format("pool_bytes is {}; a client may have {} (device.quota)",
                              options.pool_bytes, quota_bytes_));
  }
  if (host_bytes > host_.capacity()) {
    return Status(KVM_ERR_QUOTA,
                  fmt::format("host_bytes is {}; all clients together have {} (device.host)",
                              host_bytes, host_.capacity()));
  }
  options.host_bytes = round_up(host_bytes, device::kChunkBytes);
  if (!host_.take(options.host_bytes)) {
    return Status(KVM_ERR_NO_SPACE,
                  fmt::format("host_bytes is {}; of {} for spilled sequences {} are taken",
                              host_bytes, host_.capacity(), host_.used()));
  }
  Admitted admitted;
  const auto make = [&]() -> Status {
    KVM_TRY_ASSIGN(auto ends, ipc::FrameChannel::make_pair());
    KVM_TRY_ASSIGN(ipc::SharedMemory words,
                   ipc::create_shared_memory("kvm-device-words", sizeof(device::wire::Words),
                                             ipc::PeerAccess::kReadWrite));
    auto server = std::make_unique<device::StoreServer>(
        of.driver.get(), of.pool.get(), std::move(ends.first), std::move(words.mapping));
    try {
      admitted.tenant.reset(
          new DeviceTenant(std::move(server), &host_, options, &of.n_tenants, name));
    } catch (const std::system_error& error) {
      return Status(KVM_ERR_NO_MEMORY, fmt::format("no thread for the client: {}", error.what()));
    }
    admitted.channel = std::move(ends.second);
    admitted.words = std::move(words.fd);
    admitted.pool_bytes = options.pool_bytes;
    return Status::ok();
  };
  Status made;
  try {
    made = make();
  } catch (const std::bad_alloc&) {
    made = Status::fixed(KVM_ERR_NO_MEMORY, "there is no memory for the client");
  }
  if (!made.is_ok()) {
    host_.give_back(options.host_bytes);
    return made;
  }
  return admitted;
}

std::vector<DeviceFigures> DeviceMemory::figures() const {
  std::vector<DeviceFigures> figures;
  for (const auto& device : devices_) {
    figures.push_back({device->ordinal, device->pool->capacity(), device->pool->used(),
                       device->n_tenants.load(std::memory_order_relaxed)});
  }
  return figures;
}

}  // namespace kvm::daemon
