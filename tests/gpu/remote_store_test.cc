// SPDX-License-Identifier: Apache-2.0
// A RemoteStore, and a kvmd that the test speaks for.
#include "device/remote_store.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "device/store_wire.h"
#include "ipc/frame_channel.h"
#include "tests/gpu/fake_driver.h"

namespace kvm::device {
namespace {

using testing::FakeDriver;
using testing::FakeOptions;
using testing::Operation;
using wire::Call;
using wire::CallKind;
using wire::Command;
using wire::FrameKind;
using wire::Note;
using wire::Verdict;

constexpr uint64_t kPatienceNs = 60'000'000'000;

void put_status(kvm_status status, ipc::FrameWriter* writer) {
  writer->put_status(status == KVM_OK ? Status::ok() : Status(status, "as the test wants it"));
}

SpaceLayout layout_of(uint32_t n_lists) {
  SpaceLayout layout;
  layout.dim = 64;
  for (uint32_t i = 0; i < n_lists; ++i) {
    LayerLayout layer;
    layer.storage_layer = i;
    layer.n_q_heads = layer.n_kv_heads = 1;
    // Each keeps something else, so none share a list.
    layer.classes.push_back({{0}, i, i == 0 ? 0u : 1000u, 0, 0, 0});
    layout.layers.push_back(std::move(layer));
  }
  return layout;
}

class RemoteStoreTest : public ::testing::Test {
 protected:
  // What kvmd answers to a call: puts status, answer and commands.
  using Answer = std::function<void(const Call&, ipc::FrameWriter*)>;

  struct Heard {
    Call call;
    Verdict verdict = Verdict::kNone;
    std::vector<Note> notes;
  };
  // What kvmd was told since this was asked last.
  std::vector<Heard> heard() {
    const std::lock_guard lock(heard_mutex_);
    return std::exchange(heard_, {});
  }

  void open(Answer answer, const FakeOptions& options = {}) {
    auto ends = ipc::FrameChannel::make_pair().value();
    auto words =
        ipc::create_shared_memory("words", sizeof(wire::Words), ipc::PeerAccess::kReadWrite)
            .value();
    words_mapping_ =
        ipc::map_shared_memory(words.fd, sizeof(wire::Words), ipc::PeerAccess::kReadWrite).value();
    words_ = reinterpret_cast<wire::Words*>(words_mapping_.data());
    channel_ = std::make_unique<ipc::FrameChannel>(std::move(ends.first));
    kvmd_ = std::thread([this, answer = std::move(answer)] { serve(answer); });
    auto driver = std::make_unique<FakeDriver>(options);
    driver_ = driver.get();
    store_ = RemoteStore::open(std::move(driver), std::move(ends.second), std::move(words.mapping),
                               {kPatienceNs, kPatienceNs, nullptr})
                 .value();
  }
  void end_kvmd() {
    channel_->shut_down();
    if (kvmd_.joinable()) {
      kvmd_.join();
    }
  }
  ~RemoteStoreTest() override {
    store_.reset();
    if (channel_ != nullptr) {
      end_kvmd();
    }
  }

  Status grow(const SequencePtr& seq, uint32_t n_append) {
    const Growth growth{seq.get(), n_append, 1};
    return store_->begin_growth({&growth, 1}, nullptr);
  }

  wire::Words* words_ = nullptr;
  FakeDriver* driver_ = nullptr;
  std::unique_ptr<RemoteStore> store_;

