// SPDX-License-Identifier: Apache-2.0
// decode: tokens of a whole model through the daemon's socket, one kvm_step a layer, in one or
// several modes. Every token is decoded in each mode in turn, from the same state, so that an
// approximate answer meets the exact one of the same step; what a mode leaves in the caches is of
// the layers that came last, not of the one that comes first.
//
// The daemon's own code runs in a child process of the bench, so that the read ceiling can be taken
// there, over the very pages that attention reads, between the steps that it judges.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "bench/daemon_child.h"
#include "bench/decode_model.h"
#include "bench/harness.h"
#include "bench/service_client.h"
#include "kvm.h"

namespace kvm::bench {

namespace {

constexpr double kTargetError = 0.03;
constexpr uint64_t kSlackBytes = 512ull << 20;  // of the daemon, beside pages and indexes

struct Mode {
  std::string name;
  StepMode step;
  std::vector<double> seconds, compute_s, overhead, errors;
  TokenStats last;
};

uint64_t index_bytes(kvm_client* client) {
  kvm_stats stats{};
  stats.struct_size = sizeof(stats);
  require_ok(kvm_get_stats(client, &stats), "stats");
  return stats.index_bytes;
}

class DecodeRun {
 public:
  DecodeRun(const Options& options, uint64_t tokens, Report* report)
      : options_(options),
        report_(report),
        threads_(thread_count(options)),
        tokens_(tokens),
        data_(options.data.empty() ? "model" : options.data[0]),
        daemon_(threads_, tokens * bytes_per_token(options) + kSlackBytes),
        client_(connect(daemon_.socket_path())),
        queue_(make_queue(client_, 0)),
        model_(std::make_unique<DecodeModel>(client_, queue_, tokens, is_approximate(options))) {}
  ~DecodeRun() {
    model_.reset();
    kvm_queue_destroy(queue_);
    kvm_client_close(client_);
  }
  DecodeRun(const DecodeRun&) = delete;
  DecodeRun& operator=(const DecodeRun&) = delete;

  static bool is_approximate(const Options& options) {
    return std::any_of(options.modes.begin(), options.modes.end(),
                       [](const std::string& mode) { return mode != "exact"; });
  }
  // Memory of the daemon: pages, and indexes where there are some.
  static uint64_t bytes_per_token(const Options& options) {
    constexpr uint64_t kPages = DecodeModel::kTokenBytes * DecodeModel::kLayers;
    constexpr uint64_t kIndexes = uint64_t{40} * DecodeModel::kKvHeads * DecodeModel::kLayers;
    return kPages + (is_approximate(options) ? kIndexes : 0);
  }

  void run() {
    const double begin = now_s();
    // One token more for warming up.
    model_->fill(data_, options_.repeats + 1, threads_);
    report_->note(fmt::format(
        "filled {:.1f} GB through the socket in {:.1f} s; data: {}, {} layers of distinct heads, "
        "each the content of {} layers' own pages",
        static_cast<double>(tokens_) * DecodeModel::kTokenBytes * DecodeModel::kLayers * 1e-9,
        now_s() - begin, data_, DecodeModel::kDataLayers,
        DecodeModel::kLayers / DecodeModel::kDataLayers));
    make_modes();
    for (uint32_t i = 0; i < options_.repeats + 1; ++i) {
      decode_token(i > 0);
      // Over a quarter of the layers: the same pages, a fraction of the time.
      for (uint32_t layer = i % 4; layer < DecodeModel::kLayers; layer += 4) {
        daemon_.run_ceiling(model_->seq(), layer);
      }
    }
    for (const Mode& mode : modes_) {
      add_row(mode);
    }
  }

