// SPDX-License-Identifier: Apache-2.0
// The layout of a page, and its name.
//
// A page holds kPageTokens tokens of the kv heads of one head class:
//
//   offset 0                  K plane [n_heads][kPageTokens] rows of codec_k
//   v_offset()                V plane, likewise of codec_v; none where V is in K
//   k_params_offset()         parameters of K (codecs/codec.h), where codec_k has some
//   v_params_offset()         likewise of V
//
// Planes are multiples of 64 bytes long, so planes and rows need no padding; only parameters are
// padded to that.
// docs/adr/0001-storage-layout.md has the reasons. Pages of an index hold codes instead; how is the
// index's own affair (docs/adr/0005-index-storage.md).
#ifndef KVM_TIERS_SLAB_CLASS_H_
#define KVM_TIERS_SLAB_CLASS_H_

#include <cstddef>
#include <cstdint>

#include "base/kv_view.h"
#include "base/round.h"
#include "codecs/codec.h"

namespace kvm::tiers {

// The unit that is charged, given back, moved between tiers and written to a disk.
inline constexpr uint64_t kExtentBytes = uint64_t{2} << 20;

// The properties that all pages of a slab have in common.
//
// INVARIANT (validated by engine/space/space.cc): dims are multiples of 8 from 8 to kMaxHeadDim and
// n_heads is 1 to 128, or index_bytes is a multiple of 64 and all else is zero; page_bytes() <=
// kExtentBytes; with v_in_k codecs agree and dim_v <= dim_k.
struct SlabClass {
  CodecId codec_k = CodecId::kBf16;
  CodecId codec_v = CodecId::kBf16;
  uint16_t dim_k = 0;
  uint16_t dim_v = 0;
  uint16_t n_heads = 0;
  bool v_in_k = false;       // V is the first dim_v channels of K's rows
  bool is_kept = false;      // in memory: these pages go to no other tier
  uint32_t index_bytes = 0;  // not 0: a page of an index, this long; all above are 0 then

  bool operator==(const SlabClass&) const = default;

  const codecs::Codec& k() const { return codecs::codec_of(codec_k); }
  const codecs::Codec& v() const { return codecs::codec_of(codec_v); }

  uint64_t v_offset() const { return n_heads * k().head_rows_bytes(dim_k); }
  uint64_t k_params_offset() const {
    return v_offset() + (v_in_k ? 0 : n_heads * v().head_rows_bytes(dim_v));
  }
  uint64_t v_params_offset() const { return k_params_offset() + params_bytes(k(), dim_k); }
  uint64_t page_bytes() const {
    return index_bytes != 0 ? index_bytes
                            : v_params_offset() + (v_in_k ? 0 : params_bytes(v(), dim_v));
  }

  // Whether pages of it never leave memory. Those of indexes do not either.
  bool stays() const { return is_kept || index_bytes != 0; }

  // The class of pages whose tokens are not all there yet: this one where rows stand alone. Of a
  // list that has both, pages of this class are not longer, but for pairs.
  SlabClass tail() const {
    SlabClass tail = *this;
    tail.codec_k = k().tail;
    tail.codec_v = v().tail;
    return tail;
  }

  // Pages of pairs are in the page table as those of the shallow side. The class that the same page
  // is read through from the other; others are what they are.
  SlabClass seen_from(codecs::PairSide side) const {
    SlabClass seen = *this;
    seen.codec_k = codecs::seen_from(side, codec_k);
    seen.codec_v = codecs::seen_from(side, codec_v);
    return seen;
  }

  // The size of one token of one head, parameters included.
  uint64_t token_bytes() const {
    return k().token_bytes(dim_k) + (v_in_k ? 0 : v().token_bytes(dim_v));
  }
  // Channels from one row of V to the next.
  uint32_t v_row_dim() const { return v_in_k ? dim_k : dim_v; }

  // K and V of a page; of no page: their shape alone. Where V is in K, both are K's.
  KvPlane k_plane(const std::byte* page) const { return plane(page, 0, k(), k_params_offset()); }
  KvPlane v_plane(const std::byte* page) const {
    return v_in_k ? k_plane(page) : plane(page, v_offset(), v(), v_params_offset());
  }

 private:
  static constexpr uint64_t kParamsAlign = 64;

  uint64_t params_bytes(const codecs::Codec& codec, uint32_t dim) const {
    return round_up(n_heads * codec.head_params_bytes(dim), kParamsAlign);
  }
  static KvPlane plane(const std::byte* page, uint64_t rows, const codecs::Codec& codec,
                       uint64_t params) {
    return page == nullptr
               ? KvPlane{nullptr, nullptr, codec.id}
               : KvPlane{page + rows, codec.is_scaled() ? page + params : nullptr, codec.id};
  }
};

// Names a page within an engine: 10 bits that say what kind of pages it is one of, 22 bits slot. No
// address, and no place in any tier: what it stands for now says the tiers' table of pages
// (tiers/page_table.h; on a GPU device/page_pool.h).
using PageRef = uint32_t;

inline constexpr PageRef kNoPage = 0xffffffffu;
inline constexpr uint32_t kSlotBits = 22;
inline constexpr uint32_t kMaxSlabs = 1023;  // the 1024th would contain kNoPage

constexpr uint32_t page_slab(PageRef page) { return page >> kSlotBits; }
constexpr uint32_t page_slot(PageRef page) { return page & ((1u << kSlotBits) - 1); }
constexpr PageRef make_page_ref(uint32_t slab, uint32_t slot) { return slab << kSlotBits | slot; }

}  // namespace kvm::tiers

#endif  // KVM_TIERS_SLAB_CLASS_H_
