// SPDX-License-Identifier: Apache-2.0
/* Shows what an engine does beside plain decoding: requests of two batches overlapped on one queue,
 * a beam search whose beams fork, and speculative decoding whose rejected tokens are rolled back.
 * The model is a toy, a transformer of random weights, but its text depends on every answer of the
 * service. Each answer is compared with attention in double precision over the program's own K and
 * V. README.md, beside this file, walks through it.
 *
 *   beam_and_draft            through the daemon at $KVM_SOCKET (or the default socket)
 *   beam_and_draft --embedded with the engine in this process (linked against libkvm_embedded)
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "examples/beam_and_draft/toy_model.h"
#include "kvm.h"

enum { kDraftLayers = 1, kNewTokens = 48, kBeams = 4, kProposed = 4 };
enum { kMaxTokens = 384 }; /* of a text */
enum { kMaxRows = 64 };    /* of a batch */

static const double kTolerance = 2e-5; /* of o and lse: fp32 all the way */
static const char kPrompt[] =
    "it was the best of times, it was the worst of times, it was the age of wisdom, it was the "
    "age of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the "
    "season of light, it was the season of darkness, it was the spring of hope, it was the winter "
    "of";

/* The draft model is the first layers of the target, with a space of its own. */
typedef struct model {
  kvm_space_id space;
  int n_layers;
} model;

/* A text and its cache. The text runs ahead: its tokens from n_cached on are the rows of the next
 * step. k and v are the program's copy, to check the service by. */
typedef struct sequence {
  kvm_seq_id id;
  int n_cached;
  int n_text;
  int text[kMaxTokens];
  double score; /* of a beam: the sum of the logarithms of its new tokens' probabilities */
  kv_row k[kLayers][kMaxTokens];
  kv_row v[kLayers][kMaxTokens];
} sequence;

/* Sequences that take a step together. Tensors lie in an arena, so that nothing is copied. */
typedef struct batch {
  const model* model;
  int n_items;
  int n_rows;
  int in_flight;
  kvm_item items[kMaxRows];
  sequence* owner[kMaxRows]; /* of each row, as the next two */
  int position[kMaxRows];
  float x[kMaxRows][kHidden];
  float (*q)[kQHeads][kDim];
  kv_row* k;
  kv_row* v;
  float (*o)[kQHeads][kDim];
  float (*lse)[kQHeads];
  kvm_tensor tensors[5]; /* the same five */
} batch;

static struct {
  int requests, in_flight, most_in_flight, forks, frees, truncations, dropped, answers, wrong;
  double worst_o, worst_lse;
} seen;

static kvm_client* client;
static kvm_queue* queue;

static void require(kvm_status status, const char* what) {
  if (status != KVM_OK) {
    fprintf(stderr, "beam_and_draft: %s: %s (%s)\n", what, kvm_last_error(),
            kvm_status_name(status));
    exit(1);
  }
}

/* The greedy choice after a row of a batch. */
static int most_likely(const batch* b, int row) {
  double scores[kVocabulary];
  int best = 0;
  toy_predict(b->x[row], scores);
  for (int t = 1; t < kVocabulary; ++t) {
    best = scores[t] > scores[best] ? t : best;
  }
  return best;
}

/* ---- Sequences ------------------------------------------------------------------------------ */

static sequence* new_sequence(void) {
  sequence* seq = calloc(1, sizeof(*seq));
  if (seq == NULL) {
    fprintf(stderr, "beam_and_draft: no memory\n");
    exit(1);
  }
  return seq;
}

static sequence* create(const model* m) {
  sequence* seq = new_sequence();
  require(kvm_seq_create(client, m->space, NULL, &seq->id), "create");
  for (; kPrompt[seq->n_text] != 0; ++seq->n_text) {
    seq->text[seq->n_text] = (int)(strchr(kLetters, kPrompt[seq->n_text]) - kLetters);
  }
  return seq;
}

/* The child shares its parent's pages; only the program's copy for the check is a copy. */
static sequence* fork_sequence(const sequence* parent) {
  sequence* seq = new_sequence();
  *seq = *parent;
  require(kvm_seq_fork(client, parent->id, KVM_POSITION_END, &seq->id), "fork");
  ++seen.forks;
  return seq;
}

static void free_sequence(sequence* seq) {
  require(kvm_seq_free(client, seq->id), "free");
  ++seen.frees;
  free(seq);
}

/* Takes back all tokens from n_tokens on, from the text and where need be from the cache. */
static void roll_back(sequence* seq, int n_tokens) {
  seq->n_text = n_tokens;
  if (seq->n_cached > n_tokens) {
    require(kvm_seq_truncate(client, seq->id, (uint64_t)n_tokens), "truncate");
    ++seen.truncations;
    seen.dropped += seq->n_cached - n_tokens;
    seq->n_cached = n_tokens;
  }
}