 private:
  // Exact comes first, asked for or not: the others are judged by it.
  void make_modes() {
    modes_.push_back({"exact", {}, {}, {}, {}, {}, {}});
    if (is_approximate(options_)) {
      build_index();
      budget_ = options_.budget > 0
                    ? static_cast<uint64_t>(options_.budget * static_cast<double>(tokens_))
                    : find_budget();
    }
    for (const std::string& name : options_.modes) {
      Mode mode;
      mode.name = name;
      mode.step.delta = 0.1f;
      mode.step.eps = static_cast<float>(kTargetError);
      if (name == "sampled" || name == "topk") {
        mode.step.mode = name == "topk" ? KVM_MODE_TOPK : KVM_MODE_SAMPLED;
        mode.step.budget = budget_;
      } else if (name == "sampled_eps" || name == "verified") {
        mode.step.mode = name == "verified" ? KVM_MODE_VERIFIED : KVM_MODE_SAMPLED;
      } else if (name == "auto") {
        mode.step.mode = KVM_MODE_AUTO;
      } else {
        continue;
      }
      modes_.push_back(std::move(mode));
    }
  }

  void build_index() {
    const double begin = now_s();
    for (uint32_t layer = 0; layer < DecodeModel::kLayers; ++layer) {
      model_->attend(layer, 0, {KVM_MODE_SAMPLED, 1, 0, 0});
    }
    const double seconds = now_s() - begin;
    const uint64_t bytes = index_bytes(client_);
    const double keys = static_cast<double>(tokens_) * DecodeModel::kKvHeads * DecodeModel::kLayers;
    index_bytes_per_key_ = static_cast<double>(bytes) / keys;
    report_->note(
        fmt::format("indexed in {:.1f} s: {:.2f} GB, {:.1f} B and {:.0f} ns a token and "
                    "kv head ({} threads)",
                    seconds, static_cast<double>(bytes) * 1e-9, index_bytes_per_key_,
                    seconds * 1e9 / keys, threads_));
  }

  // The smallest budget with the target's mean error over two query sets of each layer of data.
  uint64_t find_budget() {
    constexpr uint32_t kProbes = 2 * DecodeModel::kDataLayers;
    const auto attend = [&](uint32_t probe, const StepMode& mode) {
      const uint32_t layer = probe % DecodeModel::kDataLayers;
      model_->attend(layer, probe / DecodeModel::kDataLayers, mode);
      return model_->o(layer);
    };
    std::vector<std::vector<float>> exact;
    for (uint32_t probe = 0; probe < kProbes; ++probe) {
      const auto o = attend(probe, {});
      exact.emplace_back(o.begin(), o.end());
    }
    const auto n = static_cast<double>(tokens_);
    double low = std::log(5e-4), high = std::log(0.25);
    for (int step = 0; step < 8; ++step) {
      const double middle = 0.5 * (low + high);
      const auto budget = static_cast<uint64_t>(std::max(1.0, std::exp(middle) * n));
      std::vector<double> errors;
      for (uint32_t probe = 0; probe < kProbes; ++probe) {
        add_errors(attend(probe, {KVM_MODE_SAMPLED, budget, 0, 0}), exact[probe], &errors);
      }
      (mean(errors) <= kTargetError ? high : low) = middle;
    }
    return static_cast<uint64_t>(std::max(1.0, std::exp(high) * n));
  }

  static double mean(const std::vector<double>& x) {
    return x.empty() ? 0 : std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size());
  }

  void decode_token(bool counts) {
    std::vector<std::vector<float>> exact;
    for (Mode& mode : modes_) {
      if (!exact.empty()) {
        model_->undo();
      }
      mode.last = model_->decode(mode.step);
      if (counts) {
        mode.seconds.push_back(mode.last.seconds);
        mode.compute_s.push_back(mode.last.compute_s);
        mode.overhead.push_back((mode.last.seconds - mode.last.compute_s) / mode.last.seconds);
      }
      for (uint32_t layer = 0; layer < DecodeModel::kLayers; ++layer) {
        const auto o = model_->o(layer);
        if (exact.size() <= layer) {
          exact.emplace_back(o.begin(), o.end());
        } else if (counts) {
          add_errors(o, exact[layer], &mode.errors);
        }
      }
    }
  }

