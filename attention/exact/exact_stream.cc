// SPDX-License-Identifier: Apache-2.0
// The driver of the streaming path: turns the runs of a chunk into items of 16 aligned positions
// and feeds them to the kernel, in long stretches where rows can be read in place.
//
// Items are made one chunk ahead of their evaluation, so that prefetching crosses chunk borders.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <tuple>

#include "attention/exact/layout.h"
#include "attention/exact/visibility.h"
#include "base/assert.h"
#include "base/cpu_features.h"
#include "base/merge.h"
#include "codecs/gear.h"

namespace kvm::attention {
namespace {

static_assert(kGroupItems * kItemTokens == kPageTokens);

// Item flags. An item without flags is read in place.
constexpr uint16_t kStitched = 1;   // rows lie in several runs or not all of them count
constexpr uint16_t kRowMasked = 2;  // query tokens see different tokens
constexpr uint16_t kDecoded = 4;    // of a run without kernels; stitched as well
constexpr uint16_t kCodes = 8;      // K or V is codes; read in place, with parameters of the head

// Tokens of one item may belong to 16 runs with 16 combinations of elements and transforms, each of
// which becomes an item of its own.
constexpr size_t kMaxItems = kStreamChunkTokens;

struct Batch {
  KvItem* items;  // [kMaxItems]
  uint32_t n;
};

// Most bytes of the rows of an item.
constexpr size_t item_bytes(uint32_t dim) { return size_t{kItemTokens} * dim * sizeof(float); }

// A Stitch holds rows and masks of one item that cannot be read in place.
struct Stitch {
  uint8_t* k;
  uint8_t* v;
  float* log_weight;
  uint16_t* k_scale;
  uint16_t* v_scale;
  uint16_t* k_steps;
  uint16_t* v_steps;
  uint16_t* k_factors;
  uint16_t* v_factors;
  uint16_t* row_masks;
};

// Elements of code parameters of a token.
constexpr uint32_t kMaxSteps = 2 * kMaxCodeDim / codecs::Codec::kGroupChannels;

// A PlaneKind says how the kernels of a problem read K, or V, of runs.
class PlaneKind {
 public:
  PlaneKind(const Problem& problem, const ExactKernels& kernels, uint32_t dim, bool is_k)
      : dim_(dim),
        is_k_(is_k),
        reads_codes_(kernels.reads_codes && dim % codecs::Codec::kGroupChannels == 0 &&
                     dim <= kMaxCodeDim && !problem.fp32_weights && !problem.v_in_k) {}

  // vec::Elem, or codes.
  uint8_t elem(CodecId id) const {
    const codecs::Codec& codec = codecs::codec_of(id);
    // Factors go into queries; sums have nothing of a page that they could go into.
    const bool may_be_codes = reads_codes_ && (is_k_ || !codec.is_balanced);
    switch (may_be_codes ? codec.low_bits : 0) {
      case 4:
        return kElemCodes4;
      case 3:
        return kElemCodes3;
      case 2:
        return kElemCodes2;
      default:
        return codec.kernel_elem();
    }
  }
  bool is_decoded(CodecId id) const {
    return !codecs::codec_of(id).has_kernels() && !elem_is_codes(elem(id));
  }
  // Of `n` elements, as kernels read them.
  int64_t bytes(uint8_t elem, int64_t n) const {
    switch (elem) {
      case kElemCodes4:
        return n / 2;
      case kElemCodes3:
        return n * 3 / 8;
      case kElemCodes2:
        return n / 4;
      default:
        return n * static_cast<int64_t>(vec::elem_bytes(elem));
    }
  }
  int64_t row_bytes(uint8_t elem) const { return bytes(elem, dim_); }
  uint32_t dim() const { return dim_; }
  uint32_t n_steps() const { return 2 * dim_ / codecs::Codec::kGroupChannels; }  // of a token
  // Parameters of codes, from the token in `slot` on; the item's first one is in first_slot.
  CodeParams params(const KvPlane& plane, uint32_t head, uint64_t slot, int32_t first_slot) const {
    if (!elem_is_codes(elem(plane.codec))) {
      return {};
    }
    const codecs::Codec& codec = codecs::codec_of(plane.codec);
    const uint16_t* own = codecs::params_at(plane, dim_, head);
    const bool by_token = codec.group_params != 0;
    const uint32_t n_steps_of_page = by_token ? kPageTokens * n_steps() : 0;
    CodeParams params{.steps = by_token ? own + slot * n_steps() : nullptr,
                      .channels = codec.channel_params != 0 ? own + n_steps_of_page : nullptr,
                      .a = nullptr,
                      .b = nullptr,
                      .slot = first_slot,
                      .rank = 0,
                      .n_pairs = 0,
                      .is_balanced = codec.is_balanced};
    if (codec.is_gear()) {
      const codecs::GearLayout layout(codec, dim_);
      params.a = own + layout.a + slot * layout.rank;
      params.b = own + layout.b;
      params.rank = static_cast<uint16_t>(layout.rank);
      params.n_pairs = static_cast<uint16_t>(layout.n_pairs);
    }
    return params;
  }

