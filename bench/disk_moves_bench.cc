// SPDX-License-Identifier: Apache-2.0
// disk_moves: what it costs that pages go to a disk, or come back, while sequences decode that stay
// in memory. The cap on moves is half of what fio writes, or reads, on the same disk.
//
// Each round sends what is new, or brings back what was sent, between decode steps without moves.
// fio runs before all rounds, for the cap, and after each.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/decode_steps.h"
#include "bench/engine_rig.h"
#include "bench/fio.h"
#include "bench/harness.h"
#include "bench/timing.h"
#include "tiers/disk/disk_tier.h"

namespace kvm::bench {
namespace {

constexpr uint32_t kSequences = 32;  // that decode
constexpr uint32_t kMovers = 8;
constexpr double kSettleSeconds = 0.5;
constexpr double kCapShare = 0.5;
constexpr uint32_t kFioRuns = 3;  // before a case; one more after each round
constexpr uint64_t kCapWithoutFio = 500'000'000;
constexpr uint32_t kFioBlockBytes = 256 << 10;
constexpr uint32_t kFioDepth = 32;

struct Sizes {
  uint32_t tokens;        // of a sequence that decodes
  uint32_t mover_tokens;  // of one that moves
  uint64_t fio_bytes;
};

// kReplace: pages come back while others leave of which the disk has a copy, to the frames of
// these. Where nobody leaves, frames are new, and the system clears them.
enum class Way : uint8_t { kToDisk, kToMemory, kReplace };

struct Case {
  const char* name;
  const char* fio_how;
  Way way;
};

class DiskMovesRun {
 public:
  DiskMovesRun(const Options& options, const Sizes& sizes, const Case& of, uint64_t cap,
               const std::string& folder)
      : of_(of),
        sizes_(sizes),
        cap_(cap),
        n_moved_bytes_(uint64_t{sizes.mover_tokens} * kMovers * shape_.token_bytes()),
        tier_(require(tiers::DiskTier::open(
                          {.directories = {folder},
                           .capacity_bytes = n_moved_bytes_ * 3 / 2 + 8 * (uint64_t{64} << 20)}),
                      "disk tier")),
        rig_(shape_, 1, engine_options(options)),
        steps_(&rig_, shape_, kSequences) {
    for (uint32_t i = 0; i < kSequences; ++i) {
      steps_.add(rig_.create());
      rig_.fill(steps_.seqs().back(), 0, sizes.tokens, i * 1000003);
    }
  }

  void round(uint32_t index) {
    std::vector<kvm_seq_id> movers;
    for (uint32_t i = 0; i < kMovers; ++i) {
      movers.push_back(rig_.create());
      rig_.fill(movers.back(), 0, sizes_.mover_tokens, (index * kMovers + i) * 7919 + 13);
    }
    // Those that come, and those that leave meanwhile.
    std::vector<kvm_seq_id> coming, leaving;
    if (of_.way != Way::kToDisk) {
      begin(movers, true);
      settle();
      coming = movers;
    }
    if (of_.way == Way::kReplace) {
      leaving.assign(movers.begin(), movers.begin() + kMovers / 2);
      coming.erase(coming.begin(), coming.begin() + kMovers / 2);
      begin(leaving, false);
      settle();
    }
    steps_.run_for(kSettleSeconds);  // warms up
    std::vector<double> quiet = steps_.run_for(kSettleSeconds);
    steps_.take_stalls_us();
    size_t n_left = 0;
    const uint64_t n_before = rig_.engine().movement_stats().bytes_back;
    const auto replace = [&] {
      const uint64_t n_back = rig_.engine().movement_stats().bytes_back - n_before;
      if (n_left < leaving.size() && n_back >= n_left * mover_bytes()) {
        begin({leaving[n_left++]}, true);
      }
    };
    replace();
    begin(of_.way == Way::kToDisk ? movers : coming, of_.way == Way::kToDisk);
    // Steps that ended while pages moved, and what had moved when the first and the last did.
    std::vector<double> moving;
    std::pair<double, uint64_t> first, last;
    while (is_moving()) {
      const double took = steps_.run(replace);
      if (is_moving()) {
        last = {now_s(), n_bytes_moved()};
        first = moving.empty() ? last : first;
        moving.push_back(took);
      }
    }
    const std::vector<double> stalls = steps_.take_stalls_us();
    stalls_us_.insert(stalls_us_.end(), stalls.begin(), stalls.end());
    const std::vector<double> after = steps_.run_for(kSettleSeconds);
    quiet.insert(quiet.end(), after.begin(), after.end());
    if (moving.size() > 1) {
      rates_.push_back(static_cast<double>(last.second - first.second) /
                       (last.first - first.first));
    }
    quiet_s_.push_back(median(quiet));
    moving_s_.push_back(median(moving));
    slowdowns_.push_back(median(moving) / median(quiet) - 1);
    for (const kvm_seq_id mover : movers) {
      rig_.free(mover);
    }
  }

