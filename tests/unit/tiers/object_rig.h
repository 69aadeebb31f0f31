// SPDX-License-Identifier: Apache-2.0
// An ObjectRig is a disk tier in real directories, and what there is to do with its objects.
#ifndef KVM_TESTS_UNIT_TIERS_OBJECT_RIG_H_
#define KVM_TESTS_UNIT_TIERS_OBJECT_RIG_H_

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/common/slow_page.h"
#include "tiers/disk/disk_tier.h"
#include "tiers/object_store.h"

namespace kvm::testing {

using tiers::DiskTier;
using tiers::DiskTierOptions;
using tiers::ObjectRequest;
using tiers::PlaceId;

inline constexpr uint64_t kSegment = DiskTier::kMinSegmentBytes;
inline constexpr uint32_t kPage = 20'000;

struct Request final : ObjectRequest {
  Request(Kind what, std::string of) {
    kind = what;
    key = std::move(of);
  }
  void on_done() noexcept override { is_done.store(true, std::memory_order_release); }
  std::atomic<bool> is_done = false;
};

class ObjectRig {
 public:
  explicit ObjectRig(std::vector<std::string> directories, uint64_t n_segments = 16) {
    options_ = {.directories = std::move(directories),
                .capacity_bytes = n_segments * kSegment,
                .segment_bytes = kSegment,
                .queue_depth = 4};
  }

  Status open() {
    Result<std::unique_ptr<DiskTier>> opened = DiskTier::open(options_);
    if (opened.is_ok()) {
      tier = std::move(opened).value();
    }
    return opened.is_ok() ? Status() : opened.status();
  }
  Status run(Request* request) {
    tier->objects()->submit(request);
    while (!request->is_done.load(std::memory_order_acquire)) {
      std::this_thread::yield();
    }
    return request->status;
  }
  PlaceId write(uint32_t mark, uint32_t size = kPage) {
    SlowPage page(mark, size);
    tiers::Transfer* const transfer = &page;
    tier->submit({&transfer, 1});
    while (!page.is_done.load()) {
      std::this_thread::yield();
    }
    EXPECT_TRUE(page.status.is_ok()) << page.status.message();
    return page.place;
  }
  // An object of pages with marks from `mark` on.
  Status put(const std::string& key, uint32_t mark, uint32_t n_pages, uint32_t body_bytes = 1000) {
    Request request(ObjectRequest::Kind::kPut, key);
    request.label = "label of " + key;
    request.body = marked_bytes(mark, body_bytes);
    for (uint32_t i = 0; i < n_pages; ++i) {
      request.pages.push_back({write(mark + i), kPage});
    }
    const Status status = run(&request);
    for (const ObjectRequest::Page& page : request.pages) {
      tier->release(page.place);
    }
    return status;
  }
  Status remove(const std::string& key) {
    Request request(ObjectRequest::Kind::kRemove, key);
    return run(&request);
  }
  // The first error of it and its pages.
  Status check(const std::string& key, uint32_t mark, uint32_t n_pages,
               uint32_t body_bytes = 1000) {
    Request request(ObjectRequest::Kind::kGet, key);
    Status status = run(&request);
    if (!status.is_ok()) {
      return status;
    }
    EXPECT_EQ(request.body, marked_bytes(mark, body_bytes));
    EXPECT_EQ(request.pages.size(), n_pages);
    for (uint32_t i = 0; i < request.pages.size(); ++i) {
      SlowPage page(request.pages[i].place, request.pages[i].size_bytes);
      tiers::Transfer* const transfer = &page;
      tier->submit({&transfer, 1});
      while (!page.is_done.load()) {
        std::this_thread::yield();
      }
      if (page.status.is_ok()) {
        EXPECT_TRUE(page.holds(mark + i));
      } else if (status.is_ok()) {
        status = page.status;
      }
      tier->release(request.pages[i].place);
    }
    return status;
  }
  std::vector<std::string> keys() const {
    std::vector<std::string> found;
    for (const tiers::ObjectInfo& info : tier->objects()->list("", 100)) {
      found.push_back(info.key);
    }
    return found;
  }

  std::unique_ptr<DiskTier> tier;

 private:
  DiskTierOptions options_;
};

}  // namespace kvm::testing

#endif  // KVM_TESTS_UNIT_TIERS_OBJECT_RIG_H_
