// SPDX-License-Identifier: Apache-2.0
// Arrays of NumPy, PyTorch and whatever speaks DLPack or the buffer protocol, as tensors of kvm.h.
//
// Two layouts: ROWS is [row][head][channel], HEADS [item][head][token][channel], as attention
// functions of PyTorch have it. Any strides will do, as long as channels are next to each other.
#ifndef KVM_BINDINGS_PYTHON_SRC_TENSOR_H_
#define KVM_BINDINGS_PYTHON_SRC_TENSOR_H_

#include <cstdint>
#include <memory>

#include <nanobind/nanobind.h>
#include "bindings/python/src/client.h"
#include "kvm.h"

namespace kvm::python {

enum class Layout : uint8_t { kRows, kHeads };

// A Shape is what a tensor of a request must have.
struct Shape {
  const char* name = nullptr;    // for errors
  uint32_t n_heads = 0;          // 0: any
  uint32_t dim = 0;              // channels; 1: a number for each head, without an axis
  bool may_have_layers = false;  // ROWS: [layer] may come first
  bool is_written = false;
  bool is_f32 = false;  // no other type is allowed
};

// An Owner keeps an array alive, and what it exports: a memoryview that lives may have been
// released, and then its memory is another's. To be let go with the GIL.
struct Owner {
  nanobind::object object;
  std::shared_ptr<const void> exported;  // null: the object alone keeps the memory
};

// A Tensor is an array that a request uses; it keeps the array alive.
struct Tensor {
  kvm_tensor tensor{};      // kind NONE: there is no array
  uint64_t n_rows = 0;      // ROWS; of an entry with HEADS
  uint64_t n_entries = 0;   // HEADS: items
  uint64_t entry_rows = 0;  // HEADS: entry i begins at row i * entry_rows
  uint64_t n_layers = 1;
  uint64_t copied_bytes = 0;  // that libkvm copies
  Owner owner;
};

// None gives no tensor. client: null where arenas do not matter. Throws StatusError: it does not
// fit.
Tensor read_tensor(const Client* client, nanobind::handle array, Layout layout, const Shape& shape);

}  // namespace kvm::python

#endif  // KVM_BINDINGS_PYTHON_SRC_TENSOR_H_
