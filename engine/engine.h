// SPDX-License-Identifier: Apache-2.0
// Engine: everything the service does, behind one class that knows no sockets. The daemon drives it
// from its dispatcher thread; the embedded client drives it under a mutex.
//
// The rooms of engine/; each includes only those before it:
//
//   tasks/      who computes: jobs, worker threads, cores, scratch memory
//   stream/     brings pages of the slow tier to the tasks of a job
//   space/      what a model looks like, and what a request may say to it: pure functions
//   store/      sequences, their pages, what a head keeps besides, indexes; who pays for what
//   index/      makes the indexes of a sequence and hands them to attention
//   retention/  carries out what policies decide about committed tokens
//   image/      a sequence as bytes, and made of them again
//   attend/     plans attention over stored runs, runs it, audits it, knows what it costs
//   run/        a request from its submission to its callback; EngineImpl
//
// Data flow of a request:
//
//   submit() --> [waiting: a sequence is busy with an earlier request]
//            --> start: validate, reserve pages, cut into tasks --> task queue
//   workers and work() --> run tasks (copy K/V in, evaluate chunks, merge, copy out)
//   poll() --> retire: publish lengths, apply policy actions, call on_done, start who waited
//
// All metadata (spaces, sequences, page tables) belongs to the driver thread: no locks on the data
// path. Tasks only read page tables that their request has pinned by keeping its sequences busy.
//
// Threads: one driver thread at a time calls everything here; worker threads are internal.
// Memory:  requests in flight are bounded by the callers' rings; KV by EngineOptions.
// Fails:   with the codes that kvm.h documents for the corresponding function. A request that fails
//          has changed nothing.
#ifndef KVM_ENGINE_ENGINE_H_
#define KVM_ENGINE_ENGINE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/audit_stats.h"
#include "base/clock.h"
#include "base/request.h"
#include "base/status.h"
#include "engine/store/movement_options.h"
#include "engine/store/prefix_stats.h"
#include "engine/store/quota.h"
#include "engine/store/seq_page.h"
#include "engine/store/snapshot_info.h"
#include "kvm.h"

namespace kvm::tiers {
class SlowTier;
}  // namespace kvm::tiers

namespace kvm::engine {

struct EngineOptions {
  uint32_t n_threads = 0;            // that compute, the driver thread included; 0: one per core
  uint64_t host_capacity_bytes = 0;  // hard cap of physical KV memory; 0: 60 % of free memory
  uint64_t default_quota_bytes = 0;  // per client; 0: no share smaller than the capacity
  uint64_t memory_quota_bytes = 0;   // per client, of what cannot leave memory; 0: no limit
  uint64_t max_sequences_per_client = 65536;
  TenantLimits tenant_limits;
  uint32_t max_spaces = 64;
  bool pin_threads = false;              // bind worker i to core i
  const Clock* clock = system_clock();   // of deadlines of requests; outlives the engine
  uint64_t worker_spin_ns = 200000;      // how long an idle worker spins before it sleeps
  uint64_t audit_every = 0;              // one of so many approximate answers is audited; 0: none
  std::string cost_model;                // of KVM_MODE_AUTO, as engine/attend/cost_model.h reads it
  tiers::SlowTier* slow_tier = nullptr;  // outlives the engine; null: there is none
  MovementOptions movement;              // of pages, where there is a slow tier
  uint64_t prefix_pages = 49152;         // of each user's prefixes, that are to be found
  PrefixMemory prefix_memory;            // of their tables; empty: memory of this process
  SavePrefixes save_prefixes = SavePrefixes::kAll;  // where the slow tier keeps objects
};

using DoneCallback = std::function<void(RequestResult&&)>;

// Names a request for cancel(): the caller's queue and its number there.
struct RequestTag {
  uint64_t queue = 0;
  uint64_t number = 0;
};

// Bytes of the pool that belong to a sequence.
struct MemoryPiece {
  const void* data = nullptr;
  uint64_t size_bytes = 0;
};

class Engine {
 public:
  static Result<std::unique_ptr<Engine>> open(const EngineOptions& options);
  // Waits for running tasks; requests not finished are dropped without their callback.
  virtual ~Engine() = default;

