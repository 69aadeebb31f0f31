// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/crowd_client.h"

#include <poll.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "tests/common/items.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kQHeads = 8;
constexpr uint32_t kKvHeads = 4;
constexpr uint32_t kDim = 64;
constexpr uint32_t kRowFloats = kKvHeads * kDim;
constexpr uint32_t kQueryFloats = kQHeads * kDim;
constexpr uint32_t kMaxTokens = 400;  // of one append
constexpr uint32_t kMaxRows = 8;      // of queries
constexpr uint32_t kMaxSeqs = 10;
constexpr uint32_t kSinks = 4;
constexpr uint32_t kRecent = 64;
constexpr uint32_t kBurstTokens = 24;
constexpr uint32_t kBurst = 6;
constexpr uint64_t kTimeoutNs = 100'000'000'000;

enum CrowdSpace : uint32_t { kIndexed, kStreaming, kHeavy, kFolded, kCrowdSpaces };

kvm_policy_params policy_of(uint32_t retention) {
  kvm_policy_params policy{};
  policy.kv_head_mask[0] = 2;
  policy.retention = retention;
  policy.n_sinks = kSinks;
  policy.n_recent = kRecent;
  policy.slack = retention == KVM_RETAIN_SINKS_RECENT ? 32 : 0;
  policy.n_heavy = retention == KVM_RETAIN_HEAVY ? 32 : 0;
  return policy;
}

kvm_index_params index_of(uint32_t kind) {
  kvm_index_params index{};
  index.kind = kind;
  index.kv_head_mask[0] = 1;
  index.min_tokens = 256;
  index.n_recent = 16;
  if (kind == KVM_INDEX_LSH) {
    index.lsh_bits = 6;
    index.lsh_tables = 16;
  }
  return index;
}

kvm_space_id register_one(kvm_client* client, const std::string& name, uint32_t space) {
  constexpr uint32_t kCodecs[] = {KVM_CODEC_F32, KVM_CODEC_BF16, KVM_CODEC_BF16, KVM_CODEC_I8};
  constexpr uint32_t kRetention[] = {KVM_RETAIN_FULL, KVM_RETAIN_SINKS_RECENT, KVM_RETAIN_HEAVY,
                                     KVM_RETAIN_SINKS_RECENT_FOLD};
  constexpr uint32_t kIndexes[] = {KVM_INDEX_SKETCH, KVM_INDEX_SKETCH_1BIT, KVM_INDEX_LSH,
                                   KVM_INDEX_SKETCH_2BIT};
  const kvm_policy_params policy = policy_of(kRetention[space]);
  const kvm_index_params index = index_of(kIndexes[space]);
  kvm_space_params params{};
  params.struct_size = sizeof(params);
  params.name = name.c_str();
  params.n_layers = 2;
  params.n_q_heads = kQHeads;
  params.n_kv_heads = kKvHeads;
  params.head_dim_k = kDim;
  params.codec = kCodecs[space];
  params.policies = &policy;
  params.n_policies = kRetention[space] == KVM_RETAIN_FULL ? 0 : 1;
  params.indexes = &index;
  params.n_indexes = 1;
  kvm_space_id id = 0;
  return kvm_space_register(client, &params, &id) == KVM_OK ? id : 0;
}

// Of a key; a multiple of 1/32, so that every codec but I8 has it exactly.
float key_of(float token, uint32_t channel) {
  const auto number = static_cast<uint32_t>(token) * 37 + channel * 11;
  return static_cast<float>(number % 64) / 32 - 1;
}

Deed deed_of_mode(uint32_t mode) {
  constexpr Deed kDeeds[] = {Deed::kExact,   Deed::kExact,    Deed::kTopK,
                             Deed::kSampled, Deed::kVerified, Deed::kAuto};
  return kDeeds[mode];
}

}  // namespace

const char* deed_name(Deed deed) {
  constexpr const char* kNames[] = {"open",       "create",      "append",    "append to layers",
                                    "step",       "exact",       "topk",      "sampled",
                                    "verified",   "auto",        "read",      "observe",
                                    "fork",       "truncate",    "commit",    "free",
                                    "info",       "list",        "stats",     "spaces",
                                    "arena",      "burst",       "cancelled", "late",
                                    "queue gone", "client gone", "foreign",   "full",
                                    "evicted",    "disconnected"};
  static_assert(std::size(kNames) == static_cast<size_t>(Deed::kCount));
  return kNames[static_cast<size_t>(deed)];
}

