// SPDX-License-Identifier: Apache-2.0
#include "tests/faults/life.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/splitmix.h"
#include "tests/common/items.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kQHeads = 2;
constexpr uint32_t kDim = 16;
constexpr uint32_t kLayer = 0;
constexpr uint32_t kPrompt = 400;
constexpr uint32_t kIndexedFrom = 256;
constexpr uint32_t kRows = kPrompt + 8;
constexpr size_t kArenaBytes = 256 << 10;
// Of the space with policies: one kv head of each kind of retention.
constexpr uint32_t kHeads = 3;
constexpr uint32_t kAged = 900;
constexpr uint32_t kAgedMore = 200;

// Made once, outside of every life: [kRows][kDim] of one kv head, and queries [kQHeads][kDim].
struct Data {
  std::vector<float> k = floats(kRows * kDim, 1);
  std::vector<float> v = floats(kRows * kDim, 2);
  std::vector<float> q = floats(kQHeads * kDim, 3);
  std::vector<float> aged = floats(kAged * kHeads * kDim, 4);  // K, V, queries and column sums

  std::vector<float> spoiled = std::vector<float>(kDim, NAN);  // a key that is no number

  static std::vector<float> floats(size_t n, uint64_t seed) {
    std::vector<float> out(n);
    for (float& x : out) {
      seed += kSplitMixStep;
      x = static_cast<float>(static_cast<int64_t>(splitmix64(seed))) * 0x1p-63f;
    }
    return out;
  }
};

const Data& data() {
  static const Data kData;
  return kData;
}

kvm_tensor tensor(const float* values, size_t n) {
  return kvm_host_tensor(values, n * sizeof(float), KVM_DTYPE_F32);
}

kvm_step_params step_of(kvm_space_id space, const kvm_item* item) {
  kvm_step_params step{};
  step.struct_size = sizeof(step);
  step.space = space;
  step.layer_begin = kLayer;
  step.n_items = 1;
  step.items = item;
  return step;
}

kvm_status register_space(kvm_client* client, kvm_space_id* out) {
  kvm_index_params index{};
  index.kind = KVM_INDEX_SKETCH;
  index.min_tokens = kIndexedFrom;
  index.n_recent = 8;
  kvm_space_params params{};
  params.struct_size = sizeof(params);
  params.name = "faults";
  params.n_layers = 1;
  params.n_q_heads = kQHeads;
  params.n_kv_heads = 1;
  params.head_dim_k = kDim;
  params.codec = KVM_CODEC_F32;  // what is read back is what was appended
  params.indexes = &index;
  params.n_indexes = 1;
  return kvm_space_register(client, &params, out);
}

kvm_status register_aged_space(kvm_client* client, kvm_space_id* out) {
  kvm_policy_params policies[kHeads]{};
  for (uint32_t head = 0; head < kHeads; ++head) {
    policies[head].kv_head_mask[0] = 1u << head;
    policies[head].n_sinks = 4;
    policies[head].n_recent = 64;
  }
  policies[0].retention = KVM_RETAIN_SINKS_RECENT;
  policies[0].n_recent = 300;
  policies[1].retention = KVM_RETAIN_SINKS_RECENT_FOLD;
  policies[2].retention = KVM_RETAIN_HEAVY;
  policies[2].merge = KVM_MERGE_COUNTED;
  policies[2].n_heavy = 40;
  kvm_index_params index{};
  index.kv_head_mask[0] = 1;
  index.kind = KVM_INDEX_SKETCH;
  index.min_tokens = kIndexedFrom;
  kvm_space_params params{};
  params.struct_size = sizeof(params);
  params.name = "faults-aged";
  params.n_layers = 1;
  params.n_q_heads = kHeads;
  params.n_kv_heads = kHeads;
  params.head_dim_k = kDim;
  params.codec = KVM_CODEC_F32;
  params.policies = policies;
  params.n_policies = kHeads;
  params.indexes = &index;
  params.n_indexes = 1;
  return kvm_space_register(client, &params, out);
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    sum += std::pow(double{a[i]} - double{b[i]}, 2);
  }
  return std::sqrt(sum);
}

kvm_status make(const std::function<kvm_status()>& call) {
  const InProduct in_product;
  return call();
}

}  // namespace

