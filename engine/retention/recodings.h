// SPDX-License-Identifier: Apache-2.0
// Recodings are full pages of a list on their way to another slab class.
//
//   add(...)         driver   takes a page of the new class for each
//   run(begin, end)  tasks    encode
//   place(list)      driver   the new pages are the list's, the old ones go
//
// A page with a number that the new codecs cannot hold stays what it was. Pages that were not
// placed go with the Recodings.
//
// Threads: as above; run() for each page once. Nothing else changes the list from the first add()
// on.
#ifndef KVM_ENGINE_RETENTION_RECODINGS_H_
#define KVM_ENGINE_RETENTION_RECODINGS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/status.h"
#include "engine/store/page_list.h"
#include "engine/tasks/workspace.h"
#include "tiers/slab_class.h"

namespace kvm::engine {

class Recodings {
 public:
  Recodings() = default;
  Recodings(const PageBank& bank, const tiers::SlabClass& to) : bank_(bank), to_(to) {}
  Recodings(Recodings&&) = default;
  Recodings& operator=(Recodings&&) = default;
  Recodings(const Recodings&) = delete;
  Recodings& operator=(const Recodings&) = delete;
  ~Recodings();

  // REQUIRES: the page is full, in memory, of other codecs and else of the same class.
  // Fails: NO_SPACE; nothing has changed. Throws std::bad_alloc: likewise.
  Status add(const PageEntry& entry);
  uint32_t size() const { return static_cast<uint32_t>(pages_.size()); }
  // Bytes that encoding page i reads.
  uint64_t read_bytes(uint32_t i) const { return pages_[i].from.page_bytes(); }
  // False: the machine refused memory for the scratch; these pages stay what they were.
  [[nodiscard]] bool run(uint32_t begin, uint32_t end, Workspace* scratch);
  // Throws std::bad_alloc: some have been placed, and the rest may be later.
  void place(PageList* list);

 private:
  struct Page {
    uint32_t block = 0;
    tiers::PageRef page = tiers::kNoPage;  // the new one
    tiers::SlabClass from;
    const std::byte* source = nullptr;
    std::byte* target = nullptr;
    bool is_encoded = false;
  };

  std::optional<PageBank> bank_;  // as long as there are pages
  tiers::SlabClass to_;
  std::vector<Page> pages_;
  size_t n_placed_ = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RETENTION_RECODINGS_H_