std::vector<kvm_space_id> register_crowd_spaces(kvm_client* client) {
  constexpr const char* kNames[] = {"indexed", "streaming", "heavy", "folded"};
  std::vector<kvm_space_id> ids;
  for (uint32_t space = 0; space < kCrowdSpaces; ++space) {
    ids.push_back(register_one(client, kNames[space], space));
  }
  return ids;
}

void CrowdClient::Seq::cut(uint64_t n_tokens) {
  for (Tokens& tokens : layers) {
    tokens.resize(std::min<uint64_t>(tokens.size(), n_tokens));
  }
}

// --- Coming and going ----------------------------------------------------------------------------

CrowdClient::CrowdClient(std::string socket_path, unsigned seed, Deeds* deeds,
                         std::atomic<kvm_seq_id>* foreign)
    : socket_path_(std::move(socket_path)),
      name_("crowd-" + std::to_string(seed)),
      random_(seed),
      deeds_(deeds),
      foreign_(foreign),
      in_arena_(seed % 2 == 0) {
  open();
}

CrowdClient::~CrowdClient() { close(false); }

void CrowdClient::open() {
  if (client_ == nullptr) {
    kvm_connect_params params{};
    params.struct_size = sizeof(params);
    params.socket_path = socket_path_.c_str();
    params.client_name = name_.c_str();
    params.timeout_ns = kTimeoutNs;
    if (kvm_connect(&params, &client_) != KVM_OK) {
      return fail("kvm_connect");
    }
  }
  // An administrator may be faster.
  is_lost_ |= !succeeded(kvm_queue_create(client_, nullptr, &queue_), Deed::kOpen, 0) ||
              !succeeded(kvm_queue_create(client_, nullptr, &async_), Deed::kOpen, 0);
  make_blocks();
  spaces_ = register_crowd_spaces(client_);
  is_lost_ |= std::find(spaces_.begin(), spaces_.end(), 0) != spaces_.end();
}

void CrowdClient::drop_connection() {
  kvm_queue_destroy(async_);
  kvm_queue_destroy(queue_);
  kvm_arena_destroy(arena_);
  async_ = queue_ = nullptr;
  arena_ = nullptr;
  seqs_.clear();
}

void CrowdClient::close(bool client_first) {
  if (client_first) {
    kvm_client_close(client_);
    client_ = nullptr;
  }
  drop_connection();
  if (!client_first) {
    kvm_client_close(client_);
    client_ = nullptr;
  }
}

// After DISCONNECTED: the same client again, or another. A client that lives keeps its sequences.
void CrowdClient::reopen() {
  is_lost_ = false;
  count(Deed::kDisconnected);
  if (one_in(2) || kvm_client_ping(client_, nullptr) != KVM_ERR_DISCONNECTED) {
    close(false);
  } else {
    drop_connection();
    if (kvm_client_reconnect(client_) != KVM_OK) {
      return fail("kvm_client_reconnect");
    }
  }
  open();
}

void CrowdClient::make_blocks() {
  if (in_arena_) {
    kvm_arena_params params{};
    params.struct_size = sizeof(params);
    params.size = 4 << 20;
    is_lost_ |= !succeeded(kvm_arena_create(client_, &params, &arena_), Deed::kOpen, 0);
  }
  k_ = make_block(size_t{kLayers} * kMaxTokens * kRowFloats);
  v_ = make_block(size_t{kLayers} * kMaxTokens * kRowFloats);
  q_ = make_block(size_t{kMaxRows} * kQueryFloats);
  o_ = make_block(size_t{kMaxRows} * kQueryFloats);
  lse_ = make_block(size_t{kMaxRows} * kQHeads);
  sums_ = make_block(size_t{kMaxTokens} * kKvHeads);
}

CrowdClient::Block CrowdClient::make_block(size_t n_floats) {
  Block block;
  if (in_arena_ && kvm_arena_alloc(arena_, n_floats * sizeof(float), 0, &block.buffer) == KVM_OK) {
    block.floats = static_cast<float*>(kvm_arena_data(arena_, block.buffer));
    std::fill_n(block.floats, n_floats, 0.0f);
    return block;
  }
  block.own.resize(n_floats);
  block.floats = block.own.data();
  block.buffer = kvm_host_buffer(block.floats, n_floats * sizeof(float));
  return block;
}

