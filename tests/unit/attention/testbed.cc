// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/attention/testbed.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/exact/exact.h"
#include "attention/exact/exact_args.h"
#include "codecs/codec.h"
#include "codecs/convert.h"
#include "codecs/gear.h"
#include "codecs/rows.h"

namespace kvm::attention::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

size_t pick(std::mt19937_64& random, size_t n) {
  return std::uniform_int_distribution<size_t>(0, n - 1)(random);
}

float round_to(Dtype dtype, float value) {
  uint32_t bits = 0;
  put(&bits, dtype, 0, value);
  return get(&bits, dtype, 0);
}

// Of rows that are scaled by channel: those of every page are alike.
float channel_scale(uint32_t channel) {
  return bf16_to_f32(f32_to_bf16(0.01f * static_cast<float>(1 + channel % 7)));
}

// A Grid says what the codes of a row mean whose parameters are those of its page: numbers by
// position and channel that need no other row.
class Grid {
 public:
  Grid(CodecId codec, uint64_t position, uint32_t dim)
      : codec_(codecs::codec_of(codec)),
        position_(position),
        dim_(dim),
        step_(codec_.is_low_bits() ? 0.32f / static_cast<float>(codec_.last_code()) : 0.01f) {}

  float scale(uint32_t channel) const {
    if (!codec_.is_low_bits()) {
      return channel_scale(channel);
    }
    return round_to(Dtype::kBf16, step_ * static_cast<float>(1 + at(channel) % 7));
  }
  float zero(uint32_t channel) const {
    if (!codec_.is_low_bits()) {
      return 0.0f;
    }
    const float middle = 0.3f + 0.1f * static_cast<float>(at(channel) % 5);
    return round_to(Dtype::kBf16, -middle * scale(channel) * static_cast<float>(last()));
  }
  float mean(uint32_t channel) const {
    return is_centred() ? 0.25f * static_cast<float>((page() + channel) % 9) - 1.0f : 0.0f;
  }
  float factor(uint32_t channel) const {
    return codec_.is_balanced ? 0.5f + 0.25f * static_cast<float>((page() + channel) % 11) : 1.0f;
  }
  // Of GEAR's low-rank part.
  float a(uint32_t k) const {
    return round_to(Dtype::kBf16, 0.25f * static_cast<float>((3 * position_ + k) % 5) - 0.6f);
  }
  float b(uint32_t k, uint32_t channel) const {
    return round_to(Dtype::kBf16, 0.1f * static_cast<float>((page() + 2 * channel + k) % 7) - 0.3f);
  }
  // Of an outlier of a token's, or a channel's: the channel, or the slot, that it lies in.
  uint32_t place_in_token(uint32_t side) const {
    return static_cast<uint32_t>((7 * position_ + side * (dim_ / 2)) % dim_);
  }
  uint32_t place_in_channel(uint32_t channel, uint32_t side) const {
    return static_cast<uint32_t>((5 * channel + page() + 31 * side) % kPageTokens);
  }
  float delta(uint32_t vector, uint32_t side) const {
    return (side == 0 ? 2.0f : -1.5f) + 0.25f * static_cast<float>(vector % 3);
  }
  // What is added to codes.
  float added(uint32_t channel) const {
    float sum = 0.0f;
    for (uint32_t k = 0; k < codec_.rank; ++k) {
      sum += a(k) * b(k, channel);
    }
    const auto slot = static_cast<uint32_t>(position_ % kPageTokens);
    for (uint32_t side = 0; side < 2 * codec_.outliers; ++side) {
      if (is_by_token() ? place_in_token(side) == channel
                        : place_in_channel(channel, side) == slot) {
        sum += delta(is_by_token() ? slot : channel, side);
      }
    }
    return sum;
  }
  bool is_by_token() const { return codec_.group_params != 0; }
  bool is_centred() const {
    return is_by_token() && codec_.channel_params != 0 && !codec_.is_balanced;
  }
  long code(uint32_t channel, float x) const {
    const long first = codec_.is_low_bits() ? 0 : -127;
    const float rest = x / factor(channel) - mean(channel) - zero(channel) - added(channel);
    const long code = std::lrint(rest / scale(channel));
    return std::clamp(code, first, last());
  }
  float value(uint32_t channel, float x) const {
    const float value = static_cast<float>(code(channel, x)) * scale(channel) + zero(channel);
    return is_centred()         ? value + mean(channel)
           : codec_.is_balanced ? value * factor(channel)
           : codec_.is_gear()   ? value + added(channel)
                                : value;
  }

 private:
  uint64_t page() const { return position_ / kPageTokens; }
  // What parameters go by: the token and 64 channels of it, or the page and the channel.
  uint64_t at(uint32_t channel) const {
    return is_by_token() ? position_ + channel / codecs::Codec::kGroupChannels : page() + channel;
  }
  long last() const { return codec_.is_low_bits() ? long{codec_.last_code()} : 127; }

  const codecs::Codec& codec_;
  uint64_t position_;
  uint32_t dim_;
  float step_;
};

