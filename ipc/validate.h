// SPDX-License-Identifier: Apache-2.0
// From a copied ring entry to a private, checked request: the only way in which bytes of a client
// become numbers that the daemon acts on.
//
// The entry has been copied (ipc/ring.h). Its parameter block is copied here, once, and only the
// copy is looked at. What comes out holds addresses of tensors and of the result block, all inside
// regions of that client and kept mapped by the request's pins; no other pointer into client memory
// exists. Whether the request makes sense (ids, geometry, positions, quota) is the engine's to say.
//
// libkvm checks the same things before it sends, so a reject proves a broken or hostile client: the
// daemon counts it and closes that client.
#ifndef KVM_IPC_VALIDATE_H_
#define KVM_IPC_VALIDATE_H_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <variant>
#include <vector>

#include "base/request.h"
#include "ipc/region_table.h"
#include "ipc/wire.h"
#include "kvm.h"

namespace kvm::ipc {

// Why an entry is refused. One list: tests count that each is reached.
enum class Reject : uint8_t {
  kNone = 0,
  kOpcode,
  kVersion,
  kEntryFlags,
  kEntryReserved,
  kUnknownRegion,
  kBlockAlignment,
  kBlockBounds,
  kBlockLength,
  kResultAlign,
  kResultBounds,
  kBlockReserved,
  kVerbs,
  kBlockFlags,
  kItemCount,
  kRangeCount,
  kTreeCount,
  kMode,
  kProposal,
  kNotFinite,
  kItemFlags,
  kItemReserved,
  kItemRanges,
  kItemTree,
  kItemRows,
  kTensorAbsent,
  kTensorDtype,
  kTensorAlign,
  kTensorBounds,
  kTensorOverlap,
  kSeqVerb,
  kSnapshotVerb,
  kSnapshotName,
  kCount,  // not a reason
};

inline constexpr size_t kRejects = static_cast<size_t>(Reject::kCount);

// A sentence for the log, and a label for statistics ("tensor_bounds", say). Static storage.
const char* reject_text(Reject reject);
const char* reject_name(Reject reject);

// A request that only shows that the ring works.
struct NopMessage {};

struct CancelMessage {
  uint64_t user_data = 0;
};

struct Request {
  uint64_t user_data = 0;
  std::variant<NopMessage, StepRequest, ReadRequest, ObserveRequest, SeqRequest, CancelMessage,
               SnapshotRequest>
      message;
  // Where the result goes; nullptr for a nop. Written with write_result only.
  ResultBlock* result = nullptr;
  RegionPins pins;  // keep until nothing writes to tensors or result any more
};

// Checks one copied entry. On kNone *out is filled; otherwise it is to be thrown away.
// REQUIRES: a default-constructed *out. ENSURES: no allocation is larger than block_length.
Reject validate_request(const RequestEntry& entry, RegionTable* regions, Request* out);

// Fills a result block (nullptr: nothing to do) as wire.h says; call it before the completion is
// published. `sentence` is cut to fit.
void write_result(ResultBlock* result, uint64_t seq, std::string_view sentence,
                  uint64_t n_not_finite = 0);

}  // namespace kvm::ipc

#endif  // KVM_IPC_VALIDATE_H_