kvm_tensor CrowdClient::tensor(const Block& block, size_t at, size_t n_floats) const {
  kvm_tensor tensor{};
  tensor.buffer = block.buffer;
  tensor.buffer.where += at * sizeof(float);
  tensor.buffer.size = n_floats * sizeof(float);
  tensor.dtype = KVM_DTYPE_F32;
  return tensor;
}

// --- What a status means -------------------------------------------------------------------------

uint32_t CrowdClient::pick(uint32_t low, uint32_t high) {
  return std::uniform_int_distribution<uint32_t>(low, high)(random_);
}

void CrowdClient::count(Deed deed) {
  (*deeds_)[static_cast<size_t>(deed)].fetch_add(1, std::memory_order_relaxed);
}

void CrowdClient::fail(const std::string& what) {
  if (failure_.empty()) {
    failure_ = name_ + ": " + what + ": " + kvm_last_error();
  }
}

// Of an answer. In an arena it may have been cleared, if the service has closed the connection.
void CrowdClient::fail_answer(const std::string& what) {
  if (in_arena_ && kvm_client_ping(client_, nullptr) == KVM_ERR_DISCONNECTED) {
    is_lost_ = true;
    return;
  }
  fail(what);
}

void CrowdClient::forget(kvm_seq_id seq) {
  std::erase_if(seqs_, [seq](const Seq& other) { return other.id == seq; });
}

bool CrowdClient::succeeded(kvm_status status, Deed deed, kvm_seq_id seq, kvm_status allowed) {
  switch (status) {
    case KVM_OK:
      count(deed);
      return true;
    case KVM_ERR_NO_SPACE:
    case KVM_ERR_QUOTA:
      count(Deed::kFull);
      is_full_ = true;
      return false;
    case KVM_ERR_STALE:
      count(Deed::kEvicted);
      forget(seq);
      return false;
    case KVM_ERR_DISCONNECTED:
      is_lost_ = true;
      return false;
    default:
      if (allowed == KVM_OK || status != allowed) {
        fail(std::string(deed_name(deed)) + ": " + kvm_status_name(status));
      }
      return false;
  }
}

// --- Requests ------------------------------------------------------------------------------------

CrowdClient::Tokens CrowdClient::fill_tokens(uint32_t row, uint32_t n) {
  Tokens tokens;
  for (uint32_t t = row; t < row + n; ++t) {
    const auto token = static_cast<float>(pick(1, 100));
    tokens.push_back(token);
    for (uint32_t i = 0; i < kRowFloats; ++i) {
      k_.floats[t * kRowFloats + i] = key_of(token, i % kDim);
      v_.floats[t * kRowFloats + i] = token;
    }
  }
  return tokens;
}

void CrowdClient::fill_queries(uint32_t row, uint32_t n, bool zero) {
  std::normal_distribution<float> normal;
  for (uint32_t i = row * kQueryFloats; i < (row + n) * kQueryFloats; ++i) {
    q_.floats[i] = zero ? 0.0f : normal(random_);
  }
}

kvm_step_params CrowdClient::step_params(uint32_t space, uint32_t layer,
                                         const std::vector<kvm_item>& items) {
  kvm_step_params step{};
  step.struct_size = sizeof(step);
  step.space = spaces_[space];
  step.layer_begin = layer;
  step.n_items = static_cast<uint32_t>(items.size());
  step.items = items.data();
  return step;
}

void CrowdClient::add_append(kvm_step_params* step, uint32_t row, uint32_t n) {
  step->k = tensor(k_, size_t{row} * kRowFloats, size_t{n} * kRowFloats);
  step->v = tensor(v_, size_t{row} * kRowFloats, size_t{n} * kRowFloats);
}

void CrowdClient::add_attend(kvm_step_params* step, uint32_t row, uint32_t n) {
  step->q = tensor(q_, size_t{row} * kQueryFloats, size_t{n} * kQueryFloats);
  step->o = tensor(o_, size_t{row} * kQueryFloats, size_t{n} * kQueryFloats);
  step->lse = tensor(lse_, size_t{row} * kQHeads, size_t{n} * kQHeads);
}

