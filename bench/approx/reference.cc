// SPDX-License-Identifier: Apache-2.0
#include "bench/approx/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvm::bench {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

void widen(const HeadData& head, const uint16_t* bits, double* out) {
  for (uint32_t j = 0; j < head.dim; ++j) {
    out[j] = head.to_float(bits[j]);
  }
}

double dot(const double* a, const double* b, uint32_t dim) {
  double parts[8] = {};
  for (uint32_t j = 0; j < dim; j += 8) {
    for (uint32_t i = 0; i < 8; ++i) {
      parts[i] += a[j + i] * b[j + i];
    }
  }
  double sum = 0;
  for (const double part : parts) {
    sum += part;
  }
  return sum;
}

}  // namespace

Logits compute_logits(const HeadData& head, uint32_t set) {
  Logits out;
  out.n = head.n_visible(set);
  out.values.resize(out.n * head.group);
  std::vector<double> q(size_t{head.group} * head.dim);
  std::vector<double> k(head.dim);
  for (uint32_t g = 0; g < head.group; ++g) {
    widen(head, head.q_rows(set) + size_t{g} * head.dim, q.data() + size_t{g} * head.dim);
  }
  for (uint64_t t = 0; t < out.n; ++t) {
    widen(head, head.k_row(t), k.data());
    for (uint32_t g = 0; g < head.group; ++g) {
      const double logit = head.scale * dot(q.data() + size_t{g} * head.dim, k.data(), head.dim);
      const auto cap = static_cast<double>(head.softcap);
      out.values[g * out.n + t] = cap == 0 ? logit : cap * std::tanh(logit / cap);
    }
  }
  return out;
}

Answer attend_all(const HeadData& head, const Logits& logits) {
  Answer out;
  out.o.resize(size_t{head.group} * head.dim);
  std::vector<double> top(head.group), mass(head.group);
  for (uint32_t g = 0; g < head.group; ++g) {
    const auto s = logits.of(g);
    top[g] = *std::max_element(s.begin(), s.end());
  }
  std::vector<double> v(head.dim);
  for (uint64_t t = 0; t < logits.n; ++t) {
    widen(head, head.v_row(t), v.data());
    for (uint32_t g = 0; g < head.group; ++g) {
      const double w = std::exp(logits.values[g * logits.n + t] - top[g]);
      mass[g] += w;
      double* o = out.o.data() + size_t{g} * head.dim;
      for (uint32_t j = 0; j < head.dim; ++j) {
        o[j] += w * v[j];
      }
    }
  }
  for (uint32_t g = 0; g < head.group; ++g) {
    out.lse.push_back(top[g] + std::log(mass[g]));
    for (uint32_t j = 0; j < head.dim; ++j) {
      out.o[size_t{g} * head.dim + j] /= mass[g];
    }
  }
  return out;
}

double attend_some(const HeadData& head, std::span<const double> logits,
                   std::span<const uint64_t> ids, std::span<const double> log_weights, double* o) {
  std::fill(o, o + head.dim, 0.0);
  const auto logit = [&](size_t i) {
    return logits[ids[i]] + (log_weights.empty() ? 0.0 : log_weights[i]);
  };
  double top = kNothing;
  for (size_t i = 0; i < ids.size(); ++i) {
    top = std::max(top, logit(i));
  }
  if (top == kNothing) {
    return kNothing;
  }
  double mass = 0;
  std::vector<double> v(head.dim);
  for (size_t i = 0; i < ids.size(); ++i) {
    const double w = std::exp(logit(i) - top);
    mass += w;
    widen(head, head.v_row(ids[i]), v.data());
    for (uint32_t j = 0; j < head.dim; ++j) {
      o[j] += w * v[j];
    }
  }
  for (uint32_t j = 0; j < head.dim; ++j) {
    o[j] /= mass;
  }
  return top + std::log(mass);
}

}  // namespace kvm::bench