/* ---- A step of batches ---------------------------------------------------------------------- */

static void* arena_tensor(kvm_arena* arena, int n_heads, int dim, kvm_tensor* out) {
  const uint64_t size = sizeof(float) * kMaxRows * (uint64_t)n_heads * (uint64_t)dim;
  require(kvm_arena_alloc(arena, size, 0, &out->buffer), "arena");
  out->dtype = KVM_DTYPE_F32;
  return kvm_arena_data(arena, out->buffer);
}

static void make_batch(kvm_arena* arena, batch* b) {
  b->q = arena_tensor(arena, kQHeads, kDim, &b->tensors[0]);
  b->k = arena_tensor(arena, kKvHeads, kDim, &b->tensors[1]);
  b->v = arena_tensor(arena, kKvHeads, kDim, &b->tensors[2]);
  b->o = arena_tensor(arena, kQHeads, kDim, &b->tensors[3]);
  b->lse = arena_tensor(arena, kQHeads, 1, &b->tensors[4]);
}

static void begin(batch* b, const model* m) {
  b->model = m;
  b->n_items = b->n_rows = 0;
}

/* Adds the tokens that a sequence has not cached, as far as there is room. */
static void add(batch* b, sequence* seq) {
  const int room = kMaxRows - b->n_rows, ahead = seq->n_text - seq->n_cached;
  const int n = ahead < room ? ahead : room;
  b->items[b->n_items++] = (kvm_item){.seq = seq->id,
                                      .append_position = (uint64_t)seq->n_cached,
                                      .n_append = (uint32_t)n,
                                      .append_row = (uint32_t)b->n_rows,
                                      .n_query = (uint32_t)n,
                                      .query_row = (uint32_t)b->n_rows,
                                      .query_position = (uint64_t)seq->n_cached};
  for (int r = 0; r < n; ++r) {
    b->owner[b->n_rows] = seq;
    b->position[b->n_rows] = seq->n_cached + r;
    toy_embed(seq->text[seq->n_cached + r], b->x[b->n_rows++]);
  }
}

/* Computes q, k and v of a layer, and asks for its attention without waiting for it. */
static void ask(batch* b, int layer) {
  for (int row = 0; row < b->n_rows; ++row) {
    const int position = b->position[row];
    toy_project(layer, position, b->x[row], b->q[row], b->k[row], b->v[row]);
    memcpy(b->owner[row]->k[layer][position], b->k[row], sizeof(kv_row));
    memcpy(b->owner[row]->v[layer][position], b->v[row], sizeof(kv_row));
  }
  const kvm_step_params step = {.struct_size = sizeof step,
                                .flags = KVM_STEP_F32_VALUES,
                                .space = b->model->space,
                                .layer_begin = (uint32_t)layer,
                                .n_items = (uint32_t)b->n_items,
                                .items = b->items,
                                .q = b->tensors[0],
                                .k = b->tensors[1],
                                .v = b->tensors[2],
                                .o = b->tensors[3],
                                .lse = b->tensors[4]};
  require(kvm_step_async(queue, &step, (uint64_t)(uintptr_t)b), "step");
  require(kvm_submit(queue), "submit");
  b->in_flight = 1;
  ++seen.requests;
  if (++seen.in_flight > seen.most_in_flight) {
    seen.most_in_flight = seen.in_flight;
  }
}

/* Completions of a queue come in any order: those of other batches are noted on the way. */
static void wait_for(batch* b) {
  while (b->in_flight) {
    kvm_completion done;
    const int32_t n = kvm_wait(queue, &done, 1, 1, UINT64_MAX);
    require(n < 0 ? n : KVM_OK, "wait");
    require(done.status, "completion");
    ((batch*)(uintptr_t)done.user_data)->in_flight = 0;
    --seen.in_flight;
  }
}

/* Compares the service's answer for a row with attention over the program's own copy. */
static void check(const batch* b, int layer, int row) {
  for (int head = 0; head < kQHeads; ++head) {
    double o[kDim], squares = 0;
    const double lse = toy_attend(b->q[row][head], b->owner[row]->k[layer], b->owner[row]->v[layer],
                                  b->position[row] + 1, head / (kQHeads / kKvHeads), o);
    for (int i = 0; i < kDim; ++i) {
      squares += (o[i] - b->o[row][head][i]) * (o[i] - b->o[row][head][i]);
    }
    const double o_error = sqrt(squares), lse_error = fabs(lse - b->lse[row][head]);
    seen.worst_o = fmax(seen.worst_o, o_error);
    seen.worst_lse = fmax(seen.worst_lse, lse_error);
    seen.wrong += !(o_error <= kTolerance && lse_error <= kTolerance); /* NaN is wrong too */
    ++seen.answers;
  }
}

