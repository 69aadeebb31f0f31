/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvm_cuda.h - sequences in the memory of a GPU: stream-ordered calls for engines that run there.
 *
 * An extension of kvm.h, whose conventions hold here too (structures with struct_size, statuses,
 * kvm_last_error). Only libkvm_embedded has these functions.
 *
 * kvm_cuda_open makes a kvm_client whose pages lie in a pool of device memory. Spaces and sequences
 * are made, forked, truncated, listed and freed with the functions of kvm.h; appending and
 * attending happen on the caller's stream, from device pointers:
 *
 *    kvm_cuda_open(&params, &client);                    once
 *    kvm_space_register(client, &geometry, &space);
 *    kvm_cuda_batch_create(client, &batch_params, &batch);
 *    kvm_seq_create(client, space, NULL, &seq);
 *    for each step:
 *        kvm_cuda_update(batch, items, n_items, stream);           once for all layers
 *        for each layer:                                           these may be a CUDA graph
 *            kvm_cuda_append(batch, layer, &k, &v, stream);
 *            kvm_cuda_attend(batch, &attend, stream);              o, lse in device memory
 *
 * What waits for what
 *
 *  - No call waits for the device, but where it says so. Results are there when the stream comes to
 *    them. kvm_cuda_append and kvm_cuda_attend only launch kernels: they allocate nothing, and may
 *    be captured in a CUDA graph.
 *  - A client has ONE TIMELINE: its calls are enqueued on one stream, or on several that the caller
 *    orders behind each other in the order of the calls (one that captures and one that launches
 *    what was captured, say). Pages that one call gives back are written by what later ones
 *    enqueue. Functions of kvm.h have no stream: they count as enqueued when they are called,
 *    behind everything enqueued so far.
 *  - Copies between device and host are enqueued by a thread of the client, on streams of its own,
 *    a few at a time. A page that is on its way to the host is handed out again when its copy has
 *    been enqueued: an update that finds no other page waits until then.
 *  - Before kvm_client_close, synchronize every stream that uses the client's pages. The library
 *    waits for its own copies only.
 *  - While a stream of the device is being captured, in whatever capture mode, call
 *    kvm_cuda_set_lengths, kvm_cuda_append, kvm_cuda_attend and kvm_cuda_merge only: others may
 *    wait for the device, which CUDA does not allow then. Only the stream that a call is given is
 *    asked whether it is captured: a call on another stream is not refused, and may end the
 *    capture.
 *
 * What a captured graph may assume
 *
 *  - The kernels of a batch have a fixed number of blocks, and take everything that changes from
 *    step to step (page tables, lengths, rows, the division of the work) out of the batch's own
 *    device memory, which kvm_cuda_update overwrites in stream order. So: capture kvm_cuda_append
 *    and kvm_cuda_attend of all layers once, then for each step kvm_cuda_update and a launch of the
 *    graph, on streams that are ordered.
 *  - Fixed by the capture: the batch, the layer, addresses and strides of k, v, q, o, lse and
 *    log-weights, the address of lengths, scale. Free: which sequences, how many up to max_items,
 *    how many tokens each appends and queries, trees, which rows of the tensors. A batch is
 *    captured after its first update, for which one without items will do. Tensors are checked
 *    against the rows of the last update: of a capture behind an empty one nothing is checked, and
 *    the engine sees to it that they have the rows of every update that the graph is launched for.
 *  - A graph must not be launched once its batch has been destroyed.
 *  - One batch serves graphs of several sizes, and steps that no graph has: a graph is launched
 *    after an update whose rows (append_row, query_row) the tensors have that it was captured with.
 *  - Pages are reserved by kvm_cuda_update, so a launch never lacks memory.
 *  - Launching a graph after something has happened to the batch's sequences (truncate, free,
 *    spill, an update of another batch) without an update in between reads pages that are no longer
 *    theirs. Calls of this header refuse to (INVALID); a graph cannot.
 *
 * What a device does (all else is refused with UNSUPPORTED and a sentence, mostly when a space is
 * registered)
 *
 *  - Head dims 64, 128 and 256, and 80, 96 and 192 but in pages of int4; groups of at most 16 q
 *    heads. KVM_SPACE_V_IN_K is there for multi-head latent attention: head_dim_k 576, head_dim_v
 *    512, pages of fp16 and bf16, groups of up to 128 q heads.
 *  - Pages of fp16, bf16, int8, fp8 and int4: K and V, all heads and all layers of a space alike,
 *    in dims and codec. At most 16 classes of heads that keep the same in a layer.
 *  - Retentions FULL and SINKS_RECENT, at positions ABSOLUTE; windows, soft caps, sink logits,
 *    KVM_LAYER_ALIAS and KVM_LAYER_ABSENT; no alibi_slopes, no KVM_LAYER_PAIR.
 *  - Exact attention: no indexes, no approximate modes.
 *  - Of kvm.h's functions those for spaces and sequences; not KVM_SEQ_MANUAL_COMMIT, nor publish,
 *    take, prefetch, priorities, drop, prefixes and snapshots (a bridge leads to those), nor queues
 *    and arenas and what needs them: kvm_read is kvm_cuda_read here.
 *
 * What is otherwise than kvm.h says
 *
 *  - A batch queries at most max_query tokens of a sequence in one update, to 65536: a prompt, or
 *    what follows a prefix, is one update of a batch that was made for as many, and else comes in
 *    chunks. Trees are for batches of at most 64.
 *  - A page holds 64 tokens of all layers whose heads keep the same, a part for each layer one
 *    behind the other: kvm_seq_info.n_pages and the statistics count such pages. A device has at
 *    most 64 kinds of them (numbers of heads, channels and layers, codecs) in use at once:
 *    kvm_space_register fails with LIMIT beyond, with NO_SPACE where the pool has no room for one
 *    page, with UNSUPPORTED where a page would have 4 GiB.
 *  - kvm_seq_fork takes longer for longer sequences: 4 bytes and a count on the host for each page.
 *    It takes no memory of the device.
 *
 * After a failure
 *
 *  - An update, and all that books, is all or nothing. Where an append or attend of a step fails,
 *    or the engine gives a step up, its new tokens hold anything: kvm_seq_truncate each sequence to
 *    its length before the update, and update again.
 *  - A fault of any kernel of the process (an illegal address, say) is reported as DEVICE by
 *    whichever call comes next and by all after it: destroy batches, close, and end the process.
 *
 * Threads: functions that take a client may be called from any thread, those that take a batch from
 * one at a time; the order of the timeline is the caller's business. Calls of one client take
 * turns: while an update waits for the device, all others wait for it.
 *
 * This header is for C and C++: neither kvm's Python package nor its crate has it. kvm_cuda_open
 * says whether a device can be used, before anything else is done: UNSUPPORTED where the library
 * was built without CUDA, DEVICE where there is no driver or no such device.
 */
