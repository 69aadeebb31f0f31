/* SPDX-License-Identifier: Apache-2.0 */
/* MiKV on a GPU ("No Token Left Behind", arXiv 2402.18096): tokens that get much attention, and the
 * newest ones, are kept in bf16, all others in 4 bits. Made of two sequences and a merge:
 *
 *   exact   bf16, SINKS_RECENT: rows [0, kHeavy) are the heavy tokens, which for kvm are sinks; the
 *           rest is a window of the newest tokens. Each kv head has heavy tokens of its own: row j
 *           of head h is whatever token the engine puts there, for attention has no order, and keys
 *           carry their positions.
 *   codes   int4: every token that has left the window, at its own position. A log-weight of
 *           -infinity hides the heavy ones of a head, which the other sequence has.
 *
 * With each update a token leaves the window of `exact`. It is read in front of the update, of all
 * layers, and appended to `codes` behind it. Both attend, and kvm_cuda_merge makes one answer of
 * the two. What follows the updates has fixed addresses, and may be a CUDA graph.
 *
 * Which tokens are heavy is the engine's to say. Here it is those of the prompt with the largest
 * attention mass over its last queries, as SnapKV and MiKV take it.
 *
 * Compares with exact attention, with attention to codes alone, and with heavy and recent tokens
 * alone (what H2O keeps). Exit status: 0 when the merge sees each token once and is nearest, 1 when
 * not, 77 where there is no GPU.
 */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvm_cuda.h"

enum {
  kLayers = 2,
  kQHeads = 4,
  kKvHeads = 2,
  kGroup = kQHeads / kKvHeads,
  kDim = 64,
  kHeavy = 64,
  kRecent = 64,
  kPrompt = 768,
  kSteps = 66, /* the window leaves a page behind */
  kTokens = kPrompt + kSteps,
  kJudges = 16 /* the prompt's last queries, which say what is heavy */
};
enum { kOld = kPrompt - kRecent }; /* tokens of the prompt that are heavy or codes */
enum { kRow = kKvHeads * kDim, kQRow = kQHeads * kDim };

typedef uint16_t bf16;

/* What a model would compute: here all of it is made beforehand. */
static bf16 k[kLayers][kTokens][kKvHeads][kDim];
static bf16 v[kLayers][kTokens][kKvHeads][kDim];
static bf16 q[kLayers][kTokens][kQHeads][kDim]; /* of the tokens from kPrompt - kJudges on */
static int heavy[kLayers][kKvHeads][kHeavy];
static char is_heavy[kLayers][kKvHeads][kTokens];

static void require(kvm_status status, const char* what) {
  if (status != KVM_OK) {
    fprintf(stderr, "cuda_mikv: %s: %s (%s)\n", what, kvm_last_error(), kvm_status_name(status));
    exit(1);
  }
}

static void cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    fprintf(stderr, "cuda_mikv: %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
  }
}

static void* device_memory(size_t size) {
  void* memory = NULL;
  cuda(cudaMalloc(&memory, size), "cudaMalloc");
  return memory;
}

/* --- Numbers ---------------------------------------------------------------------------------- */

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

/* About normal: three uniform numbers. */
static double deviate(uint64_t* state) {
  double sum = 0;
  for (int i = 0; i < 3; ++i) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    sum += (double)(*state >> 40) / (double)(1 << 23) - 1.0;
  }
  return sum;
}

/* Queries of a head have a direction in common. Every sixteenth key has much of it, other ones in
 * each head: these are the tokens that most queries ask. */
static void make_data(void) {
  uint64_t state = 1;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int h = 0; h < kKvHeads; ++h) {
      double direction[kDim];
      for (int i = 0; i < kDim; ++i) {
        direction[i] = deviate(&state);
      }
      for (int t = 0; t < kTokens; ++t) {
        const double share = (t + 5 * h + layer) % 16 == 0 ? 0.6 : 0;
        for (int i = 0; i < kDim; ++i) {
          k[layer][t][h][i] = to_bf16(share * direction[i] + deviate(&state));
          v[layer][t][h][i] = to_bf16(deviate(&state));
          for (int g = 0; g < kGroup; ++g) {
            q[layer][t][h * kGroup + g][i] = to_bf16(0.8 * direction[i] + deviate(&state));
          }
        }
      }
    }
  }
}

/* What of the tokens that are not among the newest is exact. */
typedef enum Kept { kAll, kNone, kHeavyOnly, kHeavyAlone } Kept; /* the last: others are not seen */

static float codes_k[kLayers][kTokens][kKvHeads][kDim]; /* what the codes stand for */
static float codes_v[kLayers][kTokens][kKvHeads][kDim];

