// SPDX-License-Identifier: Apache-2.0
// A client for benches of what clients do to each other: one space with one layer, sequences of
// random tokens, attends over them; and such a client in a process of its own.
#ifndef KVM_BENCH_WALL_CLIENT_H_
#define KVM_BENCH_WALL_CLIENT_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/service_client.h"
#include "kvm.h"

namespace kvm::bench {

class WallClient {
 public:
  static constexpr uint32_t kQHeads = 32;
  static constexpr uint32_t kKvHeads = 8;
  static constexpr uint32_t kDim = 128;
  static constexpr uint64_t kTokenBytes = uint64_t{kKvHeads} * kDim * 2 * 2;
  static constexpr uint32_t kBlock = 4096;  // tokens an append

  // spin_ns: of its queue.
  WallClient(const std::string& socket, uint64_t spin_ns);
  // Takes the client over.
  WallClient(kvm_client* client, uint64_t spin_ns);
  ~WallClient();
  WallClient(const WallClient&) = delete;
  WallClient& operator=(const WallClient&) = delete;

  kvm_client* client() const { return client_; }
  kvm_queue* queue() const { return queue_; }
  // A sequence with n_tokens tokens.
  kvm_seq_id add_sequence(uint64_t n_tokens);
  // One query token against all that a sequence holds. The status of the call.
  kvm_status attend(kvm_seq_id seq, kvm_step_stats* stats = nullptr);
  // Likewise, without waiting. All share one output.
  void attend_later(kvm_seq_id seq, uint64_t number);
  // Beside its own: an arena that is only held.
  void add_arena(uint64_t size_bytes);
  kvm_stats stats() const;
  // Returns the value of a series without labels in the metrics' text.
  uint64_t metric(const std::string& name) const;

 private:
  kvm_step_params attend_params(kvm_item* item);

  kvm_client* client_;
  kvm_queue* queue_;
  kvm_arena* arena_ = nullptr;
  std::vector<kvm_arena*> held_;
  kvm_space_id space_ = 0;
  ArenaTensor k_, v_, q_, o_;
};

// A function in a process of its own, which calls `ready` once, and never returns from `main`.
class ClientProcess {
 public:
  // Returns when it is ready.
  explicit ClientProcess(const std::function<void(const std::function<void()>& ready)>& main);
  // Kills it, and waits for its end.
  ~ClientProcess();
  ClientProcess(const ClientProcess&) = delete;
  ClientProcess& operator=(const ClientProcess&) = delete;
  void kill();

 private:
  pid_t child_ = -1;
};

}  // namespace kvm::bench

#endif  // KVM_BENCH_WALL_CLIENT_H_
