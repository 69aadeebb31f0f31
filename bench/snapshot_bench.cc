// SPDX-License-Identifier: Apache-2.0
// Sequences that are saved and come back.
//
//   resume   one of 32,768 tokens of an 8B model is saved, freed and loaded; the rival of the load
//            is fio's read of large blocks on the same disk
//   paused   what each of many small sequences costs in memory while it is saved and nothing else
//   recover  a process that saves is killed; what it has said is saved must be there when another
//            opens the same directory
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/splitmix.h"
#include "bench/engine_rig.h"
#include "bench/fio.h"
#include "bench/harness.h"
#include "bench/timing.h"
#include "tiers/disk/disk_tier.h"

namespace kvm::bench {
namespace {

constexpr uint32_t kFioBlockBytes = 256 << 10;
constexpr uint32_t kFioDepth = 32;
constexpr uint64_t kSegmentBytes = uint64_t{64} << 20;

double gib(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

std::unique_ptr<tiers::DiskTier> open_tier(const std::string& folder, uint64_t bytes) {
  return require(tiers::DiskTier::open({.directories = {folder},
                                        .capacity_bytes = bytes * 3 / 2 + 8 * kSegmentBytes}),
                 "disk tier");
}

kvm::RequestResult snapshot(Rig& rig, SnapshotVerb verb, const std::string& name,
                            kvm_seq_id seq = 0) {
  SnapshotRequest request;
  request.verb = verb;
  request.flags = verb == SnapshotVerb::kSave ? kSaveReplace : 0;
  request.seq = seq;
  request.space = verb == SnapshotVerb::kLoad ? rig.space() : 0;
  request.name = name;
  return run(rig.engine(), rig.client(), std::move(request));
}

void wait_until_fetched(engine::Engine& engine) {
  while (engine.is_fetching()) {
    if (!engine.work()) {
      engine.poll();
    }
  }
}

// Anonymous memory that the process has, in bytes.
uint64_t resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "RssAnon:") {
      uint64_t kib = 0;
      status >> kib;
      return kib << 10;
    }
  }
  return 0;
}

}  // namespace

