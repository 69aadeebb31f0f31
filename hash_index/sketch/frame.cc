// SPDX-License-Identifier: Apache-2.0
#include "hash_index/sketch/frame.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <utility>

#include "base/assert.h"
#include "base/round.h"
#include "codecs/rows.h"
#include "hash_index/sketch/eigen.h"
#include "hash_index/sketch/frame_args.h"
#include "hash_index/sketch/random.h"
#include "hash_index/sketch/rows.h"

namespace kvm::hash_index {
namespace {

constexpr size_t kMaxKeys = 2048;   // that a frame is made of
constexpr size_t kMaxShares = 512;  // of these, for what a lead holds and how far it spreads
constexpr double kShrink = 0.3;     // of C_q towards a multiple of the identity
// Of an estimate, over |q|^2 |x|^2 / dim: pi/2 - 1 for the best bit, and what two bits leave.
constexpr double kVariance1Bit = 0.571;
constexpr double kVariance2Bits = 0.133;
// At most so many times the variance of two bits may a lead leave to be chosen. The errors of two
// bits are alike for all keys and queries; those of a lead follow what it was fitted to, and keys
// and queries of a real model come to twice what is foreseen (ADR 0011).
constexpr double kMostNoiseOfLead = 0.25;
// The axes of fewer keys are their own rather than those of the keys to come.
constexpr size_t kMinLeadKeys = 1024;
constexpr double kMaxGrowth = 1.3;   // of the rest's share, before a basis is given up
constexpr double kLeadRangeSd = 16;  // wide: a late sink lies many standard deviations out
constexpr double kCenterRounding = 1.0 / 256;
constexpr double kOutlier = 32;         // medians of the norm
constexpr double kMinMoment = 1e-2;     // of a balanced coordinate, in means of all
constexpr double kMinRestShare = 1e-2;  // below it, growth of the rest does not matter
constexpr double kMinCloser = 1.2;      // of the axes, before a lead is looked for again

using Matrix = std::vector<double>;  // [dim][dim]

const FrameKernels& kernels_of(const ScanTable* table) {
  return *(table != nullptr ? table : &active_scan_table())->frame;
}

double square_of(const double* x, uint32_t n) {
  double sum = 0;
  for (uint32_t i = 0; i < n; ++i) {
    sum += x[i] * x[i];
  }
  return sum;
}

uint32_t stride_of(uint32_t dim) {
  return static_cast<uint32_t>(round_up(dim, uint32_t{kFrameAlign}));
}

// Rows [n][stride].
struct Sample {
  uint32_t dim = 0;
  uint32_t stride = 0;
  size_t n = 0;
  std::vector<float> rows;

