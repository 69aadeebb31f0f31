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
//   store.publish(item);               // lengths grow, the commit point moves
//   ... retention (below): policies act on what was committed ...
//   (or store.rollback(seq, layer): as if never reserved)
//
// Threads: the driver thread calls everything. Tasks on other threads may read and write the bytes
// that pieces and runs point to, as long as no function that changes that sequence is called; calls
// that change OTHER sequences are fine, forks of it included: the store never writes a byte that a
// published or reserved token of another sequence occupies, and frees a page only when no sequence
// refers to it.
// Memory: KV pages, observations and indexes are bounded by StoreOptions::host_capacity_bytes; page
// lists cost 12 bytes a page on the heap and are not counted.
// Fails: a call that fails has changed nothing, except that indexes may have made way.
#ifndef KVM_ENGINE_STORE_STORE_H_
#define KVM_ENGINE_STORE_STORE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/kv_view.h"
#include "base/request.h"
#include "base/status.h"
#include "engine/space/space.h"
#include "engine/store/aside.h"
#include "engine/store/id_table.h"
#include "engine/store/observations.h"
#include "engine/store/seq_page.h"
#include "engine/store/sequence.h"
#include "engine/store/store_check.h"
#include "engine/store/store_memory.h"
#include "engine/store/store_types.h"
#include "kvm.h"

namespace kvm::engine {

// What a client is about to do with a sequence. One that is published may be used by every client
// of its user, and changed by none.
enum class Access : uint8_t {
  kUse,  // read, attend to, fork, take, free
  kChange,
};

class Store final {
 public:
  // REQUIRES: options.host_capacity_bytes > 0.
  static Result<std::unique_ptr<Store>> open(const StoreOptions& options);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // --- Clients ----------------------------------------------------------------------------------

  // Ids start at 1 and are never reused.
  ClientId add_client(const ClientSpec& spec);
  // Frees the client's sequences and forgets it. No reservation of them may be open: roll back
  // first. An unknown client is ignored.
  void remove_client(ClientId client);
  // Bytes charged to a client: the pages, observations and indexes that it made or took over, each
  // once, whole, as long as any sequence holds them. 0 for an unknown client.
  uint64_t client_bytes(ClientId client) const;
  // Frees sequences of a client that is about to be removed, about max_pages pages of them; appends
  // the ids of those that are gone. False: none are left.
  bool free_some(ClientId client, uint64_t max_pages, std::vector<kvm_seq_id>* gone);
  QuotaBook& quotas() { return memory_.quotas(); }
  // The library of a user: opened, where there is none. Throws std::bad_alloc.
  Account* library(uint32_t uid) { return memory_.library_of_user(uid, library_limits()); }

  // --- Spaces -----------------------------------------------------------------------------------

  // As kvm_space_register. Fails: INVALID, UNSUPPORTED, EXISTS, LIMIT.
  // uid: whose it is, and whose name.
  Result<kvm_space_id> register_space(const SpaceSpec& spec, uint32_t uid = kEverybody);
  Result<kvm_space_id> find_space(std::string_view name, uint32_t uid = kEverybody) const;
  // Fails here and below: NOT_FOUND, STALE, LOST (an id of another start of the service).
  Result<const Space*> space(kvm_space_id id) const;
  // The same for a client that wants to use it; PERMISSION: it is another user's.
  Result<const Space*> space_for(ClientId client, kvm_space_id id);
  Result<std::shared_ptr<const Space>> shared_space_for(ClientId client, kvm_space_id id);
  Result<kvm_space_info> space_info(kvm_space_id id) const;
  std::vector<kvm_space_info> list_spaces() const;
  Status drop_space(kvm_space_id id);  // and BUSY

  // --- Sequences --------------------------------------------------------------------------------
  // No function here that changes a sequence may be called while a reservation of it is open,
  // except those of the next section.

