// SPDX-License-Identifier: Apache-2.0
// The kernels that are compiled: one list for the library, the emulator's suite and the checks.
//
// Every shape of the decode kernel takes at most 99 KiB of shared memory, so that two blocks fit
// into an SM of sm_90 (227 KiB) and one into that of sm_120 (99 KiB); 50 to 72 KiB of each are
// copies under way. So do those of MLA (mla_kernel.h) with 16 and 32 rows; with 64 rows a block has
// an SM for itself.
#ifndef KVM_ATTENTION_CUDA_SHAPES_H_
#define KVM_ATTENTION_CUDA_SHAPES_H_

#include "attention/cuda/append_kernel.h"
#include "attention/cuda/decode_kernel.h"
#include "attention/cuda/merge_kernel.h"
#include "attention/cuda/mla_kernel.h"
#include "attention/cuda/prefill_kernel.h"

namespace kvm::attention::gpu {

inline constexpr uint32_t kMostSharedBytes = 99 << 10;

template <Element kElement, uint32_t kDim, uint32_t kRowTiles,
          uint32_t kBits = kElementBits<kElement>>
struct ShapeOf;
template <Element kElement, uint32_t kRowTiles>
struct ShapeOf<kElement, 64, kRowTiles, 16> {
  using Type = DecodeShape<kElement, 64, 32, 3, 4, kRowTiles>;
};
template <Element kElement, uint32_t kRowTiles>
struct ShapeOf<kElement, 128, kRowTiles, 16> {
  using Type = DecodeShape<kElement, 128, 16, 3, 4, kRowTiles>;
};
template <Element kElement, uint32_t kRowTiles>
struct ShapeOf<kElement, 80, kRowTiles, 16> {
  using Type = DecodeShape<kElement, 80, 16, 4, 4, kRowTiles>;
};
template <Element kElement, uint32_t kRowTiles>
struct ShapeOf<kElement, 96, kRowTiles, 16> {
  using Type = DecodeShape<kElement, 96, 16, 4, 4, kRowTiles>;
};
// 32 rows of more than 128 channels have no room in the registers: two blocks of rows, the second
// of which finds K and V in the cache.
template <Element kElement>
struct ShapeOf<kElement, 192, 1, 16> {
  using Type = DecodeShape<kElement, 192, 16, 4, 2, 1>;
};
template <Element kElement>
struct ShapeOf<kElement, 256, 1, 16> {
  using Type = DecodeShape<kElement, 256, 16, 3, 2, 1>;
};
// Rows of bytes. Their scales take registers too: no 32 rows of 128 channels. Rows of 80 are 5
// chunks, of which the last has no neighbour: products take it of 32 tokens.
template <Element kElement, uint32_t kRowTiles>
struct ShapeOf<kElement, 64, kRowTiles, 8> {
  using Type = DecodeShape<kElement, 64, 32, 5, 4, kRowTiles>;
};
template <Element kElement>
struct ShapeOf<kElement, 128, 1, 8> {
  using Type = DecodeShape<kElement, 128, 32, 3, 4, 1>;
};
template <Element kElement, uint32_t kRowTiles>
struct ShapeOf<kElement, 80, kRowTiles, 8> {
  using Type = DecodeShape<kElement, 80, 32, 4, 4, kRowTiles>;
};
template <Element kElement, uint32_t kRowTiles>
struct ShapeOf<kElement, 96, kRowTiles, 8> {
  using Type = DecodeShape<kElement, 96, 32, 3, 4, kRowTiles>;
};
template <Element kElement>
struct ShapeOf<kElement, 192, 1, 8> {
  using Type = DecodeShape<kElement, 192, 16, 4, 4, 1>;
};
template <Element kElement>
struct ShapeOf<kElement, 256, 1, 8> {
  using Type = DecodeShape<kElement, 256, 16, 3, 4, 1>;
};

// Rows of 4 bits.
template <Element kElement, uint32_t kRowTiles>
struct ShapeOf<kElement, 64, kRowTiles, 4> {
  using Type = DecodeShape<kElement, 64, 32, 8, 4, kRowTiles>;
};
template <Element kElement>
struct ShapeOf<kElement, 128, 1, 4> {
  using Type = DecodeShape<kElement, 128, 32, 4, 4, 1>;
};
template <Element kElement>
struct ShapeOf<kElement, 256, 1, 4> {
  using Type = DecodeShape<kElement, 256, 16, 4, 4, 1>;
};

// The prefill kernel's, all of 128 rows: what it reads of K and V for each product is then half of
// what an H200 has to give (modelled, docs/gpu.md). Warps of 32 rows read a tile half as often from
// shared memory as those of 16; from 192 channels on they have no room in the registers. The last
// number is of the steps of queries that have.
template <Element kElement, uint32_t kDim, uint32_t kBits = kElementBits<kElement>>
struct PrefillShapeOf;
template <Element kElement>
struct PrefillShapeOf<kElement, 64, 16> {
  using Type = PrefillShape<kElement, 64, 64, 3, 4, 2, 4>;
};
template <Element kElement>
struct PrefillShapeOf<kElement, 80, 16> {
  using Type = PrefillShape<kElement, 80, 64, 2, 4, 2, 0>;
};
template <Element kElement>
struct PrefillShapeOf<kElement, 96, 16> {
  using Type = PrefillShape<kElement, 96, 64, 2, 4, 2, 0>;
};
template <Element kElement>
struct PrefillShapeOf<kElement, 128, 16> {
  using Type = PrefillShape<kElement, 128, 32, 3, 4, 2, 2>;
};
template <Element kElement>
struct PrefillShapeOf<kElement, 192, 16> {
  using Type = PrefillShape<kElement, 192, 32, 4, 8, 1, 12>;
};
template <Element kElement>
struct PrefillShapeOf<kElement, 256, 16> {
  using Type = PrefillShape<kElement, 256, 32, 2, 8, 1, 10>;
};
template <Element kElement>
struct PrefillShapeOf<kElement, 64, 8> {
  using Type = PrefillShape<kElement, 64, 64, 3, 4, 2, 4>;
};
// Of these rows a warp copies 32 at least: of K or of V.
template <Element kElement>
struct PrefillShapeOf<kElement, 80, 8> {
  using Type = PrefillShape<kElement, 80, 64, 3, 4, 2, 0>;
};
// And 16 of these: of four warps with 32 rows each, tiles are of 64 tokens, whose scores would
// spill.
template <Element kElement>
struct PrefillShapeOf<kElement, 96, 8> {
  using Type = PrefillShape<kElement, 96, 128, 2, 8, 1, 6>;
};
template <Element kElement>
struct PrefillShapeOf<kElement, 128, 8> {
  using Type = PrefillShape<kElement, 128, 32, 4, 4, 2, 2>;
};
template <Element kElement>
struct PrefillShapeOf<kElement, 192, 8> {
  using Type = PrefillShape<kElement, 192, 64, 2, 8, 1, 0>;
};
template <Element kElement>
struct PrefillShapeOf<kElement, 256, 8> {
  using Type = PrefillShape<kElement, 256, 32, 3, 8, 1, 8>;
};
// Of 4 bits a warp copies as many rows as there are lanes for their steps, 16 of 64 channels.
template <Element kElement>
struct PrefillShapeOf<kElement, 64, 4> {
  using Type = PrefillShape<kElement, 64, 64, 3, 4, 2, 4>;
};
template <Element kElement>
struct PrefillShapeOf<kElement, 128, 4> {
  using Type = PrefillShape<kElement, 128, 32, 4, 4, 2, 0>;
};
template <Element kElement>
struct PrefillShapeOf<kElement, 256, 4> {
  using Type = PrefillShape<kElement, 256, 32, 3, 8, 1, 4>;
};

template <class Shape>
inline constexpr bool kIsPrefill = false;
template <Element kElement, uint32_t kDim, uint32_t kTile, uint32_t kStages, uint32_t kWarps,
          uint32_t kRowTiles, uint32_t kHeldSteps>
inline constexpr bool
    kIsPrefill<PrefillShape<kElement, kDim, kTile, kStages, kWarps, kRowTiles, kHeldSteps>> = true;

// Does the work of one thread of one block of the kernel of a shape.
template <class Shape>
KVM_GPU void attend_thread(const DecodeParams& p) {
  if (p.merge_follows) {
    // At once: all blocks run by then, those of the merge take what is left of the SMs, and no
    // instruction while they wait.
    let_next_kernel_begin();
  }
  if constexpr (Shape::kIsMla) {
    mla_thread<Shape>(p);
  } else if constexpr (kIsPrefill<Shape>) {
    prefill_thread<Shape>(p);
  } else {
    decode_thread<Shape>(p);
  }
}

// The shape that code for sm_80 has instead: with as many stages as let two blocks run on an SM,
// which has 164 KiB and takes 1 for itself from each. A block has a warp for each scheduler; of
// two, one has work while the other waits. sm_86 and 89 run that code too: they have room for one
// block, and need a quarter of the bytes under way. The prefill kernel's blocks of four warps are
// as small; one of eight has two warps for each scheduler by itself.
inline constexpr uint32_t kHalfOfSm80 = 81 << 10;

// What one block may have of an SM of sm_90.
inline constexpr uint32_t kAllOfSm90 = 227 << 10;

// Shapes that a kernel has elsewhere than in code for sm_90a, where it has the one that it is known
// by.
template <class Shape>
struct OtherShapes {
  using Sm80 = DecodeShape<Shape::kElement, Shape::kDim, Shape::kTile,
                           (kHalfOfSm80 / Shape::kWarps - Shape::kSumBytes) / Shape::kStageBytes,
                           Shape::kWarps, Shape::kRowTiles>;
  using Small = Shape;
};

template <Element kElement, uint32_t kDim, uint32_t kTile, uint32_t kStages, uint32_t kWarps,
          uint32_t kRowTiles, uint32_t kHeldSteps>
struct OtherShapes<PrefillShape<kElement, kDim, kTile, kStages, kWarps, kRowTiles, kHeldSteps>> {
  using Sm80 = PrefillShape<kElement, kDim, kTile, kStages, kWarps, kRowTiles, kHeldSteps>;
  using Small = Sm80;
};

// MLA with 64 rows: tiles of 16 tokens, not of 32, which have as many barriers for half the tokens,
// but of which three stages do not fit into 99 KiB.
template <Element kElement, uint32_t kTile, uint32_t kStages, uint32_t kRowTiles>
struct OtherShapes<MlaShape<kElement, kTile, kStages, kRowTiles>> {
  using Sm80 = MlaShape<kElement, 16, kRowTiles == 2 ? 3 : 4, kRowTiles>;
  using Small = MlaShape<kElement, 16, kRowTiles == 1 ? 5 : 4, kRowTiles>;
};

// Of code for sm_80.
template <class Shape>
using Sm80Shape = typename OtherShapes<Shape>::Sm80;
// Of code for all others but sm_90a: of sm_120, and of what the driver makes of PTX for devices of
// which only that much is known.
template <class Shape>
using SmallShape = typename OtherShapes<Shape>::Small;

// Calls visit(Shape{}) with the shape for so many rows; false where there is none.
template <Element kElement, class Visit>
bool visit_mla(uint32_t block_rows, Visit visit) {
  switch (block_rows) {
    case 16:
      visit(MlaShape<kElement, 16, 5, 1>{});
      return true;
    case 32:
      visit(MlaShape<kElement, 16, 4, 2>{});
      return true;
    case 64:
      visit(MlaShape<kElement, 32, 5, 4>{});
      return true;
    default:
      return false;
  }
}

template <uint32_t kDimValue>
struct DimTag {
  static constexpr uint32_t kDim = kDimValue;
};

// Calls visit(DimTag{}) for results of so many channels; false where no kernel makes them.
template <class Visit>
bool visit_value_dim(uint32_t dim, Visit visit) {
  const auto visit_if = [&]<uint32_t kDim>(DimTag<kDim> tag) {
    if (dim == kDim) {
      visit(tag);
    }
    return dim == kDim;
  };
  return visit_if(DimTag<64>{}) || visit_if(DimTag<80>{}) || visit_if(DimTag<96>{}) ||
         visit_if(DimTag<128>{}) || visit_if(DimTag<192>{}) || visit_if(DimTag<256>{}) ||
         visit_if(DimTag<kMlaValueDim>{});
}

template <Element kElement, class Visit>
bool visit_prefill_dim(uint32_t dim, Visit visit) {
  bool known = false;
  visit_value_dim(dim, [&]<class Tag>(Tag) {
    constexpr bool kIsThere = Tag::kDim == 64 || Tag::kDim == 128 || Tag::kDim == 256 ||
                              (Tag::kDim <= 256 && !kHasSteps<kElement>);
    if constexpr (kIsThere) {
      using Shape = typename PrefillShapeOf<kElement, Tag::kDim>::Type;
      static_assert(Shape::kRows == kPrefillRows);
      visit(Shape{});
      known = true;
    }
  });
  return known;
}

template <Element kElement, class Visit>
bool visit_dim(uint32_t dim, uint32_t block_rows, Visit visit) {
  if (block_rows == kPrefillRows) {
    return visit_prefill_dim<kElement>(dim, visit);
  }
  const uint32_t shape = dim * 4 + block_rows / 16;
  if constexpr (!kIsNarrow<kElement>) {
    if (dim == kMlaDim) {
      return visit_mla<kElement>(block_rows, visit);
    }
  }
  if constexpr (!kHasSteps<kElement>) {
    switch (shape) {
      case 80 * 4 + 1:
        visit(typename ShapeOf<kElement, 80, 1>::Type{});
        return true;
      case 80 * 4 + 2:
        visit(typename ShapeOf<kElement, 80, 2>::Type{});
        return true;
      case 96 * 4 + 1:
        visit(typename ShapeOf<kElement, 96, 1>::Type{});
        return true;
      case 96 * 4 + 2:
        visit(typename ShapeOf<kElement, 96, 2>::Type{});
        return true;
      case 192 * 4 + 1:
        visit(typename ShapeOf<kElement, 192, 1>::Type{});
        return true;
      default:
        break;
    }
  }
  switch (shape) {
    case 64 * 4 + 1:
      visit(typename ShapeOf<kElement, 64, 1>::Type{});
      return true;
    case 64 * 4 + 2:
      visit(typename ShapeOf<kElement, 64, 2>::Type{});
      return true;
    case 128 * 4 + 1:
      visit(typename ShapeOf<kElement, 128, 1>::Type{});
      return true;
    case 128 * 4 + 2:
      if constexpr (kIsNarrow<kElement>) {
        return false;
      } else {
        visit(typename ShapeOf<kElement, 128, 2>::Type{});
        return true;
      }
    case 256 * 4 + 1:
      visit(typename ShapeOf<kElement, 256, 1>::Type{});
      return true;
    default:
      return false;
  }
}

template <Element kElementValue>
struct ElementTag {
  static constexpr Element kElement = kElementValue;
};

// Calls visit(ElementTag{}) for pages of the codec; false where no kernel reads them.
template <class Visit>
bool visit_element(CodecId id, Visit visit) {
  if (!is_on_devices(id)) {
    return false;
  }
  if (id == codecs::kI4) {
    visit(ElementTag<Element::kI4>{});
    return true;
  }
  switch (codecs::codec_of(id).elem) {
    case vec::kElemBf16:
      visit(ElementTag<Element::kBf16>{});
      return true;
    case vec::kElemF16:
      visit(ElementTag<Element::kF16>{});
      return true;
    case vec::kElemI8:
      visit(ElementTag<Element::kI8>{});
      return true;
    case vec::kElemF8:
      visit(ElementTag<Element::kF8>{});
      return true;
    default:
      return false;
  }
}

// Calls visit(Shape{}) with the shape for pages of the codec; false where there is none.
template <class Visit>
bool visit_shape(CodecId codec, uint32_t dim, uint32_t block_rows, Visit visit) {
  bool known = false;
  visit_element(codec,
                [&]<class Tag>(Tag) { known = visit_dim<Tag::kElement>(dim, block_rows, visit); });
  return known;
}

}  // namespace kvm::attention::gpu

#endif  // KVM_ATTENTION_CUDA_SHAPES_H_
