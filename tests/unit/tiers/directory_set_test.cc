// SPDX-License-Identifier: Apache-2.0
// Directories that belong together: whatever of them is named, and whatever of their marks a crash
// has left, what lies in them is found whole, or nothing is touched.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "tests/common/temporary_directory.h"
#include "tests/unit/tiers/object_rig.h"
#include "tiers/disk/crc32c.h"
#include "tiers/disk/directory_set.h"
#include "tiers/disk/disk_check.h"
#include "tiers/disk/disk_view.h"

namespace kvm::testing {
namespace {

using tiers::SetMark;

using Files = std::map<std::string, std::string>;

// What is in directories, but for who owns them.
Files files_in(const std::vector<std::string>& directories) {
  Files files;
  for (const std::string& directory : directories) {
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      if (entry.path().filename() != "kvm.lock") {
        std::ifstream stream(entry.path(), std::ios::binary);
        files[entry.path().string()] = std::string(std::istreambuf_iterator<char>(stream), {});
      }
    }
  }
  return files;
}

SetMark mark_in(const std::string& directory) {
  SetMark mark;
  std::ifstream stream(directory + "/kvm.set", std::ios::binary);
  stream.read(reinterpret_cast<char*>(&mark), sizeof(mark));
  EXPECT_TRUE(stream.good()) << directory;
  return mark;
}

void write_mark(const std::string& directory, SetMark mark) {
  mark.mark_crc = tiers::crc32c(std::as_bytes(std::span(&mark, 1)).first(60));
  std::ofstream stream(directory + "/kvm.set", std::ios::binary | std::ios::trunc);
  stream.write(reinterpret_cast<const char*>(&mark), sizeof(mark));
}

// Objects of which each lies in several directories: the first chunk in one, pages in others.
constexpr std::array<const char*, 3> kKeys = {"a", "b", "c"};
constexpr uint32_t kPages = 11;

void fill(ObjectRig* rig) {
  for (uint32_t i = 0; i < kKeys.size(); ++i) {
    ASSERT_TRUE(rig->put(kKeys[i], 100 * i, kPages).is_ok());
  }
}

void expect_filled(ObjectRig* rig) {
  EXPECT_EQ(rig->tier->objects()->recovery().n_lost_objects, 0u);
  for (uint32_t i = 0; i < kKeys.size(); ++i) {
    const Status status = rig->check(kKeys[i], 100 * i, kPages);
    EXPECT_TRUE(status.is_ok()) << kKeys[i] << ": " << status.message();
  }
}

class DirectorySetTest : public ::testing::Test {
 protected:
  std::vector<std::string> paths(size_t n) const {
    std::vector<std::string> all;
    for (size_t i = 0; i < n; ++i) {
      all.push_back(folders_[i].path());
    }
    return all;
  }
  // All that a user may want of them is there.
  void expect_whole(const std::vector<std::string>& directories) {
    ObjectRig rig(directories, 32);
    const Status status = rig.open();
    ASSERT_TRUE(status.is_ok()) << status.message();
    expect_filled(&rig);
  }
  void expect_refused(const std::vector<std::string>& directories, const std::string& reason,
                      kvm_status code = KVM_ERR_INVALID) {
    const Files before = files_in(paths(folders_.size()));
    ObjectRig rig(directories, 32);
    const Status status = rig.open();
    ASSERT_EQ(status.code(), code) << status.message();
    EXPECT_NE(status.message().find(reason), std::string::npos) << status.message();
    EXPECT_EQ(files_in(paths(folders_.size())), before);
  }
  void make(size_t n) {
    ObjectRig rig(paths(n), 32);
    ASSERT_TRUE(rig.open().is_ok());
    fill(&rig);
  }

