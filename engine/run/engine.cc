// SPDX-License-Identifier: Apache-2.0
#include "engine/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <new>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <utility>

#include "attention/attention.h"
#include "attention/kernel_table.h"
#include "base/assert.h"
#include "base/clock.h"
#include "base/counted.h"
#include "base/machine.h"
#include "base/undo.h"
#include "codecs/rows.h"
#include "engine/attend/audit.h"
#include "engine/attend/cost_model.h"
#include "engine/run/append_work.h"
#include "engine/run/arrivals.h"
#include "engine/run/engine_disk.h"
#include "engine/run/fair_queue.h"
#include "engine/run/kept_prefixes.h"
#include "engine/run/movement.h"
#include "engine/run/page_moves.h"
#include "engine/run/prefixes.h"
#include "engine/run/request.h"
#include "engine/run/room_line.h"
#include "engine/run/sequence_order.h"
#include "engine/run/snapshots.h"
#include "engine/space/refusal.h"
#include "engine/space/validate.h"
#include "engine/store/store.h"
#include "engine/tasks/scheduler.h"

namespace kvm::engine {
namespace {

// Requests kept for reuse, with their buffers.
constexpr size_t kMaxIdleRequests = 16;
// Rounds of callbacks in one poll(): callbacks may submit requests that finish at once.
constexpr uint32_t kMaxPollRounds = 16;
// So much counts as free where the system does not say.
constexpr uint64_t kUnknownMemory = uint64_t{1} << 30;
// Emptied extents that the store may keep for the next append; given back under pressure.
constexpr uint64_t kMaxCachedBytes = uint64_t{256} << 20;

// A request costs so many bytes besides K and V. A client that is alone may run that many at once:
// others find room when they come.
constexpr uint64_t kRequestCost = uint64_t{16} << 10;
constexpr uint32_t kMaxRunningAlone = Scheduler::kMaxJobs - Scheduler::kMaxJobs / 4;
// So many query rows of an item share a pass over its keys, about.
constexpr uint64_t kRowsPerRead = 16;
// The driver starts requests so long in a row before it looks elsewhere.
constexpr uint64_t kMaxStartNs = 200'000;
// So many go at a time of a sequence that is freed or cut, or of a client that leaves: some 0.2 ms.
constexpr uint64_t kFreePages = 4096;
// So many pages of a prefix are listed, or forgotten, at a time: some 0.1 ms.
constexpr uint64_t kListPages = 256;
// A window is a chunk of positions.
constexpr uint64_t kMaxWindowPages = attention::kMaxChunkTokens / kPageTokens;
// In whose name evict() frees: no client has this id.
constexpr ClientId kService = 0;
// Of a request to free: nothing is done where the sequence is no prefix that has expired by then.
// No client's request has it (ipc/validate.h).
constexpr uint32_t kIfExpired = 1u << 31;
// Of pages that move, beside the lanes of clients.
constexpr uint32_t kMovesLane = Scheduler::kMaxLanes - 1;
// An engine that has answered so lately is busy, though it has no request at the moment.
constexpr uint64_t kBusyNs = 10'000'000;
// LIMIT: bytes moved in a second while the engine is busy, and how long after it was due a batch
// still counts from then, so that those that begin late do not slow the rest.
constexpr double kMoveBytesPerNs = 1.15;
constexpr uint64_t kMoveLateNs = 20'000'000;

uint64_t token_bytes(const Space& space, uint32_t layer) {
  uint64_t bytes = 0;
  if (layer < space.n_layers && space.layers[layer].kind != KVM_LAYER_ABSENT) {
    for (const HeadClass& head_class : space.storage(layer).classes) {
      bytes += head_class.slab_class.tail().page_bytes() / kPageTokens;
    }
  }
  return bytes;
}

Status no_memory() {
  return Status::fixed(KVM_ERR_NO_MEMORY, "the machine refused memory for a request");
}

// Whether an item of a step is right about what its sequence holds; memory apart.
bool may_succeed(const Store& store, Sequence* seq, const StepRequest& step, const kvm_item& item) {
  const uint64_t n_append = step.append ? item.n_append : 0;
  if (n_append != 0 && !store.check_append(append_item_of(seq, step, item)).is_ok()) {
    return false;
  }
  if (item.n_query == 0) {
    return true;
  }
  const uint64_t length = store.length(seq, step.layer_begin) + n_append;
  const bool is_last = item.query_position == KVM_POSITION_END;
  return (!is_last || length >= item.n_query) &&
         store
             .check_visible(
                 seq, step.layer_begin,
                 seen_part(step, item, is_last ? length - item.n_query : item.query_position))
             .is_ok();
}

Status no_disk() { return Status::fixed(KVM_ERR_UNSUPPORTED, kNoDisk); }

class EngineImpl final : public Engine {
 public:
  EngineImpl(const EngineOptions& options, std::unique_ptr<Store> store,
             std::optional<CostModel> cost_model)
      : options_(options),
        store_(std::move(store)),
        begin_ns_(now_ns()),
        workspaces_(options.n_threads),
        costs_(cost_model, options.n_threads, options.slow_tier),
        auditor_(options.audit_every),
        arrivals_(&scheduler_),
        prefixes_(store_.get(), options.prefix_pages,
                  options.prefix_memory ? options.prefix_memory : own_prefix_memory(),
                  options.clock),
        scheduler_(options.n_threads, options.worker_spin_ns) {
    if (options.slow_tier != nullptr) {
      movement_.emplace(options.movement, options.clock, store_.get(), &order_, &arrivals_);
      if (options.slow_tier->objects() != nullptr) {
        snapshots_.emplace(store_.get(), &*movement_, &arrivals_, &scheduler_, kMovesLane);
        kept_prefixes_.emplace(store_.get(), &*snapshots_, &prefixes_, options.clock,
                               options.save_prefixes);
      }
    }
    idle_.reserve(kMaxIdleRequests);
    gone_seqs_.reserve(kFreePages);  // a sequence counts as a page at least
  }
  ~EngineImpl() override { stop_transfers(); }
  // Fails: as Scheduler::start_workers.
  Status start_workers() { return scheduler_.start_workers(options_.pin_threads); }

  ClientId add_client(const ClientSpec& spec) override;
  void remove_client(ClientId client, std::function<void()> on_gone) override;
  QuotaBook& quotas() override { return store_->quotas(); }
  Status evict(kvm_seq_id seq) override;
  Status send_away(kvm_seq_id seq) override;
  Status prefetch(kvm_seq_id seq) override;
  bool is_sending() const override { return movement_ && movement_->is_sending(); }
  bool is_fetching() const override { return movement_ && movement_->is_fetching(); }
  uint64_t n_pages_away() const override { return store_->memory().pages().n_pages_away(); }
  MovementStats movement_stats() const override {
    return movement_ ? movement_->stats() : MovementStats{};
  }

  Result<kvm_space_id> register_space(const SpaceSpec& spec, uint32_t uid) override {
    // AUTO has a choice where there are indexes.
    if (!spec.indexes.empty()) {
      costs_.prepare();
    }
    KVM_TRY_ASSIGN(const kvm_space_id space, store_->register_space(spec, uid));
    Undo dropping([&] {
      const Status dropped = store_->drop_space(space);
      KVM_ASSERT(dropped.is_ok() || dropped.code() == KVM_ERR_BUSY);
    });
    KVM_TRY(make_rings(space));
    has_free_ring_ = true;
    dropping.dismiss();
    if (kept_prefixes_) {
      kept_prefixes_->note_space(uid, spec.name, space);
    }
    return space;
  }
  Result<kvm_space_id> find_space(const std::string& name, uint32_t uid) override {
    return store_->find_space(name, uid);
  }
  Result<kvm_space_info> space_info(kvm_space_id space) override {
    return store_->space_info(space);
  }
  std::vector<kvm_space_info> list_spaces() override { return store_->list_spaces(); }
  Status drop_space(kvm_space_id space) override { return store_->drop_space(space); }

  void submit(ClientId client, RequestTag tag, StepRequest&& request,
              DoneCallback on_done) override {
    submit_any(client, tag, std::move(request), std::move(on_done));
  }
  void submit(ClientId client, RequestTag tag, ReadRequest&& request,
              DoneCallback on_done) override {
    submit_any(client, tag, std::move(request), std::move(on_done));
  }
  void submit(ClientId client, RequestTag tag, ObserveRequest&& request,
              DoneCallback on_done) override {
    submit_any(client, tag, std::move(request), std::move(on_done));
  }
  void submit(ClientId client, RequestTag tag, SeqRequest&& request,
              DoneCallback on_done) override {
    submit_any(client, tag, std::move(request), std::move(on_done));
  }
  void submit(ClientId client, RequestTag tag, SnapshotRequest&& request,
              DoneCallback on_done) override {
    submit_any(client, tag, std::move(request), std::move(on_done));
  }
  bool keeps_snapshots() const override { return snapshots_.has_value(); }
  SnapshotStats snapshot_stats() const override {
    return snapshots_ ? snapshots_->stats() : SnapshotStats();
  }
  std::vector<SnapshotInfo> list_snapshots(uint32_t uid, const SnapshotName& after,
                                           size_t n_max) const override {
    return snapshots_ ? snapshots_->list(uid, after, n_max) : std::vector<SnapshotInfo>();
  }
  Result<std::span<const std::byte>> prefix_table(uint32_t uid) override {
    return prefixes_.table(uid);
  }
  Result<PrefixWeight> weigh_prefix(ClientId client, kvm_seq_id seq, uint64_t n_tokens,
                                    double prefill_rate) override;
  PrefixStats prefix_stats() const override {
    PrefixStats stats = prefixes_.stats();
    if (kept_prefixes_) {
      kept_prefixes_->add_stats(&stats);
    }
    return stats;
  }
  bool cancel(ClientId client, RequestTag tag) override;

  bool work() override;
  uint32_t poll() override;
  uint64_t housekeep() override;
  uint32_t n_in_flight() const override { return static_cast<uint32_t>(requests_.size()); }
  void set_wake(std::function<void()> wake) override {
    auditor_.set_wake(wake);
    scheduler_.set_wake(std::move(wake));
  }
  void wait(uint64_t timeout_ns) override;

  Result<kvm_seq_info> seq_info(ClientId client, kvm_seq_id seq) override;
  SeqPage list_seqs(ClientId client, kvm_space_id space, bool all_clients, kvm_seq_id begin,
                    size_t n_max) override {
    return store_->list_seqs(client, space, all_clients, begin, n_max);
  }
  Result<std::vector<MemoryPiece>> layer_memory(kvm_seq_id seq, uint32_t layer) override;

