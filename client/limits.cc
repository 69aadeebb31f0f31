// SPDX-License-Identifier: Apache-2.0
#include "client/limits.h"

#include "base/limits.h"
#include "ipc/wire.h"

namespace kvm::client {

void fill_limits(kvm_client_info* info) {
  info->struct_size = sizeof(*info);
  info->protocol_major = ipc::kProtocolMajor;
  info->protocol_minor = ipc::kProtocolMinor;
  info->max_queues = ipc::kMaxQueuesPerClient;
  info->max_arenas = ipc::kMaxArenasPerClient;
  info->max_outstanding = kMaxOutstanding;
  info->max_items = kMaxItems;
  info->max_query_rows = kMaxQueryRows;
  info->max_arena_bytes = ipc::kMaxArenaBytes;
}

}  // namespace kvm::client
