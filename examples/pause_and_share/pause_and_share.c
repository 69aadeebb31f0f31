// SPDX-License-Identifier: Apache-2.0
/* What an engine does with a prompt before it computes it, and with a conversation that pauses:
 * prefixes (docs/prefixes.md), priorities and snapshots (docs/disk.md). kvmd must have a disk:
 *
 *   cc pause_and_share.c -o pause_and_share $(pkg-config --cflags --libs kvm)
 *   mkdir -p /tmp/kvm-disk; kvmd --disk-directories /tmp/kvm-disk &
 *   ./pause_and_share pause     two conversations share a system prompt; one of them is saved
 *   kill %1; wait; kvmd --disk-directories /tmp/kvm-disk &
 *   ./pause_and_share resume    that one goes on, and its snapshot is deleted; the prefix stays
 *
 * KVM_SOCKET names kvmd's socket. The exit status says whether the conversations shared what they
 * should, and had the bits that they have where nothing is shared and nothing was saved.
 */
#define _POSIX_C_SOURCE 200809L /* nanosleep */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kvm.h"

enum { kLayers = 2, kQHeads = 4, kKvHeads = 2, kDim = 64 };
/* Tokens. A system prompt of whole pages is shared as a whole. */
enum { kSystem = 4 * KVM_PREFIX_TOKENS, kQuestion = 100, kAnswer = 30 };
enum { kMaxTokens = kSystem + kQuestion + 2 * kAnswer };

static const uint64_t kTenMinutesNs = 600ull * 1000000000ull;
static const double kPrefillRate = 1000; /* tokens a second that this engine computes */
static const char* const kName = "chat/4711";

typedef struct engine {
  kvm_client* client;
  kvm_queue* queue;
  kvm_space_id space;
} engine;

/* kvm keeps keys and values. The text is the engine's to keep, also of a conversation that pauses:
 * here it is made again. */
typedef struct chat {
  kvm_seq_id seq;
  uint32_t tokens[kMaxTokens];
  uint64_t n_tokens;
} chat;

typedef float rows[kMaxTokens][kKvHeads][kDim];
typedef float outputs[kLayers][kQHeads][kDim];

static void require(kvm_status status, const char* what) {
  if (status != KVM_OK) {
    fprintf(stderr, "pause_and_share: %s: %s (%s)\n", what, kvm_last_error(),
            kvm_status_name(status));
    exit(1);
  }
}

static uint32_t next(uint32_t* state) { return *state = *state * 1664525u + 1013904223u; }

static void add_text(chat* c, uint32_t seed, int n) {
  for (int i = 0; i < n; ++i) {
    c->tokens[c->n_tokens++] = next(&seed) >> 16;
  }
}

static void sleep_a_little(void) {
  const struct timespec time = {.tv_nsec = 20000000};
  nanosleep(&time, NULL);
}

/* --- The model -------------------------------------------------------------------------------- */

/* Stands for what a model would compute: random numbers in [-1, 1) that depend on `of` alone. So
 * equal tokens at equal positions have equal keys and values, as they have behind equal texts. */
static void fill(float* out, int n, uint32_t of) {
  uint32_t state = of * 2654435761u;
  for (int i = 0; i < n; ++i) {
    out[i] = (float)(next(&state) >> 8) / (float)(1u << 23) - 1.0f;
  }
}

static kvm_step_params make_step(const engine* e, uint32_t layer, const kvm_item* item) {
  return (kvm_step_params){.struct_size = sizeof(kvm_step_params),
                           .space = e->space,
                           .layer_begin = layer,
                           .n_items = 1,
                           .items = item};
}

