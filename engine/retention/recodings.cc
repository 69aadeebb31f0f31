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

Status Recodings::add(uint32_t block) {
  KVM_ASSERT(to_.n_heads == 1);
  return take_page({.block = block, .from = to_});
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
  reserve_growing(encoded_, encoded_.size() + planes_of_page());
  const Result<tiers::PageRef> taken = bank_->allocate(to_);
  if (!taken.is_ok()) {
    return taken.status();
  }
  page.page = taken.value();
  page.target = bank_->pages().data(page.page);
  pages_.push_back(std::move(page));
  encoded_.resize(n_planes());
  return Status::ok();
}

uint64_t Recodings::weight(const tiers::SlabClass& to) {
  const bool is_gear = to.k().is_gear() || to.v().is_gear();
  return is_gear ? 12 : to.k().is_pair() ? 4 : 1;
}

uint64_t Recodings::plane_cost() const {
  const uint64_t n_rows = uint64_t{kPageTokens} * (to_.k().is_pair() ? 2 : 1);
  return weight(to_) * n_rows * std::max(to_.dim_k, to_.dim_v) * sizeof(uint16_t);
}

// rows: [kPageTokens][dim]
bool Recodings::gather(const Page& page, bool is_v, const float* largest_q, float* rows) const {
  const uint32_t dim = is_v ? to_.dim_v : to_.dim_k;
  KVM_ASSERT(page.tokens.size() == kPageTokens);
  for (uint32_t i = 0; i < kPageTokens; ++i) {
    const TokenRef& token = page.tokens[i];
    codecs::decode_rows(is_v ? token.run->v : token.run->k, dim, token.run->slot + token.index, 1,
                        dim, rows + uint64_t{i} * dim);
  }
  return codecs::encode_rows(rows, is_v ? to_.v_plane(page.target) : to_.k_plane(page.target), dim,
                             largest_q);
}

// scratch: [kPageTokens][dim], of pairs twice.
bool Recodings::encode(const Page& page, bool is_v, uint16_t head, float* scratch) const {
  const uint32_t dim = is_v ? to_.dim_v : to_.dim_k;
  const float* const largest_q =
      is_v || largest_q_.empty() ? nullptr : largest_q_.data() + uint64_t{head} * dim;
  if (page.source == nullptr) {
    return gather(page, is_v, largest_q, scratch);
  }
  const auto plane = [is_v](const tiers::SlabClass& of, auto* data) {
    return is_v ? of.v_plane(data) : of.k_plane(data);
  };
  const KvPlane from = plane(page.from, page.source);
  const KvPlane to = plane(to_, page.target);
  return page.shallow != nullptr
             ? codecs::encode_pair_head(plane(page.from, page.shallow), from, to, head, dim,
                                        page.pair_t, scratch)
             : codecs::encode_page_head(from, to, head, dim, largest_q, scratch);
}

bool Recodings::are_encoded(uint32_t begin, uint32_t end) const {
  return std::all_of(encoded_.begin() + begin, encoded_.begin() + end,
                     [](uint8_t is_encoded) { return is_encoded != 0; });
}

bool Recodings::run(uint32_t begin, uint32_t end, Workspace* scratch) {
  KVM_ASSERT(end <= encoded_.size());
  const uint64_t n_rows = to_.k().is_pair() ? 2 * kPageTokens : kPageTokens;
  const uint64_t n_floats = n_rows * std::max(to_.dim_k, to_.dim_v);
  auto* floats = reinterpret_cast<float*>(scratch->reserve(n_floats * sizeof(float)));
  if (floats == nullptr) {
    return false;
  }
  for (uint32_t i = begin; i < end; ++i) {
    const uint32_t plane = i % planes_of_page();
    encoded_[i] = encode(pages_[i / planes_of_page()], plane >= to_.n_heads,
                         static_cast<uint16_t>(plane % to_.n_heads), floats)
                      ? 1
                      : 0;
  }
  return true;
}

void Recodings::place(PageList* list, PageList* shallow) {
  for (; n_placed_ < pages_.size(); ++n_placed_) {
    const Page& page = pages_[n_placed_];
    const auto first = static_cast<uint32_t>(n_placed_) * planes_of_page();
    if (are_encoded(first, first + planes_of_page())) {
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