#ifndef KVM_CUDA_H_
#define KVM_CUDA_H_

#include "kvm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A cudaStream_t or CUstream; NULL is the legacy default stream (which cannot be captured). */
typedef void *kvm_cuda_stream;

typedef struct kvm_cuda_params {
  uint32_t struct_size;
  uint32_t flags;      /* reserved, zero */
  uint32_t device;     /* ordinal, as the CUDA runtime counts */
  uint32_t reserved0;  /* zero */
  uint64_t pool_bytes; /* hard cap of device memory for pages; 0: 80 % of what is free now, so open
                        * behind loading the weights. Memory is taken when pages first need it,
                        * 32 MiB or more at a time, and kept until pages of another kind need it or
                        * the client closes. Leave it free: where another allocator of the process
                        * has taken it, an update answers NO_SPACE below the cap */
  uint64_t host_bytes; /* page-locked host memory for spilled sequences, locked now, which takes
                        * longer the more it is; 0: none */
  /* The kvmd that owns the memory; NULL: this process does. Parameters of a kvm_connect: a path of
   * NULL means what it means there. device is this process's number of the device; kvmd, which may
   * count them differently, finds it by its UUID. pool_bytes 0: what kvmd's device.quota gives. */
  const kvm_connect_params *server;
  uint64_t reserved[3];
} kvm_cuda_params;

/* Opens a client whose sequences lie in the memory of one device, of compute capability 8.0 or
 * newer; another device has a client of its own. It uses the device's primary context, as the CUDA
 * runtime does; which device is current for the caller does not matter, and stays as it is.
 * Release with kvm_client_close.
 *
 * With a server, kvmd owns the device memory and keeps the books, and this process maps the memory
 * and launches the kernels: engines then share a device's memory under kvmd's limits, and what one
 * of them held is free when it ends, in whatever way. All calls are the same; those that need to
 * know of pages that are new (an update, whatever names a sequence after a spill or a fetch) ask
 * kvmd once. If kvmd has refused another engine memory that this one has mapped and does not use,
 * the next of these calls waits for the device and gives it back.
 * If kvmd ends, or does not answer within timeout_ns (a minute at least), streams go on at once,
 * over memory that is still mapped and whose contents kvmd may not have finished: what was enqueued
 * since the last synchronization is to be thrown away. Calls answer DISCONNECTED from then on,
 * kvm_client_reconnect does nothing, and what is left is kvm_cuda_batch_destroy and
 * kvm_client_close.
 * Fails:   UNSUPPORTED (built without CUDA; the server owns no device memory), DEVICE (no driver
 *          or one that is too old, no such device, one below 8.0, the driver's failure), NO_SPACE
 *          (on the device), NO_MEMORY (host_bytes), INVALID. With a server also as kvm_connect,
 *          NOT_FOUND (it does not own this device), QUOTA, NO_SPACE (host_bytes), VERSION.
 * Threads: any. */
KVM_API kvm_status kvm_cuda_open(const kvm_cuda_params *params, kvm_client **out);

/* ============================================================================================
 * Batches: what a step is planned in
 * ============================================================================================ */

/* Room on the device for one step of up to max_items sequences of a space. */
typedef struct kvm_cuda_batch kvm_cuda_batch;

enum {
  /* Results do not depend on what else is in the batch, nor on the GPU's size: work is divided by a
   * sequence's own length and number of query rows alone. It costs what pieces of 4,096 tokens
   * leave uneven, mostly in short launches. */
  KVM_CUDA_REPRODUCIBLE = 1u << 0
};

typedef struct kvm_cuda_batch_params {
  uint32_t struct_size;
  uint32_t flags; /* KVM_CUDA_* */
  kvm_space_id space;
  uint32_t max_items;      /* 1 to 1024; required */
  uint32_t max_append;     /* tokens (rows of k and v) of one update, to 2^20; 0: max_items */
  uint32_t max_query;      /* query tokens of one item, 1 to 65536; 0: 1. It chooses the kernel of
                            * all steps of the batch: up to 64 the decode kernel, with 16 or 32 rows
                            * (query tokens times q heads of a kv head) that read K and V once;
                            * above 64 the prefill kernel, with 128, which knows neither trees nor
                            * KVM_SPACE_V_IN_K (UNSUPPORTED). So prompts and decode have a batch
                            * each, which may share tensors. A sequence is in one of them in each
                            * step; its first update in the other one writes its page table whole,
                            * and where batches take turns with a sequence every update does */
  uint32_t max_query_rows; /* rows of q, o and lse, to 2^20; 0: max_items * max_query. What the
                            * plan takes of memory goes by it */
  uint64_t max_tokens;     /* of the longest sequence behind any update, tokens that may turn out
                            * rejected (max_unsure) included; required; at most 2^31 - 1 */
  /* Log-weights (kvm_cuda_attend_params.log_weights): that of item i, kv head h and position p is
   * element i * stride_item + h * stride_head + p, and the buffer has max_tokens of them for each
   * item and head. -infinity hides a token from the head; NaN and +infinity make the answers of
   * rows that see it NaN. Both strides 0: there are none. */
  uint64_t log_weight_stride_item;
  uint64_t log_weight_stride_head; /* below 2^32 */
  /* Tokens, to 65536, by which sequences may be shorter than the host has been told when a step
   * runs: kvm_cuda_set_lengths then says on the device how long they are. 0: none. */
  uint64_t max_unsure;
  uint64_t reserved[3];
} kvm_cuda_batch_params;

