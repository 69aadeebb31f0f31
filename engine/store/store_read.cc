// SPDX-License-Identifier: Apache-2.0
#include <span>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "engine/store/store.h"
#include "engine/store/stored_runs.h"

namespace kvm::engine {

using tiers::PageRef;

namespace {

// Without addresses.
KvRun tokens_of(const tiers::SlabClass& slab_class, const PageEntry& entry) {
  KvRun run;
  run.position = entry.position();
  run.n_tokens = entry.count;
  run.k = slab_class.k_plane(nullptr);
  run.v = slab_class.v_plane(nullptr);
  run.slot = entry.first;
  return run;
}

KvRun run_of(const tiers::PageTable& pages, const HeadClass& head_class, const PageEntry& entry) {
  const tiers::SlabClass slab_class = head_class.seen(pages.slab_class(entry.page));
  KvRun run = tokens_of(slab_class, entry);
  point_to_page(slab_class, pages.data(entry.page), &run);
  return run;
}

}  // namespace

void point_to_page(const tiers::SlabClass& slab_class, const std::byte* page, KvRun* run) {
  run->k = slab_class.k_plane(page);
  run->v = slab_class.v_plane(page);
}

void Store::collect_runs(const Sequence* seq, uint32_t layer, uint32_t class_index,
                         std::vector<KvRun>* runs, bool is_packed,
                         std::vector<AwayPage>* away) const {
  const std::span<const PageList> lists = seq->stored_lists(layer);
  if (lists.empty()) {
    return;
  }
  const HeadClass& head_class = seq->space().head_class(layer, class_index);
  const uint32_t list = seq->space().storage(layer).first_list + class_index;
  const MeanEntry* mean = seq->mean_entries.empty() ? nullptr : seq->mean_entries[list].get();
  mean = mean == nullptr || mean->n_tokens == 0 ? nullptr : mean;
  const KeptTokens* kept = seq->kept_of(list);
  lists[class_index].for_each([&](const PageEntry& entry, bool) {
    if (mean != nullptr && entry.position() >= mean->end) {
      runs->push_back(mean->run());
      mean = nullptr;
    }
    if (kept != nullptr && !is_packed && kept->leads() && entry.position() >= kept->runs_end() &&
        entry.position() < kept->end()) {
      return;  // tokens that nobody can ask for by their positions
    }
    if (kept != nullptr && entry.position() >= (is_packed ? kept->runs_end() : kept->end())) {
      kept->collect(is_packed, runs);
      kept = nullptr;
    }
    const tiers::PageTable& pages = memory_.pages();
    if (pages.is_in_memory(entry.page)) {
      runs->push_back(run_of(pages, head_class, entry));
      return;
    }
    KVM_ASSERT(away != nullptr);
    const tiers::SlabClass& slab_class = pages.slab_class(entry.page);
    runs->push_back(tokens_of(slab_class, entry));
    away->push_back({.block = entry.block,
                     .place = pages.place(entry.page),
                     .size_bytes = static_cast<uint32_t>(slab_class.page_bytes()),
                     .slab_class = &slab_class});
  });
  if (kept != nullptr) {
    kept->collect(is_packed, runs);
  }
  if (mean != nullptr) {
    runs->push_back(mean->run());
  }
}

bool are_in_memory(const StoreMemory& memory, const Sequence* seq, uint32_t layer,
                   uint64_t block_begin, uint64_t block_end) {
  const tiers::PageTable& pages = memory.pages();
  bool are = true;
  if (pages.n_pages_away() != 0) {
    for (const PageList& list : seq->layer_lists(layer)) {
      list.for_each_between(block_begin, block_end, [&](const PageEntry& entry) {
        are = are && pages.is_in_memory(entry.page);
      });
    }
  }
  return are;
}

void collect_between(const StoreMemory& memory, const Sequence* seq, uint32_t layer,
                     uint32_t class_index, uint64_t block_begin, uint64_t block_end,
                     std::vector<KvRun>* runs) {
  const HeadClass& head_class = seq->space().head_class(layer, class_index);
  seq->layer_lists(layer)[class_index].for_each_between(
      block_begin, block_end,
      [&](const PageEntry& entry) { runs->push_back(run_of(memory.pages(), head_class, entry)); });
}

void Store::pin_pages(const Sequence* seq, uint32_t layer, uint32_t class_index,
                      uint64_t read_epoch, PagePins* pins) {
  pins->client = seq->account->client;
  const std::span<const PageList> lists = seq->stored_lists(layer);
  if (lists.empty()) {
    return;
  }
  std::vector<PageRef> pages;
  lists[class_index].for_each([&](const PageEntry& entry, bool) {
    if (entry.count == kPageTokens) {
      pages.push_back(entry.page);
    }
  });
  if (pages.empty()) {
    return;
  }
  // Nothing throws from here on.
  pins->epoch = memory_.pages().epochs().follow(read_epoch);
  for (const PageRef page : pages) {
    memory_.pages().add_ref(page);
  }
  pins->pages = std::move(pages);
}

void Store::unpin_pages(PagePins* pins) {
  if (pins->pages.empty()) {
    return;
  }
  for (const PageRef page : pins->pages) {
    memory_.release(page);
  }
  pins->pages.clear();
  memory_.pages().epochs().end(pins->epoch);
  memory_.pages().free_left_frames();
  memory_.trim_after_free();
}

}  // namespace kvm::engine
