// SPDX-License-Identifier: Apache-2.0
// ipc and decode: what a client sees through the socket, the rings and the arenas.
//
// decode runs the daemon's own code in a child process of the bench, so that the read ceiling can
// be taken there, over the very pages that attention reads, between the steps that it judges.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include "bench/ceiling.h"
#include "bench/daemon_child.h"
#include "bench/harness.h"
#include "kvm.h"

namespace kvm::bench {

namespace {

void require_ok(kvm_status status, const char* what) {
  if (status != KVM_OK) {
    require(Status(status, kvm_last_error()), what);
  }
}

kvm_client* connect(const std::string& socket) {
  kvm_connect_params params{};
  params.struct_size = sizeof(params);
  params.socket_path = socket.c_str();
  params.client_name = "kvm-bench";
  kvm_client* client = nullptr;
  require_ok(kvm_connect(&params, &client), "connect");
  return client;
}

kvm_queue* make_queue(kvm_client* client, uint64_t spin_ns) {
  kvm_queue_params params{};
  params.struct_size = sizeof(params);
  params.spin_ns = spin_ns;
  kvm_queue* queue = nullptr;
  require_ok(kvm_queue_create(client, &params, &queue), "queue");
  return queue;
}

// Posts n null requests at once and waits for all.
void null_batch(kvm_queue* queue, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) {
    require_ok(kvm_nop_async(queue, i), "nop");
  }
  require_ok(kvm_submit(queue), "submit");
  kvm_completion completions[16];
  for (uint32_t got = 0; got < n;) {
    const int32_t more = kvm_wait(queue, completions, 16, n - got, UINT64_MAX);
    require_ok(more < 0 ? more : KVM_OK, "wait");
    got += static_cast<uint32_t>(more);
  }
}

void add_ipc_case(Report& report, kvm_queue* queue, const char* name, uint32_t batch,
                  uint32_t trips, uint32_t gap_us) {
  std::vector<double> seconds;
  for (uint32_t i = 0; i < trips + trips / 10; ++i) {
    if (gap_us != 0) {
      usleep(gap_us);
    }
    const double begin = now_s();
    null_batch(queue, batch);
    if (i >= trips / 10) {
      seconds.push_back(now_s() - begin);
    }
  }
  report.add({{"case", name},
              {"p50_us", median(seconds) * 1e6},
              {"p99_us", percentile(seconds, 0.99) * 1e6}});
}

// One tensor in an arena.
struct ArenaTensor {
  kvm_tensor tensor{};
  void* data = nullptr;
  uint64_t size_bytes = 0;
};

ArenaTensor allocate(kvm_arena* arena, uint64_t size_bytes, uint32_t dtype) {
  ArenaTensor out;
  require_ok(kvm_arena_alloc(arena, size_bytes, 0, &out.tensor.buffer), "arena_alloc");
  out.tensor.dtype = dtype;
  out.data = kvm_arena_data(arena, out.tensor.buffer);
  out.size_bytes = size_bytes;
  return out;
}

// A model of Llama-3.1-8B geometry whose context is filled with distinct data.
class DecodeModel {
 public:
  static constexpr uint32_t kLayers = 32;
  static constexpr uint32_t kQHeads = 32;
  static constexpr uint32_t kKvHeads = 8;
  static constexpr uint32_t kDim = 128;
  static constexpr uint64_t kTokenBytes = uint64_t{kKvHeads} * kDim * 2 * 2;  // one layer
  static constexpr uint32_t kBlock = 4096;

