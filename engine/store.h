// SPDX-License-Identifier: Apache-2.0
// Store: spaces, sequences and their page lists; who owns which page, and what it costs whom.
//
// The metadata half of the engine: it validates ids, lengths and quotas, allocates pages, shares
// them copy-on-write, applies what policies decide, and hands out views. It never waits, runs no
// task and knows nothing of requests.
//
// A request that appends and attends, for each (sequence, layer):
//
//   KVM_TRY(store.reserve_append(items, &pieces));   // pages are there, lengths as before
//   ... tasks copy K and V rows to pieces[i].k / .v ...
//   store.collect_runs(seq, layer, class_index, &runs);   // reserved tokens included
//   ... tasks attend over the runs ...
//   store.publish(seq, layer);         // lengths grow, the commit point moves
//   ... aging (below): policies act on what was committed ...
//   (or store.rollback(seq, layer): as if never reserved)
//
// Threads: the driver thread calls everything. Tasks on other threads may read and write the bytes
// that pieces and runs point to, as long as no function that changes that sequence is called; calls
// that change OTHER sequences are fine, forks of it included: the store never writes a byte that a
// published or reserved token of another sequence occupies, and frees a page only when no sequence
// refers to it.
// Memory: KV pages, observations and indexes are bounded by StoreOptions::host_capacity_bytes; page
// lists cost 16 bytes a page on the heap and are not counted.
// Fails: a call that fails has changed nothing, except that indexes may have made way.
#ifndef KVM_ENGINE_STORE_H_
#define KVM_ENGINE_STORE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/kv_view.h"
#include "base/limits.h"
#include "base/status.h"
#include "engine/aging.h"
#include "engine/engine.h"
#include "engine/index_build.h"
#include "engine/space.h"
#include "kvm.h"
#include "policies/policy.h"

namespace kvm::engine {

// A live sequence. Opaque: obtained from find_seq, valid until the sequence is freed.
struct Sequence;

struct StoreOptions {
  uint64_t host_capacity_bytes = 0;  // hard cap of extents, observations, indexes; required
  uint64_t default_quota_bytes = 0;  // per client; 0: the capacity
  uint64_t max_sequences_per_client = 65536;
  TenantLimits tenant_limits;
  uint32_t max_spaces = 64;
  // Emptied extents that stay mapped and charged, so that the next append into the same slab class
  // need not fault memory in again; at most an eighth of the capacity. They are given back before
  // any allocation would fail.
  uint64_t cached_bytes = uint64_t{64} << 20;
};

// Tokens to make room for: n_tokens >= 1 at the end of one layer of one sequence.
struct AppendItem {
  Sequence* seq = nullptr;
  uint32_t layer = 0;
  uint64_t position = KVM_POSITION_END;  // must equal the layer's length, or KVM_POSITION_END
  uint32_t n_tokens = 0;
};

// Where some tokens of an item go, for the heads of one class: consecutive rows of one page.
// The row of token t (0 <= t < n_tokens) and head h of the class starts at
//   k + h * cls->slab_class.k_head_bytes() + t * cls->slab_class.k_row_bytes()
// and likewise v. K and V of kv head cls->kv_heads[h] belong there, as slab_class.dtype_k, dtype_v;
// the scale of an int8 or fp8 row at k_scale[h * kPageTokens + t], and likewise v_scale.
struct AppendPiece {
  uint32_t item = 0;         // index into the items given to reserve_append
  uint32_t class_index = 0;  // within the layer
  uint32_t token = 0;        // first token, counted from the item's first
  uint32_t n_tokens = 0;     // 1 to kPageTokens
  std::byte* k = nullptr;
  std::byte* v = nullptr;
  uint16_t* k_scale = nullptr;  // null where dtype_k has none; likewise v_scale
  uint16_t* v_scale = nullptr;
  const HeadClass* cls = nullptr;
};

// kvm_observe's data, already in this process and in fp32.
struct ObserveInput {
  uint32_t layer = 0;
  uint64_t query_position = 0;  // of the first row; the others follow
  uint32_t n_rows = 0;
  const float* q = nullptr;  // [n_rows][n_q_heads of the layer][head_dim_k]
  uint64_t column_begin = 0;
  uint64_t n_columns = 0;
  const float* column_sums = nullptr;  // [n_columns][n_kv_heads of the layer]
};

// What is kept of it, for one (sequence, layer).
struct ObservedView {
  uint64_t query_position = 0;  // of the first kept row; rows are consecutive
  uint32_t n_rows = 0;
  const float* q = nullptr;            // [n_rows][n_q_heads][head_dim_k], oldest first
  uint64_t n_columns = 0;              // positions 0 .. n_columns
  const float* column_sums = nullptr;  // [n_columns][n_kv_heads]
};

// Full pages of one head class that stay as they are though their sequence may change or go.
struct PagePins {
  ClientId client = 0;  // whose account they stay on
  std::vector<tiers::PageRef> pages;
};

class Store {
 public:
  // REQUIRES: options.host_capacity_bytes > 0.
  static Result<std::unique_ptr<Store>> open(const StoreOptions& options);
  virtual ~Store() = default;