  float* row(size_t i) { return rows.data() + i * stride; }
  const float* row(size_t i) const { return rows.data() + i * stride; }
  FrameRows all() const { return {rows.data(), n, stride, dim}; }
  // At most about `most` of them, spread evenly.
  FrameRows spread(size_t most) const {
    const size_t step = std::max<size_t>(div_up(n, most), 1);
    return {rows.data(), div_up(n, step), stride * static_cast<uint32_t>(step), dim};
  }
  // Those that `keeps` says, in their order.
  template <typename Keeps>
  void filter(Keeps keeps) {
    size_t kept = 0;
    for (size_t i = 0; i < n; ++i) {
      if (keeps(i)) {
        std::copy_n(row(i), i == kept ? 0 : stride, row(kept));
        ++kept;
      }
    }
    n = kept;
    rows.resize(n * stride);
  }
};

// Rows lie far apart: they are asked for some time before they are read.
void load_sample(const FrameInput& input, const FrameKernels& kernels, Sample* sample) {
  constexpr size_t kAhead = 16;
  constexpr size_t kLineBytes = 64;
  struct Source {
    const uint8_t* row;
    uint8_t elem;
    float scale;
  };
  size_t total = 0;
  for (const KvRun& run : input.runs) {
    total += run.n_tokens;
  }
  const size_t step = (total + kMaxKeys - 1) / kMaxKeys;
  std::vector<Source> sources;
  sources.reserve(kMaxKeys);
  size_t next = 0;  // token of the run
  for (const KvRun& run : input.runs) {
    for (; next < run.n_tokens; next += step) {
      const uint64_t slot = run.slot + next;
      sources.push_back({codecs::row_at(run.k, input.dim_k, input.head, slot),
                         codecs::codec_of(run.k.codec).elem, scale_at(run.k, input.head, slot)});
    }
    next -= run.n_tokens;
  }
  const auto ask = [&](size_t i) {
    const Source& source = sources[i];
    const size_t size = input.dim_k * vec::elem_bytes(source.elem);
    for (size_t at = 0; at < size; at += kLineBytes) {
      __builtin_prefetch(source.row + at);
    }
  };
  for (size_t i = 0; i < std::min(kAhead, sources.size()); ++i) {
    ask(i);
  }
  sample->n = sources.size();
  sample->rows.resize(sample->n * sample->stride);
  for (size_t i = 0; i < sample->n; ++i) {
    if (i + kAhead < sample->n) {
      ask(i + kAhead);
    }
    kernels.load(sources[i].row, sources[i].elem, sources[i].scale, input.dim_k, sample->stride,
                 sample->row(i));
  }
}

// Finite keys, without those so long that they alone would make the frame.
Sample take_sample(const FrameInput& input, const FrameKernels& kernels) {
  Sample sample{input.dim_k, stride_of(input.dim_k), 0, {}};
  load_sample(input, kernels, &sample);
  std::vector<double> squares(sample.n);
  const FrameRows rows = sample.all();
  kernels.squares(&rows, squares.data());
  std::vector<double> sorted;
  std::copy_if(squares.begin(), squares.end(), std::back_inserter(sorted),
               [](double square) { return square < 1e30; });
  double limit = 1e30;
  if (!sorted.empty()) {
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    limit = *middle == 0 ? limit : std::min(limit, kOutlier * kOutlier * *middle);
  }
  sample.filter([&](size_t i) { return squares[i] < 1e30 && squares[i] <= limit; });
  return sample;
}

std::vector<float> mean_of(const Sample& sample, const FrameKernels& kernels) {
  std::vector<double> sum(sample.stride, 0.0);
  const FrameRows rows = sample.all();
  kernels.add_rows(&rows, sum.data());
  std::vector<float> mean(sample.dim, 0.0f);
  for (uint32_t j = 0; j < sample.dim && sample.n != 0; ++j) {
    const double value = sum[j] / static_cast<double>(sample.n);
    mean[j] = bf16_to_f32(f32_to_bf16(static_cast<float>(value)));
  }
  return mean;
}

void center(const std::vector<float>& mean, const FrameKernels& kernels, Sample* sample) {
  std::vector<float> padded(sample->stride, 0.0f);
  std::copy(mean.begin(), mean.end(), padded.begin());
  kernels.subtract(padded.data(), sample->n, sample->stride, sample->rows.data());
}

// Mean of x x^T.
Matrix second_moments(const FrameRows& rows, const FrameKernels& kernels) {
  const uint32_t dim = rows.dim;
  Matrix sum(size_t{dim} * dim, 0.0);
  kernels.moments(&rows, sum.data());
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j <= i; ++j) {
      const double value = rows.n == 0 ? 0 : sum[size_t{i} * dim + j] / static_cast<double>(rows.n);
      sum[size_t{i} * dim + j] = sum[size_t{j} * dim + i] = value;
    }
  }
  return sum;
}

Matrix multiply(const Matrix& a, const Matrix& b, uint32_t n, const FrameKernels& kernels) {
  Matrix c(size_t{n} * n);
  kernels.multiply(a.data(), b.data(), n, c.data());
  return c;
}

