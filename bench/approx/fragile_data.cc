// SPDX-License-Identifier: Apache-2.0
// Heads on which an error bar is easily wrong: the error has one direction, or what would tell how
// large it is has hardly ever been drawn. All draws of a head come from one sequence.
#include <algorithm>
#include <cmath>
#include <functional>

#include "bench/approx/data.h"
#include "bench/approx/parallel.h"
#include "bench/approx/random.h"

namespace kvm::bench {
namespace {

constexpr uint32_t kGroup = 2;
constexpr uint32_t kLongKeys = 20;  // in 8,192

using Vector = std::vector<double>;

Vector normals(Random& random, uint32_t dim) {
  Vector out(dim);
  for (double& x : out) {
    x = random.normal();
  }
  return out;
}

void store(const Vector& from, uint16_t* to) {
  for (size_t j = 0; j < from.size(); ++j) {
    to[j] = f32_to_bf16(static_cast<float>(from[j]));
  }
}

class FragileHead {
 public:
  FragileHead(const DataSpec& spec, uint32_t number)
      : spec_(spec),
        number_(number),
        random_(1000003 * spec.seed + 7919 * uint64_t{number} + 29),
        mean_(normals(random_, spec.dim)),
        axis_(normals(random_, spec.dim)),
        toward_(normals(random_, spec.dim)) {}

  void make(DataSet* out, uint32_t head) {
    for (uint32_t t = 0; t < spec_.tokens; ++t) {
      store(key(t), out->k_row(head, t));
      store(value(t), out->v_row(head, t));
    }
    for (uint32_t set = 0; set < spec_.sets; ++set) {
      out->heads[head].q_position.push_back(spec_.tokens - 1);
      for (uint32_t g = 0; g < kGroup; ++g) {
        Vector q = query();
        const size_t at = out->heads[head].q.size();
        out->heads[head].q.resize(at + spec_.dim);
        store(q, out->heads[head].q.data() + at);
      }
    }
  }

 private:
  bool is(const char* name) const { return spec_.name == name; }
  // Where the one heavy key of a needle head lies: not among sinks and recent tokens.
  bool is_needle(uint32_t t) const { return is("needle") && t == spec_.tokens / 3 + 17; }
  bool is_long(uint32_t t) const {
    return is("longkeys") && t % (8192 / kLongKeys) == 8192 / kLongKeys / 2;
  }

  Vector key(uint32_t t) {
    Vector k = normals(random_, spec_.dim);
    double size = 1;
    double lead = 0;  // along toward_, which queries have a part of
    if (is_needle(t)) {
      // A flat context of n keys weighs n e^(sd^2 / 2): this key has `share` of all.
      const double share = 0.3 + 0.4 * (number_ % 5) / 4.0;
      const double rest =
          std::log(static_cast<double>(spec_.tokens)) + sharpness() * sharpness() / 2;
      lead = std::log(share / (1 - share)) + rest;
    } else if (is_long(t)) {
      size = 3 + 7 * random_.uniform();
    } else if (is("heavytail")) {
      // Weights with the tail of a Pareto distribution of index 1.5: without a variance.
      lead = -std::log(1 - random_.uniform()) / 1.5;
    } else if (is("equalkeys")) {
      size = 0;
    } else if (is("zeros") && random_.uniform() < 2.0 / 3) {
      size = 0;
    }
    for (uint32_t j = 0; j < spec_.dim; ++j) {
      k[j] = size * k[j] + lead * toward_[j] / std::sqrt(static_cast<double>(spec_.dim));
    }
    return k;
  }

  Vector value(uint32_t t) {
    Vector v = normals(random_, spec_.dim);
    const double sign = random_.uniform() < 0.5 ? -1 : 1;
    const double along = random_.normal();
    const bool is_rare = is("minority") && random_.uniform() < 0.01 * (2 + number_ % 5);
    const bool is_zero = is("zeros") && random_.uniform() < 0.2;
    for (uint32_t j = 0; j < spec_.dim; ++j) {
      if (is("minority")) {
        v[j] = (is_rare ? -1 : 1) * mean_[j] + 0.02 * v[j];
      } else if (is("needle")) {
        v[j] = is_needle(t) ? axis_[j] : mean_[j] + 0.1 * v[j];
      } else if (is("line")) {
        v[j] = mean_[j] + along * axis_[j];
      } else if (is("cancel") || is("equalkeys")) {
        v[j] = 0.3 * mean_[j] + sign * axis_[j];
      } else if (is("zeros")) {
        v[j] = is_zero ? 0 : mean_[j];
      } else {
        v[j] += 0.5 * mean_[j];
      }
    }
    return v;
  }

  double sharpness() const {
    static constexpr double kSharpness[] = {0.5, 1.0, 1.5};
    return is("needle") ? 0.3 : kSharpness[number_ % std::size(kSharpness)];
  }

  // Logits of sd sharpness() over ordinary keys, and a lead of 1 adds 1 to them.
  Vector query() {
    Vector q = normals(random_, spec_.dim);
    double squares = 0, product = 0;
    for (uint32_t j = 0; j < spec_.dim; ++j) {
      squares += toward_[j] * toward_[j];
      product += toward_[j] * q[j];
    }
    for (uint32_t j = 0; j < spec_.dim; ++j) {
      // The scale is 1 / sqrt(dim), and so is the lead's.
      q[j] = sharpness() * (q[j] - product / squares * toward_[j]) +
             spec_.dim / squares * toward_[j] * (is("needle") || is("heavytail") ? 1 : 0);
    }
    return q;
  }

  const DataSpec& spec_;
  uint32_t number_;
  Random random_;
  Vector mean_, axis_, toward_;
};

}  // namespace

DataSet make_fragile_data(const DataSpec& spec, uint32_t threads) {
  DataSet out;
  out.name = spec.name;
  out.lay_out(spec.heads, spec.tokens, spec.dim, kGroup, Dtype::kBf16);
  parallel_for(threads, spec.heads, [&](size_t h) {
    out.heads[h].type = spec.name;
    FragileHead(spec, spec.first_head + static_cast<uint32_t>(h))
        .make(&out, static_cast<uint32_t>(h));
  });
  return out;
}

}  // namespace kvm::bench
