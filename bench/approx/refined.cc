// SPDX-License-Identifier: Apache-2.0
#include "bench/approx/refined.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "bench/approx/random.h"
#include "hash_index/sketch/frame.h"

namespace kvm::bench {
namespace {

using hash_index::kBlockKeys;
using hash_index::kLeadDims;

// No key is less likely to be drawn: as in the product.
constexpr double kLeast = hash_index::kMinSize;

std::vector<float> widened(const HeadData& head, const uint16_t* row) {
  std::vector<float> out(head.dim);
  for (uint32_t j = 0; j < head.dim; ++j) {
    out[j] = head.to_float(row[j]);
  }
  return out;
}

// x times the columns of m [x.size()][stride], `n` of them from `first` on.
std::vector<float> times(const std::vector<float>& x, const std::vector<float>& m, uint32_t stride,
                         uint32_t first, uint32_t n) {
  std::vector<float> out(n);
  for (size_t k = 0; k < x.size(); ++k) {
    const float* row = m.data() + k * stride + first;
    for (uint32_t j = 0; j < n; ++j) {
      out[j] += x[k] * row[j];
    }
  }
  return out;
}

// x minus `axes` [x.size()][8] times lead.
void subtract(std::vector<float>* x, const std::vector<float>& axes,
              const std::vector<float>& lead) {
  for (size_t k = 0; k < x->size(); ++k) {
    for (uint32_t j = 0; j < kLeadDims; ++j) {
      (*x)[k] -= axes[k * kLeadDims + j] * lead[j];
    }
  }
}

// A vector in a basis: its lead (empty without one) and its rest, rotated.
struct Turned {
  std::vector<float> lead;
  std::vector<float> rest;
};

Turned turn_key(const hash_index::Basis& basis, std::vector<float> x) {
  Turned out;
  if (!basis.key_matrix.empty()) {
    const uint32_t stride = kLeadDims + basis.dim_pad;
    out.lead = times(x, basis.key_matrix, stride, 0, kLeadDims);
    out.rest = times(x, basis.key_matrix, stride, kLeadDims, basis.dim_pad);
    return out;
  }
  if (!basis.lead_key.empty()) {
    out.lead = times(x, basis.lead_key, kLeadDims, 0, kLeadDims);
    subtract(&x, basis.lead_query, out.lead);
  }
  out.rest = std::move(x);
  out.rest.resize(basis.dim_pad);
  hash_index::rotate(basis, out.rest.data());
  return out;
}

Turned turn_query(const hash_index::Basis& basis, std::vector<float> q) {
  Turned out;
  if (!basis.lead_query.empty()) {
    out.lead = times(q, basis.lead_query, kLeadDims, 0, kLeadDims);
  }
  if (!basis.query_matrix.empty()) {
    out.rest = times(q, basis.query_matrix, basis.dim_pad, 0, basis.dim_pad);
  } else {
    if (!out.lead.empty()) {
      subtract(&q, basis.lead_key, out.lead);
    }
    out.rest = std::move(q);
    out.rest.resize(basis.dim_pad);
  }
  hash_index::rotate(basis, out.rest.data());
  return out;
}

float rounded(double x) { return bf16_to_f32(f32_to_bf16(static_cast<float>(x))); }

float capped(const HeadData& head, double product) {
  const double x = head.scale * product;
  return static_cast<float>(head.softcap == 0 ? x : head.softcap * std::tanh(x / head.softcap));
}

// R and F; each(run, block) for the blocks of R.
template <typename Each>
void for_rest(const HeadData& head, uint32_t set, const Sketches& sketches, Proposed* out,
              const Each& each) {
  const uint64_t n = head.n_visible(set);
  std::vector<bool> in_rest(n);
  for (const attention::SketchedRun& run : sketches.runs()) {
    const size_t bytes = hash_index::block_bytes(hash_index::frame_kind(*run.frame), head.dim);
    for (uint32_t b = 0; b < run.n_blocks; ++b) {
      const uint64_t first = run.position + uint64_t{b} * kBlockKeys;
      const std::byte* block = run.blocks + b * bytes;
      if (first < kSinks || first + kBlockKeys + kRecents > n ||
          !hash_index::is_within_range(*run.frame, block)) {
        continue;
      }
      for (uint64_t t = first; t < first + kBlockKeys; ++t) {
        in_rest[t] = true;
        out->tokens.push_back(t);
      }
      out->scanned_bytes += static_cast<double>(bytes);
      each(run, b);
    }
  }
  for (uint64_t t = 0; t < n; ++t) {
    if (!in_rest[t]) {
      out->fixed.push_back(t);
    }
  }
}

float weight_of(double logit, double shift) {
  return static_cast<float>(std::exp(std::min(logit - shift, 80.0)));
}

std::vector<double> largest(const HeadData& head, const Logits& logits) {
  std::vector<double> out;
  for (uint32_t g = 0; g < head.group; ++g) {
    const auto s = logits.of(g);
    out.push_back(*std::max_element(s.begin(), s.end()));
  }
  return out;
}

// The c with sum min(1, c h |v|) = count. Each turn takes the keys out that are at 1; c only grows.
double solve(const float* weights, const std::vector<float>& norms, double count) {
  double c = 0;
  for (int turn = 0; turn < 100; ++turn) {
    double open = 0;
    double n_full = 0;
    for (size_t i = 0; i < norms.size(); ++i) {
      const double x = double{weights[i]} * norms[i];
      if (c * x < 1) {
        open += x;
      } else {
        n_full += 1;
      }
    }
    if (open <= 0 || n_full >= count) {
      break;
    }
    const double next = (count - n_full) / open;
    if (next <= c * (1 + 1e-9)) {
      break;
    }
    c = next;
  }
  return c;
}

// [R]: the largest c h |v| over the group.
std::vector<double> sizes(const HeadData& head, const std::vector<float>& weights,
                          const std::vector<float>& norms, uint64_t count) {
  std::vector<double> out(norms.size(), kLeast);
  for (uint32_t g = 0; g < head.group; ++g) {
    const float* own = weights.data() + g * norms.size();
    const double c = solve(own, norms, static_cast<double>(count));
    for (size_t i = 0; i < norms.size(); ++i) {
      out[i] = std::max(out[i], c * own[i] * norms[i]);
    }
  }
  return out;
}

struct Draw {
  std::vector<size_t> at;          // in R
  std::vector<double> p;           // of those drawn
  std::vector<size_t> candidates;  // in R, where there are two codes
  std::vector<double> first_p;     // of the candidates
  std::vector<double> all_p;       // [R]
};

double random_of(uint64_t seed, uint64_t token) {
  return static_cast<double>(splitmix64(splitmix64(seed) + token) >> 11) * 0x1p-53;
}

// reach 0: one code.
Draw draw(const HeadData& head, const Proposed& proposed, uint64_t count, double reach,
          uint64_t seed) {
  Draw out;
  out.all_p = sizes(head, reach > 0 ? proposed.fine : proposed.coarse, proposed.norms, count);
  std::vector<double> first;
  if (reach > 0) {
    first = sizes(head, proposed.coarse, proposed.norms, count);
  }
  for (size_t i = 0; i < out.all_p.size(); ++i) {
    const double u = random_of(seed, proposed.tokens[i]);
    double& p = out.all_p[i];
    p = std::min(p, 1.0);
    if (reach > 0) {
      const double first_p = std::min(1.0, reach * first[i]);
      p = std::min(p, first_p);
      if (u < first_p) {
        out.candidates.push_back(i);
        out.first_p.push_back(first_p);
      }
    }
    if (u < p) {
      out.at.push_back(i);
      out.p.push_back(p);
    }
  }
  return out;
}

// Sums over S and F of one q head.
class HeadSums {
 public:
  HeadSums(const HeadData& head, const Logits& logits, const Proposed& proposed, const Draw& draw,
           uint32_t g)
      : head_(head), proposed_(proposed), draw_(draw), g_(g), sums_(head.dim) {
    const auto s = logits.of(g);
    for (const uint64_t t : proposed.fixed) {
      add(t, std::exp(s[t] - proposed.shift[g]));
    }
    fixed_mass_ = mass_;
    fixed_sums_ = sums_;
    for (size_t i = 0; i < draw.at.size(); ++i) {
      const uint64_t t = proposed.tokens[draw.at[i]];
      weights_.push_back(std::exp(s[t] - proposed.shift[g]));
      add(t, weights_.back() / draw.p[i]);
    }
    lse_mass_ = mass_ + control_of_mass();
  }

