// SPDX-License-Identifier: Apache-2.0
#include "engine/retention/recodings.h"

#include <algorithm>

#include "base/assert.h"
#include "base/reserve.h"
#include "codecs/convert.h"
#include "codecs/pair.h"

namespace kvm::engine {

Recodings::~Recodings() {
  for (size_t i = n_placed_; i < pages_.size(); ++i) {
    bank_->release(pages_[i].page);
  }
}

Status Recodings::add(const PageEntry& entry) {
  KVM_ASSERT(entry.first == 0 && entry.count == kPageTokens);
  const tiers::PageTable& pages = bank_->pages();
  return take_page({.block = entry.block,
                    .from = pages.slab_class(entry.page),
                    .source = pages.data(entry.page)});
}

Status Recodings::add(uint32_t block, std::span<const TokenRef> tokens) {
  KVM_ASSERT(tokens.size() == kPageTokens && to_.n_heads == 1);
  return take_page(
      {.block = block, .from = to_, .tokens = std::vector(tokens.begin(), tokens.end())});
}

Status Recodings::add_pair(const PageEntry& shallow, const PageEntry& deep, float t) {
  KVM_ASSERT(shallow.block == deep.block && shallow.count == kPageTokens &&
             deep.count == kPageTokens);
  const tiers::PageTable& pages = bank_->pages();
  KVM_ASSERT(pages.slab_class(shallow.page) == to_.tail() &&
             pages.slab_class(deep.page) == to_.tail());
  return take_page({.block = deep.block,
                    .from = to_.tail(),
                    .source = pages.data(deep.page),
                    .shallow = pages.data(shallow.page),
                    .pair_t = t});
}

Status Recodings::take_page(Page&& page) {
  reserve_growing(pages_, pages_.size() + 1);
  const Result<tiers::PageRef> taken = bank_->allocate(to_);
  if (!taken.is_ok()) {
    return taken.status();
  }
  page.page = taken.value();
  page.target = bank_->pages().data(page.page);
  pages_.push_back(std::move(page));
  return Status::ok();
}

// rows: [kPageTokens][larger dim]
bool Recodings::gather(const Page& page, float* rows) const {
  const auto encode = [&](KvPlane KvRun::*plane, uint32_t row_dim, const KvPlane& to, uint32_t dim,
                          const float* largest_q) {
    for (uint32_t i = 0; i < kPageTokens; ++i) {
      const TokenRef& token = page.tokens[i];
      codecs::decode_rows(token.run->*plane, row_dim, token.run->slot + token.index, 1, dim,
                          rows + uint64_t{i} * dim);
    }
    return codecs::encode_rows(rows, to, dim, largest_q);
  };
  return encode(&KvRun::k, to_.dim_k, to_.k_plane(page.target), to_.dim_k, largest_q()) &&
         (to_.v_in_k || encode(&KvRun::v, to_.dim_v, to_.v_plane(page.target), to_.dim_v, nullptr));
}

// scratch: [2][kPageTokens][larger dim]
bool Recodings::merge(const Page& page, float* scratch) const {
  const std::byte* shallow = page.shallow;
  return codecs::encode_pair_page(page.from.k_plane(shallow), page.from.k_plane(page.source),
                                  to_.k_plane(page.target), to_.n_heads, to_.dim_k, page.pair_t,
                                  scratch) &&
         (to_.v_in_k ||
          codecs::encode_pair_page(page.from.v_plane(shallow), page.from.v_plane(page.source),
                                   to_.v_plane(page.target), to_.n_heads, to_.dim_v, page.pair_t,
                                   scratch));
}

bool Recodings::are_encoded(uint32_t begin, uint32_t end) const {
  return std::all_of(pages_.begin() + begin, pages_.begin() + end,
                     [](const Page& page) { return page.is_encoded; });
}

bool Recodings::run(uint32_t begin, uint32_t end, Workspace* scratch) {
  const uint64_t n_rows = to_.k().is_pair() ? 2 * kPageTokens : kPageTokens;
  const uint64_t n_floats = n_rows * std::max(to_.dim_k, to_.dim_v);
  auto* floats = reinterpret_cast<float*>(scratch->reserve(n_floats * sizeof(float)));
  if (floats == nullptr) {
    return false;
  }
  for (uint32_t i = begin; i < end; ++i) {
    Page& page = pages_[i];
    page.is_encoded = page.shallow != nullptr ? merge(page, floats)
                      : page.tokens.empty() ? encode_page(page.from, page.source, to_, page.target,
                                                          largest_q(), floats)
                                            : gather(page, floats);
  }
  return true;
}

void Recodings::place(PageList* list, PageList* shallow) {
  for (; n_placed_ < pages_.size(); ++n_placed_) {
    const Page& page = pages_[n_placed_];
    if (page.is_encoded) {
      if (page.shallow != nullptr) {  // in both or in none
        list->prepare_replace(page.block, page.block + 1, *bank_);
        shallow->prepare_replace(page.block, page.block + 1, *bank_);
        bank_->add_ref(page.page);
        shallow->replace(page.block, page.page, *bank_);
      }
      list->replace(page.block, page.page, *bank_);
      bank_->seal(page.page);
    } else {
      bank_->release(page.page);
    }
  }
}

}  // namespace kvm::engine
