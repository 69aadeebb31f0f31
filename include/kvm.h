/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvm.h - the C interface of kvm, a KV-cache service for LLM inference engines.
 *
 * This header is the contract; everything else in the project implements it. It reads from top to
 * bottom as a tutorial:
 *
 *    1  status codes and errors          7  the data path: append, attend, step
 *    2  connecting                       8  observe, read, merge
 *    3  what a client can learn          9  the asynchronous data path
 *    4  queues                          10  statistics
 *    5  arenas and buffers                 11  administration
 *    6  spaces and sequences
 *
 * What the service does. An engine appends the keys and values of its tokens and sends queries; it
 * gets back an ATTENTION STATE for each query row and q head: the softmax-weighted mean of the
 * values (o) and the natural logarithm of the sum of the exponentiated logits (lse). The keys and
 * values stay with the service (the daemon kvmd, or the embedded engine in the caller's process:
 * same functions, same results). States over disjoint key sets merge exactly:
 *
 *    lse = ln(e^lse_a + e^lse_b)      o = e^(lse_a - lse) o_a + e^(lse_b - lse) o_b
 *
 * so an engine may attend part of its keys itself and merge (kvm_merge).
 *
 * The smallest use, without error handling:
 *
 *    kvm_client *client;  kvm_queue *queue;  kvm_space_id space;  kvm_seq_id seq;
 *    kvm_connect(NULL, &client);
 *    kvm_queue_create(client, NULL, &queue);
 *    kvm_space_params geometry = {.struct_size = sizeof geometry, .name = "my-model",
 *        .n_layers = 32, .n_q_heads = 32, .n_kv_heads = 8, .head_dim_k = 128};
 *    kvm_space_register(client, &geometry, &space);
 *    kvm_seq_create(client, space, NULL, &seq);
 *    for each token, for each layer:
 *        kvm_item item = {.seq = seq, .append_position = KVM_POSITION_END, .n_append = 1,
 *                         .n_query = 1, .query_position = KVM_POSITION_END};
 *        kvm_step_params step = {.struct_size = sizeof step, .space = space, .layer_begin = layer,
 *            .n_items = 1, .items = &item,
 *            .k = kvm_host_tensor(k, k_bytes, KVM_DTYPE_BF16),   ... v, q, o, lse alike ...};
 *        kvm_step(queue, &step, NULL);
 *
 * Before your engine runs, ten things that are easily missed
 *
 *    1  RoPE is yours: append K rotated and send q rotated, normed and so on. The service stores
 *       and multiplies what it gets; rope_layout serves KVM_POSITIONS_IN_CACHE alone.
 *    2  codec 0 of a space stores K and V as BF16, whatever dtype the tensors of requests have;
 *       name KVM_CODEC_F32 to keep fp32.
 *    3  Logits are q.k / sqrt(head_dim_k) unless softmax_scale of the space, or scale of the
 *       request, is set. The service multiplies, before the soft-cap: do not scale q as well.
 *    4  q head h reads kv head h / group, group = n_q_heads / n_kv_heads, 1 to 128: the q heads of
 *       a kv head lie side by side. Rows are [head][dim]; other strides are said in the tensor.
 *    5  Each layer is appended to and has a length of its own. append_position is that length: pass
 *       the number you believe, and a step that is off by one fails with HOLE, not with bad text.
 *    6  A query row at position p sees the tokens at positions up to p, its own included: append it
 *       in the same kvm_step, or before. KVM_POSITION_END: the layer's last n_query tokens.
 *    7  A queue belongs to one thread at a time: make one for each thread that waits. To overlap
 *       requests, put many sequences into one, or several *_async requests into a queue.
 *    8  Buffers are yours, and must not be touched between *_async and its completion. Those of an
 *       arena go without a copy; HOST ones are copied by the thin library.
 *    9  Check every status, of completions too. kvm_last_error() has the sentence until the next
 *       call of kvm on this thread. An append that fails has appended nothing, to no item.
 *   10  Beams are kvm_seq_fork, rejected drafts kvm_seq_truncate, finished texts kvm_seq_free. Take
 *       the completions of a sequence's requests first: between queues, order begins there.
 *
 * Conventions that hold everywhere
 *
 *  - A parameter structure starts with struct_size, which the caller sets to sizeof. Fields are
 *    only ever added at the end: a larger structure than the library knows is accepted when the
 *    unknown bytes are zero, a smaller one is extended with zeros. Zero means "default" in every
 *    field. A NULL pointer to parameters means all defaults. Reserved fields must be zero.
 *  - An output structure starts with struct_size as well; at most that many bytes are written.
 *  - Every fallible function returns kvm_status: KVM_OK (0) or a negative code. Output parameters
 *    are untouched on failure. After a failure kvm_last_error() has a sentence that names the value
 *    and what is allowed. Unless a function says otherwise, a failed call has changed nothing.
 *  - "Fails:" leaves out what is the same everywhere: INVALID (a NULL, a struct_size, a flag or a
 *    reserved field that is not allowed), FORKED, NO_MEMORY (of this process), INTERNAL; and of
 *    functions that ask the service DISCONNECTED and PROTOCOL.
 *  - Control calls, which are those that take a kvm_client, wait for the daemon for at most
 *    kvm_connect_params.timeout_ns and then answer TIMEOUT: it may be stopped, or the call may wait
 *    for earlier requests on its sequence. The connection stays as it is; the call may still take
 *    effect, but a queue, an arena or a sequence that it makes too late is given back. Calls of
 *    several threads take turns, and the time counts from a call's turn. Pings and calls on
 *    sequences share a queue that the library makes with the first of them, which may therefore
 *    fail as kvm_queue_create. An engine in this process has no such limit.
 *  - Calls on a queue that wait do so as long as the daemon's process lives; kvm_wait has a limit.
 *  - Handles (kvm_client, kvm_queue, kvm_arena) are opaque and belong to the process that made
 *    them; after fork() the child may only forget them (calls return KVM_ERR_FORKED), and what
 *    lies in arenas is not in its memory. Ids
 *    (kvm_space_id, kvm_seq_id) are 64-bit numbers that live in the service; an id is never
 *    reused, so a stale one is recognised. 0 is never a valid id.
 *  - Threads: functions that take a kvm_client may be called from any thread. A kvm_queue belongs
 *    to one thread at a time. A kvm_arena may be used from any thread. The thin library starts no
 *    threads and installs no signal handlers; the embedded one starts the workers that
 *    kvm_embedded_params asks for. Callbacks run on the calling thread.
 *  - Positions count tokens from 0 and lie below 2^38. A token's position is where it was appended;
 *    it never changes.
 *  - Floating-point parameters must be finite unless stated.
 *  - Shapes are written [outer][inner]; strides are in ELEMENTS.
 */
#ifndef KVM_H_
#define KVM_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(KVM_BUILDING_LIBRARY) && (defined(__GNUC__) || defined(__clang__))
#define KVM_API __attribute__((visibility("default")))
#else
#define KVM_API
#endif

#define KVM_VERSION_MAJOR 0
#define KVM_VERSION_MINOR 1
#define KVM_VERSION_PATCH 0

/* ============================================================================================
 * 1. Status codes and errors
 * ============================================================================================ */

/* KVM_OK or one of KVM_ERR_*. Values are never reused; ranges group them by class. */
typedef int32_t kvm_status;

enum {
  KVM_OK = 0,
  /* The caller. */
  KVM_ERR_INVALID = -1,   /* a parameter is out of its range, or two contradict each other */
  KVM_ERR_NOT_FOUND = -2, /* no object has this id or name */
  KVM_ERR_EXISTS = -3,    /* the name is taken by an object with other parameters */
  KVM_ERR_AGAIN = -4,     /* the queue is full: take completions first */
  KVM_ERR_TIMEOUT = -5,   /* the time given has passed; the request goes on */
  KVM_ERR_BUSY = -6,      /* the object has users (a space with sequences, say) */
  KVM_ERR_HOLE = -7,      /* append would leave a hole or overwrite: position is not the length */
  KVM_ERR_PARTIAL = -8,   /* tokens that this needs have been dropped */
  KVM_ERR_STALE = -9,     /* the id was valid once; its object is gone */
  /* Resources. */
  KVM_ERR_NO_MEMORY = -10, /* the machine refused memory */
  KVM_ERR_NO_SPACE = -11,  /* the service's capacity for this tier is used up */
  KVM_ERR_QUOTA = -12,     /* this client's share is used up, or that of its user's clients */
  KVM_ERR_LIMIT = -13,     /* a fixed limit is reached */
  /* Storage. */
  KVM_ERR_IO = -20,
  KVM_ERR_CORRUPT = -21, /* a checksum did not match */
  KVM_ERR_LOST = -22,    /* the service restarted and no longer has this object */
  /* Connection. */
  KVM_ERR_DISCONNECTED = -30, /* the daemon is gone; see kvm_client_reconnect */
  KVM_ERR_PROTOCOL = -31,     /* the other side broke the protocol; the connection is closed */
  KVM_ERR_VERSION = -32,      /* no protocol version in common */
  KVM_ERR_PERMISSION = -33,
  KVM_ERR_FORKED = -34, /* a handle was used in a child of the process that made it */
  /* Capabilities. */
  KVM_ERR_UNSUPPORTED = -40, /* known to this header, not offered by this service */
  KVM_ERR_DEVICE = -41,
  /* Execution. */
  KVM_ERR_CANCELLED = -50,
  KVM_ERR_DEADLINE = -51, /* the deadline passed before the request started */
  KVM_ERR_ACCURACY = -52, /* eps needs more than the budget; the best estimate is in place. No
                           * mode answers it yet */
  KVM_ERR_INTERRUPTED = -53, /* kvm_queue_params.is_interrupted ended a wait; requests go on */
  KVM_ERR_INTERNAL = -99  /* a defect in kvm; please report the sentence */
};

/* Version of the library that is linked: major * 1000000 + minor * 1000 + patch.
 * Threads: any. Never fails. */
KVM_API uint32_t kvm_version(void);

/* The same as text, "0.1.0". Static storage. */
KVM_API const char *kvm_version_string(void);

/* Name of a status constant, "KVM_ERR_INVALID"; "KVM_ERR_UNKNOWN" for other values. Static. */
KVM_API const char *kvm_status_name(kvm_status status);

/* The sentence that belongs to the last failure of a kvm call on this thread, without the status
 * name; "" when none failed yet. Valid until the next kvm call of this thread. Never NULL. */
KVM_API const char *kvm_last_error(void);

enum { KVM_LOG_ERROR = 0, KVM_LOG_WARNING = 1, KVM_LOG_INFO = 2, KVM_LOG_DEBUG = 3 };

/* Receives the library's own messages (connection lost, fallback taken). NULL switches them off,
 * which is the default. The callback runs on the thread whose call logs, must not call kvm, and
 * `message` is valid during the call only.
 * Threads: set it before other calls; replacing it while others run is allowed. */
KVM_API void kvm_set_log_callback(void (*callback)(int level, const char *message, void *user),
                                  void *user);

/* ============================================================================================
 * 2. Connecting
 * ============================================================================================ */

/* A connection to kvmd, or an engine in this process. */
typedef struct kvm_client kvm_client;

typedef struct kvm_connect_params {
  uint32_t struct_size;
  uint32_t flags; /* reserved, zero */
  /* Path of the daemon's socket. NULL: $KVM_SOCKET, else $XDG_RUNTIME_DIR/kvm/kvmd.sock if it
   * exists, else /run/kvm/kvmd.sock. At most 107 bytes. */
  const char *socket_path;
  /* The name by which the daemon's log calls this client; at most 63 bytes. NULL: the process's
   * name. */
  const char *client_name;
  uint64_t timeout_ns; /* for the handshake and for each control call; 0: 5 s */
  uint64_t reserved[4];
} kvm_connect_params;

/* Connects to the daemon.
 * params   NULL or see above.
 * out      receives the client; release with kvm_client_close.
 * Fails:   DISCONNECTED (nobody listens at the path), VERSION, PERMISSION, LIMIT (too many
 *          clients, or no file descriptors left), TIMEOUT, PROTOCOL (who listens is no kvmd),
 *          INVALID, IO. Nothing is left behind.
 * Threads: any. */
KVM_API kvm_status kvm_connect(const kvm_connect_params *params, kvm_client **out);

typedef struct kvm_embedded_params {
  uint32_t struct_size;
  uint32_t flags;               /* reserved, zero */
  uint32_t n_threads;           /* that compute, the calling thread included; 0: one per core */
  uint32_t reserved0;           /* zero */
  uint64_t host_capacity_bytes; /* hard cap of KV memory; 0: 60 % of the machine's free memory */
  uint64_t reserved[4];
} kvm_embedded_params;

/* Opens an engine inside this process: the same functions and results, no daemon. HOST buffers are
 * used in place. Only libkvm_embedded has it; the thin libkvm answers UNSUPPORTED.
 * KVM_AUDIT_EVERY and KVM_COST_MODEL of the environment mean what they mean to kvmd, but without
 * the first nothing is audited. KVM_FORCE_ISA names kernels, as kvm_client_info.isa has them; those
 * that this machine cannot run are INVALID.
 * Fails:   INVALID, NO_MEMORY, UNSUPPORTED. Threads: any. */
KVM_API kvm_status kvm_open_embedded(const kvm_embedded_params *params, kvm_client **out);

/* Connects again after DISCONNECTED, with the parameters of kvm_connect. Queues and arenas of the
 * client must have been destroyed. Sequences of the old connection are gone: their ids give
 * KVM_ERR_LOST; spaces must be registered again. On an embedded client, or on a live connection
 * (that of a daemon which is stopped is live), nothing happens and KVM_OK is returned.
 * Fails:   as kvm_connect, and BUSY while queues or arenas remain; the client stays disconnected.
 * Threads: no other call on this client may be running. */
KVM_API kvm_status kvm_client_reconnect(kvm_client *client);

/* Closes a client and frees its sequences. Queues and arenas that still exist become unusable
 * (their calls return DISCONNECTED, kvm_poll and kvm_wait once they have given what was
 * outstanding; what is in the arenas is undefined) and must still be destroyed, in any order, which
 * suits languages that finalise in arbitrary order. NULL is accepted.
 * Threads: no other call on this client may be running. */
KVM_API void kvm_client_close(kvm_client *client);

/* ============================================================================================
 * 3. What a client can learn
 * ============================================================================================ */

