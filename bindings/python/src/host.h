// SPDX-License-Identifier: Apache-2.0
// Pure computation of kvm.h over arrays: merging states and probing heads.
#ifndef KVM_BINDINGS_PYTHON_SRC_HOST_H_
#define KVM_BINDINGS_PYTHON_SRC_HOST_H_

#include <nanobind/nanobind.h>

namespace kvm::python {

void register_host(nanobind::module_& module);

}  // namespace kvm::python

#endif  // KVM_BINDINGS_PYTHON_SRC_HOST_H_
