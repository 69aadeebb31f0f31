// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/directions.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/round.h"

namespace kvm::attention {
namespace {

// Rounds of the power iteration. From the term that is largest, three find the largest eigenvalue
// within a few per cent where it stands out, which is where it matters.
constexpr int kRounds = 3;
static_assert(kMostTold % kGatherKeys == 0);

}  // namespace

Directions::Room Directions::carve_room(const Problem& problem, Carver& carver) {
  const uint32_t rows = padded_rows(problem.n_query * problem.group);
  Room room;
  room.position = carver.take<uint64_t>(kMostTold);
  room.p = carver.take<float>(kMostTold);
  room.weight = carver.take<float>(kMostTold);
  room.logits = carver.take<float>(size_t{rows} * kMostTold);
  room.values = carver.take<float>(size_t{kMostTold} * acc_stride(problem));
  room.products = carver.take<float>(size_t{kMostTold} * kMostTold);
  room.terms = carver.take<float>(size_t{kMostTold} * kMostTold);
  return room;
}

size_t Directions::scratch_bytes(const Problem& problem) {
  Carver carver(nullptr);
  carve_room(problem, carver);
  return carver.used_bytes();
}

Directions::Directions(const Context& c, void* scratch) : c_(c), stride_(acc_stride(c.problem)) {
  Carver carver(scratch);
  room_ = carve_room(c.problem, carver);
}

namespace {

uint32_t step_of(const ToldKeys& keys, uint32_t most) { return (keys.n + most - 1) / most; }

// logits [rows][most], values [n][acc_stride], of n keys.
void read_keys(const Context& c, const uint64_t* positions, uint32_t n, uint32_t most,
               float* logits, float* values) {
  const GatherContext context = c.gathering();
  const uint32_t stride = acc_stride(c.problem);
  uint32_t ids[kMostTold];
  std::iota(ids, ids + n, 0);
  const GatherList list{.ids = {ids, n}, .position = positions};
  BatchMaker maker(context, list);
  GatherArgs args;
  GatherBatch batch;
  alignas(64) float of_batch[kMaxGatherRows * kGatherKeys];
  while (maker.next(&args, &batch)) {
    const size_t first = maker.first();
    context.kernels->logits(&args, &batch, of_batch);
    context.kernels->widen(batch.v, batch.v_scale, batch.elem_v, args.dim_v, batch.n, stride,
                           values + first * stride);
    for (uint32_t i = 0; i < batch.n; ++i) {
      for (uint32_t r = 0; r < c.rows; ++r) {
        logits[size_t{r} * most + first + i] = of_batch[r * kGatherKeys + i];
      }
    }
  }
}

}  // namespace

void read_told(const Context& c, const ToldKeys& told) {
  const uint32_t most = most_taken(c.plan->n_shards);
  uint64_t positions[kMostTold];
  uint32_t n = 0;
  for (uint32_t i = 0; i < told.n; i += step_of(told, most)) {
    positions[n++] = told.position[i];
  }
  read_keys(c, positions, n, most, told.logits, told.values);
}

void Directions::add(const ToldKeys& keys) {
  const uint32_t most = most_taken(c_.plan->n_shards);
  const uint32_t step = step_of(keys, most);
  for (uint32_t i = 0; i < keys.n && n_ < kMostTold; i += step) {
    if (keys.values != nullptr) {
      const size_t at = i / step;
      std::copy_n(keys.values + at * stride_, stride_, room_.values + size_t{n_} * stride_);
      for (uint32_t r = 0; r < c_.rows; ++r) {
        room_.logits[size_t{r} * kMostTold + n_] = keys.logits[size_t{r} * most + at];
      }
    }
    room_.position[n_] = keys.position[i];
    room_.p[n_] = keys.p[i];
    room_.weight[n_++] = keys.weight * static_cast<float>(step);
  }
}

void Directions::read() {
  const GatherContext context = c_.gathering();
  if (!c_.input->is_in_parts) {
    read_keys(c_, room_.position, n_, kMostTold, room_.logits, room_.values);
  }
  const auto padded = static_cast<uint32_t>(round_up(n_, kGatherKeys));
  std::memset(room_.values + size_t{n_} * stride_, 0,
              size_t{padded - n_} * stride_ * sizeof(float));
  context.kernels->products(room_.values, padded, stride_, kMostTold, room_.products);
}

ErrorShape Directions::shape(uint32_t row, std::span<const double> o) {
  ErrorShape shape;
  if (n_ == 0) {
    return shape;
  }
  const float* logits = room_.logits + size_t{row} * kMostTold;
  const float top = *std::max_element(logits, logits + n_);
  alignas(64) float center[kMaxIndexedDim + 32] = {};
  double o2 = 0;
  for (size_t d = 0; d < o.size(); ++d) {
    center[d] = static_cast<float>(o[d]);
    o2 += o[d] * o[d];
  }
  // along: v.o - |o|^2 / 2, so that (v_i - o).(v_j - o) = v_i.v_j - along_i - along_j.
  alignas(64) float along[kMostTold] = {};
  alignas(64) float root[kMostTold] = {};
  double c[kMostTold];
  const SampledKernels& kernels = *c_.table->sampled;
  kernels.dots(room_.values, n_, stride_, center, along);
  double trace = 0;
  double squares = 0;
  double drawn = 0;
  double along_o = 0;
  uint32_t start = 0;
  double most = 0;
  for (uint32_t i = 0; i < n_; ++i) {
    const auto product = static_cast<double>(along[i]);
    along[i] = static_cast<float>(product - o2 / 2);
    const auto w = static_cast<double>(std::exp(logits[i] - top));
    const auto p = static_cast<double>(room_.p[i]);
    c[i] = w * w * (1 - p) / (p * p) * static_cast<double>(room_.weight[i]);
    const auto v2 = static_cast<double>(room_.products[size_t{i} * kMostTold + i]);
    const double term = c[i] * std::max(v2 - 2 * product + o2, 0.0);
    trace += term;
    along_o += c[i] * (product - o2) * (product - o2);
    squares += term * term;
    drawn += static_cast<double>(room_.weight[i]);
    if (term > most) {
      most = term;
      start = i;
    }
  }
  if (!(trace > 0) || !std::isfinite(trace) || !std::isfinite(squares)) {
    return shape;
  }
  shape.along_o = o2 > 0 ? std::clamp(along_o / (o2 * trace), 0.0, 1.0) : 1;
  shape.heaviest = most / (trace * static_cast<double>(room_.weight[start]));
  shape.terms = trace * trace / squares * drawn / n_;
  for (uint32_t i = 0; i < n_; ++i) {
    root[i] = static_cast<float>(std::sqrt(c[i] / trace));
  }
  const auto padded = static_cast<uint32_t>(round_up(n_, kGatherKeys));
  const auto all = static_cast<double>(
      kernels.terms(room_.products, along, root, padded, kMostTold, room_.terms));
  // Terms are independent: those of pairs alone have the expectation of the true (tr S)^2 and
  // tr S^2, where the squares of single terms would add what one draws by chance.
  const double single_squares = squares / (trace * trace);
  const double distinct = 1 - single_squares;
  const double pairs = std::max(all - single_squares, 0.0);
  shape.squares = distinct > 0 ? std::min(pairs / distinct, 1.0) : 1;
  shape.squares = std::max(shape.squares, 0.5 * single_squares);
  alignas(64) float u[kMostTold] = {};
  alignas(64) float room[kMostTold];
  u[start] = 1;
  double grown = 1;
  for (int round = 0; round < kRounds; ++round) {
    kernels.turn(room_.terms, padded, kMostTold, u, room);
    double length = 0;
    for (uint32_t i = 0; i < n_; ++i) {
      length += static_cast<double>(u[i]) * static_cast<double>(u[i]);
    }
    grown = std::sqrt(length);
    for (uint32_t i = 0; i < n_; ++i) {
      u[i] = static_cast<float>(static_cast<double>(u[i]) / std::max(grown, 1e-30));
    }
  }
  // Likewise: what single terms have of it is taken out.
  double single = 0;
  double cubes = 0;
  for (uint32_t i = 0; i < n_; ++i) {
    const auto share = static_cast<double>(u[i]);
    cubes += share * share * share;
    single += share * share * static_cast<double>(room_.terms[size_t{i} * kMostTold + i]);
  }
  shape.largest = distinct > 0 ? std::clamp((grown - single) / distinct, shape.squares, 1.0) : 1;
  // A term along the first eigenvector is u times the root of the eigenvalue.
  shape.skewness2 = std::pow(shape.largest, 3) * cubes * cubes * n_ / drawn;
  if (!(shape.largest <= 1) || !(shape.squares <= 1)) {
    return ErrorShape{.along_o = shape.along_o, .heaviest = shape.heaviest, .terms = shape.terms};
  }
  return shape;
}

}  // namespace kvm::attention
