// SPDX-License-Identifier: Apache-2.0
// Measures the rates of engine/attend/cost_model.h on this machine, with the kernels that requests
// use:
// some 50 ms on all threads at once, 8 to 24 MB of memory each, which is given back.
#ifndef KVM_ENGINE_ATTEND_CALIBRATION_H_
#define KVM_ENGINE_ATTEND_CALIBRATION_H_

#include <cstdint>

#include "engine/attend/cost_model.h"

namespace kvm::engine {

// Measured by the first call with a number of threads, and the same from then on: who asks
// meanwhile waits. Where the machine refuses memory or threads, CostModel's defaults.
// Threads: any.
const CostModel& measured_costs(uint32_t n_threads);
// Null as long as they are not there; does not wait.
const CostModel* find_measured_costs(uint32_t n_threads);

// Measures now.
CostModel measure_costs(uint32_t n_threads);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_ATTEND_CALIBRATION_H_
