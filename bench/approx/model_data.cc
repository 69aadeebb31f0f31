// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "bench/approx/data.h"
#include "bench/approx/parallel.h"
#include "bench/approx/random.h"

namespace kvm::bench {
namespace {

constexpr uint32_t kGroup = 4;
constexpr uint32_t kTypes = 3000;
constexpr uint32_t kTopics = 64;
constexpr uint32_t kTopicRun = 512;  // mean length of a run of one topic, tokens
constexpr double kNoiseShare = 0.25;
constexpr uint32_t kRecent = 64;
constexpr double kRecentNats = 1.5;
constexpr uint32_t kNeedles = 8;
constexpr double kMeanNorm = 1.5;     // in rms norms of the centred keys
constexpr double kQueryOffset = 0.5;  // of queries along minus the mean, in their norms
constexpr float kLevel = 4.0f;        // of queries along the direction of recent keys
constexpr float kSinkValue = 0.05f;
constexpr float kOutlierSd = 15.0f;
constexpr double kSigmas[] = {1.0, 1.8, 2.4, 3.0, 3.8, 2.2};
constexpr uint32_t kNeedleType = 5;

// An orthogonal map from axes, in which the clouds are described, to channels: two rounds of random
// signs and Walsh-Hadamard, so that no axis is a channel.
class Rotation {
 public:
  Rotation(Random& random, uint32_t dim) : dim_(dim), signs_(2 * dim) {
    for (float& sign : signs_) {
      sign = random.bits() >> 63 != 0 ? -1.0f : 1.0f;
    }
  }
  void to_channels(float* x) const {
    for (int round = 0; round < 2; ++round) {
      flip(x, round);
      hadamard(x);
    }
  }
  void to_axes(float* x) const {
    for (int round = 1; round >= 0; --round) {
      hadamard(x);
      flip(x, round);
    }
  }

 private:
  void flip(float* x, int round) const {
    for (uint32_t i = 0; i < dim_; ++i) {
      x[i] *= signs_[round * dim_ + i];
    }
  }
  void hadamard(float* x) const {
    for (uint32_t half = 1; half < dim_; half *= 2) {
      for (uint32_t i = 0; i < dim_; i += 2 * half) {
        for (uint32_t j = i; j < i + half; ++j) {
          const float a = x[j], b = x[j + half];
          x[j] = a + b;
          x[j + half] = a - b;
        }
      }
    }
    const float norm = 1.0f / std::sqrt(static_cast<float>(dim_));
    for (uint32_t i = 0; i < dim_; ++i) {
      x[i] *= norm;
    }
  }

  uint32_t dim_;
  std::vector<float> signs_;
};

// Where keys and queries of a stretch of text come from. Directions are whitened, in axes.
struct Cloud {
  std::vector<float> key_sd, query_sd;  // [dim], of the axes; 0 on the two special ones, the last
  std::vector<float> types, topics;     // [kTypes or kTopics][dim], with their shares
  std::vector<float> mean;              // [dim], channels
};

struct Token {
  uint16_t type;
  uint16_t topic;
};

// Makes one head. Everything of a token comes from a stream of its page, so pages are made in any
// order by any thread.
class HeadMaker {
 public:
  HeadMaker(const DataSpec& spec, const ModelOptions& options, uint32_t number)
      : spec_(spec),
        options_(options),
        number_(number),
        dim_(spec.dim),
        random_(splitmix64(spec.seed * kSplitMixStep + number)),
        rotation_(random_, dim_),
        scale_(1.0f / std::sqrt(static_cast<float>(dim_))) {
    sigma_ = options.sigma > 0 ? options.sigma : kSigmas[type()];
    place_special();
    make_tokens();
    clouds_.push_back(make_cloud(false));
    if (options.drift_tokens != 0 || options.turn_at != 0) {
      clouds_.push_back(make_cloud(true));
    }
    make_values_tables();
  }

  std::string type_name() const {
    if (options_.sigma > 0) {
      return "even";
    }
    char text[16];
    std::snprintf(text, sizeof text, "sigma %.1f", sigma_);
    return type() == kNeedleType ? "needle" : text;
  }

  // Rows of tokens [64 page, 64 page + 64).
  void make_page(DataSet* out, uint32_t head, uint64_t page) const {
    Random random(splitmix64(stream_ + page));
    std::vector<float> row(dim_);
    const uint64_t end = std::min<uint64_t>(spec_.tokens, (page + 1) * kPageTokens);
    for (uint64_t t = page * kPageTokens; t < end; ++t) {
      make_key(random, t, row.data());
      round_row(row.data(), out->k_row(head, t));
      make_value(random, t, row.data());
      round_row(row.data(), out->v_row(head, t));
    }
  }

