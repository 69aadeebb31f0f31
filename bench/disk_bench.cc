// SPDX-License-Identifier: Apache-2.0
// disk: pages written to the disk tier and read back, against fio's io_uring engine with the same
// sizes and depth. It reads the tier's own segments, and writes a file beside. fio is a rival, not
// a ceiling: disks are not the same twice.
//
// Each round writes a share of the bytes and reads it, in order and at random, fio next to the tier
// each time and first in every second round.
#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bench/engine_rig.h"
#include "bench/fio.h"
#include "bench/harness.h"
#include "bench/timing.h"
#include "tiers/disk/disk_tier.h"
#include "tiers/slow_tier.h"

namespace kvm::bench {
namespace {

using tiers::DiskTier;
using tiers::DiskTierOptions;
using tiers::DiskTierStats;
using tiers::PlaceId;
using tiers::Transfer;

constexpr uint32_t kPageBytes = 64 << 10;
constexpr uint32_t kTransferBytes = 256 << 10;
constexpr uint32_t kDepth = 32;
// Pages handed to the tier that have not ended: so many that it can fill its queue.
constexpr uint32_t kWindow = 512;
constexpr uint32_t kBatch = 64;
constexpr uint64_t kGiB = uint64_t{1} << 30;

class Page;

// Pages that have ended, for the thread that hands out more.
class Ended {
 public:
  void add(Page* page) {
    const std::lock_guard lock(mutex_);
    pages_.push_back(page);
    if (pages_.size() >= n_wanted_) {
      has_enough_.notify_one();
    }
  }
  std::vector<Page*> take(size_t at_least) {
    std::unique_lock lock(mutex_);
    n_wanted_ = at_least;
    has_enough_.wait(lock, [&] { return pages_.size() >= at_least; });
    return std::exchange(pages_, {});
  }

 private:
  std::mutex mutex_;
  std::condition_variable has_enough_;
  std::vector<Page*> pages_;
  size_t n_wanted_ = 1;
};

class Page final : public Transfer {
 public:
  Page(Ended* ended, std::byte* memory) : ended_(ended) {
    data = memory;
    size_bytes = kPageBytes;
  }
  void on_done() noexcept override { ended_->add(this); }

  size_t index = 0;  // of the places

 private:
  Ended* const ended_;
};

class TierRun {
 public:
  explicit TierRun(const DiskTierOptions& options)
      : tier_(require(DiskTier::open(options), "disk tier")), memory_(kWindow * kPageBytes) {
    fill_random_bf16(memory_.as<uint16_t>(), memory_.size_bytes() / 2, 5);
    for (uint32_t i = 0; i < kWindow; ++i) {
      pages_.emplace_back(&ended_, memory_.as<std::byte>() + size_t{i} * kPageBytes);
    }
  }

  // Bytes per second, here and below. The places of what was written before are given back first.
  double write(uint32_t n_pages) {
    for (const PlaceId place : places_) {
      tier_->release(place);
    }
    places_.assign(n_pages, tiers::kNoPlace);
    return run(Transfer::Kind::kWrite, n_pages, [](size_t i) { return i; });
  }
  double read() {
    return run(Transfer::Kind::kRead, places_.size(), [](size_t i) { return i; });
  }
  // Each page once.
  double read_at_random(uint64_t seed) {
    std::vector<size_t> order(places_.size());
    for (size_t i = 0; i < order.size(); ++i) {
      order[i] = i;
    }
    std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
    return run(Transfer::Kind::kRead, order.size(), [&](size_t i) { return order[i]; });
  }
  DiskTierStats stats() const { return tier_->stats(); }
  void release() {
    for (const PlaceId place : std::exchange(places_, {})) {
      tier_->release(place);
    }
  }

 private:
  double run(Transfer::Kind kind, size_t n, const std::function<size_t(size_t)>& index_of) {
    std::vector<Page*> free;
    for (Page& page : pages_) {
      free.push_back(&page);
    }
    size_t n_begun = 0;
    size_t n_ended = 0;
    const double begin_s = now_s();
    while (n_ended < n) {
      std::vector<Transfer*> next;
      while (!free.empty() && n_begun < n) {
        Page* const page = free.back();
        free.pop_back();
        page->index = index_of(n_begun++);
        page->kind = kind;
        page->place = places_[page->index];
        next.push_back(page);
      }
      tier_->submit(next);
      for (Page* page : ended_.take(std::min<size_t>(kBatch, n_begun - n_ended))) {
        require(page->status, "a transfer");
        places_[page->index] = page->place;
        free.push_back(page);
        ++n_ended;
      }
    }
    return static_cast<double>(n) * kPageBytes / (now_s() - begin_s);
  }

