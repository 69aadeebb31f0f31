// SPDX-License-Identifier: Apache-2.0
/* Approximate attention: one long sequence, one query, and each mode's answer beside attention in
 * double precision. Layer 0 has sketches of its keys, layer 1 the hash tables of MagicPIG; both
 * hold the same keys and values. docs/approximate_attention.md explains what is printed.
 *
 *   approximate            through the daemon at $KVM_SOCKET (or the default socket)
 *   approximate --embedded with the engine in this process (linked against libkvm_embedded)
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvm.h"

enum { kLayers = 2, kQHeads = 8, kKvHeads = 2, kGroup = kQHeads / kKvHeads, kDim = 128 };
enum { kTokens = 32768, kChunk = 4096 };

typedef uint16_t bf16;

/* An engine asks for this. */
typedef struct request {
  const char* name;
  uint32_t layer;
  uint32_t mode;     /* KVM_MODE_* */
  uint64_t budget;   /* keys for each row; of AUTO nanoseconds */
  float eps;         /* relative error aimed at */
  float delta;       /* probability that the error is larger than err says */
  double most_error; /* of any head: a larger one fails the example. Twice eps is far out */
} request;

typedef struct answer {
  float o[kQHeads][kDim];
  float lse[kQHeads];
  float err[kQHeads][2]; /* estimated: relative of o, absolute of lse */
  kvm_step_stats stats;
} answer;

static bf16 k[kTokens][kKvHeads][kDim];
static bf16 v[kTokens][kKvHeads][kDim];
static float q[kQHeads][kDim];

static void require(kvm_status status, const char* what) {
  if (status != KVM_OK) {
    fprintf(stderr, "approximate: %s: %s (%s)\n", what, kvm_last_error(), kvm_status_name(status));
    exit(1);
  }
}

/* About normal: three uniform numbers. */
static double deviate(uint64_t* state) {
  double sum = 0;
  for (int i = 0; i < 3; ++i) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    sum += (double)(*state >> 40) / (double)(1 << 23) - 1.0;
  }
  return sum;
}

static bf16 to_bf16(double x) {
  const float single = (float)x;
  uint32_t bits;
  memcpy(&bits, &single, sizeof(bits));
  return (bf16)((bits + 0x8000u) >> 16);
}

static double from_bf16(bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float single;
  memcpy(&single, &bits, sizeof(single));
  return single;
}

/* Stands for what a model would compute. As there, a few directions carry most of what queries and
 * keys have in common, and values have a part that all share: in noise there is nothing to find. */
static void make_data(void) {
  uint64_t state = 1;
  double spread[kDim];
  for (int i = 0; i < kDim; ++i) {
    spread[i] = 4.7 / sqrt(i + 1.0);
  }
  for (int t = 0; t < kTokens; ++t) {
    for (int h = 0; h < kKvHeads; ++h) {
      for (int i = 0; i < kDim; ++i) {
        k[t][h][i] = to_bf16(spread[i] * deviate(&state));
        v[t][h][i] = to_bf16(0.5 + 0.5 * deviate(&state));
      }
    }
  }
  for (int h = 0; h < kQHeads; ++h) {
    for (int i = 0; i < kDim; ++i) {
      q[h][i] = (float)from_bf16(to_bf16(spread[i] * deviate(&state)));
    }
  }
}

/* Attention of one q head in double precision. */
static void attend_here(int head, double out[kDim]) {
  static double logit[kTokens];
  const int kv_head = head / kGroup;
  double largest = -INFINITY;
  for (int t = 0; t < kTokens; ++t) {
    double dot = 0;
    for (int i = 0; i < kDim; ++i) {
      dot += (double)q[head][i] * from_bf16(k[t][kv_head][i]);
    }
    logit[t] = dot / sqrt(kDim);
    largest = fmax(largest, logit[t]);
  }
  double sum = 0;
  memset(out, 0, kDim * sizeof(double));
  for (int t = 0; t < kTokens; ++t) {
    const double weight = exp(logit[t] - largest);
    sum += weight;
    for (int i = 0; i < kDim; ++i) {
      out[i] += weight * from_bf16(v[t][kv_head][i]);
    }
  }
  for (int i = 0; i < kDim; ++i) {
    out[i] /= sum;
  }
}

