// SPDX-License-Identifier: Apache-2.0
// Sequences in device memory (device/) on a real device: whether steps, forks, graphs and moves
// give what fp64 arithmetic gives, and what a decode step costs. Once with a pool of this process,
// and once with one of another process, which keeps the books and is killed at the end.
#include <cuda_runtime.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/splitmix.h"
#include "bench/gpu/child.h"
#include "bench/gpu/device.h"
#include "device/batch.h"
#include "device/device_store.h"
#include "device/driver.h"
#include "device/remote_store.h"
#include "device/store_server.h"
#include "ipc/frame_channel.h"
#include "ipc/memory.h"

namespace kvm::bench::gpu {
namespace {

using device::AttendCall;
using device::Batch;
using device::BatchItem;
using device::BatchOptions;
using device::DeviceSequence;
using device::DeviceStore;
using device::DeviceTensor;
using device::SequenceStore;

// A store, what launches on it, and what its figures are called by.
struct Books {
  device::Driver* driver = nullptr;
  std::unique_ptr<SequenceStore> store;
  std::string name;
};

double now_us() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Ends the program, as check() does.
void must(const Status& status, const char* what) {
  if (!status.is_ok()) {
    std::fprintf(stderr, "%s: %s\n", what, std::string(status.message()).c_str());
    std::exit(2);
  }
}
template <class T>
T must(Result<T> result, const char* what) {
  must(result.status(), what);
  return std::move(result).value();
}

float number_of(uint64_t seed) {
  return bf16_to_f32(f32_to_bf16(static_cast<float>(splitmix64(seed) >> 40) * 0x1p-23f - 1.0f));
}

// K or V of a test: a function of the sequence's key, the layer, the head, the position.
uint64_t seed_of(uint64_t key, uint32_t layer, uint32_t head, uint64_t position, bool is_v) {
  return ((((key * 8 + layer) * 8 + head) * 8192 + position) * 2 + (is_v ? 1 : 0)) * 256;
}

constexpr uint32_t kLayers = 2, kQHeads = 8, kKvHeads = 2, kDim = 128;
constexpr uint32_t kMaxItems = 3, kMaxQuery = 4, kMaxRows = kMaxItems * kMaxQuery;

struct Stored {
  std::shared_ptr<DeviceSequence> seq;
  std::vector<uint64_t> keys;  // [position]
};

class Check {
 public:
  explicit Check(const Books& books) : store_(books.store.get()) {
    device::SpaceLayout layout;
    layout.dim = kDim;
    layout.scale = 0.1f;
    for (uint32_t i = 0; i < kLayers; ++i) {
      device::LayerLayout layer;
      layer.storage_layer = i;
      layer.n_q_heads = kQHeads;
      layer.n_kv_heads = kKvHeads;
      layer.classes = {{{0}, 0, 0, 0, 0, 0}, {{1}, 4, i == 0 ? 0u : 100u, 8, 0, 0}};
      layout.layers.push_back(layer);
    }
    space_ = must(store_->prepare(layout), "prepare");
    BatchOptions options;
    options.max_items = kMaxItems;
    options.max_append = 512;
    options.max_query = kMaxQuery;
    options.max_query_rows = kMaxRows;
    options.max_tokens = 4096;
    batch_ = must(Batch::create(books.driver, store_, space_, options), "batch");
    q_ = DeviceBuffer(kMaxRows * kQHeads * kDim * 2);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      k_.emplace_back(512 * kKvHeads * kDim * 2);
      v_.emplace_back(512 * kKvHeads * kDim * 2);
      o_.emplace_back(kMaxRows * kQHeads * kDim * 4);
      lse_.emplace_back(kMaxRows * kQHeads * 4);
    }
  }

  Stored create() { return {store_->create(space_).value(), {}}; }
  Stored fork(const Stored& parent) {
    return {must(store_->fork(*parent.seq, parent.keys.size()), "fork"), parent.keys};
  }

  // Appends n tokens of `key` to each sequence and compares a query row of each, or the rows of a
  // tree.
  bool step(const std::string& name, std::vector<std::pair<Stored*, uint32_t>> shares, uint64_t key,
            bool by_graph, const std::vector<uint64_t>& tree = {});

