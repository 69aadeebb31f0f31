// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "tests/common/forwarded_disk.h"
#include "tests/common/slow_page.h"
#include "tests/fuzz/seeds.h"
#include "tests/fuzz/targets.h"
#include "tiers/disk/crc32c.h"
#include "tiers/disk/disk_format.h"
#include "tiers/disk/disk_tier.h"
#include "tiers/disk/manifest.h"
#include "tiers/disk/simulated_disk.h"
#include "tiers/object_store.h"

namespace kvm::testing {
namespace {

using namespace tiers;

constexpr uint32_t kSegments = 6;
constexpr uint32_t kFiles = kSegments + kManifestSlots * kManifestCopies;
constexpr uint32_t kMaxTurns = 20'000;

// What an object holds: pages with marks from `mark` on.
struct Put {
  const char* key;
  uint32_t mark;
  uint32_t n_pages;
  uint32_t page_bytes;
  uint32_t body_bytes;
};
// A segment and more, so that one has a table; and a body of several chunks.
constexpr Put kPuts[] = {{"one", 1, 13, 20'000, 500}, {"two", 40, 2, 700, 300'000}};

struct Request final : ObjectRequest {
  void on_done() noexcept override { is_done = true; }
  bool is_done = false;
};

// A tier over a simulated disk without faults.
class Rig {
 public:
  Rig()
      : options_{.directories = {"one", "two"},
                 .capacity_bytes = kSegments * DiskTier::kMinSegmentBytes,
                 .segment_bytes = DiskTier::kMinSegmentBytes,
                 .transfer_bytes = 64 << 10,
                 .queue_depth = 2,
                 .is_manual = true},
        disk_({.io = DiskTier::io_options(options_).value()}) {}

  Status open() {
    KVM_TRY_ASSIGN(tier_, DiskTier::over(std::make_unique<ForwardedDisk>(&disk_), options_));
    return Status::ok();
  }
  void put(const Put& what) {
    Request request;
    request.kind = ObjectRequest::Kind::kPut;
    request.key = what.key;
    request.body = marked_bytes(what.mark, what.body_bytes);
    for (uint32_t i = 0; i < what.n_pages; ++i) {
      SlowPage page(what.mark + i, what.page_bytes);
      run(&page);
      KVM_ASSERT(page.status.is_ok());
      request.pages.push_back({page.place, what.page_bytes});
    }
    run(&request);
    KVM_ASSERT(request.status.is_ok());
    give_back(request);
  }
  void remove(const std::string& key) {
    Request request;
    request.kind = ObjectRequest::Kind::kRemove;
    request.key = key;
    run(&request);
  }
  // Reads what there is of the object; what is read without a fault is `what`, if there is one.
  void read(const std::string& key, const Put* what) {
    Request request;
    request.kind = ObjectRequest::Kind::kGet;
    request.key = key;
    run(&request);
    if (!request.status.is_ok()) {
      KVM_ASSERT(!request.status.message().empty());
      return;
    }
    KVM_ASSERT(what == nullptr || (request.pages.size() == what->n_pages &&
                                   request.body == marked_bytes(what->mark, what->body_bytes)));
    for (uint32_t i = 0; i < request.pages.size(); ++i) {
      SlowPage page(request.pages[i].place, request.pages[i].size_bytes);
      run(&page);
      KVM_ASSERT(what == nullptr || !page.status.is_ok() || page.holds(what->mark + i));
    }
    give_back(request);
  }
  void abandon() {
    disk_.forget_in_flight();
    tier_->abandon();
    tier_.reset();
  }
  DiskTier& tier() { return *tier_; }
  SimulatedDisk& disk() { return disk_; }

