// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/assert.h"
#include "base/round.h"
#include "base/simd/elem.h"
#include "hash_index/lsh/planes.h"

namespace kvm::hash_index {
namespace {

// A byte counts the tables in which an id was met, so that meeting one costs a load, an addition
// and a store. Counts are cut to 2 before they could overflow.
constexpr uint32_t kTablesPerFold = 253;

// Lookups by which offsets are read ahead of ids, and by which those are asked for before. A bucket
// is a few lines anywhere in memory, so what counts is how many are on their way at once.
constexpr uint32_t kAhead = 12;
constexpr uint32_t kRing = 16;  // a power of two, above kAhead
constexpr size_t kPrefetchBytes = 512;

constexpr size_t round_up_to_words(uint32_t n) { return round_up(n, 64); }

struct Bucket {
  const uint16_t* ids;
  uint32_t n;
};

// The buckets of all rows, row by row, found and prefetched ahead of their use.
template <typename Offset>
class BucketStream {
 public:
  BucketStream(const TableLayout& layout, const void* run, uint32_t n_keys, uint32_t n_tables,
               const uint16_t* codes, uint32_t n_rows)
      : layout_(layout), n_keys_(n_keys), codes_(codes) {
    run_ = static_cast<const std::byte*>(run);
    n_ = n_tables * n_rows;
    asking_ = finding_ = Cursor{run_, 0, n_tables, n_tables};
    for (uint32_t i = 0; i < kAhead; ++i) {
      ask();
    }
    for (uint32_t i = 0; i < kAhead; ++i) {
      ask();
      find();
    }
  }

  Bucket next() {
    const Bucket bucket = ring_[taken_++ % kRing];
    ask();
    find();
    return bucket;
  }

 private:
  struct Cursor {
    const std::byte* table;
    uint32_t index;
    uint32_t left;  // tables of this row
    uint32_t n_tables;
  };

  const Offset* offset_of(Cursor* at) const {
    // Codes come from hash_queries; masked, since they select an address.
    const uint32_t code = codes_[at->index++] & (layout_.n_buckets - 1);
    const Offset* offset = reinterpret_cast<const Offset*>(at->table) + code;
    at->table += layout_.stride_bytes;
    if (--at->left == 0) {
      at->left = at->n_tables;
      at->table = run_;
    }
    return offset;
  }

  void ask() {
    if (asking_.index < n_) {
      __builtin_prefetch(offset_of(&asking_));
    }
  }

  void find() {
    if (finding_.index == n_) {
      return;
    }
    const std::byte* table = finding_.table;
    const uint32_t slot = finding_.index % kRing;
    const Offset* offset = offset_of(&finding_);
    // Tables may have been read from a disk: a bucket lies within the ids whatever they say.
    const uint32_t end = std::min<uint32_t>(offset[1], n_keys_);
    const uint32_t begin = std::min<uint32_t>(offset[0], end);
    const std::byte* ids = table + layout_.ids_offset_bytes + begin * sizeof(uint16_t);
    const size_t size = std::min((end - begin) * sizeof(uint16_t), kPrefetchBytes);
    for (size_t at = 0; at < size; at += 64) {
      __builtin_prefetch(ids + at);
    }
    if (size != 0) {
      __builtin_prefetch(ids + size - 1);
    }
    ring_[slot] = {reinterpret_cast<const uint16_t*>(ids), end - begin};
  }