  // After all pages. Queries are scaled, and the sinks set, by the keys as they are stored.
  void make_queries(DataSet* out, uint32_t head_index) {
    HeadData& head = out->heads[head_index];
    const uint32_t n_rows = spec_.sets * kGroup;
    std::vector<float> q(size_t{n_rows} * dim_);
    for (uint32_t set = 0; set < spec_.sets; ++set) {
      head.q_position.push_back(position(set));
      for (uint32_t g = 0; g < kGroup; ++g) {
        make_query(head, set, q.data() + (size_t{set} * kGroup + g) * dim_);
      }
    }
    head.q.resize(q.size());
    for (size_t i = 0; i < q.size(); ++i) {
      head.q[i] = f32_to_bf16(q[i]);
    }
    if (options_.late_sink) {
      set_late_sink(out, head_index);
    }
    set_sink(out, head_index, q.data());
  }

 private:
  uint32_t type() const { return number_ % std::size(kSigmas); }

  // 0 before the drift, 1 at its end.
  float drift(uint64_t token) const {
    if (options_.turn_at != 0) {
      return token < options_.turn_at ? 0.0f : 1.0f;
    }
    const uint64_t begin = spec_.tokens - options_.drift_tokens;
    return token < begin ? 0.0f
                         : static_cast<float>(token - begin) /
                               static_cast<float>(std::max(1u, options_.drift_tokens));
  }

  // Drifting queries lie in the last 4,096 steps; all others are of the last token.
  uint64_t position(uint32_t set) const {
    const uint64_t last = spec_.tokens - 1;
    if (options_.drift_tokens == 0) {
      return last;
    }
    const uint64_t stretch = std::min<uint64_t>(4096, options_.drift_tokens);
    return last - stretch * (spec_.sets - 1 - set) / spec_.sets;
  }

  void make_tokens() {
    std::vector<double> sums(kTypes);
    double sum = 0;
    for (uint32_t i = 0; i < kTypes; ++i) {
      sums[i] = sum += 1.0 / (i + 2.7);
    }
    tokens_.resize(spec_.tokens);
    uint32_t topic = random_.below(kTopics);
    for (Token& token : tokens_) {
      const auto at = std::upper_bound(sums.begin(), sums.end(), random_.uniform() * sum);
      token.type = static_cast<uint16_t>(std::min<size_t>(at - sums.begin(), kTypes - 1));
      topic = random_.uniform() * kTopicRun < 1.0 ? random_.below(kTopics) : topic;
      token.topic = static_cast<uint16_t>(topic);
    }
  }

  std::vector<float> table(uint32_t rows, double share) {
    std::vector<float> out(size_t{rows} * dim_);
    random_.fill_normals(out.data(), out.size());
    for (float& x : out) {
      x *= static_cast<float>(std::sqrt(share));
    }
    return out;
  }

  Cloud make_cloud(bool moved) {
    Cloud cloud;
    cloud.types = table(kTypes, 0.58 * (1 - kNoiseShare));
    cloud.topics = table(kTopics, 0.42 * (1 - kNoiseShare));
    cloud.key_sd = spectrum(options_.key_power);
    cloud.query_sd = spectrum(options_.query_power);
    if (options_.turn_at != 0) {
      // The powers of keys and queries, by [turns sharp][moved].
      constexpr double kPowers[2][2][2] = {{{1.15, 0.7}, {1.15, -1.0}}, {{1.0, 0.5}, {1.6, 0.9}}};
      const auto& powers = kPowers[number_ % 2][moved ? 1 : 0];
      cloud.key_sd = spectrum(powers[0]);
      cloud.query_sd = spectrum(powers[1]);
    } else if (moved) {
      // The same spectra, held by other axes.
      std::rotate(cloud.key_sd.begin(), cloud.key_sd.begin() + dim_ / 3, cloud.key_sd.end() - 2);
      std::rotate(cloud.query_sd.begin(), cloud.query_sd.begin() + dim_ / 3,
                  cloud.query_sd.end() - 2);
    }
    cloud.mean.resize(dim_);
    double square = 0;
    random_.fill_normals(cloud.mean.data(), dim_);
    // A few channels are huge in the mean: those that a rotary embedding turns slowest.
    for (int i = 0; i < 3; ++i) {
      cloud.mean[dim_ - 1 - random_.below(dim_ / 8)] *= 6.0f;
    }
    add_along(sink_axis_, -along(sink_axis_, cloud.mean.data()), cloud.mean.data());
    add_along(nats_axis_, -along(nats_axis_, cloud.mean.data()), cloud.mean.data());
    for (const float x : cloud.mean) {
      square += x * x;
    }
    for (float& x : cloud.mean) {
      x *= static_cast<float>(kMeanNorm * std::sqrt(dim_ / square));
    }
    return cloud;
  }

