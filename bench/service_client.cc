// SPDX-License-Identifier: Apache-2.0
#include "bench/service_client.h"

#include "bench/harness.h"

namespace kvm::bench {

void require_ok(kvm_status status, const char* what) {
  if (status != KVM_OK) {
    require(Status(status, kvm_last_error()), what);
  }
}

kvm_client* connect(const std::string& socket) {
  kvm_connect_params params{};
  params.struct_size = sizeof(params);
  params.socket_path = socket.c_str();
  params.client_name = "kvm-bench";
  kvm_client* client = nullptr;
  require_ok(kvm_connect(&params, &client), "connect");
  return client;
}

kvm_queue* make_queue(kvm_client* client, uint64_t spin_ns) {
  kvm_queue_params params{};
  params.struct_size = sizeof(params);
  params.spin_ns = spin_ns;
  kvm_queue* queue = nullptr;
  require_ok(kvm_queue_create(client, &params, &queue), "queue");
  return queue;
}

ArenaTensor allocate(kvm_arena* arena, uint64_t size_bytes, uint32_t dtype) {
  ArenaTensor out;
  require_ok(kvm_arena_alloc(arena, size_bytes, 0, &out.tensor.buffer), "arena_alloc");
  out.tensor.dtype = dtype;
  out.data = kvm_arena_data(arena, out.tensor.buffer);
  out.size_bytes = size_bytes;
  return out;
}

}  // namespace kvm::bench
