// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/seeds.h"

#include "base/audit_stats.h"
#include "base/stats_text.h"
#include "daemon/options.h"
#include "ipc/control.h"
#include "ipc/space_message.h"
#include "ipc/wire.h"

namespace kvm::testing {
namespace {

namespace wire = ipc::wire;

Bytes bytes_of(std::span<const uint8_t> span) { return {span.begin(), span.end()}; }
Bytes bytes_of(std::string_view text) { return {text.begin(), text.end()}; }

Bytes hello(uint64_t magic, uint32_t major_max) {
  ipc::ControlWriter writer;
  const auto name = writer.fbb().CreateString("a client");
  return bytes_of(writer.finish(
      1, wire::CreateHello(writer.fbb(), magic, ipc::kProtocolMajor, major_max, name)));
}

template <typename Encode>
void add_message(Bytes* out, Encode encode) {
  ipc::ControlWriter writer;
  const auto bytes = writer.finish(7, encode(&writer));
  put(out, static_cast<uint16_t>(bytes.size()));
  out->insert(out->end(), bytes.begin(), bytes.end());
}

SpaceSpec space() {
  SpaceSpec message;
  message.name = "fuzzed";
  message.params.struct_size = sizeof(message.params);
  message.params.n_layers = 4;
  message.params.n_q_heads = 8;
  message.params.n_kv_heads = 2;
  message.params.head_dim_k = 64;
  return message;
}

// What an administrator changes; client 1 is the one that sends it.
Bytes changes() {
  using Writer = ipc::ControlWriter;
  Bytes out;
  for (const auto whose : {uint32_t{KVM_QUOTA_CLIENT}, uint32_t{KVM_QUOTA_USER}}) {
    kvm_quota_params quota{};
    quota.struct_size = sizeof(quota);
    quota.whose = whose;
    quota.id = whose == KVM_QUOTA_CLIENT ? 1 : 0;
    quota.limits.bytes = 1 << 20;
    quota.limits.requests = KVM_NO_LIMIT;
    add_message(&out, [&quota](Writer* w) {
      const auto bytes = w->fbb().CreateVector(ipc::as_bytes(&quota, 1).data(), sizeof(quota));
      return wire::CreateQuotaSet(w->fbb(), bytes);
    });
  }
  for (const auto what :
       {uint32_t{KVM_EVICT_SEQ}, uint32_t{KVM_EVICT_SPACE}, uint32_t{KVM_EVICT_CLIENT}}) {
    const uint32_t flags = what == KVM_EVICT_CLIENT ? uint32_t{KVM_EVICT_DISCONNECT} : 0;
    add_message(&out, [=](Writer* w) { return wire::CreateEvict(w->fbb(), what, 1, 0, flags); });
  }
  return out;
}

ipc::RequestEntry entry(ipc::Opcode opcode, uint32_t block_length) {
  ipc::RequestEntry entry{};
  entry.opcode = static_cast<uint8_t>(opcode);
  entry.version = ipc::kBlockVersion;
  entry.region = 1;
  entry.block_length = block_length;
  entry.result_region = 1;
  entry.result_offset = kFuzzArenaBytes - sizeof(ipc::ResultBlock);
  return entry;
}

template <typename Block>
Bytes request(ipc::Opcode opcode, const Block& block) {
  Bytes out;
  put(&out, entry(opcode, sizeof(block)));
  put(&out, block);
  return out;
}

Bytes step_request() {
  ipc::StepBlock step{};
  step.verbs = ipc::kStepAppend | ipc::kStepAttend;
  step.space = 1;
  step.n_layers = 1;
  step.n_items = 1;
  step.n_ranges = 1;
  step.n_tree_words = 2;
  step.k = {.region = 1, .dtype = KVM_DTYPE_BF16, .offset = 1024, .size_bytes = 256};
  step.v = {.region = 1, .dtype = KVM_DTYPE_BF16, .offset = 1280, .size_bytes = 256};
  step.q = {.region = 1, .dtype = KVM_DTYPE_F32, .offset = 1536, .size_bytes = 256};
  step.o = {.region = 1, .dtype = KVM_DTYPE_F32, .offset = 2048, .size_bytes = 256};
  step.lse = {.region = 1, .dtype = KVM_DTYPE_F32, .offset = 3072, .size_bytes = 64};
  kvm_item item{};
  item.seq = 1;
  item.append_position = KVM_POSITION_END;
  item.n_append = 2;
  item.n_query = 2;
  item.query_position = KVM_POSITION_END;
  item.n_ranges = 1;
  item.flags = KVM_ITEM_TREE;
  const kvm_range range{0, 10};
  Bytes out;
  put(&out, entry(ipc::Opcode::kStep, sizeof(step) + sizeof(item) + sizeof(range) + 16));
  put(&out, step);
  put(&out, item);
  put(&out, range);
  put(&out, uint64_t{1});
  put(&out, uint64_t{3});
  return out;
}

Bytes items(ItemsHead head, const std::vector<kvm_item>& items,
            const std::vector<kvm_range>& ranges = {}, const std::vector<uint64_t>& tree = {}) {
  head.n_items = static_cast<uint8_t>(items.size());
  head.n_ranges = static_cast<uint8_t>(ranges.size());
  head.n_tree_words = static_cast<uint8_t>(tree.size());
  Bytes out;
  put(&out, head);
  for (const kvm_item& item : items) {
    put(&out, item);
  }
  for (const kvm_range& range : ranges) {
    put(&out, range);
  }
  for (const uint64_t word : tree) {
    put(&out, word);
  }
  return out;
}

// The arrays of a space in the order of targets.h.
Bytes policy(SpaceSpec message) {
  message.params.n_layer_params = static_cast<uint32_t>(message.layers.size());
  message.params.n_policies = static_cast<uint32_t>(message.policies.size());
  message.params.n_codecs = static_cast<uint32_t>(message.codecs.size());
  message.params.n_indexes = static_cast<uint32_t>(message.indexes.size());
  message.params.n_rope_pairs = static_cast<uint32_t>(message.rope_inv_freq.size());
  Bytes out;
  put(&out, message.params);
  const auto put_all = [&out](const auto& values) {
    for (const auto& value : values) {
      put(&out, value);
    }
  };
  put_all(message.layers);
  put_all(message.policies);
  put_all(message.codecs);
  put_all(message.indexes);
  put_all(message.rope_inv_freq);
  put_all(message.sink_logits);
  return out;
}

}  // namespace

Seeds hello_seeds() {
  return {{"good", hello(ipc::kHelloMagic, ipc::kProtocolMajor)},
          {"bad_magic", hello(1, ipc::kProtocolMajor)},
          {"no_common_version", hello(ipc::kHelloMagic, 0)}};
}

Seeds control_seeds() {
  using Writer = ipc::ControlWriter;
  Bytes memory;
  add_message(&memory, [](Writer* w) { return wire::CreateQueueCreate(w->fbb(), 64); });
  add_message(&memory, [](Writer* w) { return wire::CreateArenaCreate(w->fbb(), 65536); });
  add_message(&memory, [](Writer* w) { return wire::CreateArenaDestroy(w->fbb(), 1); });
  add_message(&memory, [](Writer* w) { return wire::CreateQueueDestroy(w->fbb(), 1); });
  Bytes spaces;
  add_message(&spaces, [](Writer* w) { return ipc::encode_space(w, space()); });
  add_message(&spaces, [](Writer* w) {
    return wire::CreateSpaceFind(w->fbb(), w->fbb().CreateString("fuzzed"));
  });
  add_message(&spaces, [](Writer* w) { return wire::CreateSpaceInfo(w->fbb(), 1); });
  add_message(&spaces, [](Writer* w) { return wire::CreateSpaceList(w->fbb(), 0); });
  add_message(&spaces, [](Writer* w) { return wire::CreateSpaceDrop(w->fbb(), 1); });
  Bytes facts;
  add_message(&facts, [](Writer* w) { return wire::CreateSeqInfo(w->fbb(), 1); });
  add_message(&facts, [](Writer* w) { return wire::CreateSeqList(w->fbb(), 0, 1, 0); });
  add_message(&facts, [](Writer* w) { return wire::CreateStats(w->fbb()); });
  add_message(&facts, [](Writer* w) { return wire::CreateStatsText(w->fbb(), 10); });
  Bytes lists;
  add_message(&lists, [](Writer* w) { return wire::CreateClientList(w->fbb(), 0); });
  add_message(&lists, [](Writer* w) { return wire::CreateUserList(w->fbb(), 0); });
  add_message(&lists, [](Writer* w) { return wire::CreateConfigText(w->fbb(), 0); });
  add_message(&lists, [](Writer* w) {
    return wire::CreateSnapshotList(w->fbb(), KVM_LIST_ALL_CLIENTS, 1, w->fbb().CreateString("a"));
  });
  add_message(&lists, [](Writer* w) { return wire::CreatePrefixTable(w->fbb()); });
  add_message(&lists, [](Writer* w) { return wire::CreatePrefixWeigh(w->fbb(), 5, 128, 1000.0); });
  return {{"memory", memory},
          {"spaces", spaces},
          {"facts", facts},
          {"lists", lists},
          {"changes", changes()}};
}

Seeds request_seeds() {
  ipc::ReadBlock read{};
  read.seq = 1;
  read.n_tokens = 4;
  read.k = {.region = 1, .dtype = KVM_DTYPE_F32, .offset = 1024, .size_bytes = 256};
  ipc::ObserveBlock observe{};
  observe.seq = 1;
  observe.n_columns = 4;
  observe.column_sums = {.region = 1, .dtype = KVM_DTYPE_F32, .offset = 1024, .size_bytes = 64};
  ipc::SeqBlock seq{};
  seq.verb = 2;
  seq.seq = 1;
  seq.n_tokens = KVM_POSITION_END;
  struct {
    ipc::SeqBlock block{.verb = static_cast<uint32_t>(SeqVerb::kPublish), .seq = 1};
    kvm_prefix_hash hashes[2] = {};
  } prefix;
  const ipc::SeqBlock priority{.verb = static_cast<uint32_t>(SeqVerb::kSetPriority),
                               .seq = 1,
                               .begin = 64,
                               .end = 128,
                               .keep_ns = 1000,
                               .priority = 90};
  ipc::SnapshotBlock snapshot{};
  snapshot.verb = 1;
  snapshot.seq = 1;
  snapshot.name_bytes = 1;
  snapshot.name[0] = 's';
  Bytes nop;
  ipc::RequestEntry nop_entry{};
  nop_entry.opcode = static_cast<uint8_t>(ipc::Opcode::kNop);
  nop_entry.version = ipc::kBlockVersion;
  put(&nop, nop_entry);
  return {{"step", step_request()},
          {"read", request(ipc::Opcode::kRead, read)},
          {"observe", request(ipc::Opcode::kObserve, observe)},
          {"seq", request(ipc::Opcode::kSeq, seq)},
          {"prefix", request(ipc::Opcode::kSeq, prefix)},
          {"priority", request(ipc::Opcode::kSeq, priority)},
          {"snapshot", request(ipc::Opcode::kSnapshot, snapshot)},
          {"cancel", request(ipc::Opcode::kCancel, ipc::CancelBlock{.user_data = 3})},
          {"nop", nop}};
}

Seeds items_seeds() {
  ItemsHead both{};
  both.verbs = 3;
  ItemsHead attend{};
  attend.verbs = 2;
  kvm_item item{};
  item.append_position = KVM_POSITION_END;
  item.query_position = KVM_POSITION_END;
  item.n_query = 3;
  kvm_item appending = item;
  appending.n_append = 3;
  kvm_item other = appending;
  other.seq = 1;
  other.append_row = 3;
  other.query_row = 3;
  kvm_item ranged = item;
  ranged.n_ranges = 2;
  ranged.flags = KVM_ITEM_EXCLUDE_RANGES;
  kvm_item tree = item;
  tree.flags = KVM_ITEM_TREE;
  kvm_item open = item;
  open.flags = KVM_ITEM_NOT_CAUSAL;
  open.query_position = 5;
  return {{"two_steps", items(both, {appending, other})},
          {"ranges", items(attend, {ranged}, {{2, 5}, {9, 30}})},
          {"tree", items(attend, {tree}, {}, {1, 3, 5})},
          {"not_causal", items(attend, {open})}};
}

Seeds config_seeds() {
  std::string all;
  for (const daemon::OptionRow& row : daemon::option_rows()) {
    const bool is_text = std::holds_alternative<daemon::TextField>(row.field);
    if (!is_text || !row.default_text.empty()) {
      all += row.name + " = \"" + row.default_text + "\"\n";
    }
  }
  return {{"all", bytes_of(all)},
          {"some", bytes_of("# a comment\nsocket = \"/run/kvm/kvmd.sock\"\nthreads = 4\n"
                            "pin_threads = true\nhost_capacity = \"50%\"\n")},
          {"strange", bytes_of("a.b = [1, 2]\n[table]\nthreads = 1e3\nwhen = 1979-05-27\n")}};
}

Seeds stats_text_seeds() {
  AuditStats audits;
  audits.every = 16;
  for (AuditedMode& mode : audits.modes) {
    mode.n_answers = 40;
    mode.n_barred = 30;
    mode.n_over = 1;
    mode.allowed_over = 0.4;
    mode.true_error.add(0.004);
    mode.true_error.add(3);
    mode.estimated_error.add(0.02);
  }
  StatsText text;
  write_stats({}, &text);
  write_audit(audits, &text);
  StatsText off;
  write_audit({}, &off);
  return {{"audits", bytes_of(text.take())}, {"no_audits", bytes_of(off.take())}};
}

Seeds policy_seeds() {
  SpaceSpec streaming = space();
  streaming.params.rope_layout = KVM_ROPE_HALF;
  streaming.rope_inv_freq.assign(32, 0.1f);
  streaming.policies.push_back({.retention = KVM_RETAIN_SINKS_RECENT,
                                .positions = KVM_POSITIONS_IN_CACHE,
                                .n_sinks = 4,
                                .n_recent = 100});
  SpaceSpec mixed = space();
  mixed.policies.push_back({.layer_begin = 1,
                            .n_layers = 2,
                            .kv_head_mask = {1, 0},
                            .retention = KVM_RETAIN_HEAVY,
                            .n_sinks = 2,
                            .n_recent = 64,
                            .slack = 16,
                            .n_heavy = 32});
  mixed.policies.push_back({.layer_begin = 3,
                            .retention = KVM_RETAIN_SINKS_RECENT_FOLD,
                            .n_sinks = 4,
                            .n_recent = 1000});
  mixed.layers.push_back({.layer_begin = 2, .n_layers = 1, .kind = KVM_LAYER_ALIAS, .target = 0});
  mixed.codecs.push_back({.layer_begin = 3, .codec_k = KVM_CODEC_I8, .codec_v = KVM_CODEC_F8E4M3});
  SpaceSpec demoting = space();
  demoting.policies.push_back(
      {.retention = KVM_RETAIN_HEAVY, .n_recent = 64, .n_heavy = 32, .merge = KVM_MERGE_DEMOTED});
  demoting.codecs.push_back({.codec_k = KVM_CODEC_I4,
                             .codec_v = KVM_CODEC_BF16,
                             .demoted_k = KVM_CODEC_I2_BALANCED,
                             .demoted_v = KVM_CODEC_I2});
  SpaceSpec pairing = space();
  pairing.layers.push_back({.layer_begin = 1, .n_layers = 1, .kind = KVM_LAYER_PAIR});
  pairing.layers.push_back({.layer_begin = 3,
                            .n_layers = 1,
                            .kind = KVM_LAYER_PAIR,
                            .pair_t = 0.5f,
                            .pair_gamma = 0.9f});
  SpaceSpec indexed = space();
  indexed.indexes.push_back({.kind = KVM_INDEX_SKETCH, .min_tokens = 512});
  indexed.indexes.push_back(
      {.layer_begin = 2, .kind = KVM_INDEX_LSH, .lsh_bits = 8, .lsh_tables = 20});
  indexed.sink_logits.assign(32, 0.5f);
  return {{"streaming", policy(streaming)}, {"mixed", policy(mixed)},
          {"demoting", policy(demoting)},   {"pairing", policy(pairing)},
          {"indexed", policy(indexed)},     {"plain", policy(space())}};
}

}  // namespace kvm::testing
