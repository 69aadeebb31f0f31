// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/disk_check.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <set>
#include <utility>

#include "base/clock.h"
#include "tiers/disk/disk_walk.h"
#include "tiers/disk/manifest.h"

namespace kvm::tiers {
namespace {

constexpr uint64_t kBlock = kMaxDiskBlockBytes;
// LIMIT: directories that are read at a time.
constexpr size_t kMaxLanes = 8;

bool is_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(),
                     [](std::byte byte) { return byte == std::byte{}; });
}

const char* text_of(ManifestFault::Kind kind) {
  switch (kind) {
    case ManifestFault::Kind::kOneCopy:
      return "a block of the list of snapshots is damaged; the other copy has it, and the next "
             "save writes both anew";
    case ManifestFault::Kind::kBothCopies:
      return "a block of the list of snapshots is damaged in both copies: what was saved or "
             "deleted with it may be missing";
    case ManifestFault::Kind::kUnused:
      break;
  }
  return "bytes have changed in a part of the list of snapshots that nothing was written to yet";
}

class Checker : private SegmentWalk::Listener {
 public:
  Checker(DiskView* view, const DiskCheckOptions& options)
      : view_(*view), options_(options), found_(view->found()) {}

  Result<DiskCheck> check() {
    const uint64_t begin_ns = now_ns();
    for (const DiskView::WrongFile& wrong : view_.files_wrong()) {
      add_damage({wrong.path, std::nullopt, wrong.what, found_.report.n_lost_objects != 0});
    }
    KVM_TRY(check_manifest());
    choose_wanted();
    check_segments();
    walk();
    for (size_t i = 0; i < found_.objects.size(); ++i) {
      check_.objects.push_back(check_object(found_.objects[i]));
      check_.n_damaged_objects += check_.objects.back().damage.empty() ? 0 : 1;
    }
    check_.duration_ns = now_ns() - begin_ns;
    return std::move(check_);
  }

 private:
  // A stretch of a file on its way.
  struct Piece : DiskOp {
    bool is_done = false;
  };
  // The files of a directory, one after the other.
  struct Lane {
    std::vector<uint32_t> files;
    size_t next_file = 0;  // to be read from
    uint64_t next_offset = 0;
    std::vector<Piece> pieces;
    std::vector<Piece*> idle;
    std::deque<Piece*> begun;  // in the order of the files
    std::optional<SegmentWalk> walk;
  };

  void add_damage(DiskDamage damage) {
    ++check_.n_damages;
    if (check_.damages.size() < DiskCheck::kMaxDamages) {
      check_.damages.push_back(std::move(damage));
    }
  }
  const std::string& path_of(uint32_t file) const { return view_.files()[file].path; }
  std::string place_of(uint32_t file, uint64_t offset) const {
    return path_of(file) + ", offset " + std::to_string(offset);
  }

  // --- The manifest ------------------------------------------------------------------------------

