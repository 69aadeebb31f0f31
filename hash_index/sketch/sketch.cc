// SPDX-License-Identifier: Apache-2.0
#include "hash_index/sketch/sketch.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numbers>

#include "base/assert.h"
#include "base/round.h"
#include "base/simd/elem.h"
#include "codecs/rows.h"
#include "hash_index/sketch/frame.h"
#include "hash_index/sketch/layout.h"
#include "hash_index/sketch/random.h"
#include "hash_index/sketch/rows.h"
#include "hash_index/sketch/scan_args.h"
#include "hash_index/sketch/scan_table.h"

namespace kvm::hash_index {
namespace {

// Longer queries than that count as zero: products with keys (1e15 at most) stay finite.
constexpr double kMaxQuery = 1e15;
constexpr float kMaxLog2C = 1e30f;
constexpr float kMaxBase = 1e30f;
constexpr double kLeastOfTypical = 0.5f;

const ScanKernels& kernels_of(const ScanTable* table) {
  return *(table != nullptr ? *table : active_scan_table()).kernels;
}

uint32_t group_bytes(bool six_bits) { return six_bits ? 64 : 16; }

uint32_t groups_of(bool six_bits, uint32_t code_rows) {
  const uint32_t rest = code_rows % 3;
  return six_bits ? code_rows / 3 * 4 + (rest == 0 ? 0 : rest + 1) : code_rows * 2;
}

// The coordinate that each bit of a group stands for; -1: none.
std::array<int, 6> group_coordinates(bool six_bits, uint32_t code_rows, uint32_t group) {
  std::array<int, 6> bits;
  bits.fill(-1);
  if (!six_bits) {
    for (uint32_t i = 0; i < 4; ++i) {
      bits[i] = static_cast<int>(group * 4 + i);
    }
    return bits;
  }
  const uint32_t row = group / 4 * 3;
  const uint32_t rows = std::min<uint32_t>(code_rows - row, 3);
  if (group % 4 < rows) {
    for (uint32_t i = 0; i < 6; ++i) {
      bits[i] = static_cast<int>((row + group % 4) * 8 + i);
    }
    return bits;
  }
  for (uint32_t i = 0; i < 2 * rows; ++i) {
    bits[i] = static_cast<int>((row + i / 2) * 8 + 6 + i % 2);
  }
  return bits;
}

// Sums over the set bits of each value of a group, shifted to begin at 0: bit i adds |q_i| where it
// has the sign of q_i. Eight values at a time, in the bytes of a word; no sum exceeds a byte.
void fill_table(const std::array<int, 6>& coordinates, const int* query, bool six_bits,
                uint8_t* table) {
  constexpr uint64_t kOnes = 0x0101010101010101;
  constexpr uint64_t kSet[3] = {0xff00ff00ff00ff00, 0xffff0000ffff0000, 0xffffffff00000000};
  uint64_t low = 0;
  std::array<uint64_t, 8> high{};
  for (uint32_t i = 0; i < 6; ++i) {
    const int weight = coordinates[i] < 0 ? 0 : query[coordinates[i]];
    const uint64_t magnitude = kOnes * static_cast<uint64_t>(std::abs(weight));
    if (i < 3) {
      low += magnitude & (weight < 0 ? ~kSet[i] : kSet[i]);
    } else {
      for (uint32_t value = 0; value < 8; ++value) {
        high[value] += (value >> (i - 3) & 1) == (weight < 0 ? 0u : 1u) ? magnitude : 0;
      }
    }
  }
  for (uint32_t value = 0; value < (six_bits ? 8u : 2u); ++value) {
    const uint64_t bytes = low + high[value];
    std::memcpy(table + value * 8, &bytes, 8);
  }
}

// The rest of a query, rotated: [dim_pad]. `lead`: its leading coordinates.
void rest_of(const Basis& basis, const float* q, const float* lead, float* rest) {
  std::fill(rest, rest + basis.dim_pad, 0.0f);
  if (!basis.query_matrix.empty()) {
    for (uint32_t k = 0; k < basis.dim_k; ++k) {
      const float* row = basis.query_matrix.data() + size_t{k} * basis.dim_pad;
      for (uint32_t j = 0; j < basis.dim_pad; ++j) {
        rest[j] += q[k] * row[j];
      }
    }
  } else {
    std::copy_n(q, basis.dim_k, rest);
    float of_lead[kLeadDims];
    std::copy_n(lead, kLeadDims, of_lead);
    const float* axis = basis.lead_key.empty() ? nullptr : basis.lead_key.data();
    for (uint32_t k = 0; k < basis.dim_k && axis != nullptr; ++k, axis += kLeadDims) {
      float sums[4];
      for (uint32_t j = 0; j < 4; ++j) {
        sums[j] = axis[j] * of_lead[j] + axis[4 + j] * of_lead[4 + j];
      }
      rest[k] -= (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
  }
  rotate(basis, rest);
}

// Sum of a_i b_i, n a multiple of 8.
float product_of(const float* a, const float* b, uint32_t n) {
  float sums[8] = {};
  for (uint32_t i = 0; i < n; i += 8) {
    for (uint32_t j = 0; j < 8; ++j) {
      sums[j] += a[i + j] * b[i + j];
    }
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// Leading coordinates of a query, and whether it counts.
void turn(const Basis& basis, const float* q, uint32_t row, float scale, ScanQuery* out) {
  double square = 0;
  for (uint32_t k = 0; k < basis.dim_k; ++k) {
    square += double{q[k]} * double{q[k]};
  }
  const double length = std::sqrt(square);
  out->usable[row] = length <= kMaxQuery && length * std::abs(double{scale}) <= kMaxQuery;
  if (out->usable[row] == 0) {
    return;
  }
  float turned[kLeadDims] = {};
  const float* axis = basis.lead_query.empty() ? nullptr : basis.lead_query.data();
  for (uint32_t k = 0; k < basis.dim_k && axis != nullptr; ++k, axis += kLeadDims) {
    for (uint32_t j = 0; j < kLeadDims; ++j) {
      turned[j] += q[k] * axis[j];
    }
  }
  std::copy_n(turned, kLeadDims, out->turned[row]);
}

// Prepares what depends on the frame and not on its basis alone.
void set_frame_part(const Frame& frame, const float* q, uint32_t row, float scale, ScanQuery* out) {
  if (out->usable[row] == 0) {
    return;
  }
  const float base = scale * product_of(q, frame.center.data(), frame.basis->dim_k);
  out->base[row] = std::abs(base) <= kMaxBase ? base : std::copysign(kMaxBase, base);
  out->lead_step[row] = 0;
  out->lead_bias[row] = 0;
  out->lead[row][0] = out->lead[row][1] = 0;
  if (frame.basis->lead_key.empty()) {
    return;
  }
  double products[kLeadDims];
  double largest = 0;
  for (uint32_t j = 0; j < kLeadDims; ++j) {
    products[j] = double{scale} * double{out->turned[row][j]} * double{frame.lead_step[j]};
    largest = std::max(largest, std::abs(products[j]));
  }
  if (!(largest > 1e-30)) {
    return;
  }
  out->lead_step[row] = static_cast<float>(largest / 127);
  for (uint32_t j = 0; j < kLeadDims; ++j) {
    const int rounded = static_cast<int>(std::lrint(products[j] * 127 / largest));
    out->lead[row][j / 4] |= static_cast<uint32_t>(rounded & 255) << (8 * (j % 4));
    out->lead_bias[row] -= 128 * rounded;
  }
}

// Rounds the rest so that over each chunk the magnitudes sum to at most 255. Returns the step.
double round_rest(const float* rest, uint32_t dim_pad, uint32_t chunk, int* rounded) {
  double largest = 0;
  for (uint32_t at = 0; at < dim_pad; at += chunk) {
    double sum = 0;
    for (uint32_t j = at; j < std::min(at + chunk, dim_pad); ++j) {
      sum += std::abs(double{rest[j]});
    }
    largest = std::max(largest, sum);
  }
  // Rounding adds half a unit to each coordinate at most.
  const double step = largest / (255 - 0.5 * std::min(chunk, dim_pad));
  const double inverse = step > 1e-30 ? 1 / step : 0;
  for (uint32_t j = 0; j < dim_pad; ++j) {
    rounded[j] = static_cast<int>(std::lrint(double{rest[j]} * inverse));
  }
  return inverse == 0 ? 0 : step;
}

// Variance of <x, q'> as the code tells it, over f^2 |q'|^2: the error f y - x has the square
// length f^2 |y|^2 (1 - cos^2), cos between x and its codeword, and lies in any direction. Means of
// Gaussian coordinates; cos^2 is 2 / pi with one bit.
constexpr double kSpread1 = 0.363;
constexpr double kSpread2 = 0.105;

void set_basis_part(const Basis& basis, const float* q, uint32_t row, float scale, bool careful,
                    ScanQuery* out) {
  alignas(64) float rest[kMaxSketchDim];
  int rounded[kMaxSketchDim] = {};
  double step = 0;
  turn(basis, q, row, scale, out);
  if (out->usable[row] != 0) {
    rest_of(basis, q, out->turned[row], rest);
    step = round_rest(rest, basis.dim_pad, out->chunk_rows * 8, rounded);
  }
  double rest2 = 0;
  for (uint32_t j = 0; careful && out->usable[row] != 0 && j < basis.dim_pad; ++j) {
    rest2 += double{rest[j]} * double{rest[j]};
  }
  const double variance = (out->shape.planes == 2 ? kSpread2 : kSpread1) * rest2;
  out->spread[row] =
      static_cast<float>(std::min(0.5 * variance * double{scale} * double{scale}, 1e30));
  int sum = 0;
  for (const int x : rounded) {
    sum += std::abs(x);
  }
  // S is shifted by the sum of the negative parts; <y, q> = S' - sum(q) / 2 for one plane, and
  // S' - 1.5 sum(q) for two, S' not shifted. Together: half of the sum of magnitudes.
  out->step[row] = static_cast<float>(step * double{scale});
  const double offset = (out->shape.planes == 2 ? 1.5 : 0.5) * sum;
  out->offset[row] = static_cast<float>(-offset * step * double{scale});
  const bool six = out->six_bits != 0;
  const uint32_t bytes = group_bytes(six);
  const uint32_t first = row / kScanTile * kScanTile;
  const uint32_t tile_rows = std::min<uint32_t>(kScanTile, out->n_rows - first);
  uint8_t* tile =
      reinterpret_cast<uint8_t*>(out) + kLookupOffset + size_t{first} * out->n_groups * bytes;
  for (uint32_t g = 0; g < out->n_groups; ++g) {
    fill_table(group_coordinates(six, out->shape.code_rows, g), rounded, six,
               tile + (size_t{g} * tile_rows + (row - first)) * bytes);
  }
}

// Raises norms [64] to kLeastOfTypical of what is typical of the block. A key's part in the
// variance of o goes with |v - o|: one whose value vanishes counts as well, for it belongs to the
// denominator. Typical is the squared mean of roots, which one huge value hardly moves.
void raise_norms(float* norms) {
  double sum = 0;
  for (uint32_t i = 0; i < kBlockKeys; ++i) {
    sum += std::sqrt(double{norms[i]});
  }
  const double mean = sum / kBlockKeys;
  const auto least = static_cast<float>(kLeastOfTypical * mean * mean);
  for (uint32_t i = 0; i < kBlockKeys; ++i) {
    norms[i] = std::max(norms[i], least);
  }
}

}  // namespace

float permanent_random(uint64_t seed, uint64_t position) {
  return random_at(random_keys(seed, position), position);
}

size_t block_bytes(SketchKind kind, uint32_t dim_k) { return block_shape(kind, dim_k).bytes; }

void encode_block(const Frame& frame, const KvRun& run, uint32_t head, uint32_t dim_v, void* block,
                  const ScanTable* table) {
  KVM_ASSERT(run.n_tokens == kBlockKeys && run.position % kBlockKeys == 0);
  const ScanKernels& kernels = kernels_of(table);
  const Basis& basis = *frame.basis;
  alignas(64) float norms[kBlockKeys];
  alignas(64) float rows[kBlockKeys * kMaxSketchDim];  // where K or V have to be decoded
  // The kernels read floats; of int8 and fp8 rows with their scales they get those.
  const auto rows_of = [&](const KvPlane& plane, uint32_t dim) {
    const uint8_t* at = codecs::row_at(plane, dim, head, run.slot);
    const codecs::Codec& codec = codecs::codec_of(plane.codec);
    if (codec.is_scaled()) {
      for (uint32_t t = 0; t < kBlockKeys; ++t) {
        load_row(at + size_t{t} * dim, codec.elem, scale_at(plane, head, run.slot + t), dim,
                 rows + size_t{t} * dim);
      }
      at = reinterpret_cast<const uint8_t*>(rows);
    }
    return at;
  };
  const auto read_as = [](const KvPlane& plane) -> uint32_t {
    const codecs::Codec& codec = codecs::codec_of(plane.codec);
    return codec.is_scaled() ? uint32_t{vec::kElemF32} : codec.elem;
  };
  KVM_ASSERT(dim_v <= kMaxSketchDim);
  kernels.norms(rows_of(run.v, dim_v), read_as(run.v), dim_v,
                codecs::row_at(run.k, basis.dim_k, head, run.slot),
                codecs::codec_of(run.k.codec).head_rows_bytes(basis.dim_k), norms);
  raise_norms(norms);
  EncodeArgs args{};
  args.shape = block_shape(basis.kind, basis.dim_k);
  args.k = rows_of(run.k, basis.dim_k);
  args.elem_k = read_as(run.k);
  args.dim_k = basis.dim_k;
  args.dim_pad = basis.dim_pad;
  args.lead = basis.lead_key.empty() ? 0 : uint32_t{kLeadDims};
  args.center = frame.center.data();
  args.signs = basis.signs.data();
  args.lead_key = basis.lead_key.data();
  args.lead_query = basis.lead_query.data();
  args.matrix = basis.key_matrix.empty() ? nullptr : basis.key_matrix.data();
  args.lead_inverse = frame.lead_inverse.data();
  args.value_norms = norms;
  args.block = static_cast<uint8_t*>(block);
  kernels.encode(&args);
}

bool is_within_range(const Frame& frame, const void* block) {
  constexpr uint8_t kLeast = 128 - 127;
  constexpr uint8_t kMost = 128 + 127;
  const BlockShape shape = block_shape(frame.basis->kind, frame.basis->dim_k);
  if (shape.lead_offset == 0) {
    return true;
  }
  const auto* codes = static_cast<const uint8_t*>(block) + shape.lead_offset;
  uint8_t at_end = 0;
  for (uint32_t i = 0; i < kLeadDims * kBlockKeys; ++i) {
    at_end |= static_cast<uint8_t>(codes[i] <= kLeast) | static_cast<uint8_t>(codes[i] == kMost);
  }
  return at_end == 0;
}

size_t scan_query_bytes(const Frame& frame, uint32_t n_rows, const ScanTable* table) {
  const bool six = kernels_of(table).six_bits != 0;
  const uint32_t groups = groups_of(six, frame.basis->dim_pad / 8);
  return kLookupOffset + round_up(size_t{n_rows} * groups * group_bytes(six), 64);
}

void prepare_scan(const Frame& frame, const ScanRows& rows, void* out, const SketchSpan* like,
                  const ScanTable* table) {
  const uint32_t n_rows = rows.n;
  KVM_ASSERT(n_rows >= 1 && n_rows <= kMaxRows);
  const Basis& basis = *frame.basis;
  auto* query = static_cast<ScanQuery*>(out);
  const bool same_basis = like != nullptr && like->frame->basis == frame.basis;
  if (same_basis) {
    std::memcpy(out, like->query, scan_query_bytes(frame, n_rows, table));
  } else {
    std::memset(out, 0, scan_query_bytes(frame, n_rows, table));
    query->shape = block_shape(basis.kind, basis.dim_k);
    query->n_rows = n_rows;
    query->six_bits = kernels_of(table).six_bits;
    query->n_groups = groups_of(query->six_bits != 0, query->shape.code_rows);
    query->chunk_rows = query->shape.planes == 2 ? 3 : 6;
    query->cap = rows.softcap;
    query->cap_power =
        rows.softcap == 0 ? 0.0f : 2.0f * std::numbers::log2e_v<float> / rows.softcap;
  }
  for (uint32_t row = 0; row < n_rows; ++row) {
    const float* q_row = rows.q + size_t{row} * basis.dim_k;
    if (!same_basis) {
      set_basis_part(basis, q_row, row, rows.scale, rows.careful, query);
    }
    set_frame_part(frame, q_row, row, rows.scale, query);
  }
}

void scan_logits(const SketchSpan& span, uint32_t n_rows, uint32_t block, float* logits,
                 float* value_norms, const ScanTable* table) {
  const auto* query = static_cast<const ScanQuery*>(span.query);
  KVM_ASSERT(query->n_rows == n_rows && block < span.n_blocks);
  const auto* data =
      reinterpret_cast<const uint8_t*>(span.blocks) + size_t{block} * query->shape.bytes;
  kernels_of(table).logits(query, data, logits);
  for (uint32_t i = 0; i < kBlockKeys; ++i) {
    uint16_t norm = 0;
    std::memcpy(&norm, data + query->shape.factor_offset + 4 * i, sizeof norm);
    value_norms[i] = bf16_to_f32(norm);
  }
}

bool scan_draw(std::span<const SketchSpan> spans, uint32_t n_rows, const DrawParams& params,
               Candidates* candidates, DrawSums* sums, const ScanTable* table) {
  const ScanKernels& kernels = kernels_of(table);
  ScanSums added{};
  DrawArgs args{};
  for (uint32_t r = 0; r < n_rows; ++r) {
    // Finite, so that exponents are; NaN counts as no chance.
    const float log2_c = params.log_c[r] * 1.4426950408889634f;
    args.log2_c[r] = log2_c >= -kMaxLog2C ? std::min(log2_c, kMaxLog2C) : -kMaxLog2C;
  }
  args.reach = params.reach;
  args.min_size = kMinSize;
  args.out_position = candidates->position;
  args.out_size = candidates->size;
  args.out_random = candidates->random;
  args.out_logits = candidates->logits;
  args.capacity = candidates->capacity;
  args.n = candidates->n;
  bool fits = true;
  for (size_t i = 0; i < spans.size(); ++i) {
    const SketchSpan& span = spans[i];
    const std::byte* next = i + 1 < spans.size() ? spans[i + 1].blocks : params.next_blocks;
    args.next = reinterpret_cast<const uint8_t*>(next);
    args.query = static_cast<const ScanQuery*>(span.query);
    KVM_ASSERT(args.query->n_rows == n_rows && span.position % kBlockKeys == 0);
    args.blocks = reinterpret_cast<const uint8_t*>(span.blocks);
    args.position = span.position;
    for (uint32_t left = span.n_blocks; left != 0; left -= args.n_blocks) {
      // The hash has a key for each 2^32 positions.
      const uint64_t to_next = (((args.position >> 32) + 1) << 32) - args.position;
      args.n_blocks = static_cast<uint32_t>(std::min<uint64_t>(left, to_next / kBlockKeys));
      const RandomKeys keys = random_keys(params.seed, args.position);
      args.hash_keys[0] = keys.low;
      args.hash_keys[1] = keys.high;
      fits = kernels.draw(&args, &added) != 0 && fits;
      args.blocks += size_t{args.n_blocks} * args.query->shape.bytes;
      args.position += uint64_t{args.n_blocks} * kBlockKeys;
    }
    sums->n_keys += static_cast<double>(span.n_blocks) * kBlockKeys;
  }
  candidates->n = args.n;
  sums->expected += added.expected;
  for (uint32_t r = 0; r < n_rows; ++r) {
    sums->open_mass[r] += added.open_mass[r];
    sums->spread[r] += added.spread[r];
  }
  return fits;
}

}  // namespace kvm::hash_index
