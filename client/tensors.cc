// SPDX-License-Identifier: Apache-2.0
#include "client/tensors.h"

#include <algorithm>
#include <string>

#include "base/dtype.h"

namespace kvm::client {

namespace {

Status invalid(const TensorSlot& slot, const std::string& what) {
  return Status(KVM_ERR_INVALID, std::string("tensor ") + slot.name + ": " + what);
}

bool overlap(const Tensor& a, const Tensor& b) {
  return a.data != nullptr && b.data != nullptr && a.data < b.data + b.size_bytes &&
         b.data < a.data + a.size_bytes;
}

}  // namespace

void ArenaDirectory::add(uint32_t region, void* data, uint64_t size_bytes) {
  const std::lock_guard lock(mutex_);
  arenas_.push_back({region, static_cast<uint8_t*>(data), size_bytes});
}

void ArenaDirectory::remove(uint32_t region) {
  const std::lock_guard lock(mutex_);
  std::erase_if(arenas_, [region](const Arena& arena) { return arena.region == region; });
}

Status ArenaDirectory::resolve(std::span<const TensorSlot> slots) const {
  const std::lock_guard lock(mutex_);
  for (const TensorSlot& slot : slots) {
    KVM_TRY(resolve_one(slot));
  }
  return Status::ok();
}

Status ArenaDirectory::resolve_one(const TensorSlot& slot) const {
  const kvm_tensor& from = *slot.from;
  const kvm_buffer& buffer = from.buffer;
  if (buffer.kind == KVM_BUFFER_NONE) {
    if (buffer.region != 0 || buffer.where != 0 || buffer.size != 0) {
      return invalid(slot, "a buffer of kind NONE must be all zero");
    }
    *slot.to = Tensor{};
    return Status::ok();
  }
  if (buffer.kind == KVM_BUFFER_DEVICE) {
    return Status(KVM_ERR_UNSUPPORTED,
                  std::string("tensor ") + slot.name + ": DEVICE buffers are not supported");
  }
  if (!dtype_is_known(from.dtype) ||
      (slot.element == Element::kF32 && from.dtype != KVM_DTYPE_F32)) {
    return invalid(slot, "dtype is " + std::to_string(from.dtype) + "; allowed " +
                             (slot.element == Element::kF32 ? "is F32 (1)"
                                                            : "are F32 (1), F16 (2), BF16 (3)"));
  }
  if (from.reserved != 0) {
    return invalid(slot, "the reserved field must be zero");
  }
  if (buffer.size == 0) {
    return invalid(slot, "the buffer has no bytes; use kind NONE for an absent tensor");
  }
  Tensor out{nullptr,         buffer.size,     0, from.dtype, 0, from.stride_layer,
             from.stride_row, from.stride_head};
  if (buffer.kind == KVM_BUFFER_HOST) {
    if (buffer.where == 0 || buffer.region != 0 || buffer.size > UINT64_MAX - buffer.where) {
      return invalid(slot, "a HOST buffer needs an address, and region 0");
    }
    out.data = reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(buffer.where));
  } else if (buffer.kind == KVM_BUFFER_ARENA) {
    const auto arena = std::find_if(arenas_.begin(), arenas_.end(),
                                    [&](const Arena& a) { return a.region == buffer.region; });
    if (arena == arenas_.end()) {
      return invalid(slot, "no arena of this client has region " + std::to_string(buffer.region));
    }
    if (buffer.size > arena->size_bytes || buffer.where > arena->size_bytes - buffer.size) {
      return invalid(slot, "bytes " + std::to_string(buffer.where) + " + " +
                               std::to_string(buffer.size) + " lie outside the arena of " +
                               std::to_string(arena->size_bytes));
    }
    out.data = arena->data + buffer.where;
    out.region = buffer.region;
    out.offset = buffer.where;
  } else {
    return invalid(slot, "buffer kind " + std::to_string(buffer.kind) + " is unknown");
  }
  const uint32_t element_bytes = dtype_size_bytes(static_cast<Dtype>(from.dtype));
  if (reinterpret_cast<uintptr_t>(out.data) % element_bytes != 0) {
    return invalid(slot, "the address is not a multiple of " + std::to_string(element_bytes) +
                             ", the size of an element");
  }
  *slot.to = out;
  return Status::ok();
}

Status check_overlap(std::span<const TensorSlot> inputs, std::span<const TensorSlot> outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (const TensorSlot& input : inputs) {
      if (overlap(*outputs[i].to, *input.to)) {
        return invalid(outputs[i], std::string("shares bytes with ") + input.name);
      }
    }
    for (size_t j = 0; j < i; ++j) {
      if (overlap(*outputs[i].to, *outputs[j].to)) {
        return invalid(outputs[i], std::string("shares bytes with ") + outputs[j].name);
      }
    }
  }
  return Status::ok();
}

}  // namespace kvm::client
