// SPDX-License-Identifier: Apache-2.0
// KeptTokens: the tokens that a head chose to keep of pages that it has given up, and the attention
// mass that it chooses by.
//
// Both are shared by forks: rows until one of them chooses anew, masses until one of them attends.
#ifndef KVM_ENGINE_STORE_KEPT_TOKENS_H_
#define KVM_ENGINE_STORE_KEPT_TOKENS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/kv_view.h"
#include "base/raw_bytes.h"
#include "tiers/slab_class.h"

namespace kvm::engine {

// KeptTokens are rows of one head, in the encoding of its class: slots as in pages, one behind the
// other, the last of which may be shorter where rows stand alone.
class KeptTokens {
 public:
  struct Token {
    uint64_t position = 0;
    uint32_t slot = 0;
  };

  // is_counted: tokens that are merged into another count (log_weights). leads: the pages of what
  // is not kept stay, behind these tokens.
  // REQUIRES: rows_are_own() of the class's codecs; capacity is whole pages where rows do not stand
  // alone.
  KeptTokens(const tiers::SlabClass& slab_class, uint64_t begin, uint32_t capacity, bool is_counted,
             bool leads);
  // What they are made of, as it lies: for images (engine/image/).
  struct Parts {
    uint64_t end = 0;
    uint64_t lead = UINT64_MAX;  // where the tokens lie that lead; else UINT64_MAX
    uint32_t capacity = 0;
    std::vector<Token> tokens;
    // [capacity] where tokens count, else empty: of slots, and the logarithms.
    std::vector<uint32_t> counts;
    std::vector<float> log_weights;
    float threshold = 0;
    bool has_threshold = false;
  };
  // [capacity] rows; the tokens have slots 0 to tokens.size() - 1, in no order. Those behind them,
  // up to the end of their last page, are zeros; the rest nobody has written.
  struct Rows {
    RawBytes k;
    RawBytes v;
    std::vector<uint16_t> k_scales;  // where rows have some
    std::vector<uint16_t> v_scales;
  };
  const tiers::SlabClass& slab_class() const { return slab_class_; }
  const Parts& parts() const { return parts_; }
  const Rows& rows() const { return rows_; }
  // Those of such parts. REQUIRES: all are as long as those of new ones of this class and capacity.
  KeptTokens(const tiers::SlabClass& slab_class, Parts&& parts, Rows&& rows);
  // The same tokens with rows that clone_pages() has yet to copy, some MiB.
  KeptTokens without_rows() const;
  uint32_t n_pages() const;      // of the tokens
  uint32_t n_rows_read() const;  // those of the tokens, and the zeros behind them
  // Copies the rows of these pages of tokens. Threads: any, each page once.
  // REQUIRES: this came of without_rows() of `from`, and nothing was chosen since.
  void clone_pages(const KeptTokens& from, uint32_t begin, uint32_t end);

  // The pages before this, from those behind the sinks' on, have been given up.
  uint64_t end() const { return parts_.end; }
  std::span<const Token> tokens() const { return parts_.tokens; }  // in position order
  // Says whether pages before end() hold tokens that are not kept, whose positions are unknown.
  bool leads() const { return parts_.lead != UINT64_MAX; }
  // Pages from here on lie behind what collect() appends.
  uint64_t runs_end() const { return leads() ? parts_.lead : parts_.end; }
  // Where the tokens lie that are in the pages of these places, and not kept: whole pages, or none.
  PositionRange unkept_places() const;
  uint64_t size_bytes() const;

  // Tokens that come, and where the rows of those go that are not here yet.
  struct Choice {
    std::vector<Token> tokens;
    std::vector<Token> copies;  // in position order
  };

  // Of pages [end(), new_end) and of the present tokens those at `positions` stay:
  //   choice = plan(positions);  copy(...) until all of choice.copies are;  choose(choice, new_end)
  // REQUIRES: positions are in order, at most capacity and not fewer than there are now.
  Choice plan(std::span<const uint64_t> positions) const;
  // Copies rows of tokens in `from` to their slots; who stands there now loses them.
  // Threads: any, each copy once. tokens() and end() do not change.
  void copy(std::span<const Token> copies, KvRuns from);
  void choose(Choice&& choice, uint64_t new_end);

  // What merging (token_merge.h) leaves: rows in place of a slot's, how many tokens the one in a
  // slot stands for, and how near a key must be to join another.
  // REQUIRES: rows stand alone.
  KvPlane k_plane() const;
  KvPlane v_plane() const;
  // Threads: any, each slot once.
  void write(uint32_t slot, const float* k, const float* v);
  uint32_t count(uint32_t slot) const { return parts_.counts.empty() ? 1 : parts_.counts[slot]; }
  // Does nothing where tokens do not count.
  void set_count(uint32_t slot, uint32_t count);
  bool has_threshold() const { return parts_.has_threshold; }
  float threshold() const { return parts_.threshold; }
  void set_threshold(float threshold) {
    parts_.threshold = threshold;
    parts_.has_threshold = true;
  }

  // The size of the planes of so many rows.
  static uint64_t row_bytes(const codecs::Codec& codec, uint32_t dim, uint32_t capacity);
  static uint64_t n_params(const codecs::Codec& codec, uint32_t dim, uint32_t capacity);

  // Appends the tokens as runs. is_packed: at positions that are not theirs, but consecutive up to
  // end(), or from where the pages begin that they lead, so that they are few runs; no visible rule
  // but causality can tell.
  void collect(bool is_packed, std::vector<KvRun>* runs) const;
  // Returns where collect() says that a token lies.
  uint64_t collected_position(const Token& token, bool is_packed) const;

 private:
  KvRun run(uint32_t slot, uint64_t position, uint32_t n_tokens) const;
  // Of the page that a slot lies in.
  KvPlane plane_of(const RawBytes& rows, const std::vector<uint16_t>& params,
                   const codecs::Codec& codec, uint32_t dim, uint32_t slot) const;
  KvPlane k_plane_of(uint32_t slot) const;
  KvPlane v_plane_of(uint32_t slot) const;
  // Where the token in slot 0 is said to lie.
  uint64_t first_packed() const;

  tiers::SlabClass slab_class_;
  Parts parts_;
  Rows rows_;
};

// Masses are sums of softmax weights, over queries and the q heads of the group.
struct Masses {
  uint64_t begin = 0;         // position of the first of `recent`
  std::vector<float> kept;    // of KeptTokens::tokens()
  std::vector<float> recent;  // of the tokens from `begin` on

  uint64_t size_bytes() const { return (kept.size() + recent.size()) * sizeof(float); }
};

// Adds column sums of positions from `position` on, as collect() counts them. kept may be null.
// What is not finite, or negative, counts as 0. REQUIRES: masses->kept fits `kept`, and
// masses->recent reaches to the last of the sums.
void add_sums(std::span<const float> sums, uint64_t position, const KeptTokens* kept,
              bool is_packed, Masses* masses);

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_KEPT_TOKENS_H_