/* Makes a batch: page tables, the plan of a step and partial results, all in device memory of its
 * own, beside pool_bytes, and four page-locked buffers on the host, each for all that an update may
 * change (its plan, rows to append, trees: with many items, heads and rows tens of MiB). Page
 * tables are max_items * max_tokens / 16 bytes (8 MiB for 1024 items and 131072 tokens), once for
 * all layers whose heads keep the same: layers of several head classes, or that keep other tokens
 * or numbers of heads, have further ones.
 * Release it before the client.
 * Fails:   INVALID, NOT_FOUND, STALE, LOST (the space), UNSUPPORTED (more pieces of work, rows or
 *          page-table entries than a launch can have), NO_SPACE (on the device), NO_MEMORY, DEVICE.
 * Threads: any. */
KVM_API kvm_status kvm_cuda_batch_create(kvm_client *client, const kvm_cuda_batch_params *params,
                                         kvm_cuda_batch **out);

/* Waits for the device, then releases the batch. NULL is accepted. */
KVM_API void kvm_cuda_batch_destroy(kvm_cuda_batch *batch);

/* One sequence's share of a step. A seq of 0 leaves the place empty, so that the others can keep
 * theirs: a sequence that changes places has its page table written anew. 32 bytes. */
typedef struct kvm_cuda_item {
  kvm_seq_id seq;
  uint32_t n_append;   /* tokens appended to every layer; 0: none */
  uint32_t append_row; /* first row in k and v */
  uint32_t n_query;    /* query rows: the sequence's last tokens after the append; 0: none */
  uint32_t query_row;  /* first row in q, o and lse */
  /* NULL: a query row sees the tokens up to its own. Else [n_query] words in host memory, read by
   * the call, as kvm_step_params.tree_mask has them: bit i of word j, row j sees the token of row i
   * (what comes before the n_query tokens is seen by all). Not in batches whose
   * max_query is above 64. A row's window and policy go by its position, not by its depth in the
   * tree. kvm_seq_truncate takes back from the end only: where what was accepted is not the tree's
   * first rows, truncate to before the tree and append the rows of the accepted path again,
   * gathered in front of those of the next update. */
  const uint64_t *tree_mask;
} kvm_cuda_item;

/* Begins a step: reserves the pages of all tokens to be appended, in all layers, lengthens the
 * sequences by them, and enqueues what brings the batch's device memory up to date (copies of pages
 * that a fork shares and that are about to be written among it). Until the appends of all layers
 * that store something have been enqueued too, the new tokens hold anything.
 * All or nothing: after a failure every sequence is as before and the batch as after its last
 * update; after DEVICE, NO_MEMORY or INTERNAL the batch must be updated again before it is used.
 * Waits for the device only where the caller is four updates ahead of it, where memory is to be
 * taken from pages of another kind (with other numbers of heads, channels or layers, or another
 * codec) or the device has none left to map, where the only free pages are those of a spill that
 * has not come to them, where a sequence is still being fetched (kvm_cuda_get_seq_info says whether
 * it is), and after a failure.
 * One that changes more than some 16384 entries of page tables (there is one for each page; a
 * sequence that is new to its place has them all written) counts as several.
 * An item that neither appends nor queries drops nothing of its sequence.
 * Fork behind the appends of a step, or in front of the tokens that it appends: a fork that is made
 * between and has these may find anything in their rows.
 * Fails:   INVALID (a number beyond the batch's, query rows that overlap, a sequence twice, more
 *          query tokens than the sequence has, or may have where the batch has max_unsure; bits
 *          of a tree beyond n_query), NO_SPACE (of the pool, or of the device), LIMIT
 *          (max_tokens), PARTIAL (a policy has dropped what a query row should see), BUSY (a
 *          sequence is on the host: kvm_cuda_fetch), NOT_FOUND, STALE, LOST, DEVICE; what a move of
 *          a sequence has failed with (below); UNSUPPORTED while the stream is being captured, and
 *          of a tree in a batch whose max_query is above 64. */
KVM_API kvm_status kvm_cuda_update(kvm_cuda_batch *batch, const kvm_cuda_item *items,
                                   uint32_t n_items, kvm_cuda_stream stream);

/* Enqueues what brings the step to lengths that only the device knows, in a batch that has
 * max_unsure: once behind each update and before what the step appends and attends, which answer
 * INVALID until then. It may be captured, and then counts for what is captured behind it only.
 *   lengths   uint32_t [max_items], KVM_BUFFER_DEVICE, read when the stream comes to it: the tokens
 *             of each item's sequence before this step's append. NULL: as many as the host says.
 *
 * Engines whose next step begins before the device has said what became of the last one, of a
 * speculative decoder's draft say, plan for the longest case. kvm counts all tokens that have been
 * appended and not taken back: it says n. Of these the device may know that only the first ones
 * count. Then the step appends there, over what does not; its query rows are the last n_query
 * tokens of what the sequence has become, and see no token behind it. Windows, policies, trees and
 * log-weights go by these positions. Page tables are as they were: pages of the longest case that
 * are not reached stay unused.
 *
 * A length counts as the nearest of n - max_unsure to n that leaves the sequence's sure tokens in
 * it: those that it had behind its last update in a batch without max_unsure, and those that a step
 * of this batch could not do without: it had at least n - max_unsure before, and keeps all but
 * max_unsure of what it appends. Truncating takes back sure tokens, too. So prompts that
 * another batch has appended are never in doubt; and while lengths on the device are true, and no
 * more than max_unsure below what the host says, nothing is changed of them.
 *
 * The host learns the truth whenever it does, and then says it, which enqueues nothing:
 *
 *    for t = 0, 1, 2, ...:                            drafts of K tokens, one step ahead: each item
 *        kvm_cuda_update(batch, items, n, stream);    has n_append = n_query = K, and the batch
 *        cudaGraphLaunch(step, stream);               max_unsure = K - 1, for one token is kept
 *        wait for what was kept of step t - 1;        (its copy to the host has its own event)
 *        kvm_seq_truncate(client, seq, N + K);        N: tokens with those that step t - 1 kept; K:
 *                                                     step t's, which only the device knows of
 *
 * where the graph holds kvm_cuda_set_lengths, the appends and attends of all layers, and the
 * engine's own kernels, which count the lengths: each step adds what it keeps. With m steps ahead,
 * max_unsure is m * (K - 1) and the truncation leaves N + m * K. A sequence that is truncated must
 * not be launched again without an update, as always: truncate behind the launch.
 *
 * A tree's accepted path need not be its first rows: each step may append the last D tokens that
 * were accepted once more, in front of its draft, where D is the tree's depth. Its lengths are then
 * D below the truth, the host truncates to D less, and max_unsure counts these D, too. Where fewer
 * than D of them come from the tree, the others are written over themselves.
 *
 * Policies keep max_unsure tokens and up to as many appended ones more than they would, so that
 * what a shorter sequence sees is there. A fork has what the host says; one that may be appended to
 * over shared pages copies these. The other functions, kvm_cuda_batch_get_indices among them, know
 * the host's lengths only. With KVM_CUDA_REPRODUCIBLE, work is divided as for the true lengths; but
 * a sequence that the host takes for longer than a window or a policy's tokens, and that is not, is
 * attended row by row.
 * Fails:   INVALID (max_unsure is 0, no update yet, a sequence that has changed since; lengths are
 *          no device memory, too small, not at a multiple of 4), DEVICE. Threads: as
 *          kvm_cuda_append. */