 private:
  uint32_t dim_;
  bool is_k_;
  bool reads_codes_;
};

const uint16_t* scale_after(const uint16_t* scale, int64_t n) {
  return scale == nullptr ? nullptr : scale + n;
}

// The tokens of `run` inside [position, position + 16), as bits.
uint32_t run_bits(const KvRun& run, uint64_t position) {
  const uint64_t begin = std::max(run.position, position) - position;
  const uint64_t end = std::min(run.position + run.n_tokens, position + kItemTokens) - position;
  return ((1u << end) - 1) & ~((1u << begin) - 1);
}

// A Stream reads one head. Several that read the same pages work with the items of the first.
class Stream {
 public:
  Stream(const Problem& problem, const Plan& plan, const void* prepared, void* scratch);

  void column_sums(uint64_t begin, uint64_t end);

  static size_t scratch_bytes(const Problem& problem);

  // Two batches: the chunk under evaluation and the next one.
  Batch& batch(uint32_t i) { return batches_[i % 2]; }
  void build(uint64_t chunk, Batch& batch) const;
  // From here on, items are those of another head.
  void share_items(const Stream& other);
  // Rows of such an item, for this head.
  const uint8_t* k(const KvItem& item) const {
    return (item.flags & kDecoded) != 0 ? k_row(problem_, run_of(item), token_of(item))
                                        : item.k + kind_k_.bytes(item.elem_k, head_k_);
  }
  const uint8_t* v(const KvItem& item) const {
    return (item.flags & kDecoded) != 0 ? v_row(problem_, run_of(item), token_of(item))
                                        : item.v + kind_v_.bytes(item.elem_v, head_v_);
  }
  // Asks for the scales of an item's page ahead of their use: they lie apart from the rows.
  void prefetch_scales(const KvItem& item) const;
  void prefetch_params(const KvPlane& plane, const PlaneKind& kind) const;
  void begin() const { kernels_->stream_begin(&args_); }
  // From here on, all rows see what the query token does.
  void show_only(uint32_t query) { only_query_ = query; }
  std::byte* spare() const { return spare_; }  // memory of a state
  // Fold n items of one page into the state: their keys, and then their values. `reading` as the
  // kernels take it.
  void fold_keys(const KvItem* items, uint32_t n, const uint8_t* const* reading) const;
  void fold_values(const KvItem* items, uint32_t n, const uint8_t* const* reading) const;
  // Returns whether a number was not finite: the state may be spoiled.
  bool end(void* state) const;

 private:
  // The positions of the block at base that the rows see, and whether all see the same.
  uint64_t seen(uint64_t base) const {
    return only_query_ < 0 ? visible_.any(base)
                           : visible_.any(base) & visible_.one(base, only_query());
  }
  bool is_uniform(uint64_t base) const { return only_query_ >= 0 || visible_.uniform(base); }
  uint32_t only_query() const { return static_cast<uint32_t>(only_query_); }
  KvItem make_item(const KvRun& run, size_t run_index, uint64_t position) const;
  bool same_kind(const KvItem& item, const KvRun& run) const;
  bool comes_before(const KvItem& a, const KvItem& b) const;
  uint32_t add_items(size_t run, uint64_t position, uint32_t visible, uint16_t flags,
                     KvItem* out) const;
  uint32_t add_page(size_t run, uint16_t flags, KvItem* out) const;
  void locate(KvItem& item) const;
  void locate_after(const KvItem& before, KvItem& item) const;
  // Hands items that are read in place to a kernel.
  void fold_in_place(decltype(ExactKernels::stream_keys) fold, const KvItem* items, uint32_t n,
                     const uint8_t* const* reading) const;
  KvItem materialize(const KvItem& item) const;
  void stitch(KvItem& item) const;
  // The run that an item begins with, and its first token there.
  const KvRun& run_of(const KvItem& item) const { return problem_.runs[item.run]; }
  uint64_t token_of(const KvItem& item) const {
    const uint64_t begin = run_of(item).position;
    return std::max(begin, item.position) - begin;
  }

