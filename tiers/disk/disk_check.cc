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
// What is written of a sector of a disk is written as a whole or not at all.
constexpr size_t kSectorBytes = 512;

bool is_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(),
                     [](std::byte byte) { return byte == std::byte{}; });
}

class Checker : private SegmentWalk::Listener {
 public:
  Checker(DiskView* view, const DiskCheckOptions& options)
      : view_(*view), options_(options), found_(view->found()) {}

  Result<DiskCheck> check() {
    const uint64_t begin_ns = now_ns();
    for (const DiskView::WrongFile& wrong : view_.files_wrong()) {
      add_damage({wrong.path, 0, wrong.what, found_.report.n_lost_objects != 0});
    }
    check_manifest();
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

  void check_manifest() {
    if (found_.is_list_lost) {
      add_damage({view_.directories().front(), 0,
                  "the list of snapshots (kvm-*.manifest) is not there, or can be read in neither "
                  "of its copies: no kvmd starts here, until a copy of it is put back, or kvm.set "
                  "and kvm-*.manifest are removed from each directory: then it begins anew, with "
                  "nothing, and removes what is in the segments",
                  true});
    }
    if (!found_.manifest.has_value()) {
      return check_no_manifest();
    }
    std::array<std::vector<std::byte>, kManifestCopies> copies;
    size_t n_bytes = 0;
    for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
      const std::optional<FoundFile>& file = view_.manifest(found_.manifest_slot, copy);
      if (!file.has_value()) {
        add_damage({manifest_file_name(found_.manifest_slot, copy), 0,
                    "a copy of the list of snapshots is not there; the other one is, and the "
                    "next save writes both",
                    false});
        continue;
      }
      copies[copy].resize(file->size_bytes);
      (void)view_.read_bytes(file->file, 0, copies[copy]);
      check_.n_read_bytes += file->size_bytes;
      n_bytes = std::max(n_bytes, copies[copy].size());
    }
    std::vector<std::array<bool, kManifestCopies>> whole(n_bytes / kManifestBlockBytes);
    size_t end = 0;  // of the blocks that count
    for (size_t block = 0; block < whole.size(); ++block) {
      for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
        ManifestBlockHeader header;
        const std::span<const std::byte> bytes = block_of(copies[copy], block);
        whole[block][copy] = !bytes.empty() && read_manifest_block(bytes, &header) &&
                             header.number == *found_.manifest && header.block == block;
        end = whole[block][copy] ? block + 1 : end;
      }
    }
    for (size_t block = 0; block < end; ++block) {
      for (uint32_t copy = 0; copy < kManifestCopies; ++copy) {
        const std::optional<FoundFile>& file = view_.manifest(found_.manifest_slot, copy);
        if (!whole[block][copy] && file.has_value() &&
            !(block + 1 == end &&
              is_unfinished(block_of(copies[copy], block), block_of(copies[1 - copy], block)))) {
          const bool is_lost = !whole[block][1 - copy];
          add_damage({path_of(file->file), block * kManifestBlockBytes,
                      is_lost ? "a block of the list of snapshots is damaged in both copies: "
                                "what was saved or deleted with it may be missing"
                              : "a block of the list of snapshots is damaged; the other copy "
                                "has it, and the next save writes both anew",
                      is_lost});
        }
      }
    }
  }

  // Where no list can be read there may be files of one.
  void check_no_manifest() {
    for (uint32_t file = view_.n_segments(); file < view_.files().size(); ++file) {
      std::array<std::byte, kManifestBlockBytes> first;
      if (found_.is_list_lost || view_.files()[file].size_bytes < first.size()) {
        continue;
      }
      if (!view_.read_bytes(file, 0, first) || !is_zero(first)) {
        add_damage({path_of(file), 0,
                    "no list of what is kept can be read: a kvmd that starts here takes all for "
                    "free space, and removes it, unless this was the first list that was begun",
                    true});
      }
    }
  }

  static std::span<const std::byte> block_of(std::span<const std::byte> copy, size_t block) {
    const uint64_t at = block * uint64_t{kManifestBlockBytes};
    return at + kManifestBlockBytes <= copy.size() ? copy.subspan(at, kManifestBlockBytes)
                                                   : std::span<const std::byte>();
  }

  // Whether the write of this copy of the last block had not ended: what is not there is as it was
  // before, zero.
  static bool is_unfinished(std::span<const std::byte> copy, std::span<const std::byte> other) {
    for (size_t at = 0; at + kSectorBytes <= copy.size(); at += kSectorBytes) {
      const std::span<const std::byte> sector = copy.subspan(at, kSectorBytes);
      if (!is_zero(sector) &&
          (other.empty() ||
           !std::equal(sector.begin(), sector.end(), other.begin() + static_cast<ptrdiff_t>(at)))) {
        return false;
      }
    }
    return true;
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
    add_damage({path_of(file), 0,
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
                 : "its record is in no segment that can be read";
    }
    const size_t i = index_of(part);
    return is_bad_[i] ? reason_of(i) : "the list of what is kept says other sizes than it does";
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
