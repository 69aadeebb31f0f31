/* SPDX-License-Identifier: Apache-2.0 */
/* Attention shared by a GPU and CPUs. The GPU has the first tokens of a sequence (sinks) and the
 * newest ones (a window), and attends to them exactly. The long middle lies in host memory, where
 * CPUs answer by a sample that an index proposes. The two answers are merged on the GPU. This is
 * how MagicPIG and RetrievalAttention divide the work.
 *
 *   cuda_hybrid [exact|sketch|lsh]      how CPUs answer; default sketch
 *
 * Which token is whose. With n tokens, the GPU's query sees [0, kSinks) and [n - kRecent, n): by
 * the token, though memory is freed by the page. The sequence of the CPUs holds the others,
 * [kSinks, n - kRecent), from its position 0 on, and its query sees all that it holds. So each
 * token counts once. With every update one token leaves the window. Its row is read back behind the
 * update, where `slack` has kept it, and appended to the sequence of the CPUs in front of their
 * attend.
 *
 * Compares with attention to everything in double precision, and the error with the error bar that
 * the sample reports (hash tables, lsh, have none). Exit status: 0 when all is as near as it should
 * be, 1 when not, 77 where there is no GPU.
 */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvm_cuda.h"

enum {
  kLayers = 2,
  kQHeads = 8,
  kKvHeads = 2,
  kGroup = kQHeads / kKvHeads,
  kDim = 64,
  kSinks = 16,
  kRecent = 128,
  kPrompt = 1536,
  kSteps = 24,
  kTokens = kPrompt + kSteps,
  kBudget = 192 /* keys that a sample has for each row */
};

typedef uint16_t bf16;

/* What a model would compute: here all of it is made beforehand. */
static bf16 k[kLayers][kTokens][kKvHeads][kDim];
static bf16 v[kLayers][kTokens][kKvHeads][kDim];
static bf16 q[kSteps + 1][kLayers][kQHeads][kDim];

static void require(kvm_status status, const char* what) {
  if (status != KVM_OK) {
    fprintf(stderr, "cuda_hybrid: %s: %s (%s)\n", what, kvm_last_error(), kvm_status_name(status));
    exit(1);
  }
}

static void cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    fprintf(stderr, "cuda_hybrid: %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
  }
}

static void* device_memory(size_t size) {
  void* memory = NULL;
  cuda(cudaMalloc(&memory, size), "cudaMalloc");
  return memory;
}

/* Of the host, page-locked: kernels read and write it at the same address. */
static void* host_memory(size_t size) {
  void* memory = NULL;
  cuda(cudaHostAlloc(&memory, size, cudaHostAllocDefault), "cudaHostAlloc");
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

/* As in a model a few directions carry most of what queries and keys have in common, and values
 * have a part that all share. */
static void make_data(void) {
  uint64_t state = 1;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int t = 0; t < kTokens; ++t) {
      for (int h = 0; h < kKvHeads; ++h) {
        for (int i = 0; i < kDim; ++i) {
          k[layer][t][h][i] = to_bf16(3.0 / sqrt(i + 1.0) * deviate(&state));
          v[layer][t][h][i] = to_bf16(0.5 + 0.5 * deviate(&state));
        }
      }
    }
    for (int step = 0; step <= kSteps; ++step) {
      for (int h = 0; h < kQHeads; ++h) {
        for (int i = 0; i < kDim; ++i) {
          q[step][layer][h][i] = to_bf16(3.0 / sqrt(i + 1.0) * deviate(&state));
        }
      }
    }
  }
}

/* Attention of one q head to the first n tokens in double precision. */
static void attend_here(int layer, int step, int head, int n, double out[kDim]) {
  static double logit[kTokens];
  const int kv_head = head / kGroup;
  double largest = -INFINITY;
  for (int t = 0; t < n; ++t) {
    double dot = 0;
    for (int i = 0; i < kDim; ++i) {
      dot += from_bf16(q[step][layer][head][i]) * from_bf16(k[layer][t][kv_head][i]);
    }
    logit[t] = dot / sqrt(kDim);
    largest = fmax(largest, logit[t]);
  }
  double sum = 0;
  memset(out, 0, kDim * sizeof(double));
  for (int t = 0; t < n; ++t) {
    const double weight = exp(logit[t] - largest);
    sum += weight;
    for (int i = 0; i < kDim; ++i) {
      out[i] += weight * from_bf16(v[layer][t][kv_head][i]);
    }
  }
  for (int i = 0; i < kDim; ++i) {
    out[i] /= sum;
  }
}

