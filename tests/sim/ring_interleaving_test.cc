// SPDX-License-Identifier: Apache-2.0
// The rings and their wake-ups in every order of accesses with at most three preemptions, on the
// memory of x86: nothing is lost, nothing is torn, nobody sleeps for ever. The code is ipc/ring.cc
// itself, compiled over simulated words (tests/sim/simulated_words).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ipc/ring.h"
#include "ipc/shared_words.h"
#include "tests/sim/interleaving.h"

namespace kvm::ipc {
namespace {

constexpr uint32_t kClient = 0;

// The two regions of a queue, and both ends of its rings.
class Queue : public sim::Program {
 public:
  void run(uint32_t side) override { side == kClient ? client() : daemon(); }

 protected:
  virtual void client() = 0;
  virtual void daemon() = 0;

  // --- Requests ---

  void send(uint64_t first, uint32_t n) {
    for (uint64_t number = first; number < first + n; ++number) {
      stage_request(number);
    }
    if (sq_.publish()) {
      doorbell_.ring();
    }
  }
  void stage_request(uint64_t number) {
    RequestEntry entry{};
    entry.user_data = number;
    entry.result_offset = number * 64;
    entry.reserved[2] = ~number;
    sq_.stage(entry);
  }
  // What kvmd's dispatcher does: takes what is there, and sleeps when nothing is.
  std::vector<uint64_t> await_requests(uint32_t n_max) {
    for (;;) {
      RequestEntry entries[4];
      const Result<uint32_t> n = taker_.take(entries, std::min(n_max, 4u));
      check(n);
      std::vector<uint64_t> numbers;
      for (uint32_t i = 0; i < n.value(); ++i) {
        check(entries[i].user_data, entries[i].result_offset / 64, ~entries[i].reserved[2]);
        numbers.push_back(entries[i].user_data);
      }
      if (!numbers.empty()) {
        return numbers;
      }
      if (taker_.prepare_sleep()) {
        doorbell_.wait();
        taker_.finish_sleep();
      }
    }
  }
  void expect_requests(uint64_t first, uint32_t n) {
    for (uint64_t next = first; next < first + n;) {
      for (const uint64_t number : await_requests(static_cast<uint32_t>(first + n - next))) {
        if (number != next++) {
          sim::fail("request " + std::to_string(number) + " comes before " +
                    std::to_string(next - 1));
        }
      }
    }
  }

  // --- Completions ---

  void answer(uint64_t first, uint32_t n) {
    for (uint64_t number = first; number < first + n; ++number) {
      CompletionEntry entry{};
      entry.user_data = number;
      entry.service_ns = number * 3;
      cq_.stage(entry);
    }
    if (cq_.publish() && cq_.wants_eventfd()) {
      eventfd_.ring();
    }
  }
  uint32_t take_answers(uint64_t* next) {
    CompletionEntry entries[4];
    const Result<uint32_t> n = reaper_.take(entries, 4);
    check(n);
    for (uint32_t i = 0; i < n.value(); ++i) {
      check(entries[i].user_data, entries[i].service_ns / 3, (*next)++);
    }
    return n.value();
  }
  void expect_answers(uint64_t first, uint32_t n) {
    for (uint64_t next = first; next < first + n;) {
      if (take_answers(&next) == 0) {
        reaper_.sleep(1);
      }
    }
  }
  // As an event loop does it with kvm_queue_eventfd.
  void expect_answers_by_eventfd(uint64_t first, uint32_t n) {
    for (uint64_t next = first; next < first + n;) {
      if (take_answers(&next) == 0 && !reaper_.request_eventfd()) {
        eventfd_.wait();
      }
    }
  }

  static void check(const Result<uint32_t>& n) {
    if (!n.is_ok()) {
      sim::fail(std::string(n.status().message()));
    }
  }
  static void check(uint64_t a, uint64_t b, uint64_t c) {
    if (a != b || a != c) {
      sim::fail("an entry is torn, or of another turn: " + std::to_string(a) + ", " +
                std::to_string(b) + ", " + std::to_string(c));
    }
  }

