// SPDX-License-Identifier: Apache-2.0
#include "daemon/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "base/limits.h"
#include "daemon/device_memory.h"
#include "daemon/disk.h"
#include "daemon/listen_address.h"
#include "ipc/socket.h"
#include "ipc/wire.h"

namespace kvm::daemon {
namespace {

constexpr uint64_t kMinCapacityBytes = 16ull << 20;
constexpr uint64_t kMaxSizeBytes = 1ull << 60;
constexpr uint64_t kMinDiskBytes = 64ull << 20;

std::string upper_case(std::string text) {
  for (char& c : text) {
    c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  }
  return text;
}

// These check what a text must be beyond not being empty.
bool is_socket_path(const std::string& text) { return text.size() <= kMaxSocketPathBytes; }
bool is_metrics_address(const std::string& text) { return parse_listen_address(text).is_ok(); }

struct AllowedText {
  std::string operator()(const IntegerField& field) const {
    return fmt::format("a whole number from {} to {}{}", field.min, field.max,
                       field.unlimited_allowed ? ", or \"unlimited\"" : "");
  }
  std::string operator()(const OctalField& field) const {
    return fmt::format("permission bits in octal, from 0 to {:04o}", field.max);
  }
  std::string operator()(const SizeField& field) const {
    std::string text = fmt::format("a size such as 200GiB, from {} to {}",
                                   format_bytes(field.min_bytes), format_bytes(field.max_bytes));
    if (field.share_of != nullptr) {
      text += fmt::format(", or a share such as 60% of {}", field.share_of);
    }
    return text;
  }
  std::string operator()(const BoolField&) const { return "true or false"; }
  std::string operator()(const TextField& field) const {
    if (!field.choices.empty()) {
      return fmt::format("one of {}", fmt::join(field.choices, ", "));
    }
    return field.allowed == nullptr ? "a text that is not empty" : field.allowed;
  }
  std::string operator()(const TenantsField&) const {
    return "\"none\", or limits such as default: bytes=50%, sequences=1000; 1000: bytes=20GiB, of "
           "sequences, bytes, memory_bytes, snapshot_bytes, arenas, arena_bytes, queues and "
           "requests";
  }
};

}  // namespace

const std::vector<OptionRow>& option_rows() {
  using O = Options;
  static const std::vector<OptionRow> rows = {
      {"socket", ipc::default_socket_path(),
       TextField{&O::socket, {}, "a path of at most 107 bytes", is_socket_path},
       "Path of the socket that clients connect to, at most 107 bytes. The default is "
       "$XDG_RUNTIME_DIR/kvm/kvmd.sock, or /run/kvm/kvmd.sock where that variable is not set; "
       "clients look in the first, and where nothing is there in the second."},
      {"socket_mode", "0660", OctalField{&O::socket_mode, 0777},
       "Permission bits of the socket: who may connect."},
      {"host_capacity", "60%",
       SizeField{&O::host_capacity, "the memory that is free at start", kMinCapacityBytes,
                 kMaxSizeBytes},
       "Hard cap of the memory that holds keys and values, in physical bytes. Appends beyond it "
       "fail with KVM_ERR_NO_SPACE."},
      {"default_quota", "100%",
       SizeField{&O::default_quota, "host_capacity", kMinCapacityBytes, kMaxSizeBytes},
       "How much one client may hold, of host_capacity and disk.capacity together. Appends beyond "
       "it fail with KVM_ERR_QUOTA."},
      {"threads", "0", IntegerField{&O::threads, 0, 1024},
       "Threads that compute, the dispatcher included. 0: one for each core."},
      {"pin_threads", "false", BoolField{&O::pin_threads},
       "Bind each computing thread to a core. For machines that run nothing else."},
      {"spin_max_us", "200", IntegerField{&O::spin_max_us, 0, 10'000'000, true},
       "The longest time, in microseconds, that the dispatcher looks for the next request without "
       "sleeping. 0: never, for laptops; a request then costs a wake-up of about 50 microseconds. "
       "\"unlimited\": it never sleeps, and one core is always busy."},
      {"worker_spin_us", "200", IntegerField{&O::worker_spin_us, 0, 10'000'000},
       "The longest time, in microseconds, that an idle computing thread looks for work before it "
       "sleeps."},
      {"max_clients", "64", IntegerField{&O::max_clients, 1, ipc::kMaxClients},
       "Connections at a time."},
      {"max_queues", "16", IntegerField{&O::max_queues, 1, ipc::kMaxQueuesPerClient},
       "Queues of one client."},
      {"max_arenas", "64", IntegerField{&O::max_arenas, 1, ipc::kMaxArenasPerClient},
       "Arenas (shared memory for queries and results) of one client."},
      {"max_arena", "4GiB", SizeField{&O::max_arena, nullptr, 1u << 20, ipc::kMaxArenaBytes},
       "The largest arena."},
      {"arena_quota", "50%", SizeField{&O::arena_quota, "arena_capacity", 4u << 20, kMaxSizeBytes},
       "Memory of all arenas of one client together. Not part of host_capacity."},
      {"arena_capacity", "20%",
       SizeField{&O::arena_capacity, "the machine's memory", 4u << 20, kMaxSizeBytes},
       "Memory of all arenas of all clients together. Not part of host_capacity."},
      {"max_sequences", "65536", IntegerField{&O::max_sequences, 1, 1u << 24},
       "Sequences of one client."},
      {"max_requests", "unlimited",
       IntegerField{&O::max_requests, 1, ipc::kMaxQueuesPerClient * kMaxOutstanding, true},
       "Requests of one client in flight, over all its queues. More are answered with "
       "KVM_ERR_QUOTA."},
      {"tenants", "none", TenantsField{&O::tenants},
       "What all clients of one user may hold together: `default` for every user, a user's number "
       "for that user. In a file also as tables, [tenants.default] and [tenants.1000]. Shares are "
       "of host_capacity (of bytes with disk.capacity), of snapshot_bytes of disk.capacity, and of "
       "arena_capacity."},
      {"max_spaces", "64", IntegerField{&O::max_spaces, 1, 4096},
       "Spaces (model geometries) that can be registered."},
      {"prefix_pages", "49152", IntegerField{&O::prefix_pages, 64, 1 << 20},
       "Pages of 64 tokens of a user's prefixes that can be found (kvm_prefix_publish). Each user "
       "that has prefixes has a table of 64 to 171 bytes a page."},
      {"audit_every", "1024", IntegerField{&O::audit_every, 0, 1'000'000'000'000},
       "One of so many approximate answers (of one kv head) is computed again exactly, in the "
       "background, and its true error counted: see kvmctl audit. 0: none."},
      {"cost_model", "measure", TextField{&O::cost_model, {}},
       "What KVM_MODE_AUTO chooses by: \"measure\" (once, for the first space with an index), or "
       "rates in nanoseconds as exact_bf16=13.5,exact_int8=8,scan=1.5,gather=28,start=40000 (a key "
       "of 512 "
       "and of 260 bytes read in order, a key's sketch, a row that lies alone, an answer), so that "
       "choices are the same each time; and threads=2 for time budgets."},
      {"shutdown_timeout_ms", "2000", IntegerField{&O::shutdown_timeout_ms, 0, 600'000},
       "How long, in milliseconds, requests in flight may go on after SIGTERM."},
      {"log_level", "info", TextField{&O::log_level, {"error", "warning", "info", "debug"}},
       "The least important messages that are written to the standard error stream."},
      {"metrics.listen", "off",
       TextField{&O::metrics_listen, {}, kListenAddressAllowed, is_metrics_address},
       "Where metrics are served over HTTP, as Prometheus scrapes them: GET /metrics, and "
       "/healthz. "
       "Whoever can connect can read them; on TCP that is every user of the machine."},
      {"metrics.socket_mode", "0660", OctalField{&O::metrics_socket_mode, 0777},
       "Permission bits of the socket of metrics.listen: who may read them."},
      {"disk.directories", "none",
       TextField{&O::disk_directories,
                 {},
                 "none, or paths from the root with commas between them",
                 is_directory_list},
       "Directories, one for each drive, to which pages of keys and values go when host_capacity "
       "fills up. kvmd owns them alone. Snapshots and prefixes are kept there when it ends; the "
       "rest "
       "goes with it. none: no disk is used."},
      {"disk.capacity", "50%",
       SizeField{&O::disk_capacity, "the space that is free there at start", kMinDiskBytes,
                 kMaxSizeBytes},
       "Hard cap of the files in disk.directories together, in physical bytes."},
      {"disk.high", "90%", SizeField{&O::disk_high, "host_capacity", 1, kMaxSizeBytes},
       "Above this use of memory, pages of the sequences that are used least go to the disk, until "
       "disk.low is reached."},
      {"disk.low", "80%", SizeField{&O::disk_low, "host_capacity", 1, kMaxSizeBytes},
       "Below this use of memory, pages of sequences that are used again come back."},
      {"disk.memory_quota", "50%",
       SizeField{&O::disk_memory_quota, "host_capacity", kMinCapacityBytes, kMaxSizeBytes},
       "How much one client may hold of what cannot go to the disk: heads with sinks_recent_fold "
       "or "
       "heavy, indexes, and what was observed. It is part of default_quota. Without "
       "disk.directories "
       "there is no such limit."},
      {"disk.leaving", "s3-fifo", TextField{&O::disk_leaving, {"s3-fifo", "lru"}},
       "Which sequences leave memory first. s3-fifo: those that were used once, so that a long "
       "prompt does not push out those that are in use; lru: those used longest ago."},
      {"disk.save_prefixes", "all", TextField{&O::disk_save_prefixes, {"all", "used", "none"}},
       "Which prefixes (kvm_prefix_publish) outlive kvmd. all: each is written to the disk soon "
       "after it is published; used: those that somebody has forked, so that prompts that come "
       "once "
       "do not wear the drive; none: they end with kvmd."},
      {"disk.max_priority", "100",
       IntegerField{&O::disk_max_priority, KVM_PRIORITY_DEFAULT, KVM_PRIORITY_MAX},
       "As which higher priorities (kvm_seq_set_priority) count. 50, what everything has unless "
       "somebody says otherwise: clients can let their own leave sooner, and keep nobody else's "
       "out "
       "of memory."},
      {"disk.move_rate", "0", SizeField{&O::disk_move_rate, nullptr, 0, kMaxSizeBytes},
       "Bytes a second that pages may take on their way out and back. What appends wait for is not "
       "under it, nor is what attention streams. 0: no limit."},
      {"disk.compaction_rate", "0", SizeField{&O::disk_compaction_rate, nullptr, 0, kMaxSizeBytes},
       "Bytes a second that files may be tidied up with, read and written anew. 0: no limit."},
      {"disk.daily_writes", "0", SizeField{&O::disk_daily_writes, nullptr, 0, kMaxSizeBytes},
       "Bytes that may be written in a day, counted from the start, so that flash is not worn out. "
       "When they are used up pages stay in memory. 0: no limit."},
      {"disk.backend", "any", TextField{&O::disk_backend, {"any", "io_uring", "threads"}},
       "How files are read and written. any: by io_uring where the kernel allows it, else by "
       "threads."},
      {"device.pool", "0", SizeField{&O::device_pool, nullptr, 0, kMaxSizeBytes},
       "Memory of each device of device.numbers that kvmd owns for clients that open it through "
       "kvmd (kvm_cuda_params.server), all clients together: a hard cap of what their pages take. "
       "0: kvmd touches no device."},
      {"device.numbers", "0",
       TextField{&O::device_numbers,
                 {},
                 "numbers of devices with commas between them, each once",
                 is_device_list},
       "The devices whose memory kvmd owns, as the CUDA runtime counts them for kvmd. Engines may "
       "count differently: devices are told apart by their UUIDs."},
      {"device.quota", "100%", SizeField{&O::device_quota, "device.pool", 1u << 20, kMaxSizeBytes},
       "How much of each device's memory one client may have."},
      {"device.host", "0", SizeField{&O::device_host, nullptr, 0, kMaxSizeBytes},
       "Page-locked memory of the host that sequences may be spilled to (kvm_cuda_spill), all "
       "clients together. Not part of host_capacity."},
  };
  return rows;
}

std::string environment_name(const OptionRow& row) {
  std::string name = "KVM_" + upper_case(row.name);
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
}

std::string flag_name(const OptionRow& row) {
  std::string flag = "--" + row.name;
  for (char& c : flag) {
    c = c == '_' || c == '.' ? '-' : c;
  }
  return flag;
}

std::string allowed_text(const OptionRow& row) { return std::visit(AllowedText(), row.field); }

std::optional<std::string> environment_of_process(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

}  // namespace kvm::daemon