// Sum of values_i^power v_i v_i^T.
Matrix power_of(const Eigen& eigen, uint32_t n, double power, const FrameKernels& kernels) {
  Matrix scaled(eigen.vectors.size());
  for (uint32_t i = 0; i < n; ++i) {
    const double value = std::max(eigen.values[i], 1e-12 * eigen.values[0]);
    const double scale = std::pow(value, power);
    for (uint32_t j = 0; j < n; ++j) {
      scaled[size_t{j} * n + i] = scale * eigen.vectors[size_t{i} * n + j];
    }
  }
  return multiply(scaled, eigen.vectors, n, kernels);
}

void fill_signs(Basis* basis) {
  const uint32_t dim = basis->dim_pad;
  basis->signs.resize(size_t{3} * dim);
  const float scale = static_cast<float>(std::pow(static_cast<double>(dim), -1.5));
  for (uint32_t i = 0; i < 3 * dim; ++i) {
    const float sign = permanent_random(basis->seed, i) < 0.5f ? -1.0f : 1.0f;
    basis->signs[i] = i < dim ? sign * scale : sign;
  }
}

// Columns of the lead: rows 0 .. 7 of `axes` [dim][dim], zero where there are fewer.
std::vector<float> lead_columns(const Matrix& axes, uint32_t dim) {
  std::vector<float> lead(size_t{dim} * kLeadDims, 0.0f);
  for (uint32_t k = 0; k < dim; ++k) {
    for (uint32_t j = 0; j < std::min<uint32_t>(kLeadDims, dim); ++j) {
      lead[size_t{k} * kLeadDims + j] = static_cast<float>(axes[size_t{j} * dim + k]);
    }
  }
  return lead;
}

double trace_of(const Matrix& matrix, uint32_t n) {
  double trace = 0;
  for (uint32_t i = 0; i < n; ++i) {
    trace += matrix[size_t{i} * n + i];
  }
  return trace;
}

// The variance of estimates with a lead and a bit over that with two bits, where keys and queries
// have the product `rests` of the mean squares of their rests, and `whole` of their own.
double noise_of_lead(double rests, double whole) {
  return whole > 0 ? kVariance1Bit * rests / (kVariance2Bits * whole) : 1.0;
}

// Principal axes. Returns noise_of_lead, as for queries that look in all directions alike.
double fit_axes(const Matrix& moments, const FrameKernels& kernels, Basis* basis) {
  const uint32_t dim = basis->dim_k;
  const Eigen eigen = symmetric_eigen(moments, dim, kernels);
  basis->lead_key = lead_columns(eigen.vectors, dim);
  basis->lead_query = basis->lead_key;
  double rest = 0;
  for (uint32_t i = kLeadDims; i < dim; ++i) {
    rest += std::max(eigen.values[i], 0.0);
  }
  return noise_of_lead(rest * (dim - kLeadDims), trace_of(moments, dim) * dim);
}

