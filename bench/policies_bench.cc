// SPDX-License-Identifier: Apache-2.0
// policies: what the four policies save and cost, against heads that keep everything. The engine
// alone, in this process; its driver is this thread, as the daemon's dispatcher would be.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/harness.h"

namespace kvm::bench {
namespace {

constexpr uint32_t kQHeads = 32;
constexpr uint32_t kKvHeads = 8;
constexpr uint32_t kDim = 128;
constexpr uint64_t kRowBytes = uint64_t{kKvHeads} * kDim * sizeof(uint16_t);  // K of a token
constexpr uint32_t kChunk = 4096;                                             // of an append
constexpr uint32_t kCommitLayers = 4;
constexpr uint32_t kCommitTokens = 32768;
constexpr uint32_t kSmallTokens = 256;

// A policy for the kv heads [first_head, kKvHeads); the others keep everything. Or a preset of this
// name, at a length of n_tokens.
struct Setting {
  std::string name;
  uint32_t first_head;
  kvm_policy_params policy;
  bool is_preset = false;
  uint64_t n_tokens = 0;
};

// Adds a preset's entries to a space. Two of eight heads retrieve where it has a table of heads.
kvm_status add_preset(const Setting& setting, uint32_t n_layers, SpaceSpec* spec) {
  kvm_preset_params params{};
  params.struct_size = sizeof(params);
  params.name = setting.name.c_str();
  params.n_layers = n_layers;
  params.n_tokens = setting.n_tokens;
  std::vector<uint64_t> masks;
  for (uint32_t layer = 0; layer < n_layers; ++layer) {
    masks.insert(masks.end(), {0xfc, 0});
  }
  if (setting.name == "duo_attention" || setting.name == "razor_attention") {
    params.kv_head_masks = masks.data();
  }
  spec->layers.resize(n_layers);
  spec->policies.resize(n_layers);
  spec->codecs.resize(n_layers);
  kvm_preset preset{};
  preset.struct_size = sizeof(preset);
  preset.n_layer_params = preset.n_policies = preset.n_codecs = n_layers;
  preset.layers = spec->layers.data();
  preset.policies = spec->policies.data();
  preset.codecs = spec->codecs.data();
  const kvm_status status = kvm_policy_preset(&params, &preset);
  spec->layers.resize(status == KVM_OK ? preset.n_layer_params : 0);
  spec->policies.resize(status == KVM_OK ? preset.n_policies : 0);
  spec->codecs.resize(status == KVM_OK ? preset.n_codecs : 0);
  return status;
}

// At a length of n tokens, as the published systems run. `preset`: this one, beside heads that keep
// everything; empty: all.
std::vector<Setting> settings(uint64_t n_tokens, const std::string& preset = {}) {
  if (!preset.empty()) {
    return {{"full", kKvHeads, {}}, {preset, 0, {}, true, n_tokens}};
  }
  const uint64_t fifth = std::max<uint64_t>(4000, n_tokens / 5);
  return {
      {"full", kKvHeads, {}},
      {"streaming_llm",
       0,
       {.retention = KVM_RETAIN_SINKS_RECENT,
        .positions = KVM_POSITIONS_IN_CACHE,
        .n_sinks = 4,
        .n_recent = 1020}},
      {"duo_attention", 2, {.retention = KVM_RETAIN_SINKS_RECENT, .n_sinks = 64, .n_recent = 256}},
      {"razor_attention",
       1,
       {.retention = KVM_RETAIN_SINKS_RECENT_FOLD, .n_sinks = 4, .n_recent = fifth}},
      {"heavy_hitters", 0, {.retention = KVM_RETAIN_HEAVY, .n_recent = 512, .n_heavy = 512}},
  };
}

// Rows for requests, of random numbers.
struct Rows {
  explicit Rows(uint64_t n_tokens)
      : k(n_tokens * kRowBytes / 2), v(k.size()), q(n_tokens * kQHeads * kDim), o(q.size()) {
    fill_random_bf16(k.data(), k.size(), 1);
    fill_random_bf16(v.data(), v.size(), 2);
    // Small, so that attention is spread and no row stands out.
    fill_random_bf16(q.data(), q.size(), 3);
    for (uint16_t& x : q) {
      x = static_cast<uint16_t>(x - (4u << 7));
    }
  }
  template <typename T>
  static TensorView view(std::vector<T>& data, uint32_t dtype) {
    return {data.data(), data.size() * sizeof(T), dtype, 0, 0, 0};
  }

