// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/device_rig.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

#include "base/codec_id.h"
#include "base/dtype.h"
#include "base/splitmix.h"
#include "codecs/codec.h"
#include "codecs/convert.h"

namespace kvm::device {

// The implementation of the seam that programs with this file have.
Result<std::unique_ptr<Driver>> open_driver(uint32_t ordinal) {
  if (ordinal != 0) {
    return Status(KVM_ERR_DEVICE, "device is " + std::to_string(ordinal) + "; this machine has 1");
  }
  auto driver = std::make_unique<testing::FakeDriver>(testing::next_options);
  testing::last_driver = driver.get();
  return std::unique_ptr<Driver>(std::move(driver));
}

namespace testing {

bool has_server() { return std::getenv("KVM_DEVICE_SERVER") != nullptr; }

FakeOptions next_options;
FakeDriver* last_driver = nullptr;

namespace {

float narrowed(float value, uint32_t dtype) {
  return dtype == KVM_DTYPE_BF16 ? bf16_to_f32(f32_to_bf16(value)) : f16_to_f32(f32_to_f16(value));
}

float widened(uint16_t bits, uint32_t dtype) {
  return dtype == KVM_DTYPE_BF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

uint64_t row_number(uint64_t key, uint32_t layer, uint32_t head, uint64_t position) {
  return ((key * 64 + layer) * 64 + head) * 4096 + position;
}

float number_of(uint64_t seed) {
  // About Gaussian: the sum of four uniform numbers.
  const uint64_t bits = splitmix64(seed);
  const uint64_t sum =
      (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
  return (static_cast<float>(sum) * 0x1p-16f - 2.0f) * 1.7f;
}

// What a group of channels reads as once it is in pages of int4 (codecs/low_bits.h).
void read_as_int4(std::span<float> group) {
  // Down to bf16, and up.
  const auto cut = [](float x, bool up) {
    const float near = bf16_to_f32(f32_to_bf16(x));
    return near == x || (near > x) == up
               ? near
               : bf16_to_f32(f32_to_bf16(x + (up ? 1.0f : -1.0f) * std::fabs(x) * 0x1p-8f));
  };
  const float zero = cut(*std::min_element(group.begin(), group.end()), false);
  const float scale = cut((*std::max_element(group.begin(), group.end()) - zero) / 15.0f, true);
  for (float& x : group) {
    x = scale == 0 ? zero : std::nearbyint((x - zero) / scale) * scale + zero;
  }
}

}  // namespace

float stored_number(uint64_t key, uint32_t layer, uint32_t head, uint64_t position,
                    uint32_t channel, bool is_v) {
  return number_of(row_number(key, layer, head, position) * 2048 + channel * 2 + (is_v ? 1 : 0));
}

Geometry latent_geometry(uint32_t n_q_heads) {
  Geometry geometry;
  geometry.n_q_heads = n_q_heads;
  geometry.n_kv_heads = 1;
  geometry.dim = 576;
  geometry.v_in_k = true;
  return geometry;
}

void expect_refused(kvm_status got, kvm_status expected, const std::string& words) {
  EXPECT_EQ(got, expected) << kvm_status_name(got) << ", not about " << words;
  EXPECT_NE(std::string(kvm_last_error()).find(words), std::string::npos) << kvm_last_error();
}

kvm_space_id register_space(kvm_client* client, const Geometry& geometry) {
  kvm_space_params space{};
  space.struct_size = sizeof space;
  space.name = "model";
  space.n_layers = geometry.n_layers;
  space.n_q_heads = geometry.n_q_heads;
  space.n_kv_heads = geometry.n_kv_heads;
  space.flags = geometry.v_in_k ? uint32_t{KVM_SPACE_V_IN_K} : 0;
  space.head_dim_k = geometry.dim;
  space.head_dim_v = geometry.dim_v();
  space.codec = geometry.codec;
  space.logit_softcap = geometry.softcap;
  space.sink_logits = geometry.sink_logits.empty() ? nullptr : geometry.sink_logits.data();
  space.layers = geometry.layers.data();
  space.n_layer_params = static_cast<uint32_t>(geometry.layers.size());
  space.policies = geometry.policies.data();
  space.n_policies = static_cast<uint32_t>(geometry.policies.size());
  kvm_space_id id = 0;
  EXPECT_EQ(kvm_space_register(client, &space, &id), KVM_OK) << kvm_last_error();
  return id;
}

Rig::Rig(const FakeOptions& options, const Geometry& geometry, uint64_t pool_bytes,
         uint64_t host_bytes)
    : geometry_(geometry) {
  next_options = options;
  next_options.runs_by_itself = options.runs_by_itself || has_server();
  next_options.at_end = [](const FakeDriver& driver) {
    EXPECT_EQ(driver.complaints(), "");
    EXPECT_EQ(driver.leftovers(), "");
  };
  kvm_cuda_params params{};
  params.struct_size = sizeof params;
  params.pool_bytes = pool_bytes;
  params.host_bytes = host_bytes;
  kvm_connect_params server{};
  if (has_server()) {
    daemon_ = std::make_unique<kvm::testing::Daemon>(
        std::vector<std::string>{"--device-pool", "1GiB", "--device-host", "1GiB", "--threads", "1",
                                 "--host-capacity", "16MiB"},
        "kvmd_on_fake");
    server = this->server();
    params.server = &server;
  }
  EXPECT_EQ(kvm_cuda_open(&params, &client_), KVM_OK) << kvm_last_error();
  driver_ = last_driver;
  stream_ = driver_->create_stream().value();
  space_ = register_space(client_, geometry);
}

Rig::~Rig() {
  driver_->settle();
  for (kvm_cuda_batch* const batch : batches_) {
    kvm_cuda_batch_destroy(batch);
  }
  forget_memory();
  driver_->destroy_stream(stream_);
  kvm_client_close(client_);
  if (daemon_ != nullptr) {
    std::string log;
    EXPECT_EQ(daemon_->stop(&log), 0) << log;
  }
}

kvm_connect_params Rig::server() const {
  kvm_connect_params server{};
  server.struct_size = sizeof server;
  server.socket_path = daemon_->socket_path().c_str();
  server.timeout_ns = kvm::testing::kPatienceNs;
  return server;
}

kvm_client* Rig::open_host(uint64_t capacity_bytes) const {
  kvm_client* client = nullptr;
  if (has_server()) {
    const kvm_connect_params params = server();
    EXPECT_EQ(kvm_connect(&params, &client), KVM_OK) << kvm_last_error();
  } else {
    kvm_embedded_params params{};
    params.struct_size = sizeof params;
    params.n_threads = 2;
    params.host_capacity_bytes = capacity_bytes;
    EXPECT_EQ(kvm_open_embedded(&params, &client), KVM_OK) << kvm_last_error();
  }
  return client;
}

void Rig::forget_memory() {
  for (uint8_t* const memory : memory_) {
    driver_->free(memory);
  }
  memory_.clear();
}

kvm_cuda_batch_params Rig::batch_params(uint32_t max_items, uint32_t max_append, uint32_t max_query,
                                        uint64_t max_tokens) const {
  kvm_cuda_batch_params params{};
  params.struct_size = sizeof params;
  params.space = space_;
  params.max_items = max_items;
  params.max_append = max_append;
  params.max_query = max_query;
  params.max_tokens = max_tokens;
  return params;
}

kvm_cuda_batch* Rig::batch(const kvm_cuda_batch_params& params) {
  kvm_cuda_batch* batch = nullptr;
  EXPECT_EQ(kvm_cuda_batch_create(client_, &params, &batch), KVM_OK) << kvm_last_error();
  if (batch != nullptr) {
    batches_.push_back(batch);
  }
  return batch;
}

kvm_seq_id Rig::create() {
  kvm_seq_id seq = 0;
  EXPECT_EQ(kvm_seq_create(client_, space_, nullptr, &seq), KVM_OK) << kvm_last_error();
  return seq;
}

void Rig::append(kvm_cuda_batch* batch, uint32_t item, kvm_seq_id seq, uint64_t key, Shadow* shadow,
                 uint32_t n, uint32_t n_query, uint64_t first_position) {
  std::vector<kvm_cuda_item> items(item + 1);
  items[item].seq = seq;
  items[item].n_append = n;
  items[item].n_query = n_query;
  ASSERT_EQ(kvm_cuda_update(batch, items.data(), item + 1, stream_), KVM_OK) << kvm_last_error();
  std::vector<Row> rows;
  for (uint32_t t = 0; t < n; ++t) {
    rows.push_back({key, first_position + shadow->keys.size()});
    shadow->keys.push_back(key);
  }
  for (uint32_t layer = 0; n != 0 && layer < geometry_.n_layers; ++layer) {
    if (!geometry_.layers.empty() && geometry_.layers[layer].kind != KVM_LAYER_OWN) {
      continue;
    }
    const kvm_tensor k = keys(rows, layer, false), v = keys(rows, layer, true);
    ASSERT_EQ(kvm_cuda_append(batch, layer, &k, &v, stream_), KVM_OK) << kvm_last_error();
  }
}

uint8_t* Rig::allocate(uint64_t size_bytes) {
  uint8_t* const memory = driver_->allocate(size_bytes).value();
  memory_.push_back(memory);
  return memory;
}

uint8_t* Rig::upload(const void* data, uint64_t size_bytes) {
  uint8_t* const memory = allocate(size_bytes);
  std::memcpy(memory, data, size_bytes);
  return memory;
}

kvm_tensor Rig::keys(const std::vector<Row>& rows, uint32_t layer, bool is_v) {
  if (is_v && geometry_.v_in_k) {
    return {};
  }
  std::vector<float> values;
  values.reserve(rows.size() * geometry_.n_kv_heads * geometry_.dim);
  for (const Row& row : rows) {
    for (uint32_t head = 0; head < geometry_.n_kv_heads; ++head) {
      for (uint32_t i = 0; i < geometry_.dim; ++i) {
        values.push_back(stored_number(row.key, layer, head, row.position, i, is_v));
      }
    }
  }
  return tensor(values, KVM_DTYPE_F32);
}

std::vector<uint16_t> Rig::queries(uint64_t seed, uint32_t n_rows) const {
  std::vector<uint16_t> q(size_t{n_rows} * geometry_.n_q_heads * geometry_.dim);
  for (size_t i = 0; i < q.size(); ++i) {
    const float value = number_of(splitmix64(seed) + i);
    q[i] = geometry_.query_dtype() == KVM_DTYPE_BF16 ? f32_to_bf16(value) : f32_to_f16(value);
  }
  return q;
}

Rig::Outputs Rig::outputs(uint32_t n_rows) {
  Outputs out;
  const uint64_t o_bytes = uint64_t{n_rows} * geometry_.n_q_heads * geometry_.dim_v() * 4;
  const uint64_t lse_bytes = uint64_t{n_rows} * geometry_.n_q_heads * 4;
  out.o = reinterpret_cast<float*>(allocate(o_bytes));
  out.lse = reinterpret_cast<float*>(allocate(lse_bytes));
  out.o_tensor = kvm_device_tensor(out.o, o_bytes, KVM_DTYPE_F32);
  out.lse_tensor = kvm_device_tensor(out.lse, lse_bytes, KVM_DTYPE_F32);
  return out;
}

bool Rig::sees(uint32_t layer, uint32_t head, const Query& query, uint64_t position) const {
  uint64_t window = 0;
  for (const kvm_layer_params& of : geometry_.layers) {
    if (layer >= of.layer_begin && layer < of.layer_begin + of.n_layers) {
      window = of.window;
    }
  }
  const kvm_policy_params* policy = nullptr;
  uint32_t stored_in = layer;
  for (const kvm_layer_params& of : geometry_.layers) {
    if (layer >= of.layer_begin && layer < of.layer_begin + of.n_layers &&
        of.kind == KVM_LAYER_ALIAS) {
      stored_in = of.target;
    }
  }
  for (const kvm_policy_params& of : geometry_.policies) {
    const uint32_t end = of.n_layers == 0 ? geometry_.n_layers : of.layer_begin + of.n_layers;
    if (stored_in >= of.layer_begin && stored_in < end &&
        (of.kv_head_mask[0] == 0 || (of.kv_head_mask[0] >> head & 1) != 0)) {
      policy = &of;
    }
  }
  const bool hidden = query.tree ? position >= query.tree_begin &&
                                       (query.tree_word >> (position - query.tree_begin) & 1) == 0
                                 : position > query.position;
  if (hidden || (window != 0 && position + window <= query.position)) {
    return false;
  }
  return policy == nullptr || policy->retention == KVM_RETAIN_FULL || position < policy->n_sinks ||
         position + policy->n_recent > query.position;
}

const std::vector<float>& Rig::stored_row(uint64_t key, uint32_t layer, uint32_t head,
                                          uint64_t position, bool is_v) const {
  constexpr size_t kMostRows = 20000;  // some 10 MB
  if (stored_rows_.size() > kMostRows) {
    stored_rows_.clear();
  }
  std::vector<float>& row =
      stored_rows_[row_number(key, layer, head, position) * 2 + (is_v ? 1 : 0)];
  if (!row.empty()) {
    return row;
  }
  row.resize(geometry_.dim);
  for (uint32_t i = 0; i < geometry_.dim; ++i) {
    row[i] = stored_number(key, layer, head, position, i, is_v && !geometry_.v_in_k);
  }
  if (const auto codec = static_cast<CodecId>(geometry_.codec); codec == codecs::kI4) {
    constexpr uint32_t kGroup = codecs::Codec::kGroupChannels;
    for (uint32_t first = 0; first < geometry_.dim; first += kGroup) {
      read_as_int4(std::span(row).subspan(first, kGroup));
    }
  } else if (codecs::codec_of(codec).is_scaled()) {
    std::vector<uint8_t> bytes(row.size());
    const uint16_t scale = codecs::encode_row(row.data(), geometry_.dim, codec, bytes.data());
    codecs::decode_row(bytes.data(), codec, &scale, 0, geometry_.dim, row.data());
  } else {
    for (float& x : row) {
      x = narrowed(x, geometry_.query_dtype());
    }
  }
  return row;
}

void Rig::expect_row(const Outputs& got, uint32_t row, const std::vector<uint16_t>& q,
                     uint32_t layer, const Shadow& shadow, const Query& query,
                     const std::string& where, const float* log_weights,
                     uint64_t log_weight_stride) const {
  const uint32_t group = geometry_.n_q_heads / geometry_.n_kv_heads, dim = geometry_.dim;
  const uint32_t dim_v = geometry_.dim_v();
  uint32_t stored_in = layer;
  for (const kvm_layer_params& of : geometry_.layers) {
    if (layer >= of.layer_begin && layer < of.layer_begin + of.n_layers &&
        of.kind == KVM_LAYER_ALIAS) {
      stored_in = of.target;
    }
  }
  for (uint32_t h = 0; h < geometry_.n_q_heads; ++h) {
    const uint32_t head = h / group;
    const size_t at = (size_t{row} * geometry_.n_q_heads + h) * dim;
    const size_t o_at = (size_t{row} * geometry_.n_q_heads + h) * dim_v;
    std::vector<double> logits, o(dim_v), query_row(dim);
    for (uint32_t i = 0; i < dim; ++i) {
      query_row[i] = widened(q[at + i], geometry_.query_dtype());
    }
    std::vector<uint64_t> positions;
    const double sink = geometry_.sink_logits.empty()
                            ? -std::numeric_limits<double>::infinity()
                            : geometry_.sink_logits[size_t{layer} * geometry_.n_q_heads + h];
    double top = sink;
    for (uint64_t p = 0; p < shadow.keys.size(); ++p) {
      if (!sees(layer, head, query, p)) {
        continue;
      }
      double logit = 0;
      const std::vector<float>& k = stored_row(shadow.keys[p], stored_in, head, p, false);
      for (uint32_t i = 0; i < dim; ++i) {
        logit += query_row[i] * k[i];
      }
      logit /= std::sqrt(static_cast<double>(dim));
      if (geometry_.softcap != 0) {
        logit = geometry_.softcap * std::tanh(logit / geometry_.softcap);
      }
      logit += log_weights == nullptr ? 0 : log_weights[head * log_weight_stride + p];
      logits.push_back(logit);
      positions.push_back(p);
      top = std::max(top, logit);
    }
    double sum = std::isinf(top) ? 0 : std::exp(sink - top);
    for (size_t n = 0; n < positions.size(); ++n) {
      const double weight = std::exp(logits[n] - top);
      sum += weight;
      const std::vector<float>& v =
          stored_row(shadow.keys[positions[n]], stored_in, head, positions[n], true);
      for (uint32_t i = 0; i < dim_v; ++i) {
        o[i] += weight * v[i];
      }
    }
    double wrong = 0, norm = 0;
    for (uint32_t i = 0; i < dim_v; ++i) {
      const double expected = sum > 0 ? o[i] / sum : 0;
      wrong += (got.o[o_at + i] - expected) * (got.o[o_at + i] - expected);
      norm += expected * expected;
    }
    // A NaN is wrong as well.
    EXPECT_TRUE(std::sqrt(wrong) <= 6e-3 * std::sqrt(norm))
        << where << ": o of row " << row << " head " << h << " is off by "
        << std::sqrt(wrong / norm);
    const double lse = got.lse[size_t{row} * geometry_.n_q_heads + h];
    EXPECT_TRUE(sum > 0 ? std::fabs(lse - (top + std::log(sum))) <= 1e-3 : lse == top)
        << where << ": lse of row " << row << " head " << h << " is " << lse << ", not "
        << top + std::log(sum);
  }
}

}  // namespace testing
}  // namespace kvm::device
