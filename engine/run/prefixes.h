// SPDX-License-Identifier: Apache-2.0
// Prefixes: published sequences that are found by the hashes of the tokens that they begin with
// (docs/adr/0023-prefixes.md). Each user has a table of hashes, in memory that its clients read
// (base/prefix_table.h), and here is who stands behind each of them:
//
//   publish --> pages are listed from the first on --> found --> forgotten, from the last page on
//
// so that at any moment a page that is found is found with all before it. A page that several
// prefixes have is listed once, and stays while one of them does. Hashes here are those in a space
// (hash_in_space).
//
// Threads: the driver.
#ifndef KVM_ENGINE_RUN_PREFIXES_H_
#define KVM_ENGINE_RUN_PREFIXES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/prefix_table.h"
#include "base/status.h"
#include "engine/image/sequence_image.h"
#include "engine/store/prefix_stats.h"
#include "engine/store/store.h"

namespace kvm::engine {

class Prefixes {
 public:
  // n_pages: of each user, that are to be found. memory: as EngineOptions::prefix_memory.
  Prefixes(const Store* store, uint64_t n_pages, PrefixMemory memory, const Clock* clock)
      : store_(store), n_pages_(n_pages), memory_(std::move(memory)), clock_(clock) {}

  // Whether the sequence can be published for a user under these hashes. Fails: INVALID,
  // UNSUPPORTED, EXISTS, LIMIT, NO_MEMORY, as kvm_prefix_publish. Throws std::bad_alloc.
  Status check(const Sequence& seq, uint32_t uid, std::span<const kvm_prefix_hash> hashes);
  // Takes one that is about to be published. REQUIRES: check() was OK. Throws std::bad_alloc:
  // nothing has changed.
  void begin(kvm_seq_id seq, uint32_t uid, std::vector<kvm_prefix_hash>&& hashes, uint64_t keep_ns);
  bool has(kvm_seq_id seq) const { return prefixes_.contains(seq); }
  // What outlives the service of one. Throws std::bad_alloc.
  PrefixImage image(const Sequence& seq) const;
  // Lists about max_pages more of the pages of one that is published; true: all are, or all that
  // there was memory for. REQUIRES: begin() was called.
  bool list_part(const Sequence& seq, uint64_t max_pages);
  // Forgets about max_pages of its pages; true: nobody finds it any more, or ever did.
  bool forget_part(kvm_seq_id seq, uint64_t max_pages);
  // It was forked.
  void note_fork(kvm_seq_id seq);

  // One that has not been forked for as long as it was to be kept, for the caller to free; 0: there
  // is none. It comes again after a while, unless it is gone by then, or was forked.
  kvm_seq_id take_expired();
  // Whether it is to be freed for that, still.
  bool is_expired(kvm_seq_id seq) const;
  void note_freed() { ++stats_.n_expired; }
  // One was weighed against computing it.
  void note_weighed(bool is_faster) { ++(is_faster ? stats_.n_faster : stats_.n_slower); }
  // How long until there may be one.
  uint64_t patience_ns() const;

  // The table of a user's prefixes: made, where there is none. Fails: as the memory.
  Result<std::span<const std::byte>> table(uint32_t uid);
  PrefixStats stats() const;
  // Compares the tables with a recount, and aborts where they differ. O(all): for tests.
  void check_accounts() const;

 private:
  struct Hasher {
    size_t operator()(const kvm_prefix_hash& hash) const {
      size_t first = 0;
      std::memcpy(&first, hash.bytes, sizeof(first));
      return first;
    }
  };
  struct Equal {
    bool operator()(const kvm_prefix_hash& a, const kvm_prefix_hash& b) const {
      return std::memcmp(a.bytes, b.bytes, sizeof(a.bytes)) == 0;
    }
  };
  struct Page {
    uint32_t n_pages = 0;  // of the prefix that ends with it
    uint32_t n_prefixes = 0;
    std::vector<kvm_seq_id> forkable;  // of these
    bool is_in_table = false;          // there was room where it could be
  };
  struct User {
    std::span<std::byte> memory;
    std::optional<PrefixTableWriter> table;
    std::unordered_map<kvm_prefix_hash, Page, Hasher, Equal> pages;
    // Last hashes of prefixes that are not listed to their end yet.
    std::unordered_set<kvm_prefix_hash, Hasher, Equal> coming;
    uint64_t n_coming = 0;  // pages of these that are not listed
    uint64_t n_hashes = 0;  // of all prefixes: what they take of memory
  };
  struct Prefix {
    User* user = nullptr;
    std::vector<kvm_prefix_hash> hashes;
    kvm_prefix_hash last{};  // as it was published; there may be memory for fewer
    size_t n_listed = 0;
    uint64_t keep_ns = 0;
    uint64_t used_ns = 0;  // when it was published, or forked last
    uint64_t due_ns = 0;   // its place in due_
    bool is_expired = false;

    uint64_t coming_pages() const { return hashes.size() - n_listed; }
  };

  Result<User*> user(uint32_t uid);
  void list_page(const Sequence& seq, Prefix* prefix);
  // Returns how many prefixes had it to be forked behind.
  static uint64_t forget_page(kvm_seq_id seq, Prefix* prefix);
  static void write(User* user, const kvm_prefix_hash& hash, Page* page);

  const Store* store_;
  uint64_t n_pages_;
  PrefixMemory memory_;
  const Clock* clock_;
  std::unordered_map<uint32_t, std::unique_ptr<User>> users_;
  std::unordered_map<kvm_seq_id, Prefix> prefixes_;
  std::set<std::pair<uint64_t, kvm_seq_id>> due_;  // those that are not to stay for ever
  PrefixStats stats_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_PREFIXES_H_
