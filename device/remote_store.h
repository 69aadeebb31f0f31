// SPDX-License-Identifier: Apache-2.0
// RemoteStore: sequences in device memory of kvmd, which keeps the books (device/store_server.h);
// this process maps the memory and launches kernels on it.
//
// It has a copy of what the books say of lengths and pages. Cuts and forks follow from that, so
// they are done here and only noted. A step asks once, for the pages that are new to it; a sequence
// whose new tokens have room in pages that it has is not named in it, and a step of such sequences
// says nothing. What moves have done to a sequence it asks when the sequence is used again.
//
// When kvmd ends, whatever a stream waits for of it is let go at once, and calls answer
// DISCONNECTED; what was enqueued runs over memory that is still there, with contents that copies
// of kvmd may not have brought.
//
// Threads: as SequenceStore.
#ifndef KVM_DEVICE_REMOTE_STORE_H_
#define KVM_DEVICE_REMOTE_STORE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "device/sequence_store.h"
#include "device/store_wire.h"
#include "ipc/fd.h"
#include "ipc/frame_channel.h"
#include "ipc/memory.h"

namespace kvm::device {

struct RemoteSequence;

struct RemoteStoreOptions {
  uint64_t timeout_ns = UINT64_MAX;       // of an answer of kvmd; past it kvmd counts as gone
  uint64_t ready_within_ns = UINT64_MAX;  // of the first one: kvmd may have memory to lock
  std::shared_ptr<void> held;             // kept as long as the store
};

class RemoteStore final : public SequenceStore {
 public:
  // words: of sizeof(wire::Words). Waits until kvmd can serve. Fails: as kvm_cuda_open.
  static Result<std::unique_ptr<RemoteStore>> open(std::unique_ptr<Driver> driver, ipc::Fd channel,
                                                   ipc::Mapping words,
                                                   const RemoteStoreOptions& options);
  // Waits for the device. REQUIRES: no enqueued work of the caller uses a page.
  ~RemoteStore() override;
  RemoteStore(const RemoteStore&) = delete;
  RemoteStore& operator=(const RemoteStore&) = delete;

  // --- SequenceStore ----------------------------------------------------------------------------
  Status state() const override;
  Result<std::shared_ptr<const SpaceLayout>> prepare(SpaceLayout layout) override;
  SlabPlace slab(uint32_t slab) const override;
  Result<SequencePtr> create(std::shared_ptr<const SpaceLayout> space) override;
  Result<SequencePtr> fork(DeviceSequence& parent, uint64_t n_tokens) override;
  Status truncate(DeviceSequence* seq, uint64_t n_tokens) override;
  void clear(DeviceSequence* seq) override;
  Status spill(DeviceSequence* seq, uint64_t begin, uint64_t end, Stream stream) override;
  Status fetch(DeviceSequence* seq, uint64_t begin, uint64_t end, Stream stream) override;
  Wait moves_of(std::span<DeviceSequence* const> seqs, bool also_spills) override;
  void finish_moves() override;
  Status begin_growth(std::span<const Growth> growths, Stream stream) override;
  void finish_growth() override;
  void undo_growth() override;
  Result<Usage> usage(const DeviceSequence& seq) override;
  Result<Residence> residence(DeviceSequence* seq) override;
  Result<Figures> figures() override;

 private:
  struct Range {
    uint8_t* base = nullptr;
    uint64_t size_bytes = 0;
    std::unordered_map<uint64_t, uint64_t> mapped;  // bytes, by offset
  };
  struct KnownSlab {
    uint32_t range = 0;
    uint64_t page_bytes = 0;
    uint64_t n_slots = 0;
  };
  // Notes that wait for the next call. Layouts that go leave theirs here, too.
  struct Outbox {
    std::mutex mutex;
    std::vector<wire::Note> notes;
  };
  // A page that begin_growth has put into a list.
  struct Change {
    DeviceSequence* seq = nullptr;
    uint32_t list = 0;
    uint32_t block = 0;
    tiers::PageRef before = tiers::kNoPage;  // kNoPage: the block is new
  };
  struct Grown {
    Growth growth;
    uint64_t n_before = 0;
    uint64_t own_from = 0;  // before it
  };

  RemoteStore(std::unique_ptr<Driver> driver, ipc::Fd channel, ipc::Mapping words,
              const RemoteStoreOptions& options);
  Status init(uint64_t ready_within_ns);
  void watch();
  Status gone() const;
  // Nobody waits for kvmd any more.
  void let_go();
  // Nothing is said to kvmd from here on.
  void hang_up();
  // kvmd does not say what it should. Returns PROTOCOL with the reason.
  Status break_off(const std::string& why);

  void note(const wire::Note& note);
  // kvmd knows then of all tokens of the sequence.
  void note_tokens(RemoteSequence* seq);
  // Whether kvmd need not be asked for a growth: the stream waits for nothing, and neither pages
  // come nor go.
  bool follows_from_books(const Growth& growth) const;
  // Fails: LIMIT.
  Status check_entries(uint64_t n_new) const;
  // A call and its answer: `put` writes what goes behind the Call, `take` reads the answer, which
  // it must read whole. What the reply wants enqueued goes to *commands. `first`: notes and the
  // verdict of the last growth go before it, as with everything but questions of other threads.
  template <class Put, class Take>
  Status call(const wire::Call& call, Put put, Take take, std::vector<wire::Command>* commands,
              bool first = true);
  Status receive_reply();
  Status obey(const wire::Order& order, const ipc::Fd& memory);
  // Waits first, so that those that cannot be enqueued now are owed; then copies.
  Status enqueue(std::span<const wire::Command> commands, Stream stream);
  void owe(std::span<const wire::Command> commands);
  Status pay(Stream stream);
  // Asks for asked_. On failure, too, the commands count as waited for.
  Status ask_for_growth(uint64_t n_at_most, std::vector<wire::Change>* changes,
                        std::vector<wire::Command>* commands);
  void end_growth(wire::Verdict verdict);
  // Learns what moves have done to a sequence. Fails: BUSY; why a move was taken back.
  Status settle(RemoteSequence* seq);
  Status move(wire::CallKind kind, DeviceSequence* seq, uint64_t begin, uint64_t end,
              Stream stream);

  const std::unique_ptr<Driver> driver_;
  ipc::FrameChannel channel_;
  ipc::Mapping words_;
  const uint64_t timeout_ns_;
  const std::shared_ptr<void> held_;
  bool words_registered_ = false;
  std::shared_ptr<Outbox> outbox_ = std::make_shared<Outbox>();
  uint64_t n_entries_ = 0;  // wire::n_entries of all sequences, as kvmd counts them
  uint64_t last_space_ = 0;
  uint64_t last_sequence_ = 0;
  uint64_t last_marker_ = 0;
  std::unordered_map<uint32_t, KnownSlab> slabs_;
  std::vector<Change> changes_;
  std::vector<Grown> grown_;
  std::vector<Growth> asked_;  // those of grown_ that kvmd was asked for
  wire::Verdict verdict_ = wire::Verdict::kNone;
  // What the client's stream still has to wait for of each of kvmd's words, before anything else.
  std::array<uint64_t, wire::kServerWords> owed_{};

  std::mutex call_mutex_;  // guards the channel, and the ranges while a call is answered
  std::unordered_map<uint32_t, Range> ranges_;
  ipc::FrameWriter writer_;
  ipc::Frame frame_;

  std::atomic<bool> is_down_{false};
  std::atomic<bool> is_ending_{false};
  std::thread watcher_;
};

}  // namespace kvm::device

#endif  // KVM_DEVICE_REMOTE_STORE_H_