  DecodeModel(kvm_client* client, kvm_queue* queue) : client_(client), queue_(queue) {
    kvm_arena_params arena_params{};
    arena_params.struct_size = sizeof(arena_params);
    arena_params.size = 2 * kBlock * kTokenBytes / 2 + (4ull << 20);
    require_ok(kvm_arena_create(client, &arena_params, &arena_), "arena");
    k_ = allocate(arena_, kBlock * kTokenBytes / 2, KVM_DTYPE_BF16);
    v_ = allocate(arena_, kBlock * kTokenBytes / 2, KVM_DTYPE_BF16);
    q_ = allocate(arena_, kQHeads * kDim * 2, KVM_DTYPE_BF16);
    o_ = allocate(arena_, kQHeads * kDim * 2, KVM_DTYPE_BF16);
    lse_ = allocate(arena_, kQHeads * 4, KVM_DTYPE_F32);
    kvm_space_params space{};
    space.struct_size = sizeof(space);
    space.name = "bench-8b";
    space.n_layers = kLayers;
    space.n_q_heads = kQHeads;
    space.n_kv_heads = kKvHeads;
    space.head_dim_k = kDim;
    require_ok(kvm_space_register(client, &space, &space_), "space");
    require_ok(kvm_seq_create(client, space_, nullptr, &seq_), "sequence");
  }
  ~DecodeModel() {
    kvm_seq_free(client_, seq_);
    kvm_arena_destroy(arena_);
  }
  DecodeModel(const DecodeModel&) = delete;
  DecodeModel& operator=(const DecodeModel&) = delete;

  void fill(uint64_t n_tokens) {
    const bool shows_progress = isatty(STDERR_FILENO) == 1;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      for (uint64_t at = 0; at < n_tokens; at += kBlock) {
        const uint64_t seed = (uint64_t{layer} << 32) + at * 2;
        fill_random_bf16(static_cast<uint16_t*>(k_.data), k_.size_bytes / 2, seed);
        fill_random_bf16(static_cast<uint16_t*>(v_.data), v_.size_bytes / 2, seed + 1);
        step(layer, static_cast<uint32_t>(std::min<uint64_t>(kBlock, n_tokens - at)), false);
      }
      if (shows_progress) {
        fmt::print(stderr, "\rfilling layer {}/{}", layer + 1, kLayers);
      }
    }
    if (shows_progress) {
      fmt::print(stderr, "\n");
    }
  }

  struct TokenStats {
    double seconds = 0;
    double compute_s = 0;
    uint64_t bytes_read = 0;
  };

  // One token: a step (append + attend) per layer, queries changing from layer to layer.
  TokenStats decode() {
    TokenStats out;
    ++n_decoded_;
    fill_random_bf16(static_cast<uint16_t*>(k_.data), kTokenBytes / 4, n_decoded_ * 3);
    fill_random_bf16(static_cast<uint16_t*>(v_.data), kTokenBytes / 4, n_decoded_ * 3 + 1);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      fill_random_bf16(static_cast<uint16_t*>(q_.data), kQHeads * kDim, n_decoded_ * 99 + layer);
      const double begin = now_s();
      const kvm_step_stats stats = step(layer, 1, true);
      out.seconds += now_s() - begin;
      out.compute_s += static_cast<double>(stats.compute_ns) * 1e-9;
      out.bytes_read += stats.bytes_read;
    }
    return out;
  }

  kvm_seq_id seq() const { return seq_; }

 private:
  kvm_step_stats step(uint32_t layer, uint32_t n_append, bool attend) {
    kvm_item item{};
    item.seq = seq_;
    item.append_position = KVM_POSITION_END;
    item.n_append = n_append;
    item.n_query = attend ? 1 : 0;
    item.query_position = KVM_POSITION_END;
    kvm_step_params params{};
    params.struct_size = sizeof(params);
    params.space = space_;
    params.layer_begin = layer;
    params.n_items = 1;
    params.items = &item;
    params.k = k_.tensor;
    params.v = v_.tensor;
    kvm_step_stats stats{};
    stats.struct_size = sizeof(stats);
    if (attend) {
      params.q = q_.tensor;
      params.o = o_.tensor;
      params.lse = lse_.tensor;
      require_ok(kvm_step(queue_, &params, &stats), "step");
    } else {
      require_ok(kvm_append(queue_, &params), "append");
    }
    return stats;
  }

  kvm_client* client_;
  kvm_queue* queue_;
  kvm_arena* arena_ = nullptr;
  kvm_space_id space_ = 0;
  kvm_seq_id seq_ = 0;
  uint64_t n_decoded_ = 0;
  ArenaTensor k_, v_, q_, o_, lse_;
};

}  // namespace