int run_resume(const Options& options) {
  const Shape shape;
  const uint32_t n_layers = options.quick ? 2 : 32;
  const uint64_t n_tokens = options.quick ? 2048 : 32768;
  const uint64_t bytes = n_tokens * n_layers * shape.token_bytes();
  Report report("resume", options);
  report.set_max_fraction(10);
  const DiskFolder folder(options);
  folder.require_free(3 * bytes + 12 * kSegmentBytes);
  const bool has_rival = has_fio();
  const auto read_fio = [&] {
    return fio_on_segments(folder, "read", kFioBlockBytes, kFioDepth, bytes);
  };
  if (!has_rival) {
    report.note(kNoFio);
  }
  const std::unique_ptr<tiers::DiskTier> tier = open_tier(folder.path(), 2 * bytes);
  Rig rig(
      shape, n_layers,
      Rig::options_of(thread_count(options), bytes * 5 / 4 + (uint64_t{512} << 20), tier.get()));
  kvm_seq_id seq = rig.create();
  for (uint32_t layer = 0; layer < n_layers; ++layer) {
    rig.fill(seq, layer, n_tokens, 7 + 1000 * layer);
  }
  const uint64_t n_q = uint64_t{shape.n_q_heads} * shape.head_dim;
  Memory q(n_q * 2), o(n_q * 4), lse(shape.n_q_heads * 4);
  fill_random_bf16(q.as<uint16_t>(), n_q, 99);
  rig.run_step(rig.attend({seq}, 1, q, o, lse));
  const std::vector<float> expected(o.as<float>(), o.as<float>() + n_q);
  std::vector<double> save_s, again_s, load_s, attend_s, all_s, gbps, fio_gbps, fractions;
  bool is_equal = true;
  for (uint32_t i = 0; i < options.repeats; ++i) {
    const std::string name = "resume";
    double begin = now_s();
    require(snapshot(rig, SnapshotVerb::kSave, name, seq).status, "save");
    save_s.push_back(now_s() - begin);
    // One token later only what is new is written.
    begin = now_s();
    require(snapshot(rig, SnapshotVerb::kSave, name, seq).status, "save");
    again_s.push_back(now_s() - begin);
    rig.free(seq);
    if (has_rival && i % 2 == 0) {
      fio_gbps.push_back(read_fio() * 1e-9);
    }
    const uint64_t n_read = tier->stats().read_bytes;
    begin = now_s();
    const kvm::RequestResult loaded = snapshot(rig, SnapshotVerb::kLoad, name);
    require(loaded.status, "load");
    seq = loaded.seq;
    load_s.push_back(now_s() - begin);
    require(rig.engine().prefetch(seq), "prefetch");
    rig.run_step(rig.attend({seq}, 1, q, o, lse));
    attend_s.push_back(now_s() - begin);
    is_equal &= std::memcmp(o.as<float>(), expected.data(), n_q * 4) == 0;
    const bool is_before = rig.engine().is_fetching();
    wait_until_fetched(rig.engine());
    all_s.push_back(now_s() - begin);
    if (!is_before && !options.quick) {
      report.fail("the first attend came after all pages were there");
    }
    gbps.push_back(static_cast<double>(tier->stats().read_bytes - n_read) / all_s.back() * 1e-9);
    if (has_rival && i % 2 != 0) {
      fio_gbps.push_back(read_fio() * 1e-9);
    }
    if (!fio_gbps.empty()) {
      fractions.push_back(gbps.back() / fio_gbps.back());
    }
    // What is saved next is written anew.
    require(snapshot(rig, SnapshotVerb::kRemove, name).status, "remove");
    const kvm_seq_id fresh = rig.create();
    rig.free(seq);
    for (uint32_t layer = 0; layer < n_layers; ++layer) {
      rig.fill(fresh, layer, n_tokens, 7 + 1000 * layer);
    }
    seq = fresh;
  }
  std::vector<std::pair<std::string, nlohmann::json>> row = {{"tokens", n_tokens},
                                                             {"layers", n_layers},
                                                             {"gib", gib(bytes)},
                                                             {"rounds", options.repeats},
                                                             {"backend", tier->stats().backend},
                                                             {"direct", tier->stats().is_direct},
                                                             {"save_s", median(save_s)},
                                                             {"save_again_s", median(again_s)},
                                                             {"load_answered_s", median(load_s)},
                                                             {"first_attend_s", median(attend_s)},
                                                             {"load_s", median(all_s)},
                                                             {"gbps", median(gbps)},
                                                             {"bit_equal", is_equal}};
  if (!fio_gbps.empty()) {
    row.insert(row.end(), {{"fio_gbps", median(fio_gbps)}, {"fraction", median(fractions)}});
  }
  report.add(std::move(row));
  if (!is_equal) {
    report.fail("the answer is another one after the load");
  }
  return report.finish();
}

int run_paused(const Options& options) {
  const Shape shape{.n_q_heads = 8, .n_kv_heads = 2, .head_dim = 64};
  constexpr uint32_t kLayers = 4;
  const uint32_t n_sequences = options.quick ? 500 : 10'000;
  constexpr uint32_t kTokens = 200;
  Report report("paused", options);
  const DiskFolder folder(options);
  const uint64_t bytes = uint64_t{n_sequences} * 256 * kLayers * shape.token_bytes() * 2;
  folder.require_free(2 * bytes + 12 * kSegmentBytes);
  const std::unique_ptr<tiers::DiskTier> tier = open_tier(folder.path(), 2 * bytes);
  Rig rig(shape, kLayers, Rig::options_of(thread_count(options), uint64_t{512} << 20, tier.get()));
  Memory k(uint64_t{kLayers} * kTokens * shape.n_kv_heads * shape.head_dim * 2);
  Memory v(k.size_bytes());
  fill_random_bf16(k.as<uint16_t>(), k.size_bytes() / 2, 1);
  fill_random_bf16(v.as<uint16_t>(), v.size_bytes() / 2, 2);
  const auto pause_one = [&](uint32_t i) {
    const kvm_seq_id seq = rig.create();
    rig.append(seq, 0, kLayers, kTokens, k, v);
    require(snapshot(rig, SnapshotVerb::kSave, fmt::format("paused/{}", i), seq).status, "save");
    rig.free(seq);
  };
  // What tables and caches take in any case is there after some.
  for (uint32_t i = 0; i < n_sequences / 10; ++i) {
    pause_one(i);
  }
  const uint64_t before = resident_bytes();
  const double begin = now_s();
  for (uint32_t i = n_sequences / 10; i < n_sequences; ++i) {
    pause_one(i);
  }
  const double seconds = now_s() - begin;
  const uint64_t n = n_sequences - n_sequences / 10;
  const uint64_t after = resident_bytes();
  report.add({{"sequences", n_sequences},
              {"layers", kLayers},
              {"tokens", kTokens},
              {"kv_bytes_per_sequence", kTokens * kLayers * shape.token_bytes()},
              {"bytes_per_sequence", after > before ? (after - before) / n : 0},
              {"saves_per_s", static_cast<double>(n) / seconds}});
  return report.finish();
}

