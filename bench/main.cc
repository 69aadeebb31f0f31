// SPDX-License-Identifier: Apache-2.0
// kvm-bench: one sub-command per benchmark.
#include <CLI/CLI.hpp>  // CLI11: sub-commands, validation and help in one header
#include <string>
#include <vector>

#include "bench/harness.h"
#include "codecs/codec.h"

namespace {

// CLI11 would only say that a bench is missing where it does not know the one that was given.
std::string usage_error(const CLI::App* app, const CLI::Error& error) {
  const std::vector<std::string> unknown = app->remaining();
  std::string what = error.what();
  if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {
    what = unknown.empty() ? "the name of a bench is missing" : "there is no '" + unknown[0] + "'";
  }
  what = "kvm-bench: " + what + "\nBenches:";
  for (const CLI::App* bench : app->get_subcommands([](const CLI::App*) { return true; })) {
    what += " " + bench->get_name();
  }
  return what + "; see --help.\n";
}

// The benches of approximate attention, which say on what data they run.
template <typename Add>
void add_approximate(const Add& add, kvm::bench::Options* options) {
  using namespace kvm::bench;
  CLI::App* error = add("error", "error of every approximate mode against bytes read", run_error);
  error->add_option("--mode", options->modes, "only these, as the table names them")
      ->delimiter(',');
  error->add_option("--code", options->codes, "only what these propose")->delimiter(',');
  for (CLI::App* bench :
       {error, add("coverage", "how often verified answers miss the error asked for", run_coverage),
        add("sampled", "sampled and verified decode steps against exact ones", run_sampled),
        add("magicpig", "MagicPIG's estimator: speed, error, candidates", run_magicpig),
        add("drift", "an index that grew over drifting text against a fresh one", run_drift),
        add("scan", "building and scanning an index, per key", run_scan)}) {
    bench->add_option(
        "--data", options->data,
        "model, real, diffuse, gauss, others of bench/approx/data.h, FILE.kvrec, FOLDER");
    bench->add_option("--tokens", options->tokens, "lengths (default: what the bench quotes)");
    bench->add_option("--heads", options->heads, "independent kv heads behind an error");
    bench->add_option("--seeds", options->seeds, "of coverage, for each request (200)");
    bench->add_option("--dim", options->dim, "of coverage: of generated heads, a power of two");
    bench->add_option("--data-seed", options->data_seed, "of coverage: other generated heads");
    bench->add_option("--observed", options->observed, "query sets that the index may see");
    bench->add_flag("--quick", options->quick, "small sizes: a check that it runs");
  }
}

// Those that write files of their own.
template <typename Add>
void add_over_disk(const Add& add, kvm::bench::Options* options) {
  using namespace kvm::bench;
  CLI::App* disk = add("disk", "the disk tier against fio on the same disk", run_disk);
  disk->add_option("--size", options->size_bytes, "bytes that are written (default: 8 GiB)")
      ->transform(CLI::AsSizeValue(false));
  CLI::App* recover = add("recover", "a process that saves is killed: what is there", run_recover);
  recover->add_option("--size", options->size_bytes, "bytes that are saved (default: 20 GiB)")
      ->transform(CLI::AsSizeValue(false));
  for (CLI::App* bench :
       {disk, recover, add("resume", "a long sequence is saved, freed and loaded", run_resume),
        add("paused", "what saved sequences cost in memory", run_paused),
        add("overflow", "three times what memory holds decodes, over a disk", run_overflow),
        add("disk_moves", "pages that go to a disk and come back while sequences decode",
            run_disk_moves),
        add("cold_sampled", "sampled attention over a context that lies on a disk",
            run_cold_sampled)}) {
    bench->add_option("--directory", options->directory, "where its files go (default: here)");
    bench->add_flag("--quick", options->quick, "few bytes: a check that it runs");
  }
}

}  // namespace

