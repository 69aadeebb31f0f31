// SPDX-License-Identifier: Apache-2.0
// The scan: the avx512vbmi table (AVX-512 with VBMI and VNNI). A permute of 64 bytes looks up six
// bits of the code at once, and a dot product of bytes takes the lead. CMakeLists.txt gives this
// file its instruction-set flags.
#include "base/simd/vec_avx512.h"
//
#include "hash_index/sketch/lanes.h"
//
#include "hash_index/sketch/lanes_avx512.h"
#include "hash_index/sketch/scan_args.h"

namespace kvm {
namespace hash_index {
namespace {

// Sums of the bytes of even and odd keys, in words. `all` holds even + 256 odd.
template <int kRows>
struct WordSums {
  __m512i all[kRows];
  __m512i odd[kRows];
};

// A permute ignores the two high bits of an index.
template <int kRows>
inline const uint8_t* add_group(__m512i index, const uint8_t* tables, __m512i* sum) {
  for (int r = 0; r < kRows; ++r) {
    const __m512i table = _mm512_load_si512(tables + r * 64);
    sum[r] = _mm512_add_epi8(sum[r], _mm512_permutexvar_epi8(index, table));
  }
  return tables + kRows * 64;
}

template <int kRows>
inline void add_plane(const ScanQuery& q, const uint8_t* codes, const uint8_t* tables,
                      WordSums<kRows>* words) {
  const auto load = [](const uint8_t* p) { return _mm512_loadu_si512(p); };
  const auto select = [](uint8_t bits, __m512i a, __m512i b) {  // bits ? a : b
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8(static_cast<char>(bits)), a, b, 0xca);
  };
  for (uint32_t row = 0; row < q.shape.code_rows;) {
    const uint32_t left = q.shape.code_rows - row;
    const uint32_t end = row + (left < q.chunk_rows ? left : q.chunk_rows);
    __m512i sum[kRows];
    for (int r = 0; r < kRows; ++r) {
      sum[r] = _mm512_setzero_si512();
    }
    for (; row + 3 <= end; row += 3) {
      const __m512i a = load(codes + row * 64);
      const __m512i b = load(codes + row * 64 + 64);
      const __m512i c = load(codes + row * 64 + 128);
      tables = add_group<kRows>(a, tables, sum);
      tables = add_group<kRows>(b, tables, sum);
      tables = add_group<kRows>(c, tables, sum);
      const __m512i high = select(0x0c, _mm512_srli_epi16(b, 4), _mm512_srli_epi16(c, 2));
      tables = add_group<kRows>(select(0x03, _mm512_srli_epi16(a, 6), high), tables, sum);
    }
    if (row < end) {
      const __m512i a = load(codes + row * 64);
      const __m512i b = row + 1 < end ? load(codes + row * 64 + 64) : _mm512_setzero_si512();
      tables = add_group<kRows>(a, tables, sum);
      if (row + 1 < end) {
        tables = add_group<kRows>(b, tables, sum);
      }
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_set1_epi8(0x0c));
      tables = add_group<kRows>(select(0x03, _mm512_srli_epi16(a, 6), high), tables, sum);
      row = end;
    }
    for (int r = 0; r < kRows; ++r) {
      words->all[r] = _mm512_add_epi16(words->all[r], sum[r]);
      words->odd[r] = _mm512_add_epi16(words->odd[r], _mm512_srli_epi16(sum[r], 8));
    }
  }
}

template <int kRows>
inline void code_sums(const ScanQuery& q, uint32_t first, const uint8_t* block,
                      uint32_t (*sums)[kScanKeys]) {
  const uint8_t* tables = reinterpret_cast<const uint8_t*>(&q) + kLookupOffset +
                          static_cast<size_t>(first) * q.n_groups * 64;
  WordSums<kRows> words;
  for (int r = 0; r < kRows; ++r) {
    words.all[r] = words.odd[r] = _mm512_setzero_si512();
  }
  add_plane<kRows>(q, block, tables, &words);
  if (q.shape.planes == 2) {
    for (int r = 0; r < kRows; ++r) {
      words.all[r] = _mm512_slli_epi16(words.all[r], 1);
      words.odd[r] = _mm512_slli_epi16(words.odd[r], 1);
    }
    add_plane<kRows>(q, block + q.shape.code_rows * kScanKeys, tables, &words);
  }
  for (int r = 0; r < kRows; ++r) {
    // Byte 4 l + v of a code row is key 16 v + l: the halves of words are the keys of a vector.
    const U odd = (U)words.odd[r];
    const U even = (U)_mm512_sub_epi16(words.all[r], _mm512_slli_epi16(words.odd[r], 8));
    store_u(sums[r], even & splat(0xffffu));
    store_u(sums[r] + 16, odd & splat(0xffffu));
    store_u(sums[r] + 32, even >> 16);
    store_u(sums[r] + 48, odd >> 16);
  }
}

inline U lead_sums(U bias, U a, U b, const uint32_t* lead) {
  const __m512i sum = _mm512_dpbusd_epi32((__m512i)bias, (__m512i)a,
                                          _mm512_set1_epi32(static_cast<int32_t>(lead[0])));
  return (U)_mm512_dpbusd_epi32(sum, (__m512i)b, _mm512_set1_epi32(static_cast<int32_t>(lead[1])));
}

}  // namespace
}  // namespace hash_index
}  // namespace kvm

#include "hash_index/sketch/encode_kernel.h"
#include "hash_index/sketch/scan_kernel.h"

namespace kvm {
namespace hash_index {

extern const ScanKernels kScanAvx512Vbmi = {1, scan_logits_kernel, scan_draw_kernel, encode_kernel,
                                            norms_kernel};

}  // namespace hash_index
}  // namespace kvm
