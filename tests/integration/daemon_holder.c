/* SPDX-License-Identifier: Apache-2.0 */
/* A client for the tests: registers a space, makes sequences with some tokens, saves the last one
 * under each name that it is given, prints "ready", and holds everything until its standard input
 * ends. */
#include <stdio.h>
#include <stdlib.h>

#include "kvm.h"

enum { kLayers = 2, kHeads = 2, kDim = 64, kTokens = 100, kSequences = 3 };

static void check(kvm_status status, const char* what) {
  if (status != KVM_OK) {
    fprintf(stderr, "%s: %s: %s\n", what, kvm_status_name(status), kvm_last_error());
    exit(1);
  }
}

int main(int n_arguments, char** arguments) {
  static float rows[kLayers * kTokens * kHeads * kDim];
  kvm_client* client = NULL;
  kvm_queue* queue = NULL;
  kvm_space_id space = 0;
  check(kvm_connect(NULL, &client), "connect");
  check(kvm_queue_create(client, NULL, &queue), "queue");
  kvm_space_params geometry = {.struct_size = sizeof geometry,
                               .name = "holder",
                               .n_layers = kLayers,
                               .n_q_heads = kHeads,
                               .head_dim_k = kDim};
  check(kvm_space_register(client, &geometry, &space), "space");
  kvm_seq_id seq = 0;
  for (int i = 0; i < kSequences; ++i) {
    check(kvm_seq_create(client, space, NULL, &seq), "sequence");
    kvm_item item = {.seq = seq, .append_position = KVM_POSITION_END, .n_append = kTokens};
    kvm_step_params step = {.struct_size = sizeof step,
                            .space = space,
                            .n_layers = kLayers,
                            .n_items = 1,
                            .items = &item,
                            .k = kvm_host_tensor(rows, sizeof rows, KVM_DTYPE_F32),
                            .v = kvm_host_tensor(rows, sizeof rows, KVM_DTYPE_F32)};
    check(kvm_append(queue, &step), "append");
  }
  for (int i = 1; i < n_arguments; ++i) {
    check(kvm_seq_save(client, seq, arguments[i], 0), "save");
  }
  puts("ready");
  fflush(stdout);
  while (getchar() != EOF) {
  }
  kvm_queue_destroy(queue);
  kvm_client_close(client);
  return 0;
}
