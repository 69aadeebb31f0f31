// SPDX-License-Identifier: Apache-2.0
#include "tests/crash/life.h"

#include <algorithm>
#include <array>

#include "tests/common/items.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kHeads = 2;
constexpr uint32_t kDim = 16;
constexpr uint32_t kTokens = 40;

kvm_connect_params connect_params(const std::string& socket_path) {
  kvm_connect_params params{};
  params.struct_size = sizeof(params);
  params.socket_path = socket_path.c_str();
  return params;
}

kvm_space_params space_params() {
  kvm_space_params params{};
  params.struct_size = sizeof(params);
  params.name = "crash";
  params.n_layers = 1;
  params.n_q_heads = kHeads;
  params.head_dim_k = kDim;
  return params;
}

struct Tensors {
  std::vector<float> k = std::vector<float>(kTokens * kHeads * kDim, 0.25f);
  std::vector<float> v = std::vector<float>(kTokens * kHeads * kDim, 1.5f);
  std::vector<float> q = std::vector<float>(kHeads * kDim, 0.5f);
  std::vector<float> o = std::vector<float>(kHeads * kDim);
};

kvm_tensor tensor(std::vector<float>* floats) {
  return kvm_host_tensor(floats->data(), floats->size() * sizeof(float), KVM_DTYPE_F32);
}

kvm_step_params step_of(kvm_space_id space, const kvm_item* item, Tensors* tensors) {
  kvm_step_params step{};
  step.struct_size = sizeof(step);
  step.space = space;
  step.n_items = 1;
  step.items = item;
  if (item->n_append != 0) {
    step.k = tensor(&tensors->k);
    step.v = tensor(&tensors->v);
  }
  if (item->n_query != 0) {
    step.q = tensor(&tensors->q);
    step.o = tensor(&tensors->o);
  }
  return step;
}

// Everything between connecting and closing; what is made is left behind.
kvm_status use(kvm_client* client, kvm_queue* queue) {
#define KVM_TRY_CALL(call)                     \
  do {                                         \
    const kvm_status kvm_call_status = (call); \
    if (kvm_call_status != KVM_OK) {           \
      return kvm_call_status;                  \
    }                                          \
  } while (false)
  kvm_arena* arena = nullptr;
  kvm_arena_params arena_params{};
  arena_params.struct_size = sizeof(arena_params);
  arena_params.size = 1 << 20;
  KVM_TRY_CALL(kvm_arena_create(client, &arena_params, &arena));
  const kvm_space_params params = space_params();
  kvm_space_id space = 0;
  KVM_TRY_CALL(kvm_space_register(client, &params, &space));
  kvm_seq_id seq = 0;
  KVM_TRY_CALL(kvm_seq_create(client, space, nullptr, &seq));
  Tensors tensors;
  const kvm_item append = item_of(seq, kTokens, 0);
  kvm_step_params step = step_of(space, &append, &tensors);
  KVM_TRY_CALL(kvm_append(queue, &step));
  const kvm_item attend = item_of(seq, 0, 1);
  step = step_of(space, &attend, &tensors);
  KVM_TRY_CALL(kvm_attend(queue, &step, nullptr));
  kvm_seq_id child = 0;
  KVM_TRY_CALL(kvm_seq_fork(client, seq, KVM_POSITION_END, &child));
  const kvm_item both = item_of(child, 1, 1);
  step = step_of(space, &both, &tensors);
  KVM_TRY_CALL(kvm_step(queue, &step, nullptr));
  // Where the daemon has a disk; else the answer is UNSUPPORTED.
  const kvm_status saved = kvm_seq_save(client, child, "crash", KVM_SAVE_REPLACE);
  if (saved != KVM_ERR_UNSUPPORTED) {
    KVM_TRY_CALL(saved);
  }
  KVM_TRY_CALL(kvm_seq_free(client, seq));
  kvm_arena_destroy(arena);
#undef KVM_TRY_CALL
  return KVM_OK;
}

}  // namespace

kvm_status live(const std::string& socket_path, std::string* what) {
  const kvm_connect_params params = connect_params(socket_path);
  kvm_client* client = nullptr;
  kvm_queue* queue = nullptr;
  kvm_status status = kvm_connect(&params, &client);
  if (status == KVM_OK) {
    status = kvm_queue_create(client, nullptr, &queue);
  }
  if (status == KVM_OK) {
    status = use(client, queue);
  }
  *what = std::string(kvm_status_name(status)) + ": " + kvm_last_error();
  kvm_queue_destroy(queue);
  kvm_client_close(client);
  return status;
}

Witness::Witness(const std::string& socket_path) {
  const kvm_connect_params params = connect_params(socket_path);
  check(kvm_connect(&params, &client_), "kvm_connect");
  check(kvm_queue_create(client_, nullptr, &queue_), "kvm_queue_create");
  kvm_space_params geometry = space_params();
  geometry.name = "witness";
  check(kvm_space_register(client_, &geometry, &space_), "kvm_space_register");
  check(kvm_seq_create(client_, space_, nullptr, &seq_), "kvm_seq_create");
  Tensors tensors;
  for (size_t i = 0; i < tensors.k.size(); ++i) {
    tensors.k[i] = static_cast<float>(i % 17) * 0.125f;
    tensors.v[i] = static_cast<float>(i % 29) * 0.5f;
  }
  const kvm_item item = item_of(seq_, kTokens, 0);
  const kvm_step_params step = step_of(space_, &item, &tensors);
  check(kvm_append(queue_, &step), "kvm_append");
}