 private:
  void fill(const std::vector<std::pair<Stored*, uint32_t>>& shares, uint64_t key);
  void launch() {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      must(batch_->append(layer, tensor(k_[layer], Dtype::kBf16), tensor(v_[layer], Dtype::kBf16),
                          stream_.get()),
           "append");
      AttendCall call;
      call.layer = layer;
      call.q = tensor(q_, Dtype::kBf16);
      call.o = tensor(o_[layer], Dtype::kF32);
      call.lse = tensor(lse_[layer], Dtype::kF32);
      must(batch_->attend(call, stream_.get()), "attend");
    }
  }
  static DeviceTensor tensor(const DeviceBuffer& of, Dtype dtype) {
    return {of.data(), of.size(), dtype, 0, 0};
  }
  double error_of(const Stored& of, const std::vector<uint64_t>& tree, uint32_t row, uint32_t layer,
                  const float* o, const uint16_t* q) const;

  SequenceStore* store_;
  Stream stream_;
  std::shared_ptr<const device::SpaceLayout> space_;
  std::unique_ptr<Batch> batch_;
  DeviceBuffer q_;
  std::vector<DeviceBuffer> k_, v_, o_, lse_;
  std::vector<uint16_t> queries_;
  cudaGraphExec_t graph_ = nullptr;
};

void Check::fill(const std::vector<std::pair<Stored*, uint32_t>>& shares, uint64_t key) {
  queries_.resize(kMaxRows * kQHeads * kDim);
  for (size_t i = 0; i < queries_.size(); ++i) {
    queries_[i] = f32_to_bf16(number_of(key * 7919 + i));
  }
  check(cudaMemcpy(q_.data(), queries_.data(), queries_.size() * 2, cudaMemcpyHostToDevice), "q");
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (const bool is_v : {false, true}) {
      std::vector<uint16_t> rows;
      for (const auto& [of, n] : shares) {
        for (uint64_t p = of->keys.size() - n; p < of->keys.size(); ++p) {
          for (uint32_t i = 0; i < kKvHeads * kDim; ++i) {
            rows.push_back(
                f32_to_bf16(number_of(seed_of(of->keys[p], layer, i / kDim, p, is_v) + i % kDim)));
          }
        }
      }
      check(cudaMemcpy((is_v ? v_ : k_)[layer].data(), rows.data(), rows.size() * 2,
                       cudaMemcpyHostToDevice),
            "rows");
    }
  }
  check(cudaStreamSynchronize(nullptr), "rows");  // as upload() does
}

// Largest relative error over the heads of one row: the last one, or row `row` of a tree.
double Check::error_of(const Stored& of, const std::vector<uint64_t>& tree, uint32_t row,
                       uint32_t layer, const float* o, const uint16_t* q) const {
  double worst = 0;
  const uint64_t n = of.keys.size();
  const uint64_t first = n - std::max<uint64_t>(tree.size(), 1);
  for (uint32_t h = 0; h < kQHeads; ++h) {
    const uint32_t head = h / (kQHeads / kKvHeads);
    std::vector<double> sum(kDim);
    double total = 0;
    for (uint64_t p = 0; p < n; ++p) {
      const bool dropped = layer == 1 && head == 1 && p >= 4 && p + 100 <= first + row;
      if (dropped || (!tree.empty() && p >= first && (tree[row] >> (p - first) & 1) == 0)) {
        continue;
      }
      double logit = 0;
      for (uint32_t i = 0; i < kDim; ++i) {
        logit += static_cast<double>(bf16_to_f32(q[h * kDim + i])) *
                 number_of(seed_of(of.keys[p], layer, head, p, false) + i);
      }
      const double weight = std::exp(logit * 0.1f);
      total += weight;
      for (uint32_t i = 0; i < kDim; ++i) {
        sum[i] += weight * number_of(seed_of(of.keys[p], layer, head, p, true) + i);
      }
    }
    double wrong = 0, norm = 0;
    for (uint32_t i = 0; i < kDim; ++i) {
      const double expected = sum[i] / total;
      wrong += (o[h * kDim + i] - expected) * (o[h * kDim + i] - expected);
      norm += expected * expected;
    }
    const double error = std::sqrt(wrong / norm);
    worst = error > worst || std::isnan(error) ? error : worst;
  }
  return worst;
}