 private:
  void serve(const Answer& answer) {
    ipc::FrameWriter writer;
    put_status(KVM_OK, &writer);
    (void)channel_->send(static_cast<uint32_t>(FrameKind::kReady), writer.bytes());
    ipc::Frame frame;
    while (channel_->receive(UINT64_MAX, &frame).is_ok()) {
      ipc::FrameReader reader(frame.bytes);
      const auto verdict = reader.get<Verdict>();
      const std::vector<Note> notes = reader.get_all<Note>(wire::kMaxNotes);
      const auto call = reader.get<Call>();
      {
        const std::lock_guard lock(heard_mutex_);
        heard_.push_back({call, verdict, notes});
      }
      writer.clear();
      if (call.kind == CallKind::kPrepare) {
        (void)reader.get<wire::Layout>();
        const std::vector<wire::Slab> slabs(reader.get_all<wire::List>(wire::kMaxLists).size());
        put_status(KVM_OK, &writer);
        writer.put_all(std::span<const wire::Slab>(slabs));
        writer.put_all(std::span<const Command>());
      } else {
        answer(call, &writer);
      }
      (void)channel_->send(static_cast<uint32_t>(FrameKind::kReply), writer.bytes());
    }
  }

  std::mutex heard_mutex_;
  std::vector<Heard> heard_;
  std::unique_ptr<ipc::FrameChannel> channel_;
  ipc::Mapping words_mapping_;
  std::thread kvmd_;
};

void answer_with_wait(kvm_status status, ipc::FrameWriter* writer) {
  put_status(status, writer);
  Command wait;
  wait.word = 2;
  wait.value = 7;
  writer->put_all(std::span<const Command>(&wait, 1));
}

// kvmd hands pages out again that it had the stream wait for, and counts them as waited for; a call
// that fails later for want of others must not forget that.
TEST_F(RemoteStoreTest, AStreamStillWaitsForWhatCameWithARefusal) {
  uint32_t n_growths = 0;
  open([&](const Call&, ipc::FrameWriter* writer) {
    if (++n_growths == 1) {
      answer_with_wait(KVM_ERR_NO_SPACE, writer);
      return;
    }
    put_status(KVM_OK, writer);
    const wire::Change change{0, 0, 0, 5};
    writer->put_all(std::span<const wire::Change>(&change, 1));
    writer->put_all(std::span<const Command>());
  });
  const auto space = store_->prepare(layout_of(1)).value();
  const SequencePtr seq = store_->create(space).value();
  EXPECT_EQ(grow(seq, 64).code(), KVM_ERR_NO_SPACE);
  EXPECT_EQ(seq->n_tokens, 0u);
  ASSERT_TRUE(grow(seq, 64).is_ok());
  store_->finish_growth();
  EXPECT_EQ(driver_->counts(Operation::kWord), 1u) << "the stream does not wait for kvmd's copy";
  const Event behind = driver_->create_event().value();
  ASSERT_TRUE(driver_->record(behind, nullptr).is_ok());
  std::atomic_ref<uint64_t>(words_->server[2].value).store(7);
  EXPECT_TRUE(driver_->synchronize(behind).is_ok());
  driver_->destroy_event(behind);
}

// What moves have enqueued on the caller's stream is the store's to wait for.
TEST_F(RemoteStoreTest, EndsBehindItsWordsOnTheStream) {
  open([](const Call&, ipc::FrameWriter* writer) { answer_with_wait(KVM_OK, writer); });
  const auto space = store_->prepare(layout_of(1)).value();
  const SequencePtr seq = store_->create(space).value();
  ASSERT_TRUE(store_->spill(seq.get(), 0, UINT64_MAX, nullptr).is_ok());
  // Behind marker and wait.
  auto* const flag = static_cast<uint64_t*>(
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(flag, MAP_FAILED);
  ASSERT_TRUE(driver_->register_host(flag, 4096).is_ok());
  ASSERT_TRUE(driver_->write_word(flag, 1, nullptr).is_ok());
  end_kvmd();  // the wait's word is never written
  store_.reset();
  EXPECT_EQ(*flag, 1u) << "the words went before the stream had come to them";
  ::munmap(flag, 4096);
}

TEST_F(RemoteStoreTest, SaysWhenKvmdHasEnded) {
  open([](const Call&, ipc::FrameWriter*) {});
  EXPECT_TRUE(store_->state().is_ok());
  end_kvmd();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (store_->state().is_ok() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(store_->state().code(), KVM_ERR_DISCONNECTED);
}

// Answers growths with what the test has prepared.
class Granting {
 public:
  void operator()(const Call& call, ipc::FrameWriter* writer) {
    put_status(KVM_OK, writer);
    if (call.kind == CallKind::kGrow) {
      writer->put_all(std::span<const wire::Change>(changes));
    } else if (call.kind == CallKind::kFigures) {
      writer->put(SequenceStore::Figures());
    }
    writer->put_all(std::span<const Command>());
  }
  std::vector<wire::Change> changes;
};

// A step of sequences whose pages have room says nothing, and what kvmd has to know of it comes
// with what it is told next.
TEST_F(RemoteStoreTest, AsksOnlyForWhatDoesNotFollowFromTheBooks) {
  auto granting = std::make_shared<Granting>();
  open([granting](const Call& call, ipc::FrameWriter* writer) { (*granting)(call, writer); });
  const auto space = store_->prepare(layout_of(1)).value();
  const SequencePtr a = store_->create(space).value(), b = store_->create(space).value();
  const auto step = [&](uint32_t n_a, uint32_t n_b) {
    const Growth growths[] = {{a.get(), n_a, 1}, {b.get(), n_b, 1}};
    ASSERT_TRUE(store_->begin_growth(growths, nullptr).is_ok());
    store_->finish_growth();
  };
  granting->changes = {{0, 0, 0, 5}, {1, 0, 0, 6}};
  step(10, 60);
  (void)heard();
  for (uint32_t i = 0; i < 4; ++i) {
    step(1, 1);
  }
  EXPECT_EQ(heard().size(), 0u);
  EXPECT_EQ(a->n_tokens, 14u);

  // b begins a page: it alone is asked for, and its 64 tokens are told.
  granting->changes = {{0, 0, 1, 7}};
  step(1, 1);
  auto told = heard();
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].verdict, Verdict::kFinish);
  ASSERT_EQ(told[0].notes.size(), 1u);
  EXPECT_EQ(told[0].notes[0].kind, wire::NoteKind::kExtend);
  EXPECT_EQ(told[0].notes[0].n_tokens, 64u);
  EXPECT_EQ(b->lists[0].pages, (std::vector<tiers::PageRef>{6, 7}));

  // Drafts that are taken back are not told; those that kvmd knows of are.
  granting->changes = {};
  step(8, 8);
  ASSERT_TRUE(store_->truncate(a.get(), 18).is_ok());
  ASSERT_TRUE(store_->truncate(b.get(), 65).is_ok());
  EXPECT_TRUE(store_->figures().is_ok());
  told = heard();
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].notes.size(), 0u);
  ASSERT_TRUE(store_->truncate(b.get(), 64).is_ok());
  EXPECT_TRUE(store_->figures().is_ok());
  told = heard();
  ASSERT_EQ(told.size(), 1u);
  ASSERT_EQ(told[0].notes.size(), 1u);
  EXPECT_EQ(told[0].notes[0].kind, wire::NoteKind::kTruncate);

