// SPDX-License-Identifier: Apache-2.0
// What a check says of an object is what the next owner of the directories finds, whatever has been
// changed in them; and a check changes nothing.
#include "tiers/disk/disk_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "tests/common/temporary_directory.h"
#include "tests/unit/tiers/object_rig.h"
#include "tiers/disk/crc32c.h"
#include "tiers/disk/directory_set.h"
#include "tiers/disk/disk_view.h"
#include "tiers/disk/manifest.h"
#include "tiers/disk/object_file.h"
#include "tiers/disk/object_transfer.h"

namespace kvm::testing {
namespace {

using namespace tiers;

constexpr uint32_t kPages = 7;
constexpr std::array<const char*, 4> kKeys = {"a", "b", "c", "d"};
constexpr uint32_t kLargeBody = 300'000;  // several chunks

uint32_t body_bytes(size_t i) { return i == 2 ? kLargeBody : 1000; }
uint32_t mark_of(size_t i) { return static_cast<uint32_t>(100 * i); }

using Files = std::map<std::string, std::string>;

Files files_in(const std::vector<std::string>& directories) {
  Files files;
  for (const std::string& directory : directories) {
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      std::ifstream stream(entry.path(), std::ios::binary);
      files[entry.path().string()] = std::string(std::istreambuf_iterator<char>(stream), {});
    }
  }
  return files;
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

class DiskCheckTest : public ::testing::Test {
 protected:
  DiskCheckTest() {
    ObjectRig rig(paths_, 64);
    EXPECT_TRUE(rig.open().is_ok());
    for (size_t i = 0; i < kKeys.size(); ++i) {
      EXPECT_TRUE(rig.put(kKeys[i], mark_of(i), kPages, body_bytes(i)).is_ok());
    }
    EXPECT_TRUE(rig.put("gone", 7, kPages).is_ok());
    EXPECT_TRUE(rig.remove("gone").is_ok());
    rig.tier.reset();
    before_ = files_in(paths_);
  }

  void restore() {
    for (const std::string& path : paths_) {
      for (const auto& entry : std::filesystem::directory_iterator(path)) {
        std::filesystem::remove(entry.path());
      }
    }
    for (const auto& [path, text] : before_) {
      write_file(path, text);
    }
  }
  void spoil(const std::string& path, uint64_t offset, int bit = 3) {
    std::string text = before_.at(path);
    text[offset] = static_cast<char>(text[offset] ^ (1 << bit));
    write_file(path, text);
  }
  std::vector<std::string> files_with(const std::string& part) const {
    std::vector<std::string> found;
    for (const auto& [path, text] : before_) {
      if (path.find(part) != std::string::npos) {
        found.push_back(path);
      }
    }
    return found;
  }
  // The first segment with a table, or without one.
  std::string segment(bool has_table) const {
    for (const std::string& path : files_with(".segment")) {
      const std::string& text = before_.at(path);
      if ((text.substr(text.size() - 64, 4) == "KVMT") == has_table) {
        return path;
      }
    }
    ADD_FAILURE() << "there is none";
    return "";
  }
  Result<DiskCheck> check() {
    KVM_TRY_ASSIGN(const std::unique_ptr<DiskView> view, DiskView::open(paths_));
    Result<DiskCheck> checked = check_disk(view.get(), {});
    keys_.clear();
    for (const FoundObject& object : view->found().objects) {
      keys_.push_back(object.key);
    }
    return checked;
  }
  // Compares it with what an owner finds.
  void expect_as_found(const Result<DiskCheck>& checked) {
    ObjectRig rig(paths_, 64);
    const Status status = rig.open();
    if (!status.is_ok()) {
      EXPECT_TRUE(!checked.is_ok() || checked.value().n_damages != 0) << status.message();
      return;
    }
    ASSERT_TRUE(checked.is_ok()) << checked.status().message();
    EXPECT_EQ(keys_, rig.keys());
    for (size_t i = 0; i < kKeys.size(); ++i) {
      const auto at = std::find(keys_.begin(), keys_.end(), kKeys[i]);
      if (at == keys_.end()) {
        EXPECT_NE(checked.value().n_damages, 0u);
        continue;
      }
      const std::string& damage =
          checked.value().objects[static_cast<size_t>(at - keys_.begin())].damage;
      const Status found = rig.check(kKeys[i], mark_of(i), kPages, body_bytes(i));
      EXPECT_EQ(damage.empty(), found.is_ok())
          << kKeys[i] << ": " << damage << " against " << found.message();
    }
  }

