// SPDX-License-Identifier: Apache-2.0
// Keys and values for tests of sketches, and the format written down a second time, in fp64.
#ifndef KVM_TESTS_UNIT_HASH_INDEX_SKETCH_TESTBED_H_
#define KVM_TESTS_UNIT_HASH_INDEX_SKETCH_TESTBED_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "codecs/codec.h"
#include "hash_index/sketch/frame.h"
#include "hash_index/sketch/layout.h"
#include "hash_index/sketch/scan_table.h"
#include "hash_index/sketch/sketch.h"

namespace kvm::hash_index {

using Rows = std::vector<std::vector<double>>;

struct AlignedFree {
  void operator()(void* p) const { std::free(p); }
};
using Aligned = std::unique_ptr<std::byte, AlignedFree>;
inline Aligned aligned_bytes(size_t bytes) {
  return Aligned(static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
}

// Pages of one layer with `heads` kv heads, filled from rows: [page][head][64][dim].
struct Pages {
  uint32_t heads = 1;
  uint32_t head = 0;
  uint32_t dim_k = 0;
  uint32_t dim_v = 0;
  CodecId codec = CodecId::kF32;
  Rows keys;  // as stored
  Rows values;
  std::vector<std::byte> k;
  std::vector<std::byte> v;
  std::vector<uint16_t> k_scale;
  std::vector<uint16_t> v_scale;
  std::vector<KvRun> runs;
  uint64_t position = 0;

  // One element; returns what is stored.
  static double put(std::byte* at, CodecId codec, double value) {
    const float f = static_cast<float>(value);
    if (codec == CodecId::kF32) {
      std::memcpy(at, &f, 4);
      return double{f};
    }
    const uint16_t bits = codec == CodecId::kF16 ? f32_to_f16(f) : f32_to_bf16(f);
    std::memcpy(at, &bits, 2);
    return double{codec == CodecId::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits)};
  }

  // The largest code that is not beyond x, or the least.
  static double put_f8(std::byte* at, double x) {
    uint8_t code = 0;
    while (code < 0x7e && double{e4m3_to_f32(static_cast<uint8_t>(code + 1))} <= std::abs(x)) {
      ++code;
    }
    const auto stored = static_cast<uint8_t>(x < 0 ? code | 0x80 : code);
    std::memcpy(at, &stored, 1);
    return double{e4m3_to_f32(stored)};
  }

  static void put_rows(Rows* rows, uint32_t heads, uint32_t head, CodecId codec,
                       std::vector<std::byte>* bytes, std::vector<uint16_t>* scales) {
    const size_t dim = rows->front().size();
    const size_t pages = rows->size() / kBlockKeys;
    const codecs::Codec& of = codecs::codec_of(codec);
    const size_t size = of.row_bytes(1);
    bytes->assign(pages * heads * kBlockKeys * dim * size, std::byte{0x5a});
    scales->assign(pages * heads * kBlockKeys, 0);
    for (size_t i = 0; i < rows->size(); ++i) {
      const size_t row = (i / kBlockKeys * heads + head) * kBlockKeys + i % kBlockKeys;
      double scale = 1;
      if (of.is_scaled()) {
        for (const double x : (*rows)[i]) {
          scale = std::max(scale, std::abs(x) / 100);
        }
        (*scales)[row] = f32_to_bf16(static_cast<float>(scale));
        scale = double{bf16_to_f32((*scales)[row])};
      }
      for (size_t j = 0; j < dim; ++j) {
        std::byte* at = bytes->data() + (row * dim + j) * size;
        double& x = (*rows)[i][j];
        if (codec == CodecId::kI8) {
          const auto code = static_cast<int8_t>(std::lrint(x / scale));
          std::memcpy(at, &code, 1);
          x = code * scale;
        } else if (codec == CodecId::kF8) {
          x = put_f8(at, x / scale) * scale;
        } else {
          x = put(at, codec, x);
        }
      }
    }
  }

  Pages(Rows k_rows, Rows v_rows, CodecId stored, uint32_t n_heads = 1, uint32_t which = 0,
        uint64_t first = 0)
      : heads(n_heads),
        head(which),
        codec(stored),
        keys(std::move(k_rows)),
        values(std::move(v_rows)),
        position(first) {
    dim_k = static_cast<uint32_t>(keys.front().size());
    dim_v = static_cast<uint32_t>(values.front().size());
    put_rows(&keys, heads, head, codec, &k, &k_scale);
    put_rows(&values, heads, head, codec, &v, &v_scale);
    const codecs::Codec& of = codecs::codec_of(codec);
    for (size_t page = 0; page < keys.size() / kBlockKeys; ++page) {
      const size_t row = page * heads * kBlockKeys;
      KvRun run;
      run.k = {k.data() + row * of.row_bytes(dim_k),
               of.is_scaled() ? k_scale.data() + row : nullptr, codec};
      run.v = {v.data() + row * of.row_bytes(dim_v),
               of.is_scaled() ? v_scale.data() + row : nullptr, codec};
      run.position = first + page * kBlockKeys;
      run.n_tokens = kBlockKeys;
      runs.push_back(run);
    }
  }

  FramePtr frame(const SketchKind* kind, uint64_t seed, const std::vector<float>& queries = {},
                 const Frame* previous = nullptr) const {
    FrameInput input;
    input.runs = runs;
    input.head = head;
    input.dim_k = dim_k;
    input.queries = queries;
    input.seed = seed;
    input.previous = previous;
    return make_frame(input, kind);
  }

  Aligned encode(const Frame& frame, const ScanTable* table) const {
    const size_t bytes = block_bytes(frame_kind(frame), dim_k);
    Aligned blocks = aligned_bytes(bytes * runs.size());
    for (size_t b = 0; b < runs.size(); ++b) {
      encode_block(frame, runs[b], head, dim_v, blocks.get() + b * bytes, table);
    }
    return blocks;
  }
};

// Normal rows; channel j has sd first * ratio^j, on top of a common mean.
inline Rows normal_rows(std::mt19937_64* random, size_t n, uint32_t dim, double first = 1,
                        double ratio = 1, double mean = 0) {
  std::normal_distribution<double> normal;
  std::vector<double> means(dim);
  for (double& m : means) {
    m = mean * normal(*random);
  }
  Rows rows(n, std::vector<double>(dim));
  for (auto& row : rows) {
    double sd = first;
    for (uint32_t j = 0; j < dim; ++j, sd *= ratio) {
      row[j] = means[j] + sd * normal(*random);
    }
  }
  return rows;
}

inline std::vector<float> floats(const Rows& rows) {
  std::vector<float> out;
  for (const auto& row : rows) {
    for (const double x : row) {
      out.push_back(static_cast<float>(x));
    }
  }
  return out;
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// --- The format once more, in fp64 --------------------------------------------------------------

// Three rounds of signs and the Hadamard matrix, element by element.
inline std::vector<double> oracle_rotate(std::vector<double> x, uint64_t seed) {
  const size_t dim = x.size();
  for (size_t turn = 0; turn < 3; ++turn) {
    std::vector<double> y(dim, 0.0);
    for (size_t j = 0; j < dim; ++j) {
      const double sign = permanent_random(seed, turn * dim + j) < 0.5f ? -1 : 1;
      for (size_t i = 0; i < dim; ++i) {
        y[i] += (std::popcount(i & j) % 2 == 0 ? sign : -sign) * x[j];
      }
    }
    for (double& value : y) {
      value /= std::sqrt(static_cast<double>(dim));
    }
    x = y;
  }
  return x;
}

// The codeword with the largest cosine: the k largest magnitudes at 1.5, the best k.
inline std::vector<double> oracle_codeword(const std::vector<double>& x, bool two) {
  const size_t dim = x.size();
  std::vector<size_t> order(dim);
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&x](size_t a, size_t b) { return std::abs(x[a]) > std::abs(x[b]); });
  double product = 0;
  for (const double value : x) {
    product += 0.5 * std::abs(value);
  }
  size_t best = 0;
  double best_cosine = product / std::sqrt(0.25 * static_cast<double>(dim));
  for (size_t k = 0; k < dim && two; ++k) {
    product += std::abs(x[order[k]]);
    const double cosine =
        product / std::sqrt(0.25 * static_cast<double>(dim) + 2.0 * static_cast<double>(k + 1));
    if (cosine > best_cosine) {
      best_cosine = cosine;
      best = k + 1;
    }
  }
  std::vector<double> y(dim, 0.5);
  for (size_t k = 0; k < best; ++k) {
    y[order[k]] = 1.5;
  }
  for (size_t j = 0; j < dim; ++j) {
    y[j] = x[j] >= 0 ? y[j] : -y[j];
  }
  return y;
}