/* --- Both sides ------------------------------------------------------------------------------- */

static kvm_space_params geometry_of(const char* name) {
  kvm_space_params geometry;
  memset(&geometry, 0, sizeof(geometry));
  geometry.struct_size = sizeof(geometry);
  geometry.name = name;
  geometry.n_layers = kLayers;
  geometry.n_q_heads = kQHeads;
  geometry.n_kv_heads = kKvHeads;
  geometry.head_dim_k = kDim;
  geometry.codec = KVM_CODEC_BF16;
  return geometry;
}

/* Of the GPU: all heads keep sinks and a window. */
typedef struct Gpu {
  kvm_client* client;
  kvm_cuda_batch* batch;
  kvm_seq_id seq;
  cudaStream_t stream;
  cudaEvent_t rows_are_there;
  void *k, *v, *q;                 /* rows of a step */
  void *o, *lse, *all_o, *all_lse; /* what the GPU answers, and both together */
} Gpu;

static Gpu open_gpu(kvm_client* client) {
  Gpu gpu;
  memset(&gpu, 0, sizeof(gpu));
  gpu.client = client;
  kvm_policy_params policy;
  memset(&policy, 0, sizeof(policy));
  policy.retention = KVM_RETAIN_SINKS_RECENT;
  policy.n_sinks = kSinks;
  policy.n_recent = kRecent;
  policy.slack = 1; /* the most tokens that an update appends, but for the prompt */
  kvm_space_params geometry = geometry_of("cuda_hybrid.gpu");
  geometry.policies = &policy;
  geometry.n_policies = 1;
  kvm_cuda_batch_params sizes;
  memset(&sizes, 0, sizeof(sizes));
  sizes.struct_size = sizeof(sizes);
  sizes.max_items = 1;
  sizes.max_append = kPrompt;
  sizes.max_tokens = kTokens;
  require(kvm_space_register(client, &geometry, &sizes.space), "space");
  require(kvm_cuda_batch_create(client, &sizes, &gpu.batch), "batch");
  require(kvm_seq_create(client, sizes.space, NULL, &gpu.seq), "sequence");
  cuda(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking), "stream");
  cuda(cudaEventCreateWithFlags(&gpu.rows_are_there, cudaEventDisableTiming), "event");
  gpu.k = device_memory(sizeof(k[0]));
  gpu.v = device_memory(sizeof(v[0]));
  gpu.q = device_memory(sizeof(q[0][0]));
  gpu.o = device_memory(kQHeads * kDim * 4);
  gpu.lse = device_memory(kQHeads * 4);
  gpu.all_o = device_memory(kQHeads * kDim * 4);
  gpu.all_lse = device_memory(kQHeads * 4);
  return gpu;
}

static void close_gpu(Gpu* gpu) {
  void* const all[] = {gpu->k, gpu->v, gpu->q, gpu->o, gpu->lse, gpu->all_o, gpu->all_lse};
  for (int i = 0; i < 7; ++i) {
    cuda(cudaFree(all[i]), "cudaFree");
  }
  kvm_cuda_batch_destroy(gpu->batch);
  cuda(cudaEventDestroy(gpu->rows_are_there), "event");
  cuda(cudaStreamDestroy(gpu->stream), "stream");
}

/* Of the CPUs: an index, or none, over what the window has left behind. */
typedef struct Cpu {
  kvm_client* client;
  kvm_queue* queue;
  kvm_space_id space;
  kvm_seq_id seq;
  uint32_t mode;
  /* Page-locked, so that kernels reach them: rows of K and V on their way, a layer's queries, and
   * the answer. */
  bf16 *k, *v, *q;
  float *o, *lse;
  float err[kQHeads][2];
} Cpu;