enum {
  KVM_FEATURE_EVENTFD = 1u << 0,  /* kvm_queue_fd works */
  KVM_FEATURE_EMBEDDED = 1u << 1, /* this client is an engine in this process */
  KVM_FEATURE_DEVICE = 1u << 2    /* a kvmd that owns memory of GPUs, which kvm_cuda_open can ask
                                   * for; a client of kvm_cuda_open */
};

typedef struct kvm_client_info {
  uint32_t struct_size;
  uint32_t protocol_major;
  uint32_t protocol_minor;
  uint32_t features; /* KVM_FEATURE_* */
  uint64_t epoch;    /* differs for every start of the service */
  uint64_t client_id;
  uint32_t server_pid;
  uint32_t n_threads; /* that compute */
  /* Limits. */
  uint32_t max_queues;
  uint32_t max_arenas;
  uint32_t max_outstanding; /* requests in flight per queue */
  uint32_t max_items;       /* per request */
  uint32_t max_query_rows;  /* of one item */
  uint32_t max_spaces;
  uint64_t max_arena_bytes;
  uint64_t max_sequences; /* of this client */
  uint64_t host_capacity_bytes;
  uint64_t quota_bytes;    /* KV memory this client may hold */
  char isa[16];            /* kernel table in use: "scalar", "avx2", "avx512", "avx512bf16" */
  char server_version[16]; /* of the service, "0.1.0" */
  uint64_t reserved[4];
} kvm_client_info;

/* Facts about the connection and its limits; no round trip.
 * Fails:   INVALID, FORKED. Threads: any. */
KVM_API kvm_status kvm_client_get_info(kvm_client *client, kvm_client_info *out);

/* One null request there and back. out_ns (may be NULL) receives the time it took.
 * Fails:   TIMEOUT. Threads: any. */
KVM_API kvm_status kvm_client_ping(kvm_client *client, uint64_t *out_ns);

/* ============================================================================================
 * 4. Queues
 * ============================================================================================ */

/* A pair of rings: requests to the service, completions back. Requests of one queue that touch the
 * same sequence take effect in the order of submission; between queues, order holds from the
 * moment when a completion was seen. */
typedef struct kvm_queue kvm_queue;

typedef struct kvm_queue_params {
  uint32_t struct_size;
  uint32_t flags;     /* reserved, zero */
  uint32_t n_entries; /* requests in flight; 0: 256; rounded up to a power of two, at most 256 */
  uint32_t reserved0; /* zero */
  /* How long a wait spins before it sleeps; 0: 50 us; UINT64_MAX: for ever. Where the last waits
   * took longer, a wait sleeps first, until shortly before it should be over, and spins then. But
   * for UINT64_MAX, a wait that finds others wanting its core sleeps at once. */
  uint64_t spin_ns;
  /* kvm_wait of the queue asks it, on its thread, every 10 ms or so of waiting and after a signal
   * has ended a sleep; other than 0: the wait ends with INTERRUPTED. NULL: nothing is asked. It
   * must not call kvm. Calls that are made and waited for at once (kvm_step) do not ask: make them
   * *_async and wait. */
  int (*is_interrupted)(void *user);
  void *interrupt_user; /* passed to it */
  uint64_t reserved[2];
} kvm_queue_params;

/* Makes a queue. Fails: QUOTA (max_queues; arenas, of which each queue has one; embedded it is
 * LIMIT), NO_MEMORY, TIMEOUT, INVALID (n_entries). Threads: any. */
KVM_API kvm_status kvm_queue_create(kvm_client *client, const kvm_queue_params *params,
                                    kvm_queue **out);

/* Cancels what is outstanding, waits for what is running, and releases the queue. A daemon that
 * answers nothing at all, no control call either, is waited for during one timeout
 * (kvm_connect_params.timeout_ns). If requests were in flight then, the connection is closed, so
 * that nothing the daemon does later counts; else it stays, and the daemon gives the queue back
 * when it goes on. NULL is accepted. Threads: the owner. */
KVM_API void kvm_queue_destroy(kvm_queue *queue);

/* A descriptor that polls readable when completions are there, or the daemon is gone, for event
 * loops; or -1 when the service does not offer it (KVM_FEATURE_EVENTFD) or the system refuses one.
 * Owned by the queue: do not close or read it; kvm_poll resets it. An engine in this process, which
 * otherwise computes on the threads that wait for it, starts a thread of its own with the first
 * call: requests of queues with a descriptor are done without being waited for.
 * Threads: the owner. */
KVM_API int kvm_queue_fd(kvm_queue *queue);

/* ============================================================================================
 * 5. Arenas and buffers
 * ============================================================================================ */

enum {
  KVM_BUFFER_NONE = 0,   /* no data; the whole buffer is zero */
  KVM_BUFFER_HOST = 1,   /* address in this process; the thin library copies the bytes */
  KVM_BUFFER_ARENA = 2,  /* offset in an arena: no copy */
  KVM_BUFFER_DEVICE = 3  /* device memory, for kvm_cuda.h: UNSUPPORTED by this header */
};

/* Where bytes lie. Made by kvm_arena_alloc or kvm_host_buffer. 24 bytes. */
typedef struct kvm_buffer {
  uint32_t kind;   /* KVM_BUFFER_* */
  uint32_t region; /* ARENA: which arena; else zero */
  uint64_t where;  /* HOST: address; ARENA: offset in bytes */
  uint64_t size;   /* bytes */
} kvm_buffer;

/* Memory shared with the service, for q, k, v and outputs without copies. When the service closes
 * the connection (kvm_evict), it clears what is in there, at once. */
typedef struct kvm_arena kvm_arena;

typedef struct kvm_arena_params {
  uint32_t struct_size;
  uint32_t flags; /* reserved, zero */
  uint64_t size;  /* bytes; rounded up to 4096; at most max_arena_bytes; 0: 16 MiB */
  uint64_t reserved[4];
} kvm_arena_params;

/* Makes an arena. Its memory is allocated at once (0.7 s a GiB), so make it early.
 * Fails:   LIMIT (max_arena_bytes; embedded, max_arenas), QUOTA (max_arenas, and of bytes),
 *          NO_MEMORY, TIMEOUT. Threads: any. */
KVM_API kvm_status kvm_arena_create(kvm_client *client, const kvm_arena_params *params,
                                    kvm_arena **out);

/* Releases an arena and every buffer in it. No request that uses it may be outstanding.
 * NULL is accepted. Threads: no other call on this arena may be running. */
KVM_API void kvm_arena_destroy(kvm_arena *arena);

/* Takes `size` bytes, aligned to `alignment` (a power of two up to 4096; 0: 64), out of the arena.
 * Contents are undefined. Fails: NO_SPACE (too little contiguous room), INVALID, DISCONNECTED.
 * Threads: any. */
KVM_API kvm_status kvm_arena_alloc(kvm_arena *arena, uint64_t size, uint64_t alignment,
                                   kvm_buffer *out);

/* Gives a buffer back. A buffer of another arena, or one of kind NONE, is ignored. Threads: any. */
KVM_API void kvm_arena_free(kvm_arena *arena, kvm_buffer buffer);

/* Address of a buffer's first byte in this process; NULL when it is not of this arena.
 * Valid until the arena is destroyed. Threads: any. */
KVM_API void *kvm_arena_data(kvm_arena *arena, kvm_buffer buffer);

/* Types of the elements of tensors. */
enum {
  KVM_DTYPE_F32 = 1,
  KVM_DTYPE_F16 = 2,
  KVM_DTYPE_BF16 = 3
};

/* Rows of heads in a buffer. Element (layer, row, head, i) lies at
 * layer * stride_layer + row * stride_row + head * stride_head + i. A stride of 0 means packed,
 * [layer][row][head][dim]. Strides must be such that elements do not overlap: those of the rows of
 * one item, and in outputs those of different items. So [batch][head][token][dim] is a tensor with
 * stride_row = dim, stride_head = n_tokens * dim, and the rows of batch entry b begin at row
 * b * n_heads * n_tokens. 56 bytes. */
typedef struct kvm_tensor {
  kvm_buffer buffer;
  uint32_t dtype;    /* KVM_DTYPE_F32, F16 or BF16 */
  uint32_t reserved; /* zero */
  uint64_t stride_layer;
  uint64_t stride_row;
  uint64_t stride_head;
} kvm_tensor;

/* A HOST buffer over `size` bytes at `data`, and a packed tensor over it. */
static inline kvm_buffer kvm_host_buffer(const void *data, uint64_t size) {
  kvm_buffer buffer = {KVM_BUFFER_HOST, 0, 0, 0};
  buffer.where = (uint64_t)(uintptr_t)data;
  buffer.size = size;
  return buffer;
}

static inline kvm_tensor kvm_host_tensor(const void *data, uint64_t size, uint32_t dtype) {
  kvm_tensor tensor = {{KVM_BUFFER_HOST, 0, 0, 0}, 0, 0, 0, 0, 0};
  tensor.buffer = kvm_host_buffer(data, size);
  tensor.dtype = dtype;
  return tensor;
}

/* ============================================================================================
 * 6. Spaces and sequences
 * ============================================================================================ */

/* A space is the geometry and identity of one model's KV. */
typedef uint64_t kvm_space_id;

enum {
  KVM_ROPE_NONE = 0,        /* no rotation, or the service need not know */
  KVM_ROPE_HALF = 1,        /* pairs (i, i + n_pairs): Llama as published by most libraries */
  KVM_ROPE_INTERLEAVED = 2  /* pairs (2i, 2i + 1): GPT-J */
};

enum {
  KVM_LAYER_OWN = 0,    /* the layer stores its own K and V */
  KVM_LAYER_ALIAS = 1,  /* reads the store of layer `target`; append to it is an error */
  KVM_LAYER_ABSENT = 2, /* stores nothing and cannot be attended */
  /* MiniCache (Liu et al., arXiv 2405.14366): the layer and the one below it, which is OWN, share
   * directions. Pages of 64 tokens that are full and committed in both become one: of each token
   * and kv head, K and V apart, the direction between those of the two rows, and both lengths. The
   * shallower row is read with an error of 2 sin(pair_t w / 2) of its length, the deeper one of
   * 2 sin((1 - pair_t) w / 2), where w is the angle between them; lengths are exact. Of each page
   * the pair_gamma tokens with the largest angles keep both rows as they are. At head_dim 128, bf16
   * and .05 a pair takes 54.7 % of the bytes of two layers. A page with a row that is not finite,
   * or of a length above 2^100 or below 2^-100 that is not 0, stays two. What is cut off a page
   * leaves it as it is; appending to the rest makes two of it again, whose rows are what was read
   * of it before. Both layers have the same kv heads, dims, policies (FULL or SINKS_RECENT) and
   * codecs (F32, F16 or BF16), and no index; their pages stay in memory, and kvm_seq_save is
   * UNSUPPORTED. UNSUPPORTED by a kvmd that does not know it. */
  KVM_LAYER_PAIR = 3
};

/* Overrides for a range of layers. Later entries win over earlier ones. */
typedef struct kvm_layer_params {
  uint32_t layer_begin;
  uint32_t n_layers;   /* at least 1; PAIR: 1, the deeper layer of a pair */
  uint32_t kind;       /* KVM_LAYER_* */
  uint32_t target;     /* ALIAS: a layer of kind OWN with the same head counts and dims; PAIR: 0 */
  uint32_t n_q_heads;  /* 0: as the space */
  uint32_t n_kv_heads; /* 0: as the space; must divide n_q_heads into groups of 1 to 128 */
  uint64_t window;     /* query at p sees keys at positions > p - window; 0: all */
  uint32_t head_dim_k; /* multiple of 8, 8 to 576; 0: as the space, of an ALIAS as its target */
  uint32_t head_dim_v; /* likewise */
  float pair_t;     /* PAIR: weight of the deeper row's direction, up to 1; 0: .6. Others: 0 */
  float pair_gamma; /* PAIR: share of tokens that keep both rows, in sixteenths, rounded up; 1:
                     * nothing is shared; 0: .05. Others: 0 */
} kvm_layer_params;

enum {
  KVM_RETAIN_FULL = 0,        /* every token stays */
  /* A query at p sees positions < n_sinks and > p - n_recent; pages that no later query can see are
   * freed once their tokens are committed. */
  KVM_RETAIN_SINKS_RECENT = 1,
  /* RazorAttention: the pages that SINKS_RECENT would free become one entry: the mean of their
   * keys and of their values, with the logarithm of how many they were as its log-weight, at the
   * position of the last of them. A query sees this entry and all tokens that are stored, so at
   * least those it sees with SINKS_RECENT. A head has pages of its own, and no index; the layers
   * that read it have no window. */
  KVM_RETAIN_SINKS_RECENT_FOLD = 2,
  /* H2O: of the pages that SINKS_RECENT would free, and of what was kept of such pages before,
   * the n_heavy tokens with the largest attention mass stay: the sum of the softmax weights that
   * all queries so far gave them, over the q heads of the group, and what kvm_observe added. Equal
   * ones: the earlier. A query sees all tokens that are stored. Each head chooses for itself, has
   * pages of its own, and no index; the layers that read it have no window. */
  KVM_RETAIN_HEAVY = 3,
  /* Unified Layer Skipping (arXiv 2404.06954): for all heads of a layer that decoding skips. Every
   * token stays until the prompt is committed (KVM_ITEM_PROMPT_END); then the layer's full pages
   * are freed, and those of what it gets later. Attends of it answer PARTIAL from then on, and so
   * do cuts within the prompt; it has no index. n_sinks, n_recent and slack are 0. INVALID by a
   * kvmd that does not know it. */
  KVM_RETAIN_PROMPT = 4
};

/* What a HEAVY head makes of the tokens that it gives up. WEIGHTED is as in D2O (Wan et al., arXiv
 * 2406.13035): each looks for the kept token of its head with the largest cosine of their keys.
 * From a threshold on it joins that one, whose key and value become the mean of itself, with weight
 * e, and of those that join it at a time, with weights e^cosine; below, it is dropped. A head's
 * threshold is the mean of the cosines of the first time, and then half of what it was and half of
 * their mean. A time is what one request's commit gives up, 1,024 tokens at most. kvm_read gives
 * what has become of a token. */