inline double cosine(const std::vector<double>& a, const std::vector<double>& b) {
  const double norms = std::sqrt(dot(a, a) * dot(b, b));
  return norms > 0 ? dot(a, b) / norms : 1;
}

struct OracleKey {
  std::vector<double> lead;  // as it would be read back
  std::vector<double> rest;  // rotated, before it is coded
  std::vector<double> codeword;
  double factor = 0;

  void set_codeword(std::vector<double> y) {
    codeword = std::move(y);
    const double product = dot(codeword, rest);
    const double exact = product > 0 ? dot(rest, rest) / product : 0;
    factor = double{bf16_to_f32(f32_to_bf16(static_cast<float>(exact)))};
  }
};

// The coordinates of x (a centred key, or with `query` a query): lead and rotated rest. For
// balanced bases the rotated rest of keys is what the frame's matrix says.
inline void oracle_turn(const Basis& basis, const std::vector<double>& x, bool query,
                        std::vector<double>* lead, std::vector<double>* rest) {
  lead->assign(kLeadDims, 0.0);
  rest->assign(basis.dim_pad, 0.0);
  const auto& own = query ? basis.lead_query : basis.lead_key;
  const auto& other = query ? basis.lead_key : basis.lead_query;
  for (size_t j = 0; j < kLeadDims && !own.empty(); ++j) {
    for (size_t k = 0; k < basis.dim_k; ++k) {
      (*lead)[j] += double{own[k * kLeadDims + j]} * x[k];
    }
  }
  if (!basis.key_matrix.empty()) {
    for (size_t k = 0; k < basis.dim_k; ++k) {
      for (size_t j = 0; j < basis.dim_pad; ++j) {
        (*rest)[j] +=
            x[k] * double{query
                              ? basis.query_matrix[k * basis.dim_pad + j]
                              : basis.key_matrix[k * (kLeadDims + basis.dim_pad) + kLeadDims + j]};
      }
    }
    if (query) {
      *rest = oracle_rotate(*rest, basis.seed);
    }
    return;
  }
  for (size_t k = 0; k < basis.dim_k; ++k) {
    (*rest)[k] = x[k];
    for (size_t j = 0; j < kLeadDims && !other.empty(); ++j) {
      (*rest)[k] -= double{other[k * kLeadDims + j]} * (*lead)[j];
    }
  }
  *rest = oracle_rotate(*rest, basis.seed);
}

