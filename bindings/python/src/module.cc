// SPDX-License-Identifier: Apache-2.0
// kvm._native: kvm.h for the classes of the Python package, which alone is meant to be used.
#include <nanobind/nanobind.h>
#include "bindings/python/src/client.h"
#include "bindings/python/src/host.h"
#include "bindings/python/src/prefix.h"
#include "bindings/python/src/queue.h"
#include "bindings/python/src/status.h"
#include "bindings/python/src/step.h"

NB_MODULE(_native, module) {
  nanobind::set_leak_warnings(false);  // clients may live until the process ends
  kvm::python::register_status(module);
  kvm::python::register_client(module);
  kvm::python::register_prefix(module);
  kvm::python::register_step(module);
  kvm::python::register_queue(module);
  kvm::python::register_host(module);
}
