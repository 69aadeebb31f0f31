// SPDX-License-Identifier: Apache-2.0
// disk_moves: what it costs that pages go to a disk, or come back, while sequences decode that stay
// in memory. The cap on moves is half of what fio writes, or reads, on the same disk.
//
// Each move is between decode steps without moves, which it is compared with. fio runs before all
// rounds, for the cap, and after each. What the disk alone costs, steps tell beside which fio moves
// as much as the cap allows: it neither copies nor sums up what it moves.
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
constexpr uint32_t kMovers = 4;
constexpr double kSettleSeconds = 0.25;
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
    std::vector<double> before = steps_.run_for(kSettleSeconds);
    const std::vector<kvm_seq_id>& moving = of_.way == Way::kToDisk ? movers : coming;
    for (size_t i = 0; i < moving.size(); ++i) {
      if (i < leaving.size()) {
        begin({leaving[i]}, true);
      }
      const std::vector<double> during = move(moving[i]);
      const std::vector<double> after = steps_.run_for(kSettleSeconds);
      if (!during.empty()) {
        const double quiet = (median(before) + median(after)) / 2;
        quiet_s_.push_back(quiet);
        moving_s_.push_back(median(during));
        slowdowns_.push_back(median(during) / quiet - 1);
      }
      before = after;
    }
    for (const kvm_seq_id mover : movers) {
      rig_.free(mover);
    }
  }

  // Steps while fio moves bytes, between such without.
  void round_beside(const FioRun& rival) {
    const std::vector<double> before = steps_.run_for(kSettleSeconds);
    std::vector<double> during;
    {
      const PacedFio fio(rival, cap_);
      steps_.run_for(2 * kSettleSeconds);  // it begins
      during = steps_.run_for(4 * kSettleSeconds);
    }
    const std::vector<double> after = steps_.run_for(kSettleSeconds);
    fio_slowdowns_.push_back(median(during) / ((median(before) + median(after)) / 2) - 1);
  }

  // Moves a sequence while others decode. Returns the seconds of the steps that ended meanwhile.
  std::vector<double> move(kvm_seq_id mover) {
    steps_.take_stalls_us();
    steps_.take_turns_us();
    // When the first batch had moved, and the last, and what had moved by then: the cap lets the
    // first begin at once.
    std::pair<double, uint64_t> first{0, n_bytes_moved()};
    std::pair<double, uint64_t> last = first;
    double end_s = 0;
    const auto note = [&] {
      if (const uint64_t n = n_bytes_moved(); n != last.second) {
        last = {now_s(), n};
        first = first.first == 0 ? last : first;
      }
      if (end_s == 0 && !is_moving()) {
        end_s = now_s();
      }
    };
    begin({mover}, of_.way == Way::kToDisk);
    std::vector<double> took;
    while (end_s == 0) {
      const double seconds = steps_.run(note);
      if (end_s == 0) {
        took.push_back(seconds);
      }
    }
    if (last.first > first.first) {
      rates_.push_back(static_cast<double>(last.second - first.second) /
                       (last.first - first.first));
    }
    const auto add = [](const std::vector<double>& from, std::vector<double>* to) {
      to->insert(to->end(), from.begin(), from.end());
    };
    add(steps_.take_stalls_us(), &stalls_us_);
    add(steps_.take_turns_us(), &turns_us_);
    return took;
  }

  void report(const std::vector<double>& fio_rates, Report* report) const {
    const tiers::DiskTierStats disk = tier_->stats();
    const double fio_rate = median(fio_rates);
    std::vector<std::pair<std::string, nlohmann::json>> row = {
        {"case", of_.name},
        {"sequences", kSequences},
        {"tokens", sizes_.tokens},
        {"moves", slowdowns_.size()},
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
        {"dispatcher_stall_max_us", percentile(stalls_us_, 1)},
        {"turn_p99_us", percentile(turns_us_, 0.99)}};
    if (!fio_slowdowns_.empty()) {
      row.emplace_back("decode_slowdown_by_fio", median(fio_slowdowns_));
    }
    report->add(std::move(row));
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
  std::vector<double> rates_, quiet_s_, moving_s_, slowdowns_, fio_slowdowns_, stalls_us_,
      turns_us_;
};

}  // namespace

int run_disk_moves(const Options& options) {
  Report report("disk_moves", options);
  const Sizes sizes =
      options.quick ? Sizes{256, 8192, 64 << 20} : Sizes{4096, 65536, uint64_t{512} << 20};
  const uint32_t n_rounds = options.quick ? 1 : options.repeats;
  const DiskFolder folder(options);
  folder.require_free(2 * uint64_t{sizes.mover_tokens} * kMovers * Shape().token_bytes() +
                      sizes.fio_bytes);
  const bool has_rival = has_fio();
  for (const Case& of :
       {Case{"to_disk", "write", Way::kToDisk}, Case{"to_memory", "read", Way::kToMemory},
        Case{"replace", "read", Way::kReplace}}) {
    std::vector<double> rates;
    const auto rival = [&](const char* how) -> FioRun {
      return {{folder.file("rival")}, how, kFioBlockBytes, kFioDepth, sizes.fio_bytes};
    };
    const auto run_fio = [&](const char* how) { return fio(rival(how)); };
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
        run.round_beside(rival(of.fio_how));
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
