// SPDX-License-Identifier: Apache-2.0
#include "engine/store/layer_index.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/assert.h"
#include "base/round.h"
#include "base/splitmix.h"

namespace kvm::engine {

using tiers::kNoPage;
using tiers::PageRef;

namespace {

constexpr uint32_t kMaxHashUnit = 4096;
constexpr uint32_t kFramePages = kFrameBlocks / kIndexPageBlocks;

// Bits [begin, end) of a word, clipped to its 32.
uint32_t bits_between(uint64_t begin, uint64_t end) {
  const auto below = [](uint64_t n) { return n >= 32 ? ~uint32_t{0} : (uint32_t{1} << n) - 1; };
  return begin >= end ? 0 : below(end) & ~below(begin);
}

// Which bits of page `page` are blocks of [begin, end).
uint32_t page_bits(uint64_t page, uint64_t begin, uint64_t end) {
  const uint64_t first = page * kIndexPageBlocks;
  return bits_between(begin > first ? begin - first : 0, end > first ? end - first : 0);
}

// Blocks to wait for before what made way is built again.
constexpr uint64_t kRebuildBlocks = kIndexPageBlocks;
// So much is unmapped at a time before an allocation is given up.
constexpr uint64_t kUnmapBytes = uint64_t{32} << 20;

void release_pages(HeadIndex* head, const IndexBank& bank) {
  for (const IndexPage& page : head->pages) {
    if (page.page != kNoPage) {
      bank.release(page.page);
    }
  }
  head->pages.clear();
}

// Blocks of a head that are there.
uint64_t count_blocks(const HeadIndex& head) {
  uint64_t n = 0;
  for (const IndexPage& page : head.pages) {
    n += static_cast<uint64_t>(std::popcount(page.blocks));
  }
  for (const IndexTablesPtr& tables : head.tables) {
    n += tables->run.n_keys / kPageTokens;
  }
  return n;
}

// How many of a head's blocks are dealt with when it is cut to n_blocks. Hash tables that are cut
// in the middle go, so that what follows the last whole ones has to be dealt with again.
uint64_t blocks_after_cut(const HeadIndex& head, uint64_t n_blocks, const IndexConfig& config) {
  if (n_blocks >= head.n_blocks) {
    n_blocks = head.n_blocks;
  } else if (config.kind == KVM_INDEX_LSH) {
    uint64_t whole = 0;
    for (const IndexTablesPtr& tables : head.tables) {
      const uint64_t end = tables->run.end() / kPageTokens;
      whole = end <= n_blocks ? end : whole;
    }
    n_blocks = whole;
  }
  return n_blocks * kPageTokens < config.min_tokens ? 0 : n_blocks;
}

void cut_head(HeadIndex* head, uint64_t n_blocks, const IndexConfig& config,
              const IndexBank& bank) {
  head->n_refused = std::min(head->n_refused, n_blocks);
  if (n_blocks >= head->n_blocks) {
    return;
  }
  n_blocks = blocks_after_cut(*head, n_blocks, config);
  head->n_blocks = n_blocks;
  head->retry_at = 0;
  const uint64_t n_pages = div_up(n_blocks, kIndexPageBlocks);
  for (uint64_t i = n_pages; i < head->pages.size(); ++i) {
    if (head->pages[i].page != kNoPage) {
      bank.release(head->pages[i].page);
    }
  }
  head->pages.resize(std::min<uint64_t>(n_pages, head->pages.size()));
  if (n_pages != 0 && n_pages == head->pages.size()) {
    IndexPage& last = head->pages.back();
    last.blocks &= page_bits(n_pages - 1, 0, n_blocks);
    if (last.blocks == 0 && last.page != kNoPage) {
      bank.release(last.page);
      last.page = kNoPage;
    }
  }
  head->frames.resize(std::min<uint64_t>(div_up(n_blocks, kFrameBlocks), head->frames.size()));
  const uint64_t end = n_blocks * kPageTokens;
  std::erase_if(head->tables,
                [end](const IndexTablesPtr& tables) { return tables->run.end() > end; });
}

// Tasks may be writing into the last page of a head that has blocks, and into those behind it.
void cut_to_whole_pages(LayerIndex* index, std::span<const IndexConfig> configs) {
  for (size_t i = 0; i < index->heads.size(); ++i) {
    HeadIndex& head = index->heads[i];
    if (configs[i].kind == KVM_INDEX_LSH) {
      continue;  // tables are added whole
    }
    const uint64_t n_pages = head.n_blocks / kIndexPageBlocks;
    cut_head(&head, n_pages * kIndexPageBlocks, configs[i], index->bank);
    while (head.pages.size() > n_pages) {
      if (head.pages.back().page != kNoPage) {
        index->bank.release(head.pages.back().page);
      }
      head.pages.pop_back();
    }
    head.frames.resize(std::min<uint64_t>(div_up(head.n_blocks, kFrameBlocks), head.frames.size()));
  }
}

}  // namespace

void IndexUses::touch(LayerIndex* index) {
  index->last_use = ++index->bank.totals().n_uses;
  if (index->is_listed) {
    order_.splice(order_.end(), order_, index->place);
    return;
  }
  index->place = order_.insert(order_.end(), index);
  index->is_listed = true;
}

void IndexUses::remove(LayerIndex* index) {
  if (index->is_listed) {
    order_.erase(index->place);
    index->is_listed = false;
  }
}

void IndexUses::take_over(LayerIndex* index, IndexUses* from) {
  if (index->is_listed) {
    index->last_use = ++index->bank.totals().n_uses;
    order_.splice(order_.end(), from->order_, index->place);
  }
}

std::list<LayerIndex*>::const_iterator IndexUses::find_oldest() const {
  return std::find_if(order_.begin(), order_.end(),
                      [](const LayerIndex* index) { return index->n_pins == 0; });
}

uint64_t IndexUses::oldest_use() const {
  const auto oldest = find_oldest();
  return oldest == order_.end() ? UINT64_MAX : (*oldest)->last_use;
}

bool IndexUses::drop_oldest() {
  const auto oldest = find_oldest();
  if (oldest == order_.end()) {
    return false;
  }
  (*oldest)->make_way();
  return true;
}

void IndexBank::add_bytes(uint64_t size_bytes) const {
  account_->quota->charge(KvBytes::that_stay(size_bytes));
  account_->indexes.bytes += size_bytes;
}

void IndexBank::take_bytes(Account* account, uint64_t size_bytes) {
  account->quota->give_back(KvBytes::that_stay(size_bytes));
  account->indexes.bytes -= size_bytes;
}

PageRef IndexBank::allocate(uint64_t page_bytes) const {
  if (!fits_quota(page_bytes)) {
    return kNoPage;
  }
  const tiers::SlabClass slab_class = {.index_bytes = static_cast<uint32_t>(page_bytes)};
  Result<PageRef> page = pages_->allocate(slab_class, account_->payer);
  while (!page.is_ok() && reclaimer_->unmap_some(kUnmapBytes)) {
    page = pages_->allocate(slab_class, account_->payer);
  }
  if (!page.is_ok()) {
    return kNoPage;
  }
  add_bytes(page_bytes);
  totals_->page_bytes += page_bytes;
  ++totals_->n_pages;
  return page.value();
}

void IndexBank::release(PageRef page) const {
  const uint64_t page_bytes = pages_->page_bytes(page);
  Account& payer = payers_->at(pages_->payer(page));
  if (pages_->release(page)) {
    take_bytes(&payer, page_bytes);
    totals_->page_bytes -= page_bytes;
    --totals_->n_pages;
  }
}

bool IndexBank::charge(uint64_t size_bytes) const {
  if (!fits_quota(size_bytes)) {
    return false;
  }
  while (!pool_->make_room(size_bytes) || !budget_->charge(size_bytes)) {
    if (!reclaimer_->unmap_some(kUnmapBytes)) {
      return false;
    }
  }
  add_bytes(size_bytes);
  totals_->charged_bytes += size_bytes;
  return true;
}

void IndexBank::uncharge(uint64_t size_bytes) const {
  take_bytes(account_, size_bytes);
  totals_->charged_bytes -= size_bytes;
  budget_->uncharge(size_bytes);
}

void IndexBank::reclaim(std::byte* data, uint64_t size_bytes) const {
  take_bytes(account_, size_bytes);
  totals_->charged_bytes -= size_bytes;
  reclaimer_->reclaim(data, size_bytes);
}

void IndexBank::take_over(PageRef page) const {
  const uint64_t page_bytes = pages_->page_bytes(page);
  Account& payer = payers_->at(pages_->payer(page));
  payer.quota->pass_to(account_->quota, KvBytes::that_stay(page_bytes));
  payer.indexes.bytes -= page_bytes;
  account_->indexes.bytes += page_bytes;
  pages_->set_payer(page, account_->payer);
}

void IndexBank::take_over(const IndexBank& payer, uint64_t size_bytes) const {
  payer.account_->quota->pass_to(account_->quota, KvBytes::that_stay(size_bytes));
  payer.account_->indexes.bytes -= size_bytes;
  account_->indexes.bytes += size_bytes;
}

uint64_t IndexBank::room_bytes() const {
  return std::min(account_->quota->room().staying,
                  budget_->free_bytes() + pool_->cached_bytes() + reclaimer_->size_bytes());
}

std::vector<HashRun> hash_runs(uint64_t n_tokens, uint32_t min_tokens) {
  std::vector<HashRun> runs;
  uint64_t position = 0;
  const uint32_t unit = std::min(kMaxHashUnit, std::bit_floor(min_tokens));
  for (uint32_t size = hash_index::kMaxRunKeys; size >= unit; size /= 2) {
    while (n_tokens - position >= size) {
      runs.push_back({position, size});
      position += size;
    }
  }
  return runs;
}

void LayerIndex::make_way() {
  bank.uses().remove(this);
  const uint64_t had_bytes = size_bytes();
  if (had_bytes == 0) {
    return;  // it has gone before, and was only looked at since: it goes on waiting
  }
  gone_bytes = had_bytes;
  for (HeadIndex& head : heads) {
    bank.totals().n_dropped += count_blocks(head);
    release_pages(&head, bank);
    head = {.retry_at = head.n_blocks + kRebuildBlocks};
  }
}

void LayerIndex::cut(uint64_t n_blocks, std::span<const IndexConfig> configs) {
  for (size_t i = 0; i < heads.size(); ++i) {
    cut_head(&heads[i], n_blocks, configs[i], bank);
  }
}

void LayerIndex::drop(uint32_t index, uint64_t block_begin, uint64_t block_end) {
  HeadIndex& head = heads[index];
  const uint64_t n_pages =
      std::min<uint64_t>(div_up(block_end, kIndexPageBlocks), head.pages.size());
  for (uint64_t i = block_begin / kIndexPageBlocks; i < n_pages; ++i) {
    IndexPage& page = head.pages[i];
    page.blocks &= ~page_bits(i, block_begin, block_end);
    // The last page is filled further as long as it lasts.
    if (page.blocks == 0 && page.page != kNoPage && i + 1 < head.pages.size()) {
      bank.release(page.page);
      page.page = kNoPage;
    }
  }
  // A run without codes needs no frame; the last one goes on to the next run.
  const uint64_t first_run = block_begin / kFrameBlocks;
  for (uint64_t run = first_run - std::min<uint64_t>(first_run, 1); run + 1 < head.frames.size();
       ++run) {
    const auto first = head.pages.begin() + static_cast<ptrdiff_t>(std::min<uint64_t>(
                                                run * kFramePages, head.pages.size()));
    const auto last = first + std::min<ptrdiff_t>(kFramePages, head.pages.end() - first);
    if (std::all_of(first, last, [](const IndexPage& page) { return page.page == kNoPage; })) {
      head.frames[run] = nullptr;
    }
  }
  const uint64_t begin = block_begin * kPageTokens;
  const uint64_t end = block_end * kPageTokens;
  std::erase_if(head.tables, [begin, end](const IndexTablesPtr& tables) {
    return tables->run.position < end && tables->run.end() > begin;
  });
}

uint64_t LayerIndex::size_bytes() const {
  uint64_t size = 0;
  for (const HeadIndex& head : heads) {
    for (const IndexPage& page : head.pages) {
      size += page.page != kNoPage ? bank.pages().page_bytes(page.page) : 0;
    }
    for (const IndexFramePtr& frame : head.frames) {
      size += frame != nullptr ? frame->memory.size_bytes() : 0;
    }
    for (const IndexTablesPtr& tables : head.tables) {
      size += tables->tables.size_bytes();
    }
  }
  return size;
}

uint64_t LayerIndex::size_bytes_of(const Account* account) const {
  uint64_t size = 0;
  for (const HeadIndex& head : heads) {
    for (const IndexPage& page : head.pages) {
      if (page.page != kNoPage && bank.pages().payer(page.page) == account->payer) {
        size += bank.pages().page_bytes(page.page);
      }
    }
    for (const IndexFramePtr& frame : head.frames) {
      if (frame != nullptr && frame->memory.payer() == account) {
        size += frame->memory.size_bytes();
      }
    }
    for (const IndexTablesPtr& tables : head.tables) {
      size += tables->tables.payer() == account ? tables->tables.size_bytes() : 0;
    }
  }
  return size;
}

void LayerIndex::list_under(const IndexBank& of_client) {
  of_client.uses().take_over(this, &bank.uses());
  --bank.account()->n_named;
  bank = of_client;
  ++bank.account()->n_named;
}

void LayerIndex::pass_to(const IndexBank& taker, const Account* giver) {
  KVM_ASSERT(n_pins == 0 && !is_claimed);
  list_under(taker);
  for (HeadIndex& head : heads) {
    for (const IndexPage& page : head.pages) {
      if (page.page != kNoPage && bank.pages().payer(page.page) == giver->payer) {
        taker.take_over(page.page);
      }
    }
    for (const IndexFramePtr& frame : head.frames) {
      if (frame != nullptr && frame->memory.payer() == giver) {
        frame->memory.pass_to(taker);
      }
    }
    for (const IndexTablesPtr& tables : head.tables) {
      if (tables->tables.payer() == giver) {
        tables->tables.pass_to(taker);
      }
    }
  }
}

std::shared_ptr<LayerIndex> make_index(size_t n_heads, const IndexBank& bank) {
  std::shared_ptr<LayerIndex> index(new LayerIndex(bank), [](LayerIndex* gone) {
    KVM_ASSERT(gone->n_pins == 0);
    gone->bank.uses().remove(gone);
    for (HeadIndex& head : gone->heads) {
      release_pages(&head, gone->bank);
    }
    delete gone;
  });
  index->heads.resize(n_heads);
  return index;
}

LayerIndex* own_index(IndexRef* ref, std::span<const IndexConfig> configs, const IndexBank& bank) {
  if (ref->data == nullptr) {
    ref->data = make_index(configs.size(), bank);
  } else if (ref->data.use_count() > 1) {
    std::shared_ptr<LayerIndex> copy = make_index(0, bank);
    copy->heads = ref->data->heads;
    copy->gone_bytes = ref->data->gone_bytes;
    const bool is_built = ref->data->is_claimed;
    for (const HeadIndex& head : copy->heads) {
      for (const IndexPage& page : head.pages) {
        if (page.page != kNoPage) {
          bank.add_ref(page.page);
        }
      }
    }
    if (is_built) {
      cut_to_whole_pages(copy.get(), configs);
    }
    ref->data = std::move(copy);
  } else if (ref->data->bank.account() != bank.account()) {
    ref->data->list_under(bank);  // whoever shared it with this client has let go of it
  }
  bank.uses().touch(ref->data.get());
  ref->data->cut(ref->limit, configs);
  ref->limit = UINT64_MAX;
  return ref->data.get();
}

uint64_t blocks_dealt_with(const IndexRef& ref, uint32_t head, const IndexConfig& config) {
  return ref.data == nullptr ? 0 : blocks_after_cut(ref.data->heads[head], ref.limit, config);
}

void collect_sketches(const IndexRef& ref, uint32_t head_index, const IndexConfig& config,
                      uint64_t n_blocks, uint32_t dim_k, std::vector<attention::SketchedRun>* out) {
  const uint64_t end = std::min(n_blocks, blocks_dealt_with(ref, head_index, config));
  if (end * kPageTokens < config.min_tokens) {
    return;
  }
  const HeadIndex& head = ref.data->heads[head_index];
  const tiers::PageTable& pages = ref.data->bank.pages();
  const uint64_t n_pages = std::min<uint64_t>(div_up(end, kIndexPageBlocks), head.pages.size());
  for (uint64_t i = 0; i < n_pages; ++i) {
    const IndexFramePtr& frame = head.frames[i * kIndexPageBlocks / kFrameBlocks];
    uint32_t left = head.pages[i].blocks & page_bits(i, 0, end);
    if (frame == nullptr) {
      continue;
    }
    const size_t size = hash_index::block_bytes(hash_index::frame_kind(*frame->frame), dim_k);
    while (left != 0) {
      const auto first = static_cast<uint32_t>(std::countr_zero(left));
      const auto count = static_cast<uint32_t>(std::countr_one(left >> first));
      out->push_back({.position = (i * kIndexPageBlocks + first) * kPageTokens,
                      .n_blocks = count,
                      .frame = frame->frame.get(),
                      .blocks = pages.data(head.pages[i].page) + first * size});
      left &= ~bits_between(first, uint64_t{first} + count);
    }
  }
}

void collect_hashes(const IndexRef& ref, uint32_t head, const IndexConfig& config,
                    uint64_t n_blocks, std::vector<attention::HashedRun>* out) {
  const uint64_t end = std::min(n_blocks, blocks_dealt_with(ref, head, config)) * kPageTokens;
  if (end < config.min_tokens) {
    return;
  }
  for (const IndexTablesPtr& tables : ref.data->heads[head].tables) {
    if (tables->run.end() <= end) {
      out->push_back({.position = tables->run.position,
                      .n_keys = tables->run.n_keys,
                      .tables = tables->tables.data(),
                      .center = tables->center.data()});
    }
  }
}

uint64_t mix_seed(uint64_t seed, uint64_t a, uint64_t b) {
  const uint64_t first = splitmix64(seed + kSplitMixStep);
  return splitmix64(splitmix64(first + a + kSplitMixStep) + b + kSplitMixStep);
}

}  // namespace kvm::engine