// The elements of a codec that is not scaled.
Dtype element_of(CodecId codec) {
  return codec == CodecId::kF32 ? Dtype::kF32 : codec == CodecId::kF16 ? Dtype::kF16 : Dtype::kBf16;
}

// Of what Shape::uneven says.
void make_uneven(std::vector<float>* row, bool is_v, std::mt19937_64& random) {
  constexpr float kSizes[] = {1.0f, 0.0f, 0x1p-125f, 1e-30f, 1e-3f, 1e4f, 1e30f};
  const float size = kSizes[random() % (is_v ? 7 : 5)];
  const bool flat = random() % 3 == 0;
  for (float& x : *row) {
    x = size * (flat ? std::copysign(1.0f, x) : x);
  }
}

// A random row as it is stored.
std::vector<float> random_row(const Shape& shape, bool is_v, CodecId codec, uint64_t position,
                              std::mt19937_64& random) {
  const uint32_t dim = is_v ? shape.dim_v : shape.dim_k;
  std::normal_distribution<float> normal;
  std::vector<float> row(dim);
  for (float& x : row) {
    x = normal(random);
  }
  if (shape.flat && !is_v) {
    std::fill(row.begin(), row.end(), 1.0f);
  }
  if (shape.outliers) {
    row[0] = std::copysign(1e5f, row[0]);
  }
  if (shape.uneven) {
    make_uneven(&row, is_v, random);
  }
  if (!codecs::codec_of(codec).has_kernels()) {
    const Grid grid(codec, position, dim);
    for (uint32_t d = 0; d < dim; ++d) {
      row[d] = grid.value(d, row[d]);
    }
    return row;
  }
  if (codecs::codec_of(codec).is_scaled()) {
    std::vector<uint8_t> stored(dim);
    const uint16_t scale = codecs::encode_row(row.data(), dim, codec, stored.data());
    codecs::decode_row(stored.data(), codec, &scale, 0, dim, row.data());
    return row;
  }
  for (float& x : row) {
    x = round_to(element_of(codec), x);
  }
  return row;
}

// Stores a row with the codes of a grid. params: of the row's head.
void put_codes(std::byte* stored, uint16_t* params, CodecId id, uint64_t position,
               const std::vector<float>& row) {
  const codecs::Codec& codec = codecs::codec_of(id);
  const auto dim = static_cast<uint32_t>(row.size());
  const Grid grid(id, position, dim);
  std::fill_n(stored, codec.row_bytes(dim), std::byte{0});
  const uint32_t n_groups = codec.n_groups(dim);
  uint16_t* own = params + position % kPageTokens * n_groups * 2;
  uint16_t* channels = params + (grid.is_by_token() ? kPageTokens * n_groups * 2 : 0);
  for (uint32_t d = 0; d < dim; ++d) {
    const uint32_t bit = d * codec.bits();
    const auto code = static_cast<uint32_t>(grid.code(d, row[d])) & 0xffu;
    stored[bit / 8] |= static_cast<std::byte>(code << bit % 8);
    if (bit % 8 + codec.bits() > 8) {
      stored[bit / 8 + 1] |= static_cast<std::byte>(code >> (8 - bit % 8));
    }
    if (grid.is_by_token()) {
      own[d / codecs::Codec::kGroupChannels * 2] = f32_to_bf16(grid.scale(d));
      own[d / codecs::Codec::kGroupChannels * 2 + 1] = f32_to_bf16(grid.zero(d));
    }
    if (codec.is_balanced) {
      channels[d] = f32_to_bf16(grid.factor(d));
    } else if (grid.is_centred()) {
      channels[d] = f32_to_bf16(grid.mean(d));
    } else if (!grid.is_by_token()) {
      channels[d] = f32_to_bf16(grid.scale(d));
      if (codec.channel_params > 1) {
        channels[dim + d] = f32_to_bf16(grid.zero(d));
      }
    }
  }
}

// What GEAR has beside codes, of a whole page: what is of other tokens is read with it.
void put_gear(uint16_t* params, CodecId id, uint64_t page, uint32_t dim) {
  const codecs::Codec& codec = codecs::codec_of(id);
  const codecs::GearLayout layout(codec, dim);
  for (uint32_t slot = 0; slot < kPageTokens; ++slot) {
    const Grid grid(id, page * kPageTokens + slot, dim);
    for (uint32_t k = 0; k < codec.rank; ++k) {
      params[layout.a + slot * codec.rank + k] = f32_to_bf16(grid.a(k));
    }
  }
  const Grid grid(id, page * kPageTokens, dim);
  for (uint32_t k = 0; k < codec.rank; ++k) {
    for (uint32_t d = 0; d < dim; ++d) {
      params[layout.b + k * dim + d] = f32_to_bf16(grid.b(k, d));
    }
  }
  for (uint32_t vector = 0; codec.outliers != 0 && vector < layout.n_vectors; ++vector) {
    const Grid own(id, page * kPageTokens + vector % kPageTokens, dim);
    uint16_t places[2] = {};
    for (const uint32_t side : {0u, 1u}) {
      params[layout.deltas(0, side) + vector] = f32_to_bf16(grid.delta(vector, side));
      const uint32_t place =
          layout.by_channel ? grid.place_in_channel(vector, side) : own.place_in_token(side);
      uint16_t& stored = places[layout.by_channel ? 0 : side];
      stored = static_cast<uint16_t>(stored | place << layout.place_bit(side));
      params[layout.places(0, side) + vector] = stored;
    }
  }
}

