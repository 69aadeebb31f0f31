// SPDX-License-Identifier: Apache-2.0
#include "client/embedded_client.h"

#include <fmt/format.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <system_error>
#include <utility>

#include "base/audit_stats.h"
#include "base/children.h"
#include "base/clock.h"
#include "base/stats_text.h"
#include "client/embedded_queue.h"
#include "client/limits.h"
#include "engine/store/quota_info.h"

namespace kvm::client {

namespace {

// Long enough to sleep, short enough that another thread's submit is not held up.
constexpr uint64_t kDriveSliceNs = 1'000'000;
constexpr size_t kMaxListed = 256;

// As kvmd reads its option, but 0 where the variable is not set.
Result<uint64_t> audit_every_of_environment() {
  constexpr uint64_t kMost = 1'000'000'000'000;
  const char* text = ::getenv("KVM_AUDIT_EVERY");
  if (text == nullptr || *text == '\0') {
    return uint64_t{0};
  }
  uint64_t every = 0;
  const char* const end = text + ::strlen(text);
  const auto parsed = std::from_chars(text, end, every);
  if (parsed.ec != std::errc() || parsed.ptr != end || every > kMost) {
    return Status(KVM_ERR_INVALID, "KVM_AUDIT_EVERY is '" + std::string(text) +
                                       "' in the environment; it must be a whole number from 0 "
                                       "to " +
                                       std::to_string(kMost));
  }
  return every;
}

}  // namespace

Result<std::shared_ptr<Client>> open_embedded_client(const kvm_embedded_params& params) {
  engine::EngineOptions options;
  options.n_threads = params.n_threads;
  options.host_capacity_bytes = params.host_capacity_bytes;
  KVM_TRY_ASSIGN(options.audit_every, audit_every_of_environment());
  const char* cost_model = ::getenv("KVM_COST_MODEL");
  options.cost_model = cost_model == nullptr ? "" : cost_model;
  KVM_TRY_ASSIGN(auto service, EmbeddedService::open(options));
  return std::shared_ptr<Client>(std::make_shared<EmbeddedClient>(std::move(service)));
}

std::shared_ptr<QueueEvent> QueueEvent::make() {
  const int fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return fd < 0 ? nullptr : std::shared_ptr<QueueEvent>(new QueueEvent(fd));
}

QueueEvent::~QueueEvent() { ::close(fd_); }

void QueueEvent::raise() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(fd_, &one, sizeof(one));
}

void QueueEvent::reset() const {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t n = ::read(fd_, &count, sizeof(count));
}

Result<std::shared_ptr<EmbeddedService>> EmbeddedService::open(
    const engine::EngineOptions& options) {
  auto service = std::make_shared<EmbeddedService>();
  KVM_TRY_ASSIGN(service->engine_, engine::Engine::open(options));
  engine::Engine& engine = *service->engine_;
  service->client_ = engine.add_client({.uid = static_cast<uint32_t>(::geteuid()),
                                        .pid = static_cast<uint32_t>(::getpid()),
                                        .name = "embedded",
                                        .limits = {}});
  service->start_ns_ = now_ns();
  kvm_client_info& info = service->info_;
  fill_limits(&info);
  info.features = KVM_FEATURE_EMBEDDED | KVM_FEATURE_EVENTFD;
  info.epoch = service->start_ns_;
  info.client_id = service->client_;
  info.server_pid = static_cast<uint32_t>(::getpid());
  info.n_threads = engine.n_threads();
  info.max_spaces = engine.options().max_spaces;
  info.max_sequences = engine.options().max_sequences_per_client;
  info.host_capacity_bytes = engine.options().host_capacity_bytes;
  info.quota_bytes = engine.options().default_quota_bytes != 0
                         ? engine.options().default_quota_bytes
                         : info.host_capacity_bytes;
  ::strncpy(info.isa, engine.isa(), sizeof(info.isa) - 1);
  ::strncpy(info.server_version, kvm_version_string(), sizeof(info.server_version) - 1);
  return service;
}

void EmbeddedService::close() {
  stop_driver();
  end_engine();
  has_ended_.store(true, std::memory_order_relaxed);
  const std::lock_guard lock(driver_mutex_);
  for (const std::weak_ptr<QueueEvent>& event : events_) {
    if (const std::shared_ptr<QueueEvent> living = event.lock()) {
      living->raise();
    }
  }
  events_.clear();
}

