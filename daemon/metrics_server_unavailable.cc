// SPDX-License-Identifier: Apache-2.0
#include "daemon/metrics_server.h"

namespace kvm::daemon {

Result<std::unique_ptr<MetricsServer>> MetricsServer::start(const ListenAddress&, mode_t,
                                                            MakeText) {
  return Status(KVM_ERR_UNSUPPORTED,
                "metrics.listen: this kvmd was built without libmicrohttpd and serves no metrics; "
                "kvmctl metrics prints them");
}

}  // namespace kvm::daemon
