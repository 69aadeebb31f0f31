// SPDX-License-Identifier: Apache-2.0
// cold_sampled: exact, sampled and AUTO attention over a context that lies on a disk, against the
// same sample in memory: what is read of the disk for it, and how long that takes.
//
// Modes come in turns over the same pages, fio beside them: its large blocks in order, and blocks
// of a page's size at random, are what a choice between all pages and drawn ones goes by.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/limits.h"
#include "bench/engine_rig.h"
#include "bench/fio.h"
#include "bench/harness.h"
#include "bench/timing.h"
#include "engine/attend/cost_model.h"
#include "tiers/disk/disk_tier.h"

namespace kvm::bench {
namespace {

constexpr uint32_t kFioBlockBytes = 256 << 10;
constexpr uint32_t kFioDepth = 32;
constexpr float kEps = 0.03f;

struct Sizes {
  uint64_t tokens;
  uint64_t fio_bytes;
};

// budget: keys of each row, as a share of all. time_ns: AUTO has this instead of an error, and does
// with 1 what is fastest.
struct Mode {
  const char* name;
  uint32_t mode;
  double budget;
  uint64_t time_ns = 0;
  std::vector<double> seconds = {};
  std::vector<double> seconds_in_memory = {};
  uint64_t n_read_bytes = 0;
  RequestResult last = {};
  RequestResult last_in_memory = {};
};

class ColdSampledRun {
 public:
  ColdSampledRun(const Options& options, const Shape& shape, const Sizes& sizes,
                 const std::string& folder)
      : shape_(shape),
        n_tokens_(sizes.tokens),
        tier_(require(
            tiers::DiskTier::open({.directories = {folder},
                                   .capacity_bytes = 2 * sizes.tokens * shape.token_bytes() +
                                                     8 * (uint64_t{64} << 20)}),
            "disk tier")),
        rig_(shape, 1,
             Rig::options_of(thread_count(options),
                             3 * sizes.tokens * shape.token_bytes() + (uint64_t{512} << 20),
                             tier_.get()),
             {index()}),
        seq_(rig_.create()),
        q_(uint64_t{shape.n_q_heads} * shape.head_dim * 2),
        o_(uint64_t{shape.n_q_heads} * shape.head_dim * 4),
        lse_(uint64_t{shape.n_q_heads} * 4) {
    fill_random_bf16(q_.as<uint16_t>(), q_.size_bytes() / 2, 7);
    rig_.fill(seq_, 0, sizes.tokens, 1);
    modes_ = {{"exact", KVM_MODE_EXACT, 0},
              {"sampled", KVM_MODE_SAMPLED, 1e-4},
              {"sampled", KVM_MODE_SAMPLED, 1e-3},
              {"sampled", KVM_MODE_SAMPLED, 1e-2},
              {"auto", KVM_MODE_AUTO, 0},
              {"auto_fastest", KVM_MODE_AUTO, 0, 1},
              // As many keys as AUTO samples where it is to be as fast as it can.
              {"sampled_fewest", KVM_MODE_SAMPLED,
               static_cast<double>(engine::kLeastBudget) / static_cast<double>(sizes.tokens)}};
  }

  void send_away() {
    require(rig_.engine().send_away(seq_), "sending away");
    while (rig_.engine().is_sending()) {
      rig_.engine().work();
      rig_.engine().poll();
    }
  }

  // While it is in memory, and then away.
  void run(uint32_t repeats, bool is_away) {
    for (uint32_t i = 0; i <= repeats; ++i) {
      for (Mode& mode : modes_) {
        const uint64_t n_before = tier_->stats().read_bytes;
        const double begin_s = now_s();
        RequestResult result = rig_.run_step(step(mode));
        const double took = now_s() - begin_s;
        if (i == 0) {
          continue;  // the first of them builds the index
        }
        (is_away ? mode.seconds : mode.seconds_in_memory).push_back(took);
        (is_away ? mode.last : mode.last_in_memory) = std::move(result);
        mode.n_read_bytes = tier_->stats().read_bytes - n_before;
      }
    }
  }

  void report(double sequential, double random, Report* report) const {
    for (const Mode& mode : modes_) {
      const double bytes = static_cast<double>(n_tokens_ * shape_.token_bytes());
      std::vector<std::pair<std::string, nlohmann::json>> row = {
          {"shape", shape_.name()},
          {"tokens", n_tokens_},
          {"mode", mode.name},
          {"budget", mode.budget},
          {"ms", median(mode.seconds) * 1e3},
          {"of_exact", median(mode.seconds) / median(modes_[0].seconds)},
          {"ms_in_memory", median(mode.seconds_in_memory) * 1e3},
          {"keys_read", share(mode.last)},
          {"keys_read_in_memory", share(mode.last_in_memory)},
          {"io_kb", static_cast<double>(mode.n_read_bytes) / 1024},
          {"io_share", static_cast<double>(mode.n_read_bytes) / bytes}};
      if (sequential > 0) {
        row.insert(row.end(), {{"fio_gbps", sequential * 1e-9},
                               {"fio_random_gbps", random * 1e-9},
                               {"ms_of_fio", bytes / sequential * 1e3}});
      }
      report->add(std::move(row));
    }
  }

 private:
  static kvm_index_params index() {
    kvm_index_params params{};
    params.kind = KVM_INDEX_SKETCH;
    return params;
  }
  static double share(const RequestResult& result) {
    return static_cast<double>(result.keys_read) /
           static_cast<double>(std::max<uint64_t>(result.keys_present, 1));
  }
  StepRequest step(const Mode& mode) const {
    StepRequest out = rig_.attend({seq_}, 1, q_, o_, lse_);
    out.mode = mode.mode;
    out.budget = mode.time_ns +
                 static_cast<uint64_t>(std::llround(mode.budget * static_cast<double>(n_tokens_)));
    out.eps = out.budget == 0 ? kEps : 0;
    out.seed = 1;
    return out;
  }

  const Shape shape_;
  const uint64_t n_tokens_;
  std::unique_ptr<tiers::DiskTier> tier_;
  Rig rig_;
  kvm_seq_id seq_;
  const Memory q_, o_, lse_;
  std::vector<Mode> modes_;
};

}  // namespace

int run_cold_sampled(const Options& options) {
  Report report("cold_sampled", options);
  const uint32_t repeats = options.quick ? 1 : options.repeats;
  const DiskFolder folder(options);
  const bool has_rival = has_fio();
  for (const Shape& shape : {Shape{.n_q_heads = 4, .n_kv_heads = 1}, Shape{}}) {
    const Sizes sizes = options.quick ? Sizes{16384, 64 << 20} : Sizes{131072, uint64_t{1} << 30};
    folder.require_free(3 * sizes.tokens * shape.token_bytes() + sizes.fio_bytes);
    const auto fio_run = [&](const char* how, uint32_t block_bytes) {
      return fio_on_segments(folder, how, block_bytes, kFioDepth, sizes.fio_bytes);
    };
    std::vector<double> sequential, random;
    const auto run_fio = [&] {
      if (has_rival) {
        sequential.push_back(fio_run("read", kFioBlockBytes));
        random.push_back(
            fio_run("randread", static_cast<uint32_t>(kPageTokens * shape.token_bytes())));
      }
    };
    ColdSampledRun run(options, shape, sizes, folder.path());
    run.run(repeats, false);
    run.send_away();
    run_fio();
    run.run(repeats, true);
    run_fio();
    run.report(median(sequential), median(random), &report);
  }
  if (!has_rival) {
    report.note(kNoFio);
  }
  return report.finish();
}

}  // namespace kvm::bench
