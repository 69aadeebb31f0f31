/* SPDX-License-Identifier: Apache-2.0 */
/* A prompt that one engine has computed on its GPU, found by another one. The first engine copies
 * the keys and values to host memory, publishes them by the tokens that they are of, and ends. The
 * second one finds them, loads them onto its GPU, and goes on behind them. In host memory CPUs
 * attend to the same tokens.
 *
 *   cuda_prefix [SOCKET]     of a kvmd, which keeps the prefix between the two engines;
 *                            default: host memory of this process
 *
 * Exit status: 0 when all three answers agree, 1 when not, 77 where there is no GPU.
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
  kPrompt = 320, /* five pages of 64 tokens */
  kPages = kPrompt / KVM_PREFIX_TOKENS
};
enum { kKvRow = kKvHeads * kDim, kQRow = kQHeads * kDim };

static void require(kvm_status status, const char* what) {
  if (status != KVM_OK) {
    fprintf(stderr, "cuda_prefix: %s: %s (%s)\n", what, kvm_last_error(), kvm_status_name(status));
    exit(1);
  }
}

static void cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    fprintf(stderr, "cuda_prefix: %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
  }
}

static void* device_memory(size_t size) {
  void* memory = NULL;
  cuda(cudaMalloc(&memory, size), "cudaMalloc");
  return memory;
}

/* Random bf16 numbers of about 0.5 to 2 in magnitude: what a model would compute. */
static void fill(uint16_t* out, size_t n, uint32_t* state) {
  for (size_t i = 0; i < n; ++i) {
    *state = *state * 1664525u + 1013904223u;
    out[i] = (uint16_t)(0x3f00u + (*state >> 24) + (*state >> 8 & 0x8000u));
  }
}

static kvm_space_id register_space(kvm_client* client) {
  kvm_space_params geometry;
  memset(&geometry, 0, sizeof(geometry));
  geometry.struct_size = sizeof(geometry);
  geometry.name = "cuda_prefix";
  geometry.n_layers = kLayers;
  geometry.n_q_heads = kQHeads;
  geometry.n_kv_heads = kKvHeads;
  geometry.head_dim_k = kDim;
  geometry.codec = KVM_CODEC_BF16;
  kvm_space_id space = 0;
  require(kvm_space_register(client, &geometry, &space), "space");
  return space;
}

/* Host memory: spaces, prefixes and CPUs. */
typedef struct Host {
  kvm_client* client;
  kvm_space_id space;
} Host;

static Host open_host(const char* socket_path) {
  Host host;
  memset(&host, 0, sizeof(host));
  if (socket_path == NULL) {
    require(kvm_open_embedded(NULL, &host.client), "open");
  } else {
    kvm_connect_params params;
    memset(&params, 0, sizeof(params));
    params.struct_size = sizeof(params);
    params.socket_path = socket_path;
    require(kvm_connect(&params, &host.client), "connect");
  }
  host.space = register_space(host.client);
  return host;
}

/* A GPU, and the way between it and host memory. */
typedef struct Engine {
  kvm_client* client;
  kvm_cuda_batch* batch;
  kvm_cuda_bridge* bridge;
  cudaStream_t stream;
} Engine;

/* Leaves where there is no GPU. */
static Engine open_engine(const Host* host) {
  Engine engine;
  memset(&engine, 0, sizeof(engine));
  kvm_cuda_params params;
  memset(&params, 0, sizeof(params));
  params.struct_size = sizeof(params);
  params.pool_bytes = 64u << 20;
  const kvm_status opened = kvm_cuda_open(&params, &engine.client);
  if (opened == KVM_ERR_DEVICE || opened == KVM_ERR_UNSUPPORTED) {
    fprintf(stderr, "cuda_prefix: %s\n", kvm_last_error());
    exit(77);
  }
  require(opened, "open");
  kvm_cuda_batch_params sizes;
  memset(&sizes, 0, sizeof(sizes));
  sizes.struct_size = sizeof(sizes);
  sizes.space = register_space(engine.client);
  sizes.max_items = 1;
  sizes.max_append = kPrompt;
  sizes.max_tokens = kPrompt + 64;
  require(kvm_cuda_batch_create(engine.client, &sizes, &engine.batch), "batch");
  kvm_cuda_bridge_params between;
  memset(&between, 0, sizeof(between));
  between.struct_size = sizeof(between);
  between.host = host->client;
  between.host_space = host->space;
  between.space = sizes.space;
  between.max_tokens = sizes.max_tokens;
  require(kvm_cuda_bridge_create(engine.client, &between, &engine.bridge), "bridge");
  cuda(cudaStreamCreateWithFlags(&engine.stream, cudaStreamNonBlocking), "stream");
  return engine;
}

