// SPDX-License-Identifier: Apache-2.0
#ifndef KVM_ENGINE_ATTEND_ATTEND_CUT_H_
#define KVM_ENGINE_ATTEND_ATTEND_CUT_H_

#include <cstddef>

#include "base/status.h"
#include "engine/attend/attend_plan.h"

namespace kvm::engine {

// Cuts the problems of a plan into tasks, so that all threads of the crew finish together, and
// decides where in shared memory their queries and states lie. other_bytes: what the request takes
// beside them.
// REQUIRES: `heads`, `sums` and `approx` are there, none of the cut is. ENSURES: the plan is valid.
// Fails: LIMIT.
Status cut_into_tasks(const TaskCrew& crew, size_t other_bytes, AttendPlan* plan);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_ATTEND_ATTEND_CUT_H_