enum {
  KVM_MERGE_NONE = 0, /* they are dropped: H2O */
  KVM_MERGE_WEIGHTED = 1,
  KVM_MERGE_COUNTED = 2, /* and a token counts for as many as have become it: its logit grows by the
                          * logarithm of their number */
  /* MiKV (Yang et al., arXiv 2402.18096): they stay, in the codecs demoted_k and demoted_v of
   * kvm_codec_params, which the head needs, and queries see them like the others. The others are
   * the sinks' pages, the recent tokens and the heavy ones, n_heavy rounded up to a multiple of 64;
   * who was demoted stays so. Where such a token was is not kept: kvm_read of one is PARTIAL, and
   * so are cuts among tokens that may have been demoted; items with ranges are UNSUPPORTED, and the
   * space has no alibi_slopes. A head with a number that its codecs cannot hold (I4: not finite, or
   * above 2^126) demotes nothing from there on. INVALID by a kvmd that does not know it. */
  KVM_MERGE_DEMOTED = 3
};

/* How the tokens that HEAVY heads keep are shared out among layers. */
enum {
  KVM_BUDGETS_EQUAL = 0, /* a head keeps n_recent and n_heavy tokens, whatever its layer */
  /* D2O (arXiv 2406.13035): layers whose attention is spread out keep more than others. Heads keep
   * every token until the prompt ends (KVM_ITEM_PROMPT_END); then layer l of the L that have such
   * heads gets the share s(l) = L e^-F(l) / (e^-F(1) + ... + e^-F(L)), and its heads keep s(l)
   * n_recent and s(l) n_heavy tokens from there on. F(l) is the mean, over its heads of this kind,
   * of the variance of the attention mass among the tokens that it has then (behind the sinks'
   * pages), brought to 0 to 1 by the smallest and the largest of these heads; of a single head it
   * is 0. So shares add up to L, and the largest is at most e times the smallest; tokens are whole,
   * at least one. Forks have the shares of their parent. UNSUPPORTED by a kvmd before protocol
   * 1.7. */
  KVM_BUDGETS_BY_DENSITY = 1
};

/* Says what a query's position means to the keys of a head. IN_CACHE (StreamingLLM): the n_sinks
 * first tokens and the n_recent last ones count as neighbours, whatever was between them. With
 * d = max(0, p - n_recent + 1 - n_sinks), a query at p meets the keys of sinks as if it were at
 * p - d; the service rotates it by -d for them. Rows of a TREE item all have the d of the first.
 * It wants SINKS_RECENT and a rope_layout whose frequencies do not change with the length, and no
 * window in the layers that read the head, which has no index. */
enum {
  KVM_POSITIONS_ABSOLUTE = 0, /* as appended */
  KVM_POSITIONS_IN_CACHE = 1
};

/* Codecs: how K and V are stored. A row is one token of one kv head; a page has 64 tokens. New
 * codecs get new numbers: kvm_codec_find finds one by its name. */
enum {
  KVM_CODEC_F32 = 1,  /* "fp32": as F32 tensors */
  KVM_CODEC_F16 = 2,  /* "fp16" */
  KVM_CODEC_BF16 = 3, /* "bf16" */
  /* "int8". Each row has a scale, the bf16 nearest to its largest magnitude / 127, and its channels
   * are rounded to the nearest multiple of that (ties to even), from -127 to 127 times; scales
   * below 2^-126 count as that. A row with a channel that is not finite reads as NaN in all. Rows
   * take a byte a channel and two bytes, about half of what BF16 takes, and attention over them has
   * an error of 0.3 to 1 %. */
  KVM_CODEC_I8 = 4,
  /* "fp8". Each row has a scale, the bf16 nearest to its largest magnitude / 448, and its channels
   * divided by that are rounded to the nearest e4m3 number (the 8-bit floating point format of the
   * Open Compute Project with 4 bits of exponent and 3 of mantissa: from 2^-9 to 448; ties to
   * even). Scales below 2^-126, and rows that are not finite, as with I8; rows take what I8's take.
   * A channel is within 1/16 of what was appended, or within 2^-10 of the scale where that is more:
   * the error does not depend on how large other channels are. For models and engines whose caches
   * are fp8, and for rows with outliers: of Gaussian rows the error is 2.6 % of their length, four
   * times that of I8. Where one channel is 100 times as large as the others, the error of the
   * others is still 2.6 %, and 22 % with I8; where it is a dozen times as large, the two are
   * equal. */
  KVM_CODEC_F8E4M3 = 5,
  /* "int8_channel". As I8, but with a scale for each channel of a head's 64 tokens of a page, and
   * none for rows: channels that are large in all tokens, which keys have, take no bits from the
   * others. A row takes 8.25 bits a channel. A page is stored so once it is full and committed, at
   * the end of the request that committed it, and until then as BF16: what a step appends it sees
   * as BF16, and a prompt takes the memory of BF16 until its last layer is appended. A page in
   * which a number is not finite, or above 2^127, stays BF16. Where a sequence is cut inside such a
   * page and grows again, what is left of the page is BF16 until it is full once more; the error
   * grows by half a step at most. Heads stored so have no index and are in no device's memory:
   * UNSUPPORTED. Approximate modes answer them exactly. */
  KVM_CODEC_I8_CHANNEL = 6,
  /* 4 and 2 bits a channel: codes count steps of a scale up from a zero, both bf16, as many as 15
   * or 3. So a channel is off by half a scale at most, 1/30 or 1/6 of what lies between the
   * smallest and the largest bf16 that share it. What shares them:
   *   "int4", "int2"                  64 channels of a row, the last ones what is left: for values
   *                                   (KIVI, arXiv 2402.02750)
   *   "int4_channel", "int2_channel"  a channel of a head's 64 tokens of a page: for keys (KIVI)
   *   "int4_centred", "int2_centred"  64 channels of a row, without the mean, a bf16, that each
   *                                   channel has over the page's 64 tokens: for keys, too
   * Where head_dim is a multiple of 64, scales and zeros take half a bit a channel, means a quarter
   * more: rows take 4.5 to 4.75, or 2.5 to 2.75 bits a channel where BF16 takes 16. Begin with keys
   * in int4_channel and values in int4; 2 bits cost much. Pages, cuts, what is refused: as with
   * I8_CHANNEL, but that a number above 2^126 keeps a page BF16, and that spaces of I4 may be in a
   * device's memory (kvm_cuda.h). A head whose values alone are stored so has no index either. */
  KVM_CODEC_I4 = 7,
  KVM_CODEC_I4_CHANNEL = 8,
  KVM_CODEC_I4_CENTRED = 9,
  KVM_CODEC_I2 = 10,
  KVM_CODEC_I2_CHANNEL = 11,
  KVM_CODEC_I2_CENTRED = 12,
  /* What 4 and 2 bits lose, put back in two ways (GEAR, arXiv 2403.05527): a part of rank 2 for
   * each 64 tokens of a head, and the largest and the smallest element of each vector, which are
   * kept in full:
   *   "gear4_channel", "gear2_channel"  I4_CHANNEL and I2_CHANNEL with it, vectors are channels:
   *                                     for keys
   *   "gear4", "gear2"                  I4 and I2 with it, vectors are tokens: for values
   * At head_dim 128 they take 6 and 5.75, or 4 and 3.75 bits a channel, and are off by a quarter
   * less than the codes alone. (An ordinary bit halves the error: where memory decides, take
   * I4_CHANNEL before GEAR2_CHANNEL.) Pages, cuts, what is refused: as with I4. */
  KVM_CODEC_GEAR4_CHANNEL = 13,
  KVM_CODEC_GEAR4 = 14,
  KVM_CODEC_GEAR2_CHANNEL = 15,
  KVM_CODEC_GEAR2 = 16,
  /* "int4_balanced", "int2_balanced": I4 and I2 of keys whose channels were divided by factors, a
   * bf16 for each channel and page, and are multiplied by them when they are read: sqrt(max |k| /
   * max |q|), over the page's 64 tokens and the queries of the head's group that kvm_observe last
   * left (without any: sqrt(max |k|)). So a channel has as much of the codes as it has of the
   * scores (MiKV's balancer, arXiv 2402.18096, section 3.3). At head_dim 128 they take 4.75 and
   * 2.75 bits a channel. Pages, cuts, what is refused: as with I4. */
  KVM_CODEC_I4_BALANCED = 17,
  KVM_CODEC_I2_BALANCED = 18,
  /* "int3", "int3_channel", "int3_centred": as I4, I4_CHANNEL and I4_CENTRED, but codes count up to
   * 7 steps and take 3 bits: a channel is off by 1/14 at most of what lies between the smallest and
   * the largest bf16 that share its scale. At head_dim 128 they take 3.5, 3.5 and 3.75 bits a
   * channel. The layout is KIVI's (arXiv 2402.02750), which has been published in 4 and 2 bits.
   * Attention has no kernels of such codes: it reads these rows as fp32. Pages, cuts, what is
   * refused: as with I4. */
  KVM_CODEC_I3 = 19,
  KVM_CODEC_I3_CHANNEL = 20,
  KVM_CODEC_I3_CENTRED = 21,
  /* "int3_balanced": I3 balanced as I4_BALANCED is, 3.75 bits. "gear3_channel" and "gear3":
   * I3_CHANNEL and I3 as GEAR4_CHANNEL and GEAR4 are, 5 and 4.75 bits. */
  KVM_CODEC_I3_BALANCED = 22,
  KVM_CODEC_GEAR3_CHANNEL = 23,
  KVM_CODEC_GEAR3 = 24
};

/* The name of a codec, "int8" for instance; NULL where there is none of that number.
 * Threads: any. */
KVM_API const char *kvm_codec_name(uint32_t codec);

/* The number of the codec of that name; 0 where there is none. Threads: any. */
KVM_API uint32_t kvm_codec_find(const char *name);

/* How the kv heads of some layers keep their tokens. Heads that share a policy and a codec form a
 * head class, which owns pages of its own: a class that drops tokens frees real memory. Later
 * entries win. A head that no entry names keeps everything. */
typedef struct kvm_policy_params {
  uint32_t layer_begin;
  uint32_t n_layers;        /* 0: to the last layer */
  uint64_t kv_head_mask[2]; /* bit h: kv head h; both zero: all heads */
  uint32_t retention;       /* KVM_RETAIN_* */
  uint32_t positions;       /* KVM_POSITIONS_* */
  uint64_t n_sinks;
  uint64_t n_recent; /* at least 1 but for FULL and PROMPT */
  uint64_t slack;    /* tokens kept beyond n_recent, so that truncate has room; 0: none */
  uint64_t n_heavy;  /* HEAVY only, 1 to 65536 */
  uint32_t merge;    /* HEAVY only, KVM_MERGE_* */
  uint32_t budgets;  /* HEAVY only, KVM_BUDGETS_* */
} kvm_policy_params;

/* How the kv heads of some layers are stored. Later entries win. */
typedef struct kvm_codec_params {
  uint32_t layer_begin;
  uint32_t n_layers;        /* 0: to the last layer */
  uint64_t kv_head_mask[2]; /* as above */
  uint32_t codec_k;         /* KVM_CODEC_*; 0: the space's */
  uint32_t codec_v;
  /* Of what KVM_MERGE_DEMOTED heads demote, KVM_CODEC_*: both needed by these, both 0 for others.
   * codec_k and codec_v are then one of F32, F16, BF16, I8, F8E4M3, I4 and I2 each. */
  uint32_t demoted_k;
  uint32_t demoted_v;
  uint64_t reserved[1];
} kvm_codec_params;

/* An index is kept beside the keys of some kv heads so that approximate modes (section 7) need not
 * read them all. It is derived from the keys, a few bytes of each, and counted in the quota like
 * pages. It is built when the first such request finds it missing, once for all forks of a prompt;
 * it grows from there on. It never makes anything fail: where an append or kvm_observe finds no
 * quota or memory, indexes make way, those that were used longest ago first (but not under a
 * running attend), and their keys are read exactly until there is room again. A head of which
 * queries see fewer than min_tokens tokens, by its policy or its layers' windows, has none. */
enum {
  KVM_INDEX_NONE = 0,
  KVM_INDEX_SKETCH = 1,      /* one of the next three, whichever suits the keys */
  KVM_INDEX_SKETCH_1BIT = 2, /* a bit of each coordinate: 20 bytes of a key of dim 128 */
  KVM_INDEX_SKETCH_8I8 = 3,  /* 8 leading coordinates in int8, a bit of the others: 28 */
  KVM_INDEX_SKETCH_2BIT = 4, /* two bits of each coordinate: 36 */
  KVM_INDEX_LSH = 5          /* hash tables as in MagicPIG: 2 lsh_tables bytes and more */
};

/* The index of the kv heads of some layers. Later entries win. A head that no entry names has
 * none. */
typedef struct kvm_index_params {
  uint32_t layer_begin;
  uint32_t n_layers;        /* 0: to the last layer */
  uint64_t kv_head_mask[2]; /* as in kvm_policy_params */
  uint32_t kind;            /* KVM_INDEX_* */
  uint32_t lsh_bits;        /* LSH only, as the next: 1 to 15; 0: 10 */
  uint32_t lsh_tables;      /* 2 to 512; 0: 150. All LSH entries of a space agree in bits, tables
                             * and seed; lsh_bits * lsh_tables is at most 4096 */
  uint32_t n_sinks;         /* first tokens that are always read; 0: 4; at most 65536 */
  uint32_t n_recent;        /* last tokens that are always read; 0: 64; at most 65536 */
  uint32_t min_tokens;      /* from this length on there is an index, and it begins with what these
                             * tokens look like: 256 to 8192; 0: 4096 */
  uint64_t seed;            /* of rotations and hash planes */
  uint64_t reserved[2];
} kvm_index_params;

enum {
  /* V is the first head_dim_v channels of K's rows, as in multi-head latent attention (DeepSeek V2,
   * 512 of 576): stored once, and read once by an attend. Appends name no v; kvm_read gives both.
   * Codecs of V are those of K. Heads have no index: approximate modes answer them exactly. */
  KVM_SPACE_V_IN_K = 1u << 0
};

