// SPDX-License-Identifier: Apache-2.0
// kvmctl bench: a quick measured check of a running kvmd, as one more client of it. kvm-bench
// judges kvm against ceilings; this tells an operator what a client gets here and now.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tools/kvmctl/cli.h"

namespace kvm::tools {
namespace {

// One layer of an 8B-class model.
constexpr uint32_t kQHeads = 32;
constexpr uint32_t kKvHeads = 8;
constexpr uint32_t kDim = 128;
constexpr uint32_t kChunk = 512;  // tokens of an append
constexpr size_t kMinSamples = 20;
constexpr const char* kSpaceName = "kvmctl-bench";
// Weights times values are bf16 products: docs/kernels.md has the bound, this is far beyond it.
constexpr double kTolerance = 0.02;

struct BenchOptions {
  uint32_t tokens = 16384;
  double seconds = 1;
};

using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

struct Latencies {
  std::vector<double> us;

  double at(double share) const {
    return us[std::min(us.size() - 1, static_cast<size_t>(share * static_cast<double>(us.size())))];
  }
  // Runs f until the time is over and there are some samples.
  void sample(double seconds, const std::function<void()>& f) {
    const Clock::time_point begin = Clock::now();
    while (us.size() < kMinSamples || us_since(begin) < seconds * 1e6) {
      const Clock::time_point start = Clock::now();
      f();
      us.push_back(us_since(start));
    }
    std::sort(us.begin(), us.end());
  }
  Json json() const {
    return {{"count", us.size()},
            {"p50_us", at(0.5)},
            {"p90_us", at(0.9)},
            {"p99_us", at(0.99)},
            {"max_us", us.back()}};
  }
  std::vector<std::string> row(std::string name, std::string rate) const {
    return {std::move(name),
            std::to_string(us.size()),
            fmt::format("{:.1f}", at(0.5)),
            fmt::format("{:.1f}", at(0.9)),
            fmt::format("{:.1f}", at(0.99)),
            fmt::format("{:.1f}", us.back()),
            std::move(rate)};
  }
};

uint16_t to_bf16(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

float from_bf16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float out = 0;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}

// A Rig is a client's side of the bench: a space, a sequence, a queue and tensors. Gives all back.
class Rig {
 public:
  Rig(kvm_client* client, uint32_t tokens) : client_(client) {
    kvm_space_params space{};
    space.struct_size = sizeof(space);
    space.name = kSpaceName;
    space.n_layers = 1;
    space.n_q_heads = kQHeads;
    space.n_kv_heads = kKvHeads;
    space.head_dim_k = kDim;
    check(kvm_space_register(client, &space, &space_), "space");
    check(kvm_queue_create(client, nullptr, &queue_), "queue");
    check(kvm_arena_create(client, nullptr, &arena_), "arena");
    k_ = tensor(kChunk * kKvHeads * kDim * 2, KVM_DTYPE_BF16);
    v_ = tensor(kChunk * kKvHeads * kDim * 2, KVM_DTYPE_BF16);
    q_ = tensor(kQHeads * kDim * 2, KVM_DTYPE_BF16);
    o_ = tensor(kQHeads * kDim * 4, KVM_DTYPE_F32);
    lse_ = tensor(kQHeads * 4, KVM_DTYPE_F32);
    fill(k_, kChunk * kKvHeads * kDim, 1);
    fill(v_, kChunk * kKvHeads * kDim, 2);
    fill(q_, kQHeads * kDim, 3);
    n_chunks_ = std::max(1u, tokens / kChunk);
  }
  ~Rig() {
    if (seq_ != 0) {
      kvm_seq_free(client_, seq_);
    }
    kvm_arena_destroy(arena_);
    kvm_queue_destroy(queue_);
    kvm_space_drop(client_, space_);  // Busy while another bench runs, which drops it then.
  }
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  // Appends the whole context, chunk by chunk; every chunk is the same.
  void append(Latencies* latencies) {
    check(kvm_seq_create(client_, space_, nullptr, &seq_), "sequence");
    kvm_item item{};
    item.seq = seq_;
    item.append_position = KVM_POSITION_END;
    item.n_append = kChunk;
    kvm_step_params step = request(&item);
    step.k = k_;
    step.v = v_;
    for (uint32_t i = 0; i < n_chunks_; ++i) {
      const Clock::time_point start = Clock::now();
      check(kvm_append(queue_, &step), "append");
      latencies->us.push_back(us_since(start));
    }
    std::sort(latencies->us.begin(), latencies->us.end());
  }

