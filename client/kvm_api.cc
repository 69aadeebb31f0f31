// SPDX-License-Identifier: Apache-2.0
// The C functions of kvm.h, parts 1 to 6 and 10: library, clients, arenas, spaces, sequences,
// statistics. kvm_api_data.cc has queues and the data path, kvm_api_admin.cc administration.
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/limits.h"
#include "base/undo.h"
#include "client/checks.h"
#include "client/connect_params.h"
#include "client/handles.h"
#include "client/outputs.h"
#include "client/policy_preset.h"
#include "client/prefix_hash.h"
#include "client/status_name.h"
#include "codecs/codec.h"
#include "ipc/socket.h"
#include "ipc/struct_size.h"
#include "ipc/wire.h"
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

constexpr uint64_t kDefaultArenaBytes = 16ull << 20;
constexpr uint64_t kOsPageBytes = 4096;

Status invalid(const std::string& sentence) { return Status(KVM_ERR_INVALID, sentence); }

// A client handle for what a backend opened.
Status make_handle(kvm::Result<std::shared_ptr<kvm::client::Client>> opened, kvm_client** out) {
  KVM_TRY_ASSIGN(auto client, std::move(opened));
  auto handle = std::make_unique<kvm_client>();
  handle->token = kvm::client::process_token();
  handle->client = std::move(client);
  *out = handle.release();
  return Status::ok();
}

Status check_client(const kvm_client* client) { return check_handle(client, "client"); }

kvm_status seq_call(kvm_client* client, const kvm::SeqRequest& call, kvm_seq_id* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY_ASSIGN(const kvm_seq_id made, client->client->seq(call));
    if (out != nullptr) {
      *out = made;
    }
    return Status::ok();
  });
}

kvm_status snapshot_call(kvm_client* client, kvm::SnapshotRequest&& call, const char* name,
                         uint32_t flags, kvm_seq_id* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(check_not_null(name, "name"));
    KVM_TRY(kvm::client::check_snapshot(name, flags, &call));
    KVM_TRY_ASSIGN(const kvm_seq_id made, client->client->snapshot(call));
    if (out != nullptr) {
      *out = made;
    }
    return Status::ok();
  });
}

// What was found is as good as not there where it takes longer to read than to compute.
Status weigh(kvm::client::Client* client, const kvm::PrefixPage& page, double prefill_rate,
             kvm_prefix* found) {
  const kvm::Result<kvm::PrefixWeight> weight = client->weigh_prefix(page, prefill_rate);
  if (!weight.is_ok()) {
    const kvm_status code = weight.status().code();
    const bool is_gone = code == KVM_ERR_NOT_FOUND || code == KVM_ERR_STALE ||
                         code == KVM_ERR_PERMISSION || code == KVM_ERR_LOST;
    found->seq = 0;
    found->n_tokens = 0;
    return is_gone ? Status::ok() : weight.status();
  }
  found->read_ns = weight.value().read_ns;
  if (!weight.value().is_faster) {
    found->n_tokens_slower = found->n_tokens;
    found->seq = 0;
    found->n_tokens = 0;
  }
  return Status::ok();
}

}  // namespace

extern "C" {

// --- 1. Library ---------------------------------------------------------------------------------

uint32_t kvm_version(void) {
  return KVM_VERSION_MAJOR * 1000000u + KVM_VERSION_MINOR * 1000u + KVM_VERSION_PATCH;
}

#define KVM_TEXT_INNER(x) #x
#define KVM_TEXT(x) KVM_TEXT_INNER(x)
const char* kvm_version_string(void) {
  return KVM_TEXT(KVM_VERSION_MAJOR) "." KVM_TEXT(KVM_VERSION_MINOR) "." KVM_TEXT(
      KVM_VERSION_PATCH);
}

const char* kvm_status_name(kvm_status status) { return kvm::client::status_name(status); }

const char* kvm_codec_name(uint32_t codec) {
  return kvm::codecs::codec_is_known(codec)
             ? kvm::codecs::codec_of(static_cast<kvm::CodecId>(codec)).name
             : nullptr;
}

uint32_t kvm_codec_find(const char* name) {
  const kvm::codecs::Codec* codec = name == nullptr ? nullptr : kvm::codecs::find_codec(name);
  return codec == nullptr ? 0 : static_cast<uint32_t>(codec->id);
}

kvm_status kvm_policy_preset(const kvm_preset_params* params, kvm_preset* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_not_null(params, "params"));
    KVM_TRY(check_not_null(out, "out"));
    kvm_preset_params p;
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_preset_params"));
    KVM_TRY_ASSIGN(const kvm::client::Preset preset, kvm::client::resolve_preset(p));
    return kvm::client::write_preset(preset, out);
  });
}

