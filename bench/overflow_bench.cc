// SPDX-License-Identifier: Apache-2.0
// overflow: sequences that are three times as large as memory decode in turns, for two clients; now
// and then a prompt comes among them. Pages go to a disk and are streamed from there by themselves.
//
// The same requests run on an engine that holds all of it, for two things: the answers must have
// the same bits, and what takes longer than there is what the disk costs. The rival is fio's read
// of large blocks on the same disk, next to each round.
//
// one_client and one_client_between are the same requests of one client alone, without and with the
// time that an engine takes between two layers for what is not attention. The disk rests then; how
// much slower the second reads is what there is to be won by reading the next layer in that time.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "bench/engine_rig.h"
#include "bench/fio.h"
#include "bench/harness.h"
#include "bench/timing.h"
#include "tiers/disk/disk_tier.h"

namespace kvm::bench {
namespace {

constexpr uint32_t kSequences = 32;
constexpr uint32_t kClients = 2;
constexpr uint32_t kLayers = 4;
constexpr uint32_t kPromptRows = 1024;
constexpr uint32_t kFillRows = 512;
constexpr uint64_t kBetweenNs = 300'000;  // some layer's other matrices, on a GPU
constexpr uint32_t kTimes = 3;            // the working set is so many times as large as memory
constexpr uint32_t kFioBlockBytes = 256 << 10;
constexpr uint32_t kFioDepth = 32;

struct Sizes {
  uint32_t tokens;  // of each sequence and layer, to begin with
  uint64_t fio_bytes;
};

// One step of one layer of one sequence: n_rows tokens come and attend.
struct Op {
  uint32_t sequence = 0;  // kSequences: the prompt
  uint32_t layer = 0;
  uint32_t n_rows = 1;
  bool attends = true;
  std::vector<uint16_t> k, v, q;
};

struct Answer {
  std::vector<float> o, lse;
  bool operator==(const Answer& other) const {
    const auto is_same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
    };
    return is_same(o, other.o) && is_same(lse, other.lse);
  }
};

// What each client asks in a round, one after the other.
using Round = std::array<std::vector<Op>, kClients>;

struct Taken {
  double seconds = 0;
  std::vector<double> token_s;  // all layers of a sequence
  double prompt_s = 0;          // likewise, of the prompt
  std::vector<double> stalls_us;
  std::array<std::vector<Answer>, kClients> answers;
};

Op make_op(const Shape& shape, uint32_t sequence, uint32_t layer, uint32_t n_rows, bool attends,
           uint64_t seed) {
  Op op{.sequence = sequence, .layer = layer, .n_rows = n_rows, .attends = attends};
  const uint64_t kv = uint64_t{n_rows} * shape.n_kv_heads * shape.head_dim;
  op.k.resize(kv);
  op.v.resize(kv);
  op.q.resize(attends ? uint64_t{n_rows} * shape.n_q_heads * shape.head_dim : 0);
  fill_random_bf16(op.k.data(), op.k.size(), 3 * seed);
  fill_random_bf16(op.v.data(), op.v.size(), 3 * seed + 1);
  fill_random_bf16(op.q.data(), op.q.size(), 3 * seed + 2);
  return op;
}

TensorView tensor(const void* data, uint64_t size_bytes, uint32_t dtype) {
  return {const_cast<void*>(data), size_bytes, dtype, 0, 0, 0};
}

// An engine with both clients, and the sequences of each.
class Side {
 public:
  Side(const Shape& shape, const engine::EngineOptions& options)
      : shape_(shape), rig_(shape, kLayers, options) {
    clients_ = {rig_.client(), rig_.engine().add_client({})};
    for (uint32_t i = 0; i < kSequences; ++i) {
      seqs_.push_back(rig_.create(clients_[i % kClients]));
    }
    seqs_.push_back({});
  }
  engine::Engine& engine() { return rig_.engine(); }

