// SPDX-License-Identifier: Apache-2.0
// policies: what published systems save and cost, against layers that keep everything. The engine
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
constexpr uint32_t kSmallTokens = 256;    // of what another client asks for
constexpr uint32_t kMiddleTokens = 8192;  // likewise
constexpr uint32_t kRoom = 64;            // entries of a preset

// Token t reaches layers [0, n_first) and [n_layers - n_last(t), n_layers). `n_last` is the number
// of all layers at t = 0 and never grows.
struct Depth {
  uint32_t n_first = 0;
  std::function<uint32_t(uint64_t token)> n_last{};  // empty: all, always
};

// A system, as a space of n_layers has it at a length of n_tokens.
struct Setting {
  std::string name;
  uint32_t n_layers = 0;
  // Bytes, of those of layers that keep everything, as its page in docs/policies says; without what
  // pages of 64 tokens add. Negative: nobody has said.
  double formula = -1;
  std::vector<kvm_layer_params> layers{};
  std::vector<kvm_policy_params> policies{};
  std::vector<kvm_codec_params> codecs{};
  std::vector<kvm_index_params> indexes{};
  uint32_t default_mode = 0;
  uint64_t default_budget = 0;
  Depth depth{};

  bool is_alias(uint32_t layer) const {
    return std::any_of(layers.begin(), layers.end(), [&](const kvm_layer_params& entry) {
      return entry.kind == KVM_LAYER_ALIAS && entry.layer_begin <= layer &&
             layer < entry.layer_begin + entry.n_layers;
    });
  }
  // Layers that decoding skips: their prompt is given up.
  bool is_skipped(uint32_t layer) const {
    return std::any_of(policies.begin(), policies.end(), [&](const kvm_policy_params& entry) {
      return entry.retention == KVM_RETAIN_PROMPT && entry.layer_begin <= layer &&
             layer < entry.layer_begin + entry.n_layers;
    });
  }
  bool reaches(uint32_t layer, uint64_t token, bool is_prompt) const {
    if (depth.n_last != nullptr && layer >= depth.n_first &&
        layer < n_layers - depth.n_last(token)) {
      return false;
    }
    return is_prompt || !is_skipped(layer);
  }
};

// Fills a setting with a preset's entries. `mask`: kv heads that do not retrieve, of every layer;
// systems without a table of heads do not look at it.
Status fill_from_preset(uint64_t n_tokens, uint64_t mask, Setting* setting) {
  kvm_preset_params params{};
  params.struct_size = sizeof(params);
  params.name = setting->name.c_str();
  params.n_layers = setting->n_layers;
  params.n_tokens = n_tokens;
  std::vector<uint64_t> masks;
  for (uint32_t layer = 0; layer < setting->n_layers; ++layer) {
    masks.insert(masks.end(), {mask, 0});
  }
  if (setting->name == "duo_attention" || setting->name == "razor_attention") {
    params.kv_head_masks = masks.data();
  }
  setting->layers.resize(kRoom);
  setting->policies.resize(kRoom);
  setting->codecs.resize(kRoom);
  setting->indexes.resize(kRoom);
  kvm_preset preset{};
  preset.struct_size = sizeof(preset);
  preset.n_layer_params = preset.n_policies = preset.n_codecs = preset.n_indexes = kRoom;
  preset.layers = setting->layers.data();
  preset.policies = setting->policies.data();
  preset.codecs = setting->codecs.data();
  preset.indexes = setting->indexes.data();
  const kvm_status status = kvm_policy_preset(&params, &preset);
  if (status != KVM_OK) {
    return Status(status, kvm_last_error());
  }
  setting->layers.resize(preset.n_layer_params);
  setting->policies.resize(preset.n_policies);
  setting->codecs.resize(preset.n_codecs);
  setting->indexes.resize(preset.n_indexes);
  setting->default_mode = preset.default_mode;
  setting->default_budget = preset.default_budget;
  return Status::ok();
}

Setting full(uint32_t n_layers) { return {.name = "full", .n_layers = n_layers, .formula = 1}; }