void CrowdClient::choose_mode(uint32_t space, kvm_step_params* step) {
  step->mode = pick(KVM_MODE_EXACT, KVM_MODE_AUTO);
  // Hash tables offer no bar.
  if (step->mode == KVM_MODE_VERIFIED && space == kHeavy) {
    step->mode = KVM_MODE_SAMPLED;
  }
  const bool has_budget =
      step->mode == KVM_MODE_TOPK || (step->mode == KVM_MODE_SAMPLED && one_in(2));
  step->budget = has_budget ? pick(1, 64) : 0;
  step->seed = random_();
}

void CrowdClient::create() {
  if (seqs_.size() >= kMaxSeqs) {
    return free_one();
  }
  kvm_seq_params params{};
  params.struct_size = sizeof(params);
  params.flags = one_in(4) ? uint32_t{KVM_SEQ_MANUAL_COMMIT} : 0;
  Seq seq;
  seq.space = pick(0, kCrowdSpaces - 1);
  if (succeeded(kvm_seq_create(client_, spaces_[seq.space], &params, &seq.id), Deed::kCreate, 0)) {
    foreign_->store(seq.id);
    seqs_.push_back(std::move(seq));
  }
}

// To one layer, or to both.
void CrowdClient::append() {
  Seq& seq = seqs_[some_seq()];
  const bool both = one_in(4);
  const uint32_t layer = both ? 0 : pick(0, 1);
  const uint32_t n = one_in(4) ? pick(100, kMaxTokens) : pick(1, 64);
  const uint32_t n_layers = both ? kLayers : 1;
  const Tokens tokens = fill_tokens(0, n * n_layers);
  const std::vector<kvm_item> items = {item_of(seq.id, n, 0)};
  kvm_step_params params = step_params(seq.space, layer, items);
  params.n_layers = n_layers;
  add_append(&params, 0, n * n_layers);
  if (!succeeded(kvm_append(queue_, &params), both ? Deed::kAppendLayers : Deed::kAppend, seq.id)) {
    return;
  }
  for (uint32_t i = 0; i < n_layers; ++i) {
    const auto begin = tokens.begin() + i * n;
    seq.layers[layer + i].insert(seq.layers[layer + i].end(), begin, begin + n);
  }
}

// One token for each of some sequences of a space, and a row of each.
void CrowdClient::step() {
  const uint32_t space = seqs_[some_seq()].space;
  const uint32_t layer = pick(0, 1);
  std::vector<kvm_item> items;
  for (const Seq& seq : seqs_) {
    if (seq.space == space && items.size() < kMaxRows) {
      const auto row = static_cast<uint32_t>(items.size());
      items.push_back(item_of(seq.id, 1, 1));
      items.back().append_row = items.back().query_row = row;
    }
  }
  const auto n = static_cast<uint32_t>(items.size());
  const Tokens tokens = fill_tokens(0, n);
  fill_queries(0, n, false);
  kvm_step_params params = step_params(space, layer, items);
  choose_mode(space, &params);
  add_append(&params, 0, n);
  add_attend(&params, 0, n);
  // Which of them an administrator has freed is found out when they are used alone.
  const kvm_status status = kvm_step(queue_, &params, nullptr);
  if (!succeeded(status, Deed::kStep, n == 1 ? items[0].seq : 0, KVM_ERR_PARTIAL)) {
    if (status == KVM_ERR_STALE && n > 1) {
      look();
    }
    return;
  }
  check_finite(n);
  for (uint32_t i = 0; i < n; ++i) {
    const auto seq = std::find_if(seqs_.begin(), seqs_.end(),
                                  [&](const Seq& s) { return s.id == items[i].seq; });
    seq->layers[layer].push_back(tokens[i]);
  }
}

void CrowdClient::attend() {
  const Seq& seq = seqs_[some_seq()];
  const uint32_t layer = pick(0, 1);
  const auto length = static_cast<uint32_t>(seq.layers[layer].size());
  const uint32_t n = std::min(length, pick(1, 3));
  if (n == 0) {
    return;
  }
  const std::vector<kvm_item> items = {item_of(seq.id, 0, n)};
  kvm_step_params params = step_params(seq.space, layer, items);
  choose_mode(seq.space, &params);
  fill_queries(0, n, params.mode == KVM_MODE_EXACT);
  add_attend(&params, 0, n);
  // What a truncated sequence has dropped before may be what its last rows would see.
  if (succeeded(kvm_attend(queue_, &params, nullptr), deed_of_mode(params.mode), seq.id,
                KVM_ERR_PARTIAL)) {
    params.mode == KVM_MODE_EXACT ? check_exact(seq, layer, n) : check_finite(n);
  }
}

