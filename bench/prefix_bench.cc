// SPDX-License-Identifier: Apache-2.0
// prefix: prompts that somebody had before are found and forked, by another client than published
// them, behind a daemon.
//
//   small   many prefixes of several lengths, of one layer and one kv head
//   8b      some of 32,768 tokens of an 8B model; all but the first are forks of it under hashes of
//           their own, so that they have pages in common and tables of pages to themselves
//
// A miss looks for a prompt that nobody had; it is judged by the clock beside it. A hit is a find
// and a fork, a fork is one of the longest prefix at its whole length; both are judged by a null
// request. That no fork takes memory for keys and values is checked before anything is timed.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/splitmix.h"
#include "bench/daemon_child.h"
#include "bench/harness.h"
#include "bench/service_client.h"
#include "kvm.h"

namespace kvm::bench {

namespace {

constexpr uint64_t kPrefixPages = 524288;  // kvmd's prefix_pages
constexpr uint64_t kLongTokens = 32768;
constexpr uint64_t kPromptHashes = kLongTokens / KVM_PREFIX_TOKENS;
constexpr uint64_t kTailPages = 8;  // of a prompt, behind the prefix that it begins with
constexpr uint64_t kAppendBytes = 32ull << 20;  // of K, and of V, in one request
constexpr uint64_t kSlackBytes = 512ull << 20;  // of host memory, beside pages
constexpr size_t kFirstMisses = 4096;
constexpr double kMissTargetNs = 1000;
constexpr double kForkTargetUs = 100;

struct Geometry {
  uint64_t token_bytes() const { return uint64_t{n_layers} * n_kv_heads * head_dim * 2 * 2; }

  const char* name;
  uint32_t n_layers;
  uint32_t n_q_heads;
  uint32_t n_kv_heads;
  uint32_t head_dim;
};

struct Plan {
  // Of prefix i: spread evenly, whole pages.
  uint64_t tokens_of(uint32_t i) const {
    const uint64_t more = (max_tokens - min_tokens) * i / std::max(n_prefixes - 1, 1u);
    return (min_tokens + more) / KVM_PREFIX_TOKENS * KVM_PREFIX_TOKENS;
  }
  // Of the longest n_stored of them.
  uint64_t stored_bytes() const {
    uint64_t bytes = 0;
    for (uint32_t i = n_prefixes - n_stored; i < n_prefixes; ++i) {
      bytes += tokens_of(i) * geometry.token_bytes();
    }
    return bytes;
  }

  Geometry geometry;
  uint32_t n_prefixes;
  uint64_t min_tokens;
  uint64_t max_tokens;
  uint32_t
      n_stored;  // the longest: with keys and values of their own; others are forks of the last
};

// A client that knows the space, and looks for prefixes.
class Looker {
 public:
  Looker(const std::string& socket, const Geometry& geometry) : client_(connect(socket)) {
    kvm_space_params space{};
    space.struct_size = sizeof(space);
    space.name = geometry.name;
    space.n_layers = geometry.n_layers;
    space.n_q_heads = geometry.n_q_heads;
    space.n_kv_heads = geometry.n_kv_heads;
    space.head_dim_k = geometry.head_dim;
    require_ok(kvm_space_register(client_, &space, &space_), "space");
    require_ok(kvm_prefix_seed(client_, space_, nullptr, 0, &seed_), "seed");
  }
  ~Looker() { kvm_client_close(client_); }
  Looker(const Looker&) = delete;
  Looker& operator=(const Looker&) = delete;

  kvm_client* client() const { return client_; }
  kvm_space_id space() const { return space_; }
  const kvm_prefix_hash& seed() const { return seed_; }

  kvm_prefix find(const kvm_prefix_hash* hashes, uint64_t n_hashes) const {
    kvm_prefix_find_params params{};
    params.struct_size = sizeof(params);
    params.space = space_;
    params.hashes = hashes;
    params.n_hashes = n_hashes;
    kvm_prefix found{};
    found.struct_size = sizeof(found);
    require_ok(kvm_prefix_find(client_, &params, &found), "find");
    return found;
  }
  kvm_seq_id fork(kvm_seq_id parent, uint64_t n_tokens) const {
    kvm_seq_id seq = 0;
    require_ok(kvm_seq_fork(client_, parent, n_tokens, &seq), "fork");
    return seq;
  }
  void free(kvm_seq_id seq) const { require_ok(kvm_seq_free(client_, seq), "free"); }
  kvm_seq_info info(kvm_seq_id seq) const {
    kvm_seq_info info{};
    info.struct_size = sizeof(info);
    require_ok(kvm_seq_get_info(client_, seq, &info), "info");
    return info;
  }
  kvm_stats stats() const {
    kvm_stats stats{};
    stats.struct_size = sizeof(stats);
    require_ok(kvm_get_stats(client_, &stats), "stats");
    return stats;
  }