  const Problem& problem_;
  const ExactKernels* kernels_;
  VisibleSet visible_;
  PlaneKind kind_k_;
  PlaneKind kind_v_;
  int64_t only_query_ = -1;  // see show_only
  int64_t head_k_ = 0;       // elements from rows of items to rows of this head
  int64_t head_v_ = 0;
  StreamArgs args_{};
  Batch batches_[2]{};
  Stitch stitch_{};
  FoldedFor folded_for_{};
  float* references_ = nullptr;  // of column sums
  std::byte* spare_ = nullptr;   // a state
};

void carve_stream(const Problem& problem, Carver& carver, StreamArgs& args, Batch* batches,
                  Stitch& stitch, float*& references, std::byte*& spare) {
  const uint32_t rows = problem.n_query * problem.group;
  const uint32_t state_rows = (rows + kRowTile - 1) / kRowTile * kRowTile;
  const uint32_t tiles = std::max(state_rows / kRowTile, 1u);
  args.acc_stride = (problem.dim_v + 31) / 32 * 32;
  args.acc = carver.take<float>(size_t{state_rows} * args.acc_stride);
  args.m = carver.take<float>(tiles * 16);
  args.l = carver.take<float>(size_t{state_rows} * kItemTokens);
  args.bad = carver.take<float>(16);
  args.weights = carver.take<float>(size_t{kGroupItems} * tiles * kRowTile * kItemTokens);
  args.factors = carver.take<float>(size_t{kGroupItems} * tiles * 16);
  args.grown = carver.take<uint32_t>(size_t{kGroupItems} * tiles);
  args.code_words = carver.take<int16_t>(size_t{2} * state_rows * problem.dim_k);
  args.code_terms = carver.take<float>(size_t{8} * tiles * (4 + problem.dim_k / 64 + kMaxCodeRank));
  args.code_sparse =
      carver.take<float>(size_t{tiles} * (kBlockTokens + 2 * kItemTokens) * kRowTile);
  args.code_folded = carver.take<float>(problem.dim_k);
  args.code_turned = carver.take<float>(size_t{problem.dim_k} * kRowTile);
  for (int i = 0; i < 2; ++i) {
    batches[i].items = carver.take<KvItem>(kMaxItems);
  }
  stitch.k = carver.take<uint8_t>(item_bytes(problem.dim_k));
  stitch.v = carver.take<uint8_t>(item_bytes(problem.dim_v));
  stitch.log_weight = carver.take<float>(kItemTokens);
  stitch.k_scale = carver.take<uint16_t>(kItemTokens);
  stitch.v_scale = carver.take<uint16_t>(kItemTokens);
  stitch.k_steps = carver.take<uint16_t>(kItemTokens * kMaxSteps);
  stitch.v_steps = carver.take<uint16_t>(kItemTokens * kMaxSteps);
  stitch.k_factors = carver.take<uint16_t>(kItemTokens * kMaxCodeRank);
  stitch.v_factors = carver.take<uint16_t>(kItemTokens * kMaxCodeRank);
  stitch.row_masks = carver.take<uint16_t>(problem.n_query);
  references = carver.take<float>(state_rows);
  spare = carver.take<std::byte>(state_bytes(problem, rows));
}

// Distances say how far prefetching runs ahead, in bytes.
struct Distances {
  size_t first_level[kAttempts];
  size_t second_level;
};
// Latency times bandwidth is about 4 KiB; as attempts get lost, the first comes early. They enter
// pages of 4 KiB at different times: the processor's own prefetchers start anew there. All of it
// stays in a first level of 48 KiB; the second is asked for nothing more.
constexpr Distances kLargeFirstLevel = {{9 << 10, 14 << 10, 19 << 10, 25 << 10}, 9 << 10};
// In a smaller one it does not stay: the second level takes what is far.
constexpr Distances kSmallFirstLevel = {{3 << 10, 3 << 10, 3 << 10, 3 << 10}, 24 << 10};

void set_distances(const Problem& problem, StreamArgs& args) {
  if (problem.runs.empty()) {
    return;  // nothing to read
  }
  const KvRun& run = problem.runs.front();
  const size_t quarter = kItemTokens / 4 *
                         std::max(codecs::codec_of(run.k.codec).row_bytes(problem.dim_k),
                                  codecs::codec_of(run.v.codec).row_bytes(problem.dim_v));
  const auto quarters = [quarter](size_t bytes) {
    return static_cast<uint8_t>(std::clamp<size_t>(bytes / quarter, 1, 4 * kReadAhead - 4));
  };
  const Distances& of = has_large_first_level() ? kLargeFirstLevel : kSmallFirstLevel;
  std::transform(of.first_level, of.first_level + kAttempts, args.ahead, quarters);
  args.far_ahead = quarters(of.second_level);
}

Stream::Stream(const Problem& problem, const Plan& plan, const void* prepared, void* scratch)
    : problem_(problem),
      kernels_(plan.table->exact),
      visible_(problem.visible, problem.n_query, 0, problem.n_query),
      kind_k_(problem, *kernels_, problem.dim_k, true),
      kind_v_(problem, *kernels_, problem.dim_v, false) {
  Carver carver(scratch);
  carve_stream(problem, carver, args_, batches_, stitch_, references_, spare_);
  args_.q = query_rows(problem, prepared);
  args_.dim_k = problem.dim_k;
  args_.dim_v = problem.dim_v;
  args_.v_stride = v_row_dim(problem);
  args_.fp32_weights = problem.fp32_weights ? 1 : 0;
  args_.scale = problem.scale;
  args_.softcap = problem.softcap;
  args_.bias = position_bias(problem);
  args_.folded_for = &folded_for_;
  set_distances(problem, args_);
}

void Stream::share_items(const Stream& other) {
  const int64_t heads = int64_t{problem_.head} - int64_t{other.problem_.head};
  head_k_ = heads * int64_t{kPageTokens * problem_.dim_k};
  head_v_ = heads * int64_t{kPageTokens * v_row_dim(problem_)};
  args_.scale_offset = heads * int64_t{kPageTokens};
}

size_t Stream::scratch_bytes(const Problem& problem) {
  Carver carver(nullptr);
  StreamArgs args;
  Batch batches[2];
  Stitch stitch;
  float* references;
  std::byte* spare;
  carve_stream(problem, carver, args, batches, stitch, references, spare);
  return carver.used_bytes();
}

// Whether tokens of the run belong to the item. Codes of one item have one page's parameters.
bool Stream::same_kind(const KvItem& item, const KvRun& run) const {
  const KvRun& first = run_of(item);
  const bool same_slots = first.slot + run.position == run.slot + first.position;
  const auto same_codes = [same_slots](uint8_t elem, const KvPlane& a, const KvPlane& b) {
    return !elem_is_codes(elem) || (a.codec == b.codec && a.params == b.params && same_slots);
  };
  return item.elem_k == kind_k_.elem(run.k.codec) && item.elem_v == kind_v_.elem(run.v.codec) &&
         item.variant == run.transform && same_codes(item.elem_k, first.k, run.k) &&
         same_codes(item.elem_v, first.v, run.v);
}

// Whether items of the same positions come in this order: one that does not depend on which tokens
// are visible, and thereby on the run that an item begins with. Items of one codec from several
// pages would; pages do not take turns within 16 positions.
bool Stream::comes_before(const KvItem& a, const KvItem& b) const {
  const auto kind = [this](const KvItem& item) {
    const auto codec = [](uint8_t elem, CodecId id) {
      return elem_is_codes(elem) ? id : CodecId::kNone;
    };
    return std::tuple(item.variant, item.elem_k, item.elem_v,
                      codec(item.elem_k, run_of(item).k.codec),
                      codec(item.elem_v, run_of(item).v.codec), item.run);
  };
  return kind(a) < kind(b);
}

KvItem Stream::make_item(const KvRun& run, size_t run_index, uint64_t position) const {
  const uint64_t token = std::max(position, run.position) - run.position;
  const uint8_t elem_k = kind_k_.elem(run.k.codec);
  const uint8_t elem_v = kind_v_.elem(run.v.codec);
  const bool is_decoded = kind_k_.is_decoded(run.k.codec) || kind_v_.is_decoded(run.v.codec);
  const bool has_codes = elem_is_codes(elem_k) || elem_is_codes(elem_v);
  return {.k = k_row(problem_, run, token),
          .v = v_row(problem_, run, token),
          .log_weight = log_weight_at(run, token),
          .k_scale = k_scale(problem_, run, token),
          .v_scale = v_scale(problem_, run, token),
          .k_codes = {},
          .v_codes = {},
          .row_masks = nullptr,
          .mask = 0,
          .variant = run.transform,
          .elem_k = elem_k,
          .elem_v = elem_v,
          .position = position,
          .flags = static_cast<uint16_t>((is_decoded ? kStitched | kDecoded : 0) |
                                         (has_codes ? kCodes : 0)),
          .run = static_cast<uint32_t>(run_index)};
}

// Items of the 16 positions from `position` on: one per kind of run, in the order of kinds. `run`
// is the first run that ends behind `position`. Which kind an item has depends on its tokens alone;
// how they are cut into runs decides only whether it is stitched.
uint32_t Stream::add_items(size_t run, uint64_t position, uint32_t visible, uint16_t flags,
                           KvItem* out) const {
  uint32_t n = 0;
  for (; run < problem_.runs.size() && problem_.runs[run].position < position + kItemTokens;
       ++run) {
    const KvRun& r = problem_.runs[run];
    const uint32_t bits = run_bits(r, position) & visible;
    if (bits == 0) {
      continue;
    }
    uint32_t i = 0;
    while (i < n && !same_kind(out[i], r)) {
      ++i;
    }
    if (i == n) {
      out[n] = make_item(r, run, position);
      out[n].flags = static_cast<uint16_t>(out[n].flags | flags | (bits == 0xffff ? 0 : kStitched));
      ++n;
    }
    out[i].mask = static_cast<uint16_t>(out[i].mask | bits);
  }
  if (n > 1) {
    std::sort(out, out + n,
              [this](const KvItem& a, const KvItem& b) { return comes_before(a, b); });
  }
  return n;
}

// The items of a whole page in one run: what add_items would give, at a fraction of its cost, which
// would otherwise show in the figures.
uint32_t Stream::add_page(size_t run, uint16_t flags, KvItem* out) const {
  const KvRun& r = problem_.runs[run];
  const size_t k_step = kItemTokens * codecs::codec_of(r.k.codec).row_bytes(problem_.dim_k);
  const size_t v_step = kItemTokens * codecs::codec_of(r.v.codec).row_bytes(v_row_dim(problem_));
  KvItem item = make_item(r, run, r.position);
  item.mask = 0xffff;
  item.flags = static_cast<uint16_t>(item.flags | flags);
  for (uint32_t i = 0; i < kGroupItems; ++i) {
    out[i] = item;
    item.k += k_step;
    item.v += v_step;
    if (item.log_weight != nullptr) {
      item.log_weight += kItemTokens;
    }
    item.k_scale = scale_after(item.k_scale, kItemTokens);
    item.v_scale = scale_after(item.v_scale, kItemTokens);
    item.position += kItemTokens;
  }
  return kGroupItems;
}

// Fills the batch with the items of kStreamChunkTokens positions from `chunk` (counted in those).
void Stream::build(uint64_t chunk, Batch& batch) const {
  const uint64_t end = (chunk + 1) * kStreamChunkTokens;
  size_t run = first_run_after(problem_.runs, chunk * kStreamChunkTokens);
  uint32_t n = 0;
  while (run < problem_.runs.size() && problem_.runs[run].position < end) {
    const uint64_t base = problem_.runs[run].position / kPageTokens * kPageTokens;
    const uint64_t visible = seen(base);
    const uint16_t flags = is_uniform(base) ? 0 : kRowMasked;
    if (visible == ~uint64_t{0} && problem_.runs[run].n_tokens == kPageTokens) {
      n += add_page(run, flags, batch.items + n);
      ++run;
      continue;
    }
    for (uint64_t slot = 0; slot < kPageTokens; slot += kItemTokens) {
      const uint64_t position = base + slot;
      while (run < problem_.runs.size() &&
             problem_.runs[run].position + problem_.runs[run].n_tokens <= position) {
        ++run;
      }
      const uint32_t bits = static_cast<uint32_t>(visible >> slot & 0xffff);
      if (bits != 0) {
        n += add_items(run, position, bits, flags, batch.items + n);
      }
    }
    while (run < problem_.runs.size() && problem_.runs[run].position < base + kPageTokens) {
      ++run;
    }
  }
  batch.n = n;
}

// Puts rows into an item, as kernels load them, and what codes have for each token. slot: of the
// first.
void put_rows(const KvPlane& plane, const PlaneKind& kind, uint32_t head, uint64_t slot, uint32_t n,
              uint8_t* out, uint16_t* steps, uint16_t* factors) {
  const uint32_t dim = kind.dim();
  const uint8_t* rows = codecs::row_at(plane, dim, head, slot);
  if (kind.is_decoded(plane.codec)) {
    codecs::decode_scaled(rows, plane.codec, codecs::params_at(plane, dim, head), dim,
                          static_cast<uint32_t>(slot), n, dim, reinterpret_cast<float*>(out));
    return;
  }
  std::memcpy(out, rows, n * codecs::codec_of(plane.codec).row_bytes(dim));
  const CodeParams params = kind.params(plane, head, slot, 0);
  if (params.steps != nullptr) {
    std::copy_n(params.steps, n * kind.n_steps(), steps);
  }
  if (params.a != nullptr) {
    std::copy_n(params.a, n * params.rank, factors);
  }
}

// Gathers the rows of a stitched item; rows that do not count become zero.
void Stream::stitch(KvItem& item) const {
  const auto k_bytes = static_cast<size_t>(kind_k_.row_bytes(item.elem_k));
  const auto v_bytes = static_cast<size_t>(kind_v_.row_bytes(item.elem_v));
  if (item.mask != 0xffff) {
    std::memset(stitch_.k, 0, k_bytes * kItemTokens);
    if (!problem_.v_in_k) {
      std::memset(stitch_.v, 0, v_bytes * kItemTokens);
    }
  }
  std::fill_n(stitch_.log_weight, kItemTokens, 0.0f);
  std::fill_n(stitch_.k_scale, kItemTokens, uint16_t{0});
  std::fill_n(stitch_.v_scale, kItemTokens, uint16_t{0});
  if ((item.flags & kCodes) != 0) {
    std::fill_n(stitch_.k_steps, kItemTokens * kMaxSteps, uint16_t{0});
    std::fill_n(stitch_.v_steps, kItemTokens * kMaxSteps, uint16_t{0});
    std::fill_n(stitch_.k_factors, kItemTokens * kMaxCodeRank, uint16_t{0});
    std::fill_n(stitch_.v_factors, kItemTokens * kMaxCodeRank, uint16_t{0});
  }
  bool weighted = false;
  for (size_t i = item.run;
       i < problem_.runs.size() && problem_.runs[i].position < item.position + kItemTokens; ++i) {
    const KvRun& run = problem_.runs[i];
    if (!same_kind(item, run)) {
      continue;
    }
    const uint32_t taken = run_bits(run, item.position) & item.mask;
    // Rows that follow each other at once.
    for (uint32_t bits = taken; bits != 0;) {
      const auto at = static_cast<uint32_t>(__builtin_ctz(bits));
      const auto n = static_cast<uint32_t>(__builtin_ctz(~(bits >> at)));
      const uint64_t slot = run.slot + (item.position + at - run.position);
      put_rows(run.k, kind_k_, problem_.head, slot, n, stitch_.k + at * k_bytes,
               stitch_.k_steps + at * kind_k_.n_steps(),
               stitch_.k_factors + at * item.k_codes.rank);
      if (!problem_.v_in_k) {
        put_rows(run.v, kind_v_, problem_.head, slot, n, stitch_.v + at * v_bytes,
                 stitch_.v_steps + at * kind_v_.n_steps(),
                 stitch_.v_factors + at * item.v_codes.rank);
      }
      bits &= ~(((1u << n) - 1) << at);
    }
    for (uint32_t bits = taken; bits != 0; bits &= bits - 1) {
      const auto at = static_cast<uint32_t>(__builtin_ctz(bits));
      const uint64_t token = item.position + at - run.position;
      if (const float* weight = log_weight_at(run, token)) {
        stitch_.log_weight[at] = *weight;
        weighted = true;
      }
      if (const uint16_t* scale = k_scale(problem_, run, token)) {
        stitch_.k_scale[at] = *scale;
      }
      if (const uint16_t* scale = v_scale(problem_, run, token)) {
        stitch_.v_scale[at] = *scale;
      }
    }
  }
  item.k = stitch_.k;
  item.v = problem_.v_in_k ? stitch_.k : stitch_.v;
  item.log_weight = weighted ? stitch_.log_weight : nullptr;
  item.k_scale = item.k_scale != nullptr ? stitch_.k_scale : nullptr;
  item.v_scale = item.v_scale != nullptr ? stitch_.v_scale : nullptr;
  item.k_codes.steps = item.k_codes.steps != nullptr ? stitch_.k_steps : nullptr;
  item.v_codes.steps = item.v_codes.steps != nullptr ? stitch_.v_steps : nullptr;
  item.k_codes.a = item.k_codes.a != nullptr ? stitch_.k_factors : nullptr;
  item.v_codes.a = item.v_codes.a != nullptr ? stitch_.v_factors : nullptr;
}

// Leads an item of the first head to this one, where it lies.
void Stream::locate(KvItem& item) const {
  item.k = k(item);
  item.v = v(item);
  item.k_scale = scale_after(item.k_scale, args_.scale_offset);
  item.v_scale = scale_after(item.v_scale, args_.scale_offset);
  if ((item.flags & kCodes) != 0) {
    const uint64_t slot = run_of(item).slot + token_of(item);
    const auto first_slot = static_cast<int32_t>(
        static_cast<int64_t>(run_of(item).slot + item.position - run_of(item).position));
    item.k_codes = kind_k_.params(run_of(item).k, problem_.head, slot, first_slot);
    item.v_codes = kind_v_.params(run_of(item).v, problem_.head, slot, first_slot);
  }
}

// The same, behind one that has been located.
void Stream::locate_after(const KvItem& before, KvItem& item) const {
  if (item.run != before.run || token_of(item) < token_of(before)) {
    locate(item);
    return;
  }
  const auto n_tokens = static_cast<uint32_t>(token_of(item) - token_of(before));
  item.k = k(item);
  item.v = v(item);
  item.k_scale = scale_after(item.k_scale, args_.scale_offset);
  item.v_scale = scale_after(item.v_scale, args_.scale_offset);
  const auto advance = [n_tokens](CodeParams params, uint32_t n_steps) {
    params.steps = scale_after(params.steps, int64_t{n_tokens} * n_steps);
    params.a = scale_after(params.a, int64_t{n_tokens} * params.rank);
    params.slot += static_cast<int32_t>(n_tokens);
    return params;
  };
  item.k_codes = advance(before.k_codes, kind_k_.n_steps());
  item.v_codes = advance(before.v_codes, kind_v_.n_steps());
}

// The item of this head as a kernel may read it, without offsets.
KvItem Stream::materialize(const KvItem& item) const {
  KvItem ready = item;
  locate(ready);
  if ((item.flags & kStitched) != 0) {
    stitch(ready);
  }
  if ((item.flags & kRowMasked) != 0) {
    const uint64_t base = item.position / kPageTokens * kPageTokens;
    for (uint32_t i = 0; i < problem_.n_query; ++i) {
      stitch_.row_masks[i] = static_cast<uint16_t>(visible_.one(base, i) >> (item.position - base));
    }
    ready.row_masks = stitch_.row_masks;
  }
  return ready;
}

// Items that have to be made ready are folded whole by fold_keys.
bool in_place(const KvItem* items, uint32_t n) {
  return std::all_of(items, items + n,
                     [](const KvItem& item) { return (item.flags & ~kCodes) == 0; });
}

void Stream::fold_in_place(decltype(ExactKernels::stream_keys) fold, const KvItem* items,
                           uint32_t n, const uint8_t* const* reading) const {
  const bool has_codes =
      std::any_of(items, items + n, [](const KvItem& item) { return item.flags != 0; });
  if (!has_codes) {
    fold(&args_, items, n, reading);
    return;
  }
  std::array<KvItem, kGroupItems> ready;
  std::copy_n(items, n, ready.begin());
  locate(ready[0]);
  for (uint32_t i = 1; i < n; ++i) {
    locate_after(ready[i - 1], ready[i]);
  }
  StreamArgs args = args_;
  args.scale_offset = 0;
  fold(&args, ready.data(), n, reading);
}

void Stream::fold_keys(const KvItem* items, uint32_t n, const uint8_t* const* reading) const {
  if (in_place(items, n)) {
    fold_in_place(kernels_->stream_keys, items, n, reading);
    return;
  }
  StreamArgs args = args_;
  args.scale_offset = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const KvItem one = materialize(items[i]);
    const uint8_t* rows[1 + kReadAhead];
    std::copy_n(reading + i + 1, kReadAhead, rows + 1);
    rows[0] = one.k;
    kernels_->stream_keys(&args, &one, 1, rows);
    rows[0] = one.v;
    kernels_->stream_values(&args, &one, 1, rows);
  }
}

void Stream::fold_values(const KvItem* items, uint32_t n, const uint8_t* const* reading) const {
  if (in_place(items, n)) {
    fold_in_place(kernels_->stream_values, items, n, reading);
  }
}

void Stream::prefetch_params(const KvPlane& plane, const PlaneKind& kind) const {
  if (!elem_is_codes(kind.elem(plane.codec))) {
    return;
  }
  const uint64_t bytes = codecs::codec_of(plane.codec).head_params_bytes(kind.dim());
  const auto* own =
      reinterpret_cast<const std::byte*>(codecs::params_at(plane, kind.dim(), problem_.head));
  for (uint64_t at = 0; at < bytes; at += 64) {
    __builtin_prefetch(own + at);
  }
}

void Stream::prefetch_scales(const KvItem& item) const {
  for (const uint16_t* scale : {item.k_scale, item.v_scale}) {
    if (scale != nullptr) {
      const uint16_t* own = scale + args_.scale_offset;
      __builtin_prefetch(own);
      __builtin_prefetch(own + kPageTokens / 2);
    }
  }
  if ((item.flags & kCodes) != 0) {
    prefetch_params(run_of(item).k, kind_k_);
    prefetch_params(run_of(item).v, kind_v_);
  }
}

bool Stream::end(void* state) const {
  const StateView view = state_view(problem_, args_.q.rows, state);
  return kernels_->stream_end(&args_, view.o, view.m, view.l);
}

void Stream::column_sums(uint64_t begin, uint64_t end) {
  const uint32_t rows = args_.q.rows;
  for (uint32_t row = 0; row < round_up(rows, uint64_t{kRowTile}); ++row) {
    references_[row] = reference_of(problem_, row);
  }
  for (uint64_t c = begin / kStreamChunkTokens; c * kStreamChunkTokens < end; ++c) {
    build(c, batches_[0]);
    for (uint32_t i = 0; i < batches_[0].n; ++i) {
      const KvItem& item = batches_[0].items[i];
      if (item.position < begin || item.position >= end) {
        continue;
      }
      const KvItem ready = materialize(item);
      float sums[kItemTokens];
      kernels_->stream_sums(&args_, &ready, references_, sums);
      for (uint32_t bits = item.mask; bits != 0; bits &= bits - 1) {
        const auto at = static_cast<uint32_t>(__builtin_ctz(bits));
        problem_.column_sums[item.position + at - problem_.column_position] += sums[at];
      }
    }
  }
}

// Streams of a gang, without a heap.
class Streams {
 public:
  ~Streams() {
    for (Stream& stream : *this) {
      stream.~Stream();
    }
  }
  Streams() = default;
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  void add(const Problem& problem, const Plan& plan, const void* prepared, void* scratch) {
    new (begin() + size_++) Stream(problem, plan, prepared, scratch);
  }
  size_t size() const { return size_; }
  Stream* begin() { return reinterpret_cast<Stream*>(memory_); }
  Stream* end() { return begin() + size_; }
  Stream& operator[](size_t i) { return begin()[i]; }

