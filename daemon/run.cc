// SPDX-License-Identifier: Apache-2.0
#include "daemon/run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/counted.h"
#include "base/kill_point.h"
#include "base/machine.h"
#include "daemon/disk.h"
#include "daemon/logging.h"
#include "daemon/notify.h"
#include "daemon/options.h"
#include "daemon/prefix_memory.h"
#include "daemon/server.h"
#include "engine/attend/cost_model.h"

namespace kvm::daemon {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

std::vector<std::string> environment_names() {
  std::vector<std::string> names;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    names.emplace_back(text.substr(0, text.find('=')));
  }
  return names;
}

Result<engine::EngineOptions> engine_options(const Options& options, const MachineMemory& memory,
                                             tiers::DiskTier* disk) {
  engine::EngineOptions out;
  out.n_threads = static_cast<uint32_t>(options.threads);
  out.host_capacity_bytes = options.host_capacity.resolve(memory.free_bytes);
  // What a client or a user holds may lie in either.
  const uint64_t capacity_bytes =
      out.host_capacity_bytes + (disk == nullptr ? 0 : disk->stats().capacity_bytes);
  out.default_quota_bytes = options.default_quota.resolve(capacity_bytes);
  out.max_sequences_per_client = options.max_sequences;
  // Without a disk nothing can leave memory, and nobody is hindered by what cannot.
  out.memory_quota_bytes =
      disk == nullptr ? 0 : options.disk_memory_quota.resolve(out.host_capacity_bytes);
  engine::Amounts wholes;
  wholes[engine::Resource::kBytes] = capacity_bytes;
  wholes[engine::Resource::kMemoryBytes] = out.host_capacity_bytes;
  wholes[engine::Resource::kSnapshotBytes] = capacity_bytes - out.host_capacity_bytes;
  wholes[engine::Resource::kArenaBytes] = options.arena_capacity.resolve(memory.total_bytes);
  out.tenant_limits = tenant_limits(options.tenants, wholes);
  out.max_spaces = static_cast<uint32_t>(options.max_spaces);
  out.prefix_pages = options.prefix_pages;
  out.save_prefixes = options.disk_save_prefixes == "all"    ? engine::SavePrefixes::kAll
                      : options.disk_save_prefixes == "used" ? engine::SavePrefixes::kUsed
                                                             : engine::SavePrefixes::kNone;
  out.pin_threads = options.pin_threads;
  out.worker_spin_ns = options.worker_spin_us * 1000;
  out.audit_every = options.audit_every;
  out.cost_model = options.cost_model;
  out.slow_tier = disk;
  KVM_TRY_ASSIGN(out.movement, movement_options(options, out.host_capacity_bytes));
  return out;
}

ServerOptions server_options(const Options& options, const MachineMemory& memory, int signal_fd) {
  ServerOptions out;
  out.socket_path = options.socket;
  out.socket_mode = static_cast<mode_t>(options.socket_mode);
  out.limits.max_clients = static_cast<uint32_t>(options.max_clients);
  out.limits.max_queues = static_cast<uint32_t>(options.max_queues);
  out.limits.max_arenas = static_cast<uint32_t>(options.max_arenas);
  out.limits.max_arena_bytes = options.max_arena.resolve(ipc::kMaxArenaBytes);
  out.limits.arena_capacity_bytes = options.arena_capacity.resolve(memory.total_bytes);
  out.limits.arena_quota_bytes = options.arena_quota.resolve(out.limits.arena_capacity_bytes);
  out.limits.max_requests =
      options.max_requests == kUnlimited ? engine::kNoLimit : options.max_requests;
  out.spin_max_ns = options.spin_max_us == kUnlimited ? UINT64_MAX : options.spin_max_us * 1000;
  out.shutdown_timeout_ns = options.shutdown_timeout_ms * 1'000'000;
  out.signal_fd = signal_fd;
  out.on_stopping = [] { notify_service_manager("STOPPING=1"); };
  out.metrics = parse_listen_address(options.metrics_listen).value();
  out.metrics_mode = static_cast<mode_t>(options.metrics_socket_mode);
  // Twice in the time after which the service manager loses patience.
  out.watchdog_period_ns = watchdog_timeout_ns() / 2;
  out.on_watchdog = [] { notify_service_manager("WATCHDOG=1"); };
  return out;
}