bool Check::step(const std::string& name, std::vector<std::pair<Stored*, uint32_t>> shares,
                 uint64_t key, bool by_graph, const std::vector<uint64_t>& tree) {
  std::vector<BatchItem> items;
  const auto n_query = static_cast<uint32_t>(std::max<size_t>(tree.size(), 1));
  uint32_t n_rows = 0;
  for (const auto& [of, n] : shares) {
    const auto query_row = static_cast<uint32_t>(items.size()) * n_query;
    items.push_back({of->seq, n, n_rows, n_query, query_row, tree});
    n_rows += n;
    of->keys.insert(of->keys.end(), n, key);
  }
  stream_.wait();
  fill(shares, key);
  must(batch_->update(items, stream_.get()), "update");
  if (!by_graph) {
    launch();
  } else {
    if (graph_ == nullptr) {
      check(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal), "capture");
      launch();
      cudaGraph_t graph = nullptr;
      check(cudaStreamEndCapture(stream_.get(), &graph), "capture");
      check(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
      check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    }
    check(cudaGraphLaunch(graph_, stream_.get()), "cudaGraphLaunch");
  }
  stream_.wait();
  double worst = 0;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    std::vector<float> o(shares.size() * n_query * kQHeads * kDim);
    check(cudaMemcpy(o.data(), o_[layer].data(), o.size() * 4, cudaMemcpyDeviceToHost), "o");
    for (uint32_t i = 0; i < shares.size() * n_query; ++i) {
      const double error =
          error_of(*shares[i / n_query].first, tree, i % n_query, layer,
                   o.data() + i * kQHeads * kDim, queries_.data() + i * kQHeads * kDim);
      worst = error > worst || std::isnan(error) ? error : worst;
    }
  }
  return print_bar({"engine o", name, "relative", worst, 0, 5e-3, false});
}

bool check_engine(const Books& books) {
  SequenceStore* const store = books.store.get();
  Check check(books);
  Stored a = check.create(), b = check.create();
  bool right = check.step("prefill", {{&a, 300}, {&b, 70}}, 1, false);
  right = check.step("decode", {{&a, 1}, {&b, 1}}, 2, false) && right;
  Stored c = check.fork(a);
  right = check.step("fork", {{&a, 1}, {&c, 3}}, 3, false) && right;
  for (uint64_t key = 4; key < 80; ++key) {
    right =
        check.step("graph " + std::to_string(key), {{&a, 1}, {&b, 2}, {&c, 1}}, key, true) && right;
  }
  // Two branches behind one root, and a row that sees none of them.
  const std::vector<uint64_t> tree = {1, 3, 5, 0};
  right = check.step("tree", {{&a, 4}, {&b, 5}}, 85, false, tree) && right;
  right = check.step("tree by graph", {{&a, 1}, {&b, 4}, {&c, 4}}, 86, true, tree) && right;
  const Stream side;
  must(store->spill(b.seq.get(), 0, UINT64_MAX, side.get()), "spill");
  right = check.step("one on the host", {{&a, 1}, {&c, 1}}, 90, false) && right;
  must(store->fetch(b.seq.get(), 0, UINT64_MAX, side.get()), "fetch");
  right = check.step("fetched", {{&a, 1}, {&b, 1}}, 91, true) && right;
  for (const Stored* of : {&a, &b, &c}) {
    store->clear(of->seq.get());
  }
  return right;
}

