// SPDX-License-Identifier: Apache-2.0
/*
 * The forward pass of a Llama-architecture model. It has no KV cache: attention is an object that
 * takes the new keys and values and the queries of a layer, and gives back the attention output.
 * kvm_attention.h sends them to kvm, private_attention.h keeps them here.
 */
#ifndef KVM_EXAMPLES_LLAMA_LLAMA_H_
#define KVM_EXAMPLES_LLAMA_LLAMA_H_

#include <stdint.h>

#include "examples/llama/kernels.h"
#include "examples/llama/safetensors.h"
#include "examples/llama/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Tokens that one call of llama_forward takes at most. */
enum { LLAMA_MAX_CHUNK = 64 };

typedef struct llama_config {
  int vocabulary;
  int d_model;
  int n_layers;
  int n_heads;
  int n_kv_heads;
  int head_dim;
  int d_ff;
  int context; /* tokens of the longest sequence it was trained on */
  float rope_theta;
  float norm_eps;
} llama_config;

/* BF16 matrices [rows][columns] and vectors inside the weight file's memory. */
typedef struct llama_layer {
  const uint16_t* attention_norm; /* [d_model] */
  const uint16_t* q;              /* [n_heads * head_dim][d_model] */
  const uint16_t* k;              /* [n_kv_heads * head_dim][d_model] */
  const uint16_t* v;              /* as k */
  const uint16_t* o;              /* [d_model][n_heads * head_dim] */
  const uint16_t* ffn_norm;       /* [d_model] */
  const uint16_t* gate;           /* [d_ff][d_model] */
  const uint16_t* up;             /* [d_ff][d_model] */
  const uint16_t* down;           /* [d_model][d_ff] */
} llama_layer;

typedef struct llama_model {
  st_file file;
  llama_config config;
  llama_layer* layers;
  const uint16_t* embedding; /* [vocabulary][d_model]; the output matrix as well */
  const uint16_t* norm;      /* [d_model] */
  tokenizer* tokens;
  float* inv_freq;      /* [head_dim / 2] angle per position, radians */
  uint64_t fingerprint; /* FNV-1a of the weight file */
} llama_model;

/* Loads the weight file at `path`. Returns 0, or -1 with a sentence in error[ST_ERROR_BYTES] and
 * nothing left behind. Release with llama_model_free. */
int llama_model_load(const char* path, llama_model* model, char* error);
void llama_model_free(llama_model* model);

/*
 * Attention over what was appended so far. The forward pass writes q [n][n_heads][head_dim],
 * k and v [n][n_kv_heads][head_dim] of a layer into the object's buffers (room for LLAMA_MAX_CHUNK
 * tokens; q and k rotated), calls step, and reads o [n][n_heads][head_dim].
 */
typedef struct llama_attention llama_attention;
struct llama_attention {
  float* q;
  float* k;
  float* v;
  float* o;
  /* Appends n tokens at `position`, which is the layer's length, and attends with the same tokens'
   * queries, each seeing itself and what is before it. Returns 0, or -1 with `error` set. */
  int (*step)(llama_attention* self, int layer, int position, int n);
  /* Forgets all tokens. Returns 0, or -1 with `error` set. */
  int (*reset)(llama_attention* self);
  void (*close)(llama_attention* self); /* and frees it */
  char error[ST_ERROR_BYTES];
  uint64_t step_ns; /* spent in step since the start */
};

/* Scratch memory of a forward pass. One thread at a time. */
typedef struct llama_scratch llama_scratch;
llama_scratch* llama_scratch_create(const llama_config* config); /* NULL: out of memory */
void llama_scratch_free(llama_scratch* scratch);

/* Runs tokens [n], 1 <= n <= LLAMA_MAX_CHUNK, the first at `position`. logits receives
 * [n_logits][vocabulary] of the last n_logits tokens. Returns 0, or -1 with the sentence in
 * attention->error. */
int llama_forward(const llama_model* model, llama_scratch* scratch, llama_attention* attention,
                  const int32_t* tokens, int n, int position, float* logits, int n_logits);

/* CLOCK_MONOTONIC in nanoseconds. */
uint64_t llama_now_ns(void);

#ifdef __cplusplus
}
#endif

#endif /* KVM_EXAMPLES_LLAMA_LLAMA_H_ */