/* Computes the chat's tokens from `begin` on, and appends them to `seq`. */
static void compute(const engine* e, const chat* c, kvm_seq_id seq, uint64_t begin) {
  static rows k, v;
  const uint64_t n = c->n_tokens - begin;
  /* The position that we believe: where kvm has more tokens or fewer, it says so (HOLE). */
  const kvm_item item = {.seq = seq, .append_position = begin, .n_append = (uint32_t)n};
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint64_t t = 0; t < n; ++t) {
      const uint32_t at = (uint32_t)(begin + t);
      const uint32_t of = (c->tokens[at] * kMaxTokens + at) * 2 * kLayers + 2 * layer;
      fill(&k[t][0][0], kKvHeads * kDim, of);
      fill(&v[t][0][0], kKvHeads * kDim, of + 1);
    }
    kvm_step_params step = make_step(e, layer, &item);
    step.k = kvm_host_tensor(k, n * sizeof(k[0]), KVM_DTYPE_F32);
    step.v = kvm_host_tensor(v, n * sizeof(v[0]), KVM_DTYPE_F32);
    require(kvm_append(e->queue, &step), "append");
  }
}

/* What attention says of the last token, in each layer. */
static void attend(const engine* e, kvm_seq_id seq, outputs o) {
  float q[kQHeads][kDim];
  fill(&q[0][0], kQHeads * kDim, 7);
  const kvm_item item = {.seq = seq, .n_query = 1, .query_position = KVM_POSITION_END};
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    kvm_step_params step = make_step(e, layer, &item);
    step.q = kvm_host_tensor(q, sizeof(q), KVM_DTYPE_F32);
    step.o = kvm_host_tensor(o[layer], sizeof(o[layer]), KVM_DTYPE_F32);
    require(kvm_attend(e->queue, &step, NULL), "attend");
  }
}

/* Whether the chat's attention has the bits that it has over a sequence that is computed anew. */
static int is_as_computed(const engine* e, const chat* c) {
  static outputs here, anew;
  kvm_seq_id seq = 0;
  require(kvm_seq_create(e->client, e->space, NULL, &seq), "sequence");
  compute(e, c, seq, 0);
  attend(e, seq, anew);
  require(kvm_seq_free(e->client, seq), "free");
  attend(e, c->seq, here);
  return memcmp(here, anew, sizeof(here)) == 0;
}

/* --- What the engine asks of kvm -------------------------------------------------------------- */

static engine open_engine(void) {
  engine e;
  /* A save answers when it is durable, and a drive may take longer than the default of 5 s. */
  const kvm_connect_params connect = {.struct_size = sizeof(connect),
                                      .timeout_ns = 60 * 1000000000ull};
  require(kvm_connect(&connect, &e.client), "connect");
  require(kvm_queue_create(e.client, NULL, &e.queue), "queue");
  kvm_space_params geometry = {.struct_size = sizeof(geometry),
                               .name = "pause_and_share",
                               .n_layers = kLayers,
                               .n_q_heads = kQHeads,
                               .n_kv_heads = kKvHeads,
                               .head_dim_k = kDim};
  /* Of the weights: else prefixes and snapshots of two models with this geometry are mixed up. */
  memcpy(geometry.fingerprint, "the digest of the model's weights", sizeof(geometry.fingerprint));
  require(kvm_space_register(e.client, &geometry, &e.space), "space");
  return e;
}

static void close_engine(const engine* e) {
  kvm_queue_destroy(e->queue);
  kvm_client_close(e->client);
}

/* The hashes of the chat's full pages. Customers have salts of their own, so that none learns from
 * the time of an answer what others have asked. */
static uint32_t hash(const engine* e, const chat* c, const char* salt, kvm_prefix_hash* out) {
  kvm_prefix_hash seed;
  require(kvm_prefix_seed(e->client, e->space, salt, strlen(salt), &seed), "seed");
  require(kvm_prefix_hashes(&seed, c->tokens, c->n_tokens, out), "hashes");
  return (uint32_t)(c->n_tokens / KVM_PREFIX_TOKENS);
}