// SIGTERM and SIGINT as a descriptor. Threads made later inherit the mask, so it comes first.
ipc::Fd block_signals() {
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGTERM);
  ::sigaddset(&signals, SIGINT);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  return ipc::Fd(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
}

// The folder of the socket, one level: $XDG_RUNTIME_DIR/kvm is nobody else's to make.
Status make_socket_folder(const std::string& socket_path) {
  const size_t slash = socket_path.rfind('/');
  if (slash == std::string::npos || slash == 0) {
    return Status::ok();
  }
  const std::string folder = socket_path.substr(0, slash);
  if (::mkdir(folder.c_str(), 0755) != 0 && errno != EEXIST) {
    const int error = errno;
    if (::access(folder.c_str(), F_OK) != 0) {
      return Status(KVM_ERR_IO,
                    fmt::format("cannot make '{}', the folder of the socket: {}; make "
                                "it, or name another socket with --socket or KVM_SOCKET",
                                folder, std::strerror(error)));
    }
  }
  return Status::ok();
}

int fail(int exit_status, const Status& status) {
  // A line for each thing that is wrong.
  std::string_view rest = status.message();
  do {
    const size_t end = std::min(rest.find('\n'), rest.size());
    fmt::print(stderr, "kvmd: {}\n", rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  } while (!rest.empty());
  return exit_status;
}

int answer(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    return fail(kExitFailed, Status(KVM_ERR_IO, fmt::format("the answer cannot be written: {}",
                                                            std::strerror(errno))));
  }
  return 0;
}

void check_options(const Options& options, Problems* problems) {
  problems->add(engine::parse_cost_model(options.cost_model).status());
  const auto check_part = [problems](const char* name, const Size& part, const char* of,
                                     const Size& whole) {
    if (!part.is_share && !whole.is_share && part.bytes > whole.bytes) {
      problems->add(Status(KVM_ERR_INVALID,
                           fmt::format("{} is {}, more than {}, which is {}", name,
                                       format_bytes(part.bytes), of, format_bytes(whole.bytes))));
    }
  };
  if (options.disk_directories == "none") {
    check_part("default_quota", options.default_quota, "host_capacity", options.host_capacity);
  }
  check_part("disk.memory_quota", options.disk_memory_quota, "host_capacity",
             options.host_capacity);
  check_part("arena_quota", options.arena_quota, "arena_capacity", options.arena_capacity);
  if (options.metrics_listen == "unix:" + options.socket) {
    problems->add(Status(KVM_ERR_INVALID,
                         fmt::format("metrics.listen and socket are both '{}'", options.socket)));
  }
}