 private:
  kvm_client* client_;
  kvm_space_id space_ = 0;
  kvm_prefix_hash seed_{};
};

// One that makes sequences of random keys and values.
class Writer {
 public:
  Writer(const std::string& socket, const Geometry& geometry)
      : looker_(socket, geometry),
        queue_(make_queue(looker_.client(), 0)),
        n_layers_(geometry.n_layers),
        block_(std::min(kLongTokens, 2 * kAppendBytes / geometry.token_bytes())) {
    const uint64_t bytes = block_ * geometry.token_bytes() / 2;
    kvm_arena_params params{};
    params.struct_size = sizeof(params);
    params.size = 2 * bytes + (1ull << 20);
    require_ok(kvm_arena_create(looker_.client(), &params, &arena_), "arena");
    k_ = allocate(arena_, bytes, KVM_DTYPE_BF16);
    v_ = allocate(arena_, bytes, KVM_DTYPE_BF16);
    fill_random_bf16(k_.halves(), bytes / 2, 1);
    fill_random_bf16(v_.halves(), bytes / 2, 2);
  }
  ~Writer() {
    kvm_queue_destroy(queue_);
    kvm_arena_destroy(arena_);
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  const Looker& looker() const { return looker_; }
  kvm_seq_id create(uint64_t n_tokens) const {
    kvm_seq_id seq = 0;
    require_ok(kvm_seq_create(looker_.client(), looker_.space(), nullptr, &seq), "sequence");
    for (uint64_t begin = 0; begin < n_tokens; begin += block_) {
      kvm_item item{};
      item.seq = seq;
      item.append_position = KVM_POSITION_END;
      item.n_append = static_cast<uint32_t>(std::min(block_, n_tokens - begin));
      kvm_step_params params{};
      params.struct_size = sizeof(params);
      params.space = looker_.space();
      params.n_layers = n_layers_;
      params.n_items = 1;
      params.items = &item;
      params.k = k_.tensor;
      params.v = v_.tensor;
      require_ok(kvm_append(queue_, &params), "append");
    }
    return seq;
  }

 private:
  Looker looker_;
  kvm_queue* queue_;
  kvm_arena* arena_ = nullptr;
  uint32_t n_layers_;
  uint64_t block_;  // tokens of an append
  ArenaTensor k_, v_;
};

struct Prefix {
  uint64_t n_tokens = 0;
  std::vector<kvm_prefix_hash> prompt;  // of its pages, and of kTailPages that nobody has
};

std::vector<uint32_t> random_tokens(uint64_t count, uint64_t seed) {
  std::vector<uint32_t> tokens(count);
  for (uint64_t i = 0; i < count; ++i) {
    tokens[i] = static_cast<uint32_t>(splitmix64((seed << 32) + i + 1) % 128'000);
  }
  return tokens;
}

// Publishes all and leaves. They stay, in the order of the plan. publish_s: how long each took.
std::vector<Prefix> publish(const std::string& socket, const Plan& plan,
                            std::vector<double>* publish_s) {
  const Writer writer(socket, plan.geometry);
  const Looker& looker = writer.looker();
  std::vector<Prefix> prefixes(plan.n_prefixes);
  kvm_seq_id longest = 0;
  for (uint32_t i = plan.n_prefixes; i-- > 0;) {
    Prefix& prefix = prefixes[i];
    prefix.n_tokens = plan.tokens_of(i);
    const uint64_t n_pages = prefix.n_tokens / KVM_PREFIX_TOKENS;
    const std::vector<uint32_t> tokens =
        random_tokens((n_pages + kTailPages) * KVM_PREFIX_TOKENS, i + 1);
    prefix.prompt.resize(n_pages + kTailPages);
    require_ok(
        kvm_prefix_hashes(&looker.seed(), tokens.data(), tokens.size(), prefix.prompt.data()),
        "hashes");
    const bool is_stored = i + plan.n_stored >= plan.n_prefixes;
    const kvm_seq_id seq =
        is_stored ? writer.create(prefix.n_tokens) : looker.fork(longest, prefix.n_tokens);
    longest = longest == 0 ? seq : longest;
    const double begin = now_s();
    require_ok(kvm_prefix_publish(looker.client(), seq, prefix.prompt.data(),
                                  static_cast<uint32_t>(n_pages), 0),
               "publish");
    publish_s->push_back(now_s() - begin);
  }
  return prefixes;
}

// Each prefix is found whole, and a fork of it takes no memory for pages. Returns what forks paid.
uint64_t check_forks(const Looker& looker, const std::vector<Prefix>& prefixes, Report* report) {
  const uint64_t before = looker.stats().host_page_bytes;
  uint64_t paid = 0;
  std::vector<kvm_seq_id> forks;
  for (const Prefix& prefix : prefixes) {
    const kvm_prefix found = looker.find(prefix.prompt.data(), prefix.prompt.size());
    if (found.n_tokens != prefix.n_tokens) {
      report->fail(
          fmt::format("of a prefix of {} tokens {} were found", prefix.n_tokens, found.n_tokens));
      continue;
    }
    forks.push_back(looker.fork(found.seq, found.n_tokens));
    const kvm_seq_info info = looker.info(forks.back());
    paid += info.bytes_paid;
    if (info.n_tokens_min != prefix.n_tokens || info.bytes_shared != info.bytes) {
      report->fail(fmt::format("a fork of {} tokens has {}, and shares {} of {} bytes",
                               prefix.n_tokens, info.n_tokens_min, info.bytes_shared, info.bytes));
    }
  }
  const uint64_t after = looker.stats().host_page_bytes;
  if (paid != 0 || after != before) {
    report->fail(fmt::format("forks took memory: they paid {} bytes, and pages have {} more", paid,
                             static_cast<int64_t>(after - before)));
  }
  for (const kvm_seq_id seq : forks) {
    looker.free(seq);
  }
  return paid;
}

double clock_ns() {
  std::vector<double> times;
  for (uint32_t i = 0; i < 1000; ++i) {
    const double begin = now_s();
    times.push_back(now_s() - begin);
  }
  return median(times) * 1e9;
}

double hash_ns_per_token(const Looker& looker, uint32_t repeats) {
  const std::vector<uint32_t> tokens = random_tokens(kLongTokens, 0);
  std::vector<kvm_prefix_hash> hashes(kPromptHashes);
  std::vector<double> times;
  for (uint32_t i = 0; i < repeats; ++i) {
    const double begin = now_s();
    require_ok(kvm_prefix_hashes(&looker.seed(), tokens.data(), tokens.size(), hashes.data()),
               "hashes");
    times.push_back(now_s() - begin);
  }
  return median(times) * 1e9 / static_cast<double>(kLongTokens);
}

struct Misses {
  std::vector<double> first_s;  // of a client that has not seen the table before
  std::vector<double> later_s;
};

// Prompts of random hashes: each begins one further in a list of them, so its first hash, and with
// it the place in the table, is another one.
Misses miss(const Looker& looker, uint32_t n_misses, Report* report) {
  std::vector<kvm_prefix_hash> hashes(2 * n_misses + kPromptHashes);
  uint64_t state = 4711;
  for (kvm_prefix_hash& hash : hashes) {
    for (size_t at = 0; at < sizeof(hash.bytes); at += sizeof(uint64_t)) {
      const uint64_t random = splitmix64(state += kSplitMixStep);
      std::copy_n(reinterpret_cast<const uint8_t*>(&random), sizeof(random), hash.bytes + at);
    }
  }
  Misses misses;
  uint64_t n_found = looker.find(&hashes.back(), 1).n_tokens;  // asks for the table
  for (uint32_t i = 0; i < 2 * n_misses; ++i) {
    const double begin = now_s();
    const kvm_prefix found = looker.find(&hashes[i], kPromptHashes);
    const double seconds = now_s() - begin;
    n_found += found.n_tokens;
    if (i < kFirstMisses) {
      misses.first_s.push_back(seconds);
    }
    if (i >= n_misses) {
      misses.later_s.push_back(seconds);
    }
  }
  if (n_found != 0) {
    report->fail("a prompt was found that nobody had");
  }
  return misses;
}

struct Hits {
  std::vector<double> find_s, hit_s, fork_s, ping_s;
  std::vector<double> beyond_ping_s;  // of a fork, over the null request behind it
};

Hits hit(const Looker& looker, const std::vector<Prefix>& prefixes, uint32_t n_hits) {
  Hits hits;
  for (uint32_t i = 0; i < n_hits; ++i) {
    const Prefix& prefix = prefixes[splitmix64(i + 1) % prefixes.size()];
    double begin = now_s();
    const kvm_prefix found = looker.find(prefix.prompt.data(), prefix.prompt.size());
    const double middle = now_s();
    kvm_seq_id seq = looker.fork(found.seq, found.n_tokens);
    hits.hit_s.push_back(now_s() - begin);
    hits.find_s.push_back(middle - begin);
    looker.free(seq);
    const Prefix& longest = prefixes.back();
    const kvm_seq_id parent = looker.find(longest.prompt.data(), longest.prompt.size()).seq;
    begin = now_s();
    seq = looker.fork(parent, longest.n_tokens);
    hits.fork_s.push_back(now_s() - begin);
    looker.free(seq);
    begin = now_s();
    require_ok(kvm_client_ping(looker.client(), nullptr), "ping");
    hits.ping_s.push_back(now_s() - begin);
    hits.beyond_ping_s.push_back(hits.fork_s.back() - hits.ping_s.back());
  }
  return hits;
}

void add_case(const Options& options, const char* name, const Plan& plan, Report* report) {
  const DaemonChild daemon(thread_count(options), plan.stored_bytes() + kSlackBytes, {},
                           kPrefixPages);
  std::vector<double> publish_s;
  const std::vector<Prefix> prefixes = publish(daemon.socket_path(), plan, &publish_s);
  const Looker looker(daemon.socket_path(), plan.geometry);
  uint64_t n_pages = 0;
  for (const Prefix& prefix : prefixes) {
    n_pages += prefix.n_tokens / KVM_PREFIX_TOKENS;
  }
  // Before anything else of this client: it knows nothing of the table.
  const Misses misses = miss(looker, options.quick ? 1000 : 100'000, report);
  const uint64_t paid = check_forks(looker, prefixes, report);
  const Hits hits = hit(looker, prefixes, options.quick ? 50 : 2000);
  report->add({{"case", name},
               {"n_prefixes", prefixes.size()},
               {"tokens", plan.max_tokens},
               {"pages", n_pages},
               {"stored", plan.n_stored},
               {"gib", static_cast<double>(plan.stored_bytes()) / (1ull << 30)},
               {"hash_ns_per_token", hash_ns_per_token(looker, options.repeats)},
               {"clock_ns", clock_ns()},
               {"miss_ns", median(misses.later_s) * 1e9},
               {"miss_p99_ns", percentile(misses.later_s, 0.99) * 1e9},
               {"miss_target_ns", kMissTargetNs},
               {"first_miss_ns", median(misses.first_s) * 1e9},
               {"first_miss_p99_ns", percentile(misses.first_s, 0.99) * 1e9},
               {"hit_ns", median(hits.find_s) * 1e9},
               {"hit_us", median(hits.hit_s) * 1e6},
               {"hit_p99_us", percentile(hits.hit_s, 0.99) * 1e6},
               {"fork_us", median(hits.fork_s) * 1e6},
               {"fork_p99_us", percentile(hits.fork_s, 0.99) * 1e6},
               {"fork_target_us", kForkTargetUs},
               {"fork_paid_bytes", paid},
               {"ping_us", median(hits.ping_s) * 1e6},
               {"ping_p99_us", percentile(hits.ping_s, 0.99) * 1e6},
               {"fork_beyond_ping_us", median(hits.beyond_ping_s) * 1e6},
               {"publish_us", median(publish_s) * 1e6}});
}

}  // namespace

int run_prefix(const Options& options) {
  Report report("prefix", options);
  const uint64_t budget = std::max(memory_budget_bytes(options), 2 * kSlackBytes) - kSlackBytes;
  Plan small{.geometry = {"bench-prefix-small", 1, 1, 1, 64},
             .n_prefixes = options.quick ? 20u : 1000u,
             .min_tokens = 1024,
             .max_tokens = options.quick ? 4096 : kLongTokens,
             .n_stored = options.quick ? 20u : 1000u};
  if (small.stored_bytes() > budget) {
    small.n_stored = 1;
  }
  const uint64_t tokens = options.quick ? 4096 : kLongTokens;
  Plan large{.geometry = {"bench-prefix-8b", options.quick ? 2u : 32u, 32, 8, 128},
             .n_prefixes = 10,
             .min_tokens = tokens,
             .max_tokens = tokens,
             .n_stored = 1};
  while (large.stored_bytes() > budget) {
    large.min_tokens = large.max_tokens /= 2;
  }
  add_case(options, "small", small, &report);
  add_case(options, "8b", large, &report);
  report.note(
      "tokens: of the longest; stored: so many have keys and values of their own, the others are "
      "forks; first_*: as a client begins; times include clock_ns; ping: a null request, which "
      "shows whether client and daemon slept");
  if (large.max_tokens < tokens) {
    report.note(fmt::format("8b has {} tokens instead of {}: there is no memory for more",
                            large.max_tokens, tokens));
  }
  return report.finish();
}

}  // namespace kvm::bench
