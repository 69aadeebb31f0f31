// SPDX-License-Identifier: Apache-2.0
#include "daemon/run.h"
#include "device/driver.h"
#include "engine/engine.h"
#include "engine/run/engine_disk.h"

int main(int argc, char** argv) {
  return kvm::daemon::run_kvmd(argc, argv, kvm::engine::Engine::open, kvm::engine::ring_bytes,
                               kvm::device::open_sharing_driver);
}