  // Fails: NOT_FOUND, STALE, LOST, PERMISSION (of another client; or published, and to be changed).
  Result<Sequence*> find_seq(ClientId client, kvm_seq_id id, Access access = Access::kChange);
  // Whoever owns it: for the service itself.
  Result<Sequence*> find_any_seq(kvm_seq_id id) { return sequences_.find(id); }
  // flags: KVM_SEQ_*. n_expected: tokens that the tables of the sequence have room for from the
  // beginning on (PageList::expect). Fails: as space(), INVALID (flags), QUOTA (sequences).
  // REQUIRES: the client exists.
  Result<kvm_seq_id> create_seq(ClientId client, kvm_space_id space, uint32_t flags,
                                uint64_t n_expected = 0);
  // As kvm_seq_fork. client: whose the child is; 0: the parent's. It pays for no page that the
  // child has from its parent. O(lists of the space) for the whole length, plus O(segments) for a
  // part. Fails: INVALID, PARTIAL, QUOTA. REQUIRES: the client exists.
  Result<kvm_seq_id> fork_seq(Sequence* parent, uint64_t n_tokens, ClientId client = 0);
  // The same checks without forking.
  Status check_fork(const Sequence* parent, uint64_t n_tokens, ClientId client = 0) const;
  // PARTIAL where queries at n_tokens and later would miss tokens below n_tokens, which policies
  // have dropped, and where n_tokens lies inside a page that drop_part() has.
  static Status check_cut(const Sequence* seq, uint64_t n_tokens);
  // PARTIAL where tokens below n_tokens are missing that drop_part() has dropped.
  static Status check_complete(const Sequence* seq, uint64_t n_tokens);
  Status truncate_seq(Sequence* seq, uint64_t n_tokens);  // PARTIAL
  // The same in parts of about max_pages pages, for there may be millions: true when it is done.
  // Until then the sequence ends somewhere between: call again with the same n_tokens, which cannot
  // fail then, before anything else is done with it.
  Result<bool> truncate_part(Sequence* seq, uint64_t n_tokens, uint64_t max_pages);
  // As kvm_seq_drop, of whole pages in [begin, end): heads that keep every token give K and V of
  // them up, and the rest of what is known of them stays. In parts of about max_pages pages: true
  // when it is done; until then call again, with or without other calls between. Fails: INVALID
  // (end is beyond what is committed). Throws std::bad_alloc: a part may have gone.
  Result<bool> drop_part(Sequence* seq, uint64_t begin, uint64_t end, uint64_t max_pages);
  Status commit_seq(Sequence* seq, uint64_t n_tokens);  // INVALID
  // The pointer and the id are dead afterwards.
  void free_seq(Sequence* seq);
  // The same in parts of about max_pages pages, for a sequence may have millions: true when it is
  // gone. Nothing else may be done with one that was begun but to look at it.
  bool free_part(Sequence* seq, uint64_t max_pages);

  // As kvm_seq_publish: the sequence becomes the library's of its user. In parts of about max_pages
  // pages: true when it is done; until then call again, before anything else is done with it. What
  // the client paid for in this sequence, the library pays for, also where others share it; the
  // user's sum stays. An index that is in use for another sequence is left to that one.
  // Fails: QUOTA (sequences), before it is the library's. Throws std::bad_alloc likewise. The
  // sequence stays then, and is not on its way any more.
  Result<bool> publish_part(Sequence* seq, uint64_t max_pages);
  // As kvm_seq_take: the same from the library to a client, which is refused with QUOTA where its
  // limits have no room for what it would pay for; in any part until then. An index goes along
  // where there is room for it. Fails also: LIMIT (accounts of clients that are gone). Of a
  // sequence that is the client's already: true.
  Result<bool> take_part(Sequence* seq, ClientId client, uint64_t max_pages);

  // --- Sequences that no client sees (engine/store/aside.h). They go with the store. -------------