  // Clients own sequences. Limits of bytes and sequences that the spec does not name are those of
  // the options; others that it does not name are none.
  virtual ClientId add_client(const ClientSpec& spec) = 0;
  // Frees the client's sequences once its requests in flight have finished; requests not begun are
  // dropped without their callback, running ones finish without it. `on_gone` is called from poll()
  // when no task touches the client's memory any more (arenas may then be unmapped); its account is
  // closed by then.
  virtual void remove_client(ClientId client, std::function<void()> on_gone) = 0;
  // The engine charges sequences and bytes. The driver charges what else clients hold of it.
  virtual QuotaBook& quotas() = 0;
  // Frees a sequence, whoever owns it, once the requests before it are done: what its owner asks of
  // it later answers STALE. Fails: NOT_FOUND, STALE, LOST.
  virtual Status evict(kvm_seq_id seq) = 0;

  // --- Pages between memory and the slow tier, where there is one -------------------------------
  // Full pages go, of heads of which no policy reads what it gives up. Requests go on meanwhile,
  // and after it as before: exact attention and reads take pages that are away through a ring of
  // frames. By itself the engine sends pages away where memory fills up, and brings them back where
  // it is free again (MovementOptions); an append that finds no room waits for that, until its
  // deadline, or until nothing is left that may go (NO_SPACE). work(), poll() and wait() go on with
  // all of it. Fail: as evict(), UNSUPPORTED (no slow tier). Throw std::bad_alloc.

  // Begins to send what a sequence holds in memory. Where the tier takes no more, the rest stays.
  virtual Status send_away(kvm_seq_id /*seq*/) { return no_slow_tier(); }
  // Begins to bring back what a sequence has in the slow tier, as far as there is room below
  // MovementOptions::high.
  virtual Status prefetch(kvm_seq_id /*seq*/) { return no_slow_tier(); }
  // --- Snapshots, where the slow tier keeps objects (docs/adr/0022-snapshots.md) -----------------

  // kSave: what the sequence holds when the request begins, under the name; requests behind it go
  // on meanwhile. Answered when no crash takes it any more. kLoad: a new sequence that holds it,
  // whose pages come as they are needed. kRemove: the name is free again; sequences that were
  // loaded stay. Names are those of the client's user. RequestResult::seq: the new sequence.
  // Fail: UNSUPPORTED (no such tier), INVALID (the name), NO_SPACE, QUOTA, IO; kSave as other
  // requests, LIMIT, and EXISTS (unless it may replace); the others NOT_FOUND; kLoad CORRUPT, LOST,
  // UNSUPPORTED (another version's), and INVALID where the space's layout, policies or fingerprint
  // are others than those that were saved.
  virtual void submit(ClientId /*client*/, RequestTag /*tag*/, SnapshotRequest&& /*request*/,
                      DoneCallback on_done) {
    on_done({.status = no_slow_tier()});
  }
  virtual bool keeps_snapshots() const { return false; }
  virtual SnapshotStats snapshot_stats() const { return {}; }
  // Snapshots of a user (kEverybody: of all) whose names follow `after`; at most n_max.
  virtual std::vector<SnapshotInfo> list_snapshots(uint32_t /*uid*/, const SnapshotName& /*after*/,
                                                   size_t /*n_max*/) const {
    return {};
  }

  // The hashes of a user's prefixes (base/prefix_table.h): made, where there were none. They stay
  // as long as the engine; threads may read them while it writes. Fails: NO_MEMORY.
  virtual Result<std::span<const std::byte>> prefix_table(uint32_t /*uid*/) {
    return Status::fixed(KVM_ERR_UNSUPPORTED, "this engine has no prefixes");
  }
  // Whether the first n_tokens of a prefix are sooner read, as far as they are away, than computed
  // at prefill_rate tokens a second, which is above 0. Fails: as kvm_seq_fork, of the sequence.
  virtual Result<PrefixWeight> weigh_prefix(ClientId /*client*/, kvm_seq_id /*seq*/,
                                            uint64_t /*n_tokens*/, double /*prefill_rate*/) {
    return PrefixWeight();
  }
  virtual PrefixStats prefix_stats() const { return {}; }

  // Whether pages are on their way out, or back, or are about to be.
  virtual bool is_sending() const { return false; }
  virtual bool is_fetching() const { return false; }
  virtual uint64_t n_pages_away() const { return 0; }
  virtual MovementStats movement_stats() const { return {}; }

  // Spaces are shared by all clients of a user, or of all (kEverybody). Names are theirs.
  virtual Result<kvm_space_id> register_space(const SpaceSpec& spec, uint32_t uid = kEverybody) = 0;
  virtual Result<kvm_space_id> find_space(const std::string& name, uint32_t uid = kEverybody) = 0;
  // These two are for whoever may see and change the spaces of all.
  virtual Result<kvm_space_info> space_info(kvm_space_id space) = 0;
  virtual std::vector<kvm_space_info> list_spaces() = 0;
  virtual Status drop_space(kvm_space_id space) = 0;

