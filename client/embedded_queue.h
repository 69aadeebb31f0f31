// SPDX-License-Identifier: Apache-2.0
// A queue of an engine in this process: staged requests wait here until submit; completions until
// they are taken. Waiting drives the engine; so does the service's driver once a queue has a
// descriptor to wait on.
//
// Threads: one at a time, but for the callbacks of the engine, which run wherever it is driven and
// touch `Done` only, under its mutex.
#ifndef KVM_CLIENT_EMBEDDED_QUEUE_H_
#define KVM_CLIENT_EMBEDDED_QUEUE_H_

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <variant>

#include "client/backend.h"
#include "client/embedded_client.h"
#include "client/sentences.h"
#include "engine/engine.h"

namespace kvm::client {

class EmbeddedQueue final : public Queue {
 public:
  // REQUIRES: service->add_queue() succeeded.
  EmbeddedQueue(std::shared_ptr<EmbeddedService> service, uint32_t n_entries);
  ~EmbeddedQueue() override;

  Status stage_nop(uint64_t user_data) override;
  Status stage_step(const StepCall& call, uint64_t user_data) override;
  Status stage_read(const ReadCall& call, uint64_t user_data) override;
  Status stage_observe(const ObserveCall& call, uint64_t user_data) override;
  Status stage_seq(const SeqRequest& call, uint64_t user_data) override;
  Status stage_snapshot(const SnapshotRequest& call, uint64_t user_data) override;
  Status submit() override;
  Status check_open() override;
  uint32_t n_outstanding() const override;
  Result<uint32_t> take(kvm_completion* out, uint32_t n_max, uint32_t n_min, uint64_t timeout_ns,
                        Interrupt interrupt) override;
  Status cancel(uint64_t user_data) override;
  int fd() override;

 private:
  struct Nop {};
  using Request =
      std::variant<Nop, StepRequest, ReadRequest, ObserveRequest, SeqRequest, SnapshotRequest>;

  // An Entry is a request from stage to take. It moves from list to list with its place, so that
  // nothing but staging it needs memory.
  struct Entry {
    uint64_t number = 0;  // the engine's tag, once submitted
    Request request;
    kvm_completion completion{};
    Status status;
  };
  using Entries = std::list<Entry>;

  // Callbacks write to a Done, which outlives the queue if it must.
  struct Done {
    std::mutex mutex;
    Entries in_flight;
    Entries answers;
    std::shared_ptr<QueueEvent> event;  // null: nobody wants it
  };

  Status stage(Request request, uint64_t user_data);
  // The first of staged_.
  void submit_one(engine::Engine& engine, engine::ClientId client);
  void hand_over(engine::Engine& engine, engine::ClientId client, Entries::iterator entry);
  uint32_t take_answers(kvm_completion* out, uint32_t n_max);
  void free_untaken();  // and waits until they are
  void fail_outstanding();
  uint32_t n_in_flight() const;
  void reset_event() const;
  void raise_event_if_ready() const;

  static void finish(Done* done, Entries::iterator entry, RequestResult&& result);
  static void answer(Entry* entry, Status status);

  std::shared_ptr<EmbeddedService> service_;
  uint32_t n_entries_;
  uint64_t id_;
  Entries staged_;
  std::atomic<uint32_t> n_freeing_{0};
  std::shared_ptr<Done> done_;
  std::shared_ptr<QueueEvent> event_;  // that of done_, once somebody has asked for its descriptor
  Sentences sentences_;
};

}  // namespace kvm::client

#endif  // KVM_CLIENT_EMBEDDED_QUEUE_H_
