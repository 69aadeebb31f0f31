// SPDX-License-Identifier: Apache-2.0
#include "hash_index/sketch/frame.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "base/assert.h"
#include "hash_index/sketch/eigen.h"
#include "hash_index/sketch/random.h"
#include "hash_index/sketch/rows.h"

namespace kvm::hash_index {
namespace {

constexpr size_t kMaxKeys = 2048;   // that a frame is made of
constexpr size_t kMaxShares = 256;  // of these, to see whether a basis still suits
constexpr double kShrink = 0.3;     // of C_q towards a multiple of the identity
constexpr double kMinLeadShare = 0.6;
constexpr double kMaxGrowth = 1.3;      // of the rest's share, before a basis is given up
constexpr double kLeadRangeSd = 16;     // wide: a late sink lies many standard deviations out
constexpr double kOutlier = 32;         // medians of the norm
constexpr double kMinMoment = 1e-2;     // of a balanced coordinate, in means of all
constexpr double kMinRestShare = 1e-2;  // below it, growth of the rest does not matter

using Matrix = std::vector<double>;  // [dim][dim]

template <typename T>
double square_of(const T* x, uint32_t n) {
  double sum = 0;
  for (uint32_t i = 0; i < n; ++i) {
    sum += double{x[i]} * double{x[i]};
  }
  return sum;
}

// Keys [n][dim]: finite ones, without those so long that they alone would make the frame.
struct Sample {
  uint32_t dim = 0;
  size_t n = 0;
  std::vector<float> keys;

  const float* key(size_t i) const { return keys.data() + i * dim; }
};

Sample take_sample(const FrameInput& input) {
  size_t total = 0;
  for (const KvRun& run : input.runs) {
    total += run.n_tokens;
  }
  const size_t stride = (total + kMaxKeys - 1) / kMaxKeys;
  Sample sample{input.dim_k, 0, {}};
  sample.keys.reserve((stride == 0 ? 0 : total / stride + 1) * input.dim_k);
  std::vector<float> norms;
  std::vector<float> row(input.dim_k);
  size_t index = 0;
  for (const KvRun& run : input.runs) {
    for (uint32_t t = 0; t < run.n_tokens; ++t, ++index) {
      if (index % stride != 0) {
        continue;
      }
      load_key(run, input.head, t, input.dim_k, row.data());
      const double square = square_of(row.data(), input.dim_k);
      if (square < 1e30) {
        norms.push_back(static_cast<float>(std::sqrt(square)));
        sample.keys.insert(sample.keys.end(), row.begin(), row.end());
      }
    }
  }
  std::vector<float> sorted = norms;
  const size_t middle = sorted.size() / 2;
  if (!sorted.empty()) {
    std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(middle),
                     sorted.end());
  }
  const double limit = sorted.empty() ? 0 : kOutlier * double{sorted[middle]};
  for (size_t i = 0; i < norms.size(); ++i) {
    if (limit == 0 || double{norms[i]} <= limit) {
      std::copy_n(sample.key(i), input.dim_k, sample.keys.data() + sample.n * input.dim_k);
      ++sample.n;
    }
  }
  sample.keys.resize(sample.n * input.dim_k);
  return sample;
}

std::vector<float> mean_of(const Sample& sample) {
  std::vector<double> sum(sample.dim, 0.0);
  for (size_t i = 0; i < sample.n; ++i) {
    for (uint32_t j = 0; j < sample.dim; ++j) {
      sum[j] += double{sample.key(i)[j]};
    }
  }
  std::vector<float> mean(sample.dim, 0.0f);
  for (uint32_t j = 0; j < sample.dim && sample.n != 0; ++j) {
    const double value = sum[j] / static_cast<double>(sample.n);
    mean[j] = bf16_to_f32(f32_to_bf16(static_cast<float>(value)));
  }
  return mean;
}

void center(const std::vector<float>& mean, Sample* sample) {
  for (size_t i = 0; i < sample->n; ++i) {
    for (uint32_t j = 0; j < sample->dim; ++j) {
      sample->keys[i * sample->dim + j] -= mean[j];
    }
  }
}

// Mean of x x^T over n rows, at most about kMaxKeys of them. Sums of 64 rows in fp32, of those in
// fp64.
Matrix second_moments(const float* rows, size_t n, uint32_t dim) {
  const size_t stride = (n + kMaxKeys - 1) / kMaxKeys;
  Matrix sum(size_t{dim} * dim, 0.0);
  std::vector<float> part(size_t{dim} * dim, 0.0f);
  size_t count = 0;
  const auto fold = [&] {
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] += double{part[i]};
    }
    std::fill(part.begin(), part.end(), 0.0f);
  };
  for (size_t row = 0; row < n; row += stride) {
    const float* x = rows + row * dim;
    for (uint32_t i = 0; i < dim; ++i) {
      for (uint32_t j = 0; j <= i; ++j) {
        part[size_t{i} * dim + j] += x[i] * x[j];
      }
    }
    if (++count % 64 == 0) {
      fold();
    }
  }
  fold();
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j <= i; ++j) {
      const double value = count == 0 ? 0 : sum[size_t{i} * dim + j] / static_cast<double>(count);
      sum[size_t{i} * dim + j] = sum[size_t{j} * dim + i] = value;
    }
  }
  return sum;
}

