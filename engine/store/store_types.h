// SPDX-License-Identifier: Apache-2.0
// These types are what callers hand to a Store and get from it (engine/store/store.h).
#ifndef KVM_ENGINE_STORE_STORE_TYPES_H_
#define KVM_ENGINE_STORE_STORE_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/kv_view.h"
#include "engine/space/space.h"
#include "engine/store/quota.h"
#include "kvm.h"
#include "tiers/page_table.h"

namespace kvm::engine {

struct Sequence;  // engine/store/sequence.h

struct StoreOptions {
  uint64_t host_capacity_bytes = 0;  // hard cap of extents, observations, indexes; required
  uint64_t default_quota_bytes = 0;  // per client; 0: the capacity
  uint64_t memory_quota_bytes = 0;   // per client, of what cannot leave memory; 0: no limit
  uint64_t max_sequences_per_client = 65536;
  TenantLimits tenant_limits;
  uint32_t max_spaces = 64;
  // Emptied extents that stay mapped and charged, so that the next append into the same slab class
  // need not fault memory in again; at most an eighth of the capacity. They are given back before
  // any allocation would fail.
  uint64_t cached_bytes = uint64_t{64} << 20;
  tiers::SlowTier* slow_tier = nullptr;  // outlives the store; null: there is none
};

// An AppendItem asks for room: for n_tokens >= 1 at the end of one layer of one sequence, or for
// whole pages of those that drop_part() has dropped.
struct AppendItem {
  Sequence* seq = nullptr;
  uint32_t layer = 0;
  uint64_t position = KVM_POSITION_END;  // must equal the layer's length, or KVM_POSITION_END
  uint32_t n_tokens = 0;
  bool is_last_layer = false;  // KVM_ITEM_LAST_LAYER
  bool ends_prompt = false;    // KVM_ITEM_PROMPT_END
  bool restores = false;       // KVM_ITEM_RESTORE: `position` is a multiple of kPageTokens, and so
                               // is n_tokens
};

// An AppendPiece says where some tokens of an item go, for the heads of one class: to consecutive
// slots of one page, which the caller may write to. Those of head h of the class are those of kv
// head cls->kv_heads[h].
struct AppendPiece {
  uint32_t item = 0;         // index into the items given to reserve_append
  uint32_t class_index = 0;  // within the layer
  uint32_t token = 0;        // first token, counted from the item's first
  uint32_t n_tokens = 0;     // 1 to kPageTokens
  KvPlane k;
  KvPlane v;
  uint32_t slot = 0;  // of the first token
  const HeadClass* cls = nullptr;
};

// A SeenPart is what rows of an item see at most, from their policies and windows apart.
struct SeenPart {
  uint64_t first_query = 0;
  uint64_t end = KVM_POSITION_END;    // rows see positions before it
  std::span<const kvm_range> ranges;  // sorted, disjoint
  bool excludes = true;               // the ranges are left out; else only they are seen
};

// An ObserveInput is kvm_observe's data, already in this process and in fp32.
struct ObserveInput {
  uint32_t layer = 0;
  uint64_t query_position = 0;  // of the first row; the others follow
  uint32_t n_rows = 0;
  const float* q = nullptr;  // [n_rows][n_q_heads of the layer][head_dim_k]
  uint64_t column_begin = 0;
  uint64_t n_columns = 0;
  const float* column_sums = nullptr;  // [n_columns][n_kv_heads of the layer]
};

// An ObservedView is what is kept of it, for one (sequence, layer).
struct ObservedView {
  uint64_t query_position = 0;  // of the first kept row; rows are consecutive
  uint32_t n_rows = 0;
  const float* q = nullptr;            // [n_rows][n_q_heads][head_dim_k], oldest first
  uint64_t n_columns = 0;              // positions 0 .. n_columns
  const float* column_sums = nullptr;  // [n_columns][n_kv_heads]
};

// An AwayPage is a page of a list that is not in memory. Its place holds as long as the list is not
// changed.
struct AwayPage {
  uint64_t block = 0;  // slot s holds the token at position block * kPageTokens + s
  tiers::PlaceId place = tiers::kNoPlace;
  uint32_t size_bytes = 0;
  const tiers::SlabClass* slab_class = nullptr;
};

// PagePins hold full pages of one head class, which stay as they are though their sequence may
// change or go.
struct PagePins {
  ClientId client = 0;  // of the sequence
  uint64_t epoch = 0;   // as a reader of the pages (tiers/read_epochs.h), where there are any
  std::vector<tiers::PageRef> pages;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_STORE_TYPES_H_
