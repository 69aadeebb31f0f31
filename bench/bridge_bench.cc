// SPDX-License-Identifier: Apache-2.0
// bridge: what the host's part of kvm_cuda_store and kvm_cuda_load reaches, behind a daemon.
//
// The device is a driver that forgets what it is told, so that rows are there as soon as they are
// asked for: what is left is the bridge, the arena, and the daemon's appends and reads of 32 layers
// of an 8B model. Bytes are those of the rows as they cross. Judged, between runs, by memcpy of as
// many bytes on as many threads as the daemon has, out of memory as large as the arena or into it,
// or of a piece of it again and again, which stays in the cache: whichever is faster.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bench/ceiling.h"
#include "bench/daemon_child.h"
#include "bench/harness.h"
#include "bench/null_driver.h"
#include "bench/service_client.h"
#include "client/embedded_bridge.h"
#include "device/device_store.h"

namespace kvm::bench {

namespace {

constexpr uint32_t kLayers = 32, kHeads = 8, kQHeads = 32, kDim = 128;
constexpr uint64_t kTokenBytes = uint64_t{kLayers} * kHeads * kDim * 2 * sizeof(uint16_t);
constexpr uint64_t kPoolBytes = uint64_t{1} << 40;
constexpr uint64_t kSlackBytes = uint64_t{512} << 20;  // of the daemon, beside pages
constexpr uint64_t kArenaBytes = uint64_t{64} << 20;   // of a bridge by default
constexpr uint64_t kCopyBytes = uint64_t{1} << 20;
constexpr uint32_t kBlockTokens = 512;  // appended at once

SpaceSpec device_space() {
  SpaceSpec spec;
  spec.name = "bridge";
  spec.params.n_layers = kLayers;
  spec.params.n_q_heads = kQHeads;
  spec.params.n_kv_heads = kHeads;
  spec.params.head_dim_k = spec.params.head_dim_v = kDim;
  spec.params.codec = KVM_CODEC_BF16;
  spec.params.softmax_scale = 0.088f;
  return spec;
}

// One client of a daemon, and a bridge between it and a device.
class Sides {
 public:
  Sides(const std::string& socket, const char* codec, uint64_t n_tokens) : host_(connect(socket)) {
    kvm_space_params space{};
    space.struct_size = sizeof space;
    space.name = codec;
    space.n_layers = kLayers;
    space.n_q_heads = kQHeads;
    space.n_kv_heads = kHeads;
    space.head_dim_k = kDim;
    space.codec = kvm_codec_find(codec);
    require_ok(kvm_space_register(host_, &space, &host_space_), "space");
    auto service = std::make_shared<client::DeviceService>(1);
    auto driver = std::make_unique<NullDriver>(kPoolBytes, 264, &counts_);
    service->driver = driver.get();
    service->store = require(
        device::DeviceStore::open(std::move(driver), {.pool_bytes = kPoolBytes, .host_bytes = 0}),
        "device");
    device_ = std::make_shared<client::DeviceClient>(std::move(service), 0);
    client::BridgeOptions options;
    options.host = host_;
    options.host_space = host_space_;
    options.space = require(device_->register_space(device_space()), "space on the device");
    options.max_tokens = n_tokens;
    bridge_ = require(client::DeviceBridge::create(device_, options), "bridge");
  }
  ~Sides() {
    bridge_ = nullptr;
    kvm_client_close(host_);
  }
  Sides(const Sides&) = delete;
  Sides& operator=(const Sides&) = delete;

  // A sequence of random numbers in host memory.
  kvm_seq_id make_source(uint64_t n_tokens) {
    kvm_seq_id seq = 0;
    require_ok(kvm_seq_create(host_, host_space_, nullptr, &seq), "sequence");
    kvm_queue* const queue = make_queue(host_, 0);
    std::vector<uint16_t> rows(size_t{kLayers} * kBlockTokens * kHeads * kDim);
    for (uint64_t n = 0; n < n_tokens; n += kBlockTokens) {
      fill_random_bf16(rows.data(), rows.size(), n + 1);
      kvm_item item{};
      item.seq = seq;
      item.append_position = n;
      item.n_append = kBlockTokens;
      kvm_step_params params{};
      params.struct_size = sizeof params;
      params.space = host_space_;
      params.n_layers = kLayers;
      params.n_items = 1;
      params.items = &item;
      params.k = params.v = kvm_host_tensor(rows.data(), rows.size() * 2, KVM_DTYPE_BF16);
      require_ok(kvm_append(queue, &params), "append");
    }
    kvm_queue_destroy(queue);
    return seq;
  }