Matrix multiply(const Matrix& a, const Matrix& b, uint32_t n) {
  Matrix c(size_t{n} * n, 0.0);
  for (uint32_t i = 0; i < n; ++i) {
    double* row = c.data() + size_t{i} * n;
    for (uint32_t k = 0; k < n; ++k) {
      const double x = a[size_t{i} * n + k];
      const double* other = b.data() + size_t{k} * n;
      for (uint32_t j = 0; j < n; ++j) {
        row[j] += x * other[j];
      }
    }
  }
  return c;
}

// Sum of values_i^power v_i v_i^T.
Matrix power_of(const Eigen& eigen, uint32_t n, double power) {
  Matrix scaled(eigen.vectors.size());
  for (uint32_t i = 0; i < n; ++i) {
    const double value = std::max(eigen.values[i], 1e-12 * eigen.values[0]);
    const double scale = std::pow(value, power);
    for (uint32_t j = 0; j < n; ++j) {
      scaled[size_t{j} * n + i] = scale * eigen.vectors[size_t{i} * n + j];
    }
  }
  return multiply(scaled, eigen.vectors, n);
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

double lead_share(const std::vector<double>& variances) {
  double lead = 0;
  double all = 0;
  for (size_t i = 0; i < variances.size(); ++i) {
    all += variances[i];
    lead += i < kLeadDims ? variances[i] : 0;
  }
  return all > 0 ? lead / all : 0;
}

// Principal axes. Returns the lead's share.
double fit_axes(const Matrix& moments, Basis* basis) {
  Eigen eigen = symmetric_eigen(moments, basis->dim_k);
  for (double& value : eigen.values) {
    value = std::max(value, 0.0);
  }
  basis->lead_key = lead_columns(eigen.vectors, basis->dim_k);
  basis->lead_query = basis->lead_key;
  return lead_share(eigen.values);
}

// The balanced basis, from C_k and C_q (not yet shrunk). Returns the lead's share.
double fit_balanced(const Matrix& keys, Matrix queries, Basis* basis) {
  const uint32_t dim = basis->dim_k;
  double trace = 0;
  for (uint32_t i = 0; i < dim; ++i) {
    trace += queries[size_t{i} * dim + i];
  }
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j < dim; ++j) {
      queries[size_t{i} * dim + j] *= 1 - kShrink;
    }
    queries[size_t{i} * dim + i] += kShrink * trace / dim;
  }
  const Eigen eigen_q = symmetric_eigen(queries, dim);
  const Matrix root = power_of(eigen_q, dim, 0.5);
  const Matrix inverse = power_of(eigen_q, dim, -0.5);
  // C_q^(1/2) C_k C_q^(1/2) = U S^2 U^T.
  const Eigen eigen = symmetric_eigen(multiply(multiply(root, keys, dim), root, dim), dim);
  std::vector<double> s(dim);
  std::vector<double> variances(dim);
  double mean = 0;
  for (uint32_t i = 0; i < dim; ++i) {
    variances[i] = std::max(eigen.values[i], 0.0);
    s[i] = std::sqrt(variances[i]);
    mean += s[i] / dim;
  }
  Matrix a = multiply(eigen.vectors, inverse, dim);  // rows: columns of A and B
  Matrix b = multiply(eigen.vectors, root, dim);
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
  return lead_share(variances);
}

// Moments of what was seen of the queries; empty where there is nothing to learn from them.
Matrix query_moments(const FrameInput& input) {
  const size_t n = input.queries.size() / input.dim_k;
  std::vector<float> rows;
  for (size_t i = 0; i < n; ++i) {
    const float* q = input.queries.data() + i * input.dim_k;
    const double square = square_of(q, input.dim_k);
    if (square < 1e30 && square > 0) {
      rows.insert(rows.end(), q, q + input.dim_k);
    }
  }
  if (rows.empty()) {
    return {};
  }
  return second_moments(rows.data(), rows.size() / input.dim_k, input.dim_k);
}

// Coordinates of a centred key in the lead.
void lead_of(const Basis& basis, const float* x, double* lead) {
  std::fill(lead, lead + kLeadDims, 0.0);
  for (uint32_t k = 0; k < basis.dim_k; ++k) {
    for (uint32_t j = 0; j < kLeadDims; ++j) {
      lead[j] += double{x[k]} * double{basis.lead_key[size_t{k} * kLeadDims + j]};
    }
  }
}