  std::array<TemporaryDirectory, 2> folders_;
  const std::vector<std::string> paths_ = {folders_[0].path(), folders_[1].path()};
  Files before_;
  std::vector<std::string> keys_;  // of the last check
};

TEST_F(DiskCheckTest, OfWhatIsWhole) {
  const Result<DiskCheck> checked = check();
  ASSERT_TRUE(checked.is_ok()) << checked.status().message();
  const DiskCheck& all = checked.value();
  EXPECT_TRUE(all.is_whole());
  ASSERT_EQ(all.objects.size(), kKeys.size());
  EXPECT_EQ(all.n_live_records, kKeys.size() * (kPages + 1) + 2);
  EXPECT_EQ(all.n_damaged_records + all.n_torn_records, 0u);
  EXPECT_GT(all.n_segments, 2u);
  EXPECT_EQ(all.segment_bytes, all.n_segments * kSegment);
  EXPECT_GE(all.n_read_bytes, all.segment_bytes);
  EXPECT_GT(all.n_dead_records, 0u) << "of the object that was removed";
  EXPECT_EQ(files_in(paths_), before_) << "a check changes nothing";
}

TEST_F(DiskCheckTest, BodiesAreLookedAt) {
  const auto view = DiskView::open(paths_);
  ASSERT_TRUE(view.is_ok());
  DiskCheckOptions options;
  uint64_t n_last = 0;
  options.check_body = [&](const FoundObject& object, std::span<const std::byte> body) {
    const size_t i = static_cast<size_t>(object.key[0] - 'a');
    EXPECT_TRUE(std::ranges::equal(body, marked_bytes(mark_of(i), body_bytes(i))));
    return std::string(object.key == "b" ? "it is a b" : "");
  };
  options.on_progress = [&](uint64_t n_read, uint64_t n_all) {
    EXPECT_GT(n_read, n_last);
    EXPECT_LE(n_read, n_all);
    n_last = n_read;
  };
  const Result<DiskCheck> checked = check_disk(view.value().get(), options);
  ASSERT_TRUE(checked.is_ok());
  EXPECT_EQ(checked.value().n_damaged_objects, 1u);
  EXPECT_EQ(checked.value().objects[1].damage, "it is a b");
  EXPECT_GT(n_last, 0u);
}

// Each kind of place: what is said of it, and what of it is lost.
TEST_F(DiskCheckTest, NamesWhatIsDamaged) {
  struct Case {
    std::string path;
    uint64_t offset;
    const char* what;
    bool is_loss;
  };
  const std::string tabled = segment(true);
  const std::string open = segment(false);
  const uint64_t end = kSegment;
  uint64_t n_entries = 0;
  std::memcpy(&n_entries, before_.at(tabled).data() + end - 32, 4);
  const std::vector<std::string> lists = files_with(".manifest");
  const std::vector<Case> cases = {
      {tabled, 4096 + 64 + 100, "the checksum of the page does not match", true},
      {tabled, 4096 + 20, "the checksum of the record's header does not match", true},
      {tabled, 4096, "there is no record", true},
      {tabled, end - table_bytes(n_entries) + 5, "the table of the segment is damaged", false},
      {tabled, end - 64, "the table of the segment is damaged", false},
      {tabled, end - 40, "the table of the segment is damaged", false},
      {tabled, 20, "the header of the segment is damaged", true},
      {open, 4096 + 20, "the header of a record is damaged", true},
      {open, 4096 + 48, "the header of a record is damaged", true},
      {lists.front(), 100, "the other copy has it", false},
      {lists.back(), 100, "the other copy has it", false},
      {files_with("kvm.set")[0], 12, "is damaged", false}};
  for (const Case& one : cases) {
    SCOPED_TRACE(one.path + " at " + std::to_string(one.offset));
    restore();
    spoil(one.path, one.offset);
    const Result<DiskCheck> checked = check();
    ASSERT_TRUE(checked.is_ok()) << checked.status().message();
    const DiskCheck& all = checked.value();
    EXPECT_FALSE(all.is_whole());
    ASSERT_EQ(all.damages.size(), 1u);
    EXPECT_NE(all.damages[0].what.find(one.what), std::string::npos) << all.damages[0].what;
    EXPECT_EQ(all.damages[0].is_loss, one.is_loss);
    EXPECT_EQ(all.n_damaged_objects != 0, one.is_loss);
    for (const CheckedObject& object : all.objects) {
      EXPECT_TRUE(object.damage.empty() || object.damage.find(one.path) != std::string::npos)
          << object.damage;
    }
    expect_as_found(checked);
  }
}

// What lies in a segment whose header is damaged is there yet: an owner does not remove it.
TEST_F(DiskCheckTest, ASegmentWithoutAHeaderStaysWhereItIsNeeded) {
  const std::string path = segment(true);
  spoil(path, 20);
  const Files spoilt = files_in(paths_);
  ObjectRig rig(paths_, 64);
  const Status status = rig.open();
  ASSERT_EQ(status.code(), KVM_ERR_CORRUPT);
  EXPECT_NE(status.message().find(path), std::string::npos) << status.message();
  EXPECT_EQ(files_in(paths_), spoilt);
  // As the sentence says.
  std::filesystem::remove(path);
  ASSERT_TRUE(rig.open().is_ok());
  EXPECT_GT(rig.tier->objects()->recovery().n_lost_objects, 0u);
}

// Behind a record that is damaged others are found, by a check and by an owner.
TEST_F(DiskCheckTest, OneHeaderTakesNoMoreThanItsRecord) {
  spoil(segment(false), 4096 + 20);
  const Result<DiskCheck> checked = check();
  ASSERT_TRUE(checked.is_ok());
  EXPECT_EQ(checked.value().n_damaged_objects, 1u);
  expect_as_found(checked);
}

TEST_F(DiskCheckTest, AnyByteAnywhere) {
  const uint64_t seed = now_ns();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  std::vector<std::string> paths;
  for (const auto& [path, text] : before_) {
    if (!text.empty() && path.find("kvm.lock") == std::string::npos) {
      paths.push_back(path);
    }
  }
  for (uint32_t i = 0; i < 30 && !HasFailure(); ++i) {
    restore();
    const std::string& path = paths[random() % paths.size()];
    const std::string& text = before_.at(path);
    // What is there, rather than what never was: and its beginning and end more often.
    uint64_t offset = random() % text.size();
    offset = i % 3 == 0   ? offset % 4300 % text.size()
             : i % 3 == 1 ? text.size() - 1 - offset % 200 % text.size()
                          : offset;
    SCOPED_TRACE(path + " at " + std::to_string(offset));
    spoil(path, offset, static_cast<int>(random() % 8));
    expect_as_found(check());
  }
}

TEST_F(DiskCheckTest, FilesThatAreCutOffOrGone) {
  for (const std::string& path : {segment(true), segment(false)}) {
    for (const uint64_t size : {uint64_t{0}, kSegment - 1}) {
      SCOPED_TRACE(path + " of " + std::to_string(size));
      restore();
      std::filesystem::resize_file(path, size);
      const Result<DiskCheck> checked = check();
      ASSERT_TRUE(checked.is_ok());
      EXPECT_FALSE(checked.value().is_whole());
      EXPECT_GT(checked.value().n_damaged_objects, 0u);
      const Files cut = files_in(paths_);
      ObjectRig rig(paths_, 64);
      const Status status = rig.open();
      EXPECT_EQ(status.code(), KVM_ERR_CORRUPT);
      EXPECT_NE(status.message().find(path), std::string::npos) << status.message();
      EXPECT_EQ(files_in(paths_), cut) << "nothing is removed";
    }
    restore();
    std::filesystem::remove(path);
    expect_as_found(check());
  }
  for (const std::string& path : files_with(".manifest")) {
    restore();
    std::filesystem::resize_file(path, 4096 + 100);
    expect_as_found(check());
    restore();
    std::filesystem::resize_file(path, 0);
    const Result<DiskCheck> emptied = check();
    ASSERT_TRUE(emptied.is_ok());
    EXPECT_EQ(emptied.value().n_damages, 1u);
    expect_as_found(emptied);
    restore();
    std::filesystem::remove(path);
    const Result<DiskCheck> checked = check();
    ASSERT_TRUE(checked.is_ok());
    ASSERT_EQ(checked.value().n_damages, 1u);
    EXPECT_EQ(checked.value().damages[0].path, path) << "the file that is missing";
    EXPECT_FALSE(checked.value().damages[0].offset.has_value());
    EXPECT_EQ(checked.value().n_damaged_objects, 0u);
    ObjectRig rig(paths_, 64);
    ASSERT_TRUE(rig.open().is_ok());
    EXPECT_EQ(rig.tier->stats().list_fault, path + " is not there");
    rig.tier.reset();
    restore();
    std::filesystem::remove(path);
    expect_as_found(checked);
  }
  restore();
  for (const std::string& path : files_with(".manifest")) {
    write_file(path, std::string(before_.at(path).size(), 'x'));
  }
  const Result<DiskCheck> unread = check();
  ASSERT_TRUE(unread.is_ok());
  EXPECT_EQ(unread.value().n_damages, 1u);
  expect_as_found(unread);
  for (const std::string& path : files_with(".manifest")) {
    std::filesystem::remove(path);
  }
  const Result<DiskCheck> gone = check();
  ASSERT_TRUE(gone.is_ok());
  EXPECT_EQ(gone.value().n_damages, 1u);
  EXPECT_TRUE(gone.value().damages[0].is_loss);
  EXPECT_FALSE(gone.value().damages[0].offset.has_value());
  expect_as_found(gone);
}

// With the list and all that says that there was one.
TEST_F(DiskCheckTest, AListThatIsGoneIsToldFromNone) {
  const auto remove_list = [&] {
    for (const char* const part : {".manifest", "kvm.set"}) {
      for (const std::string& path : files_with(part)) {
        std::filesystem::remove(path);
      }
    }
  };
  const auto expect_missed = [&] {
    const Result<DiskCheck> checked = check();
    ASSERT_TRUE(checked.is_ok()) << checked.status().message();
    EXPECT_FALSE(checked.value().is_whole());
    ASSERT_EQ(checked.value().damages.size(), 1u);
    const DiskDamage& damage = checked.value().damages[0];
    EXPECT_NE(damage.what.find("neither a list"), std::string::npos) << damage.what;
    EXPECT_EQ(damage.path, paths_[0]);
    EXPECT_TRUE(damage.is_loss);
    EXPECT_FALSE(damage.offset.has_value());
  };
  remove_list();
  expect_missed();
  // Only one of a later run is left.
  restore();
  {
    ObjectRig rig(paths_, 64);
    ASSERT_TRUE(rig.open().is_ok());
    rig.write(7);
    before_ = files_in(paths_);
  }
  restore();
  remove_list();
  for (const std::string& path : files_with(".segment")) {
    SegmentHeader header;
    std::memcpy(&header, before_.at(path).data(), sizeof(header));
    if (header.run_number == 1) {
      std::filesystem::remove(path);
    }
  }
  expect_missed();
  // An owner that was killed, and had kept nothing.
  const TemporaryDirectory other;
  const TemporaryDirectory copy;
  ObjectRig rig({other.path()}, 8);
  ASSERT_TRUE(rig.open().is_ok());
  for (uint32_t i = 0; i < 40; ++i) {
    rig.write(i);
  }
  for (const auto& [path, text] : files_in({other.path()})) {
    write_file(copy / std::filesystem::path(path).filename().string(), text);
  }
  const auto view = DiskView::open({copy.path()});
  ASSERT_TRUE(view.is_ok());
  const Result<DiskCheck> checked = check_disk(view.value().get(), {});
  ASSERT_TRUE(checked.is_ok());
  EXPECT_TRUE(checked.value().is_whole());
  EXPECT_GT(checked.value().n_segments, 2u);
}

// A crash between the removals of the two copies of a list that is empty loses nothing.
TEST_F(DiskCheckTest, AnEmptyListOnItsWayOutIsNotMissed) {
  {
    ObjectRig rig(paths_, 64);
    ASSERT_TRUE(rig.open().is_ok());
    for (const char* const key : kKeys) {
      ASSERT_TRUE(rig.remove(key).is_ok());
    }
    before_ = files_in(paths_);
  }
  std::vector<std::string> lists;
  for (const std::string& path : files_with(".manifest")) {
    lists.push_back(path);
  }
  ASSERT_EQ(lists.size(), 2u);
  for (const bool is_given_up : {true, false}) {
    SCOPED_TRACE(is_given_up);
    restore();
    for (const std::string& path : files_with(".segment")) {
      std::filesystem::remove(path);
    }
    for (const std::string& path : files_with("kvm.set")) {
      SetMark mark;
      std::memcpy(&mark, before_.at(path).data(), sizeof(mark));
      ASSERT_EQ(mark.has_list, 1u);
      mark.has_list = is_given_up ? 0 : 1;
      mark.mark_crc = crc32c(std::as_bytes(std::span(&mark, 1)).first(offsetof(SetMark, mark_crc)));
      write_file(path, std::string(reinterpret_cast<const char*>(&mark), sizeof(mark)));
    }
    std::filesystem::remove(lists[0]);
    const Result<DiskCheck> checked = check();
    ASSERT_TRUE(checked.is_ok()) << checked.status().message();
    EXPECT_EQ(checked.value().is_whole(), is_given_up);
    ObjectRig rig(paths_, 64);
    ASSERT_TRUE(rig.open().is_ok());
    EXPECT_EQ(rig.tier->stats().list_fault.empty(), is_given_up);
    EXPECT_TRUE(rig.keys().empty());
  }
}

// The last block of a list: whether it was being written or has been damaged, its bytes tell.
TEST(ManifestTest, WhatWasBeingWrittenIsToldFromDamage) {
  using Kind = ManifestFault::Kind;
  constexpr uint64_t kNumber = 5;
  const std::string label(1000, 'l');
  ManifestWriter start(kNumber, 0, 1);
  start.add({.header = {.first_chunk = 1}, .key = "a", .label = label});
  start.end();
  ManifestWriter change(kNumber, 1, 1);
  change.add({.header = {.first_chunk = 2}, .key = "b", .label = label});
  change.end();
  std::vector<std::byte> whole(start.bytes().begin(), start.bytes().end());
  whole.insert(whole.end(), change.bytes().begin(), change.bytes().end());
  whole.resize(kMinManifestBlocks * kManifestBlockBytes);
  constexpr uint64_t kLast = kManifestBlockBytes;

  struct Case {
    const char* what;
    std::function<void(std::vector<std::byte>*)> spoil[kManifestCopies];
    uint64_t n_torn;
    uint64_t n_damaged;
    std::vector<Kind> faults;
  };
  const auto nothing = [](std::vector<std::byte>*) {};
  const auto gone = [](std::vector<std::byte>* copy) { copy->clear(); };
  const auto flip = [](uint64_t at) {
    return [at](std::vector<std::byte>* copy) { (*copy)[at] ^= std::byte{4}; };
  };
  const auto cut = [](uint64_t sector) {
    return [sector](std::vector<std::byte>* copy) {
      std::fill_n(copy->begin() + static_cast<ptrdiff_t>(kLast + 512 * sector), 512, std::byte{});
    };
  };
  const std::vector<Case> cases = {
      {"whole", {nothing, nothing}, 0, 0, {}},
      {"one copy is damaged", {nothing, flip(kLast + 700)}, 0, 0, {Kind::kOneCopy}},
      {"one copy had not come to its end", {cut(1), nothing}, 0, 0, {}},
      {"neither had", {cut(1), cut(0)}, 1, 0, {}},
      {"both are damaged",
       {flip(kLast + 700), flip(kLast + 600)},
       0,
       1,
       {Kind::kBothCopies, Kind::kBothCopies}},
      {"their headers are",
       {flip(kLast + 9), flip(kLast + 61)},
       0,
       1,
       {Kind::kBothCopies, Kind::kBothCopies}},
      {"one is gone, the other damaged", {gone, flip(kLast + 700)}, 0, 1, {Kind::kBothCopies}},
      {"the other had not come to its end", {gone, cut(2)}, 1, 0, {}},
      {"where nothing was written",
       {flip(2 * kLast + 100), flip(3 * kLast + 900)},
       0,
       0,
       {Kind::kUnused, Kind::kUnused}},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.what);
    std::vector<std::byte> copies[kManifestCopies] = {whole, whole};
    for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
      one.spoil[copy](&copies[copy]);
    }
    ManifestState state;
    bool counted = false;
    ASSERT_TRUE(read_manifest({copies[0], copies[1]}, &state, &counted));
    EXPECT_EQ(state.n_torn_blocks, one.n_torn);
    EXPECT_EQ(state.n_damaged_blocks, one.n_damaged);
    std::vector<Kind> kinds;
    for (const ManifestFault& fault : find_manifest_faults({copies[0], copies[1]}, kNumber)) {
      kinds.push_back(fault.kind);
    }
    EXPECT_EQ(kinds, one.faults);
  }
}

