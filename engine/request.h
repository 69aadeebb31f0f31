// SPDX-License-Identifier: Apache-2.0
// A request in flight. Internal to the engine.
#ifndef KVM_ENGINE_REQUEST_H_
#define KVM_ENGINE_REQUEST_H_

#include <atomic>
#include <cstdint>
#include <variant>
#include <vector>

#include "engine/aging_work.h"
#include "engine/engine.h"
#include "engine/index_work.h"
#include "engine/read_work.h"
#include "engine/scheduler.h"
#include "engine/sequence_order.h"
#include "engine/step.h"
#include "engine/validate.h"

namespace kvm::engine {

enum class RequestState : uint8_t {
  kWaiting,  // behind an earlier request of one of its sequences
  kReady,    // may start as soon as the scheduler has room
  kRunning,
  kDone,  // the callback is due
};

// Reused from request to request: its buffers keep their size.
struct Request final : TaskSet {
  explicit Request(std::vector<ThreadWorkspace>* workspaces) : thread_workspaces(workspaces) {}

  void run(uint32_t task, uint32_t thread) override {
    // Slices of policies are short, and are never left half done.
    if (is_abandoned.load(std::memory_order_relaxed) && !aging.is_running()) {
      return;
    }
    if (indexing.is_running()) {
      indexing.run(task, (*thread_workspaces)[thread]);
    } else if (aging.is_running()) {
      aging.run(task, (*thread_workspaces)[thread]);
    } else if (std::holds_alternative<StepRequest>(what)) {
      step.run(task, (*thread_workspaces)[thread]);
    } else {
      read.run(task);
    }
  }

  std::vector<ThreadWorkspace>* thread_workspaces;
  ClientId client = 0;
  RequestTag tag;
  RequestState state = RequestState::kWaiting;
  bool is_orphan = false;  // its client is gone: no callback
  // The same for tasks, which then do nothing: nobody sees what they would have written.
  std::atomic<bool> is_abandoned{false};
  uint64_t cost = 0;   // estimate, in bytes of K and V that are read or written
  uint32_t index = 0;  // in the engine's list of requests
  uint64_t submitted_ns = 0;
  DoneCallback on_done;
  RequestResult result;
  std::variant<StepRequest, ReadRequest, ObserveRequest, SeqRequest> what;
  std::variant<StepTensors, ReadTensors, ObserveTensors> tensors;
  std::vector<kvm_seq_id> seqs;  // that it touches, each once
  SequenceOrder::Ticket ticket;
  IndexWork indexing;  // what has to be done before it begins
  Step step;
  ReadWork read;
  AgingWork aging;  // what it ends with
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_REQUEST_H_