  std::vector<uint16_t> k;
  std::vector<uint16_t> v;
  std::vector<uint16_t> q;
  std::vector<float> o;
};

class Rig {
 public:
  Rig(const Options& options, uint64_t capacity_bytes) {
    engine::EngineOptions engine_options;
    engine_options.n_threads = options.threads;
    engine_options.host_capacity_bytes = capacity_bytes;
    engine_ = require(engine::Engine::open(engine_options), "engine");
    client_ = engine_->add_client({});
  }
  engine::Engine& engine() { return *engine_; }
  engine::ClientId client() const { return client_; }

  kvm_space_id space(const Setting& setting, uint32_t n_layers) {
    SpaceSpec spec;
    spec.name = fmt::format("{}.{}.{}", setting.name, n_layers, ++n_spaces_);
    spec.params.struct_size = sizeof(kvm_space_params);
    spec.params.n_layers = n_layers;
    spec.params.n_q_heads = kQHeads;
    spec.params.n_kv_heads = kKvHeads;
    spec.params.head_dim_k = kDim;
    spec.params.codec = KVM_CODEC_BF16;
    spec.params.rope_layout = KVM_ROPE_HALF;
    spec.params.n_rope_pairs = kDim / 2;
    for (uint32_t i = 0; i < kDim / 2; ++i) {
      spec.rope_inv_freq.push_back(
          std::pow(10000.0f, -static_cast<float>(i) / static_cast<float>(kDim / 2)));
    }
    if (setting.is_preset) {
      require(Status(add_preset(setting, n_layers, &spec), kvm_last_error()), "--policy");
    } else if (setting.first_head < kKvHeads) {
      kvm_policy_params policy = setting.policy;
      policy.n_layers = n_layers;
      policy.kv_head_mask[0] = (uint64_t{1} << kKvHeads) - (uint64_t{1} << setting.first_head);
      spec.policies.push_back(policy);
    }
    return require(engine_->register_space(spec), "space");
  }
  kvm_seq_id create(kvm_space_id space, uint32_t flags = 0, engine::ClientId client = 0) {
    SeqRequest request;
    request.space = space;
    request.flags = flags;
    kvm::RequestResult result = run(*engine_, client == 0 ? client_ : client, std::move(request));
    require(result.status, "sequence");
    return result.seq;
  }
  void verb(SeqVerb which, kvm_seq_id seq) {
    SeqRequest request;
    request.verb = which;
    request.seq = seq;
    request.n_tokens = KVM_POSITION_END;
    require(run(*engine_, client_, std::move(request)).status, "sequence");
  }
  // Appends n_append tokens and attends with the last n_query.
  static StepRequest step(kvm_space_id space, kvm_seq_id seq, uint32_t layer, uint32_t n_append,
                          uint32_t n_query, Rows& rows) {
    StepRequest request;
    request.space = space;
    request.layer_begin = layer;
    request.append = n_append != 0;
    request.attend = n_query != 0;
    kvm_item item{};
    item.seq = seq;
    item.append_position = KVM_POSITION_END;
    item.n_append = n_append;
    item.n_query = n_query;
    item.query_position = KVM_POSITION_END;
    request.items = {item};
    if (request.append) {
      request.k = Rows::view(rows.k, KVM_DTYPE_BF16);
      request.v = Rows::view(rows.v, KVM_DTYPE_BF16);
    }
    if (request.attend) {
      request.q = Rows::view(rows.q, KVM_DTYPE_BF16);
      request.o = Rows::view(rows.o, KVM_DTYPE_F32);
    }
    return request;
  }
  // Seconds that it took. Between tasks the driver looks for what has ended, as the daemon's does.
  double timed(StepRequest&& request, engine::ClientId client = 0) {
    const double begin = now_s();
    double end = 0;
    engine_->submit(client == 0 ? client_ : client, {}, std::move(request),
                    [&end](kvm::RequestResult&& result) {
                      require(result.status, "step");
                      end = now_s();
                    });
    for (engine_->poll(); end == 0; engine_->poll()) {
      engine_->work();
    }
    return end - begin;
  }

