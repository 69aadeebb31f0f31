// SPDX-License-Identifier: Apache-2.0
#include "tests/hostile/victim.h"

#include "base/splitmix.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kQHeads = 4;
constexpr uint32_t kKvHeadsOfVictim = 2;
constexpr uint32_t kDimOfVictim = 32;

}  // namespace

Victim::Victim(const std::string& socket_path) {
  kvm_connect_params connect{};
  connect.struct_size = sizeof(connect);
  connect.socket_path = socket_path.c_str();
  connect.client_name = "victim";
  connect.timeout_ns = 60'000'000'000;
  check(kvm_connect(&connect, &client_), "kvm_connect");
  check(kvm_queue_create(client_, nullptr, &queue_), "kvm_queue_create");
  kvm_index_params index{};
  index.kind = KVM_INDEX_SKETCH;
  index.min_tokens = 256;
  index.n_recent = 16;
  kvm_space_params params{};
  params.struct_size = sizeof(params);
  params.name = "victim";
  params.n_layers = 1;
  params.n_q_heads = kQHeads;
  params.n_kv_heads = kKvHeadsOfVictim;
  params.head_dim_k = kDimOfVictim;
  params.indexes = &index;
  params.n_indexes = 1;
  check(kvm_space_register(client_, &params, &space_), "kvm_space_register");
  check(kvm_seq_create(client_, space_, nullptr, &anchor_), "kvm_seq_create");
}

Victim::~Victim() {
  kvm_queue_destroy(queue_);
  kvm_client_close(client_);
}

void Victim::check(kvm_status status, const char* what) {
  if (status != KVM_OK && failure_.empty()) {
    failure_ = std::string(what) + ": " + kvm_status_name(status) + ": " + kvm_last_error();
  }
}

void Victim::add(const void* data, size_t size_bytes) {
  // FNV-1a.
  const auto* bytes = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < size_bytes; ++i) {
    digest_ = (digest_ ^ bytes[i]) * 0x100000001b3u;
  }
}

std::vector<float> Victim::floats(size_t n) {
  std::vector<float> out(n);
  for (float& x : out) {
    random_ += kSplitMixStep;
    x = static_cast<float>(static_cast<int64_t>(splitmix64(random_))) * 0x1p-62f;  // -2 to 2
  }
  return out;
}

void Victim::append(kvm_seq_id seq, uint32_t n_tokens) {
  const std::vector<float> k = floats(size_t{n_tokens} * kKvHeadsOfVictim * kDimOfVictim);
  const std::vector<float> v = floats(k.size());
  kvm_item item{};
  item.seq = seq;
  item.append_position = KVM_POSITION_END;
  item.n_append = n_tokens;
  kvm_step_params step{};
  step.struct_size = sizeof(step);
  step.space = space_;
  step.n_items = 1;
  step.items = &item;
  step.k = kvm_host_tensor(k.data(), k.size() * sizeof(float), KVM_DTYPE_F32);
  step.v = kvm_host_tensor(v.data(), v.size() * sizeof(float), KVM_DTYPE_F32);
  check(kvm_append(queue_, &step), "kvm_append");
}

void Victim::attend(kvm_seq_id seq, uint32_t mode, uint64_t budget) {
  std::vector<float> q = floats(size_t{kQHeads} * kDimOfVictim);
  std::vector<float> o(q.size());
  std::vector<float> lse(kQHeads);
  std::vector<float> err(size_t{kQHeads} * 2);
  kvm_item item{};
  item.seq = seq;
  item.n_query = 1;
  item.query_position = KVM_POSITION_END;
  kvm_step_params step{};
  step.struct_size = sizeof(step);
  step.space = space_;
  step.n_items = 1;
  step.items = &item;
  step.mode = mode;
  step.budget = budget;
  step.seed = 7;
  step.q = kvm_host_tensor(q.data(), q.size() * sizeof(float), KVM_DTYPE_F32);
  step.o = kvm_host_tensor(o.data(), o.size() * sizeof(float), KVM_DTYPE_F32);
  step.lse = kvm_host_tensor(lse.data(), lse.size() * sizeof(float), KVM_DTYPE_F32);
  step.err = kvm_host_tensor(err.data(), err.size() * sizeof(float), KVM_DTYPE_F32);
  kvm_step_stats stats{};
  stats.struct_size = sizeof(stats);
  check(kvm_attend(queue_, &step, &stats), "kvm_attend");
  add(o.data(), o.size() * sizeof(float));
  add(lse.data(), lse.size() * sizeof(float));
  add(err.data(), err.size() * sizeof(float));
  add(&stats.mode, sizeof(stats.mode));
  add(&stats.keys_read, sizeof(stats.keys_read));
}

void Victim::read(kvm_seq_id seq, uint64_t position, uint64_t n_tokens) {
  std::vector<float> k(n_tokens * kKvHeadsOfVictim * kDimOfVictim);
  std::vector<float> v(k.size());
  kvm_read_params params{};
  params.struct_size = sizeof(params);
  params.seq = seq;
  params.position = position;
  params.n_tokens = n_tokens;
  params.k = kvm_host_tensor(k.data(), k.size() * sizeof(float), KVM_DTYPE_F32);
  params.v = kvm_host_tensor(v.data(), v.size() * sizeof(float), KVM_DTYPE_F32);
  check(kvm_read(queue_, &params), "kvm_read");
  add(k.data(), k.size() * sizeof(float));
  add(v.data(), v.size() * sizeof(float));
}

uint64_t Victim::live_once(uint64_t seed) {
  random_ = seed;
  digest_ = 0xcbf29ce484222325u;
  kvm_seq_id seq = 0;
  kvm_seq_id child = 0;
  check(kvm_seq_create(client_, space_, nullptr, &seq), "kvm_seq_create");
  append(seq, 300);
  attend(seq, KVM_MODE_EXACT, 0);
  attend(seq, KVM_MODE_TOPK, 32);
  check(kvm_seq_fork(client_, seq, KVM_POSITION_END, &child), "kvm_seq_fork");
  append(child, 17);
  append(seq, 3);
  attend(child, KVM_MODE_SAMPLED, 48);
  attend(seq, KVM_MODE_VERIFIED, 0);
  check(kvm_seq_truncate(client_, child, 290), "kvm_seq_truncate");
  attend(child, KVM_MODE_EXACT, 0);
  read(seq, 250, 53);
  read(child, 200, 90);
  check(kvm_seq_free(client_, seq), "kvm_seq_free");
  check(kvm_seq_free(client_, child), "kvm_seq_free");
  return digest_;
}

}  // namespace kvm::testing