typedef struct kvm_space_params {
  uint32_t struct_size;
  uint32_t flags;          /* KVM_SPACE_* */
  const char *name;        /* 1 to 63 bytes of [A-Za-z0-9._/-]; required */
  uint8_t fingerprint[32]; /* of whatever must agree between users (weights, ...) */
  uint32_t n_layers;       /* 1 to 512; required */
  uint32_t n_q_heads;      /* 1 to 1024, of this shard; required */
  uint32_t n_kv_heads;     /* 1 to 128; divides n_q_heads into groups of 1 to 128; 0: n_q_heads */
  uint32_t head_dim_k;     /* multiple of 8, 8 to 576; required */
  uint32_t head_dim_v;     /* likewise; 0: head_dim_k */
  uint32_t codec;          /* of stored K and V, KVM_CODEC_*; 0: BF16 */
  float softmax_scale;     /* multiplies q.k; 0: 1 / sqrt(head_dim_k) of each layer; positive */
  float logit_softcap;     /* logit = cap * tanh(logit / cap); 0.001 to 10000; 0: none */
  uint32_t rope_layout;    /* KVM_ROPE_*. Keys are appended already rotated; the service uses this
                            * to move queries (policies with cache-relative positions) */
  uint32_t n_rope_pairs;   /* entries of rope_inv_freq; at most head_dim_k / 2 */
  const float *rope_inv_freq; /* [n_rope_pairs] angle per position, radians; copied */
  /* [n_layers][n_q_heads] an extra logit without a value in every softmax (attention sinks as in
   * gpt-oss); may be -inf; copied; NULL: none. Every attend counts them, so merging two
   * attends of one layer would count them twice. */
  const float *sink_logits;
  uint32_t shard_index; /* tensor-parallel rank of this geometry's heads, for the identity */
  uint32_t n_shards;    /* 0: 1 */
  const kvm_layer_params *layers; /* [n_layer_params]; copied */
  const kvm_policy_params *policies;
  const kvm_codec_params *codecs;
  uint32_t n_layer_params; /* each at most 1024 */
  uint32_t n_policies;
  uint32_t n_codecs;
  uint32_t n_indexes;
  const kvm_index_params *indexes; /* [n_indexes]; copied */
  /* Requests that say KVM_MODE_DEFAULT take these: see kvm_step_params, whose rules for these
   * numbers hold here too. */
  uint32_t default_mode;     /* KVM_MODE_*; 0: EXACT, with which the next four must be 0 */
  uint32_t default_proposal; /* KVM_PROPOSAL_* */
  float default_eps;         /* 0: 0.03, but none for SAMPLED with a budget */
  float default_delta;
  uint64_t default_budget;
  /* [n_q_heads] ALiBi (Press, Smith and Lewis 2022, section 3), or any bias that is linear in the
   * distance: the logit of a key at position x and a query at p of q head h gets
   * alibi_slopes[h] * (x - p), behind the soft-cap. Magnitudes up to 10000; positions are those of
   * kvm_item, in a TREE and without causality too. Of all layers, whose q heads are at most those
   * of the space; copied; NULL: none. Heads have no index: approximate modes answer them exactly.
   * No KVM_POSITIONS_IN_CACHE, no FOLD. Logits are fp32: biases of magnitude b leave errors of b /
   * 10^7 in them, which counts where all keys that a query sees are so far. */
  const float *alibi_slopes;
  uint64_t reserved[3];
} kvm_space_params;

/* A preset is a published system with the settings of its paper, as entries of kvm_space_params:
 *
 *    kvm_layer_params layers[32];  kvm_policy_params policies[32];  kvm_codec_params codecs[32];
 *    kvm_preset_params system = {.struct_size = sizeof system, .name = "h2o", .n_layers = 32,
 *                                .n_tokens = 8192};
 *    kvm_preset preset = {.struct_size = sizeof preset, .n_layer_params = 32, .n_policies = 32,
 *                         .n_codecs = 32, .layers = layers, .policies = policies,
 *                         .codecs = codecs};
 *    kvm_policy_preset(&system, &preset);
 *    geometry.layers = preset.layers;      geometry.n_layer_params = preset.n_layer_params;
 *    geometry.policies = preset.policies;  geometry.n_policies = preset.n_policies;
 *    geometry.codecs = preset.codecs;      geometry.n_codecs = preset.n_codecs;
 *
 * (alisa also fills indexes, default_mode and default_budget, likewise.)
 *
 * Entries may be changed, and others put behind them, which win. What a system would find out about
 * a model (which heads retrieve, how long its windows are) is the caller's to say; docs/policies
 * has a page for each.
 *
 *   "full"                    every token: no entries
 *   "streaming_llm"           4 sinks, 1,020 recent tokens, positions in the cache (arXiv
 *                             2309.17453); the space says its rope_layout
 *   "duo_attention"           heads of kv_head_masks: 64 sinks, 256 recent (2410.10819)
 *   "razor_attention"         heads of kv_head_masks: 4 sinks, the larger of 4,000 and n_tokens / 5
 *                             recent, the mean of the rest (2407.15891)
 *   "h2o"                     .2 of n_tokens, half of them heavy, half recent (2306.14048)
 *   "mikv", "mikv3", "mikv4"  the same, but what h2o drops stays in 2 bits, or 3, or 4, keys
 *                             balanced (2402.18096)
 *   "alisa"                   nothing is dropped, and attends read .2 of n_tokens, half of them the
 *                             recent ones: int8 rows, an index, SAMPLED by default (2403.17312)
 *   "d2o"                     as h2o beside 4 sinks, merged, shared out by density among layers 2
 *                             to n_layers - 2, the others whole (2406.13035)
 *   "kivi", "kivi3", "kivi4"  keys by channel, values by token, in 2, 3 or 4 bits (2402.02750)
 *   "gear4", "gear3", "gear2" the same, and what codes lose in low rank and outliers (2403.05527)
 *   "yi_lightning"            of 4 layers 3 with a window of 4,096 tokens, the fourth full, full
 *                             ones in pairs that share (2412.01253)
 *   "minicache"               the last n_pairs pairs of layers as KVM_LAYER_PAIR, with .6 and .05
 *                             (2405.14366)
 *   "memory_mosaics"          of two layers the second forgets: it keeps the last window - 1 pairs
 *                             (version 2, 2507.03285)
 *   "skip_decode"             no entries: text says which layers a token reaches (2307.02628)
 *   "unified_layer_skipping"  KVM_RETAIN_PROMPT for the layers that decoding skips at speed_up
 *                             (2404.06954) */
typedef struct kvm_preset_params {
  uint32_t struct_size;
  uint32_t flags;    /* reserved, zero */
  const char *name;  /* one of those above; required */
  uint32_t n_layers; /* of the space, 1 to 512; required */
  uint32_t speed_up; /* unified_layer_skipping: n_layers / speed_up decode, at least 2; 0: 2 */
  /* What shares are of: the length of prompts, say. 0: 4096. Only h2o, mikv (3, 4), alisa,
   * d2o, razor_attention, and streaming_llm with a share look at it. */
  uint64_t n_tokens;
  /* Of n_tokens, how much a head keeps beside d2o's sinks, or is read of it: above 0, up to 1. 0:
   * the paper's. INVALID for systems that know no share. */
  float share;
  uint32_t n_pairs;   /* minicache: up to n_layers / 2; 0: n_layers / 4, half of the layers */
  uint64_t window;    /* yi_lightning: tokens; 0: 4096. memory_mosaics: h; 0: 256 */
  uint64_t slack;     /* as in kvm_policy_params; INVALID where a preset has no such entries */
  /* [n_layers][2] duo_attention, razor_attention: bit h: kv head h of the layer does not retrieve;
   * required there, INVALID elsewhere. */
  const uint64_t *kv_head_masks;
  uint64_t reserved[4];
} kvm_preset_params;

/* Room for n_layers entries is enough for each array. A struct_size that ends with text is that of
 * older headers: presets with an index are UNSUPPORTED there. */
typedef struct kvm_preset {
  uint32_t struct_size;
  uint32_t n_layer_params; /* in: how many the array has room for; out: how many there are */
  uint32_t n_policies;     /* likewise */
  uint32_t n_codecs;       /* likewise */
  kvm_layer_params *layers; /* of the caller; NULL where there is no room */
  kvm_policy_params *policies;
  kvm_codec_params *codecs;
  char text[1024]; /* out: what it resolved to, and what else the engine does; lines, cut to fit */
  uint32_t n_indexes; /* as n_codecs; alisa has one entry, the others none */
  uint32_t default_mode; /* out, as the next: of the same name in kvm_space_params */
  kvm_index_params *indexes;
  uint64_t default_budget;
} kvm_preset;

/* Fills *out. Pure computation in the caller's memory.
 * Fails:   NOT_FOUND (no preset has this name; the sentence has the nearest, and all), UNSUPPORTED
 *          (a published system that cannot be had yet), LIMIT (an array has too little room; the
 *          sentence says how much is needed), INVALID (numbers that the system does not take, too
 *          few layers for it). Threads: any. */
KVM_API kvm_status kvm_policy_preset(const kvm_preset_params *params, kvm_preset *out);

/* The names of presets, from 0 on; NULL behind the last. Static. Threads: any. */
KVM_API const char *kvm_preset_name(uint32_t index);

/* Registers a space, or finds the one that has this name when every parameter agrees. Names are
 * those of a user: the programs of one user share a space by its name, those of others have their
 * own of that name.
 * Fails:   EXISTS (the name has other parameters; the sentence names the first that differs),
 *          INVALID, UNSUPPORTED (proposal GRAPH, an index of heads with dims above 256,
 *          KVM_SPACE_V_IN_K or alibi_slopes, of a layer that pairs, or whose codec has no rows to
 *          be read one by one; policies and codecs that KVM_LAYER_PAIR does not take; alibi_slopes
 *          by a kvmd of protocol 1.5), LIMIT (max_spaces; parameters of more than about 128,000
 *          bytes with all arrays, to a daemon), TIMEOUT.
 * Threads: any. */
KVM_API kvm_status kvm_space_register(kvm_client *client, const kvm_space_params *params,
                                      kvm_space_id *out);

/* Finds a space of the client's user by name. Fails: NOT_FOUND, TIMEOUT. Threads: any. */
KVM_API kvm_status kvm_space_find(kvm_client *client, const char *name, kvm_space_id *out);

typedef struct kvm_space_info {
  uint32_t struct_size;
  uint32_t n_layers;
  kvm_space_id space;
  char name[64];
  uint8_t fingerprint[32];
  uint32_t n_q_heads;
  uint32_t n_kv_heads;
  uint32_t head_dim_k;
  uint32_t head_dim_v;
  uint32_t codec;
  uint32_t n_head_classes;  /* over all layers */
  uint64_t n_sequences;     /* of all clients */
  uint64_t bytes_per_token; /* over all layers, were every token kept */
  uint64_t page_tokens;
  uint32_t default_mode; /* as registered, defaults filled in; with EXACT the next four are 0 */
  uint32_t default_proposal;
  float default_eps;
  float default_delta;
  uint64_t default_budget;
  uint32_t uid;   /* the user whose space it is */
  uint32_t flags; /* KVM_SPACE_* */
  /* Digests of the space as it is resolved; spaces that agree in one agree in what the bytes of
   * pages mean (layers, kv heads, dims, codecs, shard), in which tokens heads keep, in what is
   * indexed and how. What only queries need is in none, the fingerprint neither. 0 from devices and
   * from a kvmd that has none. */
  uint8_t layout_digest[16];
  uint8_t policy_digest[16];
  uint8_t index_digest[16];
  /* Likewise of layers, kv heads, dims and shard alone, whatever the codecs. Devices have it. */
  uint8_t geometry_digest[16];
} kvm_space_info;

/* Fails: NOT_FOUND, STALE, LOST, PERMISSION (another user's), TIMEOUT. Threads: any. */
KVM_API kvm_status kvm_space_get_info(kvm_client *client, kvm_space_id space, kvm_space_info *out);

/* All spaces of the client's user; to the daemon's own user and root those of all users.
 * out [capacity] is filled from the front, each with struct_size set by the caller in
 * out[0] only; *out_count receives how many there are, which may exceed capacity. out may be NULL
 * when capacity is 0. In the order of ids. Lists are read in parts: what lives throughout the call
 * is there once, what comes or goes meanwhile may be there or not. Fails: TIMEOUT (of a part).
 * Threads: any. */
KVM_API kvm_status kvm_space_list(kvm_client *client, kvm_space_info *out, size_t capacity,
                                  size_t *out_count);

/* Removes a space without sequences. Fails: BUSY, NOT_FOUND, STALE, LOST, PERMISSION (another
 * user's; not to the daemon's own user and root), TIMEOUT. Threads: any. */
KVM_API kvm_status kvm_space_drop(kvm_client *client, kvm_space_id space);

/* A sequence is an ordered run of tokens with K and V in every layer, owned by the client that made
 * it and freed with it, unless it is published. Layers may be filled to different lengths; a layer
 * has no holes. */
typedef uint64_t kvm_seq_id;

/* "The end": the present length in append_position, the last n_query tokens in query_position,
 * everything in kvm_seq_fork. */
#define KVM_POSITION_END UINT64_MAX

typedef struct kvm_seq_params {
  uint32_t struct_size;
  uint32_t flags;   /* KVM_SEQ_* */
  /* Tokens to expect, at most 2^38; 0: unknown. The sequence's tables are made for so many, or for
   * the first 2^20 of them (2^26 over all (layer, head class) together, where there are more than
   * 64), and need not grow until then. No memory for keys and values is set
   * aside, and neither more nor fewer tokens are refused for it. */
  uint64_t reserve;
  uint64_t reserved[4];
} kvm_seq_params;

enum {
  KVM_SEQ_MANUAL_COMMIT = 1u << 0, /* final by kvm_seq_commit only; default: on append */
  KVM_SEQ_PUBLISHED = 1u << 1 /* in kvm_seq_info only: it is in the library of its user */
};

/* Makes an empty sequence. Fails: INVALID (reserve), NOT_FOUND, STALE, LOST (the space), PERMISSION
 * (another user's space), QUOTA (max_sequences), LIMIT (of all clients), TIMEOUT. Threads: any. */
KVM_API kvm_status kvm_seq_create(kvm_client *client, kvm_space_id space,
                                  const kvm_seq_params *params, kvm_seq_id *out);

/* Makes a sequence that shares the first n_tokens of `parent` (KVM_POSITION_END: all of it, each
 * layer as long as the parent's) copy-on-write. Costs the same at any length, and no KV memory
 * until one of the two appends into the page that both end in. Indexes are shared as well: what is
 * not built yet is built once, when either first needs it. The child is the client's, also of a
 * sequence that is published, and pays for no page that it has from its parent.
 * Fails:   INVALID (n_tokens is longer than the longest layer), PARTIAL (a policy of the parent has
 *          dropped tokens that queries at n_tokens would see; or n_tokens is inside a page that
 *          kvm_seq_drop has dropped), NOT_FOUND, STALE, LOST, PERMISSION
 *          (a sequence of another client), QUOTA, LIMIT (as kvm_seq_create), TIMEOUT.
 * Threads: any. */