  // Standard deviations of the axes, with mean square 1 over the dim.
  std::vector<float> spectrum(double power) const {
    std::vector<float> sd(dim_);
    double sum = 0;
    for (uint32_t j = 0; j + 2 < dim_; ++j) {
      sum += std::pow(j + 1.0, -power);
    }
    for (uint32_t j = 0; j + 2 < dim_; ++j) {
      sd[j] = static_cast<float>(std::sqrt(std::pow(j + 1.0, -power) * dim_ / sum));
    }
    return sd;
  }

  void make_values_tables() {
    value_mean_share_ = 0.1 + 0.2 * random_.uniform();
    value_mean_ = table(1, value_mean_share_);
    value_types_ = table(kTypes, 0.20);
    value_topics_ = table(kTopics, 0.15);
  }

  // The two last axes, in channels: one for the sink, one for what lies some nats up.
  void place_special() {
    stream_ = random_.bits();
    sink_axis_.assign(dim_, 0.0f);
    nats_axis_.assign(dim_, 0.0f);
    sink_axis_[dim_ - 1] = nats_axis_[dim_ - 2] = 1.0f;
    rotation_.to_channels(sink_axis_.data());
    rotation_.to_channels(nats_axis_.data());
    for (uint32_t i = 0; i < kNeedles && type() == kNeedleType && options_.sigma == 0; ++i) {
      const double at = (0.1 + 0.7 * random_.uniform()) * spec_.tokens;
      needles_.push_back({static_cast<uint64_t>(at), 8.0 + 2.0 * random_.uniform()});
    }
    for (uint32_t i = 0; i < 4; ++i) {
      outliers_.push_back(random_.below(dim_));
    }
  }

  // Returns what the special axis adds to every query's logit of the token.
  double nats(uint64_t token) const {
    double sum = token + kRecent >= spec_.tokens ? kRecentNats : 0.0;
    for (const auto& [at, height] : needles_) {
      sum += at == token ? height : 0.0;
    }
    return sum;
  }

  void make_key(Random& random, uint64_t t, float* row) const {
    random.fill_normals(row, dim_);
    const float moved = drift(t);
    const float share[2] = {std::sqrt(1.0f - moved), std::sqrt(moved)};
    const float radius = static_cast<float>(std::exp(0.15 * random.normal()));
    const float noise = static_cast<float>(std::sqrt(kNoiseShare));
    for (uint32_t j = 0; j < dim_; ++j) {
      float sum = 0;
      float variance = 0;
      for (size_t c = 0; c < clouds_.size(); ++c) {
        const Cloud& cloud = clouds_[c];
        sum +=
            share[c] * cloud.key_sd[j] *
            (cloud.types[tokens_[t].type * dim_ + j] + cloud.topics[tokens_[t].topic * dim_ + j]);
        variance += share[c] * share[c] * cloud.key_sd[j] * cloud.key_sd[j];
      }
      row[j] = radius * (sum + std::sqrt(variance) * noise * row[j]);
    }
    rotation_.to_channels(row);
    const float height = static_cast<float>(nats(t)) / (scale_ * kLevel);
    for (uint32_t j = 0; j < dim_; ++j) {
      row[j] += mean(moved, j) + height * nats_axis_[j];
    }
    if (options_.outlier_channels) {
      for (const uint32_t channel : outliers_) {
        row[channel] += kOutlierSd * static_cast<float>(random.normal());
      }
    }
  }

  float mean(float moved, uint32_t j) const {
    const float first = clouds_[0].mean[j];
    return clouds_.size() == 1 ? first : (1 - moved) * first + moved * clouds_[1].mean[j];
  }