bool Life::call(const char* name, const Call& call) {
  kvm_status status = make(call);
  if (status == KVM_OK) {
    return true;
  }
  outcome_.add_failure(status);
  if (std::strlen(kvm_last_error()) == 0) {
    complain(std::string(name) + " fails without a sentence");
  }
  // A connection that is gone stays gone.
  if (!again_ || status == KVM_ERR_DISCONNECTED) {
    return false;
  }
  const std::string first = std::string(kvm_status_name(status)) + " (" + kvm_last_error() + ")";
  status = make(call);
  if (status != KVM_OK) {
    complain(std::string(name) + " failed with " + first + ", and again with " +
             kvm_status_name(status) + " (" + kvm_last_error() + ")");
  }
  return status == KVM_OK;
}

void Life::live() {
  is_complete_ = call("open", [&] { return open_(&client_); }) && use() && give_back();
  const InProduct in_product;
  kvm_arena_destroy(arena_);
  kvm_queue_destroy(queue_);
  kvm_client_close(client_);
}

bool Life::use() {
  return make_objects() && work_with_sequences() && work_with_policies() && look();
}

bool Life::make_objects() {
  kvm_arena_params params{};
  params.struct_size = sizeof(params);
  params.size = kArenaBytes;
  kvm_buffer buffer{};
  return call("kvm_queue_create", [&] { return kvm_queue_create(client_, nullptr, &queue_); }) &&
         call("kvm_arena_create", [&] { return kvm_arena_create(client_, &params, &arena_); }) &&
         call("kvm_arena_alloc", [&] { return kvm_arena_alloc(arena_, 4096, 0, &buffer); }) &&
         call("kvm_space_register", [&] { return register_space(client_, &space_); }) &&
         call("kvm_seq_create", [&] { return kvm_seq_create(client_, space_, nullptr, &seq_); });
}

bool Life::append(kvm_seq_id seq, uint32_t first_row, uint32_t n_tokens) {
  return call("kvm_append", [&] {
    const kvm_item item = item_of(seq, n_tokens, 0);
    kvm_step_params step = step_of(space_, &item);
    step.k = tensor(data().k.data() + first_row * kDim, n_tokens * kDim);
    step.v = tensor(data().v.data() + first_row * kDim, n_tokens * kDim);
    return kvm_append(queue_, &step);
  });
}

// With `appends`, the last row as well: a decode step.
bool Life::attend(kvm_seq_id seq, uint32_t mode, uint64_t budget, bool appends) {
  Answer answer{mode, 0, std::vector<float>(kQHeads * kDim)};
  const bool done = call(appends ? "kvm_step" : "kvm_attend", [&] {
    const kvm_item item = item_of(seq, appends ? 1 : 0, 1);
    kvm_step_params step = step_of(space_, &item);
    if (appends) {
      step.k = tensor(data().k.data() + (kRows - 1) * kDim, kDim);
      step.v = tensor(data().v.data() + (kRows - 1) * kDim, kDim);
    }
    step.q = tensor(data().q.data(), data().q.size());
    step.o = tensor(answer.o.data(), answer.o.size());
    step.mode = mode;
    step.budget = budget;
    step.seed = 5;
    kvm_step_stats stats{};
    stats.struct_size = sizeof(stats);
    const kvm_status status =
        appends ? kvm_step(queue_, &step, &stats) : kvm_attend(queue_, &step, &stats);
    answer.keys_read = stats.keys_read;
    return status;
  });
  if (done) {
    answers_.push_back(std::move(answer));
  }
  return done;
}

// Appends a key that leaves every head to exact attention, a second job. Rows that see it are NaN.
bool Life::attend_left(kvm_seq_id seq) {
  std::vector<float> o(kQHeads * kDim);
  kvm_step_stats stats{};
  stats.struct_size = sizeof(stats);
  const bool done = call("kvm_step", [&] {
    const kvm_item item = item_of(seq, 1, 1);
    kvm_step_params step = step_of(space_, &item);
    step.k = tensor(data().spoiled.data(), kDim);
    step.v = tensor(data().v.data(), kDim);
    step.q = tensor(data().q.data(), data().q.size());
    step.o = tensor(o.data(), o.size());
    step.mode = KVM_MODE_SAMPLED;
    step.budget = 32;
    return kvm_step(queue_, &step, &stats);
  });
  const auto is_nan = [](float x) { return std::isnan(x); };
  if (done && (stats.n_exact != kQHeads || stats.n_not_finite != kQHeads ||
               !std::all_of(o.begin(), o.end(), is_nan))) {
    complain("rows that see a key that is no number are not answered exactly, as NaN");
  }
  return done;
}

