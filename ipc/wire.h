// SPDX-License-Identifier: Apache-2.0
// The wire: every byte layout that a client and the daemon share, and the limits both sides know.
//
//   client region of a queue (client writes)     daemon region of a queue (client can only read)
//     sq_tail, cq_head, cq_waiting, cq_eventfd     sq_head, sq_need_wakeup, cq_tail
//     RequestEntry[256]                            CompletionEntry[512]
//
//   arena (client writes; hostile bytes to the daemon)
//     parameter blocks (StepBlock, ...), result blocks, q, k, v, o, lse
//
// A RequestEntry refers to one parameter block. The daemon copies the entry once, then the block
// once, and validates the copies; nothing else is ever read from client memory except tensor
// elements, from which no address, size, index or bound is derived. Each word has one writer.
//
// The request format is docs/adr/0002-request-format.md; docs/protocol.md tells the message flow.
// WIRE: every layout below is frozen within a protocol major version.
#ifndef KVM_IPC_WIRE_H_
#define KVM_IPC_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/limits.h"
#include "kvm.h"

namespace kvm::ipc {

inline constexpr uint32_t kProtocolMajor = 1;
// 1: ConfigText to QuotaSet; 2: n_not_finite; 3: KVM_STEP_NO_STATISTICS; 4: kPublish, kTake;
// 5: KVM_ITEM_LAST_LAYER; 6: alibi_slopes, KVM_SPACE_V_IN_K, dims of layers;
// 7: KVM_ITEM_PROMPT_END, budgets of policies; 8: kvm_amounts.memory_bytes, kPrefetch, kSnapshot,
// SnapshotList; 9: hashes behind kPublish, PrefixTable; 10: PrefixWeigh; 11: kSetPriority;
// 12: kDrop, KVM_ITEM_RESTORE; 13: DeviceOpen.
inline constexpr uint32_t kProtocolMinor = 13;
inline constexpr uint64_t kHelloMagic = 0x30304d564b4d564bull;  // "KVMKVM00"

// LIMIT: each bounds memory or time that one client can claim.
inline constexpr uint32_t kMaxClients = 64;
inline constexpr uint32_t kMaxQueuesPerClient = 16;  // of the application, as kvm_client_info says
inline constexpr uint32_t kMaxArenasPerClient = 64;
// The daemon admits these beside limits of the application: libkvm makes one queue of its own, and
// for each queue an arena of blocks and up to three staging arenas.
constexpr uint32_t own_queues() { return 1; }
constexpr uint32_t own_arenas(uint32_t max_queues) { return 4 * (max_queues + own_queues()); }
inline constexpr uint64_t kMaxArenaBytes = 4ull << 30;
inline constexpr uint32_t kRequestEntries = 256;  // slots of the request ring
inline constexpr uint32_t kCompletionEntries = 512;
static_assert(kMaxOutstanding <= kRequestEntries && kMaxOutstanding <= kCompletionEntries,
              "a ring always has room for what may be outstanding");
inline constexpr uint32_t kBlockAlign = 64;  // of parameter and result blocks
inline constexpr uint8_t kBlockVersion = 1;
inline constexpr uint32_t kMaxControlBytes = 128 * 1024;
inline constexpr uint32_t kMaxFdsPerMessage = 4;

enum class Opcode : uint8_t {
  kNop = 1,
  kStep = 2,
  kRead = 3,
  kObserve = 4,
  kSeq = 5,
  kCancel = 6,
  kSnapshot = 7,
};

// Every entry is answered by exactly one completion. The daemon takes an entry only while requests
// in flight and completions not yet taken leave room for one more completion; a client that takes
// none stalls itself. user_data is opaque to the daemon; libkvm uses each number once per queue, so
// that a CancelBlock names one request.
// WIRE. The daemon gives an arena its region id; it is never reused in a connection.
struct RequestEntry {
  uint8_t opcode;         // Opcode
  uint8_t version;        // of the block's layout; 1
  uint16_t flags;         // zero
  uint32_t region;        // of the block
  uint64_t user_data;     // comes back in the completion
  uint64_t block_offset;  // aligned to kBlockAlign
  uint32_t block_length;  // bytes, arrays included; 0 for kNop
  uint32_t result_region;
  uint64_t result_offset;  // aligned to kBlockAlign; ResultBlock
  uint64_t reserved[3];    // zero
};
static_assert(sizeof(RequestEntry) == 64 && std::is_trivially_copyable_v<RequestEntry>);

// WIRE. Fields of kvm_completion; user_data is the RequestEntry's.
struct CompletionEntry {
  uint64_t user_data;
  int32_t status;
  uint32_t mode;
  uint64_t keys_present;
  uint64_t keys_read;
  uint64_t bytes_read;
  uint64_t service_ns;
  uint64_t compute_ns;
  float err_max;
  uint32_t n_exact;
};
static_assert(sizeof(CompletionEntry) == 64);

// WIRE. A tensor of kvm.h whose buffer is in an arena; region 0: absent.
struct TensorRef {
  uint32_t region;
  uint32_t dtype;
  uint64_t offset;
  uint64_t size_bytes;
  uint64_t stride_layer;
  uint64_t stride_row;
  uint64_t stride_head;
};
static_assert(sizeof(TensorRef) == 48);

inline constexpr uint32_t kStepAppend = 1u << 0;
inline constexpr uint32_t kStepAttend = 1u << 1;

// WIRE. Followed by kvm_item[n_items], kvm_range[n_ranges], uint64_t[n_tree_words], without gaps;
// block_length is exactly the sum.
struct StepBlock {
  uint32_t verbs;  // kStepAppend, kStepAttend
  uint32_t flags;  // KVM_STEP_*
  uint64_t space;
  uint32_t layer_begin;
  uint32_t n_layers;
  uint32_t n_items;
  uint32_t n_ranges;
  uint32_t n_tree_words;
  uint32_t mode;
  uint32_t proposal;
  float scale;
  float eps;
  float delta;
  uint64_t budget;
  uint64_t seed;
  uint64_t deadline_ns;
  TensorRef k;
  TensorRef v;
  TensorRef q;
  TensorRef o;
  TensorRef lse;
  TensorRef err;
  uint64_t reserved[3];  // zero
};
static_assert(sizeof(StepBlock) == 80 + 6 * 48 + 24 && std::is_trivially_copyable_v<StepBlock>);

struct ReadBlock {  // WIRE.
  uint64_t seq;
  uint32_t layer;
  uint32_t flags;  // zero
  uint64_t position;
  uint64_t n_tokens;
  TensorRef k;
  TensorRef v;
  uint64_t reserved[4];  // zero
};
static_assert(sizeof(ReadBlock) == 160);

struct ObserveBlock {  // WIRE.
  uint64_t seq;
  uint32_t layer;
  uint32_t n_rows;
  uint64_t query_position;
  uint64_t column_begin;
  uint64_t n_columns;
  TensorRef q;
  TensorRef column_sums;
  uint64_t reserved[3];  // zero
};
static_assert(sizeof(ObserveBlock) == 160);

// WIRE. Followed by kvm_prefix_hash[n], kPublish only; block_length says how many.
struct SeqBlock {
  uint32_t verb;      // SeqVerb (base/request.h)
  uint32_t flags;     // kCreate: KVM_SEQ_*
  uint64_t space;     // kCreate
  uint64_t seq;       // the others
  uint64_t n_tokens;  // kCreate: kvm_seq_params.reserve; kPublish with hashes: keep_ns
  uint64_t begin;     // kSetPriority, kDrop, as the next; zero else
  uint64_t end;
  uint64_t keep_ns;  // kSetPriority, as the next; zero else
  uint32_t priority;
  uint32_t reserved[1];  // zero
};
static_assert(sizeof(SeqBlock) == 64);

struct SnapshotBlock {  // WIRE.
  uint32_t verb;        // SnapshotVerb (base/request.h)
  uint32_t flags;       // kSave: KVM_SAVE_*
  uint64_t space;       // kLoad
  uint64_t seq;         // kSave
  uint32_t name_bytes;  // of the name; what follows it is zero
  uint32_t reserved0;   // zero
  char name[128];
  uint64_t reserved[4];  // zero
};
static_assert(sizeof(SnapshotBlock) == 192);

// WIRE. Completes with OK, or NOT_FOUND when no request of the queue in flight has the user_data.
struct CancelBlock {
  uint64_t user_data;    // of the request not to be started
  uint64_t reserved[7];  // zero
};
static_assert(sizeof(CancelBlock) == 64);

// WIRE. Written by the daemon before the completion is published: `message` is the sentence of an
// error, cut to fit, NUL-terminated, and empty on success. Before minor version 2 it was untouched
// by requests other than kSeq that succeeded, and n_not_finite was reserved. kNop has none: its
// regions, offsets and length are zero.
struct ResultBlock {
  uint64_t seq;           // kSeq: create, fork; kSnapshot: load
  uint64_t n_not_finite;  // kStep: as in kvm_step_stats
  uint64_t reserved[2];
  char message[224];
};
static_assert(sizeof(ResultBlock) == 256);

// WIRE. Control words, each alone on its cache line and written by one side only.
// The 32-bit indices run freely; slot = index modulo the ring's size.
struct alignas(64) ControlWord {
  uint32_t value;
  uint32_t pad[15];
};
static_assert(sizeof(ControlWord) == 64);

struct ClientRegion {  // WIRE. The client writes, the daemon reads.
  ControlWord sq_tail;
  ControlWord cq_head;
  ControlWord cq_waiting;  // 1 while the client sleeps, or is about to, on cq_tail
  ControlWord cq_eventfd;  // 1: the client wants the completion eventfd written as well
  RequestEntry entries[kRequestEntries];
};

struct DaemonRegion {  // WIRE. The daemon writes, the client reads (its mapping is read-only).
  ControlWord sq_head;
  ControlWord sq_need_wakeup;  // 1 while the daemon sleeps, or is about to
  ControlWord cq_tail;         // a futex word
  ControlWord reserved;
  CompletionEntry entries[kCompletionEntries];
};

}  // namespace kvm::ipc

#endif  // KVM_IPC_WIRE_H_