void EmbeddedService::end_engine() {
  const std::lock_guard lock(mutex_);
  if (engine_ == nullptr) {
    return;
  }
  bool gone = false;
  engine_->remove_client(client_, [&gone] { gone = true; });
  while (!gone) {
    if (!engine_->work() && engine_->poll() == 0 && !gone) {
      engine_->wait(kDriveSliceNs);
    }
  }
  engine_.reset();
}

bool EmbeddedService::drive(uint64_t timeout_ns) {
  const std::lock_guard lock(mutex_);
  if (engine_ == nullptr) {
    return false;
  }
  const bool worked = engine_->work();
  if (engine_->poll() == 0 && !worked && engine_->housekeep() != 0) {
    engine_->wait(std::min(timeout_ns, kDriveSliceNs));
    engine_->poll();
  }
  return true;
}

std::shared_ptr<QueueEvent> EmbeddedService::watch() {
  std::shared_ptr<QueueEvent> event = QueueEvent::make();
  if (event == nullptr) {
    return nullptr;
  }
  const std::lock_guard lock(driver_mutex_);
  if (driver_stops_) {
    event->raise();
    return event;
  }
  if (!driver_.joinable()) {
    try {
      driver_ = std::thread([this] { run_driver(); });
    } catch (const std::system_error&) {
      return nullptr;
    }
  }
  std::erase_if(events_, [](const std::weak_ptr<QueueEvent>& old) { return old.expired(); });
  events_.push_back(event);
  return event;
}

void EmbeddedService::wake_driver() {
  const std::lock_guard lock(driver_mutex_);
  driver_has_work_ = true;
  driver_wake_.notify_one();
}

void EmbeddedService::run_driver() {
  std::unique_lock lock(driver_mutex_);
  while (!driver_stops_) {
    if (!driver_has_work_) {
      driver_wake_.wait(lock);
      continue;
    }
    driver_has_work_ = false;
    lock.unlock();
    // Requests of other queues are driven with them: the engine tells no difference.
    const bool goes_on = drive(UINT64_MAX) && has_requests();
    lock.lock();
    driver_has_work_ |= goes_on;
  }
}

void EmbeddedService::stop_driver() {
  {
    const std::lock_guard lock(driver_mutex_);
    driver_stops_ = true;
    driver_wake_.notify_one();
  }
  if (driver_.joinable()) {
    driver_.join();
  }
}

bool EmbeddedService::has_requests() {
  const std::lock_guard lock(mutex_);
  return engine_ != nullptr && engine_->n_in_flight() != 0;
}

bool EmbeddedService::is_down() const {
  const std::lock_guard lock(mutex_);
  return engine_ == nullptr;
}

Status EmbeddedService::down_status() {
  return Status::fixed(KVM_ERR_DISCONNECTED, "the client was closed");
}

Status EmbeddedService::add_queue() {
  if (is_down()) {
    return down_status();
  }
  if (n_queues_.fetch_add(1) >= info_.max_queues) {
    --n_queues_;
    return Status(KVM_ERR_LIMIT, "this client has " + std::to_string(info_.max_queues) +
                                     " queues, the most that are allowed");
  }
  return Status::ok();
}

Status EmbeddedClient::ping() {
  return service_->with_engine([](engine::Engine&, engine::ClientId) { return Status::ok(); });
}

Result<std::unique_ptr<Queue>> EmbeddedClient::create_queue(uint32_t n_entries, uint64_t) {
  KVM_TRY(service_->add_queue());
  return std::unique_ptr<Queue>(std::make_unique<EmbeddedQueue>(service_, n_entries));
}

Result<ArenaMemory> EmbeddedClient::create_arena(uint64_t size_bytes) {
  if (service_->is_down()) {
    return EmbeddedService::down_status();
  }
  if (n_arenas_.fetch_add(1) >= service_->info().max_arenas) {
    --n_arenas_;
    return Status(KVM_ERR_LIMIT, "this client has " + std::to_string(service_->info().max_arenas) +
                                     " arenas, the most that are allowed");
  }
  // Touched now, as a daemon's arena is.
  void* data = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (data == MAP_FAILED) {
    --n_arenas_;
    return Status(KVM_ERR_NO_MEMORY,
                  "an arena of " + std::to_string(size_bytes) + " bytes cannot be mapped");
  }
  leave_out_of_children(data, size_bytes);
  return ArenaMemory{++last_region_, data, size_bytes};
}

