// SPDX-License-Identifier: Apache-2.0
#include "engine/store/store.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/counted.h"

namespace kvm::engine {
namespace {

KvBytes bytes_of(const tiers::PageTable& pages, const AppendItem& item) {
  KvBytes bytes;
  const std::span<const PageList> lists = std::as_const(*item.seq).layer_lists(item.layer);
  for (uint32_t i = 0; i < lists.size(); ++i) {
    const tiers::SlabClass slab_class =
        item.seq->space().head_class(item.layer, i).slab_class.tail();
    bytes += KvBytes::of(
        lists[i].pages_to_reserve(item.n_tokens, slab_class, pages) * slab_class.page_bytes(),
        slab_class.stays());
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
    const Status status = lists[i].reserve(
        item.n_tokens, item.seq->space().head_class(item.layer, i).slab_class.tail(),
        memory->bank(item.seq->account));
    if (!status.is_ok()) {
      rollback_lists(memory, item.seq, item.layer);
      return status;
    }
  }
  return Status::ok();
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

void Store::publish(const AppendItem& item) {
  Sequence* const seq = item.seq;
  const uint32_t layer = item.layer;
  const std::span<PageList> lists = seq->layer_lists(layer);
  const uint64_t n_tokens = lists[0].reserved_length() - lists[0].length();
  if (lists[0].length() < seq->n_committed) {
    // These tokens are final at once, and no commit may come that says so.
    note(seq, policies::Event::kCommitted);
    std::fill(seq->next_commits.begin(), seq->next_commits.end(), 0);
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