  // The prompt belongs to the last client, and is gone after the round. between_ns: from the end of
  // a request to the next one of that client.
  Taken run(const Round& round, uint64_t between_ns = 0) {
    between_ns_ = between_ns;
    seqs_.back() = rig_.create(clients_.back());
    Taken taken;
    taken_ = &taken;
    round_ = &round;
    n_running_ = kClients;
    for (uint32_t c = 0; c < kClients; ++c) {
      for (const Op& op : round[c]) {
        const uint64_t rows = op.attends ? uint64_t{op.n_rows} * shape_.n_q_heads : 0;
        taken.answers[c].push_back(
            {std::vector<float>(rows * shape_.head_dim), std::vector<float>(rows)});
      }
    }
    const double begin_s = now_s();
    for (uint32_t c = 0; c < kClients; ++c) {
      submit(c, 0);
    }
    while (n_running_ != 0) {
      turn();
    }
    taken.seconds = now_s() - begin_s;
    taken_ = nullptr;
    rig_.free(clients_.back(), seqs_.back());
    return taken;
  }
  // Until pages move no more.
  void settle() {
    while (rig_.engine().is_sending() || rig_.engine().is_fetching()) {
      turn();
    }
  }

 private:
  void submit(uint32_t client, size_t index) {
    if (index == (*round_)[client].size()) {
      --n_running_;
      return;
    }
    const Op& op = (*round_)[client][index];
    Answer& answer = taken_->answers[client][index];
    StepRequest step;
    step.space = rig_.space();
    step.layer_begin = op.layer;
    step.append = true;
    step.attend = op.attends;
    kvm_item item{};
    item.seq = seqs_[op.sequence];
    item.append_position = KVM_POSITION_END;
    item.n_append = op.n_rows;
    step.k = tensor(op.k.data(), op.k.size() * 2, KVM_DTYPE_BF16);
    step.v = tensor(op.v.data(), op.v.size() * 2, KVM_DTYPE_BF16);
    if (op.attends) {
      item.n_query = op.n_rows;
      item.query_position = KVM_POSITION_END;
      step.q = tensor(op.q.data(), op.q.size() * 2, KVM_DTYPE_BF16);
      step.o = tensor(answer.o.data(), answer.o.size() * 4, KVM_DTYPE_F32);
      step.lse = tensor(answer.lse.data(), answer.lse.size() * 4, KVM_DTYPE_F32);
    } else {
      step.n_layers = 1;
    }
    step.items.push_back(item);
    if (op.layer == 0) {
      token_begin_s_[client] = now_s();
    }
    rig_.engine().submit(clients_[client], {}, std::move(step),
                         [this, client, index](kvm::RequestResult&& result) {
                           require(result.status, "step");
                           end(client, index);
                         });
  }
  void end(uint32_t client, size_t index) {
    const Op& op = (*round_)[client][index];
    if (op.layer + 1 == kLayers) {
      const double took = now_s() - token_begin_s_[client];
      if (op.n_rows == 1) {
        taken_->token_s.push_back(took);
      } else {
        taken_->prompt_s = took;
      }
    }
    if (between_ns_ == 0) {
      submit(client, index + 1);
    } else {
      next_[client] = {now_ns() + between_ns_, index + 1};
    }
  }
  // Submits what is due. Returns how long nothing else will be, at most most_ns.
  uint64_t submit_due(uint64_t most_ns) {
    for (uint32_t client = 0; client < kClients; ++client) {
      Next& next = next_[client];
      const uint64_t now = now_ns();
      if (next.due_ns <= now) {
        next.due_ns = UINT64_MAX;
        submit(client, next.index);
      } else {
        most_ns = std::min(most_ns, next.due_ns - now);
      }
    }
    return most_ns;
  }
  // As kvmd's dispatcher does; one that has nothing to do leaves its core to others.
  void turn() {
    engine::Engine& engine = rig_.engine();
    const uint64_t patience_ns = submit_due(1'000'000);
    if (!engine.work()) {
      engine.wait(patience_ns);
    }
    const uint64_t begin_ns = now_ns();
    engine.poll();
    if (taken_ != nullptr) {
      taken_->stalls_us.push_back(static_cast<double>(now_ns() - begin_ns) * 1e-3);
    }
  }