  // g_x and its brackets.
  void add_means(const BlockMeans& means) {
    std::array<double, 2> gains{};
    for (uint64_t half = 0; half < 2; ++half) {
      gains[half] = regression(means, 1 - half);
    }
    const float* h = coarse();
    double mass = 0;
    std::vector<double> sums(head_.dim);
    const auto add = [&](uint64_t token, double weight) {
      mass += weight;
      const float* m = means.of(token);
      for (uint32_t j = 0; j < head_.dim; ++j) {
        sums[j] += weight * m[j];
      }
    };
    for (size_t first = 0; first < proposed_.tokens.size(); first += kBlockKeys) {
      double block = 0;
      for (size_t i = first; i < first + kBlockKeys; ++i) {
        block += gains[proposed_.tokens[i] % 2] * h[i];
      }
      add(proposed_.tokens[first], block);
    }
    for (size_t i = 0; i < draw_.at.size(); ++i) {
      const uint64_t t = proposed_.tokens[draw_.at[i]];
      add(t, -gains[t % 2] * h[draw_.at[i]] / draw_.p[i]);
    }
    mass_ += mass;
    for (uint32_t j = 0; j < head_.dim; ++j) {
      sums_[j] += sums[j];
    }
  }

  void put(Sampled* out) const {
    out->mass.push_back(mass_);
    out->sums.insert(out->sums.end(), sums_.begin(), sums_.end());
    for (const double x : sums_) {
      out->answer.o.push_back(x / std::max(mass_, 1e-300));
    }
    out->answer.lse.push_back(proposed_.shift[g_] + std::log(std::max(lse_mass_, 1e-300)));
  }

