// SPDX-License-Identifier: Apache-2.0
// exact, prefill, append, fork: the engine alone, in this process.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>

#include "base/codec_id.h"
#include "bench/ceiling.h"
#include "bench/engine_rig.h"
#include "bench/harness.h"
#include "codecs/codec.h"

namespace kvm::bench {

namespace {

// A torch process that runs scaled_dot_product_attention on the same shapes when told to.
class TorchPeer {
 public:
  TorchPeer(const Shape& shape, uint32_t n_seqs, uint64_t n_tokens, uint32_t threads) {
    int down[2];
    int up[2];
    if (pipe2(down, O_CLOEXEC) != 0 || pipe2(up, O_CLOEXEC) != 0) {
      require(Status(KVM_ERR_INTERNAL, std::strerror(errno)), "pipe");
    }
    const char* python = std::getenv("KVM_PYTHON");
    const char* root = std::getenv("KVM_SOURCE_DIR");
    const std::string script = fmt::format("{}/bench/torch_peer.py", root ? root : ".");
    const std::vector<std::string> words = {
        python ? python : "python3",      script,
        std::to_string(n_seqs),           std::to_string(shape.n_q_heads),
        std::to_string(shape.n_kv_heads), std::to_string(shape.head_dim),
        std::to_string(n_tokens),         std::to_string(threads)};
    child_ = fork();
    if (child_ == 0) {
      dup2(down[0], 0);
      dup2(up[1], 1);
      std::vector<char*> argv;
      for (const auto& word : words) {
        argv.push_back(const_cast<char*>(word.c_str()));
      }
      argv.push_back(nullptr);
      execvp(argv[0], argv.data());
      _exit(127);
    }
    close(down[0]);
    close(up[1]);
    to_ = fdopen(down[1], "w");
    from_ = fdopen(up[0], "r");
  }
  ~TorchPeer() {
    fclose(to_);
    fclose(from_);
    waitpid(child_, nullptr, 0);
  }
  TorchPeer(const TorchPeer&) = delete;
  TorchPeer& operator=(const TorchPeer&) = delete;

  // Seconds of the best of its variants (dtype, layout); the first answer says which: see `what`.
  double run() {
    fputs("run\n", to_);
    fflush(to_);
    char line[256] = {};
    if (fgets(line, sizeof(line), from_) == nullptr) {
      require(Status(KVM_ERR_INTERNAL, "the torch process ended; is torch==2.13.0 installed?"),
              "torch peer");
    }
    char name[128] = {};
    double seconds = 0;
    if (sscanf(line, "%lf %127s", &seconds, name) != 2) {
      require(Status(KVM_ERR_INTERNAL, line), "torch peer");
    }
    what = name;
    return seconds;
  }
  std::string what;

 private:
  pid_t child_ = -1;
  FILE* to_ = nullptr;
  FILE* from_ = nullptr;
};

struct ExactCase {
  Shape shape;
  uint32_t n_seqs;
  uint64_t tokens;
  uint32_t threads;
};

// The sequences of a case in an engine of their own.
struct ExactRig {
  ExactRig(const ExactCase& c, const Shape& shape)
      : bytes(c.n_seqs * c.tokens * shape.token_bytes()),
        rig(shape, 1, c.threads, bytes + bytes / 8 + (256ull << 20)) {
    for (uint32_t i = 0; i < c.n_seqs; ++i) {
      seqs.push_back(rig.create());
      rig.fill(seqs.back(), 0, c.tokens, i * 1000003ull);
    }
  }
  // Steps follow each other, as layers do in a decode: the ceiling's threads are awake as well.
  // Short cases repeat more often, so that a round is long against the clock's noise.
  double step_seconds(const Memory& q, const Memory& o, const Memory& lse) {
    const int inner = static_cast<int>(std::max<uint64_t>(4, (64ull << 20) / bytes));
    const double begin = now_s();
    for (int j = 0; j < inner; ++j) {
      rig.run_step(rig.attend(seqs, 1, q, o, lse));
    }
    return (now_s() - begin) / inner;
  }

