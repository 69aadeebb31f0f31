// SPDX-License-Identifier: Apache-2.0
#include "engine/store/token_merge.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <new>
#include <span>

#include "attention/kernel_table.h"
#include "base/assert.h"
#include "base/round.h"
#include "codecs/convert.h"

namespace kvm::engine {
namespace {

// Sums in lanes, which compilers keep in vectors: the order does not depend on who compiles.
float dot(const float* a, const float* b, uint32_t n) {
  constexpr uint32_t kLanes = attention::kDotLanes;  // every head dim is a multiple
  std::array<float, kLanes> lanes{};
  for (uint32_t i = 0; i < n; i += kLanes) {
    for (uint32_t j = 0; j < kLanes; ++j) {
      lanes[j] += a[i + j] * b[i + j];
    }
  }
  for (uint32_t half = kLanes / 2; half != 0; half /= 2) {
    for (uint32_t j = 0; j < half; ++j) {
      lanes[j] += lanes[j + half];
    }
  }
  return lanes[0];
}

// Makes a row as long as 1; one that is 0, or no number, becomes NaN, which is near to nothing.
void normalise(float* row, uint32_t n) {
  float top = 0.0f;
  for (uint32_t i = 0; i < n; ++i) {
    top = std::max(top, std::fabs(row[i]));
  }
  const float inverse = 1.0f / top;  // first, so that no square is too large or too small
  for (uint32_t i = 0; i < n; ++i) {
    row[i] *= inverse;
  }
  const float scale = 1.0f / std::sqrt(dot(row, row, n));
  for (uint32_t i = 0; i < n; ++i) {
    row[i] *= scale;
  }
}

// The threshold's share of what it was.
constexpr float kMemory = 0.5f;

}  // namespace

TokenMerge::TokenMerge(const tiers::SlabClass& slab_class, const KeptTokens& kept,
                       const KeptTokens::Choice& choice, KvRuns runs)
    : slab_class_(slab_class), stays_(choice.tokens) {
  const auto stays = [&](uint64_t position) {
    const auto at = std::lower_bound(
        stays_.begin(), stays_.end(), position,
        [](const KeptTokens::Token& token, uint64_t p) { return token.position < p; });
    return at != stays_.end() && at->position == position;
  };
  const auto add = [&](uint64_t position, const Row& row) {
    (stays(position) ? stayers_ : goers_).push_back(row);
  };
  for (const KeptTokens::Token& token : kept.tokens()) {
    add(token.position, {kept.k_plane(), kept.v_plane(), token.slot, kept.count(token.slot)});
  }
  for (const KvRun& run : runs) {
    for (uint32_t i = 0; i < run.n_tokens; ++i) {
      add(run.position + i, {run.k, run.v, run.slot + i, 1});
    }
  }
  KVM_ASSERT(stayers_.size() == stays_.size());
  n_token_blocks_ = static_cast<uint32_t>(div_up(goers_.size(), kFindTokens));
  n_stayer_blocks_ = static_cast<uint32_t>(div_up(stayers_.size(), kFindStayers));
  nearest_.resize(goers_.size() * std::max(n_stayer_blocks_, 1u));
}

uint64_t TokenMerge::find_bytes() const {
  // A byte for each product: 20 to 30 of them take 1 ns.
  return std::min<uint64_t>(stayers_.size(), kFindStayers) * kFindTokens * slab_class_.dim_k;
}

bool TokenMerge::find(uint32_t index, Workspace* scratch) {
  const uint32_t dim = slab_class_.dim_k;
  const uint32_t block = index / n_token_blocks_;
  const uint64_t first_goer = uint64_t{index % n_token_blocks_} * kFindTokens;
  const uint64_t first_stayer = uint64_t{block} * kFindStayers;
  const auto goers = std::span(goers_).subspan(
      first_goer, std::min<uint64_t>(kFindTokens, goers_.size() - first_goer));
  const auto stayers = std::span(stayers_).subspan(
      first_stayer, std::min<uint64_t>(kFindStayers, stayers_.size() - first_stayer));
  auto* columns =
      reinterpret_cast<float*>(scratch->reserve((kFindTokens + 1) * dim * sizeof(float)));
  if (columns == nullptr) {
    return false;
  }
  float* const row = columns + kFindTokens * dim;
  std::fill_n(columns, kFindTokens * dim, 0.0f);
  for (size_t i = 0; i < goers.size(); ++i) {
    codecs::decode_rows(goers[i].k, dim, goers[i].slot, 1, dim, row);
    normalise(row, dim);
    for (uint32_t channel = 0; channel < dim; ++channel) {
      columns[channel * kFindTokens + i] = row[channel];
    }
  }
  const attention::DotKernels& kernels = *attention::active_table().dots;
  std::array<float, kFindTokens> similarities;
  Nearest* found = nearest_.data() + block * goers_.size() + first_goer;
  for (size_t s = 0; s < stayers.size(); ++s) {
    codecs::decode_rows(stayers[s].k, dim, stayers[s].slot, 1, dim, row);
    normalise(row, dim);
    kernels.dots(columns, row, dim, similarities.data());
    for (size_t i = 0; i < goers.size(); ++i) {
      if (similarities[i] > found[i].similarity) {
        found[i] = {similarities[i], static_cast<uint32_t>(first_stayer + s)};
      }
    }
  }
  return true;
}

void TokenMerge::gate(const KeptTokens& kept) {
  double sum = 0;
  uint64_t n = 0;
  for (size_t i = 0; i < goers_.size(); ++i) {
    for (uint32_t block = 1; block < n_stayer_blocks_; ++block) {
      const Nearest& other = nearest_[block * goers_.size() + i];
      nearest_[i] = other.similarity > nearest_[i].similarity ? other : nearest_[i];
    }
    if (nearest_[i].stayer != UINT32_MAX) {
      sum += static_cast<double>(nearest_[i].similarity);
      ++n;
    }
  }
  has_threshold_ = kept.has_threshold();
  threshold_ = kept.threshold();
  if (n == 0) {
    return;
  }
  const auto mean = static_cast<float>(sum / static_cast<double>(n));
  threshold_ = has_threshold_ ? kMemory * threshold_ + (1 - kMemory) * mean : mean;
  has_threshold_ = true;
  for (uint32_t i = 0; i < goers_.size(); ++i) {
    if (nearest_[i].stayer != UINT32_MAX && nearest_[i].similarity >= threshold_) {
      joins_.push_back(i);
    }
  }
  std::stable_sort(joins_.begin(), joins_.end(),
                   [&](uint32_t a, uint32_t b) { return nearest_[a].stayer < nearest_[b].stayer; });
  for (uint32_t i = 0; i < joins_.size(); ++i) {
    const uint32_t stayer = nearest_[joins_[i]].stayer;
    if (targets_.empty() || targets_.back().stayer != stayer) {
      targets_.push_back({stayer, i, i});
    }
    targets_.back().end = i + 1;
  }
  rows_.reset(new float[targets_.size() * row_floats()]);
}

uint32_t TokenMerge::n_mixes() const {
  return static_cast<uint32_t>(div_up(targets_.size(), kMixTargets));
}

uint64_t TokenMerge::mix_bytes() const {
  return (joins_.size() + targets_.size()) * slab_class_.token_bytes();
}

// The mean of a token that stays, with weight e, and of those that join it, each with weight
// e^similarity: as D2O's paper weighs them.
void TokenMerge::mix(uint32_t index) {
  const uint32_t dim_k = slab_class_.dim_k;
  std::array<float, 2 * kMaxHeadDim> row;
  const uint32_t end = std::min(n_targets(), (index + 1) * kMixTargets);
  for (uint32_t t = index * kMixTargets; t < end; ++t) {
    const Target& target = targets_[t];
    float* sums = rows_.get() + size_t{t} * row_floats();
    std::fill_n(sums, row_floats(), 0.0f);
    float weights = 0.0f;
    const auto add = [&](const Row& from, float weight) {
      codecs::decode_rows(from.k, dim_k, from.slot, 1, dim_k, row.data());
      if (!slab_class_.v_in_k) {
        codecs::decode_rows(from.v, dim_v(), from.slot, 1, dim_v(), row.data() + dim_k);
      }
      for (uint32_t i = 0; i < row_floats(); ++i) {
        sums[i] += weight * row[i];
      }
      weights += weight;
    };
    add(stayers_[target.stayer], 1.0f);
    for (uint32_t i = target.begin; i < target.end; ++i) {
      add(goers_[joins_[i]], std::exp(nearest_[joins_[i]].similarity - 1.0f));
    }
    for (uint32_t i = 0; i < row_floats(); ++i) {
      sums[i] /= weights;
    }
  }
}

bool TokenMerge::writes(uint64_t position) const {
  const auto at = std::lower_bound(
      targets_.begin(), targets_.end(), position,
      [&](const Target& target, uint64_t p) { return stays_[target.stayer].position < p; });
  return at != targets_.end() && stays_[at->stayer].position == position;
}

void TokenMerge::write(uint32_t target, KeptTokens* kept) const {
  const float* row = rows_.get() + size_t{target} * row_floats();
  kept->write(stays_[targets_[target].stayer].slot, row, row + slab_class_.dim_k);
}

void TokenMerge::finish(KeptTokens* kept) const {
  if (has_threshold_) {
    kept->set_threshold(threshold_);
  }
  for (const Target& target : targets_) {
    uint32_t count = stayers_[target.stayer].count;
    for (uint32_t i = target.begin; i < target.end; ++i) {
      count += goers_[joins_[i]].count;
    }
    kept->set_count(stays_[target.stayer].slot, count);
  }
}

}  // namespace kvm::engine
