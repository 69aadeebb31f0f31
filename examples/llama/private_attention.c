// SPDX-License-Identifier: Apache-2.0
#include "examples/llama/private_attention.h"

#include <stdio.h>
#include <stdlib.h>

#include "examples/llama/kernels.h"

typedef struct private_attention {
  llama_attention base; /* first: the two convert into each other */
  llama_config config;
  llama_dtype dtype;
  int capacity;
  void* k;        /* [n_layers][n_kv_heads][capacity][head_dim] of dtype */
  void* v;        /* as k */
  float* weights; /* [capacity] */
} private_attention;

/* Elements before token `token` of a kv head of a layer. */
static size_t offset(const private_attention* self, int layer, int kv_head, int token) {
  const size_t head = (size_t)layer * (size_t)self->config.n_kv_heads + (size_t)kv_head;
  return (head * (size_t)self->capacity + (size_t)token) * (size_t)self->config.head_dim;
}

/* Where offset() elements into a plane are. */
static unsigned char* address(const private_attention* self, void* plane, size_t elements) {
  return (unsigned char*)plane +
         elements * (self->dtype == LLAMA_F32 ? sizeof(float) : sizeof(uint16_t));
}

static int private_step(llama_attention* base, int layer, int position, int n) {
  private_attention* self = (private_attention*)base;
  const llama_config* config = &self->config;
  const size_t dim = (size_t)config->head_dim;
  if (n > self->capacity - position) {
    snprintf(base->error, sizeof base->error, "token %d is beyond the %d that the cache holds",
             position + n - 1, self->capacity);
    return -1;
  }
  for (int token = 0; token < n; ++token) {
    for (int head = 0; head < config->n_kv_heads; ++head) {
      const size_t from = ((size_t)token * (size_t)config->n_kv_heads + (size_t)head) * dim;
      const size_t to = offset(self, layer, head, position + token);
      kernel_store(address(self, self->k, to), self->dtype, base->k + from, config->head_dim);
      kernel_store(address(self, self->v, to), self->dtype, base->v + from, config->head_dim);
    }
  }
  const int group = config->n_heads / config->n_kv_heads;
  for (int token = 0; token < n; ++token) {
    for (int head = 0; head < config->n_heads; ++head) {
      const size_t at = ((size_t)token * (size_t)config->n_heads + (size_t)head) * dim;
      const size_t stored = offset(self, layer, head / group, 0);
      kernel_attend(base->o + at, base->q + at, address(self, self->k, stored),
                    address(self, self->v, stored), self->dtype, config->head_dim,
                    position + token + 1, self->weights);
    }
  }
  return 0;
}

/* A step names its position and reads nothing behind it: there is nothing to forget. */
static int private_reset(llama_attention* base) {
  (void)base;
  return 0;
}

static void private_close(llama_attention* base) {
  private_attention* self = (private_attention*)base;
  free(base->q);
  free(base->k);
  free(base->v);
  free(base->o);
  free(self->k);
  free(self->v);
  free(self->weights);
  free(self);
}

llama_attention* private_attention_create(const llama_config* config, llama_dtype dtype,
                                          int capacity) {
  private_attention* self = calloc(1, sizeof *self);
  if (self == NULL) {
    return NULL;
  }
  self->config = *config;
  self->dtype = dtype;
  self->capacity = capacity;
  const size_t element = dtype == LLAMA_F32 ? sizeof(float) : sizeof(uint16_t);
  const size_t row = (size_t)config->head_dim * sizeof(float);
  const size_t stored = offset(self, config->n_layers, 0, 0);
  self->k = calloc(stored, element);
  self->v = calloc(stored, element);
  self->weights = calloc((size_t)capacity, sizeof *self->weights);
  self->base.q = calloc((size_t)(LLAMA_MAX_CHUNK * config->n_heads), row);
  self->base.o = calloc((size_t)(LLAMA_MAX_CHUNK * config->n_heads), row);
  self->base.k = calloc((size_t)(LLAMA_MAX_CHUNK * config->n_kv_heads), row);
  self->base.v = calloc((size_t)(LLAMA_MAX_CHUNK * config->n_kv_heads), row);
  self->base.step = private_step;
  self->base.reset = private_reset;
  self->base.close = private_close;
  if (self->k == NULL || self->v == NULL || self->weights == NULL || self->base.q == NULL ||
      self->base.k == NULL || self->base.v == NULL || self->base.o == NULL) {
    private_close(&self->base);
    return NULL;
  }
  return &self->base;
}