static void close_engine(Engine* engine) {
  kvm_cuda_bridge_destroy(engine->bridge);
  kvm_cuda_batch_destroy(engine->batch);
  cuda(cudaStreamDestroy(engine->stream), "stream");
  kvm_client_close(engine->client);
}

static void update(const Engine* engine, kvm_seq_id seq, uint32_t n_append, uint32_t n_query) {
  kvm_cuda_item item;
  memset(&item, 0, sizeof(item));
  item.seq = seq;
  item.n_append = n_append;
  item.n_query = n_query;
  require(kvm_cuda_update(engine->batch, &item, 1, engine->stream), "update");
}

/* The prompt from token `first` on, whose keys and values a model has computed: k and v of
 * [layer][token][head][channel]. */
static void compute_prompt(const Engine* engine, kvm_seq_id seq, size_t first, const uint16_t* k,
                           const uint16_t* v) {
  const size_t bytes = (kPrompt - first) * kKvRow * 2;
  update(engine, seq, (uint32_t)(kPrompt - first), 0);
  void* const here = device_memory(2 * bytes);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const size_t at = ((size_t)layer * kPrompt + first) * kKvRow;
    cuda(cudaMemcpyAsync(here, k + at, bytes, cudaMemcpyHostToDevice, engine->stream), "k");
    cuda(
        cudaMemcpyAsync((char*)here + bytes, v + at, bytes, cudaMemcpyHostToDevice, engine->stream),
        "v");
    const kvm_tensor keys = kvm_device_tensor(here, bytes, KVM_DTYPE_BF16);
    const kvm_tensor values = kvm_device_tensor((char*)here + bytes, bytes, KVM_DTYPE_BF16);
    require(kvm_cuda_append(engine->batch, layer, &keys, &values, engine->stream), "append");
  }
  cuda(cudaStreamSynchronize(engine->stream), "prompt");
  cuda(cudaFree(here), "cudaFree");
}

/* What the last token of a sequence sees of the last layer, on the GPU. */
static void ask_gpu(const Engine* engine, kvm_seq_id seq, const uint16_t* q, float* o) {
  void *const query = device_memory(kQRow * 2), *const result = device_memory(kQRow * 4);
  cuda(cudaMemcpyAsync(query, q, kQRow * 2, cudaMemcpyHostToDevice, engine->stream), "q");
  update(engine, seq, 0, 1);
  kvm_cuda_attend_params attend;
  memset(&attend, 0, sizeof(attend));
  attend.struct_size = sizeof(attend);
  attend.layer = kLayers - 1;
  attend.q = kvm_device_tensor(query, kQRow * 2, KVM_DTYPE_BF16);
  attend.o = kvm_device_tensor(result, kQRow * 4, KVM_DTYPE_F32);
  require(kvm_cuda_attend(engine->batch, &attend, engine->stream), "attend");
  cuda(cudaMemcpyAsync(o, result, kQRow * 4, cudaMemcpyDeviceToHost, engine->stream), "o");
  cuda(cudaStreamSynchronize(engine->stream), "answer");
  cuda(cudaFree(query), "cudaFree");
  cuda(cudaFree(result), "cudaFree");
}

static void ask_cpu(const Host* host, kvm_seq_id seq, const uint16_t* q, float* o) {
  kvm_queue* queue = NULL;
  require(kvm_queue_create(host->client, NULL, &queue), "queue");
  kvm_item item;
  memset(&item, 0, sizeof(item));
  item.seq = seq;
  item.n_query = 1;
  item.query_position = KVM_POSITION_END;
  kvm_step_params step;
  memset(&step, 0, sizeof(step));
  step.struct_size = sizeof(step);
  step.space = host->space;
  step.layer_begin = kLayers - 1;
  step.n_items = 1;
  step.items = &item;
  step.q = kvm_host_tensor(q, kQRow * 2, KVM_DTYPE_BF16);
  step.o = kvm_host_tensor(o, kQRow * 4, KVM_DTYPE_F32);
  require(kvm_attend(queue, &step, NULL), "attend on the CPU");
  kvm_queue_destroy(queue);
}