  // --- Clients ----------------------------------------------------------------------------------

  // Ids start at 1 and are never reused.
  virtual ClientId add_client(const ClientSpec& spec) = 0;
  // Frees the client's sequences and forgets it. No reservation of them may be open: roll back
  // first. An unknown client is ignored.
  virtual void remove_client(ClientId client) = 0;
  // Bytes charged to a client: each page that its sequences hold counts once, whole, whoever of
  // them allocated it (sequences of different clients never share pages); its observations and
  // indexes count once as well. 0 for an unknown client.
  virtual uint64_t client_bytes(ClientId client) const = 0;
  // Frees sequences of a client that is about to be removed, about max_pages pages of them; appends
  // the ids of those that are gone. False: none are left.
  virtual bool free_some(ClientId client, uint64_t max_pages, std::vector<kvm_seq_id>* gone) = 0;
  virtual QuotaBook& quotas() = 0;

  // --- Spaces -----------------------------------------------------------------------------------

  // As kvm_space_register. Fails: INVALID, UNSUPPORTED, EXISTS, LIMIT.
  virtual Result<kvm_space_id> register_space(const SpaceSpec& spec) = 0;
  virtual Result<kvm_space_id> find_space(std::string_view name) const = 0;  // NOT_FOUND
  // Fails here and below: NOT_FOUND, STALE, LOST (an id of another start of the service).
  virtual Result<const Space*> space(kvm_space_id id) const = 0;
  virtual Result<kvm_space_info> space_info(kvm_space_id id) const = 0;
  virtual std::vector<kvm_space_info> list_spaces() const = 0;
  virtual Status drop_space(kvm_space_id id) = 0;  // and BUSY

  // --- Sequences --------------------------------------------------------------------------------
  // No function here that changes a sequence may be called while a reservation of it is open,
  // except those of the next section.

  // Fails: NOT_FOUND, STALE, LOST, PERMISSION (of another client).
  virtual Result<Sequence*> find_seq(ClientId client, kvm_seq_id id) = 0;
  // Whose a sequence is.
  virtual Result<ClientId> seq_client(kvm_seq_id id) const = 0;
  // flags: KVM_SEQ_*. n_expected: tokens that the tables of the sequence have room for from the
  // beginning on (PageList::expect). Fails: as space(), INVALID (flags), QUOTA (sequences).
  // REQUIRES: the client exists.
  virtual Result<kvm_seq_id> create_seq(ClientId client, kvm_space_id space, uint32_t flags,
                                        uint64_t n_expected = 0) = 0;
  // As kvm_seq_fork; the child belongs to the parent's client. O(lists of the space) for the whole
  // length, plus O(segments) for a part. Fails: INVALID, PARTIAL, QUOTA.
  virtual Result<kvm_seq_id> fork_seq(Sequence* parent, uint64_t n_tokens) = 0;
  // The same checks without forking.
  virtual Status check_fork(const Sequence* parent, uint64_t n_tokens) const = 0;
  virtual Status truncate_seq(Sequence* seq, uint64_t n_tokens) = 0;  // PARTIAL
  // The same in parts of about max_pages pages, for there may be millions: true when it is done.
  // Until then the sequence ends somewhere between: call again with the same n_tokens, which cannot
  // fail then, before anything else is done with it.
  virtual Result<bool> truncate_part(Sequence* seq, uint64_t n_tokens, uint64_t max_pages) = 0;
  virtual Status commit_seq(Sequence* seq, uint64_t n_tokens) = 0;  // INVALID
  // The pointer and the id are dead afterwards.
  virtual void free_seq(Sequence* seq) = 0;
  // The same in parts of about max_pages pages, for a sequence may have millions: true when it is
  // gone. Nothing else may be done with one that was begun but to look at it.
  virtual bool free_part(Sequence* seq, uint64_t max_pages) = 0;