void CrowdClient::attend_late() {
  const Seq& seq = seqs_[some_seq()];
  if (seq.layers[0].empty()) {
    return;
  }
  const std::vector<kvm_item> items = {item_of(seq.id, 0, 1)};
  kvm_step_params params = step_params(seq.space, 0, items);
  params.deadline_ns = 1;
  fill_queries(0, 1, true);
  add_attend(&params, 0, 1);
  const kvm_status status = kvm_attend(queue_, &params, nullptr);
  if (status == KVM_ERR_DEADLINE) {
    return count(Deed::kLate);
  }
  succeeded(status == KVM_OK ? KVM_ERR_INTERNAL : status, Deed::kLate, seq.id);
}

void CrowdClient::read() {
  const Seq& seq = seqs_[some_seq()];
  const uint32_t layer = pick(0, 1);
  const auto length = static_cast<uint32_t>(seq.layers[layer].size());
  if (length == 0) {
    return;
  }
  kvm_read_params params{};
  params.struct_size = sizeof(params);
  params.seq = seq.id;
  params.layer = layer;
  params.n_tokens = std::min(length, pick(1, kMaxTokens));
  params.position = length - params.n_tokens;
  params.k = tensor(k_, 0, params.n_tokens * kRowFloats);
  params.v = tensor(v_, 0, params.n_tokens * kRowFloats);
  if (succeeded(kvm_read(queue_, &params), Deed::kRead, seq.id, KVM_ERR_PARTIAL)) {
    check_read(seq, layer, params.position, params.n_tokens);
  }
}

void CrowdClient::observe() {
  const Seq& seq = seqs_[some_seq()];
  const uint32_t layer = pick(0, 1);
  const auto length = static_cast<uint32_t>(seq.layers[layer].size());
  kvm_observe_params params{};
  params.struct_size = sizeof(params);
  params.seq = seq.id;
  params.layer = layer;
  params.n_rows = pick(1, kMaxRows);
  params.query_position = length;
  params.n_columns = std::min(length, kMaxTokens);
  fill_queries(0, params.n_rows, false);
  params.q = tensor(q_, 0, params.n_rows * kQueryFloats);
  if (params.n_columns != 0) {
    std::fill_n(sums_.floats, params.n_columns * kKvHeads, 0.25f);
    params.column_sums = tensor(sums_, 0, params.n_columns * kKvHeads);
  }
  succeeded(kvm_observe(queue_, &params), Deed::kObserve, seq.id);
}

void CrowdClient::fork() {
  if (seqs_.size() >= kMaxSeqs) {
    return free_one();
  }
  const Seq& parent = seqs_[some_seq()];
  const auto longest = static_cast<uint32_t>(parent.longest());
  const bool all = one_in(2);
  const uint64_t n = all ? KVM_POSITION_END : longest - std::min(longest, pick(0, 50));
  Seq child = parent;
  if (succeeded(kvm_seq_fork(client_, parent.id, n, &child.id), Deed::kFork, parent.id,
                KVM_ERR_PARTIAL)) {
    child.cut(n);
    seqs_.push_back(std::move(child));
  }
}

void CrowdClient::truncate() {
  Seq& seq = seqs_[some_seq()];
  const auto longest = static_cast<uint32_t>(seq.longest());
  const uint64_t n = longest - std::min(longest, one_in(4) ? pick(0, 1000) : pick(0, 40));
  if (succeeded(kvm_seq_truncate(client_, seq.id, n), Deed::kTruncate, seq.id, KVM_ERR_PARTIAL)) {
    seq.cut(n);
  }
}

void CrowdClient::commit() {
  const Seq& seq = seqs_[some_seq()];
  succeeded(kvm_seq_commit(client_, seq.id, seq.shortest()), Deed::kCommit, seq.id);
}

void CrowdClient::free_one() {
  const kvm_seq_id seq = seqs_[some_seq()].id;
  if (succeeded(kvm_seq_free(client_, seq), Deed::kFree, seq)) {
    forget(seq);
  }
}

