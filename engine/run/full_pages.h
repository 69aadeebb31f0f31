// SPDX-License-Identifier: Apache-2.0
// FullPages goes through the pages of a sequence that may be in the slow tier: full ones, of heads
// of which no policy reads what it gives up. Layer by layer, and from position 0 on in each; a part
// at a time.
//
// Threads: the driver.
#ifndef KVM_ENGINE_RUN_FULL_PAGES_H_
#define KVM_ENGINE_RUN_FULL_PAGES_H_

#include <cstdint>
#include <vector>

#include "engine/store/sequence.h"
#include "tiers/page_table.h"

namespace kvm::engine {

// A FullPage is one of them.
struct FullPage {
  tiers::PageRef page = tiers::kNoPage;
  bool is_shared = false;  // with another sequence
};

class FullPages {
 public:
  // Those of a higher priority are passed over.
  struct Worth {
    uint32_t max_priority = KVM_PRIORITY_MAX;
    uint64_t now_ns = 0;
  };

  // LIMIT: of a part: some 0.1 ms of the driver.
  static constexpr uint64_t kMaxPages = 256;
  static constexpr uint64_t kMaxVisits = 4096;

  // From the first one on again.
  void rewind();
  // Finds up to kMaxPages more, and about max_bytes of them, that are sealed and in memory, or that
  // are not: *found, cleared before, has room for kMaxPages. Returns whether it came to the end.
  bool find(const tiers::PageTable& pages, const Sequence& seq, bool in_memory, const Worth& worth,
            uint64_t max_bytes, std::vector<FullPage>* found);
  // Whether there were any since rewind() that may be, but not now: they are written, they move,
  // they are to be encoded anew, or worth too much.
  bool has_skipped() const { return has_skipped_; }

 private:
  uint32_t list_ = 0;  // where it goes on
  uint64_t block_ = 0;
  bool has_skipped_ = false;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RUN_FULL_PAGES_H_