  virtual const Space& seq_space(const Sequence* seq) const = 0;
  // Published tokens of a layer (of its storage layer, if ALIAS; 0 if ABSENT).
  virtual uint64_t length(const Sequence* seq, uint32_t layer) const = 0;
  // The same with an open reservation counted in.
  virtual uint64_t reserved_length(const Sequence* seq, uint32_t layer) const = 0;
  virtual uint64_t n_committed(const Sequence* seq) const = 0;

  // Immediate; struct_size is set. O(pages referenced).
  virtual kvm_seq_info seq_info(const Sequence* seq) const = 0;
  // As Engine::list_seqs.
  virtual SeqPage list_seqs(ClientId client, kvm_space_id space, bool all_clients, kvm_seq_id begin,
                            size_t n_max) const = 0;
  // Ids of a client's sequences, in no order.
  virtual std::vector<kvm_seq_id> client_seqs(ClientId client) const = 0;

  // --- Appending --------------------------------------------------------------------------------

  // Makes room for the tokens of all items, or of none, and appends to *pieces where each of them
  // goes (ordered by item, class, token). Pages that the tail of a list shares with another
  // sequence are copied here (their valid tokens only). Every reservation must be closed by publish
  // or rollback, per (sequence, layer), in any order.
  // REQUIRES: no (sequence, storage layer) occurs twice or has an open reservation.
  // Fails: INVALID (layer beyond the space, ALIAS, ABSENT, n_tokens = 0, position overflow),
  //        HOLE (position is not the layer's length), QUOTA, NO_SPACE, NO_MEMORY.
  virtual Status reserve_append(std::span<const AppendItem> items,
                                std::vector<AppendPiece>* pieces) = 0;
  // The same checks of one item without reserving: INVALID and HOLE.
  virtual Status check_append(const AppendItem& item) const = 0;
  // Makes the reserved tokens part of the sequence. Unless the sequence commits by hand, the commit
  // point moves to the shortest layer's length. Runs collected before are invalid.
  virtual void publish(Sequence* seq, uint32_t layer) = 0;
  virtual void rollback(Sequence* seq, uint32_t layer) = 0;

  // --- Reading ----------------------------------------------------------------------------------

  // Appends to *runs the stored tokens of a head class in position order, reserved ones included:
  // one run per page; dropped tokens are gaps. Every run points to head 0 of its page: the rows of
  // another head of the class lie HeadPlace::head * kPageTokens rows further (attention::Problem
  // takes that number as `head`). layer: OWN or ALIAS; class_index: of the storage layer.
  // Nothing for an ABSENT layer. Valid until the next call that changes this sequence.
  // Tokens that a head chose to keep have consecutive positions where is_packed (engine/kept.h).
  virtual void collect_runs(const Sequence* seq, uint32_t layer, uint32_t class_index,
                            std::vector<KvRun>* runs, bool is_packed = true) const = 0;
  // Pins the pages of those runs that have kPageTokens tokens, so that the runs stay valid. Pages
  // that nobody else has any more are given back, and taken off the account, by unpin_pages.
  // The client of the sequence must not be removed before.
  virtual void pin_pages(const Sequence* seq, uint32_t layer, uint32_t class_index,
                         PagePins* pins) = 0;
  virtual void unpin_pages(PagePins* pins) = 0;
  // PARTIAL when a query at first_query_position or later, of any head of the layer, would see a
  // token that was dropped. Fails also: INVALID (layer beyond the space, or ABSENT).
  virtual Status check_visible(const Sequence* seq, uint32_t layer,
                               uint64_t first_query_position) const = 0;
  // For kvm_read: INVALID (layer, or range beyond the published length), PARTIAL (a head has
  // dropped one of the tokens [position, position + n_tokens), and not kept it otherwise).
  virtual Status check_read(const Sequence* seq, uint32_t layer, uint64_t position,
                            uint64_t n_tokens) const = 0;