// At each of its sequences, at their list, and at the counters.
void CrowdClient::look() {
  for (size_t i = seqs_.size(); i-- != 0;) {
    kvm_seq_info info{};
    info.struct_size = sizeof(info);
    const kvm_seq_id id = seqs_[i].id;
    if (succeeded(kvm_seq_get_info(client_, id, &info), Deed::kInfo, id) &&
        (info.n_tokens_max != seqs_[i].longest() || info.n_tokens_min != seqs_[i].shortest())) {
      fail("a sequence has another length");
    }
  }
  std::array<kvm_seq_info, 2 * kMaxSeqs> infos{};
  infos[0].struct_size = sizeof(infos[0]);
  size_t n = 0;
  if (succeeded(kvm_seq_list(client_, 0, 0, infos.data(), infos.size(), &n), Deed::kList, 0) &&
      n > seqs_.size()) {
    fail("more sequences than were made");
  }
  kvm_stats stats{};
  stats.struct_size = sizeof(stats);
  char text[64];
  uint64_t ping_ns = 0;
  if (succeeded(kvm_get_stats(client_, &stats), Deed::kStats, 0) &&
      stats.host_used_bytes > stats.host_capacity_bytes) {
    fail("more memory in use than there may be");
  }
  succeeded(kvm_get_stats_text(client_, text, sizeof(text), &n), Deed::kStats, 0);
  succeeded(kvm_client_ping(client_, &ping_ns), Deed::kStats, 0);
}

void CrowdClient::look_at_foreign() {
  const kvm_seq_id foreign = foreign_->load();
  const auto is_own = [foreign](const Seq& seq) { return seq.id == foreign; };
  if (foreign == 0 || std::any_of(seqs_.begin(), seqs_.end(), is_own)) {
    return;
  }
  const std::vector<kvm_item> items = {item_of(foreign, 0, 1)};
  kvm_step_params params = step_params(kIndexed, 0, items);
  fill_queries(0, 1, true);
  add_attend(&params, 0, 1);
  const kvm_status status = kvm_attend(queue_, &params, nullptr);
  if (status == KVM_ERR_PERMISSION) {
    return count(Deed::kForeign);
  }
  succeeded(status == KVM_OK ? KVM_ERR_INTERNAL : status, Deed::kForeign, 0);
}

// Of its own, from registration to drop.
void CrowdClient::use_space() {
  // Of each kind another: a client that was thrown out here has left its space behind.
  const uint32_t kind = pick(0, kCrowdSpaces - 1);
  const std::string name = name_ + "-" + std::to_string(kind);
  const kvm_space_id space = register_one(client_, name, kind);
  if (space == 0) {
    is_lost_ = true;
    return;
  }
  kvm_space_info info{};
  info.struct_size = sizeof(info);
  std::array<kvm_space_info, 32> infos{};
  infos[0].struct_size = sizeof(infos[0]);
  size_t n = 0;
  kvm_space_id found = 0;
  if (succeeded(kvm_space_get_info(client_, space, &info), Deed::kSpaces, 0) &&
      succeeded(kvm_space_find(client_, name.c_str(), &found), Deed::kSpaces, 0) &&
      succeeded(kvm_space_list(client_, infos.data(), infos.size(), &n), Deed::kSpaces, 0) &&
      succeeded(kvm_space_drop(client_, space), Deed::kSpaces, 0) && found != space) {
    fail("a space is found by its name, and is another");
  }
}

void CrowdClient::use_arena() {
  kvm_arena_params params{};
  params.struct_size = sizeof(params);
  params.size = uint64_t{pick(1, 16)} << 12;
  kvm_arena* arena = nullptr;
  if (succeeded(kvm_arena_create(client_, &params, &arena), Deed::kArena, 0)) {
    kvm_buffer buffer{};
    if (kvm_arena_alloc(arena, 4096, 0, &buffer) == KVM_OK) {
      std::memset(kvm_arena_data(arena, buffer), 1, 4096);
    }
    kvm_arena_destroy(arena);
  }
}

// --- Asynchronous requests -----------------------------------------------------------------------