// What an owner tells of what it has found.
TEST_F(DiskCheckTest, AnOwnerSaysWhatIsDamaged) {
  const std::string list = files_with(".manifest").front();
  spoil(list, 100);
  ObjectRig rig(paths_, 64);
  ASSERT_TRUE(rig.open().is_ok());
  EXPECT_EQ(rig.tier->stats().list_fault, list + " is damaged");
  EXPECT_EQ(rig.tier->stats().corruption, "");
  rig.tier.reset();
  restore();
  const std::string path = segment(true);
  spoil(path, 4096 + 64 + 100);
  ASSERT_TRUE(rig.open().is_ok());
  EXPECT_EQ(rig.tier->stats().list_fault, "");
  for (size_t i = 0; i < kKeys.size(); ++i) {
    (void)rig.check(kKeys[i], mark_of(i), kPages, body_bytes(i));
  }
  const DiskTierStats stats = rig.tier->stats();
  EXPECT_EQ(stats.n_corrupt, 1u);
  EXPECT_NE(stats.corruption.find(path), std::string::npos) << stats.corruption;
  EXPECT_NE(stats.corruption.find("4096"), std::string::npos) << stats.corruption;
}

// The only one, too.
TEST_F(DiskCheckTest, ASegmentSaysHowLargeItWasMade) {
  std::vector<SegmentOnDisk> one = {{.path = "a", .size_bytes = kSegment, .made_bytes = kSegment}};
  EXPECT_TRUE(take_cut_segments(&one).empty());
  one[0].size_bytes = kSegment / 2;
  ASSERT_EQ(take_cut_segments(&one).size(), 1u);
  EXPECT_TRUE(one.empty());
  // Two whose headers cannot be read, and one that was cut off.
  std::vector<SegmentOnDisk> three = {{.path = "a", .size_bytes = kSegment / 2},
                                      {.path = "b", .size_bytes = kSegment},
                                      {.path = "c", .size_bytes = 100}};
  const std::vector<SegmentOnDisk> cut = take_cut_segments(&three);
  ASSERT_EQ(cut.size(), 2u);
  EXPECT_EQ(three[0].path, "b");
}