// Stores it as row `at` of a plane.
void put_row(std::byte* plane, uint16_t* scales, CodecId codec, uint64_t at,
             const std::vector<float>& row) {
  const auto dim = static_cast<uint32_t>(row.size());
  if (codecs::codec_of(codec).is_scaled()) {
    scales[at] = codecs::encode_row(row.data(), dim, codec, plane + at * dim);
    return;
  }
  for (uint32_t d = 0; d < dim; ++d) {
    put(plane, codec, at * dim + d, row[d]);
  }
}

}  // namespace

void put(void* p, Dtype dtype, uint64_t i, float value) {
  if (dtype == Dtype::kF32) {
    static_cast<float*>(p)[i] = value;
  } else {
    static_cast<uint16_t*>(p)[i] = dtype == Dtype::kF16 ? f32_to_f16(value) : f32_to_bf16(value);
  }
}

float get(const void* p, Dtype dtype, uint64_t i) {
  if (dtype == Dtype::kF32) {
    return static_cast<const float*>(p)[i];
  }
  const uint16_t bits = static_cast<const uint16_t*>(p)[i];
  return dtype == Dtype::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

void put(void* p, CodecId codec, uint64_t i, float value) { put(p, element_of(codec), i, value); }

float get(const void* p, CodecId codec, uint64_t i) { return get(p, element_of(codec), i); }

bool spoil_row(const KvPlane& plane, uint32_t dim, uint32_t head, uint64_t slot, uint32_t channel,
               float value) {
  if (!codecs::codec_of(plane.codec).has_kernels()) {
    return false;
  }
  if (const uint16_t* scale = codecs::row_scale_at(plane, head, slot)) {
    *const_cast<uint16_t*>(scale) = 0x7fc0;
    return true;
  }
  put(const_cast<uint8_t*>(codecs::row_at(plane, dim, head, slot)), plane.codec, channel % dim,
      value);
  return true;
}

Case::Case(const Shape& shape, uint64_t seed) : shape_(shape), random_(seed) {
  const uint32_t rows = shape.n_query * shape.group;
  std::normal_distribution<float> normal;
  q_.resize(size_t{rows} * shape.dim_k);
  for (float& x : q_) {
    x = shape.flat ? 1.0f : round_to(shape.dtype_q, normal(random_) * shape.q_size);
  }
  for (uint32_t row = 0; shape.outliers && row < rows; ++row) {
    q_[size_t{row} * shape.dim_k] = 0.0f;
  }
  Problem& p = problem_;
  p.dtype_q = shape.dtype_q;
  p.n_query = shape.n_query;
  p.group = shape.group;
  p.dim_k = shape.dim_k;
  p.dim_v = shape.dim_v;
  p.v_in_k = shape.v_in_k;
  p.head = shape.head;
  p.scale = 1.0f / std::sqrt(static_cast<float>(shape.dim_k));
  p.dtype_o = shape.dtype_o;
  p.visible.query_position =
      shape.first_position + shape.n_tokens - std::min<uint64_t>(shape.n_tokens, shape.n_query);
  kinds.resize(shape.n_tokens);
  present.assign(shape.n_tokens, 1);
}

void Case::add_transform(bool rotate, RotationLayout layout, bool scale) {
  const auto table = [&](uint32_t n, auto fill) {
    tables_.push_back(std::make_unique<std::vector<float>>(n));
    std::generate(tables_.back()->begin(), tables_.back()->end(), fill);
    return tables_.back()->data();
  };
  std::normal_distribution<float> normal;
  QueryTransform t;
  if (rotate) {
    const uint32_t pairs = shape_.dim_k / 2 - static_cast<uint32_t>(pick(random_, 3));
    t.n_pairs = pairs;
    t.layout = layout;
    const float* angle = table(pairs, [&] { return normal(random_); });
    uint32_t i = 0;
    t.cos = table(pairs, [&] { return std::cos(angle[i++]); });
    i = 0;
    t.sin = table(pairs, [&] { return std::sin(angle[i++]); });
  }
  if (scale) {
    t.channel_scale = table(shape_.dim_k, [&] { return 0.5f + std::abs(normal(random_)); });
  }
  transforms.push_back(t);
}

void Case::use_sinks() {
  std::normal_distribution<float> normal;
  sinks_.resize(shape_.group);
  for (float& s : sinks_) {
    s = normal(random_) * 3.0f;
  }
  sinks_[0] = kInf * -1.0f;
  problem_.sink_logits = sinks_.data();
}

// The slopes of ALiBi, of which the last, the flattest, rises instead.
void Case::use_slopes() {
  slopes_.resize(shape_.group);
  for (uint32_t g = 0; g < shape_.group; ++g) {
    slopes_[g] = std::exp2(-8.0f * static_cast<float>(g + 1) / static_cast<float>(shape_.group));
  }
  slopes_.back() *= -1.0f;
  problem_.slopes = slopes_.data();
}

void Case::use_tree(double density) {
  const uint32_t words = shape_.n_query / 64 + 1;
  tree_.assign(size_t{words} * shape_.n_query, 0);
  std::bernoulli_distribution coin(density);
  for (uint32_t i = 0; i < shape_.n_query; ++i) {
    for (uint32_t j = 0; j < shape_.n_query; ++j) {
      if (j == i || coin(random_)) {
        tree_[size_t{i} * words + j / 64] |= uint64_t{1} << (j % 64);
      }
    }
  }
  problem_.visible.tree = tree_.data();
  problem_.visible.tree_stride_words = words;
}

void Case::use_ranges(bool include, int n) {
  std::vector<uint64_t> ends;
  for (int i = 0; i < 2 * n; ++i) {
    ends.push_back(shape_.first_position + pick(random_, shape_.n_tokens + 100));
  }
  std::sort(ends.begin(), ends.end());
  std::vector<PositionRange>& ranges = include ? include_ : exclude_;
  for (int i = 0; i < n; ++i) {
    ranges.push_back({ends[static_cast<size_t>(2 * i)], ends[static_cast<size_t>(2 * i + 1)]});
  }
}

void Case::cut_runs(int extra_cuts) {
  std::vector<uint8_t> cut(shape_.n_tokens + 1, 0);
  for (int i = 0; i < extra_cuts && shape_.n_tokens > 0; ++i) {
    cut[pick(random_, shape_.n_tokens)] = 1;
  }
  runs_.clear();
  for (uint64_t t = 0; t < shape_.n_tokens; ++t) {
    if (present[t] == 0) {
      continue;
    }
    const uint64_t position = shape_.first_position + t;
    const uint64_t page = position / kPageTokens - shape_.first_position / kPageTokens;
    const uint64_t slot = position % kPageTokens;
    const TokenKind& kind = kinds[t];
    const bool joins = t > 0 && cut[t] == 0 && present[t - 1] != 0 && slot != 0 &&
                       kinds[t - 1].codec_k == kind.codec_k &&
                       kinds[t - 1].codec_v == kind.codec_v &&
                       kinds[t - 1].transform == kind.transform;
    if (joins) {
      ++runs_.back().n_tokens;
      continue;
    }
    // Every kind of token has room of its own in a page's buffers, which are large enough for fp32.
    KvRun run;
    run.position = position;
    run.n_tokens = 1;
    run.slot = static_cast<uint32_t>(slot);
    run.transform = kind.transform;
    const size_t plane = size_t{shape_.heads} * kPageTokens;
    const auto plane_of = [&](const Buffer& rows, CodecId codec, uint32_t dim,
                              const uint16_t* scales, PageParams& params) {
      const codecs::Scaling scaling = codecs::codec_of(codec).scaling;
      return KvPlane{rows.data() + rooms_.at(codec) * plane * dim * 4,
                     scaling == codecs::Scaling::kRow    ? scales
                     : scaling == codecs::Scaling::kPage ? params.of(codec)
                                                         : nullptr,
                     codec};
    };
    const auto* scales = reinterpret_cast<const uint16_t*>(pages_s_[page]->data());
    run.k = plane_of(*pages_k_[page], kind.codec_k, shape_.dim_k, scales, params_k_[page]);
    run.v = shape_.v_in_k ? run.k
                          : plane_of(*pages_v_[page], kind.codec_v, shape_.dim_v, scales + plane,
                                     params_v_[page]);
    if (!log_weights.empty()) {
      run.log_weight = reinterpret_cast<const float*>(pages_w_[page]->data()) + slot;
    }
    runs_.push_back(run);
  }
  problem_.runs = runs_;
}

void Case::store(int extra_cuts) {
  const Shape& s = shape_;
  const uint64_t n_pages =
      (end_position() + kPageTokens - 1) / kPageTokens - s.first_position / kPageTokens + 1;
  const size_t plane = size_t{s.heads} * kPageTokens;
  const auto allocate = [&](auto& pages, size_t bytes) {
    pages.clear();
    for (uint64_t i = 0; i < n_pages; ++i) {
      pages.push_back(std::make_unique<Buffer>(bytes));
      // What no token owns must never be used: all ones is NaN in every codec.
      std::fill_n(pages.back()->data(), bytes, std::byte{0xff});
    }
    std::shuffle(pages.begin(), pages.end(), random_);
  };
  // Every codec has its own room.
  for (const TokenKind& kind : kinds) {
    rooms_.try_emplace(kind.codec_k, rooms_.size());
    rooms_.try_emplace(kind.codec_v, rooms_.size());
  }
  allocate(pages_k_, plane * s.dim_k * 4 * rooms_.size());
  allocate(pages_v_, plane * s.dim_v * 4 * rooms_.size());
  allocate(pages_s_, plane * 4);
  allocate(pages_w_, kPageTokens * sizeof(float));
  params_k_.assign(n_pages, PageParams(s.heads, s.dim_k));
  params_v_.assign(n_pages, PageParams(s.heads, s.dim_v));
  if (tokens_.empty()) {
    for (uint64_t t = 0; t < s.n_tokens; ++t) {
      const uint64_t position = s.first_position + t;
      std::vector<float> k = random_row(s, false, kinds[t].codec_k, position, random_);
      std::vector<float> v = s.v_in_k ? std::vector<float>(k.begin(), k.begin() + s.dim_v)
                                      : random_row(s, true, kinds[t].codec_v, position, random_);
      tokens_.push_back({std::move(k), std::move(v)});
    }
  }
  for (uint64_t t = 0; t < s.n_tokens; ++t) {
    if (present[t] == 0) {
      continue;
    }
    const uint64_t position = s.first_position + t;
    const uint64_t page = position / kPageTokens - s.first_position / kPageTokens;
    const uint64_t row = uint64_t{s.head} * kPageTokens + position % kPageTokens;
    std::byte* k = pages_k_[page]->data() + rooms_.at(kinds[t].codec_k) * plane * s.dim_k * 4;
    std::byte* v = pages_v_[page]->data() + rooms_.at(kinds[t].codec_v) * plane * s.dim_v * 4;
    auto* scales = reinterpret_cast<uint16_t*>(pages_s_[page]->data());
    const auto put = [&](std::byte* rows, CodecId codec, uint16_t* row_scales, PageParams& params,
                         const std::vector<float>& values) {
      if (codecs::codec_of(codec).has_kernels()) {
        put_row(rows, row_scales, codec, row, values);
        return;
      }
      const auto dim = static_cast<uint32_t>(values.size());
      uint16_t* own = params.of(codec) + s.head * codecs::codec_of(codec).n_scales(dim);
      put_codes(rows + row * codecs::codec_of(codec).row_bytes(dim), own, codec, position, values);
      if (codecs::codec_of(codec).is_gear()) {
        put_gear(own, codec, position / kPageTokens, dim);
      }
    };
    put(k, kinds[t].codec_k, scales, params_k_[page], tokens_[t].k);
    if (!s.v_in_k) {
      put(v, kinds[t].codec_v, scales + plane, params_v_[page], tokens_[t].v);
    }
    if (!log_weights.empty()) {
      reinterpret_cast<float*>(pages_w_[page]->data())[position % kPageTokens] = log_weights[t];
    }
  }
  problem_.transforms = transforms;
  problem_.visible.include = include_;
  problem_.visible.exclude = exclude_;
  cut_runs(extra_cuts);
}

void Case::store_v_in_k(bool v_in_k) {
  shape_.v_in_k = problem_.v_in_k = v_in_k;
  store(0);
}

void Case::run(const KernelTable* table, int pieces, int row_pieces) {
  Problem& p = problem_;
  const uint32_t rows = p.n_query * p.group;
  // Strides with gaps, heads first.
  p.q_stride_head = p.dim_k + 8;
  p.q_stride_query = p.q_stride_head * p.group + 16;
  q_stored_.assign((p.n_query * p.q_stride_query + 1) * 4, std::byte{0xff});
  for (uint32_t row = 0; row < rows; ++row) {
    const uint64_t at = row / p.group * p.q_stride_query + row % p.group * p.q_stride_head;
    for (uint32_t d = 0; d < p.dim_k; ++d) {
      put(q_stored_.data(), p.dtype_q, at + d, q_[size_t{row} * p.dim_k + d]);
    }
  }
  p.q = q_stored_.data();
  p.o_stride_query = p.dim_v;
  p.o_stride_head = uint64_t{p.dim_v} * p.n_query + 8;
  o_stored_.assign((p.o_stride_head * p.group + 1) * 4, std::byte{0});
  p.o = o_stored_.data();
  p.lse_stride_query = p.group;
  p.lse_stride_head = 1;
  lse.assign(rows, 0.0f);
  p.lse = lse.data();
  column_sums.assign(shape_.n_tokens, -1.0f);
  p.wants_column_sums = wants_column_sums;
  p.column_sums = column_sums.data();
  p.column_position = shape_.first_position;

  plan = make_plan(p, table);
  Buffer prepared(plan.prepared_bytes);
  Buffer scratch(plan.scratch_bytes);
  prepare_queries(p, plan, prepared.data());
  if (!plan.rows_divisible) {
    row_pieces = 1;
  }
  const auto part = [](uint32_t n, int i, int of) {
    return static_cast<uint32_t>(uint64_t{n} * static_cast<uint64_t>(i) /
                                 static_cast<uint64_t>(of));
  };
  for (int rp = 0; rp < row_pieces; ++rp) {
    const uint32_t first = part(rows, rp, row_pieces);
    const RowRange range{first, part(rows, rp + 1, row_pieces) - first};
    if (range.count == 0) {
      continue;
    }
    const size_t stride = state_bytes(p, range.count);
    Buffer states(stride * std::max(plan.n_chunks, 1u));
    std::vector<int> order(static_cast<size_t>(pieces));
    for (int i = 0; i < pieces; ++i) {
      order[static_cast<size_t>(i)] = i;
    }
    std::shuffle(order.begin(), order.end(), random_);
    for (int i : order) {
      const uint32_t a = part(plan.n_chunks, i, pieces);
      const uint32_t b = part(plan.n_chunks, i + 1, pieces);
      if (a < b) {
        eval_chunks(p, plan, prepared.data(), range, plan.first_chunk + a, b - a, scratch.data(),
                    states.data() + a * stride);
      }
    }
    merge_chunks(p, plan, range, states.data());
  }
  if (plan.n_chunks > 0 && wants_column_sums) {
    // In as many stretches as chunks, in any order, and reaching beyond the plan's.
    const uint64_t blocks =
        (plan.first_chunk + plan.n_chunks) * plan.chunk_tokens / kPageTokens + 1;
    std::vector<uint64_t> cuts = {0, blocks * kPageTokens};
    for (int i = 1; i < pieces; ++i) {
      cuts.push_back(random_() % (blocks + 1) * kPageTokens);
    }
    std::sort(cuts.begin(), cuts.end());
    for (size_t i = cuts.size(); i-- > 1;) {
      eval_column_sums(p, plan, prepared.data(), cuts[i - 1], cuts[i], scratch.data());
    }
  }
  read_results();
}

void Case::run_item(const KernelTable* table, uint32_t first, uint32_t count, uint32_t item_rows) {
  Problem p = problem_;
  std::vector<QueryTransform> turned(p.transforms.begin(), p.transforms.end());
  for (QueryTransform& t : turned) {
    t.cos = t.cos == nullptr ? nullptr : t.cos + first * t.token_stride;
    t.sin = t.sin == nullptr ? nullptr : t.sin + first * t.token_stride;
  }
  p.transforms = turned;
  p.q = static_cast<const std::byte*>(p.q) + first * p.q_stride_query * dtype_size_bytes(p.dtype_q);
  p.n_query = count;
  p.item_rows = item_rows;
  if (p.visible.tree == nullptr) {
    p.visible.query_position += first;
  }
  p.o = static_cast<std::byte*>(p.o) + first * p.o_stride_query * dtype_size_bytes(p.dtype_o);
  p.lse += first * p.lse_stride_query;
  p.wants_column_sums = false;
  const Plan own = make_plan(p, table);
  const Buffer prepared(own.prepared_bytes);
  const Buffer scratch(own.scratch_bytes);
  prepare_queries(p, own, prepared.data());
  const RowRange all{0, own.rows};
  const Buffer states(state_bytes(p, own.rows) * std::max(own.n_chunks, 1u));
  if (own.n_chunks > 0) {
    eval_chunks(p, own, prepared.data(), all, own.first_chunk, own.n_chunks, scratch.data(),
                states.data());
  }
  merge_chunks(p, own, all, states.data());
  read_results();
}

void Case::read_results() {
  const Problem& p = problem_;
  const uint32_t rows = p.n_query * p.group;
  o.resize(size_t{rows} * p.dim_v);
  for (uint32_t row = 0; row < rows; ++row) {
    const uint64_t at = row / p.group * p.o_stride_query + row % p.group * p.o_stride_head;
    for (uint32_t d = 0; d < p.dim_v; ++d) {
      o[size_t{row} * p.dim_v + d] = get(o_stored_.data(), p.dtype_o, at + d);
    }
  }
}

bool Case::sees(uint32_t query, uint64_t position) const {
  const Visibility& v = problem_.visible;
  const uint64_t at = v.query_position + query;
  if (v.tree != nullptr) {
    if (position >= v.query_position) {
      const uint64_t j = position - v.query_position;
      if (j >= problem_.n_query ||
          (v.tree[uint64_t{query} * v.tree_stride_words + j / 64] >> (j % 64) & 1) == 0) {
        return false;
      }
    }
  } else if (v.causal && position > at) {
    return false;
  }
  if (v.window != 0 && position + v.window <= at && position >= v.sinks) {
    return false;
  }
  const auto inside = [position](const PositionRange& r) {
    return position >= r.begin && position < r.end;
  };
  if (!v.include.empty() && std::none_of(v.include.begin(), v.include.end(), inside)) {
    return false;
  }
  return std::none_of(v.exclude.begin(), v.exclude.end(), inside);
}

std::vector<double> Case::transformed(uint32_t row, uint32_t transform) const {
  const float* q = q_.data() + size_t{row} * shape_.dim_k;
  std::vector<double> out(q, q + shape_.dim_k);
  if (transforms.empty()) {
    return out;
  }
  const QueryTransform& t = transforms[transform];
  for (uint32_t i = 0; i < t.n_pairs; ++i) {
    const bool interleaved = t.layout == RotationLayout::kInterleaved;
    double& x = out[interleaved ? 2 * i : i];
    double& y = out[interleaved ? 2 * i + 1 : i + t.n_pairs];
    const double c = static_cast<double>(t.cos[i]);
    const double s = static_cast<double>(t.sin[i]);
    const double rotated_x = x * c - y * s;
    y = x * s + y * c;
    x = rotated_x;
  }
  for (uint32_t d = 0; t.channel_scale != nullptr && d < shape_.dim_k; ++d) {
    out[d] *= static_cast<double>(t.channel_scale[d]);
  }
  return out;
}

double Case::logit(uint32_t row, uint64_t token) const {
  const std::vector<double> q = transformed(row, kinds[token].transform);
  double dot = 0.0;
  for (uint32_t d = 0; d < shape_.dim_k; ++d) {
    dot += q[d] * static_cast<double>(tokens_[token].k[d]);
  }
  double x = dot * static_cast<double>(problem_.scale);
  if (problem_.softcap != 0.0f) {
    const double cap = static_cast<double>(problem_.softcap);
    x = cap * std::tanh(x / cap);
  }
  if (problem_.slopes != nullptr) {
    const uint64_t p = problem_.visible.query_position + row / problem_.group;
    const auto behind = static_cast<int64_t>(shape_.first_position + token - p);
    x += static_cast<double>(slopes_[row % problem_.group]) * static_cast<double>(behind);
  }
  return log_weights.empty() ? x : x + static_cast<double>(log_weights[token]);
}

void Case::run_reference() {
  const uint32_t rows = problem_.n_query * problem_.group;
  const uint32_t dim = shape_.dim_v;
  ref_o.assign(size_t{rows} * dim, 0.0);
  ref_abs.assign(size_t{rows} * dim, 0.0);
  ref_lse.assign(rows, -kInf);
  ref_column_sums.assign(shape_.n_tokens, 0.0);
  std::vector<double> logits(shape_.n_tokens);
  for (uint32_t row = 0; row < rows; ++row) {
    double top = -kInf;
    for (uint64_t t = 0; t < shape_.n_tokens; ++t) {
      const bool seen = present[t] != 0 && sees(row / problem_.group, shape_.first_position + t);
      logits[t] = seen ? logit(row, t) : -kInf;
      top = std::max(top, logits[t]);
    }
    const double sink = problem_.sink_logits != nullptr
                            ? static_cast<double>(problem_.sink_logits[row % problem_.group])
                            : -kInf;
    const double reference = std::max(top, sink);
    if (reference == -kInf) {
      continue;
    }
    double sum = std::exp(sink - reference);
    for (double x : logits) {
      sum += std::exp(x - reference);
    }
    ref_lse[row] = reference + std::log(sum);
    for (uint64_t t = 0; t < shape_.n_tokens; ++t) {
      const double w = std::exp(logits[t] - reference) / sum;
      ref_column_sums[t] += w;
      for (uint32_t d = 0; w > 0.0 && d < dim; ++d) {
        const double term = w * static_cast<double>(tokens_[t].v[d]);
        ref_o[size_t{row} * dim + d] += term;
        ref_abs[size_t{row} * dim + d] += std::abs(term);
      }
    }
  }
}

double Case::error_o() const {
  // Half of the smallest F16: what rounding to it may change, however small a number is. Beside a
  // sink that is far above all tokens, weights below the smallest normal number are 0, of values
  // that are no larger than 2^6.
  const double least = shape_.dtype_o == Dtype::kF16 ? 0x1p-25 : 0x1p-120;
  const uint32_t rows = problem_.n_query * problem_.group;
  const uint32_t dim = shape_.dim_v;
  double worst = 0.0;
  for (uint32_t row = 0; row < rows; ++row) {
    double difference = 0.0;
    double size = 0.0;
    for (uint32_t d = 0; d < dim; ++d) {
      const size_t i = size_t{row} * dim + d;
      const double off = std::abs(static_cast<double>(o[i]) - ref_o[i]);
      const double e = off <= least ? 0.0 : off;  // NaN stays
      difference += e * e;
      size += ref_abs[i] * ref_abs[i];
    }
    const double error =
        size > 0.0 ? std::sqrt(difference / size) : (difference == 0.0 ? 0.0 : kInf);
    worst = std::isnan(error) ? kInf : std::max(worst, error);
  }
  return worst;
}

double Case::error_lse() const {
  double worst = 0.0;
  for (size_t row = 0; row < ref_lse.size(); ++row) {
    const double got = static_cast<double>(lse[row]);
    if (ref_lse[row] == -kInf || got == -kInf) {
      worst = ref_lse[row] == got ? worst : kInf;
      continue;
    }
    const double error = std::abs(got - ref_lse[row]) / std::max(1.0, std::abs(ref_lse[row]));
    worst = std::isnan(error) ? kInf : std::max(worst, error);
  }
  return worst;
}

namespace {

// What words add to the errors of logits and results (exact.h); 0 where none are used.
double words_error(const Case& c, const KernelTable& table) {
  const auto is_codes = [](CodecId id) { return codecs::codec_of(id).is_low_bits(); };
  const bool any_codes = std::any_of(c.kinds.begin(), c.kinds.end(), [&](const TokenKind& k) {
    return is_codes(k.codec_k) || is_codes(k.codec_v);
  });
  if (any_codes && table.exact->reads_codes && !c.plan.blocked) {
    return kErrorI8Words;
  }
  const bool any_i8 = std::any_of(c.kinds.begin(), c.kinds.end(), [](const TokenKind& k) {
    return k.codec_k == CodecId::kI8 || k.codec_v == CodecId::kI8;
  });
  return table.has_bf16_dot && any_i8 ? kErrorI8Words : 0.0;
}

}  // namespace

double error_bound(const Case& c, const KernelTable& table) {
  const bool blocked = c.plan.blocked;  // there, bf16 weights meet int8 rows as well
  const bool any_bf16 = std::any_of(c.kinds.begin(), c.kinds.end(), [&](const TokenKind& k) {
    return k.codec_v == CodecId::kBf16 || k.codec_v == CodecId::kF8 ||
           (blocked && k.codec_v == CodecId::kI8);
  });
  double bound = kErrorFp32;
  if (table.has_bf16_dot && any_bf16 && !c.problem().fp32_weights) {
    bound += kErrorBf16Weights;
  }
  bound += words_error(c, table);
  if (c.shape().dtype_o == Dtype::kBf16) {
    bound += kErrorBf16Output;
  } else if (c.shape().dtype_o == Dtype::kF16) {
    bound += kErrorF16Output;
  }
  return bound;
}

constexpr Dtype kQueryDtypes[] = {Dtype::kF32, Dtype::kF16, Dtype::kBf16};
std::unique_ptr<Case> random_case(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](uint32_t n) {
    return std::uniform_int_distribution<uint32_t>(0, n - 1)(random);
  };
  Shape s;
  s.n_query = pick(3) == 0 ? 1 : 1 + pick(pick(2) == 0 ? 4 : 40);
  s.group = pick(2) == 0 ? 1 + pick(pick(4) == 0 ? kMaxGroup : 16) : 4;
  s.n_query = std::min(s.n_query, std::max(1u, 640 / s.group));  // for the reference's sake
  const uint32_t n_dims = pick(12) == 0 ? kMaxHeadDim / 8 : 32;
  s.dim_k = pick(2) == 0 ? 64 : 8 * (1 + pick(n_dims));
  s.v_in_k = pick(4) == 0;
  s.dim_v = pick(2) == 0 ? s.dim_k : 8 * (1 + pick(s.v_in_k ? s.dim_k / 8 : n_dims));
  s.n_tokens = pick(4) == 0 ? pick(1500) : pick(300);
  s.first_position = pick(3) == 0 ? pick(5000) : 0;
  s.heads = 1 + pick(3);
  s.head = pick(s.heads);
  s.dtype_q = kQueryDtypes[pick(3)];
  s.dtype_o = kQueryDtypes[pick(3)];
  auto c = std::make_unique<Case>(s, seed);
  Problem& p = c->problem();
  const uint32_t n_transforms = pick(3) == 0 ? 1 + pick(4) : 0;
  for (uint32_t i = 0; i < n_transforms; ++i) {
    c->add_transform(pick(2) == 0,
                     pick(2) == 0 ? RotationLayout::kInterleaved : RotationLayout::kHalfSplit,
                     pick(2) == 0);
  }
  TokenKind kind;
  const uint32_t change = pick(3) == 0 ? 1 + pick(60) : 0;
  const uint32_t gaps = pick(4) == 0 ? 2 + pick(100) : 0;
  const auto pick_kind = [&](uint16_t transform) {
    // Half of them those of which a row may hold what is no number.
    const auto pick_codec = [&] {
      const uint32_t n = static_cast<uint32_t>(codecs::kCodecs.size());
      return codecs::kCodecs[pick(pick(2) == 0 ? 5 : n)].id;
    };
    const CodecId k = pick_codec();
    const CodecId v = pick_codec();
    return TokenKind{k, s.v_in_k ? k : v, transform};
  };
  const bool weights = pick(3) == 0;
  std::normal_distribution<float> normal;
  for (uint64_t t = 0; t < s.n_tokens; ++t) {
    if (t == 0 || (change != 0 && pick(change) == 0)) {
      kind = pick_kind(static_cast<uint16_t>(n_transforms != 0 ? pick(n_transforms) : 0));
    }
    c->kinds[t] = kind;
    c->present[t] = gaps == 0 || pick(gaps) != 0;
    if (weights) {
      c->log_weights.push_back(pick(10) == 0 ? -INFINITY : normal(random));
    }
  }
  Visibility& v = p.visible;
  if (pick(3) == 0)
    c->use_sinks();
  if (pick(4) == 0)
    c->use_slopes();
  if (pick(3) == 0)
    p.softcap = 1.0f + static_cast<float>(pick(50));
  if (pick(3) == 0)
    v.window = 1 + pick(400);
  if (pick(3) == 0)
    v.sinks = pick(100);
  if (pick(4) == 0)
    c->use_tree(0.3);
  if (pick(5) == 0)
    v.causal = false;
  if (pick(4) == 0)
    c->use_ranges(true, 1 + static_cast<int>(pick(3)));
  if (pick(4) == 0)
    c->use_ranges(false, 1 + static_cast<int>(pick(3)));
  if (pick(5) == 0)
    v.query_position = s.first_position + pick(400);
  p.fp32_weights = pick(3) == 0;
  c->store(static_cast<int>(pick(10)));
  return c;
}

}  // namespace kvm::attention::testing