KVM_API kvm_status kvm_seq_fork(kvm_client *client, kvm_seq_id parent, uint64_t n_tokens,
                                kvm_seq_id *out);

/* Rolls every layer back to at most n_tokens; layers that are shorter stay as they are.
 * Fails:   PARTIAL (as in fork; the sequence is as before), NOT_FOUND, STALE, LOST, PERMISSION,
 *          TIMEOUT. A length at or beyond the longest layer changes nothing and is KVM_OK.
 * Threads: any. */
KVM_API kvm_status kvm_seq_truncate(kvm_client *client, kvm_seq_id seq, uint64_t n_tokens);

/* Makes the first n_tokens (KVM_POSITION_END: those that all layers have) final: policies may act
 * on them irreversibly. Layers that are shorter end there: their tokens are final as well, and
 * what they are given later below n_tokens is so at once. The commit point never moves back;
 * truncating below it is allowed as long as nothing needed was dropped, and then moves it.
 * Fails:   INVALID (beyond the longest layer), NOT_FOUND, STALE, LOST, PERMISSION, TIMEOUT.
 * Threads: any. */
KVM_API kvm_status kvm_seq_commit(kvm_client *client, kvm_seq_id seq, uint64_t n_tokens);

/* Frees a sequence; pages that forks share stay with them. Requests that use it are finished first.
 * Fails: NOT_FOUND, STALE, LOST, PERMISSION, TIMEOUT. Threads: any. */
KVM_API kvm_status kvm_seq_free(kvm_client *client, kvm_seq_id seq);

/* Publishes a sequence: it goes to the library of the client's user (its uid), keeps its id, and
 * outlives the client. Every client of that user may fork it, attend to it, read it, take it and
 * free it; none may change it. Attends feed no statistics of it. So a prompt that many
 * conversations begin with is stored once, whoever comes and goes:
 *
 *    kvm_seq_publish(client, prompt);                             one client, once
 *    kvm_seq_fork(other, prompt, KVM_POSITION_END, &chat);        every client, each time
 *
 * What the client paid for in it, the library pays for from then on, also where other sequences
 * share it. The library has no limit of bytes but the user's, and as many sequences as a client may
 * have by default. Costs time in proportion to its pages, in parts between which others are served;
 * requests that use the sequence wait for the last.
 * Fails:   QUOTA (sequences of the library), UNSUPPORTED (a client of kvm_cuda_open), NOT_FOUND,
 *          STALE, LOST, PERMISSION (of another client, or published already), TIMEOUT.
 * Threads: any. */
KVM_API kvm_status kvm_seq_publish(kvm_client *client, kvm_seq_id seq);

/* Takes a published sequence out of the library: it is the client's, and pays for what the library
 * paid for in it. With kvm_seq_publish before, clients of a user hand sequences over. Its indexes
 * come along where there is room for them; otherwise they are built anew when they are needed. A
 * sequence that is the client's already stays as it is, which is KVM_OK.
 * Fails:   QUOTA (it does not fit into the client's limits; it stays where it is), UNSUPPORTED (as
 *          above; or it is a prefix: fork it), NOT_FOUND, STALE, LOST, PERMISSION (of another
 *          client, or user), TIMEOUT.
 * Threads: any. */
KVM_API kvm_status kvm_seq_take(kvm_client *client, kvm_seq_id seq);

/* Prefixes: sequences of the library that are found by the tokens that they begin with. Each full
 * page of KVM_PREFIX_TOKENS tokens has a hash of these tokens and of all before them, so equal
 * hashes are equal prefixes. An engine looks for the longest one that is there before it computes a
 * prompt, which asks nobody: the hashes lie in memory that the service shares with all clients of a
 * user, and a prompt that nobody had costs less than a microsecond.
 *
 *    kvm_prefix_seed(client, space, NULL, 0, &seed);                          once
 *    kvm_prefix_hashes(&seed, tokens, n_tokens, hashes);                      for each prompt
 *    kvm_prefix_find(client, &find, &found);
 *    if (found.n_tokens == 0 ||
 *        kvm_seq_fork(client, found.seq, found.n_tokens, &chat) != KVM_OK)
 *      kvm_seq_create(client, space, NULL, &chat), found.n_tokens = 0;
 *    ... computes what follows found.n_tokens, and then for others: ...
 *    kvm_seq_fork(client, chat, KVM_POSITION_END, &prompt);
 *    kvm_prefix_publish(client, prompt, hashes, n_hashes, 600 * 1000000000ull);
 *
 * docs/prefixes.md has the whole of it, and test vectors of the hashes. */
#define KVM_PREFIX_TOKENS 64

typedef struct kvm_prefix_hash {
  uint8_t bytes[32];
} kvm_prefix_hash;

/* What the hashes of a space begin with, BLAKE2b-256 of its digests of layout and policy and its
 * fingerprint (kvm_space_info), and of the salt: BLAKE2b-256("kvm prefix 1\n" | layout | policy |
 * fingerprint | salt). So equal hashes are of spaces that mean the same by the same bytes, and only
 * who has the salt has them. A salt of its own keeps whoever shares a user with others (the end
 * users of one engine) from learning, by what is found, what prompts these had. salt: of
 * salt_bytes bytes, at most 64; may be null for 0.
 * Fails: INVALID (salt), NOT_FOUND, STALE, LOST (the space), PERMISSION, TIMEOUT. Threads: any. */
KVM_API kvm_status kvm_prefix_seed(kvm_client *client, kvm_space_id space, const void *salt,
                                   size_t salt_bytes, kvm_prefix_hash *out);

/* The hashes of the full pages of tokens: out[i] = BLAKE2b-256(hash before it | the page's tokens
 * as 32-bit little-endian numbers), for i < n_tokens / KVM_PREFIX_TOKENS. before: the seed, or the
 * hash of the page before, to go on from where an earlier call ended. Tokens beyond the last full
 * page have none. out may be null where there is no full page. Fails: INVALID. Threads: any. */
KVM_API kvm_status kvm_prefix_hashes(const kvm_prefix_hash *before, const uint32_t *tokens,
                                     uint64_t n_tokens, kvm_prefix_hash *out);

/* Publishes a sequence (kvm_seq_publish) that begins with the pages of these hashes, so that it is
 * found. It may be longer. keep_ns: it is freed when it has not been forked for so long; 0: it
 * stays until somebody frees it. It never changes, and nobody can take it. Where kvmd keeps
 * snapshots it is saved soon after, and found again behind a restart, once a client of the user has
 * registered the space. Hashes are believed: a wrong one harms the user's own clients alone.
 * Fails:   as kvm_seq_publish; INVALID (n_hashes is 0 or above 65536, or a layer of the sequence is
 *          shorter than that; keep_ns is above 2^62); UNSUPPORTED (a head keeps tokens by what
 *          queries asked, KVM_RETAIN_HEAVY: what it holds is not a function of the tokens; a kvmd
 *          before protocol 1.9); PARTIAL (kvm_seq_drop has dropped some of the sequence); EXISTS
 *          (the last hash is another prefix's, which holds the same, or is about to); LIMIT (of the
 *          pages of a user's prefixes: kvmd's prefix_pages). The sequence stays the client's then.
 * Threads: any. */
KVM_API kvm_status kvm_prefix_publish(kvm_client *client, kvm_seq_id seq,
                                      const kvm_prefix_hash *hashes, uint32_t n_hashes,
                                      uint64_t keep_ns);

typedef struct kvm_prefix_find_params {
  uint32_t struct_size;
  uint32_t flags; /* zero */
  kvm_space_id space; /* of the sequences to find */
  const kvm_prefix_hash *hashes; /* [n_hashes] of a prompt, from its first page on */
  uint64_t n_hashes;
  double prefill_rate; /* tokens of a prompt that the caller computes in a second; 0: a prefix is
                          taken however long it takes to read */
  uint64_t reserved[3];
} kvm_prefix_find_params;

typedef struct kvm_prefix {
  uint32_t struct_size;
  uint32_t flags;    /* zero */
  kvm_seq_id seq;    /* to fork at n_tokens; 0: none was found */
  uint64_t n_tokens; /* the longest prefix that is there, and that a fork can have; 0: none */
  uint64_t n_tokens_slower; /* there are so many, but they are sooner computed than read from the
                               disk: n_tokens and seq are 0 then */
  uint64_t read_ns; /* with a prefill_rate, where something was found: what it takes to read, by
                       the rate at which the disk was read lately; 0: all of it is in memory */
  uint64_t reserved[3];
} kvm_prefix;

/* Looks for the longest prefix that is published in the space; one that does not exist has none.
 * What was found may be gone before it is forked: the fork says so
 * (NOT_FOUND, STALE, PERMISSION), and nothing is lost but a prefix. The first call of a client is a
 * round trip; others are none, but for one where something was found and a prefill_rate is given:
 * the service weighs what of it lies on disk against that, and counts what came out. A kvmd before
 * protocol 1.10 does not weigh: whatever is found is taken. Fails: INVALID (prefill_rate is
 * negative or not finite), UNSUPPORTED (a kvmd before protocol 1.9), NO_MEMORY, LIMIT
 * (descriptors), DISCONNECTED, TIMEOUT; that nothing was found is KVM_OK. Threads: any. */
KVM_API kvm_status kvm_prefix_find(kvm_client *client, const kvm_prefix_find_params *params,
                                   kvm_prefix *out);

typedef struct kvm_seq_info {
  uint32_t struct_size;
  uint32_t flags; /* KVM_SEQ_* */
  kvm_seq_id seq;
  kvm_space_id space;
  uint64_t client_id;
  uint64_t n_tokens_min;  /* of the shortest layer that stores anything */
  uint64_t n_tokens_max;  /* of the longest */
  uint64_t n_committed;
  uint64_t n_pages;       /* page references held */
  uint64_t bytes;         /* of these pages and of what heads keep beside them, shared too */
  uint64_t bytes_shared;  /* of them, also held by other sequences */
  uint64_t n_entries_dropped; /* (layer, head class, token) dropped or folded, and not restored */
  uint64_t bytes_observed;    /* kept from kvm_observe, and attention mass (HEAVY) */
  uint64_t n_rows_observed;
  uint64_t bytes_index; /* of indexes, shared ones included */
  uint64_t bytes_paid;  /* of bytes, what is charged to the owner; the rest to who made the pages */
  uint64_t bytes_away;  /* of bytes, what lies in a slower tier than memory */
  uint64_t reserved[1];
} kvm_seq_info;

/* Fails: NOT_FOUND, STALE, LOST, PERMISSION, TIMEOUT. Threads: any. */
KVM_API kvm_status kvm_seq_get_info(kvm_client *client, kvm_seq_id seq, kvm_seq_info *out);

enum { KVM_LIST_ALL_CLIENTS = 1u << 0 /* the daemon's own user and root; else PERMISSION */ };

/* The sequences of one space (0: of all), as kvm_space_list does: the client's, and those that are
 * published to its user (KVM_SEQ_PUBLISHED). A space that does not exist has none. flags:
 * KVM_LIST_*. Fails: PERMISSION (KVM_LIST_ALL_CLIENTS), TIMEOUT. Threads: any. */
KVM_API kvm_status kvm_seq_list(kvm_client *client, kvm_space_id space, uint32_t flags,
                                kvm_seq_info *out, size_t capacity, size_t *out_count);

/* Begins to bring back into memory what of a sequence lies in a slower tier, as far as there is
 * room, and returns; requests that need it meanwhile read it where it lies, as without this call.
 * For an engine that knows which conversation comes next.
 * Fails:   UNSUPPORTED (the service has no slower tier, or is older than protocol 1.8), NOT_FOUND,
 *          STALE, LOST, PERMISSION, TIMEOUT. Threads: any. */
KVM_API kvm_status kvm_seq_prefetch(kvm_client *client, kvm_seq_id seq);

/* Gives up K and V of tokens that the engine can compute again, where it needs the room more: all
 * layers', in the full pages of 64 tokens that lie within [begin, end) and are final. Their room is
 * free at once, in memory and in a slower tier, but for pages that forks share; positions, lengths
 * and indexes stay. Heads that drop tokens by a policy of their own go on by that alone: only
 * KVM_RETAIN_FULL gives anything up here. end: KVM_POSITION_END is all that is final. What is gone
 * already does not matter.
 *
 * Until they are back (KVM_ITEM_RESTORE), an attend that would see one of them is PARTIAL: leave
 * them out with KVM_ITEM_EXCLUDE_RANGES, by which indexes leave them out, too. So are kvm_read of
 * them, kvm_seq_save, kvm_prefix_publish, and a cut inside such a page; forks and whoever takes the
 * sequence have the same gaps. kvm_seq_info counts them among n_entries_dropped.
 * Fails:   INVALID (begin is beyond end, or end beyond what is final), UNSUPPORTED (sequences on a
 *          device; a kvmd before protocol 1.12), NOT_FOUND, STALE, LOST, PERMISSION (also a
 *          sequence that is published), NO_MEMORY (of the service: a part may have gone; call
 *          again), TIMEOUT.
 * Threads: any. */
KVM_API kvm_status kvm_seq_drop(kvm_client *client, kvm_seq_id seq, uint64_t begin, uint64_t end);

/* How much a part of a sequence is worth in memory. Where memory fills up, what has the lowest
 * priority leaves for the slower tier first, whoever uses it; what has the same leaves as
 * docs/disk.md says. What has the highest stays as long as anything else can go: no priority makes
 * an append fail. */
enum { KVM_PRIORITY_DEFAULT = 50, KVM_PRIORITY_MAX = 100 };

typedef struct kvm_priority_params {
  uint32_t struct_size;
  uint32_t priority; /* 0 to 100; of what nobody has set one for: 50 */
  kvm_seq_id seq;
  uint64_t begin;   /* positions [begin, end): whole pages of 64 tokens, those that it touches */
  uint64_t end;     /* KVM_POSITION_END: whatever the sequence comes to hold */
  uint64_t keep_ns; /* for so long, at most 2^62, and the default after that; 0: for good */
  uint64_t reserved[2];
} kvm_priority_params;

