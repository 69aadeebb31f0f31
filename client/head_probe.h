// SPDX-License-Identifier: Apache-2.0
// kvm_probe_heads: echo and induction scores of the heads of a layer (RazorAttention,
// arXiv 2407.15891, section 3.2).
//
// Threads: any; pure in the arguments.
#ifndef KVM_CLIENT_HEAD_PROBE_H_
#define KVM_CLIENT_HEAD_PROBE_H_

#include "base/status.h"
#include "kvm.h"

namespace kvm::client {

// echo, induction: [n_kv_heads] or null. Fails: INVALID; nothing is written then.
Status probe_heads(const kvm_probe_params& params, float* echo, float* induction);

}  // namespace kvm::client

#endif  // KVM_CLIENT_HEAD_PROBE_H_