// 32 layers of 32 q heads, 8 kv heads, 128 channels, all sequences of one length.
void time_steps(const Books& books, uint32_t n_items, uint32_t n_tokens, const Args& args) {
  SequenceStore* const store = books.store.get();
  constexpr uint32_t kAll = 32, kChunk = 512;
  device::SpaceLayout layout;
  layout.dim = kDim;
  layout.scale = 0.088f;
  for (uint32_t i = 0; i < kAll; ++i) {
    device::LayerLayout layer;
    layer.storage_layer = i;
    layer.n_q_heads = 32;
    layer.n_kv_heads = 8;
    layer.classes = {{{0, 1, 2, 3, 4, 5, 6, 7}, 0, 0, 0, 0, 0}};
    layout.layers.push_back(layer);
  }
  const auto space = must(store->prepare(layout), "prepare");
  BatchOptions options;
  options.max_items = n_items;
  options.max_append = std::max(n_items, kChunk);
  options.max_query_rows = n_items;
  options.max_tokens = n_tokens + 512;
  auto batch = must(Batch::create(books.driver, store, space, options), "batch");
  const Stream stream;
  const DeviceBuffer rows(uint64_t{options.max_append} * 8 * kDim * 2);
  const DeviceBuffer q(uint64_t{n_items} * 32 * kDim * 2), o(uint64_t{n_items} * 32 * kDim * 2);
  fill_random(rows.data(), rows.size(), stream.get());
  fill_random(q.data(), q.size(), stream.get());
  const DeviceTensor kv{rows.data(), rows.size(), Dtype::kBf16, 0, 0};
  AttendCall call;
  call.q = {q.data(), q.size(), Dtype::kBf16, 0, 0};
  call.o = {o.data(), o.size(), Dtype::kBf16, 0, 0};
  std::vector<BatchItem> items;
  for (uint32_t i = 0; i < n_items; ++i) {
    items.push_back({store->create(space).value(), 0, 0, 0, 0});
  }
  for (BatchItem& item : items) {
    for (uint32_t done = 0; done < n_tokens; done += kChunk) {
      item.n_append = std::min(kChunk, n_tokens - done);
      must(batch->update({&item, 1}, stream.get()), "prefill");
      for (uint32_t layer = 0; layer < kAll; ++layer) {
        must(batch->append(layer, kv, kv, stream.get()), "append");
      }
    }
  }
  stream.wait();
  for (uint32_t i = 0; i < n_items; ++i) {
    items[i].n_append = items[i].n_query = 1;
    items[i].append_row = items[i].query_row = i;
  }
  const auto launch = [&] {
    for (uint32_t layer = 0; layer < kAll; ++layer) {
      must(batch->append(layer, kv, kv, stream.get()), "append");
      call.layer = layer;
      must(batch->attend(call, stream.get()), "attend");
    }
  };
  cudaGraphExec_t graph = nullptr;
  std::vector<double> updates, launches, steps, by_graph;
  const uint32_t repeats = args.quick ? 20 : 60;
  for (uint32_t i = 0; i < 2 * repeats; ++i) {
    const double begin = now_us();
    must(batch->update(items, stream.get()), "update");
    const double updated = now_us();
    if (i < repeats) {
      launch();
      launches.push_back((now_us() - updated) / (2 * kAll));
    } else {
      if (graph == nullptr) {
        cudaGraph_t captured = nullptr;
        check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "capture");
        launch();
        check(cudaStreamEndCapture(stream.get(), &captured), "capture");
        check(cudaGraphInstantiate(&graph, captured, 0), "cudaGraphInstantiate");
        check(cudaGraphDestroy(captured), "cudaGraphDestroy");
      }
      check(cudaGraphLaunch(graph, stream.get()), "cudaGraphLaunch");
    }
    stream.wait();
    updates.push_back(updated - begin);
    (i < repeats ? steps : by_graph).push_back((now_us() - begin) * 1e-3);
  }
  check(cudaGraphExecDestroy(graph), "cudaGraphExecDestroy");
  const std::string name = std::to_string(n_items) + " x " + std::to_string(n_tokens) + " tokens";
  print_figure(books.name + " update", name, "us on the host", median(updates));
  print_figure(books.name + " launch", name, "us on the host a call", median(launches));
  print_figure(books.name + " step", name, "ms", median(steps));
  print_figure(books.name + " step in a graph", name, "ms", median(by_graph));

  // Copies are on streams of whoever has the books. Those that come back wait for those that leave,
  // and an update for those that come back.
  std::vector<double> moves;
  const auto spilled_bytes = [store] { return must(store->figures(), "figures").spilled_bytes; };
  const uint64_t spilled_before = spilled_bytes();
  BatchItem moved;
  moved.seq = items[0].seq;
  for (uint32_t i = 0; i < 5; ++i) {
    const double begin = now_us();
    if (!store->spill(moved.seq.get(), 0, UINT64_MAX, stream.get()).is_ok()) {
      break;  // longer than host memory for it
    }
    must(store->fetch(moved.seq.get(), 0, UINT64_MAX, stream.get()), "fetch");
    must(batch->update({&moved, 1}, stream.get()), "update");
    stream.wait();
    moves.push_back(now_us() - begin);
  }
  if (!moves.empty()) {
    const double bytes = 2 * static_cast<double>(spilled_bytes() - spilled_before) /
                         static_cast<double>(moves.size());
    print_figure(books.name + " there and back", name, "GB/s", bytes / median(moves) * 1e-3);
  }
  for (const BatchItem& item : items) {
    store->clear(item.seq.get());
  }
}