/* Sets the priority of a part of a sequence, in place of what was set for it before. A fork has
 * that of what it shares, as it is when it is made; snapshots and what is loaded from them have
 * none. Pages that several sequences share go when the one whose turn it is lets them. A service
 * may have an upper limit (disk.max_priority of kvmd), as which higher ones count.
 * Fails:   UNSUPPORTED (the service has no slower tier, or is older than protocol 1.11), INVALID
 *          (priority, keep_ns; begin is not below end), LIMIT (the sequence has 16 parts of
 *          different priorities or times), NOT_FOUND, STALE, LOST, PERMISSION, TIMEOUT; the
 *          priorities are as before then.
 * Threads: any. */
KVM_API kvm_status kvm_seq_set_priority(kvm_client *client, const kvm_priority_params *params);

/* Snapshots: sequences that outlive their clients, and the service itself, however it ends.
 *
 *    kvm_seq_save(client, chat, "chat/4711", KVM_SAVE_REPLACE);   the conversation pauses
 *    kvm_seq_free(client, chat);
 *    ... an hour; perhaps kvmd was updated, or killed ...
 *    kvm_space_register(client, &geometry, &space);
 *    kvm_seq_load(client, space, "chat/4711", &chat);             and goes on
 *
 * A snapshot holds all that a sequence does, K, V and what policies made of them, but for indexes,
 * which are built anew when they are needed, and it lies in the service's disk tier: a daemon
 * without one answers UNSUPPORTED (docs/disk.md). It belongs to the client's user, whose every
 * client may load and delete it; to others it does not exist. It is charged to the user's quota of
 * snapshot_bytes, whole, whatever others share with it. Names are 1 to 127 bytes of
 * [A-Za-z0-9._/-].
 *
 * Pages that are on disk already, because they left memory or are in an earlier snapshot, are not
 * written again, so that to save a conversation after each turn costs what the turn added. */
enum {
  KVM_SAVE_REPLACE = 1u << 0 /* a snapshot of this name is replaced, in one step; else EXISTS */
};

/* Saves what the sequence holds once the requests before it are done; requests after it go on
 * meanwhile and are not part of it. Answered when no crash of the service or of the machine takes
 * the snapshot any more. That may take longer than a control call waits: a TIMEOUT says no more
 * than that it goes on. kvm_seq_save_async has no such limit.
 * Fails:   UNSUPPORTED (also of a space with KVM_LAYER_PAIR), INVALID (name, flags), EXISTS,
 *          PARTIAL (kvm_seq_drop has dropped some), QUOTA (snapshot_bytes), NO_SPACE (the disk is
 *          full), IO, NOT_FOUND, STALE, LOST, PERMISSION (of another client), TIMEOUT; a snapshot
 *          that had the name is as before. Threads: any. */
KVM_API kvm_status kvm_seq_save(kvm_client *client, kvm_seq_id seq, const char *name,
                                uint32_t flags);

/* Makes a sequence of the client's out of a snapshot, in a space of the same layout, policies and
 * fingerprint, whatever its name and its indexes. It is there before its pages are in memory: these
 * are read from disk when a request needs them, and come back as far as there is room. The snapshot
 * stays; any number of sequences may be loaded from it, and share its pages.
 * Fails:   UNSUPPORTED, INVALID (name; or the space differs from the one that was saved, and in
 *          what), NOT_FOUND (the snapshot, the space), STALE, LOST (the space; or a part of the
 *          snapshot is not there any more), CORRUPT, IO, QUOTA, LIMIT (as kvm_seq_create),
 *          NO_SPACE, PERMISSION (another user's space), TIMEOUT. Threads: any. */
KVM_API kvm_status kvm_seq_load(kvm_client *client, kvm_space_id space, const char *name,
                                kvm_seq_id *out);

/* Deletes a snapshot. Sequences that were loaded from it stay. Answered when no crash brings it
 * back. Fails: UNSUPPORTED, INVALID (name), NOT_FOUND, IO, NO_SPACE, TIMEOUT. Threads: any. */
KVM_API kvm_status kvm_snapshot_delete(kvm_client *client, const char *name);

enum {
  KVM_SNAPSHOT_LOST = 1u << 0 /* kvm_seq_load fails: parts of it are not there any more */
};

typedef struct kvm_snapshot_info {
  uint32_t struct_size;
  uint32_t flags; /* KVM_SNAPSHOT_* */
  uint32_t uid;   /* whose it is */
  uint32_t reserved0;
  char name[128];
  char space_name[64];  /* of the space that it was saved in */
  uint8_t layout[16];   /* the digests of that space, as kvm_space_info has them */
  uint8_t policy[16];
  uint8_t fingerprint[32];
  uint64_t n_tokens;    /* of the longest layer */
  uint64_t bytes;       /* that are charged for it */
  uint64_t saved_ns;    /* when, in nanoseconds since 1970 */
  uint64_t reserved[4];
} kvm_snapshot_info;

/* The snapshots of the client's user, or of all users (KVM_LIST_ALL_CLIENTS), by user and name, as
 * kvm_space_list lists spaces. Fails: UNSUPPORTED, PERMISSION (KVM_LIST_ALL_CLIENTS), TIMEOUT.
 * Threads: any. */
KVM_API kvm_status kvm_snapshot_list(kvm_client *client, uint32_t flags, kvm_snapshot_info *out,
                                     size_t capacity, size_t *out_count);

/* ============================================================================================
 * 7. The data path: append, attend, step
 * ============================================================================================ */

/* Positions begin <= p < end. */
typedef struct kvm_range {
  uint64_t begin;
  uint64_t end;
} kvm_range;

enum {
  KVM_ITEM_NOT_CAUSAL = 1u << 0,    /* rows see every position; default: up to their own */
  KVM_ITEM_TREE = 1u << 1,          /* tree_mask refines the last n_query positions */
  KVM_ITEM_EXCLUDE_RANGES = 1u << 2, /* ranges are left out; default: only they are seen */
  /* The tokens that the item appends reach no layer beyond the request's last: they are final now
   * in all layers that they reached, and the commit point moves behind them although other layers
   * are shorter. For models that skip layers, token by token; without it those layers would keep
   * the commit point where they ended. Means nothing without n_append, and in a sequence with
   * KVM_SEQ_MANUAL_COMMIT. UNSUPPORTED by a kvmd before protocol 1.5. */
  KVM_ITEM_LAST_LAYER = 1u << 3,
  /* The prompt ends with the tokens that the item appends: once they are committed, heads with
   * KVM_BUDGETS_BY_DENSITY choose what to keep, and those with KVM_RETAIN_PROMPT keep nothing. Of
   * several layers' appends one may say so, or all.
   * Where nobody does, the prompt ends before the first token that is committed alone. Means
   * nothing without n_append, and where no head waits for it. UNSUPPORTED by a kvmd before
   * protocol 1.7. */
  KVM_ITEM_PROMPT_END = 1u << 4,
  /* Appends of kvm_append alone: the tokens are those at append_position, where kvm_seq_drop has
   * dropped them. append_position and n_append are multiples of 64, within what is final. Pages
   * that are there stay as they are; those that come back are encoded as all others, and so have
   * the same bits where K and V have (not of BALANCED codecs, nor of a page that had been cut). A
   * layer's gaps close one by one, in any order. UNSUPPORTED by a kvmd before protocol 1.12. */
  KVM_ITEM_RESTORE = 1u << 5
};

/* One sequence's share of a request. 64 bytes, no defaults: every field is meant as it stands.
 *
 * Query rows may lie beyond the layer's length, for an engine that has the newest tokens itself:
 * it attends to them on its own (the chunk of a prefill, say) and merges the two states
 * (kvm_merge). The rows see what is stored as if the tokens in between were there too: windows,
 * policies and IN_CACHE count from the rows' own positions, so that a row far beyond may see
 * nothing, or sinks alone. keys_present counts what is stored. TREE bits of tokens that are not
 * stored show nothing. */
typedef struct kvm_item {
  kvm_seq_id seq;
  uint64_t append_position; /* must equal the layer's length (KVM_POSITION_END: whatever it is;
                             * HOLE where a layer ends before what is final: say the position), or
                             * be what RESTORE asks for */
  uint32_t n_append;        /* tokens appended; 0: none */
  uint32_t append_row;      /* first row in k and v */
  uint32_t n_query;         /* query rows; 0: none */
  uint32_t query_row;       /* first row in q, o, lse, err */
  uint64_t query_position;  /* of the first query row, the others follow; KVM_POSITION_END: the
                             * rows are the layer's last n_query tokens after the append. Rows are
                             * not checked against the length (see above): pass END where they are
                             * the last tokens */
  uint32_t range_begin;     /* first of its ranges in kvm_step_params.ranges: sorted, disjoint */
  uint32_t n_ranges;        /* 0: no restriction; at most 65536 over all items */
  uint32_t tree_begin;      /* TREE: first of its n_query words in kvm_step_params.tree_mask */
  uint32_t flags;           /* KVM_ITEM_* */
  uint64_t reserved;        /* zero */
} kvm_item;

enum {
  KVM_MODE_DEFAULT = 0,  /* the space's default_mode: EXACT where it names none */
  KVM_MODE_EXACT = 1,    /* every visible key is read */
  KVM_MODE_TOPK = 2,     /* those with the largest logits */
  KVM_MODE_SAMPLED = 3,  /* a random sample, weighted so that nothing is missing on average */
  KVM_MODE_VERIFIED = 4, /* a sample that grows until it is good enough, else all */
  KVM_MODE_AUTO = 5      /* whichever of these suits an error, or a time */
};

/* A proposal is what an approximate mode chooses keys by. */
enum {
  KVM_PROPOSAL_DEFAULT = 0, /* what the head's index is */
  KVM_PROPOSAL_SKETCH = 1,
  KVM_PROPOSAL_LSH = 2,
  KVM_PROPOSAL_GRAPH = 3 /* UNSUPPORTED yet */
};

enum {
  /* Weights times values in fp32 instead of products of bf16, or of words over I8: slower, and
   * with the errors of that line under "Rounding". */
  KVM_STEP_F32_VALUES = 1u << 0,
  /* The attend adds nothing to the attention mass by which heads choose what to keep (HEAVY): it
   * leaves its sequences as they were. For evaluation, probes, and steps that are tried twice.
   * UNSUPPORTED by a kvmd of protocol 1.2. */
  KVM_STEP_NO_STATISTICS = 1u << 1
};

/* One request: append, attend, or both, for many sequences of a space. The same structure serves
 * kvm_append (reads items, k, v), kvm_attend (items, q, o, lse, err and the attend half; n_append
 * must be 0) and kvm_step (both: all appends first, then all attends).
 *
 *   k      [n_layers][row][n_kv_heads][head_dim_k]     any dtype; encoded as it is stored
 *   v      [n_layers][row][n_kv_heads][head_dim_v]     NONE in a space with KVM_SPACE_V_IN_K
 *   q      [row][n_q_heads][head_dim_k]                any dtype
 *   o      [row][n_q_heads][head_dim_v]                any dtype
 *   lse    [row][n_q_heads]                            F32, natural logarithm; NONE: not wanted
 *   err    [row][n_q_heads][2]                         F32; NONE: not wanted. Estimated relative L2
 *                                                      error of o and absolute error of lse; NaN:
 *                                                      no estimate; 0 for EXACT (rounding only)
 *
 * Rounding of exact answers, against exact arithmetic over the rows as they are stored (K and V
 * that were appended in another dtype have been rounded before). The error of o is an L2 norm over
 * channels; A is that of the means of the values' magnitudes, and about |o| unless values cancel,
 * as noise does. The error of lse is absolute, for logits up to about 50.
 *
 *                                                      o / A        o / |o|, noise   lse
 *   stored as F32, F16, I8_CHANNEL                     up to 2e-5   5e-6             2e-5
 *   BF16                                               up to 2e-3   3e-3             3e-3
 *   F8E4M3                                             up to 2e-3   3e-3             2e-5
 *   I8                                                 up to 2e-3   3e-3             1e-3
 *   I4, I2, GEAR4, GEAR2 of all kinds                  up to 6e-4   3e-4             8e-4
 *   BF16, F8E4M3 with KVM_STEP_F32_VALUES              up to 2e-5   5e-6             2e-5
 *   I4, I2, GEAR4, GEAR2 with it                       up to 2e-5   5e-6             2e-5
 *   I8 with KVM_STEP_F32_VALUES                        up to 3e-4   3e-4             1e-3
 *
 * Where thousands of keys share the mass, o / A is a tenth of that and less. o in BF16 or F16 is
 * rounded once more.
 *
 * q head h reads kv head h / (n_q_heads / n_kv_heads). The logit of a key is
 * cap(scale * q.k) + its log-weight + what alibi_slopes adds, restricted to what the layer's
 * window, the head's policy, the causal rule, the ranges and the tree mask leave visible. A row
 * that sees no key has o = 0 and lse = -inf (with a sink logit: lse is that logit).
 *
 * Bits. An exact answer to a query token depends on its query, its position, the stored tokens that
 * it sees, what the request asks for (scale, flags, dtypes), and whether its item has fewer than 24
 * rows for a kv head (n_query times the q heads of a kv head), or 24 and more. Nothing else changes
 * a bit of o or lse, as long as kvm_client_info.isa is the same. So these are equal:
 *   - a token decoded alone, and in any item of fewer than 24 rows: drafts, trees, several tokens;
 *   - a token prefilled in any item of 24 rows and more, in chunks of whatever size;
 *   - a row beside any other rows, items and requests, on any number of threads, in a fork;
 *   - a row that an approximate mode answers exactly (n_exact counts them; VERIFIED falls back to
 *     it), and the same row of the same item in EXACT.
 * Not equal are the answers for one token in an item of fewer than 24 rows and in one of 24 and
 * more: the two add up in different orders and round weights differently, by what "Rounding"
 * allows. In approximate modes a sampled row depends on the rows that share its sample.
 *
 * Numbers that are not finite (NaN, infinities) are stored and computed with, and show: a row whose
 * query has one, or that sees a key with one, has o = NaN in every channel and lse = NaN; a row
 * that sees a value with one has o = NaN in every channel, and the lse of its keys. (A row of K or
 * V that is stored as I8 or F8 reads as NaN in all channels.) err of such rows is NaN in every
 * mode, the request is OK, and n_not_finite counts them. They change no other row. An approximate
 * mode that reads such a key or value answers the rows that share its sample exactly; an index of
 * the kind SKETCH has them always read (TOPK: such keys, and the values of the keys that it answers
 * with), LSH may leave them out, and what is left out does not show. Finite
 * numbers never give NaN: dot products that overflow count as +-1e38.
 *
 * Approximate modes read, for each kv head with an index (kvm_index_params), all of the first
 * n_sinks and the last n_recent tokens, of the last 64 to 127, and of what the index does not
 * cover; of the rest some keys. The rows of up to T = floor(16 / group) tokens of an item share
 * them (group: the q heads of a kv head): each row's budget adds to what is read for all of them.
 * Where a group has more than 16 q heads, T is 1 and the group is sampled in parts of at most 16,
 * which n_exact, keys_present and keys_read take for kv heads.
 *
 *   TOPK      For each row the `budget` keys with the largest logits among those whose keys are
 *             read: the four times as many that the sketch ranks first (SKETCH), or those that the
 *             tables propose (LSH). All of these count as read. budget must not be 0. What is left
 *             out is missing: biased, and without an error bar (err is NaN).
 *   SAMPLED   About `budget` keys for each row (0: as many as should give eps), drawn with
 *             probabilities p that grow with the estimated weight, each counted 1 / p times. err
 *             is the error bar: the error exceeds it with a probability of about delta. With
 *             budget and eps: rows whose bar is beyond eps then take bar / eps times the budget,
 *             up to 16 times: keys go where errors are, and no bar is promised; heads that would
 *             have half of their keys read are answered exactly, after that. With LSH: the keys
 *             that meet the query in two tables (MagicPIG), whatever eps, and budget below the
 *             number of keys; no bar.
 *   VERIFIED  SAMPLED, and more keys until the bar is at most eps; heads that would need too many
 *             are answered exactly. The error of o is at most eps with probability 1 - delta. Too
 *             many are with budget 0 those that take longer than the exact answer (in host memory,
 *             so that short contexts are exact), else budget keys for each row on average,
 *             whatever that takes: for keys that are dear to read. Not with LSH, which has no bar.
 *   AUTO      For each kv head what the service expects to be best on this machine, from what it
 *             has measured (or was told: kvmd's cost_model). budget 0: the fastest of EXACT and
 *             VERIFIED that keeps eps and delta; heads that would need too many keys (flat ones,
 *             short contexts) are exact. Else budget is a time in nanoseconds for the request, all
 *             threads at work on it (compute_ns): EXACT where that fits, else as many keys as fit,
 *             at least 16 a row: SAMPLED; with LSH too if all that the tables propose fits, else
 *             TOPK. eps has no meaning then. The time is aimed at, not kept. mode of the result is
 *             what most approximated rows got, EXACT if there are none.
 *
 * With KVM_MODE_DEFAULT a request takes the default_mode of its space, and the space's proposal,
 * eps, delta and budget where its own are 0; but not the space's budget beside an eps of its own,
 * nor the space's eps beside a budget of its own, where that would then mean nothing or something
 * else: AUTO, and SAMPLED of a space that does not have both. It is checked and answered as if it
 * had said all that. A request that names a mode takes nothing from the space.
 *
 * The same seed draws the same random numbers for the same positions at every step. Results depend
 * on the stored tokens, on what was observed (kvm_observe), on the request and on the kind of
 * processor (AUTO: on what was measured as well): not on threads, nor on how tokens were appended.
 * (Of more than 64 tokens that a request appends itself, the index covers none; and it covers what
 * it found memory for.) A head is answered exactly when it has no index of the proposal's kind, or
 * not yet (min_tokens), when nothing would be skipped, and where an item has more than 8 T query
 * tokens, or a tree of more than T; n_exact counts its rows, and if all heads are such, mode is
 * EXACT. It also counts rows of heads whose sample turned
 * out to need all keys: mode says what they began with. Bars are of what was not read: they do not
 * cover that rows are stored with less precision. EXACT reads none of eps, delta, budget, seed. */
