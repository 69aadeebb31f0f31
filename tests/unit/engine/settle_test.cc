// SPDX-License-Identifier: Apache-2.0
// Lists whose codec needs whole pages: what is stored, against a model of rows that knows nothing
// of pages but their size, however tokens come, are committed, cut and shared.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "codecs/codec.h"
#include "codecs/convert.h"
#include "tests/unit/engine/policy_testbed.h"
#include "tiers/slab_class.h"

namespace kvm::engine::testing {
namespace {

constexpr uint32_t kHeads = 2;
constexpr uint32_t kQHeads = 4;
constexpr uint32_t kDim = 32;
constexpr uint64_t kNanToken = 70;

// Rows of one head as they should be stored.
class Stored {
 public:
  explicit Stored(CodecId codec) : codec_(codec), tail_(codecs::codec_of(codec).tail) {}

  void append(const Row& values) {
    // What is left of a settled page goes to one of the tail's.
    for (uint64_t t = n_settled_; is_cut_ && t < rows_.size(); ++t) {
      rows_[t] = round_row(tail_, std::move(rows_[t]));
    }
    is_cut_ = false;
    std::vector<float> row(values.begin(), values.end());
    rows_.push_back(round_row(tail_, std::move(row)));
  }
  void settle(uint64_t n_committed) {
    for (; n_settled_ + kPageTokens <= n_committed; n_settled_ += kPageTokens) {
      std::vector<float> page;
      for (uint64_t t = n_settled_; t < n_settled_ + kPageTokens; ++t) {
        page.insert(page.end(), rows_[t].begin(), rows_[t].end());
      }
      const codecs::Codec& codec = codecs::codec_of(codec_);
      std::vector<uint8_t> rows(codec.head_rows_bytes(kDim));
      std::vector<uint16_t> params(codec.head_params_bytes(kDim) / 2);
      const KvPlane plane{rows.data(), params.data(), codec_};
      std::vector<float> scratch(page.size());
      if (!codecs::encode_page_head({page.data(), nullptr, CodecId::kF32}, plane, 0, kDim, nullptr,
                                    scratch.data())) {
        continue;
      }
      codecs::convert_rows(codecs::rows_of(plane, kDim, 0),
                           codecs::writable_rows({page.data(), nullptr, CodecId::kF32}, kDim, 0),
                           kPageTokens, 1, kDim);
      for (uint64_t t = 0; t < kPageTokens; ++t) {
        rows_[n_settled_ + t].assign(page.begin() + static_cast<ptrdiff_t>(t * kDim),
                                     page.begin() + static_cast<ptrdiff_t>((t + 1) * kDim));
      }
    }
  }
  void cut(uint64_t n) {
    is_cut_ = is_cut_ || n < n_settled_;
    rows_.resize(n);
    n_settled_ = std::min(n_settled_, n / kPageTokens * kPageTokens);
  }
  const std::vector<std::vector<float>>& rows() const { return rows_; }

 private:
  CodecId codec_;
  CodecId tail_;
  std::vector<std::vector<float>> rows_;
  uint64_t n_settled_ = 0;
  bool is_cut_ = false;  // inside a settled page, since the last append
};

Row key_of(uint64_t position, uint32_t head) {
  Row row = hashed_row(1, position, head, kDim, 1.0);
  row[5] *= 30;  // a channel that is large in all tokens
  return row;
}
Row value_of(uint64_t position, uint32_t head) { return hashed_row(2, position, head, kDim, 1.0); }
Row query_of(uint64_t position, uint32_t head) { return hashed_row(3, position, head, kDim, 1.0); }

SpaceSpec settled_spec(CodecId codec_k, CodecId codec_v) {
  SpaceSpec spec = make_spec("settled", 1, kQHeads, kHeads, kDim);
  spec.codecs = {
      {.codec_k = static_cast<uint32_t>(codec_k), .codec_v = static_cast<uint32_t>(codec_v)}};
  return spec;
}

// A sequence beside its model.
struct Twin {
  kvm_seq_id seq = 0;
  std::vector<Stored> k, v;  // of each head
  uint64_t n_committed = 0;
};

class World {
 public:
  explicit World(CodecId codec_k = codecs::kI8Channel, CodecId codec_v = codecs::kI8Channel,
                 uint32_t n_threads = 1, uint64_t capacity_bytes = 256 << 20)
      : rig(settled_spec(codec_k, codec_v), key_of, value_of, query_of, capacity_bytes, n_threads),
        codec_k_(codec_k),
        codec_v_(codec_v) {}

