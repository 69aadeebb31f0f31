// SPDX-License-Identifier: Apache-2.0
// Who has the room that becomes free: clients in turn, each its own requests in their order, and a
// large one is passed by no more bytes than it needs.
#include "engine/run/room_line.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

namespace kvm::engine {
namespace {

class RoomLineTest : public ::testing::Test {
 protected:
  ~RoomLineTest() override {
    for (const auto& request : requests_) {
      if (request->is_parked) {
        line_.leave(&flows_[request->client], request.get());
      }
    }
    EXPECT_TRUE(line_.is_empty());
    EXPECT_FALSE(line_.has_to_serve());
  }

  Request* enter(uint32_t client, uint64_t needed_bytes, uint64_t deadline_ns = 0) {
    requests_.push_back(std::make_unique<Request>(nullptr, nullptr));
    Request* request = requests_.back().get();
    request->client = client;
    request->what = StepRequest{};
    std::get<StepRequest>(request->what).deadline_ns = deadline_ns;
    EXPECT_TRUE(line_.enter(&flows_[client], request, needed_bytes));
    return request;
  }
  // All that are served while so much is free; what they take is free no more.
  std::vector<Request*> serve(uint64_t* free_bytes) {
    std::vector<Request*> served;
    line_.note_news();
    while (line_.has_to_serve()) {
      Request* request = line_.take_turn(*free_bytes, false);
      if (request == nullptr) {
        continue;
      }
      line_.begin_serving(&flows_[request->client], request);
      line_.end_serving(request);
      line_.note_news();
      EXPECT_LE(request->room_bytes, *free_bytes);
      *free_bytes -= request->room_bytes;
      served.push_back(request);
    }
    return served;
  }
  using Requests = std::vector<Request*>;