// SkipDecode: 8 to 4 of 8 layers, of which the first warms up, over n_tokens.
Depth falling_depth(uint32_t n_layers, uint64_t n_tokens) {
  constexpr uint32_t kWarmUp = 1;
  return {kWarmUp, [=](uint64_t token) {
            const double fallen =
                n_layers / 2.0 * static_cast<double>(token) / static_cast<double>(n_tokens - 1);
            const uint32_t n_fallen =
                std::min(n_layers / 2, static_cast<uint32_t>(std::lround(fallen)));
            return n_layers - n_fallen - kWarmUp;
          }};
}

// The systems, as they are published, at a length of n_tokens. `only`: the one of this name; empty:
// all that are measured.
std::vector<Setting> settings(uint64_t n_tokens, const std::string& only = {}) {
  std::vector<Setting> all;
  const auto n = static_cast<double>(n_tokens);
  const auto add = [&](const char* name, uint32_t n_layers, double formula, uint64_t mask = 0) {
    if (only.empty() || only == name) {
      all.push_back({.name = name, .n_layers = n_layers, .formula = formula});
      require(fill_from_preset(n_tokens, mask, &all.back()), name);
    }
  };
  // Rows in a codec of so many bits a channel, of 16.
  const auto bits = [](double of_k, double of_v) { return (of_k + of_v) / 32; };
  add("streaming_llm", 4, 1024 / n);
  add("duo_attention", 4, 0.25 + 0.75 * (64 + 256) / n, 0xfc);
  const double of_razor = (4 + std::max(4000.0, n / 5)) / n;
  add("razor_attention", 4, 0.125 + 0.875 * std::min(1.0, of_razor), 0xfe);
  add("h2o", 4, 0.2);
  add("mikv", 4, 0.2 + 0.8 * bits(2.75, 2.5));
  add("alisa", 4, bits(8.125, 8.125));
  add("d2o", 8, (3 + 5 * (0.2 + 4 / n)) / 8);
  add("kivi3", 4, bits(3.5, 3.5));
  add("kivi4", 4, bits(4.5, 4.5));
  add("gear4", 4, bits(6, 5.75));
  add("gear3", 4, bits(5, 4.75));
  add("yi_lightning", 4, 0.25 + 0.75 * std::min(1.0, 4096 / n));
  add("yi_lightning", 8, 0.125 + 0.75 * std::min(1.0, 4096 / n));
  // Of two rows one direction, two factors, and of 4 tokens in 64 the other row and which it is.
  constexpr double kTwoRows = 2 * 2 * kDim;
  add("minicache", 4, 0.5 + 0.5 * (0.5 + (8 + 4.0 / 64 * (2 * kDim + 2)) / kTwoRows));
  add("skip_decode", 8, 0.75);
  if (!all.empty() && all.back().name == "skip_decode") {
    all.back().depth = falling_depth(8, n_tokens);
  }
  add("unified_layer_skipping", 8, 0.5);
  add("memory_mosaics", 2, (1 + 255 / n) / 2);
  if (all.empty()) {
    Setting other{.name = only, .n_layers = 4};
    require(fill_from_preset(n_tokens, 0xfc, &other), "--policy");
    all.push_back(std::move(other));
  }
  return all;
}