 private:
  const float* coarse() const { return proposed_.coarse.data() + g_ * proposed_.tokens.size(); }
  const float* fine() const { return proposed_.fine.data() + g_ * proposed_.tokens.size(); }

  void add(uint64_t token, double weight) {
    mass_ += weight;
    const uint16_t* v = head_.v_row(token);
    for (uint32_t j = 0; j < head_.dim; ++j) {
      sums_[j] += weight * head_.to_float(v[j]);
    }
  }

  // The scalar control of lse, over keys with p < 1: the scanned code's sum over all keys against
  // that over the sample; with a finer code, from all keys to candidates by the one and from there
  // to the sample by the other.
  double control_of_mass() const {
    double drawn = 0, drawn_coarse = 0, drawn_fine = 0;
    for (size_t i = 0; i < draw_.at.size(); ++i) {
      if (draw_.p[i] < 1) {
        drawn += weights_[i] / draw_.p[i];
        drawn_coarse += coarse()[draw_.at[i]] / draw_.p[i];
        drawn_fine += draw_.candidates.empty() ? 0 : fine()[draw_.at[i]] / draw_.p[i];
      }
    }
    double all = 0;
    for (size_t i = 0; i < proposed_.tokens.size(); ++i) {
      all += draw_.all_p[i] < 1 ? coarse()[i] : 0;
    }
    if (drawn <= 0 || drawn_coarse <= 0) {
      return 0;
    }
    if (draw_.candidates.empty()) {
      return drawn / drawn_coarse * (all - drawn_coarse);
    }
    double candidates_coarse = 0, candidates_fine = 0;
    for (size_t i = 0; i < draw_.candidates.size(); ++i) {
      const size_t at = draw_.candidates[i];
      if (draw_.all_p[at] < 1) {
        candidates_coarse += coarse()[at] / draw_.first_p[i];
        candidates_fine += fine()[at] / draw_.first_p[i];
      }
    }
    return drawn / drawn_coarse * (all - candidates_coarse) +
           drawn / drawn_fine * (candidates_fine - drawn_fine);
  }

