// SPDX-License-Identifier: Apache-2.0
// The seam between the C functions and the two ways of answering them: a daemon behind a socket and
// rings (thin_client.h), or an engine in this process (embedded_client.h).
//
// Parameters arrive here checked as far as that is possible without the service (client/checks.h),
// in this library's form of their structures. Pointers in them are the caller's and valid during
// the call only.
//
// Lifetime: queues and arenas hold their Client; Client::close makes them answer DISCONNECTED.
#ifndef KVM_CLIENT_BACKEND_H_
#define KVM_CLIENT_BACKEND_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/prefix_table.h"
#include "base/request.h"
#include "base/status.h"
#include "client/tensors.h"
#include "ipc/space_message.h"
#include "kvm.h"

namespace kvm::client {

// A StepCall is a step with its tensors resolved. Those that the verbs do not use are absent.
struct StepCall {
  bool append = false;
  bool attend = false;
  const kvm_step_params* params = nullptr;
  Tensor k, v, q, o, lse, err;
};

struct ReadCall {
  const kvm_read_params* params = nullptr;
  Tensor k, v;
};

struct ObserveCall {
  const kvm_observe_params* params = nullptr;
  Tensor q, column_sums;
};

// An Interrupt is kvm_queue_params.is_interrupted; an empty one is never asked.
struct Interrupt {
  int (*is_interrupted)(void* user) = nullptr;
  void* user = nullptr;

  explicit operator bool() const { return is_interrupted != nullptr; }
  bool is_raised() const { return is_interrupted != nullptr && is_interrupted(user) != 0; }
  // What a wait returns that has nothing else to return.
  static Status status() {
    return Status::fixed(KVM_ERR_INTERRUPTED, "the queue's is_interrupted ended the wait");
  }
};
// Between two questions, for as long as a wait lasts.
inline constexpr uint64_t kInterruptSliceNs = 10'000'000;

// Threads: one at a time.
class Queue {
 public:
  // Cancels what is outstanding, and returns when nothing of this queue touches memory any more.
  virtual ~Queue() = default;

  // Stage a request. Fails: AGAIN, NO_MEMORY, DISCONNECTED; nothing is staged then.
  virtual Status stage_nop(uint64_t user_data) = 0;
  virtual Status stage_step(const StepCall& call, uint64_t user_data) = 0;
  virtual Status stage_read(const ReadCall& call, uint64_t user_data) = 0;
  virtual Status stage_observe(const ObserveCall& call, uint64_t user_data) = 0;
  virtual Status stage_seq(const SeqRequest& call, uint64_t user_data) = 0;
  virtual Status stage_snapshot(const SnapshotRequest& call, uint64_t user_data) = 0;
  virtual Status submit() = 0;
  // DISCONNECTED once the client is closed or the daemon gone, requests outstanding or not.
  virtual Status check_open() = 0;

  // Requests staged or submitted whose completion has not been taken.
  virtual uint32_t n_outstanding() const = 0;
  // Takes up to n_max completions, waiting for n_min of them for timeout_ns at most (UINT64_MAX: no
  // limit) as long as so many were submitted, and `interrupt` is not raised. Their sentences stay
  // until the next call. Returns how many. Fails: DISCONNECTED, when nothing is left to take;
  // INTERRUPTED, when nothing was taken.
  virtual Result<uint32_t> take(kvm_completion* out, uint32_t n_max, uint32_t n_min,
                                uint64_t timeout_ns, Interrupt interrupt) = 0;
  virtual Status cancel(uint64_t user_data) = 0;
  virtual int fd() = 0;
};

struct ArenaMemory {
  uint32_t region = 0;
  void* data = nullptr;
  uint64_t size_bytes = 0;
};

// Threads: any, but close and reconnect, which must be alone.
class Client : public std::enable_shared_from_this<Client> {
 public:
  virtual ~Client() = default;

  virtual void close() = 0;
  virtual Status reconnect() = 0;
  virtual bool is_closed() const = 0;

