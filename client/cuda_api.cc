// SPDX-License-Identifier: Apache-2.0
// The C functions of kvm_cuda.h.
#include <cmath>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "base/clock.h"
#include "client/checks.h"
#include "client/connect_params.h"
#include "client/embedded_bridge.h"
#include "client/embedded_device.h"
#include "client/handles.h"
#include "ipc/struct_size.h"
#include "kvm_cuda.h"

struct kvm_cuda_batch {
  uint64_t token = 0;
  std::shared_ptr<kvm::client::DeviceClient> client;
  std::unique_ptr<kvm::device::Batch> batch;
};

struct kvm_cuda_bridge {
  uint64_t token = 0;
  std::unique_ptr<kvm::client::DeviceBridge> bridge;
};

namespace {

using kvm::Dtype;
using kvm::Result;
using kvm::Status;
using kvm::client::check_flags;
using kvm::client::check_handle;
using kvm::client::check_not_null;
using kvm::client::check_reserved;
using kvm::client::DeviceClient;
using kvm::client::guarded;
using kvm::device::check_range;
using kvm::device::state_name;

constexpr uint32_t kMaxBatchItems = 1024;
constexpr uint32_t kMaxBatchAppend = 1u << 20;

Status invalid(const std::string& sentence) { return Status(KVM_ERR_INVALID, sentence); }

Result<std::shared_ptr<DeviceClient>> device_client(const kvm_client* client) {
  KVM_TRY(check_handle(client, "client"));
  auto device = std::dynamic_pointer_cast<DeviceClient>(client->client);
  if (device == nullptr) {
    return Status(KVM_ERR_UNSUPPORTED, "the client was not opened by kvm_cuda_open");
  }
  return device;
}

Status check_positions(uint64_t begin, uint64_t end) {
  if (begin >= end) {
    return invalid("begin is " + std::to_string(begin) + " and end " + std::to_string(end) +
                   "; begin must be below");
  }
  return Status::ok();
}

Status check_buffer(const char* name, const kvm_buffer& buffer, bool required) {
  const bool none = buffer.kind == KVM_BUFFER_NONE && buffer.where == 0 && buffer.size == 0;
  if (buffer.kind != KVM_BUFFER_DEVICE && (required || !none)) {
    return invalid(std::string(name) + " is no device memory (its kind is " +
                   std::to_string(buffer.kind) + ")");
  }
  if (buffer.region != 0 || (buffer.kind == KVM_BUFFER_DEVICE && buffer.where == 0)) {
    return invalid(std::string(name) + " is at address " + std::to_string(buffer.where) +
                   " of region " + std::to_string(buffer.region) +
                   "; device memory has an address, and is of region 0");
  }
  return Status::ok();
}

// A tensor of the caller, as device/ takes it.
Status read_tensor(const char* name, const kvm_tensor& from, bool required,
                   kvm::device::DeviceTensor* to) {
  KVM_TRY(check_buffer(name, from.buffer, required));
  if (from.buffer.kind == KVM_BUFFER_NONE) {
    return Status::ok();
  }
  if (!kvm::dtype_is_known(from.dtype) || from.reserved != 0 || from.stride_layer != 0) {
    return invalid(std::string(name) + ": dtype is " + std::to_string(from.dtype) +
                   ", stride_layer " + std::to_string(from.stride_layer) +
                   "; allowed are F32 (1), F16 (2), BF16 (3), and 0");
  }
  to->data = reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(from.buffer.where));
  to->size_bytes = from.buffer.size;
  to->dtype = static_cast<Dtype>(from.dtype);
  to->stride_row = from.stride_row;
  to->stride_head = from.stride_head;
  return Status::ok();
}

// The states of a kvm_merge, in tensors that the device can address.
Status read_states(const kvm_merge_params& p, kvm::device::StatesCall* to) {
  KVM_TRY(check_flags(p.flags, 0, "kvm_merge_params"));
  KVM_TRY(check_reserved(p.reserved, std::size(p.reserved), "kvm_merge_params"));
  KVM_TRY(check_range("n_states", p.n_states, kvm::attention::gpu::kMaxStates));
  if (p.o == nullptr || p.lse == nullptr) {
    return invalid("o and lse are required");
  }
  to->n_rows = p.n_rows;
  to->n_heads = p.n_heads;
  to->dim = p.dim;
  for (uint32_t i = 0; i < p.n_states; ++i) {
    const std::string o = state_name("o", i), lse = state_name("lse", i);
    KVM_TRY(read_tensor(o.c_str(), p.o[i], true, &to->o.emplace_back()));
    KVM_TRY(read_tensor(lse.c_str(), p.lse[i], true, &to->lse.emplace_back()));
  }
  KVM_TRY(read_tensor("out_o", p.out_o, true, &to->out_o));
  return read_tensor("out_lse", p.out_lse, false, &to->out_lse);
}

