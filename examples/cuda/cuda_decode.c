/* SPDX-License-Identifier: Apache-2.0 */
/* The smallest engine on a GPU: two prompts are appended, of which only the last rows are asked (an
 * engine that asks all of them does it in a second batch, whose max_query is the chunk), then both
 * sequences decode with one CUDA graph for all layers. Compares what the last layer answers with
 * the same steps in an engine for CPUs.
 *
 *   cuda_decode [bf16|fp16|int8|fp8]      how K and V are stored; default fp8
 *
 * Exit status: 0 when the answers agree, 1 when not, 77 where there is no GPU.
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
  kDim = 64,
  kSequences = 2,
  kMaxRows = 128, /* of K and V in one step: the prompts */
  kSteps = 70
};
enum { kKvRow = kKvHeads * kDim, kQRow = kQHeads * kDim };

static void require(kvm_status status, const char* what) {
  if (status != KVM_OK) {
    fprintf(stderr, "cuda_decode: %s: %s (%s)\n", what, kvm_last_error(), kvm_status_name(status));
    exit(1);
  }
}

static void cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    fprintf(stderr, "cuda_decode: %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
  }
}

static void* device_memory(size_t size) {
  void* memory = NULL;
  cuda(cudaMalloc(&memory, size), "cudaMalloc");
  return memory;
}

/* Random bf16 numbers of about 0.5 to 2 in magnitude. */
static void fill(uint16_t* out, size_t n, uint32_t* state) {
  for (size_t i = 0; i < n; ++i) {
    *state = *state * 1664525u + 1013904223u;
    out[i] = (uint16_t)(0x3f00u + (*state >> 24) + (*state >> 8 & 0x8000u));
  }
}

static kvm_space_id register_space(kvm_client* client, uint32_t codec) {
  kvm_space_params geometry;
  memset(&geometry, 0, sizeof(geometry));
  geometry.struct_size = sizeof(geometry);
  geometry.name = "cuda_decode";
  geometry.n_layers = kLayers;
  geometry.n_q_heads = kQHeads;
  geometry.n_kv_heads = kKvHeads;
  geometry.head_dim_k = kDim;
  geometry.codec = codec;
  kvm_space_id space = 0;
  require(kvm_space_register(client, &geometry, &space), "space");
  return space;
}

/* Memory that one layer's kernels read and write on the GPU; an engine has its own such buffers. */
typedef struct Layer {
  void *k, *v, *q, *o, *lse;
} Layer;

/* Enqueues all layers of a step. In an engine the kernels that make q, k and v of a layer out of o
 * of the one before come in between. */
static void enqueue_layers(kvm_cuda_batch* batch, const Layer* layers, uint32_t q_dtype,
                           cudaStream_t stream) {
  for (uint32_t i = 0; i < kLayers; ++i) {
    const kvm_tensor k = kvm_device_tensor(layers[i].k, kMaxRows * kKvRow * 2, KVM_DTYPE_BF16);
    const kvm_tensor v = kvm_device_tensor(layers[i].v, kMaxRows * kKvRow * 2, KVM_DTYPE_BF16);
    require(kvm_cuda_append(batch, i, &k, &v, stream), "append");
    kvm_cuda_attend_params attend;
    memset(&attend, 0, sizeof(attend));
    attend.struct_size = sizeof(attend);
    attend.layer = i;
    attend.q = kvm_device_tensor(layers[i].q, kSequences * kQRow * 2, q_dtype);
    attend.o = kvm_device_tensor(layers[i].o, kSequences * kQRow * 4, KVM_DTYPE_F32);
    attend.lse = kvm_device_tensor(layers[i].lse, kSequences * kQHeads * 4, KVM_DTYPE_F32);
    require(kvm_cuda_attend(batch, &attend, stream), "attend");
  }
}