int run_ipc(const Options& options) {
  Report report("ipc", options);
  DaemonChild daemon(1, 256ull << 20);
  kvm_client* client = connect(daemon.socket_path());
  kvm_queue* spinning = make_queue(client, UINT64_MAX);
  add_ipc_case(report, spinning, "null", 1, 100000, 0);
  add_ipc_case(report, spinning, "batch16", 16, 20000, 0);
  kvm_queue_destroy(spinning);
  kvm_queue* sleeping = make_queue(client, 0);
  add_ipc_case(report, sleeping, "idle", 1, 500, 5000);
  kvm_queue_destroy(sleeping);
  kvm_client_close(client);
  return report.finish();
}

int run_decode(const Options& options) {
  Report report("decode", options);
  const uint32_t threads = options.threads != 0 ? options.threads : core_count();
  const uint64_t budget = memory_budget_bytes(options);
  constexpr uint64_t kModelTokenBytes = DecodeModel::kTokenBytes * DecodeModel::kLayers;
  // As long a context as memory allows, in whole blocks, with room for what is decoded.
  const uint64_t fits = (budget - std::min<uint64_t>(budget, 512ull << 20)) / kModelTokenBytes;
  const uint64_t tokens =
      std::min<uint64_t>(options.max_tokens, fits / DecodeModel::kBlock * DecodeModel::kBlock);
  if (tokens == 0) {
    require(Status(KVM_ERR_NO_MEMORY,
                   fmt::format("{} MB of memory are too little for 4,096 tokens", budget >> 20)),
            "decode");
  }
  if (tokens < options.max_tokens) {
    report.note(fmt::format("context shortened from {} tokens to what fits in {:.1f} GB",
                            options.max_tokens, static_cast<double>(budget) * 1e-9));
  }
  DaemonChild daemon(threads, tokens * kModelTokenBytes + (512ull << 20));
  kvm_client* client = connect(daemon.socket_path());
  kvm_queue* queue = make_queue(client, 0);
  {
    DecodeModel model(client, queue);
    const double fill_begin = now_s();
    model.fill(tokens);
    const double fill_s = now_s() - fill_begin;
    std::vector<double> seconds;
    std::vector<double> overhead;
    uint64_t bytes_read = 0;
    for (uint32_t i = 0; i < options.repeats + 1; ++i) {
      const DecodeModel::TokenStats token = model.decode();
      if (i > 0) {  // the first one warms up
        seconds.push_back(token.seconds);
        overhead.push_back((token.seconds - token.compute_s) / token.seconds);
        bytes_read = token.bytes_read;
      }
      // Over a quarter of the layers: the same pages, a fraction of the time.
      for (uint32_t layer = i % 4; layer < DecodeModel::kLayers; layer += 4) {
        daemon.run_ceiling(model.seq(), layer);
      }
    }
    const double gbps = static_cast<double>(bytes_read) * 1e-9 / median(seconds);
    const double ceiling_gbps = daemon.ceiling_bytes_per_s() * 1e-9;
    report.add({{"mode", "exact"},
                {"tokens", tokens},
                {"threads", threads},
                {"ms_per_token", median(seconds) * 1e3},
                {"tokens_per_s", 1.0 / median(seconds)},
                {"gbps", gbps},
                {"ceiling_gbps", ceiling_gbps},
                {"fraction", gbps / ceiling_gbps},
                {"ipc_overhead_fraction", median(overhead)},
                {"bytes_read", bytes_read},
                {"rss_bytes", daemon.rss_bytes()}});
    report.note(fmt::format("filled {:.1f} GB through the socket in {:.1f} s",
                            static_cast<double>(tokens * kModelTokenBytes) * 1e-9, fill_s));
  }
  kvm_queue_destroy(queue);
  kvm_client_close(client);
  return report.finish();
}

}  // namespace kvm::bench