  // Whose last page is shared asks once, for a copy. All of it is told before, as long as it is not
  // shared. And a spill counts tokens.
  const SequencePtr c = store_->fork(*a, 9).value();
  granting->changes = {{0, 0, 0, 8}};
  for (uint32_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(grow(c, 1).is_ok());
    store_->finish_growth();
  }
  told = heard();
  ASSERT_EQ(told.size(), 1u);
  ASSERT_EQ(told[0].notes.size(), 2u);
  EXPECT_EQ(told[0].notes[0].kind, wire::NoteKind::kExtend);
  EXPECT_EQ(told[0].notes[1].kind, wire::NoteKind::kFork);
  ASSERT_TRUE(store_->spill(c.get(), 0, UINT64_MAX, nullptr).is_ok());
  told = heard();
  ASSERT_EQ(told.size(), 1u);
  ASSERT_EQ(told[0].notes.size(), 1u);
  EXPECT_EQ(told[0].notes[0].n_tokens, 12u);
}

// What is undone was never said; what kvmd has done for it, it undoes.
TEST_F(RemoteStoreTest, UndoesWhatItHasNotSaid) {
  auto granting = std::make_shared<Granting>();
  open([granting](const Call& call, ipc::FrameWriter* writer) { (*granting)(call, writer); });
  const auto space = store_->prepare(layout_of(1)).value();
  const SequencePtr a = store_->create(space).value();
  granting->changes = {{0, 0, 0, 5}};
  ASSERT_TRUE(grow(a, 60).is_ok());
  store_->finish_growth();
  granting->changes = {};
  ASSERT_TRUE(grow(a, 2).is_ok());
  store_->undo_growth();
  EXPECT_EQ(a->n_tokens, 60u);
  granting->changes = {{0, 0, 1, 6}};
  ASSERT_TRUE(grow(a, 5).is_ok());
  store_->undo_growth();
  granting->changes = {};
  ASSERT_TRUE(grow(a, 4).is_ok());
  store_->finish_growth();
  EXPECT_TRUE(store_->figures().is_ok());
  const auto told = heard();
  ASSERT_EQ(told.size(), 4u);  // prepare, 60 tokens, 65, figures
  EXPECT_EQ(told[2].verdict, Verdict::kFinish);
  EXPECT_EQ(told[2].notes.size(), 0u);
  EXPECT_EQ(told[3].verdict, Verdict::kUndo);
  EXPECT_EQ(told[3].notes.size(), 0u);
  EXPECT_EQ(a->lists[0].pages, (std::vector<tiers::PageRef>{5}));
}

