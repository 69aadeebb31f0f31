// SPDX-License-Identifier: Apache-2.0
// The driver of the blocked path: collects the rows of 64 aligned positions and hands them, with
// masks, to the kernel for a stretch of query rows.
#include <algorithm>
#include <compare>
#include <cstring>
#include <optional>

#include "attention/exact/layout.h"
#include "attention/exact/visibility.h"

namespace kvm::attention {
namespace {

enum class Arithmetic : uint8_t { kF32, kBf16, kScaled };

Arithmetic arithmetic_of(CodecId id) {
  const codecs::Codec& codec = codecs::codec_of(id);
  return codec.kernel_elem() == vec::kElemBf16      ? Arithmetic::kBf16
         : codec.is_scaled() && codec.has_kernels() ? Arithmetic::kScaled
                                                    : Arithmetic::kF32;
}

// A Kind decides, besides its rows, how a block is computed. A block whose tokens differ in it is
// computed once per kind, the other tokens masked out.
struct Kind {
  uint16_t variant;
  Arithmetic k;
  Arithmetic v;

  auto operator<=>(const Kind&) const = default;
};

Kind kind_of(const KvRun& run) {
  return {run.transform, arithmetic_of(run.k.codec), arithmetic_of(run.v.codec)};
}

// The first kind of `runs` behind `last`.
std::optional<Kind> next_kind(KvRuns runs, std::optional<Kind> last) {
  std::optional<Kind> next;
  for (const KvRun& run : runs) {
    const Kind kind = kind_of(run);
    if ((!last || kind > *last) && (!next || kind < *next)) {
      next = kind;
    }
  }
  return next;
}

struct Buffers {
  BlockArgs args;
  uint64_t* row_masks;
  float* log_weight;
  float* k_scale;
  float* v_scale;
  float* references;
  float* sums;
  float* decoded_k;  // [kBlockTokens][dim_k] rows of codecs without kernels
  float* decoded_v;
};

void carve_block(const Problem& problem, Carver& carver, Buffers& b) {
  const uint32_t rows = std::min(problem.n_query * problem.group, kRowBlock) + kRowPad;
  b.args.acc_stride = (problem.dim_v + 31) / 32 * 32;
  b.args.packed_k = carver.take<float>(size_t{problem.dim_k} * kBlockTokens);
  b.args.packed_v = carver.take<float>(size_t{b.args.acc_stride} * kBlockTokens);
  b.args.acc = carver.take<float>(size_t{rows} * b.args.acc_stride);
  b.args.m = carver.take<float>(rows);
  b.args.l = carver.take<float>(size_t{rows} * 16);
  b.args.bad = carver.take<float>(16);
  b.row_masks = carver.take<uint64_t>(rows);
  b.log_weight = carver.take<float>(kBlockTokens);
  b.k_scale = carver.take<float>(kBlockTokens);
  b.v_scale = carver.take<float>(kBlockTokens);
  b.references = carver.take<float>(rows);
  b.sums = carver.take<float>(kBlockTokens);
  b.decoded_k = carver.take<float>(size_t{kBlockTokens} * problem.dim_k);
  b.decoded_v = carver.take<float>(size_t{kBlockTokens} * problem.dim_v);
}

class Block {
 public:
  Block(const Problem& problem, const Plan& plan, const void* prepared, RowRange rows,
        void* scratch)
      : problem_(problem),
        kernels_(plan.table->exact),
        bf16_dot_(plan.table->has_bf16_dot),
        chunk_tokens_(plan.chunk_tokens),
        query_first_(rows.first / problem.group),
        query_end_((rows.first + rows.count - 1) / problem.group + 1),
        visible_(problem.visible, problem.n_query, query_first_, query_end_ - query_first_) {
    Carver carver(scratch);
    carve_block(problem, carver, buffers_);
    BlockArgs& args = buffers_.args;
    args.q = query_rows(problem, prepared);
    args.dim_k = problem.dim_k;
    args.dim_v = problem.dim_v;
    args.scale = problem.scale;
    args.softcap = problem.softcap;
    args.bias = position_bias(problem);
    args.query_first = query_first_;
    args.row_first = rows.first;
    args.row_count = rows.count;
  }

