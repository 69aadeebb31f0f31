// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/pilot.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "attention/sampled/estimate.h"
#include "attention/sampled/sample.h"
#include "attention/sampled/select.h"
#include "base/merge.h"

namespace kvm::attention {
namespace {

using hash_index::permanent_random;

constexpr uint64_t kPilotSeed = 0x9d39247e33776d41;
constexpr uint64_t kProbeSeed = 0x2af7398005aaa5c7;
constexpr uint32_t kPilotShare = 16;
// With a budget thresholds alone are asked for.
constexpr uint32_t kBudgetPilotShare = 32;
constexpr uint32_t kFewestBlocks = 32;
constexpr uint32_t kMostBlocks = 512;
// Keys of the pilot that are read for each row, and for all rows together.
constexpr double kProbeKeys = 64;
constexpr uint32_t kMostProbes = 2048;
// A sample that may grow starts with this share of what the pilot says that it needs: to grow it
// takes as long as to read the keys that it could have done without. Of many rows one is nearly
// always worse than the pilot says, and all wait for it: for each row above kFewRows the share is
// larger, as far as what is read then pays. (65,536 tokens, eps 0.1: 16 rows took 12 ms and 11,000
// keys with 1.2, 4 ms and 12,000 keys with 1.9, and exactly 6 ms.)
constexpr float kFirstShare = 1.2f;
constexpr uint32_t kFewRows = 4;
constexpr float kShareOfRow = 0.06f;
// Where the pilot says so many times what is worth it, it is exact at once.
constexpr double kSurelyMore = 1.5;
// Standard deviation of what the sketch's logits are off, in nats: beyond it the answer is exact.
// Weights are off by a factor of fifty there.
constexpr double kMostError = 4;
// A sample is planned for this: ordinary values, and draws enough. Where the error has fewer
// directions the sample grows.
constexpr ErrorShape kPlanned{.largest = 0.15, .squares = 0.05};
constexpr double kPlanDraws = 200;
// Thresholds, and logits, beyond it have no place for fractions of a nat.
constexpr float kMostLogC = 1e6f;
// How far the probe looks into F.
constexpr uint64_t kProbeTail = 256;
constexpr uint32_t kMostProbeRanges = 16;

// Blocks of R for each one that the pilot looks at.
uint64_t pilot_stride(const ApproxParams& params, uint64_t n_blocks) {
  const uint64_t share = params.budget > 0 ? kBudgetPilotShare : kPilotShare;
  const uint64_t stride = std::clamp<uint64_t>(n_blocks / kFewestBlocks, 1, share);
  return std::max(stride, (n_blocks + kMostBlocks - 1) / kMostBlocks);
}

uint64_t n_pilot_blocks(const ApproxParams& params, uint64_t n_keys) {
  const uint64_t n_blocks = n_keys / kPageTokens;
  const uint64_t stride = pilot_stride(params, n_blocks);
  return (n_blocks + stride - 1) / stride;
}

struct Pilot {
  float top[kMaxApproxRows];       // a logit of each row, its largest in the pilot or a lower one
  float factor[kMaxApproxRows];    // c e^top
  size_t n;                        // keys
  double share;                    // keys of R for each key of the pilot
  float* logits;                   // [rows][n]
  float* sizes;                    // [rows][n], each row relative to its top
  float* largest_size;             // [n]: over rows, c applied
  float* norms;                    // [n]
  hash_index::SketchSpan* blocks;  // [blocks]: of one block each
  uint64_t* positions;             // [blocks]
  float* block_logits;             // [rows][64]
  // The probe.
  uint64_t* probe_position;  // [kMostProbes]
  uint32_t* probe_ids;
  uint32_t* probe_at;   // place in the pilot
  float* probe_chance;  // p in the pilot
  float* probe_factor;  // [kMostProbes][rows]: what a key stands for, the same for all rows
  KeyShares shares;     // of kMostProbes
  float* o;             // [padded rows][acc_stride]
  void* sums;
  void* state;
  std::byte* exact_scratch;
};

Pilot carve_pilot(const ApproxInput& input, const Plan& exact, uint64_t n_keys, Carver& carver) {
  const Problem& problem = *input.problem;
  const uint32_t rows = problem.n_query * problem.group;
  Pilot p;
  const uint64_t n_blocks = n_pilot_blocks(input.params, n_keys);
  p.n = n_blocks * kPageTokens;
  p.share = static_cast<double>(n_keys) / static_cast<double>(std::max<size_t>(p.n, 1));
  p.logits = carver.take<float>(rows * p.n);
  p.sizes = carver.take<float>(rows * p.n);
  p.largest_size = carver.take<float>(p.n);
  p.norms = carver.take<float>(p.n);
  p.blocks = carver.take<hash_index::SketchSpan>(n_blocks);
  p.positions = carver.take<uint64_t>(n_blocks);
  p.block_logits = carver.take<float>(size_t{rows} * kPageTokens);
  p.probe_position = carver.take<uint64_t>(kMostProbes);
  p.probe_ids = carver.take<uint32_t>(kMostProbes);
  p.probe_at = carver.take<uint32_t>(kMostProbes);
  p.probe_chance = carver.take<float>(kMostProbes);
  p.probe_factor = carver.take<float>(size_t{kMostProbes} * rows);
  p.shares = {.n = 0, .stride = kMostProbes, .rows = rows};
  p.shares.size = carver.take<float>(size_t{kMostProbes} * rows);
  p.shares.excess = carver.take<float>(size_t{kMostProbes} * rows);
  p.o = carver.take<float>(size_t{padded_rows(rows)} * acc_stride(problem));
  p.sums = carver.take<std::byte>(gather_sums_bytes(problem));
  p.state = carver.take<std::byte>(state_bytes(problem, rows));
  p.exact_scratch = carver.take<std::byte>(exact_scratch_bytes(problem, exact));
  return p;
}

// Finds the pilot's blocks.
void choose_blocks(const Context& c, Pilot& p) {
  const uint64_t seed = c.params().seed ^ kPilotSeed;
  const uint64_t stride = pilot_stride(c.params(), c.plan->n_keys_indexed / kPageTokens);
  uint64_t at = 0;     // index of a stretch's first block among those of R
  uint64_t group = 0;  // how many of the pilot's blocks are found
  uint64_t next = 0;   // index of the one that is looked for
  const uint64_t n_blocks = c.plan->n_keys_indexed / kPageTokens;
  const auto choose = [&] {
    const uint64_t first = group * stride;
    const uint64_t n = first < n_blocks ? std::min(stride, n_blocks - first) : 1;
    const float u = permanent_random(seed, group);
    next = first + std::min(n - 1, static_cast<uint64_t>(u * static_cast<float>(n)));
  };
  choose();
  for_stretches_in(c, 0, UINT64_MAX, [&](const Use& use, const Stretch& stretch) {
    for (; next < at + stretch.n_blocks; ++group, choose()) {
      Stretch block = stretch;
      block.position += (next - at) * kPageTokens;
      block.n_blocks = 1;
      p.blocks[group] = span_of(c, use, block);
      p.positions[group] = block.position;
    }
    at += stretch.n_blocks;
  });
}

// Sketch logits and |v| of the pilot's blocks. They lie alone in memory, so they are asked for
// ahead.
void look(const Context& c, Pilot& p) {
  constexpr size_t kAhead = 3;
  choose_blocks(c, p);
  const size_t n_blocks = p.n / kPageTokens;
  const auto ask = [&](size_t i) {
    const hash_index::SketchSpan& span = p.blocks[std::min(i, n_blocks - 1)];
    const size_t bytes =
        hash_index::block_bytes(hash_index::frame_kind(*span.frame), c.problem.dim_k);
    for (size_t at = 0; at < bytes; at += 64) {
      __builtin_prefetch(span.blocks + at);
    }
  };
  for (size_t i = 0; i < kAhead; ++i) {
    ask(i);
  }
  for (size_t i = 0; i < n_blocks; ++i) {
    ask(i + kAhead);
    const size_t to = i * kPageTokens;
    hash_index::scan_logits(p.blocks[i], c.rows, 0, p.block_logits, p.norms + to);
    for (uint32_t r = 0; r < c.rows; ++r) {
      std::memcpy(p.logits + r * p.n + to, p.block_logits + r * kPageTokens,
                  kPageTokens * sizeof(float));
    }
  }
}

// Sizes of a row relative to p.top[r], and the threshold with which it draws `wanted` of its keys.
// False where not half as many would be drawn.
bool solve_row(const Context& c, Pilot& p, uint32_t r, double wanted) {
  const SampledKernels& kernels = *c.table->sampled;
  float* sizes = p.sizes + r * p.n;
  kernels.sizes(p.logits + r * p.n, p.norms, p.top[r], p.n, sizes);
  p.factor[r] = threshold(kernels, sizes, p.n, wanted);
  uint64_t closed = 0;
  double open = 0;
  kernels.saturation(sizes, 1.0f / p.factor[r], p.n, &closed, &open);
  const double drawn = static_cast<double>(closed) + static_cast<double>(p.factor[r]) * open;
  return drawn >= 0.5 * std::min(wanted, static_cast<double>(p.n));
}

// The logit that `wanted` keys of a row reach.
float reached_by(const Pilot& p, uint32_t r, double wanted) {
  float* logits = p.sizes + r * p.n;  // kth_largest changes what it is given, and wants no NaN
  std::transform(p.logits + r * p.n, p.logits + (r + 1) * p.n, logits,
                 [](float x) { return x == x ? x : -INFINITY; });
  const double k = std::clamp(std::ceil(wanted), 1.0, static_cast<double>(p.n));
  return kth_largest(logits, static_cast<uint32_t>(p.n), static_cast<uint32_t>(k));
}

// Thresholds with which each row draws `wanted` keys of the pilot. Next to a key that lies some 90
// nats above the others, or seems to (one of huge norm, whose sketch is far off), these are 0 in
// fp32: none of them would be drawn, and what is drawn would look like all there is. So sizes are
// told from a lower logit then. False where that does not help: values of 0.
bool solve(const Context& c, Pilot& p, double wanted) {
  bool found = true;
  for (uint32_t r = 0; r < c.rows; ++r) {
    p.top[r] = c.table->sampled->largest(p.logits + r * p.n, p.n);
    if (!solve_row(c, p, r, wanted)) {
      p.top[r] = reached_by(p, r, wanted);
      found = solve_row(c, p, r, wanted) && found;
    }
  }
  return found;
}

// largest_size becomes the largest of c size over rows.
void unite(const Context& c, Pilot& p) {
  std::memset(p.largest_size, 0, p.n * sizeof(float));
  for (uint32_t r = 0; r < c.rows; ++r) {
    c.table->sampled->raise(p.sizes + r * p.n, p.factor[r], p.n, p.largest_size);
  }
}

// --- Without a budget ---------------------------------------------------------------------------

// Draws keys of the pilot, all with p times `share`. False where there are more than have room.
bool draw_probe(const Context& c, Pilot& p, float share) {
  const uint64_t seed = c.params().seed ^ kProbeSeed;
  uint32_t n = 0;
  for (size_t i = 0; i < p.n; ++i) {
    const float size = std::max(share * p.largest_size[i], hash_index::kMinSize);
    const uint64_t position = p.positions[i / kPageTokens] + i % kPageTokens;
    if (size < 1.0f && permanent_random(seed, position) >= size) {
      continue;
    }
    if (n == kMostProbes) {
      return false;
    }
    p.probe_position[n] = position;
    p.probe_ids[n] = n;
    p.probe_at[n] = static_cast<uint32_t>(i);
    p.probe_chance[n] = std::min(size, 1.0f);
    for (uint32_t r = 0; r < c.rows; ++r) {
      p.shares.size[size_t{r} * kMostProbes + n] = p.sizes[r * p.n + i] * p.factor[r];
      p.probe_factor[size_t{n} * c.rows + r] = static_cast<float>(p.share) / p.probe_chance[n];
    }
    ++n;
  }
  p.shares.n = n;
  return true;
}

// The state of the first and the last tokens of F, which hold most of its mass.
void eval_near_fixed(const Context& c, Pilot& p) {
  PositionRange ranges[kMostProbeRanges];
  size_t n = 0;
  const KvRun& last = c.problem.runs.back();
  uint64_t end = last.position + last.n_tokens;
  if (c.problem.visible.causal || c.problem.visible.tree != nullptr) {
    end = std::min(end, c.problem.visible.query_position + c.problem.n_query);
  }
  const uint64_t near = end - std::min(end, kProbeTail);
  for (uint32_t i = 0; i < c.prepared.head->n_fixed; ++i) {
    const PositionRange& range = c.prepared.fixed[i];
    const PositionRange parts[2] = {
        {range.begin, std::min<uint64_t>(range.end, kPageTokens)},
        {std::max({range.begin, near, uint64_t{kPageTokens}}), std::min(range.end, end)}};
    for (const PositionRange& part : parts) {
      if (part.begin < part.end && n < kMostProbeRanges) {
        ranges[n++] = part;
      }
    }
  }
  const PositionRange none{UINT64_MAX - 1, UINT64_MAX};
  Problem problem = c.problem;
  problem.visible.include =
      n > 0 ? std::span<const PositionRange>(ranges, n) : std::span<const PositionRange>(&none, 1);
  const Plan plan = make_plan(problem, c.table);
  eval_exact(problem, plan, c.prepared.exact, 0, UINT64_MAX, p.exact_scratch, p.state);
}

struct RowProbe {
  double top = 0;
  double mass = 0;  // D, relative to e^top
  double norm_o = 0;
};

// o of each row to p.o; the rest is returned.
void estimate_probe(const Context& c, Pilot& p, RowProbe* probes) {
  const Problem& problem = c.problem;
  const GatherContext context = c.gathering();
  const GatherSums sums = gather_sums_view(problem, p.sums);
  clear_sums(problem, sums);
  gather(context,
         {.kind = kGatherWeighted,
          .ids = {p.probe_ids, p.shares.n},
          .position = p.probe_position,
          .per_row = p.probe_factor},
         sums);
  const StateView fixed = state_view(problem, c.rows, p.state);
  std::memset(p.o, 0, size_t{padded_rows(c.rows)} * acc_stride(problem) * sizeof(float));
  for (uint32_t r = 0; r < c.rows; ++r) {
    RowProbe& probe = probes[r];
    const double sink = problem.sink_logits == nullptr
                            ? -INFINITY
                            : static_cast<double>(problem.sink_logits[r % problem.group]);
    probe.top = std::max({static_cast<double>(fixed.m[r]), static_cast<double>(sums.m[r]), sink});
    if (probe.top == -INFINITY) {
      continue;
    }
    const double of_fixed = std::exp(static_cast<double>(fixed.m[r]) - probe.top);
    const double of_sample = std::exp(static_cast<double>(sums.m[r]) - probe.top);
    double closed = 0;
    for (uint32_t i = 0; i < kGatherKeys; ++i) {
      closed += static_cast<double>(sums.sums[(r * kGatherSums + kSumClosed) * kGatherKeys + i]);
    }
    probe.mass = of_fixed * static_cast<double>(fixed.l[r]) + of_sample * closed +
                 std::exp(sink - probe.top);
    double o2 = 0;
    for (uint32_t d = 0; d < problem.dim_v; ++d) {
      const double numerator =
          of_fixed * static_cast<double>(fixed.o[size_t{r} * problem.dim_v + d]) +
          of_sample * static_cast<double>(sums.acc[size_t{r} * acc_stride(problem) + d]);
      const double o = probe.mass > 0 ? numerator / probe.mass : 0.0;
      p.o[size_t{r} * acc_stride(problem) + d] = static_cast<float>(o);
      o2 += o * o;
    }
    probe.norm_o = std::sqrt(o2);
  }
}

// RowMoments are what the keys that were read say of a row.
struct RowMoments {
  double mass = 0;      // sum of w times what a key stands for, over keys with p < 1
  double residual = 0;  // the same of w (s - s_hat)
  double residual2 = 0;
  double all = 0;     // sum of w times what a key stands for
  double square = 0;  // of the squares of that
  double chance = 0;  // variance of |D (o - its estimate)|^2
  double error = 0;   // sum of s - s_hat, every key the same
  double error2 = 0;  // and of its square
};

void add_key(const Context& c, Pilot& p, uint32_t r, size_t id, const RowProbe& probe, double s,
             double away, RowMoments* m) {
  const auto factor = static_cast<double>(p.probe_factor[id * c.rows + r]);
  const double w = std::exp(s - probe.top);
  const double e = s - static_cast<double>(p.logits[size_t{r} * p.n + p.probe_at[id]]);
  m->error += e;
  m->error2 += e * e;
  if (p.probe_chance[id] < 1.0f) {
    m->mass += factor * w;
    m->residual += factor * w * e;
    m->residual2 += factor * w * e * e;
  }
  m->all += factor * w;
  m->square += factor * w * factor * w;
  m->chance += factor * (factor - 1.0) * w * w * away;
  p.shares.excess[size_t{r} * kMostProbes + id] = static_cast<float>(
      std::min(factor * w * w * away / std::max(probe.mass * probe.mass, 1e-300), 1e30));
}

// Turns what was summed of a row's keys, w^2 |v - o|^2 / D^2 times what they stand for, into shares
// of (bar / eps)^2.
void scale_shares(const Context& c, Pilot& p, uint32_t r, const RowProbe& probe,
                  const RowMoments& m) {
  const ApproxParams& params = c.params();
  const double mass = std::max(m.mass, 1e-300);
  const double mean = m.residual / mass;
  const double variance = std::clamp(m.residual2 / mass - mean * mean, 0.0, 50.0);
  const double kappa =
      Kappa(static_cast<double>(params.delta))(kPlanned, kPlanDraws) * noise_growth(variance);
  // Where the sample does not grow, what a few keys say of V is not mended later: V and one
  // standard deviation of that.
  const double draws = m.all * m.all / std::max(m.square, 1e-300);
  const double unsure = may_grow(params) ? 1.0 : 1.0 + std::sqrt(2.0 / std::max(draws, 1.0));
  // |o|^2 of the estimate has the variance in it.
  const double o2 = probe.norm_o * probe.norm_o;
  const double error2 = m.chance / std::max(probe.mass * probe.mass, 1e-300);
  const double true_o2 = std::max(o2 - error2, 0.25 * o2);
  const auto eps = static_cast<double>(params.eps);
  const double scale =
      true_o2 > 0 ? unsure * kappa * kappa / (true_o2 * std::max(eps * eps, 1e-8)) : 0.0;
  for (uint32_t i = 0; i < p.shares.n; ++i) {
    float& excess = p.shares.excess[size_t{r} * kMostProbes + i];
    excess = static_cast<float>(std::min(static_cast<double>(excess) * scale, 1e30));
  }
}

// Says whether the sketch tells anything of the row. Where it is off by several nats as a rule, the
// heaviest key is hardly ever among those that it puts first, and of those one then seems to have
// all of the mass, which leaves weighted moments, and bars, of nothing.
bool is_told(const RowMoments& m, uint32_t n) {
  const double mean = n > 0 ? m.error / n : 0.0;
  return m.error2 - mean * m.error <= kMostError * kMostError * n;  // NaN is not
}

// Fills the shares of the keys that were drawn. False where the sketch says nothing of some row.
bool weigh_probe(const Context& c, Pilot& p, const RowProbe* probes) {
  const GatherContext context = c.gathering();
  const GatherList list{.ids = {p.probe_ids, p.shares.n}, .position = p.probe_position};
  BatchMaker maker(context, list);
  GatherArgs args;
  GatherBatch batch;
  alignas(64) float logits[kMaxGatherRows * kGatherKeys];
  alignas(64) float dots[kMaxGatherRows * kGatherKeys];
  alignas(64) float squares[kGatherKeys];
  RowMoments moments[kMaxApproxRows];
  while (maker.next(&args, &batch)) {
    context.kernels->logits(&args, &batch, logits);
    context.kernels->norms(batch.v, batch.elem_v, args.dim_v, squares);
    // v . o by the kernel that gives q . k.
    GatherBatch values = batch;
    values.k = batch.v;
    values.k_scale = batch.v_scale;
    values.elem_k = batch.elem_v;
    const GatherArgs by_o{.q = p.o,
                          .q_bf16 = nullptr,
                          .q_stride = args.acc_stride,
                          .rows = c.rows,
                          .rows_padded = padded_rows(c.rows),
                          .dim_k = args.dim_v,
                          .dim_v = args.dim_v,
                          .acc_stride = args.acc_stride,
                          .scale = 1.0f,
                          .softcap = 0.0f};
    context.kernels->logits(&by_o, &values, dots);
    for (uint32_t i = 0; i < batch.n; ++i) {
      const auto scale = static_cast<double>(batch.v_scale[i]);
      const double v2 = static_cast<double>(squares[i]) * scale * scale;
      for (uint32_t r = 0; r < c.rows; ++r) {
        const double o2 = probes[r].norm_o * probes[r].norm_o;
        const double away = v2 - 2 * static_cast<double>(dots[r * kGatherKeys + i]) + o2;
        add_key(c, p, r, maker.first() + i, probes[r],
                static_cast<double>(logits[r * kGatherKeys + i]), std::max(away, 0.0), moments + r);
      }
    }
  }
  bool told = true;
  for (uint32_t r = 0; r < c.rows; ++r) {
    scale_shares(c, p, r, probes[r], moments[r]);
    told = told && is_told(moments[r], p.shares.n);
  }
  return told;
}

// By how much a sample of so many keys may grow without another scan.
float reach_of(double keys) {
  return static_cast<float>(
      std::clamp(kCandidates / std::max(keys, 1.0), kLeastReach, double{kMostReach}));
}

void probe_growth(const Context& c, Pilot& p) {
  if (!solve(c, p, std::min(kProbeKeys, static_cast<double>(p.n) / 2))) {
    c.prepared.head->answer_exactly = 1;
    return;
  }
  unite(c, p);
  for (float share = 1.0f; !draw_probe(c, p, share);) {
    share /= 2;
  }
  RowProbe probes[kMaxApproxRows];
  double growth[kMaxApproxRows];
  eval_near_fixed(c, p);
  estimate_probe(c, p, probes);
  c.prepared.head->n_probed = p.shares.n;
  if (!weigh_probe(c, p, probes)) {
    c.prepared.head->answer_exactly = 1;
    return;
  }
  solve_growth(p.shares, 1.0 / p.share, growth);
  for (uint32_t r = 0; r < c.rows; ++r) {
    p.factor[r] *= static_cast<float>(growth[r]);
  }
  unite(c, p);
  uint64_t closed = 0;
  double open = 0;
  c.table->sampled->saturation(p.largest_size, 1.0f, p.n, &closed, &open);
  const double keys = p.share * (static_cast<double>(closed) + open);
  const double most = max_read_fraction(c.params(), c.problem, c.plan->n_keys_present) *
                      static_cast<double>(c.plan->n_keys_present);
  const bool grows = may_grow(c.params());
  c.prepared.head->answer_exactly = keys > (grows ? kSurelyMore : 1.0) * most ? 1 : 0;
  if (grows) {
    const auto pays = static_cast<float>(most / std::max(keys, 1.0));
    const auto more = static_cast<float>(std::max(c.rows, kFewRows) - kFewRows);
    const float share = std::clamp(pays, kFirstShare, kFirstShare + kShareOfRow * more);
    for (uint32_t r = 0; r < c.rows; ++r) {
      p.factor[r] *= share;
    }
    c.prepared.head->reach = reach_of(static_cast<double>(share) * keys);
  }
}

}  // namespace

namespace {

// For each row, the square of its bar over eps with all c grown.
void squared_bars(const KeyShares& keys, const double* growth, double* out) {
  constexpr uint32_t kLanes = 16;
  float sums[kMaxApproxRows][kLanes] = {};
  for (uint32_t i = 0; i < keys.n; i += kLanes) {
    // Lanes behind the last key have no excess.
    float chance[kLanes];
    float odds[kLanes];
    std::fill_n(chance, kLanes, hash_index::kMinSize);
    for (uint32_t r = 0; r < keys.rows; ++r) {
      const float* size = keys.size + size_t{r} * keys.stride + i;
      const auto factor = static_cast<float>(growth[r]);
      for (uint32_t j = 0; j < kLanes; ++j) {
        chance[j] = std::max(chance[j], factor * size[j]);
      }
    }
    for (uint32_t j = 0; j < kLanes; ++j) {
      odds[j] = std::max(1.0f / chance[j] - 1.0f, 0.0f);
    }
    for (uint32_t r = 0; r < keys.rows; ++r) {
      const float* excess = keys.excess + size_t{r} * keys.stride + i;
      for (uint32_t j = 0; j < kLanes; ++j) {
        sums[r][j] += excess[j] * odds[j];
      }
    }
  }
  for (uint32_t r = 0; r < keys.rows; ++r) {
    out[r] = std::accumulate(sums[r], sums[r] + kLanes, 0.0);
  }
}

}  // namespace

void solve_growth(const KeyShares& keys, double least, double* growth) {
  constexpr int kSteps = 12;
  constexpr double kDamping = 0.8;
  constexpr double kTolerance = 0.03;
  for (uint32_t r = 0; r < keys.rows; ++r) {
    const size_t at = size_t{r} * keys.stride + keys.n;
    const size_t pad = (16 - keys.n % 16) % 16;
    std::fill_n(keys.size + at, pad, 0.0f);
    std::fill_n(keys.excess + at, pad, 0.0f);
  }
  double ratio[kMaxApproxRows];
  std::fill_n(growth, keys.rows, std::max(least, 1.0));
  for (int step = 0;; ++step) {
    squared_bars(keys, growth, ratio);
    const double worst = *std::max_element(ratio, ratio + keys.rows);
    if (step == kSteps) {
      // All rows together do what the small steps have not come to.
      for (uint32_t r = 0; r < keys.rows; ++r) {
        growth[r] = std::min(growth[r] * std::clamp(worst, 1.0, 64.0), 1e9);
      }
      return;
    }
    bool done = true;
    for (uint32_t r = 0; r < keys.rows; ++r) {
      done =
          done && (std::abs(ratio[r] - 1.0) < kTolerance || (ratio[r] < 1.0 && growth[r] <= least));
    }
    if (done) {
      return;
    }
    for (uint32_t r = 0; r < keys.rows; ++r) {
      const double factor = std::pow(std::clamp(ratio[r], 1.0 / 64, 64.0), kDamping);
      growth[r] = std::clamp(growth[r] * factor, least, 1e9);
    }
  }
}

float threshold(const SampledKernels& kernels, const float* sizes, size_t n, double wanted) {
  uint64_t closed = 0;
  double open = 0;
  kernels.saturation(sizes, INFINITY, n, &closed, &open);
  double c = 0;
  // c rises towards the solution: each round takes out the keys that it saturates.
  for (int round = 0; round < 64 && open > 0; ++round) {
    const double next = (wanted - static_cast<double>(closed)) / open;
    if (!(next > c)) {
      break;
    }
    c = next;
    uint64_t reaching = 0;
    kernels.saturation(sizes, static_cast<float>(1.0 / c), n, &reaching, &open);
    if (reaching == closed) {
      break;
    }
    closed = reaching;
    if (static_cast<double>(closed) >= wanted) {
      break;
    }
  }
  return static_cast<float>(std::clamp(c, 1e-30, 1e30));
}

namespace {

// Of n_keys: what may be read for the time of an exact answer, or less than nothing.
double paying_fraction(const Problem& problem, uint64_t n_keys) {
  const double row = static_cast<double>(row_bytes(problem)) * (13.5 / 512);  // ns
  constexpr double kScan = 1.5;
  constexpr double kAlone = 14;
  constexpr double kFixed = 90'000;  // a pilot 60, plan, end and shape of the error 30 us
  const double fixed = kFixed / static_cast<double>(std::max<uint64_t>(n_keys, 1));
  return 0.7 * (row - kScan - fixed) / (row + kAlone);
}

}  // namespace

double max_read_fraction(const ApproxParams& params, const Problem& problem, uint64_t n_keys) {
  constexpr double kLeast = 0.02;
  return params.max_read_fraction > 0 ? static_cast<double>(params.max_read_fraction)
                                      : std::max(paying_fraction(problem, n_keys), kLeast);
}

uint64_t usual_keys(const ApproxParams& params, uint64_t rows) {
  // A thousand for each row at 3 %, by the square of eps.
  const double ratio = 0.03 / std::max(static_cast<double>(params.eps), 1e-3);
  return static_cast<uint64_t>(1000.0 * ratio * ratio) * rows;
}

bool is_worth_a_pilot(const ApproxParams& params, const Problem& problem, uint64_t n_keys) {
  if (params.max_read_fraction > 0) {
    return true;  // whoever knows what pays has asked
  }
  constexpr double kMostUsual = 0.2;
  const auto n = static_cast<double>(n_keys);
  const uint64_t rows = uint64_t{problem.n_query} * problem.group;
  const double usual = std::min(static_cast<double>(usual_keys(params, rows)), kMostUsual * n);
  const double least = kProbeKeys * static_cast<double>(rows);
  return std::max(usual, least) <= paying_fraction(problem, n_keys) * n;
}

size_t pilot_scratch_bytes(const ApproxInput& input, const Plan& exact, uint64_t n_keys) {
  Carver carver(nullptr);
  carve_pilot(input, exact, n_keys, carver);
  return carver.used_bytes();
}

void find_bars(const Context& c, void* scratch) {
  Carver carver(scratch);
  Pilot p = carve_pilot(*c.input, c.exact, c.plan->n_keys_indexed, carver);
  c.prepared.head->answer_exactly = 0;
  const double wanted = keys_above_bars(c, p.share) / p.share;
  const bool tells = wanted < static_cast<double>(p.n);
  if (tells) {
    look(c, p);
  }
  for (uint32_t r = 0; r < c.rows; ++r) {
    float* logits = p.logits + r * p.n;
    // NaN is never above anything, and kth_largest wants none.
    for (size_t i = 0; tells && i < p.n; ++i) {
      logits[i] = logits[i] == logits[i] ? logits[i] : -INFINITY;
    }
    c.prepared.head->log_c[r] =
        tells ? kth_largest(logits, static_cast<uint32_t>(p.n), static_cast<uint32_t>(wanted) + 1)
              : -INFINITY;
  }
}

void find_thresholds(const Context& c, void* scratch) {
  Carver carver(scratch);
  Pilot p = carve_pilot(*c.input, c.exact, c.plan->n_keys_indexed, carver);
  look(c, p);
  c.prepared.head->answer_exactly = 0;
  c.prepared.head->reach = may_grow(c.params()) ? kReach : 1.0f;
  if (c.params().budget > 0) {
    const auto budget = static_cast<double>(c.params().budget);
    const bool found = solve(c, p, budget / p.share);
    c.prepared.head->answer_exactly = found ? 0 : 1;
    if (c.params().mode == ApproxMode::kBalanced) {
      c.prepared.head->reach = std::min(reach_of(budget * c.rows), float{kMostBudgets});
    }
  } else {
    probe_growth(c, p);
  }
  for (uint32_t r = 0; r < c.rows; ++r) {
    float& log_c = c.prepared.head->log_c[r];
    log_c = std::log(p.factor[r]) - p.top[r];
    if (!(std::abs(log_c) < kMostLogC)) {
      c.prepared.head->answer_exactly = 1;
    }
  }
}

}  // namespace kvm::attention