  // --- Observations and policies ----------------------------------------------------------------

  // Keeps the newest kMaxObservedRows rows and adds column sums up. Rows that do not follow the
  // kept ones directly replace them. Fails: INVALID (layer not OWN or ALIAS, columns beyond the
  // layer's length, a number that is not finite), QUOTA, NO_SPACE.
  virtual Status observe(Sequence* seq, const ObserveInput& input) = 0;
  virtual ObservedView observed(const Sequence* seq, uint32_t layer) const = 0;
  // Adds the attention mass of a request's queries to that of the tokens of a list that chooses by
  // it (KVM_RETAIN_HEAVY): column sums of the positions from `position` on, as collect_runs counts
  // them; reserved tokens may be among them. Left undone where there is no memory for it.
  virtual void add_masses(Sequence* seq, uint32_t layer, uint32_t class_index,
                          std::span<const float> sums, uint64_t position, bool is_packed) = 0;
  // Applies one action of a policy. All or nothing. kFold and kKeep come from aging only.
  // Fails: INVALID (list or range out of bounds, tokens that are not committed, drop of a part of a
  // page), UNSUPPORTED (an action without its tier or operator), QUOTA, NO_SPACE.
  virtual Status apply(Sequence* seq, const policies::Action& action) = 0;

  // What policies want done since the commit point moved (engine/aging.h): whether there is
  // anything, and the next slice of it, null at the end. *cursor is zeros for the first slice.
  // Every slice must be opened and closed, or destroyed unopened, before anything else changes the
  // sequence. O(pages of the slice).
  virtual bool is_aging_due(const Sequence* seq) const = 0;
  virtual std::unique_ptr<Aging> plan_aging(Sequence* seq, AgingCursor* cursor) = 0;
  virtual void open_aging(Aging* aging) = 0;
  virtual void close_aging(Aging* aging, AgingCursor* cursor) = 0;

  // --- Indexes (engine/index.h) -----------------------------------------------------------------
  // Whatever needs pages, quota or capacity here takes it from indexes before it fails: from those
  // that were used longest ago (of the client, where its quota is short), but not from one that is
  // pinned or being built.

  // A slice of what the index of a layer (OWN or ALIAS) lacks for an attend after n_append more
  // tokens, of about max_cost (IndexBuild::cost); null: nothing. Published tokens only. Every build
  // must be opened and closed, or destroyed, before anything else changes the sequence; the next
  // slice is planned after that.
  virtual std::unique_ptr<IndexBuild> plan_index(Sequence* seq, uint32_t layer, uint64_t n_append,
                                                 uint64_t max_cost) = 0;
  virtual void open_index(IndexBuild* build) = 0;
  virtual void close_index(IndexBuild* build) = 0;
  // Keeps the index of a layer from making way. REQUIRES: the pin is gone before anything changes
  // the sequence.
  virtual IndexPin pin_index(const Sequence* seq, uint32_t layer) = 0;
  // Appends what the index of a kv head has for a sequence of `length` tokens. Valid as the runs of
  // collect_runs are. Nothing for an ABSENT layer.
  virtual void collect_index(const Sequence* seq, uint32_t layer, uint32_t kv_head, uint64_t length,
                             std::vector<attention::SketchedRun>* sketches,
                             std::vector<attention::HashedRun>* hashes) const = 0;

  // --- Memory and statistics --------------------------------------------------------------------

  // Gives a bounded amount of emptied memory beyond cached_bytes, and of hash tables that are not
  // needed any more, back to the operating system (at most about a millisecond's worth). Returns
  // whether more remains: a driver without other work calls it until it does not. Other functions
  // give back a little as they go.
  virtual bool housekeep() = 0;
  // Fills n_spaces, n_sequences, n_pages, host_*, observed_bytes, n_tokens_appended,
  // bytes_appended, n_pages_dropped, n_pages_copied, index_bytes, n_index_*; leaves the rest.
  virtual void add_stats(kvm_stats* stats) const = 0;
  // Recounts every reference, page and byte from the lists and aborts on the first that disagrees
  // with the running accounts. O(everything): for tests. REQUIRES: nothing is pinned.
  virtual void check_accounts() const = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_H_