// Each for another sequence, so that each has its effect whatever becomes of the others.
bool CrowdClient::stage(uint32_t slot, Staged* staged) {
  const Seq& seq = seqs_[slot];
  const uint32_t row = slot * kBurstTokens;
  staged->seq = seq.id;
  staged->kind = pick(0, 4);
  const auto longest = static_cast<uint32_t>(seq.longest());
  kvm_status status = KVM_OK;
  if (staged->kind <= 1) {
    const uint32_t n = pick(1, kBurstTokens);
    const std::vector<kvm_item> items = {item_of(seq.id, n, staged->kind)};
    kvm_step_params params = step_params(seq.space, 0, items);
    staged->appended = fill_tokens(row, n);
    add_append(&params, row, n);
    if (staged->kind == 1) {
      fill_queries(slot, 1, true);
      add_attend(&params, slot, 1);
    }
    status = staged->kind == 0 ? kvm_append_async(async_, &params, slot)
                               : kvm_step_async(async_, &params, slot);
  } else if (staged->kind == 2) {
    staged->n_tokens = longest - std::min(longest, pick(0, 30));
    status = kvm_seq_truncate_async(async_, seq.id, staged->n_tokens, slot);
  } else if (staged->kind == 3 || seq.layers[0].empty()) {
    staged->kind = 3;
    status = kvm_seq_commit_async(async_, seq.id, seq.shortest(), slot);
  } else {
    kvm_read_params params{};
    params.struct_size = sizeof(params);
    params.seq = seq.id;
    params.n_tokens = 1;
    params.position = seq.layers[0].size() - 1;
    params.k = tensor(k_, size_t{row} * kRowFloats, kRowFloats);
    status = kvm_read_async(async_, &params, slot);
  }
  return succeeded(status, Deed::kBurst, 0);
}

void CrowdClient::apply(const Staged& staged, const kvm_completion& completion) {
  if (completion.status == KVM_ERR_CANCELLED) {
    return count(Deed::kCancelled);
  }
  if (!succeeded(completion.status, Deed::kBurst, staged.seq, KVM_ERR_PARTIAL)) {
    return;
  }
  const auto seq =
      std::find_if(seqs_.begin(), seqs_.end(), [&](const Seq& s) { return s.id == staged.seq; });
  if (seq == seqs_.end()) {
    return;
  }
  if (staged.kind <= 1) {
    seq->layers[0].insert(seq->layers[0].end(), staged.appended.begin(), staged.appended.end());
  } else if (staged.kind == 2) {
    seq->cut(staged.n_tokens);
  }
}

void CrowdClient::finish_burst(std::map<uint64_t, Staged>* staged) {
  const bool by_fd = one_in(2);
  while (!staged->empty() && failure_.empty()) {
    std::array<kvm_completion, 4> done{};
    int32_t n = 0;
    if (by_fd && kvm_queue_fd(async_) >= 0) {
      pollfd watched{kvm_queue_fd(async_), POLLIN, 0};
      ::poll(&watched, 1, 100);
      n = kvm_poll(async_, done.data(), done.size());
    } else {
      n = kvm_wait(async_, done.data(), done.size(), 1, kTimeoutNs);
      n = n == 0 ? KVM_ERR_TIMEOUT : n;
    }
    if (n < 0) {
      succeeded(n, Deed::kBurst, 0);
      return;
    }
    for (int32_t i = 0; i < n; ++i) {
      const auto found = staged->find(done[static_cast<size_t>(i)].user_data);
      if (found == staged->end()) {
        return fail("a completion that nobody asked for");
      }
      apply(found->second, done[static_cast<size_t>(i)]);
      staged->erase(found);
    }
  }
}

void CrowdClient::burst() {
  std::map<uint64_t, Staged> staged;
  const auto n = std::min<uint32_t>(kBurst, static_cast<uint32_t>(seqs_.size()));
  for (uint32_t slot = 0; slot < n; ++slot) {
    Staged one;
    if (stage(slot, &one)) {
      staged.emplace(slot, std::move(one));
    }
  }
  if (is_lost_ || !succeeded(kvm_submit(async_), Deed::kBurst, 0)) {
    return;
  }
  const uint32_t dice = pick(0, 39);
  if (dice == 0) {
    // In the middle of everything. The queue's requests are cancelled or done; which, is not told.
    kvm_queue_destroy(async_);
    async_ = nullptr;
    count(Deed::kQueueGone);
    is_lost_ |= kvm_queue_create(client_, nullptr, &async_) != KVM_OK;
    for (const auto& [slot, one] : staged) {
      if (succeeded(kvm_seq_free(client_, one.seq), Deed::kFree, one.seq)) {
        forget(one.seq);
      }
    }
    return;
  }
  if (dice == 1) {
    close(true);
    count(Deed::kClientGone);
    return open();
  }
  if (dice < 20) {
    const kvm_status status = kvm_cancel(async_, pick(0, kBurst - 1));
    if (status != KVM_OK && status != KVM_ERR_NOT_FOUND && status != KVM_ERR_AGAIN) {
      succeeded(status, Deed::kCancelled, 0);
    }
  }
  finish_burst(&staged);
}