TEST_F(DiskCheckTest, WhatCannotBeLookedAt) {
  EXPECT_EQ(DiskView::open({paths_[0]}).status().code(), KVM_ERR_INVALID);
  EXPECT_EQ(DiskView::open({paths_[0], paths_[1], paths_[0]}).status().code(), KVM_ERR_INVALID);
  const TemporaryDirectory other;
  EXPECT_EQ(DiskView::open({other.path()}).status().code(), KVM_ERR_NOT_FOUND);
  EXPECT_EQ(DiskView::open({other / "none"}).status().code(), KVM_ERR_NOT_FOUND);
  ObjectRig rig(paths_, 64);
  {
    const auto view = DiskView::open(paths_);
    const auto second = DiskView::open(paths_);
    EXPECT_TRUE(view.is_ok() && second.is_ok()) << "who only looks disturbs no other";
    EXPECT_EQ(rig.open().code(), KVM_ERR_BUSY);
  }
  ASSERT_TRUE(rig.open().is_ok());
  const Status status = DiskView::open(paths_).status();
  EXPECT_EQ(status.code(), KVM_ERR_BUSY);
  EXPECT_NE(status.message().find(paths_[0]), std::string::npos);
}

// Out of the directories into a file, and into others: what comes back is what was put.
TEST_F(DiskCheckTest, ObjectsAreCarriedElsewhere) {
  std::array<TemporaryDirectory, 3> elsewhere;
  const std::string file = elsewhere[2] / "file";
  ObjectRig rig({elsewhere[0].path(), elsewhere[1].path()}, 64);
  ASSERT_TRUE(rig.open().is_ok());
  for (size_t i = 0; i < kKeys.size(); ++i) {
    const auto view = DiskView::open(paths_);
    ASSERT_TRUE(view.is_ok());
    const FoundObject* const object = view.value()->object(kKeys[i]);
    ASSERT_NE(object, nullptr);
    const auto bytes = export_object(view.value().get(), *object, file, true, {});
    ASSERT_TRUE(bytes.is_ok()) << bytes.status().message();
    EXPECT_EQ(std::filesystem::file_size(file), bytes.value());
    auto reader = ObjectFileReader::open(file);
    ASSERT_TRUE(reader.is_ok());
    EXPECT_EQ(reader.value().head().label, std::string("label of ") + kKeys[i]);
    const SlowTier& tier = *rig.tier;
    const uint64_t n_before = tier.used_bytes();
    const Status status = import_object(rig.tier.get(), &reader.value(), kKeys[i], {});
    ASSERT_TRUE(status.is_ok()) << status.message();
    EXPECT_LE(tier.used_bytes() - n_before, import_bytes(reader.value().head()));
  }
  rig.tier.reset();
  ASSERT_TRUE(rig.open().is_ok());
  for (size_t i = 0; i < kKeys.size(); ++i) {
    EXPECT_TRUE(rig.check(kKeys[i], mark_of(i), kPages, body_bytes(i)).is_ok());
  }
  // One that is damaged stays where it is.
  spoil(segment(true), 4096 + 64 + 100);
  const auto view = DiskView::open(paths_);
  ASSERT_TRUE(view.is_ok());
  std::filesystem::remove(file);
  size_t n_refused = 0;
  for (const FoundObject& object : view.value()->found().objects) {
    const auto bytes = export_object(view.value().get(), object, file, true, {});
    n_refused += bytes.is_ok() ? 0 : 1;
    EXPECT_TRUE(bytes.is_ok() || bytes.status().code() == KVM_ERR_CORRUPT ||
                bytes.status().code() == KVM_ERR_LOST);
    EXPECT_EQ(std::filesystem::exists(file), bytes.is_ok());
    std::filesystem::remove(file);
  }
  EXPECT_EQ(n_refused, 1u);
}