typedef struct kvm_step_params {
  uint32_t struct_size;
  uint32_t flags; /* KVM_STEP_* */
  kvm_space_id space;
  uint32_t layer_begin;
  uint32_t n_layers; /* 0: 1. More than one with kvm_append only */
  uint32_t n_items;  /* 1 to 4096 */
  uint32_t n_ranges;
  const kvm_item *items;     /* [n_items]; a sequence may occur once with n_append > 0 */
  const kvm_range *ranges;   /* [n_ranges], at most 65536 */
  const uint64_t *tree_mask; /* [n_tree_words] bit i of row j's word: row j sees the token of row
                              * i. An item with TREE has at most 64 rows */
  uint32_t n_tree_words; /* at most 65536 */
  uint32_t mode;         /* KVM_MODE_* */
  kvm_tensor k;
  kvm_tensor v;
  kvm_tensor q;
  kvm_tensor o;
  kvm_tensor lse;
  kvm_tensor err;
  float scale;       /* 0: the space's softmax_scale; must be positive */
  uint32_t proposal; /* KVM_PROPOSAL_* */
  float eps;         /* not TOPK: relative error of o aimed at, below 1; 0: 0.03, but none for
                      * SAMPLED with a budget */
  float delta;       /* probability that the error exceeds err; 0: 0.01 */
  uint64_t budget;   /* beside the keys always read, for each row and kv head: SAMPLED: keys read;
                      * TOPK: keys that the answer is made of; VERIFIED: keys beyond which a head is
                      * exact, 0: as time says; AUTO: nanoseconds, 0: as eps says */
  uint64_t seed;     /* of sampling; any number */
  uint64_t deadline_ns; /* CLOCK_MONOTONIC; a request not begun by then fails; 0: none */
  uint64_t reserved[8];
} kvm_step_params;

/* Counts of what a request did. */
typedef struct kvm_step_stats {
  uint32_t struct_size;
  uint32_t mode;         /* that was used: KVM_MODE_*, not AUTO */
  uint64_t keys_present; /* (item, kv head, key) visible to some row of the item; of a group that
                          * is sampled in parts, for each part */
  uint64_t keys_read;    /* of them, K or V was read; unique over the heads of a group, or part */
  uint64_t bytes_read;   /* of K and V, index included */
  uint64_t service_ns;   /* from acceptance to completion, in the service */
  uint64_t compute_ns;   /* from the start of the first task to the end of the last merge */
  float err_max;         /* over rows and heads: see err; NaN: one of them has none */
  uint32_t n_exact;      /* of an approximate mode: (row, q head) that were answered exactly */
  uint64_t n_not_finite; /* (row, q head) answered NaN: see kvm_step_params. 0 from a kvmd of
                          * protocol 1.1 */
  uint64_t reserved;
} kvm_step_stats;

/* Appends, and waits.
 * All or nothing: on any failure no item has been appended to. Where the service keeps pages on a
 * disk, an append that finds no memory waits until some have gone there, at most until its
 * deadline, and is NO_SPACE when nothing is left that may go.
 * Fails:   HOLE (a position is not the layer's length), QUOTA, NO_SPACE, NO_MEMORY, INVALID
 *          (geometry, strides, sizes, an ALIAS or ABSENT layer, a sequence twice), NOT_FOUND,
 *          STALE, LOST, PERMISSION (a sequence of another client), DEADLINE; and, as every call on
 *          a queue that waits, BUSY (asynchronous requests are outstanding; DISCONNECTED comes
 *          first where the client is closed or the daemon gone), UNSUPPORTED (DEVICE
 *          buffers), and with HOST buffers, which are copied through an arena of the library, LIMIT
 *          (larger than an arena can be) and the failures of kvm_arena_create.
 * Threads: the queue's owner. */
KVM_API kvm_status kvm_append(kvm_queue *queue, const kvm_step_params *params);

/* Attends, and waits. stats may be NULL. Outputs are written only on success.
 * Fails:   UNSUPPORTED (proposal GRAPH; a TREE in a layer whose window is longer than the n_recent
 *          of a head with sinks, where its rows lie between window and window + n_sinks: there the
 *          head's sinks go out of sight one by one), PARTIAL (a query position so far back that its
 *          head's policy has dropped what it should see; tokens that kvm_seq_drop has dropped, in
 *          EXACT and all other modes), LIMIT (too many query rows, pages or
 *          ranges at once, or too large a budget), NO_MEMORY, INVALID, NOT_FOUND, STALE, LOST,
 *          PERMISSION, DEADLINE; and as append, BUSY and what follows it.
 * Threads: the queue's owner. */
KVM_API kvm_status kvm_attend(kvm_queue *queue, const kvm_step_params *params,
                              kvm_step_stats *stats);

/* Appends and attends in one request, and waits: what a decode step does once a layer.
 * Fails as the two above; a failure of the append half leaves nothing appended, and everything is
 * checked before anything is appended. Threads: the queue's owner. */
KVM_API kvm_status kvm_step(kvm_queue *queue, const kvm_step_params *params, kvm_step_stats *stats);

/* ============================================================================================
 * 8. Observe, read, merge
 * ============================================================================================ */

/* Hands over what an engine saw in a prefill that it computed itself: queries, or attention mass
 * per token, so that indexes and policies know what later queries will look like. Kept per
 * sequence and layer (the newest 256 query rows, and column sums added up), counted in the quota,
 * copied by fork and forgotten by free. Indexes of the kinds SKETCH and SKETCH_8I8 fit what they
 * make from then on to the queries, those of ALIAS layers too; other indexes do not need them.
 * Policies see both. */
typedef struct kvm_observe_params {
  uint32_t struct_size;
  uint32_t flags; /* reserved, zero */
  kvm_seq_id seq;
  uint32_t layer;
  uint32_t n_rows;         /* query rows */
  uint64_t query_position; /* of the first row */
  uint64_t column_begin;   /* position of the first column sum */
  uint64_t n_columns;      /* column_begin + n_columns: at most the layer's length */
  kvm_tensor q;           /* [n_rows][n_q_heads][head_dim_k], any dtype; or NONE with n_rows = 0 */
  kvm_tensor column_sums; /* [n_columns][n_kv_heads] F32, softmax mass summed over rows and the
                           * group's heads; row = column; or NONE with n_columns = 0 */
  uint64_t reserved[4];
} kvm_observe_params;

/* Fails: INVALID (column sums beyond the layer's length, a number that is not finite, geometry),
 * QUOTA, NO_SPACE, NOT_FOUND, STALE, LOST, PERMISSION; and as kvm_append, BUSY and what follows it.
 * Threads: the queue's owner. */
KVM_API kvm_status kvm_observe(kvm_queue *queue, const kvm_observe_params *params);

/* K and V back out. */
typedef struct kvm_read_params {
  uint32_t struct_size;
  uint32_t flags; /* reserved, zero */
  kvm_seq_id seq;
  uint32_t layer;
  uint32_t reserved0; /* zero */
  uint64_t position;
  uint64_t n_tokens;
  kvm_tensor k; /* [n_tokens][n_kv_heads][head_dim_k], any dtype; NONE: not wanted */
  kvm_tensor v; /* [n_tokens][n_kv_heads][head_dim_v] */
  uint64_t reserved[4];
} kvm_read_params;

/* Copies stored K and V of tokens [position, position + n_tokens) out, converted to the tensors'
 * dtypes. Tokens that a head has chosen to keep (HEAVY) are there; those that it has dropped or
 * folded are not. Fails: INVALID (beyond the layer's length), PARTIAL (some head of the layer does
 * not have one of them), NOT_FOUND, STALE, LOST, PERMISSION; and as kvm_append, BUSY and what
 * follows it.
 * Threads: the queue's owner. */
KVM_API kvm_status kvm_read(kvm_queue *queue, const kvm_read_params *params);

/* Merges attention states over disjoint key sets. Pure computation in the caller's memory. */
typedef struct kvm_merge_params {
  uint32_t struct_size;
  uint32_t flags;    /* reserved, zero */
  uint32_t n_states; /* 1 to 64 */
  uint32_t n_rows;
  uint32_t n_heads;
  uint32_t dim;              /* of o */
  const kvm_tensor *o;       /* [n_states] of [n_rows][n_heads][dim], HOST, any dtype */
  const kvm_tensor *lse;     /* [n_states] of [n_rows][n_heads], HOST, F32 */
  kvm_tensor out_o;          /* HOST; may be the memory of o[0] with the same dtype and strides */
  kvm_tensor out_lse;        /* HOST, F32; may be that of lse[0]; NONE: not wanted */
  uint64_t reserved[4];
} kvm_merge_params;

/* States are merged in the order given; an empty state (lse = -inf) changes nothing, and empty
 * states alone give o = 0, lse = -inf. Fails: INVALID. Threads: any. */
KVM_API kvm_status kvm_merge(const kvm_merge_params *params);

/* Finds the heads of a layer that look back, by a prompt that repeats itself. The prompt is
 * n_prefix tokens (BOS, say), and then the same `period` random tokens several times. A row's ECHO
 * score is the attention that it gives to earlier copies of its own token, its INDUCTION score that
 * to the tokens behind these; a kv head's are the means over rows from the second copy on, of the q
 * head of its group that has most. RazorAttention keeps the heads of all layers with the top 14 %
 * of induction scores and the top 1 % of echo scores, and folds in the others, with 2500 tokens 4
 * times. Pure computation in the caller's memory, one thread. */
typedef struct kvm_probe_params {
  uint32_t struct_size;
  uint32_t flags;      /* reserved, zero */
  uint32_t n_tokens;   /* n_prefix + period * (2 or more) */
  uint32_t n_prefix;
  uint32_t period;     /* at least 2 */
  uint32_t n_rows;     /* looked at, evenly from the second copy on; 0: 256, or all if fewer */
  uint32_t n_q_heads;  /* n_kv_heads must divide it into groups of 1 to 128 */
  uint32_t n_kv_heads; /* 0: n_q_heads */
  uint32_t head_dim;   /* 1 to 576 */
  float scale;         /* 0: 1 / sqrt(head_dim) */
  kvm_tensor q;        /* [n_tokens][n_q_heads][head_dim], HOST, any dtype, rotated */
  kvm_tensor k;        /* [n_tokens][n_kv_heads][head_dim] */
  uint64_t reserved[4];
} kvm_probe_params;

/* out_echo, out_induction: [n_kv_heads], 0 to 1; each may be NULL. Fails: INVALID. Threads: any. */
KVM_API kvm_status kvm_probe_heads(const kvm_probe_params *params, float *out_echo,
                                   float *out_induction);

