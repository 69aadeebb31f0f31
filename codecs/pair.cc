// SPDX-License-Identifier: Apache-2.0
#include "codecs/pair.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/assert.h"
#include "codecs/convert.h"
#include "codecs/rows.h"

namespace kvm::codecs {
namespace {

constexpr double kLeastLength = 0x1p-100;
constexpr double kMostLength = 0x1p100;
// Below it, and as near to pi, a sine says nothing: between such rows a line is as good as an arc.
constexpr double kTinyAngle = 1e-4;

Dtype dtype_of(const Codec& codec) { return static_cast<Dtype>(codec.elem); }

// What two rows of a token are to each other.
struct Token {
  double shallow_length = 0;
  double deep_length = 0;
  double angle = 0;  // 0 where one of them is zeros
};

double length_of(const float* row, uint32_t dim) {
  double sum = 0;
  for (uint32_t i = 0; i < dim; ++i) {
    sum += double{row[i]} * double{row[i]};
  }
  return std::sqrt(sum);
}

bool can_encode(double length) {
  return length == 0 || (length >= kLeastLength && length <= kMostLength);
}

// The angle of two rows: of u and v it is 2 atan(|u - v| / |u + v|), which is exact for small ones,
// where an arc cosine is not.
double angle_of(const float* shallow, const float* deep, uint32_t dim, const Token& token) {
  double difference = 0;
  double sum = 0;
  for (uint32_t i = 0; i < dim; ++i) {
    const double v = shallow[i] / token.shallow_length;
    const double u = deep[i] / token.deep_length;
    difference += (u - v) * (u - v);
    sum += (u + v) * (u + v);
  }
  return 2 * std::atan2(std::sqrt(difference), std::sqrt(sum));
}

// e of a token, in fp32. REQUIRES: one of the rows is not zeros.
void share_direction(const float* shallow, const float* deep, uint32_t dim, const Token& token,
                     double t, float* e) {
  double of_shallow = 1 - t;
  double of_deep = t;
  if (token.angle > kTinyAngle && token.angle < M_PI - kTinyAngle) {
    of_shallow = std::sin((1 - t) * token.angle) / std::sin(token.angle);
    of_deep = std::sin(t * token.angle) / std::sin(token.angle);
  }
  of_shallow = token.shallow_length == 0 ? 0 : of_shallow / token.shallow_length;
  of_deep = token.deep_length == 0 ? 0 : of_deep / token.deep_length;
  const auto mix = [&](uint32_t i) { return of_shallow * shallow[i] + of_deep * deep[i]; };
  double square = 0;
  for (uint32_t i = 0; i < dim; ++i) {
    square += mix(i) * mix(i);
  }
  if (square < 1e-12) {  // opposites in equal parts
    of_shallow = 0;
    of_deep = 1 / token.deep_length;
    square = 1;
  }
  const double scale = 1 / std::sqrt(square);
  for (uint32_t i = 0; i < dim; ++i) {
    e[i] = static_cast<float>(mix(i) * scale);
  }
}

void put_factor(const PairLayout& layout, PairSide side, uint32_t slot, double factor,
                uint16_t* params) {
  const auto value = static_cast<float>(factor);
  std::memcpy(params + layout.factors(side) + 2 * slot, &value, sizeof value);
}

float factor_at(const PairLayout& layout, PairSide side, uint32_t slot, const uint16_t* params) {
  float value = 0;
  std::memcpy(&value, params + layout.factors(side) + 2 * slot, sizeof value);
  return value;
}

}  // namespace

bool encode_pair(const Codec& codec, const float* shallow, const float* deep, uint32_t dim, float t,
                 uint8_t* rows, uint16_t* params) {
  KVM_ASSERT(codec.is_pair() && dim <= kMaxHeadDim && dim % 8 == 0);
  KVM_ASSERT(t > 0 && t <= 1);
  std::array<Token, kPageTokens> tokens;
  for (uint32_t slot = 0; slot < kPageTokens; ++slot) {
    const float* v = shallow + slot * dim;
    const float* u = deep + slot * dim;
    Token& token = tokens[slot];
    token.shallow_length = length_of(v, dim);
    token.deep_length = length_of(u, dim);
    if (!can_encode(token.shallow_length) || !can_encode(token.deep_length)) {
      return false;
    }
    if (token.shallow_length != 0 && token.deep_length != 0) {
      token.angle = angle_of(v, u, dim, token);
    }
  }
  const PairLayout layout(codec, dim);
  std::array<uint16_t, kPageTokens> kept;
  std::iota(kept.begin(), kept.end(), uint16_t{0});
  std::sort(kept.begin(), kept.end(), [&](uint16_t a, uint16_t b) {
    return tokens[a].angle != tokens[b].angle ? tokens[a].angle > tokens[b].angle : a < b;
  });
  std::sort(kept.begin(), kept.begin() + layout.n_kept);
  std::copy_n(kept.begin(), layout.n_kept, params + PairLayout::slots());
  const uint64_t row_bytes = codec.row_bytes(dim);
  uint32_t next = 0;  // of those that are kept
  for (uint32_t slot = 0; slot < kPageTokens; ++slot) {
    const float* v = shallow + slot * dim;
    const float* u = deep + slot * dim;
    uint8_t* row = rows + slot * row_bytes;
    if (next < layout.n_kept && kept[next] == slot) {
      convert(v, Dtype::kF32, row, dtype_of(codec), dim);
      convert(u, Dtype::kF32, params + layout.row(next), dtype_of(codec), dim);
      put_factor(layout, PairSide::kShallow, slot, 1, params);
      put_factor(layout, PairSide::kDeep, slot, 1, params);
      ++next;
      continue;
    }
    const Token& token = tokens[slot];
    std::array<float, kMaxHeadDim> e{};
    if (token.shallow_length != 0 || token.deep_length != 0) {
      share_direction(v, u, dim, token, double{t}, e.data());
    }
    convert(e.data(), Dtype::kF32, row, dtype_of(codec), dim);
    convert(row, dtype_of(codec), e.data(), Dtype::kF32, dim);
    const double length = length_of(e.data(), dim);
    put_factor(layout, PairSide::kShallow, slot,
               token.shallow_length == 0 ? 0 : token.shallow_length / length, params);
    put_factor(layout, PairSide::kDeep, slot,
               token.deep_length == 0 ? 0 : token.deep_length / length, params);
  }
  return true;
}

bool encode_pair_head(const KvPlane& shallow, const KvPlane& deep, const KvPlane& to, uint32_t head,
                      uint32_t dim, float t, float* scratch) {
  const Codec& codec = codec_of(to.codec);
  KVM_ASSERT(shallow.codec == codec.tail && deep.codec == codec.tail);
  const uint64_t n = uint64_t{kPageTokens} * dim;
  convert(row_at(shallow, dim, head, 0), dtype_of(codec), scratch, Dtype::kF32, n);
  convert(row_at(deep, dim, head, 0), dtype_of(codec), scratch + n, Dtype::kF32, n);
  return encode_pair(codec, scratch, scratch + n, dim, t,
                     const_cast<uint8_t*>(row_at(to, dim, head, 0)),
                     const_cast<uint16_t*>(params_at(to, dim, head)));
}

void decode_pair(const Codec& codec, const uint8_t* rows, const uint16_t* params, uint32_t row_dim,
                 uint32_t slot, uint32_t n_tokens, uint32_t n, float* out) {
  const PairLayout layout(codec, row_dim);
  const uint64_t row_bytes = codec.row_bytes(row_dim);
  for (uint32_t t = 0; t < n_tokens; ++t) {
    float* row = out + uint64_t{t} * n;
    convert(rows + t * row_bytes, dtype_of(codec), row, Dtype::kF32, n);
    const float factor = factor_at(layout, codec.side, slot + t, params);
    for (uint32_t i = 0; i < n; ++i) {
      row[i] *= factor;
    }
  }
  for (uint32_t i = 0; codec.side == PairSide::kDeep && i < layout.n_kept; ++i) {
    // Unsigned: what comes before the first is far away, too.
    const uint32_t t = params[PairLayout::slots() + i] - slot;
    if (t < n_tokens) {
      convert(params + layout.row(i), dtype_of(codec), out + uint64_t{t} * n, Dtype::kF32, n);
    }
  }
}

}  // namespace kvm::codecs
