// SPDX-License-Identifier: Apache-2.0
#include "bindings/python/src/status.h"

#include <exception>
#include <utility>

#include <nanobind/stl/string.h>

namespace nb = nanobind;

namespace kvm::python {

void check(kvm_status status) {
  if (status != KVM_OK) {
    throw StatusError{status, kvm_last_error()};
  }
}

void refuse(std::string message) { throw StatusError{KVM_ERR_INVALID, std::move(message)}; }

void register_status(nb::module_& module) {
  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void* /*payload*/) {
        try {
          std::rethrow_exception(thrown);
        } catch (const StatusError& error) {
          try {
            const nb::object made =
                nb::module_::import_("kvm._errors").attr("error_of")(error.status, error.message);
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
          } catch (nb::python_error& failed) {
            failed.restore();
          }
        }
      },
      nullptr);
  module.def(
      "status_name", [](int32_t status) { return kvm_status_name(status); }, nb::arg("status"));
  module.def("version", [] { return kvm_version_string(); });
}

}  // namespace kvm::python
