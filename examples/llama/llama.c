// SPDX-License-Identifier: Apache-2.0
#define _POSIX_C_SOURCE 200809L
#include "examples/llama/llama.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "examples/llama/half.h"
#include "examples/llama/kernels.h"

uint64_t llama_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- Loading ------------------------------------------------------------------------------- */

/* Looks a BF16 tensor of this shape up; columns = 0: a vector. NULL with a sentence in error. */
static const uint16_t* find(const st_file* file, const char* name, int rows, int columns,
                            char* error) {
  const st_tensor* tensor = st_find(file, name);
  const int n_dims = columns == 0 ? 1 : 2;
  if (tensor == NULL || strcmp(tensor->dtype, "BF16") != 0 || tensor->n_dims != n_dims ||
      tensor->shape[0] != rows || (n_dims == 2 && tensor->shape[1] != columns)) {
    snprintf(error, ST_ERROR_BYTES, "weight file: %s must be BF16 [%d][%d]", name, rows, columns);
    return NULL;
  }
  return tensor->data;
}

static bool read_number(const st_file* file, const char* key, double low, double high, double* out,
                        char* error) {
  const char* text = st_metadata(file, key);
  char* end = NULL;
  if (text == NULL) {
    snprintf(error, ST_ERROR_BYTES, "the weight file is none of this example's: it has no '%s'",
             key);
    return false;
  }
  *out = strtod(text, &end);
  if (end == text || *end != '\0' || !(*out >= low && *out <= high)) {
    snprintf(error, ST_ERROR_BYTES, "weight file: %s is '%s'; it must be %.10g to %.10g", key, text,
             low, high);
    return false;
  }
  return true;
}

static bool read_config(const st_file* file, llama_config* config, char* error) {
  const struct {
    const char* key;
    int* value;
    int low;
    int high;
  } integers[] = {
      {"vocabulary", &config->vocabulary, 256, 1 << 20},
      {"d_model", &config->d_model, 8, KERNEL_MAX_WIDTH},
      {"layers", &config->n_layers, 1, 512},
      {"heads", &config->n_heads, 1, 1024},
      {"kv_heads", &config->n_kv_heads, 1, 128},
      {"head_dim", &config->head_dim, 8, KERNEL_MAX_HEAD_DIM},
      {"d_ff", &config->d_ff, 8, KERNEL_MAX_WIDTH},
      {"context", &config->context, 1, 1 << 20},
  };
  double number = 0;
  for (size_t i = 0; i < sizeof integers / sizeof integers[0]; ++i) {
    if (!read_number(file, integers[i].key, integers[i].low, integers[i].high, &number, error)) {
      return false;
    }
    *integers[i].value = (int)number;
  }
  if (!read_number(file, "rope_theta", 1, 1e12, &number, error)) {
    return false;
  }
  config->rope_theta = (float)number;
  if (!read_number(file, "norm_eps", 0, 1, &number, error)) {
    return false;
  }
  config->norm_eps = (float)number;
  if (config->n_heads % config->n_kv_heads != 0 || config->head_dim % 8 != 0 ||
      config->n_heads * config->head_dim > KERNEL_MAX_WIDTH) {
    snprintf(error, ST_ERROR_BYTES, "weight file: %d heads of %d over %d kv heads", config->n_heads,
             config->head_dim, config->n_kv_heads);
    return false;
  }
  return true;
}

static bool find_layer(const llama_model* model, int index, llama_layer* layer, char* error) {
  const llama_config* config = &model->config;
  const int d = config->d_model;
  const int q_width = config->n_heads * config->head_dim;
  const int kv_width = config->n_kv_heads * config->head_dim;
  const struct {
    const char* name;
    const uint16_t** data;
    int rows;
    int columns;
  } parts[] = {
      {"input_layernorm", &layer->attention_norm, d, 0},
      {"self_attn.q_proj", &layer->q, q_width, d},
      {"self_attn.k_proj", &layer->k, kv_width, d},
      {"self_attn.v_proj", &layer->v, kv_width, d},
      {"self_attn.o_proj", &layer->o, d, q_width},
      {"post_attention_layernorm", &layer->ffn_norm, d, 0},
      {"mlp.gate_proj", &layer->gate, config->d_ff, d},
      {"mlp.up_proj", &layer->up, config->d_ff, d},
      {"mlp.down_proj", &layer->down, d, config->d_ff},
  };
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; ++i) {
    char name[96];
    snprintf(name, sizeof name, "model.layers.%d.%s.weight", index, parts[i].name);
    *parts[i].data = find(&model->file, name, parts[i].rows, parts[i].columns, error);
    if (*parts[i].data == NULL) {
      return false;
    }
  }
  return true;
}

