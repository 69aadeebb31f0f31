// SPDX-License-Identifier: Apache-2.0
// Request validation: a good request of each kind, every reason for a reject, and random damage.
#include "ipc/validate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <set>

#include "ipc/memory.h"

namespace kvm::ipc {
namespace {

constexpr uint64_t kArenaBytes = 1 << 16;

// A client's arena with a valid step in it: 2 items, 2 ranges, 4 tree words.
class Validate : public ::testing::Test {
 protected:
  static constexpr uint64_t kBlock = 64;
  static constexpr uint64_t kResult = 4096;

  void SetUp() override {
    auto memory = create_shared_memory("test", kArenaBytes, PeerAccess::kReadWrite);
    ASSERT_TRUE(memory.is_ok());
    arena_ = memory.value().mapping.data();
    region_ = regions_.add(std::move(memory.value().mapping));
    head_.verbs = kStepAppend | kStepAttend;
    head_.space = 77;
    head_.n_items = 2;
    head_.n_ranges = 2;
    head_.n_tree_words = 4;
    head_.k = tensor(8192, 1024);
    head_.v = tensor(9216, 1024);
    head_.q = tensor(10240, 512);
    head_.o = tensor(12288, 512);
    head_.lse = tensor(16384, 64, KVM_DTYPE_F32);
    items_[0].seq = 5;
    items_[0].n_query = 4;
    items_[0].flags = KVM_ITEM_TREE;
    items_[1].n_ranges = 2;
    entry_.opcode = static_cast<uint8_t>(Opcode::kStep);
    entry_.version = kBlockVersion;
    entry_.region = region_;
    entry_.user_data = 99;
    entry_.block_offset = kBlock;
    entry_.result_region = region_;
    entry_.result_offset = kResult;
    entry_.block_length =
        sizeof(StepBlock) + 2 * sizeof(kvm_item) + 2 * sizeof(kvm_range) + 4 * sizeof(uint64_t);
  }

  TensorRef tensor(uint64_t offset, uint64_t size, uint32_t dtype = KVM_DTYPE_BF16) const {
    return {region_, dtype, offset, size, 0, 0, 0};
  }

  void write_step() {
    uint8_t* to = arena_ + kBlock;
    std::memcpy(to, &head_, sizeof(head_));
    std::memcpy(to + sizeof(head_), items_, sizeof(items_));
  }
  template <typename Block>
  void write_block(Opcode opcode, const Block& block) {
    std::memcpy(arena_ + kBlock, &block, sizeof(block));
    entry_.opcode = static_cast<uint8_t>(opcode);
    entry_.block_length = sizeof(block);
  }
  Reject run() {
    Request request;
    const Reject reject = validate_request(entry_, &regions_, &request);
    reached_.insert(reject);
    return reject;
  }
  Reject run_step() {
    write_step();
    return run();
  }

  // Applies `damage` to a fresh valid request, and validates it.
  void expect(Reject reject, const std::function<void()>& damage) {
    const StepBlock head = head_;
    const RequestEntry entry = entry_;
    kvm_item items[2];
    std::memcpy(items, items_, sizeof(items));
    damage();
    EXPECT_EQ(run_step(), reject) << reject_text(reject);
    head_ = head;
    entry_ = entry;
    std::memcpy(items_, items, sizeof(items));
    EXPECT_EQ(run_step(), Reject::kNone) << "the undamaged request";
  }