/* ============================================================================================
 * 9. The asynchronous data path
 *
 * kvm_*_async stages a request under a number of the caller's choice (user_data); kvm_submit makes
 * all staged requests visible to the service at once; kvm_poll and kvm_wait take completions.
 * Structures and arrays that params points to are copied when staged; buffers must stay untouched
 * until the completion. HOST buffers are accepted: outputs are copied to them when the completion
 * is taken. Synchronous calls must not be mixed with outstanding asynchronous ones on a queue
 * (BUSY). A staging call fails with AGAIN when the queue, or the memory through which HOST buffers
 * are copied, is full, with the errors that can be seen without the service (INVALID, UNSUPPORTED
 * for DEVICE buffers), and where more memory to copy through is refused as kvm_arena_create does;
 * all others arrive as the completion's status.
 * Threads: the queue's owner.
 * ============================================================================================ */

KVM_API kvm_status kvm_append_async(kvm_queue *queue, const kvm_step_params *params,
                                    uint64_t user_data);
KVM_API kvm_status kvm_attend_async(kvm_queue *queue, const kvm_step_params *params,
                                    uint64_t user_data);
KVM_API kvm_status kvm_step_async(kvm_queue *queue, const kvm_step_params *params,
                                  uint64_t user_data);
KVM_API kvm_status kvm_read_async(kvm_queue *queue, const kvm_read_params *params,
                                  uint64_t user_data);
KVM_API kvm_status kvm_observe_async(kvm_queue *queue, const kvm_observe_params *params,
                                     uint64_t user_data);
/* The completion has the new sequence. One whose completion is not taken goes with the queue. */
KVM_API kvm_status kvm_seq_create_async(kvm_queue *queue, kvm_space_id space,
                                        const kvm_seq_params *params, uint64_t user_data);
KVM_API kvm_status kvm_seq_fork_async(kvm_queue *queue, kvm_seq_id parent, uint64_t n_tokens,
                                      uint64_t user_data);
KVM_API kvm_status kvm_seq_truncate_async(kvm_queue *queue, kvm_seq_id seq, uint64_t n_tokens,
                                          uint64_t user_data);
KVM_API kvm_status kvm_seq_commit_async(kvm_queue *queue, kvm_seq_id seq, uint64_t n_tokens,
                                        uint64_t user_data);
KVM_API kvm_status kvm_seq_free_async(kvm_queue *queue, kvm_seq_id seq, uint64_t user_data);
KVM_API kvm_status kvm_seq_publish_async(kvm_queue *queue, kvm_seq_id seq, uint64_t user_data);
KVM_API kvm_status kvm_prefix_publish_async(kvm_queue *queue, kvm_seq_id seq,
                                            const kvm_prefix_hash *hashes, uint32_t n_hashes,
                                            uint64_t keep_ns, uint64_t user_data);
KVM_API kvm_status kvm_seq_take_async(kvm_queue *queue, kvm_seq_id seq, uint64_t user_data);
KVM_API kvm_status kvm_seq_prefetch_async(kvm_queue *queue, kvm_seq_id seq, uint64_t user_data);
KVM_API kvm_status kvm_seq_drop_async(kvm_queue *queue, kvm_seq_id seq, uint64_t begin,
                                      uint64_t end, uint64_t user_data);
KVM_API kvm_status kvm_seq_set_priority_async(kvm_queue *queue, const kvm_priority_params *params,
                                              uint64_t user_data);
KVM_API kvm_status kvm_seq_save_async(kvm_queue *queue, kvm_seq_id seq, const char *name,
                                      uint32_t flags, uint64_t user_data);
KVM_API kvm_status kvm_seq_load_async(kvm_queue *queue, kvm_space_id space, const char *name,
                                      uint64_t user_data);
KVM_API kvm_status kvm_snapshot_delete_async(kvm_queue *queue, const char *name,
                                             uint64_t user_data);
/* Does nothing and completes. */
KVM_API kvm_status kvm_nop_async(kvm_queue *queue, uint64_t user_data);

/* Publishes what is staged. Fails: DISCONNECTED; staged requests then complete with that status. */
KVM_API kvm_status kvm_submit(kvm_queue *queue);

/* 128 bytes. */
typedef struct kvm_completion {
  uint64_t user_data;
  kvm_status status;
  uint32_t mode; /* as in kvm_step_stats, like the next seven */
  uint64_t keys_present;
  uint64_t keys_read;
  uint64_t bytes_read;
  uint64_t service_ns;
  uint64_t compute_ns;
  float err_max;
  uint32_t n_exact;
  uint64_t n_not_finite;
  kvm_seq_id seq; /* that kvm_seq_create_async, _fork_async or _load_async has made; else 0 */
  /* The sentence that belongs to status, as kvm_last_error has it; "" with KVM_OK. The queue's:
   * valid until the next call that takes completions of the queue, or destroys it. Never NULL. */
  const char *message;
  uint64_t reserved[5]; /* zero */
} kvm_completion;

/* Takes up to n_max completions without waiting. Returns how many, or a negative kvm_status
 * (INVALID when n_max is 0; DISCONNECTED once all outstanding requests have been answered with it).
 * When a completion's status is an error, kvm_last_error() too has the sentence of the last such
 * completion taken. */
KVM_API int32_t kvm_poll(kvm_queue *queue, kvm_completion *out, uint32_t n_max);

/* Waits until n_min completions are there, or timeout_ns (UINT64_MAX: no limit) has passed, and
 * takes up to n_max. Returns how many, which is below n_min only after a timeout, where the wait
 * was interrupted, or when fewer are outstanding; or a negative status as kvm_poll (INVALID also
 * when n_min is above n_max; INTERRUPTED where there is none to return). */
KVM_API int32_t kvm_wait(kvm_queue *queue, kvm_completion *out, uint32_t n_max, uint32_t n_min,
                         uint64_t timeout_ns);

/* Asks that outstanding requests with this user_data not be started. Those that have begun run to
 * their end; either way each completes exactly once (with CANCELLED or its own result).
 * Fails: NOT_FOUND (none outstanding; but DISCONNECTED where the client is closed or the daemon
 * gone), AGAIN (the daemon has taken no requests yet, so that some could not be cancelled: try
 * again). */
KVM_API kvm_status kvm_cancel(kvm_queue *queue, uint64_t user_data);

/* ============================================================================================
 * 10. Statistics
 * ============================================================================================ */

typedef struct kvm_stats {
  uint32_t struct_size;
  uint32_t n_clients;
  uint64_t uptime_ns;
  uint64_t n_spaces;
  uint64_t n_sequences;
  uint64_t n_pages; /* of keys and values in use, each counted once */
  uint64_t host_used_bytes; /* physical, in 2-MiB extents */
  uint64_t host_capacity_bytes;
  uint64_t host_peak_bytes;
  uint64_t host_page_bytes; /* in pages in use, of indexes too; the rest is room in begun extents */
  uint64_t index_bytes;
  uint64_t observed_bytes;
  uint64_t n_requests;      /* completed, any status */
  uint64_t n_requests_failed;
  uint64_t n_tokens_appended; /* per layer */
  uint64_t n_rows_attended;   /* (query row, layer) */
  uint64_t keys_present;
  uint64_t keys_read;
  uint64_t bytes_read;
  uint64_t bytes_appended;
  uint64_t n_pages_dropped; /* by policies */
  uint64_t n_pages_copied;  /* by copy-on-write */
  uint64_t n_clients_total; /* connections since the start */
  uint64_t n_protocol_errors;
  uint64_t busy_ns; /* of all compute threads together */
  uint64_t n_index_blocks;  /* (kv head, 64 keys) that were indexed */
  uint64_t n_index_refused; /* that found no memory, each once: such keys are read exactly */
  uint64_t n_index_dropped; /* that made way for keys and values: likewise */
  uint64_t n_pages_moved;   /* to others of their kind, so that emptied memory can be given back */
  uint64_t n_pages_away;    /* of n_pages, those that lie in a slower tier than memory */
  uint64_t away_bytes;      /* theirs */
  uint64_t reserved[2];
} kvm_stats;

/* Counters of the whole service. Fails: TIMEOUT. Threads: any. */
KVM_API kvm_status kvm_get_stats(kvm_client *client, kvm_stats *out);

/* The same as text, one "kvm_name value" per line with # HELP and # TYPE lines, in Prometheus' text
 * format. Writes at most capacity bytes, NUL included; *out_length receives the length without it,
 * which may be capacity or more: then the text was cut. Fails: TIMEOUT. Threads: any. */
KVM_API kvm_status kvm_get_stats_text(kvm_client *client, char *buffer, size_t capacity,
                                      size_t *out_length);

/* ============================================================================================
 * 11. Administration
 *
 * An operator handles a running kvmd by these; kvmctl is made of them. For root and the user that
 * runs kvmd: others get PERMISSION. An engine in this process is administered by its own client. A
 * kvmd that is older than one of these functions answers UNSUPPORTED, an engine in device memory as
 * well.
 * ============================================================================================ */

/* The options with which kvmd runs, as JSON: an object with `version`, `file` (the path that was
 * read, or null) and `options`, a list of objects with `name`, `value`, `default`, `origin`
 * ("default", "file", "environment", "command line") and `place` (a file with its line, a variable,
 * a flag, or null). Buffer and length as in kvm_get_stats_text.
 * Fails: PERMISSION, TIMEOUT, UNSUPPORTED (also an engine in this process: its options are those of
 * kvm_open_embedded). Threads: any. */
KVM_API kvm_status kvm_get_config_text(kvm_client *client, char *buffer, size_t capacity,
                                       size_t *out_length);

enum {
  KVM_EVICT_SEQ = 1,    /* the sequence `id` */
  KVM_EVICT_CLIENT = 2, /* the sequences of the client `id` (kvm_client_entry.client_id) */
  KVM_EVICT_SPACE = 3   /* the sequences in the space `id` */
};

enum {
  KVM_EVICT_DISCONNECT = 1u << 0 /* with CLIENT: and close its connection, with all that it has */
};

typedef struct kvm_evict_params {
  uint32_t struct_size;
  uint32_t flags;     /* KVM_EVICT_DISCONNECT */
  uint32_t what;      /* KVM_EVICT_SEQ, CLIENT or SPACE */
  uint32_t reserved0; /* zero */
  uint64_t id;
  uint64_t reserved[4];
} kvm_evict_params;

typedef struct kvm_evict_result {
  uint32_t struct_size;
  uint32_t reserved0;
  uint64_t n_sequences;
  uint64_t bytes; /* that they held; what forks share comes back with the last of them */
} kvm_evict_result;

/* Frees sequences, whoever owns them, as if the owner had called kvm_seq_free: requests that run on
 * them end first, later ones get STALE. Sequences that are made while this runs may stay. out may
 * be NULL.
 * Fails: NOT_FOUND (a sequence, a client, a space), STALE, LOST, PERMISSION, TIMEOUT, UNSUPPORTED
 * (also DISCONNECT of an engine in this process); some may have been freed after TIMEOUT.
 * Threads: any. */
KVM_API kvm_status kvm_evict(kvm_client *client, const kvm_evict_params *params,
                             kvm_evict_result *out);

#define KVM_NO_LIMIT UINT64_MAX

/* How much of each resource: in use, or the limit of that, KVM_NO_LIMIT where there is none. */
typedef struct kvm_amounts {
  uint64_t sequences;
  uint64_t bytes; /* of keys, values and what is derived from them, each counted once, whole */
  uint64_t arenas;
  uint64_t arena_bytes;
  uint64_t queues;
  uint64_t requests; /* in flight */
  /* Of bytes, what cannot go to a disk: heads with KVM_RETAIN_SINKS_RECENT_FOLD or _HEAVY, what was
   * observed, and indexes. 0 of an older kvmd, used and limit alike. */
  uint64_t memory_bytes;
  uint64_t snapshot_bytes; /* of users alone: of their snapshots, each whole. Likewise */
} kvm_amounts;

/* A connected client. */
typedef struct kvm_client_entry {
  uint32_t struct_size;
  uint32_t uid;
  uint32_t pid;
  uint32_t reserved0;
  uint64_t client_id;
  char name[64];      /* kvm_connect_params.client_name; printable ASCII */
  /* With what its library makes for itself (a queue, and up to four arenas for each queue), which
   * is admitted beside the limits. */
  kvm_amounts used;
  kvm_amounts limits; /* its own; those of its user hold beside them */
  uint64_t n_refused; /* requests and calls that a limit, its own or its user's, has refused */
  uint64_t n_requests; /* that it has made so far, but null ones; 0 of an older kvmd */
  uint64_t reserved[3];
  /* Of these requests those that are done, by the time from acceptance to completion: [i] took less
   * than 2^i microseconds and no less than the one before, [23] took 2^22 (4 s) or more. The
   * difference of two lists tells of the time between them. 0 of an older kvmd. */
  uint64_t n_by_duration[24];
} kvm_client_entry;

/* All clients of a user together. */
typedef struct kvm_user_entry {
  uint32_t struct_size;
  uint32_t uid;
  uint32_t n_clients; /* connected; 0: it has limits of its own and no client now */
  uint32_t reserved0;
  kvm_amounts used;
  kvm_amounts limits;
  uint64_t reserved[4];
} kvm_user_entry;

/* The clients of the service, and the users behind them; array and count as in kvm_space_list. In
 * the order of their ids. An engine in this process has one of each.
 * Fails: PERMISSION, TIMEOUT, UNSUPPORTED. Threads: any. */
KVM_API kvm_status kvm_client_list(kvm_client *client, kvm_client_entry *out, size_t capacity,
                                   size_t *out_count);
KVM_API kvm_status kvm_user_list(kvm_client *client, kvm_user_entry *out, size_t capacity,
                                 size_t *out_count);

enum { KVM_QUOTA_CLIENT = 1, KVM_QUOTA_USER = 2 };

typedef struct kvm_quota_params {
  uint32_t struct_size;
  uint32_t flags;     /* reserved, zero */
  uint32_t whose;     /* KVM_QUOTA_CLIENT, KVM_QUOTA_USER */
  uint32_t reserved0; /* zero */
  uint64_t id;        /* client_id, or uid */
  kvm_amounts limits; /* new ones; 0: as it is */
  uint64_t reserved[4];
} kvm_quota_params;

/* Sets limits, until the client leaves or, of a user, the service ends. A limit below what is in
 * use takes nothing away; nothing more is given until enough has come back.
 * Fails: NOT_FOUND (no such client), PERMISSION, TIMEOUT, UNSUPPORTED. Threads: any. */
KVM_API kvm_status kvm_quota_set(kvm_client *client, const kvm_quota_params *params);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVM_H_ */