// Rows for requests, of random numbers, for n_layers layers at once.
struct Rows {
  explicit Rows(uint64_t n_tokens, uint32_t n_layers = 1)
      : layer_elements(n_tokens * kRowBytes / 2),
        k(n_layers * layer_elements),
        v(k.size()),
        q(n_tokens * kQHeads * kDim),
        o(q.size()) {
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

  TensorView of_layers(std::vector<uint16_t>& data) const {
    TensorView made = view(data, KVM_DTYPE_BF16);
    made.stride_layer = layer_elements;
    return made;
  }

  uint64_t layer_elements;
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

  kvm_space_id space(const Setting& setting) {
    SpaceSpec spec;
    spec.name = fmt::format("{}.{}.{}", setting.name, setting.n_layers, ++n_spaces_);
    spec.params.struct_size = sizeof(kvm_space_params);
    spec.params.n_layers = setting.n_layers;
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
    spec.layers = setting.layers;
    spec.policies = setting.policies;
    spec.codecs = setting.codecs;
    spec.indexes = setting.indexes;
    spec.params.default_mode = setting.default_mode;
    spec.params.default_budget = setting.default_budget;
    return require(engine_->register_space(spec), "space");
  }
  kvm_seq_id create(kvm_space_id space, uint32_t flags = 0, engine::ClientId client = 0) {
    SeqRequest request;
    request.space = space;
    request.flags = flags;
    return made(std::move(request), client);
  }
  kvm_seq_id fork(kvm_seq_id seq) {
    SeqRequest request;
    request.verb = SeqVerb::kFork;
    request.seq = seq;
    request.n_tokens = KVM_POSITION_END;
    return made(std::move(request));
  }
  void free(kvm_seq_id seq) {
    SeqRequest request;
    request.verb = SeqVerb::kFree;
    request.seq = seq;
    require(run(*engine_, client_, std::move(request)).status, "sequence");
  }
  // Seconds that it took.
  double commit(kvm_seq_id seq, uint64_t n_tokens, const std::function<void()>& meanwhile = {}) {
    SeqRequest request;
    request.verb = SeqVerb::kCommit;
    request.seq = seq;
    request.n_tokens = n_tokens;
    is_committed_ = false;
    const double begin = now_s();
    double end = begin;
    engine_->submit(client_, {}, std::move(request), [&](kvm::RequestResult&& result) {
      require(result.status, "commit");
      end = now_s();
      is_committed_ = true;
    });
    while (!is_committed_) {
      if (meanwhile != nullptr) {
        meanwhile();
        continue;
      }
      engine_->poll();
      if (!is_committed_) {
        engine_->work();
      }
    }
    return end - begin;
  }
  bool is_committed() const { return is_committed_; }

  // Appends n tokens from `token` on to all layers that they reach: one request for each run of
  // layers next to each other. Where a token reaches fewer layers than the one before it, n is cut.
  // Returns how many there were.
  uint32_t append(const Setting& setting, kvm_space_id space, kvm_seq_id seq, uint64_t token,
                  uint32_t n, bool is_prompt, uint32_t flags, Rows& rows) {
    if (setting.depth.n_last != nullptr) {
      const auto depth_at = [&](uint32_t i) { return setting.depth.n_last(token + i); };
      uint32_t n_alike = 1;
      while (n_alike < n && depth_at(n_alike) == depth_at(0)) {
        ++n_alike;
      }
      n = n_alike;
    }
    const auto stores = [&](uint32_t layer) {
      return !setting.is_alias(layer) && setting.reaches(layer, token, is_prompt);
    };
    const bool leaves_out = setting.depth.n_last != nullptr || !is_prompt;
    for (uint32_t begin = 0; begin < setting.n_layers;) {
      uint32_t end = begin;
      while (end < setting.n_layers && stores(end)) {
        ++end;
      }
      if (end == begin) {
        ++begin;
        continue;
      }
      StepRequest request = step(space, seq, begin);
      request.n_layers = end - begin;
      request.append = true;
      request.items[0].append_position = token;
      request.items[0].n_append = n;
      // Layers that tokens leave out would hold the commit point.
      const bool is_last = leaves_out && end == setting.n_layers;
      request.items[0].flags = flags | (is_last ? uint32_t{KVM_ITEM_LAST_LAYER} : 0);
      request.k = rows.of_layers(rows.k);
      request.v = rows.of_layers(rows.v);
      timed(std::move(request));
      begin = end;
    }
    return n;
  }
  // The last layers of a prompt end it.
  void append_prompt(const Setting& setting, kvm_space_id space, kvm_seq_id seq, uint64_t n_tokens,
                     Rows& rows) {
    for (uint64_t at = 0; at < n_tokens;) {
      const auto n = static_cast<uint32_t>(std::min<uint64_t>(kChunk, n_tokens - at));
      const uint32_t flags = at + n == n_tokens ? uint32_t{KVM_ITEM_PROMPT_END} : 0;
      at += append(setting, space, seq, at, n, true, flags, rows);
    }
  }
  // Attends with a token that is there, in all layers that it reaches, one after the other.
  void attend(const Setting& setting, kvm_space_id space, kvm_seq_id seq, uint64_t token,
              Rows& rows) {
    for (uint32_t layer = 0; layer < setting.n_layers; ++layer) {
      if (setting.reaches(layer, token, false)) {
        timed(query(space, seq, layer, 1, rows));
      }
    }
  }
  // Attends with the last n tokens of a layer.
  static StepRequest query(kvm_space_id space, kvm_seq_id seq, uint32_t layer, uint32_t n,
                           Rows& rows) {
    StepRequest request = step(space, seq, layer);
    request.attend = true;
    request.items[0].n_query = n;
    request.items[0].query_position = KVM_POSITION_END;
    request.q = Rows::view(rows.q, KVM_DTYPE_BF16);
    request.o = Rows::view(rows.o, KVM_DTYPE_F32);
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
  static StepRequest step(kvm_space_id space, kvm_seq_id seq, uint32_t layer) {
    StepRequest request;
    request.space = space;
    request.layer_begin = layer;
    kvm_item item{};
    item.seq = seq;
    request.items = {item};
    return request;
  }
  kvm_seq_id made(SeqRequest&& request, engine::ClientId client = 0) {
    kvm::RequestResult result = run(*engine_, client == 0 ? client_ : client, std::move(request));
    require(result.status, "sequence");
    return result.seq;
  }

  std::unique_ptr<engine::Engine> engine_;
  engine::ClientId client_ = 0;
  uint32_t n_spaces_ = 0;
  bool is_committed_ = false;
};

// A system with a sequence of n_tokens.
struct Filled {
  const Setting* setting = nullptr;
  kvm_space_id space = 0;
  kvm_seq_id seq = 0;
  uint64_t n_tokens = 0;
  double append_ns = 0;  // of a token
  std::vector<double> steps{};

  double bytes(Rig& rig) const {
    return static_cast<double>(require(rig.engine().seq_info(rig.client(), seq), "sequence").bytes);
  }
};

Filled fill(Rig& rig, const Setting& setting, uint64_t n_tokens, bool quick, Rows& rows) {
  Filled filled{&setting, rig.space(setting)};
  // The second time the pool has its memory.
  for (int i = 0; i < (quick ? 1 : 2); ++i) {
    if (i != 0) {
      rig.free(filled.seq);
    }
    filled.seq = rig.create(filled.space);
    const double begin = now_s();
    rig.append_prompt(setting, filled.space, filled.seq, n_tokens, rows);
    filled.append_ns = (now_s() - begin) / static_cast<double>(n_tokens) * 1e9;
  }
  filled.n_tokens = n_tokens;
  return filled;
}

void decode_step(Rig& rig, Filled* filled, Rows& rows) {
  const Setting& setting = *filled->setting;
  const double begin = now_s();
  rig.append(setting, filled->space, filled->seq, filled->n_tokens, 1, false, 0, rows);
  rig.attend(setting, filled->space, filled->seq, filled->n_tokens, rows);
  filled->steps.push_back(now_s() - begin);
  ++filled->n_tokens;
}

nlohmann::json formula_of(const Setting& setting) {
  return setting.formula < 0 ? nlohmann::json() : nlohmann::json(setting.formula);
}

// Numbers of layers of systems, each once.
std::vector<uint32_t> depths_of(const std::vector<Setting>& all) {
  std::vector<uint32_t> depths;
  for (const Setting& setting : all) {
    depths.push_back(setting.n_layers);
  }
  std::sort(depths.begin(), depths.end());
  depths.erase(std::unique(depths.begin(), depths.end()), depths.end());
  return depths;
}

// Bytes, and times of a token, at a length; each system beside as many layers that keep everything,
// in turns with them.
void add_lengths(const Options& options, uint64_t n_tokens, Report* report) {
  const std::vector<Setting> all = settings(n_tokens, options.policy);
  for (const uint32_t n_layers : depths_of(all)) {
    Rig rig(options, 2 * n_layers * n_tokens * 2 * kRowBytes + (uint64_t{1} << 30));
    Rows rows(kChunk, n_layers);
    const Setting whole = full(n_layers);
    Filled beside = fill(rig, whole, n_tokens, options.quick, rows);
    const auto add = [&](const Filled& filled) {
      const double bytes = filled.bytes(rig);
      report->add({{"case", "length"},
                   {"system", filled.setting->name},
                   {"layers", n_layers},
                   {"tokens", n_tokens},
                   {"mb", bytes * 1e-6},
                   {"bytes_fraction", bytes / beside.bytes(rig)},
                   {"formula", formula_of(*filled.setting)},
                   {"step_us", median(filled.steps) * 1e6},
                   {"step_fraction", median(filled.steps) / median(beside.steps)},
                   {"append_ns_per_token", filled.append_ns},
                   {"append_fraction", filled.append_ns / beside.append_ns}});
    };
    bool is_first = true;
    for (const Setting& setting : all) {
      if (setting.n_layers != n_layers) {
        continue;
      }
      Filled filled = fill(rig, setting, n_tokens, options.quick, rows);
      beside.steps.clear();
      // A page's tokens and a few more.
      for (uint32_t i = 0; i < (options.quick ? 3 : 64 + options.repeats); ++i) {
        decode_step(rig, &beside, rows);
        decode_step(rig, &filled, rows);
      }
      if (is_first) {
        add(beside);
        is_first = false;
      }
      add(filled);
      rig.free(filled.seq);
    }
  }
}

// Requests of a client: attends of one row to a sequence that is there.
struct Asked {
  Asked(Rig* rig, engine::ClientId client, kvm_space_id space, uint32_t n_tokens, Rows* rows)
      : rig_(rig),
        client_(client),
        space_(space),
        rows_(rows),
        seq_(rig->create(space, 0, client)) {
    for (uint32_t at = 0; at < n_tokens; at += kChunk) {
      StepRequest part = Rig::query(space, seq_, 0, 1, *rows);
      part.append = true;
      part.items[0].n_append = std::min(n_tokens - at, kChunk);
      part.items[0].append_position = at;
      part.k = rows->of_layers(rows->k);
      part.v = rows->of_layers(rows->v);
      rig->timed(std::move(part), client);
    }
  }
  double ask() { return rig_->timed(Rig::query(space_, seq_, 0, 1, *rows_), client_); }

  std::vector<double> alone;
  std::vector<double> beside;

 private:
  Rig* rig_;
  engine::ClientId client_;
  kvm_space_id space_;
  Rows* rows_;
  kvm_seq_id seq_;
};

// A long prompt is committed at once, by hand, while another client asks for little, and for more;
// then a token at a time.
void add_commit(const Options& options, const Setting& setting, uint32_t n_tokens,
                uint32_t n_samples, Report* report) {
  Rig rig(options, 2 * setting.n_layers * uint64_t{n_tokens} * 2 * kRowBytes + (uint64_t{1} << 29));
  Rows rows(kChunk, setting.n_layers);
  const engine::ClientId other = rig.engine().add_client({});
  const kvm_space_id space = rig.space(setting);
  Asked small(&rig, other, space, kSmallTokens, &rows);
  Asked middle(&rig, other, rig.space(full(1)), std::min(kMiddleTokens, n_tokens), &rows);

  const kvm_seq_id seq = rig.create(space, KVM_SEQ_MANUAL_COMMIT);
  rig.append_prompt(setting, space, seq, n_tokens, rows);
  for (uint32_t i = 0; i < 2 * n_samples; ++i) {
    small.alone.push_back(small.ask());
    middle.alone.push_back(middle.ask());
  }
  // A fork has the same tokens to commit, so that few requests beside a commit are many in the end.
  // The first one is not measured: the pool has its memory then, as it has in a service that runs.
  const auto commit_fork = [&](const std::function<void()>& meanwhile) {
    const kvm_seq_id again = rig.fork(seq);
    rig.commit(again, n_tokens, meanwhile);
    rig.free(again);
  };
  commit_fork({});
  for (Asked* asked : {&small, &middle}) {
    while (asked->beside.size() < n_samples) {
      commit_fork([&] { asked->beside.push_back(asked->ask()); });
    }
  }
  const double prompt_s = rig.commit(seq, n_tokens);
  std::vector<double> of_tokens;
  for (uint64_t token = n_tokens; of_tokens.size() < n_samples; ++token) {
    rig.append(setting, space, seq, token, 1, false, 0, rows);
    of_tokens.push_back(rig.commit(seq, token + 1));
  }
  report->add({{"case", "commit"},
               {"system", setting.name},
               {"layers", setting.n_layers},
               {"tokens", n_tokens},
               {"commit_ms", prompt_s * 1e3},
               {"commit_ns_per_token", prompt_s * 1e9 / n_tokens},
               {"n_small", small.beside.size()},
               {"small_p90_us", percentile(small.beside, 0.9) * 1e6},
               {"small_p99_us", percentile(small.beside, 0.99) * 1e6},
               {"small_max_us", percentile(small.beside, 1.0) * 1e6},
               {"alone_p99_us", percentile(small.alone, 0.99) * 1e6},
               {"n_middle", middle.beside.size()},
               {"middle_p99_us", percentile(middle.beside, 0.99) * 1e6},
               {"middle_alone_p99_us", percentile(middle.alone, 0.99) * 1e6},
               {"n_commits", of_tokens.size()},
               {"token_commit_us", median(of_tokens) * 1e6},
               {"token_commit_p99_us", percentile(of_tokens, 0.99) * 1e6}});
}

void add_commits(const Options& options, uint32_t n_tokens, uint32_t n_samples, Report* report) {
  add_commit(options, full(4), n_tokens, n_samples, report);
  for (const Setting& setting : settings(n_tokens, options.policy)) {
    if (setting.depth.n_last == nullptr) {  // what falls has no prompt of its own
      add_commit(options, setting, n_tokens, n_samples, report);
    }
  }
}

// Measures what attention mass costs: rows of a prompt over heads that keep all of it, and over
// heads that do so too but sum up.
void add_masses(const Options& options, uint32_t n_tokens, Report* report) {
  Rig rig(options, uint64_t{2} << 30);
  Rows rows(kChunk);
  const Setting plain = full(1);
  Setting summed = full(1);
  kvm_policy_params heavy{};
  heavy.retention = KVM_RETAIN_HEAVY;
  heavy.n_recent = 1 << 20;
  heavy.n_heavy = 512;
  summed.policies.push_back(heavy);
  for (const uint32_t n_query : {1u, 4u, 64u, 512u}) {
    if (n_query > n_tokens) {
      continue;
    }
    std::vector<double> seconds[2];
    kvm_space_id spaces[2];
    kvm_seq_id seqs[2];
    for (int i = 0; i < 2; ++i) {
      const Setting& setting = i == 0 ? plain : summed;
      spaces[i] = rig.space(setting);
      seqs[i] = rig.create(spaces[i]);
      rig.append_prompt(setting, spaces[i], seqs[i], n_tokens, rows);
    }
    for (uint32_t repeat = 0; repeat < options.repeats + 2; ++repeat) {
      for (int i = 0; i < 2; ++i) {
        seconds[i].push_back(rig.timed(Rig::query(spaces[i], seqs[i], 0, n_query, rows)));
      }
    }
    report->add({{"case", "mass"},
                 {"tokens", n_tokens},
                 {"rows", n_query},
                 {"plain_ms", median(seconds[0]) * 1e3},
                 {"summed_ms", median(seconds[1]) * 1e3},
                 {"mass_ratio", median(seconds[1]) / median(seconds[0])}});
    for (const kvm_seq_id seq : seqs) {
      rig.free(seq);
    }
  }
}

}  // namespace

int run_policies(const Options& options) {
  Report report("policies", options);
  const std::vector<uint64_t> lengths =
      options.quick ? std::vector<uint64_t>{2560} : std::vector<uint64_t>{32768, 98304};
  for (const uint64_t n_tokens : lengths) {
    if (n_tokens <= options.max_tokens) {
      add_lengths(options, n_tokens, &report);
    }
  }
  add_commits(options, options.quick ? 512 : 32768, options.quick ? 70 : 1024, &report);
  if (options.policy.empty()) {
    add_masses(options, options.quick ? 64 : 8192, &report);
  }
  return report.finish();
}

}  // namespace kvm::bench
