// SPDX-License-Identifier: Apache-2.0
// Keys in clusters that come in short segments of text, and independent normals. All draws of a
// head come from one sequence, so a head is made by one thread.
#include <cmath>
#include <numeric>

#include "bench/approx/data.h"
#include "bench/approx/parallel.h"
#include "bench/approx/random.h"

namespace kvm::bench {
namespace {

constexpr uint32_t kGroup = 4;
constexpr uint32_t kClusters = 256;
constexpr double kSegment = 32;    // mean length, tokens
constexpr double kMeanNorm = 3.0;  // in norms of the centred keys
constexpr double kPulls[] = {1.0, 0.6, 0.4, 0.25};

void fill(Random& random, double sd, std::vector<float>* out) {
  for (float& x : *out) {
    x = static_cast<float>(sd * random.normal());
  }
}

double norm(const float* x, uint32_t dim) {
  double sum = 0;
  for (uint32_t j = 0; j < dim; ++j) {
    sum += double{x[j]} * x[j];
  }
  return std::sqrt(sum);
}

void unit(std::vector<double>* x) {
  double sum = 0;
  for (const double value : *x) {
    sum += value * value;
  }
  for (double& value : *x) {
    value /= std::sqrt(sum);
  }
}

Random query_random(uint64_t set, uint64_t q_head) {
  return Random(999983 * set + 104729 * q_head + 5);
}

class ClusterHead {
 public:
  ClusterHead(const DataSpec& spec, uint32_t number)
      : spec_(spec),
        dim_(spec.dim),
        number_(number),
        random_(1000003 * spec.seed + 7919 * uint64_t{number} + 17),
        mean_(dim_),
        keys_(size_t{kClusters} * dim_),
        values_(size_t{kClusters} * dim_) {
    fill(random_, 1.0, &mean_);
    const double length = norm(mean_.data(), dim_);
    for (float& x : mean_) {
      x = static_cast<float>(x * kMeanNorm * std::sqrt(dim_) / length);
    }
    fill(random_, std::sqrt(0.5), &keys_);
    fill(random_, 1.0, &values_);
    std::iota(std::begin(ranked_), std::end(ranked_), uint16_t{0});
    for (uint32_t i = kClusters - 1; i > 0; --i) {
      std::swap(ranked_[i], ranked_[random_.below(i + 1)]);
    }
    draw_segments();
  }

  void make_tokens(DataSet* out, uint32_t head) {
    for (uint32_t t = 0; t < spec_.tokens; ++t) {
      const double size = std::exp(0.15 * random_.normal());
      const float* key = keys_.data() + size_t{clusters_[t]} * dim_;
      const float* value = values_.data() + size_t{clusters_[t]} * dim_;
      uint16_t* k = out->k_row(head, t);
      uint16_t* v = out->v_row(head, t);
      for (uint32_t j = 0; j < dim_; ++j) {
        const double noise = std::sqrt(0.5) * random_.normal();
        k[j] = f32_to_bf16(static_cast<float>(mean_[j] + size * (key[j] + noise)));
      }
      for (uint32_t j = 0; j < dim_; ++j) {
        v[j] = f32_to_bf16(static_cast<float>(0.6 * value[j] + 0.8 * random_.normal()));
      }
    }
  }

  void make_queries(HeadData* head, double sharpness) const {
    for (uint32_t set = 0; set < spec_.sets; ++set) {
      head->q_position.push_back(spec_.tokens - 1);
      for (uint32_t g = 0; g < kGroup; ++g) {
        make_query(query_random(set, uint64_t{number_} * kGroup + g), sharpness, &head->q);
      }
    }
  }

 private:
  void draw_segments() {
    double sums[kClusters];
    double sum = 0;
    for (uint32_t i = 0; i < kClusters; ++i) {
      sums[i] = sum += 1.0 / (i + 1);
    }
    while (clusters_.size() < spec_.tokens) {
      const double length = std::log(1.0 - random_.uniform()) / std::log(1.0 - 1.0 / kSegment);
      const auto at = std::upper_bound(sums, sums + kClusters - 1, random_.uniform() * sum);
      clusters_.resize(clusters_.size() + 1 + static_cast<size_t>(length), ranked_[at - sums]);
    }
  }

  void make_query(Random random, double sharpness, std::vector<uint16_t>* out) const {
    std::vector<double> toward(dim_);
    for (const double pull : kPulls) {
      const float* center = keys_.data() + size_t{random.below(kClusters)} * dim_;
      for (uint32_t j = 0; j < dim_; ++j) {
        toward[j] += pull * center[j];
      }
    }
    std::vector<double> aside(dim_);
    for (double& x : aside) {
      x = random.normal();
    }
    unit(&toward);
    unit(&aside);
    const double size = sharpness * std::exp(0.25 * random.normal()) * std::sqrt(dim_);
    const double mean_norm = norm(mean_.data(), dim_);
    for (uint32_t j = 0; j < dim_; ++j) {
      const double x = 0.6 * toward[j] + 0.8 * aside[j] - 0.3 * mean_[j] / mean_norm;
      out->push_back(f32_to_bf16(static_cast<float>(size * x)));
    }
  }

  const DataSpec& spec_;
  uint32_t dim_;
  uint32_t number_;
  Random random_;
  std::vector<float> mean_, keys_, values_;
  uint16_t ranked_[kClusters];
  std::vector<uint16_t> clusters_;  // of each token
};

void make_gauss_head(const DataSpec& spec, uint32_t number, DataSet* out, uint32_t head) {
  Random random(1000003 * spec.seed + 7919 * uint64_t{number} + 17);
  for (uint32_t t = 0; t < spec.tokens; ++t) {
    uint16_t* k = out->k_row(head, t);
    uint16_t* v = out->v_row(head, t);
    for (uint32_t j = 0; j < spec.dim; ++j) {
      k[j] = f32_to_bf16(static_cast<float>(random.normal()));
      v[j] = f32_to_bf16(static_cast<float>(random.normal()));
    }
  }
  HeadData& data = out->heads[head];
  for (uint32_t set = 0; set < spec.sets; ++set) {
    data.q_position.push_back(spec.tokens - 1);
    for (uint32_t g = 0; g < kGroup; ++g) {
      Random q = query_random(set, uint64_t{number} * kGroup + g);
      for (uint32_t j = 0; j < spec.dim; ++j) {
        data.q.push_back(f32_to_bf16(static_cast<float>(q.normal())));
      }
    }
  }
}

}  // namespace

DataSet make_cluster_data(const DataSpec& spec, double sharpness, uint32_t threads) {
  DataSet out;
  out.name = spec.name;
  out.lay_out(spec.heads, spec.tokens, spec.dim, kGroup, Dtype::kBf16);
  parallel_for(threads, spec.heads, [&](size_t h) {
    ClusterHead maker(spec, spec.first_head + static_cast<uint32_t>(h));
    out.heads[h].type = spec.name;
    maker.make_tokens(&out, static_cast<uint32_t>(h));
    maker.make_queries(&out.heads[h], sharpness);
  });
  return out;
}

DataSet make_gauss_data(const DataSpec& spec, uint32_t threads) {
  DataSet out;
  out.name = spec.name;
  out.lay_out(spec.heads, spec.tokens, spec.dim, kGroup, Dtype::kBf16);
  parallel_for(threads, spec.heads, [&](size_t h) {
    out.heads[h].type = spec.name;
    make_gauss_head(spec, spec.first_head + static_cast<uint32_t>(h), &out,
                    static_cast<uint32_t>(h));
  });
  return out;
}

}  // namespace kvm::bench
