// SPDX-License-Identifier: Apache-2.0
// The layout of a page, and its name.
//
// A page holds kPageTokens tokens of the kv heads of one head class:
//
//   offset 0                  K plane [n_heads][kPageTokens][dim_k] of dtype_k
//   v_offset()                V plane [n_heads][kPageTokens][dim_v] of dtype_v
//   log_weight_offset()       log-weights [n_heads][kPageTokens] fp32, where the class has them
//   k_scale_offset()          scales [n_heads][kPageTokens] bf16, where dtype_k is int8 or fp8
//   v_scale_offset()          likewise, where dtype_v is
//
// Every plane is a multiple of 64 bytes long, so planes and rows need no padding.
// docs/adr/0001-storage-layout.md has the reasons. Pages of an index hold codes instead; how is the
// index's own affair (docs/adr/0005-index-storage.md).
#ifndef KVM_TIERS_SLAB_CLASS_H_
#define KVM_TIERS_SLAB_CLASS_H_

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/kv_view.h"

namespace kvm::tiers {

// The unit that is charged, given back, moved between tiers and written to a disk.
inline constexpr uint64_t kExtentBytes = uint64_t{2} << 20;

// The properties that all pages of a slab have in common.
//
// INVARIANT (validated by engine/space/space.cc): dims are multiples of 8 from 8 to 256 and n_heads
// is 1 to 128, or index_bytes is a multiple of 64 and all else is zero; page_bytes() <=
// kExtentBytes.
struct SlabClass {
  Dtype dtype_k = Dtype::kBf16;
  Dtype dtype_v = Dtype::kBf16;
  uint16_t dim_k = 0;
  uint16_t dim_v = 0;
  uint16_t n_heads = 0;
  bool has_log_weights = false;
  uint32_t index_bytes = 0;  // not 0: a page of an index, this long; all above are 0 then

  bool operator==(const SlabClass&) const = default;

  // Bytes of one row: one token, one head; without its scale.
  uint64_t k_row_bytes() const { return uint64_t{dim_k} * dtype_size_bytes(dtype_k); }
  uint64_t v_row_bytes() const { return uint64_t{dim_v} * dtype_size_bytes(dtype_v); }
  // From the row of a token and head to the row of the same token and the next head.
  uint64_t k_head_bytes() const { return kPageTokens * k_row_bytes(); }
  uint64_t v_head_bytes() const { return kPageTokens * v_row_bytes(); }

  uint64_t v_offset() const { return n_heads * k_head_bytes(); }
  uint64_t log_weight_offset() const { return v_offset() + n_heads * v_head_bytes(); }
  uint64_t k_scale_offset() const {
    const uint64_t log_weights = has_log_weights ? sizeof(float) * kPageTokens * n_heads : 0;
    return log_weight_offset() + log_weights;
  }
  uint64_t v_scale_offset() const { return k_scale_offset() + scale_plane_bytes(dtype_k); }
  uint64_t page_bytes() const {
    return index_bytes != 0 ? index_bytes : v_scale_offset() + scale_plane_bytes(dtype_v);
  }

  // The size of one token of one head, scales included and log-weights not.
  uint64_t token_bytes() const {
    return k_row_bytes() + v_row_bytes() + dtype_scale_bytes(dtype_k) + dtype_scale_bytes(dtype_v);
  }

  // Scales of a slot, of head 0; those of the next head lie kPageTokens further. Null where the
  // dtype has none.
  const uint16_t* k_scales(const std::byte* page, uint32_t slot) const {
    return scales(dtype_k, page + k_scale_offset(), slot);
  }
  const uint16_t* v_scales(const std::byte* page, uint32_t slot) const {
    return scales(dtype_v, page + v_scale_offset(), slot);
  }
  uint16_t* k_scales(std::byte* page, uint32_t slot) const {
    return const_cast<uint16_t*>(k_scales(static_cast<const std::byte*>(page), slot));
  }
  uint16_t* v_scales(std::byte* page, uint32_t slot) const {
    return const_cast<uint16_t*>(v_scales(static_cast<const std::byte*>(page), slot));
  }

 private:
  uint64_t scale_plane_bytes(Dtype dtype) const {
    return uint64_t{n_heads} * kPageTokens * dtype_scale_bytes(dtype);
  }
  static const uint16_t* scales(Dtype dtype, const std::byte* plane, uint32_t slot) {
    return dtype_is_scaled(dtype) ? reinterpret_cast<const uint16_t*>(plane) + slot : nullptr;
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