const char* kvm_preset_name(uint32_t index) { return kvm::client::preset_name(index); }

const char* kvm_last_error(void) { return kvm::client::last_error(); }

void kvm_set_log_callback(void (*callback)(int level, const char* message, void* user),
                          void* user) {
  guarded([&] {
    kvm::client::set_log_callback(callback, user);
    return Status::ok();
  });
}

// --- 2. Connecting ------------------------------------------------------------------------------

kvm_status kvm_connect(const kvm_connect_params* params, kvm_client** out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_not_null(out, "out"));
    KVM_TRY_ASSIGN(const kvm::client::ConnectOptions options,
                   kvm::client::read_connect_params(params));
    return make_handle(kvm::client::connect_client(options), out);
  });
}

kvm_status kvm_open_embedded(const kvm_embedded_params* params, kvm_client** out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_not_null(out, "out"));
    kvm_embedded_params p;
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_embedded_params"));
    KVM_TRY(check_flags(p.flags | p.reserved0, 0, "kvm_embedded_params"));
    KVM_TRY(check_reserved(p.reserved, std::size(p.reserved), "kvm_embedded_params"));
    return make_handle(kvm::client::open_embedded_client(p), out);
  });
}

kvm_status kvm_client_reconnect(kvm_client* client) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    return client->client->reconnect();
  });
}

void kvm_client_close(kvm_client* client) {
  if (client == nullptr) {
    return;
  }
  guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    client->client->close();
    delete client;
    return Status::ok();
  });
}

// --- 3. What a client can learn -----------------------------------------------------------------

kvm_status kvm_client_get_info(kvm_client* client, kvm_client_info* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(kvm::ipc::check_output(out, "kvm_client_info"));
    kvm::ipc::write_struct(out, out->struct_size, client->client->info());
    return Status::ok();
  });
}

kvm_status kvm_client_ping(kvm_client* client, uint64_t* out_ns) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    const uint64_t begin_ns = kvm::now_ns();
    KVM_TRY(client->client->ping());
    if (out_ns != nullptr) {
      *out_ns = kvm::now_ns() - begin_ns;
    }
    return Status::ok();
  });
}

// --- 5. Arenas and buffers ----------------------------------------------------------------------

kvm_status kvm_arena_create(kvm_client* client, const kvm_arena_params* params, kvm_arena** out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(check_not_null(out, "out"));
    kvm_arena_params p;
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_arena_params"));
    KVM_TRY(check_flags(p.flags, 0, "kvm_arena_params"));
    KVM_TRY(check_reserved(p.reserved, std::size(p.reserved), "kvm_arena_params"));
    const uint64_t asked = p.size != 0 ? p.size : kDefaultArenaBytes;
    if (asked > kvm::ipc::kMaxArenaBytes) {
      return Status(KVM_ERR_LIMIT, "an arena of " + std::to_string(asked) + " bytes; at most " +
                                       std::to_string(kvm::ipc::kMaxArenaBytes));
    }
    const uint64_t size = (asked + kOsPageBytes - 1) & ~(kOsPageBytes - 1);
    auto arena = std::make_unique<kvm_arena>();
    arena->token = kvm::client::process_token();
    arena->client = client->client;
    KVM_TRY_ASSIGN(arena->memory, client->client->create_arena(size));
    kvm::Undo destroying([&] { client->client->destroy_arena(arena->memory); });
    arena->allocator = std::make_unique<kvm::client::ArenaAllocator>(arena->memory.size_bytes);
    client->client->arenas().add(arena->memory.region, arena->memory.data,
                                 arena->memory.size_bytes);
    destroying.dismiss();
    ++client->client->n_handles;
    *out = arena.release();
    return Status::ok();
  });
}