  kvm_step_stats attend() {
    kvm_item item{};
    item.seq = seq_;
    item.n_query = 1;
    item.query_position = KVM_POSITION_END;
    kvm_step_params step = request(&item);
    step.q = q_;
    step.o = o_;
    step.lse = lse_;
    step.mode = KVM_MODE_EXACT;
    kvm_step_stats stats{};
    stats.struct_size = sizeof(stats);
    check(kvm_attend(queue_, &step, &stats), "attend");
    return stats;
  }

  // Checks that the last answer is right: over n equal chunks o is that of one, and lse ln n more.
  bool is_right() const {
    const auto* o = static_cast<const float*>(data(o_));
    const auto* lse = static_cast<const float*>(data(lse_));
    for (uint32_t head = 0; head < kQHeads; ++head) {
      std::vector<double> expected(kDim);
      const double expected_lse = reference(head, &expected) + std::log(n_chunks_);
      double error = 0;
      double norm = 0;
      for (uint32_t i = 0; i < kDim; ++i) {
        const double difference = static_cast<double>(o[head * kDim + i]) - expected[i];
        error += difference * difference;
        norm += expected[i] * expected[i];
      }
      // Written so that NaN fails.
      if (!(std::sqrt(error / norm) < kTolerance) ||
          !(std::abs(static_cast<double>(lse[head]) - expected_lse) < kTolerance)) {
        return false;
      }
    }
    return true;
  }

  uint64_t n_tokens() const { return uint64_t{n_chunks_} * kChunk; }

 private:
  kvm_tensor tensor(uint64_t size, uint32_t dtype) {
    kvm_tensor out{};
    out.dtype = dtype;
    check(kvm_arena_alloc(arena_, size, 0, &out.buffer), "buffer");
    return out;
  }
  void* data(const kvm_tensor& tensor) const { return kvm_arena_data(arena_, tensor.buffer); }
  void fill(const kvm_tensor& tensor, size_t n, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    auto* values = static_cast<uint16_t*>(data(tensor));
    std::generate(values, values + n, [&] { return to_bf16(normal(random)); });
  }
  kvm_step_params request(const kvm_item* item) const {
    kvm_step_params step{};
    step.struct_size = sizeof(step);
    step.space = space_;
    step.n_items = 1;
    step.items = item;
    return step;
  }
  // Attention of a head over one chunk, in double; returns lse.
  double reference(uint32_t head, std::vector<double>* o) const {
    const auto* k = static_cast<const uint16_t*>(data(k_));
    const auto* v = static_cast<const uint16_t*>(data(v_));
    const auto* q = static_cast<const uint16_t*>(data(q_)) + head * kDim;
    const uint32_t kv_head = head / (kQHeads / kKvHeads);
    std::vector<double> logits(kChunk);
    double largest = -std::numeric_limits<double>::infinity();
    for (uint32_t t = 0; t < kChunk; ++t) {
      const uint16_t* key = k + (t * kKvHeads + kv_head) * kDim;
      for (uint32_t i = 0; i < kDim; ++i) {
        logits[t] += static_cast<double>(from_bf16(q[i])) * static_cast<double>(from_bf16(key[i]));
      }
      logits[t] /= std::sqrt(static_cast<double>(kDim));
      largest = std::max(largest, logits[t]);
    }
    double sum = 0;
    for (uint32_t t = 0; t < kChunk; ++t) {
      const double weight = std::exp(logits[t] - largest);
      const uint16_t* value = v + (t * kKvHeads + kv_head) * kDim;
      sum += weight;
      for (uint32_t i = 0; i < kDim; ++i) {
        (*o)[i] += weight * static_cast<double>(from_bf16(value[i]));
      }
    }
    for (double& x : *o) {
      x /= sum;
    }
    return largest + std::log(sum);
  }

