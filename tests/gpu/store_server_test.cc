// SPDX-License-Identifier: Apache-2.0
// A StoreServer and clients that say what no RemoteStore says: each is ended, nobody crashes or
// hangs, and everything is given back. KVM_NIGHTLY=1 takes more of them.
#include "device/store_server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/splitmix.h"
#include "device/client_driver.h"
#include "device/store_wire.h"
#include "ipc/frame_channel.h"
#include "tests/gpu/fake_driver.h"

namespace kvm::device {
namespace {

using testing::FakeDriver;
using testing::FakeOptions;
using wire::Call;
using wire::CallKind;
using wire::FrameKind;
using wire::Note;
using wire::NoteKind;
using wire::Verdict;

constexpr uint64_t kPatienceNs = 60'000'000'000;
constexpr uint64_t kPoolBytes = 4 << 20;

// A server in a thread, and a client that does what it is ordered: nothing, and says that it did.
class Session {
 public:
  explicit Session(Budget* shared = nullptr) : budget_(shared == nullptr ? &own_ : shared) {
    FakeOptions options;
    options.runs_by_itself = true;
    driver_ = std::make_unique<FakeDriver>(options);
    auto ends = ipc::FrameChannel::make_pair().value();
    auto words =
        ipc::create_shared_memory("words", sizeof(wire::Words), ipc::PeerAccess::kReadWrite)
            .value();
    server_ = std::make_unique<StoreServer>(driver_.get(), budget_, std::move(ends.first),
                                            std::move(words.mapping));
    channel_ = std::make_unique<ipc::FrameChannel>(std::move(ends.second));
    thread_ = std::thread([this] { why_ = server_->serve({kPoolBytes, 4 << 20}); });
    EXPECT_TRUE(channel_->receive(kPatienceNs, &frame_).is_ok());
    EXPECT_EQ(frame_.kind, static_cast<uint32_t>(FrameKind::kReady));
  }
  ~Session() {
    (void)end();
    EXPECT_EQ(own_.used(), 0u);
    EXPECT_EQ(driver_->leftovers(), "");
    EXPECT_EQ(driver_->complaints(), "");
  }

  // Sends bytes as a call; the status of the reply, or DISCONNECTED where there is none.
  kvm_status send(std::span<const uint8_t> bytes, FrameKind kind = FrameKind::kCall) {
    if (!channel_->send(static_cast<uint32_t>(kind), bytes).is_ok()) {
      return KVM_ERR_DISCONNECTED;
    }
    for (;;) {
      const Status got = channel_->receive(kPatienceNs, &frame_);
      if (!got.is_ok()) {
        return got.code();
      }
      if (frame_.kind == static_cast<uint32_t>(FrameKind::kReply)) {
        return static_cast<kvm_status>(ipc::FrameReader(frame_.bytes).get<int32_t>());
      }
      ipc::FrameWriter done;
      done.put(answer_to_orders);
      done.put_text("");
      if (!channel_->send(static_cast<uint32_t>(FrameKind::kDone), done.bytes()).is_ok()) {
        return KVM_ERR_DISCONNECTED;
      }
    }
  }
  using Put = std::function<void(ipc::FrameWriter*)>;
  static std::vector<uint8_t> call_bytes(Verdict verdict, const std::vector<Note>& notes,
                                         const Call& call, const Put& put = nullptr) {
    ipc::FrameWriter writer;
    writer.put(verdict);
    writer.put_all(std::span<const Note>(notes));
    writer.put(call);
    if (put != nullptr) {
      put(&writer);
    }
    return {writer.bytes().begin(), writer.bytes().end()};
  }
  kvm_status call(Verdict verdict, const std::vector<Note>& notes, const Call& call,
                  const Put& put = nullptr) {
    return send(call_bytes(verdict, notes, call, put));
  }
  // Ends the session; why the server had ended.
  Status end() {
    if (thread_.joinable()) {
      channel_->shut_down();
      thread_.join();
      server_.reset();
    }
    return why_;
  }

  int32_t answer_to_orders = KVM_OK;

