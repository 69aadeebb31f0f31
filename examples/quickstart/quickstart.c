// SPDX-License-Identifier: Apache-2.0
/* The smallest engine: two layers, eight tokens, one kvm_step per layer and token. Compares what
 * the service answers for the last token with attention computed here, and prints both.
 *
 *   quickstart            through the daemon at $KVM_SOCKET (or the default socket)
 *   quickstart --embedded with the engine in this process (linked against libkvm_embedded)
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvm.h"

enum { kLayers = 2, kQHeads = 4, kKvHeads = 2, kDim = 16, kTokens = 8 };

static void require(kvm_status status, const char* what) {
  if (status != KVM_OK) {
    fprintf(stderr, "quickstart: %s: %s (%s)\n", what, kvm_last_error(), kvm_status_name(status));
    exit(1);
  }
}

/* Random numbers in [-1, 1). */
static void fill(float* out, int n, unsigned* state) {
  for (int i = 0; i < n; ++i) {
    *state = *state * 1664525u + 1013904223u;
    out[i] = (float)(*state >> 8) / (float)(1u << 23) - 1.0f;
  }
}

/* Attention of one q head over the stored tokens of its kv head, in double precision. */
static void attend_here(const float* q, float k[kTokens][kKvHeads][kDim],
                        float v[kTokens][kKvHeads][kDim], int kv_head, double out[kDim]) {
  double sum = 0;
  memset(out, 0, kDim * sizeof(double));
  for (int t = 0; t < kTokens; ++t) {
    double dot = 0;
    for (int i = 0; i < kDim; ++i) {
      dot += (double)q[i] * k[t][kv_head][i];
    }
    const double weight = exp(dot / sqrt(kDim));
    sum += weight;
    for (int i = 0; i < kDim; ++i) {
      out[i] += weight * v[t][kv_head][i];
    }
  }
  for (int i = 0; i < kDim; ++i) {
    out[i] /= sum;
  }
}

int main(int argc, char** argv) {
  kvm_client* client = NULL;
  const int embedded = argc == 2 && strcmp(argv[1], "--embedded") == 0;
  if (argc > 1 && !embedded) {
    fprintf(stderr, "usage: quickstart [--embedded]; KVM_SOCKET names the daemon's socket\n");
    return 2;
  }
  if (embedded) {
    require(kvm_open_embedded(NULL, &client), "open");
  } else {
    require(kvm_connect(NULL, &client), "connect");
  }
  kvm_queue* queue = NULL;
  require(kvm_queue_create(client, NULL, &queue), "queue");

  kvm_space_params geometry;
  memset(&geometry, 0, sizeof(geometry));
  geometry.struct_size = sizeof(geometry);
  geometry.name = "quickstart";
  geometry.n_layers = kLayers;
  geometry.n_q_heads = kQHeads;
  geometry.n_kv_heads = kKvHeads;
  geometry.head_dim_k = kDim;
  geometry.codec = KVM_CODEC_F32;
  kvm_space_id space = 0;
  require(kvm_space_register(client, &geometry, &space), "space");
  kvm_seq_id seq = 0;
  require(kvm_seq_create(client, space, NULL, &seq), "sequence");

  /* These stand for what a model would compute: random numbers. Kept to check the last layer's
   * answer. */
  static float k[kTokens][kKvHeads][kDim];
  static float v[kTokens][kKvHeads][kDim];
  float q[kQHeads][kDim];
  float o[kQHeads][kDim];
  float lse[kQHeads];
  unsigned state = 1;
  for (int token = 0; token < kTokens; ++token) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      fill(&k[token][0][0], kKvHeads * kDim, &state);
      fill(&v[token][0][0], kKvHeads * kDim, &state);
      fill(&q[0][0], kQHeads * kDim, &state);
      kvm_item item;
      memset(&item, 0, sizeof(item));
      item.seq = seq;
      item.append_position = KVM_POSITION_END;
      item.n_append = 1;
      item.n_query = 1;
      item.query_position = KVM_POSITION_END;
      kvm_step_params step;
      memset(&step, 0, sizeof(step));
      step.struct_size = sizeof(step);
      step.space = space;
      step.layer_begin = layer;
      step.n_items = 1;
      step.items = &item;
      step.k = kvm_host_tensor(k[token], sizeof(k[token]), KVM_DTYPE_F32);
      step.v = kvm_host_tensor(v[token], sizeof(v[token]), KVM_DTYPE_F32);
      step.q = kvm_host_tensor(q, sizeof(q), KVM_DTYPE_F32);
      step.o = kvm_host_tensor(o, sizeof(o), KVM_DTYPE_F32);
      step.lse = kvm_host_tensor(lse, sizeof(lse), KVM_DTYPE_F32);
      require(kvm_step(queue, &step, NULL), "step");
    }
  }

  double worst = 0;
  for (int head = 0; head < kQHeads; ++head) {
    double expected[kDim];
    attend_here(q[head], k, v, head / (kQHeads / kKvHeads), expected);
    for (int i = 0; i < kDim; ++i) {
      worst = fmax(worst, fabs(expected[i] - o[head][i]));
    }
    printf("head %d: o[0] = %+.6f, computed here %+.6f, lse = %.6f\n", head, o[head][0],
           expected[0], lse[head]);
  }
  printf("largest difference: %.1e\n", worst);

  kvm_queue_destroy(queue);
  kvm_client_close(client);
  return worst < 1e-5 ? 0 : 1;
}
