// SPDX-License-Identifier: Apache-2.0
// A client of the daemon as the benches need it: every failure ends the program with its sentence.
#ifndef KVM_BENCH_SERVICE_CLIENT_H_
#define KVM_BENCH_SERVICE_CLIENT_H_

#include <cstdint>
#include <string>

#include "kvm.h"

namespace kvm::bench {

void require_ok(kvm_status status, const char* what);

kvm_client* connect(const std::string& socket);
// spin_ns as in kvm_queue_params.
kvm_queue* make_queue(kvm_client* client, uint64_t spin_ns);

// One tensor in an arena, and where it lies in this process.
struct ArenaTensor {
  kvm_tensor tensor{};
  void* data = nullptr;
  uint64_t size_bytes = 0;

  uint16_t* halves() const { return static_cast<uint16_t*>(data); }
};
ArenaTensor allocate(kvm_arena* arena, uint64_t size_bytes, uint32_t dtype);

}  // namespace kvm::bench

#endif  // KVM_BENCH_SERVICE_CLIENT_H_
