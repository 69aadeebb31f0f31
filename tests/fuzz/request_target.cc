// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/assert.h"
#include "base/limits.h"
#include "ipc/memory.h"
#include "ipc/validate.h"
#include "tests/fuzz/targets.h"

namespace kvm::testing {

// What comes out lies inside the region, and is within the limits.
void run_request(std::span<const uint8_t> input) {
  static ipc::RegionTable* const kRegions = new ipc::RegionTable;
  static uint8_t* const kArena = [] {
    ipc::Mapping mapping =
        ipc::create_shared_memory("fuzz", kFuzzArenaBytes, ipc::PeerAccess::kReadWrite)
            .value()
            .mapping;
    uint8_t* data = mapping.data();
    KVM_ASSERT(kRegions->add(std::move(mapping)) == 1);
    return data;
  }();
  InputReader reader(input);
  const auto entry = reader.take<ipc::RequestEntry>();
  const std::span<const uint8_t> content = reader.take_bytes(kFuzzArenaBytes);
  std::memset(kArena, 0, kFuzzArenaBytes);
  std::copy(content.begin(), content.end(), kArena);
  const auto is_inside = [&](const void* data, uint64_t size) {
    const auto* begin = static_cast<const uint8_t*>(data);
    return begin >= kArena && size <= kFuzzArenaBytes && begin + size <= kArena + kFuzzArenaBytes;
  };
  ipc::Request request;
  const ipc::Reject reject = ipc::validate_request(entry, kRegions, &request);
  KVM_ASSERT(reject < ipc::Reject::kCount);
  if (reject != ipc::Reject::kNone) {
    return;
  }
  KVM_ASSERT(request.result == nullptr || is_inside(request.result, sizeof(ipc::ResultBlock)));
  ipc::write_result(request.result, 1, "a sentence");
  const auto check = [&](const TensorView& t) {
    KVM_ASSERT(t.data == nullptr || is_inside(t.data, t.size_bytes));
  };
  if (const auto* step = std::get_if<StepRequest>(&request.message)) {
    KVM_ASSERT(!step->items.empty() && step->items.size() <= kMaxItems);
    for (const auto* t : {&step->k, &step->v, &step->q, &step->o, &step->lse, &step->err}) {
      check(*t);
    }
    for (const kvm_item& item : step->items) {
      KVM_ASSERT(uint64_t{item.range_begin} + item.n_ranges <= step->ranges.size());
    }
  } else if (const auto* read = std::get_if<ReadRequest>(&request.message)) {
    check(read->k);
    check(read->v);
  } else if (const auto* observe = std::get_if<ObserveRequest>(&request.message)) {
    check(observe->q);
    check(observe->column_sums);
  } else if (const auto* seq = std::get_if<SeqRequest>(&request.message)) {
    KVM_ASSERT(seq->hashes.size() <= kMaxPrefixPages);
    KVM_ASSERT(seq->hashes.empty() || seq->verb == SeqVerb::kPublish);
  } else if (const auto* snapshot = std::get_if<SnapshotRequest>(&request.message)) {
    KVM_ASSERT(snapshot->name.size() <= kMaxSnapshotNameBytes);
  }
}

}  // namespace kvm::testing
