// SPDX-License-Identifier: Apache-2.0
// update: what a step of kvm_cuda.h costs the host, without what the CUDA runtime takes.
//
// kvm_cuda_update and the launches of all layers run over a driver that forgets what it is told.
// What CUDA adds goes by the calls, which are counted. Sequences stand at random places of their
// pages, as those of a serving engine do, or all at the same one, so that all need new pages in the
// same step; or each step appends a draft and takes part of it back, or chunks of prompts, which
// the prefill kernel attends, and takes them back whole.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/splitmix.h"
#include "bench/harness.h"
#include "bench/null_driver.h"
#include "client/embedded_device.h"
#include "device/device_store.h"
#include "device/remote_store.h"
#include "device/store_server.h"

namespace kvm::bench {
namespace {

constexpr uint32_t kHeads = 8, kQHeads = 32, kDim = 128;
constexpr uint32_t kBlocks = 264;  // of a decode kernel on an H200
constexpr uint64_t kTokens = 2048;
constexpr uint64_t kRoom = 8192;  // of a sequence
constexpr uint32_t kDraft = 4;    // tokens, of which half are taken back
constexpr uint32_t kChunk = 2048;

enum class Kind { kScattered, kTogether, kDrafts, kChunks };

// Tokens that a step appends to a sequence and asks, and how many of them the next one takes back.
constexpr uint32_t appended(Kind kind) {
  return kind == Kind::kChunks ? kChunk : kind == Kind::kDrafts ? kDraft : 1;
}
constexpr uint32_t taken_back(Kind kind) {
  return kind == Kind::kChunks ? kChunk : kind == Kind::kDrafts ? kDraft / 2 : 0;
}

struct Case {
  const char* name;
  Kind kind;
  uint32_t n_layers;
  uint32_t n_items;
  bool windows;  // every second layer attends to a window
  double bar_us;
};

constexpr Case kCases[] = {
    {"scattered", Kind::kScattered, 32, 256, false, 200},
    {"scattered", Kind::kScattered, 80, 256, false, 500},
    {"scattered", Kind::kScattered, 32, 1024, false, 0},
    {"windows", Kind::kScattered, 32, 256, true, 0},
    {"together", Kind::kTogether, 32, 256, false, 200},
    {"together", Kind::kTogether, 80, 256, false, 500},
    {"drafts", Kind::kDrafts, 32, 256, false, 200},
    {"drafts", Kind::kDrafts, 80, 256, false, 500},
    {"chunks", Kind::kChunks, 32, 1, false, 0},
    {"chunks", Kind::kChunks, 32, 4, false, 0},
};

constexpr uint64_t kPoolBytes = uint64_t{1} << 42;

// What kvmd does for one client, on a thread as there: the books, over a driver of its own.
class Server {
 public:
  Server() {
    auto ends = require(ipc::FrameChannel::make_pair(), "channel");
    auto words = require(ipc::create_shared_memory("words", sizeof(device::wire::Words),
                                                   ipc::PeerAccess::kReadWrite),
                         "words");
    server_ = std::make_unique<device::StoreServer>(&driver_, &budget_, std::move(ends.first),
                                                    std::move(words.mapping));
    channel_ = std::move(ends.second);
    words_ = std::move(words.fd);
    thread_ =
        std::thread([this] { (void)server_->serve({.pool_bytes = kPoolBytes, .host_bytes = 0}); });
  }
  // REQUIRES: its client has gone.
  ~Server() { thread_.join(); }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  std::unique_ptr<device::SequenceStore> open_store(std::unique_ptr<device::Driver> driver) {
    auto words = require(
        ipc::map_shared_memory(words_, sizeof(device::wire::Words), ipc::PeerAccess::kReadWrite),
        "words");
    return require(
        device::RemoteStore::open(std::move(driver), std::move(channel_), std::move(words), {}),
        "server");
  }