static bool load_tokenizer(llama_model* model, char* error) {
  const st_tensor* merges = st_find(&model->file, "tokenizer.merges");
  const int n_merges = model->config.vocabulary - 256;
  if (merges != NULL && strcmp(merges->dtype, "I32") == 0 && merges->n_dims == 2 &&
      merges->shape[0] == n_merges && merges->shape[1] == 2) {
    model->tokens = tokenizer_create(merges->data, (size_t)n_merges);
  }
  if (model->tokens == NULL) {
    snprintf(error, ST_ERROR_BYTES,
             "weight file: tokenizer.merges must be I32 [%d][2], each pair "
             "of earlier tokens",
             n_merges);
    return false;
  }
  return true;
}

static bool load_parts(llama_model* model, char* error) {
  llama_config* config = &model->config;
  if (!read_config(&model->file, config, error) || !load_tokenizer(model, error)) {
    return false;
  }
  model->embedding =
      find(&model->file, "model.embed_tokens.weight", config->vocabulary, config->d_model, error);
  model->norm = find(&model->file, "model.norm.weight", config->d_model, 0, error);
  if (model->embedding == NULL || model->norm == NULL) {
    return false;
  }
  model->layers = calloc((size_t)config->n_layers, sizeof *model->layers);
  model->inv_freq = calloc((size_t)config->head_dim / 2, sizeof *model->inv_freq);
  if (model->layers == NULL || model->inv_freq == NULL) {
    snprintf(error, ST_ERROR_BYTES, "out of memory");
    return false;
  }
  for (int i = 0; i < config->head_dim / 2; ++i) {
    model->inv_freq[i] = (float)pow(config->rope_theta, -2.0 * i / config->head_dim);
  }
  for (int layer = 0; layer < config->n_layers; ++layer) {
    if (!find_layer(model, layer, &model->layers[layer], error)) {
      return false;
    }
  }
  return true;
}

int llama_model_load(const char* path, llama_model* model, char* error) {
  memset(model, 0, sizeof *model);
  if (st_open(path, &model->file, error) != 0) {
    return -1;
  }
  if (!load_parts(model, error)) {
    llama_model_free(model);
    return -1;
  }
  model->fingerprint = 14695981039346656037u;
  for (size_t i = 0; i < model->file.size; ++i) {
    model->fingerprint = (model->fingerprint ^ model->file.bytes[i]) * 1099511628211u;
  }
  return 0;
}

void llama_model_free(llama_model* model) {
  tokenizer_free(model->tokens);
  free(model->layers);
  free(model->inv_freq);
  st_close(&model->file);
  memset(model, 0, sizeof *model);
}

/* ---- The forward pass ---------------------------------------------------------------------- */

struct llama_scratch {
  float* x;      /* [LLAMA_MAX_CHUNK][d_model] the residual stream */
  float* normed; /* [LLAMA_MAX_CHUNK][d_model] */
  float* gate;   /* [LLAMA_MAX_CHUNK][d_ff] */
  float* up;     /* [LLAMA_MAX_CHUNK][d_ff] */
  float* cosine; /* [LLAMA_MAX_CHUNK][head_dim / 2] */
  float* sine;   /* [LLAMA_MAX_CHUNK][head_dim / 2] */
};

llama_scratch* llama_scratch_create(const llama_config* config) {
  llama_scratch* scratch = calloc(1, sizeof *scratch);
  if (scratch == NULL) {
    return NULL;
  }
  const size_t row = LLAMA_MAX_CHUNK * sizeof(float);
  scratch->x = calloc((size_t)config->d_model, row);
  scratch->normed = calloc((size_t)config->d_model, row);
  scratch->gate = calloc((size_t)config->d_ff, row);
  scratch->up = calloc((size_t)config->d_ff, row);
  scratch->cosine = calloc((size_t)config->head_dim / 2, row);
  scratch->sine = calloc((size_t)config->head_dim / 2, row);
  if (scratch->x == NULL || scratch->normed == NULL || scratch->gate == NULL ||
      scratch->up == NULL || scratch->cosine == NULL || scratch->sine == NULL) {
    llama_scratch_free(scratch);
    return NULL;
  }
  return scratch;
}