  // Requests. Those that touch the same sequence run in the order of submission; others may
  // overlap. A sequence of another client answers PERMISSION. on_done is called exactly once, from
  // submit() itself (null work, failed validation) or from poll(), on the driver thread, and may
  // submit again.
  virtual void submit(ClientId client, RequestTag tag, StepRequest&& request,
                      DoneCallback on_done) = 0;
  virtual void submit(ClientId client, RequestTag tag, ReadRequest&& request,
                      DoneCallback on_done) = 0;
  virtual void submit(ClientId client, RequestTag tag, ObserveRequest&& request,
                      DoneCallback on_done) = 0;
  virtual void submit(ClientId client, RequestTag tag, SeqRequest&& request,
                      DoneCallback on_done) = 0;
  // Requests of the client with this tag that have not started complete with CANCELLED. Returns
  // whether any request with the tag was known.
  virtual bool cancel(ClientId client, RequestTag tag) = 0;

  // Runs one task on the calling thread if one is ready; returns whether it did.
  virtual bool work() = 0;
  // Retires finished requests and starts those that waited. Returns how many were retired.
  virtual uint32_t poll() = 0;
  // Gives a bounded part of emptied memory back to the operating system (about a millisecond's
  // worth). Begins to move pages together where that lets more be given back: work() and poll() go
  // on with it. For a driver that has nothing else to do. Returns in how many nanoseconds it should
  // be called again, unless something else happens before; UINT64_MAX: not for that.
  virtual uint64_t housekeep() { return UINT64_MAX; }
  // Requests submitted and not yet retired.
  virtual uint32_t n_in_flight() const = 0;
  // `wake` is called on a worker thread when poll() is due or when work() has something new, so
  // that a driver blocked elsewhere (epoll) can be woken. It must be cheap and must not call the
  // engine. When this returns, the callback set before is not running and will not be called again.
  virtual void set_wake(std::function<void()> wake) = 0;
  // Keeps the driver until a request can be retired or timeout_ns has passed: it runs tasks as long
  // as there are any, then spins, then sleeps.
  virtual void wait(uint64_t timeout_ns) = 0;

  // Sequences: immediate, never wait for requests in flight (numbers may be of a moment ago).
  virtual Result<kvm_seq_info> seq_info(ClientId client, kvm_seq_id seq) = 0;
  // all_clients: every client's; else the client's own and what its user published. space 0: every
  // space. From the id `begin` on, at most n_max (at least 1), and fewer where they are long. Who
  // continues behind the last id seen gets every sequence that lived throughout, once; others may
  // be seen or not.
  virtual SeqPage list_seqs(ClientId client, kvm_space_id space, bool all_clients, kvm_seq_id begin,
                            size_t n_max) = 0;

  // The K and V bytes that an exact attend over the whole layer reads, in position order: one piece
  // per page and plane. For measuring the read ceiling over the very pages that attention reads.
  // Valid while the sequence is not changed, and neither housekeep() nor poll() is called.
  virtual Result<std::vector<MemoryPiece>> layer_memory(kvm_seq_id seq, uint32_t layer) = 0;

  // Fills what the engine knows: struct_size, n_clients, n_clients_total and n_protocol_errors
  // stay 0.
  virtual kvm_stats stats() const = 0;
  // Recounts all pages and bytes, and aborts where they are not what is counted as it goes. O(all):
  // for tests. REQUIRES: no audit is under way.
  virtual void check_accounts() const {}
  // How often a request was refused for each reason of engine/space/validate.h; by Refusal.
  virtual std::span<const uint64_t> refusals() const { return {}; }
  // Counts the audits that have ended.
  virtual AuditStats audit_stats() { return {}; }
  // Returns what KVM_MODE_AUTO chooses by, as EngineOptions::cost_model has it; "": not measured
  // yet.
  virtual std::string cost_model() const { return {}; }
  virtual const char* isa() const = 0;
  virtual uint32_t n_threads() const = 0;
  virtual const EngineOptions& options() const = 0;  // with defaults filled in

 protected:
  static Status no_slow_tier() {
    return Status::fixed(KVM_ERR_UNSUPPORTED, "this engine has no slow tier");
  }
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_ENGINE_H_