  RegionTable regions_;
  uint8_t* arena_ = nullptr;
  uint32_t region_ = 0;
  RequestEntry entry_{};
  StepBlock head_{};
  kvm_item items_[2]{};
  std::set<Reject> reached_;
};

TEST_F(Validate, GoodStep) {
  write_step();
  Request request;
  ASSERT_EQ(validate_request(entry_, &regions_, &request), Reject::kNone);
  EXPECT_EQ(request.user_data, 99u);
  EXPECT_EQ(reinterpret_cast<uint8_t*>(request.result), arena_ + kResult);
  const auto& step = std::get<StepRequest>(request.message);
  EXPECT_TRUE(step.append && step.attend);
  ASSERT_EQ(step.items.size(), 2u);
  EXPECT_EQ(step.items[0].seq, 5u);
  EXPECT_EQ(step.ranges.size(), 2u);
  EXPECT_EQ(step.tree_mask.size(), 4u);
  EXPECT_EQ(step.k.data, arena_ + 8192);
  EXPECT_EQ(step.k.size_bytes, 1024u);
  EXPECT_EQ(step.err.data, nullptr);
}

TEST_F(Validate, RemovedRegionStaysMappedUntilTheRequestIsDone) {
  write_step();
  {
    Request request;
    ASSERT_EQ(validate_request(entry_, &regions_, &request), Reject::kNone);
    ASSERT_TRUE(regions_.remove(region_));
    EXPECT_EQ(regions_.total_bytes(), kArenaBytes);
    *static_cast<uint8_t*>(std::get<StepRequest>(request.message).o.data) = 1;
    EXPECT_EQ(run(), Reject::kUnknownRegion) << "a new request cannot use it";
  }
  EXPECT_EQ(regions_.total_bytes(), 0u);
  EXPECT_FALSE(regions_.remove(region_));
}

TEST_F(Validate, EntryRejects) {
  expect(Reject::kOpcode, [&] { entry_.opcode = 0; });
  expect(Reject::kOpcode, [&] { entry_.opcode = 8; });
  expect(Reject::kVersion, [&] { entry_.version = 2; });
  expect(Reject::kEntryFlags, [&] { entry_.flags = 1; });
  expect(Reject::kEntryReserved, [&] { entry_.reserved[2] = 1; });
  expect(Reject::kUnknownRegion, [&] { entry_.region = region_ + 1; });
  expect(Reject::kUnknownRegion, [&] { entry_.result_region = 0; });
  expect(Reject::kBlockAlignment, [&] { entry_.block_offset = 65; });
  expect(Reject::kBlockBounds, [&] { entry_.block_offset = kArenaBytes; });
  expect(Reject::kBlockBounds, [&] { entry_.block_offset = UINT64_MAX - 63; });
  expect(Reject::kBlockBounds, [&] { entry_.block_length = UINT32_MAX; });
  expect(Reject::kBlockLength, [&] { --entry_.block_length; });
  expect(Reject::kBlockLength, [&] { entry_.block_length = 8; });
  expect(Reject::kResultAlign, [&] { entry_.result_offset = 1; });
  expect(Reject::kResultBounds, [&] { entry_.result_offset = kArenaBytes - 192; });
}

TEST_F(Validate, StepRejects) {
  expect(Reject::kBlockReserved, [&] { head_.reserved[0] = 1; });
  expect(Reject::kVerbs, [&] { head_.verbs = 0; });
  expect(Reject::kVerbs, [&] { head_.verbs = 4; });
  expect(Reject::kBlockFlags, [&] { head_.flags = 1u << 31; });
  expect(Reject::kItemCount, [&] { head_.n_items = 0; });
  expect(Reject::kItemCount, [&] { head_.n_items = kMaxItems + 1; });
  expect(Reject::kBlockLength, [&] { head_.n_items = 3; });
  expect(Reject::kRangeCount, [&] { head_.n_ranges = kMaxRanges + 1; });
  expect(Reject::kTreeCount, [&] { head_.n_tree_words = UINT32_MAX; });
  expect(Reject::kMode, [&] { head_.mode = 6; });
  expect(Reject::kProposal, [&] { head_.proposal = 4; });
  expect(Reject::kNotFinite, [&] { head_.scale = std::nanf(""); });
  expect(Reject::kNotFinite, [&] { head_.eps = std::numeric_limits<float>::infinity(); });
  expect(Reject::kItemFlags, [&] { items_[1].flags = 1u << 31; });
  expect(Reject::kItemReserved, [&] { items_[0].reserved = 1; });
  expect(Reject::kItemRanges, [&] { items_[1].range_begin = 1; });
  expect(Reject::kItemRanges, [&] { items_[1].range_begin = UINT32_MAX; });
  expect(Reject::kItemTree, [&] { items_[0].tree_begin = 1; });
  expect(Reject::kItemTree, [&] { items_[0].n_query = 65; });
  expect(Reject::kItemRows, [&] { items_[1].n_query = kMaxQueryRows + 1; });
}

TEST_F(Validate, TensorRejects) {
  expect(Reject::kTensorAbsent, [&] { head_.err.size_bytes = 4; });
  expect(Reject::kTensorDtype, [&] { head_.k.dtype = 0; });
  expect(Reject::kTensorDtype, [&] { head_.lse.dtype = KVM_DTYPE_BF16; });
  expect(Reject::kUnknownRegion, [&] { head_.q.region = 1234; });
  expect(Reject::kTensorAlign, [&] { head_.q.offset = 10241; });
  expect(Reject::kTensorBounds, [&] { head_.q.size_bytes = 0; });
  expect(Reject::kTensorBounds, [&] { head_.q.size_bytes = kArenaBytes; });
  expect(Reject::kTensorBounds, [&] { head_.q.offset = UINT64_MAX - 511; });
  expect(Reject::kTensorOverlap, [&] { head_.o.offset = head_.q.offset + 256; });
  expect(Reject::kTensorOverlap, [&] { head_.lse.offset = head_.o.offset; });
}

TEST_F(Validate, OtherOpcodes) {
  ReadBlock read{};
  read.seq = 3;
  read.k = tensor(8192, 64);
  write_block(Opcode::kRead, read);
  EXPECT_EQ(run(), Reject::kNone);
  read.v = tensor(8192, 64);
  write_block(Opcode::kRead, read);
  EXPECT_EQ(run(), Reject::kTensorOverlap);
  ObserveBlock observe{};
  observe.column_sums = tensor(8192, 64);
  write_block(Opcode::kObserve, observe);
  EXPECT_EQ(run(), Reject::kTensorDtype) << "column sums are F32";
  SeqBlock seq{};
  seq.verb = static_cast<uint32_t>(kLastSeqVerb) + 1;
  write_block(Opcode::kSeq, seq);
  EXPECT_EQ(run(), Reject::kSeqVerb);
  seq.verb = static_cast<uint32_t>(SeqVerb::kFree);
  write_block(Opcode::kSeq, seq);
  EXPECT_EQ(run(), Reject::kNone);
  seq.flags = KVM_SEQ_MANUAL_COMMIT;
  write_block(Opcode::kSeq, seq);
  EXPECT_EQ(run(), Reject::kBlockFlags);
  // A range has priorities, and nothing else has one.
  seq.flags = 0;
  for (uint64_t* field : {&seq.begin, &seq.end, &seq.keep_ns}) {
    *field = 1;
    seq.verb = static_cast<uint32_t>(SeqVerb::kFree);
    write_block(Opcode::kSeq, seq);
    EXPECT_EQ(run(), Reject::kBlockReserved);
    seq.verb = static_cast<uint32_t>(SeqVerb::kSetPriority);
    write_block(Opcode::kSeq, seq);
    EXPECT_EQ(run(), Reject::kNone);
  }
  // Tokens to be dropped are one, without a time.
  seq.verb = static_cast<uint32_t>(SeqVerb::kDrop);
  write_block(Opcode::kSeq, seq);
  EXPECT_EQ(run(), Reject::kBlockReserved);
  seq.keep_ns = 0;
  write_block(Opcode::kSeq, seq);
  EXPECT_EQ(run(), Reject::kNone);
  seq.verb = static_cast<uint32_t>(SeqVerb::kSetPriority);
  seq.reserved[0] = 1;
  write_block(Opcode::kSeq, seq);
  EXPECT_EQ(run(), Reject::kBlockReserved);
  seq = {};
  // Hashes behind a block: of a sequence that is published.
  seq.flags = 0;
  seq.verb = static_cast<uint32_t>(SeqVerb::kPublish);
  const auto run_with_hashes = [&](uint32_t n_bytes) {
    write_block(Opcode::kSeq, seq);
    entry_.block_length += n_bytes;
    return run();
  };
  EXPECT_EQ(run_with_hashes(0), Reject::kNone);
  EXPECT_EQ(run_with_hashes(3 * sizeof(kvm_prefix_hash)), Reject::kNone);
  EXPECT_EQ(run_with_hashes(sizeof(kvm_prefix_hash) - 1), Reject::kBlockLength);
  EXPECT_EQ(run_with_hashes(1), Reject::kBlockLength);
  seq.verb = static_cast<uint32_t>(SeqVerb::kFree);
  EXPECT_EQ(run_with_hashes(sizeof(kvm_prefix_hash)), Reject::kBlockLength);
  SnapshotBlock snapshot{};
  snapshot.verb = static_cast<uint32_t>(SnapshotVerb::kSave);
  snapshot.flags = KVM_SAVE_REPLACE;
  snapshot.name_bytes = 3;
  std::memcpy(snapshot.name, "one", 3);
  write_block(Opcode::kSnapshot, snapshot);
  EXPECT_EQ(run(), Reject::kNone);
  snapshot.verb = static_cast<uint32_t>(SnapshotVerb::kLoad);
  write_block(Opcode::kSnapshot, snapshot);
  EXPECT_EQ(run(), Reject::kBlockFlags) << "only a save has flags";
  snapshot.flags = 0;
  for (const uint32_t verb : {0u, 4u}) {
    snapshot.verb = verb;
    write_block(Opcode::kSnapshot, snapshot);
    EXPECT_EQ(run(), Reject::kSnapshotVerb);
  }
  snapshot.verb = static_cast<uint32_t>(SnapshotVerb::kRemove);
  for (const uint32_t name_bytes : {2u, 128u, UINT32_MAX}) {
    snapshot.name_bytes = name_bytes;
    write_block(Opcode::kSnapshot, snapshot);
    EXPECT_EQ(run(), Reject::kSnapshotName) << name_bytes;
  }
  snapshot.name_bytes = 3;
  snapshot.reserved0 = 1;
  write_block(Opcode::kSnapshot, snapshot);
  EXPECT_EQ(run(), Reject::kBlockReserved);
  write_block(Opcode::kCancel, CancelBlock{});
  EXPECT_EQ(run(), Reject::kNone);
  entry_.block_length = 63;
  EXPECT_EQ(run(), Reject::kBlockLength);
  entry_ = RequestEntry{};
  entry_.opcode = static_cast<uint8_t>(Opcode::kNop);
  entry_.version = kBlockVersion;
  EXPECT_EQ(run(), Reject::kNone);
  entry_.block_length = 64;
  EXPECT_EQ(run(), Reject::kEntryReserved);
}

// Whatever a client writes, what comes out lies inside its regions.
TEST_F(Validate, RandomDamage) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto inside = [&](const TensorView& t) {
    const auto* data = static_cast<const uint8_t*>(t.data);
    return data == nullptr || (data >= arena_ && t.size_bytes <= kArenaBytes &&
                               data + t.size_bytes <= arena_ + kArenaBytes);
  };
  const RequestEntry good = entry_;
  uint32_t n_accepted = 0;
  for (int i = 0; i < 200000; ++i) {
    write_step();
    entry_ = good;
    const uint64_t values[] = {0, 1, random(), uint64_t{1} << (random() % 64), ~uint64_t{0}};
    const uint64_t value = values[random() % 5];
    const size_t n = 1 + random() % 8;
    if (random() % 2 == 0) {
      std::memcpy(arena_ + kBlock + random() % 700, &value, n);
    } else {
      std::memcpy(reinterpret_cast<uint8_t*>(&entry_) + random() % (sizeof(entry_) - 8), &value, n);
    }
    Request request;
    if (validate_request(entry_, &regions_, &request) != Reject::kNone) {
      continue;
    }
    ++n_accepted;
    if (request.result != nullptr) {
      ASSERT_LE(reinterpret_cast<uint8_t*>(request.result + 1), arena_ + kArenaBytes);
    }
    if (const auto* step = std::get_if<StepRequest>(&request.message)) {
      for (const TensorView* t : {&step->k, &step->v, &step->q, &step->o, &step->lse, &step->err}) {
        ASSERT_TRUE(inside(*t));
      }
      ASSERT_LE(step->items.size(), kMaxItems);
    }
  }
  EXPECT_GT(n_accepted, 1000u);
}

TEST(ResultBlock, MessageIsCutAndTerminated) {
  ResultBlock result{};
  write_result(&result, 5, std::string(1000, 'x'));
  EXPECT_EQ(result.seq, 5u);
  EXPECT_EQ(std::strlen(result.message), sizeof(result.message) - 1);
  EXPECT_TRUE(std::string(result.message).ends_with("xxx ..."));
  std::string words;
  for (int i = 0; i < 100; ++i) {
    words += "word" + std::to_string(i) + " ";
  }
  write_result(&result, 5, words);
  const std::string cut = result.message;
  ASSERT_TRUE(cut.ends_with(" ...")) << cut;
  EXPECT_GT(cut.size(), sizeof(result.message) - 16);
  EXPECT_TRUE(words.starts_with(cut.substr(0, cut.size() - 3))) << "a whole word is the last";
  // A sentence that fits is as it was, and no character is cut in two.
  const std::string fits(sizeof(result.message) - 1, 'y');
  write_result(&result, 5, fits);
  EXPECT_EQ(result.message, fits);
  for (const char* const before : {"", "z"}) {
    std::string wide = before;
    for (int i = 0; i < 300; ++i) {
      wide += "\u00e4";
    }
    write_result(&result, 5, wide);
    const std::string begun = result.message;
    EXPECT_EQ((begun.size() - std::strlen(before)) % 2, 0u) << begun;
  }
  write_result(&result, 6, {});
  EXPECT_STREQ(result.message, "");
  write_result(nullptr, 5, "nothing");
}

}  // namespace
}  // namespace kvm::ipc
