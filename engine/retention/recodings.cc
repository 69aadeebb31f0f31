// SPDX-License-Identifier: Apache-2.0
#include "engine/retention/recodings.h"

#include <algorithm>

#include "base/assert.h"

namespace kvm::engine {

Recodings::~Recodings() {
  for (size_t i = n_placed_; i < pages_.size(); ++i) {
    bank_->release(pages_[i].page);
  }
}

Status Recodings::add(const PageEntry& entry) {
  KVM_ASSERT(entry.first == 0 && entry.count == kPageTokens);
  const tiers::PageTable& pages = bank_->pages();
  pages_.push_back({.block = entry.block,
                    .from = pages.slab_class(entry.page),
                    .source = pages.data(entry.page)});
  const Result<tiers::PageRef> page = bank_->allocate(to_);
  if (!page.is_ok()) {
    pages_.pop_back();
    return page.status();
  }
  pages_.back().page = page.value();
  pages_.back().target = pages.data(page.value());
  return Status::ok();
}

bool Recodings::run(uint32_t begin, uint32_t end, Workspace* scratch) {
  const uint64_t n_floats = uint64_t{kPageTokens} * std::max(to_.dim_k, to_.dim_v);
  auto* floats = reinterpret_cast<float*>(scratch->reserve(n_floats * sizeof(float)));
  if (floats == nullptr) {
    return false;
  }
  for (uint32_t i = begin; i < end; ++i) {
    Page& page = pages_[i];
    page.is_encoded = encode_page(page.from, page.source, to_, page.target, floats);
  }
  return true;
}

void Recodings::place(PageList* list) {
  for (; n_placed_ < pages_.size(); ++n_placed_) {
    const Page& page = pages_[n_placed_];
    if (page.is_encoded) {
      list->replace(page.block, page.page, *bank_);
      bank_->seal(page.page);
    } else {
      bank_->release(page.page);
    }
  }
}

}  // namespace kvm::engine