 private:
  void run(SlowPage* page) {
    Transfer* const transfer = page;
    tier_->submit({&transfer, 1});
    for (uint32_t i = 0; i < kMaxTurns && !page->is_done.load(); ++i) {
      tier_->turn();
    }
    KVM_ASSERT(page->is_done.load());
  }
  void run(Request* request) {
    tier_->objects()->submit(request);
    for (uint32_t i = 0; i < kMaxTurns && !request->is_done; ++i) {
      tier_->turn();
    }
    KVM_ASSERT(request->is_done);
  }
  void give_back(const Request& request) {
    for (const ObjectRequest::Page& page : request.pages) {
      tier_->release(page.place);
    }
  }

  DiskTierOptions options_;
  SimulatedDisk disk_;
  std::unique_ptr<DiskTier> tier_;
};

using Files = std::vector<std::vector<std::byte>>;

// As a tier that was killed has left them.
const Files& files_before() {
  static const Files kAll = [] {
    Rig rig;
    KVM_ASSERT(rig.open().is_ok());
    rig.put({"gone", 90, 3, 5'000, 10});
    for (const Put& what : kPuts) {
      rig.put(what);
    }
    rig.remove("gone");
    rig.abandon();
    Files files;
    for (uint32_t i = 0; i < kFiles; ++i) {
      const std::span<std::byte> bytes = rig.disk().bytes(i);
      files.emplace_back(bytes.begin(), bytes.end());
    }
    return files;
  }();
  return kAll;
}

template <typename T>
T at(std::span<const std::byte> bytes, uint64_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(value));
  return value;
}

template <typename T>
void seal(T header, std::span<std::byte> bytes, uint64_t offset) {
  header.header_crc = crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(T, header_crc)));
  std::memcpy(bytes.data() + offset, &header, sizeof(header));
}

// Checksums match what there is, as far as it says of itself what it is: the reader sees what they
// would hide.
void seal_segment(std::span<std::byte> file) {
  seal(at<SegmentHeader>(file, 0), file, 0);
  for (uint64_t offset = kSegmentHeaderBytes; offset < file.size(); offset += kRecordUnitBytes) {
    const uint64_t rest = file.size() - offset - kRecordUnitBytes;
    const auto page = [&](uint64_t n) {
      return file.subspan(offset + kRecordUnitBytes, std::min(rest, n));
    };
    if (auto record = at<RecordHeader>(file, offset); record.magic == kRecordMagic) {
      if (rest >= sizeof(ObjectHeader)) {
        auto object = at<ObjectHeader>(file, offset + kRecordUnitBytes);
        if (object.magic == kObjectMagic) {
          if (object.n_chunks == 1 && record.size_bytes > sizeof(object)) {
            object.stream_crc = crc32c(page(record.size_bytes).subspan(sizeof(object)));
          }
          seal(object, file, offset + kRecordUnitBytes);
        }
      }
      record.page_crc = crc32c(page(record.size_bytes));
      seal(record, file, offset);
    }
  }
  const uint64_t end = file.size() - sizeof(TableTrailer);
  if (auto trailer = at<TableTrailer>(file, end); trailer.magic == kTableMagic) {
    const uint64_t n_bytes = uint64_t{trailer.n_records} * sizeof(TableEntry);
    if (trailer.offset <= end && n_bytes <= end - trailer.offset) {
      trailer.table_crc = crc32c(file.subspan(trailer.offset, n_bytes));
    }
    seal(trailer, file, end);
  }
}

void seal_manifest(std::span<std::byte> file) {
  for (uint64_t offset = 0; offset + kManifestBlockBytes <= file.size();
       offset += kManifestBlockBytes) {
    auto header = at<ManifestBlockHeader>(file, offset);
    if (header.magic != kManifestMagic) {
      continue;
    }
    const uint64_t used =
        std::min<uint64_t>(header.used_bytes, kManifestBlockBytes - sizeof(header));
    header.header_crc = crc32c(
        file.subspan(offset + sizeof(header), used),
        crc32c(
            std::as_bytes(std::span(&header, 1)).first(offsetof(ManifestBlockHeader, header_crc))));
    std::memcpy(file.data() + offset, &header, sizeof(header));
  }
}

constexpr uint8_t kSealed = 1;

}  // namespace