int main(int argc, char** argv) {
  using namespace kvm::bench;
  Options options;
  CLI::App app{
      "Measures kvm against the limits of this machine. Every figure is a median of runs\n"
      "interleaved with the ceiling that judges it.",
      "kvm-bench"};
  app.failure_message(usage_error);
  app.require_subcommand(1);
  app.fallthrough();
  app.add_option("--json", options.json_path, "append one JSON object per line to FILE");
  app.add_option("--threads", options.threads, "compute threads (default: one per core)")
      ->check(CLI::Range(1, 1024));
  app.add_option("--repeats", options.repeats, "runs behind each median")
      ->check(CLI::Range(7, 1001))
      ->capture_default_str();
  app.add_option("--memory", options.memory_bytes, "bytes that KV may take (default: 70 % of free)")
      ->transform(CLI::AsSizeValue(false));
  app.add_option("--max-tokens", options.max_tokens,
                 "leave out longer contexts (where a bench has no --tokens)")
      ->capture_default_str();

  int (*bench)(const Options&) = nullptr;
  const auto add = [&](const char* name, const char* help, int (*function)(const Options&)) {
    CLI::App* command = app.add_subcommand(name, help);
    command->callback([&bench, function] { bench = function; });
    return command;
  };
  CLI::App* exact = add("exact", "decode attention against the read ceiling", run_exact);
  exact->add_option("--vs", options.peer, "interleave with a peer: torch (needs KVM_PYTHON)")
      ->check(CLI::IsMember({"torch"}));
  exact->add_option("--codec", options.codec, "measure K and V stored so only, by a codec's name")
      ->check([](const std::string& name) {
        return kvm::codecs::find_codec(name) != nullptr ? std::string()
                                                        : "there is no codec " + name;
      });
  add("prefill", "chunks of queries against the multiply-add peak", run_prefill);
  add("append", "appending K and V against a plain copy", run_append);
  add("fork", "forking sequences of several lengths", run_fork);
  add("moves", "pages that move while sequences decode", run_moves)
      ->add_flag("--quick", options.quick, "short sequences: a check that it runs");
  add("cold", "attention over contexts in a simulated slow tier of 3 GB/s", run_cold)
      ->add_flag("--quick", options.quick, "short sequences: a check that it runs");
  add_over_disk(add, &options);
  CLI::App* policies =
      add("policies", "what published systems save and cost, and whom a long commit holds up",
          run_policies);
  policies->add_flag("--quick", options.quick, "short ones: a check that it runs");
  policies->add_option("--policy", options.policy, "only this system, beside layers that keep all")
      ->check([](const std::string& name) -> std::string {
        if (name == "memory_mosaics") {
          return "";  // it has no preset
        }
        kvm_preset_params params{};
        params.struct_size = sizeof(params);
        params.name = name.c_str();
        params.n_layers = 1;
        kvm_preset preset{};
        preset.struct_size = sizeof(preset);
        const kvm_status status = kvm_policy_preset(&params, &preset);
        return status == KVM_ERR_NOT_FOUND || status == KVM_ERR_UNSUPPORTED ? kvm_last_error() : "";
      });
  add("ipc", "round trips between two processes", run_ipc);
  CLI::App* decode = add("decode", "a whole model's decode steps through the daemon", run_decode);
  decode->add_option("--mode", options.modes, "each token in each of these; exact always")
      ->delimiter(',')
      ->check(CLI::IsMember({"exact", "sampled", "sampled_eps", "verified", "topk", "auto"}));
  decode->add_option("--data", options.data, "what K, V and q are (default: model)")->expected(1);
  decode
      ->add_option("--budget", options.budget,
                   "share of the keys that sampled and topk read (default: what gives 3 %)")
      ->check(CLI::Range(1e-5, 1.0));
  CLI::App* death = add("death", "what a killed daemon or client costs the others", run_death);
  death->add_option("--case", options.modes, "only these: daemon_killed, client_killed")
      ->delimiter(',')
      ->check(CLI::IsMember({"daemon_killed", "client_killed"}));
  death->add_option("--runs", options.runs, "kills of each (default: 100)");
  death->add_flag("--quick", options.quick, "three kills of each: a check that it runs");
  add("fairness", "a light client alone and beside one that saturates", run_fairness)
      ->add_flag("--quick", options.quick, "few calls: a check that it runs");
  CLI::App* brief =
      add("short", "steps below a millisecond: after pauses, beside a busy engine", run_short);
  brief->add_option("--tokens", options.tokens, "lengths (default: 4096 8192 16384)");
  brief->add_option("--beside", options.modes, "only these: none, engine")
      ->delimiter(',')
      ->check(CLI::IsMember({"none", "engine"}));
  brief->add_flag("--quick", options.quick, "few calls: a check that it runs");
  add("prefix", "prompts that somebody had are found and forked", run_prefix)
      ->add_flag("--quick", options.quick, "few and short ones: a check that it runs");
  add("bridge", "tokens between a GPU and a daemon's store: the host's part", run_bridge)
      ->add_flag("--quick", options.quick, "few tokens: a check that it runs");
  add("update", "what a step on a GPU costs the host, without the CUDA runtime", run_update)
      ->add_flag("--quick", options.quick, "few steps: a check that it runs");
  add_approximate(add, &options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return bench(options);
}