// The balanced basis, from C_k and C_q (not yet shrunk). Returns noise_of_lead, as for queries such
// as were seen.
double fit_balanced(const Matrix& keys, const Matrix& seen, const FrameKernels& kernels,
                    Basis* basis) {
  const uint32_t dim = basis->dim_k;
  const double trace = trace_of(seen, dim);
  Matrix queries = seen;
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j < dim; ++j) {
      queries[size_t{i} * dim + j] *= 1 - kShrink;
    }
    queries[size_t{i} * dim + i] += kShrink * trace / dim;
  }
  const Eigen eigen_q = symmetric_eigen(queries, dim, kernels);
  const Matrix root = power_of(eigen_q, dim, 0.5, kernels);
  const Matrix inverse = power_of(eigen_q, dim, -0.5, kernels);
  // C_q^(1/2) C_k C_q^(1/2) = U S^2 U^T.
  const Matrix half = multiply(root, keys, dim, kernels);
  const Eigen eigen = symmetric_eigen(multiply(half, root, dim, kernels), dim, kernels);
  std::vector<double> s(dim);
  double mean = 0;
  for (uint32_t i = 0; i < dim; ++i) {
    s[i] = std::sqrt(std::max(eigen.values[i], 0.0));
    mean += s[i] / dim;
  }
  Matrix a = multiply(eigen.vectors, inverse, dim, kernels);  // rows: columns of A and B
  Matrix b = multiply(eigen.vectors, root, dim, kernels);
  for (uint32_t i = 0; i < dim; ++i) {
    // Directions in which these keys do not vary must not blow up in those that come later.
    s[i] = std::max(s[i], kMinMoment * mean);
    for (uint32_t j = 0; j < dim; ++j) {
      a[size_t{i} * dim + j] *= std::sqrt(s[i]);
      b[size_t{i} * dim + j] /= std::sqrt(s[i]);
    }
  }
  basis->lead_key = lead_columns(b, dim);
  basis->lead_query = lead_columns(a, dim);
  const uint32_t stride = kLeadDims + basis->dim_pad;
  basis->key_matrix.assign(size_t{dim} * stride, 0.0f);
  basis->query_matrix.assign(size_t{dim} * basis->dim_pad, 0.0f);
  std::vector<float> row(basis->dim_pad);
  for (uint32_t k = 0; k < dim; ++k) {
    std::fill(row.begin(), row.end(), 0.0f);
    for (uint32_t i = kLeadDims; i < dim; ++i) {
      row[i] = static_cast<float>(b[size_t{i} * dim + k]);
      basis->query_matrix[size_t{k} * basis->dim_pad + i] =
          static_cast<float>(a[size_t{i} * dim + k]);
    }
    rotate(*basis, row.data());
    float* out = basis->key_matrix.data() + size_t{k} * stride;
    std::copy_n(basis->lead_key.data() + size_t{k} * kLeadDims, kLeadDims, out);
    std::copy(row.begin(), row.end(), out + kLeadDims);
  }
  const Matrix turned = multiply(a, seen, dim, kernels);
  double rest_key = 0;
  double rest_query = 0;
  for (uint32_t i = kLeadDims; i < dim; ++i) {
    rest_key += s[i];
    for (uint32_t j = 0; j < dim; ++j) {
      rest_query += turned[size_t{i} * dim + j] * a[size_t{i} * dim + j];
    }
  }
  return noise_of_lead(rest_key * rest_query, trace_of(keys, dim) * trace);
}

// Moments of what was seen of the queries, at most about kMaxKeys of them; empty where there is
// nothing to learn from them.
Matrix query_moments(const FrameInput& input, const FrameKernels& kernels) {
  const size_t n = input.queries.size() / input.dim_k;
  Sample sample{input.dim_k, stride_of(input.dim_k), n, {}};
  sample.rows.resize(n * sample.stride);
  for (size_t i = 0; i < n; ++i) {
    std::copy_n(input.queries.data() + i * input.dim_k, input.dim_k, sample.row(i));
  }
  std::vector<double> squares(n);
  const FrameRows rows = sample.all();
  kernels.squares(&rows, squares.data());
  sample.filter([&](size_t i) { return squares[i] < 1e30 && squares[i] > 0; });
  return sample.n == 0 ? Matrix() : second_moments(sample.spread(kMaxKeys), kernels);
}

// |rest|^2 / (|lead|^2 + |rest|^2), summed over keys: what the 1-bit code has to carry.
double rest_share(const Basis& basis, const Sample& sample, const FrameKernels& kernels) {
  const FrameRows rows = sample.spread(kMaxShares);
  std::vector<double> leads(rows.n * kLeadDims);
  std::vector<double> squares(rows.n);
  kernels.leads(&rows, basis.lead_key.data(), leads.data());
  kernels.squares(&rows, squares.data());
  Sample turned{basis.dim_pad, stride_of(basis.dim_pad), rows.n, {}};
  if (!basis.key_matrix.empty()) {
    turned.rows.resize(turned.n * turned.stride);
    for (size_t i = 0; i < rows.n; ++i) {
      kernels.turn(rows.data + i * rows.stride, basis.dim_k, basis.key_matrix.data() + kLeadDims,
                   kLeadDims + basis.dim_pad, basis.dim_pad, turned.row(i));
    }
    const FrameRows rests = turned.all();
    kernels.squares(&rests, squares.data());
  }
  double lead_sum = 0;
  double rest_sum = 0;
  for (size_t i = 0; i < rows.n; ++i) {
    const double lead_square = square_of(leads.data() + i * kLeadDims, kLeadDims);
    lead_sum += lead_square;
    rest_sum += basis.key_matrix.empty() ? std::max(0.0, squares[i] - lead_square) : squares[i];
  }
  return rest_sum > 0 ? rest_sum / (lead_sum + rest_sum) : 0;
}