KVM_API kvm_status kvm_cuda_set_lengths(kvm_cuda_batch *batch, const kvm_buffer *lengths,
                                        kvm_cuda_stream stream);

/* Enqueues the append of one layer, as the last update said.
 *   k, v   [row][n_kv_heads][dim], buffers of KVM_BUFFER_DEVICE, F32, F16 or BF16, both alike;
 *          rounded to the stored dtype to nearest even; I8 and F8E4M3 rows get their scales here,
 *          I4 rows their scales and zeros, and are the bytes that a CPU would store. I4 rows are
 *          encoded at once, also where a page is not full; 64 channels of which one is not finite,
 *          or above 2^126, read as NaN. Strides count elements, as in kvm.h, and are
 *          the same for k and v; they and the addresses are multiples of 16 bytes.
 *          With KVM_SPACE_V_IN_K rows of k are all there is: v is NULL, or NONE.
 * Fails:   INVALID (geometry, an ALIAS or ABSENT layer, a tensor that is too small, no update yet,
 *          a sequence that has changed since, no lengths yet where the batch has max_unsure),
 *          DEVICE. */
KVM_API kvm_status kvm_cuda_append(kvm_cuda_batch *batch, uint32_t layer, const kvm_tensor *k,
                                   const kvm_tensor *v, kvm_cuda_stream stream);

typedef struct kvm_cuda_attend_params {
  uint32_t struct_size;
  uint32_t flags; /* reserved, zero */
  uint32_t layer;
  float scale;           /* 0: the space's softmax_scale; must be positive */
  kvm_tensor q;          /* [row][n_q_heads][head_dim_k], DEVICE, the space's dtype; where that is
                          * I8, F8E4M3 or I4, F16 or BF16. Addresses and strides of q and o: as of
                          * k */
  kvm_tensor o;          /* [row][n_q_heads][head_dim_v], likewise, F32, F16 or BF16 */
  kvm_tensor lse;        /* [row][n_q_heads], F32, natural logarithm; NONE: not wanted */
  kvm_buffer log_weights; /* DEVICE, F32, where the batch has strides for them; else NONE */
  uint64_t reserved[4];
} kvm_cuda_attend_params;

/* Enqueues attention of the last update's query rows to one layer: causal or as the trees say,
 * restricted to the layer's window and the heads' policies; logits capped as the space says, then
 * each key's log-weight added. A row that sees
 * no key has o = 0 and lse = -inf. Rows that no item names are not written.
 * The bars of kvm_gpu_check are: o within 5e-3 of fp64 where pages or o are BF16, 2e-3 with I4
 * pages and 1e-3 else, lse within 1e-4; in an emulator at most .55 of the first three were
 * measured, and 1e-5.
 * Fails: as kvm_cuda_append, but that an ALIAS is attended as any layer is. PARTIAL never: update
 * said so. */
KVM_API kvm_status kvm_cuda_attend(kvm_cuda_batch *batch, const kvm_cuda_attend_params *params,
                                   kvm_cuda_stream stream);

/* ============================================================================================
 * Beside tokens that are attended to elsewhere
 * ============================================================================================
 *
 * Where the middle of a long context lies in host memory, in a sequence of kvm.h with an index, and
 * CPUs answer for it (exactly, or by a sample), the device answers for the rest, and the two
 * states are merged. With SINKS_RECENT of n_sinks S and n_recent R on the device, and n tokens
 * after an update, its query rows, which are the last ones, see
 *
 *    row at position p, n - n_query <= p < n:   [0, S) and (p - R, p]
 *
 * by the token, though memory is freed by the page. The other side has the complement if its
 * sequence holds the tokens [S, n - R), from its position 0 on, and is asked with as many query
 * rows at KVM_POSITION_END: its last row sees all n - R - S of them, the one before it all but
 * the last, which that row of the device still sees, and so on. Where kvm_seq_truncate leaves n
 * tokens on the device, one has to leave n - R - S there.
 * (That takes n_query <= n - R - S, and keys that carry their positions, as kvm.h has them in
 * ABSOLUTE. While n <= S + R there is nothing for the other side. Of a tree, rows see each other on
 * the device alone: no word of it goes to the other side.)
 *
 * So with each update that appends a tokens, the tokens [n - a - R, n - R), less the first S, cross
 * over. Between the appends of an update and the next update these are all still there
 *  - where the update has appended them, as those of a prompt in one update;
 *  - where a is at most the policy's `slack`, whatever n_query is;
 * and else can be read before the update, if it appends at most R: before it they are all seen.
 * (Where more than `slack` tokens were taken back since the update before, those that the window
 * had left behind may be gone by then.)
 * kvm_cuda_read gets them, and kvm_append gives them to the other side, in front of its attend. The
 * way back is kvm_cuda_append. Rows of a prompt see, on the device, sinks and window as all rows
 * do: the full attention of a prompt is computed before it is cut, by a kernel of the engine on its
 * k and v, or in a sequence of another space that keeps all.
 * examples/cuda/cuda_hybrid.c is the whole of it. */

