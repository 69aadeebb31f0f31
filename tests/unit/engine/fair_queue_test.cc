// SPDX-License-Identifier: Apache-2.0
// Whose request starts next: equal bytes for all who have something ready, whatever its size.
#include "engine/run/fair_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

namespace kvm::engine {
namespace {

constexpr uint64_t kQuantum = FairQueue::kQuantum;

class TurnsTest : public ::testing::Test {
 protected:
  TurnsTest() { fair_queue_.reserve(queues_.size()); }
  ~TurnsTest() override {
    for (FairQueue::Flow& queue : queues_) {
      fair_queue_.clear(&queue);
    }
  }

  Request* push(uint32_t client, uint64_t cost) {
    requests_.push_back(std::make_unique<Request>(nullptr, nullptr));
    Request* request = requests_.back().get();
    request->client = client;
    request->cost = cost;
    fair_queue_.push(&queues_[client], request);
    return request;
  }
  Request* take() {
    return fair_queue_.take([this](const FairQueue::Flow& queue) { return is_free(queue); });
  }
  bool any() const {
    return fair_queue_.any([this](const FairQueue::Flow& queue) { return is_free(queue); });
  }
  bool is_free(const FairQueue::Flow& queue) const { return queue.n_running < max_running_; }

  FairQueue fair_queue_;
  std::array<FairQueue::Flow, 5> queues_;
  std::vector<std::unique_ptr<Request>> requests_;
  uint32_t max_running_ = UINT32_MAX;
};

TEST_F(TurnsTest, WhoIsAloneHasEveryTurnInOrder) {
  EXPECT_EQ(take(), nullptr);
  EXPECT_FALSE(any());
  std::vector<Request*> pushed;
  for (const uint64_t cost : {uint64_t{0}, 100 * kQuantum, uint64_t{1}, kQuantum}) {
    pushed.push_back(push(2, cost));
  }
  EXPECT_TRUE(any());
  for (Request* request : pushed) {
    EXPECT_EQ(take(), request);
  }
  EXPECT_EQ(take(), nullptr);
  EXPECT_FALSE(queues_[2].is_in_round);
}

// While all have something ready, what any two have started differs by a turn and a request of each
// at most (the theorem of the paper), and each client's requests start in order.
TEST_F(TurnsTest, AllStartTheSameNumberOfBytes) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    std::mt19937_64 random(seed);
    const auto n_clients = static_cast<uint32_t>(2 + random() % 4);
    std::array<uint64_t, 5> largest{};
    std::array<uint64_t, 5> started{};
    std::array<size_t, 5> n_started{};
    std::array<std::vector<Request*>, 5> pushed;
    for (uint32_t client = 0; client < n_clients; ++client) {
      largest[client] = kQuantum >> (random() % 12) << (random() % 4);
    }
    const auto refill = [&](uint32_t client) {
      while (pushed[client].size() < n_started[client] + 3) {
        pushed[client].push_back(push(client, 1 + random() % largest[client]));
      }
    };
    for (uint32_t client = 0; client < n_clients; ++client) {
      refill(client);
    }
    for (int i = 0; i < 5000; ++i) {
      Request* request = take();
      ASSERT_NE(request, nullptr);
      const auto client = static_cast<uint32_t>(request->client);
      ASSERT_EQ(request, pushed[client][n_started[client]++]) << "client " << client;
      started[client] += request->cost;
      refill(client);
      for (uint32_t a = 0; a < n_clients; ++a) {
        for (uint32_t b = 0; b < n_clients; ++b) {
          ASSERT_LE(started[a], started[b] + 2 * kQuantum + largest[a] + largest[b])
              << "clients " << a << " and " << b << ", seed " << seed;
        }
      }
    }
    for (FairQueue::Flow& queue : queues_) {
      fair_queue_.clear(&queue);
    }
    requests_.clear();
  }
}

TEST_F(TurnsTest, WhoMayNotStartKeepsItsPlaceAndWhatItHas) {
  max_running_ = 1;
  Request* first = push(0, 1);
  Request* second = push(0, 1);
  Request* other = push(1, 1);
  EXPECT_EQ(take(), first);
  queues_[0].n_running = 1;
  EXPECT_EQ(take(), other);
  queues_[1].n_running = 1;
  EXPECT_EQ(take(), nullptr);
  EXPECT_FALSE(any());
  EXPECT_TRUE(queues_[0].is_in_round);
  queues_[0].n_running = 0;
  EXPECT_TRUE(any());
  EXPECT_EQ(take(), second);
}

TEST_F(TurnsTest, WhoHasNothingReadySavesNothingUp) {
  push(0, 1);
  push(1, 1);
  push(1, 1);
  EXPECT_EQ(take()->client, 0u);
  EXPECT_FALSE(queues_[0].is_in_round);
  push(0, kQuantum);
  EXPECT_EQ(queues_[0].deficit, 0u);
  EXPECT_EQ(take()->client, 1u) << "it is at the end of the round again";
}

TEST_F(TurnsTest, RequestsMayLeaveByThemselves) {
  Request* gone = push(0, 1);
  Request* stays = push(1, 1);
  gone->LineHook::unlink();
  EXPECT_TRUE(any());
  EXPECT_EQ(take(), stays);
  EXPECT_EQ(take(), nullptr);
  EXPECT_FALSE(any());
  push(0, 1);
  push(1, 1);
  fair_queue_.clear(&queues_[0]);
  EXPECT_EQ(take()->client, 1u);
  EXPECT_EQ(take(), nullptr);
}

}  // namespace
}  // namespace kvm::engine