// |C| / tr C of the keys' moments.
double closeness_of(const Sample& sample, const FrameKernels& kernels) {
  const Matrix moments = second_moments(sample.spread(kMaxShares), kernels);
  double trace = 0;
  double square = 0;
  for (size_t i = 0; i < moments.size(); ++i) {
    square += moments[i] * moments[i];
    trace += i % (sample.dim + 1) == 0 ? moments[i] : 0;
  }
  return trace > 0 ? std::sqrt(square) / trace : 0;
}

bool still_suits(const Basis& basis, const FrameInput& input, const SketchKind* kind,
                 const Sample& sample, const FrameKernels& kernels) {
  if (basis.dim_k != input.dim_k || (kind != nullptr && *kind != basis.kind)) {
    return false;
  }
  if (!basis.lead_key.empty()) {
    return rest_share(basis, sample, kernels) <=
           kMaxGrowth * std::max(basis.rest_share, kMinRestShare);
  }
  return kind != nullptr || ((basis.has_queries || input.queries.empty()) &&
                             closeness_of(sample, kernels) <= kMinCloser * basis.closeness);
}

// No lead, unless a later run of keys calls for one.
void leave_lead(const FrameInput& input, const Sample& sample, const FrameKernels& kernels,
                Basis* basis) {
  basis->lead_key = basis->lead_query = {};
  basis->key_matrix = basis->query_matrix = {};
  basis->kind = SketchKind::kBits2;
  // Of too few keys: 0, so that the next run looks again.
  basis->closeness = sample.n < kMinLeadKeys ? 0 : closeness_of(sample, kernels);
  basis->has_queries = !input.queries.empty();
}

std::shared_ptr<const Basis> make_basis(const FrameInput& input, const SketchKind* kind,
                                        const Sample& sample, const FrameKernels& kernels) {
  auto basis = std::make_shared<Basis>();
  basis->dim_k = input.dim_k;
  basis->dim_pad = padded_dim(input.dim_k);
  basis->seed = input.seed;
  fill_signs(basis.get());
  if (kind != nullptr && *kind != SketchKind::kLead8Bits1) {
    basis->kind = *kind;
    return basis;
  }
  if (kind == nullptr && sample.n < kMinLeadKeys) {
    leave_lead(input, sample, kernels, basis.get());
    return basis;
  }
  const Matrix keys = second_moments(sample.all(), kernels);
  const Matrix queries = query_moments(input, kernels);
  // Where keys do not vary at all, there is nothing to balance.
  const double noise = queries.empty() || !(trace_of(keys, input.dim_k) > 0)
                           ? fit_axes(keys, kernels, basis.get())
                           : fit_balanced(keys, queries, kernels, basis.get());
  if (kind == nullptr && noise > kMostNoiseOfLead) {
    leave_lead(input, sample, kernels, basis.get());
    return basis;
  }
  basis->kind = SketchKind::kLead8Bits1;
  basis->rest_share = rest_share(*basis, sample, kernels);
  return basis;
}

}  // namespace

