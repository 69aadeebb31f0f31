// SPDX-License-Identifier: Apache-2.0
// The encodings of stored K and V: a table of what each one is.
//
// An encoding turns the rows of one head of a page, kPageTokens tokens, into a plane of rows and,
// where it needs them, parameters:
//
//   rows     [kPageTokens][row_bytes(dim)]
//   params   Scaling::kRow   [kPageTokens] bf16: of each row
//            Scaling::kPage  bf16 of the page as a whole: group_params of each row and 64 channels
//                            of it, then channel_params of each channel, for all rows; and, of
//                            codecs/gear.h, indices besides; of codecs/pair.h what PairLayout says
//
// Head h has them at h * head_rows_bytes(dim) and h * head_params_bytes(dim) of planes that hold
// all heads of the page. codecs/rows.h finds rows, codecs/convert.h encodes and decodes them.
//
// Constants only: nobody links code to read the table.
#ifndef KVM_CODECS_CODEC_H_
#define KVM_CODECS_CODEC_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/codec_id.h"
#include "base/dtype.h"
#include "base/limits.h"
#include "base/simd/elem.h"

namespace kvm::codecs {

enum class Scaling : uint8_t { kNone, kRow, kPage };

// A PairSide says which of the two layers that a page of codecs/pair.h holds is read.
enum class PairSide : uint8_t { kNone, kShallow, kDeep };

// What a reader needs to know about an encoding.
struct Codec {
  // What has parameters of its own by token: so many channels.
  static constexpr uint32_t kGroupChannels = 64;

  CodecId id = CodecId::kNone;
  const char* name = "";
  uint8_t elem = 0;  // vec::Elem of its rows, where kernels load them
  Scaling scaling = Scaling::kNone;
  // The codec of pages whose tokens are not all there yet: the id itself where a row can be encoded
  // without its neighbours.
  CodecId tail = CodecId::kNone;
  uint8_t low_bits = 0;  // of an element: 4, 3 or 2; 0: as elem has
  uint8_t group_params = 0;
  uint8_t channel_params = 0;
  uint8_t rank = 0;      // of the low-rank part
  uint8_t outliers = 0;  // pairs (one largest, one smallest) of each channel or token, kept apart
  bool is_balanced = false;  // params of channels are factors of what was encoded
  PairSide side = PairSide::kNone;
  uint8_t pair_kept = 0;  // tokens whose rows of both layers are kept

  // Says whether a row is encoded without its neighbours, and can be read, replaced and found by an
  // index without them. Pages of the others are encoded whole.
  constexpr bool rows_stand_alone() const { return tail == id; }
  // Says whether kernels load its rows as they are. The others are decoded to fp32 on their way.
  constexpr bool has_kernels() const { return scaling != Scaling::kPage; }
  // The elements that kernels meet.
  constexpr uint8_t kernel_elem() const { return has_kernels() ? elem : uint8_t{vec::kElemF32}; }
  // Says whether elements mean nothing without parameters.
  constexpr bool is_scaled() const { return scaling != Scaling::kNone; }
  // Says whether it is one of codecs/low_bits.h.
  constexpr bool is_low_bits() const { return low_bits != 0; }
  // Says whether a row is encoded without its neighbours, though it may lie among them only: rows
  // of such a page may be copied to any slots of another.
  constexpr bool rows_are_own() const {
    return rows_stand_alone() || (is_low_bits() && !is_gear() && channel_params == 0);
  }
  // Says whether it is one of codecs/gear.h.
  constexpr bool is_gear() const { return rank != 0 || outliers != 0; }
  // Says whether it is one of codecs/pair.h.
  constexpr bool is_pair() const { return side != PairSide::kNone; }
  constexpr uint32_t bits() const { return is_low_bits() ? low_bits : 8 * vec::elem_bytes(elem); }
  constexpr uint32_t last_code() const { return (1u << bits()) - 1; }
  constexpr uint32_t n_groups(uint32_t dim) const {
    return (dim + kGroupChannels - 1) / kGroupChannels;
  }