/* Attention in double precision of a q head of token `at` to it and all before it. mass: of each
 * token, added up; may be NULL. */
static void attend_here(int layer, int head, int at, Kept kept, double out[kDim], double* mass) {
  static double weight[kTokens];
  const int kv = head / kGroup;
  double largest = -INFINITY, sum = 0;
  memset(out, 0, kDim * sizeof(double));
  for (int t = 0; t <= at; ++t) {
    const int is_exact =
        kept == kAll || t > at - kRecent || (kept != kNone && is_heavy[layer][kv][t]);
    weight[t] = is_exact || kept != kHeavyAlone ? 0 : -INFINITY;
    for (int i = 0; i < kDim; ++i) {
      weight[t] += from_bf16(q[layer][at][head][i]) / sqrt(kDim) *
                   (is_exact ? from_bf16(k[layer][t][kv][i]) : (double)codes_k[layer][t][kv][i]);
    }
    largest = fmax(largest, weight[t]);
  }
  for (int t = 0; t <= at; ++t) {
    const int is_exact =
        kept == kAll || t > at - kRecent || (kept != kNone && is_heavy[layer][kv][t]);
    weight[t] = exp(weight[t] - largest);
    sum += weight[t];
    for (int i = 0; i < kDim; ++i) {
      out[i] +=
          weight[t] * (is_exact ? from_bf16(v[layer][t][kv][i]) : (double)codes_v[layer][t][kv][i]);
    }
  }
  for (int i = 0; i < kDim; ++i) {
    out[i] /= sum;
  }
  for (int t = 0; mass != NULL && t <= at; ++t) {
    mass[t] += weight[t] / sum;
  }
}

/* The tokens of the prompt with the largest mass, of each kv head. In an engine, a kernel. */
static void choose_heavy(void) {
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int h = 0; h < kKvHeads; ++h) {
      static double mass[kTokens];
      memset(mass, 0, sizeof(mass));
      for (int at = kPrompt - kJudges; at < kPrompt; ++at) {
        for (int g = 0; g < kGroup; ++g) {
          double unused[kDim];
          attend_here(layer, h * kGroup + g, at, kAll, unused, mass);
        }
      }
      for (int n = 0; n < kHeavy; ++n) {
        int best = 0;
        for (int t = 1; t < kOld; ++t) {
          best = mass[t] > mass[best] ? t : best;
        }
        mass[best] = -1;
        heavy[layer][h][n] = best;
        is_heavy[layer][h][best] = 1;
      }
    }
  }
}

/* --- The GPU ---------------------------------------------------------------------------------- */

/* One of the two sequences, and what it answers. */
typedef struct Part {
  kvm_cuda_batch* batch;
  kvm_seq_id seq;
  void *o, *lse;
} Part;

typedef struct Gpu {
  kvm_client* client;
  cudaStream_t stream;
  Part exact, codes;
  void *k, *v, *q;                         /* rows of a step */
  void *left_k[kLayers], *left_v[kLayers]; /* of the token that leaves the window */
  void* o;                                 /* the answer */
  float* log_weights[kLayers];             /* [kv head][token] of `codes` */
} Gpu;

static Part make_part(kvm_client* client, const char* name, uint32_t codec,
                      const kvm_policy_params* policy, kvm_cuda_batch_params sizes) {
  Part part;
  memset(&part, 0, sizeof(part));
  kvm_space_params geometry;
  memset(&geometry, 0, sizeof(geometry));
  geometry.struct_size = sizeof(geometry);
  geometry.name = name;
  geometry.n_layers = kLayers;
  geometry.n_q_heads = kQHeads;
  geometry.n_kv_heads = kKvHeads;
  geometry.head_dim_k = kDim;
  geometry.codec = codec;
  geometry.policies = policy;
  geometry.n_policies = policy != NULL;
  sizes.struct_size = sizeof(sizes);
  sizes.max_items = 1;
  sizes.max_append = kTokens;
  sizes.max_tokens = kTokens;
  require(kvm_space_register(client, &geometry, &sizes.space), name);
  require(kvm_cuda_batch_create(client, &sizes, &part.batch), "batch");
  require(kvm_seq_create(client, sizes.space, NULL, &part.seq), "sequence");
  part.o = device_memory(kQRow * 4);
  part.lse = device_memory(kQHeads * 4);
  return part;
}

