// SPDX-License-Identifier: Apache-2.0
// libkvm has no engine.
#include "client/backend.h"

namespace kvm::client {

Result<std::shared_ptr<Client>> open_embedded_client(const kvm_embedded_params&) {
  return Status(KVM_ERR_UNSUPPORTED,
                "libkvm has no engine of its own: link libkvm_embedded, or use kvm_connect");
}

}  // namespace kvm::client
