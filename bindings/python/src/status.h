// SPDX-License-Identifier: Apache-2.0
// Failures of kvm.h as Python exceptions: kvm._errors.error_of chooses the class.
#ifndef KVM_BINDINGS_PYTHON_SRC_STATUS_H_
#define KVM_BINDINGS_PYTHON_SRC_STATUS_H_

#include <string>

#include <nanobind/nanobind.h>
#include "kvm.h"

namespace kvm::python {

// A StatusError is what a call of kvm.h answered. Thrown without the GIL as well.
struct StatusError {
  kvm_status status = KVM_OK;
  std::string message;
};

// Throws what the last call of this thread answered.
void check(kvm_status status);
// A call that the binding itself refuses.
[[noreturn]] void refuse(std::string message);

void register_status(nanobind::module_& module);

}  // namespace kvm::python

#endif  // KVM_BINDINGS_PYTHON_SRC_STATUS_H_
