// SPDX-License-Identifier: Apache-2.0
// Sequences that change hands: to the library of their user, and from there to a client.
//
//   1  walk    what of its pages the giver pays for is summed up, and room for it is kept
//   2  switch  the sequence is the taker's, with what it has beside pages; nothing fails any more
//   3  walk    the records of these pages name the taker
//   4  indexes go along, layer by layer
//
// A page that forks of the sequence share has one payer still: the taker. What somebody else pays
// for stays with them. Between two parts other sequences may change. Pages that they let go of
// stay, for this sequence holds them; others may pass some of them on, so that less comes than was
// expected.
#include <fmt/format.h>

#include <algorithm>

#include "base/assert.h"
#include "base/round.h"
#include "base/undo.h"
#include "engine/store/store.h"

namespace kvm::engine {
namespace {

// So many blocks of a list are walked before the next look at what is left of the part.
constexpr uint64_t kWalkBlocks = 4096;
// Looking at a list costs about as much as so many pages.
constexpr uint64_t kPagesPerList = 2;
// LIMIT: accounts of a user's clients that are gone, which the driver walks now and then.
constexpr size_t kMaxGone = 1024;

// Calls visit(page) for the pages of the giver's from where `giving` stands, until about max_pages
// were looked at. True: these were the last.
template <typename Visit>
bool walk_pages(const tiers::PageTable& pages, const Sequence& seq, Giving* giving,
                uint64_t max_pages, Visit visit) {
  uint64_t n_seen = 0;
  while (giving->list < seq.lists.size()) {
    if (n_seen >= max_pages) {
      return false;
    }
    const PageList& list = seq.lists[giving->list];
    const uint64_t end = div_up(list.length(), kPageTokens);
    const uint64_t block_end =
        std::min(end, giving->block + std::min(kWalkBlocks, max_pages - n_seen));
    list.for_each_between(giving->block, block_end, [&](const PageEntry& entry) {
      ++n_seen;
      if (pages.payer(entry.page) == giving->giver->payer) {
        visit(entry.page);
      }
    });
    n_seen += kPagesPerList;
    giving->block = block_end;
    if (block_end >= end) {
      ++giving->list;
      giving->block = 0;
    }
  }
  giving->list = 0;
  return true;
}

uint64_t charged_bytes(const Sequence& seq, const Account* giver) {
  uint64_t size = 0;
  visit_charged(seq, [&](const auto& charged) {
    size += charged != nullptr && StoreMemory::payer(charged) == giver ? charged->size_bytes() : 0;
  });
  return size;
}

// Of pages that came to the giver after the first walk, for others passed them on, some may stay
// its own: no more goes to the taker than there is room for.
void pass_page(tiers::PageTable* pages, Giving* giving, tiers::PageRef page) {
  const KvBytes page_bytes = PageBank::bytes_of(*pages, page);
  if (!giving->expected_bytes.covers(page_bytes)) {
    return;
  }
  giving->expected_bytes -= page_bytes;
  giving->taker->quota->expect_no_more(page_bytes);
  giving->giver->quota->pass_to(giving->taker->quota, page_bytes);
  pages->set_payer(page, giving->taker->payer);
}

// Gives the index of a layer along, or up: where others use it now, or the taker has no room.
void pass_index(StoreMemory* memory, const Giving& giving, IndexRef* ref) {
  LayerIndex* index = ref->data.get();
  const bool is_used = index->n_pins != 0 || index->is_claimed;
  if (!is_used && index->size_bytes_of(giving.giver) <= giving.taker->quota->own_room().staying) {
    index->pass_to(memory->index_bank(giving.taker), giving.giver);
  } else {
    *ref = IndexRef{};
  }
}

// Goes on with indexes, until about max_pages of their pages went. True: these were the last.
bool pass_indexes(StoreMemory* memory, Sequence* seq, Giving* giving, uint64_t max_pages) {
  uint64_t n_seen = 0;
  for (; giving->layer < seq->indexes.size(); ++giving->layer) {
    IndexRef& ref = seq->indexes[giving->layer];
    if (ref.data == nullptr) {
      continue;
    }
    if (n_seen >= max_pages) {
      return false;
    }
    for (const HeadIndex& head : ref.data->heads) {
      n_seen += head.pages.size() + head.frames.size() + head.tables.size();
    }
    pass_index(memory, *giving, &ref);
  }
  return true;
}

// The sum is known: room is kept for it, and the sequence is the taker's.
Status take(Sequence* seq, Giving* giving) {
  Account* taker = giving->taker;
  KvBytes need = KvBytes::that_stay(charged_bytes(*seq, giving->giver));
  need += giving->expected_bytes;
  KVM_TRY(taker->quota->check_own(Resource::kSequences, 1, "the sequence"));
  // No index makes way where it would not fit without any.
  const bool could_fit = taker->quota->could_hold(need, taker->indexes.bytes);
  while (could_fit && !taker->quota->own_room().covers(need) && taker->indexes.drop_oldest()) {
  }
  KVM_TRY(taker->quota->check_own(need, "the sequence"));
  taker->quota->expect(giving->expected_bytes);
  visit_charged(
      *seq, [&](const auto& charged) { StoreMemory::pass_charged(charged, giving->giver, taker); });
  giving->giver->quota->pass_to(taker->quota, Resource::kSequences, 1);
  seq->account = taker;
  giving->is_taken = true;
  return Status::ok();
}

}  // namespace

void end_giving(Sequence* seq) {
  Giving* giving = seq->giving.get();
  if (giving == nullptr) {
    return;
  }
  giving->taker->quota->expect_no_more(giving->is_taken ? giving->expected_bytes : KvBytes{});
  --giving->giver->n_named;
  --giving->taker->n_named;
  seq->giving = nullptr;
}

Amounts Store::library_limits() const {
  Amounts limits = no_limits();  // but the user's
  limits[Resource::kSequences] = options_.max_sequences_per_client;
  return limits;
}

Result<bool> Store::publish_part(Sequence* seq, uint64_t max_pages) {
  if (seq->giving == nullptr && seq->account->is_library) {
    return true;
  }
  return give_part(seq, memory_.library_of(seq->account, library_limits()), max_pages);
}

Result<bool> Store::take_part(Sequence* seq, ClientId client, uint64_t max_pages) {
  Account* taker = account_for(seq, client);
  if (seq->giving == nullptr && seq->account == taker) {
    return true;
  }
  if (seq->giving == nullptr && memory_.n_gone(taker->quota->tenant()) >= kMaxGone) {
    return Status(KVM_ERR_LIMIT,
                  fmt::format("{} clients of this user are gone that still pay for pages of what "
                              "they took; free sequences that share these",
                              kMaxGone));
  }
  return give_part(seq, taker, max_pages);
}

Result<bool> Store::give_part(Sequence* seq, Account* taker, uint64_t max_pages) {
  if (seq->giving == nullptr) {
    KVM_TRY(taker->quota->check_own(Resource::kSequences, 1, "the sequence"));
    seq->giving = std::make_unique<Giving>();
    seq->giving->giver = seq->account;
    seq->giving->taker = taker;
    ++seq->account->n_named;
    ++taker->n_named;
  }
  Giving* giving = seq->giving.get();
  KVM_ASSERT(giving->taker == taker);
  tiers::PageTable* pages = &memory_.pages();
  if (!giving->is_taken) {
    const bool is_summed =
        walk_pages(*pages, *seq, giving, max_pages, [&](const tiers::PageRef page) {
          // A page of a pair is in two lists: it counts in the deeper layer's.
          const bool counts = seq->space().list_side(giving->list) != codecs::PairSide::kShallow ||
                              !pages->slab_class(page).k().is_pair();
          giving->expected_bytes += counts ? PageBank::bytes_of(*pages, page) : KvBytes();
        });
    if (!is_summed) {
      return false;
    }
    Undo ending([&] { end_giving(seq); });
    KVM_TRY(take(seq, giving));
    ending.dismiss();
    if (max_pages != UINT64_MAX) {
      return false;
    }
  }
  if (giving->list < seq->lists.size()) {
    const bool is_passed =
        walk_pages(*pages, *seq, giving, max_pages,
                   [&](const tiers::PageRef page) { pass_page(pages, giving, page); });
    if (!is_passed) {
      return false;
    }
    taker->quota->expect_no_more(giving->expected_bytes);
    giving->expected_bytes = {};
    giving->list = seq->lists.size();
    if (max_pages != UINT64_MAX) {
      return false;
    }
  }
  if (!pass_indexes(&memory_, seq, giving, max_pages)) {
    return false;
  }
  end_giving(seq);
  return true;
}

}  // namespace kvm::engine