/* Waits for the attention of a layer, checks it, and goes on. */
static void take(batch* b, int layer) {
  wait_for(b);
  for (int row = 0; row < b->n_rows; ++row) {
    check(b, layer, row);
    toy_absorb(layer, b->o[row], b->x[row]);
  }
}

/* All layers of some batches: while the service attends for one, the next one is computed. */
static void forward(batch* batches, int n) {
  for (int layer = 0; layer <= kLayers; ++layer) {
    for (batch* b = batches; b < batches + n; ++b) {
      if (layer > 0 && layer <= b->model->n_layers) {
        take(b, layer - 1);
      }
      if (layer < b->model->n_layers) {
        ask(b, layer);
      }
    }
  }
  for (batch* b = batches; b < batches + n; ++b) {
    for (int row = 0; row < b->n_rows; ++row) {
      ++b->owner[row]->n_cached;
    }
  }
}

/* ---- What an engine does with it ------------------------------------------------------------ */

static void push(sequence* seq, int token) { seq->text[seq->n_text++] = token; }

/* Both models read the prompt, the batch of one computed while that of the other is attended. */
static void prefill(batch batches[2], const model* target, const model* draft, sequence* prompt,
                    sequence* draft_prompt) {
  while (prompt->n_cached < prompt->n_text) {
    begin(&batches[0], target);
    add(&batches[0], prompt);
    begin(&batches[1], draft);
    add(&batches[1], draft_prompt);
    forward(batches, 2);
  }
}

/* The best tokens over all beams. A beam with one of them goes on, one with more is forked, one
 * without is freed. Row i of the batch is beam i's. */
static void survive(const batch* b, sequence* beams[kBeams]) {
  double scores[kBeams][kVocabulary], score[kBeams];
  int parent[kBeams] = {0}, token[kBeams] = {0}, n_children[kBeams] = {0};
  sequence* next[kBeams];
  for (int i = 0; i < kBeams; ++i) {
    toy_predict(b->x[i], scores[i]);
  }
  for (int s = 0; s < kBeams; ++s) {
    score[s] = -INFINITY;
    for (int i = 0; i < kBeams; ++i) {
      for (int t = 0; t < kVocabulary; ++t) {
        if (beams[i]->score + scores[i][t] > score[s]) {
          score[s] = beams[i]->score + scores[i][t];
          parent[s] = i;
          token[s] = t;
        }
      }
    }
    scores[parent[s]][token[s]] = -INFINITY;
    next[s] = n_children[parent[s]]++ == 0 ? beams[parent[s]] : fork_sequence(beams[parent[s]]);
  }
  for (int i = 0; i < kBeams; ++i) {
    if (n_children[i] == 0) {
      free_sequence(beams[i]);
    }
  }
  for (int s = 0; s < kBeams; ++s) {
    push(next[s], token[s]);
    next[s]->score = score[s];
    beams[s] = next[s];
  }
}

/* One user's greedy text and another's beam search, two batches in flight: four beams are one
 * request. All begin with the prompt's cache. */
static void decode(batch batches[2], const model* m, sequence* greedy, sequence* beams[kBeams]) {
  for (int step = 0; step < kNewTokens; ++step) {
    begin(&batches[0], m);
    add(&batches[0], greedy);
    begin(&batches[1], m);
    for (int i = 0; i < kBeams; ++i) {
      add(&batches[1], beams[i]);
    }
    forward(batches, 2);
    push(greedy, most_likely(&batches[0], 0));
    survive(&batches[1], beams);
  }
}

/* Speculative decoding: the draft proposes some tokens one by one, the target scores them in one
 * step of as many rows and one more, and what it would not have said is rolled back in both.
 * Returns how many proposals were accepted; *n_passes receives the target's steps. */
static int speculate(batch* b, const model* target, const model* draft, sequence* seq,
                     sequence* guess, int n_tokens, int* n_passes) {
  int n_accepted = 0;
  for (*n_passes = 0; seq->n_text < n_tokens; ++*n_passes) {
    const int known = seq->n_text;
    for (int i = 0; i < kProposed; ++i) {
      begin(b, draft);
      add(b, guess);
      forward(b, 1);
      push(guess, most_likely(b, b->n_rows - 1));
      push(seq, guess->text[known + i]);
    }
    begin(b, target);
    add(b, seq);
    forward(b, 1); /* row r predicts text[known + r] */
    int accepted = 0;
    while (accepted < kProposed && most_likely(b, accepted) == seq->text[known + accepted]) {
      ++accepted;
    }
    n_accepted += accepted;
    roll_back(seq, known + accepted);
    roll_back(guess, known + accepted);
    push(seq, most_likely(b, accepted));
    push(guess, most_likely(b, accepted));
  }
  return n_accepted;
}

