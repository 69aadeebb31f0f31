// SPDX-License-Identifier: Apache-2.0
// Tensors of a caller, checked and resolved to addresses in this process.
#ifndef KVM_CLIENT_TENSORS_H_
#define KVM_CLIENT_TENSORS_H_

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "base/status.h"
#include "kvm.h"

namespace kvm::client {

// A Tensor has been checked. data == nullptr: absent.
struct Tensor {
  uint8_t* data = nullptr;
  uint64_t size_bytes = 0;
  uint32_t region = 0;  // 0: HOST memory
  uint32_t dtype = 0;
  uint64_t offset = 0;  // in the region
  uint64_t stride_layer = 0;
  uint64_t stride_row = 0;
  uint64_t stride_head = 0;
};

enum class Element : uint8_t { kAny, kF32 };

// One tensor to be resolved: where from, what it is called in a sentence, where to.
struct TensorSlot {
  const kvm_tensor* from;
  const char* name;
  Element element;
  Tensor* to;
};

// An ArenaDirectory knows the arenas of a client. Threads: any.
class ArenaDirectory {
 public:
  void add(uint32_t region, void* data, uint64_t size_bytes);
  void remove(uint32_t region);
  // Checks and resolves. Fails: INVALID (the sentence names the tensor), UNSUPPORTED (DEVICE).
  Status resolve(std::span<const TensorSlot> slots) const;

 private:
  struct Arena {
    uint32_t region;
    uint8_t* data;
    uint64_t size_bytes;
  };

  Status resolve_one(const TensorSlot& slot) const;

  mutable std::mutex mutex_;
  std::vector<Arena> arenas_;
};

// INVALID when an output shares bytes with an input or another output.
Status check_overlap(std::span<const TensorSlot> inputs, std::span<const TensorSlot> outputs);

}  // namespace kvm::client

#endif  // KVM_CLIENT_TENSORS_H_