void EmbeddedClient::destroy_arena(const ArenaMemory& arena) {
  ::munmap(arena.data, arena.size_bytes);
  --n_arenas_;
}

Result<kvm_space_id> EmbeddedClient::register_space(const SpaceSpec& space) {
  return service_->with_engine([&](engine::Engine& engine, engine::ClientId) {
    return engine.register_space(space, ::geteuid());
  });
}

Result<kvm_space_id> EmbeddedClient::find_space(const std::string& name) {
  return service_->with_engine([&](engine::Engine& engine, engine::ClientId) {
    return engine.find_space(name, ::geteuid());
  });
}

Result<kvm_space_info> EmbeddedClient::space_info(kvm_space_id space) {
  return service_->with_engine(
      [&](engine::Engine& engine, engine::ClientId) { return engine.space_info(space); });
}

Result<std::vector<kvm_space_info>> EmbeddedClient::list_spaces() {
  return service_->with_engine(
      [](engine::Engine& engine, engine::ClientId) -> Result<std::vector<kvm_space_info>> {
        return engine.list_spaces();
      });
}

Status EmbeddedClient::drop_space(kvm_space_id space) {
  return service_->with_engine(
      [&](engine::Engine& engine, engine::ClientId) { return engine.drop_space(space); });
}

Result<kvm_seq_id> EmbeddedClient::seq(const SeqRequest& call) {
  // Shared with the callback, which a close of the client may drop.
  struct Outcome {
    std::atomic<bool> done{false};
    Status status;
    kvm_seq_id seq = 0;
  };
  auto outcome = std::make_shared<Outcome>();
  KVM_TRY(service_->with_engine([&](engine::Engine& engine, engine::ClientId client) {
    engine.submit(client, engine::RequestTag{0, service_->next_number()}, SeqRequest(call),
                  [outcome](RequestResult&& result) {
                    outcome->status = std::move(result.status);
                    outcome->seq = result.seq;
                    outcome->done.store(true, std::memory_order_release);
                  });
    return Status::ok();
  }));
  // SYNC: acquire: the result, which another thread that drives the engine may have written.
  while (!outcome->done.load(std::memory_order_acquire)) {
    if (!service_->drive(UINT64_MAX)) {
      return EmbeddedService::down_status();
    }
  }
  KVM_TRY(std::move(outcome->status));
  return outcome->seq;
}

Result<kvm_seq_info> EmbeddedClient::seq_info(kvm_seq_id seq) {
  return service_->with_engine([&](engine::Engine& engine, engine::ClientId client) {
    return engine.seq_info(client, seq);
  });
}

Result<std::vector<kvm_seq_info>> EmbeddedClient::list_seqs(kvm_space_id space, uint32_t flags) {
  const bool all_clients = (flags & KVM_LIST_ALL_CLIENTS) != 0;
  std::vector<kvm_seq_info> out;
  engine::SeqPage page;
  // In parts, so that other threads get their turns.
  do {
    const kvm_seq_id begin = out.empty() ? 0 : out.back().seq + 1;
    KVM_TRY_ASSIGN(
        page, service_->with_engine(
                  [&](engine::Engine& engine, engine::ClientId client) -> Result<engine::SeqPage> {
                    return engine.list_seqs(client, space, all_clients, begin, kMaxListed);
                  }));
    out.insert(out.end(), page.infos.begin(), page.infos.end());
  } while (page.has_more);
  return out;
}

Result<PrefixPage> EmbeddedClient::find_prefix(kvm_space_id space,
                                               std::span<const kvm_prefix_hash> hashes) {
  return service_->with_engine(
      [&](engine::Engine& engine, engine::ClientId client) -> Result<PrefixPage> {
        KVM_TRY_ASSIGN(const std::span<const std::byte> memory,
                       engine.prefix_table(engine.quotas().uid(client)));
        const std::optional<PrefixTableReader> table = PrefixTableReader::over(memory);
        KVM_ASSERT(table.has_value());
        return table->find(space, hashes);
      });
}

