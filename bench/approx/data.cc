// SPDX-License-Identifier: Apache-2.0
#include "bench/approx/data.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "bench/approx/parallel.h"
#include "codecs/codec.h"
#include "codecs/convert.h"
#include "codecs/rows.h"

namespace kvm::bench {

attention::Problem make_problem(const HeadData& head, uint32_t set, float* o, float* lse) {
  attention::Problem p;
  p.q = head.q_rows(set);
  p.dtype_q = head.dtype;
  p.q_stride_head = head.dim;
  p.q_stride_query = uint64_t{head.group} * head.dim;
  p.n_query = 1;
  p.group = head.group;
  p.dim_k = p.dim_v = head.dim;
  p.scale = head.scale;
  p.softcap = head.softcap;
  p.visible.query_position = head.q_position[set];
  p.runs = head.kernel_runs;
  p.head = head.head;
  p.o = o;
  p.dtype_o = Dtype::kF32;
  p.o_stride_head = head.dim;
  p.o_stride_query = p.q_stride_query;
  p.lse = lse;
  p.lse_stride_head = 1;
  p.lse_stride_query = head.group;
  return p;
}

void DataSet::lay_out(uint32_t n_heads, uint32_t tokens, uint32_t dim, uint32_t group,
                      Dtype dtype) {
  n_tokens = tokens;
  const size_t n_pages = (size_t{tokens} + kPageTokens - 1) / kPageTokens;
  const size_t plane = size_t{n_heads} * kPageTokens * dim * 2;
  pool_ = std::make_unique<HugeBuffer>(n_pages * plane * 2);
  std::vector<uint32_t> slots(n_pages);
  std::iota(slots.begin(), slots.end(), 0u);
  std::mt19937 random(1);
  std::shuffle(slots.begin(), slots.end(), random);
  runs_ = std::make_unique<std::vector<KvRun>>(n_pages);
  for (size_t i = 0; i < n_pages; ++i) {
    KvRun& run = (*runs_)[i];
    run.k = {pool_->data() + slots[i] * plane * 2, nullptr, codecs::codec_of_tensor(dtype)};
    run.v = {pool_->data() + slots[i] * plane * 2 + plane, nullptr, run.k.codec};
    run.position = i * kPageTokens;
    run.n_tokens = static_cast<uint16_t>(std::min<size_t>(kPageTokens, tokens - run.position));
  }
  heads.resize(n_heads);
  for (uint32_t h = 0; h < n_heads; ++h) {
    heads[h].runs = heads[h].kernel_runs = *runs_;
    heads[h].head = h;
    heads[h].dim = dim;
    heads[h].group = group;
    heads[h].scale = 1.0f / std::sqrt(static_cast<float>(dim));
    heads[h].dtype = dtype;
  }
}

void DataSet::lay_out_int8() {
  const HeadData& first = heads[0];
  const size_t scales = heads.size() * kPageTokens * 2;
  const size_t plane = heads.size() * kPageTokens * first.dim;
  const size_t page = (2 * (plane + scales) + 4095) / 4096 * 4096;
  int8_pool_ = std::make_unique<HugeBuffer>(runs_->size() * page);
  int8_runs_ = std::make_unique<std::vector<KvRun>>(*runs_);
  for (size_t i = 0; i < runs_->size(); ++i) {
    std::byte* at = int8_pool_->data() + i * page;
    KvRun& run = (*int8_runs_)[i];
    run.k = {at, at + 2 * plane, CodecId::kI8};
    run.v = {at + plane, at + 2 * plane + scales, CodecId::kI8};
  }
}

void DataSet::use_int8_rows(uint32_t threads) {
  if (int8_pool_ == nullptr) {
    lay_out_int8();
    parallel_for(threads, heads.size() * runs_->size(), [&](size_t i) {
      const HeadData& head = heads[i % heads.size()];
      const KvRun& run = (*int8_runs_)[i / heads.size()];
      std::vector<float> wide(head.dim);
      for (uint32_t t = 0; t < run.n_tokens; ++t) {
        const auto store = [&](const uint16_t* from, const KvPlane& to) {
          for (uint32_t j = 0; j < head.dim; ++j) {
            wide[j] = head.to_float(from[j]);
          }
          auto* row = const_cast<uint8_t*>(codecs::row_at(to, head.dim, head.head, t));
          auto* scale = const_cast<uint16_t*>(codecs::row_scale_at(to, head.head, t));
          *scale = codecs::encode_row(wide.data(), head.dim, to.codec, row);
        };
        store(head.k_row(run.position + t), run.k);
        store(head.v_row(run.position + t), run.v);
      }
    });
  }
  for (HeadData& head : heads) {
    head.kernel_runs = *int8_runs_;
  }
}

void DataSet::use_own_rows() {
  for (HeadData& head : heads) {
    head.kernel_runs = *runs_;
  }
}

const std::vector<std::string>& data_names() {
  static const std::vector<std::string> names = {
      "model",   "flat",   "isotropic", "outliers", "voutliers", "latesink", "even",
      "softcap", "drift",  "turn",      "real",     "diffuse",   "gauss",    "needle",
      "line",    "cancel", "equalkeys", "longkeys", "heavytail", "zeros",    "minority"};
  return names;
}

const std::vector<std::string>& fragile_names() {
  static const std::vector<std::string> names(data_names().end() - 8, data_names().end());
  return names;
}

bool is_fragile(const std::string& name) {
  return std::find(fragile_names().begin(), fragile_names().end(), name) != fragile_names().end();
}

Result<DataSet> make_data(const DataSpec& spec, uint32_t threads) {
  const std::string& name = spec.name;
  if (is_recorded(name)) {
    return read_recorded_data(spec);
  }
  if (std::find(data_names().begin(), data_names().end(), name) == data_names().end()) {
    return Status(KVM_ERR_INVALID,
                  "there is no data '" + name + "', and it is no .kvrec file or folder");
  }
  if (spec.dim < 8 || spec.dim > kMaxHeadDim || (spec.dim & (spec.dim - 1)) != 0 ||
      spec.tokens < kMinTokens || spec.heads == 0 || spec.sets == 0) {
    return Status(KVM_ERR_INVALID, "data '" + name + "' needs a dim that is a power of two, " +
                                       std::to_string(kMinTokens) + " tokens, heads and sets");
  }
  if (name == "real" || name == "diffuse") {
    return make_cluster_data(spec, name == "real" ? 1.8 : 1.2, threads);
  }
  if (name == "gauss") {
    return make_gauss_data(spec, threads);
  }
  if (is_fragile(name)) {
    return make_fragile_data(spec, threads);
  }
  ModelOptions options;
  if (name == "flat") {
    options.key_power = 1.0;
    options.query_power = 0.5;
  } else if (name == "isotropic") {
    options.key_power = options.query_power = 0;
  } else if (name == "even") {
    options.sigma = 0.2;
  } else if (name == "drift") {
    options.drift_tokens = std::min(32768u, spec.tokens / 2);
  } else if (name == "turn") {
    options.turn_at = spec.tokens / 2;
  }
  options.outlier_channels = name == "outliers";
  options.value_outliers = name == "voutliers";
  options.late_sink = name == "latesink";
  DataSet data = make_model_data(spec, options, threads);
  if (name == "softcap") {
    for (HeadData& head : data.heads) {
      head.softcap = 10;
    }
  }
  return data;
}

}  // namespace kvm::bench