void run_disk_files(std::span<const uint8_t> input) {
  InputReader reader(input);
  const bool is_sealed = (reader.take<uint8_t>() & kSealed) != 0;
  Files files = files_before();
  while (!reader.is_empty()) {
    const auto patch = reader.take<DiskPatch>();
    std::vector<std::byte>& file = files[patch.file % kFiles];
    const std::span<const uint8_t> bytes = reader.take_bytes(patch.n_bytes);
    for (size_t i = 0; i < bytes.size() && !file.empty(); ++i) {
      file[(patch.offset + i) % file.size()] = std::byte{bytes[i]};
    }
  }
  Rig rig;
  for (uint32_t i = 0; i < kFiles; ++i) {
    if (files[i].empty()) {
      continue;
    }
    if (is_sealed) {
      i < kSegments ? seal_segment(files[i]) : seal_manifest(files[i]);
    }
    KVM_ASSERT(rig.disk().create(i, "", files[i].size()).is_ok());
    std::copy(files[i].begin(), files[i].end(), rig.disk().bytes(i).begin());
  }
  if (const Status status = rig.open(); !status.is_ok()) {
    KVM_ASSERT(!status.message().empty());
    return;
  }
  std::vector<std::string> keys;
  for (const ObjectInfo& info : rig.tier().objects()->list("", 100)) {
    keys.push_back(info.key);
  }
  for (const std::string& key : keys) {
    const auto what = std::find_if(std::begin(kPuts), std::end(kPuts),
                                   [&](const Put& one) { return key == one.key; });
    // Whoever makes checksums match may write what he likes; without, nothing is there that nobody
    // put. "gone" is, where the block that says it went cannot be read.
    KVM_ASSERT(is_sealed || what != std::end(kPuts) || key == "gone");
    rig.read(key, is_sealed || what == std::end(kPuts) ? nullptr : what);
  }
  rig.put({"new", 70, 2, 3'000, 100});
  for (const std::string& key : keys) {
    rig.remove(key);
  }
  rig.remove("new");
  for (uint32_t i = 0; i < kMaxTurns && rig.tier().turn(); ++i) {
  }
  KVM_ASSERT(rig.tier().objects()->list("", 100).empty());
  KVM_ASSERT(rig.tier().used_bytes() == 0);
}

// Places that say most, with what is there.
Seeds disk_files_seeds() {
  const auto seed = [](uint8_t flags, std::initializer_list<DiskPatch> patches) {
    Bytes bytes = {flags};
    for (const DiskPatch& patch : patches) {
      put(&bytes, patch);
      const std::vector<std::byte>& file = files_before()[patch.file];
      for (uint32_t i = 0; i < patch.n_bytes; ++i) {
        bytes.push_back(static_cast<uint8_t>(file[patch.offset + i]));
      }
    }
    return bytes;
  };
  constexpr uint32_t kEnd = DiskTier::kMinSegmentBytes;
  Seeds seeds = {{"as_it_was", {0}}};
  for (const uint8_t flags : {uint8_t{0}, kSealed}) {
    const std::string how = flags == kSealed ? "_sealed" : "";
    // Both copies of the list: its first block, and the next.
    seeds.emplace_back("list" + how, seed(flags, {{kSegments, 0, 200}, {kSegments + 1, 0, 200}}));
    seeds.emplace_back("list_next" + how,
                       seed(flags, {{kSegments, 4096, 200}, {kSegments + 1, 4096, 200}}));
    seeds.emplace_back("segment" + how, seed(flags, {{0, 0, 64}, {1, 0, 64}}));
    seeds.emplace_back("record" + how, seed(flags, {{0, 4096, 80}, {1, 4096, 80}}));
    seeds.emplace_back("table" + how, seed(flags, {{0, kEnd - 200, 200}, {1, kEnd - 200, 200}}));
  }
  return seeds;
}

}  // namespace kvm::testing