typedef struct kvm_cuda_read_params {
  uint32_t struct_size;
  uint32_t flags;    /* reserved, zero */
  uint32_t item;     /* the sequence's place in the batch's last update */
  uint32_t layer;    /* an ALIAS reads its target's rows */
  uint64_t position; /* of the first token */
  uint64_t n_tokens; /* 0: nothing happens */
  kvm_tensor k;      /* [n_tokens][n_kv_heads][head_dim_k], F32, F16 or BF16; NONE: not wanted */
  kvm_tensor v;      /* [n_tokens][n_kv_heads][head_dim_v], likewise; with KVM_SPACE_V_IN_K the
                      * first channels of k */
  uint64_t reserved[4];
} kvm_cuda_read_params;

/* Enqueues a copy of stored K and V of tokens [position, position + n_tokens) of an item of the
 * last update, of all kv heads, as kvm_read gives them: converted to the tensors' dtypes, from I8,
 * F8E4M3 and I4 rows by their scales. Tensors are KVM_BUFFER_DEVICE: device memory, or page-locked
 * host memory at an address that kernels of the device can use (cudaHostAlloc; cudaHostRegister,
 * the address that cudaHostGetDevicePointer gives). Addresses and strides are multiples of 16
 * bytes; k and v may differ in dtypes and strides. Tokens whose append is not enqueued yet read as
 * anything. Not to be captured.
 * Fails: INVALID (geometry, an ABSENT layer, no such item, tokens beyond the sequence's, a tensor
 *        that is too small, no update yet, a sequence that has changed since: one that is on the
 *        host, which an update answers BUSY to, is not in the last), PARTIAL (a policy has dropped
 *        the page of a token, for some head), UNSUPPORTED (the stream is being captured), DEVICE.
 * Threads: as kvm_cuda_append. */
KVM_API kvm_status kvm_cuda_read(kvm_cuda_batch *batch, const kvm_cuda_read_params *params,
                                 kvm_cuda_stream stream);

/* Enqueues kvm_merge on the device: states (o, lse) of the same query rows and heads over disjoint
 * sets of tokens become that of all of them,
 *
 *    o = sum_i e^(lse_i - lse) o_i,   lse = ln sum_i e^lse_i
 *
 * (FlashInfer's merge_states). An empty state (lse = -inf) counts nothing, whatever its o holds,
 * and empty states alone give o = 0, lse = -inf; what is not a number in another one shows.
 * Sink logits count in every attend: of spaces that have them only one may attend a layer.
 * Tensors are those of kvm_merge_params with buffers of KVM_BUFFER_DEVICE, in device memory or
 * page-locked host memory as above: what CPUs have answered is read where they wrote it. They must
 * have written it when the device comes to the merge: call it behind kvm_step, or make the stream
 * wait. n_states is at most 8, n_rows at most 2^20, n_heads 1024; dim
 * is a multiple of 8 up to 576. o may be F32, F16 or BF16, each its own. Sums are in fp32: o is
 * within 2e-6 of the largest magnitude in a row, before it is rounded to its dtype, lse within 1e-5
 * where it is up to 50 (in an emulator). Addresses and strides of o and out_o are multiples of 16
 * bytes. out_o may be the memory of any of o with the same dtype and strides, out_lse likewise. May
 * be captured: the addresses are fixed, what lies there is not.
 * Fails: INVALID, UNSUPPORTED (not a client of kvm_cuda_open), DEVICE. Threads: any. */
KVM_API kvm_status kvm_cuda_merge(kvm_client *client, const kvm_merge_params *params,
                                  kvm_cuda_stream stream);

/* ============================================================================================
 * Pages, for kernels of the engine
 * ============================================================================================ */

/* Where the pages of one head class of a layer lie (a class: kv heads that keep the same tokens; a
 * layer without policies has one). A page has 64 tokens of all heads of the class. Strides are in
 * bytes; an element is 2 bytes in spaces of F16 and BF16, 1 with I8 and F8E4M3, a half with I4,
 * where channels of even numbers have the lower half. Page p, head h (the h-th of the class),
 * token t of the page, channel c:
 *
 *    K  k + p * page_stride + h * head_stride + t * token_stride + c * element
 *    V  v + likewise
 *    scales of I8 and F8E4M3 rows, BF16, one for each row:
 *       k_scales + p * page_stride + h * scale_head_stride + t * 2, and v_scales likewise
 *    scales and zeros of I4 rows, BF16, [64 channels][2]: an element is code * scale + zero
 *       k_scales + p * page_stride + h * scale_head_stride + t * head_dim / 16, and likewise
 *
 * That is what others call HND with a page stride of its own:
 *  - FlashInfer (docs.flashinfer.ai, "KV-Cache Layout"): a tuple (k_cache, v_cache) of tensors
 *    [n_pages, n_heads, 64, head_dim], kv_layout "HND", with strides (page_stride, head_stride,
 *    token_stride, element) over the element's size; or paged_kv_t with k_data, v_data and the same
 *    numbers as stride_page, stride_h, stride_n. paged_kv_indices are those of
 *    kvm_cuda_batch_get_indices, one item behind the other; last_page_len is
 *    (n_tokens - 1) % 64 + 1.
 *  - vLLM (its FlashAttention backend): key_cache and value_cache [n_pages, 64, n_heads, head_dim]
 *    with strides (page_stride, token_stride, head_stride, element); block_size 64; a row of
 *    block_table is what kvm_cuda_batch_get_indices gives for an item.
 *
 * With KVM_SPACE_V_IN_K pages have a K plane only, v is k, and a row of V the first head_dim_v
 * channels of the row of K. With one kv head that is [n_pages, 64, 576] with a page stride of its
 * own, the cache that kernels for multi-head latent attention read: kv_cache of vLLM's MLA backends
 * and, as [n_pages, 64, 1, 576], k_cache of FlashMLA; ckv_cache and kpe_cache of FlashInfer's
 * BatchMLAPagedAttentionWrapper are its first 512 channels and its last 64.
 *
 * Pages are virtual memory of this device alone: legacy IPC handles, GPUDirect RDMA and peers do
 * not reach them. What transfers K and V elsewhere copies them out with kvm_cuda_read.
 *
 * These kernels know no scale for each row: I8, F8E4M3 and I4 pages need kernels that do. Addresses
 * stay as long as the batch. Layers whose classes keep the same tokens with as many heads
 * share pages: they differ in addresses only, and one list of indices is good for all of them.
 *
 * The engine's kernels may read pages behind the append of the layer on the timeline, and write the
 * rows that an update has appended instead of kvm_cuda_append. All other rows may be shared.
 *
 * Heads with sinks and a window keep what the update's query rows (n_query) and later ones see, and
 * with `slack` that many tokens more. A kernel that computes the attention of a whole suffix finds
 * what its first rows should see where the update had the suffix's length as n_query, or where the
 * policy has it as slack; else that has been dropped. */