 private:
  alignas(Stream) std::byte memory_[kMaxGang * sizeof(Stream)];
  size_t size_ = 0;
};

// Items [at, end) of a chunk, all of one page.
struct PageItems {
  uint32_t at;
  uint32_t end;
};

PageItems next_page(const Batch& batch, uint32_t at) {
  const uint64_t page = batch.items[at].position / kPageTokens;
  uint32_t end = at + 1;
  while (end < batch.n && end - at < kGroupItems &&
         batch.items[end].position / kPageTokens == page) {
    ++end;
  }
  return {at, end};
}

// A Reading lists the stretches of 16 rows in the order in which a gang reads them: page by page,
// keys of all heads and then values of all heads, which is the order of their addresses.
class Reading {
 public:
  void start(size_t n_wanted) {
    n_ = 0;
    n_wanted_ = n_wanted;
  }
  bool done() const { return n_ == n_wanted_; }
  void add_page(Streams& streams, const KvItem* items, uint32_t n) {
    for (const Stream& stream : streams) {
      for (uint32_t i = 0; i < n && n_ < n_wanted_; ++i) {
        at_[n_++] = stream.k(items[i]);
      }
    }
    for (const Stream& stream : streams) {
      for (uint32_t i = 0; i < n && n_ < n_wanted_; ++i) {
        at_[n_++] = stream.v(items[i]);
      }
    }
  }
  // Where nothing follows.
  void repeat_last() {
    std::fill(at_.begin() + n_, at_.begin() + n_wanted_, at_[n_ - 1]);
    n_ = n_wanted_;
  }
  const uint8_t* const* from(size_t i) const { return at_.data() + i; }

