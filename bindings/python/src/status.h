// SPDX-License-Identifier: Apache-2.0
// Failures of kvm.h as Python exceptions: kvm._errors.error_of chooses the class. And calls without
// the GIL, after which the library's messages are told.
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

// An Unlocked is a scope without the GIL. At its end, when no lock is held any more, the listener
// of set_log hears what the library has said: Python may collect garbage there, and so use kvm.
// A thread that comes back to an interpreter which has ended stays here: there is nothing to
// return to. REQUIRES: the GIL.
class Unlocked {
 public:
  Unlocked();
  ~Unlocked();
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

  // Whether this thread is in such a scope, and so has not the GIL. (The stable ABI cannot tell.)
  static bool is_here();

 private:
  bool was_ending_;  // then this thread is the one that ends it
  PyThreadState* state_;
};

void register_status(nanobind::module_& module);

}  // namespace kvm::python

#endif  // KVM_BINDINGS_PYTHON_SRC_STATUS_H_