  kvm_stats stats() const override;
  uint64_t ring_bytes() const { return store_->memory().rings().size_bytes(); }
  void check_accounts() const override {
    store_->check_accounts();
    prefixes_.check_accounts();
    if (snapshots_) {
      snapshots_->check_accounts();
    }
  }
  std::span<const uint64_t> refusals() const override { return refusals_; }
  AuditStats audit_stats() override {
    auditor_.collect(*store_);
    return auditor_.stats();
  }
  std::string cost_model() const override { return costs_.text(); }
  const char* isa() const override { return attention::active_table().name; }
  uint32_t n_threads() const override { return options_.n_threads; }
  const EngineOptions& options() const override { return options_; }

 private:
  struct Client {
    uint32_t n_requests = 0;
    uint32_t lane = 0;
    FairQueue::Flow queue;  // of requests that are ready
    RoomLine::Flow room;    // of those that wait for it
    bool is_leaving = false;
    std::function<void()> on_gone;
  };

  // A request in flight. Throws std::bad_alloc: nothing has changed. On its way to its end a
  // request needs no memory but what its work says it does: the lists that it passes have room.
  Request* take_request(ClientId client, RequestTag tag);
  void forget_service();
  void give_back(Request* request);
  template <typename What>
  void submit_any(ClientId client, RequestTag tag, What&& what, DoneCallback&& on_done);

  // Answers a request that ends where it is submitted.
  void answer_at_once(ClientId client, Status status, uint64_t begin_ns,
                      const DoneCallback& on_done);
  void note_duration(ClientId client, uint64_t ns);

  // Validation at submission: what the request says by itself, and that its sequences exist.
  // *is_null: there is nothing to do.
  Status admit(Request* request, bool* is_null);
  Status admit(Request* request, StepRequest& what, bool* is_null);
  Status admit(Request* request, const ReadRequest& what, bool* is_null);
  Status admit(Request* request, const ObserveRequest& what, bool* is_null);
  Status admit(Request* request, const SeqRequest& what, bool* is_null);
  Status admit(Request* request, const SnapshotRequest& what, bool* is_null);
  Result<Sequence*> find(const Request* request, kvm_seq_id seq, Access access);
  Result<const Space*> touch(Request* request, kvm_seq_id seq);

  // Starting: in turns, by what requests are estimated to read.
  void push_ready(Request* request);
  uint64_t estimate(const Request* request) const;
  uint64_t estimate(const Request* request, const StepRequest& step) const;
  // How many requests of a client may run at a time, so that there is room for the others'.
  uint32_t max_running() const;
  bool has_expired(const StepRequest& request) const {
    return request.deadline_ns != 0 && options_.clock->now_ns() >= request.deadline_ns;
  }
  // Whether a client may have others beside it, whom its tasks must not keep waiting.
  bool is_shared() const { return n_connected() > 1; }
  size_t n_connected() const { return clients_.size() - (has_evictions_ ? 1 : 0); }
  // Whether one more of a client's requests may start now. Those that have begun go first.
  bool may_start(const FairQueue::Flow& queue) const {
    return queue.n_running + queue.n_next < max_running() &&
           scheduler_.has_room(unfinished_.empty() ? 1 : 2);
  }
  bool can_start() const;
  bool start_one();
  void start_ready();
  void start(Request* request);
  void find_index_work(Request* request);
  void find_index_work(Request* request, const StepRequest& step);
  // Goes on with the request's index work: a job, or a wait; else with the request.
  void run_index_work(Request* request);
  void index_more(Request* request);
  void start_work(Request* request);
  void start_job(Request* request, JobPlan plan);
  // Memory for two windows of the space's largest, at least. Fails: as StoreMemory::grow_rings.
  Status make_rings(kvm_space_id space);
  // What a request appends, as far as it may succeed.
  std::vector<AppendItem> appends_of(const Request* request, const StepRequest& step) const;
  // Brings the tails that a request appends to back, where they are away. Returns whether it has to
  // wait for that.
  bool fetch_tails(Request* request);
  // Whether it reads what pages lie at.
  void begin_reading(Request* request);
  void end_reading(Request* request);
  // Whether it counts among those of its client that run.
  void count_running(Request* request);
  void uncount_running(Request* request);
  void enter_fetching(Request* request);
  // Lines a request up for a ring.
  void open_stream(Request* request);
  // Begins the stream of a request with a ring. False: others have the rings.
  bool take_ring(Request* request);
  void give_ring_back(std::byte* ring, uint64_t size_bytes);
  bool has_ring_to_serve() const { return has_free_ring_ && !ring_waiters_.empty(); }
  // Begins the stream of whoever waits first. Returns whether there was one and a ring for it.
  bool serve_ring_waiter();
  // Goes on with a request in Phase::kFetching.
  void fetch_more(Request* request);
  void stream_more(Request* request);
  // Whether a request in Phase::kFetching may run; it counts as running then. Else it stands in
  // line until it may, and before those of its client that have not begun.
  bool take_turn(Request* request);
  void set_next(Request* request, bool is_next);
  // Leaves the line it stands in, where it does.
  void leave_line(Request* request);
  // Ends a request in Phase::kFetching whose answer nobody wants. REQUIRES: it has no stream.
  void drop_unwanted(Request* request);
  // After its last task. Returns what became of its transfers.
  Status close_stream(Request* request);
  // Looks at one of those for which something has come. Returns whether there was one.
  bool take_arrival();
  void stop_transfers();
  // --- Room: appends that find none wait while pages are sent away ------------------------------

  // Lines a request up that finds no room for what it appends. False: there will be none.
  bool wait_for_room(Request* request);
  // Whether it is to line up with those that wait, untried.
  bool must_line_up(const Request* request) const;
  // Whether it appends, and may wait until there is room.
  bool may_wait_for_room(const Request* request) const;
  // Whether there may be room in time that is not there now.
  bool may_room_come() const;
  // What it appends takes so many bytes of pages.
  uint64_t room_needed(const Request* request) const;
  // Looks at one client of those that wait: the first of its requests tries again, where what it
  // needs is free for it. Returns whether there was one to look at.
  bool serve_room_waiter();
  // Ends those whose deadlines have passed.
  void expire_room_waiters();
  // Frees a sequence in the name of the service. flags: 0, kIfExpired.
  Status free_as_service(kvm_seq_id seq, uint32_t flags);
  // Frees a prefix that nobody has forked for as long as it was to be kept.
  void expire_prefix();
  // The same with what the tier says, where it refuses pages.
  Status say_why_none_goes(Status no_space) const;
  // It waits for room no more.
  void leave_room_line(Request* request);
  // Memory may be free that was not, or pages may go that could not.
  void note_memory();
  void note_use(const Request* request);
  // How long the driver may sleep for what waits for a time to come.
  uint64_t patience_ns() const;
  // Goes on as begin() said: fails, goes on planning, or runs.
  void launch(Request* request, Status status, const JobPlan& plan, bool is_small);
  // Does the next bit of a request that has some left for the driver itself; false: there is none.
  bool go_on_with_one();
  void plan_more(Request* request);
  // *plan: tasks that remain. Fails: nothing has changed.
  Status begin(Request* request, JobPlan* plan, bool* is_small);
  Status begin_seq(Request* request, const SeqRequest& what);
  Status set_priority(Sequence* seq, const PriorityRange& range);
  Status begin_snapshot(Request* request, const SnapshotRequest& what);
  // It goes on beside the requests behind it.
  void store_beside(Request* request);
  // A step of a snapshot, or towards one. Returns whether there was one to take.
  bool snapshot_more();
  // A part, and the next ones, of a sequence that is too large to be freed or cut at once.
  Result<bool> run_part(Sequence* seq, ClientId client, const SeqRequest& what);
  // Where it is to be found: before it is published.
  Status begin_prefix(const Sequence& seq, ClientId client, const SeqRequest& what);
  // Memory of this process for tables of prefixes.
  PrefixMemory own_prefix_memory();
  void run_next_part(Request* request);
  void run_here(Request* request, const JobPlan& plan);
  void retire(const FinishedJob& job);
  void retire_computed(Request* request);
  bool plan_next(Request* request);
  // Ends a request that has succeeded: policies act on what it committed, and then it is finished.
  void find_retention_work(Request* request);
  void run_retention(Request* request);
  void abandon(Request* request);
  void fail(Request* request, Status status);
  // A step towards sending away what send_away() named. Returns whether there was one to make.
  bool send_more();
  void finish(Request* request, Status status);
  // Who waits behind it for its sequences waits no more.
  void leave_order(Request* request);
  uint32_t deliver();
  bool reclaim_some();
  // Begins to move some pages together, where that is worth it and not too often. Returns as
  // housekeep().
  uint64_t move_pages();
  tiers::ReadEpochs& epochs() { return store_->memory().pages().epochs(); }

