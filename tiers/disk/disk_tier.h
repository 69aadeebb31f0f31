// SPDX-License-Identifier: Apache-2.0
// DiskTier: a slow tier of files.
//
//   write --> queue --> record in a transfer buffer, beside others --> the open segment
//   read  --> queue --> transfer buffer, with its neighbours --> header and page checked --> copied
//   put   --> chunks, as pages --> everything synced --> manifest, synced --> on_done
//
// Pages are appended to segment files (disk_format.h), each to the open one. A page that is
// released leaves dead space; a segment in which nothing lives any more is begun again. Where
// segments run out, the live pages of the emptiest are moved to the open one and keep their places.
// One segment is held back for that.
//
// INVARIANT: a segment that a transfer reads or writes is not begun again: what is in flight never
// meets space that is in use anew.
//
// What outlives the tier is its objects, with the pages that these name (tiers/object_store.h). A
// segment that pages of theirs have moved away from is begun again once the copies are synced, and
// pages of one that was replaced or removed are released once the manifest says so on the disk.
//
// A damaged page is found by its checksum or by its header, and its read ends with CORRUPT; other
// pages have nothing of it. Where a transfer of several pages fails to be read, each is read alone.
//
// Threads: submit(), add_ref(), release() and list() on any; one of the tier does all else, on_done
// included, but for what is refused, which ends in submit(). It copies each page once, summing it
// up: some 8 GB/s of a core, which bounds the tier.
// Memory: queue_depth + 14 buffers of transfer_bytes and 16 KiB; pages that do not fit into one,
// two at a time, in memory taken for them; 36 bytes a place, which stay.
#ifndef KVM_TIERS_DISK_DISK_TIER_H_
#define KVM_TIERS_DISK_DISK_TIER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "tiers/disk/data_directory.h"
#include "tiers/disk/directory_set.h"
#include "tiers/disk/disk_format.h"
#include "tiers/disk/disk_io.h"
#include "tiers/disk/disk_memory.h"
#include "tiers/disk/disk_recovery.h"
#include "tiers/disk/manifest.h"
#include "tiers/object_store.h"
#include "tiers/read_meter.h"
#include "tiers/slow_tier.h"