  void report(const std::vector<double>& fio_rates, Report* report) const {
    const tiers::DiskTierStats disk = tier_->stats();
    const double fio_rate = median(fio_rates);
    report->add({{"case", of_.name},
                 {"sequences", kSequences},
                 {"tokens", sizes_.tokens},
                 {"rounds", slowdowns_.size()},
                 {"backend", disk.backend},
                 {"direct", disk.is_direct},
                 {"fio_gbps", fio_rate * 1e-9},
                 {"cap_gbps", static_cast<double>(cap_) * 1e-9},
                 {"moved_gbps", median(rates_) * 1e-9},
                 {"of_cap", median(rates_) / static_cast<double>(cap_)},
                 {"of_fio", fio_rate > 0 ? median(rates_) / fio_rate : 0},
                 {"step_ms", median(quiet_s_) * 1e3},
                 {"step_ms_moving", median(moving_s_) * 1e3},
                 {"decode_slowdown", median(slowdowns_)},
                 {"dispatcher_stall_p99_us", percentile(stalls_us_, 0.99)},
                 {"dispatcher_stall_max_us", percentile(stalls_us_, 1)}});
  }

 private:
  engine::EngineOptions engine_options(const Options& options) const {
    const uint64_t decoding = uint64_t{sizes_.tokens} * kSequences * shape_.token_bytes();
    // Pages come back below 9/10 of it.
    engine::EngineOptions out =
        Rig::options_of(thread_count(options),
                        (decoding + n_moved_bytes_) * 4 / 3 + (uint64_t{512} << 20), tier_.get());
    out.movement.bytes_per_s = cap_;
    return out;
  }
  void begin(const std::vector<kvm_seq_id>& movers, bool goes) {
    for (const kvm_seq_id mover : movers) {
      require(goes ? rig_.engine().send_away(mover) : rig_.engine().prefetch(mover), "moves");
    }
  }
  void settle() {
    while (is_moving()) {
      steps_.turn();
    }
  }
  uint64_t mover_bytes() const { return uint64_t{sizes_.mover_tokens} * shape_.token_bytes(); }
  bool is_moving() { return rig_.engine().is_sending() || rig_.engine().is_fetching(); }
  uint64_t n_bytes_moved() {
    const engine::MovementStats stats = rig_.engine().movement_stats();
    return of_.way == Way::kToDisk ? stats.bytes_sent : stats.bytes_back;
  }

  const Shape shape_;
  const Case of_;
  const Sizes sizes_;
  const uint64_t cap_;
  const uint64_t n_moved_bytes_;  // of all that move in a round
  std::unique_ptr<tiers::DiskTier> tier_;
  Rig rig_;
  DecodeSteps steps_;
  std::vector<double> rates_, quiet_s_, moving_s_, slowdowns_, stalls_us_;
};

}  // namespace

int run_disk_moves(const Options& options) {
  Report report("disk_moves", options);
  const Sizes sizes =
      options.quick ? Sizes{256, 8192, 64 << 20} : Sizes{4096, 65536, uint64_t{1} << 30};
  const uint32_t n_rounds = options.quick ? 1 : options.repeats;
  const DiskFolder folder(options);
  folder.require_free(2 * uint64_t{sizes.mover_tokens} * kMovers * Shape().token_bytes() +
                      sizes.fio_bytes);
  const bool has_rival = has_fio();
  for (const Case& of :
       {Case{"to_disk", "write", Way::kToDisk}, Case{"to_memory", "read", Way::kToMemory},
        Case{"replace", "read", Way::kReplace}}) {
    std::vector<double> rates;
    const auto run_fio = [&](const char* how) {
      return fio({folder.file("rival"), how, kFioBlockBytes, kFioDepth, sizes.fio_bytes});
    };
    uint64_t cap = kCapWithoutFio;
    if (has_rival) {
      run_fio("write");  // there is a file
      for (uint32_t i = 0; i < kFioRuns; ++i) {
        rates.push_back(run_fio(of.fio_how));
      }
      cap = static_cast<uint64_t>(kCapShare * median(rates));
    }
    DiskMovesRun run(options, sizes, of, cap, folder.path());
    for (uint32_t i = 0; i < n_rounds; ++i) {
      run.round(i);
      if (has_rival) {
        rates.push_back(run_fio(of.fio_how));
      }
    }
    run.report(rates, &report);
  }
  if (!has_rival) {
    report.note(kNoFio);
  }
  return report.finish();
}

}  // namespace kvm::bench