Status read_batch(const kvm_cuda_batch_params& p, kvm::device::BatchOptions* to) {
  KVM_TRY(check_flags(p.flags, KVM_CUDA_REPRODUCIBLE, "kvm_cuda_batch_params"));
  KVM_TRY(check_reserved(p.reserved, std::size(p.reserved), "kvm_cuda_batch_params"));
  to->max_items = p.max_items;
  KVM_TRY(check_range("max_items", to->max_items, kMaxBatchItems));
  to->max_append = p.max_append != 0 ? p.max_append : p.max_items;
  KVM_TRY(check_range("max_append", to->max_append, kMaxBatchAppend));
  to->max_query = p.max_query != 0 ? p.max_query : 1;
  KVM_TRY(check_range("max_query", to->max_query, kvm::kMaxQueryRows));
  to->max_query_rows = p.max_query_rows != 0 ? p.max_query_rows : to->max_items * to->max_query;
  KVM_TRY(check_range("max_query_rows", to->max_query_rows, kMaxBatchAppend));
  to->max_tokens = p.max_tokens;
  KVM_TRY(check_range("max_tokens", to->max_tokens, kvm::attention::gpu::kMaxListTokens - 1));
  to->log_weight_stride_item = p.log_weight_stride_item;
  to->log_weight_stride_head = p.log_weight_stride_head;
  if (p.log_weight_stride_head >> 32 != 0 || p.log_weight_stride_item >> 40 != 0) {
    return invalid("log_weight strides are " + std::to_string(p.log_weight_stride_item) + " and " +
                   std::to_string(p.log_weight_stride_head) + "; they must be below 2^40 and 2^32");
  }
  if (p.max_unsure > kvm::kMaxQueryRows) {
    return invalid("max_unsure is " + std::to_string(p.max_unsure) + "; it is at most " +
                   std::to_string(kvm::kMaxQueryRows));
  }
  to->max_unsure = static_cast<uint32_t>(p.max_unsure);
  to->reproducible = (p.flags & KVM_CUDA_REPRODUCIBLE) != 0;
  return Status::ok();
}

Status read_bridge(const kvm_cuda_bridge_params& p, kvm::client::BridgeOptions* to) {
  KVM_TRY(check_flags(p.flags, 0, "kvm_cuda_bridge_params"));
  KVM_TRY(check_reserved(p.reserved, std::size(p.reserved), "kvm_cuda_bridge_params"));
  KVM_TRY(check_handle(p.host, "host"));
  KVM_TRY(check_range("max_tokens", p.max_tokens, kvm::attention::gpu::kMaxListTokens - 1));
  *to = {p.host, p.host_space, p.space, p.max_tokens, p.staging_bytes};
  return Status::ok();
}

Result<kvm::client::BridgeCopy> read_copy(const kvm_cuda_copy_params* params) {
  KVM_TRY(check_not_null(params, "params"));
  kvm_cuda_copy_params p;
  KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_cuda_copy_params"));
  KVM_TRY(check_flags(p.flags, 0, "kvm_cuda_copy_params"));
  KVM_TRY(check_reserved(p.reserved, std::size(p.reserved), "kvm_cuda_copy_params"));
  kvm::client::BridgeCopy copy{p.source, p.onto, p.begin, p.end};
  if (p.timeout_ns != 0) {
    copy.deadline_ns = kvm::add_saturating(kvm::now_ns(), p.timeout_ns);
  }
  return copy;
}

kvm_cuda_pages describe(const kvm::device::PagesPlace& place) {
  const kvm::tiers::SlabClass& lies = place.lies;
  const uint64_t base = reinterpret_cast<uintptr_t>(place.base);
  kvm_cuda_pages pages{};
  pages.struct_size = sizeof pages;
  pages.codec = static_cast<uint32_t>(lies.codec_k);
  pages.n_classes = place.n_classes;
  pages.n_heads = lies.n_heads;
  pages.head_dim = lies.dim_k;
  pages.head_dim_v = lies.dim_v;
  pages.page_tokens = kvm::kPageTokens;
  for (const uint16_t head : place.of->kv_heads) {
    pages.kv_head_mask[head / 64] |= uint64_t{1} << head % 64;
  }
  pages.k = base;
  pages.v = base + (lies.v_in_k ? 0 : lies.v_offset());
  pages.page_stride = place.page_bytes;
  pages.head_stride = lies.k().head_rows_bytes(lies.dim_k);
  pages.token_stride = lies.k().row_bytes(lies.dim_k);
  if (lies.k().is_scaled()) {
    pages.k_scales = base + lies.k_params_offset();
    pages.v_scales = base + lies.v_params_offset();
    pages.scale_head_stride = lies.k().head_params_bytes(lies.dim_k);
  }
  pages.n_pages = place.n_pages;
  pages.table = reinterpret_cast<uintptr_t>(place.table);
  pages.table_stride = place.table_stride;
  return pages;
}

}  // namespace