  Twin create(uint32_t flags = 0) {
    Twin twin;
    twin.seq = rig.rig.create(rig.space, flags);
    twin.k.assign(kHeads, Stored(codec_k_));
    twin.v.assign(kHeads, Stored(codec_v_));
    return twin;
  }
  void append(Twin* twin, uint32_t n, uint32_t n_query = 0) {
    const uint64_t first = twin->k[0].rows().size();
    rig.step(twin->seq, n, n_query);
    for (uint64_t t = first; t < first + n; ++t) {
      for (uint32_t h = 0; h < kHeads; ++h) {
        twin->k[h].append(key_of(t, h));
        twin->v[h].append(value_of(t, h));
      }
    }
  }
  static void commit(Twin* twin, uint64_t n) {
    twin->n_committed = n;
    for (uint32_t h = 0; h < kHeads; ++h) {
      twin->k[h].settle(n);
      twin->v[h].settle(n);
    }
  }
  // What an append without KVM_SEQ_MANUAL_COMMIT does.
  void append_and_commit(Twin* twin, uint32_t n, uint32_t n_query = 0) {
    append(twin, n, n_query);
    commit(twin, twin->k[0].rows().size());
  }
  void cut(Twin* twin, uint64_t n) {
    ASSERT_TRUE(rig.rig.verb(SeqVerb::kTruncate, twin->seq, n).status.is_ok());
    for (uint32_t h = 0; h < kHeads; ++h) {
      twin->k[h].cut(n);
      twin->v[h].cut(n);
    }
    twin->n_committed = std::min(twin->n_committed, n);
  }

  void expect_stored(const Twin& twin) {
    const uint64_t n = twin.k[0].rows().size();
    ASSERT_TRUE(rig.read(twin.seq, 0, n).is_ok());
    for (uint64_t t = 0; t < n; ++t) {
      for (uint32_t h = 0; h < kHeads; ++h) {
        expect_row(rig.read_k.get_row(0, t, h), twin.k[h].rows()[t], "K", t, h);
        expect_row(rig.read_v.get_row(0, t, h), twin.v[h].rows()[t], "V", t, h);
      }
    }
  }
  // Attention of the last of the tokens over what is stored.
  void expect_attended(const Twin& twin, double most) {
    for (uint32_t q_head = 0; q_head < kQHeads; ++q_head) {
      const uint32_t h = q_head / (kQHeads / kHeads);
      std::vector<Entry> entries;
      for (size_t t = 0; t < twin.k[h].rows().size(); ++t) {
        const std::vector<float>& k = twin.k[h].rows()[t];
        const std::vector<float>& v = twin.v[h].rows()[t];
        entries.push_back({.k = Row(k.begin(), k.end()), .v = Row(v.begin(), v.end())});
      }
      const Answer expected = attention_over(query_of(rig.first_query, q_head), entries,
                                             1 / std::sqrt(static_cast<double>(kDim)));
      EXPECT_LE(rig.error(0, q_head, expected), most) << "q head " << q_head;
    }
  }

  PolicyRig rig;

 private:
  static void expect_row(const std::vector<float>& got, const std::vector<float>& wanted,
                         const char* what, uint64_t token, uint32_t head) {
    ASSERT_EQ(std::memcmp(got.data(), wanted.data(), kDim * sizeof(float)), 0)
        << what << " of token " << token << " of head " << head << ": " << got[5] << " and not "
        << wanted[5];
  }

