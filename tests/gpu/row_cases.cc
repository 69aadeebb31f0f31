// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/row_cases.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/splitmix.h"
#include "codecs/codec.h"

namespace kvm::attention::gpu::testing {

namespace {

constexpr uint32_t kFirst = 2;        // token that is read first
constexpr uint32_t kNotRead = 1;      // tokens behind those that are read
constexpr uint32_t kTableFirst = 5;   // entries of others in front
constexpr uint32_t kGapElements = 8;  // between heads, and twice that between tokens
constexpr uint8_t kUntouched = 0xa5;

float widened(const uint8_t* at, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return dtype == Dtype::kBf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

void write(uint8_t* at, Dtype dtype, float value) {
  if (dtype == Dtype::kF32) {
    std::memcpy(at, &value, sizeof value);
    return;
  }
  const uint16_t bits = dtype == Dtype::kBf16 ? f32_to_bf16(value) : f32_to_f16(value);
  std::memcpy(at, &bits, sizeof bits);
}

uint64_t stride_of_heads(uint32_t dim, bool gaps) { return dim + (gaps ? kGapElements : 0); }
uint64_t stride_of_rows(uint32_t dim, uint32_t n_heads, bool gaps) {
  return n_heads * stride_of_heads(dim, gaps) + (gaps ? 2 * kGapElements : 0);
}

float bf16_at(const uint8_t* at) { return widened(at, Dtype::kBf16); }

}  // namespace

// --- Reads --------------------------------------------------------------------------------------

std::vector<ReadSpec> all_reads() {
  std::vector<ReadSpec> specs;
  constexpr Dtype kAll[] = {Dtype::kF32, Dtype::kF16, Dtype::kBf16};
  for (const CodecId from :
       {CodecId::kBf16, CodecId::kF16, CodecId::kI8, CodecId::kF8, codecs::kI4}) {
    for (const Dtype to : kAll) {
      specs.push_back({from, to, 128, 3});
      specs.push_back({from, to, 64, 16, false, true});
    }
    for (const uint32_t dim : {80u, 96u, 192u, 256u}) {
      if (is_head_dim_on_devices(from, dim)) {
        specs.push_back({from, Dtype::kF32, dim, 3});
        specs.push_back({from, Dtype::kBf16, dim, 64});
      }
    }
    specs.push_back({from, Dtype::kBf16, 64, 3, false, true, false, true});
    specs.push_back({from, Dtype::kF32, 64, 3, false, false, true, false});
  }
  for (const CodecId from : {CodecId::kBf16, CodecId::kF16}) {
    for (const Dtype to : kAll) {
      specs.push_back({from, to, kMlaDim, 3, true});
    }
    specs.push_back({from, Dtype::kBf16, kMlaDim, 64, true, true, true, false});
  }
  return specs;
}

ReadCase::ReadCase(const ReadSpec& spec, uint64_t seed)
    : pages({Dtype::kF32, spec.from, spec.dim, spec.page_tokens, spec.v_in_k}, seed), spec_(spec) {
  pages.fill();
  const auto n_appended = static_cast<uint32_t>(pages.tokens.size() / 2);
  n_tokens_ = n_appended - kFirst - kNotRead;
  // Of each class the entries of its list, one behind the other.
  page_table.assign(kTableFirst, UINT32_MAX);
  for (uint32_t c = 0; c < 2; ++c) {
    for (size_t i = c; i < pages.page_table.size(); i += 2) {
      page_table.push_back(pages.page_table[i]);
    }
  }
  for (const bool is_v : {false, true}) {
    const uint64_t row =
        stride_of_rows(dim(is_v), static_cast<uint32_t>(pages.heads.size()), spec_.gaps);
    Bytes& to = is_v ? v : k;
    to = Bytes(n_tokens_ * row * dtype_size_bytes(spec_.to));
    std::fill_n(to.data(), to.size(), kUntouched);
  }
}

std::string ReadCase::name() const {
  return std::string("read ") + codecs::codec_of(spec_.from).name + " to " + dtype_name(spec_.to) +
         " d" + std::to_string(spec_.dim) + " page" + std::to_string(spec_.page_tokens) +
         (spec_.v_in_k ? " V in K" : "") + (spec_.gaps ? " gaps" : "") +
         (spec_.wants_v ? "" : " K only") + (spec_.wants_k ? "" : " V only");
}

RowTensor ReadCase::tensor(bool is_v) {
  if (is_v ? !spec_.wants_v : !spec_.wants_k) {
    return {};
  }
  const auto n_heads = static_cast<uint32_t>(pages.heads.size());
  return {(is_v ? v : k).data(),
          static_cast<int64_t>(stride_of_rows(dim(is_v), n_heads, spec_.gaps)),
          static_cast<int64_t>(stride_of_heads(dim(is_v), spec_.gaps)), spec_.to, dim(is_v)};
}

ReadParams ReadCase::params() {
  ReadParams params;
  params.pool = pages.params().pool;
  params.page_table = page_table.data();
  params.tables[0] = kTableFirst;
  params.tables[1] = kTableFirst + pages.page_table.size() / 2;
  params.n_classes = 2;
  params.first = kFirst;
  params.n_tokens = n_tokens_;
  params.dim = spec_.dim;
  params.k = tensor(false);
  params.v = tensor(true);
  return params;
}

std::vector<std::span<uint8_t>> ReadCase::memory() {
  return {{k.data(), k.size()},
          {v.data(), v.size()},
          {pages.pages.data(), pages.pages.size()},
          {reinterpret_cast<uint8_t*>(pages.heads.data()), pages.heads.size() * 2},
          {reinterpret_cast<uint8_t*>(page_table.data()), page_table.size() * 4}};
}

// An element of a row of `head` of the layer, as its bytes say.
double ReadCase::stored(uint32_t head, uint32_t token, uint32_t channel, bool is_v) const {
  const AppendParams in = pages.params();
  const auto place = std::find(pages.heads.begin(), pages.heads.end(), head);
  const auto index = static_cast<uint32_t>(place - pages.heads.begin());
  const uint32_t c = index < in.pool.classes[1].heads_first ? 0 : 1;
  const PageClass& of = in.pool.classes[c];
  const uint32_t in_class = index - of.heads_first, row = token % spec_.page_tokens;
  const uint32_t entry = pages.page_table[token / spec_.page_tokens * 2 + c];
  const uint8_t* const page =
      pages.pages.data() + (entry & kEntrySlotMask) * of.page_bytes + of.layer_offset_bytes;
  const codecs::Codec& codec = codecs::codec_of(spec_.from);
  const uint8_t* const bytes = page + (is_v ? of.v_offset_bytes : 0) +
                               in_class * of.head_stride_bytes + row * codec.row_bytes(spec_.dim);
  const uint32_t n = row_params_bytes(spec_.from, spec_.dim);
  const uint8_t* const params = page + of.scales_offset_bytes +
                                (is_v ? of.v_scales_offset_bytes : 0) +
                                (in_class * spec_.page_tokens + row) * n;
  if (spec_.from == codecs::kI4) {
    const uint8_t* const steps = params + channel / codecs::Codec::kGroupChannels * 4;
    const int code = bytes[channel / 2] >> (channel % 2 * 4) & 15;
    return code * static_cast<double>(bf16_at(steps)) + bf16_at(steps + 2);
  }
  if (spec_.from == CodecId::kI8) {
    return static_cast<double>(static_cast<int8_t>(bytes[channel])) * bf16_at(params);
  }
  if (spec_.from == CodecId::kF8) {
    return static_cast<double>(e4m3_to_f32(bytes[channel])) * bf16_at(params);
  }
  return widened(bytes + channel * 2, half_of(spec_.from));
}

bool ReadCase::right() const {
  const auto n_heads = static_cast<uint32_t>(pages.heads.size());
  const uint32_t size = dtype_size_bytes(spec_.to);
  bool right = true;
  for (const bool is_v : {false, true}) {
    const Bytes& got = is_v ? v : k;
    std::vector<uint8_t> expected(got.size(), kUntouched);
    std::vector<bool> is_nan(got.size() / size);
    for (uint32_t n = 0; n < (is_v ? spec_.wants_v : spec_.wants_k) * n_tokens_ * n_heads; ++n) {
      const uint32_t token = n / n_heads, head = n % n_heads;
      for (uint32_t i = 0; i < dim(is_v); ++i) {
        const uint64_t at = token * stride_of_rows(dim(is_v), n_heads, spec_.gaps) +
                            head * stride_of_heads(dim(is_v), spec_.gaps) + i;
        const double value = stored(head, kFirst + token, i, is_v && !spec_.v_in_k);
        write(expected.data() + at * size, spec_.to, static_cast<float>(value));
        is_nan[at] = std::isnan(value);
      }
    }
    for (size_t i = 0; i < is_nan.size(); ++i) {
      // The payload of a NaN may be any.
      right = right && (is_nan[i] ? std::isnan(widened(got.data() + i * size, spec_.to))
                                  : std::equal(got.data() + i * size, got.data() + (i + 1) * size,
                                               expected.begin() + static_cast<int64_t>(i * size)));
    }
  }
  return right;
}

// --- States -------------------------------------------------------------------------------------

std::vector<StatesSpec> all_states() {
  constexpr Dtype kF32 = Dtype::kF32, kF16 = Dtype::kF16, kBf16 = Dtype::kBf16;
  std::vector<StatesSpec> specs;
  for (const uint32_t dim : {8u, 64u, 80u, 96u, 128u, 192u, 256u, kMlaValueDim}) {
    specs.push_back({.dtypes = {kF32, kBf16}, .dtype_out = kBf16, .dim = dim, .gaps = dim == 80});
    specs.push_back({.dim = dim, .in_place = 0});
  }
  for (const Dtype out : {kF32, kF16, kBf16}) {
    specs.push_back({.dtypes = {kF32, kF16, kBf16}, .dtype_out = out, .n_rows = 9, .gaps = true});
    specs.push_back({.dtypes = {kF32, out}, .dtype_out = out, .in_place = 1, .gaps = true});
    specs.push_back({.dtypes = std::vector<Dtype>(kMaxStates, out), .dtype_out = out, .dim = 256});
  }
  specs.push_back({.dtypes = {kF16}, .dtype_out = kF32});
  specs.push_back({.dtypes = std::vector<Dtype>(kMaxStates, kF32), .n_rows = 40, .in_place = 7});
  specs.push_back({.dtypes = {kF32, kF32, kF32}, .n_rows = 20, .not_numbers = true});
  specs.push_back({.dim = 256, .in_place = 1, .not_numbers = true, .writes_lse = false});
  return specs;
}

StatesCase::Place StatesCase::add(Dtype dtype, uint32_t dim) {
  Place place{size_, dtype, dim, stride_of_rows(dim, spec_.n_heads, spec_.gaps),
              stride_of_heads(dim, spec_.gaps)};
  size_ += (spec_.n_rows * place.stride_row * dtype_size_bytes(dtype) + 63) / 64 * 64;
  return place;
}

StatesCase::StatesCase(const StatesSpec& spec, uint64_t seed) : spec_(spec) {
  const auto n_states = static_cast<uint32_t>(spec.dtypes.size());
  for (const Dtype dtype : spec.dtypes) {
    o_.push_back(add(dtype, spec.dim));
    lse_.push_back(add(Dtype::kF32, 1));
  }
  out_o_ = spec.in_place < 0 ? add(spec.dtype_out, spec.dim) : o_[spec.in_place];
  out_lse_ = spec.in_place < 0 ? add(Dtype::kF32, 1) : lse_[spec.in_place];
  arena = Bytes(size_);
  std::fill_n(arena.data(), arena.size(), uint8_t{0xff});  // NaNs of every dtype
  uint64_t state = seed;
  const auto uniform = [&state] {
    state += kSplitMixStep;
    return static_cast<float>(splitmix64(state) >> 40) * 0x1p-24f;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (uint32_t row = 0; row < spec.n_rows; ++row) {
    for (uint32_t head = 0; head < spec.n_heads; ++head) {
      const uint32_t n = row * spec.n_heads + head;
      for (uint32_t i = 0; i < n_states; ++i) {
        // Row 1 is empty in all states, of others every third is.
        const bool is_empty = n == 1 || (n + i) % 3 == 0;
        const bool is_none = spec.not_numbers && i == 1;
        set(lse_[i], row, head, 0,
            is_empty                ? -std::numeric_limits<float>::infinity()
            : is_none && n % 4 == 0 ? nan
                                    : 30.0f * uniform() - 15.0f);
        for (uint32_t channel = 0; channel < spec.dim; ++channel) {
          const bool shows = is_none && n % 4 == 2 && channel == 5;
          set(o_[i], row, head, channel, is_empty || shows ? nan : 2.0f * uniform() - 1.0f);
        }
      }
      expect(row, head);
    }
  }
  before_.assign(arena.data(), arena.data() + arena.size());
}

std::string StatesCase::name() const {
  std::string name = "merge of states ";
  for (const Dtype dtype : spec_.dtypes) {
    name += std::string(dtype_name(dtype)) + " ";
  }
  return name + "to " + dtype_name(spec_.dtype_out) + " d" + std::to_string(spec_.dim) +
         (spec_.in_place < 0 ? "" : " in place of " + std::to_string(spec_.in_place)) +
         (spec_.gaps ? " gaps" : "") + (spec_.not_numbers ? " NaN" : "");
}

uint64_t StatesCase::byte_of(const Place& place, uint32_t row, uint32_t head, uint32_t channel) {
  return place.at + (row * place.stride_row + head * place.stride_head + channel) *
                        dtype_size_bytes(place.dtype);
}
float StatesCase::get(const Place& place, uint32_t row, uint32_t head, uint32_t channel) const {
  return widened(arena.data() + byte_of(place, row, head, channel), place.dtype);
}
void StatesCase::set(const Place& place, uint32_t row, uint32_t head, uint32_t channel,
                     float value) {
  write(arena.data() + byte_of(place, row, head, channel), place.dtype, value);
}

void StatesCase::expect(uint32_t row, uint32_t head) {
  double top = -std::numeric_limits<double>::infinity(), total = 0;
  std::vector<double> sum(spec_.dim);
  for (const Place& lse : lse_) {
    const double of = get(lse, row, head, 0);
    top = std::isnan(of) ? top : std::max(top, of);
  }
  for (size_t i = 0; i < o_.size(); ++i) {
    const double lse = get(lse_[i], row, head, 0);
    if (std::isinf(lse)) {
      continue;
    }
    const double weight = std::exp(lse - (std::isinf(top) ? 0 : top));
    total += weight;
    for (uint32_t channel = 0; channel < spec_.dim; ++channel) {
      sum[channel] += weight * get(o_[i], row, head, channel);
    }
  }
  for (const double channel : sum) {
    expected_o_.push_back(total == 0 ? 0 : channel / total);
  }
  expected_lse_.push_back(total == 0 ? top : top + std::log(total));
}

RowTensor StatesCase::tensor(const Place& place, uint8_t* base) const {
  return {base + place.at, static_cast<int64_t>(place.stride_row),
          static_cast<int64_t>(place.stride_head), place.dtype, place.dim};
}

StatesParams StatesCase::params(uint8_t* base) const {
  StatesParams params;
  for (size_t i = 0; i < o_.size(); ++i) {
    params.o[i] = tensor(o_[i], base);
    params.lse[i] = tensor(lse_[i], base);
  }
  params.out_o = tensor(out_o_, base);
  params.out_lse = spec_.writes_lse ? tensor(out_lse_, base) : RowTensor{};
  params.n_states = static_cast<uint32_t>(o_.size());
  params.n_rows = spec_.n_rows;
  params.n_heads = spec_.n_heads;
  params.dim = spec_.dim;
  return params;
}

StatesCase::Errors StatesCase::errors() const {
  const double infinity = std::numeric_limits<double>::infinity();
  Errors errors;
  errors.bound_o = spec_.dtype_out == Dtype::kF32   ? 2e-6
                   : spec_.dtype_out == Dtype::kF16 ? 0x1p-11
                                                    : 0x1p-8;
  const auto difference = [infinity](double got, double expected) {
    if (std::isnan(expected) || std::isinf(expected)) {
      return std::isnan(got) == std::isnan(expected) && (std::isnan(got) || got == expected)
                 ? 0
                 : infinity;
    }
    return std::isnan(got) ? infinity : std::fabs(got - expected);
  };
  std::vector<uint8_t> may_change(arena.size());
  const auto changes = [&](const Place& place, uint64_t at) {
    std::fill_n(may_change.begin() + static_cast<int64_t>(at), dtype_size_bytes(place.dtype), 1);
  };
  for (uint32_t row = 0; row < spec_.n_rows; ++row) {
    for (uint32_t head = 0; head < spec_.n_heads; ++head) {
      const size_t n = row * spec_.n_heads + head;
      if (spec_.writes_lse) {
        errors.lse =
            std::max(errors.lse, difference(get(out_lse_, row, head, 0), expected_lse_[n]));
        changes(out_lse_, byte_of(out_lse_, row, head, 0));
      }
      for (uint32_t i = 0; i < spec_.dim; ++i) {
        errors.o = std::max(errors.o,
                            difference(get(out_o_, row, head, i), expected_o_[n * spec_.dim + i]));
        changes(out_o_, byte_of(out_o_, row, head, i));
      }
    }
  }
  for (size_t i = 0; i < arena.size(); ++i) {
    if (may_change[i] == 0 && arena.data()[i] != before_[i]) {
      errors.o = infinity;
    }
  }
  return errors;
}

}  // namespace kvm::attention::gpu::testing