/* Largest difference; a NaN is infinite. */
static double difference(const float* a, const float* b) {
  double worst = 0;
  for (int i = 0; i < kQRow; ++i) {
    worst = fmax(worst, isnan(a[i]) ? INFINITY : fabs((double)a[i] - (double)b[i]));
  }
  return worst;
}

int main(int argc, char** argv) {
  const char* const socket_path = argc > 1 ? argv[1] : NULL;
  static uint16_t k[kLayers * kPrompt * kKvRow], v[kLayers * kPrompt * kKvRow], q[kQRow];
  static uint32_t tokens[kPrompt];
  static float first[kQRow], second[kQRow], on_cpu[kQRow];
  uint32_t state = 1;
  fill(k, sizeof(k) / 2, &state);
  fill(v, sizeof(v) / 2, &state);
  fill(q, kQRow, &state);
  for (int i = 0; i < kPrompt; ++i) {
    tokens[i] = state = state * 1664525u + 1013904223u;
  }
  Host host = open_host(socket_path);
  kvm_prefix_hash seed, hashes[kPages];
  require(kvm_prefix_seed(host.client, host.space, NULL, 0, &seed), "seed");
  require(kvm_prefix_hashes(&seed, tokens, kPrompt, hashes), "hashes");

  /* One engine computes the prompt, stores and publishes it, and ends. */
  Engine engine = open_engine(&host);
  kvm_space_id space = 0;
  require(kvm_space_find(engine.client, "cuda_prefix", &space), "space");
  kvm_cuda_copy_params copy;
  memset(&copy, 0, sizeof(copy));
  copy.struct_size = sizeof(copy);
  require(kvm_seq_create(engine.client, space, NULL, &copy.source), "sequence");
  compute_prompt(&engine, copy.source, 0, k, v);
  copy.end = KVM_POSITION_END;
  ask_gpu(&engine, copy.source, q, first);
  kvm_seq_id stored = 0;
  require(kvm_cuda_store(engine.bridge, &copy, engine.stream, &stored), "store");
  /* An engine that goes on with the conversation publishes a fork. */
  require(kvm_prefix_publish(host.client, stored, hashes, kPages, 0), "publish");
  close_engine(&engine);
  if (socket_path != NULL) { /* the prefix is kvmd's, and stays */
    kvm_client_close(host.client);
    host = open_host(socket_path);
  }

  /* Another one has the same prompt. Its last token has to be computed, for the logits. */
  engine = open_engine(&host);
  kvm_prefix_find_params find;
  memset(&find, 0, sizeof(find));
  find.struct_size = sizeof(find);
  find.space = host.space;
  find.hashes = hashes;
  find.n_hashes = (kPrompt - 1) / KVM_PREFIX_TOKENS;
  kvm_prefix found;
  memset(&found, 0, sizeof(found));
  found.struct_size = sizeof(found);
  require(kvm_prefix_find(host.client, &find, &found), "find");
  if (found.n_tokens == 0) {
    fprintf(stderr, "cuda_prefix: nothing was found\n");
    return 1;
  }
  copy.source = found.seq;
  copy.end = found.n_tokens;
  kvm_seq_id loaded = 0;
  require(kvm_cuda_load(engine.bridge, &copy, engine.stream, &loaded), "load");
  compute_prompt(&engine, loaded, (size_t)found.n_tokens, k, v);
  ask_gpu(&engine, loaded, q, second);
  close_engine(&engine);

  ask_cpu(&host, found.seq, q, on_cpu);
  /* So that the example leaves nothing behind: this takes the prefix from every engine. */
  require(kvm_seq_free(host.client, found.seq), "free");
  kvm_client_close(host.client);
  const double of_engines = difference(second, first), of_cpu = difference(on_cpu, first);
  printf("%llu tokens were found; the second engine's answer differs by %g, that of CPUs by %g\n",
         (unsigned long long)found.n_tokens, of_engines, of_cpu);
  /* The same numbers on the same kernel; on CPUs they are added up in another order. */
  return of_engines == 0 && of_cpu < 2e-2 ? 0 : 1;
}
