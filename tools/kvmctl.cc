// SPDX-License-Identifier: Apache-2.0
// kvmctl: what an operator asks a running kvmd. Sees the service as any client does.
#include <fmt/format.h>

#include <CLI/CLI.hpp>  // CLI11: sub-commands, validation and help in one header
#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>  // JSON output; nobody should print JSON by hand
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvm.h"
#include "tools/audit.h"
#include "tools/doctor.h"

namespace kvm::tools {

namespace {

using Json = nlohmann::ordered_json;

// Exit statuses; stable, and listed in --help.
enum Exit { kExitOk = 0, kExitService = 1, kExitUsage = 2, kExitConnection = 3 };

// Rows of `kvmctl seqs` without --all.
constexpr size_t kSeqsShown = 40;

struct Options {
  std::string socket;
  bool json = false;
  uint32_t count = 5;
  bool all = false;
};

[[noreturn]] void fail(const std::string& sentence, Exit exit) {
  fmt::print(stderr, "kvmctl: {}\n", sentence);
  std::exit(exit);
}

void check(kvm_status status, const char* what) {
  if (status != KVM_OK) {
    fail(fmt::format("{}: {} ({})", what, kvm_last_error(), kvm_status_name(status)),
         status == KVM_ERR_DISCONNECTED || status == KVM_ERR_TIMEOUT ? kExitConnection
                                                                     : kExitService);
  }
}

// What to try next, for somebody who has not used kvm before; "" where the sentence says it all.
std::string advice(kvm_status status) {
  switch (status) {
    case KVM_ERR_DISCONNECTED:
      return "\nStart a daemon with `kvmd`, or name the socket of a running one with --socket or "
             "KVM_SOCKET.";
    case KVM_ERR_PERMISSION:
      return "\nRun kvmctl as the user that runs kvmd, or let more users in with kvmd's "
             "socket_mode.";
    case KVM_ERR_VERSION:
      return fmt::format(
          "\nThis is kvmctl {}; use the one that came with the running kvmd, or "
          "start the kvmd that came with this one.",
          kvm_version_string());
    case KVM_ERR_TIMEOUT:
      return "\nThe process may be stopped or starved: look at it with `ps`, and at its log.";
    case KVM_ERR_LIMIT:
      return "\nEnd a client, or raise kvmd's max_clients.";
    case KVM_ERR_PROTOCOL:
      return "\nWhatever listens there is no kvmd, or a broken one.";
    default:
      return "";
  }
}

kvm_status connect(const Options& options, kvm_client** client) {
  kvm_connect_params params{};
  params.struct_size = sizeof(params);
  params.socket_path = options.socket.empty() ? nullptr : options.socket.c_str();
  params.client_name = "kvmctl";
  return kvm_connect(&params, client);
}

class Connection {
 public:
  explicit Connection(const Options& options) {
    if (const kvm_status status = connect(options, &client_); status != KVM_OK) {
      fail(fmt::format("{} ({}){}", kvm_last_error(), kvm_status_name(status), advice(status)),
           status == KVM_ERR_INVALID ? kExitUsage : kExitConnection);
    }
  }
  ~Connection() { kvm_client_close(client_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  kvm_client* get() const { return client_; }

  kvm_client_info info() const {
    kvm_client_info out{};
    out.struct_size = sizeof(out);
    check(kvm_client_get_info(client_, &out), "info");
    return out;
  }

 private:
  kvm_client* client_ = nullptr;
};

std::string bytes_text(uint64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(units)) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

void print_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> width;
  for (const auto& row : rows) {
    width.resize(std::max(width.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) {
      width[i] = std::max(width[i], row[i].size());
    }
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += fmt::format("{:<{}}  ", row[i], width[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    fmt::print("{}\n", line);
  }
}

void print_json(const Json& json) { fmt::print("{}\n", json.dump(2)); }

int run_status(const Options& options) {
  const Connection connection(options);
  const kvm_client_info info = connection.info();
  kvm_stats stats{};
  stats.struct_size = sizeof(stats);
  check(kvm_get_stats(connection.get(), &stats), "stats");
  const double uptime_s = static_cast<double>(stats.uptime_ns) * 1e-9;
  if (options.json) {
    print_json({{"version", info.server_version},
                {"pid", info.server_pid},
                {"epoch", info.epoch},
                {"isa", info.isa},
                {"threads", info.n_threads},
                {"uptime_seconds", uptime_s},
                {"clients", stats.n_clients},
                {"spaces", stats.n_spaces},
                {"sequences", stats.n_sequences},
                {"pages", stats.n_pages},
                {"host_used_bytes", stats.host_used_bytes},
                {"host_page_bytes", stats.host_page_bytes},
                {"host_peak_bytes", stats.host_peak_bytes},
                {"host_capacity_bytes", stats.host_capacity_bytes},
                {"requests", stats.n_requests},
                {"requests_failed", stats.n_requests_failed},
                {"tokens_appended", stats.n_tokens_appended},
                {"rows_attended", stats.n_rows_attended},
                {"keys_present", stats.keys_present},
                {"keys_read", stats.keys_read},
                {"bytes_read", stats.bytes_read},
                {"bytes_appended", stats.bytes_appended},
                {"pages_dropped", stats.n_pages_dropped},
                {"pages_copied", stats.n_pages_copied},
                {"index_bytes", stats.index_bytes},
                {"index_blocks", stats.n_index_blocks},
                {"index_blocks_refused", stats.n_index_refused},
                {"index_blocks_dropped", stats.n_index_dropped},
                {"clients_total", stats.n_clients_total},
                {"protocol_errors", stats.n_protocol_errors},
                {"busy_seconds", static_cast<double>(stats.busy_ns) * 1e-9}});
    return kExitOk;
  }
  print_table(
      {{"daemon", fmt::format("kvmd {}, process {}, up {:.0f} s", info.server_version,
                              info.server_pid, uptime_s)},
       {"compute", fmt::format("{} threads, {} kernels, busy {:.1f} s", info.n_threads, info.isa,
                               static_cast<double>(stats.busy_ns) * 1e-9)},
       {"clients", fmt::format("{} connected, {} since the start, {} protocol errors",
                               stats.n_clients, stats.n_clients_total, stats.n_protocol_errors)},
       {"sequences", fmt::format("{} in {} spaces", stats.n_sequences, stats.n_spaces)},
       {"host memory",
        fmt::format("{} of {} used, {} in pages, {} at most so far",
                    bytes_text(stats.host_used_bytes), bytes_text(stats.host_capacity_bytes),
                    bytes_text(stats.host_page_bytes), bytes_text(stats.host_peak_bytes))},
       {"pages", fmt::format("{} in use, {} copied on write, {} dropped by policies", stats.n_pages,
                             stats.n_pages_copied, stats.n_pages_dropped)},
       {"indexes",
        fmt::format("{}, {} blocks made, {} refused, {} dropped", bytes_text(stats.index_bytes),
                    stats.n_index_blocks, stats.n_index_refused, stats.n_index_dropped)},
       {"requests", fmt::format("{} done, {} failed", stats.n_requests, stats.n_requests_failed)},
       {"appended", fmt::format("{} tokens x layers, {}", stats.n_tokens_appended,
                                bytes_text(stats.bytes_appended))},
       {"attended",
        fmt::format("{} rows x layers, {} of {} keys, {}", stats.n_rows_attended, stats.keys_read,
                    stats.keys_present, bytes_text(stats.bytes_read))}});
  return kExitOk;
}

int run_ping(const Options& options) {
  const Connection connection(options);
  std::vector<double> us;
  for (uint32_t i = 0; i < options.count; ++i) {
    uint64_t ns = 0;
    check(kvm_client_ping(connection.get(), &ns), "ping");
    us.push_back(static_cast<double>(ns) * 1e-3);
    if (!options.json) {
      fmt::print("answer {} in {:.1f} us\n", i + 1, us.back());
    }
  }
  std::sort(us.begin(), us.end());
  if (options.json) {
    print_json({{"count", options.count},
                {"min_us", us.front()},
                {"median_us", us[us.size() / 2]},
                {"max_us", us.back()}});
  } else {
    fmt::print("{} answers: at least {:.1f}, median {:.1f}, at most {:.1f} us\n", options.count,
               us.front(), us[us.size() / 2], us.back());
  }
  return kExitOk;
}

int run_doctor(const Options& options) {
  kvm_client_info info{};
  info.struct_size = sizeof(info);
  kvm_client* client = nullptr;
  const kvm_status status = connect(options, &client);
  const std::string why = status == KVM_OK ? "" : kvm_last_error();
  const bool has_daemon = status == KVM_OK && kvm_client_get_info(client, &info) == KVM_OK;
  kvm_client_close(client);
  const std::vector<Finding> findings = examine(has_daemon ? &info : nullptr, why);
  if (options.json) {
    Json out = Json::array();
    for (const Finding& finding : findings) {
      out.push_back({{"subject", finding.subject},
                     {"verdict", verdict_name(finding.verdict)},
                     {"found", finding.found},
                     {"consequence", finding.consequence}});
    }
    print_json(out);
    return kExitOk;
  }
  std::vector<std::vector<std::string>> rows;
  for (const Finding& finding : findings) {
    rows.push_back({finding.subject, verdict_name(finding.verdict), finding.found});
    if (!finding.consequence.empty()) {
      rows.push_back({"", "", "-> " + finding.consequence});
    }
  }
  print_table(rows);
  return kExitOk;
}

// Calls a kvm_*_list function until its answer fits.
template <typename Info, typename List>
std::vector<Info> list_all(const List& list, const char* what) {
  std::vector<Info> out(256);
  while (true) {
    size_t count = 0;
    out[0].struct_size = sizeof(Info);
    check(list(out.data(), out.size(), &count), what);
    if (count <= out.size()) {
      out.resize(count);
      return out;
    }
    out.resize(count + 64);
  }
}

const char* dtype_text(uint32_t dtype) {
  switch (dtype) {
    case KVM_DTYPE_F32:
      return "fp32";
    case KVM_DTYPE_F16:
      return "fp16";
    case KVM_DTYPE_BF16:
      return "bf16";
    default:
      return "?";
  }
}

int run_spaces(const Options& options) {
  const Connection connection(options);
  const auto spaces = list_all<kvm_space_info>(
      [&](kvm_space_info* out, size_t capacity, size_t* count) {
        return kvm_space_list(connection.get(), out, capacity, count);
      },
      "spaces");
  if (options.json) {
    Json out = Json::array();
    for (const auto& space : spaces) {
      out.push_back({{"id", space.space},
                     {"name", space.name},
                     {"layers", space.n_layers},
                     {"q_heads", space.n_q_heads},
                     {"kv_heads", space.n_kv_heads},
                     {"head_dim_k", space.head_dim_k},
                     {"head_dim_v", space.head_dim_v},
                     {"dtype", dtype_text(space.dtype)},
                     {"head_classes", space.n_head_classes},
                     {"sequences", space.n_sequences},
                     {"bytes_per_token", space.bytes_per_token}});
    }
    print_json(out);
    return kExitOk;
  }
  std::vector<std::vector<std::string>> rows = {
      {"NAME", "LAYERS", "HEADS", "DIM", "DTYPE", "CLASSES", "SEQUENCES", "A TOKEN"}};
  for (const auto& space : spaces) {
    rows.push_back({space.name, std::to_string(space.n_layers),
                    fmt::format("{}/{}", space.n_q_heads, space.n_kv_heads),
                    space.head_dim_k == space.head_dim_v
                        ? std::to_string(space.head_dim_k)
                        : fmt::format("{}/{}", space.head_dim_k, space.head_dim_v),
                    dtype_text(space.dtype), std::to_string(space.n_head_classes),
                    std::to_string(space.n_sequences), bytes_text(space.bytes_per_token)});
  }
  print_table(rows);
  return kExitOk;
}

int run_seqs(const Options& options) {
  const Connection connection(options);
  auto seqs = list_all<kvm_seq_info>(
      [&](kvm_seq_info* out, size_t capacity, size_t* count) {
        return kvm_seq_list(connection.get(), 0, KVM_LIST_ALL_CLIENTS, out, capacity, count);
      },
      "sequences");
  if (options.json) {
    Json out = Json::array();
    for (const auto& seq : seqs) {
      out.push_back({{"id", seq.seq},
                     {"space", seq.space},
                     {"client", seq.client_id},
                     {"tokens_min", seq.n_tokens_min},
                     {"tokens_max", seq.n_tokens_max},
                     {"committed", seq.n_committed},
                     {"pages", seq.n_pages},
                     {"bytes", seq.bytes},
                     {"bytes_shared", seq.bytes_shared},
                     {"entries_dropped", seq.n_entries_dropped},
                     {"bytes_observed", seq.bytes_observed},
                     {"bytes_index", seq.bytes_index}});
    }
    print_json(out);
    return kExitOk;
  }
  // For the eye: the largest first, and not more than a screen of them.
  std::stable_sort(seqs.begin(), seqs.end(),
                   [](const kvm_seq_info& a, const kvm_seq_info& b) { return a.bytes > b.bytes; });
  const size_t n_shown = options.all ? seqs.size() : std::min<size_t>(seqs.size(), kSeqsShown);
  std::vector<std::vector<std::string>> rows = {
      {"SEQUENCE", "CLIENT", "TOKENS", "COMMITTED", "BYTES", "SHARED", "INDEX", "DROPPED"}};
  for (size_t i = 0; i < n_shown; ++i) {
    const kvm_seq_info& seq = seqs[i];
    rows.push_back({fmt::format("{:x}", seq.seq), std::to_string(seq.client_id),
                    seq.n_tokens_min == seq.n_tokens_max
                        ? std::to_string(seq.n_tokens_max)
                        : fmt::format("{}-{}", seq.n_tokens_min, seq.n_tokens_max),
                    std::to_string(seq.n_committed), bytes_text(seq.bytes),
                    bytes_text(seq.bytes_shared), bytes_text(seq.bytes_index),
                    std::to_string(seq.n_entries_dropped)});
  }
  print_table(rows);
  if (n_shown < seqs.size()) {
    fmt::print("and {} smaller ones; --all shows them\n", seqs.size() - n_shown);
  }
  return kExitOk;
}

std::string stats_text(kvm_client* client) {
  std::string text;
  size_t length = 64 << 10;
  do {
    text.resize(length + 1);
    check(kvm_get_stats_text(client, text.data(), text.size(), &length), "stats");
  } while (length >= text.size());
  text.resize(length);
  return text;
}

Json errors_json(const ErrorSummary& errors) {
  if (errors.n_rows == 0) {
    return {{"mean", nullptr}, {"p95", nullptr}, {"p99", nullptr}};
  }
  return {{"mean", errors.mean}, {"p95", errors.p95}, {"p99", errors.p99}};
}

Json share_json(const std::optional<double>& share) { return share ? Json(*share) : Json(); }

void print_audit_json(const AuditSummary& summary) {
  Json modes = Json::array();
  for (const AuditedModeSummary& mode : summary.modes) {
    modes.push_back({{"mode", mode.mode},
                     {"answers", mode.n_answers},
                     {"rows", mode.true_error.n_rows},
                     {"rows_with_bar", mode.estimated_error.n_rows},
                     {"true_error", errors_json(mode.true_error)},
                     {"estimated_error", errors_json(mode.estimated_error)},
                     {"rows_over", mode.n_over},
                     {"over_share", share_json(mode.over_share())},
                     {"allowed_share", share_json(mode.allowed_share())}});
  }
  print_json(
      {{"every", summary.every},
       {"skipped",
        {{"busy", summary.n_busy}, {"given_up", summary.n_given_up}, {"unfit", summary.n_unfit}}},
       {"modes", modes}});
}

std::string percent(double share) { return fmt::format("{:.3g} %", 100 * share); }

void add_errors(const ErrorSummary& errors, std::vector<std::string>* row) {
  for (const double value : {errors.mean, errors.p95, errors.p99}) {
    row->push_back(errors.n_rows == 0 ? "-" : percent(value));
  }
}

int run_audit(const Options& options) {
  const Connection connection(options);
  const std::optional<AuditSummary> summary = summarize_audits(stats_text(connection.get()));
  if (!summary) {
    fail("this kvmd knows no audits", kExitService);
  }
  if (options.json) {
    print_audit_json(*summary);
    return kExitOk;
  }
  std::vector<std::vector<std::string>> rows = {{"MODE", "ANSWERS", "ROWS", "TRUE ERROR", "P95",
                                                 "P99", "ESTIMATED", "P95", "P99", "OVER",
                                                 "ALLOWED"}};
  for (const AuditedModeSummary& mode : summary->modes) {
    std::vector<std::string> row = {mode.mode, std::to_string(mode.n_answers),
                                    std::to_string(mode.true_error.n_rows)};
    add_errors(mode.true_error, &row);
    add_errors(mode.estimated_error, &row);
    for (const std::optional<double>& share : {mode.over_share(), mode.allowed_share()}) {
      row.push_back(share ? percent(*share) : "-");
    }
    rows.push_back(std::move(row));
  }
  print_table(rows);
  if (summary->every == 0) {
    fmt::print("Audits are off: kvmd's audit_every is 0.\n");
    return kExitOk;
  }
  fmt::print(
      "One of {} approximate answers is computed again. Skipped: {} that found the queue "
      "full, {} that made way, {} with log weights.\n",
      summary->every, summary->n_busy, summary->n_given_up, summary->n_unfit);
  return kExitOk;
}

// CLI11 would only say that a command is missing where it does not know the one that was given.
std::string usage_error(const CLI::App* app, const CLI::Error& error) {
  const std::vector<std::string> unknown = app->remaining();
  std::string what = error.what();
  if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {
    what = unknown.empty() ? "a command is missing" : fmt::format("there is no '{}'", unknown[0]);
  }
  return fmt::format(
      "kvmctl: {}\nCommands: status, ping, doctor, spaces, seqs, audit; see --help.\n", what);
}

int run(int argc, char** argv) {
  Options options;
  CLI::App app{"Asks a running kvmd, the KV-cache service, how it is.", "kvmctl"};
  app.failure_message(usage_error);
  app.footer(
      "Exit status: 0 done, 1 the service answered with an error, 2 wrong usage,\n"
      "3 no daemon could be reached. `kvmctl COMMAND --help` has a command's options.");
  app.set_version_flag("--version", kvm_version_string());
  app.require_subcommand(1);
  app.fallthrough();
  app.add_option("--socket", options.socket,
                 "path of the daemon's socket (default: KVM_SOCKET, else\n"
                 "$XDG_RUNTIME_DIR/kvm/kvmd.sock, else /run/kvm/kvmd.sock)");
  app.add_flag("--json", options.json, "print JSON instead of a table");

  int (*command)(const Options&) = nullptr;
  const auto add = [&](const char* name, const char* help, int (*function)(const Options&)) {
    CLI::App* added = app.add_subcommand(name, help);
    added->callback([&command, function] { command = function; });
    return added;
  };
  add("status", "memory, sequences, requests and what was computed", run_status);
  add("ping", "round trips of a null request", run_ping)
      ->add_option("-c,--count", options.count, "how many")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  add("doctor", "what this machine offers to kvm, and what a fallback costs", run_doctor);
  add("spaces", "the registered model geometries", run_spaces);
  add("seqs", "the sequences of all clients, and the memory they hold", run_seqs)
      ->add_flag("--all", options.all, "every one, not the largest only; --json has them all");
  add("audit", "true errors of approximate answers beside the estimated ones", run_audit);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  return command(options);
}

}  // namespace

}  // namespace kvm::tools

int main(int argc, char** argv) { return kvm::tools::run(argc, argv); }
