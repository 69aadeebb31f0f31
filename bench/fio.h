// SPDX-License-Identifier: Apache-2.0
// The disk under a bench: a folder of its own there, and what fio's io_uring engine reads and
// writes in a second on a file in it. fio is a rival, not a ceiling: disks are not the same twice.
#ifndef KVM_BENCH_FIO_H_
#define KVM_BENCH_FIO_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bench/harness.h"

namespace kvm::bench {

// A DiskFolder is there as long as the object, or to the end of the program: in
// Options::directory, or in the working directory. One at a time. Ends the program where it cannot
// be made.
class DiskFolder {
 public:
  explicit DiskFolder(const Options& options);
  ~DiskFolder();
  DiskFolder(const DiskFolder&) = delete;
  DiskFolder& operator=(const DiskFolder&) = delete;
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  uint64_t free_bytes() const { return free_bytes_; }  // when it was made
  // Ends the program where so many bytes were not free.
  void require_free(uint64_t size_bytes) const;

 private:
  std::string path_;
  uint64_t free_bytes_ = 0;
};

struct FioRun {
  std::vector<std::string> files;
  const char* how;  // as fio names it: write, read, randread
  uint32_t block_bytes;
  uint32_t depth;
  uint64_t file_bytes;  // of each file; all of them are read or written
};

bool has_fio();
inline constexpr const char* kNoFio =
    "fio is not installed (package fio): there is nothing to compare with";
// Returns bytes per second, past the page cache. Ends the program where fio fails.
double fio(const FioRun& run);

// A PacedFio is one that goes on beside its caller, at so many bytes a second, as long as the
// object is there, and a minute at most. Ends the program where fio could not go on.
class PacedFio {
 public:
  PacedFio(const FioRun& run, uint64_t bytes_per_s);
  ~PacedFio();
  PacedFio(const PacedFio&) = delete;
  PacedFio& operator=(const PacedFio&) = delete;

 private:
  pid_t child_ = 0;
};

// What a disk reads in a second depends by a factor of two on where a file lies. So the rival of a
// tier's reads reads the segments that the tier has in the folder, up to where all of them are
// written, but for those that are just begun: as many as hold max_bytes, from all over. REQUIRES:
// something is written.
double fio_on_segments(const DiskFolder& folder, const char* how, uint32_t block_bytes,
                       uint32_t depth, uint64_t max_bytes);

}  // namespace kvm::bench

#endif  // KVM_BENCH_FIO_H_