/* The same step of an engine for CPUs, for comparison. */
static void step_on_cpu(kvm_queue* queue, kvm_space_id space, const kvm_cuda_item* items,
                        const kvm_seq_id* seqs, uint32_t layer, uint16_t* k, uint16_t* v,
                        uint16_t* q, uint32_t q_dtype, float* o, float* lse) {
  kvm_item on_cpu[kSequences];
  memset(on_cpu, 0, sizeof(on_cpu));
  for (int i = 0; i < kSequences; ++i) {
    on_cpu[i].seq = seqs[i];
    on_cpu[i].append_position = KVM_POSITION_END;
    on_cpu[i].n_append = items[i].n_append;
    on_cpu[i].append_row = items[i].append_row;
    on_cpu[i].n_query = items[i].n_query;
    on_cpu[i].query_row = items[i].query_row;
    on_cpu[i].query_position = KVM_POSITION_END;
  }
  kvm_step_params step;
  memset(&step, 0, sizeof(step));
  step.struct_size = sizeof(step);
  step.space = space;
  step.layer_begin = layer;
  step.n_items = kSequences;
  step.items = on_cpu;
  step.k = kvm_host_tensor(k, kMaxRows * kKvRow * 2, KVM_DTYPE_BF16);
  step.v = kvm_host_tensor(v, kMaxRows * kKvRow * 2, KVM_DTYPE_BF16);
  step.q = kvm_host_tensor(q, kSequences * kQRow * 2, q_dtype);
  step.o = kvm_host_tensor(o, kSequences * kQRow * 4, KVM_DTYPE_F32);
  step.lse = kvm_host_tensor(lse, kSequences * kQHeads * 4, KVM_DTYPE_F32);
  require(kvm_step(queue, &step, NULL), "step on the CPU");
}

/* The largest difference, and how large results are. */
typedef struct Difference {
  double o, lse, size;
} Difference;

static void compare(Difference* worst, const float* o, const float* lse, const float* cpu_o,
                    const float* cpu_lse) {
  for (int i = 0; i < kSequences * kQRow; ++i) {
    worst->o = fmax(worst->o, isnan(o[i]) ? INFINITY : fabs((double)o[i] - (double)cpu_o[i]));
    worst->size = fmax(worst->size, fabs((double)cpu_o[i]));
  }
  for (int i = 0; i < kSequences * kQHeads; ++i) {
    worst->lse =
        fmax(worst->lse, isnan(lse[i]) ? INFINITY : fabs((double)lse[i] - (double)cpu_lse[i]));
  }
}