typedef struct kvm_cuda_pages {
  uint32_t struct_size;
  uint32_t codec;          /* KVM_CODEC_*: of K and V */
  uint32_t n_classes;      /* of the layer */
  uint32_t n_heads;        /* of the class */
  uint32_t head_dim;
  uint32_t page_tokens;    /* 64 */
  uint64_t kv_head_mask[2]; /* the heads, in ascending order */
  uint64_t k;              /* device addresses: of page 0 */
  uint64_t v;
  uint64_t k_scales;       /* 0: there are none */
  uint64_t v_scales;
  uint64_t page_stride;
  uint64_t head_stride;
  uint64_t token_stride;
  uint64_t scale_head_stride;
  uint64_t n_pages;        /* indices are below; not all are mapped: only pages of sequences are */
  /* Device address of the batch's own table, which updates bring up to date on their stream:
   * uint32_t [item][table_stride / 4]; the index of a page is its entry & KVM_CUDA_INDEX_MASK. For
   * kernels that can mask; it needs no copy, and a graph may read it. Entries of pages that a
   * policy has dropped, and those behind the last page, are anything. */
  uint64_t table;
  uint64_t table_stride;
  uint32_t head_dim_v;     /* of a row of V: head_dim, but with KVM_SPACE_V_IN_K */
  uint32_t reserved0;
  uint64_t reserved[3];
} kvm_cuda_pages;

enum { KVM_CUDA_INDEX_MASK = (1 << 22) - 1 };

/* Of an ALIAS: its target's pages.
 * Fails: INVALID (the layer is ABSENT, no such class). Threads: as kvm_cuda_append. */
KVM_API kvm_status kvm_cuda_batch_get_pages(kvm_cuda_batch *batch, uint32_t layer,
                                            uint32_t head_class, kvm_cuda_pages *out);

/* The pages of an item of the last update, in the order of their tokens, into host memory: plain
 * indices, as block tables have them; -1 for pages that a policy has dropped. *n_tokens: those of
 * the sequence; there are (n_tokens + 63) / 64 indices, none for a place that is empty.
 * Fails: INVALID (not below max_items, no such class, more than `capacity` indices; no update yet,
 * or a sequence of the batch has changed since). Threads: as kvm_cuda_append. */
KVM_API kvm_status kvm_cuda_batch_get_indices(kvm_cuda_batch *batch, uint32_t layer,
                                              uint32_t head_class, uint32_t item,
                                              int32_t *indices, uint64_t capacity,
                                              uint64_t *n_tokens);

/* ============================================================================================
 * Between device and host
 * ============================================================================================ */

/* Moves the pages of a sequence that no fork shares to page-locked host memory, behind what is
 * enqueued on `stream`. What is enqueued later does not wait for the copies unless it needs these
 * pages. The call books what goes where, and is refused or not; a thread of the
 * client enqueues the copies, by the chunk of 2 MiB, at most 8 at a time for each direction. Pages
 * that do not lie together are gathered on the device, so copies are of 1 MiB and more where the
 * sequence has as much. The sequence can then only be fetched, asked about and freed; what else is
 * tried answers BUSY.
 *
 * A move that fails when its copies are enqueued (the driver's failure, and then all moves that
 * wait) is taken back as far as they were not: of a spill, pages stay on the device, and the
 * sequence with them if none has left; of a fetch, pages stay on the host. Nothing is lost. The
 * next call that names the sequence in order to use it (an update, a fork, a truncate, a spill, a
 * fetch) answers with the failure, once, and has done nothing; BUSY while it is still to come.
 * Fails:   NO_SPACE (host_bytes), UNSUPPORTED (host_bytes is 0; the stream is being captured),
 *          NOT_FOUND, STALE, LOST, DEVICE. A sequence that is on the host already: nothing happens.
 * Waits:   while an earlier move of the same sequence is being enqueued.
 * Threads: any. */
KVM_API kvm_status kvm_cuda_spill(kvm_client *client, kvm_seq_id seq, kvm_cuda_stream stream);

/* Brings a sequence back, likewise. The first update that has it in its batch makes its stream wait
 * for the copies, and waits itself until the last one has been enqueued; fetch early, and they run
 * beside the steps of others. Pages that a spill has been asked to free are taken at once.
 * Fails:   NO_SPACE (of the pool; the sequence stays on the host), UNSUPPORTED (host_bytes is 0;
 *          the stream is being captured), NOT_FOUND, STALE, LOST, DEVICE.
 * Waits:   as kvm_cuda_spill; and where memory is to be taken from pages of another kind.
 * Threads: any. */
KVM_API kvm_status kvm_cuda_fetch(kvm_client *client, kvm_seq_id seq, kvm_cuda_stream stream);

