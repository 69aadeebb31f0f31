// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "base/assert.h"
#include "base/round.h"
#include "codecs/rows.h"
#include "hash_index/lsh/planes.h"

namespace kvm::hash_index {
namespace {

// Scratch of build_tables: one block of packed keys, the codes of one table, its cursors.
struct BuildScratch {
  size_t codes_offset = 0;
  size_t cursors_offset = 0;
  size_t bytes = 0;

  BuildScratch(const Planes& planes, uint32_t n_keys) {
    codes_offset = static_cast<size_t>(planes.dim_k) * kPackKeys;
    cursors_offset = codes_offset + round_up(n_keys, kPackKeys) * sizeof(uint16_t);
    bytes = cursors_offset + (size_t{4} << planes.params.n_bits);
    bytes = round_up(bytes, 64);
  }
};

// Hands out the keys of one head in position order.
class KeyReader {
 public:
  KeyReader(const Planes& planes, KvRuns runs, uint32_t head, const float* center,
            uint64_t position)
      : runs_(runs), position_(position), head_(head) {
    args_.center = center;
    args_.dim = planes.dim_k;
    const auto after = [](uint64_t at, const KvRun& run) { return at < run.position; };
    const auto run = std::upper_bound(runs.begin(), runs.end(), position, after);
    run_ = static_cast<size_t>(run - runs.begin());
    run_ -= run_ == 0 ? 0 : 1;
  }

  // Packs the next n <= kPackKeys keys; what is left of the block is zero vectors.
  void pack(uint32_t n, uint8_t* packed) {
    args_.packed = packed;
    if (n < kPackKeys) {
      std::memset(packed, kWeightOffset, static_cast<size_t>(args_.dim) * kPackKeys);
    }
    for (uint32_t first = 0; first < n;) {
      KVM_ASSERT(run_ < runs_.size() && runs_[run_].position <= position_);
      const KvRun& run = runs_[run_];
      const uint64_t skip = position_ - run.position;
      if (skip >= run.n_tokens) {
        ++run_;
        continue;
      }
      const uint32_t left = run.n_tokens - static_cast<uint32_t>(skip);
      args_.n = std::min(n - first, left);
      args_.first = first;
      args_.elem = codecs::codec_of(run.k.codec).elem;
      args_.rows = codecs::row_at(run.k, args_.dim, head_, run.slot + skip);
      args_.scales = codecs::row_scale_at(run.k, head_, run.slot + skip);
      active_lsh_kernels().pack(&args_);
      first += args_.n;
      position_ += args_.n;
    }
  }

 private:
  KvRuns runs_;
  uint64_t position_;
  size_t run_ = 0;
  uint32_t head_;
  PackArgs args_{};
};

// Counting sort: ids by code, ascending within one.
template <typename Offset>
void sort_table(const uint16_t* codes, uint32_t n_keys, uint32_t n_buckets, uint32_t* cursors,
                Offset* offsets, uint16_t* ids) {
  std::fill_n(cursors, n_buckets, 0u);
  for (uint32_t i = 0; i < n_keys; ++i) {
    ++cursors[codes[i]];
  }
  uint32_t begin = 0;
  for (uint32_t code = 0; code < n_buckets; ++code) {
    const uint32_t size = cursors[code];
    offsets[code] = static_cast<Offset>(begin);
    cursors[code] = begin;
    begin += size;
  }
  offsets[n_buckets] = static_cast<Offset>(begin);
  for (uint32_t i = 0; i < n_keys; ++i) {
    ids[cursors[codes[i]]++] = static_cast<uint16_t>(i);
  }
}

// Turns the codes in the place of a table's ids into the table.
void finish_table(const TableLayout& layout, uint32_t n_keys, std::byte* table, uint16_t* codes,
                  uint32_t* cursors) {
  uint16_t* ids = reinterpret_cast<uint16_t*>(table + layout.ids_offset_bytes);
  std::memcpy(codes, ids, n_keys * sizeof(uint16_t));
  if (layout.offset_bytes == sizeof(uint16_t)) {
    sort_table(codes, n_keys, layout.n_buckets, cursors, reinterpret_cast<uint16_t*>(table), ids);
  } else {
    sort_table(codes, n_keys, layout.n_buckets, cursors, reinterpret_cast<uint32_t*>(table), ids);
  }
  const size_t used = (layout.n_buckets + 1) * size_t{layout.offset_bytes};
  std::memset(table + used, 0, layout.ids_offset_bytes - used);
  const size_t end = layout.ids_offset_bytes + n_keys * sizeof(uint16_t);
  std::memset(table + end, 0, layout.stride_bytes - end);
}

}  // namespace

TableLayout TableLayout::make(const LshParams& params, uint32_t n_keys) {
  TableLayout layout;
  layout.n_buckets = 1u << params.n_bits;
  layout.offset_bytes = n_keys < kMaxRunKeys ? sizeof(uint16_t) : sizeof(uint32_t);
  layout.ids_offset_bytes = round_up((layout.n_buckets + 1) * size_t{layout.offset_bytes}, 64);
  // Room for whole blocks: while a table is built, its codes stand where its ids will.
  layout.stride_bytes = layout.ids_offset_bytes + round_up(n_keys, kPackKeys) * sizeof(uint16_t);
  return layout;
}

size_t table_run_bytes(const LshParams& params, uint32_t n_keys) {
  return TableLayout::make(params, n_keys).stride_bytes * params.n_tables;
}

size_t build_scratch_bytes(const Planes& planes, uint32_t n_keys) {
  return BuildScratch(planes, n_keys).bytes;
}

void build_tables(const Planes& planes, KvRuns runs, uint32_t head, const float* center,
                  uint64_t position, uint32_t n_keys, uint32_t table_begin, uint32_t table_end,
                  void* scratch, void* out) {
  KVM_ASSERT(n_keys <= kMaxRunKeys);
  KVM_ASSERT(table_begin <= table_end && table_end <= planes.params.n_tables);
  const TableLayout layout = TableLayout::make(planes.params, n_keys);
  const BuildScratch parts(planes, n_keys);
  uint8_t* packed = static_cast<uint8_t*>(scratch);
  uint16_t* codes = reinterpret_cast<uint16_t*>(packed + parts.codes_offset);
  uint32_t* cursors = reinterpret_cast<uint32_t*>(packed + parts.cursors_offset);
  std::byte* tables = static_cast<std::byte*>(out) + table_begin * layout.stride_bytes;

  KeyReader reader(planes, runs, head, center, position);
  HashArgs args{};
  args.packed = packed;
  args.weights = planes.weights.data();
  args.bias = planes.bias.data();
  args.code_stride = layout.stride_bytes / sizeof(uint16_t);
  args.n_keys = kPackKeys;
  args.dim = planes.dim_k;
  args.n_bits = planes.params.n_bits;
  args.table_begin = table_begin;
  args.table_end = table_end;
  for (uint32_t key = 0; key < n_keys; key += kPackKeys) {
    reader.pack(std::min<uint32_t>(kPackKeys, n_keys - key), packed);
    args.codes = reinterpret_cast<uint16_t*>(tables + layout.ids_offset_bytes) + key;
    active_lsh_kernels().hash(&args);
  }
  for (uint32_t table = table_begin; table < table_end; ++table) {
    finish_table(layout, n_keys, tables, codes, cursors);
    tables += layout.stride_bytes;
  }
}

}  // namespace kvm::hash_index
