// SPDX-License-Identifier: Apache-2.0
// A Client is a connection to kvmd, or an engine in this process, with the memory that it shares.
//
// Locks: calls hold `mutex` shared, close() alone; both without the GIL, which a thread that holds
// the lock may need (a wait that asks for signals). In a child of fork() nobody locks: who held a
// lock there is gone.
#ifndef KVM_BINDINGS_PYTHON_SRC_CLIENT_H_
#define KVM_BINDINGS_PYTHON_SRC_CLIENT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include "bindings/python/src/status.h"
#include "kvm.h"

namespace kvm::python {

// How many fork()s lie between the start of the first process and this one.
uint32_t fork_generation();

// An Arena is one of kvm.h's. It goes with the last buffer in it.
class Arena {
 public:
  // Owns `arena`. REQUIRES: it is new.
  Arena(kvm_arena* arena, uint64_t size);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  // kind NONE: no room.
  kvm_buffer alloc(uint64_t size);
  void free(const kvm_buffer& buffer);
  void* data(const kvm_buffer& buffer) { return kvm_arena_data(arena_, buffer); }
  // The buffer of `size` bytes at `address`; kind NONE: they are not in the arena.
  kvm_buffer find(const void* address, uint64_t size) const;

 private:
  kvm_arena* arena_;
  uint64_t size_;
  kvm_buffer first_{};  // one that was taken once
  uint64_t begin_ = 0;  // address of its first byte
  uint32_t generation_ = fork_generation();
};

class Queue;

class Client {
 public:
  static std::shared_ptr<Client> connect(const std::optional<std::string>& socket,
                                         const std::optional<std::string>& name,
                                         uint64_t timeout_ns);
  static std::shared_ptr<Client> open_embedded(uint32_t n_threads, uint64_t capacity_bytes);
  explicit Client(kvm_client* client);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  bool is_embedded() const { return is_embedded_; }
  // Ends the queues first: who waits for a request of theirs sees it cancelled. Idempotent.
  // REQUIRES: the GIL.
  void close();
  bool is_closed() const { return is_closed_.load(std::memory_order_acquire); }
  // REQUIRES: the GIL.
  void reconnect();
  // Queues that close() ends. add: within call().
  void add_queue(Queue* queue);
  void remove_queue(Queue* queue);

  // Calls f(kvm_client *) without the GIL and throws what it answers. REQUIRES: the GIL.
  template <typename F>
  void call(const F& f) {
    StatusError error;
    {
      const Unlocked unlocked;
      const Use use(this);
      error.status = f(use.client());
      if (error.status != KVM_OK) {
        error.message = kvm_last_error();
      }
    }
    if (error.status != KVM_OK) {
      throw error;
    }
  }

  // A Use keeps close() from running. REQUIRES: not the GIL. Throws StatusError: it is closed, or
  // this is a child of the process that made it.
  class Use {
   public:
    explicit Use(Client* client);
    kvm_client* client() const { return client_; }

   private:
    std::shared_lock<std::shared_mutex> lock_;
    kvm_client* client_ = nullptr;
  };

  // Memory that the service reads and writes without a copy. REQUIRES: the GIL.
  struct Piece {
    std::shared_ptr<Arena> arena;
    kvm_buffer buffer{};
  };
  Piece alloc(uint64_t size);
  // As Arena::find, over all arenas of the client. REQUIRES: the GIL.
  kvm_buffer find(const void* address, uint64_t size) const;
  // Bytes of tensors outside of arenas that libkvm had to copy, both ways.
  std::atomic<uint64_t> n_copied_bytes{0};

 private:
  kvm_client* client_;
  bool is_embedded_ = false;
  uint64_t max_arena_bytes_ = 0;
  uint32_t generation_ = fork_generation();
  std::atomic<bool> is_closed_{false};
  std::shared_mutex mutex_;
  std::mutex queues_mutex_;  // taken after mutex_, before that of a queue
  std::vector<Queue*> queues_;
  std::vector<std::weak_ptr<Arena>> arenas_;
  std::shared_ptr<Arena> spare_;  // one of the usual size stays, so that not every tensor makes one
};

void register_client(nanobind::module_& module);

}  // namespace kvm::python

#endif  // KVM_BINDINGS_PYTHON_SRC_CLIENT_H_