  // A fork of all of it, with what policies are still to be asked, and without indexes.
  Result<Aside*> fork_aside(const Sequence* parent);
  // An empty one that is to be the client's, who pays for pages of so many bytes already. Fails: as
  // create_seq, QUOTA (bytes). REQUIRES: the client exists, and stays until it is admitted or
  // freed.
  Result<Aside*> begin_aside(ClientId client, kvm_space_id space, const KvBytes& page_bytes);
  // Appends a page to a list of one that was begun (PageList::restore): it is the one at `place`,
  // of which a reference is taken over. Fails: as PageTable::adopt; throws std::bad_alloc. Nothing
  // has changed then.
  Status restore_page(Aside* aside, uint32_t list, const tiers::SlabClass& slab_class,
                      tiers::PlaceId place, PageEntry entry);
  // From now on the client has it; the pointer is dead. REQUIRES: all pages came. Throws
  // std::bad_alloc: nothing has changed.
  kvm_seq_id admit_aside(Aside* aside);
  // Frees one in parts of about max_pages pages: true when it is gone.
  bool free_aside_part(Aside* aside, uint64_t max_pages);

  const Space& seq_space(const Sequence* seq) const { return seq->space(); }
  // Published tokens of a layer (of its storage layer, if ALIAS; 0 if ABSENT).
  uint64_t length(const Sequence* seq, uint32_t layer) const { return layer_length(seq, layer); }
  // The same with an open reservation counted in.
  uint64_t reserved_length(const Sequence* seq, uint32_t layer) const;
  uint64_t n_committed(const Sequence* seq) const { return seq->n_committed; }

  // Immediate; struct_size is set. O(pages referenced).
  kvm_seq_info seq_info(const Sequence* seq) const;
  // Bytes of pages of the first n_tokens that are away, of some thousand of the pages.
  uint64_t estimate_away_bytes(const Sequence* seq, uint64_t n_tokens) const;
  // As Engine::list_seqs.
  SeqPage list_seqs(ClientId client, kvm_space_id space, bool all_clients, kvm_seq_id begin,
                    size_t n_max) const;

  // --- Appending --------------------------------------------------------------------------------

  // Makes room for the tokens of all items, or of none, and appends to *pieces where each of them
  // goes (ordered by item, class, token). Pages that the tail of a list shares with another
  // sequence are copied here (their valid tokens only). Every reservation must be closed by publish
  // or rollback, per (sequence, layer), in any order.
  // REQUIRES: no (sequence, storage layer) occurs twice or has an open reservation.
  // Fails: INVALID (layer beyond the space, ALIAS, ABSENT, n_tokens = 0, position overflow; what is
  //        to be restored is not whole pages, or not committed), HOLE (position is not the layer's
  //        length), QUOTA, NO_SPACE, NO_MEMORY.
  Status reserve_append(std::span<const AppendItem> items, std::vector<AppendPiece>* pieces);
  // Bytes of the pages that this would take.
  uint64_t bytes_to_reserve(std::span<const AppendItem> items) const;
  // The same checks of one item without reserving: INVALID and HOLE.
  Status check_append(const AppendItem& item) const;
  // Makes the tokens reserved for an item part of its sequence. Unless that commits by hand, the
  // commit point moves to the shortest layer's length; what is restored is encoded anew with the
  // next policies' turn. Runs collected before are invalid.
  void publish(const AppendItem& item);
  void rollback(Sequence* seq, uint32_t layer);

  // --- Reading ----------------------------------------------------------------------------------

