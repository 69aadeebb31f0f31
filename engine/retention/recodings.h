// SPDX-License-Identifier: Apache-2.0
// Recodings are full pages of a list on their way to another slab class: each one encoded anew, or
// made of tokens of several, or of the pages of both layers of a pair.
//
//   add(...)         driver   takes a page of the new class for each
//   run(begin, end)  tasks    encode planes: K, or V, of one head of a page
//   place(list)      driver   the new pages are the list's, the old ones go
//
// A page with a number that the new codecs cannot hold stays what it was. Pages that were not
// placed go with the Recodings.
//
// Threads: as above; run() for each plane once. Nothing else changes the list from the first add()
// on.
#ifndef KVM_ENGINE_RETENTION_RECODINGS_H_
#define KVM_ENGINE_RETENTION_RECODINGS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/store/page_list.h"
#include "engine/tasks/workspace.h"
#include "tiers/slab_class.h"

namespace kvm::engine {

// A TokenRef is a token of a run.
struct TokenRef {
  const KvRun* run = nullptr;
  uint32_t index = 0;
};

class Recodings {
 public:
  Recodings() = default;
  // largest_q: [n_heads][dim_k], as codecs::encode_page_head has it of each, or empty.
  Recodings(const PageBank& bank, const tiers::SlabClass& to, std::vector<float> largest_q)
      : bank_(bank), to_(to), largest_q_(std::move(largest_q)) {}
  Recodings(Recodings&&) = default;
  Recodings& operator=(Recodings&&) = default;
  Recodings(const Recodings&) = delete;
  Recodings& operator=(const Recodings&) = delete;
  ~Recodings();

  // REQUIRES: the page is full, in memory, of other codecs and else of the same class.
  // Fails: NO_SPACE; nothing has changed. Throws std::bad_alloc: likewise.
  Status add(const PageEntry& entry);
  // A page of tokens of one head, in the place of the full page of `block`. REQUIRES: the class has
  // one head. Fails: likewise.
  Status add(uint32_t block);
  // Says which they are; they are read in run(). Any thread, before run(). REQUIRES: kPageTokens of
  // them; add() made the page of a block. Throws std::bad_alloc: nothing has changed.
  void set_tokens(uint32_t page, std::span<const TokenRef> tokens) {
    pages_[page].tokens.assign(tokens.begin(), tokens.end());
  }
  // A page of both, in the place of each: the layers of a pair. t: as codecs::encode_pair has it.
  // REQUIRES: the pages are of the same block, full, and of the tail of the new class. Fails:
  // likewise.
  Status add_pair(const PageEntry& shallow, const PageEntry& deep, float t);
  uint32_t size() const { return static_cast<uint32_t>(pages_.size()); }
  uint32_t n_planes() const { return size() * planes_of_page(); }
  // How much longer a byte takes to encode than as `int4`.
  static uint64_t weight(const tiers::SlabClass& to);
  // Bytes that encoding a plane reads, by their weight.
  uint64_t plane_cost() const;
  // False: the machine refused memory for the scratch; these pages stay what they were.
  [[nodiscard]] bool run(uint32_t begin, uint32_t end, Workspace* scratch);
  // Says whether each of these planes could be encoded. After run().
  bool are_encoded(uint32_t begin, uint32_t end) const;
  // shallow: the list of a pair's shallower layer, else null. Throws std::bad_alloc: some have been
  // placed, and the rest may be later. Nothing after PageList::prepare_replace.
  void place(PageList* list, PageList* shallow = nullptr);

 private:
  struct Page {
    uint32_t block = 0;
    tiers::PageRef page = tiers::kNoPage;  // the new one
    tiers::SlabClass from;
    const std::byte* source = nullptr;
    std::vector<TokenRef> tokens;        // where it is made of several pages' tokens
    const std::byte* shallow = nullptr;  // where it is made of two, the other
    float pair_t = 0;
    std::byte* target = nullptr;
  };

  // K of each head, then V of each.
  uint32_t planes_of_page() const { return to_.n_heads * (to_.v_in_k ? 1u : 2u); }
  Status take_page(Page&& page);
  bool encode(const Page& page, bool is_v, uint16_t head, float* scratch) const;
  bool gather(const Page& page, bool is_v, const float* largest_q, float* rows) const;

  std::optional<PageBank> bank_;  // as long as there are pages
  tiers::SlabClass to_;
  std::vector<float> largest_q_;
  std::vector<Page> pages_;
  std::vector<uint8_t> encoded_;  // of planes: bytes, for tasks write them side by side
  size_t n_placed_ = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RETENTION_RECODINGS_H_