  // Returns whether a number was not finite: the state may be spoiled.
  bool chunk(uint64_t index, const StateView& state) {
    kernels_->block_begin(&buffers_.args);
    walk(index * chunk_tokens_, (index + 1) * chunk_tokens_);
    return kernels_->block_end(&buffers_.args, state.o, state.m, state.l);
  }

  // Adds to the column sums of positions in [begin, end).
  void sums(uint64_t begin, uint64_t end) {
    BlockArgs& args = buffers_.args;
    for (uint32_t i = 0; i < args.row_count + kRowPad; ++i) {
      buffers_.references[i] =
          i < args.row_count ? reference_of(problem_, args.row_first + i) : kNoReference;
    }
    args.references = buffers_.references;
    args.sums = buffers_.sums;
    walk(begin, end);
  }

 private:
  void walk(uint64_t begin, uint64_t end) {
    size_t run = first_run_after(problem_.runs, begin);
    while (run < problem_.runs.size() && problem_.runs[run].position < end) {
      const uint64_t base = problem_.runs[run].position / kPageTokens * kPageTokens;
      size_t last = run;
      while (last < problem_.runs.size() && problem_.runs[last].position < base + kPageTokens) {
        ++last;
      }
      evaluate(base, problem_.runs.subspan(run, last - run));
      run = last;
    }
  }

  // Adds the tokens of `run` that are seen and of the kind; returns whether they have log weights.
  bool collect(const KvRun& run, uint64_t base, uint64_t seen) {
    BlockArgs& args = buffers_.args;
    const uint8_t elem_k = codecs::codec_of(run.k.codec).kernel_elem();
    const uint8_t elem_v = codecs::codec_of(run.v.codec).kernel_elem();
    const bool weighted = run.log_weight != nullptr;
    const float* weights = weighted ? log_weight_at(run, 0) : nullptr;
    for (uint32_t i = 0; i < run.n_tokens; ++i) {
      const uint64_t at = run.position - base + i;
      if ((seen >> at & 1) == 0) {
        continue;
      }
      args.k[at] = kernel_row(run.k, problem_.dim_k, problem_.head, run.slot + i,
                              buffers_.decoded_k + at * problem_.dim_k);
      args.v[at] = problem_.v_in_k ? args.k[at]
                                   : kernel_row(run.v, problem_.dim_v, problem_.head, run.slot + i,
                                                buffers_.decoded_v + at * problem_.dim_v);
      args.elem_k[at] = elem_k;
      args.elem_v[at] = elem_v;
      args.mask |= uint64_t{1} << at;
      if (weighted) {
        buffers_.log_weight[at] = weights[i];
      }
      if (const uint16_t* scale = k_scale(problem_, run, i)) {
        buffers_.k_scale[at] = row_factor(elem_k, *scale);
      }
      if (const uint16_t* scale = v_scale(problem_, run, i)) {
        buffers_.v_scale[at] = row_factor(elem_v, *scale);
      }
    }
    return weighted;
  }

  void evaluate_kind(uint64_t base, uint64_t seen, KvRuns runs, Kind kind) {
    BlockArgs& args = buffers_.args;
    std::fill_n(args.k, kBlockTokens, nullptr);
    std::fill_n(args.v, kBlockTokens, nullptr);
    std::fill_n(buffers_.log_weight, kBlockTokens, 0.0f);
    std::fill_n(buffers_.k_scale, kBlockTokens, 0.0f);
    std::fill_n(buffers_.v_scale, kBlockTokens, 0.0f);
    args.mask = 0;
    bool weighted = false;
    for (const KvRun& run : runs) {
      if (kind_of(run) == kind) {
        weighted |= collect(run, base, seen);
      }
    }
    if (args.mask == 0) {
      return;
    }
    args.variant = kind.variant;
    args.position = base;
    args.bf16_qk =
        bf16_dot_ && kind.k != Arithmetic::kF32 && args.q.bf16_exact[kind.variant] != 0 ? 1 : 0;
    args.bf16_pv = bf16_dot_ && kind.v != Arithmetic::kF32 && !problem_.fp32_weights ? 1 : 0;
    args.k_scale = kind.k == Arithmetic::kScaled ? buffers_.k_scale : nullptr;
    args.v_scale = kind.v == Arithmetic::kScaled ? buffers_.v_scale : nullptr;
    args.log_weight = weighted ? buffers_.log_weight : nullptr;
    if (args.sums == nullptr) {
      kernels_->block(&args);
      return;
    }
    std::fill_n(args.sums, kBlockTokens, 0.0f);
    kernels_->block_sums(&args);
    for (uint64_t bits = args.mask; bits != 0; bits &= bits - 1) {
      const auto at = static_cast<uint32_t>(__builtin_ctzll(bits));
      problem_.column_sums[base + at - problem_.column_position] += args.sums[at];
    }
  }