  CodecId codec_k_;
  CodecId codec_v_;
};

// Appends to a sequence of another space until no extent is left.
void fill_all(Rig* rig, kvm_space_id space, kvm_seq_id seq, Buffer* rows) {
  const auto append = [&] {
    StepRequest request;
    request.space = space;
    request.append = true;
    request.items = {append_item(seq, 64)};
    request.k = request.v = rows->view();
    return rig->run(std::move(request)).status;
  };
  while (append().is_ok()) {
  }
}

const std::pair<CodecId, CodecId> kPairs[] = {
    {codecs::kI8Channel, codecs::kI8Channel}, {codecs::kI8Channel, CodecId::kI8},
    {CodecId::kF32, codecs::kI8Channel},      {codecs::kI4Channel, codecs::kI4},
    {codecs::kGear4Channel, codecs::kGear2},  {codecs::kI2Centred, codecs::kI2},
    {codecs::kI3Channel, codecs::kI3},        {codecs::kI3Centred, codecs::kI3},
    {codecs::kGear3Channel, codecs::kGear3}};

// However tokens are cut into requests, the same bits are stored and the same answers come.
TEST(Settle, RequestsDoNotMatter) {
  for (const auto& [codec_k, codec_v] : kPairs) {
    SCOPED_TRACE(std::string(codecs::codec_of(codec_k).name) + " and " +
                 codecs::codec_of(codec_v).name);
    for (const uint32_t n_threads : {1u, 3u}) {
      World world(codec_k, codec_v, n_threads);
      std::vector<std::byte> first;
      for (const uint32_t each : {1u, 7u, 64u, 200u, 421u}) {
        Twin twin = world.create();
        for (uint32_t n = 0; n < 421; n += each) {
          world.append_and_commit(&twin, std::min(each, 421 - n));
        }
        world.expect_stored(twin);
        world.rig.step(twin.seq, 0, 40);
        first = first.empty() ? world.rig.output_bytes() : first;
        EXPECT_EQ(world.rig.output_bytes(), first) << each << " tokens a request";
        world.rig.step(twin.seq, 0, 1);
        world.expect_attended(twin, 1e-2);
      }
    }
  }
}

TEST(Settle, FullPagesTakeTheBytesOfTheCodec) {
  World world;
  Twin twin = world.create();
  world.append_and_commit(&twin, 640);
  // K and V of 64 tokens: a byte a channel, and a bf16 for each channel.
  EXPECT_EQ(world.rig.bytes(twin.seq), 10 * kHeads * 2 * (64 * kDim + 2 * kDim));
  world.append_and_commit(&twin, 1);
  EXPECT_EQ(world.rig.bytes(twin.seq),
            10 * kHeads * 2 * (64 * kDim + 2 * kDim) + kHeads * 2 * 64 * kDim * 2);
  const RequestResult result = world.rig.step(twin.seq, 0, 1);
  EXPECT_EQ(result.keys_read, kHeads * 641u);
  EXPECT_NEAR(static_cast<double>(result.bytes_read), kHeads * 2.0 * (640 * (kDim + 1) + 2 * kDim),
              300.0);
}

// A step attends to what it appends before that is settled.
TEST(Settle, AStepSeesWhatItAppendsAsTheTailHasIt) {
  World world;
  Twin twin = world.create();
  world.append_and_commit(&twin, 63);
  world.append(&twin, 65, 1);
  world.expect_attended(twin, 2e-3);
  World::commit(&twin, 128);
  world.expect_stored(twin);
}

TEST(Settle, WhatIsNotCommittedStaysAndTheRestOfADraftLosesNothing) {
  World world;
  Twin twin = world.create(KVM_SEQ_MANUAL_COMMIT);
  world.append(&twin, 300);
  world.expect_stored(twin);
  const uint64_t bytes = world.rig.bytes(twin.seq);
  ASSERT_TRUE(world.rig.rig.verb(SeqVerb::kCommit, twin.seq, 150).status.is_ok());
  World::commit(&twin, 150);
  world.expect_stored(twin);
  EXPECT_LT(world.rig.bytes(twin.seq), bytes);
  world.cut(&twin, 200);  // behind the commit point: as it came
  world.append(&twin, 150);
  world.expect_stored(twin);
  ASSERT_TRUE(world.rig.rig.verb(SeqVerb::kCommit, twin.seq, KVM_POSITION_END).status.is_ok());
  World::commit(&twin, 350);
  world.expect_stored(twin);
}

// Cuts inside settled pages, again and again.
TEST(Settle, ACutPageIsReadableAndGrowsAgain) {
  for (const auto& [codec_k, codec_v] :
       {std::pair(codecs::kI8Channel, CodecId::kI8), std::pair(codecs::kI4Centred, codecs::kI2)}) {
    World world(codec_k, codec_v);
    Twin twin = world.create();
    world.append_and_commit(&twin, 400);
    for (const uint64_t cut : {383u, 320u, 129u, 128u, 100u, 65u, 1u, 0u}) {
      world.cut(&twin, cut);
      if (cut != 0) {
        world.expect_stored(twin);
        world.rig.step(twin.seq, 0, 1);
        world.expect_attended(twin, 1e-2);
      }
      world.append_and_commit(&twin, 5);
      world.expect_stored(twin);
      world.append_and_commit(&twin, 200);
      world.expect_stored(twin);
    }
  }
}

TEST(Settle, ForksShareWhatIsSettled) {
  World world;
  Twin parent = world.create();
  world.append_and_commit(&parent, 300);
  const uint64_t bytes = world.rig.bytes(parent.seq);
  Twin child = parent;
  child.seq = world.rig.fork(parent.seq);
  EXPECT_EQ(world.rig.info(child.seq).bytes_shared, bytes);
  Twin shorter = parent;
  shorter.seq = world.rig.fork(parent.seq, 150);
  for (uint32_t h = 0; h < kHeads; ++h) {
    shorter.k[h].cut(150);
    shorter.v[h].cut(150);
  }
  for (Twin* twin : {&child, &shorter, &parent}) {
    world.append_and_commit(twin, 90);
    world.expect_stored(*twin);
  }
  world.expect_stored(child);
  world.expect_stored(shorter);
  for (const Twin* twin : {&parent, &child, &shorter}) {
    ASSERT_TRUE(world.rig.rig.verb(SeqVerb::kFree, twin->seq).status.is_ok());
  }
}

// A fork of what is not committed settles for itself, and changes nothing for the other.
TEST(Settle, ForksOfADraftSettleOneByOne) {
  World world;
  Twin parent = world.create(KVM_SEQ_MANUAL_COMMIT);
  world.append(&parent, 200);
  Twin child = parent;
  child.seq = world.rig.fork(parent.seq);
  ASSERT_TRUE(world.rig.rig.verb(SeqVerb::kCommit, child.seq, 130).status.is_ok());
  World::commit(&child, 130);
  world.expect_stored(child);
  world.expect_stored(parent);
  ASSERT_TRUE(world.rig.rig.verb(SeqVerb::kFree, child.seq).status.is_ok());
  world.expect_stored(parent);
}

// One number that is none: its page stays as it came, in every head; the others do not.
TEST(Settle, APageThatCannotBeEncodedStays) {
  const auto spoiled = [](uint64_t position, uint32_t head) {
    Row row = key_of(position, head);
    if (position == kNanToken && head == 1) {
      row[3] = std::numeric_limits<double>::quiet_NaN();
    }
    return row;
  };
  PolicyRig rig(settled_spec(codecs::kI8Channel, codecs::kI8Channel), spoiled, value_of, query_of);
  rig.step(rig.seq, 100, 0);
  for (int i = 0; i < 30; ++i) {
    rig.step(rig.seq, 10, 0);
  }
  // Pages of 64 tokens: 0 and 2 to 5 settled, 1 and the tail as they came.
  const uint64_t settled = kHeads * 2 * (64 * kDim + 2 * kDim);
  const uint64_t tail = kHeads * 2 * 64 * kDim * 2;
  EXPECT_EQ(rig.bytes(rig.seq), 5 * settled + 2 * tail);
  ASSERT_TRUE(rig.read(rig.seq, 64, 64).is_ok());
  for (uint64_t t = 0; t < 64; ++t) {
    for (uint32_t h = 0; h < kHeads; ++h) {
      for (uint32_t i = 0; i < kDim; ++i) {
        const float wanted = bf16_to_f32(f32_to_bf16(static_cast<float>(spoiled(64 + t, h)[i])));
        const float got = rig.read_k.get(0, t, h, i);
        ASSERT_TRUE(std::isnan(wanted) ? std::isnan(got) : got == wanted);
      }
    }
  }
  // Who sees the token is told, and nobody else: head 0 answers.
  rig.step(rig.seq, 0, 1);
  EXPECT_TRUE(std::isfinite(rig.lse(0, 0)));
  EXPECT_TRUE(std::isnan(rig.lse(0, 3)));
}

// Where there is no room to encode, tokens stay as they came, and a later commit makes up for it.
TEST(Settle, WithoutRoomItWaits) {
  World world(codecs::kI8Channel, codecs::kI8Channel, 1, 3 * tiers::kExtentBytes);
  Twin twin = world.create();
  world.append_and_commit(&twin, 63);  // an extent for pages of the tail
  const kvm_space_id other = world.rig.rig.space(make_spec("other", 1, 8, 8, 128));
  const kvm_seq_id big = world.rig.rig.create(other);
  Buffer rows(Dtype::kBf16, 1, 64, 8, 128);
  fill_all(&world.rig.rig, other, big, &rows);
  world.append(&twin, 200);
  world.expect_stored(twin);
  EXPECT_EQ(world.rig.bytes(twin.seq), 5 * kHeads * 2 * 64 * kDim * 2);
  ASSERT_TRUE(world.rig.rig.verb(SeqVerb::kFree, big).status.is_ok());
  world.append_and_commit(&twin, 57);
  world.expect_stored(twin);
  EXPECT_EQ(world.rig.bytes(twin.seq), 5 * kHeads * 2 * (64 * kDim + 2 * kDim));
}

// What policies do to such lists: sinks and window exactly, folded and chosen tokens near what rows
// of fp32 give.
TEST(Settle, PoliciesReadSettledPages) {
  for (const uint32_t retention :
       {KVM_RETAIN_SINKS_RECENT, KVM_RETAIN_SINKS_RECENT_FOLD, KVM_RETAIN_HEAVY}) {
    SCOPED_TRACE("retention " + std::to_string(retention));
    std::vector<float> outputs[2];
    for (const bool is_settled : {false, true}) {
      SpaceSpec spec = make_spec("policies", 1, kQHeads, kHeads, kDim);
      spec.policies = {{.retention = retention, .n_sinks = 4, .n_recent = 70}};
      spec.policies[0].n_sinks = retention == KVM_RETAIN_HEAVY ? 0 : 4;
      spec.policies[0].n_heavy = retention == KVM_RETAIN_HEAVY ? 40 : 0;
      if (is_settled) {
        spec.codecs = {{.codec_k = KVM_CODEC_I8_CHANNEL, .codec_v = KVM_CODEC_I8_CHANNEL}};
      }
      PolicyRig rig(spec, key_of, value_of, query_of);
      for (int i = 0; i < 20; ++i) {
        rig.step(rig.seq, 30, 2);
      }
      rig.step(rig.seq, 0, 1);
      for (uint32_t head = 0; head < kQHeads; ++head) {
        const std::vector<float> row = rig.output(0, head);
        outputs[is_settled ? 1 : 0].insert(outputs[is_settled ? 1 : 0].end(), row.begin(),
                                           row.end());
      }
    }
    double off = 0;
    double size = 0;
    for (size_t i = 0; i < outputs[0].size(); ++i) {
      off += std::pow(double{outputs[0][i]} - double{outputs[1][i]}, 2);
      size += std::pow(double{outputs[0][i]}, 2);
    }
    EXPECT_LT(std::sqrt(off / size), 0.05);
    EXPECT_GT(off, 0.0);
  }
}

// The error of attention over keys of a codec and values of fp32, as a share of the result. Keys
// have a channel that is large in all tokens; what queries make of it is no larger than of others.
double error_of_keys(uint32_t codec, double large) {
  const RowOf key = [large](uint64_t position, uint32_t head) {
    Row row = hashed_row(1, position, head, kDim, 2.0);
    row[5] = large * (2 + row[5] / 4);
    return row;
  };
  const RowOf query = [large](uint64_t position, uint32_t head) {
    Row row = hashed_row(3, position, head, kDim, 2.0);
    row[5] /= large;
    return row;
  };
  std::vector<float> outputs[2];
  for (const bool is_coded : {false, true}) {
    SpaceSpec spec = make_spec("keys", 1, kQHeads, kHeads, kDim);
    spec.codecs = {{.codec_k = is_coded ? codec : uint32_t{KVM_CODEC_F32}}};
    PolicyRig rig(spec, key, value_of, query);
    rig.step(rig.seq, 640, 0);
    rig.step(rig.seq, 0, 64);
    for (uint32_t row = 0; row < 64; ++row) {
      for (uint32_t head = 0; head < kQHeads; ++head) {
        const std::vector<float> o = rig.output(row, head);
        outputs[is_coded ? 1 : 0].insert(outputs[is_coded ? 1 : 0].end(), o.begin(), o.end());
      }
    }
  }
  double off = 0;
  double size = 0;
  for (size_t i = 0; i < outputs[0].size(); ++i) {
    off += std::pow(double{outputs[0][i]} - double{outputs[1][i]}, 2);
    size += std::pow(double{outputs[0][i]}, 2);
  }
  return std::sqrt(off / size);
}

// KIVI's layout: keys by channel, values by token. docs/storage.md has these figures.
TEST(Settle, FewBitsTakeAQuarterOfTheBytes) {
  World world(codecs::kI4Channel, codecs::kI4);
  Twin twin = world.create();
  world.append_and_commit(&twin, 640);
  // 4 bits a channel; scale and zero of each channel of K, and of each 64 channels of a row of V.
  const uint64_t groups = (kDim + 63) / 64;
  EXPECT_EQ(world.rig.bytes(twin.seq),
            10 * kHeads * (2 * 64 * kDim / 2 + 4 * kDim + 64 * groups * 4));
  world.rig.step(twin.seq, 0, 1);
  world.expect_attended(twin, 1e-2);
}

// docs/storage.md has these figures.
TEST(Settle, LargeChannelsTakeNoBitsFromTheOthers) {
  const double plain_rows = error_of_keys(KVM_CODEC_I8, 1);
  const double plain_channels = error_of_keys(KVM_CODEC_I8_CHANNEL, 1);
  const double rows = error_of_keys(KVM_CODEC_I8, 30);
  const double channels = error_of_keys(KVM_CODEC_I8_CHANNEL, 30);
  RecordProperty("int8", std::to_string(plain_rows) + ", " + std::to_string(rows));
  RecordProperty("int8_channel", std::to_string(plain_channels) + ", " + std::to_string(channels));
  for (const uint32_t codec : {KVM_CODEC_I4_CHANNEL, KVM_CODEC_I2_CHANNEL}) {
    const double plain = error_of_keys(codec, 1);
    const double large = error_of_keys(codec, 30);
    std::printf("%s: %.4f, %.4f with a large channel\n",
                codecs::codec_of(static_cast<CodecId>(codec)).name, plain, large);
    EXPECT_LT(large, 1.2 * plain);
  }
  EXPECT_LT(channels, 1.2 * plain_channels);
  EXPECT_LT(channels, rows / 8);
}

TEST(Settle, AnIndexOverPagesIsRefusedByName) {
  SpaceSpec spec = settled_spec(CodecId::kBf16, codecs::kI8Channel);
  spec.indexes = {make_index()};
  Rig rig;
  const auto space = rig.engine->register_space(spec);
  ASSERT_FALSE(space.is_ok());
  EXPECT_EQ(space.status().code(), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(
      space.status().message(),
      "kv head 0 of layer 0 has index 1 and codec int8_channel, which has no rows that can be "
      "read one by one; codecs with such rows are fp32, fp16, bf16, int8, fp8");
}

// Approximate modes without an index answer exactly.
TEST(Settle, ApproximateModesAnswerExactly) {
  World world;
  Twin twin = world.create();
  world.append_and_commit(&twin, 700);
  for (const uint32_t mode : {KVM_MODE_TOPK, KVM_MODE_SAMPLED, KVM_MODE_VERIFIED, KVM_MODE_AUTO}) {
    Buffer q(Dtype::kF32, 1, 1, kQHeads, kDim);
    for (uint32_t h = 0; h < kQHeads; ++h) {
      for (uint32_t i = 0; i < kDim; ++i) {
        q.set(0, 0, h, i, static_cast<float>(query_of(699, h)[i]));
      }
    }
    Buffer o(Dtype::kF32, 1, 1, kQHeads, kDim);
    StepRequest request;
    request.space = world.rig.space;
    request.attend = true;
    request.mode = mode;
    request.budget = mode == KVM_MODE_TOPK ? 64 : 0;
    request.items = {query_item(twin.seq, 1)};
    request.q = q.view();
    request.o = o.view();
    const RequestResult result = world.rig.rig.run(std::move(request));
    ASSERT_TRUE(result.status.is_ok()) << result.status.message();
    world.rig.step(twin.seq, 0, 1);
    for (uint32_t h = 0; h < kQHeads; ++h) {
      EXPECT_EQ(o.get_row(0, 0, h), world.rig.output(0, h)) << "mode " << mode;
    }
  }
}

}  // namespace
}  // namespace kvm::engine::testing