  // g over the sample of one half; at most twice what would make the sums of h and w equal, for a
  // few keys may say anything.
  double regression(const BlockMeans& means, uint64_t half) const {
    double mass = 0, control = 0;
    std::vector<double> o(head_.dim);
    std::vector<float> v;
    const auto for_half = [&](const auto& each) {
      for (size_t i = 0; i < draw_.at.size(); ++i) {
        const uint64_t t = proposed_.tokens[draw_.at[i]];
        if (t % 2 == half && draw_.p[i] < 1) {
          v = widened(head_, head_.v_row(t));
          each(i, means.of(t));
        }
      }
    };
    for_half([&](size_t i, const float*) {
      mass += 2 * weights_[i] / draw_.p[i];
      control += 2 * coarse()[draw_.at[i]] / draw_.p[i];
      for (uint32_t j = 0; j < head_.dim; ++j) {
        o[j] += 2 * weights_[i] / draw_.p[i] * v[j];
      }
    });
    for (uint32_t j = 0; j < head_.dim; ++j) {
      o[j] = (o[j] + fixed_sums_[j]) / (mass + fixed_mass_);
    }
    double product = 0, square = 0;
    for_half([&](size_t i, const float* m) {
      const double h = coarse()[draw_.at[i]];
      const double scale = (1 - draw_.p[i]) / (draw_.p[i] * draw_.p[i]);
      for (uint32_t j = 0; j < head_.dim; ++j) {
        product += scale * weights_[i] * (v[j] - o[j]) * h * (m[j] - o[j]);
        square += scale * h * (m[j] - o[j]) * h * (m[j] - o[j]);
      }
    });
    return square > 0 ? std::clamp(product / square, 0.0, 2 * mass / control) : 0;
  }

