// SPDX-License-Identifier: Apache-2.0
// What every ObjectStore must hold to, over the simulated one in each way in which its requests
// end, and over the disk tier.
#include "tiers/object_store.h"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/common/temporary_directory.h"
#include "tiers/disk/disk_tier.h"
#include "tiers/simulated/simulated_tier.h"
#include "tiers/slow_tier.h"

namespace kvm::testing {
namespace {

using tiers::DiskTier;
using tiers::kMaxObjectKeyBytes;
using tiers::kMaxObjectLabelBytes;
using tiers::ObjectInfo;
using tiers::ObjectRequest;
using tiers::ObjectStore;
using tiers::PlaceId;
using tiers::SimulatedTier;
using tiers::SlowTier;
using tiers::Transfer;
using Kind = ObjectRequest::Kind;

constexpr uint32_t kPageBytes = 4096;

// Counts what has ended.
class Ends {
 public:
  void arrive() {
    const std::lock_guard lock(mutex_);
    ++n_;
    arrived_.notify_all();
  }
  bool have(uint64_t n) {
    std::unique_lock lock(mutex_);
    return arrived_.wait_for(lock, std::chrono::milliseconds(1), [&] { return n_ >= n; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  uint64_t n_ = 0;
};

std::vector<std::byte> bytes_of(uint32_t mark, size_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  uint32_t word = mark * 0x9e3779b9u;
  for (std::byte& byte : bytes) {
    word = word * 0x915f77f5u + 1;
    byte = static_cast<std::byte>(word >> 24);
  }
  return bytes;
}

struct Page final : Transfer {
  void on_done() noexcept override { ends->arrive(); }
  Ends* ends = nullptr;
  std::vector<std::byte> bytes;
};

struct Request final : ObjectRequest {
  explicit Request(Ends* listener) : ends(listener) {}
  void on_done() noexcept override { ends->arrive(); }
  Ends* ends;
};

// Each has a tier that keeps objects, and drive() with which it may have to be brought to end
// requests: one thread calls that until what it waits for is there.
struct TimedRig {
  void drive() {}
  SimulatedTier tier{{}};
};
struct ManualRig {
  void drive() { tier.finish_all(); }
  SimulatedTier tier{{.is_manual = true}};
};
struct DiskRig {
  void drive() {}
  TemporaryDirectory directory;
  std::unique_ptr<DiskTier> owned =
      DiskTier::open(
          {.directories = {directory.path()}, .capacity_bytes = 64 << 20, .queue_depth = 8})
          .value();
  DiskTier& tier = *owned;
};

template <typename Rig>
class ObjectStoreConformance : public ::testing::Test {
 protected:
  void wait(Ends& ends, uint64_t n) {
    do {
      rig_.drive();
    } while (!ends.have(n));
  }
  PlaceId write(uint32_t mark) {
    Ends ends;
    Page page;
    page.ends = &ends;
    page.kind = Transfer::Kind::kWrite;
    page.bytes = bytes_of(mark, kPageBytes);
    page.data = page.bytes.data();
    page.size_bytes = kPageBytes;
    Transfer* transfer = &page;
    tier_.submit({&transfer, 1});
    wait(ends, 1);
    EXPECT_TRUE(page.status.is_ok()) << page.status.message();
    return page.place;
  }
  bool holds(PlaceId place, uint32_t mark) {
    Ends ends;
    Page page;
    page.ends = &ends;
    page.bytes.resize(kPageBytes);
    page.place = place;
    page.data = page.bytes.data();
    page.size_bytes = kPageBytes;
    Transfer* transfer = &page;
    tier_.submit({&transfer, 1});
    wait(ends, 1);
    return page.status.is_ok() && page.bytes == bytes_of(mark, kPageBytes);
  }
  // Pages with marks from `mark` on, with a reference each.
  std::vector<ObjectRequest::Page> pages(uint32_t mark, uint32_t n) {
    std::vector<ObjectRequest::Page> all;
    for (uint32_t i = 0; i < n; ++i) {
      all.push_back({write(mark + i), kPageBytes});
    }
    return all;
  }
  void release(const std::vector<ObjectRequest::Page>& pages) {
    for (const ObjectRequest::Page& page : pages) {
      tier_.release(page.place);
    }
  }
  Status run(Request& request, Ends& ends) {
    store_.submit(&request);
    wait(ends, 1);
    return request.status;
  }
  Status put(const std::string& key, const std::string& label, std::vector<std::byte> body,
             std::vector<ObjectRequest::Page> of) {
    Ends ends;
    Request request(&ends);
    request.kind = Kind::kPut;
    request.key = key;
    request.label = label;
    request.body = std::move(body);
    request.pages = std::move(of);
    return run(request, ends);
  }
  Status remove(const std::string& key) {
    Ends ends;
    Request request(&ends);
    request.kind = Kind::kRemove;
    request.key = key;
    return run(request, ends);
  }
  // The pages of an object that holds the body and pages with marks from `mark` on; released.
  Status expect(const std::string& key, const std::vector<std::byte>& body, uint32_t mark,
                uint32_t n_pages) {
    Ends ends;
    Request request(&ends);
    request.key = key;
    Status status = run(request, ends);
    if (status.is_ok()) {
      EXPECT_TRUE(request.body == body);
      EXPECT_EQ(request.pages.size(), n_pages);
      for (uint32_t i = 0; i < request.pages.size(); ++i) {
        EXPECT_EQ(request.pages[i].size_bytes, kPageBytes);
        EXPECT_TRUE(holds(request.pages[i].place, mark + i)) << key << ", page " << i;
      }
      release(request.pages);
    }
    return status;
  }
  std::vector<std::string> keys(const std::string& after = "", size_t n_max = 100) {
    std::vector<std::string> all;
    for (const ObjectInfo& info : store_.list(after, n_max)) {
      all.push_back(info.key);
    }
    return all;
  }

  Rig rig_;
  SlowTier& tier_ = rig_.tier;
  ObjectStore& store_ = *rig_.tier.objects();
};
using Rigs = ::testing::Types<TimedRig, ManualRig, DiskRig>;
TYPED_TEST_SUITE(ObjectStoreConformance, Rigs);

using Keys = std::vector<std::string>;

TYPED_TEST(ObjectStoreConformance, AnObjectIsThereAsItWasPut) {
  const auto pages = this->pages(10, 5);
  ASSERT_TRUE(this->put("one", "a label", bytes_of(1, 1000), pages).is_ok());
  this->release(pages);
  EXPECT_GE(this->tier_.used_bytes(), 5 * kPageBytes) << "the object has references of its own";
  EXPECT_TRUE(this->expect("one", bytes_of(1, 1000), 10, 5).is_ok());
  EXPECT_TRUE(this->expect("one", bytes_of(1, 1000), 10, 5).is_ok());
  const std::vector<ObjectInfo> infos = this->store_.list("", 10);
  ASSERT_EQ(infos.size(), 1u);
  EXPECT_EQ(infos[0].label, "a label");
  EXPECT_EQ(infos[0].n_pages, 5u);
  EXPECT_EQ(infos[0].page_bytes, 5u * kPageBytes);
  EXPECT_EQ(infos[0].body_bytes, 1000u);
  EXPECT_TRUE(this->remove("one").is_ok());
  EXPECT_EQ(this->tier_.used_bytes(), 0u);
  EXPECT_EQ(this->expect("one", {}, 0, 0).code(), KVM_ERR_NOT_FOUND);
  EXPECT_EQ(this->remove("one").code(), KVM_ERR_NOT_FOUND);
  EXPECT_TRUE(this->store_.list("", 10).empty());
}

TYPED_TEST(ObjectStoreConformance, APutReplacesTheOneBefore) {
  auto pages = this->pages(10, 3);
  ASSERT_TRUE(this->put("one", "before", bytes_of(1, 10), pages).is_ok());
  // The next has some of its pages, and others.
  const auto more = this->pages(13, 2);
  const std::vector<ObjectRequest::Page> next = {pages[1], pages[2], more[0], more[1]};
  ASSERT_TRUE(this->put("one", "after", bytes_of(2, 20), next).is_ok());
  this->release(pages);
  this->release(more);
  EXPECT_TRUE(this->expect("one", bytes_of(2, 20), 11, 4).is_ok());
  EXPECT_EQ(this->store_.list("", 10)[0].label, "after");
  EXPECT_TRUE(this->remove("one").is_ok());
  EXPECT_EQ(this->tier_.used_bytes(), 0u);
}

TYPED_TEST(ObjectStoreConformance, PagesAreSharedByObjects) {
  const auto pages = this->pages(1, 4);
  ASSERT_TRUE(this->put("a", "", bytes_of(1, 10), pages).is_ok());
  const uint64_t used = this->tier_.used_bytes();
  ASSERT_TRUE(this->put("b", "", bytes_of(2, 10), pages).is_ok());
  this->release(pages);
  EXPECT_LE(this->tier_.used_bytes(), used + 2 * kPageBytes) << "no page is there twice";
  EXPECT_TRUE(this->remove("a").is_ok());
  EXPECT_TRUE(this->expect("b", bytes_of(2, 10), 1, 4).is_ok());
  EXPECT_TRUE(this->remove("b").is_ok());
  EXPECT_EQ(this->tier_.used_bytes(), 0u);
}

// What was got stays, though its object goes.
TYPED_TEST(ObjectStoreConformance, WhoHasAPageKeepsIt) {
  const auto pages = this->pages(1, 2);
  ASSERT_TRUE(this->put("a", "", {}, pages).is_ok());
  this->release(pages);
  Ends ends;
  Request request(&ends);
  request.key = "a";
  ASSERT_TRUE(this->run(request, ends).is_ok());
  ASSERT_TRUE(this->remove("a").is_ok());
  EXPECT_TRUE(this->holds(request.pages[0].place, 1));
  EXPECT_TRUE(this->holds(request.pages[1].place, 2));
  this->release(request.pages);
  EXPECT_EQ(this->tier_.used_bytes(), 0u);
}

TYPED_TEST(ObjectStoreConformance, ListsAreInTheOrderOfKeys) {
  for (const char* key : {"b", "a/2", "c", "a/1", "a"}) {
    ASSERT_TRUE(this->put(key, std::string("of ") + key, {}, {}).is_ok());
  }
  EXPECT_EQ(this->keys(), (Keys{"a", "a/1", "a/2", "b", "c"}));
  EXPECT_EQ(this->keys("", 2), (Keys{"a", "a/1"}));
  EXPECT_EQ(this->keys("a/1", 2), (Keys{"a/2", "b"}));
  EXPECT_EQ(this->keys("a0"), (Keys{"b", "c"})) << "that is no key";
  EXPECT_EQ(this->keys("c"), Keys{});
}

TYPED_TEST(ObjectStoreConformance, RequestsOfAKeyTakeEffectInOrder) {
  Ends ends;
  std::deque<Request> requests;
  for (uint32_t i = 0; i < 30; ++i) {
    Request& request = requests.emplace_back(&ends);
    request.kind = i % 3 == 0 ? Kind::kPut : i % 3 == 1 ? Kind::kGet : Kind::kRemove;
    request.key = "key";
    request.body = i % 3 == 0 ? bytes_of(i, 100) : std::vector<std::byte>();
    this->store_.submit(&request);
  }
  this->wait(ends, requests.size());
  for (uint32_t i = 0; i < requests.size(); ++i) {
    EXPECT_TRUE(requests[i].status.is_ok()) << i << ": " << requests[i].status.message();
    if (i % 3 == 1) {
      EXPECT_TRUE(requests[i].body == bytes_of(i - 1, 100));
    }
  }
  EXPECT_TRUE(this->keys().empty());
}

TYPED_TEST(ObjectStoreConformance, SizesHaveLimits) {
  const std::string longest_key(kMaxObjectKeyBytes, 'k');
  const std::string longest_label(kMaxObjectLabelBytes, 'l');
  EXPECT_TRUE(this->put(longest_key, longest_label, {}, {}).is_ok());
  EXPECT_EQ(this->store_.list("", 1).at(0).label, longest_label);
  const auto pages = this->pages(1, 1);
  EXPECT_EQ(this->put(longest_key + "k", "", {}, pages).code(), KVM_ERR_LIMIT);
  EXPECT_EQ(this->put("key", longest_label + "l", {}, pages).code(), KVM_ERR_LIMIT);
  EXPECT_EQ(this->put("", "", {}, pages).code(), KVM_ERR_LIMIT);
  EXPECT_EQ(this->keys(), Keys{longest_key});
  EXPECT_TRUE(this->remove(longest_key).is_ok());
  this->release(pages);
  EXPECT_EQ(this->tier_.used_bytes(), 0u);
}

// --- The simulated one: faults and order ---------------------------------------------------------

TEST(SimulatedObjects, AFaultChangesNothing) {
  SimulatedTier tier({.is_manual = true});
  const auto run = [&](Kind kind, const char* label) {
    Ends ends;
    Request request(&ends);
    request.kind = kind;
    request.key = "key";
    request.label = label;
    tier.objects()->submit(&request);
    EXPECT_EQ(tier.n_objects_waiting(), 1u);
    tier.finish_object();
    return request.status.code();
  };
  EXPECT_EQ(run(Kind::kPut, "first"), KVM_OK);
  tier.fail_object(Kind::kPut, 2, {KVM_ERR_NO_SPACE, "a fault"});
  EXPECT_EQ(run(Kind::kPut, "second"), KVM_OK);
  EXPECT_EQ(run(Kind::kPut, "third"), KVM_ERR_NO_SPACE);
  EXPECT_EQ(tier.objects()->list("", 9)[0].label, "second");
  EXPECT_EQ(tier.objects()->recovery().n_objects, 0u);
  tier.fail_object(Kind::kRemove, 1, {KVM_ERR_IO, "a fault"});
  EXPECT_EQ(run(Kind::kRemove, ""), KVM_ERR_IO);
  EXPECT_EQ(run(Kind::kGet, ""), KVM_OK);
  EXPECT_EQ(run(Kind::kRemove, ""), KVM_OK);
}

}  // namespace
}  // namespace kvm::testing