static_assert(KVM_CUDA_INDEX_MASK == (1 << kvm::tiers::kSlotBits) - 1);

extern "C" {

kvm_status kvm_cuda_open(const kvm_cuda_params* params, kvm_client** out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_not_null(out, "out"));
    kvm_cuda_params p;
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_cuda_params"));
    KVM_TRY(check_flags(p.flags | p.reserved0, 0, "kvm_cuda_params"));
    KVM_TRY(check_reserved(p.reserved, std::size(p.reserved), "kvm_cuda_params"));
    kvm::client::DeviceOptions options{p.device, p.pool_bytes, p.host_bytes, {}};
    if (p.server != nullptr) {
      KVM_TRY_ASSIGN(options.server, kvm::client::read_connect_params(p.server));
    }
    KVM_TRY_ASSIGN(auto client, kvm::client::open_device_client(options));
    auto handle = std::make_unique<kvm_client>();
    handle->token = kvm::client::process_token();
    handle->client = std::move(client);
    *out = handle.release();
    return Status::ok();
  });
}

kvm_status kvm_cuda_batch_create(kvm_client* client, const kvm_cuda_batch_params* params,
                                 kvm_cuda_batch** out) {
  return guarded([&]() -> Status {
    KVM_TRY_ASSIGN(auto device, device_client(client));
    KVM_TRY(check_not_null(params, "params"));
    KVM_TRY(check_not_null(out, "out"));
    kvm_cuda_batch_params p;
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_cuda_batch_params"));
    kvm::device::BatchOptions options;
    KVM_TRY(read_batch(p, &options));
    auto batch = std::make_unique<kvm_cuda_batch>();
    batch->token = kvm::client::process_token();
    KVM_TRY_ASSIGN(batch->batch, device->create_batch(p.space, options));
    batch->client = std::move(device);
    *out = batch.release();
    return Status::ok();
  });
}

void kvm_cuda_batch_destroy(kvm_cuda_batch* batch) {
  if (batch == nullptr) {
    return;
  }
  guarded([&]() -> Status {
    KVM_TRY(check_handle(batch, "batch"));
    batch->client->destroy_batch(std::move(batch->batch));
    delete batch;
    return Status::ok();
  });
}

kvm_status kvm_cuda_update(kvm_cuda_batch* batch, const kvm_cuda_item* items, uint32_t n_items,
                           kvm_cuda_stream stream) {
  return guarded([&]() -> Status {
    KVM_TRY(check_handle(batch, "batch"));
    if (n_items != 0) {
      KVM_TRY(check_not_null(items, "items"));
    }
    if (n_items > kMaxBatchItems) {  // before anything is read of them
      return invalid("n_items is " + std::to_string(n_items) + "; no batch has more than " +
                     std::to_string(kMaxBatchItems));
    }
    return batch->client->update(batch->batch.get(), items, n_items, stream);
  });
}

kvm_status kvm_cuda_set_lengths(kvm_cuda_batch* batch, const kvm_buffer* lengths,
                                kvm_cuda_stream stream) {
  return guarded([&]() -> Status {
    KVM_TRY(check_handle(batch, "batch"));
    const kvm_buffer none{};
    const kvm_buffer& at = lengths != nullptr ? *lengths : none;
    KVM_TRY(check_buffer("lengths", at, lengths != nullptr));
    return batch->client->with_batch(batch->batch.get(), [&](kvm::device::Batch& of) {
      return of.set_lengths(reinterpret_cast<const uint8_t*>(static_cast<uintptr_t>(at.where)),
                            at.size, stream);
    });
  });
}

kvm_status kvm_cuda_append(kvm_cuda_batch* batch, uint32_t layer, const kvm_tensor* k,
                           const kvm_tensor* v, kvm_cuda_stream stream) {
  return guarded([&]() -> Status {
    KVM_TRY(check_handle(batch, "batch"));
    KVM_TRY(check_not_null(k, "k"));
    kvm::device::DeviceTensor keys, values;
    KVM_TRY(read_tensor("k", *k, true, &keys));
    if (v != nullptr) {
      KVM_TRY(read_tensor("v", *v, false, &values));
    }
    return batch->client->with_batch(batch->batch.get(), [&](kvm::device::Batch& of) {
      return of.append(layer, keys, values, stream);
    });
  });
}