  void add_row(const Mode& mode) {
    const double seconds = median(mode.seconds);
    const double exact_seconds = median(modes_[0].seconds);
    const double gbps = static_cast<double>(mode.last.bytes_read) * 1e-9 / seconds;
    std::vector<std::pair<std::string, nlohmann::json>> fields = {
        {"data", data_},
        {"mode", mode.name},
        {"tokens", tokens_},
        {"threads", threads_},
        {"ms_per_token", seconds * 1e3},
        {"tokens_per_s", 1.0 / seconds},
        {"speedup", exact_seconds / seconds},
        {"rel_error_mean", mean(mode.errors)},
        {"rel_error_p99", percentile(mode.errors, 0.99)},
        {"keys_read_fraction",
         static_cast<double>(mode.last.keys_read) / static_cast<double>(mode.last.keys_present)},
        {"bytes_fraction", static_cast<double>(mode.last.bytes_read) /
                               static_cast<double>(modes_[0].last.bytes_read)},
        {"gbps", gbps},
        {"ipc_overhead_fraction", median(mode.overhead)},
        {"bytes_read", mode.last.bytes_read},
        {"rss_bytes", daemon_.rss_bytes()}};
    if (mode.name == "exact") {
      const double ceiling_gbps = daemon_.ceiling_bytes_per_s() * 1e-9;
      fields.emplace_back("ceiling_gbps", ceiling_gbps);
      fields.emplace_back("fraction", gbps / ceiling_gbps);
    } else {
      fields.emplace_back("budget",
                          static_cast<double>(mode.step.budget) / static_cast<double>(tokens_));
      fields.emplace_back("exact_rows_fraction", static_cast<double>(mode.last.n_exact) /
                                                     (DecodeModel::kLayers * DecodeModel::kQHeads));
      fields.emplace_back("index_bytes_per_token", index_bytes_per_key_);
    }
    report_->add(std::move(fields));
    if (mode.name != "exact") {
      report_->note(fmt::format(
          "{}: {:.1f} ms a token where exact takes {:.1f}: {:.2f} times as fast, mean error {:.1f} "
          "%, 99 % of the heads within {:.1f} %, {:.1f} % of the bytes",
          mode.name, seconds * 1e3, exact_seconds * 1e3, exact_seconds / seconds,
          100 * mean(mode.errors), 100 * percentile(mode.errors, 0.99),
          100.0 * static_cast<double>(mode.last.bytes_read) /
              static_cast<double>(modes_[0].last.bytes_read)));
    }
  }

  const Options& options_;
  Report* report_;
  uint32_t threads_;
  uint64_t tokens_;
  std::string data_;
  DaemonChild daemon_;
  kvm_client* client_;
  kvm_queue* queue_;
  std::unique_ptr<DecodeModel> model_;
  std::vector<Mode> modes_;
  uint64_t budget_ = 0;
  double index_bytes_per_key_ = 0;
};

// As long a context as memory allows, in whole blocks, with room for what is decoded and for one
// layer of the data on its way.
uint64_t choose_tokens(const Options& options, Report* report) {
  const uint64_t budget = memory_budget_bytes(options);
  const uint64_t token_bytes = DecodeRun::bytes_per_token(options) + 2 * DecodeModel::kTokenBytes;
  const uint64_t fits = (budget - std::min(budget, kSlackBytes)) / token_bytes;
  const uint64_t tokens =
      std::min<uint64_t>(options.max_tokens, fits / DecodeModel::kBlock * DecodeModel::kBlock);
  if (tokens < 2 * kMinTokens) {
    require(Status(KVM_ERR_NO_MEMORY,
                   fmt::format("{} MB of memory are too little for 4,096 tokens, or --max-tokens "
                               "is below {}",
                               budget >> 20, 2 * kMinTokens)),
            "decode");
  }
  if (tokens < options.max_tokens) {
    report->note(fmt::format("context shortened from {} tokens to what fits in {:.1f} GB",
                             options.max_tokens, static_cast<double>(budget) * 1e-9));
  }
  return tokens;
}

}  // namespace

int run_decode(const Options& options) {
  Report report("decode", options);
  report.hide({"data", "rel_error_p99", "tokens_per_s", "bytes_read", "rss_bytes",
               "exact_rows_fraction", "index_bytes_per_token"});
  if (options.repeats + 1 > DecodeModel::kMaxHeldTokens) {
    require(Status(KVM_ERR_INVALID, fmt::format("--repeats is {}; at most {} tokens are decoded",
                                                options.repeats, DecodeModel::kMaxHeldTokens - 1)),
            "decode");
  }
  DecodeRun(options, choose_tokens(options, &report), &report).run();
  return report.finish();
}

}  // namespace kvm::bench
