// SPDX-License-Identifier: Apache-2.0
// The rings: order, back-pressure, sleeping and waking, hostile indices. The threaded cases run
// under ThreadSanitizer too (label tsan).
#include "ipc/ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "ipc/shared_words.h"

namespace kvm::ipc {
namespace {

struct Queue {
  std::unique_ptr<ClientRegion> client = std::make_unique<ClientRegion>();
  std::unique_ptr<DaemonRegion> daemon = std::make_unique<DaemonRegion>();
};

RequestEntry entry_of(uint64_t number) {
  RequestEntry entry{};
  entry.user_data = number;
  entry.block_offset = number * 3;
  return entry;
}

TEST(RequestRing, IsFullAtItsSizeAndKeepsOrder) {
  Queue q;
  RequestProducer producer(q.client.get(), q.daemon.get());
  RequestConsumer consumer(q.client.get(), q.daemon.get());
  ASSERT_EQ(producer.room().value(), kRequestEntries);
  for (uint32_t i = 0; i < kRequestEntries; ++i) {
    producer.stage(entry_of(i));
  }
  EXPECT_EQ(producer.room().value(), 0u);
  std::vector<RequestEntry> out(kRequestEntries);
  EXPECT_EQ(consumer.take(out.data(), 10).value(), 0u) << "staged is not published";
  EXPECT_FALSE(producer.publish());
  EXPECT_EQ(consumer.take(out.data(), 10).value(), 10u);
  EXPECT_EQ(producer.room().value(), 10u);
  EXPECT_EQ(consumer.take(out.data() + 10, kRequestEntries).value(), kRequestEntries - 10);
  for (uint32_t i = 0; i < kRequestEntries; ++i) {
    EXPECT_EQ(out[i].user_data, i);
  }
}

TEST(RequestRing, DiscardForgetsOnlyWhatWasNotPublished) {
  Queue q;
  RequestProducer producer(q.client.get(), q.daemon.get());
  RequestConsumer consumer(q.client.get(), q.daemon.get());
  producer.stage(entry_of(1));
  producer.publish();
  producer.stage(entry_of(2));
  producer.discard_staged();
  producer.stage(entry_of(3));
  producer.publish();
  RequestEntry out[4];
  ASSERT_EQ(consumer.take(out, 4).value(), 2u);
  EXPECT_EQ(out[0].user_data, 1u);
  EXPECT_EQ(out[1].user_data, 3u);
}

TEST(RequestRing, ImpossibleTailIsAProtocolError) {
  for (const uint32_t tail : {kRequestEntries + 1, UINT32_MAX, 1u << 31}) {
    Queue q;
    RequestConsumer consumer(q.client.get(), q.daemon.get());
    store_release(&q.client->sq_tail, tail);
    RequestEntry out[4];
    EXPECT_EQ(consumer.take(out, 4).status().code(), KVM_ERR_PROTOCOL) << tail;
    EXPECT_FALSE(consumer.prepare_sleep()) << "an impossible index must be looked at";
  }
}

TEST(CompletionRing, ImpossibleHeadIsAProtocolError) {
  for (const uint32_t head : {1u, UINT32_MAX - kCompletionEntries, 1u << 31}) {
    Queue q;
    CompletionProducer producer(q.client.get(), q.daemon.get());
    store_release(&q.client->cq_head, head);
    EXPECT_EQ(producer.room().status().code(), KVM_ERR_PROTOCOL) << head;
  }
}

TEST(CompletionRing, HeadBeyondWhatWasPublishedIsAProtocolError) {
  Queue q;
  CompletionProducer producer(q.client.get(), q.daemon.get());
  producer.stage({});
  producer.publish();
  producer.stage({});
  store_release(&q.client->cq_head, 1);
  EXPECT_TRUE(producer.room().is_ok());
  store_release(&q.client->cq_head, 2);
  EXPECT_EQ(producer.room().status().code(), KVM_ERR_PROTOCOL);
}

TEST(Waking, PublishTellsWhetherTheDaemonSleeps) {
  Queue q;
  RequestProducer producer(q.client.get(), q.daemon.get());
  RequestConsumer consumer(q.client.get(), q.daemon.get());
  ASSERT_TRUE(consumer.prepare_sleep());
  producer.stage(entry_of(1));
  EXPECT_TRUE(producer.publish());
  EXPECT_FALSE(consumer.prepare_sleep()) << "an entry is there";
  RequestEntry out[1];
  ASSERT_EQ(consumer.take(out, 1).value(), 1u);
  producer.stage(entry_of(2));
  EXPECT_FALSE(producer.publish()) << "the daemon is awake";
}

TEST(Waking, EventfdIsAskedFor) {
  Queue q;
  CompletionProducer producer(q.client.get(), q.daemon.get());
  CompletionConsumer consumer(q.client.get(), q.daemon.get());
  EXPECT_FALSE(producer.wants_eventfd());
  EXPECT_FALSE(consumer.request_eventfd());
  EXPECT_TRUE(producer.wants_eventfd());
  producer.stage({});
  EXPECT_TRUE(producer.publish());
  EXPECT_FALSE(producer.publish()) << "nothing new";
  EXPECT_TRUE(consumer.request_eventfd());
}

// A client and a daemon thread echo numbers in batches of random sizes with random pauses; both
// sleep whenever they may. A lost wake-up hangs the test; a lost or doubled entry fails it.
void run_echo(uint64_t n_requests, bool client_sleeps) {
  Queue q;
  std::atomic<uint32_t> rings{0};  // stands for the doorbell
  std::thread daemon([&] {
    RequestConsumer requests(q.client.get(), q.daemon.get());
    CompletionProducer completions(q.client.get(), q.daemon.get());
    uint32_t heard = 0;
    for (uint64_t done = 0; done < n_requests;) {
      const uint32_t room = std::min(completions.room().value(), 32u);
      RequestEntry entries[32];
      const uint32_t n = requests.take(entries, room).value();
      for (uint32_t i = 0; i < n; ++i) {
        ASSERT_EQ(entries[i].user_data, done + i);
        ASSERT_EQ(entries[i].block_offset, (done + i) * 3);
        CompletionEntry completion{};
        completion.user_data = entries[i].user_data;
        completions.stage(completion);
      }
      completions.publish();
      done += n;
      if (n == 0 && requests.prepare_sleep()) {
        while (rings.load(std::memory_order_acquire) == heard) {
          std::this_thread::yield();
        }
        heard = rings.load(std::memory_order_acquire);
        requests.finish_sleep();
      }
    }
  });
  RequestProducer requests(q.client.get(), q.daemon.get());
  CompletionConsumer completions(q.client.get(), q.daemon.get());
  std::mt19937 random(7);
  uint64_t sent = 0;
  for (uint64_t received = 0; received < n_requests;) {
    uint64_t batch = std::min<uint64_t>(random() % 17, n_requests - sent);
    batch = std::min<uint64_t>(batch, kMaxOutstanding - (sent - received));
    batch = std::min<uint64_t>(batch, requests.room().value());
    for (uint64_t i = 0; i < batch; ++i) {
      requests.stage(entry_of(sent++));
    }
    if (batch > 0 && requests.publish()) {
      rings.fetch_add(1, std::memory_order_release);
    }
    CompletionEntry out[8];
    const uint32_t n = completions.take(out, 8).value();
    for (uint32_t i = 0; i < n; ++i) {
      ASSERT_EQ(out[i].user_data, received + i);
    }
    received += n;
    if (n == 0 && sent > received) {
      if (client_sleeps) {
        completions.sleep(10'000'000'000u);
      } else {
        std::this_thread::yield();
      }
    }
  }
  daemon.join();
}

TEST(RingThreads, EchoPolling) { run_echo(1'000'000, false); }
TEST(RingThreads, EchoSleeping) { run_echo(1'000'000, true); }

TEST(CompletionRing, SleepReturnsAtOnceWhenSomethingIsThere) {
  Queue q;
  CompletionProducer producer(q.client.get(), q.daemon.get());
  CompletionConsumer consumer(q.client.get(), q.daemon.get());
  producer.stage({});
  producer.publish();
  consumer.sleep(60'000'000'000u);
  CompletionEntry out[1];
  EXPECT_EQ(consumer.take(out, 1).value(), 1u);
}

}  // namespace
}  // namespace kvm::ipc
