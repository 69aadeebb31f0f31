// SPDX-License-Identifier: Apache-2.0
#include "bench/approx/settings.h"

#include <fmt/format.h>

#include <algorithm>

#include "bench/approx/parallel.h"

namespace kvm::bench {

using hash_index::LshParams;
using hash_index::SketchKind;

namespace {

template <typename Index>
std::vector<attention::HeadIndex> views(const std::vector<std::unique_ptr<Index>>& indexes) {
  std::vector<attention::HeadIndex> out;
  for (const auto& index : indexes) {
    if constexpr (std::is_same_v<Index, Sketches>) {
      out.push_back(make_index(index.get(), nullptr));
    } else {
      out.push_back(make_index(nullptr, index.get()));
    }
  }
  return out;
}

template <typename Index>
double size_per_token(const DataSet& data, const std::vector<std::unique_ptr<Index>>& indexes) {
  double sum = 0;
  for (const auto& index : indexes) {
    sum += static_cast<double>(index->size_bytes());
  }
  return sum / data.n_tokens / static_cast<double>(indexes.size());
}

}  // namespace

std::vector<std::string> chosen_data(const Options& options, std::vector<std::string> defaults) {
  if (!options.data.empty()) {
    return options.data;
  }
  if (options.quick) {
    defaults.resize(std::min<size_t>(defaults.size(), 2));
  }
  return defaults;
}

std::vector<uint32_t> chosen_tokens(const Options& options, const std::string& data,
                                    std::vector<uint32_t> defaults) {
  if (!options.tokens.empty()) {
    return options.tokens;
  }
  if (is_recorded(data)) {
    return {0};
  }
  if (options.quick) {
    return {8192};
  }
  // Eight heads of K and V, their logits, and indexes of up to 600 bytes a token.
  constexpr uint64_t kTokenBytes = 8 * (512 + 4 * 4 * 8 + 600);
  const uint64_t fitting = memory_budget_bytes(options) / kTokenBytes;
  std::erase_if(defaults, [&](uint32_t tokens) { return tokens > fitting; });
  return defaults;
}

uint32_t default_tokens(const std::string& data) {
  return data == "real" || data == "diffuse" || data == "gauss" ? 98304 : 131072;
}

const std::vector<SketchChoice>& sketch_choices() {
  static const std::vector<SketchChoice> choices = {
      {"auto", {}},
      {kind_name(SketchKind::kBits1), SketchKind::kBits1},
      {kind_name(SketchKind::kLead8Bits1), SketchKind::kLead8Bits1},
      {kind_name(SketchKind::kBits2), SketchKind::kBits2}};
  return choices;
}

std::vector<LshParams> lsh_choices(bool quick) {
  std::vector<LshParams> choices = {{10, 150, 1}, {9, 120, 1}, {8, 75, 1}};
  choices.resize(quick ? 1 : choices.size());
  return choices;
}

std::string lsh_name(const LshParams& params) {
  return fmt::format("K{}L{}", params.n_bits, params.n_tables);
}

std::vector<std::unique_ptr<Sketches>> build_sketches(const DataSet& data,
                                                      const SketchOptions& options,
                                                      uint32_t threads) {
  std::vector<std::unique_ptr<Sketches>> out(data.heads.size());
  parallel_for(threads, out.size(), [&](size_t h) {
    SketchOptions own = options;
    own.seed = options.seed + h;
    out[h] = std::make_unique<Sketches>(data.heads[h], own);
  });
  return out;
}

std::vector<std::unique_ptr<LshTables>> build_tables(const DataSet& data, const LshParams& params,
                                                     uint32_t threads) {
  const hash_index::PlanesPtr planes = hash_index::make_planes(params, data.heads[0].dim);
  std::vector<std::unique_ptr<LshTables>> out(data.heads.size());
  parallel_for(threads, out.size(), [&](size_t h) {
    out[h] = std::make_unique<LshTables>(data.heads[h], planes, params);
  });
  return out;
}

std::vector<attention::HeadIndex> indexes_of(const std::vector<std::unique_ptr<Sketches>>& s) {
  return views(s);
}

std::vector<attention::HeadIndex> indexes_of(const std::vector<std::unique_ptr<LshTables>>& t) {
  return views(t);
}

double bytes_per_token(const DataSet& data, const std::vector<std::unique_ptr<Sketches>>& s) {
  return size_per_token(data, s);
}

double bytes_per_token(const DataSet& data, const std::vector<std::unique_ptr<LshTables>>& t) {
  return size_per_token(data, t);
}

Solver& thread_solver() {
  thread_local Solver solver;
  return solver;
}

}  // namespace kvm::bench
