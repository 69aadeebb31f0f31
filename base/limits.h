// SPDX-License-Identifier: Apache-2.0
// The limits that more than one folder goes by, and those that kvm.h tells, each stated once.
// tests/abi/limits_test.py compares the numbers of kvm.h with these. A limit that one folder alone
// knows, and no caller, stays in that folder.
#ifndef KVM_BASE_LIMITS_H_
#define KVM_BASE_LIMITS_H_

#include <cstddef>
#include <cstdint>

#include "kvm.h"

namespace kvm {

// --- Tokens -------------------------------------------------------------------------------------

inline constexpr uint32_t kPageTokens = 64;
// LIMIT: positions lie below this: page lists number pages with 32 bits.
inline constexpr uint64_t kMaxTokens = uint64_t{1} << 38;
static_assert(kMaxTokens == (uint64_t{UINT32_MAX} + 1) * kPageTokens);
static_assert(kMaxTokens < KVM_POSITION_END);

// --- Requests -----------------------------------------------------------------------------------

// LIMIT: what one request takes of the service's memory for its arrays.
inline constexpr uint32_t kMaxItems = 4096;
inline constexpr uint32_t kMaxQueryRows = 65536;  // of one item
inline constexpr uint32_t kMaxRanges = 65536;     // of one request, and of its items together
inline constexpr uint32_t kMaxTreeRows = 64;      // of one item: a word has so many bits
inline constexpr uint32_t kMaxTreeWords = 65536;  // of one request
static_assert(kMaxTreeRows == 8 * sizeof(uint64_t));
static_assert(kMaxTreeRows <= kMaxQueryRows && kMaxTreeRows <= kMaxTreeWords);

inline constexpr uint32_t kItemFlags = KVM_ITEM_NOT_CAUSAL | KVM_ITEM_TREE |
                                       KVM_ITEM_EXCLUDE_RANGES | KVM_ITEM_LAST_LAYER |
                                       KVM_ITEM_PROMPT_END | KVM_ITEM_RESTORE;
inline constexpr uint32_t kStepFlags = KVM_STEP_F32_VALUES | KVM_STEP_NO_STATISTICS;
inline constexpr uint32_t kSeqFlags = KVM_SEQ_MANUAL_COMMIT;

inline constexpr uint32_t kMaxPrefixPages = 65536;  // of one prefix
inline constexpr uint64_t kMaxPrefixKeepNs = uint64_t{1} << 62;
inline constexpr uint64_t kMaxPriorityKeepNs = uint64_t{1} << 62;
inline constexpr size_t kMaxPriorityRanges = 16;  // of one sequence
inline constexpr size_t kMaxSaltBytes = 64;
static_assert(KVM_PREFIX_TOKENS == kPageTokens);

inline constexpr uint32_t kMaxOutstanding = 256;   // requests of one queue
inline constexpr uint32_t kMaxMergedStates = 64;   // of one kvm_merge
inline constexpr uint32_t kMaxObservedRows = 256;  // that are kept of a layer

// --- Spaces -------------------------------------------------------------------------------------

inline constexpr size_t kMaxNameBytes = 63;  // of a space or a client, without the NUL
static_assert(sizeof(kvm_space_info::name) == kMaxNameBytes + 1);
static_assert(sizeof(kvm_client_entry::name) == kMaxNameBytes + 1);
// With the user and a separator a name is a key of tiers/object_store.h.
inline constexpr size_t kMaxSnapshotNameBytes = 127;
static_assert(sizeof(kvm_snapshot_info::name) == kMaxSnapshotNameBytes + 1);
static_assert(sizeof(kvm_snapshot_info::space_name) == kMaxNameBytes + 1);

inline constexpr uint32_t kMaxLayers = 512;
inline constexpr uint32_t kMaxQHeads = 1024;
inline constexpr uint32_t kMaxKvHeads = 128;
inline constexpr uint32_t kMaxGroup = 128;  // q heads of a kv head
static_assert(kMaxKvHeads == 8 * sizeof(kvm_policy_params::kv_head_mask));
static_assert(kMaxGroup <= kMaxQHeads && kMaxKvHeads <= kMaxQHeads);

inline constexpr uint32_t kMinHeadDim = 8;  // and multiples of it
inline constexpr uint32_t kMaxHeadDim = 576;
// LIMIT: of keys with an index, which is written for dims of the usual models.
inline constexpr uint32_t kMaxIndexedDim = 256;
inline constexpr uint32_t kMaxRopePairs = kMaxHeadDim / 2;
static_assert(kMaxHeadDim % kMinHeadDim == 0 && kMaxIndexedDim <= kMaxHeadDim);
// LIMIT: magnitude of alibi_slopes: biases at all distances stay finite.
inline constexpr float kMaxSlope = 1e4f;

// LIMIT: entries of each list of kvm_space_params.
inline constexpr uint32_t kMaxOverrides = 1024;
// A capped logit has an absolute error of some 2e-7 of the cap (attention/exact/exact.h): beyond
// these, results would be noise.
inline constexpr float kMinSoftcap = 1e-3f;
inline constexpr float kMaxSoftcap = 1e4f;

inline constexpr uint64_t kMaxHeavy = 65536;       // n_heavy of a policy
inline constexpr uint32_t kMaxAlwaysRead = 65536;  // n_sinks and n_recent of an index
inline constexpr uint32_t kMinIndexTokens = 256;
inline constexpr uint32_t kMaxIndexTokens = 8192;
static_assert(kMinIndexTokens % kPageTokens == 0 && kMaxIndexTokens % kPageTokens == 0);

inline constexpr uint32_t kMaxLshBits = 15;
inline constexpr uint32_t kMinLshTables = 2;
inline constexpr uint32_t kMaxLshTables = 512;
inline constexpr uint32_t kMaxHashBits = 4096;  // of a key: bits of all tables
static_assert(kMaxLshBits * kMinLshTables <= kMaxHashBits && kMaxLshTables <= kMaxHashBits);

// --- Connections --------------------------------------------------------------------------------

// LIMIT: of sockaddr_un, without the NUL.
inline constexpr size_t kMaxSocketPathBytes = 107;

}  // namespace kvm

#endif  // KVM_BASE_LIMITS_H_
