/* SPDX-License-Identifier: Apache-2.0 */
/* A client for the tests: one sequence with an index, then approximate attends of every mode. It
 * prints what each did, "MODE_ASKED MODE_DONE N_EXACT ERR_MAX", then "ready", and holds everything
 * until its standard input ends. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "kvm.h"

enum { kHeads = 2, kDim = 64, kTokens = 6000 };

static void check(kvm_status status, const char* what) {
  if (status != KVM_OK) {
    fprintf(stderr, "%s: %s: %s\n", what, kvm_status_name(status), kvm_last_error());
    exit(1);
  }
}

/* About normal, with the variance of `scale` squared. */
static float noise(float scale) {
  static uint64_t state = 1;
  int sum = 0;
  for (int i = 0; i < 4; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    sum += (int)(state >> 56);
  }
  return scale * (float)(sum - 510) / 148.0f;
}

static kvm_queue* queue;
static kvm_space_id space;
static kvm_seq_id seq;

static void append(void) {
  const size_t n = (size_t)kTokens * kHeads * kDim;
  float* k = malloc(n * sizeof *k);
  float* v = malloc(n * sizeof *v);
  if (k == NULL || v == NULL) {
    exit(1);
  }
  for (size_t i = 0; i < n; ++i) {
    k[i] = noise(2.0f);
    v[i] = noise(1.0f) + 1.0f;
  }
  kvm_item item = {.seq = seq, .append_position = KVM_POSITION_END, .n_append = kTokens};
  kvm_step_params step = {.struct_size = sizeof step,
                          .space = space,
                          .n_items = 1,
                          .items = &item,
                          .k = kvm_host_tensor(k, n * sizeof *k, KVM_DTYPE_F32),
                          .v = kvm_host_tensor(v, n * sizeof *v, KVM_DTYPE_F32)};
  check(kvm_append(queue, &step), "append");
  free(k);
  free(v);
}

static void attend(uint32_t mode, uint64_t budget, float eps, uint64_t seed) {
  float q[kHeads * kDim];
  float o[kHeads * kDim];
  for (int i = 0; i < kHeads * kDim; ++i) {
    q[i] = noise(1.0f);
  }
  kvm_item item = {.seq = seq, .n_query = 1, .query_position = KVM_POSITION_END};
  kvm_step_params step = {.struct_size = sizeof step,
                          .space = space,
                          .n_items = 1,
                          .items = &item,
                          .mode = mode,
                          .budget = budget,
                          .eps = eps,
                          .seed = seed,
                          .q = kvm_host_tensor(q, sizeof q, KVM_DTYPE_F32),
                          .o = kvm_host_tensor(o, sizeof o, KVM_DTYPE_F32)};
  kvm_step_stats stats = {.struct_size = sizeof stats};
  check(kvm_attend(queue, &step, &stats), "attend");
  printf("%u %u %u %g\n", mode, stats.mode, stats.n_exact, (double)stats.err_max);
}

int main(void) {
  kvm_client* client = NULL;
  check(kvm_connect(NULL, &client), "connect");
  check(kvm_queue_create(client, NULL, &queue), "queue");
  kvm_index_params index = {.kind = KVM_INDEX_SKETCH, .min_tokens = 512};
  kvm_space_params geometry = {.struct_size = sizeof geometry,
                               .name = "attender",
                               .n_layers = 1,
                               .n_q_heads = kHeads,
                               .head_dim_k = kDim,
                               .n_indexes = 1,
                               .indexes = &index};
  check(kvm_space_register(client, &geometry, &space), "space");
  check(kvm_seq_create(client, space, NULL, &seq), "sequence");
  append();
  for (uint64_t seed = 0; seed < 3; ++seed) {
    attend(KVM_MODE_EXACT, 0, 0, seed);
    attend(KVM_MODE_TOPK, 200, 0, seed);
    attend(KVM_MODE_SAMPLED, 200, 0, seed);
    attend(KVM_MODE_AUTO, 0, 0.2f, seed);
    attend(KVM_MODE_AUTO, 60000, 0, seed);
  }
  puts("ready");
  fflush(stdout);
  while (getchar() != EOF) {
  }
  kvm_queue_destroy(queue);
  kvm_client_close(client);
  return 0;
}