void kvm_arena_destroy(kvm_arena* arena) {
  if (arena == nullptr) {
    return;
  }
  guarded([&]() -> Status {
    KVM_TRY(check_handle(arena, "arena"));
    arena->client->arenas().remove(arena->memory.region);
    arena->allocator.reset();
    arena->client->destroy_arena(arena->memory);
    --arena->client->n_handles;
    delete arena;
    return Status::ok();
  });
}

kvm_status kvm_arena_alloc(kvm_arena* arena, uint64_t size, uint64_t alignment, kvm_buffer* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_handle(arena, "arena"));
    KVM_TRY(check_not_null(out, "out"));
    if (arena->client->is_closed()) {
      return Status(KVM_ERR_DISCONNECTED, "the arena's client is closed or disconnected");
    }
    if (size == 0) {
      return invalid("an allocation of 0 bytes");
    }
    if ((alignment & (alignment - 1)) != 0 || alignment > kOsPageBytes) {
      return invalid("alignment is " + std::to_string(alignment) +
                     "; allowed are powers of two up to 4096, or 0");
    }
    const uint64_t offset = arena->allocator->allocate(size, alignment);
    if (offset == kvm::client::ArenaAllocator::kNone) {
      return Status(KVM_ERR_NO_SPACE, "the arena of " + std::to_string(arena->memory.size_bytes) +
                                          " bytes has no " + std::to_string(size) +
                                          " bytes in one piece");
    }
    *out = kvm_buffer{KVM_BUFFER_ARENA, arena->memory.region, offset, size};
    return Status::ok();
  });
}

void kvm_arena_free(kvm_arena* arena, kvm_buffer buffer) {
  guarded([&]() -> Status {
    KVM_TRY(check_handle(arena, "arena"));
    if (buffer.kind == KVM_BUFFER_ARENA && buffer.region == arena->memory.region) {
      arena->allocator->free(buffer.where);
    }
    return Status::ok();
  });
}

void* kvm_arena_data(kvm_arena* arena, kvm_buffer buffer) {
  if (arena == nullptr || buffer.kind != KVM_BUFFER_ARENA ||
      buffer.region != arena->memory.region || buffer.where >= arena->memory.size_bytes) {
    return nullptr;
  }
  return static_cast<uint8_t*>(arena->memory.data) + buffer.where;
}

// --- 6. Spaces and sequences --------------------------------------------------------------------

kvm_status kvm_space_register(kvm_client* client, const kvm_space_params* params,
                              kvm_space_id* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(check_not_null(params, "params"));
    KVM_TRY(check_not_null(out, "out"));
    kvm_space_params p;
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_space_params"));
    KVM_TRY_ASSIGN(const kvm::SpaceSpec space, kvm::ipc::copy_space(p));
    KVM_TRY_ASSIGN(*out, client->client->register_space(space));
    return Status::ok();
  });
}

kvm_status kvm_space_find(kvm_client* client, const char* name, kvm_space_id* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(check_not_null(name, "name"));
    KVM_TRY(check_not_null(out, "out"));
    const size_t length = ::strnlen(name, kvm::kMaxNameBytes + 1);
    if (length > kvm::kMaxNameBytes) {
      return Status(KVM_ERR_NOT_FOUND, "no space has a name longer than " +
                                           std::to_string(kvm::kMaxNameBytes) + " bytes");
    }
    KVM_TRY_ASSIGN(*out, client->client->find_space(std::string(name, length)));
    return Status::ok();
  });
}

kvm_status kvm_space_get_info(kvm_client* client, kvm_space_id space, kvm_space_info* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(kvm::ipc::check_output(out, "kvm_space_info"));
    KVM_TRY_ASSIGN(const kvm_space_info info, client->client->space_info(space));
    kvm::ipc::write_struct(out, out->struct_size, info);
    return Status::ok();
  });
}

kvm_status kvm_space_list(kvm_client* client, kvm_space_info* out, size_t capacity,
                          size_t* out_count) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(check_not_null(out_count, "out_count"));
    KVM_TRY_ASSIGN(const auto list, client->client->list_spaces());
    return write_list(list, out, capacity, out_count, "kvm_space_info");
  });
}

kvm_status kvm_space_drop(kvm_client* client, kvm_space_id space) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    return client->client->drop_space(space);
  });
}

kvm_status kvm_seq_create(kvm_client* client, kvm_space_id space, const kvm_seq_params* params,
                          kvm_seq_id* out) {
  kvm::SeqRequest call;
  const kvm_status status = guarded([&]() -> Status {
    KVM_TRY(check_not_null(out, "out"));
    return kvm::client::check_create(space, params, &call);
  });
  return status != KVM_OK ? status : seq_call(client, call, out);
}