/* ---- The program ---------------------------------------------------------------------------- */

static void register_model(const char* name, int n_layers, model* out) {
  const kvm_space_params geometry = {.struct_size = sizeof geometry,
                                     .name = name,
                                     .n_layers = (uint32_t)n_layers,
                                     .n_q_heads = kQHeads,
                                     .n_kv_heads = kKvHeads,
                                     .head_dim_k = kDim,
                                     .codec = KVM_CODEC_F32};
  require(kvm_space_register(client, &geometry, &out->space), "space");
  out->n_layers = n_layers;
}

static void print_text(const char* what, const sequence* seq) {
  printf("%-12s \"", what);
  for (int i = 0; i < kNewTokens; ++i) {
    putchar(kLetters[seq->text[(int)sizeof(kPrompt) + i]]);
  }
  printf("\"");
}

/* Prints what the beams hold, and what they would if each were a copy. */
static void report_beams(sequence* const beams[kBeams]) {
  double bytes = 0, shared = 0;
  for (int i = 0; i < kBeams; ++i) {
    kvm_seq_info info = {.struct_size = sizeof info};
    require(kvm_seq_get_info(client, beams[i]->id, &info), "info");
    bytes += (double)info.bytes;
    shared += (double)info.bytes_shared;
    print_text(i == 0 ? "beams" : "", beams[i]);
    printf(" %.2f\n", beams[i]->score);
  }
  printf("beam memory  %.0f KiB if each were a copy; %.0f KiB of it in pages that beams share\n",
         bytes / 1024, shared / 1024);
}

int main(int argc, char** argv) {
  const int embedded = argc == 2 && strcmp(argv[1], "--embedded") == 0;
  if (argc > 1 && !embedded) {
    fprintf(stderr, "usage: beam_and_draft [--embedded]; KVM_SOCKET names the daemon's socket\n");
    return 2;
  }
  if (embedded) {
    require(kvm_open_embedded(NULL, &client), "open");
  } else {
    require(kvm_connect(NULL, &client), "connect");
  }
  require(kvm_queue_create(client, NULL, &queue), "queue");
  kvm_arena* arena = NULL;
  require(kvm_arena_create(client, NULL, &arena), "arena");
  model target, draft;
  register_model("beam-and-draft", kLayers, &target);
  register_model("beam-and-draft/draft", kDraftLayers, &draft);
  static batch batches[2];
  make_batch(arena, &batches[0]);
  make_batch(arena, &batches[1]);
  toy_make_weights();

  sequence* prompt = create(&target);
  sequence* guess = create(&draft);
  prefill(batches, &target, &draft, prompt, guess);
  push(prompt, 0);
  push(guess, 0);

  sequence *greedy = fork_sequence(prompt), *beams[kBeams];
  for (int i = 0; i < kBeams; ++i) {
    beams[i] = fork_sequence(prompt);
    beams[i]->score = i == 0 ? 0 : -INFINITY; /* four times the same: one of them counts */
  }
  decode(batches, &target, greedy, beams);
  int n_passes = 0;
  const int n_tokens = greedy->n_text;
  const int n_accepted = speculate(batches, &target, &draft, prompt, guess, n_tokens, &n_passes);
  const int same = memcmp(prompt->text, greedy->text, sizeof(int) * (size_t)n_tokens) == 0;

  print_text("greedy", greedy);
  printf("\n");
  print_text("speculative", prompt);
  printf(" %s\n", same ? "(the same)" : "(DIFFERENT)");
  report_beams(beams);
  printf("draft        %d of %d proposals accepted; %d steps of the target for %d tokens\n",
         n_accepted, n_passes * kProposed, n_passes, prompt->n_text - n_tokens + kNewTokens);
  printf("sequences    %d forks, %d freed; %d truncations took back %d tokens\n", seen.forks,
         seen.frees, seen.truncations, seen.dropped);
  printf("requests     %d, at most %d in flight\n", seen.requests, seen.most_in_flight);
  printf("answers      %d checked, %d wrong; largest difference of o %.1e, of lse %.1e\n",
         seen.answers, seen.wrong, seen.worst_o, seen.worst_lse);

  for (int i = 0; i < kBeams; ++i) {
    free_sequence(beams[i]);
  }
  free_sequence(greedy);
  free_sequence(guess);
  free_sequence(prompt);
  kvm_queue_destroy(queue);
  kvm_arena_destroy(arena);
  kvm_client_close(client);
  return same && seen.wrong == 0 ? 0 : 1;
}