 private:
  NullCounts counts_;
  NullDriver driver_{kPoolBytes, kBlocks, &counts_};
  device::Budget budget_{kPoolBytes};
  std::unique_ptr<device::StoreServer> server_;
  ipc::Fd channel_, words_;
  std::thread thread_;
};

class Engine {
 public:
  // by_kvmd: another thread keeps the books, beyond a socket.
  Engine(const Case& of, bool by_kvmd) : case_(of) {
    auto service = std::make_shared<client::DeviceService>(1);
    auto driver = std::make_unique<NullDriver>(kPoolBytes, kBlocks, &counts_);
    service->driver = driver.get();
    if (by_kvmd) {
      server_ = std::make_unique<Server>();
      service->store = server_->open_store(std::move(driver));
    } else {
      service->store = require(
          device::DeviceStore::open(std::move(driver), {.pool_bytes = kPoolBytes, .host_bytes = 0}),
          "device");
    }
    client_ = std::make_unique<client::DeviceClient>(std::move(service), 0);
    SpaceSpec spec;
    spec.name = "update";
    spec.params.n_layers = of.n_layers;
    spec.params.n_q_heads = kQHeads;
    spec.params.n_kv_heads = kHeads;
    spec.params.head_dim_k = spec.params.head_dim_v = kDim;
    spec.params.codec = KVM_CODEC_BF16;
    spec.params.softmax_scale = 0.088f;
    for (uint32_t layer = 0; of.windows && layer < of.n_layers; ++layer) {
      kvm_layer_params params{};
      params.layer_begin = layer;
      params.n_layers = 1;
      params.window = layer % 2 == 0 ? 1024 : 0;
      spec.layers.push_back(params);
    }
    space_ = require(client_->register_space(spec), "space");
    device::BatchOptions options;
    options.max_items = of.n_items;
    options.max_query = appended(of.kind);
    options.max_append = std::max(of.n_items, 4u) * static_cast<uint32_t>(kRoom / 4);
    options.max_query_rows = of.n_items * options.max_query;
    options.max_tokens = kRoom;
    batch_ = require(client_->create_batch(space_, options), "batch");
    add_sequences(options.max_query);
  }
  ~Engine() { client_->destroy_batch(std::move(batch_)); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Seconds of one update.
  double update() {
    if (taken_back(case_.kind) != 0) {
      for (size_t i = 0; i < items_.size(); ++i) {
        lengths_[i] -= taken_back(case_.kind);
        require(client_->seq(
                    {.verb = SeqVerb::kTruncate, .seq = items_[i].seq, .n_tokens = lengths_[i]}),
                "truncate");
        lengths_[i] += appended(case_.kind);
      }
    }
    before_ = counts_;
    const double begin = now_s();
    require(client_->update(batch_.get(), items_.data(), case_.n_items, nullptr), "update");
    return now_s() - begin;
  }

  // Seconds of the launches of all layers.
  double launch() {
    const uint32_t n_rows = static_cast<uint32_t>(items_.size()) * items_[0].n_query;
    const auto tensor = [&](uint32_t heads) {
      return device::DeviceTensor{reinterpret_cast<uint8_t*>(4096),
                                  uint64_t{n_rows} * heads * kDim * 2, Dtype::kBf16, 0, 0};
    };
    const double begin = now_s();
    require(client_->with_batch(batch_.get(),
                                [&](device::Batch& batch) -> Status {
                                  for (uint32_t layer = 0; layer < case_.n_layers; ++layer) {
                                    KVM_TRY(batch.append(layer, tensor(kHeads), tensor(kHeads),
                                                         nullptr));
                                    device::AttendCall call;
                                    call.layer = layer;
                                    call.q = call.o = tensor(kQHeads);
                                    KVM_TRY(batch.attend(call, nullptr));
                                  }
                                  return Status::ok();
                                }),
            "launch");
    return now_s() - begin;
  }

  // Of the last update.
  NullCounts counts() const {
    return {counts_.n_copies - before_.n_copies, counts_.copied_bytes - before_.copied_bytes,
            counts_.n_launches - before_.n_launches, counts_.n_events - before_.n_events};
  }

 private:
  void add_sequences(uint32_t n_query) {
    for (uint32_t i = 0; i < case_.n_items; ++i) {
      const kvm_seq_id seq =
          require(client_->seq({.verb = SeqVerb::kCreate, .space = space_}), "sequence");
      const uint64_t more = case_.kind == Kind::kTogether ? 0 : splitmix64(i) % kTokens;
      lengths_.push_back(kTokens / 2 + taken_back(case_.kind) + more);
      kvm_cuda_item item{};
      item.seq = seq;
      item.n_append = static_cast<uint32_t>(lengths_.back());
      require(client_->update(batch_.get(), &item, 1, nullptr), "prompt");
      item.n_append = item.n_query = n_query;
      item.append_row = item.query_row = i * n_query;
      items_.push_back(item);
    }
  }

  const Case case_;
  std::unique_ptr<Server> server_;  // outlives its client
  NullCounts counts_, before_;
  std::unique_ptr<client::DeviceClient> client_;
  kvm_space_id space_ = 0;
  std::unique_ptr<device::Batch> batch_;
  std::vector<kvm_cuda_item> items_;
  std::vector<uint64_t> lengths_;
};

std::vector<std::pair<Case, bool>> cases() {
  std::vector<std::pair<Case, bool>> all;
  for (const bool by_kvmd : {false, true}) {
    for (const Case& of : kCases) {
      all.emplace_back(of, by_kvmd);
    }
  }
  return all;
}

}  // namespace

int run_update(const Options& options) {
  Report report("update", options);
  for (const auto& [of, by_kvmd] : cases()) {
    Engine engine(of, by_kvmd);
    (void)engine.update();  // all page tables
    std::vector<double> updates, launches;
    NullCounts most;
    const uint32_t n_steps = options.quick ? 70 : 1024;
    for (uint32_t step = 0; step < n_steps; ++step) {
      updates.push_back(engine.update());
      const NullCounts counts = engine.counts();
      most.n_copies = std::max(most.n_copies, counts.n_copies);
      most.copied_bytes = std::max(most.copied_bytes, counts.copied_bytes);
      most.n_launches = std::max(most.n_launches, counts.n_launches);
      most.n_events = std::max(most.n_events, counts.n_events);
      launches.push_back(engine.launch());
    }
    const double p50 = median(updates) * 1e6;
    report.add({{"case", of.name},
                {"books", by_kvmd ? "kvmd" : "own"},
                {"layers", of.n_layers},
                {"sequences", of.n_items},
                {"update_p50_us", p50},
                {"update_p99_us", percentile(updates, 0.99) * 1e6},
                {"launches_p50_us", median(launches) * 1e6},
                {"copies", most.n_copies},
                {"copied_kib", static_cast<double>(most.copied_bytes) / 1024},
                {"kernels", most.n_launches},
                {"events", most.n_events}});
    if (of.bar_us != 0) {
      report.note(fmt::format("{}, {} layers, {} sequences{}: p50 {:.0f} us (<= {:.0f}): {}",
                              of.name, of.n_layers, of.n_items, by_kvmd ? ", books of kvmd" : "",
                              p50, of.bar_us, p50 <= of.bar_us ? "pass" : "FAIL"));
    }
  }
  return report.finish();
}

}  // namespace kvm::bench