/* Likewise, of the tokens at [begin, end); an `end` beyond the last token means all from `begin`
 * on. A spill takes the pages (64 tokens, of every layer and head class) that lie in there with all
 * their tokens, the sequence's last page counting as whole; a fetch brings back those of which any
 * token lies in there. So a scheduler that lacks n pages takes n, from the end of a sequence that
 * it has put off, and only these have to come back. A sequence of which anything is away cannot be
 * attended or appended to: attention is exact and reads it all. A range without pages to move:
 * nothing happens. (But a spill of a whole sequence puts it away even where forks share all of its
 * pages: nothing is freed, and it has to be fetched, which moves nothing.)
 * Fails:   INVALID (begin is not below end), else as above. */
KVM_API kvm_status kvm_cuda_spill_range(kvm_client *client, kvm_seq_id seq, uint64_t begin,
                                        uint64_t end, kvm_cuda_stream stream);
KVM_API kvm_status kvm_cuda_fetch_range(kvm_client *client, kvm_seq_id seq, uint64_t begin,
                                        uint64_t end, kvm_cuda_stream stream);

enum {
  KVM_CUDA_SEQ_HERE = 0,    /* an update may have it; it waits, if at all, on its stream */
  KVM_CUDA_SEQ_COMING = 1,  /* being fetched: an update would wait until that is enqueued */
  KVM_CUDA_SEQ_LEAVING = 2, /* being spilled */
  KVM_CUDA_SEQ_AWAY = 3     /* on the host, in part or all */
};

typedef struct kvm_cuda_seq_info {
  uint32_t struct_size;
  uint32_t state;            /* KVM_CUDA_SEQ_* */
  uint64_t n_pages;          /* on the device, and those on their way to it */
  uint64_t n_host_pages;     /* on the host, and those on their way to it */
  uint64_t n_waiting_pages;  /* of a move, whose copies are not enqueued yet */
  uint32_t failure;          /* kvm_status that the next use of the sequence answers with; or 0 */
  uint32_t reserved0;
  uint64_t reserved[3];
} kvm_cuda_seq_info;

/* Where a sequence is. Waits for no move, and takes no failure back.
 * Fails:   NOT_FOUND, STALE, LOST, UNSUPPORTED (not a client of kvm_cuda_open). Threads: any. */
KVM_API kvm_status kvm_cuda_get_seq_info(kvm_client *client, kvm_seq_id seq,
                                         kvm_cuda_seq_info *out);

/* ============================================================================================
 * Between device sequences and those of host memory
 * ============================================================================================
 *
 * Sequences of kvm_connect and kvm_open_embedded lie in host memory, and have there all that kvm.h
 * offers: attention and indexes on CPUs, a disk, snapshots, prefixes that every client of a user
 * finds, whatever engine computed them. A bridge copies tokens to them and back:
 *
 *    kvm_cuda_bridge_create(client, &params, &bridge);             once, for a space on each side
 *
 *    kvm_cuda_store(bridge, &turn, stream, &stored);               a turn has ended: to host memory
 *    kvm_seq_fork(host, stored, KVM_POSITION_END, &prompt);
 *    kvm_prefix_publish(host, prompt, hashes, n_hashes, keep_ns);  (EXISTS: free prompt again)
 *    ...
 *    turn.onto = stored, turn.begin = n_stored;                    the next turn: only what is new
 *    kvm_cuda_store(bridge, &turn, stream, &longer);
 *    kvm_seq_free(host, stored);                                   longer shares what it had
 *    ...
 *    kvm_prefix_find(host, &find, &found);                         this engine later, or another
 *    prefix.source = found.seq, prefix.end = found.n_tokens;       (0: nothing was found)
 *    kvm_cuda_load(bridge, &prefix, stream, &seq);                 onto the device; NOT_FOUND and
 *                                                                  STALE: it has gone meanwhile
 *
 * Tokens are copied row by row, so the two spaces may differ in codecs, policies, indexes and
 * windows: they agree in layers, kv heads, head dims, KVM_SPACE_V_IN_K and fingerprint. Rows travel
 * in the narrower dtype of the two where both sides store numbers (BF16 to BF16 keeps every bit),
 * in that of the side that does where one has codes, in F32 where both have: codes are made anew
 * then, as kvm_append makes them of what kvm_cuda_read gives, and may differ by one.
 * examples/cuda/cuda_prefix.c is one turn of it.
 *
 * A copy holds a fork of its source, which kvm_seq_list shows: until it ends, spilling or freeing
 * the source gives back only what the fork does not share, and whoever frees all sequences of a
 * client waits for its copies first. Of a host space with KVM_RETAIN_HEAVY, what is kept of a store
 * is arbitrary: attention mass does not cross. */
typedef struct kvm_cuda_bridge kvm_cuda_bridge;

typedef struct kvm_cuda_bridge_params {
  uint32_t struct_size;
  uint32_t flags;          /* reserved, zero */
  kvm_client *host;        /* of kvm_connect or kvm_open_embedded */
  kvm_space_id host_space; /* of it */
  kvm_space_id space;      /* of the device's client */
  uint64_t max_tokens;     /* of the longest sequence on the device; required; at most 2^31 - 1. The
                            * batch has 20 bytes a token on the device, to 2^20 of them, and four
                            * times as much page-locked memory */
  uint64_t staging_bytes;  /* what is under way at once: an arena of `host`, page-locked, and as
                            * much device memory beside pool_bytes; 0: 64 MiB */
  uint64_t reserved[4];
} kvm_cuda_bridge_params;

/* Makes a bridge, with a queue and an arena of `host`, and a batch of one item (kvm_cuda_batch) and
 * a stream on the device. Release it before either client.
 * Fails:   INVALID (the spaces do not agree: layers, aliases, kv heads, dims, fingerprint;
 *          staging_bytes hold less than 64 tokens of a layer twice; max_tokens), UNSUPPORTED
 *          (client is not of kvm_cuda_open, or host is; a kvmd without geometry_digest), NOT_FOUND,
 *          STALE, LOST (a space); NO_SPACE, DEVICE (the device's memory, or the driver's failure);
 *          and as kvm_queue_create and kvm_arena_create. Threads: any. */
KVM_API kvm_status kvm_cuda_bridge_create(kvm_client *client, const kvm_cuda_bridge_params *params,
                                          kvm_cuda_bridge **out);