namespace kvm::tiers {

struct DiskTierOptions {
  std::vector<std::string> directories;  // segments go round; at least one
  // Of all segment files together, each counted whole from when it is made.
  uint64_t capacity_bytes = 0;
  // A multiple of 4 KiB, from kMinSegmentBytes to kMaxSegmentBytes. 0: an eighth of the capacity or
  // 64 MiB, whichever is less, and as much more as kMaxSegments ask for; or as those that are
  // there. Where kMaxSegments of these are less than capacity_bytes, that is the capacity.
  uint64_t segment_bytes = 0;
  // What pages are gathered into, 4 KiB for their headers not counted: a multiple of 4 KiB, from
  // 64 KiB to 16 MiB.
  uint32_t transfer_bytes = 256 << 10;
  uint32_t queue_depth = 32;  // transfers in flight: 2 to 1024
  DiskBackend backend = DiskBackend::kAny;
  // Of pages that are moved, read and written anew; 0: as fast as it goes.
  uint64_t move_bytes_per_s = 0;
  // Writes that would make it more in a day end with NO_SPACE; 0: any. Days begin with the tier.
  uint64_t write_bytes_per_day = 0;
  Clock* clock = system_clock();  // of days and of moves
  bool is_manual = false;         // no thread: turn() does its work, for tests
};

struct DiskTierStats {
  const char* backend = "";  // of the DiskIo
  bool is_direct = false;
  uint64_t n_reads = 0;  // of pages: those that ended without fault, here and below
  uint64_t n_writes = 0;
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
  uint64_t n_disk_reads = 0;  // transfers that were begun
  uint64_t n_disk_writes = 0;
  uint64_t disk_read_bytes = 0;
  uint64_t disk_written_bytes = 0;
  uint64_t n_moved = 0;  // pages that were moved, and the bytes of their records
  uint64_t moved_bytes = 0;
  uint64_t n_corrupt = 0;    // records that did not match
  uint64_t n_io_errors = 0;  // transfers that failed
  uint64_t n_no_space = 0;   // writes that were refused
  uint64_t n_directories = 0;
  uint64_t n_passed_over = 0;     // of these, now: they have refused a file or failed a write
  std::string refusal;            // the last that one has refused a file with, while it is one
  uint64_t n_leftover_files = 0;  // of an owner before, removed at the start
  uint64_t n_segments = 0;        // that have a file
  uint64_t physical_bytes = 0;    // of these files
  uint64_t capacity_bytes = 0;    // that physical_bytes may reach
  bool is_capacity_cut = false;   // more was given than segments of their size may hold
  bool is_list_unmarked = false;  // not all directories say that there is a list, as they should
  // What is wrong with a copy of the list of objects that was found; "": nothing. The other one was
  // read, and both are written anew with the next change.
  std::string list_fault;
  std::string corruption;  // what did not match last of records: a file, an offset, and how
  uint64_t written_today_bytes = 0;
};

class DiskTier final : public SlowTier, private ObjectStore {
 public:
  // LIMIT: below 256 KiB the padding of transfers outweighs what moving pages gains.
  static constexpr uint64_t kMinSegmentBytes = 256 << 10;
  // LIMIT: places hold offsets as 32 bits of 64 bytes; a quarter of that.
  static constexpr uint64_t kMaxSegmentBytes = uint64_t{64} << 30;
  // LIMIT: each has a descriptor, of which processes have some thousands.
  static constexpr uint32_t kMaxSegments = 1024;

  // Takes the directories, finds the objects that an owner before has left, removes what else that
  // left, and begins.
  // Fails: as DataDirectory; INVALID: an option, or they do not suit what is there; UNSUPPORTED:
  // the backend; NO_MEMORY; LIMIT.
  static Result<std::unique_ptr<DiskTier>> open(const DiskTierOptions& options);
  // The same in directories that are taken already, for who has looked at them to choose a
  // capacity. REQUIRES: they are those of the options, in that order.
  static Result<std::unique_ptr<DiskTier>> open_in(std::vector<DataDirectory> directories,
                                                   const DiskTierOptions& options);
  // The same over a DiskIo made with io_options(); directories are names alone then.
  static Result<std::unique_ptr<DiskTier>> over(std::unique_ptr<DiskIo> io,
                                                const DiskTierOptions& options);
  // What a tier needs of its DiskIo. Fails: INVALID.
  static Result<DiskIoOptions> io_options(const DiskTierOptions& options);

  // Removes the files in which there is nothing of any object.
  ~DiskTier() override;
  DiskTier(const DiskTier&) = delete;
  DiskTier& operator=(const DiskTier&) = delete;

  // A write ends with NO_SPACE: in submit(), where with it live pages would take more than all
  // segments but one, the page is larger than a segment, or the day's writes are used up; later,
  // where moving pages makes no room, or the file system is full.
  void submit(std::span<Transfer* const> transfers) noexcept override;
  void add_ref(PlaceId place) noexcept override;
  void release(PlaceId place) noexcept override;
  // Records, headers and all, as record_bytes() has them.
  uint64_t used_bytes() const override;
  ObjectStore* objects() override { return this; }
  RecoveryReport recovery() const override { return recovery_; }
  DiskTierStats stats() const;
  ReadRates read_rates() const override { return meter_.rates(); }

  // Ends what has ended, begins what can begin. Returns whether anything is in flight.
  // REQUIRES: is_manual.
  bool turn();
  // As if the process had been killed: nothing more is done, and the files stay as they are. What
  // was submitted and has not ended never will. REQUIRES: is_manual, and that the DiskIo has
  // forgotten what was in flight.
  void abandon() { is_abandoned_ = true; }