// |rest|^2 / (|lead|^2 + |rest|^2), summed over keys: what the 1-bit code has to carry.
double rest_share(const Basis& basis, const Sample& sample) {
  const size_t stride = (sample.n + kMaxShares - 1) / kMaxShares;
  double lead_sum = 0;
  double rest_sum = 0;
  std::vector<float> rest(basis.dim_pad);
  for (size_t i = 0; i < sample.n; i += stride) {
    const float* x = sample.key(i);
    double lead[kLeadDims];
    lead_of(basis, x, lead);
    const double lead_square = square_of(lead, kLeadDims);
    lead_sum += lead_square;
    if (basis.key_matrix.empty()) {
      rest_sum += std::max(0.0, square_of(x, basis.dim_k) - lead_square);
      continue;
    }
    std::fill(rest.begin(), rest.end(), 0.0f);
    for (uint32_t k = 0; k < basis.dim_k; ++k) {
      const float* row = basis.key_matrix.data() + size_t{k} * (kLeadDims + basis.dim_pad);
      for (uint32_t j = 0; j < basis.dim_pad; ++j) {
        rest[j] += x[k] * row[kLeadDims + j];
      }
    }
    rest_sum += square_of(rest.data(), basis.dim_pad);
  }
  return rest_sum > 0 ? rest_sum / (lead_sum + rest_sum) : 0;
}

bool still_suits(const Basis& basis, const FrameInput& input, const SketchKind* kind,
                 const Sample& sample) {
  if (basis.dim_k != input.dim_k || (kind != nullptr && *kind != basis.kind)) {
    return false;
  }
  return basis.lead_key.empty() ||
         rest_share(basis, sample) <= kMaxGrowth * std::max(basis.rest_share, kMinRestShare);
}

std::shared_ptr<const Basis> make_basis(const FrameInput& input, const SketchKind* kind,
                                        const Sample& sample) {
  auto basis = std::make_shared<Basis>();
  basis->dim_k = input.dim_k;
  basis->dim_pad = padded_dim(input.dim_k);
  basis->seed = input.seed;
  fill_signs(basis.get());
  if (kind != nullptr && *kind != SketchKind::kLead8Bits1) {
    basis->kind = *kind;
    return basis;
  }
  const Matrix keys = second_moments(sample.keys.data(), sample.n, sample.dim);
  Matrix queries = query_moments(input);
  // Where keys do not vary at all, there is nothing to balance.
  double trace = 0;
  for (uint32_t i = 0; i < input.dim_k; ++i) {
    trace += keys[size_t{i} * input.dim_k + i];
  }
  const double share = queries.empty() || !(trace > 0)
                           ? fit_axes(keys, basis.get())
                           : fit_balanced(keys, std::move(queries), basis.get());
  if (kind == nullptr && share < kMinLeadShare) {
    basis->lead_key = basis->lead_query = {};
    basis->key_matrix = basis->query_matrix = {};
    basis->kind = SketchKind::kBits2;
    return basis;
  }
  basis->kind = SketchKind::kLead8Bits1;
  basis->rest_share = rest_share(*basis, sample);
  return basis;
}

}  // namespace

void rotate(const Basis& basis, float* x) {
  const uint32_t dim = basis.dim_pad;
  for (uint32_t turn = 0; turn < 3; ++turn) {
    const float* signs = basis.signs.data() + size_t{turn} * dim;
    for (uint32_t i = 0; i < dim; ++i) {
      x[i] *= signs[i];
    }
    for (uint32_t half = 1; half < dim; half *= 2) {
      for (uint32_t base = 0; base < dim; base += 2 * half) {
        for (uint32_t i = base; i < base + half; ++i) {
          const float sum = x[i] + x[i + half];
          x[i + half] = x[i] - x[i + half];
          x[i] = sum;
        }
      }
    }
  }
}

FramePtr make_frame(const FrameInput& input, const SketchKind* kind) {
  KVM_ASSERT(input.dim_k >= 1 && input.dim_k <= kMaxSketchDim && input.dim_k % 8 == 0);
  Sample sample = take_sample(input);
  auto frame = std::make_shared<Frame>();
  frame->center = mean_of(sample);
  center(frame->center, &sample);
  if (input.previous != nullptr && still_suits(*input.previous->basis, input, kind, sample)) {
    frame->basis = input.previous->basis;
  } else {
    frame->basis = make_basis(input, kind, sample);
  }
  if (frame->basis->lead_key.empty()) {
    return frame;
  }
  std::array<double, kLeadDims> sum{};
  std::array<double, kLeadDims> square{};
  for (size_t i = 0; i < sample.n; ++i) {
    double lead[kLeadDims];
    lead_of(*frame->basis, sample.key(i), lead);
    for (uint32_t j = 0; j < kLeadDims; ++j) {
      sum[j] += lead[j];
      square[j] += lead[j] * lead[j];
    }
  }
  const double n = static_cast<double>(std::max<size_t>(sample.n, 1));
  for (uint32_t j = 0; j < kLeadDims; ++j) {
    const double sd = std::sqrt(std::max(0.0, square[j] / n - sum[j] / n * (sum[j] / n)));
    const double step = std::max(kLeadRangeSd * sd, 1e-15) / 127;
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