  // Appends to *runs the stored tokens of a head class in position order, reserved ones included:
  // one run per page; dropped tokens are gaps. Every run points to head 0 of its page: the rows of
  // another head of the class lie HeadPlace::head * kPageTokens rows further (attention::Problem
  // takes that number as `head`). layer: OWN or ALIAS; class_index: of the storage layer.
  // Nothing for an ABSENT layer. Valid until the next call that changes this sequence.
  // Tokens that a head chose to keep have consecutive positions where is_packed
  // (engine/store/kept_tokens.h).
  // Runs of pages that are away have no addresses (point_to_page); those pages are appended to
  // *away by position. REQUIRES: where `away` is null, all are in memory.
  void collect_runs(const Sequence* seq, uint32_t layer, uint32_t class_index,
                    std::vector<KvRun>* runs, bool is_packed = true,
                    std::vector<AwayPage>* away = nullptr) const;
  // Pins the pages of those runs that have kPageTokens tokens, so that the runs stay valid. Pages
  // that nobody else has any more are given back, and taken off the account, by unpin_pages.
  // The client of the sequence must not be removed before. read_epoch: of the reader that
  // collected the runs, and has not ended (PageTable::epochs).
  void pin_pages(const Sequence* seq, uint32_t layer, uint32_t class_index, uint64_t read_epoch,
                 PagePins* pins);
  void unpin_pages(PagePins* pins);
  // PARTIAL when a query of any head of the layer would see a token that was dropped: by a policy,
  // at first_query or later, or by drop_part(), in what is seen. Fails also: INVALID (layer beyond
  // the space, or ABSENT).
  Status check_visible(const Sequence* seq, uint32_t layer, const SeenPart& seen) const;
  // For kvm_read: INVALID (layer, or range beyond the published length), PARTIAL (a head has
  // dropped one of the tokens [position, position + n_tokens), and not kept it otherwise).
  Status check_read(const Sequence* seq, uint32_t layer, uint64_t position,
                    uint64_t n_tokens) const;

  // --- Observations -----------------------------------------------------------------------------

  // Keeps the newest kMaxObservedRows rows and adds column sums up. Rows that do not follow the
  // kept ones directly replace them. Fails: INVALID (layer not OWN or ALIAS, columns beyond the
  // layer's length, a number that is not finite), QUOTA, NO_SPACE.
  Status observe(Sequence* seq, const ObserveInput& input);
  ObservedView observed(const Sequence* seq, uint32_t layer) const {
    return observed_view(seq, layer);
  }

  // --- Memory and statistics --------------------------------------------------------------------

  // Gives a bounded amount of emptied memory beyond cached_bytes, and of hash tables that are not
  // needed any more, back to the operating system (at most about a millisecond's worth). Returns
  // whether more remains: a driver without other work calls it until it does not. Other functions
  // give back a little as they go.
  bool housekeep() { return memory_.housekeep(); }
  // Fills n_spaces, n_sequences, n_pages, host_*, observed_bytes, n_tokens_appended,
  // bytes_appended, n_pages_dropped, n_pages_copied, n_pages_moved, n_pages_away, away_bytes,
  // index_bytes, n_index_*; leaves the rest.
  void add_stats(kvm_stats* stats) const;
  // Recounts every reference, page and byte from the lists and aborts on the first that disagrees
  // with the running accounts. O(everything): for tests. REQUIRES: nothing is pinned.
  void check_accounts() const { check_store(memory_, sequences_, asides_); }

  // Pages, quotas and counts, for index/ and retention/, which build on them.
  StoreMemory& memory() { return memory_; }
  const StoreMemory& memory() const { return memory_; }

 private:
  Store(const StoreOptions& options, uint32_t epoch_tag);

  Result<SpaceRecord*> record_for(ClientId client, kvm_space_id id);
  // The account of a client, or that of the sequence.
  Account* account_for(const Sequence* seq, ClientId client) const;
  Amounts library_limits() const;
  Result<bool> give_part(Sequence* seq, Account* taker, uint64_t max_pages);
  Status check_limits(Account* account, std::string_view what) const;
  void publish_restored(const AppendItem& item);
  // Throws std::bad_alloc: nothing has changed, and `seq` is the caller's.
  kvm_seq_id add_seq(std::unique_ptr<Sequence>&& seq);
  void remove_seq(Sequence* seq);
  // Gives up what it holds, at once.
  void clear_seq(Sequence* seq);
  // REQUIRES: room among asides_.
  Aside* add_aside(std::unique_ptr<Sequence>&& seq, bool is_loaded);
  void forget_aside(Aside* aside);

  const StoreOptions options_;
  StoreMemory memory_;
  IdTable<SpaceRecord> spaces_;
  IdTable<Sequence> sequences_;
  std::vector<std::unique_ptr<Aside>> asides_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_STORE_H_