inline OracleKey oracle_encode(const Frame& frame, const std::vector<double>& key) {
  std::vector<double> x = key;
  for (size_t j = 0; j < x.size(); ++j) {
    x[j] -= double{frame.center[j]};
  }
  OracleKey code;
  oracle_turn(*frame.basis, x, false, &code.lead, &code.rest);
  if (!frame.basis->lead_key.empty()) {
    for (size_t j = 0; j < kLeadDims; ++j) {
      const double step = double{frame.lead_step[j]};
      code.lead[j] = step * std::clamp(std::nearbyint(code.lead[j] / step), -127.0, 127.0);
    }
  }
  code.set_codeword(oracle_codeword(code.rest, frame_kind(frame) == SketchKind::kBits2));
  return code;
}

struct OracleQuery {
  std::vector<double> lead;
  std::vector<double> rest;
  double center = 0;

  OracleQuery(const Frame& frame, const std::vector<double>& query) {
    oracle_turn(*frame.basis, query, true, &lead, &rest);
    for (size_t j = 0; j < query.size(); ++j) {
      center += query[j] * double{frame.center[j]};
    }
  }

  double estimate(const OracleKey& key) const {
    return key.factor * dot(key.codeword, rest) + dot(key.lead, lead) + center;
  }
};

// The codeword of a key in a stored block, twice over: coordinates +-1, +-3.
inline std::vector<int> stored_codeword(const std::byte* block, const Frame& frame, uint32_t key) {
  const BlockShape shape = block_shape(frame_kind(frame), frame.basis->dim_k);
  const auto* bytes = reinterpret_cast<const uint8_t*>(block);
  const auto bit = [&](uint32_t plane, uint32_t j) {
    const uint32_t row = plane * shape.code_rows + j / 8;
    return bytes[row * 64 + key % 16 * 4 + key / 16] >> (j % 8) & 1;
  };
  std::vector<int> y(frame.basis->dim_pad);
  for (uint32_t j = 0; j < frame.basis->dim_pad; ++j) {
    y[j] = bit(0, j) != 0 ? 1 : -1;
    if (shape.planes == 2) {
      y[j] = 2 * y[j] + (bit(1, j) != 0 ? 1 : -1);
    }
  }
  return y;
}

}  // namespace kvm::hash_index

#endif  // KVM_TESTS_UNIT_HASH_INDEX_SKETCH_TESTBED_H_