static Cpu open_cpu(uint32_t mode, uint32_t index_kind) {
  Cpu cpu;
  memset(&cpu, 0, sizeof(cpu));
  cpu.mode = mode;
  require(kvm_open_embedded(NULL, &cpu.client), "open on the CPU");
  require(kvm_queue_create(cpu.client, NULL, &cpu.queue), "queue");
  kvm_index_params index;
  memset(&index, 0, sizeof(index));
  index.kind = index_kind;
  index.min_tokens = 256;
  kvm_space_params geometry = geometry_of("cuda_hybrid.cpu");
  geometry.indexes = &index;
  geometry.n_indexes = index_kind != KVM_INDEX_NONE;
  require(kvm_space_register(cpu.client, &geometry, &cpu.space), "space on the CPU");
  require(kvm_seq_create(cpu.client, cpu.space, NULL, &cpu.seq), "sequence on the CPU");
  cpu.k = host_memory(sizeof(k[0]));
  cpu.v = host_memory(sizeof(v[0]));
  cpu.q = host_memory(sizeof(q[0][0]));
  cpu.o = host_memory(kQHeads * kDim * 4);
  cpu.lse = host_memory(kQHeads * 4);
  return cpu;
}

static void close_cpu(Cpu* cpu) {
  void* const all[] = {cpu->k, cpu->v, cpu->q, cpu->o, cpu->lse};
  for (int i = 0; i < 5; ++i) {
    cuda(cudaFreeHost(all[i]), "cudaFreeHost");
  }
  kvm_queue_destroy(cpu->queue);
  kvm_client_close(cpu->client);
}

/* Enqueues a layer of a step on the GPU: n_new tokens are appended; [begin, end), which have left
 * the window, and the query go to the host; and the GPU answers for what it has. */
static void enqueue_layer(const Gpu* gpu, const Cpu* cpu, uint32_t layer, int step, int n_new,
                          int first_new, int begin, int end) {
  const size_t new_bytes = (size_t)n_new * sizeof(k[0][0]);
  const size_t left_bytes = (size_t)(end - begin) * sizeof(k[0][0]);
  cuda(cudaMemcpyAsync(gpu->k, k[layer][first_new], new_bytes, cudaMemcpyHostToDevice, gpu->stream),
       "k");
  cuda(cudaMemcpyAsync(gpu->v, v[layer][first_new], new_bytes, cudaMemcpyHostToDevice, gpu->stream),
       "v");
  cuda(
      cudaMemcpyAsync(gpu->q, q[step][layer], sizeof(q[0][0]), cudaMemcpyHostToDevice, gpu->stream),
      "q");
  const kvm_tensor new_k = kvm_device_tensor(gpu->k, new_bytes, KVM_DTYPE_BF16);
  const kvm_tensor new_v = kvm_device_tensor(gpu->v, new_bytes, KVM_DTYPE_BF16);
  require(kvm_cuda_append(gpu->batch, layer, &new_k, &new_v, gpu->stream), "append");

  kvm_cuda_read_params read;
  memset(&read, 0, sizeof(read));
  read.struct_size = sizeof(read);
  read.layer = layer;
  read.position = (uint64_t)begin;
  read.n_tokens = (uint64_t)(end - begin);
  read.k = kvm_device_tensor(cpu->k, left_bytes, KVM_DTYPE_BF16);
  read.v = kvm_device_tensor(cpu->v, left_bytes, KVM_DTYPE_BF16);
  require(kvm_cuda_read(gpu->batch, &read, gpu->stream), "read");
  cuda(cudaMemcpyAsync(cpu->q, gpu->q, sizeof(q[0][0]), cudaMemcpyDeviceToHost, gpu->stream), "q");
  cuda(cudaEventRecord(gpu->rows_are_there, gpu->stream), "event");

  kvm_cuda_attend_params attend;
  memset(&attend, 0, sizeof(attend));
  attend.struct_size = sizeof(attend);
  attend.layer = layer;
  attend.q = kvm_device_tensor(gpu->q, sizeof(q[0][0]), KVM_DTYPE_BF16);
  attend.o = kvm_device_tensor(gpu->o, kQHeads * kDim * 4, KVM_DTYPE_F32);
  attend.lse = kvm_device_tensor(gpu->lse, kQHeads * 4, KVM_DTYPE_F32);
  require(kvm_cuda_attend(gpu->batch, &attend, gpu->stream), "attend");
}