  Status check_manifest() {
    if (found_.is_list_lost) {
      add_damage({view_.directories().front(), std::nullopt,
                  "the list of snapshots (kvm-*.manifest) is not there, or can be read in neither "
                  "of its copies: no kvmd starts here, until a copy of it is put back, or kvm.set "
                  "and kvm-*.manifest are removed from each directory: then it begins anew, with "
                  "nothing, and removes what is in the segments",
                  true});
    }
    if (!found_.manifest.has_value()) {
      return found_.is_list_lost ? Status::ok() : check_no_manifest();
    }
    // One that was given up, and whose files were on their way out, says nothing any more.
    const bool is_needed = !found_.objects.empty() || view_.must_have_list();
    for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
      if (const std::optional<FoundFile>& file = view_.manifest(found_.manifest_slot, copy)) {
        check_.n_read_bytes += file->size_bytes;
      } else if (is_needed) {
        add_damage({missing_copy(copy), std::nullopt,
                    "a copy of the list of snapshots is not there; the other one is, and the "
                    "next save writes both",
                    false});
      }
    }
    for (const ManifestFault& fault : found_.list_faults) {
      const FoundFile& file = *view_.manifest(found_.manifest_slot, fault.copy);
      add_damage({path_of(file.file), fault.block * kManifestBlockBytes, text_of(fault.kind),
                  fault.kind == ManifestFault::Kind::kBothCopies});
    }
    return Status::ok();
  }

  // Where a copy of the list would be: the first directory has one, the last the other.
  std::string missing_copy(uint32_t copy) const {
    const std::vector<std::string>& paths = view_.directories();
    const std::optional<FoundFile>& other = view_.manifest(found_.manifest_slot, 1 - copy);
    const uint32_t last = static_cast<uint32_t>(paths.size()) - 1;
    uint32_t directory = copy == 0 ? 0 : last;
    if (other.has_value() && view_.files()[other->file].directory == directory) {
      directory = last - directory;  // they were named in another order
    }
    return paths[directory] + "/" + manifest_file_name(found_.manifest_slot, copy);
  }

  // Where no list can be read there may be files of one.
  Status check_no_manifest() {
    for (uint32_t file = view_.n_segments(); file < view_.files().size(); ++file) {
      std::array<std::byte, kManifestBlockBytes> first;
      if (view_.files()[file].size_bytes < first.size()) {
        continue;
      }
      if (!view_.read_bytes(file, 0, first) || !is_zero(first)) {
        add_damage({path_of(file), std::nullopt,
                    "no list of what is kept can be read: a kvmd that starts here takes all for "
                    "free space, and removes it, unless this was the first list that was begun",
                    true});
      }
    }
    return check_.n_damages == 0 && !view_.is_marked() ? check_unlisted() : Status::ok();
  }

  // Without a list, and without a word of one. A kvmd that was killed leaves segments of pages, of
  // which nothing outlives it. Not so what was saved; nor are there several runs without a list.
  Status check_unlisted() {
    const std::vector<FoundSegment>& segments = found_.segments;
    const auto later = std::find_if(segments.begin(), segments.end(), [](const FoundSegment& one) {
      return one.header.run_number > 1;
    });
    bool is_list_missing = later != segments.end();
    if (!is_list_missing) {
      const auto on_progress = [&](size_t n_done) {
        if (options_.on_progress) {
          const uint64_t segment_bytes = segments.front().file.size_bytes;
          options_.on_progress(n_done * segment_bytes, segments.size() * segment_bytes);
        }
      };
      KVM_TRY_ASSIGN(is_list_missing, has_chunks(view_.io(), segments, view_.io()->buffers(),
                                                 DiskView::kPieceBytes, on_progress));
    }
    if (is_list_missing) {
      add_damage({view_.directories().front(), std::nullopt,
                  "there are segments with snapshots, or with one that was being saved when kvmd "
                  "ended, and neither a list of snapshots (kvm-*.manifest) nor kvm.set in any "
                  "directory: a kvmd that starts here removes the segments; put back copies of "
                  "these files first, if there are any",
                  true});
    }
    return Status::ok();
  }

  // --- What is to be looked at -------------------------------------------------------------------

  // Records by where they lie; names of those that lie nowhere.
  void choose_wanted() {
    wanted_ = found_.pages;
    for (const FoundObject& object : found_.objects) {
      for (const FoundPage& part : object.lost_parts) {
        if (part.size_bytes == 0) {
          places_.try_emplace(part.name);
        } else {
          wanted_.push_back(part);
        }
      }
    }
    std::sort(wanted_.begin(), wanted_.end(), is_before);
    const auto end =
        std::unique(wanted_.begin(), wanted_.end(), [](const FoundPage& a, const FoundPage& b) {
          return a.segment == b.segment && a.unit == b.unit;
        });
    wanted_.erase(end, wanted_.end());
    is_bad_.assign(wanted_.size(), false);
    for (const FoundPage& page : wanted_) {
      check_.live_bytes += record_bytes(page.size_bytes);
    }
    check_.n_live_records = wanted_.size();
  }

  static bool is_before(const FoundPage& a, const FoundPage& b) {
    return a.segment != b.segment ? a.segment < b.segment : a.unit < b.unit;
  }

  // The range of wanted_ that lies in a segment.
  std::pair<size_t, size_t> range_of(uint32_t file) const {
    const auto begin =
        std::lower_bound(wanted_.begin(), wanted_.end(), FoundPage{.segment = file}, is_before);
    const auto end =
        std::lower_bound(begin, wanted_.end(), FoundPage{.segment = file + 1}, is_before);
    return {static_cast<size_t>(begin - wanted_.begin()),
            static_cast<size_t>(end - wanted_.begin())};
  }
  size_t index_of(const FoundPage& page) const {
    return static_cast<size_t>(std::lower_bound(wanted_.begin(), wanted_.end(), page, is_before) -
                               wanted_.begin());
  }

  // --- Headers and tables ------------------------------------------------------------------------

  void check_segments() {
    lanes_.resize(std::min(kMaxLanes, view_.directories().size()));
    for (uint32_t file = 0; file < view_.n_segments(); ++file) {
      ++check_.n_segments;
      check_.segment_bytes += view_.files()[file].size_bytes;
      const auto [begin, end] = range_of(file);
      const SegmentHeader* const header = view_.header_of(file);
      if (header == nullptr) {
        check_header(file);
      } else if (begin != end || !places_.empty()) {
        check_table(file, *header);
        lanes_[view_.files()[file].directory % lanes_.size()].files.push_back(file);
        n_all_bytes_ += view_.files()[file].size_bytes;
      } else {
        ++check_.n_free_segments;
      }
    }
  }

  // Of a file that has none of a segment of this version.
  void check_header(uint32_t file) {
    std::array<std::byte, sizeof(SegmentHeader)> bytes;
    const bool is_read = view_.read_bytes(file, 0, bytes);
    if (is_read && is_zero(bytes)) {
      ++check_.n_free_segments;  // nothing was written there yet
      return;
    }
    add_damage({path_of(file), uint64_t{0},
                !is_read ? "the header of the segment cannot be read"
                         : "the header of the segment is damaged: what lies in it is not found; "
                           "where a snapshot needs it, no kvmd starts here until a copy of the "
                           "file is put back, or the file is removed",
                found_.report.n_lost_objects != 0});
    // Its table says what it had.
    std::vector<TableEntry> entries;
    TableTrailer trailer;
    SegmentHeader header;
    if (read_trailer(file, &trailer, &header) && read_entries(file, trailer, header, &entries)) {
      for (const TableEntry& entry : entries) {
        if (const auto it = places_.find(entry.name); it != places_.end()) {
          it->second =
              place_of(file, offset_of(entry.unit)) + ": the header of the segment is damaged";
        }
      }
    }
  }

  // What stands where the trailer of a table does. True: it is one, of the segment whose header it
  // would be.
  bool read_trailer(uint32_t file, TableTrailer* trailer, SegmentHeader* header) {
    std::array<std::byte, sizeof(TableTrailer)> bytes;
    const uint64_t size_bytes = view_.files()[file].size_bytes;
    if (!view_.read_bytes(file, size_bytes - bytes.size(), bytes)) {
      return false;
    }
    std::memcpy(trailer, bytes.data(), sizeof(*trailer));
    *header = {.run_id = trailer->run_id,
               .generation = trailer->generation,
               .segment_bytes = size_bytes,
               .segment = trailer->segment};
    return read_table_trailer(bytes, *header, trailer);
  }
  bool read_entries(uint32_t file, const TableTrailer& trailer, const SegmentHeader& header,
                    std::vector<TableEntry>* entries) {
    entries->resize(trailer.n_records);
    check_.n_read_bytes += entries->size() * sizeof(TableEntry);
    return view_.read_bytes(file, trailer.offset, std::as_writable_bytes(std::span(*entries))) &&
           tiers::check_table(trailer, header, *entries);
  }

  void check_table(uint32_t file, const SegmentHeader& segment) {
    std::vector<TableEntry> entries;
    TableTrailer trailer;
    SegmentHeader header;
    const bool is_one = read_trailer(file, &trailer, &header);
    const TableTrailer expected;
    const bool is_of_segment =
        trailer.run_id == segment.run_id && trailer.generation == segment.generation;
    // None at all, or one that was left there by an earlier generation: the segment never had one.
    const bool is_damaged = is_one ? is_of_segment && !read_entries(file, trailer, header, &entries)
                                   : is_of_segment || trailer.magic == expected.magic;
    if (is_damaged) {
      add_damage({path_of(file), view_.files()[file].size_bytes - sizeof(TableTrailer),
                  "the table of the segment is damaged; its records were found without, one by one",
                  false});
    }
  }

  // --- Records -----------------------------------------------------------------------------------

  void on_wanted(size_t i, const std::string& reason) override {
    if (reason.empty()) {
      return;
    }
    i += walked_begin_;
    const uint64_t offset = offset_of(wanted_[i].unit);
    is_bad_[i] = true;
    ++check_.n_damaged_records;
    if (reasons_.size() < DiskCheck::kMaxDamages) {
      reasons_[i] = place_of(walked_, offset) + ": " + reason;
    }
    add_damage({path_of(walked_), offset, reason, true});
  }
  void on_other(uint64_t offset, uint64_t n_bytes, bool is_whole) override {
    (void)offset;
    ++check_.n_dead_records;
    check_.dead_bytes += n_bytes;
    check_.n_torn_records += is_whole ? 0 : 1;
  }
  void on_broken(uint64_t offset, const RecordHeader& header) override {
    const auto it = places_.find(header.name);
    const bool is_needed = it != places_.end();
    if (is_needed) {
      it->second = place_of(walked_, offset) + ": the header of its record is damaged";
      ++check_.n_damaged_records;
    }
    add_damage({path_of(walked_), offset,
                is_needed ? "the header of a record is damaged"
                          : "the header of a record is damaged; no object is known to need it",
                is_needed});
  }

  void walk() {
    const std::span<std::byte> buffers = view_.io()->buffers();
    size_t n = 0;
    for (Lane& lane : lanes_) {
      lane.pieces = std::vector<Piece>(DiskView::kPieces / lanes_.size());
      for (Piece& piece : lane.pieces) {
        piece.data = buffers.data() + n++ * DiskView::kPieceBytes;
        lane.idle.push_back(&piece);
      }
    }
    for (;;) {
      bool is_any_begun = false;
      for (Lane& lane : lanes_) {
        begin_pieces(&lane);
        is_any_begun |= !lane.begun.empty();
      }
      if (!is_any_begun) {
        return;
      }
      reap();
      for (Lane& lane : lanes_) {
        take_pieces(&lane);
      }
    }
  }

  void begin_pieces(Lane* lane) {
    std::vector<DiskOp*> begun;
    while (!lane->idle.empty() && lane->next_file != lane->files.size()) {
      const uint32_t file = lane->files[lane->next_file];
      const uint64_t left_bytes = view_.files()[file].size_bytes - lane->next_offset;
      Piece* const piece = lane->idle.back();
      lane->idle.pop_back();
      piece->file = file;
      piece->offset = lane->next_offset;
      piece->size_bytes =
          static_cast<uint32_t>(std::min<uint64_t>(left_bytes, DiskView::kPieceBytes));
      piece->is_done = false;
      lane->begun.push_back(piece);
      begun.push_back(piece);
      lane->next_offset += piece->size_bytes;
      if (piece->size_bytes == left_bytes) {
        ++lane->next_file;
        lane->next_offset = 0;
      }
    }
    if (!begun.empty()) {
      view_.io()->submit(begun);
    }
  }

  void reap() {
    std::array<DiskOp*, DiskView::kPieces> ended;
    const size_t n = view_.io()->reap(ended, UINT64_MAX);
    for (size_t i = 0; i < n; ++i) {
      static_cast<Piece*>(ended[i])->is_done = true;
    }
  }

  void take_pieces(Lane* lane) {
    while (!lane->begun.empty() && lane->begun.front()->is_done) {
      Piece* const piece = lane->begun.front();
      lane->begun.pop_front();
      if (piece->offset == 0) {
        const auto [begin, end] = range_of(piece->file);
        lane->walk.emplace(*view_.header_of(piece->file),
                           std::span(wanted_).subspan(begin, end - begin),
                           static_cast<SegmentWalk::Listener*>(this));
      }
      walked_ = piece->file;
      walked_begin_ = range_of(piece->file).first;
      if (piece->status.is_ok()) {
        lane->walk->feed(piece->offset, {piece->data, piece->size_bytes}, Status());
      } else {
        take_blocks(lane, *piece);
      }
      if (piece->offset + piece->size_bytes == view_.files()[piece->file].size_bytes) {
        lane->walk->end();
      }
      check_.n_read_bytes += piece->size_bytes;
      n_walked_bytes_ += piece->size_bytes;
      lane->idle.push_back(piece);
      if (options_.on_progress) {
        options_.on_progress(n_walked_bytes_, n_all_bytes_);
      }
    }
  }

  // Of what cannot be read at once each block is read alone: most of it may be there.
  void take_blocks(Lane* lane, const Piece& piece) {
    for (uint64_t at = 0; at < piece.size_bytes; at += kBlock) {
      Piece block;
      block.file = piece.file;
      block.offset = piece.offset + at;
      block.data = piece.data + at;
      block.size_bytes = kBlock;
      DiskOp* op = &block;
      view_.io()->submit({&op, 1});
      while (!block.is_done) {
        reap();
      }
      if (!block.status.is_ok()) {
        std::fill_n(block.data, kBlock, std::byte{});
      }
      lane->walk->feed(block.offset, {block.data, kBlock}, block.status);
    }
  }

  // --- Objects -----------------------------------------------------------------------------------

  std::string lost_reason(const FoundPage& part) const {
    if (part.size_bytes == 0) {
      const auto it = places_.find(part.name);
      return it != places_.end() && !it->second.empty()
                 ? it->second
                 : "its record is in no segment that can be read: a file " + segment_files_text() +
                       " is gone, or its header is damaged";
    }
    const size_t i = index_of(part);
    return is_bad_[i] ? reason_of(i) : "the list of what is kept says other sizes than it does";
  }
  // What a segment would be called, wherever it has lain.
  std::string segment_files_text() const {
    std::string text;
    for (const std::string& path : view_.directories()) {
      text += (text.empty() ? "" : " or ") + path + "/kvm-*.segment";
    }
    return text;
  }
  std::string reason_of(size_t i) const {
    const auto it = reasons_.find(i);
    return it != reasons_.end() ? it->second
                                : place_of(wanted_[i].segment, offset_of(wanted_[i].unit)) +
                                      ": it is not as it was written";
  }

  CheckedObject check_object(const FoundObject& object) {
    CheckedObject checked;
    const auto say = [&](const std::string& what) {
      if (checked.damage.empty()) {
        checked.damage = what;
      }
    };
    for (const FoundPage& part : object.lost_parts) {
      say("a part of it is lost: " + lost_reason(part));
    }
    if (object.is_lost && object.n_chunks != 0) {
      // Pages and chunks that are lost are not told apart.
      checked.n_damaged_pages = object.lost_parts.size();
    }
    uint64_t page_bytes = 0;
    for (size_t i = 0; i < object.parts.size(); ++i) {
      const FoundPage& part = found_.pages[object.parts[i]];
      page_bytes += !object.is_lost && i < object.n_pages ? part.size_bytes : 0;
      const size_t at = index_of(part);
      if (!is_bad_[at]) {
        continue;
      }
      // Of a lost one it is not known which is which.
      const bool is_page = object.is_lost || i < object.n_pages;
      checked.n_damaged_pages += is_page ? 1 : 0;
      say((object.is_lost ? "a part of it: "
           : is_page      ? "page " + std::to_string(i) + ": "
                          : "its body: ") +
          reason_of(at));
    }
    if (!checked.damage.empty()) {
      return checked;
    }
    if (page_bytes != object.page_bytes) {
      say("its pages have " + std::to_string(page_bytes) + " bytes, and " +
          std::to_string(object.page_bytes) + " in the list of what is kept");
    }
    const Result<std::vector<std::byte>> body = view_.read_body(object);
    if (!body.is_ok()) {
      say(std::string(body.status().message()));
    } else if (options_.check_body) {
      say(options_.check_body(object, body.value()));
    }
    return checked;
  }

  DiskView& view_;
  const DiskCheckOptions& options_;
  const Found& found_;
  DiskCheck check_;
  std::vector<FoundPage> wanted_;          // by file and offset
  std::vector<bool> is_bad_;               // [wanted_]
  std::map<size_t, std::string> reasons_;  // of those that are bad, the first ones
  // Of names that lie nowhere: what was found out about where they should; "": nothing.
  std::map<uint64_t, std::string> places_;
  std::vector<Lane> lanes_;
  uint32_t walked_ = 0;      // the file that is
  size_t walked_begin_ = 0;  // where it begins in wanted_
  uint64_t n_walked_bytes_ = 0;
  uint64_t n_all_bytes_ = 0;
};

}  // namespace

Result<DiskCheck> check_disk(DiskView* view, const DiskCheckOptions& options) {
  try {
    return Checker(view, options).check();
  } catch (const std::bad_alloc&) {
    return Status::fixed(KVM_ERR_NO_MEMORY, "disk: there is no memory to check it");
  }
}

}  // namespace kvm::tiers