static kvm_space_id make_space(kvm_client* client) {
  kvm_index_params index[kLayers];
  memset(index, 0, sizeof(index));
  index[0].layer_begin = 0;
  index[0].n_layers = 1;
  index[0].kind = KVM_INDEX_SKETCH;
  index[1].layer_begin = 1;
  index[1].n_layers = 1;
  index[1].kind = KVM_INDEX_LSH; /* 150 tables of 10 bits, unless other numbers are given */

  kvm_space_params geometry;
  memset(&geometry, 0, sizeof(geometry));
  geometry.struct_size = sizeof(geometry);
  geometry.name = "approximate";
  geometry.n_layers = kLayers;
  geometry.n_q_heads = kQHeads;
  geometry.n_kv_heads = kKvHeads;
  geometry.head_dim_k = kDim;
  geometry.codec = KVM_CODEC_BF16;
  geometry.n_indexes = kLayers;
  geometry.indexes = index;
  kvm_space_id space = 0;
  require(kvm_space_register(client, &geometry, &space), "space");
  return space;
}

static kvm_step_params make_step(kvm_space_id space, uint32_t layer, const kvm_item* item) {
  kvm_step_params step;
  memset(&step, 0, sizeof(step));
  step.struct_size = sizeof(step);
  step.space = space;
  step.layer_begin = layer;
  step.n_items = 1;
  step.items = item;
  return step;
}

static void append_all(kvm_queue* queue, kvm_space_id space, kvm_seq_id seq) {
  for (int begin = 0; begin < kTokens; begin += kChunk) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      kvm_item item;
      memset(&item, 0, sizeof(item));
      item.seq = seq;
      item.append_position = KVM_POSITION_END;
      item.n_append = kChunk;
      kvm_step_params step = make_step(space, layer, &item);
      step.k = kvm_host_tensor(k[begin], kChunk * sizeof(k[0]), KVM_DTYPE_BF16);
      step.v = kvm_host_tensor(v[begin], kChunk * sizeof(v[0]), KVM_DTYPE_BF16);
      require(kvm_append(queue, &step), "append");
    }
  }
}

static void attend(kvm_queue* queue, kvm_space_id space, kvm_seq_id seq, const request* r,
                   answer* out) {
  kvm_item item;
  memset(&item, 0, sizeof(item));
  item.seq = seq;
  item.n_query = 1;
  item.query_position = KVM_POSITION_END;
  kvm_step_params step = make_step(space, r->layer, &item);
  step.mode = r->mode;
  step.budget = r->budget;
  step.eps = r->eps;
  step.delta = r->delta;
  step.seed = 1;
  step.q = kvm_host_tensor(q, sizeof(q), KVM_DTYPE_F32);
  step.o = kvm_host_tensor(out->o, sizeof(out->o), KVM_DTYPE_F32);
  step.lse = kvm_host_tensor(out->lse, sizeof(out->lse), KVM_DTYPE_F32);
  step.err = kvm_host_tensor(out->err, sizeof(out->err), KVM_DTYPE_F32);
  memset(&out->stats, 0, sizeof(out->stats));
  out->stats.struct_size = sizeof(out->stats);
  require(kvm_attend(queue, &step, &out->stats), r->name);
}

static const char* mode_name(uint32_t mode) {
  static const char* const names[] = {"default", "exact", "topk", "sampled", "verified", "auto"};
  return mode < sizeof(names) / sizeof(names[0]) ? names[mode] : "?";
}

/* Bytes of the sequence's indexes, for each token and kv head of a layer. */
static double index_bytes(kvm_client* client, kvm_seq_id seq) {
  kvm_seq_info info;
  memset(&info, 0, sizeof(info));
  info.struct_size = sizeof(info);
  require(kvm_seq_get_info(client, seq, &info), "info");
  return (double)info.bytes_index / kTokens / kKvHeads;
}

