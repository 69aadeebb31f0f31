// SPDX-License-Identifier: Apache-2.0
#include "daemon/stats_text.h"

#include <fmt/format.h>

#include <string>

#include "base/audit_stats.h"
#include "base/clock.h"
#include "base/stats_text.h"

namespace kvm::daemon {

kvm_stats service_stats(const Service& service) {
  kvm_stats stats = service.engine->stats();
  stats.struct_size = sizeof(stats);
  stats.n_clients = static_cast<uint32_t>(service.n_clients);
  stats.n_clients_total = service.n_clients_total;
  stats.n_protocol_errors = service.n_protocol_errors;
  stats.n_requests += service.n_immediate;
  stats.n_requests_failed += service.n_immediate_failed;
  stats.uptime_ns = now_ns() - service.start_ns;
  return stats;
}

std::string stats_text(const Service& service) {
  StatsText out;
  const std::string build =
      fmt::format("{{version=\"{}.{}.{}\",isa=\"{}\"}}", KVM_VERSION_MAJOR, KVM_VERSION_MINOR,
                  KVM_VERSION_PATCH, service.engine->isa());
  out.gauge("kvm_build_info", "Always 1; its labels tell what runs.", 1, build.c_str());
  out.gauge("kvm_threads", "Threads that compute.", service.engine->n_threads());
  write_stats(service_stats(service), &out);
  write_audit(service.engine->audit_stats(), &out);
  const std::string rates = service.engine->cost_model();
  out.gauge("kvm_cost_model_info", "1 when it is known; its label is the option cost_model.",
            rates.empty() ? 0 : 1, fmt::format("{{rates=\"{}\"}}", rates).c_str());
  out.gauge("kvm_queues", "Queues of all clients.", service.n_queues);
  out.gauge("kvm_arena_bytes", "Memory of arenas of all clients.", service.arena_bytes);
  out.gauge("kvm_arena_capacity_bytes", "Hard cap of kvm_arena_bytes.",
            service.limits.arena_capacity_bytes);
  out.counter("kvm_dispatcher_sleeps_total", "Times the dispatcher has slept.", service.n_sleeps);
  out.counter("kvm_eventfd_notifications_total", "Completion eventfds written.",
              service.n_notifications);
  return out.take();
}

}  // namespace kvm::daemon
