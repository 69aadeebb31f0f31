// SPDX-License-Identifier: Apache-2.0
// A client of a kvmd: control calls over the socket; calls on sequences over a queue of its own.
#ifndef KVM_CLIENT_THIN_CLIENT_H_
#define KVM_CLIENT_THIN_CLIENT_H_

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "client/backend.h"
#include "client/thin_connection.h"
#include "client/thin_queue.h"

namespace kvm::client {

class ThinClient final : public Client {
 public:
  static Result<std::shared_ptr<Client>> open(const ConnectOptions& options);

  void close() override;
  Status reconnect() override;
  bool is_closed() const override;
  kvm_client_info info() const override;
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
  Result<kvm_seq_id> snapshot(const SnapshotRequest& call) override;
  Result<std::vector<kvm_snapshot_info>> list_snapshots(uint32_t flags) override;
  Result<std::string> config_text() override;
  Result<kvm_evict_result> evict(const kvm_evict_params& params) override;
  Result<std::vector<kvm_client_entry>> list_clients() override;
  Result<std::vector<kvm_user_entry>> list_users() override;
  Status set_quota(const kvm_quota_params& params) override;

 private:
  // The user's table of prefixes, as a connection was given it.
  struct Prefixes {
    std::shared_ptr<Connection> connection;
    ipc::Mapping mapping;
    PrefixTableReader table;
  };
  struct OwnArena {
    std::shared_ptr<Connection> connection;
    SharedArena memory;
  };

  explicit ThinClient(ConnectOptions options) : options_(std::move(options)) {}

  std::shared_ptr<Connection> connection() const;
  Result<ThinQueue*> own_queue();
  Result<std::shared_ptr<const Prefixes>> prefixes();
  // stage(queue, number) makes the request; `makes`: it makes a sequence.
  template <typename Stage>
  Result<kvm_seq_id> call_own_queue(bool makes, Stage stage);
  Result<kvm_completion> await_own_answer(uint64_t number);
  void prepare_to_make(uint64_t number);
  void settle_late_answer(const kvm_completion& completion);
  Status tidy_own_queue();
  Result<std::string> call_for_text(
      const std::function<std::span<const uint8_t>(ipc::ControlWriter*, uint64_t, uint64_t)>&
          encode);
  Result<kvm_space_id> call_for_space_id(const Connection::Encode& encode);
  template <typename T>
  Result<T> call_for_struct(const Connection::Encode& encode, const char* name);
  template <typename T>
  Result<std::vector<T>> call_for_list(
      const std::function<std::span<const uint8_t>(ipc::ControlWriter*, uint64_t, uint64_t)>&
          encode,
      uint64_t (*id_of)(const T&), const char* name);

  ConnectOptions options_;
  mutable std::mutex connection_mutex_;  // guards the pointer
  std::shared_ptr<Connection> connection_;

  std::mutex own_queue_mutex_;  // guards the members below, and the queue's use
  std::unique_ptr<ThinQueue> own_queue_;
  uint64_t last_own_number_ = 0;
  std::unordered_set<uint64_t> late_makers_;  // calls that may make a sequence, unanswered
  std::vector<kvm_seq_id> unwanted_seqs_;     // that such calls have made: to be freed
  LostSeqs lost_;                             // sequences of former connections

  std::mutex prefixes_mutex_;
  std::shared_ptr<const Prefixes> prefixes_;

  std::mutex arenas_mutex_;
  std::unordered_map<void*, OwnArena> own_arenas_;  // by address
};

}  // namespace kvm::client

#endif  // KVM_CLIENT_THIN_CLIENT_H_
