// SPDX-License-Identifier: Apache-2.0
// A queue of the thin library: the client's ends of the two rings, the parameter and result blocks
// of its requests, and the staging of HOST buffers.
//
//   slot i of n_entries   one request in flight: a parameter block (up to 64 items; larger ones are
//                         allocated), a cancel block and a result block in the queue's arena
//   number on the wire    serial << 9 | is_cancel << 8 | slot
//
// INVARIANT: a slot is free only when both its request and its cancel request, if any, have been
// answered, so blocks in use are never overwritten.
//
// Threads: one at a time.
#ifndef KVM_CLIENT_THIN_QUEUE_H_
#define KVM_CLIENT_THIN_QUEUE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/spin.h"
#include "client/backend.h"
#include "client/own_seqs.h"
#include "client/sentences.h"
#include "client/thin_connection.h"
#include "client/thin_staging.h"
#include "ipc/ring.h"

namespace kvm::client {

// Sequences that went with a former connection of the client: their ids answer LOST.
using LostSeqs = std::shared_ptr<const std::unordered_set<kvm_seq_id>>;

class ThinQueue final : public Queue {
 public:
  // n_entries: a power of two, 1 to kMaxOutstanding. Fails: as kvm_queue_create.
  static Result<std::unique_ptr<ThinQueue>> create(std::shared_ptr<Connection> connection,
                                                   LostSeqs lost, uint32_t n_entries,
                                                   uint64_t spin_ns);
  ~ThinQueue() override;

  Status stage_nop(uint64_t user_data) override;
  Status stage_step(const StepCall& call, uint64_t user_data) override;
  Status stage_read(const ReadCall& call, uint64_t user_data) override;
  Status stage_observe(const ObserveCall& call, uint64_t user_data) override;
  Status stage_seq(const SeqRequest& call, uint64_t user_data) override;
  Status stage_snapshot(const SnapshotRequest& call, uint64_t user_data) override;
  Status submit() override;
  Status check_open() override;
  uint32_t n_outstanding() const override {
    return static_cast<uint32_t>(staged_.size()) + n_submitted_ + n_ready();
  }
  Result<uint32_t> take(kvm_completion* out, uint32_t n_max, uint32_t n_min, uint64_t timeout_ns,
                        Interrupt interrupt) override;
  Status cancel(uint64_t user_data) override;
  int fd() override;

 private:
  static constexpr uint32_t kMaxPieces = 7;  // six tensors and a large block

  // A Piece is memory of a request outside its slot. `host` receives the bytes on success; may be
  // null. `before`: what they were, of an output that the request may leave in part as it was; the
  // elements that are still the same are not copied then.
  struct Piece {
    StagingPool::Piece memory;
    uint8_t* host = nullptr;
    std::unique_ptr<uint8_t[]> before;
    uint32_t element_bytes = 0;
  };

  // What becomes of a tensor when its request has succeeded.
  enum class Use : uint8_t { kInput, kOutput, kDenseOutput };

  enum class SlotState : uint8_t { kFree, kStaged, kSubmitted, kAnswered };

  struct Slot {
    uint64_t serial = 0;
    uint64_t user_data = 0;
    SlotState state = SlotState::kFree;
    ipc::Opcode opcode = ipc::Opcode::kNop;
    bool cancel_pending = false;
    const uint8_t* block = nullptr;
    OwnSeqs::Place place;  // kSeq that makes a sequence
    uint32_t n_pieces = 0;
    std::array<Piece, kMaxPieces> pieces;
  };

  // A Ready is a completion that has left the ring but was not taken yet.
  struct Ready {
    kvm_completion completion;
    std::string sentence;
  };

  ThinQueue(std::shared_ptr<Connection> connection, QueueMemory memory, SharedArena arena,
            LostSeqs lost, uint32_t n_entries, uint64_t spin_ns);

  // Older daemons leave it as it was.
  bool counts_not_finite() const { return connection_->info().protocol_minor >= 2; }
  uint32_t n_ready() const { return static_cast<uint32_t>(ready_.size()); }
  uint64_t block_offset(uint32_t slot) const;
  uint64_t cancel_offset(uint32_t slot) const;
  uint64_t result_offset(uint32_t slot) const;

  Result<uint32_t> claim_slot(ipc::Opcode opcode, uint64_t user_data);
  void free_slot(Slot* slot);
  // Claims a slot and has fill(index, slot) write the request and push it: a Status.
  template <typename Fill>
  Status stage(ipc::Opcode opcode, uint64_t user_data, Fill&& fill);
  void release_pieces(Slot* slot);
  Status stage_tensor(const Tensor& tensor, Use use, Slot* slot, ipc::TensorRef* out);
  static void copy_back(const Piece& piece);
  static Use use_of_read(const Tensor& tensor, uint64_t n_tokens);
  Status stage_step_tensors(const StepCall& call, Slot* slot, ipc::StepBlock* block);
  Result<uint8_t*> block_memory(uint32_t slot, uint64_t length, ipc::RequestEntry* entry);
  Status write_step_block(const StepCall& call, const ipc::StepBlock& head, uint32_t slot,
                          ipc::RequestEntry* entry);
  Status push_prefix(uint32_t slot, const ipc::SeqBlock& block,
                     std::span<const kvm_prefix_hash> hashes);
  Status push(uint32_t slot, ipc::RequestEntry entry);
  template <typename Block>
  Status push_block(uint32_t slot, const Block& block);

  Status drain(kvm_completion* out, uint32_t n_max, uint32_t* n);
  Status finish(const ipc::CompletionEntry& entry, kvm_completion* out, std::string* sentence,
                bool* is_cancel);
  Status drain_to_ready();
  bool spin_until(uint64_t end_ns);
  void await_completion(uint64_t deadline_ns, uint64_t slice_ns);
  bool is_cut_off();
  bool names_lost_seq(const Slot& slot) const;
  void fail_outstanding(const Status& status);
  void finish_submitted(std::vector<kvm_seq_id>* made);
  void finish_cancels();
  void free_untaken(const std::vector<kvm_seq_id>& seqs);
  uint32_t take_ready(kvm_completion* out, uint32_t n_max);
  void note_seq(const ipc::SeqBlock& call, const ipc::ResultBlock& result, Slot* slot,
                kvm_completion* out);
  void reset_eventfd() const;
  void raise_eventfd() const;

  std::shared_ptr<Connection> connection_;
  QueueMemory memory_;
  SharedArena arena_;
  LostSeqs lost_;
  uint32_t n_entries_;
  uint64_t spin_ns_;
  uint64_t wait_ns_[2] = {};   // how long the last waits took
  CoreShare share_;            // of who waits
  uint64_t next_look_ns_ = 0;  // at the connection, of who only polls
  ipc::RequestProducer requests_;
  ipc::CompletionConsumer completions_;
  StagingPool staging_;

  std::vector<Slot> slots_;
  std::vector<uint32_t> free_slots_;
  std::vector<Ready> ready_;      // has room for all
  std::vector<uint32_t> staged_;  // slots in the ring that submit() has not published yet
  uint32_t n_submitted_ = 0;
  uint64_t last_serial_ = 0;
  bool is_broken_ = false;  // the rings cannot be trusted and are read no more
  bool eventfd_used_ = false;
  ipc::Fd watched_;  // the eventfd and the socket, for event loops
  Sentences sentences_;
};

}  // namespace kvm::client

#endif  // KVM_CLIENT_THIN_QUEUE_H_