  const HeadData& head_;
  const Proposed& proposed_;
  const Draw& draw_;
  uint32_t g_;
  std::vector<double> weights_;  // of S
  double mass_ = 0, fixed_mass_ = 0, lse_mass_ = 0;
  std::vector<double> sums_, fixed_sums_;
};

Sampled evaluate(const HeadData& head, const Logits& logits, const Proposed& proposed,
                 const Draw& draw, const BlockMeans* means) {
  Sampled out;
  for (uint32_t g = 0; g < head.group; ++g) {
    HeadSums sums(head, logits, proposed, draw, g);
    if (means != nullptr) {
      sums.add_means(*means);
    }
    sums.put(&out);
  }
  out.rows = draw.at.size() * head.group;
  out.unique_rows = proposed.fixed.size() + draw.at.size();
  out.index_bytes =
      proposed.scanned_bytes + kCandidateBytes * static_cast<double>(draw.candidates.size());
  return out;
}

}  // namespace

FineCodes::FineCodes(const HeadData& head, const Sketches& sketches, uint32_t bits)
    : bits_(bits), dim_pad_(sketches.runs()[0].frame->basis->dim_pad), runs_(sketches.runs()) {
  codes_.resize(sketches.n_keys() * dim_pad_);
  leads_.resize(sketches.n_keys() * kLeadDims);
  factors_.resize(sketches.n_keys());
  for (const attention::SketchedRun& run : runs_) {
    for (uint64_t i = 0; i < uint64_t{run.n_blocks} * kBlockKeys; ++i) {
      encode(head, run.position + i, *run.frame);
    }
  }
}

void FineCodes::encode(const HeadData& head, uint64_t token, const hash_index::Frame& frame) {
  std::vector<float> x = widened(head, head.k_row(token));
  for (uint32_t j = 0; j < head.dim; ++j) {
    x[j] -= frame.center[j];
  }
  const Turned turned = turn_key(*frame.basis, std::move(x));
  for (uint32_t j = 0; j < turned.lead.size(); ++j) {
    const float code = std::nearbyint(turned.lead[j] * frame.lead_inverse[j]);
    leads_[token * kLeadDims + j] = static_cast<int8_t>(std::clamp(code, -127.0f, 127.0f));
  }
  encode_rest(turned.rest, token);
}

// The step: the best of a range about that of normal deviates, then twice the nearest multiple of
// the codeword that it gives.
void FineCodes::encode_rest(const std::vector<float>& x, uint64_t token) {
  constexpr std::array<float, 5> kNormalStep = {0, 1.6f, 1.0f, 0.59f, 0.34f};
  constexpr int kTries = 12;
  const auto most = static_cast<float>((1u << (bits_ - 1)) - 1);
  float square = 0;
  for (const float a : x) {
    square += a * a;
  }
  const float rms = std::sqrt(square / static_cast<float>(dim_pad_));
  float best = -1, best_step = 1, best_dot = 0, next = 0;
  const auto attempt = [&](float step) {
    const float inverse = 1 / std::max(step, 1e-30f);
    float dot = 0, length = 0;
    for (const float a : x) {
      const float magnitude = std::fabs(a);
      const float y = std::min(most, std::floor(magnitude * inverse)) + 0.5f;
      dot += y * magnitude;
      length += y * y;
    }
    if (dot * dot / length > best) {
      best = dot * dot / length;
      best_step = step;
      best_dot = dot;
      next = dot / length;
    }
  };
  for (int i = 0; i < kTries; ++i) {
    attempt(rms * kNormalStep[bits_] * (0.6f + 0.1f * static_cast<float>(i)));
  }
  for (int turn = 0; turn < 2; ++turn) {
    attempt(next);
  }
  for (uint32_t j = 0; j < dim_pad_; ++j) {
    const float u = std::min(most, std::floor(std::fabs(x[j]) / std::max(best_step, 1e-30f)));
    const auto y = static_cast<int8_t>(2 * u + 1);
    codes_[token * dim_pad_ + j] = static_cast<int8_t>(x[j] < 0 ? -y : y);
  }
  factors_[token] = best_dot > 1e-30f ? rounded(square / best_dot) : 0;
}

void FineCodes::logits(const HeadData& head, uint32_t set, uint32_t g, float* out) const {
  const std::vector<float> q = widened(head, head.q_rows(set) + size_t{g} * head.dim);
  for (const attention::SketchedRun& run : runs_) {
    const hash_index::Frame& frame = *run.frame;
    double bias = 0;
    for (uint32_t j = 0; j < head.dim; ++j) {
      bias += double{q[j]} * frame.center[j];
    }
    const Turned turned = turn_query(*frame.basis, q);
    const uint64_t end = run.position + uint64_t{run.n_blocks} * kBlockKeys;
    for (uint64_t t = run.position; t < end; ++t) {
      const int8_t* code = codes_.data() + t * dim_pad_;
      float dot = 0;
      for (uint32_t j = 0; j < dim_pad_; ++j) {
        dot += static_cast<float>(code[j]) * turned.rest[j];
      }
      double product = bias + 0.5 * factors_[t] * dot;
      for (uint32_t j = 0; j < turned.lead.size(); ++j) {
        product += double{frame.lead_step[j]} * leads_[t * kLeadDims + j] * turned.lead[j];
      }
      out[t] = capped(head, product);
    }
  }
}

BlockMeans::BlockMeans(const HeadData& head) : dim_(head.dim) {
  const uint64_t n = head.runs.back().position + head.runs.back().n_tokens;
  const uint64_t n_blocks = n / kBlockKeys;
  means_.resize(n_blocks * dim_);
  for (uint64_t b = 0; b < n_blocks; ++b) {
    float* mean = means_.data() + b * dim_;
    for (uint64_t t = b * kBlockKeys; t < (b + 1) * kBlockKeys; ++t) {
      const uint16_t* v = head.v_row(t);
      for (uint32_t j = 0; j < dim_; ++j) {
        mean[j] += head.to_float(v[j]) / kBlockKeys;
      }
    }
    float top = 1e-30f;
    for (uint32_t j = 0; j < dim_; ++j) {
      top = std::max(top, std::fabs(mean[j]));
    }
    const float step = rounded(top / 127);
    for (uint32_t j = 0; j < dim_; ++j) {
      mean[j] = step * std::clamp(std::nearbyint(mean[j] / step), -127.0f, 127.0f);
    }
  }
}

Proposed propose(const HeadData& head, uint32_t set, const Logits& logits, const Sketches& sketches,
                 const FineCodes* fine) {
  Proposed out;
  out.shift = largest(head, logits);
  const uint32_t n_rows = head.group;
  std::vector<float> q;
  for (uint32_t g = 0; g < n_rows; ++g) {
    const std::vector<float> row = widened(head, head.q_rows(set) + size_t{g} * head.dim);
    q.insert(q.end(), row.begin(), row.end());
  }
  const hash_index::ScanRows rows{q.data(), n_rows, head.scale, head.softcap};
  const hash_index::Frame* frame = nullptr;
  std::unique_ptr<HugeBuffer> prepared;
  std::vector<std::vector<float>> found(n_rows);
  std::vector<float> block_logits(size_t{n_rows} * kBlockKeys);
  std::array<float, kBlockKeys> norms;
  for_rest(head, set, sketches, &out, [&](const attention::SketchedRun& run, uint32_t b) {
    if (run.frame != frame) {
      frame = run.frame;
      prepared = std::make_unique<HugeBuffer>(hash_index::scan_query_bytes(*frame, n_rows));
      hash_index::prepare_scan(*frame, rows, prepared->data());
    }
    const hash_index::SketchSpan span{frame, prepared->data(), run.blocks, run.n_blocks,
                                      run.position};
    hash_index::scan_logits(span, n_rows, b, block_logits.data(), norms.data());
    out.norms.insert(out.norms.end(), norms.begin(), norms.end());
    for (uint32_t g = 0; g < n_rows; ++g) {
      for (uint32_t i = 0; i < kBlockKeys; ++i) {
        found[g].push_back(weight_of(block_logits[size_t{g} * kBlockKeys + i], out.shift[g]));
      }
    }
  });
  for (const auto& some : found) {
    out.coarse.insert(out.coarse.end(), some.begin(), some.end());
  }
  if (fine != nullptr) {
    std::vector<float> all(fine->n_keys());
    for (uint32_t g = 0; g < n_rows; ++g) {
      fine->logits(head, set, g, all.data());
      for (const uint64_t t : out.tokens) {
        out.fine.push_back(weight_of(all[t], out.shift[g]));
      }
    }
  }
  return out;
}

Proposed propose_ideally(const HeadData& head, uint32_t set, const Logits& logits,
                         const Sketches& sketches) {
  Proposed out;
  out.shift = largest(head, logits);
  for_rest(head, set, sketches, &out, [](const attention::SketchedRun&, uint32_t) {});
  out.scanned_bytes = 0;
  for (const uint64_t t : out.tokens) {
    double square = 0;
    for (const float x : widened(head, head.v_row(t))) {
      square += double{x} * x;
    }
    out.norms.push_back(static_cast<float>(std::sqrt(square)));
  }
  for (uint32_t g = 0; g < head.group; ++g) {
    for (const uint64_t t : out.tokens) {
      out.coarse.push_back(weight_of(logits.of(g)[t], out.shift[g]));
    }
  }
  return out;
}

Sampled sample(const HeadData& head, const Logits& logits, const Proposed& proposed, uint64_t count,
               uint64_t seed) {
  return evaluate(head, logits, proposed, draw(head, proposed, count, 0, seed), nullptr);
}

Sampled sample_refined(const HeadData& head, const Logits& logits, const Proposed& proposed,
                       uint64_t count, double reach, uint64_t seed) {
  return evaluate(head, logits, proposed, draw(head, proposed, count, reach, seed), nullptr);
}

Sampled sample_with_means(const HeadData& head, const Logits& logits, const Proposed& proposed,
                          const BlockMeans& means, uint64_t count, uint64_t seed) {
  Sampled out = evaluate(head, logits, proposed, draw(head, proposed, count, 0, seed), &means);
  out.index_bytes += means.bytes_per_key() * static_cast<double>(proposed.tokens.size());
  return out;
}

}  // namespace kvm::bench