 private:
  // Of a batch of reads, and of a transfer.
  static constexpr size_t kMaxParts = 256;
  // Pages have powers of two of bytes: without it a transfer would hold one less than it could.
  static constexpr uint64_t kHeaderRoom = 4096;
  static constexpr uint32_t kMoveJobs = 2;  // beside the queue_depth of others
  // Jobs that have ended are taken in so few at a time, and others begun before these are looked
  // at: the disk has work meanwhile.
  static constexpr uint32_t kEndedJobs = 8;
  static constexpr uint32_t kRoundJobs = 4;  // likewise, of syncs, tables and the manifest
  // LIMIT: pages that have no room in a buffer are few, or memory would not be bounded.
  static constexpr uint32_t kMaxLarge = 2;
  static constexpr uint32_t kNoSegment = 0xffff;

  // 32 bytes; four more are in the segment's list.
  struct Place {
    enum class State : uint8_t { kFree, kWriting, kWritten };
    uint32_t unit = 0;  // of the record in its segment; of a free place: the next free one
    uint32_t size_bytes = 0;
    uint16_t segment = kNoSegment;  // none: its write has not begun
    State state = State::kFree;
    uint32_t n_readers = 0;
    uint32_t n_refs = 1;
    uint64_t name = 0;
  };
  // Which segment is filled, and which time.
  struct Filling {
    uint32_t number = 0;  // of its file, in its directory
    uint64_t run_id = 0;
    uint64_t generation = 0;
  };
  struct Segment {
    // kHeld: empty, but not to be begun again before the next sync.
    enum class State : uint8_t { kAbsent, kFree, kOpen, kSealed, kHeld };
    State state = State::kAbsent;
    uint16_t directory = 0;
    bool is_new = false;    // its file has been made, and its directory was not synced since
    bool is_dirty = false;  // it was written, and not synced since
    // Its header: nothing there is found again without. Written with the first records.
    enum class Header : uint8_t { kNone, kInFlight, kWritten };
    Header header = Header::kNone;
    bool wants_table = false;
    bool waits_for_sync = false;  // pages of objects have moved away, perhaps
    bool is_kept = false;         // at the end: an object has something there
    uint32_t n_failed_moves = 0;  // how often what lives there could not be moved, in a row
    uint64_t moves_from_ns = 0;   // it is not tried again before
    uint32_t n_transfers = 0;     // that read or write it, or are about to
    uint32_t n_writes = 0;        // of these
    Filling filling;
    uint64_t end_bytes = 0;       // appended up to here; 0: its header is not written
    uint64_t live_bytes = 0;      // of records
    std::vector<PlaceId> places;  // of all records that were appended
  };
  // What is known of a directory: segments of one are tried while those of others fail.
  struct Drive {
    uint64_t grows_from_ns = 0;    // it has refused a file, and is asked for none before
    uint64_t trusted_from_ns = 0;  // a write has failed there: others go first until then
    uint32_t n_absent = 0;         // of its segments, those that have no file
  };
  struct Part {
    Transfer* transfer = nullptr;
    PlaceId place = kNoPlace;
    uint64_t name = 0;
    uint32_t unit = 0;
    uint32_t size_bytes = 0;
    uint32_t old_unit = 0;  // of one that moves
    uint32_t segment = 0;
  };
  // A transfer of the disk, with a buffer of its own.
  struct Job : DiskOp {
    enum class Purpose : uint8_t { kRead, kWrite, kMoveRead, kMoveWrite, kTable, kRound };
    Purpose purpose = Purpose::kRead;
    bool is_single = false;  // its parts are read one by one, the last first
    bool is_apart = false;   // no other read of its batch lies next to its own
    std::byte* own = nullptr;
    DiskMemory large;         // in place of `own`
    std::vector<Part> parts;  // has room for kMaxParts
  };
  struct Move {
    uint32_t victim = kNoSegment;
    std::vector<std::pair<uint32_t, PlaceId>> records;  // unit, and who was there, in order
    size_t n_begun = 0;                                 // of records
    uint32_t n_jobs = 0;
    uint64_t next_ns = 0;            // when the next may begin
    uint64_t waits_ns = UINT64_MAX;  // the same while one waits for nothing else
  };
  enum class Room : uint8_t { kReady, kWait, kNone };
  struct Object {
    std::string label;
    ManifestEntryHeader entry;
    std::vector<PlaceId> parts;  // pages, then chunks; a reference on each
    bool is_lost = false;        // not all of them are there
  };
  using Objects = std::map<std::string, Object, std::less<>>;
  // A request for an object, on its way.
  struct ObjectWork {
    struct Chunk final : Transfer {
      void on_done() noexcept override;  // on the tier's thread, which has submitted it
      ObjectWork* work = nullptr;
    };