/* Appends what has left the window to the other side, and answers for all that is there. */
static void step_on_cpu(Cpu* cpu, uint32_t layer, int step, int n_left) {
  kvm_item item;
  memset(&item, 0, sizeof(item));
  item.seq = cpu->seq;
  item.append_position = KVM_POSITION_END;
  item.n_append = (uint32_t)n_left;
  item.n_query = 1;
  item.query_position = KVM_POSITION_END;
  kvm_step_params params;
  memset(&params, 0, sizeof(params));
  params.struct_size = sizeof(params);
  params.space = cpu->space;
  params.layer_begin = layer;
  params.n_items = 1;
  params.items = &item;
  params.mode = cpu->mode;
  params.budget = cpu->mode == KVM_MODE_SAMPLED ? kBudget : 0;
  params.seed = (uint64_t)step;
  params.k = kvm_host_tensor(cpu->k, (size_t)n_left * sizeof(k[0][0]), KVM_DTYPE_BF16);
  params.v = kvm_host_tensor(cpu->v, (size_t)n_left * sizeof(v[0][0]), KVM_DTYPE_BF16);
  params.q = kvm_host_tensor(cpu->q, sizeof(q[0][0]), KVM_DTYPE_BF16);
  params.o = kvm_host_tensor(cpu->o, kQHeads * kDim * 4, KVM_DTYPE_F32);
  params.lse = kvm_host_tensor(cpu->lse, kQHeads * 4, KVM_DTYPE_F32);
  params.err = kvm_host_tensor(cpu->err, sizeof(cpu->err), KVM_DTYPE_F32);
  require(kvm_step(cpu->queue, &params, NULL), "step on the CPU");
}

/* Enqueues the merge. The CPUs' state is read where they wrote it. */
static void enqueue_merge(const Gpu* gpu, const Cpu* cpu) {
  const kvm_tensor o[2] = {kvm_device_tensor(gpu->o, kQHeads * kDim * 4, KVM_DTYPE_F32),
                           kvm_device_tensor(cpu->o, kQHeads * kDim * 4, KVM_DTYPE_F32)};
  const kvm_tensor lse[2] = {kvm_device_tensor(gpu->lse, kQHeads * 4, KVM_DTYPE_F32),
                             kvm_device_tensor(cpu->lse, kQHeads * 4, KVM_DTYPE_F32)};
  kvm_merge_params merge;
  memset(&merge, 0, sizeof(merge));
  merge.struct_size = sizeof(merge);
  merge.n_states = 2;
  merge.n_rows = 1;
  merge.n_heads = kQHeads;
  merge.dim = kDim;
  merge.o = o;
  merge.lse = lse;
  merge.out_o = kvm_device_tensor(gpu->all_o, kQHeads * kDim * 4, KVM_DTYPE_F32);
  merge.out_lse = kvm_device_tensor(gpu->all_lse, kQHeads * 4, KVM_DTYPE_F32);
  require(kvm_cuda_merge(gpu->client, &merge, gpu->stream), "merge");
}

/* --- Comparison ------------------------------------------------------------------------------- */

typedef struct Figures {
  double mean, worst; /* relative errors of o */
  double bar;         /* mean of the bars; NaN without */
  double share;       /* mean share of the mass that the CPUs have */
  int n, over;        /* rows, and those whose error is larger than their bar */
} Figures;

static double length(const double x[kDim]) {
  double sum = 0;
  for (int i = 0; i < kDim; ++i) {
    sum += x[i] * x[i];
  }
  return sqrt(sum);
}

/* The bar of the merge. With w the CPUs' share of the mass, o = w o_c + (1 - w) o_g. An error of
 * o_c counts w times; one of lse_c, d, moves w by w (1 - w) d, and o by as much of o_c - o_g. */
static void compare(const Gpu* gpu, const Cpu* cpu, uint32_t layer, int step, int n,
                    Figures* figures) {
  static float o[kQHeads][kDim], gpu_o[kQHeads][kDim], lse[kQHeads];
  cuda(cudaMemcpyAsync(o, gpu->all_o, sizeof(o), cudaMemcpyDeviceToHost, gpu->stream), "o");
  cuda(cudaMemcpyAsync(lse, gpu->all_lse, sizeof(lse), cudaMemcpyDeviceToHost, gpu->stream), "lse");
  cuda(cudaMemcpyAsync(gpu_o, gpu->o, sizeof(gpu_o), cudaMemcpyDeviceToHost, gpu->stream), "o");
  cuda(cudaStreamSynchronize(gpu->stream), "step");
  for (int h = 0; h < kQHeads; ++h) {
    double expected[kDim], wrong[kDim], of_cpu[kDim], apart[kDim];
    attend_here((int)layer, step, h, n, expected);
    for (int i = 0; i < kDim; ++i) {
      of_cpu[i] = cpu->o[h * kDim + i];
      wrong[i] = (double)o[h][i] - expected[i];
      apart[i] = of_cpu[i] - (double)gpu_o[h][i];
    }
    const double w = exp((double)cpu->lse[h] - (double)lse[h]);
    const double bar = (w * (double)cpu->err[h][0] * length(of_cpu) +
                        w * (1 - w) * (double)cpu->err[h][1] * length(apart)) /
                       length(expected);
    const double error = length(wrong) / length(expected);
    figures->mean += error;
    /* A NaN is worst of all, and stays. */
    figures->worst = error <= figures->worst || isnan(figures->worst) ? figures->worst : error;
    figures->bar += bar;
    figures->share += w;
    figures->over += error > bar + 3e-3; /* rounding: weights are bf16 on both sides */
    ++figures->n;
  }
}