  uint64_t bytes;
  Rig rig;
  std::vector<kvm_seq_id> seqs;
};

void run_exact_case(const ExactCase& c, const Options& options, Report& report) {
  ExactRig judged(c, c.shape);
  struct Rival {  // what int8 and fp8 are compared with
    CodecId codec;
    std::unique_ptr<ExactRig> rig;
    std::vector<double> seconds;
  };
  std::vector<Rival> rivals;
  for (const CodecId codec : {CodecId::kBf16, CodecId::kI8}) {
    if (codecs::codec_of(c.shape.codec).is_scaled() && codec < c.shape.codec) {
      Shape shape = c.shape;
      shape.codec = codec;
      rivals.push_back({codec, std::make_unique<ExactRig>(c, shape), {}});
    }
  }
  Memory q(uint64_t{c.n_seqs} * c.shape.n_q_heads * c.shape.head_dim * 2);
  Memory o(uint64_t{c.n_seqs} * c.shape.n_q_heads * c.shape.head_dim * 4);
  Memory lse(uint64_t{c.n_seqs} * c.shape.n_q_heads * 4);
  fill_random_bf16(q.as<uint16_t>(), q.size_bytes() / 2, 7);

  Team team(c.threads);
  ReadCeiling ceiling(team, judged.rig.memory(judged.seqs));
  std::unique_ptr<TorchPeer> torch;
  if (options.peer == "torch") {
    torch = std::make_unique<TorchPeer>(c.shape, c.n_seqs, c.tokens, c.threads);
  }
  std::vector<double> seconds;
  std::vector<double> torch_seconds;
  for (uint32_t i = 0; i < options.repeats + 1; ++i) {
    const double took = judged.step_seconds(q, o, lse);
    if (i > 0) {  // the first round warms up
      seconds.push_back(took);
    }
    for (Rival& rival : rivals) {
      const double rival_took = rival.rig->step_seconds(q, o, lse);
      if (i > 0) {
        rival.seconds.push_back(rival_took);
      }
    }
    ceiling.run_once();
    if (torch) {
      torch_seconds.push_back(torch->run());
    }
  }
  const double ms = median(seconds) * 1e3;
  const double gbps = static_cast<double>(judged.bytes) / (ms * 1e6);
  const double ceiling_gbps = ceiling.bytes_per_s() * 1e-9;
  std::string shape = c.shape.name();
  if (c.n_seqs > 1) {
    shape += fmt::format("_b{}", c.n_seqs);
  }
  if (torch) {
    report.add({{"peer", "torch"},
                {"shape", shape},
                {"tokens", c.tokens},
                {"threads", c.threads},
                {"ms", ms},
                {"peer_ms", median(torch_seconds) * 1e3},
                {"peer_variant", torch->what},
                {"speedup", median(torch_seconds) * 1e3 / ms},
                {"fraction", gbps / ceiling_gbps}});
    return;
  }
  std::vector<std::pair<std::string, nlohmann::json>> fields = {{"shape", shape},
                                                                {"tokens", c.tokens},
                                                                {"threads", c.threads},
                                                                {"isa", judged.rig.engine().isa()},
                                                                {"ms", ms},
                                                                {"gbps", gbps},
                                                                {"ceiling_gbps", ceiling_gbps},
                                                                {"fraction", gbps / ceiling_gbps}};
  for (const Rival& rival : rivals) {
    fields.emplace_back(std::string("speedup_") + codecs::codec_of(rival.codec).name,
                        median(rival.seconds) * 1e3 / ms);
  }
  report.add(fields);
}

}  // namespace

int run_exact(const Options& options) {
  Report report(options.peer.empty() ? "exact" : "exact_vs", options);
  const uint32_t all = thread_count(options);
  const Shape gqa;
  const Shape mha{8, 8, 128};
  const Shape int8{.codec = CodecId::kI8};
  const Shape fp8{.codec = CodecId::kF8};
  std::vector<ExactCase> cases;
  for (uint32_t threads : {1u, all}) {
    // Only by name: no part of the figures that are compared.
    const codecs::Codec* const named = codecs::find_codec(options.codec);
    if (named != nullptr && !named->rows_stand_alone()) {
      for (uint64_t tokens : {8192ull, 65536ull, 98304ull}) {
        cases.push_back({{.codec = named->id}, 1, tokens, threads});
      }
    }
    if (options.peer.empty()) {
      for (uint64_t tokens : {8192ull, 65536ull, 98304ull}) {
        cases.push_back({int8, 1, tokens, threads});
        cases.push_back({fp8, 1, tokens, threads});
      }
    }
    for (uint64_t tokens : {8192ull, 65536ull, 98304ull}) {
      cases.push_back({gqa, 1, tokens, threads});
    }
    cases.push_back({gqa, 16, 4096, threads});
    cases.push_back({gqa, 32, 3072, threads});
    cases.push_back({mha, 1, 65536, threads});
    if (all == 1) {
      break;
    }
  }
  for (const auto& c : cases) {
    const bool wanted =
        options.codec.empty() || options.codec == codecs::codec_of(c.shape.codec).name;
    if (wanted && c.tokens <= options.max_tokens) {
      run_exact_case(c, options, report);
    }
  }
  return report.finish();
}

int run_prefill(const Options& options) {
  Report report("prefill", options);
  const uint32_t threads = thread_count(options);
  const Shape shape;
  constexpr uint64_t kTokens = 32768;
  Rig rig(shape, 1, threads, kTokens * shape.token_bytes() + (256ull << 20));
  const kvm_seq_id seq = rig.create();
  rig.fill(seq, 0, kTokens, 11);
  Team team(threads);
  for (uint32_t n_query : {512u, 2048u}) {
    Memory q(uint64_t{n_query} * shape.n_q_heads * shape.head_dim * 2);
    Memory o(uint64_t{n_query} * shape.n_q_heads * shape.head_dim * 4);
    Memory lse(uint64_t{n_query} * shape.n_q_heads * 4);
    fill_random_bf16(q.as<uint16_t>(), q.size_bytes() / 2, n_query);
    std::vector<double> seconds;
    std::vector<double> peaks;
    for (uint32_t i = 0; i < std::max(options.repeats, 7u); ++i) {
      const double begin = now_s();
      rig.run_step(rig.attend({seq}, n_query, q, o, lse));
      seconds.push_back(now_s() - begin);
      peaks.push_back(peak_flops(team));
    }
    // Causal: row j of the last n_query tokens sees kTokens - n_query + j + 1 keys.
    const double pairs =
        static_cast<double>(n_query) * kTokens - static_cast<double>(n_query) * (n_query - 1) / 2.0;
    const double flops = pairs * shape.n_q_heads * shape.head_dim * 4.0;
    const double gflops = flops / median(seconds) * 1e-9;
    const double peak = median(peaks) * 1e-9;
    report.add({{"n_query", n_query},
                {"tokens", kTokens},
                {"threads", threads},
                {"isa", rig.engine().isa()},
                {"ms", median(seconds) * 1e3},
                {"gflops", gflops},
                {"peak_gflops", peak},
                {"fraction", gflops / peak}});
  }
  return report.finish();
}

int run_append(const Options& options) {
  Report report("append", options);
  const uint32_t threads = thread_count(options);
  const Shape shape;
  constexpr uint32_t kTokens = 32768;  // far more than the caches hold
  const uint64_t plane_bytes = uint64_t{kTokens} * shape.n_kv_heads * shape.head_dim * 2;
  Memory k(plane_bytes);
  Memory v(plane_bytes);
  Memory copy(plane_bytes * 2);
  fill_random_bf16(k.as<uint16_t>(), plane_bytes / 2, 1);
  fill_random_bf16(v.as<uint16_t>(), plane_bytes / 2, 2);
  std::memset(copy.as<char>(), 1, copy.size_bytes());
  // Half of the capacity may stay faulted in between runs.
  Rig rig(shape, 1, threads, plane_bytes * 8);
  Team team(threads);
  std::vector<double> appends;
  std::vector<double> copies;
  for (uint32_t i = 0; i < options.repeats + 2; ++i) {
    const kvm_seq_id seq = rig.create();
    const double begin = now_s();
    rig.append(seq, 0, 1, kTokens, k, v);
    const double took = now_s() - begin;
    rig.free(seq);
    const double copied = team.run([&](uint32_t thread) {
      const uint64_t part = plane_bytes / team.size();
      std::memcpy(copy.as<char>() + thread * part, k.as<char>() + thread * part, part);
      std::memcpy(copy.as<char>() + plane_bytes + thread * part, v.as<char>() + thread * part,
                  part);
    });
    if (i >= 2) {  // the first rounds fault the pool in
      appends.push_back(took);
      copies.push_back(copied);
    }
  }
  const double gbps = static_cast<double>(plane_bytes) * 2e-9 / median(appends);
  const double copy_gbps = static_cast<double>(plane_bytes) * 2e-9 / median(copies);
  report.add({{"tokens", kTokens},
              {"threads", threads},
              {"gbps", gbps},
              {"copy_gbps", copy_gbps},
              {"fraction", gbps / copy_gbps}});
  return report.finish();
}

int run_fork(const Options& options) {
  Report report("fork", options);
  const Shape shape;
  constexpr uint32_t kLayers = 32;
  const uint64_t budget = memory_budget_bytes(options);
  Rig rig(shape, kLayers, options.threads, budget);
  constexpr uint32_t kBlock = 1024;
  constexpr size_t kKeptChildren = 32;
  const uint64_t block_bytes = uint64_t{kBlock} * kLayers * shape.n_kv_heads * shape.head_dim * 2;
  Memory k(block_bytes);
  Memory v(block_bytes);
  fill_random_bf16(k.as<uint16_t>(), block_bytes / 2, 3);
  fill_random_bf16(v.as<uint16_t>(), block_bytes / 2, 4);
  const kvm_seq_id seq = rig.create();
  uint64_t tokens = 0;
  for (uint64_t target : {1024ull, 8192ull, 32768ull, 65536ull, 98304ull}) {
    if (target > options.max_tokens) {
      break;
    }
    if (target * kLayers * shape.token_bytes() + (1ull << 30) > budget) {
      report.note(fmt::format("{} tokens left out: they need {:.1f} GB, {:.1f} GB are to be had",
                              target,
                              static_cast<double>(target * kLayers * shape.token_bytes()) * 1e-9,
                              static_cast<double>(budget) * 1e-9));
      break;
    }
    for (; tokens < target; tokens += kBlock) {
      rig.append(seq, 0, kLayers, kBlock, k, v);
    }
    std::vector<double> whole;
    std::vector<double> part;
    // Children are freed later, so that each lies where none of the last ones did: the time of a
    // fork depends on the cache lines of its few blocks, 1.0 or 1.6 us where they stay the same.
    std::deque<kvm_seq_id> kept;
    for (int i = 0; i < 101; ++i) {
      for (bool whole_fork : {true, false}) {
        SeqRequest request;
        request.verb = SeqVerb::kFork;
        request.seq = seq;
        request.n_tokens = whole_fork ? KVM_POSITION_END : target - 100;
        const double begin = now_s();
        const kvm_seq_id child = rig.seq_verb(std::move(request));
        (whole_fork ? whole : part).push_back(now_s() - begin);
        kept.push_back(child);
        if (kept.size() > kKeptChildren) {
          rig.free(kept.front());
          kept.pop_front();
        }
      }
    }
    for (const kvm_seq_id child : kept) {
      rig.free(child);
    }
    report.add({{"tokens", target},
                {"us", median(whole) * 1e6},
                {"p99_us", percentile(whole, 0.99) * 1e6},
                {"inside_us", median(part) * 1e6}});
  }
  return report.finish();
}

}  // namespace kvm::bench