  // Seconds of a copy of all of `source` to the device, and back.
  double load(kvm_seq_id source) {
    const double begin = now_s();
    on_device_ =
        require(bridge_->load({.source = source, .end = KVM_POSITION_END}, nullptr), "load");
    return now_s() - begin;
  }
  double store() {
    const double begin = now_s();
    const kvm_seq_id stored =
        require(bridge_->store({.source = on_device_, .end = KVM_POSITION_END}, nullptr), "store");
    const double took = now_s() - begin;
    require_ok(kvm_seq_free(host_, stored), "free");
    require(device_->seq({.verb = SeqVerb::kFree, .seq = on_device_}), "free on the device");
    return took;
  }

 private:
  kvm_client* const host_;
  kvm_space_id host_space_ = 0;
  NullCounts counts_;
  std::shared_ptr<client::DeviceClient> device_;
  std::unique_ptr<client::DeviceBridge> bridge_;
  kvm_seq_id on_device_ = 0;
};

}  // namespace

int run_bridge(const Options& options) {
  Report report("bridge", options);
  const uint32_t threads = thread_count(options);
  const uint64_t wanted = options.quick ? 2 * kBlockTokens : 8192;
  const uint64_t bytes = wanted * kTokenBytes;
  Team team(threads);
  std::vector<char> arena(kArenaBytes, 1), pages(bytes, 2);
  // Seconds of a copy of `bytes` between the two; of the arena, each thread goes round in so much.
  const auto copy = [&](bool is_store, uint64_t round_bytes) {
    return team.run([&](uint32_t thread) {
      const uint64_t part = pages.size() / team.size();
      char* const rows = arena.data() + thread * (arena.size() / team.size());
      for (uint64_t at = 0; at < part; at += kCopyBytes) {
        char *const page = pages.data() + thread * part + at, *const row = rows + at % round_bytes;
        std::memcpy(is_store ? page : row, is_store ? row : page, kCopyBytes);
      }
    });
  };
  const std::array<uint64_t, 2> rounds = {arena.size() / team.size() / kCopyBytes * kCopyBytes,
                                          kCopyBytes};
  for (const char* const codec : {"bf16", "int8", "int4"}) {
    // The source, and what is stored.
    DaemonChild daemon(threads, 2 * bytes + kSlackBytes);
    Sides sides(daemon.socket_path(), codec, wanted);
    const kvm_seq_id source = sides.make_source(wanted);
    std::vector<double> loads, stores;
    std::array<std::vector<double>, rounds.size()> copies_in, copies_out;
    for (uint32_t i = 0; i < options.repeats + 1; ++i) {
      const double load = sides.load(source), store = sides.store();
      if (i == 0) {  // touches new memory
        continue;
      }
      loads.push_back(load);
      stores.push_back(store);
      for (size_t kind = 0; kind < rounds.size(); ++kind) {
        copies_in[kind].push_back(copy(false, rounds[kind]));
        copies_out[kind].push_back(copy(true, rounds[kind]));
      }
    }
    const auto gbps = [&](const std::vector<double>& seconds) {
      return static_cast<double>(bytes) * 1e-9 / median(seconds);
    };
    const double in_gbps = std::max(gbps(copies_in[0]), gbps(copies_in[1]));
    const double out_gbps = std::max(gbps(copies_out[0]), gbps(copies_out[1]));
    report.add({{"codec", codec},
                {"tokens", wanted},
                {"threads", threads},
                {"store_gbps", gbps(stores)},
                {"store_copy_gbps", out_gbps},
                {"store_fraction", gbps(stores) / out_gbps},
                {"load_gbps", gbps(loads)},
                {"load_copy_gbps", in_gbps},
                {"load_fraction", gbps(loads) / in_gbps}});
  }
  return report.finish();
}

}  // namespace kvm::bench