// --- Answers -------------------------------------------------------------------------------------

void CrowdClient::check_exact(const Seq& seq, uint32_t layer, uint32_t n_query) {
  const Tokens& tokens = seq.layers[layer];
  const double tolerance = seq.space == kFolded ? 1.5 : 0.2;
  for (uint32_t row = 0; row < n_query; ++row) {
    const uint64_t p = tokens.size() - n_query + row;
    for (uint32_t head = 0; head < kQHeads; ++head) {
      const bool is_second = head / (kQHeads / kKvHeads) == 1;
      const double lse = double{lse_.floats[row * kQHeads + head]};
      const double o = double{o_.floats[row * kQueryFloats + head * kDim + 3]};
      double sum = 0;
      double n = 0;
      for (uint64_t x = 0; x <= p; ++x) {
        const bool is_kept = x < kSinks || x + kRecent > p;
        if (is_kept || !is_second || seq.space != kStreaming) {
          sum += double{tokens[x]};
          n += 1;
        }
      }
      const bool chooses = is_second && seq.space == kHeavy;
      const bool is_right =
          chooses ? lse < std::log(n) + 1e-3 && o > 0.9 && o < 100.5
                  : std::abs(lse - std::log(n)) < 1e-3 && std::abs(o - sum / n) < tolerance;
      if (!is_right) {
        return fail_answer("space " + std::to_string(seq.space) + " head " + std::to_string(head) +
                           " has o " + std::to_string(o) + " and lse " + std::to_string(lse) +
                           "; " + std::to_string(n) + " tokens have the mean " +
                           std::to_string(sum / n));
      }
    }
  }
}

void CrowdClient::check_finite(uint32_t n_rows) {
  for (uint32_t i = 0; i < n_rows * kQueryFloats; ++i) {
    if (!(o_.floats[i] > -1000 && o_.floats[i] < 1000)) {
      return fail_answer("an answer of " + std::to_string(o_.floats[i]));
    }
  }
}

void CrowdClient::check_read(const Seq& seq, uint32_t layer, uint64_t position, uint64_t n_tokens) {
  const float tolerance = seq.space == kFolded ? 0.01f : 0.0f;
  for (uint64_t t = 0; t < n_tokens; ++t) {
    const float token = seq.layers[layer][position + t];
    for (uint32_t i = 0; i < kRowFloats; ++i) {
      const float k = k_.floats[t * kRowFloats + i];
      const float v = v_.floats[t * kRowFloats + i];
      if (std::abs(k - key_of(token, i % kDim)) > tolerance ||
          std::abs(v - token) > tolerance * token) {
        return fail_answer("token " + std::to_string(position + t) + " reads as " +
                           std::to_string(k) + " and " + std::to_string(v));
      }
    }
  }
}

bool CrowdClient::do_something() {
  const uint32_t dice = pick(0, 99);
  if (is_lost_) {
    reopen();
  } else if (seqs_.empty() || dice < 6) {
    create();
  } else if (is_full_ || dice < 10) {
    is_full_ = false;
    free_one();
  } else if (dice < 34) {
    append();
  } else if (dice < 44) {
    step();
  } else if (dice < 64) {
    attend();
  } else if (dice < 65) {
    attend_late();
  } else if (dice < 70) {
    read();
  } else if (dice < 74) {
    observe();
  } else if (dice < 79) {
    fork();
  } else if (dice < 83) {
    truncate();
  } else if (dice < 86) {
    commit();
  } else if (dice < 88) {
    look();
  } else if (dice < 90) {
    look_at_foreign();
  } else if (dice < 91) {
    use_space();
  } else if (dice < 92) {
    use_arena();
  } else {
    burst();
  }
  return failure_.empty();
}

}  // namespace kvm::testing
