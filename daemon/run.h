// SPDX-License-Identifier: Apache-2.0
// kvmd from its arguments to its exit status.
#ifndef KVM_DAEMON_RUN_H_
#define KVM_DAEMON_RUN_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "base/status.h"
#include "daemon/device_memory.h"
#include "engine/engine.h"

namespace kvm::daemon {

using OpenEngine =
    std::function<Result<std::unique_ptr<engine::Engine>>(const engine::EngineOptions& options)>;

// As engine::ring_bytes: kvmd knows of the engine no more than its interface.
using RingBytes = std::function<uint64_t(const engine::Engine& engine)>;

// Returns the exit status: 0 after a signal, 1 when the service could not start, 2 when an option
// is wrong. `open_engine` is Engine::open, or a test's own, as are `ring_bytes`, and `open_device`,
// which is device::open_sharing_driver.
int run_kvmd(int argc, const char* const* argv, const OpenEngine& open_engine,
             const RingBytes& ring_bytes, const OpenDevice& open_device);

}  // namespace kvm::daemon

#endif  // KVM_DAEMON_RUN_H_