 private:
  std::unique_ptr<FakeDriver> driver_;
  Budget own_{kPoolBytes};
  Budget* const budget_;
  std::unique_ptr<StoreServer> server_;
  std::unique_ptr<ipc::FrameChannel> channel_;
  ipc::Frame frame_;
  std::thread thread_;
  Status why_;
};

void put_layout(ipc::FrameWriter* writer, uint32_t n_heads = 2, uint64_t n_recent = 0) {
  writer->put(wire::Layout{static_cast<uint32_t>(KVM_CODEC_BF16), 64, 64, 0});
  const std::vector<wire::List> lists = {{n_heads, 2, 3, n_recent, 0}, {1, 1, 0, 0, 0}};
  writer->put_all(std::span<const wire::List>(lists));
}

Session::Put grow_of(std::vector<wire::Grow> items) {
  return [items = std::move(items)](ipc::FrameWriter* writer) {
    writer->put_all(std::span<const wire::Grow>(items));
  };
}

Call call_of(CallKind kind, uint64_t id = 0, uint64_t end = UINT64_MAX, uint64_t marker = 0) {
  Call call;
  call.kind = kind;
  call.id = id;
  call.end = end;
  call.marker = marker;
  return call;
}

// The calls of a client that keeps the rules: of spaces 1, sequences 1 to 3.
std::vector<std::vector<uint8_t>> good_calls() {
  const Note first{NoteKind::kCreate, 0, 1, 1, 0}, second{NoteKind::kCreate, 0, 2, 1, 0};
  return {
      Session::call_bytes(Verdict::kNone, {}, call_of(CallKind::kPrepare, 1),
                          [](ipc::FrameWriter* writer) { put_layout(writer, 2, 70); }),
      Session::call_bytes(Verdict::kNone, {first, second}, call_of(CallKind::kGrow),
                          grow_of({{1, 300, 1}, {2, 70, 0}})),
      Session::call_bytes(Verdict::kFinish, {{NoteKind::kFork, 0, 3, 1, 290}},
                          call_of(CallKind::kGrow), grow_of({{3, 5, 2}})),
      Session::call_bytes(Verdict::kUndo, {{NoteKind::kTruncate, 0, 3, 0, 280}},
                          call_of(CallKind::kUsage, 3)),
      Session::call_bytes(Verdict::kNone, {{NoteKind::kExtend, 0, 2, 0, 128}},
                          call_of(CallKind::kSpill, 2)),
      Session::call_bytes(Verdict::kNone, {}, call_of(CallKind::kResidence, 2)),
      Session::call_bytes(Verdict::kNone, {}, call_of(CallKind::kFetch, 2)),
      Session::call_bytes(Verdict::kNone, {}, call_of(CallKind::kSettle, 2)),
      Session::call_bytes(Verdict::kNone, {}, call_of(CallKind::kIsMoving),
                          [](ipc::FrameWriter* writer) {
                            const std::vector<uint64_t> ids = {1, 2, 77};
                            writer->put_all(std::span<const uint64_t>(ids));
                          }),
      Session::call_bytes(Verdict::kNone, {{NoteKind::kClear, 0, 1, 0, 0}},
                          call_of(CallKind::kFinishMoves)),
      Session::call_bytes(Verdict::kNone, {}, call_of(CallKind::kFigures)),
      Session::call_bytes(Verdict::kNone,
                          {{NoteKind::kClear, 0, 2, 0, 0},
                           {NoteKind::kClear, 0, 3, 0, 0},
                           {NoteKind::kDropSpace, 0, 1, 0, 0}},
                          call_of(CallKind::kFlush)),
  };
}

TEST(StoreServer, ServesWhoKeepsTheRules) {
  Session session;
  for (const std::vector<uint8_t>& bytes : good_calls()) {
    ASSERT_EQ(session.send(bytes), KVM_OK);
  }
  EXPECT_EQ(session.end().code(), KVM_ERR_DISCONNECTED);
}

// A window of one token leaves no page where a cut ends with one: there is none to ask who shares
// it.
TEST(StoreServer, ExtendsByNothingWhereTheLastPageIsDropped) {
  Session session;
  ASSERT_EQ(session.call(Verdict::kNone, {}, call_of(CallKind::kPrepare, 1),
                         [](ipc::FrameWriter* writer) { put_layout(writer, 2, 1); }),
            KVM_OK);
  ASSERT_EQ(session.call(Verdict::kNone, {{NoteKind::kCreate, 0, 1, 1, 0}},
                         call_of(CallKind::kGrow), grow_of({{1, 128, 1}})),
            KVM_OK);
  ASSERT_EQ(session.call(Verdict::kFinish, {}, call_of(CallKind::kGrow), grow_of({{1, 1, 1}})),
            KVM_OK);
  ASSERT_EQ(session.call(Verdict::kFinish,
                         {{NoteKind::kTruncate, 0, 1, 0, 128}, {NoteKind::kExtend, 0, 1, 0, 128}},
                         call_of(CallKind::kGrow), grow_of({{1, 1, 1}})),
            KVM_OK);
  EXPECT_EQ(session.call(Verdict::kFinish, {}, call_of(CallKind::kFlush)), KVM_OK);
}

TEST(StoreServer, EndsWhoBreaksThem) {
  struct Case {
    const char* name;
    std::function<kvm_status(Session*)> send;
  };
  const auto prepared = [](Session* session) {
    EXPECT_EQ(session->send(good_calls()[0]), KVM_OK);
    EXPECT_EQ(session->send(good_calls()[1]), KVM_OK);  // a growth waits for its verdict
  };
  const auto with_notes = [&](std::vector<Note> notes) {
    return [&prepared, notes = std::move(notes)](Session* session) {
      prepared(session);
      return session->call(Verdict::kFinish, notes, call_of(CallKind::kFlush));
    };
  };
  const auto growing = [&](std::vector<wire::Grow> items) {
    return [&prepared, items = std::move(items)](Session* session) {
      prepared(session);
      return session->call(Verdict::kFinish, {}, call_of(CallKind::kGrow), grow_of(items));
    };
  };
  const auto asking = [&](const Call& call) {
    return [&prepared, call](Session* session) {
      prepared(session);
      return session->call(Verdict::kFinish, {}, call);
    };
  };
  const auto preparing = [](wire::Layout layout, std::vector<wire::List> lists) {
    return [layout, lists = std::move(lists)](Session* session) {
      return session->call(Verdict::kNone, {}, call_of(CallKind::kPrepare, 1),
                           [&](ipc::FrameWriter* writer) {
                             writer->put(layout);
                             writer->put_all(std::span<const wire::List>(lists));
                           });
    };
  };
  const uint32_t bf16 = KVM_CODEC_BF16;
  const Case cases[] = {
      {"nothing", [](Session* session) { return session->send({}); }},
      {"a frame of another kind",
       [](Session* session) { return session->send(good_calls()[0], FrameKind::kReply); }},
      {"more bytes than a call has",
       [](Session* session) {
         return session->send(std::vector<uint8_t>(wire::kMaxCallBytes + 1));
       }},
      {"a verdict on no growth",
       [](Session* session) {
         return session->call(Verdict::kFinish, {}, call_of(CallKind::kFlush));
       }},
      {"no verdict on one",
       [&](Session* session) {
         prepared(session);
         return session->call(Verdict::kNone, {}, call_of(CallKind::kFlush));
       }},
      {"a verdict that is none",
       [&](Session* session) {
         prepared(session);
         return session->call(static_cast<Verdict>(3), {}, call_of(CallKind::kFlush));
       }},
      {"a sequence of no space", with_notes({{NoteKind::kCreate, 0, 9, 5, 0}})},
      {"a sequence twice", with_notes({{NoteKind::kCreate, 0, 1, 1, 0}})},
      {"a fork of nobody", with_notes({{NoteKind::kFork, 0, 9, 7, 0}})},
      {"a fork of more than there is", with_notes({{NoteKind::kFork, 0, 9, 1, 301}})},
      {"a fork of nearly 2^64", with_notes({{NoteKind::kFork, 0, 9, 1, UINT64_MAX - 3}})},
      {"a fork of what a policy has dropped",
       [&](Session* session) {
         prepared(session);
         EXPECT_EQ(
             session->call(Verdict::kFinish, {}, call_of(CallKind::kGrow), grow_of({{1, 1, 1}})),
             KVM_OK);  // drops what the tokens before it do not need
         return session->call(Verdict::kFinish, {{NoteKind::kFork, 0, 9, 1, 100}},
                              call_of(CallKind::kFlush));
       }},
      {"tokens of nobody", with_notes({{NoteKind::kExtend, 0, 9, 0, 0}})},
      {"tokens without a page", with_notes({{NoteKind::kExtend, 0, 1, 0, 321}})},
      {"nearly 2^64 tokens", with_notes({{NoteKind::kExtend, 0, 1, 0, UINT64_MAX - 3}})},
      {"nearly 2^64 tokens where there are none",
       with_notes({{NoteKind::kCreate, 0, 9, 1, 0}, {NoteKind::kExtend, 0, 9, 0, UINT64_MAX - 3}})},
      {"fewer tokens than it has", with_notes({{NoteKind::kExtend, 0, 1, 0, 299}})},
      {"tokens in a page that is shared",
       with_notes({{NoteKind::kFork, 0, 9, 1, 300}, {NoteKind::kExtend, 0, 1, 0, 301}})},
      {"tokens of one on the host",
       [&](Session* session) {
         prepared(session);
         EXPECT_EQ(session->call(Verdict::kFinish, {}, call_of(CallKind::kSpill, 2)), KVM_OK);
         return session->call(Verdict::kNone, {{NoteKind::kExtend, 0, 2, 0, 71}},
                              call_of(CallKind::kFlush));
       }},
      {"a cut of nobody", with_notes({{NoteKind::kTruncate, 0, 9, 0, 0}})},
      {"the end of nobody", with_notes({{NoteKind::kClear, 0, 9, 0, 0}})},
      {"the end of a space twice",
       with_notes({{NoteKind::kDropSpace, 0, 1, 0, 0}, {NoteKind::kDropSpace, 0, 1, 0, 0}})},
      {"a note of no kind", with_notes({{static_cast<NoteKind>(17), 0, 1, 0, 0}})},
      {"growth of nobody", growing({{9, 1, 1}})},
      {"growth of one twice", growing({{1, 1, 1}, {2, 1, 1}, {1, 1, 1}})},
      {"growth beyond a list", growing({{1, UINT32_MAX, 1}})},
      {"growth with more unsure tokens than may be", growing({{1, 1, 1, 5, 4}})},
      {"growth with more unsure tokens than there are", growing({{1, 1, 1, 1000, 1000}})},
      {"a spill of nobody", asking(call_of(CallKind::kSpill, 9))},
      {"a marker beyond the poison",
       asking(call_of(CallKind::kSpill, 1, UINT64_MAX, wire::kPoison + 1))},
      {"a question of nobody", asking(call_of(CallKind::kUsage, 9))},
      {"a call of no kind", asking(call_of(static_cast<CallKind>(99), 1))},
      {"a layout without lists", preparing({bf16, 64, 64, 0}, {})},
      {"a list without heads", preparing({bf16, 64, 64, 0}, {{0, 1, 0, 0, 0}})},
      {"a list without layers", preparing({bf16, 64, 64, 0}, {{1, 0, 0, 0, 0}})},
      {"a list of many heads", preparing({bf16, 64, 64, 0}, {{1u << 20, 1, 0, 0, 0}})},
      {"sinks of nearly 2^64", preparing({bf16, 64, 64, 0}, {{1, 1, UINT64_MAX - 5, 0, 0}})},
      {"a codec that is none", preparing({12345, 64, 64, 0}, {{1, 1, 0, 0, 0}})},
      {"a codec of no device", preparing({KVM_CODEC_F32, 64, 64, 0}, {{1, 1, 0, 0, 0}})},
      {"a dim of no kernel", preparing({bf16, 65, 65, 0}, {{1, 1, 0, 0, 0}})},
      {"values of another dim", preparing({bf16, 128, 64, 0}, {{1, 1, 0, 0, 0}})},
      {"latent rows of bytes", preparing({KVM_CODEC_I8, 576, 512, 1}, {{1, 1, 0, 0, 0}})},
      {"latent rows of 4 bits", preparing({KVM_CODEC_I4, 576, 512, 1}, {{1, 1, 0, 0, 0}})},
      {"latent rows whose values are stored", preparing({bf16, 576, 512, 0}, {{1, 1, 0, 0, 0}})},
      {"latent rows of another dim", preparing({bf16, 576, 576, 1}, {{1, 1, 0, 0, 0}})},
      {"values in keys that are not latent", preparing({bf16, 64, 64, 1}, {{1, 1, 0, 0, 0}})},
  };
  for (const Case& of : cases) {
    SCOPED_TRACE(of.name);
    Session session;
    EXPECT_EQ(of.send(&session), KVM_ERR_DISCONNECTED);
    EXPECT_EQ(session.end().code(), KVM_ERR_PROTOCOL);
  }
}

TEST(StoreServer, RefusesWhatIsTooMuchAndGoesOn) {
  Session session;
  ASSERT_EQ(session.send(good_calls()[0]), KVM_OK);
  const Note create{NoteKind::kCreate, 0, 1, 1, 0};
  EXPECT_EQ(
      session.call(Verdict::kNone, {create}, call_of(CallKind::kGrow), grow_of({{1, 1u << 30, 1}})),
      KVM_ERR_NO_SPACE);
  std::vector<wire::Grow> many;
  std::vector<Note> creates;
  for (uint64_t id = 2; id <= 4; ++id) {
    creates.push_back({NoteKind::kCreate, 0, id, 1, 0});
    many.push_back({id, 1u << 30, 0});
  }
  EXPECT_EQ(session.call(Verdict::kNone, creates, call_of(CallKind::kGrow), grow_of(many)),
            KVM_ERR_LIMIT);
  EXPECT_EQ(session.call(Verdict::kNone, {}, call_of(CallKind::kGrow), grow_of({{1, 10, 11}})),
            KVM_ERR_INVALID);
  // An order that the client cannot obey: nothing is kept of it.
  session.answer_to_orders = KVM_ERR_NO_SPACE;
  EXPECT_EQ(session.call(Verdict::kNone, {}, call_of(CallKind::kGrow), grow_of({{1, 10, 1}})),
            KVM_ERR_NO_SPACE);
  session.answer_to_orders = KVM_OK;
  EXPECT_EQ(session.call(Verdict::kNone, {}, call_of(CallKind::kGrow), grow_of({{1, 10, 1}})),
            KVM_OK);
  EXPECT_EQ(session.end().code(), KVM_ERR_DISCONNECTED);
}

// Sequences without a token take memory as well.
TEST(StoreServer, CountsListsToo) {
  constexpr uint64_t kMost = wire::kMaxEntries / wire::n_entries(wire::kMaxLists, 0);
  for (const uint64_t n : {kMost, kMost + 1}) {
    Session session;
    ASSERT_EQ(
        session.call(Verdict::kNone, {}, call_of(CallKind::kPrepare, 1),
                     [](ipc::FrameWriter* writer) {
                       writer->put(wire::Layout{static_cast<uint32_t>(KVM_CODEC_BF16), 64, 64, 0});
                       const std::vector<wire::List> lists(wire::kMaxLists, {1, 1, 0, 0, 0});
                       writer->put_all(std::span<const wire::List>(lists));
                     }),
        KVM_OK);
    std::vector<Note> notes;
    for (uint64_t id = 1; id <= n; ++id) {
      notes.push_back({NoteKind::kCreate, 0, id, 1, 0});
    }
    EXPECT_EQ(session.call(Verdict::kNone, notes, call_of(CallKind::kFlush)),
              n <= kMost ? KVM_OK : KVM_ERR_DISCONNECTED);
  }
}

TEST(StoreServer, ClientsGiveWayToEachOther) {
  Budget budget(kPoolBytes);
  {
    Session one(&budget), other(&budget);
    ASSERT_EQ(one.send(good_calls()[0]), KVM_OK);
    ASSERT_EQ(other.send(good_calls()[0]), KVM_OK);
    const Note create{NoteKind::kCreate, 0, 1, 1, 0}, end{NoteKind::kClear, 0, 1, 0, 0};
    const auto grow = [&](Session* session) {
      return session->call(Verdict::kNone, {create}, call_of(CallKind::kGrow),
                           grow_of({{1, 2500, 1}}));
    };
    ASSERT_EQ(grow(&one), KVM_OK);
    EXPECT_GT(budget.used(), kPoolBytes / 2);
    EXPECT_EQ(grow(&other), KVM_ERR_NO_SPACE);
    // It keeps what it uses, and what it does not use until somebody wants it.
    EXPECT_EQ(one.call(Verdict::kFinish, {}, call_of(CallKind::kFlush)), KVM_OK);
    EXPECT_GT(budget.used(), kPoolBytes / 2);
    ASSERT_EQ(other.call(Verdict::kNone, {end}, call_of(CallKind::kFlush)), KVM_OK);
    EXPECT_EQ(grow(&other), KVM_ERR_NO_SPACE);
    EXPECT_EQ(one.call(Verdict::kNone, {end}, call_of(CallKind::kFlush)), KVM_OK);
    ASSERT_EQ(other.call(Verdict::kNone, {end}, call_of(CallKind::kFlush)), KVM_OK);
    EXPECT_EQ(grow(&other), KVM_OK);
  }
  EXPECT_EQ(budget.used(), 0u);
}

// Locking the host's memory, or a stream, fails: the client hears why, and nothing is kept.
TEST(StoreServer, SaysWhyItCannotServe) {
  for (const auto& [operation, nth] :
       std::vector<std::pair<testing::Operation, uint64_t>>{{testing::Operation::kRegister, 1},
                                                            {testing::Operation::kRegister, 2},
                                                            {testing::Operation::kStream, 3}}) {
    SCOPED_TRACE(static_cast<int>(operation));
    FakeOptions options;
    options.runs_by_itself = true;
    options.fail_first = {{operation, nth}};
    FakeDriver driver(options);
    Budget budget(kPoolBytes);
    auto ends = ipc::FrameChannel::make_pair().value();
    auto words =
        ipc::create_shared_memory("words", sizeof(wire::Words), ipc::PeerAccess::kReadWrite)
            .value();
    auto server = std::make_unique<StoreServer>(&driver, &budget, std::move(ends.first),
                                                std::move(words.mapping));
    EXPECT_EQ(server->serve({kPoolBytes, 4 << 20}).code(), KVM_ERR_DEVICE);
    server->stop();  // as the session does when its client goes
    server.reset();
    ipc::FrameChannel client(std::move(ends.second));
    ipc::Frame ready;
    ASSERT_TRUE(client.receive(kPatienceNs, &ready).is_ok());
    EXPECT_EQ(ipc::FrameReader(ready.bytes).get<int32_t>(), KVM_ERR_DEVICE);
    EXPECT_EQ(driver.leftovers(), "");
    EXPECT_EQ(driver.complaints(), "");
  }
}

// Any byte of any call may be another one, or be missing.
TEST(StoreServer, SurvivesAnyBytes) {
  const std::vector<std::vector<uint8_t>> calls = good_calls();
  const uint32_t n_lives = std::getenv("KVM_NIGHTLY") != nullptr ? 20'000 : 300;
  uint64_t state = 1;
  const auto below = [&state](uint64_t n) { return splitmix64(++state) % n; };
  uint32_t n_ended = 0;
  for (uint32_t life = 0; life < n_lives; ++life) {
    Session session;
    session.answer_to_orders = below(20) == 0 ? -static_cast<int32_t>(below(60)) : KVM_OK;
    const uint64_t victim = below(calls.size());
    for (size_t i = 0; i < calls.size(); ++i) {
      std::vector<uint8_t> bytes = calls[i];
      for (uint64_t n = i == victim ? 1 + below(3) : 0; n != 0; --n) {
        const uint64_t at = below(bytes.size());
        switch (below(4)) {
          case 0:
            bytes[at] = static_cast<uint8_t>(below(256));
            break;
          case 1:
            bytes[at] ^= static_cast<uint8_t>(1u << below(8));
            break;
          case 2:
            bytes.resize(std::max<uint64_t>(at, 1));
            break;
          default:
            std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                        std::min<uint64_t>(8, bytes.size() - at), uint8_t{0xff});
        }
      }
      if (session.send(bytes) == KVM_ERR_DISCONNECTED) {
        break;
      }
    }
    n_ended += session.end().code() == KVM_ERR_PROTOCOL ? 1 : 0;
  }
  // Most of it is not what a client says.
  EXPECT_GT(n_ended, n_lives / 4);
}

// Streams of the server may wait for words of its own, which the client can write as well.
TEST(ClientDriver, NothingWaitsForWhoHasGone) {
  FakeDriver device;
  Budget budget(kPoolBytes);
  auto ends = ipc::FrameChannel::make_pair().value();
  ipc::FrameChannel channel(std::move(ends.first));
  auto memory =
      ipc::create_shared_memory("words", sizeof(wire::Words), ipc::PeerAccess::kReadWrite).value();
  ASSERT_TRUE(device.register_host(memory.mapping.data(), sizeof(wire::Words)).is_ok());
  auto* const words = reinterpret_cast<wire::Words*>(memory.mapping.data());
  {
    ClientDriver driver(&device, &channel, words, &budget);
    const Stream first = driver.create_stream().value(), second = driver.create_stream().value();
    const Event piece = driver.create_event().value(), call = driver.create_event().value();
    driver.begin_call(1);
    ASSERT_TRUE(driver.record(piece, first).is_ok());
    ASSERT_TRUE(driver.wait(kClientStream, piece).is_ok());
    ASSERT_EQ(driver.commands().size(), 1u);
    ASSERT_TRUE(driver.record(call, kClientStream).is_ok());
    ASSERT_TRUE(device.synchronize_stream(first).is_ok());
    std::atomic_ref<uint64_t>(words->server[0].value).store(0);  // the client does
    ASSERT_TRUE(driver.wait(second, call).is_ok());
    driver.let_go();
    device.settle();  // says when something waits for ever
    driver.destroy_event(piece);
    driver.destroy_event(call);
    driver.destroy_stream(first);
    driver.destroy_stream(second);
  }
  device.unregister_host(memory.mapping.data());
  EXPECT_EQ(device.complaints(), "");
  EXPECT_EQ(device.leftovers(), "");
}

// When a move has failed its pages go to others: nothing may be under way to them, also where the
// driver has failed the mover's next call as well.
TEST(ClientDriver, WaitsForStreamsWhereEventsFail) {
  FakeDriver device;
  Budget budget(kPoolBytes);
  auto ends = ipc::FrameChannel::make_pair().value();
  ipc::FrameChannel channel(std::move(ends.first));
  auto memory =
      ipc::create_shared_memory("words", sizeof(wire::Words), ipc::PeerAccess::kReadWrite).value();
  ASSERT_TRUE(device.register_host(memory.mapping.data(), sizeof(wire::Words)).is_ok());
  auto* const words = reinterpret_cast<wire::Words*>(memory.mapping.data());
  {
    ClientDriver driver(&device, &channel, words, &budget);
    const Stream stream = driver.create_stream().value();
    uint64_t n = 0;
    for (const testing::Operation operation :
         {testing::Operation::kEvent, testing::Operation::kRecord, testing::Operation::kQuery}) {
      ASSERT_TRUE(device.write_word(&words->server[7].value, ++n, stream).is_ok());
      device.fail(operation, 1);
      EXPECT_TRUE(driver.synchronize_stream(stream).is_ok());
      EXPECT_EQ(words->server[7].value, n) << static_cast<int>(operation);
    }
    driver.destroy_stream(stream);
  }
  device.unregister_host(memory.mapping.data());
  EXPECT_EQ(device.complaints(), "");
  EXPECT_EQ(device.leftovers(), "");
}

}  // namespace
}  // namespace kvm::device