int main(int argc, char** argv) {
  const char* const names[] = {"exact", "sketch", "lsh"};
  const uint32_t kinds[] = {KVM_INDEX_NONE, KVM_INDEX_SKETCH, KVM_INDEX_LSH};
  int chosen = argc == 1 ? 1 : -1;
  for (int i = 0; argc == 2 && i < 3; ++i) {
    chosen = strcmp(argv[1], names[i]) == 0 ? i : chosen;
  }
  if (chosen < 0) {
    fprintf(stderr, "usage: cuda_hybrid [exact|sketch|lsh]\n");
    return 2;
  }
  kvm_cuda_params params;
  memset(&params, 0, sizeof(params));
  params.struct_size = sizeof(params);
  params.pool_bytes = 64u << 20;
  kvm_client* client = NULL;
  const kvm_status opened = kvm_cuda_open(&params, &client);
  if (opened == KVM_ERR_DEVICE || opened == KVM_ERR_UNSUPPORTED) {
    fprintf(stderr, "cuda_hybrid: %s\n", kvm_last_error());
    return 77;
  }
  require(opened, "open");
  Gpu gpu = open_gpu(client);
  Cpu cpu = open_cpu(chosen == 0 ? KVM_MODE_EXACT : KVM_MODE_SAMPLED, kinds[chosen]);
  make_data();

  Figures figures;
  memset(&figures, 0, sizeof(figures));
  int held = kSinks; /* [kSinks, held) is on the other side */
  for (int step = 0, n = 0; step <= kSteps; ++step) {
    /* The prompt, then a token each. Rows of the prompt but its last would see sinks and window:
     * their attention is a kernel's that has the prompt's k and v before it. */
    const int n_new = step == 0 ? kPrompt : 1;
    kvm_cuda_item item;
    memset(&item, 0, sizeof(item));
    item.seq = gpu.seq;
    item.n_append = (uint32_t)n_new;
    item.n_query = 1;
    require(kvm_cuda_update(gpu.batch, &item, 1, gpu.stream), "update");
    n += n_new;
    const int end = n - kRecent;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      enqueue_layer(&gpu, &cpu, layer, step, n_new, n - n_new, held, end);
      cuda(cudaEventSynchronize(gpu.rows_are_there), "rows"); /* the GPU goes on with its attend */
      step_on_cpu(&cpu, layer, step, end - held);
      enqueue_merge(&gpu, &cpu);
      compare(&gpu, &cpu, layer, step, n, &figures);
    }
    held = end;
  }
  const int rows = figures.n;
  printf("%s: %d tokens on the GPU, %d on the CPUs, which have %.0f %% of the mass\n",
         names[chosen], kSinks + kRecent, held - kSinks, 100 * figures.share / rows);
  printf("error of o %.2f %%, at most %.2f %%; ", 100 * figures.mean / rows, 100 * figures.worst);
  if (isnan(figures.bar)) {
    printf("no error bars\n");
  } else {
    printf("error bar %.2f %%, exceeded by %d of %d rows\n", 100 * figures.bar / rows, figures.over,
           rows);
  }
  close_cpu(&cpu);
  close_gpu(&gpu);
  kvm_client_close(client);
  /* Rounding alone; a sample whose bars hold nine times in ten; hash tables. */
  const double most[] = {6e-3, 0.3, 1};
  return figures.worst < most[chosen] && figures.over <= (chosen == 1 ? rows / 5 : 0) ? 0 : 1;
}
