// SPDX-License-Identifier: Apache-2.0
// Code sums by nibbles: a table of 16 bytes for four bits of the code, looked up by a shuffle for
// all keys of a register at once. The file that includes this defines before it
//
//   Bytes                 a register of bytes; also of 16-bit words
//   load_bytes, table     a register from memory; 16 bytes from memory in each of its quarters
//   low_nibbles, high_nibbles, look_up, add_bytes, add_words, high_bytes (of words), double_words,
//   drop_high(a, b)       a minus 256 b, in words
#ifndef KVM_HASH_INDEX_SKETCH_NIBBLE_SUMS_H_
#define KVM_HASH_INDEX_SKETCH_NIBBLE_SUMS_H_

#include "hash_index/sketch/lanes.h"
#include "hash_index/sketch/scan_args.h"

namespace kvm {
namespace hash_index {
namespace {

// Sums of the bytes of even and odd keys, in words. `all` holds even + 256 odd.
template <int kRows>
struct WordSums {
  Bytes all[kRows];
  Bytes odd[kRows];
};

template <int kRows>
inline void add_plane(const ScanQuery& q, const uint8_t* codes, const uint8_t* tables,
                      WordSums<kRows>* words) {
  for (uint32_t row = 0; row < q.shape.code_rows;) {
    const uint32_t left = q.shape.code_rows - row;
    const uint32_t end = row + (left < q.chunk_rows ? left : q.chunk_rows);
    Bytes sum[kRows];
    for (int r = 0; r < kRows; ++r) {
      sum[r] = no_bytes();
    }
    for (; row < end; ++row, tables += 2 * kRows * 16) {
      const Bytes code = load_bytes(codes + row * kScanKeys);
      const Bytes low = low_nibbles(code);
      const Bytes high = high_nibbles(code);
      for (int r = 0; r < kRows; ++r) {
        sum[r] = add_bytes(sum[r], look_up(table(tables + r * 16), low));
        sum[r] = add_bytes(sum[r], look_up(table(tables + (kRows + r) * 16), high));
      }
    }
    for (int r = 0; r < kRows; ++r) {
      words->all[r] = add_words(words->all[r], sum[r]);
      words->odd[r] = add_words(words->odd[r], high_bytes(sum[r]));
    }
  }
}

template <int kRows>
inline void code_sums(const ScanQuery& q, uint32_t first, const uint8_t* block,
                      uint32_t (*sums)[kScanKeys]) {
  const uint8_t* tables = reinterpret_cast<const uint8_t*>(&q) + kLookupOffset +
                          static_cast<size_t>(first) * q.n_groups * 16;
  for (uint32_t part = 0; part < kScanKeys / sizeof(Bytes); ++part) {
    WordSums<kRows> words;
    for (int r = 0; r < kRows; ++r) {
      words.all[r] = words.odd[r] = no_bytes();
    }
    const uint8_t* codes = block + part * sizeof(Bytes);
    add_plane<kRows>(q, codes, tables, &words);
    if (q.shape.planes == 2) {
      for (int r = 0; r < kRows; ++r) {
        words.all[r] = double_words(words.all[r]);
        words.odd[r] = double_words(words.odd[r]);
      }
      add_plane<kRows>(q, codes + q.shape.code_rows * kScanKeys, tables, &words);
    }
    for (int r = 0; r < kRows; ++r) {
      // Byte 4 l + v of a code row is key 16 v + l: the halves of words are the keys of a vector.
      const U even = (U)drop_high(words.all[r], words.odd[r]);
      const U odd = (U)words.odd[r];
      uint32_t* out = sums[r] + part * (sizeof(Bytes) / 4);
      store_u(out, even & splat(0xffffu));
      store_u(out + 16, odd & splat(0xffffu));
      store_u(out + 32, even >> 16);
      store_u(out + 48, odd >> 16);
    }
  }
}

}  // namespace
}  // namespace hash_index
}  // namespace kvm

#endif  // KVM_HASH_INDEX_SKETCH_NIBBLE_SUMS_H_