/* How many of the chat's tokens somebody has published; from is the sequence to fork at so many. */
static uint64_t find(const engine* e, const chat* c, const char* salt, kvm_seq_id* from) {
  kvm_prefix_hash hashes[kMaxTokens / KVM_PREFIX_TOKENS];
  hash(e, c, salt, hashes);
  const kvm_prefix_find_params params = {
      .struct_size = sizeof(params),
      .space = e->space,
      .hashes = hashes,
      /* The last token is computed in any case: the engine needs its logits. */
      .n_hashes = (c->n_tokens - 1) / KVM_PREFIX_TOKENS,
      /* What is sooner computed than read from the disk is not found. */
      .prefill_rate = kPrefillRate};
  kvm_prefix found = {.struct_size = sizeof(found)};
  require(kvm_prefix_find(e->client, &params, &found), "find");
  if (found.n_tokens_slower != 0) {
    printf("  %u tokens are there, and sooner computed than read\n",
           (unsigned)found.n_tokens_slower);
  }
  *from = found.seq;
  return found.n_tokens;
}

static void set_priority(const engine* e, kvm_seq_id seq, uint64_t begin, uint64_t end,
                         uint32_t priority, uint64_t keep_ns) {
  const kvm_priority_params params = {.struct_size = sizeof(params),
                                      .priority = priority,
                                      .seq = seq,
                                      .begin = begin,
                                      .end = end,
                                      .keep_ns = keep_ns};
  require(kvm_seq_set_priority(e->client, &params), "priority");
}

/* What of a chat is worth keeping in memory, from 0 to 100, where there is not room for all. */
static void set_priorities(const engine* e, const chat* c) {
  /* Every conversation needs it, but only while there are conversations: worth 50 after that. */
  set_priority(e, c->seq, 0, kSystem, 90, kTenMinutesNs);
  /* What one user alone needs makes way, and so does what the chat grows by. */
  set_priority(e, c->seq, kSystem, KVM_POSITION_END, 30, 0);
}

/* Makes the sequence of a chat that is all prompt, and returns how many tokens it did not have to
 * compute. */
static uint64_t begin_chat(const engine* e, chat* c, const char* salt) {
  kvm_seq_id from = 0;
  uint64_t n_found = find(e, c, salt, &from);
  /* What was found may be gone by now. Then it is computed, as if it had never been there. */
  if (n_found == 0 || kvm_seq_fork(e->client, from, n_found, &c->seq) != KVM_OK) {
    n_found = 0;
    require(kvm_seq_create(e->client, e->space, NULL, &c->seq), "sequence");
  }
  compute(e, c, c->seq, n_found);

  /* Before the fork, which has the priorities too: a page that two sequences share leaves memory as
   * soon as one of them lets it. */
  set_priorities(e, c);
  kvm_prefix_hash hashes[kMaxTokens / KVM_PREFIX_TOKENS];
  const uint32_t n_hashes = hash(e, c, salt, hashes);
  kvm_seq_id prompt = 0;
  /* A fork: what is published never changes, and the chat goes on. */
  require(kvm_seq_fork(e->client, c->seq, KVM_POSITION_END, &prompt), "fork");
  /* It goes when nobody has forked it for ten minutes. */
  const kvm_status status = kvm_prefix_publish(e->client, prompt, hashes, n_hashes, kTenMinutesNs);
  if (status == KVM_ERR_EXISTS) { /* somebody was faster: nothing is lost */
    require(kvm_seq_free(e->client, prompt), "free");
  } else {
    require(status, "publish");
  }
  return n_found;
}

/* Waits until kvmd has saved a prefix of the space, and returns whether it has. An engine does not:
 * a prefix that ends with kvmd is computed again. Here the next command may be to end kvmd. */
static int wait_for_saved_prefix(const engine* e) {
  enum { kMaxListed = 64 };
  static kvm_snapshot_info all[kMaxListed];
  for (int i = 0; i < 500; ++i) {
    all[0].struct_size = sizeof(all[0]);
    size_t n = 0;
    require(kvm_snapshot_list(e->client, 0, all, kMaxListed, &n), "snapshots");
    for (size_t j = 0; j < n && j < kMaxListed; ++j) {
      if (strncmp(all[j].name, ".prefix/", 8) == 0 &&
          strcmp(all[j].space_name, "pause_and_share") == 0) {
        return 1;
      }
    }
    sleep_a_little();
  }
  return 0;
}

/* --- The two halves --------------------------------------------------------------------------- */

