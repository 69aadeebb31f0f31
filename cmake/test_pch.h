// SPDX-License-Identifier: Apache-2.0
// Precompiled into every test: GoogleTest and what pch.h has.
#ifndef KVM_CMAKE_TEST_PCH_H_
#define KVM_CMAKE_TEST_PCH_H_

#include <gtest/gtest.h>

#include "pch.h"

#endif  // KVM_CMAKE_TEST_PCH_H_