kvm_status kvm_seq_fork(kvm_client* client, kvm_seq_id parent, uint64_t n_tokens, kvm_seq_id* out) {
  const kvm_status status = guarded([&] { return check_not_null(out, "out"); });
  return status != KVM_OK ? status
                          : seq_call(client, {kvm::SeqVerb::kFork, 0, 0, parent, n_tokens}, out);
}

kvm_status kvm_seq_truncate(kvm_client* client, kvm_seq_id seq, uint64_t n_tokens) {
  return seq_call(client, {kvm::SeqVerb::kTruncate, 0, 0, seq, n_tokens}, nullptr);
}

kvm_status kvm_seq_commit(kvm_client* client, kvm_seq_id seq, uint64_t n_tokens) {
  return seq_call(client, {kvm::SeqVerb::kCommit, 0, 0, seq, n_tokens}, nullptr);
}

kvm_status kvm_seq_free(kvm_client* client, kvm_seq_id seq) {
  return seq_call(client, {kvm::SeqVerb::kFree, 0, 0, seq, 0}, nullptr);
}

kvm_status kvm_seq_publish(kvm_client* client, kvm_seq_id seq) {
  return seq_call(client, {kvm::SeqVerb::kPublish, 0, 0, seq, 0}, nullptr);
}

kvm_status kvm_seq_take(kvm_client* client, kvm_seq_id seq) {
  return seq_call(client, {kvm::SeqVerb::kTake, 0, 0, seq, 0}, nullptr);
}

kvm_status kvm_prefix_seed(kvm_client* client, kvm_space_id space, const void* salt,
                           size_t salt_bytes, kvm_prefix_hash* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(check_not_null(out, "out"));
    if (salt_bytes != 0) {
      KVM_TRY(check_not_null(salt, "salt"));
    }
    if (salt_bytes > kvm::kMaxSaltBytes) {
      return Status(KVM_ERR_INVALID, "salt_bytes is " + std::to_string(salt_bytes) + "; at most " +
                                         std::to_string(kvm::kMaxSaltBytes) + " are allowed");
    }
    KVM_TRY_ASSIGN(const kvm_space_info info, client->client->space_info(space));
    *out = kvm::client::prefix_seed(info, {static_cast<const std::byte*>(salt), salt_bytes});
    return Status::ok();
  });
}

kvm_status kvm_prefix_hashes(const kvm_prefix_hash* before, const uint32_t* tokens,
                             uint64_t n_tokens, kvm_prefix_hash* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_not_null(before, "before"));
    if (n_tokens < KVM_PREFIX_TOKENS) {
      return Status::ok();
    }
    KVM_TRY(check_not_null(tokens, "tokens"));
    KVM_TRY(check_not_null(out, "out"));
    kvm::client::hash_pages(*before, {tokens, static_cast<size_t>(n_tokens)}, out);
    return Status::ok();
  });
}

kvm_status kvm_prefix_publish(kvm_client* client, kvm_seq_id seq, const kvm_prefix_hash* hashes,
                              uint32_t n_hashes, uint64_t keep_ns) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(check_not_null(hashes, "hashes"));
    kvm::SeqRequest call;
    KVM_TRY(kvm::client::check_prefix(seq, hashes, n_hashes, keep_ns, &call));
    return client->client->seq(call).status();
  });
}

kvm_status kvm_prefix_find(kvm_client* client, const kvm_prefix_find_params* params,
                           kvm_prefix* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(check_not_null(params, "params"));
    kvm_prefix_find_params p;
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_prefix_find_params"));
    KVM_TRY(kvm::ipc::check_output(out, "kvm_prefix"));
    KVM_TRY(check_flags(p.flags, 0, "kvm_prefix_find"));
    if (p.n_hashes != 0) {
      KVM_TRY(check_not_null(p.hashes, "hashes"));
    }
    if (!std::isfinite(p.prefill_rate) || p.prefill_rate < 0) {
      return {KVM_ERR_INVALID, "prefill_rate is " + std::to_string(p.prefill_rate) +
                                   "; it is a number of tokens a second, or 0"};
    }
    KVM_TRY_ASSIGN(
        const kvm::PrefixPage page,
        client->client->find_prefix(p.space, {p.hashes, static_cast<size_t>(p.n_hashes)}));
    kvm_prefix found{};
    found.seq = page.seq;
    found.n_tokens = uint64_t{page.n_pages} * KVM_PREFIX_TOKENS;
    if (p.prefill_rate > 0 && page.n_pages != 0) {
      KVM_TRY(weigh(client->client.get(), page, p.prefill_rate, &found));
    }
    kvm::ipc::write_struct(out, out->struct_size, found);
    return Status::ok();
  });
}

