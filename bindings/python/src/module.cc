// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>

#include "kvm.h"

NB_MODULE(_native, module) { module.def("version", &kvm_version_string); }