// A window lets go of pages on both sides at once.
TEST_F(RemoteStoreTest, AsksWhereAPolicyDrops) {
  auto granting = std::make_shared<Granting>();
  open([granting](const Call& call, ipc::FrameWriter* writer) { (*granting)(call, writer); });
  SpaceLayout windows = layout_of(1);
  windows.layers[0].classes[0].n_recent = 70;
  const auto space = store_->prepare(std::move(windows)).value();
  const SequencePtr a = store_->create(space).value();
  granting->changes = {{0, 0, 0, 5}, {0, 0, 1, 6}, {0, 0, 2, 7}};
  ASSERT_TRUE(grow(a, 130).is_ok());
  store_->finish_growth();
  (void)heard();
  granting->changes = {};
  uint64_t n_dropped_at = 0;
  for (uint32_t i = 0; i < 60; ++i) {
    ASSERT_TRUE(grow(a, 1).is_ok());
    store_->finish_growth();
    if (n_dropped_at == 0 && a->lists[0].pages[0] == tiers::kNoPage) {
      n_dropped_at = a->n_tokens;
    }
  }
  // The query at 133 is the first one that does not see the 64th token.
  EXPECT_EQ(n_dropped_at, 134u);
  const auto told = heard();
  ASSERT_EQ(told.size(), 1u);
  ASSERT_EQ(told[0].notes.size(), 1u);
  EXPECT_EQ(told[0].notes[0].n_tokens, 133u);
}

// Notes cannot be refused: what kvmd would end its client for is refused here.
TEST_F(RemoteStoreTest, RefusesWhatKvmdDoesNotKeep) {
  open([](const Call&, ipc::FrameWriter* writer) {
    put_status(KVM_OK, writer);
    writer->put_all(std::span<const Command>());
  });
  const auto space = store_->prepare(layout_of(wire::kMaxLists)).value();
  constexpr uint64_t kMost = wire::kMaxEntries / wire::n_entries(wire::kMaxLists, 0);
  std::vector<SequencePtr> seqs;
  for (uint64_t i = 0; i < kMost; ++i) {
    seqs.push_back(store_->create(space).value());
  }
  EXPECT_EQ(store_->create(space).status().code(), KVM_ERR_LIMIT);
  EXPECT_EQ(store_->fork(*seqs[0], 0).status().code(), KVM_ERR_LIMIT);
  store_->clear(seqs.back().get());
  EXPECT_TRUE(store_->fork(*seqs[0], 0).is_ok());
  EXPECT_EQ(store_->fork(*seqs[0], 0).status().code(), KVM_ERR_LIMIT);
}

}  // namespace
}  // namespace kvm::device
