/* SPDX-License-Identifier: Apache-2.0 */
/* The step of python_bench.py in C: a query of one token over 64 tokens in one layer. Built by it.
 * Usage: c_step SOCKET ("" for an engine in this process). Each line on standard input is a number
 * of steps; the answer is the nanoseconds of one, with buffers in host memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kvm.h"

#define CHECK(call)                                                  \
  do {                                                               \
    if ((call) != KVM_OK) {                                          \
      fprintf(stderr, "%s: %s\n", #call, kvm_last_error());          \
      exit(1);                                                       \
    }                                                                \
  } while (0)

enum { kTokens = 64, kQHeads = 4, kKvHeads = 2, kDim = 16 };

static double now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

int main(int argc, char **argv) {
  static float keys[kTokens * kKvHeads * kDim];
  static float q[kQHeads * kDim];
  static float o[kQHeads * kDim];
  kvm_client *client = NULL;
  kvm_queue *queue = NULL;
  kvm_space_id space = 0;
  kvm_seq_id seq = 0;
  if (argc > 1 && argv[1][0] != '\0') {
    kvm_connect_params params = {.struct_size = sizeof params, .socket_path = argv[1]};
    CHECK(kvm_connect(&params, &client));
  } else {
    kvm_embedded_params params = {.struct_size = sizeof params, .n_threads = 1};
    CHECK(kvm_open_embedded(&params, &client));
  }
  CHECK(kvm_queue_create(client, NULL, &queue));
  kvm_space_params geometry = {.struct_size = sizeof geometry, .name = "c_step", .n_layers = 1,
                               .n_q_heads = kQHeads, .n_kv_heads = kKvHeads, .head_dim_k = kDim,
                               .dtype = KVM_DTYPE_F32};
  CHECK(kvm_space_register(client, &geometry, &space));
  CHECK(kvm_seq_create(client, space, NULL, &seq));
  kvm_item item = {.seq = seq, .n_append = kTokens, .append_position = KVM_POSITION_END,
                   .query_position = KVM_POSITION_END};
  kvm_step_params step = {.struct_size = sizeof step, .space = space, .n_items = 1, .items = &item};
  step.k = step.v = kvm_host_tensor(keys, sizeof keys, KVM_DTYPE_F32);
  CHECK(kvm_append(queue, &step));
  memset(&step.k, 0, sizeof step.k);
  memset(&step.v, 0, sizeof step.v);
  item.n_append = 0;
  item.n_query = 1;
  step.q = kvm_host_tensor(q, sizeof q, KVM_DTYPE_F32);
  step.o = kvm_host_tensor(o, sizeof o, KVM_DTYPE_F32);
  long n = 0;
  while (scanf("%ld", &n) == 1) {
    const double begin = now_ns();
    for (long i = 0; i < n; ++i) {
      kvm_step_stats stats = {.struct_size = sizeof stats};
      CHECK(kvm_attend(queue, &step, &stats));
    }
    printf("%.1f\n", (now_ns() - begin) / (double)n);
    fflush(stdout);
  }
  kvm_client_close(client);
  return 0;
}