void rotate(const Basis& basis, float* x) {
  typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
  const uint32_t dim = basis.dim_pad;
  for (uint32_t turn = 0; turn < 3; ++turn) {
    const float* signs = basis.signs.data() + size_t{turn} * dim;
    for (uint32_t i = 0; i < dim; i += 4) {  // the halves 1 and 2 together
      const float a = x[i] * signs[i];
      const float b = x[i + 1] * signs[i + 1];
      const float c = x[i + 2] * signs[i + 2];
      const float d = x[i + 3] * signs[i + 3];
      x[i] = (a + b) + (c + d);
      x[i + 1] = (a - b) + (c - d);
      x[i + 2] = (a + b) - (c + d);
      x[i + 3] = (a - b) - (c - d);
    }
    for (uint32_t half = 4; half < dim; half *= 2) {
      for (uint32_t base = 0; base < dim; base += 2 * half) {
        for (uint32_t i = base; i < base + half; i += 4) {
          auto* low = reinterpret_cast<Four*>(x + i);
          auto* high = reinterpret_cast<Four*>(x + i + half);
          const Four sum = *low + *high;
          *high = *low - *high;
          *low = sum;
        }
      }
    }
  }
}

FramePtr make_frame(const FrameInput& input, const SketchKind* kind, const ScanTable* table) {
  KVM_ASSERT(input.dim_k >= 1 && input.dim_k <= kMaxSketchDim && input.dim_k % 8 == 0);
  const FrameKernels& kernels = kernels_of(table);
  Sample sample = take_sample(input, kernels);
  auto frame = std::make_shared<Frame>();
  frame->center = mean_of(sample, kernels);
  center(frame->center, kernels, &sample);
  if (input.previous != nullptr &&
      still_suits(*input.previous->basis, input, kind, sample, kernels)) {
    frame->basis = input.previous->basis;
  } else {
    frame->basis = make_basis(input, kind, sample, kernels);
  }
  if (frame->basis->lead_key.empty()) {
    return frame;
  }
  const FrameRows rows = sample.spread(kMaxShares);
  std::vector<double> leads(rows.n * kLeadDims);
  kernels.leads(&rows, frame->basis->lead_key.data(), leads.data());
  std::array<double, kLeadDims> sum{};
  std::array<double, kLeadDims> square{};
  for (size_t i = 0; i < leads.size(); ++i) {
    sum[i % kLeadDims] += leads[i];
    square[i % kLeadDims] += leads[i] * leads[i];
  }
  const double n = static_cast<double>(std::max<size_t>(rows.n, 1));
  double center_square = 0;
  for (const float x : frame->center) {
    center_square += double{x} * double{x};
  }
  for (uint32_t j = 0; j < kLeadDims; ++j) {
    const double sd = std::sqrt(std::max(0.0, square[j] / n - sum[j] / n * (sum[j] / n)));
    double axis_square = 0;
    for (size_t i = j; i < frame->basis->lead_key.size(); i += kLeadDims) {
      axis_square += double{frame->basis->lead_key[i]} * double{frame->basis->lead_key[i]};
    }
    // By less the rounding of the centre moves all keys: that is not to be out of range.
    const double least = kCenterRounding * std::sqrt(center_square * axis_square);
    const double step = std::max({kLeadRangeSd * sd, least, 1e-15}) / 127;
    frame->lead_step[j] = static_cast<float>(step);
    frame->lead_inverse[j] = static_cast<float>(1 / step);
  }
  return frame;
}

SketchKind frame_kind(const Frame& frame) { return frame.basis->kind; }

size_t frame_bytes(const Frame& frame) {
  const Basis& basis = *frame.basis;
  const size_t floats = frame.center.size() + basis.signs.size() + basis.lead_key.size() +
                        basis.lead_query.size() + basis.key_matrix.size() +
                        basis.query_matrix.size();
  return sizeof(Frame) + sizeof(Basis) + floats * sizeof(float);
}

size_t max_frame_bytes(const SketchKind* kind, uint32_t dim_k, bool has_queries) {
  const size_t dim_pad = padded_dim(dim_k);
  size_t floats = dim_k + 3 * dim_pad;
  if (kind == nullptr || *kind == SketchKind::kLead8Bits1) {
    floats += size_t{2} * dim_k * kLeadDims;
    floats += has_queries ? dim_k * (kLeadDims + 2 * dim_pad) : 0;
  }
  return sizeof(Frame) + sizeof(Basis) + floats * sizeof(float);
}

}  // namespace kvm::hash_index
