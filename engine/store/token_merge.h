// SPDX-License-Identifier: Apache-2.0
// TokenMerge: what a head makes of the tokens that it gives up, where its policy says more than to
// forget them (kvm.h: KVM_MERGE_*). D2O (Wan et al., arXiv 2406.13035): a token joins the kept one
// whose key is nearest to its own, if that is near enough.
//
//   TokenMerge merge(...)        driver  lists the tokens that go and those that stay
//   find(i), i < n_finds()       tasks   who is nearest to whom
//   gate(kept)                   driver  who joins
//   mix(i), i < n_mixes()        tasks   rows of those that are joined, in memory of their own
//   write(i, kept)               tasks   into their slots, once nobody reads what stood there
//   finish(kept)                 driver  the new threshold and counts
//
// LIMIT: a find multiplies kFindTokens keys with kFindStayers: some 0.1 ms where dim is 128.
//
// Threads: tasks on any thread, each index once, all of a stage before the driver goes on.
// Errors: find() says false where the machine refuses memory: nothing has changed then.
#ifndef KVM_ENGINE_STORE_TOKEN_MERGE_H_
#define KVM_ENGINE_STORE_TOKEN_MERGE_H_

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention/dots/dots.h"
#include "base/kv_view.h"
#include "engine/store/kept_tokens.h"
#include "engine/tasks/workspace.h"
#include "tiers/slab_class.h"

namespace kvm::engine {

class TokenMerge {
 public:
  static constexpr uint32_t kFindTokens = attention::kDotRows;
  static constexpr uint32_t kFindStayers = 256;
  static constexpr uint32_t kMixTargets = 64;

  // Of what `kept` holds and of the tokens in `runs`, those of `choice` stay. What the arguments
  // refer to stays alive, and unchanged until the last mix() has ended.
  TokenMerge(const tiers::SlabClass& slab_class, const KeptTokens& kept,
             const KeptTokens::Choice& choice, KvRuns runs);

  uint32_t n_finds() const { return n_token_blocks_ * n_stayer_blocks_; }
  // That attention reads in the time of one of them.
  uint64_t find_bytes() const;
  bool find(uint32_t index, Workspace* scratch);

  // Says who joins: whose similarity is at least the threshold, which is the mean of them at first,
  // and then half of what it was and half of their mean.
  void gate(const KeptTokens& kept);

  uint32_t n_mixes() const;
  uint32_t n_targets() const { return static_cast<uint32_t>(targets_.size()); }
  uint64_t mix_bytes() const;  // of all
  void mix(uint32_t index);
  // Says whether the row of a token that stays comes from write(), so that it need not be copied.
  bool writes(uint64_t position) const;
  void write(uint32_t target, KeptTokens* kept) const;
  void finish(KeptTokens* kept) const;

 private:
  struct Row {
    KvPlane k;
    KvPlane v;
    uint32_t slot = 0;  // in the planes
    uint32_t count = 1;
  };
  struct Nearest {
    float similarity = -HUGE_VALF;
    uint32_t stayer = UINT32_MAX;  // none: no number came of the keys
  };
  // A token that is joined: those that join are joins_[begin, end).
  struct Target {
    uint32_t stayer = 0;
    uint32_t begin = 0;
    uint32_t end = 0;
  };

  uint32_t row_floats() const { return slab_class_.dim_k + (slab_class_.v_in_k ? 0 : dim_v()); }
  uint32_t dim_v() const { return slab_class_.dim_v; }

  tiers::SlabClass slab_class_;
  std::vector<Row> goers_;    // in position order: those that were kept before, then those of pages
  std::vector<Row> stayers_;  // in position order
  std::vector<KeptTokens::Token> stays_;  // them, with the slots that they will have
  uint32_t n_token_blocks_ = 0;
  uint32_t n_stayer_blocks_ = 0;
  std::vector<Nearest> nearest_;  // [stayer block][goer], and then [goer]
  float threshold_ = 0;
  bool has_threshold_ = false;
  std::vector<uint32_t> joins_;
  std::vector<Target> targets_;    // in the order of their stayers
  std::unique_ptr<float[]> rows_;  // [target][row_floats()]
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_TOKEN_MERGE_H_