 private:
  std::unique_ptr<engine::Engine> engine_;
  engine::ClientId client_ = 0;
  uint32_t n_spaces_ = 0;
};

// Bytes, and times of a token, at a length; heads that keep everything are filled first and stay.
void add_lengths(const Options& options, uint64_t n_tokens, Report* report) {
  Rig rig(options, 3 * n_tokens * 2 * kRowBytes + (uint64_t{1} << 30));
  Rows rows(kChunk);
  const std::vector<Setting> all = settings(n_tokens, options.policy);
  std::vector<kvm_space_id> spaces;
  std::vector<kvm_seq_id> seqs;
  std::vector<double> append_ns;
  std::vector<std::vector<double>> steps(all.size());
  for (const Setting& setting : all) {
    spaces.push_back(rig.space(setting, 1));
    // The second time the pool has its memory.
    std::vector<double> seconds;
    for (int i = 0; i < 2; ++i) {
      if (i != 0) {
        rig.verb(SeqVerb::kFree, seqs.back());
        seqs.pop_back();
      }
      seqs.push_back(rig.create(spaces.back()));
      double sum = 0;
      for (uint64_t at = 0; at < n_tokens; at += kChunk) {
        sum += rig.timed(Rig::step(spaces.back(), seqs.back(), 0, kChunk, 0, rows));
      }
      seconds.push_back(sum);
    }
    append_ns.push_back(seconds.back() / static_cast<double>(n_tokens) * 1e9);
  }
  for (uint32_t i = 0; i < 64 + options.repeats; ++i) {
    for (size_t s = 0; s < all.size(); ++s) {
      steps[s].push_back(rig.timed(Rig::step(spaces[s], seqs[s], 0, 1, 1, rows)));
    }
  }
  const auto bytes = [&](size_t s) {
    return static_cast<double>(
        require(rig.engine().seq_info(rig.client(), seqs[s]), "sequence").bytes);
  };
  for (size_t s = 0; s < all.size(); ++s) {
    report->add({{"case", "length"},
                 {"policy", all[s].name},
                 {"tokens", n_tokens},
                 {"mb", bytes(s) * 1e-6},
                 {"bytes_ratio", bytes(s) / bytes(0)},
                 {"step_us", median(steps[s]) * 1e6},
                 {"step_ratio", median(steps[s]) / median(steps[0])},
                 {"append_ns", append_ns[s]},
                 {"append_ratio", append_ns[s] / append_ns[0]}});
  }
}

// A request of another client, again and again, until `done`.
std::vector<double> small_requests(Rig* rig, engine::ClientId other, kvm_space_id space,
                                   kvm_seq_id seq, Rows& rows, const std::function<bool()>& done) {
  std::vector<double> seconds;
  while (!done()) {
    seconds.push_back(rig->timed(Rig::step(space, seq, 0, 0, 1, rows), other));
  }
  return seconds;
}

// A long prompt is committed at once, by hand, while another client asks for little.
void add_commits(const Options& options, Report* report) {
  Rig rig(options, 2 * kCommitLayers * kCommitTokens * 2 * kRowBytes + (uint64_t{1} << 29));
  Rows rows(kChunk);
  const engine::ClientId other = rig.engine().add_client({});
  for (const Setting& setting : settings(kCommitTokens, options.policy)) {
    const kvm_space_id space = rig.space(setting, kCommitLayers);
    const kvm_seq_id small = rig.create(space, 0, other);
    rig.timed(Rig::step(space, small, 0, kSmallTokens, 0, rows), other);
    const kvm_seq_id seq = rig.create(space, KVM_SEQ_MANUAL_COMMIT);
    for (uint32_t layer = 0; layer < kCommitLayers; ++layer) {
      for (uint32_t at = 0; at < kCommitTokens; at += kChunk) {
        rig.timed(Rig::step(space, seq, layer, kChunk, 0, rows));
      }
    }
    int left = 2000;
    const std::vector<double> alone =
        small_requests(&rig, other, space, small, rows, [&left] { return --left < 0; });
    bool is_committed = false;
    SeqRequest commit;
    commit.verb = SeqVerb::kCommit;
    commit.seq = seq;
    commit.n_tokens = KVM_POSITION_END;
    const double begin = now_s();
    double end = begin;
    rig.engine().submit(rig.client(), {}, std::move(commit), [&](kvm::RequestResult&& result) {
      require(result.status, "commit");
      end = now_s();
      is_committed = true;
    });
    std::vector<double> beside =
        small_requests(&rig, other, space, small, rows, [&is_committed] { return is_committed; });
    while (!is_committed) {
      rig.engine().work();
      rig.engine().poll();
    }
    const double commit_ns = (end - begin) * 1e9 / (double{kCommitTokens} * kCommitLayers);
    report->add({{"case", "commit"},
                 {"policy", setting.name},
                 {"tokens", kCommitTokens},
                 {"layers", kCommitLayers},
                 {"commit_ms", (end - begin) * 1e3},
                 {"commit_ns", commit_ns},
                 {"n_small", beside.size()},
                 {"small_p99_us", percentile(beside, 0.99) * 1e6},
                 {"small_max_us", percentile(beside, 1.0) * 1e6},
                 {"alone_p99_us", percentile(alone, 0.99) * 1e6},
                 {"alone_max_us", percentile(alone, 1.0) * 1e6}});
    rig.verb(SeqVerb::kFree, seq);
  }
}

// Measures what attention mass costs: rows of a prompt over heads that keep all of it, and over
// heads that do so too but sum up.
void add_masses(const Options& options, Report* report) {
  constexpr uint32_t kTokens = 8192;
  Rig rig(options, uint64_t{2} << 30);
  Rows rows(kChunk);
  Setting summed = settings(kTokens).back();
  summed.policy.n_recent = 1 << 20;
  const Setting plain = settings(kTokens).front();
  for (const uint32_t n_query : {1u, 4u, 64u, 512u}) {
    std::vector<double> seconds[2];
    kvm_space_id spaces[2];
    kvm_seq_id seqs[2];
    for (int i = 0; i < 2; ++i) {
      spaces[i] = rig.space(i == 0 ? plain : summed, 1);
      seqs[i] = rig.create(spaces[i]);
      for (uint32_t at = 0; at < kTokens; at += kChunk) {
        rig.timed(Rig::step(spaces[i], seqs[i], 0, kChunk, 0, rows));
      }
    }
    for (uint32_t repeat = 0; repeat < options.repeats + 2; ++repeat) {
      for (int i = 0; i < 2; ++i) {
        seconds[i].push_back(rig.timed(Rig::step(spaces[i], seqs[i], 0, 0, n_query, rows)));
      }
    }
    report->add({{"case", "mass"},
                 {"tokens", kTokens},
                 {"rows", n_query},
                 {"plain_ms", median(seconds[0]) * 1e3},
                 {"summed_ms", median(seconds[1]) * 1e3},
                 {"mass_ratio", median(seconds[1]) / median(seconds[0])}});
    for (const kvm_seq_id seq : seqs) {
      rig.verb(SeqVerb::kFree, seq);
    }
  }
}

}  // namespace

int run_policies(const Options& options) {
  Report report("policies", options);
  SpaceSpec of_one_layer;
  if (!options.policy.empty() &&
      add_preset(settings(0, options.policy).back(), 1, &of_one_layer) != KVM_OK) {
    report.note(std::string("lengths are measured on one layer: ") + kvm_last_error());
    add_commits(options, &report);
    return report.finish();
  }
  for (const uint64_t n_tokens : {uint64_t{32768}, uint64_t{98304}}) {
    if (n_tokens <= options.max_tokens) {
      add_lengths(options, n_tokens, &report);
    }
  }
  add_commits(options, &report);
  if (options.policy.empty()) {
    add_masses(options, &report);
  }
  return report.finish();
}

}  // namespace kvm::bench