void llama_scratch_free(llama_scratch* scratch) {
  if (scratch == NULL) {
    return;
  }
  free(scratch->x);
  free(scratch->normed);
  free(scratch->gate);
  free(scratch->up);
  free(scratch->cosine);
  free(scratch->sine);
  free(scratch);
}

/* Angles in double: a position of thousands times a frequency near 1 has no bits to lose. */
static void fill_rotation(const llama_model* model, llama_scratch* scratch, int n, int position) {
  const int half = model->config.head_dim / 2;
  for (int token = 0; token < n; ++token) {
    for (int i = 0; i < half; ++i) {
      const double angle = (double)(position + token) *
                           pow(model->config.rope_theta, -2.0 * i / model->config.head_dim);
      scratch->cosine[token * half + i] = (float)cos(angle);
      scratch->sine[token * half + i] = (float)sin(angle);
    }
  }
}

static int run_layer(const llama_model* model, llama_scratch* scratch, llama_attention* attention,
                     int index, int n, int position) {
  const llama_config* config = &model->config;
  const llama_layer* layer = &model->layers[index];
  const int d = config->d_model;
  const int q_width = config->n_heads * config->head_dim;
  const int kv_width = config->n_kv_heads * config->head_dim;
  const int half = config->head_dim / 2;
  kernel_rms_norm(scratch->normed, scratch->x, layer->attention_norm, n, d, config->norm_eps);
  kernel_multiply(attention->q, scratch->normed, layer->q, n, q_width, d, false);
  kernel_multiply(attention->k, scratch->normed, layer->k, n, kv_width, d, false);
  kernel_multiply(attention->v, scratch->normed, layer->v, n, kv_width, d, false);
  kernel_rotate(attention->q, n, config->n_heads, half, scratch->cosine, scratch->sine);
  kernel_rotate(attention->k, n, config->n_kv_heads, half, scratch->cosine, scratch->sine);
  const uint64_t before = llama_now_ns();
  if (attention->step(attention, index, position, n) != 0) {
    return -1;
  }
  attention->step_ns += llama_now_ns() - before;
  kernel_multiply(scratch->x, attention->o, layer->o, n, d, q_width, true);

  kernel_rms_norm(scratch->normed, scratch->x, layer->ffn_norm, n, d, config->norm_eps);
  kernel_multiply(scratch->gate, scratch->normed, layer->gate, n, config->d_ff, d, false);
  kernel_multiply(scratch->up, scratch->normed, layer->up, n, config->d_ff, d, false);
  kernel_silu_times(scratch->gate, scratch->up, n * config->d_ff);
  kernel_multiply(scratch->x, scratch->gate, layer->down, n, d, config->d_ff, true);
  return 0;
}

int llama_forward(const llama_model* model, llama_scratch* scratch, llama_attention* attention,
                  const int32_t* tokens, int n, int position, float* logits, int n_logits) {
  const llama_config* config = &model->config;
  const int d = config->d_model;
  for (int token = 0; token < n; ++token) {
    const uint16_t* row = model->embedding + (size_t)tokens[token] * (size_t)d;
    for (int i = 0; i < d; ++i) {
      scratch->x[token * d + i] = bf16_to_float(row[i]);
    }
  }
  fill_rotation(model, scratch, n, position);
  for (int layer = 0; layer < config->n_layers; ++layer) {
    if (run_layer(model, scratch, attention, layer, n, position) != 0) {
      return -1;
    }
  }
  kernel_rms_norm(scratch->normed, scratch->x + (size_t)(n - n_logits) * (size_t)d, model->norm,
                  n_logits, d, config->norm_eps);
  kernel_multiply(logits, scratch->normed, model->embedding, n_logits, config->vocabulary, d,
                  false);
  return 0;
}