int main(int argc, char** argv) {
  const char* const names[] = {"bf16", "fp16", "int8", "fp8"};
  const uint32_t codecs[] = {KVM_CODEC_BF16, KVM_CODEC_F16, KVM_CODEC_I8, KVM_CODEC_F8E4M3};
  int chosen = argc == 1 ? 3 : -1;
  for (int i = 0; argc == 2 && i < 4; ++i) {
    chosen = strcmp(argv[1], names[i]) == 0 ? i : chosen;
  }
  if (chosen < 0) {
    fprintf(stderr, "usage: cuda_decode [bf16|fp16|int8|fp8]\n");
    return 2;
  }
  /* Queries have the dtype of the pages; those of int8 and fp8 take either of the others. */
  const uint32_t q_dtype = chosen == 1 ? KVM_DTYPE_F16 : KVM_DTYPE_BF16;

  kvm_cuda_params params;
  memset(&params, 0, sizeof(params));
  params.struct_size = sizeof(params);
  params.pool_bytes = 64u << 20;
  kvm_client *client = NULL, *cpu = NULL;
  const kvm_status opened = kvm_cuda_open(&params, &client);
  if (opened == KVM_ERR_DEVICE || opened == KVM_ERR_UNSUPPORTED) {
    fprintf(stderr, "cuda_decode: %s\n", kvm_last_error());
    return 77;
  }
  require(opened, "open");
  require(kvm_open_embedded(NULL, &cpu), "open on the CPU");
  kvm_queue* queue = NULL;
  require(kvm_queue_create(cpu, NULL, &queue), "queue");
  const kvm_space_id space = register_space(client, codecs[chosen]);
  const kvm_space_id cpu_space = register_space(cpu, codecs[chosen]);
  kvm_seq_id seqs[kSequences], cpu_seqs[kSequences];
  for (int i = 0; i < kSequences; ++i) {
    require(kvm_seq_create(client, space, NULL, &seqs[i]), "sequence");
    require(kvm_seq_create(cpu, cpu_space, NULL, &cpu_seqs[i]), "sequence on the CPU");
  }

  kvm_cuda_batch_params sizes;
  memset(&sizes, 0, sizeof(sizes));
  sizes.struct_size = sizeof(sizes);
  sizes.space = space;
  sizes.max_items = kSequences;
  sizes.max_append = kMaxRows;
  sizes.max_tokens = 4096;
  kvm_cuda_batch* batch = NULL;
  require(kvm_cuda_batch_create(client, &sizes, &batch), "batch");

  cudaStream_t stream = NULL;
  cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  Layer layers[kLayers];
  for (int i = 0; i < kLayers; ++i) {
    layers[i].k = device_memory(kMaxRows * kKvRow * 2);
    layers[i].v = device_memory(kMaxRows * kKvRow * 2);
    layers[i].q = device_memory(kSequences * kQRow * 2);
    layers[i].o = device_memory(kSequences * kQRow * 4);
    layers[i].lse = device_memory(kSequences * kQHeads * 4);
  }

  /* One capture serves every step: what changes lies in the batch's memory on the device. */
  cudaGraph_t graph = NULL;
  cudaGraphExec_t step = NULL;
  require(kvm_cuda_update(batch, NULL, 0, stream), "update");
  cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  enqueue_layers(batch, layers, q_dtype, stream);
  cuda(cudaStreamEndCapture(stream, &graph), "capture");
  cuda(cudaGraphInstantiate(&step, graph, 0), "graph");

  static uint16_t k[kLayers][kMaxRows * kKvRow], v[kLayers][kMaxRows * kKvRow];
  static uint16_t q[kLayers][kSequences * kQRow];
  static float o[kSequences * kQRow], cpu_o[kSequences * kQRow];
  static float lse[kSequences * kQHeads], cpu_lse[kSequences * kQHeads];
  Difference worst = {0, 0, 0};
  uint32_t state = 1;
  for (int n = 0; n < kSteps; ++n) {
    /* Prompts of 50 and 70 tokens, then a token each. */
    kvm_cuda_item items[kSequences];
    memset(items, 0, sizeof(items));
    for (int i = 0; i < kSequences; ++i) {
      items[i].seq = seqs[i];
      items[i].n_append = n != 0 ? 1 : i == 0 ? 50 : 70;
      items[i].append_row = i == 0 ? 0 : items[0].n_append;
      items[i].n_query = 1;
      items[i].query_row = (uint32_t)i;
    }
    for (int i = 0; i < kLayers; ++i) {
      fill(k[i], kMaxRows * kKvRow, &state);
      fill(v[i], kMaxRows * kKvRow, &state);
      fill(q[i], kSequences * kQRow, &state);
      cuda(cudaMemcpyAsync(layers[i].k, k[i], sizeof(k[i]), cudaMemcpyHostToDevice, stream), "k");
      cuda(cudaMemcpyAsync(layers[i].v, v[i], sizeof(v[i]), cudaMemcpyHostToDevice, stream), "v");
      cuda(cudaMemcpyAsync(layers[i].q, q[i], sizeof(q[i]), cudaMemcpyHostToDevice, stream), "q");
    }
    require(kvm_cuda_update(batch, items, kSequences, stream), "update");
    cuda(cudaGraphLaunch(step, stream), "graph");
    for (uint32_t i = 0; i < kLayers; ++i) {
      cuda(cudaMemcpyAsync(o, layers[i].o, sizeof(o), cudaMemcpyDeviceToHost, stream), "o");
      cuda(cudaMemcpyAsync(lse, layers[i].lse, sizeof(lse), cudaMemcpyDeviceToHost, stream), "lse");
      cuda(cudaStreamSynchronize(stream), "step");
      step_on_cpu(queue, cpu_space, items, cpu_seqs, i, k[i], v[i], q[i], q_dtype, cpu_o, cpu_lse);
      compare(&worst, o, lse, cpu_o, cpu_lse);
    }
  }
  printf(
      "%d steps of %d sequences, %d layers of %s pages: o differs by %.1e of %.1f at most, lse "
      "by %.1e\n",
      kSteps, kSequences, kLayers, names[chosen], worst.o, worst.size, worst.lse);

  cuda(cudaGraphExecDestroy(step), "graph");
  cuda(cudaGraphDestroy(graph), "graph");
  for (int i = 0; i < kLayers; ++i) {
    void* const all[] = {layers[i].k, layers[i].v, layers[i].q, layers[i].o, layers[i].lse};
    for (int j = 0; j < 5; ++j) {
      cuda(cudaFree(all[j]), "cudaFree");
    }
  }
  kvm_cuda_batch_destroy(batch);
  cuda(cudaStreamDestroy(stream), "stream");
  kvm_client_close(client);
  kvm_queue_destroy(queue);
  kvm_client_close(cpu);
  return worst.o < 0.02 * worst.size && worst.lse < 0.02 ? 0 : 1;
}