  virtual kvm_client_info info() const = 0;
  virtual Status ping() = 0;

  virtual Result<std::unique_ptr<Queue>> create_queue(uint32_t n_entries, uint64_t spin_ns) = 0;
  // Memory that stays valid until destroy_arena, even after close.
  virtual Result<ArenaMemory> create_arena(uint64_t size_bytes) = 0;
  virtual void destroy_arena(const ArenaMemory& arena) = 0;
  ArenaDirectory& arenas() { return arenas_; }

  virtual Result<kvm_space_id> register_space(const SpaceSpec& space) = 0;
  virtual Result<kvm_space_id> find_space(const std::string& name) = 0;
  virtual Result<kvm_space_info> space_info(kvm_space_id space) = 0;
  virtual Result<std::vector<kvm_space_info>> list_spaces() = 0;
  virtual Status drop_space(kvm_space_id space) = 0;

  // Performs the call; the value is the new sequence of kCreate and kFork.
  virtual Result<kvm_seq_id> seq(const SeqRequest& call) = 0;
  virtual Result<kvm_seq_info> seq_info(kvm_seq_id seq) = 0;
  virtual Result<std::vector<kvm_seq_info>> list_seqs(kvm_space_id space, uint32_t flags) = 0;

  // Here: UNSUPPORTED, of engines that keep nothing. The value is the sequence of kLoad.
  virtual Result<kvm_seq_id> snapshot(const SnapshotRequest&) { return keeps_nothing(); }
  virtual Result<std::vector<kvm_snapshot_info>> list_snapshots(uint32_t /*flags*/) {
    return keeps_nothing();
  }

  // Looks in the table of the user's prefixes. Here: UNSUPPORTED, of engines that have none.
  virtual Result<PrefixPage> find_prefix(kvm_space_id /*space*/,
                                         std::span<const kvm_prefix_hash> /*hashes*/) {
    return Status::fixed(KVM_ERR_UNSUPPORTED, "sequences in GPU memory have no prefixes");
  }
  // What to take of what was found costs: as Engine::weigh_prefix. Here: nothing.
  virtual Result<PrefixWeight> weigh_prefix(const PrefixPage& /*page*/, double /*prefill_rate*/) {
    return PrefixWeight();
  }

  virtual Result<kvm_stats> stats() = 0;
  virtual Result<std::string> stats_text() = 0;

  // Part 11. Here: UNSUPPORTED, of engines that keep no quotas.
  virtual Result<std::string> config_text() { return not_administered(); }
  virtual Result<kvm_evict_result> evict(const kvm_evict_params&) { return not_administered(); }
  virtual Result<std::vector<kvm_client_entry>> list_clients() { return not_administered(); }
  virtual Result<std::vector<kvm_user_entry>> list_users() { return not_administered(); }
  virtual Status set_quota(const kvm_quota_params&) { return not_administered(); }

  static Status keeps_nothing() {
    return Status::fixed(KVM_ERR_UNSUPPORTED,
                         "an engine in this process keeps no snapshots: they are kvmd's");
  }

  // Handles of queues and arenas that exist: reconnect needs zero.
  std::atomic<uint32_t> n_handles{0};

 private:
  static Status not_administered() {
    return Status(KVM_ERR_UNSUPPORTED, "this client's engine has no quotas and no configuration");
  }

  ArenaDirectory arenas_;
};

struct ConnectOptions {
  std::string socket_path;
  std::string client_name;
  uint64_t timeout_ns = 0;
};

// As kvm_connect, kvm_open_embedded. The second is in libkvm_embedded; libkvm has one that answers
// UNSUPPORTED (open_embedded_unsupported.cc).
Result<std::shared_ptr<Client>> connect_client(const ConnectOptions& options);
Result<std::shared_ptr<Client>> open_embedded_client(const kvm_embedded_params& params);

}  // namespace kvm::client

#endif  // KVM_CLIENT_BACKEND_H_