namespace {

constexpr uint32_t kRecoverLayers = 4;
constexpr uint32_t kRecoverTokens = 4096;

// What snapshot i holds in its version follows from this.
uint64_t seed_of(uint32_t i, uint32_t version) {
  return splitmix64((uint64_t{i} << 32 | version) + 1) >> 8;
}

// What a child says: that a version is begun, or saved.
struct Said {
  uint32_t index;
  uint32_t version;
  uint32_t is_saved;
};

// Saves until it is killed.
[[noreturn]] void save_for_ever(const Options& options, const std::string& folder, uint64_t bytes,
                                uint32_t n_snapshots, int to) {
  const std::unique_ptr<tiers::DiskTier> tier = open_tier(folder, bytes);
  engine::EngineOptions engine_options =
      Rig::options_of(thread_count(options), uint64_t{768} << 20, tier.get());
  engine_options.movement.is_automatic = true;
  Rig rig({}, kRecoverLayers, engine_options);
  const auto say = [&](const Said& said) {
    if (::write(to, &said, sizeof(said)) != sizeof(said)) {
      ::_exit(1);
    }
  };
  std::vector<uint32_t> versions(n_snapshots);
  for (uint64_t step = 0;; ++step) {
    // Each once, and then any.
    const auto i =
        static_cast<uint32_t>(step < n_snapshots ? step : splitmix64(step)) % n_snapshots;
    const uint32_t version = ++versions[i];
    say({i, version, 0});
    const kvm_seq_id seq = rig.create();
    for (uint32_t layer = 0; layer < kRecoverLayers; ++layer) {
      rig.fill(seq, layer, kRecoverTokens, seed_of(i, version) + 100'000 * layer);
    }
    require(snapshot(rig, SnapshotVerb::kSave, fmt::format("s{}", i), seq).status, "save");
    say({i, version, 1});
    rig.free(seq);
    if (step % 5 == 4) {
      const kvm::RequestResult loaded =
          snapshot(rig, SnapshotVerb::kLoad, fmt::format("s{}", splitmix64(step) % (i + 1)));
      if (loaded.status.is_ok()) {
        rig.free(loaded.seq);
      }
    }
  }
}

std::string name_of(const std::string& key) {
  const size_t slash = key.find('/');
  return std::string(key.begin() + static_cast<ptrdiff_t>(slash == key.npos ? 0 : slash + 1),
                     key.end());
}

// Which version a snapshot holds, by all rows of one of its blocks; 0: none that it may hold.
uint32_t version_of(Rig& rig, kvm_seq_id seq, uint32_t i, uint32_t first, uint32_t last,
                    uint32_t layer) {
  const Shape shape;
  const uint64_t n = uint64_t{kRecoverTokens} * shape.n_kv_heads * shape.head_dim;
  Memory k(n * 2), v(n * 2), expected(n * 2);
  ReadRequest read;
  read.seq = seq;
  read.layer = layer;
  read.n_tokens = kRecoverTokens;
  read.k = k.tensor(KVM_DTYPE_BF16);
  read.v = v.tensor(KVM_DTYPE_BF16);
  require(run(rig.engine(), rig.client(), std::move(read)).status, "read");
  for (uint32_t version = first; version <= last; ++version) {
    fill_random_bf16(expected.as<uint16_t>(), n, seed_of(i, version) + 100'000 * layer);
    if (std::memcmp(expected.as<uint16_t>(), k.as<uint16_t>(), n * 2) == 0) {
      return version;
    }
  }
  return 0;
}

}  // namespace

int run_recover(const Options& options) {
  const Shape shape;
  const uint64_t each = uint64_t{kRecoverTokens} * kRecoverLayers * shape.token_bytes();
  const uint64_t size = options.size_bytes != 0 ? options.size_bytes
                        : options.quick         ? 4 * each
                                                : uint64_t{20} << 30;
  const auto n_snapshots = static_cast<uint32_t>(std::max<uint64_t>(2, size / each));
  const uint32_t n_kills = options.quick ? 1 : 3;
  Report report("recover", options);
  const DiskFolder folder(options);
  const uint64_t bytes = n_snapshots * each;
  folder.require_free(bytes * 3 / 2 + 12 * kSegmentBytes);
  for (uint32_t kill = 0; kill < n_kills; ++kill) {
    int pipe[2];
    if (::pipe(pipe) != 0) {
      require(Status(KVM_ERR_IO, std::strerror(errno)), "pipe");
    }
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(pipe[0]);
      save_for_ever(options, folder.path(), bytes, n_snapshots, pipe[1]);
    }
    ::close(pipe[1]);
    // All are saved once, and some again; it is killed in the midst.
    std::vector<uint32_t> begun(n_snapshots), saved(n_snapshots);
    uint64_t n_saved = 0;
    const uint64_t n_wanted = n_snapshots + n_snapshots / 4 + 1;
    for (Said said{}; n_saved < n_wanted && ::read(pipe[0], &said, sizeof(said)) == sizeof(said);) {
      (said.is_saved != 0 ? saved : begun)[said.index] = said.version;
      n_saved += said.is_saved;
    }
    ::usleep(20'000 + 30'000 * kill);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    for (Said said{}; ::read(pipe[0], &said, sizeof(said)) == sizeof(said);) {
      (said.is_saved != 0 ? saved : begun)[said.index] = said.version;
    }
    ::close(pipe[0]);
    const double begin = now_s();
    const std::unique_ptr<tiers::DiskTier> tier = open_tier(folder.path(), bytes);
    Rig rig(shape, kRecoverLayers,
            Rig::options_of(thread_count(options), uint64_t{768} << 20, tier.get()));
    const double seconds = now_s() - begin;
    const tiers::RecoveryReport found = tier->objects()->recovery();
    uint64_t n_lost = 0;
    uint64_t n_wrong = 0;
    for (uint32_t i = 0; i < n_snapshots; ++i) {
      if (saved[i] == 0) {
        continue;
      }
      const kvm::RequestResult loaded = snapshot(rig, SnapshotVerb::kLoad, fmt::format("s{}", i));
      if (!loaded.status.is_ok()) {
        ++n_lost;
        continue;
      }
      const uint32_t layer = i % kRecoverLayers;
      n_wrong += version_of(rig, loaded.seq, i, saved[i], std::max(saved[i], begun[i]), layer) == 0
                     ? 1
                     : 0;
      rig.free(loaded.seq);
    }
    report.add({{"kill", kill},
                {"snapshots", found.n_objects},
                {"on_disk_gib", gib(found.page_bytes)},
                {"saves_acked", n_saved},
                {"seconds", seconds},
                {"files_s", static_cast<double>(found.duration_ns) * 1e-9},
                {"lost_acked", n_lost},
                {"wrong", n_wrong},
                {"lost_reported", found.n_lost_objects},
                {"torn_dropped", found.n_torn_blocks},
                {"segments_open", found.n_open_segments}});
    if (n_lost != 0 || n_wrong != 0) {
      report.fail("what was said to be saved is not there");
    }
    for (const tiers::ObjectInfo& info : tier->objects()->list("", SIZE_MAX)) {
      require(snapshot(rig, SnapshotVerb::kRemove, name_of(info.key)).status, "remove");
    }
  }
  return report.finish();
}

}  // namespace kvm::bench