int serve(const LoadedOptions& loaded, const OpenEngine& open_engine, const RingBytes& ring_bytes,
          const OpenDevice& open_device) {
  const Options& options = loaded.options;
  set_up_logging(options.log_level);
  const ipc::Fd signals = block_signals();
  raise_open_file_limit();
  const MachineMemory memory = machine_memory();
  const auto refuse = [](const Status& status) {
    // A wrong value stays wrong: the service manager need not try again.
    return fail(status.code() == KVM_ERR_INVALID ? kExitUsage : kExitFailed, status);
  };
  const Result<std::unique_ptr<tiers::DiskTier>> disk = open_disk(options);
  if (!disk.is_ok()) {
    return refuse(disk.status());
  }
  Result<engine::EngineOptions> engine_setup = engine_options(options, memory, disk.value().get());
  if (!engine_setup.is_ok()) {
    return refuse(engine_setup.status());
  }
  PrefixMemory prefix_memory;
  engine_setup.value().prefix_memory = [&](uint32_t uid, uint64_t size_bytes) {
    return prefix_memory.make(uid, size_bytes);
  };
  Result<std::unique_ptr<engine::Engine>> engine = open_engine(engine_setup.value());
  if (!engine.is_ok()) {
    return refuse(engine.status());
  }
  const Result<std::unique_ptr<DeviceMemory>> devices = DeviceMemory::open(options, open_device);
  if (!devices.is_ok()) {
    return refuse(devices.status());
  }
  if (const Status status = make_socket_folder(options.socket); !status.is_ok()) {
    return fail(kExitFailed, status);
  }
  ServerOptions server_setup = server_options(options, memory, signals.get());
  server_setup.config_text = options_json(loaded);
  server_setup.disk = disk.value().get();
  server_setup.prefix_memory = &prefix_memory;
  server_setup.devices = devices.value().get();
  server_setup.ring_bytes = [&] { return ring_bytes(*engine.value()); };
  Server server(engine.value().get(), std::move(server_setup));
  if (const Status status = server.start(); !status.is_ok()) {
    return fail(kExitFailed, status);
  }
  const engine::EngineOptions& effective = engine.value()->options();
  spdlog::info("listening at {}; {}, {} kernels, {} for keys and values, {} for arenas",
               options.socket, counted(engine.value()->n_threads(), "thread"),
               engine.value()->isa(), format_bytes(effective.host_capacity_bytes),
               format_bytes(server.service().limits.arena_capacity_bytes));
  if (disk.value() != nullptr) {
    const tiers::DiskTierStats stats = disk.value()->stats();
    spdlog::info("{} for pages on disk in {}, by {}", format_bytes(stats.capacity_bytes),
                 options.disk_directories, stats.backend);
    if (stats.is_capacity_cut) {
      spdlog::warn(
          "disk.capacity is more than {}, which is what {} files of the size of those that are "
          "there may hold; for more, export the snapshots, begin with empty directories, and "
          "import them",
          format_bytes(stats.capacity_bytes), tiers::DiskTier::kMaxSegments);
    }
    const tiers::RecoveryReport found = disk.value()->objects()->recovery();
    spdlog::info("{} with {} found there in {:.3f} s", counted(found.n_objects, "snapshot"),
                 format_bytes(found.page_bytes), static_cast<double>(found.duration_ns) * 1e-9);
    if (found.n_lost_objects != 0) {
      spdlog::warn(
          "{} not whole any more: parts are missing, or damaged; delete what kvmctl snapshot list "
          "shows as lost, or save it anew under its name",
          counted(found.n_lost_objects, "snapshot"));
    }
    if (found.n_damaged_blocks != 0) {
      spdlog::warn(
          "{} of the list of snapshots cannot be read: what was saved with it is not there",
          counted(found.n_damaged_blocks, "block"));
    }
    if (!stats.list_fault.empty()) {
      spdlog::warn(
          "the list of snapshots was read from its other copy: {}; the next save writes both anew; "
          "look after the drive",
          stats.list_fault);
    }
    if (stats.n_leftover_files != 0) {
      spdlog::info("removed {} that a kvmd before has left there",
                   counted(stats.n_leftover_files, "file"));
    }
  }
  if (devices.value() != nullptr) {
    spdlog::info("{} of each of the devices {} for clients that run there",
                 format_bytes(options.device_pool.bytes), options.device_numbers);
  }
  if (options.metrics_listen != "off") {
    spdlog::info("metrics at {}", options.metrics_listen);
  }
  notify_service_manager("READY=1");
  server.run();
  return 0;
}

}  // namespace

int run_kvmd(int argc, const char* const* argv, const OpenEngine& open_engine,
             const RingBytes& ring_bytes, const OpenDevice& open_device) {
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  const Result<LoadedOptions> loaded =
      load_options(arguments, environment_of_process, environment_names(), check_options);
  if (!loaded.is_ok()) {
    return fail(kExitUsage, loaded.status());
  }
  if (loaded.value().help) {
    return answer(help_text());
  }
  if (loaded.value().list_kill_points) {
    return answer(fmt::format("{}\n", fmt::join(kKillPoints, "\n")));
  }
  if (loaded.value().version) {
    return answer(
        fmt::format("kvmd {}.{}.{}\n", KVM_VERSION_MAJOR, KVM_VERSION_MINOR, KVM_VERSION_PATCH));
  }
  if (loaded.value().print_config) {
    return answer(loaded.value().json ? options_json(loaded.value())
                                      : print_options(loaded.value()));
  }
  try {
    return serve(loaded.value(), open_engine, ring_bytes, open_device);
  } catch (const std::bad_alloc&) {
    return fail(kExitFailed, Status::fixed(KVM_ERR_NO_MEMORY, "there is no memory to begin with"));
  }
}

}  // namespace kvm::daemon