  const Shape shape_;
  Rig rig_;
  std::array<engine::ClientId, kClients> clients_{};
  std::vector<kvm_seq_id> seqs_;
  const Round* round_ = nullptr;
  Taken* taken_ = nullptr;
  uint32_t n_running_ = 0;
  struct Next {
    uint64_t due_ns = UINT64_MAX;
    size_t index = 0;
  };
  uint64_t between_ns_ = 0;
  std::array<Next, kClients> next_{};
  std::array<double, kClients> token_begin_s_{};
};

struct Case {
  const char* name;
  bool has_prompt = false;
  uint32_t n_clients = kClients;
  uint64_t between_ns = 0;
  std::vector<double> gbps = {}, fio_gbps = {}, fractions = {}, stalls = {};
  std::vector<double> token_s = {}, token_in_memory_s = {}, prompt_s = {}, stalls_us = {};
  uint64_t n_sent_bytes = 0;
  bool is_bit_equal = true;
};

class OverflowRun {
 public:
  OverflowRun(const Options& options, const Sizes& sizes, const std::string& folder)
      : sizes_(sizes),
        n_set_bytes_(uint64_t{sizes.tokens} * shape_.token_bytes() * kLayers * kSequences),
        tier_(open_tier(folder, n_set_bytes_)),
        in_memory_(shape_, Rig::options_of(thread_count(options),
                                           n_set_bytes_ * 5 / 4 + (uint64_t{512} << 20), nullptr)),
        overflowing_(shape_, overflowing_options(options)) {
    for (uint32_t at = 0; at < sizes.tokens; at += kFillRows) {
      Round round;
      for (uint32_t i = 0; i < kSequences; ++i) {
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
          round[i % kClients].push_back(
              make_op(shape_, i, layer, std::min(kFillRows, sizes.tokens - at), false, ++seed_));
        }
      }
      in_memory_.run(round);
      overflowing_.run(round);
    }
    overflowing_.settle();
  }

  // `read` runs fio; empty: it is not there.
  void run(uint32_t index, Case* of, const std::function<double()>& read) {
    const Round round = make_round(*of);
    Taken all;
    if (index % 2 == 0) {
      all = in_memory_.run(round, of->between_ns);
    }
    const auto note_fio = [&] {
      if (read) {
        of->fio_gbps.push_back(read() * 1e-9);
      }
    };
    if (index / 2 % 2 == 0) {
      note_fio();
    }
    const uint64_t n_read = tier_->stats().read_bytes;
    const uint64_t n_sent = overflowing_.engine().movement_stats().bytes_sent;
    const Taken part = overflowing_.run(round, of->between_ns);
    const double gbps =
        static_cast<double>(tier_->stats().read_bytes - n_read) / part.seconds * 1e-9;
    of->n_sent_bytes += overflowing_.engine().movement_stats().bytes_sent - n_sent;
    if (index / 2 % 2 != 0) {
      note_fio();
    }
    if (index % 2 != 0) {
      all = in_memory_.run(round, of->between_ns);
    }
    of->gbps.push_back(gbps);
    if (read) {
      of->fractions.push_back(gbps / of->fio_gbps.back());
    }
    of->stalls.push_back(1 - all.seconds / part.seconds);
    of->is_bit_equal = of->is_bit_equal && all.answers == part.answers;
    const auto add = [](std::vector<double>* to, const std::vector<double>& from) {
      to->insert(to->end(), from.begin(), from.end());
    };
    add(&of->token_s, part.token_s);
    add(&of->token_in_memory_s, all.token_s);
    add(&of->stalls_us, part.stalls_us);
    if (of->has_prompt) {
      of->prompt_s.push_back(part.prompt_s);
    }
  }