 private:
  std::array<const uint8_t*, size_t{kMaxGang} * 2 * kGroupItems + kReadAhead> at_;
  size_t n_ = 0;
  size_t n_wanted_ = 0;
};

// Lists what a gang reads from the given page of chunk i on: all of it, and kReadAhead stretches
// more.
void read_from(Streams& streams, uint32_t i, PageItems page, Reading& reading) {
  Stream& first = streams[0];
  reading.start(streams.size() * 2 * (page.end - page.at) + kReadAhead);
  reading.add_page(streams, first.batch(i).items + page.at, page.end - page.at);
  const uint32_t last = i + 1;
  while (!reading.done()) {
    if (page.end == first.batch(i).n) {
      if (i == last || first.batch(last).n == 0) {
        reading.repeat_last();
        return;
      }
      i = last;
      page.end = 0;
    }
    page = next_page(first.batch(i), page.end);
    reading.add_page(streams, first.batch(i).items + page.at, page.end - page.at);
  }
}

// The item that follows the first `end` of chunk i; the last one where none does.
const KvItem* next_item(Streams& streams, uint32_t i, uint32_t end) {
  const Batch& batch = streams[0].batch(i);
  const Batch& later = streams[0].batch(i + 1);
  return end < batch.n ? batch.items + end : later.n != 0 ? later.items : batch.items + end - 1;
}

// Chunk i, page by page.
void fold_chunk(Streams& streams, uint32_t i) {
  const Batch& batch = streams[0].batch(i);
  Reading reading;
  for (PageItems page{0, 0}; page.end < batch.n;) {
    page = next_page(batch, page.end);
    read_from(streams, i, page, reading);
    const KvItem* items = batch.items + page.at;
    const uint32_t n = page.end - page.at;
    const KvItem* next = next_item(streams, i, page.end);
    size_t at = 0;
    // A prefetch may be dropped, so scales are asked for twice.
    for (const Stream& stream : streams) {
      stream.prefetch_scales(*next);
      stream.fold_keys(items, n, reading.from(at));
      at += n;
    }
    for (const Stream& stream : streams) {
      stream.prefetch_scales(*next);
      stream.fold_values(items, n, reading.from(at));
      at += n;
    }
  }
}

void* state_of(const GangMember& member, const Plan& plan, uint32_t i) {
  return static_cast<std::byte*>(member.states) + i * state_bytes(*member.problem, plan.rows);
}

// States to be repaired when all chunks have been evaluated: until then scratch is in use.
void mark(const Problem& problem, const Plan& plan, void* state) {
  spoil_state(problem, state_view(problem, plan.rows, state), 0, {.key = true});
}
bool is_marked(const Problem& problem, const Plan& plan, void* state) {
  return std::isnan(state_view(problem, plan.rows, state).l[0]);
}

// Evaluates one chunk of its own head again.
void fold_again(Streams& one, uint64_t chunk) {
  Stream& stream = one[0];
  stream.build(chunk, stream.batch(0));
  stream.batch(1).n = 0;
  stream.begin();
  fold_chunk(one, 0);
}

// Evaluates a chunk again, query token by query token, without what that token does not see: a
// weight of 0 does not make a NaN harmless. Rows that see none have the bits that they would have
// without it: a token that is not seen changes none.
void repair(const GangMember& member, const Plan& plan, uint64_t chunk, void* scratch,
            void* state) {
  const Problem& problem = *member.problem;
  const StateView to = state_view(problem, plan.rows, state);
  const uint64_t begin = chunk * kStreamChunkTokens;
  Streams one;
  one.add(problem, plan, member.prepared, scratch);
  Stream& stream = one[0];
  for (uint32_t query = 0; query < problem.n_query; ++query) {
    const uint32_t first = query * problem.group;
    stream.show_only(query);
    fold_again(one, chunk);
    stream.end(stream.spare());
    const StateView from = state_view(problem, plan.rows, stream.spare());
    std::copy_n(from.o + size_t{first} * problem.dim_v, size_t{problem.group} * problem.dim_v,
                to.o + size_t{first} * problem.dim_v);
    std::copy_n(from.m + first, problem.group, to.m + first);
    std::copy_n(from.l + first, problem.group, to.l + first);
    const NotFinite seen = not_finite_seen(problem, query, begin, begin + kStreamChunkTokens);
    for (uint32_t row = first; row < first + problem.group; ++row) {
      spoil_state(problem, to, row, seen);
    }
  }
}

}  // namespace