  RoomLine line_;
  std::array<RoomLine::Flow, 6> flows_;
  std::vector<std::unique_ptr<Request>> requests_;
};

TEST_F(RoomLineTest, AClientsRequestsKeepTheirOrder) {
  Request* first = enter(0, 10);
  Request* second = enter(0, 1);
  uint64_t free_bytes = 9;
  EXPECT_EQ(serve(&free_bytes), Requests{});
  EXPECT_EQ(free_bytes, 9u);
  // One that is served and finds that it needs more stands where it stood.
  line_.note_news();
  EXPECT_EQ(line_.take_turn(10, false), first);
  line_.begin_serving(&flows_[0], first);
  EXPECT_FALSE(line_.enter(&flows_[0], first, 12));
  line_.end_serving(first);
  free_bytes = 13;
  EXPECT_EQ(serve(&free_bytes), (Requests{first, second}));
  EXPECT_EQ(free_bytes, 0u);
}

// An attempt that fails although there was room is made again with more of it: what came back for
// it and went again is no more.
TEST_F(RoomLineTest, WhatDidNotDoIsTriedAgainWithMore) {
  Request* request = enter(0, 10);
  const auto is_tried = [&](uint64_t free_bytes, bool is_in_vain = false) {
    line_.note_news();
    if (line_.take_turn(free_bytes, is_in_vain) == nullptr) {
      return false;
    }
    line_.begin_serving(&flows_[0], request);
    EXPECT_FALSE(line_.enter(&flows_[0], request, 10));
    line_.end_serving(request);
    return true;
  };
  EXPECT_TRUE(is_tried(20));
  EXPECT_FALSE(is_tried(20));
  request->tail_bytes = 4;
  EXPECT_FALSE(is_tried(16));
  EXPECT_FALSE(is_tried(20));
  EXPECT_TRUE(is_tried(21));
  // Others have taken some: less is more than there was.
  EXPECT_FALSE(is_tried(12));
  EXPECT_TRUE(is_tried(13));
  EXPECT_FALSE(is_tried(13));
  EXPECT_TRUE(is_tried(13, true));
  uint64_t free_bytes = 14;
  EXPECT_EQ(serve(&free_bytes), Requests{request});
}

TEST_F(RoomLineTest, ClientsHaveTheirTurns) {
  Requests want;
  std::array<Requests, 3> of_client;
  for (const uint32_t client : {0u, 0u, 0u, 1u, 2u, 2u}) {
    of_client[client].push_back(enter(client, 1));
  }
  for (size_t i = 0; i < 3; ++i) {
    for (const Requests& own : of_client) {
      if (i < own.size()) {
        want.push_back(own[i]);
      }
    }
  }
  uint64_t free_bytes = 6;
  EXPECT_EQ(serve(&free_bytes), want);
}

// Until the large one has its room, half of what becomes free is others', and no more than it
// needs itself.
TEST_F(RoomLineTest, ALargeOneIsPassedByNoMoreThanItNeeds) {
  Request* large = enter(0, 100);
  uint64_t free_bytes = 0;
  uint64_t passed_bytes = 0;
  for (int i = 0; i < 200; ++i) {
    enter(1, 1);
    enter(2, 3);
  }
  EXPECT_EQ(serve(&free_bytes), Requests{});
  for (uint64_t freed_bytes = 0; large->is_parked; freed_bytes += 5) {
    ASSERT_LE(freed_bytes, 210u);
    free_bytes += 5;
    for (const Request* request : serve(&free_bytes)) {
      passed_bytes += request == large ? 0 : request->room_bytes;
    }
    EXPECT_LE(passed_bytes, 100u);
    EXPECT_TRUE(!large->is_parked || passed_bytes + 6 >= std::min<uint64_t>(100, freed_bytes / 2));
  }
  EXPECT_GE(passed_bytes, 90u);
  free_bytes += 50;
  serve(&free_bytes);
  EXPECT_LT(free_bytes, 3u) << "nothing is set aside any more";
}

// Nothing is set aside for one that is gone.
TEST_F(RoomLineTest, OneThatLeavesIsFavouredNoMore) {
  Request* large = enter(0, 100);
  Request* other = enter(1, 10);
  uint64_t free_bytes = 15;
  EXPECT_EQ(serve(&free_bytes), Requests{});
  line_.leave(&flows_[0], large);
  EXPECT_EQ(serve(&free_bytes), Requests{other});
}

TEST_F(RoomLineTest, WhereRoomWillNotComeAllAreTried) {
  Request* large = enter(0, 100);
  Request* other = enter(1, 10);
  line_.note_news();
  EXPECT_EQ(line_.take_turn(0, true), large);
  EXPECT_EQ(line_.take_turn(0, true), other);
}

TEST_F(RoomLineTest, DeadlinesAreFoundWhereverTheyStand) {
  EXPECT_EQ(line_.deadline_ns(), UINT64_MAX);
  enter(0, 1);
  Request* late = enter(1, 1, 200);
  Request* soon = enter(0, 1, 100);
  EXPECT_EQ(line_.deadline_ns(), 100u);
  EXPECT_EQ(line_.find_expired(99), nullptr);
  EXPECT_EQ(line_.find_expired(100), soon);
  line_.leave(&flows_[0], soon);
  EXPECT_EQ(line_.find_expired(100), nullptr);
  EXPECT_EQ(line_.deadline_ns(), 200u);
  EXPECT_EQ(line_.find_expired(200), late);
}

// Clients that ask for whatever they like: whoever comes is served before so much has become free
// as everybody before it, and those that pass them, may take.
TEST_F(RoomLineTest, NobodyWaitsForEver) {
  constexpr uint64_t kMost = 1000;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(seed);
    std::array<uint64_t, 6> came_at{};
    std::array<Request*, 6> waiting{};
    uint64_t freed_bytes = 0;
    uint64_t free_bytes = 0;
    for (int i = 0; i < 3000; ++i) {
      for (uint32_t client = 0; client < 6; ++client) {
        if (waiting[client] == nullptr || !waiting[client]->is_parked) {
          waiting[client] = enter(client, 1 + random() % (client == seed % 6 ? kMost : 20));
          came_at[client] = freed_bytes;
        }
        EXPECT_LE(freed_bytes - came_at[client], 6 * 2 * kMost) << client;
      }
      const uint64_t more = random() % 50;
      freed_bytes += more;
      free_bytes += more;
      serve(&free_bytes);
    }
    for (uint32_t client = 0; client < 6; ++client) {
      if (waiting[client]->is_parked) {
        line_.leave(&flows_[client], waiting[client]);
      }
    }
    requests_.clear();
  }
}

}  // namespace
}  // namespace kvm::engine
