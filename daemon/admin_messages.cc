// SPDX-License-Identifier: Apache-2.0
#include "daemon/admin_messages.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/counted.h"
#include "daemon/admin.h"
#include "daemon/reply.h"
#include "engine/store/quota_info.h"

namespace kvm::daemon {
namespace {

namespace wire = ipc::wire;

// LIMIT: sequences that are freed for one message: a few hundred microseconds of the dispatcher.
constexpr size_t kMaxEvicted = 256;

// Logs who does what: others may wonder about what an operator changes.
void log_action(const Session& session, std::string_view action) {
  spdlog::info("client {:#x} '{}' (process {}, user {}) {}", session.client, session.name,
               session.peer().pid, session.peer().uid, action);
}

Status check_client(Service* service, engine::ClientId client) {
  return service->engine->quotas().find(client) != nullptr
             ? Status::ok()
             : Status(KVM_ERR_NOT_FOUND, fmt::format("there is no client {:#x}", client));
}

// --- Evict --------------------------------------------------------------------------------------

// The sequences that a message names, from `begin` on; of a client, some of others among them.
Result<engine::SeqPage> find_evicted(Session* session, const wire::Evict& message) {
  engine::Engine* engine = session->service()->engine;
  switch (message.what()) {
    case KVM_EVICT_SEQ: {
      engine::SeqPage page = engine->list_seqs(session->client, 0, true, message.id(), 1);
      // One that is not there is for the engine to explain.
      if (!page.infos.empty() && page.infos[0].seq != message.id()) {
        page.infos.clear();
      }
      page.has_more = false;
      return page;
    }
    case KVM_EVICT_CLIENT:
      KVM_TRY(check_client(session->service(), message.id()));
      return engine->list_seqs(session->client, 0, true, message.begin(), kMaxEvicted);
    case KVM_EVICT_SPACE:
      KVM_TRY(engine->space_info(message.id()).status());
      return engine->list_seqs(session->client, message.id(), true, message.begin(), kMaxEvicted);
    default:
      return Status(KVM_ERR_INVALID, fmt::format("what is {}; allowed are {} to {}", message.what(),
                                                 KVM_EVICT_SEQ + 0, KVM_EVICT_SPACE + 0));
  }
}

Status check_flags(const wire::Evict& message) {
  const bool of_client = message.what() == KVM_EVICT_CLIENT;
  if (message.flags() == 0 || (of_client && message.flags() == KVM_EVICT_DISCONNECT)) {
    return Status::ok();
  }
  return Status(KVM_ERR_INVALID,
                fmt::format("flags are {:#x}; known is {:#x}, and it goes with a client",
                            message.flags(), KVM_EVICT_DISCONNECT + 0));
}

struct Evicted {
  uint64_t n_sequences = 0;
  uint64_t bytes = 0;
  uint64_t next = 0;
};

Result<Evicted> evict(Session* session, const wire::Evict& message) {
  Service* service = session->service();
  KVM_TRY(check_flags(message));
  KVM_TRY_ASSIGN(const engine::SeqPage page, find_evicted(session, message));
  Evicted out;
  if (message.what() == KVM_EVICT_SEQ) {
    KVM_TRY(evict_sequence(service, message.id()));
    out.n_sequences = 1;
    out.bytes = page.infos.empty() ? 0 : page.infos[0].bytes;
    return out;
  }
  for (const kvm_seq_info& info : page.infos) {
    const bool is_meant = message.what() != KVM_EVICT_CLIENT || info.client_id == message.id();
    // Its owner may have freed it a moment ago, which is as good.
    if (is_meant && evict_sequence(service, info.seq).is_ok()) {
      ++out.n_sequences;
      out.bytes += info.bytes;
    }
  }
  out.next = page.has_more ? page.infos.back().seq + 1 : 0;
  if (out.next == 0 && message.flags() == KVM_EVICT_DISCONNECT) {
    KVM_TRY(evict_client(service, message.id()));
    log_action(*session, fmt::format("closes client {:#x}", message.id()));
  }
  return out;
}

void handle_evict(Session* session, uint64_t id, const wire::Evict& message) {
  const Result<Evicted> evicted = evict(session, message);
  if (!evicted.is_ok()) {
    reply_error(session, id, evicted.status());
    return;
  }
  if (evicted.value().n_sequences > 0) {
    log_action(*session, fmt::format("evicts {} with {} bytes",
                                     counted(evicted.value().n_sequences, "sequence"),
                                     evicted.value().bytes));
  }
  ipc::ControlWriter writer;
  session->send(
      writer.finish(id, wire::CreateEvicted(writer.fbb(), evicted.value().n_sequences,
                                            evicted.value().bytes, evicted.value().next)));
}

// --- Quotas -------------------------------------------------------------------------------------

// A list whose entries are in the order of their ids, from `begin` on.
template <typename Entry, typename Usage>
void reply_usage(Session* session, uint64_t id, const std::vector<Usage>& all, uint64_t begin,
                 Entry (*entry_of)(const Usage&), uint64_t (*id_of)(const Entry&)) {
  std::vector<Entry> part;
  bool has_more = false;
  for (const Usage& usage : all) {
    const Entry entry = entry_of(usage);
    if (id_of(entry) < begin) {
      continue;
    }
    has_more = part.size() == kMaxListed<Entry>;
    if (has_more) {
      break;
    }
    part.push_back(entry);
  }
  reply_list(session, id, std::move(part), has_more);
}

Status set_quota(Session* session, const wire::QuotaSet& message) {
  KVM_TRY_ASSIGN(const std::vector<kvm_quota_params> all,
                 ipc::structs_of<kvm_quota_params>(message.params(), 1, "params"));
  if (all.size() != 1) {
    return Status(KVM_ERR_INVALID, "params is empty");
  }
  KVM_TRY_ASSIGN(const engine::LimitChanges changes, engine::limit_changes(all[0]));
  Service* service = session->service();
  const bool of_client = all[0].whose == KVM_QUOTA_CLIENT;
  if (of_client) {
    KVM_TRY(set_client_quota(service, all[0].id, changes));
  } else {
    set_tenant_quota(service, static_cast<uint32_t>(all[0].id), changes);
  }
  std::string text;
  for (const engine::Resource resource : engine::kResources) {
    if (changes[resource]) {
      text += fmt::format(" {}={}", engine::resource_name(resource), *changes[resource]);
    }
  }
  const std::string whose =
      of_client ? fmt::format("client {:#x}", all[0].id) : fmt::format("user {}", all[0].id);
  log_action(*session, fmt::format("sets limits of {}:{}", whose, text));
  return Status::ok();
}

const char* action_of(wire::Body type) {
  switch (type) {
    case wire::Body::ConfigText:
      return "read the configuration";
    case wire::Body::Evict:
      return "evict sequences";
    case wire::Body::QuotaSet:
      return "set limits";
    default:
      return "list clients and users";
  }
}

}  // namespace

void handle_admin(Session* session, const wire::Message& message) {
  const uint64_t id = message.id();
  Service* service = session->service();
  const engine::QuotaBook& quotas = service->engine->quotas();
  if (const Status status = check_administrator(*session, action_of(message.body_type()));
      !status.is_ok()) {
    reply_error(session, id, status);
    return;
  }
  switch (message.body_type()) {
    case wire::Body::ConfigText:
      return reply_text(session, id, service->config_text, message.body_as_ConfigText()->begin());
    case wire::Body::Evict:
      return handle_evict(session, id, *message.body_as_Evict());
    case wire::Body::ClientList:
      return reply_usage<kvm_client_entry>(
          session, id, quotas.clients(), message.body_as_ClientList()->begin(),
          engine::client_entry, [](const kvm_client_entry& entry) { return entry.client_id; });
    case wire::Body::UserList:
      return reply_usage<kvm_user_entry>(
          session, id, quotas.tenants(), message.body_as_UserList()->begin(), engine::user_entry,
          [](const kvm_user_entry& entry) { return uint64_t{entry.uid}; });
    default:
      return reply_status_or_done(session, id, set_quota(session, *message.body_as_QuotaSet()));
  }
}

}  // namespace kvm::daemon
