// SPDX-License-Identifier: Apache-2.0
// A RemoteStore, and a kvmd that the test speaks for.
#include "device/remote_store.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
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
  writer->put(static_cast<int32_t>(status));
  writer->put_text(status == KVM_OK ? "" : "as the test wants it");
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
      (void)reader.get<Verdict>();
      (void)reader.get_all<Note>(wire::kMaxNotes);
      const auto call = reader.get<Call>();
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