Result<PrefixWeight> EmbeddedClient::weigh_prefix(const PrefixPage& page, double prefill_rate) {
  return service_->with_engine([&](engine::Engine& engine, engine::ClientId client) {
    return engine.weigh_prefix(client, page.seq, uint64_t{page.n_pages} * KVM_PREFIX_TOKENS,
                               prefill_rate);
  });
}

Result<kvm_stats> EmbeddedClient::stats() {
  return service_->with_engine([&](engine::Engine& engine, engine::ClientId) -> Result<kvm_stats> {
    kvm_stats stats = engine.stats();
    stats.n_clients = 1;
    stats.n_clients_total = 1;
    stats.uptime_ns = now_ns() - service_->start_ns();
    return stats;
  });
}

Result<std::string> EmbeddedClient::stats_text() {
  KVM_TRY_ASSIGN(const kvm_stats all, stats());
  KVM_TRY_ASSIGN(
      const AuditStats audit,
      service_->with_engine([](engine::Engine& engine, engine::ClientId) -> Result<AuditStats> {
        return engine.audit_stats();
      }));
  StatsText text;
  write_stats(all, &text);
  write_audit(audit, &text);
  return text.take();
}

Result<std::string> EmbeddedClient::config_text() {
  return Status(KVM_ERR_UNSUPPORTED,
                "an engine in this process has no configuration: its options are those that "
                "kvm_open_embedded was given");
}

Result<kvm_evict_result> EmbeddedClient::evict(const kvm_evict_params& params) {
  if ((params.flags & KVM_EVICT_DISCONNECT) != 0) {
    return Status(KVM_ERR_UNSUPPORTED,
                  "an engine in this process has no connections; close its client");
  }
  std::vector<kvm_seq_info> seqs;
  if (params.what == KVM_EVICT_SEQ) {
    KVM_TRY_ASSIGN(const kvm_seq_info info, seq_info(params.id));
    seqs.push_back(info);
  } else if (params.what == KVM_EVICT_SPACE) {
    KVM_TRY(space_info(params.id).status());
    KVM_TRY_ASSIGN(seqs, list_seqs(params.id, 0));
  } else if (params.id == info().client_id) {
    KVM_TRY_ASSIGN(seqs, list_seqs(0, 0));
  } else {
    return Status(KVM_ERR_NOT_FOUND, fmt::format("there is no client {:#x}", params.id));
  }
  return service_->with_engine(
      [&](engine::Engine& engine, engine::ClientId) -> Result<kvm_evict_result> {
        kvm_evict_result out{};
        for (const kvm_seq_info& info : seqs) {
          if (engine.evict(info.seq).is_ok()) {
            ++out.n_sequences;
            out.bytes += info.bytes;
          }
        }
        return out;
      });
}

Result<std::vector<kvm_client_entry>> EmbeddedClient::list_clients() {
  return service_->with_engine(
      [](engine::Engine& engine, engine::ClientId) -> Result<std::vector<kvm_client_entry>> {
        std::vector<kvm_client_entry> out;
        for (const engine::ClientUsage& usage : engine.quotas().clients()) {
          out.push_back(engine::client_entry(usage));
        }
        return out;
      });
}

Result<std::vector<kvm_user_entry>> EmbeddedClient::list_users() {
  return service_->with_engine(
      [](engine::Engine& engine, engine::ClientId) -> Result<std::vector<kvm_user_entry>> {
        std::vector<kvm_user_entry> out;
        for (const engine::TenantUsage& usage : engine.quotas().tenants()) {
          out.push_back(engine::user_entry(usage));
        }
        return out;
      });
}

Status EmbeddedClient::set_quota(const kvm_quota_params& params) {
  KVM_TRY_ASSIGN(const engine::LimitChanges changes, engine::limit_changes(params));
  return service_->with_engine([&](engine::Engine& engine, engine::ClientId) -> Status {
    if (params.whose == KVM_QUOTA_CLIENT) {
      return engine.quotas().set_client_limits(params.id, changes);
    }
    engine.quotas().set_tenant_limits(static_cast<uint32_t>(params.id), changes);
    return Status::ok();
  });
}

}  // namespace kvm::client