  Ended ended_;
  std::unique_ptr<DiskTier> tier_;
  const Memory memory_;
  std::deque<Page> pages_;
  std::vector<PlaceId> places_;
};

struct Case {
  const char* name;
  uint32_t fio_block_bytes;
  std::function<double(uint32_t round)> run;
  std::function<double()> run_rival;
  std::vector<double> tier = {};
  std::vector<double> rival = {};
};

}  // namespace

int run_disk(const Options& options) {
  Report report("disk", options);
  report.set_max_fraction(std::numeric_limits<double>::infinity());
  const DiskFolder folder(options);
  const uint32_t rounds = options.quick ? 1 : options.repeats;
  // Of two files: the tier's and the rival's.
  const uint64_t wanted = options.size_bytes != 0 ? options.size_bytes
                          : options.quick         ? uint64_t{64} << 20
                                                  : 8 * kGiB;
  folder.require_free(uint64_t{3} * kTransferBytes);
  const uint64_t share = std::max<uint64_t>(
      std::min(wanted / rounds, folder.free_bytes() / 3) / kTransferBytes * kTransferBytes,
      kTransferBytes);

  const bool has_rival = has_fio();
  const auto n_pages = static_cast<uint32_t>(share / kPageBytes);
  const uint64_t capacity = share + share / 16 + 4 * (uint64_t{64} << 20);
  {
    TierRun tier({.directories = {folder.path()},
                  .capacity_bytes = capacity,
                  .segment_bytes = std::min<uint64_t>(64 << 20, capacity / 8 / 4096 * 4096),
                  .transfer_bytes = kTransferBytes,
                  .queue_depth = kDepth});
    std::vector<Case> cases;
    const auto read_as_fio = [&](const char* how, uint32_t block_bytes) {
      return fio_on_segments(folder, how, block_bytes, kDepth, share);
    };
    cases.push_back({"sequential_write", kTransferBytes,
                     [&](uint32_t) { return tier.write(n_pages); },
                     [&] {
                       return fio({{folder.file("rival")}, "write", kTransferBytes, kDepth, share});
                     }});
    cases.push_back({"sequential_read", kTransferBytes, [&](uint32_t) { return tier.read(); },
                     [&] { return read_as_fio("read", kTransferBytes); }});
    cases.push_back({"random_read", kPageBytes,
                     [&](uint32_t round) { return tier.read_at_random(round); },
                     [&] { return read_as_fio("randread", kPageBytes); }});
    for (uint32_t round = 0; round < rounds; ++round) {
      for (Case& of : cases) {
        const auto run_rival = [&] {
          if (has_rival) {
            of.rival.push_back(of.run_rival());
          }
        };
        if (round % 2 == 1) {
          run_rival();
        }
        of.tier.push_back(of.run(round));
        if (round % 2 == 0) {
          run_rival();
        }
      }
    }
    const DiskTierStats stats = tier.stats();
    for (const Case& of : cases) {
      std::vector<std::pair<std::string, nlohmann::json>> row = {
          {"case", of.name},
          {"gib", static_cast<double>(share * rounds) / kGiB},
          {"page_kib", kPageBytes >> 10},
          {"transfer_kib", of.fio_block_bytes >> 10},
          {"depth", kDepth},
          {"rounds", rounds},
          {"backend", stats.backend},
          {"direct", stats.is_direct},
          {"gbps", median(of.tier) * 1e-9}};
      if (has_rival) {
        std::vector<double> ratios;
        for (size_t i = 0; i < of.tier.size(); ++i) {
          ratios.push_back(of.tier[i] / of.rival[i]);
        }
        row.insert(row.end(), {{"fio_gbps", median(of.rival) * 1e-9},
                               {"fraction", median(of.tier) / median(of.rival)},
                               {"fraction_of_pairs", median(ratios)}});
      }
      report.add(std::move(row));
    }
    tier.release();
  }
  if (!has_rival) {
    report.note(kNoFio);
  }
  return report.finish();
}

}  // namespace kvm::bench
