// SPDX-License-Identifier: Apache-2.0
#include "engine/run/page_sends.h"

#include <algorithm>
#include <new>
#include <thread>

namespace kvm::engine {
namespace {

// LIMIT: of a batch: some 0.1 ms of the driver.
constexpr uint64_t kBatchPages = 256;
constexpr uint64_t kBatchVisits = 4096;

}  // namespace

bool PageSends::go_on(Store* store) {
  if (writes_.is_empty()) {
    if (queue_.empty()) {
      return false;
    }
    begin(store);
    return true;
  }
  if (!writes_.is_over()) {
    return false;
  }
  end(&store->memory());
  return true;
}

// Finds pages of the first target from where it goes on. Returns whether it came to its end.
bool PageSends::find(const StoreMemory& memory, const Sequence* seq) {
  Target& target = queue_.front();
  const tiers::PageTable& pages = memory.pages();
  const Space& space = seq->space();
  uint64_t n_visited = 0;
  for (uint32_t layer = 0; layer < space.n_layers; ++layer) {
    const Layer& own = space.layers[layer];
    const size_t n_classes = own.kind == KVM_LAYER_OWN ? own.classes.size() : 0;
    for (uint32_t c = 0; c < n_classes; ++c) {
      const uint32_t list = own.first_list + c;
      if (list < target.list || own.classes[c].retention.is_per_head()) {
        continue;
      }
      target.block = list == target.list ? target.block : 0;
      target.list = list;
      const PageList& from = seq->layer_lists(layer)[c];
      // What is to be encoded anew stays until it has been.
      const uint64_t end =
          (own.classes[c].settles() ? seq->settled_ends[list] : from.length()) / kPageTokens;
      while (target.block < end) {
        if (found_.size() == kBatchPages || n_visited >= kBatchVisits) {
          return false;
        }
        const uint64_t block_end = std::min(end, target.block + kBatchPages - found_.size());
        n_visited += block_end - target.block;
        from.for_each_between(target.block, block_end, [&](const PageEntry& entry) {
          if (entry.count == kPageTokens && pages.is_in_memory(entry.page) &&
              pages.is_sealed(entry.page)) {
            found_.push_back(entry.page);
          }
        });
        target.block = block_end;
      }
    }
  }
  return true;
}

void PageSends::begin(Store* store) {
  const Result<Sequence*> seq = store->find_any_seq(queue_.front().seq);
  tiers::PageTable& pages = store->memory().pages();
  found_.clear();
  found_.reserve(kBatchPages);
  writes_.reserve(kBatchPages);
  is_whole_ = !seq.is_ok() || find(store->memory(), seq.value());
  for (const tiers::PageRef page : found_) {
    tiers::PageTable::Move move;
    try {
      move = pages.begin_leave(page);
    } catch (const std::bad_alloc&) {
      break;  // the others stay
    }
    if (pages.place(page) != tiers::kNoPlace) {
      pages.end_leave(move, pages.place(page));
      continue;
    }
    writes_.add(move, tiers::kNoPlace);
  }
  pages.free_left_frames();
  if (!writes_.is_empty()) {
    writes_.submit(pages.slow_tier(), this);
  } else if (is_whole_) {
    drop_first();
  }
}

void PageSends::drop_first() {
  if (!queue_.empty()) {
    queue_.erase(queue_.begin());
  }
}

// Where the tier takes no more, a sequence stays for the rest.
void PageSends::end(StoreMemory* memory) {
  bool has_failed = false;
  writes_.end([&](const tiers::PageTable::Move& move, const tiers::Transfer& write) {
    memory->pages().end_leave(move, write.status.is_ok() ? write.place : tiers::kNoPlace);
    has_failed |= !write.status.is_ok();
  });
  memory->pages().free_left_frames();
  if (has_failed || is_whole_) {
    drop_first();
  }
}

void PageSends::stop(StoreMemory* memory) {
  while (!writes_.is_over()) {
    std::this_thread::yield();
  }
  end(memory);
  queue_.clear();
}

}  // namespace kvm::engine
