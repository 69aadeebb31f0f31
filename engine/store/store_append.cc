// SPDX-License-Identifier: Apache-2.0
#include "engine/store/store.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/counted.h"

namespace kvm::engine {
namespace {

uint32_t block_begin(const AppendItem& item) {
  return static_cast<uint32_t>(item.position / kPageTokens);
}
uint32_t block_end(const AppendItem& item) {
  return static_cast<uint32_t>((item.position + item.n_tokens) / kPageTokens);
}

KvBytes bytes_of(const tiers::PageTable& pages, const AppendItem& item) {
  KvBytes bytes;
  const std::span<const PageList> lists = std::as_const(*item.seq).layer_lists(item.layer);
  for (uint32_t i = 0; i < lists.size(); ++i) {
    const HeadClass& head_class = item.seq->space().head_class(item.layer, i);
    const tiers::SlabClass slab_class = head_class.slab_class.tail();
    uint64_t n_pages = 0;
    if (!item.restores) {
      n_pages = lists[i].pages_to_reserve(item.n_tokens, slab_class, pages);
    } else if (head_class.retention.kind == KVM_RETAIN_FULL) {
      n_pages = lists[i].pages_to_restore(block_begin(item), block_end(item));
    }
    bytes += KvBytes::of(n_pages * slab_class.page_bytes(), slab_class.stays());
  }
  return bytes;
}

// The quotas of all clients concerned hold what all items together need.
Status check_quota(StoreMemory* memory, std::span<const AppendItem> items) {
  std::unordered_map<Account*, KvBytes> needs;
  for (const AppendItem& item : items) {
    needs[item.seq->account] += bytes_of(memory->pages(), item);
  }
  std::unordered_map<QuotaAccount*, KvBytes> tenant_needs;
  for (const auto& [account, need] : needs) {
    if (need.all > 0) {
      KVM_TRY(memory->make_quota_room(account, need, "the append"));
      tenant_needs[account->quota->tenant()] += need;
    }
  }
  for (const auto& [tenant, need] : tenant_needs) {
    KVM_TRY(tenant->check(need, "the append"));
  }
  return Status::ok();
}

void rollback_lists(StoreMemory* memory, Sequence* seq, uint32_t layer) {
  for (PageList& list : seq->layer_lists(layer)) {
    list.rollback(memory->bank(seq->account));
  }
}

Status reserve_item(StoreMemory* memory, const AppendItem& item) {
  const std::span<PageList> lists = item.seq->layer_lists(item.layer);
  if (lists[0].reserved_length() != lists[0].length()) {
    return Status(KVM_ERR_INVALID, fmt::format("sequence {:#x} is appended to twice in layer {}",
                                               item.seq->id, item.layer));
  }
  for (uint32_t i = 0; i < lists.size(); ++i) {
    const HeadClass& head_class = item.seq->space().head_class(item.layer, i);
    const tiers::SlabClass slab_class = head_class.slab_class.tail();
    const PageBank bank = memory->bank(item.seq->account);
    Status status;
    if (!item.restores) {
      status = lists[i].reserve(item.n_tokens, slab_class, bank);
    } else if (head_class.retention.kind == KVM_RETAIN_FULL) {
      status = lists[i].reserve_dropped(block_begin(item), block_end(item), slab_class, bank);
    }
    if (!status.is_ok()) {
      rollback_lists(memory, item.seq, item.layer);
      return status;
    }
  }
  return Status::ok();
}

Status check_restored(const AppendItem& item, uint64_t present) {
  if (item.position % kPageTokens != 0 || item.n_tokens % kPageTokens != 0 || item.n_tokens == 0) {
    return {KVM_ERR_INVALID,
            fmt::format("KVM_ITEM_RESTORE with append_position {} and n_append {}; both must be "
                        "multiples of {}, and n_append not 0",
                        item.position, item.n_tokens, kPageTokens)};
  }
  const uint64_t end = std::min(present, item.seq->n_committed);
  if (item.position > end || item.n_tokens > end - item.position) {
    return {KVM_ERR_INVALID,
            fmt::format("KVM_ITEM_RESTORE of [{}, {}); layer {} of sequence {:#x} has {} that are "
                        "final",
                        item.position, item.position + item.n_tokens, item.layer, item.seq->id,
                        counted(end, "token"))};
  }
  return Status::ok();
}

// Policies hear with their next turn of what is final, whatever they said that they wait for.
void ask_policies(Sequence* seq) {
  note(seq, policies::Event::kCommitted);
  std::fill(seq->next_commits.begin(), seq->next_commits.end(), 0);
}

// Where the rows of restored tokens go.
void add_restored(const tiers::PageTable& pages, const PageList& list, const AppendItem& item,
                  AppendPiece piece, std::vector<AppendPiece>* pieces) {
  for (const PageEntry& entry : list.restored()) {
    const tiers::SlabClass& slab_class = pages.slab_class(entry.page);
    const std::byte* data = pages.data(entry.page);
    piece.token = static_cast<uint32_t>(entry.position() - item.position);
    piece.n_tokens = entry.count;
    piece.k = slab_class.k_plane(data);
    piece.v = slab_class.v_plane(data);
    pieces->push_back(piece);
  }
}

}  // namespace

uint64_t Store::bytes_to_reserve(std::span<const AppendItem> items) const {
  uint64_t size_bytes = 0;
  for (const AppendItem& item : items) {
    size_bytes += bytes_of(memory_.pages(), item).all;
  }
  return size_bytes;
}

Status Store::check_append(const AppendItem& item) const {
  KVM_TRY(check_layer(item.seq, item.layer));
  if (item.seq->space().layers[item.layer].kind == KVM_LAYER_ALIAS) {
    return Status(KVM_ERR_INVALID,
                  fmt::format("layer {} is an alias of layer {}; append there", item.layer,
                              item.seq->space().layers[item.layer].storage_layer));
  }
  const uint64_t present = layer_length(item.seq, item.layer);
  if (item.restores) {
    return check_restored(item, present);
  }
  if (item.position != KVM_POSITION_END && item.position != present) {
    return Status(KVM_ERR_HOLE,
                  fmt::format("append_position is {}; layer {} of sequence {:#x} has {}",
                              item.position, item.layer, item.seq->id, counted(present, "token")));
  }
  if (item.position == KVM_POSITION_END && present < item.seq->n_committed) {
    // Others have left the layer behind: its end is not where this token belongs.
    return Status(KVM_ERR_HOLE,
                  fmt::format("append_position is the end; layer {} of sequence {:#x} has {} of {} "
                              "that are final: say the position",
                              item.layer, item.seq->id, present, item.seq->n_committed));
  }
  if (item.n_tokens == 0 || item.n_tokens > kMaxTokens - present) {
    return Status(KVM_ERR_INVALID, fmt::format("n_append is {}; it must be 1 to {}", item.n_tokens,
                                               kMaxTokens - present));
  }
  return Status::ok();
}

Status Store::reserve_append(std::span<const AppendItem> items, std::vector<AppendPiece>* pieces) {
  for (const AppendItem& item : items) {
    KVM_TRY(check_append(item));
  }
  KVM_TRY(check_quota(&memory_, items));
  for (size_t i = 0; i < items.size(); ++i) {
    const Status status = reserve_item(&memory_, items[i]);
    if (!status.is_ok()) {
      for (size_t j = 0; j < i; ++j) {
        rollback_lists(&memory_, items[j].seq, items[j].layer);
      }
      memory_.trim_after_free();
      return status;
    }
  }
  for (uint32_t i = 0; i < items.size(); ++i) {
    const std::span<const PageList> lists =
        std::as_const(*items[i].seq).layer_lists(items[i].layer);
    for (uint32_t c = 0; c < lists.size(); ++c) {
      const HeadClass& head_class = items[i].seq->space().head_class(items[i].layer, c);
      memory_.counts().n_pages_copied +=
          lists[c].copy_tail(memory_.pages(), head_class.side) ? 1 : 0;
      if (items[i].restores) {
        add_restored(memory_.pages(), lists[c], items[i],
                     {.item = i, .class_index = c, .cls = &head_class}, pieces);
        continue;
      }
      const uint64_t begin = lists[c].length();
      for (uint64_t p = begin; p < lists[c].reserved_length();) {
        const PageEntry entry = lists[c].reserved_piece(p);
        const tiers::SlabClass& slab_class = memory_.pages().slab_class(entry.page);
        const std::byte* data = memory_.pages().data(entry.page);
        pieces->push_back({.item = i,
                           .class_index = c,
                           .token = static_cast<uint32_t>(p - begin),
                           .n_tokens = entry.count,
                           .k = slab_class.k_plane(data),
                           .v = slab_class.v_plane(data),
                           .slot = entry.first,
                           .cls = &head_class});
        p += entry.count;
      }
    }
  }
  return Status::ok();
}

void Store::publish_restored(const AppendItem& item) {
  Sequence* const seq = item.seq;
  const std::span<PageList> lists = seq->layer_lists(item.layer);
  for (uint32_t i = 0; i < lists.size(); ++i) {
    const uint64_t n_pages = lists[i].restored().size();
    if (n_pages == 0) {
      continue;
    }
    const HeadClass& head_class = seq->space().head_class(item.layer, i);
    memory_.counts().bytes_appended += n_pages * head_class.slab_class.tail().page_bytes();
    lists[i].publish(memory_.bank(seq->account));
    if (head_class.settles()) {
      uint64_t& settled_end = seq->settled_ends[seq->space().settling_list(item.layer, i)];
      settled_end = std::min(settled_end, item.position);
      ask_policies(seq);
    }
  }
  memory_.trim_in_passing();
}

void Store::publish(const AppendItem& item) {
  if (item.restores) {
    publish_restored(item);
    return;
  }
  Sequence* const seq = item.seq;
  const uint32_t layer = item.layer;
  const std::span<PageList> lists = seq->layer_lists(layer);
  const uint64_t n_tokens = lists[0].reserved_length() - lists[0].length();
  if (lists[0].length() < seq->n_committed) {
    // These tokens are final at once, and no commit may come that says so.
    ask_policies(seq);
  }
  for (uint32_t i = 0; i < lists.size(); ++i) {
    const tiers::SlabClass slab_class = seq->space().head_class(layer, i).slab_class.tail();
    lists[i].publish(memory_.bank(seq->account));
    memory_.counts().bytes_appended += n_tokens * slab_class.n_heads * slab_class.token_bytes();
  }
  memory_.counts().n_tokens_appended += n_tokens;
  if (item.ends_prompt) {
    end_prompt(seq, lists[0].length());
  }
  if ((seq->flags & KVM_SEQ_MANUAL_COMMIT) == 0) {
    advance_commit(seq, item.is_last_layer ? layer_length(seq, layer) : shortest_layer(seq));
  }
  memory_.trim_in_passing();
}

void Store::rollback(Sequence* seq, uint32_t layer) {
  rollback_lists(&memory_, seq, layer);
  memory_.trim_after_free();
}

}  // namespace kvm::engine