  // One token of one head, without parameters.
  constexpr uint64_t row_bytes(uint32_t dim) const { return uint64_t{dim} * bits() / 8; }
  // One head of one page.
  constexpr uint64_t head_rows_bytes(uint32_t dim) const { return kPageTokens * row_bytes(dim); }
  constexpr uint64_t head_params_bytes(uint32_t dim) const {
    return sizeof(uint16_t) * n_scales(dim);
  }
  // One token of one head with its share of the parameters, rounded up.
  constexpr uint64_t token_bytes(uint32_t dim) const {
    return row_bytes(dim) + (head_params_bytes(dim) + kPageTokens - 1) / kPageTokens;
  }
  // The params of a head.
  constexpr uint32_t n_scales(uint32_t dim) const {
    return scaling == Scaling::kRow
               ? kPageTokens
               : step_params(dim) + rank * (kPageTokens + dim) +
                     outliers * outlier_params() * n_vectors(dim) + pair_params(dim);
  }
  // Those of codecs/pair.h: a factor for each side and token, then which tokens are kept, and the
  // deeper layer's rows of these.
  constexpr uint32_t pair_params(uint32_t dim) const {
    return is_pair() ? 4 * kPageTokens + pair_kept * (1 + dim * bits() / 16) : 0;
  }
  // Those of tokens' groups and of channels, which come first.
  constexpr uint32_t step_params(uint32_t dim) const {
    return kPageTokens * group_params * n_groups(dim) + channel_params * dim;
  }
  // The vectors that have outliers of their own, and the params of a pair of them.
  constexpr uint32_t n_vectors(uint32_t dim) const { return group_params == 0 ? dim : kPageTokens; }
  constexpr uint32_t outlier_params() const { return group_params == 0 ? 3 : 4; }
};

// Ids that nobody but codecs/ speaks of.
inline constexpr CodecId kI8Channel{6};
inline constexpr CodecId kI4{7};
inline constexpr CodecId kI4Channel{8};
inline constexpr CodecId kI4Centred{9};
inline constexpr CodecId kI2{10};
inline constexpr CodecId kI2Channel{11};
inline constexpr CodecId kI2Centred{12};
inline constexpr CodecId kGear4Channel{13};
inline constexpr CodecId kGear4{14};
inline constexpr CodecId kGear2Channel{15};
inline constexpr CodecId kGear2{16};
inline constexpr CodecId kI4Balanced{17};
inline constexpr CodecId kI2Balanced{18};
inline constexpr CodecId kI3{19};
inline constexpr CodecId kI3Channel{20};
inline constexpr CodecId kI3Centred{21};
inline constexpr CodecId kI3Balanced{22};
inline constexpr CodecId kGear3Channel{23};
inline constexpr CodecId kGear3{24};

// By id, from 1 on.
inline constexpr std::array kCodecs = {
    Codec{CodecId::kF32, "fp32", vec::kElemF32, Scaling::kNone, CodecId::kF32},
    Codec{CodecId::kF16, "fp16", vec::kElemF16, Scaling::kNone, CodecId::kF16},
    Codec{CodecId::kBf16, "bf16", vec::kElemBf16, Scaling::kNone, CodecId::kBf16},
    Codec{CodecId::kI8, "int8", vec::kElemI8, Scaling::kRow, CodecId::kI8},
    Codec{CodecId::kF8, "fp8", vec::kElemF8, Scaling::kRow, CodecId::kF8},
    Codec{kI8Channel, "int8_channel", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 0, 0, 1},
    Codec{kI4, "int4", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 4, 2, 0},
    Codec{kI4Channel, "int4_channel", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 4, 0, 2},
    Codec{kI4Centred, "int4_centred", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 4, 2, 1},
    Codec{kI2, "int2", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 2, 2, 0},
    Codec{kI2Channel, "int2_channel", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 2, 0, 2},
    Codec{kI2Centred, "int2_centred", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 2, 2, 1},
    Codec{kGear4Channel, "gear4_channel", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 4, 0, 2, 2,
          1},
    Codec{kGear4, "gear4", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 4, 2, 0, 2, 1},
    Codec{kGear2Channel, "gear2_channel", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 2, 0, 2, 2,
          1},
    Codec{kGear2, "gear2", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 2, 2, 0, 2, 1},
    Codec{kI4Balanced, "int4_balanced", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 4, 2, 1, 0, 0,
          true},
    Codec{kI2Balanced, "int2_balanced", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 2, 2, 1, 0, 0,
          true},
    Codec{kI3, "int3", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 3, 2, 0},
    Codec{kI3Channel, "int3_channel", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 3, 0, 2},
    Codec{kI3Centred, "int3_centred", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 3, 2, 1},
    Codec{kI3Balanced, "int3_balanced", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 3, 2, 1, 0, 0,
          true},
    Codec{kGear3Channel, "gear3_channel", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 3, 0, 2, 2,
          1},
    Codec{kGear3, "gear3", vec::kElemI8, Scaling::kPage, CodecId::kBf16, 3, 2, 0, 2, 1},
};

// A page of two layers is read through a codec of its own for each side: ids from kFirstPair on, of
// rows as fp32, fp16 or bf16, and of 4, 8, ... 60 kept tokens. Nobody outside asks for one by its
// id; pages come to have them (KVM_LAYER_PAIR).
inline constexpr uint32_t kFirstPair = 128;
inline constexpr uint32_t kPairStep = 4;
inline constexpr uint32_t kPairCounts = kPageTokens / kPairStep - 1;

// Says whether rows of this codec can be those of a pair.
constexpr bool can_pair(CodecId rows) {
  return rows == CodecId::kF32 || rows == CodecId::kF16 || rows == CodecId::kBf16;
}

// REQUIRES: can_pair(rows); n_kept is a multiple of kPairStep between 0 and kPageTokens.
constexpr CodecId pair_codec(CodecId rows, PairSide side, uint32_t n_kept) {
  const uint32_t family = 2 * (static_cast<uint32_t>(rows) - 1) + (side == PairSide::kDeep ? 1 : 0);
  return static_cast<CodecId>(kFirstPair + family * kPairCounts + n_kept / kPairStep - 1);
}

namespace internal {
constexpr auto make_pair_codecs() {
  std::array<Codec, 6 * kPairCounts> codecs;
  for (const CodecId rows : {CodecId::kF32, CodecId::kF16, CodecId::kBf16}) {
    for (const PairSide side : {PairSide::kShallow, PairSide::kDeep}) {
      for (uint32_t n_kept = kPairStep; n_kept < kPageTokens; n_kept += kPairStep) {
        const CodecId id = pair_codec(rows, side, n_kept);
        const Codec& own = kCodecs[static_cast<size_t>(rows) - 1];
        Codec& codec = codecs[static_cast<size_t>(id) - kFirstPair];
        codec.id = id;
        codec.name = rows == CodecId::kF32   ? "fp32 pair"
                     : rows == CodecId::kF16 ? "fp16 pair"
                                             : "bf16 pair";
        codec.elem = own.elem;
        codec.scaling = Scaling::kPage;
        codec.tail = rows;
        codec.side = side;
        codec.pair_kept = static_cast<uint8_t>(n_kept);
      }
    }
  }
  return codecs;
}
}  // namespace internal

inline constexpr auto kPairCodecs = internal::make_pair_codecs();
static_assert(kCodecs.size() < kFirstPair && kFirstPair + kPairCodecs.size() <= 256);

// Of those that may be asked for.
constexpr bool codec_is_known(uint32_t value) { return value - 1 < kCodecs.size(); }

// REQUIRES: codec_is_known, or it is of a pair.
constexpr const Codec& codec_of(CodecId id) {
  const auto number = static_cast<size_t>(id);
  return number < kFirstPair ? kCodecs[number - 1] : kPairCodecs[number - kFirstPair];
}

// The codec of the same page that reads the other layer, or this one; others are what they are.
constexpr CodecId seen_from(PairSide side, CodecId id) {
  const Codec& codec = codec_of(id);
  return codec.is_pair() ? pair_codec(codec.tail, side, codec.pair_kept) : id;
}

// The codec of that name; null where there is none.
constexpr const Codec* find_codec(std::string_view name) {
  for (const Codec& codec : kCodecs) {
    if (name == codec.name) {
      return &codec;
    }
  }
  return nullptr;
}

// The codec whose rows are those of a tensor.
constexpr CodecId codec_of_tensor(Dtype dtype) {
  return dtype == Dtype::kF32   ? CodecId::kF32
         : dtype == Dtype::kF16 ? CodecId::kF16
                                : CodecId::kBf16;
}

// A tensor's elements are told to kernels by its dtype.
static_assert(static_cast<uint8_t>(Dtype::kF32) == vec::kElemF32 &&
              static_cast<uint8_t>(Dtype::kF16) == vec::kElemF16 &&
              static_cast<uint8_t>(Dtype::kBf16) == vec::kElemBf16);

namespace internal {
constexpr bool table_is_sound() {
  for (size_t i = 0; i < kCodecs.size(); ++i) {
    if (static_cast<size_t>(kCodecs[i].id) != i + 1 || !codec_of(kCodecs[i].tail).has_kernels() ||
        !codec_of(kCodecs[i].tail).rows_stand_alone()) {
      return false;
    }
  }
  return true;
}
}  // namespace internal
static_assert(internal::table_is_sound());

}  // namespace kvm::codecs

#endif  // KVM_CODECS_CODEC_H_