kvm_status kvm_cuda_attend(kvm_cuda_batch* batch, const kvm_cuda_attend_params* params,
                           kvm_cuda_stream stream) {
  return guarded([&]() -> Status {
    KVM_TRY(check_handle(batch, "batch"));
    KVM_TRY(check_not_null(params, "params"));
    kvm_cuda_attend_params p;
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_cuda_attend_params"));
    KVM_TRY(check_flags(p.flags, 0, "kvm_cuda_attend_params"));
    KVM_TRY(check_reserved(p.reserved, std::size(p.reserved), "kvm_cuda_attend_params"));
    if (!std::isfinite(p.scale) || p.scale < 0) {
      return invalid("scale is " + std::to_string(p.scale) + "; it must be positive, or 0");
    }
    kvm::device::AttendCall call;
    call.layer = p.layer;
    call.scale = p.scale;
    KVM_TRY(read_tensor("q", p.q, true, &call.q));
    KVM_TRY(read_tensor("o", p.o, true, &call.o));
    KVM_TRY(read_tensor("lse", p.lse, false, &call.lse));
    KVM_TRY(check_buffer("log_weights", p.log_weights, false));
    call.log_weights.data = reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(p.log_weights.where));
    call.log_weights.size_bytes = p.log_weights.size;
    return batch->client->with_batch(
        batch->batch.get(), [&](kvm::device::Batch& of) { return of.attend(call, stream); });
  });
}

kvm_status kvm_cuda_read(kvm_cuda_batch* batch, const kvm_cuda_read_params* params,
                         kvm_cuda_stream stream) {
  return guarded([&]() -> Status {
    KVM_TRY(check_handle(batch, "batch"));
    KVM_TRY(check_not_null(params, "params"));
    kvm_cuda_read_params p;
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_cuda_read_params"));
    KVM_TRY(check_flags(p.flags, 0, "kvm_cuda_read_params"));
    KVM_TRY(check_reserved(p.reserved, std::size(p.reserved), "kvm_cuda_read_params"));
    kvm::device::ReadCall call{p.item, p.layer, p.position, p.n_tokens, {}, {}};
    KVM_TRY(read_tensor("k", p.k, false, &call.k));
    KVM_TRY(read_tensor("v", p.v, false, &call.v));
    return batch->client->with_batch(batch->batch.get(),
                                     [&](kvm::device::Batch& of) { return of.read(call, stream); });
  });
}

kvm_status kvm_cuda_merge(kvm_client* client, const kvm_merge_params* params,
                          kvm_cuda_stream stream) {
  return guarded([&]() -> Status {
    KVM_TRY_ASSIGN(const auto device, device_client(client));
    KVM_TRY(check_not_null(params, "params"));
    kvm_merge_params p;
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_merge_params"));
    kvm::device::StatesCall call;
    KVM_TRY(read_states(p, &call));
    return device->merge(call, stream);
  });
}

kvm_status kvm_cuda_batch_get_pages(kvm_cuda_batch* batch, uint32_t layer, uint32_t head_class,
                                    kvm_cuda_pages* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_handle(batch, "batch"));
    KVM_TRY(kvm::ipc::check_output(out, "kvm_cuda_pages"));
    kvm_cuda_pages pages{};
    KVM_TRY(batch->client->with_batch(batch->batch.get(), [&](kvm::device::Batch& of) -> Status {
      KVM_TRY_ASSIGN(const kvm::device::PagesPlace place, of.pages(layer, head_class));
      pages = describe(place);
      return Status::ok();
    }));
    kvm::ipc::write_struct(out, out->struct_size, pages);
    return Status::ok();
  });
}

kvm_status kvm_cuda_batch_get_indices(kvm_cuda_batch* batch, uint32_t layer, uint32_t head_class,
                                      uint32_t item, int32_t* indices, uint64_t capacity,
                                      uint64_t* n_tokens) {
  return guarded([&]() -> Status {
    KVM_TRY(check_handle(batch, "batch"));
    KVM_TRY(check_not_null(n_tokens, "n_tokens"));
    if (capacity != 0) {
      KVM_TRY(check_not_null(indices, "indices"));
    }
    return batch->client->with_batch(batch->batch.get(), [&](kvm::device::Batch& of) -> Status {
      KVM_TRY_ASSIGN(*n_tokens, of.indices(layer, head_class, item, {indices, capacity}));
      return Status::ok();
    });
  });
}