// Nothing is left of one that is damaged, or that there is no room for.
TEST_F(DiskCheckTest, WhatIsNotImportedLeavesNothing) {
  const TemporaryDirectory elsewhere;
  const TemporaryDirectory small;
  const std::string file = elsewhere / "file";
  {
    const auto view = DiskView::open(paths_);
    ASSERT_TRUE(view.is_ok());
    ASSERT_TRUE(
        export_object(view.value().get(), *view.value()->object("c"), file, false, {}).is_ok());
  }
  ObjectRig rig({small.path()}, 2);
  ASSERT_TRUE(rig.open().is_ok());
  const SlowTier& tier = *rig.tier;
  auto reader = ObjectFileReader::open(file);
  ASSERT_TRUE(reader.is_ok());
  EXPECT_EQ(import_object(rig.tier.get(), &reader.value(), "c", {}).code(), KVM_ERR_NO_SPACE);
  EXPECT_EQ(tier.used_bytes(), 0u);
  std::string text = files_in({elsewhere.path()})[file];
  text[text.size() - 40'000] ^= 1;
  write_file(file, text);
  auto spoilt = ObjectFileReader::open(file);
  ASSERT_TRUE(spoilt.is_ok());
  EXPECT_EQ(import_object(rig.tier.get(), &spoilt.value(), "c", {}).code(), KVM_ERR_CORRUPT);
  EXPECT_EQ(tier.used_bytes(), 0u);
  EXPECT_TRUE(rig.keys().empty());
}

}  // namespace
}  // namespace kvm::testing
