// SPDX-License-Identifier: Apache-2.0
// Requests of a hostile client: valid ones from a seeded generator, and ways to spoil them.
#ifndef KVM_TESTS_HOSTILE_REQUESTS_H_
#define KVM_TESTS_HOSTILE_REQUESTS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "base/limits.h"
#include "base/round.h"
#include "engine/space/refusal.h"
#include "ipc/validate.h"
#include "ipc/wire.h"
#include "kvm.h"

namespace kvm::testing {

// What each part of the hostile client's arena is for.
inline constexpr uint64_t kSlotBytes = 1024;  // of a parameter block; slot i at i * kSlotBytes
inline constexpr uint64_t kResultsAt = ipc::kRequestEntries * kSlotBytes;
inline constexpr uint64_t kTensorsAt = kResultsAt + ipc::kRequestEntries * sizeof(ipc::ResultBlock);
inline constexpr uint64_t kArenaBytes = 512 << 10;
// Of a larger arena: room for a block with as many ranges as the wire allows.
inline constexpr uint64_t kLargeBlockAt = kArenaBytes;
inline constexpr uint64_t kLargeBlockBytes =
    sizeof(ipc::StepBlock) + 8 * sizeof(kvm_item) + kMaxRanges * sizeof(kvm_range);
inline constexpr uint64_t kLargeArenaBytes = kArenaBytes + round_up(kLargeBlockBytes, 4096);

// The spaces of the test.
enum : uint32_t {
  kPlain,    // 2 layers, no index
  kIndexed,  // 1 layer with an index from 256 tokens on
  kLayered,  // 5 layers: OWN, ALIAS of it, ABSENT, OWN, OWN with more kv heads; sinks + recent
  kLatent,   // 1 layer with V in K, and slopes
  kSpaces,
};
inline constexpr uint32_t kHeads = 4;
inline constexpr uint32_t kKvHeads = 2;
inline constexpr uint32_t kDim = 32;
using SpaceIds = std::array<kvm_space_id, kSpaces>;

// A request before it is written to shared memory.
struct Draft {
  ipc::RequestEntry entry{};
  ipc::StepBlock step{};
  ipc::ReadBlock read{};
  ipc::ObserveBlock observe{};
  ipc::SeqBlock seq{};
  ipc::CancelBlock cancel{};
  ipc::SnapshotBlock snapshot{};
  std::vector<kvm_item> items;
  std::vector<kvm_range> ranges;
  std::vector<uint64_t> tree;

  // Fills in counts and lengths. What spoils them comes afterwards.
  void seal();
  // The fixed part of its block.
  uint8_t* block();
  size_t block_bytes() const;
  // Writes block and arrays, as far as there is room for them, to `to`.
  void write(uint8_t* to, uint64_t room) const;
};

class RequestMaker {
 public:
  // others: sequences of other clients.
  RequestMaker(uint64_t seed, const SpaceIds& spaces, std::vector<kvm_seq_id> others)
      : random_(seed), spaces_(spaces), others_(std::move(others)) {}

  // Of a new session: its arena, and no sequences.
  void begin_session(uint32_t region);
  void add_seq(uint32_t space, kvm_seq_id seq);
  // Where the space of a valid kCreate is not in `spaces`, the caller's concern.
  uint32_t index_of(kvm_space_id space) const;

  // A request that can succeed, at the given slot.
  Draft any(uint32_t slot);
  Draft step(uint32_t slot, uint32_t verbs, uint32_t space, uint32_t n_items = 1);
  Draft seq(uint32_t slot, SeqVerb verb, uint32_t space);
  Draft snapshot(uint32_t slot, SnapshotVerb verb, uint32_t space);
  Draft read(uint32_t slot, uint32_t space);
  Draft observe(uint32_t slot, uint32_t space);

  // Changes one field that is the engine's to judge.
  void bend(Draft* draft);
  // Changes any few bytes of the entry or the block.
  void mutate(Draft* draft);

  uint64_t below(uint64_t n) { return random_() % n; }
  bool one_in(uint64_t n) { return below(n) == 0; }
  uint64_t boundary();
  uint32_t region() const { return region_; }
  const SpaceIds& spaces() const { return spaces_; }

 private:
  Draft blank(uint32_t slot, ipc::Opcode opcode);
  kvm_seq_id some_seq(uint32_t space);
  ipc::TensorRef tensor(uint64_t offset, uint64_t size_bytes, uint32_t dtype) const;

  std::mt19937_64 random_;
  SpaceIds spaces_;
  std::vector<kvm_seq_id> others_;
  uint32_t region_ = 0;
  uint64_t last_number_ = 0;
  std::array<std::vector<kvm_seq_id>, kSpaces> seqs_;
};

// Makes a request that is rejected, or refused, for one reason.
template <typename Reason>
struct Spoiler {
  Reason reason;
  std::function<Draft(RequestMaker*, uint32_t slot)> make;
};
// One for each reason of ipc/validate.h.
const std::vector<Spoiler<ipc::Reject>>& reject_spoilers();
// One for each reason of engine/space/refusal.h that a client of the daemon can live to hear.
const std::vector<Spoiler<engine::Refusal>>& refusal_spoilers();

}  // namespace kvm::testing

#endif  // KVM_TESTS_HOSTILE_REQUESTS_H_