    DiskTier* tier = nullptr;
    ObjectRequest* request = nullptr;
    bool has_begun = false;
    Object object;  // of a put, the one that is made; of a get, the one that is read
    std::vector<std::byte> stream;                        // its chunks, one behind the other
    std::vector<Chunk> chunks;                            // room for all
    Status status;                                        // with which it ends, once it counts
    uint32_t n_left = 0;                                  // of chunks that were submitted
    uint32_t n_pages = 0;                                 // of object.parts; the others are chunks
    Objects::node_type node;                              // of a put, for the object
    std::list<std::unique_ptr<ObjectWork>>::iterator at;  // in works_
  };
  using ObjectWorks = std::list<std::unique_ptr<ObjectWork>>;
  // Whose manifests there are.
  struct Manifest {
    uint64_t number = 0;  // of the last one; 0: there is none
    uint32_t slot = 0;    // its
    uint64_t n_blocks = 0;
    uint64_t max_blocks = 0;  // that its files hold
    bool must_be_new = true;  // nothing more is to be written to it
    bool is_unsure = false;   // it may say what was answered to have failed
    bool has_files[kManifestSlots][kManifestCopies] = {};
  };
  // Changes of objects that are made durable together, and what that takes.
  struct Round {
    enum class Stage : uint8_t { kIdle, kSync, kWrite, kSyncManifest };
    Stage stage = Stage::kIdle;
    std::vector<ObjectWork*> works;
    std::vector<uint32_t> files;  // segments that are still to be synced
    std::vector<uint32_t> held;   // segments that are free after that
    uint32_t n_jobs = 0;
    Status status;  // of the first that failed
    bool has_touched_manifest = false;
    bool begins_manifest = false;
    uint32_t slot = 0;
    uint64_t max_blocks = 0;
    uint64_t n_blocks = 0;
    DiskMemory blocks;
  };

  // Of the buffer of a transfer.
  static uint64_t job_bytes(const DiskTierOptions& options);
  DiskTier(std::unique_ptr<DiskIo> io, const DiskTierOptions& options, uint32_t n_slots);
  // Throws std::bad_alloc, and std::system_error.
  void start();

  // --- The beginning (disk_tier_start.cc) ------------------------------------------------------

  // segments: that the DiskIo has attached. Fails: NO_MEMORY; LIMIT. Throws std::bad_alloc.
  Status recover(std::span<const FoundFile> segments, uint64_t run_id);
  void adopt(const Found& found);
  // paths: where each copy lies, or would.
  void note_list_fault(const Found& found,
                       const std::string (&paths)[kManifestSlots][kManifestCopies]);
  Result<std::vector<FoundFile>> attach_segments(const std::vector<SegmentOnDisk>& left);
  void remove_files() noexcept;
  uint32_t manifest_file(uint32_t slot, uint32_t copy) const;
  std::string manifest_path(uint32_t slot, uint32_t copy) const;

  // --- Any thread (disk_tier.cc); with the lock where they say `locked` ------------------------

