// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/object_transfer.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "tiers/disk/disk_format.h"
#include "tiers/object_store.h"

namespace kvm::tiers {
namespace {

// LIMIT: of pages on their way into a tier; more than one where each is smaller.
constexpr uint64_t kInFlightBytes = 16 << 20;
constexpr size_t kInFlightPages = 64;

// Writes pages to a tier, several at a time, and keeps their places.
class PageWriter {
 public:
  explicit PageWriter(SlowTier* tier) : tier_(*tier) {}
  ~PageWriter() {
    (void)wait_for(0, 0);
    for (const ObjectRequest::Page& page : pages_) {
      if (page.place != kNoPlace) {
        tier_.release(page.place);
      }
    }
  }
  PageWriter(const PageWriter&) = delete;
  PageWriter& operator=(const PageWriter&) = delete;

  Status write(std::span<const std::byte> bytes) {
    KVM_TRY(wait_for(kInFlightBytes - std::min<uint64_t>(bytes.size(), kInFlightBytes),
                     kInFlightPages - 1));
    pages_.push_back({.size_bytes = static_cast<uint32_t>(bytes.size())});
    auto one = std::make_unique<Write>();
    one->writer = this;
    one->index = pages_.size() - 1;
    one->bytes.assign(bytes.begin(), bytes.end());
    one->kind = Transfer::Kind::kWrite;
    one->data = one->bytes.data();
    one->size_bytes = static_cast<uint32_t>(bytes.size());
    n_bytes_ += bytes.size();
    Transfer* const transfer = one.get();
    in_flight_.push_back(std::move(one));
    tier_.submit({&transfer, 1});
    return Status::ok();
  }
  // Of all that was written.
  Status finish() { return wait_for(0, 0); }
  // References on the places stay the writer's. REQUIRES: finish() was OK.
  const std::vector<ObjectRequest::Page>& pages() const { return pages_; }

 private:
  struct Write final : Transfer {
    void on_done() noexcept override {
      // The lock is held until nobody is told any more: then the writer may go.
      const std::lock_guard lock(writer->mutex_);
      is_done = true;
      writer->has_ended_.notify_one();
    }
    PageWriter* writer = nullptr;
    size_t index = 0;
    std::vector<std::byte> bytes;
    bool is_done = false;
  };

  // Until no more are on their way. Fails: as the first that has.
  Status wait_for(uint64_t max_bytes, size_t max_pages) {
    while (!in_flight_.empty() && (n_bytes_ > max_bytes || in_flight_.size() > max_pages)) {
      Write& first = *in_flight_.front();
      {
        std::unique_lock lock(mutex_);
        has_ended_.wait(lock, [&] { return first.is_done; });
      }
      n_bytes_ -= first.bytes.size();
      pages_[first.index].place = first.status.is_ok() ? first.place : kNoPlace;
      if (error_.is_ok()) {
        error_ = first.status;
      }
      in_flight_.pop_front();
    }
    return error_;
  }

  SlowTier& tier_;
  std::vector<ObjectRequest::Page> pages_;
  std::deque<std::unique_ptr<Write>> in_flight_;
  uint64_t n_bytes_ = 0;  // of these
  Status error_;
  std::mutex mutex_;  // of is_done
  std::condition_variable has_ended_;
};

struct Put final : ObjectRequest {
  void on_done() noexcept override {
    const std::lock_guard lock(mutex);
    is_done = true;
    has_ended.notify_one();
  }
  void wait() {
    std::unique_lock lock(mutex);
    has_ended.wait(lock, [this] { return is_done; });
  }
  std::mutex mutex;
  std::condition_variable has_ended;
  bool is_done = false;
};

}  // namespace

Result<uint64_t> export_object(DiskView* view, const FoundObject& object, const std::string& path,
                               bool replaces, const TransferProgress& on_progress) {
  try {
    if (object.is_lost) {
      return Status(KVM_ERR_LOST,
                    "not all of it is there any more: a directory or a file is missing, or is "
                    "damaged");
    }
    ObjectFileHead head{.key = object.key,
                        .label = object.label,
                        .body = {},
                        .n_pages = object.n_pages,
                        .page_bytes = object.page_bytes};
    KVM_TRY_ASSIGN(head.body, view->read_body(object));
    const std::span<const uint32_t> parts = std::span(object.parts).first(object.n_pages);
    std::vector<uint32_t> sizes;
    sizes.reserve(parts.size());
    for (const uint32_t part : parts) {
      sizes.push_back(view->found().pages[part].size_bytes);
    }
    KVM_TRY_ASSIGN(ObjectFileWriter writer, ObjectFileWriter::create(path, replaces, head, sizes));
    uint64_t n_done = 0;
    KVM_TRY(view->read_pages(parts, [&](size_t, std::span<const std::byte> page) {
      n_done += page.size();
      if (on_progress) {
        on_progress(n_done, object.page_bytes);
      }
      return writer.add_page(page);
    }));
    KVM_TRY(writer.finish());
    return writer.file_bytes();
  } catch (const std::bad_alloc&) {
    return Status::fixed(KVM_ERR_NO_MEMORY, "there is no memory for what it holds");
  }
}

uint64_t import_bytes(const ObjectFileHead& head) {
  const uint64_t n_chunks = object_chunks(head.n_pages, head.body.size());
  const uint64_t n_records = head.n_pages + n_chunks;
  return head.page_bytes + head.body.size() + uint64_t{head.n_pages} * sizeof(uint64_t) +
         n_records * (sizeof(RecordHeader) + kRecordUnitBytes + sizeof(TableEntry));
}

Status import_object(SlowTier* tier, ObjectFileReader* file, const std::string& key,
                     const TransferProgress& on_progress) {
  KVM_ASSERT(tier->objects() != nullptr);
  try {
    PageWriter writer(tier);
    uint64_t n_done = 0;
    KVM_TRY(file->read_pages([&](uint32_t, std::span<const std::byte> page) {
      n_done += page.size();
      if (on_progress) {
        on_progress(n_done, file->head().page_bytes);
      }
      return writer.write(page);
    }));
    KVM_TRY(writer.finish());
    Put put;
    put.kind = ObjectRequest::Kind::kPut;
    put.key = key;
    put.label = file->head().label;
    put.body = file->head().body;
    put.pages = writer.pages();
    tier->objects()->submit(&put);
    put.wait();
    return put.status;
  } catch (const std::bad_alloc&) {
    return Status::fixed(KVM_ERR_NO_MEMORY, "there is no memory for what it holds");
  }
}

}  // namespace kvm::tiers