kvm_status kvm_seq_get_info(kvm_client* client, kvm_seq_id seq, kvm_seq_info* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(kvm::ipc::check_output(out, "kvm_seq_info"));
    KVM_TRY_ASSIGN(const kvm_seq_info info, client->client->seq_info(seq));
    kvm::ipc::write_struct(out, out->struct_size, info);
    return Status::ok();
  });
}

kvm_status kvm_seq_list(kvm_client* client, kvm_space_id space, uint32_t flags, kvm_seq_info* out,
                        size_t capacity, size_t* out_count) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(check_not_null(out_count, "out_count"));
    KVM_TRY(check_flags(flags, KVM_LIST_ALL_CLIENTS, "kvm_seq_list"));
    KVM_TRY_ASSIGN(const auto list, client->client->list_seqs(space, flags));
    return write_list(list, out, capacity, out_count, "kvm_seq_info");
  });
}

kvm_status kvm_seq_prefetch(kvm_client* client, kvm_seq_id seq) {
  return seq_call(client, {kvm::SeqVerb::kPrefetch, 0, 0, seq, 0}, nullptr);
}

kvm_status kvm_seq_drop(kvm_client* client, kvm_seq_id seq, uint64_t begin, uint64_t end) {
  return seq_call(client,
                  {.verb = kvm::SeqVerb::kDrop, .seq = seq, .range = {.begin = begin, .end = end}},
                  nullptr);
}

kvm_status kvm_seq_set_priority(kvm_client* client, const kvm_priority_params* params) {
  kvm::SeqRequest call;
  const kvm_status status = guarded([&] { return kvm::client::read_priority(params, &call); });
  return status != KVM_OK ? status : seq_call(client, call, nullptr);
}

kvm_status kvm_seq_save(kvm_client* client, kvm_seq_id seq, const char* name, uint32_t flags) {
  return snapshot_call(client, {.verb = kvm::SnapshotVerb::kSave, .seq = seq}, name, flags,
                       nullptr);
}

kvm_status kvm_seq_load(kvm_client* client, kvm_space_id space, const char* name, kvm_seq_id* out) {
  const kvm_status status = guarded([&] { return check_not_null(out, "out"); });
  return status != KVM_OK
             ? status
             : snapshot_call(client, {.verb = kvm::SnapshotVerb::kLoad, .space = space}, name, 0,
                             out);
}

kvm_status kvm_snapshot_delete(kvm_client* client, const char* name) {
  return snapshot_call(client, {.verb = kvm::SnapshotVerb::kRemove}, name, 0, nullptr);
}

kvm_status kvm_snapshot_list(kvm_client* client, uint32_t flags, kvm_snapshot_info* out,
                             size_t capacity, size_t* out_count) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(check_not_null(out_count, "out_count"));
    KVM_TRY(check_flags(flags, KVM_LIST_ALL_CLIENTS, "kvm_snapshot_list"));
    KVM_TRY_ASSIGN(const auto list, client->client->list_snapshots(flags));
    return write_list(list, out, capacity, out_count, "kvm_snapshot_info");
  });
}

// --- 10. Statistics -----------------------------------------------------------------------------

kvm_status kvm_get_stats(kvm_client* client, kvm_stats* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_client(client));
    KVM_TRY(kvm::ipc::check_output(out, "kvm_stats"));
    KVM_TRY_ASSIGN(const kvm_stats stats, client->client->stats());
    kvm::ipc::write_struct(out, out->struct_size, stats);
    return Status::ok();
  });
}

kvm_status kvm_get_stats_text(kvm_client* client, char* buffer, size_t capacity,
                              size_t* out_length) {
  return write_text(client, buffer, capacity, out_length,
                    [&] { return client->client->stats_text(); });
}

}  // extern "C"