  kvm_client* client_;
  kvm_space_id space_ = 0;
  kvm_seq_id seq_ = 0;
  kvm_queue* queue_ = nullptr;
  kvm_arena* arena_ = nullptr;
  kvm_tensor k_{}, v_{}, q_{}, o_{}, lse_{};
  uint32_t n_chunks_ = 0;
};

struct BenchResult {
  Latencies ping;
  Latencies append;
  Latencies attend;
  double compute_p50_us = 0;
  double append_tokens_per_s = 0;
  double attend_bytes_per_s = 0;
  bool is_right = false;
  uint64_t n_other_requests = 0;
  uint64_t n_tokens = 0;
};

BenchResult measure(const Connection& connection, const BenchOptions& options) {
  BenchResult result;
  const kvm_stats before = connection.stats();
  result.ping.sample(options.seconds,
                     [&] { check(kvm_client_ping(connection.get(), nullptr), "ping"); });
  uint64_t n_own = result.ping.us.size();
  Rig rig(connection.get(), options.tokens);
  result.n_tokens = rig.n_tokens();
  rig.append(&result.append);
  std::vector<double> compute_us;
  uint64_t bytes_read = 0;
  result.attend.sample(options.seconds, [&] {
    const kvm_step_stats stats = rig.attend();
    compute_us.push_back(static_cast<double>(stats.compute_ns) * 1e-3);
    bytes_read = stats.bytes_read;
  });
  result.is_right = rig.is_right();
  n_own += result.append.us.size() + result.attend.us.size() + 1;  // and one for the sequence
  const uint64_t n_all = connection.stats().n_requests - before.n_requests;
  result.n_other_requests = n_all > n_own ? n_all - n_own : 0;
  std::sort(compute_us.begin(), compute_us.end());
  result.compute_p50_us = compute_us[compute_us.size() / 2];
  result.append_tokens_per_s = kChunk / (result.append.at(0.5) * 1e-6);
  result.attend_bytes_per_s = static_cast<double>(bytes_read) / (result.attend.at(0.5) * 1e-6);
  return result;
}

void print_bench_json(const BenchResult& result) {
  Json append = result.append.json();
  append["tokens_per_second"] = result.append_tokens_per_s;
  Json attend = result.attend.json();
  attend["compute_p50_us"] = result.compute_p50_us;
  attend["bytes_per_second"] = result.attend_bytes_per_s;
  print_json({{"geometry",
               {{"q_heads", kQHeads},
                {"kv_heads", kKvHeads},
                {"head_dim", kDim},
                {"codec", "bf16"},
                {"tokens", result.n_tokens},
                {"append_tokens", kChunk}}},
              {"ping", result.ping.json()},
              {"append", append},
              {"attend", attend},
              {"answer_is_right", result.is_right},
              {"other_requests", result.n_other_requests}});
}

int run_bench(const Common& common, const BenchOptions& options) {
  const Connection connection(common);
  const BenchResult result = measure(connection, options);
  if (common.json) {
    print_bench_json(result);
    return result.is_right ? kExitOk : kExitCheck;
  }
  fmt::print("One layer of {} query and {} kv heads of {}, bf16; {} tokens. Times in us.\n\n",
             kQHeads, kKvHeads, kDim, result.n_tokens);
  print_table({{"", "COUNT", "P50", "P90", "P99", "MAX", ""},
               result.ping.row("ping", ""),
               result.append.row(fmt::format("append {}", kChunk),
                                 fmt::format("{:.0f} tokens/s", result.append_tokens_per_s)),
               result.attend.row("attend, exact", fmt::format("{:.1f} GB/s, computing {:.1f}",
                                                              result.attend_bytes_per_s * 1e-9,
                                                              result.compute_p50_us))});
  fmt::print("\nThe answer is {}. Requests of others meanwhile: {}.\n",
             result.is_right ? "right" : "WRONG", result.n_other_requests);
  return result.is_right ? kExitOk : kExitCheck;
}

}  // namespace

void add_bench_command(Cli* cli) {
  const auto options = std::make_shared<BenchOptions>();
  CLI::App* bench =
      cli->add("bench", "a quick measured check: ping, append and exact attention, as a client",
               [options](const Common& common) { return run_bench(common, *options); });
  bench->add_option("--tokens", options->tokens, "length of the context, in steps of 512")
      ->type_name("N")
      ->check(CLI::Range(512, 1 << 22))
      ->capture_default_str();
  bench->add_option("--seconds", options->seconds, "for ping and for attend")
      ->type_name("SECONDS")
      ->check(seconds_between(0.01, 600))
      ->capture_default_str();
}

}  // namespace kvm::tools