  void make_value(Random& random, uint64_t t, float* row) const {
    random.fill_normals(row, dim_);
    const float rest = static_cast<float>(std::sqrt(1 - value_mean_share_ - 0.20 - 0.15));
    const float size = options_.value_outliers && random.uniform() < 1e-3 ? 30.0f : 1.0f;
    for (uint32_t j = 0; j < dim_; ++j) {
      row[j] = size * (value_mean_[j] + value_types_[tokens_[t].type * dim_ + j] +
                       value_topics_[tokens_[t].topic * dim_ + j] + rest * row[j]);
    }
  }

  void round_row(const float* row, uint16_t* out) const {
    for (uint32_t j = 0; j < dim_; ++j) {
      out[j] = f32_to_bf16(row[j]);
    }
  }

  // On the queries' axes: noise and a pull to a key, leaning away from the mean; scaled so that
  // the logits of ordinary keys have the wanted spread.
  void make_query(const HeadData& head, uint32_t set, float* q) {
    const float moved = drift(head.q_position[set]);
    const bool second = moved > 0.5f;
    const Cloud& cloud = clouds_[second ? 1 : 0];
    std::vector<float> pull(dim_);
    const uint64_t token =
        4 + random_.below(static_cast<uint32_t>(head.q_position[set] - 4 - kRecent));
    for (uint32_t j = 0; j < dim_; ++j) {
      pull[j] = head.to_float(head.k_row(token)[j]) - mean(drift(token), j);
    }
    rotation_.to_axes(pull.data());
    random_.fill_normals(q, dim_);
    double square = 0;
    for (uint32_t j = 0; j + 2 < dim_; ++j) {
      q[j] = cloud.query_sd[j] *
             static_cast<float>(std::sqrt(0.6) * q[j] + std::sqrt(0.4) * pull[j] / cloud.key_sd[j]);
      square += q[j] * q[j];
    }
    q[dim_ - 1] = q[dim_ - 2] = 0;
    rotation_.to_channels(q);
    const double away = kQueryOffset * std::sqrt(square) / (kMeanNorm * std::sqrt(dim_));
    for (uint32_t j = 0; j < dim_; ++j) {
      q[j] -= static_cast<float>(away) * mean(moved, j);
    }
    const float factor = static_cast<float>(sigma_ / spread(head, set, q));
    for (uint32_t j = 0; j < dim_; ++j) {
      q[j] = factor * q[j];
    }
    // Exactly kLevel along the special axis, and for now nothing along the sink's.
    add_along(nats_axis_, kLevel - along(nats_axis_, q), q);
    add_along(sink_axis_, -along(sink_axis_, q), q);
  }

  float along(const std::vector<float>& axis, const float* q) const {
    float sum = 0;
    for (uint32_t j = 0; j < dim_; ++j) {
      sum += axis[j] * q[j];
    }
    return sum;
  }
  void add_along(const std::vector<float>& axis, float amount, float* q) const {
    for (uint32_t j = 0; j < dim_; ++j) {
      q[j] += amount * axis[j];
    }
  }

  double logit(const HeadData& head, const float* q, uint64_t token) const {
    const uint16_t* k = head.k_row(token);
    float parts[8] = {};
    for (uint32_t j = 0; j < dim_; j += 8) {
      for (uint32_t i = 0; i < 8; ++i) {
        parts[i] += q[j + i] * bf16_to_f32(k[j + i]);
      }
    }
    double sum = 0;
    for (const float part : parts) {
      sum += part;
    }
    return scale_ * sum;
  }

  // Standard deviation of the logits over 4,096 ordinary keys.
  double spread(const HeadData& head, uint32_t set, const float* q) const {
    const uint64_t n = head.q_position[set] - kRecent;
    const uint64_t step = std::max<uint64_t>(1, n / 4096);
    double sum = 0, square = 0, count = 0;
    for (uint64_t t = 4; t < n; t += step) {
      if (nats(t) == 0) {
        const double s = logit(head, q, t);
        sum += s;
        square += s * s;
        count += 1;
      }
    }
    return std::sqrt(std::max(1e-12, square / count - sum / count * sum / count));
  }

  // ln of the mass of all keys but the first.
  double ordinary_lse(const HeadData& head, uint32_t set, const float* q) const {
    const double offset = logit(head, q, 1) + 20.0;
    double sum = 0;
    for (uint64_t t = 1; t <= head.q_position[set]; ++t) {
      sum += std::exp(logit(head, q, t) - offset);
    }
    return offset + std::log(sum);
  }

