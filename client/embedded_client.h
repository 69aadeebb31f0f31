// SPDX-License-Identifier: Apache-2.0
// A client that is its own service: the engine runs in this process, on its workers and on the
// threads that wait for it.
//
// One mutex guards the engine. Whoever waits for a request drives the engine for everybody: takes
// the mutex, runs one task or retires what is done, and lets go. The mutex hands over in order of
// arrival, so that a driver does not keep a submitter out.
#ifndef KVM_CLIENT_EMBEDDED_CLIENT_H_
#define KVM_CLIENT_EMBEDDED_CLIENT_H_

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "client/backend.h"
#include "engine/engine.h"

namespace kvm::client {

// A FairMutex serves two in the order in which they came: who holds `mutex_` and comes back queues
// behind `next_`.
class FairMutex {
 public:
  void lock() {
    const std::lock_guard turn(next_);
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex next_;
  std::mutex mutex_;
};

// A QueueEvent is the descriptor of a queue, readable while it is raised.
// Threads: any.
class QueueEvent {
 public:
  // Null where the system has no more descriptors.
  static std::shared_ptr<QueueEvent> make();
  ~QueueEvent();
  QueueEvent(const QueueEvent&) = delete;
  QueueEvent& operator=(const QueueEvent&) = delete;
  int fd() const { return fd_; }
  void raise() const;
  void reset() const;

 private:
  explicit QueueEvent(int fd) : fd_(fd) {}
  int fd_;
};

// An EmbeddedService is the engine and those who use it. Held by the client and its queues, so that
// they may go in any order.
class EmbeddedService {
 public:
  static Result<std::shared_ptr<EmbeddedService>> open(const engine::EngineOptions& options);
  ~EmbeddedService() { stop_driver(); }

  // Frees the client's sequences, waits until no task touches memory of the caller, and ends the
  // engine. Later calls find is_down().
  void close();

  // Calls `use(engine, client)` with the engine locked. Fails: DISCONNECTED after close.
  template <typename Use>
  auto with_engine(Use&& use) -> std::invoke_result_t<Use, engine::Engine&, engine::ClientId> {
    const std::lock_guard lock(mutex_);
    if (engine_ == nullptr) {
      return down_status();
    }
    return use(*engine_, client_);
  }

  // Runs a task, or retires requests, or sleeps for at most timeout_ns (1 ms if that is less) when
  // there is nothing to do. Returns false after close.
  bool drive(uint64_t timeout_ns);
  bool is_down() const;
  // The same without a lock; true a moment later.
  bool has_ended() const { return has_ended_.load(std::memory_order_relaxed); }
  static Status down_status();
  const kvm_client_info& info() const { return info_; }
  uint64_t start_ns() const { return start_ns_; }
  // Queues that exist. Fails: LIMIT.
  Status add_queue();
  void remove_queue() { --n_queues_; }
  uint64_t next_number() { return ++last_number_; }  // REQUIRES: the engine is locked

  // Makes an event that is raised when the engine ends as well, and sees to it that somebody drives
  // the engine without waiting for anything: a thread, made the first time. Null where the system
  // refuses a descriptor or a thread.
  std::shared_ptr<QueueEvent> watch();
  // To be called after submitting on a queue with an event.
  void wake_driver();

 private:
  void end_engine();
  void run_driver();
  void stop_driver();
  bool has_requests();

  mutable FairMutex mutex_;
  std::unique_ptr<engine::Engine> engine_;
  engine::ClientId client_ = 0;
  kvm_client_info info_{};
  uint64_t start_ns_ = 0;
  uint64_t last_number_ = 0;
  std::atomic<uint32_t> n_queues_{0};
  std::atomic<bool> has_ended_{false};

  std::mutex driver_mutex_;  // guards the members below; taken before the engine's
  std::condition_variable driver_wake_;
  std::thread driver_;
  bool driver_has_work_ = false;
  bool driver_stops_ = false;
  std::vector<std::weak_ptr<QueueEvent>> events_;
};

class EmbeddedClient final : public Client {
 public:
  explicit EmbeddedClient(std::shared_ptr<EmbeddedService> service)
      : service_(std::move(service)) {}

  void close() override { service_->close(); }
  Status reconnect() override { return Status::ok(); }
  bool is_closed() const override { return service_->is_down(); }
  kvm_client_info info() const override { return service_->info(); }
  Status ping() override;
  Result<std::unique_ptr<Queue>> create_queue(uint32_t n_entries, uint64_t spin_ns) override;
  Result<ArenaMemory> create_arena(uint64_t size_bytes) override;
  void destroy_arena(const ArenaMemory& arena) override;
  Result<kvm_space_id> register_space(const SpaceSpec& space) override;
  Result<kvm_space_id> find_space(const std::string& name) override;
  Result<kvm_space_info> space_info(kvm_space_id space) override;
  Result<std::vector<kvm_space_info>> list_spaces() override;
  Status drop_space(kvm_space_id space) override;
  Result<kvm_seq_id> seq(const SeqRequest& call) override;
  Result<kvm_seq_info> seq_info(kvm_seq_id seq) override;
  Result<std::vector<kvm_seq_info>> list_seqs(kvm_space_id space, uint32_t flags) override;
  Result<PrefixPage> find_prefix(kvm_space_id space,
                                 std::span<const kvm_prefix_hash> hashes) override;
  Result<PrefixWeight> weigh_prefix(const PrefixPage& page, double prefill_rate) override;
  Result<kvm_stats> stats() override;
  Result<std::string> stats_text() override;
  Result<std::string> config_text() override;
  Result<kvm_evict_result> evict(const kvm_evict_params& params) override;
  Result<std::vector<kvm_client_entry>> list_clients() override;
  Result<std::vector<kvm_user_entry>> list_users() override;
  Status set_quota(const kvm_quota_params& params) override;

 private:
  std::shared_ptr<EmbeddedService> service_;
  std::atomic<uint32_t> n_arenas_{0};
  std::atomic<uint32_t> last_region_{0};
};

}  // namespace kvm::client

#endif  // KVM_CLIENT_EMBEDDED_CLIENT_H_
