/* SPDX-License-Identifier: Apache-2.0 */
/* A client for the tests.
 *
 *   snapshot_keeper save NAME SEED TOKENS ...    appends so many random tokens to a new sequence
 *                                                (SEED is "-": to the one before) and saves it
 *   snapshot_keeper read NAME                    loads it and writes its keys and values to the
 *                                                standard output
 *   snapshot_keeper publish SEED TOKENS ...      publishes prefixes of so many random tokens */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvm.h"

enum { kLayers = 2, kHeads = 2, kDim = 64, kMostTokens = 8192, kRow = kHeads * kDim };

static kvm_client* client;
static kvm_queue* queue;
static kvm_space_id space;
static uint64_t state;
static float k_rows[kMostTokens * kRow];
static float v_rows[kMostTokens * kRow];

static void check(kvm_status status, const char* what) {
  if (status != KVM_OK) {
    fprintf(stderr, "%s: %s: %s\n", what, kvm_status_name(status), kvm_last_error());
    exit(1);
  }
}

static void fill(float* rows, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    rows[i] = (float)(state >> 40) / (float)(1 << 23) - 1;
  }
}

static void append(kvm_seq_id seq, uint32_t n_tokens) {
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    fill(k_rows, (size_t)n_tokens * kRow);
    fill(v_rows, (size_t)n_tokens * kRow);
    kvm_item item = {.seq = seq, .append_position = KVM_POSITION_END, .n_append = n_tokens};
    kvm_step_params step = {.struct_size = sizeof step,
                            .space = space,
                            .layer_begin = layer,
                            .n_items = 1,
                            .items = &item,
                            .k = kvm_host_tensor(k_rows, sizeof k_rows, KVM_DTYPE_F32),
                            .v = kvm_host_tensor(v_rows, sizeof v_rows, KVM_DTYPE_F32)};
    check(kvm_append(queue, &step), "append");
  }
}

static uint32_t tokens_of(const char* text) {
  const long n = strtol(text, NULL, 10);
  if (n <= 0 || n > kMostTokens) {
    fprintf(stderr, "tokens: 1 to %d\n", kMostTokens);
    exit(2);
  }
  return (uint32_t)n;
}

static void save(int n, char** arguments) {
  kvm_seq_id seq = 0;
  for (int i = 0; i + 2 < n; i += 3) {
    if (strcmp(arguments[i + 1], "-") != 0) {
      state = strtoull(arguments[i + 1], NULL, 10);
      check(kvm_seq_create(client, space, NULL, &seq), "sequence");
    }
    append(seq, tokens_of(arguments[i + 2]));
    check(kvm_seq_save(client, seq, arguments[i], 0), "save");
  }
}

static void publish(int n, char** arguments) {
  static uint32_t tokens[kMostTokens];
  static kvm_prefix_hash hashes[kMostTokens / KVM_PREFIX_TOKENS];
  kvm_prefix_hash begin;
  check(kvm_prefix_seed(client, space, NULL, 0, &begin), "seed");
  for (int i = 0; i + 1 < n; i += 2) {
    state = strtoull(arguments[i], NULL, 10);
    const uint32_t n_tokens = tokens_of(arguments[i + 1]);
    for (uint32_t t = 0; t < n_tokens; ++t) {
      tokens[t] = (uint32_t)state + t;
    }
    check(kvm_prefix_hashes(&begin, tokens, n_tokens, hashes), "hashes");
    kvm_seq_id seq = 0;
    check(kvm_seq_create(client, space, NULL, &seq), "sequence");
    append(seq, n_tokens);
    check(kvm_prefix_publish(client, seq, hashes, n_tokens / KVM_PREFIX_TOKENS, 0), "publish");
  }
}

static void read_back(const char* name) {
  kvm_seq_id seq = 0;
  check(kvm_seq_load(client, space, name, &seq), "load");
  kvm_seq_info info = {.struct_size = sizeof info};
  check(kvm_seq_get_info(client, seq, &info), "info");
  if (info.n_tokens_max > kMostTokens) {
    exit(2);
  }
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    kvm_read_params params = {.struct_size = sizeof params,
                              .seq = seq,
                              .layer = layer,
                              .n_tokens = info.n_tokens_max,
                              .k = kvm_host_tensor(k_rows, sizeof k_rows, KVM_DTYPE_F32),
                              .v = kvm_host_tensor(v_rows, sizeof v_rows, KVM_DTYPE_F32)};
    check(kvm_read(queue, &params), "read");
    fwrite(k_rows, sizeof(float) * kRow, info.n_tokens_max, stdout);
    fwrite(v_rows, sizeof(float) * kRow, info.n_tokens_max, stdout);
  }
  if (fflush(stdout) != 0) {
    exit(1);
  }
}

int main(int n_arguments, char** arguments) {
  kvm_space_params geometry = {.struct_size = sizeof geometry,
                               .name = "keeper",
                               .n_layers = kLayers,
                               .n_q_heads = kHeads,
                               .head_dim_k = kDim};
  check(kvm_connect(NULL, &client), "connect");
  check(kvm_queue_create(client, NULL, &queue), "queue");
  check(kvm_space_register(client, &geometry, &space), "space");
  if (n_arguments >= 5 && strcmp(arguments[1], "save") == 0) {
    save(n_arguments - 2, arguments + 2);
  } else if (n_arguments == 3 && strcmp(arguments[1], "read") == 0) {
    read_back(arguments[2]);
  } else if (n_arguments >= 4 && strcmp(arguments[1], "publish") == 0) {
    publish(n_arguments - 2, arguments + 2);
  } else {
    fprintf(stderr,
            "usage: snapshot_keeper save NAME SEED TOKENS ... | read NAME | publish SEED TOKENS "
            "...\n");
    return 2;
  }
  kvm_queue_destroy(queue);
  kvm_client_close(client);
  return 0;
}