  // Throws std::bad_alloc; nothing has changed then.
  Status accept_locked(Transfer* transfer);
  Status refusal_locked(uint32_t size_bytes);
  PlaceId take_place_locked(uint32_t size_bytes);
  void free_place_locked(PlaceId id);
  Place& written_place_locked(PlaceId id);
  void begin_day_locked();
  // Has the thread look again; returns whether it waits, so that wake() has to be called.
  bool nudge_locked();

  // --- The tier's thread -----------------------------------------------------------------------

  void run();
  void do_turn(bool may_wait);
  void submit_begun();
  uint64_t patience_ns() const;
  void finish(Job* job);
  Job* take_job(Job::Purpose purpose, uint64_t data_bytes);
  void leave_queue(const Job& job);
  void give_job_back(Job* job);
  uint64_t transfer_limit() const;
  bool is_large(uint64_t data_bytes) const;
  std::byte* buffer_of(Job* job) const;

  // --- Reads (disk_tier_reads.cc), likewise ----------------------------------------------------

  void begin_reads();
  bool fill_batch();
  bool is_near(size_t at) const;
  void aim_read(Job* job, std::span<const Part> parts);
  void finish_read(Job* job);
  // Where the record of a part is in the buffer of a job that read it.
  std::byte* record_of(Job* job, const Part& part) const;
  static RecordHeader header_of(const Part& part, const Filling& filling);
  Status check_read(Job* job, const Part& part, const Filling& filling);
  // Counts records that did not match; error: of the last one.
  void note_corrupt_locked(uint64_t n, const Status& error) noexcept;
  void settle_reads(std::span<const Part> parts, uint64_t n_corrupt);
  Status io_error(const Job& job) noexcept;
  Status corrupt(uint32_t segment, uint64_t offset, const char* reason) noexcept;

  // --- Writes (disk_tier_writes.cc), likewise --------------------------------------------------

  void begin_writes();
  bool place_writes_locked(Job* job);
  void aim_write_locked(Job* job, uint64_t end);
  SegmentHeader segment_header(const Filling& filling) const;
  void fill_records(Job* job, const Filling& filling);
  void end_write_locked(const Job& job);
  void finish_write(Job* job);
  Status no_room_locked() const noexcept;
  void refuse_write(std::unique_lock<std::mutex>& lock, Status status);

  // --- Segments (disk_tier_segments.cc), likewise ----------------------------------------------

  Room make_room_locked(std::unique_lock<std::mutex>& lock, uint64_t bytes);
  bool open_next_locked(std::unique_lock<std::mutex>& lock);
  uint32_t next_segment_locked() const;
  // Where records end in a segment with a table of so many.
  uint64_t room_end(uint64_t n_records) const;
  bool has_room_locked(uint64_t bytes, uint64_t n_records) const;
  void seal_open_locked();
  uint32_t n_free_locked() const;
  void recycle_if_empty_locked(uint32_t segment);
  bool is_draining_locked() const;
  bool is_freed_by_sync_locked() const { return n_held_ != 0 && !has_sync_failed_; }
  Drive& drive_of(uint32_t segment) { return drives_[segments_[segment].directory]; }
  const Drive& drive_of(uint32_t segment) const { return drives_[segments_[segment].directory]; }
  void begin_tables();
  void finish_table(Job* job);
  void turn_from_drive_locked(uint32_t segment);
  std::string path_of(uint32_t segment) const;

  // --- Moves (disk_tier_moves.cc), likewise ----------------------------------------------------

  // Chooses the sealed segment with least that lives, where at least so much is dead.
  bool begin_victim_locked(uint64_t min_dead_bytes);
  bool fits_locked(const Segment& victim) const;
  void begin_moves();
  bool aim_move_locked(Job** job);
  void end_victim_locked();
  void finish_move_read(Job* job);
  bool place_moves(Job* job);
  void finish_move_write(Job* job);
  void end_move(Job* job);