  const TableLayout& layout_;
  const std::byte* run_;
  uint32_t n_keys_;
  const uint16_t* codes_;
  uint32_t n_ = 0;
  uint32_t taken_ = 0;
  Cursor asking_{};
  Cursor finding_{};
  Bucket ring_[kRing];
};

// Every uint16_t has its place, whatever n_keys is.
inline void count(const Bucket& bucket, uint8_t* counts) {
  uint32_t i = 0;
  for (; i + 4 <= bucket.n; i += 4) {
    uint64_t ids;
    std::memcpy(&ids, bucket.ids + i, sizeof ids);
    ++counts[ids & 0xffff];
    ++counts[ids >> 16 & 0xffff];
    ++counts[ids >> 32 & 0xffff];
    ++counts[ids >> 48];
  }
  for (; i < bucket.n; ++i) {
    ++counts[bucket.ids[i]];
  }
}

void fold(uint8_t* counts, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    counts[i] = std::min<uint8_t>(counts[i], 2);
  }
}

// Row masks of the ids: rows [0, 8) in the first plane, the others in the second.
template <typename Offset>
uint64_t count_rows(const Planes& planes, const TableLayout& layout, const void* table_run,
                    uint32_t n_keys, uint32_t n_live, const uint16_t* codes, uint32_t n_rows,
                    uint8_t* counts, uint8_t* masks) {
  const uint32_t n_tables = planes.params.n_tables;
  const size_t n = round_up_to_words(n_live);
  BucketStream<Offset> buckets(layout, table_run, n_keys, n_tables, codes, n_rows);
  std::memset(counts, 0, n);
  uint64_t n_ids = 0;
  for (uint32_t r = 0; r < n_rows; ++r) {
    for (uint32_t t = 0; t < n_tables; ++t) {
      if (t != 0 && t % kTablesPerFold == 0) {
        fold(counts, n);
      }
      const Bucket bucket = buckets.next();
      n_ids += bucket.n;
      count(bucket, counts);
    }
    active_lsh_kernels().collect(counts, n, 1u << (r % 8), masks + r / 8 * n);
  }
  return n_ids;
}

static_assert(sizeof(LshCandidate) == 4 && offsetof(LshCandidate, rows) == 2);

}  // namespace

void hash_queries(const Planes& planes, const float* q, uint32_t n_rows, uint16_t* codes) {
  constexpr uint32_t kRows = 16;
  const LshKernels& kernels = active_lsh_kernels();
  const uint32_t n_tables = planes.params.n_tables;
  alignas(64) uint8_t packed[kMaxLshDim * kPackKeys];
  alignas(64) uint16_t block[kMaxLshTables * kRows];
  for (uint32_t first = 0; first < n_rows; first += kRows) {
    const uint32_t n = std::min(kRows, n_rows - first);
    std::memset(packed, kWeightOffset, static_cast<size_t>(planes.dim_k) * kPackKeys);
    PackArgs pack{};
    pack.rows = reinterpret_cast<const uint8_t*>(q + static_cast<size_t>(first) * planes.dim_k);
    pack.packed = packed;
    pack.elem = vec::kElemF32;
    pack.n = n;
    pack.dim = planes.dim_k;
    kernels.pack(&pack);
    HashArgs hash{};
    hash.packed = packed;
    hash.weights = planes.weights.data();
    hash.bias = planes.bias.data();
    hash.codes = block;
    hash.code_stride = kRows;
    hash.n_keys = kRows;
    hash.dim = planes.dim_k;
    hash.n_bits = planes.params.n_bits;
    hash.table_end = n_tables;
    kernels.hash(&hash);
    for (uint32_t r = 0; r < n; ++r) {
      for (uint32_t t = 0; t < n_tables; ++t) {
        *codes++ = block[t * kRows + r];
      }
    }
  }
}

size_t lookup_scratch_bytes(uint32_t n_keys, uint32_t n_rows) {
  return kMaxRunKeys + (n_rows + 7) / 8 * round_up_to_words(n_keys);
}

uint32_t lookup(const Planes& planes, const void* table_run, uint32_t n_keys, uint32_t n_live,
                const uint16_t* codes, uint32_t n_rows, void* scratch, LshCandidate* out,
                uint64_t* ids_read) {
  KVM_ASSERT(n_keys <= kMaxRunKeys && n_live <= n_keys && n_rows <= kMaxLshRows);
  const TableLayout layout = TableLayout::make(planes.params, n_keys);
  if (ids_read != nullptr) {
    *ids_read = 0;
  }
  if (n_rows == 0 || n_live == 0) {
    return 0;
  }
  uint8_t* counts = static_cast<uint8_t*>(scratch);
  uint8_t* masks = counts + kMaxRunKeys;
  const size_t n = round_up_to_words(n_live);
  const size_t n_planes = (n_rows + 7) / 8;
  std::memset(masks, 0, n_planes * n);
  const auto count_all =
      layout.offset_bytes == sizeof(uint16_t) ? count_rows<uint16_t> : count_rows<uint32_t>;
  const uint64_t n_ids =
      count_all(planes, layout, table_run, n_keys, n_live, codes, n_rows, counts, masks);
  if (ids_read != nullptr) {
    *ids_read = n_ids;
  }
  for (size_t plane = 0; plane < n_planes; ++plane) {
    std::memset(masks + plane * n + n_live, 0, n - n_live);
  }
  return active_lsh_kernels().list(masks, n_planes == 2 ? masks + n : nullptr, n_live,
                                   reinterpret_cast<uint16_t*>(out));
}

}  // namespace kvm::hash_index