device::DeviceStoreOptions options_of(const Args& args, uint64_t free_bytes) {
  device::DeviceStoreOptions options;
  options.pool_bytes = std::min(free_bytes / 5 * 4, args.max_bytes);
  options.host_bytes = uint64_t{args.quick ? 1u : 4u} << 30;
  return options;
}

int check_and_time(const Books& books, const Args& args) {
  const bool right = check_engine(books);
  if (!args.small) {
    const std::pair<uint32_t, uint32_t> cases[] = {{1, 16384}, {16, 4096}, {64, 2048}};
    for (const auto& [n_items, n_tokens] : cases) {
      time_steps(books, n_items, n_tokens, args);
    }
  }
  print_fact(books.name, "all", right ? "right" : "WRONG");
  return right ? 0 : 1;
}

// The books are kept, and moves in flight, and who keeps them is killed: how long until the stream
// has come to its end, and a call has said so.
void time_its_death(Books* books, Child* server) {
  device::SpaceLayout layout;
  layout.dim = kDim;
  device::LayerLayout layer;
  layer.n_q_heads = layer.n_kv_heads = 8;
  layer.classes = {{{0, 1, 2, 3, 4, 5, 6, 7}, 0, 0, 0, 0, 0}};
  layout.layers = {layer};
  const auto space = must(books->store->prepare(layout), "prepare");
  BatchOptions options;
  options.max_append = 1 << 18;
  options.max_tokens = 1 << 19;
  auto batch = must(Batch::create(books->driver, books->store.get(), space, options), "batch");
  const Stream stream;
  BatchItem item;
  item.seq = must(books->store->create(space), "create");
  item.n_append = 1 << 18;
  must(batch->update({&item, 1}, stream.get()), "update");
  must(books->store->spill(item.seq.get(), 0, UINT64_MAX, stream.get()), "spill");
  must(books->store->fetch(item.seq.get(), 0, UINT64_MAX, stream.get()), "fetch");
  item.n_append = 0;
  must(batch->update({&item, 1}, stream.get()), "update");  // waits, on the stream, for the fetch
  server->kill_now();
  const double begin = now_us();
  while (books->store->figures().is_ok()) {
  }
  const double told = now_us();
  stream.wait();
  print_figure("server death", "until a call says so", "us", told - begin);
  print_figure("server death", "until the stream has ended", "us", now_us() - begin);
}

}  // namespace

int run_engine(const Args& args) {
  auto driver = must(device::open_driver(0), "open_driver");
  const device::DeviceStoreOptions options = options_of(args, driver->facts().free_bytes);
  Books books{driver.get(), nullptr, "engine"};
  books.store = must(DeviceStore::open(std::move(driver), options), "store");
  return check_and_time(books, args);
}

int run_server(const Args& args) {
  Child server("keeper");
  auto ends = must(ipc::FrameChannel::make_pair(), "channel");
  auto words = must(
      ipc::create_shared_memory("words", sizeof(device::wire::Words), ipc::PeerAccess::kReadWrite),
      "words");
  auto driver = must(device::open_driver(0), "open_driver");
  const device::DeviceStoreOptions options = options_of(args, driver->facts().free_bytes);
  server.link().send(static_cast<double>(options.pool_bytes), ends.first.get());
  server.link().send(static_cast<double>(options.host_bytes), words.fd.get());
  ends.first.reset();
  Books books{driver.get(), nullptr, "server"};
  books.store = must(device::RemoteStore::open(std::move(driver), std::move(ends.second),
                                               std::move(words.mapping), {}),
                     "server");
  const int status = check_and_time(books, args);
  time_its_death(&books, &server);
  return status;
}

int keep_books(const Link& link) {
  const std::optional<Link::Message> pool = link.receive(), host = link.receive();
  if (!pool.has_value() || !host.has_value()) {
    return 2;
  }
  const ipc::Fd words(host->fd);
  auto driver = must(device::open_driver(0), "open_driver");
  device::Budget budget(static_cast<uint64_t>(pool->value));
  device::StoreServer server(
      driver.get(), &budget, ipc::Fd(pool->fd),
      must(ipc::map_shared_memory(words, sizeof(device::wire::Words), ipc::PeerAccess::kReadWrite),
           "words"));
  (void)server.serve({budget.capacity(), static_cast<uint64_t>(host->value)});
  return 0;
}

}  // namespace kvm::bench::gpu