  void report(const Case& of, Report* report) {
    const engine::MovementStats moved = overflowing_.engine().movement_stats();
    const tiers::DiskTierStats disk = tier_->stats();
    std::vector<std::pair<std::string, nlohmann::json>> row = {
        {"case", of.name},
        {"sequences", kSequences},
        {"clients", of.n_clients},
        {"between_us", static_cast<double>(of.between_ns) * 1e-3},
        {"layers", kLayers},
        {"tokens", sizes_.tokens},
        {"set_gib", gib(n_set_bytes_)},
        {"memory_gib", gib(n_set_bytes_ / kTimes)},
        {"rounds", of.gbps.size()},
        {"backend", disk.backend},
        {"direct", disk.is_direct},
        {"ms_per_token", median(of.token_s) * 1e3},
        {"ms_per_token_p90", percentile(of.token_s, 0.9) * 1e3},
        {"ms_per_token_in_memory", median(of.token_in_memory_s) * 1e3},
        {"disk_gbps", median(of.gbps)}};
    if (!of.fio_gbps.empty()) {
      row.insert(row.end(), {{"fio_gbps", median(of.fio_gbps)},
                             {"disk_fraction", median(of.gbps) / median(of.fio_gbps)},
                             {"fraction_of_pairs", median(of.fractions)}});
    }
    row.insert(row.end(), {{"stall_fraction", median(of.stalls)},
                           {"bit_equal", of.is_bit_equal},
                           {"prompt_ms", median(of.prompt_s) * 1e3},
                           {"sent_gib", gib(of.n_sent_bytes)},
                           {"appends_waited", moved.n_appends_waited},
                           {"dispatcher_stall_p99_us", percentile(of.stalls_us, 0.99)},
                           {"dispatcher_stall_max_us", percentile(of.stalls_us, 1)}});
    report->add(std::move(row));
    if (!of.is_bit_equal) {
      report->fail("answers differ from those of an engine that holds all in memory");
    }
  }

 private:
  static double gib(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

  static std::unique_ptr<tiers::DiskTier> open_tier(const std::string& folder, uint64_t set_bytes) {
    return require(
        tiers::DiskTier::open({.directories = {folder},
                               .capacity_bytes = set_bytes * 3 / 2 + 8 * (uint64_t{64} << 20)}),
        "disk tier");
  }
  engine::EngineOptions overflowing_options(const Options& options) const {
    engine::EngineOptions out =
        Rig::options_of(thread_count(options), n_set_bytes_ / kTimes, tier_.get());
    out.default_quota_bytes = 2 * n_set_bytes_;  // of memory and disk together
    out.movement.is_automatic = true;
    return out;
  }

  // A token of each sequence; the prompt comes in the middle.
  Round make_round(const Case& of) {
    Round round;
    const auto add = [&](uint32_t sequence, uint32_t n_rows) {
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        round[sequence < kSequences ? sequence % kClients : kClients - 1].push_back(
            make_op(shape_, sequence, layer, n_rows, true, ++seed_));
      }
    };
    for (uint32_t i = 0; i < kSequences; ++i) {
      if (of.has_prompt && i == kSequences / 2) {
        add(kSequences, kPromptRows);
      }
      if (i % kClients < of.n_clients) {
        add(i, 1);
      }
    }
    return round;
  }

  const Shape shape_;
  const Sizes sizes_;
  const uint64_t n_set_bytes_;
  std::unique_ptr<tiers::DiskTier> tier_;
  Side in_memory_;
  Side overflowing_;
  uint64_t seed_ = 0;
};

}  // namespace

int run_overflow(const Options& options) {
  Report report("overflow", options);
  // Memory holds rings of 64 MiB beside a third of this.
  const Sizes sizes = options.quick ? Sizes{1024, 64 << 20} : Sizes{6144, uint64_t{1} << 30};
  const DiskFolder folder(options);
  const uint64_t set_bytes = uint64_t{sizes.tokens} * Shape().token_bytes() * kLayers * kSequences;
  folder.require_free(2 * set_bytes + sizes.fio_bytes);
  const bool has_rival = has_fio();
  const auto read_fio = [&] {
    return fio_on_segments(folder, "read", kFioBlockBytes, kFioDepth, sizes.fio_bytes);
  };
  if (!has_rival) {
    report.note(kNoFio);
  }
  OverflowRun run(options, sizes, folder.path());
  std::vector<Case> cases = {
      {.name = "decode"},
      {.name = "with_prompt", .has_prompt = true},
      {.name = "one_client", .n_clients = 1},
      {.name = "one_client_between", .n_clients = 1, .between_ns = kBetweenNs}};
  const uint32_t n_rounds = options.quick ? 1 : options.repeats;
  for (uint32_t i = 0; i < n_rounds; ++i) {
    for (Case& of : cases) {
      run.run(i, &of, has_rival ? read_fio : std::function<double()>());
    }
  }
  for (const Case& of : cases) {
    run.report(of, &report);
  }
  return report.finish();
}

}  // namespace kvm::bench