kvm_status kvm_cuda_spill(kvm_client* client, kvm_seq_id seq, kvm_cuda_stream stream) {
  return kvm_cuda_spill_range(client, seq, 0, UINT64_MAX, stream);
}

kvm_status kvm_cuda_fetch(kvm_client* client, kvm_seq_id seq, kvm_cuda_stream stream) {
  return kvm_cuda_fetch_range(client, seq, 0, UINT64_MAX, stream);
}

kvm_status kvm_cuda_spill_range(kvm_client* client, kvm_seq_id seq, uint64_t begin, uint64_t end,
                                kvm_cuda_stream stream) {
  return guarded([&]() -> Status {
    KVM_TRY_ASSIGN(const auto device, device_client(client));
    KVM_TRY(check_positions(begin, end));
    return device->spill(seq, begin, end, stream);
  });
}

kvm_status kvm_cuda_fetch_range(kvm_client* client, kvm_seq_id seq, uint64_t begin, uint64_t end,
                                kvm_cuda_stream stream) {
  return guarded([&]() -> Status {
    KVM_TRY_ASSIGN(const auto device, device_client(client));
    KVM_TRY(check_positions(begin, end));
    return device->fetch(seq, begin, end, stream);
  });
}

kvm_status kvm_cuda_get_seq_info(kvm_client* client, kvm_seq_id seq, kvm_cuda_seq_info* out) {
  return guarded([&]() -> Status {
    KVM_TRY_ASSIGN(const auto device, device_client(client));
    KVM_TRY(kvm::ipc::check_output(out, "kvm_cuda_seq_info"));
    KVM_TRY_ASSIGN(const kvm_cuda_seq_info info, device->cuda_seq_info(seq));
    kvm::ipc::write_struct(out, out->struct_size, info);
    return Status::ok();
  });
}

kvm_status kvm_cuda_bridge_create(kvm_client* client, const kvm_cuda_bridge_params* params,
                                  kvm_cuda_bridge** out) {
  return guarded([&]() -> Status {
    KVM_TRY_ASSIGN(auto device, device_client(client));
    KVM_TRY(check_not_null(params, "params"));
    KVM_TRY(check_not_null(out, "out"));
    kvm_cuda_bridge_params p;
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_cuda_bridge_params"));
    kvm::client::BridgeOptions options;
    KVM_TRY(read_bridge(p, &options));
    auto bridge = std::make_unique<kvm_cuda_bridge>();
    bridge->token = kvm::client::process_token();
    KVM_TRY_ASSIGN(bridge->bridge, kvm::client::DeviceBridge::create(std::move(device), options));
    *out = bridge.release();
    return Status::ok();
  });
}

void kvm_cuda_bridge_destroy(kvm_cuda_bridge* bridge) {
  if (bridge == nullptr) {
    return;
  }
  guarded([&]() -> Status {
    KVM_TRY(check_handle(bridge, "bridge"));
    delete bridge;
    return Status::ok();
  });
}

kvm_status kvm_cuda_store(kvm_cuda_bridge* bridge, const kvm_cuda_copy_params* params,
                          kvm_cuda_stream stream, kvm_seq_id* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_handle(bridge, "bridge"));
    KVM_TRY(check_not_null(out, "out"));
    KVM_TRY_ASSIGN(const kvm::client::BridgeCopy copy, read_copy(params));
    KVM_TRY_ASSIGN(*out, bridge->bridge->store(copy, stream));
    return Status::ok();
  });
}

kvm_status kvm_cuda_load(kvm_cuda_bridge* bridge, const kvm_cuda_copy_params* params,
                         kvm_cuda_stream stream, kvm_seq_id* out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_handle(bridge, "bridge"));
    KVM_TRY(check_not_null(out, "out"));
    KVM_TRY_ASSIGN(const kvm::client::BridgeCopy copy, read_copy(params));
    KVM_TRY_ASSIGN(*out, bridge->bridge->load(copy, stream));
    return Status::ok();
  });
}

kvm_status kvm_cuda_get_stats(kvm_client* client, kvm_cuda_stats* out) {
  return guarded([&]() -> Status {
    KVM_TRY_ASSIGN(const auto device, device_client(client));
    KVM_TRY(kvm::ipc::check_output(out, "kvm_cuda_stats"));
    KVM_TRY_ASSIGN(const kvm_cuda_stats stats, device->cuda_stats());
    kvm::ipc::write_struct(out, out->struct_size, stats);
    return Status::ok();
  });
}

}  // extern "C"