static Gpu open_gpu(kvm_client* client) {
  Gpu gpu;
  memset(&gpu, 0, sizeof(gpu));
  gpu.client = client;
  kvm_policy_params policy;
  memset(&policy, 0, sizeof(policy));
  policy.retention = KVM_RETAIN_SINKS_RECENT;
  policy.n_sinks = kHeavy;
  policy.n_recent = kRecent;
  kvm_cuda_batch_params sizes;
  memset(&sizes, 0, sizeof(sizes));
  gpu.exact = make_part(client, "cuda_mikv.exact", KVM_CODEC_BF16, &policy, sizes);
  sizes.log_weight_stride_item = kKvHeads * kTokens;
  sizes.log_weight_stride_head = kTokens;
  gpu.codes = make_part(client, "cuda_mikv.codes", KVM_CODEC_I4, NULL, sizes);
  cuda(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking), "stream");
  gpu.k = device_memory(sizeof(k[0]));
  gpu.v = device_memory(sizeof(v[0]));
  gpu.q = device_memory(kQRow * 2);
  gpu.o = device_memory(kQRow * 4);
  for (int layer = 0; layer < kLayers; ++layer) {
    static float weights[kKvHeads][kTokens];
    for (int h = 0; h < kKvHeads; ++h) {
      for (int t = 0; t < kTokens; ++t) {
        weights[h][t] = is_heavy[layer][h][t] ? -INFINITY : 0;
      }
    }
    gpu.left_k[layer] = device_memory(kRow * 2);
    gpu.left_v[layer] = device_memory(kRow * 2);
    gpu.log_weights[layer] = device_memory(sizeof(weights));
    cuda(cudaMemcpyAsync(gpu.log_weights[layer], weights, sizeof(weights), cudaMemcpyHostToDevice,
                         gpu.stream),
         "log weights");
    cuda(cudaStreamSynchronize(gpu.stream), "log weights");
  }
  return gpu;
}

static void close_gpu(Gpu* gpu) {
  void* const all[] = {gpu->k,       gpu->v,         gpu->q,       gpu->o,
                       gpu->exact.o, gpu->exact.lse, gpu->codes.o, gpu->codes.lse};
  for (int i = 0; i < 8; ++i) {
    cuda(cudaFree(all[i]), "cudaFree");
  }
  for (int layer = 0; layer < kLayers; ++layer) {
    cuda(cudaFree(gpu->left_k[layer]), "cudaFree");
    cuda(cudaFree(gpu->left_v[layer]), "cudaFree");
    cuda(cudaFree(gpu->log_weights[layer]), "cudaFree");
  }
  kvm_cuda_batch_destroy(gpu->exact.batch);
  kvm_cuda_batch_destroy(gpu->codes.batch);
  cuda(cudaStreamDestroy(gpu->stream), "stream");
}

static void update(const Gpu* gpu, const Part* part, uint32_t n_append, uint32_t n_query) {
  kvm_cuda_item item;
  memset(&item, 0, sizeof(item));
  item.seq = part->seq;
  item.n_append = n_append;
  item.n_query = n_query;
  require(kvm_cuda_update(part->batch, &item, 1, gpu->stream), "update");
}

static void append(const Gpu* gpu, const Part* part, uint32_t layer, void* rows_k, void* rows_v,
                   size_t n) {
  const kvm_tensor new_k = kvm_device_tensor(rows_k, n * kRow * 2, KVM_DTYPE_BF16);
  const kvm_tensor new_v = kvm_device_tensor(rows_v, n * kRow * 2, KVM_DTYPE_BF16);
  require(kvm_cuda_append(part->batch, layer, &new_k, &new_v, gpu->stream), "append");
}

static void upload(const Gpu* gpu, const bf16* rows_k, const bf16* rows_v, size_t n) {
  cuda(cudaMemcpyAsync(gpu->k, rows_k, n * kRow * 2, cudaMemcpyHostToDevice, gpu->stream), "k");
  cuda(cudaMemcpyAsync(gpu->v, rows_v, n * kRow * 2, cudaMemcpyHostToDevice, gpu->stream), "v");
}

/* The prompt: its old tokens as codes, heavy ones among them; these and the newest ones in bf16. */
static void divide_prompt(const Gpu* gpu) {
  update(gpu, &gpu->codes, kOld, 0);
  update(gpu, &gpu->exact, kHeavy + kRecent, 0);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    upload(gpu, k[layer][0][0], v[layer][0][0], kOld);
    append(gpu, &gpu->codes, layer, gpu->k, gpu->v, kOld);
    static bf16 rows_k[kHeavy + kRecent][kKvHeads][kDim], rows_v[kHeavy + kRecent][kKvHeads][kDim];
    for (int row = 0; row < kHeavy + kRecent; ++row) {
      for (int h = 0; h < kKvHeads; ++h) {
        const int t = row < kHeavy ? heavy[layer][h][row] : kOld + row - kHeavy;
        memcpy(rows_k[row][h], k[layer][t][h], sizeof(rows_k[row][h]));
        memcpy(rows_v[row][h], v[layer][t][h], sizeof(rows_v[row][h]));
      }
    }
    cuda(cudaStreamSynchronize(gpu->stream), "prompt");
    upload(gpu, rows_k[0][0], rows_v[0][0], kHeavy + kRecent);
    append(gpu, &gpu->exact, layer, gpu->k, gpu->v, kHeavy + kRecent);
    cuda(cudaStreamSynchronize(gpu->stream), "prompt");
  }
}