  std::unique_ptr<ClientRegion> client_ = std::make_unique<ClientRegion>();
  std::unique_ptr<DaemonRegion> daemon_ = std::make_unique<DaemonRegion>();
  RequestProducer sq_{client_.get(), daemon_.get()};
  RequestConsumer taker_{client_.get(), daemon_.get()};
  CompletionProducer cq_{client_.get(), daemon_.get()};
  CompletionConsumer reaper_{client_.get(), daemon_.get()};
  sim::Doorbell doorbell_;
  sim::Doorbell eventfd_;
};

class OneRequest : public Queue {
  void client() override { send(0, 1); }
  void daemon() override { expect_requests(0, 1); }
};

class OneCompletion : public Queue {
  void client() override { expect_answers(0, 1); }
  void daemon() override { answer(0, 1); }
};

class OneCompletionByEventfd : public Queue {
  void client() override { expect_answers_by_eventfd(0, 1); }
  void daemon() override { answer(0, 1); }
};

class Requests : public Queue {
  void client() override {
    send(0, 1);
    send(1, 2);
    send(3, 1);
  }
  void daemon() override { expect_requests(0, 4); }
};

class Completions : public Queue {
  void client() override { expect_answers(0, 4); }
  void daemon() override {
    answer(0, 1);
    answer(1, 2);
    answer(3, 1);
  }
};

class CompletionsByEventfd : public Queue {
  void client() override { expect_answers_by_eventfd(0, 4); }
  void daemon() override {
    answer(0, 1);
    answer(1, 2);
    answer(3, 1);
  }
};

class RoundTrips : public Queue {
  void client() override {
    for (uint64_t i = 0; i < 2; ++i) {
      send(i, 1);
      expect_answers(i, 1);
    }
  }
  void daemon() override {
    for (uint64_t i = 0; i < 2; ++i) {
      expect_requests(i, 1);
      answer(i, 1);
    }
  }
};

// The ring is full: who sends waits for room, spinning, and overwrites nothing that is not copied.
class FullRing : public Queue {
 public:
  FullRing() {
    for (uint64_t number = 0; number < kRequestEntries; ++number) {
      stage_request(number);
    }
    (void)sq_.publish();
  }

 private:
  void client() override {
    for (uint64_t number = kRequestEntries; number < kRequestEntries + 3; ++number) {
      for (;;) {
        const Result<uint32_t> room = sq_.room();
        check(room);
        if (room.value() > 0) {
          break;
        }
        sim::relax();
      }
      send(number, 1);
    }
  }
  void daemon() override {
    expect_requests(0, 2);
    expect_requests(2, 1);
  }
  std::string judge() override {
    for (uint64_t number = 3; number < kRequestEntries + 3; ++number) {
      RequestEntry entry{};
      if (taker_.take(&entry, 1).value() != 1 || entry.user_data != number ||
          entry.reserved[2] != ~number) {
        return "request " + std::to_string(number) + " was overwritten";
      }
    }
    return "";
  }
};

// Wrong on purpose: goes to sleep without the second look.
class SleepsBlindly : public Queue {
  void client() override { send(0, 1); }
  void daemon() override {
    RequestEntry entry;
    while (taker_.take(&entry, 1).value() == 0) {
      taker_.raise_wakeup();
      doorbell_.wait();
      taker_.finish_sleep();
    }
  }
};

// Wrong on purpose: publishes first, and writes the entry then.
class PublishesFirst : public Queue {
  void client() override {
    const uint64_t number = 7;
    store_release(&client_->sq_tail, 1);
    copy_to_shared(&client_->entries[0].user_data, &number, sizeof(number));
    doorbell_.ring();
  }
  void daemon() override {
    RequestEntry entry{};
    while (taker_.take(&entry, 1).value() == 0) {
      doorbell_.wait();
    }
    check(entry.user_data, 7, 7);
  }
};

template <typename Program>
sim::Outcome explore(sim::Limits limits = {}) {
  if (const char* bound = std::getenv("KVM_PREEMPTIONS")) {
    limits.n_preemptions = static_cast<uint32_t>(std::strtoul(bound, nullptr, 10));
  }
  const sim::Outcome outcome = sim::explore([] { return std::make_unique<Program>(); }, limits);
  ::testing::Test::RecordProperty("schedules", std::to_string(outcome.n_schedules));
  std::printf("%llu schedules\n", static_cast<unsigned long long>(outcome.n_schedules));
  return outcome;
}

template <typename Program>
class RingInterleaving : public ::testing::Test {};
using Programs =
    ::testing::Types<Requests, Completions, CompletionsByEventfd, RoundTrips, FullRing>;
TYPED_TEST_SUITE(RingInterleaving, Programs);

TYPED_TEST(RingInterleaving, NothingIsLostInAnyOrder) {
  const sim::Outcome outcome = explore<TypeParam>();
  EXPECT_EQ(outcome.failure, "");
  EXPECT_TRUE(outcome.is_complete);
  EXPECT_GT(outcome.n_schedules, 200u);
}

TEST(RingInterleaving, AWeakerStoreLosesAWakeUp) {
  for (const sim::Outcome& outcome : {explore<OneRequest>({.weakens_stores = true}),
                                      explore<OneCompletion>({.weakens_stores = true}),
                                      explore<OneCompletionByEventfd>({.weakens_stores = true})}) {
    EXPECT_NE(outcome.failure.find("nobody can go on"), std::string::npos) << outcome.failure;
  }
}

TEST(RingInterleaving, ASideThatSleepsBlindlyIsFound) {
  EXPECT_NE(explore<SleepsBlindly>().failure.find("nobody can go on"), std::string::npos);
}

TEST(RingInterleaving, AnEntryThatComesTooLateIsFound) {
  EXPECT_NE(explore<PublishesFirst>().failure.find("torn"), std::string::npos);
}

}  // namespace
}  // namespace kvm::ipc
