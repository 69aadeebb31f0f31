// SPDX-License-Identifier: Apache-2.0
#include "examples/llama/kvm_attention.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "kvm.h"

typedef struct kvm_attention {
  llama_attention base; /* first: the two convert into each other */
  kvm_client* client;
  kvm_queue* queue;
  kvm_arena* arena;
  kvm_space_id space;
  kvm_seq_id seq; /* 0: none */
  uint32_t flags; /* of every step */
  kvm_tensor q;
  kvm_tensor k;
  kvm_tensor v;
  kvm_tensor o;
} kvm_attention;

/* Says whether the call succeeded; if not, error[ST_ERROR_BYTES] says which and why. */
static bool succeeded(kvm_status status, const char* call, char* error) {
  if (status == KVM_OK) {
    return true;
  }
  snprintf(error, ST_ERROR_BYTES, "%s: %s: %s", call, kvm_status_name(status), kvm_last_error());
  return false;
}

static int kvm_attention_step(llama_attention* base, int layer, int position, int n) {
  kvm_attention* self = (kvm_attention*)base;
  const kvm_item item = {
      .seq = self->seq,
      .append_position = (uint64_t)position,
      .n_append = (uint32_t)n,
      .n_query = (uint32_t)n,
      .query_position = (uint64_t)position,
  };
  const kvm_step_params step = {
      .struct_size = sizeof step,
      .flags = self->flags,
      .space = self->space,
      .layer_begin = (uint32_t)layer,
      .n_items = 1,
      .items = &item,
      .k = self->k,
      .v = self->v,
      .q = self->q,
      .o = self->o,
  };
  return succeeded(kvm_step(self->queue, &step, NULL), "kvm_step", base->error) ? 0 : -1;
}

/* The old sequence is freed, not truncated: an engine that starts afresh does the same. */
static bool new_sequence(kvm_attention* self, char* error) {
  if (self->seq != 0 && !succeeded(kvm_seq_free(self->client, self->seq), "kvm_seq_free", error)) {
    return false;
  }
  self->seq = 0;
  return succeeded(kvm_seq_create(self->client, self->space, NULL, &self->seq), "kvm_seq_create",
                   error);
}

static int kvm_attention_reset(llama_attention* base) {
  return new_sequence((kvm_attention*)base, base->error) ? 0 : -1;
}

static void kvm_attention_close(llama_attention* base) {
  kvm_attention* self = (kvm_attention*)base;
  kvm_arena_destroy(self->arena);
  kvm_queue_destroy(self->queue);
  kvm_client_close(self->client); /* frees the sequence */
  free(self);
}

static bool open_client(kvm_attention* self, const kvm_attention_params* params, char* error) {
  if (params->embedded) {
    return succeeded(kvm_open_embedded(NULL, &self->client), "kvm_open_embedded", error);
  }
  const kvm_connect_params connect = {
      .struct_size = sizeof connect,
      .socket_path = params->socket_path,
      .client_name = "kvm-llama",
  };
  const kvm_status status = kvm_connect(&connect, &self->client);
  if (status == KVM_ERR_DISCONNECTED) {
    snprintf(error, ST_ERROR_BYTES,
             "%s\nStart a daemon with `kvmd`, name its socket with --socket or KVM_SOCKET, or do "
             "without: --private.",
             kvm_last_error());
    return false;
  }
  return succeeded(status, "kvm_connect", error);
}

static const struct {
  uint32_t number;
  const char* name;
} kCodecs[] = {
    [LLAMA_F32] = {KVM_CODEC_F32, "f32"},
    [LLAMA_F16] = {KVM_CODEC_F16, "f16"},
    [LLAMA_BF16] = {KVM_CODEC_BF16, "bf16"},
};

/* The name holds the fingerprint: several models of this example may be served at once. */
static bool register_space(kvm_attention* self, const llama_model* model, llama_dtype dtype,
                           char* error) {
  const llama_config* config = &model->config;
  char name[64];
  snprintf(name, sizeof name, "llama-%016llx-%s", (unsigned long long)model->fingerprint,
           kCodecs[dtype].name);
  kvm_space_params space = {
      .struct_size = sizeof space,
      .name = name,
      .n_layers = (uint32_t)config->n_layers,
      .n_q_heads = (uint32_t)config->n_heads,
      .n_kv_heads = (uint32_t)config->n_kv_heads,
      .head_dim_k = (uint32_t)config->head_dim,
      .codec = kCodecs[dtype].number,
      .rope_layout = KVM_ROPE_HALF,
      .n_rope_pairs = (uint32_t)config->head_dim / 2,
      .rope_inv_freq = model->inv_freq,
  };
  for (int byte = 0; byte < 8; ++byte) {
    space.fingerprint[byte] = (uint8_t)(model->fingerprint >> (8 * byte));
  }
  return succeeded(kvm_space_register(self->client, &space, &self->space), "kvm_space_register",
                   error);
}

/* A packed F32 tensor of LLAMA_MAX_CHUNK rows in the arena; *data is where this process sees it. */
static bool make_tensor(kvm_attention* self, int heads, int head_dim, kvm_tensor* tensor,
                        float** data, char* error) {
  const uint64_t size = (uint64_t)LLAMA_MAX_CHUNK * (uint64_t)heads * (uint64_t)head_dim * 4;
  tensor->dtype = KVM_DTYPE_F32;
  if (!succeeded(kvm_arena_alloc(self->arena, size, 0, &tensor->buffer), "kvm_arena_alloc",
                 error)) {
    return false;
  }
  *data = kvm_arena_data(self->arena, tensor->buffer);
  return true;
}

static bool make_tensors(kvm_attention* self, const llama_config* config, char* error) {
  const int dim = config->head_dim;
  const uint64_t heads = 2 * ((uint64_t)config->n_heads + (uint64_t)config->n_kv_heads);
  const kvm_arena_params arena = {
      .struct_size = sizeof arena,
      /* The four tensors, and room for the allocator's own records. */
      .size = heads * (uint64_t)dim * LLAMA_MAX_CHUNK * 4 + (UINT64_C(64) << 10),
  };
  return succeeded(kvm_arena_create(self->client, &arena, &self->arena), "kvm_arena_create",
                   error) &&
         make_tensor(self, config->n_heads, dim, &self->q, &self->base.q, error) &&
         make_tensor(self, config->n_kv_heads, dim, &self->k, &self->base.k, error) &&
         make_tensor(self, config->n_kv_heads, dim, &self->v, &self->base.v, error) &&
         make_tensor(self, config->n_heads, dim, &self->o, &self->base.o, error);
}

llama_attention* kvm_attention_create(const llama_model* model, const kvm_attention_params* params,
                                      char* error) {
  kvm_attention* self = calloc(1, sizeof *self);
  if (self == NULL) {
    snprintf(error, ST_ERROR_BYTES, "out of memory");
    return NULL;
  }
  self->base.step = kvm_attention_step;
  self->base.reset = kvm_attention_reset;
  self->base.close = kvm_attention_close;
  self->flags = params->exact_values ? KVM_STEP_F32_VALUES : 0;
  if (!open_client(self, params, error) ||
      !succeeded(kvm_queue_create(self->client, NULL, &self->queue), "kvm_queue_create", error) ||
      !register_space(self, model, params->dtype, error) ||
      !make_tensors(self, &model->config, error) || !new_sequence(self, error)) {
    kvm_attention_close(&self->base);
    return NULL;
  }
  return &self->base;
}
