// SPDX-License-Identifier: Apache-2.0
// The two rings of a queue: requests from the client to the daemon, completions back.
//
//   client                                            daemon
//   RequestProducer    --- ClientRegion.entries --->  RequestConsumer
//   CompletionConsumer <-- DaemonRegion.entries ----  CompletionProducer
//
// INVARIANT: each shared word has one writer. A side's own indices live in private members and are
// only published; the other side's index is read once per call, checked, and never read again
// within it; entries are copied out once. Nothing that the peer can write is ever state of ours.
//
// Waking. A side that is about to sleep raises its flag, then looks at the index once more; a side
// that publishes stores the index, then looks at the flag. All four accesses are sequentially
// consistent, so at least one of the two sees the other's store, and no wake-up is lost.
//
// Threads: each object belongs to one thread at a time.
// Fails:   PROTOCOL when the other side's index is impossible; the object must not be used further.
#ifndef KVM_IPC_RING_H_
#define KVM_IPC_RING_H_

#include <cstdint>

#include "base/status.h"
#include "ipc/wire.h"

namespace kvm::ipc {

// The client's end of the request ring.
class RequestProducer {
 public:
  RequestProducer(ClientRegion* client, const DaemonRegion* daemon)
      : client_(client), daemon_(daemon) {}

  // Entries that can be staged now, at least: sq_head is read only when the room last seen is used
  // up, since each look at it costs a cache line.
  Result<uint32_t> room();
  // Writes an entry that the daemon does not see before publish(). REQUIRES: room() > 0.
  void stage(const RequestEntry& entry);
  uint32_t n_staged() const { return tail_ - published_; }
  // Forgets what was staged since the last publish().
  void discard_staged() { tail_ = published_; }
  // Makes the staged entries visible. Returns whether the daemon sleeps, or is about to: then the
  // caller must ring the doorbell.
  bool publish();

 private:
  ClientRegion* client_;
  const DaemonRegion* daemon_;
  uint32_t tail_ = 0;
  uint32_t published_ = 0;
  uint32_t head_seen_ = 0;
};

// The daemon's end of the request ring.
class RequestConsumer {
 public:
  RequestConsumer(const ClientRegion* client, DaemonRegion* daemon)
      : client_(client), daemon_(daemon) {}

  // Copies up to n_max entries to out, in order, and gives their slots back. Returns how many.
  Result<uint32_t> take(RequestEntry* out, uint32_t n_max);
  // Raises sq_need_wakeup and looks again. False: entries are there, do not sleep (the flag is
  // lowered). An impossible index counts as entries: take() reports it.
  bool prepare_sleep();
  // Raises the flag without a look: for a consumer that cannot take what is there.
  void raise_wakeup();
  // Lowers the flag. Call it after waking.
  void finish_sleep();

 private:
  const ClientRegion* client_;
  DaemonRegion* daemon_;
  uint32_t head_ = 0;
};

// The daemon's end of the completion ring.
class CompletionProducer {
 public:
  CompletionProducer(const ClientRegion* client, DaemonRegion* daemon)
      : client_(client), daemon_(daemon) {}

  // Completions that fit now. Reads cq_head.
  Result<uint32_t> room() const;
  // Writes an entry that the client does not see before publish(). REQUIRES: as many calls since
  // the last room() as it returned, at most.
  void stage(const CompletionEntry& entry);
  uint32_t n_staged() const { return tail_ - published_; }
  // Makes the staged entries visible, and wakes the client if it sleeps on the ring. Never blocks.
  // Returns whether anything was published.
  bool publish();
  // Says whether the client wants its completion eventfd written after a publish that published.
  bool wants_eventfd() const;

 private:
  const ClientRegion* client_;
  DaemonRegion* daemon_;
  uint32_t tail_ = 0;
  uint32_t published_ = 0;
};

// The client's end of the completion ring.
class CompletionConsumer {
 public:
  CompletionConsumer(ClientRegion* client, const DaemonRegion* daemon)
      : client_(client), daemon_(daemon) {}

  // Copies up to n_max entries to out, in order, and gives their slots back. Returns how many.
  Result<uint32_t> take(CompletionEntry* out, uint32_t n_max);
  // Says whether take() would find an entry (or an error). The cheapest look, for spinning.
  bool is_ready() const;
  // Sleeps until is_ready(), at most timeout_ns, or until a signal. Spurious returns are allowed.
  void sleep(uint64_t timeout_ns);
  // From here on the daemon writes the completion eventfd for what it publishes. Returns whether
  // completions are there that it may not have been written for.
  bool request_eventfd();

 private:
  ClientRegion* client_;
  const DaemonRegion* daemon_;
  uint32_t head_ = 0;
};

}  // namespace kvm::ipc

#endif  // KVM_IPC_RING_H_
