// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/cases.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/assert.h"
#include "base/round.h"
#include "base/splitmix.h"
#include "codecs/float8.h"
#include "codecs/int8.h"
#include "codecs/low_bits.h"

namespace kvm::attention::gpu::testing {
namespace {

constexpr uint32_t kSegments = 3;
constexpr uint16_t kNan16 = 0xffff;
// Elements between rows of tensors that no kernel may touch.
constexpr uint32_t kGap = 8;
constexpr uint32_t kGroup = codecs::Codec::kGroupChannels;
// Log weights behind the last list, that none may touch either.
constexpr uint32_t kGuard = 64;

// Random numbers that are functions of what they belong to: no order of drawing to keep.
uint64_t mix(uint64_t seed, uint64_t a, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0) {
  uint64_t x = seed;
  for (const uint64_t word : {a, b, c, d}) {
    x = splitmix64(x + kSplitMixStep * (word + 1));
  }
  return x;
}

// About Gaussian, of unit deviation: the sum of 4 uniform numbers.
float gaussian(uint64_t bits) {
  float sum = 0.0f;
  for (int i = 0; i < 4; ++i) {
    sum += static_cast<float>((bits >> (16 * i)) & 0xffff) / 65535.0f - 0.5f;
  }
  return sum * 1.7320508f;
}

uint16_t narrow(float value, Dtype dtype) {
  return dtype == Dtype::kBf16 ? f32_to_bf16(value) : f32_to_f16(value);
}
float widen(uint16_t bits, Dtype dtype) {
  return dtype == Dtype::kBf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

// The nearest e4m3, and the number that one stands for, as its definition says.
uint16_t to_e4m3(float value) {
  const int exponent = std::max(value == 0 ? -6 : std::ilogb(value), -6);
  const double steps =
      std::nearbyint(std::ldexp(std::fabs(static_cast<double>(value)), 3 - exponent));
  const int code = static_cast<int>(steps) + (exponent + 6) * 8;
  return static_cast<uint16_t>(std::min(code, 0x7e) | (value < 0 ? 0x80 : 0));
}
double from_e4m3(uint16_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double size =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -size : size;
}

float softmax_scale(const CaseSpec& spec) { return 1.0f / std::sqrt(static_cast<float>(spec.dim)); }

enum Stream : uint64_t {
  kKeys = 1,
  kValues,
  kQueries,
  kLogWeights,
  kPages,
  kTree,
  kScales,
  kZeros,
  kSinks,
  kAppends
};

template <class T>
void append_range(std::vector<std::span<uint8_t>>* to, std::vector<T>& of) {
  if (!of.empty()) {
    to->push_back({reinterpret_cast<uint8_t*>(of.data()), of.size() * sizeof(T)});
  }
}

}  // namespace

Bytes::Bytes(size_t size_bytes)
    : data_(static_cast<uint8_t*>(std::aligned_alloc(64, round_up(size_bytes + 1, 64)))),
      size_(size_bytes) {
  std::memset(data_.get(), 0xff, size_);
}

namespace {

// Of the prefill kernel: every shape, and whatever changes a score, a sum or a mask.
template <class Add>
void add_prefills(Add add_case) {
  const auto add = [&add_case](CaseSpec spec) {
    spec.prefill = true;
    spec.name = "prefill" + std::string(spec.name.empty() ? "" : ", ") + spec.name;
    add_case(spec);
  };
  for (const CodecId codec :
       {CodecId::kBf16, CodecId::kF16, CodecId::kI8, CodecId::kF8, codecs::kI4}) {
    const bool scaled = codecs::codec_of(codec).is_scaled();
    for (const uint32_t dim : kHeadDims) {
      if (!is_prefill_on_devices(codec, dim)) {
        continue;
      }
      // Two blocks of rows, the second with three rows; a prompt, and what follows a prefix.
      add({.codec = codec, .dim = dim, .group = 1, .n_query = 131, .lengths = {131, 150}});
      add({.name = "split",
           .codec = codec,
           .dtype_o = Dtype::kBf16,
           .dim = dim,
           .group = 8,
           .n_query = 5,
           .page_tokens = 16,
           .lengths = {520},
           .blocks = 3});
      if (codec == CodecId::kF16 || codec == CodecId::kF8) {
        continue;  // their masks are those of the two others
      }
      add({.name = "windows",
           .codec = codec,
           .dtype_q = Dtype::kF16,
           .dim = dim,
           .group = 3,
           .n_query = 60,
           .layer_window = 90,
           .page_tokens = 24,
           .classes = {{.n_heads = 1}, {.n_heads = 1, .sinks = 5, .window = 33}},
           .lengths = {230},
           .blocks = 2});
    }
    add({.name = "capped, weights, sinks",
         .codec = codec,
         .dtype_o = Dtype::kBf16,
         .dim = 64,
         .group = 4,
         .n_query = 40,
         .classes = {{.n_heads = 1}, {.n_heads = 2, .sinks = 4, .window = 50}},
         .lengths = {300, 40, 75},
         .blocks = 5,
         .weights = Weights::kHidden,
         .softcap = 3.0f,
         .sinks = true,
         .q_size = 4.0f});
    if (!scaled) {
      continue;
    }
    for (const bool uneven : {true, false}) {
      add({.name = uneven ? "uneven" : "values of 2^+-100",
           .codec = codec,
           .dim = uneven ? 256u : 128u,
           .group = 2,
           .n_query = 20,
           .page_tokens = uneven ? 101u : 64u,
           .classes = {{.n_heads = uneven ? 3u : 1u}},
           .lengths = {200, 65},
           .blocks = 2,
           .sinks = true,
           .q_size = 3.0f,
           .uneven = uneven,
           .far = uneven ? 0 : 100});
    }
    for (const uint32_t dim : {64u, 80u, 128u, 256u}) {
      if (codec == codecs::kI4 ? dim != 80 : dim == 80 || dim == 128) {
        add({.name = "not numbers",
             .codec = codec,
             .dim = dim,
             .group = 2,
             .n_query = 70,
             .page_tokens = 1000,
             .classes = {{.n_heads = 2}, {.n_heads = 1, .sinks = 4, .window = 30}},
             .lengths = {152, 70, 105},
             .blocks = 3,
             .not_numbers = true});
      }
    }
    if (codec != codecs::kI4) {
      add({.name = "weights",
           .codec = codec,
           .dim = 80,
           .group = 4,
           .n_query = 40,
           .page_tokens = 33,
           .lengths = {333, 40},
           .weights = Weights::kHidden,
           .uneven = true});
    }
    add({.name = "large queries",
         .codec = codec,
         .group = 1,
         .n_query = 70,
         .lengths = {70},
         .q_size = 1e30f,
         .k_size = 1e-30f});
    for (const uint32_t page : {1u, 3u, 33u}) {
      add({.name = "scales",
           .codec = codec,
           .dim = page == 3 ? 128u : 64u,
           .group = 2,
           .n_query = 9,
           .page_tokens = page,
           .classes = {{.n_heads = 3}},
           .lengths = {90},
           .uneven = true});
    }
  }
  // Rows around the edges of blocks, of warps and of tiles of rows, whatever the group.
  uint32_t dims = 0;
  for (const uint32_t group : {1u, 2u, 5u, 7u, 12u, 16u}) {
    for (const uint32_t rows : {group % 2 == 0 ? 16u : 33u, 129u}) {
      const uint32_t n = (rows + group - 1) / group;
      add({.dim = kHeadDims[dims++ % 4], .group = group, .n_query = n, .lengths = {n, n + 31}});
    }
  }
  // Lengths around the edges of tiles and pages; one token.
  for (const uint32_t length : {1u, 2u, 31u, 32u, 33u, 63u, 64u, 65u, 128u, 129u}) {
    for (const CodecId codec : {CodecId::kF16, codecs::kI4}) {
      add({.codec = codec,
           .dim = length % 2 == 0 ? 128u : 64u,
           .group = 3,
           .n_query = std::min(length, 30u),
           .classes = {{.n_heads = 2}},
           .lengths = {length, length + 64}});
    }
  }
  for (const uint32_t page : {1u, 8u, 100u, 1000u}) {
    for (const uint32_t dim : {80u, 128u}) {
      add({.dim = dim, .group = 4, .n_query = 10, .page_tokens = page, .lengths = {177, 300}});
    }
  }
  // Windows narrower than a tile and wider than the list, alone and with sinks in one run and two;
  // a row's own token alone.
  for (const uint32_t window : {1u, 17u, 64u, 200u}) {
    for (const uint32_t sinks : {0u, 4u, 70u}) {
      add({.name = "classes",
           .dim = sinks == 4 ? 128u : 64u,
           .group = 2,
           .n_query = 80,
           .page_tokens = sinks == 70 ? 64u : 16u,
           .classes = {{.n_heads = 1, .sinks = sinks, .window = window}},
           .lengths = {260, 80},
           .blocks = window == 200 ? 1u : 4u});
    }
    add({.name = "window",
         .dim = 64,
         .group = 1,
         .n_query = 140,
         .layer_window = window,
         .classes = {{.n_heads = 1}, {.n_heads = 1, .sinks = 150, .window = 9}},
         .lengths = {300, 140},
         .blocks = 3});
  }
  // The last row's window begins behind the first token of a tile; the first row of a warp sees the
  // last one of a tile, and no more of it.
  add({.name = "window in a tile",
       .group = 1,
       .n_query = 34,
       .layer_window = 90,
       .lengths = {300}});
  add({.name = "31 sinks",
       .group = 1,
       .n_query = 70,
       .classes = {{.n_heads = 1, .sinks = 31, .window = 100}},
       .lengths = {300}});
  add({.name = "few rows, long context", .group = 4, .n_query = 3, .lengths = {3000}, .blocks = 7});
  // The last tile reaches beyond the weights that there are.
  add({.name = "classes, split, weights",
       .group = 4,
       .n_query = 8,
       .classes = {{.n_heads = 1, .sinks = 128, .window = 900}},
       .lengths = {2040},
       .blocks = 4,
       .weights = Weights::kSome});
  add({.name = "whole and cut",
       .dim = 64,
       .group = 4,
       .n_query = 70,
       .lengths = {1100, 70, 100},
       .blocks = 4});
  add({.name = "fixed",
       .dim = 64,
       .group = 4,
       .n_query = 40,
       .lengths = {500, 90},
       .blocks = 3,
       .fixed_tokens = 64});
  add({.name = "empty", .group = 4, .classes = {{.n_heads = 2}}, .lengths = {0, 5, 0}});
  add({.name = "idle blocks",
       .group = 2,
       .n_query = 10,
       .lengths = {10},
       .blocks = 64,
       .reads_lse = false});
  add({.name = "weights", .n_query = 40, .lengths = {333, 40}, .weights = Weights::kSome});
  add({.name = "peaked", .n_query = 40, .lengths = {400}, .blocks = 2, .q_size = 8.0f});
  add({.name = "flat", .n_query = 40, .lengths = {200}, .q_size = 0.01f});
}

// Plans for sequences that turn out shorter: by nothing, within a tile, to its edges and those of
// pages, by more than a piece, to where one piece is left, to nothing.
template <class Add>
void add_late(Add add_case) {
  const auto add = [&add_case](CaseSpec spec) {
    spec.name = "late" + std::string(spec.name.empty() ? "" : ", ") + spec.name;
    add_case(spec);
  };
  for (const CodecId codec : {CodecId::kBf16, CodecId::kF8, codecs::kI4}) {
    const uint32_t dim = codec == CodecId::kF8 ? 64 : 128;
    add({.codec = codec,
         .dim = dim,
         .group = 8,
         .page_tokens = 16,
         .lengths = {1000, 64, 63, 65, 1, 400},
         .missing = {0, 1, 130, 16, 7, 600},
         .blocks = 3});
    add({.name = "causal, sinks",
         .codec = codec,
         .dtype_o = Dtype::kBf16,
         .dim = dim,
         .n_query = 4,
         .classes = {{.n_heads = 2}},
         .lengths = {200, 4, 64, 70},
         .missing = {60, 150, 0, 1},
         .blocks = 3,
         .sinks = true});
    add({.name = "tree, fixed pieces",
         .codec = codec,
         .dim = dim,
         .group = 2,
         .n_query = 16,
         .lengths = {128, 129, 16, 64},
         .missing = {70, 63, 200, 0},
         .fixed_tokens = 64,
         .tree = true,
         .sinks = true});
    add({.name = "classes",
         .codec = codec,
         .dim = dim,
         .group = 3,
         .n_query = 5,
         .page_tokens = 24,
         .classes = {{.n_heads = 1}, {.n_heads = 2, .sinks = 7, .window = 60}},
         .lengths = {300, 58, 70, 5},
         .missing = {40, 30, 1, 90},
         .blocks = 5,
         .weights = Weights::kHidden});
  }
  // One row of an item is a request by itself where its window moves; a window that leaves sinks
  // behind shows a shorter list more of them, up to a length between the two.
  for (const uint32_t window : {1u, 40u, 64u}) {
    add({.name = "window",
         .dim = 64,
         .n_query = window == 40 ? 1u : 6u,
         .layer_window = window,
         .classes = {{.n_heads = 1}, {.n_heads = 1, .sinks = 150, .window = 9}},
         .lengths = {300, 90, 20, 64},
         .missing = {70, 3, 35, 0},
         .blocks = 4,
         .sinks = true});
  }
  for (const bool tree : {false, true}) {
    add({.name = tree ? "tree over sinks and a window" : "sinks and a window",
         .dim = 64,
         .group = 2,
         .n_query = 7,
         .layer_window = 90,
         .page_tokens = 16,
         .classes = {{.n_heads = 2, .sinks = 50, .window = 30}},
         .lengths = {100, 75, 95, 130},
         .missing = {60, 25, 30, 100},
         .blocks = 3,
         .weights = Weights::kSome,
         .tree = tree});
  }
  add({.name = "long, fixed pieces",
       .group = 4,
       .n_query = 2,
       .lengths = {511, 512, 513, 64, 65},
       .missing = {129, 128, 127, 449, 448},
       .blocks = 7,
       .fixed_tokens = 64,
       .sinks = true});
  add({.name = "rows past a block",
       .group = 5,
       .n_query = 7,
       .classes = {{.n_heads = 1}, {.n_heads = 1, .window = 33}},
       .lengths = {150, 64},
       .missing = {20, 64},
       .blocks = 4,
       .fixed_tokens = 64});
  // More pieces than threads.
  add({.name = "many",
       .dim = 64,
       .group = 2,
       .classes = {{.n_heads = 17}},
       .lengths = std::vector<uint32_t>(20, 9),
       .missing = std::vector<uint32_t>(20, 5),
       .blocks = 3});
  add({.name = "nothing left", .lengths = {0, 0, 5}, .missing = {0, 300, 20}, .blocks = 2});
  add({.name = "nothing left, sinks",
       .lengths = {0, 0, 5},
       .missing = {0, 700, 20},
       .blocks = 6,
       .sinks = true});
  for (const CodecId codec : {CodecId::kF16, CodecId::kI8, codecs::kI4}) {
    add({.name = "prefill",
         .codec = codec,
         .dim = 64,
         .group = 1,
         .n_query = 131,
         .prefill = true,
         .lengths = {131, 150, 200},
         .missing = {64, 0, 31}});
    add({.name = "prefill, split, sinks",
         .codec = codec,
         .group = 8,
         .n_query = 5,
         .prefill = true,
         .page_tokens = 16,
         .lengths = {520, 64, 30},
         .missing = {600, 1, 800},
         .blocks = 7,
         .sinks = true});
    add({.name = "prefill, windows, weights",
         .codec = codec,
         .dim = 64,
         .group = 3,
         .n_query = 60,
         .prefill = true,
         .layer_window = 90,
         .page_tokens = 24,
         .classes = {{.n_heads = 1}, {.n_heads = 1, .sinks = 50, .window = 33}},
         .lengths = {230, 70, 100},
         .missing = {40, 80, 5},
         .blocks = 2,
         .weights = Weights::kSome});
  }
  add({.name = "prefill, fixed",
       .dim = 64,
       .group = 4,
       .n_query = 40,
       .prefill = true,
       .classes = {{.n_heads = 1, .sinks = 4, .window = 128}},
       .lengths = {500, 90},
       .missing = {77, 320},
       .blocks = 3,
       .fixed_tokens = 64});
  add({.name = "mla",
       .dim = kMlaDim,
       .group = 16,
       .n_query = 4,
       .lengths = {200, 67, 4, 32},
       .missing = {90, 64, 120, 0},
       .blocks = 3,
       .sinks = true});
  add({.name = "mla, tree over a window",
       .dim = kMlaDim,
       .group = 4,
       .n_query = 4,
       .classes = {{.n_heads = 2}, {.n_heads = 1, .sinks = 3, .window = 70}},
       .lengths = {210, 60, 80},
       .missing = {9, 50, 33},
       .blocks = 3,
       .tree = true});
}

// Plans with a tail, of the decode kernel: every shape's; pieces cut off items and short items
// whole; what is masked at the end of items; pieces that a shorter sequence leaves empty.
template <class Add>
void add_tails(Add add_case) {
  const auto add = [&add_case](CaseSpec spec) {
    spec.name = "tail" + std::string(spec.name.empty() ? "" : ", ") + spec.name;
    spec.tail_part = spec.tail_part == 0 ? 4 : spec.tail_part;
    add_case(spec);
  };
  for (const CodecId codec :
       {CodecId::kBf16, CodecId::kF16, CodecId::kI8, CodecId::kF8, codecs::kI4}) {
    for (const uint32_t dim : kHeadDims) {
      if (is_head_dim_on_devices(codec, dim)) {
        add({.codec = codec,
             .dim = dim,
             .group = dim == 128 ? 5u : 2u,
             .n_query = dim == 128 ? 4u : 1u,
             .page_tokens = dim == 64 ? 16u : 64u,
             .lengths = {700, 64, 300},
             .blocks = 3});
      }
    }
  }
  add({.name = "short items", .dim = 64, .lengths = std::vector<uint32_t>(24, 70), .blocks = 3});
  add({.name = "short items, sinks",
       .dim = 64,
       .classes = {{.n_heads = 3}},
       .lengths = {10, 33, 64, 100, 1, 65, 90, 127, 12},
       .blocks = 4,
       .tail_part = 2,
       .sinks = true});
  add({.name = "one block", .dim = 64, .lengths = {1024}, .blocks = 1});
  add({.name = "many blocks", .dim = 64, .lengths = {1300, 800}, .blocks = 9, .tail_part = 3});
  add({.name = "long pieces",
       .dim = 64,
       .lengths = {1500},
       .blocks = 2,
       .tail_part = 3,
       .least_tail_tokens = 192});
  add({.name = "causal, capped, sinks",
       .n_query = 4,
       .lengths = {500, 301},
       .blocks = 3,
       .softcap = 3.0f,
       .sinks = true});
  add({.name = "tree, weights",
       .codec = CodecId::kI8,
       .group = 2,
       .n_query = 8,
       .page_tokens = 24,
       .classes = {{.n_heads = 2}},
       .lengths = {400, 333},
       .blocks = 3,
       .weights = Weights::kHidden,
       .tree = true});
  add({.name = "classes",
       .dim = 64,
       .group = 3,
       .page_tokens = 48,
       .classes = {{.n_heads = 1}, {.n_heads = 2, .sinks = 7, .window = 200}},
       .lengths = {600, 250},
       .blocks = 4});
  add({.name = "rows past a block", .group = 5, .n_query = 7, .lengths = {450}, .blocks = 3});
  // Heads of a request give the same pieces where they are an eighth of the blocks at most.
  add({.name = "heads alike",
       .dim = 64,
       .classes = {{.n_heads = 3}},
       .lengths = {1500, 90, 700, 70, 400},
       .blocks = 24,
       .tail_part = 3,
       .sinks = true});
  add({.name = "heads alike, rows past a block",
       .dim = 64,
       .group = 5,
       .n_query = 7,
       .page_tokens = 48,
       .classes = {{.n_heads = 1}, {.n_heads = 1, .sinks = 7, .window = 200}},
       .lengths = {900, 640},
       .blocks = 32});
  for (const bool whole : {false, true}) {
    add({.name = whole ? "fixed pieces, whole items" : "fixed pieces",
         .dim = 64,
         .n_query = 2,
         .lengths =
             whole ? std::vector<uint32_t>{63, 64, 65, 50, 60, 20} : std::vector<uint32_t>{650},
         .blocks = 3,
         .fixed_tokens = 64,
         .tail_part = 2,
         .sinks = true});
  }
  add({.name = "late",
       .dim = 64,
       .n_query = 2,
       .lengths = {640, 100, 64, 200},
       .missing = {300, 500, 1, 0},
       .blocks = 3,
       .sinks = true});
  add({.name = "late, fixed pieces",
       .dim = 64,
       .lengths = {300, 65, 130},
       .missing = {340, 63, 0},
       .blocks = 4,
       .fixed_tokens = 64,
       .tail_part = 2});
}

}  // namespace

std::vector<CaseSpec> all_cases() {
  std::vector<CaseSpec> cases;
  const auto add = [&cases](CaseSpec spec) {
    spec.name = std::to_string(cases.size()) + " " + codecs::codec_of(spec.codec).name + " d" +
                std::to_string(spec.dim) + " g" + std::to_string(spec.group) + " nq" +
                std::to_string(spec.n_query) + " page" + std::to_string(spec.page_tokens) +
                (spec.name.empty() ? "" : " " + spec.name);
    cases.push_back(std::move(spec));
  };
  // Every shape, lengths around the edges of tiles, pages and stages.
  for (const CodecId codec : {CodecId::kBf16, CodecId::kF16}) {
    for (const uint32_t dim : kHeadDims) {
      add({.codec = codec, .dim = dim, .group = 4, .lengths = {1, 16, 17, 63, 64, 65}});
      add({.name = "split",
           .codec = codec,
           .dim = dim,
           .group = 8,
           .page_tokens = 16,
           .lengths = {1000},
           .blocks = 3});
      add({.name = "causal",
           .codec = codec,
           .dim = dim,
           .group = 4,
           .n_query = 4,
           .lengths = {200, 37},
           .blocks = 2});
      add({.name = "32 rows",
           .codec = codec,
           .dim = dim,
           .group = 8,
           .n_query = 4,
           .lengths = {130},
           .blocks = 2});
    }
  }
  // Groups, with a result in each type.
  const Dtype out[] = {Dtype::kF32, Dtype::kBf16, Dtype::kF16};
  uint32_t turn = 0;
  for (const uint32_t group : {1u, 2u, 3u, 5u, 7u, 12u, 16u}) {
    add({.dtype_o = out[turn++ % 3],
         .dim = 128,
         .group = group,
         .classes = {{.n_heads = 2}},
         .lengths = {150}});
  }
  // Pages of any size, full and not.
  for (const uint32_t page : {1u, 2u, 8u, 16u, 24u, 32u, 100u, 128u, 1000u}) {
    add({.dim = page % 3 == 0 ? 128u : 64u,
         .group = 4,
         .page_tokens = page,
         .lengths = {page * 2, 177, 300}});
  }
  for (const uint32_t dim : {80u, 96u, 192u}) {
    for (const uint32_t page : {1u, 24u, 100u, 1000u}) {
      add({.codec = page == 24 ? CodecId::kF16 : CodecId::kBf16,
           .dim = dim,
           .group = 4,
           .page_tokens = page,
           .classes = {{.n_heads = 2}, {.n_heads = 1, .sinks = 3, .window = 90}},
           .lengths = {page * 2, 177, 300}});
    }
  }
  // Tiles across the edges of pages, within one, and with both runs of a request in one page.
  add({.name = "runs in a page",
       .classes = {{.n_heads = 2, .sinks = 4, .window = 100}},
       .lengths = {150, 131}});
  add({.name = "runs in a page",
       .dim = 64,
       .page_tokens = 1000,
       .classes = {{.n_heads = 1}, {.n_heads = 1, .sinks = 21, .window = 77}},
       .lengths = {300, 105}});
  add({.name = "split inside pages", .page_tokens = 48, .lengths = {500}, .blocks = 3});
  // Head classes: heads that keep everything beside heads that keep sinks and a window.
  add({.name = "classes",
       .group = 4,
       .classes = {{.n_heads = 1}, {.n_heads = 2, .sinks = 4, .window = 100}},
       .lengths = {500, 90},
       .blocks = 3});
  add({.name = "classes",
       .group = 2,
       .n_query = 1,
       .page_tokens = 16,
       .classes = {{.n_heads = 2, .sinks = 16, .window = 64},
                   {.n_heads = 1},
                   {.n_heads = 1, .sinks = 0, .window = 33}},
       .lengths = {257},
       .blocks = 5});
  // Log weights.
  add({.name = "weights", .lengths = {333, 20}, .weights = Weights::kSome});
  add({.name = "weights split",
       .dim = 64,
       .page_tokens = 16,
       .lengths = {700},
       .blocks = 4,
       .weights = Weights::kSome});
  add({.name = "hidden",
       .dim = 128,
       .group = 3,
       .classes = {{.n_heads = 2}},
       .lengths = {200},
       .weights = Weights::kHidden});
  // Peaked rows move the maximum often; flat ones never underflow.
  add({.name = "peaked", .lengths = {400}, .blocks = 2, .q_size = 8.0f});
  add({.name = "peaked", .codec = CodecId::kF16, .dim = 64, .lengths = {400}, .q_size = 20.0f});
  add({.name = "flat", .lengths = {400}, .q_size = 0.01f});
  // Empty requests, many small ones, a skewed batch, more blocks than work.
  add({.name = "empty", .group = 4, .classes = {{.n_heads = 2}}, .lengths = {0, 5, 0}});
  add({.name = "small",
       .dim = 64,
       .classes = {{.n_heads = 2}},
       .lengths = {3, 9, 30, 31, 32, 33, 34, 64, 2, 1},
       .blocks = 3});
  add({.name = "skewed", .dim = 64, .lengths = {1500, 20, 40, 60}, .blocks = 6});
  add({.name = "idle blocks", .lengths = {10}, .blocks = 64, .reads_lse = false});
  // Fixed pieces.
  add({.name = "fixed", .lengths = {600, 100}, .blocks = 3, .fixed_tokens = 128});
  add({.name = "fixed",
       .dim = 64,
       .group = 8,
       .n_query = 3,
       .lengths = {511},
       .blocks = 7,
       .fixed_tokens = 64});
  // Several blocks of rows: 16 x 8 = 128 rows.
  add({.name = "128 rows", .dim = 64, .group = 16, .n_query = 8, .lengths = {100}, .blocks = 2});
  add({.name = "rows past a block", .group = 5, .n_query = 7, .lengths = {150}, .blocks = 2});
  // Trees: every shape, with lengths that put the tree across tiles, pages and pieces; a sequence
  // that is all tree; the widest one.
  for (const CodecId codec : {CodecId::kBf16, CodecId::kF16}) {
    for (const uint32_t dim : kHeadDims) {
      add({.name = "tree",
           .codec = codec,
           .dim = dim,
           .group = 4,
           .n_query = 4,
           .lengths = {200, 35, 4},
           .blocks = 2,
           .tree = true});
      add({.name = "tree, 32 rows",
           .codec = codec,
           .dim = dim,
           .group = 2,
           .n_query = 16,
           .page_tokens = 16,
           .lengths = {140, 16},
           .blocks = 3,
           .tree = true});
    }
  }
  add({.name = "tree of 64", .dim = 64, .group = 1, .n_query = 64, .lengths = {150}, .tree = true});
  add({.name = "tree, fixed pieces",
       .group = 3,
       .n_query = 40,
       .lengths = {300, 70},
       .blocks = 3,
       .fixed_tokens = 64,
       .tree = true});
  add({.name = "tree, classes and weights",
       .dim = 64,
       .group = 2,
       .n_query = 10,
       .page_tokens = 16,
       .classes = {{.n_heads = 1}, {.n_heads = 2, .sinks = 7, .window = 45}},
       .lengths = {130, 12},
       .blocks = 3,
       .weights = Weights::kSome,
       .tree = true});
  // Soft caps: every shape; logits far beyond the cap, and far below.
  for (const CodecId codec : {CodecId::kBf16, CodecId::kF16}) {
    for (const uint32_t dim : kHeadDims) {
      for (const uint32_t group : {4u, 8u}) {
        add({.name = "capped",
             .codec = codec,
             .dim = dim,
             .group = group,
             .n_query = 3,
             .lengths = {170},
             .softcap = 2.0f,
             .q_size = 4.0f});
      }
    }
  }
  // Sinks: every shape, whole and in pieces; rows that see nothing else; beside everything else
  // that changes a sum.
  for (const CodecId codec :
       {CodecId::kBf16, CodecId::kF16, CodecId::kI8, CodecId::kF8, codecs::kI4}) {
    for (const uint32_t dim : kHeadDims) {
      if (!is_head_dim_on_devices(codec, dim)) {
        continue;
      }
      add({.name = "sinks",
           .codec = codec,
           .dim = dim,
           .group = 8,
           .n_query = dim > 128 ? 1u : 4u,
           .lengths = {dim > 128 ? 0u : 4u, 70, 330},
           .blocks = 3,
           .sinks = true});
    }
    add({.name = "sinks, classes, weights, capped",
         .codec = codec,
         .dtype_o = Dtype::kBf16,
         .group = 3,
         .classes = {{.n_heads = 1}, {.n_heads = 2, .sinks = 4, .window = 100}},
         .lengths = {500, 90, 0, 3},
         .blocks = 5,
         .weights = Weights::kHidden,
         .softcap = 3.0f,
         .sinks = true});
    add({.name = "sinks, tree, fixed pieces",
         .codec = codec,
         .dim = 64,
         .group = 5,
         .n_query = 6,
         .lengths = {300, 6},
         .fixed_tokens = 64,
         .tree = true,
         .sinks = true});
    if (codecs::codec_of(codec).is_scaled()) {
      add({.name = "sinks, values of 2^+-100",
           .codec = codec,
           .lengths = {700, 64},
           .blocks = 2,
           .sinks = true,
           .far = 100});
      add({.name = "sinks, not numbers",
           .codec = codec,
           .lengths = {49, 105},
           .blocks = 2,
           .sinks = true,
           .not_numbers = true});
    }
  }
  add({.name = "capped hard", .lengths = {90, 0}, .softcap = 1e-3f, .q_size = 10.0f});
  add({.name = "capped high", .lengths = {90}, .softcap = 50.0f, .q_size = 20.0f});
  add({.name = "capped, tree, weights",
       .dim = 64,
       .group = 2,
       .n_query = 8,
       .lengths = {100},
       .blocks = 2,
       .weights = Weights::kHidden,
       .tree = true,
       .softcap = 3.0f,
       .q_size = 6.0f});
  // Narrow rows: every shape, with lengths, splits, several queries, trees and caps; scales of
  // keys and queries that fp16 does not have; values of very different sizes.
  for (const CodecId codec : {CodecId::kI8, CodecId::kF8, codecs::kI4}) {
    const Dtype dtype_q = codec == CodecId::kI8 ? Dtype::kBf16 : Dtype::kF16;
    for (const uint32_t dim : kHeadDims) {
      if (!is_head_dim_on_devices(codec, dim)) {
        continue;
      }
      add({.codec = codec,
           .dim = dim,
           .group = 4,
           .classes = {{.n_heads = 2}},
           .lengths = {1, 16, 17, 63, 64, 65}});
      add({.name = "split",
           .codec = codec,
           .dtype_q = dtype_q,
           .dim = dim,
           .group = 8,
           .page_tokens = 16,
           .lengths = {1900},
           .blocks = 3});
      add({.name = "32 rows",
           .codec = codec,
           .dtype_q = dtype_q,
           .dtype_o = Dtype::kBf16,
           .dim = dim,
           .group = 8,
           .n_query = 4,
           .page_tokens = 24,
           .lengths = {530, 41},
           .blocks = 2});
      add({.name = "uneven",
           .codec = codec,
           .dim = dim,
           .group = 3,
           .lengths = {700, 30},
           .blocks = 2,
           .q_size = 3.0f,
           .uneven = true});
      add({.name = "tree",
           .codec = codec,
           .dtype_q = dtype_q,
           .dim = dim,
           .group = 4,
           .n_query = 7,
           .lengths = {200, 35, 7},
           .blocks = 2,
           .tree = true});
    }
    add({.name = "large queries",
         .codec = codec,
         .lengths = {300},
         .q_size = 1e30f,
         .k_size = 1e-30f});
    add({.name = "small queries",
         .codec = codec,
         .dim = 64,
         .lengths = {300},
         .q_size = 1e-25f,
         .k_size = 1e25f});
    add({.name = "classes, weights, capped",
         .codec = codec,
         .group = 2,
         .page_tokens = 1,
         .classes = {{.n_heads = 1}, {.n_heads = 2, .sinks = 4, .window = 100}},
         .lengths = {300, 90, 0},
         .blocks = 3,
         .weights = Weights::kHidden,
         .softcap = 3.0f,
         .q_size = 4.0f});
    for (const int far : {60, 100}) {
      add({.name = "values of 2^+-" + std::to_string(far),
           .codec = codec,
           .group = 3,
           .lengths = {700, 64, 65},
           .blocks = 2,
           .far = far});
    }
    add({.name = "not numbers",
         .codec = codec,
         .group = 2,
         .n_query = 8,
         .page_tokens = 1000,
         .classes = {{.n_heads = 2}, {.n_heads = 1, .sinks = 4, .window = 30}},
         .lengths = {152, 53, 103, 49},
         .blocks = 3,
         .not_numbers = true});
    add({.name = "not numbers, tree, capped",
         .codec = codec,
         .dim = 64,
         .group = 2,
         .n_query = 16,
         .lengths = {110, 60, 205},
         .blocks = 2,
         .tree = true,
         .softcap = 3.0f,
         .not_numbers = true});
    add({.name = "64 queries", .codec = codec, .group = 1, .n_query = 64, .lengths = {150, 64}});
    add({.name = "nothing seen",
         .codec = codec,
         .classes = {{.n_heads = 2}, {.n_heads = 1, .sinks = 4, .window = 100}},
         .lengths = {1, 2, 3, 0},
         .weights = Weights::kHidden});
    add({.name = "peaked", .codec = codec, .lengths = {900}, .blocks = 2, .q_size = 10.0f});
    // Scales lie two in a word: planes, heads, pages and windows that begin in the middle of one.
    for (const uint32_t page : {1u, 3u, 16u, 33u, 48u, 101u, 1000u}) {
      add({.name = "scales",
           .codec = codec,
           .dim = page % 3 == 0   ? 128u
                  : page % 2 == 0 ? 64u
                                  : 256u,
           .page_tokens = page,
           .classes = {{.n_heads = 3}},
           .lengths = {page % 100 * 2, 177},
           .uneven = true});
    }
    for (const uint32_t dim : {80u, 96u, 192u}) {
      for (const uint32_t page : {1u, 24u, 1000u}) {
        if (codec != codecs::kI4) {
          add({.name = "uneven",
               .codec = codec,
               .dim = dim,
               .page_tokens = page,
               .classes = {{.n_heads = 2}, {.n_heads = 1, .sinks = 3, .window = 90}},
               .lengths = {page * 2, 177, 300},
               .uneven = true});
        }
      }
    }
    for (const uint32_t window : {40u, 77u}) {
      add({.name = "scales of windows",
           .codec = codec,
           .dim = window == 40 ? 64u : 128u,
           .page_tokens = 64,
           .classes = {{.n_heads = 1, .sinks = 5, .window = window},
                       {.n_heads = 2, .sinks = 4, .window = window + 60}},
           .lengths = {333, 150, 95},
           .blocks = 2,
           .uneven = true});
    }
    add({.name = "capped inside pages",
         .codec = codec,
         .group = 8,
         .lengths = {330},
         .softcap = 2.0f,
         .q_size = 4.0f});
  }
  add_prefills(add);
  add_late(add);
  add_tails(add);
  // Latent rows: every shape, lengths around the edges of tiles, pages and stages; blocks of rows
  // that are full, and the last one that is not; groups of q heads that fill blocks and parts.
  for (const CodecId codec : {CodecId::kBf16, CodecId::kF16}) {
    const auto add_mla = [&add, codec](CaseSpec spec) {
      spec.codec = codec;
      spec.dim = kMlaDim;
      spec.name = "mla " + spec.name;
      add(std::move(spec));
    };
    for (const uint32_t group : {8u, 32u, 64u}) {
      add_mla({.group = group, .lengths = {1, 15, 16, 17, 31, 32, 33, 63, 64, 65}});
      add_mla({.name = "split", .group = group, .lengths = {700}, .blocks = 3});
    }
    add_mla({.name = "stages", .dtype_o = Dtype::kBf16, .group = 16, .lengths = {400, 80}});
    add_mla({.name = "stages", .group = 64, .lengths = {330}, .blocks = 1});
    add_mla({.name = "two blocks of rows",
             .dtype_o = Dtype::kF16,
             .group = 128,
             .lengths = {150, 33},
             .blocks = 3});
    add_mla({.name = "rows past a block", .group = 12, .n_query = 7, .lengths = {140, 7}});
    add_mla({.name = "causal", .group = 8, .n_query = 2, .lengths = {97, 2}, .blocks = 2});
    // The first token that not all rows see is the last one of a tile.
    add_mla({.name = "causal", .group = 16, .n_query = 2, .lengths = {200, 64}, .blocks = 2});
    add_mla({.name = "causal", .group = 16, .n_query = 4, .lengths = {200, 66}, .blocks = 3});
    add_mla({.name = "tree",
             .group = 16,
             .n_query = 4,
             .lengths = {200, 67, 4},
             .blocks = 2,
             .tree = true});
    add_mla({.name = "tree of 16, sinks",
             .group = 8,
             .n_query = 16,
             .lengths = {90},
             .blocks = 2,
             .tree = true,
             .sinks = true});
    add_mla({.name = "tree of 64", .group = 1, .n_query = 64, .lengths = {150}, .tree = true});
    add_mla({.name = "tree over a window",
             .group = 4,
             .n_query = 4,
             .classes = {{.n_heads = 2}, {.n_heads = 1, .sinks = 3, .window = 70}},
             .lengths = {210, 90},
             .blocks = 3,
             .tree = true});
    add_mla({.name = "capped", .group = 16, .lengths = {130}, .softcap = 2.0f, .q_size = 4.0f});
    add_mla({.name = "capped, weights, sinks",
             .group = 40,
             .lengths = {170, 20},
             .blocks = 3,
             .weights = Weights::kSome,
             .softcap = 5.0f,
             .sinks = true});
    add_mla({.name = "weights",
             .group = 16,
             .page_tokens = 16,
             .classes = {{.n_heads = 2}, {.n_heads = 1, .sinks = 16, .window = 33}},
             .lengths = {150, 33},
             .blocks = 2,
             .weights = Weights::kSome});
    add_mla({.name = "hidden", .group = 64, .lengths = {100}, .weights = Weights::kHidden});
    add_mla({.name = "sinks", .group = 64, .lengths = {0, 90, 1}, .blocks = 2, .sinks = true});
    add_mla({.name = "empty", .group = 32, .lengths = {0, 5, 0}, .reads_lse = false});
    add_mla({.name = "small", .group = 16, .lengths = {3, 9, 17, 40, 2}, .blocks = 2});
    add_mla({.name = "peaked", .group = 64, .lengths = {300}, .blocks = 2, .q_size = 8.0f});
    add_mla({.name = "fixed", .group = 64, .lengths = {400, 90}, .blocks = 3, .fixed_tokens = 128});
    for (const uint32_t page : {1u, 24u, 1000u}) {
      add_mla({.group = page == 1 ? 64u : 8u,
               .page_tokens = page,
               .classes = {{.n_heads = 2}},
               .lengths = {page % 100 * 2, 107}});
    }
  }
  return cases;
}

uint32_t CaseSpec::block_rows() const {
  return prefill ? kPrefillRows : block_rows_for(codec, dim, n_query * group);
}

Case::Case(const CaseSpec& spec, uint64_t seed) : spec_(spec), seed_(seed) {
  const uint64_t plane_row = codecs::codec_of(spec_.codec).row_bytes(spec_.dim);
  // kv heads of the layer are dealt to the classes in an order that is not theirs.
  for (const ClassSpec& of : spec_.classes) {
    n_kv_heads_ += of.n_heads;
  }
  heads.resize(n_kv_heads_);
  std::iota(heads.begin(), heads.end(), uint16_t{0});
  std::reverse(heads.begin(), heads.end());
  uint64_t largest_page = 0;
  uint32_t heads_first = 0;
  for (const ClassSpec& of : spec_.classes) {
    PageClass lies;
    lies.head_stride_bytes = static_cast<uint32_t>(spec_.page_tokens * plane_row);
    const uint64_t plane_bytes = uint64_t{of.n_heads} * lies.head_stride_bytes;
    lies.v_offset_bytes = spec_.v_in_k() ? 0 : plane_bytes;
    lies.page_bytes = plane_bytes + lies.v_offset_bytes;
    if (codecs::codec_of(spec_.codec).is_scaled()) {
      lies.scales_offset_bytes = static_cast<uint32_t>(lies.page_bytes);
      lies.v_scales_offset_bytes =
          of.n_heads * spec_.page_tokens * row_params_bytes(spec_.codec, spec_.dim);
      lies.page_bytes += round_up(2 * lies.v_scales_offset_bytes, 16);
    }
    lies.heads_first = heads_first;
    lies.n_heads = of.n_heads;
    heads_first += of.n_heads;
    largest_page = std::max(largest_page, lies.page_bytes);
    classes.push_back(lies);
  }
  // Pages of every class have the size of the largest, here: one order for all.
  uint64_t n_pages = 0;
  for (const uint32_t length : spec_.lengths) {
    n_pages += (div_up(length, spec_.page_tokens) + 2) * spec_.classes.size();
  }
  const uint64_t per_segment = div_up(n_pages + 3, kSegments);
  for (uint32_t i = 0; i < kSegments; ++i) {
    segments.emplace_back(2 * per_segment * largest_page);
  }
  for (uint32_t i = 0; i < kSegments * per_segment; ++i) {
    page_order_.push_back(static_cast<uint32_t>(i / per_segment) << kEntrySlotBits |
                          static_cast<uint32_t>(i % per_segment));
  }
  std::sort(page_order_.begin(), page_order_.end(), [this](uint32_t a, uint32_t b) {
    return mix(seed_, kPages, a) < mix(seed_, kPages, b);
  });
  // A page holds two layers; this one is the second where the class is an even one.
  for (size_t c = 0; c < classes.size(); ++c) {
    classes[c].page_bytes = 2 * largest_page;
    classes[c].layer_offset_bytes = static_cast<uint32_t>(c % 2 == 0 ? largest_page : 0);
  }

  if (spec_.is_late()) {
    for (uint32_t s = 0; s < spec_.lengths.size(); ++s) {
      max_pages_ =
          std::max(max_pages_, static_cast<uint32_t>(div_up(planned(s), spec_.page_tokens)) + 1);
    }
    page_table.assign(spec_.lengths.size() * classes.size() * max_pages_, UINT32_MAX);
    tell_lengths();
  }
  uint64_t free_page = 0;
  for (uint32_t s = 0; s < spec_.lengths.size(); ++s) {
    for (uint32_t c = 0; c < spec_.classes.size(); ++c) {
      place(s, c, &free_page);
    }
  }
  KVM_ASSERT(free_page <= page_order_.size());
  log_weights.resize(log_weights.size() + kGuard, std::numeric_limits<float>::quiet_NaN());

  n_tokens_q_ = static_cast<uint32_t>(spec_.lengths.size()) * spec_.n_query;
  const uint32_t q_heads = n_kv_heads_ * spec_.group;
  const uint64_t stride = spec_.dim + kGap;
  q = Bytes(n_tokens_q_ * q_heads * stride * 2);
  for (uint32_t token = 0; token < n_tokens_q_; ++token) {
    for (uint32_t head = 0; head < q_heads; ++head) {
      auto* row = reinterpret_cast<uint16_t*>(q.data()) + (token * q_heads + head) * stride;
      for (uint32_t i = 0; i < spec_.dim; ++i) {
        row[i] = narrow(spec_.q_size * gaussian(mix(seed_, kQueries, token, head, i)),
                        spec_.query_dtype());
      }
    }
  }
  if (spec_.tree) {
    const uint64_t every = spec_.n_query == 64 ? ~uint64_t{0} : (uint64_t{1} << spec_.n_query) - 1;
    for (uint32_t token = 0; token < n_tokens_q_; ++token) {
      // The first row sees none of the tree, itself neither.
      tree_mask.push_back(token % spec_.n_query == 0 ? 0 : mix(seed_, kTree, token) & every);
    }
  }
  for (uint32_t head = 0; spec_.sinks && head < q_heads; ++head) {
    // Some count for nothing, some for more than all tokens.
    const uint64_t bits = mix(seed_, kSinks, head);
    sink_logits.push_back(head % 4 == 2 ? -std::numeric_limits<float>::infinity()
                                        : 3.0f * gaussian(bits) + (head % 4 == 1 ? 12.0f : 0.0f));
  }
  o = Bytes(uint64_t{n_tokens_q_} * q_heads * (spec_.dim_v() + kGap) *
            dtype_size_bytes(spec_.dtype_o));
  lse.resize(n_tokens_q_ * q_heads);
}

bool Case::keeps(const ClassSpec& of, uint32_t length, uint32_t position) const {
  const uint32_t more = spec_.windows_move() ? spec_.n_query - 1 : 0;  // what the first row sees
  return (of.window == 0 || position < of.sinks || position + of.window + more >= length) &&
         (spec_.layer_window == 0 || position + spec_.layer_window + more >= length);
}

// The last n_query tokens of a sequence are those of the queries.
bool Case::sees(const ClassSpec& of, uint32_t query_token, uint32_t length,
                uint32_t position) const {
  const uint32_t row = query_token % spec_.n_query;
  const uint32_t first = length - std::min(length, spec_.n_query);
  const uint32_t own = first + row;
  if (spec_.windows_move() &&
      ((spec_.layer_window != 0 && position + spec_.layer_window <= own) ||
       (of.window != 0 && position >= of.sinks && position + of.window <= own))) {
    return false;
  }
  return position < first ||
         (spec_.tree ? (tree_mask[query_token] >> (position - first) & 1) != 0 : position <= own);
}

uint16_t Case::stored(uint32_t sequence, uint32_t kv_head, uint32_t position, uint32_t channel,
                      bool is_v) const {
  const bool of_v = is_v && !spec_.v_in_k();
  const uint64_t bits =
      mix(seed_, of_v ? kValues : kKeys, sequence * 64 + kv_head, position, channel);
  // Values have a mean, so that results do not cancel to nothing over many tokens.
  const float number = gaussian(bits) + (of_v || spec_.v_in_k() ? 0.5f : 0.0f);
  if (!codecs::codec_of(spec_.codec).is_scaled()) {
    return narrow(number, half_of(spec_.codec));
  }
  const uint16_t scale = scale_of(sequence, kv_head, position, channel / kGroup, is_v);
  if (scale == 0 || std::isnan(bf16_to_f32(scale))) {
    return 0;  // as encoders have it
  }
  // The largest magnitude is near the largest code.
  if (spec_.codec == codecs::kI4) {
    return static_cast<uint16_t>(std::clamp(std::nearbyint(7.5f + number * 3.5f), 0.0f, 15.0f));
  }
  return spec_.codec == CodecId::kI8
             ? static_cast<uint16_t>(static_cast<int>(std::nearbyint(number * 31.0f)) & 0xff)
             : to_e4m3(number * 110.0f);
}

// Of values of 4 bits that are far apart, some of the large ones have one number for all channels.
bool Case::is_flat(uint32_t position) const {
  return spec_.codec == codecs::kI4 && spec_.far != 0 && position / 64 % 4 == 1;
}

// Rows of bytes have one scale, rows of 4 bits one for each group.
uint16_t Case::scale_of(uint32_t sequence, uint32_t kv_head, uint32_t position, uint32_t group,
                        bool is_v) const {
  const bool of_groups = spec_.codec == codecs::kI4;
  const uint64_t bits = mix(seed_, kScales, sequence * 64 + kv_head, position,
                            (of_groups ? 2 * group : 0) + (is_v ? 1 : 0));
  const float size = of_groups                     ? 1.0f / 3.5f
                     : spec_.codec == CodecId::kI8 ? 1.0f / 31.0f
                                                   : 1.0f / 110.0f;
  const float factor = 0.5f + static_cast<float>(bits & 0xffff) / 65536.0f;
  // Of a value of 4 bits in one group alone.
  const bool is_its_group =
      !of_groups || !is_v || (position / 100 + kv_head) % (spec_.dim / kGroup) == group;
  if (spec_.not_numbers && position % 50 == 49 && is_v == (position % 100 == 99) && is_its_group) {
    return f32_to_bf16(std::numeric_limits<float>::quiet_NaN());
  }
  if (!is_v) {
    return f32_to_bf16(spec_.k_size * size * factor);
  }
  if (is_flat(position)) {
    return 0;
  }
  if (!spec_.uneven) {
    return f32_to_bf16(std::ldexp(size * factor, position / 64 % 2 == 0 ? -spec_.far : spec_.far));
  }
  const auto exponent = static_cast<int>(bits >> 16 & 63);
  return exponent < 4 ? 0 : f32_to_bf16(std::ldexp(size * factor, exponent - 34));
}

// Of a group of a row of 4 bits. Where the scale is 0, all elements are the zero: 0 or any number.
uint16_t Case::zero_of(uint32_t sequence, uint32_t kv_head, uint32_t position, uint32_t group,
                       bool is_v) const {
  const uint64_t bits = mix(seed_, kZeros, sequence * 64 + kv_head, position, 2 * group + is_v);
  const float scale = bf16_to_f32(scale_of(sequence, kv_head, position, group, is_v));
  if (is_v && is_flat(position)) {
    return f32_to_bf16(std::ldexp(1.0f + gaussian(bits) / 4.0f, spec_.far));
  }
  if (scale == 0) {
    const int exponent = static_cast<int>(bits >> 32 & 31) - 15;
    return bits % 2 == 0 ? 0 : f32_to_bf16(std::ldexp(1.0f, exponent));
  }
  // Codes around 7.5 stand for numbers around 0, give or take a few steps.
  return f32_to_bf16(scale * (-7.5f + 2.0f * gaussian(bits)));
}

double Case::value(uint32_t sequence, uint32_t kv_head, uint32_t position, uint32_t channel,
                   bool is_v) const {
  const uint16_t bits = stored(sequence, kv_head, position, channel, is_v);
  if (!codecs::codec_of(spec_.codec).is_scaled()) {
    return widen(bits, half_of(spec_.codec));
  }
  const uint32_t group = channel / kGroup;
  if (spec_.codec == codecs::kI4) {
    const double scale = bf16_to_f32(scale_of(sequence, kv_head, position, group, is_v));
    return bits * scale + bf16_to_f32(zero_of(sequence, kv_head, position, group, is_v));
  }
  return (spec_.codec == CodecId::kI8 ? static_cast<int8_t>(bits) : from_e4m3(bits)) *
         bf16_to_f32(scale_of(sequence, kv_head, position, 0, is_v));
}

float Case::weight_of(uint32_t sequence, uint32_t kv_head, uint32_t position) const {
  if (spec_.weights == Weights::kNone) {
    return 0.0f;
  }
  const uint64_t bits = mix(seed_, kLogWeights, sequence * 64 + kv_head, position);
  if (spec_.weights == Weights::kHidden && (bits >> 60) < 8) {
    return -std::numeric_limits<float>::infinity();
  }
  return 2.0f * gaussian(bits);
}

// Writes a row, and its parameters where it has some.
void Case::store_row(uint32_t sequence, uint32_t kv_head, uint32_t position, bool is_v,
                     uint8_t* row, uint8_t* params) const {
  const uint32_t bits = codecs::codec_of(spec_.codec).bits();
  for (uint32_t i = 0; i < spec_.dim; ++i) {
    const uint16_t element = stored(sequence, kv_head, position, i, is_v);
    if (bits == 4) {
      uint8_t& two = row[i / 2];
      two = static_cast<uint8_t>(i % 2 == 0 ? element : two | element << 4);
    } else {
      std::memcpy(row + i * bits / 8, &element, bits / 8);
    }
  }
  const uint32_t n_params = row_params_bytes(spec_.codec, spec_.dim) / 2;
  for (uint32_t i = 0; i < n_params; ++i) {
    // One scale, or scale and zero of each group.
    const uint16_t param = i % 2 == 0 ? scale_of(sequence, kv_head, position, i / 2, is_v)
                                      : zero_of(sequence, kv_head, position, i / 2, is_v);
    std::memcpy(params + 2 * i, &param, 2);
  }
}

// Lays the tokens that a class keeps of a sequence into pages, and makes the request.
void Case::place(uint32_t sequence, uint32_t page_class, uint64_t* free_page) {
  const ClassSpec& of = spec_.classes[page_class];
  const PageClass& lies = classes[page_class];
  const uint32_t length = spec_.lengths[sequence], page = spec_.page_tokens;
  Request request;
  request.table = spec_.is_late()
                      ? (uint64_t{page_class} * spec_.lengths.size() + sequence) * max_pages_
                      : page_table.size();
  request.q_token = sequence * spec_.n_query;
  request.n_query = spec_.n_query;
  request.page_class = page_class;

  // Whole pages are kept. Those between sinks and window are not in the list; where windows move
  // they have places there, as a device's have.
  const bool all = spec_.windows_move() || of.window == 0 || of.sinks + of.window >= length;
  const uint32_t window_first = all ? 0 : length - of.window;
  const uint32_t sink_pages = all ? 0 : static_cast<uint32_t>(div_up(of.sinks, page));
  const uint32_t window_page = std::max(window_first / page, sink_pages);
  std::vector<uint32_t> kept;
  for (uint32_t i = 0; i < sink_pages; ++i) {
    kept.push_back(i);
  }
  for (uint32_t i = window_page; i < div_up(planned(sequence), page); ++i) {
    kept.push_back(i);
  }
  if (all) {
    request.n_first = request.n_tokens = length;
  } else {
    request.n_first = of.sinks;
    request.n_tokens = of.sinks + of.window;
    request.second = window_first - (window_page - sink_pages) * page;
  }
  if (spec_.tree) {
    request.tree_first = request.n_tokens - spec_.n_query;
    request.tree_list = (all ? 0 : request.second - request.n_first) + request.tree_first;
  }
  if (spec_.weights != Weights::kNone) {
    request.log_weights = static_cast<int64_t>(log_weights.size());
    request.log_weight_stride = static_cast<uint32_t>(kept.size()) * page;
    log_weights.resize(log_weights.size() + n_kv_heads_ * request.log_weight_stride,
                       std::numeric_limits<float>::quiet_NaN());
  }
  for (uint32_t at = 0; at < kept.size(); ++at) {
    bool holds_some = !spec_.windows_move();
    for (uint32_t i = kept[at] * page; i < std::min((kept[at] + 1) * page, length); ++i) {
      holds_some = holds_some || keeps(of, length, i);
    }
    const uint32_t nobody = kSegments << kEntrySlotBits;
    const uint32_t entry = holds_some ? page_order_[(*free_page)++] : nobody;
    page_table.resize(std::max<size_t>(page_table.size(), request.table + at + 1));
    page_table[request.table + at] = entry;
    if (!holds_some) {
      continue;
    }
    uint8_t* base = segments[entry >> kEntrySlotBits].data() +
                    (entry & kEntrySlotMask) * lies.page_bytes + lies.layer_offset_bytes;
    for (uint32_t row = 0; row < page; ++row) {
      const uint32_t position = kept[at] * page + row;
      if (position >= length || !keeps(of, length, position)) {
        continue;  // stays NaN
      }
      for (uint32_t head = 0; head < lies.n_heads; ++head) {
        const uint32_t kv_head = heads[lies.heads_first + head];
        const uint64_t of_head = uint64_t{head} * page + row;
        for (const bool is_v : {false, true}) {
          if (is_v && spec_.v_in_k()) {
            continue;
          }
          store_row(sequence, kv_head, position, is_v,
                    base + of_head * codecs::codec_of(spec_.codec).row_bytes(spec_.dim) +
                        (is_v ? lies.v_offset_bytes : 0),
                    base + lies.scales_offset_bytes +
                        of_head * row_params_bytes(spec_.codec, spec_.dim) +
                        (is_v ? lies.v_scales_offset_bytes : 0));
        }
        if (request.log_weights >= 0) {
          log_weights[static_cast<size_t>(request.log_weights) +
                      kv_head * request.log_weight_stride + at * page + row] =
              weight_of(sequence, kv_head, position);
        }
      }
    }
  }
  if (spec_.is_late()) {
    add_requests_of(sequence, request);
    return;
  }
  page_table.push_back(UINT32_MAX);  // behind the list: no segment has it
  requests.push_back(request);
}

// As a batch plans it.
void Case::add_requests_of(uint32_t sequence, const Request& list) {
  if (spec_.prefill) {
    requests.push_back(list);
    requests.back().n_first = requests.back().n_tokens = planned(sequence);
  } else {
    add_requests(list, planned(sequence), sights()[list.page_class], max_unsure(), &requests);
  }
}

uint32_t Case::max_unsure() const {
  return spec_.is_late() ? *std::max_element(spec_.missing.begin(), spec_.missing.end()) + 3 : 0;
}

// Of every second sequence it is said that it has fewer tokens than it may have, and of those that
// miss none that they have more than the plan counts on.
void Case::tell_lengths() {
  for (uint32_t s = 0; s < spec_.lengths.size(); ++s) {
    const uint32_t length = spec_.lengths[s], missing = spec_.missing[s];
    const uint32_t n_append = std::min(length, spec_.n_query);
    const uint32_t n_before = length - n_append;
    const bool is_exact = s % 2 == 0;
    LengthsItem item;
    item.n_before = n_before + missing;
    item.n_unsure = std::min(is_exact ? missing : max_unsure(), item.n_before);
    item.n_append = n_append;
    item.n_query = spec_.n_query;
    item.query_row = s * spec_.n_query;
    items.push_back(item);
    told.push_back(missing == 0 ? n_before + 7 : is_exact ? n_before / 2 : n_before);
  }
}

LengthsParams Case::lengths_params(const DecodePlan& plan, DecodePlan* to) {
  to->work.assign(plan.work.size(), Work{});
  to->merges.assign(plan.merges.size(), Merge{});
  to->n_blocks = plan.n_blocks;
  to->n_tail = plan.n_tail;
  to->n_slots = plan.n_slots;
  to->max_rows = plan.max_rows;
  counts = {static_cast<uint32_t>(plan.work.size()), static_cast<uint32_t>(plan.merges.size())};
  LengthsParams params;
  params.n_kinds = 1;
  LengthsKind& kind = params.kinds[0];
  kind.planned_work = plan.work.data();
  kind.planned_merges = plan.merges.data();
  kind.work = to->work.data();
  kind.merges = to->merges.data();
  kind.n_work = &counts[0];
  kind.n_merges = &counts[1];
  kind.group = spec_.group;
  const std::vector<Sight> seen = sights();
  std::copy(seen.begin(), seen.end(), kind.sights);
  params.items = items.data();
  params.lengths = told.data();
  params.max_items = static_cast<uint32_t>(items.size());
  params.max_pages = max_pages_;
  params.page_tokens = spec_.page_tokens;
  params.block_rows = block_rows();
  return params;
}

DecodePlan Case::plan() const {
  PlanOptions options;
  options.blocks = spec_.blocks;
  options.block_rows = block_rows();
  options.group = spec_.group;
  options.overhead_tokens = 32;
  options.least_tokens = spec_.least_tokens;
  options.fixed_tokens = spec_.fixed_tokens;
  options.tail_part = spec_.tail_part;
  options.tail_load_tokens = 0;
  options.least_tail_tokens = spec_.least_tail_tokens;
  const std::vector<Sight> seen = sights();
  if (spec_.prefill) {
    options.sights = seen;
    options.max_unsure = max_unsure();
  }
  return plan_decode(requests, classes, heads, options);
}

std::vector<Sight> Case::sights() const {
  std::vector<Sight> all;
  for (const ClassSpec& of : spec_.classes) {
    Sight& sight = all.emplace_back();
    if (spec_.layer_window != 0) {
      sight.window = spec_.layer_window;
    }
    if (of.window != 0) {
      sight.n_sinks = of.sinks;
      sight.n_recent = of.window;
    }
  }
  return all;
}

PagePool Case::pool() {
  PagePool pool;
  for (uint32_t i = 0; i < segments.size(); ++i) {
    pool.segments[i] = segments[i].data();
  }
  std::copy(classes.begin(), classes.end(), pool.classes);
  pool.heads = heads.data();
  pool.page_tokens = make_divider(spec_.page_tokens);
  return pool;
}

AttendTensors Case::tensors() {
  const int64_t q_heads = n_kv_heads_ * spec_.group;
  const int64_t stride = spec_.dim + kGap, o_stride = spec_.dim_v() + kGap;
  AttendTensors tensors;
  tensors.q = q.data();
  tensors.q_stride_token = q_heads * stride;
  tensors.q_stride_head = stride;
  tensors.o = o.data();
  tensors.o_stride_token = q_heads * o_stride;
  tensors.o_stride_head = o_stride;
  tensors.lse = spec_.reads_lse ? lse.data() : nullptr;
  tensors.lse_stride_token = q_heads;
  tensors.lse_stride_head = 1;
  tensors.dtype_q = spec_.query_dtype();
  tensors.dtype_o = spec_.dtype_o;
  tensors.group = spec_.group;
  tensors.sink_logits = spec_.sinks ? sink_logits.data() : nullptr;
  return tensors;
}

DecodeParams Case::decode_params(const DecodePlan& plan) {
  partial_o.resize(size_t{plan.n_slots} * block_rows() * spec_.dim_v());
  partial_lse.resize(size_t{plan.n_slots} * block_rows());
  DecodeParams params;
  params.pool = pool();
  params.tensors = tensors();
  params.page_table = page_table.data();
  params.log_weights = log_weights.data();
  params.tree_mask = tree_mask.data();
  params.work = plan.work.data();
  params.partial_o = partial_o.data();
  params.partial_lse = partial_lse.data();
  if (spec_.takes_tails()) {
    tail = plan.tail();
    params.tail = &tail;
  }
  params.merge_follows = !plan.merges.empty();
  set_scale(&params, softmax_scale(spec_), spec_.softcap);
  const std::vector<Sight> seen = sights();
  std::copy(seen.begin(), seen.end(), params.sights);
  return params;
}

MergeParams Case::merge_params(const DecodePlan& plan) {
  MergeParams params;
  params.tensors = tensors();
  params.merges = plan.merges.data();
  params.partial_o = partial_o.data();
  params.partial_lse = partial_lse.data();
  params.rows = plan.max_rows;
  params.block_rows = block_rows();
  return params;
}

std::vector<std::span<uint8_t>> Case::memory() {
  std::vector<std::span<uint8_t>> all;
  for (const Bytes& segment : segments) {
    all.push_back({segment.data(), segment.size()});
  }
  all.push_back({q.data(), q.size()});
  all.push_back({o.data(), o.size()});
  append_range(&all, page_table);
  append_range(&all, heads);
  all.push_back({reinterpret_cast<uint8_t*>(&tail), sizeof tail});
  all.push_back({reinterpret_cast<uint8_t*>(log_weights.data()),
                 (log_weights.size() - kGuard) * sizeof(float)});
  append_range(&all, tree_mask);
  append_range(&all, items);
  append_range(&all, told);
  append_range(&all, counts);
  append_range(&all, sink_logits);
  append_range(&all, lse);
  append_range(&all, partial_o);
  append_range(&all, partial_lse);
  return all;
}

void Case::clear_results() {
  std::memset(o.data(), 0xff, o.size());
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::fill(lse.begin(), lse.end(), nan);
  std::fill(partial_o.begin(), partial_o.end(), nan);
  std::fill(partial_lse.begin(), partial_lse.end(), nan);
}

void Case::reference() {
  const uint32_t q_heads = n_kv_heads_ * spec_.group;
  const uint64_t stride = spec_.dim + kGap;
  const uint32_t dim_v = spec_.dim_v();
  ref_o_.assign(size_t{n_tokens_q_} * q_heads * dim_v, 0.0);
  ref_lse_.assign(size_t{n_tokens_q_} * q_heads, -std::numeric_limits<double>::infinity());
  for (uint32_t index = 0; index < spec_.lengths.size() * classes.size(); ++index) {
    const uint32_t sequence = index / static_cast<uint32_t>(classes.size());
    const uint32_t page_class = index % static_cast<uint32_t>(classes.size());
    const ClassSpec& of = spec_.classes[page_class];
    const uint32_t length = spec_.lengths[sequence];
    const PageClass& lies = classes[page_class];
    for (uint32_t head = 0; head < lies.n_heads; ++head) {
      const uint32_t kv_head = heads[lies.heads_first + head];
      std::vector<double> k(size_t{length} * spec_.dim), v(size_t{length} * dim_v);
      for (uint32_t t = 0; t < length; ++t) {
        for (uint32_t i = 0; i < spec_.dim; ++i) {
          k[t * spec_.dim + i] = value(sequence, kv_head, t, i, false);
        }
        for (uint32_t i = 0; i < dim_v; ++i) {
          v[t * dim_v + i] = value(sequence, kv_head, t, i, true);
        }
      }
      for (uint32_t row = 0; row < spec_.n_query * spec_.group; ++row) {
        const uint32_t token = sequence * spec_.n_query + row / spec_.group;
        const uint32_t q_head = kv_head * spec_.group + row % spec_.group;
        const auto* query = reinterpret_cast<const uint16_t*>(q.data()) +
                            (size_t{token} * q_heads + q_head) * stride;
        std::vector<double> logit(length, -std::numeric_limits<double>::infinity());
        const double sink =
            spec_.sinks ? sink_logits[q_head] : -std::numeric_limits<double>::infinity();
        double top = sink;
        bool broken = false;
        for (uint32_t t = 0; t < length; ++t) {
          if (!keeps(of, length, t) || !sees(of, token, length, t)) {
            continue;
          }
          double dot = 0;
          for (uint32_t i = 0; i < spec_.dim; ++i) {
            dot += k[t * spec_.dim + i] * widen(query[i], spec_.query_dtype());
          }
          dot *= softmax_scale(spec_);
          logit[t] = (spec_.softcap == 0 ? dot : spec_.softcap * std::tanh(dot / spec_.softcap)) +
                     weight_of(sequence, kv_head, t);
          top = std::max(top, logit[t]);
          broken = broken || std::isnan(logit[t]);
        }
        if (std::isinf(top) && !broken) {
          continue;  // sees nothing: o = 0, lse = -inf
        }
        double sum = std::exp(sink - top);
        double* out = &ref_o_[(size_t{token} * q_heads + q_head) * dim_v];
        for (uint32_t t = 0; t < length; ++t) {
          const double weight = std::exp(logit[t] - top);
          if (weight == 0) {
            continue;
          }
          sum += weight;
          for (uint32_t i = 0; i < dim_v; ++i) {
            out[i] += weight * v[t * dim_v + i];
          }
        }
        for (uint32_t i = 0; i < dim_v; ++i) {
          out[i] /= sum;
        }
        ref_lse_[size_t{token} * q_heads + q_head] = top + std::log(sum);
      }
    }
  }
}

bool Case::Errors::ok() const { return o <= bound_o && lse <= bound_lse; }

Case::Errors Case::errors() {
  if (ref_o_.empty()) {
    reference();
  }
  constexpr double kWrong = std::numeric_limits<double>::infinity();
  Errors errors;
  // Weights and results rounded to bf16: 2^-9 of each at most; to fp16, an eighth of that.
  const bool bf16 = spec_.codec == CodecId::kBf16 || spec_.dtype_o == Dtype::kBf16;
  // Weights are rounded beside codes that count from the smallest element, not from 0.
  errors.bound_o = bf16 ? 5e-3 : spec_.codec == codecs::kI4 ? 2e-3 : 1e-3;
  errors.bound_lse = 1e-4;
  const uint32_t dim_v = spec_.dim_v();
  const uint64_t stride = dim_v + kGap;
  const uint32_t size = dtype_size_bytes(spec_.dtype_o);
  for (size_t row = 0; row < ref_lse_.size(); ++row) {
    double wrong = 0, right = 0;
    for (uint32_t i = 0; i < stride; ++i) {
      const uint8_t* at = o.data() + (row * stride + i) * size;
      uint32_t bits = 0;
      std::memcpy(&bits, at, size);
      if (i >= dim_v) {  // a gap
        wrong = bits == (size == 2 ? kNan16 : UINT32_MAX) ? wrong : kWrong;
        continue;
      }
      const double value = spec_.dtype_o == Dtype::kF32
                               ? std::bit_cast<float>(bits)
                               : widen(static_cast<uint16_t>(bits), spec_.dtype_o);
      const double expected = ref_o_[row * dim_v + i];
      if (std::isnan(expected)) {
        wrong = std::isnan(value) && bits != (size == 2 ? kNan16 : UINT32_MAX) ? wrong : kWrong;
        continue;
      }
      wrong += (value - expected) * (value - expected);
      right += expected * expected;
    }
    const double error = right == 0 ? (wrong == 0 ? 0 : kWrong) : std::sqrt(wrong / right);
    errors.o = std::max(errors.o, std::isnan(error) ? kWrong : error);
    if (!spec_.reads_lse) {
      continue;
    }
    const double at = lse[row], expected = ref_lse_[row];
    const double off = std::isinf(expected)   ? (at == expected ? 0 : kWrong)
                       : std::isnan(expected) ? (std::isnan(at) ? 0 : kWrong)
                                              : std::fabs(at - expected);
    errors.lse = std::max(errors.lse, std::isnan(off) ? kWrong : off);
  }
  return errors;
}

// --- Appends ------------------------------------------------------------------------------------

namespace {

constexpr uint32_t kAppendTokens = 11, kAppendHeads = 3, kAppendPages = 8;

// A row of pages as the CPU's codecs make it, and its parameters.
struct StoredRow {
  std::vector<uint8_t> bytes;
  std::vector<uint16_t> params;
};
// Codes of 4 bits are made of whole pages: here, of one whose rows are all alike. Groups that no
// page may have are 0 there.
StoredRow stored_row_of_codes(std::vector<float> row) {
  constexpr uint16_t kNan = 0x7fc0;
  const codecs::Codec& codec = codecs::codec_of(codecs::kI4);
  const auto n = static_cast<uint32_t>(row.size());
  std::vector<bool> is_broken(n / kGroup);
  for (uint32_t g = 0; g < n / kGroup; ++g) {
    const auto begin = row.begin() + g * kGroup, end = begin + kGroup;
    is_broken[g] = !std::all_of(begin, end, [](float x) { return std::fabs(x) <= 0x1p126f; });
    if (is_broken[g]) {
      std::fill(begin, end, 0.0f);
    }
  }
  std::vector<float> page;
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    page.insert(page.end(), row.begin(), row.end());
  }
  std::vector<uint8_t> codes(codec.head_rows_bytes(n));
  std::vector<uint16_t> params(codec.n_scales(n));
  KVM_ASSERT(codecs::encode_low_bits(codec, page.data(), n, nullptr, codes.data(), params.data()));
  codes.resize(codec.row_bytes(n));
  params.resize(row_params_bytes(codecs::kI4, n) / 2);
  for (uint32_t g = 0; g < n / kGroup; ++g) {
    if (is_broken[g]) {
      params[2 * g] = params[2 * g + 1] = kNan;
    }
  }
  return {std::move(codes), std::move(params)};
}
StoredRow stored_row(const std::vector<float>& row, CodecId to) {
  const auto n = static_cast<uint32_t>(row.size());
  if (to == codecs::kI4) {
    return stored_row_of_codes(row);
  }
  StoredRow stored{std::vector<uint8_t>(codecs::codec_of(to).row_bytes(n)), {}};
  if (to == CodecId::kI8) {
    stored.params = {
        codecs::encode_i8(row.data(), n, reinterpret_cast<int8_t*>(stored.bytes.data()))};
  } else if (to == CodecId::kF8) {
    stored.params = {codecs::encode_f8(row.data(), n, stored.bytes.data())};
  } else {
    for (uint32_t i = 0; i < n; ++i) {
      const uint16_t bits = narrow(row[i], half_of(to));
      std::memcpy(stored.bytes.data() + i * 2, &bits, 2);
    }
  }
  return stored;
}

float append_number(uint32_t kind, uint32_t channel, uint64_t bits) {
  const float x = static_cast<float>(bits >> 40) * 0x1p-24f - 0.5f;
  switch (kind) {
    case 2:
      return x * 0x1p-119f;
    case 3:
      return x * 0x1p-126f;
    case 4:
      return x * 0x1p-134f;
    case 5:
      return x * 3e38f;
    case 6:
      return 0.0f * x;
    case 7:
      return channel == 11 ? std::numeric_limits<float>::quiet_NaN() : x;
    case 8:
      return channel == 12 ? -std::numeric_limits<float>::infinity() : x;
    default:
      return x * (channel == 5 ? 1e6f : 3.0f);
  }
}

}  // namespace

std::vector<AppendSpec> all_appends() {
  std::vector<AppendSpec> specs;
  for (const CodecId to :
       {CodecId::kBf16, CodecId::kF16, CodecId::kI8, CodecId::kF8, codecs::kI4}) {
    for (const Dtype from : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      specs.push_back({from, to, 64, 16});
    }
  }
  specs.push_back({Dtype::kF32, CodecId::kF16, 80, 3});
  specs.push_back({Dtype::kBf16, CodecId::kBf16, 96, 64});
  specs.push_back({Dtype::kF16, CodecId::kBf16, 192, 16});
  specs.push_back({Dtype::kF32, CodecId::kBf16, kMlaDim, 64, true});
  specs.push_back({Dtype::kF16, CodecId::kF16, kMlaDim, 3, true});
  for (const CodecId to : {CodecId::kI8, CodecId::kF8, codecs::kI4}) {
    specs.push_back({Dtype::kF32, to, 128, 3});
    specs.push_back({Dtype::kBf16, to, 256, 64});
    for (const uint32_t dim : {80u, 96u, 192u}) {
      if (is_head_dim_on_devices(to, dim)) {
        specs.push_back({dim == 96 ? Dtype::kBf16 : Dtype::kF32, to, dim, 16});
      }
    }
  }
  return specs;
}

AppendCase::AppendCase(const AppendSpec& spec, uint64_t seed) : spec_(spec) {
  make_rows(seed);
  // Two classes: heads 2 and 0, and head 1.
  heads = {2, 0, 1};
  const auto row_bytes = static_cast<uint32_t>(codecs::codec_of(spec_.to).row_bytes(spec_.dim));
  pages = Bytes(size_t{kAppendPages} * 2 * spec_.page_tokens * 2 * (row_bytes + 24));
  for (uint32_t c = 0; c < 2; ++c) {
    PageClass& of = classes_[c];
    of.n_heads = c == 0 ? 2 : 1;
    of.heads_first = c == 0 ? 0 : 2;
    of.head_stride_bytes = spec_.page_tokens * row_bytes;
    const uint64_t plane_bytes = uint64_t{of.n_heads} * of.head_stride_bytes;
    of.v_offset_bytes = spec_.v_in_k ? 0 : plane_bytes;
    of.scales_offset_bytes = static_cast<uint32_t>(2 * plane_bytes);
    of.v_scales_offset_bytes =
        of.n_heads * spec_.page_tokens * row_params_bytes(spec_.to, spec_.dim);
    of.page_bytes = pages.size() / kAppendPages;
    of.layer_offset_bytes = 32 * spec_.page_tokens;  // behind something else
  }
  for (uint32_t t = 0; t < kAppendTokens; ++t) {
    for (uint32_t c = 0; c < 2; ++c) {
      tokens.push_back({t / spec_.page_tokens * 2 + c, t % spec_.page_tokens, t, c});
    }
  }
  // Pages of the segment in another order than in the table.
  for (uint32_t page = 0; page < kAppendPages; ++page) {
    page_table.push_back(kAppendSegment << kEntrySlotBits | (page * 3 + 1) % kAppendPages);
  }
  expected_.assign(pages.data(), pages.data() + pages.size());
  for (const AppendToken& token : tokens) {
    expect_token(token);
  }
  n_tokens = static_cast<uint32_t>(tokens.size());
  tokens.push_back({0, 0, kAppendTokens - 1, 0});  // does not count
}

void AppendCase::make_rows(uint64_t seed) {
  const uint32_t size = dtype_size_bytes(spec_.from);
  for (const bool is_v : {false, true}) {
    tensor(is_v) = Bytes(size_t{kAppendTokens} * kAppendHeads * spec_.dim * size);
    for (uint32_t n = 0; n < kAppendTokens * kAppendHeads; ++n) {
      std::vector<float>& row = rows_[is_v].emplace_back(spec_.dim);
      for (uint32_t i = 0; i < spec_.dim; ++i) {
        const float x = append_number((n + is_v) % 9, i, mix(seed, kAppends, n, i, is_v));
        uint8_t* const at = tensor(is_v).data() + (size_t{n} * spec_.dim + i) * size;
        if (spec_.from == Dtype::kF32) {
          std::memcpy(at, &x, 4);
          row[i] = x;
        } else {
          const uint16_t bits = narrow(x, spec_.from);
          std::memcpy(at, &bits, 2);
          row[i] = widen(bits, spec_.from);
        }
      }
    }
  }
}

void AppendCase::expect_token(const AppendToken& token) {
  const PageClass& of = classes_[token.page_class];
  const auto row_bytes = static_cast<uint32_t>(codecs::codec_of(spec_.to).row_bytes(spec_.dim));
  uint8_t* const page = expected_.data() +
                        (page_table[token.table] & kEntrySlotMask) * of.page_bytes +
                        of.layer_offset_bytes;
  for (uint32_t n = 0; n < of.n_heads * 2; ++n) {
    const uint32_t head = n / 2, is_v = n % 2;
    if (is_v != 0 && spec_.v_in_k) {
      continue;
    }
    const uint32_t kv_head = heads[of.heads_first + head];
    const StoredRow row = stored_row(rows_[is_v][token.source * kAppendHeads + kv_head], spec_.to);
    std::memcpy(
        page + is_v * of.v_offset_bytes + head * of.head_stride_bytes + token.row * row_bytes,
        row.bytes.data(), row_bytes);
    const auto params_bytes = static_cast<uint32_t>(row.params.size() * 2);
    std::copy_n(reinterpret_cast<const uint8_t*>(row.params.data()), params_bytes,
                page + of.scales_offset_bytes + is_v * of.v_scales_offset_bytes +
                    (head * spec_.page_tokens + token.row) * params_bytes);
  }
}

std::string AppendCase::name() const {
  return std::string("append ") + dtype_name(spec_.from) + " to " +
         codecs::codec_of(spec_.to).name + " d" + std::to_string(spec_.dim) + " page" +
         std::to_string(spec_.page_tokens) + (spec_.v_in_k ? " V in K" : "");
}

AppendParams AppendCase::params() const {
  AppendParams params;
  params.pool.segments[kAppendSegment] = pages.data();
  std::copy(std::begin(classes_), std::end(classes_), params.pool.classes);
  params.pool.heads = heads.data();
  params.pool.page_tokens = make_divider(spec_.page_tokens);
  params.page_table = page_table.data();
  params.n_tokens = &n_tokens;
  params.k = k.data();
  params.v = spec_.v_in_k ? nullptr : v.data();
  params.stride_token = kAppendHeads * spec_.dim;
  params.stride_head = spec_.dim;
  params.tokens = tokens.data();
  params.dtype = spec_.from;
  params.dim = spec_.dim;
  return params;
}

std::vector<std::span<uint8_t>> AppendCase::memory() {
  std::vector<std::span<uint8_t>> all = {
      {k.data(), k.size()}, {v.data(), v.size()}, {pages.data(), pages.size()}};
  append_range(&all, heads);
  append_range(&all, page_table);
  all.emplace_back(reinterpret_cast<uint8_t*>(&n_tokens), sizeof n_tokens);
  return all;
}

bool AppendCase::right() const {
  const auto is_nan = [this](uint16_t bits) {
    return (bits & 0x7fff) > (spec_.to == CodecId::kF16 ? 0x7c00 : 0x7f80);
  };
  bool right = true;
  for (size_t at = 0; at < expected_.size(); at += 2) {
    uint16_t got, want;
    std::memcpy(&got, pages.data() + at, 2);
    std::memcpy(&want, expected_.data() + at, 2);
    // The payload of a NaN may be any.
    right = right && (got == want ||
                      (!codecs::codec_of(spec_.to).is_scaled() && is_nan(got) && is_nan(want)));
  }
  return right;
}

}  // namespace kvm::attention::gpu::testing