Witness::~Witness() {
  kvm_queue_destroy(queue_);
  kvm_client_close(client_);
}

void Witness::check(kvm_status status, const char* what) {
  if (status != KVM_OK && failure_.empty()) {
    failure_ = std::string(what) + ": " + kvm_status_name(status) + ": " + kvm_last_error();
  }
}

kvm_stats Witness::stats() {
  kvm_stats stats{};
  stats.struct_size = sizeof(stats);
  check(kvm_get_stats(client_, &stats), "kvm_get_stats");
  return stats;
}

std::vector<float> Witness::attend() {
  Tensors tensors;
  const kvm_item item = item_of(seq_, 0, 1);
  const kvm_step_params step = step_of(space_, &item, &tensors);
  check(kvm_attend(queue_, &step, nullptr), "kvm_attend");
  return tensors.o;
}

namespace {

constexpr uint32_t kLoadHeads = 4;
constexpr uint32_t kLoadDim = 64;
constexpr uint32_t kLoadTokens = 256;  // at most in one append

}  // namespace

Loader::Loader(const std::string& socket_path, unsigned seed, uint64_t target_bytes)
    : random_(seed),
      target_bytes_(target_bytes),
      floats_(size_t{kLoadTokens} * kLoadHeads * kLoadDim) {
  const kvm_connect_params params = connect_params(socket_path);
  check(kvm_connect(&params, &client_), "kvm_connect");
  check(kvm_queue_create(client_, nullptr, &queue_), "kvm_queue_create");
  kvm_space_params geometry = space_params();
  geometry.name = "load";
  geometry.n_q_heads = kLoadHeads;
  geometry.head_dim_k = kLoadDim;
  kvm_index_params index{};
  index.kind = KVM_INDEX_SKETCH;
  index.min_tokens = 512;
  geometry.indexes = &index;
  geometry.n_indexes = 1;
  check(kvm_space_register(client_, &geometry, &space_), "kvm_space_register");
  for (float& x : floats_) {
    x = static_cast<float>(random_() % 1000) * 0.002f - 1.0f;
  }
}

void Loader::check(kvm_status status, const char* what) {
  if (status == KVM_ERR_NO_SPACE || status == KVM_ERR_QUOTA) {
    is_full_ = true;
  } else if (status != KVM_OK && failure_.empty()) {
    failure_ = std::string(what) + ": " + kvm_status_name(status) + ": " + kvm_last_error();
  }
}

// By the service's own account, which has what forks share once.
uint64_t Loader::held_bytes() {
  kvm_client_info self{};
  self.struct_size = sizeof(self);
  check(kvm_client_get_info(client_, &self), "kvm_client_get_info");
  std::array<kvm_client_entry, 16> clients{};
  clients[0].struct_size = sizeof(clients[0]);
  size_t n = 0;
  check(kvm_client_list(client_, clients.data(), clients.size(), &n), "kvm_client_list");
  for (size_t i = 0; i < std::min(n, clients.size()); ++i) {
    if (clients[i].client_id == self.client_id) {
      return clients[i].used.bytes;
    }
  }
  check(KVM_ERR_NOT_FOUND, "its own entry in kvm_client_list");
  return 0;
}

void Loader::step(kvm_seq_id seq, uint32_t n_append, uint32_t n_query) {
  std::vector<float> o(size_t{n_query} * kLoadHeads * kLoadDim);
  const kvm_item item = item_of(seq, n_append, n_query);
  kvm_step_params step{};
  step.struct_size = sizeof(step);
  step.space = space_;
  step.n_items = 1;
  step.items = &item;
  step.mode = static_cast<uint32_t>(random_() % 5);
  step.budget = step.mode == KVM_MODE_TOPK || step.mode == KVM_MODE_SAMPLED ? 64 : 0;
  step.k = tensor(&floats_);
  step.v = tensor(&floats_);
  step.q = tensor(&floats_);
  step.o = tensor(&o);
  check(kvm_step(queue_, &step, nullptr), "kvm_step");
}

bool Loader::do_something() {
  if (seqs_.empty() || random_() % 16 == 0) {
    kvm_seq_id seq = 0;
    check(kvm_seq_create(client_, space_, nullptr, &seq), "kvm_seq_create");
    if (seq != 0) {
      seqs_.push_back(seq);
    }
    return failure_.empty();
  }
  const size_t i = random_() % seqs_.size();
  const uint32_t what = random_() % 32;
  if (what == 0) {
    kvm_seq_id child = 0;
    check(kvm_seq_fork(client_, seqs_[i], KVM_POSITION_END, &child), "kvm_seq_fork");
    if (child != 0) {
      seqs_.push_back(child);
    }
  } else if (what == 1) {
    check(kvm_seq_truncate(client_, seqs_[i], random_() % 4096), "kvm_seq_truncate");
  } else {
    step(seqs_[i], 1 + random_() % kLoadTokens, 1);
  }
  if (is_full_ || (++n_done_ % 8 == 0 && held_bytes() > target_bytes_)) {
    is_full_ = false;
    check(kvm_seq_free(client_, seqs_[i]), "kvm_seq_free");
    seqs_.erase(seqs_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return failure_.empty();
}

}  // namespace kvm::testing