  // --- Objects (disk_tier_objects.cc): any thread ----------------------------------------------

  void submit(ObjectRequest* request) noexcept override;
  std::vector<ObjectInfo> list(std::string_view after, size_t n_max) const override;

  // --- Objects: the tier's thread --------------------------------------------------------------

  void go_on_with_objects();
  void end_transfers();
  void begin_works();
  void begin_work(ObjectWork* work);
  void begin_put(ObjectWork* work);
  void write_chunks(ObjectWork* work);
  void end_chunks(ObjectWork* work);
  void begin_get(ObjectWork* work);
  void end_get(ObjectWork* work);
  void end_work(ObjectWork* work, Status status);
  void release_parts(std::span<const PlaceId> parts);
  void begin_round();
  void go_on_with_round();
  void sync_more();
  void write_header(uint32_t segment);
  void end_sync();
  void write_manifest();
  Status aim_manifest();
  void begin_round_job(uint32_t file, DiskOp::Kind kind);
  void finish_round_job(Job* job);
  void end_round();

  const DiskTierOptions options_;  // with a segment_bytes
  const uint32_t n_segments_;
  std::vector<DataDirectory> directories_;  // locked for as long as there is the tier
  DirectorySet set_;                        // of these
  std::unique_ptr<DiskIo> io_;
  uint64_t run_id_ = 0;
  uint32_t run_number_ = 1;
  RecoveryReport recovery_;
  bool is_abandoned_ = false;

  mutable std::mutex mutex_;
  std::deque<Part> reads_;  // that wait
  std::deque<Part> writes_;
  uint64_t waiting_write_bytes_ = 0;
  std::deque<Place> places_;
  uint32_t first_free_place_ = static_cast<uint32_t>(kNoPlace);
  std::vector<Segment> segments_;
  uint32_t open_ = kNoSegment;
  uint32_t n_idle_ = 0;  // segments that have a file, and nothing in it
  uint32_t n_held_ = 0;  // in State::kHeld
  std::vector<Drive> drives_;
  Status last_refusal_;  // of a file
  bool are_tables_wanted_ = false;
  bool has_sync_failed_ = false;  // the last one
  uint64_t next_name_ = 0;
  Objects objects_;
  ObjectWorks new_works_;
  uint64_t used_bytes_ = 0;
  uint64_t n_transfers_ = 0;  // that have not ended
  uint64_t day_ns_ = 0;       // when it began
  DiskTierStats stats_;
  bool is_asleep_ = false;
  bool has_news_ = false;  // since the thread looked
  bool is_stopping_ = false;

  // Of the tier's thread alone.
  std::vector<Job> jobs_;
  std::vector<Job*> idle_;
  std::vector<DiskOp*> begun_;  // to be submitted
  std::array<DiskOp*, kEndedJobs> ended_;
  std::array<Part, kMaxParts> batch_;  // reads, in the order of the disk, from n_batch_begun_ on
  size_t n_batch_ = 0;
  size_t n_batch_begun_ = 0;
  uint32_t n_reading_ = 0;  // jobs in flight, by purpose
  uint32_t n_writing_ = 0;
  uint32_t n_large_ = 0;
  uint32_t n_round_jobs_ = 0;
  ReadMeter meter_;
  Move move_;
  ObjectWorks works_;  // in the order of submission, and those of a key one after the other
  std::set<std::string_view> busy_keys_;    // of those that have begun
  bool are_works_waiting_ = false;          // perhaps
  std::vector<ObjectWork*> ready_works_;    // for a round
  std::vector<ObjectWork*> chunked_works_;  // whose transfers have ended
  Manifest manifest_;
  Round round_;
  // Parts of objects that may, or may not, be in a manifest that could not be written.
  std::vector<PlaceId> limbo_;
  std::thread thread_;
};

}  // namespace kvm::tiers

#endif  // KVM_TIERS_DISK_DISK_TIER_H_
