// SPDX-License-Identifier: Apache-2.0
// Reads .kvrec files: queries, keys and values recorded from a model or made by a generator, for
// benches and tests of attention. models/house/FORMAT.md has the layout; the files are written by
// Python.
//
// open() maps the file and checks everything but the checksums of the arrays: what a RecordFile
// hands out lies inside the file and has the shape that the metadata promises. verify() reads the
// arrays and checks those too. A file that is cut, damaged or contradicts itself is refused with a
// sentence that names the file, the field and what was expected.
//
// Threads: immutable once opened; any number of readers. Memory: the arrays are the mapping's and
// live as long as the RecordFile; LIMIT: a file that shrinks while it is mapped ends the process.
#ifndef KVM_BENCH_RECORDED_RECORD_FILE_H_
#define KVM_BENCH_RECORDED_RECORD_FILE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"

namespace kvm::bench {

// Rows of head_dim numbers, dense, aligned to 64 bytes.
struct RecordedArray {
  Dtype dtype = Dtype::kBf16;  // kBf16 or kF16
  const void* data = nullptr;  // null: not recorded
  uint64_t n_rows = 0;
  uint32_t head_dim = 0;

  // REQUIRES: row < n_rows. Writes head_dim floats, exactly the stored values.
  void read_row(uint64_t row, float* out) const;
};

// A RecordedGroup is what belongs to one kv head.
struct RecordedGroup {
  uint32_t layer = 0;
  uint32_t kv_head = 0;
  std::vector<uint32_t> q_heads;  // the heads that share the kv head; not empty
  RecordedArray q;                // after RoPE; row j * q_heads.size() + g is query j of q_heads[g]
  RecordedArray k_pre;            // before RoPE, [n_tokens]; data == null where not recorded
  RecordedArray k;                // after RoPE, [n_tokens]
  RecordedArray v;                // [n_tokens]
};

class RecordFile {
 public:
  // Errors: KVM_ERR_IO when the file cannot be read, KVM_ERR_CORRUPT when it is no sound record.
  static Result<RecordFile> open(const std::string& path);

  RecordFile(RecordFile&& other) noexcept { swap(other); }
  RecordFile& operator=(RecordFile&& other) noexcept {
    swap(other);
    return *this;
  }
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;
  ~RecordFile();

  uint32_t n_tokens() const { return n_tokens_; }
  uint32_t n_queries() const { return n_queries_; }
  uint32_t head_dim() const { return head_dim_; }
  // logit = softmax_scale * q.k
  double softmax_scale() const { return softmax_scale_; }

  std::span<const int32_t> positions() const { return positions_; }  // [n_tokens]
  std::span<const int32_t> tokens() const { return tokens_; }        // [n_tokens]; -1: none
  // [n_queries], ascending, each below n_tokens: query j attends to tokens 0..query_steps()[j].
  std::span<const int32_t> query_steps() const { return query_steps_; }
  const std::vector<RecordedGroup>& groups() const { return groups_; }  // not empty
  // The JSON text with everything else: model, prompt, notes.
  const std::string& metadata() const { return metadata_; }

  // Reads the whole file. KVM_ERR_CORRUPT names the first array whose checksum differs.
  Status verify() const;

 private:
  struct Stored {
    std::string name;
    std::string dtype;
    std::vector<uint64_t> shape;
    uint64_t offset = 0;
    uint64_t size_bytes = 0;
    uint32_t crc32 = 0;
  };
  class Loader;

  RecordFile() = default;
  void swap(RecordFile& other) noexcept;

  std::string path_;
  const std::byte* mapping_ = nullptr;
  uint64_t size_bytes_ = 0;
  uint32_t n_tokens_ = 0;
  uint32_t n_queries_ = 0;
  uint32_t head_dim_ = 0;
  double softmax_scale_ = 0;
  std::span<const int32_t> positions_;
  std::span<const int32_t> tokens_;
  std::span<const int32_t> query_steps_;
  std::vector<RecordedGroup> groups_;
  std::vector<Stored> arrays_;
  std::string metadata_;
};

}  // namespace kvm::bench

#endif  // KVM_BENCH_RECORDED_RECORD_FILE_H_
