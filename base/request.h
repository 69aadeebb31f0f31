// SPDX-License-Identifier: Apache-2.0
// What a client asks for and is answered, as plain values: the form that both ways into the engine
// fill, a ring (ipc/validate.h) and a queue in the same process (client/embedded_queue.h), and that
// the engine takes as it is. Field meanings are those of kvm.h.
//
// A request here says only what was asked: addresses lie in memory of the client, numbers are
// unchecked but for what each way in promises. engine/space/validate.h judges them.
#ifndef KVM_BASE_REQUEST_H_
#define KVM_BASE_REQUEST_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "kvm.h"

namespace kvm {

// A tensor of kvm.h with its address resolved. `data` points to size_bytes bytes that stay mapped
// until the request is done; their content may change at any time (a client may write there), so
// nothing is ever derived from it. data == nullptr: the tensor is absent (KVM_BUFFER_NONE).
struct TensorView {
  void* data = nullptr;
  uint64_t size_bytes = 0;
  uint32_t dtype = 0;
  uint64_t stride_layer = 0;  // elements; 0: packed
  uint64_t stride_row = 0;
  uint64_t stride_head = 0;
};

// kvm_space_params with everything it points to copied.
struct SpaceSpec {
  std::string name;
  kvm_space_params params{};  // the pointers are null: the vectors replace them; counts match
  std::vector<float> rope_inv_freq;
  std::vector<float> sink_logits;   // empty or [n_layers][n_q_heads]
  std::vector<float> alibi_slopes;  // empty or [n_q_heads]
  std::vector<kvm_layer_params> layers;
  std::vector<kvm_policy_params> policies;
  std::vector<kvm_codec_params> codecs;
  std::vector<kvm_index_params> indexes;
};

// kvm_append, kvm_attend and kvm_step: fields of kvm_step_params.
struct StepRequest {
  bool append = false;
  bool attend = false;
  uint32_t flags = 0;
  kvm_space_id space = 0;
  uint32_t layer_begin = 0;
  uint32_t n_layers = 1;
  std::vector<kvm_item> items;
  std::vector<kvm_range> ranges;
  std::vector<uint64_t> tree_mask;
  uint32_t mode = KVM_MODE_DEFAULT;
  uint32_t proposal = KVM_PROPOSAL_DEFAULT;
  float scale = 0;
  float eps = 0;
  float delta = 0;
  uint64_t budget = 0;
  uint64_t seed = 0;
  uint64_t deadline_ns = 0;
  TensorView k, v, q, o, lse, err;
};

struct ReadRequest {
  kvm_seq_id seq = 0;
  uint32_t layer = 0;
  uint64_t position = 0;
  uint64_t n_tokens = 0;
  TensorView k, v;
};

struct ObserveRequest {
  kvm_seq_id seq = 0;
  uint32_t layer = 0;
  uint32_t n_rows = 0;
  uint64_t query_position = 0;
  uint64_t column_begin = 0;
  uint64_t n_columns = 0;
  TensorView q, column_sums;
};

// WIRE. The values stand in ipc/wire.h's SeqBlock.
enum class SeqVerb : uint32_t {
  kCreate = 1,
  kFork = 2,
  kTruncate = 3,
  kCommit = 4,
  kFree = 5,
  kPublish = 6,
  kTake = 7,
  kPrefetch = 8,
  kSetPriority = 9,
  kDrop = 10,
};
inline constexpr SeqVerb kLastSeqVerb = SeqVerb::kDrop;

// As in kvm_priority_params; of kDrop the positions alone.
struct PriorityRange {
  uint32_t priority = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t keep_ns = 0;
};

struct SeqRequest {
  SeqVerb verb = SeqVerb::kCreate;
  uint32_t flags = 0;      // kCreate: KVM_SEQ_*
  kvm_space_id space = 0;  // kCreate
  kvm_seq_id seq = 0;      // the others
  // kCreate: tokens to expect, kvm_seq_params.reserve. kFork, kTruncate, kCommit: as in kvm.h.
  // kPublish, with hashes: kvm_prefix_publish's keep_ns.
  uint64_t n_tokens = 0;
  std::vector<kvm_prefix_hash> hashes{};  // kPublish: of a prefix; none: it is not to be found
  PriorityRange range{};                  // kSetPriority, kDrop
};

// WIRE. The values stand in ipc/wire.h's SnapshotBlock.
enum class SnapshotVerb : uint32_t { kSave = 1, kLoad = 2, kRemove = 3 };

inline constexpr uint32_t kSaveReplace = 1;  // KVM_SAVE_REPLACE

struct SnapshotRequest {
  SnapshotVerb verb = SnapshotVerb::kSave;
  uint32_t flags = 0;      // kSave: kSaveReplace
  kvm_seq_id seq = 0;      // kSave
  kvm_space_id space = 0;  // kLoad
  std::string name;        // 1 to kMaxSnapshotNameBytes of [A-Za-z0-9._/-]
};

// What a request is answered; numbers are those of kvm_completion.
struct RequestResult {
  Status status;
  kvm_seq_id seq = 0;  // kCreate, kFork, kLoad
  uint32_t mode = 0;
  uint32_t n_exact = 0;
  uint64_t n_not_finite = 0;
  float err_max = 0;
  uint64_t keys_present = 0;
  uint64_t keys_read = 0;
  uint64_t bytes_read = 0;
  uint64_t service_ns = 0;
  uint64_t compute_ns = 0;
};

}  // namespace kvm

#endif  // KVM_BASE_REQUEST_H_