bool Life::fork(kvm_seq_id seq, kvm_seq_id* child) {
  return call("kvm_seq_fork", [&] { return kvm_seq_fork(client_, seq, KVM_POSITION_END, child); });
}

bool Life::free(kvm_seq_id seq) {
  return call("kvm_seq_free", [&] { return kvm_seq_free(client_, seq); });
}

bool Life::read(kvm_seq_id seq) {
  constexpr uint32_t kRead = 70;
  std::vector<float> k(kRead * kDim);
  std::vector<float> v(k.size());
  const bool done = call("kvm_read", [&] {
    kvm_read_params params{};
    params.struct_size = sizeof(params);
    params.seq = seq;
    params.n_tokens = kRead;
    params.k = tensor(k.data(), k.size());
    params.v = tensor(v.data(), v.size());
    return kvm_read(queue_, &params);
  });
  if (done && (!std::equal(k.begin(), k.end(), data().k.begin()) ||
               !std::equal(v.begin(), v.end(), data().v.begin()))) {
    complain("kvm_read gives other rows than were appended");
  }
  return done;
}

bool Life::work_with_sequences() {
  return append(seq_, 0, kPrompt) && attend(seq_, KVM_MODE_EXACT, 0, false) &&
         attend(seq_, KVM_MODE_SAMPLED, 32, false) && fork(seq_, &child_) &&
         append(child_, kPrompt, 3) && attend(child_, KVM_MODE_TOPK, 24, true) &&
         attend_left(child_) && attend(seq_, KVM_MODE_EXACT, 0, true) &&
         call("kvm_seq_truncate", [&] { return kvm_seq_truncate(client_, child_, 350); }) &&
         attend(child_, KVM_MODE_EXACT, 0, false) && read(seq_);
}

bool Life::append_aged(kvm_seq_id seq, uint32_t n_tokens) {
  return call("kvm_append", [&] {
    const kvm_item item = item_of(seq, n_tokens, 0);
    kvm_step_params step = step_of(aged_space_, &item);
    step.k = tensor(data().aged.data(), n_tokens * kHeads * kDim);
    step.v = step.k;
    return kvm_append(queue_, &step);
  });
}

// What policies see and leave is not what it was once they were refused something.
bool Life::attend_aged(kvm_seq_id seq) {
  std::vector<float> o(kHeads * kDim);
  const bool done = call("kvm_attend", [&] {
    const kvm_item item = item_of(seq, 0, 1);
    kvm_step_params step = step_of(aged_space_, &item);
    step.q = tensor(data().aged.data(), kHeads * kDim);
    step.o = tensor(o.data(), o.size());
    return kvm_attend(queue_, &step, nullptr);
  });
  if (done && !std::all_of(o.begin(), o.end(), [](float x) { return std::abs(x) <= 1; })) {
    complain("an answer is not a mean of values");
  }
  return done;
}

bool Life::observe_aged(kvm_seq_id seq, uint64_t n_columns) {
  return call("kvm_observe", [&] {
    kvm_observe_params params{};
    params.struct_size = sizeof(params);
    params.seq = seq;
    params.n_rows = 2;
    params.query_position = kAged;
    params.n_columns = n_columns;
    params.q = tensor(data().aged.data(), params.n_rows * kHeads * kDim);
    params.column_sums = tensor(data().aged.data(), n_columns * kHeads);
    return kvm_observe(queue_, &params);
  });
}

// Each policy acts, on pages and books of its own and on those that a fork shares.
bool Life::work_with_policies() {
  return call("kvm_space_register", [&] { return register_aged_space(client_, &aged_space_); }) &&
         age_as_it_grows() && age_by_commits() &&
         call("kvm_space_drop", [&] { return kvm_space_drop(client_, aged_space_); });
}