/* Prints a line, and says whether the answer is as near as it should be. */
static int report(const request* r, const answer* a, double expected[kQHeads][kDim]) {
  double mean = 0, worst = 0, estimate = 0;
  int over = 0; /* heads whose error is larger than was estimated */
  for (int h = 0; h < kQHeads; ++h) {
    double difference = 0, norm = 0;
    for (int i = 0; i < kDim; ++i) {
      const double d = a->o[h][i] - expected[h][i];
      difference += d * d;
      norm += expected[h][i] * expected[h][i];
    }
    const double error = sqrt(difference / norm);
    mean += error / kQHeads;
    worst = fmax(worst, error);
    estimate += a->err[h][0] / kQHeads; /* NaN where there is none */
    over += error > a->err[h][0];
  }
  char bar[16] = "-", beyond[16] = "-";
  if (a->stats.mode != KVM_MODE_EXACT && !isnan(estimate)) {
    snprintf(bar, sizeof(bar), "%.2f %%", 100 * estimate);
    snprintf(beyond, sizeof(beyond), "%d of %d", over, kQHeads);
  }
  printf("%-17s %-9s %6.2f %% %6.2f %% %9s %7s %6.2f %% %6.2f MB %6.0f us\n", r->name,
         mode_name(a->stats.mode), 100 * mean, 100 * worst, bar, beyond,
         100.0 * (double)a->stats.keys_read / (double)a->stats.keys_present,
         (double)a->stats.bytes_read / 1e6, (double)a->stats.compute_ns / 1e3);
  /* This is promised for certain: a verified answer reports at most eps. */
  const int kept = a->stats.mode != KVM_MODE_VERIFIED || a->stats.err_max <= r->eps;
  return kept && worst <= r->most_error;
}

int main(int argc, char** argv) {
  kvm_client* client = NULL;
  const int embedded = argc == 2 && strcmp(argv[1], "--embedded") == 0;
  if (argc > 1 && !embedded) {
    fprintf(stderr, "usage: approximate [--embedded]; KVM_SOCKET names the daemon's socket\n");
    return 2;
  }
  if (embedded) {
    require(kvm_open_embedded(NULL, &client), "open");
  } else {
    require(kvm_connect(NULL, &client), "connect");
  }
  kvm_queue* queue = NULL;
  require(kvm_queue_create(client, NULL, &queue), "queue");
  const kvm_space_id space = make_space(client);
  kvm_seq_id seq = 0;
  require(kvm_seq_create(client, space, NULL, &seq), "sequence");

  make_data();
  append_all(queue, space, seq);
  static double expected[kQHeads][kDim];
  for (int h = 0; h < kQHeads; ++h) {
    attend_here(h, expected[h]);
  }

  static answer a;
  double bytes = 0;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    /* The first request that needs an index builds it. */
    const request first = {"index", layer, KVM_MODE_SAMPLED, 64, 0, 0, 0};
    attend(queue, space, seq, &first, &a);
    printf("layer %u: an index of %.1f bytes for each key and value, made in %.0f ms\n", layer,
           index_bytes(client, seq) - bytes, (double)a.stats.service_ns / 1e6);
    bytes = index_bytes(client, seq);
  }

  static const request all[] = {
      {"exact", 0, KVM_MODE_EXACT, 0, 0, 0, 4e-3},
      {"topk, 1 %", 0, KVM_MODE_TOPK, kTokens / 100, 0, 0, 1},
      {"sampled, 1 %", 0, KVM_MODE_SAMPLED, kTokens / 100, 0, 0, 0.3},
      {"sampled, eps .03", 0, KVM_MODE_SAMPLED, 0, 0.03f, 0.1f, 0.09},
      {"verified, eps .03", 0, KVM_MODE_VERIFIED, 0, 0.03f, 0.1f, 0.06},
      {"verified, eps .10", 0, KVM_MODE_VERIFIED, 0, 0.1f, 0.1f, 0.2},
      {"magicpig", 1, KVM_MODE_SAMPLED, 0, 0, 0, 1},
      {"auto, eps .03", 0, KVM_MODE_AUTO, 0, 0.03f, 0.1f, 0.06},
      {"auto, 250 us", 0, KVM_MODE_AUTO, 250000, 0, 0, 1},
  };
  const size_t n = sizeof(all) / sizeof(all[0]);
  printf("\n%-17s %-9s %8s %8s %9s %7s %8s %9s %9s\n", "asked for", "used", "error", "worst",
         "estimate", "over", "keys", "bytes", "time");
  int failed = 0;
  for (size_t i = 0; i < n; ++i) {
    attend(queue, space, seq, &all[i], &a);
    failed += !report(&all[i], &a, expected);
  }
  if (failed != 0) {
    printf("answers that are further off than they should be: %d\n", failed);
  }

  require(kvm_seq_free(client, seq), "free");
  kvm_queue_destroy(queue);
  kvm_client_close(client);
  return failed == 0 ? 0 : 1;
}