  EngineOptions options_;
  std::unique_ptr<Store> store_;
  uint64_t begin_ns_;
  std::unordered_map<ClientId, Client> clients_;
  bool has_evictions_ = false;  // kService is among them
  std::vector<ClientId> leaving_;
  SequenceOrder order_;
  RequestNames names_;
  std::vector<std::unique_ptr<Request>> requests_;  // in flight
  std::vector<std::unique_ptr<Request>> idle_;
  FairQueue fair_queue_;
  uint64_t start_ns_ = 0;                    // spent on starting since the last poll()
  uint64_t free_lanes_ = ~uint64_t{0} >> 1;  // but kMovesLane
  RequestLine ring_waiters_;                 // in Phase::kFetching: others have the rings
  bool has_free_ring_ = false;               // there may be one for the first of them
  RequestLine tail_waiters_;                 // likewise: others fetch their tails
  RequestLine turn_waiters_;   // likewise: their pages are there, and others of their client run
  RoomLine room_line_;         // likewise: there is no room for what they append
  RequestLine index_waiters_;  // begun; other requests build what they share of an index
  RequestLine unfinished_;     // begun, and not indexed, planned or freed to the end; or ending
  uint32_t next_work_ = 0;
  RequestLine done_;
  std::vector<kvm_seq_id> gone_seqs_;  // by reclaim_some
  std::vector<Request*> dropped_;      // by remove_client
  std::vector<SequenceOrder::Ticket*> unblocked_;
  kvm_stats totals_{};  // the counters that the store does not keep
  std::array<uint64_t, kRefusals> refusals_{};
  std::vector<ThreadWorkspace> workspaces_;
  PageMoves moves_;
  uint64_t moves_due_ns_ = 0;  // the next batch
  uint64_t finished_ns_ = 0;   // when a request was last
  Costs costs_;
  Auditor auditor_;
  Arrivals arrivals_;
  std::optional<Movement> movement_;                          // where there is a slow tier
  std::optional<Snapshots> snapshots_;                        // where it keeps objects
  std::vector<std::unique_ptr<PrefixSlot[]>> prefix_tables_;  // that are this process's own
  Prefixes prefixes_;
  std::optional<KeptPrefixes> kept_prefixes_;  // where there are snapshots
  Scheduler scheduler_;                        // last: its workers end before anything they use
};

// --- Clients ------------------------------------------------------------------------------------

ClientId EngineImpl::add_client(const ClientSpec& spec) {
  // Who leaves, or has requests, finds room in these lists.
  leaving_.reserve(clients_.size() + 1);
  fair_queue_.reserve(clients_.size() + 1);
  const ClientId client = store_->add_client(spec);
  Undo removing([&] { store_->remove_client(client); });
  Client& added = clients_[client];
  removing.dismiss();
  // Beyond so many clients some share the last lane.
  added.lane =
      free_lanes_ == 0 ? kMovesLane - 1 : static_cast<uint32_t>(std::countr_zero(free_lanes_));
  free_lanes_ &= ~(uint64_t{1} << added.lane);
  scheduler_.set_yielding(is_shared());
  return client;
}

void EngineImpl::remove_client(ClientId client, std::function<void()> on_gone) {
  const auto found = clients_.find(client);
  if (found == clients_.end() || found->second.is_leaving) {
    return;
  }
  found->second.is_leaving = true;
  found->second.on_gone = std::move(on_gone);
  leaving_.push_back(client);
  auditor_.cancel(*store_, client);
  dropped_.clear();
  for (const auto& request : requests_) {
    if (request->client == client) {
      request->is_orphan = true;
      request->is_abandoned.store(true, std::memory_order_relaxed);
      if (request->is_pending()) {
        dropped_.push_back(request.get());
      } else if (request->phase == Phase::kFetching) {
        arrivals_.post(request.get());
      } else if (request->phase == Phase::kStoring) {
        arrivals_.post();
      } else if (request->stream.has_begun()) {
        request->stream.stop(client_is_gone());  // nobody wants what has not been read yet
      }
    }
  }
  fair_queue_.clear(&found->second.queue);
  for (Request* request : dropped_) {
    finish(request, client_is_gone());
  }
}

Status EngineImpl::evict(kvm_seq_id seq) { return free_as_service(seq, 0); }

Status EngineImpl::free_as_service(kvm_seq_id seq, uint32_t flags) {
  KVM_TRY(store_->find_any_seq(seq).status());
  fair_queue_.reserve(clients_.size() + 1);
  clients_.try_emplace(kService).first->second.lane = kMovesLane - 1;
  has_evictions_ = true;
  submit(kService, RequestTag{}, SeqRequest{.verb = SeqVerb::kFree, .flags = flags, .seq = seq},
         [](RequestResult&&) {});
  forget_service();
  return Status::ok();
}

// Frees some of what a client holds that leaves and has no request in flight any more, nor an
// audit; in the end, the client. Returns whether there is more to do now.
bool EngineImpl::reclaim_some() {
  for (size_t i = 0; i < leaving_.size(); ++i) {
    const ClientId client = leaving_[i];
    // An eviction may be freeing one of its sequences.
    if (clients_[client].n_requests != 0 || auditor_.holds(client) || has_evictions_) {
      continue;
    }
    gone_seqs_.clear();
    const bool has_more = store_->free_some(client, kFreePages, &gone_seqs_);
    for (const kvm_seq_id seq : gone_seqs_) {
      order_.forget(seq);
    }
    note_memory();
    if (has_more) {
      return true;
    }
    leaving_.erase(leaving_.begin() + static_cast<ptrdiff_t>(i));
    store_->remove_client(client);
    Client& gone = clients_.at(client);
    const std::function<void()> on_gone = std::move(gone.on_gone);
    const uint32_t lane = gone.lane;
    clients_.erase(client);
    if (std::none_of(clients_.begin(), clients_.end(),
                     [lane](const auto& other) { return other.second.lane == lane; })) {
      free_lanes_ |= uint64_t{1} << lane;
    }
    scheduler_.set_yielding(is_shared());
    if (on_gone) {
      on_gone();
    }
    return true;
  }
  return false;
}

// Where it has no requests any more.
void EngineImpl::forget_service() {
  const auto found = clients_.find(kService);
  if (found != clients_.end() && found->second.n_requests == 0) {
    fair_queue_.clear(&found->second.queue);
    clients_.erase(found);
    has_evictions_ = false;
  }
}

// --- Submission ---------------------------------------------------------------------------------

Request* EngineImpl::take_request(ClientId client, RequestTag tag) {
  if (idle_.empty()) {
    idle_.push_back(std::make_unique<Request>(&workspaces_, &arrivals_));
  }
  requests_.reserve(requests_.size() + 1 > requests_.capacity() ? 2 * requests_.size() + 1 : 0);
  dropped_.reserve(requests_.capacity());
  unblocked_.reserve(requests_.capacity());
  arrivals_.reserve(requests_.capacity());
  requests_.push_back(std::move(idle_.back()));
  idle_.pop_back();
  Request* request = requests_.back().get();
  request->index = static_cast<uint32_t>(requests_.size() - 1);
  request->client = client;
  request->tag = tag;
  request->phase = Phase::kWaiting;
  request->is_orphan = false;
  request->is_cancelled = false;
  request->is_running = false;
  request->room_number = 0;
  request->has_waited_in_vain = false;
  request->room_tried_bytes = 0;
  request->tail_bytes = 0;
  request->is_abandoned.store(false, std::memory_order_relaxed);
  request->submitted_ns = now_ns();
  request->result = RequestResult{};
  request->seqs.clear();
  request->ticket.owner = request;
  names_.enter(request);
  return request;
}

void EngineImpl::give_back(Request* request) {
  RequestNames::leave(request);
  arrivals_.forget(request);
  const auto client = clients_.find(request->client);
  if (client != clients_.end()) {
    KVM_ASSERT(client->second.n_requests != 0);
    --client->second.n_requests;
    if (request->client == kService) {
      forget_service();
    }
  }
  const uint32_t index = request->index;
  KVM_ASSERT(index < requests_.size() && requests_[index].get() == request &&
             !request->LineHook::is_linked());
  std::unique_ptr<Request> owned = std::move(requests_[index]);
  if (index + 1 != requests_.size()) {
    requests_[index] = std::move(requests_.back());
    requests_[index]->index = index;
  }
  requests_.pop_back();
  owned->on_done = nullptr;
  owned->step.rest();
  if (idle_.size() < kMaxIdleRequests) {
    idle_.push_back(std::move(owned));
  }
}

template <typename What>
void EngineImpl::submit_any(ClientId client, RequestTag tag, What&& what, DoneCallback&& on_done) {
  const uint64_t begin_ns = now_ns();
  const auto found = clients_.find(client);
  Request* request = nullptr;
  bool is_null = false;
  Status status;
  try {
    if (found == clients_.end() || found->second.is_leaving) {
      status = {KVM_ERR_PERMISSION, fmt::format("client {:#x} is unknown", client)};
    } else {
      request = take_request(client, tag);
      ++found->second.n_requests;
      if (QuotaAccount* account = quotas().find(client); account != nullptr) {
        account->note_request();
      }
      request->what = std::move(what);
      status = admit(request, &is_null);
    }
    if (status.is_ok() && !is_null) {
      order_.enter(&request->ticket, request->seqs);
    }
  } catch (const std::bad_alloc&) {
    status = no_memory();
  }
  if (!status.is_ok() || is_null) {
    if (request != nullptr) {
      give_back(request);
    }
    answer_at_once(client, std::move(status), begin_ns, on_done);
    return;
  }
  request->on_done = std::move(on_done);
  if (request->ticket.may_run()) {
    push_ready(request);
    start_ready();
  }
}

void EngineImpl::answer_at_once(ClientId client, Status status, uint64_t begin_ns,
                                const DoneCallback& on_done) {
  ++totals_.n_requests;
  totals_.n_requests_failed += status.is_ok() ? 0 : 1;
  if (const uint32_t refusal = status.detail(); refusal != 0 && refusal < kRefusals) {
    ++refusals_[refusal];
  }
  RequestResult result;
  result.status = std::move(status);
  result.service_ns = now_ns() - begin_ns;
  note_duration(client, result.service_ns);
  on_done(std::move(result));
}

void EngineImpl::note_duration(ClientId client, uint64_t ns) {
  if (QuotaAccount* account = quotas().find(client); account != nullptr) {
    account->note_duration(ns);
  }
}

Result<Sequence*> EngineImpl::find(const Request* request, kvm_seq_id id, Access access) {
  return request->client == kService ? store_->find_any_seq(id)
                                     : store_->find_seq(request->client, id, access);
}

// Whether it may be changed is asked when the request begins: who has it may be another then.
Result<const Space*> EngineImpl::touch(Request* request, kvm_seq_id id) {
  KVM_TRY_ASSIGN(Sequence * seq, find(request, id, Access::kUse));
  request->seqs.push_back(id);
  return &store_->seq_space(seq);
}

Status EngineImpl::admit(Request* request, bool* is_null) {
  return std::visit([&](auto& what) { return admit(request, what, is_null); }, request->what);
}

Status EngineImpl::admit(Request* request, StepRequest& what, bool* is_null) {
  KVM_TRY_ASSIGN(const Space* space, store_->space_for(request->client, what.space));
  KVM_TRY(take_defaults(*space, &what));
  StepTensors tensors;
  KVM_TRY_ASSIGN(tensors, check_step(what, *space));
  for (size_t i = 0; i < what.items.size(); ++i) {
    KVM_TRY_ASSIGN(const Space* own, touch(request, what.items[i].seq));
    if (own != space) {
      return {KVM_ERR_INVALID,
              fmt::format("sequence {:#x} of item {} is of space '{}', not of '{}'",
                          what.items[i].seq, i, own->name, space->name)};
    }
  }
  std::vector<kvm_seq_id>& seqs = request->seqs;
  if (seqs.size() > 1) {
    std::sort(seqs.begin(), seqs.end());
    seqs.erase(std::unique(seqs.begin(), seqs.end()), seqs.end());
  }
  *is_null = !tensors.k.is_present() && !tensors.q.is_present();
  request->tensors = tensors;
  return Status::ok();
}

Status EngineImpl::admit(Request* request, const ReadRequest& what, bool* is_null) {
  KVM_TRY_ASSIGN(const Space* space, touch(request, what.seq));
  ReadTensors tensors;
  KVM_TRY_ASSIGN(tensors, check_read(what, *space));
  request->tensors = tensors;
  *is_null = false;
  return Status::ok();
}

Status EngineImpl::admit(Request* request, const ObserveRequest& what, bool* is_null) {
  KVM_TRY_ASSIGN(const Space* space, touch(request, what.seq));
  ObserveTensors tensors;
  KVM_TRY_ASSIGN(tensors, check_observe(what, *space));
  request->tensors = tensors;
  *is_null = what.n_rows == 0 && what.n_columns == 0;
  return Status::ok();
}

Status EngineImpl::admit(Request* request, const SeqRequest& what, bool* is_null) {
  KVM_TRY(check_seq_request(what));
  *is_null = false;
  if (what.verb == SeqVerb::kCreate) {
    return store_->space_for(request->client, what.space).status();
  }
  return touch(request, what.seq).status();
}

Status EngineImpl::admit(Request* request, const SnapshotRequest& what, bool* is_null) {
  *is_null = false;
  if (!snapshots_) {
    return no_disk();
  }
  KVM_TRY(check_snapshot_request(what));
  switch (what.verb) {
    case SnapshotVerb::kSave:
      return touch(request, what.seq).status();
    case SnapshotVerb::kLoad:
      return store_->space_for(request->client, what.space).status();
    case SnapshotVerb::kRemove:
      break;
  }
  return Status::ok();
}

// --- Running ------------------------------------------------------------------------------------

void EngineImpl::push_ready(Request* request) {
  request->enter(Phase::kReady);
  if (request->is_orphan) {
    return;  // remove_client is about to drop it.
  }
  Client& client = clients_.at(request->client);
  // Who is alone has every turn.
  request->cost = is_shared() ? kRequestCost : 0;
  try {
    request->cost += request->cost == 0 ? 0 : estimate(request);
  } catch (const std::bad_alloc&) {
    // Its sequence is gone, and there was no memory to say so: it will read nothing.
  }
  fair_queue_.push(&client.queue, request);
}

uint64_t EngineImpl::estimate(const Request* request) const {
  if (const auto* step = std::get_if<StepRequest>(&request->what)) {
    return estimate(request, *step);
  }
  if (const auto* read = std::get_if<ReadRequest>(&request->what)) {
    const Result<Sequence*> seq = store_->find_seq(request->client, read->seq, Access::kUse);
    return seq.is_ok() ? read->n_tokens * token_bytes(store_->seq_space(seq.value()), read->layer)
                       : 0;
  }
  return 0;
}

// As if every query row read what its sequence holds; lengths are those of now.
uint64_t EngineImpl::estimate(const Request* request, const StepRequest& step) const {
  uint64_t n_tokens = 0;
  const Space* space = nullptr;
  for (const kvm_item& item : step.items) {
    const Result<Sequence*> seq = store_->find_seq(request->client, item.seq, Access::kUse);
    if (!seq.is_ok()) {
      continue;
    }
    space = &store_->seq_space(seq.value());
    n_tokens += step.append ? item.n_append : 0;
    if (step.attend && item.n_query != 0) {
      const uint64_t length = store_->length(seq.value(), step.layer_begin);
      n_tokens += length * std::max<uint64_t>(1, item.n_query / kRowsPerRead);
    }
  }
  return space == nullptr ? 0 : n_tokens * token_bytes(*space, step.layer_begin);
}

uint32_t EngineImpl::max_running() const {
  const auto n = static_cast<uint32_t>(n_connected());
  return n <= 1 ? kMaxRunningAlone : std::max(1u, Scheduler::kMaxJobs / n);
}

bool EngineImpl::can_start() const {
  return fair_queue_.any([this](const FairQueue::Flow& queue) { return may_start(queue); });
}

bool EngineImpl::start_one() {
  Request* request =
      fair_queue_.take([this](const FairQueue::Flow& queue) { return may_start(queue); });
  if (request == nullptr) {
    return false;
  }
  const uint64_t begin_ns = now_ns();
  start(request);
  start_ns_ += now_ns() - begin_ns;
  return true;
}

// LIMIT: the driver's time between two polls; work() goes on.
void EngineImpl::start_ready() {
  while (start_ns_ < kMaxStartNs && start_one()) {
  }
}

void EngineImpl::start(Request* request) {
  KVM_ASSERT(request->ticket.may_run() && !request->LineHook::is_linked());
  request->enter(Phase::kIndexing);
  begin_reading(request);
  count_running(request);
  try {
    find_index_work(request);
  } catch (const std::bad_alloc&) {
    request->indexing.clear();
  }
  run_index_work(request);
}

// Approximate attends want the index of what they attend to. What will fail gets none.
void EngineImpl::find_index_work(Request* request) {
  request->indexing.clear();
  if (const auto* step = std::get_if<StepRequest>(&request->what)) {
    if (step->attend && step->mode > KVM_MODE_EXACT && !has_expired(*step)) {
      find_index_work(request, *step);
    }
  }
}

void EngineImpl::find_index_work(Request* request, const StepRequest& step) {
  for (const kvm_item& item : step.items) {
    const Result<Sequence*> seq = store_->find_seq(request->client, item.seq, access_of(item));
    if (!seq.is_ok() || !may_succeed(*store_, seq.value(), step, item)) {
      request->indexing.clear();
      return;
    }
    const Space& space = store_->seq_space(seq.value());
    if (item.n_query != 0 && space.has_indexes) {
      request->indexing.add(seq.value(), space.layers[step.layer_begin].storage_layer,
                            step.append ? item.n_append : 0);
    }
  }
}

void EngineImpl::run_index_work(Request* request) {
  const auto* step = std::get_if<StepRequest>(&request->what);
  if (step != nullptr && has_expired(*step)) {
    request->indexing.stop();
  }
  try {
    JobPlan plan;
    switch (request->indexing.next(*store_, options_.n_threads, &plan)) {
      case IndexWork::Next::kTasks:
        start_job(request, plan);
        return;
      case IndexWork::Next::kWait:
        index_waiters_.push_back(*request);
        return;
      case IndexWork::Next::kDone:
        break;
    }
  } catch (const std::bad_alloc&) {
    request->indexing.clear();  // the request reads exactly what is not indexed
  }
  start_work(request);
}

void EngineImpl::index_more(Request* request) {
  if (request->is_orphan) {
    abandon(request);
  } else {
    run_index_work(request);
  }
}

void EngineImpl::start_work(Request* request) {
  if (must_line_up(request) && wait_for_room(request)) {
    room_line_.note_news();  // nobody has looked at it yet
    return;
  }
  // Keys and values leave memory before indexes do.
  store_->memory().set_keeps_indexes(may_wait_for_room(request));
  if (fetch_tails(request)) {
    store_->memory().set_keeps_indexes(false);
    return;
  }
  JobPlan plan;
  bool is_small = false;
  Status status;
  try {
    status = begin(request, &plan, &is_small);
    const bool is_full = status.code() == KVM_ERR_QUOTA || status.code() == KVM_ERR_NO_SPACE;
    if (is_full && auditor_.give_up(*store_)) {
      status = begin(request, &plan, &is_small);
    }
  } catch (const std::bad_alloc&) {
    request->step.abandon(*store_);
    status = no_memory();
  }
  store_->memory().set_keeps_indexes(false);
  if (status.code() == KVM_ERR_NO_SPACE) {
    if (wait_for_room(request)) {
      return;
    }
    status = say_why_none_goes(std::move(status));
  }
  if (status.is_ok()) {
    note_use(request);
  }
  launch(request, std::move(status), plan, is_small);
}

void EngineImpl::launch(Request* request, Status status, const JobPlan& plan, bool is_small) {
  if (!status.is_ok()) {
    finish(request, std::move(status));
    return;
  }
  if (std::holds_alternative<SnapshotRequest>(request->what)) {
    store_beside(request);
    return;
  }
  const bool is_planning =
      std::holds_alternative<StepRequest>(request->what) && request->step.is_planning();
  if (is_planning && request->phase != Phase::kPlanning) {
    request->enter(Phase::kPlanning);
  }
  if (is_planning || request->phase == Phase::kInParts) {
    unfinished_.push_back(*request);
    return;
  }
  if (request->source() != nullptr) {
    open_stream(request);
    return;
  }
  request->enter(Phase::kComputing);
  if (plan.n_tasks == 0 || is_small) {
    run_here(request, plan);
  } else {
    start_job(request, plan);
  }
}

void EngineImpl::start_job(Request* request, JobPlan plan) {
  plan.lane = clients_.at(request->client).lane;
  scheduler_.start(request, plan);
}

// --- Pages of the slow tier ---------------------------------------------------------------------

Status EngineImpl::make_rings(kvm_space_id id) {
  if (options_.slow_tier == nullptr) {
    return Status::ok();
  }
  KVM_TRY_ASSIGN(const Space* space, store_->space(id));
  uint64_t window_bytes = 0;
  for (const Layer& layer : space->layers) {
    for (const HeadClass& cls : layer.classes) {
      window_bytes = std::max(window_bytes, kMaxWindowPages * cls.slab_class.tail().page_bytes());
    }
  }
  return store_->memory().grow_rings(2 * window_bytes);
}

std::vector<AppendItem> EngineImpl::appends_of(const Request* request,
                                               const StepRequest& step) const {
  std::vector<AppendItem> appends;
  for (const kvm_item& item : step.items) {
    const Result<Sequence*> seq = store_->find_seq(request->client, item.seq);
    for (uint32_t i = 0; item.n_append != 0 && seq.is_ok() && i < std::max(1u, step.n_layers);
         ++i) {
      const AppendItem append = append_item_of(seq.value(), step, item, i);
      if (store_->check_append(append).is_ok()) {
        appends.push_back(append);
      }
    }
  }
  return appends;
}

bool EngineImpl::fetch_tails(Request* request) {
  const auto* step = std::get_if<StepRequest>(&request->what);
  if (step == nullptr || !step->append || store_->memory().pages().n_pages_away() == 0) {
    return false;
  }
  Status status;
  try {
    const std::vector<AppendItem> items = appends_of(request, *step);
    Result<TailFetch::Next> next = request->tails.begin(&store_->memory(), items, request);
    if (next.status().code() == KVM_ERR_NO_SPACE && auditor_.give_up(*store_)) {
      next = request->tails.begin(&store_->memory(), items, request);
    }
    if (next.is_ok() && next.value() == TailFetch::Next::kDone) {
      return false;
    }
    if (next.status().code() == KVM_ERR_NO_SPACE && wait_for_room(request)) {
      return true;
    }
    request->tail_bytes += request->tails.size_bytes();
    enter_fetching(request);
    if (next.is_ok() && next.value() == TailFetch::Next::kClaimed) {
      tail_waiters_.push_back(*request);
    }
    status = next.status();
  } catch (const std::bad_alloc&) {
    status = no_memory();
  }
  if (!status.is_ok()) {
    finish(request, std::move(status));
  }
  return true;
}

void EngineImpl::count_running(Request* request) {
  KVM_ASSERT(!request->is_running);
  request->is_running = true;
  ++clients_.at(request->client).queue.n_running;
}

// Those of its client that wait for a turn may have one now.
void EngineImpl::uncount_running(Request* request) {
  if (request->is_running) {
    request->is_running = false;
    KVM_ASSERT(clients_.at(request->client).queue.n_running != 0);
    --clients_.at(request->client).queue.n_running;
    unfinished_.splice(unfinished_.end(), turn_waiters_);
  }
}

// What waits for pages takes no turn from what does not.
void EngineImpl::enter_fetching(Request* request) {
  if (request->phase != Phase::kFetching) {
    request->enter(Phase::kFetching);
  }
  uncount_running(request);
}

void EngineImpl::open_stream(Request* request) {
  enter_fetching(request);
  if (!request->is_wanted()) {
    drop_unwanted(request);
    return;
  }
  // In turns: who needs much is not passed by those who need little.
  has_free_ring_ |= ring_waiters_.empty();
  ring_waiters_.push_back(*request);
}

bool EngineImpl::take_ring(Request* request) {
  tiers::RingMemory& rings = store_->memory().rings();
  StreamSource* source = request->source();
  StreamShape shape = source->shape();
  const uint64_t all =
      shape.slot_bytes == 0 ? StreamShape::kMaxSlots : rings.size_bytes() / shape.slot_bytes;
  // Half of the memory, so that others find some; but two windows where there is room at all.
  const uint64_t fitting =
      std::clamp<uint64_t>(all / 2, std::min<uint64_t>(all, 2), StreamShape::kMaxSlots);
  shape.n_slots = static_cast<uint32_t>(std::min<uint64_t>(shape.n_windows, fitting));
  KVM_ASSERT(shape.ring_bytes() <= rings.size_bytes());  // or it would wait for ever
  const bool needs_ring = shape.ring_bytes() != 0;
  std::byte* ring = needs_ring ? rings.take(shape.ring_bytes()) : nullptr;
  if (needs_ring && ring == nullptr) {
    return false;
  }
  Undo giving_back([&] { give_ring_back(ring, shape.ring_bytes()); });
  request->stream.begin(options_.slow_tier, source, request, shape, ring);
  giving_back.dismiss();
  return true;
}

// `ring` may be null: there was none.
void EngineImpl::give_ring_back(std::byte* ring, uint64_t size_bytes) {
  if (ring != nullptr) {
    store_->memory().rings().give_back(ring, size_bytes);
    has_free_ring_ = true;
  }
}

bool EngineImpl::serve_ring_waiter() {
  if (!has_ring_to_serve()) {
    return false;
  }
  Request* request = &ring_waiters_.front();
  Status status;
  try {
    has_free_ring_ = take_ring(request);
  } catch (const std::bad_alloc&) {
    status = no_memory();
  }
  if (!has_free_ring_) {
    return false;
  }
  ring_waiters_.pop_front();
  if (!status.is_ok()) {
    fail(request, std::move(status));
    return true;
  }
  request->stream.start();
  if (request->stream.is_ready() || request->source()->is_part_there()) {
    unfinished_.push_back(*request);
  }
  return true;
}

void EngineImpl::fetch_more(Request* request) {
  if (request->tails.has_begun()) {
    if (!request->tails.is_over()) {
      return;
    }
    Status status = request->tails.end(&store_->memory());
    unfinished_.splice(unfinished_.end(), tail_waiters_);
    if (request->is_wanted() && !status.is_ok()) {
      finish(request, std::move(status));
      return;
    }
  }
  if (request->stream.has_begun()) {
    stream_more(request);
  } else if (!request->is_wanted()) {
    drop_unwanted(request);
  } else if (request->is_parked) {
    return;
  } else if (request->source() == nullptr && take_turn(request)) {
    if (!request->is_reading) {
      begin_reading(request);
    }
    start_work(request);  // from the beginning, once tails have come
  }
}

void EngineImpl::stream_more(Request* request) {
  PageStream& stream = request->stream;
  if (!request->is_wanted()) {
    stream.stop(request->reason_unwanted());
    if (stream.is_over()) {
      const Status status = close_stream(request);
      KVM_ASSERT(!status.is_ok());
      drop_unwanted(request);
    }
    return;
  }
  if (stream.has_failed() && stream.is_over()) {
    leave_line(request);
    fail(request, close_stream(request));
    return;
  }
  if ((stream.is_ready() || request->source()->is_part_there()) && take_turn(request)) {
    JobPlan plan = std::holds_alternative<StepRequest>(request->what) ? request->step.plan()
                                                                      : request->read.plan();
    plan.lane = clients_.at(request->client).lane;
    request->enter(Phase::kComputing);
    stream.start_job(&scheduler_, request, plan);
  }
}

bool EngineImpl::take_turn(Request* request) {
  if (clients_.at(request->client).queue.n_running >= max_running() || !scheduler_.has_room()) {
    set_next(request, true);
    if (!request->LineHook::is_linked()) {
      (scheduler_.has_room() ? turn_waiters_ : unfinished_).push_back(*request);
    }
    return false;
  }
  set_next(request, false);
  leave_line(request);
  count_running(request);
  return true;
}

void EngineImpl::set_next(Request* request, bool is_next) {
  if (request->is_next != is_next) {
    uint32_t& n_next = clients_.at(request->client).queue.n_next;
    KVM_ASSERT(is_next || n_next != 0);
    n_next += is_next ? 1 : -1;
    request->is_next = is_next;
  }
}

void EngineImpl::leave_line(Request* request) {
  if (request->LineHook::is_linked()) {
    request->LineHook::unlink();
  }
}

void EngineImpl::drop_unwanted(Request* request) {
  if (request->is_parked) {
    leave_room_line(request);
  }
  leave_line(request);
  has_free_ring_ = true;  // if it stood before others who need less
  fail(request, request->reason_unwanted());
}

Status EngineImpl::close_stream(Request* request) {
  if (!request->stream.has_begun()) {
    return Status::ok();
  }
  Status status = request->stream.end();
  give_ring_back(request->stream.ring(), request->stream.shape().ring_bytes());
  return status;
}

bool EngineImpl::take_arrival() {
  if (!arrivals_.has_any()) {
    return false;
  }
  Request* request = arrivals_.take();
  if (request == nullptr) {
    const bool has_sent = send_more();
    return snapshot_more() || has_sent;
  }
  if (request->phase == Phase::kFetching) {
    fetch_more(request);
  }
  return true;
}

Status EngineImpl::send_away(kvm_seq_id id) {
  if (!movement_) {
    return no_disk();
  }
  KVM_TRY(store_->find_any_seq(id).status());
  movement_->send(id);
  return Status::ok();
}

Status EngineImpl::prefetch(kvm_seq_id id) {
  if (!movement_) {
    return no_disk();
  }
  KVM_TRY_ASSIGN(Sequence * seq, store_->find_any_seq(id));
  movement_->fetch(seq);
  return Status::ok();
}

Status EngineImpl::set_priority(Sequence* seq, const PriorityRange& range) {
  return movement_ ? movement_->set_priority(seq, range) : no_disk();
}

bool EngineImpl::send_more() {
  if (!movement_) {
    return false;
  }
  const bool has_done = movement_->go_on();
  if (has_done && snapshots_) {
    snapshots_->note_change();
  }
  if (movement_->take_freed()) {
    room_line_.note_news();
  }
  return has_done;
}

// Tasks of requests that have begun may still run; what they read stays until the scheduler is
// gone.
void EngineImpl::stop_transfers() {
  if (movement_) {
    movement_->stop();
  }
  if (snapshots_) {
    snapshots_->stop();
  }
  for (const auto& request : requests_) {
    while (!request->tails.is_over()) {
      std::this_thread::yield();
    }
    PageStream& stream = request->stream;
    if (!stream.has_begun()) {
      continue;
    }
    stream.stop(client_is_gone());
    while (!stream.is_over()) {
      std::this_thread::yield();
    }
    give_ring_back(stream.ring(), stream.shape().ring_bytes());
  }
}

// --- Room ---------------------------------------------------------------------------------------

void EngineImpl::begin_reading(Request* request) {
  request->read_epoch = epochs().begin();
  request->is_reading = true;
}

void EngineImpl::end_reading(Request* request) {
  if (request->is_reading) {
    request->is_reading = false;
    epochs().end(request->read_epoch);
  }
}

void EngineImpl::note_memory() {
  if (movement_) {
    movement_->note_change();
    room_line_.note_news();
  }
  if (snapshots_) {
    snapshots_->note_change();
  }
}

void EngineImpl::note_use(const Request* request) {
  if (!movement_) {
    return;
  }
  if (const auto* step = std::get_if<StepRequest>(&request->what)) {
    for (size_t i = 0; i < step->items.size(); ++i) {
      movement_->touch(request->step.seqs()[i], step->layer_begin, step->n_layers,
                       step->append ? step->items[i].n_append : 0);
    }
    return;
  }
  if (const auto* read = std::get_if<ReadRequest>(&request->what)) {
    const Result<Sequence*> seq = store_->find_any_seq(read->seq);
    KVM_ASSERT(seq.is_ok());
    movement_->touch(seq.value(), read->layer, 1, 0);
  } else if (const auto* what = std::get_if<SeqRequest>(&request->what);
             what != nullptr && what->verb == SeqVerb::kFork) {
    const Result<Sequence*> parent = store_->find_any_seq(what->seq);
    const Result<Sequence*> child = store_->find_any_seq(request->result.seq);
    KVM_ASSERT(parent.is_ok() && child.is_ok());
    movement_->note_fork(*parent.value(), child.value());
  }
}

bool EngineImpl::may_wait_for_room(const Request* request) const {
  const auto* step = std::get_if<StepRequest>(&request->what);
  return step != nullptr && step->append && may_room_come();
}

bool EngineImpl::may_room_come() const {
  return movement_ && movement_->is_automatic() &&
         (!movement_->has_given_up() || moves_.has_begun());
}

uint64_t EngineImpl::room_needed(const Request* request) const {
  return store_->bytes_to_reserve(appends_of(request, std::get<StepRequest>(request->what)));
}

// What needs no page passes those that do.
bool EngineImpl::must_line_up(const Request* request) const {
  if (room_line_.is_empty() || request->room_number != 0 || !may_wait_for_room(request)) {
    return false;
  }
  try {
    return room_needed(request) != 0;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

bool EngineImpl::wait_for_room(Request* request) {
  if (request->has_waited_in_vain || !may_wait_for_room(request)) {
    return false;
  }
  uint64_t needed = 0;
  try {
    needed = room_needed(request);
  } catch (const std::bad_alloc&) {
    return false;
  }
  // What is larger than all of the memory would wait in vain.
  if (needed > options_.host_capacity_bytes - store_->memory().rings().size_bytes()) {
    return false;
  }
  enter_fetching(request);
  end_reading(request);
  if (room_line_.enter(&clients_.at(request->client).room, request, needed)) {
    movement_->count_waiting_append();
  }
  movement_->set_has_waiters(true);
  if (!request->is_wanted()) {
    arrivals_.post(request);
  }
  return true;
}

Status EngineImpl::say_why_none_goes(Status no_space) const {
  if (!movement_ || !movement_->has_given_up() || movement_->last_refusal().is_ok()) {
    return no_space;
  }
  try {
    return {no_space.code(), fmt::format("{}; the disk took no more: {}", no_space.message(),
                                         movement_->last_refusal().message())};
  } catch (const std::bad_alloc&) {
    return no_space;
  }
}

void EngineImpl::leave_room_line(Request* request) {
  room_line_.leave(&clients_.at(request->client).room, request);
  room_line_.note_news();  // for whoever is behind it
  movement_->set_has_waiters(!room_line_.is_empty());
}

bool EngineImpl::serve_room_waiter() {
  if (!room_line_.has_to_serve()) {
    return false;
  }
  // To try is more work than to count. Indexes stay as long as it may wait.
  const StoreMemory& memory = store_->memory();
  const bool is_in_vain = !may_room_come();
  Request* request =
      room_line_.take_turn(memory.capacity_bytes() - memory.needed_bytes(), is_in_vain);
  if (request == nullptr) {
    return true;
  }
  request->has_waited_in_vain = is_in_vain;
  room_line_.begin_serving(&clients_.at(request->client).room, request);
  // Before it reads anything: what it reads is not given up.
  store_->memory().pages().free_left_frames();
  fetch_more(request);
  room_line_.end_serving(request);
  if (!request->is_parked) {
    room_line_.note_news();  // for whoever is behind it
  }
  movement_->set_has_waiters(!room_line_.is_empty());
  return true;
}

void EngineImpl::expire_room_waiters() {
  if (room_line_.deadline_ns() == UINT64_MAX) {
    return;
  }
  const uint64_t now = options_.clock->now_ns();
  while (Request* request = room_line_.find_expired(now)) {
    leave_room_line(request);
    fail(request, Status::fixed(KVM_ERR_DEADLINE,
                                "the deadline has passed while the append waited for memory"));
  }
}

void EngineImpl::expire_prefix() {
  const kvm_seq_id expired = prefixes_.take_expired();
  if (expired != 0) {
    try {
      (void)free_as_service(expired, kIfExpired);
    } catch (const std::bad_alloc&) {
      // It comes again.
    }
  }
}

uint64_t EngineImpl::patience_ns() const {
  return std::min({movement_ ? movement_->patience_ns() : UINT64_MAX, prefixes_.patience_ns(),
                   kept_prefixes_ ? kept_prefixes_->patience_ns() : UINT64_MAX,
                   options_.clock->patience_ns(room_line_.deadline_ns())});
}

bool EngineImpl::go_on_with_one() {
  if (unfinished_.empty() || !scheduler_.has_room()) {
    return false;
  }
  Request* request = &unfinished_.front();
  unfinished_.pop_front();
  switch (request->phase) {
    case Phase::kIndexing:
      index_more(request);
      break;
    case Phase::kFetching:
      fetch_more(request);
      break;
    case Phase::kPlanning:
      plan_more(request);
      break;
    case Phase::kInParts:
      run_next_part(request);
      break;
    case Phase::kRetaining:
      run_retention(request);
      break;
    default:
      KVM_ASSERT(!"a request of this phase has nothing left for the driver");
  }
  return true;
}

void EngineImpl::plan_more(Request* request) {
  if (request->is_orphan) {
    abandon(request);
    return;
  }
  Status status;
  try {
    status = request->step.plan_more(*store_, workspaces_[0]);
  } catch (const std::bad_alloc&) {
    request->step.abandon(*store_);
    status = no_memory();
  }
  launch(request, std::move(status), request->step.plan(), request->step.is_small());
}

// Starting, planning and reclaiming are for the driver alone: in turn with tasks, so that none
// waits for all of the others.
bool EngineImpl::work() {
  next_work_ = (next_work_ + 1) % 5;
  const bool has_done = take_arrival() || (next_work_ == 1 && go_on_with_one()) ||
                        (next_work_ == 2 && start_one()) || (next_work_ == 3 && reclaim_some()) ||
                        (next_work_ == 4 && (serve_ring_waiter() || serve_room_waiter() ||
                                             send_more() || snapshot_more()));
  return has_done || scheduler_.run_one() || serve_ring_waiter() || go_on_with_one() ||
         start_one() || reclaim_some() || serve_room_waiter() || send_more() || snapshot_more();
}

Status EngineImpl::begin(Request* request, JobPlan* plan, bool* is_small) {
  if (const auto* step = std::get_if<StepRequest>(&request->what)) {
    if (has_expired(*step)) {
      return {KVM_ERR_DEADLINE, fmt::format("the deadline, {} ns, has passed before the request "
                                            "began",
                                            step->deadline_ns)};
    }
    const TaskCrew crew{.n_threads = options_.n_threads, .is_shared = is_shared()};
    KVM_TRY(request->step.begin(*store_, request->client, *step,
                                std::get<StepTensors>(request->tensors), costs_, crew,
                                workspaces_[0]));
    *plan = request->step.plan();
    *is_small = request->step.is_small();
    return Status::ok();
  }
  if (const auto* seq = std::get_if<SeqRequest>(&request->what)) {
    return begin_seq(request, *seq);
  }
  if (const auto* snapshot = std::get_if<SnapshotRequest>(&request->what)) {
    return begin_snapshot(request, *snapshot);
  }
  if (const auto* read = std::get_if<ReadRequest>(&request->what)) {
    KVM_TRY_ASSIGN(Sequence * seq, store_->find_seq(request->client, read->seq, Access::kUse));
    KVM_TRY(request->read.begin(*store_, seq, *read, std::get<ReadTensors>(request->tensors),
                                options_.n_threads));
    *plan = request->read.plan();
    *is_small = request->read.is_small();
    return Status::ok();
  }
  const auto& what = std::get<ObserveRequest>(request->what);
  KVM_TRY_ASSIGN(Sequence * seq, store_->find_seq(request->client, what.seq));
  return observe(*store_, seq, what, std::get<ObserveTensors>(request->tensors));
}

Status EngineImpl::begin_seq(Request* request, const SeqRequest& what) {
  if (what.verb == SeqVerb::kCreate) {
    KVM_TRY_ASSIGN(request->result.seq,
                   store_->create_seq(request->client, what.space, what.flags, what.n_tokens));
    return Status::ok();
  }
  KVM_TRY_ASSIGN(Sequence * seq, find(request, what.seq, access_of(what.verb)));
  switch (what.verb) {
    case SeqVerb::kFork: {
      KVM_TRY_ASSIGN(request->result.seq, store_->fork_seq(seq, what.n_tokens, request->client));
      prefixes_.note_fork(seq->id);
      if (kept_prefixes_) {
        kept_prefixes_->note_fork(seq->id);
      }
      return Status::ok();
    }
    case SeqVerb::kCommit:
      return store_->commit_seq(seq, what.n_tokens);
    case SeqVerb::kPrefetch:
      return prefetch(seq->id);
    case SeqVerb::kSetPriority:
      return set_priority(seq, what.range);
    default: {
      if (!what.hashes.empty()) {
        KVM_TRY(begin_prefix(*seq, request->client, what));
      }
      if (what.verb == SeqVerb::kTake && prefixes_.has(seq->id)) {
        // Whoever has found it would fork what its owner makes of it.
        return Status::fixed(KVM_ERR_UNSUPPORTED, "the sequence is a prefix: fork it");
      }
      if (what.flags == kIfExpired) {
        if (!prefixes_.is_expired(seq->id)) {
          return Status::ok();
        }
        prefixes_.note_freed();
      }
      KVM_TRY_ASSIGN(const bool is_done, run_part(seq, request->client, what));
      if (!is_done) {
        request->enter(Phase::kInParts);
      }
      return Status::ok();
    }
  }
}

Status EngineImpl::begin_snapshot(Request* request, const SnapshotRequest& what) {
  const Sequence* seq = nullptr;
  if (what.verb == SnapshotVerb::kSave) {
    KVM_TRY_ASSIGN(seq, store_->find_seq(request->client, what.seq, Access::kUse));
    KVM_TRY(Store::check_complete(seq, KVM_POSITION_END));
  }
  return snapshots_->begin(request, seq, quotas().uid(request->client));
}

void EngineImpl::store_beside(Request* request) {
  request->enter(Phase::kStoring);
  uncount_running(request);
  end_reading(request);
  leave_order(request);
}

bool EngineImpl::snapshot_more() {
  if (!snapshots_) {
    return false;
  }
  const bool has_done = snapshots_->go_on() || kept_prefixes_->go_on();
  Snapshots::Ended ended;
  while (snapshots_->take_ended(&ended)) {
    if (ended.request == nullptr) {
      kept_prefixes_->end(std::move(ended));
      continue;
    }
    ended.request->result.seq = ended.seq;
    finish(ended.request, std::move(ended.status));
  }
  while (const kvm_seq_id unwanted = kept_prefixes_->take_unwanted()) {
    try {
      (void)free_as_service(unwanted, 0);
    } catch (const std::bad_alloc&) {
      // It stays as a published sequence.
    }
  }
  return has_done;
}

// Does a part of what goes through pages, of which there may be millions. Returns whether it was
// the last.
Result<bool> EngineImpl::run_part(Sequence* seq, ClientId client, const SeqRequest& what) {
  switch (what.verb) {
    case SeqVerb::kTruncate:
      return store_->truncate_part(seq, what.n_tokens, kFreePages);
    case SeqVerb::kDrop:
      return store_->drop_part(seq, what.range.begin, what.range.end, kFreePages);
    case SeqVerb::kPublish: {
      Undo forgetting([&] { prefixes_.forget_part(seq->id, kListPages); });  // none is listed yet
      KVM_TRY_ASSIGN(const bool is_published, store_->publish_part(seq, kFreePages));
      forgetting.dismiss();
      return is_published && (!prefixes_.has(seq->id) || prefixes_.list_part(*seq, kListPages));
    }
    case SeqVerb::kTake: {
      KVM_TRY_ASSIGN(const bool is_taken, store_->take_part(seq, client, kFreePages));
      return is_taken;
    }
    default:
      return prefixes_.forget_part(seq->id, kListPages) && store_->free_part(seq, kFreePages);
  }
}

Status EngineImpl::begin_prefix(const Sequence& seq, ClientId client, const SeqRequest& what) {
  const uint32_t uid = quotas().uid(client);
  std::vector<kvm_prefix_hash> hashes(what.hashes.size());
  std::transform(what.hashes.begin(), what.hashes.end(), hashes.begin(),
                 [&](const kvm_prefix_hash& hash) { return hash_in_space(hash, seq.record->id); });
  KVM_TRY(prefixes_.check(seq, uid, hashes));
  // All of it, though fewer tokens are found: what is saved of it is the whole.
  KVM_TRY(Store::check_complete(&seq, KVM_POSITION_END));
  prefixes_.begin(seq.id, uid, std::move(hashes), what.n_tokens);
  return Status::ok();
}

PrefixMemory EngineImpl::own_prefix_memory() {
  return [this](uint32_t, uint64_t size_bytes) -> Result<std::span<std::byte>> {
    // Slots, for their alignment; the header takes one.
    const uint64_t n_slots = size_bytes / sizeof(PrefixSlot);
    prefix_tables_.push_back(std::make_unique<PrefixSlot[]>(n_slots));
    return std::as_writable_bytes(std::span(prefix_tables_.back().get(), n_slots));
  };
}

void EngineImpl::run_next_part(Request* request) {
  const auto& what = std::get<SeqRequest>(request->what);
  const Result<Sequence*> seq = find(request, what.seq, Access::kUse);
  KVM_ASSERT(seq.is_ok());
  Status status;
  bool is_done = true;
  try {
    const Result<bool> part = run_part(seq.value(), request->client, what);
    status = part.status();
    is_done = !part.is_ok() || part.value();
  } catch (const std::bad_alloc&) {
    status = no_memory();
  }
  note_memory();
  if (is_done) {
    finish(request, std::move(status));
  } else {
    unfinished_.push_back(*request);
  }
}

// Runs all tasks of a small request on the driver: tasks in order keep the stages apart.
void EngineImpl::run_here(Request* request, const JobPlan& plan) {
  FinishedJob job;
  job.set = request;
  job.begin_ns = now_ns();
  for (uint32_t task = 0; task < plan.n_tasks; ++task) {
    request->run(task, 0);
  }
  job.end_ns = now_ns();
  scheduler_.add_busy_ns(job.end_ns - job.begin_ns);
  scheduler_.charge(clients_.at(request->client).lane, plan.cost);
  retire(job);
}

void EngineImpl::retire(const FinishedJob& job) {
  if (job.set == &moves_) {
    moves_.end(&store_->memory());
    note_memory();
    return;
  }
  if (snapshots_ && snapshots_->end_job(job.set)) {
    return;
  }
  auto* request = static_cast<Request*>(job.set);
  request->result.compute_ns += job.end_ns - job.begin_ns;
  switch (request->phase) {
    case Phase::kIndexing:
      // What it built may be what they wait for. LIMIT: each looks once for each such job.
      unfinished_.splice(unfinished_.end(), index_waiters_);
      index_more(request);
      break;
    case Phase::kComputing:
      if (Status status = close_stream(request); request->is_orphan) {
        abandon(request);
      } else if (!status.is_ok()) {
        fail(request, std::move(status));
      } else {
        retire_computed(request);
      }
      break;
    case Phase::kRetaining:
      run_retention(request);
      break;
    default:
      KVM_ASSERT(!"a request of this phase has no job");
  }
}

void EngineImpl::retire_computed(Request* request) {
  Status status;
  if (std::holds_alternative<StepRequest>(request->what)) {
    if (plan_next(request)) {
      if (request->source() != nullptr) {
        open_stream(request);
      } else {
        start_job(request, request->step.plan());
      }
      return;
    }
    status = request->step.end(*store_, request->read_epoch, &auditor_, &request->result);
  }
  if (!status.is_ok()) {
    finish(request, std::move(status));
    return;
  }
  if (request->result.mode != 0) {
    totals_.n_rows_attended += request->step.n_rows();
    totals_.keys_present += request->result.keys_present;
    totals_.keys_read += request->result.keys_read;
    totals_.bytes_read += request->result.bytes_read;
  }
  request->enter(Phase::kRetaining);
  try {
    find_retention_work(request);
  } catch (const std::bad_alloc&) {
    request->retention.clear();
  }
  run_retention(request);
}

bool EngineImpl::plan_next(Request* request) {
  try {
    return request->step.plan_next(*store_, costs_);
  } catch (const std::bad_alloc&) {
    request->step.fail();
    return false;
  }
}

void EngineImpl::find_retention_work(Request* request) {
  if (const auto* step = std::get_if<StepRequest>(&request->what)) {
    for (size_t i = 0; step->append && i < step->items.size(); ++i) {
      if (step->items[i].n_append != 0) {
        request->retention.add(request->step.seqs()[i]);
      }
    }
  } else if (const auto* what = std::get_if<SeqRequest>(&request->what);
             what != nullptr && (what->verb == SeqVerb::kCommit || what->verb == SeqVerb::kFork)) {
    const kvm_seq_id changed = what->verb == SeqVerb::kFork ? request->result.seq : what->seq;
    const Result<Sequence*> seq = store_->find_seq(request->client, changed);
    if (seq.is_ok()) {
      request->retention.add(seq.value());
    }
  }
}

// Its sequences stay busy until it is finished, so who comes behind it sees what policies left.
void EngineImpl::run_retention(Request* request) {
  if (request->is_orphan) {
    request->retention.stop();
  }
  try {
    JobPlan plan;
    switch (request->retention.next(*store_, options_.n_threads, workspaces_[0], &plan)) {
      case RetentionWork::Next::kTasks:
        start_job(request, plan);
        return;
      case RetentionWork::Next::kMore:
        unfinished_.push_back(*request);
        return;
      case RetentionWork::Next::kDone:
        break;
    }
  } catch (const std::bad_alloc&) {
    request->retention.clear();
  }
  finish(request, Status::ok());
}

// Ends a request of a client that is gone, after its last task: it leaves nothing behind.
void EngineImpl::abandon(Request* request) {
  if (request->phase == Phase::kIndexing) {
    request->indexing.abandon(*store_);
    finish(request, client_is_gone());
  } else {
    fail(request, client_is_gone());
  }
}

// Ends a request that has begun, and comes to nothing.
void EngineImpl::fail(Request* request, Status status) {
  if (std::holds_alternative<StepRequest>(request->what)) {
    request->step.abandon(*store_);
  }
  finish(request, std::move(status));
}

void EngineImpl::finish(Request* request, Status status) {
  KVM_ASSERT(!request->LineHook::is_linked());
  if (request->is_started()) {
    set_next(request, false);
    uncount_running(request);
    end_reading(request);
    note_memory();
  }
  ++totals_.n_requests;
  totals_.n_requests_failed += status.is_ok() ? 0 : 1;
  if (!status.is_ok()) {
    request->result = RequestResult{};
  }
  request->result.status = std::move(status);
  finished_ns_ = now_ns();
  request->result.service_ns = finished_ns_ - request->submitted_ns;
  note_duration(request->client, request->result.service_ns);
  request->enter(Phase::kDone);
  leave_order(request);
  const auto* what = std::get_if<SeqRequest>(&request->what);
  if (what != nullptr && what->verb == SeqVerb::kFree && request->result.status.is_ok()) {
    order_.forget(what->seq);
  }
  if (what != nullptr && kept_prefixes_ && request->result.status.is_ok()) {
    if (what->verb == SeqVerb::kFree && !prefixes_.has(what->seq)) {
      kept_prefixes_->note_freed(what->seq);
    } else if (what->verb == SeqVerb::kPublish && !what->hashes.empty()) {
      kept_prefixes_->note_listed(what->seq);
    }
  }
  done_.push_back(*request);
}

void EngineImpl::leave_order(Request* request) {
  unblocked_.clear();
  order_.leave(&request->ticket, &unblocked_);
  for (SequenceOrder::Ticket* ticket : unblocked_) {
    push_ready(static_cast<Request*>(ticket->owner));
  }
}

uint32_t EngineImpl::poll() {
  uint32_t n_retired = 0;
  start_ns_ = 0;
  auditor_.collect(*store_);
  expire_room_waiters();
  expire_prefix();
  if (!room_line_.is_empty() && store_->memory().pages().free_left_frames()) {
    note_memory();  // an audit may have read them
  }
  for (uint32_t round = 0; round < kMaxPollRounds; ++round) {
    FinishedJob job;
    while (scheduler_.take_finished(&job)) {
      retire(job);
    }
    start_ready();
    if (done_.empty()) {
      break;
    }
    n_retired += deliver();
  }
  reclaim_some();
  return n_retired;
}

// Callbacks may submit requests that are done at once: those are of the next round.
uint32_t EngineImpl::deliver() {
  RequestLine delivering = std::exchange(done_, {});
  uint32_t n = 0;
  for (; !delivering.empty(); ++n) {
    Request* request = &delivering.front();
    delivering.pop_front();
    KVM_ASSERT(request->phase == Phase::kDone);
    RequestResult result = std::move(request->result);
    const DoneCallback callback = std::move(request->on_done);
    const bool is_orphan = request->is_orphan;
    give_back(request);
    if (!is_orphan && callback) {
      callback(std::move(result));
    }
  }
  return n;
}

uint64_t EngineImpl::housekeep() {
  const uint64_t move_ns = std::min(move_pages(), patience_ns());
  return store_->housekeep() ? 0 : move_ns;
}

uint64_t EngineImpl::move_pages() {
  const uint64_t now = now_ns();
  const bool is_busy = !requests_.empty() || now - finished_ns_ < kBusyNs;
  // Requests bring the driver back by themselves, and soon; what they read may be free then.
  const uint64_t later_ns = requests_.empty() ? kBusyNs : UINT64_MAX;
  if (moves_.has_begun()) {
    return requests_.empty() ? 0 : UINT64_MAX;  // soon it will have ended
  }
  if (store_->memory().pages().free_left_frames()) {
    return 0;
  }
  if (!scheduler_.has_room() || (is_busy && now < moves_due_ns_)) {
    return later_ns;
  }
  JobPlan plan;
  if (!moves_.begin(&store_->memory(), &plan)) {
    return store_->memory().pages().left_bytes() != 0 ? later_ns : UINT64_MAX;
  }
  if (is_busy) {
    const auto takes_ns =
        static_cast<uint64_t>(static_cast<double>(moves_.size_bytes()) / kMoveBytesPerNs);
    moves_due_ns_ = std::max(moves_due_ns_ + kMoveLateNs, now) - kMoveLateNs + takes_ns;
  }
  plan.lane = kMovesLane;
  scheduler_.start(&moves_, plan);
  // No more than the others' share: what a lane did not use for a while is not made up for.
  scheduler_.charge(kMovesLane, Scheduler::kLaneCredit);
  return 0;
}

bool EngineImpl::cancel(ClientId client, RequestTag tag) {
  bool is_known = false;
  names_.for_each(client, tag, [&](Request* request) {
    is_known = true;
    if (request->is_pending()) {
      leave_line(request);
      finish(request, cancelled());
    } else if (request->phase < Phase::kComputing) {
      request->is_cancelled = true;  // where it has to wait for pages
      if (request->phase == Phase::kFetching) {
        arrivals_.post(request);
      } else if (request->phase == Phase::kStoring) {
        arrivals_.post();
      }
    } else if (request->phase == Phase::kComputing) {
      request->is_cancelled = true;  // where a further job has to wait for pages
      if (request->stream.has_begun()) {
        request->stream.stop(cancelled());
      }
    }
  });
  return is_known;
}

void EngineImpl::wait(uint64_t timeout_ns) {
  const uint64_t begin_ns = now_ns();
  uint64_t waited_ns = 0;
  do {
    if (!done_.empty() || scheduler_.has_finished() || can_start() ||
        (!unfinished_.empty() && scheduler_.has_room()) || arrivals_.has_any() ||
        has_ring_to_serve() || room_line_.has_to_serve() || (movement_ && movement_->is_ready()) ||
        (snapshots_ && (snapshots_->is_ready() || kept_prefixes_->is_ready()))) {
      return;
    }
    const uint64_t patience = patience_ns();
    if (patience == 0) {
      return;
    }
    scheduler_.help_or_sleep(std::min(timeout_ns - waited_ns, patience));
    waited_ns = now_ns() - begin_ns;
  } while (waited_ns < timeout_ns);
}

// --- Looking ------------------------------------------------------------------------------------

Result<kvm_seq_info> EngineImpl::seq_info(ClientId client, kvm_seq_id id) {
  KVM_TRY_ASSIGN(Sequence * seq, store_->find_seq(client, id, Access::kUse));
  return store_->seq_info(seq);
}

Result<PrefixWeight> EngineImpl::weigh_prefix(ClientId client, kvm_seq_id id, uint64_t n_tokens,
                                              double prefill_rate) {
  KVM_TRY_ASSIGN(const Sequence* seq, store_->find_seq(client, id, Access::kUse));
  PrefixWeight weight;
  const uint64_t away_bytes = store_->estimate_away_bytes(seq, n_tokens);
  if (away_bytes != 0) {
    const double read_ns = options_.slow_tier->read_rates().in_order_ns(away_bytes);
    weight.read_ns = static_cast<uint64_t>(read_ns);
    weight.is_faster = read_ns < static_cast<double>(n_tokens) / prefill_rate * 1e9;
  }
  prefixes_.note_weighed(weight.is_faster);
  return weight;
}

Result<std::vector<MemoryPiece>> EngineImpl::layer_memory(kvm_seq_id id, uint32_t layer) {
  KVM_TRY_ASSIGN(Sequence * seq, store_->find_any_seq(id));
  const Space& space = store_->seq_space(seq);
  if (layer >= space.n_layers || space.layers[layer].kind == KVM_LAYER_ABSENT) {
    return Status(KVM_ERR_INVALID, fmt::format("layer {} stores nothing", layer));
  }
  std::vector<MemoryPiece> pieces;
  std::vector<KvRun> runs;
  for (uint32_t c = 0; c < space.storage(layer).classes.size(); ++c) {
    const tiers::SlabClass& slab_class = space.head_class(layer, c).slab_class;
    const uint32_t n_heads = slab_class.n_heads;
    runs.clear();
    std::vector<AwayPage> away;
    store_->collect_runs(seq, layer, c, &runs, true, &away);
    if (!away.empty()) {
      return Status(KVM_ERR_UNSUPPORTED,
                    fmt::format("{} of layer {} are on disk", counted(away.size(), "page"), layer));
    }
    for (const KvRun& run : runs) {
      // The heads of a full page follow each other; those of a part of one do not.
      const uint32_t n_parts = run.n_tokens == kPageTokens ? 1 : n_heads;
      const uint64_t rows = uint64_t{run.n_tokens} * (n_heads / n_parts);
      const auto add_plane = [&](const KvPlane& plane, uint32_t dim) {
        const codecs::Codec& codec = codecs::codec_of(plane.codec);
        for (uint32_t i = 0; i < n_parts; ++i) {
          pieces.push_back(
              {reinterpret_cast<const std::byte*>(codecs::row_at(plane, dim, i, run.slot)),
               rows * codec.row_bytes(dim)});
        }
        for (uint32_t i = 0; codec.is_scaled() && i < n_parts; ++i) {
          const bool by_row = codec.scaling == codecs::Scaling::kRow;
          pieces.push_back({reinterpret_cast<const std::byte*>(codecs::params_at(plane, dim, i) +
                                                               (by_row ? run.slot : 0)),
                            by_row ? rows * sizeof(uint16_t)
                                   : n_heads / n_parts * codec.head_params_bytes(dim)});
        }
      };
      add_plane(run.k, slab_class.dim_k);
      if (!slab_class.v_in_k) {
        add_plane(run.v, slab_class.dim_v);
      }
    }
  }
  return pieces;
}

kvm_stats EngineImpl::stats() const {
  kvm_stats stats = totals_;
  store_->add_stats(&stats);
  stats.host_capacity_bytes = options_.host_capacity_bytes;
  stats.uptime_ns = now_ns() - begin_ns_;
  stats.busy_ns = scheduler_.busy_ns();
  return stats;
}

}  // namespace

uint64_t ring_bytes(const Engine& engine) {
  const auto* const impl = dynamic_cast<const EngineImpl*>(&engine);
  return impl == nullptr ? 0 : impl->ring_bytes();
}

Result<std::unique_ptr<Engine>> Engine::open(const EngineOptions& given) {
  constexpr uint32_t kMaxThreads = 1024;
  KVM_TRY(attention::check_forced_isa());
  EngineOptions options = given;
  if (options.n_threads > kMaxThreads) {
    return Status(KVM_ERR_INVALID, fmt::format("n_threads is {}; at most {} are allowed",
                                               options.n_threads, kMaxThreads));
  }
  const MovementOptions& movement = options.movement;
  if (movement.max_priority < KVM_PRIORITY_DEFAULT || movement.max_priority > KVM_PRIORITY_MAX) {
    return Status(KVM_ERR_INVALID, fmt::format("movement.max_priority is {}; 50 to 100 are allowed",
                                               movement.max_priority));
  }
  if (!(movement.low > 0 && movement.low < movement.high && movement.high <= 1)) {
    return Status(KVM_ERR_INVALID, fmt::format("pages are sent from {} of the capacity on, down to "
                                               "{}; 0 < low < high <= 1 is allowed",
                                               movement.high, movement.low));
  }
  if (options.n_threads == 0) {
    options.n_threads = std::min(kMaxThreads, usable_cores());
  }
  if (options.host_capacity_bytes == 0) {
    const uint64_t free_bytes = machine_memory().free_bytes;
    options.host_capacity_bytes = (free_bytes != 0 ? free_bytes : kUnknownMemory) / 5 * 3;
  }
  KVM_TRY_ASSIGN(const std::optional<CostModel> cost_model, parse_cost_model(options.cost_model));
  StoreOptions store_options;
  store_options.host_capacity_bytes = options.host_capacity_bytes;
  store_options.default_quota_bytes = options.default_quota_bytes;
  store_options.memory_quota_bytes = options.memory_quota_bytes;
  store_options.max_sequences_per_client = options.max_sequences_per_client;
  store_options.tenant_limits = options.tenant_limits;
  store_options.max_spaces = options.max_spaces;
  store_options.slow_tier = options.slow_tier;
  store_options.cached_bytes = std::min(options.host_capacity_bytes / 2, kMaxCachedBytes);
  KVM_TRY_ASSIGN(std::unique_ptr<Store> store, Store::open(store_options));
  if (options.default_quota_bytes == 0) {
    options.default_quota_bytes = options.host_capacity_bytes;
  }
  auto engine = std::make_unique<EngineImpl>(options, std::move(store), cost_model);
  KVM_TRY(engine->start_workers());
  return std::unique_ptr<Engine>(std::move(engine));
}

}  // namespace kvm::engine