  std::array<TemporaryDirectory, 5> folders_;
};

// Every choice of three, in every place of which an empty one may stand.
TEST_F(DirectorySetTest, WithOneMissingIsRefusedAndNothingIsTouched) {
  make(3);
  const std::string empty = folders_[3].path();
  for (uint32_t there = 1; there < 7; ++there) {
    std::vector<std::string> some;
    std::vector<std::string> filled_up;
    for (uint32_t d = 0; d < 3; ++d) {
      const bool is_there = (there >> d & 1) != 0;
      filled_up.push_back(is_there ? folders_[d].path() : folders_[d + 2].path());
      if (is_there) {
        some.push_back(folders_[d].path());
      }
    }
    SCOPED_TRACE(there);
    expect_refused(some, "3 directories that belong together");
    some.push_back(empty);
    expect_refused(some, "not one of them is " + empty);
  }
  std::vector<std::string> turned = paths(3);
  do {
    expect_whole(turned);
  } while (std::next_permutation(turned.begin(), turned.end()));
}

TEST_F(DirectorySetTest, GrowsAndThenNeedsAll) {
  make(2);
  expect_whole(paths(4));
  expect_refused(paths(2), "4 directories");
  expect_refused(paths(3), "4 directories");
  expect_whole(paths(4));
}

TEST_F(DirectorySetTest, EndsWithItsObjects) {
  make(3);
  {
    ObjectRig rig(paths(3), 32);
    ASSERT_TRUE(rig.open().is_ok());
    for (const char* key : kKeys) {
      ASSERT_TRUE(rig.remove(key).is_ok());
    }
  }
  EXPECT_TRUE(files_in(paths(3)).empty());
  ObjectRig rig(paths(1), 32);
  EXPECT_TRUE(rig.open().is_ok());
  EXPECT_TRUE(files_in(paths(3)).empty()) << "without objects nothing belongs together";
}

// All copies of the list: gone, cut to nothing, or with nothing in them that can be read.
TEST_F(DirectorySetTest, WhoseListIsLostIsNotBegunAnew) {
  {
    ObjectRig rig(paths(3), 32);
    ASSERT_TRUE(rig.open().is_ok());
    ASSERT_TRUE(rig.put("a", 0, kPages).is_ok()) << "one block of a list";
  }
  std::vector<std::string> lists;
  for (const auto& [path, text] : files_in(paths(3))) {
    if (path.ends_with(".manifest")) {
      lists.push_back(path);
    }
  }
  ASSERT_EQ(lists.size(), 2u);
  const Files before = files_in(paths(3));
  const auto restore = [&] {
    for (const std::string& path : lists) {
      std::ofstream(path, std::ios::binary | std::ios::trunc) << before.at(path);
    }
  };
  for (const std::string& path : lists) {
    std::filesystem::remove(path);
  }
  expect_refused(paths(3), "is not there", KVM_ERR_CORRUPT);
  for (const std::string& path : lists) {
    std::ofstream(path, std::ios::binary).flush();
  }
  expect_refused(paths(3), "is damaged", KVM_ERR_CORRUPT);
  for (const size_t at : {0, 8, 16, 63, 100}) {
    restore();
    for (const std::string& path : lists) {
      std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
      stream.seekp(static_cast<std::streamoff>(at));
      stream.put(static_cast<char>(before.at(path)[at] ^ 0x20));
    }
    expect_refused(paths(3), "is damaged", KVM_ERR_CORRUPT);
  }
  restore();
  ObjectRig rig(paths(3), 32);
  ASSERT_TRUE(rig.open().is_ok());
  EXPECT_TRUE(rig.check("a", 0, kPages).is_ok());
  // As the sentence says.
  rig.tier.reset();
  for (const std::string& path : paths(3)) {
    std::filesystem::remove(path + "/kvm.set");
  }
  for (const std::string& path : lists) {
    std::filesystem::remove(path);
  }
  ASSERT_TRUE(rig.open().is_ok());
  EXPECT_TRUE(rig.keys().empty());
}

// Whatever marks say of the list: where it is there, it counts, and then all say so.
TEST_F(DirectorySetTest, WhoseListIsThereNeedsNoMarkOfIt) {
  make(3);
  for (uint32_t noted = 0; noted < 8; ++noted) {
    for (uint32_t d = 0; d < 3; ++d) {
      SetMark mark = mark_in(paths(3)[d]);
      EXPECT_EQ(mark.has_list, 1u);
      mark.has_list = noted >> d & 1;
      write_mark(paths(3)[d], mark);
    }
    expect_whole(paths(3));
  }
}

// An end at which the marks cannot be written leaves an empty list, and marks that fit it.
TEST_F(DirectorySetTest, WhoseEndFailsKeepsItsList) {
  for (uint32_t blocked = 0; blocked < 3; ++blocked) {
    const std::string obstacle = folders_[blocked] / "kvm.set.new";
    {
      ObjectRig rig(paths(3), 32);
      const Status status = rig.open();
      ASSERT_TRUE(status.is_ok()) << status.message();
      ASSERT_TRUE(rig.put("a", 0, kPages).is_ok());
      ASSERT_TRUE(rig.remove("a").is_ok());
      std::filesystem::create_directory(obstacle);
    }
    std::filesystem::remove(obstacle);
    EXPECT_FALSE(files_in(paths(3)).empty());
  }
  {
    ObjectRig rig(paths(3), 32);
    ASSERT_TRUE(rig.open().is_ok());
    EXPECT_TRUE(rig.keys().empty());
  }
  EXPECT_TRUE(files_in(paths(3)).empty());
}

// Names count up from the same number in every service: what one that was killed has left in a
// directory that joins must not be taken for what the set has under that name.
TEST_F(DirectorySetTest, TakesNothingThatADirectoryHadBeforeItJoined) {
  for (const bool is_first : {false, true}) {
    make(1);
    const std::string other = folders_[2].path();
    {
      // The same keys and sizes, other pages.
      ObjectRig rig({other}, 32);
      ASSERT_TRUE(rig.open().is_ok());
      for (uint32_t i = 0; i < kKeys.size(); ++i) {
        ASSERT_TRUE(rig.put(kKeys[i], 100 * i + 1, kPages).is_ok());
      }
    }
    for (const auto& [path, text] : files_in({other})) {
      if (!path.ends_with(".segment")) {
        std::filesystem::remove(path);
      }
    }
    ASSERT_FALSE(files_in({other}).empty());
    const std::vector<std::string> both =
        is_first ? std::vector{other, folders_[0].path()} : std::vector{folders_[0].path(), other};
    {
      const auto view = tiers::DiskView::open(both);
      ASSERT_TRUE(view.is_ok());
      const auto checked = tiers::check_disk(view.value().get(), {});
      ASSERT_TRUE(checked.is_ok());
      EXPECT_TRUE(checked.value().is_whole());
    }
    expect_whole(both);
    ObjectRig rig(both, 32);
    ASSERT_TRUE(rig.open().is_ok());
    for (const char* key : kKeys) {
      ASSERT_TRUE(rig.remove(key).is_ok());
    }
    rig.tier.reset();
    ASSERT_TRUE(files_in(paths(folders_.size())).empty());
  }
}

// As on a drive that is full. What marks say of the list is written when it can be.
TEST_F(DirectorySetTest, NeedsNoMarkOfTheListToGoOn) {
  make(2);
  for (const std::string& path : paths(2)) {
    SetMark mark = mark_in(path);
    mark.has_list = 0;
    write_mark(path, mark);
  }
  const std::string obstacle = folders_[1] / "kvm.set.new";
  std::filesystem::create_directory(obstacle);
  for (uint32_t life = 0; life < 2; ++life) {
    ObjectRig rig(paths(2), 32);
    const Status status = rig.open();
    ASSERT_TRUE(status.is_ok()) << status.message();
    expect_filled(&rig);
    EXPECT_TRUE(rig.tier->stats().is_list_unmarked);
    ASSERT_TRUE(rig.put("more", 7, kPages).is_ok());
    EXPECT_TRUE(rig.tier->stats().is_list_unmarked);
    ASSERT_TRUE(rig.remove("more").is_ok());
  }
  std::filesystem::remove(obstacle);
  ObjectRig rig(paths(2), 32);
  ASSERT_TRUE(rig.open().is_ok());
  EXPECT_FALSE(rig.tier->stats().is_list_unmarked);
  EXPECT_EQ(mark_in(folders_[1].path()).has_list, 1u);
}

// A list that cannot be opened is no list that is not there, whatever the marks say.
TEST_F(DirectorySetTest, WhoseListCannotBeOpenedIsRefused) {
  make(2);
  for (const auto& [path, text] : files_in(paths(2))) {
    if (path.ends_with(".manifest")) {
      std::filesystem::rename(path, path + ".kept");
      std::filesystem::create_directory(path);
    }
  }
  for (const uint32_t has_list : {1u, 0u}) {
    for (const std::string& path : paths(2)) {
      SetMark mark = mark_in(path);
      mark.has_list = has_list;
      write_mark(path, mark);
    }
    const auto segments = [&] {
      size_t n = 0;
      for (const std::string& path : paths(2)) {
        for (const auto& entry : std::filesystem::directory_iterator(path)) {
          n += entry.path().extension() == ".segment" ? 1 : 0;
        }
      }
      return n;
    };
    const size_t n_before = segments();
    ObjectRig rig(paths(2), 32);
    const Status status = rig.open();
    EXPECT_EQ(status.code(), KVM_ERR_IO) << status.message();
    EXPECT_NE(status.message().find(".manifest"), std::string::npos) << status.message();
    EXPECT_EQ(segments(), n_before);
  }
}

// At a block, in both copies: what was put last would be missing without a word.
TEST_F(DirectorySetTest, WhoseListWasCutOffIsRefused) {
  make(2);
  for (const uint64_t size : {uint64_t{8192}, uint64_t{5000}, uint64_t{63 * 4096}}) {
    for (const auto& [path, text] : files_in(paths(2))) {
      if (path.ends_with(".manifest")) {
        std::filesystem::resize_file(path, size);
      }
    }
    expect_refused(paths(2), "is damaged", KVM_ERR_CORRUPT);
  }
}

// Files whose making a kill has cut short are none.
TEST_F(DirectorySetTest, RemovesWhatWasBeingMade) {
  make(2);
  for (const char* name :
       {"kvm-00000.segment.new", "kvm-00077.segment.new", "kvm-1-0.manifest.new"}) {
    std::ofstream(folders_[1] / name).flush();
  }
  expect_whole(paths(2));
  for (const auto& [path, text] : files_in(paths(2))) {
    EXPECT_FALSE(path.ends_with(".new")) << path;
  }
}

TEST_F(DirectorySetTest, WithoutMarksIsWhatIsNamed) {
  make(3);
  for (const std::string& path : paths(2)) {
    std::filesystem::remove(path + "/kvm.set");
  }
  ObjectRig rig(paths(2), 32);
  ASSERT_TRUE(rig.open().is_ok());
  const tiers::RecoveryReport report = rig.tier->objects()->recovery();
  EXPECT_EQ(report.n_objects, kKeys.size());
  EXPECT_GT(report.n_lost_objects, 0u);
  rig.tier.reset();
  EXPECT_EQ(mark_in(folders_[0].path()).n_directories, 2u);
  expect_refused({folders_[0].path()}, "2 directories");
}

TEST_F(DirectorySetTest, OfTwoServicesIsRefused) {
  make(2);
  {
    ObjectRig other({folders_[2].path(), folders_[3].path()}, 32);
    ASSERT_TRUE(other.open().is_ok());
    fill(&other);
  }
  expect_refused(paths(4), "of two services");
  expect_whole(paths(2));
}

TEST_F(DirectorySetTest, WithACopyOfOneIsRefused) {
  make(2);
  std::filesystem::copy(folders_[1].path(), folders_[2].path(),
                        std::filesystem::copy_options::recursive);
  expect_refused(paths(3), "is a copy of");
}

TEST_F(DirectorySetTest, OfALaterVersionIsRefused) {
  make(2);
  SetMark mark = mark_in(folders_[1].path());
  ++mark.version;
  write_mark(folders_[1].path(), mark);
  const Files before = files_in(paths(2));
  ObjectRig rig(paths(2), 32);
  EXPECT_EQ(rig.open().code(), KVM_ERR_VERSION);
  EXPECT_EQ(files_in(paths(2)), before);
}

// A mark that cannot be written leaves a set, which others join in the same life.
TEST_F(DirectorySetTest, WhoseEndFailsGrowsAsItself) {
  for (const size_t blocked : {0, 1}) {
    for (const size_t n_members : {3, 5}) {
      SCOPED_TRACE(std::to_string(blocked) + " blocked, " + std::to_string(n_members) + " members");
      {
        Result<tiers::DirectorySet> two = tiers::DirectorySet::find(paths(2));
        ASSERT_TRUE(two.is_ok() && two.value().mark().is_ok());
      }
      Result<tiers::DirectorySet> set = tiers::DirectorySet::find(paths(n_members));
      ASSERT_TRUE(set.is_ok()) << set.status().message();
      // Where the next mark of it is to be written something lies that is no file.
      const std::string obstacle = folders_[blocked] / "kvm.set.new";
      std::filesystem::create_directory(obstacle);
      set.value().unmark();
      EXPECT_TRUE(set.value().is_any());
      ASSERT_TRUE(tiers::DirectorySet::find(paths(2)).is_ok()) << "after a crash now";
      EXPECT_EQ(set.value().mark().code(), KVM_ERR_IO);
      std::filesystem::remove(obstacle);
      ASSERT_TRUE(set.value().mark().is_ok());
      const Result<tiers::DirectorySet> found = tiers::DirectorySet::find(paths(n_members));
      ASSERT_TRUE(found.is_ok()) << found.status().message();
      for (size_t i = 0; i < n_members; ++i) {
        EXPECT_TRUE(found.value().is_member(i)) << i;
        EXPECT_EQ(mark_in(folders_[i].path()).set_id, mark_in(folders_[0].path()).set_id);
      }
      set.value().unmark();
      EXPECT_TRUE(files_in(paths(n_members)).empty());
    }
  }
}

// As many steps of marking n directories, of which n_before are marked, as a crash lets be.
// Each step writes one mark: of those that join, and then of all.
void mark_in_part(const std::vector<std::string>& directories, uint32_t n_before, uint32_t n_steps,
                  uint64_t set_id, uint64_t growth_id) {
  const auto n = static_cast<uint32_t>(directories.size());
  for (uint32_t step = 0; step < n_steps; ++step) {
    const bool is_joining = step < n - n_before;
    const uint32_t d = is_joining ? n_before + step : step - (n - n_before);
    write_mark(directories[d], {.set_id = set_id,
                                .index = d,
                                .n_directories = is_joining ? n_before : n,
                                .growth_id = growth_id});
  }
}

// A crash of the first save, before there is a list of objects, and one of its end.
TEST_F(DirectorySetTest, ThatIsHalfMadeHoldsNothingYet) {
  for (uint32_t n_steps = 0; n_steps <= 6; ++n_steps) {
    for (const bool is_ending : {false, true}) {
      SCOPED_TRACE(std::to_string(n_steps) + (is_ending ? " of its end" : ""));
      mark_in_part(paths(3), 0, is_ending ? 6 : n_steps, 7, 70);
      for (uint32_t d = 0; is_ending && d < 3; ++d) {
        if (d + 3 < n_steps) {
          std::filesystem::remove(paths(3)[d] + "/kvm.set");
        } else if (d < n_steps) {
          write_mark(paths(3)[d], {.set_id = 7, .index = d, .n_directories = 0, .growth_id = 70});
        }
      }
      ObjectRig rig(paths(3), 32);
      const Status status = rig.open();
      ASSERT_TRUE(status.is_ok()) << status.message();
      ASSERT_TRUE(rig.put("a", 1, 5).is_ok());
      ASSERT_TRUE(rig.remove("a").is_ok());
    }
  }
  EXPECT_TRUE(files_in(paths(3)).empty());
}

// A crash while two directories join two others. Those that were there before are whole without the
// new ones for as long as no mark names these, and others may join instead.
TEST_F(DirectorySetTest, ThatIsHalfGrownLosesNothing) {
  make(2);
  const SetMark first = mark_in(folders_[0].path());
  for (uint32_t n_steps = 0; n_steps <= 6; ++n_steps) {
    SCOPED_TRACE(n_steps);
    const auto lay_out = [&] {
      for (uint32_t d = 2; d < 5; ++d) {
        std::filesystem::remove(folders_[d].path() + "/kvm.set");
      }
      mark_in_part(paths(2), 0, 4, first.set_id, first.growth_id);
      mark_in_part(paths(4), 2, n_steps, first.set_id, 71);
    };
    lay_out();
    if (n_steps <= 2) {
      expect_whole(paths(2));
      lay_out();
    } else {
      expect_refused(paths(2), "4 directories");
    }
    expect_whole(paths(4));
    if (n_steps <= 2) {
      lay_out();
      expect_whole({folders_[0].path(), folders_[1].path(), folders_[4].path()});
      // One that was to join does not stand in for the one that did.
      expect_refused(paths(3), "3 directories");
    }
  }
}

TEST_F(DirectorySetTest, ThatWasUsedApartIsRefused) {
  make(2);
  const SetMark first = mark_in(folders_[0].path());
  expect_whole({folders_[0].path(), folders_[1].path(), folders_[2].path()});
  // As of a copy from before.
  mark_in_part(paths(2), 0, 4, first.set_id, first.growth_id);
  expect_whole({folders_[0].path(), folders_[1].path(), folders_[3].path()});
  expect_refused(paths(3), "used apart");
  expect_whole({folders_[3].path(), folders_[0].path(), folders_[1].path()});
}

// A mark that a crash has left in a directory that was to join says nothing.
TEST_F(DirectorySetTest, IsNotHeldUpByWhatNeverJoined) {
  make(2);
  write_mark(folders_[2].path(), {.set_id = 99, .index = 2, .n_directories = 2, .growth_id = 3});
  expect_whole(paths(2));
  expect_whole(paths(3));
  write_mark(folders_[3].path(), {.set_id = 98, .index = 2, .n_directories = 2, .growth_id = 3});
  ObjectRig alone({folders_[3].path()}, 32);
  EXPECT_TRUE(alone.open().is_ok());
}

TEST_F(DirectorySetTest, DoesNotTakeInAnothersList) {
  make(2);
  {
    ObjectRig other({folders_[2].path()}, 32);
    ASSERT_TRUE(other.open().is_ok());
    fill(&other);
  }
  std::filesystem::remove(folders_[2].path() + "/kvm.set");
  expect_refused(paths(3), "name it without them");
  expect_refused({folders_[2].path(), folders_[0].path(), folders_[1].path()},
                 "name it without them");
  expect_whole({folders_[2].path()});
}

}  // namespace
}  // namespace kvm::testing
