// SPDX-License-Identifier: Apache-2.0
// Checks of data-path parameters that need no service: everything that the daemon would close the
// connection for (ipc/validate.h), and what kvm.h promises for both libraries. What depends on
// spaces and sequences is the engine's to say.
//
// Fails: INVALID, UNSUPPORTED; the sentence names the field, its value and what is allowed.
#ifndef KVM_CLIENT_CHECKS_H_
#define KVM_CLIENT_CHECKS_H_

#include <cstdint>

#include "base/status.h"
#include "client/backend.h"
#include "kvm.h"

namespace kvm::client {

// Each fills *call, whose params pointer refers to `params`.
Status check_step(const kvm_step_params& params, bool append, bool attend,
                  const ArenaDirectory& arenas, StepCall* call);
Status check_read(const kvm_read_params& params, const ArenaDirectory& arenas, ReadCall* call);
Status check_observe(const kvm_observe_params& params, const ArenaDirectory& arenas,
                     ObserveCall* call);
// flags of a save; else 0. Takes the name into the call.
Status check_snapshot(const char* name, uint32_t flags, SnapshotRequest* call);
// The request of kvm_seq_set_priority.
Status read_priority(const kvm_priority_params* params, SeqRequest* call);
// The request of kvm_prefix_publish.
Status check_prefix(kvm_seq_id seq, const kvm_prefix_hash* hashes, uint32_t n_hashes,
                    uint64_t keep_ns, SeqRequest* call);
// kvm_seq_create; params may be null.
Status check_create(kvm_space_id space, const kvm_seq_params* params, SeqRequest* call);

// Fails where a word of a reserved array is set.
Status check_reserved(const uint64_t* words, size_t n_words, const char* structure);
// Fails where a bit other than those of `known` is set.
Status check_flags(uint32_t flags, uint32_t known, const char* structure);

}  // namespace kvm::client

#endif  // KVM_CLIENT_CHECKS_H_
