// SPDX-License-Identifier: Apache-2.0
// The C functions of kvm.h, part 11: administration.
#include <iterator>
#include <string>
#include <vector>

#include "client/checks.h"
#include "client/handles.h"
#include "client/outputs.h"
#include "ipc/struct_size.h"
#include "kvm.h"

namespace {

using kvm::Status;
using kvm::client::check_flags;
using kvm::client::check_handle;
using kvm::client::check_not_null;
using kvm::client::check_reserved;
using kvm::client::guarded;
using kvm::client::write_list;
using kvm::client::write_text;

Status invalid(const std::string& sentence) { return Status(KVM_ERR_INVALID, sentence); }

Status check_client(const kvm_client* client) { return check_handle(client, "client"); }

}  // namespace

extern "C" {

kvm_status kvm_get_config_text(kvm_client* client, char* buffer, size_t capacity,
                               size_t* out_length) {
  return write_text(client, buffer, capacity, out_length,
                    [&] { return client->client->config_text(); });
}

kvm_status kvm_evict(kvm_client* client, const kvm_evict_params* params, kvm_evict_result* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(check_not_null(params, "params"));
    kvm_evict_params p;
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_evict_params"));
    KVM_TRY(check_flags(p.flags, KVM_EVICT_DISCONNECT, "kvm_evict_params"));
    KVM_TRY(check_flags(p.reserved0, 0, "kvm_evict_params"));
    KVM_TRY(check_reserved(p.reserved, std::size(p.reserved), "kvm_evict_params"));
    if (p.what < KVM_EVICT_SEQ || p.what > KVM_EVICT_SPACE) {
      return invalid("what is " + std::to_string(p.what) + "; allowed are 1 to 3 (KVM_EVICT_*)");
    }
    if (p.flags != 0 && p.what != KVM_EVICT_CLIENT) {
      return invalid("KVM_EVICT_DISCONNECT goes with KVM_EVICT_CLIENT");
    }
    if (out != nullptr) {
      KVM_TRY(kvm::ipc::check_output(out, "kvm_evict_result"));
    }
    KVM_TRY_ASSIGN(const kvm_evict_result result, client->client->evict(p));
    if (out != nullptr) {
      kvm::ipc::write_struct(out, out->struct_size, result);
    }
    return Status::ok();
  });
}

kvm_status kvm_client_list(kvm_client* client, kvm_client_entry* out, size_t capacity,
                           size_t* out_count) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(check_not_null(out_count, "out_count"));
    KVM_TRY_ASSIGN(const auto list, client->client->list_clients());
    return write_list(list, out, capacity, out_count, "kvm_client_entry");
  });
}

kvm_status kvm_user_list(kvm_client* client, kvm_user_entry* out, size_t capacity,
                         size_t* out_count) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(check_not_null(out_count, "out_count"));
    KVM_TRY_ASSIGN(const auto list, client->client->list_users());
    return write_list(list, out, capacity, out_count, "kvm_user_entry");
  });
}

kvm_status kvm_quota_set(kvm_client* client, const kvm_quota_params* params) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(check_not_null(params, "params"));
    kvm_quota_params p;
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_quota_params"));
    KVM_TRY(check_flags(p.flags | p.reserved0, 0, "kvm_quota_params"));
    KVM_TRY(check_reserved(p.reserved, std::size(p.reserved), "kvm_quota_params"));
    return client->client->set_quota(p);
  });
}

}  // extern "C"