/* Waits for the device; before kvm_client_reconnect of the host, which its queue and arena would
 * make BUSY. NULL is accepted. Threads: no other call on this bridge may be running. */
KVM_API void kvm_cuda_bridge_destroy(kvm_cuda_bridge *bridge);

typedef struct kvm_cuda_copy_params {
  uint32_t struct_size;
  uint32_t flags;      /* reserved, zero */
  kvm_seq_id source;   /* that has the tokens */
  kvm_seq_id onto;     /* of the other side: its first `begin` tokens come before; 0: none do */
  uint64_t begin;      /* tokens [begin, end) of the source; begin is below end */
  uint64_t end;        /* KVM_POSITION_END: all from begin on */
  uint64_t timeout_ns; /* 0: none. What the service has begun by then is waited for: one that does
                        * not answer at all holds the call */
  uint64_t reserved[4];
} kvm_cuda_copy_params;

/* Makes a sequence in host memory. Its first `begin` tokens are those of `onto`, a sequence of the
 * host's client or one that is published to it; they are shared (kvm_seq_fork) and do not cross.
 * Behind them come tokens [begin, end) of `source`, a sequence on the device. So the new sequence
 * has `end` tokens where there is an `onto`, and end - begin where there is none.
 *
 * Waits until all is there: engines call it on a thread of their own. On the device nothing waits:
 * the rows are read behind what is enqueued on `stream`, on a stream of the bridge, and copied by a
 * copy engine, beside whatever the engine enqueues meanwhile. Source may be appended to, truncated
 * and freed meanwhile: the bridge holds a fork of it. (The first append behind the call copies the
 * page that it goes to, if the source ends inside one.) Tokens of which not all layers' appends are
 * enqueued when the call is made read as anything: where another thread takes steps, say `end`, and
 * where lengths are known on the device alone (kvm_cuda_set_lengths), those that are sure. stream:
 * one of the client's timeline. Not while a stream of the device is being captured.
 * All or nothing: after a failure there is no new sequence, and those that were are as before.
 * Fails:   INVALID (begin, end; a layer of `onto` that is shorter than begin), PARTIAL (a policy
 *          has dropped a token, for some head), BUSY (source is on the host: kvm_cuda_fetch), LIMIT
 *          (max_tokens), TIMEOUT, DISCONNECTED (of either client), NOT_FOUND, STALE, LOST,
 *          UNSUPPORTED (the stream is being captured), DEVICE; as kvm_seq_create, kvm_seq_fork and
 *          kvm_append of the host's client.
 * Threads: one at a time for a bridge. */
KVM_API kvm_status kvm_cuda_store(kvm_cuda_bridge *bridge, const kvm_cuda_copy_params *params,
                                  kvm_cuda_stream stream, kvm_seq_id *out);

/* The way back: makes a sequence on the device of the first `begin` tokens of `onto`, a sequence
 * there, and behind them tokens [begin, end) of `source`, one in host memory, its client's or
 * published to it. What of source lies on a disk is read from there.
 *
 * Waits until all is there, as kvm_cuda_store, and likewise reads a fork of source: of a prefix, a
 * load is a use (kvm_prefix_publish's keep_ns). Pages are reserved by the call, as by an update of
 * as many tokens that is enqueued on `stream`, and written on the bridge's stream. Heads with sinks
 * and a window get all tokens, and drop what is not seen by the next update.
 * All or nothing, as kvm_cuda_store.
 * Fails:   INVALID (begin, end), PARTIAL (a policy of
 *          the host's space, or kvm_seq_drop, has dropped a token, for some head), NO_SPACE (of the
 *          pool), LIMIT (max_tokens; more than 2^20 tokens to copy), BUSY (onto is on the host),
 *          TIMEOUT, DISCONNECTED, NOT_FOUND, STALE, LOST, UNSUPPORTED (the stream is being
 *          captured), DEVICE; as kvm_seq_fork; as kvm_read of the host's client.
 * Threads: one at a time for a bridge. */
KVM_API kvm_status kvm_cuda_load(kvm_cuda_bridge *bridge, const kvm_cuda_copy_params *params,
                                 kvm_cuda_stream stream, kvm_seq_id *out);

/* ============================================================================================
 * Statistics
 * ============================================================================================ */

typedef struct kvm_cuda_stats {
  uint32_t struct_size;
  uint32_t n_sms;
  uint64_t pool_bytes;       /* the cap */
  uint64_t pool_used_bytes;  /* mapped, for pages or kept for them */
  uint64_t pool_page_bytes;  /* in pages in use */
  uint64_t pool_peak_bytes;
  uint64_t n_pages;          /* of all layers, see above */
  uint64_t n_pages_copied;   /* by copy-on-write */
  uint64_t batch_bytes;      /* device memory of batches */
  uint64_t host_bytes;       /* the cap */
  uint64_t host_used_bytes;  /* in sequences that are spilled */
  uint64_t n_spilled;        /* sequences on the host */
  uint64_t spilled_bytes;    /* moved to the host so far; what is taken back does not count */
  uint64_t fetched_bytes;
  uint64_t n_copies;         /* that these took, as far as they are enqueued */
  uint64_t n_launches;
  uint64_t stored_bytes;     /* rows that kvm_cuda_store has brought to the host, as they crossed */
  uint64_t loaded_bytes;     /* and kvm_cuda_load to the device; what failed does not count */
  uint64_t reserved[2];
} kvm_cuda_stats;

/* Fails: UNSUPPORTED (not a client of kvm_cuda_open). Threads: any. */
KVM_API kvm_status kvm_cuda_get_stats(kvm_client *client, kvm_cuda_stats *out);

/* A packed tensor over `size` bytes of device memory at `data`. */
static inline kvm_tensor kvm_device_tensor(const void *data, uint64_t size, uint32_t dtype) {
  kvm_tensor tensor = {{KVM_BUFFER_DEVICE, 0, 0, 0}, 0, 0, 0, 0, 0};
  tensor.buffer.where = (uint64_t)(uintptr_t)data;
  tensor.buffer.size = size;
  tensor.dtype = dtype;
  return tensor;
}

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVM_CUDA_H_ */