size_t stream_scratch_bytes(const Problem& problem) { return Stream::scratch_bytes(problem); }

void stream_chunks(const Problem& problem, const Plan& plan, const void* prepared, uint64_t chunk,
                   uint32_t n, void* scratch, void* states) {
  const GangMember alone{&problem, prepared, states};
  stream_gang({&alone, 1}, plan, chunk, n, scratch);
}

void stream_gang(std::span<const GangMember> members, const Plan& plan, uint64_t chunk, uint32_t n,
                 void* scratch) {
  Streams streams;
  for (const GangMember& member : members) {
    std::byte* own = static_cast<std::byte*>(scratch) + streams.size() * plan.scratch_bytes;
    streams.add(*member.problem, plan, member.prepared, own);
  }
  Stream& first = streams[0];
  for (Stream& stream : streams) {
    stream.share_items(first);
  }
  first.build(chunk, first.batch(0));
  bool any_marked = false;
  for (uint32_t i = 0; i < n; ++i) {
    Batch& next = first.batch(i + 1);
    next.n = 0;
    if (i + 1 < n) {
      first.build(chunk + i + 1, next);
    }
    for (const Stream& stream : streams) {
      stream.begin();
    }
    fold_chunk(streams, i);
    for (size_t m = 0; m < members.size(); ++m) {
      void* state = state_of(members[m], plan, i);
      if (streams[m].end(state)) {
        mark(*members[m].problem, plan, state);
        any_marked = true;
      }
    }
  }
  if (!any_marked) {
    return;
  }
  for (const GangMember& member : members) {
    for (uint32_t i = 0; i < n; ++i) {
      if (is_marked(*member.problem, plan, state_of(member, plan, i))) {
        repair(member, plan, chunk + i, scratch, state_of(member, plan, i));
      }
    }
  }
}

void stream_sums(const Problem& problem, const Plan& plan, const void* prepared, uint64_t begin,
                 uint64_t end, void* scratch) {
  Stream(problem, plan, prepared, scratch).column_sums(begin, end);
}

}  // namespace kvm::attention
