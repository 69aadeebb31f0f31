// SPDX-License-Identifier: Apache-2.0
#include "bench/wall_client.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "bench/harness.h"

namespace kvm::bench {

WallClient::WallClient(const std::string& socket, uint64_t spin_ns)
    : WallClient(connect(socket), spin_ns) {}

WallClient::WallClient(kvm_client* client, uint64_t spin_ns)
    : client_(client), queue_(make_queue(client_, spin_ns)) {
  constexpr uint64_t kBlockBytes = kBlock * kTokenBytes / 2;
  kvm_arena_params params{};
  params.struct_size = sizeof(params);
  params.size = 2 * kBlockBytes + (1ull << 20);
  require_ok(kvm_arena_create(client_, &params, &arena_), "arena");
  k_ = allocate(arena_, kBlockBytes, KVM_DTYPE_BF16);
  v_ = allocate(arena_, kBlockBytes, KVM_DTYPE_BF16);
  q_ = allocate(arena_, uint64_t{kQHeads} * kDim * 2, KVM_DTYPE_BF16);
  o_ = allocate(arena_, uint64_t{kQHeads} * kDim * 2, KVM_DTYPE_BF16);
  fill_random_bf16(k_.halves(), kBlockBytes / 2, 1);
  fill_random_bf16(v_.halves(), kBlockBytes / 2, 2);
  fill_random_bf16(q_.halves(), q_.size_bytes / 2, 3);
  kvm_space_params space{};
  space.struct_size = sizeof(space);
  space.name = "bench-wall";
  space.n_layers = 1;
  space.n_q_heads = kQHeads;
  space.n_kv_heads = kKvHeads;
  space.head_dim_k = kDim;
  require_ok(kvm_space_register(client_, &space, &space_), "space");
}

WallClient::~WallClient() {
  kvm_queue_destroy(queue_);
  for (kvm_arena* arena : held_) {
    kvm_arena_destroy(arena);
  }
  kvm_arena_destroy(arena_);
  kvm_client_close(client_);
}

kvm_seq_id WallClient::add_sequence(uint64_t n_tokens) {
  kvm_seq_id seq = 0;
  require_ok(kvm_seq_create(client_, space_, nullptr, &seq), "sequence");
  for (uint64_t begin = 0; begin < n_tokens; begin += kBlock) {
    kvm_item item{};
    item.seq = seq;
    item.append_position = KVM_POSITION_END;
    item.query_position = KVM_POSITION_END;
    item.n_append = static_cast<uint32_t>(std::min<uint64_t>(kBlock, n_tokens - begin));
    kvm_step_params params = attend_params(&item);
    params.k = k_.tensor;
    params.v = v_.tensor;
    require_ok(kvm_append(queue_, &params), "append");
  }
  return seq;
}

kvm_step_params WallClient::attend_params(kvm_item* item) {
  kvm_step_params params{};
  params.struct_size = sizeof(params);
  params.space = space_;
  params.n_items = 1;
  params.items = item;
  params.q = q_.tensor;
  params.o = o_.tensor;
  return params;
}

kvm_status WallClient::attend(kvm_seq_id seq, kvm_step_stats* stats) {
  kvm_item item{};
  item.seq = seq;
  item.append_position = KVM_POSITION_END;
  item.n_query = 1;
  item.query_position = KVM_POSITION_END;
  const kvm_step_params params = attend_params(&item);
  return kvm_attend(queue_, &params, stats);
}

void WallClient::attend_later(kvm_seq_id seq, uint64_t number) {
  kvm_item item{};
  item.seq = seq;
  item.append_position = KVM_POSITION_END;
  item.n_query = 1;
  item.query_position = KVM_POSITION_END;
  const kvm_step_params params = attend_params(&item);
  require_ok(kvm_attend_async(queue_, &params, number), "attend");
}

void WallClient::add_arena(uint64_t size_bytes) {
  kvm_arena_params params{};
  params.struct_size = sizeof(params);
  params.size = size_bytes;
  kvm_arena* arena = nullptr;
  require_ok(kvm_arena_create(client_, &params, &arena), "arena");
  held_.push_back(arena);
}

kvm_stats WallClient::stats() const {
  kvm_stats stats{};
  stats.struct_size = sizeof(stats);
  require_ok(kvm_get_stats(client_, &stats), "stats");
  return stats;
}

uint64_t WallClient::metric(const std::string& name) const {
  std::string text(256 << 10, '\0');
  size_t length = 0;
  require_ok(kvm_get_stats_text(client_, text.data(), text.size(), &length), "metrics");
  text.resize(std::min(length, text.size()));
  const size_t at = text.find("\n" + name + " ");
  require(at == std::string::npos ? Status(KVM_ERR_NOT_FOUND, "there is no series " + name)
                                  : Status::ok(),
          "metrics");
  return std::strtoull(text.c_str() + at + name.size() + 2, nullptr, 10);
}

ClientProcess::ClientProcess(const std::function<void(const std::function<void()>& ready)>& main) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    require(Status(KVM_ERR_IO, std::strerror(errno)), "pipe");
  }
  child_ = fork();
  if (child_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    main([&ends] {
      const char byte = 1;
      if (write(ends[1], &byte, 1) != 1) {
        _exit(1);
      }
    });
    _exit(0);
  }
  close(ends[1]);
  char byte = 0;
  const bool is_ready = read(ends[0], &byte, 1) == 1;
  close(ends[0]);
  require(is_ready ? Status::ok() : Status(KVM_ERR_INTERNAL, "it ended before it was ready"),
          "client process");
}

void ClientProcess::kill() { ::kill(child_, SIGKILL); }

ClientProcess::~ClientProcess() {
  kill();
  waitpid(child_, nullptr, 0);
}

}  // namespace kvm::bench
