// SPDX-License-Identifier: Apache-2.0
// Auditor: computes a fraction of the approximate answers again, exactly, and compares.
//
// An answer is one problem: a request item, one kv head. When its request has ended and before its
// sequence changes, an AuditJob copies the queries, the outputs and what of the pages is not full,
// and pins the full pages (engine/store/store.h). A thread of the lowest priority (SCHED_IDLE) then
// evaluates it over the same tokens, with fp32 weights; the driver collects what it found.
//
//   driver   is_due() -> fill a job -> offer()         collect() -> unpin, count
//   thread             kReady -> kRunning -> kDone
//
// It never makes a request wait: where the queue is full the audit is skipped, and it ends early
// where its client leaves, or where a request would fail for want of the memory that it pins.
//
// Threads: the driver calls everything; the auditing thread is internal, begun with the first job.
// Memory: kQueue jobs, each its queries and outputs (tens of KB), and the pages that it pins.
#ifndef KVM_ENGINE_ATTEND_AUDIT_H_
#define KVM_ENGINE_ATTEND_AUDIT_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "attention/attention.h"
#include "attention/sampled/approx.h"
#include "base/audit_stats.h"
#include "engine/store/store.h"
#include "engine/tasks/workspace.h"

namespace kvm::engine {

enum class AuditedAs : uint8_t { kTopK, kSampled, kVerified };  // AuditStats::modes

// An AuditJob is an answer by itself: nothing of it refers to the request but pinned pages.
struct AuditJob {
  AuditedAs mode = AuditedAs::kSampled;
  float delta = 0;
  uint32_t rows = 0;
  PagePins pins;
  attention::Problem problem;  // points into what follows
  std::vector<std::byte> q;
  std::vector<KvRun> runs;
  std::vector<std::byte> tail;  // rows and scales of pages that are not full
  std::vector<uint64_t> tree;
  std::vector<PositionRange> include, exclude;
  std::vector<float> sink_logits;
  std::vector<float> answer;     // [rows][dim_v]
  std::vector<float> estimated;  // [rows]; NaN: no bar
  // By the thread: [rows], and whether it came to its end.
  std::vector<double> true_error;
  bool is_done = false;

  // Copies what an answered problem refers to, its outputs included, all but full pages.
  // False where it cannot be computed again: its keys have log weights, which may change.
  bool take(const attention::Problem& answered, const attention::ApproxReport& report);
  void take_runs(const attention::Problem& answered);
};

class Auditor {
 public:
  static constexpr uint32_t kQueue = 8;

  // every: one of so many answers; 0: none.
  explicit Auditor(uint64_t every);
  ~Auditor();
  Auditor(const Auditor&) = delete;
  Auditor& operator=(const Auditor&) = delete;

  // Whether the next answer is to be audited: a random one of `every`, the same ones each time.
  bool is_due();
  // A job to fill; null where the queue is full, which counts as skipped.
  AuditJob* next_job();
  // Instead of offer().
  enum class Skipped : uint8_t { kBusy, kUnfit };
  void skip(Skipped why) { ++(why == Skipped::kBusy ? stats_.n_busy : stats_.n_unfit); }
  // Hands next_job()'s over, filled.
  void offer();

  // Counts what is done and gives its pages back. Cheap where there is nothing.
  void collect(Store& store);
  // Ends the audits of a client: those that wait at once, one that runs soon. Until then the client
  // has pages pinned.
  void cancel(Store& store, ClientId client);
  bool holds(ClientId client) const;
  // Ends all audits, and waits for the one that runs. Returns whether there were any.
  bool give_up(Store& store);

  // Called on the thread when there is something to collect. When this returns, the callback set
  // before is not running and will not be called again.
  void set_wake(std::function<void()> wake);
  // Collected so far.
  const AuditStats& stats() const { return stats_; }

 private:
  enum State : uint32_t { kFree, kReady, kRunning, kDone };
  struct Slot {
    // SYNC: who sets kReady or kDone releases the job; who sees it acquires it.
    std::atomic<uint32_t> state{kFree};
    std::atomic<bool> is_cancelled{false};
    std::atomic<uint64_t> number{0};  // of offers: the oldest goes first
    AuditJob job;
  };

  void work();
  Slot* take_oldest();
  // False where it was cancelled, or the machine refused memory.
  bool compute(Slot* slot);
  bool cancel_ready(Store& store, Slot* slot);
  void finish(Store& store, Slot* slot);
  void count(const AuditJob& job);

  const uint64_t every_;
  uint64_t n_answers_ = 0;
  uint64_t n_offers_ = 0;
  Slot* filling_ = nullptr;
  AuditStats stats_;
  std::array<Slot, kQueue> slots_;
  std::atomic<uint32_t> n_done_{0};
  std::atomic<uint32_t> epoch_{0};  // grows with each offer, and at the end
  std::atomic<bool> stop_{false};
  std::mutex wake_mutex_;
  std::function<void()> wake_;  // guarded by wake_mutex_
  // These belong to the thread.
  Workspace prepared_, scratch_, states_;
  std::thread thread_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_ATTEND_AUDIT_H_