bool Life::age_as_it_grows() {
  kvm_seq_id seq = 0;
  kvm_seq_id child = 0;
  return call("kvm_seq_create",
              [&] { return kvm_seq_create(client_, aged_space_, nullptr, &seq); }) &&
         append_aged(seq, kAgedMore) && attend_aged(seq) && observe_aged(seq, 50) &&
         observe_aged(seq, 100) && append_aged(seq, kAged) && attend_aged(seq) &&
         fork(seq, &child) && observe_aged(child, 120) && attend_aged(child) &&
         append_aged(child, kAgedMore) && attend_aged(child) && append_aged(seq, kAgedMore) &&
         attend_aged(seq) &&
         call("kvm_seq_truncate", [&] { return kvm_seq_truncate(client_, child, 40); }) &&
         append_aged(child, kAgedMore) && attend_aged(child) && free(seq) && free(child);
}

bool Life::age_by_commits() {
  kvm_seq_id seq = 0;
  kvm_seq_id child = 0;
  const auto commit = [&](kvm_seq_id of, uint64_t n_tokens) {
    return call("kvm_seq_commit", [&] { return kvm_seq_commit(client_, of, n_tokens); });
  };
  return call("kvm_seq_create",
              [&] {
                kvm_seq_params params{};
                params.struct_size = sizeof(params);
                params.flags = KVM_SEQ_MANUAL_COMMIT;
                return kvm_seq_create(client_, aged_space_, &params, &seq);
              }) &&
         append_aged(seq, kAged) && attend_aged(seq) && fork(seq, &child) && commit(child, 500) &&
         attend_aged(child) && commit(seq, 600) && attend_aged(seq) && commit(child, kAged) &&
         attend_aged(child) && commit(seq, kAged) && attend_aged(seq) && free(seq) && free(child);
}

bool Life::look() {
  kvm_seq_info info{};
  info.struct_size = sizeof(info);
  const bool known =
      call("kvm_seq_get_info", [&] { return kvm_seq_get_info(client_, seq_, &info); });
  if (known && info.n_tokens_max != kPrompt + 1) {
    complain("a sequence has " + std::to_string(info.n_tokens_max) + " tokens");
  }
  size_t n = 0;
  return known &&
         call("kvm_seq_list", [&] { return kvm_seq_list(client_, space_, 0, nullptr, 0, &n); }) &&
         call("kvm_get_stats_text", [&] { return kvm_get_stats_text(client_, nullptr, 0, &n); });
}

bool Life::give_back() {
  if (!free(seq_) || !free(child_) ||
      !call("kvm_space_drop", [&] { return kvm_space_drop(client_, space_); })) {
    return false;
  }
  kvm_stats stats{};
  stats.struct_size = sizeof(stats);
  if (!call("kvm_get_stats", [&] { return kvm_get_stats(client_, &stats); })) {
    return false;
  }
  if (stats.n_sequences != 0 || stats.host_page_bytes != 0 || stats.observed_bytes != 0) {
    complain(std::to_string(stats.n_sequences) + " sequences, " +
             std::to_string(stats.host_page_bytes) + " bytes of pages and " +
             std::to_string(stats.observed_bytes) + " bytes of observations are left");
  }
  return true;
}

std::string compare(const std::vector<Answer>& clean, const std::vector<Answer>& got) {
  for (size_t i = 0; i < std::min(clean.size(), got.size()); ++i) {
    if (got[i] == clean[i]) {
      continue;
    }
    const bool reads_more =
        clean[i].mode != KVM_MODE_EXACT && got[i].keys_read > clean[i].keys_read;
    // The first two answers are of the same keys: how far sampling is off at all.
    const double allowed = distance(clean[0].o, clean[1].o) + 1e-5;
    if (!reads_more || !(distance(got[i].o, clean[i].o) <= 2 * allowed)) {
      return "answer " + std::to_string(i) + " (mode " + std::to_string(clean[i].mode) + ") read " +
             std::to_string(got[i].keys_read) + " keys, a clean one " +
             std::to_string(clean[i].keys_read) + "; they are " +
             std::to_string(distance(got[i].o, clean[i].o)) + " apart";
    }
  }
  return "";
}

}  // namespace kvm::testing