  std::vector<float> stored_query(const HeadData& head, size_t row) const {
    std::vector<float> q(dim_);
    for (uint32_t j = 0; j < dim_; ++j) {
      q[j] = head.to_float(head.q[row * dim_ + j]);
    }
    return q;
  }

  // One key at three quarters gets 1 to 99 % of the mass of the first query.
  void set_late_sink(DataSet* out, uint32_t head_index) {
    const HeadData& head = out->heads[head_index];
    const std::vector<float> q = stored_query(head, 0);
    constexpr double kShares[] = {0.01, 0.1, 0.3, 0.6, 0.9, 0.99};
    const double share = kShares[number_ % std::size(kShares)];
    const uint64_t token = spec_.tokens / 4 * 3 + 5;
    const double wanted = ordinary_lse(head, 0, q.data()) + std::log(share / (1 - share));
    const double height = wanted - logit(head, q.data(), token);
    uint16_t* k = out->k_row(head_index, token);
    for (uint32_t j = 0; j < dim_; ++j) {
      k[j] = f32_to_bf16(bf16_to_f32(k[j]) +
                         static_cast<float>(height) / (scale_ * kLevel) * nats_axis_[j]);
    }
  }

  // Token 0 gets 30 to 60 % of each query's mass, and a tiny value.
  void set_sink(DataSet* out, uint32_t head_index, float* q) {
    HeadData& head = out->heads[head_index];
    const double about = std::log(spec_.tokens) + 0.5 * sigma_ * sigma_;
    const float height = static_cast<float>(about) / (scale_ * kLevel);
    uint16_t* k = out->k_row(head_index, 0);
    uint16_t* v = out->v_row(head_index, 0);
    for (uint32_t j = 0; j < dim_; ++j) {
      k[j] = f32_to_bf16(mean(0, j) + height * sink_axis_[j]);
      v[j] = f32_to_bf16(kSinkValue * bf16_to_f32(v[j]));
    }
    float reach = 0;
    for (uint32_t j = 0; j < dim_; ++j) {
      reach += scale_ * sink_axis_[j] * bf16_to_f32(k[j]);
    }
    for (uint32_t row = 0; row < spec_.sets * kGroup; ++row) {
      const std::vector<float> stored = stored_query(head, row);
      const double mass = 0.3 + 0.3 * random_.uniform();
      const double wanted =
          ordinary_lse(head, row / kGroup, stored.data()) + std::log(mass / (1 - mass));
      const double missing = wanted - logit(head, stored.data(), 0);
      add_along(sink_axis_, static_cast<float>(missing) / reach, q + size_t{row} * dim_);
      for (uint32_t j = 0; j < dim_; ++j) {
        head.q[size_t{row} * dim_ + j] = f32_to_bf16(q[size_t{row} * dim_ + j]);
      }
    }
  }

  const DataSpec& spec_;
  const ModelOptions& options_;
  uint32_t number_;
  uint32_t dim_;
  Random random_;
  Rotation rotation_;
  float scale_;
  double sigma_ = 0;
  std::vector<Token> tokens_;
  std::vector<Cloud> clouds_;
  double value_mean_share_ = 0;
  std::vector<float> value_mean_, value_types_, value_topics_;
  uint64_t stream_ = 0;
  std::vector<float> sink_axis_, nats_axis_;  // [dim], channels
  std::vector<std::pair<uint64_t, double>> needles_;
  std::vector<uint32_t> outliers_;
};

}  // namespace

DataSet make_model_data(const DataSpec& spec, const ModelOptions& options, uint32_t threads) {
  DataSet out;
  out.name = spec.name;
  out.lay_out(spec.heads, spec.tokens, spec.dim, kGroup, Dtype::kBf16);
  std::vector<std::unique_ptr<HeadMaker>> makers(spec.heads);
  parallel_for(threads, spec.heads, [&](size_t h) {
    makers[h] =
        std::make_unique<HeadMaker>(spec, options, spec.first_head + static_cast<uint32_t>(h));
    out.heads[h].type = makers[h]->type_name();
  });
  const size_t n_pages = out.runs().size();
  parallel_for(threads, n_pages * spec.heads, [&](size_t i) {
    makers[i % spec.heads]->make_page(&out, static_cast<uint32_t>(i % spec.heads), i / spec.heads);
  });
  parallel_for(threads, spec.heads,
               [&](size_t h) { makers[h]->make_queries(&out, static_cast<uint32_t>(h)); });
  return out;
}

}  // namespace kvm::bench