  void evaluate(uint64_t base, KvRuns runs) {
    const bool alone = query_end_ - query_first_ == 1;
    const uint64_t seen =
        alone ? visible_.any(base) & visible_.one(base, query_first_) : visible_.any(base);
    if (seen == 0) {
      return;
    }
    buffers_.args.row_masks = nullptr;
    if (!alone && !visible_.uniform(base)) {
      for (uint32_t i = query_first_; i < query_end_; ++i) {
        buffers_.row_masks[i - query_first_] = visible_.one(base, i);
      }
      buffers_.args.row_masks = buffers_.row_masks;
    }
    // In an order that does not depend on which runs are listed.
    for (std::optional<Kind> kind = next_kind(runs, {}); kind; kind = next_kind(runs, kind)) {
      evaluate_kind(base, seen, runs, *kind);
    }
  }

  const Problem& problem_;
  const ExactKernels* kernels_;
  bool bf16_dot_;
  uint32_t chunk_tokens_;
  uint32_t query_first_;
  uint32_t query_end_;
  VisibleSet visible_;
  Buffers buffers_{};
};

// Evaluates a chunk again, query token by query token, without what that token does not see: a
// weight of 0 does not make a NaN harmless.
void repair(const Problem& problem, const Plan& plan, const void* prepared, RowRange rows,
            uint64_t chunk, void* scratch, const StateView& state) {
  const uint64_t begin = chunk * plan.chunk_tokens;
  for (uint32_t row = rows.first; row < rows.first + rows.count;) {
    const uint32_t query = row / problem.group;
    const RowRange part{row, std::min((query + 1) * problem.group, rows.first + rows.count) - row};
    const uint32_t at = row - rows.first;
    row += part.count;
    Block(problem, plan, prepared, part, scratch)
        .chunk(chunk, {state.o + size_t{at} * problem.dim_v, state.m + at, state.l + at});
    const NotFinite seen = not_finite_seen(problem, query, begin, begin + plan.chunk_tokens);
    for (uint32_t i = 0; i < part.count; ++i) {
      spoil_state(problem, state, at + i, seen);
    }
  }
}

}  // namespace

size_t block_scratch_bytes(const Problem& problem) {
  Carver carver(nullptr);
  Buffers buffers;
  carve_block(problem, carver, buffers);
  return carver.used_bytes();
}

void block_chunks(const Problem& problem, const Plan& plan, const void* prepared, RowRange rows,
                  uint64_t chunk, uint32_t n, void* scratch, void* states) {
  const size_t stride = state_bytes(problem, rows.count);
  for (uint32_t i = 0; i < n; ++i) {
    const StateView all =
        state_view(problem, rows.count, static_cast<std::byte*>(states) + i * stride);
    for (uint32_t first = 0; first < rows.count; first += kRowBlock) {
      const RowRange part{rows.first + first, std::min(kRowBlock, rows.count - first)};
      const StateView of_part{all.o + size_t{first} * problem.dim_v, all.m + first, all.l + first};
      Block block(problem, plan, prepared, part, scratch);
      if (block.chunk(chunk + i, of_part)) {
        repair(problem, plan, prepared, part, chunk + i, scratch, of_part);
      }
    }
  }
}

void block_sums(const Problem& problem, const Plan& plan, const void* prepared, uint64_t begin,
                uint64_t end, void* scratch) {
  for (uint32_t first = 0; first < plan.rows; first += kRowBlock) {
    const RowRange part{first, std::min(kRowBlock, plan.rows - first)};
    Block(problem, plan, prepared, part, scratch).sums(begin, end);
  }
}

}  // namespace kvm::attention
