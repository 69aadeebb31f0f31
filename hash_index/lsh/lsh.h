// SPDX-License-Identifier: Apache-2.0
// SimHash tables: locality-sensitive hashing of keys as in MagicPIG (Chen et al., 2410.16179).
//
// L tables of K sign projections each. A key k is hashed minus the centre of its run, a query as it
// is; bit b of table l's code is the sign of its product with plane l * K + b. A key is a candidate
// where it meets the query in at least two tables, which happens with probability
//   c = (1 - theta / pi)^K         u = 1 - (1 - c)^L - L c (1 - c)^(L - 1)          (section 4.2)
// over random planes, theta being the angle between the query and the centred key.
//
//   Planes     shared by all runs of a space: Gaussian, from a seed.
//   Table run  the tables of up to 65,536 consecutive keys of one kv head, immutable, ids of 16
//              bits: L * 2 bytes a key and L * (2^K + 1) offsets.
//
// Hashing is exact integer arithmetic: a vector x (centred in fp32) is rounded to 8 bits a channel,
// round(127 x / max |x|), and planes' normal deviates to 64 levels of 1/8 standard deviation. So
// codes, tables and candidates are the same on every machine, for every instruction table. The
// first turns x by less than 1 degree as a rule, the second changes no probability. Vectors with a
// channel that is not finite, and those whose channels are all below 1e-30, are hashed as zero:
// code 0 in every table. That is legal; the u of such a key is that of cosine 0.
//
// Threads: pure in the arguments; Planes are immutable. Memory: callers', except make_planes.
// Errors: none; wrong arguments are programmer errors.
#ifndef KVM_HASH_INDEX_LSH_LSH_H_
#define KVM_HASH_INDEX_LSH_LSH_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/kv_view.h"
#include "base/limits.h"

namespace kvm::hash_index {

inline constexpr uint32_t kMaxRunKeys = 65536;
inline constexpr uint32_t kMaxLshRows = 16;  // queries that are looked up at once

struct LshParams {
  uint32_t n_bits = 10;     // K, 1 to kMaxLshBits
  uint32_t n_tables = 150;  // L, kMinLshTables to kMaxLshTables
  uint64_t seed = 0;

  bool operator==(const LshParams&) const = default;
};

struct Planes;  // lsh/planes.h
using PlanesPtr = std::shared_ptr<const Planes>;

// REQUIRES: params in range; dim_k a multiple of 8, 8 to 256.
PlanesPtr make_planes(const LshParams& params, uint32_t dim_k);
const LshParams& planes_params(const Planes& planes);
size_t planes_bytes(const Planes& planes);  // of memory

// --- Probabilities -------------------------------------------------------------------------------

// u is at least this, so that no key that is met weighs more than 1e12 times itself. Keys with a
// smaller u (at (10, 150): cosine below -0.88) are met less than once in 1e12 lookups of each, save
// by rounding.
inline constexpr double kMinInclusion = 1e-12;

// Collision probability of one table and inclusion probability, for cosines of any value: they are
// clamped to [-1, 1], and NaN counts as 0. Relative error of u: 1e-8.
double collision_probability(double cosine, uint32_t n_bits);
double inclusion_probability(double cosine, const LshParams& params);

// out[i] = ln u of cosines[i], or 1 / u, in fp32; out may be cosines. Absolute error of ln u, and
// relative error of 1 / u: 2e-5, for cosines as they are; the same bits for every kernel table.
// About thirty times as fast as inclusion_probability.
void log_inclusion(const float* cosines, size_t n, const LshParams& params, float* out);
void inverse_inclusion(const float* cosines, size_t n, const LshParams& params, float* out);

// --- Tables --------------------------------------------------------------------------------------

// Bytes of the tables of a run of n_keys <= kMaxRunKeys; a multiple of 64. At (10, 150) and 65,536
// keys: 310 a key.
size_t table_run_bytes(const LshParams& params, uint32_t n_keys);

// Builds the tables [table_begin, table_end) of a run into `out` (table_run_bytes of the whole run,
// aligned to 64): pieces may be built on different threads, and the bytes do not depend on how the
// tables are cut. Each piece reads all keys, which costs about as much as hashing for 10 tables.
// Keys: those of `head` of the runs at [position, position + n_keys), of any codec whose rows stand
// alone, as they are stored (transforms and log weights do not matter); runs may hold others
// besides.
// center [dim_k]; null: zero. scratch: build_scratch_bytes, aligned to 64.
// REQUIRES: the runs hold every one of these positions.
size_t build_scratch_bytes(const Planes& planes, uint32_t n_keys);
void build_tables(const Planes& planes, KvRuns runs, uint32_t head, const float* center,
                  uint64_t position, uint32_t n_keys, uint32_t table_begin, uint32_t table_end,
                  void* scratch, void* out);

// --- Lookup --------------------------------------------------------------------------------------

// Codes of queries: q [n_rows][dim_k], codes [n_rows][L].
void hash_queries(const Planes& planes, const float* q, uint32_t n_rows, uint16_t* codes);

struct LshCandidate {
  uint16_t id;    // offset from the run's first key
  uint16_t rows;  // bit r: row r met it
};

// Ids below n_live <= n_keys that meet a row in two tables or more: ascending, unique over the
// rows, with a mask of the rows that they met. That is what the tables of the first n_live keys
// alone would give, with the same centre. Returns how many; out has room for n_live.
// codes [n_rows][L], n_rows <= kMaxLshRows. scratch: lookup_scratch_bytes, aligned to 64.
// `ids_read` (optional): how many ids were looked at, those of n_live and beyond included.
//
// The bytes of the tables need not be trusted: whatever they hold, nothing outside the run is read,
// and candidates are legal (but wrong).
size_t lookup_scratch_bytes(uint32_t n_keys, uint32_t n_rows);
uint32_t lookup(const Planes& planes, const void* table_run, uint32_t n_keys, uint32_t n_live,
                const uint16_t* codes, uint32_t n_rows, void* scratch, LshCandidate* out,
                uint64_t* ids_read);

}  // namespace kvm::hash_index

#endif  // KVM_HASH_INDEX_LSH_LSH_H_