static int check(int holds, const char* what) {
  printf("  %s: %s\n", what, holds ? "yes" : "NO");
  return holds ? 0 : 1;
}

static chat make_prompt(uint32_t question) {
  chat c = {.n_tokens = 0};
  add_text(&c, 1, kSystem);
  add_text(&c, question, kQuestion);
  return c;
}

static int pause_chat(const engine* e) {
  int failed = 0;
  chat first = make_prompt(2);
  printf("first chat: %u of %u tokens were found\n", (unsigned)begin_chat(e, &first, "customer 1"),
         (unsigned)first.n_tokens);

  chat second = make_prompt(3);
  const uint64_t n_found = begin_chat(e, &second, "customer 1");
  printf("second chat: %u of %u tokens were found\n", (unsigned)n_found, (unsigned)second.n_tokens);
  failed += check(n_found >= kSystem, "it has the system prompt of the first");
  failed += check(is_as_computed(e, &second), "its attention is as computed anew, bit by bit");
  kvm_seq_id from = 0;
  failed += check(find(e, &second, "customer 2", &from) == 0, "another customer finds nothing");
  require(kvm_seq_free(e->client, second.seq), "free");

  const uint64_t n_prompt = first.n_tokens;
  add_text(&first, 4, kAnswer);
  compute(e, &first, first.seq, n_prompt);
  /* Durable when this returns. After each turn it costs what the turn added. */
  require(kvm_seq_save(e->client, first.seq, kName, KVM_SAVE_REPLACE), "save");
  require(kvm_seq_free(e->client, first.seq), "free");
  printf("%s: %u tokens are saved\n", kName, (unsigned)first.n_tokens);
  failed += check(wait_for_saved_prefix(e), "prefixes are saved too");
  return failed;
}

static int resume_chat(const engine* e) {
  int failed = 0;
  chat first = make_prompt(2);
  add_text(&first, 4, kAnswer);
  require(kvm_seq_load(e->client, e->space, kName, &first.seq), "load");
  /* Attention would read from the disk what it needs; this brings all of it back meanwhile. */
  require(kvm_seq_prefetch(e->client, first.seq), "prefetch");
  /* A snapshot has no priorities. */
  set_priorities(e, &first);
  printf("%s: %u tokens are loaded\n", kName, (unsigned)first.n_tokens);
  failed += check(is_as_computed(e, &first), "its attention is as computed anew, bit by bit");
  const uint64_t n_before = first.n_tokens;
  add_text(&first, 5, kAnswer);
  compute(e, &first, first.seq, n_before);
  failed += check(is_as_computed(e, &first), "and so it is some tokens later");

  /* Behind a restart prefixes are found again some milliseconds after their space is registered. An
   * engine takes what is there; this one wants to show it. */
  chat third = make_prompt(6);
  kvm_seq_id from = 0;
  for (int i = 0; i < 500 && find(e, &third, "customer 1", &from) == 0; ++i) {
    sleep_a_little();
  }
  const uint64_t n_found = begin_chat(e, &third, "customer 1");
  printf("third chat: %u of %u tokens were found\n", (unsigned)n_found, (unsigned)third.n_tokens);
  failed += check(n_found >= kSystem, "it has the system prompt of those before");
  failed += check(is_as_computed(e, &third), "its attention is as computed anew, bit by bit");

  require(kvm_seq_free(e->client, third.seq), "free");
  require(kvm_seq_free(e->client, first.seq), "free");
  require(kvm_snapshot_delete(e->client, kName), "delete");
  return failed;
}

int main(int argc, char** argv) {
  const int pauses = argc == 2 && strcmp(argv[1], "pause") == 0;
  if (!pauses && !(argc == 2 && strcmp(argv[1], "resume") == 0)) {
    fprintf(stderr, "usage: pause_and_share pause|resume; KVM_SOCKET names the daemon's socket\n");
    return 2;
  }
  const engine e = open_engine();
  const int failed = pauses ? pause_chat(&e) : resume_chat(&e);
  close_engine(&e);
  return failed == 0 ? 0 : 1;
}