static void attend(const Gpu* gpu, const Part* part, uint32_t layer, const float* log_weights) {
  kvm_cuda_attend_params params;
  memset(&params, 0, sizeof(params));
  params.struct_size = sizeof(params);
  params.layer = layer;
  params.q = kvm_device_tensor(gpu->q, kQRow * 2, KVM_DTYPE_BF16);
  params.o = kvm_device_tensor(part->o, kQRow * 4, KVM_DTYPE_F32);
  params.lse = kvm_device_tensor(part->lse, kQHeads * 4, KVM_DTYPE_F32);
  if (log_weights != NULL) {
    params.log_weights =
        kvm_device_tensor(log_weights, kKvHeads * kTokens * 4, KVM_DTYPE_F32).buffer;
  }
  require(kvm_cuda_attend(part->batch, &params, gpu->stream), "attend");
}

static void merge(const Gpu* gpu) {
  const kvm_tensor o[2] = {kvm_device_tensor(gpu->exact.o, kQRow * 4, KVM_DTYPE_F32),
                           kvm_device_tensor(gpu->codes.o, kQRow * 4, KVM_DTYPE_F32)};
  const kvm_tensor lse[2] = {kvm_device_tensor(gpu->exact.lse, kQHeads * 4, KVM_DTYPE_F32),
                             kvm_device_tensor(gpu->codes.lse, kQHeads * 4, KVM_DTYPE_F32)};
  kvm_merge_params params;
  memset(&params, 0, sizeof(params));
  params.struct_size = sizeof(params);
  params.n_states = 2;
  params.n_rows = 1;
  params.n_heads = kQHeads;
  params.dim = kDim;
  params.o = o;
  params.lse = lse;
  params.out_o = kvm_device_tensor(gpu->o, kQRow * 4, KVM_DTYPE_F32);
  require(kvm_cuda_merge(gpu->client, &params, gpu->stream), "merge");
}

/* Rows [first, first + n) of a layer of a part, into device memory. */
static void read_rows(const Gpu* gpu, const Part* part, uint32_t layer, uint64_t first, uint64_t n,
                      void* rows_k, void* rows_v, uint32_t dtype) {
  const uint64_t bytes = n * kRow * (dtype == KVM_DTYPE_F32 ? 4 : 2);
  kvm_cuda_read_params params;
  memset(&params, 0, sizeof(params));
  params.struct_size = sizeof(params);
  params.layer = layer;
  params.position = first;
  params.n_tokens = n;
  params.k = kvm_device_tensor(rows_k, bytes, dtype);
  params.v = kvm_device_tensor(rows_v, bytes, dtype);
  require(kvm_cuda_read(part->batch, &params, gpu->stream), "read");
}

/* A token: in bf16, while another one becomes codes. */
static void step(const Gpu* gpu, int s, float o[kLayers][kQHeads][kDim]) {
  const int token = kPrompt + s;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    read_rows(gpu, &gpu->exact, layer, (uint64_t)(kHeavy + s), 1, gpu->left_k[layer],
              gpu->left_v[layer], KVM_DTYPE_BF16);
  }
  update(gpu, &gpu->exact, 1, 1);
  update(gpu, &gpu->codes, 1, 1);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    upload(gpu, k[layer][token][0], v[layer][token][0], 1);
    cuda(cudaMemcpyAsync(gpu->q, q[layer][token], kQRow * 2, cudaMemcpyHostToDevice, gpu->stream),
         "q");
    append(gpu, &gpu->exact, layer, gpu->k, gpu->v, 1);
    append(gpu, &gpu->codes, layer, gpu->left_k[layer], gpu->left_v[layer], 1);
    attend(gpu, &gpu->exact, layer, NULL);
    attend(gpu, &gpu->codes, layer, gpu->log_weights[layer]);
    merge(gpu);
    cuda(cudaMemcpyAsync(o[layer], gpu->o, kQRow * 4, cudaMemcpyDeviceToHost, gpu->stream), "o");
  }
  cuda(cudaStreamSynchronize(gpu->stream), "step");
}

/* What the codes stand for, of all tokens that have become some. */
static void read_codes(const Gpu* gpu) {
  const size_t n = kOld + kSteps;
  void *const rows_k = device_memory(n * kRow * 4), *const rows_v = device_memory(n * kRow * 4);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    read_rows(gpu, &gpu->codes, layer, 0, n, rows_k, rows_v, KVM_DTYPE_F32);
    cuda(cudaMemcpyAsync(codes_k[layer], rows_k, n * kRow * 4, cudaMemcpyDeviceToHost, gpu->stream),
         "codes");
    cuda(cudaMemcpyAsync(codes_v[layer], rows_v, n * kRow * 4, cudaMemcpyDeviceToHost, gpu->stream),
         "codes");
    cuda(cudaStreamSynchronize(gpu->stream), "codes");
  }
  cuda(cudaFree(rows_k), "cudaFree");
  cuda(cudaFree(rows_v), "cudaFree");
}

/* --- Comparison ------------------------------------------------------------------------------- */

/* |a - b| / |b|; infinite where a has a NaN. */
static double error_of(const double a[kDim], const double b[kDim]) {
  double wrong = 0, length = 0;
  for (int i = 0; i < kDim; ++i) {
    wrong += (a[i] - b[i]) * (a[i] - b[i]);
    length += b[i] * b[i];
  }
  return isnan(wrong) ? INFINITY : sqrt(wrong / length);
}

/* The largest error of a row that the codes stand for: of another token it would be above 1. */
static double error_of_codes(void) {
  double worst = 0;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int t = 0; t < kOld + kSteps; ++t) {
      for (int h = 0; h < kKvHeads; ++h) {
        double got[2][kDim], expected[2][kDim];
        for (int i = 0; i < kDim; ++i) {
          got[0][i] = (double)codes_k[layer][t][h][i];
          got[1][i] = (double)codes_v[layer][t][h][i];
          expected[0][i] = from_bf16(k[layer][t][h][i]);
          expected[1][i] = from_bf16(v[layer][t][h][i]);
        }
        worst = fmax(worst, fmax(error_of(got[0], expected[0]), error_of(got[1], expected[1])));
      }
    }
  }
  return worst;
}

int main(void) {
  kvm_cuda_params params;
  memset(&params, 0, sizeof(params));
  params.struct_size = sizeof(params);
  params.pool_bytes = 64u << 20;
  kvm_client* client = NULL;
  const kvm_status opened = kvm_cuda_open(&params, &client);
  if (opened == KVM_ERR_DEVICE || opened == KVM_ERR_UNSUPPORTED) {
    fprintf(stderr, "cuda_mikv: %s\n", kvm_last_error());
    return 77;
  }
  require(opened, "open");
  make_data();
  choose_heavy();
  Gpu gpu = open_gpu(client);
  divide_prompt(&gpu);
  static float o[kSteps][kLayers][kQHeads][kDim];
  for (int s = 0; s < kSteps; ++s) {
    step(&gpu, s, o[s]);
  }
  read_codes(&gpu);
  close_gpu(&gpu);
  kvm_client_close(client);

  double worst = 0, mixed = 0, codes = 0, dropped = 0;
  for (int s = 0; s < kSteps; ++s) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int h = 0; h < kQHeads; ++h) {
        double exact[kDim], same[kDim], of_codes[kDim], of_dropped[kDim], got[kDim];
        attend_here(layer, h, kPrompt + s, kAll, exact, NULL);
        attend_here(layer, h, kPrompt + s, kHeavyOnly, same, NULL);
        attend_here(layer, h, kPrompt + s, kNone, of_codes, NULL);
        attend_here(layer, h, kPrompt + s, kHeavyAlone, of_dropped, NULL);
        for (int i = 0; i < kDim; ++i) {
          got[i] = (double)o[s][layer][h][i];
        }
        worst = fmax(worst, error_of(got, same));
        mixed += error_of(got, exact);
        codes += error_of(of_codes, exact);
        dropped += error_of(of_dropped, exact);
      }
    }
  }
  const int n = kSteps * kLayers * kQHeads;
  printf("error of o: %.2f %%; of codes alone %.2f %%; of heavy and recent tokens alone %.2f %%\n",
         100 * mixed / n, 100 * codes / n, 100 * dropped / n);
  const double coarse = error_of_codes();
  printf("from the same rows in double precision: at most %.3f %%; codes are off by %.1f %%\n",
         100 * worst, 100 * coarse);
  return worst < 6e-3 && coarse < 0.5 && mixed < codes && mixed < dropped ? 0 : 1;
}
